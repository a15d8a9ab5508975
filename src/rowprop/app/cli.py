"""The command line: exit codes, options, and tables.

Exit codes are 0: done; 1: an engine disagrees (``verify``); 2: bad input, or the user's own code failed; 3: rowprop
itself failed; 130: Ctrl-C. Each failure is one sentence on stderr, and ``--debug`` shows its traceback.
"""

from __future__ import annotations

import json as json_module
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from rowprop.app.show import show_flops, show_plan, show_profile, show_verification
from rowprop.app.terminal import prints_on_stderr, say, show, ticking, unwritable, write_out
from rowprop.errors import RowpropError, is_ours, one_line, place_of

if TYPE_CHECKING:
    from rowprop.app.model import Subject
    from rowprop.cost.measure import Tick

DISAGREES, REFUSED, BROKEN = 1, 2, 3
TESTED = "2.11", "2.15"
"""The oldest and the newest torch that scripts/versions tries; a newer one may do as well, and warns nobody."""
STOPPED, UNREAD = 130, 141  # a shell reports these for a command ended by Ctrl-C, and for one without a reader


class Door(TyperGroup):
    """The commands. Every error leaves as one sentence and an exit code; ``--debug`` may stand anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move ``--debug`` to the front, because it is an option of all commands."""
        rest = [argument for argument in args if argument != "--debug"]
        with _leaving(debug=len(rest) < len(args)):
            return super().parse_args(ctx, ["--debug"] * (len(rest) < len(args)) + rest)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        written.clear()
        with _leaving(debug=ctx.params["debug"]):
            return super().invoke(ctx)


@contextmanager
def _leaving(*, debug: bool) -> Generator[None]:
    """Turn every error of the block into its sentence and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped." if written else "Stopped; nothing was written.")
        raise typer.Exit(STOPPED) from None
    except BrokenPipeError:
        raise typer.Exit(UNREAD) from None
    except BaseException as error:
        if hasattr(error, "exit_code"):  # typer's own: an exit, or a wrong use of an option
            raise
        if debug:
            say("".join(traceback.format_exception(error)))
        sentence, code = _judged(error)
        say(f"rowprop: {sentence}")
        raise typer.Exit(code) from None


def _judged(error: BaseException) -> tuple[str, int]:
    """The sentence of an error, and its exit code."""
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
    cls=Door, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
written: list[Path] = []  # files of the running command


def _print_version(asked: bool) -> None:
    if asked:
        import torch

        import rowprop

        write_out(f"rowprop {rowprop.__version__}, torch {torch.__version__} (tested: {TESTED[0]} to {TESTED[1]})\n")
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


@contextmanager
def _working() -> Generator[Tick]:
    """Lead the block's prints to stderr, and show its progress there."""
    with prints_on_stderr(), ticking() as tick:
        yield tick


