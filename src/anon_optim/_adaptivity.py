"""Measuring adaptivity: how any optimizer's update answers when the gradients it has seen are scaled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from anon_optim._replay import MakeOptimizer, replay

T = TypeVar("T", bound=Tensor | Sequence[Tensor])
"""One step's gradients: a tensor, or a list with one for each parameter."""

FINE = 1.001
"""Gradients are scaled by this and by its inverse: near enough to 1 for a derivative, far enough for float32."""
WIDE = 1.03
"""Scaling in a short float format by FINE leaves most numbers what they were; by this it does not."""
EXACT = 2.0
"""Scaling by two rounds nothing in any float format, so that what the method does is left, and not its noise."""
NOISE = 1e-3
"""The difference between slopes that is not worth a second look."""


@dataclass(frozen=True, eq=False)
class Adaptivity(Generic[T]):
    """What :func:`measure_adaptivity` found about the update of one step."""

    coordinates: T
    """A of each coordinate, shaped as one step's gradients; NaN where, and only where, `defined` is False."""
    defined: T
    """False for the coordinates that were not moved (or not to a finite place): they have no adaptivity."""
    optimizer: str
    step: int
    factor: float
    """The gradients were scaled by this and by its inverse."""
    _of_norm: float = field(repr=False)

    @property
    def overall(self) -> float:
        """A of the norm of the whole update; a ValueError where there was none."""
        if not math.isfinite(self._of_norm):
            raise ValueError(
                f"{self.optimizer} made no update of finite length at step {self.step}, so its adaptivity there is "
                "not defined"
            )
        return self._of_norm

    @property
    def undefined_share(self) -> float:
        """The share of coordinates that have no adaptivity."""
        masks = _as_list(self.defined)
        return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)

    def __str__(self) -> str:
        a = f"A = {self._of_norm:.6g}" if math.isfinite(self._of_norm) else "no update, so A is not defined"
        return f"{self.optimizer}, step {self.step}: {a} ({self.undefined_share:.0%} of the coordinates undefined)"


