"""The selectors that draw no lots: which rows of a batch are kept, decided from one score per row.

All answer with ascending rows. Selectors with a fixed count (:class:`TopK`, :class:`TopBottom`, :class:`Everything`)
know K from N alone and never wait for the device; the others must read the scores to know K, so the host waits for them
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rowprop.checks import is_number
from rowprop.errors import InvalidInput
from rowprop.selection.base import NOTHING, Context, Selection, unread
from rowprop.selection.common import (
    SLACK,
    Keep,
    check_fraction,
    checked_scores,
    count_kept,
    fraction_at,
    hardest_first,
    mean_of,
    on_host,
    weights_dtype,
)


@dataclass(frozen=True)
class TopK:
    """Keep the rows with the largest scores.

    The plain choice when every kept row should count equally and a biased gradient is acceptable. Ties go to the row
    that comes first, so the answer does not depend on the device.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``.

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

    keep: Keep

    def __post_init__(self) -> None:
        check_fraction("TopK", "keep", self.keep, schedule=True)

    def keep_at(self, context: Context) -> float:
        """Return the ``keep`` of this moment of the training."""
        return fraction_at("TopK", "keep", self.keep, context)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep the K largest of ``scores`` ``(N,)``; a schedule is asked at the context's progress."""
        scores = checked_scores("TopK", scores, context)
        return mean_of(hardest_first(scores)[: count_kept(self.keep_at(context), scores.numel())], scores)


@dataclass(frozen=True)
class TopBottom:
    """Keep the hardest rows and the easiest ones.

    A counterweight to the plain top: the easy rows keep the model from forgetting them. Ties go to the lower row
    at the top and to the higher one at the bottom, so no row is counted twice.

    Args:
        top: Fraction of rows kept at the hard end, in [0, 1], or a schedule of it; ``ceil(top * N)`` rows.
        bottom: The same at the easy end. One of the two must be above 0.

    Raises:
        InvalidInput: A fraction is outside [0, 1] or both are 0; or, when called, ``scores`` is not a floating tensor
            of shape ``(N,)``.

    Cost:
        ``O(N log N)`` on the device, no copy to the host: K is the sum of the two counts, at most N.

    Bias:
        Biased: the middle is never seen; each kept row counts ``1/K``. A NaN score is the last to be taken at either
        end.

    Example:
        >>> from rowprop.selection import TopBottom
        >>> TopBottom(top=0.4, bottom=0.2)(torch.tensor([0.1, 2.0, 0.5, 0.4, 3.0])).rows.tolist()
        [0, 1, 4]
    """

    top: Keep
    bottom: Keep

    def __post_init__(self) -> None:
        check_fraction("TopBottom", "top", self.top, zero_too=True, schedule=True)
        check_fraction("TopBottom", "bottom", self.bottom, zero_too=True, schedule=True)
        if self.top == 0 and self.bottom == 0:
            raise InvalidInput("TopBottom got top=0 and bottom=0, which keep no row; give one of them rows to keep.")

    def keep_at(self, context: Context) -> float:
        """Return ``top + bottom`` of this moment of the training, at most 1."""
        return min(1.0, sum(self._ends(context)))

    def _ends(self, context: Context) -> tuple[float, float]:
        top = fraction_at("TopBottom", "top", self.top, context, zero_too=True)
        return top, fraction_at("TopBottom", "bottom", self.bottom, context, zero_too=True)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep both ends of ``scores`` ``(N,)``; schedules are asked at the context's progress."""
        scores = checked_scores("TopBottom", scores, context)
        num_rows = scores.numel()
        top, bottom = (count_kept(fraction, num_rows) if fraction else 0 for fraction in self._ends(context))
        bottom = min(bottom, num_rows - top)
        order = hardest_first(scores)
        # The easiest rows lie before the rows without a score, whose number stays on the device.
        begin = (num_rows - scores.isnan().sum() - bottom).clamp(min=top)
        easiest = order[begin + torch.arange(bottom, device=scores.device)]
        return mean_of(torch.cat([order[:top], easiest]), scores)


