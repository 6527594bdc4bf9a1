"""Many networks at once: gradients, statistics and runs as one by one. Without a GPU in Triton's interpreter."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from anon_lab import models, studies, tasks
from anon_lab.models.resnet import BasicBlock, ResNet, resnet18, resnet20
from anon_lab.run import Run, check
from anon_lab.settings import Settings
from anon_lab.steps import Steps
from anon_lab.studies._results import Results
from anon_lab.tasks import Recipe, _images
from anon_lab.train import drive

stacked = pytest.importorskip("anon_lab.models.stacked")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE = 8
on_the_host = pytest.mark.skipif(DEVICE.type == "cuda", reason="float32 is for Triton's interpreter")


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


@on_the_host
@pytest.mark.parametrize(("count", "rounds"), [(2, stacked.ROUNDS), (7, 2)])
def test_gradients_and_statistics_are_those_of_each_network(count, rounds, monkeypatch):
    """Also where pixels do not fill a block, and where several programs share a kernel's gradient."""
    monkeypatch.setattr(stacked, "ROUNDS", rounds)
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


def test_kernels_compile_for_a_gpu():
    """The interpreter computes what a kernel says, but accepts much that the compiler does not."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_stacked.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, most = done.stdout.removesuffix(" bytes\n").split(" with at most ")
    assert said.endswith("variants of convolve, convolve_back, correlate, normalise, unnormalise")
    assert int(most) <= 227 << 10  # an H100's or H200's shared memory


def test_what_cannot_be_stacked_is_refused():
    for net in (resnet18(10), network(shortcut="B"), torch.nn.Linear(2, 2)):
        assert not stacked.fits(net)
        with pytest.raises(ValueError, match="can be stacked"):
            stacked.Stacked([net], SIDE)
    assert stacked.fits(resnet20())
    with pytest.raises(ValueError, match="side must be a multiple of 4, by which these networks divide it, but is 6"):
        stacked.Stacked(networks(1), 6)


@on_the_host
def test_a_channel_without_spread_has_a_finite_gradient():
    nets = networks(1)
    with torch.no_grad():
        nets[0].layer3[0].bn1.weight.zero_()  # so that the last convolution sees one value everywhere
        nets[0].layer3[0].bn1.bias.fill_(1000.0)
    together = stacked.Stacked(nets, SIDE, torch.float32)
    assert together.gradient(*images(1, 4)).isfinite().all()
    assert together.gradients.isfinite().all()


class Noise(_images.InMemory):
    """Random images, on which a run's every number can be compared."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (40, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        made = _images.Images(pixels, torch.arange(40) % 10)
        normal = _images.Normal((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        super().__init__("noise", Recipe(batch_size=8, steps=3), network, normal, made, made, made, pad=1, flip=True)


RECIPE = Recipe(batch_size=8, steps=3, clip=1.0)
STACKED = Settings("noise", "AdamW", lr=0.01, recipe=RECIPE, precision="bf16", stacked=True)
SETTINGS = [
    Settings("noise", name, lr=1e-3, recipe=RECIPE, seed=seed, hyper=hyper, evaluations=1)
    for seed, (name, hyper) in enumerate([("Anon", {"gamma": 0.5}), ("AdamW", {}), ("SGDM", {})])
]


@on_the_host
def test_runs_end_as_they_do_alone():
    task = Noise()
    wanted = [drive([Run(each, task, DEVICE)])[0] for each in SETTINGS]
    found = drive([Run(replace(each, stacked=True), task, DEVICE) for each in SETTINGS])
    for alone, together in zip(wanted, found, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["evaluation"]["loss"] == pytest.approx(alone["evaluation"]["loss"], rel=1e-4)


@on_the_host
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
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compile": True}, "without compile"),
        ({"micro_batch": 4}, "without compile"),
        ({"optimizer": "AdaHessian"}, "more than a gradient"),
    ],
)
def test_settings_that_do_not_go_with_it(changes, says):
    with pytest.raises(ValueError, match=says):
        check(replace(STACKED, hyper={}, **changes), Noise(), DEVICE)


def test_where_it_cannot_be_is_said_before_anything_is_trained(monkeypatch):
    with pytest.raises(ValueError, match="which zipf has none of"):
        check(STACKED, tasks.load("zipf"), DEVICE)
    with pytest.raises(ValueError, match="which digits has none of"):  # images, but no residual network
        check(STACKED, tasks.load("digits"), DEVICE)
    with pytest.raises(ValueError, match="need bf16 on a GPU"):
        check(replace(STACKED, precision="fp32"), Noise(), torch.device("cuda"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="need a GPU"):
        check(STACKED, Noise(), torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "triton", None)  # what a machine without it has
    for name in ("stacked", "_stacked_kernels"):
        monkeypatch.delitem(sys.modules, f"anon_lab.models.{name}")
        monkeypatch.delattr(models, name)
    with pytest.raises(ValueError, match="needs Triton"):
        check(STACKED, Noise(), DEVICE)


def test_deterministic_rules_it_out():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="deterministic rules out"):
            check(STACKED, Noise(), DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)


def test_studies_stack_their_residual_networks_on_a_gpu():
    found = [job for stage in studies.load("cifar10").stages for job in stage.jobs(Results(Path("nowhere")))]
    assert found
    for job in found:
        assert job.settings(torch.device("cuda")).stacked
        assert not job.settings(torch.device("cpu")).stacked


def test_company_is_stacked_or_is_not():
    runs = [Run(replace(SETTINGS[0], stacked=each), Noise(), DEVICE) for each in (True, False)]
    with pytest.raises(ValueError, match="or none is"):
        Steps(runs)
