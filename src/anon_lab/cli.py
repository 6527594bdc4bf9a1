"""The command line: one `anon` command for each thing the laboratory does."""

from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("anon: the command needs more packages: pip install 'anon-optim[lab]'") from None

from anon_lab import cli_study, cli_table, cli_train
from anon_lab.console import check_folder as _check_folder
from anon_lab.console import fail as _fail
from anon_lab.console import interruptible as _interruptible
from anon_lab.console import writing as _writing

app = typer.Typer(
    help="Measure, compare and draw optimizers.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every command
)
app.add_typer(cli_train.app)
app.add_typer(cli_table.app)
app.add_typer(cli_study.app)


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
        with _writing(out):
            path = page.save(results, out)
        console.print(f"{results.wall_s:.0f} s; the page is")
        typer.echo(path)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="The figure's name, or all; a wrong name lists them.")],
    out: Annotated[Path, typer.Option(help="Folder for NAME.png, NAME.pdf and NAME.json.")] = Path("out/figures"),
    quick: Annotated[bool, typer.Option("--quick", help="A look in seconds, too short to judge by.")] = False,
) -> None:
    """Draw a figure of the paper anew, with its numbers and whether the paper's claim holds (up to minutes each)."""
    _check_folder(out)
    with _interruptible():
        from rich.console import Console

        from anon_lab import figures

        try:
            names = figures.chosen(name)
        except ValueError as error:
            raise _fail(str(error)) from None
        console = Console()
        for each in names:
            with _writing(out):
                paths = figures.run(each, quick, out, console)
            for path in paths:
                typer.echo(path)


@app.command()
def explore(
    out: Annotated[Path, typer.Option(help="Folder for explore.html.")] = Path("out/explore"),
) -> None:
    """Write a page in which to turn Anon's knobs and watch it beside SGDM, Adam and AMSGrad (seconds)."""
    _check_folder(out)
    with _interruptible():
        from anon_lab import explore

        with _writing(out):
            path = explore.save(out)
        typer.echo(path)


@app.command()
def optimizers(
    json: Annotated[bool, typer.Option("--json", help="As JSON, with all settings and search ranges.")] = False,
) -> None:
    """List every optimizer by name: its source, what it needs, its learning rates and its paper."""
    from anon_lab import optimizers

    if json:
        from json import dumps

        typer.echo(dumps(optimizers.as_json(), indent=1))
        return
    from rich.console import Console

    Console().print(optimizers.table())


@app.command()
def adaptivity(
    out: Annotated[Path, typer.Option(help="Folder for adaptivity.html, .png and .csv.")] = Path("out/adaptivity"),
    optimizers: Annotated[
        str | None, typer.Option(help="Names, with commas between them.", show_default="all that are installed")
    ] = None,
    gammas: Annotated[str, typer.Option(help="Anon's, with commas between them.")] = "-2,-1.5,-1,-0.5,0,0.5,1,1.5,2",
    quick: Annotated[bool, typer.Option("--quick", help="A shorter history of gradients.")] = False,
) -> None:
    """Measure the adaptivity of every optimizer of torch and pytorch_optimizer, and of Anon (a few minutes)."""
    try:
        numbers = [float(gamma) for gamma in gammas.split(",")]
    except ValueError:
        raise _fail(f"--gammas must be numbers with commas between them, but is {gammas!r}") from None
    _check_folder(out)
    with _interruptible():
        import sys

        from rich.console import Console

        from anon_lab import adaptivity, adaptivity_page

        todo = adaptivity.candidates(numbers)
        if optimizers is not None:
            try:
                todo = adaptivity.chosen(optimizers.split(","), todo)
            except ValueError as error:
                raise _fail(str(error)) from None
        console = Console(file=sys.stdout)  # by hand, because some optimizers print and are kept from it
        results = adaptivity.run(todo, adaptivity.QUICK_STEPS if quick else adaptivity.STEPS, console)
        for table in adaptivity.tables(results):
            console.print(table)
        with _writing(out):
            paths = adaptivity_page.save(results, out)
        console.print(f"{results.wall_s:.0f} s; the page is the last of")
        for path in paths:
            typer.echo(path)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Time and weigh optimizer steps on this machine, as ratios to torch's fused AdamW (--help for options).",
)
def bench(context: typer.Context) -> None:
    with _interruptible():
        from anon_lab.bench import main  # which parses by itself, for machines without typer

        main(context.args)
