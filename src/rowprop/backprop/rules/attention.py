"""Fused attention: each row attends within itself.

Queries, keys, values, the output and its log-sum-exp have the batch in front, whatever the kernel: (N, heads, time,
width) in torch's own calls, (N, time, heads, width) in the kernels' own. Dropout is drawn inside the kernel from a
counter that knows the place of a row in the batch. A kernel that is given fewer rows would draw another mask, so under
dropout it runs at full size and its results go on sliced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rules.registry import op_name, rule
from rowprop.backprop.sliced import Densify, RowSlice, look, sliced_again, whole_rows
from rowprop.backprop.watch import note_cut


@dataclass(frozen=True)
class _Places:
    """Where a kernel's backward takes its arguments, counted behind the gradient; None: it takes no such argument."""

    rows: tuple[int, ...]
    """Queries, keys, values, the output and its log-sum-exp."""
    lengths: tuple[int, ...]
    """The lengths of the queries and of the keys, where sequences are packed."""
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
        dropout=places["dropout_p"],
        bias=next(iter(found("attn_bias", "bias")), None),
        bias_grad=next(iter(found("grad_input_mask", "bias_requires_grad")), None),
    )


@rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    maybe=("_cudnn_attention_backward",), positions=True,
)  # fmt: skip
def attention_backward(op: Any, g: Any, *args: Any, **kwargs: Any) -> Any:
    """Each row attends within itself; a mask or bias that broadcasts over the batch stays whole."""
    at = _places(op)
    if type(g) is RowSlice and g.layout.minor:
        return _of_queries(op, at, g, args, kwargs)
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch is not the first dimension")
    if any(args[place] is not None for place in at.lengths):
        return Densify("sequences of different lengths are packed one after another")
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
    if any(args[place] is not None for place in at.lengths):
        return Densify("sequences of different lengths are packed one after another")
    query, key = args[at.rows[0]], args[at.rows[1]]
    time = next((d for d in (1, 2) if g.layout.parts == (Part(0, g.shape[0]), Part(d, g.shape[d]))), None)
    if time is None or query.ndim != 4:
        return attention_backward(op, whole_rows(g), *args, **kwargs)
    cut = g.rows.attention == "cut" and key.shape[time] == g.shape[time]
    if cut:
        note_cut(op_name(op))
    if op is not _CPU or time != 2 or args[at.dropout] > 0:
        others = () if at.bias_grad is None else (None,)
        return Densify("the kernel takes all tokens", g, (0, 0 if cut else None, 0 if cut else None, *others))
    query, key, value, out, logsumexp, _, causal = args
    mask = kwargs.get("attn_mask")
    look(g.rows.index, "how many tokens each sequence keeps")
    room = max(1, query.numel() // key.shape[2]) if causal or mask is not None else query.numel()
    groups = g.rows.once(_groups, g.rows.index, g.shape[0], g.shape[2], room, _WASTED_FLOPS // (10 * key[0].numel()))
    at_queries = [g.values, *(g.take(tensor) for tensor in (query, out, logsumexp))]
    dq, of_keys = torch.empty_like(g.values), (torch.zeros_like(key), torch.zeros_like(value))
    for group in groups:
        grad, q, o, lse = (group.padded(tensor) for tensor in at_queries)
        lines = None if mask is None else _mask_of(mask, group.sequences[:, None], group.times)
        if causal:
            later = torch.arange(key.shape[2]) > group.times[:, None, :, None]
            lines = torch.zeros(later.shape, dtype=query.dtype).masked_fill_(later, -math.inf)
        if group.padding is not None:
            grad = grad.masked_fill(group.padding[:, None, :, None], 0)
        everywhere = group.sequences.numel() == g.shape[0]
        k, v = (key, value) if everywhere else (t.index_select(0, group.sequences) for t in (key, value))
        found = op(grad, q, k, v, o, lse, 0.0, False, attn_mask=lines, scale=kwargs.get("scale"))
        group.put(dq, found[0])
        if everywhere:
            of_keys = found[1:]
        else:
            for out, part in zip(of_keys, found[1:], strict=True):
                out.index_copy_(0, group.sequences, part)
    if cut:
        return g.like(dq), *(sliced_again(g, d, 0) for d in of_keys)
    some = torch.cat([group.sequences for group in groups])
    if some.numel() == g.shape[0]:
        return g.like(dq), *of_keys
    rows = g.rows.derived(some, g.shape[0], unique=True)  # the other sequences keep no token: nothing reaches them
    return g.like(dq), *(RowSlice(d.index_select(0, some), rows, Layout(0, g.shape[0]), d.shape) for d in of_keys)


_WASTED_FLOPS = 4_000_000
"""The call of a kernel takes about the time of these FLOPs, so a group may pad for as many to save a call."""


@dataclass(frozen=True)
class _Group:
    """Sequences that keep nearly as many tokens; where one keeps fewer than the most, its last token is repeated."""

    sequences: Tensor
    """Shape (sequences,)."""
    entries: Tensor
    """The places of the tokens among the kept ones, shape (sequences, tokens)."""
    times: Tensor
    """Where the tokens are in their sequences, shape (sequences, tokens)."""
    padding: Tensor | None
    """Which tokens are such repetitions, shape (sequences, tokens); None if there are none."""

    def padded(self, values: Tensor) -> Tensor:
        """Values (K, heads, 1, ...) of the kept tokens as (sequences, heads, tokens, ...)."""
        taken = values.squeeze(2).index_select(0, self.entries.flatten())
        return taken.view(*self.entries.shape, *taken.shape[1:]).transpose(1, 2)

    def put(self, values: Tensor, padded: Tensor) -> None:
        """Write gradients (sequences, heads, tokens, width) to their places among the kept ones."""
        found = padded.transpose(1, 2)
        if self.padding is None:
            values.index_copy_(0, self.entries.flatten(), found.flatten(0, 1).unsqueeze(2))
        else:
            true = ~self.padding
            values.index_copy_(0, self.entries[true], found[true].unsqueeze(2))


def _groups(index: Tensor, num_sequences: int, length: int, room: int, spare: int) -> list[_Group]:
    """Kept tokens by their sequences, in few groups that pad little.

    Args:
        index: The kept tokens, shape (K,).
        num_sequences: N.
        length: T.
        room: The most tokens of a group, for the memory that its mask takes; one sequence always fits.
        spare: So many tokens of padding cost no more than one more group.
    """
    times, sequences = index % length, index // length
    order = sequences.argsort(stable=True)
    counts = sequences.bincount(minlength=num_sequences)
    begins = counts.cumsum(0) - counts
    both = cast("list[list[int]]", torch.stack([counts, begins], 1).tolist())
    found = sorted(((count, begin, number) for number, (count, begin) in enumerate(both) if count), reverse=True)
    members: list[list[tuple[int, int, int]]] = []
    kept = 0
    for sequence in found:
        if members:
            group = members[-1]
            padded, padding = (1 + len(group)) * group[0][0], group[0][0] - sequence[0]
            whole = padded - kept - sequence[0]
            little = whole <= 0.02 * padded or (padding <= spare and whole <= 0.2 * padded)
            if little and padded <= room:
                group.append(sequence)
                kept += sequence[0]
                continue
        members.append([sequence])
        kept = sequence[0]
    groups: list[_Group] = []
    for group in members:
        least, most = group[-1][0], group[0][0]
        count, begin, number = torch.tensor(sorted(group, key=itemgetter(2))).T.unsqueeze(2)
        along = torch.arange(most)
        entries = order[begin + torch.minimum(along, count - 1)]
        padding = along >= count if least < most else None
        groups.append(_Group(number.squeeze(1), entries, times[entries], padding))
    return groups


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
