"""Kernels that torch has for other devices, made for the CPU from their formulas: forward, and backward.

They refuse the operands that CUDA's own kernels refuse, and where a kernel of CUDA reads memory without a look at the
strides, so do they. Each check names the function of torch that it is taken from. Dropout comes from a counter that
knows the place in the batch, as in CUDA's own. With them, torch's own autograd nodes for these ops run on the CPU.
``checked`` does the same for ops that have a kernel on the CPU, too, if CUDA's asks for more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

from rowprop.backprop.rules import norms
from rowprop.backprop.rules.registry import RULES

aten = torch.ops.aten
Kernels = dict[str, Callable[..., Any]]
KERNELS: Kernels = {}
REQUIREMENTS: Kernels = {}
HALF = {torch.float16, torch.bfloat16}
STAND_IN = torch.float64
"""Kernels for half precision take this dtype as well, so that a test can compare gradients to many digits."""


def entered(table: Kernels, *names: str) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        table.update(dict.fromkeys(names, function))
        return function

    return enter


kernel, needs = partial(entered, KERNELS), partial(entered, REQUIREMENTS)


@contextmanager
def installed(*names: str) -> Generator[None]:
    PLANS.clear()
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in KERNELS.items() if not names else ((n, KERNELS[n]) for n in names):
            if hasattr(aten, name):  # some are newer than the oldest torch supported
                library.impl(name, function, "CPU")
        yield
    finally:
        library._destroy()


def drawn(scores: Tensor, p: float) -> Tensor:
    """The factors of dropout: a function of the place among all rows."""
    counter = torch.arange(scores.numel()).view(scores.shape)
    return (counter * 7919 % 101 >= 101 * p).to(scores.dtype) / (1 - p)


def wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def scores_of(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, float]:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * factor
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores, factor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any, p: float, causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    """The output, laid out as (N, time, heads, width), and the log-sum-exp; groups of queries may share keys."""
    dtype, q, k, v = q.dtype, wide(q), shared(wide(k), q), shared(wide(v), q)
    scores, _ = scores_of(q, k, bias, causal, scale)
    out = (scores.softmax(-1) * drawn(scores, p)) @ v
    return out.transpose(1, 2).to(dtype).contiguous().transpose(1, 2), scores.logsumexp(-1)


def shared(heads: Tensor, q: Tensor) -> Tensor:
    """As many heads of keys or values as of queries."""
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], 1)


def attend_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, p: float, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert {t.shape[0] for t in (g, q, k, v, out, lse)} == {len(q)}
    dtype, groups = q.dtype, (q.shape[1] // k.shape[1], q.shape[1] // v.shape[1])
    g, q, k, v, out = wide(g), wide(q), shared(wide(k), q), shared(wide(v), q), wide(out)
    scores, factor = scores_of(q, k, bias, causal, scale)
    weights, mask = torch.exp(scores - lse.unsqueeze(-1)), drawn(scores, p)
    inner = weights * ((g @ v.mT) * mask - (g * out).sum(-1, keepdim=True))
    dk = (inner.mT @ q * factor).unflatten(1, (-1, groups[0])).sum(2)
    dv = ((weights * mask).mT @ g).unflatten(1, (-1, groups[1])).sum(2)
    return *(t.to(dtype) for t in (inner @ k * factor, dk, dv)), inner.to(dtype)


def check_dtypes(*tensors: Tensor, lse: Tensor, single: bool = False) -> None:
    """One dtype, and a log-sum-exp in single precision."""
    (dtype,) = {t.dtype for t in tensors}
    assert dtype in HALF or dtype == STAND_IN or (single and dtype == torch.float32), f"unsupported dtype {dtype}"
    assert lse.dtype == (STAND_IN if dtype == STAND_IN else torch.float32), "log-sum-exp: expected Float"


def check_alignment(*tensors: Tensor, to: int = 8) -> None:
    """Pointers and steps that a load of 16 bytes can start from, and neighbours in memory along the width."""
    for t in tensors:
        assert t.stride(-1) == 1, "wrong alignment (last dimension must be contiguous)"
        assert t.data_ptr() % (to * t.element_size()) == 0, "misaligned address"
        steps = [step for step, size in zip(t.stride()[:-1], t.shape[:-1], strict=True) if size > 1]
        assert all(step % to == 0 for step in steps), "not correctly aligned"


NOISE = torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def check_flash(q: Tensor, k: Tensor, v: Tensor) -> None:
    """``mha_fwd`` and ``mha_bwd`` of flash_api.cpp."""
    width = q.shape[-1]
    assert width % 8 == 0 and width <= 256, "head_size should be a multiple of 8, this is ensured by padding"
    assert k.shape[-1] == v.shape[-1] == width and k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query"
    check_alignment(q, k, v)


@kernel("_scaled_dot_product_flash_attention")
def flash(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
    check_flash(q, k, v)
    out, lse = attend(q, k, v, None, p, causal, scale)
    check_dtypes(q, k, v, lse=lse)
    return out, lse, None, None, q.shape[2], k.shape[2], *NOISE, torch.empty(0)


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, p, causal, seed, offset, *, scale=None):
    assert cum_q is None and cum_k is None, "packed sequences"
    check_flash(q, k, v)
    check_dtypes(g, q, k, v, out, lse=lse)
    # _flash_attention_backward makes the gradient and the output contiguous; the log-sum-exp is read from its pointer.
    check_alignment(g.transpose(1, 2).contiguous(), out.transpose(1, 2).contiguous())
    assert lse.shape == q.shape[:3] and lse.is_contiguous()
    assert out.shape == q.shape == g.shape and (max_q, max_k) == (q.shape[2], k.shape[2])
    return attend_backward(g, q, k, v, None, out, lse, p, causal, scale)[:3]


def is_ragged(q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor | None) -> bool:
    """``use_ragged_in_dense`` of MHA.cpp: decided in the forward, and again in the backward."""
    if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") != "1" or bias is not None:
        return False
    return all(t.transpose(1, 2).is_contiguous() for t in (q, k, v, out))


def check_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """``check_cudnn_tensor_shapes`` and ``check_last_dim_stride_equals_1`` of sdp_utils.cpp, ``bias_data_type``."""
    for t in (q, k, v):
        assert t.shape[-1] % 8 == 0 and t.shape[-1] <= 128, "cuDNN SDPA: head dims are multiples of 8, at most 128"
    check_alignment(q, k, v)
    if bias is not None:
        assert bias.ndim in (2, 3, 4), "cuDNN SDPA expects either a 2D, 3D, or 4D attn_bias"
        assert bias.ndim != 4 or bias.shape[0] in (1, len(q))
        assert bias.dtype in {*HALF, torch.float32, STAND_IN}, "cuDNN SDPA got attn_bias of unsupported dtype"


@kernel("_scaled_dot_product_cudnn_attention")
def cudnn(q, k, v, bias, compute, p=0.0, causal=False, debug=False, *, scale=None):
    check_cudnn(q, k, v, bias)
    out, lse = attend(q, k, v, bias, p, causal, scale)
    check_dtypes(q, k, v, lse=lse)
    order = sorted(range(4), key=q.stride, reverse=True)  # alloc_with_matching_layout
    out = out.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    if is_ragged(q, k, v, out, bias):
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *NOISE, torch.empty(0)


@kernel("_cudnn_attention_forward")
def cudnn_kernel(q, k, v, bias, cum_q, cum_k, max_q, max_k, *args, scale=None):
    return cudnn(q, k, v, bias, *args, scale=scale)


PLANS: dict[Any, Any] = {}


def check_plan(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *settings: object) -> None:
    """``MHACacheKeyWrapper`` of MHA.cpp: a plan is made for the gradient's strides, but kept without them."""
    steps = [step for step, size in zip(g.stride(), g.shape, strict=True) if size > 1]
    kept = PLANS.setdefault((*((t.shape, t.stride()) for t in (q, k, v)), *settings), steps)
    assert steps == kept, f"the plan was made for a gradient with strides {kept}, and these are {steps}"


