"""Incremental delay update under other optimizers' statistics: Adam, AdaBelief and AdaMomentum with it and without.

What an optimizer averages to scale its steps, and when it looks at that average, are separate choices. Every row of
the picture keeps the first (g², (g − m)², m²) and changes the second: at every step, or at growing intervals (IDU).
Adam with IDU is Anon at gamma = 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from anon_lab import demo, online, optimizers
from anon_lab.baselines._base import Baseline, Group, zeros
from anon_lab.figures._drawing import colour, listed, number, plain_table
from anon_lab.problems import ROSENBROCK
from anon_lab.trajectories import Contender, Search, search
from anon_optim import Anon

EVERY_STEP, PRINTED, GUARDED = "every step", "IDU as printed", "IDU, default guards"
FORMS = (EVERY_STEP, PRINTED, GUARDED)
NAMES = {"gradient": "Adam", "belief": "AdaBelief", "momentum": "AdaMomentum"}
"""Each statistic's optimizer without IDU."""
FORMULAS = {"gradient": "g²", "belief": "(g − m)²", "momentum": "m²"}
BETAS = ((0.5, 0.75), (0.9, 0.99))
"""Of the online problem, as in the figure `noise`; elsewhere they are (0.9, 0.999)."""
RATES = tuple(10 ** (k / 6) for k in range(-24, 10))
"""Learning rates on Rosenbrock's function, the same for all."""
FOUND = 1e-12
"""A loss at which Rosenbrock's minimum, 0, counts as found; what lies below is rounding."""


def momentum_squared(grad: Tensor, exp_avg: Tensor) -> Tensor:
    """A user's own statistic, as `Anon(statistic=...)` takes it."""
    return exp_avg * exp_avg


class AdaMomentum(Baseline):
    """Adam that scales by its momentum instead of the gradient (Wang et al., 2021, arXiv:2106.11514), but for eps:

    m <- beta1 m + (1 - beta1) g
    s <- beta2 s + (1 - beta2) m^2
    theta <- theta - lr m / (1 - beta1^t) / (sqrt(s / (1 - beta2^t)) + eps)
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _update(self, group: Group) -> None:
        beta1, beta2 = group["betas"]
        for p, grad, state in self._gradients(group):
            m, s = zeros(state, p, "exp_avg", "exp_avg_sq")
            t = state["step"]
            m.lerp_(grad, 1 - beta1)
            s.mul_(beta2).addcmul_(m, m, value=1 - beta2)
            psi = (s / (1 - beta2**t)).sqrt_().add_(group["eps"])
            p.addcdiv_(m, psi, value=-group["lr"] / (1 - beta1**t))


@dataclass(frozen=True)
class Method(Contender):
    """A statistic and when it is looked at."""

    statistic: str = "gradient"
    form: str = EVERY_STEP

    def build(self, params: list[Tensor], lr: float = 1.0) -> Optimizer:
        if self.form == EVERY_STEP:
            if self.statistic == "momentum":
                return AdaMomentum(params, lr=lr)
            return optimizers.make(self.name, params, lr=lr, weight_decay=0.0)
        statistic = momentum_squared if self.statistic == "momentum" else self.statistic
        return (Anon if self.guarded else Anon.paper)(params, lr=lr, gamma=1.0, statistic=statistic)

    def play(self, betas: tuple[float, float], T: int) -> online.Run:
        if self.form == EVERY_STEP:
            return online.run(self.name, betas=betas, T=T)
        return online.run("Anon", betas=betas, T=T, statistic=self.statistic, guard=self.guarded)


def methods() -> list[Method]:
    return [
        Method(name if form == EVERY_STEP else f"{name} + {form}", None, form == GUARDED, statistic, form)
        for statistic, name in NAMES.items()
        for form in FORMS
    ]


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    T: int
    """Steps of the online problem."""
    steps: int
    """Steps on Rosenbrock's function."""
    rates: tuple[float, ...]
    digits: demo.Plan


# One grid of learning rates for all on the digits: a half-decade apart, from 1e-4 to 1e-1.
FULL = Plan(10**7, 2000, RATES, demo.Plan(rates=tuple(10 ** (k / 2) for k in range(-4, 3)), tuning_seeds=3))
QUICK = Plan(10**5, 100, RATES[::6], demo.Plan(epochs=2, rates=(0.1, 1.0), tuning_seeds=1, seeds=3))


@dataclass(frozen=True)
class Result:
    """What one method did everywhere."""

    name: str
    statistic: str
    form: str
    online: list[online.Run]
    """[betas]"""
    rosenbrock: Search
    digits: demo.Outcome

    @property
    def x(self) -> list[float]:
        """At the end of the online problem [betas]."""
        return [run.x[-1] for run in self.online]

    @property
    def loss(self) -> float:
        """At the end on Rosenbrock's function, at the best learning rate."""
        return self.rosenbrock.loss[self.rosenbrock.best]

    @property
    def found(self) -> int | None:
        """The first step recorded at which Rosenbrock's minimum was found."""
        path = self.rosenbrock.path
        return next((t for t, loss in zip(path.steps, path.loss, strict=True) if loss < FOUND), None)


