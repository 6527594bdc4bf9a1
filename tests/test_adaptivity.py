"""`measure_adaptivity` and `relative_adaptivity` on optimizers whose exponents are known by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from pytorch_optimizer import SAM, SOAP, Lion, Lookahead
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon, Optimizer, RAdam

from anon_optim import Anon, Guard, Storage, measure_adaptivity, relative_adaptivity


def history(*shape: int, steps: int = 40, scale: float = 0.1, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(*shape, generator=random) for _ in range(steps)]


class Power(Optimizer):
    """u = -sign(g) |g|^(1 - a): adaptivity a by construction; draws as many random numbers as it is told to."""

    def __init__(self, params: list, a: float, noise: float = 0.0) -> None:
        super().__init__(params, {"a": a, "noise": noise})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                factor = 1 + group["noise"] * torch.rand_like(p)
                p -= factor * p.grad.sign() * p.grad.abs() ** (1 - group["a"])
                p.grad.zero_()  # optimizers may spoil the gradients they are given


class NormalisedSGD(Optimizer):
    """u = -g / ||g||, by tensor."""

    def __init__(self, params: list) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p -= p.grad / p.grad.norm()


class PartlyShort(SGD):
    """Holds every fourth gradient in bfloat16."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            p.grad[::4] = p.grad[::4].bfloat16().to(p.dtype)
        super().step()


@pytest.mark.parametrize("a", [-1.0, 0.0, 0.3, 1.0, 2.5])
def test_power_law_is_read_off_exactly(a: float) -> None:
    gradients = history(5, 4)
    found = measure_adaptivity(lambda params: Power(params, a, noise=0.5), gradients)
    assert found.coordinates.shape == (5, 4)
    assert found.undefined_share == 0
    torch.testing.assert_close(found.coordinates, torch.full((5, 4), a, dtype=torch.float64), rtol=0, atol=1e-9)
    assert found.overall == pytest.approx(a, abs=1e-9)
    assert relative_adaptivity(lambda params: Power(params, a), gradients) == pytest.approx(a, abs=1e-9)
    assert torch.equal(gradients[0], history(5, 4)[0]), "the caller's gradients are left alone"


@pytest.mark.parametrize(
    ("make", "a"),
    [
        (lambda params: SGD(params, lr=0.1), 0.0),
        (lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True), 0.0),
        (Adam, 1.0),
        (Lion, 1.0),
        (SOAP, 1.0),
        (lambda params: Lookahead(Adam(params)), 1.0),
        (Muon, 1.0),
    ],
    ids=["SGD", "Nesterov", "Adam", "Lion", "SOAP", "Lookahead", "Muon"],
)
def test_known_optimizers(make: Callable, a: float) -> None:
    assert measure_adaptivity(make, history(6, 5)).overall == pytest.approx(a, abs=2e-4)


