"""Take K rows out of a full-size tensor, and add K rows into one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from rowprop import native
from rowprop.backprop.backward import running, unpacks
from rowprop.backprop.rows.layout import Layout, layout_as, pieces
from rowprop.backprop.rows.refusals import NeedsAllRows
from rowprop.backprop.rows.rows import RowSet, joined
from rowprop.native import recording


def gather(tensor: Tensor, rows: RowSet, layout: Layout) -> Tensor:
    """The kept rows of a full-size plain tensor; the result must not be written to.

    The last two are remembered: a layer's result is the next one's input. What an unpack hook returns is gathered each
    time: it may have filled the same memory anew.
    """
    if tensor.layout is not torch.strided:
        raise NeedsAllRows("rows would have to be taken from a sparse tensor")
    if rows.recompute is not None:
        return rows.recompute(tensor, layout)
    parts = rows.indices(layout.sizes) if layout.minor else ()
    at_work = recording()
    if at_work is not None:
        return at_work.gather(tensor, layout, lambda: gather_plain(tensor, rows.index, layout, parts))
    # It has no memory of its own to be recognised by, or, made in inference mode, no count of writes.
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_inference():
        return gather_plain(tensor, rows.index, layout, parts)
    if native.extension is not None and (held := rows.native) is not None:
        told = layout.numbers()
        result = held.remembered(tensor, told)
        if result is None:
            result = gather_plain(tensor, rows.index, layout, parts)
            held.remember(tensor, told, result)
        return result
    recent, key = rows.recent, (tensor.untyped_storage()._cdata, tensor.storage_offset())  # pyright: ignore
    about = tensor._version, layout, rows.stream()  # pyright: ignore[reportPrivateUsage]
    if key in recent:  # while a source lives, no other storage has its address
        source, told, result = recent[key]
        if told == about and _entries(source) == _entries(tensor) and not unpacks():
            return result
    elif len(recent) > 1:
        del recent[next(iter(recent))]
    elif not recent:
        running().ends.append(recent.clear)
    result = gather_plain(tensor, rows.index, layout, parts)
    recent[key] = tensor, about, result
    return result


def _entries(tensor: Tensor) -> tuple[Any, ...]:
    """Which entries of its storage a tensor has, from its first one on, and how it reads them."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def gather_plain(tensor: Tensor, index: Tensor, layout: Layout, parts: Sequence[Tensor] = ()) -> Tensor:
    """The kept rows of a full-size plain tensor, always gathered anew.

    The result keeps the tensor's order of dimensions in memory, so that kernels find the strides they expect: fused
    attention assumes a stride of 1 for the width without a check. Expanded dimensions stay expanded.
    """
    # A kernel within a tensor subclass reads the memory below these flags: they are removed, and computed on kept rows.
    if tensor.is_conj():
        return gather_plain(tensor.conj(), index, layout, parts).conj_physical()
    if tensor.is_neg():
        return gather_plain(cast(Any, torch)._neg_view(tensor), index, layout, parts).neg()
    if not tensor.is_contiguous():
        expanded = [d for d, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[d] > 1]
        if layout.minor and not all(part.dim in expanded for part in layout.parts):
            expanded = [d for d in expanded if not layout.holds(d)]
        same = [tensor.stride(part.dim) == 0 and tensor.shape[part.dim] == part.size for part in layout.parts]
        left = [place for place, gone in enumerate(same) if not gone]
        movable = left and (left[0] == 0 or layout.parts[left[0]].outer == layout.parts[left[0]].inner == 1)
        if movable and len(left) < len(parts):
            return _of_parts(tensor, layout, left, parts)
        if expanded:
            kept_shape = layout.kept_shape(tensor.shape, index.numel())
            for d in expanded:
                tensor = tensor.narrow(d, 0, 1)
            if layout.dim not in expanded:
                tensor = gather_plain(tensor, index, layout, parts)
            return tensor.expand(kept_shape)
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if order != list(range(tensor.ndim)):
            inverse = sorted(range(tensor.ndim), key=order.__getitem__)
            moved = layout.moved(inverse.__getitem__)
            return gather_plain(tensor.permute(order), index, moved, parts).permute(inverse)
    dim = layout.dim
    if layout.plain:
        return _selected(tensor, dim, index)
    if not layout.minor:
        return _selected(rows_apart(tensor, layout), dim + 1, index).flatten(dim, dim + 2)
    apart, at = _parts_together(tensor, layout)
    if _collapses(apart, at, len(parts)):
        kept = _selected(apart.flatten(at, at + len(parts) - 1), at, index)
    else:
        kept = apart[(*[slice(None)] * at, *parts)]
    return kept.reshape(layout.kept_shape(tensor.shape, index.numel()))


