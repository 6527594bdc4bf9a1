"""Parameter groups that spare biases and normalisation layers from weight decay."""

import math
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["decay_groups"]

# A subclass of these may have any name.
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The model's parameters in two groups: the first decays, the second does not.

    The second holds every bias (any name that ends in `bias`), everything with fewer than two dimensions, and whatever
    a normalisation layer itself owns (torch.nn's and their subclasses, or a class whose name contains `norm`).
    A group without parameters is left out. Each parameter comes with its name, so that the optimizer keeps it, and a
    tied one comes once, under its first name; it is spared if any of its places spares it.

        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> for group in decay_groups(model, 0.1):
        ...     print(group["weight_decay"], [name for name, _ in group["params"]])
        0.1 ['0.weight']
        0.0 ['0.bias', '1.weight', '1.bias']

    **Arguments:**

    - `model`: a module whose parameters all exist (run lazy modules once before).
    - `weight_decay`: of the first group; at least 0.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not its parameters, got {type(model).__name__}")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}")
    named: dict[nn.Parameter, str] = {}
    spared: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        is_norm = isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = named.setdefault(parameter, f"{prefix}.{leaf}" if prefix else leaf)
            if is_lazy(parameter):
                raise ValueError(f"model has an uninitialised parameter, {name}: run it once first")
            if parameter.ndim < 2 or leaf.endswith("bias") or is_norm:
                spared.add(parameter)
    groups = [
        {"params": [(name, p) for p, name in named.items() if p not in spared], "weight_decay": weight_decay},
        {"params": [(name, p) for p, name in named.items() if p in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
