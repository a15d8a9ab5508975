"""Fused attention: each row attends within itself.

Queries, keys, values, the output and its log-sum-exp have the batch in front, whatever the kernel: (N, heads, time,
width) in torch's own calls, (N, time, heads, width) in the kernels' own. Dropout is drawn inside the kernel from a
counter that knows the place of a row in the batch. A kernel that is given fewer rows would draw another mask, so under
dropout it runs at full size and its results go on sliced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.layout import Part
from rowprop.backprop.rules.registry import op_name, rule
from rowprop.backprop.sliced import Densify, RowSlice, gather, look, whole_rows
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
    sequences, times = g.rows.indices(g.layout)
    dq, dk, dv = torch.zeros_like(g.values), torch.zeros_like(key), torch.zeros_like(value)
    for entries, valid in _groups(g, sequences, causal, max(1, query.numel() // key.shape[2])):
        n, t = sequences[entries], times[entries]  # (sequences, queries)
        rows = n[:, 0]

        def of(tensor: Tensor, n: Tensor = n, t: Tensor = t) -> Tensor:
            return tensor.transpose(1, 2)[n, t].transpose(1, 2)

        grad = g.values.squeeze(2)[entries].masked_fill(~valid[..., None, None], 0).transpose(1, 2)
        part = None if mask is None else _mask_of(mask, n, t)
        if causal:
            later = torch.arange(key.shape[2], device=t.device) > t[:, None, :, None]
            part = torch.zeros(later.shape, dtype=query.dtype, device=t.device).masked_fill(later, -math.inf)
        found = op(
            grad, of(query), key[rows], value[rows], of(out), of(logsumexp), 0.0, False,
            attn_mask=part, scale=kwargs.get("scale"),
        )  # fmt: skip
        dq.index_add_(
            0, entries.flatten(), (found[0].transpose(1, 2) * valid[..., None, None]).flatten(0, 1).unsqueeze(2)
        )
        dk.index_copy_(0, rows, found[1])
        dv.index_copy_(0, rows, found[2])
    if cut:
        return g.like(dq), *(RowSlice(gather(d, g.rows, g.layout), g.rows, g.layout, d.shape) for d in (dk, dv))
    return g.like(dq), dk, dv


def _groups(g: RowSlice, sequences: Tensor, causal: bool, room: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Kept tokens by their sequences, in groups of sequences that keep nearly as many.

    Yields:
        The places of the tokens among the kept ones, shape ``(sequences, tokens)``, and which of these places are true:
        where a sequence keeps fewer tokens than its group's longest, its last one is repeated.
    """
    look(sequences, "how many tokens each sequence keeps")
    order = sequences.argsort(stable=True)
    counts = sequences.bincount(minlength=g.shape[0])
    both = cast("list[list[int]]", torch.stack([counts, counts.cumsum(0) - counts], 1).tolist())
    found = sorted((count, begin) for count, begin in both if count > 0)
    while found:
        widest, _ = found[-1]
        group = [found.pop()]
        kept = widest
        while found and (1 + len(group)) * widest <= 1.02 * (kept + found[-1][0]):
            if causal and (1 + len(group)) * widest > room:
                break
            kept += found[-1][0]
            group.append(found.pop())
        along = torch.arange(widest)
        count, begin = (torch.tensor([pair[i] for pair in group])[:, None] for i in (0, 1))
        places = begin + torch.minimum(along, count - 1)
        yield order[places.to(order.device)], (along < count).to(order.device)


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
