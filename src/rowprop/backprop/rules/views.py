"""Views, reorderings and joins: the rows move with their dimension."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from rowprop.backprop.backward import node_name
from rowprop.backprop.rows import layout as lay
from rowprop.backprop.rows.layout import Layout, Part
from rowprop.backprop.rows.refusals import AT_ONCE
from rowprop.backprop.rows.rows import Affine, Lender
from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rows.zeros import Lent, Zeros, filled
from rowprop.backprop.rules.apply import end_to_end, unite
from rowprop.backprop.rules.pointwise import is_contiguous
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call, rowlocal
from rowprop.host import waits


@rule("view", "_unsafe_view", "_reshape_alias", positions=True)
def view(op: Any, g: RowSlice, shape: Sequence[int], *strides: Any) -> Any:
    """Any regrouping that leaves the rows whole in one dimension."""
    new_shape = lay.infer_shape(prod(g.shape), shape)
    layout = lay.view(g.shape, g.layout, new_shape)
    if layout is None or (layout.minor and g.rows.recompute is not None):  # a compiled region has rows of one dimension
        return Densify("the view cuts through the rows")
    return RowSlice(g.values.reshape(g.kept_shape(new_shape, layout)), g.rows, layout, new_shape)


@rule("t", "transpose.int", positions=True)
def transpose(op: Any, g: RowSlice, first: int = 0, second: int = 1) -> RowSlice:
    """Swap two dimensions."""
    if g.ndim < 2:
        return g
    first, second = first % g.ndim, second % g.ndim
    return g.like(g.values.transpose(first, second), lay.transpose(g.layout, first, second))


@rule("permute", positions=True)
def permute(op: Any, g: RowSlice, dims: Sequence[int]) -> RowSlice:
    """Reorder dimensions."""
    return g.like(g.values.permute(*dims), lay.permute(g.layout, dims))


@rule("unsqueeze", positions=True)
def unsqueeze(op: Any, g: RowSlice, dim: int) -> RowSlice:
    """Insert a dimension of size 1."""
    dim %= g.ndim + 1
    return g.like(g.values.unsqueeze(dim), lay.insert(g.layout, dim))


@rule("squeeze", "squeeze.dim", "squeeze.dims", positions=True)
def squeeze(op: Any, g: RowSlice, dims: int | Sequence[int] | None = None) -> Any:
    """Drop dimensions of size 1; a dimension with one kept row of several rows is not dropped."""
    wanted = range(g.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % g.ndim for d in wanted if g.shape[d] == 1}
    if any(g.layout.holds(d) for d in gone):
        return Densify("a batch of one row loses its dimension")
    layout = lay.remove(g.layout, list(gone))
    shape = [size for d, size in enumerate(g.shape) if d not in gone]
    return RowSlice(g.values.reshape(g.kept_shape(shape, layout)), g.rows, layout, shape)


@rule("expand", positions=True)
def expand(op: Any, g: RowSlice, size: Sequence[int], *, implicit: bool = False) -> Any:
    """Repeat along dimensions of size 1 that hold no rows."""
    layout = g.layout.at(g.dim + len(size) - g.ndim)
    sizes, added = list(size), len(size) - g.ndim
    for part in layout.parts:
        if size[part.dim] not in (-1, g.shape[part.dim - added]):
            return Densify("a batch of one row is repeated")
        sizes[part.dim] = g.values.shape[part.dim - added]
    return g.like(g.values.expand(sizes), layout)


@rule("alias", positions=True)
def alias(op: Any, g: RowSlice) -> RowSlice:
    """The same gradient under another name."""
    return g.like(op(g.values))


@rule("_conj", positions=True)
def conj(op: Any, g: RowSlice) -> RowSlice:
    """The conjugate, computed at once: the values carry no lazy flag that the full tensor lacks."""
    return g.like(op(g.values).resolve_conj())


@rule("view_as_real", "view_as_complex", positions=True)
def complex_view(op: Any, g: RowSlice) -> Any:
    """Adds or removes a last dimension of size 2."""
    if g.layout.holds(g.ndim - 1) and op is torch.ops.aten.view_as_complex.default:
        return Densify("the rows lie in the dimension that turns complex")
    return g.like(op(g.values.contiguous()))


@rule("as_strided", fills_zeros=True, positions=True)
def as_strided(op: Any, g: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """A view given by strides: a reshape, or the same part of each row, as in a view that is written to in place.

    Dimensions in front of the rows, as the time of a buffer, may lose any part. Of a range of rows a copy is viewed.
    """
    if type(g) is RowSlice and g.order is not None:
        g = permute(op, g, g.order)  # as it lies in memory
    if not offset and prod(size) == prod(g.shape) and is_contiguous(size, stride):
        return g.view(size) if type(g) is Zeros else view(op, g, size)
    part = _part(g, size, stride, offset or 0)
    if part is not None:
        return part
    g, rows, num_rows, shape = filled(g), g.rows, g.rows.num_rows, [*size]
    if type(g) is Zeros and prod(g.shape) % num_rows == 0:
        g = g.split()
    before = _in_front(g)
    per_row = prod(g.shape) // (before * num_rows)
    if type(g) is not RowSlice or lay.view(g.shape, g.layout, (before, num_rows, per_row)) != Layout(1, num_rows):
        return Densify("the rows are merged with another part of the gradient")
    # How far each leads in front of the rows, by rows, and within one; a size that is a symbol has no divmod.
    leads = [offset or 0, *(by if n > 1 else 0 for n, by in zip(size, stride, strict=True))]
    begin, *steps = ((at // per_row // num_rows, at // per_row % num_rows, at % per_row) for at in leads)
    ends = [at + sum((n - 1) * by[i] for n, by in zip(size, steps, strict=True)) for i, at in enumerate(begin)]
    outside = 0 in size or any(end >= n for end, n in zip(ends, (before, num_rows, per_row), strict=True))
    along, parts = [d for d, by in enumerate(steps) if by[1]], _row_parts(size, stride, num_rows, per_row)
    # Some rows at some times, as of packed sequences, are many small steps, which take longer sliced than whole.
    other = parts is None and (len(along) > 1 or (along and ends[0] - begin[0] < before - 1))
    if outside or other or any(steps[d][0] or steps[d][2] for d in along):
        return Densify("the strides do not lead from row to row, or not to every row, nor to one range at all times")
    if not along and 1 in size:
        steps[size.index(1)], along = (0, 1, 0), [size.index(1)]
    elif not along:
        shape, steps, along = [1, *size], [(0, 1, 0), *steps], [0]
    layout, values = lay.layout_of(parts or [Part(along[0], shape[along[0]])]), g.values.contiguous()
    by, span = Affine(1, -begin[1], steps[layout.dim][1]), rows.kept * per_row
    steps = [per_row if d == layout.dim else span * by[0] + by[2] for d, by in enumerate(steps)]
    first = values.storage_offset() + span * begin[0] + begin[2]
    values = values.as_strided(layout.kept_shape(shape, rows.kept), steps, first)
    lender = Lender(rows, Layout(0, num_rows, before, per_row), selected=len(shape) > len(size))
    return RowSlice(values, rows, layout, size) if parts else Lent(values, layout, size, by, lender)


def _in_front(g: Any) -> int:
    """The size of what lies in front of all rows, as time does; zeros have nothing there."""
    return prod(g.shape[: g.dim]) * g.layout.outer or 1 if type(g) is RowSlice else 1


def _part(g: Any, size: Sequence[int], stride: Sequence[int], offset: int) -> RowSlice | None:
    """A view by strides that takes a part of some dimensions, none of which holds rows; None for another view."""
    if type(g) is not RowSlice or len(size) != g.ndim or not is_contiguous(g.shape, stride):
        return None
    values = g.values
    for dim, (whole, step) in enumerate(zip(g.shape, stride, strict=True)):
        begin, offset = divmod(offset, step) if whole > 1 else (0, offset)
        if begin + size[dim] > whole or (size[dim] < whole and g.layout.holds(dim)):
            return None
        if size[dim] < whole:
            values = values.narrow(dim, begin, size[dim])
    return g.like(values) if offset == 0 else None


def _row_parts(size: Sequence[int], stride: Sequence[int], num_rows: int, per_row: int) -> list[Part] | None:
    """The dimensions in which these strides lead from row to row, from the slowest to the fastest."""
    parts: list[Part] = []
    step = per_row
    while step < num_rows * per_row:
        found = [d for d, n in enumerate(size) if n > 1 and stride[d] == step]
        if len(found) != 1:
            return None
        parts.insert(0, Part(found[0], size[found[0]]))
        step *= size[found[0]]
    return parts if parts and step == num_rows * per_row else None


@rule("slice.Tensor", positions=True, fills_zeros=True)
def slice_(op: Any, g: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """Part of a dimension: where it holds rows, rows outside of the slice go on as zeros."""
    g = filled(g)
    if type(g) is Zeros:  # the gradient of a real Fourier transform is copied into half of them
        part = op(torch.empty(g.shape, device="meta"), dim, start, end, step)
        return as_strided(op, g, part.shape, part.stride(), part.storage_offset())
    dim, g = dim % g.ndim, _unplaced(g)
    if not g.layout.holds(dim):
        return g.like(op(g.values, dim, start, end, step))
    first, count = _taken(g.shape[dim], start, end, step)
    return g if count == g.shape[dim] else g.renumbered(dim, count, Affine(1, -first, step))


@rule("select.int", positions=True)
def select(op: Any, g: RowSlice, dim: int, index: int) -> Any:
    """One index of a dimension; where it holds one part of the rows' index, the rows have one part less."""
    dim, g = dim % g.ndim, _unplaced(g)
    if not g.layout.holds(dim):
        return g.like(op(g.values, dim, index), lay.remove(g.layout, [dim]))
    if not g.layout.minor:
        return Densify(f"one element of the batch dimension is selected; {AT_ONCE}")
    one = g.renumbered(dim, 1, Affine(offset=-(index % g.shape[dim])))
    return op(one, dim, 0) if isinstance(one, Tensor) else select(op, one, dim, 0)