@overload
def measure_adaptivity(
    make_optimizer: MakeOptimizer,
    gradients: Sequence[T],
    *,
    at: None = None,
    start: T | None = None,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Adaptivity[T]: ...
@overload
def measure_adaptivity(
    make_optimizer: MakeOptimizer,
    gradients: Sequence[T],
    *,
    at: Sequence[int],
    start: T | None = None,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Adaptivity[T]]: ...
def measure_adaptivity(
    make_optimizer: MakeOptimizer,
    gradients: Sequence[T],
    *,
    at: Sequence[int] | None = None,
    start: T | None = None,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Adaptivity[T] | list[Adaptivity[T]]:
    r"""The adaptivity of any optimizer on a history of gradients, measured from its updates u alone::

        A = 1 - d ln|u(k g_1, ..., k g_t)| / d ln k    at k = 1

    0 means that the update grows with the gradients (SGD), 1 that it does not (Adam), -1 that it grows with their
    square. Where u = m / psi with m linear in the gradients this is the paper's d ln psi(k g) / d ln k. ::

        >>> import torch
        >>> from anon_optim import measure_adaptivity
        >>> gradients = [torch.randn(8) for _ in range(100)]
        >>> round(measure_adaptivity(torch.optim.Adam, gradients).overall, 3)
        1.0
        >>> round(measure_adaptivity(lambda params: torch.optim.SGD(params, lr=0.1), gradients).overall, 3)
        0.0

    Every replay makes a new optimizer, and its parameters are put back to `start` before each step. So the update
    depends on the gradients alone, and at the default start, zero, weight decay has nothing to act on.

    Args:
        make_optimizer: from a list of parameters to an optimizer; a class whose other arguments have defaults will do.
        gradients: one entry a step, each a tensor or, for several parameters, a list of tensors.
        at: the steps, counted from 1, whose updates to measure; then a list is returned. By default the last step.
        start: where the parameters stand. Methods that look at them (LARS, LAMB) should not be measured at zero.
        factor: scale by `factor` and `1 / factor`. By default 1.001, near enough to 1 for a derivative; if this and
            others near it do not agree, because the method rounds to a short format (Muon's bfloat16), it is 2, which
            scales every float without rounding. `Adaptivity.factor` says which it was.
        dtype: of parameters and gradients.
        seed: set before each replay, so that methods that draw random numbers draw the same ones.
    """
    history = _checked(gradients, dtype)
    steps = _checked_steps(at, len(history))
    origin = _origin(start, history[0])
    name = ""

    def log_updates(k: float) -> Tensor:
        """ln|u| for each measured step (rows) and coordinate; the last column is ln||u||."""
        nonlocal name
        scaled = ([k * g for g in row] for row in history[: max(steps)])
        name, updates = replay(make_optimizer, origin, scaled, seed)
        rows = [torch.cat([u.flatten() for u in updates[t - 1]]).to(torch.float64) for t in steps]
        return torch.stack([torch.cat([u.abs(), u.norm()[None]]).log() for u in rows])

    slopes, used = slope(log_updates, factor)
    slopes[~log_updates(1.0).isfinite()] = math.nan
    results = [
        Adaptivity(
            coordinates=_shaped(row[:-1], gradients[0]),
            defined=_shaped(row[:-1].isfinite(), gradients[0]),
            optimizer=name,
            step=step,
            factor=used,
            _of_norm=row[-1].item(),
        )
        for step, row in zip(steps, torch.where(slopes.isfinite(), 1 - slopes, math.nan), strict=True)
    ]
    return results[0] if at is None else results


@overload
def relative_adaptivity(
    make_optimizer: MakeOptimizer,
    gradients: Sequence[Tensor],
    *,
    scaled: Tensor | None = None,
    start: Tensor | None = None,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> float: ...
@overload
def relative_adaptivity(
    make_optimizer: MakeOptimizer,
    gradients: Sequence[Sequence[Tensor]],
    *,
    scaled: Sequence[Tensor] | None = None,
    start: Sequence[Tensor] | None = None,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[float]: ...
def relative_adaptivity(
    make_optimizer: MakeOptimizer,
    gradients: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    *,
    scaled: Tensor | Sequence[Tensor] | None = None,
    start: Tensor | Sequence[Tensor] | None = None,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> float | list[float]:
    r"""The adaptivity between the coordinates of a tensor, at the last step of a history of gradients.

    The gradients of a set S of coordinates are scaled at every step, the others' are not, and the update's two parts
    are compared::

        R = 1 - d ln( ||u_S|| / ||u_rest|| ) / d ln k    at k = 1

    Where each coordinate is treated by itself, R equals A. They part where a number is shared by a whole tensor: SGD
    with normalised gradients has A = 1 (the length of its step never changes) and R = 0 (within the step, coordinates
    stand to each other as their gradients do); Anon with `lr_scale="tensor"` has A = 1 and R = gamma.

    Args:
        scaled: True for the coordinates in S, shaped as one step's gradients. By default a random half of each tensor.
        seed: also chooses that half.

    The other arguments are those of :func:`measure_adaptivity`. Returns a number, or a list of them where the history
    has several parameters. A part that is not updated is a ValueError.
    """
    history = _checked(gradients, dtype)
    origin = _origin(start, history[0])
    parts = _parts(scaled, history[0], seed)
    name = ""

    def log_ratios(k: float) -> Tensor:
        nonlocal name
        rows = ([torch.where(part, k * g, g) for g, part in zip(row, parts, strict=True)] for row in history)
        name, updates = replay(make_optimizer, origin, rows, seed)
        last = [u.to(torch.float64) for u in updates[-1]]
        return torch.stack([u[part].norm().log() - u[~part].norm().log() for u, part in zip(last, parts, strict=True)])

    slopes, _ = slope(log_ratios, factor)
    for index, value in enumerate(slopes.tolist()):
        if not math.isfinite(value):
            raise ValueError(
                f"{name} left a part of parameter {index} where it was at step {len(history)}, so its relative "
                "adaptivity is not defined"
            )
    relative = (1 - slopes).tolist()
    return relative[0] if isinstance(gradients[0], Tensor) else relative


def slope(log_response: Callable[[float], Tensor], factor: float | None) -> tuple[Tensor, float]:
    """d log_response / d ln k at k = 1 by a central difference, and the factor it was taken with.

    The last column of log_response is of a whole update or part, not of a coordinate.
    """

    def difference(f: float) -> Tensor:
        return (log_response(f) - log_response(1 / f)) / (2 * math.log(f))

    if factor is not None:
        if not (math.isfinite(factor) and factor > 1):
            raise ValueError(f"Invalid factor: {factor}, expected a number above 1")
        return difference(factor), factor
    fine, double, wide = difference(FINE), difference(FINE**2), difference(WIDE)
    # The median, because a coordinate at a kink of the method (a bound, a clip) is no reason to leave the derivative.
    unresolved = (fine - wide).abs().nanmedian() > NOISE
    jumping = (fine - double)[..., -1].abs().nan_to_num(0.0).max() > NOISE
    return (difference(EXACT), EXACT) if unresolved or jumping else (fine, FINE)


def _as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _shaped(flat: Tensor, like: Any) -> Any:
    """Cut a vector into the shapes of one step's gradients."""
    if isinstance(like, Tensor):
        return flat.reshape(like.shape)
    cuts = flat.split([g.numel() for g in like])
    return type(like)([part.reshape(g.shape) for part, g in zip(cuts, like, strict=True)])


def _checked(gradients: Sequence[Any], dtype: torch.dtype) -> list[list[Tensor]]:
    """The history as [step][parameter]."""
    rows = [_as_list(row) for row in gradients]
    if not rows or not rows[0]:
        raise ValueError("gradients must hold at least one step with at least one tensor, but is empty")
    shapes = [g.shape for g in rows[0]]
    for step, row in enumerate(rows, start=1):
        if [g.shape for g in row] != shapes:
            found, first = ([tuple(shape) for shape in s] for s in ([g.shape for g in row], shapes))
            raise ValueError(f"gradients must have the same shapes at every step: {found} at step {step}, {first} at 1")
        if not all(g.is_floating_point() for g in row):
            raise ValueError(f"gradients must be real floating point, but are {row[0].dtype} at step {step}")
    return [[g.detach().to(dtype) for g in row] for row in rows]


def _checked_steps(at: Sequence[int] | None, last: int) -> list[int]:
    steps = [last] if at is None else list(at)
    if not steps or any(not 1 <= step <= last for step in steps):
        raise ValueError(f"Invalid at: {at}, expected steps from 1 to {last}")
    return steps


def _origin(start: Any, like: list[Tensor]) -> list[Tensor]:
    if start is None:
        return [torch.zeros_like(g) for g in like]
    origin = [place.detach().to(g) for place, g in zip(_as_list(start), like, strict=True)]
    if any(place.shape != g.shape for place, g in zip(origin, like, strict=True)):
        raise ValueError(f"start must have the shapes of the gradients, {[tuple(g.shape) for g in like]}")
    return origin


def _parts(scaled: Any, like: list[Tensor], seed: int) -> list[Tensor]:
    """The coordinates to scale: as told, or a random half of each tensor."""
    if scaled is None:
        random = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(g.numel(), generator=random) for g in like]
        parts = [
            (order < order.numel() // 2).reshape(g.shape).to(g.device) for order, g in zip(orders, like, strict=True)
        ]
    else:
        parts = [part.to(g.device, torch.bool) for part, g in zip(_as_list(scaled), like, strict=True)]
    for index, (part, g) in enumerate(zip(parts, like, strict=True)):
        if part.shape != g.shape or not part.any() or part.all():
            raise ValueError(
                f"relative adaptivity compares scaled coordinates with others of their tensor: parameter {index}, of "
                f"shape {tuple(g.shape)}, needs at least one of each"
            )
    return parts
