"""The trials that every default has to pass: Anon with only lr and gamma set, beside an AdamW tuned as hard."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from anon_optim import Anon, Box, Guard
from trials import (
    Digits,
    FewWords,
    LateRows,
    LowRank,
    TiedLanguageModel,
    Trial,
    ZipfBags,
    reddi_gradient,
)

AdamW = partial(torch.optim.AdamW, weight_decay=0.0)  # torch's default is 0.01; the trials name their decay
Make = Callable[..., torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Training and tuning, the same for every optimizer.


class Run(NamedTuple):
    score: float
    first_loss: float
    worst_loss: float


def constant(progress: float) -> float:
    return 1.0


def cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(trial: Trial, make: Make, lr: float, schedule=constant, max_norm: float = math.inf) -> Run:
    optimizer = make(trial.model.parameters(), lr=lr)
    losses = []
    for t in range(1, trial.steps + 1):
        optimizer.param_groups[0]["lr"] = lr * schedule((t - 1) / trial.steps)
        optimizer.zero_grad()
        loss = trial.loss(t)
        loss.backward()
        if max_norm < math.inf:
            clip_grad_norm_(trial.model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return Run(trial.score(), losses[0], max(losses))


def mean_score(kind: type[Trial], make: Make, lr: float, seeds: int, **how) -> float:
    """Over the seeds 0, 1, ...; a run that ends in NaN counts as infinitely bad."""
    scores = [train(kind(seed), make, lr, **how).score for seed in range(seeds)]
    return sum(math.inf if math.isnan(score) else score for score in scores) / seeds


def tuned(kind: type[Trial], make: Make, lrs: Sequence[float], seeds: int, **how) -> float:
    """The mean score at the best of the learning rates: as many for every optimizer, judged alike."""
    return min(mean_score(kind, make, lr, seeds, **how) for lr in lrs)


# 1. The paper's convergence example. Clamping each step cuts the rare large gradient short, as Adam does;
# the sticky clip must not.

PERIOD = 101


def follow(optimizer: torch.optim.Optimizer, periods: Sequence[int]) -> list[tuple[float, ...]]:
    """Where each group's single number stands after so many periods of the example, lr falling as 1/sqrt(t)."""
    groups = optimizer.param_groups
    numbers = [group["params"][0] for group in groups]
    rates = [group["lr"] for group in groups]
    for number in numbers:
        number.grad = torch.zeros_like(number)
    stops = {PERIOD * period for period in periods}
    seen = []
    for t in range(1, max(stops) + 1):
        gradient = reddi_gradient(t)
        for number, group, lr in zip(numbers, groups, rates, strict=True):
            number.grad.fill_(gradient)
            group["lr"] = lr / math.sqrt(t)
        optimizer.step()
        if t in stops:
            seen.append(tuple(number.item() for number in numbers))
    return seen


def number() -> Tensor:
    return torch.zeros(1, dtype=torch.float64, requires_grad=True)


def anon_on_the_example(gammas: Sequence[float]) -> Anon:
    # lr has the unit theta / gradient^(1 - gamma); measured in the rare gradient of about 1000, one lr serves all. The
    # clip multiplies a step along a constant gradient by 0.5^gamma, so that this allows what 0.1 allows Adam.
    groups = [{"params": [number()], "gamma": gamma, "lr": 0.1 * 2**gamma * 1000 ** (gamma - 1)} for gamma in gammas]
    return Anon(groups, betas=(0.5, 0.75), project=Box(-1, 1))


def assert_heads_for_minus_one(places: Sequence[float]) -> None:
    falls = [before - after for before, after in pairwise(places)]
    assert min(falls) > 0, f"turned: {places}"
    assert falls == sorted(falls), f"slows down from one doubling to the next: {places}"


FOLLOW = Guard(clip=3.0, touch=False, brake=False, follow=True)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.5])
def test_who_follows_heads_for_the_optimum_of_the_papers_example(gamma):
    """What psi rose to at a rare large gradient it keeps, so that none of the small ones after it weighs more."""
    groups = [{"params": [number()], "lr": 0.1 * 2**gamma * 1000 ** (gamma - 1)}]
    optimizer = Anon(groups, gamma=gamma, betas=(0.5, 0.75), project=Box(-1, 1), guard=FOLLOW)
    places = [place for (place,) in follow(optimizer, periods=(80, 160, 320))]
    assert_heads_for_minus_one(places)
    assert places[-1] < -0.15


