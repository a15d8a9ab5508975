"""Gather, scatter and advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows import layout as lay
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import check_readable
from rowprop.backprop.rows.rows import joined
from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rows.zeros import Zeros
from rowprop.backprop.rules.pointwise import is_zero, local
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.views import takes_tokens, view
from rowprop.host import readable, waits


@rule("gather", positions=True)
def gather_(op: Any, g: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Along a dimension that holds no rows; along the batch, an index of whole rows."""
    if type(g) is not RowSlice:
        return Densify("the gradient itself is the index")
    if g.layout.holds(dim % g.ndim):
        if g.layout.minor:
            return gather_(op, whole_rows(g), dim, index)
        whole = _varying(index, [g.dim], g.dim, g.shape)
        return Densify("the gather runs over the batch") if whole is None else _kept_of(g, whole.flatten())
    if not g.fits(index.shape):
        return Densify("the gather takes part of the batch")
    return g.like(op(g.values, dim, g.take(index), sparse_grad=sparse_grad))


@rule("scatter_add", "scatter.src", fills_zeros=True, positions=True)
def scatter(op: Any, out: Any, dim: int, index: Any, src: Any) -> Any:
    """Into zeros, along a dimension that holds no rows."""
    # A plain target counts as zeros: no formula of autograd scatters a gradient into another plain tensor. (Python code
    # and foreign nodes receive dense gradients.) A graph's zeros are known, and a custom function's backward is in it.
    if type(out) is Zeros and isinstance(src, Tensor):
        return op(out.dense(), dim, index, src)  # counts of the entries of an index, as for a mean
    if type(src) is not RowSlice or type(out) is RowSlice:
        return Densify("the target of the scatter is sliced")
    if isinstance(out, Tensor) and src.rows.recompute is not None:
        return Densify("the target of the scatter is not fresh zeros")
    if len(out.shape) != src.ndim:
        return Densify("a number is read at every row")
    dim %= src.ndim
    if src.layout.holds(dim) and index.shape == src.shape:
        whole = _varying(index, [part.dim for part in src.layout.parts], dim, out.shape)
        each = None if whole is None else src.take(whole).reshape(-1)  # the row that each kept row goes to
        if each is not None and not src.layout.minor:
            return _moved_rows(src, src.values, each, out.shape, dim)
        if each is not None and each.numel() == src.rows.kept:
            return src.moved(dim, out.shape[dim], each)
        if src.layout.minor:
            return scatter(op, out, dim, index, whole_rows(src))
    if src.layout.holds(dim) or index.shape != src.shape or not src.fits(out.shape):
        return Densify("the scatter runs over the batch")
    zeros = src.values.new_zeros(src.kept_shape(out.shape))
    return src.like(op(zeros, dim, src.take(index), src.values))


def _varying(index: Tensor, dims: Sequence[int], dim: int, shape: Sequence[int]) -> Tensor | None:
    """An index with one entry in each dimension but ``dims``, if it varies in these only.

    Strides of 0 show this, as of an expanded index; a repeated one is read. Outside of ``dim``, in which it names whole
    rows, it has to have this shape.
    """
    if 0 in index.shape or any(d != dim and index.shape[d] != size for d, size in enumerate(shape)):
        return None
    for d in set(range(index.ndim)).difference(dims):
        first = index.narrow(d, 0, 1)
        if index.shape[d] > 1 and index.stride(d) != 0:
            if not readable(index):
                return None
            check_readable(index, "whether an index names whole rows")
            if not (index == first).all():
                return None
        index = first
    return index


@rule("scatter.value", "index_fill.int_Scalar")
def scatter_value(op: Any, g: Any, dim: int, index: Any, value: Any) -> Any:
    """Zeros written along a dimension that holds no rows."""
    if type(g) is not RowSlice or not is_zero(value):
        return Densify("a value that may not be zero is written")
    dim %= g.ndim
    if op.__name__.startswith("index_fill"):  # one index for all rows
        zero, at = g.values.new_zeros(()), [None] * dim + [index.reshape(-1)]
        return _zeros_put(torch.ops.aten.index_put.default, g, at, zero, False)
    if dim == g.dim:
        return Densify("entries along the batch are written")
    if index.shape[g.dim] != g.shape[g.dim]:
        return Densify("only some rows are written")
    return g.like(op(g.values, dim, g.take(index), value))


