"""Tokens as rows: positions of several dimensions, against plain indexing and, where attention is cut, dense code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
from test_pick import HOOKS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rowprop
from rowprop import host
from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.rules.apply import end_to_end
from rowprop.backprop.sliced import Affine, RowSet, RowSlice
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops
from rowprop.engines import Sliced
from rowprop.errors import InvalidInput, UnsupportedOperation
from rule_cases import CASES, param, randn

N, T, VOCABULARY, WIDTH, HEADS = 6, 16, 50, 32, 4


# --- every rule's case, with a loss for each entry of the first two dimensions ----------------------------------------


def token_losses(name: str) -> tuple[Tensor, list[Tensor]]:
    """Losses (N * T,) of a case of test_rules.py and the leaves that they depend on."""
    shape, f, params = CASES[name]
    torch.manual_seed(3)
    scale, x = param(*shape), randn(*shape)
    torch.manual_seed(4)  # for ops that draw
    y = f(torch.tanh(x * scale) * 1.5)
    if y.ndim < 2 or y.shape[0] * y.shape[1] < 4:
        pytest.skip("its output has no second dimension")
    weights = torch.linspace(0.5, 2, y[0, 0].numel(), dtype=y.dtype).reshape(y.shape[2:])
    for p in params:
        p.grad = None
    return (y * weights).flatten(2).sum(-1).flatten() if y.ndim > 2 else (y * weights).flatten(), [scale, *params]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("repeats", [False, True])
# Red when: a rule that knows one dimension of rows alone is handed two, a part's index is not the remainder of the
# flat one, or an operand that broadcasts along one part is taken whole.
def test_every_rule_gives_the_dense_gradient_of_tokens(name: str, repeats: bool):
    def gradients(take: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
        losses, leaves = token_losses(name)
        index = torch.tensor([1, losses.numel() // 2, losses.numel() - 1] + [1] * repeats)
        take(losses, index).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(lambda losses, index: losses[index])
    actual = gradients(lambda losses, index: rowprop.pick(losses, index, batchnorm="exact"))
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert type(a) is Tensor
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {  # (N, T, C) to the same shape: N is large, so few rows are kept
    "pooled": lambda x: x * x.sum(1, keepdim=True),
    "pooled by a mean": lambda x: x * x.mean(1, keepdim=True),
    "pooled over the batch": lambda x: x * x.mean(0, keepdim=True),
    "pooled over both": lambda x: x * x.mean((0, 1)),
    "places": lambda x: x * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None],
    "of rows": lambda x: x * torch.linspace(1, 2, x.shape[0], dtype=x.dtype)[:, None, None],
    "heads": lambda x: (x.unflatten(2, (2, 3)).transpose(1, 2) * torch.arange(4.0)[:, None]).transpose(1, 2).flatten(2),
    "heads merged with the batch": lambda x: x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1).exp()
    .unflatten(0, (-1, 2)).transpose(1, 2).flatten(2),
    "time first": lambda x: x.transpose(0, 1).flatten(0, 1).tanh().unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    "one row": lambda x: x + x[:1].unflatten(2, (2, 3)).transpose(1, 2).exp().flatten(0, 1).unflatten(0, (1, 2))
    .transpose(1, 2).flatten(2),
    "one token": lambda x: x + x[:, 3:4].tanh(),
    "first token": lambda x: x + x[:, :1].tanh().transpose(0, 1).exp().transpose(0, 1),
    "every other token": lambda x: x + x[:, ::2].repeat_interleave(2, 1).tanh(),
    "reversed": lambda x: x.flip(1).tanh().flip(0, 1),
    "shifted and padded": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1].tanh() * F.pad(x, (0, 0, -1, 1)),
    "products of gradients": lambda x: torch.einsum("ntc,ntd->ntd", x, x) @ x.mT @ x,
    "a row's softmax": lambda x: x.softmax(1) * x.softmax(-1),
    "normed over tokens": lambda x: F.layer_norm(x, x.shape[1:]),
    "a convolution over time": lambda x: F.conv1d(x.mT, torch.ones(6, 2, 3, dtype=x.dtype), padding=1, groups=3).mT,
    "running sum": lambda x: x.cumsum(1),
    "rolled": lambda x: x.roll(1, 1) + x.roll((1, 2), (0, 2)),
    "chosen rows": lambda x: x + x[torch.arange(x.shape[0] - 1, -1, -1)].tanh(),
    "chosen tokens": lambda x: x + x[:, torch.tensor([3, 0, 0, 1])].tanh(),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("index", [[5], [1, 77, 150], [77, 77, 3, 2]], ids=str)
# Red when: a mean is taken for one of the same rows; a part of one entry keeps the place of the kept rows; the rows of
# two operands are made larger each in its own way.
def test_what_models_do_between_tokens(name: str, index: list[int]):
    torch.manual_seed(5)
    x, w = torch.randn(40, 4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)

    def gradient(take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        leaf = w.clone().requires_grad_()
        take((BETWEEN[name](x @ leaf).tanh() @ leaf).square().sum(-1).flatten(), torch.tensor(index)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(lambda losses, index: losses[index])
    torch.testing.assert_close(gradient(rowprop.pick), expected, rtol=1e-10, atol=1e-12)


# --- positions that move ----------------------------------------------------------------------------------------------

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
}  # fmt: skip


def moved_gradients(name: str, take: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], int]:
    """The gradients of a layer below the move, of one above, and of the parameter; the FLOPs of the backward."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 4, 6, dtype=torch.float64, generator=generator)
    below, above, p = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((6, 6), (6, 6), (1, 3, 6)))
    leaves = [leaf.requires_grad_() for leaf in (below, above, p)]
    losses = take(((MOVES[name](x @ below, p).tanh() @ above).square()).sum(-1).flatten()).square()
    with count_flops() as counted:
        losses.sum().backward()
    return [leaf.grad if leaf.grad is not None else torch.zeros(()) for leaf in leaves], counted.total_flops


@pytest.mark.parametrize("on_a_device", [False, True])
@pytest.mark.parametrize("index", [[5], [1, 17, 11], [17, 17, 3, 2]], ids=str)
@pytest.mark.parametrize("name", MOVES)
# Red when: the offset of a slice, a pad, a roll or a piece is that of its neighbour; a rule hands these rows on whole.
def test_positions_move_and_stay_sliced(
    name: str, index: list[int], on_a_device: bool, monkeypatch: pytest.MonkeyPatch
):
    rows = torch.tensor(index)
    expected, _ = moved_gradients(name, lambda losses: losses[rows])
    if on_a_device:  # a rule may not look at the indices
        monkeypatch.setattr(host, "READ_AT_ONCE", set())
    with rowprop.watch() as report:
        actual, flops = moved_gradients(name, lambda losses: rowprop.pick(losses, rows))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    assert not report.densified and not report.waited, str(report)
    assert flops <= 3 * 2 * 6 * 6 * len(index)  # of three products, each at the kept tokens


def test_products_of_sequences_that_heads_lie_between():
    # Red when: two parts of one dimension count as one part although heads lie between them.
    x, w = torch.randn(3, 2, 4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64).requires_grad_()
    kept = torch.arange(24).view(3, 2, 4) % 5 == 1

    def gradient(take: Callable[[Tensor], Tensor]) -> Tensor:
        h = (x @ w).tanh().unflatten(3, (2, 3)).permute(0, 3, 1, 2, 4).flatten(0, 2)  # rows, heads and groups are one
        out = (h @ h.mT @ h).unflatten(0, (3, 2, 2)).permute(0, 2, 3, 1, 4).flatten(3)
        return torch.autograd.grad(take(out.square().sum(-1)).sum(), w)[0]

    torch.testing.assert_close(gradient(lambda t: rowprop.pick(t, kept)), gradient(lambda t: t[kept]))


def test_positions_that_fell_out_stay_out(as_accelerator: None):
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


def test_more_tokens_than_a_piece_has_leave_it_dense():
    # Red when: the class token's part keeps the rows of all tokens, or the other tokens densify with it.
    kept = torch.arange(40 * 5) % 3 > 0

    def gradients(take: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], int]:
        return moved_gradients("a class token in front", take)

    expected, _ = gradients(lambda losses: losses[kept])
    with rowprop.watch() as report:
        actual, flops = gradients(lambda losses: rowprop.pick(losses, kept))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    # A device does not count the tokens that are left in front of the piece: they go on as zeros.
    patches = int(kept.sum() if host.waits(torch.device("cpu")) else kept.view(40, 5)[:, 1:].sum())
    assert not report.densified and flops == 2 * 6 * 6 * (2 * int(kept.sum()) + patches)


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
}  # fmt: skip


