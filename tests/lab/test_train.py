"""The loop: schedules, folders, resuming to the bit after any crash, several processes, several runs at once."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.text import Text
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typer.testing import CliRunner

from anon_lab import launch, optimizers, steps, tasks
from anon_lab.cli import app
from anon_lab.run import MovingAverage, Run
from anon_lab.run_folder import RunFolder
from anon_lab.schedule import lr_share
from anon_lab.settings import Settings
from anon_lab.tasks import Metric, Recipe
from anon_lab.tasks._images import ACCURACY
from anon_lab.train import Every, drive

CPU = torch.device("cpu")
RECIPE = Recipe(batch_size=40, steps=60, warmup=0.1, clip=1.0, weight_decay=0.01, ema=0.9)
SETTINGS = Settings("digits", "Anon", lr=1e-2, recipe=RECIPE, hyper={"gamma": 1.1}, evaluations=4)


def quiet() -> Console:
    return Console(quiet=True)


def train(out: Path, settings: Settings = SETTINGS, resume: bool = False) -> list[dict]:
    plan = launch.Plan(out, resume=resume, checkpoint_every=16)
    return launch.launch(tasks.load("digits"), [settings], plan, launch.Place(CPU), quiet())


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in RunFolder(folder).records()]


class TestSchedule:
    def test_cosine_by_hand(self):
        recipe = Recipe(batch_size=1, warmup=0.25, final_lr=0.2)
        shares = [lr_share(step, 8, recipe) for step in range(8)]
        rest = [0.2 + 0.4 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]
        assert shares == pytest.approx([0.5, 1.0, *rest])

    def test_steps_by_hand(self):
        recipe = Recipe(batch_size=1, schedule="step", milestones=(0.5, 0.75), drop=0.1)
        assert [lr_share(step, 8, recipe) for step in range(8)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
        for wrong, words in (((), "but is none"), ((0.5, 1.5), "between 0 and 1")):
            with pytest.raises(ValueError, match=f"milestones must be .*{words}"):
                replace(recipe, milestones=wrong)

    def test_constant_after_warmup(self):
        recipe = Recipe(batch_size=1, schedule="constant", warmup=0.5)
        assert [lr_share(step, 4, recipe) for step in range(4)] == [0.5, 1, 1, 1]


def test_run_leaves_a_whole_folder(tmp_path):
    long = replace(SETTINGS, recipe=replace(RECIPE, steps=300))
    (result,) = train(tmp_path, long)
    folder = tmp_path / "seed-0"
    assert result["evaluation"]["accuracy"] > 85
    assert json.loads((folder / "result.json").read_text()) == result
    config = json.loads((folder / "config.json").read_text())
    assert Settings.from_json(config["settings"]) == long
    assert {"torch", "anon-optim", "python"} <= set(config["versions"])
    steps = [record["step"] for record in RunFolder(folder).records()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 300
    evaluated = [record["step"] for record in RunFolder(folder).records() if record.get("evaluation")]
    assert evaluated == [75, 150, 225, 300]
    assert set(load_file(folder / "weights.safetensors")) == set(tasks.load("digits").model().state_dict())
    assert not (folder / "checkpoint.pt").exists()
    assert list((folder / "tensorboard").iterdir())
    whole = json.loads((tmp_path / "result.json").read_text())
    assert whole["mean"] == result["evaluation"]["accuracy"]


def test_weights_saved_are_those_evaluated(tmp_path):
    (result,) = train(tmp_path)
    task = tasks.load("digits")
    net = task.model()
    net.load_state_dict(load_file(tmp_path / "seed-0" / "weights.safetensors"))
    assert task.evaluate(net, "test", CPU) == result["evaluation"]


# What is put in front of a training process so that it dies, by SIGKILL, at a chosen moment.
MOMENTS = {
    "while training": """
take = steps.Steps.take
def dying(self):
    take(self)
    if self._taken == 41: die()
steps.Steps.take = dying
""",
    "while the first checkpoint is written": """
