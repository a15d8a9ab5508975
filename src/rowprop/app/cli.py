"""The command line. Exit codes are the help's, and 1 without typer or rich; a failure is one sentence on stderr."""

from __future__ import annotations

import json as json_module
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rowprop.app import terminal
from rowprop.app.terminal import prints_on_stderr, say, show, ticking, unwritable, write_out
from rowprop.errors import InvalidInput, RowpropError, is_ours, one_line, place_of

if TYPE_CHECKING:
    from rowprop.app.model import Subject
    from rowprop.cost.measure import Tick

DISAGREES, REFUSED, BROKEN = 1, 2, 3
STOPPED, UNREAD = 130, 141  # a shell reports these for a command ended by Ctrl-C, and for one without a reader
TESTED = "2.11", "2.15"  # the oldest and the newest torch that is tested; a newer one may do as well, and warns nobody


class Door(TyperGroup):
    """The commands. Every error leaves as one sentence and an exit code; ``--debug`` may stand anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move ``--debug`` to the front, because it is an option of all commands."""
        rest = [argument for argument in args if argument != "--debug"]
        with _leaving(debug=len(rest) < len(args)):
            return super().parse_args(ctx, ["--debug"] * (len(rest) < len(args)) + rest)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _leaving(debug=ctx.params["debug"]):
            return super().invoke(ctx)


@contextmanager
def _leaving(*, debug: bool) -> Generator[None]:
    """Turn every error of the block into its sentence and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped.")
        raise typer.Exit(STOPPED) from None
    except BrokenPipeError:
        raise typer.Exit(UNREAD) from None
    except BaseException as error:
        if hasattr(error, "exit_code"):  # typer's own: an exit, or a wrong use of an option
            raise
        if debug:
            say("".join(traceback.format_exception(error)))
        sentence, code = _sentence(error)
        say(f"rowprop: {sentence}")
        raise typer.Exit(code) from None


def _sentence(error: BaseException) -> tuple[str, int]:
    if isinstance(error, RowpropError):
        place = place_of(error)  # where the user's code called rowprop, if it did
        return (str(error) if place is None else f"{error} ({place})"), REFUSED
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, OSError) and Path(frame.filename).is_relative_to(Path(typer.__file__).parent):
        return str(unwritable(error)), REFUSED  # typer prints the help itself
    if is_ours(error):
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return f"a bug in rowprop, at {where}: {one_line(error)}. Please report it with the output of --debug.", BROKEN
    said = "ended the process" if isinstance(error, SystemExit) else "failed"
    return f"the model, its batch or its losses {said}: {one_line(error)}. --debug shows the whole traceback.", REFUSED


app = typer.Typer(
    cls=Door, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Add a command; its whole first line stands in the help, which would cut it otherwise."""
    return app.command(short_help=(function.__doc__ or "").partition("\n")[0])(function)


