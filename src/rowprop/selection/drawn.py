"""The selectors that draw: which rows of a batch are kept, by chances that follow one score per row.

All draw from ``generator`` alone, on the device of the scores, and answer with ascending rows.
:class:`RankSampling` and :class:`RandomRows` know K from N and never wait for the device; the others must read their
draw to know K, so the host waits for it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rowprop.checks import check_entries, check_tensor, check_whole, is_number
from rowprop.errors import InvalidInput
from rowprop.selection.base import NOTHING, Context, Selection, unread
from rowprop.selection.common import (
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
class RankSampling:
    """Draw rows without replacement, the likelier the higher their score ranks.

    The row of rank ``i`` (0 = smallest score) is drawn with probability proportional to
    ``((i + 0.5) / N) ** (1 / keep - 1)``. This is Composer's selective backprop: a fixed count, hard rows preferred,
    yet every row has a chance. At N = 64 and keep 0.5 the hardest row is kept four times in five, the median one 56
    times in a hundred, the easiest once in a hundred.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``
            (Composer rounds down, and may keep nothing).

    Raises:
        InvalidInput: ``keep`` is outside (0, 1]; or, when called, ``scores`` is not a floating tensor of shape ``(N,)``
            or ``generator`` lives on another device.

    Cost:
        ``O(N log N)`` on the device, no copy to the host; N random numbers.

    Bias:
        Biased, as Composer's: the draw is not undone by weights, each kept row counts ``1/K``. A NaN score ranks as the
        easiest row.

    Example:
        >>> RankSampling(keep=1.0)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [0, 1, 2]

    References:
        mosaicml/composer, ``composer/algorithms/selective_backprop``; Jiang et al., 2019, arXiv:1910.00762 (with
        ``beta = 1 / keep - 1``).
    """

    keep: Keep

    def __post_init__(self) -> None:
        check_fraction("RankSampling", "keep", self.keep, schedule=True)

    def keep_at(self, context: Context) -> float:
        """Return the ``keep`` of this moment of the training."""
        return fraction_at("RankSampling", "keep", self.keep, context)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Draw K rows by the ranks of ``scores`` ``(N,)`` with the context's generator."""
        scores = checked_scores("RankSampling", scores, context, draws=True)
        keep, num_rows = self.keep_at(context), scores.numel()
        # Percentiles in the order of `hardest_first`; the race wants the logarithm of their power.
        percentiles = (num_rows - 0.5 - torch.arange(num_rows, device=scores.device)) / num_rows
        log_odds = percentiles.log() * (1 / keep - 1)
        drawn = _race(log_odds, count_kept(keep, num_rows), context.generator)
        return mean_of(hardest_first(scores)[drawn], scores)


@dataclass(frozen=True)
class RandomRows:
    """Keep a uniformly random set of rows, whatever their scores: the control every comparison needs.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``.

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

    keep: Keep

    def __post_init__(self) -> None:
        check_fraction("RandomRows", "keep", self.keep, schedule=True)

    def keep_at(self, context: Context) -> float:
        """Return the ``keep`` of this moment of the training."""
        return fraction_at("RandomRows", "keep", self.keep, context)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Draw K of the N rows of ``scores`` with the context's generator."""
        scores = checked_scores("RandomRows", scores, context, draws=True)
        even = torch.zeros(scores.numel(), device=scores.device)
        drawn = _race(even, count_kept(self.keep_at(context), scores.numel()), context.generator)
        return mean_of(drawn, scores, unbiased=True)


