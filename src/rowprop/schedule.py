"""When rows are selected, how many, and how far the training is.

Progress is the fraction of the training that is done. The ``keep`` of a selector takes any function of it. An argument
that is not as described here raises :class:`rowprop.InvalidInput`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rowprop.checks import check_choice, check_entries, check_number, check_whole, is_number, shown, takes, wrong
from rowprop.errors import InvalidInput

__all__ = ["Joined", "Progress", "Ramp", "Schedule"]


def _check_window(owner: str, start: float, end: float, advice: str) -> None:
    if not (is_number(start) and is_number(end) and 0 <= start < end <= 1):
        needed = f"fractions of the training with 0 <= start < end <= 1 were needed; {advice}"
        raise InvalidInput(f"{owner} got start={start!r} and end={end!r} but {needed}")


@dataclass(frozen=True)
class Schedule:
    """Select rows in the middle of training only, with whole batches in between: Composer's schedule.

    Selection is on where ``start <= progress < end`` and ``interrupt == 0 or (batch_index + 1) % interrupt != 0``.
    Source: the code of mosaicml/composer, ``should_selective_backprop``; its batch index counts within the epoch.

    Args:
        start: Fraction of the training at which selection begins, in [0, 1); default 0.5.
        end: Fraction at which it ends, above ``start``, at most 1; default 0.9.
        interrupt: Every how many batches one is trained whole; 0 for never; default 2. 1, never to select, is refused.

    Example:
        >>> [Schedule(interrupt=3).active(0.6, batch_index) for batch_index in range(6)]
        [True, True, False, True, True, False]
    """

    start: float = 0.5
    end: float = 0.9
    interrupt: int = 2

    def __post_init__(self) -> None:
        _check_window("Schedule", self.start, self.end, "start=0, end=1 selects throughout.")
        needed = "a whole number of batches was needed; 0 never interrupts."
        check_whole("Schedule", "interrupt", self.interrupt, 0, needed)
        if self.interrupt == 1:
            came = "interrupt=1, under which every batch would be trained whole and no row ever dropped"
            raise InvalidInput(f"Schedule got {came}; use 0 to select in every batch, or 2 to alternate.")

    def active(self, progress: float, batch_index: int) -> bool:
        """Whether rows are selected in batch number ``batch_index``, from 0; else it is trained whole."""
        _check_progress("Schedule.active", progress)
        check_whole("Schedule.active", "batch_index", batch_index, 0)
        return self.start <= progress < self.end and (self.interrupt == 0 or (batch_index + 1) % self.interrupt != 0)


@dataclass(frozen=True)
class Ramp:
    """Go from one number to another while the training goes from one fraction to another.

    Args:
        first: The number at ``start`` and before, finite.
        last: The number at ``end`` and after, finite.
        start: Fraction of the training at which it leaves ``first``, in [0, 1); default 0.0.
        end: Fraction at which it arrives at ``last``, above ``start``, at most 1; default 1.0.
        curve: ``"linear"`` (default), or ``"cosine"``: half a wave, slow at both ends.

    Example:
        >>> keep = Ramp(1.0, 0.5, start=0.2, end=0.6)
        >>> [keep(progress) for progress in (0.0, 0.4, 1.0)]
        [1.0, 0.75, 0.5]
        >>> TopK(keep)(torch.zeros(8), rowprop.selection.Context(progress=0.4)).num_kept
        6
    """

    first: float
    last: float
    start: float = 0.0
    end: float = 1.0
    curve: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        for name, value in (("first", self.first), ("last", self.last)):
            check_number("Ramp", name, value, "a finite number was needed, e.g. a fraction to keep.")
        _check_window("Ramp", self.start, self.end, "for a step use Joined.")
        check_choice("Ramp", "curve", self.curve, ("linear", "cosine"))

    def __call__(self, progress: float) -> float:
        """Return the number at ``progress``, a fraction of the training."""
        _check_progress("Ramp", progress)
        share = (progress - self.start) / (self.end - self.start)
        if share <= 0 or share >= 1:
            return self.first if share <= 0 else self.last
        if self.curve == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.first + (self.last - self.first) * share


@dataclass(frozen=True)
class Joined:
    """One schedule after the other, each from its own start to the start of the next.

    Each part sees its own progress, 0 where it starts and 1 where the next one does, as in optax's ``join_schedules``.
    ``parts`` are pairs of the fraction of the training at which the part starts, and the part: a number, or a callable
    from progress to a number. The first starts at 0, each later than the one before, the last before 1.

    Example:
        >>> keep = Joined([(0.0, 1.0), (0.5, Ramp(1.0, 0.5))])
        >>> [keep(progress) for progress in (0.0, 0.4, 0.5, 0.75, 1.0)]
        [1.0, 1.0, 1.0, 0.75, 0.5]
    """

    parts: Sequence[tuple[float, float | Callable[[float], float]]]

    def __post_init__(self) -> None:
        try:
            given = [(start, part) for start, part in self.parts]
        except (TypeError, ValueError) as error:
            needed = "pairs of a start and a part were needed, e.g. [(0.0, 1.0), (0.5, 0.25)]."
            raise wrong("Joined", "parts", self.parts, needed) from error
        starts = [start for start, _ in given]
        ascending = all(map(is_number, starts)) and starts == sorted(set(starts))
        if not ascending or starts[:1] != [0] or starts[-1] >= 1:
            needed = "fractions of the training were needed, the first 0, each larger than the one before, all below 1."
            raise InvalidInput(f"Joined got parts that start at {starts!r} but {needed}")
        for start, part in given:
            if not is_number(part) and (not callable(part) or isinstance(part, type) or not takes(part, 1)):
                needed = "a number, or a callable from progress to one, was needed; e.g. Ramp(1.0, 0.3)."
                raise InvalidInput(f"Joined got {shown(part)} to start at {start!r} but {needed}")
        object.__setattr__(self, "parts", tuple(given))

    def __call__(self, progress: float) -> float:
        """Return the number at ``progress``, a fraction of the training."""
        _check_progress("Joined", progress)
        index = max(sum(start <= progress for start, _ in self.parts) - 1, 0)
        start, part = self.parts[index]
        end = self.parts[index + 1][0] if index + 1 < len(self.parts) else 1.0
        found = part((progress - start) / (end - start)) if callable(part) else part
        if not is_number(found):
            raise InvalidInput(f"Joined got {shown(found)} from the part at {start!r} but a finite number was needed.")
        return found


@dataclass(eq=False)
class Progress:
    """How far the training is, counted in steps or in rows: the clock of a learning-rate schedule.

    The counts differ where rows are left out: compare methods by the one that is bounded in the comparison. Source:
    angelajiang/SelectiveBackprop, ``--forwardlr``: without it the rate follows the backpropagated rows.

    Args:
        total: The count at the end of the training, 1 or more, in the unit of ``counts``.
        counts: ``"steps"`` (default): calls of :class:`rowprop.SelectiveBackprop`; ``"rows_seen"``: rows that went
            through the forward; ``"rows_backpropagated"``: rows that contributed to a gradient. The rows of all
            ranks count where the selection spans them; each rank is taken to have seen as many.

    Example:
        >>> progress, rate = Progress(total=20, counts="rows_seen"), Ramp(0.1, 0.0)
        >>> losses_fn = lambda model, batch: model(batch).squeeze(1).square()
        >>> selective = SelectiveBackprop(torch.nn.Linear(3, 1), losses_fn, TopK(keep=0.2))
        >>> loss, record = selective(torch.randn(10, 3))
        >>> rate(progress.count(record))
        0.05
    """

    total: int
    counts: Literal["steps", "rows_seen", "rows_backpropagated"] = "steps"

    def __post_init__(self) -> None:
        needed = f"a whole number of {self.counts}, 1 or more, was needed: the count at the end of the training."
        check_whole("Progress", "total", self.total, 1, needed)
        check_choice("Progress", "counts", self.counts, ("steps", "rows_seen", "rows_backpropagated"))
        self._counted = 0

    def count(self, record: Any) -> float:
        """Count the step of ``record``, a :class:`rowprop.step.Record`, and return the fraction that is then done."""
        if not hasattr(record, "kept_by_rank"):
            needed = "the record of a step was needed: the second value that SelectiveBackprop returns."
            raise InvalidInput(f"Progress.count got a {type(record).__name__} but {needed}")
        seen = record.num_rows * len(record.kept_by_rank)
        counts = {"steps": 1, "rows_seen": seen, "rows_backpropagated": sum(record.kept_by_rank)}
        self._counted += counts[self.counts]
        return self.fraction

    @property
    def fraction(self) -> float:
        """Fraction of the training that is done, in [0, 1]; 1 also where more was counted than ``total``."""
        return min(1.0, self._counted / self.total)

    def state_dict(self) -> dict[str, Any]:
        """Return the count so far."""
        return {"counted": self._counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the count of ``state``, or raise :class:`rowprop.InvalidInput` where it holds none."""
        check_entries("Progress.load_state_dict", state, ("counted",))
        check_whole("Progress.load_state_dict", "counted", state["counted"], 0)
        self._counted = state["counted"]


def _check_progress(owner: str, value: object) -> None:
    """Refuse a value that is no number; how far below 0 or above 1 is for the schedule to say."""
    check_number(owner, "progress", value, "a fraction of the training in [0, 1] was needed.")
