"""`anon explore`: one page, without server or network, in which Anon runs beside SGDM, Adam and AMSGrad."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.colors import to_hex

from anon_lab.files import write_text
from anon_lab.palette import COLOUR, DASH, viridis
from anon_lab.problems import PROBLEMS
from anon_optim import Anon

BASELINES = ("SGDM", "Adam", "AMSGrad")
GAMMAS = [k / 20 for k in range(-40, 41)]
"""What the slider for gamma can be set to."""

# In the order in which they build on one another.
SCRIPTS = ("optimizers", "settings", "problems", "search", "runs", "finding", "plot", "views", "controls", "page")


def save(out: Path) -> Path:
    """Write explore.html into the folder, whole or not at all; return its path."""
    return write_text(out / "explore.html", html())


def html() -> str:
    """The page, with everything it needs inside."""
    scripts = [f"const GIVEN = {json.dumps(given())};", *(_asset(f"{name}.js") for name in SCRIPTS)]
    page = _asset("page.html").replace("/* page.css */", _asset("page.css"))
    return page.replace("/* scripts */", "\n".join(scripts))


def given() -> dict[str, Any]:
    """What the page takes from the library and the laboratory, so that it stands in one place."""
    defaults = Anon([torch.zeros(1)]).defaults
    of_anon = ("betas", "eps", "beta3", "clip", "floor", "touch", "window_tol")
    return {
        # 2.0 is "2" to the page, which computes with the decimal digits
        "anon": {key: defaults[key] for key in of_anon} | {"growth": f"{defaults['growth']:g}"},
        "problems": {
            name: {"title": p.title, "start": p.start, "optimum": p.optimum, "window": p.window}
            for name, p in PROBLEMS.items()
        },
        "colours": {name: COLOUR[name] for name in BASELINES},
        "dashes": {name: DASH[name] for name in BASELINES},
        "gamma_colours": [[_colour(gamma, dark) for gamma in GAMMAS] for dark in (False, True)],
    }


def _colour(gamma: float, dark: bool) -> str:
    return to_hex(mpl.colormaps["viridis"](viridis(gamma, dark)))


def _asset(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
