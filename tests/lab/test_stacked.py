"""Many networks at once: gradients, statistics and runs as one by one. Without a GPU in Triton's interpreter."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from anon_lab import tasks
from anon_lab.models.resnet import BasicBlock, ResNet, resnet18, resnet20
from anon_lab.run import Run
from anon_lab.settings import Settings
from anon_lab.steps import Steps
from anon_lab.tasks import Recipe, _images
from anon_lab.train import drive

stacked = pytest.importorskip("anon_lab.models.stacked")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE = 8


def network(shortcut="A") -> ResNet:
    """With a block that keeps its size and two that halve it."""
    return ResNet(BasicBlock, (1, 2, 1), 16, 10, small_images=True, shortcut=shortcut)


def networks(count: int) -> list[ResNet]:
    torch.manual_seed(0)
    made = [network().to(DEVICE) for _ in range(count)]
    with torch.no_grad():
        for net in made:
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return made


def images(nets: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(nets, count, 3, SIDE, SIDE, device=DEVICE)
    return pixels, torch.randint(0, 10, (nets, count), device=DEVICE)


@pytest.mark.parametrize("count", [2, 7])
def test_gradients_and_statistics_are_those_of_each_network(count):
    nets = networks(3)
    alone = copy.deepcopy(nets)
    together = stacked.Stacked(nets, SIDE, torch.float32)
    for _ in range(2):
        pixels, labels = images(3, count)
        losses = together.gradient(pixels, labels)
        for net, own, x, y, loss in zip(nets, alone, pixels, labels, losses, strict=True):
            own.zero_grad()
            wanted = functional.cross_entropy(own(x), y)
            wanted.backward()
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
            for (name, p), q in zip(net.named_parameters(), own.parameters(), strict=True):
                assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm(), name
            for mine, its in zip(net.buffers(), own.buffers(), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter multiplies no bfloat16")
def test_bfloat16_is_as_close_as_autocast():
    nets = networks(1)
    exact, cast = copy.deepcopy(nets[0]), copy.deepcopy(nets[0])
    (x,), (y,) = images(1, 16)
    stacked.Stacked(nets, SIDE).gradient(x[None], y[None])
    functional.cross_entropy(exact(x), y).backward()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        functional.cross_entropy(cast(x), y).backward()

    def error(net: ResNet) -> float:
        mine, true = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (net, exact))
        return float((mine - true).norm() / true.norm())

    assert error(nets[0]) < 1.3 * error(cast) < 0.1


def test_what_cannot_be_stacked_is_refused():
    for net in (resnet18(10), network(shortcut="B"), torch.nn.Linear(2, 2)):
        assert not stacked.fits(net)
        with pytest.raises(ValueError, match="can be stacked"):
            stacked.Stacked([net], SIDE)
    assert stacked.fits(resnet20())


class Noise(_images.InMemory):
    """Random images, on which a run's every number can be compared."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (40, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        made = _images.Images(pixels, torch.arange(40) % 10)
        normal = _images.Normal((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        super().__init__("noise", Recipe(batch_size=8, steps=3), network, normal, made, made, made, pad=1, flip=True)


RECIPE = Recipe(batch_size=8, steps=3, clip=1.0)
SETTINGS = [
    Settings("noise", name, lr=0.05, recipe=RECIPE, seed=seed, hyper=hyper, evaluations=1)
    for seed, (name, hyper) in enumerate([("Anon", {"gamma": 0.5}), ("AdamW", {}), ("SGDM", {})])
]


def test_runs_end_as_they_do_alone():
    task = Noise()
    wanted = [drive([Run(each, task, DEVICE)])[0] for each in SETTINGS]
    found = drive([Run(replace(each, stacked=True), task, DEVICE) for each in SETTINGS])
    for alone, together in zip(wanted, found, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert together["evaluation"]["loss"] == pytest.approx(alone["evaluation"]["loss"], rel=1e-2)


def test_a_stacked_run_goes_on_where_it_was():
    """Parameters that lie elsewhere are still the module's and the optimizer's."""
    task, settings = Noise(), replace(SETTINGS[0], stacked=True)
    through, first = Run(settings, task, DEVICE), Run(settings, task, DEVICE)
    for run in (through, first):
        steps = Steps([run])
        steps.take()
        steps.take()
    again = Run(settings, task, DEVICE)
    again.restore(copy.deepcopy(first.state()))
    for run in (through, again):
        Steps([run]).take()
    for p, q in zip(through.net.parameters(), again.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compile": True}, "without compile"),
        ({"micro_batch": 4}, "without compile"),
        ({"optimizer": "AdaHessian"}, "way of its own"),
    ],
)
def test_settings_that_do_not_go_with_it(changes, says):
    with pytest.raises(ValueError, match=says):
        Run(replace(SETTINGS[0], hyper={}, stacked=True, **changes), Noise(), DEVICE)
    with pytest.raises(ValueError, match="images in memory"):
        Run(replace(SETTINGS[0], stacked=True), tasks.load("zipf"), DEVICE)


def test_company_is_stacked_or_is_not():
    runs = [Run(replace(SETTINGS[0], stacked=each), Noise(), DEVICE) for each in (True, False)]
    with pytest.raises(ValueError, match="or none is"):
        Steps(runs)
