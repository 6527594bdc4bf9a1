"""The largest eigenvalue of a Hessian: on known spectra, and against the whole Hessian of a small network."""

import pytest
import torch
from torch import nn

from anon_lab.sharpness import largest_eigenvalue


def turned(spectrum: list[float]) -> torch.Tensor:
    """A symmetric matrix with these eigenvalues, in a random orthonormal basis."""
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))
    return basis @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ basis.T


@pytest.mark.parametrize(
    ("spectrum", "largest"),
    [
        ([0.1, 0.5, 2.0, 7.0, 7.5], 7.5),
        ([-9.0, -1.0, 0.0, 3.0], 3.0),  # the one furthest from 0 is negative
        ([-4.0, -2.0], -2.0),
        ([5.0, 5.0, 5.0], 5.0),  # one step finds all there is
        ([2.5], 2.5),
    ],
)
def test_quadratics(spectrum: list[float], largest: float) -> None:
    h = turned(spectrum)
    x = torch.ones(len(spectrum), dtype=torch.float64, requires_grad=True)
    assert largest_eigenvalue(lambda: 0.5 * x @ h @ x, [x]) == pytest.approx(largest, rel=1e-12)


def test_few_products_of_many_dimensions() -> None:
    """An outlier over a bulk, as networks have it, is found long before the basis is complete."""
    spectrum = torch.cat([torch.linspace(-1, 1, 1999), torch.tensor([10.0])])
    x = torch.zeros(2000, requires_grad=True)
    found = [largest_eigenvalue(lambda: 0.5 * (spectrum * x * x).sum(), [x], n) for n in (1, 3, 15)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(10, rel=1e-5)


def test_network_against_its_whole_hessian() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    inputs, labels = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    names = [name for name, _ in net.named_parameters()]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(net, dict(zip(names, values, strict=True)), inputs)
        return nn.functional.cross_entropy(outputs, labels)

    params = list(net.parameters())
    blocks = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in params))
    whole = torch.cat(
        [torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(params, blocks, strict=True)]
    )
    want = torch.linalg.eigvalsh(whole)[-1].item()
    assert largest_eigenvalue(lambda: loss(*params), params, 51) == pytest.approx(want, rel=1e-9)
    assert largest_eigenvalue(lambda: loss(*params), params, 12, seed=5) == pytest.approx(want, rel=1e-2)


def test_parameters_that_do_not_matter_and_bad_arguments() -> None:
    x, idle = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    assert largest_eigenvalue(lambda: (x**2).sum(), [idle, x]) == pytest.approx(2)
    with pytest.raises(ValueError, match="iterations must be at least 1, but is 0"):
        largest_eigenvalue(lambda: (x**2).sum(), [x], 0)
