"""The same gradients on CUDA, by the kernels that only it has. Skipped where there is no such device.

What these kernels' rules do is tested on any machine by test_cuda_rules.py; here the kernels themselves run.

``ROWPROP_GPU_TESTS_ON=cpu pytest tests/test_gpu.py`` runs the bodies on the CPU, with the kernels that it has, and with
nothing in the place of streams and graphs. So a mistake in this file is found on any machine.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import device_cases
import rowprop
import rule_cases
import token_models
import zoo
from accelerator import Moving
from rowprop import host
from rowprop.backprop.compiled import backend
from rowprop.backprop.watch import Report
from rowprop.cost.profile import profile
from zoo import Net

DEVICE = os.environ.get("ROWPROP_GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE != "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, on which kernel it takes and why not another
]

N, HEADS, T, S, D = 6, 2, 16, 24, 32
ROWS: dict[str, Callable[[], Any]] = {
    "two": lambda: torch.tensor([1, 4], device=DEVICE),
    "one": lambda: torch.tensor([3], device=DEVICE),
    "repeats": lambda: torch.tensor([0, 2, 2, -1], device=DEVICE),
    "mask": lambda: torch.arange(N, device=DEVICE) % 3 == 1,
    "selection": lambda: rowprop.Selection(torch.tensor([0, 2, 5]).to(DEVICE), torch.full((3,), 1 / 3).to(DEVICE), N),
}
ORDERS = [torch.contiguous_format, torch.channels_last]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
Shapes = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def in_full_precision() -> Generator[None]:
    """No TF32: it rounds differently at other batch sizes."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def few(cases: Iterable[Any], step: int) -> list[Any]:
    """All cases; on the CPU, where others run them, one of ``step``."""
    return list(cases)[:: 1 if ON_GPU else step]


def leaf(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same values on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def per_row(*outs: Tensor) -> Tensor:
    """(N, ...) outputs to one loss per row."""
    return torch.stack([((out.float() - 0.3 - 0.1 * i) ** 2).flatten(1).sum(1) for i, out in enumerate(outs)]).sum(0)


def gradients(
    losses_of: Callable[..., Tensor], shapes: Shapes, params: list[Tensor], dtype: torch.dtype, take: Any
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
    losses_of: Callable[..., Tensor],
    shapes: Shapes,
    params: list[Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    rows: str = "two",
    tolerance: float | None = None,
    least: float = 1e-3,
    **options: Any,
) -> Report:
    """Assert that ``pick`` gives the gradients of plain indexing, relative to each gradient's largest entry."""
    kept = ROWS[rows]()
    index = kept.rows if isinstance(kept, rowprop.Selection) else kept
    run = partial(gradients, losses_of, shapes, params or [], dtype)
    expected, _ = run(lambda losses: losses[index])
    actual, report = run(lambda losses: rowprop.pick(losses, kept, **options))
    assert_close(actual, expected, tolerance or TOLERANCE[dtype], least)
    return report


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float, least: float = 1e-3) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert type(a) is Tensor
        scale = max(float(e.float().abs().max()), least)
        assert float((a.float() - e.float()).abs().max()) <= tolerance * scale


@contextmanager
def skipped_where_a_backend_refuses(*but: str) -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        if but and not any(known in str(error) for known in but):
            raise
        pytest.skip(f"this backend does not take this here: {str(error).partition('.')[0]}")


def assert_sliced(report: Report, op: str) -> None:
    """Nothing densified, and this kernel of CUDA's ran."""
    assert not report.densified, str(report)
    assert op in report.sliced or not ON_GPU, str(report)


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


ATTENTION: dict[str, tuple[Shapes, Callable[..., Tensor]]] = {
    "plain": (QKV, lambda run, q, k, v: run(q, k, v)),
    "causal": ([QKV[0]] * 3, lambda run, q, k, v: run(q, k, v, is_causal=True, scale=0.2)),
    "turned": ([(N, T, HEADS, D)] * 3, lambda run, *qkv: run(*[t.transpose(1, 2) for t in qkv]).transpose(1, 2)),
    "one projection": ([(N, T, 3, HEADS, D)], lambda run, x: run(*x.permute(2, 0, 3, 1, 4))),
    "odd width": ([(N, HEADS, T, 20)] * 3, lambda run, q, k, v: run(q, k, v)),
    "odd length": ([(N, HEADS, 13, D)] * 3, lambda run, q, k, v: run(q, k, v)),
    "expanded keys": (
        [QKV[0], (N, 1, S, D), (N, 1, S, D)],
        lambda run, q, k, v: run(q, k.expand(QKV[1]), v.expand(QKV[1])),
    ),
    "one step in time, beside other features": (
        [(N, 3), *[(N, HEADS, 1, D)] * 3],
        lambda run, x, *qkv: torch.cat([x, run(*qkv).flatten(1)], 1),
    ),
    "grouped queries": ([(N, 2 * HEADS, T, D), *QKV[1:]], lambda run, q, k, v: run(q, k, v, enable_gqa=True)),
    "padding mask": (QKV, lambda run, q, k, v: run(q, k, v, attn_mask=keys_kept(S))),
    "padding mask of odd length": ([(N, HEADS, 13, D)] * 3, lambda run, *qkv: run(*qkv, attn_mask=keys_kept(13))),
    "bias of every row": (
        [*[(N, HEADS, 13, D)] * 3, (N, HEADS, 13, 13)],
        lambda run, q, k, v, b: run(q, k, v, attn_mask=b),
    ),
    "bias of every key": ([*QKV, (N, 1, 1, S)], lambda run, q, k, v, b: run(q, k, v, attn_mask=b)),
}


@pytest.mark.parametrize("rows", ["two", "one"])
@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(FLASH, torch.bfloat16), (EFFICIENT, torch.float32), (EFFICIENT, torch.float16), (CUDNN, torch.bfloat16)],
    ids=str,
)
def test_attention(backend: SDPBackend, dtype: torch.dtype, case: str, rows: str):
    if backend == CUDNN and "beside" in case:
        pytest.skip("cuDNN's own backward takes a gradient that begins at an odd address as it is")
    shapes, f = ATTENTION[case]
    run = partial(attention, backend)
    with skipped_where_a_backend_refuses():
        f(run, *[leaf(i, shape, dtype) for i, shape in enumerate(shapes)])
    report = compare(lambda *inputs: per_row(f(run, *inputs)), shapes, dtype=dtype, rows=rows)
    assert_sliced(report, OPS[backend])