def _print_version(asked: bool) -> None:
    if asked:
        import torch

        import rowprop
        from rowprop.native import building

        tested = f"tested: {TESTED[0]} to {TESTED[1]}"
        write_out(
            f"rowprop {rowprop.__version__}, torch {torch.__version__} ({tested}), dispatch: {building.find()[1]}\n"
        )
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Backpropagate only the rows that matter.

    Exit codes: 0 done; 1 an engine disagrees (verify); 2 bad input, or your own code failed; 3 rowprop itself failed;
    130 Ctrl-C.
    """


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Data = Annotated[str, typer.Option(help="digits, fashion-mnist, wordnet, or module:callable returning the data.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the files of fashion-mnist or wordnet.")]
TrainRows = Annotated[int | None, typer.Option(help="Use so many training rows. Default: all; 800 for gpt.")]
Compared = Annotated[str | None, typer.Option(
    help="convnet, resnet, vit, textnet, gpt (which predicts tokens of wordnet), or module:callable returning one."
)]  # fmt: skip
Methods = Annotated[str | None, typer.Option(
    help="Comma-separated: full, random, ohem, composer, batch-loss-filter, biggest-losers, kath18, infobatch, "
    "rho-loss, infobatch+random, infobatch+batch-loss-filter, infobatch+kath18; for models with blocks that repeat "
    "thinned and random@thinned, which keeps as many rows; plain@METHOD, plain steps on as many rows as cost what "
    "METHOD costs; for gpt full, random, ohem, rho1, thinned; or your own, module:callable taking (model, losses_fn, "
    "*, keep, **options) and returning SelectiveBackprop(model, losses_fn, SELECTOR, **options). METHOD@ENGINE names "
    "an engine: sliced, recompute, masked; for gpt also cut. "
    "Default: full,random,ohem,composer,batch-loss-filter,plain@ohem; for gpt full, and random, ohem, rho1 with and "
    "without @cut, plain@random@cut; with --seconds, where full is that control, the same without plain@METHOD."
)]  # fmt: skip
Keep = Annotated[float, typer.Option(help="Fraction of rows or tokens kept.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data; the default follows data and model.")]
Seconds = Annotated[float | None, typer.Option(help="Training time of each method, instead of epochs.")]
BatchRows = Annotated[int | None, typer.Option(help="N, rows per step; the default follows the model: 64, gpt 16.")]
PeakRate = Annotated[float | None, typer.Option(help="Peak learning rate; the default follows the model.")]
Seeds = Annotated[int, typer.Option(help="How many seeds; the spread is over them.")]
AnyDevice = Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes an accelerator where there is one.")]
Threads = Annotated[int | None, typer.Option(help="Threads that torch computes with.")]
Folder = Annotated[Path, typer.Option(help="Folder for results.json, report.html and the finished runs.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the runs in the folder; start if there are none.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Set the comparison in the folder aside, and start over.")]


@_command
def compare(
    data: Data = "digits", data_dir: DataDir = None, train_rows: TrainRows = None, model: Compared = None,
    methods: Methods = None, keep: Keep = 0.5, epochs: Epochs = None, seconds: Seconds = None,
    batch: BatchRows = None, lr: PeakRate = None, seeds: Seeds = 3, device: AnyDevice = "auto",
    threads: Threads = None, out: Folder = Path("rowprop-compare"), resume: Resume = False, fresh: Fresh = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Train methods side by side on real data, in a checkout: a table, results.json and report.html."""
    from rowprop.app.lookup import require_lab

    lab = require_lab("rowprop compare", digits=data == "digits")
    chosen: list[Any] = [data, data_dir and str(data_dir), train_rows, model, methods, keep, epochs, seconds, batch, lr]
    with prints_on_stderr():
        settings = lab.Settings(*chosen, seeds=seeds, device=device, threads=threads)
        try:
            outcome = lab.compare(settings, out, resume=resume, fresh=fresh)
        except KeyboardInterrupt:
            say(f"Stopped before training began; nothing in {out} was removed.")
            raise typer.Exit(STOPPED) from None
    if (results := outcome.results) is not None:
        if json:
            write_out(lab.to_json(results) + "\n")
        else:
            show(lab.show_comparison, results)
        say(f"{out / 'results.json'} and {out / 'report.html'} are written.")
    if outcome.interrupted:
        said = f"Stopped with {outcome.finished_runs} of {outcome.planned_runs} runs finished; they are kept in {out}. "
        said += f"Run the same command with --resume{' instead of --fresh' if fresh else ''} to go on."
        say(said if outcome.finished_runs else "Stopped before a run was finished.")
        raise typer.Exit(STOPPED)


Model = Annotated[str, typer.Argument(
    help="module:callable returning a model, (model, batch) or (model, batch, losses_fn); or torchvision/NAME."
)]  # fmt: skip
InputShape = Annotated[str | None, typer.Option(help="Shape of a random batch, for a model without one: 64x3x32x32.")]
Seed = Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of weights, random batch and kept rows.")]
Device = Annotated[str | None, typer.Option(help="Device of model and batch: cpu, cuda, ...")]
DType = Annotated[str | None, typer.Option(help="Dtype of the model and its batch: float64, float32, bfloat16, ...")]
Out = Annotated[Path | None, typer.Option(help="Folder for report.html, and its figure as PNG.")]
BatchNorm = Annotated[str | None, typer.Option(help="How sliced treats training BatchNorm: rows or exact.")]
Engine = Annotated[str, typer.Option(help="sliced or recompute.")]
Counted = Annotated[float | None, typer.Option(help="Count a sliced backward of this fraction of rows, in (0, 1].")]
Fractions = Annotated[str, typer.Option(help="Fractions kept, comma-separated; the choice is for the first.")]
Unit = Annotated[str, typer.Option(help="What is kept: row, or token for losses per token, which the model brings.")]
Attention = Annotated[str, typer.Option(help="How sliced goes through attention where tokens are kept: exact or cut.")]
Optimizer = Annotated[
    str, typer.Option(help="Optimizer whose update counts: sgd, momentum, adam, adamw; none in plan.")
]
Trace = Annotated[Path | None, typer.Option(help="Write a Chrome trace, .json or .json.gz, for ui.perfetto.dev.")]
Rounds = Annotated[int, typer.Option(help="Most measurements of each step, 1 or more.")]
Measuring = Annotated[float, typer.Option(help="Time for measuring; in more time more steps are measured.")]


def _load(
    tick: Tick, model: str, input_shape: str | None, seed: int, device: str | None, dtype: str | None, **options: Any
) -> Subject:
    tick(f"loading {model}", 0.0)
    from rowprop.app.model import load_model

    return load_model(model, input_shape=input_shape, seed=seed, device=device, dtype=dtype, **options)


def _print(model: str, found: Any, draw: Callable[..., None], json: bool, **given: Any) -> None:
    """Print the findings: for people, or as one JSON object that also holds the model and the ``given`` values."""
    if json:
        write_out(json_module.dumps({"model": model} | given | found.to_dict(), allow_nan=False) + "\n")
    else:
        show(draw, model, found)


