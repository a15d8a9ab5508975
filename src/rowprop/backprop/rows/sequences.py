"""Kept tokens by their sequences, for ops in which the tokens of a sequence meet.

Sequences lie in two dimensions, (N, T): :class:`Sequences` groups those that keep nearly as many tokens. Or they lie
one after another in one dimension: :func:`packed_of` takes out those that keep a token. The host waits for their
lengths, once for the rows of a pick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.rows.layout import Layout, Part, layout_of
from rowprop.backprop.rows.refusals import NeedsAllRows, check_readable
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice, sliced_again, taken_once
from rowprop.host import waits

A_CALL = 4_000_000  # a kernel's call takes about the time of these FLOPs: fewer that only pad or are masked cost less

Kernel = Callable[..., Sequence[Any]]
"""Attention's backward for one group, of the group, of its queries, keys, values, output and log-sum-exp, with time in
dimension 2, and of the gradients. It returns the gradients of queries, keys and values, and anything else."""


@dataclass(frozen=True)
class Group:
    """Sequences that keep nearly as many tokens; where one keeps fewer than the most, its last token is repeated."""

    sequences: Tensor  # shape (sequences,), in order
    span: slice | None  # the same, where they follow one another
    entries: Tensor  # the places of the tokens among the kept ones, shape (sequences, tokens)
    run: slice | None  # the same, where they follow one another
    times: Tensor  # where the tokens are in their sequences, shape (sequences, tokens)
    padding: Tensor | None  # which tokens are such repetitions, shape (sequences, tokens); None if there are none

    def of(self, values: Tensor) -> Tensor:
        """Values (K, ...) of the kept tokens as (sequences, tokens, ...)."""
        some = values.index_select(0, self.entries.flatten()) if self.run is None else values[self.run]
        return cast(Any, some).unflatten(0, self.entries.shape)

    def part(self, tensor: Tensor) -> Tensor:
        """These sequences of a tensor of all, (N, ...)."""
        return tensor.index_select(0, self.sequences) if self.span is None else tensor[self.span]

    def once(self, grads: Tensor) -> Tensor:
        """Gradients (sequences, tokens, ...) with zeros where a token is repeated."""
        if self.padding is None:
            return grads
        return grads.masked_fill(self.padding.view(*self.padding.shape, *[1] * (grads.ndim - 2)), 0)


@dataclass(frozen=True)
class Sequences:
    """The kept tokens of a gradient whose rows' index has some parts in the first dimension, the others in another."""

    g: RowSlice
    batch: Part  # the parts in the first dimension, as one part: which sequence
    time: Part  # the parts in the other dimension, as one part: the place in the sequence
    places: tuple[int, ...]  # the places of the first of these parts among all parts
    at: Tensor  # for each kept token its place in the sequence, (K,)

    @property
    def within(self) -> Part:
        """The kept tokens in the values that hold them."""
        return self.g.layout.compact(self.g.rows.kept).parts[0]

    def groups(self, flops: int, room: int | None = None, near: bool = False) -> list[Group]:
        """The kept tokens in few groups that pad little, for an op of so many FLOPs for each token.

        ``room`` is the most tokens of a group, for the memory that its mask takes; one sequence always fits. ``near``:
        the sequences of a group follow one another, so that a tensor of them is a view.
        """
        order, counts, _ = self.g.rows.together(self.g.layout.sizes, self.places)
        return self.g.rows.once(_groups, order, counts, self.at, room, A_CALL // max(1, flops), near)

    def joined(self, groups: Sequence[Group], values: Sequence[Tensor]) -> Tensor | RowSlice:
        """The results of each group, (sequences, ...), put together; sliced if not every sequence keeps a token."""
        *_, rows = self.g.rows.together(self.g.layout.sizes, self.places)
        part, every, found = self.batch, rows.kept == self.batch.size, values[0]
        if len(values) > 1:
            order = sorted(range(1, found.ndim), key=found.stride, reverse=True)  # a kernel's heads may lie innermost
            inverse = [0, *(1 + order.index(d) for d in range(1, found.ndim))]
            found = found.new_empty([rows.kept, *(found.shape[d] for d in order)]).permute(inverse)
            for group, value in zip(groups, values, strict=True):
                if every and group.span is not None:
                    found[group.span] = value
                else:
                    place = group.sequences if every else torch.searchsorted(rows.index, group.sequences.contiguous())
                    found.index_copy_(0, place, value)
        out = put_back(found, replace(part, size=rows.kept))
        if every:
            return out
        layout = Layout(part.dim, part.size, part.outer, part.inner)
        return RowSlice(out, rows, layout, (layout.size, *out.shape[1:]))

    def of_kept(self, full: Tensor | RowSlice, time: int) -> RowSlice:
        """The kept tokens' part of a tensor of all tokens, which lie in the same batch and in dimension ``time``."""
        parts = [
            p if p.dim == self.batch.dim else Part(time, p.size, p.outer // self.time.outer, p.inner // self.time.inner)
            for p in self.g.layout.parts
        ]
        full = full.dense() if type(full) is RowSlice else cast(Tensor, full)
        return sliced_again(full, self.g.rows, layout_of(parts))


def sequences_of(g: RowSlice, time: int) -> Sequences | None:
    """The kept tokens by their sequences; None if the rows' index has a part outside the first and this dimension."""
    if g.rows.lies_in_whole(g.layout):
        return None  # a selected token of whole rows, which are known without a count
    if {part.dim for part in g.layout.parts} != {0, time}:
        return None
    first, second = (_parts_in(g.layout, dim) for dim in (0, time))
    if first is None or second is None:
        return None
    return Sequences(g, first[1], second[1], first[0], g.rows.some_parts(g.layout.sizes, second[0]).index)


def queries_of(g: RowSlice, time: int) -> Sequences | None:
    """Attention's kept queries (N, ..., T, ...) by their sequences, be it one, as in a packed batch; None elsewhere."""
    if g.shape[0] == 1 and g.layout.parts == (Part(time, g.shape[time]),):
        layout = Layout(0, g.layout.num_rows, minor=(Part(time, g.shape[time]),))
        g = RowSlice(g.values.transpose(0, time), g.rows, layout, g.shape)
    kept = sequences_of(g, time)
    if kept is None or (kept.batch, kept.time) != (Part(0, g.shape[0]), Part(time, g.shape[time])):
        return None
    return kept


def attend(
    kept: Sequences, grads: Sequence[RowSlice | None], operands: Sequence[Tensor], cut: bool, kernel: Kernel,
    room: int | None = None,
) -> tuple[RowSlice, Any, Any, list[Sequence[Any]]]:  # fmt: skip
    """Run attention's backward for the kept queries of each group; time lies in dimension 2.

    ``grads`` are those of the output and maybe of its log-sum-exp; ``operands`` the queries, keys, values, the output
    and its log-sum-exp, of all tokens. ``cut``: keys and values take no gradient at tokens that are not kept. Returns
    the gradients of queries, keys and values, and what the kernel returns further, for each group.
    """
    query, key, value, out, logsumexp = operands
    g = next(g for g in grads if g is not None)
    rows, layout, place = g.rows, g.layout, g.dim

    def of_kept(values: Tensor) -> Tensor:
        return values.transpose(0, place).squeeze(2)  # (K, heads, ...)

    def back(values: Tensor) -> Tensor:
        return values.unsqueeze(2).transpose(0, place)

    at_kept = [of_kept(g.take(tensor)) for tensor in (query, out, logsumexp)]
    given = [None if g is None else of_kept(g.values) for g in grads]
    shared = key.shape[0] != query.shape[0]
    dq = torch.zeros_like(at_kept[0])
    cuts = [t.new_empty(rows.kept, t.shape[1], t.shape[3]) for t in (key, value)] if cut else []
    whole: list[Sequence[Tensor]] = []
    others: list[Sequence[Any]] = []
    # Copies of keys, values and their gradients take as long as a call from so many entries of a sequence on.
    groups = kept.groups(10 * key.shape[2] * dq[0].numel(), room, near=key[0].numel() > A_CALL // 64)
    for group in groups:
        q, o, lse = (group.of(tensor).transpose(1, 2) for tensor in at_kept)
        both = (None if g is None else group.once(group.of(g)).transpose(1, 2) for g in given)
        k, v = (t if shared else group.part(t) for t in (key, value))
        found, dk, dv, *more = kernel(group, [q, k, v, o, lse], *both)
        others.append(more)
        entries = group.entries.flatten()
        found = found.transpose(1, 2).flatten(0, 1)
        if group.padding is None:
            dq.index_copy_(0, entries, found)
        else:  # zeros where a token is repeated
            dq.index_add_(0, entries, found)
        for total, d in zip(cuts, (dk, dv), strict=False):
            keys = torch.arange(len(d), device=d.device)[:, None] * d.shape[2] + group.times
            total.index_copy_(0, entries, d.transpose(1, 2).flatten(0, 1).index_select(0, keys.flatten()))
        if not cut:
            whole.append((dk, dv))
    if cut:
        of_keys = [taken_once(back(d), rows, layout, t.shape) for d, t in zip(cuts, (key, value), strict=True)]
    elif shared:
        of_keys = [torch.stack(d).sum(0) for d in zip(*whole, strict=True)]
    else:
        of_keys = [kept.joined(groups, [t.unsqueeze(1) for t in d]) for d in zip(*whole, strict=True)]
    return RowSlice(back(dq), rows, layout, query.shape), of_keys[0], of_keys[1], others


def _parts_in(layout: Layout, dim: int) -> tuple[tuple[int, ...], Part] | None:
    """The parts in one dimension and their places, as one part if they follow one another."""
    found = [(place, part) for place, part in enumerate(layout.parts) if part.dim == dim]
    if any(a.inner != b.size * b.inner for (_, a), (_, b) in pairwise(found)):
        return None
    size = prod(part.size for _, part in found)
    return tuple(place for place, _ in found), Part(dim, size, found[0][1].outer, found[-1][1].inner)


def _groups(
    order: Tensor, counts: tuple[int, ...], at: Tensor, room: int | None, spare: int, near: bool
) -> list[Group]:
    """Groups of sequences that keep nearly as many; ``spare`` tokens of padding cost no more than one more group."""
    begins = accumulate(counts, initial=0)
    found = [(count, begin, n) for n, (count, begin) in enumerate(zip(counts, begins, strict=False)) if count]
    members: list[list[tuple[int, int, int]]] = []
    kept = most = 0  # tokens of the last group, and of its longest sequence
    for sequence in found if near else sorted(found, reverse=True):
        count = sequence[0]
        if members and (not near or members[-1][-1][2] + 1 == sequence[2]):
            group, larger = members[-1], max(most, count)
            padded, before = (1 + len(group)) * larger, len(group) * most - kept
            padding = padded - kept - count
            little = padding <= 0.02 * padded or (padding - before <= spare and padding <= 0.2 * padded)
            if little and (room is None or padded <= room):
                group.append(sequence)
                kept, most = kept + count, larger
                continue
        members.append([sequence])
        kept = most = count
    groups: list[Group] = []
    ordered = not waits(order) and torch.equal(order, torch.arange(len(order)))
    for group in members:
        least, most = min(group)[0], max(group)[0]
        in_order = sorted(group, key=itemgetter(2))
        first, end = in_order[0][2], in_order[-1][2] + 1
        span = slice(first, end) if end - first == len(group) else None
        count, begin, number = torch.tensor(in_order).T.unsqueeze(2)
        along = torch.arange(most)
        entries = order[(begin + torch.minimum(along, count - 1)).to(order.device, non_blocking=True)]
        padding = (along >= count).to(order.device, non_blocking=True) if least < most else None
        sequences = number.squeeze(1).to(order.device, non_blocking=True)
        run = in_order[0][1]
        run = slice(run, run + entries.numel()) if ordered and span is not None and padding is None else None
        groups.append(Group(sequences, span, entries, run, at[entries], padding))
    return groups


def in_front(tensor: Tensor, part: Part) -> Tensor:
    """The tensor with a part of one dimension in front, and the rest of that dimension in its place."""
    if tensor.is_conj():  # a kernel within a tensor subclass reads the memory below this flag and the next
        tensor = tensor.conj().conj_physical()
    if tensor.is_neg():
        tensor = cast(Any, torch)._neg_view(tensor).neg()
    dim = part.dim
    split = cast(Any, tensor).unflatten(dim, (part.outer, part.size, part.inner)).movedim(dim + 1, 0)
    return split.flatten(dim + 1, dim + 2)


def put_back(tensor: Tensor, part: Part) -> Tensor:
    """The reverse of :func:`in_front`."""
    dim = part.dim
    split = cast(Any, tensor).unflatten(dim + 1, (part.outer, part.inner)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2)


@dataclass(frozen=True)
class Run:
    """Some of the sequences, of queries or of keys, as the kernel takes them: M of T tokens."""

    tokens: Tensor | None  # their places among all tokens, (M,); None: all tokens
    places: Tensor | None  # the reverse: for each of all tokens its place among these, (T,)
    count: int  # M
    ends: Tensor  # where each sequence begins and ends among these tokens, of the kernel's dtype
    longest: int

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """These tokens of all."""
        return tensor if self.tokens is None else tensor.index_select(dim, self.tokens)


@dataclass(frozen=True)
class Packed:
    """The sequences that hold a kept token."""

    queries: Run
    keys: Run
    same: bool  # whether keys and values are those of the queries' tokens
    whole: bool  # whether all tokens of these sequences are kept
    rows: RowSet | None  # the tokens of the keys; None: all tokens
    sequences: list[int] | None  # which sequences these are; None: all of them


def packed_of(
    rows: RowSet, layout: Layout, of_queries: Tensor, of_keys: Tensor, num_queries: int, num_keys: int
) -> Packed | None:
    """The sequences that hold a kept token; None if they cannot be known, or if a kept token lies in none."""
    try:
        check_readable(of_queries, "which packed sequences hold a kept token")
    except NeedsAllRows:
        return None
    ones = torch.ones(layout.kept_shape([num_queries], rows.kept), dtype=torch.int64, device=of_queries.device)
    held = RowSlice(ones, rows, layout, [num_queries]).dense()
    # So many kept ones lie before each token, with and without repeats.
    before = F.pad(torch.stack([held, held.clamp(max=1)]).cumsum(1), (1, 0))
    ends = of_queries.long()
    counts = before[:, ends[1:]] - before[:, ends[:-1]]
    read = torch.cat([counts, ends.unfold(0, 2, 1).T, of_keys.long().unfold(0, 2, 1).T])
    every = cast("list[list[int]]", read.T.tolist())
    numbers = [number for number, line in enumerate(every) if line[0]]
    some = [every[number] for number in numbers]
    if sum(line[0] for line in some) < ones.numel():
        return None
    same = num_queries == num_keys and all(line[2:4] == line[4:6] for line in every)
    spans = [[line[2:4] for line in some], [line[4:6] for line in some]]
    # Both kinds of tokens are those of the same sequences: one without queries may have keys.
    complete = [sum(end - begin for begin, end in of_some) for of_some in spans] == [num_queries, num_keys]
    queries = _run(spans[0], num_queries, of_queries, complete)
    keys = queries if same else _run(spans[1], num_keys, of_keys, complete)
    whole = sum(line[1] for line in some) == queries.count
    held_rows = None if keys.tokens is None else rows.derived(keys.tokens, num_keys, unique=True)
    return Packed(queries, keys, same, whole, held_rows, None if complete else numbers)


def _run(spans: list[list[int]], size: int, ends: Tensor, complete: bool) -> Run:
    """These sequences among ``size`` tokens; ``ends`` are those of all. ``complete``: they hold all tokens."""
    lengths = [end - begin for begin, end in spans]
    total, longest, device = sum(lengths), max(lengths), ends.device
    if complete:
        return Run(None, None, total, ends, longest)
    new = list(accumulate(lengths, initial=0))
    # The lengths go to the device, and their tokens are counted there: no long copy.
    apart = [begin - place for (begin, _), place in zip(spans, new, strict=False)]
    by, counts = torch.tensor([apart, lengths]).to(device, non_blocking=True)
    along = torch.arange(total, device=device)
    tokens = by.repeat_interleave(counts, output_size=total) + along
    places = along.new_zeros(size).index_copy_(0, tokens, along)
    return Run(tokens, places, total, torch.tensor(new, dtype=ends.dtype).to(device, non_blocking=True), longest)
