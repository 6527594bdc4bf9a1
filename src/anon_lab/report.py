"""The page of a comparison: curves, the final table, accuracy over lr and gamma, step time and memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from html import escape
from itertools import cycle
from math import ceil, floor, log10
from pathlib import Path
from statistics import mean
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from anon_lab.compare import Outcome, columns, ranked, remarks, rows, with_interval
from anon_lab.files import write_json, write_text
from anon_lab.html import GRID, INK, gamma_colour, html_table, page
from anon_lab.palette import COLOUR, DASH
from anon_lab.significance import interval, p_value, verdict
from anon_lab.study import Tried
from anon_lab.sweep import in_words
from anon_lab.sweep_folder import Sweep
from anon_lab.tasks import Metric

# For optimizers that the palette has no colour for, after Okabe and Ito; and for those that take part more than once.
OTHER_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#cc79a7")
OTHER_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def save(sweep: Sweep, outcomes: Sequence[Outcome], metric: Metric) -> Path:
    """Write compare.json and compare.html beside the sweep; return the page's path."""
    write_json(sweep.plan.out / "compare.json", record(sweep, outcomes, metric))
    return write_text(sweep.plan.out / "compare.html", html(sweep, outcomes, metric))


def record(sweep: Sweep, outcomes: Sequence[Outcome], metric: Metric) -> dict[str, Any]:
    """Every number of the page."""
    first = ranked(outcomes, metric)[0].values(metric)
    return {
        "finding": finding(outcomes, metric),
        "protocol": protocol(sweep, outcomes),
        "remarks": remarks(outcomes),
        "task": sweep.base.task,
        "metric": asdict(metric),
        "base": sweep.base.as_json(),
        "outcomes": [
            {
                "label": outcome.label,
                "values": (values := outcome.values(metric)),
                "interval": interval(values) if values else None,
                "against_the_best": {"verdict": verdict(values, first, metric), "p": p_value(values, first)}
                if values
                else None,
                "diverged": outcome.diverged(),
                "chosen": None if outcome.chosen is None else asdict(outcome.chosen),
                "trials": [asdict(trial) for trial in outcome.trials],
                **{name: cost(outcome) for name, (_, cost) in COSTS.items()},
                "results": outcome.results,
                "curves": outcome.curves,
            }
            for outcome in ranked(outcomes, metric)
        ],
    }


def finding(outcomes: Sequence[Outcome], metric: Metric) -> str:
    """Who is first, and whether the others are really behind."""
    first, *rest = ranked(outcomes, metric)
    if not first.values(metric):
        return "Every contender diverged"
    sentence = f"{first.label} ends at {metric.name} {with_interval(first.values(metric))} {metric.unit}".rstrip()
    others = [each for each in rest if each.values(metric)]
    ties = [each.label for each in others if verdict(first.values(metric), each.values(metric), metric) == "tie"]
    if not rest:
        return sentence
    if len(rest) == 1:
        return f"{sentence}; {rest[0].label} {'ties with it' if ties else 'ends worse'}"
    if not ties:
        return f"{sentence}; all others end worse"
    if len(ties) == len(rest):
        return f"{sentence}; all others tie with it"
    return f"{sentence}; {' and '.join(ties)} {'ties' if len(ties) == 1 else 'tie'} with it"


