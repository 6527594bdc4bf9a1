"""Sets of parameter shapes to time optimizers on: those of well-known models, and of awkward ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Shapes = list[tuple[int, ...]]


def gpt2(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2 with tied embeddings, biases and LayerNorms."""
    d = width
    block: Shapes = [
        (d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,),
        (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,),
    ]  # fmt: skip
    return [(vocabulary, d), (context, d), *(block * layers), (d,), (d,)]


def resnet50() -> Shapes:
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    entering = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for index in range(blocks):
            leaving = 4 * width
            for shape in ((width, entering, 1, 1), (width, width, 3, 3), (leaving, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if index == 0:
                shapes += [(leaving, entering, 1, 1), (leaving,), (leaving,)]
            entering = leaving
    return [*shapes, (1000, 2048), (1000,)]


def llama_7b_layers(layers: int) -> Shapes:
    """Some layers of a 7 B model, without its embeddings."""
    d, hidden = 4096, 11008
    return [(d, d), (d, d), (d, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,)] * layers


def mixed_30m() -> Shapes:
    """30 M parameters in 60 tensors from 1 to 4 M elements."""
    return [(4_000_000,)] * 4 + [(1000, 1000)] * 10 + [(512, 512)] * 14 + [(2048,)] * 20 + [(1,)] * 12


@dataclass(frozen=True)
class Workload:
    name: str
    shapes: Callable[[], Shapes]
    dtype: torch.dtype = torch.float32

    def parameters(self, device: str) -> list[torch.nn.Parameter]:
        """Random parameters with random gradients, for which no optimizer has a shortcut."""
        generator = torch.Generator(device).manual_seed(0)
        parameters = []
        for shape in self.shapes():
            values, grads = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
            p = torch.nn.Parameter((0.02 * values).to(self.dtype))
            p.grad = (1e-3 * grads).to(self.dtype)
            parameters.append(p)
        return parameters


class Turns:
    """Gives parameters new gradients, in place, from a few random sets: a gradient that never changed would be as large
    as its own average, which is where a clip acts on everything."""

    def __init__(self, parameters: list[torch.nn.Parameter], sets: int = 4) -> None:
        self.grads = [p.grad for p in parameters if p.grad is not None]
        generator = torch.Generator(self.grads[0].device).manual_seed(1)
        self.sets = [[self._draw(grad, generator) for grad in self.grads] for _ in range(sets)]
        self.turn = 0

    @staticmethod
    def _draw(grad: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return (1e-3 * torch.randn(grad.shape, device=grad.device, generator=generator)).to(grad.dtype)

    def __call__(self) -> None:
        self.turn = (self.turn + 1) % len(self.sets)
        torch._foreach_copy_(self.grads, self.sets[self.turn])


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt2-small", lambda: gpt2(12, 768)),
        Workload("gpt2-medium", lambda: gpt2(24, 1024)),
        Workload("resnet50", resnet50),
        Workload("7b-layers-bf16", lambda: llama_7b_layers(4), torch.bfloat16),
        Workload("10k-tiny", lambda: [(64,)] * 10_000),
        Workload("mixed-30m", mixed_30m),
    )
}
FOR_CUDA = ("gpt2-small", "gpt2-medium", "resnet50", "7b-layers-bf16", "10k-tiny")
FOR_CPU = ("mixed-30m", "resnet50", "10k-tiny")
