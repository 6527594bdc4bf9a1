"""Sophia: momentum divided by a rarely renewed diagonal Hessian, each coordinate's step clipped."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, decay, zeros
from anon_lab.baselines._curvature import Hutchinson


class SophiaG(Baseline):
    """Sophia with the Gauss-Newton-Bartlett estimator (Liu et al., 2023, arXiv:2305.14342).

    Before steps 1, 1 + interval, 1 + 2 interval, ... (`hessian_due`), with g' the gradient of the mean loss over
    `batch_size` labels that were drawn from the model's own output (call backward on it, then `update_hessian()`):

        h <- beta2 h + (1 - beta2) batch_size g'^2

    At every step, with g the gradient of the ordinary loss:

        m <- beta1 m + (1 - beta1) g
        theta <- theta - lr clip(m / max(rho h, eps), -1, 1)             after (1 - lr weight_decay) theta

    lr is thus the largest step of a coordinate. `rho` is the paper's gamma. In a language model every token is a
    label, so batch_size counts tokens; it can be given here, or to each `update_hessian`. The authors' code puts it
    beside rho, which is the same as long as it stays constant, and adds eps = 1e-15 instead of taking a maximum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.965, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        rho: float = 0.05,
        interval: int = 10,
        batch_size: int | None = None,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "rho": rho,
                "interval": interval,
                "batch_size": batch_size,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    @property
    def hessian_due(self) -> bool:
        """Whether `update_hessian()` should be called before the coming step."""
        return self._steps_taken % self.param_groups[0]["interval"] == 0

    @torch.no_grad()
    def update_hessian(self, batch_size: int | None = None) -> None:
        """Take the gradients that are there now, of the mean loss on sampled labels, into h."""
        for group in self.param_groups:
            beta2 = group["betas"][1]
            labels = group["batch_size"] if batch_size is None else batch_size
            if labels is None:
                raise ValueError("batch_size must be given: over how many sampled labels the loss is a mean")
            for p in group["params"]:
                if p.grad is None:
                    continue
                (h,) = zeros(self.state[p], p, "hessian")
                h.mul_(beta2).addcmul_(p.grad, p.grad, value=(1 - beta2) * labels)

    def _update(self, group: Group) -> None:
        for p, grad, state in self._gradients(group):
            _clipped_step(p, grad, state, group)


class SophiaH(Hutchinson):
    """Sophia with Hutchinson's estimator (Liu et al., 2023, arXiv:2305.14342).

    As :class:`SophiaG`, but every `interval` steps, with normally distributed z,

        h <- beta2 h + (1 - beta2) z * (H z)

    Written here because pytorch_optimizer 4.1.0's SophiaH has other units: its learning rate is that of the paper
    divided by its clip p, which also takes the place of rho.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 6e-4,
        betas: tuple[float, float] = (0.96, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        rho: float = 0.01,
        interval: int = 10,
        decoupled_weight_decay: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "rho": rho,
                "interval": interval,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    def noise_like(self, p: Tensor) -> Tensor:
        return torch.randn_like(p)

    def _update(self, group: Group) -> None:
        for p, grad, state in self._gradients(group):
            (h,) = zeros(state, p, "hessian")
            estimate = self._estimate(state)
            if estimate is not None:
                h.lerp_(estimate, 1 - group["betas"][1])
            _clipped_step(p, grad, state, group)


def _clipped_step(p: Tensor, grad: Tensor, state: dict[str, Any], group: Group) -> None:
    m, h = zeros(state, p, "exp_avg", "hessian")
    grad = decay(p, grad, group)
    m.lerp_(grad, 1 - group["betas"][0])
    update = m / (group["rho"] * h).clamp_(min=group["eps"])
    p.add_(update.clamp_(-1, 1), alpha=-group["lr"])
