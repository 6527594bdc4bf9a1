"""The pieces of one step that every path shares: options, the clock, and the preconditioner's turn."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _to_scalar
from torch.utils.weak import WeakIdKeyDictionary

from anon_optim import _idu
from anon_optim._idu import Growth, Lazy, Rule, Statistic
from anon_optim._rounding import copy_stochastic_

Projection = Callable[[Tensor, Tensor], Tensor]


class StepOptions(NamedTuple):
    """A param group's entries, as one step needs them."""

    rule: Rule
    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    growth: Growth
    lazy: Lazy
    lr_scale: str | None
    statistic: Statistic
    project: Projection | None
    bias_correction: bool
    decoupled_weight_decay: bool
    maximize: bool
    stochastic_round: bool
    capturable: bool
    differentiable: bool

    @property
    def couples_decay(self) -> bool:
        return self.weight_decay != 0 and not self.decoupled_weight_decay

    @property
    def decouples_decay(self) -> bool:
        return self.weight_decay != 0 and self.decoupled_weight_decay

    @property
    def masks_samples(self) -> bool:
        """Whether a sample can be non-zero where the gradient is zero; under touch it must not count."""
        return self.rule.marks_unseen and (self.statistic != "gradient" or self.couples_decay)

    @property
    def decides_on_device(self) -> bool:
        return self.capturable or torch.compiler.is_compiling()


def rule_of(group: dict[str, Any]) -> Rule:
    return Rule(
        gamma=group["gamma"],
        eps=group["eps"],
        beta2=group["betas"][1],
        beta3=group["beta3"],
        clip=group["clip"],
        floor=group["floor"],
        touch=group["touch"],
        brake=group["brake"],
        follow=group["follow"],
    )


