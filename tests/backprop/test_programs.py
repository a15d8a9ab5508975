"""Random programs: gradients of unlike rows and layouts meet, and values and gradients are those of plain indexing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import programs
import threads

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("first", [0, 200, 700, 900])
def test_random_programs_have_the_gradients_of_plain_indexing(first: int):
    # Red: without the padding index of an embedding; where gradients do not add up, or a graph that is used again gives
    # others. Once, by programs of other numbers: where gathers were known again by their address alone, also under an
    # unpack hook; where a write through a view copied sequences over tokens; where a function refused a gradient that
    # its caller had got sliced and handed on.
    assert not [fault for seed in range(first, first + 100) if (fault := programs.compare(seed))]


def test_a_wrong_gradient_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    # Red: with a tolerance of 1e-3.
    def wrong(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows] * 1.0 + (x.sum() - x.detach().sum()) * 1e-6

    monkeypatch.setattr(programs, "picked", wrong)
    found = [programs.check(seed) for seed in range(40)]
    assert sum(outcome.wrong for outcome in found) > 20


def test_every_step_can_be_done():
    # A step that always fails is left out of every program. Red: with any step's lambda raising a TypeError.
    done = Counter[str]()
    for number, name in enumerate(programs.STEPS):
        for seed in range(number, number + 12):
            p = programs.Program(seed, programs.indexed)
            p.made = [p.leaf(3, 4, 4).requires_grad_(), p.leaf(3, 4, 4)]
            p.made.append(p.made[0] * 2)
            try:
                p.run(f"0: {name}", programs.STEPS[name])
            except programs.REFUSED:
                continue
            done[name] += 1
            break
    assert not programs.STEPS.keys() - done.keys()


def test_threads_do_not_meet():
    # Red: where the unions of rows that gradients of one backward meet on are kept for all backwards and forgotten at
    # the end of any: a KeyError in some of them.
    assert not threads.run(200)