save = torch.save
def dying(state, file):
    save(state, file)
    file.truncate(file.tell() // 2)
    file.flush()
    die()
torch.save = dying
""",
    "while a later checkpoint is written": """
save, calls = torch.save, []
def dying(state, file):
    save(state, file)
    calls.append(0)
    if len(calls) == 3:
        file.truncate(file.tell() // 2)
        file.flush()
        die()
torch.save = dying
""",
    "between training and the checkpoint": """
save, calls = run_folder.RunFolder.save, []
def dying(self, state):
    calls.append(0)
    if len(calls) == 3: die()
    save(self, state)
run_folder.RunFolder.save = dying
""",
    "between the checkpoint and training": """
save, calls = run_folder.RunFolder.save, []
def dying(self, state):
    save(self, state)
    calls.append(0)
    if len(calls) == 3: die()
run_folder.RunFolder.save = dying
""",
    "after the last step": """
def dying(self, result): die()
run_folder.RunFolder.finish = dying
""",
}

PROCESS = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
from pathlib import Path
from anon_lab import run_folder, steps
import test_train
torch.set_num_threads(1)
def die(): os.kill(os.getpid(), signal.SIGKILL)
{moment}
test_train.train(Path({out!r}))
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("undisturbed")
    train(out)
    return out / "seed-0"


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_run_goes_on_to_the_same_bits(moment, undisturbed, tmp_path):
    code = PROCESS.format(tests=str(Path(__file__).parent), moment=MOMENTS[moment], out=str(tmp_path))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    folder = tmp_path / "seed-0"
    assert not (folder / "result.json").exists()
    train(tmp_path, resume=True)
    assert (folder / "weights.safetensors").read_bytes() == (undisturbed / "weights.safetensors").read_bytes()
    assert losses(folder) == losses(undisturbed)
    assert not list(folder.glob(".*"))


def test_interrupted_command_keeps_its_place(undisturbed, tmp_path):
    """Ctrl-C ends the command with 130 after the step it was in; --resume finishes the same run."""
    moment = """
take = steps.Steps.take
def interrupting(self):
    take(self)
    if self._taken == 41: os.kill(os.getpid(), signal.SIGINT)
steps.Steps.take = interrupting
"""
    code = PROCESS.format(tests=str(Path(__file__).parent), moment=moment, out=str(tmp_path))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "KeyboardInterrupt" in process.stderr
    assert torch.load(tmp_path / "seed-0" / "checkpoint.pt", weights_only=True)["runs"][0]["step"] == 41
    train(tmp_path, resume=True)
    weights = (tmp_path / "seed-0" / "weights.safetensors").read_bytes()
    assert weights == (undisturbed / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("optimizer", ["SGDM", "AdamW"])
def test_baselines_resume_to_the_same_bits_too(optimizer, tmp_path):
    settings = replace(SETTINGS, optimizer=optimizer, hyper={})
    train(tmp_path / "whole", settings)
    task = tasks.load("digits")
    folder = RunFolder(tmp_path / "parts" / "seed-0")
    folder.open({"settings": settings.as_json()})

    class Enough(Exception):
        pass

    def stop(run, record):
        if record["step"] > 20:
            raise Enough

    with pytest.raises(Enough):
        drive([Run(settings, task, CPU)], [folder], Every(log=1, checkpoint=16), stop)
    train(tmp_path / "parts", settings, resume=True)
    whole, parts = (tmp_path / part / "seed-0" / "weights.safetensors" for part in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_runs_in_lockstep_equal_runs_alone():
    task = tasks.load("digits")
    wanted = [
        replace(SETTINGS, seed=1),
        replace(SETTINGS, seed=2, lr=3e-3),
        replace(SETTINGS, optimizer="SGDM", hyper={}),
    ]
    together = drive([Run(settings, task, CPU) for settings in wanted])
    for settings, result in zip(wanted, together, strict=True):
        (alone,) = drive([Run(settings, task, CPU)])
        assert result["evaluation"] == alone["evaluation"]
        assert result["loss"] == alone["loss"]


def test_parts_of_a_batch_add_up():
    task = tasks.load("digits")
    (whole,) = drive([Run(SETTINGS, task, CPU)])
    (parts,) = drive([Run(replace(SETTINGS, micro_batch=10), task, CPU)])
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    with pytest.raises(ValueError, match="micro_batch must divide the 40 examples of a batch, but is 7"):
        drive([Run(replace(SETTINGS, micro_batch=7), task, CPU)])


@pytest.mark.parametrize("optimizer", optimizers.names())
def test_every_optimizer_trains_in_the_loop(optimizer):
    entry = optimizers.get(optimizer)
    recipe = Recipe(batch_size=40, steps=40, clip=1.0)
    settings = Settings("digits", optimizer, entry.lr, recipe, hyper={}, evaluations=2)
    if optimizer == "Anon (printed)":  # which at gamma = 1 blows up on this very network
        settings = replace(settings, lr=0.5, hyper={"gamma": 0.0})
    start = Run(settings, tasks.load("digits"), CPU).evaluate()["loss"]
    (result,) = drive([Run(settings, tasks.load("digits"), CPU)])
    assert result["evaluation"]["loss"] < start


def test_lockstep_needs_equal_lengths():
    task = tasks.load("digits")
    shorter = replace(SETTINGS, recipe=replace(RECIPE, steps=50))
    with pytest.raises(ValueError, match=r"same number of steps, but have \[50, 60\]"):
        drive([Run(SETTINGS, task, CPU), Run(shorter, task, CPU)])


def test_runs_interrupted_together_go_on_together(tmp_path):
    """However many at once the resuming command asks for; and a run among them cannot go on alone."""
    task, wanted = tasks.load("digits"), [replace(SETTINGS, seed=seed) for seed in (0, 1)]

    def go(name, runs, together, resume=False):
        plan = launch.Plan(tmp_path / name, resume, together, checkpoint_every=16, tensorboard=False)
        return launch.launch(task, runs, plan, launch.Place(CPU), quiet())

    take = steps.Steps.take

    def interrupting(self):
        take(self)
        if self._taken == 30:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Steps, "take", interrupting)
        with pytest.raises(KeyboardInterrupt):
            go("parts", wanted, together=2)
    with pytest.raises(launch.Conflict, match=r"interrupted together with .*seed-1"):
        go("parts", wanted[:1], together=1, resume=True)
    parts, whole = go("parts", wanted, together=1, resume=True), go("whole", wanted, together=1)
    for one, other in zip(parts, whole, strict=True):
        assert one["evaluation"] == other["evaluation"]
        assert one["loss"] == other["loss"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch.compile itself
def test_compiled_network_trains_alike():
    task = tasks.load("digits")
    (eager,) = drive([Run(SETTINGS, task, CPU)])
    counters.clear()
    (compiled,) = drive([Run(replace(SETTINGS, compile=True), task, CPU)])
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)
    assert counters["stats"]["unique_graphs"] == 1  # of the steps: evaluations have other sizes, and run as written


def test_no_decay_is_no_decay():
    """AdamW's own default is 0.01, which nobody asked for."""
    task, recipe = tasks.load("digits"), replace(RECIPE, weight_decay=0.0, ema=None)
    settings = Settings("digits", "AdamW", 1e-2, recipe)
    for each in (settings, replace(settings, recipe=RECIPE, hyper={"weight_decay": 0})):
        assert [group["weight_decay"] for group in Run(each, task, CPU).optimizer.param_groups] == [0]


def test_averaged_weights_are_torchs_to_the_bit():
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    ours, torchs = MovingAverage(net, 0.9), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for seed in range(4):
        net(torch.randn(8, 5, generator=torch.Generator().manual_seed(seed)))  # moves BatchNorm's buffers
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        ours.update_parameters(net)
        torchs.update_parameters(net)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    for name, value in torchs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_lost_run_ends_and_says_so(tmp_path):
    (result,) = train(tmp_path, replace(SETTINGS, optimizer="SGDM", lr=1e30, hyper={}))
    assert result["diverged"]
    assert result["evaluation"] is None
    assert result["steps"] < 60
    assert json.loads((tmp_path / "result.json").read_text())["mean"] is None


def test_a_run_whose_last_step_ends_it_says_so_too(tmp_path):
    """The loss of its one step is from before the update, and still a number."""
    (result,) = train(
        tmp_path, replace(SETTINGS, optimizer="SGDM", lr=1e30, hyper={}, recipe=SETTINGS.recipe.changed(steps=1))
    )
    assert result["diverged"]
    assert math.isfinite(result["loss"])
    assert result["evaluation"] is None


def test_a_learning_rate_is_a_number():
    for lr in (math.inf, math.nan):
        with pytest.raises(ValueError, match=f"lr must be a finite number, but is {lr}"):
            replace(SETTINGS, lr=lr)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]


def test_two_processes_equal_one(tmp_path):
    """The same command under torchrun: each takes half of a batch, gradients are averaged."""
    command = ["run", "digits", "--optimizer", "Anon", "--lr", "0.003", "--steps", "30", "--batch-size", "40"]
    command += ["--device", "cpu", "--no-tensorboard"]
    anon = str(Path(sys.executable).parent / "anon")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    two = subprocess.run(
        [*TORCHRUN, anon, *command, "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert two.returncode == 0, two.stderr
    one = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "one")])
    assert one.exit_code == 0, one.output
    weights = [load_file(tmp_path / name / "seed-0" / "weights.safetensors") for name in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)
    logged = [losses(tmp_path / name / "seed-0") for name in ("one", "two")]
    assert [step for step, _ in logged[0]] == [step for step, _ in logged[1]]
    assert [loss for _, loss in logged[0]] == pytest.approx([loss for _, loss in logged[1]], rel=1e-4)


