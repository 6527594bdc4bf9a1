"""The small problems of the paper's pictures: functions of two variables, and the noisy online problem.

Every function takes points of shape (..., 2) and gives values of shape (...), so that many runs go side by side.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Point = tuple[float, float]


@dataclass(frozen=True)
class Problem:
    """A function of two variables, with what is needed to start on it and to draw it."""

    name: str
    title: str
    """Its formula, for headings."""
    f: Callable[[Tensor], Tensor]
    start: Point
    optimum: Point
    """Where f is smallest; f is 0 there."""
    window: tuple[Point, Point]
    """The part that is drawn, as (x from, x to), (y from, y to)."""

    def distance(self, points: Tensor) -> Tensor:
        """How far points are from the optimum."""
        return (points - torch.tensor(self.optimum, dtype=points.dtype)).norm(dim=-1)


def beale(points: Tensor) -> Tensor:
    """ln(1 + Beale) / 10 with Beale(x, y) = (1.5 - x + xy)^2 + (2.25 - x + xy^2)^2 + (2.625 - x + xy^3)^2."""
    x, y = points.unbind(-1)
    squares = [(c - x + x * y**k) ** 2 for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))]
    return torch.log1p(sum(squares[1:], squares[0])) / 10


def rosenbrock(points: Tensor) -> Tensor:
    """(1 - x)^2 + 100 (y - x^2)^2: a narrow, curved valley."""
    x, y = points.unbind(-1)
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def rastrigin(points: Tensor) -> Tensor:
    """20 + x^2 - 10 cos(2 pi x) + y^2 - 10 cos(2 pi y): a bowl full of local minima, near every integer point."""
    return (10 + points**2 - 10 * torch.cos(2 * math.pi * points)).sum(-1)


def quadratic(points: Tensor) -> Tensor:
    """(100 x^2 + y^2) / 2: curvatures 100 and 1."""
    x, y = points.unbind(-1)
    return (100 * x**2 + y**2) / 2


BEALE = Problem("beale", "ln(1 + Beale(x, y)) / 10", beale, (-1.8, 0.0), (3.0, 0.5), ((-4.5, 4.5), (-2.0, 2.0)))
ROSENBROCK = Problem(
    "rosenbrock", "(1 − x)² + 100 (y − x²)²", rosenbrock, (-2.0, 2.0), (1.0, 1.0), ((-2.5, 2.5), (-1.5, 3.5))
)
RASTRIGIN = Problem(
    "rastrigin",
    "20 + x² − 10 cos 2πx + y² − 10 cos 2πy",
    rastrigin,
    (-2.0, 3.5),
    (0.0, 0.0),
    ((-4.5, 4.5), (-4.5, 4.5)),
)
QUADRATIC = Problem("quadratic", "(100 x² + y²) / 2", quadratic, (1.0, 1.0), (0.0, 0.0), ((-1.5, 1.5), (-1.5, 1.5)))

PROBLEMS: Mapping[str, Problem] = {p.name: p for p in (BEALE, ROSENBROCK, RASTRIGIN, QUADRATIC)}


# The online problem of Reddi et al. (2018), on which Adam diverges: minimise the sum of f_t(x) = online_gradient(t) x
# over x in [-1, 1]. Once in 101 steps the gradient is large and positive, so x = -1 is best; t counts from 1.


def online_gradient(t: int) -> float:
    """1010 if t mod 101 = 1, else -10."""
    return 1010.0 if t % 101 == 1 else -10.0


def online_noise(t: int, strength: float = 1.0) -> float:
    """N_t = 500 e^(1 - t), positive at odd t and negative at even t, times the strength."""
    size = strength * 500.0 * math.exp(1.0 - t)
    return size if t % 2 == 1 else -size
