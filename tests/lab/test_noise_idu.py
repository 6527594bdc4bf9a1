"""The figures `noise` and `idu`: what they compute, say and draw."""

import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from anon_lab import demo, files, online
from anon_lab.figures import idu, noise
from anon_lab.problems import online_noise
from anon_lab.trajectories import Path, Search
from anon_optim import Anon

SMALL = idu.Plan(2000, 20, (0.01, 0.1), demo.Plan(epochs=1, rates=(0.1, 1.0), tuning_seeds=1, seeds=3))


def silent(text: str, share: float) -> None:
    assert text
    assert 0 <= share <= 1


def printed(table: Any) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


@pytest.fixture(scope="module")
def quick() -> noise.Data:
    return noise.compute(True, silent)


def run_with(t: list[int], x: list[float], regret: list[float], settled: int | None = None) -> online.Run:
    return online.Run(t, x, regret, settled)


def made_up(regret: dict[str, list[float]], x: dict[str, float], settled: dict[str, int | None]) -> noise.Data:
    """Runs recorded at 101, 202, 303 and 1000, the same for both betas and starts."""
    times = [101, 202, 303, 1000]
    curves = [
        noise.Curve(m, betas, x0, run_with(times, [0, 0, 0, x[m]], regret.get(m, [1.0] * 4), settled.get(m)))
        for betas in noise.BETAS
        for m in noise.METHODS
        for x0 in (0.0, 1.0)
    ]
    sweeps = [noise.Sweep(m, betas, [x[m]] * 5) for betas in noise.BETAS for m in noise.METHODS]
    return noise.Data(1000, list(noise.STRENGTHS), curves, sweeps)


ENDS = {"Adam": 1.0, "AMSGrad": -0.2, noise.PRINTED: -1.0, noise.GUARDED: -0.3}


def test_noise_holds_every_run(quick: noise.Data) -> None:
    assert len(quick.curves) == len(noise.BETAS) * len(noise.METHODS) * 2
    for method in noise.METHODS:
        for betas in noise.BETAS:
            assert quick.curve(method, betas).x == quick.sweep(method, betas).x[quick.strengths.index(1.0)]
            assert quick.curve(method, betas, 1.0).run.x[0] > quick.curve(method, betas).run.x[0]
    json.dumps(asdict(quick), allow_nan=False)


def test_noise_records_whole_cycles_and_decades() -> None:
    times = noise.recorded(10**5)
    assert times == sorted(set(times))
    assert {100, 1000, 10_000, 100_000} <= set(times)
    assert all(t % 101 == 0 or math.log10(t).is_integer() for t in times if t > 101)


def test_regret_is_compared_at_whole_cycles() -> None:
    data = made_up({noise.PRINTED: [2.0, 0.5, 0.5, 9.0]}, ENDS, {})
    betas = noise.BETAS[0]
    assert noise.lower_from(data, betas) == 202
    assert noise.share_lower(data, betas, last=1000) == pytest.approx(2 / 3)
    assert noise.share_lower(data, betas, last=202) == pytest.approx(1 / 2)
    above_at_the_end = made_up({noise.PRINTED: [0.5, 0.5, 2.0, 0.1]}, ENDS, {})
    assert noise.lower_from(above_at_the_end, betas) is None


def test_noise_remarks_follow_the_numbers() -> None:
    first = " ".join(noise.remarks(made_up({}, ENDS, {noise.PRINTED: 300})))
    assert "Adam diverges. Holds" in first
    assert "Anon reaches −1 before AMSGrad. Holds" in first
    assert "because of the noise. Does not hold" in first
    assert "more slowly than the printed" in first
    second = " ".join(noise.remarks(made_up({}, {**ENDS, "Adam": -1.0}, {"AMSGrad": 200, noise.PRINTED: 300})))
    assert "Adam diverges. Does not hold" in second
    assert "Anon reaches −1 before AMSGrad. Does not hold" in second
    third = " ".join(noise.remarks(made_up({}, {**ENDS, noise.PRINTED: -0.2}, {})))
    assert "Anon reaches −1 before AMSGrad. Not decided" in third
    assert "because of the noise. Not decided" in third


def test_the_headline_names_who_is_nearest() -> None:
    data = made_up({}, {**ENDS, noise.PRINTED: -0.9}, {})
    title = noise.draw(data).get_suptitle()
    assert title == f"Adam ends on the wrong side; after 1,000 steps {noise.PRINTED} is nearest to the best x = −1"
    data.curve("Adam", noise.BETAS[1]).run.x[-1] = -1.0
    title = noise.draw(data).get_suptitle()
    assert title == f"After 1,000 steps {noise.PRINTED} (β₁ = 0.5) and Adam (β₁ = 0.9) are nearest to the best x = −1"


def test_the_noise_s_sum_is_a_geometric_series(quick: noise.Data) -> None:
    total = 500 / (1 + math.exp(-1))
    assert f"whose sum is {total:.1f}" in " ".join(noise.remarks(quick))
    assert sum(online_noise(t, 2.0) for t in range(1, 60)) == pytest.approx(2 * total)


