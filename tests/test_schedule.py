"""The schedule is Composer's, batch by batch; ramps and clocks follow their docstrings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from rowprop import SelectiveBackprop
from rowprop.errors import InvalidInput
from rowprop.schedule import Joined, Progress, Ramp, Schedule
from rowprop.selection import TopK


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


@pytest.mark.parametrize("window", [("a", 1), (None, 1), (0, "1"), (math.nan, 1), (False, 1), (0, 10**400)], ids=str)
def test_a_window_of_something_else_than_numbers_is_refused(window):
    # Red when: texts are compared with 0, which raises in words of Python's.
    with pytest.raises(InvalidInput, match="but fractions of the training with 0 <= start < end <= 1 were needed"):
        Schedule(*window)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Joined(5), "Joined got parts=5 but pairs of a start and a part were needed, e.g. [(0.0, 1.0), "),
        (lambda: Joined([0.5]), "Joined got parts=[0.5] but pairs of a start and a part were needed"),
        (lambda: Joined([(0.0, Ramp)]), "Joined got <class 'rowprop.schedule.Ramp'> to start at 0.0 but a number"),
        (lambda: Joined([(0.0, lambda: 0.5)]), "to start at 0.0 but a number, or a callable from progress to one, was"),
        (
            lambda: Ramp(1.0, 0.5, curve=np.ones(2)),
            "Ramp got curve=array([1., 1.]) but one of linear, cosine was needed; the default is linear.",
        ),
        (lambda: Joined([(0.0, 1.0)])("a"), "Joined got progress='a' but a fraction of the training in [0, 1]"),
        (lambda: Ramp(1.0, 0.5)(None), "Ramp got progress=None but a fraction of the training in [0, 1]"),
        (lambda: Schedule().active("a", 0), "Schedule.active got progress='a' but a fraction of the training"),
        (lambda: Schedule().active(0.5, -1), "Schedule.active got batch_index=-1 but a whole number, 0 or more"),
        (lambda: Progress(10).count(0.5), "Progress.count got a float but the record of a step was needed"),
    ],
)
def test_what_a_schedule_is_asked_with_is_refused_in_a_sentence(call, sentence):
    # Red when: a check at these doors is left out.
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        call()


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


# --- numbers that follow the training --------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [(1.0, 0.2), (0.1, 0.7)])
def test_a_ramp_is_a_line_between_two_holds(first, last):
    # Red when: start and end are taken as widths, or the ends are not held.
    steps = [step / 50 for step in range(51)]
    expected = np.interp(steps, [0.2, 0.6], [first, last])
    assert [Ramp(first, last, 0.2, 0.6)(step) for step in steps] == pytest.approx(expected.tolist())


def test_a_cosine_ramp_is_half_a_wave():
    # Red when: the wave is a quarter, or runs from the other end.
    ramp = Ramp(1.0, 0.0, curve="cosine")
    for step in range(101):
        assert ramp(step / 100) == pytest.approx(math.cos(math.pi * step / 200) ** 2)


def test_joined_parts_see_their_own_progress():
    # Red when: a part is asked at the training's progress, or the part before still holds where the next one starts.
    seen: list[float] = []

    def middle(progress: float) -> float:
        seen.append(progress)
        return 0.5

    joined = Joined([(0.0, 1.0), (0.25, middle), (0.75, Ramp(0.2, 0.4))])
    values = [joined(progress) for progress in (0.0, 0.24, 0.25, 0.5, 0.74, 0.75, 0.875, 1.0)]
    assert values == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5, 0.2, 0.3, 0.4])
    assert seen == pytest.approx([0.0, 0.5, 0.98])


def test_joined_schedules_nest():
    # Red when: a part is asked at the training's progress.
    inner = Joined([(0.0, 0.1), (0.5, 0.2)])
    outer = Joined([(0.0, inner), (0.5, inner)])
    assert [outer(progress) for progress in (0.0, 0.25, 0.5, 0.75)] == [0.1, 0.2, 0.1, 0.2]


def test_progress_counts_what_it_is_asked_to():
    # Red when: kept rows are counted as seen ones (the paper's trap), or the rows of one rank as the rows of all ranks.
    torch.manual_seed(0)
    selective = SelectiveBackprop(
        nn.Linear(3, 1), lambda model, batch: model(batch).squeeze(1).square(), TopK(0.25), engine="masked"
    )
    clocks = {counts: Progress(100, counts) for counts in ("steps", "rows_seen", "rows_backpropagated")}
    for rows in (8, 8, 4):
        _, record = selective(torch.randn(rows, 3))
        for clock in clocks.values():
            clock.count(record)
    assert {counts: clock.fraction for counts, clock in clocks.items()} == {
        "steps": 0.03,
        "rows_seen": 0.2,
        "rows_backpropagated": 0.05,
    }
    ranks = replace(record, num_rows=10, kept_by_rank=(4, 0, 3))
    assert clocks["rows_seen"].count(ranks) == 0.5 and clocks["rows_backpropagated"].count(ranks) == 0.12


def test_progress_ends_at_one_and_goes_on_from_its_state():
    # Red when: the count is not in the state, or the fraction is not capped.
    @dataclass
    class Step:
        num_rows: int = 7
        kept_by_rank: tuple[int, ...] = (2,)

    clock, other = Progress(20, "rows_seen"), Progress(20, "rows_seen")
    clock.count(Step())
    other.load_state_dict(clock.state_dict())
    assert [other.count(Step()) for _ in range(3)] == [0.7, 1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Ramp("1", 0.5), "Ramp got first='1' but a finite number was needed, e.g. a fraction to keep."),
        (lambda: Ramp(1, math.nan), "Ramp got last=nan but a finite number was needed, e.g. a fraction to keep."),
        (
            lambda: Ramp(1, 0.5, 0.5, 0.5),
            "Ramp got start=0.5 and end=0.5 but fractions of the training with 0 <= start < end <= 1 were needed; "
            "for a step use Joined.",
        ),
        (
            lambda: Ramp(1, 0.5, curve="sine"),
            "Ramp got curve='sine' but one of linear, cosine was needed; the default is linear.",
        ),
        (
            lambda: Joined([(0.1, 1.0)]),
            "Joined got parts that start at [0.1] but fractions of the training were needed, the first 0, each larger "
            "than the one before, all below 1.",
        ),
        (
            lambda: Joined([(0, 1.0), (0.5, 0.5), (0.5, 1.0)]),
            "Joined got parts that start at [0, 0.5, 0.5] but fractions of the training were needed, the first 0, each "
            "larger than the one before, all below 1.",
        ),
        (
            lambda: Joined([(0, "half")]),
            "Joined got 'half' to start at 0 but a number, or a callable from progress to one, was needed; e.g. "
            "Ramp(1.0, 0.3).",
        ),
        (
            lambda: Progress(0),
            "Progress got total=0 but a whole number of steps, 1 or more, was needed: the count at the end of the "
            "training.",
        ),
        (
            lambda: Progress(5, "epochs"),
            "Progress got counts='epochs' but one of steps, rows_seen, rows_backpropagated was needed; "
            "the default is steps.",
        ),
    ],
)
def test_what_is_no_schedule_is_refused_in_a_sentence(make, sentence):
    # Red when: the check is dropped, so that training fails later, or trains by something else.
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("state", [None, {}, {"counted": "3"}, {"counted": -1}, {"counted": 1.5}], ids=str)
def test_a_count_that_cannot_be_is_refused_and_not_loaded(state):
    # Red when: the count is taken as it comes, or made whole by int().
    clock = Progress(10)
    with pytest.raises(InvalidInput, match=r"Progress\.load_state_dict got"):
        clock.load_state_dict(state)
    assert clock.state_dict() == {"counted": 0}
