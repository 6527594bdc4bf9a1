"""Anon far outside the usual gammas, from -4 to 4: what still converges, and at which learning rates."""

import math
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport
from anon_lab.figures._drawing import GammaScale, contours, draw_path, mark_ends, number, plain_table
from anon_lab.problems import BEALE, PROBLEMS, QUADRATIC, ROSENBROCK, Problem
from anon_lab.trajectories import Contender, Path, Search, follow, search, trace

SHOWN = (QUADRATIC, BEALE, ROSENBROCK)
LEVELS = {
    "quadratic": [10 ** (k / 2) for k in range(-3, 5)],
    "beale": [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7],
    "rosenbrock": [10 ** (k / 2) for k in range(-3, 8)],
}
NEAR = 0.1
"""A run that ends this close to the optimum has found it."""


FIRST_STEP = 0.03


@dataclass(frozen=True)
class Sweep:
    """All gammas on one function."""

    problem: str
    searches: list[Search]
    paths: list[Path]
    """What is drawn [gamma]: runs with a first step of FIRST_STEP, because at the best learning rates runs jump."""
    float32_loss: list[float]
    """At the last step of the best learning rate, all done in float32 [gamma]."""

    def working(self, k: int) -> list[float]:
        """The learning rates at which the k-th gamma finds the optimum."""
        found = self.searches[k]
        return [lr for lr, distance in zip(found.rates, found.distance, strict=True) if distance < NEAR]


@dataclass(frozen=True)
class Data:
    steps: int
    gammas: list[float]
    rates: list[float]
    sweeps: list[Sweep]


def compute(quick: bool, progress: ProgressReport) -> Data:
    gammas = [-4.0, -2.0, 0.0, 2.0, 4.0] if quick else [k / 2 for k in range(-8, 9)]
    per_decade = 1 if quick else 6
    # The usual search, wider: the best learning rate grows with |g|^gamma, from 1e-13 to 1e13 on Rosenbrock.
    rates = [10 ** (k / per_decade) for k in range(-18 * per_decade, 14 * per_decade + 1)]
    steps, path_steps = (60, 60) if quick else (2000, 300)
    sweeps = []
    for k, problem in enumerate(SHOWN):
        searches, paths, low = [], [], []
        for j, gamma in enumerate(gammas):
            contender = Contender("Anon", gamma)
            progress(f"{problem.name}, {contender.label}", (k + j / len(gammas)) / len(SHOWN))
            found = search(problem, contender, steps, rates)
            start = torch.tensor([problem.start], dtype=torch.float32)
            end, _ = trace(problem, contender, start, torch.tensor([found.lr]), [steps])
            searches.append(found)
            paths.append(follow(problem, contender, _calm_rate(problem, contender), range(path_steps + 1)))
            low.append(float(problem.f(end[-1, 0])))
        sweeps.append(Sweep(problem.name, searches, paths, low))
    return Data(steps, gammas, rates, sweeps)


def _calm_rate(problem: Problem, contender: Contender) -> float:
    """The learning rate at which the first step is FIRST_STEP long."""
    start = torch.tensor([problem.start], dtype=torch.float64)
    _, length = trace(problem, contender, start, torch.ones(1, dtype=torch.float64), [1])
    return FIRST_STEP / float(length)


def reaching(data: Data, sweep: Sweep) -> list[float]:
    """The gammas that find the optimum at their best learning rate."""
    return [
        gamma for gamma, found in zip(data.gammas, sweep.searches, strict=True) if found.distance[found.best] < NEAR
    ]


def finding(data: Data) -> str:
    parts = [f"{_span(reaching(data, sweep), data)} on {sweep.problem.capitalize()}" for sweep in data.sweeps]
    return f"The optimum is found at some learning rate for {', '.join(parts)}"


def _span(found: list[float], data: Data) -> str:
    """The gammas in few words: a range where it has no gaps."""
    where = [data.gammas.index(gamma) for gamma in found]
    if found and where == list(range(where[0], where[-1] + 1)):
        return f"γ = {found[0]:g} to {found[-1]:g}".replace("-", "−")
    return f"{len(found)} of {len(data.gammas)} γ"


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(14, 12.5), layout="constrained")
    figure.suptitle(finding(data), fontsize=14, wrap=True)
    axes = figure.subplots(3, len(data.sweeps), height_ratios=[1.25, 1, 1])
    shade = GammaScale(data.gammas[0], data.gammas[-1])
    for column, sweep in enumerate(data.sweeps):
        _draw_paths(axes[0][column], sweep, shade)
        _draw_losses(axes[1][column], data, sweep, shade)
        _draw_rates(axes[2][column], data, sweep, shade)
    shade.colourbar(figure, axes[0].tolist())
    return figure


