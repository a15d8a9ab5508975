"""K rows of a tensor of full shape: they are taken out of a full-size tensor and added back into one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop import native
from rowprop.backprop.backward import running, unpacks
from rowprop.backprop.layout import Layout, Part, layout_as, pieces, view
from rowprop.backprop.recorder import numbers, recorder
from rowprop.backprop.rows import Affine, Lender, NeedsAllRows, RowSet, check_readable, joined, record, wait_for
from rowprop.backprop.watch import note_densified
from rowprop.host import waits


class RowSlice:
    """The operand of a rule: the ``values`` of K rows, and the ``layout`` of these rows in the full ``shape``."""

    __slots__ = ("dim", "layout", "ndim", "order", "rows", "shape", "values")

    def __init__(self, values: Tensor, rows: RowSet, layout: Layout, shape: Sequence[int]) -> None:
        self.values = values
        self.rows = rows
        self.layout = layout
        self.shape = tuple(shape)
        self.dim = layout.dim  # the dimension that the rows lie in
        self.ndim = len(self.shape)
        self.order: list[int] | None = None  # of dense() in memory, the slowest dimension first, if it was asked for

    def take(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """The kept rows of a full-size plain tensor; its rows lie in ``dim`` (default: as in this gradient)."""
        return gather(tensor, self.rows, self.layout if dim is None else self.layout.at(dim))

    def like(self, values: Tensor, layout: Layout | None = None) -> RowSlice:
        """A sliced result of the same rows; its full shape follows from the shape of the values."""
        layout = self.layout if layout is None else layout
        shape = list(values.shape)  # sizes are not compared: a graph for any size would hold for equal sizes alone
        shape[layout.dim] = layout.size
        for part in layout.minor:
            shape[part.dim] = layout.size if part.dim == layout.dim else shape[part.dim] * part.size
        return RowSlice(values, self.rows, layout, shape)

    def kept_shape(self, shape: Sequence[int], layout: Layout | None = None) -> list[int]:
        """A full shape, reduced to the kept rows."""
        return (layout or self.layout).kept_shape(shape, self.rows.kept)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape can have its rows where this gradient has them."""
        return all(part.dim < len(shape) and shape[part.dim] == self.shape[part.dim] for part in self.layout.parts)

    def aligned(self, other: RowSlice) -> bool:
        """Whether two gradients of the same rows hold them in the same place, counted from the last dimension."""
        a, b = self.layout, other.layout
        if a.minor or b.minor:
            return (a is b and self.ndim == other.ndim) or a == b.at(b.dim + self.ndim - other.ndim)
        return a.dim - self.ndim == b.dim - other.ndim and a.outer == b.outer

    def merged(self) -> RowSlice:
        """Each row's sum in the row's first place, and zeros where it repeats: fit for an op that is not linear."""
        if self.rows.unique:
            return self
        within = self.layout.compact(self.rows.kept)
        return self.like(scatter_add(torch.zeros_like(self.values), self.values, self.rows.first, within))

    def distinct(self) -> RowSlice:
        """This gradient with each row once, if the count of these is no wait: a repeated row costs as much as one."""
        rows, places = self.rows.distinct()
        if places is None:
            return self
        out = self.values.new_zeros(self.layout.kept_shape(self.shape, rows.kept))
        values = scatter_add(out, self.values, places, self.layout.compact(rows.kept))
        return RowSlice(values, rows, self.layout, self.shape)

    def part_of(self, dim: int) -> int:
        """The place, among the parts of the rows' index, of the part in this dimension; it has to be alone in it."""
        parts = self.layout.parts
        place = next(number for number, part in enumerate(parts) if part.dim == dim)
        if parts[place].outer != 1 or parts[place].inner != 1:
            raise NeedsAllRows("a dimension is changed that holds rows and more")
        return place

    def renumbered(self, dim: int, size: int, by: Affine) -> RowSlice | Tensor:
        """This gradient when the entries of a dimension of rows get other numbers below ``size``.

        Rows that fall out go on as zeros where only the device could count them. Plain if all rows are kept.
        """
        place = self.part_of(dim)
        if size < 1:
            raise NeedsAllRows("nothing is left of the batch")
        rows, change = self.rows.renumbered(self.layout.sizes, place, size, by)
        values, within = self.values, self.layout.compact(self.rows.kept)
        if change is not None and change.dtype == torch.bool:
            values = _without(values, change, within)
        elif change is not None:
            values = gather_plain(values, change, within)
            if rows.absent is not None:
                values = _without(values, rows.absent, self.layout.compact(rows.kept))
        return self.on(rows, values, place, size)

    def entries(self, dim: int) -> Tensor:
        """The kept rows' entries in a dimension that one part of their index has to itself, (K,)."""
        return self.rows.indices(self.layout.sizes)[self.part_of(dim)]

    def moved(self, dim: int, size: int, entries: Tensor) -> RowSlice | Tensor:
        """This gradient with each row at another entry, (K,), of a dimension that gets ``size`` entries."""
        place, sizes = self.part_of(dim), list(self.layout.sizes)
        indices, sizes[place] = list(self.rows.indices(self.layout.sizes)), size
        indices[place] = entries.long()
        rows = self.rows.derived(joined(indices, sizes), prod(sizes), unique=False, absent=self.rows.absent)
        rows.whole = self.rows.whole if place > 0 and self.rows.lies_in_whole(self.layout) else None
        return self.on(rows, self.values, place, size)

    def on(self, rows: RowSet, values: Tensor, place: int, size: int) -> RowSlice | Tensor:
        """Rows of which one part of the index, with a dimension to itself, has another size than in this gradient."""
        parts = list(self.layout.parts)
        dim = parts[place].dim
        shape = [size if d == dim else n for d, n in enumerate(self.shape)]
        if size == 1 and len(parts) > 1:  # a part of one entry is no part
            if place == 0:  # the kept rows stand in its place
                if parts[1].outer != 1 or parts[1].inner != 1:
                    raise NeedsAllRows("a dimension is changed that holds rows and more")
                values = values.transpose(dim, parts[1].dim)
            del parts[place]
        else:
            parts[place] = Part(dim, size)
        out = RowSlice(values, rows, layout_as(parts), shape).distinct()
        if out.rows.kept < rows.num_rows:
            return out
        if rows.absent is not None and not self.layout.minor:
            note_densified("a part of the batch", f"it has no more rows than are kept, not all of them kept; {AT_ONCE}")
        return out.dense()

    def all_of(self, dense: Tensor, place: int) -> RowSlice:
        """A dense gradient, that differs in the size of one part, as a gradient of all its rows, which must be few."""
        layout = _resized(self.layout, place, dense.shape[self.layout.parts[place].dim])
        if layout.num_rows + self.rows.kept >= self.rows.num_rows:
            raise NeedsAllRows("a dense gradient is joined to a sliced one")
        rows = self.rows.all_of(layout.num_rows)
        return RowSlice(gather_plain(dense, rows.index, layout, rows.indices(layout.sizes)), rows, layout, dense.shape)

    def spread(self, dim: int) -> RowSlice:
        """This gradient with the entries of a dimension that holds no rows as the fastest part of the rows' index."""
        layout, size = self.layout, self.shape[dim]
        rows = self.rows.spread(size)
        values = self.values
        if size > 1:
            within = layout.compact(self.rows.kept)
            if within.outer != 1 or within.inner != 1:
                raise NeedsAllRows("whole rows become positions that are merged with another dimension")
            if dim == layout.dim + 1:
                values = values.flatten(layout.dim, dim).unsqueeze(dim)
            else:
                every = Layout(layout.dim, rows.kept, minor=(Part(dim, size),))
                entries = torch.arange(rows.kept, device=values.device)
                values = gather_plain(values, entries, every, (entries // size, entries % size))
        layout = Layout(layout.dim, rows.num_rows, layout.outer, layout.inner, (*layout.minor, Part(dim, size)))
        return RowSlice(values, rows, layout, self.shape)

    def coarsened(self, place: int) -> RowSlice:
        """This gradient, sliced over one part of its rows' index: reading how many entries it has may be a wait."""
        part, indices = self.layout.parts[place], list(self.rows.indices(self.layout.sizes))
        origin, coarse, larger = self.rows.origin, None, indices[place]
        if self.rows.lies_in_whole(self.layout) and place == 0:
            coarse, indices[place] = cast("tuple[RowSet, Tensor]", self.rows.whole)
        elif origin is not None and origin.num_rows == part.size:
            # Tokens that went through experts are mostly back in the rows that they came from: those rows as they are.
            check_readable(larger, "whether tokens are back in the sequences that they came from")
            slots = larger.new_full((part.size,), -1)
            slots[origin.index] = origin.first
            indices[place] = slots[larger]
            coarse = origin if bool((indices[place] >= 0).all()) else None
        if coarse is None:
            *_, coarse = self.rows.together(self.layout.sizes, (place,))
            indices[place] = torch.searchsorted(coarse.index, larger)
        small = _resized(self.layout, place, coarse.kept)
        layout = Layout(part.dim, part.size, part.outer, part.inner)
        out = self.zeros(layout.kept_shape(self.shape, coarse.kept), self.in_memory())
        index = joined(indices, small.sizes)
        return RowSlice(scatter_add(out, self.values, index, small, parts=indices), coarse, layout, self.shape)

    def dense(self) -> Tensor:
        """Scatter into zeros; repeated rows add up."""
        return self.add_into(self.zeros(self.shape, self.order))

    def in_memory(self, steps: Sequence[int] | None = None) -> list[int]:
        """The dimensions from the slowest in memory on: of the values, and where several hold rows, by ``steps``."""
        parts = [part.dim for part in self.layout.parts]
        among = {d: place if steps is None else -steps[d] for place, d in enumerate(parts)}
        own = [self.values.stride(self.dim if d in among else d) for d in range(self.ndim)]
        return sorted(range(self.ndim), key=lambda d: (-own[d], among.get(d, 0)))

    def zeros(self, shape: Sequence[int], order: Sequence[int] | None, **options: Any) -> Tensor:
        """Zeros of this gradient's dtype; ``order`` is that of the dimensions in memory."""
        if order is None:
            return self.values.new_zeros(shape, **options)
        inverse = sorted(range(self.ndim), key=order.__getitem__)
        return self.values.new_zeros([shape[d] for d in order], **options).permute(inverse)

    def add_into(self, out: Tensor, alpha: Any = 1) -> Tensor:
        """Add the kept rows to a full-size plain tensor, in place."""
        parts = self.rows.indices(self.layout.sizes) if self.layout.minor else ()
        return scatter_add(out, self.values, self.rows.index, self.layout, alpha, parts)


class Zeros:
    """A full-size tensor of zeros, made from a gradient sliced over ``rows``, without memory until it is written to.

    ``layout`` says where the rows lie if the zeros have the shape of that gradient.
    """

    __slots__ = ("device", "dtype", "layout", "rows", "shape", "written")
    order = None

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        rows: RowSet,
        layout: Layout | None = None,
        written: list[RowSlice | Tensor] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.rows = rows
        self.layout = layout
        self.written = [] if written is None else written  # the content: a cell that all views of the whole share

    def view(self, shape: Sequence[int]) -> Zeros:
        """The same zeros in another shape with as many elements."""
        layout = self.layout and view(self.shape, self.layout, shape)
        return Zeros(shape, self.dtype, self.device, self.rows, layout, self.written)

    def split(self) -> RowSlice:
        """Allocate flat zeros for the kept rows, on the premise that the rows are the outermost part of this memory."""
        rows = self.rows
        inner = prod(self.shape) // rows.num_rows
        values = torch.zeros(rows.kept * inner, dtype=self.dtype, device=self.device)
        flat = RowSlice(values, rows, Layout(0, rows.num_rows, 1, inner), (prod(self.shape),))
        self.written.append(flat)
        return flat

    def filled(self) -> RowSlice | Zeros:
        """Allocate zeros for the kept rows, which become the content, if it is known where the rows lie."""
        if self.layout is None:
            return self
        values = torch.zeros(self.layout.kept_shape(self.shape, self.rows.kept), dtype=self.dtype, device=self.device)
        self.written[:] = [out := RowSlice(values, self.rows, self.layout, self.shape)]
        return out

    def content(self) -> RowSlice | Tensor | Zeros:
        """The present content: these zeros themselves, as long as nothing was written."""
        if not self.written:
            return self
        source = self.written[0]
        if type(source) is RowSlice:
            layout = view(source.shape, source.layout, self.shape)
            if layout is not None:
                values = source.values.reshape(layout.kept_shape(self.shape, source.rows.kept))
                return RowSlice(values, source.rows, layout, self.shape)
            source = self.written[0] = source.dense()
        return cast(Tensor, source).view(self.shape)

    def dense(self) -> Tensor:
        """A plain tensor. From now on, writes to it show in all views."""
        content = self.content()
        if type(content) is Zeros:
            content = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.written.append(content)
        elif type(content) is RowSlice:
            content = self.written[0] = content.dense()
        return cast(Tensor, content)


class Lent:
    """A copy of one row or of a range of rows, for autograd, which writes to it while it undoes a write in place.

    The range is sliced, if it has more rows than are kept. Else each entry of its first dimension, or of the row's,
    counts as a kept row: the rules tell whether a formula may give a gradient to other rows.
    """

    def __init__(self, held: Tensor, layout: Layout, size: Sequence[int], by: Affine, lender: Lender) -> None:
        """Copy those of ``held``, which views all kept rows, that get numbers."""
        rows, stay = lender.rows.renumbered((lender.rows.num_rows,), 0, layout.num_rows, by)
        self.held, self.rows, self.layout, dim = held, rows, layout, layout.dim
        self.shape = (1, *size) if lender.selected else size
        every = stay is None or stay.dtype == torch.bool
        self.stay = torch.arange(held.shape[dim], device=held.device) if every else cast(Tensor, stay)
        self.copy: RowSlice | Zeros = self._with_zeros(held.index_select(dim, self.stay), rows.absent)
        if rows.kept >= layout.num_rows:
            full = self.copy.dense().view(size)
            self.copy = Zeros(size, full.dtype, full.device, rows, None, [full])
            if size:
                self.copy = RowSlice(full, rows.all_of(size[dim]), Layout(dim, size[dim]), size)
        self.copy.rows.lender = lender

    def _with_zeros(self, values: Tensor, gone: Tensor | None) -> RowSlice:
        values = values if gone is None else _without(values, gone, self.layout)
        return RowSlice(values, self.rows, self.layout, self.shape)

    def write_back(self, outcome: Any, base: Any) -> bool:
        """Write a result to the kept rows of ``base``; False if other rows get a gradient, or only the device knows."""
        rows, dim, plain, like = self.rows, self.layout.dim, isinstance(outcome, Tensor), self.copy
        if type(base) is not RowSlice or not cast(Any, torch)._C._is_alias_of(base.values, self.held):
            return False
        if type(outcome) is RowSlice and (outcome.rows is not like.rows or outcome.layout != like.layout):
            return False
        there = self.held.index_select(dim, self.stay)
        values: Any = torch.zeros_like(there) if type(outcome) is Zeros else outcome if plain else outcome.values
        if plain or (type(outcome) is RowSlice and like.rows is not rows):
            full = values.reshape(self.shape)
            part = self._with_zeros(full.index_select(dim, rows.index), rows.absent if rows.unique else rows.again)
            if plain and (type(full) is not Tensor or waits(full) or not torch.equal(part.dense(), full)):
                return False
            values = part.values
        if rows.absent is not None:
            values = torch.where(along_rows(rows.absent, self.layout, values.ndim), there, values)
        self.held.index_copy_(dim, self.stay, values)
        return True


def filled(value: Any) -> Any:
    """Zeros as a gradient of the kept rows, if it is known where these lie; anything else as it is."""
    return value.filled() if type(value) is Zeros else value


def bring(rows: RowSet, content: RowSlice | Zeros | Tensor, last: Any) -> Any:
    """Make a gradient's memory, used ``last`` on that stream, safe to use on the present one; returns the latter."""
    assert rows.streams is not None
    now = rows.stream()
    if now == last and (type(content) is not Zeros or not rows.streams):
        return now
    if last not in rows.streams:
        rows.streams.append(last)
    if now not in rows.streams:
        rows.streams.append(now)
        places = (held[1] for held in (rows.whole, rows.part_of) if held is not None)
        hooked = () if rows.hook is None else rows.hook.tensors()
        for about in (rows.index, rows.absent, *places, *hooked):
            if about is not None:
                record(about)
    if type(content) is not RowSlice:  # another user may have made it after autograd let this stream go on
        for stream in rows.streams:
            if stream != now:
                wait_for(stream, rows.index.device)
    content = content.content() if type(content) is Zeros else content
    if type(content) is not Zeros:
        record(content.values if type(content) is RowSlice else cast(Tensor, content))
    return now


def whole_rows(value: Any, dim: int | None = None, mixed: Collection[int] = ()) -> Any:
    """A gradient of positions, as a gradient of the rows that these positions lie in, for an op that mixes them.

    ``dim`` is the only dimension in which the op takes rows; by default the one with the smallest share of rows that is
    not among ``mixed``.
    """
    if type(value) is not RowSlice or not value.layout.minor:
        return value
    parts, origin = value.layout.parts, value.rows.origin
    apart = [place for place, part in enumerate(parts) if part.dim not in mixed]
    if value.rows.lies_in_whole(value.layout) and 0 in apart:
        return value.coarsened(0)
    known = [place for place in apart if origin is not None and parts[place].size % origin.num_rows == 0]
    places = [place for place in known or apart if dim is None or parts[place].dim == dim]
    coarse = [value.coarsened(place) for place in places]
    rows = min(coarse, key=lambda c: c.rows.kept / c.rows.num_rows, default=None)
    if rows is None or rows.rows.kept >= rows.rows.num_rows:
        raise NeedsAllRows("the op mixes positions, and some are kept of every row")
    if value.rows.attention == "cut":
        note_densified("attention", "not cut below an op that takes whole sequences")
    return rows


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
    at_work = recorder()
    if at_work is not None:
        return at_work.gather(tensor, layout, lambda: gather_plain(tensor, rows.index, layout, parts))
    # It has no memory of its own to be recognised by, or, made in inference mode, no count of writes.
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_inference():
        return gather_plain(tensor, rows.index, layout, parts)
    if native.extension is not None and (held := rows.native) is not None:
        told = numbers(layout)
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


def _resized(layout: Layout, place: int, size: int) -> Layout:
    """The layout when a part of the rows' index has another size."""
    parts = list(layout.parts)
    old = parts[place]
    for number, part in enumerate(parts):
        if number != place and part.dim == old.dim:
            outer = part.outer // old.size * size if part.outer > old.outer else part.outer
            inner = part.inner // old.size * size if part.outer < old.outer else part.inner
            parts[number] = Part(part.dim, part.size, outer, inner)
    return layout_as([*parts[:place], Part(old.dim, size, old.outer, old.inner), *parts[place + 1 :]])


def rows_apart(tensor: Tensor, layout: Layout) -> Tensor:
    """A view in which the rows have a dimension of their own."""
    return cast(Any, tensor).unflatten(layout.dim, (layout.outer, layout.num_rows, layout.inner))


NO_RULE = "no rule for this op; write one, see docs/writing-a-rule.md"
AT_ONCE = "compute on the batch as a whole"


@dataclass(frozen=True)
class Densify:
    """A rule's answer if the op has to run at full size: its rows mix, or its kernel cannot run on fewer rows.

    If only the kernel needs all rows, the results are zero outside the kept ones and go on sliced ``like`` an operand.
    """

    reason: str  # finishes the sentence "densified: ..."; what a user can do stands behind a semicolon
    like: RowSlice | None = None
    dims: tuple[int | None, ...] = ()  # with ``like``: where the rows of each result lie, None for one without rows

    def after(self, out: Any) -> Any:
        """The results to go on with, made from the op's results at full size."""
        g = self.like
        if g is None:
            return out
        results = zip(out, self.dims, strict=True)
        return tuple(r if dim is None or r is None else sliced_again(r, g.rows, g.layout.at(dim)) for r, dim in results)


def sliced_again(full: Tensor, rows: RowSet, layout: Layout) -> RowSlice:
    """The kept rows of a full-size gradient."""
    return taken_once(gather(full, rows, layout), rows, layout, full.shape)


def taken_once(values: Tensor, rows: RowSet, layout: Layout, shape: Sequence[int]) -> RowSlice:
    """A gradient of values taken out of a full-size one: a row that repeats counts once, and one that fell out not."""
    if not rows.unique:
        values = _without(values, rows.again, layout.compact(rows.kept))
    return RowSlice(values, rows, layout, shape)


def _without(values: Tensor, gone: Tensor, layout: Layout) -> Tensor:
    """The values with zeros in some rows; ``gone`` (K,) says which."""
    return values.masked_fill(along_rows(gone, layout, values.ndim), 0)


def along_rows(of_rows: Tensor, layout: Layout, ndim: int) -> Tensor:
    """What belongs to each row (K,), in a shape that broadcasts to a tensor of so many dimensions."""
    return of_lines(of_rows, layout).view([-1 if d == layout.dim else 1 for d in range(ndim)])


def of_lines(of_rows: Tensor, layout: Layout) -> Tensor:
    """What belongs to each row (K,), for each line of the dimension that they lie in."""
    # Not repeat_interleave, which reads its number of repeats off the device.
    return of_rows.unsqueeze(1).expand(-1, layout.inner).flatten().repeat(layout.outer)
