"""Paths of SGDM, Adam, AdaBelief and Anon on ln(1 + Beale)/10, and from how many starts each finds the minimum."""

import math
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab.figures import ProgressReport
from anon_lab.figures._drawing import colour, contours, dash, draw_path, listed, mark_ends, number, plain_table
from anon_lab.problems import BEALE
from anon_lab.trajectories import RATES, Contender, Path, anons, follow, search, steps_to_keep, trace

CONTENDERS = [*anons((-1.0, -0.5, 0.0, 0.5, 1.0, 1.5)), *map(Contender, ("SGDM", "Adam", "AdaBelief"))]
FIRST_STEP = 0.025
"""How long everyone's first step is: that is how each lr of the drawn paths is set."""
JUMP = 0.2
"""A first step longer than this (for SGDM, ten of them) crosses so much that the run is no descent from its start."""
NEAR = 0.05
"""A run that ends this close to (3, 0.5) has found it."""
SCAN_AREA = ((-4.0, 4.0), (-2.0, 2.0))
LEVELS = [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8]


@dataclass(frozen=True)
class Run:
    """One optimizer from the start of the figure."""

    name: str
    gamma: float | None
    label: str
    lr: float
    path: Path
    loss_at: list[float]
    """At the steps `Data.marks`."""
    angle: float
    """Of the straight line to where the path is first 1 away from its start, from the x axis, in degrees."""
    reaches: bool
    guarded_loss: float | None
    """At the last step with Anon's default guards, at the same lr."""
    rates_reaching: list[float]
    """The learning rates of the common search that end at the minimum."""
    rates_reaching_calmly: list[float]
    """Those among them whose first step is shorter than `JUMP`."""


@dataclass(frozen=True)
class Scan:
    """How many starts lead to the minimum."""

    label: str
    rates: list[float]
    reached: list[int]
    """[learning rate]"""


@dataclass(frozen=True)
class Data:
    marks: list[int]
    rates: list[float]
    runs: list[Run]
    starts: int
    scan_steps: int
    scans: list[Scan]


def compute(quick: bool, progress: ProgressReport) -> Data:
    marks = [30, 90] if quick else [100, 1000, 5000]
    rates = list(RATES[48::10] if quick else RATES)
    side, scan_steps = (5, 30) if quick else (18, 3000)
    scan_rates = [10 ** (k / 3) for k in range(-12, 7, 6 if quick else 1)]
    runs, scans = [], []
    for k, contender in enumerate(CONTENDERS):
        progress(f"paths: {contender.label}", k / len(CONTENDERS))
        runs.append(_run(contender, marks, rates))
        progress(f"starts: {contender.label}", (k + 0.5) / len(CONTENDERS))
        scans.append(_scan(contender, side, scan_rates, scan_steps))
    return Data(marks, rates, runs, side**2, scan_steps, scans)


def _run(contender: Contender, marks: list[int], rates: list[float]) -> Run:
    lr = lr_for_first_step(contender)
    keep = steps_to_keep(marks[-1], dense=1000)
    path = follow(BEALE, contender, lr, keep)
    guarded_loss = None
    if contender.gamma is not None:
        guarded_loss = follow(BEALE, Contender("Anon", contender.gamma, guarded=True), lr, [marks[-1]]).loss[-1]
    found = search(BEALE, contender, marks[-1], rates)
    reaching = [k for k, distance in enumerate(found.distance) if distance < NEAR]
    return Run(
        contender.name,
        contender.gamma,
        contender.label,
        lr,
        path,
        [path.loss[path.steps.index(t)] for t in marks],
        _angle(path),
        math.dist((path.x[-1], path.y[-1]), BEALE.optimum) < NEAR,
        guarded_loss,
        [rates[k] for k in reaching],
        [rates[k] for k in reaching if found.first_step[k] * _momentum_sum(contender) < JUMP],
    )


def lr_for_first_step(contender: Contender) -> float:
    """The learning rate at which the first step is FIRST_STEP long."""
    one = torch.ones(1, dtype=torch.float64)
    _, length = trace(BEALE, contender, torch.tensor([BEALE.start], dtype=torch.float64), one, [1])
    return FIRST_STEP / float(length) / _momentum_sum(contender)


def _momentum_sum(contender: Contender) -> float:
    """SGD's momentum sums ten gradients where the others average, so its steps grow to ten times the first."""
    return 10.0 if contender.name == "SGDM" else 1.0


def _angle(path: Path) -> float:
    for x, y in zip(path.x, path.y, strict=True):
        dx, dy = x - path.x[0], y - path.y[0]
        if math.hypot(dx, dy) >= 1:
            return math.degrees(math.atan2(abs(dy), abs(dx)))
    return math.nan


def _scan(contender: Contender, side: int, rates: list[float], steps: int) -> Scan:
    x, y = (torch.linspace(*ends, side, dtype=torch.float64) for ends in SCAN_AREA)
    starts = torch.cartesian_prod(x, y)
    tried = torch.tensor(rates, dtype=torch.float64)
    points, _ = trace(BEALE, contender, starts.repeat(len(rates), 1), tried.repeat_interleave(len(starts)), [steps])
    near = BEALE.distance(points[-1]) < NEAR
    return Scan(contender.label, rates, near.view(len(rates), -1).sum(1).tolist())