@pytest.mark.parametrize("on_a_device", [False, True])
@pytest.mark.parametrize("index", [[5], [1, 17, 11], [17, 17, 3, 2], list(range(39))], ids=["1", "3", "repeats", "39"])
@pytest.mark.parametrize("name", JOINS)
# Red when: a piece gets the numbers of the piece before; of the rows of two pieces that are put together, one set is
# counted twice; a piece without a gradient is taken for a dense one.
def test_pieces_with_rows_of_their_own(name: str, index: list[int], on_a_device: bool, monkeypatch: pytest.MonkeyPatch):
    rows = torch.tensor(index)
    monkeypatch.setitem(MOVES, name, JOINS[name])
    expected, _ = moved_gradients(name, lambda losses: losses[rows])
    if on_a_device:
        monkeypatch.setattr(host, "READ_AT_ONCE", set())
    with rowprop.watch() as report:
        actual, _ = moved_gradients(name, lambda losses: rowprop.pick(losses, rows))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    assert not report.densified, str(report)


def rotated(x: Tensor) -> Tensor:
    """Rotary embeddings as complex numbers, of (N, T, 6)."""
    turns = torch.polar(torch.ones(4, 3, dtype=x.dtype), torch.arange(12, dtype=x.dtype).view(4, 3))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(2, (3, 2))) * turns).flatten(2)


ALIKE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {  # (N, T, 6) to the same shape, each token by itself
    "rotary embeddings as complex numbers": ("view_as_real", rotated),
    "gated halves": ("glu_backward", lambda x: F.glu(torch.cat([x, x.exp()], 2), 2)),
    "gated halves, heads in front": (
        "glu_backward",
        lambda x: F.glu(x.unflatten(2, (2, 3)).transpose(1, 2).repeat(1, 1, 1, 2), 3).transpose(1, 2).flatten(2),
    ),
}


@pytest.mark.parametrize("index", [[5], [1, 77, 150], [77, 77, 3, 2]], ids=str)
@pytest.mark.parametrize("name", ALIKE)
# Red when: the rule takes whole rows: then all tokens of the kept ones' sequences go on.
def test_ops_that_treat_tokens_alike_run_at_the_kept_ones(name: str, index: list[int]):
    torch.manual_seed(5)
    op, f = ALIKE[name]
    x, w = torch.randn(40, 4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)

    def gradient(take: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, int]:
        leaf = w.clone().requires_grad_()
        losses = take(f((x @ leaf).tanh()).square().sum(-1).flatten(), torch.tensor(index)).sum()
        with count_flops() as counted:
            losses.backward()
        assert leaf.grad is not None
        return leaf.grad, counted.by_op["mm"]

    (expected, full), (actual, flops) = gradient(lambda losses, index: losses[index]), gradient(rowprop.pick)
    with rowprop.watch() as report:
        gradient(rowprop.pick)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert not report.densified and report.sliced[op] and flops * 160 == full * len(index), str(report)


