"""The compiled recursions against the optimizers themselves, and against what can be worked out by hand."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import AdaBelief
from torch.optim import Optimizer

from anon_lab import online, problems
from anon_lab.figures.idu import AdaMomentum
from anon_optim import Anon, Box

BOX = Box(-1.0, 1.0)


def play(optimizer: Optimizer, x: torch.Tensor, steps: int, lr: float = 0.1, noise: float = 1.0) -> list[float]:
    """x before each step and after the last, under the optimizer itself."""
    xs = [x.item()]
    for t in range(1, steps + 1):
        x.grad = torch.full_like(x, problems.online_gradient(t) + problems.online_noise(t, noise))
        optimizer.param_groups[0]["lr"] = lr / math.sqrt(t)
        optimizer.step()
        if not isinstance(optimizer, Anon):  # which projects by itself
            x.data.clamp_(-1, 1)
        xs.append(x.item())
    return xs


def parameter(x0: float = 0.0) -> torch.Tensor:
    return torch.tensor([x0], dtype=torch.float64, requires_grad=True)


def assert_follows(run: online.Run, xs: list[float]) -> None:
    """x and the regret at every recorded time, the latter summed anew."""
    regrets = list(itertools.accumulate(problems.online_gradient(t) * (x + 1) for t, x in enumerate(xs[:-1], 1)))
    assert run.t[-1] == len(xs) - 1
    assert run.x == pytest.approx([xs[t] for t in run.t], rel=1e-9, abs=1e-12)
    assert run.average_regret == pytest.approx([regrets[t - 1] / t for t in run.t], rel=1e-9, abs=1e-9)


SETTINGS: list[dict[str, Any]] = [
    {"T": 10_000, "gamma": 1.0},
    {"gamma": 1.0, "betas": (0.9, 0.99), "growth": 1.1, "beta3": 0.0},
    {"gamma": 0.5, "betas": (0.9, 0.99)},
    {"gamma": 1.5, "growth": 3.0, "beta3": 0.8},
    {"gamma": -0.5},
    {"gamma": 1.0, "betas": (0.9, 0.99), "statistic": "belief"},
    {"gamma": 1.0, "statistic": "momentum", "growth": math.inf},
]


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_anon_is_the_library_s(settings: dict[str, Any], guard: bool) -> None:
    settings = {"T": 2000, "betas": (0.5, 0.75), **settings}
    lr = 0.1 * 10 ** (3 * (settings["gamma"] - 1))  # keeps x off the walls, where every method looks alike
    x = parameter()
    make = Anon if guard else Anon.paper
    of_library = {key: value for key, value in settings.items() if key != "T"}
    if settings.get("statistic") == "momentum":
        of_library["statistic"] = lambda grad, exp_avg: exp_avg * exp_avg
    xs = play(make([x], **of_library, project=BOX), x, settings["T"], lr=lr)
    assert_follows(online.run("Anon", guard=guard, lr=lr, **settings), xs)
    assert len(set(xs)) > len(xs) / 4


@pytest.mark.parametrize("betas", [(0.5, 0.75), (0.9, 0.99)])
@pytest.mark.parametrize("name", online.EVERY_STEP)
def test_every_step_methods_are_the_optimizers(name: str, betas: tuple[float, float]) -> None:
    x = parameter(x0=1.0)
    make: dict[str, Callable[..., Optimizer]] = {
        "Adam": torch.optim.Adam,
        "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
        "AdaBelief": AdaBelief,
        "AdaMomentum": AdaMomentum,
    }
    optimizer = make[name]([x], betas=betas)
    xs = play(optimizer, x, 10_000, noise=10.0)
    assert_follows(online.run(name, betas=betas, x0=1.0, noise=10.0, T=10_000), xs)


def test_sgd_is_anon_at_gamma_zero() -> None:
    x = parameter()
    xs = play(Anon([x], gamma=0.0, betas=(0.5, 0.75), project=BOX), x, 1000, lr=1e-4)
    assert_follows(online.run("SGD", lr=1e-4, T=1000), xs)


@pytest.mark.parametrize("name", online.OPTIMIZERS)
def test_the_first_step_by_hand(name: str) -> None:
    """The first gradient is 1010 + 500: m_hat is that; psi too, or what the statistic makes of it, or Anon's clip."""
    run = online.run(name, T=1, x0=0.5, lr=1e-3 if name != "SGD" else 1e-4)
    step = {"SGD": 0.151, "AdaBelief": 1e-3 / 0.5, "AdaMomentum": 1e-3 / 0.5, "Anon": 1e-3 / 2}.get(name, 1e-3)
    assert run.t == [1]
    assert run.x == pytest.approx([0.5 - step])
    assert run.average_regret == pytest.approx([1010 * 1.5])


def test_settled_is_when_x_came_to_stay() -> None:
    """Plain SGD from x = 1 with lr 2/1010: the first spike takes it to -1, quiet steps lift it by 20/1010/sqrt(t)."""
    lifts = itertools.accumulate(20 / 1010 / math.sqrt(t) for t in range(2, 102))
    leaves = next(t for t, lift in enumerate(lifts, 2) if lift > 0.1)

    def settled(T: int, lr: float = 2 / 1010) -> int | None:
        return online.run("SGD", betas=(0.0, 0.0), lr=lr, x0=1.0, T=T, noise=0).settled

    assert settled(leaves - 1) == 1
    assert settled(leaves) is None
    assert settled(102, lr=20 / 1010) == 102  # the second spike, as long as the first at ten times the lr


def test_times_are_log_spaced_and_hold_the_decades() -> None:
    times = online.log_spaced(10**6)
    assert times == sorted(set(times))
    assert {10**k for k in range(7)} <= set(times)
    ratios = [b / a for a, b in itertools.pairwise(times) if a > 1000]
    assert max(ratios) < 1.1
    assert online.log_spaced(1) == [1]
    assert online.log_spaced(12_345)[-1] == 12_345


def test_recording_does_not_change_the_run() -> None:
    sparse = online.run(T=500, at=[7, 500])
    dense = online.run(T=500, at=range(1, 501))
    assert sparse.t == [7, 500]
    assert sparse.x == [dense.x[6], dense.x[499]]
    assert sparse.average_regret == [dense.average_regret[6], dense.average_regret[499]]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="optimizer: 'Adm', expected one of Anon, SGD, Adam"):
        online.run("Adm")
    with pytest.raises(ValueError, match="statistic: 'g2', expected one of gradient, belief, momentum"):
        online.run(statistic="g2")
    with pytest.raises(ValueError, match="T: 0, expected at least one step"):
        online.run(T=0)
    with pytest.raises(ValueError, match=r"at: \[1, 1, 5\], expected whole numbers from 1 on that rise up to T = 5"):
        online.run(T=5, at=[1, 1, 5])
    with pytest.raises(ValueError, match=r"at: \[1, 4\], expected"):
        online.run(T=5, at=[1, 4])
