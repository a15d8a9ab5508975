"""Attention kernels that are Python functions: torch's ``varlen_attn``, and functions of flash-attn 2, 3 and 4.

flash-attn's are recognised by the name of their class and by what they save. The module's name is not used: the
``kernels`` package loads the same classes from modules with generated names. Classes of the same name that save other
things run at full size.

A rule runs the function's own backward on fewer rows or sequences. flash-attn requires a contiguous last dimension,
int32 lengths, a contiguous log-sum-exp and heads padded to a multiple of 8. The saved tensors fulfil this, and taking
rows of them keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.refusals import NeedsAllRows
from rowprop.backprop.rows.sequences import queries_of
from rowprop.backprop.rows.slice import Densify, RowSlice, sliced_again, whole_rows
from rowprop.backprop.rows.zeros import Zeros
from rowprop.backprop.rules.apply import apply_rule
from rowprop.backprop.rules.attention import ALL, DROPOUT, of_sequences, readable_values, same_lengths
from rowprop.backprop.rules.functions import own_backward
from rowprop.backprop.rules.indexing import index, index_add
from rowprop.backprop.rules.registry import RULES, function_rule
from rowprop.backprop.watch import note, note_densified

_ATTENTION = {
    "FlashAttnFunc": (1, 2, ()),
    "FlashAttnKVPackedFunc": (1, 1, ()),
    "FlashAttnQKVPackedFunc": (0, 1, ()),
    "FlashAttnVarlenFunc": (1, 2, ("max_seqlen_q", "max_seqlen_k")),
    "FlashAttnVarlenKVPackedFunc": (1, 1, ("max_seqlen_q", "max_seqlen_k")),
    "FlashAttnVarlenQKVPackedFunc": (0, 1, ("max_seqlen",)),
}
"""Of each function: how many gradients of queries it returns, how many of keys and values, and the names of its longest
lengths. A gradient of queries, keys and values in one tensor counts as one of keys."""

_SHARED = {"softmax_scale", "causal", "window_size", "softcap", "deterministic"}
_OPERANDS = (0, 1, 2, 3, 4)
_VERSIONS: dict[str, tuple[tuple[int, ...], int, tuple[int, int], set[str]]] = {
    "dropout_p": (_OPERANDS, 5, (1, 1), {"alibi_slopes"}),
    "sm_margin": (_OPERANDS, 5, (0, 2), {"attention_chunk"}),
    "shared_kv": ((0, 1, 2, 4, 5), 11, (6, 8), {"return_lse", "score_mod", "score_mod_bwd", "mask_mod"}),
}
"""Versions 2, 3 and 4 of flash-attn, by an option that the others do not have.

Of each: the places of queries, keys, values, output and log-sum-exp among the saved tensors, the place of the first
lengths, how many other tensors a dense and a packed function saves, and further options. The other tensor of version 2
is the random state; those of 3 and 4 belong to uses without a rule, and have to be None.
"""
_INDEXED = {"IndexFirstAxis", "IndexPutFirstAxis", "IndexFirstAxisResidual"}


def _named(names: Collection[str]) -> Callable[[type], bool]:
    return lambda function: function.__name__ in names


def _version(options: dict[str, Any]) -> str:
    return next((name for name in _VERSIONS if name in options), "dropout_p")


def _known(options: dict[str, Any], saved: tuple[Any, ...], longest: tuple[str, ...]) -> list[int] | None:
    """The places of operands and lengths among the saved tensors; None unless a version of flash-attn saves these."""
    version = _version(options)
    operands, first, others, more = _VERSIONS[version]
    places = [*operands, *range(first, first + len(longest))]
    rest = [t for place, t in enumerate(saved) if place not in places]
    held = {name for name, value in options.items() if isinstance(value, Tensor)}
    if (
        len(rest) != others[bool(longest)]
        or any(isinstance(t, Tensor) != (version == "dropout_p") for t in rest)
        or not all(isinstance(saved[place], Tensor) for place in places)
        or not held <= {"alibi_slopes", *longest}  # transformers gives the longest lengths as tensors
        or not options.keys() >= _SHARED.union(longest, more)
        or any(options.get(name) is not None for name in ("score_mod", "mask_mod", "block_sparse_tensors_bwd"))
    ):
        return None
    query, key, value, out, logsumexp, *lengths = cast("list[Tensor]", [saved[place] for place in places])
    *batch, heads, width = query.shape
    of_scores = (heads, *batch) if longest else (*batch[:1], heads, *batch[1:])
    fits = query.ndim == key.ndim == 4 - bool(longest) and query.shape == out.shape and key.shape == value.shape
    known = (
        fits
        and key.shape[-1] == width
        and (bool(longest) or key.shape[0] == query.shape[0])
        and logsumexp.shape == of_scores
        and all(length.ndim == 1 and length.dtype == torch.int32 for length in lengths)
    )
    return places if known else None


def _at_full_size(
    name: str, why: str, backward: Any, g: RowSlice, num_outputs: int, counts: tuple[int, int], keys: bool
) -> tuple[Any, ...]:
    """Run a function's own backward on all rows. The gradients of queries, and with ``keys`` of keys, stay sliced."""
    note_densified(name, why)
    results = backward(g.dense(), *[None] * (num_outputs - 1))
    sliced = sum(counts) if keys else counts[0]
    return *(sliced_again(d, g.rows, g.layout) for d in results[:sliced]), *results[sliced:]