def protocol(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """How the numbers were come by."""
    recipe, plan = sweep.base.recipe, sweep.plan
    length = f"{recipe.steps:,} steps" if recipe.steps is not None else f"{recipe.epochs:g} epochs"
    seeds = max(len(outcome.results) for outcome in outcomes)
    at_once = f", {plan.together} runs at once" if plan.together > 1 else ""
    lost = any(trial.ended == "given up" for outcome in outcomes for trial in outcome.trials)
    given_up = " (those behind the median at the same step were given up)" if lost else ""
    return (
        f"Task {sweep.base.task}, {length}, batches of {recipe.batch_size}{at_once}. Every contender had "
        f"{len(outcomes[0].trials)} trials{given_up}, judged on validation examples that were kept from training. Its "
        f"best setting was then trained on all training examples from {seeds} fresh seeds and evaluated on the test "
        "examples."
    )


def html(sweep: Sweep, outcomes: Sequence[Outcome], metric: Metric) -> str:
    outcomes = ranked(outcomes, metric)
    name = escape(metric.name)
    body = [
        f"<p>{escape(protocol(sweep, outcomes))}</p>",
        html_table(columns(metric), rows(outcomes, metric)),
        '<p class="note">Mean and 95 % interval (Student’s t) over fresh seeds. “Tie”: Welch’s test does not tell the '
        "means apart at 5 %, which is no proof that they are equal; it is not corrected for the number of comparisons."
        "</p>",
        *(f'<p class="note">{escape(remark)}</p>' for remark in remarks(outcomes)),
        f'<h2>{name.capitalize()} over the run</h2><div class="plot" id="curves"></div>',
        '<p class="note">On the test examples: the mean of the fresh seeds, and as a band the lowest and the highest.'
        "</p>",
        '<h2>Training loss</h2><div class="plot" id="losses"></div>',
        f'<h2>Every trial: validation {name} over learning rate</h2><div class="plot" id="trials"></div>',
        f'<p class="note">{escape(_lost(outcomes))} A ring marks the best, which was trained again.</p>',
    ]
    plots: dict[str, Callable[[bool], go.Figure]] = {
        "curves": lambda dark: _curves(outcomes, _evaluated(metric), _axis(metric), dark),
        "losses": lambda dark: _losses(outcomes, dark),
        "trials": lambda dark: _trials(outcomes, metric, dark),
    }
    if any("gamma" in trial.settings for outcome in outcomes for trial in outcome.trials):
        body.append(f'<h2>Validation {name} over lr and γ</h2><div class="plot" id="plane"></div>')
        body.append('<p class="note">All of Anon’s trials; × marks one that was given up or diverged.</p>')
        plots["plane"] = lambda dark: _plane(outcomes, metric, dark)
    body.append('<h2>Step time and memory</h2><div class="plot" id="cost"></div>')
    steps = "A step" if sweep.plan.together == 1 else f"A step of {sweep.plan.together} runs at once"
    body.append(f'<p class="note">{steps} holds data, network and optimizer; state is the optimizer’s alone.</p>')
    plots["cost"] = lambda dark: _cost(outcomes, dark)
    text = "The plots need JavaScript; compare.json beside this page holds every number."
    title = finding(outcomes, metric).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    return page(title, "\n".join(body), plots, text)


def _axis(metric: Metric) -> str:
    return f"{metric.name} in {metric.unit}" if metric.unit else metric.name


def _lost(outcomes: Sequence[Outcome]) -> str:
    """How many trials have no place in the plot."""
    ends = Counter((trial.ended or "").partition(":")[0] for outcome in outcomes for trial in outcome.trials)
    said = [f"{ends[end]} {end}" for end in ("given up", "diverged", "refused") if ends[end]]
    return f"Not shown: {', '.join(said)}." if said else "Every trial came to its end."


def _looks(outcomes: Sequence[Outcome], dark: bool) -> dict[str, dict[str, Any]]:
    """A line for each contender: viridis for gamma, the baselines' own colours and dashes, others as there are."""
    colours, dashes, used = cycle(OTHER_COLOURS), cycle(OTHER_DASHES), set()
    looks = {}
    for outcome in outcomes:
        gamma = (outcome.chosen.settings if outcome.chosen else outcome.fixed).get("gamma")
        if gamma is not None:
            look = {"color": gamma_colour(gamma, dark), "dash": next(dashes)}
        elif outcome.optimizer in COLOUR:
            again = outcome.optimizer in used
            dash = next(dashes) if again else DASH[outcome.optimizer]
            look = {"color": COLOUR[outcome.optimizer][dark], "dash": dash}
        else:
            look = {"color": next(colours), "dash": next(dashes)}
        used.add(outcome.optimizer)
        looks[outcome.label] = {**look, "width": 2.5}
    return looks


def _evaluated(metric: Metric) -> Callable[[dict[str, Any]], float | None]:
    return lambda each: (each.get("evaluation") or {}).get(metric.name)


def _by_step(outcome: Outcome, value: Callable[[dict[str, Any]], float | None]) -> dict[int, list[float]]:
    """At each step what `value` finds in the records of the seeds that did not diverge, where all have one."""
    kept = [curve for curve, result in zip(outcome.curves, outcome.results, strict=True) if not result["diverged"]]
    found: dict[int, list[float]] = {}
    for curve in kept:
        for each in curve:
            if (number := value(each)) is not None:
                found.setdefault(each["step"], []).append(number)
    return {step: numbers for step, numbers in sorted(found.items()) if len(numbers) == len(kept)}


def _curves(
    outcomes: Sequence[Outcome], value: Callable[[dict[str, Any]], float | None], title: str, dark: bool
) -> go.Figure:
    """The mean over the seeds, and as a band their lowest and highest."""
    figure = go.Figure()
    for label, look in _looks(outcomes, dark).items():
        points = _by_step(next(each for each in outcomes if each.label == label), value)
        steps = list(points)
        shared = {"legendgroup": label, "name": label}
        figure.add_scatter(
            x=steps + steps[::-1],
            y=[max(numbers) for numbers in points.values()] + [min(points[step]) for step in steps[::-1]],
            fill="toself",
            fillcolor=look["color"],
            opacity=0.15,
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            **shared,
        )
        means = [mean(numbers) for numbers in points.values()]
        figure.add_scatter(x=steps, y=means, mode="lines", line=look, hovertemplate="%{y:.4g}", **shared)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=title)
    figure.update_layout(hovermode="x unified")
    return figure


