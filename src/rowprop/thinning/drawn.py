"""Drawn rows: some rows of a gradient are passed on, divided by their probability of being drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.gather import along_rows, gather_plain, rows_apart
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import NeedsAllRows
from rowprop.backprop.rows.rows import Hook, RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.norms import in_one_format, saved, statistics
from rowprop.backprop.rules.rowlocal import Call
from rowprop.thinning.squares import norms_over, of_convolution, of_product, wide_type

# Called with the rows that a weight gradient sums over, and the squared norm of each row's part, (K,).
Measure = Callable[[RowSet, Tensor], None]


@dataclass(eq=False)
class Drawn(Hook):
    """What thinning knows about the rows of a gradient."""

    # Called for each weight gradient of these rows and of rows derived from them.
    measures: list[Measure] = field(default_factory=list[Measure])
    base: RowSet | None = None  # the rows that these were drawn from; None if none were drawn
    weights: Tensor | None = None  # the factors of the rows, (K,); None: 1, or, if drawn, unknown

    def moved(self, places: Tensor | None) -> Drawn:
        """The hook of derived rows: they keep their weights, if their origin is known."""
        weights = None if places is None or self.weights is None else self.weights[places]
        return Drawn(self.measures, self.base, weights)

    def united(self, union: RowSet, places: Mapping[RowSet, Tensor]) -> Drawn:
        """The hook of a union; its weights have expectation 1, as those of the sets do."""
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
        return Drawn(self.measures, base, together)

    def stands_for(self, rows: RowSet) -> tuple[RowSet, Tensor | None]:
        """The rows that these were drawn from."""
        return self.base or rows, self.weights

    def tensors(self) -> Sequence[Tensor]:
        """The weights."""
        return () if self.weights is None else (self.weights,)

    def measure_product(self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor) -> None:
        """Measure each row's squared norm."""
        if self.measures and _are_rows(rows, layout, dz, x):
            within = layout.compact(rows.kept)
            self.take(rows, of_product(_lines(dz, within), _lines(x, within), rows))

    def measure_convolution(
        self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor, weight: Tensor, rest: Sequence[Any]
    ) -> None:
        """Measure each image's squared norm."""
        if self.measures and _are_rows(rows, layout, dz, x) and layout.dim == 0 and layout.plain:
            self.take(rows, of_convolution(dz, x, tuple(weight.shape), rest, rows))

    def batch_norm(self, call: Call, g: RowSlice) -> Any:
        """BatchNorm's gradient in expectation, if the rows' weights are known."""
        if self.base is None:
            return None
        if self.weights is None or self.base.num_rows != g.rows.num_rows:
            raise NeedsAllRows("rows were drawn whose weights are not known, and the batch's statistics mix rows")
        return _batch_norm(call, g)

    def key(self) -> tuple[bool, bool]:
        """Whether rows were not drawn, and whether their squared norms are results."""
        return self.base is None, bool(self.measures)

    def traced(self, rows: RowSet, results: list[Tensor]) -> Drawn:
        """The hook inside a traced region: derived rows are unknown outside, and weights are not an input."""

        def keep(found_for: RowSet, squares: Tensor) -> None:
            if found_for is rows:
                results.append(squares)

        return Drawn([keep] if self.measures else [], self.base)

    def take(self, rows: RowSet, result: Tensor) -> None:
        """Pass the squared norms to all measures."""
        for measure in self.measures:
            measure(rows, result)


def drawn_rows(rows: RowSet, places: Tensor, weights: Tensor) -> RowSet:
    """Some of the rows, which represent all of them with these weights, (K,)."""
    some = rows.some(places)
    some.hook = hook = cast("Drawn | None", some.hook) or Drawn()
    if hook.base is None:
        hook.base, hook.weights = rows, weights
    elif hook.weights is not None:
        hook.weights = hook.weights * weights
    return some


def thinned(g: RowSlice, places: Tensor, weights: Tensor) -> RowSlice:
    """The rows of a gradient at these indices (K,), ascending, multiplied by the weights (K,)."""
    rows = drawn_rows(g.rows, places, weights)
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
    """Whether each entry of the index is a separate row, and the factors are real."""
    apart = rows.unique and rows.absent is None and not layout.minor
    return apart and not (dz.is_complex() or x.is_complex())


