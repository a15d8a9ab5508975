"""The command line: `rowprop compare`. Every command prints one sentence and exits with 2 on bad input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rowprop.errors import RowpropError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Backpropagate only the rows that matter.",
)  # fmt: skip

PIPE_COLUMNS = 100  # a pipe has no width; the tables fit into this one
STOPPED = 130  # what a shell reports for a command that Ctrl-C ended


@app.callback()
def main() -> None:
    """Backpropagate only the rows that matter."""


def fail(error: RowpropError) -> typer.Exit:
    """Print the error's sentence to stderr and return the exit to raise."""
    typer.echo(f"rowprop: {error}", err=True)
    return typer.Exit(2)


@app.command()
def compare(
    data: Annotated[
        str,
        typer.Option(help="digits, fashion-mnist, torchvision/NAME, or module:callable returning rows and classes."),
    ] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data's files.")] = None,
    train_rows: Annotated[int | None, typer.Option(help="Use only this many training rows.")] = None,
    model: Annotated[
        str, typer.Option(help="convnet, resnet, or module:callable taking (num_classes, in_channels).")
    ] = "convnet",
    methods: Annotated[
        str, typer.Option(help="Comma-separated; a method can fix its engine: top-k@recompute.")
    ] = "full,random,top-k,composer,loss-mass",
    engine: Annotated[str, typer.Option(help="auto, sliced, recompute or masked, where a method names none.")] = "auto",
    keep: Annotated[float, typer.Option(help="Fraction of rows that random, top-k and composer keep.")] = 0.5,
    mass: Annotated[float, typer.Option(help="Share of the batch's loss that loss-mass keeps.")] = 0.9,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data; 12 for digits, else 8, if no budget is given.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Instead of epochs: training time for each method, rate fully decayed.")
    ] = None,
    batch: Annotated[int, typer.Option(help="N, rows per step.")] = 64,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 0.1 for resnet, else 0.05.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; the spread is over them.")] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes an accelerator where there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads that torch computes with.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.html and finished runs.")] = Path(
        "rowprop-compare"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that are kept in the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away an unfinished comparison in the folder.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout.")] = False,
) -> None:
    """Train methods side by side on real data: a table, results.json and report.html."""
    from rowprop.compare.folder import to_json
    from rowprop.compare.run import compare as run_comparison
    from rowprop.compare.settings import Settings
    from rowprop.compare.show import print_tables

    try:
        settings = Settings(
            data=data,
            data_dir=str(data_dir) if data_dir is not None else None,
            train_rows=train_rows,
            model=model,
            methods=methods,
            engine=engine,
            keep=keep,
            mass=mass,
            epochs=epochs,
            seconds=seconds,
            batch_rows=batch,
            lr=lr,
            seeds=seeds,
            device=device,
            threads=threads,
        )
        outcome = run_comparison(settings, out, resume=resume, fresh=fresh)
    except RowpropError as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        typer.echo("Stopped before training began.", err=True)
        raise typer.Exit(STOPPED) from None
    if outcome.results is not None:
        if json:
            typer.echo(to_json(outcome.results))
        else:
            print_tables(Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS), outcome.results)
        typer.echo(f"{out / 'results.json'} and {out / 'report.html'} are written.", err=True)
    if outcome.interrupted:
        typer.echo(
            f"Stopped with {outcome.finished_runs} of {outcome.planned_runs} runs finished; they are kept in {out}. "
            "Run the same command with --resume to go on.",
            err=True,
        )
        raise typer.Exit(STOPPED)


if __name__ == "__main__":
    app()
