"""Kernels that torch has for CUDA only, made for the CPU from their formulas: forward, and backward from saved tensors.

They refuse the operands that CUDA's own kernels refuse (strides, shapes of saved tensors). Dropout comes from a counter
that knows the place in the batch, as in CUDA's own. With them, torch's own autograd nodes for these ops run on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(*names: str) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        KERNELS.update(dict.fromkeys(names, function))
        return function

    return enter


@contextmanager
def installed() -> Generator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in KERNELS.items():
            if hasattr(aten, name):  # some are newer than the oldest torch supported
                library.impl(name, function, "CPU")
        yield
    finally:
        library._destroy()


# --- attention: (N, heads, time, width) ------------------------------------------------------------------------------


def drawn(scores: Tensor, p: float) -> Tensor:
    """The factors of dropout: a function of the place among all rows."""
    counter = torch.arange(scores.numel()).view(scores.shape)
    return (counter * 7919 % 101 >= 101 * p).to(scores.dtype) / (1 - p)


def scores_of(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, float]:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * factor
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores, factor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any, p: float, causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    scores, _ = scores_of(q, k, bias, causal, scale)
    out = (scores.softmax(-1) * drawn(scores, p)) @ v
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


def attend_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, p: float, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "wrong alignment (last dimension must be contiguous)"
    assert out.transpose(1, 2).is_contiguous()
    assert {t.shape[0] for t in (g, q, k, v, out, lse)} == {len(q)}
    scores, factor = scores_of(q, k, bias, causal, scale)
    weights, mask = torch.exp(scores - lse.unsqueeze(-1)), drawn(scores, p)
    inner = weights * ((g @ v.mT) * mask - (g * out).sum(-1, keepdim=True))
    return inner @ k * factor, inner.mT @ q * factor, (weights * mask).mT @ g, inner


NOISE = torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)


@kernel("_scaled_dot_product_flash_attention")
def flash(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
    out, lse = attend(q, k, v, None, p, causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], *NOISE, torch.empty(0)


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale=None):
    assert cum_q is None
    return attend_backward(g, q, k, v, None, out, lse, p, causal, scale)[:3]


@kernel("_scaled_dot_product_cudnn_attention")
def cudnn(q, k, v, bias, compute, p=0.0, causal=False, debug=False, *, scale=None):
    out, lse = attend(q, k, v, bias, p, causal, scale)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *NOISE, torch.empty(0)


@kernel("_cudnn_attention_forward")
def cudnn_kernel(q, k, v, bias, cum_q, cum_k, max_q, max_k, *args, scale=None):
    return cudnn(q, k, v, bias, *args, scale=scale)


@kernel("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward")
def cudnn_backward(g, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale=None):
    assert cum_q is None
    return attend_backward(g, q, k, v, bias, out, lse.squeeze(-1), p, causal, scale)[:3]


def pad_lse(lse: Tensor) -> Tensor:
    return F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def check_bias(bias: Tensor | None, n: int, heads: int, t: int, s: int) -> None:
    if bias is not None:
        assert bias.shape == (n, heads, t, s), "attn_bias: wrong shape"
        assert bias.stride(-1) == 1, "attn_bias: wrong alignment (last dimension must be contiguous)"
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1]), "attn_bias is not correctly aligned"


@kernel("_scaled_dot_product_efficient_attention")
def efficient(q, k, v, bias, compute, p=0.0, causal=False, *, scale=None):
    check_bias(bias, *q.shape[:3], k.shape[2])
    out, lse = attend(q, k, v, bias, p, causal, scale)
    return out, pad_lse(lse), *NOISE


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(g, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None):
    check_bias(bias, *q.shape[:3], k.shape[2])
    assert lse.shape[-1] % 32 == 0
    dq, dk, dv, dbias = attend_backward(g, q, k, v, bias, out, lse[..., : q.shape[2]], p, causal, scale)
    return dq, dk, dv, dbias if mask[3] else None


def turned(*tensors: Tensor) -> list[Tensor]:
    """(N, time, heads, width) to (N, heads, time, width) or back."""
    return [t.transpose(1, 2) for t in tensors]


@kernel("_flash_attention_forward")
def flash_kernel(q, k, v, cum_q, cum_k, max_q, max_k, p, causal, debug, *, scale=None, **_):
    out, lse = attend(*turned(q, k, v), None, p, causal, scale)
    return out.transpose(1, 2), lse, *NOISE, torch.empty(0)


@kernel("_flash_attention_backward")
def flash_kernel_backward(
    g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale=None, **_
):
    *inputs, out = turned(g, q, k, v, out)
    return tuple(turned(*attend_backward(*inputs, None, out, lse, p, causal, scale)[:3]))


@kernel("_efficient_attention_forward")
def efficient_kernel(q, k, v, bias, cum_q, cum_k, max_q, max_k, p, kind, compute=False, *, scale=None, **_):
    q, k, v = turned(q, k, v)
    check_bias(bias, *q.shape[:3], k.shape[2])
    out, lse = attend(q, k, v, bias, p, kind == 1, scale)
    return out.transpose(1, 2), pad_lse(lse), *NOISE, q.shape[2], k.shape[2]


@kernel("_efficient_attention_backward")
def efficient_kernel_backward(
    g, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, p, seed, offset, kind, bias_grad, *, scale=None, **_
):
    g, q, k, v, out = turned(g, q, k, v, out)
    check_bias(bias, *q.shape[:3], k.shape[2])
    *grads, dbias = attend_backward(g, q, k, v, bias, out, lse[..., : q.shape[2]], p, kind == 1, scale)
    return *turned(*grads), dbias if bias_grad else torch.empty(0)


# --- normalisation, convolution, sampling ----------------------------------------------------------------------------


@kernel("cudnn_batch_norm")
def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    assert training
    out = aten.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
    return *out, torch.empty(x.numel(), dtype=torch.uint8)


@kernel("cudnn_batch_norm_backward")
def batch_norm_backward(x, g, weight, mean, var, save_mean, save_invstd, eps, reserve):
    assert reserve.numel() == x.numel()
    return aten.native_batch_norm_backward(
        g, x, weight, mean, var, save_mean, save_invstd, True, eps, [True, True, True]
    )


@kernel("miopen_batch_norm")
def miopen_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    return batch_norm(x, weight, bias, mean, var, training, momentum, eps)[:3]


@kernel("miopen_batch_norm_backward")
def miopen_batch_norm_backward(x, g, weight, mean, var, save_mean, save_invstd, eps):
    return aten.native_batch_norm_backward(
        g, x, weight, mean, var, save_mean, save_invstd, True, eps, [True, True, True]
    )


@kernel("_fused_rms_norm")
def rms_norm(x, shape, weight, eps):
    rstd = (x.square().mean(-1, keepdim=True) + (eps or 0.0)).rsqrt()
    return x * rstd * weight, rstd


@kernel("_fused_rms_norm_backward")
def rms_norm_backward(g, x, shape, rstd, weight, mask):
    xhat, scaled = x * rstd, g * weight
    summed = (g * xhat).flatten(0, -2).sum(0)
    return rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)), summed


@kernel("convolution_overrideable")
def convolution(x, weight, bias, *rest):
    return aten.convolution(x, weight, bias, *rest)


@kernel("convolution_backward_overrideable")
def convolution_backward(g, x, weight, *rest):
    return aten.convolution_backward(g, x, weight, [g.shape[1]], *rest)


@kernel("cudnn_grid_sampler")
def grid_sampler(x, grid):
    return aten.grid_sampler_2d(x, grid, 0, 0, True)


@kernel("cudnn_grid_sampler_backward")
def grid_sampler_backward(x, grid, g):
    return aten.grid_sampler_2d_backward(g, x, grid, 0, 0, True, [True, True])


@kernel("_cudnn_ctc_loss")
def ctc_loss(scores, targets, steps, lengths, blank, deterministic, zero_infinity):
    losses, alpha = aten._ctc_loss(scores, targets, steps, lengths, blank, zero_infinity)
    ones = torch.ones_like(losses)
    return losses, aten._ctc_loss_backward(ones, scores, targets, steps, lengths, losses, alpha, blank, zero_infinity)


# --- recurrent layers and cells --------------------------------------------------------------------------------------

LSTM, TANH = 2, 1


@kernel("_cudnn_rnn")
def rnn(x, w, stride, buf, h, c, mode, size, proj, layers, batch_first, p, train, both, lengths, state):
    """One layer and direction: the CPU's fused LSTM, or the plain recurrence written out."""
    assert h.is_contiguous(), "rnn: hx is not contiguous"
    assert train and layers == 1 and not both
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    if mode == LSTM:
        assert c.is_contiguous(), "rnn: cx is not contiguous"
        with torch.enable_grad():  # without it the reserve is empty
            y, hy, cy, workspace = aten.mkldnn_rnn_layer(
                x, *w, h[0], c[0], False, lengths, mode, size, 1, True, False, False, True
            )
        reserve = torch.cat([cy.flatten().view(torch.uint8), workspace])
    else:
        assert c is None
        steps = [h[0]]
        for step in x:
            steps.append(torch.tanh(step @ w[0].mT + steps[-1] @ w[1].mT + w[2] + w[3]))
        y, hy, cy = torch.stack(steps[1:]), steps[-1], x.new_empty(0)
        reserve = torch.stack(steps).view(torch.uint8)
    if p > 0:
        y = y * drawn(y, p)
    return (
        y.transpose(0, 1) if batch_first else y,
        hy[None],
        cy[None] if c is not None else cy,
        reserve,
        torch.cat([v.flatten() for v in w]),
    )


