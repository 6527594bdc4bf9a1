"""The mathematics of Anon in one place: refresh times, the recursion of psi, and the guards.

Symbols, as everywhere in this package: `v` is 1/psi (0 marks a coordinate that has not seen a gradient yet),
`s` and `w` the running second moment and its weight, `sigma` = s/w + eps, `memory` what w is for the samples that psi
was made of, `level` the mean of sigma over a tensor, `scale` = level^((1-gamma)/2), `brake` three numbers of a tensor.
Every function is pure.

Decisions are Python bools in eager mode and 0-D tensors inside a captured or compiled graph; `pick` chooses by
either, so that both modes run the same code.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

Growth = float | Callable[[int], float]
Statistic = str | Callable[[Tensor, Tensor], Tensor]

LAST_EXACT_STEP = 2**24  # `step` is a float32 tensor, as in torch.optim


class Rule(NamedTuple):
    """The hyperparameters of one refresh, as they stand in a param group."""

    gamma: float
    eps: float
    beta2: float
    beta3: float | None
    """None: as `kept` says."""
    clip: float
    floor: float
    touch: bool
    brake: bool
    follow: bool

    @property
    def marks_unseen(self) -> bool:
        """At gamma = 0 psi is 1 whatever the gradient was, so there is nothing to wait for."""
        return self.touch and self.gamma != 0


def pick(condition: bool | Tensor, yes: Any, no: Any) -> Any:
    """`yes if condition else no`, also for a condition that lives on the device."""
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


# Refresh times:  a_1 = 1,  a_{n+1} = max(a_n + 1, ceil(growth a_n)), in exact integers.


def _next_time(a: int, growth: Growth) -> float:
    rate = float(growth(a)) if callable(growth) else float(growth)
    if math.isinf(rate):
        return math.inf
    # repr, because a user who writes 1.1 means 11/10 and not the double next to it
    return max(a + 1, math.ceil(Fraction(repr(rate)) * a))


@functools.lru_cache(maxsize=256)
def _times(growth: Growth) -> list[float]:
    return [1]


def _times_up_to(t: float, growth: Growth) -> list[float]:
    times = _times(growth)
    while times[-1] < t:
        times.append(_next_time(int(times[-1]), growth))
    return times


def refresh_times(last: int, growth: Growth) -> list[int]:
    """All refresh times up to step `last`."""
    return [int(a) for a in _times_up_to(last, growth) if a <= last]


def is_refresh(t: int, growth: Growth) -> bool:
    """Whether step `t` (counted from 1) is a refresh time."""
    times = _times_up_to(t, growth)
    return times[bisect_left(times, t)] == t


def steps_to_refresh(t: int, growth: Growth) -> float:
    """How many steps after step `t` the next refresh comes; inf if there is none."""
    times = _times_up_to(t + 1, growth)
    return times[bisect_left(times, t + 1)] - t


def steps_until_used(t: int, growth: Growth) -> float:
    """How many steps after step `t` its gradient is used in a refresh: 0 if `t` is one, inf if never."""
    return 0 if is_refresh(t, growth) else steps_to_refresh(t, growth)


# Laziness: s is read at refreshes alone, so a sample counts only if it still weighs something there.


def window(beta2: float, tol: float) -> float:
    """How many steps up to a refresh s is accumulated in: what lies before weighs less than `tol` in total."""
    if tol <= 0:
        return math.inf
    return max(1, math.ceil(math.log(tol) / math.log(beta2))) if beta2 > 0 else 1


class Lazy(NamedTuple):
    """Which samples s is made of."""

    window: float
    """How many steps up to a refresh count."""
    total_steps: int | None
    """The length of the run, if it is known: after its last refresh none counts."""
    all_count: bool = False
    """Whether all do, as where psi follows them."""


def accumulates(t: int, growth: Growth, lazy: Lazy) -> bool:
    """Whether step `t` adds to s."""
    if lazy.all_count:
        return True
    wait = steps_until_used(t, growth)
    if lazy.total_steps is not None and t <= lazy.total_steps < t + wait:
        return False
    return wait < lazy.window


def is_dead(t: int, growth: Growth, lazy: Lazy) -> bool:
    """Whether no step after `t` adds to s any more."""
    if lazy.all_count:
        return False
    next_use = t + steps_to_refresh(t, growth)
    return math.isinf(next_use) or (lazy.total_steps is not None and t <= lazy.total_steps < next_use)


@functools.lru_cache(maxsize=256)
def refresh_table(growth: Growth, device: torch.device) -> Tensor:
    """All refresh times as a float32 tensor that ends in inf, for steps that are counted on the device."""
    return torch.tensor([*refresh_times(LAST_EXACT_STEP, growth), math.inf], dtype=torch.float32, device=device)


def next_use_on_device(step: Tensor, table: Tensor) -> Tensor:
    """The first refresh time that is not before `step`."""
    return torch.where(table >= step.unsqueeze(-1), table, math.inf).amin(-1)


def accumulates_on_device(step: Tensor, next_use: Tensor, lazy: Lazy) -> Tensor:
    if lazy.all_count:
        return torch.ones_like(step, dtype=torch.bool)
    wait = next_use - step
    alive = wait < lazy.window
    if lazy.total_steps is not None:
        alive = alive & ((next_use <= lazy.total_steps) | (step > lazy.total_steps))
    return alive


def bias_correction2_on_device(beta2: float, step: Tensor) -> Tensor:
    """1 - beta2^t, where beta2 is so near to 1 that float32 could not subtract."""
    return -torch.expm1(step * (math.log(beta2) if beta2 > 0 else -math.inf))


# The second moment.


def second_moment(statistic: Statistic, grad: Tensor, exp_avg: Tensor) -> Tensor:
    """What s averages: g^2, AdaBelief's (g - m)^2, or the user's own."""
    if statistic == "gradient":
        return grad * grad
    if statistic == "belief":
        surprise = grad - exp_avg
        return surprise * surprise
    assert callable(statistic)
    return statistic(grad, exp_avg)


def _log(x: Tensor) -> Tensor:
    limits = torch.finfo(x.dtype)
    return x.clamp(limits.tiny, limits.max).log()


def _exp(x: Tensor) -> Tensor:
    limits = torch.finfo(x.dtype)
    return x.exp().clamp(limits.tiny, limits.max)


def _mean(sigma: Tensor, where: Tensor) -> Tensor:
    """Over the coordinates `where` holds; 0 if there is none."""
    return torch.where(where, sigma, 0.0).sum() / where.sum().clamp(min=1)


def _finite_positive(x: Tensor) -> Tensor:
    """x > 0, without NaN and inf, so that one bad coordinate does not spoil its tensor's level."""
    return (x > 0) & (x < math.inf)


