"""A comparison in the terminal: bars and the time left while it runs, two tables at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from rowprop.app.compare.runs import PHASES, TASKS, Run, Task
from rowprop.app.terminal import new_table


class Bars:
    """One bar per method, filled as its seeds are trained, and one for all runs; a line per finished run.

    The time left is the pace of this session's training so far, evaluation included, times the runs that are missing.

    Args:
        console: Where to draw.
        labels: The methods.
        seeds: How many runs each has.
        kept: Runs that are finished before the first bar moves.
        task: Says which figure of a run is shown.

    """

    def __init__(
        self,
        console: Console,
        labels: Sequence[str],
        seeds: int,
        kept: Sequence[Run] = (),
        task: Task = TASKS["row"],
    ) -> None:
        self._task = task
        self._progress = Progress(
            TextColumn("{task.fields[label]}", markup=False),  # a user's own method may be called [red]
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,  # drawing shares the processor with training
        )
        self._tasks: dict[str, TaskID] = {
            label: self._progress.add_task("", total=seeds, start=False, label=label, note="seeds") for label in labels
        }
        self._done = dict.fromkeys(labels, 0)
        self._planned, self._kept = len(labels) * seeds, len(kept)
        self._all = self._progress.add_task("", total=self._planned, label="all runs", note="")
        self._begun_s: float | None = None
        self._told = False
        self._progress.console.print(
            f"{_counted(len(labels), 'method')} with {_counted(seeds, 'seed')}: {_counted(self._planned, 'run')}"
            + (f", {self._kept} of them finished before" if kept else ""),
            highlight=False,
            soft_wrap=True,
        )
        for run in kept:
            self._count(run)
            self._say(run, "kept from before")

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, label: str) -> None:
        """Start the method's bar."""
        if self._begun_s is None:
            self._begun_s = time.monotonic()
        self._progress.start_task(self._tasks[label])

    def tick(self, label: str, fraction: float, figure: float | None) -> None:
        """Show how far the method's present run is, and the last figure that it reached."""
        fraction = min(fraction, 0.999)
        note = "seeds" if figure is None else f"seeds  {self._task.shown(figure):>7}"
        self._progress.update(self._tasks[label], completed=self._done[label] + fraction, note=note)
        if figure is not None:  # one epoch at least is timed
            self._tell_left(fraction)

    def finish(self, run: Run) -> None:
        """Count a run that has just been trained."""
        self._count(run)
        left = self._tell_left(0.0)
        self._say(run, f"{run.train_s:.1f} s; {sum(self._done.values())} of {self._planned} runs{left}")

    def _count(self, run: Run) -> None:
        self._done[run.label] += 1
        note = f"seeds  {self._reached(run):>7}"
        self._progress.update(self._tasks[run.label], completed=self._done[run.label], note=note)
        self._progress.update(self._all, completed=sum(self._done.values()))

    def _say(self, run: Run, how: str) -> None:
        line = f"{run.label} seed {run.seed}: {self._reached(run)}, {how}"
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True, style="dim")

    def _reached(self, run: Run) -> str:
        return self._task.shown(getattr(run, self._task.figure))

    def _tell_left(self, fraction: float) -> str:
        """Show the time left, and state it in a line the first time that it is known; return it in words."""
        done = sum(self._done.values()) - self._kept + fraction
        missing = self._planned - self._kept - done
        spent_s = time.monotonic() - (self._begun_s or 0.0)
        left = f"about {duration(spent_s / done * missing)} left" if missing else ""
        self._progress.update(self._all, completed=self._kept + done, note=left)
        if missing and not self._told:
            self._told = True
            expected = f"{_counted(self._planned - self._kept, 'run')} to train: {left}, at the pace of the first epoch"
            self._progress.console.print(expected, highlight=False, soft_wrap=True)
        return f", {left}" if left else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration as people say it: ``8 s``, ``3 min``, ``2 h 10 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def with_spread(value: dict[str, Any], scale: float, digits: int) -> str:
    """Return "mean ± spread", or the mean alone for one seed, which has no spread."""
    mean = f"{scale * value['mean']:.{digits}f}"
    return mean if value["spread"] is None else f"{mean} ± {scale * value['spread']:.{digits}f}"


def task_of(results: dict[str, Any]) -> Task:
    """Return the task of the content of ``results.json``; earlier versions named no unit: they had rows alone."""
    return TASKS[results["data"].get("unit", "row")]


def print_tables(console: Console, results: dict[str, Any]) -> None:
    """Print the methods' table, where the time went, and the verdict."""
    methods: list[dict[str, Any]] = results["methods"]
    task = task_of(results)
    columns = ("method", "engine", task.title, "training, s", "x full", f"{task.unit}s seen", "kept of seen")
    rows = [
        (
            method["label"],
            method["engine"],
            with_spread(method[task.figure], task.scale, task.digits),
            with_spread(method["train_s"], 1, 1),
            with_spread(method["ratio_to_full"], 1, 2) if method["ratio_to_full"] else "-",
            f"{method['rows_seen']:,.0f}",
            f"{100 * method['rows_backpropagated'] / method['rows_seen']:.0f} %",
        )
        for method in methods
    ]
    console.print(new_table("Methods side by side", columns, rows, words=2))
    times = [(method["label"], *(f"{method['phases_s'][phase]:.2f}" for phase in PHASES)) for method in methods]
    console.print(new_table("Where the time went, seconds per run", ("method", *PHASES), times))
    console.print(results["verdict"], markup=False, highlight=False)
    if results["slow_note"]:
        console.print(results["slow_note"], markup=False, highlight=False)
