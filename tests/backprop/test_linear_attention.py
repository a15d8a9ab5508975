"""Functions of fla, mamba-ssm and causal-conv1d on the CPU: exact, and at the share of what is kept.

Triton's interpreter runs the kernels of fla and mamba-ssm; their CUDA extensions are replaced by plain torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import interpreted
import mamba_kernels
from picks import Take, as_indexed
from rowprop.backprop.rows.sequences import packed_of
from rowprop.cost.flops import count_flops

if not (find_spec("fla") and find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs fla-core, and TRITON_INTERPRET=1: see nox -s kernels", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla says that there is no GPU
    from fla.modules.activations.ops import swiglu, swiglu_linear, swish
    from fla.modules.convolution import causal_conv1d
    from fla.modules.fused_cross_entropy.ops import cross_entropy_loss
    from fla.modules.norm.fused_norm_gate import layer_norm_swish_gate_linear, rms_norm_gated
    from fla.modules.norm.l2norm import l2norm
    from fla.modules.norm.layernorm import group_norm, layer_norm_linear
    from fla.modules.norm.layernorm_gated import rmsnorm_fn
    from fla.modules.rotary import rotary_embedding
    from fla.modules.token_shift import token_shift
    from fla.ops.attn.parallel import parallel_attn
    from fla.ops.comba import chunk_comba
    from fla.ops.common.gate import fused_beta_sigmoid
    from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate
    from fla.ops.generalized_delta_rule.dplr.chunk import chunk_dplr_delta_rule
    from fla.ops.gla import chunk_gla, fused_recurrent_gla
    from fla.ops.gsa import chunk_gsa
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.gate import fused_kda_gate
    from fla.ops.rwkv6 import chunk_rwkv6
    from fla.ops.rwkv7.channel_mixing import channel_mixing_rwkv7
    from fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7
    from fla.ops.rwkv7.gate_output_correction import GateOutputCorrection
    from fla.ops.simple_gla.chunk import ChunkSimpleGLAFunction

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that no mask lets through

N, T, H, D = 4, 6, 1, 16
ROWS = torch.tensor([2])  # a quarter
LENGTHS = [3, 5, 2]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch):
    interpreted.on_cpu(monkeypatch)
    torch.manual_seed(0)


def gate(x: Tensor) -> Tensor:
    return F.logsigmoid(x) / 4


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


class Parts:
    """Operands made of one tensor (N, T, heads, width) whose gradient is sliced, in turn."""

    def __init__(self, h: Tensor) -> None:
        self.h, self.used = h, 0

    def __call__(self, *shape: int) -> Tensor:
        """The next part of the tensor, (N, T, *shape)."""
        size = torch.Size(shape).numel()
        self.used += size
        assert self.used <= self.h.shape[-1]
        return self.h[..., self.used - size : self.used].reshape(*self.h.shape[:2], *shape)

    def heads(self, count: int) -> list[Tensor]:
        return [self(H, D) for _ in range(count)]


Made = Callable[[Parts, dict[str, Any]], Any]


def gated_delta(p: Parts, about: dict[str, Any]) -> Any:
    return chunk_gated_delta_rule(*p.heads(3), gate(p(H)), p(H).sigmoid(), use_qk_l2norm_in_kernel=True, **about)


def kda(p: Parts, about: dict[str, Any]) -> Any:
    return chunk_kda(*p.heads(3), gate(p(H, D)), p(H).sigmoid(), use_qk_l2norm_in_kernel=True, **about)


def gla(p: Parts, about: dict[str, Any]) -> Any:
    return chunk_gla(*p.heads(3), gate(p(H, D)), **about)


def simple_gla(p: Parts, about: dict[str, Any]) -> Any:
    about = {"initial_state": None, "cu_seqlens": None} | about
    state, ends = about["initial_state"], about["cu_seqlens"]
    return ChunkSimpleGLAFunction.apply(*p.heads(3), gate(p(H)), None, D**-0.5, state, False, False, ends, None, 16)


def delta(p: Parts, about: dict[str, Any]) -> Any:
    halves = [x.bfloat16() for x in (*p.heads(3), p(H).sigmoid())]
    return chunk_delta_rule(*halves, use_qk_l2norm_in_kernel=True, **about)


def recurrent_delta(p: Parts, about: dict[str, Any]) -> Any:
    return fused_recurrent_delta_rule(*p.heads(3), p(H).sigmoid(), **about)


def recurrent_gla(p: Parts, about: dict[str, Any]) -> Any:
    return fused_recurrent_gla(*p.heads(3), gate(p(H, D)), **about)


def rwkv7(p: Parts, about: dict[str, Any]) -> Any:
    r, w, k, v, a = p.heads(5)
    a = F.normalize(a, dim=-1)
    return chunk_dplr_delta_rule(r, k, v, -a, a * p(H, D).sigmoid(), gate(w), **about)


def rwkv6(p: Parts, about: dict[str, Any]) -> Any:
    return chunk_rwkv6(*p.heads(3), gate(p(H, D)), torch.ones(H, D), **about)


def gsa(p: Parts, about: dict[str, Any]) -> Any:
    about.pop("initial_state", None)
    return chunk_gsa(*p.heads(3), p(H, D), gate(p(H, D)), **about)


def comba(p: Parts, about: dict[str, Any]) -> Any:
    q, k, v = p.heads(3)
    return chunk_comba(q, k, v, k * p(H, 1).sigmoid(), gate(p(H)), p(H).sigmoid(), **about)


def hgrn(p: Parts, about: dict[str, Any]) -> Any:
    return chunk_hgrn(p(D), gate(p(D)))


def recurrent_hgrn(p: Parts, about: dict[str, Any]) -> Any:
    about.pop("initial_state", None)
    return fused_recurrent_hgrn(p(D), gate(p(D)), **about)


def attention(p: Parts, about: dict[str, Any]) -> Any:
    about.pop("initial_state", None)
    return parallel_attn(*p.heads(3), **about)


def conv(p: Parts, about: dict[str, Any]) -> Any:
    about.pop("initial_state", None)
    return causal_conv1d(p(D), torch.linspace(-1, 1, D * 3).view(D, 3), residual=p(D), activation="silu", **about)


def shift(p: Parts, about: dict[str, Any]) -> Any:
    about.pop("initial_state", None)
    return token_shift(p(D), **about)


def rotary(p: Parts, about: dict[str, Any]) -> Any:
    angles = torch.linspace(0, 3, 32)[:, None] * torch.linspace(1, 0.1, D // 2)
    about.pop("initial_state", None)
    return rotary_embedding(p(H, D), angles.cos(), angles.sin(), **about)


def channels(p: Parts, about: dict[str, Any]) -> Any:
    before = torch.ones(len(p.h), 1, D)
    return channel_mixing_rwkv7(p(D), before, torch.linspace(0, 1, D), torch.eye(D) + 0.1, torch.eye(D) - 0.2, False)


MIXING: dict[str, tuple[str, Made]] = {
    "gated delta rule": ("ChunkGatedDeltaRuleFunction", gated_delta),
    "KDA": ("ChunkKDAFunction", kda),
    "GLA": ("ChunkGLAFunction", gla),
    "simple GLA": ("ChunkSimpleGLAFunction", simple_gla),
    "delta rule": ("ChunkDeltaRuleFunction", delta),
    "delta rule, recurrent": ("FusedRecurrentFunction", recurrent_delta),
    "GLA, recurrent": ("FusedRecurrentFunction", recurrent_gla),
    "RWKV-7": ("ChunkDPLRDeltaRuleFunction", rwkv7),
    "RWKV-6": ("ChunkRWKV6Function", rwkv6),
    "GSA": ("ChunkGSAFunction", gsa),
    "Comba": ("ChunkCombaFunction", comba),
    "HGRN": ("ChunkHGRNFunction", hgrn),
    "HGRN, recurrent": ("FusedRecurrentHGRNFunction", recurrent_hgrn),
    "attention": ("ParallelAttentionFunction", attention),
    "convolution": ("CausalConv1dFunction", conv),
    "token shift": ("TokenShift", shift),
    "channel mixing": ("Rwkv7ChannelMixing", channels),
    "rotary": ("RotaryEmbeddingFunction", rotary),
}


PACKED = [name for name in MIXING if name not in ("HGRN", "channel mixing")]


def gated_norm(p: Parts) -> Any:
    return rms_norm_gated(p(2, D), p(2, D), torch.linspace(0.5, 1, D), None, residual=p(2, D), prenorm=True)


def gated_norm_linear(p: Parts) -> Any:
    return layer_norm_swish_gate_linear(p(D), p(D), torch.ones(D), torch.zeros(D), torch.eye(D) + 0.1, None)


def normed(p: Parts) -> Any:
    weight = torch.linspace(0.5, 1, 2 * D)
    return rmsnorm_fn(p(2 * D), weight, None, p(2 * D), group_size=D, norm_before_gate=False)


def addcmul(p: Parts) -> Any:
    mixes = [torch.linspace(0, 1, D)[None, None] * number for number in range(1, 7)]
    return sum(out * number for number, out in enumerate(fused_addcmul_rwkv7(p(D), p(D), *mixes), 1))


def corrected(p: Parts) -> Any:
    return GateOutputCorrection.apply(p(D), p(1, D), p(1, D), torch.linspace(0, 1, D)[None], p(1, D), p(D))


def losses(p: Parts) -> Any:
    scores = p(D).flatten(0, 1)
    return cross_entropy_loss(scores, torch.arange(len(scores)) % D)[0].view(p.h.shape[:2])


EACH: dict[str, Callable[[Parts], Any]] = {
    "BetaSigmoidFunction": lambda p: fused_beta_sigmoid(p(2)),
    "FusedCrossEntropyFunction": losses,
    "GDNGateFunction": lambda p: fused_gdn_gate(p(2), torch.zeros(2), torch.ones(2)),
    "GateOutputCorrection": corrected,
    "KDAGateFunction": lambda p: fused_kda_gate(p(2, D), torch.zeros(2), torch.ones(2 * D)),
    "L2NormFunction": lambda p: l2norm(p(2, D)),
    "LayerNormFn": normed,
    "LayerNormFunction": lambda p: group_norm(p(2 * D), torch.ones(2 * D), torch.zeros(2 * D), p(2 * D), num_groups=2),
    "LayerNormGatedFunction": gated_norm,
    "LayerNormGatedLinearFunction": gated_norm_linear,
    "LayerNormLinearFunction": lambda p: layer_norm_linear(p(D), torch.ones(D), torch.zeros(D), torch.eye(D), None),
    "Rwkv7FusedAddcmul": addcmul,
    "SwiGLUFunction": lambda p: swiglu(p(D), p(D)),
    "SwiGLULinearFunction": lambda p: swiglu_linear(p(D), p(D), torch.eye(D) + 0.1, None),
    "SwishFunction": lambda p: swish(p(D)),
}


def chunk_scan(p: Parts) -> Any:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    about = {"D": torch.ones(1), "z": p(1, D), "dt_bias": torch.ones(1), "dt_softplus": True}
    return mamba_chunk_scan_combined(p(1, D), p(1), -torch.ones(1), p(1, D), p(1, D), 16, **about)


def split_scan(p: Parts) -> Any:
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    conv, heads = torch.linspace(-1, 1, 3 * D * 3).view(3 * D, 3), torch.ones(1)
    about = {"rmsnorm_weight": torch.ones(D), "headdim": D, "outproj_weight": torch.eye(D) + 0.1}
    packed = torch.arange(T).ge(3).int().expand(len(p.h), T)
    operands = p(4 * D + 8)[..., : 4 * D + 1]
    return mamba_split_conv1d_scan_combined(operands, conv, None, heads, -heads, heads, 16, seq_idx=packed, **about)


def selective_scan(p: Parts) -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, delta, z, b, c = (p(8).mT for _ in range(5))
    a, ones = -torch.linspace(0.5, 2, 64).view(8, 8), torch.ones(8)
    return selective_scan_fn(u, delta, a, b, c, ones, z, ones, delta_softplus=True)


def short_conv(p: Parts) -> Any:
    from causal_conv1d import causal_conv1d_fn

    packed = torch.arange(T).ge(3).int().repeat(len(p.h), 1)
    x = p(D).contiguous().mT
    return causal_conv1d_fn(x, torch.linspace(-1, 1, D * 3).view(D, 3), torch.ones(D), packed, activation="silu")


MAMBA: dict[str, Callable[[Parts], Any]] = {
    "MambaChunkScanCombinedFn": chunk_scan,
    "MambaSplitConv1dScanCombinedFn": split_scan,
    "SelectiveScanFn": selective_scan,
    "CausalConv1dFn": short_conv,
}


BLOCKS = """_layer_norm_bwd_kernel rwkv_seq_mix_kernel rwkv_channel_mixing_pow_and_relu relu_square_bwd_kernel
rwkv_mix_bwd_kenel""".split()
"""Kernels whose programs take several rows each, so that their number is not the share of the rows."""
SEVERAL = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))


def weights() -> tuple[Tensor, Tensor]:
    """A weight that makes operands of input features, and rows of these."""
    return (torch.randn(D, 6 * H * D + 16) * 0.5).requires_grad_(), torch.randn(N, T, D)


class Cost(NamedTuple):
    """What the backward from a function's output costs."""

    flops: int  # of torch's ops
    programs: int  # of Triton's kernels, except those of BLOCKS
    got: int  # numbers in the gradient that the function gets


