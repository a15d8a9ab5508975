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

import rowprop
from picks import N, gradients

if not (find_spec("liger_kernel") and find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs liger-kernel, and TRITON_INTERPRET=1: see nox -s families", allow_module_level=True)

from liger_kernel import ops

T, C, V = 3, 8, 11


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import (
        cross_entropy,
        dyt,
        fused_add_rms_norm,
        geglu,
        group_norm,
        layer_norm,
        poly_norm,
        rms_norm,
    )
    from triton.runtime import autotuner, interpreter

    right = interpreter._implicit_cvt

    def converted(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return right(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda *args, **options: [1.0] * 3)
    for module in (cross_entropy, dyt, geglu):
        monkeypatch.setattr(module, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
    for module in (fused_add_rms_norm, group_norm, layer_norm, poly_norm, rms_norm):
        monkeypatch.setattr(module, "rsqrt", lambda x: 1 / tl.sqrt(x))
    monkeypatch.setattr(dyt, "infer_device", lambda: "npu")  # it counts a device's processors, for CUDA, XPU and NPU
    torch.manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


CASES = {}
"""Name -> (the function's class, losses (N,) of the hidden (N, T, C) and of three vectors of C parameters)."""


def case(name, function):
    def enter(losses):
        CASES[name] = function, losses
        return losses

    return enter


def elementwise(name, function, *more, inputs=1):
    """A function of one or two hidden states (N, T, C)."""

    @case(name, function)
    def losses(h, a, b, c):
        return function.apply(*((h * a).sin(), h.cos())[:inputs], *more).square().sum((1, 2))


elementwise("ReLU squared", ops.LigerReLUSquaredFunction)
elementwise("softmax", ops.LigerSoftmaxFunction)
elementwise("sparsemax", ops.LigerSparsemaxFunction, -1)
elementwise("sparsemax over time", ops.LigerSparsemaxFunction, 1)
elementwise("SwiGLU", ops.LigerSiLUMulFunction, inputs=2)
elementwise("SwiGLU, scaled", ops.LigerSiLUMulFunction, 0.5, 2.0, inputs=2)
elementwise("GEGLU", ops.LigerGELUMulFunction, inputs=2)


@case("SwiGLU of one tensor", ops.LigerFusedGateUpSiLUMulFunction)
def _(h, a, b, c):
    return ops.LigerFusedGateUpSiLUMulFunction.apply((h * a).view(N * T, C), True).view(N, -1).square().sum(1)


@case("RMSNorm", ops.LigerRMSNormFunction)
def _(h, a, b, c):
    return (h + ops.LigerRMSNormFunction.apply(h, a, 1e-6).sin()).square().sum((1, 2))


@case("RMSNorm without a weight", ops.LigerRMSNormFunction)
def _(h, a, b, c):
    return (ops.LigerRMSNormFunction.apply(h * a, None, 1e-6) * b).square().sum((1, 2))


@case("RMSNorm with a sum", ops.LigerFusedAddRMSNormFunction)
def _(h, a, b, c):
    y, total = ops.LigerFusedAddRMSNormFunction.apply(h.sin(), h * b, a, 1e-6)
    return (y * c + total).square().sum((1, 2))


@case("LayerNorm", ops.LigerLayerNormFunction)
def _(h, a, b, c):
    return (ops.LigerLayerNormFunction.apply(h, a, b, 1e-6) * c).square().sum((1, 2))


@case("GroupNorm", ops.LigerGroupNormFunction)
def _(h, a, b, c):
    x = h.transpose(1, 2)  # (N, C, T)
    return (ops.LigerGroupNormFunction.apply(x, a, b, C, 2, 1e-6) * c[:, None]).square().sum((1, 2))


@case("PolyNorm", ops.LigerPolyNormFunction)
def _(h, a, b, c):
    return (ops.LigerPolyNormFunction.apply(h, a[:3], b[0], 1e-6) * c).square().sum((1, 2))


@case("DyT", ops.LigerDyTFunction)
def _(h, a, b, c):
    return ops.LigerDyTFunction.apply(h, a[:1], b, c).square().sum((1, 2))


@case("embedding", ops.LigerEmbeddingFunction)
def _(h, a, b, c):
    words = torch.arange(N * T).view(N, T) % V
    table = torch.linspace(-1, 1, V)[:, None] * a
    return (ops.LigerEmbeddingFunction.apply(table, words) * h).sin().sum((1, 2))


def rotated(name, function, angles, dims=(0, 2, 1, 3), keys=True):
    @case(name, function)
    def losses(h, a, b, c):
        query, key = ((h * v).view(N, T, 1, C).expand(N, T, 2, C).sin().permute(dims) for v in (a, b))
        query, key = function.apply(query, key, *angles)
        return (query * c).exp().sum((1, 2, 3)) + (key.square().sum((1, 2, 3)) if keys else 0)


shared, own = ((drawn(1, T, C), drawn(1, T, C)), (drawn(N, T, C), drawn(N, T, C)))
rotated("RoPE", ops.LigerRopeFunction, shared)
rotated("RoPE, positions of its own per row", ops.LigerRopeFunction, own)
rotated("RoPE, keys not used", ops.LigerRopeFunction, own, keys=False)
rotated("RoPE of Llama 4", ops.LigerLlama4RopeFunction, (torch.randn(T, C // 2, dtype=torch.complex64),), (0, 1, 2, 3))
rotated("RoPE of Qwen2-VL", ops.LigerQwen2VLMRopeFunction, (drawn(3, N, T, C), drawn(3, N, T, C), [1, 1, 2]))


def targets() -> Tensor:
    target = torch.arange(N * T) * 5 % C
    target[4] = -100  # no target
    return target


@case("cross-entropy", ops.LigerCrossEntropyFunction)
def _(h, a, b, c):
    logits = (h * a).view(N * T, C)
    loss, *_ = ops.LigerCrossEntropyFunction.apply(logits, targets(), c.detach().abs(), -100, 1e-3, 0.1, "none", 20.0)
    return loss.view(N, T).mean(1)


@case("cross-entropy, with its statistics", ops.LigerCrossEntropyFunction)
def _(h, a, b, c):
    loss, *_ = ops.LigerCrossEntropyFunction.apply(
        (h * a).view(N * T, C), targets(), None, -100, 1e-3, 0.0, "none", None, True, True, True
    )
    return loss.view(N, T).mean(1)


@case("linear and cross-entropy", ops.LigerFusedLinearCrossEntropyFunction)
def _(h, a, b, c):
    head = torch.linspace(-1, 1, C * C).view(C, C).sin() * b
    loss, *_ = ops.LigerFusedLinearCrossEntropyFunction.apply(
        (h * a).view(N * T, C), head, targets(), c, None, -100, 1e-3, 0.1, "none"
    )
    return loss.view(N, T).mean(1)


def divergence(name, function, *more):
    @case(name, function)
    def losses(h, a, b, c):
        first, second = (h * a).log_softmax(-1).view(N * T, C), drawn(N * T, C).softmax(-1)
        first = first.exp() if function is ops.LigerTVDLossFunction else first
        torch.manual_seed(3)
        return function.apply(first, second, *more).view(N, -1).square().sum(1)


divergence("KL divergence", ops.LigerKLDivLossFunction, "none")
divergence("total variation", ops.LigerTVDLossFunction, None, "none")


def compared(losses, rows, truth=None):
    """The report of a pick whose gradients equal those of plain indexing, into the same losses or into the truth."""
    x = torch.linspace(-2, 2, N * T * 5).view(N, T, 5).sin()
    w = (torch.randn(5, C) * 0.7).requires_grad_()
    vectors = [(torch.rand(C) + 0.5).requires_grad_() for _ in range(3)]

    def run(losses, take):
        torch.manual_seed(3)
        return take(losses(x @ w, *vectors)).mean()

    leaves = [w, *vectors]
    expected = gradients(lambda: run(truth or losses, lambda t: t[rows]), leaves)
    with rowprop.watch() as report:
        actual = gradients(lambda: run(losses, lambda t: rowprop.pick(t, rows)), leaves)
    assert expected[0].any()
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        torch.testing.assert_close(a, e) if e is not None else None
    return report


@pytest.mark.parametrize("name", CASES)
def test_liger_runs_on_the_kept_rows(name):
    function, losses = CASES[name]
    report = compared(losses, torch.tensor([6, 1, 6]))
    assert report.sliced[function.__name__] == 1
    assert not report.densified, report


@pytest.mark.parametrize("name", ["RMSNorm", "RoPE, positions of its own per row", "linear and cross-entropy"])
def test_liger_runs_on_a_single_row(name):
    assert not compared(CASES[name][1], torch.tensor([5])).densified


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
        return ((h * b).sin() + layer(h, a)).square().sum((1, 2))

    def truth(h, a, b, c):
        return ((h * b).sin() + layer(h, a) * 1.0).square().sum((1, 2))

    assert not compared(losses, torch.tensor([6, 1, 6]), truth).densified


def softmax_over_rows(h, a, b, c):
    return ops.LigerSoftmaxFunction.apply((h * a).sum((1, 2))) * h.sum((1, 2))


def sparsemax_over_rows(h, a, b, c):
    return ops.LigerSparsemaxFunction.apply(h * a, 0).square().sum((1, 2))


def statistics_in_the_loss(h, a, b, c):
    loss, squared, *_ = ops.LigerCrossEntropyFunction.apply(
        (h * a).view(N * T, C), targets(), None, -100, 1e-3, 0.0, "none", None, True
    )
    return (loss + squared).view(N, T).mean(1)


def time_first(h, a, b, c):
    return ops.LigerRMSNormFunction.apply(h.transpose(0, 1), a, 1e-6).sin().sum((0, 2))


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (softmax_over_rows, "works over the rows' own dimension"),
        (sparsemax_over_rows, "works over the rows' own dimension"),
        (statistics_in_the_loss, "of an output that is declared with None"),
        (time_first, "the rows lie in dimension 1 of an output that is declared with 0"),
    ],
)
def test_where_the_rows_are_elsewhere_liger_runs_at_full_size(losses, reason):
    densified = compared(losses, torch.tensor([6, 1, 6])).densified
    assert reason in next(iter(densified.values())).reason and set(densified) - {"add.Tensor"} == {
        next(iter(densified))
    }


def test_the_fused_loss_is_torchs_own():
    # Plain indexing goes through the same function; this goes through none of Liger's.
    def torchs(h, a, b, c):
        head = torch.linspace(-1, 1, C * C).view(C, C).sin() * b
        return F.cross_entropy((h * a).view(N * T, C) @ head.T + c, targets(), reduction="none").view(N, T).mean(1)

    def ligers(h, a, b, c):
        head = torch.linspace(-1, 1, C * C).view(C, C).sin() * b
        loss, *_ = ops.LigerFusedLinearCrossEntropyFunction.apply(
            (h * a).view(N * T, C), head, targets(), c, None, -100, 0.0, 0.0, "none"
        )
        return loss.view(N, T).mean(1)

    h, rows = torch.randn(N, T, C), torch.tensor([6, 1])
    leaves = [(torch.rand(C) + 0.5).requires_grad_() for _ in range(3)]
    expected = gradients(lambda: torchs(h, *leaves)[rows].mean(), leaves)
    torch.testing.assert_close(gradients(lambda: rowprop.pick(ligers(h, *leaves), rows).mean(), leaves), expected)
