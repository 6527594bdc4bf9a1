"""The Fréchet inception distance: its formula on known normals, its network's particulars, and its weights' file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.nn import functional as F

from anon_lab import fid
from anon_lab.fid import Running, Statistics
from anon_lab.models import inception
from anon_lab.models.inception import Inception
from anon_lab.tasks import DataMissing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in float16, with statistics that batch norm has to use."""
    torch.manual_seed(0)
    state = {k: v for k, v in Inception().state_dict().items() if not k.endswith("num_batches_tracked")}
    arrays = {
        name: (tensor + torch.rand_like(tensor) if "running" in name else tensor).half().numpy()
        for name, tensor in state.items()
    }
    path = tmp_path_factory.mktemp("weights") / "inception.npz"
    np.savez(path, **arrays)
    return path


def normal(mean: list[float], covariance: np.ndarray) -> Statistics:
    return Statistics(1000, np.array(mean), covariance)


def rotation(angle: float) -> np.ndarray:
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def test_distance_of_normals_on_the_same_axes() -> None:
    """|m1 - m2|^2 + sum (s1 - s2)^2, with s the standard deviations."""
    turn = rotation(0.4)
    a = normal([1.0, -2.0], turn @ np.diag([4.0, 9.0]) @ turn.T)
    b = normal([0.5, 1.0], turn @ np.diag([1.0, 0.25]) @ turn.T)
    want = 0.5**2 + 3**2 + (2 - 1) ** 2 + (3 - 0.5) ** 2
    assert fid.distance(a, b) == pytest.approx(want, rel=1e-12)
    assert fid.distance(b, a) == pytest.approx(want, rel=1e-12)


def test_distance_of_two_by_two_covariances() -> None:
    """tr (S1 S2)^(1/2) = sqrt(tr(S1 S2) + 2 sqrt(det(S1 S2))) for 2 x 2 matrices."""
    s1 = rotation(0.3) @ np.diag([2.0, 0.5]) @ rotation(0.3).T
    s2 = rotation(1.2) @ np.diag([3.0, 0.1]) @ rotation(1.2).T
    root = math.sqrt(np.trace(s1 @ s2) + 2 * math.sqrt(np.linalg.det(s1 @ s2)))
    want = np.trace(s1) + np.trace(s2) - 2 * root
    assert fid.distance(normal([0, 0], s1), normal([0, 0], s2)) == pytest.approx(want, rel=1e-10)


def test_distance_where_covariances_are_singular() -> None:
    """Fewer images than features: a line against a line at an angle a has tr (S1 S2)^(1/2) = |cos a|."""
    line = np.diag([1.0, 0.0])
    turned = rotation(0.7) @ line @ rotation(0.7).T
    want = 2 - 2 * math.cos(0.7)
    assert fid.distance(normal([0, 0], line), normal([0, 0], turned)) == pytest.approx(want, abs=1e-7)
    x = np.random.default_rng(0).normal(size=(20, 50))
    few = normal([0.0] * 50, np.cov(x.T))
    assert fid.distance(few, few) == pytest.approx(0, abs=1e-5)


def test_distance_of_a_set_to_itself_and_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    running = [Running(), Running()]
    for each, (mean, std) in zip(running, [(0.0, 1.0), (3.0, 2.0)], strict=True):
        each.add(mean + std * torch.randn(200_000, 4, generator=generator))
    a, b = (each.result() for each in running)
    assert fid.distance(a, a) == pytest.approx(0, abs=1e-10)
    assert fid.distance(a, b) == pytest.approx(4 * (3**2 + (2 - 1) ** 2), rel=0.01)


def test_running_statistics_are_those_of_all_features_at_once() -> None:
    x = np.random.default_rng(0).normal(size=(100, 5)) * [1, 2, 3, 4, 5] + 1e4  # far from 0
    running = Running()
    for part in np.split(x, [1, 4, 50]):
        running.add(torch.from_numpy(part))
    got = running.result()
    assert got.count == 100
    np.testing.assert_allclose(got.mean, x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(got.covariance, np.cov(x.T), rtol=1e-9, atol=1e-9)
    one = Running()
    one.add(torch.ones(1, 3))
    with pytest.raises(ValueError, match="at least 2 images, but there are 1"):
        one.result()


def test_pools_do_not_count_their_padding() -> None:
    x = torch.ones(1, 1, 4, 4)
    torch.testing.assert_close(inception.average(x), x)
    x[0, 0, 0, 0] = 5
    assert inception.average(x)[0, 0, 0, 0].item() == 2  # of four pixels, not nine


def test_the_last_block_takes_the_maximum_where_the_one_before_averages() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 5, 5)
    pools = {False: inception.average, True: lambda x: F.max_pool2d(x, 3, 1, 1)}
    for maximum, pool in pools.items():
        block = inception.E(8, maximum).eval()
        torch.testing.assert_close(block(x)[:, -192:], block.branch_pool(pool(x)))
    net = Inception()
    assert (net.Mixed_7b.maximum, net.Mixed_7c.maximum) == (False, True)
    assert all(m.eps == 1e-3 for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d))


