"""The adaptivity of nine optimizers in closed form, as the paper's tables have it, per coordinate.

Each function takes the gradients g_1, ..., g_t and gives A = d ln psi_t(k g) / d ln k at k = 1. Where the usual
implementation departs from the paper's psi, an argument chooses between the two; the default is the paper's, and
`tests/lab/test_closed_forms.py` holds both to what the implementations do.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from anon_optim._idu import is_refresh


def emas(x: Sequence[Tensor], beta: float, *, corrected: bool = True) -> Tensor:
    """EMA(x_1..i; beta) = (1 - beta) / (1 - beta^i) * sum_j beta^(i-j) x_j for every i, as rows.

    Not corrected, it is without the 1 - beta^i, and thus too small at first.
    """
    rows, total = [], torch.zeros_like(x[0])
    for i, x_i in enumerate(x, start=1):
        total = beta * total + (1 - beta) * x_i
        rows.append(total / (1 - beta**i) if corrected else total)
    return torch.stack(rows)


def _squares(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [g.to(torch.float64) ** 2 for g in gradients]


def sgd(gradients: Sequence[Tensor]) -> Tensor:
    """psi = 1, so A = 0."""
    return torch.zeros_like(gradients[0], dtype=torch.float64)


def sgdm(gradients: Sequence[Tensor]) -> Tensor:
    """psi = 1, so A = 0: momentum is linear in the gradients."""
    return sgd(gradients)


def rmsprop(
    gradients: Sequence[Tensor], *, beta2: float = 0.99, eps: float = 1e-8, bias_correction: bool = True
) -> Tensor:
    """psi = sqrt(EMA(g^2)) + eps, so A = 1 / (1 + eps / sqrt(EMA(g^2))).

    torch.optim.RMSprop has no bias correction.
    """
    root = emas(_squares(gradients), beta2, corrected=bias_correction)[-1].sqrt()
    return 1 / (1 + eps / root)


def adam(gradients: Sequence[Tensor], *, beta2: float = 0.999, eps: float = 1e-8) -> Tensor:
    """RMSProp's psi and A; torch.optim.Adam's, too."""
    return rmsprop(gradients, beta2=beta2, eps=eps)


def amsgrad(
    gradients: Sequence[Tensor], *, beta2: float = 0.999, eps: float = 1e-8, bias_correction: bool = True
) -> Tensor:
    """psi = max_i sqrt(EMA(g_1..i^2)) + eps, so A = 1 / (1 + eps / max_i sqrt(EMA(g_1..i^2))).

    torch.optim.Adam(amsgrad=True) takes the maximum first and corrects it by 1 - beta2^t afterwards
    (`bias_correction=False`): early gradients then weigh less in it.
    """
    root = emas(_squares(gradients), beta2, corrected=bias_correction).amax(0).sqrt()
    if not bias_correction:
        root = root / (1 - beta2 ** len(gradients)) ** 0.5
    return 1 / (1 + eps / root)


def padam(
    gradients: Sequence[Tensor], *, partial: float = 0.25, beta2: float = 0.999, eps: float = 1e-8, paper: bool = True
) -> Tensor:
    """psi = (max_i sqrt(EMA(g_1..i^2)) + eps)^(2p), so A = 2p / (1 + eps / max_i sqrt(EMA(g_1..i^2))).

    pytorch_optimizer's PAdam (`paper=False`) takes no maximum, and adds eps to the root that is not bias-corrected.
    """
    second = emas(_squares(gradients), beta2, corrected=paper)
    root = (second.amax(0) if paper else second[-1]).sqrt()
    return 2 * partial / (1 + eps / root)


def adabound(
    gradients: Sequence[Tensor],
    *,
    lr: float = 1e-3,
    final_lr: float = 0.1,
    convergence: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    paper: bool = True,
) -> Tensor:
    """RMSProp's A where the coordinate's step size lies between its bounds, 0 where it is held at one of them.

    The bounds close in on final_lr as convergence * t grows. The paper clips psi; AdaBound clips the step size
    lr / psi, which is the same. pytorch_optimizer's AdaBound (`paper=False`) adds eps to the root that is not
    bias-corrected, and has the 1 - beta1^t of the momentum inside the clip, as its authors have.
    """
    t, (beta1, beta2) = len(gradients), betas
    root = emas(_squares(gradients), beta2, corrected=paper)[-1].sqrt()
    step_size = lr / (root + eps)
    if not paper:
        step_size = step_size * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    lower = final_lr * (1 - 1 / (convergence * t + 1))
    upper = final_lr * (1 + 1 / (convergence * t))
    return torch.where((step_size > lower) & (step_size < upper), 1 / (1 + eps / root), 0.0)


def adabelief(
    gradients: Sequence[Tensor], *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, paper: bool = True
) -> Tensor:
    """psi = sqrt(F) + eps with F = E + eps / (1 - beta2) and E = EMA((g - m)^2), so A = E / (F + eps sqrt(F)).

    In the paper m is the bias-corrected average of the gradients; AdaBelief as its authors wrote it, and as
    pytorch_optimizer has it (`paper=False`, and its `rectify=False`), subtracts the one that is not corrected.
    """
    beta1, beta2 = betas
    wide = [g.to(torch.float64) for g in gradients]
    deviations = torch.stack(wide) - emas(wide, beta1, corrected=paper)
    e = emas(list(deviations**2), beta2)[-1]
    f = e + eps / (1 - beta2)
    return e / (f + eps * f.sqrt())


def _ends(gradients: Sequence[Tensor], growth: float) -> list[int]:
    """Of the intervals between refreshes, after a 0."""
    return [0, *(t for t in range(1, len(gradients) + 1) if is_refresh(t, growth))]


def _interval_emas(gradients: Sequence[Tensor], beta2: float, growth: float) -> Tensor:
    """EMA(g^2) over each interval, as rows."""
    squares = _squares(gradients)
    return torch.stack([emas(squares[before:end], beta2)[-1] for before, end in pairwise(_ends(gradients, growth))])


def anon(
    gradients: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    beta2: float = 0.999,
    eps: float = 1e-16,
    beta3: float | None = 0.5,
    growth: float = 2.0,
) -> Tensor:
    """A = gamma (1 - eps * sum_j f_j,gamma-1 / sum_j f_j,gamma), the sums over the n refreshes up to t, with
    f_j,gamma = beta3^(n-j) (1 - beta3 [j > 1]) (EMA_j(g^2) + eps)^gamma, and EMA_j over the j-th interval. If beta3 is
    None, the first two factors are beta2^(a_n - a_j) (1 - beta2^(a_j - a_(j-1))).

    Without guards: of `Anon.paper`.
    """
    sigma = _interval_emas(gradients, beta2, growth) + eps
    ends = torch.tensor(_ends(gradients, growth), dtype=torch.float64)
    if beta3 is None:
        weight = beta2 ** (ends[-1] - ends[1:]) * (1 - beta2 ** ends.diff())
    else:
        j = torch.arange(1, len(ends))
        weight = beta3 ** (len(sigma) - j) * torch.where(j > 1, 1 - beta3, 1.0)
    weight = weight.to(sigma).reshape(-1, *[1] * gradients[0].dim())
    return gamma * (1 - eps * (weight * sigma ** (gamma - 1)).sum(0) / (weight * sigma**gamma).sum(0))


def anon_bounds(
    gradients: Sequence[Tensor], *, gamma: float = 1.0, beta2: float = 0.999, eps: float = 1e-16, growth: float = 2.0
) -> tuple[Tensor, Tensor]:
    """The interval that A of Anon lies in: between gamma (1 - k) and gamma, with k = eps / (min_j EMA_j(g^2) + eps).

    The paper's Theorem 2 prints [gamma (1 - k), gamma), which for gamma < 0 is the wrong way round, and a k without
    the second eps, which exceeds 1 where eps is large. Smaller bound first.
    """
    k = eps / (_interval_emas(gradients, beta2, growth).amin(0) + eps)
    edge, plain = gamma * (1 - k), torch.full_like(k, gamma)
    return torch.minimum(edge, plain), torch.maximum(edge, plain)
