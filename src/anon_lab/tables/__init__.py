"""The tables of the paper that take training, measured anew beside the paper's own numbers; `run` makes one by name.

Each is a module of this package with a `TABLE`: its sizes, its rows with what the paper prints for them, and its
claims. `full` is the paper's size, `small` one that a GPU trains in minutes, and `tiny` shows on a CPU that all works.
"""

import importlib
import io
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from anon_lab import launch
from anon_lab.files import write_bytes, write_json, write_text
from anon_lab.html import html_table, page
from anon_lab.settings import provenance
from anon_lab.tables import _pictures, _words
from anon_lab.tables._spec import Heat, Outcome, Sheet, Table
from anon_lab.tables._training import Order, train

__all__ = ["NAMES", "Order", "load", "run", "stem"]

NAMES: Mapping[str, str] = {
    "ablation": "IDU's beta3 and refresh times, ResNet-20 on CIFAR-10",
    "sensitivity": "lr and gamma, ResNet-20 on CIFAR-10",
    "resnet18": "ResNet-18 on ImageNet",
    "resnet50": "ResNet-50 on ImageNet",
    "gpt2": "GPT-2, validation loss and time",
    "diffusion": "a diffusion model of CIFAR-10, FID",
    "similarity": "cosines, ensembles and sharpness of what optimizers find",
}
TOO_SHORT = "Made at size tiny: the numbers show that all works, and say nothing about the claims below."


def load(name: str) -> Table:
    """The table's description, imported only now, so that one table's troubles are not another's."""
    if name not in NAMES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{name}").TABLE


def stem(name: str, size: str) -> str:
    """What the table's files are called: each size has its own."""
    return name if size == "small" else f"{name}-{size}"


def run(name: str, order: Order, where: launch.Place, console: Console) -> list[Path]:
    """Train what is missing; print the table and what holds of the paper's claims; write its .json, .html and .png."""
    table = load(name)
    start = time.perf_counter()
    table.check()
    outcome, task = train(table, order, where, console)
    if where.rank > 0:
        return []
    if table.measure is not None:
        outcome = table.measure(outcome, task, where, console)
    headline = (table.headline or _words.headline)(outcome)
    size = table.sizes[order.size]
    remarks = [
        f"Size {order.size}: {size.says}",
        *([TOO_SHORT] if order.size == "tiny" else []),
        *table.remarks(outcome),
    ]
    sheets, heats = table.sheets(outcome), table.heats(outcome)
    for sheet in sheets:
        console.print(_words.as_rich(sheet))
    console.print(headline, markup=False, highlight=False)
    for remark in remarks:
        console.print(f"• {remark}", markup=False, highlight=False)
    seconds = round(time.perf_counter() - start, 1)
    extra = {"headline": headline, "remarks": remarks, "wall_s": seconds, **provenance(where.device)}
    file = stem(name, order.size)
    paths = [
        write_json(order.out / f"{file}.json", {**_record(name, outcome), **extra}),
        write_text(order.out / f"{file}.html", _html(table, headline, remarks, sheets, heats)),
    ]
    if heats:
        picture = io.BytesIO()
        _pictures.draw(heats, headline).savefig(picture, format="png", dpi=150)
        paths.append(write_bytes(order.out / f"{file}.png", picture.getvalue()))
    return paths


def _record(name: str, outcome: Outcome) -> dict[str, Any]:
    """Every number of the table."""
    return {
        "table": name,
        "size": outcome.size,
        "metric": vars(outcome.metric),
        "rows": [
            {
                "name": row.name,
                "optimizer": row.optimizer,
                "paper": list(row.printed),
                "settings": dict(row.hyper),
                "trials": [
                    {
                        "lr": trial.lr,
                        "values": list(trial.values),
                        "diverged": sum(result["diverged"] for result in trial.results),
                        "seconds_a_step": [result["seconds_a_step"] for result in trial.results],
                    }
                    for trial in outcome.of(row.name)
                ],
            }
            for row in outcome.rows
        ],
        "more": outcome.more,
    }


def _html(table: Table, headline: str, remarks: list[str], sheets: list[Sheet], heats: list[Heat]) -> str:
    body = [f"<p>{escape(table.title)}. {escape(remarks[0])}</p>"]
    for number, heat in enumerate(heats):
        body.append(f'<h2>{escape(heat.title.capitalize())}</h2><div class="plot" id="heat{number}"></div>')
    for sheet in sheets:
        head, *lines = sheet.lines
        body += [f"<h2>{escape(sheet.title[0].upper() + sheet.title[1:])}</h2>", html_table(head, lines)]
    body.append("<h2>What the paper says, and what came out</h2>")
    body.append("<ul>" + "".join(f"<li>{escape(remark)}</li>" for remark in remarks[1:]) + "</ul>")
    plots = {f"heat{number}": lambda dark, heat=heat: _pictures.plot(heat) for number, heat in enumerate(heats)}
    return page(headline, "\n".join(body), plots, "The plots need JavaScript; the tables hold the same numbers.")
