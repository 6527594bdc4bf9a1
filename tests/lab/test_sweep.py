"""Sweeps: equal trials whatever happens to the processes, units and splits, and the statistics of the report."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from anon_lab import compare, optimizers, significance, tasks
from anon_lab.cli import app
from anon_lab.contenders import Contender, contender
from anon_lab.launch import Place
from anon_lab.optimizers import Range
from anon_lab.run_folder import RunFolder
from anon_lab.settings import Settings
from anon_lab.steps import Steps
from anon_lab.study import Plan, open_study, running, sampler
from anon_lab.sweep import SEED, Tuning, tune_all
from anon_lab.sweep_folder import Sweep, keep
from anon_lab.tasks import Metric, Recipe, _images

CPU = Place(torch.device("cpu"))
BASE = Settings("digits", "", 0.0, Recipe(batch_size=40, steps=40), evaluations=10)
ACCURACY = Metric("accuracy", "%", higher_is_better=True)


def tuning(out: Path, who: Contender | None = None, base: Settings = BASE, **changes) -> Tuning:
    plan = Plan(**{"trials": 3, "out": out, "checkpoint_every": 16, **changes})
    return Tuning(tasks.load("digits", hold_out=True), base, who or contender("AdamW"), plan, CPU)


def tune(out: Path, who: Contender | None = None, base: Settings = BASE, **changes) -> Tuning:
    one_thread()
    this = tuning(out, who, base, **changes)
    this.go()
    return this


def one_thread() -> None:
    torch.set_num_threads(1)  # sums in another order are other numbers


class TestContender:
    @pytest.mark.parametrize("name", optimizers.names())
    def test_every_optimizer_can_take_part(self, name):
        assert "lr" in contender(name).space

    def test_lr_is_in_gammas_unit(self):
        """1e-2 to 10 at gamma = 0, a thousandth of it at gamma = 1; weight decay the other way."""
        found = {"gamma": 0.5, "lr": 0.2, "weight_decay": 1e-4}
        numbers = contender("Anon").numbers(found)
        assert numbers["lr"] == pytest.approx(0.2 * math.sqrt(1e-3))
        assert numbers["lr"] * numbers["weight_decay"] == pytest.approx(0.2e-4)
        fixed = contender("Anon", {"gamma": -1.0}).numbers({"lr": 0.2, "weight_decay": 1e-4})
        assert fixed["lr"] == pytest.approx(200)
        assert fixed["gamma"] == -1

    def test_tuples_can_be_searched(self):
        betas = ((0.9, 0.99), (0.8, 0.999))
        who = Contender.from_json(json.loads(json.dumps(contender("AdamW", {}, {"betas": betas}).as_json())))
        assert who.space["betas"] == betas
        trial = optuna.create_study(sampler=sampler(0)).ask()
        who.suggest(trial)
        assert who.settings(BASE, trial.params).hyper["betas"] in betas

    def test_best_at_the_end_of_a_range_is_noticed(self):
        who = contender("AdamW", {}, {"lr": Range(1e-4, 1e-2), "weight_decay": Range(0.0, 1.0, log=False)})
        assert who.at_edge({"lr": 1e-3, "weight_decay": 0.5}) == []
        assert who.at_edge({"lr": 9e-3, "weight_decay": 0.01}) == ["lr", "weight_decay"]

    def test_contenders_start_from_the_same_points(self):
        """Of the unit square, each in its own ranges: 1e-5 to 1e-2 and 1e-3 to 1; 1e-3 to 1 and 1e-5 to 1e-2."""
        for number in range(3):
            points = []
            for name in ("AdamW", "SGDM"):
                trial = optuna.create_study(sampler=sampler(number)).ask()
                contender(name).suggest(trial)
                points.append([trial.params["lr"], trial.params["weight_decay"]])
            (lr, decay), (sgd_lr, sgd_decay) = points
            assert sgd_lr == pytest.approx(100 * lr)
            assert sgd_decay == pytest.approx(decay / 100)


# A process that forks a child for each piece of code it is given, all at the same moment: starting Python and torch
# once for all is what keeps these tests short.
FORKS = """
import json, os, signal, sys, traceback
sys.path.insert(0, {tests!r})
from pathlib import Path
from anon_lab import steps
import test_sweep
from test_sweep import *
one_thread()
tasks.load("digits")
optuna.create_study(storage="sqlite://")
def die(): os.kill(os.getpid(), signal.SIGKILL)
def child(code):
    if (pid := os.fork()) == 0:
        try:
            exec(code, globals())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid
