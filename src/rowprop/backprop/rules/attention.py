"""Fused attention: each row attends within itself, and of tokens the kept queries attend to all of their sequence.

Queries, keys, values, the output and its log-sum-exp have the batch in front, whatever the kernel: (N, heads, time,
width) in torch's own calls, (N, time, heads, width) in the kernels' own. Dropout is drawn inside the kernel from a
counter that knows the place of a row in the batch. A kernel that is given fewer rows would draw another mask, so under
dropout it runs at full size and its results go on sliced.

So do all kernels but the CPU's where rows are tokens. A causal kernel takes queries that follow one another. Queries at
any place would need a mask with an entry for each query and key, which the plain backward does not have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rules.packed import ALL, of_sequences, same_lengths
from rowprop.backprop.rules.registry import op_name, rule
from rowprop.backprop.sequences import A_CALL
from rowprop.backprop.sliced import Densify, RowSlice, gather_plain, look, taken_once, whole_rows
from rowprop.backprop.watch import note_cut


@dataclass(frozen=True)
class _Places:
    """Where a kernel's backward takes its arguments, counted behind the gradient; None: it takes no such argument."""

    rows: tuple[int, ...]
    """Queries, keys, values, the output and its log-sum-exp."""
    lengths: tuple[int, ...]
    """The lengths of the queries and of the keys, where sequences are packed."""
    longest: tuple[int, ...]
    """The longest of these lengths."""
    dropout: int
    bias: int | None
    bias_grad: int | None
    """Whether the bias gets a gradient: a bool, or the last of several, one for each gradient."""


@cache
def _places(op: Any) -> _Places:
    """Each kernel has an order of its own for the arguments, and the schemas give them the same names."""
    places = {argument.name: place for place, argument in enumerate(op._schema.arguments[1:])}

    def found(*names: str) -> tuple[int, ...]:
        return tuple(places[name] for name in names if name in places)

    return _Places(
        rows=found("query", "key", "value", "out", "logsumexp"),
        lengths=found("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k"),
        longest=found("max_q", "max_k"),
        dropout=places["dropout_p"],
        bias=next(iter(found("attn_bias", "bias")), None),
        bias_grad=next(iter(found("grad_input_mask", "bias_requires_grad")), None),
    )


@rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward",
    "_cudnn_attention_backward", positions=True,
)  # fmt: skip
def attention_backward(op: Any, g: Any, *args: Any, **kwargs: Any) -> Any:
    """Each row attends within itself; a mask or bias that broadcasts over the batch stays whole."""
    at = _places(op)
    if type(g) is RowSlice and any(args[place] is not None for place in at.lengths):
        return _of_packed(op, at, g, args, kwargs)
    if type(g) is RowSlice and (g.layout.minor or _is_one_sequence(g)):
        return _of_queries(op, at, g, args, kwargs)
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch is not the first dimension")
    bias: Any = kwargs.get("attn_mask") if at.bias is None else args[at.bias]
    per_row = isinstance(bias, Tensor) and bias.ndim == 4 and bias.shape[0] == g.shape[0]
    wanted = None if at.bias_grad is None else args[at.bias_grad]
    wanted = wanted if wanted is None or isinstance(wanted, bool) else wanted[-1]
    dims = (0, 0, 0) if wanted is None else (0, 0, 0, 0 if wanted and per_row else None)
    if args[at.dropout] > 0:
        return Densify("dropout inside the kernel depends on where a row stood in the batch", g, dims)
    # Under this variable, cuDNN's attention chooses one of two formats of the log-sum-exp by the strides of queries,
    # keys and values, in the forward and again in the backward (MHA.cpp, use_ragged_in_dense). Views of a packed
    # projection are not contiguous and kept rows are, so the two choices could differ.
    if "cudnn" in op.__name__ and os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
        return Densify("TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 ties the kernel to the strides of all rows", g, dims)
    if wanted and not per_row:
        return Densify("the bias that needs a gradient does not have the shape of the scores")
    kept = list(args)
    for place in at.rows:
        kept[place] = g.take(args[place])
    bias = g.take(bias) if per_row else bias
    if at.bias is not None:
        kept[at.bias] = bias if at.bias_grad is None else _aligned(bias)
    elif per_row:
        kwargs["attn_mask"] = bias
    grads = op(_from_the_start(g.values), *kept, **kwargs)
    return tuple(t if dim is None else g.like(t) for t, dim in zip(grads, dims, strict=True))


