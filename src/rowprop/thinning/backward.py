"""One backward of a thinned model: at each block some rows of the gradient are drawn and passed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.host import mark, reach, waits
from rowprop.thinning.control import SHARES, Control, Seen, carried, carry, count_of
from rowprop.thinning.draw import added_variance, draw, floored, inclusion, variances
from rowprop.thinning.drawn import Drawn, norms_of_rows
from rowprop.thinning.worth import Worth

MULTIPLE = 8  # on a device K is a multiple of this: kernels are tuned per shape
SUPPOSED = 0.75  # largest share of rows in a hypothetical draw, measured while no rows are drawn
# Smallest probability in a hypothetical draw. A row of another forward may get it, and would outweigh all others.
RAREST = 0.01


@dataclass(eq=False)
class ThinnedBackward:
    """One running backward, from the first gradient that reaches a block to the end, and its measurements."""

    control: Control
    worth: Worth
    uniform: Callable[[], float]  # draws a number from [0, 1)
    late: bool = False  # reading numbers would sync with the device
    # For each forward, the number of rows at the first block. The key also holds the total number of rows of that kind,
    # which separates sequences from the tokens that a gradient had above an attention.
    rows: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    nonzero: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])  # ``keep`` is a share of it
    seen: dict[str, list[Seen]] = field(default_factory=dict[str, list[Seen]])
    excess: Tensor | None = None  # for each row: added variance of a hypothetical draw over its squared norm
    predicted: list[Tensor] = field(default_factory=list[Tensor])  # for each block: that variance, sum of squares
    # For sets of rows, each row's squared weight gradient, summed over the weights, (K,). Entries from before and after
    # ``excess`` was set are separate.
    squares: dict[tuple[RowSet, Tensor | None], Tensor] = field(default_factory=dict[Any, Tensor])
    hooks: list[Drawn] = field(default_factory=list[Drawn])  # of rows whose weight gradients are measured
    _weighed: bool = False
    _host: Tensor | None = None
    _sent: Any = 0.0

    def __post_init__(self) -> None:
        control, worth, number = self.control, self.worth, self.control.begun
        drawn = any(worth.draws(place) and control.share(place) < 1 for place in control.shares)
        self.measures_weights = not worth.pause and control.measures_weights(number, drawn)
        self.supposes = self.measures_weights and not drawn
        often = worth.pause > 0 or not worth.idle  # rows are drawn, or a trial needs numbers
        self.measures_norms = self.measures_weights or control.measures_norms(number, often)

    def watch(self, rows: RowSet) -> None:
        """Measure the weight gradients of these rows, and of all rows derived from them, below this point."""
        hook = rows.hook = cast("Drawn | None", rows.hook) or Drawn()
        if self.measure not in hook.measures:  # another handle may measure as well
            hook.measures.append(self.measure)
            self.hooks.append(hook)

    def choose(self, place: str, forward: int, g: RowSlice, mixes: bool) -> tuple[Tensor, Tensor] | None:
        """The indices (K,) and factors (K,) of the rows to pass on from a block; None: all. ``mixes``: BatchNorm."""
        norms = norms_of_rows(g)
        if mixes:
            norms = floored(norms)
        arrived = kept = norms.numel()
        self.late = waits(norms)
        first = self._first(self.rows, (forward, g.rows.num_rows), arrived)
        share = self.worth.share(place, self.control.share)
        if self.supposes:
            self._suppose(norms, min(share, SUPPOSED))
        elif self.worth.draws(place):
            of = arrived
            if self.control.keep is not None:
                # Reading this count from a device would sync. If all norms are 0, they may have underflowed.
                nonzero = 0 if self.late else int(norms.count_nonzero())
                of = self._first(self.nonzero, (forward, g.rows.num_rows), nonzero or arrived)
            kept = min(arrived, count_of(share, of, MULTIPLE if self.late else 1))
        p = inclusion(norms, kept) if kept < arrived else None
        numbers = _sums(norms, g.rows.stands_for()[1], p) if self.measures_norms else None
        self.seen.setdefault(place, []).append(Seen(arrived, kept, first, numbers))
        return None if p is None else draw(p, kept, self.uniform())

    def _first(self, counts: dict[tuple[int, int], int], key: tuple[int, int], count: int) -> int:
        """The count at the first block, or here if attention has made more of the tokens that came above."""
        counts[key] = max(counts.get(key, 0), count) if self.control.unit == "token" else counts.get(key, count)
        return counts[key]

    def _suppose(self, norms: Tensor, share: float) -> None:
        """Compute the variance that a draw of this share of the rows at the first block would add."""
        kept = count_of(share, norms.numel(), 1)
        if self.excess is None and kept < norms.numel():
            self.excess = inclusion(norms, kept).clamp(min=RAREST).reciprocal() - 1
        if self.excess is not None and self.excess.shape == norms.shape:
            squares = norms.double().square()
            self.predicted.append(torch.stack([(self.excess * squares).sum(), squares.sum()]))

    def measure(self, rows: RowSet, squares: Tensor) -> None:
        """Record the squared norm of each row's part of a weight gradient, (K,)."""
        base, weights = rows.stands_for()
        if base is rows or weights is not None:  # else the factors of the rows are unknown
            key = rows, self.excess
            self.squares[key] = self.squares[key] + squares if key in self.squares else squares

    def variances(self) -> Tensor:
        """Variance of all measured weight gradients that the draws add, and the variance between batches, (2,)."""
        found: list[Tensor] = []
        for (rows, excess), of_rows in self.squares.items():
            squares, weights = of_rows.double(), rows.stands_for()[1]
            between, added = squares, torch.zeros_like(squares)
            if weights is not None:  # a drawn row's gradient is multiplied by its weight, and represents that many rows
                between = squares / weights
                added = squares - between
            elif excess is not None and excess.shape == squares.shape:
                added = squares * excess
            found.append(torch.stack([added.sum(), between.sum()]))
        return torch.stack(found).sum(0)

    def end(self) -> None:
        """Stop measuring and release the rows, whose hooks may reference this object."""
        for hook in self.hooks:
            hook.measures.clear()
        self.hooks.clear()
        self.squares.clear()

    def send(self) -> None:
        """Copy all numbers to the host without a sync."""
        found = [one.numbers for one in self._measured() if one.numbers is not None]
        self._weighed = bool(self.squares)
        if self._weighed:
            found += [self.variances(), *self.predicted]
        if found:
            numbers = torch.cat(found)
            self._host = numbers.to("cpu", non_blocking=True) if self.late else numbers
            self._sent = mark(numbers.device)

    def read(self) -> tuple[float, float, float] | None:
        """Store the numbers; return the measurements of weight gradients that :meth:`Control.learn` takes."""
        reach(self._sent)
        numbers = iter([] if self._host is None else cast("list[float]", self._host.tolist()))
        for one in self._measured():
            one.read(numbers)
        if self.control.unit == "token":
            carry(self.seen)
        if not self._weighed:
            return None
        added, between = next(numbers), next(numbers)
        predicted = [next(numbers) / (next(numbers) or 1.0) for _ in self.predicted]
        return added, between, fmean(predicted) if predicted else carried(self.seen)

    def _measured(self) -> list[Seen]:
        return [one for one in chain.from_iterable(self.seen.values()) if one.numbers is not None]


def _sums(norms: Tensor, weights: Tensor | None, p: Tensor | None) -> Tensor:
    """Sum of squares, variance added above, variance added, and the variances of ``SHARES``: see :class:`Seen`."""
    squares = norms.double().square()
    here = squares.sum()
    total = here if weights is None else (squares / weights).sum()
    added = torch.zeros_like(total) if p is None else added_variance(norms, p)
    return torch.cat([torch.stack([total, here - total, added]), variances(norms, SHARES)])
