"""Fused recurrent layers and cells: every row runs through time by itself.

A fused layer saves one opaque tensor of all rows in its forward. So the forward runs again on the kept rows, and the
backward costs K/N of the layer's forward on top of K/N of its backward. If K/N is above two thirds, this sum is more
than the backward of all rows, so the backward of all rows runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice

_aten = torch.ops.aten


def _rows(grads: Sequence[Any], dims: Sequence[int]) -> RowSlice | None:
    """One of the gradients, if all of them are sliced alike, each with its rows in its own dimension of ``dims``.

    An undefined gradient is None and counts as zeros.
    """
    found: RowSlice | None = None
    for g, dim in zip(grads, dims, strict=True):
        if g is None:
            continue
        if type(g) is not RowSlice or g.dim != dim or (found is not None and found.layout.at(dim) != g.layout):
            return None
        found = g
    return found


def _values(g: Any) -> Any:
    return g.values if type(g) is RowSlice else g


def _costs_more(g: RowSlice) -> bool:
    """Whether a second forward of the kept rows costs more than it saves; a backward costs two forwards."""
    return 3 * g.rows.kept > 2 * g.rows.num_rows


_MOST = "more than two thirds of the rows are kept, and running them forward again would cost more"
_DRAWN = "dropout between the layers would be drawn anew"
_MIXED = "the layer's outputs have their gradients on different rows, or steps in time are the rows"

_PACKED = "packed sequences hold a different number of rows at every step"


@rule("mkldnn_rnn_layer_backward")
def mkldnn_lstm_backward(
    op: Any,
    input: Tensor,
    w1: Any,
    w2: Any,
    w3: Any,
    w4: Any,
    hx: Any,
    cx: Any,
    output: Any,
    hy: Any,
    cy: Any,
    g_output: Any,
    g_hy: Any,
    g_cy: Any,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: Any,
) -> Any:
    """One layer and direction of the CPU's LSTM; its forward runs again on the kept rows. Input (time, N, width)."""
    if batch_sizes:
        return Densify(_PACKED)
    g = _rows((g_output, g_hy, g_cy), (1, 0, 0))
    if g is None:
        return Densify(_MIXED)
    if _costs_more(g):
        return Densify(_MOST, g, (1, None, None, None, None, 0, 0))
    weights = (w1, w2, w3, w4)
    x, h, c = g.take(input, 1), g.take(hx, 0), g.take(cx, 0)
    settings = (mode, hidden_size, num_layers, has_biases)
    with torch.enable_grad():  # without it the kernel saves nothing
        *outputs, fresh = _aten.mkldnn_rnn_layer.default(
            x, *weights, h, c, reverse, batch_sizes, *settings, bidirectional, batch_first, train
        )
    grads = [_values(v) for v in (g_output, g_hy, g_cy)]
    out = op(
        *(x, *weights, h, c, *outputs, *grads, reverse, *settings, train, bidirectional, batch_sizes, batch_first),
        fresh,
    )
    return _local(g, out[0], 1), *out[1:5], _local(g, out[5], 0), _local(g, out[6], 0)


def _local(g: RowSlice, out: Tensor | None, dim: int) -> Any:
    return None if out is None else g.like(out, g.layout.at(dim))


@rule("_cudnn_rnn_backward")
def cudnn_rnn_backward(
    op: Any,
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Any,
    cx: Any,
    output: Any,
    g_output: Any,
    g_hy: Any,
    g_cy: Any,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Any,
    reserve: Any,
    mask: Sequence[bool],
) -> Any:
    """All layers of a recurrent network in cuDNN; the forward runs again on the kept rows."""
    if batch_sizes:
        return Densify(_PACKED)
    place = 0 if batch_first else 1
    g = _rows((g_output, g_hy, g_cy), (place, 1, 1))
    if g is None:
        return Densify(_MIXED)
    whole = (place, 1, 1, None)
    if dropout > 0 and train:
        return Densify(_DRAWN, g, whole)
    if _costs_more(g):
        return Densify(_MOST, g, whole)
    x, h = g.take(input, place), g.take(hx, 1).contiguous()
    c = None if cx is None else g.take(cx, 1).contiguous()
    settings = (mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional, batch_sizes)
    layers = (weight, weight_stride0, weight_buf)
    y, _, _, fresh, _ = _aten._cudnn_rnn.default(x, *layers, h, c, *settings, dropout_state)
    grads = [_values(v) for v in (g_output, g_hy, g_cy)]
    dx, dh, dc, dw = op(x, *layers, h, c, y, *grads, *settings, dropout_state, fresh, mask)
    return _local(g, dx, place), _local(g, dh, 1), _local(g, dc, 1), dw


@rule("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(op: Any, g_hy: Any, g_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool) -> Any:
    """One step of an LSTM; the rows are in front."""
    g = _rows((g_hy, g_cy), (0, 0))
    if g is None:
        return Densify(_MIXED)
    out = op(_values(g_hy), _values(g_cy), g.take(cx, 0), g.take(cy, 0), g.take(workspace, 0), has_bias)
    return _local(g, out[0], 0), _local(g, out[1], 0), out[2]


@rule("_thnn_fused_gru_cell_backward")
def gru_cell_backward(op: Any, g_hy: Any, workspace: Any, has_bias: bool) -> Any:
    """One step of a GRU."""
    g = _rows((g_hy,), (0,))
    if g is None:
        return Densify(_MIXED)
    out = op(g.values, g.take(workspace, 0), has_bias)
    return *[_local(g, v, 0) for v in out[:3]], *out[3:]
