"""Studies: every one from end to end at its tiny size, resuming, time limits, and reports on results made by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from math import log2
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from made_cifar import write_cifar
from PIL import Image
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from anon_lab import studies, tasks
from anon_lab.cli import app
from anon_lab.launch import Place
from anon_lab.models import inception
from anon_lab.studies import (
    _across,
    _candidates,
    _grounds,
    _plots,
    _report,
    _training,
    cifar10,
    diffusion,
    gamma,
    gpt2,
    guards,
    length,
    overview,
)
from anon_lab.studies._results import Results, beside, check, chosen, report, search, trials, tuned
from anon_lab.studies._spec import ACCURACY, FIRST_SEED, LOSS, Contender, Ground, Job, Stage, Study, anon_defaults
from anon_lab.tasks import Recipe, _images

CPU = torch.device("cpu")
RECIPE = Recipe(batch_size=8, steps=2)
GROUND = Ground("small", "digits", RECIPE, ACCURACY, 1.0, evaluations=1)
LION_RATES = next(dict(each.axes)["lr"] for each in gpt2.contenders() if each.label == "Lion")


@pytest.fixture(autouse=True)
def nothing_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANON_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ANON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def record(job: Job, number: float | None, seconds: float = 6.0) -> dict[str, Any]:
    """A line as training would leave it, with the number in the metric's place."""
    final = None if number is None else {"loss": 1.0, job.ground.metric.name: number}
    return {
        "stage": "made by hand",
        "ground": job.ground.name,
        "label": job.label,
        "split": job.split,
        "evaluation": final,
        "diverged": number is None,
        "loss": 1.0,
        "steps": job.ground.recipe.steps,
        "seconds": seconds,
        "seconds_a_step": seconds / 2,
        "device_seconds": seconds,
        "together": 1,
        "settings": job.settings(CPU).as_json(),
        "versions": {"torch": "2"},
        "device": "a machine",
        "curve": [[1, 1.0, 2.0, None], [2, 2.0, 1.0, number]],
    }


def contender(label: str) -> Contender:
    name, _, gamma = label.partition(" γ ")
    return Contender(
        label, name, (("lr", (0.1, 0.2)), ("weight_decay", (0.5,))), {"gamma": float(gamma)} if gamma else {}
    )


def made_study(*contenders: Contender, ground: Ground = GROUND) -> Study:
    return Study(
        "Made", "Which?", [*search(lambda _: contenders, ground, 2), report(lambda _: contenders, ground)], ("AdamW",)
    )


# Every study from end to end.


class Means(nn.Module):
    """Stands where Inception does, with three features: the mean of each colour."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3))


def anon_study(name: str, out: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["study", name, "--tiny", "--device", "cpu", "--out", str(out), *more])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def shrink(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is repeated many times, a few times."""
    if name == "guards":
        monkeypatch.setattr(guards, "CANDIDATES", _candidates.CANDIDATES[:4])
        monkeypatch.setattr(guards, "KEPT", (1, 1, 1))
        cheap, final = _grounds.settled(True)
        monkeypatch.setattr(guards, "settled", lambda tiny: (cheap[1:2], final))
        monkeypatch.setattr(guards, "confirmed", lambda tiny: _grounds.confirmed(tiny)[2:3])
    elif name == "cifar10":
        monkeypatch.setattr(cifar10, "SEEDS", 1)
    elif name == "diffusion":
        axes = (("lr", (1e-3,)), ("betas", ((0.9, 0.99),)))
        monkeypatch.setattr(diffusion, "contenders", lambda size: [Contender("Adam", "Adam", axes)])
        write_cifar(tmp_path / "data" / "cifar10", monkeypatch)
        monkeypatch.setattr(_images, "hold_out", lambda images, count: _halves(images))
        monkeypatch.setattr(sys.modules["anon_lab.tasks.diffusion"], "_hold_out", lambda images, count: _halves(images))
        (tmp_path / "data" / "inception").mkdir()
        (tmp_path / "data" / "inception" / "none.npz").write_bytes(b"")
        monkeypatch.setattr(inception, "load", lambda path: Means())


def _halves(images: _images.Images) -> tuple[_images.Images, _images.Images]:
    half = [_images.Images(*(part[place] for part in images)) for place in (slice(50), slice(50, 100))]
    return half[0], half[1]


