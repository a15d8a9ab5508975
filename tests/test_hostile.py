"""The hostile trial: the part of it that takes seconds, and tests of the trial itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rowprop
from hostile import attempt, missing, one_at_a_time, trial
from hostile_cases import DOORS, Door, needs
from hostile_commands import Case, changed, judged
from rowprop.errors import InvalidInput


def test_every_public_name_and_argument_is_in_the_catalogue():
    # Red with a public function, method or argument that tools/hostile_cases.py does not name.
    assert [*missing()] == []


@pytest.mark.parametrize("door", ["TopK", "Selection", "SelectiveBackprop.__call__", "pick", "thin", "Thinning"])
def test_bad_values_are_refused(door: str):
    # Red with any check of these doors left out: an argument that nobody looks at is accepted, or ends in a TypeError.
    findings = trial(door, part="library", pairs=0)
    assert findings.inputs > 100 and not findings.found, "\n".join(findings.told())


def test_the_catalogue_is_large():
    assert sum(1 for _ in one_at_a_time([*DOORS], None)) > 10_000


def _door(call: Any) -> Door:
    return Door(call, {"keep": needs(0.5, "0.5")})


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda keep: keep, "result"),
        (lambda keep: rowprop.TopK(None), "refused"),  # pyright: ignore
        (lambda keep: keep.nothing, "traceback"),
    ],
)
def test_each_outcome_is_told_from_the_others(call: Any, outcome: str):
    assert attempt(_door(call), {"keep": lambda: 0.5})[0] == outcome


def test_a_refusal_that_changes_the_state_is_found():
    class Remembers:
        held = 0

        def state_dict(self) -> dict[str, int]:
            return {"held": self.held}

        def load_state_dict(self, state: Any) -> None:
            self.held = state["held"]
            raise InvalidInput("too late")

    door = Door(lambda on, state: on.load_state_dict(state), {"state": needs({"held": 1})}, Remembers)
    assert attempt(door, {"state": lambda: {"held": 1}})[0] == "changed"


def test_files_outside_of_out_are_looked_at():
    case = Case(("flops", "m", "--out", "new"), False, ("new",))
    before = {"notes.txt": "a"}
    assert changed(before, {"notes.txt": "a", "new": "folder", "new/report.html": "b"}, case) == ""
    assert changed(before, {"notes.txt": "b"}, case) == "notes.txt is changed"
    assert changed(before, {}, case) == "notes.txt is gone"
    assert changed(before, {"notes.txt": "a", "stray": "b"}, case) == "stray was made"


@pytest.mark.parametrize(
    ("code", "err", "outcome"),
    [(0, "", "result"), (2, "rowprop: a sentence.", "refused"), (1, "", "code"), (2, "", "silent")],
)
def test_exit_codes_are_judged(code: int, err: str, outcome: str):
    assert judged(Case(("flops", "m"), False), code, "", err, "")[0] == outcome
    assert judged(Case(("flops", "m"), False), 2, "", "Traceback (most recent call last):", "")[0] == "traceback"


def test_the_sandbox_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from hostile_commands import sandbox

    monkeypatch.chdir(tmp_path)
    with sandbox() as root:
        assert Path.cwd() == root.resolve()
    assert Path.cwd() == tmp_path.resolve() and not root.exists()
