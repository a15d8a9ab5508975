"""Fused attention: each row attends within itself.

Queries, keys, values, the output and its log-sum-exp have the batch in front, whatever the kernel: (N, heads, time,
width) in torch's own calls, (N, time, heads, width) in the kernels' own. Dropout is drawn inside the kernel from a
counter that knows where in the batch a row stood, so a kernel told of fewer rows would draw another mask: it runs at
full size, and its results go on sliced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_for_cpu_backward(
    op: Any,
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    """Query, key and value (N, heads, time, width); a mask that broadcasts over the batch stays whole."""
    refusal = _refuse(g, dropout_p)
    if refusal is not None:
        return refusal
    kept = [g.take(t) for t in (query, key, value, out, logsumexp)]
    grads = op(g.values, *kept, dropout_p, is_causal, attn_mask=_mask_rows(g, attn_mask), scale=scale)
    return tuple(g.like(t) for t in grads)


@rule("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")
def flash_attention_backward(
    op: Any,
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """CUDA's flash attention."""
    refusal = _refuse(g, dropout_p, cum_seq_q, cum_seq_k)
    if refusal is not None:
        return refusal
    kept = [g.take(t) for t in (query, key, value, out, logsumexp)]
    grads = op(g.values, *kept, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, *rest, **kwargs)
    return tuple(g.like(t) for t in grads)


@rule("_scaled_dot_product_cudnn_attention_backward", maybe=("_cudnn_attention_backward",))
def cudnn_attention_backward(
    op: Any,
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    philox_seed: Any,
    philox_offset: Any,
    attn_bias: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Attention by cuDNN, which gives a bias no gradient."""
    refusal = _refuse(g, dropout_p, cum_seq_q, cum_seq_k)
    if refusal is not None:
        return refusal
    # With this variable torch chooses between two formats of the log-sum-exp by the strides of queries, keys and
    # values, once in the forward and again in the backward (MHA.cpp, use_ragged_in_dense). Kept rows are contiguous
    # where the views of a packed projection are not, so the two choices could differ.
    if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
        return Densify("TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 ties the kernel to the strides of all rows", g, (0, 0, 0))
    kept = [g.take(t) for t in (query, key, value, out, logsumexp)]
    bias = _mask_rows(g, attn_bias)
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    grads = op(g.values, *kept, philox_seed, philox_offset, bias, *lengths, dropout_p, *rest, **kwargs)
    return tuple(g.like(t) for t in grads)


@rule("_scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(
    op: Any,
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    out: Any,
    logsumexp: Any,
    philox_seed: Any,
    philox_offset: Any,
    dropout_p: float,
    mask: Sequence[bool],
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Memory-efficient attention; its bias has the full shape, expanded where it broadcasts."""
    refusal = _refuse(g, dropout_p, bias=(0 if mask[3] and _per_row(g, attn_bias) else None,))
    if refusal is not None:
        return refusal
    if mask[3] and not _per_row(g, attn_bias):
        return Densify("the bias that needs a gradient does not have the shape of the scores")
    kept = [g.take(t) for t in (query, key, value)]
    bias, out, logsumexp = _aligned(_mask_rows(g, attn_bias)), g.take(out), g.take(logsumexp)
    grads = op(g.values, *kept, bias, out, logsumexp, philox_seed, philox_offset, dropout_p, mask, *rest, **kwargs)
    return *[g.like(t) for t in grads[:3]], g.like(grads[3]) if mask[3] else grads[3]


@rule("_efficient_attention_backward")
def efficient_kernel_backward(
    op: Any,
    g: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    out: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    logsumexp: Any,
    dropout_p: float,
    philox_seed: Any,
    philox_offset: Any,
    mask_type: int,
    bias_grad: bool,
    **kwargs: Any,
) -> Any:
    """The same kernel called by itself."""
    refusal = _refuse(g, dropout_p, cum_seq_q, cum_seq_k, bias=(0 if bias_grad and _per_row(g, bias) else None,))
    if refusal is not None:
        return refusal
    if bias_grad and not _per_row(g, bias):
        return Densify("the bias that needs a gradient does not have the shape of the scores")
    kept = [g.take(t) for t in (query, key, value)]
    bias, out, logsumexp = _aligned(_mask_rows(g, bias)), g.take(out), g.take(logsumexp)
    lengths, noise = (cum_seq_q, cum_seq_k, max_q, max_k), (dropout_p, philox_seed, philox_offset)
    grads = op(g.values, *kept, bias, out, *lengths, logsumexp, *noise, mask_type, bias_grad, **kwargs)
    return *[g.like(t) for t in grads[:3]], g.like(grads[3]) if bias_grad else grads[3]


def _refuse(g: Any, dropout_p: float, *lengths: Any, bias: tuple[int | None, ...] = ()) -> Densify | None:
    """What no such kernel can do on kept rows; ``bias``: where the rows lie in a fourth result, if there is one."""
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch is not the first dimension")
    if any(length is not None for length in lengths):
        return Densify("sequences of different lengths are packed one after another")
    if dropout_p > 0:
        return Densify("dropout inside the kernel depends on where a row stood in the batch", g, (0, 0, 0, *bias))
    return None


def _per_row(g: RowSlice, mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[0] == g.shape[0]


def _mask_rows(g: RowSlice, mask: Any) -> Any:
    """The kept rows of a mask or bias; one that broadcasts over the batch stays whole."""
    return g.take(mask) if _per_row(g, mask) else mask


def _aligned(bias: Tensor | None) -> Tensor | None:
    """A bias whose strides are multiples of 16, as the memory-efficient kernel wants them; expanded stays expanded."""
    if bias is None or all(stride % 16 == 0 for stride in bias.stride()[:-1]):
        return bias
    core, width = bias, bias.shape[-1]
    for dim in range(bias.ndim - 1):
        if bias.stride(dim) == 0:
            core = core.narrow(dim, 0, 1)
    return F.pad(core, (0, -width % 16))[..., :width].expand(bias.shape)
