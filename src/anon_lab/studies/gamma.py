"""Which gamma, and which learning rate for it: Anon from gamma -1 to 2 with one unit of lr, beside AdamW and SGDM."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite, nan
from statistics import mean

from anon_lab.studies import _grounds
from anon_lab.studies._grounds import Rates
from anon_lab.studies._plots import slug
from anon_lab.studies._results import Results, report, search, trials, value
from anon_lab.studies._spec import Contender, Ground, Study, anon_defaults
from anon_lab.tables._spec import Heat

GAMMAS = (-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
OCTAVES, FEWER_OCTAVES = range(-4, 4), range(-1, 3)
"""Learning rates to search, as powers of 2 around a middle; fewer where a run takes minutes."""
SEEDS, FEWER_SEEDS = 5, 3
"""Reported on, where a run takes seconds and where it takes longer."""


@dataclass(frozen=True)
class Site:
    """A ground with the middle of the learning rates: AdamW's and Anon's, and SGDM's."""

    ground: Ground
    adam: float
    sgd: float
    rates: Rates
    """Of which the first weight decays are taken."""
    seeds: int
    octaves: range = OCTAVES


def sites(tiny: bool) -> list[Site]:
    """The tasks that a CPU can train, then those that ask for a GPU; around what the study of the guards found."""
    digits, zipf, ngram = _grounds.settled(tiny)[0]
    resnet, _, gpt, *_ = _grounds.confirmed(tiny)
    return [
        Site(digits.ground, 8e-3, 0.16, digits.rates, SEEDS),
        Site(zipf.ground, 2.5e-3, 0.32, zipf.rates, SEEDS),
        Site(ngram.ground, 1.6e-2, 0.4, ngram.rates, SEEDS),
        Site(_grounds.small_gpt("gpt 1m"), 2e-3, 0.3, gpt.rates, FEWER_SEEDS, FEWER_OCTAVES),
        Site(resnet.ground, 8e-3, 0.2, resnet.rates, FEWER_SEEDS),
        Site(replace(gpt.ground, checks=0), 1e-3, 0.3, gpt.rates, FEWER_SEEDS, FEWER_OCTAVES),
    ]


def octaves(middle: float, powers: range) -> tuple[float, ...]:
    return tuple(float(f"{middle * 2.0**power:.3g}") for power in powers)


def ours(site: Site, gamma: float) -> Contender:
    """With lr_scale="tensor" a learning rate has the same unit at every gamma."""
    fixed = {**anon_defaults(), "gamma": gamma, "lr_scale": "tensor", "weight_decay": site.rates.adam_decay[0]}
    return Contender(f"Anon γ {gamma:g}", "Anon", (("lr", octaves(site.adam, site.octaves)),), fixed)


def contenders(site: Site) -> list[Contender]:
    """With equally many trials."""
    adam = {"betas": (0.9, 0.999), "weight_decay": site.rates.adam_decay[0]}
    sgd = {"weight_decay": site.rates.sgd_decay[0]}
    return [
        Contender("AdamW", "AdamW", (("lr", octaves(site.adam, site.octaves)),), adam),
        Contender("SGDM", "SGDM", (("lr", octaves(site.sgd, site.octaves)),), sgd),
        *(ours(site, gamma) for gamma in GAMMAS),
    ]


def _trained(site: Site, gamma: float, results: Results) -> list[float | None]:
    """What each learning rate led to on validation examples: NaN before it is known, None where it diverged."""
    metric = site.ground.metric
    records = [results.of(job) for job in trials(ours(site, gamma), site.ground, results, 0)]
    return [nan if record is None else value(record, metric) for record in records]


def shared_rate(table: Sequence[Sequence[float | None]], higher_is_better: bool) -> tuple[int, float] | None:
    """The column that serves all rows best, and by how much it is behind each row's own best, in the mean. None stands
    for a run that diverged; a row of them does not count. None if no column serves all."""
    sign = 1 if higher_is_better else -1
    worths = [[-inf if each is None else sign * each for each in line] for line in table if set(line) != {None}]
    if not worths:
        return None
    behind = [mean(max(line) - line[column] for line in worths) for column in range(len(table[0]))]
    best = min(range(len(behind)), key=behind.__getitem__)
    return (best, behind[best]) if isfinite(behind[best]) else None


def _heat(site: Site, results: Results) -> Heat | None:
    """Gamma by learning rate; None before all is known."""
    table = [_trained(site, gamma, results) for gamma in GAMMAS]
    if any(each is not None and not isfinite(each) for line in table for each in line):
        return None
    rates, metric = octaves(site.adam, site.octaves), site.ground.metric
    shared = shared_rate(table, metric.higher_is_better)
    finding = "no lr serves every γ"
    if shared is not None:
        column, behind = shared
        finding = (
            f"with lr {rates[column]:g} every γ ends, in the mean, {behind:.2g} {metric.unit} behind its own best lr"
        )
    return Heat(
        f"{site.ground.name}: {finding}",
        "adaptivity γ",
        'lr, with lr_scale="tensor"',
        [f"{gamma:g}" for gamma in GAMMAS],
        [f"{lr:g}" for lr in rates],
        [[nan if each is None else each for each in line] for line in table],
        [["diverged" if each is None else f"{each:.4g}" for each in line] for line in table],
        f"{metric.name} on validation examples ({metric.unit})",
        metric.higher_is_better,
    )


def study(tiny: bool = False) -> Study:
    everywhere = sites(tiny)[:2] if tiny else sites(tiny)
    stages = []
    for site in everywhere:
        field = partial(_field, site)
        stages += [*search(field, site.ground, rounds=1), report(field, site.ground, site.seeds)]

    def heats(results: Results) -> dict[str, Heat]:
        found = {f"{slug(site.ground.name)}-lr": _heat(site, results) for site in everywhere}
        return {name: heat for name, heat in found.items() if heat is not None}

    return Study(
        "Gamma from -1 to 2",
        "Which gamma is best on which task, and which learning rate, if lr has the same unit at every gamma "
        '(lr_scale="tensor")?',
        stages,
        references=("AdamW", "SGDM"),
        heats=heats,
        sweeps_gamma=True,
    )


def _field(site: Site, results: Results) -> list[Contender]:
    del results
    return contenders(site)
