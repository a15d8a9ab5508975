"""K rows of a tensor of full shape: taking them out of a full-size tensor, and adding them back into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout, view


class RowSet:
    """Which rows one pick kept: ``index`` (K,) int64 into N rows, K at least 1. Compared by identity."""

    __slots__ = ("batchnorm", "copying", "index", "kept", "last", "num_rows", "recompute", "unique")

    def __init__(self, index: Tensor, num_rows: int, *, unique: bool, batchnorm: str) -> None:
        self.index = index
        self.num_rows = num_rows
        self.kept = index.numel()
        self.unique = unique  # False: repeats are possible, and only ops linear in the gradient may stay sliced
        self.batchnorm = batchnorm
        self.copying = False  # while autograd undoes an in-place op on a view: its copies are for itself
        self.last: tuple[Any, Tensor, Tensor] | None = None  # what gather() took last, and from where
        self.recompute: Callable[[Tensor, Layout], Tensor] | None = None  # how to gather while a graph is traced


class RowSlice:
    """What a rule works on: the K rows' ``values``, and where they lie in the full ``shape``."""

    __slots__ = ("layout", "memory_format", "rows", "shape", "values")

    def __init__(self, values: Tensor, rows: RowSet, layout: Layout, shape: Sequence[int]) -> None:
        self.values = values
        self.rows = rows
        self.layout = layout
        self.shape = tuple(shape)
        self.memory_format: torch.memory_format | None = None  # channels-last, where a formula asked for just that

    @property
    def dim(self) -> int:
        """The dimension the rows lie in."""
        return self.layout.dim

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def take(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """The kept rows of a full-size plain tensor, its rows lying in ``dim`` (default: where this gradient's do)."""
        return gather(tensor, self.rows, self.layout if dim is None else self.layout.at(dim))

    def like(self, values: Tensor, layout: Layout | None = None) -> RowSlice:
        """A sliced result of the same rows; its full shape follows from the values'."""
        layout = self.layout if layout is None else layout
        shape = list(values.shape)
        shape[layout.dim] = layout.size
        return RowSlice(values, self.rows, layout, shape)

    def kept_shape(self, shape: Sequence[int], layout: Layout | None = None) -> list[int]:
        """A full shape with only the kept rows left in it."""
        return (layout or self.layout).kept_shape(shape, self.rows.kept)

    def aligned(self, other: RowSlice) -> bool:
        """Whether both, of the same rows and sizes, hold them at the same place, counted from the last dimension."""
        a, b = self.layout, other.layout
        return a.dim - self.ndim == b.dim - other.ndim and a.outer == b.outer

    def coarsened(self, layout: Layout) -> RowSlice:
        """This gradient, sliced over larger rows: each of these rows is a part of one row of ``layout``.

        ``layout`` has the same dimension and size. How many of its rows are kept is known only by looking, which waits
        for a device.
        """
        index, inner = self.rows.index, layout.inner
        rows, slot = cast(Any, torch).unique(index // inner % layout.num_rows, return_inverse=True)
        place = (index // (inner * layout.num_rows) * rows.numel() + slot) * inner + index % inner
        out = self.values.new_zeros(layout.kept_shape(self.shape, rows.numel()))
        out.index_add_(layout.dim, place, self.values)
        coarse = RowSet(rows, layout.num_rows, unique=True, batchnorm=self.rows.batchnorm)
        return RowSlice(out, coarse, layout, self.shape)

    def dense(self) -> Tensor:
        """Scatter into zeros; repeated rows add up."""
        if self.memory_format is None:
            return self.add_into(self.values.new_zeros(self.shape))
        return self.add_into(self.values.new_zeros(self.shape).contiguous(memory_format=self.memory_format))

    def add_into(self, out: Tensor, alpha: Any = 1) -> Tensor:
        """Add the kept rows to a full-size plain tensor, in place."""
        return scatter_add(out, self.values, self.rows.index, self.layout, alpha)


class Zeros:
    """A full-size tensor of zeros made from a sliced gradient: not allocated, and in no layout until it is written to.

    Views of it that cover it whole share ``written``, a cell that holds what one of them was filled with. ``rows`` are
    those of the gradient it was made from.
    """

    __slots__ = ("device", "dtype", "rows", "shape", "written")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        rows: RowSet,
        written: list[RowSlice | Tensor] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.rows = rows
        self.written = [] if written is None else written

    def view(self, shape: Sequence[int]) -> Zeros:
        """The same zeros in another shape of as many elements."""
        return Zeros(shape, self.dtype, self.device, self.rows, self.written)

    def split(self) -> RowSlice:
        """Make them, flat, zeros of the kept rows, which are taken to be the outermost part of this memory."""
        rows = self.rows
        inner = prod(self.shape) // rows.num_rows
        values = torch.zeros(rows.kept * inner, dtype=self.dtype, device=self.device)
        flat = RowSlice(values, rows, Layout(0, rows.num_rows, 1, inner), (prod(self.shape),))
        self.written.append(flat)
        return flat

    def content(self) -> RowSlice | Tensor | Zeros:
        """What they are by now."""
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
        """The tensor itself; the views of it see what is written to it from now on."""
        content = self.content()
        if type(content) is Zeros:
            content = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.written.append(content)
        elif type(content) is RowSlice:
            content = self.written[0] = content.dense()
        return cast(Tensor, content)


class NeedsAllRows(Exception):
    """Raised within a rule where the op has to run at full size; the message is the reason, as :class:`Densify` has."""


def gather(tensor: Tensor, rows: RowSet, layout: Layout) -> Tensor:
    """The kept rows of a full-size plain tensor; the result is not to be written to.

    A convolution saves as its input the very activation that the layer before it saved as its result, and their
    backwards follow one another, so the last gather is remembered until the next.
    """
    if tensor.layout is not torch.strided:
        raise NeedsAllRows("rows would have to be taken from a sparse tensor")
    if rows.recompute is not None:
        return rows.recompute(tensor, layout)
    if type(tensor) is not Tensor or tensor.is_meta:  # no memory of its own to be known by
        return gather_plain(tensor, rows.index, layout)
    if tensor.is_conj() or tensor.is_neg():  # the same memory as the tensor without the flag, and other values
        return gather_plain(tensor, rows.index, layout)
    known = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version, layout)  # pyright: ignore[reportPrivateUsage]
    if rows.last is None or rows.last[0] != known:
        # The source is kept too: while it lives, no other tensor can have its address.
        rows.last = known, tensor, gather_plain(tensor, rows.index, layout)
    return rows.last[2]


def gather_plain(tensor: Tensor, index: Tensor, layout: Layout) -> Tensor:
    """In the order that the tensor's memory has, so that kernels find the strides they expect.

    What is expanded stays so: its stride of 0 has no place in that order, and a kernel that found a dimension of
    stride 1 in the full tensor (fused attention reads the width so, and does not look) finds it again.

    A lazy conjugate or negative is a flag. Matrix products and triangular solves are handed a tensor with its flag, and
    kernels that are called within a tensor subclass read the memory below the flag. So the flag is taken off first, and
    its meaning is computed on the kept rows.
    """
    if tensor.is_conj():
        return gather_plain(tensor.conj(), index, layout).conj_physical()
    if tensor.is_neg():
        return gather_plain(cast(Any, torch)._neg_view(tensor), index, layout).neg()
    if not tensor.is_contiguous():
        expanded = [d for d, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[d] > 1]
        if expanded:
            kept_shape = layout.kept_shape(tensor.shape, index.numel())
            for d in expanded:
                tensor = tensor.narrow(d, 0, 1)
            if layout.dim not in expanded:
                tensor = gather_plain(tensor, index, layout)
            return tensor.expand(kept_shape)
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if order != list(range(tensor.ndim)):
            inverse = sorted(range(tensor.ndim), key=order.__getitem__)
            return gather_plain(tensor.permute(order), index, layout.at(inverse[layout.dim])).permute(inverse)
    dim = layout.dim
    if layout.plain:
        return tensor.index_select(dim, index)
    return _split(tensor, layout).index_select(dim + 1, index).flatten(dim, dim + 2)


def scatter_add(out: Tensor, values: Tensor, index: Tensor, layout: Layout, alpha: Any = 1) -> Tensor:
    """Add ``values`` to the rows ``index`` of ``out``, in place; repeated rows add up."""
    if out.layout is not torch.strided:
        raise NeedsAllRows("rows would have to be added to a sparse tensor")
    dim = layout.dim
    if layout.plain:
        return out.index_add_(dim, index, values, alpha=alpha)
    kept = Layout(dim, index.numel(), layout.outer, layout.inner)
    _split(out, layout).index_add_(dim + 1, index, _split(values, kept), alpha=alpha)
    return out


def _split(tensor: Tensor, layout: Layout) -> Tensor:
    """A view in which the rows have a dimension to themselves."""
    return cast(Any, tensor).unflatten(layout.dim, (layout.outer, layout.num_rows, layout.inner))


@dataclass(frozen=True)
class Densify:
    """A rule's answer where rows mix, or a kernel cannot run on fewer: why the op has to run at full size.

    Where rows do not mix, what comes out is zero but in the kept rows, and goes on sliced: ``dims`` says for each of
    the results in which dimension the rows of ``like`` lie, None for one that has none.
    """

    reason: str
    like: RowSlice | None = None
    dims: tuple[int | None, ...] = ()

    def after(self, out: Any) -> Any:
        """What comes of the op's results at full size."""
        g = self.like
        if g is None or not g.rows.unique:  # a row that is there twice would be taken twice
            return out
        results = zip(out, self.dims, strict=True)
        return tuple(r if dim is None or r is None else g.like(g.take(r, dim), g.layout.at(dim)) for r, dim in results)