# Red when: dropout in the kernel is let through; it would draw other masks for fewer rows.
@pytest.mark.parametrize("rows", ["shared bias", *ROWS])
@pytest.mark.parametrize("backend", OPS, ids=str)
def test_a_bias_that_all_rows_share_and_dropout(backend: SDPBackend, rows: str):
    shared = rows == "shared bias"
    bias = leaf(9, (HEADS, T, S), torch.bfloat16)
    options = {"attn_mask": bias} if shared else {"dropout_p": 0.3}

    def losses_of(*qkv: Tensor) -> Tensor:
        return per_row(attention(backend, *qkv, **options))

    with skipped_where_a_backend_refuses():
        losses_of(*[leaf(i, shape, torch.bfloat16) for i, shape in enumerate(QKV)])
    report = compare(losses_of, QKV, [bias] * shared, torch.bfloat16, "two" if shared else rows)
    assert set(report.densified) == (set() if shared else {OPS[backend]}) or not (shared or ON_GPU)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_convolutions(dtype: torch.dtype, order: torch.memory_format):
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.GELU(),
        nn.Conv2d(16, 8, 1, stride=2), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(2),
    ).to(DEVICE, dtype, memory_format=order)  # fmt: skip
    losses_of = lambda x: per_row(model(x.contiguous(memory_format=order)))  # noqa: E731
    report = compare(losses_of, [(N, 8, 16, 16)], list(model.parameters()), dtype)
    assert_sliced(report, "convolution_backward")


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "layer": lambda x, w, b: F.layer_norm(x.movedim(1, -1), (8,), w, b),
    "rms": lambda x, w, b: F.rms_norm(x.movedim(1, -1), (8,), w) + b,
    "group": lambda x, w, b: F.group_norm(x, 4, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "batch, eval": lambda x, w, b: F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 2, w, b),
}


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, order: torch.memory_format):
    w, b = leaf(8, (8,), torch.float32), leaf(9, (8,), torch.float32)
    report = compare(lambda x: per_row(NORMS[name](x.contiguous(memory_format=order), w, b)), [(N, 8, 6, 6)], [w, b])
    assert not report.densified, str(report)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_batch_norm(cudnn: bool, order: torch.memory_format, dtype: torch.dtype):
    w, b = leaf(8, (8,), torch.float32), leaf(9, (8,), torch.float32)

    def losses_of(x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=False):
            out = F.batch_norm(x.to(dtype).contiguous(memory_format=order), None, None, w, b, training=True)
        return per_row(out)

    report = compare(losses_of, [(N, 8, 6, 6)], [w, b], dtype, batchnorm="exact")
    assert set(report.densified) <= {"cudnn_batch_norm_backward", "native_batch_norm_backward"}
    assert len(report.densified) == 1