@rule("unbind.int", positions=True)
def unbind(op: Any, g: RowSlice, dim: int = 0) -> Any:
    """All indices of a dimension."""
    dim, g = dim % g.ndim, _unplaced(g)
    if g.layout.holds(dim):
        if not g.layout.minor:
            return Densify(f"the batch dimension is taken apart; {AT_ONCE}")
        if _many_pieces(g, g.shape[dim]):
            return list(g.dense().unbind(dim))
        return [select(torch.ops.aten.select.int, g, dim, index) for index in range(g.shape[dim])]
    layout = lay.remove(g.layout, [dim])
    return [g.like(v, layout) for v in op(g.values, dim)]


def _many_pieces(g: RowSlice, count: int) -> bool:
    """Whether each of ``count`` pieces would hold as many rows as are kept, for want of a look at the device."""
    return waits(g.values) and g.rows.kept * count >= g.rows.num_rows


@rule("split.Tensor", "split_with_sizes", positions=True)
def split(op: Any, g: RowSlice, sizes: Any, dim: int = 0) -> Any:
    """Pieces of a dimension: where it holds rows, rows outside of a piece go on as zeros."""
    dim, g = dim % g.ndim, _unplaced(g)
    if not g.layout.holds(dim):
        return [g.like(v) for v in op(g.values, sizes, dim)]
    ends = [piece.shape[0] for piece in op(g.values.new_empty(()).expand(g.shape[dim]), sizes)]
    if _many_pieces(g, len(ends)):
        return list(op(g.dense(), sizes, dim))
    ends = list(itertools.accumulate(ends, initial=0))
    return [slice_(torch.ops.aten.slice.Tensor, g, dim, *ends[i : i + 2]) for i in range(len(ends) - 1)]


