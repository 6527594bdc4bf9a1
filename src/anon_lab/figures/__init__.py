"""The figures of the paper, drawn anew from runs of this library; `run` makes any of them by name.

Each figure is a module of this package with four functions: `compute(quick, progress)` gives a frozen dataclass of
every number drawn, `draw(data)` the picture, `table(data)` what the terminal shows, and `remarks(data)` what the paper
claims here and whether it holds.
"""

import importlib
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from anon_lab.files import write_bytes, write_json
from anon_lab.settings import versions

NAMES: Mapping[str, str] = {
    "beale": "paths on ln(1 + Beale)/10, and how many starts lead to the minimum",
    "landscape": "the same loss in the coordinates that Anon's preconditioner makes of it",
    "directions": "where the first step points, over gamma",
    "rosenbrock": "paths down Rosenbrock's valley, every learning rate searched alike",
    "rastrigin": "paths among Rastrigin's local minima, every learning rate searched alike",
    "surfaces": "Rastrigin and Rosenbrock in three dimensions",
    "noise": "Adam, AMSGrad and Anon on the noisy online problem",
    "spectrum": "the measured adaptivity of every optimizer",
    "extremes": "gamma from -4 to 4: what still converges, and at which learning rates",
    "idu": "IDU under Adam's, AdaBelief's and AdaMomentum's statistics, against those without it",
}

TOO_SHORT = "Made with --quick: the numbers show that all works, and are too few to judge a claim by."

ProgressReport = Callable[[str, float], None]
"""Called with what is being done and the share that is done, from 0 to 1."""


class FigureModule(Protocol):
    """What a module of this package offers."""

    def compute(self, quick: bool, progress: ProgressReport) -> Any: ...
    def draw(self, data: Any) -> Figure: ...
    def table(self, data: Any) -> Table: ...
    def remarks(self, data: Any) -> list[str]: ...


def chosen(name: str) -> list[str]:
    """The figures that a name stands for: itself, or all of them."""
    if name == "all":
        return list(NAMES)
    if name not in NAMES:
        raise ValueError(f"there is no figure {name!r}; there are {', '.join(NAMES)}, and all")
    return [name]


def load(name: str) -> FigureModule:
    """The figure's module, imported only now, so that one figure's troubles are not another's."""
    return cast(FigureModule, importlib.import_module(f"{__name__}.{name}"))


def run(name: str, quick: bool, out: Path, console: Console) -> list[Path]:
    """Compute, print and save one figure: NAME.png, NAME.pdf, and NAME.json with every number drawn."""
    module = load(name)
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        data = module.compute(quick, lambda text, share: bar.update(task, description=text, completed=share))
    remarks = [*([TOO_SHORT] if quick else []), *module.remarks(data)]
    record = {
        "figure": name,
        "description": NAMES[name],
        "quick": quick,
        "data": asdict(data),
        "remarks": remarks,
        "wall_s": round(time.perf_counter() - start, 1),
        "versions": versions("torch", "matplotlib", "pytorch_optimizer"),
    }
    figure = module.draw(data)
    if quick:  # a picture travels without its remarks
        figure.text(0.5, 0.5, "--quick", size=72, rotation=30, ha="center", va="center", color="gray", alpha=0.2)
    console.print(module.table(data))
    for remark in remarks:
        console.print(f"• {remark}", markup=False, highlight=False)
    return [
        write_bytes(out / f"{name}.png", _rendered(figure, "png", dpi=100 if quick else 200)),
        write_bytes(out / f"{name}.pdf", _rendered(figure, "pdf", dpi=200)),
        write_json(out / f"{name}.json", record),
    ]


def _rendered(figure: Figure, form: str, dpi: int) -> bytes:
    buffer = io.BytesIO()
    # Without a date the same numbers give the same file.
    figure.savefig(buffer, format=form, dpi=dpi, metadata={"CreationDate": None} if form == "pdf" else None)
    return buffer.getvalue()