@pytest.mark.parametrize("kept", [[1, 4], [3], [0, 2, 2]], ids=str)
@pytest.mark.parametrize("kind", ["image", "channels last", "features"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
# Red when: a kernel of CUDA's refuses or misreads what the projection hands over, without a weight above all. Beside it
# is the projection by the CPU's kernel, which is tested against its formula.
def test_batch_norm_projects_as_on_the_cpu(cudnn: bool, affine: bool, kind: str, dtype: Any, kept: list[int]):
    order = ORDERS[kind == "channels last"]

    def projected(device: str) -> list[Tensor]:
        x = leaf(0, (N, 8) if kind == "features" else (N, 8, 6, 6), torch.float32).detach().to(dtype).to(device)
        w, b = (leaf(i, (8,), torch.float32).detach().to(device).requires_grad_() for i in (8, 9))
        inputs = x.requires_grad_() if device == DEVICE else x.float().requires_grad_()
        with torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=False):
            given = (w, b) if affine else (None, None)
            out = F.batch_norm(inputs.contiguous(memory_format=order), None, None, *given, training=True)
        rowprop.pick(per_row(out), torch.tensor(kept, device=device)).sum().backward()
        return [v.grad.float().cpu() for v in (inputs, w, b) if v.grad is not None]

    for a, e in zip(projected(DEVICE), projected("cpu"), strict=True):
        torch.testing.assert_close(a, e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(float(e.abs().max()), 1e-3))


LAYERS = {
    "one layer": {},
    "two directions": {"bidirectional": True, "num_layers": 2},
    "without biases": {"num_layers": 2, "bias": False},
    "dropout": {"dropout": 0.3, "num_layers": 2},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_recurrent_layers(kind: str, options: str, batch_first: bool, dtype: torch.dtype):
    rnn = getattr(nn, kind)(5, 8, batch_first=batch_first, **LAYERS[options]).to(DEVICE, dtype)

    def losses_of(x: Tensor) -> Tensor:
        y, h = rnn(x if batch_first else x.transpose(0, 1))
        states = h if isinstance(h, tuple) else (h,)
        return per_row(y if batch_first else y.transpose(0, 1), *[s.transpose(0, 1) for s in states])

    report = compare(losses_of, [(N, T, 5)], list(rnn.parameters()), dtype)
    if options == "dropout":
        assert set(report.densified) == {"_cudnn_rnn_backward"} or not ON_GPU
    else:
        assert_sliced(report, "_cudnn_rnn_backward")


def test_recurrent_layers_with_states_and_a_projection():
    lstm = nn.LSTM(5, 8, batch_first=True, proj_size=3).to(DEVICE)

    def losses_of(x: Tensor, *states: Tensor) -> Tensor:
        y, states = lstm(x, tuple(state.transpose(0, 1).contiguous() for state in states))
        return per_row(y, *[state.transpose(0, 1) for state in states])

    report = compare(losses_of, [(N, T, 5), (N, 1, 3), (N, 1, 8)], list(lstm.parameters()))
    assert_sliced(report, "_cudnn_rnn_backward")


def test_packed_sequences():
    lstm = nn.LSTM(5, 8, batch_first=True).to(DEVICE)

    def losses_of(x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([16, 16, 9, 4, 2, 1]), batch_first=True)
        return per_row(nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0])

    compare(losses_of, [(N, T, 5)], list(lstm.parameters()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_cells(kind: str, bias: bool):
    cell = getattr(nn, f"{kind.upper()}Cell")(5, 8, bias=bias).to(DEVICE)

    def losses_of(x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = cell(step, state)
        return per_row(*(state if isinstance(state, tuple) else (state,)))

    report = compare(losses_of, [(N, 3, 5)], list(cell.parameters()))
    assert_sliced(report, f"_thnn_fused_{kind}_cell_backward{'_impl' if kind == 'lstm' else ''}")


def foreach(x: Tensor) -> Tensor:
    halves = torch._foreach_mul(list(x.chunk(2, 1)), [2.0, 3.0])
    return torch.cat(torch._foreach_add(torch._foreach_tanh(halves), 0.5), 1)


def cross_entropy(x: Tensor) -> Tensor:
    target = torch.arange(N, device=DEVICE) % x.shape[1]
    return F.cross_entropy(x, target, reduction="none", label_smoothing=0.1)[:, None]


def grid_of(x: Tensor) -> Tensor:
    return x[:, :2, :4, :4].movedim(1, -1).tanh()


def masked_token_losses(x: Tensor) -> Tensor:
    """As a language model leaves out the tokens of padding."""
    target = torch.arange(N * T, device=DEVICE).reshape(N, T) % x.shape[-1]
    losses = F.cross_entropy(x.movedim(-1, 1), target, reduction="none")
    return torch.where(target > 1, losses, 0.0)


def native_ctc(x: Tensor, *, in_one_line: bool = False) -> Tensor:
    """Labels on the device, in a line for each row or all in one: torch's own kernel."""
    lengths = torch.tensor([2, 1, 3, 2, 2, 1])
    targets = torch.arange(3 * N, device=DEVICE).reshape(N, 3) % 4 % 3 + 1
    if in_one_line:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths.tolist(), strict=True)])
    scores = x.transpose(0, 1).log_softmax(-1)
    return F.ctc_loss(scores, targets, torch.full((N,), T), lengths, reduction="none")[:, None]


def cudnn_ctc(x: Tensor) -> Tensor:
    """Labels on the host, one row's after the other's: cuDNN's kernel."""
    targets = torch.tensor([1, 2, 3] * 4, dtype=torch.int32)
    scores = x.transpose(0, 1).log_softmax(-1)
    return F.ctc_loss(scores, targets, (T,) * N, (2,) * N, reduction="none")[:, None]


OTHERS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "where": ((N, 8), lambda x: torch.where(x > 0.1, x, 0.0)),
    "clamp": ((N, 8), lambda x: x.clamp(-0.5, 0.5) + x.clamp_min(0.2).log()),
    "normalize": ((N, 8), lambda x: F.normalize(x, dim=1)),
    "unused chunk": ((N, 9), lambda x: F.silu(x.chunk(3, 1)[0]) * x.chunk(3, 1)[1]),
    "masked token losses": ((N, T, 7), masked_token_losses),
    "CTC": ((N, T, 4), native_ctc),
    "CTC, labels in one line": ((N, T, 4), partial(native_ctc, in_one_line=True)),
    "CTC by cuDNN": ((N, T, 4), cudnn_ctc),
    "powers": ((N, 8), lambda x: x.abs() ** x.sigmoid() + x.sinc()),
    "dropout": ((N, 16), lambda x: F.dropout(x, 0.3)),
    "softmax": ((N, 16), lambda x: x.softmax(1)),
    "cross entropy": ((N, 7), cross_entropy),
    "cross entropy of two": (
        (N, 7),
        lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float(), reduction="none"),
    ),
    "foreach": ((N, 8), foreach),
    "cumsum": ((N, 8), lambda x: x.cumsum(1)),
    "sort": ((N, 8), lambda x: x.sort(1).values),
    "gather": ((N, 8), lambda x: x.gather(1, torch.arange(3, device=DEVICE).expand(N, 3))),
    "upsample": ((N, 2, 4, 4), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "max pool": ((N, 2, 4, 4), lambda x: F.max_pool2d(x, 2)),
    "grid sample": ((N, 3, 5, 5), lambda x: F.grid_sample(x, grid_of(x), align_corners=False)),
    "grid sample, corners": ((N, 3, 5, 5), lambda x: F.grid_sample(x, grid_of(x), align_corners=True)),
}


