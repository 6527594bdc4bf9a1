"""Autograd through the step: gradients of a whole unrolled run with respect to what went into it."""

import pytest
import torch

from anon_optim import Anon, Guard

STEPS = 5  # across the refreshes at 1, 2 and 4


def unrolled(start: torch.Tensor, lr: torch.Tensor, gradients: torch.Tensor, **options) -> torch.Tensor:
    theta = start.clone()
    optimizer = Anon([theta], lr=lr, differentiable=True, **options)
    for gradient in gradients:
        theta.grad = gradient * theta.clone().sin()  # depends on where the run has come to
        optimizer.step()
    return theta


def draw(seed: int, zero_start: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(4, dtype=torch.float64, generator=generator)
    gradients = torch.randn(STEPS, 4, dtype=torch.float64, generator=generator)
    if zero_start:
        gradients[:3, 0] = 0
    return start.requires_grad_(), torch.tensor(0.03, dtype=torch.float64, requires_grad=True), gradients


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.5, 1.0, 1.1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"guard": None},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": False},
        {"lr_scale": "tensor"},
        {"statistic": "belief"},
        {"guard": Guard(clip=0.3)},
        {"guard": Guard(clip=3.0, touch=False, brake=False, follow=True)},
    ],
    ids=lambda options: next(iter(options), "default"),
)
def test_gradients_of_an_unrolled_run_are_right(gamma, options):
    start, lr, gradients = draw(0, zero_start=False)
    gradients.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda start, lr, gradients: unrolled(start, lr, gradients, gamma=gamma, **options), (start, lr, gradients)
    )


def test_a_coordinate_that_starts_late_gives_no_nan():
    start, lr, gradients = draw(1, zero_start=True)
    end = unrolled(start, lr, gradients, gamma=1.0)
    grads = torch.autograd.grad(end.sum(), (start, lr))
    assert all(grad.isfinite().all() for grad in grads)


def test_foreach_and_differentiable_exclude_each_other():
    with pytest.raises(ValueError, match="foreach"):
        Anon([torch.zeros(2, requires_grad=True)], foreach=True, differentiable=True)