@dataclass(eq=False)
class PercentileSampling:
    """Draw each row by the share of recent losses that its own exceeds: the rule of "Biggest Losers".

    The scores of the batch are first appended to the last ``recent`` ones; then each row is kept, independently, with
    probability

        ``p = max(floor, (share of the recent scores strictly below its own) ** beta)``.

    So the count follows the batch: a batch harder than the batches before it is kept nearly whole, and an easy one may
    be left out altogether (K = 0). Where the losses keep their distribution, ``1 / (beta + 1)`` of the rows are kept on
    average.

    Args:
        beta: How much hard rows are preferred, 0 or more; default 3.0, a quarter of the rows. 0 keeps every row.
        recent: How many scores are remembered; default 1024.
        floor: Least probability of any row, in [0, 1]; default 0.0: the smallest score of all is never kept.

    Raises:
        InvalidInput: An argument is out of its range; or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)`` or ``generator`` lives on another device.

    Cost:
        ``O((N + recent) log recent)`` on the device; N random numbers; the host waits for K. ``state_dict`` holds
        the remembered scores.

    Bias:
        Biased, as the original: each kept row counts ``1/K`` whatever its probability was. A NaN score counts as the
        smallest. A row with an infinite score is kept, and the score is not remembered.

    Example:
        >>> from rowprop.selection import PercentileSampling
        >>> PercentileSampling(beta=0.0)(torch.tensor([0.1, 2.0, 0.5])).rows.tolist()
        [0, 1, 2]

    References:
        Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019, arXiv:1910.00762;
        angelajiang/SelectiveBackprop, ``lib/calculators.py`` (order and strict comparison), ``examples/train.py``
        (``--prob_pow`` 3). There the optimizer waits for a full batch of kept rows: ``accumulate_to`` of
        :class:`rowprop.SelectiveBackprop`.
    """

    beta: float = 3.0
    recent: int = 1024
    floor: float = 0.0
    _scores: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_number(self.beta) or self.beta < 0:
            raise InvalidInput(
                f"PercentileSampling got beta={self.beta!r} but a number of at least 0 was needed; 1 keeps half of the "
                "rows, 3 a quarter."
            )
        needed = "a whole number of scores to remember was needed; the default is 1024."
        check_whole("PercentileSampling", "recent", self.recent, 1, needed)
        check_fraction("PercentileSampling", "floor", self.floor, zero_too=True)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Draw rows of ``scores`` ``(N,)`` with the context's generator and remember the scores."""
        scores = checked_scores("PercentileSampling", scores, context, draws=True)
        dtype = weights_dtype(scores)
        # NaN has no place in an order, and would mislead the search in it.
        values = scores.to(dtype).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        sure = values == torch.inf  # nonfinite="keep" asks so for a row; such a score is no measure for the others
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
        """Continue from the scores that ``state`` remembers.

        Raises:
            InvalidInput: ``state`` holds no such scores, or more than this sampler remembers; nothing is loaded then.
        """
        owner = "PercentileSampling.load_state_dict"
        check_entries(owner, state, ("recent",))
        recent = state["recent"]
        check_tensor(owner, "recent", recent)
        sound = recent.dim() == 1 and recent.is_floating_point() and not bool(recent.isnan().any())
        if not sound or recent.numel() > self.recent:
            raise InvalidInput(
                f"{owner} got recent scores of shape {tuple(recent.shape)} and dtype {recent.dtype} but floating "
                f"scores without NaN were needed, at most recent={self.recent}; build the selector as it was when the "
                "state was saved."
            )
        self._scores = recent.clone()


