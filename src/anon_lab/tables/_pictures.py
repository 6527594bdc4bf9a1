"""Matrices as pictures: one for the page, one for the file."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from anon_lab.tables._spec import Heat

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAP = "cividis"  # viridis means gamma


def draw(heats: Sequence[Heat], title: str) -> Figure:
    """The matrices below each other, better always brighter."""
    figure = Figure(figsize=(max(map(_width, heats)), 0.8 + sum(map(_height, heats))), layout="constrained")
    figure.suptitle(title, fontsize=12, wrap=True)
    ratios = [_height(heat) for heat in heats]
    axes = figure.subplots(len(heats), squeeze=False, height_ratios=ratios)[:, 0]
    for axis, heat in zip(axes, heats, strict=True):
        colours = colormaps[MAP if heat.higher_is_better else f"{MAP}_r"].with_extremes(bad="#dddddd")
        image = axis.imshow(heat.values, cmap=colours, aspect="auto")
        axis.set_xticks(range(len(heat.columns)), heat.columns)
        axis.set_yticks(range(len(heat.rows)), heat.rows)
        axis.set(xlabel=heat.along, ylabel=heat.down)
        if len(heats) > 1:
            axis.set_title(heat.title, fontsize=10)
        for y, line in enumerate(heat.words):
            for x, word in enumerate(line):
                value = heat.values[y][x]
                red, green, blue, _ = image.to_rgba(np.array([value]))[0]
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.45
                axis.text(x, y, word, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
        figure.colorbar(image, ax=axis, label=heat.unit)
    return figure


def _width(heat: Heat) -> float:
    """In inches."""
    longest = max(len(part) for line in heat.words for word in line for part in word.split("\n"))
    return max(6.5, 2.6 + len(heat.columns) * (0.25 + 0.075 * longest))


def _height(heat: Heat) -> float:
    return 1.1 + 0.5 * len(heat.rows)


def plot(heat: Heat) -> "go.Figure":
    import plotly.graph_objects as go

    figure = go.Figure(
        go.Heatmap(
            x=list(heat.columns),
            y=list(heat.rows),
            z=[[value if math.isfinite(value) else None for value in line] for line in heat.values],
            text=[[word.replace("\n", "<br>") for word in line] for line in heat.words],
            texttemplate="%{text}",
            hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
            colorscale="Cividis",
            reversescale=not heat.higher_is_better,
            colorbar={"title": heat.unit},
        )
    )
    figure.update_xaxes(title=heat.along, type="category")
    figure.update_yaxes(title=heat.down, type="category", autorange="reversed")
    return figure