def step_options(group: dict[str, Any]) -> StepOptions:
    for name in ("guard", "storage"):
        if name in group:
            raise ValueError(
                f"Invalid {name} in a param group: set its fields, such as group['clip'] or group['floor']"
            )
    rule = rule_of(group)
    return StepOptions(
        rule=rule,
        lr=_to_scalar(group["lr"]),
        beta1=group["betas"][0],
        beta2=rule.beta2,
        weight_decay=group["weight_decay"],
        growth=group["growth"],
        lazy=lazy_of(group),
        lr_scale=group["lr_scale"],
        statistic=group["statistic"],
        project=group["project"],
        bias_correction=group["bias_correction"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        maximize=group["maximize"],
        stochastic_round=group["stochastic_round"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
    )


def lazy_of(group: dict[str, Any]) -> Lazy:
    window = _idu.window(group["betas"][1], group["window_tol"])
    return Lazy(window, group["total_steps"], all_count=group["follow"])


def needs_s(t: int, group: dict[str, Any]) -> bool:
    """Whether step `t` adds to s."""
    return _idu.accumulates(t, group["growth"], lazy_of(group))


class Clock(NamedTuple):
    """Where a parameter stands in its schedule: Python values in eager mode, 0-D tensors in a graph."""

    due: bool | Tensor
    accumulate: bool | Tensor
    """Whether this step's sample counts in a later refresh."""
    gamma: float | Tensor
    """The gamma that the preconditioner in use was made with."""
    bias_correction1: float | Tensor
    bias_correction2: float | Tensor
    """What s since the first step would weigh; of psi alone, whatever `bias_correction` says."""


def read_clock(step: Tensor, gamma: Tensor, table: Tensor, dtype: torch.dtype, o: StepOptions) -> Clock:
    if o.decides_on_device:
        next_use = _idu.next_use_on_device(step, table)
        return Clock(
            due=next_use == step,
            accumulate=_idu.accumulates_on_device(step, next_use, o.lazy),
            gamma=gamma,
            bias_correction1=1 - o.beta1 ** step.to(dtype) if o.bias_correction else 1.0,
            bias_correction2=_idu.bias_correction2_on_device(o.beta2, step.to(dtype)),
        )
    t = int(step.item())
    return Clock(
        due=_idu.is_refresh(t, o.growth),
        accumulate=_idu.accumulates(t, o.growth, o.lazy),
        gamma=gamma.item(),
        bias_correction1=1 - o.beta1**t if o.bias_correction else 1.0,
        bias_correction2=1 - o.beta2**t,
    )


def accumulate_(clock: Clock, s: Tensor, w: Tensor, memory: Tensor, sample: Tensor, rule: Rule) -> None:
    """s <- beta2 s + (1 - beta2) sample, and its weight alike, on steps that count; `memory` fades on every step."""
    beta2 = rule.beta2
    if rule.beta3 is None:
        memory.view(1).mul_(beta2)
    if clock.accumulate is True:
        s.mul_(beta2).add_(sample, alpha=1 - beta2)
        w.mul_(beta2).add_(1 - beta2)
    elif clock.accumulate is not False:
        s.copy_(torch.where(clock.accumulate, s * beta2 + sample * (1 - beta2), s))
        w.view(1).copy_(torch.where(clock.accumulate, w * beta2 + (1 - beta2), w))


def preconditioned(
    clock: Clock,
    rule: Rule,
    raw_grad: Tensor,
    sample: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor,
    memory: Tensor,
    v: Tensor,
    level: Tensor,
    preconditioner: Tensor,
) -> tuple[Tensor, Tensor]:
    """One tensor's `v` and `level` for this step: refreshed if due, else touched and risen, then clipped.

    `preconditioner` is the state's own tensor, whatever the view or precision that `v` has of it."""
    gamma: Any = clock.gamma
    if clock.due is not False:
        refreshed = _idu.refresh(v, exp_avg_sq, weight, level, rule, gamma, memory)
        v, level = (_idu.pick(clock.due, new, old) for new, old in zip(refreshed, (v, level), strict=True))
        gamma = rule.gamma if clock.due is True else torch.where(clock.due, rule.gamma, gamma)
    if clock.due is True:
        look_for_unseen(v, preconditioner)
    elif rule.touch and may_have_unseen(preconditioner, gamma):
        touched = _idu.touch(v, raw_grad, sample, level, rule.eps, rule.floor, gamma)
        v = _idu.pick(clock.due, v, touched)
    v = followed(clock, rule, v, exp_avg_sq, gamma)
    if rule.clip < math.inf and (isinstance(gamma, Tensor) or gamma > 0):
        v = _idu.sticky_clip(v, exp_avg, rule.clip * clock.bias_correction1, gamma)
    return v, level


def preconditioned_all(
    clocks: list[Clock],
    levels: list[Tensor],
    rule: Rule,
    raw_grads: list[Tensor],
    samples: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    vs: list[Tensor],
    preconditioners: list[Tensor],
) -> list[Tensor]:
    """`preconditioned` of several tensors at once, between refreshes and with one gamma, decided on the host."""
    gamma = clocks[0].gamma
    assert isinstance(gamma, float)
    if rule.touch:
        vs = [
            _idu.touch(v, grad, sample, level, rule.eps, rule.floor, gamma)
            if may_have_unseen(preconditioner, gamma)
            else v
            for v, grad, sample, level, preconditioner in zip(
                vs, raw_grads, samples, levels, preconditioners, strict=True
            )
        ]
    vs = [followed(clock, rule, v, s, gamma) for clock, v, s in zip(clocks, vs, exp_avg_sqs, strict=True)]
    if rule.clip < math.inf and gamma > 0:
        bounds = [float(rule.clip * clock.bias_correction1) for clock in clocks]
        vs = _idu.sticky_clip_all(vs, exp_avgs, bounds, gamma)
    return vs


def followed(clock: Clock, rule: Rule, v: Tensor, exp_avg_sq: Tensor, gamma: float | Tensor) -> Tensor:
    """`v`, risen with s between refreshes if the rule says so; every step then adds to s."""
    if not rule.follow or clock.due is True or not (isinstance(gamma, Tensor) or gamma > 0):
        return v
    return _idu.pick(clock.due, v, _idu.follow(v, exp_avg_sq, clock.bias_correction2, rule.eps, gamma))


def is_braked(clock: Clock, rule: Rule, v: Tensor) -> bool:
    """Whether the brake has a part in this step of a tensor; where the device decides, it may."""
    gamma = rule.gamma if clock.due is True else clock.gamma
    return rule.brake and v.numel() >= _idu.BRAKED and (isinstance(gamma, Tensor) or gamma > 0)


def braked(
    clock: Clock, o: StepOptions, sample: Tensor, s: Tensor, w: Tensor, v: Tensor, level: Tensor, brake: Tensor
) -> tuple[Any, Tensor]:
    """What the update of one tensor is multiplied by, and its brake after the step. A step's own gradient tells on the
    next one, so that a step is a single pass."""
    if clock.due is True:
        return 1.0, _idu.set_brake(_idu.foreseen_power(s, w, v, level, o.rule.gamma))
    factor = _idu.brake_factor(brake, clock.gamma)
    followed = _idu.follow_brake(brake, _idu.power(sample, v, brake), o.beta1)
    if clock.due is False:
        return factor, followed
    fresh = _idu.set_brake(_idu.foreseen_power(s, w, v, level, o.rule.gamma))
    is_on = torch.where(clock.due, o.rule.gamma, clock.gamma) > 0
    return torch.where(clock.due, 1.0, factor), torch.where(is_on, torch.where(clock.due, fresh, followed), brake)


def braked_all(
    gamma: float | Tensor, beta1: float, samples: list[Tensor], vs: list[Tensor], brakes: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """`braked` of several tensors at once, between refreshes and with one gamma, decided on the host."""
    powers = torch.stack([_idu.power(*each) for each in zip(samples, vs, brakes, strict=True)])
    packed = torch.stack(brakes)
    factors, followed = _idu.brake_factor(packed, gamma), _idu.follow_brake(packed, powers, beta1)
    return list(factors.unbind()), list(followed.unbind())


def start_brake_(brake: Tensor, s: Tensor, w: Tensor, v: Tensor, level: Tensor, gamma: float) -> None:
    """What `braked` does at a refresh, for one outside of a step."""
    if v.numel() >= _idu.BRAKED:
        brake.copy_(_idu.set_brake(_idu.foreseen_power(s, w, v, level, gamma)))


def end_interval_(clock: Clock, rule: Rule, exp_avg_sq: Tensor, weight: Tensor, memory: Tensor, gamma: Tensor) -> None:
    if clock.due is not False:
        memory.view(1).copy_(_idu.pick(clock.due, _idu.remembered(rule, memory, weight), memory))
    if clock.due is True:
        exp_avg_sq.zero_()
        weight.zero_()
        gamma.fill_(rule.gamma)
    elif clock.due is not False:
        exp_avg_sq.masked_fill_(clock.due, 0)
        weight.view(1).masked_fill_(clock.due, 0)
        gamma.view(1).masked_fill_(clock.due, rule.gamma)


_all_seen = WeakIdKeyDictionary()
"""Preconditioners that had no unseen coordinate at their last refresh, and so have none since."""


def look_for_unseen(v: Tensor, preconditioner: Tensor) -> None:
    """Remember whether there is any, once a refresh: the answer has to come from the device."""
    forget_what_was_seen(preconditioner)
    if not bool((v == 0).any()):
        _all_seen[preconditioner] = True


def forget_what_was_seen(preconditioner: Tensor) -> None:
    _all_seen.pop(preconditioner, None)


def may_have_unseen(preconditioner: Tensor, gamma: float | Tensor) -> bool:
    return isinstance(gamma, Tensor) or (gamma != 0 and preconditioner not in _all_seen)


def projected(theta: Tensor, v: Tensor, project: Projection) -> Tensor:
    """`project` in the metric psi = 1/v; what has not seen a gradient yet stays where it is."""
    return torch.where(v == 0, theta, project(theta, 1 / v))


def store_(params: list[Tensor], values: list[Tensor], stochastic_round: bool) -> None:
    for param, value in zip(params, values, strict=True):
        if stochastic_round:
            copy_stochastic_(param, value)
        else:
            param.copy_(value)


def step_size_of(clock: Clock, level: Tensor, o: StepOptions) -> Any:
    step_size = o.lr / clock.bias_correction1
    if o.lr_scale != "tensor":
        return step_size
    return step_size / _idu.scale_of(level, _idu.pick(clock.due, o.rule.gamma, clock.gamma))


def write_(targets: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    """Copy what is new. Scalars are written as vectors of one, here and above: a compiled graph on the CPU (torch 2.13)
    loses what is written into a 0-D float64 tensor."""
    for target, value in zip(targets, values, strict=True):
        if value is not target:
            (target.view(1) if target.dim() == 0 else target).copy_(value)