@pytest.mark.parametrize("rows", ["two", "one", "repeats"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_ops(name: str, rows: str):
    shape, f = OTHERS[name]
    report = compare(lambda x: per_row(f(x)), [shape], rows=rows)
    assert not report.densified, str(report)


def experts(grouped: bool) -> nn.Module:
    """A mixture: each token goes to one of three experts, and its result is added back in its place."""

    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates = net.router(tokens).softmax(-1)
        expert = gates.argmax(-1)
        if grouped:
            order = expert.argsort(stable=True)
            ends = (expert[:, None] == torch.arange(3, device=DEVICE)).sum(0).cumsum(0).int()
            hidden = torch._grouped_mm(tokens[order], net.up, ends).relu()
            out = torch._grouped_mm(hidden, net.down, ends) * gates[order].gather(1, expert[order, None])
            return torch.zeros_like(tokens).index_add(0, order, out).view_as(x)
        out = torch.zeros_like(tokens)
        for i in range(3):
            (chosen,) = (expert == i).nonzero(as_tuple=True)
            out = out.index_add(0, chosen, tokens[chosen] @ net.up[i] @ net.down[i] * gates[chosen, i, None])
        return out.view_as(x)

    up, down = (nn.Parameter(torch.randn(3, *shape) / 4) for shape in ((16, 32), (32, 16)))
    return Net(forward, router=nn.Linear(16, 3), up=up, down=down)


@pytest.mark.parametrize("rows", ["two", "one", "repeats"])
@pytest.mark.parametrize("grouped", [False, True])
def test_experts(grouped: bool, rows: str):
    if grouped and not hasattr(torch, "_grouped_mm"):
        pytest.skip("needs grouped products")
    dtype = torch.bfloat16 if grouped else torch.float32
    model = experts(grouped).to(DEVICE, dtype)
    report = compare(lambda x: per_row(model(x)), [(N, T, 16)], list(model.parameters()), dtype, rows)
    assert not report.densified, str(report)


def block() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = net.qkv(net.norm1(x)).view(N, T, 3, HEADS, D).permute(2, 0, 3, 1, 4)
        x = x + net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + net.mlp(net.norm2(x))

    mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))
    layers = {"norm1": nn.LayerNorm(64), "norm2": nn.LayerNorm(64), "qkv": nn.Linear(64, 192), "out": nn.Linear(64, 64)}
    return Net(forward, **layers, mlp=mlp)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_encoder_under_autocast(dtype: torch.dtype, rows: str):
    model = nn.Sequential(block(), block(), nn.Linear(64, 5)).to(DEVICE)

    def losses_of(x: Tensor) -> Tensor:
        with nullcontext() if dtype == torch.float32 else torch.autocast(DEVICE, dtype):
            return per_row(model(x))

    report = compare(
        losses_of, [(N, T, 64)], list(model.parameters()), rows=rows, tolerance=TOLERANCE[dtype], least=1e-2
    )
    assert not report.densified, str(report)


