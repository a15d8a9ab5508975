"""Kept tokens by the sequences that they lie in, for ops in which the tokens of a sequence meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout, Part, layout_of
from rowprop.backprop.sliced import RowSlice, sliced_again

A_CALL = 4_000_000
"""The call of a kernel takes about the time of these FLOPs: fewer that only pad or are masked cost less than a call."""


@dataclass(frozen=True)
class Group:
    """Sequences that keep nearly as many tokens; where one keeps fewer than the most, its last token is repeated."""

    sequences: Tensor
    """Shape (sequences,), in order."""
    entries: Tensor
    """The places of the tokens among the kept ones, shape (sequences, tokens)."""
    times: Tensor
    """Where the tokens are in their sequences, shape (sequences, tokens)."""
    padding: Tensor | None
    """Which tokens are such repetitions, shape (sequences, tokens); None if there are none."""

    def of(self, values: Tensor) -> Tensor:
        """Values (K, ...) of the kept tokens as (sequences, tokens, ...)."""
        return cast(Any, values.index_select(0, self.entries.flatten())).unflatten(0, self.entries.shape)

    def once(self, grads: Tensor) -> Tensor:
        """Gradients (sequences, tokens, ...) with zeros where a token is repeated."""
        if self.padding is None:
            return grads
        return grads.masked_fill(self.padding.view(*self.padding.shape, *[1] * (grads.ndim - 2)), 0)


@dataclass(frozen=True)
class Sequences:
    """The kept tokens of a gradient whose rows' index has some parts in the first dimension, the others in another.

    Attributes:
        g: The gradient.
        batch: The parts in the first dimension, as one part: which sequence.
        time: The parts in the other dimension, as one part: the place in the sequence.
        places: The places of the first of these parts among all parts.
        at: For each kept token its place in the sequence, (K,).
    """

    g: RowSlice
    batch: Part
    time: Part
    places: tuple[int, ...]
    at: Tensor

    @property
    def within(self) -> Part:
        """The kept tokens in the values that hold them."""
        layout = self.g.layout.among(self.g.rows.kept)
        return Part(layout.dim, layout.num_rows, layout.outer, layout.inner)

    def groups(self, flops: int, room: int | None = None) -> list[Group]:
        """The kept tokens in few groups that pad little.

        Args:
            flops: The FLOPs of an op for each token.
            room: The most tokens of a group, for the memory that its mask takes; one sequence always fits.
        """
        order, counts, _ = self.g.rows.together(self.g.layout, self.places)
        return self.g.rows.once(_groups, order, counts, self.at, room, A_CALL // max(1, flops))

    def joined(self, groups: Sequence[Group], values: Sequence[Tensor]) -> Tensor | RowSlice:
        """Results of all groups, one for each sequence, put together; sliced if not every sequence keeps a token.

        Args:
            groups: All groups.
            values: For each group its results, (sequences, the rest of the first dimension, ...).
        """
        *_, rows = self.g.rows.together(self.g.layout, self.places)
        part, every, found = self.batch, rows.kept == self.batch.size, values[0]
        if len(values) > 1:
            place = torch.cat([group.sequences for group in groups])
            place = place if every else torch.searchsorted(rows.index, place)
            found = torch.cat(list(values))
            found = torch.empty_like(found).index_copy_(0, place, found)
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
    both = [_run(g.layout, dim) for dim in (0, time)]
    if both[0] is None or both[1] is None:
        return None
    (places, one), (others, two) = cast(Any, both)
    return Sequences(g, one, two, places, g.rows.some_parts(g.layout, others).index)


def _run(layout: Layout, dim: int) -> tuple[tuple[int, ...], Part] | None:
    """The parts in one dimension and their places, as one part if they follow one another."""
    found = [(place, part) for place, part in enumerate(layout.parts) if part.dim == dim]
    if any(a.inner != b.size * b.inner for (_, a), (_, b) in pairwise(found)):
        return None
    size = prod(part.size for _, part in found)
    return tuple(place for place, _ in found), Part(dim, size, found[0][1].outer, found[-1][1].inner)


def _groups(order: Tensor, counts: tuple[int, ...], at: Tensor, room: int | None, spare: int) -> list[Group]:
    """Groups of sequences that keep nearly as many; ``spare`` tokens of padding cost no more than one more group."""
    begins = accumulate(counts, initial=0)
    found = sorted(
        ((count, begin, n) for n, (count, begin) in enumerate(zip(counts, begins, strict=False)) if count), reverse=True
    )
    members: list[list[tuple[int, int, int]]] = []
    kept = 0
    for sequence in found:
        if members:
            group = members[-1]
            padded, padding = (1 + len(group)) * group[0][0], group[0][0] - sequence[0]
            whole = padded - kept - sequence[0]
            little = whole <= 0.02 * padded or (padding <= spare and whole <= 0.2 * padded)
            if little and (room is None or padded <= room):
                group.append(sequence)
                kept += sequence[0]
                continue
        members.append([sequence])
        kept = sequence[0]
    groups: list[Group] = []
    for group in members:
        least, most = group[-1][0], group[0][0]
        count, begin, number = torch.tensor(sorted(group, key=itemgetter(2))).T.unsqueeze(2)
        along = torch.arange(most)
        entries = order[(begin + torch.minimum(along, count - 1)).to(order.device, non_blocking=True)]
        padding = (along >= count).to(order.device, non_blocking=True) if least < most else None
        groups.append(Group(number.squeeze(1).to(order.device, non_blocking=True), entries, at[entries], padding))
    return groups


def in_front(tensor: Tensor, part: Part) -> Tensor:
    """The tensor with a part of one dimension in front, and the rest of that dimension in its place."""
    dim = part.dim
    split = cast(Any, tensor).unflatten(dim, (part.outer, part.size, part.inner)).movedim(dim + 1, 0)
    return split.flatten(dim + 1, dim + 2)


def put_back(tensor: Tensor, part: Part) -> Tensor:
    """The reverse of :func:`in_front`."""
    dim = part.dim
    split = cast(Any, tensor).unflatten(dim + 1, (part.outer, part.inner)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2)
