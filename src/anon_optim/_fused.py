"""The fused path: tensors that step together form a batch, with one table of addresses and their scalars packed.

A batch lives from step to step. What changes in it (usually the addresses of the gradients) is looked for on each step
and sent again; the rest stays, so that the host's share of a step does not grow with the work.
"""

import functools
import importlib.util
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from anon_optim import _idu
from anon_optim._idu import Rule
from anon_optim._state import is_released, packed_state, released_moment
from anon_optim._step import StepOptions, forget_what_was_seen, needs_s, projected

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 512
"""How many elements a kernel takes at a time."""
ROWS = ("param", "grad", "exp_avg", "exp_avg_sq", "preconditioner")
"""The rows of a batch's address table."""


class Numbers(NamedTuple):
    """What a kernel needs to know of one step beside the tensors; a device clock replaces the last six."""

    rule: Rule
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    decoupled: bool
    belief: bool
    masked: bool
    maximize: bool
    lr_scale: bool
    stochastic_round: bool
    factor: Tensor | None
    """What every gradient is multiplied by, a one-element tensor: unscaling and clipping by norm."""
    bias_correction1: float
    bias_correction2: float
    gamma: float
    """The gamma of the preconditioner in use."""
    changed: bool
    """Whether this refresh is the first of another gamma."""
    beta3s: Tensor | None
    """Of each tensor, at a refresh."""
    accumulate: bool

    def has_brake(self, due: bool, by_device: bool) -> bool:
        """Whether the brake has a part in this step; where the device decides, it may."""
        return self.rule.brake and (by_device or (self.rule.gamma if due else self.gamma) > 0)


class Kind(NamedTuple):
    """What the tensors of a batch have in common."""

    device: torch.device
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    preconditioner_dtype: torch.dtype
    aligned: bool
    step: float
    gamma: float


