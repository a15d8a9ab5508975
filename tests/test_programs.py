"""Random programs: gradients of unlike rows and layouts meet, and values and gradients are those of plain indexing."""

from __future__ import annotations

import pytest
import torch

import rowprop
from programs import compare

PROGRAMS = 800
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("first", range(0, PROGRAMS, 200))
def test_random_programs_have_the_gradients_of_plain_indexing(first: int):
    # Programs 502 and 637 are red where a write through a view copies whole sequences over tokens.
    assert not [fault for seed in range(first, first + 200) if (fault := compare(seed))]


def test_a_wrong_gradient_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    def wrong(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows] * 1.0 + (x.sum() - x.detach().sum()) * 1e-6

    monkeypatch.setattr(rowprop, "pick", wrong)
    faults = [compare(seed) for seed in range(40)]
    assert sum(fault is not None for fault in faults) > 20 and any("is another one" in str(fault) for fault in faults)
