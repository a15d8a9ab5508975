"""Sums and means, and the running sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from rowprop.backprop import layout as lay
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice


@rule("sum", "sum.dim_IntList")
def sum_(
    op: Any, g: RowSlice, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Over the batch: the sum of the kept rows, a plain tensor. Over other dimensions: local."""
    reduced = {d % g.ndim for d in dims} if dims else set(range(g.ndim))
    out = torch.sum(g.values, sorted(reduced), keepdim, dtype=dtype)
    if g.dim in reduced:
        return out
    return g.like(out, g.layout if keepdim else lay.remove(g.layout, list(reduced)))


@rule("mean", "mean.dim")
def mean(
    op: Any, g: RowSlice, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The sum, divided by the number of all elements."""
    reduced = {d % g.ndim for d in dims} if dims else set(range(g.ndim))
    total = sum_(op, g, sorted(reduced), keepdim, dtype=dtype)
    count = prod(g.shape[d] for d in reduced)
    return g.like(total.values / count, total.layout) if type(total) is RowSlice else total / count


@rule("cumsum")
def cumsum(op: Any, g: RowSlice, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Running sums along a dimension that holds no rows."""
    if dim % g.ndim == g.dim:
        return Densify("the running sum goes over the batch")
    return g.like(op(g.values, dim, dtype=dtype))