def _losses(outcomes: Sequence[Outcome], dark: bool) -> go.Figure:
    figure = _curves(outcomes, lambda each: each["loss"], "training loss, logarithmic", dark)
    found = [number for trace in figure.data for number in trace.y]  # pyright: ignore[reportAttributeAccessIssue]
    figure.update_yaxes(**_log_axis(found))
    return figure


def _log_axis(values: Iterable[float | None]) -> dict[str, Any]:
    """Ticks with whole numbers, where plotly would write 5 for 0.5, and few enough to be read."""
    positive = [value for value in values if value is not None and value > 0]
    if not positive:
        return {"type": "log"}
    decades = range(floor(log10(min(positive))), ceil(log10(max(positive))) + 1)
    digits = (1,) if len(decades) > 4 else (1, 2, 5)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _told(trials: Iterable[Tried]) -> list[str]:
    return [in_words(trial.settings) for trial in trials]


def _trials(outcomes: Sequence[Outcome], metric: Metric, dark: bool) -> go.Figure:
    figure = go.Figure()
    looks = _looks(outcomes, dark)
    for outcome, symbol in zip(outcomes, cycle(("circle", "square", "diamond", "triangle-up", "cross")), strict=False):
        done = [trial for trial in outcome.trials if trial.value is not None]
        figure.add_scatter(
            x=[trial.settings["lr"] for trial in done],
            y=[trial.value for trial in done],
            text=_told(done),
            mode="markers",
            marker={"color": looks[outcome.label]["color"], "symbol": symbol, "size": 9},
            name=outcome.label,
            legendgroup=outcome.label,
            hovertemplate="%{text}<br>%{y:.4g}<extra></extra>",
        )
        if outcome.chosen is not None:
            _ring(figure, outcome.chosen.settings["lr"], outcome.chosen.value, outcome.label, dark)
    rates = [trial.settings["lr"] for outcome in outcomes for trial in outcome.trials if trial.value is not None]
    figure.update_xaxes(title="peak learning rate, in each optimizer’s own unit", **_log_axis(rates))
    figure.update_yaxes(title=f"validation {_axis(metric)}")
    return figure


