"""Theorem 1, the theorems' schedules, the range of v, and the example on which Adam does not converge."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anon_lab import online
from anon_lab.theory import TheoremSchedule, refresh_times, v_range
from anon_optim import Anon, Box, Guard
from oracle import Array, Guarded, ema, refresh_set

# Theorem 1, on the frame that all these optimizers share: theta <- theta - eta(n) phi_n(g_{1:n}) / psi_n(g_{1:n})

Psi = Callable[[list[Array]], Array]


def frame(psi: Psi, eta: Callable[[int], float], steps: int = 60) -> Array:
    """All iterates on a bowl whose gradient is noisy, with phi an EMA."""
    rng = np.random.default_rng(0)
    theta, history, iterates = np.array([2.0, -1.0, 0.5]), [], []
    for n in range(1, steps + 1):
        history.append(np.array([1.0, 10.0, 0.1]) * theta + rng.normal(size=3))
        theta = np.clip(theta - eta(n) * ema(history, 0.9) / psi(history), -3, 3)
        iterates.append(theta)
    return np.array(iterates)


def rmsprop(history: list[Array]) -> Array:
    return np.sqrt(ema([g**2 for g in history], 0.99) + 1e-8)


def f(n: int) -> float:
    return (1 - 0.99**n) ** 0.5


def rmsprop_without_bias_correction(history: list[Array]) -> Array:
    """sqrt(s + eps (1 - beta2^n)): what RMSprop is before s is divided, hence f(n) times it."""
    n = len(history)
    s = sum(0.01 * 0.99 ** (n - i) * g**2 for i, g in enumerate(history, start=1))
    return np.sqrt(s + 1e-8 * (1 - 0.99**n))


def adaptivity(psi: Psi, history: list[Array], h: float = 1e-4) -> Array:
    up, down = (np.log(psi([math.exp(sign * h) * g for g in history])) for sign in (1, -1))
    return (up - down) / (2 * h)


def histories(count: int, n: int) -> list[list[Array]]:
    rng = np.random.default_rng(1)
    return [list(rng.normal(size=(n, 3)) * 10.0 ** rng.integers(-5, 3)) for _ in range(count)]


def test_equal_adaptivity_means_proportional_by_a_function_of_the_step() -> None:
    for n in (1, 2, 7, 40):
        for history in histories(5, n):
            one, other = rmsprop(history), rmsprop_without_bias_correction(history)
            assert adaptivity(rmsprop, history) == pytest.approx(
                adaptivity(rmsprop_without_bias_correction, history), abs=1e-7
            )
            assert other / one == pytest.approx(f(n), rel=1e-12)


def test_such_preconditioners_differ_by_a_learning_rate_schedule_only() -> None:
    ours = frame(rmsprop, lambda n: 0.1 / n**0.5)
    theirs = frame(rmsprop_without_bias_correction, lambda n: f(n) * 0.1 / n**0.5)
    assert theirs == pytest.approx(ours, rel=1e-9, abs=1e-12)
    unscheduled = frame(rmsprop_without_bias_correction, lambda n: 0.1 / n**0.5)
    assert np.abs(unscheduled - ours).max() > 0.1


def test_theorem_1_needs_psi_of_zero_to_be_positive() -> None:
    """|x|_2 and |x|_1 respond to scale alike (A = 1), yet no f(n) takes one to the other: both are 0 at 0."""

    def norm2(history: list[Array]) -> Array:
        return np.sqrt(sum(g**2 for g in history))

    def norm1(history: list[Array]) -> Array:
        return np.array(sum(np.abs(g) for g in history))

    for history in histories(5, 2):
        for norm in (norm1, norm2):
            assert adaptivity(norm, history) == pytest.approx(1.0, abs=1e-7)
    level, lone = [np.ones(3), np.ones(3)], [np.ones(3), np.zeros(3)]
    assert norm1(level) / norm2(level) == pytest.approx(math.sqrt(2))
    assert norm1(lone) / norm2(lone) == pytest.approx(1.0)
    # positive at 0, they are told apart
    regular = [adaptivity(lambda h, norm=norm: np.sqrt(norm(h) ** 2 + 1), level) for norm in (norm1, norm2)]
    assert regular[0] == pytest.approx(4 / 5, abs=1e-7)
    assert regular[1] == pytest.approx(2 / 3, abs=1e-7)


# The schedules


def parameter(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_schedule_values_at_the_first_steps() -> None:
    x = parameter(1.0)
    optimizer = Anon([{"params": [x]}, {"params": [parameter(2.0)], "lr": 3.0, "betas": (0.5, 0.75)}], lr=0.6)
    schedule = TheoremSchedule(optimizer, p=0.5, momentum_decay=0.5)
    seen = []
    for _ in range(4):
        seen.append([(group["lr"], *group["betas"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    expected = [(1, 1), (1 / math.sqrt(2), 0.5), (1 / math.sqrt(3), 0.25), (0.5, 0.125)]
    assert [a for a, _ in seen] == [pytest.approx((0.6 * lr, 0.9 * beta1, 0.999)) for lr, beta1 in expected]
    assert [b for _, b in seen] == [pytest.approx((3.0 * lr, 0.5 * beta1, 0.75)) for lr, beta1 in expected]
    assert schedule.get_last_lr() == pytest.approx([0.6 / math.sqrt(5), 3.0 / math.sqrt(5)])


@pytest.mark.parametrize("bias_correction", [True, False])
def test_anon_under_the_schedule_is_the_oracle_with_numbers_changed_by_hand(bias_correction: bool) -> None:
    x = parameter(0.5, -0.2, 0.9)
    optimizer = Anon(
        [x], lr=0.3, gamma=1.5, guard=None, project=Box(-1.0, 1.0), bias_correction=bias_correction, eps=1e-4
    )
    schedule = TheoremSchedule(optimizer, p=0.7, momentum_decay=0.97)
    oracle = Guarded(
        x.detach().numpy(), gamma=1.5, eps=1e-4, clip=math.inf, floor=0.0, touch=False,
        bias_correction=bias_correction, project=lambda theta, _: np.clip(theta, -1, 1),
    )  # fmt: skip
    rng = np.random.default_rng(2)
    for t in range(1, 101):
        g = rng.normal(size=3)
        x.grad = torch.from_numpy(g)
        optimizer.step()
        schedule.step()
        oracle.lr, oracle.betas = 0.3 / t**0.7, (0.9 * 0.97 ** (t - 1), 0.999)
        oracle.step(g)
        assert x.detach().numpy() == pytest.approx(oracle.theta, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("make", [Anon, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax])
def test_a_run_goes_on_from_its_state_dicts_as_if_never_stopped(make: Any) -> None:
    gradients = np.random.default_rng(3).normal(size=(20, 2))

    def start() -> tuple[Tensor, Any, TheoremSchedule]:
        x = parameter(0.5, -0.2)
        optimizer = make([x], lr=0.1)
        return x, optimizer, TheoremSchedule(optimizer, p=0.5, momentum_decay=0.8)

    def play(x: Tensor, optimizer: Any, schedule: TheoremSchedule, part: Array) -> None:
        for g in part:
            x.grad = torch.from_numpy(g)
            optimizer.step()
            schedule.step()

    whole = start()
    play(*whole, gradients)
    first, second = start(), start()
    play(*first, gradients[:11])
    with torch.no_grad():
        second[0].copy_(first[0])
    for saved, loaded in zip(first[1:], second[1:], strict=True):
        loaded.load_state_dict(saved.state_dict())
    play(*second, gradients[11:])
    assert torch.equal(second[0], whole[0])
    assert second[1].param_groups[0]["betas"] == whole[1].param_groups[0]["betas"]
    # or from the optimizer alone, with torch's last_epoch
    third = TheoremSchedule(first[1], p=0.5, momentum_decay=0.8, last_epoch=10)
    assert third.get_last_lr() == pytest.approx([0.1 / math.sqrt(12)])
    assert first[1].param_groups[0]["betas"][0] == pytest.approx(0.9 * 0.8**11)


def test_schedule_keeps_a_tensor_lr_a_tensor_and_needs_betas_only_to_decay_them() -> None:
    lr = torch.tensor(0.4)
    optimizer = Anon([parameter(1.0)], lr=lr)
    schedule = TheoremSchedule(optimizer)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.2)
    sgd = torch.optim.SGD([parameter(1.0)], lr=0.4)
    assert TheoremSchedule(sgd, p=1.0).get_last_lr() == [0.4]
    with pytest.raises(ValueError, match=r"momentum_decay: 0.9, expected 1 for an optimizer without betas .*group 0"):
        TheoremSchedule(sgd, momentum_decay=0.9)
    with pytest.raises(ValueError, match=r"momentum_decay: 0, expected a number in \(0, 1\]"):
        TheoremSchedule(optimizer, momentum_decay=0)
    with pytest.raises(ValueError, match=r"p: -0\.5, expected a number >= 0"):
        TheoremSchedule(optimizer, p=-0.5)


# What the bounds are made of


def test_v_range_by_hand() -> None:
    assert v_range(1.0, 2.0, eps=0.25) == pytest.approx((4.25**-0.5, 2.0))
    assert v_range(-1.0, 2.0, eps=0.25) == pytest.approx((0.5, 4.25**0.5))
    assert v_range(0.0, 2.0) == (1.0, 1.0)
    assert v_range(1.0, 1.0) == pytest.approx((1.0, 1e8))
    # psi under the clip: (G / clip)^gamma, if that is more than a refresh can make it
    assert v_range(2.0, 2.0, 0.25, Guard(clip=0.1)).lower == pytest.approx(0.05**2)
    assert v_range(0.5, 2.0, 0.25, Guard(clip=1.0)).lower == pytest.approx(4.25**-0.25)
    assert v_range(1.0, 2.0, 0.25, Guard(clip=1.0)).lower == pytest.approx(4.25**-0.5)
    assert v_range(1.0, 2.0, 0.25, Guard()).lower == pytest.approx(0.5 / 2)
    assert v_range(0.5, 2.0, 0.25, Guard()).lower == pytest.approx(0.25**0.5)
    assert v_range(-1.0, 2.0, 0.25, Guard()) == v_range(-1.0, 2.0, 0.25)


def test_the_printed_range_of_v_is_left() -> None:
    """Constant gradients of size G make v = (G^2 + eps)^(-gamma/2), below the printed G^-gamma."""
    x = parameter(0.0)
    optimizer = Anon.paper([x], gamma=1.0, eps=1e-2)
    x.grad = torch.full_like(x, 0.5)
    optimizer.step()
    v = optimizer.state[x]["preconditioner"].item()
    assert v < 0.5**-1.0
    assert v == pytest.approx(v_range(1.0, 0.5, eps=1e-2).lower)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(growth=st.floats(1.01, 20), T=st.integers(1, 10**6), p=st.floats(0.05, 0.95))
def test_sums_over_refresh_times_are_geometric(growth: float, T: int, p: float) -> None:
    a = refresh_times(T, growth)
    assert a[0] == 1
    assert a[-1] <= T
    if T <= 3000:
        assert set(a) == refresh_set(growth, T)
    ratio = growth**-p
    assert sum(x**p for x in a) <= T**p / (1 - ratio) * (1 + 1e-12)
    assert sum(x**-p for x in a) <= 1 / (1 - ratio) * (1 + 1e-12)


def test_refresh_times_end_with_an_infinite_growth() -> None:
    assert refresh_times(1000, math.inf) == [1]
    assert refresh_times(1000, 3.0) == [1, 3, 9, 27, 81, 243, 729]


# Where Adam does not converge: f_t = 1010 x once in 101 steps, else -10 x, on [-1, 1]; -1 is best. Bounds are loose,
# so this looks at the default's own path, at the learning rate that suits each gamma and at the paper's, scaled alike.

DECADES = (10**5, 10**6, 10**7)


def at_decades(run: online.Run) -> tuple[list[float], list[float]]:
    indices = [run.t.index(T) for T in DECADES]
    return [run.x[i] for i in indices], [run.average_regret[i] for i in indices]


@pytest.mark.parametrize(("gamma", "lr"), [(0.5, 1.0), (1.0, 2.0), (1.5, 50.0)])
def test_the_guarded_default_converges_where_adam_does_not(gamma: float, lr: float) -> None:
    x, average = at_decades(online.run("Anon", gamma=gamma, lr=lr, noise=0))
    assert x[0] > x[1] > x[2]
    assert x[2] < -0.99
    assert average[0] > average[1] > average[2]
    assert average[2] < average[0] / 4
    x, average = at_decades(online.run("Anon", gamma=gamma, lr=0.1 * 1000 ** (gamma - 1), noise=0))
    assert 0 > x[0] > x[1] > x[2]
    assert average[0] > average[1] > average[2]
    x, average = at_decades(online.run("Adam", lr=lr, noise=0))
    assert x[2] > 0.99
    assert average[2] > 0.19
