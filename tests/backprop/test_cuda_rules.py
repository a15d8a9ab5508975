"""Rules for ops that have kernels on CUDA only: torch's own autograd nodes, over CPU kernels made from the formulas."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cuda_cases
import gpu_models
import rowprop
from cuda_cases import CASES, HEADS, SINGLE, WIDTH, Case, D, N, T, cudnn, efficient, flash, gradients, leaf
from cuda_kernels import KERNELS, TANH, checked, installed
from picks import Take, as_indexed, assert_same_gradients, indexed
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.registry import RULES, op_name
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops
from token_models import cut_attention

aten = torch.ops.aten
TWO = torch.tensor([1, 4])
KEPT = RowSet(TWO, N, unique=True, batchnorm="rows")
ROWS = {
    "two": TWO,
    "one": torch.tensor([5]),
    "repeats": torch.tensor([0, 2, 2, -1]),
    "mask": torch.arange(N) % 3 == 1,
    "selection": rowprop.Selection(torch.tensor([0, 3, 4]), torch.full((3,), 1 / 3), N),
}


FUSED = {name: CASES[name].op for name in "flash efficient cudnn flash_kernel efficient_kernel".split()}


@pytest.fixture(autouse=True)
def kernels() -> Generator[None]:
    with installed():
        yield


def compare(case: Case, rows: Any) -> Report:
    """A pick's gradients are those of plain indexing, up to the digits of the case's dtype; its report."""
    index = rows.rows if isinstance(rows, rowprop.Selection) else rows
    expected, _ = gradients(case, lambda losses: losses[index])
    actual, report = gradients(case, lambda losses: rowprop.pick(losses, rows, batchnorm="exact"))
    digits = {torch.float64: 1e-11, SINGLE: 1e-5}.get(case.dtype, 2e-2)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert type(a) is Tensor
            torch.testing.assert_close(a, e, rtol=10 * digits, atol=digits * max(1.0, float(e.abs().max())))
    assert set(report.densified) == ({case.op} if case.densifies else set()), str(report)
    return report


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CASES)
# Red when: a saved tensor is not sliced or in another dimension, dropout is let through, a bias loses its padding, a
# gradient that begins at an odd place in memory (flash_beside, one row) is handed over as it is.
def test_gradients_equal_the_dense_truth(name: str, rows: str):
    report = compare(CASES[name], ROWS[rows])
    assert CASES[name].op in (report.densified if CASES[name].densifies else report.sliced)


HALF = [(name, torch.bfloat16) for name in CASES if "norm" not in name or name == "rms_norm"]
HALF += [(name, torch.float16) for name, case in CASES.items() if "attention" in case.op]
HALF.remove(("ctc_loss", torch.bfloat16))  # single precision only


@pytest.mark.parametrize(("name", "dtype"), HALF)
# Red when: the kept rows reach a kernel in other dtypes than all rows do: statistics are in single precision here.
def test_half_precision(name: str, dtype: torch.dtype):
    compare(replace(CASES[name], dtype=dtype), TWO)


def operands(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(N, h, T, width).to(dtype) for h in (HEADS, heads, heads)]


def with_a_bias_of_odd_strides() -> Tensor:
    bias = torch.zeros(N, HEADS, T, T, dtype=torch.bfloat16)
    return aten._scaled_dot_product_efficient_attention(*operands(), bias, True)


def with_a_state_of_odd_strides() -> Tensor:
    state, w = torch.ones(D, 1, N).permute(1, 2, 0), [torch.ones(D, 3)]
    return aten._cudnn_rnn(
        torch.ones(N, T, 3), w, 1, None, state, None, TANH, D, 0, 1, True, 0.0, True, False, [], None
    )


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "width of a head": ("multiple of 8", lambda: flash(*operands(width=12))),
    "single precision": ("unsupported dtype", lambda: flash(*operands(SINGLE))),
    "width that is not innermost": ("must be contiguous", lambda: flash(*[t.mT.contiguous().mT for t in operands()])),
    "heads that do not divide": ("must divide", lambda: flash(*operands(heads=3))),
    "shared keys": ("as many heads", lambda: efficient(*operands(heads=1))),
    "wide heads": ("at most 128", lambda: cudnn(*operands(width=136))),
    "address": ("misaligned", lambda: cudnn(*[F.pad(t, (1, 0))[..., 1:] for t in operands(width=16)])),
    "strides of the bias": ("not correctly aligned", with_a_bias_of_odd_strides),
    "strides of a state": ("not contiguous", with_a_state_of_odd_strides),
}


@pytest.mark.parametrize("what", REFUSED)
# Red when: an emulated kernel takes operands that CUDA's own refuses.
def test_emulated_kernels_refuse_what_cudas_refuse(what: str):
    message, call = REFUSED[what]
    with pytest.raises(AssertionError, match=message):
        call()


@pytest.mark.parametrize("name", ["lstm", "lstm_batch_first", "rnn", "rnn_batch_first"])
# Red when: a gate's or a state's derivative is another one, or a sequence is taken for a batch.
def test_the_recurrent_kernels_are_torchs_layers(name: str):
    case, first = CASES[name], "batch_first" in name
    rows = [torch.randn(N, *shape, dtype=torch.float64, requires_grad=True) for shape in case.rows]
    w = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in case.shared]
    layer = (nn.LSTM if len(rows) == 3 else nn.RNN)(3, D, batch_first=first, dtype=torch.float64)
    x, *states = rows
    h, *c = (state[None] for state in states)
    given = x if first else x.transpose(0, 1), (h, *c) if c else h
    y, last = torch.func.functional_call(layer, dict(zip(dict(layer.named_parameters()), w, strict=True)), given)
    own = [y if first else y.transpose(0, 1), *(state[0] for state in (last if c else [last]))]
    emulated = case.f(*rows, *w)
    torch.testing.assert_close(emulated, tuple(own), rtol=1e-10, atol=1e-12)
    sums = [sum((out.sin() * (i + 1)).sum() for i, out in enumerate(outs)) for outs in (emulated, own)]
    a, b = (torch.autograd.grad(total, [*rows, *w]) for total in sums)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FUSED)
def test_flops(name: str):
    case, index = CASES[name], torch.tensor([1, 4, 5])
    with count_flops() as full:
        gradients(case, lambda losses: losses[index])
    with count_flops() as part:
        gradients(case, lambda losses: rowprop.pick(losses, index))
    width = case.rows[2][-1]  # of the values; forward: scores and their mixture, backward: five such products
    pairs = T * (T + 1) // 2 if name.endswith("_kernel") else T * cuda_cases.S  # those two are causal
    scores, mixture = (2 * N * HEADS * pairs * d for d in (WIDTH, width))
    expected = [scores + mixture, 3 * scores + 2 * mixture]
    assert list(full.by_op.values()) == expected and not full.uncounted
    assert list(part.by_op.values()) == [expected[0], expected[1] // 2] and not part.uncounted


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "attention" in case.op and n != "cudnn_kernel"])
# Red when: a rule calls its op with arguments that torch's own shape functions for CUDA refuse.
def test_shapes_are_those_of_torch(name: str):
    case, index = CASES[name], torch.tensor([1, 4], device="meta")
    grads, report = gradients(case, lambda losses: rowprop.pick(losses, index), "meta")
    assert (case.op in report.sliced) != case.densifies
    for grad, shape in zip(grads, [*[(N, *shape) for shape in case.rows], *case.shared], strict=True):
        assert grad is None or grad.shape == shape


def test_every_rule_that_needs_a_kernel_is_put_to_the_test():
    called = {case.op for case in CASES.values() if not case.densifies}
    called |= {"cudnn_batch_norm_backward"}  # test_batch_norm_projects...
    assert {op_name(op) for op in RULES} & KERNELS.keys() == called & KERNELS.keys()


def test_a_bias_of_another_shape_than_the_scores_that_needs_a_gradient_densifies():
    # Red when: the sum over the rows that the kernel would have to make of its gradient is taken for rows.
    op = getattr(aten, FUSED["efficient"]).default
    full, seed = torch.randn(N, HEADS, T, WIDTH), torch.zeros((), dtype=torch.int64)
    g = RowSlice(full[:2], KEPT, Layout(0, N), full.shape)
    rest = full, full, full, torch.zeros(1, HEADS, T, T), full, full[..., 0], seed, seed, 0.0, [True] * 4
    outcome = RULES[op].run(op, g, *rest)
    assert type(outcome) is Densify and "shape of the scores" in outcome.reason


@pytest.mark.parametrize("op", ["cudnn_batch_norm", "update"])
@pytest.mark.parametrize("channels_last", [False, True])
# Red when: cuDNN's rule hands the statistics over in another order, or leaves the projection out.
def test_batch_norm_projects_as_the_ordinary_kernel_does(op: str, channels_last: bool):
    index = torch.tensor([1, 4, 5])

    def run(norm: Callable[..., Tensor]) -> list[Tensor]:
        x, w, b = (leaf(i, shape, torch.float64) for i, shape in enumerate(((N, 3, 4, 2), (3,), (3,))))
        order = torch.channels_last if channels_last else torch.contiguous_format
        out = norm((x * 2 + 5).contiguous(memory_format=order), w, b)
        losses = (out - 0.3).square().flatten(1).sum(1)
        rowprop.pick(losses, index).sum().backward()
        return [v.grad for v in (x, w, b) if v.grad is not None]

    expected = run(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True))
    torch.testing.assert_close(run(lambda *args: cuda_cases.batch_norm(op, *args)), expected)


def trained(x: Tensor, w: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def mixed(norm: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
    """As under autocast: the input is half precision, the parameters are not."""
    return norm(x.bfloat16(), *parameters).float()


def native_ctc(x: Tensor, *, in_one_line: bool = False) -> Tensor:
    lengths = [2, 1, 3, 2, 2, 1]
    targets = torch.arange(N * 3).reshape(N, 3) % 4 % 3 + 1
    if in_one_line:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    losses, _ = aten._ctc_loss(x.transpose(0, 1).log_softmax(-1), targets, [T, T, T, 6, T, 6], lengths, 0, False)
    return losses[:, None]


def experts(x: Tensor, w: Tensor) -> Tensor:
    """Row i goes to expert i % 3; the rows are sorted by expert, and back."""
    order = torch.arange(N).reshape(-1, 3).T.flatten()
    ends = torch.arange(1, 4, dtype=torch.int32) * (N // 3)
    out = aten._grouped_mm(x[order].bfloat16(), w.bfloat16(), ends)
    return out.float()[order.argsort()]


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    return F.embedding((x.detach() * 3).long() % 5, table) * x.unsqueeze(-1)


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(N) % 4, reduction="none")[:, None]


IMAGE, WEIGHTS = ((4, 3, 2),), ((4,), (4,))
OF_CUDNN = partial(cuda_cases.batch_norm, "cudnn_batch_norm")
NORMS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "batch norm": (trained, IMAGE),
    "batch norm, channels last": (lambda x, *wb: trained(x.contiguous(memory_format=torch.channels_last), *wb), IMAGE),
    "batch norm of features": (trained, ((4,),)),
    "batch norm, mixed": (partial(mixed, trained), IMAGE),
    "batch norm in evaluation": (lambda x, w, b: F.batch_norm(x, w.detach() * 0, w.detach() * 0 + 2, w, b), IMAGE),
    "cuDNN's batch norm": (OF_CUDNN, IMAGE),
    "cuDNN's batch norm, mixed": (partial(mixed, OF_CUDNN), IMAGE),
    "either batch norm": (partial(cuda_cases.batch_norm, "update"), IMAGE),
    "instance norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), IMAGE),
}
ORDINARY: dict[str, Case] = {
    name: Case("native_batch_norm_backward", f, rows, WEIGHTS, dtype=SINGLE if "mixed" in name else torch.float64)
    for name, (f, rows) in NORMS.items()
} | {
    "batch norm without a weight": Case("native_batch_norm_backward", trained, IMAGE),
    "layer norm": Case(
        "native_layer_norm_backward", lambda x, w, b: F.layer_norm(x.mT, (4,), w, b).mT.contiguous(), ((4, 3),), WEIGHTS
    ),
    "group norm": Case(
        "native_group_norm_backward", lambda x, *wb: F.group_norm(x, 2, *wb).movedim(1, -1).contiguous(), IMAGE, WEIGHTS
    ),
    "ctc": Case("_ctc_loss_backward", native_ctc, ((T + 2, 4),)),
    "ctc, in one line": Case("_ctc_loss_backward", partial(native_ctc, in_one_line=True), ((T + 2, 4),)),
    "cross entropy": Case("nll_loss_backward", cross_entropy, ((4,),)),
    "embedding": Case("embedding_dense_backward", looked_up, ((3,),), ((5, 4),)),
    "dropout": Case("native_dropout_backward", lambda x: aten.native_dropout(x, 0.3, True)[0], ((4,),)),
}
if hasattr(aten, "_grouped_mm"):
    ORDINARY["experts"] = Case("_grouped_mm", experts, ((16,),), ((3, 16, 8),), dtype=SINGLE)


@pytest.mark.parametrize("rows", ["two", "one", "repeats"])
@pytest.mark.parametrize("name", ORDINARY)
# Red when: the rule asks for BatchNorm's sums over the kept rows without a weight, which CUDA's kernels refuse; group
# norm gets the kept rows in other strides than CUDA's formula promises.
def test_ordinary_ops_are_called_as_cuda_takes_them(name: str, rows: str):
    case, index = ORDINARY[name], ROWS[rows]
    with checked() as ops:
        torch.manual_seed(0)
        found, report = gradients(case, lambda losses: rowprop.pick(losses, index, batchnorm="rows"))
    assert ops[case.op].calls and not report.densified, str(report)
    torch.manual_seed(0)
    expected, _ = gradients(case, lambda losses: losses[index])
    # BatchNorm in training projects its input's gradient; the parameters' gradients are exact.
    projected = "batch norm" in name and "evaluation" not in name
    digits = 1e-9 if case.dtype == torch.float64 else 5e-2 if projected else 2e-2
    torch.testing.assert_close(found[projected:], expected[projected:], rtol=digits, atol=digits)


@pytest.mark.parametrize("length", ["q", "k"])
@pytest.mark.parametrize("name", [op for name, op in FUSED.items() if name != "efficient"])
# Red when: the lengths of packed sequences are looked for in another place, or under one of their two names only.
def test_packed_sequences_run_on_all_rows(name: str, length: str):
    op = getattr(aten, name).default
    given = {f"cum_seq_{length}", f"cu_seqlens_{length}"}
    args = [torch.arange(2) if a.name in given else None for a in op._schema.arguments[1:] if not a.kwarg_only]
    outcome = RULES[op].run(op, RowSlice(torch.zeros(2, T, HEADS, D), KEPT, Layout(0, N), (N, T, HEADS, D)), *args)
    assert outcome == Densify("sequences of different lengths are packed one after another")


# Red when: the kept rows reach the kernel, whose choice of a format depends on the strides of all rows. The views of a
# projection are not contiguous in the forward, but their kept rows are: the log-sum-exp would be read transposed.
def test_cudnn_attention_that_avoids_recompiling_runs_on_all_rows(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    compare(replace(CASES["cudnn_one_projection"], densifies=True), TWO)


def own(name: str, *more: Any) -> Callable[..., Tensor]:
    """A kernel's own call, (N, time, heads, width), for (N, heads, time, width)."""
    op = getattr(aten, name)
    return lambda q, k, v: op(*(x.transpose(1, 2) for x in (q, k, v)), *more)[0].transpose(1, 2)


