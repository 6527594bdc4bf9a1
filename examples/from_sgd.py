"""An SGD recipe, translated: at gamma = 0 the two take the same steps, below it Anon goes its own way."""

import torch

from anon_optim import Anon


def train(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    optimizer, x = make(model.parameters()), torch.randn(256, 8, dtype=torch.float64)
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


print("SGD             ", train(lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-4)))
for gamma in (0.0, -0.1, 0.2):
    print(f"Anon gamma {gamma:4}", train(lambda ps, g=gamma: Anon.from_sgd(ps, 0.05, 0.9, 1e-4, gamma=g)))
