"""`anon bench` at a size of seconds: the figures are there, consistent, and written whole."""

import json
from pathlib import Path

import pytest
import torch

from anon_lab import bench
from anon_lab.workloads import WORKLOADS, Workload
from anon_optim import Anon, Storage, state_bytes


@pytest.fixture
def tiny(monkeypatch):
    workload = Workload("tiny", lambda: [(32, 8), (8,), (300,)])
    monkeypatch.setitem(WORKLOADS, "tiny", workload)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *_: 1e10)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where other tests run beside
    yield workload
    torch.set_num_threads(threads)


def test_reports_every_path_and_writes_json(tiny, tmp_path, capsys):
    bench.main(["tiny", "--device", "cpu", "--repeats", "15", "--long-run", "20", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in report["rows"]["tiny"]}
    assert {"AdamW fused", "AdamW foreach", "AdamW single", "Anon fused, with s", "Anon single, with s"} <= set(rows)
    assert all(name in printed for name in rows)
    assert all(row["time"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert rows["AdamW single"]["ratio"] > rows["AdamW fused"]["ratio"]
    assert set(report["long_run"]["tiny"]) == {"parts", "paper's equation", "measured, 20 steps"}
    assert set(report["clipping"]["tiny"]) == {"with s", "without s"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.png"]


@pytest.mark.parametrize("arguments", [["nothing"], ["--repeats", "1"], ["--long-run", "-1"]])
def test_bad_input_is_one_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main([*arguments, "--device", "cpu"])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--device", "cuda"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--device is cuda, but torch finds no CUDA device")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_unwritable_folder_is_refused_before_any_work(capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(["--device", "cpu", "--out", "/proc/x"])
    assert exit_.value.code == 2
    sentence = "--out must be a folder that can be written to, but /proc cannot"
    assert capsys.readouterr().err.splitlines()[-1].endswith(sentence)


def test_shares_of_a_run_are_those_of_the_schedule():
    share = bench.shares(1000)
    assert share["refresh"] == 10 / 1000  # 1, 2, 4, ..., 512
    assert share["without s"] == pytest.approx(0)  # the window is longer than any interval so far
    assert sum(share.values()) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "path", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=["single", "foreach", "fused"]
)
def test_state_bytes_per_parameter(dtype, path):
    """12 with everything, 8 once s is released, 2 less with v in bfloat16; beside, six numbers of four bytes and two of
    eight a tensor, and what a released s leaves."""
    elements = 10_000
    beside = 6 * 4 + 2 * 8 + 4

    def after(steps, **options):
        p = torch.nn.Parameter(torch.ones(elements, dtype=dtype))
        optimizer = Anon([p], **path, **options)
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return state_bytes(optimizer)

    narrow = Storage(preconditioner=torch.bfloat16)
    for expected, steps, options in (
        (12, 3, {}),
        (10, 3, {"storage": narrow}),
        (12, 3, {"total_steps": 5}),
        (8, 4, {"total_steps": 5}),
        (6, 4, {"total_steps": 5, "storage": narrow}),
    ):
        assert expected * elements <= after(steps, **options) <= expected * elements + beside
