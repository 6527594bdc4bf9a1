"""Runs side by side are the runs of the optimizers themselves, and the search is what it says."""

import math
from itertools import pairwise

import pytest
import torch

from anon_lab import optimizers
from anon_lab.problems import BEALE, QUADRATIC, ROSENBROCK
from anon_lab.trajectories import RATES, Contender, follow, search, steps_to_keep, trace

STEPS = 40
CONTENDERS = {
    Contender("Anon", -0.5): 1e-5,
    Contender("Anon", 0.5): 1e-2,
    Contender("Anon", 1.5): 3.0,
    Contender("Anon", -0.5, guarded=True): 1e-5,
    Contender("Anon", 1.5, guarded=True): 3.0,
    Contender("SGD"): 3e-4,
    Contender("SGDM"): 1e-4,
    Contender("Adam"): 0.03,
    Contender("RAdam"): 1e-4,
    Contender("Yogi"): 0.03,
    Contender("AdaBound"): 1e-5,
    Contender("AdaBelief"): 0.03,
}


def alone(contender: Contender, lr: float, steps: int) -> torch.Tensor:
    """The optimizer on Rosenbrock at its own learning rate, as anyone would run it."""
    theta = torch.tensor(ROSENBROCK.start, dtype=torch.float64, requires_grad=True)
    optimizer = contender.build([theta], lr)
    path = [theta.detach().clone()]
    for _ in range(steps):
        optimizers.take_step(optimizer, lambda: ROSENBROCK.f(theta))
        path.append(theta.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.label)
def test_side_by_side_is_one_by_one(contender: Contender) -> None:
    rates = CONTENDERS[contender] * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
    starts = torch.tensor([ROSENBROCK.start] * 3, dtype=torch.float64)
    points, first = trace(ROSENBROCK, contender, starts, rates, range(STEPS + 1))
    assert (points[-1] - points[0]).norm(dim=-1).min() > 1e-3, "else nothing is compared"
    for k, lr in enumerate(rates.tolist()):
        expected = alone(contender, lr, STEPS)
        torch.testing.assert_close(points[:, k], expected, rtol=1e-9, atol=1e-11)
        assert float(first[k]) == pytest.approx(math.dist(expected[0].tolist(), expected[1].tolist()), rel=1e-9)


def test_adahessian_draws_its_directions_from_a_fixed_seed() -> None:
    contender = Contender("AdaHessian")
    state = torch.get_rng_state()
    path = follow(ROSENBROCK, contender, 0.1, range(STEPS + 1))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = alone(contender, 0.1, STEPS)
    torch.testing.assert_close(torch.tensor([path.x, path.y], dtype=torch.float64).T, expected, rtol=1e-9, atol=1e-11)


def test_runs_do_not_disturb_each_other() -> None:
    contender = Contender("Anon", 1.0)
    starts = torch.tensor([ROSENBROCK.start, (50.0, 50.0)], dtype=torch.float64)
    rates = torch.tensor([0.1, 1e300], dtype=torch.float64)
    points, _ = trace(ROSENBROCK, contender, starts, rates, [10])
    assert not points[0, 1].isfinite().all()
    torch.testing.assert_close(points[0, 0], alone(contender, 0.1, 10)[-1], rtol=1e-12, atol=0)


def test_search_on_a_quadratic_has_a_closed_form() -> None:
    steps = 20
    found = search(QUADRATIC, Contender("SGD"), steps)
    assert found.rates == list(RATES)
    for lr, loss in zip(found.rates, found.loss, strict=True):
        ends = [(1 - 100 * lr) ** steps, (1 - lr) ** steps]
        assert loss == pytest.approx((100 * ends[0] ** 2 + ends[1] ** 2) / 2, rel=1e-9)
    assert found.lr == min(zip(found.loss, found.rates, strict=True))[1]
    assert found.path.loss[-1] == found.loss[found.best]
    assert (found.path.x[0], found.path.y[0]) == QUADRATIC.start
    assert found.within(2.0) == sum(lr < 0.02 for lr in RATES), "SGD is stable below 2 / 100"
    assert not found.at_edge


def test_diverged_runs_are_the_worst_and_not_nan() -> None:
    found = search(ROSENBROCK, Contender("SGD"), 30, rates=(1e-4, 1.0))
    assert found.loss[1] == found.distance[1] == math.inf
    assert found.best == 0
    assert found.at_edge


def test_rates_are_six_a_decade() -> None:
    assert len(RATES) == 79
    assert RATES[0] == pytest.approx(1e-10)
    assert RATES[-1] == pytest.approx(1e3)
    assert all(b / a == pytest.approx(10 ** (1 / 6)) for a, b in pairwise(RATES))


@pytest.mark.parametrize("last", [1, 499, 500, 501, 5000, 12345])
def test_steps_kept(last: int) -> None:
    kept = steps_to_keep(last)
    assert kept == sorted(set(kept))
    assert kept[: min(last, 500) + 1] == list(range(min(last, 500) + 1))
    assert kept[-1] == last
    assert all(b - a <= 1 + a / 100 for a, b in pairwise(kept))


def test_a_path_carries_its_losses() -> None:
    path = follow(BEALE, Contender("Anon", 0.0), 0.5, [0, 1, 5])
    assert path.steps == [0, 1, 5]
    for x, y, loss in zip(path.x, path.y, path.loss, strict=True):
        assert loss == float(BEALE.f(torch.tensor([x, y], dtype=torch.float64)))
    assert path.loss[0] > path.loss[1] > path.loss[2]


def test_labels() -> None:
    assert Contender("Anon", -0.5).label == "γ = −0.5"
    assert Contender("Anon", 2.0, guarded=True).label == "γ = 2 (guarded)"
    assert Contender("SGDM").label == "SGDM"
