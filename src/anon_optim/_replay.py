"""Running an optimizer again on gradients that are given and not computed."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[Parameter]], Optimizer]


class Twin:
    """An optimizer on parameters of its own, which are put back after every step."""

    def __init__(self, make_optimizer: MakeOptimizer, origin: Sequence[Tensor]) -> None:
        self.origin = list(origin)
        self.params = [Parameter(place.clone()) for place in origin]
        self.optimizer = make_optimizer(self.params)
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"make_optimizer must return a torch.optim.Optimizer, but returned {self.optimizer!r}")
        self.name = type(self.optimizer).__name__
        arguments = inspect.signature(self.optimizer.step).parameters.values()
        if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
            raise ValueError(
                f"{self.name} cannot be replayed: its step() asks a closure for new losses, and recorded gradients "
                "cannot answer"
            )

    def add_param_group(self, options: dict[str, Any], origin: Sequence[Tensor]) -> None:
        params = [Parameter(place.clone()) for place in origin]
        self.optimizer.add_param_group({**options, "params": params})
        self.origin += origin
        self.params += params

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The updates on these gradients. They may be written to, as optimizers do."""
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient
        try:
            self.optimizer.step()
        except Exception as error:
            raise ValueError(f"{self.name} cannot be replayed on recorded gradients: {error}") from error
        updates = [p.detach() - place for p, place in zip(self.params, self.origin, strict=True)]
        for p, place in zip(self.params, self.origin, strict=True):
            p.copy_(place)
        return updates


def replay(
    make_optimizer: MakeOptimizer, origin: Sequence[Tensor], gradients: Iterable[list[Tensor]], seed: int
) -> tuple[str, list[list[Tensor]]]:
    """The optimizer's name and its updates [step][parameter]."""
    with seeded(seed, origin[0].device):
        twin = Twin(make_optimizer, origin)
        return twin.name, [twin.step(row) for row in gradients]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The same random numbers inside every time, and the caller's untouched."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for generator in generators:  # not torch.manual_seed, which reaches devices that are not put back
            generator.manual_seed(seed)
        yield
