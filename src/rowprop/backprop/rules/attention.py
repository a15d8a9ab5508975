"""Fused attention: each row attends within itself.

Queries, keys, values, the output and its log-sum-exp have the batch in front, whatever the kernel: (N, heads, time,
width) in torch's own calls, (N, time, heads, width) in the kernels' own. Dropout is drawn inside the kernel from a
counter that knows the place of a row in the batch. A kernel that is given fewer rows would draw another mask, so under
dropout it runs at full size and its results go on sliced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice


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
    maybe=("_cudnn_attention_backward",),
)  # fmt: skip
def attention_backward(op: Any, g: Any, *args: Any, **kwargs: Any) -> Any:
    """Each row attends within itself; a mask or bias that broadcasts over the batch stays whole."""
    at = _places(op)
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
