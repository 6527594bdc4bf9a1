"""Where the first step of Anon points as gamma turns, beside SGDM's and Adam's."""

import math
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport
from anon_lab.figures._drawing import Colour, Dash, GammaScale, colour, contours, dash, number, plain_table
from anon_lab.problems import BEALE, Point
from anon_lab.trajectories import Contender, trace

BASELINES = ("SGDM", "Adam")
LENGTH = 0.9
"""Of every arrow: the figure is about directions."""
WINDOW = ((-2.1, -0.55), (-0.15, 1.05))
LEVELS = [0.1 + 0.01 * k for k in range(40)]


@dataclass(frozen=True)
class Arrow:
    """A first step, scaled to length 1."""

    name: str
    gamma: float | None
    guarded: bool
    label: str
    dx: float
    dy: float

    @property
    def angle(self) -> float:
        """From the x axis, in degrees."""
        return math.degrees(math.atan2(abs(self.dy), abs(self.dx)))


@dataclass(frozen=True)
class Data:
    start: Point
    gradient: list[float]
    arrows: list[Arrow]
    """Of the printed algorithm, then of the guarded one, each in the order of gamma, then of the baselines."""
    angles: list[float]
    """Of the arrows, in degrees from the x axis."""
    formula: list[float]
    """The angle that the formula gives for each gamma of the printed algorithm."""
    worst_slope_error: float
    """The largest relative difference between a measured slope and |g_y/g_x|^(1 - gamma)."""


def compute(quick: bool, progress: ProgressReport) -> Data:
    gammas = [-2.0 + 5.0 * k / (10 if quick else 20) for k in range(11 if quick else 21)]
    contenders = [
        *(Contender("Anon", gamma, guarded) for guarded in (False, True) for gamma in gammas),
        *map(Contender, BASELINES),
    ]
    arrows = []
    for k, contender in enumerate(contenders):
        progress(contender.label, k / len(contenders))
        arrows.append(first_step(contender))
    theta = torch.tensor(BEALE.start, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(BEALE.f(theta), theta)
    gx, gy = gradient.abs().tolist()
    # |dy/dx| = |v_y g_y| / |v_x g_x| with v = |g|^-gamma
    slopes = [(gy / gx) ** (1 - gamma) for gamma in gammas]
    errors = [abs(arrow.dy / arrow.dx) / slope - 1 for arrow, slope in zip(arrows, slopes, strict=False)]
    return Data(
        BEALE.start,
        gradient.tolist(),
        arrows,
        [arrow.angle for arrow in arrows],
        [math.degrees(math.atan(slope)) for slope in slopes],
        max(map(abs, errors)),
    )


def first_step(contender: Contender) -> Arrow:
    start = torch.tensor([BEALE.start], dtype=torch.float64)
    points, _ = trace(BEALE, contender, start, torch.ones(1, dtype=torch.float64), [0, 1])
    dx, dy = (points[1] - points[0])[0].tolist()
    length = math.hypot(dx, dy)
    return Arrow(contender.name, contender.gamma, contender.guarded, contender.label, dx / length, dy / length)


def finding(data: Data) -> str:
    printed = [arrow for arrow in data.arrows if arrow.gamma is not None and not arrow.guarded]
    low, high = printed[0], printed[-1]
    return (
        f"The first step turns from {low.angle:.0f}° at γ = {low.gamma:g} to {high.angle:.0f}° at γ = {high.gamma:g}; "
        "SGDM and Adam are two points of the same fan"
    ).replace("-", "−")


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(13, 5.8), layout="constrained")
    figure.suptitle(finding(data), fontsize=13, wrap=True)
    fan, angles = figure.subplots(1, 2, width_ratios=[1.25, 1])
    printed = [arrow for arrow in data.arrows if arrow.gamma is not None and not arrow.guarded]
    gammas = [arrow.gamma for arrow in printed if arrow.gamma is not None]
    shade = GammaScale(gammas[0], gammas[-1])
    _draw_fan(fan, data, printed, shade)
    shade.colourbar(figure, fan)
    _draw_angles(angles, data, gammas, shade)
    return figure


