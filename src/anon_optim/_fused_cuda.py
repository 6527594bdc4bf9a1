"""One Triton launch for a whole batch of tensors; the kernels are those of `_cuda_kernels.py`.

A step between refreshes is one kernel, with or without the second moment s. A refresh step is three: the moments and
each block's sums of sigma, then each tensor's level, then psi and the update. Either ends with a small one, for each
tensor's brake.
"""

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from anon_optim import _idu
from anon_optim._cuda_kernels import (
    CLOCK_COLUMNS,
    brake_kernel,
    levels_kernel,
    moments_kernel,
    plain_kernel,
    refresh_kernel,
)
from anon_optim._fused import BLOCK, Batch, Numbers

WARPS = 4

PERSISTENT = 2048
"""How many programs a refresh takes where the device decides whether there is one: mostly they look and leave."""

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _run(
    kernel: Any, grid: int, batch: Batch, args: tuple[Any, ...], flags: dict[str, Any], warps: int = WARPS
) -> None:
    """Launch; the second time without Triton's look at every argument, for a batch's kernels differ by flags alone."""
    key = (kernel, *flags.values())
    compiled = batch.kernels.get(key)
    if compiled is None:
        batch.kernels[key] = kernel[(grid,)](*args, **flags, num_warps=warps)
    else:
        compiled[(grid, 1, 1)](*args, *flags.values())


def launch(batch: Batch, x: Numbers, *, due: bool, clock: Tensor | None) -> None:
    """One step of a batch. With a `clock` the device decides what is due, and `due` says that it may be."""
    device = batch.kind.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(batch, x, due, clock)
    else:
        _launch(batch, x, due, clock)


def _launch(batch: Batch, x: Numbers, due: bool, clock: Tensor | None) -> None:
    _step(batch, x, due, clock)
    if x.has_brake(due, clock is not None):
        _run(
            brake_kernel, len(batch.params), batch,
            (batch.powers, batch.first_block, batch.numels, batch.table if clock is None else clock, batch.levels,
             batch.brakes, float(due), float(x.rule.gamma), 1 - float(x.beta1)),
            {"DEVICE_CLOCK": clock is not None, "LEAST": _idu.BRAKED, "CHUNK": 8192}, warps=8,
        )  # fmt: skip


def _step(batch: Batch, x: Numbers, due: bool, clock: Tensor | None) -> None:
    rule, kind, nothing = x.rule, batch.kind, batch.table
    n_tensors, n_blocks = len(batch.params), batch.n_blocks
    tensors = (batch.table, batch.numels, batch.block_tensor, batch.block_start)
    clock_ptr = nothing if clock is None else clock
    factor_ptr = nothing if x.factor is None else x.factor
    seed = nothing
    if x.stochastic_round:
        seed = torch.randint(2**31, (1,), dtype=torch.int32, device=kind.device)
    lr, weight_decay, eps = float(x.lr), float(x.weight_decay), float(rule.eps)
    averages = (1 - float(x.beta1), float(x.beta2), 1 - float(x.beta2))
    dtypes = {
        "P_DTYPE": _TRITON_DTYPES[kind.param_dtype],
        "G_DTYPE": _TRITON_DTYPES[kind.grad_dtype],
        "V_DTYPE": _TRITON_DTYPES[kind.preconditioner_dtype],
        "ALIGNED": kind.aligned,
        "DEVICE_CLOCK": clock is not None,
    }
    gradient = {
        "HAS_FACTOR": x.factor is not None,
        "MAXIMIZE": x.maximize,
        "COUPLED": x.weight_decay != 0 and not x.decoupled,
        "BELIEF": x.belief,
        "MASKED": x.masked,
    }
    update = {
        "DECOUPLED": x.weight_decay != 0 and x.decoupled,
        "TOUCH": rule.touch,
        "CLIP": rule.clip < math.inf,
        "BRAKE": x.has_brake(due, clock is not None),
        "LR_SCALE": x.lr_scale,
        "STOCHASTIC": x.stochastic_round and kind.param_dtype == torch.bfloat16,
        "BLOCK": BLOCK,
    }
    if not due or clock is not None:
        _run(
            plain_kernel, n_blocks, batch,
            (*tensors, clock_ptr, factor_ptr, seed, batch.levels, batch.brakes, batch.powers, batch.unseens,
             n_tensors, lr, float(x.gamma), float(x.bias_correction1), float(x.bias_correction2), weight_decay,
             *averages, eps, float(rule.clip), float(rule.floor)),
            {**dtypes, **gradient, **update, "FOLLOW": rule.follow, "ACCUMULATE": x.accumulate},
        )  # fmt: skip
    if not due:
        return
    gamma, changed, any_due, programs = float(rule.gamma), float(x.changed), nothing, n_blocks
    if clock is not None:
        weights, beta3s = (clock[:, CLOCK_COLUMNS.index(name)].contiguous() for name in ("weight", "beta3"))
        any_due = (clock[:, CLOCK_COLUMNS.index("due")] > 0).any().to(torch.float32)
        programs = min(n_blocks, PERSISTENT)
    else:
        assert x.beta3s is not None
        shares = torch.stack([batch.weights, x.beta3s.to(torch.float32)])
        if kind.device.type == "cuda":
            shares = shares.pin_memory().to(kind.device, non_blocking=True)
        weights, beta3s = shares
    partials = torch.empty((2, n_blocks), dtype=torch.float32, device=kind.device)
    means = torch.empty(n_tensors, dtype=torch.float32, device=kind.device)
    _run(
        moments_kernel, programs, batch,
        (*tensors, clock_ptr, any_due, factor_ptr, weights, partials, n_tensors, n_blocks, weight_decay, *averages,
         eps),
        {**dtypes, **gradient, "BLOCK": BLOCK},
    )  # fmt: skip
    _run(
        levels_kernel, n_tensors, batch,
        (partials, batch.first_block, clock_ptr, beta3s, means, batch.levels, batch.unseens, n_blocks),
        {"DEVICE_CLOCK": clock is not None, "CHUNK": 1024},
    )  # fmt: skip
    _run(
        refresh_kernel, programs, batch,
        (*tensors, clock_ptr, any_due, seed, means, weights, beta3s, batch.levels, batch.powers, batch.unseens,
         n_tensors, n_blocks, lr, gamma, changed, float(x.bias_correction1), weight_decay, averages[2], eps,
         float(rule.clip), float(rule.floor)),
        {**dtypes, **update},
    )  # fmt: skip