@kernel("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward")
def cudnn_backward(g, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale=None):
    assert cum_q is None and cum_k is None, "packed sequences"
    check_plan(g, q, k, v, p, causal)
    check_cudnn(q, k, v, bias)
    check_dtypes(g, q, k, v, out, lse=lse)
    check_alignment(out, g if g.stride(-1) == 1 else g.contiguous())
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    # The graph reads the statistics in the layout that it assumes, whatever the forward wrote.
    n, heads, time = q.shape[:3]
    if is_ragged(q, k, v, out, bias):
        lse = lse.as_strided((n, heads, time), (time * heads, 1, heads))
    else:
        lse = lse.as_strided((n, heads, time), (heads * time, time, 1))
    return attend_backward(g, q, k, v, bias, out, lse, p, causal, scale)[:3]


def pad_lse(lse: Tensor) -> Tensor:
    return F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def check_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """``_efficient_attention_backward`` and ``AttentionBackwardKernel::check_supported``; (N, heads, time, width)."""
    to = 4 if q.dtype == torch.float32 else 8
    assert q.shape[-1] == k.shape[-1] and k.shape[2] == v.shape[2]
    assert q.shape[1] == k.shape[1] == v.shape[1], "as many heads of keys and values as of queries"
    assert q.shape[-1] % to == 0 and v.shape[-1] % to == 0  # check_head_dim_size_mem_efficient
    check_alignment(q, k, v, to=to)
    if bias is not None:
        assert bias.dtype == q.dtype, "invalid dtype for bias - should match query's dtype"
        assert bias.shape == (*q.shape[:3], k.shape[2]), "attn_bias: wrong shape"
        check_alignment(bias, to=to)


