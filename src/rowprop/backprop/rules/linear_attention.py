"""Linear attention, state space models and the functions beside them: fla-core 0.6, mamba-ssm 2.3, causal-conv1d 1.7.

Each function is a line of one table, and one rule runs its own backward on fewer rows, tokens or packed sequences. A
function is recognised by the name of its class and by what it saves: the number of tensors, and that each has the rows
and tokens of the output where the table says. The name of the module is not used: the ``kernels`` package loads
classes of mamba-ssm and causal-conv1d from modules with generated names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.gather import gather
from rowprop.backprop.rows.layout import Layout, view
from rowprop.backprop.rows.refusals import NeedsAllRows, check_readable
from rowprop.backprop.rows.sequences import Packed, packed_of
from rowprop.backprop.rows.slice import Densify, RowSlice, taken_once, whole_rows
from rowprop.backprop.rules.attention import ALL
from rowprop.backprop.rules.functions import left_out, own_backward
from rowprop.backprop.rules.registry import function_rule


class _Form(NamedTuple):
    """What a function saves and which gradients it returns, a letter each.

    ``t``: tokens (N, T, ...). ``r``: rows (N, ...), such as the states of chunks. ``s``: a state for each row or packed
    sequence. ``v``: rows, if it has three dimensions or more. ``f``: tokens (N * T, ...), each one or several entries.
    ``g``: such tokens, once for each group of channels. ``c``: ``cu_seqlens``. ``i``: ``chunk_indices``. ``-``: shared
    by all rows, or no tensor. All further gradients are ``-``.
    """

    saved: str
    grads: str
    width: int | None = None  # the number of the output's last dimensions that are one token; None: it mixes tokens


_FORMS: dict[str, list[_Form]] = {
    # Recurrences
    "ChunkCombaFunction": [_Form("tttttttttttsci", "tttttt-s")],
    "ChunkDPLRDeltaRuleFunction": [_Form("tttttts", "tttttt-s"), _Form("tttttts" + 10 * "t" + "rtt", "tttttt-s")],
    "ChunkDeltaRuleFunction": [_Form("tttttttsci", "tttt-s")],
    "ChunkGLAFunction": [_Form("tttttsti", "tttt-s")],
    "ChunkGSAFunction": [_Form("ttttttttssrri", "ttttt-ss")],
    "ChunkGatedDeltaRuleFunction": [_Form("tttttttttscit--", "ttttt-s")],
    "ChunkHGRNFunction": [_Form("tts", "tt")],
    "ChunkKDAFunction": [_Form("ttttttttt--tttttttrscir", "ttttt---s")],
    "ChunkRWKV6Function": [_Form("ttttst-i", "tttt--s")],
    "ChunkSimpleGLAFunction": [_Form("tttt-si", "tttt--s")],
    "FusedRecurrentFunction": [_Form("tttt-ttst", "tttt-tt-s"), _Form("tttttts", "tttt-s")],
    "FusedRecurrentHGRNFunction": [_Form("tts", "tts")],
    "MambaChunkScanCombinedFn": [_Form("rrrr-rr-r-rr", "rr-rr--r-r")],
    "MambaSplitConv1dScanCombinedFn": [_Form("t--t---rr-g--", "t------r")],
    "SelectiveScanFn": [_Form("rr-vv--r", "rr-vv"), _Form("rr-vv-r-rr", "rr-vv-r")],
    # Neighbouring tokens, positions, attention
    "CausalConv1dFn": [_Form("r--rr", "r---r")],
    "CausalConv1dFunction": [_Form("t--ts", "t--ts")],
    "ParallelAttentionFunction": [_Form("tttttt-", "tttt")],
    "RotaryEmbeddingFunction": [_Form("--c", "t"), _Form("--cs", "t")],
    "Rwkv7ChannelMixing": [_Form("tr---", "tr")],
    "TokenShift": [_Form("", "t-s")],
    # Each token by itself
    "BetaSigmoidFunction": [_Form("t", "t", 1)],
    "FusedCrossEntropyFunction": [_Form("ttt", "t", 0)],
    "GDNGateFunction": [_Form("t--", "t", 1)],
    "GateOutputCorrection": [_Form("ttt-tt", "ttt-tt", 1)],
    "KDAGateFunction": [_Form("t--", "t", 2)],
    "L2NormFunction": [_Form("tt", "t", 1)],
    "LayerNormFn": [_Form("f--ggf", "t--t", 1)],
    "LayerNormFunction": [_Form("f--ff", "t--t", 1)],
    "LayerNormGatedFunction": [_Form("ff--ff", "tt---t", 1)],
    "LayerNormGatedLinearFunction": [_Form("ff---ff", "tt----t", 1)],
    "LayerNormLinearFunction": [_Form("f---ff", "t----t", 1)],
    "Rwkv7FusedAddcmul": [_Form("tt------", "tt", 1)],
    "SwiGLUFunction": [_Form("tt", "tt", 1)],
    "SwiGLULinearFunction": [_Form("tt-", "tt", 1)],
    "SwishFunction": [_Form("t", "t", 1)],
}
_OWN = {"fla", "mamba_ssm"}
"""Packages whose functions are known also where they save so little that others may have a function like it."""


def _is_named(function: type) -> bool:
    forms = _FORMS.get(function.__name__, ())
    own = function.__module__.partition(".")[0] in _OWN
    return bool(forms) and (own or min(len(form.saved) for form in forms) > 3)


@function_rule(_is_named, positions=True)
def linear_attention(node: Any, backward: Any, *grads: Any) -> Any:
    """Run the function's own backward on the kept tokens, on their rows, or on their packed sequences."""
    name, about = node._forward_cls.__name__, cast("dict[str, Any]", vars(node))
    given = [g for g in grads if g is not None]
    if any(type(g) is not RowSlice for g in given):
        return Densify("the gradient of another output is not sliced")
    form = next((form for form in _FORMS[name] if _fits(form, given[0].shape, node.saved_tensors, about)), None)
    if form is None:
        return Densify(f"this {name} does not save what it saves in fla-core 0.6, mamba-ssm 2.3 or causal-conv1d 1.7")
    if about.get("cp_context") is not None:
        return Densify("the sequences are split over processes, which all have to take part")
    ends = about.get("cu_seqlens")
    if "c" in form.saved:
        ends = node.saved_tensors[form.saved.index("c")]
    if form.width is None and ends is not None:
        return _of_sequences(node, form, grads, ends)
    return _of_rows(node, form, grads)


