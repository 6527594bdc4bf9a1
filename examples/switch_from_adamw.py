"""Start with AdamW, go on with Anon from its checkpoint."""

import torch

from anon_optim import Anon

torch.manual_seed(0)
model, x = torch.nn.Linear(8, 1), torch.randn(256, 8)


def step(optimizer):
    optimizer.zero_grad()
    loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
before = [step(adamw) for _ in range(100)]
anon = Anon(model.parameters(), lr=1e-2, gamma=1.0, weight_decay=1e-2)
anon.load_adamw_state(adamw.state_dict())
after = [step(anon) for _ in range(100)]
print(f"AdamW {before[0]:.4f} -> {before[-1]:.4f}, then Anon -> {after[-1]:.4f}")
