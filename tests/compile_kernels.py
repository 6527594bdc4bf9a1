"""Compiles every CUDA kernel for a GPU that need not be there; test_fused_cuda.py runs it, without the interpreter."""

from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anon_optim import Anon, Guard, Storage, _fused, _fused_cuda
from anon_optim._fused import Plan, step_batch
from anon_optim._step import step_options

POINTERS = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
TARGET = GPUTarget("cuda", 90, 32)
compiled: dict[Any, int] = {}


def compile_instead(
    kernel: Any, grid: int, batch: Any, args: tuple[Any, ...], flags: dict[str, Any], warps: int = _fused_cuda.WARPS
) -> None:
    names = [name for name in kernel.arg_names if name not in flags]
    kinds = {float: "fp32", int: "i32"}
    signature = {
        name: POINTERS[arg.dtype] if isinstance(arg, Tensor) else kinds[type(arg)]
        for name, arg in zip(names, args, strict=True)
    }
    key = (kernel.fn.__name__, *signature.values(), *flags.values())
    if key not in compiled:
        source = ASTSource(kernel, {**signature, **dict.fromkeys(flags, "constexpr")}, flags)
        compiled[key] = len(triton.compile(source, TARGET, {"num_warps": warps}).asm["cubin"])


def main() -> None:
    _fused_cuda._run = compile_instead
    _fused.backend = lambda device_type: _fused_cuda.launch
    settings = product(
        (False, True), ({}, {"guard": None}, {"statistic": "belief", "weight_decay": 0.1, "lr_scale": "tensor"})
    )
    for capturable, options in settings:
        for dtype, storage in (
            (torch.float32, Storage()),
            (torch.bfloat16, Storage(torch.bfloat16, stochastic_round=True)),
        ):
            p = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
            p.grad = torch.ones_like(p)
            optimizer = Anon([p], capturable=capturable, storage=storage, **{"guard": Guard(), **options})
            group = optimizer.param_groups[0]
            plan = Plan(group, lambda p, o=optimizer, g=group: o._state_of(p, g))
            (batch,) = plan.batches
            for _ in range(3):  # a refresh, another, and a step between
                assert plan.follow()
                step_batch(batch, step_options(group), None, None)
    names = sorted({str(name) for name, *_ in compiled})
    print(len(compiled), "variants of", ", ".join(names))


if __name__ == "__main__":
    main()
