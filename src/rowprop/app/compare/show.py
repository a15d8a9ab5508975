"""The tables of a comparison in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rowprop.app.compare.runs import PHASES, task_of, with_spread
from rowprop.app.terminal import new_table


def print_tables(console: Console, results: dict[str, Any]) -> None:
    """Print the methods' table, where the time went, and the verdict."""
    methods: list[dict[str, Any]] = results["methods"]
    task = task_of(results)
    columns = ("method", "engine", task.title, "training, s", "x full", f"{task.unit}s seen", "kept of seen")
    rows = [
        (
            method["label"], method["engine"], task.over_seeds(method), with_spread(method["train_s"], 1, 1),
            with_spread(method["ratio_to_full"], 1, 2) if method["ratio_to_full"] else "-",
            f"{method['rows_seen']:,.0f}", f"{100 * method['rows_backpropagated'] / method['rows_seen']:.0f} %",
        )
        for method in methods
    ]  # fmt: skip
    console.print(new_table("Methods side by side", columns, rows, words=2))
    times = [(method["label"], *(f"{method['phases_s'][phase]:.2f}" for phase in PHASES)) for method in methods]
    console.print(new_table("Where the time went, seconds per run", ("method", *PHASES), times))
    console.print(results["verdict"], markup=False, highlight=False)
