"""From settings to results: devices and processes, folders, progress, resuming; what `anon run` does."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from anon_lab import optimizers
from anon_lab.files import write_json
from anon_lab.run import Run
from anon_lab.run_folder import RunFolder
from anon_lab.settings import Settings, provenance
from anon_lab.tasks import Task
from anon_lab.train import Every, Watch, drive


@dataclass(frozen=True)
class Place:
    """This process among those that train together (one, unless torchrun started several)."""

    device: torch.device
    rank: int = 0
    world: int = 1


@contextmanager
def place(device: str | None = None) -> Iterator[Place]:
    """Where to train: the device asked for, else a GPU where there is one; joined to the others under torchrun."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(kind)
    except RuntimeError:
        raise ValueError(f"device must be one that torch knows, such as cpu or cuda:1, but is {kind!r}") from None
    if wanted.type == "cuda":
        if not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device is {kind}, but torch finds {torch.cuda.device_count()} CUDA devices")
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    chosen = torch.device(f"cuda:{os.environ['LOCAL_RANK']}") if world > 1 and kind == "cuda" else wanted
    if chosen.type == "cuda":
        # Streams and graphs belong to the current device.
        torch.cuda.set_device(torch.cuda.current_device() if chosen.index is None else chosen.index)
    if world == 1:
        yield Place(chosen)
        return
    torch.distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Place(chosen, torch.distributed.get_rank(), world)
    finally:
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Plan:
    """How runs are carried out; none of it changes what they compute."""

    out: Path
    resume: bool = False
    together: int = 1
    """How many train at once, in one process."""
    checkpoint_every: int = 1000
    tensorboard: bool = True


class Conflict(Exception):
    """The folder holds other runs than those asked for; the message says how they differ."""


def launch(task: Task, runs: Sequence[Settings], plan: Plan, where: Place, console: Console) -> list[dict[str, Any]]:
    """Train one setting from several seeds; return the results, in order, and write their summary."""
    results = train_all(task, {folder(plan.out, settings): settings for settings in runs}, plan, where, console)
    if where.rank == 0:
        write_json(plan.out / "result.json", summary(task, results))
    return results


def train_all(
    task: Task, runs: Mapping[Path, Settings], plan: Plan, where: Place, console: Console
) -> list[dict[str, Any]]:
    """Train every run whose folder has no result yet, as many at once as planned; return all results, in order."""
    folders = {path: RunFolder(path) for path in runs}
    if where.rank == 0:
        for path, settings in runs.items():
            _check_claim(folders[path], settings, plan.resume)
    if where.world > 1:
        torch.distributed.barrier()
    chunks = list(_chunks([path for path in runs if folders[path].result() is None], plan.together))
    for number, chunk in enumerate(chunks, start=1):
        names = [f"{path.parent.name}/{path.name}" for path in chunk]
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        if len(chunks) > 1:
            label += f" ({number} of {len(chunks)})"
        _train(task, [runs[path] for path in chunk], [folders[path] for path in chunk], plan, where, console, label)
    if where.world > 1:
        torch.distributed.barrier()
    return [result for path in runs if (result := folders[path].result()) is not None]


def _chunks(left: list[Path], together: int) -> Iterator[list[Path]]:
    """Which runs train at once: first those that a checkpoint holds together, then as many as planned."""
    by_place = {path.resolve(): path for path in left}
    for path in list(left):
        places = [(path / name).resolve() for name in RunFolder(path).companions() or ()]
        if not places:
            continue
        if missing := [place for place in places if place not in by_place]:
            raise Conflict(f"{path} was interrupted together with {missing[0]}: resume them together")
        group = [by_place[place] for place in places]
        yield group
        left = [each for each in left if each not in group]
    for start in range(0, len(left), together):
        yield left[start : start + together]


def folder(out: Path, settings: Settings) -> Path:
    """Where the run of this seed writes."""
    return out / f"seed-{settings.seed}"


def default_name(settings: Settings) -> str:
    """Of a folder for a run that was given none, such as digits-Anon-gamma1.5-lr0.001."""
    gamma = settings.hyper.get("gamma")
    words = [settings.task, settings.optimizer, *([] if gamma is None else [f"gamma{gamma:g}"]), f"lr{settings.lr:g}"]
    return "-".join(words).replace(" ", "-")


def _is_free(folder: RunFolder) -> bool:
    return folder.config() is None or not folder.begun()


def _check_claim(folder: RunFolder, settings: Settings, resume: bool) -> None:
    """See that the folder is free, or this run's already."""
    config = None if _is_free(folder) else folder.config()
    if config is None:
        return
    if not resume:
        raise Conflict(f"{folder.path} already holds a run: go on with --resume, or choose another --out")
    if (difference := settings.difference(Settings.from_json(config["settings"]))) is not None:
        raise Conflict(f"{folder.path} holds another run, in which {difference}")


