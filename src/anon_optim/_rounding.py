"""Unbiased rounding to bfloat16, so that updates smaller than half a unit in the last place are not lost."""

import torch
from torch import Tensor

__all__ = ["copy_stochastic_"]


def copy_stochastic_(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`; from float32 into bfloat16 with stochastic rounding, otherwise as `copy_` does.

    A value between two neighbours in bfloat16 goes to either with a probability that makes the mean exact. What
    bfloat16 can represent stays as it is, and so do infinities and NaN. Beyond bfloat16's largest number, where the
    upper neighbour is infinite, rounding is to nearest. The random bits come from the default generator of the device;
    every element takes its share, so how many are drawn depends only on the shape.
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32:
        target.copy_(source)
        return
    source = source.detach()
    # A bfloat16 is the upper half of a float32: a random lower half carries into it with the right probability,
    # away from zero for either sign.
    bits = source.view(torch.int32)
    rounded = ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32)
    # Written so that NaN takes the other branch.
    roundable = source.abs() <= torch.finfo(torch.bfloat16).max
    target.copy_(torch.where(roundable, rounded, source))