def _fits(form: _Form, shape: Sequence[int], saved: Sequence[Any], about: dict[str, Any]) -> bool:
    """Whether the saved tensors are those of a form, for an output of this shape; no others are kept beside them."""
    lead = 2 if form.width is None else len(shape) - form.width
    beside = {name for name, value in about.items() if isinstance(value, Tensor)}
    if len(saved) != len(form.saved) or not beside <= {"cu_seqlens", "cu_seqlens_cpu", "chunk_indices"} or lead < 1:
        return False
    front = tuple(shape[:lead])
    return all(t is None or _has(kind, t, front) for kind, t in zip(form.saved, saved, strict=True))


def _has(kind: str, tensor: Tensor, front: tuple[int, ...]) -> bool:
    if kind == "t":
        return tuple(tensor.shape[: len(front)]) == front
    if kind in "fg":
        return tensor.shape[0] % prod(front) == 0
    return kind in "-cis" or tensor.shape[0] == front[0] or (kind == "v" and tensor.ndim < 3)


def _run(
    node: Any, form: _Form, gradients: Sequence[Any], of: Callable[..., Any], back: Callable[..., Any], **replaced: Any
) -> Any:
    """Run the own backward on parts of the saved tensors, which ``of`` takes; ``back`` says what its results are."""
    saved = (t if t is None or k == "-" else of(k, t) for k, t in zip(form.saved, node.saved_tensors, strict=True))
    about = cast("dict[str, Any]", vars(node))
    changed = {name: value for name, value in replaced.items() if name in about}
    changed |= dict.fromkeys(about.keys() & {"inplace", "inplace_backward"}, False)
    results = own_backward(node, *gradients, saved_tensors=tuple(saved), **changed)
    kinds = form.grads.ljust(len(results), "-")
    if len(kinds) > len(results):
        raise NeedsAllRows("it returns fewer gradients than in the versions that are known")
    return tuple(r if k == "-" or r is None else back(k, r) for k, r in zip(kinds, results, strict=True))


