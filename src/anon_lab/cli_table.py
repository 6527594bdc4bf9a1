"""The command that makes the paper's tables anew: `anon table`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from anon_lab.console import check_folder, fail, interruptible, writing

app = typer.Typer()


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="The table's name; a wrong one lists them.")],
    size: Annotated[
        Literal["tiny", "small", "full"], typer.Option(help="full is the paper's; tiny shows that all works.")
    ] = "small",
    data: Annotated[Path | None, typer.Option(help="Where the files lie.", show_default="the usual places")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of each run.", show_default="the size's")] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the runs and NAME.json, .html and .png (NAME-tiny, NAME-full at these sizes); "
            "what is there is not trained again."
        ),
    ] = Path("out/tables"),
    together: Annotated[
        int | None, typer.Option(min=1, help="Runs that train at once.", show_default="the size's")
    ] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="Precision of the loss.", show_default="bf16 on a GPU")
    ] = None,
    graph: Annotated[
        bool | None,
        typer.Option("--graph/--no-graph", help="Replay steps as a CUDA graph.", show_default="on a GPU, if possible"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:1.", show_default="a GPU where there is one")
    ] = None,
) -> None:
    """Train what a table of the paper needs, and show its numbers beside the paper's; goes on where it stopped."""
    check_folder(out)
    with interruptible(), writing(out):
        from rich.console import Console

        from anon_lab import launch, tables, tasks

        order = tables.Order(size, out, data, seeds, together, bf16, graph)
        try:
            with launch.place(device) as where:
                for path in tables.run(name, order, where, Console(quiet=where.rank > 0)):
                    typer.echo(path)
        except (ValueError, tasks.DataMissing, launch.Conflict) as error:
            raise fail(str(error)) from None