class TestCommand:
    def invoke(self, *arguments: str):
        return CliRunner().invoke(app, ["run", "digits", "--steps", "20", "--device", "cpu", *arguments])

    def test_three_seeds(self, tmp_path):
        result = self.invoke("--optimizer", "adamw", "--lr", "0.01", "--seeds", "3", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        assert "mean" in result.output
        whole = json.loads((tmp_path / "result.json").read_text())
        assert whole["seeds"] == [0, 1, 2]
        assert whole["runs"][0]["evaluation"] != whole["runs"][1]["evaluation"]

    def test_guards_from_the_command_line(self, tmp_path):
        for name, guard in (
            ("default", []),
            ("same", ["--set", "guard={'clip': 0.5}"]),
            ("none", ["--set", "guard=none"]),
        ):
            result = self.invoke("--lr", "0.001", *guard, "--out", str(tmp_path / name))
            assert result.exit_code == 0, result.output
        default, same, none = (
            json.loads((tmp_path / name / "result.json").read_text())["mean"] for name in ("default", "same", "none")
        )
        assert default == same != none

    def test_another_run_is_never_overwritten(self, tmp_path):
        assert self.invoke("--out", str(tmp_path)).exit_code == 0
        again = self.invoke("--out", str(tmp_path))
        assert again.exit_code == 2
        assert "already holds a run: go on with --resume" in again.output
        other = self.invoke("--out", str(tmp_path), "--resume", "--lr", "0.5")
        assert other.exit_code == 2
        assert "seed-0 holds another run, in which lr is 0.001, not 0.5\n" in other.output
        longer = self.invoke("--out", str(tmp_path), "--resume", "--batch-size", "50")
        assert "batch_size is 100, not 50" in longer.output
        assert self.invoke("--out", str(tmp_path), "--resume").exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--optimizer", "AdamX"], "AdamX"),
            (["--set", "gamma"], "--set must be name=value, but is 'gamma'"),
            (["--optimizer", "SGDM", "--gamma", "1"], "gamma"),
            (["--option", "model=vgg"], "given model"),
            (["--epochs", "3"], "steps or epochs, not both"),
            (["--clip", "-1"], "clip must be above 0, but is -1"),
            (["--ema", "1"], "ema must be at least 0 and below 1, but is 1"),
            (["--device", "foo"], "such as cpu or cuda:1, but is 'foo'"),
            (["--graph"], "needs a CUDA device"),
            (["--set", "lr=3"], "lr is a setting of its own"),
            (["--optimizer", "Adam", "--set", "betas=0.9"], "float"),
            (["--set", "guard={'clips': 1}"], "clips"),
            (["--lr", "-1"], "-1"),
            (["--optimizer", "AdamW", "--set", "eps=x"], "eps of AdamW must be a number, but is 'x'"),
            (["--data", "nowhere"], "data must not be given for digits, which has its own, but is nowhere"),
            (["--gamma", "nan"], "Invalid gamma: nan"),
            (["--micro-batch", "7"], "micro_batch must divide the 100 examples of a batch, but is 7"),
            (["--batch-size", "100000"], "batch_size must lie between 1 and"),
            (["--milestones", "0.5"], "--milestones are of --schedule step, but the schedule is constant"),
            (["--stacked"], "stacked needs residual networks for small images, which digits has none of here"),
        ],
    )
    def test_mistakes_are_one_sentence_and_leave_nothing(self, arguments, sentence, tmp_path):
        result = self.invoke(*arguments, "--out", str(tmp_path / "run"))
        assert result.exit_code == 2
        assert sentence in result.output
        assert len(result.output.strip().splitlines()) == 1
        assert not list(tmp_path.iterdir())

    def test_every_gamma_and_lr_has_a_folder_of_its_own(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for arguments in ([], ["--gamma", "0"], ["--gamma", "1.5", "--lr", "0.002"], ["--optimizer", "sgdm"]):
            assert self.invoke(*arguments).exit_code == 0
        made = {path.name for path in (tmp_path / "out" / "run").iterdir()}
        names = ("Anon-lr0.001", "Anon-gamma0-lr1", "Anon-gamma1.5-lr0.002", "SGDM-lr0.1")
        assert made == {f"digits-{name}" for name in names}

    def test_corrected_mistake_does_not_block_its_folder(self, tmp_path):
        assert self.invoke("--lr", "-1", "--out", str(tmp_path)).exit_code == 2
        assert self.invoke("--lr", "0.01", "--out", str(tmp_path)).exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "title"),
        [
            (["--optimizer", "SGDM", "--lr", "0.1"], "digits, SGDM at lr 0.1"),
            (["--gamma", "-0.5"], "digits, Anon γ −0.5 at lr 31.6"),
            ([], "digits, Anon γ 1 at lr 0.001"),
        ],
    )
    def test_title_says_what_was_trained(self, arguments, title, tmp_path):
        assert title in [line.strip() for line in self.invoke(*arguments, "--out", str(tmp_path)).output.splitlines()]