Data = Annotated[
    str,
    typer.Option(
        help="digits, fashion-mnist, wordnet, torchvision/NAME, or module:callable returning rows and classes."
    ),
]
Compared = Annotated[
    str | None,
    typer.Option(
        help="convnet, resnet, vit, textnet, gpt, or module:callable taking (num_classes, in_channels). gpt predicts "
        "the next token of wordnet's glosses, and methods keep tokens instead of rows. Default: textnet for wordnet, "
        "else convnet."
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: full, random, ohem, composer, batch-loss-filter, biggest-losers, kath18, infobatch, "
        "rho-loss; for models with blocks that repeat thinned (full with rowprop.thin) and vcas, and random@thinned, "
        "which keeps as many rows as thinned has on average; infobatch+ and one of random, "
        "ohem, batch-loss-filter, kath18; your own, module:callable or file.py:callable, taking (model, losses_fn, *, "
        "keep, **options) and returning SelectiveBackprop(model, losses_fn, SELECTOR, **options). A method can name "
        "its engine: ohem@recompute. For gpt: full, random, ohem, rho1, thinned, vcas and your own; random@cut keeps "
        "the gradient of attention on the kept tokens. Default: full, random, ohem, composer, batch-loss-filter; for "
        "gpt: full, and random, ohem, rho1 with and without @cut."
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        help="Passes over the data. Default without --seconds: 12 for digits, 6 for wordnet (gpt: 4), else 8."
    ),
]
Seconds = Annotated[
    float | None,
    typer.Option(help="Training time of each method, instead of epochs; the learning rate decays to zero in it."),
]
PeakRate = Annotated[
    float | None,
    typer.Option(
        help="Peak learning rate. Default: 0.1 for resnet, 0.002 for vit, 0.5 for textnet, 0.003 for gpt, else 0.05."
    ),
]
BatchRows = Annotated[
    int | None,
    typer.Option(help="N, rows per step; all rows where there are fewer. Default: 64; for gpt 16 rows of 64 tokens."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the runs that are kept in the folder; start if there are none.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Set the comparison in the folder aside, as earlier-1, and start over.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


@app.command()
def compare(
    data: Data = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data's files.")] = None,
    train_rows: Annotated[
        int | None, typer.Option(help="Use only this many training rows. Default: all; 800 for gpt.")
    ] = None,
    model: Compared = None,
    methods: Methods = None,
    engine: Annotated[
        str, typer.Option(help="sliced, recompute or masked, for methods that name none; cut for gpt.")
    ] = "sliced",
    keep: Annotated[
        float, typer.Option(help="Fraction of rows or tokens kept, by the methods that keep a fraction.")
    ] = 0.5,
    mass: Annotated[float, typer.Option(help="Share of the batch's loss that batch-loss-filter keeps.")] = 0.9,
    epochs: Epochs = None,
    seconds: Seconds = None,
    batch: BatchRows = None,
    lr: PeakRate = None,
    seeds: Annotated[int, typer.Option(help="How many seeds; the spread is over them.")] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes an accelerator where there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Threads that torch computes with.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.html and the finished runs.")] = Path(
        "rowprop-compare"
    ),
    resume: Resume = False,
    fresh: Fresh = False,
    json: AsJson = False,
) -> None:
    """Train methods side by side on real data: a table, results.json and report.html."""
    from rowprop.app.compare.folder import to_json
    from rowprop.app.compare.run import compare as run_comparison
    from rowprop.app.compare.settings import Settings
    from rowprop.app.compare.show import print_tables

    with prints_on_stderr():
        settings = Settings(
            data=data, data_dir=None if data_dir is None else str(data_dir), train_rows=train_rows, model=model,
            methods=methods, engine=engine, keep=keep, mass=mass, epochs=epochs, seconds=seconds, batch_rows=batch,
            lr=lr, seeds=seeds, device=device, threads=threads,
        )  # fmt: skip
        try:
            outcome = run_comparison(settings, out, resume=resume, fresh=fresh)
        except KeyboardInterrupt:
            say(f"Stopped before training began; nothing in {out} was removed.")
            raise typer.Exit(STOPPED) from None
    results = outcome.results
    if results is not None:
        if json:
            write_out(to_json(results) + "\n")
        else:
            show(lambda console: print_tables(console, results))
        say(f"{out / 'results.json'} and {out / 'report.html'} are written.")
    if outcome.interrupted:
        said = f"Stopped with {outcome.finished_runs} of {outcome.planned_runs} runs finished; they are kept in {out}. "
        said += f"Run the same command with --resume{' instead of --fresh' if fresh else ''} to go on."
        say(said if outcome.finished_runs else "Stopped before a run was finished.")
        raise typer.Exit(STOPPED)


Model = Annotated[
    str,
    typer.Argument(
        help="module:callable or file.py:callable returning a model, (model, batch) or (model, batch, losses_fn); "
        "torchvision/NAME; timm/NAME."
    ),
]
InputShape = Annotated[str | None, typer.Option(help="Shape of a random batch, for a model without one: 64x3x32x32.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the random batch and the kept rows.")]
Device = Annotated[str | None, typer.Option(help="Device of model and batch: cpu, cuda, ...")]
DType = Annotated[str | None, typer.Option(help="Dtype of the model and its batch: float64, float32, bfloat16, ...")]
Out = Annotated[Path | None, typer.Option(help="Folder for report.html, and its figures as PNG.")]


class _Result(Protocol):
    """The findings of a command."""

    def to_dict(self) -> dict[str, Any]: ...


Found = TypeVar("Found", bound=_Result)


def _load(
    tick: Tick, model: str, input_shape: str | None, seed: int, device: str | None, dtype: str | None, **options: Any
) -> Subject:
    tick(f"loading {model}", 0.0)
    from rowprop.app.model import load_model

    return load_model(model, input_shape=input_shape, seed=seed, device=device, dtype=dtype, **options)


def _print(model: str, found: Found, draw: Callable[[Console, str, Found], None], json: bool, **given: Any) -> None:
    """Print the findings: for people, or as one JSON object that also holds the model and the ``given`` values."""
    if json:
        write_out(json_module.dumps({"model": model} | given | found.to_dict(), allow_nan=False) + "\n")
    else:
        show(lambda console: draw(console, model, found))


def _tell_written(files: Sequence[Path]) -> None:
    written.extend(files)
    for path in files:
        say(f"{path} is written.")


@app.command()
def verify(
    model: Model,
    engine: Annotated[str, typer.Option(help="sliced or recompute.")] = "sliced",
    keep: Annotated[float, typer.Option(help="Fraction of rows or tokens kept, in (0, 1).")] = 0.25,
    batchnorm: Annotated[
        str | None,
        typer.Option(help="How sliced treats training BatchNorm: rows or exact; by how many rows it gets, if not set."),
    ] = None,
    unit: Annotated[
        str, typer.Option(help="What a row is: row, or token for losses per token, which the model brings.")
    ] = "row",
    attention: Annotated[
        str, typer.Option(help="How sliced goes through attention where rows are tokens: exact or cut.")
    ] = "exact",
    input_shape: InputShape = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DType = None,
    json: AsJson = False,
) -> None:
    """Check an engine's gradients against plain indexing's on your own model; exit code 1 if they disagree."""
    from rowprop.oracle.verify import verify as run_verification

    with _working() as tick:
        subject = _load(tick, model, input_shape, seed, device, dtype, tokens=unit == "token")
        result = run_verification(
            subject.model,
            subject.batch,
            subject.losses_fn,
            engine=engine,
            keep=keep,
            batchnorm=cast(Any, batchnorm),
            attention=cast(Any, attention),
            unit=cast(Any, unit),
            seed=seed,
            tick=tick,
        )
    _print(model, result, show_verification, json)
    if not result.agrees:
        raise typer.Exit(DISAGREES)


@app.command()
def flops(
    model: Model,
    input_shape: InputShape = None,
    optimizer: Annotated[
        str, typer.Option(help="Optimizer whose update is counted: sgd, momentum, adam, adamw.")
    ] = "sgd",
    keep: Annotated[
        float | None, typer.Option(help="Count a sliced backward of this fraction of the rows, in (0, 1].")
    ] = None,
    elementwise: Annotated[
        bool, typer.Option("--elementwise", help="Count norms, activations, losses, ... as well.")
    ] = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: DType = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Count forward, backward to inputs, backward to weights and update, by module and by op."""
    from rowprop.app.report import count_batches, open_folder, write_flops
    from rowprop.cost.count import count_step

    with _working() as tick:
        if out is not None:
            open_folder(out)
        subject = _load(tick, model, input_shape, seed, device, dtype, needs_loss=False)
        parts = (subject.model, subject.batch, subject.losses_fn)
        options: dict[str, Any] = {"optimizer": optimizer, "elementwise": elementwise}
        counted = count_step(*parts, keep=keep, tick=tick, **options)
    _print(model, counted, show_flops, json, keep=keep, has_loss=subject.has_loss)
    if not subject.has_loss:
        say("The batch has no target, so no loss is counted: the backward starts at the model's output.")
    if out is not None:
        with _working() as tick:
            by_rows = count_batches(*parts, counted, keep=keep, tick=tick, **options)
            files = write_flops(out, model, counted, by_rows)
        _tell_written(files)


@app.command()
def profile(
    model: Model,
    rounds: Annotated[int, typer.Option(help="Steps measured without the profiler.")] = 10,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace: .json or .json.gz, for ui.perfetto.dev.")
    ] = None,
    flame: Annotated[Path | None, typer.Option(help="Write a flame graph: .html, opens offline.")] = None,
    input_shape: InputShape = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DType = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Find slow ops: times by op and by module, and findings where an op is slower than it should be."""
    from rowprop.app.flame import check_extra, write_flame
    from rowprop.app.report import environment_of, open_folder, write_profile
    from rowprop.cost.profile import profile as run_profile
    from rowprop.files import check_writable

    with _working() as tick:
        if flame is not None:
            check_extra()
            check_writable(flame)
        if out is not None:
            open_folder(out)
        subject = _load(tick, model, input_shape, seed, device, dtype)
        found = run_profile(
            subject.model, subject.batch, subject.losses_fn,
            rounds=rounds, limit_s=PROFILE_LIMIT_S, trace=trace, tick=tick,
        )  # fmt: skip
    _tell_written([] if trace is None else [trace])
    where = environment_of(subject.model, subject.batch, found.num_rows)
    _print(model, found, show_profile, json, environment=where)
    if flame is not None:
        modules = {row.name: row.title for row in found.modules}
        write_flame(flame, found.stacks, f"{model}: {1000 * sum(found.stacks.values()):.3g} ms per step", modules)
        _tell_written([flame])
    if out is not None:
        _tell_written(write_profile(out, model, found, where))


PROFILE_LIMIT_S = 60.0


@app.command()
def plan(
    model: Model,
    keep: Annotated[
        str, typer.Option(help="Fractions of rows kept, in (0, 1), comma-separated; the choice is for the first.")
    ] = "0.1,0.25,0.5,0.75,0.9",
    optimizer: Annotated[
        str, typer.Option(help="Optimizer whose update is part of a step: sgd, momentum, adam, adamw or none.")
    ] = "sgd",
    batchnorm: Annotated[
        str | None,
        typer.Option(help="How sliced treats training BatchNorm: rows or exact; by how many rows it gets, if not set."),
    ] = None,
    memory_limit: Annotated[
        int | None, typer.Option(help="Most bytes that a step may add to the memory in use before it.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Most measurements of each step, 1 or more.")] = 7,
    seconds: Annotated[float, typer.Option(help="Time for measuring; in more time more steps are measured.")] = 60.0,
    look: Annotated[int, typer.Option(help="Steps to train, to see whether losses are too flat to select by.")] = 0,
    input_shape: InputShape = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DType = None,
    out: Out = None,
    json: AsJson = False,
) -> None:
    """Measure the cost of each way of selecting on your own model, and say which way pays at which keep."""
    from rowprop.app.report import environment_of, open_folder, write_plan
    from rowprop.cost.planning import plan as make_plan
    from rowprop.cost.profile import profile as run_profile
    from rowprop.errors import InvalidInput

    with _working() as tick:
        if out is not None:
            open_folder(out)
        try:
            keeps = [float(part) for part in keep.split(",")]
        except ValueError:
            raise InvalidInput(f"--keep is {keep!r} but fractions were needed, e.g. 0.1,0.25.") from None
        subject = _load(tick, model, input_shape, seed, device, dtype)
        result = make_plan(
            subject.model,
            subject.batch,
            subject.losses_fn,
            keep=keeps,
            optimizer=None if optimizer == "none" else optimizer,
            batchnorm=cast(Any, batchnorm),
            memory_limit_bytes=memory_limit,
            rounds=rounds,
            seconds=seconds,
            look_steps=look,
            tick=tick,
        )
    where = environment_of(subject.model, subject.batch, result.num_rows)
    _print(model, result, show_plan, json, environment=where)
    if out is not None:
        with _working() as tick:
            found = run_profile(subject.model, subject.batch, subject.losses_fn, limit_s=PROFILE_LIMIT_S, tick=tick)
            files = write_plan(out, model, result, found, where)
        _tell_written(files)


if __name__ == "__main__":
    app()
