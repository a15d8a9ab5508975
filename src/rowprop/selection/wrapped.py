"""Selectors around a selector: without the outliers, in multiples, over all rows, class by class.

They hand on what the selector inside has: schedules, memory, whether it needs finite scores or classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rowprop.checks import check_entries, check_progress, check_tensor, check_whole, is_number
from rowprop.errors import InvalidInput
from rowprop.selection.base import Selection, Selector, asked, has_own_weights, keywords_of, says, unread
from rowprop.selection.common import SLACK, checked_scores, hardest_first, mean_of, weights_dtype

W = TypeVar("W", bound="_Wrapper")


@dataclass(frozen=True)
class _Wrapper:
    selector: Selector

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keywords", keywords_of(type(self).__name__, self.selector))

    @property
    def needs_finite(self) -> bool:
        """Whether no score may be NaN or infinite."""
        return says(self.selector, "needs_finite")

    @property
    def needs_classes(self) -> bool:
        """Whether it is called with ``classes=`` too."""
        return says(self.selector, "needs_classes")

    @property
    def unbiased(self) -> bool:
        """Whether the expected weighted sum of any numbers of the rows is their mean over all N."""
        return False

    @property
    def own_weights(self) -> bool:
        """Whether the weights are others than ``1/K``."""
        return has_own_weights(self.selector)

    def at(self: W, progress: float) -> W:
        """Return the same around the selector of that fraction of the training."""
        check_progress(type(self).__name__, progress)
        at = getattr(self.selector, "at", None)
        then = self.selector if at is None else at(progress)
        return self if then is self.selector else replace(self, selector=then)

    def state_dict(self) -> dict[str, Any]:
        """Return what the selector inside remembers."""
        return self.selector.state_dict() if hasattr(self.selector, "state_dict") else {}  # pyright: ignore

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the selector inside continue from ``state``.

        Raises:
            InvalidInput: ``state`` holds something but the selector inside remembers nothing; or what that one raises.
        """
        check_entries(f"{type(self).__name__}.load_state_dict", state, ())
        if hasattr(self.selector, "load_state_dict"):
            self.selector.load_state_dict(state)  # pyright: ignore
        elif state:
            raise InvalidInput(
                f"{type(self).__name__}.load_state_dict got the entries {sorted(state)} but {self.selector!r} "
                "remembers nothing; build the selector as it was when the state was saved."
            )

    def _select(self, scores: Tensor, generator: torch.Generator | None, classes: Tensor | None) -> Selection:
        """Ask the selector inside."""
        return asked(self.selector, cast("Any", self)._keywords, scores, generator, classes)


