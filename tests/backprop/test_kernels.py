"""flash-attn's own Python on the CPU, over its extension in plain torch: exact, and at the share of what is kept.

The package's source lies on a path of its own: `nox -s kernels`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flash_kernels
import rowprop
from flash_kernels import LONGEST, RAN
from picks import N, Take, as_indexed, gradients, indexed
from rowprop.cost.count import count_step
from rowprop.cost.flops import count_flops
from token_models import cut_attention

pytestmark = pytest.mark.skipif(not flash_kernels.install(), reason="flash-attn's source is not on the path")

T, H, D, LAYERS = 8, 4, 8, 2
LENGTHS = [5, 3, 1, 7, 8, 2, 6, 4, 4, 3, 3, 2, 8, 8]  # of packed sequences, none of which crosses a row
ROWS = torch.tensor([1, 5])  # a quarter
SHARED = torch.linspace(0.1, 0.7, H)


def ends_of(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


ENDS = ends_of(LENGTHS)


def slopes(sequences: int) -> Tensor:
    return torch.linspace(0.1, 2, sequences * H).view(sequences, H)


def call(name: str, q: Tensor, k: Tensor, v: Tensor, ends: Tensor = ENDS, **options: Any) -> Tensor:
    """Attention of rows (N, T, heads, width) by the function ``flash_attn[_varlen][_kvpacked|_qkvpacked]_func``."""
    from flash_attn import flash_attn_interface as interface

    return apply(interface, name, q, k, v, ends, **options)


def apply(interface: Any, name: str, q: Tensor, k: Tensor, v: Tensor, ends: Tensor = ENDS, **options: Any) -> Tensor:
    varlen = "varlen" in name
    heads, shape = [x.flatten(0, 1) if varlen else x for x in (q, k, v)], q.shape
    if "qkvpacked" in name:
        heads = [torch.stack(heads, -3)]
    elif "kvpacked" in name:
        heads = [heads[0], torch.stack(heads[1:], -3)]
    if "qkvpacked" in name:
        about: dict[str, Any] = {"cu_seqlens": ends, "max_seqlen": T}
    else:
        about = {"cu_seqlens_q": ends, "cu_seqlens_k": ends.clone(), "max_seqlen_q": T, "max_seqlen_k": T}
    out = getattr(interface, f"flash_attn_{name}")(*heads, **(about if varlen else {}), **options)
    return (out[0] if isinstance(out, tuple) else out).view(shape)


FUNCTIONS = {
    "func": "FlashAttnFunc",
    "kvpacked_func": "FlashAttnKVPackedFunc",
    "qkvpacked_func": "FlashAttnQKVPackedFunc",
    "varlen_func": "FlashAttnVarlenFunc",
    "varlen_kvpacked_func": "FlashAttnVarlenKVPackedFunc",
    "varlen_qkvpacked_func": "FlashAttnVarlenQKVPackedFunc",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (3, 0)},
    "softcap": {"softcap": 0.7, "causal": True},
    "slopes of all rows": {"alibi_slopes": SHARED, "causal": True},
    "slopes of each row": {"alibi_slopes": slopes},
    "fewer heads of keys": {"causal": True},
    "padded heads": {"causal": True},
    "deterministic": {"deterministic": True},
}


def layers(keys: int = H, width: int = D, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    w = [torch.randn(H * width, (H + 2 * keys) * width, dtype=torch.float64) * 0.3 for _ in range(LAYERS)]
    x = torch.randn(N, T, H * width, dtype=torch.float64)
    return x.to(dtype), [layer.to(dtype).requires_grad_() for layer in w]


def losses_of_tokens(attend: Callable[..., Tensor], x: Tensor, w: list[Tensor], keys: int = H) -> Tensor:
    """Losses (N, T) after layers of attention in which so many heads of keys and values serve ``H`` of queries."""
    h = x
    for layer in w:
        heads = (h @ layer).unflatten(2, (H + 2 * keys, -1)).split([H, keys, keys], 2)
        h = attend(*heads).flatten(2).tanh()
    return h.square().sum(-1)


def all_cases() -> list[tuple[str, str]]:
    pairs = ((name, option) for name in FUNCTIONS for option in OPTIONS)
    return [(name, option) for name, option in pairs if not ("qkv" in name and "fewer" in option)]


def arguments(name: str, option: str) -> tuple[Callable[..., Tensor], int, int]:
    """Attention, the number of keys' heads and the width of a head."""
    options = dict(OPTIONS[option])
    if options.get("alibi_slopes") is slopes:
        options["alibi_slopes"] = slopes(len(LENGTHS) if "varlen" in name else N)
    keys, width = 2 if "fewer" in option else H, 6 if "padded" in option else D
    return partial(call, name, **options), keys, width


