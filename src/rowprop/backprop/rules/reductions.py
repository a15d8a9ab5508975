"""Sums and means, and ops along dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from rowprop.backprop.rows import layout as lay
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.slice import RowSlice, whole_rows
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call, rowlocal


@rule("sum", "sum.dim_IntList", positions=True)
def sum_(
    op: Any, g: RowSlice, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Over the batch: the sum of the kept rows, a plain tensor. Over other dimensions: local."""
    reduced = {d % g.ndim for d in dims} if dims else set(range(g.ndim))
    if g.layout.minor:
        parts = g.layout.parts
        left = tuple(place for place, part in enumerate(parts) if part.dim not in reduced)
        if 0 < len(left) < len(parts):
            # Of tokens that went through several experts each, all may seem to be kept. A sum over the batch is small.
            several = left == (0,) and g.rows.kept >= parts[0].size
            if not several and any(part.outer != 1 or part.inner != 1 for part in (parts[0], parts[left[0]])):
                return sum_(op, whole_rows(g), dims, keepdim, dtype=dtype)  # a part is merged with another dimension
            g = g.coarsened(0) if several else _some_parts(g, left)
            total = sum_(op, g, sorted(reduced), keepdim, dtype=dtype)
            return total.dense() if g.rows.kept >= g.rows.num_rows else total
    out = torch.sum(g.values, sorted(reduced), keepdim, dtype=dtype)
    if g.dim in reduced:
        return out
    return g.like(out, g.layout if keepdim else lay.remove(g.layout, list(reduced)))


@rule("any", "_is_any_true", positions=True)
def any_(op: Any, g: RowSlice) -> Any:
    """Whether any entry is nonzero, as the search for NaN under ``detect_anomaly`` asks."""
    return op((g if g.values.dtype == torch.bool else g.merged()).values)


def _some_parts(g: RowSlice, left: tuple[int, ...]) -> RowSlice:
    """The same values as rows of some parts of their index; the other parts' dimensions have one entry."""
    parts = g.layout.parts
    first = parts[left[0]]
    minor = tuple(parts[place] for place in left[1:])
    rows = g.rows.some_parts(g.layout.sizes, left)
    values = g.values.transpose(parts[0].dim, first.dim)
    layout = Layout(first.dim, rows.num_rows, 1, 1, minor)
    shape = [g.shape[d] if layout.holds(d) else n for d, n in enumerate(values.shape)]
    return RowSlice(values, rows, layout, shape).distinct()


@rule("mean", "mean.dim", positions=True)
def mean(op: Any, g: RowSlice, dims: Sequence[int] | None = None, *keepdim: bool, **options: Any) -> Any:
    """The sum, divided by the number of all elements."""
    total = sum_(op, g, dims, *keepdim, **options)
    count = prod(g.shape[d] for d in dims or range(g.ndim))
    return total.like(total.values / count) if type(total) is RowSlice else total / count


@rowlocal("cumsum", "glu_backward", why="the op runs over the batch", positions=True)
def along(call: Call, ndim: int) -> Iterable[int]:
    """Running sums, and gated halves, of a dimension that holds no rows."""
    return (call.dim,)


@rowlocal("_fft_c2c", "_fft_r2c", "_fft_c2r", "rot90", why="the op runs over the batch")
def transform(call: Call, ndim: int) -> Iterable[int]:
    """Fourier transforms over dimensions that hold no rows, and quarter turns in them."""
    return call.first("dim", "dims")