def test_default_heads_for_the_optimum_of_the_papers_example():
    gammas = (0.5, 1.0, 1.5)
    # Doublings of the time, always at the end of a period, so that no ripple inside a period is compared.
    places = follow(anon_on_the_example(gammas), periods=(80, 160, 320))
    for of_gamma in zip(*places, strict=True):
        assert_heads_for_minus_one(of_gamma)
        assert of_gamma[-1] < -0.07


@pytest.mark.slow
def test_default_heads_for_the_optimum_for_100_000_steps():
    places = follow(anon_on_the_example((0.5, 1.0, 1.5)), periods=(80, 160, 320, 640, 990))
    for of_gamma in zip(*places, strict=True):
        assert_heads_for_minus_one(of_gamma[:-1])
        assert of_gamma[-1] < of_gamma[-2]


@pytest.mark.slow
def test_default_heads_for_the_optimum_for_a_million_steps():
    doublings = [40 * 2**k for k in range(8)]
    (*places, last) = (place for (place,) in follow(anon_on_the_example((1.0,)), periods=[*doublings, 9900]))
    assert_heads_for_minus_one(places)
    assert last < min(*places, -0.12)


def test_adam_turns_on_the_papers_example():
    class ProjectedAdam(torch.optim.Adam):
        def step(self) -> None:
            super().step()
            with torch.no_grad():
                self.param_groups[0]["params"][0].clamp_(-1, 1)

    places = [place for (place,) in follow(ProjectedAdam([number()], lr=0.1, betas=(0.5, 0.75)), (20, 80))]
    assert min(places) > 0.99


def test_who_forgets_soon_goes_adams_way_on_the_papers_example():
    """Why `beta3=None` and a small beta3 are no defaults: the rare large gradient is lost (None: with beta2 = 0.75)."""
    optimizer = anon_on_the_example((1.0,) * 5)
    for group, beta3 in zip(optimizer.param_groups, (None, 0.0, 0.1, 0.2, 0.3), strict=True):
        group["beta3"] = beta3
    *_, places = follow(optimizer, periods=(20, 80))
    assert min(places) > 0.05
    assert min(places[:3]) > 0.98


def test_a_plain_clamp_of_the_update_turns_on_the_papers_example():
    """The guard that was not taken: the printed preconditioner at gamma = 1, each step cut to lr."""
    x = m = s = w = psi2 = 0.0
    for t in range(1, 160 * PERIOD + 1):
        g = reddi_gradient(t)
        m, s, w = 0.5 * m + 0.5 * g, 0.75 * s + 0.25 * g * g, 0.75 * w + 0.25
        if t & (t - 1) == 0:
            psi2 = s / w if t == 1 else 0.5 * psi2 + 0.5 * s / w
            s = w = 0.0
        step = m / (1 - 0.5**t) / math.sqrt(psi2)
        x = min(max(x - 0.1 / math.sqrt(t) * min(max(step, -1.0), 1.0), -1.0), 1.0)
    assert x > 0.99


# 2. Rows first seen late, after the last refresh.


@pytest.mark.parametrize(
    ("gamma", "lrs", "most"),
    # Measured: 12 and 7 at gamma 1 (printed 26 and 34, AdamW 4 to 6), 16 at -0.5 (printed 46); one seed differs
    # from another by 0.5 to 2 points, printed by 3 to 7.
    [(1.0, (3e-3, 1e-2), (16, 10)), (-0.5, (1.0,), (25,))],
)
def test_rows_first_seen_late_are_learnt(gamma, lrs, most):
    for lr, bound in zip(lrs, most, strict=True):
        guarded = mean_score(LateRows, partial(Anon, gamma=gamma), lr, seeds=3)
        printed = mean_score(LateRows, partial(Anon, gamma=gamma, guard=None), lr, seeds=3)
        assert guarded < bound
        assert guarded < printed - 8


# 3. Where rows or pixels are often without gradient: an embedding under Zipf's law, an MLP on digits.