@rule("select_scatter", "slice_scatter", "diagonal_scatter")
def write_part(op: Any, g: Any, part: Any, *args: Any) -> Any:
    """Zeros, or a gradient of the same rows, written over a view of dimensions that hold no rows."""
    name = op.__name__.partition("_")[0]
    dims = {"select": args[:1], "slice": args[:1] or (0,), "diagonal": args[1:] or (0, 1)}[name]
    if type(g) is not RowSlice or any(g.layout.holds(d % g.ndim) for d in dims):
        return Densify("whole rows are written")
    if type(part) is RowSlice:
        gone = [] if name == "slice" else [d % g.ndim for d in dims]
        if part.rows is not g.rows or part.layout != lay.remove(g.layout, gone):
            return Densify("operands hold their rows in different dimensions")
        return g.like(op(g.values, part.values, *args))
    if not _zeros_only(part):
        return Densify("values that may not be zero are written")
    values = g.values.clone()
    getattr(torch.ops.aten, name)(values, *args).zero_()
    return g.like(values)


@rule("index_select", positions=True)
def index_select(op: Any, g: Any, dim: int, index: Any) -> Any:
    """Along a dimension that holds no rows; along the batch, the entries of the index that read kept rows."""
    if type(g) is not RowSlice or type(index) is RowSlice:
        return Densify("the gradient itself is the index")
    if g.layout.holds(dim % g.ndim):
        return index_select(op, whole_rows(g), dim, index) if g.layout.minor else _kept_of(g, index)
    return g.like(op(g.values, dim, index))


def _kept_of(g: RowSlice, index: Tensor) -> Any:
    """The gradient read at an index into the batch, as in a mixture of experts: zero unless a kept row is read."""
    check_readable(index, "the number of kept rows that an index reads")
    g, place = _slots(g, index)
    reached = (place >= 0).nonzero().squeeze(1)
    return _read(g, g.values.index_select(g.dim, place[reached]), reached, g.dim, index.numel())


@rule("index_add", fills_zeros=True, positions=True)
def index_add(op: Any, out: Any, dim: int, index: Any, g: Any, *, alpha: Any = 1) -> Any:
    """Into zeros. Along the batch nothing is computed: the same values belong to other rows."""
    if type(out) is Zeros and isinstance(g, Tensor):
        return op(out.dense(), dim, index, g, alpha=alpha)
    if type(out) is Zeros and type(g) is Zeros:
        return out
    if type(out) is not Zeros or type(g) is not RowSlice:
        return Densify("the target of the sum is not fresh zeros")
    dim %= g.ndim
    values = g.values if alpha == 1 else g.values * alpha
    if not g.layout.holds(dim):
        zeros = values.new_zeros(g.kept_shape(out.shape))
        return g.like(op(zeros, dim, index, values))
    if g.layout.minor:
        return g.like(values).moved(dim, out.shape[dim], index[g.entries(dim)])
    return _moved_rows(g, values, g.take(index, 0), out.shape, dim)


def _numbers_of(index: Tensor, size: int) -> Tensor:
    """An index without negative entries."""
    return torch.where(index < 0, index + size, index)


def _moved_rows(g: RowSlice, values: Tensor, index: Tensor, shape: Sequence[int], dim: int) -> Any:
    """The gradient of ``x[index]``: each kept row becomes a row of x, and rows of x may repeat."""
    return rows_at(g, values, _numbers_of(index, shape[dim]), shape, dim, unique=False)


def rows_at(g: RowSlice, values: Tensor, index: Tensor, shape: Sequence[int], dim: int, *, unique: bool) -> Any:
    """``values`` as the rows ``index`` of a gradient; a plain tensor if they are as many as there are rows."""
    if index.numel() == 0 < shape[dim]:  # one row of zeros, so that no kernel is given an empty batch
        values, index = values.new_zeros([1 if d == dim else n for d, n in enumerate(shape)]), index.new_zeros(1)
    rows = g.rows.derived(index.long(), shape[dim], unique=unique)
    out = RowSlice(values, rows, Layout(dim, shape[dim]), shape).distinct()
    return out if out.rows.kept < shape[dim] else out.dense()


@rule("index.Tensor", positions=True)
def index(op: Any, g: Any, indices: Sequence[Any]) -> Any:
    """Read at an index: local in dimensions without rows; along the batch, the entries that read kept rows."""
    if type(g) is not RowSlice:
        return Densify("the gradient itself is the index")
    indices = _places(indices, g.values.device)
    used = [d for d, i in enumerate(indices) if i is not None]
    if not any(g.layout.holds(d) for d in used):
        return g.like(op(g.values, indices), g.layout.moved(lambda d: _place(d, used, indices)))
    if g.layout.minor:
        return index(op, whole_rows(g), indices)
    if used == [g.dim] and indices[g.dim].ndim == 1:
        return _kept_of(g, indices[g.dim])
    return _kept_at(op, g, indices, used)