# The recursion:  psi2 <- sigma^gamma at the first refresh, beta3 psi2 + (1 - beta3) sigma^gamma later.
# sigma^gamma leaves float32 at |gamma| = 2.4, its logarithm does not.


def kept(rule: Rule, memory: Tensor, w: Tensor) -> float | Tensor:
    """beta3 at a refresh. None: as much as Adam's average has of the samples that are in psi2, and not in s. Then psi2
    at gamma = 1 is Adam's second moment, as it stood at the refresh."""
    if rule.beta3 is not None:
        return rule.beta3
    return memory / (memory + w)


def remembered(rule: Rule, memory: Tensor, w: Tensor) -> Tensor:
    """`memory` after a refresh; from there it falls by beta2 a step. It stays 1 under any other beta3, so that psi2
    counts as a whole average on the step on which that becomes None."""
    return memory + w if rule.beta3 is None else torch.ones_like(memory)


def _mix(log_old: Tensor, log_new: Tensor, beta3: float | Tensor, first: Tensor) -> Tensor:
    if isinstance(beta3, Tensor):
        log_kept, log_rest = beta3.log().to(log_new.dtype), (-beta3).log1p().to(log_new.dtype)
    elif beta3 == 0:
        return log_new
    else:
        log_kept, log_rest = math.log(beta3), math.log1p(-beta3)
    return torch.where(first, log_new, torch.logaddexp(log_old + log_kept, log_new + log_rest))


