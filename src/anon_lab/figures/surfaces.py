"""Rastrigin and Rosenbrock as surfaces in three dimensions, each with a path of Anon down it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport
from anon_lab.figures._drawing import grid, number, plain_table
from anon_lab.problems import PROBLEMS, Point
from anon_lab.trajectories import RATES, Contender, Search, search

GAMMA = 1.0
RED = "#d7301f"
"""Of the paths: against the blue and yellow of the surfaces it stands out to every kind of colour vision."""


@dataclass(frozen=True)
class View:
    """How one function is shown."""

    name: str
    height: str
    """What is drawn upwards."""
    window: tuple[Point, Point]
    elevation: float
    azimuth: float
    """Both in degrees."""


VIEWS = (
    View("rastrigin", "f", ((-4.5, 4.5), (-4.5, 4.5)), 48, -62),
    View("rosenbrock", "log₁₀(1 + f)", ((-2.3, 2.3), (-1.0, 3.3)), 38, -118),
)
HEIGHT: dict[str, Callable[[float], float]] = {"f": lambda f: f, "log₁₀(1 + f)": lambda f: math.log10(1 + f)}
"""Rosenbrock's walls would hide its valley on a plain axis."""


@dataclass(frozen=True)
class Data:
    steps: int
    views: list[View]
    searches: list[Search]
    """Anon at gamma = 1 on each function."""
    points: int
    """The surface is drawn over this many by as many points."""


def compute(quick: bool, progress: ProgressReport) -> Data:
    steps = 100 if quick else 500
    searches = []
    for k, view in enumerate(VIEWS):
        progress(view.name, k / len(VIEWS))
        searches.append(search(PROBLEMS[view.name], Contender("Anon", GAMMA), steps, RATES[::6] if quick else RATES))
    return Data(steps, list(VIEWS), searches, 61 if quick else 161)


def finding(data: Data) -> str:
    ends = [
        f"{number(found.distance[found.best])} from the optimum of {view.name.capitalize()}"
        for view, found in zip(data.views, data.searches, strict=True)
    ]
    return f"{data.steps} steps of Anon (γ = {GAMMA:g}) at its best learning rate end {' and '.join(ends)}"


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(13, 6.2))
    figure.suptitle(finding(data), fontsize=13, y=0.97, wrap=True)
    for k, (view, found) in enumerate(zip(data.views, data.searches, strict=True)):
        axis = figure.add_axes((0.01 + 0.49 * k, 0.02, 0.47, 0.86), projection="3d", computed_zorder=False)
        _draw_surface(axis, view, found, data.points)
    return figure


def _draw_surface(axis, view: View, found: Search, points: int) -> None:
    """axis: an Axes3D, whose methods matplotlib leaves untyped."""
    problem, height = PROBLEMS[view.name], HEIGHT[view.height]
    x, y, f = (torch.tensor(values, dtype=torch.float64) for values in grid(problem, view.window, points))
    z = f if view.height == "f" else torch.log10(1 + f)
    mesh = torch.meshgrid(x, y, indexing="xy")
    axis.plot_surface(
        *(part.numpy() for part in (*mesh, z)), cmap="cividis", rcount=points, ccount=points, linewidth=0, alpha=0.85
    )
    lift = 0.01 * float(z.max())  # else the surface would swallow the line
    inside = [
        (px, py, height(loss) + lift)
        for px, py, loss in zip(found.path.x, found.path.y, found.path.loss, strict=True)
        if view.window[0][0] <= px <= view.window[0][1] and view.window[1][0] <= py <= view.window[1][1]
    ]
    axis.plot(*zip(*inside, strict=True), color=RED, linewidth=1.8, zorder=5)
    for (px, py), mark in ((problem.start, "o"), (problem.optimum, "*")):
        at = height(float(problem.f(torch.tensor([px, py])))) + lift
        axis.plot([px], [py], [at], mark, color=RED, markeredgecolor="white", markersize=11, zorder=6)
    axis.set(xlabel="x", ylabel="y", zlabel=view.height)
    axis.set_title(f"{view.name.capitalize()}: {problem.title}", fontsize=11)
    axis.view_init(view.elevation, view.azimuth)


def table(data: Data) -> Table:
    drawn = plain_table(finding(data), "distance: from the optimum", ("function", "steps", "lr", "loss", "distance"))
    for view, found in zip(data.views, data.searches, strict=True):
        values = (found.lr, found.loss[found.best], found.distance[found.best])
        drawn.add_row(view.name, str(data.steps), *map(number, values))
    return drawn


def remarks(data: Data) -> list[str]:
    return [
        "The paper shows the two functions without a claim; the paths are added here. Rosenbrock is drawn on a "
        "logarithmic height, because its walls are a thousand times as high as its valley.",
    ]