@dataclass(frozen=True)
class DropOutliers(_Wrapper):
    """Select among the rows that are left when those with the highest scores are taken out.

    The hardest rows of a data set are often its mislabelled ones, and a selector that looks for hard rows looks for
    them first.

    Args:
        selector: Any selector; fractions in it are of the rows that are left.
        fraction: Fraction of rows taken out, in [0, 1); ``floor(fraction * N)`` rows, never all.

    Raises:
        InvalidInput: An argument is out of its range; or, when called, what the selector inside raises.

    Cost:
        ``O(N log N)`` on the device, no copy to the host, besides the selector's own.

    Bias:
        Biased whatever is inside: the weights are those of the selector for the mean over the rows that are left, which
        is the purpose. A NaN score ranks last and is not taken out; in a step that keeps non-finite rows they are no
        outliers either, but come in addition.

    Example:
        >>> from rowprop.selection import DropOutliers
        >>> DropOutliers(TopK(keep=0.5), fraction=0.2)(torch.tensor([0.1, 9.0, 0.5, 0.4, 0.2])).rows.tolist()
        [2, 3]
    """

    fraction: float

    @property
    def needs_finite(self) -> bool:
        """True: an infinite score, which a step may want to keep, would be taken out first."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.fraction) or not 0 <= self.fraction < 1:
            raise InvalidInput(
                f"DropOutliers got fraction={self.fraction!r} but a fraction in [0, 1) was needed; 0.05 takes out the "
                "twentieth of the rows that scores highest."
            )

    def __call__(
        self, scores: Tensor, *, generator: torch.Generator | None = None, classes: Tensor | None = None
    ) -> Selection:
        """Select among all but the highest of ``scores`` ``(N,)``."""
        scores = checked_scores("DropOutliers", scores, generator)
        out = min(int(self.fraction * scores.numel() + SLACK), scores.numel() - 1)
        left = hardest_first(scores)[out:].sort().values
        if classes is not None and self.needs_classes:
            classes = _checked_classes("DropOutliers", classes, scores).to(scores.device)[left]
        among = self._select(scores[left], generator, classes)
        return unread(left[among.rows], among.weights, scores.numel())


@dataclass(frozen=True)
class MultipleOf(_Wrapper):
    """Round the count of a selector up to a multiple, with the hardest of the other rows.

    Tensor cores want sizes in multiples of 8 under half precision.

    Args:
        selector: Any selector that is not unbiased: rows added by their score would make it biased.
        multiple: What the count becomes a multiple of, at most N; 1 or more; default 8. No rows stay no rows.

    Raises:
        InvalidInput: ``multiple`` is no whole number of at least 1; ``selector`` is unbiased, or holds a
            :class:`DropOutliers`, whose outliers would come back; or, when called, what the selector inside raises.

    Cost:
        ``O(N log N)`` on the device, no copy to the host, besides the selector's own.

    Bias:
        Biased; each kept row counts ``1/K``, whatever weights the selector inside gave.

    Example:
        >>> from rowprop.selection import MultipleOf
        >>> MultipleOf(TopK(keep=0.1), 4)(torch.tensor([0.1, 9.0, 0.5, 0.4, 0.2])).rows.tolist()
        [1, 2, 3, 4]
    """

    multiple: int = 8

    @property
    def own_weights(self) -> bool:
        """False."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = "a whole number of rows was needed; 8 suits tensor cores."
        check_whole("MultipleOf", "multiple", self.multiple, 1, needed)
        if says(self.selector, "unbiased"):
            raise InvalidInput(
                f"MultipleOf got {self.selector!r}, which is unbiased, but rows added because they are hard would make "
                "it biased; round the batch size instead, or use a selector without this promise."
            )
        inside: object = self.selector
        while isinstance(inside, _Wrapper):
            if isinstance(inside, DropOutliers):
                raise InvalidInput(
                    f"MultipleOf got {self.selector!r}, but the rows it adds are the hardest, so the outliers would "
                    "come back; write DropOutliers(MultipleOf(selector, multiple), fraction)."
                )
            inside = inside.selector

    def __call__(
        self, scores: Tensor, *, generator: torch.Generator | None = None, classes: Tensor | None = None
    ) -> Selection:
        """Select among ``scores`` ``(N,)`` and add the hardest others."""
        scores = checked_scores("MultipleOf", scores, generator)
        chosen = self._select(scores, generator, classes)
        count = min(scores.numel(), -(-chosen.num_kept // self.multiple) * self.multiple)
        order = hardest_first(scores)
        other = torch.ones_like(order)
        other[chosen.rows] = 0
        first = torch.sort(other[order], stable=True).indices  # the chosen, then the others, each hardest first
        return mean_of(order[first[:count]], scores)


@dataclass(frozen=True)
class OverAll(_Wrapper):
    """Weigh each kept row ``1/N``, as in the mean over all rows: what is left out counts as nothing.

    With weights ``1/K`` a step is the mean over the kept rows, which for hard rows is a longer step than the plain one:
    often part of why selecting trains fast, and too long where other rows were left out before the forward already.
    Divided by N, it is the plain step less the part that the rows left out would have had.

    Args:
        selector: Any selector whose weights are ``1/K``.

    Raises:
        InvalidInput: ``selector`` is none, or one with weights of its own; or, when called, what it raises.

    Cost:
        That of the selector inside.

    Bias:
        Biased: the gradient of the rows left out is missing. Among them are the easy ones, so it is small.

    Example:
        >>> from rowprop.selection import OverAll
        >>> OverAll(TopK(keep=0.5))(torch.tensor([0.1, 2.0, 0.5, 0.4])).weights.tolist()
        [0.25, 0.25]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if has_own_weights(self.selector):
            raise InvalidInput(
                f"OverAll got {self.selector!r}, whose weights are its own, but a selector with weights 1/K was "
                "needed; use it as it is."
            )

    @property
    def own_weights(self) -> bool:
        """True."""
        return True

    def __call__(
        self, scores: Tensor, *, generator: torch.Generator | None = None, classes: Tensor | None = None
    ) -> Selection:
        """Select among ``scores`` ``(N,)``."""
        chosen = self._select(scores, generator, classes)
        return unread(chosen.rows, torch.full_like(chosen.weights, 1 / chosen.num_rows), chosen.num_rows)


@dataclass(frozen=True)
class PerClass(_Wrapper):
    """Select within each class of the batch, so that none is left out because its rows are easy.

    The classes come with the batch: ``selective(batch, classes=labels)``, or ``classes=`` where it is called directly.
    The selections of the classes are joined, the weights of each times its share of the rows, so every class counts as
    in the batch and an unbiased selector stays unbiased.

    Args:
        selector: Any selector; fractions in it are of the rows of a class, and counts are rounded up in each. Its
            memory, where it has one, is shared by the classes.

    Raises:
        InvalidInput: When called, there are no ``classes`` or they are not integers of shape ``(N,)``; or what the
            selector inside raises.

    Cost:
        One copy of the classes to the host, one of their order back, and the selector's own cost once per class in the
        batch, in ascending order.

    Bias:
        That of the selector inside.

    Example:
        >>> from rowprop.selection import PerClass
        >>> scores, classes = torch.tensor([0.1, 9.0, 0.5, 8.0]), torch.tensor([0, 1, 0, 1])
        >>> PerClass(TopK(keep=0.5))(scores, classes=classes).rows.tolist()
        [1, 2]
    """

    @property
    def needs_classes(self) -> bool:
        """True."""
        return True

    @property
    def own_weights(self) -> bool:
        """True."""
        return True

    @property
    def unbiased(self) -> bool:
        """Whether the selector inside is."""
        return says(self.selector, "unbiased")

    def __call__(
        self, scores: Tensor, *, generator: torch.Generator | None = None, classes: Tensor | None = None
    ) -> Selection:
        """Select among the ``scores`` ``(N,)`` of each class in ``classes`` ``(N,)``."""
        scores = checked_scores("PerClass", scores, generator)
        if classes is None:
            raise InvalidInput(
                "PerClass got no classes but the class of each row was needed, integers of shape (N,); pass them with "
                "the batch, as in `selective(batch, classes=labels)`."
            )
        labels = _checked_classes("PerClass", classes, scores).cpu().sort(stable=True)
        found, counts = cast("tuple[Tensor, Tensor]", labels.values.unique_consecutive(return_counts=True))
        sizes = cast("list[int]", counts.tolist())
        by_class = cast("tuple[Tensor, ...]", labels.indices.to(scores.device).split(sizes))
        rows: list[Tensor] = []
        weights: list[Tensor] = []
        for label, members in zip(cast("list[int]", found.tolist()), by_class, strict=True):
            chosen = self._select(scores[members], generator, classes=torch.full_like(members, label))
            rows.append(members[chosen.rows])
            weights.append(chosen.weights * (members.numel() / scores.numel()))
        ascending = torch.cat(rows).sort()
        joined = torch.cat(weights).to(weights_dtype(scores))[ascending.indices]
        return unread(ascending.values, joined, scores.numel())


def _checked_classes(name: str, classes: Tensor, scores: Tensor) -> Tensor:
    """The classes, an integer for each score."""
    check_tensor(name, "classes", classes)
    integers = not (classes.is_floating_point() or classes.is_complex() or classes.dtype == torch.bool)
    if classes.shape != scores.shape or not integers or classes.is_meta:
        raise InvalidInput(
            f"{name} got classes of shape {tuple(classes.shape)} and dtype {classes.dtype} but an integer per row was "
            f"needed, shape ({scores.numel()},)."
        )
    return classes