def test_halves_of_the_tokens_are_whole_rows():
    # Red when: the dimension of the halves is not looked for among all of the rows' parts.
    torch.manual_seed(5)
    x, w = torch.randn(40, 4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    losses = F.glu((x @ w).tanh(), 1).square().sum(-1).flatten()
    index = torch.tensor([1, 50, 50])
    (expected,) = torch.autograd.grad(losses[index].sum(), w, retain_graph=True)
    with rowprop.watch() as report:
        (actual,) = torch.autograd.grad(rowprop.pick(losses, index).sum(), w)
    torch.testing.assert_close(actual, expected)
    assert report.sliced["glu_backward"]


aten = torch.ops.aten


def seen(tensor: Tensor, shape: list[int]) -> Tensor:
    return aten.view(tensor, shape) if isinstance(tensor, RowGrad) else tensor.reshape(shape)


OPS: dict[str, Callable[[Tensor], Tensor]] = {  # of a gradient (N, H, T, C) of tokens, as formulas call them
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
        seen(aten.permute(g, [1, 0, 2, 3]), [2, 800]),
        seen(aten.permute(g, [2, 0, 1, 3]), [800, 2]),
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


# --- a decoder --------------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Pre-norm attention and MLP; queries, keys and values by one projection or by three."""

    def __init__(self, packed: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH * (3 if packed else 1)) for _ in range(1 if packed else 3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        h = self.norms[0](x)
        parts = self.qkv[0](h).chunk(3, -1) if len(self.qkv) == 1 else [layer(h) for layer in self.qkv]
        heads = [p.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in parts]
        x = x + self.out(attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, packed: bool, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks = nn.ModuleList(Block(packed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, x: Tensor, attention: Callable[..., Tensor] = attend) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h, attention)
        return self.head(self.norm(h))


torch.manual_seed(1)
IDS, LABELS = torch.randint(0, VOCABULARY, (2, N, T))
QUARTER = torch.rand(N, T) < 0.25
MASKS = {
    "a quarter": QUARTER,
    "uneven": torch.arange(T) < torch.tensor([0, 1, 3, 16, 7, 2])[:, None],
    "prompts": torch.arange(T).expand(N, T) >= 11,
    "one": torch.zeros(N, T, dtype=torch.bool).index_fill_(1, torch.tensor([5]), torch.tensor(True)),
    "all but one": torch.ones(N, T, dtype=torch.bool).masked_fill_(torch.arange(N * T).view(N, T) == 37, False),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (N, T, V) and labels (N, T) to losses (N, T)
    "flat": lambda y, t: F.cross_entropy(y.view(-1, VOCABULARY), t.view(-1), reduction="none").view(t.shape),
    "classes second": lambda y, t: F.cross_entropy(y.transpose(1, 2), t, reduction="none"),
    "log-softmax": lambda y, t: -y.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1),
    "shifted": lambda y, t: F.cross_entropy(
        y[:, :-1].reshape(-1, VOCABULARY), t[:, 1:].reshape(-1), reduction="none"
    ).view(t.shape[0], -1),
    "shifted by a pad": lambda y, t: F.cross_entropy(
        y.flatten(0, 1), F.pad(t, (0, 1), value=-100)[:, 1:].flatten(), ignore_index=-100, reduction="none"
    ).view(t.shape),
}


def run(model: Decoder, take: Callable[[Tensor], Tensor], losses: str = "flat", **options: Any) -> list[Tensor]:
    model.zero_grad()
    take(LOSSES[losses](model(IDS, **options), LABELS)).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("losses", LOSSES)
# Red when: causality is left out for the gathered queries, a sequence without kept tokens is run, the shift is off by
# one, or the last queries of a padded group count.
def test_a_decoders_gradient_is_that_of_plain_indexing(packed: bool, mask: str, losses: str):
    model, kept = Decoder(packed), MASKS[mask]
    kept = kept[:, 1:] if losses == "shifted" else kept
    expected = run(model, lambda x: x[kept], losses)
    assert largest_difference(run(model, lambda x: rowprop.pick(x, kept), losses), expected) < 1e-12


class Masks(TorchDispatchMode):
    """The sizes of the masks that attention's backward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RowGrad in types:
            return NotImplemented  # its rule makes the calls
        mask = (kwargs or {}).get("attn_mask")
        if mask is not None and func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.sizes.append(mask.numel())
        return func(*args, **(kwargs or {}))


def test_a_mask_of_kept_queries_takes_no_more_memory_than_all_queries():
    # Red when: all sequences go into one call, whose mask has an entry for each kept query and each key.
    leaves = [torch.randn(12, 1, T, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    kept = torch.arange(12 * T).view(12, T) % T < T // 2

    def gradients(take: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        losses = F.scaled_dot_product_attention(*leaves, attn_mask=BAND).square().sum((1, 3))
        return torch.autograd.grad(take(losses).sum(), leaves)

    expected = gradients(lambda losses: losses[kept])
    with Masks() as masks:
        actual = gradients(lambda losses: rowprop.pick(losses, kept))
    torch.testing.assert_close(actual, expected)
    assert masks.sizes and max(masks.sizes) <= leaves[0].numel()


def cut_attention(kept: Tensor) -> Callable[..., Tensor]:
    """The meaning of ``attention="cut"`` in dense code: keys and values of other tokens take no gradient."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here = kept[:, None, :, None]
        return attend(q, torch.where(here, k, k.detach()), torch.where(here, v, v.detach()))

    return attention


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_cut_attention_is_the_dense_code_with_detached_keys_and_values(packed: bool, mask: str):
    # Red when: the gradients of keys and values are handed on whole (then it equals the exact gradient, which differs),
    # or the report does not name the op.
    model, kept = Decoder(packed), MASKS[mask]
    expected = run(model, lambda x: x[kept], attention=cut_attention(kept))
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x, kept, attention="cut"))
    assert largest_difference(actual, expected) < 1e-12 and not report.densified
    assert report.cut == {"_scaled_dot_product_flash_attention_for_cpu_backward": len(model.blocks)}
    with rowprop.watch() as report:
        exact = largest_difference(run(model, lambda x: rowprop.pick(x, kept)), expected)
    assert not report.cut
    assert exact < 1e-12 if mask == "uneven" else exact > 1e-4  # the first tokens attend to each other alone


@pytest.mark.parametrize("flops", [1, 10**9])
@pytest.mark.parametrize("mask", MASKS)
def test_the_runs_of_kept_queries_do_not_change_the_gradient(flops: int, mask: str, monkeypatch: pytest.MonkeyPatch):
    # Red when: the keys of a sequence's later run replace those of its earlier one, keys are cropped one too early, or
    # tokens are taken for neighbours that are not.
    monkeypatch.setattr("rowprop.backprop.rules.attention.A_CALL", flops)
    model, kept = Decoder(False), MASKS[mask]
    expected = run(model, lambda x: x[kept])
    assert largest_difference(run(model, lambda x: rowprop.pick(x, kept)), expected) < 1e-12
    expected = run(model, lambda x: x[kept], attention=cut_attention(kept))
    assert largest_difference(run(model, lambda x: rowprop.pick(x, kept, attention="cut")), expected) < 1e-12
    order = torch.randperm(int(kept.sum()), generator=torch.Generator().manual_seed(0))
    index = kept.flatten().nonzero().squeeze(1)[order]
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

    def forward(self, x: Tensor, attention: Callable[[Tensor], Callable[..., Tensor]], kept: Tensor) -> Tensor:
        """Losses (N, T + 1): of a register and the tokens, but for the last; ``kept`` are those that count."""
        h = self.blocks[0](x, attention(F.pad(kept[:, 1:], (0, 1))))
        h = torch.cat([self.registers.expand(len(x), 2, WIDTH), h], 1)
        h = self.blocks[1](h, attention(F.pad(kept, (1, 1))))[:, 1:-1]
        return self.blocks[2](h, attention(kept)).square().sum(-1)


@pytest.mark.parametrize("on_a_device", [False, True])
@pytest.mark.parametrize("mask", ["a quarter", "uneven", "registers"])
def test_cut_attention_follows_positions_that_move(mask: str, on_a_device: bool, monkeypatch: pytest.MonkeyPatch):
    # Red when: a row that fell out lets keys and values of the place that it was given take a gradient.
    model, x = Registers(), torch.randn(N, T, WIDTH, generator=torch.Generator().manual_seed(7)).double()
    kept = {"registers": torch.arange(T).expand(N, T) == 0}.get(mask, MASKS.get(mask, torch.empty(0)))

    def gradients(
        take: Callable[[Tensor], Tensor], attention: Callable[[Tensor], Callable[..., Tensor]]
    ) -> list[Tensor]:
        model.zero_grad()
        take(model(x, attention, kept)).mean().backward()
        return [p.grad if p.grad is not None else torch.zeros(()) for p in model.parameters()]

    expected = gradients(lambda losses: losses[kept], cut_attention)
    exact = gradients(lambda losses: losses[kept], lambda _: attend)
    if on_a_device:
        monkeypatch.setattr(host, "READ_AT_ONCE", set())
    with rowprop.watch() as report:
        actual = gradients(lambda losses: rowprop.pick(losses, kept, attention="cut"), lambda _: attend)
    assert largest_difference(actual, expected) < 1e-11 and not report.densified, str(report)
    assert largest_difference(exact, expected) > 1e-4


@pytest.mark.parametrize("mask_dims", [2, 4])
def test_cut_is_exact_where_whole_segments_of_packed_rows_are_kept(mask_dims: int):
    # Red when: the mask's lines are those of other queries, or of other sequences.
    segments = torch.arange(T) // 4 + torch.arange(N)[:, None] // 3 * (torch.arange(T) > 9)
    segments = segments if mask_dims == 4 else segments[:1].expand(N, T)
    within = (segments[:, :, None] == segments[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    within = within[:, None] if mask_dims == 4 else within[0]
    chosen = torch.tensor(
        [[1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1]]
    )
    kept = chosen.bool().gather(1, segments)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=within)

    model = Decoder(packed=True)
    expected = run(model, lambda x: x[kept], attention=attention)
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention=attention)
    assert largest_difference(actual, expected) < 1e-12 and not report.densified
    exact = run(model, lambda x: rowprop.pick(x, kept), attention=attention)
    assert largest_difference(exact, expected) < 1e-12


def flops_of(model: Decoder, take: Callable[[Tensor], Tensor], attention: Any) -> tuple[int, Report]:
    model.zero_grad()
    loss = take(LOSSES["flat"](model(IDS, attention), LABELS)).mean()
    with count_flops() as counted, rowprop.watch() as report:
        loss.backward()
    return sum(counted.by_op.values()), report


@pytest.mark.parametrize("mask", ["a quarter", "uneven", "prompts"])
@pytest.mark.parametrize("written", ["fused", "products"])
def test_the_backward_costs_the_kept_tokens(mask: str, written: str):
    # Red when: an op of a layer runs at all tokens, the kept queries are padded to the longest sequence's, or sequences
    # that keep no token take part below the attention.
    model, kept, attention = Decoder(packed=False), MASKS[mask], attend if written == "fused" else products
    count, share = int(kept.sum()), float(kept.float().mean())
    full, _ = flops_of(model, lambda x: x[kept], attention)
    cut, _ = flops_of(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention)
    assert cut <= (share + 0.02) * full
    # Exact: a linear layer's backward takes 4 FLOPs for each weight and token; below the last attention all tokens of
    # the kept tokens' sequences take part, but for the queries' projection there. Attention is counted too high: it is
    # small here.
    projection, mlp, head = WIDTH * WIDTH, 8 * WIDTH * WIDTH, WIDTH * VOCABULARY
    at_kept = 4 * count * (head + mlp + 2 * projection)
    reached = int(kept.any(1).sum()) * T
    at_all = 4 * reached * (2 * projection + mlp + 4 * projection)
    between = 2 * HEADS * 2 * 5 * reached * T * (WIDTH // HEADS)
    exact, _ = flops_of(model, lambda x: rowprop.pick(x, kept), attention)
    assert exact <= 1.03 * (at_kept + at_all + between)


# --- attention written as matrix products -----------------------------------------------------------------------------

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
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


WRITTEN: dict[str, Attention] = {
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


def detached(kept: Tensor, attention: Attention) -> Attention:
    """The meaning of ``attention="cut"`` in dense code, for any attention."""
    here = kept[:, None, :, None]
    return lambda q, k, v: attention(q, torch.where(here, k, k.detach()), torch.where(here, v, v.detach()))


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("mask", MASKS)
# Red when: a product takes the matrix of another sequence, padded tokens of a group count, keys are looked for in the
# wrong dimension, or the products' gradients are handed on whole.
def test_attention_as_matrix_products(written: str, mask: str):
    model, kept, attention = Decoder(packed=False), MASKS[mask], WRITTEN[written]
    expected = run(model, lambda x: x[kept], attention=attention)
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x, kept), attention=attention)
    assert largest_difference(actual, expected) < 1e-12 and report.sliced["bmm"] >= 4 and not report.cut
    dense = run(model, lambda x: x[kept], attention=detached(kept, attention))
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention=attention)
    assert largest_difference(actual, dense) < 1e-12 and not report.densified
    assert report.cut == {"bmm": 2 * len(model.blocks)}
    assert mask == "uneven" or largest_difference(actual, expected) > 1e-4


@pytest.mark.parametrize("attention", [attend, products], ids=["fused", "products"])
@pytest.mark.parametrize("policy", ["exact", "cut"])
# Red when: each entry of a repeated token takes the whole gradient of its key.
def test_tokens_that_repeat_count_as_often_in_attention(attention: Attention, policy: Any):
    index = torch.tensor([3, 90, 3, 3, 17, 90])
    kept = torch.zeros(N * T, dtype=torch.bool).index_fill(0, index, True).view(N, T)
    model, dense = Decoder(packed=False), detached(kept, attention) if policy == "cut" else attention
    expected = run(model, lambda x: x.flatten()[index], attention=dense)
    actual = run(model, lambda x: rowprop.pick(x.flatten(), index, attention=policy), attention=attention)
    assert largest_difference(actual, expected) < 1e-12


