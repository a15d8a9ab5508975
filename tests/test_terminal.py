"""What people see while a command works: never markup of theirs, never more than a few lines in a pipe."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from rowprop.app.terminal import _Bar, _Lines, ticking


def test_the_first_moment_tells_no_time_left(capsys: pytest.CaptureFixture[str]):
    # Red: a time left for any fraction above 0; a first tick of 1e-6 after two seconds told of months.
    shown = _Lines()
    shown.tick("warming up", 1e-6)
    shown.start()
    assert capsys.readouterr().err == "rowprop: warming up\n"


def test_a_pipe_gets_the_line_and_the_time_left_and_then_silence(capsys: pytest.CaptureFixture[str]):
    # Red: `_next_s` left at 0 (a line per tick); `fraction` in the place of `1 - fraction`.
    lines = _Lines()
    lines.tick("23 ways, about 40 s", 0.0)
    assert capsys.readouterr().err == ""  # nothing is said of work that is soon done
    lines.start()
    assert capsys.readouterr().err == "rowprop: 23 ways, about 40 s\n"
    lines._begun_s = time.perf_counter() - 30
    lines.tick("round [red]1[/] of 10", 0.1)
    assert capsys.readouterr().err == "rowprop: round [red]1[/] of 10 (10 %, about 270 s left)\n"
    lines.tick("round 2 of 10", 0.2)
    assert capsys.readouterr().err == ""


def test_a_bar_shows_the_users_text_as_it_is_and_disappears():
    # Red: markup=True in the column (rich's MarkupError for a closing tag that closes nothing).
    drawn = io.StringIO()
    bar = _Bar(Console(file=drawn, force_terminal=True, width=80, color_system=None))
    bar.tick("[/foo] first", 0.0)
    assert drawn.getvalue() == ""
    bar.start()
    bar.tick("[red]x[/] second", 0.5)
    shown = drawn.getvalue()
    assert "[/foo] first" in shown and "[red]x[/] second" in shown and "about 0 s left" in shown
    bar.stop()
    assert drawn.getvalue().endswith("\x1b[1A\x1b[2K")  # one line up, and erased


def test_nothing_is_drawn_once_the_work_is_over(capsys: pytest.CaptureFixture[str]):
    # Red: the state "over" left out. The timer's thread may be on its way while the work ends.
    lines = _Lines()
    lines.tick("almost done", 0.9)
    lines.stop()
    lines.start()
    assert capsys.readouterr().err == ""


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="passed on"), ticking() as tick:
        tick("soon done", 0.5)
        raise ValueError("passed on")
    assert capsys.readouterr().err == ""
