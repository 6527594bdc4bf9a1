"""`anon adaptivity`: the adaptivity of every optimizer that can be made by name, measured on one history."""

import difflib
import inspect
import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_optimizer
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from anon_lab import optimizers
from anon_lab.baselines._entry import Entry
from anon_optim import Anon, measure_adaptivity, relative_adaptivity
from anon_optim._adaptivity import EXACT

SHAPE = (12, 8)
SEED = 0
STEPS, QUICK_STEPS = 50, 10
GAMMAS = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
NEAR = 0.05
"""An optimizer is said to be at A when it is measured within this of it."""

# What some constructors want to be told; the value is one that fits the replay.
MORE_ARGUMENTS: dict[str, dict[str, Any]] = {"BSAM": {"num_data": 1000}, "Ranger21": {"num_iterations": STEPS}}

ANONS: dict[str, Callable[..., Optimizer]] = {
    "Anon": Anon,
    "Anon.paper": Anon.paper,
    "Anon, lr_scale": partial(Anon, lr_scale="tensor"),
}


@dataclass(frozen=True)
class Candidate:
    """An optimizer to measure."""

    name: str
    source: str
    make: Callable[[list[Parameter]], Optimizer]
    gamma: float | None = None


@dataclass(frozen=True)
class Row:
    """What came out for one optimizer; None where there is nothing to measure, and then `reason` says why."""

    name: str
    source: str
    gamma: float | None
    A: float | None = None
    """At the last step."""
    low: float | None = None
    high: float | None = None
    """The A that 5 % of the coordinates are below there, and the one that 5 % are above."""
    first: float | None = None
    """A at step 1."""
    relative: float | None = None
    """The exponent between coordinates."""
    factor: float | None = None
    dtype: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Results:
    rows: list[Row]
    steps: int
    wall_s: float

    @property
    def measured(self) -> list[tuple[float, Row]]:
        """The rows of other optimizers that have an A, each after it."""
        return [(row.A, row) for row in self.rows if row.A is not None and row.gamma is None]

    def anons(self, name: str = "Anon") -> list[tuple[float, float, Row]]:
        """Anon's rows, each after its gamma and A."""
        named = [row for row in self.rows if row.name == name]
        return [(row.gamma, row.A, row) for row in named if row.gamma is not None and row.A is not None]

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row.A is None]


def history(steps: int) -> list[Tensor]:
    """Gradients with a mean and noise, their scales spread over two decades from coordinate to coordinate."""
    random = torch.Generator().manual_seed(SEED)
    scale = 10 ** (-2 + 2 * torch.rand(SHAPE, generator=random, dtype=torch.float64))
    mean = torch.randn(SHAPE, generator=random, dtype=torch.float64)
    noise = torch.randn(steps, *SHAPE, generator=random, dtype=torch.float64)
    return list(scale * (0.5 * mean + noise))


def weights() -> Tensor:
    """Where the parameters stand: away from zero, for the methods that look at them, but small, so that little of an
    update is lost in rounding."""
    return 1e-3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)


def candidates(gammas: Sequence[float] = GAMMAS) -> list[Candidate]:
    """torch.optim's, pytorch_optimizer's, this package's own baselines, then Anon in the order of gamma."""
    of_torch = [
        each
        for each in vars(torch.optim).values()
        if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
    ]
    found = [Candidate(each.__name__, "torch", partial(_make, each)) for each in of_torch]
    for name in pytorch_optimizer.get_supported_optimizers():
        each = pytorch_optimizer.load_optimizer(name)
        found.append(Candidate(each.__name__, "pytorch_optimizer", partial(_make, each)))
    own = [entry for entry in optimizers.REGISTRY.values() if entry.source == "anon_lab"]
    found += [of_entry(entry) for entry in own]
    found.sort(key=lambda each: each.name.casefold())
    return found + [
        Candidate(name, "anon_optim", partial(make, gamma=gamma), gamma)
        for name, make in ANONS.items()
        for gamma in gammas
    ]


def of_entry(entry: Entry) -> Candidate:
    """An optimizer of the laboratory's registry, without weight decay."""

    def make(params: list[Parameter]) -> Optimizer:
        if entry.needs in ("create_graph", "sampled_loss"):
            raise ValueError(f"{entry.name} also needs estimates of the Hessian, which recorded gradients do not hold")
        return entry.make(params, weight_decay=0.0)

    return Candidate(entry.name, entry.source, make)


def chosen(names: Sequence[str], among: Sequence[Candidate]) -> list[Candidate]:
    """Those of these names, in whatever case, and Anon; an unknown name is a ValueError with the nearest ones."""
    known = {each.name.casefold(): each.name for each in among}
    wanted = [name.strip().casefold() for name in names]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; near it: {', '.join(known[each] for each in near)}" if near else ""
            raise ValueError(f"no optimizer is called {name!r}{hint}")
    return [each for each in among if each.name.casefold() in wanted or each.gamma is not None]