@dataclass(eq=False)
class ImportanceSampling:
    """Draw rows in proportion to their scores, with the weights that undo it: an unbiased gradient of less variance.

    ``M = max(1, ceil(keep * N))`` draws with replacement, row i with probability ``p_i = score_i / sum(scores)``; a row
    drawn c times is kept once, with weight ``c / (M N p_i)``. The variance is least where scores are proportional to
    the norms of the rows' gradients (:mod:`rowprop.scoring` has a bound of these).

    Drawing so pays only where scores differ. With a ``gate``, the reduction of variance

        ``tau = 1 / sqrt(1 - sum((p - 1/N) ** 2) / sum(p ** 2))``

    is smoothed over the steps, and as long as it is not above ``gate``, M rows are drawn evenly instead, without
    replacement and each with weight ``1/M``. As originally, a batch is judged by the tau of the batches before it,
    starting at 0, so the first one is drawn evenly.

    Args:
        keep: M as a fraction of the rows, in (0, 1], or a schedule of it. K is at most M: repeats are merged.
        gate: Least tau to draw by score, a number; default None: always draw by score.
        smoothing: The share of the old tau that remains in a step, in [0, 1); default 0.9.

    Raises:
        InvalidInput: An argument is out of its range; or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)``, holds a NaN, an infinity or a negative number, or ``generator`` lives on another device.

    Cost:
        ``O(N log N)``; one copy of scores and draws to the host, because K depends on them. ``state_dict`` holds tau.

    Bias:
        None for rows with a score above 0, behind the gate and before it. A row with score 0 is never drawn, so the
        gradient is unbiased only where such rows have none. Where all scores are 0 rows are drawn evenly.

    Example:
        >>> from rowprop.selection import ImportanceSampling
        >>> scores = torch.tensor([0.0, 3.0, 0.0, 0.0])
        >>> selection = ImportanceSampling(keep=0.5)(scores)
        >>> selection.rows.tolist(), selection.weights.tolist()
        ([1], [0.25])

    References:
        Katharopoulos and Fleuret, "Not All Samples Are Created Equal", ICML 2018, arXiv:1803.00942 (the gate's
        threshold there is ``(B + 3b) / (3b)`` for b rows of B; smoothing 0.9 as in idiap/importance-sampling).
    """

    keep: Keep
    gate: float | None = None
    smoothing: float = 0.9
    _tau: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fraction("ImportanceSampling", "keep", self.keep, schedule=True)
        if self.gate is not None and not is_number(self.gate):
            raise InvalidInput(
                f"ImportanceSampling got gate={self.gate!r} but a number was needed, which tau has to exceed; None "
                "always draws by score."
            )
        if not is_number(self.smoothing) or not 0 <= self.smoothing < 1:
            raise InvalidInput(
                f"ImportanceSampling got smoothing={self.smoothing!r} but a number in [0, 1) was needed; 0 follows "
                "each batch."
            )

    @property
    def tau(self) -> float:
        """The smoothed reduction of variance, as the next batch is judged by; 0 without a gate."""
        return self._tau

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Draw M rows by the ``scores`` ``(N,)`` with the context's generator."""
        scores = checked_scores("ImportanceSampling", scores, context, draws=True)
        num_rows, keep = scores.numel(), fraction_at("ImportanceSampling", "keep", self.keep, context)
        draws = count_kept(keep, num_rows)
        values, lots = _with_lots("ImportanceSampling", scores, draws, context.generator)
        by_score = self.gate is None or self._tau > self.gate
        values = values / values.max().clamp(min=torch.finfo(values.dtype).tiny)  # so that the sum is finite
        total = values.sum()
        chances = values / total if total > 0 else torch.full_like(values, 1 / num_rows)
        if self.gate is not None:
            # 1 - sum((p - u)^2) / sum(p^2) is 1 / (N sum(p^2)), as p sums to 1.
            tau = float((num_rows * chances.square().sum()).sqrt())
            self._tau = self.smoothing * self._tau + (1 - self.smoothing) * tau
        if not by_score or total == 0:
            drawn = RandomRows(keep)(scores, context)
            # The selection is not called even: a step must treat it alike whether the gate is open or not.
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
        return {"tau": self._tau}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the ``tau`` of ``state``.

        Raises:
            InvalidInput: ``state`` has no ``tau`` that is a number of at least 0; nothing is loaded then.
        """
        owner = "ImportanceSampling.load_state_dict"
        check_entries(owner, state, ("tau",))
        if not is_number(state["tau"]) or state["tau"] < 0:
            raise InvalidInput(f"{owner} got tau={state['tau']!r} but a number of at least 0 was needed.")
        self._tau = float(state["tau"])


@dataclass(frozen=True)
class BernoulliSampling:
    """Keep each row by a lot of its own, likelier the higher its score, with the weights that undo it.

    The chances are ``p = (1 - floor) * min(1, c * score) + floor * keep``, with c such that they sum to ``keep * N``:
    the count varies around that, and may be 0. A share that would exceed 1 stops there, before the floor is mixed in,
    and the other rows share the rest. A kept row has weight ``1 / (N p)`` (Horvitz and Thompson): no row twice, and
    unbiased for every row.

    Args:
        keep: Expected fraction of rows kept, in (0, 1], or a schedule of it.
        floor: Share of even chances mixed in, in (0, 1]; default 0.1. No chance is then below ``floor * keep`` and no
            weight above ``1 / (N * floor * keep)``; 1 ignores the scores.

    Raises:
        InvalidInput: An argument is out of its range; or, when called, ``scores`` is not a floating tensor of shape
            ``(N,)``, holds a NaN, an infinity or a negative number, or ``generator`` lives on another device.

    Cost:
        ``O(N log N)``; one copy of scores and lots to the host, because K depends on them.

    Bias:
        None, rows with score 0 included. The weights of a batch need not sum to 1.

    Example:
        >>> from rowprop.selection import BernoulliSampling
        >>> BernoulliSampling(keep=1.0)(torch.tensor([0.0, 3.0])).weights.tolist()
        [0.5, 0.5]

    References:
        Horvitz and Thompson, "A Generalization of Sampling Without Replacement From a Finite Universe", Journal of the
        American Statistical Association 47, 1952.
    """

    keep: Keep
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_fraction("BernoulliSampling", "keep", self.keep, schedule=True)
        check_fraction("BernoulliSampling", "floor", self.floor)

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Draw rows of ``scores`` ``(N,)`` with the context's generator."""
        scores = checked_scores("BernoulliSampling", scores, context, draws=True)
        num_rows, keep = scores.numel(), fraction_at("BernoulliSampling", "keep", self.keep, context)
        values, lots = _with_lots("BernoulliSampling", scores, num_rows, context.generator)
        chances = _filled(values, keep * num_rows)
        chances = chances + self.floor * (keep - chances)
        rows = (lots < chances).nonzero().squeeze(1)
        weights = 1 / (num_rows * chances[rows])
        weights = weights.to(scores.device, weights_dtype(scores), non_blocking=True)
        return unread(rows.to(scores.device, non_blocking=True), weights, num_rows, unbiased=True)


