"""What the guards and the schedule are doing to one tensor, read from its state."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anon_optim import _idu
from anon_optim._state import real_view


@dataclass(frozen=True)
class Diagnostics:
    """One tensor's row of `Anon.diagnostics()`."""

    name: str
    step: int
    gamma: float
    """The gamma that its preconditioner was made with."""
    unseen: float
    """Share of coordinates that have not seen a gradient yet."""
    clipped: float
    """Share of coordinates whose last update lay at the clip."""
    brake: float
    """What the next update will be divided by, because gradients have grown since the last refresh; 1 if they have
    not."""
    scale: float
    """mean(sigma)^((1 - gamma)/2), the typical update per unit of lr; 1 at gamma = 1."""
    update_rms: float
    """Root mean square of the last update per unit of lr, before the brake."""
    steps_to_refresh: float


def diagnose(name: str, state: dict[str, Tensor], group: dict[str, Any]) -> Diagnostics:
    t, gamma = int(state["step"].item()), state["gamma"].item()
    v, m = real_view(state["preconditioner"]), real_view(state["exp_avg"])
    if group["bias_correction"] and t > 0:
        m = m / (1 - group["betas"][0] ** t)
    update = v * m
    room = 1 - max(8 * torch.finfo(m.dtype).eps, torch.finfo(v.dtype).eps)
    at_clip = v >= room * _idu.clip_limit(m, group["clip"], gamma) if gamma > 0 else torch.zeros_like(v)
    scale = _idu.scale_of(state["level"], gamma)
    if group["lr_scale"] == "tensor":
        update = update / scale
    return Diagnostics(
        name=name,
        step=t,
        gamma=gamma,
        unseen=(v == 0).double().mean().item(),
        clipped=at_clip.double().mean().item(),
        brake=1 / _idu.brake_factor(state["brake"], gamma).item() if group["brake"] else 1.0,
        scale=scale.item(),
        update_rms=update.double().square().mean().sqrt().item(),
        steps_to_refresh=_idu.steps_to_refresh(t, group["growth"]),
    )
