"""What a study consists of: grounds to compare on, contenders with what is searched for them, and stages of jobs."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from anon_lab import optimizers
from anon_lab.settings import Settings
from anon_lab.tables._spec import Heat, Sheet
from anon_lab.tasks import Metric, Recipe
from anon_optim import Anon, Guard

if TYPE_CHECKING:
    from anon_lab.run import Run
    from anon_lab.studies._results import Results

TUNING_SEED = 0
FIRST_SEED = 1000
"""Of those reported on: far from the one that helped to choose."""

ACCURACY = Metric("accuracy", "%", higher_is_better=True)
LOSS = Metric("loss", "nats per token", higher_is_better=False)


@dataclass(frozen=True)
class Ground:
    """A task with its options and recipe, on which contenders are compared."""

    name: str
    task: str
    recipe: Recipe
    metric: Metric
    seconds: float
    """That a step of one run takes on an H200, for planning until one was measured."""
    options: Mapping[str, Any] = field(default_factory=dict)
    together: int = 1
    """Runs that train at once on a GPU, in one graph; 1 where time is compared too."""
    compile: bool = False
    """Whether the network is compiled on a GPU."""
    stacked: bool = False
    """Whether on a GPU the networks of runs that train together go through kernels for many at once."""
    evaluations: int = 8
    tuned_on: "Ground | None" = None
    """Where settings are searched, if not here: the same task, with shorter runs."""
    checks: int = 0
    """Seeds from which a search ends by comparing, here, its best learning rate with the one below or, if it was found
    on shorter runs, with those around it; 0: it does not. For tasks with a cliff beside the optimum, where one seed may
    stand on its edge, or where the optimum moves with the length."""
    micro_batch: int | None = None
    measure: Callable[["Run"], dict[str, float]] | None = None
    """What is measured of a trained network beside the task's evaluation."""

    @cached_property
    def key(self) -> str:
        return _key(self.name, self.task, asdict(self.recipe), dict(self.options))

    @property
    def network(self) -> str:
        """The same for grounds that differ by the recipe alone."""
        return json.dumps([self.task, dict(self.options)], sort_keys=True)


@dataclass(frozen=True)
class Job:
    """One run. Two jobs are the same one if they compute the same, whatever device, precision or stage."""

    label: str
    """Of the contender."""
    ground: Ground
    optimizer: str
    values: Mapping[str, Any]
    """lr and the optimizer's other settings."""
    seed: int = TUNING_SEED
    report: bool = False
    """Whether it is trained on all training examples and judged on the test set; else on validation examples."""

    @property
    def split(self) -> str:
        return "test" if self.report else "validation"

    @property
    def steps(self) -> float:
        """Of the run, or in proportion to them where only epochs are known."""
        recipe = self.ground.recipe
        return recipe.steps or (recipe.epochs or 0) * 50_000 // recipe.batch_size

    def settings(self, device: torch.device) -> Settings:
        hyper = dict(self.values)
        on_gpu = device.type == "cuda"
        return Settings(
            task=self.ground.task,
            optimizer=self.optimizer,
            lr=hyper.pop("lr"),
            recipe=self.ground.recipe,
            seed=self.seed,
            hyper=hyper,
            options=self.ground.options,
            hold_out=not self.report,
            precision="bf16" if on_gpu else "fp32",
            micro_batch=self.ground.micro_batch,
            compile=on_gpu and self.ground.compile,
            graph=on_gpu and optimizers.get(self.optimizer).needs in ("gradient", "views"),
            stacked=on_gpu and self.ground.stacked and find_spec("triton") is not None,
            evaluations=self.ground.evaluations,
        )

    def key(self) -> str:
        """The same for jobs that are the same one."""
        return self.ground.key + _key(self.optimizer, self.values, self.seed, not self.report)


def recorded_key(ground: str, settings: Mapping[str, Any]) -> str:
    """The key of the job that left this ground's name and these settings."""
    values = {**settings["hyper"], "lr": settings["lr"]}
    trained = _key(ground, settings["task"], settings["recipe"], settings["options"])
    return trained + _key(settings["optimizer"], values, settings["seed"], settings["hold_out"])


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True)


@dataclass(frozen=True)
class Contender:
    """An optimizer and what is searched for it: one axis after another, each at the best found so far."""

    label: str
    optimizer: str
    axes: tuple[tuple[str, tuple[Any, ...]], ...]
    """Names of settings with the values that are tried; the first is lr."""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def trials(self) -> int:
        return sum(len(values) for _, values in self.axes)


LATER = ("error_if_nonfinite", "follow")
"""Fields of a guard that are younger than the first runs."""


def anon_defaults() -> dict[str, Any]:
    """Anon's own choices, spelled out: a study that was run with other ones is another. What is off and came after the
    first runs is left out, as it is in their records."""
    signature = inspect.signature(Anon).parameters
    guard = {name: each for name, each in asdict(Guard()).items() if each or name not in LATER}
    return {"guard": guard, **{name: signature[name].default for name in ("betas", "beta3", "growth")}}


@dataclass(frozen=True)
class Stage:
    """Jobs that need nothing of each other; they follow from the results so far."""

    name: str
    jobs: Callable[["Results"], Sequence[Job]]


@dataclass(frozen=True)
class Section(Sheet):
    """A part of the report: a sheet with what is to be said of it."""

    text: str = ""


@dataclass(frozen=True)
class Study:
    """An ordered list of stages: every prefix of it already says something."""

    title: str
    asks: str
    """The question, in one sentence."""
    stages: Sequence[Stage]
    references: tuple[str, ...] = ("SGDM", "AdamW")
    """Labels that the others are judged against."""
    sections: Callable[["Results"], list[Section]] = lambda results: []
    """Tables of its own."""
    heats: Callable[["Results"], dict[str, Heat]] = lambda results: {}
    """Matrices to be drawn, by the names of their files."""
    sweeps_gamma: bool = False
    """Whether its question is what gamma changes: then results are drawn over gamma instead of over steps, and have no
    part in the overview, which shows Anon as it was tuned."""
    trials: str = "equally many trials for every contender"
    """How much is searched for each, in words."""
    builds_on: tuple[str, ...] = ()
    """Other studies: what they have trained is not trained again."""
    check: Callable[[], object] = lambda: None
    """Raises before any training what would otherwise be raised after it."""
