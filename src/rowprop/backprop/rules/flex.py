"""flex_attention: attention with scores and masks that the user writes as functions of the place in the batch.

The op ``flex_attention_backward`` is called by a custom function of torch, or it stands in a compiled backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rules.registry import function_rule, rule
from rowprop.backprop.sequences import Group, Sequences, attend, queries_of
from rowprop.backprop.sliced import Densify, RowSlice, whole_rows
from rowprop.backprop.watch import note


@rule("flex_attention_backward")
def flex_attention_backward(
    op: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad: Any, grad_logsumexp: Any,
    score: Callable[..., Any], joint: Callable[..., Any], blocks: tuple[Any, ...], scale: float, options: Any,
    score_tensors: tuple[Any, ...] = (), mask_tensors: tuple[Any, ...] = (),
) -> Any:  # fmt: skip
    """Each row attends within itself; a score or a mask that asks for the row gets the row's place in the batch."""
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
        _of_rows(score, 1),
        _of_rows(joint, 1),
        (*(kept(tensor) for tensor in lists), _of_rows(mask, 0)),
        scale,
        options,
        (*score_tensors, place),
        (*mask_tensors, place),
    )
    both = (key_grad, value_grad) if key.shape[0] != size else (g.like(key_grad), g.like(value_grad))
    return g.like(query_grad), *both, tuple(captured)[:-1]


def _of_rows(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The user's function. Its argument ``at`` counts kept rows; the function is given the row's place in the batch."""

    def call(*args: Any) -> Any:
        *given, place = args
        given[at] = torch.ops.aten.index.Tensor(place, [given[at]])
        results = function(*given)
        return [*results, None] if isinstance(results, (list, tuple)) else results  # a gradient per captured tensor

    return call


@function_rule("torch._higher_order_ops.flex_attention.FlexAttentionAutogradOp", positions=True)
def flex_attention(node: Any, backward: Any, grad: Any, grad_logsumexp: Any = None, *_: Any) -> Any:
    """Unpack what torch saves: the operands, the largest scores, the parts of the mask, captured tensors."""
    # The mask's parts are two lengths, lists of blocks (torch 2.13 has more than 2.12), and the two sizes of a block.
    from torch._higher_order_ops import utils

    saved: tuple[Any, ...] = cast(Any, utils).saved_values(node)
    operands, largest, rest = saved[:5], saved[5], saved[6:]
    sizes = [place for place, part in enumerate(rest) if not isinstance(part, (Tensor, bool, type(None)))][:4]
    if not isinstance(largest, Tensor) or len(sizes) < 4 or (sizes[1], sizes[3]) != (1, sizes[2] + 1):
        return Densify("flex_attention does not save what it saves in torch 2.9 to 2.15")
    blocks, tensors = rest[: sizes[3] + 1], rest[sizes[3] + 1 :]
    op, count = torch.ops.higher_order.flex_attention_backward, node._score_mod_other_buffers_len
    more = node.scale, node.kernel_options, tensors[:count], tensors[count:]
    graphs = node._fw_graph, node._joint_graph, (*blocks, node._mask_graph)
    given = [g for g in (grad, grad_logsumexp) if g is not None]
    alike = all(type(g) is RowSlice and g.layout == given[0].layout for g in given)
    kept = queries_of(given[0], 2) if alike else None
    if kept is None:  # whole sequences are kept, or the queries lie in other places
        both = (whole_rows(g, 0) for g in (grad, grad_logsumexp))
        outcome = flex_attention_backward(op, *operands, *both, *graphs, *more)
    else:
        outcome = _of_queries(op, kept, operands, (grad, grad_logsumexp), graphs, more)
    return outcome if type(outcome) is Densify else (*outcome[:3], *[None] * 6, *outcome[3])


def _of_queries(
    op: Any, kept: Sequences, operands: tuple[Any, ...], grads: tuple[Any, Any], graphs: Any, more: tuple[Any, ...]
) -> Any:
    """The op without a kernel, for the kept queries of each sequence; only kernels read the lists of blocks."""
    score, joint, (*lists, mask) = graphs
    query, key = operands[:2]
    cut = kept.g.rows.attention == "cut" and key.shape[::2] == query.shape[::2]

    def kernel(group: Group, given: list[Tensor], *both: Tensor | None) -> Sequence[Any]:
        def of(function: Callable[..., Any], at: int) -> Callable[..., Any]:
            return _of_tokens(function, at, group.sequences, group.times)

        *found, captured = op(*given, *both, of(score, 1), of(joint, 1), (*lists, of(mask, 0)), *more)
        return *found, *captured

    dq, dk, dv, found = attend(kept, grads, operands, cut, kernel)
    if cut:
        note("cut", "flex_attention")
    totals = (None if captured[0] is None else sum(captured) for captured in zip(*found, strict=True))
    return dq, dk, dv, tuple(totals)


def _of_tokens(function: Callable[..., Any], at: int, sequences: Tensor, times: Tensor) -> Callable[..., Any]:
    """The user's function. Two of its arguments count sequences and kept queries; it is given their places."""
    index = torch.ops.aten.index.Tensor

    def call(*args: Any) -> Any:
        given = list(args)
        n, t = args[at], args[at + 2]
        given[at], given[at + 2] = index(sequences, [n]), index(times, [n, t])
        return function(*given)

    return call
