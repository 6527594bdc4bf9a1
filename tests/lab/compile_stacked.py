"""Compiles the kernels of stacked networks for a GPU that need not be there; test_stacked.py runs it, without the
interpreter, and reads how much shared memory each takes."""

import inspect
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anon_lab.models import _stacked_kernels, stacked
from anon_lab.models.resnet import resnet20

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
TARGET = GPUTarget("cuda", 90, 32)
compiled: dict[Any, int] = {}


class Compiled:
    """In a kernel's place: a launch compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def compile_instead(*args: Any, **flags: Any) -> None:
            names = [name for name in self.kernel.arg_names if name not in flags]
            signature = {
                name: POINTERS[arg.dtype] if isinstance(arg, Tensor) else "i32"
                for name, arg in zip(names, args, strict=True)
            }
            # What a launch finds out by itself; it decides how wide loads are and how much shared memory they take.
            aligned = {
                (self.kernel.arg_names.index(name),): [["tt.divisibility", 16]]
                for name, arg in zip(names, args, strict=True)
                if isinstance(arg, Tensor) or arg % 16 == 0
            }
            key = (self.kernel.fn.__name__, *flags.items())
            if key not in compiled:
                source = ASTSource(self.kernel, {**signature, **dict.fromkeys(flags, "constexpr")}, flags, aligned)
                compiled[key] = triton.compile(source, TARGET).metadata.shared

        return compile_instead


def main() -> None:
    for name, kernel in inspect.getmembers(_stacked_kernels, lambda each: isinstance(each, triton.JITFunction)):
        if not name.startswith("_"):
            setattr(_stacked_kernels, name, Compiled(kernel))
    stacked.Stacked([resnet20()], 32).gradient(torch.randn(1, 2, 3, 32, 32), torch.randint(0, 10, (1, 2)))
    names = sorted({name for name, *_ in compiled})
    print(len(compiled), "variants of", ", ".join(names), "with at most", max(compiled.values()), "bytes")


if __name__ == "__main__":
    main()
