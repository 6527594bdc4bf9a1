"""Every optimizer of the paper by its name: how to make it, what it needs, and where to search its settings."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from anon_lab.baselines._curvature import Hutchinson
from anon_lab.baselines._entries import ENTRIES
from anon_lab.baselines._entry import Entry, Range
from anon_lab.baselines.averaging import Averaging
from anon_lab.baselines.sophia import SophiaG

REGISTRY: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in ENTRIES if entry.listed})
_ALL = {entry.name.casefold(): entry for entry in ENTRIES}


def names() -> list[str]:
    """All names, in the paper's order."""
    return list(REGISTRY)


def get(name: str) -> Entry:
    """The entry of this name, in whatever case."""
    if (entry := _ALL.get(name.casefold())) is not None:
        return entry
    by_folded = {each.casefold(): each for each in REGISTRY}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.5) or list(by_folded)
    raise ValueError(f"no optimizer is called {name!r}; near it: {', '.join(by_folded[each] for each in near)}")


def make(name: str, params: ParamsT, lr: float | None = None, **settings: Any) -> Optimizer:
    """The optimizer of this name; an unknown setting is a ValueError."""
    return get(name).make(params, lr, **settings)


def take_step(
    optimizer: Optimizer,
    loss: Callable[[], Tensor],
    sampled_loss: Callable[[], Tensor] | None = None,
    max_grad_norm: float | None = None,
) -> Tensor:
    """Compute the loss, differentiate it in the way this optimizer needs, and step; return the loss, detached."""
    value = differentiate(optimizer, [loss], sampled_loss)
    if max_grad_norm is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
    optimizer.step()
    return value


def differentiate(
    optimizer: Optimizer, losses: Sequence[Callable[[], Tensor]], sampled_loss: Callable[[], Tensor] | None = None
) -> Tensor:
    """Leave the gradient of the losses' mean in the parameters, in the way this optimizer needs; return it, detached.

    For nearly all this is zero_grad and backward.

    **Arguments:**
    - `losses`: one for each part of a batch that goes through the network at once.
    - `sampled_loss`: the losses on labels drawn from the model's own output, which Sophia-G alone asks for, every
      tenth step; it may give their mean if Sophia-G knows its batch_size.
    """
    optimizer.zero_grad()
    if isinstance(optimizer, SophiaG) and optimizer.hessian_due:
        if sampled_loss is None:
            raise ValueError("Sophia-G needs sampled_loss, the losses on labels drawn from the model")
        sampled = sampled_loss()
        sampled.mean().backward()
        optimizer.update_hessian(sampled.numel() if sampled.ndim else None)
        optimizer.zero_grad()
    if isinstance(optimizer, Hutchinson):
        # Curvature needs the whole loss at once.
        value = torch.stack([loss() for loss in losses]).mean()
        optimizer.backward(value)
        return value.detach()
    means = []
    for loss in losses:
        value = loss() / len(losses)
        value.backward()
        means.append(value.detach())
    return torch.stack(means).sum()


def averaged(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Evaluate within this context: where the optimizer averages weights, the parameters hold the average in it."""
    return optimizer.averaged() if isinstance(optimizer, Averaging) else nullcontext()


def table() -> Table:
    """The registry, to be printed."""
    shown = Table(box=SIMPLE_HEAD)
    shown.add_column("name", no_wrap=True)
    shown.add_column("lr searched", no_wrap=True)
    shown.add_column("what it does\n[dim]source · what it needs · citation[/dim]", overflow="fold")
    for entry in REGISTRY.values():
        lr = entry.space["lr"]
        assert isinstance(lr, Range)
        unit = f" × {lr.per_gamma:g}^γ" if lr.per_gamma != 1 else ""
        small = f"{entry.source} · {entry.needs} · {entry.citation}"
        shown.add_row(entry.name, f"{lr.low:g} … {lr.high:g}{unit}", f"{entry.description}\n[dim]{small}[/dim]")
    return shown


def as_json() -> list[dict[str, Any]]:
    """The registry as plain values."""
    return [
        {
            "name": entry.name,
            "source": entry.source,
            "needs": entry.needs,
            "averages": entry.averages,
            "lr": entry.lr,
            "space": {name: vars(r) if isinstance(r, Range) else list(r) for name, r in entry.space.items()},
            "settings": list(entry.settings),
            "description": entry.description,
            "citation": entry.citation,
        }
        for entry in REGISTRY.values()
    ]
