"""What all commands share: a folder that cannot be written to, what the system refuses, and how they are started."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from anon_lab import explore
from anon_lab.cli import app
from anon_lab.console import interruptible, writing
from anon_optim import __version__

COMMANDS = (
    "demo --quick",
    "figure beale --quick",
    "explore",
    "adaptivity --quick",
    "run digits --steps 5",
    "sweep digits --optimizer AdamW --steps 5",
    "table ablation --size tiny",
    "study gpt2 --tiny",
)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to, not even root")
@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_folder_is_refused_before_any_work(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--out", "/proc/x"])
    assert result.exit_code == 2
    assert result.output == "anon: --out must be a folder that can be written to, but /proc cannot\n"


def test_checking_a_folder_leaves_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "nothing", "--out", str(tmp_path / "new")])
    assert "task must be one of" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run digits --steps 5", "sweep digits --optimizer AdamW --steps 5 --trials 1"])
def test_what_the_system_refuses_is_one_sentence(command: str, tmp_path: Path) -> None:
    taken = {"run": "seed-0/config.json", "sweep": "sweep.json"}[command.split()[0]]
    (tmp_path / taken).mkdir(parents=True)  # nothing can be renamed onto a folder, nor be read from it
    result = CliRunner().invoke(app, [*command.split(), "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output == f"anon: could not read or write {tmp_path / taken}: Is a directory\n"


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(out: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(explore, "save", full)
    result = CliRunner().invoke(app, ["explore", "--out", str(tmp_path)])
    assert (result.exit_code, result.output) == (
        2,
        f"anon: could not read or write {tmp_path}: No space left on device\n",
    )


def test_closed_pipe_is_no_matter_of_files(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), writing(tmp_path):
        raise BrokenPipeError


def test_the_package_can_be_run_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "anon_lab", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"anon-optim {__version__}\n")


@pytest.mark.parametrize(("then", "said"), [("", "anon: interrupted"), ("go on", "anon: interrupted; go on")])
def test_ctrl_c_says_how_to_go_on(then: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, interruptible(then):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == f"{said}\n"
