"""What a comparison shows in the terminal: bars while it runs, two tables at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from rowprop.compare.train import PHASES, Run
from rowprop.terminal import new_table


class Bars:
    """One bar per method, filled as its seeds are trained; a line per finished run."""

    def __init__(self, console: Console, labels: Sequence[str], seeds: int) -> None:
        width = max(len(label) for label in labels)
        self._progress = Progress(
            TextColumn(f"{{task.fields[label]:<{width}}}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("seeds  {task.fields[note]}"),
            console=console,
            refresh_per_second=4,  # drawing shares the processor with training
        )
        self._tasks: dict[str, TaskID] = {
            label: self._progress.add_task("", total=seeds, start=False, label=label, note="") for label in labels
        }
        self._done = dict.fromkeys(labels, 0)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, label: str) -> None:
        """Start the method's bar."""
        self._progress.start_task(self._tasks[label])

    def tick(self, label: str, fraction: float, accuracy: float | None) -> None:
        """Show how far the method's present run is."""
        note = "" if accuracy is None else f"{100 * accuracy:5.2f} %"
        self._progress.update(self._tasks[label], completed=self._done[label] + min(fraction, 0.999), note=note)

    def finish(self, run: Run, *, resumed: bool) -> None:
        """Count a run that is finished, now or before."""
        self._done[run.label] += 1
        note = f"{100 * run.accuracy:5.2f} %"
        self._progress.update(self._tasks[run.label], completed=self._done[run.label], note=note)
        how = "kept from before" if resumed else f"{run.train_s:.1f} s"
        self._progress.console.print(
            f"{run.label} seed {run.seed}: {100 * run.accuracy:.2f} %, {how}", highlight=False, style="dim"
        )


def with_spread(value: dict[str, Any], scale: float, digits: int) -> str:
    """Return "mean ± spread", or the mean alone where one seed has no spread."""
    mean = f"{scale * value['mean']:.{digits}f}"
    return mean if value["spread"] is None else f"{mean} ± {scale * value['spread']:.{digits}f}"


def print_tables(console: Console, results: dict[str, Any]) -> None:
    """Print the methods' table, where the time went, and the verdict."""
    methods: list[dict[str, Any]] = results["methods"]
    table = new_table("Methods side by side")
    for column in ("method", "engine"):
        table.add_column(column, no_wrap=True)
    for column in ("accuracy, %", "training, s", "x full", "rows seen", "kept\nof seen"):
        table.add_column(column, justify="right")
    for method in methods:
        ratio = method["ratio_to_full"]
        rows, seen = method["rows_backpropagated"], method["rows_seen"]
        table.add_row(
            method["label"],
            method["engine"],
            with_spread(method["accuracy"], 100, 2),
            with_spread(method["train_s"], 1, 1),
            with_spread(ratio, 1, 2) if ratio else "-",
            f"{seen:,.0f}",
            f"{100 * rows / seen:.0f}\N{NO-BREAK SPACE}%",
        )
    console.print(table)
    times = new_table("Where the time went, seconds per run")
    times.add_column("method", no_wrap=True)
    for phase in PHASES:
        times.add_column(phase, justify="right")
    for method in methods:
        times.add_row(method["label"], *(f"{method['phases_s'][phase]:.2f}" for phase in PHASES))
    console.print(times)
    console.print(results["verdict"], markup=False, highlight=False)
