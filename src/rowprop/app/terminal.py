"""The output of every command: results alone on stdout, tables of one look, and progress on stderr."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rowprop.errors import InvalidInput

if TYPE_CHECKING:
    from rowprop.cost.count import StepFlops
    from rowprop.cost.measure import Tick
    from rowprop.cost.plan import Plan, Way
    from rowprop.cost.profile import Profile, Tally
    from rowprop.oracle.results import Verification

PIPE_COLUMNS = 120  # the width of tables in a pipe, which has none
QUIET_S = 2.0  # shorter work shows no line of progress
AGAIN_S = 30.0  # between two lines of progress, if stderr is no terminal
KNOWN = 0.01  # of the work; the time of a smaller part does not say how long the rest takes
WORST = 8  # parameters that a table shows
LINES = 12  # ops and modules that a table shows
WAY_COLUMNS = (
    "keep", "way", "step, ms", "of plain", "quartiles", "limit", "peak, MB", "gradient", "",
)  # fmt: skip


def show(draw: Callable[..., None], *content: Any) -> None:
    """Print ``content`` on stdout by ``draw``. Text is never markup: a user's module may be called ``[red]``."""
    wide = sys.stdout is not None and sys.stdout.isatty()
    console = Console(width=None if wide else PIPE_COLUMNS, markup=False, highlight=False, emoji=False)
    with console.capture() as drawn:
        draw(console, *content)
    write_out(drawn.get())


def write_out(text: str) -> None:
    """Write on stdout; InvalidInput if it is closed or its disk is full, BrokenPipeError if nobody reads any more."""
    if sys.stdout is None:
        raise InvalidInput("standard output is closed, so the result is not shown.")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        refusal = unwritable(error)
        if isinstance(error, BrokenPipeError):
            raise
        raise refusal from error


def unwritable(error: OSError) -> InvalidInput:
    """Give stdout up after a failed write; return the sentence with the reason."""
    _mute(sys.stdout)
    return InvalidInput(f"cannot write to standard output ({error.strerror}).")


def say(line: str) -> None:
    """Write a line on stderr, if it can be written."""
    if sys.stderr is not None:
        try:
            print(line, file=sys.stderr, flush=True)
        except OSError:
            _mute(sys.stderr)


def _mute(stream: TextIO) -> None:
    """Lead a broken stream to the null device: else Python writes to it once more at its end, and complains."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def prints_on_stderr() -> Generator[None]:
    """Lead every print of the block to stderr: stdout is for results, and Python and C code of others prints, too."""
    if sys.stdout is None or sys.stderr is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError, TypeError):  # TypeError: Windows, which has no library of the process
            ctypes.CDLL(None).fflush(None)  # C's printf may hold text back
        os.dup2(kept, 1)
        os.close(kept)


def new_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """A table of text, never markup, whose rows may end early; if it is too wide, its first ``words`` columns wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        if place < words:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


@contextmanager
def ticking() -> Generator[Tick]:
    """Lead the block's prints to stderr, and show there how far its work is: a bar in a terminal, else few lines.

    Both are drawn at ticks alone: drawing in between would disturb a measurement.
    """
    console = Console(stderr=True)
    with prints_on_stderr(), bar(console) if console.is_terminal else nullcontext(lines()) as tick:
        yield tick


@contextmanager
def bar(console: Console) -> Generator[Tick]:
    """Draw a bar at each tick."""
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn(), console=console,
        auto_refresh=False, transient=True, speed_estimate_period=3600,  # the time left is by the last hour's pace
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=1.0)

        def tick(line: str, fraction: float) -> None:
            progress.update(task, description=line, completed=fraction)
            progress.refresh()

        yield tick


