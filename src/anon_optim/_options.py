"""Options that belong together, as frozen dataclasses; a param group holds their fields as plain entries."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from anon_optim._check import check_options


@dataclass(frozen=True)
class Guard:
    """What keeps Anon safe where the printed algorithm breaks. All guards respect the gradient's scale: the
    adaptivity stays gamma. At gamma = 0 none of them acts."""

    clip: float = 0.5
    """sigma counts as at least (m_hat / `clip`)^2, since a second moment is no less than the square of the mean: where
    psi is too small for that, it is raised, until the next refresh. At gamma = 1 no step then exceeds `clip` times lr.
    For gamma > 0 only; inf switches it off."""
    floor: float = 0.01
    """sigma counts as at least `floor` times its mean over the tensor; 0 switches it off."""
    touch: bool = True
    """A coordinate waits for its first non-zero gradient and starts its clock there; without it, coordinates
    that begin with a zero gradient get eps^(-gamma/2) as their step size."""
    brake: bool = True
    """Where a tensor's gradients have grown since its last refresh, divide its steps by as much as psi would have grown
    with them, until the next refresh. For gamma > 0 and tensors of at least 64 elements only."""
    follow: bool = False
    """sigma counts as at least the part of Adam's second moment that the gradients since the last refresh make up: psi
    follows gradients that grow, and falls at refreshes alone. With it the others may be wide or off:
    `Guard(clip=3.0, touch=False, brake=False, follow=True)`. For gamma > 0 only. The second moment is then needed on
    every step, whatever `window_tol` and `total_steps` are."""
    error_if_nonfinite: bool = False
    """Raise RuntimeError, and write nothing, if a gradient of the group holds NaN or inf. Reading the answer
    waits for the device."""

    def __post_init__(self) -> None:
        check_options(vars(self))


@dataclass(frozen=True)
class Storage:
    """How numbers are kept. The state is float32 for parameters of lower precision."""

    preconditioner: torch.dtype = torch.float32
    """torch.bfloat16 keeps v in two bytes instead of four, for float32 and narrower parameters. Its rounding stays
    below 2^-8 / (1 - beta3) relatively, with beta3=None below 2^-8 / (1 - 1/growth); refreshed at nearly every step it
    does not follow at all. Takes effect on parameters that have no state yet."""
    window_tol: float = 2**-24
    """The second moment is accumulated only in the last steps before a refresh, in which all but this share of its
    weight lies (16,628 steps at beta2 = 0.999: earlier gradients would vanish in float32's rounding). 0: always."""
    stochastic_round: bool = False
    """Round bfloat16 parameters stochastically (unbiased, from torch's generator) instead of to the nearest, so
    that updates smaller than half a unit in the last place are not lost."""

    def __post_init__(self) -> None:
        check_options(vars(self))


NO_GUARD = Guard(clip=math.inf, floor=0.0, touch=False, brake=False)


def flatten(options: dict[str, Any]) -> dict[str, Any]:
    """Replace `guard` and `storage` by their fields; fields given beside them win."""
    flat = {key: value for key, value in options.items() if key not in ("guard", "storage")}
    if "guard" in options:
        guard = NO_GUARD if options["guard"] is None else _expect(Guard, "guard", options["guard"])
        flat = vars(guard) | flat
    if "storage" in options:
        flat = vars(_expect(Storage, "storage", options["storage"])) | flat
    return flat


def _expect(kind: type, name: str, value: object) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"Invalid {name}: {value!r}, expected {kind.__name__}(...)")
    return value
