"""The selectors: those that draw nothing, and those that draw, on the device of the scores, after what they share.

:class:`TopK`, :class:`TopBottom`, :class:`Everything`, :class:`RankSampling` and :class:`RandomRows` know K from N and
never wait for the device; the others wait once, to read scores or draw. Draws are by the context's generator alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from rowprop.checks import check_entries, check_number, check_numbers, check_tensor, check_whole, check_within, takes
from rowprop.errors import InvalidInput
from rowprop.scoring import described
from rowprop.selection.base import NOTHING, Context, Selection, check_context, check_fits, mean_unread, unread

Keep: TypeAlias = float | Callable[[float], float]
"""A fraction, or a schedule: a callable from progress to a fraction, e.g. :class:`rowprop.schedule.Ramp`."""

_LEFT_OUT: Any = None  # so that what is left out is refused in our sentence

SLACK = 1e-9  # of floats: 0.07 * 100 is 7.000000000000001, and nine rows of ten hold a hair less than 0.9 of their sum


class NotFinite(InvalidInput):
    """A selector got a score that is NaN or infinite and needs finite ones."""


def count_kept(keep: float, num_rows: int) -> int:
    """K for a fraction: ``max(1, ceil(keep * N))``, forgiving the rounding of the product."""
    return max(1, math.ceil(keep * num_rows - SLACK))


def hardest_first(scores: Tensor) -> Tensor:
    """The rows ``(N,)``, int64, by score, largest first; ties go to the lower row and NaN comes last."""
    # Ascending order of the negated scores: only this direction puts NaN last and keeps ties in row order.
    return torch.sort(scores.neg(), stable=True).indices


def weights_dtype(scores: Tensor) -> torch.dtype:
    """At least float32, as 1/K in bfloat16 is off by up to 0.4 %."""
    return torch.promote_types(scores.dtype, torch.float32)


def mean_of(rows: Tensor, scores: Tensor, *, unbiased: bool = False) -> Selection:
    """Selection of ``rows``, in whatever order they come, each with weight ``1/K``."""
    return mean_unread(rows.sort().values, scores.numel(), weights_dtype(scores), unbiased=unbiased)


def every_row(scores: Tensor) -> Selection:
    """Selection of all rows, each with weight ``1/N``."""
    rows = torch.arange(scores.numel(), device=scores.device)
    return mean_unread(rows, scores.numel(), weights_dtype(scores), unbiased=True)


def on_host(name: str, scores: Tensor) -> Tensor:
    """Scores in float64 on the host, all finite."""
    values = scores.cpu().double()
    finite = values.isfinite()
    if not finite.all():
        some = f"{int((~finite).sum())} of {values.numel()} scores NaN or infinite but needs finite ones"
        raise NotFinite(f"{name} got {some}; leave such rows out first, as nonfinite='drop' does.")
    return values


def check_fraction(name: str, field: str, value: object, *, zero_too: bool = False, schedule: bool = False) -> None:
    """Refuse a value that is no fraction; a schedule, where one may be, is asked later."""
    if schedule and callable(value) and not isinstance(value, type) and takes(value, 1):
        return
    check_within(name, field, value, "[0, 1]" if zero_too else "(0, 1]", f"; write a quarter as {field}=0.25")


def fraction_at(name: str, field: str, value: Keep, context: Context, *, zero_too: bool = False) -> float:
    """A fraction, or the answer of the schedule in its place at the context's progress."""
    if not callable(value):
        return value
    answer = value(context.need("progress", f"the schedule {field} of {name}"))
    check_fraction(name, field, answer, zero_too=zero_too)
    return answer


class Checked:
    """A selector that looks at its arguments before it chooses."""

    _draws: ClassVar[bool] = False  # by the context's generator

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select among ``scores`` ``(N,)``, larger = more wanted; schedules are asked at the context's progress."""
        name = type(self).__name__
        check_context(name, context)
        check_tensor(name, "scores", scores, "one floating number per row was needed, a tensor of shape (N,).")
        if scores.dim() != 1 or scores.numel() == 0 or not scores.is_floating_point():
            needed = "one floating number per row was needed, shape (N,); reduce as in `loss.flatten(1).mean(1)`."
            raise InvalidInput(f"{name} got {described(scores, 'scores')} but {needed}")
        check_fits(context, scores.numel())
        generator = context.generator if self._draws else None
        if generator is not None and generator.device.type != scores.device.type:
            devices = f"a generator on {generator.device} but the scores are on {scores.device}"
            raise InvalidInput(f"{name} got {devices}; make it with torch.Generator({scores.device.type!r}).")
        check_numbers(name, "scores", scores)
        return self._choose(scores.detach(), context)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        raise NotImplementedError


