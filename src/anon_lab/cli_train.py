"""The commands that train: `anon run`, `anon sweep` and `anon compare`."""

import ast
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anon_lab.console import AGAIN, check_folder, fail, interruptible, writing

if TYPE_CHECKING:
    from anon_lab.contenders import Contender
    from anon_lab.optimizers import Range
    from anon_lab.tasks import Recipe

app = typer.Typer()


def pairs(entries: list[str], flag: str) -> dict[str, Any]:
    """Read name=value, where the value is a Python number, tuple or truth value, or else a word."""
    read: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not (name and equals):
            raise fail(f"{flag} must be name=value, but is {entry!r}")
        words = {"true": True, "false": False, "none": None}
        try:
            read[name.replace("-", "_")] = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            read[name.replace("-", "_")] = text
    return read


# Options of the same name here and there: in a recipe, and in the settings of a run.
RECIPE = ("epochs", "steps", "batch_size", "warmup", "schedule", "final_lr", "milestones", "clip", "ema")
HOW = ("micro_batch", "compile", "graph", "stacked", "evaluations")


def _given(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the options that were given at all."""
    return {name: options[name] for name in names if options[name] is not None}


def _changed(recipe: "Recipe", options: Mapping[str, Any]) -> "Recipe":
    """The task's recipe with what the options change in it."""
    given = _given(options, RECIPE)
    if "milestones" in given:
        try:
            given["milestones"] = tuple(float(each) for each in given["milestones"].split(","))
        except ValueError:
            raise fail(
                f"--milestones must be numbers with commas between them, but is {given['milestones']!r}"
            ) from None
    changed = recipe.changed(**given)
    if "milestones" in given and changed.schedule != "step":
        raise fail(f"--milestones are of --schedule step, but the schedule is {changed.schedule}")
    return changed


Data = Annotated[Path | None, typer.Option(help="Where the task's files lie.", show_default="the usual places")]
Model = Annotated[str | None, typer.Option(help="One of the task's.", show_default="the task's first")]
Option = Annotated[list[str], typer.Option("--option", help="name=value of the task's own, such as tied=false.")]
Set = Annotated[list[str], typer.Option("--set", help="name=value of the optimizer's own, such as betas=(0.9,0.95).")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:1.", show_default="a GPU where there is one")]
Epochs = Annotated[float | None, typer.Option(show_default="the recipe's")]
Steps = Annotated[int | None, typer.Option(min=1, show_default="the recipe's")]
BatchSize = Annotated[int | None, typer.Option(min=1, show_default="the recipe's")]
Warmup = Annotated[float | None, typer.Option(min=0, max=1, help="Share of the run in which lr rises.")]
Schedule = Annotated[Literal["cosine", "step", "constant"] | None, typer.Option()]
FinalLr = Annotated[float | None, typer.Option(min=0, help="End of the cosine, as a share of the peak.")]
Milestones = Annotated[
    str | None, typer.Option(help="Shares of the run at which a step schedule divides lr by 10, such as 0.5,0.75.")
]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the gradient.")]
Ema = Annotated[float | None, typer.Option(min=0, max=1, help="Decay of averaged weights to evaluate.")]
Evaluations = Annotated[int, typer.Option(min=1, help="How often a run is evaluated.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Compute the loss in bfloat16.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Examples through the network at once.")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the network.")]
Graph = Annotated[bool, typer.Option("--graph", help="Replay steps as a CUDA graph.")]
Stacked = Annotated[bool, typer.Option("--stacked", help="With --together: ResNet-20s layer by layer at once.")]


@contextmanager
def _one_sentence(out: Path, go_on: str = AGAIN) -> Iterator[None]:
    """Ctrl-C, missing data, mistakes and what the system refuses end the command with one sentence."""
    from anon_lab import launch, tasks

    with interruptible(go_on), writing(out):
        try:
            yield
        except (ValueError, TypeError, tasks.DataMissing, launch.Conflict) as error:
            raise fail(str(error)) from None


@app.command()
def run(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help="digits, zipf, ngram, fashion, cifar10, imagenet, gpt or diffusion.")],
    optimizer: Annotated[str, typer.Option(help="By name, as `anon optimizers` lists them.")] = "Anon",
    lr: Annotated[float | None, typer.Option(help="The peak.", show_default="the optimizer's usual one")] = None,
    gamma: Annotated[float | None, typer.Option(help="Anon's adaptivity.")] = None,
    weight_decay: Annotated[float | None, typer.Option(show_default="the recipe's")] = None,
    hyper: Set = [],  # noqa: B006 (typer copies it)
    model: Model = None,
    option: Option = [],  # noqa: B006
    data: Data = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many, from --first-seed on.")] = 1,
    first_seed: Annotated[int, typer.Option(min=0)] = 0,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    warmup: Warmup = None,
    schedule: Schedule = None,
    final_lr: FinalLr = None,
    milestones: Milestones = None,
    clip: Clip = None,
    ema: Ema = None,
    hold_out: Annotated[bool, typer.Option("--hold-out", help="Keep a validation part from training.")] = False,
    evaluations: Evaluations = 20,
    bf16: Bf16 = False,
    micro_batch: MicroBatch = None,
    compile: Compile = False,
    graph: Graph = False,
    stacked: Stacked = False,
    together: Annotated[bool, typer.Option("--together", help="Train all seeds at once.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Refuse kernels that vary.")] = False,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(show_default="out/run/TASK-OPTIMIZER-lr…")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run in --out stopped.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps; 0 for none.")] = 1000,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard's files.")] = True,
) -> None:
    """Train a network, from one seed or several; under torchrun, on several GPUs."""
    place = out or Path("out/run")
    check_folder(place)
    with _one_sentence(place, "go on with --resume"):
        import torch
        from rich.console import Console

        from anon_lab import launch, optimizers, tasks
        from anon_lab.settings import Settings

        torch.use_deterministic_algorithms(deterministic)
        chosen = pairs(option, "--option") | ({"model": model} if model else {})
        settings = pairs(hyper, "--set")
        settings |= {"gamma": gamma} if gamma is not None else {}
        settings |= {"weight_decay": weight_decay} if weight_decay is not None else {}
        entry = optimizers.get(optimizer)
        loaded = tasks.load(task, data, hold_out, **chosen)
        base = Settings(
            task=task,
            optimizer=entry.name,
            lr=entry.usual_lr(settings) if lr is None else lr,
            recipe=_changed(loaded.recipe, context.params),
            hyper=settings,
            options=chosen,
            hold_out=hold_out,
            precision="bf16" if bf16 else "fp32",
            **_given(context.params, HOW),
        )
        out = out or place / launch.default_name(base)
        plan = launch.Plan(out, resume, seeds if together else 1, checkpoint_every, tensorboard)
        with launch.place(device) as where:
            console = Console(quiet=where.rank > 0)
            results = launch.launch(loaded, launch.seeds(base, first_seed, seeds), plan, where, console)
            console.print(launch.table(loaded, results))
            console.print(f"everything is in {out}")


