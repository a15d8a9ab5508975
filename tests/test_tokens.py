"""Tokens as rows: positions of several dimensions, against plain indexing and, where attention is cut, dense code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.sliced import RowSet, RowSlice
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops
from rowprop.engines import Sliced
from rowprop.errors import InvalidInput

from .test_rules import CASES, param, randn

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
    token = g.renumbered(2, 1, (1, -1, 1))  # the slice [:, :, 1:2]
    assert token.layout == Layout(0, 40) and token.shape == (40, 2, 1, 5)
    assert token.dense().sum((1, 2, 3)).nonzero().squeeze(1).tolist() == [3]


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


def flops_of(model: Decoder, take: Callable[[Tensor], Tensor]) -> tuple[int, Report]:
    model.zero_grad()
    loss = take(LOSSES["flat"](model(IDS), LABELS)).mean()
    with count_flops() as counted, rowprop.watch() as report:
        loss.backward()
    return sum(counted.by_op.values()), report


@pytest.mark.parametrize("mask", ["a quarter", "uneven", "prompts"])
def test_the_backward_costs_the_kept_tokens(mask: str):
    # Red when: an op of a layer runs at all tokens, the kept queries are padded to the longest sequence's, or sequences
    # that keep no token take part below the attention.
    model, kept = Decoder(packed=False), MASKS[mask]
    count, share = int(kept.sum()), float(kept.float().mean())
    full, _ = flops_of(model, lambda x: x[kept])
    cut, _ = flops_of(model, lambda x: rowprop.pick(x, kept, attention="cut"))
    assert cut <= (share + 0.02) * full
    # Exact: a linear layer's backward takes 4 FLOPs for each weight and token; below the last attention all tokens of
    # the kept tokens' sequences take part, but for the queries' projection there. Attention is counted too high: it is
    # small here.
    projection, mlp, head = WIDTH * WIDTH, 8 * WIDTH * WIDTH, WIDTH * VOCABULARY
    at_kept = 4 * count * (head + mlp + 2 * projection)
    reached = int(kept.any(1).sum()) * T
    at_all = 4 * reached * (2 * projection + mlp + 4 * projection)
    attention = 2 * HEADS * 2 * 5 * reached * T * (WIDTH // HEADS)
    exact, _ = flops_of(model, lambda x: rowprop.pick(x, kept))
    assert exact <= 1.03 * (at_kept + at_all + attention)


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
    with pytest.raises(
        InvalidInput, match=r"^the mask has the shape \(2, 3\) but input has the shape \(3, 2\); a mask of"
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
