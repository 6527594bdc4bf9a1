"""`python -m anon_lab.theory`: how loose the bounds are, measured on two random problems (ten seconds)."""

import numpy as np
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from anon_lab.theory import TheoremSchedule, convex_regret_bound, nonconvex_bound, v_range
from anon_optim import Anon, Box, Guard

DIM, STEPS, LR, BETA1 = 10, 1000, 0.1, 0.9
GAMMAS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
# The printed algorithm where eps keeps v in a narrow range and where it does not, and the default.
VARIANTS: tuple[tuple[float, Guard | None], ...] = ((1e-4, None), (1e-16, None), (1e-16, Guard()))
MOMENTUM_DECAY = 0.99


def regret(gamma: float, eps: float, guard: Guard | None) -> float:
    """On linear losses with slopes in [-1, 1] that drift one way, over the box [-1, 1]^d from 0."""
    rng = np.random.default_rng(0)
    drift = rng.choice([-0.2, 0.2], size=DIM)
    slopes = torch.from_numpy(drift + rng.uniform(-0.8, 0.8, size=(STEPS, DIM)))
    x = torch.zeros(DIM, dtype=torch.float64)
    lost = 0.0
    optimizer = _anon(x, gamma, eps, guard, Box(-1.0, 1.0))
    schedule = TheoremSchedule(optimizer, momentum_decay=MOMENTUM_DECAY)
    for slope in slopes:
        lost += (slope @ x).item()
        x.grad = slope
        optimizer.step()
        schedule.step()
    return lost + slopes.sum(0).abs().sum().item()


def mean_squared_gradient(gamma: float, eps: float, guard: Guard | None) -> float:
    """Of f(x) = sum of x_i^2 / (1 + x_i^2) from x_i = 1, seen with noise in [-0.35, 0.35]."""
    rng = np.random.default_rng(1)
    noises = torch.from_numpy(rng.uniform(-0.35, 0.35, size=(STEPS, DIM)))
    x = torch.ones(DIM, dtype=torch.float64)
    total = 0.0
    optimizer = _anon(x, gamma, eps, guard, None)
    schedule = TheoremSchedule(optimizer)
    for noise in noises:
        gradient = 2 * x / (1 + x**2) ** 2
        total += (gradient @ gradient).item()
        x.grad = gradient + noise
        optimizer.step()
        schedule.step()
    return total / STEPS


def _anon(x: Tensor, gamma: float, eps: float, guard: Guard | None, project: Box | None) -> Anon:
    return Anon([x], LR, gamma, (BETA1, 0.999), eps, guard=guard, project=project)


def bounds(T: int, gamma: float, eps: float, guard: Guard | None) -> tuple[float, float]:
    """On the regret and on the mean squared gradient of these problems."""
    convex = convex_regret_bound(
        T, dim=DIM, diameter=2.0, gradient_bound=1.0, lr=LR, gamma=gamma, beta1=BETA1, momentum_decay=MOMENTUM_DECAY,
        eps=eps, guard=guard,
    )  # fmt: skip
    nonconvex = nonconvex_bound(
        T, dim=DIM, smoothness=2.0, gap=DIM / 2, gradient_bound=1.0, lr=LR, gamma=gamma, beta1=BETA1, eps=eps,
        guard=guard,
    )  # fmt: skip
    return convex, nonconvex


def first_useful(gamma: float, eps: float, guard: Guard | None) -> int:
    """The first power of ten for T at which the regret bound is below d D G T, which nobody can lose more than."""
    T = 1
    while bounds(T, gamma, eps, guard)[0] >= DIM * 2.0 * T:
        T *= 10
    return T


def _short(number: float) -> str:
    return f"{number:.2g}".replace("e+0", "e").replace("e+", "e")


COLUMNS = ("", "eps", "γ", "C_u/C_l", "regret", "bound", "from T", "|∇f|²", "bound")
CAPTION = "from T: where the regret bound first says more than d D G T, by powers of ten"


def main() -> None:
    console = Console()
    title = f"What Anon lost in {STEPS} steps in {DIM} dimensions, and what it could have lost"
    table = Table(title=title, caption=CAPTION, box=SIMPLE, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    cases = [(*variant, gamma) for variant in VARIANTS for gamma in GAMMAS]
    for eps, guard, gamma in track(cases, "measuring", console=console, transient=True):
        low, high = v_range(gamma, 1.0, eps, guard, DIM)
        convex, nonconvex = bounds(STEPS, gamma, eps, guard)
        numbers = (
            gamma,
            high / low,
            regret(gamma, eps, guard),
            convex,
            first_useful(gamma, eps, guard),
            mean_squared_gradient(gamma, eps, guard),
            nonconvex,
        )
        name = "printed" if guard is None else "default"
        table.add_row(name, f"{eps:.0e}", *map(_short, numbers), end_section=gamma == GAMMAS[-1])
    console.print(table)


if __name__ == "__main__":
    main()