def _draw_fan(axis: Axes, data: Data, printed: list[Arrow], shade: GammaScale) -> None:
    contours(axis, BEALE, LEVELS, WINDOW)
    for arrow in printed:
        _draw_arrow(axis, data, arrow, shade(arrow.gamma or 0.0), LENGTH, 2.2)
    for arrow in data.arrows:
        if arrow.gamma is None:
            _draw_arrow(axis, data, arrow, colour(arrow.name, None), LENGTH * 1.22, 1.6, dash(arrow.name, None))
            axis.annotate(
                arrow.label,
                _end(data, arrow, LENGTH * 1.24),
                (3, 3),
                textcoords="offset points",
                color=colour(arrow.name, None),
            )
    axis.plot(*data.start, "o", color="black", markersize=7, markeredgecolor="white", zorder=5)
    gx, gy = data.gradient
    axis.set(xlabel="x", ylabel="y", aspect="equal")
    axis.set_title(f"First steps from (−1.8, 0), at gradient ({gx:.3f}, {gy:.3f})".replace("-", "−"))


def _end(data: Data, arrow: Arrow, length: float) -> Point:
    return data.start[0] + length * arrow.dx, data.start[1] + length * arrow.dy


def _draw_arrow(
    axis: Axes, data: Data, arrow: Arrow, hue: Colour, length: float, width: float, style: Dash = "-"
) -> None:
    looks = {"arrowstyle": "-|>", "color": hue, "linewidth": width, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", xy=_end(data, arrow, length), xytext=data.start, arrowprops=looks)


def _draw_angles(axis: Axes, data: Data, gammas: list[float], shade: GammaScale) -> None:
    n = len(gammas)
    axis.plot(gammas, data.formula, color="#777777", linewidth=1.5, label="arctan |g_y / g_x|^(1 − γ)", zorder=1)
    axis.scatter(gammas, data.angles[:n], c=[shade(g) for g in gammas], s=45, label="Anon, printed", zorder=3)
    axis.plot(
        gammas, data.angles[n : 2 * n], "x", color="#b5287b", markersize=6, label="Anon, default guards", zorder=2
    )
    for arrow, angle, at in zip(data.arrows[2 * n :], data.angles[2 * n :], (0, 1), strict=True):
        axis.axhline(angle, color=colour(arrow.name, None), linestyle=dash(arrow.name, None), linewidth=1)
        axis.annotate(f"{arrow.label} (γ = {at})", (gammas[0], angle), (0, 3), textcoords="offset points")
    axis.set(xlabel="γ", ylabel="angle from the x axis, degrees", title="Measured angles and the formula")
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)


def table(data: Data) -> Table:
    drawn = plain_table(finding(data), "angles from the x axis, in degrees", ("γ", "printed", "formula", "guarded"))
    n = len(data.formula)
    for k in range(n):
        angles = (data.angles[k], data.formula[k], data.angles[n + k])
        drawn.add_row(number(data.arrows[k].gamma or 0.0, 3), *(f"{angle:.1f}" for angle in angles))
    for arrow, angle in zip(data.arrows[2 * n :], data.angles[2 * n :], strict=True):
        drawn.add_row(arrow.label, f"{angle:.1f}", "", "")
    return drawn


def remarks(data: Data) -> list[str]:
    n = len(data.formula)
    changed = [data.arrows[k].gamma for k in range(n) if abs(data.angles[n + k] - data.angles[k]) > 0.1]
    guards = "change none of these directions"
    if changed:
        guards = (
            f"change the direction for γ from {changed[0]:g} to {changed[-1]:g}, but not at 1: their clip shortens "
            "the step's longer coordinate"
        )
    return [
        "The first step's slope is |g_y/g_x|^(1 − γ): measured slopes agree to a relative "
        f"{number(data.worst_slope_error, 1)}. Below γ = 1 the coordinate with the larger gradient leads, above it the "
        "one with the smaller.",
        f"Anon's default guards {guards}.".replace("-", "−"),
    ]
