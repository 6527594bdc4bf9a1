"""Results in words: a mean with its spread, a comparison with the paper's, the lines of a sheet."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev

from rich.box import SIMPLE_HEAD
from rich.table import Table

from anon_lab.significance import verdict
from anon_lab.tables._spec import Outcome, Row, Sheet, Trial

NONE = "–"


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    if not values:
        return NONE
    middle = f"{mean(values):#.4g}".rstrip(".")
    return f"{middle} ± {stdev(values):#.2g}".rstrip(".") if len(values) > 1 else middle


def as_rich(sheet: Sheet) -> Table:
    """A sheet for the terminal."""
    head, *body = sheet.lines
    shown = Table(title=sheet.title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for place, column in enumerate(head):
        # Folded, because a number that is cut off looks like another number.
        shown.add_column(column, justify="right" if place else "left", overflow="fold", no_wrap=not place)
    for line in body:
        shown.add_row(*line)
    return shown


def over_seeds(what: str, outcome: Outcome) -> str:
    """A sheet's title: what its numbers are, and of how many seeds."""
    seeds = max((len(trial.results) for trial in outcome.trials), default=0)
    return f"{what}, mean ± standard deviation of {seeds} seeds" if seeds > 1 else f"{what}, one seed"


def measured(trial: Trial | None) -> str:
    """What a trial gave, and how many of its seeds diverged."""
    if trial is None or not trial.results:
        return NONE
    lost = len(trial.results) - len(trial.values)
    if not trial.values:
        return "diverged"
    return spread(trial.values) + (f" ({lost} of {len(trial.results)} diverged)" if lost else "")


def printed(row: Row) -> str:
    """What the paper prints; all of it where it contradicts itself."""
    return " / ".join(f"{value:g}" for value in row.printed) or NONE


def contenders(outcome: Outcome) -> list[Trial]:
    """Every row's best trial, the best first."""
    best = [trial for row in outcome.rows if (trial := outcome.best(row.name)) is not None]
    return sorted(best, key=lambda each: mean(each.values), reverse=outcome.metric.higher_is_better)


def headline(outcome: Outcome) -> str:
    """Who is best, and who cannot be told from it."""
    order = contenders(outcome)
    if not order:
        return "Everything diverged"
    first, *rest = order
    sentence = f"{first.row.name} ends best, at {measured(first)} {outcome.metric.unit}".rstrip()
    if len(first.values) < 2:
        return f"{sentence}, from one seed"
    ties = [each.row.name for each in rest if verdict(first.values, each.values, outcome.metric) == "tie"]
    if len(ties) == len(rest):
        return f"{sentence}; all others tie with it" if rest else sentence
    if len(ties) > 3:
        return f"{sentence}; {len(ties)} of {len(rest)} others tie with it"
    return f"{sentence}; " + (
        f"{', '.join(ties)} tie{'s' * (len(ties) == 1)} with it" if ties else "all others are behind"
    )


def judged(outcome: Outcome, ours: str, other: str) -> str:
    """How two rows stand in the paper, and whether they stand so here; a tie is said to be one."""
    rows = {row.name: row for row in outcome.rows}
    sign = 1 if outcome.metric.higher_is_better else -1
    gaps = [sign * (a - b) for a in rows[ours].printed for b in rows[other].printed]
    relation = (
        "ahead of" if min(gaps) > 0 else "behind" if max(gaps) < 0 else "in one place ahead of, in another behind,"
    )
    paper = f"In the paper {ours} ({printed(rows[ours])}) is {relation} {other} ({printed(rows[other])})"
    a, b = outcome.best(ours), outcome.best(other)
    for row, trial in ((rows[ours], a), (rows[other], b)):
        if trial is None:
            return f"{paper}; here {row.name} {'diverged' if row.lrs else 'was not trained at this size'}."
    assert a is not None
    assert b is not None
    numbers = f"{measured(a)} against {measured(b)}"
    if min(len(a.values), len(b.values)) < 2:
        return f"{paper}; here {numbers}, from one seed, which cannot tell them apart."
    found = {"better": "ahead of", "worse": "behind", "tie": "tie"}[verdict(a.values, b.values, outcome.metric)]
    if found == "tie":
        return f"{paper}; here the two tie: {numbers}."
    return f"{paper}; here it is {'too' if found == relation else found + ' it'}: {numbers}."


def as_list(title: str, outcome: Outcome, more: Mapping[str, Callable[[Row], str]] | None = None) -> Sheet:
    """A line for each row: its best learning rate's result, the paper's number, and how the best row compares."""
    metric, more = outcome.metric, more or {}
    order = contenders(outcome)
    lines = [["", "lr", f"{metric.name} {metric.unit}".strip(), "paper", "best is", *more]]
    for row in outcome.rows:
        best = outcome.best(row.name)
        against = ""
        if best is not None and best is not order[0]:
            against = verdict(order[0].values, best.values, metric) if len(order[0].values) > 1 else "?"
        lr = f"{best.lr:g}" if best else ", ".join(f"{lr:g}" for lr in row.lrs)
        done = measured(best) if best or not row.lrs else "diverged"
        lines.append([row.name, lr, done, printed(row), against, *(add(row) for add in more.values())])
    return Sheet(title, lines)


def by_lr(title: str, outcome: Outcome) -> list[Sheet]:
    """Every trial of the rows that were tried at several learning rates."""
    several = [row for row in outcome.rows if len(row.lrs) > 1]
    if not several:
        return []
    lrs = sorted({lr for row in several for lr in row.lrs}, reverse=True)
    head = ["", *(f"lr {lr:g}" for lr in lrs)]
    return [Sheet(title, [head, *([row.name, *(measured(outcome.at(row.name, lr)) for lr in lrs)] for row in several)])]