def test_noise_is_drawn_and_printed(quick: noise.Data) -> None:
    figure = noise.draw(quick)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 6
    lines = [line.split() for line in printed(noise.table(quick)).splitlines()]
    assert ["step", "100", "1,000", "10⁴", "10⁵"] in lines
    adam = [line for line in lines if line[:1] == ["Adam"] and len(line) == 5]
    assert len(adam) == 6, "x from two starts and regret, at two betas"
    # the paper's own observation at this length: Adam on its way to +1, with betas (0.9, 0.99)
    assert [adam[3][-1], adam[5][-1]] == ["0.91", "0.188"]


@pytest.fixture(scope="module")
def small() -> idu.Data:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idu, "QUICK", SMALL)
        return idu.compute(True, silent)


def test_adamomentum_by_hand() -> None:
    """Two steps on gradients 1 and 3, with beta1 = beta2 = 1/2: m = 0.5, 1.75; s = 0.125, 1.59375."""
    p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = idu.AdaMomentum([p], lr=0.1, betas=(0.5, 0.5), eps=0.0)
    p.grad = torch.tensor([1.0], dtype=torch.float64)
    optimizer.step()
    assert p.item() == pytest.approx(-0.1 * 1 / 0.5)
    p.grad = torch.tensor([3.0], dtype=torch.float64)
    optimizer.step()
    assert p.item() == pytest.approx(-0.2 - 0.1 * (1.75 / 0.75) / math.sqrt(1.59375 / 0.75))


def test_every_statistic_comes_in_three_forms() -> None:
    found = idu.methods()
    assert [(m.statistic, m.form) for m in found] == [(s, f) for s in idu.NAMES for f in idu.FORMS]
    for method in found:
        optimizer = method.build([torch.zeros(2, requires_grad=True)], 0.5)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.param_groups[0].get("weight_decay", 0.0) == 0
        assert isinstance(optimizer, Anon) == (method.form != idu.EVERY_STEP)
        if isinstance(optimizer, Anon):
            assert optimizer.param_groups[0]["touch"] == (method.form == idu.GUARDED)
            assert optimizer.param_groups[0]["gamma"] == 1.0


def test_all_methods_are_tuned_alike(small: idu.Data) -> None:
    assert len({tuple(result.digits.rates) for result in small.results}) == 1
    assert len({tuple(result.rosenbrock.rates) for result in small.results}) == 1
    assert {len(result.digits.test) for result in small.results} == {SMALL.digits.seeds}
    json.dumps(files.finite(asdict(small)), allow_nan=False)  # a run may diverge


def test_idu_is_drawn_and_printed(small: idu.Data) -> None:
    assert len(idu.draw(small).axes) == 9
    text = printed(idu.table(small))
    for statistic, name in idu.NAMES.items():
        assert f"{idu.FORMULAS[statistic]}: {name}" in text
    assert text.count(f"  {idu.PRINTED}") == text.count(f"  {idu.GUARDED}") == len(idu.NAMES)


def result(statistic: str, form: str, x: float, loss: float, test: list[float]) -> idu.Result:
    name = idu.NAMES[statistic] + f" + {form}" * (form != idu.EVERY_STEP)
    runs = [run_with([1], [x], [0.0])] * 2
    path = Path([0, 3, 4], [0.0] * 3, [0.0] * 3, [5.0, loss, loss])
    found = Search(name, None, False, name, [0.1, 1.0, 10.0], [9.0, loss, 9.0], [1.0] * 3, [1.0] * 3, 1, path)
    outcome = demo.Outcome(name, None, [0.1, 1.0, 10.0], [[0.1], [0.9], [0.1]], 1.0, test, [[2.0, 1.0]] * 3)
    return idu.Result(name, statistic, form, runs, found, outcome)


def test_idu_remarks_follow_the_numbers() -> None:
    level, ahead = [0.90, 0.92, 0.91], [0.95, 0.97, 0.96]
    rows = [
        result(statistic, form, 1.0 if form == idu.EVERY_STEP else -1.0, 0.5 if form == idu.PRINTED else 0.7, level)
        for statistic in idu.NAMES
        for form in idu.FORMS
    ]
    rows[2] = result("gradient", idu.GUARDED, -1.0, 1e-13, level)
    data = idu.Data(SMALL, rows)
    said = " ".join(idu.remarks(data))
    assert said.count("brings 3 of 3 from the wrong side") == 4
    assert "with g², found by: Adam + IDU, default guards at about step 3; Adam + IDU as printed not" in said
    assert "IDU, default guards is level with Adam, AdaBelief and AdaMomentum" in said
    assert "smallest or largest" not in said

    rows[2] = replace(rows[2], digits=replace(rows[2].digits, test=ahead, lr=10.0), online=rows[0].online)
    said = " ".join(idu.remarks(data))
    assert said.count("brings 2 of 3 from the wrong side") == 2
    assert "IDU, default guards is ahead of Adam, level with AdaBelief and AdaMomentum" in said
    assert "smallest or largest tried for Adam + IDU, default guards." in said
