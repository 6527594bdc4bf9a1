"""A study's pictures: what each contender reached after so many steps and, where runs train alone, seconds; or what
each gamma reached."""

from collections.abc import Sequence
from statistics import mean
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anon_lab.figures._drawing import DASHES
from anon_lab.palette import COLOUR, DASH, viridis
from anon_lab.significance import verdict

if TYPE_CHECKING:
    from anon_lab.studies._report import Line

OTHERS = ("#0072b2", "#56b4e9", "#cc79a7")
"""For optimizers that the palette has no colour for."""
MARKERS = "osD^vP<X>"
"""That tell neighbouring gammas apart."""


def curves(ground: str, contenders: Sequence["Line"]) -> Figure:
    """Mean over seeds, with a band from the lowest to the highest."""
    alive = _alive(contenders)
    alone = all(line.ground.together == 1 for line in alive)
    figure = _titled(9.6 if alone else 6.4, finding(ground, contenders))
    axes = list(figure.subplots(1, 2 if alone else 1, squeeze=False)[0])
    units = ("step", "seconds of training")
    for axis, column in zip(axes, (0, 1), strict=False):
        for line in alive:
            _draw(axis, line, column, style(line, alive))
        axis.set_xlabel(units[column])
    if alive:
        _limits(axes, alive)
        axes[0].set_ylabel(_measured(alive[0]))
        axes[-1].legend(fontsize=8)
    return figure


def ends(ground: str, contenders: Sequence["Line"]) -> Figure:
    """Every seed and the mean at the end, the best contender on top: where nothing was measured on the way."""
    alive = _alive(contenders)
    figure = _titled(6.4, finding(ground, contenders))
    axis = figure.subplots()
    if alive:
        sign = 1 if alive[0].ground.metric.higher_is_better else -1
        rows = sorted(alive, key=lambda line: sign * mean(line.values))
        for row, line in enumerate(rows):
            look = style(line, alive)
            axis.plot(line.values, [row] * len(line.values), ".", color=look["color"], markersize=5, alpha=0.6)
            axis.plot(mean(line.values), row, look.get("marker", "o"), color=look["color"], markersize=7)
        axis.set_yticks(range(len(rows)), [line.label for line in rows])
        axis.set_ylim(-0.7, len(rows) - 0.3)
        axis.locator_params(axis="x", nbins=5)
        axis.set_xlabel(_measured(alive[0]))
        axis.grid(axis="x", alpha=0.3)
    return figure


def have_curves(contenders: Sequence["Line"]) -> bool:
    """Whether the metric was measured on the way, too."""
    return all(line.ground.measure is None and line.ground.evaluations > 1 for line in contenders)


def over_gamma(ground: str, contenders: Sequence["Line"]) -> Figure:
    """Every seed and the mean at each gamma; the others as lines, with a band from their lowest to their highest."""
    alive = _alive(contenders)
    ours = sorted((line for line in alive if "gamma" in line.settings), key=lambda line: line.settings["gamma"])
    figure = _titled(6.4, finding(ground, contenders))
    axis = figure.subplots()
    for line in alive:
        if line not in ours:
            colours = style(line, alive)
            axis.axhline(mean(line.values), label=line.label, **colours)
            axis.axhspan(min(line.values), max(line.values), color=colours["color"], alpha=0.1, linewidth=0)
    gammas = [line.settings["gamma"] for line in ours]
    axis.plot(gammas, [mean(line.values) for line in ours], color="#444444", linewidth=1, zorder=1)
    for gamma, line in zip(gammas, ours, strict=True):
        colour = style(line, alive)["color"]
        axis.plot([gamma] * len(line.values), line.values, ".", color=colour, markersize=4, alpha=0.6)
        axis.plot(gamma, mean(line.values), "o", color=colour, markersize=6)
    axis.set_xlabel("adaptivity γ")
    if alive:
        axis.set_ylabel(_measured(alive[0]))
        axis.legend(fontsize=8)
    return figure


def _titled(width: float, title: str) -> Figure:
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    figure.suptitle(fill(title, round(11 * width)), fontsize=10.5)
    return figure


def _alive(contenders: Sequence["Line"]) -> list["Line"]:
    return [line for line in contenders if line.values]


def finding(ground: str, contenders: Sequence["Line"]) -> str:
    """Who ends best, and how many of the others cannot be told from it."""
    alive = _alive(contenders)
    if not alive:
        return f"{ground}: every run diverged"
    metric = alive[0].ground.metric
    sign = 1 if metric.higher_is_better else -1
    best = max(alive, key=lambda line: sign * mean(line.values))
    sentence = f"{ground}: {best.label} ends best, at {metric.name} {best.measured()} {metric.unit}".rstrip()
    if len(best.values) < 2:
        return f"{sentence}, from one seed"
    rest = [line for line in alive if line is not best]
    ties = sum(verdict(line.values, best.values, metric) == "tie" for line in rest)
    if not rest:
        return sentence
    if len(rest) == 1:
        return f"{sentence}; {rest[0].label} {'ties' if ties else 'is behind'}"
    if ties in (0, len(rest)):
        return f"{sentence}; all others {'tie' if ties else 'are behind'}"
    return f"{sentence}; {ties} of {len(rest)} others tie"


def _measured(line: "Line") -> str:
    """The metric; FID alone is not of the test set."""
    metric = line.ground.metric
    judged = metric.name if line.ground.measure is not None else f"{metric.name} on the test set"
    return judged + (f" ({metric.unit})" if metric.unit else "")


def _draw(axis: Axes, line: "Line", column: int, style: dict[str, Any]) -> None:
    seeds = [np.array([point for point in each["curve"] if point[3] is not None], float) for each in line.records]
    seeds = [each for each in seeds if len(each) and len(each) == max(map(len, seeds))]
    if not seeds:
        return
    x, y = np.mean([each[:, column] for each in seeds], 0), np.array([each[:, 3] for each in seeds])
    axis.plot(x, y.mean(0), label=line.label, markersize=3.5, linewidth=1.5, **style)
    if len(seeds) > 1:
        axis.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.08, linewidth=0)


def _limits(axes: Sequence[Axes], alive: Sequence["Line"]) -> None:
    """Leave out the first quarter's height, in which all curves are still falling together."""
    seen = [point for line in alive for record in line.records for point in record["curve"] if point[3] is not None]
    late = [point[3] for point in seen if point[0] >= 0.25 * max(each[0] for each in seen)]
    if late and max(late) > min(late):
        room = 0.06 * (max(late) - min(late))
        for axis in axes:
            axis.set_ylim(min(late) - room, max(late) + room)


def style(line: "Line", alive: Sequence["Line"]) -> dict[str, Any]:
    if "gamma" in line.settings:
        ours = [each.label for each in alive if "gamma" in each.settings]
        marker = MARKERS[ours.index(line.label) % len(MARKERS)]
        return {"color": colormaps["viridis"](viridis(line.settings["gamma"])), "marker": marker}
    name = line.label.split(",")[0]
    if name in COLOUR:
        return {"color": COLOUR[name][0], "linestyle": DASHES[DASH[name]]}
    unknown = [each.label for each in alive if "gamma" not in each.settings and each.label.split(",")[0] not in COLOUR]
    return {"color": OTHERS[unknown.index(line.label) % len(OTHERS)], "linestyle": (0, (3, 1, 1, 1))}


def slug(name: str) -> str:
    """As part of a file's name."""
    plain = name.lower().replace("γ", "gamma")
    return "-".join("".join(each if each.isalnum() or each in ".-" else " " for each in plain).split())
