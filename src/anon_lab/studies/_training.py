"""Trains the jobs that a study lacks, in its order, as far as the time reaches."""

import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anon_lab import tasks
from anon_lab.launch import Place
from anon_lab.run import Run
from anon_lab.settings import provenance
from anon_lab.steps import Steps
from anon_lab.studies._results import Record, Results
from anon_lab.studies._spec import Job, Stage, Study
from anon_lab.tasks import Task
from anon_lab.train import Every, drive

POINTS = 32
"""Of a curve, beside its evaluations."""


@dataclass(frozen=True)
class Order:
    """How much of a study is done now."""

    out: Path
    minutes: float | None = None
    """After which no job is started that would not end in time; None: until all is done."""
    only: tuple[str, ...] = ()
    """Patterns (* and ?) for "stage | ground | contender", of which a run has one in it; none: all runs."""


def train(study: Study, results: Results, order: Order, where: Place, console: Console) -> bool:
    """Train what is missing; whether the time was enough."""
    if where.world > 1:
        raise ValueError("a study trains in one process, but torchrun started several")
    trainer = _Trainer(results, order, where)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for stage in study.stages:
            trained = 0
            line = progress.add_task(stage.name, total=0, visible=False)
            while left := missing(stage, results, order.only):  # what is found may ask for more
                progress.update(line, total=trained + len(left), visible=True)
                for group in groups(left, where.device):
                    if not trainer.fits(group):
                        return False
                    trainer.train(stage, group)
                    assert all(map(results.of, group)), "a run is not found under the name of its job"
                    trained += len(group)
                    progress.advance(line, len(group))
            if trained:
                minutes = results.minutes()[trainer.provenance["device"]]
                done = f"{stage.name}: {trained} runs, {minutes:.1f} device minutes in all"
                progress.console.print(done, markup=False, highlight=False)
    return True


def missing(stage: Stage, results: Results, only: tuple[str, ...] = ()) -> list[Job]:
    """The stage's jobs that have no result, each once; those of which is not yet known what they are, not at all."""
    jobs = {job.key(): job for job in stage.jobs(results) if results.of(job) is None}
    return [job for job in jobs.values() if not only or matches(only, run_name(stage, job))]


def matches(only: tuple[str, ...], name: str) -> bool:
    """Whether one of the patterns is in the name."""
    return any(fnmatch(name, f"*{each}*") for each in only)


def run_name(stage: Stage, job: Job) -> str:
    return f"{stage.name} | {job.ground.name} | {job.label}"


def groups(jobs: Sequence[Job], device: torch.device) -> Iterator[list[Job]]:
    """Jobs that train at once: neighbours of equal length, as many as fill a GPU; on a CPU one alone."""
    group: list[Job] = []
    for job in jobs:
        most = job.ground.together if device.type == "cuda" else 1
        if group and (len(group) == most or (job.ground, job.report) != (group[0].ground, group[0].report)):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def seconds_a_step(job: Job, results: Results, device: str, guess: float) -> float:
    """Of the device's time for one run among those beside it: as measured on the same network, else as guessed."""

    def is_alike(record: Record) -> bool:
        settings = record["settings"]
        stacked = settings.get("stacked", False), job.ground.stacked and settings["precision"] == "bf16"  # on a GPU
        same_task = (settings["task"], settings["options"]) == (job.ground.task, _as_json(job.ground.options))
        return same_task and stacked[0] == stacked[1]

    alike = [each for each in results.all() if each["device"] == device and is_alike(each)]
    same = [each for each in alike if each["ground"] == job.ground.name] or alike
    return mean(each["device_seconds"] / each["steps"] for each in same) if same else guess


def _as_json(options: Any) -> Any:
    return json.loads(json.dumps(options))


def _free_memory() -> None:
    gc.collect()  # a run and its optimizer hold each other
    torch.cuda.empty_cache()


