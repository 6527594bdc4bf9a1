"""The page of a comparison: curves, the final table, accuracy over lr and gamma, step time and memory."""

from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import plotly.graph_objects as go

from anon_lab.compare import Outcome, interval, ranked, verdict
from anon_lab.files import write_json, write_text
from anon_lab.html import gamma_colour, html_table, page
from anon_lab.palette import COLOUR, DASH
from anon_lab.settings import Settings
from anon_lab.tasks import Metric

# For contenders that the palette has no colour for (Okabe and Ito's, less those the palette uses).
OTHERS = ("#0072b2", "#009e73", "#56b4e9", "#cc79a7", "#f0e442")


def save(base: Settings, outcomes: Sequence[Outcome], metric: Metric, out: Path) -> Path:
    """Write compare.json and compare.html; return the page's path."""
    write_json(out / "compare.json", record(base, outcomes, metric))
    return write_text(out / "compare.html", html(base, outcomes, metric))


def record(base: Settings, outcomes: Sequence[Outcome], metric: Metric) -> dict[str, Any]:
    """Every number of the page."""
    return {
        "task": base.task,
        "recipe": base.as_json()["recipe"],
        "metric": vars(metric),
        "finding": finding(outcomes, metric),
        "outcomes": [
            {
                "label": outcome.label,
                "chosen": outcome.chosen,
                "values": outcome.values(metric),
                "interval": interval(values) if (values := outcome.values(metric)) else None,
                "diverged": sum(result["diverged"] for result in outcome.results),
                "trials": [vars(trial) for trial in outcome.trials],
                "seconds_a_step": mean(result["seconds_a_step"] for result in outcome.results)
                if outcome.results
                else None,
                "state_bytes": outcome.results[0]["state_bytes"] if outcome.results else None,
                "curves": outcome.curves,
            }
            for outcome in outcomes
        ],
    }


def finding(outcomes: Sequence[Outcome], metric: Metric) -> str:
    """Who is first, and whether the others are really behind."""
    first, *rest = ranked(outcomes, metric)
    if not first.values(metric):
        return "Every contender diverged"
    middle, half = interval(first.values(metric))
    ties = [each.label for each in rest if verdict(first.values(metric), each.values(metric), metric) == "tie"]
    sentence = f"{first.label} ends at {middle:.4g} ± {half:.2g} {metric.unit}".rstrip()
    if not rest:
        return sentence
    if len(ties) == len(rest):
        return f"{sentence}; all others tie with it"
    return f"{sentence}; " + (f"{', '.join(ties)} tie with it" if ties else "all others are behind")


def html(base: Settings, outcomes: Sequence[Outcome], metric: Metric) -> str:
    body = [
        f"<p>{escape(_protocol(base, outcomes))}</p>",
        _final_table(outcomes, metric),
        '<p class="note">Mean and 95 % interval (Student’s t) over fresh seeds. “Best is better” by Welch’s test at '
        "5 %, without a correction for the number of comparisons.</p>",
        f'<h2>{escape(metric.name.capitalize())} over the run</h2><div class="plot" id="curves"></div>',
        '<h2>Training loss</h2><div class="plot" id="losses"></div>',
        '<h2>Every trial</h2><div class="plot" id="trials"></div>',
        f'<p class="note">Validation {escape(metric.name)} of each trial over its learning rate. The best of each '
        "contender was trained again from fresh seeds.</p>",
    ]
    plots: dict[str, Any] = {
        "curves": lambda dark: _curves(outcomes, metric, dark),
        "losses": lambda dark: _losses(outcomes, dark),
        "trials": lambda dark: _trials(outcomes, metric, dark),
    }
    if _searched_gamma(outcomes):
        body.append(f'<h2>{escape(metric.name.capitalize())} over lr and γ</h2><div class="plot" id="plane"></div>')
        plots["plane"] = lambda dark: _plane(outcomes, metric, dark)
    body.append('<h2>Step time and memory</h2><div class="plot" id="cost"></div>')
    plots["cost"] = lambda dark: _cost(outcomes, dark)
    text = "The plots need JavaScript; compare.json beside this page holds every number."
    return page(finding(outcomes, metric), "\n".join(body), plots, text)


def _protocol(base: Settings, outcomes: Sequence[Outcome]) -> str:
    trials = max(len(outcome.trials) for outcome in outcomes)
    seeds = max((len(outcome.results) for outcome in outcomes), default=0)
    length = f"{base.recipe.steps} steps" if base.recipe.steps is not None else f"{base.recipe.epochs:g} epochs"
    return (
        f"Task {base.task}, {length}, batches of {base.recipe.batch_size}. Every contender had {trials} trials, judged "
        "on validation examples that were kept from training; then its best setting was trained from "
        f"{seeds} fresh seeds."
    )


def _final_table(outcomes: Sequence[Outcome], metric: Metric) -> str:
    first = ranked(outcomes, metric)[0]
    rows = []
    for outcome in ranked(outcomes, metric):
        values = outcome.values(metric)
        setting = ", ".join(f"{name} {value:.3g}" for name, value in (outcome.chosen or {}).items())
        if not values:
            rows.append([outcome.label, "diverged", "", "", setting])
            continue
        middle, half = interval(values)
        judged = "" if outcome is first else verdict(first.values(metric), values, metric)
        lost = sum(result["diverged"] for result in outcome.results)
        rows.append([outcome.label, f"{middle:.4g} ± {half:.2g}", judged, str(lost or ""), setting])
    return html_table(["", f"{metric.name} {metric.unit}", "best is", "diverged", "setting"], rows)


