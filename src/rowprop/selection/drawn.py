"""The selectors that draw, from the context's generator alone and on the device of the scores.

:class:`RankSampling` and :class:`RandomRows` know K from N and never wait for the device; the others wait once, to read
their draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rowprop.checks import check_entries, check_tensor, check_whole, is_number, wrong
from rowprop.errors import InvalidInput
from rowprop.scoring import described
from rowprop.selection.base import Context, Selection, unread
from rowprop.selection.common import (
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
class RankSampling(Keeping):
    """Draw rows without replacement, the likelier the higher their score ranks: Composer's selective backprop.

    The row of rank ``i`` (0 = smallest score) is drawn with probability proportional to
    ``((i + 0.5) / N) ** (1 / keep - 1)``. Biased, as Composer's: each kept row counts ``1/K``. A NaN score ranks as the
    easiest row. Sources: mosaicml/composer, ``composer/algorithms/selective_backprop``; Jiang et al., 2019,
    arXiv:1910.00762 (with ``beta = 1 / keep - 1``).

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``
            (Composer rounds down, and may keep nothing).

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

    Unbiased: every row is kept with probability ``K/N`` and counts ``1/K``.

    Args:
        keep: Fraction of rows kept, in (0, 1], or a schedule of it; ``K = max(1, ceil(keep * N))``.

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

    The scores of the batch are first appended to the last ``recent`` ones; then each row is kept, independently, with
    probability ``p = max(floor, (share of the recent scores strictly below its own) ** beta)``: on average
    ``1 / (beta + 1)`` of the rows, where the losses keep their distribution, and there may be none.

    Biased, as the original: each kept row counts ``1/K`` whatever its probability was. A NaN score counts as the
    smallest. A row with an infinite score is kept, and the score is not remembered. Sources: Jiang et al., 2019,
    arXiv:1910.00762; angelajiang/SelectiveBackprop, ``lib/calculators.py``.

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
        if not is_number(self.beta) or self.beta < 0:
            needed = "a number of at least 0 was needed; 1 keeps half of the rows, 3 a quarter."
            raise wrong("PercentileSampling", "beta", self.beta, needed)
        check_whole("PercentileSampling", "recent", self.recent, 1)
        check_fraction("PercentileSampling", "floor", self.floor, zero_too=True)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
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
        """Continue from the scores that ``state`` remembers; a state that is refused is not loaded."""
        owner = "PercentileSampling.load_state_dict"
        check_entries(owner, state, ("recent",))
        recent = state["recent"]
        check_tensor(owner, "recent", recent)
        sound = recent.dim() == 1 and recent.is_floating_point() and not bool(recent.isnan().any())
        if not sound or recent.numel() > self.recent:
            needed = f"floating scores without NaN were needed, at most recent={self.recent}."
            raise InvalidInput(f"{owner} got {described(recent, 'recent scores')} but {needed}")
        self._scores = recent.clone()


@dataclass(eq=False)
class ImportanceSampling(Checked):
    """Draw rows in proportion to their scores, with the weights that undo it: an unbiased gradient of less variance.

    ``M = max(1, ceil(keep * N))`` draws with replacement, row i with probability ``p_i = score_i / sum(scores)``; a row
    drawn c times is kept once, with weight ``c / (M N p_i)``. The variance is least where scores are proportional to
    the norms of the rows' gradients (:func:`rowprop.scoring.gradient_norm` bounds these). Unbiased where rows with
    score 0, which are never drawn, have no gradient. Where all scores are 0 rows are drawn evenly. Negative, NaN and
    infinite scores are refused.

    Drawing so pays only where scores differ. With a ``gate``, the reduction of variance
    ``tau = 1 / sqrt(1 - sum((p - 1/N) ** 2) / sum(p ** 2))`` is smoothed over the steps, and as long as it is not above
    ``gate``, M rows are drawn evenly instead, without replacement and each with weight ``1/M``. A batch is judged by
    the tau of the batches before it, starting at 0. Source: Katharopoulos and Fleuret, ICML 2018, arXiv:1803.00942
    (gate ``(B + 3b) / (3b)`` for b rows of B).

    Args:
        keep: M as a fraction of the rows, in (0, 1], or a schedule of it. K is at most M: repeats are merged.
        gate: Least tau to draw by score, a number; default None: always draw by score.
        smoothing: The share of the old tau that remains in a step, in [0, 1); default 0.9.

    Example:
        >>> selection = ImportanceSampling(keep=0.5)(torch.tensor([0.0, 3.0, 0.0, 0.0]))
        >>> selection.rows.tolist(), selection.weights.tolist()
        ([1], [0.25])
    """

    keep: Keep
    gate: float | None = None
    smoothing: float = 0.9
    _draws = True
    _tau: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fraction("ImportanceSampling", "keep", self.keep, schedule=True)
        if self.gate is not None and not is_number(self.gate):
            raise wrong("ImportanceSampling", "gate", self.gate, "a number or None was needed.")
        if not is_number(self.smoothing) or not 0 <= self.smoothing < 1:
            raise wrong("ImportanceSampling", "smoothing", self.smoothing, "a number in [0, 1) was needed.")

    @property
    def tau(self) -> float:
        """The smoothed reduction of variance, as the next batch is judged by; 0 without a gate."""
        return self._tau

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        num_rows, keep = scores.numel(), fraction_at("ImportanceSampling", "keep", self.keep, context)
        draws = count_kept(keep, num_rows)
        lots = torch.rand(draws, dtype=torch.float64, device=scores.device, generator=context.generator)
        both = torch.cat([scores.double(), lots]).cpu()  # one wait for the device, not two
        values, lots = on_host("ImportanceSampling", both[:num_rows]), both[num_rows:]
        if values.min() < 0:
            needed = "needs scores of at least 0; use RankSampling, which asks for their order only."
            raise InvalidInput(f"ImportanceSampling got a score of {values.min().item():g} but {needed}")
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
        """Continue from the ``tau`` of ``state``; a state that is refused is not loaded."""
        owner = "ImportanceSampling.load_state_dict"
        check_entries(owner, state, ("tau",))
        if not is_number(state["tau"]) or state["tau"] < 0:
            raise wrong(owner, "tau", state["tau"], "a number of at least 0 was needed.")
        self._tau = float(state["tau"])


def _race(log_odds: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``count`` places of ``(N,)`` without replacement, odds ``exp(log_odds)``: the first of an exponential race.

    ``torch.multinomial`` has the same law but waits for the device to check its input.
    """
    arrival = torch.empty_like(log_odds).exponential_(generator=generator)
    return torch.topk(log_odds - arrival.log(), count).indices