def _selected(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """As ``index_select``, whose kernel of CUDA for up to 16 entries moves bytes at a third of the speed of indexing.

    Indexing takes the host 15 us more, so only large rows are taken by it.
    """
    kept = index.numel()
    if tensor.is_cuda and type(kept) is int and kept <= 16 and kept * tensor.numel() > tensor.shape[dim] << 23:
        return torch.ops.aten.index.Tensor(tensor, [None] * dim + [index])
    return tensor.index_select(dim, index)


def _of_parts(tensor: Tensor, layout: Layout, places: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """The kept rows where all entries of the other parts are the same: positions (T, width), seen as (N, T, width)."""
    for number, part in enumerate(layout.parts):
        if number not in places:
            tensor = tensor.narrow(part.dim, 0, 1)
    some = layout_as([layout.parts[place] for place in places])
    indices = [parts[place] for place in places]
    kept = gather_plain(tensor, joined(indices, some.sizes), some, indices)
    return kept.transpose(some.dim, layout.dim)


def scatter_add(
    out: Tensor, values: Tensor, index: Tensor, layout: Layout, alpha: Any = 1, parts: Sequence[Tensor] = ()
) -> Tensor:
    """Add ``values`` to the rows ``index`` of ``out``, in place; repeated rows add up."""
    if out.layout is not torch.strided:
        raise NeedsAllRows("rows would have to be added to a sparse tensor")
    dim = layout.dim
    if layout.plain:
        return out.index_add_(dim, index, values, alpha=alpha)
    if layout.minor:
        apart, at = _parts_together(out, layout)
        values = values.reshape(*apart.shape[:at], index.numel(), *apart.shape[at + len(parts) :])
        if _collapses(apart, at, len(parts)):
            apart.flatten(at, at + len(parts) - 1).index_add_(at, index, values, alpha=alpha)
        else:
            values = values if alpha == 1 else values * alpha
            torch.ops.aten.index_put_(apart, [None] * at + list(parts), values, True)
        return out
    kept = Layout(dim, index.numel(), layout.outer, layout.inner)
    rows_apart(out, layout).index_add_(dim + 1, index, rows_apart(values, kept), alpha=alpha)
    return out


def _parts_together(tensor: Tensor, layout: Layout) -> tuple[Tensor, int]:
    """A view in which the parts of the rows' index are neighbouring dimensions, and the first of these dimensions."""
    split, order, at = _neighbours(tuple(tensor.shape), layout)
    return tensor.view(split).permute(order), at


@lru_cache(1024)
def _neighbours(shape: tuple[int, ...], layout: Layout) -> tuple[list[int], list[int], int]:
    """The sizes of the factors of a shape; their order if the rows' parts follow one another; where these begin."""
    found = [piece for dimension in pieces(shape, layout) for piece in dimension]
    places = [place for _, place in found]
    axes = [places.index((number,)) for number in range(1 + len(layout.minor))]
    rest = [d for d in range(len(found)) if d not in axes]
    at = sum(d < axes[0] for d in rest)
    return [size for size, _ in found], [*rest[:at], *axes, *rest[at:]], at


def _collapses(tensor: Tensor, at: int, count: int) -> bool:
    """Whether these dimensions can be seen as one."""
    return all(tensor.stride(d) == tensor.stride(d + 1) * tensor.shape[d + 1] for d in range(at, at + count - 1))


def rows_apart(tensor: Tensor, layout: Layout) -> Tensor:
    """A view in which the rows have a dimension of their own."""
    return cast(Any, tensor).unflatten(layout.dim, (layout.outer, layout.num_rows, layout.inner))


def along_rows(of_rows: Tensor, layout: Layout, ndim: int) -> Tensor:
    """What belongs to each row (K,), in a shape that broadcasts to a tensor of so many dimensions."""
    return of_lines(of_rows, layout).view([-1 if d == layout.dim else 1 for d in range(ndim)])


def of_lines(of_rows: Tensor, layout: Layout) -> Tensor:
    """What belongs to each row (K,), for each line of the dimension that they lie in."""
    # Not repeat_interleave, which reads its number of repeats off the device.
    return of_rows.unsqueeze(1).expand(-1, layout.inner).flatten().repeat(layout.outer)
