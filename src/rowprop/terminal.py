"""What every command prints with: one look of tables, and a width where there is no terminal."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 120  # a pipe has no width; the tables fit into this one


def stdout() -> Console:
    """Return a console on stdout, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def new_table(title: str) -> Table:
    """Return an empty table under its title."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
