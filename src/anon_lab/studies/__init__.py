"""Questions that take many runs to answer; `run` trains what a study lacks, in its order, and writes its report.

Each is a module of this package with `study(tiny)`: an ordered list of stages, whose jobs follow from the results so
far. Settings are chosen on validation examples and reported on fresh seeds and the test set.
"""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anon_lab.launch import Place
from anon_lab.studies import _report
from anon_lab.studies._results import Results
from anon_lab.studies._spec import Study
from anon_lab.studies._training import Order, matches, missing, run_name, seconds_a_step, train

__all__ = ["NAMES", "Order", "folder", "load", "plan", "report", "run", "trained"]

NAMES: Mapping[str, str] = {
    "guards": "which of Anon's guards and refresh times are safe and good",
    "gamma": "what gamma changes on each task, from -1 to 2, and which learning rate it wants",
    "length": "GPTs trained four and sixteen times as long: does what gamma gains last",
    "gpt2": "GPT-2 small: loss against steps and against time",
    "cifar10": "ResNet-20 on CIFAR-10: gamma against SGDM and AdamW; beta3 and refresh times",
    "lag": "why gamma 1 is behind AdamW: what psi remembers, how old it is, whether it follows, how weights decay",
    "diffusion": "a small diffusion model of CIFAR-10: FID",
}

TINY = "Made with --tiny, on stand-ins for its tasks: this shows that all works, and says nothing about the question."


def load(name: str, tiny: bool = False) -> Study:
    """The study's description; tiny: with networks and lengths that show on a CPU that all works."""
    if name not in NAMES:
        raise ValueError(f"there is no study {name!r}; there are {', '.join(NAMES)}")
    study: Study = importlib.import_module(f"{__name__}.{name}").study(tiny)
    return replace(study, asks=f"{study.asks} {TINY}") if tiny else study


def folder(name: str, out: Path, tiny: bool) -> Path:
    return out / (f"{name}-tiny" if tiny else name)


def trained(name: str, study: Study, out: Path, tiny: bool = False) -> Results:
    """What has been trained so far, by this study and by those that it builds on."""
    return Results(*(folder(each, out, tiny) / "runs.jsonl" for each in (name, *study.builds_on)))


def run(name: str, order: Order, where: Place, console: Console, tiny: bool = False) -> list[Path]:
    """Train what is missing, say what is left, and write the report."""
    study = load(name, tiny)
    results = trained(name, study, order.out, tiny)
    _check_only(order.only, study, results)
    study.check()
    train(study, results, order, where, console)
    console.print(_report.left_in_words(study, results), markup=False, highlight=False)
    return report(name, order.out, console, tiny)


def report(name: str, out: Path, console: Console, tiny: bool = False) -> list[Path]:
    """Write README.md, NAME.json and the pictures from the results so far; print the tables."""
    place, study = folder(name, out, tiny), load(name, tiny)
    results = trained(name, study, out, tiny)
    command = f"anon study {name}{' --tiny' if tiny else ''}"
    return _report.save(name, study, results, command, place, console)


def plan(name: str, out: Path, tiny: bool = False, only: tuple[str, ...] = ()) -> Table:
    """Every stage with what is done and left, as far as it is known before the stages before it are done."""
    study = load(name, tiny)
    results = trained(name, study, out, tiny)
    _check_only(only, study, results)
    shown = Table(title=f"study {name}: {study.asks}", caption="? depends on what the stages before it find")
    for column in ("stage", "done", "left", "H200 minutes, about"):
        shown.add_column(column, justify="left" if column == "stage" else "right", overflow="fold")
    for stage in study.stages:
        left = missing(stage, results, only)
        known = {job.key() for job in stage.jobs(results)}
        seconds = sum(job.steps * seconds_a_step(job, results, "NVIDIA H200", job.ground.seconds) for job in left)
        ahead = (str(len(left)), f"{seconds / 60:.1f}") if known else ("?", "?")
        shown.add_row(stage.name, str(len(known) - len(missing(stage, results))), *ahead)
    return shown


def _check_only(only: tuple[str, ...], study: Study, results: Results) -> None:
    """Refuse a pattern that no run has in it, done or not, nor any stage, whose runs may follow later."""
    runs = [run_name(stage, job) for stage in study.stages for job in stage.jobs(results)] if only else []
    for each in only:
        of_a_run = (matches((each,), name) for name in runs)
        of_a_stage = (matches((each.partition(" | ")[0],), stage.name) for stage in study.stages)
        if not any(of_a_run) and not any(of_a_stage):
            message = "--only must be part of a stage's or run's name, but is"
            raise ValueError(f"{message} {each!r}; --list shows the stages")
