"""How accuracy depends on IDU's two numbers, beta3 and the growth of the refresh times (ResNet-20 on CIFAR-10)."""

from itertools import product
from statistics import mean

from anon_lab.significance import verdict
from anon_lab.tables._spec import Heat, Outcome, Row, Sheet, Size, Table
from anon_lab.tables._words import judged, measured, over_seeds, printed

BETA3 = (0.1, 0.3, 0.5, 0.7, 0.9)
PRINTED = {
    2: (91.76, 91.98, 92.42, 92.43, 92.16),
    3: (92.26, 92.23, 92.28, 92.34, 92.38),
    4: (91.97, 92.44, 92.25, 92.12, 92.31),
}
DEFAULT = "growth 2, β3 0.5"
PRAISED = "growth 4, β3 0.3"

# The paper gives neither gamma nor lr of this table: these are its ResNets', with SGD's usual decay.
HYPER = {"gamma": -0.1, "decoupled_weight_decay": False}
SIZES = {
    "full": Size(
        runs="ablation",
        task="cifar10",
        says="ResNet-20 on CIFAR-10, 200 epochs, batches of 128, cosine; lr 1, γ −0.1, coupled decay 5e-4, all of them "
        "our choice, since the paper gives none.",
        together=15,
        evaluations=20,
    ),
    "small": Size(
        runs="ablation",
        task="cifar10",
        says="ResNet-20 on CIFAR-10, 15 epochs, batches of 128, cosine; lr 1, γ −0.1, coupled decay 5e-4, all of them "
        "our choice, since the paper gives none.",
        recipe={"epochs": 15, "warmup": 1 / 15},
        together=15,
    ),
    "tiny": Size(
        runs="ablation",
        task="digits",
        says="A small MLP on digits in the place of ResNet-20, 20 steps.",
        recipe={"steps": 20},
        seeds=2,
        evaluations=1,
    ),
}


def _name(growth: int, beta3: float) -> str:
    return f"growth {growth}, β3 {beta3:g}"


def rows(size: str) -> list[Row]:
    return [
        Row(
            _name(growth, beta3),
            lrs=(1.0,),
            hyper={**HYPER, "growth": growth, "beta3": beta3},
            printed=(PRINTED[growth][place],),
        )
        for growth, (place, beta3) in product(PRINTED, enumerate(BETA3))
    ]


def sheets(outcome: Outcome) -> list[Sheet]:
    by_name = {row.name: row for row in outcome.rows}
    lines = [["a_n", *(f"β3 = {beta3:g}" for beta3 in BETA3)]]
    for growth in PRINTED:
        names = [_name(growth, beta3) for beta3 in BETA3]
        lines.append([f"{growth}^(n-1)", *(measured(outcome.best(name)) for name in names)])
        lines.append(["  paper", *(printed(by_name[name]) for name in names)])
    return [Sheet(over_seeds("accuracy in %", outcome), lines)]


def heats(outcome: Outcome) -> list[Heat]:
    found = [[outcome.best(_name(growth, beta3)) for beta3 in BETA3] for growth in PRINTED]
    values = [[mean(trial.values) if trial else float("nan") for trial in line] for line in found]
    words = [
        [f"{measured(trial)}\npaper {PRINTED[growth][place]:g}" for place, trial in enumerate(line)]
        for growth, line in zip(PRINTED, found, strict=True)
    ]
    return [
        Heat(
            "accuracy",
            "refresh times",
            "weight of the old ψ² at a refresh, β3",
            [f"{growth}ⁿ⁻¹" for growth in PRINTED],
            [f"{beta3:g}" for beta3 in BETA3],
            values,
            words,
            "accuracy in %",
        )
    ]


def headline(outcome: Outcome) -> str:
    done = [trial for row in outcome.rows if (trial := outcome.best(row.name))]
    if not done:
        return "Everything diverged"
    middles = [mean(trial.values) for trial in done]
    default = outcome.best(DEFAULT)
    return (
        f"Over β3 and the growth of the refresh times, accuracy lies between {min(middles):.2f} and "
        f"{max(middles):.2f} %; the default's is {measured(default)}"
    )


def remarks(outcome: Outcome) -> list[str]:
    numbers = [value for line in PRINTED.values() for value in line]
    done = [mean(trial.values) for row in outcome.rows if (trial := outcome.best(row.name))]
    gap = f"{max(done) - min(done):.2f}" if done else "no"
    lost = len(outcome.rows) - len(done)
    return [
        f"The paper calls IDU robust to both numbers: its 15 settings lie within {max(numbers) - min(numbers):.2f} "
        f"points. Here they lie within {gap} points{f', and {lost} diverged' if lost else ''}.{_ties(outcome)}",
        judged(outcome, PRAISED, DEFAULT),
    ]


def _ties(outcome: Outcome) -> str:
    default = outcome.best(DEFAULT)
    if default is None or len(default.values) < 2:
        return ""
    others = [trial for row in outcome.rows if row.name != DEFAULT and (trial := outcome.best(row.name))]
    found = [verdict(trial.values, default.values, outcome.metric) for trial in others]
    return (
        f" Of the 14 other settings {found.count('tie')} tie with the default, {found.count('better')} are better and "
        f"{found.count('worse')} worse."
    )


TABLE = Table("IDU's beta3 and refresh times", SIZES, rows, sheets, remarks, heats, headline)
