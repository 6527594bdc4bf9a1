"""ln(1 + Beale)/10 in the coordinates in which Anon is plain gradient descent, with the paths over it."""

import math
from dataclasses import dataclass, replace

import torch
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport
from anon_lab.figures._drawing import colour, dash, draw_path, grid, number, plain_table
from anon_lab.figures.beale import lr_for_first_step
from anon_lab.problems import BEALE, Point
from anon_lab.trajectories import Contender, Path, follow
from anon_optim import Anon

GAMMAS = (1.5, 0.5, -0.5)
OTHERS = ("SGDM", "Adam", "AdaBelief")
STEPS = (1, 100)
"""When the preconditioner is taken: at the first step, which chooses the valley, and at 100, as the paper does."""
WINDOW = ((-3.4, 4.2), (-1.6, 2.9))
"""Of stretched x and y, the same in every panel."""
LEVELS = [0.01, 0.03, 0.06, *(0.1 + 0.05 * k for k in range(12))]


@dataclass(frozen=True)
class Panel:
    """The landscape as one gamma's preconditioner at one step sees it."""

    gamma: float
    step: int
    psi: list[float]
    """Of x and of y."""
    stretch: list[float]
    """What x and y are multiplied by: psi^(1/2), divided by the geometric mean so that areas stay."""


@dataclass(frozen=True)
class Run:
    name: str
    gamma: float | None
    label: str
    lr: float
    path: Path


@dataclass(frozen=True)
class Data:
    panels: list[Panel]
    runs: list[Run]
    """Anon's in the order of GAMMAS, then the others'."""


def compute(quick: bool, progress: ProgressReport) -> Data:
    steps = 100 if quick else 1000
    contenders = [*(Contender("Anon", gamma) for gamma in GAMMAS), *map(Contender, OTHERS)]
    runs, panels = [], []
    for k, contender in enumerate(contenders):
        progress(contender.label, k / len(contenders))
        lr = lr_for_first_step(contender)
        path = follow(BEALE, contender, lr, range(steps + 1))
        runs.append(Run(contender.name, contender.gamma, contender.label, lr, path))
        if contender.gamma is not None:
            panels += [_panel(contender, lr, step) for step in STEPS]
    return Data(panels, runs)


def _panel(contender: Contender, lr: float, steps: int) -> Panel:
    assert contender.gamma is not None
    psi = preconditioner(contender.gamma, lr, steps)
    # theta <- theta - lr m / psi  is gradient descent in  theta' = psi^(1/2) theta,  since  g' = psi^(-1/2) g.
    mean = math.sqrt(psi[0] * psi[1])
    return Panel(contender.gamma, steps, list(psi), [math.sqrt(p / mean) for p in psi])


def preconditioner(gamma: float, lr: float, steps: int) -> Point:
    """psi of x and y in use at the given step of Anon's run from the start."""
    theta = torch.tensor(BEALE.start, dtype=torch.float64, requires_grad=True)
    optimizer = Anon.paper([theta], lr=lr, gamma=gamma)
    for _ in range(steps):
        optimizer.zero_grad()
        BEALE.f(theta).backward()
        optimizer.step()
    x, y = (1 / optimizer.state[theta]["preconditioner"]).tolist()
    return x, y


def ratios(data: Data, step: int) -> list[float]:
    """By how much x is stretched more than y, for each of GAMMAS."""
    return [panel.stretch[0] / panel.stretch[1] for panel in data.panels if panel.step == step]


def course(values: list[float]) -> str:
    """Whether numbers fall or rise along the list."""
    if values == sorted(values, reverse=True):
        return "shrinks"
    return "grows" if values == sorted(values) else "goes both ways"


