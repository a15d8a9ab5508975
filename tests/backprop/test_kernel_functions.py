"""Functions of libraries for training on GPUs, by their own Python on the CPU: the gradients of plain indexing.

Triton's interpreter runs the kernels. The libraries lie in a venv of their own: `nox -s kernels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_kernels
import megatron_ranks
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
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowprop.backprop.rules.libraries._AT_ONCE", 5)  # fewer tokens than are kept
    flash_kernels.triton_on_cpu(monkeypatch)


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
    "LayerNormFn, scaled": lambda w, x: normalised(w, x, "residual", "rowscale"),
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


# --- Megatron: sequences in front, (T, N, ...) ------------------------------------------------------------------------

CORE = "megatron.core"


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """A process group of one rank, and no compiler for Megatron's activations."""
    pytest.importorskip("megatron", reason="Megatron is not installed: nox -s kernels")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.object(torch, "compile", lambda function: function), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it does without
        for name in {name.rpartition(".")[0] for name in MEGATRON_FUNCTIONS.split()}:
            import_module(f"{CORE}.{name}")
    layers: Any = import_module(f"{CORE}.tensor_parallel.layers")
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, g, main: main.add_(g.T @ x))
    with mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron warns of another number
        yield
    dist.destroy_process_group()


MEGATRON_FUNCTIONS = """fusions.fused_bias_geglu.bias_geglu_impl fusions.fused_bias_gelu.bias_gelu_impl
fusions.fused_bias_swiglu.bias_swiglu_impl fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy
fusions.fused_weighted_squared_relu.weighted_squared_relu_impl tensor_parallel.mappings.gather
tensor_parallel.cross_entropy.vocab_parallel_cross_entropy tensor_parallel.layers.linear_with_frozen_weight
transformer.moe.moe_utils.MoEAuxLossAutoScaler transformer.multi_token_prediction.MTPLossAutoScaler
utils.MakeViewlessTensor"""


def core(module: str, name: str, *args: Any) -> Tensor:
    return getattr(import_module(f"{CORE}.{module}"), name)(*args)


def applied(module: str, name: str, *args: Any) -> Tensor:
    return getattr(import_module(f"{CORE}.{module}"), name).apply(*args)


def weights_of(h: Tensor) -> Tensor:
    """Of the tokens, (T * N, 1), as a router makes them."""
    return h[..., :1].sigmoid().flatten(0, 1)


def linear(w: Weights, h: Tensor, *, fused: bool = False, frozen: bool = False) -> Tensor:
    layer = weight(w, "linear", 5, D)
    if frozen:
        return (
            core(
                "tensor_parallel.layers",
                "linear_with_frozen_weight",
                h,
                layer.detach(),
                None,
                False,
                True,
                False,
                dist.group.WORLD,
            )
            + layer.sum()
        )
    if fused and not hasattr(layer, "main_grad"):
        layer.main_grad = torch.zeros_like(layer)
    name = "linear_with_grad_accumulation_and_async_allreduce"
    return core(
        "tensor_parallel.layers", name, h, layer, weight(w, "bias", 5), fused, True, False, None, None, dist.group.WORLD
    )


CLASSES = 7


def cross_entropy(w: Weights, h: Tensor, *options: float, fused: bool = False) -> Tensor:
    target = torch.arange(T * N).view(T, N) % CLASSES
    module, name = (
        ("fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")
        if fused
        else ("tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")
    )
    return core(module, name, h @ weight(w, "head", D, CLASSES), target, *options, dist.group.WORLD)[..., None]


FUSIONS = "fusions.fused_"
MEGATRON: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "GeLUFunction": lambda w, h: core(FUSIONS + "bias_gelu", "bias_gelu_impl", h, weight(w, "bias")),
    "BiasGeGLUFunction": lambda w, h: core(FUSIONS + "bias_geglu", "bias_geglu_impl", h, weight(w, "bias")),
    "GeGLUFunction": lambda w, h: core(FUSIONS + "bias_geglu", "bias_geglu_impl", h, None),
    "WeightedQuickGeGLUFunction": lambda w, h: core(
        FUSIONS + "bias_geglu", "weighted_bias_quick_geglu_impl", h, None, weights_of(h)
    ),
    "BiasSwiGLUFunction": lambda w, h: core(FUSIONS + "bias_swiglu", "bias_swiglu_impl", h, weight(w, "bias")),
    "SwiGLUFunction, of Megatron": lambda w, h: core(FUSIONS + "bias_swiglu", "bias_swiglu_impl", h, None),
    "SwiGLUFunction, stored in 8 bits": lambda w, h: core(FUSIONS + "bias_swiglu", "bias_swiglu_impl", h, None, True),
    "WeightedSwiGLUFunction": lambda w, h: core(
        FUSIONS + "bias_swiglu", "weighted_bias_swiglu_impl", h, None, weights_of(h)
    ),
    "WeightedSquaredReLUFunction": lambda w, h: core(
        FUSIONS + "weighted_squared_relu", "weighted_squared_relu_impl", h, weights_of(h)
    ),
    "MoEAuxLossAutoScaler": lambda w, h: applied(
        "transformer.moe.moe_utils", "MoEAuxLossAutoScaler", h, weight(w, "loss").sum()
    ),
    "MTPLossAutoScaler": lambda w, h: applied(
        "transformer.multi_token_prediction", "MTPLossAutoScaler", h, weight(w, "loss").sum()
    ),
    "RouterGatingLinearFunction": lambda w, h: applied(
        "transformer.moe.moe_utils",
        "RouterGatingLinearFunction",
        h.flatten(0, 1),
        weight(w, "router", 5, D),
        None,
        torch.float32,
    ).unflatten(0, (T, N)),
    "MakeViewlessTensor": lambda w, h: applied("utils", "MakeViewlessTensor", h, True),
    "_VocabParallelCrossEntropy": lambda w, h: cross_entropy(w, h, 0.0),
    "_VocabParallelCrossEntropy, smooth": lambda w, h: cross_entropy(w, h, 0.1),
    "_VocabParallelCrossEntropy, fused": lambda w, h: cross_entropy(w, h, fused=True),
    "LinearWithFrozenWeight": lambda w, h: linear(w, h, frozen=True),
    "LinearWithGradAccumulationAndAsyncCommunication": linear,
    "LinearWithGradAccumulationAndAsyncCommunication, main_grad": lambda w, h: linear(w, h, fused=True),
}


