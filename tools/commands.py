"""The command line in the process of a test, and what every refusal of it has in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rowprop.app.cli import app

TINY = (
    "--data", "compare_cases:tiny", "--model", "compare_cases:net", "--batch", "20", "--epochs", "2", "--seeds", "2",
    "--methods", "full,ohem",
)  # fmt: skip


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def compare(out: Path | str, *arguments: str | Path) -> Any:
    """A small comparison: two methods, two seeds."""
    return run("compare", *TINY, *arguments, "--out", out)


def refused(result: Any, *said: str, before: bool = False) -> None:
    """Exit code 2, nothing on stdout, and one sentence with these words; ``before`` it stderr may hold other lines."""
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    *others, last = result.stderr.splitlines()
    assert last.startswith("rowprop: ") and "Traceback" not in result.stderr
    assert before or not others, others
    for words in said:
        assert words in last