def _of_rows(node: Any, form: _Form, grads: Sequence[Any]) -> Any:
    """Of kept rows, or where tokens are apart, of kept tokens: the kernel gets them as those of one row."""
    if form.width is None:
        grads = [whole_rows(g, 0) for g in grads]
    given = [g for g in grads if g is not None]
    g = given[0]
    if any(x.layout != g.layout or x.rows is not g.rows for x in given):
        return Densify("the outputs' gradients hold different rows")
    lead = max(part.dim for part in g.layout.parts) + 1
    if lead > (1 if form.width is None else g.ndim - form.width):
        return Densify("the batch is not the first dimension")
    size, tokens = prod(g.shape[:lead]), prod(g.shape[:-1])
    flat = view(g.shape, g.layout, (size, *g.shape[lead:]))
    if flat is None or flat.minor:
        return Densify("rows and tokens lie in another order than in the batch")
    front = *(1,) * (lead - 1), flat.kept_shape([size], g.rows.kept)[0]

    def of(kind: str, tensor: Tensor) -> Tensor:
        if kind in "ci" or (kind == "v" and tensor.ndim < 3):
            return tensor
        if kind in "fg":
            outer, inner = (tensor.shape[0] // tokens, tokens // size) if kind == "g" else (1, tensor.shape[0] // size)
            return gather(tensor, g.rows, Layout(0, flat.num_rows, flat.outer * outer, flat.inner * inner))
        kept = gather(tensor.reshape(size, *tensor.shape[lead:]), g.rows, flat)
        return kept.reshape(*front, *tensor.shape[lead:]) if lead > 1 else kept

    def back(kind: str, result: Tensor) -> Any:
        if kind == "v" and result.ndim < 3:
            return result
        if tuple(result.shape[:lead]) != front:
            raise NeedsAllRows("its gradients do not lie where they do in the versions that are known")
        full = (*g.shape[:lead], *result.shape[lead:])
        return RowSlice(result.reshape(g.layout.kept_shape(full, g.rows.kept)), g.rows, g.layout, full)

    values: list[Tensor | None] = []
    for x, meta, none in zip(grads, node._input_metadata, left_out(node), strict=True):
        if x is not None:
            values.append(x.values.reshape(*front, *x.shape[lead:]) if lead > 1 else x.values)
        else:
            shape = *front, *meta.shape[lead:]
            values.append(None if none else torch.zeros(shape, dtype=meta.dtype, device=meta.device))
    about = cast("dict[str, Any]", vars(node)).items()
    shapes = {name: torch.Size((*front, *size[lead:])) for name, size in about if isinstance(size, torch.Size)}
    return _run(node, form, values, of, back, N=front[-1], **shapes)


def _of_sequences(node: Any, form: _Form, grads: Sequence[Any], ends: Tensor) -> Any:
    """Of packed sequences (1, T, ...), those that hold a kept token."""
    g = grads[0]
    if type(g) is not RowSlice or any(x is not None for x in grads[1:]):
        return Densify("a state at the end of packed sequences has a gradient")
    if g.shape[0] != 1 or any(part.dim != 1 for part in g.layout.parts):
        return Densify("the output's gradient is not sliced over packed tokens")
    layout, size = g.layout.at(0), g.shape[1]
    found = cast("Packed | None", g.rows.once(packed_of, g.rows, layout, ends, ends, size, size))
    if found is None or found.sequences is None or found.rows is None or found.queries.places is None:
        return Densify(ALL)
    run, rows, sequences = found.queries, found.rows, tuple(found.sequences)
    at = gather(found.queries.places, g.rows, layout)
    grad = g.values.new_zeros(run.count, *g.shape[2:]).index_add_(0, at, g.values[0])
    numbers = torch.tensor(sequences).to(ends.device, non_blocking=True)

    def of(kind: str, tensor: Tensor) -> Tensor:
        if kind == "t":
            return run.of(tensor, 1)
        if kind in "ci":
            return run.ends if kind == "c" else g.rows.once(_chunks_of, tensor, sequences)
        if kind != "s":
            raise NeedsAllRows("it keeps the states of chunks, which are not taken apart by sequences")
        return tensor.index_select(0, numbers)

    def back(kind: str, result: Tensor) -> Any:
        if kind == "s":
            return result.new_zeros(len(ends) - 1, *result.shape[1:]).index_copy_(0, numbers, result)
        shape = 1, size, *result.shape[2:]
        if found.whole:
            return taken_once(result.index_select(1, at), g.rows, g.layout, shape)
        return RowSlice(result, rows, Layout(1, size), shape)

    chunks = cast("dict[str, Any]", vars(node)).get("chunk_indices")
    changed = {"cu_seqlens": run.ends, "cu_seqlens_cpu": None, "N": len(sequences)}
    changed["chunk_indices"] = None if chunks is None else of("i", chunks)
    values: list[Tensor | None] = [grad[None]]
    for meta, none in zip(node._input_metadata[1:], left_out(node)[1:], strict=True):
        shape = len(sequences), *meta.shape[1:]
        values.append(None if none else torch.zeros(shape, dtype=meta.dtype, device=meta.device))
    return _run(node, form, values, of, back, **changed)


def _chunks_of(chunks: Tensor, sequences: tuple[int, ...]) -> Tensor:
    """The chunks of these sequences, of pairs of a sequence's number and the chunk's place in it."""
    check_readable(chunks, "how many chunks each packed sequence has")
    new = {number: place for place, number in enumerate(sequences)}
    of = cast("list[int]", chunks[:, 0].tolist())
    lines = [(place, new[number]) for place, number in enumerate(of) if number in new]
    places, numbers = torch.tensor(lines).T.to(chunks.device, non_blocking=True)
    return torch.stack([numbers.to(chunks.dtype), chunks[places, 1]], 1)