_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _of_queries(op: Any, at: _Places, g: RowSlice, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tokens: the gradient reaches the kept queries, and through them every key and value of their sequences.

    Under ``attention="cut"`` keys and values of other tokens take none; a sequence that attends to another sequence of
    another length has nothing to cut.
    """
    query, key = args[at.rows[0]], args[at.rows[1]]
    parts, time = g.layout.parts, 1 if g.layout.holds(1) else 2
    if _is_one_sequence(g) or (query.ndim == 4 and parts == (Part(time, g.shape[time]), Part(0, g.shape[0]))):
        return _time_in_front(op, at, g, args, kwargs)
    # A selected token of whole rows: its keys and values lie in these rows, which are known.
    known = g.rows.lies_in_whole(g.layout)
    if known or query.ndim != 4 or parts != (Part(0, g.shape[0]), Part(time, g.shape[time])):
        return attention_backward(op, whole_rows(g), *args, **kwargs)
    cut = g.rows.attention == "cut" and key.shape[time] == g.shape[time]
    if cut:
        note_cut(op_name(op))
    if op is not _CPU or time != 2 or args[at.dropout] > 0:
        others = () if at.bias_grad is None else (None,)
        return Densify(ALL, g, (0, 0 if cut else None, 0 if cut else None, *others))
    return _on_the_cpu(op, g, cut, args, kwargs.get("attn_mask"), kwargs.get("scale"))


def _of_packed(op: Any, at: _Places, g: RowSlice, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Sequences of any lengths, one after another in one dimension; queries that are not kept have no gradient."""
    time, lengths = g.ndim - 3, [args[place] for place in at.lengths]
    if any(part.dim != time for part in g.layout.parts):
        return Densify("sequences of different lengths are packed one after another")
    plain = args[at.dropout] == 0 and (at.bias is None or args[at.bias] is None)
    if at.longest and time == 0 and plain and all(ends is not None for ends in lengths):

        def kernel(grad: Tensor, kept: list[Tensor], ends: list[Tensor], longest: list[int]) -> Any:
            given = list(args)
            for place, value in zip((*at.rows, *at.lengths, *at.longest), (*kept, *ends, *longest), strict=True):
                given[place] = value
            return op(grad, *given, **kwargs)

        found = of_sequences(op_name(op), g, [args[place] for place in at.rows], lengths, kernel)
        if found is not None:
            return found
    cut = g.rows.attention == "cut" and same_lengths(*lengths)
    if cut:
        note_cut(op_name(op))
    bias = () if at.bias_grad is None else (None,)
    return Densify(ALL, g, (time, *(time if cut else None for _ in range(2)), *bias))


def _is_one_sequence(g: RowSlice) -> bool:
    """Whether the rows are the tokens of a batch that is one sequence, as a packed batch is."""
    return (
        len(g.shape) == 4 and g.shape[0] == 1 and g.dim in (1, 2) and g.layout.parts == (Part(g.dim, g.shape[g.dim]),)
    )


def _time_in_front(op: Any, at: _Places, g: RowSlice, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Losses (T, N), or of one sequence (1, T): the same tokens, counted with the sequences in front."""
    time, rows = g.dim, g.rows.some_parts(g.layout, (1, 0)) if g.layout.minor else g.rows
    layout = Layout(0, rows.num_rows, minor=(Part(time, g.shape[time]),))
    outcome = _of_queries(op, at, RowSlice(g.values.transpose(0, time), rows, layout, g.shape), args, kwargs)
    if type(outcome) is Densify:
        return Densify(outcome.reason, outcome.like and g, tuple(dim if dim is None else time for dim in outcome.dims))
    return tuple(g.like(d.values.transpose(0, time)) if getattr(d, "rows", None) is rows else d for d in outcome)


def _on_the_cpu(op: Any, g: RowSlice, cut: bool, args: Sequence[Any], mask: Tensor | None, scale: float | None) -> Any:
    """The kernel's backward for the kept queries, run by run."""
    query, key, value, out, logsumexp, _, causal = args
    look(g.rows.index, "how many tokens each sequence keeps")
    # A mask has a line for each query of a run: no more memory than the queries themselves.
    room = max(1, query.numel() // key.shape[2]) if causal or mask is not None else query.numel()
    sizes = g.shape[0], g.shape[2], key.shape[2]
    kept: _Queries = g.rows.once(_queries, g.rows.index, sizes, room, 10 * key[0].numel(), causal)
    of_queries = [kept.of(g.values), *(kept.taken(t, g.layout) for t in (query, out, logsumexp))]
    dq = torch.empty_like(of_queries[0])
    # The kernel's results have the width of all heads behind one another, and so tokens are taken out of them fastest.
    of_keys = [
        t.new_empty(len(dq), t.shape[1], t.shape[3]) if cut else t.new_zeros(t.transpose(1, 2).shape)
        for t in (key, value)
    ]
    for run in kept.runs:
        at_queries = [run.part(t).transpose(1, 2) for t in of_queries]
        at_keys = [t[run.sequences] for t in (key, value)]
        lines = None if mask is None else _mask_of(mask, run.numbers, run.times)
        totals: list[Tensor] = []
        for part, num_keys in run.calls:
            if causal:
                later = torch.arange(num_keys) > run.times[:, None, part, None]
                lines = torch.zeros(later.shape, dtype=query.dtype).masked_fill_(later, -math.inf)
            grad, q, o, lse = (t[:, :, part] for t in at_queries)
            k, v = (t[:, :, :num_keys] for t in at_keys)
            found, *more = op(grad, q, k, v, o, lse, 0.0, False, attn_mask=lines, scale=scale)
            run.part(dq)[:, part] = found.transpose(1, 2)
            for total, d in zip(totals, more, strict=False):
                total[:, :, :num_keys].add_(d)
            totals = totals or more
        for d, total in zip(of_keys, (t.transpose(1, 2) for t in totals), strict=True):
            if cut:
                torch.index_select(total.flatten(0, 1), 0, run.keys, out=d[run.queries])
            else:
                d[run.sequences, : total.shape[1]] = total
    if cut:
        return g.like(kept.back(dq)), *(taken_once(kept.back(d), g.rows, g.layout, key.shape) for d in of_keys)
    of_keys = [d.transpose(1, 2) for d in of_keys]
    *_, some = g.rows.together(g.layout, (0,))
    if some.kept == g.shape[0]:
        return g.like(kept.back(dq)), *of_keys
    plain = Layout(0, g.shape[0])  # the other sequences keep no token: nothing reaches them
    return g.like(kept.back(dq)), *(RowSlice(d.index_select(0, some.index), some, plain, d.shape) for d in of_keys)


@dataclass(frozen=True)
class _Run:
    """Queries of neighbouring sequences, equally many of each."""

    sequences: slice
    queries: slice
    """Their places among the queries of all runs."""
    times: Tensor
    """Where the queries are in their sequences, shape (sequences, queries)."""
    calls: list[tuple[slice, int]]
    """Queries of each sequence for one call, and how many keys they see: the others come later. The most come first."""
    keys: Tensor
    """The places of the queries' tokens among the keys of the first call, one sequence after another."""

    @property
    def numbers(self) -> Tensor:
        """The sequences, shape (sequences, 1)."""
        return torch.arange(self.sequences.start, self.sequences.stop)[:, None]

    def part(self, values: Tensor) -> Tensor:
        """This run's part of values of all queries, (sequences, queries, ...)."""
        return values[self.queries].view(*self.times.shape, *values.shape[1:])


@dataclass(frozen=True)
class _Queries:
    """The kept queries, run by run. Where a sequence keeps fewer than another of its run, its last one is repeated."""

    runs: list[_Run]
    entries: Tensor | None
    """Their places among the kept tokens, (queries,); None if they are the kept tokens in their order."""
    indices: list[Tensor]
    """Their sequences, and where they are in these, (queries,) each."""
    index: Tensor
    """Both as one."""
    places: Tensor | None
    """The places of the kept tokens among them, (K,)."""
    repeated: Tensor | None
    """Which are repetitions, (queries,)."""

    def taken(self, tensor: Tensor, layout: Layout) -> Tensor:
        """Their part of a tensor (N, heads, T, ...) of all tokens, (queries, heads, ...)."""
        return gather_plain(tensor, self.index, layout, self.indices).squeeze(2)

    def of(self, grads: Tensor) -> Tensor:
        """Their gradients, (queries, heads, ...), from those of the kept tokens, (K, heads, 1, ...)."""
        grads = grads.squeeze(2)
        if self.entries is None:
            return grads
        found = grads.index_select(0, self.entries)
        return found if self.repeated is None else found.masked_fill_(self.repeated[:, None, None], 0)

    def back(self, found: Tensor) -> Tensor:
        """The kept tokens' results, (K, heads, 1, ...), out of theirs."""
        return (found if self.places is None else found.index_select(0, self.places)).unsqueeze(2)


def _queries(index: Tensor, sizes: tuple[int, int, int], room: int, flops: int, causal: bool) -> _Queries:
    """Kept queries in runs that waste little: on padding, on keys that are hidden, and on calls.

    Args:
        index: The kept tokens, shape (K,).
        sizes: N sequences of T tokens, each with so many keys.
        room: The most tokens of a run; one sequence always fits.
        flops: What a query costs.
        causal: Whether keys that come later are hidden from a query.
    """
    num_sequences, length, num_keys = sizes
    order = index.argsort(stable=True)
    counts = (index // length).bincount(minlength=num_sequences)
    firsts = counts.cumsum(0) - counts
    runs: list[_Run] = []
    found: list[tuple[Tensor, Tensor]] = []
    num_queries = 0
    for begin, end in _spans(cast("list[int]", counts.tolist()), room, flops):
        most = int(counts[begin:end].max())
        many, first, along = counts[begin:end, None], firsts[begin:end, None], torch.arange(most)
        entries = order[first + torch.minimum(along, many - 1)]
        found.append((entries.flatten(), (along >= many).flatten()))
        times = index[entries] % length
        queries = slice(num_queries, num_queries := num_queries + entries.numel())
        calls = [(slice(0, most), num_keys)]
        if causal:
            # Each further call hides keys from some queries, but for ever fewer of them.
            size = math.ceil(most / max(1, math.isqrt(entries.numel() * flops // (5 * A_CALL))))
            parts = (slice(begun, min(begun + size, most)) for begun in reversed(range(0, most, size)))
            calls = [(part, min(int(times[:, part].max()) + 1, num_keys)) for part in parts]
        keys = torch.arange(end - begin)[:, None] * calls[0][1] + times
        runs.append(_Run(slice(begin, end), queries, times, calls, keys.flatten()))
    entries, repeated = (torch.cat(parts) for parts in zip(*found, strict=True))
    indices = [index[entries] // length, index[entries] % length]
    if torch.equal(entries, torch.arange(len(index))):
        return _Queries(runs, None, indices, index, None, None)
    own = repeated.logical_not().nonzero().squeeze(1)
    places = torch.empty_like(index).index_copy_(0, entries[own], own)
    return _Queries(runs, entries, indices, index[entries], places, repeated if len(own) < len(entries) else None)


def _spans(counts: list[int], room: int, flops: int) -> list[tuple[int, int]]:
    """Neighbouring sequences that keep nearly as many tokens, none of them none: the first, and the one behind."""
    spans: list[tuple[int, int]] = []
    tokens = most = 0  # of the last span
    for number, count in enumerate(counts):
        if count and spans and spans[-1][1] == number:
            first, larger = spans[-1][0], max(most, count)
            padded, before = (number + 1 - first) * larger, (number - first) * most - tokens
            wasted = padded - tokens - count
            if padded <= room and wasted <= 0.2 * padded and (wasted - before) * flops <= A_CALL:
                spans[-1] = first, number + 1
                tokens, most = tokens + count, larger
                continue
        if count:
            spans.append((number, number + 1))
            tokens = most = count
    return spans


def _mask_of(mask: Tensor, n: Tensor, t: Tensor) -> Tensor:
    """The lines of a mask, broadcast over (N, heads, T, S), that belong to these queries."""
    mask = mask[(None,) * (4 - mask.ndim)]
    lines = mask.transpose(1, 2)
    n, t = (i if size > 1 else torch.zeros_like(i) for i, size in ((n, lines.shape[0]), (t, lines.shape[1])))
    return lines[n, t].transpose(1, 2)


def _from_the_start(values: Tensor) -> Tensor:
    """The same values at an address that a kernel may load 16 bytes from.

    A part of a wider gradient may begin anywhere. The kernels copy a part that is not contiguous, but a part of a
    single row is.
    """
    return values.clone() if values.storage_offset() % 8 else values


def _aligned(bias: Tensor | None) -> Tensor | None:
    """A bias whose strides are multiples of 16, as the memory-efficient kernel needs them; expanded stays expanded."""
    if bias is None or all(stride % 16 == 0 for stride in bias.stride()[:-1]):
        return bias
    core, width = bias, bias.shape[-1]
    for dim in range(bias.ndim - 1):
        if bias.stride(dim) == 0:
            core = core.narrow(dim, 0, 1)
    return F.pad(core, (0, -width % 16))[..., :width].expand(bias.shape)