def _mix_level(level: Tensor, mean: Tensor, beta3: float | Tensor) -> Tensor:
    """Like psi2 at gamma = 1; kept as it is where nothing was learnt (mean = 0)."""
    limits = torch.finfo(level.dtype)
    rest: Any = 1 - beta3
    if isinstance(beta3, Tensor):  # a float64 on the host
        beta3, rest = beta3.to(level.dtype), rest.to(level.dtype)
    mixed = torch.where(level > 0, beta3 * level + rest * mean, mean).clamp(limits.tiny, limits.max)
    return torch.where(mean > 0, mixed, level)


def scale_of(level: Tensor, gamma: float | Tensor) -> Tensor:
    """What a coordinate of mean sigma moves by per unit of lr; 1 before a refresh has set the level (0)."""
    exponent = (1 - gamma) / 2
    if isinstance(exponent, Tensor):  # gamma is a float64, and would take the power out of the level's range
        exponent = exponent.to(level.dtype)
    return torch.where(level > 0, _exp(exponent * _log(level)), 1.0)


def refresh(
    v: Tensor, s: Tensor, w: Tensor, level: Tensor, rule: Rule, gamma_before: float | Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The preconditioner and the level after a refresh from `s` and `w`."""
    # A coordinate first seen on this very step has one sample in s; the steps before taught nothing.
    first_seen = v == 0
    # What was made with another gamma is worth nothing: the recursion starts anew.
    v = pick(gamma_before != rule.gamma, torch.zeros_like(v), v)
    sigma = s / w + rule.eps
    taught = _finite_positive(s)
    mean = _mean(sigma, taught)
    beta3 = kept(rule, memory, w)
    level = _mix_level(level, mean, beta3)
    if rule.gamma == 0:
        return torch.ones_like(v), level

    sigma = torch.where(first_seen, s / (1 - rule.beta2) + rule.eps, sigma)
    if rule.floor > 0:
        sigma = torch.maximum(sigma, rule.floor * mean)
    log_psi2 = _mix(-2 * _log(v), rule.gamma * _log(sigma), beta3, v == 0)
    refreshed = _exp(-log_psi2 / 2)
    if rule.marks_unseen:  # an interval without gradient teaches nothing
        refreshed = torch.where(taught, refreshed, v)
    return refreshed, level


# The guards. Between refreshes each says what sigma cannot be less than: floor times the level; (m_hat / clip)^2, since
# a second moment is no less than the square of the mean; and what s is of Adam's average, since the rest of that is
# not negative.


def touch(
    v: Tensor, raw_grad: Tensor, sample: Tensor, level: Tensor, eps: float, floor: float, gamma: float | Tensor
) -> Tensor:
    """Start the clock of every unseen coordinate that has a gradient now: v <- sigma^(-gamma/2) of this one sample."""
    sigma = torch.maximum(sample + eps, floor * level)
    return torch.where((v == 0) & (raw_grad != 0), _exp(-gamma / 2 * _log(sigma)), v)


def sticky_clip(v: Tensor, exp_avg: Tensor, bound: float | Tensor, gamma: float | Tensor) -> Tensor:
    """v <- min(v, (bound / |m|)^gamma): psi itself rises, and stays risen until the next refresh. Not for gamma <= 0,
    where a larger sigma would make the step longer.

    Clamping the update instead would cut rare large gradients short and bias the method."""
    return torch.minimum(v, clip_limit(exp_avg, bound, gamma))


def clip_limit(exp_avg: Tensor, bound: float | Tensor, gamma: float | Tensor) -> Tensor:
    """What v may be at most: (bound / |m|)^gamma."""
    tiny = torch.finfo(exp_avg.dtype).tiny
    limit = bound / exp_avg.abs().clamp(min=tiny)
    if isinstance(gamma, Tensor):
        limit = torch.where(gamma > 0, limit ** gamma.to(limit.dtype), math.inf)
    elif gamma != 1:
        limit = limit**gamma
    return limit.clamp(min=tiny)


def sticky_clip_all(vs: list[Tensor], exp_avgs: list[Tensor], bounds: list[float], gamma: float) -> list[Tensor]:
    """`sticky_clip` of several tensors at once."""
    tiny = torch.finfo(vs[0].dtype).tiny
    sizes = torch._foreach_abs(exp_avgs)
    torch._foreach_clamp_min_(sizes, tiny)
    limits = torch._foreach_reciprocal(sizes)
    torch._foreach_mul_(limits, bounds)
    if gamma != 1:
        torch._foreach_pow_(limits, gamma)
    torch._foreach_clamp_min_(limits, tiny)
    return list(torch._foreach_minimum(vs, limits))


def follow(v: Tensor, s: Tensor, bias_correction2: float | Tensor, eps: float, gamma: float | Tensor) -> Tensor:
    """v <- min(v, sigma^(-gamma/2)) with sigma = s / (1 - beta2^t) + eps, the part of Adam's second moment that is due
    to the gradients since the last refresh. It stays risen until the next one, like the clip and for the same reason.
    Not for gamma <= 0."""
    risen = _exp(-gamma / 2 * _log(s / bias_correction2 + eps))
    if isinstance(gamma, Tensor):
        risen = torch.where(gamma > 0, risen, math.inf)
    return torch.fmin(v, risen)  # a NaN in s is no reason to lose v


# The brake. Between refreshes psi cannot follow gradients that grow, so their power, the mean of g^2 / psi2 over a
# tensor, is watched. `brake` holds the power that a refresh foresees, its running average since, and the largest ratio
# of the two: (3,) for one tensor, (n, 3) for several.

BRAKED = 64
"""A tensor of fewer elements has no brake: its power varies too much from step to step to tell that it has grown."""
TAIL = 16.0
"""A coordinate counts at most so many times the power that was foreseen: a few whose psi is far too small, as one first
gradient can make it, are the clip's matter and say nothing about the others."""


def foreseen_power(s: Tensor, w: Tensor, v: Tensor, level: Tensor, gamma: float) -> Tensor:
    """What the sigma of a refresh lets expect; 0 if nothing. At least scale^2, which is typical, so that gradients
    which only come back after an interval of small ones are not held up."""
    powers, scale = s / w * v * v, scale_of(level, gamma)
    power = (torch.where(powers < math.inf, powers, 0.0) / v.numel()).sum()
    foreseen = torch.maximum(power, scale * scale)
    return torch.where(_finite_positive(power) & (foreseen < math.inf), foreseen, 0.0).to(s.dtype)


def power(sample: Tensor, v: Tensor, brake: Tensor) -> Tensor:
    """Of one tensor's gradients."""
    return (torch.fmin(sample * v * v, TAIL * brake[0]) / v.numel()).sum().to(sample.dtype)


def set_brake(foreseen: Tensor) -> Tensor:
    """A brake after a refresh."""
    return torch.stack([foreseen, foreseen, torch.ones_like(foreseen)], dim=-1)


def follow_brake(brake: Tensor, power: Tensor, beta1: float) -> Tensor:
    """A brake after a step between refreshes."""
    foreseen, average, excess = brake.unbind(-1)
    average = torch.lerp(average, power, 1 - beta1)
    ratio = average / foreseen
    excess = torch.where((foreseen > 0) & (ratio < math.inf), torch.maximum(excess, ratio), excess)
    return torch.stack([foreseen, average, excess], dim=-1)


def brake_factor(brake: Tensor, gamma: float | Tensor) -> Tensor:
    """What the update is multiplied by: had all of sigma grown by R, psi would have grown by R^(gamma/2)."""
    excess = brake[..., 2].clamp(min=1)
    return pick(gamma > 0, excess ** (-gamma / 2), torch.ones_like(excess))
