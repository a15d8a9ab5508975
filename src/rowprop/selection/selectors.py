"""The selectors: which rows of a batch are kept, decided from one score per row.

All answer with ascending rows, each with weight ``1/K``. The ones with a fixed count (:class:`TopK`,
:class:`RankSampler`, :class:`RandomRows`) know K from N alone and never wait for the device; :class:`AboveMean` and
:class:`LossMass` must read the scores to know K, so they copy them to the host once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from rowprop.errors import InvalidInput
from rowprop.selection.base import Selection

# Fractions are floats: 0.07 * 100 is 7.000000000000001, and nine rows of ten hold a hair less than 0.9 of their sum.
_SLACK = 1e-9


def count_kept(keep: float, num_rows: int) -> int:
    """K for a fraction: ``max(1, ceil(keep * N))``, forgiving the rounding of the product."""
    return max(1, math.ceil(keep * num_rows - _SLACK))


def hardest_first(scores: Tensor) -> Tensor:
    """Order the rows by score, largest first; ties go to the lower row and NaN comes last.

    Args:
        scores: One number per row, shape ``(N,)``, any floating dtype.

    Returns:
        Row indices, shape ``(N,)``, int64, on ``scores.device``.
    """
    # Ascending order of the negated scores: only this direction puts NaN last and keeps ties in row order.
    return torch.sort(scores.neg(), stable=True).indices


@dataclass(frozen=True)
class TopK:
    """Keep the rows with the largest scores.

    The plain choice when every kept row should count equally and a biased gradient is acceptable. Ties go to the row
    that comes first, so the answer does not depend on the device.

    Args:
        keep: Fraction of rows kept, in (0, 1]; ``K = max(1, ceil(keep * N))``.

    Raises:
        InvalidInput: ``keep`` is outside (0, 1], or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)``.

    Cost:
        ``O(N log N)`` on the device, no copy to the host.

    Bias:
        The kept rows are not a fair sample: the expected gradient differs from the full-batch one whenever scores and
        gradients are related, which is the point of choosing them. A NaN score ranks last.

    Example:
        >>> TopK(keep=0.6)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1, 2]

    References:
        Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019, arXiv:1910.00762 (they draw
        rows with a probability that grows with the loss percentile; keeping the top is its deterministic relative).
    """

    keep: float

    def __post_init__(self) -> None:
        _check_fraction("TopK", "keep", self.keep)

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Keep the K largest of ``scores`` ``(N,)``; ``generator`` is not used."""
        scores = _checked("TopK", scores)
        return _mean(hardest_first(scores)[: count_kept(self.keep, scores.numel())], scores)


