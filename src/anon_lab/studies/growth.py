"""Does gamma 1 stand level with AdamW where psi is refreshed more often than at 1, 2, 4, 8, ...? Or, on ResNet-20,
where weights decay less?

The first lead is from the diffusion model, on which a handful of throw-away runs showed it; what the others say counts.
The second is from the 200 epochs of ResNet-20: there gamma 1 has twice AdamW's lr, so that weights decay twice as fast,
and its training loss is higher all the way.
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
DECAY = (0.05, 0.025)
"""On ResNet-20; the first makes up for twice AdamW's lr."""


def contenders(rates: Rates) -> list[Contender]:
    """AdamW and gamma 1, which the study of the guards has, then gamma 1 with other refresh times and decays."""
    fresher = anon(Candidate(LABEL, {**anon_defaults(), "growth": GROWTH}), 1.0, rates, LABEL)
    field = [baselines(rates)[0], anon_by_default(1.0, rates), fresher]
    if rates is RESNET:
        gentler = anon_by_default(1.0, replace(rates, adam_decay=DECAY))
        field.append(replace(gentler, label=f"{gentler.label}, decay ≤ {DECAY[0]:g}"))
    return field


def _once_chosen(field: Sequence[Contender], ground: Ground, results: Results) -> Sequence[Contender]:
    """Everyone as soon as the new ones are tuned: before that there is nothing new to report."""
    return field if all(chosen(each, ground, results) is not None for each in field[2:]) else ()


def study(tiny: bool = False) -> Study:
    stages = []
    for each in (*settled(tiny)[0], *sorted(confirmed(tiny), key=lambda each: each.ground.task != "diffusion")):
        field = contenders(each.rates)
        stages += [*search(always(field), each.ground), report(partial(_once_chosen, field, each.ground), each.ground)]
    long = cifar10.grounds(tiny)[1]
    field = contenders(next(each.rates for each in confirmed(tiny) if each.ground == long.tuned_on))
    stages.append(report(partial(_once_chosen, field, long), long))
    return Study(
        "What gamma 1 lacks",
        f"Is gamma 1, which is behind AdamW by default, level with it with growth {GROWTH:g} instead of 2, or on "
        "ResNet-20 with less decay?",
        stages,
        references=("AdamW", "Anon γ 1"),
        builds_on=("guards", "cifar10"),
    )
