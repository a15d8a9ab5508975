"""When rows are selected; outside of it, batches are trained whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from rowprop.errors import InvalidInput


@dataclass(frozen=True)
class Schedule:
    """Select rows in the middle of training only, with whole batches in between: Composer's schedule.

    Selection is on where ``start <= progress < end`` and, within that, on all batches but every ``interrupt``-th:
    ``interrupt == 0 or (batch_index + 1) % interrupt != 0``. So 2 (the default) alternates, 3 trains one whole batch
    after two selected ones, and 0 never interrupts.

    Args:
        start: Fraction of the training at which selection begins, in [0, 1); default 0.5.
        end: Fraction at which it ends, above ``start``, at most 1; default 0.9.
        interrupt: Every how many batches one is trained whole; 0 for never; default 2. 1 would never select and is
            refused.

    Raises:
        InvalidInput: ``0 <= start < end <= 1`` does not hold, or ``interrupt`` is 1, negative or no whole number.

    Example:
        >>> [Schedule(interrupt=3).active(0.6, batch_index) for batch_index in range(6)]
        [True, True, False, True, True, False]

    References:
        mosaicml/composer, ``should_selective_backprop`` (its README says otherwise about ``interrupt``; the code is
        followed here). Its batch index counts within the epoch.
    """

    start: float = 0.5
    end: float = 0.9
    interrupt: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= 1:
            raise InvalidInput(
                f"Schedule got start={self.start!r} and end={self.end!r} but fractions of the training with "
                "0 <= start < end <= 1 were needed; start=0, end=1 selects throughout."
            )
        interrupt = cast("object", self.interrupt)
        if isinstance(interrupt, bool) or not isinstance(interrupt, int) or interrupt < 0:
            raise InvalidInput(
                f"Schedule got interrupt={interrupt!r} but a whole number of batches was needed; 0 never interrupts."
            )
        if self.interrupt == 1:
            raise InvalidInput(
                "Schedule got interrupt=1, under which every batch would be trained whole and no row ever dropped; "
                "use 0 to select in every batch, or 2 to alternate."
            )

    def active(self, progress: float, batch_index: int) -> bool:
        """Whether rows are selected in this batch.

        Args:
            progress: Fraction of the training that is done, 0 at the first batch.
            batch_index: Number of the batch, from 0.

        Returns:
            True to select rows, False to train the whole batch.
        """
        return self.start <= progress < self.end and (self.interrupt == 0 or (batch_index + 1) % self.interrupt != 0)
