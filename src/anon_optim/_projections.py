"""Projections onto simple convex sets in the optimizer's own metric, for `Anon(..., project=...)`.

Each set F is called with the parameter θ and the preconditioner ψ and returns

    argmin over x in F of  Σ_i ψ_i (x_i - θ_i)²

which is what the method's regret bound needs; the Euclidean projection would undo the preconditioning. They share
these rules:

- Where ψ is infinite (a coordinate the optimizer has not seen yet) x keeps θ exactly, and the other coordinates are
  projected onto the slice of F that this leaves. Each class says what happens where that slice is empty.
- A point of F comes back bit for bit. Belonging to F is judged up to rounding, so a projected point is one too.
- Half-precision θ is projected in float32. The result has θ's dtype and shape; ψ may be broadcast to that shape.
- ψ matters only through ratios and may span 60 decades in float32. Below the smallest normal number it counts as that.
- Nothing waits for the device: every loop has a fixed length, so all of this can be captured and compiled.
- Autograd sees the derivative of the projection with respect to θ and ψ, not that of the search for it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Box", "HalfSpace", "L2Ball", "Simplex"]


@dataclass(frozen=True, eq=False)
class Box:
    """{x : lo <= x <= hi}, element by element; the one set whose projection does not depend on ψ.

    **Arguments:**

    - `lo`, `hi`: numbers, tensors that broadcast to the parameter (on its device), or None for no bound.

    Unseen coordinates outside the box stay outside; they do not affect the others.
    """

    lo: float | Tensor | None = None
    hi: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.lo is not None:
            _raise_if((self.lo != self.lo) | (self.lo == math.inf), "lo must be a number below inf", self.lo)
        if self.hi is not None:
            _raise_if((self.hi != self.hi) | (self.hi == -math.inf), "hi must be a number above -inf", self.hi)
        if self.lo is not None and self.hi is not None:
            crossed = torch.as_tensor(self.lo > self.hi)
            if crossed.any():
                lo, hi = (_first(v, crossed) for v in (self.lo, self.hi))
                raise ValueError(f"lo must not exceed hi, got lo={lo} and hi={hi}")

    def __call__(self, theta: Tensor, psi: Tensor) -> Tensor:
        theta32, _, seen = _prepare(theta, psi)
        x = theta32
        # Not clamp: that may turn -0.0 into 0.0, and a point inside must come back bit for bit.
        if self.lo is not None:
            lo = _like(self.lo, x)
            x = torch.where(x < lo, lo, x)
        if self.hi is not None:
            hi = _like(self.hi, x)
            x = torch.where(x > hi, hi, x)
        return torch.where(seen, x, theta32).to(theta.dtype)


@dataclass(frozen=True)
class L2Ball:
    """{x : ‖x‖₂ <= radius}, the norm being that of the whole tensor.

        x_i = θ_i / (1 + λ/ψ_i)    with the λ >= 0 that makes ‖x‖ = radius

    Where the unseen coordinates alone reach the radius, the others become 0, the nearest that can be had.
    """

    radius: float

    def __post_init__(self) -> None:
        if not 0 < self.radius < math.inf:
            raise ValueError(f"radius must be positive and finite, got {self.radius}")

    def __call__(self, theta: Tensor, psi: Tensor) -> Tensor:
        if theta.numel() == 0:
            return theta
        x, psi, seen = _prepare(theta, psi)
        u = x / self.radius
        held = _norm(torch.where(seen, 0, u))
        u = torch.where(seen, u, 0)
        room = ((1 - held) * (1 + held)).clamp_min(0)  # the squared radius of the slice
        inside = torch.hypot(_norm(u.detach()), held) <= 1 + _slack(theta, x)
        solvable = ~inside & (room > 0)
        q = torch.where(solvable, u / torch.where(solvable, room, 1).sqrt(), 0)
        shrunk = torch.where(room > 0, x * _ball_factor(q, psi, seen, solvable), 0)
        return torch.where(seen & ~inside, shrunk, x).to(theta.dtype)


@dataclass(frozen=True)
class Simplex:
    """{x : x >= 0, Σ x = 1 along `dim`}, each slice along `dim` on its own.

        x_i = max(0, θ_i - τ/ψ_i)    with the τ that makes Σ x = 1

    The seen coordinates of a slice share 1 - Σ(unseen), or become 0 where that is negative. A negative unseen
    coordinate stays, and the others then sum to more than 1.
    """

    dim: int = -1

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ValueError(f"dim must be an integer, got {self.dim!r}")

    def __call__(self, theta: Tensor, psi: Tensor) -> Tensor:
        if theta.numel() == 0:
            return theta
        x, psi, seen = _prepare(theta, psi)
        held = torch.where(seen, 0, x)
        free = torch.where(seen, x, 0)
        total = (1 - held.sum(self.dim, keepdim=True)).clamp_min(0)  # what the seen coordinates sum to
        excess = free.sum(self.dim, keepdim=True) - total
        size = 1 + held.abs().sum(self.dim, keepdim=True)
        inside = (free >= 0).all(self.dim, keepdim=True) & (excess.abs() <= _slack(theta, x) * size)
        projected = _simplex(x, psi, seen, total, self.dim)
        return torch.where(seen & ~inside, projected, x).to(theta.dtype)


@dataclass(frozen=True, eq=False)
class HalfSpace:
    """{x : a·x <= b}, the product being summed over the whole tensor.

        x = θ - max(0, a·θ - b) (a/ψ) / Σ a²/ψ

    **Arguments:**

    - `a`: a tensor that broadcasts to the parameter, on its device; finite and not all zero.
    - `b`: a finite number.

    Where a is 0 on every seen coordinate nothing can be done, and θ comes back.
    """

    a: Tensor
    b: float

    def __post_init__(self) -> None:
        _raise_if(~torch.isfinite(self.a), "a must be finite", self.a)
        if not (self.a != 0).any():
            raise ValueError(f"a must have a non-zero element, got {self.a}")
        if not math.isfinite(self.b):
            raise ValueError(f"b must be finite, got {self.b}")

    def __call__(self, theta: Tensor, psi: Tensor) -> Tensor:
        if theta.numel() == 0:
            return theta
        x, psi, seen = _prepare(theta, psi)
        a = _like(self.a, x)
        size = (a * x).abs().sum() + abs(self.b)
        inside = (a * x).sum() - self.b <= _slack(theta, x) * size
        # With z = a/√ψ the direction is (z/√ψ) / Σz²; dividing z by its largest element keeps its square in range.
        root = psi.sqrt()
        z = torch.where(seen, a / root, 0)
        peak = z.detach().abs().amax()
        movable = peak > 0
        peak = torch.where(movable, peak, 1)
        z = z / peak
        norm2 = torch.where(movable, z.square().sum(), 1)
        direction = z / (root * peak).clamp_min(torch.finfo(x.dtype).tiny) / norm2
        moved = x
        # The first pass leaves rounding of the size of θ, the second one of the size of x.
        for _ in range(2):
            moved = moved - ((a * moved).sum() - self.b) * direction
        return torch.where(seen & ~inside, moved, x).to(theta.dtype)


def _ball_factor(q: Tensor, psi: Tensor, seen: Tensor, solvable: Tensor) -> Tensor:
    """1 / (1 + λ/ψ) with the λ that makes ‖q / (1 + λ/ψ)‖ = 1, for ‖q‖ > 1.

    λ lies between κ ψ_min and κ ψ_max, κ = ‖q‖ - 1, so μ = λ/κ has ψ's own range and cannot overflow. Write
    f(ln μ) = ln‖x‖: then f' = -e, e the mean of λ/(ψ + λ) weighted by x², and |f''| <= 3e. Bisection of ln μ from
    the dtype's whole range to a width of 0.09 therefore leaves Newton's method an error that goes
    0.09 -> 0.02 -> 4e-4 -> 3e-7 -> 1e-13 -> 1e-26 at worst, whatever q and ψ are.
    """
    limits = torch.finfo(psi.dtype)
    double = psi.dtype == torch.float64
    kappa = torch.where(solvable, _norm(q.detach()) - 1, 1).clamp_min(limits.eps)
    q0, psi0 = q.detach(), psi.detach()

    def over(psi: Tensor, mu: Tensor) -> Tensor:
        return (psi / mu).clamp_max(limits.max / 4)

    lo = torch.where(seen, psi0, limits.max).amin()
    hi = torch.where(seen, psi0, limits.tiny).amax()
    for _ in range(14 if double else 11):
        mid = lo.sqrt() * hi.sqrt()
        ratio = over(psi0, mid)
        outside = (q0 * (ratio / (ratio + kappa))).square().sum() > 1
        lo, hi = torch.where(outside, mid, lo), torch.where(outside, hi, mid)

    def newton(ratio: Tensor, q: Tensor) -> Tensor:
        x2 = (q * (ratio / (ratio + kappa))).square()
        norm2 = torch.where(solvable, x2.sum(), 1)
        e = (x2 * (kappa / (ratio + kappa))).detach().sum() / norm2.detach()
        # A longer step would be rounding divided by a vanishing e.
        return (0.5 * norm2.log() / e.clamp_min(limits.tiny)).clamp(-0.25, 0.25).exp()

    mu = lo
    for _ in range(4 if double else 3):
        mu = mu * newton(over(psi0, mu), q0)
    # The implicit function theorem in one line: a Newton step from the root has the root's derivative.
    ratio = over(psi, mu)
    ratio = ratio / newton(ratio, q)
    return ratio / (ratio + kappa)


def _simplex(theta: Tensor, psi: Tensor, seen: Tensor, total: Tensor, dim: int) -> Tensor:
    """max(0, θ - τ/ψ) with the τ that makes the seen coordinates sum to `total`; rubbish in the others."""
    theta0, psi0, total0 = theta.detach(), psi.detach(), total.detach()
    inverse = torch.where(seen, _centre(psi0, seen, dim).reciprocal(), 0)
    # θ and θ - c/ψ have the same projection, so τ is found in instalments, each with smaller rounding.
    lowest = torch.finfo(psi.dtype).min / 4  # finite, so that no later sum is inf - inf
    x = _shift_to_total(theta0, psi0, seen, total0, dim).clamp_min(lowest)
    for _ in range(2):
        x = (x - _threshold(x, inverse, seen, total0, dim) * inverse).clamp_min(lowest)
    # The last instalment stays on the active set; there its derivative is the projection's.
    active = seen & (x > 0)
    drift = (theta - theta0) - torch.where(active, theta0 - x, 0) * (psi0 / psi - 1)  # zero, but for its derivative
    x = torch.where(active, x + drift, 0)
    inverse = torch.where(active, inverse, 0)
    weight = inverse.sum(dim, keepdim=True)
    gap = x.sum(dim, keepdim=True) - total
    return (x - gap / torch.where(weight > 0, weight, 1) * inverse).clamp_min(0)


def _shift_to_total(theta: Tensor, psi: Tensor, seen: Tensor, total: Tensor, dim: int) -> Tensor:
    """θ - c/ψ with c = max ψ(θ - total) <= τ: its largest element is `total`, so no sum cancels any more."""
    k = torch.where(seen, _centre(psi, seen, dim) * (theta - total), -math.inf).argmax(dim, keepdim=True)
    ratio = (psi.gather(dim, k) / psi).clamp_max(torch.finfo(psi.dtype).max)
    x = torch.minimum(theta - ratio * (theta.gather(dim, k) - total), total)
    return x.scatter(dim, k, total)


def _threshold(x: Tensor, inverse: Tensor, seen: Tensor, total: Tensor, dim: int) -> Tensor:
    """τ = max over j of (Σ_{i<=j} x_i - total) / Σ_{i<=j} 1/ψ_i, sorted by falling ψ_i x_i.

    Any set S of coordinates bounds τ from below by (Σ_S x - total) / Σ_S 1/ψ, with equality for the active one,
    which is one of those looked at.
    """
    tiny = torch.finfo(x.dtype).tiny
    key = torch.where(seen, x / inverse.clamp_min(tiny), -math.inf)
    order = key.argsort(dim, descending=True)
    above = torch.where(seen, x, 0).gather(dim, order).cumsum(dim) - total
    return (above / inverse.gather(dim, order).cumsum(dim).clamp_min(tiny)).amax(dim, keepdim=True)


def _centre(psi: Tensor, seen: Tensor, dim: int) -> Tensor:
    """ψ divided by a constant along `dim`, so that ψ and 1/ψ are equally far from overflow."""
    limits = torch.finfo(psi.dtype)
    low = torch.where(seen, psi, limits.max).amin(dim, keepdim=True)
    high = torch.where(seen, psi, limits.tiny).amax(dim, keepdim=True)
    return psi / (low.sqrt() * high.sqrt())


def _prepare(theta: Tensor, psi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """θ and ψ in the dtype to compute in, with 1 for infinite ψ, and which coordinates were finite."""
    dtype = torch.promote_types(torch.promote_types(theta.dtype, psi.dtype), torch.float32)
    psi = psi.to(dtype).expand(theta.shape)
    seen = psi < math.inf
    return theta.to(dtype), torch.where(seen, psi, 1).clamp_min(torch.finfo(dtype).tiny), seen


def _slack(theta: Tensor, x: Tensor) -> float:
    """How far outside, relatively, a point may lie by rounding alone: storing it in θ's dtype, summing it in x's."""
    return torch.finfo(theta.dtype).eps / 2 + 8 * torch.finfo(x.dtype).eps


def _norm(x: Tensor) -> Tensor:
    """‖x‖₂ without overflow or underflow of the squares, and with derivative 0 at 0."""
    peak = x.detach().abs().amax()
    peak = torch.where(peak > 0, peak, 1)
    square = (x / peak).square().sum()
    return torch.where(square > 0, peak * torch.where(square > 0, square, 1).sqrt(), 0)


def _like(bound: float | Tensor, x: Tensor) -> Tensor:
    """A bound in x's dtype and shape; a tensor must already be on x's device, lest each call copy it there."""
    if isinstance(bound, Tensor):
        return bound.to(x.dtype).expand(x.shape)
    return torch.full_like(x, bound)


def _raise_if(bad: bool | Tensor, rule: str, value: float | Tensor) -> None:
    bad = torch.as_tensor(bad)
    if bad.any():
        raise ValueError(f"{rule}, got {_first(value, bad)}")


def _first(value: float | Tensor, where: Tensor) -> float:
    """The element of a bound (broadcast against `where`) at the first place where `where` holds."""
    return value.expand(where.shape)[where][0].item() if isinstance(value, Tensor) else value