def lines() -> Tick:
    """A function that writes plain lines: one every half a minute, and none in the first two seconds."""
    begun_s = time.perf_counter()
    due_s = begun_s + QUIET_S

    def tick(line: str, fraction: float) -> None:
        nonlocal begun_s, due_s
        now_s = time.perf_counter()
        if fraction == 0:  # the work begins here: the time to load a model does not count
            begun_s = now_s
        if now_s < due_s:
            return
        known = fraction >= KNOWN
        left_s = (now_s - begun_s) * (1 - fraction) / fraction if known else 0.0
        say(f"rowprop: {line}" + (f" ({100 * fraction:.0f} %, about {left_s:.0f} s left)" if known else ""))
        due_s = now_s + (AGAIN_S if known else QUIET_S)

    return tick


def uncounted_ops(uncounted: Mapping[str, int]) -> str:
    """The ops whose FLOPs nobody counted, with their calls."""
    return ", ".join(f"{op} x{calls}" for op, calls in uncounted.items()) or "nothing"


def count_and_names(names: Sequence[str]) -> str:
    """How many there are, and the first of them."""
    first = f": {', '.join(names[:3])}" if names else ""
    return f"{len(names)}{first}{', ...' if len(names) > 3 else ''}"


def show_verification(console: Console, model: str, result: Verification) -> None:
    """Print the errors of the gradients, where the gradient went back to all rows, and the verdict."""
    kept = f"{result.num_kept} of {result.num_rows} {result.unit}s"
    console.print(f"{model}: {result.engine} against masked, {kept}, {result.dtype}")
    for place, comparison in enumerate(result.comparisons):
        if place > 0 and comparison.agrees:
            continue
        rows = [
            (entry.name, entry.problem or ("" if entry.agrees else f"beyond {entry.allowed:.1e}"), f"{entry.error:.1e}")
            for entry in comparison.errors[:WORST]
        ]
        if len(comparison.errors) > WORST:
            rows.append((f"and {len(comparison.errors) - WORST} more, none worse", "", ""))
        columns = ("parameter", "problem", "relative error")
        console.print(new_table(f"Gradients, {comparison.conditions}", columns, rows, words=2))
    if result.densified:
        rows = [(at.module, at.op, at.reason, str(at.calls), f"{100 * at.time_share:.0f} %") for at in result.densified]
        columns = ("module", "op", "why", "calls", "time from there on")
        console.print(new_table("Where the gradient went back to all rows", columns, rows, words=3))
    console.print(
        f"Backward FLOPs: {result.backward_flops:,} of {result.full_backward_flops:,}, {result.flops_ratio:.3f} of "
        f"full; uncounted: {uncounted_ops(result.uncounted)}"
    )
    if result.cut:
        console.print(f"Attention was cut at: {', '.join(f'{op} ({count})' for op, count in result.cut.items())}")
    console.print(f"Of {len(result.errors)} gradients, zero are {count_and_names(result.zero_gradients)}")
    if result.drawn:
        console.print(f"Zero parameters that were drawn anew: {count_and_names(result.drawn)}")
    console.print(
        f"Random state: {'differs' if result.rng_differs else 'the same'}; buffers that differ: "
        f"{', '.join(result.buffers) or 'none'}"
    )
    console.print(f"\n{result.verdict}")


def show_flops(console: Console, model: str, counted: StepFlops) -> None:
    """Print the FLOPs of a step by module and by op, and its ratios."""
    headings = {"forward": "forward", "backward_input": "backward, inputs", "backward_weight": "backward, weights"}
    if counted.backward_recomputed_flops:
        headings["backward_recomputed"] = "backward, recomputed"

    def numbers(entry: object) -> list[str]:
        return [f"{getattr(entry, f'{part}_flops'):,}" for part in headings]

    modules = [(f"{of.module} ({of.kind})" if of.kind else of.module, *numbers(of)) for of in counted.modules]
    columns = ("module", *headings.values())
    by_module = new_table("FLOPs by module, without the modules inside it", columns, modules)
    by_module.add_section()
    by_module.add_row("all", *numbers(counted))
    names = dict.fromkeys(op for ops in counted.by_op.values() for op in ops)
    ops = [(name, *(f"{counted.by_op.get(part, {}).get(name, 0):,}" for part in headings)) for name in names]
    kept = "" if counted.num_kept == counted.num_rows else f", backward of {counted.num_kept}"
    console.print(f"{model}: {counted.num_rows} rows{kept}; 1 multiply-add = 2 FLOPs")
    console.print(by_module, new_table("FLOPs by op", ("op", *headings.values()), ops))
    console.print(
        f"Update ({counted.optimizer}): {counted.update_flops:,} FLOPs for {counted.num_parameters:,} parameters\n"
        f"Uncounted: {uncounted_ops(counted.uncounted)}\n"
        f"Backward over forward: {counted.ratio:.3f}; with the update {counted.ratio_with_update:.3f}"
    )


