"""`anon figure`: what each figure writes and prints, and that its numbers are what they say."""

import json
import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.table import Table
from typer.testing import CliRunner, Result

from anon_lab import cli, figures
from anon_lab.figures import _drawing, beale, directions, extremes, landscape
from anon_lab.problems import BEALE, PROBLEMS
from anon_lab.trajectories import Contender
from anon_lab.trajectories import Path as Course


def anon(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


drawn: dict[str, Figure] = {}
"""What `quick` drew, by name."""


@cache
def quick(name: str) -> tuple[Result, Path]:
    """One run of each figure serves all tests."""
    out = Path(mkdtemp()) / "made" / "here"
    module = figures.load(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "draw", lambda data, draw=module.draw: drawn.setdefault(name, draw(data)))
        return anon("figure", name, "--quick", "--out", out), out


def numbers(name: str) -> dict[str, Any]:
    return json.loads((quick(name)[1] / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", figures.NAMES)
def test_every_figure_writes_and_prints_itself(name: str) -> None:
    result, out = quick(name)
    assert result.exit_code == 0, result.output
    files = [f"{name}.json", f"{name}.pdf", f"{name}.png"]
    assert sorted(path.name for path in out.iterdir()) == files
    assert sorted(result.stdout.splitlines()[-3:]) == [str(out / file) for file in files]
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
    assert "━━━" in result.stdout, "a table"
    record = numbers(name)
    assert record["figure"] == name
    assert record["quick"] is True
    assert record["data"]
    assert len(record["remarks"]) >= 2, "the warning of --quick, and a remark of its own"
    assert record["remarks"][0] == figures.TOO_SHORT
    assert "--quick" in [text.get_text() for text in drawn[name].texts], "the picture says so, too"
    assert record["versions"]["torch"] == torch.__version__
    printed = "".join(result.stdout.split())
    assert all("".join(remark.split()) in printed for remark in record["remarks"])


@pytest.mark.parametrize("name", figures.NAMES)
def test_every_figure_offers_the_same_functions(name: str) -> None:
    module = figures.load(name)
    assert all(callable(getattr(module, function)) for function in ("compute", "draw", "table", "remarks"))
    assert module.__doc__


@pytest.mark.parametrize("name", figures.NAMES)
def test_tables_fit_80_columns(name: str) -> None:
    table = quick(name)[0].stdout.split("•")[0]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("name", figures.NAMES)
def test_words_stay_inside_the_picture(name: str) -> None:
    quick(name)
    figure = drawn[name]
    FigureCanvasAgg(figure).draw()
    assert figure.get_suptitle()
    for text in (part for owner in (figure, *figure.axes) for part in owner.get_children() if isinstance(part, Text)):
        box = text.get_window_extent()
        assert not text.get_text() or 0 <= box.x0 <= box.x1 <= figure.bbox.width, text.get_text()


def test_unknown_name_lists_the_names(tmp_path: Path) -> None:
    result = anon("figure", "beal", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == f"anon: there is no figure 'beal'; there are {', '.join(figures.NAMES)}, and all\n"
    assert not (tmp_path / "out").exists()


def test_all_means_all() -> None:
    assert figures.chosen("all") == list(figures.NAMES)
    assert figures.chosen("noise") == ["noise"]


def test_refuses_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = anon("figure", "directions", "--quick", "--out", tmp_path / "taken")
    assert result.exit_code == 2
    assert result.stderr == f"anon: --out must be a folder, but {tmp_path / 'taken'} is a file\n"


def test_same_numbers_same_files(tmp_path: Path) -> None:
    assert anon("figure", "directions", "--quick", "--out", tmp_path).exit_code == 0
    for suffix in ("png", "pdf"):
        file = f"directions.{suffix}"
        assert (tmp_path / file).read_bytes() == (quick("directions")[1] / file).read_bytes()


# beale


def test_beale_holds_every_path_and_rate() -> None:
    data = numbers("beale")["data"]
    assert [run["name"] for run in data["runs"]] == ["Anon"] * 6 + ["SGDM", "Adam", "AdaBelief"]
    assert {run["gamma"] for run in data["runs"]} >= {1.5, 0.5, -0.5, None}
    for run, scan in zip(data["runs"], data["scans"], strict=True):
        path = run["path"]
        assert run["label"] == scan["label"]
        assert len(path["steps"]) == len(path["x"]) == len(path["y"]) == len(path["loss"])
        assert (path["x"][0], path["y"][0]) == BEALE.start
        assert run["loss_at"] == [path["loss"][path["steps"].index(t)] for t in data["marks"]]
        first = math.dist((path["x"][1], path["y"][1]), BEALE.start)
        momentum_sum = 10 if run["name"] == "SGDM" else 1
        assert first * momentum_sum == pytest.approx(beale.FIRST_STEP, rel=1e-9)
        assert (run["guarded_loss"] is None) == (run["gamma"] is None)
        assert len(scan["rates"]) == len(scan["reached"])
        assert max(scan["reached"]) <= data["starts"]


def test_beale_turns_towards_x_as_gamma_falls() -> None:
    angles = {run["label"]: run["angle"] for run in numbers("beale")["data"]["runs"]}
    ours = [angles[label] for label in ("γ = −1", "γ = −0.5", "γ = 0", "γ = 0.5", "γ = 1", "γ = 1.5")]
    assert ours == sorted(ours)
    assert angles["SGDM"] < angles["γ = 0.5"] < angles["Adam"]


def test_beale_angle_is_taken_one_away_from_the_start() -> None:
    path = Course([0, 1, 2, 3], [0.0, 0.1, 0.6, 9.0], [0.0, 0.9, 0.8, 0.0], [0.0] * 4)
    assert beale._angle(path) == pytest.approx(math.degrees(math.atan2(0.8, 0.6)))
    assert math.isnan(beale._angle(Course([0, 1], [0.0, 0.1], [0.0, 0.1], [0.0] * 2)))


def test_beale_scan_counts_starts() -> None:
    # From (4, 0), one of the three by three starts, it is downhill all the way; a rate of 1e-9 goes nowhere.
    scan = beale._scan(Contender("Anon", -0.5), 3, [1e-9, 10.0], 600)
    assert scan.reached[0] == 0
    assert 1 <= scan.reached[1] <= 9


# landscape and directions


def slopes_at_start() -> tuple[float, float]:
    """|g_x| and |g_y| of ln(1 + Beale)/10 at (-1.8, 0), by hand."""
    residuals = [c + 1.8 for c in (1.5, 2.25, 2.625)]
    chain = 1 / (1 + sum(r**2 for r in residuals)) / 10
    return 2 * sum(residuals) * chain, 2 * residuals[0] * 1.8 * chain


def test_landscape_of_the_first_step_is_the_gradient_to_the_power_gamma() -> None:
    gx, gy = slopes_at_start()
    panels = [panel for panel in numbers("landscape")["data"]["panels"] if panel["step"] == 1]
    assert [panel["gamma"] for panel in panels] == list(landscape.GAMMAS)
    for panel in panels:
        assert panel["psi"] == pytest.approx([gx ** panel["gamma"], gy ** panel["gamma"]], rel=1e-9)
        ratio = panel["stretch"][0] / panel["stretch"][1]
        assert ratio == pytest.approx((gx / gy) ** (panel["gamma"] / 2), rel=1e-9)
        assert math.prod(panel["stretch"]) == pytest.approx(1.0), "areas stay"


def test_landscape_tells_the_course() -> None:
    assert landscape.course([3.0, 2.0, 1.0]) == "shrinks"
    assert landscape.course([1.0, 2.0, 3.0]) == "grows"
    assert landscape.course([1.0, 3.0, 2.0]) == "goes both ways"


def test_directions_follow_the_formula() -> None:
    gx, gy = slopes_at_start()
    data = numbers("directions")["data"]
    printed = [arrow for arrow in data["arrows"] if arrow["gamma"] is not None and not arrow["guarded"]]
    assert len(printed) == len(data["formula"])
    for arrow, angle in zip(printed, data["formula"], strict=True):
        slope = (gy / gx) ** (1 - arrow["gamma"])
        assert abs(arrow["dy"] / arrow["dx"]) == pytest.approx(slope, rel=1e-9)
        assert angle == pytest.approx(math.degrees(math.atan(slope)), rel=1e-9)
        assert min(arrow["dx"], arrow["dy"]) > 0, "down the slope, whose gradient is negative in both"
    assert 0 < data["worst_slope_error"] < 1e-9


def test_directions_of_sgdm_and_adam_are_those_of_gamma_0_and_1() -> None:
    for name, gamma in (("SGDM", 0.0), ("Adam", 1.0)):
        theirs, ours = directions.first_step(Contender(name)), directions.first_step(Contender("Anon", gamma))
        assert theirs.angle == pytest.approx(ours.angle, abs=1e-4)


# rosenbrock and rastrigin


@pytest.mark.parametrize("name", ["rosenbrock", "rastrigin"])
def test_searches_are_the_same_for_everyone(name: str) -> None:
    data = numbers(name)["data"]
    shown = {search["label"] for search in data["short"]}
    assert shown >= {"γ = −0.5", "γ = 0", "γ = 0.5", "γ = 1", "γ = 1.5"}, "the paper's"
    assert shown >= {"SGD", "SGDM", "Adam", "RAdam", "Yogi", "AdaHessian", "AdaBound", "AdaBelief"}
    assert [search["label"] for search in data["long"]] == [search["label"] for search in data["short"]]
    assert all(search["guarded"] for search in data["guarded"])
    for search in (*data["short"], *data["long"], *data["guarded"]):
        assert search["rates"] == data["rates"]
        assert len(search["loss"]) == len(search["distance"]) == len(data["rates"])
        finite = [loss for loss in search["loss"] if loss is not None]
        assert search["loss"][search["best"]] == min(finite) == search["path"]["loss"][-1]
        assert (search["path"]["x"][0], search["path"]["y"][0]) == PROBLEMS[name].start
    for searches, steps in zip((data["short"], data["long"]), data["steps"], strict=True):
        assert all(search["path"]["steps"][-1] == steps for search in searches)


def test_guards_change_nothing_at_gamma_0() -> None:
    data = numbers("rosenbrock")["data"]
    printed, guarded = (
        next(search for search in data[which] if search["gamma"] == 0) for which in ("short", "guarded")
    )
    assert guarded["loss"][guarded["best"]] == pytest.approx(printed["loss"][printed["best"]], rel=1e-9)


# surfaces and extremes


def test_surfaces_show_both_functions() -> None:
    data = numbers("surfaces")["data"]
    assert [view["name"] for view in data["views"]] == ["rastrigin", "rosenbrock"]
    assert all(len(search["path"]["x"]) == data["steps"] + 1 for search in data["searches"])


def test_extremes_go_from_minus_4_to_4() -> None:
    data = numbers("extremes")["data"]
    assert (data["gammas"][0], data["gammas"][-1]) == (-4.0, 4.0)
    for sweep in data["sweeps"]:
        assert [search["gamma"] for search in sweep["searches"]] == data["gammas"]
        assert all(search["rates"] == data["rates"] for search in sweep["searches"])
        assert len(sweep["float32_loss"]) == len(sweep["paths"]) == len(data["gammas"])
        for path in sweep["paths"]:
            moved = (path["x"][1], path["y"][1])
            assert math.dist(moved, PROBLEMS[sweep["problem"]].start) == pytest.approx(extremes.FIRST_STEP, rel=1e-6)


# What the pictures share


def test_numbers_are_written_for_people() -> None:
    assert _drawing.number(-0.00012) == "−0.00012"
    assert _drawing.number(3.2e-5) == "3.2e−5"
    assert _drawing.number(1e12) == "1e+12"
    assert _drawing.number(math.inf) == "diverged"
    assert _drawing.number(math.nan) == "–"
    assert [_drawing.listed(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "none",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_what_is_drawn_is_what_is_saved() -> None:
    module = figures.load("beale")
    data = module.compute(True, lambda text, share: None)
    assert isinstance(module.table(data), Table)
    drawn = {line.get_label(): line for line in module.draw(data).axes[0].lines}
    for run in data.runs:
        x, y = np.asarray(drawn[run.label].get_xydata()).T.tolist()
        assert (x, y) == (run.path.x, run.path.y)
