"""ResNet-20 on CIFAR-10: Anon from gamma -0.1 to 1 against SGDM and AdamW, and how much beta3 and growth matter."""

from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

from anon_lab.studies._results import Results, report, search, tuned, value
from anon_lab.studies._spec import (
    ACCURACY,
    FIRST_SEED,
    Contender,
    Ground,
    Job,
    Stage,
    Study,
    anon_defaults,
)
from anon_lab.tables._spec import Heat
from anon_lab.tables._words import spread
from anon_lab.tasks import Recipe
from anon_lab.tasks.cifar10 import RECIPES

SECONDS = 0.8e-3
SEEDS = 3
BETA3 = (0.1, 0.3, 0.5, 0.9)
GROWTH = (1.25, 2.0, 3.0, 4.0)
ABLATED = ("Anon γ -0.1", "Anon γ 1")
DEFAULT = "β3 0.5, growth 2"
BETAS = ("betas", ((0.9, 0.99), (0.9, 0.95)))


def contenders() -> list[Contender]:
    """Each with 7 trials."""
    # SGD's recipe translated for low gamma (coupled decay), AdamW's for gamma 1.
    coupled = ("weight_decay", (2e-4, 1e-3))
    decoupled = ("weight_decay", (0.03, 0.3))
    defaults = anon_defaults()

    def anon(gamma: float, lrs: tuple[float, ...], decay: tuple[str, tuple[float, ...]], **fixed: Any) -> Contender:
        # At gamma 0 psi is 1 whatever beta2 is, and there are two more learning rates instead.
        axes = (("lr", lrs), BETAS, decay) if gamma else (("lr", lrs), decay)
        return Contender(f"Anon γ {gamma:g}", "Anon", axes, {**defaults, "gamma": gamma, **fixed})

    return [
        Contender("SGDM", "SGDM", (("lr", (0.025, 0.05, 0.1, 0.2, 0.4)), coupled)),
        Contender("AdamW", "AdamW", (("lr", (4e-3, 8e-3, 1.6e-2)), BETAS, decoupled), {"weight_decay": 0.1}),
        anon(-0.1, (2.0, 4.0, 8.0), coupled, decoupled_weight_decay=False),
        anon(0.0, (0.5, 1.0, 2.0, 4.0, 8.0), coupled, decoupled_weight_decay=False),
        anon(0.5, (0.05, 0.1, 0.2), coupled, decoupled_weight_decay=False),
        anon(1.0, (4e-3, 8e-3, 1.6e-2), decoupled, weight_decay=0.1),
    ]


def grounds(tiny: bool) -> tuple[Ground, Ground]:
    """A short and the whole recipe; the long one in groups of one seed, which take less than ten minutes."""
    if tiny:
        recipe = Recipe(batch_size=100, steps=6)
        short = Ground("30 epochs", "digits", recipe, ACCURACY, SECONDS, evaluations=2)
        return short, replace(short, name="200 epochs", recipe=recipe.changed(steps=9), tuned_on=short)
    recipe = RECIPES["resnet20"]
    brief = recipe.changed(epochs=30, warmup=1 / 30)
    short = Ground("30 epochs", "cifar10", brief, ACCURACY, SECONDS, together=20, compile=True)
    return short, replace(short, name="200 epochs", recipe=recipe, together=6, evaluations=20, tuned_on=short)


def ablation(short: Ground) -> list[Stage]:
    """beta3 x growth at gamma -0.1 and at 1, from one seed first; 16 fill a GPU."""
    named = {each.label: each for each in contenders()}

    def jobs(results: Results, label: str, seed: int) -> list[Job]:
        values = tuned(named[label], short, results)
        if values is None:
            return []
        return [
            Job(_cell(beta3, growth), _ablated(short, label), "Anon", changed, seed, report=True)
            for beta3, growth in product(BETA3, GROWTH)
            for changed in [{**values, "beta3": beta3, "growth": growth}]
        ]

    return [
        Stage(f"ablation, {label}, seed {seed}", lambda results, label=label, seed=seed: jobs(results, label, seed))
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)
        for label in ABLATED
    ]


def _cell(beta3: float, growth: float) -> str:
    return f"β3 {beta3:g}, growth {growth:g}"


def _ablated(short: Ground, label: str) -> Ground:
    return replace(short, name=f"ablation, {label}, {short.name}", together=16, evaluations=2)


def study(tiny: bool = False) -> Study:
    short, long = grounds(tiny)
    cells = ablation(short)

    def field(results: Results) -> list[Contender]:
        del results
        return contenders()

    def values(results: Results, label: str, beta3: float, growth: float) -> list[float]:
        """Of the seeds that are done."""
        ground, cell = _ablated(short, label).name, _cell(beta3, growth)
        jobs = [job for stage in cells for job in stage.jobs(results) if (job.ground.name, job.label) == (ground, cell)]
        found = [value(record, ACCURACY) for job in jobs if (record := results.of(job)) is not None]
        return [each for each in found if each is not None]

    def heats(results: Results) -> dict[str, Heat]:
        drawn = {}
        for label in ABLATED:
            table = [[values(results, label, beta3, growth) for beta3 in BETA3] for growth in GROWTH]
            if not all(all(line) for line in table):
                continue
            means = [[mean(each) for each in line] for line in table]
            flat = [each for line in means for each in line]
            drawn[f"ablation-gamma{float(label.split()[-1]):+g}"] = Heat(
                f"{label}: over β3 and growth, accuracy lies between {min(flat):.2f} and {max(flat):.2f} %",
                "growth of the refresh times",
                "weight of the old ψ² at a refresh, β3",
                [f"{growth:g}" for growth in GROWTH],
                [f"{beta3:g}" for beta3 in BETA3],
                means,
                [[spread(each) for each in line] for line in table],
                "accuracy in %",
            )
        return drawn

    return Study(
        "ResNet-20 on CIFAR-10",
        "Is Anon at low gamma as good as SGDM here, at gamma 1 as AdamW, and do beta3 and growth matter?",
        [*search(field, short), report(field, long), *cells, report(field, short)],
        references=("SGDM", "AdamW", DEFAULT),
        heats=heats,
    )
