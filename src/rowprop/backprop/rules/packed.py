"""Attention within sequences of any lengths that are packed one after another: a kernel is told where each one ends.

Only the sequences that hold a kept token run. These are data, so the host looks at the lengths once for each packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.layout import Layout
from rowprop.backprop.rules.functions import NodeWith
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.sliced import Densify, NeedsAllRows, RowSet, RowSlice, look, sliced_again, taken_once
from rowprop.backprop.watch import note_cut, note_densified

ALL = "the kernel takes all tokens"

Kernel = Callable[[Tensor, "list[Tensor]", "list[Tensor]", "list[int]"], Sequence[Tensor]]
"""Takes the output's gradient; queries, keys, values, the output and its log-sum-exp; where the sequences of queries
and of keys begin and end; the longest of each. Returns the gradients of queries, keys and values, and others."""


@dataclass(frozen=True)
class _Run:
    """Some of the sequences, of queries or of keys, as the kernel takes them: M of T tokens."""

    tokens: Tensor | None
    """Their places among all tokens, (M,); None: all tokens."""
    places: Tensor | None
    """The reverse: for each of all tokens its place among these, (T,)."""
    count: int
    """M."""
    ends: Tensor
    """Where each sequence begins and ends among these tokens, of the kernel's dtype."""
    longest: int

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """These tokens of all."""
        return tensor if self.tokens is None else tensor.index_select(dim, self.tokens)


@dataclass(frozen=True)
class _Runs:
    """The sequences that hold a kept token."""

    queries: _Run
    keys: _Run
    same: bool
    """Whether keys and values are those of the queries' tokens."""
    whole: bool
    """Whether all tokens of these sequences are kept."""
    rows: RowSet | None
    """The tokens of the keys; None: all tokens."""


def of_sequences(name: str, g: RowSlice, operands: list[Tensor], lengths: Sequence[Tensor], kernel: Kernel) -> Any:
    """Run a kernel's backward on the sequences that hold a kept token.

    Args:
        name: The op or function, for the report.
        g: The gradient of the output (T, heads, width), whose rows lie in the first dimension.
        operands: Queries, keys, values, the output (T, heads, width), and its log-sum-exp (heads, T).
        lengths: Where the sequences of the queries and of the keys begin and end.
        kernel: The backward.

    Returns:
        The gradients of queries, keys and values: queries at the kept tokens; keys and values at the tokens of these
        sequences, or under ``attention="cut"`` at the kept ones. None if it cannot be known which sequences these are.
    """
    query, key, value, out, logsumexp = operands
    if tuple(logsumexp.shape) != tuple(query.shape[1::-1]):
        return None
    found = cast("_Runs | None", g.rows.once(_runs, g.rows, g.layout, *lengths, query.shape[0], key.shape[0]))
    if found is None:
        return None
    queries, keys = found.queries, found.keys
    if queries.tokens is None and not found.whole:
        note_densified(name, ALL)
    at = None if queries.places is None else g.take(queries.places)
    grad = g.dense() if at is None else g.values.new_zeros(queries.count, *g.shape[1:]).index_add_(0, at, g.values)
    kept = [queries.of(query), keys.of(key), keys.of(value), queries.of(out), queries.of(logsumexp, 1)]
    dq, dk, dv, *rest = kernel(grad, kept, [queries.ends, keys.ends], [queries.longest, keys.longest])

    def at_kept(full: Tensor) -> RowSlice:
        if at is None:
            return sliced_again(full, g.rows, g.layout)
        return taken_once(full.index_select(0, at), g.rows, g.layout, (query.shape[0], *full.shape[1:]))

    cut = found.same and g.rows.attention == "cut"
    if cut:
        note_cut(name)
    if cut or (found.same and found.whole):
        dk, dv = at_kept(dk), at_kept(dv)
    elif found.rows is not None:
        every = Layout(0, key.shape[0])
        dk, dv = (RowSlice(d, found.rows, every, (key.shape[0], *d.shape[1:])) for d in (dk, dv))
    return at_kept(dq), dk, dv, *rest


