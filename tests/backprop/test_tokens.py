"""Tokens as rows: positions of several dimensions, against plain indexing and, where attention is cut, dense code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rowprop
from picks import Applied, Calls, Take, as_indexed, assert_same_gradients, gradients
from rowprop import host
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.layout import Layout, Part
from rowprop.backprop.rows.rows import Affine, RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.apply import end_to_end
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops
from rule_cases import CASES, param, randn
from token_models import (
    BETWEEN,
    HEADS,
    IDS,
    LABELS,
    LOSSES,
    MASKS,
    QUARTER,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    Decoder,
    Keep,
    N,
    T,
    assert_as_dense,
    attend,
    cut_attention,
    decoding,
    gradients_of,
    largest_difference,
    run,
)

FUSED = "_scaled_dot_product_flash_attention_for_cpu_backward"
WAYS = pytest.mark.parametrize("way", ["exact", "cut"])
ON_A_DEVICE = pytest.mark.parametrize("on_a_device", [False, True])  # there, a rule may not look at the indices


def token_losses(name: str) -> tuple[Tensor, list[Tensor]]:
    """Losses (N * T,) of a rule's case and the leaves that they depend on."""
    shape, f, params = CASES[name]
    torch.manual_seed(3)
    scale, x = param(*shape), randn(*shape)
    torch.manual_seed(4)  # for ops that draw
    y = f(torch.tanh(x * scale) * 1.5)
    if y.ndim < 2 or y.shape[0] * y.shape[1] < 4:
        pytest.skip("its output has no second dimension")
    weights = torch.linspace(0.5, 2, y[0, 0].numel(), dtype=y.dtype).reshape(y.shape[2:])
    losses = y * weights
    return (losses.flatten(2).sum(-1) if y.ndim > 2 else losses).flatten(), [scale, *params]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("repeats", [False, True])
# Red when: a rule that knows one dimension of rows alone is handed two, a part's index is not the remainder of the
# flat one, or an operand that broadcasts along one part is taken whole; `batchnorm="exact"` is lost as rows of tokens
# become rows of sequences.
def test_every_rule_gives_the_dense_gradient_of_tokens(name: str, repeats: bool):
    def step(take: Take) -> list[Tensor | None]:
        losses, leaves = token_losses(name)
        index = torch.tensor([1, losses.numel() // 2, losses.numel() - 1] + [1] * repeats)
        return gradients(lambda: take(losses, index).square().sum(), leaves)

    as_indexed(step, rtol=1e-9, atol=1e-11, batchnorm="exact")


CHOSEN = torch.tensor([3, 0, 0, 1])
OF_EACH = torch.randint(0, 4, (40, 3), generator=torch.Generator().manual_seed(2))
MOVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (40, 4, 6) and the parameter p (1, 3, 6) to (N, T, 6)
    "rolled": lambda x, p: x.roll(1, 1),
    "rolled over both": lambda x, p: x.roll((-1, 7), (1, 0)),
    "rolled beside the width": lambda x, p: x.roll((1, 2), (1, 2)),
    "reversed": lambda x, p: x.flip(1),
    "a class token in front": lambda x, p: torch.cat([p[:, :1].expand(40, 1, 6), x], 1),
    "registers behind": lambda x, p: torch.cat([x, p.expand(40, 3, 6)], 1),
    "a prefix, then a class token": lambda x, p: torch.cat([p[:, :1].expand(40, 1, 6), p.expand(40, 3, 6), x], 1),
    "the class token taken": lambda x, p: x[:, 0],
    "the last token": lambda x, p: x[:, -1],
    "the last two, from behind": lambda x, p: torch.ops.aten.slice(x, 1, -2),
    "the last token of each": lambda x, p: x[torch.arange(40), OF_EACH[:, 0]],
    "the last token of each, from behind": lambda x, p: x[torch.arange(40), OF_EACH[:, 0] - 4],
    "one token left": lambda x, p: x[:, 2:3],
    "without the class token": lambda x, p: x[:, 1:],
    "every other": lambda x, p: x[:, ::2],
    "narrowed": lambda x, p: x.narrow(1, 1, 2),
    "padded": lambda x, p: F.pad(x, (0, 0, 2, 1)),
    "cut and padded": lambda x, p: F.pad(x, (1, -1, -1, 2)),
    "one piece": lambda x, p: x.split([1, 3], 1)[1],
    "a chunk": lambda x, p: x.chunk(2, 1)[0],
    "one of all": lambda x, p: x.unbind(1)[2],
    "repeated": lambda x, p: x.repeat(1, 3, 1),
    "repeated in place": lambda x, p: x.repeat_interleave(2, 1),
    "chosen": lambda x, p: x[:, CHOSEN],
    "chosen from behind": lambda x, p: x[:, CHOSEN - 4],
    "selected": lambda x, p: x.index_select(1, CHOSEN),
    "gathered": lambda x, p: x.gather(1, OF_EACH[..., None].expand(40, 3, 6)),
    "chosen of each": lambda x, p: x[torch.arange(40)[:, None], OF_EACH],
    "two batches": lambda x, p: torch.cat([x, x.detach().exp()]),
    "a half of the batch": lambda x, p: x.chunk(2)[1],
    "rows chosen": lambda x, p: x[torch.arange(39, -1, -1)],
    "rotary embeddings as complex numbers": lambda x, p: rotated(x),
    "gated halves": lambda x, p: F.glu(torch.cat([x, x.exp()], 2), 2),
    "gated halves, heads in front": lambda x, p: F.glu(x.unflatten(2, (2, 3)).transpose(1, 2).repeat(1, 1, 1, 2), 3)
    .transpose(1, 2).flatten(2),
}  # fmt: skip


def rotated(x: Tensor) -> Tensor:
    """Rotary embeddings as complex numbers, of (N, T, 6)."""
    turns = torch.polar(torch.ones(4, 3, dtype=x.dtype), torch.arange(12, dtype=x.dtype).view(4, 3))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(2, (3, 2))) * turns).flatten(2)


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # pieces that each have rows of their own
    "pieces": lambda x, p: torch.cat([piece.exp() for piece in x.split([1, 3], 1)], 1),
    "pieces in another order": lambda x, p: torch.cat([x[:, 2:], x[:, :2]], 1),
    "a piece of whole rows": lambda x, p: torch.cat([x[:, :1] * x.sum((1, 2), keepdim=True), x[:, 1:]], 1),
    "one by one": lambda x, p: torch.stack([part.exp() for part in x.unbind(1)][::-1], 1),
    "halves of the batch": lambda x, p: torch.cat([piece * p[:, :1] for piece in x.chunk(2)]),
    "a piece of a few": lambda x, p: torch.cat([part.exp() for part in x.split([1, 1, 2], 1)], 1),
    "a step's own gradient": lambda x, p: x + torch.cat([x[:, 1:], x[:, :1]], 1).tanh(),
    "two tokens": lambda x, p: x[:, 0].exp() + x[:, 1],
    "one token and a mean": lambda x, p: x[:, 0].exp() + x[:, 1:].mean(1),
    "one token and whole rows": lambda x, p: x[:, 0].exp() + x.cumsum(1)[:, 2] + x.unflatten(1, (2, 2)).sum((1, 2)),
    "all, one after the other": lambda x, p: sum((x[:, i] * i for i in range(4)), x[:, 0]),
    "a token of rows in another order": lambda x, p: x.cumsum(1)[torch.arange(39, -1, -1)][:, 2],
    "coordinates": lambda x, p: torch.stack([x[..., 0] - x[..., 1], x[..., 2]], -1) @ p[0, :2],
    "gated halves of the tokens": lambda x, p: F.glu(x, 1),
}  # fmt: skip