def _ring(figure: go.Figure, x: float, y: float | None, label: str, dark: bool, size: int = 17) -> None:
    marker = {"color": INK[dark], "symbol": "circle-open", "size": size, "line": {"width": 1.5}}
    figure.add_scatter(
        x=[x], y=[y], mode="markers", marker=marker, showlegend=False, legendgroup=label, hoverinfo="skip"
    )


def _plane(outcomes: Sequence[Outcome], metric: Metric, dark: bool) -> go.Figure:
    """The trials of every contender that has a gamma, by gamma and lr."""
    trials = [trial for outcome in outcomes for trial in outcome.trials if "gamma" in trial.settings]
    done = [trial for trial in trials if trial.value is not None]
    lost = [trial for trial in trials if trial.value is None]
    figure = go.Figure()
    shapes = (
        (lost, {"color": GRID[not dark], "symbol": "x-thin", "size": 8, "line": {"width": 1.5, "color": INK[dark]}}),
        (
            done,
            {
                "color": [trial.value for trial in done],
                "colorscale": "Cividis",
                "reversescale": not metric.higher_is_better,
                "colorbar": {"title": {"text": _axis(metric), "side": "right"}, "outlinewidth": 0},
                "size": 14,
                "line": {"width": 1, "color": INK[dark]},
            },
        ),
    )
    for chosen, marker in shapes:
        figure.add_scatter(
            x=[trial.settings["gamma"] for trial in chosen],
            y=[trial.settings["lr"] for trial in chosen],
            text=[f"{told}<br>{_end(trial)}" for trial, told in zip(chosen, _told(chosen), strict=True)],
            mode="markers",
            marker=marker,
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
        )
    for outcome in outcomes:
        if outcome.chosen is not None and "gamma" in outcome.chosen.settings:
            _ring(figure, outcome.chosen.settings["gamma"], outcome.chosen.settings["lr"], outcome.label, dark, 23)
    figure.update_xaxes(title="adaptivity γ")
    figure.update_yaxes(title="peak learning rate", **_log_axis(trial.settings["lr"] for trial in trials))
    return figure


def _end(trial: Tried) -> str:
    return f"{trial.value:.4g}" if trial.value is not None else str(trial.ended)


def _milliseconds(outcome: Outcome) -> float | None:
    return 1000 * mean(result["seconds_a_step"] for result in outcome.results) if outcome.results else None


def _state_bytes(outcome: Outcome) -> float | None:
    return outcome.results[0]["state_bytes"] / outcome.results[0]["parameters"] if outcome.results else None


def _peak_gib(outcome: Outcome) -> float | None:
    peaks = [result["peak_memory_bytes"] for result in outcome.results]
    return max(peaks) / 2**30 if peaks and None not in peaks else None


COSTS: dict[str, tuple[str, Callable[[Outcome], float | None]]] = {
    "milliseconds_a_step": ("milliseconds a step", _milliseconds),
    "state_bytes_a_parameter": ("state, bytes a parameter", _state_bytes),
    "peak_memory_gib": ("peak GPU memory, GiB", _peak_gib),
}


def _cost(outcomes: Sequence[Outcome], dark: bool) -> go.Figure:
    """A row of bars for each cost that was measured."""
    shown = {title: cost for title, cost in COSTS.values() if any(cost(outcome) is not None for outcome in outcomes)}
    figure = make_subplots(1, max(1, len(shown)), shared_yaxes=True, horizontal_spacing=0.06)
    looks = _looks(outcomes, dark)
    for column, (title, cost) in enumerate(shown.items(), 1):
        values = {outcome.label: value for outcome in outcomes[::-1] if (value := cost(outcome)) is not None}
        figure.add_bar(
            y=list(values),
            x=list(values.values()),
            text=[f"{value:.3g}" for value in values.values()],
            textposition="outside",
            cliponaxis=False,
            orientation="h",
            marker={"color": [looks[label]["color"] for label in values]},
            hovertemplate="%{y}: %{x:.3g}<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
        )
        room = 1.18 * max(values.values())  # for the numbers beside the bars
        figure.update_xaxes(title=title, range=[0, room], row=1, col=column)
    figure.update_yaxes(ticksuffix="  ")
    return figure
