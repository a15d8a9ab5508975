"""What a selection is, and what a selector promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The rows of a batch that are kept, and what each counts.

    The selected loss is ``(losses[rows] * weights).sum()``; a plain mean over the kept rows has weights ``1/K``.

    Attributes:
        rows: Kept rows, shape ``(K,)``, int64, ascending and without repeats, ``0 <= K <= N``. None are kept where a
            draw or a threshold found none, or where the selection is one rank's part of a larger one.
        weights: One factor per kept row, shape ``(K,)``, a floating dtype, on the device of ``rows``.
        num_rows: N, the number of rows the selection was made from.
    """

    rows: Tensor
    weights: Tensor
    num_rows: int

    @classmethod
    def mean(cls, rows: Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> Selection:
        """Keep ``rows`` (already ascending, possibly none), each with weight ``1/K``."""
        count = rows.numel()
        return cls(rows, torch.full((count,), 1.0 / max(1, count), dtype=dtype, device=rows.device), num_rows)

    @classmethod
    def everything(
        cls, num_rows: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Selection:
        """Keep all N rows, each with weight ``1/N``."""
        return cls.mean(torch.arange(num_rows, device=device), num_rows, dtype)

    @property
    def num_kept(self) -> int:
        """K, known without asking the device."""
        return self.rows.numel()

    @property
    def is_everything(self) -> bool:
        """Whether no row was dropped (rows are unique and ascending, so K = N says it all)."""
        return self.num_kept == self.num_rows


@runtime_checkable
class Selector(Protocol):
    """Decides which rows are kept, from one score per row.

    :class:`rowprop.SelectiveBackprop` asks a selector for these too, where it has them:

    * ``needs_finite = True``, a class attribute: no score may be NaN or infinite;
    * ``unbiased = True``: the weights make the expected weighted sum of any numbers of the rows their mean over all N;
    * ``own_weights``: whether the weights are others than ``1/K``, as those of a mean over all N are. Where it is not
      said: whether it is ``unbiased``;
    * ``needs_classes = True``: it is called with ``classes=`` too, shape ``(N,)``;
    * ``at(progress)``: the selector as it is at that fraction of the training;
    * ``state_dict()`` and ``load_state_dict(state)``: what it remembers.
    """

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Return the selection for ``scores`` of shape ``(N,)``, larger = more wanted."""
        ...


def says(part: object, what: str) -> bool:
    """Whether a selector or a scorer says so of itself, by a class attribute of that name."""
    return bool(getattr(part, what, False))


def has_own_weights(selector: object) -> bool:
    """Whether its weights are others than ``1/K``."""
    return bool(getattr(selector, "own_weights", says(selector, "unbiased")))
