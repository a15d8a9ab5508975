"""Embedding tables, and bags of embeddings: each row of a batch reads the entries of its own indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rowprop.backprop.rules.indexing import rows_at
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, NeedsAllRows, RowSlice, look


@rule("embedding_dense_backward", positions=True)
def embedding_backward(op: Any, g: RowSlice, indices: Tensor, num: Any, padding_idx: Any, by_freq: bool) -> Any:
    """The table's gradient contracts over the rows."""
    if g.layout.holds(g.ndim - 1):
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
    _check_bags(g, by_freq, sparse)
    sizes, maxima = _of_bags(g, sizes), _of_bags(g, maxima)
    if mode == _MAX:  # the largest entries were noted in the forward, so no index is read
        return op(g.values, indices, offsets, bag_of, sizes, maxima, num, by_freq, mode, sparse, weights, *rest)
    place, bag, first = _kept_bags(g, offsets, indices)
    kept = indices[place], first, bag, sizes, maxima
    return op(g.values, *kept, num, by_freq, mode, sparse, None if weights is None else weights[place], *rest)


@rule("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    op: Any, g: Any, indices: Tensor, bag_of: Tensor, sizes: Tensor, maxima: Tensor, num: Any, by_freq: bool, mode: int,
    weights: Tensor | None, *rest: Any,
) -> Any:  # fmt: skip
    """The same without offsets: the indices are in the order of their bags."""
    _check_bags(g, by_freq)
    sizes, maxima = _of_bags(g, sizes), _of_bags(g, maxima)
    if mode == _MAX:
        return op(g.values, indices, bag_of, sizes, maxima, num, by_freq, mode, weights, *rest)
    offsets = torch.searchsorted(bag_of, torch.arange(g.shape[0], device=bag_of.device, dtype=bag_of.dtype))
    place, bag, _ = _kept_bags(g, offsets.to(bag_of.dtype), indices)
    kept = indices[place], bag, sizes, maxima
    return op(g.values, *kept, num, by_freq, mode, None if weights is None else weights[place], *rest)


@rule("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(
    op: Any, g: Any, table: Tensor, indices: Tensor, offsets: Tensor, bag_of: Tensor, *rest: Any
) -> Any:
    """Each index of a kept bag has a weight of its own; these indices become the rows."""
    _check_bags(g)
    place, bag, first = _kept_bags(g, offsets, indices)
    values = op(g.values, table, indices[place], first, bag, *rest)
    return rows_at(g, values, place, indices.shape, 0, unique=g.rows.unique)


_MAX = 2  # the mode of an embedding bag that takes the largest entries


def _check_bags(g: Any, by_freq: bool = False, sparse: bool = False) -> None:
    if type(g) is not RowSlice or g.dim != 0:
        raise NeedsAllRows("the batch lies in the embedding's width")
    if by_freq or sparse:
        raise NeedsAllRows("the indices of all rows are counted, or listed in a sparse gradient")


def _of_bags(g: RowSlice, saved: Tensor) -> Tensor:
    """What the forward saved per bag, for the kept bags. CUDA saves an entry too many with a last offset."""
    return g.take(saved[: g.shape[0]], 0) if saved.numel() else saved


def _kept_bags(g: RowSlice, offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The places of the indices in the kept bags, for each of these indices its bag, and the kept bags' offsets."""
    look(offsets, "the number of indices in the kept bags")
    bags, kind = g.shape[0], torch.promote_types(indices.dtype, offsets.dtype)
    ends = torch.cat([offsets[1:], offsets.new_full((1,), indices.numel())])[:bags]
    starts = g.take(offsets[:bags], 0)
    lengths = g.take(ends, 0) - starts
    bag = torch.arange(starts.numel(), device=starts.device).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    place = torch.arange(bag.numel(), device=starts.device) - first[bag] + starts[bag]
    return place, bag.to(kind), first.to(kind)
