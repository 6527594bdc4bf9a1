"""Paths down Rosenbrock's narrow valley, every optimizer at the best learning rate of the same search."""

from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport, _searched
from anon_lab.figures._drawing import listed, number
from anon_lab.figures._searched import CAPTION, NEAR, Data, arrived, guard_remark
from anon_lab.problems import ROSENBROCK

LEVELS = [10 ** (k / 2) for k in range(-3, 8)]


def compute(quick: bool, progress: ProgressReport) -> Data:
    return _searched.compute(ROSENBROCK, quick, progress)


def finding(data: Data) -> str:
    return _searched.finding(data, "(1, 1)")


def draw(data: Data) -> Figure:
    return _searched.draw(ROSENBROCK, LEVELS, finding(data), data)


def table(data: Data) -> Table:
    return _searched.table(data, finding(data))


def remarks(data: Data) -> list[str]:
    there, stuck = arrived(data.long), [f for f in data.long if f.label not in arrived(data.long)]
    best = min(data.short, key=lambda found: found.distance[found.best])
    return [
        CAPTION + "Rosenbrock has one minimum, so that cannot be tested on it. What can: within "
        f"{NEAR} of the minimum after {data.steps[1]} steps end {listed(there)}; not so "
        f"{listed([f'{found.label} ({number(found.distance[found.best], 3)} away)' for found in stuck])}.",
        "At the start the gradient is (−1606, −400) and in the valley a few units: for γ < 0 steps grow faster than "
        "the gradient, so a learning rate that survives the start crawls along the valley.",
        f"Nearest after {data.steps[0]} steps is {best.label}, {number(best.distance[best.best])} away.",
        guard_remark(data),
    ]
