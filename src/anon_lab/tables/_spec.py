"""What a table of the paper consists of, before and after its runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from anon_lab.launch import Place
from anon_lab.tasks import Metric, Task


@dataclass(frozen=True)
class Row:
    """An optimizer with its settings, the learning rates it is tried at, and what the paper prints for it."""

    name: str
    optimizer: str = "Anon"
    lrs: tuple[float, ...] = ()
    """Empty where it is not trained."""
    hyper: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the size's recipe."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the size's options of the task."""
    printed: tuple[float, ...] = ()
    """Two numbers where the paper contradicts itself."""


@dataclass(frozen=True)
class Size:
    """How much of the paper's experiment is done."""

    runs: str
    """Folder of the runs; tables that share it share the runs."""
    task: str
    says: str
    """One sentence: what is trained, and for how long."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's own."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the task's recipe."""
    seeds: int = 3
    together: int = 1
    """Runs that train at once, in one process."""
    evaluations: int = 5
    graph: bool = True
    """Whether steps are replayed as a CUDA graph, on a GPU."""


@dataclass(frozen=True)
class Trial:
    """A row at one learning rate, after its runs."""

    row: Row
    lr: float
    folders: Sequence[Path]
    """Of each seed."""
    results: Sequence[Mapping[str, Any]]
    """result.json of each seed."""
    values: Sequence[float]
    """The table's metric, of the seeds that did not diverge."""

    @property
    def alive(self) -> list[Path]:
        """The folders of the seeds that did not diverge."""
        pairs = zip(self.folders, self.results, strict=True)
        return [folder for folder, result in pairs if not result["diverged"]]


@dataclass(frozen=True)
class Outcome:
    """A table after its runs."""

    size: str
    metric: Metric
    rows: Sequence[Row]
    trials: Sequence[Trial]
    together: int = 1
    """How many ran at once: only runs alone can be timed."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What a table measures beside its metric."""

    def at(self, name: str, lr: float) -> Trial | None:
        """The row's trial at this lr."""
        return next((each for each in self.trials if each.row.name == name and each.lr == lr), None)

    def of(self, name: str) -> list[Trial]:
        """The row's trials, in the order of its learning rates."""
        return [each for each in self.trials if each.row.name == name]

    def best(self, name: str) -> Trial | None:
        """The row's trial with the best mean; None where nothing was trained or everything diverged."""
        done = [each for each in self.of(name) if each.values]
        sign = 1 if self.metric.higher_is_better else -1
        return max(done, key=lambda each: sign * mean(each.values), default=None)


@dataclass(frozen=True)
class Sheet:
    """Lines of text in columns; the first row is the head."""

    title: str
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Heat:
    """A matrix to be drawn as colours, with the words in each field."""

    title: str
    down: str
    """What the rows are."""
    along: str
    """What the columns are."""
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    """NaN where there is none."""
    words: Sequence[Sequence[str]]
    unit: str
    higher_is_better: bool = True


Measure = Callable[[Outcome, Task, Place, Console], Outcome]


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper that takes training."""

    title: str
    sizes: Mapping[str, Size]
    rows: Callable[[str], Sequence[Row]]
    """Those of a size."""
    sheets: Callable[[Outcome], list[Sheet]]
    remarks: Callable[[Outcome], list[str]]
    """What the paper claims, and whether it holds here."""
    heats: Callable[[Outcome], list[Heat]] = lambda outcome: []
    headline: Callable[[Outcome], str] | None = None
    """The finding in one line; None: who is best."""
    measure: Measure | None = None
    """What is measured once all is trained, from the weights that were kept."""
    check: Callable[[], object] = lambda: None
    """Raises before any training what would otherwise be raised after it."""