def _kept_at(op: Any, g: RowSlice, indices: Sequence[Any], used: Sequence[int]) -> Any:
    """The gradient read at an index into the batch and other dimensions, as at the True entries of a mask."""
    check_readable(indices[g.dim], "the number of kept rows that an index reads")
    entries: Sequence[Tensor] = cast(Any, torch).broadcast_tensors(*(indices[d] for d in used))
    flat = {d: entry.reshape(-1) for d, entry in zip(used, entries, strict=True)}
    first = _first(used)
    g, place = _slots(g, flat[g.dim])
    reached = (place >= 0).nonzero().squeeze(1)
    flat[g.dim] = place
    values = op(g.values, [None if i is None else flat[d][reached] for d, i in enumerate(indices)])
    read = _read(g, values, reached, first, place.numel())
    if len(entries[0].shape) == 1:
        return read
    shape = [*values.shape[:first], *entries[0].shape, *values.shape[first + 1 :]]
    return view(op, read, shape) if type(read) is RowSlice else read.view(shape)


def _read(g: RowSlice, values: Tensor, reached: Tensor, dim: int, total: int) -> Any:
    """``values`` as the rows ``reached`` of ``total``; one row of zeros if none is reached."""
    if reached.numel() == 0:
        shape = [1 if d == dim else size for d, size in enumerate(values.shape)]
        reached, values = reached.new_zeros(1), values.new_zeros(shape)
    shape = [total if d == dim else size for d, size in enumerate(values.shape)]
    if total == 0:
        return values.new_zeros(shape)
    return RowSlice(values, g.rows.derived(reached, total, unique=True), Layout(dim, total), shape)


