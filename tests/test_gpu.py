"""The same gradients on CUDA, by the kernels that only it has. Skipped where there is no such device.

What these kernels' rules do is tested on any machine by test_cuda_rules.py; here the kernels themselves run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import rowprop
from rowprop.backprop.watch import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, on which kernel it takes and why not another
]

DEVICE = "cuda"
N, HEADS, T, S, D = 6, 2, 16, 24, 32
INDEX = [1, 4]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
Losses = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def full_precision() -> Generator[None]:
    """No TF32: it rounds differently at other batch sizes."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def leaf(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same values on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def per_row(*outs: Tensor) -> Tensor:
    """(N, ...) outputs to one loss per row."""
    return torch.stack([((out.float() - 0.3 - 0.1 * i) ** 2).flatten(1).sum(1) for i, out in enumerate(outs)]).sum(0)


def gradients(
    losses_of: Losses,
    shapes: list[tuple[int, ...]],
    params: list[Tensor],
    dtype: torch.dtype,
    take: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], Report]:
    inputs = [leaf(i, shape, dtype) for i, shape in enumerate(shapes)]
    torch.manual_seed(0)  # for the ops that draw
    losses = losses_of(*[x * 1 for x in inputs])
    for p in params:
        p.grad = None
    with rowprop.watch() as report:
        take(losses).sum().backward()
    return [v.grad for v in (*inputs, *params) if v.grad is not None], report


def compare(
    losses_of: Losses,
    shapes: list[tuple[int, ...]],
    params: list[Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Report:
    """Assert that ``pick`` gives the gradients of plain indexing, relative to each gradient's largest entry."""
    index = torch.tensor(INDEX, device=DEVICE)
    run = partial(gradients, losses_of, shapes, params or [], dtype)
    expected, _ = run(lambda losses: losses[index])
    actual, report = run(lambda losses: rowprop.pick(losses, index, batchnorm="exact"))
    for a, e in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        scale = max(float(e.float().abs().max()), 1e-3)
        assert float((a.float() - e.float()).abs().max()) <= TOLERANCE[dtype] * scale
    return report


# --- attention -------------------------------------------------------------------------------------------------------

FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
OPS = {
    FLASH: "_scaled_dot_product_flash_attention_backward",
    EFFICIENT: "_scaled_dot_product_efficient_attention_backward",
    CUDNN: "_scaled_dot_product_cudnn_attention_backward",
}
QKV = [(N, HEADS, T, D), (N, HEADS, S, D), (N, HEADS, S, D)]


def attention(backend: SDPBackend, *qkv: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*qkv, **options)


def keys_kept(s: int) -> Tensor:
    """A padding mask, (N, 1, 1, S): row i attends to all keys but the last i."""
    return torch.arange(s, device=DEVICE)[None, None, None] < s - torch.arange(N, device=DEVICE)[:, None, None, None]


ATTENTION: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "plain": (QKV, lambda run, q, k, v: run(q, k, v)),
    "causal": ([QKV[0]] * 3, lambda run, q, k, v: run(q, k, v, is_causal=True, scale=0.2)),
    "turned": (
        [(N, T, HEADS, D)] * 3,
        lambda run, *qkv: run(*[t.transpose(1, 2) for t in qkv]).transpose(1, 2),
    ),
    "one projection": ([(N, T, 3, HEADS, D)], lambda run, x: run(*x.permute(2, 0, 3, 1, 4))),
    "odd width": ([(N, HEADS, T, 20)] * 3, lambda run, q, k, v: run(q, k, v)),
    "odd length": ([(N, HEADS, 13, D)] * 3, lambda run, q, k, v: run(q, k, v)),
    "expanded keys": (
        [QKV[0], (N, 1, S, D), (N, 1, S, D)],
        lambda run, q, k, v: run(q, k.expand(QKV[1]), v.expand(QKV[1])),
    ),
    "padding mask": (QKV, lambda run, q, k, v: run(q, k, v, attn_mask=keys_kept(S))),
    "padding mask of odd length": (
        [(N, HEADS, 13, D)] * 3,
        lambda run, q, k, v: run(q, k, v, attn_mask=keys_kept(13)),
    ),
    "bias of every row": (
        [*[(N, HEADS, 13, D)] * 3, (N, HEADS, 13, 13)],
        lambda run, q, k, v, b: run(q, k, v, attn_mask=b),
    ),
    "bias of every key": ([*QKV, (N, 1, 1, S)], lambda run, q, k, v, b: run(q, k, v, attn_mask=b)),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(FLASH, torch.bfloat16), (EFFICIENT, torch.float32), (EFFICIENT, torch.float16), (CUDNN, torch.bfloat16)],
    ids=str,
)
def test_attention(backend: SDPBackend, dtype: torch.dtype, case: str):
    shapes, f = ATTENTION[case]
    run = partial(attention, backend)
    try:
        f(run, *[leaf(i, shape, dtype) for i, shape in enumerate(shapes)])
    except RuntimeError as error:
        pytest.skip(f"this backend does not take this here: {str(error).partition('.')[0]}")
    report = compare(lambda *inputs: per_row(f(run, *inputs)), shapes, dtype=dtype)
    assert OPS[backend] in report.sliced and not report.densified, str(report)