def moved(move: Callable[[Tensor, Tensor], Tensor], index: Tensor, on_a_device: bool = False) -> tuple[Report, int]:
    """Layers below and above a move have the gradients of indexing; the report of the backward, and its FLOPs."""
    made = torch.Generator().manual_seed(5)
    x = torch.randn(40, 4, 6, dtype=torch.float64, generator=made)
    below, above, p = (torch.randn(*s, dtype=torch.float64, generator=made) for s in ((6, 6), (6, 6), (1, 3, 6)))
    leaves, flops = [leaf.requires_grad_() for leaf in (below, above, p)], list[int]()

    def step(take: Take) -> list[Tensor | None]:
        losses = (move(x @ below, p).tanh() @ above).square().sum(-1).flatten()
        return gradients(lambda: take(losses, index).square().sum(), leaves, flops)

    with pytest.MonkeyPatch.context() as patch:
        if on_a_device:
            patch.setattr(host, "READ_AT_ONCE", set())
        return as_indexed(step), flops[1]


def indices(*every: list[int]) -> Any:
    return pytest.mark.parametrize("index", list(map(torch.tensor, every)), ids=[f"{i[:4]} of {len(i)}" for i in every])


@ON_A_DEVICE
@indices([5], [1, 77, 150], [77, 77, 3, 2])
@pytest.mark.parametrize("name", BETWEEN)
# Red when: a mean is taken for one of the same rows; a part of one entry keeps the place of the kept rows; the rows of
# two operands are made larger each in its own way; two parts of one dimension count as one part although something lies
# between them.
def test_what_models_do_between_tokens(name: str, index: Tensor, on_a_device: bool):
    moved(lambda x, p: BETWEEN[name](x), index, on_a_device)


@ON_A_DEVICE
@indices([5], [1, 17, 11], [17, 17, 3, 2])
@pytest.mark.parametrize("name", MOVES)
# Red when: the offset of a slice, a pad, a roll or a piece is that of its neighbour; a rule hands these rows on whole.
def test_positions_move_and_stay_sliced(name: str, index: Tensor, on_a_device: bool):
    report, flops = moved(MOVES[name], index, on_a_device)
    assert not report.densified and not report.waited, str(report)
    assert flops <= 3 * 2 * 6 * 6 * len(index)  # of three products, each at the kept tokens


@ON_A_DEVICE
@indices([5], [1, 17, 11], [17, 17, 3, 2], list(range(39)))
@pytest.mark.parametrize("name", JOINS)
# Red when: a piece gets the numbers of the piece before; of the rows of two pieces that are put together, one set is
# counted twice; a piece without a gradient is taken for a dense one.
def test_pieces_with_rows_of_their_own(name: str, index: Tensor, on_a_device: bool):
    report, _ = moved(JOINS[name], index, on_a_device)
    assert not report.densified, str(report)


def test_more_tokens_than_a_piece_has_leave_it_dense():
    # Red when: the class token's part keeps the rows of all tokens, or the other tokens densify with it.
    kept = torch.arange(40 * 5) % 3 > 0
    report, flops = moved(MOVES["a class token in front"], kept)
    # A device does not count the tokens that are left in front of the piece: they go on as zeros.
    patches = int(kept.sum() if host.waits(torch.device("cpu")) else kept.view(40, 5)[:, 1:].sum())
    assert not report.densified and flops == 2 * 6 * 6 * (2 * int(kept.sum()) + patches)


@pytest.mark.usefixtures("as_accelerator")
def test_positions_that_fell_out_stay_out():
    # Red when: a position that an earlier slice cut off counts as one of those that a later slice keeps.
    rows = RowSet(torch.tensor([0, 3, 5]), 6, unique=True, batchnorm="rows")
    first, _ = rows.renumbered((2, 3), 1, 2, Affine(offset=-1))
    second, gone = first.renumbered((2, 2), 1, 1, Affine())
    assert first.absent.tolist() == [True, True, False]
    assert second.absent.tolist() == gone.tolist() == [True, True, True]
    # Red when: a union forgets it, so that its zeros may stand for the gradient of a position that was kept.
    others = rows.derived(torch.tensor([1, 2]), 12, unique=True)
    sets = rows.derived(rows.index, 12, unique=False, absent=first.absent), others
    union = end_to_end([RowSlice(torch.ones(s.kept, 1), s, Layout(0, 12), (12, 1)) for s in sets])
    assert type(union) is RowSlice and union.rows.absent.tolist() == [True, True, False, False, False]


aten = torch.ops.aten


def seen(tensor: Tensor, shape: list[int]) -> Tensor:
    return aten.view(tensor, shape) if isinstance(tensor, RowGrad) else tensor.reshape(shape)


