"""FLOPs of an op from its arguments and its result. 1 multiply-add = 2 FLOPs.

The formulas are torch's own (``torch.utils.flop_counter``). Where torch has none, counts too much, or changes them from
version to version, a formula of this file stands: attention, LSTM and other fused recurrent layers, the weight gradient
of grouped convolutions, products with vectors, bilinear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils.flop_counter import flop_registry  # pyright: ignore[reportUnknownVariableType]

Formula = Callable[..., "int | tuple[int, ...]"]
"""Takes the op's arguments and its result as ``out_val``. Returns the op's FLOPs or, for an op that makes several
gradients, the FLOPs of each output."""

_aten = torch.ops.aten


def _conv(x: Tensor, w: Tensor, transposed: bool, out: Tensor) -> int:
    """Each entry of the weight meets each place of an image once: of the output, or of a transposed one's input."""
    places = (x if transposed else out).shape[2:]
    return 2 * x.shape[0] * prod(places) * w.numel()


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    _bias: Any,
    _stride: Any,
    _pad: Any,
    _dil: Any,
    transposed: bool,
    *rest: Any,
    **_: Any,
) -> tuple[int, ...]:
    """The input's gradient and the weight's, if they are asked for; each costs as much as the forward."""
    output_mask: Sequence[bool] = rest[-1]
    once = _conv(x, w, transposed, grad)
    return output_mask[0] * once, output_mask[1] * once, 0


def _pairs(t: int, s: int, *, from_the_end: bool) -> int:
    """How many pairs of ``t`` queries and ``s`` keys a causal mask lets meet: query i sees the keys up to i."""
    ahead = s - t if from_the_end else 0
    return sum(max(0, min(s, i + 1 + ahead)) for i in range(t))


def _attention(op: Any) -> Formula:
    """Fused attention: each pair of a query and a key costs products of their width and of the values' width.

    A causal kernel computes only the pairs that meet. Packed sequences count all pairs of each sequence. Queries that
    share a key's head (grouped heads) count each.

    The kernels' own ops take (N, time, heads, width), or packed (all tokens, heads, width); the others take (N, heads,
    time, width). The names in an op's schema tell the places of its arguments.
    """
    names = [argument.name for argument in op.default._schema.arguments]
    mask = names.index("is_causal" if "is_causal" in names else "custom_mask_type")
    query, value = names.index("query"), names.index("value")
    found = [place for place, name in enumerate(names) if name in ("cum_seq_q", "cu_seqlens_q")]
    lengths = None if op.__name__.startswith("_scaled") else found[0]
    backward = op.__name__.endswith("backward")

    def count(*args: Any, **_: Any) -> int:
        q, k, v = args[query : value + 1]
        time, heads = (-2, -3) if lengths is None else (-3, -2)
        if lengths is not None and args[lengths] is not None:
            read: Any = cast(Any, flop_counter)._offsets_to_lengths  # the longest for each where they have no values
            in_q, in_k = (read(args[at], args[at + 2]) for at in (lengths, lengths + 1))
            pairs = sum(t * s for t, s in zip(in_q, in_k, strict=True))
        else:
            t, s, kind = q.shape[time], k.shape[time], args[mask] if len(args) > mask else 0
            from_the_end = kind is not True and kind == 2  # the second kind of custom mask
            pairs = len(q) * (_pairs(t, s, from_the_end=from_the_end) if kind else t * s)
        return q.shape[heads] * pairs * _flops_of_a_pair(q, v, backward=backward)

    return count


def _flops_of_a_pair(q: Tensor, v: Tensor, *, backward: bool) -> int:
    """A query and a key: a product of their width, one of the values'; 3 and 2 in a backward, with the scores anew."""
    of_keys, of_values = (3, 2) if backward else (1, 1)
    return 2 * (of_keys * q.shape[-1] + of_values * v.shape[-1])


def _flex(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return prod(q.shape[:3]) * k.shape[2] * _flops_of_a_pair(q, v, backward=False)


def _flex_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return prod(q.shape[:3]) * k.shape[2] * _flops_of_a_pair(q, v, backward=True)


def _recurrent(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Every matrix meets every step of every row once; ``weights`` holds matrices and biases."""
    steps = prod(x.shape[:-1])
    return 2 * steps * sum(w.numel() for w in weights if w.ndim == 2)


def _mkldnn_rnn(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> int:
    return _recurrent(x, (w0, w1))


def _cudnn_rnn(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _recurrent(x, weights)


def _mkldnn_rnn_backward(x: Tensor, w0: Tensor, w1: Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """The gradients of the inputs and states, of the input's weights, of the state's weights."""
    return _recurrent(x, (w0, w1)), _recurrent(x, (w0,)), _recurrent(x, (w1,)), 0, 0, 0, 0


def _cudnn_rnn_backward(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> tuple[int, ...]:
    once = _recurrent(x, weights)
    return once, 0, 0, once


def _with_vector(a: Tensor, *_: Any, **__: Any) -> int:
    """A matrix or a vector times a vector: each entry enters one multiply-add."""
    return 2 * a.numel()


def _add_with_vector(_bias: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _add_outer(_bias: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.numel()


def _add_batched(_bias: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[2]


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows in groups, each group with a matrix of its own: every row meets one matrix."""
    return 2 * (a.shape[1] * b.numel() if a.ndim == 3 and b.ndim == 2 else a.numel() * b.shape[-1])


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """One product and one multiply-add at each point of the space that the three are expanded to."""
    shapes: list[list[int]] = []
    for tensor, expand in ((a, expand_a), (b, expand_b), (c, expand_c)):
        shape = list(tensor.shape)
        for dim in sorted(expand):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * prod(torch.broadcast_shapes(*shapes))


_ATTENTION = [
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._flash_attention_forward,
    _aten._flash_attention_backward,
    _aten._efficient_attention_forward,
    _aten._efficient_attention_backward,
]

# By op packet.
FORMULAS: dict[Any, Formula] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    **{op: _attention(op) for op in _ATTENTION},
    _aten.mkldnn_rnn_layer: _mkldnn_rnn,
    _aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_backward,
    _aten._cudnn_rnn: _cudnn_rnn,
    _aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
    _aten.mv: _with_vector,
    _aten.addmv: _add_with_vector,
    _aten.dot: _with_vector,
    _aten.vdot: _with_vector,
    _aten.addr: _add_outer,
    _aten.addbmm: _add_batched,
    _aten._trilinear: _trilinear,
    _aten._grouped_mm: _grouped,
    torch.ops.higher_order.flex_attention: _flex,
    torch.ops.higher_order.flex_attention_backward: _flex_backward,
}


def formula_of(packet: Any) -> Formula | None:
    """The formula of an op; None if there is none. Modules of torch add theirs when they are imported."""
    return FORMULAS.get(packet) or flop_registry.get(packet)
