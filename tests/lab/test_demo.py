"""`anon demo`: what it writes, that it is fair, and how it refuses."""

import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from plotly.offline import get_plotlyjs
from rich.console import Console
from sklearn.datasets import load_digits
from typer.testing import CliRunner, Result

from anon_lab import cli, demo, page
from anon_lab.tasks import digits

FILES = ["demo.html", "demo.json", "demo.svg"]


def anon(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    return anon("demo", "--quick", "--out", out), out


@pytest.fixture(scope="module")
def numbers(quick: tuple[Result, Path]) -> dict:
    return json.loads((quick[1] / "demo.json").read_text(encoding="utf-8"))


def outcome(name: str, gamma: float | None, test: list[float], validation: float = 0.9) -> demo.Outcome:
    return demo.Outcome(name, gamma, [0.1, 1.0], [[validation], [0.1]], 0.1, test, [[2.0, 1.0]] * len(test))


def results(*outcomes: demo.Outcome) -> demo.Results:
    return demo.Results(replace(demo.FULL, rates=(0.1, 1.0), seeds=3), list(outcomes), 1.0)


def test_writes_three_files_and_prints_the_page_last(quick: tuple[Result, Path]) -> None:
    result, out = quick
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert result.stdout.splitlines()[-1] == str(out / "demo.html")
    assert result.stdout.count("Anon") >= len(demo.GAMMAS)


def test_json_holds_the_whole_comparison(numbers: dict) -> None:
    assert [entry["gamma"] for entry in numbers["outcomes"]] == [None, None, *demo.GAMMAS]
    assert [entry["name"] for entry in numbers["outcomes"][:2]] == ["SGDM", "AdamW"]
    assert numbers["versions"]["torch"] == torch.__version__
    assert numbers["images"] == {"train": 800, "validation": 497, "test": 500}
    for entry in numbers["outcomes"]:
        assert len(entry["rates"]) == len(entry["tuning"]) == len(demo.QUICK.rates)
        assert all(len(seeds) == demo.QUICK.tuning_seeds for seeds in entry["tuning"])
        assert len(entry["test"]) == len(entry["loss"]) == demo.QUICK.seeds
        assert all(len(losses) == demo.QUICK.epochs + 1 for losses in entry["loss"])
        assert entry["lr"] == max(zip(entry["rates"], entry["tuning"], strict=True), key=lambda pair: mean(pair[1]))[0]
        assert entry["validation"] == max(map(mean, entry["tuning"]))
        assert entry["test_mean"] == pytest.approx(mean(entry["test"]), rel=1e-12)
        assert entry["test_sd"] == pytest.approx(stdev(entry["test"]), rel=1e-12)
        assert entry["loss"][0][-1] < entry["loss"][0][0], "training lowers the loss"


def test_every_optimizer_starts_from_the_same_networks(numbers: dict) -> None:
    starts = [[losses[0] for losses in entry["loss"]] for entry in numbers["outcomes"]]
    assert all(start == starts[0] for start in starts)
    assert len(set(starts[0])) == demo.QUICK.seeds


def test_headline_is_the_one_of_the_numbers(quick: tuple[Result, Path], numbers: dict) -> None:
    best = max(numbers["outcomes"][2:], key=lambda entry: entry["validation"])
    assert numbers["chosen"] == best["name"]
    assert numbers["finding"].startswith(f"{best['name']} reaches {100 * best['test_mean']:.1f} %")
    heading = re.search("<h1>(.*)</h1>", (quick[1] / "demo.html").read_text(encoding="utf-8"))
    assert heading
    assert heading[1].replace("\N{NO-BREAK SPACE}", " ") == numbers["finding"]


def test_quick_headline_says_that_it_is_too_short(numbers: dict, quick: tuple[Result, Path]) -> None:
    assert numbers["finding"].endswith("; 3 epochs are too few to judge by")
    assert "3 epochs are too few to judge by" in " ".join(quick[0].stdout.split())


def test_page_needs_no_network(quick: tuple[Result, Path]) -> None:
    text = (quick[1] / "demo.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script.*?>", text[: text.index("/**")] + text[text.rindex("<script>") :])
    assert scripts == ["<script>", "<script>"]
    # plotly's own script mentions addresses of maps and licences, none of which these plots load
    own = text.replace(get_plotlyjs(), "")
    assert len(own) < 100_000
    assert not re.search(r"https?:|<link|<img|<iframe|@import|url\(|\bsrc\s*=", own)


def test_page_carries_both_looks_of_both_plots(quick: tuple[Result, Path], numbers: dict) -> None:
    text = (quick[1] / "demo.html").read_text(encoding="utf-8")
    found = re.search(r"const figures = (.*);\n", text)
    assert found
    figures = json.loads(found[1].replace("<\\/", "</"))
    assert {name: sorted(looks) for name, looks in figures.items()} == {
        "accuracy": ["dark", "light"],
        "loss": ["dark", "light"],
    }
    for look in ("light", "dark"):
        curves = {trace["name"]: trace["y"] for trace in figures["loss"][look]["data"]}
        for entry in numbers["outcomes"]:
            assert curves[entry["name"]] == [mean(epoch) for epoch in zip(*entry["loss"], strict=True)]
    colours = {json.dumps(figures["loss"][look]["data"][2]["line"]) for look in ("light", "dark")}
    assert len(colours) == 2


def test_same_seeds_same_numbers(quick: tuple[Result, Path], numbers: dict, tmp_path: Path) -> None:
    assert anon("demo", "--quick", "--out", tmp_path).exit_code == 0
    again = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert again | {"wall_s": 0} == numbers | {"wall_s": 0}
    assert (tmp_path / "demo.svg").read_bytes() == (quick[1] / "demo.svg").read_bytes()


def test_seeds_option_adds_seeds() -> None:
    tiny = replace(demo.QUICK, epochs=1, rates=(1.0,), seeds=4)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    run = demo.run(tiny, Console(quiet=True))
    assert all(len(entry.test) == 4 for entry in run.outcomes)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"


@pytest.mark.parametrize("seeds", [-1, 0, 2])
def test_refuses_too_few_seeds(seeds: int, tmp_path: Path) -> None:
    result = anon("demo", "--quick", "--seeds", seeds, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == f"anon: --seeds must be at least 3, but is {seeds}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_refuses_a_file_as_folder(below: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = anon("demo", "--quick", "--out", taken / below)
    assert result.exit_code == 2
    assert result.stderr == f"anon: --out must be a folder, but {taken} is a file\n"
    assert taken.read_text() == "mine"


def test_failed_write_leaves_the_old_page_and_no_rest(tmp_path: Path) -> None:
    shown = results(
        outcome("SGDM", None, [0.9, 0.8, 0.7]), outcome("AdamW", None, [0.9, 0.8, 0.7]), outcome("Anon", 1.0, [0.9] * 3)
    )
    (tmp_path / "demo.html").mkdir()  # nothing can be renamed onto a folder
    with pytest.raises(OSError, match=r"demo\.html"):
        page.save(shown, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_interrupt_ends_with_one_line(tmp_path: Path) -> None:
    # A shell's background job ignores SIGINT and hands that on; the code undoes it.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from anon_lab.cli import app; app()"
    )
    command = [sys.executable, "-c", code, "demo", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        assert "networks" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "anon: interrupted\n"
        assert process.wait(timeout=30) == 130
    assert not (tmp_path / "out").exists()


def test_version_and_help() -> None:
    from anon_optim import __version__

    assert anon("--version").stdout == f"anon-optim {__version__}\n"
    assert "demo" in anon("--help").stdout
    assert anon("demo", "--help").exit_code == 0
    assert anon("demo", "-h").stdout == anon("demo", "--help").stdout


def test_finding_says_who_wins() -> None:
    ours = outcome("Anon γ = 1", 1.0, [0.90, 0.92, 0.94])
    above = outcome("SGDM", None, [0.95, 0.97, 0.99])
    near = outcome("AdamW", None, [0.92, 0.90, 0.95])
    worse = outcome("Anon γ = 0", 0.0, [1.0, 1.0, 1.0], validation=0.8)
    assert demo.compare(ours, above) == "behind"
    assert demo.compare(above, ours) == "ahead of"
    assert demo.compare(ours, near) == "level with"
    assert demo.compare(ours, ours) == "level with"
    assert demo.finding(results(above, near, ours, worse)) == (
        "Anon γ = 1 reaches 92.0 % on unseen digits, behind SGDM (97.0 %) and level with AdamW (92.3 %), seed by seed"
    )
    assert demo.finding(results(near, replace(near, name="SGDM"), ours)) == (
        "Anon γ = 1 reaches 92.0 % on unseen digits, level with AdamW (92.3 %) and SGDM (92.3 %), seed by seed"
    )


def test_diverged_run_is_null_in_json_and_last_in_the_sentence() -> None:
    fine, lost = outcome("SGDM", None, [0.9, 0.8, 0.7]), outcome("Anon γ = 1", 1.0, [0.1, 0.1, 0.1])
    lost = replace(lost, loss=[[2.0, math.nan], [2.0, math.inf], [2.0, 1.0]])
    shown = results(fine, replace(fine, name="AdamW"), lost)
    record = demo.record(shown)
    assert record["outcomes"][2]["final_loss"] is None
    assert record["outcomes"][2]["loss"] == [[2.0, None], [2.0, None], [2.0, 1.0]]
    assert "Anon γ = 1 with the highest" in record["loss_finding"]
    assert "NaN" not in page.html(shown).replace(get_plotlyjs(), "")


def test_digits_are_cut_into_parts_without_loss_or_overlap() -> None:
    parts = digits.data()
    pixels, targets = load_digits(return_X_y=True)
    whole = sorted(zip((pixels / 16).tolist(), targets.tolist(), strict=True))
    cut = [
        (row, digit) for part in parts for row, digit in zip(part.pixels.tolist(), part.digits.tolist(), strict=True)
    ]
    assert sorted(cut) == whole
    assert all(part.digits.unique().tolist() == list(range(10)) for part in parts)


def test_digits_loss_and_accuracy() -> None:
    net, images = digits.model(), digits.data().test
    assert [tuple(p.shape) for p in net.parameters()] == [(64, 64), (64,), (32, 64), (32,), (10, 32), (10,)]
    for p in net.parameters():
        torch.nn.init.zeros_(p)
    assert digits.loss(net, images).item() == pytest.approx(math.log(10), rel=1e-6)
    net[-1].bias.data[3] = 1.0
    assert digits.accuracy(net, images) == pytest.approx((images.digits == 3).sum().item() / 500, rel=1e-6)
