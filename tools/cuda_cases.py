"""Cases of the ops that have kernels on CUDA only: calls of torch's own autograd nodes, as its formulas make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import rowprop
from cuda_kernels import LSTM, TANH
from rowprop.backprop.watch import Report

aten = torch.ops.aten
N, HEADS, T, S, D = 6, 2, 5, 7, 4
WIDTH = 8  # of a head: no fused attention takes other than multiples of 8
SINGLE = torch.float32


@dataclass(frozen=True)
class Case:
    """An op and its inputs: shapes per row in ``rows``; inputs in ``shared`` have no rows."""

    op: str
    f: Callable[..., Any]
    rows: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...] = ()
    densifies: bool = False
    dtype: torch.dtype = torch.float64


def leaf(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return values.to(device).requires_grad_()


def gradients(case: Case, take: Callable[[Tensor], Tensor], device: str = "cpu") -> tuple[list[Tensor | None], Report]:
    inputs = [leaf(i, (N, *shape), case.dtype, device) for i, shape in enumerate(case.rows)]
    shared = [leaf(9 + i, shape, case.dtype, device) for i, shape in enumerate(case.shared)]
    out = case.f(*[x * 1 for x in inputs], *shared)  # a node between, as in a model
    outs = out if isinstance(out, tuple) else (out,)
    losses = sum(((v - 0.3) ** 2).flatten(1).sum(1) * (1 + i) for i, v in enumerate(outs))
    assert isinstance(losses, Tensor)
    with rowprop.watch() as report:
        take(losses).square().sum().backward()
    return [v.grad for v in (*inputs, *shared)], report


QKV = ((HEADS, T, WIDTH), (HEADS, S, WIDTH), (HEADS, S, WIDTH))
WIDER = (*QKV[:2], (HEADS, S, 2 * WIDTH))
SAME = ((HEADS, T, WIDTH),) * 3
TURNED = ((T, HEADS, WIDTH), (S, HEADS, WIDTH), (S, HEADS, WIDTH))
GROUPED = ((2 * HEADS, T, WIDTH), *QKV[1:])
PACKED = ((T, 3, HEADS, WIDTH),)


def padded(bias: Tensor) -> Tensor:
    """As torch hands a bias to the memory-efficient kernel."""
    return F.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]].expand(N, HEADS, T, S)


def multi_query(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of one head, expanded."""
    return q, k[:, :1].expand(k.shape), v[:, :1].expand(v.shape)


