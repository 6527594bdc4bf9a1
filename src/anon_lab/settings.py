"""Everything that decides what a training run computes, and what it was computed with."""

import json
import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

import anon_optim
from anon_lab.tasks import Recipe, Task


@dataclass(frozen=True)
class Settings:
    """One run: equal settings on the same machine and versions give the same numbers."""

    task: str
    optimizer: str
    lr: float
    """The peak, in the optimizer's own unit."""
    recipe: Recipe
    seed: int = 0
    """Of the initial weights, of the order and augmentation of the data, and of dropout or noise in the loss."""
    hyper: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's other settings, such as gamma; weight_decay, where given, goes before the recipe's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's own, such as its model."""
    hold_out: bool = False
    """Whether validation examples are kept from training and evaluated on, instead of the test set."""
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batch: int | None = None
    """Examples that go through the network at once, on each process; None: the whole batch."""
    compile: bool = False
    graph: bool = False
    """Whether a step is replayed as a CUDA graph."""
    stacked: bool = False
    """Whether the networks of runs that train together go through the task's own kernels for many at once."""
    evaluations: int = 20
    """How often, evenly over the run, the network is evaluated; the last time is after the last step."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.lr):
            raise ValueError(f"lr must be a finite number, but is {self.lr}")

    def steps(self, task: Task) -> int:
        """The length of the run."""
        if self.recipe.steps is not None:
            return self.recipe.steps
        if self.recipe.epochs is None:
            raise ValueError("recipe must say epochs or steps, but has neither")
        return max(1, round(self.recipe.epochs * (task.examples() // self.recipe.batch_size)))

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON will give them back: tuples as lists."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Settings":
        recipe = dict(record["recipe"])
        recipe["milestones"] = tuple(recipe["milestones"])
        return cls(**{**record, "recipe": Recipe(**recipe)})

    def difference(self, held: "Settings") -> str | None:
        """In what a run that a folder holds is another one, as "lr is 2, not 1"; None where all agrees."""
        return difference(self.as_json(), held.as_json())


def difference(asked: Any, held: Any, name: str = "") -> str | None:
    """The first entry in which nested records differ, as "lr is 2, not 1" if 1 was asked for; None where all agree."""
    if isinstance(asked, dict) and isinstance(held, dict):
        found = (difference(asked.get(key), held.get(key), key) for key in (*asked, *held))
        return next((each for each in found if each is not None), None)
    return None if asked == held else f"{name} is {held}, not {asked}"


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, machine and git commit, for config.json."""
    return {
        "versions": versions("torch", "triton", "numpy", "pytorch_optimizer", "optuna"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "commit": commit(),
    }


def versions(*names: str) -> dict[str, str]:
    """What numbers were made with; packages that are not installed are left out."""
    others = {name: found for name in names if (found := _version(name))}
    return {"anon-optim": anon_optim.__version__, **others, "python": platform.python_version()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout that this package runs from, marked where it has changes; None where it is installed otherwise."""
    here = Path(__file__).parent
    try:
        ask = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
