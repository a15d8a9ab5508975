"""Embedding, gather, scatter and advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.backprop.rules.pointwise import is_zero
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSet, RowSlice, Zeros, look
from rowprop.host import waits


@rule("embedding_dense_backward")
def embedding_backward(op: Any, g: RowSlice, indices: Tensor, num: Any, padding_idx: Any, by_freq: bool) -> Any:
    """The table's gradient contracts over the rows."""
    if g.dim == g.ndim - 1:
        return Densify("the batch lies in the embedding's width")
    if by_freq:
        return Densify("scale_grad_by_freq counts the indices of all rows")
    return op(g.values, g.take(indices), num, padding_idx, False)


@rule("_embedding_bag_backward")
def embedding_bag_backward(
    op: Any, g: Any, indices: Tensor, offsets: Tensor, bag_of: Tensor, sizes: Tensor, maxima: Tensor, num: Any,
    by_freq: bool, mode: int, sparse: bool, weights: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    """The table's gradient contracts over the bags."""
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch lies in the embedding's width")
    if by_freq or sparse:
        return Densify("the indices of all rows are counted, or listed in a sparse gradient")
    look(offsets, "the number of indices in the kept bags")
    bags = g.shape[0]
    ends = torch.cat([offsets[1:], offsets.new_tensor([indices.numel()])])[:bags]
    starts = g.take(offsets[:bags], 0)
    lengths = g.take(ends, 0) - starts
    bag = torch.arange(starts.numel()).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    place = torch.arange(bag.numel()) - first[bag] + starts[bag]
    per_bag = [g.take(t, 0) if t.shape[:1] == (bags,) else t for t in (sizes, maxima)]
    indices, weights = indices[place], None if weights is None else weights[place]
    kept = indices, first.to(offsets.dtype), bag.to(offsets.dtype), *per_bag
    return op(g.values, *kept, num, False, mode, False, weights, *rest)


@rule("gather")
def gather_(op: Any, g: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Along a dimension that holds no rows."""
    if type(g) is not RowSlice or dim % g.ndim == g.dim or index.shape[g.dim] != g.shape[g.dim]:
        return Densify("the gather runs over the batch")
    return g.like(op(g.values, dim, g.take(index), sparse_grad=sparse_grad))


@rule("scatter_add", "scatter.src", fills_zeros=True)
def scatter(op: Any, out: Any, dim: int, index: Any, src: Any) -> Any:
    """Into zeros, along a dimension that holds no rows.

    A plain target of the full shape counts as zeros, too: autograd's formulas for max, sort and the like scatter into
    fresh zeros, and no other formula scatters a gradient into a plain tensor. (Python code and foreign nodes receive
    dense gradients.)
    """
    if type(src) is not RowSlice or type(out) is RowSlice:
        return Densify("the target of the scatter is sliced")
    dim %= src.ndim
    if dim == src.dim or index.shape != src.shape or out.shape[src.dim] != src.shape[src.dim]:
        return Densify("the scatter runs over the batch")
    zeros = src.values.new_zeros(src.kept_shape(out.shape))
    return src.like(op(zeros, dim, src.take(index), src.values))


@rule("scatter.value", "index_fill.int_Scalar")
def scatter_value(op: Any, g: Any, dim: int, index: Any, value: Any) -> Any:
    """Zeros written along a dimension that holds no rows."""
    if type(g) is not RowSlice or dim % g.ndim == g.dim or not is_zero(value):
        return Densify("a value that may not be zero, or along the batch, is written")
    if index.ndim < 2:  # index_fill: one index for all rows
        return g.like(op(g.values, dim, index, value))
    if index.shape[g.dim] != g.shape[g.dim]:
        return Densify("only some rows are written")
    return g.like(op(g.values, dim, g.take(index), value))


@rule("index_select")
def index_select(op: Any, g: Any, dim: int, index: Any) -> Any:
    """Along a dimension that holds no rows; along the batch, the entries of the index that read kept rows."""
    if type(g) is not RowSlice or type(index) is RowSlice:
        return Densify("the gradient itself is the index")
    if dim % g.ndim == g.dim:
        return _kept_of(g, index)
    return g.like(op(g.values, dim, index))


def _kept_of(g: RowSlice, index: Tensor) -> Any:
    """The gradient read at an index into the batch, as in a mixture of experts: zero unless a kept row is read.

    The number of kept rows that the index reads is known only after a look at the index.
    """
    look(index, "the number of kept rows that an index reads")
    layout, kept = g.layout, g.rows.kept
    index = torch.where(index < 0, index + layout.size, index)
    slot = index.new_full((layout.num_rows,), -1)
    slot[g.rows.index] = g.rows.first
    g = g.merged()
    found = slot[index // layout.inner % layout.num_rows]
    reached = (found >= 0).nonzero().squeeze(1)
    shape = [*g.shape[: g.dim], index.numel(), *g.shape[g.dim + 1 :]]
    if reached.numel() == 0:
        return Zeros(shape, g.values.dtype, g.values.device, g.rows)
    before = index // (layout.inner * layout.num_rows)
    place = ((before * kept + found) * layout.inner + index % layout.inner)[reached]
    rows = RowSet(reached, index.numel(), unique=True, batchnorm=g.rows.batchnorm)
    return RowSlice(g.values.index_select(g.dim, place), rows, Layout(g.dim, index.numel()), shape)


@rule("index_add", fills_zeros=True)
def index_add(op: Any, out: Any, dim: int, index: Any, g: Any, *, alpha: Any = 1) -> Any:
    """Into zeros. Along the batch nothing is computed: the same values belong to other rows."""
    if type(out) is not Zeros or type(g) is not RowSlice:
        return Densify("the target of the sum is not fresh zeros")
    dim %= g.ndim
    values = g.values if alpha == 1 else g.values * alpha
    if dim != g.dim:
        zeros = values.new_zeros(g.kept_shape(out.shape))
        return g.like(op(zeros, dim, index, values))
    return _moved_rows(g, values, g.take(index, 0), out.shape)


def _moved_rows(g: RowSlice, values: Tensor, index: Tensor, shape: Sequence[int]) -> Any:
    """The gradient of ``x[index]``: each kept row becomes a row of x, and rows of x may repeat."""
    total = shape[g.dim]
    index = torch.where(index < 0, index + total, index)
    if index.numel() < total:
        rows = RowSet(index, total, unique=False, batchnorm=g.rows.batchnorm)
        return RowSlice(values, rows, Layout(g.dim, total), shape)
    if waits(index):
        return values.new_zeros(shape).index_add_(g.dim, index, values)
    # For example, many tokens read the weights of a few experts. Only a look tells how many different rows they read.
    reached, slot = cast(Any, torch).unique(index, return_inverse=True)
    out = values.new_zeros([*shape[: g.dim], reached.numel(), *shape[g.dim + 1 :]]).index_add_(g.dim, slot, values)
    if reached.numel() == total:
        return out
    rows = RowSet(reached, total, unique=True, batchnorm=g.rows.batchnorm)
    return RowSlice(out, rows, Layout(g.dim, total), shape)


@rule("index.Tensor")
def index(op: Any, g: Any, indices: Sequence[Any]) -> Any:
    """Read at indices of dimensions that hold no rows."""
    if type(g) is RowSlice:
        indices = _places(indices, g.values.device)
    used = [d for d, i in enumerate(indices) if i is not None]
    if type(g) is not RowSlice or any(indices[d].dtype == torch.bool for d in used):
        return Densify("a mask or the gradient itself is the index")
    if used == [g.dim] and indices[g.dim].ndim == 1:
        return _kept_of(g, indices[g.dim])
    if g.dim in used:
        return Densify("rows are read by an index of their own")
    return g.like(op(g.values, indices), g.layout.at(_place(g.dim, used, indices)))


def _places(indices: Sequence[Any], device: torch.device) -> list[Any]:
    """The indices on the gradient's device; as in the op itself, the indices of a mask's entries replace the mask."""
    found: list[Any] = []
    for i in indices:
        if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and i.ndim > 0:
            found.extend(i.to(device).nonzero().unbind(1))
        else:
            found.append(i.to(device) if isinstance(i, Tensor) else i)
    return found


def _width(indices: Sequence[Any]) -> int:
    """The number of dimensions that the indices broadcast to."""
    return max(i.ndim for i in indices if i is not None)


def _place(dim: int, used: Sequence[int], indices: Sequence[Any]) -> int:
    """The new place of an unindexed dimension.

    The indexed dimensions become those of the indices: in the place of the first of them, or in front if they are not
    neighbours.
    """
    width = _width(indices)
    together = used[-1] - used[0] + 1 == len(used)
    before = sum(d < dim for d in used)
    return dim - before + (width if not together or used[0] < dim else 0)


@rule("index_put", fills_zeros=True)
def index_put(op: Any, out: Any, indices: Sequence[Any], g: Any, accumulate: bool = False) -> Any:
    """The gradient of ``x[indices]``, summed into zeros."""
    put = torch.ops.aten.index_put.default
    indices = _places(indices, out.device) if type(out) is Zeros else indices
    if (
        type(out) is not Zeros
        or type(g) is not RowSlice
        or any(i is not None and i.dtype == torch.bool for i in indices)
    ):
        return Densify("the target is not fresh zeros, or the index is a mask")
    used = [d for d, i in enumerate(indices) if i is not None]
    width = _width(indices)
    first = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    if first <= g.dim < first + width:
        return _put_indexed_rows(put, out, indices, used, g, g.dim - first - width, accumulate)
    dim = next(d for d in range(len(out.shape)) if d not in used and _place(d, used, indices) == g.dim)
    layout = g.layout.at(dim)
    zeros = g.values.new_zeros(g.kept_shape(out.shape, layout))
    return g.like(put(zeros, indices, g.values, accumulate), layout)


def _put_indexed_rows(
    put: Any, out: Zeros, indices: Sequence[Any], used: Sequence[int], g: RowSlice, place: int, accumulate: bool
) -> Any:
    """The gradient of rows taken by an index, as in ``x[arange(N), last]``: the index names the rows of x."""
    if len(used) == 1 and _width(indices) == 1 and accumulate:
        return _moved_rows(g, g.values, g.take(indices[used[0]], 0), out.shape)
    kept: list[Any] = [
        i if i is None or i.ndim < -place or i.shape[place] == 1 else g.take(i, i.ndim + place) for i in indices
    ]
    if used[0] != 0 or _width(indices) != 1 or g.dim != 0 or not g.layout.plain or not accumulate:
        return Densify("the index runs over the batch and more")
    if any(i.numel() != g.rows.kept for i in kept if i is not None):
        return Densify("the index runs over the batch and more")
    total = out.shape[0]
    rows, count = kept[0], g.rows.kept
    if count >= total:
        return Densify("the index reaches as many rows as there are")
    rows = torch.where(rows < 0, rows + total, rows)
    values = g.values.new_zeros([count, *out.shape[1:]])
    values = put(values, [torch.arange(count, device=rows.device), *kept[1:]], g.values, True)
    return RowSlice(values, RowSet(rows, total, unique=False, batchnorm=g.rows.batchnorm), Layout(0, total), out.shape)