def compare(
    out: Tensor, name: str, losses: Callable[[Tensor], Tensor], kept: Tensor, *leaves: Tensor
) -> tuple[Any, Cost, Cost]:
    """The report of the pick, and what plain indexing and the pick cost.

    Both go through one forward: the interpreter is slow.
    """
    node, costs, got = out.grad_fn, list[Cost](), list[int]()
    while getattr(getattr(node, "_forward_cls", None), "__name__", "") != name:
        node = node.next_functions[0][0]  # pyright: ignore
    function: Any = node._forward_cls  # pyright: ignore
    own = function.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        got.append(grads[0].numel())
        return own(ctx, *grads)

    def step(take: Take) -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        loss = take(losses(out.float().square()), kept).log1p().sum()
        interpreted.RAN.clear()
        with count_flops() as counted:
            loss.backward(retain_graph=True)
        programs = sum(count for kernel, count in interpreted.RAN if kernel not in BLOCKS)
        costs.append(Cost(counted.total_flops, programs, got[-1]))
        return [leaf.grad for leaf in leaves]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "backward", staticmethod(backward))
        report = as_indexed(step, rtol=1e-4, atol=1e-5)
    dense, sliced = costs
    print(f"{name}: {sliced.flops} of {dense.flops} FLOPs, {sliced.programs} of {dense.programs} programs")
    return report, dense, sliced


