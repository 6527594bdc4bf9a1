"""Every example runs as a user would run it, without a warning, and its loss has fallen."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    done = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout or "Anon" in done.stdout


def test_docstrings_hold():
    import doctest

    from anon_optim import _anon, _decay

    for module in (_anon, _decay):
        assert doctest.testmod(module).failed == 0
