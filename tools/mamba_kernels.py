"""The CUDA extensions of mamba-ssm 2.3 and causal-conv1d 1.7 in plain torch, so that their own Python runs on the CPU.

They check what the extensions check (``csrc/selective_scan/selective_scan.cpp``, ``csrc/causal_conv1d.cpp``).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import interpreted

RAN: list[int] = []
"""The number of rows in each backward of one of these kernels."""


def install(patch: pytest.MonkeyPatch) -> bool:
    """Have both packages import this module as their extensions; whether they are there."""
    if "selective_scan_cuda" not in sys.modules:
        found = find_spec("mamba_ssm")
        if found is None or find_spec("causal_conv1d") is None:
            return False
        package: Any = ModuleType("mamba_ssm")  # its own __init__ imports models, and these import transformers
        package.__path__ = list(found.submodule_search_locations or ())
        scan: Any = ModuleType("selective_scan_cuda")
        scan.fwd, scan.bwd = scan_forward, scan_backward
        conv: Any = ModuleType("causal_conv1d_cuda")
        conv.causal_conv1d_fwd, conv.causal_conv1d_bwd = conv_forward, conv_backward
        sys.modules |= {"mamba_ssm": package, "selective_scan_cuda": scan, "causal_conv1d_cuda": conv}
    interpreted.without_gpu(patch)
    return True


def scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None, bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output before and after the gate, (N, D, T), and the last state (N, D, states)."""
    steps = delta if bias is None else delta + bias[:, None]
    steps = F.softplus(steps) if softplus else steps
    groups = u.shape[1] // b.shape[1]
    b, c = (x.repeat_interleave(groups, 1) for x in (b, c))
    state, outputs = u.new_zeros(*u.shape[:2], a.shape[1]), list[Tensor]()
    for t in range(u.shape[2]):
        state = state * (steps[:, :, t, None] * a).exp() + (steps[:, :, t] * u[:, :, t])[..., None] * b[..., t]
        outputs.append((state * c[..., t]).sum(-1))
    out = torch.stack(outputs, 2) + (0 if d is None else u * d[:, None])
    return out, out if z is None else out * F.silu(z), state


def check_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *like: Tensor | None) -> None:
    batch, dim, length = u.shape
    for x in (u, delta, *like):
        assert x is None or (x.shape == u.shape and x.dtype == u.dtype and x.stride(-1) == 1)
    assert a.shape[0] == dim and a.dtype == torch.float32
    for x in (b, c):
        assert x.shape == (batch, b.shape[1], a.shape[1], length) and x.stride(-1) == 1


def scan_forward(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Any, z: Any, bias: Any, softplus: bool):
    """As ``selective_scan_fwd``: the output, the states of chunks (N, D, chunks, 2 * states), the gated output."""
    check_scan(u, delta, a, b, c, z)
    out, gated, state = scan(u, delta, a, b, c, d, z, bias, softplus)
    states = u.new_zeros(*u.shape[:2], 1, 2 * a.shape[1])
    states[:, :, 0, 1::2] = state
    return [out, states] + ([] if z is None else [gated])


def scan_backward(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Any, z: Any, bias: Any, dout: Tensor, states: Tensor,
    out: Tensor | None, dz: None, softplus: bool, recompute: bool,
) -> list[Any]:  # fmt: skip
    """As ``selective_scan_bwd``. It uses the forward's output for the gradient of the gate."""
    check_scan(u, delta, a, b, c, dout, z, out)
    assert states.is_contiguous() and states.shape == (*u.shape[:2], 1, 2 * a.shape[1]) and (z is None) == (out is None)
    RAN.append(len(u))
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in (u, delta, a, b, c, d, bias)]
        made, _, state = scan(*leaves[:6], None, leaves[6], softplus)  # pyright: ignore
        torch.testing.assert_close(states[:, :, 0, 1::2], state.detach())
        used = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(made, used, dout if z is None else dout * F.silu(z)))
    grads = [None if x is None else next(found) for x in leaves]
    if z is None:
        return grads
    gate = z.sigmoid()
    return [*grads, dout * out * gate * (1 + z * (1 - gate))]


def taps(x: Tensor, width: int, seq_idx: Tensor | None, before: Tensor | None) -> list[Tensor]:
    """For each tap of the kernel, from the present token on, the inputs that it sees, (N, D, T)."""
    padded = F.pad(x, (width - 1, 0)) if before is None else torch.cat([before, x], 2)
    parts = [padded[:, :, width - 1 - back : padded.shape[2] - back] for back in range(width)]
    if seq_idx is None:
        return parts
    same = [F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx for back in range(width)]
    return [part * mask[:, None] for part, mask in zip(parts, same, strict=True)]


def convolution(parts: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    total = sum(part * tap[:, None] for part, tap in zip(parts, weight.flip(1).unbind(1), strict=True))
    return total + (0 if bias is None else bias[:, None])  # pyright: ignore[reportReturnType]


def check_convolution(x: Tensor, weight: Tensor, seq_idx: Tensor | None, before: Tensor | None, *like: Tensor) -> None:
    last = x.stride(1) == 1 and x.stride(2) > 1
    assert last or x.stride(2) == 1
    assert weight.shape[0] == x.shape[1] and 2 <= weight.shape[1] <= 4
    assert not last or (x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0)
    assert all(y.shape == x.shape and y.dtype == x.dtype for y in like)
    if seq_idx is not None:
        assert last and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        assert seq_idx.shape == (len(x), x.shape[2])
    if before is not None:
        assert last and before.shape == (*x.shape[:2], weight.shape[1] - 1) and before.stride(1) == 1


def conv_forward(x: Tensor, weight: Tensor, bias: Any, seq_idx: Any, before: Any, out: Tensor, last: Any, silu: bool):
    """As ``causal_conv1d_fwd``: it writes the output."""
    check_convolution(x, weight, seq_idx, before, out)
    made = convolution(taps(x, weight.shape[1], seq_idx, before), weight, bias)
    out.copy_(F.silu(made) if silu else made)


def conv_backward(
    x: Tensor, weight: Tensor, bias: Any, dout: Tensor, seq_idx: Any, before: Any, dlast: Any, dx: Tensor,
    dweight: Tensor, dbias: Any, dbefore: Any, silu: bool,
) -> None:  # fmt: skip
    """As ``causal_conv1d_bwd``: it writes the gradients."""
    check_convolution(x, weight, seq_idx, before, dout, dx)
    assert dlast is None
    RAN.append(len(x))
    width, length = weight.shape[1], x.shape[2]
    parts = taps(x, width, seq_idx, before)
    if silu:
        made = convolution(parts, weight, bias)
        dout = dout * made.sigmoid() * (1 + made * (1 - made.sigmoid()))
    padded = x.new_zeros(*x.shape[:2], length + width - 1)
    ones = taps(torch.ones_like(x), width, seq_idx, None if before is None else torch.ones_like(before))
    for back, (part, seen) in enumerate(zip(parts, ones, strict=True)):
        dweight[:, width - 1 - back] = (dout * part).sum((0, 2))
        padded[:, :, width - 1 - back : length + width - 1 - back] += dout * seen * weight[:, width - 1 - back, None]
    dx.copy_(padded[:, :, width - 1 :])
    if dbias is not None:
        dbias.copy_(dout.sum((0, 2)))
    if dbefore is not None:
        dbefore.copy_(padded[:, :, : width - 1])
