"""The schedule is Composer's, batch by batch; ramps and clocks follow their docstrings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from laws import Step
from rowprop.schedule import Joined, Progress, Ramp, Schedule
from rowprop.selection import TopK
from sentences import refused
from step_cases import shift_step


def composer(current_duration: float, batch_idx: int, start: float, end: float, interrupt: int) -> bool:
    """`should_selective_backprop`, retold in its two steps."""
    in_window = current_duration >= start and current_duration < end
    if not in_window:
        return False
    return True if interrupt == 0 else (batch_idx + 1) % interrupt != 0


@pytest.mark.parametrize("interrupt", [0, 2, 3, 7])
@pytest.mark.parametrize(("start", "end"), [(0.5, 0.9), (0.0, 1.0), (0.25, 0.75)])
def test_every_batch_of_a_training_follows_composers_formula(start, end, interrupt):
    # Red when: `<` and `<=` are exchanged at either end, the batch index is not counted from 1 in the remainder, or
    # interrupt follows Composer's README instead of its code.
    schedule = Schedule(start, end, interrupt)
    for step in range(0, 201):
        for batch_index in (step, step % 13):
            expected = composer(step / 200, batch_index, start, end, interrupt)
            assert schedule.active(step / 200, batch_index) is expected


def test_defaults_are_composers():
    assert Schedule() == Schedule(start=0.5, end=0.9, interrupt=2)


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


def test_progress_counts_what_it_is_asked_to():
    # Red when: kept rows are counted as seen ones (the paper's trap), or the rows of one rank as the rows of all ranks.
    step = shift_step(TopK(0.25))
    clocks = {counts: Progress(100, counts) for counts in ("steps", "rows_seen", "rows_backpropagated")}
    for rows in (8, 8, 4):
        _, record = step(torch.rand(rows))
        for clock in clocks.values():
            clock.count(record)
    found = {counts: clock.fraction for counts, clock in clocks.items()}
    assert found == {"steps": 0.03, "rows_seen": 0.2, "rows_backpropagated": 0.05}
    ranks = replace(record, num_rows=10, kept_by_rank=(4, 0, 3))
    assert clocks["rows_seen"].count(ranks) == 0.5 and clocks["rows_backpropagated"].count(ranks) == 0.12


def test_progress_ends_at_one_and_goes_on_from_its_state():
    # Red when: the count is not in the state, or the fraction is not capped.
    clock, other = Progress(20, "rows_seen"), Progress(20, "rows_seen")
    clock.count(Step(7))
    other.load_state_dict(clock.state_dict())
    assert [other.count(Step(7)) for _ in range(3)] == [0.7, 1.0, 1.0]


WINDOW = "but fractions of the training with 0 <= start < end <= 1 were needed;"
STARTS = "but fractions of the training were needed, the first 0, each larger than the one before, all below 1."
PROGRESS = "but a fraction of the training in [0, 1]"
PART = "but a number, or a callable from progress to one, was needed; e.g. Ramp(1.0, 0.3)."
NO_WINDOWS = [
    *[(0.9, 0.5), (0.5, 0.5), (-0.1, 0.5), (0.5, 1.1), (math.nan, 0.5)],
    *[("a", 1), (None, 1), (0, "1"), (math.nan, 1), (False, 1), (0, 10**400)],
]
REFUSED = [
    *[
        (lambda a=a, b=b: Schedule(a, b), f"Schedule got start={a!r} and end={b!r} {WINDOW} start=0, end=1 selects")
        for a, b in NO_WINDOWS
    ],
    *[
        (lambda bad=bad: Schedule(interrupt=bad), f"Schedule got interrupt={bad!r} but a whole number of batches")
        for bad in (-1, 2.0, True, None)
    ],
    (lambda: Schedule(interrupt=1), "interrupt=1, under which every batch would be trained whole ... use 0 ... or 2"),
    (lambda: Ramp("1", 0.5), "Ramp got first='1' but a finite number was needed, e.g. a fraction to keep."),
    (lambda: Ramp(1, 0.5, 0.5, 0.5), f"Ramp got start=0.5 and end=0.5 {WINDOW} for a step use Joined."),
    (lambda: Joined(5), "Joined got parts=5 but pairs of a start and a part were needed, e.g. [(0.0, 1.0), "),
    (lambda: Joined([0.5]), "Joined got parts=[0.5] but pairs of a start and a part were needed"),
    (lambda: Joined([(0.1, 1.0)]), f"Joined got parts that start at [0.1] {STARTS}"),
    (lambda: Joined([(0, 1.0), (0.5, 0.5), (0.5, 1.0)]), f"Joined got parts that start at [0, 0.5, 0.5] {STARTS}"),
    (lambda: Joined([(0, "half")]), f"Joined got 'half' to start at 0 {PART}"),
    (lambda: Joined([(0.0, Ramp)]), f"Joined got <class 'rowprop.schedule.Ramp'> to start at 0.0 {PART}"),
    (lambda: Joined([(0.0, lambda: 0.5)]), f"to start at 0.0 {PART}"),
    (lambda: Joined([(0.0, 1.0)])("a"), f"Joined got progress='a' {PROGRESS}"),
    (lambda: Progress(0), "Progress got total=0 but a whole number of steps, 1 or more, was needed: the count at"),
    (lambda: Progress(10).count(0.5), "Progress.count got a float but the record of a step was needed"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_what_is_no_schedule_or_no_progress_is_refused_in_a_sentence(call, sentence):
    # Red when: a check is dropped, so that training fails later, or trains by something else.
    with refused(sentence):
        call()


@pytest.mark.parametrize("state", [None, {}, {"counted": "3"}, {"counted": -1}, {"counted": 1.5}], ids=str)
def test_a_count_that_cannot_be_is_refused_and_not_loaded(state):
    # Red when: the count is taken as it comes, or made whole by int().
    clock = Progress(10)
    with refused("Progress.load_state_dict got"):
        clock.load_state_dict(state)
    assert clock.state_dict() == {"counted": 0}
