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
from functools import partial

from anon_lab.studies import cifar10
from anon_lab.studies._candidates import Candidate
from anon_lab.studies._grounds import RESNET, Rates, confirmed, settled
from anon_lab.studies._results import Results, always, chosen, report, search
from anon_lab.studies._spec import Contender, Ground, Study, anon_defaults
from anon_lab.studies.guards import anon, anon_by_default, baselines

GROWTH = 1.25
LABEL = f"Anon γ 1, growth {GROWTH:g}"
ADAMS_MEMORY = "Anon γ 1, Adam's memory"
FRESH_TOO = f"{LABEL}, Adam's memory"
FOLLOWS = "Anon γ 1, follow"
FOLLOWING = {"clip": 3.0, "floor": 0.01, "touch": False, "brake": False, "follow": True}
WITH_GROWTH = ("digits", "zipf", "ngram", "diffusion 16px", "gpt 1m, untied")
"""Grounds on which it is varied, too: those that a CPU trains."""
DECAY = (0.05, 0.025)
"""On ResNet-20; the first makes up for twice AdamW's lr."""


def contenders(rates: Rates, ground: Ground) -> list[Contender]:
    """AdamW and gamma 1, which the study of the guards has, then gamma 1 with other refresh times and decays."""
    memory, growth = {"beta3": None}, {"growth": GROWTH}
    new = {ADAMS_MEMORY: memory, FOLLOWS: {"guard": FOLLOWING}}
    if ground.name in WITH_GROWTH:
        new |= {FRESH_TOO: memory | growth, LABEL: growth}
    field = [baselines(rates)[0], anon_by_default(1.0, rates)]
    field += [anon(Candidate(name, anon_defaults() | each), 1.0, rates, name) for name, each in new.items()]
    if rates is RESNET:
        gentler = anon_by_default(1.0, replace(rates, adam_decay=DECAY))
        field.append(replace(gentler, label=f"{gentler.label}, decay ≤ {DECAY[0]:g}"))
    return field


def _once_chosen(field: Sequence[Contender], ground: Ground, results: Results) -> Sequence[Contender]:
    """Everyone as soon as a new one is tuned: before that there is nothing new to report."""
    return field if any(chosen(each, ground, results) is not None for each in field[2:]) else ()


def study(tiny: bool = False) -> Study:
    stages = []
    for each in (*settled(tiny)[0], *sorted(confirmed(tiny), key=lambda each: each.ground.task != "diffusion")):
        field = contenders(each.rates, each.ground)
        stages += [*search(always(field), each.ground), report(partial(_once_chosen, field, each.ground), each.ground)]
    long = cifar10.grounds(tiny)[1]
    field = contenders(next(each.rates for each in confirmed(tiny) if each.ground == long.tuned_on), long)
    stages.append(report(partial(_once_chosen, field, long), long))
    return Study(
        "What gamma 1 lacks",
        "Is gamma 1, which is behind AdamW by default, level with it with `beta3=None`, so that psi remembers as far "
        f"back as Adam's, with growth {GROWTH:g} instead of 2, with both, on ResNet-20 with less decay, or with the guard "
        "`follow` in place of a tight clip, touch and brake?",
        stages,
        references=("AdamW", "Anon γ 1"),
        builds_on=("guards", "cifar10"),
    )
