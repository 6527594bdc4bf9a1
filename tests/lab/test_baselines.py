"""The baselines written here against their papers: trajectories worked out by hand, or naively in numpy."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from anon_lab.baselines.adahessian import AdaHessian
from anon_lab.baselines.adai import Adai
from anon_lab.baselines.agd import AGD
from anon_lab.baselines.averaging import SWA, Lookahead, Lookaround
from anon_lab.baselines.hvadam import HVAdam
from anon_lab.baselines.mada import MADA
from anon_lab.baselines.msvag import MSVAG
from anon_lab.baselines.muon import Muon, orthogonal
from anon_lab.baselines.padam import Padam
from anon_lab.baselines.sophia import SophiaG, SophiaH

Array = np.ndarray[Any, np.dtype[np.float64]]
START = 10.0
GRADIENTS = np.random.default_rng(1).normal(size=(6, 7)) * np.logspace(-4, 0, 7)


def parameter(*values: float) -> Parameter:
    return Parameter(torch.tensor(values, dtype=torch.float64))


def walk(optimizer: Optimizer, p: Parameter, gradients: Sequence[Any]) -> list[Any]:
    """The parameter after each of the steps along these gradients."""
    places = []
    for gradient in gradients:
        p.grad = torch.tensor(gradient, dtype=torch.float64).reshape(p.shape)
        optimizer.step()
        places.append(p.detach().clone().numpy())
    return places


# Padam, Adai and M-SVAG, in numpy


def test_padam() -> None:
    lr, (beta1, beta2), eps, partial = 0.1, (0.9, 0.99), 1e-8, 1 / 8
    p = Parameter(torch.ones(7, dtype=torch.float64))
    found = walk(Padam([p], lr, (beta1, beta2), eps, weight_decay=0.1, partial=partial), p, list(GRADIENTS))
    theta, m, v, v_max = np.ones(7), np.zeros(7), np.zeros(7), np.zeros(7)
    for t, g in enumerate(GRADIENTS, start=1):
        g = g + 0.1 * theta
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        v_max = np.maximum(v_max, v)
        theta = theta - lr * np.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (np.sqrt(v_max) + eps) ** (2 * partial)
        np.testing.assert_allclose(found[t - 1], theta, rtol=1e-12)


def test_padam_at_one_half_is_amsgrad_but_for_eps() -> None:
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    gradients = [[1.0, -3.0], [0.1, 2.0], [0.01, -1.0]]
    ours = walk(Padam([p], 0.01, eps=0.0, partial=0.5), p, gradients)
    theirs = walk(torch.optim.Adam([q], 0.01, eps=0.0, amsgrad=True), q, gradients)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_adai(scale: float) -> None:
    lr, (beta0, beta2), eps = 0.5, (0.1, 0.99), 1e-3
    p = Parameter(torch.ones(3, dtype=torch.float64))
    q = Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = Adai([{"params": [p]}, {"params": [q]}], lr, (beta0, beta2), eps)
    theta, m, v, product = np.ones(7), np.zeros(7), np.zeros(7), np.ones(7)
    for t, g in enumerate(scale * GRADIENTS, start=1):
        p.grad, q.grad = torch.tensor(g[:3]), torch.tensor(g[3:])
        optimizer.step()
        v = beta2 * v + (1 - beta2) * g**2
        v_hat = v / (1 - beta2**t)
        beta1 = np.clip(1 - beta0 / v_hat.mean() * v_hat, 0, 1 - eps)
        product = product * beta1
        m = beta1 * m + (1 - beta1) * g
        theta = theta - lr * m / (1 - product)
        np.testing.assert_allclose(np.concatenate([p.detach(), q.detach()]), theta, rtol=1e-12)


def test_msvag() -> None:
    lr, beta = 0.1, 0.9
    p = Parameter(torch.ones(7, dtype=torch.float64))
    found = walk(MSVAG([p], lr, beta, weight_decay=0.1), p, list(GRADIENTS))
    theta, m, v = np.ones(7), np.zeros(7), np.zeros(7)
    for t, g in enumerate(GRADIENTS, start=1):
        g = g + 0.1 * theta
        m, v = beta * m + (1 - beta) * g, beta * v + (1 - beta) * g**2
        m_hat, v_hat = m / (1 - beta**t), v / (1 - beta**t)
        # The variance of a mean of t numbers with weights w is the sum of w^2 times theirs.
        weights = (1 - beta) * beta ** np.arange(t) / (1 - beta**t)
        rho = min(np.sum(weights**2), 0.9999)
        s = (v_hat - m_hat**2) / (1 - rho)
        theta = theta - lr * np.clip(m_hat**2 / (m_hat**2 + rho * s), 0, 1) * m_hat
        np.testing.assert_allclose(found[t - 1], theta, rtol=1e-9)


# AGD, by hand: beta1 = beta2 = 1/2, lr = 1


def test_agd_by_hand() -> None:
    p = parameter(START)
    first, second = walk(AGD([p], 1.0, (0.5, 0.5), delta=1e-9), p, [2.0, 6.0])
    # m = 1, m_hat = 2, s = 2, b = 2, b / (1 - 1/2) = 4
    assert first == pytest.approx(START - 2 / 2, rel=1e-14)
    # m = 3.5, m_hat = 14/3, s = 14/3 - 2 = 8/3, b = 1 + 32/9 = 41/9, b / (3/4) = 164/27
    assert second == pytest.approx(START - 1 - (14 / 3) / math.sqrt(164 / 27), rel=1e-14)


def test_agd_is_sgd_below_delta() -> None:
    p = parameter(START)
    first, second = walk(AGD([p], 1.0, (0.5, 0.5), delta=3.0), p, [2.0, 6.0])
    assert first == pytest.approx(START - 2 / 3, rel=1e-14)  # sqrt(4) < 3
    assert second == pytest.approx(START - 2 / 3 - (14 / 3) / 3, rel=1e-14)  # sqrt(164/27) = 2.46 < 3


def test_agd_decays_apart_from_the_gradient() -> None:
    p = parameter(START)
    (found,) = walk(AGD([p], 0.5, (0.5, 0.5), weight_decay=0.1, delta=1e-9), p, [2.0])
    assert found == pytest.approx(START * (1 - 0.05) - 0.5, rel=1e-14)


# HVAdam, by hand


def test_hvadam_by_hand() -> None:
    p = parameter(START, START)
    first, second = walk(HVAdam([p], 1.0, (0.5, 0.5), eps=0.0), p, [[2.0, 1.0], [0.0, 1.0]])
    # v = 0: e = g^2, (g - m)^2 = g^2 / 4, eta = 4, s = 2 g^2, s / (1/2) = 4 g^2; m_hat = g. Then v = (2, 1).
    np.testing.assert_allclose(first, [START - 0.5, START - 0.5], rtol=1e-14)
    # m = (1/2, 3/4), m_hat = (2/3, 1); e = (4, 0), (g - m)^2 = (1/4, 1/16), eta e = (64, 0)
    # s = (8, 2) / 2 + (64, 0) / 2 = (36, 1), s / (3/4) = (48, 4/3)
    # m_hat - v = (-4/3, 0), k = -(8/9) / (16/9) = -1/2, u = -(2, 1) / 2 + (3/2) (2/3, 1) = (0, 1)
    # cos = 1 / sqrt(4/9 + 1) = 3 / sqrt(13), a = cos / 2
    a = 1.5 / math.sqrt(13)
    expected = [START - 0.5 - (2 / 3) / math.sqrt(48), START - 0.5 - 1 / math.sqrt(4 / 3) - 10 ** (6 * a - 3)]
    np.testing.assert_allclose(second, expected, rtol=1e-13)


def test_hvadam_restarts_when_nothing_is_shared() -> None:
    p = parameter(START, START)
    optimizer = HVAdam([p], 1.0, (0.0, 0.0), eps=0.0, damping=1.0)
    # beta1 = beta2 = 0 and damping = 1: m_hat = g, eta = 1, s = (g - v)^2
    first, second, third = walk(optimizer, p, [[2.0, 1.0], [-2.1, -0.8], [3.0, 3.0]])
    np.testing.assert_allclose(first, [START - 1, START - 1], rtol=1e-14)
    # v = (2, 1). The line from v to m_hat passes the origin at 0.11 of |m_hat|'s 2.25: cos = 0.05 < 0.1, a restart.
    np.testing.assert_allclose(second, first - np.array([-2.1 / 4.1, -0.8 / 1.8]), rtol=1e-14)
    # Still with v = (2, 1), and no second part; after it v is m_hat.
    np.testing.assert_allclose(third, second - np.array([3 / 1, 3 / 2]), rtol=1e-14)
    np.testing.assert_array_equal(optimizer.state[p]["hidden"], [3.0, 3.0])


# MADA, by hand: beta1 = 1/2, beta2 = 3/4, the rest Adam's, lr = 1, eps = 0

HYPER_LR = 0.01


def mada(p: Parameter, **settings: Any) -> MADA:
    return MADA([p], 1.0, (0.5, 0.75), eps=0.0, hyper_lr=HYPER_LR, hyper_momentum=0.0, **settings)


def test_mada_by_hand() -> None:
    p = parameter(START)
    optimizer = mada(p)
    first, second, third = walk(optimizer, p, [2.0, 3.0, 1.0])
    # m = 1, m_hat = 2; v = 1, v / (1/4) = 4. Nothing depends on the coefficients yet, which thus stay.
    assert first == pytest.approx(START - 1, rel=1e-14)
    # m = 2, m_hat = 2 / (3/4); v = 3/4 + 9/4 = 3, v_mean = 2, v_hat = 3 / (7/16)
    n, r = 8 / 3, math.sqrt(48 / 7)
    assert second == pytest.approx(START - 1 - n / r, rel=1e-14)
    # The derivatives of n / r: d n / r - n / r^2 d v_hat / (2 r)
    by_v = -n / r**2 / (2 * r)
    slopes = {
        "beta1": ((1 - 3) / 0.75 + 2 * 2 * 0.5 / 0.75**2) / r,
        "beta2": by_v * ((1 - 9) / (7 / 16) + 3 * 2 * 0.75 / (7 / 16) ** 2),
        "beta3": 1 / r + by_v * 0.25 * 2 * 3 / (7 / 16),  # n_2 = 3 - 2 = 1, d y^2 = 2 * 3 * 1
        "rho": by_v * (3 - 2) / (7 / 16),
        "c": by_v * 0.25 * (9 - (1 + 9)) / (7 / 16),
        "lion": 1 - n / r,
    }
    # theta_2 = ... - lr n / r and g_3 = 1: the hyper-gradient is minus the slope
    q = {"beta1": 0.5, "beta2": 0.75, "beta3": 0.0, "rho": 1.0, "c": 1.0, "lion": 0.0}
    q = {name: value + HYPER_LR * slopes[name] for name, value in q.items()}
    assert q["c"] > 1
    assert q["lion"] < 0
    q["c"], q["lion"] = 1.0, 0.0
    assert optimizer.param_groups[0]["coefficients"] == pytest.approx(q, rel=1e-13)
    # Step 3: g - g_before = -2, n_2 = 1 (beta3 was 0), m_2 = 2, v_2 = 3, v_mean_2 = 2
    m = q["beta1"] * 2 + (1 - q["beta1"]) * 1
    change = q["beta3"] * 1 + (1 - q["beta3"]) * -2
    v = q["beta2"] * 3 + (1 - q["beta2"]) * (1 - 2 * q["beta3"]) ** 2
    v_hat = (q["rho"] * v + (1 - q["rho"]) * (2 * 2 + v) / 3) / (1 - q["beta2"] ** 3)
    adam = (m / (1 - q["beta1"] ** 3) + q["beta3"] * change) / math.sqrt(v_hat)
    assert third == pytest.approx(second - adam, rel=1e-13)


def test_mada_mixes_yogi_and_lion_by_hand() -> None:
    p = parameter(START)
    first, second = walk(mada(p, c=0.0, lion=0.25), p, [2.0, -1.0])
    # c = 0: v = 3/4 * 0 + 1/4 (0 + 4) = 1; Lion's step is 1
    assert first == pytest.approx(START - 0.75 * 1 - 0.25 * 1, rel=1e-14)
    # y^2 = v = 1: Yogi's v stays. m = 1/2 - 1/2 = 0. Lion: sign(0.95 * 0.04 - 0.05) = -1.
    assert second == pytest.approx(first + 0.25, rel=1e-14)


MIXTURE = {"beta1": 0.5, "beta2": 0.8, "beta3": 0.3, "rho": 0.4, "c": 0.6, "lion": 0.2}


@pytest.mark.parametrize("name", MIXTURE)
def test_mada_follows_the_derivative_of_the_loss_by_its_last_coefficients(name: str) -> None:
    def loss_after_three_steps(change: float) -> tuple[Tensor, MADA]:
        p = parameter(1.0, -2.0, 0.5)
        optimizer = MADA([p], 0.1)
        group = optimizer.param_groups[0]
        group["hyper_lr"], group["coefficients"] = 0.0, dict(MIXTURE)
        walk(optimizer, p, [[1.0, 2.0, -1.0], [0.3, 1.0, 2.0]])
        group["coefficients"][name] += change
        walk(optimizer, p, [[0.5, -1.0, 0.2]])
        return (p**2).sum(), optimizer

    tiny = 1e-6
    slope = (loss_after_three_steps(tiny)[0] - loss_after_three_steps(-tiny)[0]).item() / (2 * tiny)
    loss, optimizer = loss_after_three_steps(0.0)
    group = optimizer.param_groups[0]
    group["hyper_lr"], group["hyper_momentum"] = 0.01, 0.0
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert group["coefficients"][name] == pytest.approx(MIXTURE[name] - 0.01 * slope, rel=1e-8)
    assert slope != 0


def test_mada_stays_finite_without_a_gradient() -> None:
    p = parameter(1.0, 2.0)
    found = walk(MADA([p], 0.1), p, [[0.0, 1.0], [0.0, 0.5], [0.0, 2.0], [1.0, 1.0]])
    assert [place[0] for place in found[:3]] == [1.0] * 3
    assert np.isfinite(found[-1]).all()


# Sophia, by hand: beta1 = beta2 = 1/2


def test_sophia_g_by_hand() -> None:
    p = parameter(START, START)
    optimizer = SophiaG([p], 0.5, (0.5, 0.5), rho=0.1, interval=2, batch_size=5, weight_decay=0.1)
    assert optimizer.hessian_due
    p.grad = torch.tensor([4.0, 0.0], dtype=torch.float64)
    optimizer.update_hessian()  # h = 5 * 16 / 2 = 40 and 0
    (first,) = walk(optimizer, p, [[6.0, 1e-3]])
    # m = 3 and 5e-4; 3 / (0.1 * 40) = 3/4, and the other is clipped; decay by 0.05 of 10
    np.testing.assert_allclose(first, [9.5 - 0.375, 9.5 - 0.5], rtol=1e-14)
    assert not optimizer.hessian_due
    (second,) = walk(optimizer, p, [[-11.0, 0.0]])
    # m = 1.5 - 5.5 = -4: at the clip, as |-4 / 4| = 1
    np.testing.assert_allclose(second, [0.95 * 9.125 + 0.5, 0.95 * 9.0 - 0.5], rtol=1e-14)
    assert optimizer.hessian_due


def test_sophia_h_by_hand() -> None:
    p = parameter(START, START)
    optimizer = SophiaH([p], 0.5, (0.5, 0.5), rho=10.0, interval=2)
    torch.manual_seed(3)
    z = torch.randn(2, dtype=torch.float64)
    torch.manual_seed(3)
    # (a, b) = (4, -1) are the eigenvalues: z * (H z) = (4 z_1^2, -z_2^2)
    (torch.tensor([4.0, -1.0]) * p**2 / 2).sum().backward()
    expected_grad = p.grad
    p.grad = None
    optimizer.backward((torch.tensor([4.0, -1.0]) * p**2 / 2).sum())
    assert p.grad is not None
    assert torch.equal(p.grad, expected_grad)  # type: ignore[arg-type]
    assert not p.grad.requires_grad
    optimizer.step()
    # m = 20 and -5; h = 2 z_1^2 and below 0, where the step is lr along the sign
    x = START - 0.5 * min(20 / (10 * 2 * z[0].item() ** 2), 1)
    np.testing.assert_allclose(p.detach(), [x, START + 0.5], rtol=1e-13)


def test_hutchinson_says_what_to_call() -> None:
    p = parameter(1.0)
    optimizer = SophiaH([p])
    (p**2).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\)"):
        optimizer.step()


def test_adahessian_by_hand() -> None:
    p = parameter(1.0, 1.0)
    optimizer = AdaHessian([p], 0.5, (0.5, 0.5), eps=0.0)
    # For a diagonal Hessian and signs z the estimate is exact: (4, 2), then again; g = (4, -2)
    for expected in ([1 - 0.5 * 4 / 4, 1 + 0.5 * 2 / 2], None):
        optimizer.backward((torch.tensor([4.0, -2.0]) * p**2 / 2).sum())
        optimizer.step()
        if expected:
            np.testing.assert_allclose(p.detach(), expected, rtol=1e-14)
        else:
            # p was (1/2, 3/2), g = (2, -3), m = (1 + 1, -1/2 - 3/2) = (2, -2), m_hat = m / (3/4)
            np.testing.assert_allclose(p.detach(), [0.5 - 0.5 * (8 / 3) / 4, 1.5 + 0.5 * (8 / 3) / 2], rtol=1e-14)
        p.grad = None


def test_adahessian_averages_over_kernels() -> None:
    curvature = torch.arange(1.0, 19.0, dtype=torch.float64).reshape(2, 1, 3, 3)
    p = Parameter(torch.ones(2, 1, 3, 3, dtype=torch.float64))
    optimizer = AdaHessian([p], 1.0, eps=0.0)
    optimizer.backward((curvature * p**2 / 2).sum())
    optimizer.step()
    means = torch.tensor([5.0, 14.0], dtype=torch.float64).reshape(2, 1, 1, 1)  # of 1 ... 9 and 10 ... 18
    torch.testing.assert_close(p.detach(), 1 - curvature / means, rtol=1e-14, atol=0)


def test_second_order_takes_parameters_that_the_gradient_does_not_depend_on() -> None:
    p, offset, unused = parameter(1.0), parameter(1.0), parameter(1.0)
    optimizer = AdaHessian([p, offset, unused], 0.1)
    optimizer.backward((p**2).sum() + 3 * offset.sum())
    assert optimizer.state[offset]["estimate"].item() == 0
    optimizer.step()
    assert unused.item() == 1


# Averages


def test_swa_is_torchs_averaged_model() -> None:
    model = torch.nn.Linear(2, 1).double()
    optimizer = SWA(model.parameters(), 0.1, momentum=0.5, weight_decay=0.01, start=0.5, every=2, total_steps=8)
    twin = torch.nn.Linear(2, 1).double()
    twin.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.5, weight_decay=0.01)
    averaged = torch.optim.swa_utils.AveragedModel(twin)
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    for t in range(1, 9):
        for net, opt in ((model, optimizer), (twin, sgd)):
            opt.zero_grad()
            ((net(x) - 1) ** 2).mean().backward()
            opt.step()
        if t in (5, 7):
            averaged.update_parameters(twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=1e-16)
    trained = [p.detach().clone() for p in model.parameters()]
    with optimizer.averaged():
        for p, q in zip(model.parameters(), averaged.module.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-14, atol=1e-16)
    for p, before in zip(model.parameters(), trained, strict=True):
        assert torch.equal(p, before)


def test_averaged_restores_after_an_error() -> None:
    p = parameter(START)
    optimizer = SWA([p], 1.0, momentum=0.0)
    walk(optimizer, p, [1.0, 1.0])
    try:
        with optimizer.averaged():
            assert p.item() == START - 1.5
            raise KeyError
    except KeyError:
        pass
    assert p.item() == START - 2


def test_lookahead_by_hand() -> None:
    p = parameter(START)
    optimizer = Lookahead([p], 1.0, momentum=0.5, k=2, alpha=0.25)
    places = walk(optimizer, p, [1.0, 1.0, 1.0])
    # buffer 1, 1.5, 1.75; fast 9, 7.5; slow 10 - 0.25 * 2.5 = 9.375; then on from there
    assert [place.item() for place in places] == [9.0, 9.375, 9.375 - 1.75]
    with optimizer.averaged():
        assert p.item() == 9.375


def test_lookaround_by_hand() -> None:
    p = parameter(START)
    optimizer = Lookaround([p], 1.0, momentum=0.5, heads=2, k=2)
    assert optimizer.head == 0
    # Head 0 sees gradients 1, 1 and head 1 sees 2, 4, each from 10: head 0 at 9, then 9 - 1.5; head 1 at 8, then 8 - 5
    places = walk(optimizer, p, [1.0])
    assert optimizer.head == 1
    places += walk(optimizer, p, [2.0, 1.0])
    with optimizer.averaged():
        assert p.item() == (7.5 + 8) / 2
    places += walk(optimizer, p, [4.0])
    # What p holds is the head to move next; the last is the average of 7.5 and 3
    assert [place.item() for place in places] == [10.0, 9.0, 8.0, 5.25]
    # Each head kept its own momentum: 0.5 * 1.5 for head 0 and 0.5 * 5 for head 1
    after = walk(optimizer, p, [0.0, 0.0])
    with optimizer.averaged():
        assert p.item() == (5.25 - 0.75 + 5.25 - 2.5) / 2
    assert after[1].item() == 5.25 - 0.75


# Muon


def numpy_orthogonal(matrix: Array) -> Array:
    """The quintic on the singular values themselves."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(3, 5), (6, 2), (4, 2, 3, 3)])
