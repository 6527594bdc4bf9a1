"""Anon's variants: equal to Anon where they vary nothing, and to arithmetic by hand where they do."""

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from anon_lab.baselines.anon_variant import AnonVariant
from anon_lab.growth import Through
from anon_optim import Anon, Guard
from anon_optim._idu import refresh_times


def stepped(optimizer: Any, p: Parameter, grads: torch.Tensor) -> torch.Tensor:
    path = []
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        path.append(p.detach().clone())
    return torch.stack(path)


def sparse_gradients(steps: int, *shape: int) -> torch.Tensor:
    """Of many sizes, with coordinates that see their first one late."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(steps, *shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    grads[: steps // 2, 0] = 0
    return grads


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"guard": None},
        {"weight_decay": 0.1, "decoupled_weight_decay": False},
        {"guard": Guard(brake=False, follow=True), "betas": (0.9, 0.5)},
    ],
)
@pytest.mark.parametrize("capturable", [False, True])
def test_varying_nothing_is_anon(gamma: float, settings: dict[str, Any], capturable: bool) -> None:
    grads = sparse_gradients(40, 3, 4)
    theirs, ours = (Parameter(torch.ones(3, 4)) for _ in range(2))
    expected = stepped(
        Anon([theirs], 0.01, gamma, foreach=False, fused=False, capturable=capturable, **settings), theirs, grads
    )
    found = stepped(AnonVariant([ours], 0.01, gamma, capturable=capturable, **settings), ours, grads)
    assert found.equal(expected)


def test_plain_clip_leaves_v_as_it_is() -> None:
    # One refresh, on g = 1, so v = 1 and r = 1; with beta1 = 0 the step is g, or 1 at the most.
    grads = torch.tensor([[1.0], [5.0], [0.5]])
    settings: dict[str, Any] = {
        "betas": (0.0, 0.9),
        "growth": math.inf,
        "guard": Guard(clip=1.0, floor=0.0, brake=False),
    }
    plain, sticky = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    path = stepped(AnonVariant([plain], 1.0, clips="plain", **settings), plain, grads)
    assert path.flatten().tolist() == pytest.approx([-1, -2, -2.5])
    # The sticky clip has lowered v to 1/5.
    path = stepped(AnonVariant([sticky], 1.0, **settings), sticky, grads)
    assert path.flatten().tolist() == pytest.approx([-1, -2, -2.1])


def test_rows_are_as_tensors_of_their_own() -> None:
    grads = sparse_gradients(40, 3, 4)
    whole, single = Parameter(torch.ones(3, 4)), [Parameter(torch.ones(4)) for _ in range(3)]
    settings: dict[str, Any] = {"lr": 0.01, "gamma": 1.2, "guard": Guard(clip=0.5, floor=0.3, brake=False)}
    found = stepped(AnonVariant([whole], rows=True, **settings), whole, grads)
    for row, p in enumerate(single):
        expected = stepped(Anon([p], foreach=False, **settings), p, grads[:, row])
        assert found[:, row].equal(expected)
    together = stepped(AnonVariant([q := Parameter(torch.ones(3, 4))], **settings), q, grads)
    assert not found.equal(together)


@pytest.mark.parametrize("capturable", [False, True])
def test_drift_refreshes_early(capturable: bool) -> None:
    # Refreshes at 1, 2, 4, ..., 32 and 64; from step 40 on gradients are 100 times as large.
    grads = torch.ones(60, 1, dtype=torch.float64)
    grads[39:] = 100
    settings: dict[str, Any] = {
        "betas": (0.0, 0.9),
        "beta3": 0.0,
        "guard": Guard(clip=math.inf, brake=False),
        "eps": 0.0,
    }
    still, moved = (Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    late = stepped(AnonVariant([still], 1.0, **settings), still, grads).diff(dim=0).flatten()
    early = stepped(AnonVariant([moved], 1.0, drift=10.0, capturable=capturable, **settings), moved, grads)
    early = early.diff(dim=0).flatten()
    assert late.tolist() == pytest.approx([-1.0] * 38 + [-100.0] * 21)
    # The interval that began at step 33 has its ten samples at step 42, the last three of them large.
    sigma = (0.1 * sum(0.9**k * grads[41 - k].item() ** 2 for k in range(10))) / (1 - 0.9**10)
    assert early.tolist() == pytest.approx([-1.0] * 38 + [-100.0] * 2 + [-100 / math.sqrt(sigma)] * 19)


@pytest.mark.parametrize("capturable", [False, True])
def test_psi_rises_by_its_part_of_the_next_refresh(capturable: bool) -> None:
    # psi is 1 from the refreshes at 1, 2 and 4; the next one is at 8. s is the last gradient's square.
    grads = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 0.5, 2.0, 1.0]).view(-1, 1)
    settings: dict[str, Any] = {
        "betas": (0.0, 0.0),
        "beta3": 0.5,
        "guard": Guard(clip=math.inf, brake=False),
        "eps": 0.0,
    }
    p = Parameter(torch.zeros(1))
    path = stepped(AnonVariant([p], 1.0, rise=True, capturable=capturable, **settings), p, grads)
    # Of that refresh's half, a quarter, two and three quarters; a smaller gradient does not lower psi.
    psi = [1, 1, 1, 1, math.sqrt(7 / 8 + 9 / 8), 1, math.sqrt(5 / 8 + 4 * 3 / 8), 1]
    steps = [g / each for g, each in zip(grads.flatten().tolist(), psi, strict=True)]
    assert path.flatten().tolist() == pytest.approx([-sum(steps[: n + 1]) for n in range(8)])


def test_the_step_is_a_refresh_time_among_the_others() -> None:
    assert refresh_times(300, Through(2.0, 75)) == [1, 2, 4, 8, 16, 32, 64, 75, 150, 300]
    assert refresh_times(40, Through(2.0, 16)) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("wrong", [{"clips": "soft"}, {"drift": 1.0}, {"rows": True}])
def test_says_what_is_wrong(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        AnonVariant([Parameter(torch.zeros(1))], **wrong)