def _runs(
    rows: RowSet, layout: Layout, of_queries: Tensor, of_keys: Tensor, num_queries: int, num_keys: int
) -> _Runs | None:
    """The sequences that hold a kept token; None if they cannot be known, or if a kept token lies in none."""
    try:
        look(of_queries, "which packed sequences hold a kept token")
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
    some = [line for line in every if line[0]]
    if sum(line[0] for line in some) < ones.numel():
        return None
    same = num_queries == num_keys and all(line[2:4] == line[4:6] for line in every)
    queries = _run([line[2:4] for line in some], num_queries, of_queries)
    keys = queries if same else _run([line[4:6] for line in some], num_keys, of_keys)
    whole = sum(line[1] for line in some) == queries.count
    return _Runs(
        queries, keys, same, whole, None if keys.tokens is None else rows.derived(keys.tokens, num_keys, unique=True)
    )


def _run(spans: list[list[int]], size: int, ends: Tensor) -> _Run:
    """These sequences among ``size`` tokens; ``ends`` are those of all sequences."""
    lengths = [end - begin for begin, end in spans]
    total, longest, device = sum(lengths), max(lengths), ends.device
    if total == size:
        return _Run(None, None, total, ends, longest)
    new = list(accumulate(lengths, initial=0))
    # The lengths go to the device, and their tokens are counted there: no long copy.
    apart = [begin - place for (begin, _), place in zip(spans, new, strict=False)]
    by, counts = torch.tensor([apart, lengths]).to(device, non_blocking=True)
    along = torch.arange(total, device=device)
    tokens = by.repeat_interleave(counts, output_size=total) + along
    places = along.new_zeros(size).index_copy_(0, tokens, along)
    return _Run(tokens, places, total, torch.tensor(new, dtype=ends.dtype).to(device, non_blocking=True), longest)


def same_lengths(first: Tensor, second: Tensor) -> bool:
    """Whether queries and keys are packed by one and the same tensor of lengths; its values would have to be read."""
    return first is second or (first.data_ptr() == second.data_ptr() and first.shape == second.shape)


@function_rule("torch._library.autograd.GeneratedBackwardFor_torch_attn__varlen_attn_default", positions=True)
def varlen_attn(node: Any, backward: Any, *grads: Any) -> Any:
    """Packed sequences by torch's own function: queries, keys, values, the lengths of both."""
    g, saved = grads[0], node.saved_tensors
    query, key, value, *lengths = saved[:5]
    if type(g) is not RowSlice or any(part.dim != 0 for part in g.layout.parts) or g.shape[0] != query.shape[0]:
        return Densify("the output's gradient is not sliced over packed tokens")
    others = [None] * (len(grads) - 1)  # torch's backward reads no gradient of the log-sum-exp
    if len(saved) == 8:

        def kernel(grad: Tensor, kept: list[Tensor], ends: list[Tensor], longest: list[int]) -> Sequence[Tensor]:
            tensors = (*kept[:3], *ends, *kept[3:], saved[7])
            place = NodeWith(node, saved_tensors=tensors, max_q=longest[0], max_k=longest[1])
            return cast(Any, type(node)).apply(place, grad, *others)

        found = of_sequences("varlen_attn", g, [query, key, value, *saved[5:7]], lengths, kernel)
        if found is not None:
            return found
    note_densified("varlen_attn", ALL)
    dq, dk, dv, *rest = backward(g.dense(), *others)
    if g.rows.attention == "cut" and same_lengths(*lengths) and query.shape[0] == key.shape[0]:
        note_cut("varlen_attn")
        dk, dv = (sliced_again(d, g.rows, g.layout) for d in (dk, dv))
    return sliced_again(dq, g.rows, g.layout), dk, dv, *rest