@pytest.mark.parametrize("attention", [attend, products], ids=["fused", "products"])
@pytest.mark.parametrize("policy", ["exact", "cut"])
# Red when: the kept tokens' place is taken for that of their sequences, which is the second part of the index here.
def test_tokens_whose_losses_have_time_in_front(attention: Attention, policy: Any):
    model, kept = Decoder(packed=True), MASKS["a quarter"]
    expected = run(model, lambda x: x[kept], attention=detached(kept, attention) if policy == "cut" else attention)
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x.T, kept.T, attention=policy), attention=attention)
    assert largest_difference(actual, expected) < 1e-12
    assert policy == "exact" or not report.densified


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("policy", ["exact", "cut"])
# Red when: time in front is not followed through the projections and the heads.
def test_torchs_own_module_of_attention(batch_first: bool, policy: Any):
    torch.manual_seed(0)
    module, kept = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).double(), MASKS["a quarter"]
    first = nn.Linear(WIDTH, WIDTH).double()
    x, parameters = randn(N, T, WIDTH), [*first.parameters(), *module.parameters()]

    def of_torch(h: Tensor) -> Tensor:
        h = h if batch_first else h.transpose(0, 1)
        h = module(h, h, h, need_weights=True, attn_mask=CAUSAL)[0]
        return h if batch_first else h.transpose(0, 1)

    def written(h: Tensor) -> Tensor:
        projected = F.linear(h, module.in_proj_weight, module.in_proj_bias)
        heads = [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1)]
        attention = detached(kept, products) if policy == "cut" else products
        return module.out_proj(attention(*heads).transpose(1, 2).flatten(2))

    expected = torch.autograd.grad(written(first(x).tanh()).square().mean(-1)[kept].sum(), parameters)
    losses = of_torch(first(x).tanh()).square().mean(-1)
    with rowprop.watch() as report:
        actual = torch.autograd.grad(rowprop.pick(losses, kept, attention=policy).sum(), parameters)
    assert largest_difference(list(actual), list(expected)) < 1e-12
    assert policy == "exact" or (report.cut == {"bmm": 2} and not report.densified)


def test_scores_are_cut_where_values_take_no_gradient():
    # Red when: scores are marked in the gradient of the values alone.
    model, kept = Decoder(packed=False, layers=1), MASKS["a quarter"]
    for frozen in (model.tokens, model.places, model.blocks[0].norms[0], model.blocks[0].qkv[2]):  # type: ignore
        frozen.requires_grad_(False)
    expected = run(model, lambda x: x[kept], attention=detached(kept, products))
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention=products)
    assert largest_difference(actual, expected) < 1e-12 and report.cut == {"bmm": 1}
    assert largest_difference(run(model, lambda x: x[kept], attention=products), expected) > 1e-6


def of_short(model: Decoder, take: Callable[[Tensor], Tensor], attention: Attention) -> list[Tensor]:
    """Gradients of sequences that are as long as a head is wide."""
    short = WIDTH // HEADS
    losses = LOSSES["classes second"](model(IDS[:, :short], attention), LABELS[:, :short])
    return list(torch.autograd.grad(take(losses).mean(), list(model.parameters())))


OTHERS: dict[str, Attention] = {  # products whose keys are not the sequence's own tokens
    "linear attention": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "more keys": lambda q, k, v: (q @ torch.cat([k, k[:, :, :2]], 2).mT).softmax(-1) @ torch.cat([v, v[:, :, :2]], 2),
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "no softmax": lambda q, k, v: (q @ k.mT).sigmoid() @ v,
}


@pytest.mark.parametrize("written", OTHERS)
# Red when: a result is cut for its size alone; the sizes of time and of a head's width are the same here.
def test_other_products_take_the_exact_gradient_under_cut(written: str):
    model, kept, attention = Decoder(packed=False), MASKS["a quarter"][:, :8], OTHERS[written]
    expected = of_short(model, lambda x: x[kept], attention)
    with rowprop.watch() as report:
        actual = of_short(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention)
    assert largest_difference(actual, expected) < 1e-12
    assert not report.cut and "not cut: keys are known by a softmax" in report.densified["bmm"].reason


@pytest.mark.parametrize("written", ["products", "einsum", "turned"])
# Red when: keys are known by their size alone: time and a head's width have the same here.
def test_keys_are_known_where_sizes_do_not_tell(written: str):
    model, kept = Decoder(packed=False), MASKS["a quarter"][:, :8]
    expected = of_short(model, lambda x: x[kept], detached(kept, WRITTEN[written]))
    actual = of_short(model, lambda x: rowprop.pick(x, kept, attention="cut"), WRITTEN[written])
    assert largest_difference(actual, expected) < 1e-12


# --- fused attention with masks, grouped heads and other keys ---------------------------------------------------------

BAND = torch.ones(T, T, dtype=torch.bool).tril() & torch.ones(T, T, dtype=torch.bool).triu(-4)
BIAS = torch.randn(N, HEADS, T, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
sdpa = F.scaled_dot_product_attention


def behind(prefix: Tensor, x: Tensor) -> Tensor:
    return torch.cat([prefix, x], 2)


FUSED: dict[str, Attention] = {
    "sliding window": lambda q, k, v: sdpa(q, k, v, attn_mask=BAND),
    "bias for all": lambda q, k, v: sdpa(q, k, v, attn_mask=BIAS[0, 0]),
    "bias of a head": lambda q, k, v: sdpa(q, k, v, attn_mask=BIAS[:1]),
    "bias of a sequence": lambda q, k, v: sdpa(q, k, v, attn_mask=BIAS[:, :1]),
    "grouped heads": lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True, scale=0.3),
    "grouped heads in a window": lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], attn_mask=BAND, enable_gqa=True),
}
WITH_OTHER_KEYS: dict[str, Attention] = {
    "more keys": lambda q, k, v: sdpa(q, behind(k, k[:, :, :3]), behind(v, v[:, :, :3]), is_causal=True),
    "a prefix": lambda q, k, v: sdpa(q, behind(k[:, :, :3], k), behind(v[:, :, 1:4], v),
                                     attn_mask=torch.ones(T, T + 3, dtype=torch.bool).tril(3)),
    "fewer keys, causal": lambda q, k, v: sdpa(q, k[:, :, ::2], v[:, :, ::2], is_causal=True),
    "fewer keys": lambda q, k, v: sdpa(q, k[:, :, ::2], v[:, :, ::2]),
}  # fmt: skip


@pytest.mark.parametrize("written", [*FUSED, *WITH_OTHER_KEYS])
@pytest.mark.parametrize("mask", ["a quarter", "uneven", "prompts"])
# Red when: a mask's lines are those of other queries, heads or sequences; hidden keys are cut off where they are not
# hidden; keys that are not the sequence's own tokens are cut.
def test_fused_attention_with_masks_and_other_keys(written: str, mask: str):
    model, kept = Decoder(packed=False), MASKS[mask]
    attention = (FUSED | WITH_OTHER_KEYS)[written]
    expected = run(model, lambda x: x[kept], attention=attention)
    actual = run(model, lambda x: rowprop.pick(x, kept), attention=attention)
    assert largest_difference(actual, expected) < 1e-12
    dense = detached(kept, attention) if written in FUSED else attention
    other = run(model, lambda x: x[kept], attention=dense)
    with rowprop.watch() as report:
        actual = run(model, lambda x: rowprop.pick(x, kept, attention="cut"), attention=attention)
    assert largest_difference(actual, other) < 1e-12
    if written in FUSED:
        assert sum(report.cut.values()) == len(model.blocks) and not report.densified
        assert mask == "uneven" or largest_difference(other, expected) > 1e-4
    else:
        assert not report.cut


# --- what holds for rows: the company that a training loop keeps ------------------------------------------------------

Take = Callable[[Tensor], Tensor]
Step = Callable[[Take, Callable[..., Tensor]], list[Tensor]]
"""Gradients, or other tensors, of a step with these losses and this attention."""


