"""What pictures of runs on a function of two variables have in common: contours, paths and colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from rich.box import SIMPLE_HEAVY
from rich.table import Table

from anon_lab.palette import COLOUR, DASH, viridis
from anon_lab.problems import Point, Problem
from anon_lab.trajectories import Path

DASHES = {"solid": "-", "dash": (0, (4, 1.5)), "dot": ":", "dashdot": "-.", "longdash": (0, (8, 2))}
"""The dashes of the palette, in matplotlib's words."""

Colour = str | tuple[float, float, float, float]
Dash = str | tuple[int, tuple[float, ...]]


def colour(name: str, gamma: float | None) -> Colour:
    if gamma is None:
        return COLOUR[name][0]
    return matplotlib.colormaps["viridis"](viridis(gamma))


@dataclass(frozen=True)
class GammaScale:
    """Viridis over a range of gamma wider than the palette's, without the yellow end that would drown in the paper."""

    low: float
    high: float

    def __call__(self, gamma: float) -> Colour:
        return matplotlib.colormaps["viridis"](0.85 * (gamma - self.low) / (self.high - self.low))

    def colourbar(self, figure: Figure, axes: Axes | list[Axes]) -> None:
        yellow = self.low + (self.high - self.low) / 0.85
        bar = figure.colorbar(ScalarMappable(Normalize(self.low, yellow), "viridis"), ax=axes, pad=0.01)
        bar.ax.set_ylim(self.low, self.high)
        bar.ax.set_title("γ")


def dash(name: str, gamma: float | None) -> Dash:
    return "-" if gamma is not None else DASHES[DASH[name]]


def grid(problem: Problem, window: tuple[Point, Point], points: int = 121) -> tuple[list, list, list]:
    """x, y and f[y][x] over the window."""
    x, y = (torch.linspace(low, high, points, dtype=torch.float64) for low, high in window)
    mesh = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    return x.tolist(), y.tolist(), problem.f(mesh).tolist()


def contours(axis: Axes, problem: Problem, levels: Sequence[float], window: tuple[Point, Point] | None = None) -> None:
    """The function in pale greys, darker where it is higher, so that paths in any colour stand out."""
    window = window or problem.window
    x, y, f = grid(problem, window)
    greys = matplotlib.colormaps["Greys"].resampled(256)
    shades = [greys(0.02 + 0.3 * k / len(levels)) for k in range(len(levels) + 1)]
    axis.contourf(x, y, f, levels=[-math.inf, *levels, math.inf], colors=shades)
    axis.contour(x, y, f, levels=levels, colors="#9a9a9a", linewidths=0.4)
    axis.set(xlim=window[0], ylim=window[1])


def draw_path(axis: Axes, path: Path, hue: Colour, width: float = 1.6, **options) -> None:
    """The run as a line with a pale rim; what is not finite is left out."""
    known = [math.isfinite(x) and math.isfinite(y) for x, y in zip(path.x, path.y, strict=True)]
    x, y = ([value for value, good in zip(values, known, strict=True) if good] for values in (path.x, path.y))
    rim = [Stroke(linewidth=width + 1.6, foreground="white", alpha=0.8), Normal()]
    axis.plot(x, y, color=hue, linewidth=width, path_effects=rim, solid_joinstyle="round", **options)


def mark_ends(axis: Axes, problem: Problem, size: float = 9.0) -> None:
    """A dot at the start, a star at the optimum."""
    axis.plot(*problem.start, "o", color="black", markersize=size * 0.6, markeredgecolor="white", zorder=5)
    axis.plot(*problem.optimum, "*", color="black", markersize=size * 1.4, markeredgecolor="white", zorder=5)


def plain_table(title: str, caption: str, headings: Sequence[str]) -> Table:
    """A table that fits a terminal of 80 columns: no rules between its columns, words left, numbers right."""
    drawn = Table(title=title, caption=caption, box=SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    for k, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if k else "left", no_wrap=True)
    return drawn


def number(value: float, digits: int = 2) -> str:
    """A number for tables and headings, with a true minus sign; a dash where there is none."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "diverged"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+").replace("-", "−")


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    if not words:
        return "none"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
