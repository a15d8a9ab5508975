"""The output of every command: results alone on stdout, tables of one look, and progress on stderr."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Literal, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rowprop.errors import InvalidInput

if TYPE_CHECKING:
    from rowprop.cost.measure import Tick

PIPE_COLUMNS = 120  # the width of tables in a pipe, which has none
QUIET_S = 2.0  # shorter work shows no progress
AGAIN_S = 30.0  # between two lines of progress, if stderr is no terminal
TELLING = 0.01  # of the work: the time of a smaller part does not tell the time of the rest


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
    """Return a table whose cells are text, never markup.

    Args:
        title: Above the table.
        columns: Their names.
        rows: A text for each column; the last ones may be left out.
        words: How many columns hold words, the first ones; they wrap in a table that is too wide. The others hold
            numbers, which stay whole.
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
    """Show on stderr how far the work in the block is.

    A terminal gets a bar with the time left, which disappears at the end. Any other stderr gets a line at first and one
    every half a minute. Work of less than two seconds shows nothing.

    Nothing is drawn between two ticks, because drawing would disturb a measurement.
    """
    console = Console(stderr=True)
    shown = _Bar(console) if console.is_terminal else _Lines()
    timer = threading.Timer(QUIET_S, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.tick
    finally:
        timer.cancel()
        shown.stop()


class _Shown:
    """The work at hand and the time left, drawn from :meth:`start` on until :meth:`stop`."""

    def __init__(self) -> None:
        self._begun_s = time.perf_counter()
        self._lock = threading.Lock()  # a timer's thread starts it
        self._now: tuple[str, float] | None = None
        self._state: Literal["quiet", "shown", "over"] = "quiet"

    def start(self) -> None:
        with self._lock:
            if self._state == "quiet":
                self._state = "shown"
                self._redraw()

    def tick(self, line: str, fraction: float) -> None:
        with self._lock:
            self._now = line, fraction
            if fraction == 0:  # the work begins here: the time to load a model does not count
                self._begun_s = time.perf_counter()
            if self._state == "shown":
                self._redraw()

    def stop(self) -> None:
        with self._lock:
            if self._state == "shown":
                self.erase()
            self._state = "over"

    def _redraw(self) -> None:
        if self._now is not None:
            line, fraction = self._now
            passed_s = time.perf_counter() - self._begun_s
            known = fraction >= TELLING
            self.draw(line, fraction, f"about {passed_s * (1 - fraction) / fraction:.0f} s left" if known else "")

    def draw(self, line: str, fraction: float, left: str) -> None:
        """Show a line on the work at hand, the fraction done, and the time left, which is empty while unknown."""
        raise NotImplementedError

    def erase(self) -> None:
        """Remove a drawing that should not stay."""


class _Bar(_Shown):
    """A progress bar on a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        text, left = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[left]"))
        self._progress = Progress(text, BarColumn(), left, console=console, auto_refresh=False, transient=True)
        self._task = self._progress.add_task("", total=1.0, left="")

    def draw(self, line: str, fraction: float, left: str) -> None:
        self._progress.update(self._task, description=line, completed=fraction, left=left)
        self._progress.start()
        self._progress.refresh()

    def erase(self) -> None:
        self._progress.stop()


class _Lines(_Shown):
    """Plain lines, few of them."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def draw(self, line: str, fraction: float, left: str) -> None:
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            say(f"rowprop: {line} ({100 * fraction:.0f} %, {left})" if left else f"rowprop: {line}")
            self._next_s = now_s + AGAIN_S if left else 0.0  # once the time left is told, the next line can wait
