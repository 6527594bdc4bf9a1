"""A page of paths on one function, every optimizer at the best learning rate of the same search."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport
from anon_lab.figures._drawing import colour, contours, draw_path, listed, mark_ends, number, plain_table
from anon_lab.problems import Problem
from anon_lab.trajectories import RATES, Contender, Search, anons, search

GAMMAS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
OTHERS = ("SGD", "SGDM", "Adam", "RAdam", "Yogi", "AdaHessian", "AdaBound", "AdaBelief")
NEAR = 0.1
"""A run that ends this close to the optimum has found it."""


@dataclass(frozen=True)
class Data:
    steps: list[int]
    """The lengths of the short and of the long search."""
    rates: list[float]
    short: list[Search]
    long: list[Search]
    """Of the same optimizers, in the same order."""
    guarded: list[Search]
    """The short search for Anon with its default guards, in the order of GAMMAS."""


def compute(problem: Problem, quick: bool, progress: ProgressReport) -> Data:
    steps = [20, 60] if quick else [500, 5000]
    rates = RATES[::6] if quick else RATES
    contenders = [*anons(GAMMAS), *map(Contender, OTHERS)]
    guarded = anons(GAMMAS, guarded=True)
    jobs = [
        *((contender, steps[0]) for contender in contenders),
        *((contender, steps[1]) for contender in contenders),
        *((contender, steps[0]) for contender in guarded),
    ]
    done = []
    for k, (contender, length) in enumerate(jobs):
        progress(f"{contender.label}, {length} steps", k / len(jobs))
        done.append(search(problem, contender, length, rates))
    n = len(contenders)
    return Data(steps, list(rates), done[:n], done[n : 2 * n], done[2 * n :])


def arrived(searches: list[Search]) -> list[str]:
    return [found.label for found in searches if found.distance[found.best] < NEAR]


def finding(data: Data, optimum: str) -> str:
    """Who ends at the optimum at the best learning rate."""
    sides = (
        f"{len(arrived(searches))} of {len(searches)} ({listed(arrived(searches))}) after {steps} steps"
        if 0 < len(arrived(searches)) <= 4
        else f"{len(arrived(searches))} of {len(searches)} after {steps} steps"
        for steps, searches in zip(data.steps, (data.short, data.long), strict=True)
    )
    return f"At its best learning rate the optimum {optimum} is found by " + " and ".join(sides)


def draw(problem: Problem, levels: list[float], title: str, data: Data, radius: float = NEAR) -> Figure:
    """One panel for each optimizer, and below how many learning rates end within the radius."""
    figure = Figure(figsize=(15, 13), layout="constrained")
    cells = figure.add_gridspec(4, 5, height_ratios=[1, 1, 1, 0.75])
    for k, found in enumerate(data.short):
        row, column = divmod(k, 5)
        axis = figure.add_subplot(cells[row, column])
        _draw_search(axis, problem, levels, found)
        axis.tick_params(labelsize=8, labelbottom=row == 2, labelleft=column == 0)
        axis.set(xlabel="x" if row == 2 else "", ylabel="y" if column == 0 else "")
        axis.locator_params(nbins=5)
    _draw_counts(figure.add_subplot(cells[3, :]), data, radius)
    figure.suptitle(
        f"{title}\n{data.steps[0]} steps on {problem.title} at the best of {len(data.rates)} learning rates "
        "(* the smallest or largest tried); dot: start, square: end, star: optimum",
        fontsize=13,
        wrap=True,
    )
    return figure


def _draw_search(axis: Axes, problem: Problem, levels: list[float], found: Search) -> None:
    contours(axis, problem, levels)
    draw_path(axis, found.path, colour(found.name, found.gamma), 1.4)
    mark_ends(axis, problem, 8)
    axis.plot(found.path.x[-1], found.path.y[-1], "s", color=colour(found.name, found.gamma), markersize=6, zorder=6)
    distance = number(found.distance[found.best])
    axis.set_title(f"{found.label}\nlr {_rate(found)}, ends {distance} away", fontsize=10)


def _draw_counts(axis: Axes, data: Data, radius: float) -> None:
    counts = [found.within(radius) for found in data.long]
    axis.bar(
        [found.label for found in data.long], counts, color=[colour(found.name, found.gamma) for found in data.long]
    )
    for k, count in enumerate(counts):
        axis.text(k, count, str(count), ha="center", va="bottom")
    axis.set(ylim=(0, max(*counts, 1) * 1.15), ylabel="learning rates")
    axis.locator_params(axis="y", integer=True)
    axis.set_title(
        f"How many of {len(data.rates)} learning rates end within {radius:g} of the optimum after {data.steps[1]} steps"
    )
    axis.spines[["top", "right"]].set_visible(False)


def _rate(found: Search) -> str:
    return number(found.lr) + ("*" if found.at_edge else "")


def table(data: Data, title: str) -> Table:
    short, long = data.steps
    drawn = plain_table(
        title,
        f"lr → distance from the optimum after so many steps; within: learning rates of {len(data.rates)} that end "
        f"within {NEAR} after {long}; * the smallest or largest tried",
        ("optimizer", f"{short} steps", f"{long} steps", "within", f"guarded, {short}"),
    )
    guarded = {found.gamma: found for found in data.guarded}
    for brief, full in zip(data.short, data.long, strict=True):
        safe = "" if brief.gamma is None else _outcome(guarded[brief.gamma])
        drawn.add_row(brief.label, _outcome(brief), _outcome(full), str(full.within(NEAR)), safe)
    return drawn


def _outcome(found: Search) -> str:
    return f"{_rate(found)} → {number(found.distance[found.best])}"


def guard_remark(data: Data) -> str:
    """Where the default guards end elsewhere than the printed algorithm."""
    other = [
        f"{printed.label} (printed {number(printed.distance[printed.best])}, "
        f"guarded {number(safe.distance[safe.best])})"
        for printed, safe in zip(data.short, data.guarded, strict=False)
        if abs(printed.distance[printed.best] - safe.distance[safe.best]) > 0.01
    ]
    if not other:
        return f"With its default guards Anon ends at the same distances after {data.steps[0]} steps."
    return f"With its default guards Anon ends at another distance after {data.steps[0]} steps for {listed(other)}."


CAPTION = "The paper's caption says that Anon with γ ≤ 0 explores flatter regions and with γ ≥ 1 finds sharp minima. "
