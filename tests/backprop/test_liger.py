"""Liger's functions, run by Triton's interpreter on the CPU: the rules by name against plain indexing.

The packages live in a venv of their own: `nox -s families`. Three things that the interpreter cannot do are put right
here: floats as arguments of a kernel, functions of CUDA's own library, and the search for the fastest configuration.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from picks import as_indexed, indexed

if not (find_spec("liger_kernel") and find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs liger-kernel, and TRITON_INTERPRET=1: see nox -s families", allow_module_level=True)

from liger_kernel import ops

N, T, C, V = 8, 3, 8, 11
ROWS = torch.tensor([6, 1, 6])


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    import numpy as np
    import triton.language as tl
    from triton.runtime import autotuner, interpreter

    right = interpreter._implicit_cvt

    def converted(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return right(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *args, **options: [1.0] * 3)
    for module in ("cross_entropy", "dyt", "geglu"):
        monkeypatch.setattr(f"liger_kernel.ops.{module}.tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    for module in ("fused_add_rms_norm", "group_norm", "layer_norm", "poly_norm", "rms_norm"):
        monkeypatch.setattr(f"liger_kernel.ops.{module}.rsqrt", lambda x: 1 / tl.sqrt(x))
    # It counts a device's processors, for CUDA, XPU and NPU.
    monkeypatch.setattr("liger_kernel.ops.dyt.infer_device", lambda: "npu")
    torch.manual_seed(0)


def flat(x: Tensor) -> Tensor:
    return x.reshape(N * T, -1)


def by_rows(x: Tensor) -> Tensor:
    return x.view(N, -1)


def one(*more):
    """A function of one hidden state (N, T, C)."""
    return lambda run, h, a, b, c: run((h * a).sin(), *more)


def two(*more):
    return lambda run, h, a, b, c: run((h * a).sin(), h.cos(), *more)


def rotated(angles, dims=(0, 2, 1, 3), keys=True):
    def losses(run, h, a, b, c):
        query, key = ((h * v).view(N, T, 1, C).expand(N, T, 2, C).sin().permute(dims) for v in (a, b))
        query, key = run(query, key, *angles)
        return torch.cat([by_rows((query * c).exp().contiguous()), *([by_rows(key.contiguous())] if keys else [])], 1)

    return losses


def embedding(run, h, a, b, c):
    words = torch.arange(N * T).view(N, T) % V
    return (run(torch.linspace(-1, 1, V)[:, None] * a, words) * h).sin()


TARGETS = (torch.arange(N * T) * 5 % C).index_fill(0, torch.tensor([4]), -100)
"""One of them is none."""


def head(b):
    return torch.linspace(-1, 1, C * C).view(C, C).sin() * b


def chunked(run, h, a, b, c, extra=1e-3, smoothing=0.1):
    return by_rows(run(flat(h * a), head(b), TARGETS, c, None, -100, extra, smoothing, "none")[0])


def cross_entropy(run, h, a, b, c):
    return by_rows(run(flat(h * a), TARGETS, c.detach().abs(), -100, 1e-3, 0.1, "none", 20.0)[0])


def statistics(run, h, a, b, c):
    return by_rows(run(flat(h * a), TARGETS, None, -100, 1e-3, 0.0, "none", None, True, True, True)[0])


def drawn(*shape: int, **options) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), **options)


def divergence(*more, log=True):
    other = drawn(N * T, C).softmax(-1)
    return lambda run, h, a, b, c: by_rows(
        run(flat(h * a).log_softmax(-1) if log else flat(h * a).softmax(-1), other, *more)
    )


shared, own = (drawn(1, T, C), drawn(1, T, C).cos()), (drawn(N, T, C), drawn(N, T, C).cos())
complex_angles = (drawn(T, C // 2, dtype=torch.complex64),)
three_angles = (drawn(3, N, T, C), drawn(3, N, T, C).cos(), [1, 1, 2])
CASES = {
    "ReLU squared": (ops.LigerReLUSquaredFunction, one()),
    "softmax": (ops.LigerSoftmaxFunction, one()),
    "sparsemax": (ops.LigerSparsemaxFunction, one(-1)),
    "sparsemax over time": (ops.LigerSparsemaxFunction, one(1)),
    "SwiGLU": (ops.LigerSiLUMulFunction, two()),
    "SwiGLU, scaled": (ops.LigerSiLUMulFunction, two(0.5, 2.0)),
    "SwiGLU of one tensor": (
        ops.LigerFusedGateUpSiLUMulFunction,
        lambda run, h, a, b, c: by_rows(run(flat(h * a), True)),
    ),
    "GEGLU": (ops.LigerGELUMulFunction, two()),
    "RMSNorm": (ops.LigerRMSNormFunction, lambda run, h, a, b, c: h + run(h, a, 1e-6).sin()),
    "RMSNorm without a weight": (ops.LigerRMSNormFunction, lambda run, h, a, b, c: run(h * a, None, 1e-6) * b),
    "RMSNorm with a sum": (
        ops.LigerFusedAddRMSNormFunction,
        lambda run, h, a, b, c: torch.add(*[x * v for x, v in zip(run(h.sin(), h * b, a, 1e-6), (c, 1), strict=True)]),
    ),
    "LayerNorm": (ops.LigerLayerNormFunction, lambda run, h, a, b, c: run(h, a, b, 1e-6) * c),
    "GroupNorm": (ops.LigerGroupNormFunction, lambda run, h, a, b, c: run(h.mT, a, b, C, 2, 1e-6) * c[:, None]),
    "PolyNorm": (ops.LigerPolyNormFunction, lambda run, h, a, b, c: run(h, a[:3], b[0], 1e-6) * c),
    "DyT": (ops.LigerDyTFunction, lambda run, h, a, b, c: run(h, a[:1], b, c)),
    "embedding": (ops.LigerEmbeddingFunction, embedding),
    "RoPE": (ops.LigerRopeFunction, rotated(shared)),
    "RoPE, positions of its own per row": (ops.LigerRopeFunction, rotated(own)),
    "RoPE, keys not used": (ops.LigerRopeFunction, rotated(own, keys=False)),
    "RoPE of Llama 4": (ops.LigerLlama4RopeFunction, rotated(complex_angles, (0, 1, 2, 3))),
    "RoPE of Qwen2-VL": (ops.LigerQwen2VLMRopeFunction, rotated(three_angles)),
    "cross-entropy": (ops.LigerCrossEntropyFunction, cross_entropy),
    "cross-entropy, with its statistics": (ops.LigerCrossEntropyFunction, statistics),
    "linear and cross-entropy": (ops.LigerFusedLinearCrossEntropyFunction, chunked),
    "KL divergence": (ops.LigerKLDivLossFunction, divergence("none")),
    "total variation": (ops.LigerTVDLossFunction, divergence(None, "none", log=False)),
}
"""The function's class, and what it makes of the hidden (N, T, C) and of three vectors of C parameters: (N, ...)."""


