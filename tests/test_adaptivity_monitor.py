"""`AdaptivityMonitor` during trainings of a small network on the digits."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pytorch_optimizer import LaProp
from pytorch_optimizer import Muon as PackagedMuon
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon, Optimizer

from anon_lab.tasks import digits
from anon_optim import AdaptivityMonitor, Anon, Guard


def network(seed: int = 0) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return digits.model()


def train(net: torch.nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    images = digits.data().train
    for step in range(first, first + steps):
        part = torch.arange(step * 50, (step + 1) * 50) % len(images.digits)
        optimizer.zero_grad()
        digits.loss(net, digits.Images(images.pixels[part], images.digits[part])).backward()
        optimizer.step()


def reads(monitor: AdaptivityMonitor, a: float) -> bool:
    reading = monitor.read()
    return reading.A is not None and abs(reading.A - a) < 1e-3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("make", "a"),
    [
        *((lambda p, gamma=gamma: Anon(p, 0.01**gamma, gamma), gamma) for gamma in (-0.5, 0.5, 1.0, 1.5)),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 0.0),
        (lambda p: Adam(p, lr=0.01), 1.0),
        (lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True), 1.0),
        (lambda p: LaProp(p, lr=0.01), 1.0),  # keeps its step in the param group
    ],
    ids=["Anon -0.5", "Anon 0.5", "Anon 1", "Anon 1.5", "SGDM", "Adam", "AdamW", "LaProp"],
)
def test_reads_the_adaptivity_of_a_training(make: Callable, a: float) -> None:
    net = network()
    optimizer = make(net.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with AdaptivityMonitor(optimizer, every=5) as monitor:
        for step in range(30):
            train(net, optimizer, 1, step)
            schedule.step()
    assert monitor.latest is not None
    assert monitor.latest.step == 30
    assert reads(monitor, a)
    assert list(monitor.latest.parameters.values()) == pytest.approx([a] * 6, abs=1e-3)


def test_follows_changes_and_not_only_of_lr() -> None:
    net = network()
    optimizer = Anon(net.parameters(), lr=0.01, gamma=1.0)
    with AdaptivityMonitor(optimizer) as monitor:
        train(net, optimizer, 4)
        assert reads(monitor, 1.0)
        optimizer.param_groups[0]["gamma"] = 0.5
        train(net, optimizer, 3, first=4)
        assert reads(monitor, 1.0), "gamma waits for the refresh at step 8"
        train(net, optimizer, 1, first=7)
        assert reads(monitor, 0.5)
        optimizer.param_groups[0]["lr"] = 0.0
        train(net, optimizer, 1, first=8)
        assert monitor.read().A is None, "without an update there is no adaptivity"


def test_training_is_not_disturbed() -> None:
    nets, optimizers = (network(), network()), []
    state = torch.get_rng_state()
    for net, watched in zip(nets, (False, True), strict=True):
        optimizer = Anon(net.parameters(), lr=0.01)
        optimizers.append(optimizer)
        if watched:
            with AdaptivityMonitor(optimizer, every=1):
                train(net, optimizer, 10)
        else:
            train(net, optimizer, 10)
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    alone, watched = (optimizer.state_dict() for optimizer in optimizers)
    assert alone["param_groups"] == watched["param_groups"]
    assert [state.keys() for state in alone["state"].values()] == [s.keys() for s in watched["state"].values()]


def test_sample_is_small_and_keeps_the_dimensions() -> None:
    shapes = [(1000, 1000), (3, 1000), (5,), (), (64, 3, 3, 3), (0, 4)]
    optimizer = SGD([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes], lr=0.1)
    with AdaptivityMonitor(optimizer, coordinates=64) as monitor:
        sampled = [tuple(places.shape) for places in monitor.state_dict()["places"]]
    assert sampled == [(8, 8), (3, 21), (5,), (), (3, 2, 3, 3), (0, 4)]


def test_sample_is_a_block() -> None:
    p = torch.nn.Parameter(torch.zeros(20, 30))
    optimizer = SGD([p], lr=1.0)
    with AdaptivityMonitor(optimizer, coordinates=12) as monitor:
        (places,) = monitor.state_dict()["places"]
        rows, columns = places // 30, places % 30
        assert (rows == rows[:, :1]).all()
        assert (columns == columns[:1]).all()
        assert len(places.unique()) == places.numel() == 12
        assert len(rows.unique()) == 3


def test_cost_does_not_grow_with_the_model() -> None:
    p = torch.nn.Parameter(torch.zeros(1500, 1500))
    p.grad = torch.randn(1500, 1500)

    def seconds(watched: bool) -> float:
        optimizer = AdamW([p])
        monitor = AdaptivityMonitor(optimizer) if watched else None
        best = float("inf")
        for _ in range(15):
            start = time.perf_counter()
            optimizer.step()
            best = min(best, time.perf_counter() - start)
        if monitor is not None:
            monitor.close()
        return best

    assert seconds(watched=True) < 1.5 * seconds(watched=False)


def test_writes_whole_lines_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "adaptivity.jsonl"
    net = network()
    for _ in range(2):
        optimizer = Adam(net.named_parameters(), lr=0.01)
        with AdaptivityMonitor(optimizer, every=4, path=path):
            train(net, optimizer, 9)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 4, 8]
    assert all(line["A"] == pytest.approx(1.0, abs=1e-3) for line in lines)
    assert list(lines[0]["parameters"]) == [name for name, _ in net.named_parameters()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_writes_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    net = network()
    optimizer = Anon(net.named_parameters(), lr=0.1, gamma=0.5)
    with AdaptivityMonitor(optimizer, every=2, log_dir=tmp_path):
        train(net, optimizer, 6)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("adaptivity/all")] == [2, 4, 6]
    assert [e.value for e in events.Scalars("adaptivity/0.weight")] == pytest.approx([0.5] * 3, abs=1e-3)


def test_closed_monitor_leaves_no_hook() -> None:
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    monitor = AdaptivityMonitor(optimizer, every=1)
    train(net, optimizer, 1)
    monitor.close()
    train(net, optimizer, 3)
    assert monitor.latest is not None
    assert monitor.latest.step == 1
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    def started() -> tuple[torch.nn.Module, Anon, AdaptivityMonitor]:
        net = network()
        # a large eps, so that A depends on the history
        optimizer = Anon(net.parameters(), lr=0.1, gamma=1.0, eps=1e-4, guard=Guard(floor=0.0))
        return net, optimizer, AdaptivityMonitor(optimizer, seed=1)

    net, optimizer, monitor = started()
    train(net, optimizer, 10)
    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "monitor": monitor.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    train(net, optimizer, 2, first=10)

    again, resumed, meter = started()
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again.load_state_dict(loaded["net"])
    resumed.load_state_dict(loaded["optimizer"])
    meter.load_state_dict(loaded["monitor"])
    train(again, resumed, 2, first=10)
    assert meter.read() == monitor.read()
    assert monitor.read().A not in (None, pytest.approx(1.0, abs=0.1)), "eps shows"

    other = AdaptivityMonitor(SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(ValueError, match="its sample has other shapes"):
        other.load_state_dict(loaded["monitor"])


def test_new_groups_missing_gradients_and_overflow() -> None:
    first, second, frozen = (torch.nn.Parameter(torch.zeros(8)) for _ in range(3))
    optimizer = Anon([first, frozen], lr=0.1, gamma=0.5)
    with AdaptivityMonitor(optimizer) as monitor:
        first.grad = torch.randn(8)
        optimizer.step()
        optimizer.add_param_group({"params": [second], "gamma": -0.5})
        second.grad = torch.randn(8)
        first.grad[0] = float("inf")
        optimizer.step()
        assert monitor.read().parameters["0.0"] == pytest.approx(0.5, abs=1e-3)
        assert monitor.read().parameters["0.1"] is None
        assert monitor.read().parameters["1.0"] == pytest.approx(-0.5, abs=1e-3)


def test_matrix_methods_and_their_own_makers() -> None:
    p = torch.nn.Parameter(torch.zeros(30, 20))
    optimizer = Muon([p], lr=0.1)
    with AdaptivityMonitor(optimizer, factor=2.0) as monitor:
        p.grad = torch.randn(30, 20)
        optimizer.step()
        assert reads(monitor, 1.0)

    optimizer = PackagedMuon([{"params": [p], "use_muon": True}])
    with AdaptivityMonitor(
        optimizer, factor=2.0, make_optimizer=lambda params: PackagedMuon([{"params": params, "use_muon": True}])
    ) as monitor:
        optimizer.step()
        assert reads(monitor, 1.0)


class Stubborn(SGD):
    """Its constructor wants to know more than the param groups say."""

    def __init__(self, params: list, secret: str) -> None:
        super().__init__(params, lr=0.1)


def test_refuses_what_it_cannot_watch() -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="Invalid every: 0"):
        AdaptivityMonitor(Adam(params), every=0)
    with pytest.raises(ValueError, match="Invalid coordinates: 0"):
        AdaptivityMonitor(Adam(params), coordinates=0)
    with pytest.raises(TypeError, match=r"Stubborn cannot be made from param groups alone .*pass make_optimizer"):
        AdaptivityMonitor(Stubborn(params, "hush"))
    with pytest.raises(ValueError, match="LBFGS cannot be replayed"):
        AdaptivityMonitor(LBFGS(params))
    two = Adam([{"params": params}, {"params": [torch.nn.Parameter(torch.zeros(1))]}])
    with pytest.raises(ValueError, match="as many param groups as the optimizer has, 2, not 1"):
        AdaptivityMonitor(two, make_optimizer=Adam)
    with pytest.raises(RuntimeError, match="has made no step"):
        AdaptivityMonitor(Adam(params)).read()
