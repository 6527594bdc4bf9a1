"""AdamW's recipe with one more number to turn."""

import torch

from anon_optim import Anon, decay_groups

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = Anon(decay_groups(model, weight_decay=0.1), lr=1e-2, gamma=1.5, lr_scale="tensor", max_grad_norm=1.0)
x = torch.randn(256, 8)
for _ in range(200):
    optimizer.zero_grad()
    loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
print(*optimizer.diagnostics(), sep="\n")