def unpacked(x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, views of one projection."""
    return x.permute(2, 0, 3, 1, 4).unbind()


def flash(*qkv: Tensor, **options: Any) -> Tensor:
    return aten._scaled_dot_product_flash_attention(*qkv, **options)[0]


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    bias = None if bias is None else padded(bias)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, **options)[0]


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    bias = None if bias is None else bias.detach()
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, **options)[0]


def cudnn_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return aten._cudnn_attention_forward(q, k, v, bias, None, None, T, S, True)[0]


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> Tensor:
    return aten._flash_attention_forward(q, k, v, None, None, T, S, p, True, False)[0]


def efficient_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, p: float = 0.0) -> Tensor:
    bias = None if bias is None else padded(bias)
    return aten._efficient_attention_forward(q, k, v, bias, None, None, T, S, p, 1, True)[0]


def batch_norm(op: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    stats = torch.zeros(w.shape, dtype=w.dtype), torch.ones(w.shape, dtype=w.dtype)
    if op == "update":
        return aten._batch_norm_with_update(x, w, b, *stats, 0.1, 1e-5)[0]
    return getattr(aten, op)(x, w, b, *stats, True, 0.1, 1e-5)[0]


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return aten._fused_rms_norm(x, [D], w, None)[0]


def instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The batch is merged into the channels, as in ``F.instance_norm``."""
    merged = x.reshape(1, -1, *x.shape[2:])
    return aten.cudnn_batch_norm(merged, w.repeat(N), b.repeat(N), None, None, True, 0.1, 1e-5)[0].view_as(x)


def ctc_loss(x: Tensor) -> Tensor:
    targets = torch.tensor([1, 2, 3, 3, 2, 1, 1, 1, 2, 2, 3, 1], dtype=torch.int32)
    scores = x.transpose(0, 1).log_softmax(-1)
    return aten._cudnn_ctc_loss(scores, targets, [T] * N, [2] * N, 0, True, False)[0][:, None]


def recurrent(mode: int, batch_first: bool, p: float = 0.0, outputs: int = 3) -> Callable[..., tuple[Tensor, ...]]:
    def run(x: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        c, *w = rest if mode == LSTM else (None, *rest)
        x, h, c = (x if batch_first else x.transpose(0, 1)), h[None], None if c is None else c[None]
        y, hy, cy, *_ = aten._cudnn_rnn(
            x, w, 4, None, h.contiguous(), c, mode, D, 0, 1, batch_first, p, True, False, [], None
        )
        return (y if batch_first else y.transpose(0, 1), hy[0], *([] if c is None else [cy[0]]))[:outputs]

    return run


def lstm_cell(x: Tensor, c: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    w, *biases = rest
    h = c.tanh()
    for _ in range(2):
        h, c, _ = aten._thnn_fused_lstm_cell(x @ w, h @ w, c, *biases)
    return h, c


def gru_cell(x: Tensor, h: Tensor, *rest: Tensor) -> Tensor:
    w, *biases = rest
    for _ in range(2):
        h = aten._thnn_fused_gru_cell(x @ w, h @ w, h, *biases)[0]
    return h


def weights(gates: int) -> tuple[tuple[int, ...], ...]:
    return ((gates * D, 3), (gates * D, D), (gates * D,), (gates * D,))


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward"
CUDNN, RNN = "_scaled_dot_product_cudnn_attention_backward", "_cudnn_rnn_backward"
FLASH_KERNEL, EFFICIENT_KERNEL = "_flash_attention_backward", "_efficient_attention_backward"
LSTM_CELL, GRU_CELL = "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward"
BATCH_NORM, CHANNELS, IMAGES = "cudnn_batch_norm_backward", ((3,), (3,)), ((3, 5, 5), (4, 4, 2))
STATES, LSTM_STATES = ((T, 3), (D,)), ((T, 3), (D,), (D,))

CASES: dict[str, Case] = {
    "flash": Case(FLASH, flash, QKV),
    "flash_causal": Case(FLASH, lambda *qkv: flash(*qkv, is_causal=True, scale=0.3), SAME),
    "flash_turned": Case(FLASH, lambda *qkv: flash(*[t.transpose(1, 2) for t in qkv]).transpose(1, 2), TURNED),
    "flash_multi_query": Case(FLASH, lambda *qkv: flash(*multi_query(*qkv)), QKV),
    "flash_grouped": Case(FLASH, flash, GROUPED),
    "flash_one_chunk": Case(FLASH, lambda x: flash(*x.chunk(3, -1)), ((HEADS, T, 3 * WIDTH),)),
    "flash_one_projection": Case(FLASH, lambda x: flash(*unpacked(x)), PACKED),
    # One time step, next to other features: its gradient begins anywhere in memory.
    "flash_beside": Case(
        FLASH, lambda x, *qkv: torch.cat([x, flash(*qkv).flatten(1)], 1), ((3,), *[(HEADS, 1, WIDTH)] * 3)
    ),
    "flash_dropout": Case(FLASH, lambda *qkv: flash(*qkv, dropout_p=0.3), QKV, densifies=True),
    "flash_heads_are_rows": Case(
        FLASH, lambda *qkv: flash(*[t.transpose(0, 1) for t in qkv]).transpose(0, 1), QKV, densifies=True
    ),
    "efficient": Case(EFFICIENT, efficient, WIDER),
    "efficient_causal": Case(EFFICIENT, lambda *qkv: efficient(*qkv, is_causal=True, scale=0.3), SAME),
    "efficient_multi_query": Case(EFFICIENT, lambda *qkv: efficient(*multi_query(*qkv)), QKV),
    "efficient_bias": Case(EFFICIENT, efficient, (*QKV, (HEADS, T, S))),
    "efficient_key_bias": Case(EFFICIENT, efficient, (*QKV, (1, 1, S))),
    "efficient_fixed_bias": Case(EFFICIENT, lambda q, k, v, b: efficient(q, k, v, b.detach()), (*QKV, (1, 1, S))),
    "efficient_shared_bias": Case(EFFICIENT, efficient, QKV, ((HEADS, T, S),)),
    "efficient_dropout": Case(EFFICIENT, lambda *qkv: efficient(*qkv, dropout_p=0.3), QKV, densifies=True),
    "cudnn": Case(CUDNN, cudnn, WIDER),
    "cudnn_grouped": Case(CUDNN, cudnn, GROUPED),
    "cudnn_one_projection": Case(CUDNN, lambda x: cudnn(*unpacked(x)), PACKED),
    "cudnn_mask": Case(CUDNN, cudnn, (*QKV, (1, T, S))),
    "cudnn_shared_mask": Case(CUDNN, cudnn, QKV, ((T, S),)),
    "cudnn_dropout": Case(CUDNN, lambda *qkv: cudnn(*qkv, dropout_p=0.3), QKV, densifies=True),
    "flash_kernel": Case(FLASH_KERNEL, flash_kernel, TURNED),
    "flash_kernel_dropout": Case(FLASH_KERNEL, lambda *qkv: flash_kernel(*qkv, p=0.3), TURNED, densifies=True),
    "efficient_kernel": Case(EFFICIENT_KERNEL, efficient_kernel, TURNED),
    "efficient_kernel_bias": Case(EFFICIENT_KERNEL, efficient_kernel, (*TURNED, (HEADS, T, S))),
    "efficient_kernel_dropout": Case(EFFICIENT_KERNEL, lambda *a: efficient_kernel(*a, p=0.3), TURNED, densifies=True),
    "cudnn_batch_norm_exact": Case(BATCH_NORM, partial(batch_norm, "cudnn_batch_norm"), ((3, 4),), CHANNELS, True),
    "cudnn_instance_norm": Case(BATCH_NORM, instance_norm, ((3, 4),), CHANNELS),
    "grid_sampler": Case(
        "cudnn_grid_sampler_backward", lambda x, grid: aten.cudnn_grid_sampler(x, grid.tanh()), IMAGES
    ),
    "ctc_loss": Case("mul.Tensor", ctc_loss, ((T, 4),)),  # its gradient is made forward, and only scaled
    "lstm": Case(RNN, recurrent(LSTM, False), LSTM_STATES, weights(4)),
    "lstm_batch_first": Case(RNN, recurrent(LSTM, True), LSTM_STATES, weights(4)),
    "lstm_output": Case(RNN, recurrent(LSTM, True, outputs=1), LSTM_STATES, weights(4)),
    "lstm_dropout": Case(RNN, recurrent(LSTM, True, 0.3), LSTM_STATES, weights(4), True),
    "rnn": Case(RNN, recurrent(TANH, False), STATES, weights(1)),
    "rnn_batch_first": Case(RNN, recurrent(TANH, True), STATES, weights(1)),
    "lstm_cell": Case(LSTM_CELL, lstm_cell, ((D,), (D,)), ((D, 4 * D), *[(4 * D,)] * 2)),
    "lstm_cell_no_bias": Case(LSTM_CELL, lstm_cell, ((D,), (D,)), ((D, 4 * D),)),
    "gru_cell": Case(GRU_CELL, gru_cell, ((D,), (D,)), ((D, 3 * D), *[(3 * D,)] * 2)),
    "gru_cell_no_bias": Case(GRU_CELL, gru_cell, ((D,), (D,)), ((D, 3 * D),)),
}
if hasattr(aten, "_fused_rms_norm"):
    CASES["rms_norm"] = Case("_fused_rms_norm_backward", rms_norm, ((T, D),), ((D,),))
if hasattr(aten, "_cudnn_attention_forward"):
    CASES["cudnn_kernel"] = Case("_cudnn_attention_backward", cudnn_kernel, QKV)
