"""One backward of a thinned model: the gradient arrives at a block, some of its rows are drawn, and these go on."""

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

MULTIPLE = 8  # a device's kernels are tuned per shape: there K is a multiple of this
SUPPOSED = 0.75  # while no rows are drawn, a measurement supposes a draw of this share, or of a smaller one that is due
# It supposes no smaller probability: a row of another forward of the backward may share it, and would outweigh all.
RAREST = 0.01


@dataclass(eq=False)
class ThinnedBackward:
    """A backward that runs, from the first gradient that comes to a block to its end, and what is measured in it."""

    control: Control
    worth: Worth
    uniform: Callable[[], float]  # draws a number from [0, 1)
    late: bool = False  # the host would wait for numbers of the device
    # For each forward the rows with which it came to the first block. Sequences are counted apart from the tokens that
    # a gradient held above an attention, so the number of all rows of its kind stands beside.
    rows: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    nonzero: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])  # ``keep`` is a share of it
    seen: dict[str, list[Seen]] = field(default_factory=dict[str, list[Seen]])
    excess: Tensor | None = None  # for each row what a supposed draw adds, over the square of its gradient
    predicted: list[Tensor] = field(default_factory=list[Tensor])  # for each block what it adds, and sum of squares
    # For some rows the squared norms of their parts of the weight gradients, summed over these, (K,); apart for those
    # before and after ``excess`` was set.
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
        often = worth.pause > 0 or not worth.idle  # rows are drawn, or a trial runs, which without numbers is in vain
        self.measures_norms = self.measures_weights or control.measures_norms(number, often)

    def watch(self, rows: RowSet) -> None:
        """Have the parts of the weight gradients measured that these rows, and all made of them, have below here."""
        hook = rows.hook = cast("Drawn | None", rows.hook) or Drawn()
        if self.measure not in hook.measures:  # another handle may measure as well
            hook.measures.append(self.measure)
            self.hooks.append(hook)

    def choose(self, place: str, forward: int, g: RowSlice, mixes: bool) -> tuple[Tensor, Tensor] | None:
        """The places (K,) and factors (K,) of the rows that go on from a block; None: all. A BatchNorm may mix them."""
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
                # A device alone knows how many are nonzero. If all norms are 0 they may have underflowed.
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
        """Find what a draw of a share of the rows, made at the first block, would add."""
        kept = count_of(share, norms.numel(), 1)
        if self.excess is None and kept < norms.numel():
            self.excess = inclusion(norms, kept).clamp(min=RAREST).reciprocal() - 1
        if self.excess is not None and self.excess.shape == norms.shape:
            squares = norms.double().square()
            self.predicted.append(torch.stack([(self.excess * squares).sum(), squares.sum()]))

    def measure(self, rows: RowSet, squares: Tensor) -> None:
        """Take note of the squared norms of the rows' parts of a weight gradient, (K,)."""
        base, weights = rows.stands_for()
        if base is rows or weights is not None:  # else nobody knows how the rows were multiplied
            key = rows, self.excess
            self.squares[key] = self.squares[key] + squares if key in self.squares else squares

    def variances(self) -> Tensor:
        """Of the gradient of all weights seen, the variance that the draws add, and that between batches, (2,)."""
        found: list[Tensor] = []
        for (rows, excess), of_rows in self.squares.items():
            squares, weights = of_rows.double(), rows.stands_for()[1]
            between, added = squares, torch.zeros_like(squares)
            if weights is not None:  # a drawn row's gradient is as many times as large, and it stands for as many
                between = squares / weights
                added = squares - between
            elif excess is not None and excess.shape == squares.shape:
                added = squares * excess
            found.append(torch.stack([added.sum(), between.sum()]))
        return torch.stack(found).sum(0)

    def end(self) -> None:
        """Measure no more, and let go of the rows, whose hooks may hold this object."""
        for hook in self.hooks:
            hook.measures.clear()
        self.hooks.clear()
        self.squares.clear()

    def send(self) -> None:
        """Have all numbers brought to the host, which does not wait for them."""
        found = [one.numbers for one in self._measured() if one.numbers is not None]
        self._weighed = bool(self.squares)
        if self._weighed:
            found += [self.variances(), *self.predicted]
        if found:
            numbers = torch.cat(found)
            self._host = numbers.to("cpu", non_blocking=True) if self.late else numbers
            self._sent = mark(numbers.device)

    def read(self) -> tuple[float, float, float] | None:
        """Put the numbers where they belong; return what :meth:`Control.learn` takes of measured weight gradients."""
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