@dataclass(frozen=True)
class Data:
    plan: Plan
    results: list[Result]

    def row(self, statistic: str) -> dict[str, Result]:
        """One statistic's results by form."""
        return {result.form: result for result in self.results if result.statistic == statistic}


def compute(quick: bool, progress: Callable[[str, float], None]) -> Data:
    plan = QUICK if quick else FULL
    todo = methods()
    results = []
    with demo.one_thread():
        for i, method in enumerate(todo):
            results.append(_result(method, plan, lambda text, share, i=i: progress(text, (i + share) / len(todo))))
    progress("done", 1.0)
    return Data(plan, results)


def _result(method: Method, plan: Plan, progress: Callable[[str, float], None]) -> Result:
    progress(f"{method.name}: online problem", 0.0)
    played = [method.play(betas, plan.T) for betas in BETAS]
    progress(f"{method.name}: Rosenbrock", 0.1)
    searched = search(ROSENBROCK, method, plan.steps, plan.rates)
    epochs = plan.digits.epochs * (len(plan.digits.rates) * plan.digits.tuning_seeds + plan.digits.seeds)
    done = 0

    def report(_: str, loss: float) -> None:
        nonlocal done
        done += 1
        progress(f"{method.name}: digits", 0.4 + 0.6 * done / epochs)

    entrant = demo.Entrant(method.name, None, 0.01, lambda params, lr: method.build(list[Tensor](params), lr))
    trained = demo.outcome_of(entrant, plan.digits, report)
    return Result(method.name, method.statistic, method.form, played, searched, trained)


# Findings, each computed.


def _signed(x: float, digits: int = 2) -> str:
    return f"{x:.{digits}f}".replace("-", "−")


def turned(data: Data, form: str, betas: int) -> list[str]:
    """The optimizers that end on the wrong side of the online problem, and with IDU in this form on the right one."""
    rows = (data.row(statistic) for statistic in NAMES)
    return [row[EVERY_STEP].name for row in rows if row[EVERY_STEP].x[betas] > 0 > row[form].x[betas]]


def against_every_step(data: Data, form: str) -> dict[str, list[str]]:
    """On the digits, by the 95 % interval of the mean difference over seeds: verdict -> the statistics' optimizers."""
    verdicts: dict[str, list[str]] = {}
    for statistic, name in NAMES.items():
        row = data.row(statistic)
        verdicts.setdefault(demo.compare(row[form].digits, row[EVERY_STEP].digits), []).append(name)
    return verdicts


def _digits_words(data: Data, form: str) -> str:
    return ", ".join(f"{verdict} {listed(names)}" for verdict, names in against_every_step(data, form).items())


def _headline(data: Data) -> str:
    helped = min(len(turned(data, form, b)) for form in (PRINTED, GUARDED) for b in range(len(BETAS)))
    return (
        f"IDU brings {helped} of {len(NAMES)} diverging optimizers to the right side of the online problem;\n"
        f"on the digits, with guards, it is {_digits_words(data, GUARDED)}"
    )


def _rosenbrock_words(row: dict[str, Result]) -> str:
    """Who found the minimum and when, at the best learning rate of the same search; who did not, and what is left."""
    return "; ".join(
        f"{result.name} at about step {result.found}"
        if result.found
        else f"{result.name} not, loss {number(result.loss)}"
        for result in _by_speed(row)
    )


def _by_speed(row: dict[str, Result]) -> list[Result]:
    return sorted(row.values(), key=lambda result: (result.found or math.inf, result.loss))


def remarks(data: Data) -> list[str]:
    """The paper writes IDU for any preconditioner and tries it on Anon's own; here it is tried on three."""
    said = []
    for form in (PRINTED, GUARDED):
        for b, betas in enumerate(BETAS):
            names = turned(data, form, b)
            ends = "; ".join(f"{row[EVERY_STEP].name} {_signed(row[EVERY_STEP].x[b])} → {_signed(row[form].x[b])}"
                             for row in map(data.row, NAMES))  # fmt: skip
            said.append(
                f"Claim: IDU makes methods converge where they would not. Online problem, betas {betas}, {form}: it "
                f"brings {len(names)} of {len(NAMES)} from the wrong side to the right one (x at the end: {ends})."
            )
    for statistic, formula in FORMULAS.items():
        found = _rosenbrock_words(data.row(statistic))
        said.append(f"Rosenbrock's minimum (loss < {number(FOUND)}) with {formula}, found by: {found}.")
    said += [f"Digits: {form} is {_digits_words(data, form)} (test accuracy)." for form in (PRINTED, GUARDED)]
    edges = [result.name for result in data.results if result.digits.at_edge]
    if edges:
        said.append(f"On the digits the best learning rate was the smallest or largest tried for {listed(edges)}.")
    return said


