"""flex_attention: attention with scores and masks that the user writes as functions of the place in the batch.

Op by op, a custom function of torch calls the op ``flex_attention_backward``. In a compiled model, the op stands in the
backward graph. Both come to the same rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rules.registry import function_rule, rule
from rowprop.backprop.sequences import Sequences, sequences_of
from rowprop.backprop.sliced import Densify, RowSlice, taken_once, whole_rows
from rowprop.backprop.watch import note_cut


@rule("flex_attention_backward")
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
    """Unpack what torch saves: the operands, the largest scores, the parts of the mask, captured tensors.

    The mask's parts are two lengths, lists of blocks (torch 2.13 has more than 2.12), and the two sizes of a block.
    """
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
    kept = _kept_queries(grad, grad_logsumexp)
    if kept is None:
        both = (whole_rows(g, 0) for g in (grad, grad_logsumexp))
        outcome = flex_attention_backward(op, *operands, *both, *graphs, *more)
    else:
        outcome = _of_queries(op, kept, operands, (grad, grad_logsumexp), graphs, more)
    return outcome if type(outcome) is Densify else (*outcome[:3], *[None] * 6, *outcome[3])


def _kept_queries(*grads: Any) -> Sequences | None:
    """The kept queries by their sequences; None if whole sequences are kept, or if the queries lie in other places."""
    given = [g for g in grads if g is not None]
    g = given[0]
    if any(type(x) is not RowSlice or x.layout != g.layout for x in given):
        return None
    shape, layout = g.shape, g.layout
    if shape[0] == 1 and layout.parts == (Part(2, shape[2]),):  # one sequence, as a packed batch is: it stands in front
        layout = Layout(0, layout.num_rows, minor=(Part(2, shape[2]),))
        g = RowSlice(g.values.transpose(0, 2), g.rows, layout, shape)
    kept = sequences_of(g, 2)
    known = kept is not None and (kept.batch, kept.time) == (Part(0, shape[0]), Part(2, shape[2]))
    return kept if known else None


def _of_queries(
    op: Any, kept: Sequences, operands: tuple[Any, ...], grads: tuple[Any, Any], graphs: Any, more: tuple[Any, ...]
) -> Any:
    """The op without a kernel, for the kept queries of each sequence: torch's own products and functions.

    The lists of blocks are handed on as they are, because only kernels read them.
    """
    (query, key, value, out, logsumexp), (score, joint, (*lists, mask)) = operands, graphs
    first = next(g for g in grads if g is not None)
    rows, place = first.rows, first.dim

    def of_kept(values: Tensor) -> Tensor:
        return values.transpose(0, place).squeeze(2)  # (K, heads, ...)

    at_kept = [of_kept(first.take(tensor)) for tensor in (query, out, logsumexp)]
    given = [None if g is None else of_kept(g.values) for g in grads]
    shared, cut = key.shape[0] != query.shape[0], rows.attention == "cut" and key.shape[::2] == query.shape[::2]
    dq = torch.zeros_like(at_kept[0])
    cuts = [t.new_empty(rows.kept, t.shape[1], t.shape[3]) for t in (key, value)] if cut else []
    whole: list[tuple[Tensor, Tensor]] = []
    found: list[Sequence[Tensor | None]] = []
    groups = kept.groups(10 * key.shape[2] * at_kept[0][0].numel())
    for group in groups:
        n, t = group.sequences, group.times

        def told(function: Callable[..., Any], at: int, n: Tensor = n, t: Tensor = t) -> Callable[..., Any]:
            return _told_of_tokens(function, at, n, t)

        q, o, lse = (group.of(tensor).transpose(1, 2) for tensor in at_kept)
        both = (None if g is None else group.once(group.of(g)).transpose(1, 2) for g in given)
        k, v = (tensor if shared or len(n) == len(tensor) else tensor.index_select(0, n) for tensor in (key, value))
        part, *parts, captured = op(
            q, k, v, o, lse, *both, told(score, 1), told(joint, 1), (*lists, told(mask, 0)), *more
        )
        found.append(captured)
        entries = group.entries.flatten()
        dq.index_add_(0, entries, part.transpose(1, 2).flatten(0, 1))  # zeros where a token is repeated
        for total, d in zip(cuts, parts, strict=False):
            at = torch.arange(len(n), device=n.device)[:, None]
            total.index_copy_(0, entries, d.transpose(1, 2)[at, t].flatten(0, 1))
        if not cut:
            whole.append((parts[0], parts[1]))

    def back(values: Tensor) -> Tensor:
        return values.unsqueeze(2).transpose(0, place)

    if cut:
        note_cut("flex_attention")
        of_keys = [
            taken_once(back(d), rows, first.layout, full.shape) for d, full in zip(cuts, (key, value), strict=True)
        ]
    elif shared:
        of_keys = [torch.stack(d).sum(0) for d in zip(*whole, strict=True)]
    else:
        of_keys = [kept.joined(groups, [t.unsqueeze(1) for t in d]) for d in zip(*whole, strict=True)]
    totals = (None if grads[0] is None else sum(grads) for grads in zip(*found, strict=True))
    return RowSlice(back(dq), rows, first.layout, query.shape), *of_keys, tuple(totals)


def _told_of_tokens(function: Callable[..., Any], at: int, sequences: Tensor, times: Tensor) -> Callable[..., Any]:
    """The user's function. Two of its arguments count sequences and kept queries; it is given their places."""
    index = torch.ops.aten.index.Tensor

    def call(*args: Any) -> Any:
        given = list(args)
        n, t = args[at], args[at + 2]
        given[at], given[at + 2] = index(sequences, [n]), index(times, [n, t])
        return function(*given)

    return call