class _Trainer:
    def __init__(self, results: Results, order: Order, where: Place) -> None:
        self.results, self.order, self.device = results, order, where.device
        self.provenance = provenance(where.device)
        self.started = time.perf_counter()
        self._tasks: dict[str, tuple[Task, str]] = {}
        self._rehearsed: set[tuple[str, str]] = set()

    def fits(self, group: Sequence[Job]) -> bool:
        if self.order.minutes is None:
            return True
        used = time.perf_counter() - self.started
        return used + sum(map(self.expected, group)) <= 60 * self.order.minutes

    def expected(self, job: Job) -> float:
        """Seconds; 0 for the first of its kind on a CPU, of which nobody knows how fast it is."""
        guess = job.ground.seconds if self.device.type == "cuda" else 0.0
        return job.steps * seconds_a_step(job, self.results, self.provenance["device"], guess)

    def train(self, stage: Stage, group: Sequence[Job]) -> None:
        """Train a group and append its lines."""
        task, data = self._task(group[0])
        self._check_data(group, data)
        if self.device.type == "cuda":
            if group[0].ground.together == 1:
                self._rehearse(group[0], task)
            torch.cuda.reset_peak_memory_stats(self.device)  # else a group would show the largest one's memory
        started = time.perf_counter()
        runs = [Run(job.settings(self.device), task, self.device) for job in group]
        curves: dict[int, list[Any]] = {id(run): [] for run in runs}

        def watch(run: Run, record: dict[str, Any]) -> None:
            seen = (record.get("evaluation") or {}).get(task.metric.name)
            curves[id(run)].append([record["step"], round(record["seconds"], 3), record["loss"], seen])

        ended = drive(runs, None, Every(log=max(1, runs[0].total // POINTS), checkpoint=0), watch)
        measure = group[0].ground.measure
        for number, result in enumerate(ended):
            if measure is not None and not result["diverged"]:
                result["evaluation"] |= measure(runs[number])
        share = (time.perf_counter() - started) / len(group)
        for job, result, curve in zip(group, ended, curves.values(), strict=True):
            self.results.add(self._record(stage, job, result, curve, share, len(group)) | {"data": data})
        if self.device.type == "cuda":
            runs.clear()
            _free_memory()

    def _rehearse(self, job: Job, task: Task) -> None:
        """Take a step of a run that is thrown away: kernels are compiled and chosen in it, and in no run whose time is
        compared."""
        if (job.ground.key, job.optimizer) not in self._rehearsed:
            self._rehearsed.add((job.ground.key, job.optimizer))
            Steps([Run(job.settings(self.device), task, self.device)]).take()
            _free_memory()

    def _task(self, job: Job) -> tuple[Task, str]:
        """With a fingerprint of its data."""
        key = json.dumps([job.ground.task, dict(job.ground.options), job.report], default=str)
        if key not in self._tasks:
            task = tasks.load(job.ground.task, None, not job.report, **job.ground.options)
            self._tasks[key] = task, tasks.fingerprint(task, self.device)
        return self._tasks[key]

    def _check_data(self, group: Sequence[Job], data: str) -> None:
        """Refuse to go on with a contender on other data than before: its own runs are compared with each other."""
        for label, ground, split in {(job.label, job.ground.name, job.split) for job in group}:
            begun = [
                each.get("data", data)
                for each in self.results.all()
                if (each["label"], each["ground"], each["split"]) == (label, ground, split)
            ]
            if set(begun) - {data}:
                raise ValueError(
                    f"{label} on {ground!r} was trained on other data before: give the same, or take its lines "
                    f"out of {' and '.join(map(str, self.results.paths))}"
                )

    def _record(
        self, stage: Stage, job: Job, result: dict[str, Any], curve: list[Any], share: float, together: int
    ) -> Record:
        outcome = ("evaluation", "diverged", "loss", "steps", "seconds", "seconds_a_step")
        more = ("parameters", "state_bytes", "peak_memory_bytes")
        return {
            "stage": stage.name,
            "ground": job.ground.name,
            "label": job.label,
            "split": job.split,
            **{each: result[each] for each in outcome},
            "device_seconds": share,
            "together": together,
            **{each: result[each] for each in more},
            "settings": job.settings(self.device).as_json(),
            **self.provenance,
            # Thousands of trials lie beside a few that are reported on: of those the evaluations are enough.
            "curve": curve if job.report else [point for point in curve if point[3] is not None],
        }
