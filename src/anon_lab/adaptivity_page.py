"""What `anon adaptivity` found as files: a page that needs no network, a picture, and every number in a table."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path

import matplotlib
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anon_lab import adaptivity
from anon_lab.adaptivity import Results, Row, number
from anon_lab.files import write_bytes, write_text
from anon_lab.html import GRID, INK, gamma_colour, html_table, page
from anon_lab.palette import viridis

DOT = ("#8a93a0", "#8a93a0")
RANGE = (-2.25, 2.25)
NAMED = (
    "Adafactor", "AdaBound", "AdamG", "AdamW", "Adai", "AvaGrad", "CAME", "Gravity", "Kate", "LARS", "MADGRAD", "Muon",
    "PAdam", "SGD", "Shampoo", "SOAP",
)  # fmt: skip
"""Those that the picture names, where they were measured: one for each place that optimizers are found in."""


def save(results: Results, out: Path) -> list[Path]:
    """Write adaptivity.csv, .png and .html into the folder, each whole or not at all; the page comes last."""
    # All made before anything is written, so that a failure leaves the old files together.
    table, picture, html = csv_text(results), png(results), html_page(results)
    return [
        write_text(out / "adaptivity.csv", table),
        write_bytes(out / "adaptivity.png", picture),
        write_text(out / "adaptivity.html", html),
    ]


def csv_text(results: Results) -> str:
    target = io.StringIO()
    writer = csv.DictWriter(target, [each.name for each in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in results.rows)
    return target.getvalue()


def places(results: Results) -> dict[tuple[float, float], list[str]]:
    """The names of other optimizers by where they lie: A and the exponent between coordinates, to 0.02."""
    found: dict[tuple[float, float], list[str]] = {}
    for a, row in results.measured:
        if row.relative is not None:
            here = (round(a * 50) / 50 + 0.0, round(row.relative * 50) / 50 + 0.0)
            found.setdefault(here, []).append(row.name)
    return found


def _size(names: Sequence[str]) -> float:
    return 7 + 3.2 * (len(set(names)) - 1) ** 0.5


def _outside(results: Results) -> str:
    """A sentence on what the pictures' window leaves out."""
    low, high = RANGE
    lost = [
        f"{row.name} ({number(a, 2)}, {number(row.relative, 2)})"
        for a, row in results.measured
        if row.relative is None or not (low < a < high and low < row.relative < high)
    ]
    return f"Not in the picture: {', '.join(lost)}." if lost else ""


def plot(results: Results, dark: bool = False) -> go.Figure:
    """A against the exponent between coordinates; every dot names all optimizers that lie there."""
    figure = go.Figure()
    figure.add_scatter(
        x=RANGE, y=RANGE, mode="lines", line={"color": GRID[dark], "width": 2}, hoverinfo="skip", showlegend=False
    )
    found = places(results)
    figure.add_scatter(
        x=[a for a, _ in found],
        y=[between for _, between in found],
        mode="markers",
        marker={"color": DOT[dark], "size": [_size(names) for names in found.values()], "opacity": 0.75},
        customdata=[[_wrapped(sorted(set(names)))] for names in found.values()],
        hovertemplate="A %{x:.2f}, between %{y:.2f}<br>%{customdata[0]}<extra></extra>",
        name="other optimizers",
    )
    for name, symbol in (("Anon", "circle"), ("Anon.paper", "circle-open"), ("Anon, lr_scale", "diamond")):
        anons = [each for each in results.anons(name) if each[2].relative is not None]
        figure.add_scatter(
            x=[a for _, a, _ in anons],
            y=[row.relative for _, _, row in anons],
            mode="lines+markers",
            line={"color": DOT[dark], "width": 1},
            marker={
                "color": [gamma_colour(gamma, dark) for gamma, _, _ in anons],
                "size": 15 if symbol == "circle-open" else 11,
                "symbol": symbol,
                "line": {"width": 2} if symbol == "circle-open" else {},
            },
            customdata=[[number(gamma, 2)] for gamma, _, _ in anons],
            hovertemplate=name + " γ = %{customdata[0]}<br>A %{x:.2f}, between %{y:.2f}<extra></extra>",
            name=name,
        )
    figure.update_xaxes(title="adaptivity A of the whole update", range=RANGE, dtick=0.5)
    figure.update_yaxes(title="exponent between coordinates", range=RANGE, dtick=0.5)
    figure.update_layout(legend_font_color=INK[dark])
    return figure


def _wrapped(names: Sequence[str], per_line: int = 6) -> str:
    lines = [", ".join(names[i : i + per_line]) for i in range(0, len(names), per_line)]
    return ",<br>".join(map(escape, lines))


