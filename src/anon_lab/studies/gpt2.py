"""GPT-2 small on a given text: AdamW, Anon at four gammas, Lion and Muon, by loss against steps and against time."""

from dataclasses import replace
from typing import Any

from anon_lab.studies._results import always, check, report, search
from anon_lab.studies._spec import LOSS, Contender, Ground, Study, anon_defaults
from anon_lab.tasks import Recipe
from anon_lab.tasks.gpt import PRESETS

SECONDS = 0.075
ADAM_BETAS = ("betas", ((0.9, 0.99), (0.9, 0.999)))
ANON_BETAS = ("betas", ((0.9, 0.99), (0.9, 0.95)))
DECAY = ("weight_decay", (0.03,))


def contenders() -> list[Contender]:
    """Each with 7 trials, but for gammas between 1 and 1.5, which take betas and decay from 1.5 and search lr alone.

    Lion's lr is smaller and Muon's larger, so that the recipe's decay is not theirs. Beside the gammas of the paper
    stands 1.5, a lead from a small language model. The fourth lr of AdamW, Muon, Lion and Anon at gamma 1 was added
    when three were known: beyond the best if that lay at an edge, else beside it."""
    return [
        Contender("AdamW", "AdamW", (("lr", (3e-4, 4.2e-4, 6e-4, 1.2e-3)), ADAM_BETAS, DECAY), {"betas": (0.9, 0.95)}),
        _anon(1.0, (2e-4, 4e-4, 8e-4, 1.6e-3)),
        # With lr_scale lr has AdamW's unit.
        _anon(1.5, (3e-4, 6e-4, 1.2e-3, 2.4e-3), lr_scale="tensor"),
        Contender(
            "Muon",
            "Muon",
            (("lr", (0.01, 0.02, 0.04, 0.08)), ("adamw_ratio", (0.03, 0.06)), ("weight_decay", (0.03,))),
            {"weight_decay": 0.01},
        ),
        Contender(
            "Lion",
            "Lion",
            (("lr", (5e-5, 1e-4, 2e-4, 4e-4)), ("betas", ((0.95, 0.98), (0.9, 0.95))), ("weight_decay", (0.3,))),
            {"weight_decay": 1.0},
        ),
        _between(1.1),
        _between(1.15),
    ]


def _anon(gamma: float, lrs: tuple[float, ...], **more: Any) -> Contender:
    fixed = {**anon_defaults(), "gamma": gamma, **more}
    return Contender(f"Anon γ {gamma:g}", "Anon", (("lr", lrs), ANON_BETAS, DECAY), fixed)


def _between(gamma: float) -> Contender:
    """At what the search for gamma 1.5 has found."""
    whole = _anon(gamma, (6e-4, 1.2e-3), lr_scale="tensor", betas=(0.9, 0.99))
    return replace(whole, axes=whole.axes[:1])


def grounds(tiny: bool) -> tuple[Ground, Ground, Ground]:
    """To tune on, to report on, and a longer one for those with more time; all train alone, so that time compares. The
    best learning rate of 200 steps is not that of 600, where it is checked."""
    if tiny:
        recipe = Recipe(batch_size=16, clip=1.0, weight_decay=0.1, decay_all=False)
        options = {"width": 8, "evaluated": 256}
        made = [
            Ground(f"{steps} steps", "ngram", recipe.changed(steps=steps), LOSS, SECONDS, options, evaluations=2)
            for steps in (2, 4, 6)
        ]
    else:
        recipe = PRESETS["small"].recipe.changed(batch_size=32, warmup=0.1, final_lr=0.1)
        made = [
            Ground(
                f"{steps} steps of 32 x 1,024 tokens",
                "gpt",
                recipe.changed(steps=steps),
                LOSS,
                SECONDS,
                {"model": "small"},
                compile=True,
                evaluations=steps // 100 if steps > 200 else 1,
            )
            for steps in (200, 600, 2000)
        ]
    short, usual, long = made
    usual = replace(usual, tuned_on=short, checks=1)
    return short, usual, replace(long, tuned_on=usual)


def study(tiny: bool = False) -> Study:
    short, usual, long = grounds(tiny)

    field = always(contenders())
    return Study(
        "GPT-2 small, 124 M parameters",
        "Which optimizer has the lowest loss after so many steps, and after so many seconds?",
        [*search(field, short), *check(field, usual), report(field, usual), report(field, long)],
        references=("AdamW",),
        trials="equally many trials for every contender but γ 1.1 and 1.15, which take betas and decay from γ 1.5 and "
        "search the learning rate alone",
    )
