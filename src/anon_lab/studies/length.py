"""GPTs trained four times as long, and four times that: does what gamma gains over AdamW last?

Betas and decay are those that the study of the guards has found; the learning rate is compared anew at each length.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from anon_lab.studies._grounds import Grounds, confirmed
from anon_lab.studies._report import Line, lines
from anon_lab.studies._results import Results, always, check, report, search
from anon_lab.studies._spec import Contender, Ground, Section, Stage, Study
from anon_lab.studies.guards import anon_by_default, baselines
from anon_lab.tables._words import NONE

NAMES = ("gpt 1m, untied", "gpt 20m, tied")
GAMMAS = (1.5, 1.0)
TIMES = 4
LENGTHS = 2
"""So many more, each TIMES as long as the one before."""


def contenders(grounds: Grounds) -> list[Contender]:
    return [baselines(grounds.rates)[0], *(anon_by_default(gamma, grounds.rates) for gamma in GAMMAS)]


def longer(ground: Ground) -> Ground:
    """Warm-up and the looks at it stay at the same parts of the run."""
    assert ground.recipe.steps is not None
    steps = TIMES * ground.recipe.steps
    name = f"{ground.name.removesuffix(f', {ground.recipe.steps:,} steps')}, {steps:,} steps"
    return replace(ground, name=name, recipe=ground.recipe.changed(steps=steps), tuned_on=ground, checks=1)


def stages(grounds: Grounds) -> list[list[Stage]]:
    """Of each length, the shortest first, which is the guards' own."""

    field = always(contenders(grounds))
    found, ground = [[*search(field, grounds.ground), report(field, grounds.ground)]], grounds.ground
    for _ in range(LENGTHS):
        ground = longer(ground)
        found.append([*check(field, ground), report(field, ground)])
    return found


def leads(reports: Sequence[Stage], results: Results) -> list[Section]:
    """By how much each gamma ends below AdamW's loss, a line for each GPT and length that is reported on."""
    labels = [f"Anon γ {gamma:g}" for gamma in GAMMAS]
    head = ["", "steps", "AdamW", *(word for label in labels for word in (label, "ahead by"))]
    body = []
    for ground, contenders in lines(reports, results).items():
        named = {line.label: line for line in contenders}
        if "AdamW" not in named or len(named) == 1:
            continue
        theirs = named["AdamW"]
        row = [ground, f"{theirs.ground.recipe.steps:,}", theirs.measured()]
        for label in labels:
            ours = named.get(label)
            row += [ours.measured(), lead(ours, theirs)] if ours else [NONE, NONE]
        body.append(row)
    text = (
        "Fresh seeds, test set, nats per token; ahead by: over the seeds that both have, which share weights and data."
    )
    return [Section("The lead by length", [head, *body], text)] if body else []


def lead(ours: Line, theirs: Line) -> str:
    seeds = ours.by_seed.keys() & theirs.by_seed.keys()
    return f"{mean(theirs.by_seed[seed] - ours.by_seed[seed] for seed in seeds):.3f}" if seeds else NONE


def study(tiny: bool = False) -> Study:
    each = [stages(grounds) for grounds in confirmed(tiny) if grounds.ground.name in NAMES]
    reports = [length[-1] for gpt in each for length in gpt]
    return Study(
        "GPTs, four and sixteen times as long",
        "Does what gamma 1.5 gains over AdamW in short runs last in longer ones?",
        [stage for length in zip(*each, strict=True) for part in length for stage in part],
        references=("AdamW",),
        sections=partial(leads, reports),
        builds_on=("guards",),
    )