def compared(losses, rows, truth=None):
    """The report of a pick whose gradients equal those of plain indexing, into the same losses or into the truth."""
    x = torch.linspace(-2, 2, N * T * 5).view(N, T, 5).sin()
    leaves = [(torch.randn(5, C) * 0.7).requires_grad_(), *((torch.rand(C) + 0.5).requires_grad_() for _ in range(3))]

    def step(take):
        w, *vectors = leaves
        made = (truth if truth and take is indexed else losses)(x @ w, *vectors)
        taken = take(made if made.ndim == 1 else made.flatten(1).square().sum(1), rows)
        found = torch.autograd.grad(taken.mean(), leaves, allow_unused=True)
        assert found[0].any()
        return found

    return as_indexed(step, rtol=1.3e-6, atol=1e-5)


def case(name):
    function, losses = CASES[name]
    return function, lambda *given: losses(function.apply, *given)


@pytest.mark.parametrize("name", CASES)
def test_liger_runs_on_the_kept_rows(name):
    function, losses = case(name)
    report = compared(losses, ROWS)
    assert report.sliced[function.__name__] == 1
    assert not report.densified, report


@pytest.mark.parametrize("name", ["RMSNorm", "RoPE, positions of its own per row", "linear and cross-entropy"])
def test_liger_runs_on_a_single_row(name):
    assert not compared(case(name)[1], torch.tensor([5])).densified


def rms_norm(h, a):
    return ops.LigerRMSNormFunction.apply(h, a, 1e-6)


def llama4_rope(h, a):
    angles = torch.linspace(0, 6, T * C // 2).view(T, -1).to(torch.complex64)
    return ops.LigerLlama4RopeFunction.apply((h * a).unsqueeze(2), h.unsqueeze(2), angles)[0].squeeze(2)


@pytest.mark.parametrize("layer", [rms_norm, llama4_rope])
def test_a_gradient_that_another_layer_shares_is_not_written_to(layer):
    # Liger writes over it, so plain indexing is wrong here; in the truth, the layer has a gradient of its own.
    # Red when: `in_place` stays as it is; the rotations get the gradients themselves.
    def losses(h, a, b, c):
        return (h * b).sin() + layer(h, a)

    def truth(h, a, b, c):
        return (h * b).sin() + layer(h, a) * 1.0

    assert not compared(losses, ROWS, truth).densified


def statistics_in_the_loss(h, a, b, c):
    loss, squared, *_ = ops.LigerCrossEntropyFunction.apply(
        flat(h * a), TARGETS, None, -100, 1e-3, 0.0, "none", None, True
    )
    return by_rows(loss + squared)


OWN_DIMENSION = "works over the rows' own dimension"
ELSEWHERE = {
    "softmax": (lambda h, a, b, c: ops.LigerSoftmaxFunction.apply((h * a).sum((1, 2))) * h.sum((1, 2)), OWN_DIMENSION),
    "sparsemax": (lambda h, a, b, c: ops.LigerSparsemaxFunction.apply(h * a, 0), OWN_DIMENSION),
    "statistics": (statistics_in_the_loss, "of an output that is declared with None"),
    "time first": (
        lambda h, a, b, c: rms_norm(h.transpose(0, 1), a).sin().sum((0, 2)),
        "the rows lie in dimension 1 of an output that is declared with 0",
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_where_the_rows_are_elsewhere_liger_runs_at_full_size(name):
    losses, reason = ELSEWHERE[name]
    densified = compared(losses, ROWS).densified
    first, *others = densified
    assert reason in densified[first].reason and set(others) <= {"add.Tensor"}


def test_the_fused_loss_is_torchs_own():
    # Plain indexing goes through the same function; this goes through none of Liger's.
    def torchs(h, a, b, c):
        return by_rows(F.cross_entropy(flat(h * a) @ head(b).T + c, TARGETS, reduction="none"))

    def ligers(*given):
        return chunked(ops.LigerFusedLinearCrossEntropyFunction.apply, *given, extra=0.0, smoothing=0.0)

    assert not compared(ligers, torch.tensor([6, 1]), torchs).densified
