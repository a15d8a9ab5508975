"""Rules for ops that have kernels on CUDA only: torch's own autograd nodes, over CPU kernels made from the formulas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rowprop
from cuda_kernels import KERNELS, LSTM, TANH, checked, installed
from rowprop.backprop.layout import Layout
from rowprop.backprop.rules.registry import RULES, op_name
from rowprop.backprop.sliced import Densify, RowSet, RowSlice
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops

aten = torch.ops.aten
N, HEADS, T, S, D = 6, 2, 5, 7, 4
WIDTH = 8  # of a head: no fused attention takes other than multiples of 8
ROWS = {
    "two": torch.tensor([1, 4]),
    "one": torch.tensor([5]),
    "repeats": torch.tensor([0, 2, 2, -1]),
    "mask": torch.arange(N) % 3 == 1,
    "selection": rowprop.Selection(torch.tensor([0, 3, 4]), torch.full((3,), 1 / 3), N),
}


@pytest.fixture(autouse=True)
def kernels() -> Generator[None]:
    with installed():
        yield


@dataclass(frozen=True)
class Case:
    """An op and its inputs: shapes per row in ``rows``; inputs in ``shared`` have no rows."""

    op: str
    f: Callable[..., Any]
    rows: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...] = ()
    densifies: str | None = None
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


def beside(x: Tensor, *qkv: Tensor) -> Tensor:
    """Attention of one time step, next to other features: its gradient begins anywhere in memory."""
    return torch.cat([x, flash(*qkv).flatten(1)], 1)


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
SINGLE = torch.float32
CHANNELS = ((3,), (3,))

CASES: dict[str, Case] = {
    "flash": Case(FLASH, flash, QKV),
    "flash_causal": Case(FLASH, lambda *qkv: flash(*qkv, is_causal=True, scale=0.3), SAME),
    "flash_turned": Case(FLASH, lambda *qkv: flash(*[t.transpose(1, 2) for t in qkv]).transpose(1, 2), TURNED),
    "flash_multi_query": Case(FLASH, lambda *qkv: flash(*multi_query(*qkv)), QKV),
    "flash_grouped": Case(FLASH, flash, GROUPED),
    "flash_one_chunk": Case(FLASH, lambda x: flash(*x.chunk(3, -1)), ((HEADS, T, 3 * WIDTH),)),
    "flash_one_projection": Case(FLASH, lambda x: flash(*unpacked(x)), PACKED),
    "flash_beside": Case(FLASH, beside, ((3,), *[(HEADS, 1, WIDTH)] * 3)),
    "flash_dropout": Case(FLASH, lambda *qkv: flash(*qkv, dropout_p=0.3), QKV, densifies=FLASH),
    "flash_heads_are_rows": Case(
        FLASH, lambda *qkv: flash(*[t.transpose(0, 1) for t in qkv]).transpose(0, 1), QKV, densifies=FLASH
    ),
    "efficient": Case(EFFICIENT, efficient, WIDER),
    "efficient_causal": Case(EFFICIENT, lambda *qkv: efficient(*qkv, is_causal=True, scale=0.3), SAME),
    "efficient_multi_query": Case(EFFICIENT, lambda *qkv: efficient(*multi_query(*qkv)), QKV),
    "efficient_bias": Case(EFFICIENT, efficient, (*QKV, (HEADS, T, S))),
    "efficient_key_bias": Case(EFFICIENT, efficient, (*QKV, (1, 1, S))),
    "efficient_fixed_bias": Case(EFFICIENT, lambda q, k, v, b: efficient(q, k, v, b.detach()), (*QKV, (1, 1, S))),
    "efficient_shared_bias": Case(EFFICIENT, efficient, QKV, ((HEADS, T, S),)),
    "efficient_dropout": Case(EFFICIENT, lambda *qkv: efficient(*qkv, dropout_p=0.3), QKV, densifies=EFFICIENT),
    "cudnn": Case(CUDNN, cudnn, WIDER),
    "cudnn_grouped": Case(CUDNN, cudnn, GROUPED),
    "cudnn_one_projection": Case(CUDNN, lambda x: cudnn(*unpacked(x)), PACKED),
    "cudnn_mask": Case(CUDNN, cudnn, (*QKV, (1, T, S))),
    "cudnn_shared_mask": Case(CUDNN, cudnn, QKV, ((T, S),)),
    "cudnn_dropout": Case(CUDNN, lambda *qkv: cudnn(*qkv, dropout_p=0.3), QKV, densifies=CUDNN),
    "flash_kernel": Case("_flash_attention_backward", flash_kernel, TURNED),
    "flash_kernel_dropout": Case(
        "_flash_attention_backward",
        lambda *qkv: flash_kernel(*qkv, p=0.3),
        TURNED,
        densifies="_flash_attention_backward",
    ),
    "efficient_kernel": Case("_efficient_attention_backward", efficient_kernel, TURNED),
    "efficient_kernel_bias": Case("_efficient_attention_backward", efficient_kernel, (*TURNED, (HEADS, T, S))),
    "efficient_kernel_dropout": Case(
        "_efficient_attention_backward",
        lambda *qkv: efficient_kernel(*qkv, p=0.3),
        TURNED,
        densifies="_efficient_attention_backward",
    ),
    "cudnn_batch_norm_exact": Case(
        "cudnn_batch_norm_backward",
        lambda *a: batch_norm("cudnn_batch_norm", *a),
        ((3, 4),),
        CHANNELS,
        densifies="cudnn_batch_norm_backward",
    ),
    "cudnn_instance_norm": Case("cudnn_batch_norm_backward", instance_norm, ((3, 4),), CHANNELS),
    "grid_sampler": Case(
        "cudnn_grid_sampler_backward", lambda x, grid: aten.cudnn_grid_sampler(x, grid.tanh()), ((3, 5, 5), (4, 4, 2))
    ),
    "ctc_loss": Case("mul.Tensor", ctc_loss, ((T, 4),)),  # its gradient is made forward, and only scaled
    "lstm": Case(RNN, recurrent(LSTM, False), ((T, 3), (D,), (D,)), weights(4), dtype=SINGLE),
    "lstm_batch_first": Case(RNN, recurrent(LSTM, True), ((T, 3), (D,), (D,)), weights(4), dtype=SINGLE),
    "lstm_output": Case(RNN, recurrent(LSTM, True, outputs=1), ((T, 3), (D,), (D,)), weights(4), dtype=SINGLE),
    "lstm_dropout": Case(RNN, recurrent(LSTM, True, 0.3), ((T, 3), (D,), (D,)), weights(4), RNN, SINGLE),
    "rnn": Case(RNN, recurrent(TANH, False), ((T, 3), (D,)), weights(1)),
    "rnn_batch_first": Case(RNN, recurrent(TANH, True), ((T, 3), (D,)), weights(1)),
    "lstm_cell": Case("_thnn_fused_lstm_cell_backward_impl", lstm_cell, ((D,), (D,)), ((D, 4 * D), *[(4 * D,)] * 2)),
    "lstm_cell_no_bias": Case("_thnn_fused_lstm_cell_backward_impl", lstm_cell, ((D,), (D,)), ((D, 4 * D),)),
    "gru_cell": Case("_thnn_fused_gru_cell_backward", gru_cell, ((D,), (D,)), ((D, 3 * D), *[(3 * D,)] * 2)),
    "gru_cell_no_bias": Case("_thnn_fused_gru_cell_backward", gru_cell, ((D,), (D,)), ((D, 3 * D),)),
}
if hasattr(aten, "_fused_rms_norm"):
    CASES["rms_norm"] = Case(
        "_fused_rms_norm_backward", lambda x, w: aten._fused_rms_norm(x, [D], w, None)[0], ((T, D),), ((D,),)
    )
if hasattr(aten, "_cudnn_attention_forward"):
    CASES["cudnn_kernel"] = Case("_cudnn_attention_backward", cudnn_kernel, QKV)


def compare(case: Case, rows: Any) -> Report:
    """Assert that a pick's gradients are those of plain indexing, up to the digits of the case's dtype."""
    index = rows.rows if isinstance(rows, rowprop.Selection) else rows
    expected, _ = gradients(case, lambda losses: losses[index])
    actual, report = gradients(case, lambda losses: rowprop.pick(losses, rows, batchnorm="exact"))
    digits = {torch.float64: 1e-11, SINGLE: 1e-5}.get(case.dtype, 2e-2)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert type(a) is Tensor
            torch.testing.assert_close(a, e, rtol=10 * digits, atol=digits * max(1.0, float(e.abs().max())))
    return report


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CASES)
# Red when: a saved tensor is not sliced or in another dimension, dropout is let through, a bias loses its padding, a
# gradient that begins at an odd place in memory (flash_beside, one row) is handed over as it is.
def test_gradients_equal_the_dense_truth(name: str, rows: str):
    case = CASES[name]
    report = compare(case, ROWS[rows])
    if case.densifies is None:
        assert case.op in report.sliced and not report.densified, str(report)
    else:
        assert set(report.densified) == {case.densifies}, str(report)


HALF = [(name, torch.bfloat16) for name in CASES if "norm" not in name or name == "rms_norm"]
HALF += [(name, torch.float16) for name, case in CASES.items() if "attention" in case.op]
HALF.remove(("ctc_loss", torch.bfloat16))  # single precision only


@pytest.mark.parametrize(("name", "dtype"), HALF)
# Red when: the kept rows reach a kernel in other dtypes than all rows do: statistics are in single precision here.
def test_half_precision(name: str, dtype: torch.dtype):
    case = replace(CASES[name], dtype=dtype)
    report = compare(case, ROWS["two"])
    assert set(report.densified) == {op for op in [case.densifies] if op}, str(report)


def operands(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(N, h, T, width).to(dtype) for h in (HEADS, heads, heads)]


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "width of a head": ("multiple of 8", lambda: flash(*operands(width=12))),
    "single precision": ("unsupported dtype", lambda: flash(*operands(SINGLE))),
    "width that is not innermost": ("must be contiguous", lambda: flash(*[t.mT.contiguous().mT for t in operands()])),
    "heads that do not divide": ("must divide", lambda: flash(*operands(heads=3))),
    "shared keys": ("as many heads", lambda: efficient(*operands(heads=1))),
    "wide heads": ("at most 128", lambda: cudnn(*operands(width=136))),
    "address": ("misaligned", lambda: cudnn(*[F.pad(t, (1, 0))[..., 1:] for t in operands(width=16)])),
    "strides of the bias": (
        "not correctly aligned",
        lambda: aten._scaled_dot_product_efficient_attention(
            *operands(), torch.zeros(N, HEADS, T, T, dtype=torch.bfloat16), True
        ),
    ),
    "strides of a state": (
        "not contiguous",
        lambda: aten._cudnn_rnn(
            *(torch.ones(N, T, 3), [torch.ones(D, 3)], 1, None, torch.ones(D, 1, N).permute(1, 2, 0), None),
            *(TANH, D, 0, 1, True, 0.0, True, False, [], None),
        ),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
# Red when: an emulated kernel takes operands that CUDA's own refuses.
def test_emulated_kernels_refuse_what_cudas_refuse(what: str):
    message, call = REFUSED[what]
    with pytest.raises(AssertionError, match=message):
        call()


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "flash_kernel", "efficient_kernel"])
def test_flops(name: str):
    case, index = CASES[name], torch.tensor([1, 4, 5])
    with count_flops() as full:
        gradients(case, lambda losses: losses[index])
    with count_flops() as part:
        gradients(case, lambda losses: rowprop.pick(losses, index))
    width = case.rows[2][-1]  # of the values; forward: scores and their mixture, backward: five such products
    pairs = T * (T + 1) // 2 if name.endswith("_kernel") else T * S  # those two are causal
    scores, mixture = (2 * N * HEADS * pairs * d for d in (WIDTH, width))
    expected = [scores + mixture, 3 * scores + 2 * mixture]
    assert list(full.by_op.values()) == expected and not full.uncounted
    assert list(part.by_op.values()) == [expected[0], expected[1] // 2] and not part.uncounted


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "attention" in case.op and n != "cudnn_kernel"])
# Red when: a rule calls its op with arguments that torch's own shape functions for CUDA refuse.
def test_shapes_are_those_of_torch(name: str):
    case, index = CASES[name], torch.tensor([1, 4], device="meta")
    grads, report = gradients(case, lambda losses: rowprop.pick(losses, index), "meta")
    assert (case.op in report.sliced) == (case.densifies is None)
    for grad, shape in zip(grads, [*[(N, *shape) for shape in case.rows], *case.shared], strict=True):
        assert grad is None or grad.shape == shape


def test_every_rule_that_needs_a_kernel_is_put_to_the_test():
    called = {case.op for case in CASES.values() if case.densifies is None}
    called |= {"cudnn_batch_norm_backward"}  # test_batch_norm_projects...
    assert {op_name(op) for op in RULES} & KERNELS.keys() == called & KERNELS.keys()


def test_a_bias_of_another_shape_than_the_scores_that_needs_a_gradient_densifies():
    # Red when: the sum over the rows that the kernel would have to make of its gradient is taken for rows.
    op = getattr(aten, EFFICIENT).default
    full, seed = torch.randn(N, HEADS, T, WIDTH), torch.zeros((), dtype=torch.int64)
    g = RowSlice(full[:2], RowSet(torch.tensor([1, 4]), N, unique=True, batchnorm="rows"), Layout(0, N), full.shape)
    rest = full, full, full, torch.zeros(1, HEADS, T, T), full, full[..., 0], seed, seed, 0.0, [True] * 4
    outcome = RULES[op].run(op, g, *rest)
    assert type(outcome) is Densify and "shape of the scores" in outcome.reason


@pytest.mark.parametrize("op", ["cudnn_batch_norm", "update"])
@pytest.mark.parametrize("channels_last", [False, True])
# Red when: cuDNN's rule hands the statistics over in another order, or leaves the projection out.
def test_batch_norm_projects_as_the_ordinary_kernel_does(op: str, channels_last: bool):
    index = torch.tensor([1, 4, 5])

    def run(norm: Callable[..., Tensor]) -> list[Tensor]:
        x, w, b = (leaf(i, shape, torch.float64) for i, shape in enumerate(((N, 3, 4, 2), (3,), (3,))))
        order = torch.channels_last if channels_last else torch.contiguous_format
        out = norm((x * 2 + 5).contiguous(memory_format=order), w, b)
        losses = (out - 0.3).square().flatten(1).sum(1)
        rowprop.pick(losses, index).sum().backward()
        return [v.grad for v in (x, w, b) if v.grad is not None]

    expected = run(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True))
    torch.testing.assert_close(run(lambda *args: batch_norm(op, *args)), expected)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def no_weight(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def evaluated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 2, w, b)


def trained(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def mixed(norm: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """As under autocast: the input is half precision, the parameters are not."""
    return norm(x.bfloat16(), *parameters).float()


def native_ctc(x: Tensor, *, in_one_line: bool = False) -> Tensor:
    lengths = [2, 1, 3, 2, 2, 1]
    targets = torch.arange(N * 3).reshape(N, 3) % 4 % 3 + 1
    if in_one_line:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    losses, _ = aten._ctc_loss(x.transpose(0, 1).log_softmax(-1), targets, [T, T, T, 6, T, 6], lengths, 0, False)
    return losses[:, None]


def experts(x: Tensor, w: Tensor) -> Tensor:
    """Row i goes to expert i % 3; the rows are sorted by expert, and back."""
    order = torch.arange(N).reshape(-1, 3).T.flatten()
    ends = torch.arange(1, 4, dtype=torch.int32) * (N // 3)
    out = aten._grouped_mm(x[order].bfloat16(), w.bfloat16(), ends)
    return out.float()[order.argsort()]


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    return F.embedding((x.detach() * 3).long() % 5, table) * x.unsqueeze(-1)


IMAGE, WEIGHTS = ((4, 3, 2),), ((4,), (4,))
ORDINARY: dict[str, Case] = {
    "batch norm": Case("native_batch_norm_backward", trained, IMAGE, WEIGHTS),
    "batch norm, channels last": Case(
        "native_batch_norm_backward", lambda x, w, b: trained(channels_last(x), w, b), IMAGE, WEIGHTS
    ),
    "batch norm of features": Case("native_batch_norm_backward", trained, ((4,),), WEIGHTS),
    "batch norm without a weight": Case("native_batch_norm_backward", no_weight, IMAGE),
    "batch norm, mixed": Case("native_batch_norm_backward", partial(mixed, trained), IMAGE, WEIGHTS, dtype=SINGLE),
    "batch norm in evaluation": Case("native_batch_norm_backward", evaluated, IMAGE, WEIGHTS),
    "cuDNN's batch norm": Case("native_batch_norm_backward", partial(batch_norm, "cudnn_batch_norm"), IMAGE, WEIGHTS),
    "cuDNN's batch norm, mixed": Case(
        "native_batch_norm_backward",
        partial(mixed, partial(batch_norm, "cudnn_batch_norm")),
        IMAGE,
        WEIGHTS,
        dtype=SINGLE,
    ),
    "either batch norm": Case("native_batch_norm_backward", partial(batch_norm, "update"), IMAGE, WEIGHTS),
    "instance norm": Case(
        "native_batch_norm_backward", lambda x, w, b: F.instance_norm(x, None, None, w, b), IMAGE, WEIGHTS
    ),
    "layer norm": Case(
        "native_layer_norm_backward", lambda x, w, b: F.layer_norm(x.mT, (4,), w, b).mT.contiguous(), ((4, 3),), WEIGHTS
    ),
    "group norm": Case(
        "native_group_norm_backward",
        lambda x, w, b: F.group_norm(x, 2, w, b).movedim(1, -1).contiguous(),
        IMAGE,
        WEIGHTS,
    ),
    "ctc": Case("_ctc_loss_backward", native_ctc, ((T + 2, 4),)),
    "ctc, in one line": Case("_ctc_loss_backward", partial(native_ctc, in_one_line=True), ((T + 2, 4),)),
    "cross entropy": Case(
        "nll_loss_backward", lambda x: F.cross_entropy(x, torch.arange(N) % 4, reduction="none")[:, None], ((4,),)
    ),
    "embedding": Case("embedding_dense_backward", looked_up, ((3,),), ((5, 4),)),
    "dropout": Case("native_dropout_backward", lambda x: aten.native_dropout(x, 0.3, True)[0], ((4,),)),
}
if hasattr(aten, "_grouped_mm"):
    ORDINARY["experts"] = Case("_grouped_mm", experts, ((16,),), ((3, 16, 8),), dtype=SINGLE)


@pytest.mark.parametrize("rows", ["two", "one", "repeats"])
@pytest.mark.parametrize("name", ORDINARY)
# Red when: the rule asks for BatchNorm's sums over the kept rows without a weight, which CUDA's kernels refuse; group
# norm gets the kept rows in other strides than CUDA's formula promises.
def test_ordinary_ops_are_called_as_cuda_takes_them(name: str, rows: str):
    case, index = ORDINARY[name], ROWS[rows]
    with checked() as ops:
        torch.manual_seed(0)
        found, report = gradients(case, lambda losses: rowprop.pick(losses, index, batchnorm="rows"))
    assert ops[case.op].calls and not report.densified, str(report)
    torch.manual_seed(0)
    expected, _ = gradients(case, lambda losses: losses[index])
    if "batch norm" not in name or "evaluation" in name:  # those are projected; the parameters' gradients are exact
        digits = 1e-9 if case.dtype == torch.float64 else 2e-2
        torch.testing.assert_close(found, expected, rtol=digits, atol=digits)
    else:
        digits = 1e-9 if case.dtype == torch.float64 else 5e-2
        torch.testing.assert_close(found[1:], expected[1:], rtol=digits, atol=digits)


VARIED = ["_flash_attention_backward", "_efficient_attention_backward", FLASH, CUDNN]


@pytest.mark.parametrize("length", ["q", "k"])
@pytest.mark.parametrize("name", VARIED)
# Red when: the lengths of packed sequences are looked for in another place, or under one of their two names only.
def test_packed_sequences_run_on_all_rows(name: str, length: str):
    op = getattr(aten, name).default
    given = {f"cum_seq_{length}", f"cu_seqlens_{length}"}
    args = [torch.arange(2) if a.name in given else None for a in op._schema.arguments[1:] if not a.kwarg_only]
    rows = RowSet(torch.tensor([1, 4]), N, unique=True, batchnorm="rows")
    outcome = RULES[op].run(op, RowSlice(torch.zeros(2, T, HEADS, D), rows, Layout(0, N), (N, T, HEADS, D)), *args)
    assert outcome == Densify("sequences of different lengths are packed one after another")


# Red when: the kept rows reach the kernel, whose choice of a format depends on the strides of all rows. The views of a
# projection are not contiguous in the forward, but their kept rows are: the log-sum-exp would be read transposed.
def test_cudnn_attention_that_avoids_recompiling_runs_on_all_rows(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    report = compare(CASES["cudnn_one_projection"], ROWS["two"])
    assert set(report.densified) == {CUDNN}


def test_the_tests_for_a_gpu_run_on_the_cpu():
    # Red when: test_gpu.py has a mistake that shows on any device.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ROWPROP_GPU_TESTS_ON": "cpu"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and b" passed" in done.stdout, done.stdout.decode()


# --- tokens -----------------------------------------------------------------------------------------------------------


def own(name: str, *more: Any) -> Callable[..., Tensor]:
    """A kernel's own call, (N, time, heads, width), for (N, heads, time, width)."""
    op = getattr(aten, name)
    return lambda q, k, v: op(*(x.transpose(1, 2) for x in (q, k, v)), *more)[0].transpose(1, 2)


