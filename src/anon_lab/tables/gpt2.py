"""GPT-2: validation loss and time of Anon, AdamW, Sophia-G, Lion and Muon; the main table and the appendix's in one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from anon_lab.tables import _words
from anon_lab.tables._spec import Outcome, Row, Sheet, Size, Table
from anon_lab.tables._words import NONE, as_list, by_lr, judged, over_seeds

SIZES = {
    "full": Size(
        runs="gpt2",
        task="gpt",
        says="GPT2-small and -medium, 100,000 steps of 480 x 1,024 tokens of the given text (the paper's is "
        "OpenWebText: --data hf:openwebtext).",
        options={"model": "small"},
        evaluations=100,
        graph=False,
    ),
    "small": Size(
        runs="gpt2",
        task="gpt",
        says="A GPT of 6 layers and width 512 (23 M parameters, 8,192 tokens) in the place of GPT2-small, 750 steps "
        "of 64 x 512 tokens of the given text; every optimizer at two learning rates, the better one shown.",
        options={"model": "20m"},
        recipe={"steps": 750},
        seeds=1,
    ),
    "tiny": Size(
        runs="gpt2",
        task="gpt",
        says="A GPT of 2 layers and width 32 on bytes, 4 steps of 4 x 32 tokens.",
        options={"model": "tiny", "block": 32},
        recipe={"steps": 4, "batch_size": 4},
        seeds=1,
        evaluations=1,
    ),
}
HOURS = {
    "Anon γ 1.1": 26.17554,
    "AdamW": 26.88118,
    "Sophia-G": 28.98702,
    "medium: Anon γ 1": 36.91487,
    "medium: AdamW": 36.83633,
    "medium: Sophia-G": 41.02486,
}


@dataclass(frozen=True)
class Rates:
    """Learning rates of a size, and its tokens a step, which Sophia-G needs."""

    anon: tuple[float, ...]
    adamw: tuple[float, ...]
    sophia: tuple[float, ...]
    lion: tuple[float, ...]
    muon: tuple[float, ...]
    tokens: int


# Full: AdamW's and Sophia-G's are Sophia's code's, and Anon's is AdamW's, as the paper says; it does not say Lion's and
# Muon's. Small: around the best of short trials.
RATES = {
    "full": Rates((6e-4,), (6e-4,), (6e-4,), (1e-4,), (0.02,), 480 * 1024),
    "small": Rates((5e-4, 1e-3), (1e-3, 2e-3), (6e-4, 1.2e-3), (2e-4, 4e-4), (0.01, 0.02), 64 * 512),
    "tiny": Rates((1e-3,), (1e-3, 2e-3), (6e-4,), (1e-4,), (0.02,), 4 * 32),
}
ADAMW = {"betas": (0.9, 0.95)}


def rows(size: str) -> list[Row]:
    rates = RATES[size]
    sophia = {"weight_decay": 0.2, "rho": 0.05, "batch_size": rates.tokens}
    # Adam of the appendix is AdamW: there, too, decay is decoupled.
    small = [
        Row("Anon γ 1", lrs=rates.anon, hyper={"gamma": 1.0}, printed=(2.937,)),
        Row("Anon γ 1.1", lrs=rates.anon, hyper={"gamma": 1.1}, printed=(2.93283, 2.927)),
        Row("Anon γ 1.15", lrs=rates.anon, hyper={"gamma": 1.15}, printed=(2.932,)),
        Row("AdamW", "AdamW", rates.adamw, ADAMW, printed=(2.95614, 2.934)),
        Row("Sophia-G", "Sophia-G", rates.sophia, sophia, printed=(2.95143,)),
        Row("Lion", "Lion", rates.lion, {"weight_decay": 1.0}, printed=(2.992,)),
        Row("Muon", "Muon", rates.muon, {"weight_decay": 0.01}, printed=(3.092,)),
    ]
    return [*small, *_medium(size, sophia)]


def _medium(size: str, sophia: dict[str, Any]) -> list[Row]:
    """Trained as a network of its own at full size; elsewhere only printed."""
    lrs = (7e-4,) if size == "full" else ()
    options = {"model": "medium"} if size == "full" else {}
    return [
        Row("medium: Anon γ 1", "Anon", lrs, {"gamma": 1.0}, options=options, printed=(2.69017,)),
        Row("medium: AdamW", "AdamW", lrs, ADAMW, options=options, printed=(2.70994,)),
        Row("medium: Sophia-G", "Sophia-G", lrs, {**sophia, "rho": 0.08}, options=options, printed=(2.70653,)),
    ]


def _part(outcome: Outcome, medium: bool) -> Outcome:
    """The rows of one network: losses of different networks do not compare."""
    return replace(outcome, rows=[row for row in outcome.rows if row.name.startswith("medium") == medium])


def _seconds(outcome: Outcome, name: str) -> float | None:
    """Of a step; None where others trained beside it."""
    trial = outcome.best(name)
    if trial is None or outcome.together > 1:
        return None
    return mean(result["seconds_a_step"] for result in trial.results)


def _time(outcome: Outcome, row: Row) -> str:
    base = "medium: AdamW" if row.name.startswith("medium") else "AdamW"
    ours, other = _seconds(outcome, row.name), _seconds(outcome, base)
    return NONE if ours is None or other is None else f"{1000 * ours:.3g} ms, {ours / other:.3f}"


def _hours(row: Row) -> str:
    base = "medium: AdamW" if row.name.startswith("medium") else "AdamW"
    return f"{HOURS[row.name]:.2f} h, {HOURS[row.name] / HOURS[base]:.3f}" if row.name in HOURS else NONE


def sheets(outcome: Outcome) -> list[Sheet]:
    more = {"a step, / AdamW's": lambda row: _time(outcome, row), "paper's time, / AdamW's": _hours}
    title = over_seeds("validation loss in nats per token", outcome)
    parts = [as_list(f"{title} ({name})", _part(outcome, medium), more) for name, medium in _networks(outcome)]
    return [*parts, *by_lr("every learning rate", outcome)]


def _networks(outcome: Outcome) -> Sequence[tuple[str, bool]]:
    return (("GPT2-small" if outcome.size == "full" else "one network", False), ("GPT2-medium", True))


def headline(outcome: Outcome) -> str:
    return _words.headline(_part(outcome, medium=False))


def remarks(outcome: Outcome) -> list[str]:
    said = [judged(outcome, "Anon γ 1.1", name) for name in ("AdamW", "Sophia-G", "Lion", "Muon", "Anon γ 1")]
    said.append(
        judged(outcome, "Anon γ 1", "AdamW")
        + " The paper credits IDU with an improvement at γ 1; for this network its appendix shows none."
    )
    if outcome.size == "full":
        said += [judged(outcome, "medium: Anon γ 1", f"medium: {name}") for name in ("AdamW", "Sophia-G")]
    ours, other = _seconds(outcome, "Anon γ 1.1"), _seconds(outcome, "AdamW")
    paper = f"The paper's Anon takes {HOURS['Anon γ 1.1'] / HOURS['AdamW']:.3f} of AdamW's time"
    if ours is None or other is None:
        said.append(f"{paper}; here runs trained beside each other, so that none can be timed.")
    else:
        said.append(f"{paper}; here {ours / other:.3f}, the network's part included.")
    if any(result.get("graph") for trial in outcome.trials for result in trial.results):
        said.append("Sophia-G, Lion and Muon step outside of the CUDA graph here, so that their times do not compare.")
    said.append(
        "The paper's two numbers for Anon γ 1.1 and AdamW are its main table's and its appendix's, which disagree."
    )
    return said


TABLE = Table("GPT-2", SIZES, rows, sheets, remarks, headline=headline)
