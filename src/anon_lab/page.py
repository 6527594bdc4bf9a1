"""The demo's results as files: a page that needs no network, a picture, and every number in JSON."""

import io
from html import escape
from pathlib import Path
from statistics import mean, stdev
from string import Template
from typing import Any

import matplotlib as mpl
import plotly.graph_objects as go
from matplotlib.figure import Figure

from anon_lab import demo
from anon_lab.demo import Outcome, Results
from anon_lab.files import write_json, write_text
from anon_lab.html import GRID, gamma_colour, heading, html_table, page
from anon_lab.palette import COLOUR, DASH, viridis
from anon_lab.settings import versions
from anon_lab.tasks import digits

LINK = "#8a93a0"
SILENT: dict[str, Any] = {"hoverinfo": "skip", "showlegend": False}


def save(results: Results, out: Path) -> Path:
    """Write demo.json, demo.svg and demo.html into the folder, each whole or not at all; return the page's path."""
    # Both drawn before anything is written, so that a failure leaves the old files together.
    picture, page = svg(results), html(results)
    write_json(out / "demo.json", demo.record(results))
    write_text(out / "demo.svg", picture)
    return write_text(out / "demo.html", page)


def _stats(outcome: Outcome) -> tuple[float, float]:
    """Mean and standard deviation of the test accuracy, in percent."""
    return 100 * mean(outcome.test), 100 * stdev(outcome.test)


def _label(outcome: Outcome) -> str:
    middle, spread = _stats(outcome)
    return f"{outcome.name} {middle:.1f} ± {spread:.1f} %"


def _edges(results: Results) -> list[float]:
    gammas = [gamma for gamma, _ in results.anons]
    return [min(gammas) - 0.2, max(gammas) + 0.2]


