"""Adam, AMSGrad and Anon on the noisy online problem: regret, path, and what the noise has to do with it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from anon_lab import online, problems
from anon_lab.figures._drawing import colour, listed, plain_table

BETAS = ((0.5, 0.75), (0.9, 0.99))
STRENGTHS = (0.0, 1.0, 10.0, 100.0, 1000.0)
PRINTED, GUARDED = "Anon as printed", "Anon, default guards"
METHODS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": "Adam"},
    "AMSGrad": {"optimizer": "AMSGrad"},
    PRINTED: {"guard": False},
    GUARDED: {"guard": True},
}
"""Each method's arguments to `online.run`; gamma is 1, as Adam's."""
CYCLE = 101  # steps from one large gradient to the next
T_FULL, T_QUICK = 10**7, 10**5

Betas = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One run under the paper's noise."""

    method: str
    betas: Betas
    x0: float
    run: online.Run

    @property
    def x(self) -> float:
        """At the end."""
        return self.run.x[-1]

    @property
    def regret(self) -> float:
        """Per step, at the end."""
        return self.run.average_regret[-1]


@dataclass(frozen=True)
class Sweep:
    """Where one method ends from x = 0, with the noise multiplied by each strength."""

    method: str
    betas: Betas
    x: list[float]


@dataclass(frozen=True)
class Data:
    T: int
    strengths: list[float]
    curves: list[Curve]
    sweeps: list[Sweep]

    def curve(self, method: str, betas: Betas, x0: float = 0.0) -> Curve:
        return next(c for c in self.curves if (c.method, c.betas, c.x0) == (method, betas, x0))

    def sweep(self, method: str, betas: Betas) -> Sweep:
        return next(s for s in self.sweeps if (s.method, s.betas) == (method, betas))


def recorded(T: int) -> list[int]:
    """Log-spaced times at which a cycle of 101 steps is complete, all early ones, and the powers of ten.

    Within a cycle regret/t falls for a hundred steps and jumps at one, which would hide its course."""
    cycles = {t if t < CYCLE else CYCLE * round(t / CYCLE) for t in online.log_spaced(T)}
    return sorted({t for t in cycles if t <= T} | set(decades(T)) | {T})


def decades(T: int) -> list[int]:
    return [10**k for k in range(2, round(math.log10(T)) + 1)]


def compute(quick: bool, progress: Callable[[str, float], None]) -> Data:
    T = T_QUICK if quick else T_FULL
    at = recorded(T)
    pairs = [(method, betas) for betas in BETAS for method in METHODS]
    curves, sweeps = [], []
    for i, (method, betas) in enumerate(pairs):
        progress(f"{method}, betas {betas}", i / len(pairs))

        def play(x0: float = 0.0, noise: float = 1.0, method: str = method, betas: Betas = betas) -> online.Run:
            return online.run(**METHODS[method], betas=betas, x0=x0, noise=noise, T=T, at=at)

        curves += [Curve(method, betas, x0, play(x0)) for x0 in (0.0, 1.0)]
        sweeps.append(Sweep(method, betas, [play(noise=strength).x[-1] for strength in STRENGTHS]))
    progress("done", 1.0)
    return Data(T, list(STRENGTHS), curves, sweeps)


# Findings, each computed.


def _number(t: float) -> str:
    """1,234 as it is, larger ones as 1.2·10⁶."""
    if t < 10_000:
        return f"{t:,.0f}"
    mantissa, exponent = f"{t:.1e}".split("e+")
    power = "10" + f"{int(exponent)}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1.0" else f"{mantissa}·{power}"


def _signed(x: float, digits: int = 2) -> str:
    return f"{x:.{digits}f}".replace("-", "−")


def regrets(data: Data, betas: Betas) -> list[tuple[int, float, float]]:
    """(t, Anon's as printed, AMSGrad's) per step, at the ends of cycles."""
    ours, other = (data.curve(method, betas).run for method in (PRINTED, "AMSGrad"))
    pairs = zip(ours.t, ours.average_regret, other.average_regret, strict=True)
    return [(t, a, b) for t, a, b in pairs if t % CYCLE == 0]


def lower_from(data: Data, betas: Betas) -> int | None:
    """From when on Anon's regret stays below AMSGrad's up to the end; None if it is not below at the end."""
    last_above = max((t for t, a, b in regrets(data, betas) if a >= b), default=0)
    return next((t for t, _, _ in regrets(data, betas) if t > last_above), None)


def share_lower(data: Data, betas: Betas, last: int) -> float:
    """In which share of the times up to `last`, evenly spaced in log t, Anon's regret is below AMSGrad's."""
    lower = [a < b for t, a, b in regrets(data, betas) if t <= last]
    return sum(lower) / len(lower)