OPS: dict[str, Keep] = {  # of a gradient (N, H, T, C) of tokens, as formulas call them
    "mean over time": lambda g: aten.mean.dim(g, [2]),
    "mean over time, kept": lambda g: aten.mean.dim(g, [2], True),
    "sum over the batch": lambda g: aten.sum.dim_IntList(g, [0, 1]),
    "sum over heads and time": lambda g: aten.sum.dim_IntList(g, [1, 2]),
    "one row, heads merged": lambda g: seen(aten.slice(g, 0, 3, 4), [8, 5]),
    "one token, sum over the batch": lambda g: aten.sum.dim_IntList(aten.slice(g, 2, 1, 2), [0]),
    "one token, heads merged": lambda g: seen(aten.slice(g, 2, 1, 2), [80, 5]),
    "part of a pad": lambda g: aten.constant_pad_nd(g, [0, 0, -1, 2, 0, 0, 1, -2]),
    "every third": lambda g: aten.slice(g, 0, 2, 38, 3),
    "a product with itself": lambda g: aten.mul(g, g),
    "a matrix product with itself": lambda g: aten.bmm(seen(g, [80, 4, 5]), aten.transpose(seen(g, [80, 4, 5]), 1, 2)),
    "a matrix product with itself turned": lambda g: aten.mm(
        seen(aten.permute(g, [3, 1, 0, 2]), [5, 320]), seen(g, [320, 5])
    ),
    "two layouts": lambda g: aten.mm(
        seen(aten.permute(g, [1, 0, 2, 3]), [2, 800]), seen(aten.permute(g, [2, 0, 1, 3]), [800, 2])
    ),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("index", [[5], [12, 77, 150], [13, 13, 14, 2]], ids=str)
# Red when: a mean is taken for one of the same rows; a part of one entry keeps the place of the kept rows; the rows of
# two operands are made larger each in its own way.
def test_ops_of_a_gradient_of_tokens(name: str, index: list[int]):
    layout = Layout(0, 160, minor=(Part(2, 4),))
    values = torch.randn(len(index), 2, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dense = (
        torch.zeros(40, 4, 2, 5, dtype=torch.float64).flatten(0, 1).index_add(0, torch.tensor(index), values.squeeze(2))
    )
    dense = dense.unflatten(0, (40, 4)).transpose(1, 2).contiguous()
    with torch._C.DisableTorchFunctionSubclass():  # as autograd's own code calls it
        rows = RowSet(torch.tensor(index), 160, unique=False, batchnorm="rows")
        actual = OPS[name](RowGrad(RowSlice(values, rows, layout, dense.shape)))
        actual = actual.plain() if isinstance(actual, RowGrad) else actual
    torch.testing.assert_close(actual, OPS[name](dense), rtol=1e-12, atol=1e-12)


def test_one_token_of_each_row_stands_for_its_row():
    # Red when: a part of one entry stays a part: ops that take whole rows would look for them again.
    rows = RowSet(torch.tensor([13, 14]), 160, unique=True, batchnorm="rows")
    g = RowSlice(torch.ones(2, 2, 1, 5), rows, Layout(0, 160, minor=(Part(2, 4),)), (40, 2, 4, 5))
    token = g.renumbered(2, 1, Affine(offset=-1))  # the slice [:, :, 1:2]
    assert token.layout == Layout(0, 40) and token.shape == (40, 2, 1, 5)
    assert token.dense().sum((1, 2, 3)).nonzero().squeeze(1).tolist() == [3]


def test_a_sum_over_a_part_of_the_rows_keeps_the_others():
    # Red when: as many entries as tokens are taken for all tokens, though these are both experts of half the tokens.
    rows = RowSet(torch.arange(4, 12), 16, unique=True, batchnorm="rows")
    g = RowSlice(torch.arange(1.0, 9).view(8, 1), rows, Layout(0, 16, minor=(Part(1, 2),)), (8, 2))
    with torch._C.DisableTorchFunctionSubclass():
        total = aten.sum.dim_IntList(RowGrad(g), [1])
    assert isinstance(total, RowGrad) and isinstance(total.sliced, RowSlice) and total.sliced.rows.kept == 4
    assert total.plain().tolist() == [0, 0, 3, 7, 11, 15, 0, 0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("losses", LOSSES)
# Red when: causality is left out for the gathered queries, a sequence without kept tokens is run, the shift is off by
# one, or the last queries of a padded group count.
def test_a_decoders_gradient_is_that_of_plain_indexing(packed: bool, mask: str, losses: str):
    kept = MASKS[mask][:, 1:] if losses == "shifted" else MASKS[mask]
    assert_as_dense("exact", decoding(Decoder(packed), losses), kept)


@pytest.mark.parametrize("flops", [1, 10**9])
@pytest.mark.parametrize("mask", MASKS)
def test_the_runs_of_kept_queries_do_not_change_the_gradient(flops: int, mask: str, monkeypatch: pytest.MonkeyPatch):
    # Red when: the keys of a sequence's later run replace those of its earlier one, keys are cropped one too early, or
    # tokens are taken for neighbours that are not.
    monkeypatch.setattr("rowprop.backprop.rules.attention.A_CALL", flops)
    model, kept = Decoder(False), MASKS[mask]
    for way in ("exact", "cut"):
        assert_as_dense(way, decoding(model), kept)
    index = kept.flatten().nonzero().squeeze(1)
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    expected = run(model, lambda x: x[kept], attention=cut_attention(kept))
    actual = run(model, lambda x: rowprop.pick(x.flatten(), index, attention="cut"))
    assert largest_difference(actual, expected) < 1e-12


class Registers(nn.Module):
    """Blocks between which positions come and go: registers in front of the first, a token taken off the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(packed) for packed in (True, False, True))
        self.registers = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.double()

    def forward(self, x: Tensor, attention: Callable[[Tensor], Attention], kept: Tensor) -> Tensor:
        """Losses (N, T + 1): of a register and the tokens, but for the last; ``kept`` are those that count."""
        h = self.blocks[0](x, attention(F.pad(kept[:, 1:], (0, 1))))
        h = torch.cat([self.registers.expand(len(x), 2, WIDTH), h], 1)
        h = self.blocks[1](h, attention(F.pad(kept, (1, 1))))[:, 1:-1]
        return self.blocks[2](h, attention(kept)).square().sum(-1)


@ON_A_DEVICE
@pytest.mark.parametrize("mask", ["a quarter", "uneven", "registers"])
def test_cut_attention_follows_positions_that_move(mask: str, on_a_device: bool, monkeypatch: pytest.MonkeyPatch):
    # Red when: a row that fell out lets keys and values of the place that it was given take a gradient.
    model, x = Registers(), torch.randn(N, T, WIDTH, generator=torch.Generator().manual_seed(7)).double()
    kept = {"registers": torch.arange(T).expand(N, T) == 0}.get(mask, MASKS.get(mask, torch.empty(0)))

    def step(take: Keep, attention_of: Attention) -> list[Tensor]:
        model.zero_grad()
        take(model(x, attention_of, kept)).mean().backward()
        return [p.grad if p.grad is not None else torch.zeros(()) for p in model.parameters()]

    exact, cut = (step(lambda losses: losses[kept], of) for of in (lambda _: attend, cut_attention))
    assert largest_difference(exact, cut) > 1e-4
    if on_a_device:
        monkeypatch.setattr(host, "READ_AT_ONCE", set())
    report = assert_as_dense("cut", step, kept, lambda _: attend, cut_attention, tolerance=1e-11)
    assert not report.densified, str(report)


@pytest.mark.parametrize("mask_dims", [2, 4])
def test_cut_is_exact_where_whole_segments_of_packed_rows_are_kept(mask_dims: int):
    # Red when: the mask's lines are those of other queries, or of other sequences.
    segments = torch.arange(T) // 4 + torch.arange(N)[:, None] // 3 * (torch.arange(T) > 9)
    segments = segments if mask_dims == 4 else segments[:1].expand(N, T)
    within = (segments[:, :, None] == segments[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    within = within[:, None] if mask_dims == 4 else within[0]
    chosen = torch.tensor([[c == "1" for c in word] for word in "10101 01000 11111 00001 00000 10011".split()])
    model, kept = Decoder(packed=True), chosen.gather(1, segments)
    attention = partial(F.scaled_dot_product_attention, attn_mask=within)
    for way in ("cut", "exact"):
        report = assert_as_dense(way, decoding(model), kept, attention, attention)
        assert way == "exact" or not report.densified


def flops_of(model: Decoder, take: Keep, attention: Attention) -> int:
    loss = take(LOSSES["flat"](model(IDS, attention), LABELS)).mean()
    with count_flops() as counted:
        loss.backward()
    return counted.total_flops


@pytest.mark.parametrize("mask", ["a quarter", "uneven", "prompts"])
@pytest.mark.parametrize("written", ["fused", "products"])
def test_the_backward_costs_the_kept_tokens(mask: str, written: str):
    # Red when: an op of a layer runs at all tokens, the kept queries are padded to the longest sequence's, or sequences
    # that keep no token take part below the attention.
    model, kept, attention = Decoder(packed=False), MASKS[mask], attend if written == "fused" else products
    count, share = int(kept.sum()), float(kept.float().mean())
    full = flops_of(model, lambda x: x[kept], attention)
    cut = flops_of(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention)
    assert cut <= (share + 0.02) * full
    # Exact: a linear layer's backward takes 4 FLOPs for each weight and token; below the last attention all tokens of
    # the kept tokens' sequences take part, but for the queries' projection there. Attention is counted too high: it is
    # small here.
    projection, mlp, head = WIDTH * WIDTH, 8 * WIDTH * WIDTH, WIDTH * VOCABULARY
    at_kept = 4 * count * (head + mlp + 2 * projection)
    reached = int(kept.any(1).sum()) * T
    at_all = 4 * reached * (2 * projection + mlp + 4 * projection)
    between = 2 * HEADS * 2 * 5 * reached * T * (WIDTH // HEADS)
    exact = flops_of(model, lambda x: rowprop.pick(x, kept), attention)
    assert exact <= 1.03 * (at_kept + at_all + between)


CAUSAL = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
SLOPES = -torch.rand(HEADS, 1, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def products(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda scores: scores) -> Tensor:
    return (change(q @ k.mT / q.shape[-1] ** 0.5) + CAUSAL[: q.shape[2], : k.shape[2]]).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2))
    weights = (scores + CAUSAL[: scores.shape[2], : scores.shape[3]]).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = ((k @ q.mT).mT + CAUSAL[: q.shape[2], : k.shape[2]]).softmax(-1)
    return (v.mT @ weights.mT).mT


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(SLOPES.repeat(N, 1, 1), q, k.mT, beta=0.5, alpha=0.3)
    weights = (scores.unflatten(0, (N, HEADS)) + CAUSAL).softmax(-1, dtype=torch.float64)
    return torch.bmm(F.dropout(weights, 0.0).view(-1, T, T), v).unflatten(0, (N, HEADS))


def heads_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    return products(q[None], k[None], v[None])[0].unflatten(0, (HEADS, N)).transpose(0, 1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v))
    return products(q, k, v)


def groups_in_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (2, 2)).flatten(2, 3)  # two heads of queries, one after the other, share a head of keys
    weights = (q @ k[:, :2].mT + CAUSAL.repeat(2, 1)).softmax(-1)
    return (weights @ v[:, :2]).unflatten(2, (2, T)).flatten(1, 2)


def sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT + CAUSAL, torch.ones(N, HEADS, T, 1, dtype=q.dtype)], -1)
    return (scores - scores.max(-1, keepdim=True).values.detach()).softmax(-1)[..., :-1] @ v


def window(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(T, T, dtype=torch.bool).tril(-5), -torch.inf)


BAND = torch.ones(T, T, dtype=torch.bool).tril() & torch.ones(T, T, dtype=torch.bool).triu(-4)
BIAS = torch.randn(N, HEADS, T, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
sdpa = F.scaled_dot_product_attention


def behind(prefix: Tensor, x: Tensor) -> Tensor:
    return torch.cat([prefix, x], 2)


WRITTEN: dict[str, Attention] = {  # as matrix products
    "products": products,
    "soft cap": lambda q, k, v: products(q, k, v, lambda scores: 2 * (scores / 2).tanh()),
    "sliding window": lambda q, k, v: products(q, k, v, window),
    "einsum": einsum,
    "turned": turned,
    "alibi": alibi,
    "heads in front": heads_in_front,
    "grouped heads": grouped,
    "groups in time": groups_in_time,
    "sinks": sinks,
}
KERNELS: dict[str, Attention] = {
    "fused": attend,
    "fused, sliding window": lambda q, k, v: sdpa(q, k, v, attn_mask=BAND),
    "fused, bias for all": lambda q, k, v: sdpa(q, k, v, attn_mask=BIAS[0, 0]),
    "fused, bias of a head": lambda q, k, v: sdpa(q, k, v, attn_mask=BIAS[:1]),
    "fused, bias of a sequence": lambda q, k, v: sdpa(q, k, v, attn_mask=BIAS[:, :1]),
    "fused, grouped heads": lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True, scale=0.3),
    "fused, grouped in a window": lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], attn_mask=BAND, enable_gqa=True),
}
OTHER_KEYS: dict[str, Attention] = {  # keys that are not the sequence's own tokens are never cut
    "more keys": lambda q, k, v: sdpa(q, behind(k, k[:, :, :3]), behind(v, v[:, :, :3]), is_causal=True),
    "a prefix": lambda q, k, v: sdpa(
        q, behind(k[:, :, :3], k), behind(v[:, :, 1:4], v), attn_mask=torch.ones(T, T + 3, dtype=torch.bool).tril(3)
    ),
    "fewer keys, causal": lambda q, k, v: sdpa(q, k[:, :, ::2], v[:, :, ::2], is_causal=True),
    "fewer keys": lambda q, k, v: sdpa(q, k[:, :, ::2], v[:, :, ::2]),
}


@pytest.mark.parametrize("written", [*WRITTEN, *KERNELS, *OTHER_KEYS])
@pytest.mark.parametrize("mask", MASKS)
# Red when: a product takes the matrix of another sequence, padded tokens of a group count, keys are looked for in the
# wrong dimension; a mask's lines are those of other queries, heads or sequences, hidden keys are cut off where they are
# not hidden; under cut the gradients of keys and values are handed on whole (then it equals the exact gradient, which
# differs), the report does not name the op, or keys that are not the sequence's own tokens are cut.
def test_attention_of_every_form(written: str, mask: str):
    model, kept, attention = Decoder(packed=False), MASKS[mask], (WRITTEN | KERNELS | OTHER_KEYS)[written]
    report = assert_as_dense("exact", decoding(model), kept, attention)
    assert not report.cut and (written not in WRITTEN or report.sliced["bmm"] >= 4)
    if written in OTHER_KEYS:
        assert not assert_as_dense("cut", decoding(model), kept, attention, dense=attention).cut
        return
    report, layers = assert_as_dense("cut", decoding(model), kept, attention), len(model.blocks)
    assert not report.densified and sum(report.cut.values()) == layers * (2 if written in WRITTEN else 1)
    assert written not in ("products", "fused") or set(report.cut) == {FUSED if written == "fused" else "bmm"}
    exact, cut = (run(model, lambda x: x[kept], attention=a) for a in (attention, cut_attention(kept, attention)))
    assert mask == "uneven" or largest_difference(exact, cut) > 1e-4  # the first tokens attend to each other alone


@pytest.mark.parametrize("attention", [attend, products], ids=["fused", "products"])
@WAYS
# Red when: each entry of a repeated token takes the whole gradient of its key; the kept tokens' place is taken for that
# of their sequences, which is the second part of the index where time is in front.
def test_tokens_that_repeat_and_losses_that_have_time_in_front(attention: Attention, way: Any):
    index = torch.tensor([3, 90, 3, 3, 17, 90])
    kept = torch.zeros(N * T, dtype=torch.bool).index_fill(0, index, True).view(N, T)
    model, dense = Decoder(packed=False), cut_attention(kept, attention) if way == "cut" else attention
    expected = run(model, lambda x: x.flatten()[index], attention=dense)
    actual = run(model, lambda x: rowprop.pick(x.flatten(), index, attention=way), attention=attention)
    assert largest_difference(actual, expected) < 1e-12
    model = Decoder(packed=True)
    expected = run(model, lambda x: x[kept], attention=dense)
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x.T, kept.T, attention=way), attention=attention)
    assert largest_difference(actual, expected) < 1e-12 and (way == "exact" or not report.densified)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@WAYS
# Red when: time in front is not followed through the projections and the heads; a product takes tokens that were
# flattened as (T, N) for positions of two dimensions: it densifies, and attention is not cut.
def test_torchs_own_module_of_attention(way: str, batch_first: bool, fused: bool):
    module, first = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).double(), nn.Linear(WIDTH, WIDTH)
    x, parameters = randn(N, T, WIDTH), [*first.double().parameters(), *module.parameters()]

    def of_torch(h: Tensor) -> Tensor:
        h = h if batch_first else h.transpose(0, 1)
        h = module(h, h, h, need_weights=not fused, attn_mask=CAUSAL, is_causal=True)[0]
        return h if batch_first else h.transpose(0, 1)

    def written(h: Tensor, attention: Attention) -> Tensor:
        projected = F.linear(h, module.in_proj_weight, module.in_proj_bias)
        heads = [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1)]
        return module.out_proj(attention(*heads).transpose(1, 2).flatten(2))

    def step(take: Keep, attention: Attention) -> list[Tensor]:
        h = first(x).tanh()
        losses = (of_torch(h) if attention is its_own else written(h, attention)).square().mean(-1)
        return list(torch.autograd.grad(take(losses).sum(), parameters))

    its_own: Attention = lambda *qkv: qkv  # noqa: E731
    dense = cut_attention(QUARTER, products) if way == "cut" else products
    report = assert_as_dense(way, step, QUARTER, its_own, dense)
    assert way == "exact" or (report.cut == ({FUSED: 1} if fused else {"bmm": 2}) and not report.densified)


def test_scores_are_cut_where_values_take_no_gradient():
    # Red when: scores are marked in the gradient of the values alone.
    model = Decoder(packed=False, layers=1)
    for frozen in (model.tokens, model.places, model.blocks[0].norms[0], model.blocks[0].qkv[2]):  # type: ignore
        frozen.requires_grad_(False)
    assert assert_as_dense("cut", decoding(model), QUARTER, products).cut == {"bmm": 1}
    exact, cut = (run(model, lambda x: x[QUARTER], attention=a) for a in (products, cut_attention(QUARTER, products)))
    assert largest_difference(exact, cut) > 1e-6


OTHERS: dict[str, Attention] = {  # products whose keys are not the sequence's own tokens
    "linear attention": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "more keys": lambda q, k, v: (q @ behind(k, k[:, :, :2]).mT).softmax(-1) @ behind(v, v[:, :, :2]),
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "no softmax": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
}


@pytest.mark.parametrize("written", [*OTHERS, "products", "einsum", "turned"])
# Red when: a result is cut, or keys are known, by size alone: sequences are as long as a head is wide here.
def test_keys_are_known_where_sizes_do_not_tell(written: str):
    model, short = Decoder(packed=False), WIDTH // HEADS

    def step(take: Keep, attention: Attention) -> list[Tensor]:
        losses = LOSSES["classes second"](model(IDS[:, :short], attention), LABELS[:, :short])
        return list(torch.autograd.grad(take(losses).mean(), list(model.parameters())))

    report = assert_as_dense("cut", step, QUARTER[:, :short], (OTHERS | WRITTEN)[written], OTHERS.get(written))
    assert bool(report.cut) == (written not in OTHERS)
    assert report.cut or "not cut: keys are known by a softmax" in report.densified["bmm"].reason


def test_a_mask_of_kept_queries_takes_no_more_memory_than_all_queries():
    # Red when: all sequences go into one call, whose mask has an entry for each kept query and each key.
    leaves = [torch.randn(12, 1, T, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    kept, sizes = torch.arange(12 * T).view(12, T) % T < T // 2, list[int]()

    def tell(op: str, _: object, options: dict[str, Any]) -> None:
        if op == FUSED and options.get("attn_mask") is not None:
            sizes.append(options["attn_mask"].numel())

    def step(take: Take) -> tuple[Tensor, ...]:
        losses = F.scaled_dot_product_attention(*leaves, attn_mask=BAND).square().sum((1, 3))
        return torch.autograd.grad(take(losses, kept).sum(), leaves)

    with Calls(tell):
        as_indexed(step)
    assert len(sizes) > 1 and max(sizes) <= leaves[0].numel()


SCALES = {"scaled": lambda g: g * 2, "scaled in place": lambda g: (g.mul_(0.5), None)[1]}
READS = {
    "norm": lambda g: (g.norm(), None)[1],
    "clamp": lambda g: g.clamp(min=-1e-3),
    "write": lambda g: (g.__setitem__(2, 1e-3), None)[1],
}


@pytest.mark.parametrize("where", ["queries", "keys", "values", "out", "stream"])
@pytest.mark.parametrize("name", [*READS, *SCALES])
# Red when: a hook on keys sees tokens whose gradient is cut; attention below a gradient that a hook read claims to be
# cut: nothing is left that tells the kept tokens from others.
def test_below_a_hook_that_reads_attention_is_exact_and_the_report_says_so(name: str, where: str):
    hook = {**READS, **SCALES}[name]
    # The queries' gradient is read when attention has been cut, and the others' before.
    cut = {0, 1} if name in SCALES else set[int]() if where in ("out", "stream") else {1}

    def step(take: Keep, attention: Attention) -> list[Tensor]:
        model = Decoder(packed=False)

        def through(block: nn.Module, h: Tensor, _: Any) -> Tensor:
            def hooked(*qkv: Tensor) -> Tensor:
                if where in ("queries", "keys", "values"):
                    qkv[["queries", "keys", "values"].index(where)].register_hook(hook)
                out = (attention if list(model.blocks).index(block) in cut else attend)(*qkv)
                if where == "out":
                    out.register_hook(hook)
                return out

            h = block(h, hooked)
            if where == "stream":
                h.register_hook(hook)
            return h

        model.through = through
        return run(model, take)

    report = assert_as_dense("cut", step)
    assert sum(report.cut.values()) == len(cut) and bool(report.densified) == (name in READS)


@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_autocast_with_a_scaler_and_clipping(way: str, dtype: torch.dtype, reentrant: bool | None):
    # Red when: kept tokens are gathered in another precision than the forward's, or the scale is applied twice.
    def step(take: Keep, attention: Attention) -> list[Tensor]:
        model = Decoder(packed=True).float()
        if reentrant is not None:
            model.through = lambda *given: checkpoint(*given, use_reentrant=reentrant)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                losses = LOSSES["flat"](model(IDS, attention=attention), LABELS)
            scaler.scale(take(losses).float().mean()).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [norm, *[p.detach() for p in model.parameters()]]

    report = assert_as_dense(way, step, tolerance=1e-3)
    assert way == "exact" or not report.densified


@pytest.mark.parametrize("ways", [("exact", "exact"), ("cut", "cut"), ("exact", "cut"), ("cut", "exact")], ids=str)
def test_two_masks_of_one_graph_meet_as_their_union(ways: tuple[Any, Any]):
    # Red when: the union of two cut picks is exact, or that of an exact and a cut one is cut.
    others, both_cut = MASKS["prompts"], ways == ("cut", "cut")

    def step(first: Keep, second: Keep, attention: Attention) -> list[Tensor]:
        model = Decoder(packed=True)
        logits = model(IDS, attention=attention)
        entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        (first(LOSSES["flat"](logits, LABELS)).mean() - 0.1 * second(entropies).mean()).backward()
        return gradients_of(model)

    dense = cut_attention(QUARTER | others) if both_cut else attend
    expected = step(lambda losses: losses[QUARTER], lambda entropies: entropies[others], dense)
    picks = [partial(rowprop.pick, rows=r, attention=way) for r, way in zip((QUARTER, others), ways, strict=True)]
    with rowprop.watch() as report:
        actual = step(*picks, attend)
    assert largest_difference(actual, expected) < 1e-12
    assert report.sliced and bool(report.cut) == both_cut


@WAYS
def test_autograd_grad_returns_plain_tensors_and_cuts_what_it_would(way: str):
    # Red when: a gradient that is returned is made dense for all who share it, as the terms of a residual sum do:
    # attention in the sum's other term is no longer cut.
    def step(take: Keep, attention: Attention) -> list[Tensor]:
        model, streams = Decoder(packed=True), list[Tensor]()
        model.through = lambda block, h, attention: (streams.append(h), block(h, attention))[1]
        losses = LOSSES["flat"](model(IDS, attention=attention), LABELS)
        wanted = [[losses], streams[:1], streams[1:], streams, [model.tokens.weight, streams[1]], model.parameters()]
        return [g for x in wanted for g in torch.autograd.grad(take(losses).mean(), list(x), retain_graph=True)]

    assert_as_dense(way, step, tolerance=1e-11)


@WAYS
def test_what_is_seen_beside_the_gradients(way: str):
    # Red when: a hook after accumulation, a multi-grad hook or retain_grad() sees anything but a plain gradient.
    def step(take: Keep, attention: Attention) -> list[Tensor]:
        model, seen, retained = Decoder(packed=True), dict[Any, Tensor](), list[Tensor]()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
        model.norm.register_forward_hook(lambda m, args, out: (out.retain_grad(), retained.append(out))[0])
        losses = LOSSES["flat"](model(IDS, attention=attention), LABELS)
        torch.autograd.graph.register_multi_grad_hook(
            [model.head.weight, model.tokens.weight], lambda grads: seen.update(enumerate(g + 0 for g in grads))
        )
        take(losses).mean().backward()
        assert type(retained[0].grad) is Tensor and all(type(g) is Tensor for g in seen.values())
        return [*[seen[name] for name in sorted(seen, key=str)], *[r.grad for r in retained if r.grad is not None]]

    assert_as_dense(way, step)


Made = Callable[[], tuple[Tensor, list[Tensor]]]


def made(shape: tuple[int, ...], view: Keep = lambda losses: losses, dtype: torch.dtype = torch.float64) -> Made:
    """Losses, seen by ``view``, and the leaves below them. With three dimensions, entries of tokens."""

    def make() -> tuple[Tensor, list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        x, w = (torch.randn(*s, 5, generator=generator).to(dtype).requires_grad_() for s in (shape[:2], (4,)))
        hidden = (x @ w.t()).tanh()
        return view(hidden if len(shape) == 3 else hidden.square().sum(-1)), [x, w]

    return make


def some(*shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.4
    mask.view(-1)[-1] = True
    return mask


def one(place: int, *shape: int) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.view(-1)[place] = True
    return mask


SOME = some(6, 7)
KINDS: dict[str, tuple[Made, Tensor]] = {
    "contiguous": (made((6, 7)), SOME),
    "mask of transposed memory": (made((6, 7)), SOME.t().contiguous().t()),
    "mask of every other entry": (made((6, 7)), some(6, 14)[:, ::2]),
    "mask expanded over the rows": (made((6, 7)), (torch.arange(7) > 3).expand(6, 7)),
    "mask expanded over the tokens": (made((6, 7)), (torch.arange(6) > 3)[:, None].expand(6, 7)),
    "mask of three dimensions": (made((6, 7, 4)), some(6, 7, 4)),
    "mask expanded to three dimensions": (made((6, 7, 4)), SOME[..., None].expand(6, 7, 4)),
    "mask of two dimensions of three": (made((6, 7, 4)), SOME),
    "mask of three dimensions of four": (made((6, 7, 4), lambda x: x.unflatten(0, (2, 3))), some(2, 3, 7)),
    "mask of four dimensions": (made((6, 7, 4), lambda x: x.unflatten(0, (2, 3))), some(2, 3, 7, 4)),
    "none": (made((6, 7)), torch.zeros(6, 7, dtype=torch.bool)),
    "all": (made((6, 7)), torch.ones(6, 7, dtype=torch.bool)),
    **{f"token {i} alone": (made((6, 7)), one(i, 6, 7)) for i in (0, 5, 41)},
    **{f"all but token {i}": (made((6, 7)), ~one(i, 6, 7)) for i in (0, 5, 41)},
    **{f"{n} x {t}": (made((n, t)), some(n, t)) for n, t in ((1, 9), (9, 1), (1, 1), (1, 2), (2, 1), (2, 3000))},
    **{str(dtype): (made((6, 7), dtype=dtype), SOME) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    "losses time first": (made((7, 6), lambda x: x.t()), SOME),
    "losses and mask time first": (made((7, 6)), SOME.t()),
    "losses of a slice": (made((6, 9), lambda x: x[:, 1:-1]), SOME),
    "losses of every other token": (made((6, 14), lambda x: x[:, ::2]), SOME),
    "losses expanded over the tokens": (made((6, 1), lambda x: x.expand(6, 7)), SOME),
    "losses expanded over the rows": (made((1, 7), lambda x: x.expand(6, 7)), SOME),
    "losses reversed": (made((6, 7), lambda x: x.flip(1)), SOME),
    "losses of windows": (made((6, 9), lambda x: x.unfold(1, 3, 1).sum(-1)), SOME),
    "losses masked before": (made((6, 7), lambda x: x.masked_fill(~SOME, 0)), SOME),
    "running sums": (made((6, 7), lambda x: x.cumsum(1)), SOME),
    "less their rows' means": (made((6, 7), lambda x: x - x.mean(1, keepdim=True)), SOME),
    "shares of all": (made((6, 7), lambda x: x / x.sum()), SOME),
    **{
        f"indices {rows[:4]} of {name}": (made((6, 7), view), torch.tensor(rows))
        for rows in ([0, 0, 3], [-1, 2], [-1, 41, 5], [41, 0, 40, 1], [*range(42)], [7] * 50)
        for name, view in (("rows", lambda x: x.flatten()), ("columns", lambda x: x.t().reshape(-1)))
    },
}


@pytest.mark.parametrize("name", KINDS)
# Red when: the mask is flattened by its memory, or a token's index is not the remainder of the flat one.
def test_masks_and_losses_of_every_kind_are_as_in_indexing(name: str):
    make, mask = KINDS[name]
    found: list[list[Tensor]] = []
    for take in (lambda losses: losses[mask], lambda losses: rowprop.pick(losses, mask)):
        losses, leaves = make()
        kept = take(losses)
        (kept * torch.linspace(0.5, 2, max(kept.numel(), 1)).to(kept)[: kept.numel()].view_as(kept)).sum().backward()
        found.append([kept.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]])
    assert torch.equal(found[0][0], found[1][0]) and all(type(found) is Tensor for found in found[1])
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5}.get(found[0][0].dtype, 1e-10)
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def test_a_selection_or_a_mask_of_flattened_scores_takes_tokens():
    # Red when: the selection is taken for one of rows; nobody asks whether a transform runs at a mask.
    for shape in ((4, 6), (3, 4, 5)):
        x = randn(*shape).requires_grad_()
        selection = rowprop.TopK(0.25)(x.detach().flatten())
        (expected,) = torch.autograd.grad((x * 2).flatten()[selection.rows].square().sum(), x)
        picked = rowprop.pick(x * 2, selection)
        assert torch.equal(picked, (x * 2).flatten()[selection.rows])
        assert torch.equal(torch.autograd.grad(picked.square().sum(), x)[0], expected)
        mask = x.detach() > 0
        found = torch.func.grad(lambda x, mask=mask: rowprop.pick(x * x, mask).sum())(x.detach())
        assert torch.equal(found, 2 * x.detach() * mask)
    assert torch.equal(rowprop.pick(x[0, :2], [[True] * 3 + [False] * 2] * 2), x[0, :2, :3].flatten())  # a nested list


def segmenter(last: nn.Module) -> nn.ModuleDict:
    """A convolution, BatchNorm, and a head of 1 x 1 convolutions: logits (N, 5, 8, 8) of images (N, 3, 8, 8)."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Conv2d(8, 8, 1, groups=2), nn.BatchNorm2d(8).eval(), nn.GELU(), nn.Dropout2d(), last
    return nn.ModuleDict({"body": body, "head": nn.Sequential(*head)}).double()


def segmented(model: nn.ModuleDict, kept: Tensor, head: bool) -> tuple[Report, list[int]]:
    """The report of a backward, and the FLOPs of the convolutions of the head, or of all: by indexing, by pick."""
    torch.manual_seed(3)
    x, labels = torch.randn(6, 3, 8, 8).double(), torch.randint(0, 5, (6, 8, 8))
    flops: list[int] = []

    def step(take: Take) -> list[Tensor | None]:
        torch.manual_seed(4)  # for dropout
        features = model["body"](x).detach().requires_grad_() if head else model["body"](x)
        losses = F.cross_entropy(model["head"](features), labels, reduction="none", ignore_index=2)
        return gradients(lambda: take(losses, kept).mean(), list(model.parameters()), flops)

    return as_indexed(step, batchnorm="exact"), flops


PIXELS = {
    "hard ones": torch.rand(6, 8, 8, generator=torch.Generator().manual_seed(4)) < 0.1,
    "of two images": (torch.arange(6) % 3 == 1)[:, None, None] & (torch.rand(6, 8, 8) < 0.3),
    "one": torch.arange(6 * 64).view(6, 8, 8) == 200,
}
LAST: dict[str, Callable[[], nn.Module]] = {
    "a convolution": lambda: nn.Conv2d(8, 5, 1),
    "a transposed one": lambda: nn.ConvTranspose2d(8, 5, 1),
    "channels last": lambda: nn.Conv2d(8, 5, 1).to(memory_format=torch.channels_last),
    "linear": lambda: Applied(lambda layer, x: layer(x.movedim(1, -1)).movedim(-1, 1), nn.Linear(8, 5)),
}


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("last", LAST)
# Red when: a kernel of several positions is taken for one of a single position (stride, padding or size is not asked
# for), or BatchNorm in training mode for one with running statistics.
def test_a_head_of_one_by_one_convolutions_runs_at_the_kept_pixels(last: str, pixels: str):
    model, kept = segmenter(LAST[last]()), PIXELS[pixels]
    report, _ = segmented(model, kept, head=False)
    reasons = {entry.reason for entry in report.densified.values()}
    assert pixels != "hard ones" or reasons == {"the op mixes positions, and some are kept of every row"}
    report, (full, flops) = segmented(model, kept, head=True)
    assert not report.densified and flops == full * int(kept.sum()) // kept.numel()


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(3, 4, 1, stride=2), nn.Conv2d(3, 4, 1, padding=1), nn.Conv2d(3, 4, (1, 3), padding=(0, 1)),
     nn.ConvTranspose2d(3, 4, 1, stride=2), nn.ConvTranspose2d(3, 4, 1, stride=2, output_padding=1)],
    ids=str,
)  # fmt: skip
def test_convolutions_between_pixels_take_whole_images(conv: nn.Module):
    # Red when: stride, padding or the kernel's size is not asked for.
    conv, x = conv.double(), torch.randn(6, 3, 8, 8).double()

    kept = torch.rand(conv(x).shape)[:, 0] < 0.1
    assert_same_gradients(lambda: conv(x).square().sum(1), list(conv.parameters()), kept)


def test_a_convolution_takes_whole_images_though_few_lines_of_them_are_kept():
    # Red when: the gradient is brought to whole lines of all images, of which fewer are kept, and then densifies.
    conv, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(6, 3, 16, 8).double().requires_grad_()
    kept = torch.zeros(6, 16, 8, dtype=torch.bool)
    kept[:4, 5, :3] = True
    report = assert_same_gradients(lambda: conv(x).square().sum(1), [x], kept)
    assert "convolution_backward" in report.sliced and "convolution_backward" not in report.densified


def test_attention_below_whole_sequences_is_not_cut_and_the_report_says_so():
    # Red when: tokens come back to whole sequences without a word.
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    conv, x, kept = nn.Conv1d(8, 8, 3, padding=1).double(), randn(N, T, 8), torch.zeros(N, T, dtype=torch.bool)
    kept[:2, ::3] = True
    leaves = [*attention.parameters(), *conv.parameters()]
    report = assert_same_gradients(lambda: conv(attention(x).mT).mT.square().sum(-1), leaves, kept, attention="cut")
    assert not report.cut and "not cut below" in report.densified["attention"].reason


def test_times_at_which_any_sequence_keeps_a_token_are_no_tokens_of_a_packed_row():
    # One batch whose heads are the sequences: the kept tokens' places in time become the rows. Red where keys are cut
    # at all other places.
    x, w = randn(3, 6, 4), randn(4, 4).requires_grad_()
    kept = torch.zeros(3, 6, dtype=torch.bool)
    kept[0, 1] = kept[1, 4] = kept[2, 1] = True

    def losses() -> Tensor:
        h = (x @ w).unsqueeze(0)
        return F.scaled_dot_product_attention(h, h, h)[0].square().sum(-1)

    report = assert_same_gradients(losses, [w], kept, attention="cut")
    assert not report.cut and "not cut below" in report.densified["attention"].reason


@pytest.mark.parametrize("written", ["causal", "segments", "products"])
def test_one_packed_sequence_keeps_its_tokens_sliced(written: str):
    # Red when: a batch of one sequence is densified at its attention, or a product of attention that sums over the kept
    # queries hands all keys their gradients: under cut these give the exact gradient.
    torch.manual_seed(5)
    project, x, segments = nn.Linear(WIDTH, 3 * WIDTH).double(), randn(1, T, WIDTH), torch.arange(T) // 5
    within = (segments[:, None] == segments) & torch.ones(T, T, dtype=torch.bool).tril()
    attention: Attention = {
        "causal": attend,
        "segments": partial(sdpa, attn_mask=within),
        "products": lambda q, k, v: (q @ k.mT / 3).masked_fill(~within, -torch.inf).softmax(-1) @ v,
    }[written]

    def step(take: Keep, attention: Attention) -> list[Tensor]:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in project(x).chunk(3, -1))
        losses = attention(q, k, v).transpose(1, 2).flatten(2).square().sum(-1)
        return list(torch.autograd.grad(take(losses).mean(), list(project.parameters())))

    whole = (segments % 2 == 1)[None]  # of some segments all tokens are kept
    for kept in (torch.rand(1, T) < 0.4, whole):
        report = assert_as_dense("exact", step, kept, attention)
        assert not any("attention" in op for op in report.densified)
        assert not assert_as_dense("cut", step, kept, attention).densified
        exact, cut = (step(lambda x, kept=kept: x[kept], a) for a in (attention, cut_attention(kept, attention)))
        assert (largest_difference(exact, cut) < 1e-12) == (written != "causal" and kept is whole)