def _draw_paths(axis: Axes, sweep: Sweep, shade: GammaScale) -> None:
    problem = PROBLEMS[sweep.problem]
    contours(axis, problem, LEVELS[problem.name])
    for found, path in zip(sweep.searches, sweep.paths, strict=True):
        draw_path(axis, path, shade(found.gamma or 0.0), 1.6)
    mark_ends(axis, problem)
    how = f"{len(sweep.paths[0].x) - 1} steps, the first {FIRST_STEP} long"
    title = f"{problem.name.capitalize()}: {problem.title}\n{how}"
    axis.set(xlabel="x", ylabel="y", title=title)


def _draw_losses(axis: Axes, data: Data, sweep: Sweep, shade: GammaScale) -> None:
    smallest = 1e-20
    ends = [max(found.loss[found.best], smallest) for found in sweep.searches]
    colours = [shade(gamma) for gamma in data.gammas]
    axis.plot(data.gammas, ends, color="#999999", linewidth=1, zorder=1)
    axis.scatter(data.gammas, ends, c=colours, s=50, zorder=3, label="float64")
    low = [max(loss, smallest) if math.isfinite(loss) else math.nan for loss in sweep.float32_loss]
    axis.plot(data.gammas, low, "x", color="#b5287b", markersize=7, label="same lr in float32", zorder=2)
    axis.set(yscale="log", xlabel="γ", ylabel="loss")
    axis.set_title(f"After {data.steps} steps at the best lr (cut off at {number(smallest)})", fontsize=11)
    axis.legend(fontsize=9)
    axis.grid(alpha=0.3)


def _draw_rates(axis: Axes, data: Data, sweep: Sweep, shade: GammaScale) -> None:
    for k, (gamma, found) in enumerate(zip(data.gammas, sweep.searches, strict=True)):
        working = sweep.working(k)
        axis.plot([gamma] * len(working), working, "s", color=shade(gamma), markersize=4)
        axis.plot(gamma, found.lr, "o", markersize=9, markerfacecolor="none", markeredgecolor="black")
    axis.set(yscale="log", xlabel="γ", ylabel="learning rate")
    axis.set_title(f"Learning rates that end within {NEAR} (circle: the best)", fontsize=11)
    axis.grid(alpha=0.3)


def table(data: Data) -> Table:
    caption = (
        f"best lr → loss after {data.steps} steps (how many of {len(data.rates)} learning rates end within {NEAR}); "
        "* the smallest or largest tried"
    )
    drawn = plain_table(finding(data), caption, ("γ", *(sweep.problem for sweep in data.sweeps)))
    for k, gamma in enumerate(data.gammas):
        cells = []
        for sweep in data.sweeps:
            found = sweep.searches[k]
            rate = number(found.lr) + ("*" if found.at_edge else "")
            cells.append(f"{rate} → {number(found.loss[found.best])} ({len(sweep.working(k))})")
        drawn.add_row(number(gamma), *cells)
    return drawn


def remarks(data: Data) -> list[str]:
    said = []
    for sweep in data.sweeps:
        counts = [len(sweep.working(k)) for k in range(len(data.gammas))]
        best = max(range(len(counts)), key=counts.__getitem__)
        rates = [found.lr for found in sweep.searches]
        broken = [
            f"{gamma:g}"
            for gamma, found, low in zip(data.gammas, sweep.searches, sweep.float32_loss, strict=True)
            if found.distance[found.best] < NEAR and not low <= max(1e-6, 10 * found.loss[found.best])
        ]
        said.append(
            f"{sweep.problem.capitalize()}: the widest range of working learning rates is γ = {data.gammas[best]:g}'s "
            f"({counts[best]} of {len(data.rates)}), at γ = {data.gammas[0]:g} there are {counts[0]} and at "
            f"γ = {data.gammas[-1]:g} {counts[-1]}; the best learning rate runs from {number(min(rates), 1)} to "
            f"{number(max(rates), 1)}; "
            + (
                f"in float32 the same rate fails for γ = {', '.join(broken)}, where runs jump and rounding decides."
                if broken
                else "float32 does as well."
            )
        )
    return [remark.replace("-", "−") for remark in said] + [
        "The paper's guarantee holds for every real γ, but in the long run alone; here is what a fixed learning rate "
        f"does in {data.steps} steps.",
        "ε^γ with ε = 1e−16 leaves float32 at |γ| = 2.4 and float64 at 19; the recursion is done in logarithms, so "
        "what gives out first is the room for a learning rate and not the numbers.",
    ]