@kernel("_scaled_dot_product_efficient_attention")
def efficient(q, k, v, bias, compute, p=0.0, causal=False, *, scale=None):
    check_efficient(q, k, v, bias)
    out, lse = attend(q, k, v, bias, p, causal, scale)
    check_dtypes(q, k, v, lse=lse, single=True)
    return out, pad_lse(lse), *NOISE


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(g, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None):
    check_efficient(q, k, v, bias)
    check_dtypes(g, q, k, v, out, lse=lse, single=True)
    to = 4 if q.dtype == torch.float32 else 8
    check_alignment(g.transpose(1, 2).contiguous(), to=to)
    assert out.transpose(1, 2).is_contiguous(), "o_strideM is heads times width"
    assert lse.shape[-1] % 32 == 0 and lse.is_contiguous(), "LSE is not correctly aligned"
    dq, dk, dv, dbias = attend_backward(g, q, k, v, bias, out, lse[..., : q.shape[2]], p, causal, scale)
    width = dbias.shape[-1]
    return dq, dk, dv, F.pad(dbias, (0, -width % 16))[..., :width] if mask[3] else None


def turned(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


@kernel("_flash_attention_forward")
def flash_kernel(q, k, v, cum_q, cum_k, max_q, max_k, p, causal, debug, *, scale=None, **_):
    assert cum_q is None and cum_k is None, "packed sequences"
    out, lse, *_ = flash(*turned(q, k, v), p, causal, scale=scale)
    return out.transpose(1, 2), lse, *NOISE, torch.empty(0)


@kernel("_flash_attention_backward")
def flash_kernel_backward(g, q, k, v, out, lse, *rest, scale=None, **_):
    *inputs, out = turned(g, q, k, v, out)
    return tuple(turned(*flash_backward(*inputs, out, lse, *rest, scale=scale)))


@kernel("_efficient_attention_forward")
def efficient_kernel(q, k, v, bias, cum_q, cum_k, max_q, max_k, p, kind, compute=False, *, scale=None, **_):
    assert cum_q is None and cum_k is None, "packed sequences"
    out, *rest = efficient(*turned(q, k, v), bias, compute, p, kind == 1, scale=scale)
    return out.transpose(1, 2), *rest, q.shape[1], k.shape[1]


@kernel("_efficient_attention_backward")
def efficient_kernel_backward(g, q, k, v, bias, out, *args, scale=None, **_):
    cum_q, cum_k, _, _, lse, p, seed, offset, kind, bias_grad = args
    assert cum_q is None and cum_k is None, "packed sequences"
    g, q, k, v, out = turned(g, q, k, v, out)
    mask = [True, True, True, bias_grad]
    *grads, dbias = efficient_backward(g, q, k, v, bias, out, lse, seed, offset, p, mask, kind == 1, scale=scale)
    return *turned(*grads), dbias if bias_grad else torch.empty(0)


def check_batch_norm(x: Tensor, *parameters: Tensor, g: Tensor | None = None) -> None:
    """``cudnn_batch_norm`` and ``cudnn_batch_norm_backward`` of BatchNorm.cpp."""
    for p in parameters:
        assert p.dtype == (torch.float32 if x.dtype in HALF else x.dtype) and p.is_contiguous()
    order = suggest_memory_format(x)
    assert 2 <= x.ndim <= 5 and all(t.is_contiguous(memory_format=order) for t in (x, x if g is None else g))


@kernel("cudnn_batch_norm")
def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    assert training
    check_batch_norm(x, weight, bias)
    out = aten.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
    return *out, torch.empty(x.numel(), dtype=torch.uint8)


@kernel("cudnn_batch_norm_backward")
def batch_norm_backward(x, g, weight, mean, var, save_mean, save_invstd, eps, reserve):
    assert reserve.numel() == x.numel(), "the reserve is of all rows"
    check_batch_norm(x, weight, save_mean, save_invstd, g=g)
    return aten.native_batch_norm_backward(g, x, weight, mean, var, save_mean, save_invstd, True, eps, [True] * 3)


@kernel("_fused_rms_norm")
def rms_norm(x, shape, weight, eps):
    rstd = (wide(x).square().mean(-1, keepdim=True) + (eps or 0.0)).rsqrt()
    return (wide(x) * rstd * (1 if weight is None else wide(weight))).to(x.dtype), rstd


@kernel("_fused_rms_norm_backward")
def rms_norm_backward(g, x, shape, rstd, weight, mask):
    """As ``LayerNormBackwardKernelImplInternal`` reads the inverse deviations from their pointer, in the wide dtype."""
    assert rstd.is_contiguous() and rstd.numel() * x.shape[-1] == x.numel() and rstd.dtype == wide(x).dtype
    assert g.dtype == x.dtype and (weight is None or weight.dtype == x.dtype)
    xhat, scaled = wide(x) * rstd, wide(g) * (1 if weight is None else wide(weight))
    summed = (wide(g) * xhat).reshape(-1, x.shape[-1]).sum(0)
    dx = rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True))
    return dx.to(x.dtype), None if weight is None else summed.to(x.dtype)


