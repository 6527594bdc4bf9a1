"""The shell of every page: one self-contained HTML file with plots, light or dark as the reader's browser is."""

import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from string import Template
from typing import TYPE_CHECKING

from anon_lab.files import finite
from anon_lab.palette import viridis

if TYPE_CHECKING:
    import plotly.graph_objects as go  # only where a page is made: a study can train where it is not

INK = ("#1d232b", "#e4e8ee")
GRID = ("#dfe3e8", "#363c46")


def page(title: str, body: str, plots: "Mapping[str, Callable[[bool], go.Figure]]", fallback: str) -> str:
    """The whole file, plotly's script included.

    **Arguments:**
    - `body`: HTML with a `<div class="plot" id="...">` for each plot.
    - `plots`: by id, a function that draws the plot for a light or, given True, a dark page.
    - `fallback`: what to look at where there is no JavaScript.
    """
    from plotly.offline import get_plotlyjs

    # Both looks travel along, because only the browser knows which one it wants.
    figures = {
        name: {look: dress(draw(look == "dark"), look == "dark").to_plotly_json() for look in ("light", "dark")}
        for name, draw in plots.items()
    }
    return Template(SHELL).substitute(
        title=heading(title),
        body=body,
        fallback=escape(fallback),
        plotly=get_plotlyjs(),
        figures=json.dumps(finite(figures)).replace("</", "<\\/"),
    )


def dress(figure: "go.Figure", dark: bool) -> "go.Figure":
    """The look that all plots share."""
    figure.update_layout(
        template=None,
        font={"family": "system-ui, sans-serif", "size": 14, "color": INK[dark]},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"bgcolor": "#22272f" if dark else "#ffffff", "font_color": INK[dark]},
        margin={"l": 62, "r": 12, "t": 12, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        dragmode=False,
    )
    figure.update_xaxes(gridcolor=GRID[dark], zeroline=False, linecolor=GRID[dark], automargin=True)
    figure.update_yaxes(gridcolor=GRID[dark], zeroline=False, automargin=True)
    return figure


def gamma_colour(gamma: float, dark: bool) -> str:
    from plotly.colors import sample_colorscale

    return str(sample_colorscale("Viridis", viridis(gamma, dark))[0])


def heading(sentence: str) -> str:
    """Escaped, and never broken inside "γ = 1" or "97 %"."""
    return escape(sentence).replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}").replace(" %", "\N{NO-BREAK SPACE}%")


def html_table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A table; cells are text, the first of each row its heading."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for first, *rest in body:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ink: #1d232b; --soft: #5a6472; --back: #ffffff; --line: #dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa4b2; --back: #14171c; --line: #363c46; } }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 56rem; background: var(--back); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: clamp(1.4rem, 4.5vw, 2.1rem); line-height: 1.2; text-wrap: balance; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; line-height: 1.3; text-wrap: balance; margin: 2.8rem 0 .4rem; }
p, li { max-width: 46rem; }
.note, li { color: var(--soft); font-size: .92rem; }
.plot { height: 27rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); font-weight: normal; }
th:first-child { text-align: left; padding-left: 0; }
tr:first-child th { color: var(--soft); font-size: .85rem; }
summary { cursor: pointer; margin-top: 1.5rem; }
</style>
</head>
<body>
<h1>$title</h1>
$body
<noscript>$fallback</noscript>
<script>$plotly</script>
<script>
const figures = $figures;
const dark = matchMedia("(prefers-color-scheme: dark)");
const config = {responsive: true, displayModeBar: false};
function draw() {
  for (const [id, looks] of Object.entries(figures)) {
    const figure = looks[dark.matches ? "dark" : "light"];
    Plotly.react(id, figure.data, figure.layout, config);
  }
}
dark.addEventListener("change", draw);
draw();
</script>
</body>
</html>
"""