def test_features(weights: Path) -> None:
    net = inception.load(weights)
    assert not any(p.requires_grad for p in net.parameters())
    gray = torch.full((1, 3, 8, 8), 128, dtype=torch.uint8)
    seen = []
    net.Conv2d_1a_3x3.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):  # which it has to ignore
        features = net(gray)
    assert features.shape == (1, 2048)
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    assert seen[0].shape == (1, 3, 299, 299)
    assert seen[0].abs().max() < 1e-6  # (128 - 128) / 128, up to the interpolation's rounding


def test_weights_arrive_from_either_format(weights: Path, tmp_path: Path) -> None:
    with np.load(weights) as saved:
        arrays = dict(saved)
    save_file(arrays | {"fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "inception.safetensors")
    for path in (weights, tmp_path / "inception.safetensors"):
        state = inception.load(path).state_dict()
        for name, array in arrays.items():
            assert torch.equal(state[name], torch.from_numpy(array).float()), name


def test_other_files_are_refused(weights: Path, tmp_path: Path) -> None:
    with np.load(weights) as saved:
        arrays = dict(saved)

    def refused(changed: dict, complaint: str) -> None:
        path = tmp_path / "changed.npz"
        np.savez(path, **changed)
        with pytest.raises(DataMissing, match=complaint):
            inception.load(path)

    name = "Mixed_5b.branch1x1.conv.weight"
    refused({k: v for k, v in arrays.items() if k != name}, f"lacks {name}")
    refused(arrays | {"Mixed_9z.weight": np.zeros(1)}, "has the unknown Mixed_9z.weight")
    refused(arrays | {name: np.zeros((64, 192, 3, 3))}, r"must be floats of shape \(64, 192, 1, 1\)")
    refused(arrays | {name: np.zeros((64, 192, 1, 1), int)}, "must be floats")
    refused({name: np.array([{}], dtype=object)}, "allow_pickle")  # nothing is unpickled
    (tmp_path / "cut.npz").write_bytes(weights.read_bytes()[:1000])
    for path, complaint in ((tmp_path / "cut.npz", "damaged"), (tmp_path / "no.npz", "is not there")):
        with pytest.raises(DataMissing, match=complaint):
            inception.load(path)
    with pytest.raises(DataMissing, match=r"\.npz or \.safetensors"):
        inception.load(tmp_path / "weights.pth")


def test_weights_are_found(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANON_DATA", str(tmp_path))
    with pytest.raises(DataMissing, match="there are 0: convert"):
        fid.find_weights()
    (tmp_path / "inception").mkdir()
    found = tmp_path / "inception" / "any.npz"
    found.write_bytes(b"")
    assert fid.find_weights() == found
    assert fid.find_weights(weights) == weights


class Means(torch.nn.Module):
    """Stands where Inception does, with three features: the mean of each colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3))


def test_statistics_and_their_cache(weights: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(256, (600, 3, 4, 4), dtype=torch.uint8)
    monkeypatch.setattr(inception, "load", lambda path: Means())
    got = fid.reference(pixels, weights, CPU)
    x = pixels.double().mean((2, 3)).numpy()
    assert got.count == 600
    np.testing.assert_allclose(got.mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(got.covariance, np.cov(x.T), rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(inception, "load", lambda path: pytest.fail("made again"))
    again = fid.reference(pixels, weights, CPU)
    assert np.array_equal(again.covariance, got.covariance)
    assert len(list((cache / "fid").iterdir())) == 1
    with pytest.raises(pytest.fail.Exception, match="made again"):
        fid.reference(pixels.flip(1), weights, CPU)


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fid", "--data", str(tmp_path), "--weights", str(tmp_path / "no.npz")])
    with pytest.raises(SystemExit, match="fid: CIFAR-10 was not found"):
        fid.main()