@app.command()
def sweep(
    context: typer.Context,
    task: Annotated[str, typer.Argument(help="As for `anon run`.")],
    optimizer: Annotated[
        list[str],
        typer.Option(help="NAME, or NAME:gamma=1.1,... to fix what is not to be searched; once for each contender."),
    ],
    trials: Annotated[int, typer.Option(min=1, help="For each contender; later calls may raise it.")] = 20,
    ranges: Annotated[
        list[str],
        typer.Option("--range", help="[NAME:]setting=low..high or =a|b|c, in place of what `anon optimizers` lists."),
    ] = [],  # noqa: B006
    model: Model = None,
    option: Option = [],  # noqa: B006
    data: Data = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    warmup: Warmup = None,
    schedule: Schedule = None,
    final_lr: FinalLr = None,
    milestones: Milestones = None,
    clip: Clip = None,
    ema: Ema = None,
    evaluations: Evaluations = 10,
    bf16: Bf16 = False,
    micro_batch: MicroBatch = None,
    compile: Compile = False,
    graph: Graph = False,
    stacked: Stacked = False,
    together: Annotated[int, typer.Option(min=1, help="Trials that train at once, in one process.")] = 1,
    prune: Annotated[bool, typer.Option(help="Give up trials that are behind the median at the same step.")] = True,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Any Optuna address, such as postgresql://HOST/NAME, for several machines.",
            show_default="a file in --out",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of this sweep in --storage.", show_default="the task's")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Start trials again that machines, now gone, left unfinished.")
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps; 0 for none.")] = 500,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(show_default="out/sweep/TASK")] = None,
) -> None:
    """Tune optimizers alike: as many trials, judged on validation examples; the same call goes on where it stopped."""
    out = out or Path("out/sweep") / task
    check_folder(out)
    with _one_sentence(out):
        from rich.console import Console

        from anon_lab import launch, sweep_folder, tasks
        from anon_lab import sweep as sweeps
        from anon_lab.run import check
        from anon_lab.settings import Settings
        from anon_lab.study import Plan, open_storage

        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise fail("anon sweep needs no torchrun: start it once for each GPU, with --device")

        chosen = pairs(option, "--option") | ({"model": model} if model else {})
        loaded = tasks.load(task, data, hold_out=True, **chosen)
        base = Settings(
            task=task,
            optimizer="",
            lr=0.0,
            recipe=_changed(loaded.recipe, context.params),
            options=chosen,
            precision="bf16" if bf16 else "fp32",
            **_given(context.params, HOW),
        )
        plan = Plan(trials, out, name or task, storage, together, prune, checkpoint_every, take_over)
        if storage is not None:
            open_storage(plan)  # before anything is written
        contenders, console = _contenders(optimizer, ranges), Console()
        with launch.place(device) as where:
            for each in contenders:
                check(replace(base, optimizer=each.optimizer), loaded, where.device)
            kept = sweep_folder.keep(sweep_folder.Sweep(base, contenders, plan, data))
            tried = sweeps.tune_all(loaded, base, kept.contenders, plan, where, console)
        console.print(sweeps.table(kept.contenders, tried, loaded.metric))
        missing = sum(trials - len(over) for over in tried)
        if missing > 0:
            typer.echo(f"{missing} trials are at other processes; if those are gone, go on with --take-over")
        else:
            typer.echo(f"next: anon compare {out}")