def finding(data: Data) -> str:
    there = listed([run.label for run in data.runs if run.reaches])
    most = {scan.label: max(scan.reached) for scan in data.scans}
    return (
        f"From (−1.8, 0) the minimum is reached by {there}; of {data.starts} starts γ = −0.5 finds it from "
        f"{most['γ = −0.5']}, SGDM from {most['SGDM']}, Adam from {most['Adam']}"
    )


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(12.5, 7.2), layout="constrained")
    figure.suptitle(finding(data).replace("; ", ";\n"), fontsize=13, wrap=True)
    columns = figure.add_gridspec(2, 2, width_ratios=[1.65, 1])
    _draw_paths(figure.add_subplot(columns[:, 0]), data)
    _draw_losses(figure.add_subplot(columns[0, 1]), data)
    _draw_scans(figure.add_subplot(columns[1, 1]), data)
    return figure


def _draw_paths(axis: Axes, data: Data) -> None:
    contours(axis, BEALE, LEVELS)
    for run in data.runs:
        draw_path(
            axis, run.path, colour(run.name, run.gamma), label=run.label, linestyle=dash(run.name, run.gamma), width=2
        )
    mark_ends(axis, BEALE)
    axis.annotate("start", BEALE.start, (-6, -14), textcoords="offset points", ha="right")
    axis.annotate("minimum", BEALE.optimum, (4, 12), textcoords="offset points", ha="center")
    axis.set(xlabel="x", ylabel="y", title=f"Paths over {BEALE.title}, first step {FIRST_STEP} (SGDM: a tenth)")
    axis.legend(loc="lower right", fontsize=9, ncols=3, framealpha=0.95)


def _draw_losses(axis: Axes, data: Data) -> None:
    for run in data.runs:
        axis.plot(
            run.path.steps[1:],
            [max(loss, 1e-16) for loss in run.path.loss[1:]],
            color=colour(run.name, run.gamma),
            linestyle=dash(run.name, run.gamma),
            label=run.label,
        )
    axis.set(xscale="log", yscale="log", ylim=(1e-8, 1), xlabel="step", ylabel="loss", title="Loss along these paths")
    axis.grid(alpha=0.3)


def _draw_scans(axis: Axes, data: Data) -> None:
    shares = [100 * max(scan.reached) / data.starts for scan in data.scans]
    axis.barh(
        [scan.label for scan in data.scans],
        shares,
        color=[colour(run.name, run.gamma) for run in data.runs],
        height=0.7,
    )
    for k, (scan, share) in enumerate(zip(data.scans, shares, strict=True)):
        lr = scan.rates[max(range(len(scan.rates)), key=scan.reached.__getitem__)]
        axis.text(share + 1, k, f"{max(scan.reached)} (lr {number(lr)})", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set(
        xlim=(0, 135),
        xticks=range(0, 101, 25),
        xlabel="starts that lead to the minimum, %",
        title=f"{data.starts} starts over |x| ≤ 4, |y| ≤ 2, best lr of {len(data.scans[0].rates)}",
    )
    axis.spines[["top", "right"]].set_visible(False)


def table(data: Data) -> Table:
    headings = ["optimizer", "lr", "°", *(f"loss\n{t}" for t in data.marks), "end point"]
    caption = f"°: angle of the path; rates of {len(data.rates)} and starts of {data.starts} that lead to the minimum"
    drawn = plain_table(finding(data), caption, [*headings, "rates", "starts"])
    for run, scan in zip(data.runs, data.scans, strict=True):
        drawn.add_row(
            run.label,
            number(run.lr),
            f"{run.angle:.0f}",
            *map(number, run.loss_at),
            f"({run.path.x[-1]:.1f}, {run.path.y[-1]:.1f})".replace("-", "−"),
            str(len(run.rates_reaching)),
            str(max(scan.reached)),
        )
    return drawn


def remarks(data: Data) -> list[str]:
    angle = {run.label: run.angle for run in data.runs}
    best = {scan.label: max(scan.reached) for scan in data.scans}
    order = angle["γ = −0.5"] < angle["SGDM"] < angle["γ = 0.5"] < angle["Adam"] < angle["γ = 1.5"]
    reached = [run.label for run in data.runs if run.reaches]
    paper = {run.label: run.reaches for run in data.runs if run.gamma in (None, -0.5, 0.5, 1.5)}
    alone = paper["γ = −0.5"] and sum(paper.values()) == 1
    shares = ", ".join(f"{label} {count}" for label, count in best.items())
    guards = ", ".join(
        f"{run.label} ({number(run.loss_at[-1])}, {number(run.guarded_loss)})"
        for run in data.runs
        if run.guarded_loss is not None
    )
    calm = ", ".join(f"{run.label} {len(run.rates_reaching_calmly)}" for run in data.runs)
    return [
        "The paper: with γ = 1.5 Anon descends along y, with 0.5 it goes between SGDM and Adam, with −0.5 along x. "
        f"Measured angles from the x axis over the first unit of path {'agree' if order else 'do not agree'}: "
        f"{', '.join(f'{label} {value:.0f}°' for label, value in angle.items())}.",
        "The paper: γ = −0.5 alone of those it draws arrives at the optimum. "
        f"{'So it is' if alone else 'Not so'} from this start: {listed(reached)} of all drawn here reach it.",
        f"That is a property of the start. Of {data.starts} starts on a grid, each at its best learning rate and after "
        f"{data.scan_steps} steps, these lead to the minimum: {shares}.",
        f"Learning rates of {len(data.rates)} that reach it from (−1.8, 0) by descent, without a first step "
        f"longer than {JUMP} (SGDM's counted tenfold): {calm}.",
        f"With its default guards Anon's loss after {data.marks[-1]} steps is (printed, guarded): {guards}.",
    ]
