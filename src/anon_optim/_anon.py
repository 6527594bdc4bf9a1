"""Anon, in the shape of a torch.optim file: class, `_init_group`, `step`, the two paths, the functional form."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _default_to_fused_or_foreach,
    _disable_dynamo_if_unsupported,
    _use_grad_for_differentiable,
)

from anon_optim import _idu
from anon_optim._adamw_state import adamw_states
from anon_optim._check import check_betas, check_decay_now, check_group
from anon_optim._clipping import grad_factors
from anon_optim._diagnostics import Diagnostics, diagnose
from anon_optim._fused import Ownership, Plan, step_batch, takes_found_inf, uses_fused
from anon_optim._idu import Growth, Statistic
from anon_optim._options import Guard, Storage, flatten
from anon_optim._state import (
    fresh_state,
    is_released,
    placed,
    raise_if_foreign,
    real_view,
    released_moment,
    state_dtype,
)
from anon_optim._step import (
    Projection,
    StepOptions,
    accumulate_,
    braked,
    braked_all,
    end_interval_,
    forget_what_was_seen,
    is_braked,
    lazy_of,
    needs_s,
    preconditioned,
    preconditioned_all,
    projected,
    read_clock,
    rule_of,
    start_brake_,
    step_options,
    step_size_of,
    store_,
    write_,
)

FUNCTION = "<function>"
"""What a state dict holds in place of a function."""


class Anon(Optimizer):
    r"""Anon: an optimizer whose adaptivity is a real number `gamma` that the user turns.

    gamma = 0 behaves like SGD with momentum, 1 like Adam; values between, below and above are allowed. With its
    default guards it is safe on networks with sparse, dead or late gradients; :meth:`paper` gives the algorithm
    as printed. One step, per coordinate, with `t` the parameter's own step::

        m <- beta1 m + (1 - beta1) g
        s <- beta2 s + (1 - beta2) g^2           w <- beta2 w + (1 - beta2)
        if t is a refresh time (1, 2, 4, 8, ... for growth 2):
            sigma = s / w + eps
            psi2 <- sigma^gamma                             at the first refresh, or the first after gamma changed
            psi2 <- beta3 psi2 + (1 - beta3) sigma^gamma    later
            s, w <- 0
        theta <- project((1 - lr weight_decay) theta - lr m / (1 - beta1^t) / sqrt(psi2))

    Example::

        >>> import torch
        >>> from anon_optim import Anon
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Anon(model.parameters(), lr=1e-3, gamma=1.0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()

    The unit of `lr` depends on gamma, because the update is proportional to |g|^(1 - gamma): take Adam's lr at
    gamma = 1, ten times SGD's (momentum 0.9) at gamma = 0, or set `lr_scale="tensor"` and use Adam's for all.

    Args:
        params: parameters, named parameters, or param groups. Every number below may differ by group and may be
            changed in `param_groups` during training.
        lr: learning rate, a float or a one-element tensor.
        gamma: the adaptivity. A change takes effect at the next refresh, which then is a first one.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the second moment (on the squared scale, inside the root).
        weight_decay: decoupled from the gradient, or added to it if `decoupled_weight_decay` is False. lr grows as
            gamma falls; `lr * weight_decay > 1` is an error when decoupled.
        beta3: weight of the old psi2 at a refresh, in [0, 1). None leaves the memory to beta2: psi2 keeps what Adam's
            average would keep of the samples before the interval, however short that is. With it, a growth near 1 and
            no guard, gamma = 1 is Adam.
        growth: ratio of successive refresh times, a number above 1 (inf: only the first step) or a function of
            the step. A function must be pure; it stays out of the state dict.
        total_steps: the length of the run, if you know it. After its last refresh the second moment is dead: no step
            accumulates it any more, and its memory is freed. A step beyond starts it anew, and says so once.
        guard: see :class:`Guard`; None gives the printed algorithm.
        lr_scale: "tensor" divides the update of each tensor by mean(sigma)^((1 - gamma)/2). lr then has about
            Adam's unit at every gamma from -1 to 2; for gammas from 0 on the best is 1/2 to 8 times Adam's. It changes
            what is adapted: the response to the scale of a whole tensor's gradient becomes Adam's (A = 1), and only
            the response between its coordinates is gamma; on a tensor of one element the method is Adam's.
        statistic: what the second moment averages: "gradient" (g^2), "belief" ((g - m)^2) or a function
            `(grad, exp_avg) -> tensor >= 0`, which stays out of the state dict. With `Guard.touch` a step on which
            a coordinate's own gradient is zero adds nothing.
        project: a function `(theta, psi) -> theta` applied after each update, such as :class:`Box`; it stays out of
            the state dict. Coordinates that have not seen a gradient are left alone.
        bias_correction: divide m by 1 - beta1^t.
        decoupled_weight_decay: as AdamW (True) or as SGD and Adam (False).
        max_grad_norm: scale the gradients so that their norm over all groups is at most this, as `clip_grad_norm_`
            would before the step, but without a second pass over them; `p.grad` stays as it is.
        maximize: ascend instead of descend.
        storage: see :class:`Storage`.
        foreach: use torch's multi-tensor operations; by default where all parameters are on an accelerator that has
            no fused kernels. False, like `fused=False`, gives torch's own operations, one tensor at a time, on a CPU.
        fused: one kernel for a whole group; the default where all parameters are on CUDA and Triton is installed, or
            on a CPU in float32 or less and there is a C compiler, which it needs once. Tensors that no kernel takes
            (float64, complex, overlapping) go another way.
        capturable: keep all decisions on the device, so that a step can be captured in a CUDA graph and replayed
            across refreshes. Slower when not captured.
        differentiable: let autograd see the step.

    A NaN or inf in a gradient spoils its own coordinate, as in torch.optim, not the tensor's others;
    ``Guard(error_if_nonfinite=True)`` makes it an error.
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
        total_steps: int | None = None,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen, so sharing it is safe
        lr_scale: str | None = None,
        statistic: Statistic = "gradient",
        project: Projection | None = None,
        bias_correction: bool = True,
        decoupled_weight_decay: bool = True,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        storage: Storage = Storage(),  # noqa: B008
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "gamma": gamma,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "beta3": beta3,
            "growth": growth,
            "total_steps": total_steps,
            "guard": guard,
            "lr_scale": lr_scale,
            "statistic": statistic,
            "project": project,
            "bias_correction": bias_correction,
            "decoupled_weight_decay": decoupled_weight_decay,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
            "storage": storage,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        defaults = flatten(defaults)
        check_group(defaults)
        self._plans: dict[int, Plan] = {}
        self._ownership: Ownership | None = None
        self._said_past_total_steps = False
        super().__init__(params, defaults)

    @classmethod
    def paper(
        cls,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        gamma: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: float = 0.0,
        *,
        beta3: float | None = 0.5,
        growth: Growth = 2.0,
        total_steps: int | None = None,
        statistic: Statistic = "gradient",
        project: Projection | None = None,
        decoupled_weight_decay: bool = True,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        storage: Storage = Storage(),  # noqa: B008
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> "Anon":
        """The printed algorithm, without guards. For gamma >= 1 it needs gradients that are nowhere zero: a
        coordinate without gradient takes eps^(-gamma/2) (1e8 at gamma = 1) as its step size until the next
        refresh."""
        return cls(
            params,
            lr,
            gamma,
            betas,
            eps,
            weight_decay,
            beta3=beta3,
            growth=growth,
            total_steps=total_steps,
            guard=None,
            statistic=statistic,
            project=project,
            decoupled_weight_decay=decoupled_weight_decay,
            max_grad_norm=max_grad_norm,
            maximize=maximize,
            storage=storage,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )

    @classmethod
    def from_sgd(
        cls,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        gamma: float = -0.1,
        *,
        beta2: float = 0.999,
        beta3: float | None = 0.5,
        growth: Growth = 2.0,
        total_steps: int | None = None,
        guard: Guard | None = Guard(),  # noqa: B008
        max_grad_norm: float | None = None,
        maximize: bool = False,
        storage: Storage = Storage(),  # noqa: B008
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> "Anon":
        """A recipe for SGD with momentum, translated: the same lr, momentum and (coupled) weight decay, also where a
        param group has its own. Nesterov momentum and dampening have no counterpart.

        SGD sums gradients where Anon averages them, so Anon's lr is lr / (1 - momentum), without bias
        correction. At gamma = 0 the two agree step for step. A schedule that multiplies lr fits as it is; a rate that
        it names (`eta_min`, `max_lr`) is Anon's."""
        _check_momentum(momentum)
        return cls(
            [_averaging(each, lr, momentum, beta2) for each in params] if not isinstance(params, Tensor) else params,
            lr / (1 - momentum),
            gamma,
            (momentum, beta2),
            weight_decay=weight_decay,
            beta3=beta3,
            growth=growth,
            total_steps=total_steps,
            guard=guard,
            bias_correction=False,
            decoupled_weight_decay=False,
            max_grad_norm=max_grad_norm,
            maximize=maximize,
            storage=storage,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group = flatten(param_group)
            check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
        self._ownership = None
        self._said_past_total_steps = False
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            for p in group["params"]:
                for key, value in self.state.get(p, {}).items():
                    self.state[p][key] = placed(p, group, key, value)

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        weights: list[Tensor],
        memories: list[Tensor],
        preconditioners: list[Tensor],
        levels: list[Tensor],
        brakes: list[Tensor],
        gammas: list[Tensor],
        state_steps: list[Tensor],
        refresh_tables: list[Tensor],
    ) -> None:
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self._state_of(p, group)
            if group["differentiable"] and state["step"].requires_grad:
                raise RuntimeError("`requires_grad` is not supported for `step` in differentiable mode")
            params_with_grad.append(p)
            grads.append(p.grad)
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            weights.append(state["weight"])
            memories.append(state["memory"])
            preconditioners.append(state["preconditioner"])
            levels.append(state["level"])
            brakes.append(state["brake"])
            gammas.append(state["gamma"])
            state_steps.append(state["step"])
            in_graph = _is_in_graph(group)
            refresh_tables.append(_idu.refresh_table(group["growth"], p.device) if in_graph else state["step"])

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The parameter's state, ready for its next step; an error if it cannot be stepped."""
        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError(
                "Anon does not support sparse gradients: use dense ones (nn.Embedding(sparse=False)); "
                "rows without gradient then have no update but weight decay's"
            )
        if not (p.is_floating_point() or p.is_complex()):
            raise RuntimeError(f"Anon requires floating point or complex parameters, got {p.dtype}")
        state = self.state[p]
        if len(state) == 0:
            state.update(fresh_state(p, group))
        elif is_released(state["exp_avg_sq"]) and (_is_in_graph(group) or group["differentiable"]):
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])  # these write it on every step
        elif is_released(state["exp_avg_sq"]) and needs_s(int(state["step"].item()) + 1, group):
            if group["total_steps"] is not None and not self._said_past_total_steps:
                self._said_past_total_steps = True
                warnings.warn(
                    f"step {int(state['step'].item()) + 1} is past total_steps={group['total_steps']}: the second "
                    "moment was released and starts anew, as after a refresh",
                    stacklevel=2,
                )
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        return state

    def _release_moments(self, group: dict[str, Any]) -> None:
        """Free the second moments that no refresh will read again."""
        for p in group["params"]:
            state = self.state.get(p)
            if not state or is_released(state["exp_avg_sq"]):
                continue
            if _idu.is_dead(int(state["step"].item()), group["growth"], lazy_of(group)):
                state["exp_avg_sq"] = released_moment(p)
                state["weight"].zero_()

    def _step_fused(
        self, index: int, group: dict[str, Any], options: StepOptions, factor: Tensor | None, found_inf: Tensor | None
    ) -> list[Tensor]:
        """Step what can be fused, in batches; returns the parameters that another path must take."""
        plan = self._plans.get(index)
        if plan is None or not plan.follow():
            self._ownership = None
            plan = self._plans[index] = Plan(group, lambda p: self._state_of(p, group))
            if not plan.follow():  # a kernel would be given addresses of nothing
                raise RuntimeError("gradients, parameters or states changed while a step was being prepared")
        for batch in plan.batches:
            step_batch(batch, options, factor, found_inf)
        return plan.rest

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler: whether step() takes `grad_scale` and `found_inf` itself."""
        return all(takes_found_inf(group) for group in self.param_groups)

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step; `closure`, if given, evaluates the loss again and its value is returned."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        found_inf: Tensor | None = getattr(self, "found_inf", None)  # set by torch.amp.GradScaler, with grad_scale
        if found_inf is not None and not all(g["capturable"] for g in self.param_groups) and found_inf.item():
            return loss
        for index, group in enumerate(self.param_groups):
            if group["error_if_nonfinite"]:
                _raise_if_nonfinite(index, group)
        factors = grad_factors(self.param_groups, getattr(self, "grad_scale", None))

        eager = not torch.compiler.is_compiling()
        if eager and self._plans and not (self._ownership and self._ownership.holds(self.param_groups, self.state)):
            self._plans = {}
        for index, group in enumerate(self.param_groups):
            if group["decoupled_weight_decay"] and group["weight_decay"]:
                check_decay_now(group)  # a schedule may have raised lr
            options = step_options(group)
            remaining = group
            if eager and uses_fused(group):
                rest = self._step_fused(index, group, options, factors[index], found_inf)
                # A kernel leaves out, on the device, what overflowed; for the others the host has to ask.
                asks = group["capturable"] and any(p.numel() for p in rest)
                if not rest or (asks and found_inf is not None and found_inf.item()):
                    continue
                remaining = {**group, "params": rest}
            lists: list[list[Tensor]] = [[] for _ in range(12)]
            self._init_group(remaining, *lists)
            if (factor := factors[index]) is not None:
                lists[1] = [grad.to(state_dtype(grad)) * factor for grad in lists[1]]
            # what was to be fused and cannot be is at least taken together
            foreach = True if group["fused"] and group["foreach"] is None else group["foreach"]
            anon(*lists, foreach=foreach, options=options)
            if not (options.decides_on_device or options.differentiable) and (
                options.lazy.total_steps is not None or options.growth == math.inf
            ):
                self._release_moments(remaining)
        if self._plans and self._ownership is None and eager:
            self._ownership = Ownership(self.param_groups, self.state)
        return loss

    @torch.no_grad()
    def refresh(self) -> int:
        """Refresh every preconditioner now, from the gradients collected since its last refresh.

        For a change that the schedule does not know of: some steps after new data, a new loss or an unfrozen part
        of the model. The scheduled refresh times stay as they are. Returns how many tensors were refreshed: those
        that have collected nothing (right after a refresh, outside `Storage.window_tol`'s window, after the last
        refresh of `total_steps`) stay as they are."""
        refreshed_tensors = 0
        for group in self.param_groups:
            rule = rule_of(group)
            for p in group["params"]:
                state = self.state.get(p)
                if not state or p.numel() == 0 or state["weight"].item() == 0:
                    continue
                v, s = real_view(state["preconditioner"]), real_view(state["exp_avg_sq"])
                w, memory, gamma = state["weight"], state["memory"], state["gamma"].item()
                refreshed = _idu.refresh(v.to(s.dtype), s, w, state["level"], rule, gamma, memory)
                write_((v, state["level"]), refreshed)
                start_brake_(state["brake"], s, w, *refreshed, rule.gamma)
                memory.copy_(_idu.remembered(rule, memory, w))
                forget_what_was_seen(state["preconditioner"])
                state["gamma"].fill_(rule.gamma)
                s.zero_()
                state["weight"].zero_()
                refreshed_tensors += 1
        return refreshed_tensors

    @torch.no_grad()
    def diagnostics(self) -> list[Diagnostics]:
        """What the guards and the schedule are doing, one entry a tensor; computed on demand from the state."""
        rows = []
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names", [f"{index}.{i}" for i in range(len(group["params"]))])
            for name, p in zip(names, group["params"], strict=True):
                state = self.state.get(p)
                if state and p.numel() > 0:
                    rows.append(diagnose(name, state, group))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """As torch's, except that entries that are functions (`project`, `statistic`, `growth`) are code and not data:
        in their place stands a mark, and loading keeps what the optimizer has there."""
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group.update({key: FUNCTION for key, value in group.items() if callable(value)})
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but exact: state keeps its own precision instead of taking the parameter's, and functions
        that the state dict cannot hold stay as this optimizer has them."""
        own = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            raise_if_foreign(final)
            loaded.update(final)

        def restore(_: Optimizer) -> None:
            for saved, group, kept in zip(loaded["param_groups"], self.param_groups, own, strict=True):
                group.update({k: v for k, v in kept.items() if saved.get(k, FUNCTION) == FUNCTION})
                for key, p in zip(saved["params"], group["params"], strict=True):
                    for name, value in loaded["state"].get(key, {}).items():
                        self.state[p][name] = placed(p, group, name, value)
                    if "preconditioner" in self.state.get(p, {}):
                        forget_what_was_seen(self.state[p]["preconditioner"])

        # Hooks, so that the user's own pre-hooks come first and their post-hooks see the restored state.
        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    @torch.no_grad()
    def load_adamw_state(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint of torch's Adam or AdamW: its step and first moment as they are, psi from its
        second moment. The hyperparameters stay this optimizer's own; at gamma = 1 AdamW's lr fits. Parameters are
        told by their names where both optimizers were given them, else by their place."""
        for group, p, beta2, saved in adamw_states(self.param_groups, state_dict):
            rule, state = rule_of(group), fresh_state(p, group)
            t = float(saved["step"])
            state["step"].fill_(t)
            state["exp_avg"].copy_(saved["exp_avg"])
            state["exp_avg_sq"].copy_(saved.get("max_exp_avg_sq", saved["exp_avg_sq"]))
            self.state[p] = state
            if t == 0 or p.numel() == 0:
                continue
            v, s = real_view(state["preconditioner"]), real_view(state["exp_avg_sq"])
            bias_correction2 = torch.tensor(1 - beta2**t, dtype=s.dtype)
            # NaN is no gamma at all: every coordinate with a second moment takes it as its first.
            memory = state["memory"]
            refreshed = _idu.refresh(torch.ones_like(s), s, bias_correction2, state["level"], rule, math.nan, memory)
            memory.copy_(_idu.remembered(rule, memory, bias_correction2))
            write_((v, state["level"]), refreshed)
            start_brake_(state["brake"], s, bias_correction2, *refreshed, rule.gamma)
            s.zero_()


def _is_in_graph(group: dict[str, Any]) -> bool:
    """Whether the device decides what is due. torch.compile runs `_init_group`, in which this is asked, as it is."""
    return group["capturable"] or TracingContext.try_get() is not None


def _check_momentum(momentum: Any) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"Invalid momentum: {momentum}, expected a number in [0, 1)")


def _averaging(param: Any, lr: float, momentum: float, beta2: float) -> Any:
    """A param group of SGD's as Anon's, which averages gradients instead of summing them; a parameter as it is."""
    if not isinstance(param, dict):
        return param
    group = dict(param)
    for name in ("nesterov", "dampening"):
        if group.pop(name, None):
            raise ValueError(f"Invalid {name}: {param[name]}, expected a param group without it")
    if "betas" in group:
        check_betas(group["betas"])
        momentum = group["betas"][0]
    if "momentum" in group:
        momentum = group.pop("momentum")
        _check_momentum(momentum)
        group["betas"] = (momentum, beta2)
    for name in group.keys() & {"initial_lr", "max_lr", "min_lr"}:  # what a scheduler of SGD's noted, in SGD's unit
        group[name] = group[name] / (1 - momentum)
    group["lr"] = group.get("lr", lr) / (1 - momentum)
    return group


def _raise_if_nonfinite(index: int, group: dict[str, Any]) -> None:
    grads = [p.grad for p in group["params"] if p.grad is not None]
    bad = [i for i, grad in enumerate(grads) if not bool(grad.isfinite().all())]
    if bad:
        raise RuntimeError(
            f"Non-finite gradient in param group {index}, parameters {bad} of those with a gradient; "
            "nothing was updated"
        )


def _single_tensor_anon(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: list[Tensor],
    memories: list[Tensor],
    preconditioners: list[Tensor],
    levels: list[Tensor],
    brakes: list[Tensor],
    gammas: list[Tensor],
    state_steps: list[Tensor],
    refresh_tables: list[Tensor],
    options: StepOptions,
) -> None:
    o = options
    for i, param in enumerate(params):
        state_steps[i].add_(1)
        if param.numel() == 0:
            continue
        p, raw_grad = real_view(param), real_view(grads[i])
        m, s, v = real_view(exp_avgs[i]), real_view(exp_avg_sqs[i]), real_view(preconditioners[i])
        buffers = m, s, w, memory, v, level, brake = m, s, weights[i], memories[i], v, levels[i], brakes[i]
        if o.differentiable:  # autograd must not see a buffer change that it saved
            m, s, w, memory, v, level, brake = (buffer.clone() for buffer in buffers)
        v = v.to(m.dtype)
        theta, raw_grad = p.to(m.dtype, copy=o.differentiable), raw_grad.to(m.dtype)
        if o.maximize:
            raw_grad = -raw_grad

        grad = raw_grad.add(theta, alpha=o.weight_decay) if o.couples_decay else raw_grad
        m.lerp_(grad, 1 - o.beta1)
        sample = _idu.second_moment(o.statistic, grad, m)
        if o.masks_samples:
            sample = torch.where(raw_grad != 0, sample, 0.0)

        clock = read_clock(state_steps[i], gammas[i], refresh_tables[i], v.dtype, o)
        accumulate_(clock, s, w, memory, sample, o.rule)
        v, level = preconditioned(clock, o.rule, raw_grad, sample, m, s, w, memory, v, level, preconditioners[i])

        step_size = step_size_of(clock, level, o)
        if is_braked(clock, o.rule, v):
            factor, brake = braked(clock, o, sample, s, w, v, level, brake)
            step_size = step_size * factor

        if o.decouples_decay:
            theta = theta * (1 - o.lr * o.weight_decay)
        theta = theta - v * m * step_size
        if o.project is not None:
            theta = projected(theta, v, o.project)
        store_([p], [theta], o.stochastic_round)
        write_(buffers, (m, s, w, memory, v, level, brake))
        end_interval_(clock, o.rule, *buffers[1:4], gammas[i])


def _multi_tensor_anon(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: list[Tensor],
    memories: list[Tensor],
    preconditioners: list[Tensor],
    levels: list[Tensor],
    brakes: list[Tensor],
    gammas: list[Tensor],
    state_steps: list[Tensor],
    refresh_tables: list[Tensor],
    options: StepOptions,
) -> None:
    o = options
    if o.differentiable:
        raise RuntimeError("Anon with foreach=True does not support differentiable=True")
    if not params:
        return
    torch._foreach_add_(state_steps, 1.0)

    # foreach operations want one device and one dtype, and one decision for all
    clocks = [
        read_clock(step, gamma, table, real_view(m).dtype, o)
        for step, gamma, table, m in zip(state_steps, gammas, refresh_tables, exp_avgs, strict=True)
    ]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (param, clock) in enumerate(zip(params, clocks, strict=True)):
        if param.numel() > 0:
            decision = () if o.decides_on_device else (clock.due, clock.accumulate, clock.gamma)
            groups.setdefault((param.device, param.dtype, *decision), []).append(i)

    for indices in groups.values():
        ps = [real_view(params[i]) for i in indices]
        ms = [real_view(exp_avgs[i]) for i in indices]
        ss = [real_view(exp_avg_sqs[i]) for i in indices]
        vs = [real_view(preconditioners[i]).to(m.dtype) for i, m in zip(indices, ms, strict=True)]
        thetas = [p.to(m.dtype) for p, m in zip(ps, ms, strict=True)]
        raw_grads = [real_view(grads[i]).to(m.dtype) for i, m in zip(indices, ms, strict=True)]
        if o.maximize:
            raw_grads = list(torch._foreach_neg(raw_grads))

        gs = list(torch._foreach_add(raw_grads, thetas, alpha=o.weight_decay)) if o.couples_decay else raw_grads
        torch._foreach_lerp_(ms, gs, 1 - o.beta1)
        if o.statistic == "gradient":
            samples = list(torch._foreach_mul(gs, gs))
        else:
            samples = [_idu.second_moment(o.statistic, g, m) for g, m in zip(gs, ms, strict=True)]
        if o.masks_samples:
            samples = [torch.where(g != 0, x, 0.0) for g, x in zip(raw_grads, samples, strict=True)]

        factors: list[Any] = []
        large = [j for j, i in enumerate(indices) if is_braked(clocks[i], o.rule, vs[j])]
        if o.decides_on_device or clocks[indices[0]].due:
            for j, i in enumerate(indices):
                accumulate_(clocks[i], ss[j], weights[i], memories[i], samples[j], o.rule)
                vs[j], level = preconditioned(
                    clocks[i], o.rule, raw_grads[j], samples[j], ms[j], ss[j], weights[i], memories[i], vs[j],
                    levels[i], preconditioners[i],
                )  # fmt: skip
                write_((real_view(preconditioners[i]), levels[i]), (vs[j], level))
                if j in large:
                    factor, brake = braked(clocks[i], o, samples[j], ss[j], weights[i], vs[j], level, brakes[i])
                    brakes[i].copy_(brake)
                    factors.append(factor)
                end_interval_(clocks[i], o.rule, ss[j], weights[i], memories[i], gammas[i])
        else:
            if o.rule.beta3 is None:
                torch._foreach_mul_([memories[i] for i in indices], o.beta2)
            if clocks[indices[0]].accumulate:
                torch._foreach_mul_(ss, o.beta2)
                torch._foreach_add_(ss, samples, alpha=1 - o.beta2)
                torch._foreach_mul_([weights[i] for i in indices], o.beta2)
                torch._foreach_add_([weights[i] for i in indices], 1 - o.beta2)
            of_group = ([clocks[i] for i in indices], [levels[i] for i in indices])
            buffers = [preconditioners[i] for i in indices]
            guarded = preconditioned_all(*of_group, o.rule, raw_grads, samples, ms, ss, vs, buffers)
            for i, before, after in zip(indices, vs, guarded, strict=True):
                if after is not before:
                    real_view(preconditioners[i]).copy_(after)
            vs = guarded
            if large:
                states = [brakes[indices[j]] for j in large]
                of_large = (_chosen(samples, large), _chosen(vs, large), states)
                factors, followed = braked_all(clocks[indices[0]].gamma, o.beta1, *of_large)
                for state, brake in zip(states, followed, strict=True):  # DTensors have no _foreach_copy_
                    state.copy_(brake)
        step_sizes = [step_size_of(clocks[i], levels[i], o) for i in indices]
        del samples, gs, raw_grads  # so that the peak is one list of intermediates lower

        if o.decouples_decay:
            thetas = list(torch._foreach_mul(thetas, 1 - o.lr * o.weight_decay))
        updates = torch._foreach_mul(vs, ms)
        torch._foreach_mul_(updates, step_sizes)
        if large:
            torch._foreach_mul_(_chosen(updates, large), factors)
        thetas = list(torch._foreach_sub(thetas, updates))
        if o.project is not None:
            thetas = [projected(theta, v, o.project) for theta, v in zip(thetas, vs, strict=True)]
        store_(ps, thetas, o.stochastic_round)


def _chosen(tensors: Sequence[Tensor], places: list[int]) -> list[Tensor]:
    """A function, because a comprehension would capture what is deleted later, which torch.compile cannot trace."""
    return [tensors[place] for place in places]


@_disable_dynamo_if_unsupported(single_tensor_fn=_single_tensor_anon)
def anon(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    weights: list[Tensor],
    memories: list[Tensor],
    preconditioners: list[Tensor],
    levels: list[Tensor],
    brakes: list[Tensor],
    gammas: list[Tensor],
    state_steps: list[Tensor],
    refresh_tables: list[Tensor],
    foreach: bool | None = None,
    *,
    options: StepOptions,
) -> None:
    """One step of Anon on lists of tensors, all updated in place. See :class:`Anon`."""
    if foreach is None:
        _, foreach = _default_to_fused_or_foreach(params, options.differentiable, use_fused=False)
    path = _multi_tensor_anon if foreach else _single_tensor_anon
    path(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        weights,
        memories,
        preconditioners,
        levels,
        brakes,
        gammas,
        state_steps,
        refresh_tables,
        options,
    )
