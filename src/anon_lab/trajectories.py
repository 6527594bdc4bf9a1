"""Many runs of one optimizer side by side on a function of two variables, and the learning-rate search they share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from anon_lab import optimizers
from anon_lab.problems import Problem
from anon_optim import Anon

RATES = tuple(10 ** (k / 6 - 10) for k in range(79))
"""The learning rates every optimizer is tried at: from 1e-10 to 1e3, six a decade."""


@dataclass(frozen=True)
class Contender:
    """An optimizer as it stands in a figure."""

    name: str
    gamma: float | None = None
    """Of Anon alone."""
    guarded: bool = False
    """Anon with its default guards; otherwise it is the printed algorithm."""

    @property
    def label(self) -> str:
        if self.gamma is None:
            return self.name
        return f"γ = {self.gamma:g}".replace("-", "−") + (" (guarded)" if self.guarded else "")

    def build(self, params: list[Tensor], lr: float = 1.0) -> Optimizer:
        """The optimizer at one learning rate; nobody decays weights."""
        if self.gamma is not None:
            return (Anon if self.guarded else Anon.paper)(params, lr=lr, gamma=self.gamma, foreach=len(params) > 1)
        if self.name == "AdaBound":
            # Its final_lr is an SGD's; the usual pair is 1e-3 and 0.1, and the ratio is kept over the search.
            return optimizers.make("AdaBound", params, lr=lr, weight_decay=0.0, final_lr=100 * lr)
        return optimizers.make(self.name, params, lr=lr, weight_decay=0.0)


def anons(gammas: Sequence[float], guarded: bool = False) -> list[Contender]:
    return [Contender("Anon", gamma, guarded) for gamma in gammas]


def trace(
    problem: Problem, contender: Contender, starts: Tensor, rates: Tensor, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Run from each start (n, 2) at its own rate (n,) up to the last step of `keep`.

    Gives the points (steps kept, n, 2) and the lengths of the first steps (n,); step 0 is the start. All is done in
    the precision of the starts.
    """
    # Without weight decay no optimizer here reads its parameter, and its update is proportional to lr. So the
    # optimizer moves an offset that starts every step at zero with lr = 1, and each run adds it times its own lr.
    # The guards take statistics over a tensor, so there each run has its own; all else works by coordinate.
    sizes = [1] * len(starts) if contender.guarded else [len(starts)]
    offsets = [torch.zeros(size, 2, dtype=starts.dtype, requires_grad=True) for size in sizes]
    points, scale = starts.clone(), rates.to(starts.dtype).unsqueeze(-1)
    wanted, kept = set(keep), [starts] if 0 in keep else []

    def loss() -> Tensor:
        return problem.f(points + torch.cat(offsets)).sum()

    first = torch.zeros_like(rates)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for AdaHessian's random directions
        optimizer = contender.build(offsets)
        for t in range(1, max(keep) + 1):
            optimizers.take_step(optimizer, loss)
            with torch.no_grad():
                move = scale * torch.cat(offsets)
                torch._foreach_zero_(offsets)
            points += move
            if t == 1:
                first = move.norm(dim=-1)
            if t in wanted:
                kept.append(points.clone())
    return torch.stack(kept), first


@dataclass(frozen=True)
class Path:
    """A run as it is drawn."""

    steps: list[int]
    x: list[float]
    y: list[float]
    loss: list[float]


def path_of(problem: Problem, steps: Sequence[int], points: Tensor) -> Path:
    x, y = points.unbind(-1)
    return Path(list(steps), x.tolist(), y.tolist(), problem.f(points).tolist())


def steps_to_keep(last: int, dense: int = 500) -> list[int]:
    """Every step up to `dense`, then about a hundred more a doubling: what an eye can tell apart on a log axis."""
    late = {round(dense * 2 ** (k / 100)) for k in range(int(100 * math.log2(max(last / dense, 1))) + 1)}
    return sorted({*range(min(dense, last) + 1), *(t for t in late if t < last), last})


def follow(problem: Problem, contender: Contender, lr: float, keep: Sequence[int]) -> Path:
    """One run from the problem's start."""
    start, rate = (torch.tensor([value], dtype=torch.float64) for value in (problem.start, lr))
    points, _ = trace(problem, contender, start, rate, keep)
    return path_of(problem, keep, points[:, 0])


@dataclass(frozen=True)
class Search:
    """What one optimizer did at every learning rate, and its path at the best."""

    name: str
    gamma: float | None
    guarded: bool
    label: str
    rates: list[float]
    loss: list[float]
    """At the last step [learning rate]; inf where it diverged."""
    distance: list[float]
    """From the optimum at the last step [learning rate]; inf where it diverged."""
    first_step: list[float]
    """How far the first step went [learning rate]."""
    best: int
    """Which learning rate ended lowest."""
    path: Path

    @property
    def lr(self) -> float:
        return self.rates[self.best]

    @property
    def at_edge(self) -> bool:
        return self.best in (0, len(self.rates) - 1)

    def within(self, radius: float) -> int:
        """How many learning rates end this near to the optimum."""
        return sum(distance < radius for distance in self.distance)


def search(problem: Problem, contender: Contender, steps: int, rates: Sequence[float] = RATES) -> Search:
    """Try every learning rate from the same start; the best is the one with the lowest loss at the last step."""
    tried = torch.tensor(rates, dtype=torch.float64)
    keep = steps_to_keep(steps)
    starts = torch.tensor([problem.start], dtype=torch.float64).expand(len(tried), 2)
    points, first = trace(problem, contender, starts, tried, keep)
    loss = problem.f(points[-1]).nan_to_num(math.inf, posinf=math.inf)
    distance = problem.distance(points[-1]).nan_to_num(math.inf, posinf=math.inf)
    best = int(loss.argmin())
    return Search(
        contender.name,
        contender.gamma,
        contender.guarded,
        contender.label,
        list(rates),
        loss.tolist(),
        distance.tolist(),
        first.tolist(),
        best,
        path_of(problem, keep, points[:, best]),
    )