def _regret_title(data: Data, betas: Betas) -> str:
    since = lower_from(data, betas)
    best = min((data.curve(method, betas) for method in METHODS), key=lambda curve: curve.regret)
    if since is None:
        comparison = f"Anon's regret is not below AMSGrad's by t = {_number(data.T)}"
    else:
        comparison = f"Anon's regret stays below AMSGrad's from t = {_number(since)}"
    return f"{comparison};\nlowest at the end: {best.method} ({best.regret:.2g})"


def _where(data: Data, method: str, betas: Betas) -> str:
    curve = data.curve(method, betas)
    if curve.run.settled is not None:
        return f"{method} stays within 0.1 of −1 from t = {_number(curve.run.settled)}"
    return f"{method} is at {_signed(curve.x)} at the end"


def _path_title(data: Data, betas: Betas) -> str:
    return f"{_where(data, PRINTED, betas)};\n{_where(data, 'AMSGrad', betas)}"


def _sweep_title(data: Data, betas: Betas) -> str:
    ends = {method: dict(zip(data.strengths, data.sweep(method, betas).x, strict=True)) for method in METHODS}
    gaps = [ends["AMSGrad"][c] - ends[PRINTED][c] for c in (0.0, 1.0)]
    return f"AMSGrad is behind Anon by {_signed(gaps[0])} without noise,\nby {_signed(gaps[1])} with the paper's"


def _headline(data: Data) -> str:
    wrong = [m for m in METHODS if all(data.curve(m, betas).x > 0.9 for betas in BETAS)]
    nearest = [min(METHODS, key=lambda m: data.curve(m, betas).x) for betas in BETAS]
    if nearest[0] == nearest[1]:
        best = f"{nearest[0]} is nearest to the best x = −1"
    else:
        best = f"{nearest[0]} (β₁ = {BETAS[0][0]}) and {nearest[1]} (β₁ = {BETAS[1][0]}) are nearest to the best x = −1"
    finding = f"after {_number(data.T)} steps {best}"
    return f"{listed(wrong)} ends on the wrong side; {finding}" if wrong else finding[0].upper() + finding[1:]


def remarks(data: Data) -> list[str]:
    """The paper's claims about this problem, and what becomes of them."""
    by_betas = (_anon_remark, _regret_remark, _cause_remark)
    total = sum(problems.online_noise(t) for t in range(1, 100))
    return [
        _adam_remark(data),
        *(remark(data, betas) for remark in by_betas for betas in BETAS),
        f"Claim: the noise is unbiased. Does not hold: it is a fixed sequence whose sum is {total:.1f}; "
        f"from t = 10 on it is at most {abs(problems.online_noise(10)):.2g}.",
        *(_guard_remark(data, betas) for betas in BETAS),
    ]


def _verdict(holds: bool) -> str:
    return "Holds" if holds else "Does not hold"


def _adam_remark(data: Data) -> str:
    ends = [data.curve("Adam", betas) for betas in BETAS]
    values = "; ".join(f"x = {_signed(c.x, 3)}, regret/t = {c.regret:.3f} at betas {c.betas}" for c in ends)
    diverges = all(c.x > 0.9 and c.regret > 0.1 for c in ends)
    return f"Claim: Adam diverges. {_verdict(diverges)} by t = {_number(data.T)}: {values}."


def _anon_remark(data: Data, betas: Betas) -> str:
    anon, amsgrad = (data.curve(method, betas).run.settled for method in (PRINTED, "AMSGrad"))
    if anon is None and amsgrad is None:
        verdict = f"Not decided by t = {_number(data.T)}"
    else:
        verdict = _verdict((anon or math.inf) < (amsgrad or math.inf))
    others = ", ".join(f"{method} at {_signed(data.curve(method, betas, 1.0).x, 3)}" for method in (PRINTED, "AMSGrad"))
    return (
        f"Claim: Anon reaches −1 before AMSGrad. {verdict} at betas {betas}: {_where(data, PRINTED, betas)}, "
        f"{_where(data, 'AMSGrad', betas)}. Started from x = 1 they end with {others}."
    )


def _regret_remark(data: Data, betas: Betas) -> str:
    last = min(10**6, data.T)
    since = lower_from(data, betas)
    ends = ", ".join(f"{data.curve(method, betas).regret:.3f} ({method})" for method in (PRINTED, "AMSGrad"))
    return (
        f"Claim: regret/t of Anon and AMSGrad approaches 0. At betas {betas} it has come down to {ends} by "
        f"t = {_number(data.T)}. Anon's is the lower one at {share_lower(data, betas, last):.0%} of the times up to "
        f"{_number(last)} (log-spaced), " + (f"and from {_number(since)} on." if since else "and not at the end.")
    )


