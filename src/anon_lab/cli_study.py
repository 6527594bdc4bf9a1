"""The commands that carry out studies and sum them up: `anon study` and `anon results`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from anon_lab.console import AGAIN, check_folder, fail, interruptible, writing

app = typer.Typer()


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="The study's name; a wrong one lists them.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with cifar10/, wikipedia/ or gpt/ (a text), inception/.", show_default="$ANON_DATA, ./data"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Its folder NAME takes the results and the report; what is there is not trained again.")
    ] = Path("results"),
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Start no run that would end later; 0 only writes the report.", show_default="no end"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:1.", show_default="a GPU where there is one")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help='Runs whose "stage | task | contender" has this in it; * and ? stand for anything; may be repeated.'
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the stages and what is left of them; train nothing.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Seconds on a CPU, to see that all works.")] = False,
) -> None:
    """Answer a question by many runs, in an order in which every part says something; goes on where it stopped."""
    check_folder(out)
    if data is not None:
        if not data.is_dir():
            raise fail(f"--data must be a folder, but {data} is none")
        os.environ["ANON_DATA"] = str(data)  # where every task of a study looks for its own
    with interruptible(AGAIN), writing(out):
        from rich.console import Console

        from anon_lab import launch, studies, tasks

        console = Console()
        try:
            if show:
                console.print(studies.plan(name, out, tiny, tuple(only or ())))
                return
            with launch.place(device) as where:
                for path in studies.run(name, studies.Order(out, minutes, tuple(only or ())), where, console, tiny):
                    typer.echo(path)
        except (ValueError, tasks.DataMissing) as error:
            raise fail(str(error)) from None


@app.command()
def results(
    out: Annotated[
        Path, typer.Option(help="Folder with the studies' folders; takes README.md and overview.svg.")
    ] = Path("results"),
) -> None:
    """Show what all studies have found so far: where Anon is better than AdamW and SGDM, level, or worse (seconds)."""
    check_folder(out)
    with interruptible(), writing(out):
        from rich.console import Console

        from anon_lab.studies import overview

        try:
            for path in overview.save(out, Console()):
                typer.echo(path)
        except ValueError as error:
            raise fail(str(error)) from None