@pytest.mark.parametrize(("name", "option"), all_cases())
# Red when: rows of the queries, the keys, the output, the log-sum-exp or the slopes are not taken, or those of another
# row; lengths, or the longest of them, are those of all sequences; the gradient of keys goes on dense.
def test_kept_rows_cost_their_share(name: str, option: str):
    attend, keys, width = arguments(name, option)
    x, w = layers(keys, width)
    flops: list[int] = []

    def step(take: Take):
        return gradients(lambda: take(losses_of_tokens(attend, x, w, keys).sum(1), ROWS).log1p().mean(), w, flops)

    RAN.clear()
    LONGEST.clear()
    report = as_indexed(step, rtol=1e-9, atol=1e-12)
    assert report.sliced[FUNCTIONS[name]] == LAYERS and not report.densified
    dense, sliced = RAN[:LAYERS], RAN[LAYERS:]
    assert [sum(run) for run in sliced] == [T * len(ROWS)] * LAYERS and sum(dense[0]) == N * T
    assert LONGEST[:] == ([(T, T)] * LAYERS + [(max(sliced[0]),) * 2] * LAYERS if "varlen" in name else [])
    share = sum(n**2 for n in sliced[0]) / sum(n**2 for n in dense[0])
    assert flops[1] <= max(0.27, share) * flops[0]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# Red when: the log-sum-exp is taken in the dtype of the queries; the gradient begins at any address.
def test_what_the_kernels_ask_for_in_other_dtypes(name: str, dtype: torch.dtype):
    x, w = layers(dtype=dtype)
    attend = partial(call, name, causal=True)

    def step(take: Take):
        return gradients(lambda: take(losses_of_tokens(attend, x, w).sum(1), ROWS).mean(), w)

    assert not as_indexed(step, rtol=0.1, atol=0.1).densified


def test_a_gradient_that_begins_anywhere_is_copied():
    # Red without the copy: the output lies behind another number, so its gradient begins 8 bytes into a wider one.
    x, (w, _) = layers()

    def losses(take: Take) -> Tensor:
        heads = (x @ w).unflatten(2, (3 * H, D)).split(H, 2)
        out = call("func", *heads)
        if take is indexed:
            out.register_hook(Tensor.clone)  # plain indexing hands on the wider gradient, too
        return torch.cat([x[..., :1], out.flatten(2), x[..., :1]], 2).square().sum((1, 2))

    report = as_indexed(lambda take: gradients(lambda: take(losses(take), ROWS).sum(), [w]), rtol=1e-9)
    assert report.sliced["FlashAttnFunc"] == 1


