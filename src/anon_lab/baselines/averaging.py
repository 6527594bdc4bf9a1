"""SGD with momentum whose evaluated weights are an average: SWA, Lookahead and Lookaround."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._base import Baseline, Group, State, decay, zeros


class Averaging(Baseline):
    """SGD with momentum, with weights to evaluate by that are not those it trains.

    buffer <- momentum buffer + g + weight_decay theta
    theta <- theta - lr buffer
    """

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the parameters hold the average. Statistics of BatchNorm are not touched: they belong
        to the trained weights, and have to be estimated anew for the average."""
        trained: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if (average := self._average(p, self.state.get(p, {}))) is not None:
                            trained.append((p, p.detach().clone()))
                            p.copy_(average)
            yield
        finally:
            with torch.no_grad():
                for p, value in trained:
                    p.copy_(value)

    def _average(self, p: Tensor, state: State) -> Tensor | None:
        """The weights to evaluate with, or None where they are the trained ones."""
        raise NotImplementedError


def _descend(p: Tensor, grad: Tensor, buffer: Tensor, group: Group) -> None:
    buffer.mul_(group["momentum"]).add_(decay(p, grad, group))
    p.add_(buffer, alpha=-group["lr"])


def _defaults(lr: float, momentum: float, weight_decay: float, **more: Any) -> dict[str, Any]:
    return {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "decoupled_weight_decay": False, **more}


class SWA(Averaging):
    """Stochastic weight averaging (Izmailov et al., 2018, arXiv:1803.05407).

    SGD with momentum; from step start * total_steps on, every `every` steps,

        average <- (n average + theta) / (n + 1),    n <- n + 1

    The paper averages once an epoch over the last quarter of training, at a constant or cyclic learning rate, which is
    the schedule's business. Without `total_steps` all steps are averaged.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        start: float = 0.75,
        every: int = 1,
        total_steps: int | None = None,
    ) -> None:
        super().__init__(
            params, _defaults(lr, momentum, weight_decay, start=start, every=every, total_steps=total_steps)
        )

    def _update(self, group: Group) -> None:
        first = int(group["start"] * (group["total_steps"] or 0)) + 1
        for p, grad, state in self._gradients(group):
            (buffer,) = zeros(state, p, "momentum_buffer")
            _descend(p, grad, buffer, group)
            since = state["step"] - first
            if since >= 0 and since % group["every"] == 0:
                (average,) = zeros(state, p, "average")
                average.lerp_(p, 1 / (since // group["every"] + 1))

    def _average(self, p: Tensor, state: State) -> Tensor | None:
        return state.get("average")


class Lookahead(Averaging):
    """Lookahead around SGD with momentum (Zhang et al., 2019, arXiv:1907.08610).

    Every k steps the slow weights go a share of the way to the fast ones, which start again from there:

        slow <- slow + alpha (theta - slow),    theta <- slow

    The momentum is kept across, as in the paper's default. Evaluation is with the slow weights.
    Written here because pytorch_optimizer 4.1.0's Lookahead is a wrapper whose state_dict is not that of an optimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        k: int = 5,
        alpha: float = 0.5,
    ) -> None:
        super().__init__(params, _defaults(lr, momentum, weight_decay, k=k, alpha=alpha))

    def _update(self, group: Group) -> None:
        for p, grad, state in self._gradients(group):
            slow = state.setdefault("slow", p.detach().clone())
            (buffer,) = zeros(state, p, "momentum_buffer")
            _descend(p, grad, buffer, group)
            if state["step"] % group["k"] == 0:
                slow.lerp_(p, group["alpha"])
                p.copy_(slow)

    def _average(self, p: Tensor, state: State) -> Tensor | None:
        return state.get("slow")


class Lookaround(Averaging):
    """Lookaround (Zhang et al., 2023, arXiv:2306.07684).

    Several copies of the network, the `heads`, start from one point, train k steps each by SGD with momentum, every one
    under a data augmentation of its own, and are then replaced by their average; each keeps its momentum.

    One `step()` moves one head: the parameters hold head `optimizer.head` (0, 1, ..., heads - 1, 0, ...), so the loop
    is the usual one, provided that it augments the batch in the way that belongs to `optimizer.head`. An averaging
    comes every k * heads steps. As in the paper's comparisons, a step is one batch for this optimizer and for others.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        heads: int = 3,
        k: int = 5,
    ) -> None:
        super().__init__(params, _defaults(lr, momentum, weight_decay, heads=heads, k=k, turn=0))

    @property
    def head(self) -> int:
        """Which head the parameters now hold, and the coming step will move."""
        group = self.param_groups[0]
        return group["turn"] % group["heads"]

    def _update(self, group: Group) -> None:
        heads = group["heads"]
        head = group["turn"] % heads
        group["turn"] += 1
        for p in group["params"]:
            state = self.state[p]
            if "heads" not in state:
                state["heads"] = torch.stack([p.detach()] * heads)
                state["momentum_buffers"] = torch.zeros_like(state["heads"])
            if p.grad is not None:
                _descend(p, p.grad, state["momentum_buffers"][head], group)
            state["heads"][head].copy_(p)
            if group["turn"] % (heads * group["k"]) == 0:
                state["heads"].copy_(state["heads"].mean(0).expand_as(state["heads"]))
            p.copy_(state["heads"][group["turn"] % heads])

    def _average(self, p: Tensor, state: State) -> Tensor | None:
        return state["heads"].mean(0) if "heads" in state else None