def html_page(results: Results) -> str:
    refused = html_table(
        ("optimizer", "from", "why not"), [(row.name, row.source, row.reason) for row in results.refused]
    )
    body = f"""
<p>A says how an optimizer's update answers when all gradients grow by a factor k: it grows by k to the power 1 − A.
SGD has A = 0, Adam 1. The exponent between coordinates says the same of one part of a tensor against the rest; where
the two differ, a number is shared by the whole tensor: the length of the step is normalised, or its matrix is.</p>
<div class="plot" style="height: 40rem" id="places"></div>
<p class="note">Each grey dot is where one or more optimizers lie, larger for more; point at it for their names.
{escape(_outside(results))}</p>
<h2>All results</h2>
{html_table(adaptivity.COLUMNS, adaptivity.cells(results))}
<p class="note">{escape(adaptivity.CAPTION)}.</p>
<h2>How it was measured</h2>
<ul><li>{results.steps} gradients of a {" × ".join(map(str, adaptivity.SHAPE))} matrix with a mean and noise, their
scales spread over two decades; the update of the last step, by central differences.</li>
<li>Every optimizer with its defaults and no weight decay, at parameters that are not zero, which are put back before
each step.</li>
<li>{results.wall_s:.0f} s on a CPU.</li></ul>
<details><summary>{len(results.refused)} could not be measured</summary>
{refused}
</details>
"""
    return page(
        adaptivity.finding(results),
        body,
        {"places": lambda dark: plot(results, dark)},
        "The plot needs JavaScript; adaptivity.png beside this page does not.",
    )


def png(results: Results) -> bytes:
    target = io.BytesIO()
    draw(results).savefig(target, format="png", dpi=200)
    return target.getvalue()


def draw(results: Results) -> Figure:
    """The same picture for print, with some names in it."""
    figure = Figure(figsize=(8.4, 8.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(RANGE, RANGE, color=GRID[0], linewidth=1.5, zorder=1)
    for (a, between), names in places(results).items():
        axes.plot(a, between, "o", color=DOT[0], markersize=0.8 * _size(names), alpha=0.75, markeredgewidth=0, zorder=2)
    for name, marker, size in (("Anon", "o", 7), ("Anon.paper", "o", 11), ("Anon, lr_scale", "D", 6)):
        anons = [(gamma, a, row.relative) for gamma, a, row in results.anons(name) if row.relative is not None]
        label = {"Anon, lr_scale": 'Anon, lr_scale="tensor"', "Anon": "Anon, default guards"}.get(name, name)
        axes.plot([a for _, a, _ in anons], [r for _, _, r in anons], color=DOT[0], linewidth=0.8, zorder=2)
        for gamma, a, between in anons:
            colour = matplotlib.colormaps["viridis"](viridis(gamma))
            fill = "none" if name == "Anon.paper" else colour
            axes.plot(a, between, marker, color=colour, markersize=size, markerfacecolor=fill, zorder=3)
        axes.plot([], [], marker, color="#21918c", markersize=size, label=label, linestyle="none",
                  markerfacecolor="none" if name == "Anon.paper" else None)  # fmt: skip
    axes.plot([], [], "o", color=DOT[0], label="other optimizers, larger where there are more", linestyle="none")
    _write_names(axes, results)
    axes.set_title(adaptivity.finding(results).replace("; ", ";\n"), fontsize=12)
    axes.set(xlim=RANGE, ylim=RANGE, aspect="equal")
    axes.set_xlabel("adaptivity A of the whole update (0: SGD, 1: Adam)")
    axes.set_ylabel("exponent between coordinates")
    axes.grid(color=GRID[0], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def _write_names(axes: Axes, results: Results) -> None:
    """Names beside their dots, in three columns; pushed down where they would touch."""
    seen = {row.name: (a, row.relative) for a, row in results.measured if row.relative is not None}
    for low, high in ((RANGE[0], 0.9), (0.9, 1.06), (1.06, RANGE[1])):
        spots = [(name, *seen[name]) for name in NAMED if name in seen and low < seen[name][0] <= high]
        shift, side = (-0.12, "right") if high == 0.9 else (0.16, "left")
        height = math.inf
        for name, a, between in sorted(spots, key=lambda spot: -spot[2]):
            height = min(between, height - 0.095)
            axes.annotate(
                name,
                (a, between),
                (a + shift, height),
                ha=side,
                va="center",
                fontsize=8.5,
                arrowprops={"arrowstyle": "-", "color": DOT[0], "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2},
            )