PLACES = torch.arange(N * T).view(N, T)
BEGINS = ENDS[:-1].long()
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).view(N, T)
KEPT = {
    "whole sequences": torch.isin(SEQUENCE, torch.tensor([1, 3, 7, 9])),
    "whole rows": torch.isin(PLACES // T, ROWS),
    "scattered": torch.isin(PLACES, torch.tensor([2, 3, 8, 20, 21, 41, 60])),
    "one token": PLACES == 29,
    "one of each sequence": torch.isin(PLACES, BEGINS),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", FUNCTIONS)
# Red when: keys of tokens that are not kept take a gradient under cut, or keys of kept ones none; a sequence or a row
# without a kept token runs, or one with a kept token does not; the slopes are those of other sequences.
def test_tokens_exact_and_cut(name: str, kept: str):
    varlen, mask = "varlen" in name, KEPT[kept]
    attend = partial(call, name, causal=True, alibi_slopes=slopes(len(LENGTHS) if varlen else N))
    x, w = layers()

    def step(take: Take, cut: bool = False):
        used = cut_attention(mask, attend, heads=2) if cut and take is indexed else attend
        RAN.clear()
        return gradients(lambda: take(losses_of_tokens(used, x, w), mask).log1p().sum(), w)

    as_indexed(step, rtol=1e-9, atol=1e-11)
    report = as_indexed(partial(step, cut=True), rtol=1e-9, atol=1e-11, attention="cut")
    assert report.cut == {FUNCTIONS[name]: LAYERS}
    sizes = LENGTHS if varlen else [T] * N
    held = [bool(some.any()) for some in mask.flatten().split(sizes)]
    assert RAN[:] == [[size for size, some in zip(sizes, held, strict=True) if some]] * LAYERS
    assert list(report.densified) == ([FUNCTIONS[name]] if all(held) else [])


@pytest.mark.parametrize(("name", "looks"), [("qkvpacked_func", 0), ("varlen_qkvpacked_func", 1)])
def test_the_host_looks_at_a_packing_once(name: str, looks: int, monkeypatch: pytest.MonkeyPatch):
    # Red when: each layer looks at the lengths anew; rows of a dense function are counted.
    monkeypatch.setattr("rowprop.host.READ_AT_ONCE", set())
    x, w = layers()

    def step(take: Take):
        return gradients(lambda: take(losses_of_tokens(partial(call, name), x, w).sum(1), ROWS).mean(), w)

    assert sum(as_indexed(step, rtol=1e-9).waited.values()) == looks


@pytest.mark.parametrize("name", ["varlen_func", "varlen_kvpacked_func"])
@pytest.mark.parametrize("others", ["fewer keys", "no keys", "no queries"])
# Red when: lengths are those of all sequences for the queries, and of some for the keys; the longest of no keys is 0.
def test_packed_queries_and_keys_of_other_lengths(name: str, others: str):
    from flash_attn import flash_attn_interface as interface

    of_queries, of_keys = list(LENGTHS), [max(1, n // 2) for n in LENGTHS]
    if others == "no queries":
        of_queries, of_keys = [0, *of_queries], [5, *of_keys]
    elif others == "no keys":
        of_keys[9] = 0
    ends, ends_k = ends_of(of_queries), ends_of(of_keys)
    x, (w, _) = layers()
    y = torch.randn(sum(of_keys), H * D, dtype=torch.float64)
    masks = [SEQUENCE == 9] if others == "no keys" else [KEPT["whole sequences"], KEPT["one of each sequence"]]

    def losses() -> Tensor:
        wq, wk, wv = w.chunk(3, 1)
        q, k, v = (t.unflatten(1, (H, D)) for t in (x.flatten(0, 1) @ wq, y @ wk, y @ wv))
        keys = [torch.stack([k, v], 1)] if "kvpacked" in name else [k, v]
        out = getattr(interface, f"flash_attn_{name}")(q, *keys, ends, ends_k, T, T, causal=True)
        return out.flatten(1).square().sum(1).view(N, T)

    for mask in masks:
        report = as_indexed(lambda take, m=mask: gradients(lambda: take(losses(), m).sum(), [w]), rtol=1e-9)
        assert report.sliced[FUNCTIONS[name]] == 1


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tokens", [False, True])
# Red when: dropout is let through: the kernel draws it by the place of a row.
def test_dropout_runs_at_full_size_and_says_why(name: str, tokens: bool):
    x, w = layers()
    attend = partial(call, name, dropout_p=0.4)
    which = KEPT["scattered"] if tokens else ROWS

    def step(take: Take):
        torch.manual_seed(3)
        losses = losses_of_tokens(attend, x, w)
        return gradients(lambda: take(losses if tokens else losses.sum(1), which).sum(), w)

    report = as_indexed(step, rtol=1e-9, atol=1e-12)
    assert "dropout" in report.densified[FUNCTIONS[name]].reason
    if "varlen" not in name and not tokens:
        assert list(report.densified) == [FUNCTIONS[name]]


def test_keys_of_another_packing_are_not_cut_at_full_size():
    # Red without the look at the lengths: as many keys as queries are taken for the same tokens.
    from flash_attn import flash_attn_interface as interface

    x, (w, _) = layers()
    ends, of_keys = ENDS, ends_of(LENGTHS[::-1])

    def step(take: Take):
        torch.manual_seed(3)
        heads = (x.flatten(0, 1) @ w).unflatten(1, (3 * H, D)).split(H, 1)
        out = interface.flash_attn_varlen_func(*heads, ends, of_keys, T, T, dropout_p=0.4)
        return gradients(lambda: take(out.flatten(1).square().sum(1).view(N, T), KEPT["scattered"]).sum(), [w])

    report = as_indexed(step, rtol=1e-9, atol=1e-12, attention="cut")
    assert not report.cut and "dropout" in report.densified["FlashAttnVarlenFunc"].reason


def loaded_as(name: str) -> Any:
    """The interface as the ``kernels`` package loads it: a module and a namespace of ops of a generated name."""
    text = flash_kernels.source("flash_attn_interface.py").read_text()
    for before in ('"flash_attn::', "torch.ops.flash_attn."):
        text = text.replace(before, before.replace("flash_attn", name))
    module: Any = ModuleType(f"{name}.flash_attn_interface")
    exec(compile(text, name, "exec"), vars(module))
    flash_kernels.on_cpu(module)
    return module


def test_a_function_is_known_under_a_generated_module():
    # Red when: functions are known by their module's name; FLOPs are counted by the namespace of the op.
    module = sys.modules.get("generated_1a2b") or loaded_as("generated_1a2b")
    assert module.FlashAttnFunc.__module__ != "flash_attn.flash_attn_interface"
    x, w = layers()
    flops: list[int] = []

    def step(take: Take):
        attend = partial(apply, module, "func", causal=True)
        with count_flops() as counted:
            grads = gradients(lambda: take(losses_of_tokens(attend, x, w).sum(1), ROWS).mean(), w, flops)
        assert not counted.uncounted
        return grads

    report = as_indexed(step, rtol=1e-9)
    assert report.sliced["FlashAttnFunc"] == LAYERS and not report.densified and flops[1] <= 0.27 * flops[0]


VERSIONS = [(3, "func"), (3, "qkvpacked_func"), (3, "varlen_func"), (4, "func"), (4, "varlen_func")]


@pytest.mark.parametrize(("version", "name"), VERSIONS)
@pytest.mark.parametrize("kept", ["rows", "whole rows", "whole sequences", "scattered"])
# Red when: the output is taken for the log-sum-exp of another version; lengths of all go to the kernel.
def test_the_functions_of_versions_3_and_4(version: int, name: str, kept: str):
    keys = H if "qkv" in name else 2
    x, w = layers(keys)
    attend = partial(apply, flash_kernels.version(version), name, causal=True, softcap=0.7, window_size=(3, 0))
    mask = KEPT.get(kept)

    def step(take: Take, cut: bool = False):
        def loss() -> Tensor:
            used = cut_attention(mask, attend, heads=2) if cut and take is indexed else attend
            losses = losses_of_tokens(used, x, w, keys)
            return (take(losses.sum(1), ROWS) if mask is None else take(losses, mask)).log1p().sum()

        RAN.clear()
        return gradients(loss, w)

    report = as_indexed(step, rtol=1e-9, atol=1e-11)
    sizes, which = LENGTHS if "varlen" in name else [T] * N, torch.isin(PLACES // T, ROWS) if mask is None else mask
    held = [bool(some.any()) for some in which.flatten().split(sizes)]
    assert RAN[:] == [[size for size, some in zip(sizes, held, strict=True) if some]] * LAYERS
    assert report.sliced[FUNCTIONS[name]] == LAYERS and not report.densified
    if mask is not None:
        assert as_indexed(partial(step, cut=True), rtol=1e-9, atol=1e-11, attention="cut").cut


USES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "the log-sum-exp has a gradient": (4, "func", {"return_lse": True}),
    "options without a rule": (4, "func", {"score_mod": lambda *_: None}),
    "what it saves": (3, "varlen_func", {"seqused_q": torch.tensor(LENGTHS, dtype=torch.int32)}),
}


@pytest.mark.parametrize("reason", USES)
# Red when: a use without a rule is let through.
def test_other_uses_of_versions_3_and_4_run_at_full_size(reason: str, monkeypatch: pytest.MonkeyPatch):
    version, name, options = USES[reason]
    module = flash_kernels.version(version)
    x, (w, _) = layers()

    def attend(*heads: Tensor) -> Tensor:
        if "return_lse" not in options:
            return apply(module, name, *heads, **options)
        out, logsumexp = module.flash_attn_func(*heads, **options)
        return out + logsumexp.transpose(1, 2)[..., None]

    if "seqused_q" in options:  # all of each sequence
        for part in ("fwd", "bwd"):
            monkeypatch.setattr(module.flash_attn_3_cuda, part, without_used(getattr(flash_kernels, f"{part}_of_3")))
    report = as_indexed(
        lambda take: gradients(lambda: take(losses_of_tokens(attend, x, [w]).sum(1), ROWS).sum(), [w]), rtol=1e-9
    )
    assert reason in report.densified[FUNCTIONS[name]].reason


def without_used(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: kernel(*(None if arg is USES["what it saves"][2]["seqused_q"] else arg for arg in args))


def other(name: str, saved: Callable[..., Any], **kept: Any) -> Any:
    """Attention of a class of this name that keeps other things."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(*saved(q, k, v))
            vars(ctx).update(kept)
            return q + k.mean(0) * v.mean(0)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
            _, k, v = ctx.saved_tensors[:3]
            total = g.sum(0)
            return g, (total * v.mean(0) / len(g)).expand_as(g), (total * k.mean(0) / len(g)).expand_as(g)

    Other.__name__ = name
    return Other.apply


COUNTED = dict.fromkeys("dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic".split(), 0)
OTHERS = {
    "three tensors": lambda q, k, v: (q, k, v),
    "no options": lambda q, k, v: (q, k, v, q, q[..., 0].transpose(1, 2), torch.zeros(2)),
    "another log-sum-exp": lambda q, k, v: (q, k, v, q, q[..., 0], torch.zeros(2)),
    "keys of other rows": lambda q, k, v: (q, k[:1], v[:1], q, q[..., 0].transpose(1, 2), torch.zeros(2)),
    "a tensor beside them": lambda q, k, v: (q, k, v, q, q[..., 0].transpose(1, 2), torch.zeros(2)),
}


@pytest.mark.parametrize("name", ["FlashAttnFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc"])
@pytest.mark.parametrize("what", OTHERS)
# Red when: a class of one of these names is taken for flash-attn's without a look at what it saves.
def test_another_function_of_this_name_has_a_dense_gradient(name: str, what: str):
    kept = {} if what == "no options" else COUNTED
    kept = {**kept, "scale": torch.ones(())} if "beside" in what else kept
    attend = other(name, OTHERS[what], **kept)
    x, w = layers()
    report = as_indexed(
        lambda take: gradients(lambda: take(losses_of_tokens(attend, x, w).sum(1), ROWS).mean(), w), rtol=1e-9
    )
    assert "does not save what it saves in flash-attn 2.8" in report.densified[name].reason


def test_whole_sequences_without_a_gradient_cost_nothing():
    # Red when: the kernel takes all tokens; keys and values of all tokens go on.
    x, w = layers()
    attend = partial(call, "varlen_func", causal=True)
    mask = KEPT["whole sequences"]
    live = mask.double().mean().item()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList(w)

        def forward(self, x: Tensor) -> Tensor:
            return losses_of_tokens(attend, x, list(self.w))

    model, flops = Model(), list[int]()

    def step() -> list[Tensor]:
        model.zero_grad()
        total = (model(x) * mask).sum()
        with count_flops() as counted:
            total.backward()
        assert not counted.uncounted
        flops.append(counted.total_flops)
        return [p.grad for p in model.parameters()]  # pyright: ignore[reportReturnType]

    expected = step()
    rowprop.skip_zeros(model, unit="token")
    actual = step()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert flops[1] <= (1.1 * live + 0.05) * flops[0]


def test_the_counts_of_a_step():
    # Red when: an op is not counted; a causal kernel counts all pairs; packed sequences count pairs across them.
    x, w = layers()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList(w)

    def count(name: str, **options: Any):
        attend = partial(call, name, **options)
        return count_step(Model(), x, lambda model, x: losses_of_tokens(attend, x, list(model.w)).sum(1))

    each = 2 * H * D * LAYERS
    pairs = {"func": N * T * (T + 1) // 2, "varlen_qkvpacked_func": sum(n**2 for n in LENGTHS)}
    for name, number in pairs.items():
        found = count(name, causal=True)
        assert not found.uncounted
        by_op = {op: n for part in found.by_op.values() for op, n in part.items() if "flash" in op}
        varlen = "varlen_" if "varlen" in name else ""
        assert by_op == {
            f"flash_attn._flash_attn_{varlen}forward": 2 * each * number,
            f"flash_attn._flash_attn_{varlen}backward": 5 * each * number,
        }


# --- Triton kernels and activations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 1e-2}, {"inplace_backward": True}]
)
@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="Triton's interpreter is off")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
# Red when: rows of the logits, of the log-sum-exp or of the labels are not taken.
def test_cross_entropy_and_gelu_cost_their_share(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    from flash_attn.ops.activations import fast_gelu_impl
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    torch.manual_seed(0)
    x, labels = torch.randn(N, 6), torch.randint(0, 11, (N,))
    w = [torch.randn(6, 9, requires_grad=True), torch.randn(9, 11, requires_grad=True)]
    flops: list[int] = []

    def step(take: Take):
        def loss() -> Tensor:
            losses, _ = cross_entropy_loss(fast_gelu_impl(x @ w[0]) @ w[1], labels, **options)
            return take(losses, ROWS).sum()

        return gradients(loss, w, flops)

    report = as_indexed(step, rtol=1e-5, atol=1e-6)
    assert {"CrossEntropyLoss", "FastGeLUFunction"} <= report.sliced.keys() and not report.densified
    assert flops[1] <= 0.27 * flops[0]


# --- bert_padding -----------------------------------------------------------------------------------------------------

HELD = torch.arange(T) < torch.tensor([3, 8, 5, 1, 8, 7, 2, 4])[:, None]


def padded(x: Tensor, w: list[Tensor], residual: bool = False) -> Tensor:
    """Losses (N, T) of a layer on packed tokens, between two on padded rows."""
    from flash_attn import bert_padding

    h = (x @ w[0]).tanh()
    if residual:
        indices = HELD.flatten().nonzero().squeeze(1)
        packed, left = bert_padding.index_first_axis_residual(h.flatten(0, 1), indices)
        h = left.view(h.shape)
    else:
        packed, indices, *_ = bert_padding.unpad_input(h, HELD)
    back = bert_padding.pad_input((packed @ w[1]).sin(), indices, N, T)
    return (back + h if residual else back).square().sum(-1)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("which", ["rows", "tokens", "a padded row's tokens"])
# Red when: the gradient of packed tokens goes to other rows; the residual's gradient is left out.
def test_packed_tokens_and_padded_rows(residual: bool, which: str):
    pytest.importorskip("einops")
    torch.manual_seed(0)
    x = torch.randn(N, T, 6, dtype=torch.float64)
    w = [torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    flops: list[int] = []

    def step(take: Take):
        def loss() -> Tensor:
            losses = padded(x, w, residual)
            if which == "rows":
                return take(losses.sum(1), ROWS).sum()
            return take(losses, KEPT["scattered"] if which == "tokens" else (PLACES >= 8 * 3) & (PLACES < 8 * 4)).sum()

        return gradients(loss, w, flops)

    report = as_indexed(step, rtol=1e-9, atol=1e-12)
    names = {"IndexFirstAxisResidual" if residual else "IndexFirstAxis", "IndexPutFirstAxis"}
    assert names <= report.sliced.keys() and not report.densified
    # A layer on padded rows has one product, and one on packed tokens two.
    share = (len(ROWS) * T + 2 * int(HELD[ROWS].sum())) / (N * T + 2 * int(HELD.sum()))
    assert flops[1] <= (share if which == "rows" else 0.2) * flops[0]


@pytest.mark.parametrize("name", ["IndexFirstAxis", "IndexPutFirstAxis"])
def test_another_index_of_this_name_has_a_dense_gradient(name: str):
    # Red when: what the class saves is not looked at.
    apply = other(name, lambda q, k, v: (q, k, v))
    x, w = layers()
    report = as_indexed(
        lambda take: gradients(lambda: take(losses_of_tokens(apply, x, w).sum(1), ROWS).mean(), w), rtol=1e-9
    )
    assert "does not save" in report.densified[name].reason
