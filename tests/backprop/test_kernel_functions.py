"""Functions of libraries for training on GPUs, by their own Python on the CPU: the gradients of plain indexing.

Triton's interpreter runs the kernels. The libraries lie in a venv of their own: `nox -s kernels`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_kernels
import rowprop
from picks import N, Take, indexed
from rowprop.cost.flops import count_flops

pytestmark = [
    pytest.mark.skipif(not flash_kernels.install(), reason="flash-attn's source is not on the path: nox -s kernels"),
    pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="Triton's interpreter is off"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, for entries that a mask leaves out
]
T, D, HEADS = 3, 12, 2
ROWS = torch.tensor([1, 5])  # a quarter
TOKENS = torch.isin(torch.arange(N * T).view(N, T), torch.tensor([1, 4, 6, 7, 15, 23]))  # a quarter, too
ENDS = torch.tensor([0, 5, 5, 8, 15, 24], dtype=torch.int32)
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rowprop.backprop.rules.libraries._AT_ONCE", 5)  # fewer tokens than are kept
    with flash_kernels.triton_on_cpu():
        yield


def weight(w: Weights, name: str, *shape: int) -> Tensor:
    """A weight that is made at its first use."""
    generator = torch.Generator().manual_seed(len(w))
    return w.setdefault(name, (torch.rand(shape or (D,), generator=generator) + 0.5).requires_grad_())


# --- flash-attn -------------------------------------------------------------------------------------------------------


def normalised(w: Weights, x: Tensor, *more: str, **options: Any) -> Tensor:
    """flash-attn's norm, with each further operand that is named."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    made: dict[str, Any] = {name: weight(w, name) for name in more if name not in ("residual", "x1", "rowscale")}
    made |= {"residual": x.sin()} if "residual" in more else {}
    made |= {"x1": x * weight(w, "second")} if "x1" in more else {}
    made |= {"rowscale": torch.linspace(0.5, 2, N * T).view(N, T)} if "rowscale" in more else {}
    bias = made.pop("bias", None)
    out = layer_norm_fn(x, weight(w, "norm"), bias, **made, **options)
    return sum(part.cos() for part in out) if isinstance(out, tuple) else out


def normalised_first(w: Weights, x: Tensor) -> Tensor:
    """Of two results one has a gradient, as in the last block."""
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return layer_norm_fn(x, weight(w, "norm"), None, x.sin(), prenorm=True)[0]


def normalised_linear(w: Weights, x: Tensor, *more: str, **options: Any) -> Tensor:
    from flash_attn.ops.triton.layer_norm import layer_norm_linear_fn

    residual = x.sin() if "residual" in more else None
    about = weight(w, "norm"), weight(w, "bias"), weight(w, "linear", 9, D), weight(w, "shift", 9)
    out = layer_norm_linear_fn(x, *about, residual, **options)
    return torch.cat([part.cos() for part in out], -1) if isinstance(out, tuple) else out


def gated(w: Weights, x: Tensor) -> Tensor:
    from flash_attn.ops import activations

    return activations.swiglu(*x.chunk(2, -1))


def rotated(
    w: Weights, x: Tensor, name: str = "", packed: bool = False, heads: tuple[int, ...] = (HEADS,), **options: Any
) -> Tensor:
    """Heads turned by ``apply_rotary_emb`` and the end of a name."""
    from flash_attn.layers import rotary

    h = (x * 1).unflatten(2, (*heads, D // torch.Size(heads).numel()))
    h = h.flatten(0, 1) if packed else h
    angles = torch.randn(10 if packed else 4, 1, generator=torch.Generator().manual_seed(1))
    about: Any = {"cu_seqlens": ENDS, "max_seqlen": 9} if packed else {}
    out = getattr(rotary, f"apply_rotary_emb{name}")(h, angles.cos(), angles.sin(), **about, **options)
    return out.flatten(2 - packed).view(N, T, D)


OFFSETS = torch.tensor([0, 3, 1, 0, 2, 1, 3, 2])  # beyond the table for some tokens
FLASH: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "LayerNormFn": lambda w, x: normalised(w, x, "bias"),
    "LayerNormFn, RMS": lambda w, x: normalised(w, x, is_rms_norm=True),
    "LayerNormFn, two streams": lambda w, x: normalised(
        w, x, "bias", "residual", "x1", "weight1", "bias1", prenorm=True, dropout_p=0.3, return_dropout_mask=False
    ),
    "LayerNormFn, last": normalised_first,
    "LayerNormFn, scaled": lambda w, x: normalised(w, x, "residual", "rowscale", dropout_p=0.3),
    "LayerNormLinearFn": normalised_linear,
    "LayerNormLinearFn, two streams": lambda w, x: normalised_linear(w, x, "residual", prenorm=True),
    "SwiGLUFunction": gated,
    "ApplyRotaryEmb": rotated,
    "ApplyRotaryEmb, offsets": lambda w, x: rotated(w, x, seqlen_offsets=OFFSETS),
    "ApplyRotaryEmb, in place": lambda w, x: rotated(w, x, inplace=True, interleaved=True, seqlen_offsets=1),
    "ApplyRotaryEmb, packed": lambda w, x: rotated(w, x, packed=True),
    "ApplyRotaryEmb, packed, offsets": lambda w, x: rotated(w, x, packed=True, seqlen_offsets=OFFSETS[:5]),
    "ApplyRotaryEmbQKV_": lambda w, x: rotated(w, x, "_qkv_", heads=(3, HEADS)),
    "ApplyRotaryEmbQKV_, of fewer keys": lambda w, x: rotated(
        w, x, "_qkv_", heads=(6,), num_heads_q=2, seqlen_offsets=OFFSETS
    ),
    "ApplyRotaryEmbKV_": lambda w, x: rotated(w, x, "_kv_", heads=(2, HEADS)),
}


CASES = FLASH


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("name", CASES)
# Red when: rows of a saved tensor are not taken, or those of another row; seeds, offsets or places are those of all;
# a function writes over the gradient that a sum hands to both of its terms.
def test_kept_rows_cost_their_share(name: str, tokens: bool):
    w: Weights = {"below": torch.randn(D, D).requires_grad_()}
    x, kept = torch.randn(N, T, D), TOKENS if tokens else ROWS

    def step(take: Take) -> tuple[tuple[Tensor, ...], int]:
        torch.manual_seed(1)  # of dropout
        below = x @ w["below"]
        out = CASES[name](w, below)
        if take is indexed:
            out.register_hook(Tensor.clone)  # flash-attn writes over a gradient that is that of the sum, too
        losses = (out + below if out.shape == below.shape else out).square().sum(2)
        loss = take(losses if tokens else losses.mean(1), kept).mean()
        with count_flops() as counted:
            return torch.autograd.grad(loss, [*w.values()]), counted.total_flops

    expected, dense = step(indexed)
    with rowprop.watch() as report:
        found, sliced = step(rowprop.pick)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert report.sliced[name.partition(",")[0]] == 1 and not report.densified
    assert sliced <= 0.27 * dense
