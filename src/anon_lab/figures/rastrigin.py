"""Paths among Rastrigin's local minima, every optimizer at the best learning rate of the same search."""

from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport, _searched
from anon_lab.figures._drawing import listed
from anon_lab.figures._searched import CAPTION, NEAR, Data, arrived, guard_remark
from anon_lab.problems import RASTRIGIN

LEVELS = [4.0, 12.0, 20.0, 30.0, 45.0]
HALFWAY = 2.0
"""The optimum itself is found at stray learning rates alone, so ends within half the way from the start are counted."""


def compute(quick: bool, progress: ProgressReport) -> Data:
    return _searched.compute(RASTRIGIN, quick, progress)


def finding(data: Data) -> str:
    return _searched.finding(data, "(0, 0)")


def draw(data: Data) -> Figure:
    return _searched.draw(RASTRIGIN, LEVELS, finding(data), data, HALFWAY)


def table(data: Data) -> Table:
    return _searched.table(data, finding(data))


def remarks(data: Data) -> list[str]:
    reach = {found.label: found.within(NEAR) for found in data.long}
    return [
        CAPTION + "All minima of Rastrigin have nearly the same curvature, so that cannot be tested on it either.",
        f"The optimum is found by {listed(arrived(data.short))} after {data.steps[0]} steps and by "
        f"{listed(arrived(data.long))} after {data.steps[1]}; of {len(data.rates)} learning rates at most "
        f"{max(reach.values())} of any optimizer end there. Which basin a run lands in is decided by its first jumps, "
        "and the search picks the luckiest; the last digit of a rounding can change it.",
        f"Learning rates that end within {HALFWAY:g} of the optimum, half the way from the start: "
        + ", ".join(f"{found.label} {found.within(HALFWAY)}" for found in data.long)
        + ".",
        guard_remark(data),
    ]
