"""Kept rows gathered over several batches until an optimizer's step has as many as it asks for."""

from __future__ import annotations

from rowprop.distributed import Share
from rowprop.errors import InvalidInput
from rowprop.selection.base import Selection, unread


class Quota:
    """Counts the rows that contribute to the pending optimizer step.

    Args:
        accumulate_to: B, how many rows an optimizer step has; None: the rows of one batch, however many.

    Attributes:
        contributed: How many rows of all ranks have contributed to the pending step so far; always 0 without B.
    """

    def __init__(self, accumulate_to: int | None) -> None:
        self.accumulate_to = accumulate_to
        self.contributed = 0

    def within(self, share: Share, selector: object) -> tuple[Selection, tuple[int, ...]]:
        """Cut a selection to the rows that the pending step still needs, and scale it to a mean over B rows.

        Returns:
            The rows that contribute, and how many of each rank do; ranks come in their order, as rows do.

        Raises:
            InvalidInput: There is a B, and the weights are not ``1/K``.
        """
        chosen, counts = share.selection, share.kept_by_rank
        if self.accumulate_to is None:
            return chosen, counts
        if not share.even:
            raise InvalidInput(
                f"SelectiveBackprop got accumulate_to={self.accumulate_to} and a selection with weights of its own "
                f"from {selector!r}, but weights of 1/K were needed to make each row count 1/B; return "
                "Selection.mean(rows, num_rows), or leave accumulate_to out and divide the losses of several batches "
                "by their number."
            )
        left = self.accumulate_to - self.contributed
        within = tuple(min(count, max(0, left - sum(counts[:rank]))) for rank, count in enumerate(counts))
        count, scale = within[share.rank], sum(counts) / self.accumulate_to
        return unread(chosen.rows[:count], chosen.weights[:count] * scale, chosen.num_rows), within

    def after(self, counts: tuple[int, ...]) -> tuple[int, bool]:
        """Rows that have contributed once these have, and whether the pending step is then complete."""
        contributed = self.contributed + sum(counts)
        return contributed, self.accumulate_to is None or contributed == self.accumulate_to