@pytest.mark.parametrize(
    ("unit", "metric"),
    [("images", ACCURACY), ("tokens", Metric("loss", "nats per token", higher_is_better=False))],
)
def test_progress_fits_80_columns(unit, metric):
    """However long the run's name: at its end and in the midst of it, with numbers as long as they come."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    label = "out-of-the-way/a-setting-with-many-words-lr-0.003-seed-11 and 14 more (12 of 30)"
    run = SimpleNamespace(task=SimpleNamespace(metric=metric))
    with launch._progress(console, label, 500_000, unit) as watch:
        for step in (200_000, 500_000):
            record = {"step": step, "loss": 10.98765, "lr": 1.234e-4, f"{unit}_a_second": 1_234_567.0}
            watch(run, {**record, "evaluation": {metric.name: 98.7654}})  # pyright: ignore[reportArgumentType]
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    lines = Text.from_ansi(shown.replace("\r", "\n")).plain.strip().splitlines()
    assert f"{label}: 500,000 steps" in "".join(lines[:2])
    assert "…" not in shown
    last = lines[-1]
    for part in ("100%", "loss 10.98", "lr 1.2e-04", f"1,234,567 {unit}/s", f"{metric.name} 98.77", "0:00:00"):
        assert part in last
    assert len(last) <= 80
