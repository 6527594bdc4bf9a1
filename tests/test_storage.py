"""Reduced precision of the state: how far it may be off."""

import pytest
import torch

from anon_optim import Anon, Storage


@pytest.mark.parametrize("beta3", [0.0, 0.5, 0.9, None])
@pytest.mark.parametrize("gamma", [-0.5, 0.5, 1.1])
def test_a_bfloat16_preconditioner_is_off_by_rounding_alone(gamma, beta3):
    """Each refresh rounds v by at most 2^-9 and hands on beta3 of the error before: below 2^-8 / (1 - beta3) in all.
    With beta3 None that is 1 / growth at most.

    No clip, which would hold v to the update and not to psi."""
    from anon_optim import Guard

    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(300, 500, generator=generator) * 10 ** torch.linspace(-3, 2, 500)
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(500))
        options = {"guard": Guard(clip=float("inf")), "storage": Storage(preconditioner=dtype), "growth": 1.3}
        optimizer = Anon([p], lr=1e-3, gamma=gamma, beta3=beta3, **options)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        assert optimizer.state[p]["preconditioner"].dtype == dtype
        ends.append(optimizer.state[p]["preconditioner"].float())
    exact, rounded = ends
    handed_on = 1 / 1.3 if beta3 is None else beta3
    assert ((rounded - exact).abs() / exact).max() <= 2**-8 / (1 - handed_on)
    assert not torch.equal(rounded, exact)