@pytest.mark.parametrize("gamma", [-2.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("guard", [None, Guard(), Guard(clip=3.0, touch=False, brake=False, follow=True)])
def test_anon_has_the_adaptivity_it_is_told(gamma: float, guard: Guard | None) -> None:
    found = measure_adaptivity(lambda params: Anon(params, gamma=gamma, guard=guard), history(6, 5))
    torch.testing.assert_close(found.coordinates, torch.full((6, 5), gamma, dtype=torch.float64), rtol=0, atol=1e-5)
    assert found.overall == pytest.approx(gamma, abs=1e-5)


def test_where_the_printed_algorithm_saw_no_gradient_eps_rules() -> None:
    gradients = [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), torch.ones(2)]  # refreshes at steps 1 and 2
    printed = measure_adaptivity(lambda params: Anon.paper(params, gamma=0.5), gradients)
    assert printed.coordinates.tolist() == pytest.approx([0.5, 0.0], abs=1e-9)
    assert printed.overall == pytest.approx(0.0, abs=1e-6), "its 10,000 times longer step is nearly all of the update"
    guarded = measure_adaptivity(lambda params: Anon(params, gamma=0.5), gradients)
    assert guarded.coordinates.tolist() == pytest.approx([0.5, 0.5], abs=1e-9)


def test_scaling_by_two_where_a_fine_step_drowns_in_rounding() -> None:
    assert measure_adaptivity(Adam, history(6, 5)).factor == 1.001
    found = measure_adaptivity(Muon, history(6, 5))
    assert found.factor == 2.0
    assert found.overall == pytest.approx(1.0, abs=1e-3)

    def rounded(params: list) -> Optimizer:
        return Anon(params, gamma=0.5, storage=Storage(stochastic_round=True))

    coarse = measure_adaptivity(rounded, history(40), dtype=torch.bfloat16)
    assert coarse.factor == 2.0
    assert coarse.overall == pytest.approx(0.5, abs=5e-3)
    # most coordinates are right, the others stand still or jump
    assert measure_adaptivity(PartlyShort, history(400)).overall == pytest.approx(0.0, abs=1e-12)
    # in bfloat16 1.25 * 1.001 is 1.25: nothing jumps, and yet nothing is seen
    lost = measure_adaptivity(SGD, [torch.tensor([1.25])], dtype=torch.bfloat16)
    assert lost.overall == pytest.approx(0.0, abs=1e-12)


def test_factor_is_a_secant() -> None:
    # g / (|g| + eps) at g = eps: ln|u| = ln k - ln(k + 1) + const, so the secant between 1/f and f is 1/2 for every f,
    # and at g = 1 with eps = 1/2 it is 1 - ln((f + 1/2) / (1/f + 1/2)) / (2 ln f).
    def adam(params: list) -> Optimizer:
        return Adam(params, eps=0.5)

    for factor in (1.001, 2.0, 8.0):
        found = measure_adaptivity(adam, [torch.ones(1)], factor=factor).overall
        secant = math.log((factor + 0.5) / (1 / factor + 0.5)) / (2 * math.log(factor))
        assert found == pytest.approx(secant, abs=1e-9)


def test_several_parameters_keep_their_shapes() -> None:
    gradients = [[a, b] for a, b in zip(history(3, 2), history(4, seed=1), strict=True)]
    found = measure_adaptivity(lambda params: Power(params, 0.5), gradients)
    assert [tuple(a.shape) for a in found.coordinates] == [(3, 2), (4,)]
    assert found.overall == pytest.approx(0.5, abs=1e-9)
    between = relative_adaptivity(lambda params: Power(params, 0.5), gradients)
    assert between == pytest.approx([0.5, 0.5], abs=1e-9)


def test_steps_asked_for() -> None:
    # RAdam is SGD with momentum in its first five steps
    found = measure_adaptivity(RAdam, history(8, steps=10), at=[1, 5, 6, 10])
    assert [a.step for a in found] == [1, 5, 6, 10]
    assert [round(a.overall, 4) for a in found] == [0, 0, 1, 1]
    assert measure_adaptivity(RAdam, history(8, steps=5)).overall == found[1].overall


@pytest.mark.parametrize("coupled", [False, True])
def test_weight_decay_does_not_disturb(coupled: bool) -> None:
    make = (lambda params: Adam(params, weight_decay=10.0)) if coupled else (lambda p: AdamW(p, weight_decay=10.0))
    plain = measure_adaptivity(Adam, history(8, scale=1e-6))
    decayed = measure_adaptivity(make, history(8, scale=1e-6))
    assert torch.equal(decayed.coordinates, plain.coordinates)
    assert plain.overall < 0.995, "eps shows at this scale"


def test_start_is_where_the_parameters_stand() -> None:
    # coupled decay at start w: u = g + w for SGD, so A = 1 - g / (g + w) = 1/2 at g = w
    ones = torch.ones(3)
    found = measure_adaptivity(lambda p: SGD(p, lr=0.1, weight_decay=1.0), [ones], start=ones)
    assert found.overall == pytest.approx(0.5, abs=1e-6)


def test_coordinate_without_update_is_undefined_and_said_to_be() -> None:
    gradients = [torch.tensor([0.0, 1.0, math.nan]), torch.tensor([0.0, 2.0, 1.0])]
    found = measure_adaptivity(Adam, gradients)
    assert found.defined.tolist() == [False, True, False]
    assert found.coordinates.isnan().tolist() == [True, False, True]
    assert found.undefined_share == pytest.approx(2 / 3)
    assert "67%" in str(found)

    still = measure_adaptivity(lambda params: SGD(params, lr=0.0), history(4))
    assert not still.defined.any()
    with pytest.raises(ValueError, match="SGD made no update of finite length at step 40"):
        _ = still.overall
    assert "not defined" in str(still)
    with pytest.raises(ValueError, match="SGD left a part of parameter 0 where it was"):
        relative_adaptivity(lambda params: SGD(params, lr=0.0), history(4))


@pytest.mark.parametrize("gamma", [-1.0, 0.5, 1.5])
def test_relative_and_overall_part_where_a_tensor_shares_a_number(gamma: float) -> None:
    gradients = history(20)

    def scaled(params: list) -> Optimizer:
        return Anon(params, gamma=gamma, guard=None, lr_scale="tensor")

    assert measure_adaptivity(scaled, gradients).overall == pytest.approx(1.0, abs=1e-6)
    assert relative_adaptivity(scaled, gradients) == pytest.approx(gamma, abs=1e-6)
    assert relative_adaptivity(lambda p: Anon.paper(p, gamma=gamma), gradients) == pytest.approx(gamma, abs=1e-6)


def test_relative_adaptivity_of_others() -> None:
    gradients = history(20)
    assert relative_adaptivity(Adam, gradients) == pytest.approx(1.0, abs=1e-5)
    assert relative_adaptivity(SGD, gradients) == pytest.approx(0.0, abs=1e-9)
    assert measure_adaptivity(NormalisedSGD, gradients).overall == pytest.approx(1.0, abs=1e-9)
    assert relative_adaptivity(NormalisedSGD, gradients) == pytest.approx(0.0, abs=1e-9)
    one = torch.arange(20) == 3
    assert relative_adaptivity(NormalisedSGD, gradients, scaled=one) == pytest.approx(0.0, abs=1e-9)


class Noisy(SGD):
    """Adds a random number to each update, which scaling does not reach."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        for p in self.param_groups[0]["params"]:
            p += torch.rand_like(p)


def test_random_numbers_are_the_seeds_and_the_callers_are_left_alone() -> None:
    found = []
    for outside, seed in ((1, 0), (2, 0), (1, 3)):
        with torch.random.fork_rng():
            torch.manual_seed(outside)
            state = torch.get_rng_state()
            found.append(measure_adaptivity(Noisy, history(4), seed=seed).overall)
            assert torch.equal(torch.get_rng_state(), state)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LBFGS, r"LBFGS cannot be replayed: its step\(\) asks a closure"),
        (lambda params: SAM(params, SGD, lr=0.1), "SAM cannot be replayed on recorded gradients: .*closure"),
    ],
    ids=["LBFGS", "SAM"],
)
def test_refuses_optimizers_that_want_a_closure(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_adaptivity(make, history(4))


def test_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        measure_adaptivity(Adam, [])
    with pytest.raises(ValueError, match=r"\[\(3,\)\] at step 2, \[\(2,\)\] at 1"):
        measure_adaptivity(Adam, [torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="int64 at step 1"):
        measure_adaptivity(Adam, [torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"Invalid at: .*from 1 to 40"):
        measure_adaptivity(Adam, history(2), at=[0])
    with pytest.raises(ValueError, match=r"Invalid factor: 1\.0"):
        measure_adaptivity(Adam, history(2), factor=1.0)
    with pytest.raises(ValueError, match="start must have the shapes"):
        measure_adaptivity(Adam, history(2), start=torch.ones(3))
    with pytest.raises(TypeError, match=r"must return a torch\.optim\.Optimizer"):
        measure_adaptivity(lambda params: params, history(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="parameter 0, of shape"):
        relative_adaptivity(Adam, history(1))
    with pytest.raises(ValueError, match="needs at least one of each"):
        relative_adaptivity(Adam, history(3), scaled=torch.ones(3, dtype=torch.bool))
