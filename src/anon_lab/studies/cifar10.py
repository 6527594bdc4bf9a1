"""ResNet-20 on CIFAR-10: Anon from gamma -0.1 to 1 against SGDM and AdamW, and how much beta3 and growth matter.

Settings are those that the study of the guards has found on 15 epochs; the search for gamma 0.5 is this one's own.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean

from anon_lab.studies._grounds import RESNET, confirmed
from anon_lab.studies._results import Results, always, report, search, tuned, value
from anon_lab.studies._spec import ACCURACY, FIRST_SEED, Contender, Ground, Job, Stage, Study
from anon_lab.studies.guards import anon_by_default, baselines
from anon_lab.tables._spec import Heat
from anon_lab.tables._words import spread
from anon_lab.tasks import Recipe
from anon_lab.tasks.cifar10 import RECIPES

SECONDS = 0.45e-3
SEEDS = 3
BETA3 = (0.1, 0.3, 0.5, 0.9)
GROWTH = (1.25, 2.0, 3.0, 4.0)
ABLATED = ("Anon γ -0.1", "Anon γ 1")
DEFAULT = "β3 0.5, growth 2"


def contenders() -> list[Contender]:
    """With equally many trials: those of the guards' study, and gamma 0.5 by SGD's recipe at rates in its own unit."""
    below, low, half, high = (anon_by_default(gamma, RESNET) for gamma in (-0.1, 0.0, 0.5, 1.0))
    betas = ("betas", ((0.9, 0.95), (0.9, 0.99)))
    half = replace(half, axes=(("lr", (0.025, 0.05, 0.1, 0.2, 0.4)), betas, *half.axes[1:]))
    adamw, sgdm = baselines(RESNET)
    return [sgdm, adamw, low, high, below, half]


def grounds(tiny: bool) -> tuple[Ground, Ground, Ground]:
    """To tune on, as the guards' study does; the whole recipe; and one to vary settings on."""
    short = confirmed(tiny)[0].ground
    if tiny:
        recipe = Recipe(batch_size=100, steps=9)
        long = replace(short, name="200 epochs", recipe=recipe, evaluations=2, tuned_on=short)
        return short, long, replace(long, name="30 epochs", recipe=recipe.changed(steps=6))
    recipe = RECIPES["resnet20"]
    long = Ground("200 epochs", "cifar10", recipe, ACCURACY, SECONDS, together=16, stacked=True, tuned_on=short)
    brief = recipe.changed(epochs=30, warmup=1 / 30)
    return short, long, replace(long, name="30 epochs", recipe=brief, evaluations=2)


def ablation(short: Ground, brief: Ground) -> list[Stage]:
    """beta3 x growth at gamma -0.1 and at 1, from one seed first; 16 fill a GPU."""
    named = {each.label: each for each in contenders()}

    def jobs(results: Results, label: str, seed: int) -> list[Job]:
        values = tuned(named[label], short, results)
        if values is None:
            return []
        return [
            Job(_cell(beta3, growth), _ablated(brief, label), "Anon", changed, seed, report=True)
            for beta3, growth in product(BETA3, GROWTH)
            for changed in [{**values, "beta3": beta3, "growth": growth}]
        ]

    return [
        Stage(f"ablation, {label}, seed {seed}", partial(jobs, label=label, seed=seed))
        for seed in range(FIRST_SEED, FIRST_SEED + SEEDS)
        for label in ABLATED
    ]


def _cell(beta3: float, growth: float) -> str:
    return f"β3 {beta3:g}, growth {growth:g}"


def _ablated(brief: Ground, label: str) -> Ground:
    return replace(brief, name=f"ablation, {label}, {brief.name}")


def study(tiny: bool = False) -> Study:
    short, long, brief = grounds(tiny)
    field, cells = always(contenders()), ablation(short, brief)

    def values(results: Results, label: str, beta3: float, growth: float) -> list[float]:
        """Of the seeds that are done."""
        ground, cell = _ablated(brief, label).name, _cell(beta3, growth)
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
        [*search(field, short), report(field, long), *cells],
        references=("SGDM", "AdamW", DEFAULT),
        heats=heats,
        builds_on=("guards",),
    )
