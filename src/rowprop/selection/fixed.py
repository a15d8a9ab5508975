"""The selectors that draw nothing.

:class:`TopK`, :class:`TopBottom` and :class:`Everything` know K from N and never wait for the device; the others wait
once, to read the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rowprop.checks import is_number, wrong
from rowprop.errors import InvalidInput
from rowprop.selection.base import Context, Selection, mean_unread, unread
from rowprop.selection.common import (
    SLACK,
    Checked,
    Keep,
    Keeping,
    check_fraction,
    count_kept,
    fraction_at,
    hardest_first,
    mean_of,
    on_host,
    weights_dtype,
)


@dataclass(frozen=True)
class TopK(Keeping):
    """Keep the rows with the largest scores.

    Biased towards high scores; each kept row counts ``1/K``. Ties go to the lower row; a NaN score ranks last. Source:
    OHEM, Shrivastava et al., CVPR 2016, arXiv:1604.03540.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``.

    Example:
        >>> TopK(keep=0.6)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1, 2]
    """

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        return mean_of(hardest_first(scores)[: count_kept(self.keep_at(context), scores.numel())], scores)


@dataclass(frozen=True)
class TopBottom(Checked):
    """Keep the hardest rows and the easiest ones, which keep the model from forgetting them.

    Biased: the middle is never seen; each kept row counts ``1/K``. A NaN score is the last to be taken at either end.

    Args:
        top: Fraction of rows kept at the hard end, in [0, 1], or a schedule of it; ``ceil(top * N)`` rows.
        bottom: The same at the easy end, among the other rows. One of the two must be above 0.

    Example:
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

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        num_rows = scores.numel()
        top, bottom = (count_kept(fraction, num_rows) if fraction else 0 for fraction in self._ends(context))
        bottom = min(bottom, num_rows - top)
        order = hardest_first(scores)
        # The easiest rows lie before the rows without a score, whose number stays on the device.
        begin = (num_rows - scores.isnan().sum() - bottom).clamp(min=top)
        easiest = order[begin + torch.arange(bottom, device=scores.device)]
        return mean_of(torch.cat([order[:top], easiest]), scores)


@dataclass(frozen=True)
class MaxVariance(Keeping):
    """Keep the rows whose scores have the largest variance: for rewards of sampled answers, where contrast teaches.

    They are the i highest scores and the K - i lowest ones, for one i of K + 1; of equal sets that with the largest i.
    Biased: the middle is never seen; each kept row counts ``1/K``. NaN and infinite scores are refused. Source: PODS,
    Xu, Savani, Fang, Kolter, 2025, arXiv:2504.13818.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``.

    Example:
        >>> MaxVariance(keep=0.6)(torch.tensor([0.3, 1.0, 0.0, 0.9, 0.5])).rows.tolist()
        [1, 2, 3]
    """

    def _choose(self, scores: Tensor, context: Context) -> Selection:
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
class AboveMean(Checked):
    """Keep the rows whose score is above the batch's mean; all, where all are equal.

    Biased towards high scores; each kept row counts ``1/K``. NaN and infinite scores are refused.

    Example:
        >>> AboveMean()(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1]
    """

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        values = on_host("AboveMean", scores)
        rows = (values > values.mean()).nonzero().squeeze(1)
        if rows.numel() == 0:
            rows = torch.arange(values.numel())
        return mean_of(rows.to(scores.device, non_blocking=True), scores)


@dataclass(frozen=True)
class Threshold(Checked):
    """Keep the rows whose score is at least a value, as OHEM for segmentation keeps pixels; there may be none.

    Biased towards high scores; each kept row counts ``1/K``, however few. A NaN score is never kept.

    Args:
        at_least: The value, in the unit of the scores; a finite number. Compared in the dtype of the scores.

    Example:
        >>> Threshold(at_least=0.5)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1, 2]
    """

    at_least: float

    def __post_init__(self) -> None:
        if not is_number(self.at_least):
            needed = "a finite number was needed, in the unit of the scores; for a fraction of the rows use TopK."
            raise wrong("Threshold", "at_least", self.at_least, needed)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        return mean_of((scores >= float(self.at_least)).nonzero().squeeze(1), scores)


@dataclass(frozen=True)
class LossMass(Checked):
    """Keep the smallest set of hardest rows that holds at least ``mass`` of the batch's loss; all, where it is zero.

    Biased towards high losses; each kept row counts ``1/K``. Negative, NaN and infinite losses are refused. Source:
    oguiza/fastai_extensions, ``BatchLossFilterCallback`` (``min_loss_perc``, ``min_sample_perc``).

    Args:
        mass: Share of the summed loss to hold, in (0, 1], or a schedule of it; default 0.9, which nine of ten equal
            rows do hold.
        min_keep: Never keep less than this fraction of the rows, in [0, 1]; default 0.0 (no floor but one row).

    Example:
        >>> LossMass(mass=0.9)(torch.tensor([0.1, 6.0, 3.0, 0.2])).rows.tolist()
        [1, 2]
    """

    mass: Keep = 0.9
    min_keep: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("LossMass", "mass", self.mass, schedule=True)
        check_fraction("LossMass", "min_keep", self.min_keep, zero_too=True)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        order = hardest_first(scores)
        losses = on_host("LossMass", scores[order])
        if losses[-1] < 0:
            needed = "needs losses of at least 0, to take a share of their sum; use TopK or AboveMean."
            raise InvalidInput(f"LossMass got a loss of {losses[-1].item():g} but {needed}")
        mass = fraction_at("LossMass", "mass", self.mass, context)
        count, held = losses.numel(), losses.cumsum(0)
        if held[-1] > 0:
            count = max(int((held < mass * held[-1] * (1 - SLACK)).sum()) + 1, count_kept(self.min_keep, count))
        return mean_of(order[:count], scores)


@dataclass(frozen=True)
class Nonzero(Checked):
    """Keep the rows whose loss is not zero, with the weights ``1/N`` that they have in the mean of all.

    Exact where a zero loss means a zero gradient, as of satisfied hinge losses, zero advantages and padded rows
    (``docs/exact.md``); not for a loss that crosses zero with a gradient, as a difference does. A NaN is kept, as it is
    part of the full mean.

    Example:
        >>> selection = Nonzero()(torch.tensor([0.0, 2.0, -0.5, 0.0]))
        >>> selection.rows.tolist(), selection.weights.tolist()
        ([1, 2], [0.25, 0.25])
    """

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        rows = (scores != 0).nonzero().squeeze(1)
        share = torch.full((rows.numel(),), 1 / scores.numel(), dtype=weights_dtype(scores), device=scores.device)
        return unread(rows, share, scores.numel(), unbiased=True)


@dataclass(frozen=True)
class Everything(Checked):
    """Keep all rows, each with weight ``1/N``: for methods that leave rows out before the forward only.

    Example:
        >>> Everything()(torch.tensor([0.1, 2.0])).weights.tolist()
        [0.5, 0.5]
    """

    def keep_at(self, context: Context) -> float:
        """Return 1."""
        return 1.0

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        rows = torch.arange(scores.numel(), device=scores.device)
        return mean_unread(rows, scores.numel(), weights_dtype(scores), unbiased=True)
