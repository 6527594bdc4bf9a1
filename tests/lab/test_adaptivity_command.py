"""`anon adaptivity`: what it measures, writes and refuses."""

import csv
import inspect
import json
import math
import re
from pathlib import Path

import pytest
import pytorch_optimizer
import torch
from matplotlib.text import Text
from rich.console import Console
from torch.optim import SGD, Optimizer
from typer.testing import CliRunner, Result

from anon_lab import adaptivity, adaptivity_page, cli
from anon_lab.adaptivity import Candidate, Results, Row
from anon_lab.figures import spectrum

FILES = ["adaptivity.csv", "adaptivity.html", "adaptivity.png"]
NAMES = "adam,SGD,lion,MADGRAD,lars,LBFGS"


def anon(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("adaptivity") / "made" / "here"
    return anon("adaptivity", "--quick", "--optimizers", NAMES, "--gammas=-1,0.5,1", "--out", out), out


@pytest.fixture(scope="module")
def rows(quick: tuple[Result, Path]) -> list[dict[str, str]]:
    with (quick[1] / "adaptivity.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_writes_three_files_and_prints_the_page_last(quick: tuple[Result, Path]) -> None:
    result, out = quick
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert result.stdout.splitlines()[-1] == str(out / "adaptivity.html")
    assert "2 could not be measured" in result.stdout
    assert (out / "adaptivity.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_are_those_of_theory(rows: list[dict[str, str]]) -> None:
    # A and the exponent between coordinates: MADGRAD divides by a cube root, LARS normalises by tensor
    known = {"Adam": (1, 1), "SGD": (0, 0), "Lion": (1, 1), "MADGRAD": (2 / 3, 2 / 3), "LARS": (1, None)}
    for name, (a, between) in known.items():
        found = [row for row in rows if row["name"] == name]
        assert found
        for row in found:
            assert float(row["A"]) == pytest.approx(a, abs=1e-3)
            if between is not None:
                assert float(row["relative"]) == pytest.approx(between, abs=1e-3)
    for row in rows:
        if row["gamma"]:
            gamma = float(row["gamma"])
            assert float(row["A"]) == pytest.approx(1 if "lr_scale" in row["name"] else gamma, abs=1e-3)
        if row["name"] == "Anon.paper":
            assert float(row["relative"]) == pytest.approx(float(row["gamma"]), abs=1e-3)


def test_what_cannot_be_measured_is_listed_with_the_reason(rows: list[dict[str, str]]) -> None:
    refused = [row for row in rows if row["A"] == ""]
    assert [row["name"] for row in refused] == ["LBFGS", "LBFGS"]
    assert all("closure" in row["reason"] for row in refused)


def test_page_says_what_was_found(quick: tuple[Result, Path]) -> None:
    text = (quick[1] / "adaptivity.html").read_text(encoding="utf-8")
    heading = re.search("<h1>(.*)</h1>", text)
    assert heading
    assert "Anon lies where γ says, from −1 to 1" in heading[1]
    found = re.search(r"const figures = (.*);\n", text)
    assert found
    looks = json.loads(found[1].replace("<\\/", "</"))["places"]
    assert sorted(looks) == ["dark", "light"]
    hovers = json.dumps(looks["light"]["data"])
    assert "MADGRAD" in hovers


def test_every_installed_optimizer_is_a_candidate() -> None:
    found = adaptivity.candidates()
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, Optimizer)]
    assert {kind.__name__ for kind in kinds} - {"Optimizer"} == {each.name for each in found if each.source == "torch"}
    packaged = [each for each in found if each.source == "pytorch_optimizer"]
    assert len(packaged) == len(pytorch_optimizer.get_supported_optimizers()) > 100
    assert [each.gamma for each in found if each.name == "Anon"] == list(adaptivity.GAMMAS)


@pytest.mark.slow
def test_more_than_a_hundred_are_measured() -> None:
    results = adaptivity.run(adaptivity.candidates(), adaptivity.QUICK_STEPS, Console(quiet=True))
    assert len(results.measured) > 100
    assert all(row.reason for row in results.refused)
    assert all(abs(a - gamma) < 1e-3 for name in ("Anon", "Anon.paper") for gamma, a, _ in results.anons(name))


def test_methods_that_need_the_hessian_say_so() -> None:
    (sophia,) = [each for each in adaptivity.candidates() if each.name == "Sophia-G"]
    assert adaptivity.measure(sophia, 5).reason.startswith("Sophia-G also needs estimates of the Hessian")


def test_prints_and_warnings_of_optimizers_are_kept_from_the_terminal(capsys: pytest.CaptureFixture) -> None:
    class Chatty(SGD):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            print("hello")
            import warnings

            warnings.warn("careful", stacklevel=1)
            super().step()

    row = adaptivity.measure(Candidate("Chatty", "here", Chatty), 5)
    assert row.A is not None
    assert abs(row.A) < 1e-9
    assert capsys.readouterr() == ("", "")


def test_float32_is_tried_where_float64_fails() -> None:
    class Narrow(SGD):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            if self.param_groups[0]["params"][0].dtype is torch.float64:
                raise RuntimeError("no doubles here")
            super().step()

    row = adaptivity.measure(Candidate("Narrow", "here", Narrow), 5)
    assert row.dtype == "float32"
    assert row.A is not None
    assert math.isclose(row.A, 0, abs_tol=1e-2)


def test_finding_is_counted() -> None:
    def shown(*values: float, anon: float = 0.5) -> str:
        rows = [Row("x", "here", None, A=a) for a in values] + [Row("Anon", "anon_optim", 0.5, A=anon)]
        return adaptivity.finding(Results([*rows, Row("y", "here", None, reason="no")], 5, 1.0))

    assert shown(0.0, 1.0, 1.04, 0.5, -0.02) == (
        "2 of 5 implementations lie at A = 1, 2 at A = 0 and 1 elsewhere; Anon lies where γ says, from 0.5 to 0.5"
    )
    assert shown(0.0, anon=0.8).endswith("Anon misses γ, from 0.5 to 0.5, by up to 0.3")


def test_optimizers_at_one_place_share_a_dot() -> None:
    rows = [Row(name, "here", None, A=1.0, relative=1.001) for name in ("a", "b")]
    results = Results([*rows, Row("c", "here", None, A=9.0, relative=0.0)], 5, 1.0)
    assert adaptivity_page.places(results) == {(1.0, 1.0): ["a", "b"], (9.0, 0.0): ["c"]}
    assert "c (9.00, 0.00)" in adaptivity_page.html_page(results), "what the picture leaves out is said"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--optimizers", "adamm"), "anon: no optimizer is called 'adamm'; near it: "),
        (("--gammas", "one"), "anon: --gammas must be numbers with commas between them, but is 'one'\n"),
    ],
)
def test_refuses_with_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    result = anon("adaptivity", *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert not (tmp_path / "out").exists()


def test_failed_write_leaves_no_rest(tmp_path: Path) -> None:
    (tmp_path / "adaptivity.html").mkdir()  # nothing can be renamed onto a folder
    results = adaptivity.run([Candidate("SGD", "torch", SGD)], 5, Console(quiet=True))
    with pytest.raises(OSError, match=r"adaptivity\.html"):
        adaptivity_page.save(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_spectrum_draws_what_was_measured() -> None:
    data = spectrum.compute(True, lambda text, share: None)
    at = {point.name: point.A for point in data.points}
    assert at["SGDM"] == pytest.approx(0, abs=1e-6)
    assert at["AdamW"] == pytest.approx(1, abs=1e-3)
    assert at["Padam"] == pytest.approx(0.5, abs=1e-3)
    assert [point.gamma for point in data.anon] == list(adaptivity.GAMMAS)
    assert {"Sophia-G", "Sophia-H", "AdaHessian"} == set(data.refused)
    words = {text.get_text() for text in spectrum.draw(data).findobj(Text) if isinstance(text, Text)}
    assert any("AdaBound" in word for word in words)
    assert any("largest difference" in remark for remark in spectrum.remarks(data))
    assert spectrum.table(data).row_count == len(data.points) + len(data.anon)
