"""Selectors that wrap a selector: multiples, weights over all rows, per class. State and errors are passed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.checks import check_entries, check_whole
from rowprop.errors import InvalidInput
from rowprop.selection.base import Context, Selection, Selector, Stateful, asked, check_selector, keep_of, unread
from rowprop.selection.selectors import Checked, hardest_first, mean_of, weights_dtype


@dataclass(frozen=True)
class Around(Checked):
    """Base of the selectors that wrap another."""

    selector: Selector

    def __post_init__(self) -> None:
        check_selector(type(self).__name__, self.selector)

    def keep_at(self, context: Context) -> float | None:
        """Return 1 if the wrapped selector keeps every row; else None, as the count differs from its count."""
        return 1.0 if keep_of(self.selector, context) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped selector; empty if it has none."""
        return self.selector.state_dict() if isinstance(self.selector, Stateful) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load ``state`` into the wrapped selector."""
        owner = f"{type(self).__name__}.load_state_dict"
        check_entries(owner, state, ())
        if isinstance(self.selector, Stateful):
            self.selector.load_state_dict(cast("dict[str, Any]", state))
        elif state:
            raise InvalidInput(f"{owner} got the entries {sorted(state)} but {self.selector!r} remembers nothing.")


@dataclass(frozen=True)
class MultipleOf(Around):
    """Round the count of a selector up to a multiple, with the hardest of the other rows: tensor cores want 8.

    The count becomes a multiple of ``multiple_of``, 1 or more, default 8, and at most N; no rows stay no rows. Biased;
    each kept row counts ``1/K``, whatever weights the selector inside gave. Unbiased selections are refused: rows added
    by their score would make them biased.

    Example:
        >>> from rowprop.selection import MultipleOf
        >>> MultipleOf(TopK(keep=0.1), 4)(torch.tensor([0.1, 9.0, 0.5, 0.4, 0.2])).rows.tolist()
        [1, 2, 3, 4]
    """

    multiple_of: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("MultipleOf", "multiple_of", self.multiple_of, 1)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        chosen = asked(self.selector, scores, context)
        if chosen.unbiased:
            remedy = "rows added because they are hard would make it biased; round the batch size instead."
            raise InvalidInput(f"MultipleOf got an unbiased selection from {self.selector!r}, but {remedy}")
        count = min(scores.numel(), -(-chosen.num_kept // self.multiple_of) * self.multiple_of)
        order = hardest_first(scores)
        other = torch.ones_like(order).index_fill_(0, chosen.rows, 0)
        first = torch.sort(other[order], stable=True).indices  # the chosen, then the others, each hardest first
        return mean_of(order[first[:count]], scores)


@dataclass(frozen=True)
class OverAll(Around):
    """Weight each kept row by ``1/N``, as in the mean over all rows; dropped rows count as zero.

    Biased: the step is the plain one less the gradient of the rows left out. Weights other than ``1/K`` are refused.

    Example:
        >>> from rowprop.selection import OverAll
        >>> OverAll(TopK(keep=0.5))(torch.tensor([0.1, 2.0, 0.5, 0.4])).weights.tolist()
        [0.25, 0.25]
    """

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        chosen = asked(self.selector, scores, context)
        if not chosen.even:
            remedy = "weights of 1/K were needed; use the selector as it is."
            raise InvalidInput(f"OverAll got a selection with weights of its own from {self.selector!r}, but {remedy}")
        return unread(chosen.rows, torch.full_like(chosen.weights, 1 / chosen.num_rows), chosen.num_rows)


@dataclass(frozen=True)
class PerClass(Around):
    """Select within each class of the batch, so that none is left out because its rows are easy.

    The classes come with the batch, ``selective(batch, classes=labels)``, or with the context. Each class's weights are
    multiplied by its share of the rows, so every class counts as in the batch, and the bias is that of the selector. It
    is called once per class: fractions in it are of the rows of a class, and the classes share its memory.

    Example:
        >>> from rowprop.selection import Context
        >>> scores, classes = torch.tensor([0.1, 9.0, 0.5, 8.0]), torch.tensor([0, 1, 0, 1])
        >>> PerClass(TopK(keep=0.5))(scores, Context(classes=classes)).rows.tolist()
        [1, 2]
    """

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        labels = context.need("classes", "PerClass").cpu().sort(stable=True)
        _, counts = cast("tuple[Tensor, Tensor]", labels.values.unique_consecutive(return_counts=True))
        sizes = cast("list[int]", counts.tolist())
        by_class = cast("tuple[Tensor, ...]", labels.indices.to(scores.device, non_blocking=True).split(sizes))
        chosen = [asked(self.selector, scores[members], context.at(members)) for members in by_class]
        rows = torch.cat([members[each.rows] for members, each in zip(by_class, chosen, strict=True)]).sort()
        weights = torch.cat([each.weights * (each.num_rows / scores.numel()) for each in chosen])
        weights = weights.to(weights_dtype(scores))[rows.indices]
        return unread(rows.values, weights, scores.numel(), unbiased=all(each.unbiased for each in chosen))