@pytest.mark.parametrize("name", studies.NAMES)
def test_from_end_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(name, tmp_path, monkeypatch)
    out = tmp_path / "results"
    assert "All runs are done." in anon_study(name, out)
    place = out / f"{name}-tiny"
    lines = (place / "runs.jsonl").read_text().splitlines()
    assert all(json.loads(line)["curve"] for line in lines)
    summary = json.loads((place / f"{name}.json").read_text())
    assert summary["runs"] == len(lines)
    (minutes,) = summary["device_minutes"].values()
    assert minutes == pytest.approx(sum(json.loads(line)["device_seconds"] for line in lines) / 60)
    readme = (place / "README.md").read_text()
    assert f"anon study {name} --tiny" in readme
    for ground in summary["grounds"].values():
        for label, found in ground["contenders"].items():
            assert label in readme
            assert len(found["values"]) + found["diverged"] >= (1 if name == "cifar10" and "β3" in label else 3)
    for path in place.glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 300
        assert f"]({path.name})" in readme
    anon_study(name, out)
    assert (place / "runs.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize("name", studies.NAMES)
@pytest.mark.parametrize("tiny", [True, False])
def test_a_study_can_be_listed_without_data(name: str, tiny: bool, tmp_path: Path) -> None:
    study = studies.load(name, tiny)
    nothing = Results(tmp_path / "runs.jsonl")
    known = [job for stage in study.stages for job in stage.jobs(nothing)]
    assert known
    assert not any(job.report for job in known)  # nothing is reported on before it is chosen
    assert "left" in str(studies.plan(name, tmp_path, tiny).columns[2].header)


def test_studies_need_no_package_that_they_do_not_use() -> None:
    """A machine with a GPU often has few."""
    script = (
        "import sys\n"
        "missing = ('plotly', 'optuna', 'sklearn', 'numba', 'tensorboard', 'pytorch_optimizer')\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "from anon_lab import studies\n"
        "from anon_lab.studies import overview\n"
        "for name in studies.NAMES: studies.load(name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_every_contender_has_equally_many_trials() -> None:
    fields = [gpt2.contenders(), cifar10.contenders(), *map(diffusion.contenders, diffusion.SIZES)]
    fields += [gamma.contenders(site) for site in gamma.sites(tiny=False)]
    candidate = _candidates.CANDIDATES[0]
    cheap, final = _grounds.settled(False)
    for each in (*cheap, final, *_grounds.confirmed(False)):
        ours = [guards.anon(candidate, gamma, each.rates) for gamma in each.gammas]
        fields.append([*guards.baselines(each.rates), *ours])
    between = [each for each in fields[0] if each.label in ("Anon γ 1.1", "Anon γ 1.15")]  # at what 1.5 has found
    assert all(each.trials() < fields[0][0].trials() for each in between)
    fields[0] = [each for each in fields[0] if each not in between]
    for field in fields:
        assert len({each.trials() for each in field}) == 1
        assert all(each.axes[0][0] == "lr" for each in field)


def test_wrong_names_and_places(tmp_path: Path) -> None:
    for arguments, sentence in (
        (
            ["nonsense"],
            "there is no study 'nonsense'; there are guards, gamma, length, gpt2, cifar10, lag, diffusion",
        ),
        (["guards", "--data", str(tmp_path / "none")], "--data must be a folder"),
        (["diffusion", "--tiny"], "FID needs the weights"),
        (["gpt2", "--tiny", "--only", "zzz"], "--only must be part of a stage's or run's name, but is 'zzz'"),
        (["gpt2", "--tiny", "--only", "Lion", "--only", "zzz"], "name, but is 'zzz'"),
        (["gpt2", "--tiny", "--list", "--only", "zzz"], "--only must be part of a stage's or run's name, but is"),
    ):
        result = CliRunner().invoke(app, ["study", *arguments])
        assert result.exit_code == 2
        assert sentence in " ".join(result.output.split())


# Choosing.


def results_of(tmp_path: Path, numbers: dict[str, list[float | None]], ground: Ground = GROUND) -> Results:
    """Trials of both axes, in order, for each label."""
    results = Results(tmp_path / "runs.jsonl")
    for label, values in numbers.items():
        rest = iter(values)
        for axis in (0, 1):
            for job in trials(contender(label), ground, results, axis):
                results.add(record(job, next(rest)))
    return results


def test_the_best_on_validation_is_chosen_axis_by_axis(tmp_path: Path) -> None:
    assert tuned(contender("AdamW"), GROUND, results_of(tmp_path / "a", {"AdamW": [70, 80, 75]})) == {"lr": 0.2}
    better = tuned(contender("AdamW"), GROUND, results_of(tmp_path / "b", {"AdamW": [90, 80, 95]}))
    assert better == {"lr": 0.1, "weight_decay": 0.5}
    lower = replace(GROUND, metric=LOSS)
    found = tuned(contender("AdamW"), lower, results_of(tmp_path / "c", {"AdamW": [3, None, 3.5]}, lower))
    assert found == {"lr": 0.1}
    assert tuned(contender("AdamW"), GROUND, results_of(tmp_path / "d", {"AdamW": [None, None]})) is None


def test_nothing_is_chosen_from_half_of_the_trials(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    first, second = trials(contender("AdamW"), GROUND, results, 0)
    results.add(record(first, 70))
    assert trials(contender("AdamW"), GROUND, results, 1) == []
    results.add(record(second, 60))
    assert [job.values for job in trials(contender("AdamW"), GROUND, results, 1)] == [{"lr": 0.1, "weight_decay": 0.5}]


def test_the_test_set_has_no_say(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"AdamW": [70, 80, 75]})
    for lr in (0.1, 0.2):  # on the test set the other lr would be far ahead
        for seed in range(FIRST_SEED, FIRST_SEED + 3):
            job = Job("AdamW", GROUND, "AdamW", {"lr": lr}, seed, report=True)
            results.add(record(job, 99 if lr == 0.1 else 50))
    study = made_study(contender("AdamW"))
    line = _report.lines(study.stages, results)["small"][0]
    assert (line.settings, line.values) == ({"lr": 0.2}, [50, 50, 50])


def test_candidates_are_compared_at_their_best_and_at_the_highest_lr(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    cell = _candidates.Cell(GROUND, 1.0, (0.1, 0.4), margin=2.0)
    three = _candidates.CANDIDATES[:3]
    for candidate, numbers in zip(three, ([92, 80], [95, None], [90, 85]), strict=True):
        assert cell.lags(three, results) is None
        for job, number in zip(cell.jobs(candidate), numbers, strict=True):
            results.add(record(job, number))
    # Best lr: 3, 0 and 5 points behind 95; highest lr: 5, all and 0 behind 85. Two points are a margin.
    lags = {three[0].name: (log2(2.5) + log2(3.5)) / 2, three[1].name: 5.0, three[2].name: log2(3.5) / 2}
    assert cell.lags(three, results) == pytest.approx(lags)
    order = _candidates.ordered(three, [cell], results)
    assert order is not None
    assert [name for name, _ in order] == [three[2].name, three[0].name, three[1].name]
    assert cell.words(three[1], results) == "95 / diverged"


def test_whoever_is_not_behind_the_base_meets_on_the_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("base", "as printed", "clip 0.5", "clip 3", "floor 0")
    few = tuple(each for each in _candidates.CANDIDATES if each.name in names)
    monkeypatch.setattr(guards, "CANDIDATES", few)
    monkeypatch.setattr(guards, "KEPT", (1, 1))
    cheap, final = _grounds.settled(True)
    screening = guards.Screening(cheap[2:], final)
    results = Results(tmp_path / "runs.jsonl")
    # Losses; a margin is 0.01, so that at first "clip 3" and "as printed" are behind, and "floor 0" ties.
    small = {"base": 3.02, "as printed": 9.0, "clip 0.5": 3.0, "clip 3": 3.08, "floor 0": 3.025}
    large = {"base": 4.1, "as printed": 5.0, "clip 0.5": 4.0, "floor 0": 4.05}
    took_part = {}
    for stage in [*guards._baseline_searches(cheap[2:]), *screening.stages()]:
        jobs = _training.missing(stage, results)
        took_part[stage.name] = {job.label.partition(", ")[2] for job in jobs}
        for job in jobs:
            numbers = small if job.ground == cheap[2].ground else large
            results.add(record(job, numbers.get(job.label.partition(", ")[2], 4.0)))
    small_tasks = [names for stage, names in took_part.items() if stage.startswith("screen ngram")]
    assert small_tasks == [set(names)]
    first, last = (names for stage, names in took_part.items() if stage.startswith("screen gpt"))
    assert first == {"base", "as printed", "clip 0.5", "floor 0"}
    assert last == {"base", "as printed", "clip 0.5"}
    winner = screening.winner(results)
    assert winner is not None
    assert winner.name == "clip 0.5"


def test_safety_does_not_make_up_for_a_worse_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("base", "as printed", "clip 0.25", "clip 0.5")
    few = tuple(each for each in _candidates.CANDIDATES if each.name in names)
    monkeypatch.setattr(guards, "CANDIDATES", few)
    cheap, final = _grounds.settled(True)
    screening = guards.Screening(cheap[2:], final)

    def winner(adamw: float) -> str:
        results = Results(tmp_path / f"{adamw}.jsonl")
        # A margin is 0.01. "clip 0.25" alone learns at the highest lr, and has the smallest lag; its optimum is 0.02
        # behind that of "clip 0.5".
        low = {"base": 4.5, "as printed": 5.0, "clip 0.25": 4.02, "clip 0.5": 4.0}
        high = {"base": 5.0, "as printed": 6.0, "clip 0.25": 4.02, "clip 0.5": 5.0}
        for stage in [*guards._baseline_searches(cheap[2:]), *screening.stages()]:
            for job in _training.missing(stage, results):
                top = max(lr for multiples in guards.LAST_ROUNDS for lr in multiples)
                is_high = job.values["lr"] >= top * final.rates.adam[0]
                numbers = high if is_high else low
                results.add(record(job, numbers.get(job.label.partition(", ")[2], adamw)))
        found = screening.winner(results)
        assert found is not None
        return found.name

    assert winner(adamw=4.015) == "clip 0.25"
    assert winner(adamw=4.005) == "clip 0.5"
    assert winner(adamw=3.0) == "clip 0.25"  # nobody is level


def test_where_all_diverged_none_is_behind(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    cell = _candidates.Cell(GROUND, 1.0, (0.4,), margin=1.0)
    two = _candidates.CANDIDATES[:2]
    for candidate in two:
        for job in cell.jobs(candidate):
            results.add(record(job, None))
    assert cell.lags(two, results) == {two[0].name: 0.0, two[1].name: 0.0}


def test_candidates_are_judged_by_the_mean_over_seeds(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    cell = _candidates.Cell(GROUND, 1.0, (0.1, 0.4), margin=1.0, seeds=2)
    candidate = _candidates.CANDIDATES[0]
    jobs = cell.jobs(candidate)
    assert [(job.seed, job.values["lr"]) for job in jobs] == [(0, 0.1), (0, 0.4), (1, 0.1), (1, 0.4)]
    for job, number in zip(jobs, (90, 70, 80, 60), strict=True):
        assert cell.found(candidate, results) is None
        results.add(record(job, number))
    assert cell.found(candidate, results) == (85, 65)


def test_a_search_may_end_with_a_check_of_the_learning_rate_below(tmp_path: Path) -> None:
    ground = replace(GROUND, checks=2)
    adamw = contender("AdamW")
    results = Results(tmp_path / "runs.jsonl")
    *rounds, checked = search(lambda _: [adamw], ground, 2)
    assert checked.name == "check small, 2 seeds"
    for stage in rounds:
        assert _training.missing(checked, results) == []
        for job in _training.missing(stage, results):
            results.add(record(job, {0.1: 80, 0.2: 90}[job.values["lr"]]))
    reported = report(lambda _: [adamw], ground)
    left = _training.missing(checked, results)  # of the better one seed 0 is known
    assert [(job.values["lr"], job.seed) for job in left] == [(0.2, 1), (0.1, 1)]
    for job, number in zip(left, (60, 75), strict=True):
        assert chosen(adamw, ground, results) is None
        assert reported.jobs(results) == []
        results.add(record(job, number))
    best = tuned(adamw, ground, results)
    assert best is not None
    assert best["lr"] == 0.2
    assert chosen(adamw, ground, results) == {**best, "lr": 0.1}  # 77.5 in the mean against 75
    assert {job.values["lr"] for job in reported.jobs(results)} == {0.1}


def test_settings_found_on_short_runs_may_be_checked_on_long_ones(tmp_path: Path) -> None:
    """At the learning rate above, and on either way as long as the best is at an end, also beyond those searched."""
    rates = (0.1, 0.2, 0.4, 0.8)
    long = replace(GROUND, name="long", recipe=RECIPE.changed(steps=9), tuned_on=GROUND, checks=1)
    longer = replace(GROUND, name="longer", recipe=RECIPE.changed(steps=99), tuned_on=long)
    for found, first, then, peak in (
        (0.1, [0.1, 0.2], [0.4], 0.2),
        (0.4, [0.4, 0.8], [0.2], 0.4),
        (0.8, [0.8, 1.6], [3.2, 6.4], 3.2),
        (0.2, [0.2, 0.4], [0.1, 0.05, 0.025], 0.05),
    ):
        adamw = Contender("AdamW", "AdamW", (("lr", rates),))
        results = Results(tmp_path / f"{found}.jsonl")
        (checked,) = check(lambda _, adamw=adamw: [adamw], long)
        assert checked.name == "check long, 1 seed"
        assert checked.jobs(results) == []
        for job in trials(adamw, GROUND, results, 0):
            results.add(record(job, 90 if job.values["lr"] == found else 50))
        left = _training.missing(checked, results)
        assert [job.values["lr"] for job in left] == first
        assert all((job.ground, job.split, job.seed) == (long, "validation", 0) for job in left)
        more = []
        while left:
            assert chosen(adamw, long, results) is None
            for job in left:
                results.add(record(job, 90 - abs(log2(job.values["lr"] / peak))))
            left = _training.missing(checked, results)
            more += [job.values["lr"] for job in left]
        assert more == then
        assert chosen(adamw, long, results) == chosen(adamw, longer, results) == {"lr": peak}
        assert tuned(adamw, GROUND, results) == {"lr": found}


def test_a_check_goes_on_for_a_while_only(tmp_path: Path) -> None:
    long = replace(GROUND, name="long", recipe=RECIPE.changed(steps=9), tuned_on=GROUND, checks=1)
    adamw = Contender("AdamW", "AdamW", (("lr", (0.1, 0.2)),))
    results = Results(tmp_path / "runs.jsonl")
    (checked,) = check(lambda _: [adamw], long)
    for job in trials(adamw, GROUND, results, 0):
        results.add(record(job, job.values["lr"]))
    while left := _training.missing(checked, results):
        for job in left:
            results.add(record(job, job.values["lr"]))  # higher is always better
    assert chosen(adamw, long, results) == {"lr": 6.4}


def test_the_learning_rate_beside() -> None:
    rates = (0.3, 0.42, 0.6, 1.2)
    assert [beside(rates, lr, up=True) for lr in (0.2, 0.3, 0.5, 1.2, 2.4)] == [0.3, 0.42, 0.6, 2.4, 4.8]
    assert [beside(rates, lr, up=False) for lr in (2.4, 1.2, 0.42, 0.3)] == [1.2, 0.6, 0.3, 0.214]


def test_a_stage_trains_what_its_own_results_ask_for(tmp_path: Path) -> None:
    """As a check does whose best is at an end: before the next stage begins."""
    first, second = (Job("AdamW", GROUND, "AdamW", {"lr": lr}) for lr in (0.1, 0.2))
    results = Results(tmp_path / "runs.jsonl")
    stage = Stage("check", lambda results: [first] if results.of(first) is None else [first, second])
    order = _training.Order(tmp_path)
    assert _training.train(Study("", "", [stage]), results, order, Place(CPU), Console(quiet=True))
    assert [each["settings"]["lr"] for each in results.records.values()] == [0.1, 0.2]


def test_without_a_check_the_tuned_settings_are_reported(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"AdamW": [1, 2, 0]})
    adamw = contender("AdamW")
    assert chosen(adamw, GROUND, results) == tuned(adamw, GROUND, results)


def test_the_learning_rate_that_serves_every_gamma_best() -> None:
    """Here the second: 0 and 2 behind the best of each row; the third is better in one row and diverges in another."""
    table = [[70.0, 90.0, 89.0], [60.0, 88.0, 90.0], [70.0, 80.0, None], [None, None, None]]
    assert gamma.shared_rate(table, higher_is_better=True) == (1, pytest.approx(2 / 3))
    assert gamma.shared_rate([[3.0, 4.0], [3.5, 3.25]], higher_is_better=False) == (0, pytest.approx(0.125))
    assert gamma.shared_rate([[None, 3.0], [3.0, None]], higher_is_better=False) is None
    assert gamma.shared_rate([[None, None]], higher_is_better=False) is None


def test_gamma_is_drawn_once_every_trial_is_known(tmp_path: Path) -> None:
    study = studies.load("gamma", tiny=True)
    site = gamma.sites(tiny=True)[0]
    results = Results(tmp_path / "runs.jsonl")
    tune, reported, *_ = study.stages
    for number, job in enumerate(tune.jobs(results)):
        assert study.heats(results) == {}
        results.add(record(job, 50 + number % 7))
    (heat,) = study.heats(results).values()
    assert len(heat.rows) == len(gamma.GAMMAS)
    assert {len(line) for line in heat.words} == {len(gamma.octaves(site.adam, site.octaves))}
    jobs = reported.jobs(results)
    assert {job.seed for job in jobs} == set(range(FIRST_SEED, FIRST_SEED + gamma.SEEDS))
    for job in jobs:
        results.add(record(job, 70 + 5 * job.values.get("gamma", 0) + 0.1 * (job.seed % 5)))
    found = _report.lines(study.stages, results)
    assert _report.findings(study, found)[0].startswith("digits: Anon γ 2 ends best, at accuracy 80.20")
    axis = _plots.over_gamma("digits", found["digits"]).axes[0]
    assert axis.get_xlabel() == "adaptivity γ"
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["AdamW", "SGDM"]  # pyright: ignore[reportOptionalMemberAccess]


# The report.


def test_report_on_results_made_by_hand(tmp_path: Path) -> None:
    numbers = {"AdamW": [70, 71, 69], "Anon γ 1": [80, 81, 82], "Lion": [70, 70.5, 71]}
    results = results_of(tmp_path, {"AdamW": [1, 2, 0], "Anon γ 1": [1, 2, 0], "Lion": [1, 2, 0]})
    everyone = [contender(label) for label in numbers]
    for label, values in numbers.items():
        for seed, number in enumerate(values):
            settings = {**contender(label).fixed, "lr": 0.2}
            job = Job(label, GROUND, label.split()[0], settings, FIRST_SEED + seed, report=True)
            results.add(record(job, number))
    study = made_study(*everyone)
    paths = _report.save("made", study, results, "anon study made", tmp_path, Console(quiet=True))
    summary = json.loads((tmp_path / "made.json").read_text())
    found = summary["grounds"]["small"]["contenders"]
    assert {label: each["against"].get("AdamW", {}).get("verdict") for label, each in found.items()} == {
        "AdamW": None,
        "Anon γ 1": "better",
        "Lion": "tie",
    }
    for label, values in numbers.items():
        assert found[label]["mean"] == pytest.approx(mean(values))
        assert found[label]["standard_deviation"] == pytest.approx(stdev(values))
    assert summary["device_minutes"] == {"a machine": pytest.approx((9 + 9) * 6.0 / 60)}
    readme = (tmp_path / "README.md").read_text()
    assert readme.index("| Anon γ 1 | 81.00 ± 1.0 | 3 | better |") < readme.index("| AdamW | 70.00 ± 1.0 | 3 | – |")
    assert "small: Anon γ 1 (81.00 ± 1.0) against AdamW (70.00 ± 1.0) better." in readme
    assert "| made by hand | a machine | 18 | 1.80 |" in readme
    assert tmp_path / "small.png" in paths


def test_one_seed_and_lost_seeds_are_said(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"AdamW": [1, 2, 0], "Anon": [1, 2, 0]})
    for label, values in {"AdamW": [70.0, 71.0, None], "Anon": [90.0]}.items():
        for seed, number in enumerate(values):
            job = Job(label, GROUND, label.split()[0], {"lr": 0.2}, FIRST_SEED + seed, report=True)
            results.add(record(job, number))
    study = made_study(contender("AdamW"), contender("Anon"))
    section = next(iter(_report.reported(study, _report.lines(study.stages, results))))
    assert section.lines[1][:4] == ["Anon", "90.00", "1", "one seed"]
    assert section.lines[2][1] == "70.50 ± 0.71 (1 of 3 diverged)"
    assert _report.left_in_words(study, results) == "Left to train: 2 runs of “report small”."


def test_runs_on_other_data_are_not_compared(tmp_path: Path) -> None:
    """A part of the same text is another text; those that do not tell theirs are taken to be alike."""
    seen = {"AdamW": ["all", "all", None], "Anon": ["a part", "a part", "a part"], "Anon γ 1": [None, "all", None]}
    results = results_of(tmp_path, {label: [1, 2, 0] for label in seen})
    for label, data in seen.items():
        for seed, each in enumerate(data):
            values = dict(contender(label).fixed) | {"lr": 0.2}
            job = Job(label, GROUND, label.split()[0], values, FIRST_SEED + seed, report=True)
            results.add(record(job, 90.0 + seed) | ({} if each is None else {"data": each}))
    study = made_study(*map(contender, seen))
    found = _report.lines(study.stages, results)
    told = {ground: {line.label: len(line.records) for line in contenders} for ground, contenders in found.items()}
    assert told == {
        "small (data: all)": {"AdamW": 2, "Anon γ 1": 1},
        "small (data: a part)": {"Anon": 3},
        "small": {"Anon γ 1": 2, "AdamW": 1},
    }
    paths = _report.save("made", study, results, "anon study made", tmp_path, Console(quiet=True))
    assert {path.name for path in paths if path.suffix == ".png"} >= {"small.png", "small-data-a-part.png"}


def test_runs_that_do_not_tell_their_data_compare_with_those_that_do(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"AdamW": [1, 2, 0]})
    for seed, data in enumerate(({}, {"data": "all"})):
        job = Job("AdamW", GROUND, "AdamW", {"lr": 0.2}, FIRST_SEED + seed, report=True)
        results.add(record(job, 90.0) | data)
    study = made_study(contender("AdamW"))
    assert {ground: len(lines[0].records) for ground, lines in _report.lines(study.stages, results).items()} == {
        "small": 2
    }


def test_a_run_tells_what_data_it_saw(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    jobs = [Job("AdamW", GROUND, "AdamW", {"lr": 0.1}, report=report) for report in (False, True)]
    order = _training.Order(tmp_path)
    study = Study("", "", [Stage("train", lambda results: jobs)])
    _training.train(study, results, order, Place(CPU), Console(quiet=True))
    seen = [each["data"] for each in results.records.values()]
    assert seen == [tasks.fingerprint(tasks.load("digits", None, hold_out), CPU) for hold_out in (True, False)]
    assert seen[0] != seen[1]


def test_a_contender_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    jobs = [Job("AdamW", GROUND, "AdamW", {"lr": lr}) for lr in (0.1, 0.2)]
    results.add(record(jobs[0], 90.0) | {"data": "a part"})
    study = Study("", "", [Stage("train", lambda results: jobs)])
    with pytest.raises(ValueError, match="AdamW on 'small' was trained on other data before"):
        _training.train(study, results, _training.Order(tmp_path), Place(CPU), Console(quiet=True))
    assert len(results.records) == 1


def test_settings_in_words() -> None:
    guard = {"clip": 3.0, "touch": True}
    rising = {"start": 1.25, "end": 2.0, "by": 1000}
    said = _report.in_words({"lr": 0.001, "guard": guard, "growth": rising, "betas": (0.9, 0.99)})
    assert said == "lr 0.001, clip 3, touch True, growth (start 1.25, end 2, by 1000), betas 0.9, 0.99"
    assert _report.in_words({"guard": None}) == "as printed"


def test_settings_without_defaults() -> None:
    defaults = anon_defaults()
    guard = {**defaults["guard"], "clip": 3.0}
    shown = _report.unusual({**defaults, "betas": list(defaults["betas"]), "gamma": 1.0, "lr": 0.1})
    assert shown == {"gamma": 1.0, "lr": 0.1}
    assert _report.unusual({**defaults, "guard": guard, "betas": [0.9, 0.95]}) == {
        "guard": {"clip": 3.0},
        "betas": [0.9, 0.95],
    }
    assert _report.unusual({**defaults, "guard": None}) == {"guard": None}


# Resuming, and the time.


def test_a_line_that_was_cut_off_is_forgotten(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    first, second = trials(contender("AdamW"), GROUND, results, 0)
    results.add(record(first, 70))
    whole = results.path.read_bytes()
    results.path.write_bytes(whole + whole[: len(whole) // 2])
    again = Results(results.path)
    assert (again.of(first) is not None, again.of(second)) == (True, None)
    again.add(record(second, 60))
    assert len([json.loads(line) for line in results.path.read_text().splitlines()]) == 2


def test_the_same_run_on_another_device_is_not_trained_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    job = Job("AdamW", GROUND, "AdamW", {"lr": 0.1, "betas": (0.9, 0.95)})
    made = record(job, 70)
    made["settings"] |= {"precision": "bf16", "graph": True, "evaluations": 7}
    results.add(made)
    assert results.of(job) is not None
    assert results.of(replace(job, seed=1)) is None
    assert results.of(replace(job, report=True)) is None
    assert results.of(replace(job, ground=replace(GROUND, recipe=RECIPE.changed(steps=3)))) is None


def test_runs_train_together_on_a_gpu_and_alone_on_a_cpu() -> None:
    several = replace(GROUND, together=2)
    jobs = [Job("AdamW", several, "AdamW", {"lr": lr}) for lr in (0.1, 0.2, 0.3)]
    jobs.append(Job("AdamW", several, "AdamW", {"lr": 0.1}, 1000, report=True))
    assert [len(group) for group in _training.groups(jobs, torch.device("cuda"))] == [2, 1, 1]
    assert [len(group) for group in _training.groups(jobs, CPU)] == [1, 1, 1, 1]


def test_no_time_trains_nothing(tmp_path: Path) -> None:
    output = anon_study("gpt2", tmp_path, "--minutes", "0")
    rates = sum(len(each.axes[0][1]) for each in gpt2.contenders())
    assert f"Left to train: {rates} runs of “tune 2 steps, round 1”" in output
    assert not (tmp_path / "gpt2-tiny" / "runs.jsonl").exists()


def test_the_time_is_foreseen_from_runs_of_the_kind(tmp_path: Path) -> None:
    """A run of the kind took 2 minutes here: with 1 minute none is started, though the time is not used up."""
    where, console = Place(CPU), Console(quiet=True)
    study = made_study(contender("AdamW"))
    results = Results(tmp_path / "runs.jsonl")
    first, _ = trials(contender("AdamW"), GROUND, results, 0)
    slow = record(first, 70, seconds=120.0)
    slow["device"] = _training.provenance(CPU)["device"]
    results.add(slow)
    assert not _training.train(study, results, _training.Order(tmp_path, minutes=1), where, console)
    assert len(results.records) == 1
    assert _training.train(study, results, _training.Order(tmp_path, minutes=60), where, console)
    assert len(results.records) == 3 + 3


def test_only_what_matches_is_trained(tmp_path: Path) -> None:
    anon_study("gpt2", tmp_path, "--only", "round 1 | * | Lion")
    records = [json.loads(line) for line in (tmp_path / "gpt2-tiny" / "runs.jsonl").read_text().splitlines()]
    assert [each["label"] for each in records] == ["Lion"] * len(LION_RATES)
    assert {each["split"] for each in records} == {"validation"}


def test_several_patterns_are_each_enough(tmp_path: Path) -> None:
    anon_study("gpt2", tmp_path, "--only", "round 1 | * | Lion", "--only", "round 1 | * | Anon γ 1.5")
    records = [json.loads(line) for line in (tmp_path / "gpt2-tiny" / "runs.jsonl").read_text().splitlines()]
    assert {each["label"] for each in records} == {"Lion", "Anon γ 1.5"}


def test_a_pattern_of_finished_or_later_runs_is_one(tmp_path: Path) -> None:
    for _ in range(2):
        anon_study("gpt2", tmp_path, "--only", "round 1 | * | Lion")
    for later in ("round 2 | * | AdamW", "report"):
        assert "Left to train" in anon_study("gpt2", tmp_path, "--only", later)
    lines = (tmp_path / "gpt2-tiny" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == len(LION_RATES)


def test_list_is_short_where_nothing_is_known_yet(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["study", "gpt2", "--tiny", "--list", "--out", str(tmp_path)]).output
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line[:1] == "│"]
    study = studies.load("gpt2", tiny=True)
    assert [row[0] for row in rows] == [stage.name for stage in study.stages]  # a line for each: nothing wraps
    assert rows[0][1:3] == ["0", str(len(study.stages[0].jobs(Results(tmp_path / "none"))))]
    assert rows[-1][1:] == ["0", "?", "?"]
    assert shown.splitlines()[-1].strip() == "? depends on what the stages before it find"


def test_a_killed_process_loses_the_running_job_alone(tmp_path: Path) -> None:
    lines = tmp_path / "cifar10-tiny" / "runs.jsonl"
    code = "from anon_lab.cli import app; app()"
    command = [sys.executable, "-c", code, "study", "cifar10", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = Results(lines).records
    assert len(before) >= 3
    study = studies.load("cifar10", tiny=True)
    first = Stage("first", study.stages[0].jobs)
    results = Results(lines)
    _training.train(Study("", "", [first]), results, _training.Order(tmp_path), Place(CPU), Console(quiet=True))
    kept = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(kept) == len(results.records) >= 20  # none twice
    assert all(results.records[name] == each for name, each in before.items())


def test_what_another_study_trained_is_not_trained_again(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "guards" / "runs.jsonl", tmp_path / "made" / "runs.jsonl"
    study = replace(made_study(contender("AdamW")), builds_on=("guards",))
    results_of(theirs.parent, {"AdamW": [70, 80, 75]})
    before = theirs.read_bytes()
    results = studies.trained("made", study, tmp_path)
    assert not results.records
    assert not results.minutes()
    assert tuned(contender("AdamW"), GROUND, results) == {"lr": 0.2}
    assert [len(_training.missing(stage, results)) for stage in study.stages] == [0, 0, 3]
    _training.train(study, results, _training.Order(tmp_path), Place(CPU), Console(quiet=True))
    assert theirs.read_bytes() == before
    assert {json.loads(line)["split"] for line in ours.read_text().splitlines()} == {"test"}
    assert len(results.records) == 3
    assert _report.borrowed_in_words(study, results) == "3 more are those of `guards`. "


def test_a_file_is_repaired_by_whoever_writes_and_not_by_readers(tmp_path: Path) -> None:
    """Another process may be writing at this moment."""
    theirs = tmp_path / "guards" / "runs.jsonl"
    results_of(theirs.parent, {"AdamW": [70, 80, 75]})
    half = theirs.read_bytes() + b'{"stage": '
    theirs.write_bytes(half)
    assert len(Results(tmp_path / "made.jsonl", theirs).borrowed) == 3
    assert theirs.read_bytes() == half
    assert len(Results(theirs).records) == 3
    assert theirs.read_bytes() == half
    Results(theirs).add(record(trials(contender("SGDM"), GROUND, Results(theirs), 0)[0], 60))
    assert len([json.loads(line) for line in theirs.read_text().splitlines()]) == 4


def test_a_contender_begun_by_another_study_is_not_continued_on_other_data(tmp_path: Path) -> None:
    theirs = tmp_path / "guards" / "runs.jsonl"
    first = trials(contender("AdamW"), GROUND, Results(theirs), 0)[0]
    Results(theirs).add(record(first, 70) | {"data": "another cut"})
    study = replace(made_study(contender("AdamW")), builds_on=("guards",))
    results = studies.trained("made", study, tmp_path)
    with pytest.raises(ValueError, match=f"was trained on other data before.* and {theirs}"):
        _training.train(study, results, _training.Order(tmp_path), Place(CPU), Console(quiet=True))
    assert not results.records


def test_leads_are_told_by_length(tmp_path: Path) -> None:
    ground = replace(GROUND, metric=LOSS)
    who = (contender("AdamW"), contender("Anon γ 1.5"))
    results = results_of(tmp_path, {each.label: [1, 2, 0] for each in who}, ground)
    grounds = [ground, length.longer(ground), length.longer(length.longer(ground))]
    assert [each.name for each in grounds] == ["small", "small, 8 steps", "small, 32 steps"]
    assert [each.tuned_on for each in grounds] == [None, *grounds[:2]]
    reports = [report(lambda _: who, each) for each in grounds]
    for job in reports[0].jobs(results):
        results.add(record(job, 3.0 if job.label == "AdamW" else 2.75))
    (section,) = length.leads(reports, results)
    assert section.lines[0] == ["", "steps", "AdamW", "Anon γ 1.5", "ahead by", "Anon γ 1", "ahead by"]
    assert section.lines[1:] == [["small", "2", "3.000 ± 0.0", "2.750 ± 0.0", "0.250", "–", "–"]]
    assert length.leads(reports[1:], results) == []


def test_a_lead_is_over_the_seeds_that_both_have() -> None:
    loss = replace(GROUND, metric=LOSS)
    made = made_line("AdamW", loss, [5.0, 3.0, None]), made_line("Anon γ 1.5", loss, [4.5])
    theirs, ours = (
        replace(line, records=[each | {"settings": {"seed": seed}} for seed, each in enumerate(line.records)])
        for line in made
    )
    assert length.lead(ours, theirs) == "0.500"
    assert length.lead(replace(ours, records=[]), theirs) == "–"


@pytest.mark.parametrize(("name", "own"), [("cifar10", {"Anon γ 0.5": 5}), ("length", {})])
@pytest.mark.parametrize("tiny", [True, False])
def test_what_guards_has_searched_is_not_searched_again(
    name: str, own: dict[str, int], tiny: bool, tmp_path: Path
) -> None:
    """It would be trained a second time."""
    nothing = Results(tmp_path / "runs.jsonl")
    candidate = next(each for each in _candidates.CANDIDATES if each.name == "brake, clip 0.5")
    searched = set()
    for ground, rates, gammas in ((each.ground, each.rates, each.gammas) for each in _grounds.confirmed(tiny)):
        theirs = [*guards.baselines(rates), *(guards.anon(candidate, gamma, rates) for gamma in gammas)]
        searched |= {job.key() for each in theirs for job in trials(each, ground, nothing, 0)}
    study = studies.load(name, tiny)
    assert study.builds_on == ("guards",)
    jobs = [job for stage in study.stages if "round 1" in stage.name for job in stage.jobs(nothing)]
    assert len(jobs) > 10
    assert Counter(job.label for job in jobs if job.key() not in searched) == own


@pytest.mark.parametrize("together", [1, 16])
def test_time_is_compared_where_runs_train_alone_by_design(together: int, tmp_path: Path) -> None:
    """On a CPU all train alone, beside whatever else the machine does."""
    ground = replace(GROUND, together=together)
    results = results_of(tmp_path, {"AdamW": [1, 2, 0]}, ground)
    study = made_study(contender("AdamW"), ground=ground)
    for job in study.stages[-1].jobs(results):
        results.add(record(job, 70))
    found = _report.lines(study.stages, results)
    (section,) = _report.reported(study, found)
    assert ("ms a step" in section.lines[0]) == (together == 1)
    assert len(_plots.curves("small", found["small"]).axes) == (2 if together == 1 else 1)


@pytest.mark.parametrize("changes", [{"evaluations": 1}, {"measure": lambda run: {}}])
def test_ends_are_drawn_where_nothing_was_measured_on_the_way(changes: dict[str, Any], tmp_path: Path) -> None:
    ground = replace(GROUND, **changes)
    results = results_of(tmp_path, {"AdamW": [1, 2, 0], "Anon γ 1": [1, 2, 0]}, ground)
    study = made_study(contender("AdamW"), contender("Anon γ 1"), ground=ground)
    for job in study.stages[-1].jobs(results):
        results.add(record(job, {"AdamW": 80, "Anon γ 1": 70}[job.label] + job.seed - FIRST_SEED))
    found = _report.lines(study.stages, results)["small"]
    assert not _plots.have_curves(found)
    axis = _plots.ends("small", found).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["Anon γ 1", "AdamW"]  # the best on top
    assert [sorted(line.get_xdata()) for line in axis.lines[2:]] == [[80, 81, 82], [81]]  # its seeds and their mean
    assert ("on the test set" in axis.get_xlabel()) == ("measure" not in changes)


def test_other_refresh_times_are_another_method() -> None:
    default = _across.Method.of({"gamma": 1.0, "growth": 2.0})
    fresher = _across.Method.of({"gamma": 1.0, "growth": 1.25})
    assert (default.label, fresher.label) == ("γ 1", "γ 1, growth 1.25")
    assert default == _across.Method.of({"gamma": 1.0}) != fresher
    assert (default.found_on, fresher.found_on) == ((), ("diffusion 16px",))
    remembering = _across.Method.of({"gamma": 1.0, "growth": 1.25, "beta3": None})
    assert remembering.label == "γ 1, growth 1.25, Adam's memory"
    following = _across.Method.of({"gamma": 1.5, "lr_scale": "tensor", "guard": {"clip": 3.0, "follow": True}})
    assert (following.label, following.found_on) == ("γ 1.5, follow with lr_scale", ("zipf", "gpt 1m"))
    assert not following.is_default
    assert len({default, fresher, remembering, following}) == 4
    assert sorted([following, remembering, default, fresher])[-1] == following
    assert _across.Method.of({"gamma": 1.5, "lr_scale": "tensor"}).found_on == ("zipf", "gpt 1m")


# All studies at one glance.


def test_every_anon_of_a_long_field_has_a_marker_of_its_own() -> None:
    gammas = [replace(made_line("Anon γ 1", GROUND, [80.0]), label=f"Anon γ 1, way {way}") for way in range(9)]
    assert len({_plots.style(line, gammas)["marker"] for line in gammas}) == 9


def test_the_picture_shows_anon_with_its_own_refresh_times_and_memory_once() -> None:
    usual = [made_line(label, GROUND, [80.0, 81.0]) for label in ("SGDM", "Anon γ 1", "Anon γ 1.5")]
    others = [
        replace(usual[1], label=label, settings={**usual[1].settings, **changes})
        for label, changes in (("fresher", {"growth": 1.25}), ("remembering", {"beta3": None}))
    ]
    tuned_again = replace(usual[1], label="gentler", settings={**usual[1].settings, "weight_decay": 0.05})
    scaled_up = scaled(usual[2])
    panels = overview.by_default({"a": [*usual, *others, tuned_again, scaled_up], "b": [usual[0], tuned_again]})
    assert panels == {"a": [*usual, scaled_up], "b": [usual[0], tuned_again]}


def test_overview_of_results_made_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results"
    written: dict[str, Study] = {}
    monkeypatch.setattr(overview, "load", written.__getitem__)

    def write(study: str, numbers: dict[str, list[Any]], ground: Ground) -> None:
        results = results_of(out / study, {label: [1, 2, 0] for label in numbers}, ground)
        made = made_study(*(contender(label) for label in numbers), ground=ground)
        for job in made.stages[-1].jobs(results):
            if job.seed - FIRST_SEED < len(numbers[job.label]):
                results.add(record(job, numbers[job.label][job.seed - FIRST_SEED]))
        written[study] = made

    loss = another("text", metric=LOSS)
    lost = [None] * 3
    write(
        "guards", {"AdamW": [70, 71, 69], "Anon γ 1": [80, 81, 82], "Anon γ 2": lost, "Anon γ 0": [60, 61, 62]}, GROUND
    )
    write("gpt2", {"AdamW": [3.0, 3.1, 3.2], "Anon γ 1": [3.0, 3.1, 3.2], "Anon γ 1.1": [2.0]}, loss)
    found = CliRunner().invoke(app, ["results", "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert "Anon against AdamW: 1 better, 1 level, 2 worse, 1 not comparable" in " ".join(found.output.split())
    text = (out / "README.md").read_text()
    assert "| Anon γ 1 | 81.00 ± 1.0 | 3 | better |" in text
    assert "| Anon γ 2 | diverged | 3 | worse |" in text
    assert "## gpt2, text: fresh seeds" in text
    assert "## Over all tasks" in text
    assert "| Anon γ 1 | AdamW | 2 | 1 | 1 / 1 / 0 | better, p = " in text
    assert "loss nats per token" in text
    panels, _ = overview.collected(overview.read(out))
    axes = overview.draw(panels, "a finding").axes
    labels = [[label.get_text() for label in axis.get_yticklabels()] for axis in axes[:2]]
    assert labels == [["AdamW", "Anon γ 0", "Anon γ 1", "Anon γ 2"], ["AdamW", "Anon γ 1", "Anon γ 1.1"]]
    assert [axis.get_visible() for axis in axes] == [True, True, False, False]
    assert [axis.xaxis_inverted() for axis in axes[:2]] == [False, True]  # right is better
    picture = (out / "overview.svg").read_bytes()
    assert picture.startswith(b"<?xml")
    overview.save(out, Console(quiet=True))
    assert (out / "overview.svg").read_bytes() == picture

    assert "cut off" not in found.output
    runs = out / "gpt2" / "runs.jsonl"
    runs.write_bytes(runs.read_bytes()[:-9])
    found = CliRunner().invoke(app, ["results", "--out", str(out)])
    assert "gpt2/runs.jsonl was cut off and is left out" in " ".join(found.output.replace("\n", "").split())


def made_line(label: str, ground: Ground, values: list[Any]) -> _report.Line:
    job = Job(label, ground, label.split()[0], {"lr": 0.1}, report=True)
    return _report.Line(label, ground, contender(label).fixed, [record(job, each) for each in values])


def another(name: str, **changes: Any) -> Ground:
    """A ground on another network."""
    return replace(GROUND, name=name, options={"part": name}, **changes)


def test_a_network_counts_once_with_its_longest_runs() -> None:
    good, bad = [1.0, 1.01, 1.02], [2.0, 2.01, 2.02]
    short, other = another("a", metric=LOSS), another("b", metric=LOSS)
    long, same = (replace(short, name=f"a, {steps}", recipe=RECIPE.changed(steps=steps)) for steps in (9, 2))
    for order in ((short, long, same, other), (long, short, same, other)):
        grounds = [[made_line("AdamW", each, bad), made_line("Anon γ 1", each, good)] for each in order]
        grounds[order.index(long)] = [made_line("AdamW", long, good), made_line("Anon γ 1", long, bad)]
        (found,) = _across.across(grounds, ("AdamW",))
        assert [test.verdict for test in found.tests] == ["worse", "better"]
        without_long = [each for each in grounds if each[0].ground is not long]
        assert [test.verdict for test in _across.across(without_long, ("AdamW",))[0].tests] == ["better", "better"]


def scaled(line: _report.Line) -> _report.Line:
    return replace(line, settings={**line.settings, "lr_scale": "tensor"})


def test_of_equally_long_runs_those_with_most_seeds_count() -> None:
    """Else a subset of the seeds would stand for all; lr_scale is no other method at gamma 1."""
    good, bad = [1.0, 1.01, 1.02, 1.03], [2.0, 2.01, 2.02, 2.03]
    a, b = another("a", metric=LOSS), another("b", metric=LOSS)
    few = [made_line("AdamW", a, bad[:3]), made_line("Anon γ 1", a, good[:3])]
    many = [made_line("AdamW", a, good), scaled(made_line("Anon γ 1", a, bad))]
    lopsided = [made_line("AdamW", a, bad), made_line("Anon γ 1", a, good[:3])]
    other = [made_line("AdamW", b, bad), made_line("Anon γ 1", b, good)]
    for first in (few, lopsided):
        for grounds in ([first, many, other], [many, first, other]):
            (found,) = _across.across(grounds, ("AdamW",))
            assert sorted(test.verdict for test in found.tests) == ["better", "worse"]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_method_is_what_was_tuned_as_all_were(seeds: int) -> None:
    """And not the same with other trials of the weight decay, also where that has more seeds."""
    good, bad = [1.0, 1.01, 1.02], [2.0, 2.01, 2.02]
    grounds = []
    for name in "ab":
        ground = another(name, metric=LOSS)
        usual = made_line("Anon γ 1", ground, bad[:seeds])
        gentler = replace(made_line("Anon γ 1", ground, good), label="Anon γ 1, less decay")
        grounds.append([made_line("AdamW", ground, [1.5, 1.51, 1.52]), usual, gentler])
    assert [each.ahead for each in _across.across(grounds, ("AdamW",))] == ([0] if seeds > 1 else [])


def test_gammas_with_and_without_lr_scale_are_two_methods() -> None:
    good, bad = [1.0, 1.01, 1.02], [2.0, 2.01, 2.02]
    grounds = []
    for name in "ab":
        ground = another(name, metric=LOSS)
        theirs, plain, other = (
            made_line("SGDM", ground, bad),
            *(made_line("Anon γ 0", ground, x) for x in (good, bad)),
        )
        grounds += [[theirs, plain], [theirs, scaled(other)]]
    plain, other = _across.across(grounds, ("SGDM",))
    assert (plain.method.label, plain.ahead) == ("γ 0", 2)
    assert (other.method.label, other.ahead) == ("γ 0 with lr_scale", 0)
    panels = {"a": grounds[0]}  # shows the one without
    assert overview.summed_up([plain, other], panels).count("γ 0") == 1


def test_the_ground_of_the_choice_has_no_say() -> None:
    good, bad = [1.0, 1.01, 1.02], [2.0, 2.01, 2.02]
    (_, final), confirming = _grounds.settled(False), _grounds.confirmed(False)
    tied = next(each.ground for each in confirming if each.ground.network == final.ground.network)
    grounds = [
        [made_line("AdamW", each, bad), made_line("Anon γ 1", each, good)]
        for each in (another("a", metric=LOSS), final.ground)
    ]
    assert _across.across(grounds, ("AdamW",)) == []
    grounds.append([made_line("AdamW", tied, good), made_line("Anon γ 1", tied, bad)])
    (found,) = _across.across(grounds, ("AdamW",))
    assert [test.verdict for test in found.tests] == ["better", "worse"]


def test_small_differences_add_up_over_tasks() -> None:
    """Each task is a tie with t = 1.2247 and 4 degrees of freedom: p = 0.288, z = 1.063."""
    low, high = [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]
    a, b, c, d = (another(name, metric=ACCURACY if name in "bd" else LOSS) for name in "abcd")
    three = [
        [made_line("AdamW", a, high), made_line("Anon γ 1", a, low), made_line("Anon γ 0", a, low)],
        [made_line("AdamW", b, low), made_line("Anon γ 1", b, high)],
        [made_line("AdamW", c, high), made_line("Anon γ 1", c, low)],
    ]
    others = [
        [made_line("AdamW", d, high), made_line("Anon γ 1", d, low[:1])],  # one seed
        [made_line("AdamW", a, low), made_line("Anon γ 1", a, high)],  # of a later study
    ]
    (found,) = _across.across([*three, *others], ("AdamW", "SGDM"))  # gamma 0 is on one task alone
    p, better = found.summed()
    assert better
    assert p == pytest.approx(0.0656, rel=1e-2)  # z = 1.063 sqrt 3
    assert found.sentence() == f"γ 1 is ahead of AdamW on 3 of 3 tasks (in sum level, p = {p:.2g})"
    assert found.row() == ["Anon γ 1", "AdamW", "3", "3", "0 / 3 / 0", f"level, p = {p:.2g}"]
    assert _across.section("Over all", [found]).lines[1:] == [found.row()]
    zipf = [replace(line, ground=replace(a, name="zipf")) for line in three[0]]
    lead = [[lines[0], replace(lines[1], settings={"gamma": 1.5})] for lines in (zipf, *three[1:])]
    (without,) = _across.across(lead, ("AdamW", "SGDM"))
    assert len(without.tests) == 2, "not on the task that it was found on"

    against_it = [made_line("AdamW", d, high), made_line("Anon γ 1", d, low)]
    (weaker,) = _across.across([*three, against_it], ("AdamW", "SGDM"))
    assert (weaker.ahead, len(weaker.tests)) == (3, 4)
    assert weaker.summed() == (pytest.approx(0.288, rel=1e-2), True)  # z = 2 / sqrt 4 times 1.063


def test_divergence_counts_over_tasks_too() -> None:
    fine, lost = [1.0, 2.0, 3.0], [None, None, None]
    met = {"a": (fine, lost), "b": (fine, fine), "c": (lost, lost), "d": (fine, [1.0, None, None])}
    grounds = []
    for name, (theirs, ours) in met.items():
        ground = another(name, metric=LOSS)
        grounds.append([made_line("SGDM", ground, theirs), made_line("Anon γ 0", ground, ours)])
    (found,) = _across.across(grounds, ("AdamW", "SGDM"))
    assert [test.verdict for test in found.tests] == ["worse", "tie", "worse"]
    assert found.summed()[0] < 1e-5
    assert found.sentence().startswith("γ 0 is ahead of SGDM on 0 of 3 tasks (in sum worse, p = ")
    assert found.row()[-1].startswith("worse, p = ")


@pytest.mark.parametrize("lost", [1, 0])
def test_whoever_loses_more_runs_is_not_better_for_the_rest(lost: int) -> None:
    """Two good seeds that are left do not make up for the third; a loss on top of worse ones changes nothing."""
    loss = replace(GROUND, metric=LOSS)
    good, bad = [1.0, 1.01, 1.02][lost:] + [None] * lost, [2.0, 2.01, 2.02]
    ours, theirs = made_line("Anon γ 1", loss, good), made_line("AdamW", loss, bad)
    other = made_line("Anon γ 1", another("other", metric=LOSS), bad), made_line("AdamW", loss, bad)
    (found,) = _across.across([[ours, theirs], other], ("AdamW",))
    assert _report.against(ours, theirs) == ("tie" if lost else "better")
    assert _report.against(theirs, ours) == ("tie" if lost else "worse")
    assert (found.tests[0].p == 1.0) == bool(lost)
    worse = made_line("Anon γ 1", loss, [3.0, 3.01, None])
    assert _report.against(worse, theirs) == "worse"


def test_what_two_studies_report_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = (contender("AdamW"), contender("Anon γ 1"))
    theirs = made_study(*pair)
    results = results_of(tmp_path / "guards", {each.label: [1, 2, 0] for each in pair})
    for job in theirs.stages[-1].jobs(results):
        results.add(record(job, 5 + job.seed % 10))
    (tmp_path / "length").mkdir()
    (tmp_path / "length" / "runs.jsonl").touch()
    monkeypatch.setattr(overview, "load", {"guards": theirs, "length": replace(theirs, builds_on=("guards",))}.get)
    panels, sections = overview.collected(overview.read(tmp_path))
    assert list(panels) == ["small"]
    assert len(sections) == 1


def test_what_a_later_study_adds_to_a_ground_is_shown_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adamw, low, high = (contender(label) for label in ("AdamW", "Anon γ 1", "Anon γ 1.5"))
    first, later = made_study(adamw, high), replace(made_study(adamw, high, low), builds_on=("guards",))
    theirs = results_of(tmp_path / "guards", {each.label: [1, 2, 0] for each in (adamw, high)})
    for job in first.stages[-1].jobs(theirs):
        theirs.add(record(job, 5 + job.seed % 10))
    ours = results_of(tmp_path / "length", {low.label: [1, 2, 0]})
    for job in report(lambda _: [low], GROUND).jobs(ours):
        ours.add(record(job, 7 + job.seed % 10))
    monkeypatch.setattr(overview, "load", {"guards": first, "length": later}.get)
    panels, (section,) = overview.collected(overview.read(tmp_path))
    assert [line.label for line in panels["small"]] == ["AdamW", "Anon γ 1.5", "Anon γ 1"]
    assert section.lines[1][0] == "Anon γ 1"


def test_each_gamma_is_summed_up_against_its_kin() -> None:
    """SGDM near 0, AdamW from above 0.5 on; only gammas that the panels show."""
    made = [
        _across.Across(_across.Method(gamma, False), name, [_across.Test(0.5, True, "tie")] * 2)
        for gamma in (0.0, 0.8, 1.0)
        for name in ("AdamW", "SGDM")
    ]
    panels = {"a": [made_line("Anon γ 0", GROUND, [1.0]), made_line("Anon γ 1", GROUND, [1.0])]}
    said = overview.summed_up(made, panels)
    assert said.count(";") == 1
    assert "γ 0 is ahead of SGDM on 2 of 2" in said
    assert "γ 1 is ahead of AdamW on 2 of 2" in said
    assert overview.summed_up([], panels) == ""


@pytest.mark.parametrize("line", ["no JSON", "{}", "3"])
def test_a_file_that_no_study_wrote_is_named(line: str, tmp_path: Path) -> None:
    runs = tmp_path / "results" / "guards" / "runs.jsonl"
    runs.parent.mkdir(parents=True)
    runs.write_text(f"{line}\n")
    for command in (["results"], ["study", "guards", "--list"]):
        found = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "results")])
        assert found.exit_code == 2
        assert "line 1 of" in found.output
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["guards"]


def test_without_reports_there_is_no_overview(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["results", "--out", str(tmp_path / "results")])
    assert found.exit_code == 2
    assert "there is no report in" in found.output