@kernel("_cudnn_rnn_backward")
def rnn_backward(
    x,
    w,
    stride,
    buf,
    h,
    c,
    y,
    gy,
    gh,
    gc,
    mode,
    size,
    proj,
    layers,
    batch_first,
    p,
    train,
    both,
    lengths,
    state,
    reserve,
    mask,
):
    assert h.is_contiguous() and buf.numel() == sum(v.numel() for v in w)
    if batch_first:
        x, y, gy = (None if t is None else t.transpose(0, 1) for t in (x, y, gy))
    assert y.is_contiguous()
    gy = torch.zeros_like(y) if gy is None else gy
    gh = torch.zeros_like(h) if gh is None else gh
    if p > 0:
        gy = gy * drawn(y, p)
    x = x.contiguous()
    if mode == LSTM:
        gc = torch.zeros_like(c) if gc is None else gc
        bytes_ = c.numel() * c.element_size()
        cy, workspace = reserve[:bytes_].view(c.dtype).view(c[0].shape), reserve[bytes_:].clone()
        dx, *dw, dh, dc = aten.mkldnn_rnn_layer_backward(
            *(x, *w, h[0], c[0], y, y[-1], cy, gy, gh[0], gc[0]),
            *(False, mode, size, 1, True, True, False, lengths, False, workspace),
        )
        dc = dc[None]
    else:
        steps, carry, dc = reserve.view(x.dtype).view(len(x) + 1, *h.shape[1:]), gh[0], None
        before: list[Tensor] = []
        for t in reversed(range(len(x))):
            before.insert(0, (gy[t] + carry) * (1 - steps[t + 1] ** 2))
            carry = before[0] @ w[1]
        d = torch.stack(before)
        dx, dh, bias = d @ w[0], carry, d.sum((0, 1))
        dw = [d.flatten(0, 1).mT @ x.flatten(0, 1), d.flatten(0, 1).mT @ steps[:-1].flatten(0, 1), bias, bias.clone()]
    return dx.transpose(0, 1) if batch_first else dx, dh[None], dc, dw


