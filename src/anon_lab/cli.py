"""The command line: one `anon` command for each thing the laboratory does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("anon: the command needs more packages: pip install 'anon-optim[lab]'") from None

app = typer.Typer(help="Measure, compare and draw optimizers.", no_args_is_help=True, add_completion=False)


def _fail(sentence: str) -> typer.Exit:
    typer.echo(f"anon: {sentence}", err=True)
    return typer.Exit(2)


def _check_folder(out: Path) -> None:
    """Refuse, before any work, a folder that could not be written to."""
    for path in (out, *out.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise _fail(f"--out must be a folder, but {path} is a file")
            if not os.access(path, os.W_OK):
                raise _fail(f"--out must be a folder that can be written to, but {path} cannot")
            return


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a command with one sentence and the status that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("anon: interrupted", err=True)
        raise typer.Exit(130) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        from anon_optim import __version__

        typer.echo(f"anon-optim {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.html, demo.json and demo.svg.")] = Path("out/demo"),
    seeds: Annotated[
        int | None,
        typer.Option(help="Fresh seeds to report on, at least 3.", show_default="10; 3 with --quick"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A look in seconds, too short to judge by.")] = False,
) -> None:
    """Train a small network with SGDM, AdamW and Anon at five gammas, and draw what came out (about a minute)."""
    if seeds is not None and seeds < 3:
        raise _fail(f"--seeds must be at least 3, but is {seeds}")
    _check_folder(out)
    with _interruptible():
        # Imported late: torch takes seconds, which --help need not wait for.
        from dataclasses import replace

        from rich.console import Console

        from anon_lab import demo, page

        plan = demo.QUICK if quick else demo.FULL
        if seeds is not None:
            plan = replace(plan, seeds=seeds)
        console = Console()
        results = demo.run(plan, console)
        console.print(demo.table(results))
        try:
            path = page.save(results, out)
        except OSError as error:
            raise _fail(f"could not write to {out}: {error.strerror}") from None
        console.print(f"{results.wall_s:.0f} s; the page is")
        typer.echo(path)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Time and weigh optimizer steps on this machine, as ratios to torch's fused AdamW (--help for options).",
)
def bench(context: typer.Context) -> None:
    with _interruptible():
        from anon_lab.bench import main  # which parses by itself, for machines without typer

        main(context.args)
