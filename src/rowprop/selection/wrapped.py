"""Selectors around a selector: without the outliers, in multiples, over all rows, class by class.

They hand on the memory of the selector inside, and ask it with the same context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.checks import check_entries, check_whole, is_number
from rowprop.errors import InvalidInput
from rowprop.selection.base import (
    NOTHING,
    AnySelector,
    Context,
    Selection,
    Stateful,
    asked,
    keep_of,
    takes_context,
    unread,
)
from rowprop.selection.common import SLACK, checked_scores, hardest_first, mean_of, weights_dtype


@dataclass(frozen=True)
class Around:
    """A selector around another: the part that is the same for all of them."""

    selector: AnySelector

    def __post_init__(self) -> None:
        object.__setattr__(self, "_with_context", takes_context(type(self).__name__, self.selector))

    def keep_at(self, context: Context) -> float | None:
        """Return 1 where the selector inside keeps every row; else None, the count is another one than its own."""
        return 1.0 if keep_of(self.selector, context) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the memory of the selector inside; nothing where it has none."""
        return self.selector.state_dict() if isinstance(self.selector, Stateful) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the selector inside continue from ``state``.

        Raises:
            InvalidInput: ``state`` holds something but the selector inside remembers nothing; or the selector inside
                cannot load it.
        """
        check_entries(f"{type(self).__name__}.load_state_dict", state, ())
        if isinstance(self.selector, Stateful):
            self.selector.load_state_dict(cast("dict[str, Any]", state))
        elif state:
            raise InvalidInput(
                f"{type(self).__name__}.load_state_dict got the entries {sorted(state)} but {self.selector!r} "
                "remembers nothing; build the selector as it was when the state was saved."
            )

    def _select(self, scores: Tensor, context: Context) -> Selection:
        """Ask the selector inside."""
        return asked(self.selector, cast("Any", self)._with_context, scores, context)


@dataclass(frozen=True)
class DropOutliers(Around):
    """Take out the rows with the highest scores, and select among the others.

    The hardest rows of a data set are often its mislabelled ones, and a selector that looks for hard rows looks for
    them first.

    Args:
        selector: Any selector; fractions in it are of the rows that are left.
        fraction: Fraction of rows taken out, in [0, 1); ``floor(fraction * N)`` rows, never all.

    Raises:
        InvalidInput: An argument is out of its range; or, when called, the selector inside raises.

    Cost:
        ``O(N log N)`` on the device, no copy to the host, besides the selector's own.

    Bias:
        Biased whatever is inside: the weights are the selector's, for the mean over the rows that are left, which is
        the purpose. A NaN score ranks last and is not taken out; an infinite one is no outlier either, because
        ``nonfinite="keep"`` asks so for a row that is to be kept.

    Example:
        >>> from rowprop.selection import DropOutliers
        >>> DropOutliers(TopK(keep=0.5), fraction=0.2)(torch.tensor([0.1, 9.0, 0.5, 0.4, 0.2])).rows.tolist()
        [2, 3]
    """

    fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.fraction) or not 0 <= self.fraction < 1:
            raise InvalidInput(
                f"DropOutliers got fraction={self.fraction!r} but a fraction in [0, 1) was needed; 0.05 takes out the "
                "twentieth of the rows that scores highest."
            )

    def keep_at(self, context: Context) -> float | None:
        """Return 1 where no row is taken out and the selector inside keeps every row; else None."""
        return None if self.fraction else super().keep_at(context)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select among all but the highest of ``scores`` ``(N,)``."""
        scores = checked_scores("DropOutliers", scores, context)
        out = min(int(self.fraction * scores.numel() + SLACK), scores.numel() - 1)
        order = hardest_first(torch.where(scores == torch.inf, -torch.inf, scores))
        left = order[out:].sort().values
        among = self._select(scores[left], context.at(left))
        return unread(left[among.rows], among.weights, scores.numel(), even=among.even)