def _slots(g: RowSlice, index: Tensor) -> tuple[RowSlice, Tensor]:
    """For each entry of an index into the batch its place among the kept values of the returned gradient, or -1."""
    layout = g.layout
    index = _numbers_of(index, layout.size)
    slot = index.new_full((layout.num_rows,), -1)
    slot[g.rows.index] = g.rows.first
    found = slot[index // layout.inner % layout.num_rows]
    before = index // (layout.inner * layout.num_rows)
    place = (before * g.rows.kept + found) * layout.inner + index % layout.inner
    return g.merged(), torch.where(found < 0, found, place)


def _places(indices: Sequence[Any], device: torch.device, count: int | None = None) -> list[Any]:
    """The indices on the device; a mask is replaced by those of its entries, which are ``count`` if this is known."""
    found: list[Any] = []
    for i in indices:
        if not isinstance(i, Tensor) or i.dtype not in (torch.bool, torch.uint8) or i.ndim == 0:
            found.append(i.to(device) if isinstance(i, Tensor) else i)
        elif count is not None and waits(device):
            place = _true_places(i.to(device), torch.arange(count, device=device))
            found.extend(place // prod(i.shape[d + 1 :]) % size for d, size in enumerate(i.shape))
        else:
            check_readable(i, "the number of a mask's entries")
            found.extend(i.to(device).nonzero().unbind(1))
    return found


def _true_places(mask: Tensor, which: Tensor) -> Tensor:
    """Where in a flat mask its True entry number ``which`` is: no wait for the number of all of them."""
    return torch.searchsorted(mask.reshape(-1).cumsum(0), which + 1)


def _width(indices: Sequence[Any]) -> int:
    """The number of dimensions that the indices broadcast to."""
    return max(i.ndim for i in indices if i is not None)


def _first(used: Sequence[int]) -> int:
    """The place of the first dimension of the indices in the result: in front if they are not neighbours."""
    return used[0] if used[-1] - used[0] + 1 == len(used) else 0


def _place(dim: int, used: Sequence[int], indices: Sequence[Any]) -> int:
    """The new place of an unindexed dimension; the indexed dimensions become those of the indices."""
    before = dim - sum(d < dim for d in used)
    return before + (_width(indices) if _first(used) <= before else 0)


@rule("index_put", fills_zeros=True, positions=True)
def index_put(op: Any, out: Any, indices: Sequence[Any], g: Any, accumulate: bool = False) -> Any:
    """The gradient of ``x[indices]``, summed into zeros; or zeros, where the forward wrote over the entries."""
    if type(out) is RowSlice:
        return _zeros_put(op, whole_rows(out), indices, g, accumulate)
    if type(out) is Zeros and type(g) is Zeros:
        return out
    if type(out) is not Zeros or type(g) is not RowSlice:
        return Densify("the target is not fresh zeros")
    given = [d for d, i in enumerate(indices) if i is not None]
    indices = _places(indices, out.device, g.shape[given[0]] if len(given) == 1 else None)
    used = [d for d, i in enumerate(indices) if i is not None]
    first, width = _first(used), _width(indices)
    inside = [part for part in g.layout.parts if first <= part.dim < first + width]
    if g.layout.minor and len(inside) == len(used) == width == 1 and accumulate:
        moved = _numbers_of(indices[used[0]], out.shape[used[0]])[g.entries(first)]
        return g.moved(first, out.shape[used[0]], moved)
    if g.layout.minor and inside:
        all_inside = len(inside) == len(g.layout.parts) and used[-1] - used[0] + 1 == len(used)
        put = _put_entries(op, out, indices, used, g) if all_inside and accumulate else None
        return index_put(op, out, indices, whole_rows(g), accumulate) if put is None or type(put) is Densify else put
    if inside:
        return _put_indexed_rows(op, out, indices, used, g, accumulate)
    origins = {_place(d, used, indices): d for d in range(len(out.shape)) if d not in used}
    layout = g.layout.moved(lambda d: origins.get(d, d))
    zeros = g.values.new_zeros(g.kept_shape(out.shape, layout))
    return g.like(op(zeros, indices, g.values, accumulate), layout)


def _zeros_put(op: Any, g: RowSlice, indices: Sequence[Any], value: Any, accumulate: bool) -> Any:
    """Zeros at an index, whatever rows it names."""
    if accumulate or not _zeros_only(value):
        return Densify("a value that may not be zero is written")
    used = [d for d, i in enumerate(indices) if i is not None]
    mask = indices[used[0]].to(g.values.device)
    if len(used) == 1 and mask.dtype == torch.bool:
        return local(torch.ops.aten.masked_fill.Scalar, g, mask[(..., *[None] * (g.ndim - used[0] - mask.ndim))], 0)
    indices = _places(indices, g.values.device)
    if g.dim >= len(indices) or indices[g.dim] is None:
        return g.like(op(g.values, indices, value.new_zeros(()), False))
    g, indices[g.dim] = _slots(g, indices[g.dim])
    spare = torch.cat([g.values, g.values.narrow(g.dim, 0, 1)], g.dim)  # entries of other rows, at -1, write there
    put = op(spare, indices, value.new_zeros(()), False)
    return g.like(put.narrow(g.dim, 0, g.values.shape[g.dim]))


def _zeros_only(value: Any) -> bool:
    """Whether what a formula writes over a gradient is zeros, as in all of derivatives.yaml; it is read if cheap."""
    return isinstance(value, Tensor) and (waits(value) or not value.any())


def _put_indexed_rows(op: Any, out: Zeros, indices: list[Any], used: list[int], g: RowSlice, accumulate: bool) -> Any:
    """The gradient of rows taken by an index, as in ``x[arange(N), last]``: the index names the rows of x."""
    if not accumulate:
        return Densify("entries that an index names twice are overwritten")
    first, width = _first(used), _width(indices)
    if len(used) == 1 and width == 1:
        return _moved_rows(g, g.values, g.take(indices[used[0]], 0), out.shape, g.dim)
    place, count = g.dim - first - width, g.rows.kept
    kept: list[Any] = [
        i if i is None or i.ndim < -place or i.shape[place] == 1 else g.take(i, i.ndim + place) for i in indices
    ]
    # One index may name a row of x for each row of the gradient: that of the dimension with as many rows, if any has.
    origin = g.rows.origin or g.rows
    dim = next((d for d in used if out.shape[d] == origin.num_rows), used[0])
    rows, total = kept[dim], out.shape[dim]
    if g.layout.plain and kept[dim] is not indices[dim] and rows.numel() == count < total:
        picked = g.rows.origin is None and g.rows.num_rows == total  # not tokens on their way to experts
        if picked and used == [dim, dim + 1] and width == 1 and len(out.shape) > dim + 2 and takes_tokens(g):
            # A token of each row, as the last ones of sequences that are padded: these become the rows.
            rows, tokens = _numbers_of(rows, total), _numbers_of(kept[dim + 1], out.shape[dim + 1])
            whole, shape = g.rows.derived(rows, total, unique=False), list(g.shape)
            shape[dim : dim + 1] = [total, 1]
            one = RowSlice(g.values.unsqueeze(dim + 1), whole, Layout(dim, total), shape)
            return one.spread(dim + 1).moved(dim + 1, out.shape[dim + 1], tokens.expand(count))
        each = g.rows.derived(_numbers_of(rows, total).reshape(-1), total, unique=False)
        rows, places = each.distinct()
        kept[dim] = (torch.arange(count, device=rows.index.device) if places is None else places).view(kept[dim].shape)
        shape = [rows.kept if d == dim else size for d, size in enumerate(out.shape)]
        values = op(g.values.new_zeros(shape), kept, g.values, True)
        return rows_at(g, values, rows.index, out.shape, dim, unique=rows.unique)
    if used[-1] - used[0] + 1 != len(used):
        return Densify("the index runs over the batch and more")
    return _put_entries(op, out, indices, used, g)


def _put_entries(op: Any, out: Zeros, indices: Sequence[Any], used: Sequence[int], g: RowSlice) -> Any:
    """The gradient of single entries of several dimensions, as of the True entries of a mask over batch and time."""
    first, last, width = used[0], used[-1], _width(indices)
    sizes = [out.shape[d] for d in used]
    entry = joined([_numbers_of(indices[d], size) for d, size in zip(used, sizes, strict=True)], sizes)
    flat = view(op, g, [*g.shape[:first], prod(g.shape[first : first + width]), *g.shape[first + width :]])
    if type(flat) is not RowSlice or flat.dim != first:
        return Densify("the index runs over the batch and more")
    entry = entry.expand(g.shape[first : first + width]).reshape(-1)
    shape = [*out.shape[:first], prod(out.shape[first : last + 1]), *out.shape[last + 1 :]]
    moved = _moved_rows(flat, flat.values, flat.take(entry, 0), shape, first)
    return view(op, moved, out.shape) if type(moved) is RowSlice else moved.view(out.shape)


@rule("masked_scatter_backward")
def masked_scatter_backward(op: Any, g: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """The gradient of the entries that were written in the mask's order; the written entries become the rows."""
    if type(g) is not RowSlice:
        return Densify("the gradient itself is the mask")
    mask = mask.expand(g.shape)
    # A mask that does not vary in the last dimensions, as one of tokens, was written in pieces.
    whole = next((d + 1 for d in range(g.ndim - 1, -1, -1) if mask.stride(d) or mask.shape[d] == 1), 0)
    piece = prod(g.shape[whole:])
    if g.dim >= whole or prod(sizes) % piece or piece == 0 or 0 in sizes:
        whole, piece = g.ndim, 1
    check_readable(mask, "the number of entries that were written to the kept rows")
    mask = mask[(..., *[0] * (g.ndim - whole))]
    order = mask.reshape(-1).cumsum(0).view(mask.shape) - 1
    kept = g.take(mask).nonzero(as_tuple=True)  # an index by the mask itself would be counted twice
    values, place = g.values[kept], g.take(order)[kept]
    shape = [prod(sizes) // piece, piece][: 1 + (piece > 1)]
    moved = rows_at(g, values.reshape(-1, *shape[1:]), place, shape, 0, unique=g.rows.unique)
    return view(op, moved, sizes) if type(moved) is RowSlice else moved.view(sizes)


@rule("masked_scatter")
def masked_scatter(op: Any, out: Any, mask: Any, g: Any) -> Any:
    """The gradient of ``masked_select``, written into zeros; the mask has as many entries as the gradient."""
    if type(g) is not RowSlice or not isinstance(out, Tensor) or not _zeros_only(out) or not isinstance(mask, Tensor):
        return Densify("the target of the entries is sliced")
    place = _true_places(mask.expand(out.shape), g.take(torch.arange(prod(g.shape), device=mask.device).view(g.shape)))
    moved = rows_at(g, g.values.reshape(-1), place.reshape(-1), [out.numel()], 0, unique=g.rows.unique)
    return view(op, moved, out.shape) if type(moved) is RowSlice else moved.view(out.shape)


@rule("put")
def put(op: Any, out: Any, index: Any, g: Any, accumulate: bool = False) -> Any:
    """The gradient of ``take``, summed into zeros; the index counts through all dimensions."""
    if type(g) is not RowSlice or not isinstance(out, Tensor) or not accumulate or not _zeros_only(out):
        return Densify("the target of the entries is sliced, or entries are overwritten")
    moved = _moved_rows(g, g.values.reshape(-1), g.take(index).reshape(-1), [out.numel()], 0)
    return view(op, moved, out.shape) if type(moved) is RowSlice else moved.view(out.shape)