@kernel("cudnn_grid_sampler")
def grid_sampler(x, grid):
    """``cond_cudnn_grid_sampler`` of GridSamplerUtils.h."""
    assert x.ndim == 4 and x.shape[1] <= 1024 and grid.shape[0] == x.shape[0] and grid.dtype == x.dtype
    return aten.grid_sampler_2d(x, grid, 0, 0, True)


@kernel("cudnn_grid_sampler_backward")
def grid_sampler_backward(x, grid, g):
    assert x.ndim == g.ndim == 4 and grid.shape == (len(x), *g.shape[2:], 2) and g.dtype == grid.dtype == x.dtype
    return aten.grid_sampler_2d_backward(g, x, grid, 0, 0, True, [True, True])


@kernel("_cudnn_ctc_loss")
def ctc_loss(scores, targets, steps, lengths, blank, deterministic, zero_infinity):
    """``_use_cudnn_ctc_loss`` of LossCTC.cpp; the labels are on the host, one row's after the other's."""
    assert blank == 0 and targets.ndim == 1 and targets.dtype == torch.int32 and targets.device.type == "cpu"
    assert set(steps) == {len(scores)} and max(lengths) <= 256
    losses, alpha = aten._ctc_loss(scores, targets, steps, lengths, blank, zero_infinity)
    ones = torch.ones_like(losses)
    return losses, aten._ctc_loss_backward(ones, scores, targets, steps, lengths, losses, alpha, blank, zero_infinity)


LSTM, TANH = 2, 1


def check_rnn(x: Tensor, w: list[Tensor], h: Tensor, c: Tensor | None, size: int, batch_first: bool) -> None:
    """``check_attributes``, ``_cudnn_rnn`` and ``_cudnn_rnn_backward_input`` of RNN.cpp."""
    states = [h] if c is None else [h, c]
    assert all(t.dtype == x.dtype and t.device == x.device for t in (*states, *w)), "rnn: one dtype, one device"
    for state in states:
        assert state.is_contiguous(), "rnn: hx or cx is not contiguous"
        assert state.shape == (1, x.shape[not batch_first], size), "Expected hidden size"


