"""The hostile trial: the part of it that takes seconds, and tests of the trial itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hostile_cases
from hostile import attempt, trial
from hostile_cases import Argument, Door, doors, use, within
from hostile_commands import judge, run, sandbox
from hostile_values import half_of, losses_fn
from rowprop.errors import InvalidInput


def test_every_public_name_and_argument_is_in_the_catalogue(monkeypatch: pytest.MonkeyPatch):
    # Red with a public function, class or argument that tools/hostile_cases.py does not name.
    assert doors()[1] == []
    monkeypatch.delitem(hostile_cases.ENTRIES, "pick")
    monkeypatch.delitem(hostile_cases.ARGUMENTS, "tau")
    forgotten = "pick is public but not in the catalogue", "thin takes tau, which the catalogue does not give"
    assert {*doors.__wrapped__()[1]} == {*forgotten}


@pytest.mark.parametrize("door", ["TopK", "Selection", "SelectiveBackprop.__call__ ", "pick", "thin"])
def test_bad_values_are_refused(door: str):
    # Red with any check of these doors left out: an argument that nobody looks at is accepted, or ends in a TypeError.
    inputs, found = trial(door)
    assert inputs > 100 and not found, "\n".join(found)


class Remembers(SimpleNamespace):
    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def refuse(self, keep: Any) -> None:
        self.held = keep
        raise InvalidInput("too late")


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda on, keep: keep, "silent"),
        (lambda on, keep: half_of(keep), "refused"),
        (lambda on, keep: keep.nothing, "traceback"),
        (lambda on, keep: use(float("nan")), "wrong"),
        (lambda on, keep: losses_fn(None, keep), "own error"),
        (Remembers.refuse, "changed"),
    ],
)
def test_each_outcome_is_told_from_the_others(call: Any, outcome: str):
    door = Door(call, {"keep": Argument(lambda: 0.5, within("(0,1]"))}, lambda: Remembers(held=1))
    assert attempt(door, {"keep": ("two", lambda: 2)})[0] == outcome
    assert attempt(Door(lambda keep: keep, door.arguments), {"keep": ("one", lambda: 1)}) == ("result", "")
    assert attempt(Door(lambda keep: keep.nothing, door.arguments), {})[0] == "stale"


def test_files_outside_of_out_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with sandbox("new"):
        Path("new").mkdir()
        Path("new/report.html").write_text("ours")
    for path in ("stray", "notes.txt"):
        with pytest.raises(AssertionError, match=path), sandbox("new"):
            Path(path).write_text("ours")
    assert Path.cwd() == tmp_path.resolve() and not [*tmp_path.iterdir()]


def test_exit_codes_are_judged():
    run("flops", model="hostile_commands:alone", input_shape="8x3", flags="--json")
    for code, err, outcome in (
        (2, "rowprop: a sentence.", InvalidInput),
        (1, "", AssertionError),
        (2, "", AssertionError),
    ):
        with pytest.raises(outcome):
            judge(["flops"], code, "", err)