@kernel("_thnn_fused_lstm_cell")
def lstm_cell(a, b, c, bias_a=None, bias_b=None):
    gates = a + b + (0 if bias_a is None else bias_a + bias_b)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * c + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@kernel("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(gh, gc, c, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    gh = torch.zeros_like(cy) if gh is None else gh
    total = gh * o * (1 - cy.tanh() ** 2) + (0 if gc is None else gc)
    gates = total * g * i * (1 - i), total * c * f * (1 - f), total * i * (1 - g**2), gh * cy.tanh() * o * (1 - o)
    out = torch.cat(gates, 1)
    return out, total * f, out.sum(0) if has_bias else None


@kernel("_thnn_fused_gru_cell")
def gru_cell(a, b, h, bias_a=None, bias_b=None):
    if bias_a is not None:
        a, b = a + bias_a, b + bias_b
    (ra, za, na), (rb, zb, nb) = a.chunk(3, 1), b.chunk(3, 1)
    r, z = (ra + rb).sigmoid(), (za + zb).sigmoid()
    n = (na + r * nb).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, nb], 1)


@kernel("_thnn_fused_gru_cell_backward")
def gru_cell_backward(g, workspace, has_bias):
    r, z, n, h, nb = workspace.chunk(5, 1)
    dn = g * (1 - z) * (1 - n**2)
    dz = g * (h - n) * z * (1 - z)
    dr = dn * nb * r * (1 - r)
    a, b = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    return a, b, g * z, *((a.sum(0), b.sum(0)) if has_bias else (None, None))