def _contenders(entries: list[str], ranges: list[str]) -> "list[Contender]":
    """From NAME or NAME:setting=value,setting=value, each with the ranges that name it or nobody."""
    from anon_lab import optimizers
    from anon_lab.contenders import contender

    names = [optimizers.get(entry.partition(":")[0]).name for entry in entries]
    changed = [_range(entry) for entry in ranges]
    for name, _, _ in changed:
        if name is not None and name not in names:
            raise fail(f"--range must name an optimizer that is compared ({', '.join(names)}), but names {name}")
    made = []
    for name, entry in zip(names, entries, strict=True):
        fixed = re.split(r",(?![^(]*\))", entry.partition(":")[2])  # at commas, but not at those of betas=(0.9,0.99)
        mine = {setting: choice for owner, setting, choice in changed if owner in (None, name)}
        made.append(contender(name, pairs([each for each in fixed if each], "--optimizer"), mine))
    labels = [each.label for each in made]
    for label in labels:
        if labels.count(label) > 1:
            raise fail(f"--optimizer must name each contender once, but names {label} {labels.count(label)} times")
    return made


def _range(entry: str) -> "tuple[str | None, str, Range | tuple[Any, ...]]":
    """Whose it is, None for everyone's, the setting and where to search it."""
    from anon_lab import optimizers
    from anon_lab.optimizers import Range

    name, _, rest = entry.rpartition(":")
    setting, _, text = rest.partition("=")
    owner = optimizers.get(name) if name else None
    if "|" in text:
        return (
            owner and owner.name,
            setting,
            tuple(pairs([f"{setting}={each}"], "--range")[setting] for each in text.split("|")),
        )
    try:
        low, high = (float(end) for end in text.split(".."))
    except ValueError:
        low, high = math.nan, math.nan
    if not (setting and -math.inf < low < high < math.inf):
        raise fail(f"--range must be [NAME:]setting=low..high or [NAME:]setting=a|b|c, but is {entry!r}")
    known = owner.space.get(setting) if owner else None
    # As the registry searches it; else evenly in its logarithm, as suits a scale, unless it reaches below zero.
    log = known.log if isinstance(known, Range) and low > 0 else low > 0 and setting != "gamma"
    return owner and owner.name, setting, Range(low, high, log)


@app.command()
def compare(
    sweep: Annotated[Path, typer.Argument(help="The folder of an `anon sweep`.")],
    seeds: Annotated[int, typer.Option(min=3, help="Fresh ones, for each contender.")] = 5,
    storage: Annotated[str | None, typer.Option(help="As for `anon sweep`.", show_default="the sweep's")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the task's files lie.", show_default="the sweep's")] = None,
    device: Device = None,
) -> None:
    """Train each contender's best setting from fresh seeds; print mean and 95 % interval; write compare.html."""
    check_folder(sweep, "sweep")
    with _one_sentence(sweep):
        from dataclasses import replace

        from rich.console import Console

        from anon_lab import compare, launch, report, sweep_folder, tasks

        kept = sweep_folder.kept(sweep)
        if storage is not None:
            kept = replace(kept, plan=replace(kept.plan, storage=storage))
        loaded = tasks.load(kept.base.task, data or kept.data, **kept.base.options)
        with launch.place(device) as where:
            console = Console(quiet=where.rank > 0)
            outcomes = compare.finish(loaded, kept, seeds, where, console)
            if where.rank == 0:
                path = report.save(kept, outcomes, loaded.metric)
                console.print(compare.table(outcomes, loaded.metric))
                for remark in compare.remarks(outcomes):
                    console.print(remark)
                typer.echo(path)