@pytest.mark.parametrize(
    ("name", "tokens"), [(name, tokens) for name in FLASH for tokens in (False, True) if tokens or "," not in name]
)
# Red when: rows of a saved tensor are not taken, or those of another row; seeds, offsets or places are those of all;
# a function writes over the gradient that a sum hands to both of its terms.
def test_flash_attn_costs_its_share(name: str, tokens: bool):
    check(name, FLASH[name], tokens)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("name", MEGATRON)
# Red when: the same; the gradient of a token's weight is not sliced.
def test_megatron_costs_its_share(name: str, tokens: bool):
    check(name, lambda w, x: MEGATRON[name](w, x.transpose(0, 1).contiguous()).transpose(0, 1), tokens)


@pytest.mark.usefixtures("megatron")
def test_a_weight_gradient_that_megatron_computes_later_needs_all_rows():
    # Red when: the buffer gets the kept rows alone, while the inputs that it is multiplied by are those of all rows.
    layer = weight({}, "linear", 5, D)
    layer.main_grad, later = torch.zeros_like(layer), list[Tensor]()
    h = torch.randn(T, N, D).requires_grad_()
    about = h, layer, None, True, True, False, later, 0, dist.group.WORLD
    out = core("tensor_parallel.layers", "linear_with_grad_accumulation_and_async_allreduce", *about)
    with rowprop.watch() as report:
        rowprop.pick(out.square().sum((0, 2)), ROWS).sum().backward()
    assert later[0].shape == out.shape and type(later[0]) is Tensor
    assert "later" in report.densified["LinearWithGradAccumulationAndAsyncCommunication"].reason


@pytest.mark.skipif(not find_spec("megatron"), reason="Megatron is not installed: nox -s kernels")
# Red when: a function has no rule; parts of another dimension are gathered or scattered.
def test_megatron_between_two_ranks(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", megatron_ranks.__file__, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not all(map(find_spec, ("transformers", "accelerate"))), reason="transformers loads no plan")
# Red when: DTensor's functions or the collectives of transformers' plan have no rule.
def test_a_plan_of_transformers_on_two_ranks(tmp_path: Path):
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(megatron_ranks.__file__).with_name("tensor_parallel_llama.py")),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        figures = json.loads((tmp_path / f"{rank}.json").read_text())
        assert figures["sharded"] and max(figures["rows"], figures["tokens"]) <= 1e-6
        assert figures["rows, share"] <= 0.27 and figures["tokens, share"] <= 0.65
        assert figures["rows, densified"] == figures["tokens, densified"] == []


def check(name: str, function: Callable[[Weights, Tensor], Tensor], tokens: bool) -> None:
    """The gradients of plain indexing, at the FLOPs of what is kept, by a rule of the function's own."""
    w: Weights = {"below": torch.randn(D, D).requires_grad_()}
    x, kept = torch.randn(N, T, D), TOKENS if tokens else ROWS

    def step(take: Take) -> tuple[list[Tensor], int]:
        torch.manual_seed(1)  # of dropout
        below = x @ w["below"]
        out = function(w, below)
        if take is indexed:
            out.register_hook(Tensor.clone)  # flash-attn writes over a gradient that is that of the sum, too
        losses = (out + below if out.shape == below.shape else out).square().sum(2)
        loss = take(losses if tokens else losses.mean(1), kept).mean()
        with count_flops() as counted:
            grads = torch.autograd.grad(loss, [*w.values()], allow_unused=True)
        added = [leaf.main_grad for leaf in w.values() if hasattr(leaf, "main_grad")]
        found = [*(grad for grad in grads if grad is not None), *(grad.clone() for grad in added)]
        assert len(found) == len(w) and all(type(grad) is Tensor for grad in found)
        for grad in added:
            grad.zero_()
        return found, counted.total_flops

    expected, dense = step(indexed)
    with rowprop.watch() as report:
        found, sliced = step(rowprop.pick)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert report.sliced[name.partition(",")[0]] == 1 and not report.densified
    assert sliced <= 0.27 * dense
