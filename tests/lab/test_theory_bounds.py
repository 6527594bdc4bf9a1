"""The bounds: by hand, against print, and against what Anon really loses."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from anon_lab.theory import TheoremSchedule, convex_regret_bound, nonconvex_bound, refresh_times, v_range
from anon_lab.theory import __main__ as looseness
from anon_optim import Anon, Box, Guard
from oracle import Array

GAMMAS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
GROWTHS = (1.25, 2.0, 3.0)


def parameter(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# Theorem 3. Every problem is played on [-1, 1]^d, so D = 2, with gradients in [-1, 1], so G = 1.


@dataclass(frozen=True)
class Online:
    """Rounds of losses; `data[t]` makes the loss of round t + 1."""

    data: Array
    loss: Callable[[Array, Array], Array]
    gradient: Callable[[Array, Array], Array]

    def best(self, T: int) -> float:
        """The smallest total loss of a fixed point in T rounds."""
        d = self.data.shape[-1]
        found = minimize(
            lambda x: self.loss(self.data[:T], x).sum(),
            np.zeros(d),
            jac=lambda x: self.gradient(self.data[:T], x).sum(0),
            bounds=[(-1, 1)] * d,
            options={"ftol": 1e-14},
        )
        return found.fun


def linear(slopes: Array) -> Online:
    return Online(slopes, lambda slope, x: (slope * x).sum(-1), lambda slope, x: slope)


def quadratic(centres: Array) -> Online:
    return Online(centres, lambda centre, x: ((x - centre) ** 2).sum(-1) / 4, lambda centre, x: (x - centre) / 2)


def logistic(features: Array) -> Online:
    return Online(
        features,
        lambda a, x: np.log1p(np.exp(-(a * x).sum(-1))),
        lambda a, x: -a / (1 + np.exp((a * x).sum(-1, keepdims=True))),
    )


CHECKPOINTS = (1, 2, 20, 130)


@functools.cache
def games_and_bests(d: int) -> list[tuple[Online, dict[int, float]]]:
    T = CHECKPOINTS[-1]
    rng = np.random.default_rng(d)
    uniform = rng.uniform(-1, 1, size=(4, T, d))
    drifting = 0.3 * np.sign(uniform[0, 0]) + 0.7 * uniform[0]
    rare = np.where(rng.random((T, d)) < 0.05, uniform[1], 0.0)  # mostly no gradient: v is as large as it can be
    games = [linear(drifting), linear(rare), quadratic(uniform[2]), logistic(uniform[3])]
    return [(game, {T: game.best(T) for T in CHECKPOINTS}) for game in games]


def largest_regrets(make: Callable[..., Anon], d: int, decay: float) -> dict[int, float]:
    """The largest regret on any game at each checkpoint; every game is a tensor of its own."""
    games = games_and_bests(d)
    points = [torch.full((d,), 0.5, dtype=torch.float64) for _ in games]
    optimizer = make(points, project=Box(-1.0, 1.0))
    schedule = TheoremSchedule(optimizer, p=0.5, momentum_decay=decay)
    lost, largest = np.zeros(len(games)), {}
    for t in range(1, CHECKPOINTS[-1] + 1):
        for i, ((game, _), point) in enumerate(zip(games, points, strict=True)):
            x = point.numpy()
            lost[i] += game.loss(game.data[t - 1], x)
            point.grad = torch.from_numpy(game.gradient(game.data[t - 1], x).copy())
        optimizer.step()
        schedule.step()
        if t in CHECKPOINTS:
            largest[t] = max(total - best[t] for total, (_, best) in zip(lost, games, strict=True))
    return largest


@pytest.mark.parametrize("guard", [None, Guard()], ids=["printed", "guarded"])
@pytest.mark.parametrize("eps", [1e-4, 1e-16])
@pytest.mark.parametrize("growth", GROWTHS)
def test_regret_stays_below_the_bound(growth: float, eps: float, guard: Guard | None) -> None:
    for i, gamma in enumerate(GAMMAS):
        d = (1, 6)[i % 2]
        lr, beta1, decay = ((0.03, 0.9, 0.99), (0.3, 0.5, 0.9), (3.0, 0.0, 1.0))[i % 3]
        make = functools.partial(
            Anon, lr=lr, gamma=gamma, betas=(beta1, 0.99), growth=growth, eps=eps, guard=guard
        )  # fmt: skip
        for T, regret in largest_regrets(make, d, decay).items():
            assert regret <= convex_regret_bound(
                T, dim=d, diameter=2.0, gradient_bound=1.0, lr=lr, gamma=gamma, beta1=beta1, momentum_decay=decay,
                growth=growth, eps=eps, guard=guard,
            )  # fmt: skip


SLOPE = st.sampled_from([-1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    slopes=st.lists(st.tuples(SLOPE, SLOPE), min_size=1, max_size=30),
    follow=st.booleans(),
    gamma=st.floats(-1, 2),
    growth=st.sampled_from([*GROWTHS, math.inf]),
    eps=st.sampled_from([1e-1, 1e-4, 1e-16]),
    lr=st.floats(1e-3, 10),
    betas=st.sampled_from([(0.0, 0.5), (0.5, 0.75), (0.9, 0.999)]),
    decay=st.floats(0.1, 1),
    p=st.floats(0.1, 0.9),
    guard=st.sampled_from([None, Guard(), Guard(clip=0.2, touch=False)]),
    bias_correction=st.booleans(),
)
def test_no_sequence_of_linear_losses_beats_the_bound(
    slopes: list[tuple[float, float]], follow: bool, gamma: float, growth: float, eps: float, lr: float,
    betas: tuple[float, float], decay: float, p: float, guard: Guard | None, bias_correction: bool,
) -> None:  # fmt: skip
    """Also where the adversary looks at x and always charges it for being away from 0."""
    x = parameter(1.0, -1.0)
    optimizer = Anon(
        [x], lr, gamma, betas, eps, growth=growth, guard=guard, project=Box(-1.0, 1.0), bias_correction=bias_correction
    )
    schedule = TheoremSchedule(optimizer, p, decay)
    low, high = v_range(gamma, 1.0, eps, guard)
    lost, total = 0.0, torch.zeros(2, dtype=torch.float64)
    for T, slope in enumerate(slopes, start=1):
        x.grad = torch.tensor(slope, dtype=torch.float64)
        if follow:
            x.grad = x.grad.abs() * x.detach().sign()
        lost, total = lost + (x.grad @ x).item(), total + x.grad
        optimizer.step()
        schedule.step()
        v = optimizer.state[x]["preconditioner"]
        assert ((v == 0) | (v >= low * (1 - 1e-9)) & (v <= high * (1 + 1e-9))).all()
        assert lost + total.abs().sum().item() <= convex_regret_bound(
            T, dim=2, diameter=2.0, gradient_bound=1.0, lr=lr, gamma=gamma, beta1=betas[0], momentum_decay=decay,
            growth=growth, eps=eps, p=p, guard=guard,
        )  # fmt: skip


def test_convex_bound_by_hand() -> None:
    of_all: dict[str, Any] = {"diameter": 2.0, "gradient_bound": 1.0, "lr": 0.5, "gamma": 0.0}
    # 2^2 / (2 * 0.5) sqrt(1) + 0.5 sqrt(1), over 1 - beta1
    assert convex_regret_bound(1, dim=1, beta1=0.5, **of_all) == pytest.approx(9.0)
    # refreshes at 1, 2, 4, so intervals end at 1, 3, 5; momenta 0.25, 0.125, ... from the second step on
    by_hand = 4 * (1 + math.sqrt(3) + math.sqrt(5)) + 2 * (0.25 + 0.125 + 0.0625 + 0.03125) + 0.5 * math.sqrt(5)
    bound = convex_regret_bound(5, dim=7, beta1=0.5, momentum_decay=0.5, **of_all)
    assert bound == pytest.approx(7 * 2 * by_hand)
    with pytest.raises(ValueError, match=r"eps: 0, expected a finite number > 0"):
        convex_regret_bound(5, dim=7, eps=0, **of_all)
    with pytest.raises(ValueError, match=r"p: 1.0, expected a number in \(0, 1\)"):
        convex_regret_bound(5, dim=7, p=1.0, **of_all)


def test_without_the_dimension_the_appendix_s_bound_is_false_and_ours_is_within_a_factor_of_12() -> None:
    """Gradients of 1 from x = 1 at gamma = 0: x falls as 1 - 2 lr sqrt(t), and reaches -1 at T = 1 / lr^2."""
    d, lr, T = 100, 0.05, 400
    x = torch.ones(d, dtype=torch.float64, requires_grad=True)
    optimizer = Anon.paper([x], lr=lr, gamma=0.0, betas=(0.0, 0.999), project=Box(-1.0, 1.0))
    schedule = TheoremSchedule(optimizer)
    regret = 0.0
    for _ in range(T):
        regret += (x + 1).sum().item()
        x.grad = torch.ones_like(x)
        optimizer.step()
        schedule.step()
    # at gamma = 0 and beta1 = 0 the appendix has, with C_l = C_u = 1:
    appendix = (1 - 8**0.5) / (1 - 2**0.5) * 4 / lr * math.sqrt(T) + 4 / (2 * lr) + d * lr * math.sqrt(T)
    ours = convex_regret_bound(T, dim=d, diameter=2.0, gradient_bound=1.0, lr=lr, gamma=0.0, beta1=0.0)
    assert appendix < regret < ours < 12 * regret


RANGES: dict[str, Any] = {
    "T": st.integers(1, 10**9),
    "dim": st.integers(1, 1000),
    "gradient_bound": st.floats(1e-3, 1e3),
    "lr": st.floats(1e-4, 1e3),
    "gamma": st.floats(-2, 2),
    "beta1": st.floats(0, 0.99),
    "growth": st.sampled_from([1.1, 2.0, 5.0]),
    "eps": st.sampled_from([1e-16, 1e-4]),
}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(given=st.fixed_dictionaries({**RANGES, "diameter": st.floats(0.1, 10), "momentum_decay": st.floats(0.1, 0.99)}))
def test_convex_bound_is_below_the_printed_one_with_its_errata_corrected(given: dict[str, Any]) -> None:
    T, d, D, G, lr, beta1 = (given[k] for k in ("T", "dim", "diameter", "gradient_bound", "lr", "beta1"))
    C_l, C_u = v_range(given["gamma"], G, given["eps"])
    root_sum = math.sqrt(T) + sum(math.sqrt(a) for a in refresh_times(T, given["growth"])[1:])
    momenta = beta1 * (1 - given["momentum_decay"] ** T) / (1 - given["momentum_decay"])
    printed = d / (1 - beta1) * (
        D**2 / (C_l * lr) * root_sum + D**2 / (2 * C_l * lr) + D * G * momenta + G**2 * C_u * lr * math.sqrt(T)
    )  # fmt: skip
    assert convex_regret_bound(**given) <= printed * (1 + 1e-12)


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_convex_bound_grows_as_the_square_root(gamma: float, growth: float) -> None:
    # one power of the growth apart from another, because the sum over refreshes ripples in between
    near, far = (int(growth ** round(math.log(T, growth))) for T in (1e9, 1e12))
    of_both: dict[str, Any] = {"dim": 3, "diameter": 2.0, "gradient_bound": 1.0, "lr": 0.1, "eps": 1e-4}
    near_bound, far_bound = (
        convex_regret_bound(T, gamma=gamma, growth=growth, momentum_decay=0.99, **of_both) for T in (near, far)
    )
    assert math.log(far_bound / near_bound) / math.log(far / near) == pytest.approx(0.5, abs=0.002)


# Theorem 4, on f(x) = mean over j of h(a_j . x + b_j) with h(u) = u^2 / (1 + u^2), one j drawn at a step.
# |h'| <= 9 / (8 sqrt 3) and |h''| <= 2.


def test_mean_squared_gradient_stays_below_the_bound() -> None:
    d, count, seeds, T = 4, 12, 3, 128
    rng = np.random.default_rng(4)
    a, b = rng.uniform(-1, 1, size=(count, d)), rng.normal(size=count)
    smoothness = 2 * np.linalg.eigvalsh(a.T @ a / count).max()
    gradient_bound = 9 / (8 * math.sqrt(3))

    def gradients(x: Array) -> Array:
        """Of each term, shape (count, d)."""
        u = a @ x + b
        return (2 * u / (1 + u**2) ** 2)[:, None] * a

    start = np.full(d, 1.0)
    u = a @ start + b
    gap = float(np.mean(u**2 / (1 + u**2)))  # inf f >= 0
    for gamma, growth, (eps, guard) in itertools.product(GAMMAS, (1.25, 3.0), ((1e-2, None), (1e-16, Guard()))):
        of_both: dict[str, Any] = {"lr": 0.1, "gamma": gamma, "growth": growth, "eps": eps, "guard": guard}
        points = [torch.from_numpy(start.copy()).requires_grad_() for _ in range(seeds)]
        optimizer = Anon(points, betas=(0.8, 0.99), **of_both)
        schedule = TheoremSchedule(optimizer, p=0.5)
        squares = np.zeros(seeds)
        for _ in range(T):
            for i, x in enumerate(points):
                terms = gradients(x.detach().numpy())
                squares[i] += (terms.mean(0) ** 2).sum()
                x.grad = torch.from_numpy(terms[rng.integers(count)])
            optimizer.step()
            schedule.step()
        bound = nonconvex_bound(
            T, dim=d, smoothness=smoothness, gap=gap, gradient_bound=gradient_bound, beta1=0.8, **of_both
        )
        assert squares.mean() / T <= bound


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    given=st.fixed_dictionaries(
        {**RANGES, "smoothness": st.floats(1e-2, 1e2), "gap": st.floats(0, 100), "p": st.floats(0.1, 0.9)}
    )
)
def test_nonconvex_bound_is_below_the_printed_one_with_its_errata_corrected(given: dict[str, Any]) -> None:
    T, d, N, lr, beta1, L, p = (
        given[k] for k in ("T", "dim", "gradient_bound", "lr", "beta1", "smoothness", "p")
    )  # fmt: skip
    C_l, C_u = v_range(given["gamma"], N, given["eps"])
    K = (1 / (1 - beta1) + 1 / 2) * L * lr**2 * N**2 * C_u**2 * d
    integral = math.log(T) if p == 0.5 else (T ** (1 - 2 * p) - 1) / (1 - 2 * p)
    powers = sum((a - (k > 0)) ** -p for k, a in enumerate(refresh_times(T, given["growth"])))
    J = beta1**2 * d * N**2 / (4 * L * (1 - beta1) ** 2) + 3 * d * N**2 / (1 - beta1) * lr * C_u * powers
    printed = T ** (p - 1) / (lr * C_l) * (given["gap"] + K * integral + J + K)
    assert nonconvex_bound(**given, bias_correction=False) <= printed * (1 + 1e-12)


def test_nonconvex_bound_by_hand() -> None:
    of_both: dict[str, Any] = {"dim": 2, "smoothness": 3.0, "gap": 5.0, "gradient_bound": 1.0, "gamma": 1.0}
    # eps = 1/3: sigma in [1/3, 4/3], v in [sqrt 3 / 2, sqrt 3]; refreshes at 1, 2, 4
    low, high = 3**0.5 / 2, 3**0.5
    K = 1.5 / 1 * 3 * 2 * high**2 * 0.25
    rates = [0.5 / 0.5, 0.5 * 2**-0.5 / 0.75, 0.5 * 0.5 / (15 / 16)]
    J = 2 / 0.5 * (0.5 * high * 0.5 * 0.5 + 2 * (high - low) * sum(rates) + low * rates[0])
    by_hand = 4**-0.5 / (0.5 * low) * (5 + K * (1 + math.log(4)) + J)
    assert nonconvex_bound(4, lr=0.5, beta1=0.5, eps=1 / 3, **of_both) == pytest.approx(by_hand)
    with pytest.raises(ValueError, match="gap: -1, expected a number >= 0"):
        nonconvex_bound(4, lr=0.5, **{**of_both, "gap": -1})


@pytest.mark.parametrize("gamma", GAMMAS)
def test_nonconvex_bound_falls_as_ln_T_over_its_root(gamma: float) -> None:
    near, far = 2**30, 2**40
    of_both: dict[str, Any] = {"dim": 3, "smoothness": 2.0, "gap": 1.0, "gradient_bound": 1.0, "lr": 0.1, "eps": 1e-4}
    near_bound, far_bound = (nonconvex_bound(T, gamma=gamma, **of_both) for T in (near, far))
    slope = math.log(far_bound / near_bound) / math.log(far / near)
    assert -0.5 - 1e-3 < slope < -0.5 + 1 / math.log(near)


def test_the_command_prints_losses_beside_their_bounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(looseness, "STEPS", 8)
    monkeypatch.setattr(looseness, "GAMMAS", (0.0, 1.0))
    looseness.main()
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("printed", "def"))
    ]
    assert [row[:4] for row in rows] == [
        ["printed", "1e-04", "0", "1"],
        ["printed", "1e-04", "1", "1e2"],
        ["printed", "1e-16", "0", "1"],
        ["printed", "1e-16", "1", "1e8"],
        ["default", "1e-16", "0", "1"],
        ["default", "1e-16", "1", "2e8"],
    ]
    for row in rows:
        regret, bound, _, mean_square, its_bound = map(float, row[4:])
        assert regret < bound
        assert mean_square < its_bound