def test_a_gradient_scaler_unscales_and_steps():
    def trained(take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 3).to(DEVICE)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(DEVICE, init_scale=64.0)
        for _ in range(3):
            with torch.autocast(DEVICE, torch.float16):
                losses = per_row(model(leaf(0, (N, 8), torch.float32)))
            scaler.scale(take(losses, ROWS["two"]()).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model.weight.detach()

    torch.testing.assert_close(trained(rowprop.pick), trained(lambda x, rows: x[rows]), rtol=1e-3, atol=1e-4)


def residual() -> nn.Module:
    """A small ResNet: two blocks with BatchNorm, and a classifier; channels last."""

    def normed(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x.contiguous(memory_format=torch.channels_last)).relu()
        x = F.max_pool2d((x + net.block(x)).relu(), 2)
        return net.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    inner = nn.Sequential(*normed(8), nn.ReLU(), *normed(8))
    return Net(forward, stem=normed(3), block=inner, head=nn.Linear(8, 5))


def language(recurrent: bool) -> nn.Module:
    """Tokens to scores: an embedding, causal attention, tied weights; or an LSTM in the place of attention."""

    def forward(net: Any, tokens: Tensor) -> Tensor:
        out = net.block(net.table(tokens))
        return F.linear(out[0] if isinstance(out, tuple) else out, net.table.weight)

    inner = nn.LSTM(64, 64, batch_first=True) if recurrent else block()
    return Net(forward, table=nn.Embedding(11, 64), block=inner)


def batch_of(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("transformer", "LSTM"):
        tokens = torch.randint(11, (N, T), generator=generator)
        return tokens.to(DEVICE), tokens.roll(-1, 1).to(DEVICE)
    shape = (N, 3, 8, 8) if name == "ResNet" else (N, 16)
    return torch.randn(shape, generator=generator).to(DEVICE), (torch.arange(N) % 3).to(DEVICE)


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores, labels = model(batch[0]), batch[1]
    if scores.ndim == 2:
        return F.cross_entropy(scores, labels, reduction="none")
    losses = F.cross_entropy(scores.movedim(-1, 1), labels, reduction="none")
    return torch.where(labels > 0, losses, 0).sum(1) / (labels > 0).sum(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)),
    "ResNet": residual,
    "transformer": partial(language, recurrent=False),
    "LSTM": partial(language, recurrent=True),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # each run would draw another mask
    return model.to(DEVICE)


@contextmanager
def nothing_waits(*but: str) -> Generator[None]:
    """A call that makes the host wait for the device raises; on the CPU, rules that would have waited are found.

    ``but`` has the ops that may densify, and what only the CPU's kernels would have waited for.
    """
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        at_once = host.READ_AT_ONCE if ON_GPU else set[str]()
        with rowprop.watch() as report, mock.patch.object(host, "READ_AT_ONCE", at_once):
            yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")
    assert not {*report.waited, *report.densified} - set(but), str(report)


SELECTORS: dict[str, Callable[[], rowprop.selection.Selector]] = {
    "top": lambda: rowprop.TopK(0.5),
    "random": lambda: rowprop.RandomRows(0.5),
    "rank": lambda: rowprop.selection.RankSampling(0.5),
    "buckets": lambda: rowprop.selection.MultipleOf(rowprop.TopK(0.3), 2),
}


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_step_makes_nothing_wait_for_the_device(name: str, selector: str):
    model, batch = built(name), batch_of(name, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = rowprop.engines.Sliced(batchnorm="rows")
    step = rowprop.SelectiveBackprop(model, losses_of, SELECTORS[selector](), engine=engine, nonfinite="keep")
    for timed in (False, False, True):
        with nothing_waits() if timed else nullcontext():
            loss, _ = step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
# Red when: the host has read the flags of another step, or the backward of chosen rows is not that of plain indexing.
def test_a_whole_step_gives_the_gradients_of_its_selection(name: str):
    model, batch = built(name), batch_of(name, 0)
    plain = copy.deepcopy(model)
    batchnorm = rowprop.engines.Sliced(batchnorm="exact")
    loss, record = rowprop.SelectiveBackprop(model, losses_of, rowprop.TopK(0.5), engine=batchnorm)(batch)
    loss.backward()
    (losses_of(plain, batch)[record.selection.rows] * record.selection.weights).sum().backward()
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, plain)]
    assert len(grads[0]) == len(list(model.parameters()))
    assert_close(grads[0], grads[1], 5e-3)


