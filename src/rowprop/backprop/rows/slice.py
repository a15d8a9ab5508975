"""K rows of a tensor of full shape, and an op's answer if it has to run on all rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.gather import along_rows, gather, gather_plain, scatter_add
from rowprop.backprop.rows.layout import Layout, Part, layout_as
from rowprop.backprop.rows.refusals import AT_ONCE, NeedsAllRows, check_readable
from rowprop.backprop.rows.rows import Affine, RowSet, joined
from rowprop.backprop.watch import note_densified


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
            values = without(values, change, within)
        elif change is not None:
            values = gather_plain(values, change, within)
            if rows.absent is not None:
                values = without(values, rows.absent, self.layout.compact(rows.kept))
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


def without(values: Tensor, gone: Tensor, layout: Layout) -> Tensor:
    """The values with zeros in some rows; ``gone`` (K,) says which."""
    return values.masked_fill(along_rows(gone, layout, values.ndim), 0)


def sliced_again(full: Tensor, rows: RowSet, layout: Layout) -> RowSlice:
    """The kept rows of a full-size gradient."""
    return taken_once(gather(full, rows, layout), rows, layout, full.shape)


def taken_once(values: Tensor, rows: RowSet, layout: Layout, shape: Sequence[int]) -> RowSlice:
    """A gradient of values taken out of a full-size one: a row that repeats counts once, and one that fell out not."""
    if not rows.unique:
        values = without(values, rows.again, layout.compact(rows.kept))
    return RowSlice(values, rows, layout, shape)


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
