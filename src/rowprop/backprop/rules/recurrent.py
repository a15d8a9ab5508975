"""Fused recurrent layers and cells: every row runs through time by itself.

A fused layer saves one opaque tensor of all rows, so its forward runs again on the kept rows. If K/N is above two
thirds, this and the backward of the kept rows cost more than the backward of all rows, which then runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call, rowlocal

_MIXED = "the layer's outputs have their gradients on different rows, or steps in time are the rows"
_GRADS = "grad_output", "grad_hy", "grad_cy"


def _rows(call: Call, dims: Sequence[int], results: Sequence[int | None]) -> Any:
    """One of the gradients, all of which have their rows in ``dims``; or why the layer runs at full size."""
    if call.batch_sizes:
        return Densify("packed sequences hold a different number of rows at every step; pad them")
    given = [(getattr(call, name), dim) for name, dim in zip(_GRADS, dims, strict=True)]
    found = [(g, dim) for g, dim in given if g is not None]
    first = found[0][0]
    if any(type(g) is not RowSlice or first.layout.at(dim) != g.layout for g, dim in found):
        return Densify(_MIXED)
    if call.train and call.first("dropout"):
        drawn = "dropout between the layers would be drawn anew; use single layers with nn.Dropout between them"
        return Densify(drawn, first, tuple(results))
    if 3 * first.rows.kept > 2 * first.rows.num_rows:  # a backward costs two forwards
        reason = "more than two thirds of the rows are kept, and running them forward again would cost more"
        return Densify(reason, first, tuple(results))
    return first


def _backward(call: Call, g: RowSlice, results: Sequence[int | None], **kept: Any) -> tuple[Any, ...]:
    """The layer's backward on the kept rows; an undefined gradient counts as zeros."""
    grads = {name: x.values if type(x := getattr(call, name)) is RowSlice else x for name in _GRADS}
    out = zip(call.run(**kept, **grads), results, strict=True)
    return tuple(r if dim is None or r is None else g.like(r, g.layout.at(dim)) for r, dim in out)


@rule("mkldnn_rnn_layer_backward")
def mkldnn_lstm_backward(op: Any, *args: Any) -> Any:
    """One layer and direction of the CPU's LSTM; its forward runs again on the kept rows. Input (time, N, width)."""
    call, results = Call(op, args, {}), (1, None, None, None, None, 0, 0)
    g = _rows(call, (1, 0, 0), results)
    if type(g) is Densify:
        return g
    x, h, c = g.take(call.input, 1), g.take(call.hx_, 0), g.take(call.cx_tmp, 0)
    weights = {f"weight{i}": getattr(call, f"weight{i + 1}") for i in range(4)}
    with torch.enable_grad():  # without it the kernel saves nothing
        y, hy, cy, saved = call.other(torch.ops.aten.mkldnn_rnn_layer.default, input=x, hx_=h, cx_=c, **weights)
    kept = {"input": x, "hx_": h, "cx_tmp": c, "output": y, "hy_": hy, "cy_": cy, "workspace": saved}
    return _backward(call, g, results, **kept)


@rule("_cudnn_rnn_backward")
def cudnn_rnn_backward(op: Any, *args: Any) -> Any:
    """All layers of a recurrent network in cuDNN; the forward runs again on the kept rows."""
    call = Call(op, args, {})
    place = 0 if call.batch_first else 1
    results = place, 1, 1, None
    g = _rows(call, results[:3], results)
    if type(g) is Densify:
        return g
    x = g.take(call.input, place)
    h, c = (t if t is None else g.take(t, 1).contiguous() for t in (call.hx, call.cx))
    y, _, _, saved, _ = call.other(torch.ops.aten._cudnn_rnn.default, input=x, hx=h, cx=c)
    return _backward(call, g, results, input=x, hx=h, cx=c, output=y, reserve=saved)


@rowlocal("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward", why=_MIXED)
def cell_backward(call: Call, ndim: int) -> Iterable[int]:
    """One step of an LSTM or a GRU; the rows are in front."""
    return range(1, ndim)