class Branches(nn.Module):
    """Two branches, the first on a stream of its own, where it takes longer than the second one."""

    def __init__(self, width: int, stream: Any) -> None:
        super().__init__()
        self.stream = stream
        self.trunk, self.short = nn.Linear(width, width), nn.Linear(width, width)
        self.long = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x).tanh()
        if self.stream is None:
            return self.long(x) + self.short(x)
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            x.record_stream(self.stream)
            long = self.long(x)
        short = self.short(x)
        main.wait_stream(self.stream)
        long.record_stream(main)
        return long + short


# Red when: memory that one stream still reads is given back to another: kept rows, gradients or the last gather without
# a record of the stream that uses them. NaN are written to whatever memory is free at once.
def test_branches_on_side_streams_share_no_memory_too_early():
    width, rows = (512, 256) if ON_GPU else (16, 8)
    model = Branches(width, None).to(DEVICE)
    x = torch.randn(rows, T, width, device=DEVICE)
    index = torch.arange(0, rows, 4, device=DEVICE)
    rowprop.pick(per_row(model(x)), index).sum().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    model.stream = torch.cuda.Stream() if ON_GPU else None
    found: list[list[Tensor]] = []
    for _ in range(40 if ON_GPU else 2):
        model.zero_grad()
        rowprop.pick(per_row(model(x)), index).sum().backward()
        for size in (index.numel(), rows) * 4:
            torch.full((size, T, width), torch.nan, device=DEVICE)
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for grads in found:
        assert_close(grads, expected, 1e-3)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """A function that replays ``run`` as a graph; on the CPU, ``run`` itself."""
    if not ON_GPU:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.mark.parametrize("name", MODELS)
# Red when: a rule reads the device while the graph is captured, or keeps an index or a count of the captured step.
def test_a_captured_step_replays_with_other_data_and_rows(name: str):
    model = built(name)
    eager = copy.deepcopy(model)
    inputs, labels = batch_of(name, 0)
    index = ROWS["two"]()
    reports: list[Report] = []

    def run() -> None:
        for p in model.parameters():
            p.grad = None
        with rowprop.watch() as report:
            rowprop.pick(losses_of(model, (inputs, labels)), index, batchnorm="rows").mean().backward()
        reports.append(report)

    replay = captured(run)
    for seed, rows in ((1, [0, 5]), (2, [3, 2]), (3, [4, 4])):  # a wait while the graph is captured is an error
        batch = batch_of(name, seed)
        inputs.copy_(batch[0])
        labels.copy_(batch[1])
        index.copy_(torch.tensor(rows))
        replay()
        eager.zero_grad()
        kept = torch.tensor(rows, device=DEVICE)
        rowprop.pick(losses_of(eager, batch), kept, batchnorm="rows").mean().backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], 2e-3)
    assert not any(report.densified or report.waited for report in reports)


@pytest.mark.parametrize("name", few(MODELS, 4))
# Red when: a graph of one number of rows is replayed for another, or one step's memory is written to by the next.
def test_compiled_steps_as_graphs_follow_the_number_of_rows(name: str):
    model, plain = built(name), built(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, mode="reduce-overhead")
    for seed, kept in enumerate([2, 3, 2, 4, 3, 2, 6]):
        batch, rows = batch_of(name, seed), torch.randperm(N)[:kept].to(DEVICE)
        for net, run in ((model, compiled), (plain, plain)):
            net.zero_grad()
            rowprop.pick(losses_of(run, batch), rows, batchnorm="rows").mean().backward()
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, plain)]
        assert len(grads[0]) == len(list(model.parameters()))
        assert_close(grads[0], grads[1], 5e-3)


# --- the tables of cases that the CPU's rules are tested with ---------------------------------------------------------


def of_indexing(gradients: device_cases.Gradients, rows: Any) -> None:
    """``pick`` has the gradient of plain indexing, where the forward, written for the CPU, runs on the device."""
    rows = torch.as_tensor(rows)

    def on_device(take: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
        moving = Moving(torch.device(DEVICE))

        def leave(losses: Tensor) -> Tensor:
            moving.stop()
            return take(losses, rows.to(losses.device))

        return gradients(moving if ON_GPU else nullcontext(), leave)

    try:
        expected = on_device(lambda losses, rows: losses[rows])
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"the device has no such kernel: {str(error).partition(chr(10))[0]}")
    actual = on_device(lambda losses, rows: rowprop.pick(losses, rows, batchnorm="exact"))
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rows", [[1, 4], [0, 2, 2, 5]], ids=str)
@pytest.mark.parametrize("name", few(rule_cases.CASES, 50))
def test_rules(name: str, rows: list[int]):
    of_indexing(device_cases.of_rule(name), rows)


