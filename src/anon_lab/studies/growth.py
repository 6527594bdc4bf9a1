"""Does gamma 1 stand level with AdamW where psi is refreshed more often than at 1, 2, 4, 8, ...?

The lead is from the diffusion model, on which a handful of throw-away runs showed it; what the others say counts.
"""

from collections.abc import Sequence
from functools import partial

from anon_lab.studies import cifar10
from anon_lab.studies._candidates import Candidate
from anon_lab.studies._grounds import Rates, confirmed, settled
from anon_lab.studies._results import Results, always, chosen, report, search
from anon_lab.studies._spec import Contender, Ground, Study, anon_defaults
from anon_lab.studies.guards import anon, anon_by_default, baselines

GROWTH = 1.25
LABEL = f"Anon γ 1, growth {GROWTH:g}"


def contenders(rates: Rates) -> list[Contender]:
    """AdamW and gamma 1, which the study of the guards has, and gamma 1 with other refresh times."""
    fresher = anon(Candidate(LABEL, {**anon_defaults(), "growth": GROWTH}), 1.0, rates, LABEL)
    return [baselines(rates)[0], anon_by_default(1.0, rates), fresher]


def _once_chosen(field: Sequence[Contender], ground: Ground, results: Results) -> Sequence[Contender]:
    """Everyone as soon as the last is tuned: before that there is nothing new to report."""
    return field if chosen(field[-1], ground, results) is not None else ()


def study(tiny: bool = False) -> Study:
    stages = []
    for each in (*settled(tiny)[0], *sorted(confirmed(tiny), key=lambda each: each.ground.task != "diffusion")):
        field = contenders(each.rates)
        stages += [*search(always(field), each.ground), report(partial(_once_chosen, field, each.ground), each.ground)]
    long = cifar10.grounds(tiny)[1]
    field = contenders(next(each.rates for each in confirmed(tiny) if each.ground == long.tuned_on))
    stages.append(report(partial(_once_chosen, field, long), long))
    return Study(
        "Refreshing more often, at gamma 1",
        f"Is gamma 1 with growth {GROWTH:g} level with AdamW, which it is behind with the default of 2?",
        stages,
        references=("AdamW", "Anon γ 1"),
        builds_on=("guards", "cifar10"),
    )
