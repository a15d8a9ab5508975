"""The command line in the process of a test, and what every refusal of it has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rowprop.app.cli import app


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def refused(result: Any, *said: str, before: bool = False) -> None:
    """Exit code 2, nothing on stdout, and one sentence with these words; ``before`` it stderr may hold other lines."""
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    *others, last = result.stderr.splitlines()
    assert last.startswith("rowprop: ") and "Traceback" not in result.stderr
    assert before or not others, others
    for words in said:
        assert words in last