@pytest.mark.parametrize("shape", [(1, 12), (1, 4, 3), (2, 12), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_with_classes_second_of_one_packed_row(shape: tuple[int, ...], smoothing: float):
    # Packed training has one row. Red with the refusal of a batch that is not the losses' first dimension put back.
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 7)).double()
    ids, labels, mask = torch.randint(20, shape), torch.randint(7, shape), torch.rand(shape) < 0.25
    labels.view(-1)[5], mask.view(-1)[:2], weight = -100, True, torch.rand(7, dtype=torch.float64)
    flops: list[int] = []

    def step(take: Take) -> list[Tensor | None]:
        logits = model(ids).movedim(-1, 1)
        losses = F.cross_entropy(logits, labels, reduction="none", weight=weight, label_smoothing=smoothing)
        return gradients(lambda: take(losses, mask).sum(), list(model.parameters()), flops)

    assert not as_indexed(step).densified and flops[1] <= (mask.double().mean() + 0.02) * flops[0]


MASK = torch.zeros(6, 4, dtype=torch.bool)
MASK[1, 2] = MASK[3, 0] = MASK[3, 1] = True
WRITES: dict[str, Callable[[Tensor], object]] = {  # into (6, 4, 5), through a view
    "a mask of one column": lambda h: h[..., 0].__setitem__(MASK.roll(1, 0), 0),
    "rows of some columns": lambda h: h[:, :, :3].__setitem__(torch.tensor([1, 3]), 0),
    "rows of a view of all": lambda h: h[:].__setitem__(torch.tensor([1, 3]), 0),
    "rows in another order of dimensions": lambda h: h.transpose(0, 1).__setitem__(MASK.T, 0),
    "filled": lambda h: h.transpose(0, 1).index_fill_(1, torch.tensor([3]), 0),
    "rows of a reshaped one": lambda h: h.view(6, 4, 5).__setitem__(torch.tensor([1, 3]), 0),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("index", [[6, 12, 13], [13, 5, 1, 9, 17, 21], [13, 13, 1, 9, 17, 21]], ids=str)
def test_indexed_writes_through_a_view_under_a_pick_of_tokens(name: str, index: list[int]):
    # The rule takes whole sequences. Red where their values are copied over those of the tokens: with as many tokens as
    # sequences, all at one place in time, the sizes agree and the gradient is another one.
    def step(take: Take) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x = randn(6, 4, 5).requires_grad_()
        h = x * 1
        WRITES[name](h)
        tokens = take(h.flatten(0, 1), torch.tensor(index))
        return torch.autograd.grad((tokens * torch.arange(1.0, len(index) + 1)[:, None]).sum(), x)

    as_indexed(step, rtol=0, atol=0)