def assert_as_dense(way: str, step: Step, kept: Tensor = QUARTER, tolerance: float = 1e-11) -> Report:
    """``pick`` leaves what plain indexing leaves, under ``cut`` with keys and values detached in dense code."""
    expected = step(lambda losses: losses[kept], cut_attention(kept) if way == "cut" else attend)
    with rowprop.watch() as report:
        actual = step(lambda losses: rowprop.pick(losses, kept, attention=cast(Any, way)), attend)
    assert any(bool(e.any()) for e in expected) and report.sliced
    for a, e in zip(actual, expected, strict=True):
        assert type(e) is not Tensor or type(a) in (Tensor, RowGrad)
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
    return report


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class Layered(Decoder):
    """The decoder, with code of a trainer around each block."""

    through: Callable[..., Tensor] = staticmethod(lambda block, h, attention: block(h, attention))

    def forward(self, x: Tensor, attention: Callable[..., Tensor] = attend) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = self.through(block, h, attention)
        return self.head(self.norm(h))


def dressed(dress: Callable[[Layered], None], context: Callable[[], Any] = nullcontext) -> Step:
    """A step of a decoder that ``dress`` changed, its forward in a context."""

    def step(take: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        model = Layered(packed=True)
        torch.manual_seed(5)
        dress(model)
        with context():
            losses = LOSSES["flat"](model(IDS, attention=attention), LABELS)
        take(losses).mean().backward()
        return gradients_of(model)

    return step


def by_layer(**options: Any) -> Callable[[Layered], None]:
    """Activation checkpoints, a layer each."""

    def dress(model: Layered) -> None:
        model.through = lambda block, h, attention: checkpoint(block, h, attention, **options)

    return dress


def products_saved() -> Any:
    """A selective checkpoint keeps the results of matrix products and attention."""
    saved = {"addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu"}

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op).removeprefix("aten.").partition(".")[0]
        return CheckpointPolicy.MUST_SAVE if name in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Checkpointed(nn.Module):
    """One module, run again by a reentrant checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=True)


def parts_checkpointed(model: Layered) -> None:
    for block in model.blocks:
        block.mlp = Checkpointed(block.mlp)
    model.head = Checkpointed(model.head)


class Adapter(nn.Module):
    """A frozen layer beside two small ones (LoRA)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 3, bias=False, dtype=torch.float64)
        self.up = nn.Linear(3, inner.out_features, bias=False, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h) + 2 * self.up(self.down(h))


def adapted(model: Layered) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv[0], block.mlp[2] = Adapter(block.qkv[0]), Adapter(block.mlp[2])
        for adapter in (block.qkv[0], block.mlp[2]):
            adapter.requires_grad_(True).inner.requires_grad_(False)


def adapted_and_checkpointed(reentrant: bool) -> Callable[[Layered], None]:
    def dress(model: Layered) -> None:
        adapted(model)
        by_layer(use_reentrant=reentrant)(model)
        model.tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())  # as trainers do

    return dress


def only(*trained: str) -> Callable[[Layered], None]:
    """All parameters are frozen but those with one of these words in their name."""

    def dress(model: Layered) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in trained))

    return dress


def tied(model: Layered) -> None:
    model.head.weight = model.tokens.weight


def blocks_tied(model: Layered) -> None:
    model.blocks[1] = model.blocks[0]


def with_padding(model: Layered) -> None:
    model.tokens.padding_idx = 7


def weights_normed(model: Layered) -> None:
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.mlp[0])


def module_hooks(model: Layered) -> None:
    for block in model.blocks:
        block.mlp[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        block.mlp[0].register_forward_hook(lambda m, args, out: out * 2)
        block.mlp[1].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,))
        block.qkv[0].register_full_backward_hook(lambda m, grads, _: (grads[0] / 7,))


def in_place(model: Layered) -> None:
    """Activations, a residual stream, and some of its features are written to."""

    def through(block: nn.Module, h: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        out = block(h, attention)
        out += h
        out[..., :3] *= 2
        return out

    for block in model.blocks:
        block.mlp[1] = nn.ReLU(inplace=True)
        block.out.register_forward_hook(lambda m, args, out: out.mul_(2).add_(1))
    model.through = through


def keys_in_place(model: Layered) -> None:
    """Each head's keys are written into a new tensor, in two pieces."""

    def written(x: Tensor) -> Tensor:  # (N, heads, T, width)
        half = x.shape[-1] // 2
        out = x.new_empty(x.shape)
        out[..., :half].copy_(x[..., :half])
        out[..., half:].copy_(x[..., half:].tanh())
        return out

    model.through = lambda block, h, attention: block(h, lambda q, k, v: attention(q, written(k), v))


def channels_first(model: Layered) -> None:
    model.through = lambda block, h, attention: block(h.mT.contiguous().mT, attention).mT.tanh().mul(2).mT


def time_first(model: Layered) -> None:
    model.through = lambda block, h, attention: block(h.transpose(0, 1).contiguous().transpose(0, 1), attention)


def with_dropout(model: Layered) -> None:
    for block in model.blocks:
        block.mlp.append(nn.Dropout(0.3))


def offloaded() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.device, t.to("cpu", copy=True)), lambda p: p[1].to(p[0])
    )


COMPANY: dict[str, Step] = {
    "checkpoints": dressed(by_layer(use_reentrant=False)),
    "reentrant checkpoints": dressed(by_layer(use_reentrant=True)),
    "selective checkpoints": dressed(by_layer(use_reentrant=False, context_fn=products_saved)),
    "checkpoints of modules": dressed(parts_checkpointed),
    "offloaded": dressed(lambda model: None, offloaded),
    "offloaded checkpoints": dressed(by_layer(use_reentrant=False), torch.autograd.graph.save_on_cpu),
    "adapters": dressed(adapted),
    "adapters and checkpoints": dressed(adapted_and_checkpointed(reentrant=False)),
    "adapters and reentrant checkpoints": dressed(adapted_and_checkpointed(reentrant=True)),
    "frozen below": dressed(only("blocks.1", "head", "norm")),
    "biases alone": dressed(only("bias")),
    "the head alone": dressed(only("head")),
    "embeddings alone": dressed(only("tokens", "places")),
    "tied embeddings": dressed(tied),
    "tied blocks": dressed(blocks_tied),
    "padding": dressed(with_padding),
    "weight norm": dressed(weights_normed),
    "module hooks": dressed(module_hooks),
    "in place": dressed(in_place),
    "keys in place": dressed(keys_in_place),
    "channels first": dressed(channels_first),
    "time first": dressed(time_first),
    "dropout": dressed(with_dropout),
}


