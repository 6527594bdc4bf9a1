"""The theorems' schedules: lr / t^p and beta1 lambda^(t-1), as a torch scheduler for any optimizer."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class TheoremSchedule(LRScheduler):
    """At step t = 1, 2, 3, ... each param group has

        lr_t = lr t^-p                 beta_{1,t} = beta1 momentum_decay^(t-1)

    where lr and beta1 are what the group began with. Call `step()` after each `optimizer.step()`, as with every
    scheduler of torch; it is saved and loaded as they are.

    Args:
        optimizer: any optimizer whose groups have `lr`, and `betas` where momentum_decay is not 1.
        p: how fast the learning rate falls, >= 0. Theorem 3 has 1/2, Theorem 4 any number in (0, 1).
        momentum_decay: lambda, in (0, 1]. Theorem 3 gives O(sqrt(T)) below 1; Theorem 4 has 1.
        last_epoch: as in torch; -1 begins anew.

    Anon divides m by 1 - beta1^t with the beta1 of the moment, the theorems' algorithm by nothing; the bounds of
    :mod:`anon_lab.theory` hold for both. `bias_correction=False` gives the latter.
    """

    def __init__(self, optimizer: Optimizer, p: float = 0.5, momentum_decay: float = 1.0, last_epoch: int = -1) -> None:
        if not p >= 0:
            raise ValueError(f"Invalid p: {p!r}, expected a number >= 0")
        if not 0 < momentum_decay <= 1:
            raise ValueError(f"Invalid momentum_decay: {momentum_decay!r}, expected a number in (0, 1]")
        self.p = p
        self.momentum_decay = momentum_decay
        for index, group in enumerate(optimizer.param_groups):
            if "betas" in group:
                # in the group, where torch keeps `initial_lr`, so that it is saved with the optimizer
                group.setdefault("initial_beta1", group["betas"][0])
            elif momentum_decay != 1:
                raise ValueError(
                    f"Invalid momentum_decay: {momentum_decay!r}, expected 1 for an optimizer without betas "
                    f"(param group {index})"
                )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        t = self.last_epoch + 1
        lrs: list[float | Tensor] = self.base_lrs
        return [lr * t**-self.p for lr in lrs]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.momentum_decay == 1:
            return
        for group in self.optimizer.param_groups:
            beta1 = group["initial_beta1"] * self.momentum_decay**self.last_epoch
            group["betas"] = (beta1, *group["betas"][1:])