@kernel("_cudnn_rnn")
def rnn(x, w, stride, buf, h, c, mode, size, proj, layers, batch_first, p, train, both, lengths, state):
    """One layer and direction, written out; the reserve holds what each step returns: an LSTM's cell and gates, too."""
    check_rnn(x, w, h, c, size, batch_first)
    assert train and layers == 1 and not both and (c is None) == (mode != LSTM)
    w_in, w_state, *biases = map(wide, w)
    first = wide(h[0])
    steps = [(first,) if c is None else (first, wide(c[0]), first.new_zeros(len(first), 4 * size))]
    for now in wide(x).unbind(1 if batch_first else 0):
        a, b = now @ w_in.mT, steps[-1][0] @ w_state.mT
        steps.append((torch.tanh(a + b + sum(biases)),) if c is None else lstm_cell(a, b, steps[-1][1], *biases))
    y = torch.stack([step[0] for step in steps[1:]])
    y = (y * drawn(y, p) if p > 0 else y).to(x.dtype)
    hy, cy = steps[-1][0].to(x.dtype)[None], x.new_empty(0) if c is None else steps[-1][1].to(x.dtype)[None]
    reserve = torch.stack([torch.cat(step, 1) for step in steps]).view(torch.uint8)
    return y.transpose(0, 1) if batch_first else y, hy, cy, reserve, torch.cat([v.flatten() for v in w])


@kernel("_cudnn_rnn_backward")
def rnn_backward(x, w, stride, buf, h, c, y, gy, gh, gc, mode, size, proj, layers, batch_first, p, *rest):
    train, _, _, _, reserve, _ = rest
    check_rnn(x, w, h, c, size, batch_first)
    assert train, "cudnn RNN backward can only be called in training mode"
    assert buf.numel() == sum(v.numel() for v in w)
    if batch_first:
        x, y, gy = (None if t is None else t.transpose(0, 1) for t in (x, y, gy))
    assert y.shape == (*x.shape[:2], size) and y.is_contiguous(), "the output is read from its pointer"
    gy = torch.zeros_like(y) if gy is None else gy
    gy = gy * drawn(y, p) if p > 0 else gy
    gh, gc = (None if s is None else wide(torch.zeros_like(s) if g is None else g)[0] for s, g in ((h, gh), (c, gc)))
    steps = reserve.view(gh.dtype).view(len(x) + 1, len(gh), -1)
    hs, *more = steps.split([size] if gc is None else [size, size, 4 * size], -1)
    before: list[Tensor] = []
    for t in reversed(range(len(x))):
        gh = gh + gy[t]
        if gc is None:
            before.insert(0, gh * (1 - hs[t + 1] ** 2))
        else:
            cs, gates = more
            d, gc, _ = lstm_cell_backward(gh, gc, cs[t], cs[t + 1], gates[t + 1], False)
            before.insert(0, d)
        gh = before[0] @ wide(w[1])
    d = torch.cat(before)
    dx = (d @ wide(w[0])).view(x.shape)
    dw = [d.mT @ wide(x).flatten(0, 1), d.mT @ hs[:-1].flatten(0, 1), *(d.sum(0) for _ in w[2:])]
    grads = dx.transpose(0, 1) if batch_first else dx, gh[None], None if gc is None else gc[None]
    return *(None if g is None else g.to(x.dtype) for g in grads), [g.to(x.dtype) for g in dw]


