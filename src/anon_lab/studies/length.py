"""GPTs trained four times as long, and four times that: does what gamma gains over AdamW last?

Betas and decay are those that the study of the guards has found; the learning rate is compared anew at each length.
"""

from dataclasses import replace

from anon_lab.studies._candidates import Candidate
from anon_lab.studies._grounds import Grounds, confirmed
from anon_lab.studies._results import Results, check, report, search
from anon_lab.studies._spec import Contender, Ground, Stage, Study, anon_defaults
from anon_lab.studies.guards import anon, baselines

NAMES = ("gpt 1m, untied", "gpt 20m, tied")
GAMMAS = (1.5, 1.0)
TIMES = 4
LENGTHS = 2
"""So many more, each TIMES as long as the one before."""


def contenders(grounds: Grounds) -> list[Contender]:
    defaults = Candidate("default", anon_defaults())
    return [baselines(grounds.rates)[0], *(anon(defaults, gamma, grounds.rates) for gamma in GAMMAS)]


def longer(ground: Ground) -> Ground:
    """Warm-up and the looks at it stay at the same parts of the run."""
    assert ground.recipe.steps is not None
    steps = TIMES * ground.recipe.steps
    name = f"{ground.name.removesuffix(f', {ground.recipe.steps:,} steps')}, {steps:,} steps"
    return replace(ground, name=name, recipe=ground.recipe.changed(steps=steps), tuned_on=ground, checks=1)


def stages(grounds: Grounds) -> list[list[Stage]]:
    """Of each length, the shortest first, which is the guards' own."""

    def field(results: Results) -> list[Contender]:
        del results
        return contenders(grounds)

    found, ground = [[*search(field, grounds.ground), report(field, grounds.ground)]], grounds.ground
    for _ in range(LENGTHS):
        ground = longer(ground)
        found.append([*check(field, ground), report(field, ground)])
    return found


def study(tiny: bool = False) -> Study:
    each = [stages(grounds) for grounds in confirmed(tiny) if grounds.ground.name in NAMES]
    return Study(
        "GPTs, four and sixteen times as long",
        "Does what gamma 1.5 gains over AdamW in short runs last in longer ones?",
        [stage for length in zip(*each, strict=True) for part in length for stage in part],
        references=("AdamW",),
        builds_on=("guards",),
    )
