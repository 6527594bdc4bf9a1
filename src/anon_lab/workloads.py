"""Sets of parameter shapes to time optimizers on: those of well-known models, and of awkward ones."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

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
    """Gives parameters new gradients, in place: stretches of random numbers that begin elsewhere every time. A gradient
    that never changed would be as large as its own average, which is where a clip acts on everything; of a few that
    came back in turn the average would be at its largest again and again, which is where it acts next."""

    SPARE = 1 << 16
    """Places where a stretch may begin."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.grads = [p.grad for p in parameters if p.grad is not None]
        first = self.grads[0]
        generator = torch.Generator(first.device).manual_seed(1)
        length = max(grad.numel() for grad in self.grads) + self.SPARE
        self.numbers = (1e-3 * torch.randn(length, device=first.device, generator=generator)).to(first.dtype)
        self.random = Random(1)

    def __call__(self) -> None:
        torch._foreach_copy_(self.grads, [self._stretch(grad) for grad in self.grads])

    def _stretch(self, grad: torch.Tensor) -> torch.Tensor:
        begin = self.random.randrange(self.SPARE)
        return self.numbers[begin : begin + grad.numel()].view(grad.shape)


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
