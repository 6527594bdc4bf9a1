"""Does gamma 1 stand level with AdamW where psi is refreshed more often than at 1, 2, 4, 8, ...? Where it remembers as
far back as AdamW's second moment, with the usual refreshes or with more? Or, on ResNet-20, where weights decay less?

The first lead is from the diffusion model, on which a handful of throw-away runs showed it; what the others say counts.
The second is from the smallest GPT, where more refreshes did harm: with beta3 0.5 each of them halves what psi
remembers, so that beta2 has no say in it. Throw-away runs there and on the diffusion model led to beta3=None, which
came out ahead of growth alone on both, and, as the next ones showed, does so with the usual refreshes, too. Those cost
less, so that on what only a GPU trains growth has no part.
The third is from the 200 epochs of ResNet-20: there gamma 1 has twice AdamW's lr, so that weights decay twice as fast,
and its training loss is higher all the way.
The fourth is about the guards. The clip of 0.5 is what makes lr twice AdamW's, and on rare words costs most: there
AdamW's first steps are three times lr. It holds where gradients grow between refreshes; so does a psi that follows
them, and then the clip can be wide. Throw-away runs on zipf and the tied GPT of 1 M parameters showed AdamW's results
at AdamW's learning rates.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anon_lab.studies import cifar10
from anon_lab.studies._candidates import Candidate
from anon_lab.studies._grounds import RESNET, Grounds, confirmed, settled
from anon_lab.studies._results import Results, always, chosen, report, search
from anon_lab.studies._spec import Contender, Stage, Study, anon_defaults
from anon_lab.studies.guards import anon, anon_by_default, baselines

GROWTH = 1.25
LABEL = f"Anon γ 1, growth {GROWTH:g}"
ADAMS_MEMORY = "Anon γ 1, Adam's memory"
FRESH_TOO = f"{LABEL}, Adam's memory"
LEADING = (1.0, 1.5)
FOLLOWING = {"clip": 3.0, "floor": 0.01, "touch": False, "brake": False, "follow": True}
WITH_GROWTH = ("digits", "zipf", "ngram", "diffusion 16px", "gpt 1m, untied")
"""Grounds on which it is varied, too: those that a CPU trains."""
DECAY = (0.05, 0.025)
"""On ResNet-20; the first makes up for twice AdamW's lr."""


def known(grounds: Grounds) -> list[Contender]:
    """AdamW, gamma 1 and, where it is ahead, gamma 1.5, which the study of the guards has."""
    gammas = (gamma for gamma in LEADING if gamma in grounds.gammas)
    return [baselines(grounds.rates)[0], *(anon_by_default(gamma, grounds.rates) for gamma in gammas)]


def new(grounds: Grounds) -> list[Contender]:
    """Gamma 1 with other memories, refresh times and decays; with a psi that follows also gamma 1.5."""
    rates, memory, growth = grounds.rates, {"beta3": None}, {"growth": GROWTH}
    changes: dict[str, dict[str, Any]] = {ADAMS_MEMORY: memory}
    if grounds.ground.name in WITH_GROWTH:
        changes |= {FRESH_TOO: memory | growth, LABEL: growth}
    field = [anon(Candidate(name, anon_defaults() | each), 1.0, rates, name) for name, each in changes.items()]
    following = Candidate("follow", anon_defaults() | {"guard": FOLLOWING})
    field += [anon(following, each, rates, f"Anon γ {each:g}, follow") for each in LEADING if each in grounds.gammas]
    if rates is RESNET:
        gentler = anon_by_default(1.0, replace(rates, adam_decay=DECAY))
        field.append(replace(gentler, label=f"{gentler.label}, decay ≤ {DECAY[0]:g}"))
    return field


def stages_of(grounds: Grounds, is_searched: bool = True) -> list[Stage]:
    """All are reported on as soon as a new one is tuned: before that there is nothing new to say."""
    there, tried, ground = known(grounds), new(grounds), grounds.ground

    def once_chosen(results: Results) -> Sequence[Contender]:
        return [*there, *tried] if any(chosen(each, ground, results) is not None for each in tried) else ()

    reported = report(once_chosen, ground)
    return [*search(always([*there, *tried]), ground), reported] if is_searched else [reported]


def study(tiny: bool = False) -> Study:
    settings = [*settled(tiny)[0], *sorted(confirmed(tiny), key=lambda each: each.ground.task != "diffusion")]
    stages = [stage for each in settings for stage in stages_of(each)]
    long = cifar10.grounds(tiny)[1]
    short = next(each for each in settings if each.ground == long.tuned_on)
    stages += stages_of(replace(short, ground=long), is_searched=False)
    return Study(
        "What gamma 1 lacks",
        "Is gamma 1, which is behind AdamW by default, level with it with `beta3=None`, so that psi remembers as far "
        f"back as Adam's, with growth {GROWTH:g} instead of 2, with both, on ResNet-20 with less decay, or with the "
        "guard `follow` in place of a tight clip, touch and brake? And what becomes of gamma 1.5 with that?",
        stages,
        references=("AdamW", "Anon γ 1", "Anon γ 1.5"),
        builds_on=("guards", "cifar10"),
    )
