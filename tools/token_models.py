"""A small decoder whose losses are one per token, masks of tokens, and what pick() leaves beside dense code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.watch import Report

N, T, VOCABULARY, WIDTH, HEADS = 6, 16, 50, 32, 4
Keep = Callable[[Tensor], Tensor]
"""What is left of losses: those of the kept tokens, by indexing or by ``pick``."""
Attention = Callable[..., Tensor]
Step = Callable[[Keep, Attention], list[Tensor]]
"""Gradients, or other tensors, of a step with the losses that are kept and with this attention."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cut_attention(kept: Tensor, attention: Attention = attend, heads: int = 1) -> Attention:
    """The meaning of ``attention="cut"`` in dense code: keys and values of other tokens take no gradient.

    ``heads`` is the dimension of the heads.
    """
    here = kept.unsqueeze(-1).unsqueeze(heads)
    return lambda q, k, v: attention(q, torch.where(here, k, k.detach()), torch.where(here, v, v.detach()))


class Block(nn.Module):
    """Pre-norm attention and MLP; queries, keys and values by one projection or by three."""

    def __init__(self, packed: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH * (3 if packed else 1)) for _ in range(1 if packed else 3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        h = self.norms[0](x)
        parts = self.qkv[0](h).chunk(3, -1) if len(self.qkv) == 1 else [layer(h) for layer in self.qkv]
        heads = [p.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in parts]
        x = x + self.out(attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A small GPT. ``through`` is called in a block's place, as code of a trainer around each block."""

    through: Attention = staticmethod(lambda block, h, attention: block(h, attention))

    def __init__(self, packed: bool, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks = nn.ModuleList(Block(packed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, x: Tensor, attention: Attention = attend) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]) % T)
        for block in self.blocks:
            h = self.through(block, h, attention)
        return self.head(self.norm(h))


_seeded = torch.Generator().manual_seed(1)
IDS, LABELS = torch.randint(0, VOCABULARY, (2, N, T), generator=_seeded)
QUARTER = torch.rand(N, T, generator=_seeded) < 0.25
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


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def run(model: Decoder, take: Keep, losses: str = "flat", **options: Any) -> list[Tensor]:
    model.zero_grad()
    take(LOSSES[losses](model(IDS, **options), LABELS)).mean().backward()
    return gradients_of(model)


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def decoding(model: Decoder, losses: str = "flat") -> Step:
    return lambda take, attention: run(model, take, losses, attention=attention)


def assert_as_dense(
    way: str,
    step: Step,
    kept: Tensor = QUARTER,
    attention: Attention = attend,
    dense: Attention | None = None,
    tolerance: float = 1e-12,
) -> Report:
    """``pick`` leaves what plain indexing leaves, under ``cut`` with keys and values detached in dense code.

    Where other code than that is the truth, it runs with the attention ``dense``.
    """
    dense = dense or (cut_attention(kept, attention) if way == "cut" else attention)
    expected = step(lambda losses: losses[kept], dense)
    with rowprop.watch() as report:
        actual = step(lambda losses: rowprop.pick(losses, kept, attention=cast(Any, way)), attention)
    assert any(bool(e.any()) for e in expected) and report.sliced
    for a, e in zip(actual, expected, strict=True):
        assert type(e) is not Tensor or type(a) in (Tensor, RowGrad)
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
    return report


# (N, T, C) to the same shape: N is large, so few rows are kept.
BETWEEN: dict[str, Keep] = {
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