@dataclass(frozen=True)
class MaxVariance:
    """Keep the rows whose scores have the largest variance: some of the highest and some of the lowest.

    For rewards of sampled answers, where contrast teaches. Of all sets of K rows, one with the largest variance holds
    the i highest scores and the K - i lowest ones, so K + 1 sets are compared. Of equal ones, the set with the most
    high scores is taken.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``.

    Raises:
        InvalidInput: ``keep`` is outside (0, 1], or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)`` or holds a NaN or an infinity.

    Cost:
        ``O(N log N)``; one copy of the scores to the host.

    Bias:
        Biased: the middle is never seen; each kept row counts ``1/K``.

    Example:
        >>> from rowprop.selection import MaxVariance
        >>> MaxVariance(keep=0.6)(torch.tensor([0.3, 1.0, 0.0, 0.9, 0.5])).rows.tolist()
        [1, 2, 3]

    References:
        Xu, Savani, Fang, Kolter, "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
        2025, arXiv:2504.13818.
    """

    keep: Keep

    def __post_init__(self) -> None:
        check_fraction("MaxVariance", "keep", self.keep, schedule=True)

    def keep_at(self, context: Context) -> float:
        """Return the ``keep`` of this moment of the training."""
        return fraction_at("MaxVariance", "keep", self.keep, context)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep the K of ``scores`` ``(N,)`` that vary most; a schedule is asked at the context's progress."""
        scores = checked_scores("MaxVariance", scores, context)
        values = on_host("MaxVariance", scores)
        order = hardest_first(values)
        ordered = values[order] - values[order[-1]]  # from 0 on, so that sums of rewards 0 and 1 are exact
        num_rows, count = ordered.numel(), count_kept(self.keep_at(context), ordered.numel())
        tops = torch.arange(count, -1, -1)  # how many of the highest

        def of_each_set(numbers: Tensor) -> Tensor:
            sums = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)])
            return sums[tops] + sums[num_rows] - sums[num_rows - count + tops]

        spread = of_each_set(ordered.square()) - of_each_set(ordered).square() / count
        top = count - int(spread.argmax())
        rows = torch.cat([order[:top], order[num_rows - count + top :]])
        return mean_of(rows.to(scores.device, non_blocking=True), scores)


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

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep the rows of ``scores`` ``(N,)`` above their mean; ``context`` is not used."""
        values = on_host("AboveMean", checked_scores("AboveMean", scores, context))
        rows = (values > values.mean()).nonzero().squeeze(1)
        if rows.numel() == 0:  # all equal
            rows = torch.arange(values.numel())
        return mean_of(rows.to(scores.device, non_blocking=True), scores)


@dataclass(frozen=True)
class Threshold:
    """Keep the rows whose score is at least a value.

    The count follows the training, and may be 0: nothing is then backpropagated. OHEM for segmentation keeps the pixels
    whose loss is above such a value.

    Args:
        at_least: The value, in the unit of the scores; a finite number. Compared in the dtype of the scores.

    Raises:
        InvalidInput: ``at_least`` is no finite number; or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)``.

    Cost:
        ``O(N)`` on the device; the host waits for K.

    Bias:
        Biased towards high scores; each kept row counts ``1/K``, so a batch with one row above the value makes as large
        a step as one with all. A NaN score is never kept.

    Example:
        >>> from rowprop.selection import Threshold
        >>> Threshold(at_least=0.5)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1, 2]
    """

    at_least: float

    def __post_init__(self) -> None:
        if not is_number(self.at_least):
            raise InvalidInput(
                f"Threshold got at_least={self.at_least!r} but a finite number was needed, in the unit of the scores; "
                "for a fraction of the rows use TopK."
            )

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep the rows of ``scores`` ``(N,)`` that reach the value; ``context`` is not used."""
        scores = checked_scores("Threshold", scores, context)
        return mean_of((scores >= float(self.at_least)).nonzero().squeeze(1), scores)