@pytest.mark.parametrize("backend", OPS, ids=str)
def test_attention_with_a_bias_that_all_rows_share(backend: SDPBackend):
    bias = leaf(9, (HEADS, T, S), torch.bfloat16)
    losses_of = lambda q, k, v: per_row(attention(backend, q, k, v, attn_mask=bias))  # noqa: E731
    try:
        losses_of(*[leaf(i, shape, torch.bfloat16) for i, shape in enumerate(QKV)])
    except RuntimeError as error:
        pytest.skip(f"this backend does not take this here: {str(error).partition('.')[0]}")
    assert not compare(losses_of, QKV, [bias], torch.bfloat16).densified


@pytest.mark.parametrize("backend", OPS, ids=str)
# Red when: dropout in the kernel is let through; it would draw other masks for fewer rows.
def test_dropout_in_attention_is_dense(backend: SDPBackend):
    losses_of = lambda *qkv: per_row(attention(backend, *qkv, dropout_p=0.3))  # noqa: E731
    try:
        losses_of(*[leaf(i, shape, torch.bfloat16) for i, shape in enumerate(QKV)])
    except RuntimeError as error:
        pytest.skip(f"this backend does not take this here: {str(error).partition('.')[0]}")
    assert set(compare(losses_of, QKV, dtype=torch.bfloat16).densified) == {OPS[backend]}


# --- convolutions and norms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_convolutions(dtype: torch.dtype, channels_last: bool):
    order = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.GELU(),
        nn.Conv2d(16, 8, 1, stride=2), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2),
    ).to(DEVICE, dtype, memory_format=order)  # fmt: skip
    report = compare(
        lambda x: per_row(model(x.contiguous(memory_format=order))),
        [(N, 8, 16, 16)],
        list(model.parameters()),
        dtype,
    )
    assert "convolution_backward" in report.sliced and not report.densified, str(report)


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer": lambda x, w, b: F.layer_norm(x.movedim(1, -1), (8,), w, b),
    "rms": lambda x, w, b: F.rms_norm(x.movedim(1, -1), (8,), w) + b,
    "group": lambda x, w, b: F.group_norm(x, 4, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "batch, eval": lambda x, w, b: F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 2, w, b),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, channels_last: bool):
    order = torch.channels_last if channels_last else torch.contiguous_format
    w, b = leaf(8, (8,), torch.float32), leaf(9, (8,), torch.float32)
    report = compare(lambda x: per_row(NORMS[name](x.contiguous(memory_format=order), w, b)), [(N, 8, 6, 6)], [w, b])
    assert not report.densified, str(report)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_batch_norm(cudnn: bool, channels_last: bool, half: bool):
    order = torch.channels_last if channels_last else torch.contiguous_format
    w, b = leaf(8, (8,), torch.float32), leaf(9, (8,), torch.float32)
    dtype = torch.float16 if half else torch.float32

    def losses_of(x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=False):
            out = F.batch_norm(x.to(dtype).contiguous(memory_format=order), None, None, w, b, training=True)
        return per_row(out)

    report = compare(losses_of, [(N, 8, 6, 6)], [w, b], torch.float16 if half else torch.float32)
    assert set(report.densified) <= {"cudnn_batch_norm_backward", "native_batch_norm_backward"}
    assert len(report.densified) == 1

    # the projection, beside that of the CPU's kernel, which is tested against its formula
    index = torch.tensor(INDEX)

    def projected(device: str) -> list[Tensor]:
        x = leaf(0, (N, 8, 6, 6), torch.float32).detach().to(dtype).to(device).requires_grad_()
        w, b = (leaf(i, (8,), torch.float32).detach().to(device).requires_grad_() for i in (8, 9))
        inputs = x if device == DEVICE else x.float()
        with torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=False):
            out = F.batch_norm(inputs.contiguous(memory_format=order), None, None, w, b, training=True)
        rowprop.pick(per_row(out), index.to(device)).sum().backward()
        return [v.grad.float().cpu() for v in (x, w, b) if v.grad is not None]

    for a, e in zip(projected(DEVICE), projected("cpu"), strict=True):
        torch.testing.assert_close(a, e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * float(e.abs().max()))


# --- recurrent -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True, "num_layers": 2}, {"num_layers": 2, "bias": False}, {"dropout": 0.3, "num_layers": 2}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_recurrent_layers(kind: str, options: dict[str, Any], batch_first: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    rnn = getattr(nn, kind)(5, 8, batch_first=batch_first, **options).to(DEVICE, dtype)

    def losses_of(x: Tensor) -> Tensor:
        y, h = rnn(x if batch_first else x.transpose(0, 1))
        states = h if isinstance(h, tuple) else (h,)
        return per_row(y if batch_first else y.transpose(0, 1), *[s.transpose(0, 1) for s in states])

    report = compare(losses_of, [(N, T, 5)], list(rnn.parameters()), dtype)
    if options.get("dropout"):
        assert set(report.densified) == {"_cudnn_rnn_backward"}
    else:
        assert "_cudnn_rnn_backward" in report.sliced and not report.densified, str(report)


