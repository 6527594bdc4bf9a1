"""The registry: every entry trains, saves, obeys a schedule and refuses; the shipped ones follow their papers."""

import io
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from typer.testing import CliRunner

from anon_lab import cli, optimizers
from anon_lab.baselines.averaging import Averaging
from anon_lab.contenders import contender
from anon_lab.optimizers import Entry, Range

NAMES = optimizers.names()
LISTED = (
    "SGD, SGDM, RMSProp, Adam, AdamW, AMSGrad, AMSGradW, Padam, Yogi, AdaBound, RAdam, SWA, Lookahead, AdaBelief, "
    "Adai, Lookaround, Sophia-G, Sophia-H, AGD, HVAdam, MSVAG, MADA, Lion, Muon, AdaHessian, Anon, Anon (printed)"
)


class Problem:
    """A small classification task, the same every time, with the losses that a loop would give to `take_step`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        self.net = torch.nn.Sequential(*layers).double()
        self.x = torch.randn(64, 8).double()
        self.y = self.x[:, :3].argmax(1)

    def loss(self) -> Tensor:
        return cross_entropy(self.net(self.x), self.y)

    def sampled_loss(self) -> Tensor:
        logits = self.net(self.x)
        return cross_entropy(logits, torch.multinomial(logits.detach().softmax(1), 1)[:, 0], reduction="none")

    def make(self, name: str, lr: float | None = None) -> Optimizer:
        return optimizers.make(name, self.net.parameters(), lr)

    def train(self, optimizer: Optimizer, steps: int) -> list[float]:
        return [optimizers.take_step(optimizer, self.loss, self.sampled_loss).item() for _ in range(steps)]

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def test_holds_what_the_paper_compares() -> None:
    assert ", ".join(NAMES) == LISTED


@pytest.mark.parametrize("name", NAMES)
def test_lowers_the_loss_at_its_usual_rate(name: str) -> None:
    problem = Problem()
    optimizer = problem.make(name)
    start = problem.loss().item()
    problem.train(optimizer, 20)
    with optimizers.averaged(optimizer):
        assert problem.loss().item() < start


@pytest.mark.parametrize("name", NAMES)
def test_goes_on_identically_after_loading(name: str) -> None:
    problem, resumed = Problem(), Problem()
    optimizer = problem.make(name)
    problem.train(optimizer, 7)
    file = io.BytesIO()
    torch.save({"net": problem.net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed.net.load_state_dict(loaded["net"])
    other = resumed.make(name)
    other.load_state_dict(loaded["optimizer"])
    for each, its_optimizer in ((problem, optimizer), (resumed, other)):
        torch.manual_seed(1)
        each.train(its_optimizer, 7)
    assert all(torch.equal(a, b) for a, b in zip(problem.weights(), resumed.weights(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_obeys_a_schedule(name: str) -> None:
    problem = Problem()
    optimizer = problem.make(name)
    # Anon and AdaBound look at lr when made, so it is the schedule that brings it to nothing.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t == 0 else 0.0)
    problem.train(optimizer, 1)
    schedule.step()
    assert all(group["lr"] == 0 for group in optimizer.param_groups)
    before = problem.weights()
    problem.train(optimizer, 2)
    if name != "Lookaround":  # whose parameters hold another head after every step
        assert all(torch.equal(a, b) for a, b in zip(before, problem.weights(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_refuses_what_it_does_not_know(name: str) -> None:
    params = list(Problem().net.parameters())
    with pytest.raises(ValueError, match=r"has no setting 'wieght_decay', only lr, .*weight_decay"):
        optimizers.make(name, params, wieght_decay=0.1)
    with pytest.raises(ValueError, match=r"Invalid lr: -1\.0"):
        optimizers.make(name, params, lr=-1.0)


@pytest.mark.parametrize("name", NAMES)
def test_names_settings_alike(name: str) -> None:
    entry = optimizers.get(name)
    assert set(entry.space) - {"lr"} <= set(entry.settings)
    assert {"lr", "weight_decay"} <= set(entry.space)
    # One gamma in the registry, and no setting under the name that another package gives it
    assert ("gamma" in entry.settings) == name.startswith("Anon")
    assert not {"weight_decouple", "betas"} & set(entry.renamed)
    params = list(Problem().net.parameters())
    optimizer = entry.make(params, weight_decay=0.01)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}


@pytest.mark.parametrize("name", [name for name in NAMES if "betas" in optimizers.get(name).settings])
def test_one_beta_can_be_set_alone(name: str) -> None:
    params = list(Problem().net.parameters())
    usual = optimizers.make(name, params).param_groups[0]
    changed = optimizers.make(name, params, beta2=0.7).param_groups[0]
    if name == "MADA":
        usual, changed = ({"betas": (g["coefficients"]["beta1"], g["coefficients"]["beta2"])} for g in (usual, changed))
    assert tuple(changed["betas"]) == (usual["betas"][0], 0.7)
    with pytest.raises(ValueError, match="not both"):
        optimizers.make(name, params, beta1=0.5, betas=(0.5, 0.9))


@pytest.mark.parametrize("entry", optimizers.REGISTRY.values(), ids=NAMES)
def test_searches_as_wide_for_all(entry: Entry) -> None:
    settings = {"gamma": 1.0}
    lr, weight_decay = entry.space["lr"], entry.space["weight_decay"]
    assert isinstance(lr, Range)
    assert isinstance(weight_decay, Range)
    assert lr.given(settings).low < entry.lr < lr.given(settings).high
    assert lr.high / lr.low == pytest.approx(1e3)
    assert weight_decay.high / weight_decay.low == pytest.approx(1e3)


@pytest.mark.parametrize(("gamma", "like"), [(0.0, "Adai"), (1.0, "AdamW")])
def test_anons_rates_are_those_of_its_relatives(gamma: float, like: str) -> None:
    ours, theirs = (optimizers.get(name).space["lr"] for name in ("Anon", like))
    assert isinstance(ours, Range)
    assert isinstance(theirs, Range)
    given = ours.given({"gamma": gamma})
    assert (given.low, given.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))


def test_with_lr_scale_the_unit_is_adams_at_every_gamma() -> None:
    anon, adamw = optimizers.get("Anon"), optimizers.get("AdamW")
    for name in ("lr", "weight_decay"):
        ours, theirs = anon.space[name], adamw.space[name]
        assert isinstance(ours, Range)
        assert isinstance(theirs, Range)
        given = ours.given({"gamma": 1.5, "lr_scale": "tensor"})
        assert (given.low, given.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    made = contender("Anon", {"gamma": 1.5, "lr_scale": "tensor"})
    assert made.numbers({"lr": 1.0, "weight_decay": 1e-4})["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("settings", "lr"),
    [({}, 1e-3), ({"gamma": 0.0}, 1.0), ({"gamma": -0.1}, 2.0), ({"gamma": 0.0, "lr_scale": "tensor"}, 1e-3)],
)
def test_the_usual_lr_is_in_gammas_unit(settings: dict[str, Any], lr: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert optimizers.get("Anon").usual_lr(settings) == lr
    assert optimizers.make("Anon", [weight], **settings).param_groups[0]["lr"] == lr


def test_a_range_waits_for_gamma() -> None:
    with pytest.raises(ValueError, match="gamma must be chosen"):
        Range(1.0, 2.0, per_gamma=0.1).given({})
    assert Range(1.0, 2.0).given({}) == Range(1.0, 2.0)


def test_get() -> None:
    assert optimizers.get("adamw").name == "AdamW"
    assert optimizers.get("SOPHIA-g").name == "Sophia-G"
    with pytest.raises(ValueError, match="no optimizer is called 'adamww'; near it: AdamW"):
        optimizers.get("adamww")


@pytest.mark.parametrize("entry", optimizers.REGISTRY.values(), ids=NAMES)
def test_says_what_it_is(entry: Entry) -> None:
    optimizer = entry.make(list(Problem().net.parameters()))
    assert entry.averages == isinstance(optimizer, Averaging)
    assert entry.needs in ("gradient", "create_graph", "sampled_loss", "views")
    assert entry.source in ("torch", "pytorch_optimizer", "anon_lab", "anon_optim")
    assert len(entry.description) <= 100
    assert entry.description.endswith(".")


def test_take_step_clips_and_returns_the_loss() -> None:
    problem = Problem()
    optimizer = problem.make("SGD", lr=1.0)
    before, loss = problem.weights(), problem.loss().item()
    assert optimizers.take_step(optimizer, problem.loss, max_grad_norm=1e-3).item() == loss
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, problem.weights(), strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_take_step_says_what_sophia_needs() -> None:
    problem = Problem()
    with pytest.raises(ValueError, match="sampled_loss"):
        optimizers.take_step(problem.make("Sophia-G"), problem.loss)


def test_sophia_takes_a_mean_only_with_its_batch_size() -> None:
    separate, mean = Problem(), Problem()
    optimizer = optimizers.make("Sophia-G", mean.net.parameters(), batch_size=64)
    torch.manual_seed(1)
    separate.train(separate.make("Sophia-G"), 1)
    torch.manual_seed(1)
    optimizers.take_step(optimizer, mean.loss, lambda: mean.sampled_loss().mean())
    for a, b in zip(separate.weights(), mean.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="batch_size must be given"):
        optimizers.take_step(mean.make("Sophia-G"), mean.loss, lambda: mean.sampled_loss().mean())


def test_sampled_loss_is_asked_for_every_tenth_step() -> None:
    problem = Problem()
    optimizer = problem.make("Sophia-G")
    asked = []
    for step in range(21):
        optimizers.take_step(optimizer, problem.loss, lambda step=step: (asked.append(step), problem.sampled_loss())[1])
    assert asked == [0, 10, 20]


# The shipped ones against their papers, naively in numpy: theta after each step, from 1, along the given gradients

Array = np.ndarray[Any, np.dtype[np.float64]]
Formula = Callable[[list[Array], float, float], Iterator[Array]]
GRADIENTS = list(np.random.default_rng(0).normal(size=(9, 5)) * np.logspace(-3, 1, 5))


def sgd(gradients: list[Array], lr: float, decay: float, momentum: float = 0.0) -> Iterator[Array]:
    theta, buffer = np.ones(5), np.zeros(5)
    for g in gradients:
        buffer = momentum * buffer + g + decay * theta
        theta = theta - lr * buffer
        yield theta


def sgdm(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    return sgd(gradients, lr, decay, momentum=0.9)


def rmsprop(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    theta, v = np.ones(5), np.zeros(5)
    for g in gradients:
        g = g + decay * theta
        v = 0.99 * v + 0.01 * g**2
        theta = theta - lr * g / (np.sqrt(v) + 1e-8)
        yield theta


def adam(
    gradients: list[Array],
    lr: float,
    decay: float,
    *,
    decoupled: bool = False,
    largest: bool = False,
    eps: float = 1e-8,
    second: Callable[[Array, Array, Array], Array] = lambda v, g, m: 0.999 * v + 0.001 * g**2,
    scale: Callable[[Array, Array, int], Array] | None = None,
) -> Iterator[Array]:
    """Adam with another second moment or another last line, by which most of the others are defined."""
    theta, m, v, v_max = np.ones(5), np.zeros(5), np.zeros(5), np.zeros(5)
    for t, g in enumerate(gradients, start=1):
        if not decoupled:
            g = g + decay * theta
        m = 0.9 * m + 0.1 * g
        v = second(v, g, m)
        v_max = np.maximum(v, v_max)
        m_hat, v_hat = m / (1 - 0.9**t), (v_max if largest else v) / (1 - 0.999**t)
        step = scale(m, v, t) if scale else lr * m_hat / (np.sqrt(v_hat) + eps)
        theta = theta - lr * decay * theta * decoupled - step
        yield theta


def adamw(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    return adam(gradients, lr, decay, decoupled=True)


def amsgrad(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    return adam(gradients, lr, decay, largest=True)


def amsgradw(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    return adam(gradients, lr, decay, decoupled=True, largest=True)


def yogi(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    def second(v: Array, g: Array, m: Array) -> Array:
        return v - 0.001 * np.sign(v - g**2) * g**2

    return adam(gradients, lr, decay, decoupled=True, eps=1e-3, second=second)


def adabelief(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    def second(s: Array, g: Array, m: Array) -> Array:
        return 0.999 * s + 0.001 * (g - m) ** 2 + 1e-16

    return adam(gradients, lr, decay, decoupled=True, eps=1e-16, second=second)


def adabound(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    def scale(m: Array, v: Array, t: int) -> Array:
        lower, upper = 0.1 * (1 - 1 / (1e-3 * t + 1)), 0.1 * (1 + 1 / (1e-3 * t))
        # Bias correction and 1e-8 are the authors' code's, where the paper has none; 1e-15 is the package's alone.
        rate = lr * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) / (np.sqrt(v + 1e-15) + 1e-8)
        return np.clip(rate, lower, upper) * m

    return adam(gradients, lr, decay, scale=scale)


def radam(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    rho_inf = 2 / (1 - 0.999) - 1

    def scale(m: Array, v: Array, t: int) -> Array:
        rho = rho_inf - 2 * t * 0.999**t / (1 - 0.999**t)
        m_hat = m / (1 - 0.9**t)
        if rho <= 5:  # the authors' code's threshold; the paper prints 4
            return lr * m_hat
        r = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
        return lr * r * m_hat * math.sqrt(1 - 0.999**t) / (np.sqrt(v) + 1e-8)

    return adam(gradients, lr, decay, decoupled=True, scale=scale)


def lion(gradients: list[Array], lr: float, decay: float) -> Iterator[Array]:
    theta, m = np.ones(5), np.zeros(5)
    for g in gradients:
        theta = theta - lr * (np.sign(0.9 * m + 0.1 * g) + decay * theta)
        m = 0.99 * m + 0.01 * g
        yield theta


SHIPPED: dict[str, Formula] = {
    "SGD": sgd,
    "SGDM": sgdm,
    "RMSProp": rmsprop,
    "Adam": adam,
    "AdamW": adamw,
    "AMSGrad": amsgrad,
    "AMSGradW": amsgradw,
    "Yogi": yogi,
    "AdaBound": adabound,
    "RAdam": radam,
    "AdaBelief": adabelief,
    "Lion": lion,
}


def test_every_shipped_one_is_held_to_its_paper() -> None:
    shipped = [name for name, entry in optimizers.REGISTRY.items() if not entry.source.startswith("anon")]
    assert shipped == list(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("foreach", [False, True])
def test_follows_its_paper(name: str, foreach: bool) -> None:
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = optimizers.make(name, [p], lr=0.01, weight_decay=0.1, foreach=foreach)
    for g, theta in zip(GRADIENTS, SHIPPED[name](GRADIENTS, 0.01, 0.1), strict=True):
        p.grad = torch.tensor(g)
        optimizer.step()
        np.testing.assert_allclose(p.detach(), theta, rtol=1e-12)


# The command


def test_the_command_lists_all() -> None:
    result = CliRunner().invoke(cli.app, ["optimizers"], env={"COLUMNS": "240"})
    assert result.exit_code == 0
    assert all(name in result.output for name in NAMES)


def test_the_command_writes_json() -> None:
    result = CliRunner().invoke(cli.app, ["optimizers", "--json"])
    listed = json.loads(result.output)
    assert [each["name"] for each in listed] == NAMES
    anon = next(each for each in listed if each["name"] == "Anon")
    assert anon["space"]["lr"] == {"low": 0.01, "high": 10.0, "log": True, "per_gamma": 0.001}
    assert "total_steps" in anon["settings"]


def test_guards_and_growth_from_plain_values() -> None:
    """As JSON and a command line have them, for whoever makes the optimizer: a run, a sweep or a table."""
    settings = {"guard": {"clip": 3.0}, "growth": {"start": 1.25, "end": 2.0, "by": 1000}}
    (group,) = optimizers.make("Anon", [torch.nn.Parameter(torch.ones(2))], **settings).param_groups
    assert group["clip"] == 3.0
    assert group["growth"](1000) == 2.0
