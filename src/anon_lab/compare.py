"""The report of a sweep: every contender's best setting on fresh seeds, with mean and 95 % interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from anon_lab import launch
from anon_lab.contenders import Contender
from anon_lab.run_folder import RunFolder
from anon_lab.significance import interval, verdict
from anon_lab.study import Tried, best, open_study, running, tried
from anon_lab.sweep import in_words
from anon_lab.sweep_folder import Sweep
from anon_lab.tasks import Metric, Task

FIRST_SEED = 1000  # far from the trials' own, so that no seed that helped to choose is reported on


@dataclass(frozen=True)
class Outcome:
    """A contender after its sweep and its fresh seeds."""

    label: str
    optimizer: str
    fixed: dict[str, Any]
    """What was not searched."""
    trials: list[Tried]
    chosen: Tried | None
    """The best trial; None where none came to its end."""
    results: list[dict[str, Any]]
    """result.json of each fresh seed."""
    curves: list[list[dict[str, Any]]]
    """log.jsonl of each fresh seed."""

    at_edge: list[str] = field(default_factory=list)
    """Settings whose best value lies at an end of what was searched."""

    def values(self, metric: Metric) -> list[float]:
        """The final metric of every seed that did not diverge."""
        return [result["evaluation"][metric.name] for result in self.results if not result["diverged"]]

    def diverged(self) -> int:
        return sum(result["diverged"] for result in self.results)


def finish(task: Task, sweep: Sweep, seeds: int, where: launch.Place, console: Console) -> list[Outcome]:
    """Train every contender's best setting from fresh seeds, on all training examples, where that is not done yet."""
    trials = _all_tried(task, sweep)
    return [
        _finish(task, sweep, contender, over, seeds, where, console)
        for contender, over in zip(sweep.contenders, trials, strict=True)
    ]


def _all_tried(task: Task, sweep: Sweep) -> list[list[Tried]]:
    """Each contender's trials; a ValueError unless all have as many."""
    studies = [open_study(sweep.plan, contender, sweep.base, task.metric) for contender in sweep.contenders]
    trials = [tried(study, contender) for study, contender in zip(studies, sweep.contenders, strict=True)]
    wanted = max(sweep.plan.trials, *map(len, trials))
    for study, contender, over in zip(studies, sweep.contenders, trials, strict=True):
        if len(over) < wanted:
            begun = f", with {len(running(study))} more begun" if running(study) else ""
            raise ValueError(
                f"{contender.label} has {len(over)} of {wanted} trials{begun}: let `anon sweep` finish first"
            )
    return trials


def _finish(
    task: Task,
    sweep: Sweep,
    contender: Contender,
    trials: list[Tried],
    seeds: int,
    where: launch.Place,
    console: Console,
) -> Outcome:
    outcome = Outcome(contender.label, contender.optimizer, dict(contender.fixed), trials, None, [], [])
    chosen = best(trials, task.metric)
    if chosen is None:
        return outcome
    if where.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where.device)  # else a contender would show the largest one's memory
    wanted = launch.seeds(contender.settings(sweep.base, chosen.found), FIRST_SEED, seeds)
    # By trial: after more trials another may be the best, and what was trained from this one stays as it is.
    out = sweep.plan.out / "report" / f"{contender.folder}, trial {chosen.number}"
    plan = launch.Plan(out, resume=True, together=sweep.plan.together)
    results = launch.launch(task, wanted, plan, where, console)
    curves = [list(RunFolder(launch.folder(out, each)).records()) for each in wanted]
    return replace(outcome, chosen=chosen, results=results, curves=curves, at_edge=contender.at_edge(chosen.found))


def ranked(outcomes: Sequence[Outcome], metric: Metric) -> list[Outcome]:
    """The best mean first, among those of which as many seeds diverged: a setting that fails is not the best."""

    def place(outcome: Outcome) -> tuple[bool, int, float]:
        values = outcome.values(metric)
        middle = mean(values) if values else 0.0
        return not values, outcome.diverged(), -middle if metric.higher_is_better else middle

    return sorted(outcomes, key=place)


COLUMNS = ("optimizer", "{metric}", "against the best", "seeds", "setting")


def rows(outcomes: Sequence[Outcome], metric: Metric) -> list[list[str]]:
    """The final table, the best first, in the order of COLUMNS."""
    order = ranked(outcomes, metric)
    first = order[0].values(metric)
    lines = []
    for outcome in order:
        values = outcome.values(metric)
        lost = f"{outcome.diverged()} of {len(outcome.results)} diverged" if outcome.diverged() else str(len(values))
        if not values:
            lines.append([outcome.label, "diverged", "", lost if outcome.results else "no trial came to its end", ""])
            continue
        judged = "best" if outcome is order[0] else verdict(values, first, metric)
        setting = in_words(outcome.chosen.settings) if outcome.chosen else ""
        lines.append([outcome.label, with_interval(values), judged, lost, setting])
    return lines


def remarks(outcomes: Sequence[Outcome]) -> list[str]:
    """What to keep in mind about these numbers."""
    outer = [f"{' and '.join(outcome.at_edge)} of {outcome.label}" for outcome in outcomes if outcome.at_edge]
    if not outer:
        return []
    return [f"Found at the end of what was searched, so that a wider --range may hold better: {'; '.join(outer)}."]


def columns(metric: Metric) -> list[str]:
    return [each.format(metric=f"{metric.name} {metric.unit}".rstrip()) for each in COLUMNS]


def with_interval(values: Sequence[float]) -> str:
    """As "96.12 ± 0.34": both to the interval's second digit."""
    middle, half = interval(values)
    if half is None:
        return f"{middle:.4g}"
    if half == 0:
        return f"{middle:.4g} ± 0"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{middle:.{digits}f} ± {half:.{digits}f}"


def table(outcomes: Sequence[Outcome], metric: Metric) -> Table:
    """Mean and 95 % interval of each contender, and whether it is really behind the best."""
    shown = Table(title="mean and 95 % interval over fresh seeds, on the test examples")
    for column in columns(metric):
        shown.add_column(column, overflow="fold")
    for line in rows(outcomes, metric):
        shown.add_row(*line)
    return shown
