"""The adaptivity axis: where the paper's baselines were measured to lie on it, and Anon, which lies anywhere."""

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab import adaptivity, optimizers
from anon_lab.adaptivity import NEAR, Candidate, number
from anon_lab.figures._drawing import listed
from anon_lab.palette import viridis
from anon_optim import Anon

LEFT, RIGHT = -2.0, 2.0
INK, SOFT = "#1d232b", "#5a6472"
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
TASKS = (
    ("CNNs: below 0", "γ = −0.1 for ResNets on ImageNet", 0.0, LEFT, "#d55e00"),
    ("diffusion, language models:\n1 and above", "γ = 1.01, and 1 to 1.1", 1.0, RIGHT, "#b5287b"),
)
"""What the paper claims of tasks: where their best adaptivity lies, the gammas it reports, and from where to where."""
BEYOND = ("Kate",)
"""Not among the paper's baselines: beyond the 1 that these end at (Choudhury et al., 2024, arXiv:2403.02648)."""


@dataclass(frozen=True)
class Point:
    """An optimizer that is not Anon."""

    name: str
    A: float
    first: float | None
    """A at the first step; None where that moved nothing."""


@dataclass(frozen=True)
class AnonPoint:
    gamma: float
    A: float


@dataclass(frozen=True)
class Data:
    steps: int
    points: list[Point]
    anon: list[AnonPoint]
    refused: list[str]
    """Those that recorded gradients are not enough for."""


def compute(quick: bool, progress: Callable[[str, float], None]) -> Data:
    steps = adaptivity.QUICK_STEPS if quick else adaptivity.STEPS
    todo = [adaptivity.of_entry(e) for e in optimizers.REGISTRY.values() if e.source != "anon_optim"]
    todo += [each for each in adaptivity.candidates([]) if each.name in BEYOND]
    todo += [
        Candidate("Anon", "anon_optim", lambda params, gamma=gamma: Anon(params, gamma=gamma), gamma)
        for gamma in adaptivity.GAMMAS
    ]
    rows = []
    for done, candidate in enumerate(todo):
        progress(f"measuring {candidate.name}", done / len(todo))
        rows.append(adaptivity.measure(candidate, steps))
    return Data(
        steps,
        [Point(row.name, row.A, row.first) for row in rows if row.A is not None and row.gamma is None],
        [AnonPoint(row.gamma, row.A) for row in rows if row.A is not None and row.gamma is not None],
        [row.name for row in rows if row.A is None],
    )


def finding(data: Data) -> str:
    ends = sum(min(abs(point.A), abs(point.A - 1)) <= NEAR for point in data.points)
    gammas = [point.gamma for point in data.anon]
    span = f"from {min(gammas):g} to {max(gammas):g}".replace("-", "−")
    ours = (
        f"Anon lies where γ puts it, {span}" if _miss(data) <= NEAR else f"Anon misses γ by {_miss(data):.2g}, {span}"
    )
    return f"{ends} of {len(data.points)} optimizers lie at A = 0 or A = 1; {ours}"


def _miss(data: Data) -> float:
    return max(abs(point.A - point.gamma) for point in data.anon)


