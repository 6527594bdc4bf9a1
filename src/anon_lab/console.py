"""What every command shares: how it fails, how it is interrupted, and where it may write."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from anon_lab.files import unfit

AGAIN = "the same command goes on where it stopped"


def fail(sentence: str) -> typer.Exit:
    """Print one sentence; raise what this returns to end the command with status 2."""
    typer.echo(f"anon: {sentence}", err=True)
    return typer.Exit(2)


def check_folder(out: Path, argument: str = "--out") -> None:
    """Refuse, before any work, a folder that could not be written to."""
    if (wanted := unfit(out)) is not None:
        raise fail(f"{argument} must be {wanted}")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """What the system refuses after all, such as a full disk, ends a command with one sentence."""
    try:
        yield
    except BrokenPipeError:  # whoever read what the command prints is gone: no matter of files, and typer's to end
        raise
    except OSError as error:
        file = error.filename2 or error.filename or out  # the second is what a file was to be renamed to
        raise fail(f"could not read or write {file}: {error.strerror or error}") from None


@contextmanager
def interruptible(then: str = "") -> Iterator[None]:
    """Ctrl-C ends a command with one sentence, which may say how to go on, and the status that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"anon: interrupted{then and f'; {then}'}", err=True)
        raise typer.Exit(130) from None
