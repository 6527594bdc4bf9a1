"""What is known of an optimizer before it is made: where it comes from, what it takes and where to search."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from anon_lab import growth
from anon_optim import Guard, Storage

FROM_PLAIN: Mapping[str, Callable[..., Any]] = {"guard": Guard, "storage": Storage, "growth": growth.from_plain}
"""Settings that are more than a number, by what makes them from the plain values of JSON and a command line."""


@dataclass(frozen=True)
class Range:
    """Where a search looks for a number: low to high, even in its logarithm where `log`."""

    low: float
    high: float
    log: bool = True
    per_gamma: float = 1.0
    """Both ends are meant times per_gamma^gamma: the unit of Anon's lr depends on gamma."""

    def factor(self, settings: Mapping[str, Any]) -> float:
        """What both ends are to be multiplied by; with lr_scale the unit is that of gamma 1 at every gamma."""
        if self.per_gamma == 1:
            return 1.0
        if "gamma" not in settings:
            raise ValueError("gamma must be chosen before this range, which depends on it")
        return self.per_gamma ** (1.0 if settings.get("lr_scale") else settings["gamma"])

    def given(self, settings: Mapping[str, Any]) -> "Range":
        """The range once gamma, if it matters, has been chosen."""
        factor = self.factor(settings)
        return Range(factor * self.low, factor * self.high, self.log)


Space = Mapping[str, Range | tuple[Any, ...]]


@dataclass(frozen=True)
class Entry:
    """An optimizer under the name the paper gives it."""

    name: str
    path: str
    """Module and class, or class method, as "torch.optim:AdamW"; imported when first used."""
    lr: float
    """A usual learning rate to start from, with the usual settings."""
    space: Space
    """Where to search, in an order in which every range can be drawn: a number range, or a tuple of choices."""
    description: str
    citation: str
    needs: str = "gradient"
    """What its steps take besides the usual loop's gradient: "create_graph", that this be differentiated again;
    "sampled_loss", another one of the loss on labels drawn from the model; or "views", a data augmentation of its own
    for each `optimizer.head`. `take_step` serves all but the last, which is the data's business."""
    averages: bool = False
    """Whether to evaluate within :func:`averaged`, with BatchNorm's statistics estimated anew there."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class that make it this optimizer and cannot be set."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings whose usual value is another than the class's."""
    listed: bool = True
    """Whether it is one of those that are compared; what a study tries out can be made by its name alone."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The class's own names for settings that are called alike throughout the registry."""

    @property
    def source(self) -> str:
        """The package it comes from."""
        return self.path.partition(":")[0].partition(".")[0]

    @property
    def usual(self) -> dict[str, Any]:
        """What `make` takes besides lr, each with the value that it has unless given."""
        parameters = inspect.signature(_resolve(self.path)).parameters
        theirs = {their: ours for ours, their in self.renamed.items()}
        values = {
            theirs.get(name, name): parameter.default
            for name, parameter in parameters.items()
            if name not in ("params", "lr", *self.fixed) and parameter.kind is not parameter.VAR_KEYWORD
        }
        return {**values, **self.defaults}

    def usual_lr(self, settings: Mapping[str, Any]) -> float:
        """The learning rate to start from with these settings, in their gamma's unit."""
        lr = self.space["lr"]
        if not isinstance(lr, Range) or lr.per_gamma == 1:
            return self.lr
        found = self.lr * lr.factor({**self.usual, **settings}) / lr.factor(self.usual)
        return float(f"{found:.3g}") if math.isfinite(found) else self.lr

    @property
    def settings(self) -> tuple[str, ...]:
        """What `make` takes besides lr. Where `betas` is among them, so are `beta1` and `beta2`, to set one alone."""
        names = tuple(self.usual)
        return (*names, "beta1", "beta2") if "betas" in names else names

    def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse a setting that there is not, and a word where a number belongs."""
        usual = self.usual
        for name, value in settings.items():
            if name not in ("lr", *self.settings):
                raise ValueError(f"{self.name} has no setting {name!r}, only lr, {', '.join(self.settings)}")
            is_number = name in ("lr", "beta1", "beta2") or type(usual[name]) in (int, float)
            if is_number and isinstance(value, str):
                raise ValueError(f"{name} of {self.name} must be a number, but is {value!r}")

    def make(self, params: ParamsT, lr: float | None = None, **settings: Any) -> Optimizer:
        """The optimizer for these parameters; settings that are not given are those of its authors."""
        self.check(settings)
        taken = self.settings
        lr = self.usual_lr(settings) if lr is None else lr
        if not lr >= 0:
            raise ValueError(f"Invalid lr: {lr}, expected a number of at least 0")
        made = _resolve(self.path)
        if "betas" in taken and ("beta1" in settings or "beta2" in settings):
            if "betas" in settings:
                raise ValueError(f"{self.name} takes betas, or beta1 and beta2, but not both")
            first, second = inspect.signature(made).parameters["betas"].default
            settings["betas"] = (settings.pop("beta1", first), settings.pop("beta2", second))
        values = {**self.defaults, **settings}
        for name, kind in FROM_PLAIN.items():
            if isinstance(values.get(name), Mapping):
                values[name] = kind(**values[name])
        theirs = {self.renamed.get(name, name): value for name, value in values.items()}
        return made(params, lr=lr, **self.fixed, **theirs)


@cache
def _resolve(path: str) -> Callable[..., Optimizer]:
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found
