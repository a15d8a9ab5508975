"""The schedule is Composer's, batch by batch."""

from __future__ import annotations

import pytest

from rowprop.errors import InvalidInput
from rowprop.schedule import Schedule


def composer(current_duration: float, batch_idx: int, start: float, end: float, interrupt: int) -> bool:
    """`should_selective_backprop`, retold in its two steps."""
    in_window = current_duration >= start and current_duration < end
    if not in_window:
        return False
    return True if interrupt == 0 else (batch_idx + 1) % interrupt != 0


@pytest.mark.parametrize("interrupt", [0, 2, 3, 7])
@pytest.mark.parametrize(("start", "end"), [(0.5, 0.9), (0.0, 1.0), (0.25, 0.75)])
def test_every_batch_of_a_training_follows_composers_formula(start, end, interrupt):
    # Red when: `<` and `<=` are exchanged at either end, or the batch index is not counted from 1 in the remainder.
    schedule = Schedule(start, end, interrupt)
    for step in range(0, 201):
        for batch_index in (step, step % 13):
            expected = composer(step / 200, batch_index, start, end, interrupt)
            assert schedule.active(step / 200, batch_index) is expected


def test_what_interrupt_means_written_out():
    # Red when: interrupt follows Composer's README instead of its code.
    def pattern(interrupt: int) -> str:
        return "".join("S" if Schedule(0, 1, interrupt).active(0.5, index) else "w" for index in range(8))

    assert (pattern(0), pattern(2), pattern(3)) == ("SSSSSSSS", "SwSwSwSw", "SSwSSwSS")


def test_defaults_are_composers():
    assert Schedule() == Schedule(start=0.5, end=0.9, interrupt=2)


@pytest.mark.parametrize(("start", "end"), [(0.9, 0.5), (0.5, 0.5), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_a_window_that_is_none_is_refused(start, end):
    with pytest.raises(InvalidInput) as caught:
        Schedule(start, end)
    assert str(caught.value) == (
        f"Schedule got start={start!r} and end={end!r} but fractions of the training with 0 <= start < end <= 1 were "
        "needed; start=0, end=1 selects throughout."
    )


@pytest.mark.parametrize("interrupt", [-1, 2.0, True, None])
def test_an_interrupt_that_is_no_count_is_refused(interrupt):
    with pytest.raises(InvalidInput) as caught:
        Schedule(interrupt=interrupt)
    assert str(caught.value) == (
        f"Schedule got interrupt={interrupt!r} but a whole number of batches was needed; 0 never interrupts."
    )


def test_interrupt_one_is_refused_because_it_never_selects():
    with pytest.raises(InvalidInput) as caught:
        Schedule(interrupt=1)
    assert str(caught.value) == (
        "Schedule got interrupt=1, under which every batch would be trained whole and no row ever dropped; "
        "use 0 to select in every batch, or 2 to alternate."
    )
