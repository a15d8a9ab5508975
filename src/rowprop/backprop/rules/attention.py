"""Fused attention: each row attends within itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rowprop.backprop.rowgrad import Sliced
from rowprop.backprop.rules.registry import densify, rule


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
    if type(g) is not Sliced or g.dim != 0:
        return densify("the batch is not the first dimension")
    if dropout_p > 0:
        return densify("dropout inside the kernel depends on where a row stood in the batch")
    if isinstance(attn_mask, Tensor) and attn_mask.ndim == 4 and attn_mask.shape[0] == g.shape[0]:
        attn_mask = g.take(attn_mask)
    kept = [g.take(t) for t in (query, key, value, out, logsumexp)]
    grads = op(g.values, *kept, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return tuple(g.like(t) for t in grads)
