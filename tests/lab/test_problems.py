"""The small problems: their values, minima and gradients, and the online problem's sums."""

import math

import pytest
import torch

from anon_lab.problems import BEALE, PROBLEMS, QUADRATIC, RASTRIGIN, ROSENBROCK, Problem, online_gradient, online_noise


def gradient(problem: Problem, point: tuple[float, float]) -> list[float]:
    theta = torch.tensor(point, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(problem.f(theta), theta)[0].tolist()


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=lambda problem: problem.name)
def test_smallest_at_the_optimum(problem: Problem) -> None:
    optimum = torch.tensor(problem.optimum, dtype=torch.float64)
    assert float(problem.f(optimum)) == pytest.approx(0.0, abs=1e-14)
    assert gradient(problem, problem.optimum) == pytest.approx([0.0, 0.0], abs=1e-12)
    around = optimum + torch.tensor([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.1], [0.0, -0.1]], dtype=torch.float64)
    assert (problem.f(around) > 0).all()
    assert problem.distance(around).tolist() == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=lambda problem: problem.name)
@pytest.mark.parametrize("point", [(-1.8, 0.3), (0.7, -1.1), (2.2, 1.4)])
def test_gradient_is_the_difference_quotient(problem: Problem, point: tuple[float, float]) -> None:
    h = 1e-5
    x, y = point
    neighbours = torch.tensor([(x + h, y), (x - h, y), (x, y + h), (x, y - h)], dtype=torch.float64)
    right, left, up, down = problem.f(neighbours).tolist()
    quotients = [(right - left) / (2 * h), (up - down) / (2 * h)]
    assert gradient(problem, point) == pytest.approx(quotients, rel=1e-6, abs=1e-7)


def test_values_by_hand() -> None:
    at = {
        problem.name: problem.f(torch.tensor([0.5, 0.0], dtype=torch.float64)).item() for problem in PROBLEMS.values()
    }
    assert at["beale"] == pytest.approx(math.log(1 + 1.0**2 + 1.75**2 + 2.125**2) / 10)
    assert at["rosenbrock"] == pytest.approx(0.5**2 + 100 * 0.25**2)
    assert at["rastrigin"] == pytest.approx(20 + 0.25 + 10 - 10)
    assert at["quadratic"] == pytest.approx(100 * 0.25 / 2)


def test_gradients_by_hand() -> None:
    assert gradient(ROSENBROCK, (-2.0, 2.0)) == pytest.approx([-6 - 400 * (-2) * (2 - 4), 200 * (2 - 4)])
    assert gradient(RASTRIGIN, (0.25, -1.0)) == pytest.approx([0.5 + 20 * math.pi, -2.0])
    assert gradient(QUADRATIC, (1.0, 1.0)) == pytest.approx([100.0, 1.0])
    # At y = 0 Beale is the sum of (c - x)^2 with d/dy = 2 (1.5 - x) x.
    x, squares = -1.8, [(c + 1.8) ** 2 for c in (1.5, 2.25, 2.625)]
    chain = 1 / (1 + sum(squares)) / 10
    slopes = [-2 * sum(c - x for c in (1.5, 2.25, 2.625)) * chain, 2 * (1.5 - x) * x * chain]
    assert gradient(BEALE, BEALE.start) == pytest.approx(slopes)


def test_many_points_at_once() -> None:
    points = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for problem in PROBLEMS.values():
        together = problem.f(points)
        assert together.shape == (3, 4)
        assert torch.equal(together[1, 2], problem.f(points[1, 2]))


def test_starts_and_optima_are_in_the_picture() -> None:
    for problem in PROBLEMS.values():
        for point in (problem.start, problem.optimum):
            assert all(low < value < high for value, (low, high) in zip(point, problem.window, strict=True))


def test_online_gradient_is_large_once_in_101_steps() -> None:
    assert [t for t in range(1, 304) if online_gradient(t) == 1010.0] == [1, 102, 203]
    assert {online_gradient(t) for t in range(2, 102)} == {-10.0}
    assert sum(online_gradient(t) for t in range(1, 102)) == 10.0, "so x = -1 is best"


def test_online_noise_alternates_and_dies_out() -> None:
    assert online_noise(1) == 500.0
    assert online_noise(2) == pytest.approx(-500 / math.e)
    assert online_noise(7, strength=3.0) == pytest.approx(3 * online_noise(7))
    noise = [online_noise(t) for t in range(1, 800)]
    assert sum(noise) == pytest.approx(500 / (1 + 1 / math.e)), "not zero: the noise has a bias"
    assert sum(map(abs, noise)) == pytest.approx(500 / (1 - 1 / math.e))
