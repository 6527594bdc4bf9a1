"""What is compared: optimizers, what of each is fixed, and where the rest is searched."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from optuna.trial import Trial

from anon_lab import optimizers
from anon_lab.optimizers import Range
from anon_lab.settings import Settings

Space = Mapping[str, Range | tuple[Any, ...]]


@dataclass(frozen=True)
class Contender:
    """An optimizer as it takes part: what a trial finds plus what is fixed are all its settings."""

    label: str
    optimizer: str
    space: Space
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The label as the name of a folder."""
        return self.label.replace("/", "_")

    def suggest(self, trial: Trial) -> None:
        """Let the trial choose from every range; its `params` then hold what it found.

        A range whose unit depends on gamma is searched as it stands, so that the sampler sees one range throughout;
        `numbers` brings it to gamma's unit. Choices go by their text, because Optuna stores no tuples.
        """
        for name, choice in self.space.items():
            if isinstance(choice, Range):
                trial.suggest_float(name, choice.low, choice.high, log=choice.log)
            else:
                trial.suggest_categorical(name, list(map(repr, choice)))

    def numbers(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a trial that found these, in the optimizer's own units."""
        numbers = {**self.fixed}
        for name, choice in self.space.items():
            if not isinstance(choice, Range):
                numbers[name] = {repr(each): each for each in choice}[found[name]]
            else:
                numbers[name] = found[name] * choice.factor({**self.fixed, **found})
        return numbers

    def at_edge(self, found: Mapping[str, Any]) -> list[str]:
        """The settings that a trial found in the outer twentieth of their range: the best may lie beyond it."""
        outer = []
        for name, choice in self.space.items():
            if isinstance(choice, Range):
                scale = math.log if choice.log else float
                low, high, value = map(scale, (choice.low, choice.high, found[name]))
                if not 0.05 < (value - low) / (high - low) < 0.95:
                    outer.append(name)
        return outer

    def settings(self, base: Settings, found: Mapping[str, Any]) -> Settings:
        """The run that a trial describes."""
        hyper = self.numbers(found)
        return replace(base, optimizer=self.optimizer, lr=hyper.pop("lr"), hyper=hyper)

    def as_json(self) -> dict[str, Any]:
        return _with(list, asdict(self))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Contender":
        space = {
            name: Range(**choice) if isinstance(choice, dict) else _with(tuple, choice)
            for name, choice in record["space"].items()
        }
        return cls(record["label"], record["optimizer"], space, _with(tuple, record["fixed"]))


def contender(optimizer: str, fixed: Mapping[str, Any] | None = None, changed: Space | None = None) -> Contender:
    """The registry's optimizer with its own search space, less what is fixed.

    **Arguments:**
    - `changed`: ranges to search in place of the registry's, or beside them.
    """
    entry = optimizers.get(optimizer)
    fixed, changed = fixed or {}, changed or {}
    entry.check(fixed)
    for name, choice in changed.items():
        for value in (choice.low,) if isinstance(choice, Range) else choice:
            entry.check({name: value})
    space = {name: choice for name, choice in {**entry.space, **changed}.items() if name not in fixed}
    shown = ", ".join(f"{name} {value}" for name, value in fixed.items())
    made = Contender(f"{entry.name} ({shown})" if shown else entry.name, entry.name, space, fixed)
    _try_out(made)
    return made


def _try_out(contender: Contender) -> None:
    """Make the optimizer once, from the low ends, so that a wrong value is met before the first trial."""
    lowest = {
        name: choice.low if isinstance(choice, Range) else repr(choice[0]) for name, choice in contender.space.items()
    }
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    try:
        optimizers.make(contender.optimizer, [("weight", weight)], **contender.numbers(lowest))
    except TypeError as error:
        raise ValueError(f"{contender.label} cannot be made: {error}") from None


def _with(sequence: type, value: Any) -> Any:
    """The same, every list or tuple in it as one of these: JSON knows lists alone, Optuna's choices are tuples."""
    if isinstance(value, dict):
        return {key: _with(sequence, item) for key, item in value.items()}
    return sequence(_with(sequence, item) for item in value) if isinstance(value, list | tuple) else value
