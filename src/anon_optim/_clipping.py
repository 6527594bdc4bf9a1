"""What each group's gradients are multiplied by before they are used: AMP's unscaling and clipping by norm."""

from typing import Any

import torch
from torch import Tensor

NARROW = (torch.float16, torch.bfloat16)


def grad_factors(groups: list[dict[str, Any]], grad_scale: Tensor | None) -> list[Tensor | None]:
    """One float32 factor a group, None for 1. The norm is that of all gradients of all groups together, as
    `torch.nn.utils.clip_grad_norm_` over the whole model would take it; nothing is read back to the host."""
    unscale = None if grad_scale is None else grad_scale.to(torch.float32).reciprocal()
    if all(group["max_grad_norm"] is None for group in groups):
        return [unscale] * len(groups)
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(_wide(grads)).to(torch.float32)
    if unscale is not None:
        norm = norm * unscale
    factors = []
    for group in groups:
        factor = unscale
        if group["max_grad_norm"] is not None:
            clip = (group["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0)  # clip_grad_norm_'s own formula
            factor = clip if unscale is None else clip * unscale
        factors.append(factor)
    return factors


def _wide(grads: list[Tensor]) -> list[Tensor]:
    """In place of 16-bit gradients their norms in 32 bits: a float16 norm overflows where no element does, most of all
    under AMP's scale."""
    narrow = [grad for grad in grads if grad.dtype in NARROW]
    if not narrow:
        return grads
    return [*(grad for grad in grads if grad.dtype not in NARROW), *torch._foreach_norm(narrow, 2, dtype=torch.float32)]