@pytest.mark.parametrize("entry", few(zoo.ENTRIES, 20), ids=lambda e: e.name)
def test_models(entry: zoo.Entry):
    of_indexing(device_cases.of_model(entry), zoo.ROWS)


@pytest.mark.parametrize("name", token_models.BETWEEN)
def test_what_models_do_between_tokens(name: str):
    of_indexing(device_cases.between_tokens(name), device_cases.ROWS_BETWEEN)


class Gpt(nn.Module):
    """Two blocks of causal attention. ``cut`` in the forward: keys and values of other tokens are detached."""

    def __init__(self, segments: Tensor | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 64), nn.Linear(64, 11, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.RMSNorm(64), nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 64)]) for _ in range(2)
        )
        self.segments = segments  # (N, T): of packed rows

    def forward(self, tokens: Tensor, cut: Tensor | None = None) -> Tensor:
        x = self.table(tokens)
        for norm, qkv, out, mlp in self.blocks:
            q, k, v = qkv(norm(x)).unflatten(2, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
            if cut is not None:
                k, v = (torch.where(cut[:, None, :, None], t, t.detach()) for t in (k, v))
            x = x + out(self.mixed(q, k, v).transpose(1, 2).flatten(2))
            x = x + F.gelu(mlp(x))
        return self.head(x)

    def mixed(self, *qkv: Tensor) -> Tensor:
        if self.segments is None:
            return F.scaled_dot_product_attention(*qkv, is_causal=True)
        causal = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril()
        within = (self.segments[:, :, None] == self.segments[:, None, :]) & causal
        return F.scaled_dot_product_attention(*qkv, attn_mask=within[:, None])


SEGMENTS = torch.arange(T).expand(N, T) // 5
TOKENS = {
    "a quarter": torch.rand(N, T, generator=torch.Generator().manual_seed(3)) < 0.25,
    "uneven": torch.arange(T) >= torch.tensor([3, 16, 15, 0, 9, 16])[:, None],
    "one": torch.arange(N * T).view(N, T) == 37,
    "segments": torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1]])
    .bool()
    .gather(1, SEGMENTS),
}