def _look(outcomes: Sequence[Outcome], dark: bool) -> dict[str, dict[str, Any]]:
    """A line for each contender: the baselines' own colours, viridis for a fixed gamma."""
    spare = cycle(OTHERS)
    lines = {}
    for outcome in outcomes:
        if outcome.label in COLOUR:
            lines[outcome.label] = {"color": COLOUR[outcome.label][dark], "dash": DASH[outcome.label], "width": 2.5}
        elif outcome.gamma is not None:
            lines[outcome.label] = {"color": gamma_colour(outcome.gamma, dark), "width": 2.5}
        else:
            lines[outcome.label] = {"color": next(spare), "width": 2.5}
    return lines


def _mean_curve(curves: list[list[dict[str, Any]]], value: Any) -> tuple[list[int], list[float]]:
    """Steps, and the mean over the seeds of what `value` finds in a record; only steps that every seed has."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for each in curve:
            if (found := value(each)) is not None:
                by_step.setdefault(each["step"], []).append(found)
    steps = [step for step, found in sorted(by_step.items()) if len(found) == len(curves)]
    return steps, [mean(by_step[step]) for step in steps]


def _curves(outcomes: Sequence[Outcome], metric: Metric, dark: bool) -> go.Figure:
    figure = go.Figure()
    for outcome in outcomes:
        steps, values = _mean_curve(outcome.curves, lambda each: (each.get("evaluation") or {}).get(metric.name))
        line = _look(outcomes, dark)[outcome.label]
        figure.add_scatter(x=steps, y=values, mode="lines", name=outcome.label, line=line, hovertemplate="%{y:.4g}")
    figure.update_xaxes(title="steps")
    figure.update_yaxes(title=f"{metric.name} {metric.unit}".strip())
    figure.update_layout(hovermode="x unified")
    return figure


def _losses(outcomes: Sequence[Outcome], dark: bool) -> go.Figure:
    figure = go.Figure()
    for outcome in outcomes:
        steps, values = _mean_curve(outcome.curves, lambda each: each["loss"])
        line = _look(outcomes, dark)[outcome.label]
        figure.add_scatter(x=steps, y=values, mode="lines", name=outcome.label, line=line, hovertemplate="%{y:.3g}")
    figure.update_xaxes(title="steps")
    figure.update_yaxes(title="training loss in nats", type="log")
    figure.update_layout(hovermode="x unified")
    return figure


def _trials(outcomes: Sequence[Outcome], metric: Metric, dark: bool) -> go.Figure:
    figure = go.Figure()
    for outcome in outcomes:
        done = [trial for trial in outcome.trials if trial.value is not None]
        marker = {"color": _look(outcomes, dark)[outcome.label]["color"], "size": 9}
        figure.add_scatter(
            x=[trial.found["lr"] for trial in done],
            y=[trial.value for trial in done],
            text=[", ".join(f"{name} {value:.3g}" for name, value in trial.found.items()) for trial in done],
            mode="markers",
            marker=marker,
            name=outcome.label,
            hovertemplate="%{text}<br>%{y:.4g}<extra></extra>",
        )
    figure.update_xaxes(title="learning rate, in each optimizer's unit", type="log", exponentformat="power")
    figure.update_yaxes(title=f"validation {metric.name} {metric.unit}".strip())
    return figure


def _searched_gamma(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if any("gamma" in trial.found for trial in outcome.trials)]


def _plane(outcomes: Sequence[Outcome], metric: Metric, dark: bool) -> go.Figure:
    figure = go.Figure()
    for outcome in _searched_gamma(outcomes):
        done = [trial for trial in outcome.trials if trial.value is not None]
        figure.add_scatter(
            x=[trial.found["gamma"] for trial in done],
            y=[trial.found["lr"] for trial in done],
            mode="markers",
            marker={
                "color": [trial.value for trial in done],
                "colorscale": "Cividis",
                "size": 14,
                "colorbar": {"title": f"{metric.name} {metric.unit}".strip()},
                "reversescale": not metric.higher_is_better,
            },
            text=[f"{trial.value:.4g}" for trial in done],
            hovertemplate="γ %{x:.3g}, lr %{y:.3g}: %{text}<extra></extra>",
            showlegend=False,
        )
    figure.update_xaxes(title="adaptivity γ")
    figure.update_yaxes(title="learning rate", type="log", exponentformat="power")
    return figure


def _cost(outcomes: Sequence[Outcome], dark: bool) -> go.Figure:
    figure = go.Figure()
    done = [outcome for outcome in outcomes if outcome.results]
    for outcome in done:
        first = outcome.results[0]
        figure.add_scatter(
            x=[1000 * mean(result["seconds_a_step"] for result in outcome.results)],
            y=[first["state_bytes"] / first["parameters"]],
            mode="markers+text",
            text=[outcome.label],
            textposition="top center",
            marker={"color": _look(outcomes, dark)[outcome.label]["color"], "size": 13},
            showlegend=False,
            hovertemplate="%{text}: %{x:.3g} ms, %{y:.3g} bytes<extra></extra>",
        )
    figure.update_xaxes(title="milliseconds a step, data and network included", rangemode="tozero")
    figure.update_yaxes(title="optimizer state, bytes a parameter", rangemode="tozero")
    return figure