def test_recurrent_layers_with_states_and_a_projection():
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 8, batch_first=True, proj_size=3).to(DEVICE)

    def losses_of(x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, (h, c) = lstm(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return per_row(y, h.transpose(0, 1), c.transpose(0, 1))

    report = compare(losses_of, [(N, T, 5), (N, 1, 3), (N, 1, 8)], list(lstm.parameters()))
    assert "_cudnn_rnn_backward" in report.sliced and not report.densified, str(report)


def test_packed_sequences():
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 8, batch_first=True).to(DEVICE)

    def losses_of(x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([16, 16, 9, 4, 2, 1]), batch_first=True)
        return per_row(nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0])

    compare(losses_of, [(N, T, 5)], list(lstm.parameters()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_cells(kind: str, bias: bool):
    torch.manual_seed(0)
    cell = getattr(nn, kind)(5, 8, bias=bias).to(DEVICE)

    def losses_of(x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = cell(step, state)
        return per_row(*(state if isinstance(state, tuple) else (state,)))

    report = compare(losses_of, [(N, 3, 5)], list(cell.parameters()))
    op = {"LSTMCell": "_thnn_fused_lstm_cell_backward_impl", "GRUCell": "_thnn_fused_gru_cell_backward"}[kind]
    assert op in report.sliced and not report.densified, str(report)


# --- everything else -------------------------------------------------------------------------------------------------


def foreach(x: Tensor) -> Tensor:
    halves = torch._foreach_mul(list(x.chunk(2, 1)), [2.0, 3.0])
    return torch.cat(torch._foreach_add(torch._foreach_tanh(halves), 0.5), 1)


def cross_entropy(x: Tensor) -> Tensor:
    target = torch.arange(N, device=DEVICE) % x.shape[1]
    return F.cross_entropy(x, target, reduction="none", label_smoothing=0.1)[:, None]


OTHERS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "dropout": ((N, 16), lambda x: F.dropout(x, 0.3)),
    "softmax": ((N, 16), lambda x: x.softmax(1)),
    "cross entropy": ((N, 7), cross_entropy),
    "binary cross entropy": (
        (N, 7),
        lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype), reduction="none"),
    ),
    "foreach": ((N, 8), foreach),
    "cumsum": ((N, 8), lambda x: x.cumsum(1)),
    "sort": ((N, 8), lambda x: x.sort(1).values),
    "gather": ((N, 8), lambda x: x.gather(1, torch.arange(3, device=DEVICE).expand(N, 3))),
    "upsample": ((N, 2, 4, 4), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "max pool": ((N, 2, 4, 4), lambda x: F.max_pool2d(x, 2)),
    **{
        f"grid sample, corners {corners}": (
            (N, 3, 5, 5),
            lambda x, corners=corners: F.grid_sample(x, x[:, :2, :4, :4].movedim(1, -1).tanh(), align_corners=corners),
        )
        for corners in (True, False)
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ops(name: str):
    shape, f = OTHERS[name]
    report = compare(lambda x: per_row(f(x)), [shape])
    assert not report.densified, str(report)


class Block(nn.Module):
    """An encoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(N, T, 3, HEADS, D).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_encoder_under_autocast(dtype: torch.dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(64, 5)).to(DEVICE)

    def losses_of(x: Tensor) -> Tensor:
        with nullcontext() if dtype == torch.float32 else torch.autocast(DEVICE, dtype):
            return per_row(model(x))

    index = torch.tensor(INDEX, device=DEVICE)
    run = partial(gradients, losses_of, [(N, T, 64)], list(model.parameters()), torch.float32)
    expected, _ = run(lambda losses: losses[index])
    actual, report = run(lambda losses: rowprop.pick(losses, index))
    assert not report.densified, str(report)
    for a, e in zip(actual, expected, strict=True):
        assert float((a - e).abs().max()) <= TOLERANCE[dtype] * max(float(e.abs().max()), 1e-2)


def test_a_gradient_scaler_unscales_and_steps():
    torch.manual_seed(0)
    weights: list[Tensor] = []
    for picked in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3).to(DEVICE)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(DEVICE, init_scale=64.0)
        index = torch.tensor(INDEX, device=DEVICE)
        for _ in range(3):
            with torch.autocast(DEVICE, torch.float16):
                losses = per_row(model(leaf(0, (N, 8), torch.float32)))
            loss = rowprop.pick(losses, index).mean() if picked else losses[index].mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)


def test_indices_make_nothing_wait_for_the_device():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(DEVICE)
    x, index = leaf(0, (N, 16), torch.float32), torch.tensor(INDEX, device=DEVICE)
    for _ in range(2):  # the first time, libraries are loaded
        losses = per_row(model(x))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rowprop.pick(losses, index).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_selection_of_ones_own_is_checked_without_waiting():
    # Red when: Selection reads its rows or its weights on CUDA.
    rows, weights = torch.tensor([0, 2, 5], device=DEVICE), torch.full((3,), 1 / 3, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        selection = rowprop.Selection(rows, weights, 8, even=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()  # a failed assertion of the device would be told here
    assert selection.num_kept == 3
