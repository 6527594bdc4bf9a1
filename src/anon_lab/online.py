"""The noisy online problem, compiled: ten million steps of a scalar recursion in about a second.

    minimise the sum of f_t(x) = online_gradient(t) x over x in [-1, 1], seeing f_t' + N_t, with lr / sqrt(t)

Numba cannot call torch, so the recursions stand here once more, for one coordinate; tests hold them to the optimizers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from anon_lab import problems
from anon_optim import Guard, Storage, _idu
from anon_optim._idu import Growth

BEST = -1.0
"""The x that the regret compares with."""
NEAR = -0.9
"""From here down to -1, x counts as near the optimum."""

STATISTICS = ("gradient", "belief", "momentum")
"""What s averages: g^2, (g - m)^2 or m^2."""
EVERY_STEP = {"Adam": "gradient", "AMSGrad": "gradient", "AdaBelief": "belief", "AdaMomentum": "momentum"}
"""The optimizers whose psi changes at every step, with their statistics."""
OPTIMIZERS = ("Anon", "SGD", *EVERY_STEP)

NEVER = 2**62  # later than any step

_gradient = njit(problems.online_gradient)
_early_noise = njit(problems.online_noise)


@njit
def _noise(t: int, strength: float) -> float:
    # From t = 747 on e^(1 - t) is 0 in float64, and asking for it would take most of the time.
    return _early_noise(t, strength) if t < 1000 else 0.0


@dataclass(frozen=True)
class Run:
    """What one optimizer did, at log-spaced times."""

    t: list[int]
    x: list[float]
    """x after the t-th update."""
    average_regret: list[float]
    """(f_1(x_1) + ... + f_t(x_t) - what x = -1 would have cost) / t, without the noise; x_t is before its update."""
    settled: int | None
    """The t from which x stayed at -0.9 or below up to the end; None if it was not there at the end."""


def log_spaced(T: int, per_decade: int = 30) -> list[int]:
    """Whole numbers from 1 to T, evenly on a logarithmic axis, powers of ten among them."""
    exponents = np.arange(0, math.log10(T), 1 / per_decade)
    return sorted({*(round(10**e) for e in exponents), T})


def run(
    optimizer: str = "Anon",
    *,
    gamma: float = 1.0,
    betas: tuple[float, float] = (0.5, 0.75),
    x0: float = 0.0,
    lr: float = 0.1,
    noise: float = 1.0,
    T: int = 10_000_000,
    guard: bool = True,
    growth: Growth = 2.0,
    beta3: float = 0.5,
    eps: float | None = None,
    statistic: str = "gradient",
    at: Sequence[int] | None = None,
) -> Run:
    """Play T rounds from x0 with step sizes lr / sqrt(t), the gradient's noise multiplied by `noise`.

    `gamma`, `guard`, `growth`, `beta3` and `statistic` are Anon's; guard=False is the printed algorithm. SGD averages
    its gradients and divides by 1 - beta1^t, as Anon does at gamma = 0. `eps` is each optimizer's own default. `at`
    are the times to record, rising up to T; log-spaced ones by default."""
    _expect("optimizer", optimizer, OPTIMIZERS)
    _expect("statistic", statistic, STATISTICS)
    if T < 1:
        raise ValueError(f"Invalid T: {T}, expected at least one step")
    times = np.array(log_spaced(T) if at is None else at)
    if times[0] < 1 or times[-1] != T or (np.diff(times) < 1).any():
        raise ValueError(f"Invalid at: {at}, expected whole numbers from 1 on that rise up to T = {T}")
    beta1, beta2 = betas
    if optimizer in EVERY_STEP:
        code = STATISTICS.index(EVERY_STEP[optimizer])
        if eps is None:
            eps = 1e-16 if optimizer == "AdaBelief" else 1e-8
        played = _every_step(times, beta1, beta2, eps, code, optimizer == "AMSGrad", float(x0), lr, float(noise))
    else:
        if optimizer == "SGD":
            gamma, guard = 0.0, False
        clip = Guard().clip if guard else math.inf
        window = int(min(_idu.window(beta2, Storage().window_tol), NEVER))
        rule = float(gamma), beta1, beta2, beta3, 1e-16 if eps is None else eps, clip
        refreshes = np.array(_refresh_times(T, growth))
        code = STATISTICS.index(statistic)
        played = _refreshed(times, refreshes, window, *rule, code, float(x0), lr, float(noise))
    x, average_regret, last_far = played
    return Run(times.tolist(), x.tolist(), average_regret.tolist(), last_far + 1 if last_far < T else None)


def _expect(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Invalid {name}: {value!r}, expected one of {', '.join(choices)}")


def _refresh_times(T: int, growth: Growth) -> list[int]:
    """All refresh times up to T, and the one after."""
    times = _idu.refresh_times(T, growth)
    wait = _idu.steps_to_refresh(times[-1], growth)
    return [*times, NEVER if math.isinf(wait) else times[-1] + int(wait)]


@njit
def _sample(statistic: int, g: float, m: float) -> float:
    if statistic == 0:
        return g * g
    return (g - m) ** 2 if statistic == 1 else m * m


# Adam and its kin: psi = sqrt(s / (1 - beta2^t)) + eps at every step; AMSGrad has the largest s so far.
# AdaBelief also adds eps to s at every step, which keeps psi from 0 where the gradient is constant.


@njit
def _every_step(
    at: Any, beta1: float, beta2: float, eps: float, statistic: int, amsgrad: bool, x: float, lr: float, noise: float
) -> Any:
    xs, averages, last_far = np.empty(at.size), np.empty(at.size), 0
    m = s = largest = regret = 0.0
    power1 = power2 = 1.0
    j = 0
    for t in range(1, at[-1] + 1):
        slope = _gradient(t)
        regret += slope * (x - BEST)
        g = slope + _noise(t, noise)
        power1 *= beta1
        power2 *= beta2

        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * _sample(statistic, g, m)
        if statistic == 1:
            s += eps
        largest = max(largest, s)
        psi = math.sqrt((largest if amsgrad else s) / (1 - power2)) + eps

        x = min(max(x - lr / math.sqrt(t) * m / (1 - power1) / psi, -1.0), 1.0)
        if x > NEAR:
            last_far = t
        if t == at[j]:
            xs[j], averages[j] = x, regret / t
            j += 1
    return xs, averages, last_far


# Anon. With one coordinate whose gradient is never zero, touch and floor have nothing to do: of the guards only the
# sticky clip is left.


@njit
def _refreshed(
    at: Any, refreshes: Any, window: int, gamma: float, beta1: float, beta2: float, beta3: float, eps: float,
    clip: float, statistic: int, x: float, lr: float, noise: float,
) -> Any:  # fmt: skip
    xs, averages, last_far = np.empty(at.size), np.empty(at.size), 0
    m = s = w = psi = regret = 0.0
    power1 = 1.0
    j = n = 0
    for t in range(1, at[-1] + 1):
        slope = _gradient(t)
        regret += slope * (x - BEST)
        g = slope + _noise(t, noise)
        power1 *= beta1

        m = beta1 * m + (1 - beta1) * g
        if refreshes[n] - t < window:
            s = beta2 * s + (1 - beta2) * _sample(statistic, g, m)
            w = beta2 * w + (1 - beta2)
        # psi2 <- sigma^gamma at the first refresh, beta3 psi2 + (1 - beta3) sigma^gamma later
        if t == refreshes[n]:
            sigma = s / w + eps
            kept = beta3 if n > 0 else 0.0
            psi = math.sqrt(kept * psi**2 + (1 - kept) * sigma**gamma)
            s = w = 0.0
            n += 1
        m_hat = m / (1 - power1)
        if gamma > 0:
            psi = max(psi, (abs(m_hat) / clip) ** gamma)

        x = min(max(x - lr / math.sqrt(t) * m_hat / psi, -1.0), 1.0)
        if x > NEAR:
            last_far = t
        if t == at[j]:
            xs[j], averages[j] = x, regret / t
            j += 1
    return xs, averages, last_far