def _train(
    task: Task,
    settings: Sequence[Settings],
    folders: Sequence[RunFolder],
    plan: Plan,
    where: Place,
    console: Console,
    label: str,
) -> None:
    runs = [Run(each, task, where.device, where.rank, where.world) for each in settings]
    runs[0].check_batch()
    if where.rank == 0:  # from here on things are written
        for folder, each in zip(folders, settings, strict=True):
            if _is_free(folder):
                folder.open({"settings": each.as_json(), **provenance(where.device)})
        folders[0].accompany([os.path.relpath(each.path, folders[0].path) for each in folders])
    total = runs[0].total
    every = Every(log=max(1, total // 200), checkpoint=plan.checkpoint_every)
    with ExitStack() as stack:
        watches: list[Watch] = []
        if where.rank == 0:
            watches.append(stack.enter_context(_progress(console, label, total, task.unit)))
            if plan.tensorboard:
                watches.append(stack.enter_context(_tensorboard(runs, folders)))

        def watch(run: Run, record: dict[str, Any]) -> None:
            for each in watches:
                each(run, record)

        drive(runs, folders, every, watch)


def labelled_bar(console: Console, label: str, *columns: ProgressColumn) -> Progress:
    """Print the label, which may be long, and give a bar for the line below it, as wide as the columns leave it."""
    console.print(label, markup=False, highlight=False)
    return Progress(BarColumn(bar_width=None), *columns, console=console, expand=True)


@contextmanager
def _progress(console: Console, label: str, total: int, unit: str) -> Iterator[Watch]:
    whole = Column(no_wrap=True)  # else a narrow terminal would show a part of it
    columns = (
        TaskProgressColumn(table_column=whole),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(table_column=whole),
    )
    with labelled_bar(console, f"{label}: {total:,} steps", *columns) as bar:
        line = bar.add_task("", total=total, state="")

        def watch(run: Run, record: dict[str, Any]) -> None:
            rate = record[f"{unit}_a_second"]
            state = f"loss {record['loss']:.4f} lr {record['lr']:.1e} {rate:,.0f} {unit}/s"
            if record.get("evaluation"):
                metric = run.task.metric
                state += f" {metric.name} {record['evaluation'][metric.name]:.4g}"
            bar.update(line, completed=record["step"], state=state)

        yield watch


@contextmanager
def _tensorboard(runs: Sequence[Run], folders: Sequence[RunFolder]) -> Iterator[Watch]:
    """Scalars of each run in its own folder; what a killed process wrote of steps that are run again is taken back."""
    from torch.utils.tensorboard import SummaryWriter

    places = {id(run): str(folder.path / "tensorboard") for run, folder in zip(runs, folders, strict=True)}
    writers: dict[int, SummaryWriter] = {}

    def watch(run: Run, record: dict[str, Any]) -> None:
        if id(run) not in writers:
            writers[id(run)] = SummaryWriter(places[id(run)], purge_step=record["step"])
        values = {**record, **(record.get("evaluation") or {})} | {"loss/train": record["loss"]}
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                writers[id(run)].add_scalar(name, value, record["step"])

    try:
        yield watch
    finally:
        for writer in writers.values():
            writer.close()


def summary(task: Task, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of the task's metric over the seeds that did not diverge, and every result."""
    name = task.metric.name
    values = [result["evaluation"][name] for result in results if not result["diverged"]]
    return {
        "metric": name,
        "unit": task.metric.unit,
        "mean": mean(values) if values else None,
        "standard_deviation": stdev(values) if len(values) > 1 else None,
        "seeds": [result["seed"] for result in results],
        "diverged": sum(result["diverged"] for result in results),
        "runs": list(results),
    }


def seeds(settings: Settings, first: int, count: int) -> list[Settings]:
    """The same run from several seeds."""
    return [replace(settings, seed=seed) for seed in range(first, first + count)]


def table(task: Task, results: Sequence[dict[str, Any]]) -> Table:
    """The final numbers of every seed, and their mean."""
    metric = task.metric
    shown = Table(title=_title(results[0]))
    for column in ("seed", "training loss", f"{metric.name} {metric.unit}".strip(), "seconds"):
        shown.add_column(column, justify="right")
    for result in results:
        final = "diverged" if result["diverged"] else f"{result['evaluation'][metric.name]:.4g}"
        loss = float("nan") if result["loss"] is None else result["loss"]
        shown.add_row(str(result["seed"]), f"{loss:.4f}", final, f"{result['seconds']:.0f}")
    whole = summary(task, results)
    if whole["standard_deviation"] is not None:
        shown.add_section()
        shown.add_row("mean", "", f"{whole['mean']:.4g} ± {whole['standard_deviation']:.2g}", "")
    return shown


def _title(result: Mapping[str, Any]) -> str:
    """As "digits, Anon γ 1 at lr 0.001"."""
    gamma = {**optimizers.get(result["optimizer"]).usual, **result["hyper"]}.get("gamma")
    adaptivity = "" if gamma is None else f" γ {gamma:g}".replace("-", "−")
    return f"{result['task']}, {result['optimizer']}{adaptivity} at lr {result['lr']:g}"
