"""flex_attention: attention with scores and masks that the user writes as functions of the place in the batch.

Op by op, a custom function of torch calls the op ``flex_attention_backward``. In a compiled model, the op stands in the
backward graph. Both come to the same rule here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rules.attention import at_all_tokens, dense
from rowprop.backprop.rules.registry import function_rule, rule
from rowprop.backprop.sliced import Densify, RowSlice


@rule(maybe=("flex_attention_backward",))
def flex_attention_backward(
    op: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad: Any, grad_logsumexp: Any,
    score: Callable[..., Any], joint: Callable[..., Any], blocks: tuple[Any, ...], scale: float, options: Any,
    score_tensors: tuple[Any, ...] = (), mask_tensors: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Each row attends within itself; a score or a mask that asks for the row is told the row's place in the batch."""
    given = [g for g in (grad, grad_logsumexp) if g is not None]
    g = given[0]
    if any(type(x) is not RowSlice or x.dim != 0 or x.layout != g.layout for x in given):
        return Densify("the output and its log-sum-exp are not sliced alike, with the batch in front")
    size = g.shape[0]

    def kept(tensor: Any) -> Any:
        return g.take(tensor, 0) if isinstance(tensor, Tensor) and tensor.shape[0] == size else tensor

    *lists, mask = blocks
    place = g.take(torch.arange(size, device=g.values.device), 0)
    query_grad, key_grad, value_grad, captured = op(
        *(kept(tensor) for tensor in (query, key, value, out, logsumexp)),
        *(None if x is None else x.values for x in (grad, grad_logsumexp)),
        _told(score, 1),
        _told(joint, 1),
        (*(kept(tensor) for tensor in lists), _told(mask, 0)),
        scale,
        options,
        (*score_tensors, place),
        (*mask_tensors, place),
    )
    both = (key_grad, value_grad) if key.shape[0] != size else (g.like(key_grad), g.like(value_grad))
    return g.like(query_grad), *both, tuple(captured)[:-1]


def _told(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The user's function. Its argument ``at`` counts kept rows; the function is given the row's place in the batch."""

    def call(*args: Any) -> Any:
        *given, place = args
        given[at] = torch.ops.aten.index.Tensor(place, [given[at]])
        results = function(*given)
        return [*results, None] if isinstance(results, (list, tuple)) else results  # a gradient per captured tensor

    return call


@function_rule("torch._higher_order_ops.flex_attention.FlexAttentionAutogradOp", positions=True)
def flex_attention(node: Any, backward: Any, grad: Any, grad_logsumexp: Any = None, *_: Any) -> Any:
    """Unpack what torch 2.13 saves: the operands, the largest scores, 16 parts of the mask, captured tensors."""
    from torch._higher_order_ops import utils

    saved: tuple[Any, ...] = cast(Any, utils).saved_values(node)
    operands, largest, blocks, tensors = saved[:5], saved[5], saved[6:22], saved[22:]
    sizes = blocks[:2] + blocks[-2:]
    if not isinstance(largest, Tensor) or len(blocks) < 16 or any(isinstance(size, Tensor) for size in sizes):
        return Densify("flex_attention does not save what it saves in torch 2.13")
    both = grad, grad_logsumexp
    tokens = next((g for g in both if type(g) is RowSlice and g.layout.minor), None)
    if tokens is not None:
        some = [_of_sequences(g) for g in both]
        whole = any(type(g) is Tensor for g in some)
        results = backward(*map(dense, both), None) if whole else flex_attention(node, backward, *some)
        if type(results) is Densify:
            return results
        query, key = operands[:2]
        return at_all_tokens("flex_attention", tokens, results, (0, 2), query.shape[::2] == key.shape[::2])
    count = node._score_mod_other_buffers_len
    outcome = flex_attention_backward(
        torch.ops.higher_order.flex_attention_backward,
        *(*operands, grad, grad_logsumexp, node._fw_graph, node._joint_graph, (*blocks, node._mask_graph)),
        *(node.scale, node.kernel_options, tensors[:count], tensors[count:]),
    )
    return outcome if type(outcome) is Densify else (*outcome[:3], *[None] * 6, *outcome[3])


def _of_sequences(g: Any) -> Any:
    """A gradient of tokens as one of the sequences that keep a token; dense if all do, or if sequences are no part."""
    if type(g) is not RowSlice or not g.layout.minor:
        return g
    place = next((place for place, part in enumerate(g.layout.parts) if part.dim == 0), None)
    coarse = None if place is None else g.coarsened(place)
    return coarse if coarse is not None and coarse.rows.kept < coarse.rows.num_rows else g.dense()
