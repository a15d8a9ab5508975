"""A step's memory of rows: its history, and the sampler that fills the batches where there is one."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from rowprop.selection.base import Context, Selection, unread


@runtime_checkable
class History(Protocol):
    """A memory of rows, as the step uses it; :class:`rowprop.history.LossHistory` is one."""

    def update(self, ids: Tensor, losses: Tensor, rows: Tensor) -> object:
        """Take note of a batch: ``losses`` (N,), NaN where nobody computed them, and the chosen ``rows`` (K,)."""
        ...

    def weights_of(self, ids: Tensor) -> Tensor:
        """Return the factor of each row, shape ``(N,)``."""
        ...


@runtime_checkable
class Pruning(Protocol):
    """A sampler that prunes, as the step uses it; :class:`rowprop.history.PruningSampler` is one."""

    @property
    def history(self) -> History:
        """The memory by which it prunes."""
        ...

    @property
    def epoch(self) -> int:
        """Number of the running epoch."""
        ...

    def trained(self, ids: Tensor) -> int:
        """How many rows of the running epoch are done once these are trained."""
        ...

    def progress(self, trained: int) -> float:
        """Fraction of all epochs that is done, where ``trained`` rows of the running one are."""
        ...

    def state_dict(self, trained: int) -> dict[str, Any]:
        """Everything that the rest of the epoch depends on, ``trained`` rows of it being done."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue where ``state`` was taken."""
        ...


class Memory:
    """The talk of a step with its history: it tells the losses, and asks for the factors.

    Args:
        given: A history, a sampler that prunes by one, or None: nothing is remembered.

    Attributes:
        history: The history; None where nothing is remembered.
        sampler: The sampler; None where there is none.
    """

    def __init__(self, given: History | Pruning | None) -> None:
        self.sampler = given if isinstance(given, Pruning) else None
        self.history = given.history if isinstance(given, Pruning) else given
        self._trained = (0, 0)  # rows of the sampler's epoch, and the number of that epoch

    def weighed(self, selection: Selection, context: Context) -> Selection:
        """Multiply the weights by the factors of the rows."""
        if self.history is None:
            return selection
        factors = self.history.weights_of(cast("Tensor", context.ids)).to(selection.weights)
        return unread(selection.rows, selection.weights * factors[selection.rows], selection.num_rows)

    def note(self, selection: Selection, context: Context, known: Tensor | None, scores: Tensor, kept: Tensor) -> None:
        """Tell the history of a step, and note how far it has trained the sampler's epoch.

        Args:
            selection: The rows that contributed.
            context: Of the batch.
            known: Losses of all rows, shape ``(N,)``; None where only the losses of the kept rows are known.
            scores: Of all rows, shape ``(N,)``.
            kept: Losses of the rows that contributed, shape ``(K,)``.
        """
        if self.history is not None:
            if known is None:
                known = torch.full_like(scores, torch.nan).index_copy(0, selection.rows, kept.to(scores.dtype))
            self.history.update(cast("Tensor", context.ids), known, selection.rows)
        if self.sampler is not None:
            # The furthest row counts, so a batch that is given again adds nothing.
            reached = self.sampler.trained(cast("Tensor", context.ids))
            self._trained = max(self.trained, reached), self.sampler.epoch

    @property
    def trained(self) -> int:
        """Rows of the sampler's running epoch that are done: its loader's workers have fetched more."""
        trained, epoch = self._trained
        return trained if self.sampler is not None and epoch == self.sampler.epoch else 0

    @property
    def progress(self) -> float | None:
        """Fraction of the sampler's epochs that is done; None without one."""
        return None if self.sampler is None else self.sampler.progress(self.trained)

    def load_sampler(self, state: dict[str, Any]) -> None:
        """Have the sampler continue where ``state`` was taken."""
        sampler = cast("Pruning", self.sampler)
        sampler.load_state_dict(state)
        self._trained = state["trained"], sampler.epoch