def finding(data: Data) -> str:
    first, later = (ratios(data, step) for step in STEPS)
    return (
        f"As γ falls from {GAMMAS[0]:g} over {GAMMAS[1]:g} to {GAMMAS[2]:g}, x {course(first)} against y at step "
        f"{STEPS[0]} ({_listed(first)}) and {course(later)} at step {STEPS[1]} ({_listed(later)})"
    ).replace("-", "−")


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(13.5, 6.35), layout="constrained")
    axes = figure.subplots(len(STEPS), len(GAMMAS), sharex=True, sharey=True)
    filled = [
        _draw_panel(axes[STEPS.index(panel.step)][GAMMAS.index(panel.gamma)], panel, data) for panel in data.panels
    ]
    figure.colorbar(filled[0], ax=axes, label=f"loss {BEALE.title}", shrink=0.9, pad=0.01)
    for axis in axes[-1]:
        axis.set_xlabel("x, stretched")
    for axis in axes[:, 0]:
        axis.set_ylabel("y, stretched")
    drawn = {line.get_label(): line for axis in axes[0] for line in axis.lines}
    lines = [drawn[run.label] for run in data.runs]
    names = [run.label if run.gamma is None else f"Anon, {run.label}" for run in data.runs]
    figure.legend(lines, names, loc="outside lower center", ncols=len(names))
    figure.suptitle(finding(data), fontsize=13, wrap=True)
    return figure


def _draw_panel(axis: Axes, panel: Panel, data: Data) -> ContourSet:
    stretch = torch.tensor(panel.stretch, dtype=torch.float64)
    stretched = replace(BEALE, f=lambda points: BEALE.f(points / stretch))
    x, y, loss = grid(stretched, WINDOW)
    filled = axis.contourf(x, y, loss, levels=LEVELS, cmap="RdYlBu_r", extend="both")
    axis.contour(x, y, loss, levels=LEVELS, colors="#444444", linewidths=0.3, alpha=0.6)
    sx, sy = panel.stretch
    for run in data.runs:
        if run.gamma not in (None, panel.gamma):
            continue
        scaled = Path(run.path.steps, [sx * v for v in run.path.x], [sy * v for v in run.path.y], run.path.loss)
        width = 1.6 if run.gamma is None else 2.8
        draw_path(
            axis, scaled, colour(run.name, run.gamma), width, label=run.label, linestyle=dash(run.name, run.gamma)
        )
    for point, mark, size in ((BEALE.start, "o", 6), (BEALE.optimum, "*", 13)):
        axis.plot(sx * point[0], sy * point[1], mark, color="black", markersize=size, markeredgecolor="white", zorder=5)
    axis.set(xlim=WINDOW[0], ylim=WINDOW[1], aspect="equal")
    axis.set_title(
        f"γ = {panel.gamma:g}, ψ of step {panel.step}: x × {sx:.2f}, y × {sy:.2f}".replace("-", "−"), fontsize=11
    )
    return filled


def table(data: Data) -> Table:
    headings = ("γ", "step", "ψ of x", "ψ of y", "stretch of x", "stretch of y", "v_x / v_y")
    drawn = plain_table(finding(data), "stretch: psi^(1/2) over its geometric mean; v = 1 / ψ", headings)
    for panel in data.panels:
        drawn.add_row(
            number(panel.gamma),
            str(panel.step),
            *(number(value, 3) for value in (*panel.psi, *panel.stretch)),
            number(panel.psi[1] / panel.psi[0], 3),
        )
    return drawn


def remarks(data: Data) -> list[str]:
    said = {step: "holds" if course(ratios(data, step)) == "shrinks" else "does not hold" for step in STEPS}
    return [
        "The paper: as γ falls from 1.5 to −0.5 the x axis shrinks against the y axis, which makes Anon choose the "
        f"right path. In the coordinates in which Anon is gradient descent this {said[1]} for the "
        f"preconditioner of step 1 and {said[100]} for that of step 100, which the paper names.",
        "At step 100 each γ's path has already taken its valley and the preconditioner was made of the gradients found "
        "there, so the landscape of step 100 is a result of the choice; its cause is the slope of the first steps, "
        "|dy/dx| = |g_y/g_x|^(1 − γ).",
    ]