def of_rows(out: Tensor) -> Tensor:
    return out.flatten(1).sum(1)


def of_tokens(out: Tensor) -> Tensor:
    return out.view(*out.shape[:2], -1).sum(2)


def assert_share(name: str, out: Tensor, *leaves: Tensor) -> None:
    report, dense, sliced = compare(out, name, of_rows, ROWS, *leaves)
    assert report.sliced[name] == 1 and not report.densified and sliced.got * 4 == dense.got
    assert sliced.flops <= 0.27 * dense.flops and sliced.programs <= 0.27 * dense.programs


@pytest.mark.parametrize("name", MIXING)
# Red when: rows of a saved tensor, or of the states of chunks, are not taken.
def test_kept_rows_cost_their_share(name: str):
    of, make = MIXING[name]
    w, x = weights()
    assert_share(of, first(make(Parts(x @ w), {})), w)


@pytest.mark.parametrize("name", MAMBA)
# Red when: rows are not taken, those of the group norm's statistics as of one group, or channels are made contiguous.
def test_mamba_on_kept_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    if not mamba_kernels.install(monkeypatch):
        pytest.skip("needs mamba-ssm and causal-conv1d on the path")
    w, x = weights()
    mamba_kernels.RAN.clear()
    assert_share(name, MAMBA[name](Parts(x @ w)), w)
    assert mamba_kernels.RAN in ([], [N, 1])


