"""The hostile trial: the part of it that takes seconds, and planted faults, each of which it has to find."""

from __future__ import annotations

from typing import Any

import pytest

import hostile_cases
from hostile import trial
from rowprop.history import LossHistory


def test_every_argument_is_in_the_catalogue(monkeypatch: pytest.MonkeyPatch):
    # Red with an argument of a public callable that tools/hostile_cases.py does not name.
    assert hostile_cases.doors()
    monkeypatch.delitem(hostile_cases.ARGUMENTS, "tau")
    with pytest.raises(LookupError, match="no example of the argument tau"):
        hostile_cases.doors.__wrapped__()


@pytest.mark.parametrize("door", ["TopK", "Selection", "SelectiveBackprop.__call__ ", "pick", "thin"])
def test_bad_values_are_refused(door: str):
    # Red with any check of these doors left out: an argument that nobody looks at is accepted, or ends in a TypeError.
    inputs, found = trial(door)
    assert inputs > 100 and not found, "\n".join(found)


def nothing(*_: Any, **__: Any) -> None: ...


def writes_first(self: LossHistory, ids: Any, weights: Any, checked: Any = LossHistory.set_weights) -> None:
    self._updates += 1
    checked(self, ids, weights)


FAULTS = [  # where, what is there instead, the door, and what is found
    ("rowprop.selection.selectors.check_fraction", nothing, "RandomRows keep", "silent"),
    ("rowprop.selection.base._check_numbers", nothing, "Selection.mean rows", "wrong"),
    ("rowprop.history.pruning.check_vector", nothing, "PruningSampler.load_state_dict", "traceback"),
    ("rowprop.history.LossHistory.set_weights", writes_first, "LossHistory.set_weights weights", "changed"),
    ("rowprop.app.page.check_writable", lambda path: path.write_text(""), "rowprop flops out", "changed or made"),
    ("rowprop.app.cli.write_out", lambda text: print("done", text), "rowprop flops flags", "no JSON"),
    ("rowprop.app.cli.REFUSED", 1, "rowprop flops dtype", "exit code 1"),
]


@pytest.mark.parametrize(("where", "instead", "door", "what"), FAULTS)
def test_a_planted_fault_is_found(where: str, instead: Any, door: str, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(where, instead)
    found = trial(door)[1]
    assert any(what in each for each in found), found