@pytest.mark.parametrize(
    ("kind", "lrs", "seeds"),
    [
        (ZipfBags, (1e-2, 3e-2), 3),
        (Digits, (3e-3, 1e-2, 3e-2), 5),
        pytest.param(ZipfBags, (3e-3, 1e-2, 3e-2), 8, marks=pytest.mark.slow),
    ],
)
def test_default_reaches_adamw_within_a_point(kind, lrs, seeds):
    # More error than AdamW on the same seed, in points: 0.6 on the bags (standard deviation between seeds 0.2 at
    # gamma 1, 0.3 at 1.1), 0.2 on digits (0.4).
    adamw = tuned(kind, AdamW, lrs, seeds, schedule=cosine)
    for gamma in (1.0, 1.1):
        assert tuned(kind, partial(Anon, gamma=gamma), lrs, seeds, schedule=cosine) < adamw + 1
    # Why there are guards at all.
    assert tuned(kind, partial(Anon.paper, gamma=1.0), lrs, 1, schedule=cosine) > adamw + 20


# 4. A language model with tied embeddings.


class WideTiedLanguageModel(TiedLanguageModel):
    words, width, steps, chains = 8192, 64, 1000, 1024


def assert_language_model_keeps_up(kind: type[TiedLanguageModel], lrs: Sequence[float], seeds: int) -> None:
    how = {"max_norm": 1.0}
    adamw = tuned(kind, partial(AdamW, weight_decay=0.1), lrs, seeds, **how)
    anon = tuned(kind, partial(Anon, gamma=1.0, weight_decay=0.1), lrs, seeds, **how)
    printed = tuned(kind, partial(Anon.paper, gamma=1.0, weight_decay=0.1), lrs, seeds=1, **how)
    # On the same seed the two differ by 0.001 in the mean, with a standard deviation of 0.0025.
    assert anon < adamw + 0.01
    assert printed > adamw + 0.05


def test_tied_language_model_keeps_up_with_adamw():
    assert_language_model_keeps_up(TiedLanguageModel, (4e-3, 8e-3, 1.6e-2), seeds=2)


@pytest.mark.slow
def test_wide_tied_language_model_keeps_up_with_adamw():
    assert_language_model_keeps_up(WideTiedLanguageModel, (2e-3, 4e-3, 8e-3), seeds=1)


@pytest.mark.parametrize(
    ("kind", "lrs", "seeds", "how", "most"),
    [
        (LateRows, (3e-3, 1e-2), 3, {}, 1.0),  # measured: 0.1 points more error than AdamW; the default 7 and 2.5
        (ZipfBags, (1e-2, 3e-2), 3, {"schedule": cosine}, 0.5),  # 0.1; the default 2.0 and 0.5
        (Digits, (3e-3, 1e-2, 3e-2), 5, {"schedule": cosine}, 0.7),  # at most 0.3; the default 2.1 at 3e-3
        (FewWords, (1e-2, 2e-2, 4e-2, 8e-2), 20, {}, 0.05),  # 0.02 of a loss of 1; the default 0.3
        (TiedLanguageModel, (4e-3, 8e-3), 1, {"max_norm": 1.0}, 0.02),  # 0.006; the default 0.06 at 4e-3
    ],
)
def test_who_follows_does_as_adamw_does_at_each_learning_rate(kind, lrs, seeds, how, most):
    for lr in lrs:
        adamw = mean_score(kind, AdamW, lr, seeds, **how)
        assert mean_score(kind, partial(Anon, gamma=1.0, guard=FOLLOW), lr, seeds, **how) < adamw + most


def test_who_follows_learns_late_rows_faster_than_the_default():
    for lr in (3e-3, 1e-2):
        default, following = (mean_score(LateRows, partial(Anon, gamma=1.0, guard=g), lr, 3) for g in (Guard(), FOLLOW))
        assert following + 2 < default


# 5. The largest single step.


def averaged(gradients: Tensor, beta1: float = 0.9) -> Tensor:
    """m_hat after each of these gradients, straight from its definition."""
    m, found = torch.zeros_like(gradients[0]), []
    for t, gradient in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * gradient
        found.append(m / (1 - beta1**t))
    return torch.stack(found)


