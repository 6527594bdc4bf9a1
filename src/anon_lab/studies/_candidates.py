"""The guards' candidates: settings of Anon that might become its defaults, and how they are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import mean
from typing import Any

from anon_lab.studies._results import Results, worth
from anon_lab.studies._spec import TUNING_SEED, Ground, Job

GUARD = {"clip": 1.0, "floor": 0.01, "touch": True, "brake": False}
BASE = {"guard": GUARD, "betas": (0.9, 0.999), "beta3": 0.5, "growth": 2.0}
RISING = {"start": 1.25, "end": 2.0, "by": 1000}
WARM = {"growth": 2.0, "at": 50}
"""Step 50 is the end of ngram's warm-up."""
WORST = 10.0
"""The lag of a run that diverged, and of one that is 1,023 margins behind."""


@dataclass(frozen=True)
class Candidate:
    name: str
    values: Mapping[str, Any]
    optimizer: str = "Anon"


def _made(name: str, optimizer: str = "Anon", **changes: Any) -> Candidate:
    """The base with some settings changed, a guard's by their own names."""
    guard = {**GUARD, **{each: changes.pop(each) for each in tuple(changes) if each in GUARD}}
    if "beta2" in changes:
        changes["betas"] = (0.9, changes.pop("beta2"))
    return Candidate(name, {**BASE, "guard": guard, **changes}, optimizer)


def _variant(name: str, **changes: Any) -> Candidate:
    """What Anon itself cannot be told to do."""
    return _made(name, "Anon (variant)", **changes)


CANDIDATES = (
    _made("base"),
    Candidate("as printed", {**BASE, "guard": None}),
    # One setting at a time ...
    _made("clip 0.25", clip=0.25),
    _made("clip 0.5", clip=0.5),
    _made("clip 3", clip=3.0),
    _made("floor 0", floor=0.0),
    _made("floor 0.1", floor=0.1),
    _made("growth 1.1", growth=1.1),
    _made("growth 1.25", growth=1.25),
    _made("growth 1.5", growth=1.5),
    _made("growth rising", growth=RISING),
    _made("refresh at 50", growth=WARM),
    _made("beta3 0.1", beta3=0.1),
    _made("beta3 0.8", beta3=0.8),
    _made("no touch", touch=False),
    _made("beta2 0.95", beta2=0.95),
    _made("beta2 0.99", beta2=0.99),
    _variant("plain clip", clips="plain"),
    _variant("rows", rows=True),
    _made("brake", brake=True),
    _variant("rise", rise=True),
    _variant("drift 2", drift=2.0),
    _variant("drift 4", drift=4.0),
    # ... and together, where slower growth makes room for a wider clip, a longer memory for fresher samples, or fewer
    # samples for more refreshes at the same cost.
    _made("clip 0.5, growth 1.25", clip=0.5, growth=1.25),
    _made("clip 0.5, growth rising", clip=0.5, growth=RISING),
    _made("clip 0.5, beta2 0.95", clip=0.5, beta2=0.95),
    _made("clip 0.25, growth 1.25", clip=0.25, growth=1.25),
    _made("clip 3, growth 1.25", clip=3.0, growth=1.25),
    _made("clip 3, growth rising", clip=3.0, growth=RISING),
    _made("growth 1.25, floor 0.1", growth=1.25, floor=0.1),
    _made("growth 1.25, beta3 0.8", growth=1.25, beta3=0.8),
    _made("growth 1.25, beta3 0.8, floor 0.1", growth=1.25, beta3=0.8, floor=0.1),
    _made("growth 1.25, beta2 0.99", growth=1.25, beta2=0.99),
    _made("growth rising, beta2 0.99", growth=RISING, beta2=0.99),
    _made("growth 1.1, beta2 0.95", growth=1.1, beta2=0.95),
    _made("growth 1.1, beta2 0.99, beta3 0.8", growth=1.1, beta2=0.99, beta3=0.8),
    _variant("plain clip, growth 1.25", clips="plain", growth=1.25),
    _variant("rows, growth 1.25", rows=True, growth=1.25),
    _made("brake, clip 0.5", brake=True, clip=0.5),
    _made("brake, clip 3", brake=True, clip=3.0),
    _made("brake, growth 1.25", brake=True, growth=1.25),
    _made("brake, clip 0.5, beta2 0.95", brake=True, clip=0.5, beta2=0.95),
    _variant("rise, clip 0.5", rise=True, clip=0.5),
    _variant("rise, brake", rise=True, brake=True),
    _variant("rise, brake, clip 0.5", rise=True, brake=True, clip=0.5),
)


@dataclass(frozen=True)
class Cell:
    """A ground, a gamma and learning rates at which all candidates meet."""

    ground: Ground
    gamma: float
    lrs: tuple[float, ...]
    margin: float
    """By how much two equal candidates may differ."""
    seeds: int = 1

    @property
    def name(self) -> str:
        return f"{self.ground.name}, γ {self.gamma:g}"

    def jobs(self, candidate: Candidate) -> list[Job]:
        """Seed after seed, each at every lr."""
        label = f"Anon γ {self.gamma:g}, {candidate.name}"
        return [
            Job(label, self.ground, candidate.optimizer, {"lr": lr, **candidate.values, "gamma": self.gamma}, seed)
            for seed in range(TUNING_SEED, TUNING_SEED + self.seeds)
            for lr in self.lrs
        ]

    def found(self, candidate: Candidate, results: Results) -> tuple[float, float] | None:
        """The values at the best and at the highest lr, each the mean over seeds, turned so that more is better; None
        before all are done."""
        numbers = []
        for job in self.jobs(candidate):
            record = results.of(job)
            if record is None:
                return None
            numbers.append(worth(record, self.ground.metric))
        means = [mean(numbers[place :: len(self.lrs)]) for place in range(len(self.lrs))]
        return max(means), means[-1]

    def words(self, candidate: Candidate, results: Results) -> str:
        found = self.found(candidate, results)
        if found is None:
            return "–"
        return " / ".join("diverged" if number == float("-inf") else f"{abs(number):.4g}" for number in found)

    def lags(self, candidates: Sequence[Candidate], results: Results) -> dict[str, float] | None:
        """How far each is behind the best one: the mean of what it lacks at its best lr and at the highest, as the
        logarithm log2(1 + margins), so that one failure does not decide all; None before all are done."""
        values = {each.name: self.found(each, results) for each in candidates}
        known = {name: each for name, each in values.items() if each is not None}
        if len(known) < len(values):
            return None
        first = [max(each[kind] for each in known.values()) for kind in (0, 1)]
        return {
            name: mean(
                min(log2(1 + (first[kind] - each[kind]) / self.margin), WORST) if first[kind] > each[kind] else 0.0
                for kind in (0, 1)
            )
            for name, each in known.items()
        }


def screened(candidates: Sequence[Candidate], cells: Sequence[Cell]) -> list[Job]:
    """Every candidate in every cell."""
    return [job for cell in cells for candidate in candidates for job in cell.jobs(candidate)]


def ordered(candidates: Sequence[Candidate], cells: Sequence[Cell], results: Results) -> list[tuple[str, float]] | None:
    """Names with mean lags over the cells, the best first, the earliest of equals; None before all are done."""
    by_cell = []
    for cell in cells:
        lags = cell.lags(candidates, results)
        if lags is None:
            return None
        by_cell.append(lags)
    means = {each.name: mean(lags[each.name] for lags in by_cell) for each in candidates}
    return sorted(means.items(), key=lambda each: each[1])