def svg(results: Results) -> str:
    """Test accuracy over gamma, for print and the README."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    edges = _edges(results)
    for outcome in results.baselines:
        (middle, spread), colour = _stats(outcome), COLOUR[outcome.name][0]
        dash = {"dash": "--", "dot": ":"}[DASH[outcome.name]]
        axes.fill_between(edges, middle - spread, middle + spread, color=colour, alpha=0.13, linewidth=0)
        axes.plot(edges, [middle, middle], dash, color=colour, linewidth=2, label=_label(outcome))
    gammas, outcomes = zip(*results.anons, strict=True)
    axes.plot(gammas, [_stats(outcome)[0] for outcome in outcomes], color=LINK, linewidth=1.2, zorder=2)
    for gamma, outcome in results.anons:
        (middle, spread), colour = _stats(outcome), mpl.colormaps["viridis"](viridis(gamma))
        for accuracy in outcome.test:
            axes.plot(gamma, 100 * accuracy, "o", color=colour, alpha=0.3, markersize=3.5, markeredgewidth=0)
        axes.errorbar(gamma, middle, spread, fmt="o", color=colour, capsize=4, markersize=8, elinewidth=2)
    axes.set_title(demo.finding(results).replace(", ", ",\n", 1).replace("; ", ";\n"), fontsize=11)
    axes.set_xlabel("adaptivity γ (0: like SGD, 1: like Adam)")
    axes.set_ylabel(f"test accuracy in %, mean ± sd of {results.plan.seeds} seeds")
    axes.set(xlim=edges, xticks=gammas)
    axes.grid(color=GRID[0], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "anon"}):  # with no date either, the same results give the same file
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()


def accuracy_figure(results: Results, dark: bool = False) -> go.Figure:
    """Test accuracy over gamma: Anon as points with their seeds, the baselines as lines with bands."""
    figure = go.Figure()
    for outcome in results.baselines:
        _add_baseline(figure, outcome, _edges(results), dark)
    gammas, outcomes = zip(*results.anons, strict=True)
    means = [_stats(outcome)[0] for outcome in outcomes]
    figure.add_scatter(x=gammas, y=means, mode="lines", line={"color": LINK, "width": 1.5}, **SILENT)
    for gamma, outcome in results.anons:
        _add_anon(figure, outcome, gamma, dark)
    marks = {0.0: "like SGD", 1.0: "like Adam"}
    ticks = [f"{gamma:g}<br>{marks.get(gamma, '')}".replace("-", "−") for gamma in gammas]
    figure.update_xaxes(
        title={"text": "adaptivity γ", "standoff": 12}, range=_edges(results), tickvals=gammas, ticktext=ticks
    )
    figure.update_yaxes(title="test accuracy in %")
    return figure


def _add_baseline(figure: go.Figure, outcome: Outcome, edges: list[float], dark: bool) -> None:
    (middle, spread), colour = _stats(outcome), COLOUR[outcome.name][dark]
    figure.add_scatter(
        x=edges + edges[::-1],
        y=[middle - spread] * 2 + [middle + spread] * 2,
        mode="lines",
        line_width=0,
        fill="toself",
        fillcolor=colour,
        opacity=0.14,
        legendgroup=outcome.name,
        **SILENT,
    )
    figure.add_scatter(
        x=edges,
        y=[middle, middle],
        mode="lines",
        line={"color": colour, "dash": DASH[outcome.name], "width": 2.5},
        legendgroup=outcome.name,
        name=_label(outcome),
        hovertemplate=f"{_label(outcome)}<extra></extra>",
    )


def _add_anon(figure: go.Figure, outcome: Outcome, gamma: float, dark: bool) -> None:
    (middle, spread), colour = _stats(outcome), gamma_colour(gamma, dark)
    seeds = [100 * accuracy for accuracy in outcome.test]
    marker = {"color": colour, "size": 6, "opacity": 0.35}
    figure.add_scatter(x=[gamma] * len(seeds), y=seeds, mode="markers", marker=marker, **SILENT)
    figure.add_scatter(
        x=[gamma],
        y=[middle],
        mode="markers",
        marker={"color": colour, "size": 13},
        error_y={"array": [spread], "color": colour, "thickness": 2.5, "width": 7},
        showlegend=False,
        hovertemplate=f"{_label(outcome)}<br>lr {outcome.lr:.3g}<extra></extra>",
    )


def loss_figure(results: Results, dark: bool = False) -> go.Figure:
    """Training loss over epochs, the mean over the reported seeds."""
    figure = go.Figure()
    for outcome in results.outcomes:
        if outcome.gamma is None:
            line = {"color": COLOUR[outcome.name][dark], "dash": DASH[outcome.name], "width": 2.5}
        else:
            line = {"color": gamma_colour(outcome.gamma, dark), "width": 2.5}
        losses = [mean(epoch) for epoch in zip(*outcome.loss, strict=True)]
        figure.add_scatter(
            x=list(range(len(losses))),
            y=losses,
            mode="lines",
            name=outcome.name,
            line=line,
            hovertemplate="%{y:.2g}",
        )
    figure.update_xaxes(title="epochs")
    figure.update_yaxes(title="training loss in nats", type="log", dtick=1, exponentformat="power")
    figure.update_layout(hovermode="x unified")
    return figure


def html(results: Results) -> str:
    """The whole page."""
    body = Template(BODY).substitute(
        loss_title=heading(demo.loss_finding(results)),
        seeds=results.plan.seeds,
        image=f"{100 / digits.N_TEST:.1f}",
        edge=demo.EDGE * any(outcome.at_edge for outcome in results.outcomes),
        table=html_table(demo.COLUMNS, demo.rows(results)),
        how=_how(results),
        tuning=_tuning(results),
    )
    plots = {
        "accuracy": lambda dark: accuracy_figure(results, dark),
        "loss": lambda dark: loss_figure(results, dark),
    }
    return page(demo.finding(results), body, plots, "The plots need JavaScript; demo.svg beside this page does not.")


def _tuning(results: Results) -> str:
    """Validation accuracy at every learning rate tried."""
    head = ["optimizer", *(f"{factor:.2g} ×" for factor in results.plan.rates)]
    body = [
        [
            outcome.name,
            *(
                f"{'▸ ' if lr == outcome.lr else ''}{100 * mean(tried):.1f} (lr {lr:.3g})"
                for lr, tried in zip(outcome.rates, outcome.tuning, strict=True)
            ),
        ]
        for outcome in results.outcomes
    ]
    return html_table(head, body)


def _how(results: Results) -> str:
    """The protocol, as list items."""
    plan, parts = results.plan, digits.data()
    train, validation, test = (len(images.digits) for images in parts)
    items = [
        f"Task: scikit-learn's handwritten digits, {train} images to train on, {validation} to choose with and "
        f"{test} to report; an MLP 64-64-32-10 with ReLU, batches of {demo.BATCH}, {plan.epochs} epochs, cosine "
        "schedule.",
        f"Learning rate: each optimizer tries {len(plan.rates)} values on a log grid, {plan.tuning_seeds} "
        f"seed{'s' if plan.tuning_seeds > 1 else ''} each, and keeps the one with the best validation accuracy. "
        "Anon's plain lr is in other units at every γ, so its grid has its middle at 0.01 to the power γ: gradients "
        "here are around 0.01, and the steps come out equally long. AdamW's middle is 0.01, SGDM's 0.1.",
        f"Reported: {plan.seeds} fresh seeds at that learning rate. A seed fixes initial weights and batches, the "
        "same for every optimizer, so differences are taken in pairs; “level” means that their 95 % interval holds 0.",
        "γ in the headline is the one with the best validation accuracy. Choosing among five of them gives Anon five "
        "times the tuning of a baseline.",
        "No weight decay for anyone (AdamW without it is Adam); everything else at its default, momentum 0.9.",
        f"{results.wall_s:.0f} s on a CPU; " + ", ".join(f"{k} {v}" for k, v in versions(*demo.PACKAGES).items()) + ".",
    ]
    return "".join(f"<li>{escape(item)}</li>" for item in items)


BODY = """<p>Anon has one knob more than Adam: the adaptivity γ, how strongly a step compensates for the size of the
gradient. At 0 it behaves like SGD with momentum, at 1 like Adam, and it may lie between or beyond.</p>
<div class="plot" id="accuracy"></div>
<p class="note">Large points: mean over $seeds seeds, with one standard deviation; small points: the seeds. Lines and
bands: the same for the baselines. One test image is $image %.</p>
<h2>$loss_title</h2>
<div class="plot" id="loss"></div>
<p class="note">Mean over the same seeds, on all training images after each epoch. A click on a name hides its
curve.</p>
<h2>All results</h2>
$table
<p class="note">Test accuracy: mean and standard deviation over $seeds seeds$edge.</p>
<h2>How it was run</h2>
<ul>$how</ul>
<details><summary>Every learning rate tried: validation accuracy in %</summary>
$tuning
</details>
"""