def _own(node: Any, grad: Tensor, num_outputs: int, saved: Sequence[Any], **changed: Any) -> tuple[Any, ...]:
    """The results of the function's own backward; it does not use the gradient of the log-sum-exp."""
    return own_backward(node, grad, *[None] * (num_outputs - 1), saved_tensors=tuple(saved), **changed)


def _with(saved: Sequence[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    """The saved tensors with other tensors in these places."""
    new = list(saved)
    for place, tensor in zip(places, tensors, strict=True):
        new[place] = tensor
    return new


def _of_sequences(
    name: str, backward: Any, g: RowSlice, operands: Sequence[Tensor], lengths: Sequence[Tensor],
    kernel: Callable[..., Any] | None, why: str, counts: tuple[int, int], num_outputs: int,
) -> Any:  # fmt: skip
    """Run ``kernel`` on the sequences that hold a kept token, see :func:`of_sequences`.

    Where it cannot be known which these are, or without a kernel, the function's own backward runs on all.
    """
    found = None if kernel is None else of_sequences(name, g, operands, lengths, kernel, counts)
    if found is not None:
        return found
    cut = g.rows.attention == "cut" and same_lengths(*lengths) and operands[0].shape[0] == operands[1].shape[0]
    if cut:
        note("cut", name)
    return _at_full_size(name, why, backward, g, num_outputs, counts, cut)


@function_rule("torch._library.autograd.GeneratedBackwardFor_torch_attn__varlen_attn_default", positions=True)
def varlen_attn(node: Any, backward: Any, *grads: Any) -> Any:
    """Packed sequences by torch's own function: queries, keys, values, the lengths of both."""
    g, saved = grads[0], node.saved_tensors
    query, key, value, *lengths = saved[:5]
    if type(g) is not RowSlice or any(part.dim != 0 for part in g.layout.parts) or g.shape[0] != query.shape[0]:
        return Densify("the output's gradient is not sliced over packed tokens")

    def kernel(grad: Tensor, kept: list[Tensor], ends: list[Tensor], longest: list[int], _: Any) -> Any:
        tensors = (*kept[:3], *ends, *kept[3:], saved[7])
        return _own(node, grad, len(grads), tensors, max_q=longest[0], max_k=longest[1])

    operands, own_kernel = [query, key, value, *saved[5:7]], kernel if len(saved) == 8 else None
    return _of_sequences("varlen_attn", backward, g, operands, lengths, own_kernel, ALL, (1, 2), len(grads))


@function_rule(_named(_ATTENTION), positions=True)
def flash_attention(node: Any, backward: Any, *grads: Any) -> Any:
    """Rows (N, T, heads, width) attend within themselves, packed sequences (T, heads, width) within their lengths."""
    g, saved, name = grads[0], node.saved_tensors, node._forward_cls.__name__
    own, of_keys, longest = _ATTENTION[name]
    options = cast("dict[str, Any]", vars(node))
    places = _known(options, saved, longest)
    if places is None:
        return Densify(
            f"this {name} does not save what it saves in flash-attn 2.8, 3 or 4, or has options without a rule"
        )
    if options.get("return_lse") and grads[1] is not None:
        return Densify("the log-sum-exp has a gradient, too")
    if type(g) is not RowSlice or g.shape[:-1] != saved[0].shape[:-1]:
        return Densify("the output's gradient is not sliced over rows or tokens")
    return (_of_packed if longest else _of_rows)(node, backward, g, places, name, (own, of_keys), len(grads))


def _of_rows(
    node: Any, backward: Any, g: RowSlice, places: list[int], name: str, counts: tuple[int, int], outputs: int
) -> Any:
    """Run the backward on K rows of all operands; of kept tokens, on the rows that hold one."""
    saved, dims = node.saved_tensors, {part.dim for part in g.layout.parts}
    if not dims <= {0, 1}:
        return Densify("the batch is not the first dimension")
    tokens, cut = None, False
    if 1 in dims:
        tokens = queries_of(g, 1)
        cut = tokens is not None and g.rows.attention == "cut" and saved[1].shape[1] == g.shape[1]
        if cut:
            note("cut", name)
    if getattr(node, "dropout_p", 0) > 0:
        return _at_full_size(name, DROPOUT, backward, g, outputs, counts, cut or 1 not in dims)
    rows = g
    if 1 in dims and (tokens is not None or g.layout.minor):  # the kernel takes whole rows
        try:
            rows = tokens.g.coarsened(0) if cut and tokens is not None else whole_rows(g, 0)
            every = rows.layout.minor or rows.rows.kept >= rows.rows.num_rows
        except NeedsAllRows:
            every = True
        if every:
            return _at_full_size(name, ALL, backward, g, outputs, counts, cut)
    if rows.dim != 0:
        return Densify("the batch is not the first dimension")
    alibi = getattr(node, "alibi_slopes", None)
    if isinstance(alibi, Tensor) and alibi.ndim == 2:
        alibi = rows.take(alibi)
    kept = _with(saved, places, [rows.take(saved[place]) for place in places])
    results = _own(node, readable_values(rows.values), outputs, kept, alibi_slopes=alibi)
    sliced = [rows.like(d) for d in results[: sum(counts)]]
    if tokens is not None:  # other queries of these rows have a gradient of zero; under cut, other keys have none
        some = len(sliced) if cut else counts[0]
        sliced[:some] = [tokens.of_kept(d, 1) for d in sliced[:some]]
    return *sliced, *results[sum(counts) :]


def _of_packed(
    node: Any, backward: Any, g: RowSlice, places: list[int], name: str, counts: tuple[int, int], outputs: int
) -> Any:
    """Run the backward on the sequences that hold a kept token."""
    if any(part.dim != 0 for part in g.layout.parts):
        return Densify("the output's gradient is not sliced over packed tokens")
    saved, names = node.saved_tensors, _ATTENTION[name][2]
    operands, ends = ([saved[place] for place in some] for some in (places[:5], places[5:]))

    def kernel(
        grad: Tensor, kept: list[Tensor], new: list[Tensor], longest: list[int], sequences: list[int] | None
    ) -> tuple[Any, ...]:
        alibi = getattr(node, "alibi_slopes", None)
        if isinstance(alibi, Tensor) and alibi.ndim == 2 and sequences is not None:
            alibi = alibi.index_select(0, torch.tensor(sequences).to(alibi.device, non_blocking=True))
        changed = dict(zip(names, longest, strict=False))
        tensors = _with(saved, places, [*kept, *new[: len(names)]])
        return _own(node, grad, outputs, tensors, alibi_slopes=alibi, **changed)

    drops = getattr(node, "dropout_p", 0) > 0
    own_kernel, why = (None, DROPOUT) if drops else (kernel, ALL)
    return _of_sequences(name, backward, g, operands, (ends[0], ends[-1]), own_kernel, why, counts, outputs)


@function_rule(_named(_INDEXED), positions=True, apart=True)
def packed_tokens(node: Any, backward: Any, *grads: Any) -> Any:
    """``bert_padding``: it takes the tokens at an index out of padded rows, and puts them back among zeros."""
    name, saved = node._forward_cls.__name__, node.saved_tensors
    size: Any = cast("dict[str, Any]", vars(node)).get("first_axis_dim")
    known = len(saved) == 1 and isinstance(saved[0], Tensor) and saved[0].ndim == 1 and saved[0].dtype == torch.int64
    if not known or (name != "IndexPutFirstAxis") != isinstance(size, int):
        return Densify(f"this {name} does not save what it saves in flash-attn 2.8")
    g, residual = (*grads, None)[:2]
    if name == "IndexPutFirstAxis":
        outcome = index(torch.ops.aten.index.Tensor, g, saved)
        return outcome if type(outcome) is Densify else (outcome, None, None)
    if g is not None:
        if type(g) is not RowSlice or g.shape[0] != saved[0].shape[0]:
            return Densify("the output's gradient is not sliced over packed tokens")
        zeros = Zeros([size, *g.shape[1:]], g.values.dtype, g.values.device, g.rows)
        g = index_add(torch.ops.aten.index_add.default, zeros, 0, saved[0], g)
    if g is not None and residual is not None and type(g) is not Densify:
        add = torch.ops.aten.add.Tensor
        g = apply_rule(RULES[add], add, [residual, g], {})
    outcome = residual if g is None else g
    return outcome if type(outcome) is Densify else (outcome, None)