def test_muon_moves_matrices_along_their_orthogonal_factor(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    p = Parameter(torch.tensor(rng.normal(size=shape)))
    theta = p.detach().numpy().copy().reshape(shape[0], -1)
    gradients = rng.normal(size=(3, *theta.shape))
    lr, momentum = 0.02, 0.9
    found = walk(Muon([p], lr, momentum, weight_decay=0.1), p, list(gradients))
    m = np.zeros_like(theta)
    for g, place in zip(gradients, found, strict=True):
        m = momentum * m + (1 - momentum) * g
        step = max(1, theta.shape[0] / theta.shape[1]) ** 0.5 * numpy_orthogonal((1 - momentum) * g + momentum * m)
        theta = (1 - 0.1 * lr) * theta - lr * step
        np.testing.assert_allclose(place.reshape(theta.shape), theta, rtol=1e-9)


def test_muons_orthogonal_is_near_the_polar_factor() -> None:
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert 0.6 < values.min() < values.max() < 1.3


def test_muon_gives_the_rest_to_adamw() -> None:
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(5, 4), "hidden": torch.nn.Linear(4, 4), "lm_head": torch.nn.Linear(4, 5)}
    ).double()
    optimizer = Muon(model.named_parameters(), lr=0.02, weight_decay=0.1)
    muon, adamw = optimizer.param_groups
    assert muon["use_muon"]
    assert muon["param_names"] == ["hidden.weight"]
    assert (muon["lr"], adamw["lr"]) == (0.02, pytest.approx(3e-4))
    twins = [Parameter(p.detach().clone()) for p in adamw["params"]]
    reference = torch.optim.AdamW(twins, 3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for _ in range(3):
        for p, twin in zip(adamw["params"], twins, strict=True):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, twin in zip(adamw["params"], twins, strict=True):
        torch.testing.assert_close(p, twin, rtol=1e-12, atol=1e-14)


def test_muon_takes_groups_made_by_hand() -> None:
    p, q = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    optimizer = Muon([{"params": [p], "use_muon": False, "lr": 1e-3}, {"params": [q]}], lr=0.1)
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [(False, 1e-3), (True, 0.1)]


# All


QUADRATIC: list[tuple[Callable[[list[Parameter]], Optimizer], int]] = [
    (lambda params: Padam(params, 0.1), 500),
    (lambda params: Adai(params, 0.3), 500),
    (lambda params: MSVAG(params, 0.3), 500),
    (lambda params: AGD(params, 0.1), 500),
    (lambda params: HVAdam(params, 0.05, damping=1.0), 500),
    (lambda params: MADA(params, 0.1), 200),
    (lambda params: SophiaH(params, 0.1, rho=1.0), 500),
    (lambda params: AdaHessian(params, 0.2), 200),
    (lambda params: SWA(params, 0.02, total_steps=500), 500),
    (lambda params: Lookahead(params, 0.02), 500),
    (lambda params: Lookaround(params, 0.02), 900),
    (lambda params: Muon(params, 0.2, adamw_ratio=0.5), 500),
]


@pytest.mark.parametrize(("build", "steps"), QUADRATIC)
def test_reaches_the_minimum_of_a_quadratic(build: Callable[[list[Parameter]], Optimizer], steps: int) -> None:
    torch.manual_seed(0)
    p, q = Parameter(torch.full((2, 3), 2.0, dtype=torch.float64)), parameter(-1.0, 3.0)
    curvature = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

    def loss() -> Tensor:
        return (curvature * (p - 1) ** 2).sum() / 2 + ((q + 2) ** 2).sum() / 2

    optimizer = build([p, q])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    start = loss().item()
    for _ in range(steps):
        optimizer.zero_grad()
        if isinstance(optimizer, SophiaH | AdaHessian):
            optimizer.backward(loss())
        else:
            loss().backward()
        optimizer.step()
        schedule.step()
    assert loss().item() < 1e-3 * start


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: AGD(p, -1.0), "lr: -1.0, expected a number of at least 0"),
        (lambda p: AGD(p, delta=0.0), "delta: 0.0, expected a number above 0"),
        (lambda p: Adai(p, betas=(0.1, 1.0)), "two numbers in"),
        (lambda p: Padam(p, partial=0.6), r"a number in \[0, 0.5\]"),
        (lambda p: MADA(p, betas=(0.9, 0.999)), r"beta2: 0.999, expected a number in \[0.501, 0.99\]"),
        (lambda p: Lookahead(p, k=0), "k: 0, expected a whole number of at least 1"),
        (lambda p: Lookaround(p, heads=-3), "heads: -3"),
        (lambda p: SophiaG(p, rho=0.0), "rho"),
        (lambda p: SWA(p, start=1.0), "start"),
        (lambda p: Muon([{"params": p, "momentum": 1.0}]), "momentum: 1.0"),
    ],
)
def test_refuses_bad_values(build: Callable[[list[Parameter]], Optimizer], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build([parameter(1.0)])