@dataclass(frozen=True)
class MultipleOf(Around):
    """Round the count of a selector up to a multiple, with the hardest of the other rows.

    Tensor cores want sizes in multiples of 8 under half precision.

    Args:
        selector: Any selector whose selections are not unbiased: rows added by their score would make them biased.
        multiple_of: The count becomes a multiple of it, at most N; 1 or more; default 8. No rows stay no rows.

    Raises:
        InvalidInput: ``multiple_of`` is no whole number of at least 1; ``selector`` holds a :class:`DropOutliers`,
            whose outliers would come back; or, when called, the selection is unbiased, or the selector inside raises.

    Cost:
        ``O(N log N)`` on the device, no copy to the host, besides the selector's own.

    Bias:
        Biased; each kept row counts ``1/K``, whatever weights the selector inside gave.

    Example:
        >>> from rowprop.selection import MultipleOf
        >>> MultipleOf(TopK(keep=0.1), 4)(torch.tensor([0.1, 9.0, 0.5, 0.4, 0.2])).rows.tolist()
        [1, 2, 3, 4]
    """

    multiple_of: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = "a whole number of rows was needed; 8 suits tensor cores."
        check_whole("MultipleOf", "multiple_of", self.multiple_of, 1, needed)
        inside: object = self.selector
        while isinstance(inside, Around):
            if isinstance(inside, DropOutliers):
                raise InvalidInput(
                    f"MultipleOf got {self.selector!r}, but the rows it adds are the hardest, so the outliers would "
                    "come back; write DropOutliers(MultipleOf(selector, multiple_of), fraction)."
                )
            inside = inside.selector

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select among ``scores`` ``(N,)`` and add the hardest others."""
        scores = checked_scores("MultipleOf", scores, context)
        chosen = self._select(scores, context)
        if chosen.unbiased:
            raise InvalidInput(
                f"MultipleOf got an unbiased selection from {self.selector!r}, but rows added because they are hard "
                "would make it biased; round the batch size instead, or use a selector without this promise."
            )
        count = min(scores.numel(), -(-chosen.num_kept // self.multiple_of) * self.multiple_of)
        order = hardest_first(scores)
        other = torch.ones_like(order)
        other[chosen.rows] = 0
        first = torch.sort(other[order], stable=True).indices  # the chosen, then the others, each hardest first
        return mean_of(order[first[:count]], scores)


@dataclass(frozen=True)
class OverAll(Around):
    """Weigh each kept row ``1/N``, as in the mean over all rows: a row that is left out counts as nothing.

    With weights ``1/K`` a step is the mean over the kept rows, which for hard rows is a longer step than the plain one:
    often part of why selecting trains fast, and too long where other rows were left out before the forward already.
    Divided by N, it is the plain step less the part that the rows left out would have had.

    Args:
        selector: Any selector whose weights are ``1/K``.

    Raises:
        InvalidInput: ``selector`` is none; or, when called, its weights are not ``1/K``, or it raises.

    Cost:
        The cost of the selector inside.

    Bias:
        Biased: the gradient of the rows left out is missing. Among them are the easy ones, so it is small.

    Example:
        >>> from rowprop.selection import OverAll
        >>> OverAll(TopK(keep=0.5))(torch.tensor([0.1, 2.0, 0.5, 0.4])).weights.tolist()
        [0.25, 0.25]
    """

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select among ``scores`` ``(N,)``."""
        checked_scores("OverAll", scores, context)
        chosen = self._select(scores, context)
        if not chosen.even:
            raise InvalidInput(
                f"OverAll got a selection with weights of its own from {self.selector!r}, but weights of 1/K were "
                "needed; use the selector as it is."
            )
        return unread(chosen.rows, torch.full_like(chosen.weights, 1 / chosen.num_rows), chosen.num_rows)


@dataclass(frozen=True)
class PerClass(Around):
    """Select within each class of the batch, so that none is left out because its rows are easy.

    The classes come with the batch, ``selective(batch, classes=labels)``, or with the context where it is called
    directly. The selections of the classes are joined, the weights of each times its share of the rows, so every class
    counts as in the batch and an unbiased selector stays unbiased.

    Args:
        selector: Any selector; fractions in it are of the rows of a class, and counts are rounded up in each. Its
            memory, where it has one, is shared by the classes.

    Raises:
        InvalidInput: When called, the context has no classes, or not one for each score; or the selector inside
            raises.

    Cost:
        One copy of the classes to the host, one of their order back, and the selector's own cost once per class in the
        batch, in ascending order.

    Bias:
        The bias of the selector inside.

    Example:
        >>> from rowprop.selection import PerClass
        >>> scores, classes = torch.tensor([0.1, 9.0, 0.5, 8.0]), torch.tensor([0, 1, 0, 1])
        >>> PerClass(TopK(keep=0.5))(scores, Context(classes=classes)).rows.tolist()
        [1, 2]
    """

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select among the ``scores`` ``(N,)`` of each of the context's classes."""
        scores = checked_scores("PerClass", scores, context)
        labels = context.need("classes", "PerClass").cpu().sort(stable=True)
        _, counts = cast("tuple[Tensor, Tensor]", labels.values.unique_consecutive(return_counts=True))
        sizes = cast("list[int]", counts.tolist())
        by_class = cast("tuple[Tensor, ...]", labels.indices.to(scores.device, non_blocking=True).split(sizes))
        rows: list[Tensor] = []
        weights: list[Tensor] = []
        unbiased = True
        for members in by_class:
            chosen = self._select(scores[members], context.at(members))
            unbiased &= chosen.unbiased
            rows.append(members[chosen.rows])
            weights.append(chosen.weights * (members.numel() / scores.numel()))
        ascending = torch.cat(rows).sort()
        joined = torch.cat(weights).to(weights_dtype(scores))[ascending.indices]
        return unread(ascending.values, joined, scores.numel(), unbiased=unbiased)
