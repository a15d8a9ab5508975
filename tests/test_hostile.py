"""The hostile trial: the part of it that takes seconds, and planted faults, each of which it has to find."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

import hostile_cases
from hostile import HypothesisProvider, trial, values_of
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


def test_no_constants_of_the_imported_modules_are_drawn(monkeypatch: pytest.MonkeyPatch):
    # Red without `backend="steady"`: each process would draw others, as its imports are.
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", asked := Mock(return_value=None))
    assert values_of.__wrapped__(hostile_cases.doors()["TopK"].arguments["keep"]) and not asked.called


def writes_first(self: LossHistory, ids: Any, weights: Any, checked: Any = LossHistory.set_weights) -> None:
    self._updates += 1
    checked(self, ids, weights)


@pytest.mark.parametrize(("where", "instead", "door", "what"), [  # what is there instead, the door, what is found
    ("selection.selectors.check_fraction", Mock(), "RandomRows keep", "silent"),
    ("selection.base._check_numbers", Mock(), "Selection.mean rows", "wrong"),
    ("history.pruning.check_vector", Mock(), "PruningSampler.load_state_dict", "traceback"),
    ("history.LossHistory.set_weights", writes_first, "LossHistory.set_weights weights", "changed"),
    ("app.page.check_writable", lambda path: path.write_text(""), "rowprop flops out", "changed or made"),
    ("app.cli.write_out", lambda text: print("done", text), "rowprop flops flags", "no JSON"),
    ("app.cli.REFUSED", 1, "rowprop flops dtype", "exit code 1"),
])  # fmt: skip
def test_a_planted_fault_is_found(where: str, instead: Any, door: str, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"rowprop.{where}", instead)
    found = trial(door)[1]
    assert any(what in each for each in found), found