children = [child(code) for code in json.load(sys.stdin)]
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]))
"""


def in_children(codes: list[str]) -> tuple[list[int], str]:
    """Exit statuses of processes that run these, and what they complained of."""
    command = [sys.executable, "-c", FORKS.format(tests=str(Path(__file__).parent))]
    process = subprocess.run(command, input=json.dumps(codes), capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout), process.stderr


TAKE = """
take, taken = steps.Steps.take, 0
def dying(self):
    global taken
    take(self)
    taken += 1
    if taken == {when}: die()
steps.Steps.take = dying
"""
# What is put in front of a sweep so that it dies, by SIGKILL, at a chosen moment; how many trials it trains at once;
# and how many steps, of one trial or of a lockstep, are left to take then. Checkpoints are at steps 16 and 32 of 40.
MOMENTS = {
    "inside the second trial": (TAKE.format(when=40 + 37), 1, 8 + 40),
    "inside the first pair": (TAKE.format(when=37), 2, 8 + 40),
    "before the first checkpoint": (TAKE.format(when=40 + 5), 1, 40 + 40),
    "between asking and the folder": ("Tuning._hold = lambda self, numbers: die()", 1, 3 * 40),
    "between the folder and its settings": ("Tuning._suggested = lambda self, claim, group: die()", 1, 3 * 40),
    "between the last step and the study": ("Tuning._tell = lambda self, trial, folder, result: die()", 1, 2 * 40),
}


SHORT = replace(BASE, recipe=replace(BASE.recipe, steps=10), evaluations=2)


@pytest.fixture(scope="module")
def after(tmp_path_factory) -> Path:
    """A folder for each moment, of a sweep that died then; and the folders of workers that shared their trials."""
    out = tmp_path_factory.mktemp("after")
    deaths = [f"{code}\ntune(Path({str(out / when)!r}), together={k})" for when, (code, k, _) in MOMENTS.items()]
    workers = [("one", f"sqlite:///{out}/both.db"), ("two", f"sqlite:///{out}/both.db"), ("both", None), ("both", None)]
    shares = [f"tune(Path({str(out / name)!r}), base=SHORT, trials=10, storage={at!r})" for name, at in workers]
    statuses, complaints = in_children(deaths + shares)
    assert statuses == [-signal.SIGKILL] * len(deaths) + [0] * len(shares), complaints
    return out


@pytest.fixture
def steps_taken(monkeypatch) -> list[int]:
    """A growing list, an entry for each step that is taken in this process."""
    take, taken = Steps.take, []

    def counting(self):
        taken.append(1)
        take(self)

    monkeypatch.setattr(Steps, "take", counting)
    return taken


def outcome(this: Tuning) -> list[tuple]:
    return [(each.number, each.settings, each.value, each.ended) for each in this.tried()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, list[tuple]]:
    """What comes out, by how many trials are trained at once."""
    return {together: outcome(tune(tmp_path_factory.mktemp("whole"), together=together)) for together in (1, 2)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_sweep_goes_on_where_it_stopped(moment, undisturbed, after, steps_taken):
    _, together, left = MOMENTS[moment]
    this = tune(after / moment, together=together)
    assert outcome(this) == undisturbed[together]
    assert len(steps_taken) == left
    assert not running(this.study)
    for number in range(3):
        folder = after / moment / "trials" / "AdamW" / str(number)
        assert [record["step"] for record in RunFolder(folder).records()] == list(range(1, 41))
        assert not (folder / "checkpoint.pt").exists()


def test_processes_share_the_trials(after):
    """Two that share a storage, from two folders, and two that share a folder; started at the same moment."""
    for name, storage in (("one", f"sqlite:///{after}/both.db"), ("both", None)):
        this = tuning(after / name, base=SHORT, trials=10, storage=storage)
        assert len(this.tried()) == 10
        assert len({each.settings["lr"] for each in this.tried()}) == 10
        assert not running(this.study)
    one, two, both = (
        {path.parent.name for path in (after / name).glob("trials/AdamW/*/config.json")}
        for name in ("one", "two", "both")
    )
    assert one.isdisjoint(two)
    assert [len(one | two), len(both)] == [10, 10]


def test_surplus_of_two_that_asked_at_once_is_withdrawn(tmp_path):
    this = tuning(tmp_path, trials=1)
    first, second = this.study.ask().number, this.study.ask().number
    assert not this._hold([second])
    assert [claim.number for claim in this._hold([first])] == [first]
    assert list(running(this.study)) == [first]


def test_trial_belongs_to_one_process(tmp_path):
    this = tuning(tmp_path)
    (claim,) = this._claim()
    assert not tuning(tmp_path)._hold([claim.number])
    claim.lock.release()
    assert tuning(tmp_path)._hold([claim.number])


def test_trials_of_a_machine_that_is_gone_can_be_taken_over(tmp_path):
    storage = f"sqlite:///{tmp_path / 'both.db'}"
    gone = tuning(tmp_path / "gone", base=SHORT, trials=2, storage=storage)
    (claim,) = gone._claim()
    _, settings = gone._suggested(claim, [claim.number])
    here = tune(tmp_path / "here", base=SHORT, trials=2, storage=storage)
    assert len(here.tried()) == 1
    assert list(running(here.study)) == [claim.number]
    here = tune(tmp_path / "here", base=SHORT, trials=2, storage=storage, take_over=True)
    taken = here.tried()
    assert [each.number for each in taken] == [0, 1]
    assert taken[0].settings["lr"] == settings.lr
    gone._train([claim], lambda done, trials: None)  # it was not gone after all: the first answer counts
    assert here.tried() == taken


class TestGivingUp:
    @pytest.mark.parametrize("together", [1, 3])
    def test_behind_the_median_at_the_same_step(self, together, tmp_path):
        this = tune(tmp_path, trials=9, together=together)
        trials = {trial.number: trial for trial in this.study.trials}
        given_up = [each.number for each in this.tried() if each.ended == "given up"]
        assert given_up
        for number in given_up:
            steps = sorted(trials[number].intermediate_values)
            assert 8 <= steps[-1] < 40
            complete = [t for t in trials.values() if t.state.name == "COMPLETE" and t.number < number]
            beside = sorted(trial.intermediate_values[steps[-1]] for trial in complete)
            assert len(beside) >= 4
            middle = (beside[(len(beside) - 1) // 2] + beside[len(beside) // 2]) / 2
            assert max(trials[number].intermediate_values.values()) < middle
        assert len(this.tried()) == 9

    def test_can_be_switched_off(self, tmp_path):
        assert all(each.value is not None for each in tune(tmp_path, trials=6, base=SHORT, prune=False).tried())


def test_diverged_trials_count(tmp_path):
    who = contender("SGDM", {}, {"lr": Range(1e20, 1e30)})
    trials = tune(tmp_path, who).tried()
    assert [each.ended for each in trials] == ["diverged"] * 3
    assert [each.value for each in trials] == [None] * 3


def test_refused_trials_count(tmp_path):
    """At lr * weight_decay >= 1 decoupled decay would turn weights around, which Anon refuses."""
    who = contender("Anon", {"gamma": 1.0}, {"lr": Range(1e-3, 10.0), "weight_decay": Range(1e-3, 1e3)})
    trials = tune(tmp_path, who, base=SHORT, trials=6, together=2).tried()
    refused = [each for each in trials if (each.ended or "").startswith("refused: ")]
    assert len(trials) == 6
    assert 0 < len(refused) < 6
    assert all(each.settings["lr"] * each.settings["weight_decay"] > 1 for each in refused)


def test_another_sweep_in_the_storage_is_not_joined(tmp_path):
    storage = f"sqlite:///{tmp_path / 'both.db'}"
    tuning(tmp_path / "a", storage=storage)
    other = replace(BASE, recipe=replace(BASE.recipe, batch_size=50))
    with pytest.raises(ValueError, match="another sweep called 'sweep', in which batch_size is 40, not 50"):
        tuning(tmp_path / "b", base=other, storage=storage)
    tuning(tmp_path / "b", base=other, storage=storage, name="larger")


@pytest.mark.parametrize("storage", ["nonsense", "sqlite:////nowhere/at/all.db", "oracle://host/name"])
def test_storage_that_cannot_be_opened(storage, tmp_path):
    with pytest.raises(ValueError, match=f"--storage {storage} cannot be opened"):
        open_study(Plan(1, tmp_path, storage=storage), contender("SGD"), BASE, ACCURACY)


def test_only_the_report_sees_the_test_examples(tmp_path, monkeypatch):
    seen = []
    evaluate, stream = _images.InMemory.evaluate, _images.InMemory.stream

    def recording(self, net, split, device):
        seen.append(split)
        return evaluate(self, net, split, device)

    def counting(self, batch_size, seed, *rest):
        seen.append((self.examples(), seed))
        return stream(self, batch_size, seed, *rest)

    monkeypatch.setattr(_images.InMemory, "evaluate", recording)
    monkeypatch.setattr(_images.InMemory, "stream", counting)
    plan, who = Plan(2, tmp_path), [contender("SGDM")]
    console = Console(quiet=True)
    tune_all(tasks.load("digits", hold_out=True), SHORT, who, plan, CPU, console)
    assert set(seen) == {"validation", (800, SEED)}
    seen.clear()
    compare.finish(tasks.load("digits"), Sweep(SHORT, who, plan), 3, CPU, console)
    assert set(seen) == {"test", (1297, 1000), (1297, 1001), (1297, 1002)}


class TestStatistics:
    def test_interval_by_hand(self):
        """Of 1, 2, 3, 4: s^2 = 5/3, and t at 97.5 % for 3 degrees of freedom is 3.1824 in any table."""
        middle, half = significance.interval([1, 2, 3, 4])
        assert middle == 2.5
        assert half == pytest.approx(3.1824 * math.sqrt(5 / 3 / 4), rel=1e-4)

    def test_single_value_has_no_interval(self):
        assert significance.interval([3.0]) == (3.0, None)

    @pytest.mark.parametrize(("shift", "said"), [(2.30, "tie"), (2.31, "better"), (-2.31, "worse")])
    def test_verdict_by_hand(self, shift, said):
        """Two fives with s^2 = 2.5 have a standard error of 1 and 8 degrees of freedom: 2.306 is the border."""
        values = [0.0, 1.0, 2.0, 3.0, 4.0]
        moved = [value + shift for value in values]
        assert significance.verdict(moved, values, ACCURACY) == said
        other = {"better": "worse", "worse": "better", "tie": "tie"}[said]
        assert significance.verdict(moved, values, replace(ACCURACY, higher_is_better=False)) == other

    def test_unequal_spread_by_hand(self):
        """s^2/n of 0.5 and 50 give, after Welch and Satterthwaite, 50.5^2 / (0.5^2 + 50^2) * 4 = 4.08 degrees."""
        calm, wild = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 10.0, 20.0, 30.0, 40.0]
        # t at 97.5 % lies between 2.7764 for 4 degrees and 2.5706 for 5.
        for factor, said in ((2.55, "tie"), (2.79, "better")):
            shift = 18 - factor * math.sqrt(50.5)
            assert significance.verdict(wild, [value + shift for value in calm], ACCURACY) == said

    def test_tasks_add_up_by_hand(self):
        """A two-sided p of 0.0455 is a z of 2, one of 0.3173 of 1: two of 1 make 2/sqrt 2, 2 and -1 make 1/sqrt 2."""
        for tests, p, better in (
            ([(0.0455, True)], 0.0455, True),
            ([(0.0455, False)], 0.0455, False),
            ([(0.3173, True)] * 2, 0.1573, True),
            ([(0.3173, False)] * 4, 0.0455, False),
            ([(0.0455, True), (0.3173, False)], 0.4795, True),
        ):
            assert significance.combined(tests) == (pytest.approx(p, rel=1e-3), better)
        assert significance.combined([(0.2, True), (0.2, False)])[0] == pytest.approx(1.0)

    def test_one_sure_task_leaves_the_others_a_say(self):
        assert significance.combined([(0.0, True), (0.0, False)])[0] == pytest.approx(1.0)
        assert 0 < significance.combined([(0.0, True), (0.3, True)])[0] < 1e-6
        assert significance.combined([(0.0, False), *[(1e-3, True)] * 3])[1]

    def test_equal_means_are_not_better(self):
        for metric in (ACCURACY, replace(ACCURACY, higher_is_better=False)):
            assert not significance.is_better([1.0, 2.0], [2.0, 1.0], metric)

    def test_without_spread_any_difference_counts(self):
        assert significance.verdict([1.0, 1.0], [2.0, 2.0], ACCURACY) == "worse"
        assert significance.verdict([1.0, 1.0], [1.0, 1.0], ACCURACY) == "tie"
        assert significance.verdict([1.0], [2.0, 2.0], ACCURACY) == "tie"

    @pytest.mark.parametrize(
        ("values", "text"), [([90.0, 92.0], "91 ± 13"), ([96.10, 96.12, 96.14], "96.120 ± 0.050"), ([5.0], "5")]
    )
    def test_digits_follow_the_interval(self, values, text):
        assert compare.with_interval(values) == text


class TestCommands:
    SWEEP = ("sweep", "digits", "--steps", "10", "--evaluations", "2", "--device", "cpu")

    def invoke(self, *arguments: str):
        return CliRunner().invoke(app, arguments)

    def test_from_sweep_to_report(self, tmp_path):
        out = ("--out", str(tmp_path))
        first = self.invoke(*self.SWEEP, "--optimizer", "adamw", "--trials", "2", *out)
        assert first.exit_code == 0, first.output
        assert f"next: anon compare {tmp_path}" in first.output
        assert "…" not in first.output
        # A contender more and trials more: all get as many.
        arguments = ("--optimizer", "Anon:gamma=1.1,betas=(0.8,0.99)", "--trials", "3", "--together", "2", *out)
        second = self.invoke(*self.SWEEP, *arguments)
        assert second.exit_code == 0, second.output
        assert "…" not in second.output
        assert self.invoke(*self.SWEEP, *arguments).exit_code == 0
        done = self.invoke("compare", str(tmp_path), "--seeds", "3")
        assert done.exit_code == 0, done.output
        assert done.output.strip().endswith("compare.html")
        record = json.loads((tmp_path / "compare.json").read_text())
        assert {each["label"]: len(each["trials"]) for each in record["outcomes"]} == {
            "AdamW": 3,
            "Anon (gamma 1.1, betas (0.8, 0.99))": 3,
        }
        for each in record["outcomes"]:
            assert len(each["values"]) == 3
            assert [result["seed"] for result in each["results"]] == [1000, 1001, 1002]
            assert each["interval"] == pytest.approx(significance.interval(each["values"]))
        fewer = self.invoke(*self.SWEEP, "--optimizer", "AdamW", "--trials", "2", *out)
        assert "--trials must be at least the 3 of before, but is 2" in fewer.output
        other = self.invoke(*self.SWEEP, "--batch-size", "50", "--optimizer", "AdamW", "--trials", "3", *out)
        assert "holds another sweep, in which batch_size is 100, not 50: choose another --out" in other.output
        ranges = self.invoke(*self.SWEEP, "--optimizer", "AdamW", "--range", "lr=1e-3..1", "--trials", "3", *out)
        assert "holds another sweep, in which low is 1e-05, not 0.001" in ranges.output

    def test_sweep_from_before_a_setting_was_added_goes_on(self, tmp_path):
        arguments = (*self.SWEEP, "--optimizer", "AdamW", "--trials", "1", "--out", str(tmp_path))
        assert self.invoke(*arguments).exit_code == 0
        path = tmp_path / "sweep.json"
        record = json.loads(path.read_text())
        del record["base"]["stacked"]
        path.write_text(json.dumps(record))
        (study,) = optuna.get_all_study_names(f"sqlite:///{tmp_path / 'sweep.db'}")
        stored = optuna.load_study(study_name=study, storage=f"sqlite:///{tmp_path / 'sweep.db'}")
        rules = dict(stored.user_attrs["rules"])
        del rules["base"]["stacked"]
        stored.set_user_attr("rules", rules)
        again = self.invoke(*arguments)
        assert again.exit_code == 0, again.output

    def test_report_waits_for_equal_trials(self, tmp_path):
        out = ("--out", str(tmp_path))
        assert self.invoke(*self.SWEEP, "--optimizer", "SGD", "--trials", "1", *out).exit_code == 0
        record = json.loads((tmp_path / "sweep.json").read_text())
        record["plan"]["trials"] = 2
        (tmp_path / "sweep.json").write_text(json.dumps(record))
        result = self.invoke("compare", str(tmp_path))
        assert result.exit_code == 2
        assert "SGD has 1 of 2 trials: let `anon sweep` finish first" in result.output

    def test_password_is_not_written_down(self, tmp_path):
        storage = "postgresql://me:secret@nowhere.invalid/sweeps"
        out = tmp_path / "sweep"
        result = self.invoke(*self.SWEEP, "--optimizer", "SGD", "--storage", storage, "--out", str(out))
        assert result.exit_code == 2
        assert "secret" not in result.output
        assert not out.exists()
        plan = Plan(2, out, storage=storage)
        keep(Sweep(BASE, [contender("SGD")], plan))
        assert "***@nowhere.invalid" in (out / "sweep.json").read_text()
        assert "secret" not in (out / "sweep.json").read_text()

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--optimizer", "AdamX"], "no optimizer is called 'AdamX'; near it: Adam"),
            (["--optimizer", "AdamW:gamma=1"], "AdamW has no setting 'gamma'"),
            (["--optimizer", "AdamW:lr"], "--optimizer must be name=value, but is 'lr'"),
            (["--optimizer", "AdamW:lr=-1"], "Invalid lr: -1"),
            (["--optimizer", "AdamW:lr=x"], "lr of AdamW must be a number, but is 'x'"),
            (["--optimizer", "Anon:gamma=x"], "gamma of Anon must be a number, but is 'x'"),
            (["--optimizer", "Anon", "--range", "gamma=0|x"], "gamma of Anon must be a number, but is 'x'"),
            (["--optimizer", "AdamW", "--data", "."], "data must not be given for digits"),
            (["--optimizer", "AdamW", "--optimizer", "adamw"], "names AdamW 2 times"),
            (["--optimizer", "AdamW", "--range", "lr=1"], "--range must be [NAME:]setting=low..high"),
            (["--optimizer", "AdamW", "--range", "lr=1..0.1"], "--range must be [NAME:]setting=low..high"),
            (["--optimizer", "AdamW", "--range", "SGD:lr=0.1..1"], "optimizer that is compared (AdamW), but names SGD"),
            (["--optimizer", "AdamW", "--range", "momentum=0.1..1"], "AdamW has no setting 'momentum'"),
        ],
    )
    def test_mistakes_are_one_sentence(self, arguments, sentence, tmp_path):
        result = self.invoke(*self.SWEEP, *arguments, "--out", str(tmp_path / "new"))
        assert result.exit_code == 2
        assert sentence in result.output
        assert len(result.output.strip().splitlines()) == 1
        assert not (tmp_path / "new").exists()

    def test_no_sweep_to_compare(self, tmp_path):
        result = self.invoke("compare", str(tmp_path))
        assert result.exit_code == 2
        assert "holds no sweep: run `anon sweep` first" in result.output

    def test_help_names_only_what_there_is(self):
        assert "--out" in self.invoke("sweep", "--help").output
        assert "--out" not in self.invoke("compare", "--help").output

    def test_file_in_the_place_of_a_sweep(self, tmp_path):
        (tmp_path / "sweep").write_text("mine")
        result = self.invoke("compare", str(tmp_path / "sweep"))
        assert result.exit_code == 2
        assert result.stderr == f"anon: sweep must be a folder, but {tmp_path / 'sweep'} is a file\n"

    def test_torchrun_is_not_needed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
        result = self.invoke(*self.SWEEP, "--optimizer", "SGD", "--out", str(tmp_path))
        assert "anon sweep needs no torchrun" in result.output