# The picture and the table.

GREEN = colour("Anon", 1.0)
DASHED = {EVERY_STEP: ":", PRINTED: "-", GUARDED: "--"}


def _style(result: Result) -> dict[str, Any]:
    hue = colour(result.name, None) if result.form == EVERY_STEP else GREEN
    return {"color": hue, "linestyle": DASHED[result.form], "lw": 2.2}


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(15, 11), layout="constrained")
    figure.suptitle(_headline(data), fontsize=14, fontweight="bold", wrap=True)
    for axes, statistic in zip(figure.subplots(len(NAMES), 3), NAMES, strict=True):
        row = data.row(statistic)
        _draw_online(axes[0], row)
        _draw_rosenbrock(axes[1], row)
        _draw_digits(axes[2], row)
        axes[0].set_ylabel(f"ψ² from {FORMULAS[statistic]}\n\nx after step t")
    return figure


def _draw_online(axes: Axes, row: dict[str, Result]) -> None:
    axes.axhline(-1, color="0.75", lw=1)
    axes.annotate("best x", (1.5, -1), xytext=(0, 4), textcoords="offset points", color="0.4")
    for form, result in row.items():
        run = result.online[0]
        label = result.name if form == EVERY_STEP else f"with {form}"
        axes.plot(run.t, run.x, label=label, **_style(result))
    axes.legend(loc="center right", frameon=False, bbox_to_anchor=(1, 0.74))  # between the two ends of the box
    axes.set(
        xscale="log",
        xlim=(1, row[EVERY_STEP].online[0].t[-1]),
        ylim=(-1.08, 1.08),
        xlabel=f"step t (online problem, β = {BETAS[0]})",
    )
    ends = [_signed(row[form].x[0]) for form in FORMS]
    _finish(axes, f"{row[EVERY_STEP].name} ends at x = {ends[0]};\nwith IDU at {ends[1]}, guarded at {ends[2]}")


def _draw_rosenbrock(axes: Axes, row: dict[str, Result]) -> None:
    for result in row.values():
        path = result.rosenbrock.path
        lowest = list(accumulate(path.loss, min))  # losses swing by decades, which hides their course
        axes.plot(path.steps, lowest, **_style(result))
    axes.set(yscale="log", xlabel="step (Rosenbrock's function)", ylabel="lowest loss so far")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], FOUND))
    found = sum(result.found is not None for result in row.values())
    first = _by_speed(row)[0]
    ahead = f"first, at step {first.found}" if first.found else "nearest"
    _finish(axes, f"{found} of {len(row)} find the minimum (loss < {number(FOUND)});\n{ahead}: {first.name}")


def _draw_digits(axes: Axes, row: dict[str, Result]) -> None:
    for result in row.values():
        losses, style = result.digits.loss, _style(result)
        epochs = range(len(losses[0]))
        by_epoch = [[seed[epoch] for seed in losses] for epoch in epochs]
        axes.plot(epochs, [mean(values) for values in by_epoch], **style)
        lowest, highest = list(map(min, by_epoch)), list(map(max, by_epoch))
        axes.fill_between(epochs, lowest, highest, color=style["color"], alpha=0.15, lw=0)
    axes.set(yscale="log", xlabel="epoch (digits; bands: all seeds)", ylabel="training loss (nats)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 20))  # what diverges may leave the picture
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    every, with_idu, guarded = (_percent(row[form]) for form in FORMS)
    verdict = demo.compare(row[GUARDED].digits, row[EVERY_STEP].digits)
    _finish(
        axes,
        f"Test accuracy: {row[EVERY_STEP].name} {every} %,\n"
        f"IDU {with_idu} %, guarded {guarded} % ({verdict.split()[0]})",
    )


def _percent(result: Result) -> str:
    test = [100 * accuracy for accuracy in result.digits.test]
    return f"{mean(test):.1f} ± {stdev(test):.1f}"


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def table(data: Data) -> Table:
    caption = (
        f"x: at the end of the online problem, for β = {' and '.join(map(str, BETAS))}; Rosenbrock: lr → loss after "
        f"{data.plan.steps} steps; digits: lr → test accuracy ± sd over {data.plan.digits.seeds} fresh seeds{demo.EDGE}"
    )
    headings = ("ψ² from", *(f"x, β₁\n{betas[0]}" for betas in BETAS), "Rosenbrock", "digits, %")
    drawn = plain_table(_headline(data).replace("\n", " "), caption, headings)
    for result in data.results:
        first = result.form == EVERY_STEP
        drawn.add_row(
            f"{FORMULAS[result.statistic]}: {result.name}" if first else f"  {result.form}",
            *map(_signed, result.x),
            f"{number(result.rosenbrock.lr)}{'*' * result.rosenbrock.at_edge} → {number(result.loss)}",
            f"{number(result.digits.lr)}{'*' * result.digits.at_edge} → {_percent(result)}",
            end_section=result.form == GUARDED,
        )
    return drawn
