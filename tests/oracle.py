"""The algorithm a second time, naively and in float64 numpy, so that the optimizer can be held to it.

`printed` is the paper's Algorithm 1 in the paper's symbols, `closed_form_psi` its equation for psi summed directly, and
`Guarded` adds the guards, decay, scaling and changes of gamma. Plain powers throughout; nothing here knows the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Growth = float | Callable[[int], float]


def refresh_times(growth: Growth) -> Iterable[int]:
    """a_1 = 1, a_{n+1} = max(a_n + 1, ceil(growth a_n)), where 1.1 means eleven tenths."""
    a = 1
    while True:
        yield a
        factor = growth(a) if callable(growth) else growth
        if factor == math.inf:
            return
        a = max(a + 1, math.ceil(Fraction(str(factor)) * a))


@lru_cache(maxsize=10_000)
def refresh_set(growth: Growth, last: int) -> frozenset[int]:
    return frozenset(takewhile(lambda a: a <= last, refresh_times(growth)))


def printed(
    gradients: Sequence[Array],
    theta: Array,
    *,
    lr: float = 1e-3,
    gamma: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-16,
    beta3: float | None = 0.5,
    growth: Growth = 2.0,
) -> tuple[list[Array], list[Array]]:
    """Algorithm 1 with general a_n and beta3: theta_t and psi_t for t = 1, 2, ... beta3 None is not the paper's.

    Corrections: the momentum is divided by 1 - beta1^t (the paper prints beta2), the gradient is that of theta_{t-1},
    and the bias correction of s counts the steps of its own interval, a_n - a_{n-1}.
    """
    beta1, beta2 = betas
    a = refresh_set(growth, len(gradients))
    m = np.zeros_like(theta)
    s = np.zeros_like(theta)
    psi2 = None
    last = 0
    thetas, psis = [], []
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        m_hat = m / (1 - beta1**t)
        s = beta2 * s + (1 - beta2) * g**2
        if t in a:
            sigma = s / (1 - beta2 ** (t - last)) + eps
            kept = beta3 if beta3 is not None else (beta2 ** (t - last) - beta2**t) / (1 - beta2**t)
            psi2 = sigma**gamma if psi2 is None else kept * psi2 + (1 - kept) * sigma**gamma
            s = np.zeros_like(s)
            last = t
        assert psi2 is not None
        psi = np.sqrt(psi2)
        theta = theta - lr * m_hat / psi
        thetas.append(theta)
        psis.append(psi)
    return thetas, psis


def ema(x: Sequence[Array], beta: float) -> Array:
    """EMA(x_{1:n}; beta) = (1 - beta) / (1 - beta^n) * sum_i beta^(n-i) x_i."""
    n = len(x)
    return (1 - beta) / (1 - beta**n) * sum(beta ** (n - i) * x_i for i, x_i in enumerate(x, start=1))


def closed_form_psi(
    gradients: Sequence[Array],
    *,
    gamma: float,
    beta2: float = 0.999,
    eps: float = 1e-16,
    beta3: float | None = 0.5,
    growth: Growth = 2.0,
) -> Array:
    """psi_t = ( sum_j beta3^(n-j) (1 - beta3 [j > 1]) EMA^gamma(g^2 + eps; beta2) )^(1/2).

    The sum runs over the n refreshes up to t, each EMA over its interval a_{j-1}+1 .. a_j. With beta3 None an interval
    weighs what the samples in it weigh in EMA(g^2; beta2) over all of them.
    """
    a = [0, *sorted(refresh_set(growth, len(gradients)))]
    n = len(a) - 1
    psi2 = np.zeros_like(gradients[0])
    for j, (before, here) in enumerate(pairwise(a), start=1):
        if beta3 is None:
            weight = beta2 ** (a[-1] - here) * (1 - beta2 ** (here - before)) / (1 - beta2 ** a[-1])
        else:
            weight = beta3 ** (n - j) * (1 - beta3 * (j > 1))
        psi2 = psi2 + weight * ema([g**2 + eps for g in gradients[before:here]], beta2) ** gamma
    return np.sqrt(psi2)


class Guarded:
    """One tensor under the guards. Every attribute may be changed between steps, as a param group's entries may.

    State: m, s, its weight w, v = psi2^-1/2 (0 marks a coordinate that no gradient has reached), the gamma in use, and
    the level (0 while unset): the mean of the second moment over the tensor, averaged over refreshes. For the brake:
    the power, mean of g^2 / psi2, that the last refresh foresaw, its average since, and the largest ratio.
    """

    def __init__(
        self,
        theta: Array,
        *,
        lr: float = 1e-3,
        gamma: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: float = 0.0,
        beta3: float | None = 0.5,
        growth: Growth = 2.0,
        total_steps: int | None = None,
        window_tol: float = 2**-24,
        clip: float = 0.5,
        floor: float = 0.01,
        touch: bool = True,
        brake: bool = True,
        follow: bool = False,
        lr_scale: str | None = None,
        statistic: str | Callable[[Array, Array], Array] = "gradient",
        project: Callable[[Array, Array], Array] | None = None,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
    ) -> None:
        self.theta = np.array(theta, dtype=np.float64)
        self.lr, self.gamma, self.betas, self.eps, self.weight_decay = lr, gamma, betas, eps, weight_decay
        self.beta3, self.growth, self.clip, self.floor, self.touch = beta3, growth, clip, floor, touch
        self.brake, self.follow = brake, follow
        self.total_steps, self.window_tol = total_steps, window_tol
        self.lr_scale, self.statistic, self.project = lr_scale, statistic, project
        self.bias_correction, self.maximize = bias_correction, maximize
        self.decoupled_weight_decay = decoupled_weight_decay
        self.t = 0
        self.m, self.s, self.v = (np.zeros_like(self.theta) for _ in range(3))
        self.w = self.level = 0.0
        self.weights: list[float] = []  # in Adam's average, of each interval that psi is made of
        self.foreseen = self.average = 0.0
        self.excess = 1.0
        self.gamma_in_use = gamma

    def step(self, gradient: Array) -> None:
        beta1, beta2 = self.betas
        if self.t == 0:
            self.gamma_in_use = self.gamma
        self.t += 1
        raw = -gradient if self.maximize else gradient
        g = raw
        if self.weight_decay and not self.decoupled_weight_decay:
            g = raw + self.weight_decay * self.theta

        self.m = beta1 * self.m + (1 - beta1) * g
        stat = self._statistic(g)
        if self.touch and self.gamma != 0:
            stat = np.where(raw == 0, 0.0, stat)
        if self.beta3 is None:
            self.weights = [beta2 * each for each in self.weights]
        if self._counts():
            self.s = beta2 * self.s + (1 - beta2) * stat
            self.w = beta2 * self.w + (1 - beta2)
        is_due = self.t in refresh_set(self.growth, self.t)
        known = self.s / self.w if is_due and self.w else stat
        if is_due:
            self.refresh()
        elif self.touch and self.gamma_in_use != 0:
            touched = (self.v == 0) & (raw != 0)
            sigma = np.maximum(stat + self.eps, self.floor * self.level)
            self.v = np.where(touched, sigma ** (-self.gamma_in_use / 2), self.v)

        if self.follow and not is_due and self.gamma_in_use > 0:
            sigma = self.s / (1 - beta2**self.t) + self.eps  # Adam's, had all been zero until the last refresh
            self.v = np.minimum(self.v, sigma ** (-self.gamma_in_use / 2))

        m_hat = self.m / (1 - beta1**self.t) if self.bias_correction else self.m
        if self.gamma_in_use > 0 and self.clip < math.inf:  # sigma is no less than (m_hat / clip)^2
            psi = np.where(m_hat == 0, 1.0, abs(m_hat) / self.clip) ** self.gamma_in_use
            self.v = np.where((m_hat != 0) & (self.v * psi > 1), 1 / psi, self.v)
        self._move(m_hat)
        self._follow(known * self.v**2, is_due)
        if not self.follow and not self._is_read_at_or_after(self.t + 1):
            self.s = np.zeros_like(self.s)
            self.w = 0.0

    def refresh(self) -> None:
        if self.w == 0:
            return
        unseen = self.v == 0
        if self.gamma_in_use != self.gamma:
            # What belongs to another gamma has another unit: nothing of it can be mixed or kept.
            self.v = np.zeros_like(self.v)
        kept = self.beta3
        if kept is None:
            kept = sum(self.weights) / (sum(self.weights) + self.w)
        self.weights = [*self.weights, self.w] if self.beta3 is None else [1.0]
        gamma = self.gamma_in_use = self.gamma
        taught = (self.s > 0) & np.isfinite(self.s)
        sigma = self.s / self.w + self.eps
        sample = self.s / (1 - self.betas[1]) + self.eps  # all that a coordinate first seen at this refresh has
        if taught.any():
            mean = sigma[taught].mean()
            self.level = mean if self.level == 0 else kept * self.level + (1 - kept) * mean
            sigma = np.maximum(np.where(unseen, sample, sigma), self.floor * mean)

        first = self.v == 0
        old = np.where(first, 1.0, self.v) ** -2
        psi2 = np.where(first, sigma**gamma, kept * old + (1 - kept) * sigma**gamma)
        if gamma == 0:
            self.v = np.ones_like(self.v)
        elif self.touch:
            self.v = np.where(taught, psi2**-0.5, self.v)
        else:
            self.v = psi2**-0.5
        self.excess = 1.0
        self._follow(self.s / self.w * self.v**2, True)
        self.s = np.zeros_like(self.s)
        self.w = 0.0

    def _follow(self, powers: Array, is_due: bool) -> None:
        """What this step's gradient means for the steps after it."""
        if not self.brake or self.gamma_in_use <= 0 or self.theta.size < 64:
            return
        if is_due:
            power = float(np.mean(np.where(powers < math.inf, powers, 0.0)))
            self.foreseen = self.average = max(power, self.scale**2) if power > 0 else 0.0
        else:
            # Of a heavy tail only so much is believed.
            power = float(np.mean(np.fmin(powers, 16 * self.foreseen)))
            self.average += (1 - self.betas[0]) * (power - self.average)
            if self.foreseen:
                self.excess = max(self.excess, self.average / self.foreseen)

    def _counts(self) -> bool:
        """Whether this step's gradient reaches a refresh: one of this run, with more than window_tol of its weight."""
        if self.follow:
            return True
        if not self._is_read_at_or_after(self.t):
            return False
        return self.betas[1] ** (self._next_refresh(self.t) - self.t) > self.window_tol

    def _next_refresh(self, t: int) -> float:
        return next((a for a in refresh_times(self.growth) if a >= t), math.inf)

    def _is_read_at_or_after(self, t: int) -> bool:
        """Whether a refresh will read s. Past its announced end a run goes on as if it had none."""
        refresh = self._next_refresh(t)
        ends_before = self.total_steps is not None and self.t <= self.total_steps < refresh
        return refresh < math.inf and not ends_before

    def _statistic(self, g: Array) -> Array:
        if self.statistic == "gradient":
            return g**2
        if self.statistic == "belief":
            return (g - self.m) ** 2
        assert callable(self.statistic)
        return self.statistic(g, self.m)

    @property
    def scale(self) -> float:
        """The update of a coordinate of mean second moment, per unit of lr."""
        return float(self.level ** ((1 - self.gamma_in_use) / 2)) if self.level else 1.0

    def _move(self, m_hat: Array) -> None:
        decayed = self.theta
        if self.decoupled_weight_decay:
            decayed = self.theta * (1 - self.lr * self.weight_decay)
        update = self.lr * self.v * m_hat
        if self.brake and self.gamma_in_use > 0:
            update = update / self.excess ** (self.gamma_in_use / 2)
        if self.lr_scale == "tensor":
            update = update / self.scale
        self.theta = decayed - update
        if self.project is not None:
            seen = self.v > 0
            psi = 1 / np.where(seen, self.v, 1.0)
            self.theta = np.where(seen, self.project(self.theta, psi), self.theta)