def _make(kind: Callable[..., Optimizer], params: list[Parameter]) -> Optimizer:
    """With its defaults, except that nothing decays."""
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {"weight_decay": 0.0} if "weight_decay" in accepted else {}
    options |= MORE_ARGUMENTS.get(getattr(kind, "__name__", ""), {})
    try:
        optimizer = kind(params, **options)
    except RuntimeError:  # how pytorch_optimizer's Muon and its kin say that they want to be told what they are for
        optimizer = kind([{"params": params, "use_muon": True}], **options)
    with suppress(AttributeError):
        optimizer.train()  # pyright: ignore[reportAttributeAccessIssue] - schedule-free methods wait for it
    return optimizer


@contextmanager
def _silence() -> Iterator[None]:
    """Some optimizers print, or warn of what does not matter here."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(todo: Sequence[Candidate], steps: int, console: Console) -> Results:
    """Measure them all, with a progress bar on the console."""
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(todo))
        for candidate in todo:
            progress.update(bar, description=f"{candidate.name:<20}")
            rows.append(measure(candidate, steps))
            progress.advance(bar)
    return Results(rows, steps, time.perf_counter() - start)


def measure(candidate: Candidate, steps: int) -> Row:
    """In float64, or where that fails in float32."""
    reasons = []
    with _silence():
        for dtype in (torch.float64, torch.float32):
            try:
                return _measure(candidate, history(steps), dtype)
            except ValueError as error:
                reasons.append(str(error))
            except Exception as error:  # whatever a constructor raises where it wants other arguments
                reasons.append(f"{candidate.name} cannot be made from a list of parameters: {error}")
    return Row(candidate.name, candidate.source, candidate.gamma, reason=" ".join(reasons[0].split()))


def _measure(candidate: Candidate, gradients: list[Tensor], dtype: torch.dtype) -> Row:
    options: dict[str, Any] = {"start": weights(), "dtype": dtype, "seed": SEED}
    first, last = measure_adaptivity(candidate.make, gradients, at=[1, len(gradients)], **options)
    overall = last.overall
    found = last.coordinates[last.defined]
    try:
        relative, reason = relative_adaptivity(candidate.make, gradients, **options), ""
    except ValueError as error:
        relative, reason = None, str(error)
    return Row(
        candidate.name,
        candidate.source,
        candidate.gamma,
        A=overall,
        low=found.quantile(0.05).item(),
        high=found.quantile(0.95).item(),
        first=first.overall if first.undefined_share < 1 else None,
        relative=relative,
        factor=last.factor,
        dtype=str(dtype).removeprefix("torch."),
        reason=reason,
    )


def number(value: float | None, digits: int = 3) -> str:
    """With a true minus sign and no minus zero; a dash where there is none."""
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def finding(results: Results) -> str:
    """Where the optimizers lie, in a sentence."""
    values = [a for a, _ in results.measured]
    zeros, ones = (sum(abs(a - place) <= NEAR for a in values) for place in (0.0, 1.0))
    rest = len(values) - ones - zeros
    others = f"{ones} of {len(values)} implementations lie at A = 1, {zeros} at A = 0 and {rest} elsewhere"
    anons = results.anons()
    if not anons:
        return others
    gammas = [gamma for gamma, _, _ in anons]
    ends = f"from {min(gammas):g} to {max(gammas):g}".replace("-", "−")
    miss = max(abs(a - gamma) for gamma, a, _ in anons)
    ours = f"Anon lies where γ says, {ends}" if miss <= 0.01 else f"Anon misses γ, {ends}, by up to {miss:.2g}"
    return f"{others}; {ours}" if values else ours


COLUMNS = ("optimizer", "from", "γ", "A", "A at step 1", "between")


def cells(results: Results) -> list[tuple[str, ...]]:
    """The table's cells, in the order of A."""
    measured = sorted((row for row in results.rows if row.A is not None), key=lambda row: round(row.A or 0.0, 3))
    return [
        (
            row.name,
            row.source,
            "" if row.gamma is None else number(row.gamma, 2),
            number(row.A) + ("*" if row.factor == EXACT else ""),
            number(row.first),
            number(row.relative),
        )
        for row in measured
    ]


CAPTION = (
    "A: of the whole update; between: the exponent between coordinates; *: by scaling with 2, because the method rounds"
)


def tables(results: Results) -> list[Table]:
    """What the terminal shows: what was measured, and what could not be."""
    drawn = Table(title=finding(results), caption=f"step {results.steps}. {CAPTION}")
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in cells(results):
        drawn.add_row(*row)
    if not results.refused:
        return [drawn]
    refused = Table("optimizer", "from", "why not", title=f"{len(results.refused)} could not be measured")
    for row in results.refused:
        refused.add_row(row.name, row.source, row.reason)
    return [drawn, refused]