@pytest.mark.parametrize("way", ["exact", "cut"])
@pytest.mark.parametrize("name", COMPANY)
# Red when: the rule of reentrant checkpoints, or of the copies that undo an op in place, takes whole sequences: the
# attention below is then no longer cut. All are red when a token's index is not the remainder of the flat one.
def test_what_trainers_put_around_layers(name: str, way: str):
    report = assert_as_dense(way, COMPANY[name])
    assert way == "exact" or (not report.densified and bool(report.cut) == (name != "the head alone")), report


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [False, True])
def test_torchs_own_encoder_has_time_in_front(batch_first: bool, weights: bool, monkeypatch: pytest.MonkeyPatch):
    # Red when: a product takes tokens that were flattened as (T, N) for positions of two dimensions: it densifies, and
    # attention is not cut. With weights, attention is written as products.
    fused = F.scaled_dot_product_attention

    def instead(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        with monkeypatch.context() as plain:
            plain.setattr(F, "scaled_dot_product_attention", fused)
            return attention(q, k, v)

    def step(take: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=batch_first, norm_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
        for layer in model.layers:
            attend_itself = layer.self_attn.forward
            layer.self_attn.forward = lambda *args, f=attend_itself, **options: f(
                *args, **{**options, "need_weights": weights}
            )
        x = torch.randn(N, T, WIDTH, dtype=torch.float64)
        causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
        with monkeypatch.context() as layers:
            layers.setattr(F, "scaled_dot_product_attention", partial(instead, attention))
            out = model(x if batch_first else x.transpose(0, 1), mask=causal, is_causal=True)
        losses = out.square().sum(-1)
        take(losses if batch_first else losses.t()).mean().backward()
        return gradients_of(model)

    assert_as_dense("exact", step)
    if not weights:
        report = assert_as_dense("cut", step)
        assert not report.densified and sum(report.cut.values()) == 2


HOOKED_N, HOOKED_T = 8, 5
HOOKED = torch.rand(HOOKED_N, HOOKED_T, generator=torch.Generator().manual_seed(2)) < 0.3


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", ["hidden", "leaf", "module", "heads"])
# Red when: a hook is handed the gradient's values, of K tokens, or what it writes is lost.
def test_hooks_see_and_change_what_they_would_under_indexing(hook: str, place: str):
    if (hook, place) == ("rdiv", "heads"):
        pytest.skip("2 / 0 has the sign of the zero, and zeros of tokens that are not kept have none")
    torch.manual_seed(0)
    shapes = ((HOOKED_N, HOOKED_T, 5), (5, 4), (4, 3), (HOOKED_N, HOOKED_T, 4))
    x, *given = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)

    def step(take: Take, _: Callable[..., Tensor]) -> list[Tensor]:
        w, v, per_token = leaves = [tensor.clone().requires_grad_() for tensor in given]
        module = nn.Tanh()
        if place == "module":
            module.register_full_backward_hook(
                lambda m, inputs, outputs: tuple(g if (new := HOOKS[hook](g)) is None else new for g in inputs)
            )
        if place == "leaf":
            per_token.register_hook(HOOKS[hook])
        hidden = module(x @ w * 1.5 + per_token)
        if place == "hidden":
            hidden.register_hook(HOOKS[hook])
        if place == "heads":  # (N, 2, T, 4)
            heads = hidden.unflatten(2, (2, 2)).transpose(1, 2)
            heads = torch.cat([heads, heads * 2], -1)
            heads.register_hook(HOOKS[hook])
            hidden = (heads * torch.arange(1.0, 3)[:, None, None]).sum(1)
        take((hidden @ v).square().sum(-1)).mean().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    assert_as_dense("exact", step, HOOKED, 1e-10)


READS = {
    "norm": lambda g: (g.norm(), None)[1],
    "clamp": lambda g: g.clamp(min=-1e-3),
    "write": lambda g: (g.__setitem__(2, 1e-3), None)[1],
}
SCALES = {"scaled": lambda g: g * 2, "scaled in place": lambda g: (g.mul_(0.5), None)[1]}


@pytest.mark.parametrize("where", ["queries", "keys", "values", "out", "stream"])
@pytest.mark.parametrize("name", [*READS, *SCALES])
# Red when: a hook on keys sees tokens whose gradient is cut; attention below a gradient that a hook read claims to be
# cut: nothing is left that tells the kept tokens from others.
def test_below_a_hook_that_reads_attention_is_exact_and_the_report_says_so(name: str, where: str):
    hook = {**READS, **SCALES}[name]
    # The queries' gradient is read when attention has been cut, and the others' before.
    cut = {0, 1} if name in SCALES else set[int]() if where in ("out", "stream") else {1}

    def step(take: Take, _: Callable[..., Tensor], *, dense: bool = False) -> list[Tensor]:
        model = Layered(packed=False)

        def through(block: nn.Module, h: Tensor, _: Any) -> Tensor:
            layer = list(model.blocks).index(block)

            def hooked(*qkv: Tensor) -> Tensor:
                for t, of in zip(qkv, ("queries", "keys", "values"), strict=True):
                    if of == where:
                        t.register_hook(hook)
                out = (cut_attention(QUARTER) if dense and layer in cut else attend)(*qkv)
                if where == "out":
                    out.register_hook(hook)
                return out

            h = block(h, hooked)
            if where == "stream":
                h.register_hook(hook)
            return h

        model.through = through
        take(LOSSES["flat"](model(IDS), LABELS)).mean().backward()
        return gradients_of(model)

    expected = step(lambda losses: losses[QUARTER], attend, dense=True)
    with rowprop.watch() as report:
        actual = step(lambda losses: rowprop.pick(losses, QUARTER, attention="cut"), attend)
    assert largest_difference(actual, expected) < 1e-12
    assert sum(report.cut.values()) == len(cut) and bool(report.densified) == (name in READS)


@pytest.mark.parametrize("way", ["exact", "cut"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_autocast_with_a_scaler_and_clipping(way: str, dtype: torch.dtype, reentrant: bool | None):
    # Red when: kept tokens are gathered in another precision than the forward's, or the scale is applied twice.
    def step(take: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        model = Layered(packed=True).float()
        if reentrant is not None:
            by_layer(use_reentrant=reentrant)(model)
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

    assert_as_dense(way, step, tolerance=1e-3)


@pytest.mark.parametrize("way", ["exact", "cut"])
def test_the_graph_is_used_again_and_gradients_add_up(way: str):
    # Red when: what a backward remembers of its rows outlives it.
    def step(take: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        model = Layered(packed=True)
        loss = take(LOSSES["flat"](model(IDS, attention=attention), LABELS)).mean()
        loss.backward(retain_graph=True)
        once = [g.clone() for g in gradients_of(model)]
        loss.backward()
        torch.testing.assert_close(gradients_of(model), [2 * g for g in once])
        take(LOSSES["classes second"](model(LABELS, attention=attention), IDS)).mean().backward()
        return gradients_of(model)

    assert_as_dense(way, step)


ENTROPY: Callable[[Tensor], Tensor] = lambda y: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1)  # noqa: E731


@pytest.mark.parametrize("ways", [("exact", "exact"), ("cut", "cut"), ("exact", "cut"), ("cut", "exact")], ids=str)
def test_two_masks_of_one_graph_meet_as_their_union(ways: tuple[Any, Any]):
    # Red when: the union of two cut picks is exact, or that of an exact and a cut one is cut.
    others = MASKS["prompts"]

    def step(first: Take, second: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        model = Layered(packed=True)
        logits = model(IDS, attention=attention)
        (first(LOSSES["flat"](logits, LABELS)).mean() - 0.1 * second(ENTROPY(logits)).mean()).backward()
        return gradients_of(model)

    attention = cut_attention(QUARTER | others) if ways == ("cut", "cut") else attend
    expected = step(lambda losses: losses[QUARTER], lambda entropies: entropies[others], attention)
    with rowprop.watch() as report:
        actual = step(
            lambda losses: rowprop.pick(losses, QUARTER, attention=ways[0]),
            lambda entropies: rowprop.pick(entropies, others, attention=ways[1]),
            attend,
        )
    assert largest_difference(actual, expected) < 1e-12
    assert report.sliced and bool(report.cut) == (ways == ("cut", "cut"))


def test_tokens_and_whole_rows_of_one_graph():
    # Red when: tokens and sequences meet without being brought to sequences.
    def step(tokens: Take, rows: Take) -> list[Tensor]:
        model = Layered(packed=True)
        losses = LOSSES["flat"](model(IDS), LABELS)
        (tokens(losses).mean() + rows(losses.mean(1)).square().sum()).backward()
        return gradients_of(model)

    index = torch.tensor([1, 3])
    expected = step(lambda losses: losses[QUARTER], lambda losses: losses[index])
    actual = step(lambda losses: rowprop.pick(losses, QUARTER), lambda losses: rowprop.pick(losses, index))
    assert largest_difference(actual, expected) < 1e-12


@pytest.mark.parametrize("way", ["exact", "cut"])
def test_autograd_grad_returns_plain_tensors_and_cuts_what_it_would(way: str):
    # Red when: a gradient that is returned is made dense for all who share it, as the terms of a residual sum do:
    # attention in the sum's other term is no longer cut.
    def step(take: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        model, streams = Layered(packed=True), list[Tensor]()

        def through(block: nn.Module, h: Tensor, attention: Callable[..., Tensor]) -> Tensor:
            streams.append(h)
            return block(h, attention)

        model.through = through
        losses = LOSSES["flat"](model(IDS, attention=attention), LABELS)
        wanted: list[list[Tensor]] = [
            *([losses], streams[:1], streams[1:], streams, [model.tokens.weight, streams[1]]),
            list(model.parameters()),
        ]
        found = list[Tensor]()
        for inputs in wanted:
            found += torch.autograd.grad(take(losses).mean(), inputs, retain_graph=True)
        return found

    assert_as_dense(way, step)


@pytest.mark.parametrize("way", ["exact", "cut"])
def test_what_is_seen_beside_the_gradients(way: str):
    # Red when: a hook after accumulation, a multi-grad hook or retain_grad() sees anything but a plain gradient.
    def step(take: Take, attention: Callable[..., Tensor]) -> list[Tensor]:
        model, seen, retained = Layered(packed=True), dict[Any, Tensor](), list[Tensor]()
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


def test_a_second_backward_and_create_graph_are_refused():
    # Red when: the backward does not ask whether it is recorded.
    losses = LOSSES["flat"](Layered(packed=True)(IDS), LABELS)
    loss = rowprop.pick(losses, QUARTER).mean()
    with pytest.raises(UnsupportedOperation, match="create_graph=True"):
        torch.autograd.grad(loss, losses, create_graph=True, retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# --- masks and losses of every kind -----------------------------------------------------------------------------------

Made = Callable[[], tuple[Tensor, list[Tensor]]]


def made(shape: tuple[int, ...], view: Take = lambda losses: losses, dtype: torch.dtype = torch.float64) -> Made:
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


def test_a_mask_that_keeps_everything_costs_a_copy():
    # Red when: all tokens are gathered, to be scattered again in the backward; or the losses themselves are handed out.
    losses, _ = made((6, 7))()
    kept = rowprop.pick(losses, torch.ones(6, 7, dtype=torch.bool))
    assert kept.grad_fn is not None and kept.grad_fn.name() == "CloneBackward0"
    assert torch.equal(kept, losses.flatten()) and kept.data_ptr() != losses.data_ptr()


def test_losses_without_a_graph_are_indexed():
    # Red when: a graph is made for losses that have none, or while gradients are off.
    losses = torch.randn(6, 7)
    assert torch.equal(rowprop.pick(losses, SOME), losses[SOME]) and not rowprop.pick(losses, SOME).requires_grad
    with torch.no_grad():
        assert not rowprop.pick(losses.requires_grad_(), SOME).requires_grad


def test_the_mask_may_be_written_before_the_backward():
    # Red when: the backward reads the caller's mask, into which the next step's may have been written.
    losses, leaves = made((6, 7))()
    expected = torch.autograd.grad(losses[SOME].sum(), leaves, retain_graph=True)
    mask = SOME.clone()
    kept = rowprop.pick(losses, mask).sum()
    mask.fill_(True)
    torch.testing.assert_close(torch.autograd.grad(kept, leaves), expected)


def test_under_a_transform_a_mask_is_plain_indexing():
    # Red when: nobody asks whether a transform runs: torch.func refuses the autograd function.
    w = torch.randn(5, 4, dtype=torch.float64)
    x = torch.randn(6, 7, 5, dtype=torch.float64)

    def loss(w: Tensor, take: Take) -> Tensor:
        return take((x @ w).tanh().square().sum(-1)).square().sum()

    index = SOME.flatten().nonzero().squeeze(1)  # torch.func counts no mask
    expected = torch.func.grad(lambda w: loss(w, lambda losses: losses.flatten()[index]))(w)
    actual = torch.func.grad(lambda w: loss(w, lambda losses: rowprop.pick(losses.flatten(), index)))(w)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.func.grad(lambda w: loss(w, lambda x: rowprop.pick(x, SOME)))(w), expected)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (torch.ones(6, 8, dtype=torch.bool), r"the mask has the shape \(6, 8\) but input has the shape \(6, 7\)"),
        (torch.ones(7, 6, dtype=torch.bool), r"the mask has the shape \(7, 6\) but input has the shape \(6, 7\)"),
        (torch.ones(6, 7, 1, dtype=torch.bool), r"the mask has the shape \(6, 7, 1\) but"),
        (torch.ones(1, 7, dtype=torch.bool), r"the mask has the shape \(1, 7\) but"),
        (torch.ones(42, dtype=torch.bool), r"the mask has the shape \(42,\) but input has the shape \(6, 7\)"),
        (torch.ones(6, 7), r"rows is a tensor of shape \(6, 7\), layout torch.strided and dtype torch.float32 but"),
        (torch.ones(6, 7, dtype=torch.uint8), r"rows is a tensor of shape \(6, 7\), layout torch.strided and dtype"),
        (torch.ones(6, 7, dtype=torch.int64), r"rows is a tensor of shape \(6, 7\), layout torch.strided and dtype"),
        (torch.ones(6, 7, dtype=torch.bool, device="meta"), "rows is on meta but input is on cpu; move one of them"),
        (
            torch.ones(6, 7, dtype=torch.bool).to_sparse(),
            r"rows is a tensor of shape \(6, 7\), layout torch.sparse_coo",
        ),
        (torch.tensor([42]), "rows holds the index 42 but input has 6 rows"),
    ],
)
@pytest.mark.usefixtures("as_host")  # an index out of range is told where the host reads it at once
# Red when: a mask of as many entries is taken for one of input's shape.
def test_masks_that_are_none_are_refused_in_one_sentence(mask: Tensor, sentence: str):
    losses = torch.randn(6, 7, requires_grad=True)
    with pytest.raises(InvalidInput, match=f"^{sentence}"):
        rowprop.pick(losses, mask)


# --- pixels -----------------------------------------------------------------------------------------------------------


class Segmenter(nn.Module):
    """A convolution, BatchNorm, and a head of 1 x 1 convolutions: logits (N, 5, 8, 8) of images (N, 3, 8, 8)."""

    def __init__(self, last: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Sequential(
            nn.Conv2d(8, 8, 1, groups=2), nn.BatchNorm2d(8).eval(), nn.GELU(), nn.Dropout2d(), last
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def segmented(model: Segmenter, take: Callable[[Tensor], Tensor], **options: Any) -> tuple[list[Tensor], int, Report]:
    """The gradients, the FLOPs of the head's convolutions, and the report of a backward."""
    torch.manual_seed(3)
    x, labels = torch.randn(6, 3, 8, 8).double(), torch.randint(0, 5, (6, 8, 8))
    model.zero_grad()
    features = model.body(x).detach().requires_grad_() if options.get("head") else model.body(x)
    losses = F.cross_entropy(model.head(features), labels, reduction="none", ignore_index=2)
    with rowprop.watch() as report, count_flops() as counted:
        take(losses).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], counted.total_flops, report


PIXELS = {
    "hard ones": torch.rand(6, 8, 8, generator=torch.Generator().manual_seed(4)) < 0.1,
    "of two images": (torch.arange(6) % 3 == 1)[:, None, None] & (torch.rand(6, 8, 8) < 0.3),
    "one": torch.arange(6 * 64).view(6, 8, 8) == 200,
}
LAST: dict[str, Callable[[], nn.Module]] = {
    "a convolution": lambda: nn.Conv2d(8, 5, 1),
    "a transposed one": lambda: nn.ConvTranspose2d(8, 5, 1),
    "channels last": lambda: nn.Conv2d(8, 5, 1).to(memory_format=torch.channels_last),
    "linear": lambda: nn.Sequential(ChannelsBehind(), nn.Linear(8, 5), ChannelsBefore()),
}


class ChannelsBehind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class ChannelsBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("last", LAST)
# Red when: a kernel of several positions is taken for one of a single position (stride, padding or size is not asked
# for), or BatchNorm in training mode for one with running statistics.
def test_a_head_of_one_by_one_convolutions_runs_at_the_kept_pixels(last: str, pixels: str):
    model, kept = Segmenter(LAST[last]()), PIXELS[pixels]
    for options in ({}, {"head": True}):
        expected, full, _ = segmented(model, lambda losses: losses[kept], **options)
        actual, flops, report = segmented(
            model, lambda losses: rowprop.pick(losses, kept, batchnorm="exact"), **options
        )
        assert largest_difference(actual, expected) < 1e-12
        if options:
            assert not report.densified and flops == full * int(kept.sum()) // kept.numel()
        elif pixels == "hard ones":
            assert {entry.reason for entry in report.densified.values()} == {
                "the op mixes positions, and some are kept of every row"
            }


def test_hard_pixels_are_picked_by_a_selection_of_flattened_losses():
    # Red when: a selection of pixels is taken for one of images.
    model = Segmenter(nn.Conv2d(8, 5, 1))
    hardest = rowprop.TopK(0.1)
    expected, _, _ = segmented(model, lambda losses: losses.flatten()[hardest(losses.detach().flatten()).rows])
    actual, _, _ = segmented(
        model, lambda losses: rowprop.pick(losses, hardest(losses.detach().flatten()), batchnorm="exact")
    )
    assert largest_difference(actual, expected) < 1e-12


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(3, 4, 1, stride=2), nn.Conv2d(3, 4, 1, padding=1), nn.Conv2d(3, 4, (1, 3), padding=(0, 1)),
     nn.ConvTranspose2d(3, 4, 1, stride=2), nn.ConvTranspose2d(3, 4, 1, stride=2, output_padding=1)],
    ids=str,
)  # fmt: skip
def test_convolutions_between_pixels_take_whole_images(conv: nn.Module):
    # Red when: stride, padding or the kernel's size is not asked for.
    torch.manual_seed(0)
    conv, x = conv.double(), torch.randn(6, 3, 8, 8).double()

    def gradients(take: Callable[[Tensor], Tensor]) -> list[Tensor]:
        conv.zero_grad()
        take(conv(x).square().sum(1)).sum().backward()
        return [p.grad for p in conv.parameters() if p.grad is not None]

    kept = torch.rand(conv(x).shape)[:, 0] < 0.1
    expected = gradients(lambda losses: losses[kept])
    assert largest_difference(gradients(lambda losses: rowprop.pick(losses, kept)), expected) < 1e-12


def test_a_convolution_takes_whole_images_though_few_lines_of_them_are_kept():
    # Red when: the gradient is brought to whole lines of all images, of which fewer are kept, and then densifies.
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(6, 3, 16, 8).double().requires_grad_()
    losses = conv(x).square().sum(1)
    kept = torch.zeros(losses.shape, dtype=torch.bool)
    kept[:4, 5, :3] = True
    (expected,) = torch.autograd.grad(losses[kept].sum(), x, retain_graph=True)
    with rowprop.watch() as report:
        (actual,) = torch.autograd.grad(rowprop.pick(losses, kept).sum(), x)
    assert "convolution_backward" in report.sliced and "convolution_backward" not in report.densified
    torch.testing.assert_close(actual, expected)


def test_attention_below_whole_sequences_is_not_cut_and_the_report_says_so():
    # Red when: tokens come back to whole sequences without a word.
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.conv = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.attention(x).mT).mT.square().sum(-1)

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(N, T, 8).double()
    kept = torch.zeros(N, T, dtype=torch.bool)
    kept[:2, ::3] = True
    model(x)[kept].mean().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with rowprop.watch() as report:
        rowprop.pick(model(x), kept, attention="cut").mean().backward()
    assert not report.cut and "not cut below" in report.densified["attention"].reason
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


# --- pick -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_mask_of_leading_dimensions_is_as_in_indexing(dims: int):
    # Red when: the mask is flattened and the input is not, or the dimensions behind the mask are lost.
    x = randn(3, 4, 2, 5).requires_grad_()
    mask = torch.rand(x.shape[:dims]) < 0.4
    mask.view(-1)[0], mask.view(-1)[-1] = True, False
    weights = randn(*x[mask].shape)
    (x.square()[mask] * weights).sum().backward()
    expected, x.grad = x.grad, None
    picked = rowprop.pick(x.square(), mask)
    assert torch.equal(picked, x.square()[mask])
    (picked * weights).sum().backward()
    assert expected is not None and x.grad is not None and torch.equal(x.grad, expected)


def test_a_selection_of_flattened_scores_takes_tokens():
    # Red when: the selection is taken for one of rows.
    losses = randn(4, 6).requires_grad_()
    selection = rowprop.TopK(0.25)(losses.detach().flatten())
    assert torch.equal(rowprop.pick(losses * 2, selection), (losses * 2).flatten()[selection.rows])


def test_a_mask_that_does_not_fit_is_refused():
    # Red when: a mask of as many entries is taken for one of input's shape, or attention is not looked at.
    with pytest.raises(
        InvalidInput, match=r"^the mask has the shape \(2, 3\) but input has the shape \(3, 2\); a mask has the"
    ):
        rowprop.pick(randn(3, 2), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(InvalidInput, match=r"^attention is 'none' but 'exact' or 'cut' was needed\.$"):
        rowprop.pick(randn(3, 2), torch.ones(3, dtype=torch.bool), attention="none")  # type: ignore[arg-type]


# --- in the step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["exact", "cut"])
def test_the_sliced_engine_hands_its_attention_to_pick(attention: str):
    # Red when: Sliced forgets attention: the gradient of cut is then the exact one.
    model, kept = Decoder(packed=False), MASKS["a quarter"]
    expected = run(model, lambda x: x[kept], attention=cut_attention(kept) if attention == "cut" else attend)
    selection = rowprop.Selection.mean(kept.flatten().nonzero().squeeze(1), N * T)
    engine = Sliced(attention=attention)  # type: ignore[arg-type]
    actual = run(model, lambda x: engine.kept_losses(selection, x, forward=lambda rows: rows))
    assert largest_difference(actual, expected) < 1e-12


# --- a batch of one sequence, as packed batches of trainers are -------------------------------------------------------


@pytest.mark.parametrize("written", ["causal", "segments", "products"])
def test_one_packed_sequence_keeps_its_tokens_sliced(written: str):
    # Red when: a batch of one sequence is densified at its attention, or a product of attention that sums over the kept
    # queries hands all keys their gradients: under cut these give the exact gradient.
    torch.manual_seed(5)
    project, x = nn.Linear(WIDTH, 3 * WIDTH).double(), torch.randn(1, T, WIDTH, dtype=torch.float64)
    segments = torch.arange(T) // 5
    within = (segments[:, None] == segments) & torch.ones(T, T, dtype=torch.bool).tril()
    mask: dict[str, Any] = {"is_causal": True} if written == "causal" else {"attn_mask": within}

    def gradients(take: Callable[[Tensor], Tensor], kept: Tensor, detach: bool = False) -> list[Tensor]:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in project(x).chunk(3, -1))
        if detach:
            k, v = (torch.where(kept[:, :, None, None], part, part.detach()) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if written == "products":
            out = (q @ k.mT / 3).masked_fill(~within, -torch.inf).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, **mask)
        losses = out.transpose(1, 2).flatten(2).square().sum(-1)
        return list(torch.autograd.grad(take(losses).mean(), list(project.parameters())))

    for kept in (torch.rand(1, T) < 0.4, (segments % 2 == 1)[None]):
        exact = gradients(lambda losses, kept=kept: losses[kept], kept)
        dense = gradients(lambda losses, kept=kept: losses[kept], kept, detach=True)
        with rowprop.watch() as report:
            found = gradients(lambda losses, kept=kept: rowprop.pick(losses, kept), kept)
        assert largest_difference(found, exact) < 1e-12
        assert not any("attention" in op for op in report.densified)
        with rowprop.watch() as report:
            cut = gradients(lambda losses, kept=kept: rowprop.pick(losses, kept, attention="cut"), kept)
        assert largest_difference(cut, dense) < 1e-12 and not report.densified
        closed = written != "causal" and bool((kept == (segments % 2 == 1)).all())  # whole segments are kept
        assert (largest_difference(exact, dense) < 1e-12) == closed


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
    def gradient(take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(6, 4, 5, dtype=torch.float64, requires_grad=True)
        h = x * 1
        WRITES[name](h)
        tokens = take(h.flatten(0, 1), torch.tensor(index))
        (tokens * torch.arange(1.0, len(index) + 1)[:, None]).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(rowprop.pick), gradient(lambda x, rows: x[rows]))


@pytest.mark.parametrize("turned", [False, True])
def test_a_pick_of_places_meets_a_pick_of_tokens(turned: bool):
    # The rows of the one with fewer lie in two dimensions. Red where these are taken for one.
    places = torch.zeros(4, 3, dtype=torch.bool)
    places[0, 0] = places[1, 1] = True

    def gradient(take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(24, 3, dtype=torch.float64, requires_grad=True)
        h = x * 1
        of_places = h.view(6, 4, 3).square().mean(0)
        mask = places.T if turned else places
        total = take(of_places.T if turned else of_places, mask).sum()
        (total + take(h.sin().sum(1), torch.tensor([3, 7])).sum()).backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(rowprop.pick), gradient(lambda x, rows: x[rows]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(1, 12), (1, 4, 3), (2, 12), (2, 4, 3)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_with_classes_second_of_one_packed_row(shape, smoothing):
    # Packed training has one row. Red with the refusal of a batch that is not the losses' first dimension put back.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 7)).double()
    ids, labels, mask = torch.randint(20, shape), torch.randint(7, shape), torch.rand(shape) < 0.25
    labels.view(-1)[5], mask.view(-1)[:2], weight = -100, True, torch.rand(7, dtype=torch.float64)
    found = []
    for take in (lambda t: t[mask], lambda t: rowprop.pick(t, mask)):
        model.zero_grad()
        logits = model(ids).movedim(-1, 1)
        losses = F.cross_entropy(logits, labels, reduction="none", weight=weight, label_smoothing=smoothing)
        with rowprop.watch() as report, count_flops() as flops:
            take(losses).sum().backward()
        found.append(([p.grad for p in model.parameters()], flops.total_flops))
    assert not report.densified and found[1][1] <= (mask.double().mean() + 0.02) * found[0][1]
    torch.testing.assert_close(found[1][0], found[0][0])
