"""What people see while a command works: never markup of theirs, never more than a few lines in a pipe."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from rowprop.app import terminal
from rowprop.app.terminal import bar, lines, ticking


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the clock, which a test sets; work says something after two of them."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(terminal, "QUIET_S", 2.0)
    return now


def test_a_pipe_gets_a_line_after_two_seconds_and_then_one_every_half_a_minute(clock: list[float], capsys):
    # Red: `due_s` left as it is (a line per tick); `fraction` in the place of `1 - fraction`; a time left for any
    # fraction above 0, which told of months; the time to load a model counted.
    tick = lines()
    said = []
    for seconds, line, fraction in (
        (0.5, "loading", 0.0), (1.9, "loading", 0.0), (2.0, "warming up", 1e-6), (3.0, "warming up", 1e-6),
        (31.9, "round [red]1[/] of 10", 0.1), (32.0, "round 2 of 10", 0.2), (61.8, "round 3", 0.3), (61.9, "r4", 0.4),
    ):  # fmt: skip
        clock[0] = 100.0 + seconds
        tick(line, fraction)
        said.append(capsys.readouterr().err)
    assert said == [
        "", "", "rowprop: warming up\n", "", "rowprop: round [red]1[/] of 10 (10 %, about 270 s left)\n", "", "",
        "rowprop: r4 (40 %, about 90 s left)\n",
    ]  # fmt: skip


def test_a_bar_shows_the_users_text_as_it_is_and_disappears():
    # Red: markup=True in the column (rich's MarkupError for a closing tag that closes nothing).
    drawn = io.StringIO()
    with bar(Console(file=drawn, force_terminal=True, width=80, color_system=None)) as tick:
        tick("[/foo] first", 0.0)
        tick("[red]x[/] second", 0.5)
        shown = drawn.getvalue()
        assert "[/foo] first" in shown and "[red]x[/] second" in shown
    assert drawn.getvalue().endswith("\x1b[1A\x1b[2K")  # one line up, and erased


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="passed on"), ticking() as tick:
        tick("soon done", 0.5)
        raise ValueError("passed on")
    assert capsys.readouterr().err == ""