@dataclass(frozen=True)
class Keeping(Checked):
    """A selector of ``K = max(1, ceil(keep * N))`` rows."""

    keep: Keep = _LEFT_OUT

    def __post_init__(self) -> None:
        check_fraction(type(self).__name__, "keep", self.keep, schedule=True)

    def keep_at(self, context: Context) -> float:
        """Return the ``keep`` of this moment of the training."""
        return fraction_at(type(self).__name__, "keep", self.keep, context)


# --- selectors that draw nothing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopK(Keeping):
    """Keep the rows with the largest scores.

    Biased towards high scores; each kept row counts ``1/K``. Ties go to the lower row; a NaN score ranks last. ``keep``
    is the fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``. Source: OHEM,
    Shrivastava et al., CVPR 2016, arXiv:1604.03540.

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
        bottom: The same at the easy end, among the other rows. One of both must be above 0.

    Example:
        >>> TopBottom(top=0.4, bottom=0.2)(torch.tensor([0.1, 2.0, 0.5, 0.4, 3.0])).rows.tolist()
        [0, 1, 4]
    """

    top: Keep
    bottom: Keep

    def __post_init__(self) -> None:
        for name in ("top", "bottom"):
            check_fraction("TopBottom", name, getattr(self, name), zero_too=True, schedule=True)
        if self.top == 0 and self.bottom == 0:
            raise InvalidInput("TopBottom got top=0 and bottom=0, which keep no row; give one of them rows to keep.")

    def keep_at(self, context: Context) -> float:
        """Return ``top + bottom`` of this moment of the training, at most 1."""
        return min(1.0, sum(self._ends(context)))

    def _ends(self, context: Context) -> list[float]:
        ends = ("top", self.top), ("bottom", self.bottom)
        return [fraction_at("TopBottom", name, keep, context, zero_too=True) for name, keep in ends]

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

    ``keep`` is as for :class:`TopK`. The rows are the i highest scores and the K - i lowest ones; of equal sets that
    with the largest i. Biased: the middle is never seen; each kept row counts ``1/K``. NaN and infinite scores are
    refused. Source: PODS, Xu et al., 2025, arXiv:2504.13818.

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

    Biased towards high scores; each kept row counts ``1/K``, however few. A NaN score is never kept. The value,
    ``at_least``, is a finite number in the unit of the scores, compared in their dtype.

    Example:
        >>> Threshold(at_least=0.5)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [1, 2]
    """

    at_least: float

    def __post_init__(self) -> None:
        needed = "a finite number was needed, in the unit of the scores; for a fraction of the rows use TopK."
        check_number("Threshold", "at_least", self.at_least, needed)

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
    (``docs/zeros.md``), not for a loss that crosses zero with a gradient. A NaN is kept: the full mean has it, too.

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
        return every_row(scores)


# --- selectors that draw ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankSampling(Keeping):
    """Draw rows without replacement, the likelier the higher their score ranks: Composer's selective backprop.

    The row of rank ``i`` (0 = smallest score) is drawn with probability proportional to
    ``((i + 0.5) / N) ** (1 / keep - 1)``. ``keep`` is as for :class:`TopK` (Composer rounds K down, and may keep
    nothing). Biased, as Composer's: each kept row counts ``1/K``. A NaN score ranks as the easiest row. Sources:
    mosaicml/composer, ``selective_backprop``; Jiang et al., 2019, arXiv:1910.00762 (with ``beta = 1 / keep - 1``).

    Example:
        >>> RankSampling(keep=1.0)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [0, 1, 2]
    """

    _draws = True

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        keep, num_rows = self.keep_at(context), scores.numel()
        # Percentiles in the order of `hardest_first`; the race wants the logarithm of their power.
        percentiles = (num_rows - 0.5 - torch.arange(num_rows, device=scores.device)) / num_rows
        drawn = _race(percentiles.log() * (1 / keep - 1), count_kept(keep, num_rows), context.generator)
        return mean_of(hardest_first(scores)[drawn], scores)


@dataclass(frozen=True)
class RandomRows(Keeping):
    """Keep a uniformly random set of rows, whatever their scores: the control every comparison needs.

    Unbiased: every row is kept with probability ``K/N`` and counts ``1/K``. ``keep`` is as for :class:`TopK`.

    Example:
        >>> RandomRows(keep=0.5)(torch.zeros(8)).num_kept
        4
    """

    _draws = True

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        even = torch.zeros(scores.numel(), device=scores.device)
        drawn = _race(even, count_kept(self.keep_at(context), scores.numel()), context.generator)
        return mean_of(drawn, scores, unbiased=True)


@dataclass(eq=False)
class PercentileSampling(Checked):
    """Draw each row by the share of recent losses that its own exceeds: the rule of "Biggest Losers".

    The batch's scores join the last ``recent`` ones. Then each row is kept, independently, with probability ``p =
    max(floor, (share of the recent scores strictly below its own) ** beta)``: on average ``1 / (beta + 1)`` of the rows
    where the losses keep their distribution, and perhaps none. Biased, as the original: each kept row counts ``1/K``. A
    NaN score counts as the smallest. A row with an infinite score is kept, and the score is not remembered. Sources:
    Jiang et al., 2019, arXiv:1910.00762; angelajiang/SelectiveBackprop, ``lib/calculators.py``.

    Args:
        beta: How much hard rows are preferred, 0 or more; default 3.0, a quarter of the rows. 0 keeps every row.
        recent: How many scores are remembered; default 1024.
        floor: Least probability of any row, in [0, 1]; default 0.0: the smallest score of all is never kept.

    Example:
        >>> PercentileSampling(beta=0.0)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [0, 1, 2]
    """

    beta: float = 3.0
    recent: int = 1024
    floor: float = 0.0
    _draws = True
    _scores: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False)

    def __post_init__(self) -> None:
        needed = "a number of at least 0 was needed; 1 keeps half of the rows, 3 a quarter."
        check_number("PercentileSampling", "beta", self.beta, needed, lambda value: value >= 0)
        check_whole("PercentileSampling", "recent", self.recent, 1)
        check_fraction("PercentileSampling", "floor", self.floor, zero_too=True)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        dtype = weights_dtype(scores)
        # NaN cannot be sorted, and would break the search.
        values = scores.to(dtype).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        sure = values == torch.inf  # kept, as nonfinite="keep" asks, but not compared with other scores
        self._scores = torch.cat([self._scores.to(values), values[~sure]])[-self.recent :]
        below = torch.searchsorted(self._scores.sort().values, values)  # how many are strictly smaller
        chances = (below / max(1, self._scores.numel())).pow(float(self.beta)).clamp(min=self.floor)
        chances = torch.where(sure, 1.0, chances)
        lots = torch.rand(values.numel(), device=values.device, generator=context.generator)
        return mean_of((lots < chances).nonzero().squeeze(1), scores)

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered scores, oldest first, as ``recent``."""
        return {"recent": self._scores.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the scores that ``state`` remembers; a state that is refused is not loaded."""
        owner = "PercentileSampling.load_state_dict"
        check_entries(owner, state, ("recent",))
        recent = state["recent"]
        check_numbers(owner, "recent", recent)
        sound = recent.dim() == 1 and recent.is_floating_point() and not bool(recent.isnan().any())
        if not sound or recent.numel() > self.recent:
            needed = f"floating scores without NaN were needed, at most recent={self.recent}."
            raise InvalidInput(f"{owner} got {described(recent, 'recent scores')} but {needed}")
        self._scores = recent.clone()


@dataclass(eq=False)
class ImportanceSampling(Checked):
    """Draw rows in proportion to their scores, with importance weights: an unbiased gradient of lower variance.

    ``M = max(1, ceil(keep * N))`` draws with replacement, row i with probability ``p_i = score_i / sum(scores)``; a row
    drawn c times is kept once, with weight ``c / (M N p_i)``. The variance is least for scores in proportion to the
    norms of the rows' gradients (:func:`rowprop.scoring.gradient_norm` bounds these). Unbiased where rows with score 0,
    which are never drawn, have no gradient. If all are 0, rows are drawn evenly.

    This pays only where scores differ. With a ``gate``, the reduction of variance ``tau = 1 / sqrt(1 - sum((p - 1/N) **
    2) / sum(p ** 2))`` is smoothed over the steps, from 0, and while that of the batches before is not above ``gate``,
    M rows are drawn evenly, without replacement and each with weight ``1/M``. Source: Katharopoulos and Fleuret, ICML
    2018, arXiv:1803.00942 (gate ``(B + 3b) / (3b)`` for b rows of B). Negative, NaN and infinite scores are refused.

    Args:
        keep: M as a fraction of the rows, in (0, 1], or a schedule of it. K is at most M: repeats are merged.
        gate: Least tau to draw by score, a number; default None: always draw by score.
        smoothing: The share of the old tau that remains in a step, in [0, 1); default 0.9.

    Attributes:
        tau: The smoothed reduction of variance, as the next batch is judged by; 0 without a gate.

    Example:
        >>> selection = ImportanceSampling(keep=0.5)(torch.tensor([0.0, 3.0, 0.0, 0.0]))
        >>> selection.rows.tolist(), selection.weights.tolist()
        ([1], [0.25])
    """

    keep: Keep = _LEFT_OUT
    gate: float | None = None
    smoothing: float = 0.9
    tau: float = field(default=0.0, init=False, repr=False)
    _draws = True

    def __post_init__(self) -> None:
        check_fraction("ImportanceSampling", "keep", self.keep, schedule=True)
        if self.gate is not None:
            check_number("ImportanceSampling", "gate", self.gate, "a number or None was needed.")
        check_within("ImportanceSampling", "smoothing", self.smoothing, "[0, 1)")

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        num_rows, keep = scores.numel(), fraction_at("ImportanceSampling", "keep", self.keep, context)
        draws = count_kept(keep, num_rows)
        lots = torch.rand(draws, dtype=torch.float64, device=scores.device, generator=context.generator)
        both = torch.cat([scores.double(), lots]).cpu()  # one sync, not two
        values, lots = on_host("ImportanceSampling", both[:num_rows]), both[num_rows:]
        if values.min() < 0:
            needed = "needs scores of at least 0; use RankSampling, which asks for their order only."
            raise InvalidInput(f"ImportanceSampling got a score of {values.min().item():g} but {needed}")
        by_score = self.gate is None or self.tau > self.gate
        values = values / values.max().clamp(min=torch.finfo(values.dtype).tiny)  # so that the sum is finite
        total = values.sum()
        chances = values / total if total > 0 else torch.full_like(values, 1 / num_rows)
        if self.gate is not None:
            # 1 - sum((p - u)^2) / sum(p^2) is 1 / (N sum(p^2)), as p sums to 1.
            tau = float((num_rows * chances.square().sum()).sqrt())
            self.tau = self.smoothing * self.tau + (1 - self.smoothing) * tau
        if not by_score or total == 0:
            drawn = RandomRows(keep)(scores, context)
            # even=False, so that a step treats the selection alike whether the gate is open or not.
            return unread(drawn.rows, drawn.weights, num_rows, unbiased=True)
        # The first row whose cumulated chance exceeds the lot: never one with chance 0.
        cumulated = chances.cumsum(0)
        drawn = torch.searchsorted(cumulated, lots * cumulated[-1], right=True).clamp(max=num_rows - 1)
        times = torch.bincount(drawn, minlength=num_rows)
        rows = times.nonzero().squeeze(1)
        weights = times[rows] / (draws * num_rows * chances[rows])
        weights = weights.to(scores.device, weights_dtype(scores), non_blocking=True)
        return unread(rows.to(scores.device, non_blocking=True), weights, num_rows, unbiased=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the smoothed ``tau``."""
        return {"tau": self.tau}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the ``tau`` of ``state``; a state that is refused is not loaded."""
        owner = "ImportanceSampling.load_state_dict"
        check_entries(owner, state, ("tau",))
        check_number(owner, "tau", state["tau"], "a number of at least 0 was needed.", lambda value: value >= 0)
        self.tau = float(state["tau"])


def _race(log_odds: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``count`` indices of ``(N,)`` without replacement, odds ``exp(log_odds)``, by an exponential race.

    ``torch.multinomial`` has the same distribution but syncs with the device to check its input.
    """
    arrival = torch.empty_like(log_odds).exponential_(generator=generator)
    return torch.topk(log_odds - arrival.log(), count).indices