def quiet_then_loud(kind: str) -> Tensor:
    """1000 gradients of nothing, or next to nothing, on all coordinates or on all but 8 rows; then 100 large ones."""
    rng = torch.Generator().manual_seed(0)
    gradients = torch.randn(1100, 64, 4, generator=rng, dtype=torch.float64)
    gradients[1000:] *= 100
    if kind == "embedding":
        gradients[:1000, 8:] = 0
    else:
        gradients[:1000] *= {"silent": 0.0, "faint": 1e-6}[kind]
    return gradients


def steps_of(make: Make, gradients: Tensor, lr: float) -> Tensor:
    """How far each coordinate moves at each step."""
    parameter = torch.zeros_like(gradients[0], requires_grad=True)
    optimizer = make([parameter], lr=lr)
    sizes = []
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
        sizes.append((parameter.detach() - before).abs())
    return torch.stack(sizes)


@pytest.mark.parametrize("kind", ["silent", "faint", "embedding"])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.1, 2.0])
def test_no_step_is_larger_than_the_clip_allows(kind, gamma):
    """A second moment is no less than (m_hat / clip)^2, whatever was seen of it."""
    lr, gradients = 0.01, quiet_then_loud(kind)
    m_hat = averaged(gradients).abs()
    allowed = lr * m_hat * (m_hat / 0.5) ** -gamma
    allowed[m_hat == 0] = 0

    guarded = steps_of(partial(Anon, gamma=gamma), gradients, lr)
    rounding = torch.finfo(torch.float64).eps * guarded.cumsum(0)  # of the parameter, from which a step is read
    assert (guarded <= allowed * (1 + 1e-9) + rounding).all()
    assert guarded[1000:].amax((1, 2)).min() > 0
    # Among loud gradients, of about 100, no step is far from their typical one.
    assert guarded[1005:].max() < 10 * lr * 100 ** (1 - gamma)

    printed = steps_of(partial(Anon.paper, gamma=gamma), gradients, lr)
    assert (printed[1000:1023] / allowed[1000:1023]).max() > 1000


# 6. Fine-tuning: 60 steps from a zero-initialised or a pretrained start.


@pytest.mark.parametrize(("kind", "ratios"), [(LowRank, (1.0, 1.05)), (FewWords, (1.1, 1.1))])
def test_fine_tuning_reaches_adamw(kind, ratios):
    # Means of 20 seeds, gamma 1 and 1.1: 0.97 and 1.02 of AdamW's loss on LowRank, below 1.1 on FewWords.
    lrs = (1e-2, 1.4e-2, 2e-2, 2.8e-2, 4e-2, 5.6e-2, 8e-2, 1.1e-1)
    adamw = tuned(kind, AdamW, lrs, seeds=20)
    for gamma, ratio in zip((1.0, 1.1), ratios, strict=True):
        assert tuned(kind, partial(Anon, gamma=gamma), lrs, seeds=20) < ratio * adamw


@pytest.mark.parametrize(
    ("kind", "gamma", "lr"),
    [
        (LowRank, -0.5, 30.0),
        (LowRank, 0.0, 3.0),
        (LowRank, 0.5, 0.3),
        (LowRank, 1.0, 3e-2),
        (LowRank, 1.1, 1e-2),
        (FewWords, -0.5, 1.0),
        (FewWords, 0.0, 0.3),
        (FewWords, 0.5, 0.3),
        (FewWords, 1.0, 3e-2),
        (FewWords, 1.1, 3e-2),
    ],
)
def test_fine_tuning_makes_progress_and_never_blows_up(kind, gamma, lr):
    for seed in range(5):
        run = train(kind(seed), partial(Anon, gamma=gamma), lr)
        assert run.score < 0.6 * kind(seed).score()
        assert run.worst_loss < 1.5 * run.first_loss


@pytest.mark.parametrize("gamma", [-1.0, -0.5, 0.0, 0.5, 1.0, 1.1, 2.0])
def test_rows_that_never_appear_keep_every_bit(gamma):
    trial = FewWords(0)
    embedding = trial.model[0].weight
    before = embedding.detach().clone()
    train(trial, partial(Anon, gamma=gamma), lr=1e-2)
    assert torch.equal(embedding[FewWords.used :], before[FewWords.used :])
    assert (embedding[: FewWords.used] != before[: FewWords.used]).any(1).all()