@pytest.mark.parametrize("name", PACKED)
# Red when: the lengths or the chunks are those of all sequences, or chunks keep the numbers of their sequences.
def test_packed_sequences_that_hold_a_kept_token(name: str):
    of, make = MIXING[name]
    w, _ = weights()
    x = torch.randn(1, sum(LENGTHS), D)
    mask = torch.isin(torch.arange(sum(LENGTHS)), torch.tensor([4, 6, 8]))[None]
    out = first(make(Parts(x @ w), {"cu_seqlens": SEVERAL}))
    report, dense, sliced = compare(out, of, of_tokens, mask, w)
    assert report.sliced[of] == 1 and not report.densified and sliced.programs < dense.programs
    assert sliced.got * sum(LENGTHS) == dense.got * sum(LENGTHS[1:])


@pytest.mark.parametrize("name", ["GLA, recurrent", "simple GLA", "convolution", "token shift"])
def test_rows_in_one_packing(name: str):
    # Red when: the gradients of kept tokens are put at the places of others.
    of, make = MIXING[name]
    w, x = weights()
    out = first(make(Parts((x @ w).view(1, N * T, -1)), {"cu_seqlens": torch.arange(N + 1) * T}))
    report, dense, sliced = compare(out, of, lambda o: of_rows(o.view(N, T, -1)), ROWS, w)
    assert report.sliced[of] == 1 and not report.densified and sliced.got * N == dense.got


