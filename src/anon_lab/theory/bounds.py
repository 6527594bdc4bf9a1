"""What Anon can lose at most: Theorems 3 and 4 with corrected constants, each derived in docs/theory.md.

Symbols, as there: d = dim, D = diameter (largest distance within the feasible set along a coordinate), G =
gradient_bound (largest |gradient| along a coordinate), eta_t = lr t^-p, C_l <= v <= C_u, a_k the refresh times up to T.
beta2 and beta3 do not appear, because averages of numbers in a range stay in it.
"""

import math
from typing import Any, NamedTuple

from anon_optim import Guard, _idu
from anon_optim._idu import Growth


class VRange(NamedTuple):
    """What v = 1/psi lies between."""

    lower: float
    """C_l"""
    upper: float
    """C_u"""


def refresh_times(T: int, growth: Growth = 2.0) -> list[int]:
    """a_1, ..., a_n: the refresh times up to T."""
    return _idu.refresh_times(T, growth)


# sigma, an average of squared gradients plus eps, lies in [eps, G^2 + eps], and psi^2 is an average of sigma^gamma:
#     v between eps^(-gamma/2) and (G^2 + eps)^(-gamma/2), the first being the larger for gamma > 0.
# The sticky clip lowers v as far as (clip / |m_hat|)^gamma >= (clip / G)^gamma.
# What psi follows is a part of such an average, too, and lowers v no further than that.
# The brake divides v by R^(gamma/2), R <= 16, in tensors of at least 64 elements; within an interval it only rises, as
# the clip's psi does.


def v_range(
    gamma: float, gradient_bound: float, eps: float = 1e-16, guard: Guard | None = None, dim: int = 1
) -> VRange:
    """C_l and C_u, for the printed algorithm or under a guard, of a tensor of `dim` elements."""
    _expect_positive(gradient_bound=gradient_bound, eps=eps)
    sigmas = eps, gradient_bound**2 + eps
    lower, upper = sorted(sigma ** (-gamma / 2) for sigma in sigmas)
    if guard is not None and gamma > 0:
        lower = min(lower, (guard.clip / gradient_bound) ** gamma)
        if guard.brake and dim >= _idu.BRAKED:
            lower *= _idu.TAIL ** (-gamma / 2)
    return VRange(lower, upper)


# Theorem 3, with e_k = a_{k+1} - 1 the last step of the k-th interval (T for the last one):
#     regret <= d/(1 - beta1) [ D^2 / (2 C_l lr) sum_k e_k^p  +  D G sum_{t>1} beta_{1,t}  +  C_u G^2 lr/2 sum_t t^-p ]


def convex_regret_bound(
    T: int,
    *,
    dim: int,
    diameter: float,
    gradient_bound: float,
    lr: float,
    gamma: float = 1.0,
    beta1: float = 0.9,
    momentum_decay: float = 1.0,
    growth: Growth = 2.0,
    eps: float = 1e-16,
    p: float = 0.5,
    guard: Guard | None = None,
) -> float:
    """At most this much more than the best fixed point is lost in T rounds of online convex optimization.

    For `Anon.paper` under `TheoremSchedule(optimizer, p, momentum_decay)`, projected onto the feasible set; with
    `guard`, for `Anon` with that guard on a :class:`Box`. With momentum_decay < 1 and p = 1/2 it is O(sqrt(T))."""
    _expect_run(T, dim, beta1, p)
    _expect_positive(diameter=diameter, lr=lr)
    _expect("momentum_decay", momentum_decay, 0 < momentum_decay <= 1, "a number in (0, 1]")
    v = v_range(gamma, gradient_bound, eps, guard, dim)
    ends = [a - 1 for a in refresh_times(T, growth)[1:]] + [T]
    distance = diameter**2 / (2 * v.lower * lr) * sum(e**p for e in ends)
    momentum = diameter * gradient_bound * _sum_of_momenta(T, beta1, momentum_decay)
    steps = v.upper * gradient_bound**2 * lr / 2 * T ** (1 - p) / (1 - p)
    return dim / (1 - beta1) * (distance + momentum + steps)


def _sum_of_momenta(T: int, beta1: float, decay: float) -> float:
    """beta1 (decay + decay^2 + ... + decay^(T-1)): the first step has no momentum yet."""
    if decay == 1:
        return beta1 * (T - 1)
    return beta1 * decay * (1 - decay ** (T - 1)) / (1 - decay)


# Theorem 4, with alpha_t = eta_t / (1 - beta1^t) under bias correction and eta_t without:
#     mean |grad f|^2 <= T^(p-1) / (lr C_l) [ f(x_1) - f*  +  K sum_t t^-2p  +  J ]
#     K = (1 + beta1) / (2 (1 - beta1)) L d G^2 C_u^2 lr^2
#     J = d G^2 / (1 - beta1) [ beta1 C_u eta_T  +  2 (C_u - C_l) sum_k alpha_{a_k}  +  C_l alpha_1 ]


def nonconvex_bound(
    T: int,
    *,
    dim: int,
    smoothness: float,
    gap: float,
    gradient_bound: float,
    lr: float,
    gamma: float = 1.0,
    beta1: float = 0.9,
    growth: Growth = 2.0,
    eps: float = 1e-16,
    p: float = 0.5,
    bias_correction: bool = True,
    guard: Guard | None = None,
) -> float:
    """The mean of E |grad f(x_t)|^2 over T steps is at most this, for `TheoremSchedule(optimizer, p)`.

    `smoothness` is the Lipschitz constant of grad f, `gap` is f(x_1) - inf f, and `gradient_bound` holds for the noisy
    gradients, whose mean is grad f. With p = 1/2 it is O(ln T / sqrt(T))."""
    _expect_run(T, dim, beta1, p)
    _expect_positive(smoothness=smoothness, lr=lr)
    _expect("gap", gap, gap >= 0, "a number >= 0")
    v = v_range(gamma, gradient_bound, eps, guard, dim)
    rates = [lr * a**-p / (1 - beta1**a if bias_correction else 1.0) for a in refresh_times(T, growth)]
    noise = dim * gradient_bound**2
    K = (1 + beta1) / (2 * (1 - beta1)) * smoothness * noise * (v.upper * lr) ** 2
    ups_and_downs = 2 * (v.upper - v.lower) * sum(rates) + v.lower * rates[0]
    J = noise / (1 - beta1) * (beta1 * v.upper * lr * T**-p + ups_and_downs)
    return T ** (p - 1) / (lr * v.lower) * (gap + K * _sum_of_powers(T, 2 * p) + J)


def _sum_of_powers(T: int, q: float) -> float:
    """1 + the integral of t^-q from 1 to T, which is at least the sum of t^-q over t = 1, ..., T."""
    return 1 + (math.log(T) if q == 1 else (T ** (1 - q) - 1) / (1 - q))


def _expect(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"Invalid {name}: {value!r}, expected {expected}")


def _expect_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        _expect(name, value, 0 < value < math.inf, "a finite number > 0")


def _expect_run(T: int, dim: int, beta1: float, p: float) -> None:
    _expect("T", T, T >= 1, "at least one step")
    _expect("dim", dim, dim >= 1, "at least one coordinate")
    _expect("beta1", beta1, 0 <= beta1 < 1, "a number in [0, 1)")
    _expect("p", p, 0 < p < 1, "a number in (0, 1)")