def _moves(point: Point) -> bool:
    """Whether it ends between the two ends, far from where it began."""
    return point.first is not None and abs(point.first - point.A) > 0.2 and NEAR < point.A < 1 - NEAR


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(12, 5.7), layout="constrained")
    axes = figure.add_subplot()
    _draw_anon(axes, data)
    _draw_others(axes, data)
    _draw_tasks(axes)
    figure.suptitle(finding(data), fontsize=17, color=INK, wrap=True)
    axes.set(xlim=(LEFT - 0.12, RIGHT + 0.12), ylim=(-2.05, 2.25), yticks=[], xticks=[-2, -1, 0, 1, 2])
    axes.set_xticks([-1.5, -0.5, 0.5, 1.5], minor=True)
    axes.set_xticklabels(["−2", "−1", "0", "1", "2"], fontsize=14)
    axes.set_xlabel(
        "adaptivity A: gradients k times as large make the update $k^{\\,1-A}$ times as large", fontsize=13, color=INK
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _draw_anon(axes: Axes, data: Data) -> None:
    """A band in the colours of gamma, with a dot where Anon was measured."""
    gammas = [LEFT + (RIGHT - LEFT) * (i + 0.5) / 400 for i in range(400)]
    band = [[matplotlib.colormaps["viridis"](viridis(gamma)) for gamma in gammas]]
    axes.imshow(band, extent=(LEFT, RIGHT, -0.16, 0.16), aspect="auto")
    for point in data.anon:
        axes.plot(point.A, 0, "o", color="white", markersize=8, markeredgecolor=INK)
    axes.text(LEFT, 0.26, "Anon, A = γ", fontsize=15, fontweight="bold", color=INK)
    axes.text(LEFT + 0.62, 0.27, "(dots: measured)", fontsize=11, color=SOFT)


def _draw_others(axes: Axes, data: Data) -> None:
    """Names in columns above the place where they lie; for one that moves an arrow, from where its first step lay."""
    columns: dict[float, list[str]] = {}
    for point in data.points:
        place = next((end for end in (0.0, 1.0) if abs(point.A - end) <= NEAR), point.A)
        columns.setdefault(place, []).extend([] if _moves(point) else [point.name])
        if _moves(point):
            arrow = {"arrowstyle": "->", "color": SOFT, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (point.A, 0.5), (point.first or 0.0, 0.5), arrowprops=arrow)
            axes.text(
                point.A + 0.05,
                0.56,
                f"{point.name}, in {data.steps} steps",
                fontsize=10,
                color=SOFT,
                bbox=WHITE,
                zorder=3,
            )
    for place, names in columns.items():
        axes.plot([place, place], [0.2, 0.8 if names else 0.5], color=SOFT, linewidth=1)
        axes.plot(place, 0.2, "v", color=INK, markersize=8)
        half = -(-len(names) // 2) if len(names) > 9 else len(names)
        _stack(axes, place - (0.02 if names[half:] else 0), names[:half], "right" if names[half:] else "center")
        _stack(axes, place + 0.02, names[half:], "left")


def _stack(axes: Axes, x: float, names: list[str], side: str) -> None:
    """One below the other, each on a line of its own, so that columns side by side have the same lines."""
    for k, name in enumerate(reversed(names)):
        axes.text(x, 0.9 + 0.19 * k, name, ha=side, fontsize=11.5, color=INK)


def _draw_tasks(axes: Axes) -> None:
    axes.text(0.5, -0.75, "the paper's claim of what\ntasks prefer", ha="center", va="center", fontsize=11, color=SOFT)
    for name, gammas, start, end, hue in TASKS:
        fade = LinearSegmentedColormap.from_list("", [(*to_rgb(hue), alpha) for alpha in (0.75, 0.0)])
        extent = (start, end, -0.98, -0.52) if start < end else (end, start, -0.98, -0.52)
        ramp = [[i / 255 for i in range(256)]] if start < end else [[1 - i / 255 for i in range(256)]]
        axes.imshow(ramp, cmap=fade, extent=extent, aspect="auto", zorder=1)
        centre = (start + end) / 2
        axes.text(centre, -1.08, name, ha="center", va="top", fontsize=13, color=hue)
        axes.text(centre, -1.4 - 0.26 * name.count("\n"), gammas, ha="center", va="top", fontsize=10.5, color=SOFT)


def table(data: Data) -> Table:
    drawn = Table(title=finding(data), caption=f"A of the update of step {data.steps}, and of step 1")
    for column in ("optimizer", "A", "A at step 1"):
        drawn.add_column(column, justify="left" if column == "optimizer" else "right")
    for point in sorted(data.points, key=lambda point: point.A):
        drawn.add_row(point.name, number(point.A), number(point.first))
    for each in data.anon:
        drawn.add_row(f"Anon γ = {number(each.gamma, 1)}", number(each.A), "")
    return drawn


def remarks(data: Data) -> list[str]:
    outside = [f"{p.name} ({number(p.A)})" for p in data.points if not -0.01 <= p.A <= 1.01]
    said = [
        "The paper: existing optimizers are confined to A between 0 and 1. Measured: "
        + (f"outside lies {listed(outside)}." if outside else f"so are all {len(data.points)} here."),
        f"The paper: A of Anon is close to γ. Measured: the largest difference is {_miss(data):.1g}.".replace("-", "−"),
        "The paper: CNNs prefer A below 0, diffusion and language models A of 1 and above. Not tested by this figure.",
    ]
    hvadam = [point.A for point in data.points if point.name == "HVAdam"]
    if hvadam:
        said.append(
            "The paper leaves HVAdam out, because it has no preconditioner in the paper's form. Measured from its "
            f"updates: A = {number(hvadam[0])}."
        )
    if data.refused:
        said.append(f"Not measured, because recorded gradients are not enough: {listed(data.refused)}.")
    return said
