"""Embedding tables, and bags of embeddings: each row of a batch reads the entries of its own indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rowprop.backprop.backward import ends_at_a_leaf
from rowprop.backprop.rows.refusals import check_readable
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.indexing import rows_at
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call
from rowprop.backprop.watch import note_densified
from rowprop.host import waits


@rule("embedding_dense_backward", positions=True)
def embedding_backward(op: Any, g: RowSlice, indices: Tensor, num: Any, padding_idx: Any, by_freq: bool) -> Any:
    """The table's gradient contracts over the rows; that of a computed table goes on at the entries that were read."""
    if g.layout.holds(g.ndim - 1):
        return Densify("the batch lies in the embedding's width")
    if by_freq:
        return Densify("scale_grad_by_freq counts the indices of all rows; leave it off")
    index = g.take(indices)
    if ends_at_a_leaf() or g.rows.recompute is not None:
        return op(g.values, index, num, padding_idx, False)
    if waits(index) and index.numel() >= num:
        note_densified("embedding_dense_backward", "a computed table has no more entries than are read; use a CPU")
    values = g.values.masked_fill((index == padding_idx).unsqueeze(-1), 0).flatten(0, -2)
    return rows_at(g, values, index.flatten(), [num, g.shape[-1]], 0, unique=False)


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_bag_backward(op: Any, g: Any, *args: Any) -> Any:
    """The table's gradient contracts over the bags."""
    call = Call(op, (g, *args), {})
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch lies in the embedding's width")
    if call.scale_grad_by_freq or call.first("sparse"):
        counted = "the indices of all rows are counted, or listed in a sparse gradient"
        return Densify(f"{counted}; leave scale_grad_by_freq and sparse off")
    kept: dict[str, Any] = {}
    for name in ("bag_size", "maximum_indices"):  # CUDA saves a bag too many with a last offset
        saved = getattr(call, name)
        kept[name] = g.take(saved[: g.shape[0]], 0) if saved.numel() else saved
    if call.mode != _MAX:  # the largest entries were noted in the forward, so no index is read
        offsets = call.first("offsets")
        if offsets is None:  # the indices are in the order of their bags
            bags = torch.arange(g.shape[0], device=call.offset2bag.device, dtype=call.offset2bag.dtype)
            offsets = torch.searchsorted(call.offset2bag, bags).to(bags.dtype)
        place, kept["offset2bag"], first = _kept_bags(g, offsets, call.indices)
        kept["indices"] = call.indices[place]
        if "offsets" in call.places:
            kept["offsets"] = first
        if call.per_sample_weights is not None:
            kept["per_sample_weights"] = call.per_sample_weights[place]
    return call.run(g.values, **kept)


@rule("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(
    op: Any, g: Any, table: Tensor, indices: Tensor, offsets: Tensor, bag_of: Tensor, *rest: Any
) -> Any:
    """Each index of a kept bag has a weight of its own; these indices become the rows."""
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch lies in the embedding's width")
    place, bag, first = _kept_bags(g, offsets, indices)
    values = op(g.values, table, indices[place], first, bag, *rest)
    return rows_at(g, values, place, indices.shape, 0, unique=g.rows.unique)


@rule("_segment_reduce_backward")
def segment_reduce_backward(op: Any, g: Any, out: Any, data: Any, reduce: str, **options: Any) -> Any:
    """Segments of a dimension that holds no rows; or the segments are the rows, as the nodes of graphs."""
    axis = options.get("axis", 0)
    if type(g) is not RowSlice or RowSlice in (type(out), type(data)) or (g.dim == axis and not g.layout.plain):
        return Densify("the batch lies in the segments")
    ends = {name: options[name] for name in ("lengths", "offsets") if options.get(name) is not None}
    if g.dim != axis:
        kept = {name: g.take(t, g.dim) if g.dim < axis else t for name, t in ends.items()}
        return g.like(op(g.values, g.take(out), g.take(data), reduce, **options | kept))
    if axis > 0:
        return Densify("the segments are rows of several batches")
    offsets = ends["offsets"] if "offsets" in ends else ends["lengths"].cumsum(0) - ends["lengths"]
    entries = offsets.new_empty(()).expand(data.shape[0])
    place, segment, _ = _kept_bags(g, offsets, entries)
    lengths = torch.zeros_like(g.rows.index).index_add_(0, segment, torch.ones_like(segment))
    kept = {**options, "lengths": lengths, "offsets": None}
    values = op(g.values.contiguous(), g.take(out), data[place], reduce, **kept)
    return rows_at(g, values, place, data.shape, 0, unique=g.rows.unique)


_MAX = 2  # the mode of an embedding bag that takes the largest entries


def _kept_bags(g: RowSlice, offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The places of the indices in the kept bags, for each of these indices its bag, and the kept bags' offsets."""
    check_readable(offsets, "the number of indices in the kept bags")
    bags, kind = g.shape[0], torch.promote_types(indices.dtype, offsets.dtype)
    ends = torch.cat([offsets[1:], offsets.new_full((1,), indices.numel())])[:bags]
    starts = g.take(offsets[:bags], 0)
    lengths = g.take(ends, 0) - starts
    bag = torch.arange(starts.numel(), device=starts.device).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    place = torch.arange(bag.numel(), device=starts.device) - first[bag] + starts[bag]
    return place, bag.to(kind), first.to(kind)
