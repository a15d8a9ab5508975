"""Functions of torch and of other libraries that a rule knows by name: against plain indexing.

flex_attention has no backward on the CPU; its check of the device is taken out here, and the rest is torch's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.utils import rnn
from torch.utils.flop_counter import flop_registry

import rowprop
from picks import ROWS, N, Take, as_indexed, assert_same_gradients, gradients, indexed, passing, weight
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import NO_RULE
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules import attention as rules
from rowprop.backprop.rules.attention import flex_attention_backward
from rowprop.backprop.rules.registry import RULES, rule_of_function
from rowprop.cost.flops import count_flops
from token_models import cut_attention

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler asks for it

T, H, D = 8, 4, 3
LENGTHS = torch.tensor([8, 3, 5, 2, 7, 4, 6, 1])  # of the rows' sequences


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_warn_once", lambda *_, **__: None)
    torch._dynamo.reset()


def mask(rows: int | None) -> flex.BlockMask:
    """Each row's own length, or without rows a causal mask for all."""
    if rows is None:
        return flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device="cpu", BLOCK_SIZE=2)
    lengths = LENGTHS.repeat_interleave(rows // N)
    return flex.create_block_mask(lambda b, h, q, k: k < lengths[b], rows, None, T, T, device="cpu", BLOCK_SIZE=2)


class Attending:
    """Losses of a projection, flex_attention and a square."""

    def __init__(self, call=flex.flex_attention, dtype=torch.float64, shared_keys=False, windows=1, heads=H) -> None:
        self.call, self.shared_keys, self.windows, self.heads = call, shared_keys, windows, heads
        self.x = torch.randn(N * windows, T, 5, dtype=dtype)
        self.w = (torch.randn(5, (H + 2 * heads) * D, dtype=dtype) * 0.5).requires_grad_()
        self.bias = torch.randn(N, H, dtype=dtype).requires_grad_()

    def __call__(self, **options) -> Tensor:
        x = (self.x.view(N, -1, 5) * self.x.mean()).view(N * self.windows, T, 5)
        heads = (x @ self.w).unflatten(2, (-1, D)).transpose(1, 2)
        query, key, value = heads.split([H, self.heads, self.heads], 1)
        if self.shared_keys:
            key, value = key.mean(0, keepdim=True), value.mean(0, keepdim=True)
        out = self.call(query, key, value, enable_gqa=self.heads != H, **options)
        return out.square().reshape(N, -1).sum(1)


def ask_for_the_row(net: Attending):
    return lambda s, b, h, q, k: s * net.bias[b, h].exp() + 0.1 * LENGTHS[b] * (q - k)


@pytest.mark.parametrize("blocks", [None, 1, N])
@pytest.mark.parametrize("heads", [H, 2])
# Red when: the score or the mask is told the place among the kept rows; the joint graph, and so the gradient of `bias`,
# is told so.
def test_flex_attention_runs_on_the_kept_rows(blocks, heads):
    net = Attending(heads=heads)
    options = {} if blocks is None else {"block_mask": mask(None if blocks == 1 else N)}
    losses = partial(net, score_mod=ask_for_the_row(net), **options)
    for rows in (ROWS, torch.tensor([5]), torch.tensor([2, 2, 7, 2])):
        report = assert_same_gradients(losses, [net.w, net.bias], rows)
        assert report.sliced["FlexAttentionAutogradOp"] == 1 and not report.densified


def with_log_sum_exp(*used: int):
    """flex_attention's output, its log-sum-exp, or both: as losses that ``Attending`` squares."""

    def call(*args, **options):
        out, aux = flex.flex_attention(*args, return_aux=flex.AuxRequest(lse=True), **options)
        return torch.cat([(out.square().sum(-1), aux.lse)[place] for place in used], 1).unsqueeze(-1)

    return call


OTHER_FORMS = {  # what -> (the arguments of Attending, flex_attention's options)
    "output": ({"call": with_log_sum_exp(0)}, {}),
    "log-sum-exp": ({"call": with_log_sum_exp(1)}, {}),
    "both": ({"call": with_log_sum_exp(0, 1)}, {}),
    "keys that all rows share": ({"shared_keys": True}, {"block_mask": N}),
    "windows of rows": (
        {"windows": 2},
        {"block_mask": 2 * N, "score_mod": lambda s, b, h, q, k: s + 0.1 * (b + 1).sqrt() * (q - k)},
    ),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
# Red when: a gradient of the log-sum-exp is not handed on; an output without a gradient counts as a dense one; keys of
# one row are gathered; the place in the batch is taken from the index of the rows, which knows of no windows.
def test_other_forms_of_flex_attention(form):
    arguments, options = OTHER_FORMS[form]
    net, options = Attending(**arguments), {k: mask(v) if k == "block_mask" else v for k, v in options.items()}
    report = assert_same_gradients(lambda: net(**options), [net.w])
    assert report.sliced["FlexAttentionAutogradOp"] == 1
    assert not report.densified or form == "keys that all rows share"


@pytest.mark.parametrize("blocks", [1, N])
def test_flex_attention_gives_its_kernel_the_blocks_of_the_kept_rows(blocks):
    # Kernels skip blocks by these lists; torch's code without a kernel looks at the mask alone. Red when: the lists are
    # not gathered; the gradients of keys that all rows share are taken for gradients per row.
    *lists, mask_mod = mask(None if blocks == 1 else N).as_tuple()
    given = []

    def kernel(query, *args):
        given.extend(args[8][:-1])
        return query, query, query, (None,)

    rows = RowSet(ROWS, N, unique=True, batchnorm="rows")
    full, keys = torch.zeros(N, H, T, D), torch.zeros(blocks, H, T, D)
    operands = [full, keys, keys, full, torch.zeros(N, H, T)]
    grad = RowSlice(torch.zeros(len(ROWS), H, T, D), rows, Layout(0, N), (N, H, T, D))
    query, *keys, _ = flex_attention_backward(kernel, *operands, grad, None, len, len, (*lists, mask_mod), 1.0, {})
    assert query.shape == (N, H, T, D) and query.values.shape == (len(ROWS), H, T, D)
    assert all(type(x) is (Tensor if blocks == 1 else RowSlice) for x in keys)
    wanted = [x[ROWS] if isinstance(x, Tensor) and blocks == N else x for x in lists]
    torch.testing.assert_close(given, wanted, rtol=0, atol=0)


def test_flex_attention_that_saves_something_else_densifies(monkeypatch):
    # Red when: the places of other torch versions are taken for those of this one.
    from torch._higher_order_ops import utils

    net, right, seen = Attending(), utils.saved_values, []

    def older(ctx):  # 2.6 saved no largest scores
        seen.append(ctx)
        return right(ctx)[:5] + right(ctx)[6:] if len(seen) == 1 else right(ctx)

    def step(take: Take):
        if take is not indexed:
            monkeypatch.setattr(utils, "saved_values", older)
        return torch.autograd.grad(take(net(), ROWS).mean(), net.w)

    report = as_indexed(step)
    assert "does not save what it saves in torch 2.9 to 2.15" in report.densified["FlexAttentionAutogradOp"].reason


KNOWN = {  # compiled by which backend -> what the report says about it
    "rowprop": {},
    "rowprop, without the rule": {"flex_attention_backward": NO_RULE},
    "aot_eager": {"CompiledFunction": "compiled by another backend"},
}


@pytest.mark.parametrize("backend", KNOWN)
# Red when: a tuple among an op's arguments becomes a list, in compiled/trace.py; the rule does not know the op.
def test_compiled_flex_attention(backend, monkeypatch):
    name, _, without = backend.partition(",")
    if without:
        monkeypatch.delitem(RULES, torch.ops.higher_order.flex_attention_backward)
    options = {"options": {"kernels": "eager"}} if name == "rowprop" else {}
    net, blocks = Attending(torch.compile(flex.flex_attention, backend=name, **options)), mask(N)
    for rows in (ROWS, torch.tensor([0, 6])):
        losses = partial(net, score_mod=ask_for_the_row(net), block_mask=blocks)
        report = assert_same_gradients(losses, [net.w, net.bias], rows)
        assert report.densified.keys() == KNOWN[backend].keys()
        assert all(KNOWN[backend][where] in entry.reason for where, entry in report.densified.items())
        assert KNOWN[backend] or report.sliced["flex_attention_backward"] == 1


def split(ends: Tensor, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each sequence of packed ones (T, H, D), as (H, time, D)."""
    return zip(*(t.transpose(0, 1).split(ends.diff().tolist(), 1) for t in packed), strict=True)


def joined(sequences: list[Tensor]) -> Tensor:
    return torch.cat(sequences, 1).transpose(0, 1)


def weighed(q: Tensor, k: Tensor, causal: bool, heads: int) -> Tensor:
    """The weights (H, time, keys) of a sequence; its last query sees all keys, also under a causal mask."""
    scores = q @ k.repeat_interleave(heads, 0).mT / D**0.5
    later = torch.ones(scores.shape[1:]).triu(1 + scores.shape[2] - scores.shape[1]).bool()
    return scores.masked_fill(later & causal, -torch.inf).softmax(-1)


RAN: list[list[int]] = []
"""The lengths of the sequences that each call of a backward took."""


def flash_forward(query, key, value, ends_q, ends_k, max_q, max_k, dropout, causal, *_, **options):
    """Sequences of packed ones, each within itself; fewer heads of the keys serve several of the queries."""
    heads = query.shape[1] // key.shape[1]
    pairs = zip(split(ends_q, query), split(ends_k, key, value), strict=True)
    out = joined([weighed(q, k, causal, heads) @ v.repeat_interleave(heads, 0) for (q,), (k, v) in pairs])
    return out, torch.zeros(query.shape[1], query.shape[0]), *[torch.zeros(0)] * 3


def flash_backward(grad, query, key, value, out, lse, ends_q, ends_k, max_q, max_k, dropout, causal, *_, **options):
    assert max_q >= max(ends_q.diff()) and max_k >= max(ends_k.diff()) and ends_q.dtype == ends_k.dtype == torch.int32
    assert ends_q[-1] == len(query) == len(grad) == len(out) == lse.shape[1] and ends_k[-1] == len(key) == len(value)
    RAN.append(ends_q.diff().tolist())
    heads, grads = query.shape[1] // key.shape[1], []
    for (g, q, o), (k, v) in zip(split(ends_q, grad, query, out), split(ends_k, key, value), strict=True):
        weights = weighed(q, k, causal, heads)
        given = g @ v.repeat_interleave(heads, 0).mT - (o * g).sum(-1, keepdim=True)
        scores = weights * given / D**0.5
        of_keys = [x.unflatten(0, (-1, heads)).sum(1) for x in (scores.mT @ q, weights.mT @ g)]
        grads.append((scores @ k.repeat_interleave(heads, 0), *of_keys))
    return tuple(joined(list(parts)) for parts in zip(*grads, strict=True))


def packed(h: Tensor) -> Tensor:
    torch.manual_seed(1)
    out, _ = nn.GRU(4, 3, batch_first=True).double()(
        rnn.pack_padded_sequence(h, LENGTHS, batch_first=True, enforce_sorted=False)
    )
    return rnn.pad_packed_sequence(out, batch_first=True)[0].flatten(1)


def nested(layout: torch.layout):
    def call(h: Tensor) -> Tensor:
        parts = [row[:length] for row, length in zip(h, LENGTHS.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=layout).sin().to_padded_tensor(0.0).flatten(1)

    return call


MIXED = {  # what -> (the call, the ops that densify, the reason of the first)
    "packed sequences": (packed, "as_strided add.Tensor", "do not lead from row to row, or not to every row"),
    "nested": (nested(torch.strided), "_nested_from_padded", NO_RULE),
    "nested, jagged": (nested(torch.jagged), "_nested_from_padded_tensor", NO_RULE),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_rows_of_different_lengths_densify_and_say_why(name):
    # Red when: one of the reasons is dropped, or one of the ops gets a rule: then this line of the docs has to go.
    call, ops, reason = MIXED[name]
    x, w = torch.randn(N, T, 5, dtype=torch.float64), weight(5, 4)
    report = assert_same_gradients(lambda: call((x @ w).tanh()).square().sum(1), [w])
    assert list(report.densified) == ops.split()
    assert reason in report.densified[ops.split()[0]].reason


SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 2]]).repeat(N // 2, 1)


def ends_of(segments: Tensor) -> Tensor:
    """Where the segments of rows (N, T) begin and end, one after another."""
    last = F.pad(segments.diff(dim=1) != 0, (0, 1), value=True)
    return F.pad(last.flatten().nonzero().squeeze(1) + 1, (1, 0)).to(torch.int32)


ENDS = ends_of(SEGMENTS)
WHOLE = (SEGMENTS == 1) & (torch.arange(N) != 3)[:, None]
SLOPES = torch.linspace(-2, 0, N * H).view(N, H).requires_grad_()
KEPT = {
    "whole segments": WHOLE,
    "scattered": torch.rand(N, T, generator=torch.Generator().manual_seed(5)) < 0.3,
    "one token": torch.arange(N * T).view(N, T) == 29,
    "one of each segment": F.pad(SEGMENTS.diff(dim=1) != 0, (0, 1), value=True),
}


def flex_of(q: Tensor, k: Tensor, v: Tensor, segments: Tensor = SEGMENTS, **options) -> Tensor:
    """Segments of packed rows (N, T, H, D), each within itself, and none sees what comes later."""

    def within(b, h, i, j):
        return (segments[b, i] == segments[b, j]) & (i >= j)

    blocks = flex.create_block_mask(within, len(q), None, *q.shape[1:2] * 2, device="cpu", BLOCK_SIZE=2)
    heads, grouped = (x.transpose(1, 2) for x in (q, k, v)), q.shape[2] != k.shape[2]
    return flex.flex_attention(*heads, block_mask=blocks, enable_gqa=grouped, **options).transpose(1, 2)


def flex_in_one_row(*heads: Tensor) -> Tensor:
    segments = torch.repeat_interleave(torch.arange(len(ENDS) - 1), ENDS.diff())[None]
    return flex_of(*(x.flatten(0, 1)[None] for x in heads), segments).view(heads[0].shape)


def flex_with_scores(*heads: Tensor) -> Tensor:
    slopes = SLOPES.to(heads[0].dtype)
    return flex_of(*heads, score_mod=lambda s, b, h, i, j: s * (1 + 0.1 * b) - slopes[b, h].exp() * (i - j))


def packed_of(call):
    def attend(*heads: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in heads)
        return call(q, k, v).view(heads[0].shape)

    return attend


TOLD = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Torch 2.11 takes fewer heads of the keys without being told."""


def varlen_of(ends: Tensor, **options):
    return packed_of(lambda q, k, v: varlen_attn(q, k, v, ends, ends.clone(), T, T, **TOLD, **options))


PACKINGS = {
    "flex_attention": flex_of,
    "flex_attention, one row": flex_in_one_row,
    "flex_attention, scores": flex_with_scores,
    "varlen_attn": varlen_of(ENDS),
    "varlen_attn, causal": varlen_of(ENDS, window_size=(-1, 0)),
    "varlen_attn, empty segments": varlen_of(ENDS[[0, 0, *range(len(ENDS)), -1]], window_size=(-1, 0)),
    "_flash_attention_backward": packed_of(
        lambda q, k, v: torch.ops.aten._flash_attention_forward(q, k, v, ENDS, ENDS, T, T, 0.0, True, False)[0]
    ),
}


@contextmanager
def flash() -> Iterator[None]:
    """The kernels of packed sequences, which torch has for CUDA only, on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


def losses_of_tokens(attend, x: Tensor, w: list[Tensor], keys: int = 2) -> Tensor:
    """Losses (N, T) after layers of attention in which so many heads of keys and values serve ``H`` of queries."""
    h = x
    for layer in w:
        heads = (h @ layer).tanh().unflatten(2, (-1, D)).split([H, keys, keys], 2)
        h = attend(*heads).flatten(2).tanh()
    return h.square().sum(-1)


def gradients_of_tokens(attend, take, x: Tensor, w: list[Tensor], keys: int = 2) -> tuple[Tensor, ...]:
    total = take(losses_of_tokens(attend, x, w, keys)).sum()
    return torch.autograd.grad(total, [*w, SLOPES], allow_unused=True, materialize_grads=True)


def layers(dtype: torch.dtype, length: int = T, keys: int = 2) -> tuple[Tensor, list[Tensor]]:
    w = [torch.randn(H * D, (H + 2 * keys) * D, dtype=dtype, requires_grad=True) for _ in range(2)]
    return torch.randn(N, length, H * D, dtype=dtype), w


def packed_cases() -> Iterator[tuple[str, str, torch.dtype]]:
    """Every mask in both dtypes; flex_attention is compiled anew for each case, so it meets fewer."""
    fewer = {"flex_attention": tuple(KEPT), "flex_attention, one row": ("whole segments", "one token")}
    for name in PACKINGS:
        masks = fewer.get(name, ("scattered",)) if "flex" in name else KEPT
        yield from ((name, kept, torch.float64) for kept in masks)
        if name != "flex_attention, scores":
            yield from ((name, kept, torch.float32) for kept in (masks if "flex" not in name else masks[:1]))


@pytest.mark.parametrize(("name", "kept", "dtype"), list(packed_cases()), ids=str)
# Red when: keys of tokens that are not kept take a gradient under cut, or keys of kept ones none; the mask or the score
# is told the place among the kept queries or sequences; a repeated query counts twice; a segment without a kept token
# runs, or one with a kept token does not; the segments' ends are not counted anew.
def test_attention_within_packed_segments(name: str, kept: str, dtype: torch.dtype):
    attend, mask = PACKINGS[name], KEPT[kept]
    function, (x, w) = name.partition(",")[0], layers(dtype)

    near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    found = []

    def step(take: Take, cut: bool = False):
        used = cut_attention(mask, attend, heads=2) if cut and take is indexed else attend
        RAN.clear()
        found.append(gradients_of_tokens(used, lambda losses: take(losses, mask), x, w))
        return found[-1]

    with flash():
        as_indexed(step, **near)
        report = as_indexed(partial(step, cut=True), attention="cut", **near)
    assert torch.allclose(found[3][0], found[0][0], rtol=1e-3) == (kept == "whole segments")
    assert report.cut == {function: 2}
    if "flex" in name:
        assert not report.densified
    else:
        sizes = ENDS.diff().tolist()
        held = [some.any() for some in mask.flatten().split(sizes)]
        assert [[n for n in run if n] for run in RAN] == [[n for n, some in zip(sizes, held, strict=True) if some]] * 2
        assert list(report.densified) == ([function] if all(held) else [])


def with_its_log_sum_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = flex.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), return_aux=flex.AuxRequest(lse=True))
    return both[0].transpose(1, 2).sin() * both[1].lse.transpose(1, 2)[..., None]


def with_other_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first token of each segment stands for it."""
    first, ends = ENDS[:-1].long(), torch.arange(len(ENDS), dtype=torch.int32)
    return packed_of(lambda q, k, v: varlen_attn(q, k[first].sin(), v[first], ENDS, ends, T, 1))(q, k, v)


def with_keys_of_no_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, and in front a segment that has a key, but no queries."""
    first, ends = F.pad(ENDS[:-1].long(), (1, 0)), torch.arange(len(ENDS) + 1, dtype=torch.int32)
    begins = F.pad(ENDS, (1, 0))
    return packed_of(lambda q, k, v: varlen_attn(q, k[first].sin(), v[first], begins, ends, T, 1))(q, k, v)


SOME = torch.tensor([3, 41, 3, 9, 41, 41, 55])  # among flattened tokens
FLEXIBLE = {  # what -> (attention, which losses are taken)
    "log-sum-exp": (with_its_log_sum_exp, lambda losses, take: take(losses, KEPT["scattered"])),
    "shared keys": (
        lambda q, k, v: flex_of(q, k.mean(0, keepdim=True), v.mean(0, keepdim=True)),
        lambda losses, take: take(losses, KEPT["scattered"]),
    ),
    "tokens in front": (flex_of, lambda losses, take: take(losses.T, KEPT["scattered"].T)),
    "repeats": (flex_of, lambda losses, take: take(losses.flatten(), SOME)),
    "other keys, packed": (with_other_keys, lambda losses, take: take(losses, WHOLE)),
    "keys of no query, packed": (
        with_keys_of_no_query,
        lambda losses, take: take(losses, KEPT["one of each segment"]),
    ),
    "repeats, packed": (PACKINGS["varlen_attn"], lambda losses, take: take(losses.flatten(), SOME)),
}


@pytest.mark.parametrize("attention", ["exact", "cut"])
@pytest.mark.parametrize("name", FLEXIBLE)
# Red when: a gradient of the log-sum-exp is not handed on, or belongs to other queries; keys that all sequences share
# are gathered, or the gradients of a group replace those of another one; a repeated token's key counts twice;
# keys of another packing are gathered as the queries are, or cut; lengths of all segments meet those of some.
def test_other_uses_of_kept_queries(name: str, attention: str):
    attend, taken = FLEXIBLE[name]
    x, w = layers(torch.float64, keys=H)
    here = torch.zeros(N, T, dtype=torch.bool)
    if "repeats" in name:
        here.view(-1)[SOME] = True
    elif "keys" not in name:  # they are of no one token
        here = KEPT["scattered"]
    cuts = attention == "cut" and "keys" not in name

    def step(take: Take):
        used = cut_attention(here, attend, heads=2) if cuts and take is indexed else attend
        return gradients_of_tokens(used, lambda losses: taken(losses, take).exp(), x, w, H)

    with flash():
        report = as_indexed(step, rtol=1e-9, atol=1e-11, attention=attention)
    assert sum(report.cut.values()) == 2 * cuts


@pytest.mark.parametrize("name", ["flex_attention", "flex_attention, one row", "varlen_attn"])
# Red when: the kernel takes all tokens, or queries of other tokens; keys and values of all tokens go on.
def test_whole_segments_cost_their_share(name: str, monkeypatch):
    if name == "varlen_attn" and torch.ops.torch_attn._varlen_attn_backward not in flop_registry:
        pytest.skip("torch 2.11 counts no FLOPs of varlen_attn")
    monkeypatch.setattr(
        "rowprop.backprop.rows.sequences.A_CALL", 0
    )  # in a model of the usual size, a call costs little
    length = 48
    monkeypatch.setattr(f"{__name__}.T", length)
    number = torch.tensor([[2, 7, 3], [5, 5, 2], [9, 1, 2], [4, 4, 4]]).repeat(2, 1) * 4
    segments = torch.stack([torch.arange(3).repeat_interleave(row) for row in number])
    monkeypatch.setattr(f"{__name__}.ENDS", ends_of(segments))
    attend = {
        "flex_attention": lambda *heads: flex_of(*heads, segments),
        "flex_attention, one row": flex_in_one_row,
        "varlen_attn": varlen_of(ends_of(segments)),
    }[name]
    kept = segments == torch.tensor([1, 2, 1, 0, 0, 1, 2, 1])[:, None]
    x, w = layers(torch.float64, length=length)

    def flops(take) -> tuple[list[Tensor], int]:
        total = take(losses_of_tokens(attend, x, w)).sum()
        with count_flops() as counted:
            grads = torch.autograd.grad(total, w)
        assert not counted.uncounted
        return list(grads), counted.total_flops

    with flash():
        plain, full = flops(lambda losses: losses[kept])
        _, everything = flops(torch.flatten)
        cut, found = flops(lambda losses: rowprop.pick(losses, kept, attention="cut"))
    torch.testing.assert_close(cut, plain, rtol=1e-10, atol=1e-12)
    # Of a layer: the gradients of its weight and, but in the first one, of its input; five products of attention.
    linear, attention = 2 * 3 * w[0].numel(), 2 * 10 * H * D
    of_kept, sizes = kept.sum(1), ENDS.diff()
    keys = {"varlen_attn": 0, "flex_attention": length, "flex_attention, one row": N * length}[name]
    assert full == everything == linear * N * length + attention * int((sizes * (keys or sizes)).sum())
    reachable = int((of_kept * (linear + attention * (keys or of_kept))).sum())
    assert reachable <= found <= 1.05 * reachable
    assert found <= 1.05 * kept.double().mean() * full


LOOK = "which packed sequences hold a kept token"


@pytest.mark.parametrize("which", ["a device", "a CUDA graph", "a token in no sequence"])
# Red when: each layer looks at the lengths anew, also where it cannot go by them; the look is not reported; queries'
# gradients, and those of cut keys, are dense while a CUDA graph is captured.
def test_the_host_looks_at_a_packing_once_where_it_can(which: str, monkeypatch):
    readable, known = which != "a CUDA graph", which == "a device"
    monkeypatch.setattr("rowprop.host.READ_AT_ONCE", set())
    monkeypatch.setattr("rowprop.backprop.rows.refusals.readable", lambda _: readable)
    if "token" in which:  # what is answered there, after the look
        look = rules.packed_of
        monkeypatch.setattr(rules, "packed_of", wraps(look)(lambda *about: look(*about) and None))
    attend = packed_of(lambda q, k, v: varlen_attn(q, k, v, ENDS, ENDS, T, T, **TOLD))
    (x, w), chosen = layers(torch.float64), WHOLE.flatten().nonzero().squeeze(1)

    def step(take: Take):
        return gradients_of_tokens(attend, lambda losses: take(losses.flatten(), chosen), x, w)

    with flash():
        report = as_indexed(step, attention="cut")
    assert report.waited == ({LOOK: 1} if readable else {}) and report.cut == {"varlen_attn": 2}
    reasons = {name: found.reason for name, found in report.densified.items()}
    assert reasons == ({} if known else {"varlen_attn": "the kernel takes all tokens"})


def test_synchronised_batch_norm_densifies_and_says_why():
    # Red when: the class has another name than the rule knows; the reason is dropped.
    outcome = rule_of_function(SyncBatchNorm).run(None, None, None)
    assert outcome == Densify("BatchNorm takes its statistics over the rows of all processes; eval() freezes them")


def test_a_function_that_nobody_knows_is_named():
    # Red when: the report says no more than that there was some function.
    w, x = weight(5, 4), torch.randn(N, 5, dtype=torch.float64)
    report = assert_same_gradients(lambda: passing(lambda grad: grad * 2)(x @ w).square().sum(1), [w])
    assert "SavingBackward, a custom autograd function," in report.densified["custom function"].reason


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.12 and older have no such function")
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("bias", [True, False])
# Red when: the class's name is another one (in chunks the backward would be dense), or the targets are not taken.
def test_linear_cross_entropy(chunked: bool, bias: bool):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions() if chunked else None
    layer, head = nn.Linear(6, 5).double(), nn.Linear(5, 11, bias=bias).double()
    x, target, flops = torch.randn(N, 6).double(), torch.arange(N), []

    def step(take: Take):
        how = {"linear_bias": head.bias, "reduction": "none", "options": options}
        losses = F.linear_cross_entropy(layer(x), head.weight, target, **how)
        return gradients(lambda: take(losses, ROWS[:2]).mean(), [*layer.parameters(), *head.parameters()], flops)

    assert not as_indexed(step).densified
    assert flops[1] <= 0.26 * flops[0]
