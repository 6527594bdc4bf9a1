"""Trains what a table lacks: every row at every learning rate, from every seed."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

from anon_lab import launch, optimizers, tasks
from anon_lab.files import write_json
from anon_lab.run_folder import RunFolder
from anon_lab.settings import Settings
from anon_lab.tables._spec import Outcome, Row, Size, Table, Trial
from anon_lab.tasks import Recipe, Task


@dataclass(frozen=True)
class Order:
    """How a table is made; None leaves a choice to the size, or to the device."""

    size: str
    out: Path
    data: Path | None = None
    seeds: int | None = None
    together: int | None = None
    bf16: bool | None = None
    graph: bool | None = None


@dataclass(frozen=True)
class _Job:
    row: Row
    settings: Settings
    folder: Path


def train(table: Table, order: Order, where: launch.Place, console: Console) -> tuple[Outcome, Task]:
    """Train what has no result yet; return all results, and the (first) task they are of."""
    size, rows = table.sizes[order.size], list(table.rows(order.size))
    together = order.together or size.together
    plan = launch.Plan(order.out, resume=True, together=together, tensorboard=False)
    trained, jobs = _jobs(order, size, rows, where.device)
    left = [job for job in jobs if RunFolder(job.folder).result() is None]
    console.print(f"{len(left)} of {len(jobs)} runs are left to train")
    if left and left[0].settings.graph and where.device.type != "cuda":
        raise ValueError("--graph needs a GPU")

    groups: dict[str, list[_Job]] = {}
    for job in jobs:
        groups.setdefault(_company(job.settings), []).append(job)
    found: dict[Path, Any] = {}
    for group in groups.values():
        task = trained[_key(group[0].settings.options)]
        runs = {job.folder: job.settings for job in group}
        found |= zip(runs, launch.train_all(task, runs, plan, where, console), strict=True)

    metric = next(iter(trained.values())).metric
    trials = []
    for row in rows:
        for lr in row.lrs:
            folders = [job.folder for job in jobs if job.row is row and job.settings.lr == lr]
            results = [found[folder] for folder in folders]
            values = [result["evaluation"][metric.name] for result in results if not result["diverged"]]
            trials.append(Trial(row, lr, folders, results, values))
    return Outcome(order.size, metric, rows, trials, together), next(iter(trained.values()))


def _jobs(order: Order, size: Size, rows: list[Row], device: torch.device) -> tuple[dict[str, Task], list[_Job]]:
    """The tasks by their options, and all runs; seed by seed, so that a table cut short has every row once."""
    loaded: dict[str, Task] = {}
    for row in (row for row in rows if row.lrs):
        options = {**size.options, **row.options}
        if _key(options) not in loaded:
            loaded[_key(options)] = tasks.load(size.task, order.data, **options)
    jobs = []
    for seed in range(order.seeds or size.seeds):
        for row in rows:
            for lr in row.lrs:
                recipe = loaded[_key({**size.options, **row.options})].recipe
                settings = _settings(order, size, row, lr, seed, recipe, device)
                name = f"{row.name} lr {lr:g}" if len(row.lrs) > 1 else row.name
                folder = order.out / "runs" / f"{size.runs}-{order.size}" / _slug(name) / f"seed-{seed}"
                jobs.append(_Job(row, settings, folder))
    return loaded, jobs


def _settings(
    order: Order, size: Size, row: Row, lr: float, seed: int, recipe: Recipe, device: torch.device
) -> Settings:
    on_gpu = device.type == "cuda"
    graph = (on_gpu and size.graph) if order.graph is None else order.graph
    # A graph cannot hold a step that differentiates in its own way every so often.
    graph = graph and optimizers.get(row.optimizer).needs in ("gradient", "views")
    return Settings(
        task=size.task,
        optimizer=row.optimizer,
        lr=lr,
        recipe=recipe.changed(**{**size.recipe, **row.recipe}),
        seed=seed,
        hyper=dict(row.hyper),
        options={**size.options, **row.options},
        precision="bf16" if (on_gpu if order.bf16 is None else order.bf16) else "fp32",
        graph=graph,
        evaluations=size.evaluations,
    )


def _company(settings: Settings) -> str:
    """Runs with the same key can train together."""
    return f"{_key(settings.options)} {settings.graph}"


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(dict(options), sort_keys=True, default=str)


def _slug(name: str) -> str:
    """A folder's name in plain letters."""
    plain = name.replace("γ", "gamma ").replace("β", "beta").replace("−", "-")
    return re.sub(r"[^A-Za-z0-9.-]+", "-", plain).strip("-")


def network(task: Task, folder: Path, device: torch.device) -> nn.Module:
    """The network that a run ended with, as it was evaluated."""
    net = task.model()
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with torch.no_grad():
        for name, value in load_file(folder / "weights.safetensors").items():
            own[name].copy_(value)
    return net.to(device)


def kept(path: Path, how: Mapping[str, Any], measure: Callable[[], float]) -> float:
    """The value in the file, if it was measured like this; else it is measured now, and written there."""
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        if all(record.get(name) == value for name, value in how.items()):
            return float("nan") if record["value"] is None else record["value"]
    value = measure()
    write_json(path, {**how, "value": value})
    return value
