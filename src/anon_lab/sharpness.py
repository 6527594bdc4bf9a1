"""The sharpness of a minimum: the largest eigenvalue of the loss's Hessian, by Lanczos's method."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def largest_eigenvalue(
    loss: Callable[[], Tensor], params: Sequence[Tensor], iterations: int = 20, seed: int = 0
) -> float:
    """The largest, not the largest in size: an indefinite Hessian may have a negative one further from 0.

    **Arguments:**
    - `loss`: a scalar that can be differentiated twice in `params`, and is the same at every call.
    - `iterations`: products of the Hessian with a vector, at most; each keeps a vector of the parameters' size. What
      is found lies below the true value, and reaches it once there are as many as parameters.
    - `seed`: of the direction to start from.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, but is {iterations}")
    gradient = _flat(torch.autograd.grad(loss(), params, create_graph=True, materialize_grads=True))

    def product(vector: Tensor) -> Tensor:
        """H v = d(g . v) / d theta."""
        parts = torch.autograd.grad(gradient, params, vector, retain_graph=True, materialize_grads=True)
        return _flat(parts).detach()

    start = torch.randn(len(gradient), generator=torch.Generator().manual_seed(seed))
    return _lanczos(product, start.to(gradient), min(iterations, len(gradient)))


def _lanczos(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> float:
    """The largest eigenvalue of T = Q^T H Q, with Q an orthonormal basis of start, H start, H^2 start, ...

    T is tridiagonal: H q_j = beta_{j-1} q_{j-1} + alpha_j q_j + beta_j q_{j+1}.
    """
    basis = [start / start.norm()]
    alphas: list[float] = []
    betas: list[float] = []
    while True:
        rest = product(basis[-1])
        size = rest.norm()
        alphas.append((rest @ basis[-1]).item())
        for _ in range(2):  # once leaves what rounding lets through, and eigenvalues would then be found twice
            for vector in basis:
                rest = rest - (rest @ vector) * vector
        beta = rest.norm()
        if len(alphas) == iterations or beta <= 10 * torch.finfo(rest.dtype).eps * size:
            break  # in the second case the basis already spans all that start reaches
        betas.append(beta.item())
        basis.append(rest / beta)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    if betas:
        side = torch.tensor(betas, dtype=torch.float64)
        tridiagonal += torch.diag(side, 1) + torch.diag(side, -1)
    return torch.linalg.eigvalsh(tridiagonal)[-1].item()


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])