def show_profile(console: Console, model: str, found: Profile) -> None:
    """Print the slowest ops and modules, and the findings."""
    forward, backward = (
        f"{1000 * spread.median:.3g} ms ({1000 * spread.q1:.3g} to {1000 * spread.q3:.3g})"
        for spread in map(found.timing.spread, ("forward", "backward"))
    )
    counted = "" if found.counted_ratio is None else f" for {found.counted_ratio:.2f} times the FLOPs"
    console.print(
        f"{model} on {found.device}: forward {forward}, backward {backward}: {found.measured_ratio:.2f} times the "
        f"forward{counted}"
    )
    columns = ("forward, ms", "backward, ms", "share", "calls", "MFLOP", "GFLOP/s", "MB")
    for name, rest, tallies in (("op", "", found.ops), ("module", ", without the modules inside it", found.modules)):
        rows = [_tally(row) for row in tallies[:LINES]]
        if len(tallies) > LINES:
            share = sum(row.share for row in tallies[LINES:])
            rows.append((f"and {len(tallies) - LINES} more", "", "", f"{100 * share:.0f} %"))
        console.print(new_table(f"By {name}{rest}", (name, *columns), rows))
    console.print(
        f"In no op (Python, autograd, the profiler): {100 * found.outside_share:.0f} %; uncounted: "
        f"{uncounted_ops(found.uncounted)}\n"
        f"This machine reaches {found.flops_per_s / 1e9:.3g} GFLOP/s in a matrix product and "
        f"{found.bytes_per_s / 1e9:.3g} GB/s in a copy; a step holds {found.timing.peak_bytes / 1e6:.3g} MB at most.\n"
    )
    for number, finding in enumerate(found.findings, 1):
        console.print(f"{number}. {finding.kind}: {finding.where}\n   {finding.evidence}\n   {finding.remedy}\n")
    if not found.findings:
        console.print("Findings: none.")


def _tally(row: Tally) -> tuple[str, ...]:
    flops = row.forward_flops + row.backward_flops
    return (
        row.title, f"{1000 * row.forward_s:.3f}", f"{1000 * row.backward_s:.3f}", f"{100 * row.share:.0f} %",
        f"{row.forward_calls} + {row.backward_calls}", f"{flops / 1e6:.2f}" if flops else "",
        f"{row.flops_per_s / 1e9:.1f}" if flops else "", f"{row.bytes / 1e6:.2f}",
    )  # fmt: skip


def show_plan(console: Console, model: str, result: Plan) -> None:
    """Print the cost of each way at each keep, and the choice."""
    from rowprop.cost.plan import milliseconds

    phases = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in result.phases_s.items())
    console.print(f"{model}: N = {result.num_rows} {result.unit}s; plain step {milliseconds(result.full_s)}; {phases}")
    console.print(new_table("The cost of a step", WAY_COLUMNS, [way_row(way, result) for way in result.ways], words=2))
    console.print(str(result))


def way_row(way: Way, result: Plan) -> tuple[str, ...]:
    """A way's row under WAY_COLUMNS."""
    return (
        f"keep {way.keep:g}", way.engine, f"{1000 * way.step_s:.3g}", f"{way.ratio:.2f}",
        "" if way.engine == "masked" else f"{way.low:.2f} to {way.high:.2f}", f"{way.limit:.2f}",
        f"{way.peak_bytes / 1e6:.3g}", way.gradient,
        "chosen" if way in result.choices else "inconclusive" if way.inconclusive else "",
    )  # fmt: skip