def _cause_remark(data: Data, betas: Betas) -> str:
    anon, amsgrad = (data.sweep(method, betas).x for method in (PRINTED, "AMSGrad"))
    without, usual = (amsgrad[i] - anon[i] for i in (0, 1))
    if abs(usual) < 0.02:
        verdict = f"Not decided by t = {_number(data.T)}"
    else:  # the noise is the main cause if most of the gap goes when it does
        verdict = _verdict(without < usual / 2)
    swept = zip(data.strengths, anon, amsgrad, strict=True)
    ends = ", ".join(f"{_signed(a)} against {_signed(b)} at {c:g}" for c, a, b in swept)
    return (
        f"Claim: AMSGrad is slower because of the noise. {verdict} at betas {betas}: without any noise Anon is ahead "
        f"by {_signed(without)}, with the paper's by {_signed(usual)}. Over noise strength: {ends}."
    )


def _guard_remark(data: Data, betas: Betas) -> str:
    guarded, printed = (data.curve(method, betas) for method in (GUARDED, PRINTED))
    way = "the right way" if guarded.x < 0 else "the wrong way"
    pace = "more slowly than" if guarded.x > printed.x + 0.005 else "about as fast as"
    return (
        f"With its default guards Anon goes {way} at betas {betas}, {pace} the printed algorithm: x = "
        f"{_signed(guarded.x, 3)} against {_signed(printed.x, 3)} at the end. At a large gradient the sticky clip "
        f"raises psi up to the next refresh; AMSGrad's maximum does so for ever."
    )


# The picture and the table.

GREEN = colour("Anon", 1.0)
STYLE: dict[str, dict[str, Any]] = {
    "Adam": {"color": colour("Adam", None), "linestyle": "dotted", "marker": "s"},
    "AMSGrad": {"color": colour("AMSGrad", None), "linestyle": "dashdot", "marker": "D"},
    PRINTED: {"color": GREEN, "linestyle": "solid", "marker": "o"},
    GUARDED: {"color": GREEN, "linestyle": "dashed", "marker": "^"},
}


def draw(data: Data) -> Figure:
    figure = Figure(figsize=(14, 7.6), layout="constrained")
    figure.suptitle(_headline(data), fontsize=15, fontweight="bold", wrap=True)
    grid = figure.subplots(2, 3)
    for row, betas in zip(grid, BETAS, strict=True):
        _draw_regret(row[0], data, betas)
        _draw_path(row[1], data, betas)
        _draw_sweep(row[2], data, betas)
    handles, labels = grid[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), fontsize=12, frameon=False)
    return figure


def _style(method: str) -> dict[str, Any]:
    return {key: value for key, value in STYLE[method].items() if key != "marker"}


def _draw_regret(axes: Axes, data: Data, betas: Betas) -> None:
    for method in METHODS:
        run = data.curve(method, betas).run
        whole = [(t, y) for t, y in zip(run.t, run.average_regret, strict=True) if t % CYCLE == 0]
        axes.plot(*zip(*whole, strict=True), lw=2.2, **_style(method))
    axes.set(xscale="log", yscale="log", xlim=(CYCLE, data.T), ylim=(0.015, 3))
    axes.set_xlabel("step t")
    axes.set_ylabel(f"β = {betas}\nregret / t", fontsize=11)
    _finish(axes, _regret_title(data, betas))


def _draw_path(axes: Axes, data: Data, betas: Betas) -> None:
    axes.axhline(-1, color="0.75", lw=1)
    axes.annotate("best x", (1.5, -1), xytext=(0, 4), textcoords="offset points", color="0.4")
    for method in METHODS:
        run = data.curve(method, betas).run
        axes.plot(run.t, run.x, lw=2.2, label=method, **_style(method))
    axes.set(xscale="log", xlim=(1, data.T), ylim=(-1.08, 1.08))
    axes.set_xlabel("step t")
    axes.set_ylabel("x after step t")
    _finish(axes, _path_title(data, betas))


def _draw_sweep(axes: Axes, data: Data, betas: Betas) -> None:
    places = range(len(data.strengths))
    for method in METHODS:
        axes.plot(places, data.sweep(method, betas).x, lw=1.5, ms=7, **STYLE[method])
    axes.set_xticks(places, [f"{c:g}" + " (paper)" * (c == 1) for c in data.strengths])
    axes.set(ylim=(-1.08, 1.08))
    axes.set_xlabel("noise strength c: gradient + c N(t)")
    axes.set_ylabel(f"x after {_number(data.T)} steps")
    _finish(axes, _sweep_title(data, betas))


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def table(data: Data) -> Table:
    """x from both starts, and regret/t, at every decade."""
    drawn = plain_table(
        _headline(data), "regret/t: of the run from 0; the paper's noise", ("step", *map(_number, decades(data.T)))
    )
    for betas in BETAS:
        for what, x0 in (("x from 0", 0.0), ("x from 1", 1.0), ("regret/t", 0.0)):
            drawn.add_row(f"β = {betas}, {what}", style="bold")
            for method in METHODS:
                run = data.curve(method, betas, x0).run
                values, digits = (run.average_regret, 3) if what == "regret/t" else (run.x, 2)
                cells = [_signed(values[run.t.index(t)], digits) for t in decades(data.T)]
                drawn.add_row(f"  {method}", *cells, end_section=method == GUARDED)
    return drawn