@rule("slice_backward", positions=True)
def slice_backward(op: Any, g: RowSlice, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """Zeros around a slice of any dimension: rows that were sliced get their old numbers back."""
    dim %= g.ndim
    if g.shape[dim] == 1 and _is_token(g, dim):
        g = g.spread(dim)
    if not g.layout.holds(dim):
        return g.like(op(g.values, g.kept_shape(sizes), dim, start, end, step))
    first, count = _taken(sizes[dim], start, end, step)
    return g if count == sizes[dim] else g.renumbered(dim, sizes[dim], Affine(step, first))


def _taken(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """The first entry of a slice, and how many it takes; ``range`` would fix a size that is a symbol."""
    ends = start or 0, size if end is None else end
    first, last = (min(max(at + size if at < 0 else at, 0), size) for at in ends)
    return first, max(0, (last - first + step - 1) // step)


@rule("select_backward", positions=True)
def select_backward(op: Any, g: RowSlice, sizes: Sequence[int], dim: int, index: int) -> Any:
    """Zeros around one index of a dimension that holds no rows (the selected dimension is not in ``g``)."""
    dim %= len(sizes)
    if g.rows.lender is not None and g.rows.lender.selected and sizes[dim] == g.rows.lender.rows.num_rows:
        rows = g.rows.derived(torch.full((1,), index % sizes[dim], device=g.values.device), sizes[dim], unique=True)
        return RowSlice(g.dense().unsqueeze(dim), rows, Layout(dim, sizes[dim]), sizes)
    one = unsqueeze(op, g, dim)
    if _is_token(one, dim):
        return one.spread(dim).renumbered(dim, sizes[dim], Affine(offset=index % sizes[dim]))
    return g.like(op(g.values, g.kept_shape(sizes, one.layout), dim, index), one.layout)


def _unplaced(g: RowSlice) -> RowSlice:
    """Whole rows again, where they are known, for an op that takes their tokens apart."""
    return whole_rows(g) if g.rows.lies_in_whole(g.layout) else g


def takes_tokens(g: RowSlice) -> bool:
    """Whether a token that was selected of each row may become the row."""
    # Under attention="cut" the kept rows stay whole, for all their tokens were kept. Compiled rows have one dimension.
    return g.layout.plain and g.rows.attention == "exact" and g.rows.recompute is None


def _is_token(g: RowSlice, dim: int) -> bool:
    """Whether a selected entry, as a class token, becomes the row: it follows the rows, and something follows it."""
    return takes_tokens(g) and g.dim + 1 == dim < g.ndim - 1


@rule("diagonal_backward", "diag_embed")
def around_diagonal(op: Any, g: RowSlice, *args: Any, **kwargs: Any) -> Any:
    """Zeros around the last dimension, which holds no rows and becomes a diagonal."""
    call, layout = Call(op, (g, *args), kwargs), g.layout
    if g.dim == g.ndim - 1:
        return Densify("the diagonal runs through the batch")
    for dim in sorted(d % (g.ndim + 1) for d in (call.dim1, call.dim2)):
        layout = lay.insert(layout, dim)
    full = call.first("input_sizes")
    sizes: dict[str, Any] = {} if full is None else {"input_sizes": g.kept_shape(full, layout)}
    return g.like(call.run(g.values, **sizes), layout)


@rule("diagonal")
def diagonal(op: Any, g: RowSlice, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """A diagonal of two dimensions that hold no rows; it becomes the last one."""
    dims = [dim1 % g.ndim, dim2 % g.ndim]
    if g.dim in dims:
        return Densify("the diagonal runs through the batch")
    return g.like(op(g.values, offset, dim1, dim2), lay.remove(g.layout, dims))


@rowlocal("unfold", why="the windows run over the batch", positions=True)
def unfold(call: Call, ndim: int) -> Iterable[int]:
    """Windows over a dimension that holds no rows; the window is added as the last dimension."""
    return (call.dimension,)


@rowlocal("unfold_backward", why="the windows run over the batch")
def unfold_backward(call: Call, ndim: int) -> Iterable[int]:
    """Windows over a dimension that holds no rows (the gradient has the window as an added last dimension)."""
    return call.dim % (ndim - 1 or 1), ndim - 1  # a number has one window over no dimension


@rule("flip", positions=True)
def flip(op: Any, g: RowSlice, dims: Sequence[int]) -> Any:
    """Reversed dimensions; reversed rows get other numbers."""
    out, rest = _renumbered(g, {d % g.ndim: (g.shape[d], Affine(-1, g.shape[d] - 1)) for d in dims})
    return out if not rest else op(out, rest) if isinstance(out, Tensor) else out.like(op(out.values, rest))


@rule("roll", positions=True)
def roll(op: Any, g: RowSlice, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Rotated dimensions; rotated rows get other numbers."""
    if not dims:
        return Densify("all dimensions are rotated as one")
    out: Any = g
    for by, dim in zip(shifts, dims, strict=True):  # a dimension may come twice
        out, rest = _renumbered(out, {dim % g.ndim: (g.shape[dim], Affine(offset=by, wraps=True))})
        if rest:
            out = op(out, [by], rest) if isinstance(out, Tensor) else out.like(op(out.values, [by], rest))
    return out


def _renumbered(g: RowSlice | Tensor, moves: dict[int, tuple[int, Affine]]) -> tuple[RowSlice | Tensor, list[int]]:
    """Give rows other numbers in dimensions of other sizes; also the dimensions that hold none."""
    rest: list[int] = []
    for dim, (size, by) in moves.items():
        if type(g) is RowSlice and g.layout.holds(dim):
            g = g.renumbered(dim, size, by)
        else:
            rest.append(dim)
    return g, rest


@rule("cat", positions=True, fills_zeros=True, apart=True)
def cat(op: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join along a dimension; where it holds rows, each piece's rows get numbers behind those of the piece before."""
    if RowSlice not in map(type, tensors):
        tensors = [*map(filled, tensors)]
    g = next((x for x in tensors if type(x) is RowSlice), None)
    if g is None:
        return Densify("the operand is a new tensor of zeros")
    dim %= g.ndim
    if any(type(x) is RowSlice and x.layout.holds(dim) for x in tensors):
        return _end_to_end(tensors, dim)
    if any(type(x) is RowSlice and x.rows is not g.rows for x in tensors):
        united = unite([tensors], {})
        if united is None:
            return Densify("gradients sliced over different batches meet")
        tensors = united[0][0]
        g = next(x for x in tensors if type(x) is RowSlice)
    parts = _same_rows(g, tensors) or _of_matrix_exp(g, tensors)
    if parts is None:
        return Densify("a dense gradient is joined to a sliced one")
    return g.like(op(parts, dim))


def _of_matrix_exp(g: RowSlice, tensors: Sequence[Any]) -> list[Tensor] | None:
    """The kept rows of all parts in the formula of ``matrix_exp``; None in any other node.

    The formula joins the gradient G and the matrix A to [[A, G], [0, A]], and reads the upper right block of its
    exponential. That block is zero where G is zero, so the other rows may be left out.
    """
    if not node_name().startswith("LinalgMatrixExpBackward") or not _batch_of_matrices(g):
        return None
    return [x.values if type(x) is RowSlice else g.take(x) for x in tensors if type(x) is not Zeros]


def _batch_of_matrices(g: RowSlice) -> bool:
    return g.dim < g.ndim - 2 and not g.layout.minor


@rule("linalg_matrix_exp")
def matrix_exp(op: Any, g: RowSlice) -> Any:
    """The exponential of joined matrices, see the rule of ``cat``."""
    if not node_name().startswith("LinalgMatrixExpBackward") or not _batch_of_matrices(g):
        return Densify("the exponential of zero is not zero")
    return g.like(op(g.values.contiguous()))


def _end_to_end(tensors: Sequence[Any], dim: int) -> Any:
    """Pieces of a dimension that holds rows; a piece without rows of its own there is one entry, zeros, or dense."""
    sizes = [x.shape[dim] for x in tensors]
    like = next(x for x in tensors if type(x) is RowSlice and x.layout.holds(dim))
    place = like.part_of(dim)
    pieces: list[Any] = []
    for x, size, end in zip(tensors, sizes, itertools.accumulate(sizes), strict=True):
        if type(x) is Zeros or size == 0:
            continue
        piece = like.all_of(x, place) if isinstance(x, Tensor) else x if x.layout.holds(dim) else x.spread(dim)
        pieces.append(piece.renumbered(dim, sum(sizes), Affine(offset=end - size)))
    if any(isinstance(x, Tensor) or x.layout != pieces[0].layout for x in pieces):
        return Densify("operands hold their rows in different dimensions")
    return end_to_end(pieces)


@rule("stack", positions=True, fills_zeros=True)
def stack(op: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join along a new dimension."""
    if RowSlice not in map(type, tensors):
        tensors = [*map(filled, tensors)]
    places = [place for place, x in enumerate(tensors) if type(x) is RowSlice]
    g = tensors[places[0]] if places else None
    if g is not None and len(places) == 1 and all(type(x) in (RowSlice, Zeros) for x in tensors):
        dim %= g.ndim + 1
        sizes = [*g.shape[:dim], len(tensors), *g.shape[dim:]]
        return select_backward(torch.ops.aten.select_backward.default, g, sizes, dim, places[0])
    parts = None if g is None else _same_rows(g, tensors)
    if g is None or parts is None:
        return Densify("a dense gradient is joined to a sliced one")
    return g.like(op(parts, dim), lay.insert(g.layout, dim % (g.ndim + 1)))


def _same_rows(g: RowSlice, tensors: Sequence[Any]) -> list[Tensor] | None:
    """The values of all parts, if every part is sliced like ``g``, or zeros."""
    parts: list[Tensor] = []
    for x in tensors:
        if type(x) is RowSlice and x.ndim == g.ndim and g.aligned(x):
            parts.append(x.values)
        elif type(x) is Zeros and len(x.shape) == g.ndim and g.fits(x.shape):
            parts.append(g.values.new_zeros(g.kept_shape(x.shape)))
        else:
            return None
    return parts


@rule("constant_pad_nd", positions=True)
def constant_pad(op: Any, g: RowSlice, pad: Sequence[int], value: Any = 0) -> Any:
    """Zeros around dimensions, or cuts from them; rows are numbered anew, and those cut off go on as zeros."""
    if value != 0:
        return Densify("something that is not zero is put around the gradient")
    out: Any = g
    rest = list(pad)
    for place in range(0, len(pad), 2):  # the last dimension comes first
        dim, (before, behind) = g.ndim - 1 - place // 2, pad[place : place + 2]
        if type(out) is RowSlice and g.layout.holds(dim) and (before or behind):
            rest[place : place + 2] = [0, 0]
            out = out.renumbered(dim, out.shape[dim] + before + behind, Affine(offset=before))
    if not any(rest):
        return out
    return out.like(op(out.values, rest, value)) if type(out) is RowSlice else op(out, rest, value)