TOKENS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    FUSED["flash"]: lambda q, k, v: flash(q, k, v, is_causal=True),
    FUSED["efficient"]: lambda q, k, v: efficient(q, k, v, is_causal=True),
    FUSED["cudnn"]: lambda q, k, v: cudnn(q, k, v, is_causal=True),
    FUSED["flash_kernel"]: own("_flash_attention_forward", None, None, T, T, 0.0, True, False),
    FUSED["efficient_kernel"]: own("_efficient_attention_forward", None, None, None, T, T, 0.0, 1, True),
}
SOME = torch.tensor([[1, 0, 0, 1, 0], [0] * 5, [1] * 5, [0, 1, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 1, 0, 0]]).bool()


def of_tokens(attention: Callable[..., Tensor], take: Take, turned: bool = False) -> list[Tensor | None]:
    """Gradients of two layers of attention, with a loss for each token."""
    w = [leaf(i, (WIDTH, 3 * HEADS * WIDTH), torch.float64) for i in (1, 2)]
    x, back = leaf(0, (N, T, WIDTH), torch.float64), leaf(3, (HEADS * WIDTH, WIDTH), torch.float64)
    h: Tensor = x
    for layer in w:
        heads = (h @ layer).tanh().unflatten(2, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        h = (attention(*heads).transpose(1, 2).flatten(2) @ back).tanh()
    losses = h.square().mean(-1)
    (take(losses.T, SOME.T) if turned else take(losses, SOME)).sum().backward()
    return [leaf.grad for leaf in (*w, x, back)]


# Red when: layers hand cuDNN gradients of other strides; it has one plan for all of them. The last attention gets the
# gradient of one token in each row, and the others get whole rows.
def test_attention_below_a_class_token_keeps_to_one_plan(monkeypatch: pytest.MonkeyPatch):
    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)[0]

    cudnn_attention = aten._scaled_dot_product_cudnn_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    torch.manual_seed(0)
    model, batch, losses_of = gpu_models.vit(N, 32, 128, 3)  # two heads
    model, batch = model.double(), (batch[0].double(), batch[1])
    report = assert_same_gradients(lambda: losses_of(model, batch), list(model.parameters()), TWO)
    assert not report.densified


@pytest.mark.parametrize("op", TOKENS)
@pytest.mark.parametrize("policy", ["exact", "cut"])
@pytest.mark.parametrize("time_in_front", [False, True])
# Red when: the tokens' dimension is taken for that of the heads; keys' gradients go on whole under cut, or sliced under
# exact; time in front is not told from the batch.
def test_tokens_go_on_sliced_behind_a_kernel_that_takes_all(op: str, policy: Any, time_in_front: bool):
    attention, detached = TOKENS[op], cut_attention(SOME, TOKENS[op])
    truth, other = (detached, attention) if policy == "cut" else (attention, detached)
    found: list[Any] = []

    def step(take: Take) -> list[Tensor | None]:
        exact = take is indexed
        found.append(of_tokens(truth if exact else attention, take, time_in_front and not exact))
        return found[-1]

    report = as_indexed(step, attention=policy)
    assert not torch.allclose(found[1][0], of_tokens(other, indexed)[0], rtol=1e-3, atol=1e-5)
    assert report.densified[op].reason == "the kernel takes all tokens"
    assert report.cut == ({op: 2} if policy == "cut" else {})
    assert policy == "exact" or list(report.densified) == [op]