@pytest.mark.parametrize(("kept", "reads"), [("rows", 1), ("tokens", 2)])
# Red when: gradients of whole sequences go on as those of other tokens, so that each layer reads the lengths again.
def test_layers_share_the_lengths_of_a_packing(kept: str, reads: int, monkeypatch: pytest.MonkeyPatch):
    calls = list[int]()

    @wraps(packed_of)
    def counted(rows: Any, *about: Any) -> Any:
        calls.append(rows.kept)
        return packed_of(rows, *about)

    monkeypatch.setattr("rowprop.backprop.rules.linear_attention.packed_of", counted)
    w, x = weights()
    out, ends = (x @ w).view(1, N * T, -1), torch.arange(N + 1) * T
    for _ in range(3):
        out = token_shift(out, cu_seqlens=ends)
    if kept == "rows":
        report, *_ = compare(out, "TokenShift", lambda o: of_rows(o.view(N, T, -1)), ROWS, w)
    else:
        report, *_ = compare(out, "TokenShift", of_tokens, (torch.arange(N * T) == T)[None], w)
    assert report.sliced["TokenShift"] == 3 and not report.densified and len(calls) == reads


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
# Red when: states are not taken, or the gradient of some is that of all.
def test_states(packed: bool):
    w, x = weights()
    x = torch.randn(1, sum(LENGTHS), D) if packed else x
    state = torch.randn(len(LENGTHS) if packed else N, H, D, D, requires_grad=True)
    about = {"initial_state": state, "cu_seqlens": SEVERAL if packed else None, "output_final_state": True}
    out, last = recurrent_gla(Parts(x @ w), about)
    if packed:
        mask = (torch.arange(sum(LENGTHS)) == 4)[None]
        report, *_ = compare(out, "FusedRecurrentFunction", of_tokens, mask, w, state)
    else:
        report, *_ = compare(out, "FusedRecurrentFunction", lambda o: of_rows(o) + of_rows(last), ROWS, w, state)
    assert report.sliced["FusedRecurrentFunction"] == 1 and not report.densified


def test_a_gradient_of_states_after_packed_sequences_runs_at_full_size():
    w, _ = weights()
    x = torch.randn(1, sum(LENGTHS), D)
    out, last = recurrent_gla(Parts(x @ w), {"cu_seqlens": SEVERAL, "output_final_state": True})
    mask = (torch.arange(sum(LENGTHS)) == 4)[None]
    report, *_ = compare(out, "FusedRecurrentFunction", lambda o: of_tokens(o) * last.square().mean(), mask, w)
    assert "FusedRecurrentFunction" in report.densified


SOME = {"rows": torch.arange(N)[:, None].expand(N, T) == 2, "tokens": torch.arange(N * T).view(N, T) % 4 == 1}


@pytest.mark.parametrize(("packed", "kept"), [(False, "tokens"), (True, "rows")])
@pytest.mark.parametrize("name", EACH)
# Red when: statistics are those of other tokens, or of one group of several; shapes kept in ctx are those of all rows.
def test_functions_of_each_token(name: str, packed: bool, kept: str):
    w, x = weights()
    mask, x = (SOME[kept].reshape(1, -1), x.reshape(1, N * T, D)) if packed else (SOME[kept], x)
    report, dense, sliced = compare(first(EACH[name](Parts(x @ w))), name, of_tokens, mask, w)
    assert report.sliced[name] == 1 and not report.densified and sliced.got * 4 == dense.got
    assert sliced.flops <= 0.27 * dense.flops


def other(name: str, module: str, saved: Callable[[Tensor], Tensor] = Tensor.detach, **about: Any) -> Any:
    """A function of this name that mixes rows, and saves one tensor, its input or ``saved`` of it."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(saved(x))
            vars(ctx).update(about)
            return x - x.mean(0)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g - g.mean(0)

    Other.__name__, Other.__module__ = name, module
    return Other.apply


@pytest.mark.parametrize(
    ("name", "module", "about", "reason"),
    [
        ("SwishFunction", "another", {}, "custom autograd function"),
        ("ChunkGLAFunction", "fla.ops", {}, "does not save"),
        ("SelectiveScanFn", "generated_1a", {}, "does not save"),
        ("SwishFunction", "fla.ops", {"kept": torch.ones(N)}, "does not save"),
        ("SwishFunction", "fla.ops", {"saved": torch.adjoint}, "does not save"),
        ("SwishFunction", "fla.ops", {"cp_context": 1}, "split over processes"),
    ],
)
# Red when: a class is known by its name alone, or the saved tensors' shapes or ``cp_context`` are not looked at.
def test_functions_that_save_other_things_run_at_full_size(name: str, module: str, about: dict[str, Any], reason: str):
    w, x = weights()
    report, dense, sliced = compare(other(name, module, **about)(x @ w), name, of_rows, ROWS, w)
    assert list(report.densified) in ([name], ["custom function"]) and dense.got == sliced.got
    assert all(reason in entry.reason for entry in report.densified.values())