def _lines(factor: Tensor, layout: Layout) -> Tensor:
    """The factor (..., width) as (K, T, width)."""
    return rows_apart(factor, layout).movedim(layout.dim + 1, 0).flatten(1, -2)


# --- BatchNorm --------------------------------------------------------------------------------------------------------


def _batch_norm(call: Call, g: RowSlice) -> tuple[Any, Any, Any]:
    """The gradient whose expectation is that of all rows from which these were drawn.

    Those are the batch's rows, or the rows of a pick; then components are removed as in the rule for a pick.
    """
    input, weight, (mean, invstd), mask = call.input, call.weight, saved(call), call.output_mask
    base, weights = g.rows.stands_for()
    assert weights is not None
    if base.unique and not g.rows.unique:  # repeated rows in the base were drawn one by one
        g, weights = g.merged(), torch.zeros_like(weights).index_add_(0, g.rows.first, weights)
    values, x = in_one_format(g, input)
    centre, unit, entries = mean, invstd, input.numel() // input.shape[1]
    picked = base.kept != base.num_rows
    if picked:
        of_base = gather_plain(input, base.index, g.layout)
        centre, variance = statistics(call.op, of_base, mean)
        unit, entries = variance.add_(call.eps).rsqrt_(), of_base.numel() // input.shape[1]
    total, product = _sums(call.op, values, x, centre, unit)
    dw, db = product.sum(0), total.sum(0)
    if picked:  # the sum of g * x-hat, with x-hat of the full batch
        dw = torch.addcmul(dw / unit, db, centre - mean) * invstd
    dtype = dw.dtype if weight is None else weight.dtype
    parameters = (dw.to(dtype) if mask[1] else None), (db.to(dtype) if mask[2] else None)
    if not mask[0]:
        return None, *parameters
    scale = invstd if weight is None else weight * invstd
    within = g.layout.compact(g.rows.kept)
    v = weights.to(mean.dtype)
    shift, slope = (_lost(sums, v, within).mul_(-scale / entries) for sums in (total, product))
    slope *= unit
    shift -= slope * centre
    along = [-1, x.shape[1], *[1] * (x.ndim - 2)]
    dx = (values * scale.view(1, *along[1:])).addcmul_(x, slope.view(along)).add_(shift.view(along))
    return g.like(dx.to(values.dtype)), *parameters


def _sums(op: Any, values: Tensor, x: Tensor, centre: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of g and of g * x-hat for each entry of the first dimension, and each channel: (entries, channels)."""
    size, channels, space = x.shape[0], x.shape[1], list(range(2, x.ndim))
    if space and x.is_contiguous():  # the kernel gives both sums: each entry's channels are channels
        apart = [t.reshape(1, size * channels, -1) for t in (values, x)]
        one, *given = (v.repeat(size) for v in (torch.ones_like(unit), centre, unit))
        _, product, total = op(*apart, one, None, None, *given, True, 0.0, [False, True, True])
        return total.view(size, channels), product.view(size, channels)
    product = values * (x - centre.view(-1, *[1] * len(space)))
    if space:
        return values.sum(space, dtype=unit.dtype), product.sum(space) * unit
    return values.to(unit.dtype), product * unit


def _lost(sums: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """A multiple of what a row loses of a component, for each entry of the first dimension and channel.

    With s_j the sum over row j of the gradient that arrives, which has the factor v_j already, row i loses s_i, and v_i
    times the sum of the other s_j: it stands for v_i rows. Exactly K rows are drawn, so two of them come together more
    rarely than rows that are drawn one by one. With u = 1 - 1 / v, s_j therefore counts 1 + u_i * u_j / (sum of the
    other u) times for row i: exact for equal probabilities, and a row with v = 1 counts once for all.

    The sums are (entries, channels), the weights v (K,); the layout tells where the K rows are among the entries.
    """
    rows = rows_apart(sums, layout)
    own = rows.sum((0, 2))
    v = weights.unsqueeze(1)
    u = 1 - 1 / v.clamp_min(1)
    others = u.sum() - u
    alone = others < 1e-6
    share = (u / others.masked_fill(alone, 1)).masked_fill(alone, 0)
    lost = own + v * (own.sum(0) - own + share * ((u * own).sum(0) - u * own))
    return lost.unsqueeze(1).expand(rows.shape).reshape(sums.shape)