def is_dense(x: Tensor) -> bool:
    """Every element of one block of memory exactly once, in whatever order (contiguous, channels_last, ...)."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(x.stride(), x.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def uses_fused(group: dict[str, Any]) -> bool:
    """As asked for; by default where all parameters are on CUDA and Triton is there, or on a CPU with a C compiler."""
    if group["differentiable"] or callable(group["statistic"]):
        return False
    if group["fused"] is not None:
        return group["fused"]
    if group["foreach"] is not None:
        return False
    if all(p.is_cuda for p in group["params"]):
        return backend("cuda") is not None
    return all(p.is_cpu and p.dtype in DTYPES for p in group["params"]) and has_compiled_kernel()


@functools.cache
def has_compiled_kernel() -> bool:
    """Without a warning where there is none: nobody has asked for it."""
    from anon_optim._fused_cpu import NoLibrary, library

    try:
        library()
    except NoLibrary:
        return False
    return True


def takes_found_inf(group: dict[str, Any]) -> bool:
    """Whether a step of the group can be skipped by what only the device knows, or by the host that asks it."""
    if not uses_fused(group):
        return False
    if not group["capturable"]:
        return True
    return all(map(takes, group["params"]))


def takes(p: Tensor) -> bool:
    """Whether a kernel takes the parameter, whatever its gradient is."""
    return (
        type(p) in (Tensor, nn.Parameter)
        and p.dtype in DTYPES
        and backend(p.device.type) is not None
        and (p.is_contiguous() or is_dense(p))
    )


@functools.cache
def backend(device_type: str) -> "Launch | None":
    """The kernels for a kind of device, or None where it has none."""
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return None
        from anon_optim._fused_cuda import launch

        return launch
    if device_type == "cpu":
        from anon_optim._fused_cpu import compiled_launch

        return compiled_launch()
    return None


def is_eligible(p: Tensor) -> bool:
    grad = p.grad
    assert grad is not None
    return (
        takes(p)
        and p.numel() > 0
        and grad.dtype in DTYPES
        and grad.layout == torch.strided
        and grad.shape == p.shape  # not so where a parameter was cut and its gradient kept
        and grad.stride() == p.stride()
        and has_its_own_memory(p)
        and has_its_own_memory(grad)
    )


def has_its_own_memory(x: Tensor) -> bool:
    """Whether a kernel finds in memory what the tensor holds: not so where it is only marked as negated or as zero."""
    return not x.is_neg() and x.data_ptr() != 0


def has_layout_of(p: Tensor, state: dict[str, Tensor]) -> bool:
    """Whether the state lies in memory as the parameter does; after a load or a change of memory format it may not."""
    s = state["exp_avg_sq"]
    kept = (state["exp_avg"], state["preconditioner"], *(() if is_released(s) else (s,)))
    return all(x.shape == p.shape and (p.numel() == 1 or x.stride() == p.stride()) for x in kept)


class Batch:
    """Tensors of one kind that step together."""

    def __init__(self, kind: Kind, params: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        self.kind = kind
        self.params = params
        self.states = states
        self.steps, self.weights, self.memories, self.gammas, self.levels, self.brakes = packed_state(states)
        for state in states:
            forget_what_was_seen(state["preconditioner"])  # a kernel will write it
        self.entries = list(_all_entries(states))
        self.numels_of_params = [p.numel() for p in params]
        # A negated gradient is half of a complex one, which leaves gaps in memory everywhere but here.
        self.single_numbers = [i for i, p in enumerate(params) if p.numel() == 1]
        self.param_addresses = [p.data_ptr() for p in params]
        self.strides = None if all(p.is_contiguous() for p in params) else [p.stride() for p in params]
        self.kernels: dict[Any, Any] = {}
        self.void = False
        self.released = any(is_released(state["exp_avg_sq"]) for state in states)
        self.grad_addresses: list[int] = [0] * len(params)
        device = kind.device
        m, s, v = ([state[key].data_ptr() for state in states] for key in ROWS[2:])
        table = [self.param_addresses, self.grad_addresses, m, s, v]
        self.table = torch.tensor(table, dtype=torch.int64).to(device)
        self.unseens = torch.ones(len(params), dtype=torch.int32, device=device)
        sizes = torch.tensor([p.numel() for p in params], dtype=torch.int64)
        blocks = (sizes + BLOCK - 1) // BLOCK
        ends = blocks.cumsum(0)
        self.n_blocks = int(ends[-1])
        self.numels = sizes.to(device)
        self.first_block = torch.cat([ends.new_zeros(1), ends]).to(device)
        owner = torch.repeat_interleave(torch.arange(len(params)), blocks)
        self.powers = torch.empty(self.n_blocks, dtype=torch.float32, device=device)
        self.block_tensor = owner.to(torch.int32).to(device)
        self.block_start = (torch.arange(self.n_blocks) - (ends - blocks)[owner]).to(torch.int32).to(device)

    def follow(self) -> bool:
        """Take over the gradients of this step; False if anything else has changed, and the batch is void."""
        grads: list[Any] = [p.grad for p in self.params]
        if self.void or any(grad is None for grad in grads) or not self._has_layout(grads):
            return False
        grad_addresses = [grad.data_ptr() for grad in grads]
        if (
            {grad.dtype for grad in grads} != {self.kind.grad_dtype}
            or [p.data_ptr() for p in self.params] != self.param_addresses
            or list(map(Tensor.numel, self.params)) != self.numels_of_params
            or list(map(Tensor.numel, grads)) != self.numels_of_params
            or any(grads[i].is_neg() for i in self.single_numbers)
            or 0 in grad_addresses
            or sum(map(len, self.states)) != len(self.entries)
            or not all(map(operator.is_, _all_entries(self.states), self.entries))
        ):
            return False
        if grad_addresses != self.grad_addresses:
            if self.kind.aligned and any(address % 16 for address in grad_addresses):
                return False
            self.grad_addresses = grad_addresses
            fresh = torch.tensor(grad_addresses, dtype=torch.int64)
            if self.kind.device.type == "cuda":
                fresh = fresh.pin_memory()  # or the copy would wait for the device
            self.table[1].copy_(fresh, non_blocking=True)
        return True

    def _has_layout(self, grads: list[Tensor]) -> bool:
        """Whether gradients and parameters lie in memory as the parameters did."""
        if self.strides is None:
            return all(map(Tensor.is_contiguous, chain(grads, self.params)))
        return all([x.stride() for x in each] == self.strides for each in (grads, self.params))

    def is_uniform(self) -> bool:
        """Whether all still stand at one step with one gamma, as they did when the batch was made."""
        if self.kind.step < 0:
            return True
        steps, gammas = self.steps.tolist(), self.gammas.tolist()
        return steps.count(steps[0]) == len(steps) and gammas.count(gammas[0]) == len(gammas)


def _all_entries(states: Iterable[dict[str, Tensor]]) -> Iterable[Tensor]:
    return chain.from_iterable(map(dict.values, states))


class Ownership:
    """Which parameters an optimizer had, in which groups, and which states: plans hold as long as these are the same
    objects. That a state's entries are, its batch sees to."""

    def __init__(self, groups: list[dict[str, Any]], states: dict[Tensor, dict[str, Tensor]]) -> None:
        self.held = self._list(groups, states)

    def holds(self, groups: list[dict[str, Any]], states: dict[Tensor, dict[str, Tensor]]) -> bool:
        ours = self._list(groups, states)
        return len(ours) == len(self.held) and all(map(operator.is_, ours, self.held))

    @staticmethod
    def _list(groups: list[dict[str, Any]], states: dict[Tensor, dict[str, Tensor]]) -> list[Any]:
        owned = chain.from_iterable((group, *group["params"]) for group in groups)
        return [*owned, *states.keys(), *states.values()]


