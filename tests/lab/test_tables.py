"""The paper's tables: its numbers as printed, every table end to end, and what is said of the results."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_cifar import write_cifar
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from anon_lab import launch, optimizers, run, tables, tasks
from anon_lab.cli import app
from anon_lab.models import inception
from anon_lab.tables import _printed_similarity, _training, _words, diffusion, gpt2, sensitivity, similarity
from anon_lab.tables._spec import Outcome, Row, Trial
from anon_lab.tasks import Metric, Recipe

CPU = torch.device("cpu")
ACCURACY = Metric("accuracy", "%", higher_is_better=True)
LOSS = Metric("loss", "nats", higher_is_better=False)


@pytest.fixture(autouse=True)
def nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANON_DATA", raising=False)
    monkeypatch.setenv("ANON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


# What the paper prints, typed from its source a second time.


def printed(name: str, size: str = "full") -> dict[str, tuple[float, ...]]:
    return {row.name: row.printed for row in tables.load(name).rows(size) if row.printed}


def test_printed_ablation() -> None:
    lines = {
        2: "91.76 91.98 92.42 92.43 92.16",
        3: "92.26 92.23 92.28 92.34 92.38",
        4: "91.97 92.44 92.25 92.12 92.31",
    }
    want = {
        f"growth {growth}, β3 {beta3}": (float(value),)
        for growth, line in lines.items()
        for beta3, value in zip(("0.1", "0.3", "0.5", "0.7", "0.9"), line.split(), strict=True)
    }
    for size in ("full", "small", "tiny"):
        assert printed("ablation", size) == want
    for row in tables.load("ablation").rows("full"):
        growth, beta3 = re.findall(r"[\d.]+", row.name)[0], row.name.split()[-1]
        assert (row.hyper["growth"], row.hyper["beta3"]) == (float(growth), float(beta3))


def test_printed_accuracies_on_imagenet() -> None:
    assert printed("resnet18") == {
        "Anon γ −0.1": (70.06,),
        "SGDM": (69.94,),
        "AMSGradW": (68.78,),
        "AdaBelief": (69.42,),
        "AdaBound": (68.13,),
        "MSVAG": (68.23,),
        "RAdam": (67.62,),
        "Yogi": (66.54,),
        "Adam": (65.99,),
    }
    assert printed("resnet50") == {
        "Anon γ −0.1": (77.25,),
        "SGDM": (76.23,),
        "Lookaround": (76.77,),
        "Adam": (72.87,),
        "Adai": (76.80,),
        "SWA": (76.78,),
        "Lookahead": (76.52,),
        "HVAdam": (77.22,),
    }


def test_printed_losses_and_hours_of_gpt2() -> None:
    assert printed("gpt2") == {
        "Anon γ 1": (2.937,),
        "Anon γ 1.1": (2.93283, 2.927),  # the main table's and the appendix's
        "Anon γ 1.15": (2.932,),
        "AdamW": (2.95614, 2.934),
        "Sophia-G": (2.95143,),
        "Lion": (2.992,),
        "Muon": (3.092,),
        "medium: Anon γ 1": (2.69017,),
        "medium: AdamW": (2.70994,),
        "medium: Sophia-G": (2.70653,),
    }
    assert list(gpt2.HOURS.values()) == [26.17554, 26.88118, 28.98702, 36.91487, 36.83633, 41.02486]


def test_printed_fid_and_its_grid() -> None:
    assert printed("diffusion") == {
        "Adam": (9.11,),
        "AMSGrad": (8.12,),
        "SGDM": (12.84,),
        "AdaBound": (12.13,),
        "Anon γ 1": (8.03,),
        "Anon γ 1.01": (7.75,),
    }
    lrs = {row.name: row.lrs for row in diffusion.rows("full")}
    assert all(lrs[name] == (0.1, 0.01, 0.001, 0.0001, 0.00001) for name in (*printed("diffusion"), "Anon γ 1.1"))
    assert (lrs["Anon γ 1.02"], lrs["Anon γ 1.15"]) == ((0.0001,), (0.00001,))


def test_printed_cosines() -> None:
    """Above the diagonal as in the paper's rows, below it only what differs."""
    everything, weights = _printed_similarity.ALL, _printed_similarity.WEIGHTS
    upper = {
        (0, 1): (0.597, 0.317),
        (0, 2): (0.355, 0.201),
        (0, 3): (0.914, 0.511),
        (0, 4): (0.857, 0.161),
        (0, 5): (0.901, 0.194),
        (1, 2): (0.425, 0.328),
        (1, 3): (0.573, 0.248),
        (1, 4): (0.522, 0.088),
        (1, 5): (0.539, 0.098),
        (2, 3): (0.335, 0.156),
        (2, 4): (0.299, 0.056),
        (2, 5): (0.306, 0.063),
        (3, 4): (0.880, 0.191),
        (3, 5): (0.923, 0.222),
        (4, 5): (0.925, 0.132),
    }
    lower = {(0, 2): 0.335, (2, 3): 0.355}
    names = _printed_similarity.NAMES
    for (i, j), (both, matrices) in upper.items():
        assert everything[names[i]][j] == both
        assert everything[names[j]][i] == lower.get((i, j), both)
        assert weights[names[i]][j] == weights[names[j]][i] == matrices
    assert _printed_similarity.both(everything, "Anon γ 1.15", "AdamW") == "0.335 / 0.355"
    assert _printed_similarity.both(everything, "AdamW", "Lion") == "0.88"
    assert _printed_similarity.both(everything, "AdamW", "Anon γ 0") == ""


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
@pytest.mark.parametrize("name", tables.NAMES)
def test_every_row_can_be_trained(name: str, size: str) -> None:
    """Its optimizer takes its settings and its learning rates, and its recipe is one."""
    table = tables.load(name)
    rows = list(table.rows(size))
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        for lr in row.lrs:
            optimizers.make(row.optimizer, nn.Linear(2, 2).named_parameters(), lr, **row.hyper)
        recipe = Recipe(batch_size=1, epochs=1).changed(**{**table.sizes[size].recipe, **row.recipe})
        assert (recipe.steps is None) != (recipe.epochs is None)


