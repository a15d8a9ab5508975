"""Views, reorderings and joins: the rows move with their dimension."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop import layout as lay
from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rules.pointwise import is_contiguous
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSet, RowSlice, Zeros


@rule("view", "_unsafe_view", "_reshape_alias", positions=True)
def view(op: Any, g: RowSlice, shape: Sequence[int], *strides: Any) -> Any:
    """Any regrouping that leaves the rows whole in one dimension."""
    new_shape = lay.infer_shape(prod(g.shape), shape)
    layout = lay.view(g.shape, g.layout, new_shape)
    if layout is None or (layout.minor and g.rows.recompute is not None):  # a compiled region has rows of one dimension
        return Densify("the view cuts through the rows")
    return RowSlice(g.values.reshape(g.kept_shape(new_shape, layout)), g.rows, layout, new_shape)


@rule("t", positions=True)
def t(op: Any, g: RowSlice) -> RowSlice:
    """Swap the two dimensions of a matrix."""
    return transpose(op, g, 0, 1) if g.ndim == 2 else g


@rule("transpose.int", positions=True)
def transpose(op: Any, g: RowSlice, first: int, second: int) -> RowSlice:
    """Swap two dimensions."""
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


@rule("view_as_real", "view_as_complex")
def complex_view(op: Any, g: RowSlice) -> Any:
    """Adds or removes a last dimension of size 2."""
    if g.dim == g.ndim - 1 and op is torch.ops.aten.view_as_complex.default:
        return Densify("the rows lie in the dimension that turns complex")
    return g.like(op(g.values.contiguous()))


@rule("as_strided", fills_zeros=True, positions=True)
def as_strided(op: Any, g: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """A view given by strides: a reshape, or the same part of each row, as in a view that is written to in place."""
    if type(g) is RowSlice and g.memory_format is not None:
        return Densify("the strides are those of a channels-last gradient")
    if not offset and prod(size) == prod(g.shape) and is_contiguous(size, stride):
        return g.view(size) if type(g) is Zeros else view(op, g, size)
    part = _part(g, size, stride, offset or 0)
    if part is not None:
        return part
    rows: RowSet = g.rows
    per_row, left = divmod(prod(g.shape), rows.num_rows)
    parts = None if left or 0 in size else _row_parts(size, stride, rows.num_rows, per_row)
    if parts is None:
        return Densify("the strides do not lead from row to row, or not to every row")
    layout = lay.layout_of(parts)
    reach = sum((n - 1) * step for d, (n, step) in enumerate(zip(size, stride, strict=True)) if not layout.holds(d))
    if (offset or 0) + reach >= per_row:
        return Densify("the strides reach from one row into the next")
    if type(g) is Zeros:
        g = g.split()
    if lay.view(g.shape, g.layout, (rows.num_rows, per_row)) != Layout(0, rows.num_rows):
        return Densify("the rows are not the outermost part of the gradient")
    values, steps = g.values.contiguous(), list(stride)
    steps[layout.dim] = per_row
    kept = layout.kept_shape(size, rows.kept)
    return RowSlice(values.as_strided(kept, steps, values.storage_offset() + (offset or 0)), rows, layout, size)


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


@rule("slice.Tensor", positions=True)
def slice_(op: Any, g: RowSlice, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """Part of a dimension: where it holds rows, rows outside of the slice go on as zeros."""
    dim %= g.ndim
    if not g.layout.holds(dim):
        return g.like(op(g.values, dim, start, end, step))
    taken = range(g.shape[dim])[start:end:step]
    if taken == range(g.shape[dim]):
        return g
    if not taken:
        return Densify("the slice takes nothing")
    return g.renumbered(dim, len(taken), (1, -taken.start, step))


@rule("select.int", positions=True)
def select(op: Any, g: RowSlice, dim: int, index: int) -> Any:
    """One index of a dimension that holds no rows."""
    dim %= g.ndim
    if g.layout.holds(dim):
        return Densify("one element of the batch dimension is selected")
    return g.like(op(g.values, dim, index), lay.remove(g.layout, [dim]))


@rule("unbind.int", positions=True)
def unbind(op: Any, g: RowSlice, dim: int = 0) -> Any:
    """All indices of a dimension that holds no rows."""
    dim %= g.ndim
    if g.layout.holds(dim):
        return Densify("the batch dimension is taken apart")
    layout = lay.remove(g.layout, [dim])
    return [g.like(v, layout) for v in op(g.values, dim)]


@rule("split.Tensor", "split_with_sizes", positions=True)
def split(op: Any, g: RowSlice, sizes: Any, dim: int = 0) -> Any:
    """Pieces of a dimension that holds no rows."""
    if g.layout.holds(dim % g.ndim):
        return Densify("the batch dimension is split")
    return [g.like(v) for v in op(g.values, sizes, dim)]


@rule("slice_backward", positions=True)
def slice_backward(op: Any, g: RowSlice, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """Zeros around a slice of any dimension: rows that were sliced get their old numbers back."""
    dim %= g.ndim
    if not g.layout.holds(dim):
        return g.like(op(g.values, g.kept_shape(sizes), dim, start, end, step))
    taken = range(sizes[dim])[start:end:step]
    return g if tuple(sizes) == g.shape else g.renumbered(dim, sizes[dim], (step, taken.start, 1))


@rule("select_backward", positions=True)
def select_backward(op: Any, g: RowSlice, sizes: Sequence[int], dim: int, index: int) -> RowSlice:
    """Zeros around one index of a dimension that holds no rows (the selected dimension is not in ``g``)."""
    layout = lay.insert(g.layout, dim % len(sizes))
    return g.like(op(g.values, g.kept_shape(sizes, layout), dim, index), layout)


@rule("diagonal_backward")
def diagonal_backward(op: Any, g: RowSlice, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    """Zeros around a diagonal of two dimensions that hold no rows (it is ``g``'s last dimension)."""
    if g.dim == g.ndim - 1:
        return Densify("the diagonal runs through the batch")
    layout = g.layout
    for dim in sorted((dim1 % len(sizes), dim2 % len(sizes))):
        layout = lay.insert(layout, dim)
    return g.like(op(g.values, g.kept_shape(sizes, layout), offset, dim1, dim2), layout)


@rule("diagonal")
def diagonal(op: Any, g: RowSlice, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """A diagonal of two dimensions that hold no rows; it becomes the last one."""
    dims = [dim1 % g.ndim, dim2 % g.ndim]
    if g.dim in dims:
        return Densify("the diagonal runs through the batch")
    return g.like(op(g.values, offset, dim1, dim2), lay.remove(g.layout, dims))


@rule("diag_embed")
def diag_embed(op: Any, g: RowSlice, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """The last dimension, which holds no rows, as a diagonal."""
    if g.dim == g.ndim - 1:
        return Densify("the diagonal runs through the batch")
    layout = g.layout
    for dim in sorted((dim1 % (g.ndim + 1), dim2 % (g.ndim + 1))):
        layout = lay.insert(layout, dim)
    return g.like(op(g.values, offset, dim1, dim2), layout)


@rule("unfold_backward")
def unfold_backward(op: Any, g: RowSlice, sizes: Sequence[int], dim: int, size: int, step: int) -> Any:
    """Windows over a dimension that holds no rows (``g`` has the window as an added last dimension)."""
    dim %= g.ndim - 1 or 1  # a number has one window over no dimension
    if g.dim in (dim, g.ndim - 1):
        return Densify("the windows run over the batch")
    return g.like(op(g.values, g.kept_shape(sizes), dim, size, step))


@rule("flip", "roll", positions=True)
def reorder(op: Any, g: RowSlice, first: Any, second: Any = None) -> Any:
    """Reverse or rotate dimensions; reversed rows get other numbers. ``flip(dims)``, ``roll(shifts, dims)``."""
    flip = op is torch.ops.aten.flip.default
    dims = cast("Sequence[int]", first if flip else second)
    if flip:
        for dim in {d % g.ndim for d in dims}:
            if g.layout.holds(dim):
                g = g.renumbered(dim, g.shape[dim], (-1, g.shape[dim] - 1, 1))
        rest = [d for d in dims if not g.layout.holds(d % g.ndim)]
        return g.like(op(g.values, rest)) if rest else g
    if not dims or any(g.layout.holds(d % g.ndim) for d in dims):
        return Densify("the batch dimension itself is rotated")
    return g.like(op(g.values, first, second))


@rule("tril", "triu")
def triangle(op: Any, g: RowSlice, diagonal: int = 0) -> Any:
    """A triangle of the last two dimensions."""
    if g.dim >= g.ndim - 2:
        return Densify("the triangle cuts through the batch")
    return g.like(op(g.values, diagonal))


@rule("cat", positions=True)
def cat(op: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join along a dimension that holds no rows."""
    g = next(x for x in tensors if type(x) is RowSlice)
    dim %= g.ndim
    if g.layout.holds(dim):
        return Densify("gradients are joined along the batch dimension")
    parts = _same_rows(g, tensors)
    if parts is None:
        return Densify("a dense gradient is joined to a sliced one")
    return g.like(op(parts, dim))


@rule("stack", positions=True)
def stack(op: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join along a new dimension."""
    g = next(x for x in tensors if type(x) is RowSlice)
    parts = _same_rows(g, tensors)
    if parts is None:
        return Densify("a dense gradient is joined to a sliced one")
    return g.like(op(parts, dim), lay.insert(g.layout, dim % (g.ndim + 1)))


def _same_rows(g: RowSlice, tensors: Sequence[Any]) -> list[Tensor] | None:
    """The values of all parts, if every part is sliced like ``g``."""
    if all(type(x) is RowSlice and x.ndim == g.ndim and g.aligned(x) for x in tensors):
        return [x.values for x in tensors]
    return None


@rule("constant_pad_nd", positions=True)
def constant_pad(op: Any, g: RowSlice, pad: Sequence[int], value: Any = 0) -> Any:
    """Zeros around dimensions, or cuts from them; rows are numbered anew, and those cut off go on as zeros."""
    if value != 0:
        return Densify("something that is not zero is put around the gradient")
    out, rest = g, list(pad)
    for place in range(0, len(pad), 2):  # the last dimension comes first
        dim, (before, behind) = g.ndim - 1 - place // 2, pad[place : place + 2]
        if g.layout.holds(dim) and (before or behind):
            rest[place : place + 2] = [0, 0]
            size = out.shape[dim] + before + behind
            out = out.renumbered(dim, max(size, 0), (1, before, 1))
    return out.like(op(out.values, rest, value)) if any(rest) else out


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def shuffle(op: Any, g: RowSlice, factor: int) -> Any:
    """Moves elements between the last three dimensions."""
    if g.dim >= g.ndim - 3:
        return Densify("the shuffle runs through the batch")
    return g.like(op(g.values, factor))
