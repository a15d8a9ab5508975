"""Tensors that autograd makes beside a gradient: zeros without memory, and copies of a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.gather import along_rows
from rowprop.backprop.rows.layout import Layout, view
from rowprop.backprop.rows.rows import Affine, Lender, RowSet
from rowprop.backprop.rows.slice import RowSlice, without
from rowprop.host import waits


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


def filled(value: Any) -> Any:
    """Zeros as a gradient of the kept rows, if it is known where these lie; anything else as it is."""
    return value.filled() if type(value) is Zeros else value


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
        values = values if gone is None else without(values, gone, self.layout)
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
