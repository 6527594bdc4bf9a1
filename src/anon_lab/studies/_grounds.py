"""Where the guards are settled and confirmed: tasks, recipes, and the learning rates that are searched on each."""

from dataclasses import dataclass, replace
from typing import Any

from anon_lab.studies._spec import ACCURACY, LOSS, Ground
from anon_lab.tasks import Metric, Recipe, cifar10, diffusion, gpt
from anon_lab.tasks.ngram import Ngram

BASELINES = ("SGDM", "AdamW")
TRANSFORMERS = (1.0, 1.1, 1.5)
"""Gammas on these: there 1.5, a lead from a small GPT, is put to the test."""
CHOICE = "gpt 20m, tied, to choose on"
"""The ground that ended the choice of the guards; the same network confirms it, on another ground."""
HYBRID = Metric("loss", "L_hybrid", higher_is_better=False)


@dataclass(frozen=True)
class Rates:
    """What is searched: learning rates at the first weight decay, two more of SGD's kind, which has no beta2 to search;
    then the second weight decay."""

    adam: tuple[float, ...]
    sgd: tuple[float, ...]
    adam_decay: tuple[float, float]
    """Decoupled from the gradient."""
    sgd_decay: tuple[float, float]
    """A part of the gradient."""


@dataclass(frozen=True)
class Grounds:
    """A ground with its searches, Anon's gammas and the baselines to compare them with."""

    ground: Ground
    rates: Rates
    gammas: tuple[float, ...] = (1.0, 1.1)
    baselines: tuple[str, ...] = ("AdamW",)
    seeds: int = 1
    """With which candidates are screened."""
    margin: float = 0.01
    """By how much the means of so many seeds may differ between two candidates that are equally good."""


def _times(first: float, factor: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{first * factor**power:.3g}") for power in range(count))


# On these two Anon is best at several times AdamW's lr.
DIGITS = Rates(_times(1e-3, 2, 7), _times(0.01, 2, 9), (0.0, 0.1), (0.0, 1e-3))
ZIPF = Rates(_times(6.25e-4, 2, 7), _times(0.01, 2, 9), (0.0, 0.01), (0.0, 1e-4))
NGRAM = Rates(_times(4e-3, 2, 5), _times(0.0125, 2, 7), (0.1, 0.03), (1e-4, 1e-3))
GPT = Rates((5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3), _times(0.02, 2, 7), (0.1, 0.03), (1e-4, 1e-3))
SMALL_GPT = Rates(_times(5e-4, 2, 5), _times(0.02, 2, 7), (0.1, 0.03), (1e-4, 1e-3))
RESNET = Rates((1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), _times(0.0125, 2, 7), (0.1, 0.5), (5e-4, 1e-3))
VIT = Rates((2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3), _times(0.0125, 2, 7), (0.05, 0.2), (5e-4, 1e-3))
DIFFUSION = Rates(_times(1e-3, 2, 5), _times(0.01, 2, 7), (0.0, 0.01), (0.0, 1e-4))


def settled(tiny: bool) -> tuple[list[Grounds], Grounds]:
    """The grounds that have a say: the cheap ones, and the language model that ends it."""
    recipes = {
        "digits": Recipe(batch_size=100, steps=200, schedule="constant"),
        "zipf": Recipe(batch_size=32, steps=1500, schedule="constant"),
        "ngram": Ngram.recipe,
    }
    width = {"width": 8, "evaluated": 256} if tiny else {}
    if tiny:
        recipes = {name: recipe.changed(steps=2, batch_size=8) for name, recipe in recipes.items()}
    looks = 1 if tiny else 4
    all_three = (0.0, 1.0, 1.1)
    cheap = [
        Grounds(
            Ground("digits", "digits", recipes["digits"], ACCURACY, 4e-4, together=16, evaluations=looks),
            DIGITS,
            all_three,
            BASELINES,
            seeds=3,
            margin=0.5,
        ),
        Grounds(
            Ground("zipf", "zipf", recipes["zipf"], ACCURACY, 3e-4, together=16, evaluations=looks),
            ZIPF,
            all_three,
            BASELINES,
            seeds=3,
            margin=0.5,
        ),
        Grounds(
            Ground("ngram", "ngram", recipes["ngram"], LOSS, 5e-4, width, together=16, evaluations=looks),
            NGRAM,
            all_three,
            BASELINES,
        ),
    ]
    return cheap, Grounds(_gpt(CHOICE, True, tiny), GPT, (1.0,))


def confirmed(tiny: bool) -> list[Grounds]:
    """The grounds that had none; the language model's settings are searched anew."""
    resnet, vit = cifar10.RECIPES["resnet20"], cifar10.RECIPES["vit"]
    images = {"epochs": 15, "warmup": 1 / 15}
    noise = diffusion.PRESETS["16px"].recipe.changed(steps=500, ema=0.98)
    tied, untied = _gpt("gpt 20m, tied", True, tiny), _gpt("gpt 20m, untied", False, tiny)
    if tiny:
        short = Recipe(batch_size=8, steps=2)
        resnet20, small_vit, unet = (
            Ground(name, "digits", short, ACCURACY, 4e-4, evaluations=1)
            for name in ("cifar10 resnet20", "cifar10 vit", "diffusion 16px")
        )
        small = replace(untied, name="gpt 1m, untied")
    else:
        short = resnet.changed(**images)
        resnet20 = Ground("cifar10 resnet20", "cifar10", short, ACCURACY, 0.45e-3, together=16, stacked=True)
        vits = {"model": "vit"}
        small_vit = Ground("cifar10 vit", "cifar10", vit.changed(**images), ACCURACY, 2e-3, vits, together=16)
        unets = {"model": "16px"}
        unet = Ground("diffusion 16px", "diffusion", noise, HYBRID, 0.004, unets, together=10, evaluations=1)
        small = replace(small_gpt("gpt 1m, untied", tied=False), checks=2)
    return [
        Grounds(resnet20, RESNET, (-0.1, 0.0, 1.0), BASELINES),
        Grounds(small_vit, VIT, TRANSFORMERS),
        Grounds(tied, GPT, TRANSFORMERS),
        Grounds(untied, GPT, TRANSFORMERS),
        Grounds(unet, DIFFUSION, (1.0,)),
        Grounds(small, SMALL_GPT, (1.0, 1.5)),
    ]


def _gpt(name: str, tied: bool, tiny: bool) -> Ground:
    if tiny:
        recipe = Recipe(batch_size=8, steps=2)
        width = {"width": 8 if tied else 4, "evaluated": 256}
        return Ground(name, "ngram", recipe, LOSS, 0.0125, width, evaluations=1, checks=2)
    recipe = gpt.PRESETS["20m"].recipe.changed(steps=500, batch_size=32)
    options = {"model": "20m", "tied": tied}
    return Ground(name, "gpt", recipe, LOSS, 9e-3, options, together=4, compile=True, evaluations=2, checks=3)


def small_gpt(name: str, **options: Any) -> Ground:
    """A language model that a CPU trains in minutes."""
    recipe = gpt.PRESETS["1m"].recipe.changed(warmup=0.1)
    chosen = {"model": "1m", "evaluated": 100_000, **options}
    return Ground(name, "gpt", recipe, LOSS, 2e-3, chosen, together=16, evaluations=3)