# Data in the formats of the tasks.


def write_folder(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (root / split / name).mkdir(parents=True)
            for i in range(4):
                image = Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8))
                image.save(root / split / name / f"{i}.png")
    return root


class Means(nn.Module):
    """Stands where Inception does, with three features: the mean of each colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path | None]:
    """A place of data for each table."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "train.txt").write_text("".join(f"Number {n} is followed by {n + 1}.\n" for n in range(300)))
    folder = write_folder(tmp_path / "images")
    monkeypatch.setenv("ANON_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "inception").mkdir(parents=True)
    (tmp_path / "data" / "inception" / "none.npz").write_bytes(b"")
    monkeypatch.setattr(inception, "load", lambda path: Means())
    monkeypatch.setattr(run, "STATISTICS_BATCHES", 2)  # of BatchNorm, for SWA and its like
    return {
        "ablation": None,
        "sensitivity": None,
        "resnet18": folder,
        "resnet50": folder,
        "gpt2": text,
        "diffusion": write_cifar(tmp_path / "cifar", monkeypatch),
        "similarity": None,
    }


def anon_table(name: str, out: Path, data: Path | None, *more: str) -> str:
    place = ["--data", str(data)] if data else []
    result = CliRunner().invoke(app, ["table", name, "--size", "tiny", "--out", str(out), *place, *more])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", tables.NAMES)
def test_from_end_to_end(name: str, data: dict[str, Path | None], tmp_path: Path) -> None:
    table, out = tables.load(name), tmp_path / "out"
    rows = list(table.rows("tiny"))
    seeds = ["--seeds", "2"] if name == "similarity" else ["--seeds", "1"]
    first = anon_table(name, out, data[name], *seeds)
    runs = sum(len(row.lrs) for row in rows) * int(seeds[1])
    assert f"{runs} of {runs} runs are left to train" in first

    record = json.loads((out / f"{name}-tiny.json").read_text())
    assert (record["table"], record["size"]) == (name, "tiny")
    assert [row["name"] for row in record["rows"]] == [row.name for row in rows]
    for row, wanted in zip(record["rows"], rows, strict=True):
        assert tuple(row["paper"]) == wanted.printed
        assert [trial["lr"] for trial in row["trials"]] == list(wanted.lrs)
        assert all(len(trial["values"]) + trial["diverged"] == int(seeds[1]) for trial in row["trials"])
    for remark in record["remarks"]:
        assert " ".join(remark.split()) in " ".join(first.split())

    page = (out / f"{name}-tiny.html").read_text()
    assert all(row.name in page for row in rows if name != "ablation")
    assert page.count('class="plot"') == len(table.heats(outcome_of(record)) if name != "similarity" else range(3))
    assert ("standard deviation" in page) == (seeds[1] == "2")
    assert (out / f"{name}-tiny.png").exists() == ('class="plot"' in page)
    if (out / f"{name}-tiny.png").exists():
        with Image.open(out / f"{name}-tiny.png") as picture:
            assert min(picture.size) > 300

    results = sorted((out / "runs").rglob("result.json"))
    assert len(results) == runs
    before = [path.stat().st_mtime_ns for path in results]
    again = anon_table(name, out, data[name], *seeds)
    assert f"0 of {runs} runs are left to train" in again
    assert [path.stat().st_mtime_ns for path in results] == before
    same = json.loads((out / f"{name}-tiny.json").read_text())
    assert (same["rows"], same["more"], same["remarks"]) == (record["rows"], record["more"], record["remarks"])


def test_every_size_has_files_of_its_own() -> None:
    """Those in results/tables, NAME.json, are of size small."""
    assert [tables.stem("gpt2", size) for size in ("tiny", "small", "full")] == ["gpt2-tiny", "gpt2", "gpt2-full"]


def outcome_of(record: dict) -> Outcome:
    rows = list(tables.load(record["table"]).rows("tiny"))
    trials = [
        Trial(row, trial["lr"], [], [{"diverged": False}] * len(trial["values"]), trial["values"])
        for row, kept in zip(rows, record["rows"], strict=True)
        for trial in kept["trials"]
    ]
    return Outcome(record["size"], Metric(**record["metric"]), rows, trials)


def test_fid_is_of_the_saved_networks_and_kept(data: dict[str, Path | None], tmp_path: Path) -> None:
    order = _training.Order("tiny", tmp_path / "out", data["diffusion"])
    table = replace(diffusion.TABLE, rows=lambda size: diffusion.rows(size)[5:6])
    place, quiet = launch.Place(CPU), Console(quiet=True)
    trained, task = _training.train(table, order, place, quiet)
    (trial,) = diffusion.measure(trained, task, place, quiet).trials

    (folder,) = trial.folders
    assert folder == tmp_path / "out" / "runs" / "diffusion-tiny" / "Anon-gamma-1.01" / "seed-0"
    kept = json.loads((folder / "fid.json").read_text())
    assert kept == {"count": 8, "steps": 2, "sampler": "ddim", "value": trial.values[0]}
    net = task.model()
    net.load_state_dict(load_file(folder / "weights.safetensors"))
    assert task.fid(net, CPU, 8, 2, "ddim") == pytest.approx(kept["value"], rel=1e-6)  # pyright: ignore

    (folder / "fid.json").write_text(json.dumps({**kept, "value": 1.0}))
    (again,) = diffusion.measure(trained, task, place, quiet).trials
    assert again.values == [1.0]
    (folder / "fid.json").write_text(json.dumps({**kept, "steps": 1, "value": 1.0}))  # measured in another way
    (again,) = diffusion.measure(trained, task, place, quiet).trials
    assert again.values == pytest.approx(trial.values)


def test_missing_weights_of_inception_are_said_before_training(
    data: dict[str, Path | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANON_DATA", str(tmp_path / "nowhere"))
    place = str(data["diffusion"])
    result = CliRunner().invoke(app, ["table", "diffusion", "--size", "tiny", "--out", "out", "--data", place])
    assert result.exit_code == 2
    assert "FID needs the weights" in result.output
    assert not Path("out").exists()


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        result = CliRunner().invoke(app, ["table", *words])
        assert result.exit_code == 2
        return result.output

    assert "there is no table 'nine'; there are ablation, sensitivity, resnet18" in refused("nine")
    assert "--graph needs a GPU" in refused("ablation", "--size", "tiny", "--device", "cpu", "--graph")
    assert "no image folder was found" in refused("resnet18", "--size", "tiny")


def test_another_number_of_seeds_adds_runs_and_other_settings_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    anon_table("ablation", out, None, "--seeds", "1")
    assert "15 of 30 runs are left" in anon_table("ablation", out, None, "--seeds", "2", "--together", "15")
    result = CliRunner().invoke(app, ["table", "ablation", "--size", "tiny", "--out", str(out), "--bf16"])
    assert result.exit_code == 2
    assert "holds another run, in which precision is fp32, not bf16" in result.output


# What is said of results.

ROWS = [
    Row("ours", lrs=(1.0, 2.0), printed=(90.0,)),
    Row("other", lrs=(1.0,), printed=(89.0,)),
    Row("torn", lrs=(1.0,), printed=(89.5, 91.0)),
    Row("printed only", printed=(95.0,)),
    Row("lost", lrs=(1.0,), printed=(80.0,)),
]


def outcome(metric: Metric = ACCURACY, **values: list[float]) -> Outcome:
    def trial(row: Row, lr: float, found: list[float], lost: int = 0) -> Trial:
        return Trial(row, lr, [], [{"diverged": False}] * len(found) + [{"diverged": True}] * lost, found)

    ours, other, torn, _, lost = ROWS
    trials = [
        trial(ours, 1.0, values.get("worse", [10.0, 10.1, 10.2])),
        trial(ours, 2.0, values.get("ours", [90.0, 90.2, 90.1])),
        trial(other, 1.0, values.get("other", [90.1, 90.0, 90.3])),
        trial(torn, 1.0, values.get("torn", [80.0, 80.0, 80.0])),
        trial(lost, 1.0, [], 3),
    ]
    return Outcome("tiny", metric, ROWS, trials)


def test_best_of_the_learning_rates() -> None:
    best = outcome().best("ours")
    assert best is not None
    assert best.lr == 2.0
    worst = outcome(LOSS).best("ours")
    assert worst is not None
    assert worst.lr == 1.0
    assert outcome().best("lost") is None
    assert outcome().best("printed only") is None


@pytest.mark.parametrize(
    ("other", "values", "end"),
    [
        ("other", {}, "is ahead of other (89); here the two tie: 90.10 ± 0.10 against 90.13 ± 0.15."),
        ("other", {"other": [80.0, 80.1, 80.2]}, "here it is too: 90.10 ± 0.10 against 80.10 ± 0.10."),
        ("other", {"other": [95.0, 95.1, 95.2]}, "here it is behind it: 90.10 ± 0.10 against 95.10 ± 0.10."),
        ("other", {"other": [80.0]}, "here 90.10 ± 0.10 against 80.00, from one seed, which cannot tell them apart."),
        ("torn", {}, "is in one place ahead of, in another behind, torn (89.5 / 91); here it is ahead of it:"),
        ("printed only", {}, "is behind printed only (95); here printed only was not trained at this size."),
        ("lost", {}, "is ahead of lost (80); here lost diverged."),
    ],
)
def test_a_claim_is_judged(other: str, values: dict[str, list[float]], end: str) -> None:
    said = _words.judged(outcome(**values), "ours", other)
    assert said.startswith("In the paper ours (90) is ")
    assert end in said


def test_headline_and_lines() -> None:
    assert _words.headline(outcome()) == "other ends best, at 90.13 ± 0.15 %; ours ties with it"
    assert _words.headline(outcome(torn=[99.0, 99.1])).endswith("at 99.05 ± 0.071 %; all others are behind")
    lines = {line[0]: list(line[1:]) for line in _words.as_list("", outcome()).lines}
    assert lines[""] == ["lr", "accuracy %", "paper", "best is"]
    assert lines["ours"] == ["2", "90.10 ± 0.10", "90", "tie"]
    assert lines["other"] == ["1", "90.13 ± 0.15", "89", ""]
    assert lines["torn"] == ["1", "80.00 ± 0.0", "89.5 / 91", "better"]
    assert lines["printed only"] == ["", "–", "95", ""]
    assert lines["lost"] == ["1", "diverged", "80", ""]
    assert _words.over_seeds("accuracy", outcome()) == "accuracy, mean ± standard deviation of 3 seeds"
    (sheet,) = _words.by_lr("", outcome())
    assert sheet.lines == [["", "lr 2", "lr 1"], ["ours", "90.10 ± 0.10", "10.10 ± 0.10"]]


def test_time_is_told_only_of_runs_alone() -> None:
    rows = gpt2.rows("tiny")
    seconds = {"AdamW": 2.0, "Anon γ 1.1": 1.5}
    trials = [
        Trial(row, row.lrs[0], [], [{"diverged": False, "seconds_a_step": seconds.get(row.name, 3.0)}], [3.0])
        for row in rows
        if row.lrs
    ]
    alone = Outcome("tiny", LOSS, rows, trials)
    assert any("takes 0.974 of AdamW's time; here 0.750" in remark for remark in gpt2.remarks(alone))
    assert gpt2.sheets(alone)[0].lines[2][-2:] == ["1.5e+03 ms, 0.750", "26.18 h, 0.974"]
    assert any("none can be timed" in remark for remark in gpt2.remarks(replace(alone, together=2)))


def test_sensitivity_counts_settings_near_the_best() -> None:
    rows = sensitivity.rows("tiny")
    values = {"γ −0.1": [70.0, 88.5, 90.0, 89.0, 10.0], sensitivity.SGDM: [80.0, 89.0, 90.0, 88.9, 10.0]}
    trials = [
        Trial(row, lr, [], [{"diverged": False}], [values.get(row.name, [50.0] * 5)[place]])
        for row in rows
        for place, lr in enumerate(row.lrs)
    ]
    found = Outcome("tiny", ACCURACY, rows, trials)
    assert sensitivity.headline(found) == "2 of 25 settings of lr and γ end within 1 point of the best"
    assert sensitivity.remarks(found)[1] == "The broadest range, 2 of 5, is that of γ −0.1: no broader than SGDM's."


def test_cosines_ensembles_and_norms_of_known_networks() -> None:
    """Answers that are right with three quarters and one quarter average to one half."""
    task = tasks.load("digits")
    labels = torch.cat([labels for _, labels in task.batches("test", CPU)])  # pyright: ignore
    right = nn.functional.one_hot(labels, 10).float()
    wrong = right.roll(1, 1)
    assert similarity.quality(task, right, CPU) == 100
    assert similarity.quality(task, (0.7 * right + 0.3 * wrong + 0.2 * right + 0.8 * wrong) / 2, CPU) == 0
    assert similarity.quality(task, (0.7 * right + 0.3 * wrong + 0.4 * right + 0.6 * wrong) / 2, CPU) == 100
    assert similarity._cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
    a, b = (torch.tensor(p) for p in ([0.5, 0.25], [0.25, 0.75]))
    gpt = object()  # whatever is not a classification has the right token's probability as its answer
    assert similarity.quality(gpt, (a + b) / 2, CPU) == pytest.approx(-np.log([0.375, 0.5]).mean())  # pyright: ignore


def test_language_models_are_measured_as_they_are_evaluated(data: dict[str, Path | None], tmp_path: Path) -> None:
    """On gpt, as at full size: the answers give the loss that evaluation gives, and the sharpness is a number."""
    order = _training.Order("tiny", tmp_path / "out", data["gpt2"])
    table = replace(gpt2.TABLE, rows=lambda size: gpt2.rows(size)[:1])
    found, task = _training.train(table, order, launch.Place(CPU), Console(quiet=True))
    (trial,) = found.trials
    ended = similarity._ended(task, trial.folders[0], CPU)
    assert similarity.quality(task, ended.answers, CPU) == pytest.approx(trial.values[0], rel=1e-5)
    net = _training.network(task, trial.folders[0], CPU)
    assert len(ended.everything) == sum(p.numel() for p in net.parameters())
    assert len(ended.everything) - len(ended.weights) == 5 * 32  # the gains of five norms
    assert 0 < similarity.sharpness(task, net, CPU, examples=2) < 1e3