def _filled(scores: Tensor, budget: float) -> Tensor:
    """``min(1, c * score)`` that sums to ``budget``; the part that no positive score takes is spread over the zeros."""
    num_rows, positive = scores.numel(), int((scores > 0).sum())
    if positive <= budget:
        return torch.where(scores > 0, 1.0, (budget - positive) / max(1, num_rows - positive))
    scores = scores / scores.max()
    ordered = scores.sort(descending=True).values
    unfilled = ordered.flip(0).cumsum(0).flip(0)  # sum of all from here on
    factors = (budget - torch.arange(num_rows)) / unfilled  # c, were all before this one filled
    enough = int((factors * ordered <= 1).int().argmax())
    return (factors[enough] * scores).clamp(max=1)


def _with_lots(name: str, scores: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Scores, none negative, and uniform numbers in [0, 1), drawn on the scores' device; both float64 on the host."""
    lots = torch.rand(count, dtype=torch.float64, device=scores.device, generator=generator)
    both = torch.cat([scores.double(), lots]).cpu()  # one wait for the device, not two
    values, lots = on_host(name, both[: scores.numel()]), both[scores.numel() :]
    if values.min() < 0:
        raise InvalidInput(
            f"{name} got a score of {values.min().item():g} but needs scores of at least 0, because rows are drawn in "
            "proportion to them; use RankSampling, which asks for their order only."
        )
    return values, lots


def _race(log_odds: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``count`` places of ``(N,)`` without replacement, odds ``exp(log_odds)``: an exponential race.

    Each place arrives at an exponential time with its odds as rate, and the first ``count`` to arrive are drawn; that
    is the law of drawing one by one. ``torch.multinomial`` does the same but waits for the device to check its input.
    """
    arrival = torch.empty_like(log_odds).exponential_(generator=generator)
    return torch.topk(log_odds - arrival.log(), count).indices
