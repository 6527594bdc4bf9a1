"""How accuracy depends on lr and gamma (ResNet-20 on CIFAR-10); the paper's figure prints no numbers."""

from dataclasses import replace
from statistics import mean

from anon_lab.tables import ablation
from anon_lab.tables._spec import Heat, Outcome, Row, Sheet, Size, Table
from anon_lab.tables._words import measured, over_seeds

GAMMAS = (-0.3, -0.1, 0.0, 0.1, 0.3)
LRS = (0.1, 0.3, 1.0, 3.0, 10.0)
SGDM = "SGDM, lr a tenth"
"""SGDM's lr for the same step is a tenth of Anon's, since it sums gradients where Anon averages them."""
NEAR = 1.0
"""Points below the best within which a setting still counts as good."""

SIZES: dict[str, Size] = {
    "full": replace(
        ablation.SIZES["full"],
        runs="sensitivity",
        says="ResNet-20 on CIFAR-10, 200 epochs, batches of 128, cosine, coupled decay 5e-4. The paper's figure gives "
        "neither numbers nor network; the grid is ours.",
    ),
    "small": replace(
        ablation.SIZES["small"],
        runs="sensitivity",
        says="ResNet-20 on CIFAR-10, 10 epochs, batches of 128, cosine, coupled decay 5e-4. The paper's figure gives "
        "neither numbers nor network; the grid is ours.",
        recipe={"epochs": 10, "warmup": 1 / 10},
    ),
    "tiny": replace(ablation.SIZES["tiny"], runs="sensitivity"),
}


def _name(gamma: float) -> str:
    return f"γ {gamma:g}".replace("-", "−")


def rows(size: str) -> list[Row]:
    anon = [Row(_name(gamma), lrs=LRS, hyper={"gamma": gamma, "decoupled_weight_decay": False}) for gamma in GAMMAS]
    return [*anon, Row(SGDM, "SGDM", tuple(lr / 10 for lr in LRS))]


def sheets(outcome: Outcome) -> list[Sheet]:
    lines = [["", *(f"lr {lr:g}" for lr in LRS)]]
    lines += [[row.name, *(measured(trial) for trial in outcome.of(row.name))] for row in outcome.rows]
    return [Sheet(over_seeds("accuracy in %", outcome), lines)]


def heats(outcome: Outcome) -> list[Heat]:
    found = [outcome.of(row.name) for row in outcome.rows]
    return [
        Heat(
            "accuracy",
            "",
            "learning rate",
            [row.name for row in outcome.rows],
            [f"{lr:g}" for lr in LRS],
            [[mean(trial.values) if trial.values else float("nan") for trial in line] for line in found],
            [[measured(trial) for trial in line] for line in found],
            "accuracy in %",
        )
    ]


def _good(outcome: Outcome) -> dict[str, int]:
    """Of each row, how many learning rates end near the best of all."""
    done = [mean(trial.values) for trial in outcome.trials if trial.values]
    bar = max(done, default=0.0) - NEAR
    return {
        row.name: sum(bool(trial.values) and mean(trial.values) >= bar for trial in outcome.of(row.name))
        for row in outcome.rows
    }


def headline(outcome: Outcome) -> str:
    good = _good(outcome)
    anon = sum(good[_name(gamma)] for gamma in GAMMAS)
    return f"{anon} of {len(LRS) * len(GAMMAS)} settings of lr and γ end within {NEAR:g} point of the best"


def remarks(outcome: Outcome) -> list[str]:
    good = _good(outcome)
    most = max((_name(gamma) for gamma in GAMMAS), key=lambda name: good[name])
    return [
        f"The paper says that accuracy stays high over a broad range of lr and γ. Of {len(LRS)} learning rates each, "
        f"those that end within {NEAR:g} point of the best setting are "
        + ", ".join(f"{good[_name(gamma)]} at {_name(gamma)}" for gamma in GAMMAS)
        + f", and {good[SGDM]} for SGDM.",
        f"The broadest range, {good[most]} of {len(LRS)}, is that of {most}: "
        + ("broader than SGDM's." if good[most] > good[SGDM] else "no broader than SGDM's."),
    ]


TABLE = Table("lr and gamma", SIZES, rows, sheets, remarks, heats, headline)
