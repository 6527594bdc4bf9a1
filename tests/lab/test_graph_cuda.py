"""Runs as CUDA graphs: the same numbers as step by step, alone and in company. Needs a GPU."""

from dataclasses import replace

import pytest
import torch

from anon_lab import tasks
from anon_lab.run import MovingAverage, Run
from anon_lab.run_folder import RunFolder
from anon_lab.settings import Settings
from anon_lab.tasks import Recipe
from anon_lab.train import Every, drive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
RECIPE = Recipe(batch_size=40, steps=80, warmup=0.1, clip=1.0, weight_decay=0.01)
SETTINGS = Settings("digits", "Anon", lr=1e-2, recipe=RECIPE, hyper={"gamma": 1.1}, evaluations=4)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def trained(*settings: Settings) -> list[dict]:
    task = tasks.load("digits")
    return drive([Run(each, task, CUDA) for each in settings])


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        *((name, {}) for name in ("Anon", "AdamW", "SGDM", "Adam", "AMSGrad", "Lion", "AdaBelief")),
        ("Anon (variant)", {"rows": True, "clips": "plain", "guard": {"brake": False}}),
        ("Anon (variant)", {"rise": True}),
        ("Anon (variant)", {"drift": 2.0}),
    ],
)
def test_graph_equals_eager(optimizer, hyper):
    """Across refreshes and the schedule of lr, for optimizers inside of the graph and outside."""
    settings = replace(SETTINGS, optimizer=optimizer, lr=1e-3, hyper=hyper)
    (eager,) = trained(settings)
    (graphed,) = trained(replace(settings, graph=True))
    assert graphed["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert graphed["evaluation"] == pytest.approx(eager["evaluation"], rel=1e-5)


def test_company_changes_nothing():
    wanted = [
        replace(SETTINGS, graph=True, seed=1),
        replace(SETTINGS, graph=True, seed=2, hyper={"gamma": 0.5}),
        replace(SETTINGS, graph=True, optimizer="AdamW", hyper={}),
        replace(SETTINGS, graph=True, optimizer="SGDM", lr=0.1, hyper={}),
        replace(SETTINGS, graph=True, optimizer="Lion", lr=1e-3, hyper={}),
    ]
    for settings, result in zip(wanted, trained(*wanted), strict=True):
        (alone,) = trained(settings)
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert result["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)


def test_average_of_weights_outside_of_the_graph():
    settings = replace(SETTINGS, recipe=replace(RECIPE, ema=0.9))
    (eager,) = trained(settings)
    (graphed,) = trained(replace(settings, graph=True))
    assert graphed["evaluation"] == pytest.approx(eager["evaluation"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_averaging_weights_does_not_wait_for_the_device():
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).to(CUDA)
    average = MovingAverage(net, 0.9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            average.update_parameters(net)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["Anon", "AdamW", "SGDM"])
def test_resumed_graph_follows_the_schedule(optimizer, tmp_path):
    """The learning rate is read from the device; a resumed run must look in the same place."""
    settings = replace(SETTINGS, optimizer=optimizer, lr=1e-3, hyper={}, graph=True)
    (whole,) = trained(settings)
    task, folder = tasks.load("digits"), RunFolder(tmp_path)
    folder.open({})

    class Enough(Exception):
        pass

    def stop(run, record):
        if record["step"] > 30:
            raise Enough

    with pytest.raises(Enough):
        drive([Run(settings, task, CUDA)], [folder], Every(log=1, checkpoint=20), stop)
    (parts,) = drive([Run(settings, task, CUDA)], [folder])
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
