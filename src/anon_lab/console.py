"""What every command shares: how it fails, how it is interrupted, and where it may write."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


def fail(sentence: str) -> typer.Exit:
    """Print one sentence; raise what this returns to end the command with status 2."""
    typer.echo(f"anon: {sentence}", err=True)
    return typer.Exit(2)


def check_folder(out: Path) -> None:
    """Refuse, before any work, a folder that could not be written to."""
    for path in (out, *out.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise fail(f"--out must be a folder, but {path} is a file")
            if not os.access(path, os.W_OK):
                raise fail(f"--out must be a folder that can be written to, but {path} cannot")
            return


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends a command with one sentence and the status that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("anon: interrupted", err=True)
        raise typer.Exit(130) from None
