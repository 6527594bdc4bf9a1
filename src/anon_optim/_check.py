"""Validation of a param group's entries: each error names the argument, its value and what would be right."""

import math
from collections.abc import Callable, Hashable
from decimal import ROUND_FLOOR, Context
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and not math.isnan(x)


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"Invalid {name}: {value!r}, expected {expected}")


def _finite(x: Any) -> bool:
    return _is_number(x) and not math.isinf(x)


Check = tuple[Callable[[Any], bool], str]
"""Whether a value can be right, and what would be."""
NOT_NEGATIVE: Check = (lambda x: _finite(x) and x >= 0, "a finite number >= 0")
BELOW_ONE: Check = (lambda x: _finite(x) and 0 <= x < 1, "a number in [0, 1)")


def _check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, got {lr.numel()} elements: {lr!r}")
        lr = lr.detach().item()
    _require(_finite(lr) and lr >= 0, "lr", lr, "a finite number >= 0")


def check_betas(betas: Any) -> None:
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    _require(pair and all(_finite(b) and 0 <= b < 1 for b in betas), "betas", betas, "two numbers in [0, 1)")


CHECKS: dict[str, Check] = {
    "gamma": (_finite, "a finite number"),
    "eps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "beta3": (lambda x: x is None or BELOW_ONE[0](x), f"None or {BELOW_ONE[1]}"),
    "growth": (
        lambda x: (callable(x) and isinstance(x, Hashable)) or (_is_number(x) and x > 1),
        "a number > 1 (inf: one refresh) or a hashable function",
    ),
    "clip": (lambda x: _is_number(x) and x > 0, "a number > 0 (inf: no clip)"),
    "floor": BELOW_ONE,
    "lr_scale": (lambda x: x in (None, "tensor"), 'None or "tensor"'),
    "statistic": (lambda x: callable(x) or x in ("gradient", "belief"), '"gradient", "belief" or a function'),
    "project": (lambda x: x is None or callable(x), "None or a function (theta, psi) -> theta"),
    "total_steps": (lambda x: x is None or (type(x) is int and x > 0), "None or a whole number > 0"),
    "max_grad_norm": (lambda x: x is None or (_is_number(x) and x > 0), "None or a number > 0"),
    "preconditioner": (lambda x: x in (torch.float32, torch.bfloat16), "torch.float32 or torch.bfloat16"),
    "window_tol": BELOW_ONE,
    "touch": (lambda x: isinstance(x, bool), "True or False"),
    "brake": (lambda x: isinstance(x, bool), "True or False"),
    "follow": (lambda x: isinstance(x, bool), "True or False"),
    "error_if_nonfinite": (lambda x: isinstance(x, bool), "True or False"),
    "bias_correction": (lambda x: isinstance(x, bool), "True or False"),
    "decoupled_weight_decay": (lambda x: isinstance(x, bool), "True or False"),
    "maximize": (lambda x: isinstance(x, bool), "True or False"),
    "stochastic_round": (lambda x: isinstance(x, bool), "True or False"),
    "foreach": (lambda x: x is None or isinstance(x, bool), "None, True or False"),
    "fused": (lambda x: x is None or isinstance(x, bool), "None, True or False"),
    "capturable": (lambda x: isinstance(x, bool), "True or False"),
    "differentiable": (lambda x: isinstance(x, bool), "True or False"),
}


def check(name: str, value: Any, right: Check) -> None:
    """Raise ValueError if this value cannot be right."""
    holds, expected = right
    _require(holds(value), name, value, expected)


def check_options(options: dict[str, Any]) -> None:
    """Raise ValueError at the first of some entries that cannot be right by itself."""
    for name, value in options.items():
        check(name, value, CHECKS[name])


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError at the first entry that cannot be right."""
    _check_lr(group["lr"])
    check_betas(group["betas"])
    check_options({name: group[name] for name in CHECKS})
    if group["decoupled_weight_decay"]:
        lr = group["lr"]
        check_decay(lr.detach().item() if isinstance(lr, Tensor) else lr, group["weight_decay"])
    if group["capturable"] and group["error_if_nonfinite"]:
        raise ValueError("Invalid error_if_nonfinite: True, expected False with capturable=True")
    for path in ("foreach", "fused"):
        if group["differentiable"] and group[path]:
            raise ValueError(f"Invalid {path}: True, expected None or False with differentiable=True")
    if group["foreach"] and group["fused"]:
        raise ValueError("Invalid fused: True, expected None or False with foreach=True")
    if group["fused"] and callable(group["statistic"]):
        raise ValueError(f"Invalid statistic: {group['statistic']!r}, expected a name with fused=True")


def _rounded_down(x: float) -> float:
    """To three digits."""
    return float(Context(prec=3, rounding=ROUND_FLOOR).create_decimal_from_float(x))


def check_decay_now(group: dict[str, Any]) -> None:
    """In a step: not where lr is on a device, which would have to be waited for, or in a graph."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        check_decay(lr, group["weight_decay"])
    elif lr.is_cpu and not torch.compiler.is_compiling():
        check_decay(lr.detach().item(), group["weight_decay"])


def check_decay(lr: float, weight_decay: float, coupled: str = "decoupled_weight_decay=False") -> None:
    """Decoupled decay multiplies by 1 - lr * weight_decay, which must not be negative; `coupled` is the other kind."""
    product = lr * weight_decay
    if product > 1:
        raise ValueError(
            f"Invalid weight_decay: {weight_decay!r} with lr {lr!r}: decoupled decay would multiply the parameters by "
            f"1 - lr * weight_decay = {1 - product:.3g}; it may be at most {_rounded_down(1 / lr):g} here. Use "
            f"{coupled} (as SGD recipes do), or, if lr is so large because gamma is small, "
            'lr_scale="tensor" with a learning rate of Adam\'s size'
        )
