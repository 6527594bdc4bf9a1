"""What is trained: each task is a model, its data and a loss, and knows nothing of optimizers."""

import hashlib
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Split = Literal["validation", "test"]

NAMES: Mapping[str, str] = {
    "digits": "8 x 8 digits that come with scikit-learn; a small MLP",
    "zipf": "bags of words by Zipf's law; an embedding of which most rows see few gradients",
    "ngram": "a made or given text; a 4-gram language model with tied embeddings",
    "fashion": "Fashion-MNIST; a small CNN",
    "cifar10": "CIFAR-10; ResNet-20 or a small ViT",
    "imagenet": "any image folder; ResNet-18 or ResNet-50",
    "gpt": "any text; GPT-2 small, medium, or one of 20 M parameters",
    "diffusion": "CIFAR-10 as an unconditional diffusion model; FID",
}

WITHOUT_FILES = ("digits", "zipf")
"""Those that have their data in themselves."""


@dataclass(frozen=True)
class Recipe:
    """How long and how a task is usually trained, whatever the optimizer."""

    batch_size: int
    """Examples a step, over all processes."""
    epochs: float | None = None
    """Passes over the training data; None where `steps` says how long."""
    steps: int | None = None
    """Optimizer steps; None where `epochs` says how long."""
    warmup: float = 0.0
    """Share of the run in which lr rises linearly."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """What lr does after the warm-up."""
    final_lr: float = 0.0
    """Where a cosine ends, as a share of the peak."""
    milestones: tuple[float, ...] = ()
    """Shares of the run at which a step schedule multiplies lr by `drop`."""
    drop: float = 0.1
    clip: float | None = None
    """Largest norm of the whole gradient."""
    weight_decay: float = 0.0
    decay_all: bool = True
    """Whether biases and norms decay too."""
    ema: float | None = None
    """Decay of the averaged weights that are evaluated instead of the last; None: the last."""

    def __post_init__(self) -> None:
        _check("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        _check("epochs", self.epochs, self.epochs is None or 0 < self.epochs < math.inf, "above 0")
        _check("steps", self.steps, self.steps is None or self.steps >= 1, "at least 1")
        steps_down = self.schedule != "step" or len(self.milestones) > 0
        _check("milestones", "none", steps_down, "shares of the run, such as 0.5, 0.75, where the schedule is step")
        _check("milestones", self.milestones, all(0 < each < 1 for each in self.milestones), "between 0 and 1")
        _check("warmup", self.warmup, 0 <= self.warmup <= 1, "between 0 and 1")
        _check("final_lr", self.final_lr, 0 <= self.final_lr <= 1, "between 0 and 1")
        _check("clip", self.clip, self.clip is None or self.clip > 0, "above 0")
        _check("weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0")
        _check("ema", self.ema, self.ema is None or 0 <= self.ema < 1, "at least 0 and below 1")

    def changed(self, **changes: Any) -> "Recipe":
        """The same with some fields changed; a length in steps takes the place of one in epochs, and the reverse."""
        if "steps" in changes and "epochs" in changes:
            raise ValueError("a recipe takes steps or epochs, not both")
        if "steps" in changes:
            changes["epochs"] = None
        elif "epochs" in changes:
            changes["steps"] = None
        return replace(self, **changes)


def _check(name: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise ValueError(f"{name} must be {wanted}, but is {value}")


@dataclass(frozen=True)
class Metric:
    """The number by which runs are chosen and reported."""

    name: str
    unit: str
    higher_is_better: bool


class Task(Protocol):
    """What the loop, the sweeps and the studies need of a task."""

    name: str
    unit: str
    """What is counted a second: "images" or "tokens"."""
    recipe: Recipe
    metric: Metric
    """One of the keys that `evaluate` returns."""

    def model(self) -> nn.Module:
        """A fresh network, initialised from torch's global generator."""
        ...

    def examples(self) -> int:
        """How many training examples one epoch has."""
        ...

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """The batches of steps start, start + 1, ... without end; `rank`'s share of `world` equal parts of each.

        A batch is a function of (seed, step, rank, world) alone, so that a run can go on from any step. An epoch drops
        its last, incomplete batch.
        """
        ...

    def units(self, batch: Batch) -> int:
        """How many images or tokens a batch holds."""
        ...

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """The mean training loss: a scalar. Free of host synchronisation, so that a CUDA graph can hold it."""
        ...

    def evaluate(self, net: nn.Module, split: Split, device: torch.device) -> dict[str, float]:
        """Means over the whole split, in eval mode, the same in every run; leaves the network's mode as it was."""
        ...


def load(name: str, data: Path | None = None, hold_out: bool = False, **options: Any) -> Task:
    """The task by its name.

    **Arguments:**
    - `data`: where its files lie; None where the task looks in the usual places.
    - `hold_out`: whether the validation examples are kept from training, as choosing between settings requires.
    - `options`: the task's own, such as `model="vit"`.
    """
    if name not in NAMES:
        raise ValueError(f"task must be one of {', '.join(NAMES)}, but is {name!r}")
    if data is not None and name in WITHOUT_FILES:
        raise ValueError(f"data must not be given for {name}, which has its own, but is {data}")
    return importlib.import_module(f"anon_lab.tasks.{name}").load(data=data, hold_out=hold_out, **options)


def fingerprint(task: Task, device: torch.device) -> str:
    """Of how many training examples there are and of the first batches of one seed; the same on every device."""
    digest = hashlib.sha256(f"{task.name} {task.examples()}".encode())
    size = min(16, task.examples())
    for batch in islice(task.stream(size, 0, 0, device), 4):
        for part in batch:
            digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class DataMissing(Exception):
    """A task's files are not there or not whole; the message says what is missing and where to get it."""