class Launch(Protocol):
    """A backend: one step of a batch. With a `clock` the device decides what is due, and `due` says that it may be."""

    def __call__(self, batch: Batch, x: Numbers, *, due: bool, clock: Tensor | None) -> None: ...


class Plan:
    """A param group's parameters, sorted: batches, those that need another path, and those without a gradient."""

    def __init__(self, group: dict[str, Any], state_of: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self.group = group
        self.idle = [p for p in group["params"] if p.grad is None]
        active = [p for p in group["params"] if p.grad is not None]
        kinds: dict[Kind, list[Tensor]] = {}
        self.rest: list[Tensor] = []
        for p in active:
            state = state_of(p)
            if is_eligible(p) and has_layout_of(p, state):
                kinds.setdefault(self._kind(p, state, group), []).append(p)
            else:
                self.rest.append(p)
        self.batches = [Batch(kind, ps, [state_of(p) for p in ps]) for kind, ps in kinds.items()]

    @staticmethod
    def _kind(p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Kind:
        assert p.grad is not None
        tensors = [p, p.grad, state["exp_avg"], state["preconditioner"]]
        if not is_released(state["exp_avg_sq"]):
            tensors.append(state["exp_avg_sq"])
        on_device = group["capturable"]
        return Kind(
            device=p.device,
            param_dtype=p.dtype,
            grad_dtype=p.grad.dtype,
            preconditioner_dtype=state["preconditioner"].dtype,
            aligned=not any(x.data_ptr() % 16 for x in tensors),
            step=-1.0 if on_device else state["step"].item(),
            gamma=0.0 if on_device else state["gamma"].item(),
        )

    def follow(self) -> bool:
        """Whether the plan still holds; the batches then have this step's gradients."""
        return (
            all(p.grad is None for p in self.idle)
            and all(p.grad is not None for p in self.rest)
            and all(batch.follow() and batch.is_uniform() and not self._misses_s(batch) for batch in self.batches)
        )

    def _misses_s(self, batch: Batch) -> bool:
        """Whether a released s is needed again: the run goes on past its known end, or growth was changed."""
        return batch.released and needs_s(int(batch.steps.max().item()) + 1, self.group)


def step_batch(batch: Batch, o: StepOptions, factor: Tensor | None, found_inf: Tensor | None) -> None:
    """One step of a batch, by the host's clock or the device's."""
    launch = backend(batch.kind.device.type)
    assert launch is not None
    if o.capturable:
        _step_by_device_clock(batch, o, launch, factor, found_inf)
    else:
        _step_by_host_clock(batch, o, launch, factor)
    # As torch's own in-place operations do, so that a backward through the old values is an error.
    torch.autograd.graph.increment_version(batch.params)
    if o.project is not None:
        for p, state in zip(batch.params, batch.states, strict=True):
            v = state["preconditioner"].to(torch.float32)
            p.copy_(projected(p.to(torch.float32), v, o.project))


def _numbers(o: StepOptions, factor: Tensor | None, **clock: Any) -> Numbers:
    return Numbers(
        rule=o.rule,
        beta1=o.beta1,
        beta2=o.beta2,
        weight_decay=o.weight_decay,
        decoupled=o.decoupled_weight_decay,
        belief=o.statistic == "belief",
        masked=o.masks_samples,
        maximize=o.maximize,
        lr_scale=o.lr_scale == "tensor",
        stochastic_round=o.stochastic_round,
        factor=factor,
        **clock,
    )


def _beta3s(memories: Tensor, weights: Tensor, rule: Rule) -> Tensor:
    """Of each tensor, as a refresh on this step would have it."""
    return torch.ones_like(memories, dtype=torch.float64) * _idu.kept(rule, memories, weights)


def _step_by_host_clock(batch: Batch, o: StepOptions, launch: Launch, factor: Tensor | None) -> None:
    batch.steps.add_(1)
    t = int(batch.steps[0].item())
    gamma = batch.gammas[0].item()
    due = _idu.is_refresh(t, o.growth)
    accumulate = _idu.accumulates(t, o.growth, o.lazy)
    if accumulate:
        batch.weights.mul_(o.beta2).add_(1 - o.beta2)
    if o.rule.beta3 is None:
        batch.memories.mul_(o.beta2)
    numbers = _numbers(
        o,
        factor,
        lr=o.lr.item() if isinstance(o.lr, Tensor) else o.lr,
        bias_correction1=1 - o.beta1**t if o.bias_correction else 1.0,
        bias_correction2=1 - o.beta2**t,
        gamma=gamma,
        changed=gamma != o.rule.gamma,
        beta3s=_beta3s(batch.memories, batch.weights, o.rule) if due else None,
        accumulate=accumulate,
    )
    launch(batch, numbers, due=due, clock=None)
    if due:
        batch.memories.copy_(_idu.remembered(o.rule, batch.memories, batch.weights))
        batch.weights.zero_()
        batch.gammas.fill_(o.rule.gamma)
    if not batch.released and _idu.is_dead(t, o.growth, o.lazy):
        for p, state in zip(batch.params, batch.states, strict=True):
            state["exp_avg_sq"] = released_moment(p)
        batch.weights.zero_()
        batch.void = True
        batch.entries = []  # or they would keep alive what was released


def _step_by_device_clock(
    batch: Batch, o: StepOptions, launch: Launch, factor: Tensor | None, found_inf: Tensor | None
) -> None:
    batch.steps.add_(1.0 if found_inf is None else 1.0 - found_inf)
    steps = batch.steps.to(torch.float32)
    next_use = _idu.next_use_on_device(steps, _idu.refresh_table(o.growth, batch.kind.device))
    due = next_use == steps
    accumulate = _idu.accumulates_on_device(steps, next_use, o.lazy)
    if found_inf is not None:
        due, accumulate = due & (found_inf == 0), accumulate & (found_inf == 0)
    skipped = 0.0 if found_inf is None else found_inf
    weights = torch.where(accumulate, batch.weights * o.beta2 + (1 - o.beta2), batch.weights)
    gammas = torch.where(due, o.rule.gamma, batch.gammas)
    one = torch.ones_like(steps)
    memories = batch.memories
    if o.rule.beta3 is None:
        memories = torch.where(skipped * one > 0, memories, memories * o.beta2)
    columns = [
        due.to(torch.float32) - skipped * one,
        accumulate,
        1 - o.beta1**steps if o.bias_correction else one,
        one * o.lr,
        gammas,
        weights,
        batch.gammas != o.rule.gamma,
        _beta3s(memories, weights, o.rule),
        _idu.bias_correction2_on_device(o.beta2, steps),
    ]
    clock = torch.stack([column.to(torch.float32) for column in columns], dim=1)
    unread = dict.fromkeys(("lr", "bias_correction1", "bias_correction2", "gamma"), 0.0)
    numbers = _numbers(o, factor, **unread, changed=False, beta3s=None, accumulate=True)
    launch(batch, numbers, due=True, clock=clock)
    batch.memories.copy_(torch.where(due, _idu.remembered(o.rule, memories, weights), memories))
    batch.weights.copy_(torch.where(due, 0.0, weights))
    batch.gammas.copy_(gammas)