@dataclass(frozen=True)
class RankSampler:
    """Draw rows without replacement, the likelier the higher their score ranks.

    The row of rank ``i`` (0 = smallest score) is drawn with probability proportional to
    ``((i + 0.5) / N) ** (1 / keep - 1)``. This is Composer's selective backprop: a fixed count, hard rows preferred,
    yet every row has a chance. At N = 64 and keep 0.5 the hardest row is kept four times in five, the median one 56
    times in a hundred, the easiest once in a hundred.

    Args:
        keep: Fraction of rows kept, in (0, 1]; ``K = max(1, ceil(keep * N))`` (Composer rounds down, and may keep
            nothing).

    Raises:
        InvalidInput: ``keep`` is outside (0, 1]; or, when called, ``scores`` is not a floating tensor of shape ``(N,)``
            or ``generator`` lives on another device.

    Cost:
        ``O(N log N)`` on the device, no copy to the host; N random numbers.

    Bias:
        Biased, as Composer's: the draw is not undone by weights, each kept row counts ``1/K``. A NaN score ranks as the
        easiest row.

    Example:
        >>> RankSampler(keep=1.0)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [0, 1, 2]

    References:
        mosaicml/composer, ``composer/algorithms/selective_backprop``; Jiang et al., 2019, arXiv:1910.00762 (with
        ``beta = 1 / keep - 1``).
    """

    keep: float

    def __post_init__(self) -> None:
        _check_fraction("RankSampler", "keep", self.keep)

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Draw K rows by the ranks of ``scores`` ``(N,)`` with ``generator`` (default: torch's own for the device)."""
        scores = _checked("RankSampler", scores, generator)
        num_rows = scores.numel()
        # Percentiles in the order of `hardest_first`; the race wants the logarithm of their power.
        percentiles = (num_rows - 0.5 - torch.arange(num_rows, device=scores.device)) / num_rows
        log_odds = percentiles.log() * (1 / self.keep - 1)
        drawn = _race(log_odds, count_kept(self.keep, num_rows), generator)
        return _mean(hardest_first(scores)[drawn], scores)


@dataclass(frozen=True)
class RandomRows:
    """Keep a uniformly random set of rows, whatever their scores: the control every comparison needs.

    Args:
        keep: Fraction of rows kept, in (0, 1]; ``K = max(1, ceil(keep * N))``.

    Raises:
        InvalidInput: ``keep`` is outside (0, 1]; or, when called, ``scores`` is not a floating tensor of shape ``(N,)``
            or ``generator`` lives on another device.

    Cost:
        ``O(N log N)`` on the device, no copy to the host; N random numbers. A method that uses it needs no scores, but
        is charged for them like all others where it is compared.

    Bias:
        Unbiased: every row is kept with probability ``K/N`` and counts ``1/K``.

    Example:
        >>> RandomRows(keep=0.5)(torch.zeros(8)).num_kept
        4
    """

    keep: float

    def __post_init__(self) -> None:
        _check_fraction("RandomRows", "keep", self.keep)

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Draw K of the N rows of ``scores`` with ``generator`` (default: torch's own for the device)."""
        scores = _checked("RandomRows", scores, generator)
        even = torch.zeros(scores.numel(), device=scores.device)
        return _mean(_race(even, count_kept(self.keep, scores.numel()), generator), scores)


@dataclass(frozen=True)
class AboveMean:
    """Keep the rows whose score is above the batch's mean.

    The count follows the batch: few rows when a handful stand out, about half when the scores are spread evenly. Where
    no row stands out (all equal) every row is kept.

    Raises:
        InvalidInput: When called, ``scores`` is not a floating tensor of shape ``(N,)`` or holds a NaN or an infinity,
            which leave no mean.

    Cost:
        ``O(N)``; one copy of the scores to the host, because K depends on them.

    Bias:
        Biased towards high scores; each kept row counts ``1/K``.

    Example:
        >>> AboveMean()(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1]
    """

    needs_finite: ClassVar[bool] = True

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Keep the rows of ``scores`` ``(N,)`` above their mean; ``generator`` is not used."""
        values = _on_host("AboveMean", _checked("AboveMean", scores))
        rows = (values > values.mean()).nonzero().squeeze(1)
        if rows.numel() == 0:  # all equal
            rows = torch.arange(values.numel())
        return _mean(rows.to(scores.device), scores)


@dataclass(frozen=True)
class LossMass:
    """Keep the smallest set of hardest rows that holds at least ``mass`` of the batch's loss.

    The count follows the training: nearly all rows at first, when every row is hard, and few later, when a few rows
    carry the loss. A batch whose losses are all zero is kept whole: it has no hard rows.

    Args:
        mass: Share of the summed loss to hold, in (0, 1]; default 0.9. Compared with a relative slack of 1e-9, so that
            nine of ten equal rows do hold 0.9.
        min_keep: Never keep less than this fraction of the rows, in [0, 1]; default 0.0 (no floor but one row).
        multiple_of: Round the count up to a multiple of this, at most N; default 1. Tensor cores like 8.

    Raises:
        InvalidInput: An argument is out of its range; or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)``, or holds a NaN, an infinity or a negative number, for which a share of the sum means nothing.

    Cost:
        ``O(N log N)``; one copy of the scores to the host, because K depends on them.

    Bias:
        Biased towards high losses; each kept row counts ``1/K``.

    Example:
        >>> LossMass(mass=0.9)(torch.tensor([0.1, 6.0, 3.0, 0.2])).rows.tolist()
        [1, 2]

    References:
        oguiza/fastai_extensions, ``BatchLossFilterCallback`` (``min_loss_perc``, ``min_sample_perc``; its multiple of 8
        under mixed precision).
    """

    needs_finite: ClassVar[bool] = True

    mass: float = 0.9
    min_keep: float = 0.0
    multiple_of: int = 1

    def __post_init__(self) -> None:
        _check_fraction("LossMass", "mass", self.mass)
        _check_fraction("LossMass", "min_keep", self.min_keep, zero_too=True)
        multiple = cast("object", self.multiple_of)
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise InvalidInput(
                f"LossMass got multiple_of={multiple!r} but a whole number of rows was needed; 1 rounds nothing."
            )

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Keep the hardest rows of the losses ``scores`` ``(N,)``; ``generator`` is not used."""
        order = hardest_first(_checked("LossMass", scores))
        losses = _on_host("LossMass", scores.detach()[order])
        if losses[-1] < 0:
            raise InvalidInput(
                f"LossMass got a loss of {losses[-1].item():g} but needs losses of at least 0, "
                "because a share of a sum with negative parts means nothing; use TopK or AboveMean for such losses."
            )
        return _mean(order[: self._count(losses)], scores)

    def _count(self, losses: Tensor) -> int:
        """K for ``losses`` (N,) in descending order, float64, on the host."""
        num_rows = losses.numel()
        held = losses.cumsum(0)
        if held[-1] == 0:
            return num_rows
        count = int((held < self.mass * held[-1] * (1 - _SLACK)).sum()) + 1
        count = max(count, count_kept(self.min_keep, num_rows))
        return min(num_rows, -(-count // self.multiple_of) * self.multiple_of)


def _race(log_odds: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``count`` places of ``(N,)`` without replacement, odds ``exp(log_odds)``: an exponential race.

    Each place arrives at an exponential time with its odds as rate, and the first ``count`` to arrive are drawn; that
    is the law of drawing one by one. ``torch.multinomial`` does the same but waits for the device to check its input.
    """
    arrival = torch.empty_like(log_odds).exponential_(generator=generator)
    return torch.topk(log_odds - arrival.log(), count).indices


def _mean(rows: Tensor, scores: Tensor) -> Selection:
    """Selection of ``rows`` in batch order; weights in at least float32, as 1/K in bfloat16 is off by up to 0.4 %."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return Selection.mean(rows.sort().values, scores.numel(), dtype)


def _checked(name: str, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Scores without their graph, or a sentence about what is wrong with them."""
    if scores.dim() != 1 or scores.numel() == 0 or not scores.is_floating_point():
        raise InvalidInput(
            f"{name} got scores of shape {tuple(scores.shape)} and dtype {scores.dtype} but one floating number per "
            "row was needed, shape (N,); reduce over all but the rows, as in `loss.flatten(1).mean(1)`."
        )
    if generator is not None and generator.device.type != scores.device.type:
        raise InvalidInput(
            f"{name} got a generator on {generator.device} but the scores are on {scores.device}; "
            f"make it with torch.Generator({scores.device.type!r})."
        )
    return scores.detach()


def _on_host(name: str, scores: Tensor) -> Tensor:
    """Scores in float64 on the host, all finite."""
    values = scores.cpu().double()
    finite = values.isfinite()
    if not finite.all():
        raise InvalidInput(
            f"{name} got {int((~finite).sum())} of {values.numel()} scores NaN or infinite but needs finite ones; "
            "leave such rows out first (SelectiveBackprop does under nonfinite='drop')."
        )
    return values


def _check_fraction(name: str, field: str, value: float, *, zero_too: bool = False) -> None:
    given = cast("object", value)
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number or not 0 <= value <= 1 or (value == 0 and not zero_too):
        raise InvalidInput(
            f"{name} got {field}={value!r} but a fraction in {'[' if zero_too else '('}0, 1] was needed; "
            f"write a quarter as {field}=0.25."
        )
