"""The output of every command: results alone on stdout, tables of one look, and progress on stderr."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rowprop.errors import InvalidInput

if TYPE_CHECKING:
    from rowprop.cost.measure import Tick

PIPE_COLUMNS = 120  # the width of tables in a pipe, which has none
QUIET_S = 2.0  # shorter work shows no line of progress
AGAIN_S = 30.0  # between two lines of progress, if stderr is no terminal
KNOWN = 0.01  # of the work; the time of a smaller part does not say how long the rest takes


def show(draw: Callable[[Console], None]) -> None:
    """Print on stdout by ``draw``. Text is never markup: a user's module may be called ``[red]``."""
    wide = sys.stdout is not None and sys.stdout.isatty()
    console = Console(width=None if wide else PIPE_COLUMNS, markup=False, highlight=False, emoji=False)
    with console.capture() as drawn:
        draw(console)
    write_out(drawn.get())


def write_out(text: str) -> None:
    """Write on stdout.

    Raises:
        InvalidInput: Standard output is closed, or the disk behind it is full.
        BrokenPipeError: Nobody reads standard output any more.
    """
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
    """A table whose cells are text, never markup; the last cells of a row may be left out.

    The first columns, ``words`` of them, wrap in a table that is too wide; the others hold numbers, which stay whole.
    """
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
    """Lead the block's prints to stderr, and show there how far its work is.

    A terminal gets a bar with the time left, any other stderr a line every half a minute, and none in the first two
    seconds. Both are drawn at ticks alone: drawing in between would disturb a measurement.
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
    """A function that writes plain lines, few of them."""
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
