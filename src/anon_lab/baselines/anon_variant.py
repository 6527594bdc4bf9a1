"""Anon with guards that were tried beside its own, for the study that chooses among them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from anon_optim import Anon, Guard, Storage, _idu
from anon_optim._idu import Growth, Rule
from anon_optim._step import (
    Clock,
    StepOptions,
    accumulate_,
    braked,
    end_interval_,
    followed,
    is_braked,
    read_clock,
    step_options,
    step_size_of,
    write_,
)

CLIPS = ("sticky", "plain")
SETTLED = 10
"""Samples after which an interval's second moment can say that it has drifted."""


class AnonVariant(Anon):
    """Anon, with other ways to bound a step. With the defaults below it is Anon, bit for bit.

    **Arguments:** (those of Anon, and)
    - `clips`: "sticky" lowers v until the next refresh, "plain" shortens the step and leaves v as it is.
    - `rows`: whether floor and level belong to each row of a matrix instead of the whole of it. Rows have no brake.
    - `rise`: let psi rise towards what the next refresh would make of the gradients since the last one, by as much as
      there is over of the interval. It falls at refreshes alone.
    - `drift`: refresh early once mean(s / w) is this many times above or below the mean of the last refresh.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        gamma: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: float = 0.0,
        *,
        beta3: float | None = 0.5,
        growth: Growth = 2.0,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen, so sharing it is safe
        decoupled_weight_decay: bool = True,
        capturable: bool = False,
        clips: str = "sticky",
        rows: bool = False,
        rise: bool = False,
        drift: float | None = None,
    ) -> None:
        if clips not in CLIPS:
            raise ValueError(f"Invalid clips: {clips!r}, expected one of {', '.join(CLIPS)}")
        if drift is not None and not drift > 1:
            raise ValueError(f"Invalid drift: {drift}, expected a number above 1")
        if rise and beta3 is None:
            raise ValueError("Invalid beta3: None, expected a number with rise=True")
        if rows and guard is not None and guard.brake:
            raise ValueError("Invalid rows: True, expected False with Guard(brake=True)")
        super().__init__(
            params,
            lr,
            gamma,
            betas,
            eps,
            weight_decay,
            beta3=beta3,
            growth=growth,
            guard=guard,
            decoupled_weight_decay=decoupled_weight_decay,
            # A refresh that nobody foresees, or that begins early, needs all samples.
            storage=Storage() if drift is None and not rise else Storage(window_tol=0.0),
            foreach=False,
            fused=False,
            capturable=capturable,
        )
        self.clips, self.rows, self.rise, self.drift = clips, rows, rise, drift

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        is_new = p not in self.state
        state = super()._state_of(p, group)
        if is_new:
            if self._has_rows(p):
                shape = (len(p), *(1,) * (p.dim() - 1))
                state["level"] = state["level"].expand(shape).clone()
            if self.drift is not None:
                state["before"] = p.detach().new_zeros(())
        return state

    def _has_rows(self, p: Tensor) -> bool:
        return self.rows and p.dim() > 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of everything that has a gradient."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = step_options(group)
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, self._state_of(p, group), options)
        return loss

    def _step_one(self, p: Tensor, state: dict[str, Tensor], o: StepOptions) -> None:
        raw_grad, m, s, w, memory = (p.grad, *(state[name] for name in ("exp_avg", "exp_avg_sq", "weight", "memory")))
        assert raw_grad is not None
        state["step"].add_(1)
        grad = raw_grad.add(p, alpha=o.weight_decay) if o.couples_decay else raw_grad
        m.lerp_(grad, 1 - o.beta1)
        sample = grad * grad
        if o.masks_samples:
            sample = torch.where(raw_grad != 0, sample, 0.0)

        table = _idu.refresh_table(o.growth, p.device) if o.capturable else state["step"]
        clock = read_clock(state["step"], state["gamma"], table, m.dtype, o)
        accumulate_(clock, s, w, memory, sample, o.rule)
        if self.drift is not None:
            clock = clock._replace(due=self._due(clock, s, w, state["before"], o))
        v, level = self._preconditioned(p, clock, o.rule, raw_grad, sample, state)
        update, v = self._clipped(v, m, clock, o.rule)
        if self.rise and o.rule.gamma > 0 and clock.due is not True:
            risen = self._risen(v, s, w, state["step"], o)
            update = update * _idu.pick(clock.due, torch.ones_like(v), risen / v.clamp(min=torch.finfo(v.dtype).tiny))

        step_size = step_size_of(clock, level, o)
        if is_braked(clock, o.rule, v):
            factor, brake = braked(clock, o, sample, s, w, v, level, state["brake"])
            step_size = step_size * factor
            state["brake"].copy_(brake)
        if o.decouples_decay:
            p.mul_(1 - o.lr * o.weight_decay)
        p.sub_(update * step_size)
        write_((state["preconditioner"], state["level"]), (v, level))
        end_interval_(clock, o.rule, s, w, memory, state["gamma"])

    def _due(self, clock: Clock, s: Tensor, w: Tensor, before: Tensor, o: StepOptions) -> bool | Tensor:
        """Whether the schedule says so or the second moment has drifted; `before` is its mean at the last refresh."""
        assert self.drift is not None
        mean = (s / w).mean()
        ratio = mean / before
        # A ratio to 0, before the first refresh, is inf or NaN, and the schedule refreshes then anyway.
        # w is 1 - beta2^n after n samples, and half a sample lets it be rounded.
        drifted = (w > 1 - o.beta2 ** (SETTLED - 0.5)) & ((ratio > self.drift) | (ratio < 1 / self.drift))
        due = drifted | clock.due
        before.copy_(torch.where(due, mean, before))
        return due if o.capturable else bool(due)

    def _preconditioned(
        self, p: Tensor, clock: Clock, rule: Rule, raw_grad: Tensor, sample: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """v and the level for this step: refreshed if due, else touched."""
        kept = v, level = state["preconditioner"], state["level"]
        gamma: Any = clock.gamma
        if clock.due is not False:
            refresh = torch.vmap(_idu.refresh, (0, 0, None, 0, None, None, None)) if self._has_rows(p) else _idu.refresh
            refreshed = refresh(v, state["exp_avg_sq"], state["weight"], level, rule, gamma, state["memory"])
            v, level = (_idu.pick(clock.due, new, old) for new, old in zip(refreshed, kept, strict=True))
        if rule.touch and clock.due is not True and rule.gamma != 0:
            v = _idu.pick(clock.due, v, _idu.touch(v, raw_grad, sample, level, rule.eps, rule.floor, gamma))
        return followed(clock, rule, v, state["exp_avg_sq"], gamma), level

    def _risen(self, v: Tensor, s: Tensor, w: Tensor, step: Tensor, o: StepOptions) -> Tensor:
        """1/psi after a part of the next refresh, where that is less."""
        if o.decides_on_device:
            table = _idu.refresh_table(o.growth, v.device)
            after, before = _idu.next_use_on_device(step, table), torch.where(table < step, table, 0.0).amax()
        else:
            t = int(step.item())
            after, before = t + _idu.steps_to_refresh(t, o.growth), _idu.refresh_times(t, o.growth)[-1]
        assert o.rule.beta3 is not None
        part = (1 - o.rule.beta3) * (step - before) / (after - before)
        new = (s / w + o.rule.eps) ** o.rule.gamma
        return torch.minimum(v, ((1 - part) / (v * v) + part * new).rsqrt())

    def _clipped(self, v: Tensor, m: Tensor, clock: Clock, rule: Rule) -> tuple[Tensor, Tensor]:
        """v m within its bound, and the v that is kept."""
        if rule.clip == math.inf or rule.gamma <= 0:
            return v * m, v
        clipped = _idu.sticky_clip(v, m, rule.clip * clock.bias_correction1, rule.gamma)
        return clipped * m, v if self.clips == "plain" else clipped