@dataclass(frozen=True)
class LossMass:
    """Keep the smallest set of hardest rows that holds at least ``mass`` of the batch's loss.

    The count follows the training: nearly all rows at first, when every row is hard, and few later, when a few rows
    carry the loss. A batch whose losses are all zero is kept whole: it has no hard rows.

    Args:
        mass: Share of the summed loss to hold, in (0, 1], or a schedule of it; default 0.9. Compared with a
            relative slack of 1e-9, so that nine of ten equal rows do hold 0.9.
        min_keep: Never keep less than this fraction of the rows, in [0, 1]; default 0.0 (no floor but one row).

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

    mass: Keep = 0.9
    min_keep: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("LossMass", "mass", self.mass, schedule=True)
        check_fraction("LossMass", "min_keep", self.min_keep, zero_too=True)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep the hardest rows of the losses ``scores`` ``(N,)``; a schedule is asked at the context's progress."""
        order = hardest_first(checked_scores("LossMass", scores, context))
        losses = on_host("LossMass", scores.detach()[order])
        if losses[-1] < 0:
            raise InvalidInput(
                f"LossMass got a loss of {losses[-1].item():g} but needs losses of at least 0, "
                "because a share of a sum with negative parts means nothing; use TopK or AboveMean for such losses."
            )
        mass = fraction_at("LossMass", "mass", self.mass, context)
        return mean_of(order[: self._count(losses, mass)], scores)

    def _count(self, losses: Tensor, mass: float) -> int:
        """K for ``losses`` (N,) in descending order, float64, on the host."""
        num_rows = losses.numel()
        held = losses.cumsum(0)
        if held[-1] == 0:
            return num_rows
        count = int((held < mass * held[-1] * (1 - SLACK)).sum()) + 1
        return min(num_rows, max(count, count_kept(self.min_keep, num_rows)))


@dataclass(frozen=True)
class Nonzero:
    """Keep the rows whose loss is not zero, with the weights they have in the mean of all.

    For losses with an end: hinge, margin and triplet losses that are satisfied, zero advantages, padded rows. Such rows
    have no gradient, so leaving them out changes neither the value nor the gradient of the full mean, and costs no
    quality. The weights are ``1/N``, not ``1/K``. May keep no row.

    Raises:
        InvalidInput: When called, ``scores`` is not a floating tensor of shape ``(N,)``.

    Cost:
        ``O(N)`` on the device; the host waits for K.

    Bias:
        None where a zero loss means a zero gradient: losses that are never negative and smooth where they touch zero,
        or flat there, and products with a factor of zero. A loss that crosses zero on its way, as a difference does,
        has a gradient there and is not for this selector; a clipped policy ratio has a loss and no gradient, so give
        scores that are 0 for it (``docs/exact.md``), else the losses themselves. A NaN is kept, as it is part of the
        full mean.

    Example:
        >>> from rowprop.selection import Nonzero
        >>> selection = Nonzero()(torch.tensor([0.0, 2.0, -0.5, 0.0]))
        >>> selection.rows.tolist(), selection.weights.tolist()
        ([1, 2], [0.25, 0.25])
    """

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep the rows of the losses ``scores`` ``(N,)`` that are not zero; ``context`` is not used."""
        scores = checked_scores("Nonzero", scores, context)
        rows = (scores != 0).nonzero().squeeze(1)
        share = torch.full((rows.numel(),), 1 / scores.numel(), dtype=weights_dtype(scores), device=scores.device)
        return unread(rows, share, scores.numel(), unbiased=True)


@dataclass(frozen=True)
class Everything:
    """Keep all rows, each with weight ``1/N``: for methods that leave rows out before the forward only.

    Raises:
        InvalidInput: When called, ``scores`` is not a floating tensor of shape ``(N,)``.

    Cost:
        None to speak of, and no wait for the device; the backward is the full one.

    Bias:
        None.

    Example:
        >>> from rowprop.selection import Everything
        >>> Everything()(torch.tensor([0.1, 2.0])).weights.tolist()
        [0.5, 0.5]
    """

    def keep_at(self, context: Context) -> float:
        """Return 1."""
        return 1.0

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Keep all rows of ``scores`` ``(N,)``; ``context`` is not used."""
        scores = checked_scores("Everything", scores, context)
        return Selection.everything(scores.numel(), scores.device, weights_dtype(scores))
