"""What the baselines share: checked numbers, the closure, and the two kinds of weight decay."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Group = dict[str, Any]
State = dict[str, Any]

_SHARE = (lambda x: 0 <= x < 1, "a number in [0, 1)")
_NOT_NEGATIVE = (lambda x: x >= 0, "a number of at least 0")
_POSITIVE = (lambda x: x > 0, "a number above 0")
_COUNT = (lambda x: x == int(x) >= 1, "a whole number of at least 1")
_COUNT_OR_NONE = (lambda x: x is None or x == int(x) >= 1, "None or a whole number of at least 1")

# For each setting, which has one meaning in all baselines, what a right value is, and the words for it.
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": _NOT_NEGATIVE,
    "betas": (lambda x: len(x) == 2 and all(0 <= beta < 1 for beta in x), "two numbers in [0, 1)"),
    "beta1": _SHARE,
    "momentum": _SHARE,
    "eps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adamw_ratio": _POSITIVE,
    "alpha": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "batch_size": _COUNT_OR_NONE,
    "damping": _NOT_NEGATIVE,
    "delta": _POSITIVE,
    "every": _COUNT,
    "heads": _COUNT,
    "hessian_power": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "hyper_lr": _NOT_NEGATIVE,
    "hyper_momentum": _SHARE,
    "interval": _COUNT,
    "k": _COUNT,
    "partial": (lambda x: 0 <= x <= 0.5, "a number in [0, 0.5]"),
    "rho": _POSITIVE,
    "start": (lambda x: 0 <= x < 1, "a share of the run in [0, 1)"),
    "total_steps": _COUNT_OR_NONE,
}


class Baseline(Optimizer):
    """A torch optimizer of which a subclass writes `_update`, one step of one param group."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        values = {**self.defaults, **param_group}
        for name, (right, words) in _CHECKS.items():
            if name in values and not right(values[name]):
                raise ValueError(f"Invalid {name}: {values[name]}, expected {words}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    def _update_all(self) -> None:
        for group in self.param_groups:
            self._update(group)

    def _update(self, group: Group) -> None:
        raise NotImplementedError

    def _gradients(self, group: Group) -> Iterator[tuple[Tensor, Tensor, State]]:
        """Each parameter that has a gradient, with it and its state, in which "step" has just been counted on."""
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            yield p, p.grad, state

    @property
    def _steps_taken(self) -> int:
        params = (p for group in self.param_groups for p in group["params"])
        return max((self.state[p].get("step", 0) for p in params if p in self.state), default=0)


def decay(p: Tensor, grad: Tensor, group: Group) -> Tensor:
    """Decay p by lr * weight_decay (decoupled), or return the gradient with weight_decay * p added (coupled)."""
    if group["weight_decay"] == 0:
        return grad
    if group["decoupled_weight_decay"]:
        p.mul_(1 - group["lr"] * group["weight_decay"])
        return grad
    return grad.add(p, alpha=group["weight_decay"])


def zeros(state: State, p: Tensor, *names: str) -> list[Tensor]:
    """The named tensors of the state, zeros at first."""
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return [state[name] for name in names]