TOKENS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    FLASH: lambda q, k, v: flash(q, k, v, is_causal=True),
    EFFICIENT: lambda q, k, v: efficient(q, k, v, is_causal=True),
    CUDNN: lambda q, k, v: cudnn(q, k, v, is_causal=True),
    "_flash_attention_backward": own("_flash_attention_forward", None, None, T, T, 0.0, True, False),
    "_efficient_attention_backward": own("_efficient_attention_forward", None, None, None, T, T, 0.0, 1, True),
}
SOME = torch.tensor([[1, 0, 0, 1, 0], [0] * 5, [1] * 5, [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 1, 0, 0]]).bool()


def of_tokens(take: Callable[[Tensor], Tensor], attention: Callable[..., Tensor]) -> list[Tensor]:
    """Gradients of two layers of attention, with a loss for each token."""
    w = [leaf(i, (WIDTH, 3 * HEADS * WIDTH), torch.float64) for i in (1, 2)]
    x, back = leaf(0, (N, T, WIDTH), torch.float64), leaf(3, (HEADS * WIDTH, WIDTH), torch.float64)
    h: Tensor = x
    for layer in w:
        heads = (h @ layer).tanh().unflatten(2, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        h = (attention(*heads).transpose(1, 2).flatten(2) @ back).tanh()
    take(h.square().mean(-1)).sum().backward()
    return [leaf.grad for leaf in (*w, x, back) if leaf.grad is not None]


@pytest.mark.parametrize("op", TOKENS)
@pytest.mark.parametrize("policy", ["exact", "cut"])
@pytest.mark.parametrize("time_in_front", [False, True])
# Red when: the tokens' dimension is taken for that of the heads; keys' gradients go on whole under cut, or sliced under
# exact; time in front is not told from the batch.
def test_tokens_go_on_sliced_behind_a_kernel_that_takes_all(op: str, policy: Any, time_in_front: bool):
    attention, here = TOKENS[op], SOME[:, None, :, None]

    def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, torch.where(here, k, k.detach()), torch.where(here, v, v.detach()))

    def take(losses: Tensor) -> Tensor:
        if time_in_front:
            return rowprop.pick(losses.T, SOME.T, attention=policy)
        return rowprop.pick(losses, SOME, attention=policy)

    expected = of_tokens(lambda losses: losses[SOME], detached if policy == "cut" else attention)
    other = of_tokens(lambda losses: losses[SOME], attention if policy == "cut" else detached)
    with rowprop.watch() as report:
        actual = of_tokens(take, attention)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(actual[0], other[0], rtol=1e-3, atol=1e-5)
    assert report.densified[op].reason == "the kernel takes all tokens"
    assert report.cut == ({op: 2} if policy == "cut" else {})
    assert policy == "exact" or list(report.densified) == [op]