@kernel("_thnn_fused_lstm_cell")
def lstm_cell(a, b, c, bias_a=None, bias_b=None):
    gates = a + b + (0 if bias_a is None else bias_a + bias_b)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * c + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@kernel("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(gh, gc, c, cy, workspace, has_bias):
    """``checkLSTMBackwardSizes`` of RNN.cu."""
    assert all(t is None or t.shape == c.shape for t in (gh, gc, cy)) and workspace.shape == (len(c), 4 * c.shape[1])
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
    """``checkGRUBackwardSizes`` of RNN.cu."""
    assert g.ndim == 2 and workspace.shape == (len(g), 5 * g.shape[1])
    r, z, n, h, nb = workspace.chunk(5, 1)
    dn = g * (1 - z) * (1 - n**2)
    dz = g * (h - n) * z * (1 - z)
    dr = dn * nb * r * (1 - r)
    a, b = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    return a, b, g * z, *((a.sum(0), b.sum(0)) if has_bias else (None, None))


class Checked:
    """An op that first asserts that CUDA's kernel takes its arguments; ``calls`` counts."""

    def __init__(self, name: str) -> None:
        self.op = getattr(aten, name).default
        self.check = REQUIREMENTS[name]
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check(*args, **kwargs)
        self.calls += 1
        return self.op(*args, **kwargs)


@contextmanager
def checked() -> Generator[dict[str, Checked]]:
    """Rules call the ops of ``REQUIREMENTS`` with a check."""
    ops = {name: Checked(name) for name in REQUIREMENTS if hasattr(aten, name)}
    rules = {op.op: RULES[op.op].run for op in ops.values()}
    ordinary = norms.NATIVE
    try:
        for op in ops.values():
            RULES[op.op].run = lambda _, *args, run=rules[op.op], op=op, **kwargs: run(op, *args, **kwargs)
        norms.NATIVE = ops["native_batch_norm_backward"]  # for the rules of other BatchNorms
        yield ops
    finally:
        norms.NATIVE = ordinary
        for op, run in rules.items():
            RULES[op].run = run


def raw(*tensors: Tensor | None) -> bool:
    """Whether a kernel may read these from their pointers, without strides."""
    return all(t is None or t.is_contiguous() for t in tensors)


@needs("native_batch_norm_backward")
def _(g, x, weight, mean, var, save_mean, save_invstd, train, eps, mask):
    """``batch_norm_backward_cuda``: sums are made in the weight's dtype, and without one not at all."""
    assert weight is not None or not any(mask[1:]), "batch_norm_backward_reduce_cuda_template: weight_.options()"
    assert g.dtype == x.dtype and (weight is None or weight.dtype in (x.dtype, wide(x).dtype))
    for statistic in (save_mean, save_invstd):
        assert statistic is None or statistic.numel() == 0 or statistic.dtype == wide(x).dtype
    if mask[0] and train:
        assert save_mean.numel() == save_invstd.numel() == x.shape[1]


@needs("native_layer_norm_backward")
def _(g, x, shape, mean, rstd, weight, bias, mask):
    """``LayerNormBackwardKernelImplInternal``."""
    assert raw(mean, rstd) and mean.dtype == rstd.dtype == wide(x).dtype and g.dtype == x.dtype
    assert mean.numel() == rstd.numel() == x.numel() // math.prod(shape)


@needs("native_group_norm_backward")
def _(g, x, mean, rstd, weight, n, c, hw, group, mask):
    """``GroupNormBackwardKernelImplInternal``: strides play no part, the formula has made both operands contiguous."""
    assert raw(g, x, mean, rstd, weight) and g.numel() == x.numel() == n * c * hw
    assert mean.numel() == rstd.numel() == n * group


@needs("_ctc_loss_backward")
def _(g, scores, targets, steps, lengths, losses, alpha, blank, zero_infinity=False):
    """``ctc_loss_backward_gpu_template``: lengths on the host, losses from their pointer."""
    assert all(type(n) is int for n in (*steps, *lengths)) and len(steps) == len(lengths) == scores.shape[1]
    assert raw(losses) and g.dtype == losses.dtype == alpha.dtype == scores.dtype
    assert alpha.shape[:2] == scores.shape[1::-1] and alpha.shape[2] > 2 * max(lengths)


@needs("nll_loss_backward")
def _(g, x, target, weight, reduction, ignored, total):
    """``nll_loss_backward_out_cuda_template``."""
    assert g.shape == target.shape == x.shape[:1] and total.numel() == 1 and raw(weight)
    assert target.dtype in (torch.int64, torch.uint8)


@needs("native_dropout_backward")
def _(g, mask, scale):
    """``native_dropout_backward_cuda``."""
    assert mask.dtype == torch.bool and mask.shape == g.shape


@needs("embedding_dense_backward")
def _(g, indices, num, padding, by_freq):
    """``embedding_dense_backward_cuda``."""
    assert indices.dtype in (torch.int64, torch.int32) and g.shape[:-1] == indices.shape


@needs("_grouped_mm")
def _(a, b, offs=None, bias=None, out_dtype=None):
    """``check_valid_strides_and_return_transposed`` of GroupedMMUtils.h, and the TMA loads of GroupMM.cu."""
    assert a.dtype == b.dtype == torch.bfloat16 and offs.dtype == torch.int32 and bias is None
    for t in (a, b):
        assert t.data_ptr() % 16 == 0, "expected data_ptr to be aligned to 16 bytes"
        assert sorted(t.stride())[0] == 1 and sorted(t.stride())[1] % 8 == 0, "strides should be multiple of 16 bytes"
    if a.ndim == b.ndim == 2:  # each group begins at a row's address
        assert a.stride(0) == 1 and b.stride(1) == 1
