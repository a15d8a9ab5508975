"""Rows that were drawn: some rows of a gradient go on, multiplied by the inverse of the probability that they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.backprop.rows import Hook, NeedsAllRows, RowSet
from rowprop.backprop.rules.rowlocal import Call
from rowprop.backprop.sliced import RowSlice, along_rows, gather_plain, of_lines, rows_apart
from rowprop.thinning.batchnorm import of_drawn_rows
from rowprop.thinning.squares import norms_over, of_convolution, of_product, wide_type

# Takes the rows that a weight gradient is summed over, and for each the square of its part's norm, (K,).
Measure = Callable[[RowSet, Tensor], None]
# Draws the (row, token) pairs that a weight gradient is summed over, by its two factors (P, a) and (P, b), and by the
# factors that the pairs were multiplied by already, (P,), None for 1. It returns the places of the pairs (M,), in
# order, and the factors to multiply them by (M,); None keeps all.
DrawPairs = Callable[[Tensor, Tensor, "Tensor | None"], "tuple[Tensor, Tensor] | None"]


@dataclass(eq=False)
class Drawn(Hook):
    """What thinning knows of the rows of a gradient."""

    # Called with each row's part of each weight gradient of these rows, and of all that are made of them.
    measures: list[Measure] = field(default_factory=list[Measure])
    base: RowSet | None = None  # the rows that these were drawn from; None if none were drawn
    weights: Tensor | None = None  # the rows were multiplied by them, (K,); None: by 1, or, if drawn, not known
    pairs: DrawPairs | None = None  # draws the pairs that weight gradients are summed over

    def moved(self, places: Tensor | None) -> Drawn:
        """What is made of a row has the row's weight; of rows that were routed elsewhere the weights are not known."""
        weights = None if places is None or self.weights is None else self.weights[places]
        return Drawn(self.measures, self.base, weights, self.pairs)

    def united(self, union: RowSet, places: Mapping[RowSet, Tensor]) -> Drawn:
        """A row of the union has weights whose expectation is 1, as those of the sets have."""
        stand = {rows: rows.stands_for() for rows in places}
        base = next((base for rows, (base, _) in stand.items() if base is not rows), None)
        known = next((weights for _, weights in stand.values() if weights is not None), None)
        together = None
        if known is not None and all(b is base and (b is rows or w is not None) for rows, (b, w) in stand.items()):
            together = known.new_zeros(union.kept)
            every = sum(rows.kept for rows in places)
            for rows, (_, weights) in stand.items():
                own = known.new_ones(rows.kept) if weights is None else weights
                together.index_add_(0, places[rows], own * (rows.kept / every))
        return Drawn(self.measures, base, together, self.pairs)

    def stands_for(self, rows: RowSet) -> tuple[RowSet, Tensor | None]:
        """The rows that these were drawn from."""
        return self.base or rows, self.weights

    def tensors(self) -> Sequence[Tensor]:
        """The weights."""
        return () if self.weights is None else (self.weights,)

    def weight_gradient(self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Measure, and draw the pairs that the sum is over."""
        self.measure(rows, layout, dz, x)
        if self.pairs is None:
            return dz, x
        weights = None if self.weights is None else of_lines(self.weights, layout.compact(rows.kept))
        drawn = self.pairs(dz, x, weights)
        if drawn is None:
            return dz, x
        places, factors = drawn[0], drawn[1].unsqueeze(1)
        some = dz.index_select(0, places)
        some = some.mul_(factors.to(some.dtype)) if some.dtype == wide_type(some) else _times(some, factors)
        return some, x.index_select(0, places)

    def measure(self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor) -> None:
        """Find each row's square."""
        if self.measures and _are_rows(rows, layout, dz, x):
            within = layout.compact(rows.kept)
            self.take(rows, of_product(_lines(dz, within), _lines(x, within), rows))

    def measure_convolution(
        self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor, weight: Tensor, rest: Sequence[Any]
    ) -> None:
        """Find each image's square."""
        if self.measures and _are_rows(rows, layout, dz, x) and layout.dim == 0 and layout.plain:
            self.take(rows, of_convolution(dz, x, tuple(weight.shape), rest, rows))

    def batch_norm(self, call: Call, g: RowSlice) -> Any:
        """The gradient in expectation, where it is known for how many rows each stands."""
        if self.base is None:
            return None
        if self.weights is None or self.base.num_rows != g.rows.num_rows:
            raise NeedsAllRows("rows were drawn whose weights are not known, and the batch's statistics mix rows")
        return of_drawn_rows(call, g)

    def key(self) -> tuple[bool, bool]:
        """Whether rows were drawn, and whether their squares are results."""
        return self.base is None, bool(self.measures)

    def traced(self, rows: RowSet, results: list[Tensor]) -> Drawn:
        """Rows that are made of these in the region are unknown outside; the weights are no input of the region."""

        def keep(found_for: RowSet, squares: Tensor) -> None:
            if found_for is rows:
                results.append(squares)

        return Drawn([keep] if self.measures else [], self.base)

    def take(self, rows: RowSet, result: Tensor) -> None:
        """Hand the squares to all who measure."""
        for measure in self.measures:
            measure(rows, result)


def drawn_rows(rows: RowSet, places: Tensor, weights: Tensor, pairs: DrawPairs | None = None) -> RowSet:
    """Some of the rows, which stand for all of them by these weights, (K,)."""
    some = rows.some(places)
    some.hook = hook = cast("Drawn | None", some.hook) or Drawn()
    if hook.base is None:
        hook.base, hook.weights = rows, weights
    elif hook.weights is not None:
        hook.weights = hook.weights * weights
    hook.pairs = pairs
    return some


def thinned(g: RowSlice, places: Tensor, weights: Tensor, pairs: DrawPairs | None) -> RowSlice:
    """The rows of a gradient at these places (K,), in order, multiplied by the weights (K,)."""
    rows = drawn_rows(g.rows, places, weights, pairs)
    values = gather_plain(g.values, places, g.layout.compact(g.rows.kept))
    values = _times(values, along_rows(weights, g.layout.compact(rows.kept), values.ndim))
    return RowSlice(values, rows, g.layout, g.shape)


def norms_of_rows(g: RowSlice) -> Tensor:
    """The Euclidean norm of each row, (A,), at least float32."""
    within = g.layout.compact(g.rows.kept)
    apart = rows_apart(g.values, within)
    return norms_over(apart, [d for d in range(apart.ndim) if d != within.dim + 1])


def _times(values: Tensor, factors: Tensor) -> Tensor:
    return (values * factors.to(wide_type(values))).to(values.dtype)


def _are_rows(rows: RowSet, layout: Layout, dz: Tensor, x: Tensor) -> bool:
    """Whether each entry of the index is a row of its own, and the factors are real."""
    apart = rows.unique and rows.absent is None and not layout.minor
    return apart and not (dz.is_complex() or x.is_complex())


def _lines(factor: Tensor, layout: Layout) -> Tensor:
    """The factor (..., width) as (K, T, width)."""
    return rows_apart(factor, layout).movedim(layout.dim + 1, 0).flatten(1, -2)