def token_gradients(
    packed: bool, dtype: torch.dtype, kept: Tensor, take: Callable[[Tensor], Tensor], cut: bool = False
) -> tuple[list[Tensor], Report]:
    torch.manual_seed(0)
    model = Gpt(SEGMENTS.to(DEVICE) if packed else None).to(DEVICE)
    tokens, labels = batch_of("transformer", 0)
    with nullcontext() if dtype == torch.float32 else torch.autocast(DEVICE, dtype):
        losses = F.cross_entropy(model(tokens, kept if cut else None).movedim(-1, 1), labels, reduction="none")
    with rowprop.watch() as report:
        take(losses).float().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], report


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", TOKENS)
@pytest.mark.parametrize("attention", ["exact", "cut"])
@pytest.mark.parametrize("backend", OPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Red when: a kernel's gradients of keys and values lie otherwise than the CPU's, or cut takes those of other tokens.
def test_tokens(dtype: torch.dtype, backend: SDPBackend, attention: Any, mask: str, packed: bool):
    kept = TOKENS[mask].to(DEVICE)
    gradients = partial(token_gradients, packed, dtype, kept)
    with skipped_where_a_backend_refuses("No available kernel", "No viable backend"), sdpa_kernel(backend):
        expected, _ = gradients(lambda losses: losses[kept], attention == "cut")
        actual, report = gradients(lambda losses: rowprop.pick(losses, kept, attention=attention))
    # A token's sum of many terms is made of fewer, in another order.
    assert_close(actual, expected, 2 * TOLERANCE[dtype])
    if attention == "cut":
        assert not set(report.densified) - {OPS[backend]}, str(report)
        assert sum(report.cut.values()) == 2
        if packed and mask == "segments":  # whole segments attend to themselves alone
            exact, _ = gradients(lambda losses: losses[kept])
            assert_close(actual, exact, 2 * TOLERANCE[dtype])


@pytest.mark.skipif(not ON_GPU, reason="varlen_attn has a kernel on CUDA alone")
@pytest.mark.parametrize("mask", TOKENS)
@pytest.mark.parametrize("attention", ["exact", "cut"])
def test_packed_segments_of_varlen_attention(attention: Any, mask: str):
    # Red when: the kernel gets the ends, the longest length, the queries or the log-sum-exps of other segments.
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    kept, lengths = TOKENS[mask].to(DEVICE), SEGMENTS.flatten().unique_consecutive(return_counts=True)[1]
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(DEVICE, torch.int32)
    x, w = leaf(0, (N * T, HEADS * D), torch.float16), leaf(1, (HEADS * D, 3 * HEADS * D), torch.float16)

    def gradient(take: Callable[[Tensor], Tensor], cut: bool = False) -> Tensor:
        query, *both = (x @ w).unflatten(1, (3, HEADS, D)).unbind(1)
        key, value = (torch.where(kept.view(-1, 1, 1), t, t.detach()) if cut else t for t in both)
        out = varlen.varlen_attn(query, key, value, ends, ends, 5, 5, window_size=(-1, 0))
        return torch.autograd.grad(take(out.float().square().mean((1, 2)).view(N, T)).sum(), w)[0]

    expected = gradient(lambda losses: losses[kept], attention == "cut")
    with rowprop.watch() as report:
        actual = gradient(lambda losses: rowprop.pick(losses, kept, attention=attention))
    assert_close([actual], [expected], 2 * TOLERANCE[torch.float16])
    assert report.cut == ({"varlen_attn": 1} if attention == "cut" else {}) and len(report.waited) >= 1


@pytest.mark.parametrize("attention", ["exact", "cut"])
def test_indices_of_tokens_make_nothing_wait_for_the_device(attention: Any):
    # Red when: a rule counts kept tokens where the device's kernel takes all of them. The CPU's kernel runs for kept
    # tokens, which have to be counted, and their sequences go on.
    of_the_cpu = "how many tokens each sequence keeps", "how many kept tokens lie in each sequence"
    united = "the rows that gradients of several picks have together"
    known = [*OPS.values(), "stack", "add.Tensor"] if ON_GPU else [*of_the_cpu, united]
    model = Gpt().to(DEVICE)
    (tokens, labels), index = batch_of("transformer", 0), torch.tensor([1, 17, 18, 40, 95], device=DEVICE)
    for timed in (False, True):
        losses = F.cross_entropy(model(tokens).movedim(-1, 1), labels, reduction="none")
        with nothing_waits(*known) if timed else nullcontext():
            rowprop.pick(losses.flatten(), index, attention=attention).mean().backward()


def test_a_selection_of_ones_own_is_checked_without_waiting():
    # Red when: Selection reads its rows or its weights on CUDA.
    rows, weights = torch.tensor([0, 2, 5], device=DEVICE), torch.full((3,), 1 / 3, device=DEVICE)
    with nothing_waits():
        selection = rowprop.Selection(rows, weights, 8, even=True)
    if ON_GPU:
        torch.cuda.synchronize()  # a failed assertion of the device would be told here
    assert selection.num_kept == 3


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("width", [8, 4096 if ON_GPU else 64])
def test_few_rows_are_gathered_whatever_their_size(width: int, dim: int):
    # Red when: rows are taken in another dimension by indexing, as large ones are, or by index_select.
    x = torch.randn(8, 1024, width, device=DEVICE).transpose(0, dim).contiguous()
    weight = torch.ones(width, device=DEVICE, requires_grad=True)
    index = torch.tensor([1, 3, 4, 6], device=DEVICE)
    losses = (x * weight).square().mean((1 - dim, 2))
    found = torch.autograd.grad(rowprop.pick(losses, index).sum(), weight, retain_graph=True)
    assert_close([*found], [*torch.autograd.grad(losses[index].sum(), weight)], 1e-4)


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_tells_that_the_device_waits_for_python(waits: bool):
    # Red when: what is small on this device is not told, or what is large is.
    width, rows, layers = (8, 8, 64) if waits else (4096, 8192, 4) if ON_GPU else (128, 256, 4)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(DEVICE)
    losses_fn = lambda model, x: model(x).square().mean(1)  # noqa: E731
    step = rowprop.SelectiveBackprop(model, losses_fn, rowprop.TopK(0.25), nonfinite="keep")
    x = torch.randn(rows, width, device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            step(x)[0].backward()
    assert any("waits for Python" in str(each.message) for each in caught) == (waits and ON_GPU)


@pytest.mark.parametrize("waits", [False, True])
def test_plan_and_profile_tell_large_products_from_small_ones(waits: bool):
    # Red when: an op's time is not its kernels', or the host's time that of the device.
    width, rows, layers = (8, 8, 64) if waits else (4096, 8192, 4) if ON_GPU else (128, 256, 4)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(DEVICE)
    subject = model, torch.randn(rows, width, device=DEVICE), lambda model, x: model(x).square().mean(1)
    planned = rowprop.plan(*subject, keep=0.25, rounds=3)
    assert {way.waits for way in planned.ways if way.engine == "sliced"} == {waits and ON_GPU}, planned
    assert all(way.step_s > 0 and way.peak_bytes > 0 for way in planned.ways)
    found = profile(*subject, rounds=3)
    assert found.device == (f"{DEVICE}:0" if ON_GPU else "cpu")
    assert waits or (found.ops[0].name == "mm" and found.ops[0].share > 0.5 * ON_GPU), found.ops[:3]