@_command
def verify(
    model: Model, engine: Engine = "sliced", keep: Keep = 0.25, batchnorm: BatchNorm = None, unit: Unit = "row",
    attention: Attention = "exact", input_shape: InputShape = None, seed: Seed = 0, device: Device = None,
    dtype: DType = None, json: AsJson = False,
) -> None:  # fmt: skip
    """Check an engine's gradients against plain indexing's on your own model; exit code 1 if they disagree."""
    from rowprop.oracle.verify import verify as run_verification

    options: dict[str, Any] = {"batchnorm": batchnorm, "attention": attention, "unit": unit}
    with ticking() as tick:
        subject = _load(tick, model, input_shape, seed, device, dtype, tokens=unit == "token")
        result = run_verification(*subject, engine=engine, keep=keep, seed=seed, tick=tick, **options)
    _print(model, result, terminal.show_verification, json)
    if not result.agrees:
        raise typer.Exit(DISAGREES)


@_command
def flops(
    model: Model, input_shape: InputShape = None, optimizer: Optimizer = "sgd", keep: Counted = None, seed: Seed = 0,
    device: Device = None, dtype: DType = None, out: Out = None, json: AsJson = False,
) -> None:  # fmt: skip
    """Count forward, backward to inputs, backward to weights and update, by module and by op."""
    from rowprop.app.model import output_as_losses
    from rowprop.app.page import count_batches, open_folder, write_flops
    from rowprop.cost.count import count_step

    options: dict[str, Any] = {"keep": keep, "optimizer": optimizer}
    with ticking() as tick:
        if out is not None:
            open_folder(out)
        subject = _load(tick, model, input_shape, seed, device, dtype, needs_loss=False)
        counted = count_step(*subject, tick=tick, **options)
    has_loss = subject.losses_fn is not output_as_losses
    _print(model, counted, terminal.show_flops, json, keep=keep, has_loss=has_loss)
    if not has_loss:
        say("The batch has no target, so no loss is counted: the backward starts at the model's output.")
    if out is not None:
        with ticking() as tick:
            by_rows = count_batches(*subject, counted, tick=tick, **options)
        write_flops(out, model, counted, by_rows)


@_command
def profile(
    model: Model, rounds: Rounds = 10, trace: Trace = None, input_shape: InputShape = None, seed: Seed = 0,
    device: Device = None, dtype: DType = None, json: AsJson = False,
) -> None:  # fmt: skip
    """Find slow ops: times by op and by module, and findings where an op is slower than it should be."""
    from rowprop.app.page import environment_of
    from rowprop.cost.profile import profile as run_profile

    with ticking() as tick:
        subject = _load(tick, model, input_shape, seed, device, dtype)
        found = run_profile(*subject, rounds=rounds, trace=trace, tick=tick)
    if trace is not None:
        say(f"{trace} is written.")
    where = environment_of(subject.model, subject.batch, found.num_rows)
    _print(model, found, terminal.show_profile, json, environment=where)


@_command
def plan(
    model: Model, keep: Fractions = "0.1,0.25,0.5,0.75,0.9", optimizer: Optimizer = "sgd",
    batchnorm: BatchNorm = None, unit: Unit = "row", attention: Attention = "exact", rounds: Rounds = 7,
    seconds: Measuring = 60.0, input_shape: InputShape = None, seed: Seed = 0, device: Device = None,
    dtype: DType = None, out: Out = None, json: AsJson = False,
) -> None:  # fmt: skip
    """Measure what each engine costs on your own model, beside the limit, and say which one pays at which keep."""
    from rowprop.app.page import environment_of, open_folder, write_plan
    from rowprop.cost.plan import plan as make_plan

    options: dict[str, Any] = {"optimizer": None if optimizer == "none" else optimizer, "batchnorm": batchnorm}
    with ticking() as tick:
        if out is not None:
            open_folder(out)
        try:
            keeps = [float(part) for part in keep.split(",")]
        except ValueError:
            raise InvalidInput(f"--keep is {keep!r} but fractions were needed, e.g. 0.1,0.25.") from None
        subject = _load(tick, model, input_shape, seed, device, dtype, tokens=unit == "token")
        options |= {"attention": attention, "unit": unit, "rounds": rounds, "seconds": seconds}
        result = make_plan(*subject, keep=keeps, tick=tick, **options)
    where = environment_of(subject.model, subject.batch, result.num_rows)
    _print(model, result, terminal.show_plan, json, environment=where)
    if out is not None:
        write_plan(out, model, result, where)


@_command
def native() -> None:
    """Compile native dispatch for this torch and Python, about a minute, once; all later processes use it.

    Otherwise the first sliced backward has it compiled in the background. It needs a C++ compiler and ninja.
    ROWPROP_NATIVE=0 turns it off.
    """
    from rowprop.native import building

    say("Compiling native dispatch. If another process compiles it, this one waits for it.")
    try:
        building.build()
    except (OSError, RuntimeError, ImportError, SubprocessError) as error:
        why = building.reason(error)
        raise InvalidInput(f"native dispatch could not be compiled: {why}; Python dispatches.") from error
    say(f"dispatch: {building.find()[1]}")
    write_out(f"{building.library()}\n")


if __name__ == "__main__":
    app()
