"""What a study has found so far: one JSON object a line, appended as each job ends, and what follows for the next."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from anon_lab.files import finite, write_bytes
from anon_lab.studies._spec import FIRST_SEED, TUNING_SEED, Contender, Ground, Job, Stage, recorded_key
from anon_lab.tasks import Metric

Record = dict[str, Any]

MOST_CHECKED = 6
"""Learning rates that a check goes through, if the best is always the last."""


class Results:
    """The file runs.jsonl: whole lines only, whatever moment a process is killed at.

    **Arguments:**
    - `others`: files of other studies, whose runs need not be trained again, and do not count as this one's.
    """

    def __init__(self, path: Path, *others: Path) -> None:
        self.path, self.paths = path, (path, *others)
        self.borrowed = {key: record for other in others for key, record in _read(other)}
        self._known: dict[str, Any] = {}
        self.records: dict[str, Record] = dict(_read(path))
        self.cut_off = [each for each in self.paths if each.exists() and each.read_bytes()[-1:] not in (b"", b"\n")]
        """Files whose last line is not whole, and is left out."""

    def add(self, record: Record) -> None:
        line = json.dumps(finite(record), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _forget_half_line(self.path)
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        kept = json.loads(line)
        self.records[_key(kept)] = kept
        self._known.clear()

    def all(self) -> list[Record]:
        """Borrowed ones included."""
        return [*self.borrowed.values(), *self.records.values()]

    def known(self, name: str, find: Callable[[], Any]) -> Any:
        """What follows from these results, found once."""
        if name not in self._known:
            self._known[name] = find()
        return self._known[name]

    def of(self, job: Job) -> Record | None:
        key = job.key()
        return self.records.get(key) or self.borrowed.get(key)

    def minutes(self) -> dict[str, float]:
        """Of each device, over all jobs; runs that trained together share theirs."""
        found: dict[str, float] = {}
        for record in self.records.values():
            found[record["device"]] = found.get(record["device"], 0.0) + record["device_seconds"] / 60
        return found


def _whole(content: bytes) -> bytes:
    """Up to the end of the last whole line."""
    return content[: content.rfind(b"\n") + 1]


def _forget_half_line(path: Path) -> None:
    """Of a process that was killed while it wrote. Not for those who only read: the writer may be at it now."""
    content = path.read_bytes() if path.exists() else b""
    if len(whole := _whole(content)) < len(content):
        write_bytes(path, whole)


def _read(path: Path) -> Iterator[tuple[str, Record]]:
    lines = _whole(path.read_bytes()) if path.exists() else b""
    for number, line in enumerate(lines.decode().splitlines(), 1):
        try:
            record = json.loads(line)
            yield _key(record), record
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} of {path} is not a run that a study wrote") from None


def _key(record: Record) -> str:
    return recorded_key(record["ground"], record["settings"])


def value(record: Record, metric: Metric) -> float | None:
    """The final metric; None where the run diverged."""
    return None if record["diverged"] else record["evaluation"][metric.name]


def worth(record: Record, metric: Metric) -> float:
    """The value, turned so that more is better; where the run diverged, less than any number."""
    number = value(record, metric)
    if number is None:
        return float("-inf")
    return number if metric.higher_is_better else -number


def best(records: Sequence[Record], metric: Metric) -> Record | None:
    """The one with the best value, the earliest of equals; None where all diverged."""
    alive = [record for record in records if not record["diverged"]]
    return max(alive, key=lambda record: worth(record, metric), default=None)


def trials(contender: Contender, ground: Ground, results: Results, axis: int) -> list[Job]:
    """The jobs of one axis of the search; none as long as the axes before it are not all done."""
    start = dict(contender.fixed) if axis == 0 else tuned(contender, ground, results, axis)
    if start is None:
        return []
    name, values = contender.axes[axis]
    return [Job(contender.label, ground, contender.optimizer, {**start, name: each}) for each in values]


def tried(contender: Contender, ground: Ground, results: Results, axes: int | None = None) -> list[tuple[Job, Record]]:
    """All trials of the first axes (None: all) that are over."""
    number = len(contender.axes) if axes is None else axes
    jobs = [job for axis in range(number) for job in trials(contender, ground, results, axis)]
    return [(job, record) for job in jobs if (record := results.of(job)) is not None]


def tuned(contender: Contender, ground: Ground, results: Results, axes: int | None = None) -> Mapping[str, Any] | None:
    """The settings that did best on validation examples; None before all trials are over, or if all diverged."""
    number = len(contender.axes) if axes is None else axes
    over = tried(contender, ground, results, number)
    if len(over) < sum(len(values) for _, values in contender.axes[:number]):
        return None
    winner = best([record for _, record in over], ground.metric)
    return None if winner is None else next(job.values for job, record in over if record is winner)


def found_on(contender: Contender, ground: Ground, results: Results) -> Mapping[str, Any] | None:
    """What the search for this ground has led to, without its checks."""
    if ground.tuned_on is None:
        return tuned(contender, ground, results)
    return chosen(contender, ground.tuned_on, results)


def checks(contender: Contender, ground: Ground, results: Results) -> list[Job]:
    """The settings that were found, and the same at the learning rate below, from as many seeds each as the ground asks
    for; none before the search is over. If they were found on shorter runs, at the one above instead, and further on
    either way as long as the best is at an end."""
    values = found_on(contender, ground, results)
    if values is None or not ground.checks:
        return []

    def at(rates: Sequence[float]) -> list[Job]:
        seeds = range(TUNING_SEED, TUNING_SEED + ground.checks)
        each = [(lr, seed) for lr in rates for seed in seeds]
        return [Job(contender.label, ground, contender.optimizer, {**values, "lr": lr}, seed) for lr, seed in each]

    lr, lrs = values["lr"], sorted(dict(contender.axes)["lr"])
    if ground.tuned_on is None:
        return at([lr, *lrs[: lrs.index(lr)][-1:]])
    finalists = [lr, beside(lrs, lr, up=True)]
    while len(means := _means(at(finalists), results)) == len(finalists) < MOST_CHECKED:
        best_lr = max(means, key=means.__getitem__)
        if min(finalists) < best_lr < max(finalists):
            break
        finalists.append(beside(lrs, best_lr, up=best_lr == max(finalists)))
    return at(finalists)


def beside(lrs: Sequence[float], lr: float, up: bool) -> float:
    """The next of these learning rates; beyond the last, as far away as the last two are from each other."""
    further = sorted((each for each in lrs if (each > lr if up else each < lr)), reverse=not up)
    if further:
        return further[0]
    last, before = sorted(lrs, reverse=up)[:2]
    return float(f"{lr * last / before:.3g}")


def _means(jobs: Sequence[Job], results: Results) -> dict[float, float]:
    """By learning rate, what the seeds are worth in the mean; of those only that are all over."""
    worths: dict[float, list[float]] = {}
    for job in jobs:
        if (record := results.of(job)) is not None:
            worths.setdefault(job.values["lr"], []).append(worth(record, job.ground.metric))
    return {lr: mean(each) for lr, each in worths.items() if len(each) == jobs[0].ground.checks}


def chosen(contender: Contender, ground: Ground, results: Results) -> Mapping[str, Any] | None:
    """The settings that were found, with the learning rate that has the best mean in the check; None before all of that
    is over."""
    values, jobs = found_on(contender, ground, results), checks(contender, ground, results)
    means = _means(jobs, results)
    if values is None or len(means) * ground.checks < len(jobs):
        return None
    return {**values, "lr": max(means, key=means.__getitem__)} if means else values


Field = Callable[[Results], Sequence[Contender]]
"""Who takes part, which may follow from results; nobody as long as it is not known."""


def always(contenders: Sequence[Contender]) -> Field:
    """Whatever the results are."""
    return lambda results: contenders


def search(field: Field, ground: Ground, rounds: int = 3) -> list[Stage]:
    """A stage for each axis, in which every contender takes its turn, and the check, if the ground asks for one."""

    def stage(axis: int) -> Stage:
        def jobs(results: Results) -> list[Job]:
            able = (each for each in field(results) if axis < len(each.axes))
            return [job for each in able for job in trials(each, ground, results, axis)]

        return Stage(f"tune {ground.name}, round {axis + 1}", jobs)

    return [*(stage(axis) for axis in range(rounds)), *check(field, ground)]


def check(field: Field, ground: Ground) -> list[Stage]:
    """The end of a search: a stage, or none if the ground asks for none."""

    def jobs(results: Results) -> list[Job]:
        return [job for each in field(results) for job in checks(each, ground, results)]

    seeds = "1 seed" if ground.checks == 1 else f"{ground.checks} seeds"
    return [Stage(f"check {ground.name}, {seeds}", jobs)] if ground.checks else []


def report(field: Field, ground: Ground, seeds: int = 3) -> Stage:
    """Fresh seeds of every tuned contender; seed by seed, so that a stage cut short has everyone once."""

    def jobs(results: Results) -> list[Job]:
        settings = [(each, chosen(each, ground, results)) for each in field(results)]
        return [
            Job(each.label, ground, each.optimizer, values, seed, report=True)
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
            for each, values in settings
            if values is not None
        ]

    return Stage(f"report {ground.name}", jobs)
