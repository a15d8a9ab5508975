"""Random programs under picks, and the same programs under plain indexing.

The audit tries each rule by itself. A program is some random steps in a row: products, moves of rows and tokens, ops
that mix them, recurrent, convolution, norm and attention layers, writes in place through views, checkpoints, hooks,
custom functions. It picks rows or tokens at many places, and gradients of other rows in other layouts meet on their way
back. Values, the gradients of all leaves, and what hooks see are those of plain indexing.

``python tools/programs.py 1000`` runs programs 0 to 999; ``python tools/programs.py 7 8`` runs number 7. ``--jobs 2``
runs them in two processes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from multiprocessing import get_context
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import rowprop

Take = Callable[[Tensor, Any], Tensor]
LARGEST = 2500
"""Entries of a tensor. An op whose result has more is left out."""
TOLERANCE = 1e-9
"""Of the largest entry, or of 1."""
NARROWED = 1e-6
"""The same where saved tensors were rounded to float32: torch has two formulas for the gradient of a running product,
which then differ."""


class Unfit(ValueError):
    """A step has no result to go on with."""


@dataclass
class Program:
    """One run of a program.

    Attributes:
        seed: Its number; everything but ``take`` follows from it.
        take: Picks rows, or indexes them.
        left_out: Names of steps that fail under plain indexing, and so in no other run.
        made: The tensors so far.
        leaves: The inputs and the parameters.
        losses: One number for each place where rows were picked for a loss.
        retained: Tensors that keep their gradient.
        cut: Tensors, and the leaves that stand for them further down: their gradient is handed over at the end.
        noted: What hooks saw of gradients, by step.
        steps: Names of the steps.
        inner: Names of steps within steps.
        ending: How its backward goes.
        given: What the present step has made, see :meth:`once`.
    """

    seed: int
    take: Take
    left_out: set[str] = field(default_factory=set)
    made: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    retained: list[Tensor] = field(default_factory=list)
    cut: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    noted: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    ending: str = ""
    given: list[Any] = field(default_factory=list)
    at: int = 0
    name: str = ""
    r: Random = field(default_factory=Random)
    generator: torch.Generator = field(default_factory=torch.Generator)

    def once(self, make: Callable[[], Any]) -> Any:
        """What a step makes when it runs, and finds when a checkpoint runs it again."""
        if self.at == len(self.given):
            self.given.append(make())
        self.at += 1
        return self.given[self.at - 1]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def leaf(self, *shape: int) -> Tensor:
        """Another leaf or an earlier one, in some order of dimensions in memory; one of seven needs no gradient."""
        order = self.r.sample(range(len(shape)), len(shape)) if self.r.random() < 0.3 else list(range(len(shape)))
        needs = self.r.random() < 6 / 7

        tied = self.r.random()

        def make() -> Tensor:
            same = [x for x in self.leaves if x.shape == shape]
            if same and tied < 0.2:
                return same[int(tied * 5 * len(same))]
            values = self.randn(*[shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
            self.leaves.append(values.requires_grad_(needs))
            return values

        return self.once(make)

    def module(self, make: Callable[..., nn.Module], *args: Any, **options: Any) -> Any:
        """A layer, whose parameters are leaves."""

        def double() -> nn.Module:
            layer = make(*args, **options).double()
            for parameter in layer.parameters():
                parameter.data = self.randn(*parameter.shape) * 0.4
                self.leaves.append(parameter)
            return layer

        return self.once(double)

    def chance(self, share: float = 0.5) -> bool:
        return self.r.random() < share

    def other(self, like: Tensor) -> Tensor:
        """A tensor of the same shape, perhaps the same one."""
        return self.r.choice([x for x in self.made if x.shape == like.shape])

    def dim(self, x: Tensor) -> int:
        return self.r.randrange(x.ndim)

    def divisor(self, size: int) -> int:
        return self.r.choice([d for d in range(1, size + 1) if size % d == 0])

    def entries(self, size: int, *shape: int) -> Tensor:
        """Indices below a size."""
        return torch.tensor([self.r.randrange(size) for _ in range(prod(shape))]).view(shape)

    def mask(self, *shape: int) -> Tensor:
        share = self.r.choice([0.2, 0.5, 0.8])
        return torch.tensor([self.r.random() < share for _ in range(prod(shape))]).view(shape)

    def rows(self, x: Tensor) -> Tensor:
        """Rows to pick: indices, indices that repeat, a mask of rows, of tokens, or of more."""
        n, kind = x.shape[0], self.r.randrange(6)
        if kind < 2:
            return torch.tensor(self.r.sample(range(n), self.r.randint(1, n)))
        if kind == 2:
            return self.entries(n, self.r.randint(1, n + 1))
        return self.mask(*x.shape[: 1 if kind == 3 else self.r.randint(1, min(3, x.ndim))])

    def lose(self, x: Tensor) -> Tensor:
        """Pick rows or tokens of a tensor, or of losses made of it, and add a loss that is one number."""
        kind = self.r.randrange(7)
        if kind == 0 and x.ndim > 1:
            x = x.transpose(0, 1)  # as where time comes first
        elif kind == 1 and x.ndim > 1:
            x = x.square().flatten(1).mean(1)
        elif kind == 2 and x.ndim > 2:
            x = (x - 0.3).square().flatten(2).sum(2)
        elif kind == 3 and x.ndim > 1 and x.shape[-1] > 1:
            classes = self.entries(x.shape[-1], *x.shape[:-1])
            if self.chance():
                classes[self.mask(*classes.shape)] = -100
            x = F.cross_entropy(x.movedim(-1, 1), classes, reduction="none", label_smoothing=self.r.choice([0, 0.1]))
        taken = self.take(x, self.rows(x))
        how = self.r.randrange(5)
        if how == 0 and taken.numel():
            loss = taken.mean()
        elif how == 1 and taken.numel():
            loss = taken.flatten().logsumexp(0)
        else:
            loss = (taken * self.randn(*taken.shape)).sum() + taken.square().sum() / 5
        self.losses.append(loss)
        return loss

    def note(self, name: str, gradient: Tensor | None) -> None:
        """Remember a gradient that a hook sees."""
        if gradient is not None:
            self.noted.setdefault(name, []).append(gradient.clone())

    def run(self, name: str, step: Callable[[Program, Tensor], Tensor]) -> None:
        """One step on one of the last tensors."""
        self.name, self.r, self.given, self.at = name, Random(f"{self.seed}/{name}"), [], 0
        if name in self.left_out:
            return
        torch.manual_seed(number := self.r.randrange(2**31))
        self.generator.manual_seed(number)
        x = self.made[-1 - min(len(self.made) - 1, int(self.r.expovariate(1)))]
        out = step(self, x)
        if not 0 < out.numel() <= LARGEST or not torch.isfinite(out).all() or out.detach().abs().max() > 1e3:
            raise Unfit
        self.made.append(out)
        self.steps.append(name)

    def within(self, kinds: dict[str, Step] | None = None) -> Callable[[Tensor], Tensor]:
        """A function of a tensor that does a random step, and does the same when it is called again."""
        steps = INNER if kinds is None else kinds
        name, seed = self.r.choice(list(steps)), self.r.random()
        given, made = self.once(list[Any]), list(self.made)
        self.inner.append(name)

        def function(x: Tensor) -> Tensor:
            before = self.r, self.given, self.at, self.made
            self.r, self.given, self.at, self.made = Random(seed), given, 0, made
            try:
                return steps[name](self, x)
            finally:
                self.r, self.given, self.at, self.made = before

        return function


Step = Callable[[Program, Tensor], Tensor]


def sequences(x: Tensor) -> Tensor:
    """Any tensor as (N, T, D)."""
    if x.ndim < 3:
        return x.view_as(x)[(..., *[None] * (3 - x.ndim))]
    return x.flatten(1, -2)


def images(x: Tensor) -> Tensor:
    """Any tensor as (N, C, H, W)."""
    return x if x.ndim == 4 else sequences(x)[:, None]


# --- writes in place --------------------------------------------------------------------------------------------------


def _written(p: Program, x: Tensor) -> Tensor:
    h = p.r.choice([lambda: x * 1, lambda: torch.zeros_like(x), lambda: x.transpose(0, -1).clone().transpose(0, -1)])()
    for _ in range(p.r.randint(1, 2)):
        view = VIEWS[p.r.choice(sorted(VIEWS))](p, h)
        WRITES[p.r.choice(sorted(WRITES))](p, view)
    return h


VIEWS: dict[str, Step] = {
    "itself": lambda p, h: h,
    "turned": lambda p, h: h.transpose(p.dim(h), p.dim(h)),
    "flat": lambda p, h: h.flatten(0, 1),
    "one": lambda p, h: h.select(p.dim(h), 0),
    "some": lambda p, h: h[..., : max(1, h.shape[-1] - 1)],
    "others": lambda p, h: h[:, ::2],
    "a chunk": lambda p, h: h.chunk(2, p.dim(h))[0],
    "unsqueezed": lambda p, h: h.unsqueeze(p.dim(h)),
}
WRITES: dict[str, Callable[[Program, Tensor], object]] = {
    "scale": lambda p, v: v.mul_(2),
    "zero": lambda p, v: v.zero_(),
    "tanh": lambda p, v: v.tanh_(),
    "relu": lambda p, v: v.relu_(),
    "clamp": lambda p, v: v.clamp_(-0.5, 0.7),
    "add": lambda p, v: v.add_(v.detach().flip(0)),
    "add another": lambda p, v: v.add_(p.r.choice(p.made).expand_as(v), alpha=0.5),
    "times another": lambda p, v: v.mul_(p.r.choice(p.made).expand_as(v)),
    "rows": lambda p, v: v.__setitem__(p.entries(v.shape[0], 2), 0),
    "a mask": lambda p, v: v.__setitem__(p.mask(*v.shape[: p.r.randint(1, v.ndim)]), 0.5),
    "from another": lambda p, v: v.copy_(p.r.choice(p.made).expand_as(v)),
    "fill": lambda p, v: v.index_fill_(0, p.entries(v.shape[0], 1), 0),
    "masked fill": lambda p, v: v.masked_fill_(p.mask(v.shape[0], *[1] * (v.ndim - 1)), 0),
    "more of a row": lambda p, v: v.index_add_(0, p.entries(v.shape[0], v.shape[0]), v.detach() + p.made[0].sum()),
    "next to each other": lambda p, v: v[1:].copy_(v[:-1].clone()),
    "quotient": lambda p, v: v.div_(1 + p.r.choice(p.made).detach().abs().mean()),
    "towards another": lambda p, v: v.lerp_(p.r.choice(p.made).expand_as(v), 0.3),
    "scattered": lambda p, v: v.scatter_(d := p.dim(v), v.argsort(d).narrow(d, 0, 1), p.r.choice(p.made).expand_as(v)),
    "put": lambda p, v: v.index_put_((p.entries(v.shape[0], 2),), p.r.choice(p.made).sum(), accumulate=True),
    "masked scatter": lambda p, v: v.masked_scatter_(p.mask(*v.shape), p.r.choice(p.made).expand_as(v).clone()),
    "running sum": lambda p, v: v.cumsum_(p.dim(v)),
    "swapped": lambda p, v: v.__setitem__(slice(None), v.flip(p.dim(v)).clone()),
    "picked": lambda p, v: v[:1].copy_(p.take(p.made[0].expand(2, *p.made[0].shape), p.entries(2, 1)).mean()),
}


def _step_by_step(p: Program, x: Tensor) -> Tensor:
    """A buffer, filled along one of its dimensions."""
    d = p.dim(x)
    out = torch.zeros_like(x.movedim(d, 0)) if p.chance() else torch.zeros_like(x).movedim(d, 0)
    state = x.select(d, 0).tanh()
    for t in range(x.shape[d]):
        state = (state + x.select(d, t)).sin()
        out[t] = state
    return out.movedim(0, d) if p.chance() else out


# --- layers -----------------------------------------------------------------------------------------------------------


def _recurrent(p: Program, x: Tensor) -> Tensor:
    x = sequences(x)
    first, layers, both, size = p.chance(), p.r.choice([1, 1, 2]), p.chance(0.3), p.r.choice([1, 2, 3])
    kind, begun, bias = p.r.choice([nn.RNN, nn.GRU, nn.LSTM]), p.chance(0.3), p.chance(0.8)
    options: dict[str, Any] = {"proj_size": size - 1} if kind is nn.LSTM and size > 1 and p.chance(0.2) else {}
    options |= {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    layer = p.module(kind, x.shape[-1], size, **options)
    state: Any = None
    if begun and not options.get("proj_size"):
        state = [p.leaf(layers * (1 + both), x.shape[0], size) for _ in range(2)]
        state = tuple(state) if kind is nn.LSTM else state[0]
    given = x if first else x.transpose(0, 1)
    if p.chance(0.2):
        lengths = p.entries(x.shape[1], x.shape[0]) + 1
        packed = pack_padded_sequence(given, lengths, batch_first=first, enforce_sorted=False)
        packed, last = layer(packed, state)
        out = pad_packed_sequence(packed, batch_first=first)[0]
    else:
        out, last = layer(given, state)
    if p.chance(0.3):
        return (p.r.choice(last) if isinstance(last, tuple) else last).transpose(0, 1)
    return out if first or p.chance(0.3) else out.transpose(0, 1)


def _cells(p: Program, x: Tensor, *, pick: bool = False) -> Tensor:
    """A loop over time, perhaps with a pick in each step."""
    x = sequences(x)
    kind, size, rare = p.r.choice([nn.RNNCell, nn.GRUCell, nn.LSTMCell]), p.r.choice([1, 2, 3]), p.chance(0.3)
    cell, out, state = p.module(kind, x.shape[-1], size), [], None
    for now in x.unbind(1):
        state = cell(now, state)
        out.append(state[0] if isinstance(state, tuple) else state)
        if pick and not (rare and p.chance()):
            p.lose(out[-1])
    return torch.stack(out, p.r.choice([0, 1]))


def _convolved(p: Program, x: Tensor, dims: int, *, turned: bool = False) -> Tensor:
    x = (sequences(x).mT if p.chance() else sequences(x)) if dims == 1 else images(x)
    groups = p.divisor(x.shape[1]) if p.chance(0.3) else 1
    channels, size, step, wide = (
        groups * p.r.choice([1, 2]),
        p.r.choice([1, 2, 3]),
        p.r.choice([1, 1, 2]),
        p.chance(0.2),
    )
    pad, bias = p.r.choice([0, 1]) if size > 1 else 0, p.chance()
    kind = [[nn.Conv1d, nn.Conv2d], [nn.ConvTranspose1d, nn.ConvTranspose2d]][turned][dims - 1]
    layer = p.module(
        kind, x.shape[1], channels, size, stride=step, padding=pad, dilation=1 + wide, groups=groups, bias=bias
    )
    return layer(x)


def _normed(p: Program, x: Tensor, kind: Callable[..., nn.Module]) -> Tensor:
    affine = p.chance(0.7)
    if kind is nn.LayerNorm:
        shape = x.shape[p.r.randrange(1, x.ndim) :]
        return p.module(nn.LayerNorm, shape, elementwise_affine=affine)(x)
    if kind is nn.RMSNorm:
        return p.module(nn.RMSNorm, x.shape[-1], elementwise_affine=affine)(x)
    if kind is nn.GroupNorm:
        x = x if x.ndim > 1 else x[:, None]
        return p.module(nn.GroupNorm, p.divisor(x.shape[1]), x.shape[1], affine=affine)(x)
    if kind is nn.InstanceNorm1d:
        return p.module(nn.InstanceNorm1d, x.shape[1], affine=affine)(sequences(x))
    x = images(x) if kind is nn.BatchNorm2d else x if x.ndim < 3 else sequences(x)
    layer = p.module(kind, x.shape[1], affine=affine)
    return layer.train(p.chance(0.6))(x)


def _queries(p: Program, x: Tensor) -> tuple[list[Tensor], int]:
    """Queries, keys and values, (N, T, D) each, of one tensor or of two; and a number of heads."""
    x = sequences(x)
    y = x if p.chance(0.7) else p.r.choice([o for o in map(sequences, p.made) if o.shape[::2] == x.shape[::2]])
    if p.chance():
        weights = [p.leaf(x.shape[-1], x.shape[-1]) for _ in range(3)]
        return [F.linear(z, w) for z, w in zip([x, y, y], weights, strict=True)], p.divisor(x.shape[-1])
    return [x, y, y], p.divisor(x.shape[-1])


def _attention_mask(p: Program, n: int, t: int, s: int) -> Tensor | None:
    """Which keys a query may see: all, the earlier ones, those that are no padding, some."""
    kind = p.r.randrange(4)
    if kind == 0:
        return None
    if kind == 1:
        return torch.ones(t, s, dtype=torch.bool).tril()
    if kind == 2:
        return torch.arange(s) <= p.entries(s, n, 1, 1, 1)
    return p.mask(n, 1, t, s) | (torch.arange(s) == 0)


def _attention(p: Program, x: Tensor, *, fused: bool) -> Tensor:
    (q, k, v), heads = _queries(p, x)
    q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in (q, k, v))
    mask = _attention_mask(p, q.shape[0], q.shape[2], k.shape[2])
    if mask is not None and p.chance(0.3):
        mask = torch.where(mask, 0.0, -1e4).double() + p.leaf(1, 1, q.shape[2], k.shape[2])
    if fused:
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and p.chance())
    else:
        scores = torch.einsum("nhtd,nhsd->nhts", q, k) if p.chance() else q @ k.mT / 2
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def _multihead(p: Program, x: Tensor) -> Tensor:
    (q, k, v), heads = _queries(p, x)
    first, weights = p.chance(), p.chance(0.3)
    padding = p.mask(*k.shape[:2]) if p.chance(0.4) else None
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1) if p.chance() else None
    if padding is not None:
        padding[:, 0] = False
    layer = p.module(nn.MultiheadAttention, q.shape[-1], heads, batch_first=first, bias=p.chance())
    q, k, v = (z if first else z.transpose(0, 1) for z in (q, k, v))
    out, seen = layer(q, k, v, key_padding_mask=padding, attn_mask=causal, need_weights=weights)
    return seen if weights and p.chance() else out if first or p.chance(0.3) else out.transpose(0, 1)


def _encoder(p: Program, x: Tensor) -> Tensor:
    x, first = sequences(x), p.chance()
    options = {"batch_first": first, "norm_first": p.chance(), "dropout": 0.0}
    kind = p.r.choice([nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
    layer = p.module(kind, x.shape[-1], p.divisor(x.shape[-1]), 3, **options)
    given = x if first else x.transpose(0, 1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if p.chance() else None
    out = layer(given, mask) if kind is nn.TransformerEncoderLayer else layer(given, given.tanh(), mask)
    return out if first else out.transpose(0, 1)


def _experts(p: Program, x: Tensor) -> Tensor:
    """Each token goes to the expert with the largest score, and comes back."""
    tokens, kind = sequences(x).flatten(0, 1), p.r.randrange(3)
    scores = (tokens @ p.leaf(tokens.shape[1], 2)).softmax(-1)
    best, which = scores.max(-1)
    out = torch.zeros_like(tokens)
    for number in range(2):
        expert = p.module(nn.Linear, tokens.shape[1], tokens.shape[1])
        rows = (which == number).nonzero().squeeze(1)
        results = expert(tokens[rows]).tanh() * best[rows, None]
        if kind == 0:
            out = out.index_add(0, rows, results)
        elif kind == 1:
            out[rows] = results
        else:
            out = out + torch.zeros_like(tokens).index_put((rows,), results)
    return out.view(sequences(x).shape)


def _unpadded(p: Program, x: Tensor) -> Tensor:
    """Tokens that are no padding go through a layer, one after another."""
    x = sequences(x)
    mask = torch.arange(x.shape[1]) <= p.entries(x.shape[1], x.shape[0], 1)
    packed = p.module(nn.Linear, x.shape[-1], x.shape[-1])(x[mask] if p.chance() else x.flatten(0, 1)[mask.flatten()])
    if p.chance():
        packed = packed - packed.cumsum(0) / 9
    if p.chance():
        return torch.zeros_like(x).masked_scatter(mask[..., None].expand_as(x), packed)
    out = torch.zeros_like(x)
    out[mask] = packed
    return out


def _in_windows(p: Program, x: Tensor) -> Tensor:
    """Attention within windows of an image, as if rolled."""
    x = images(x).permute(0, 2, 3, 1)
    n, h, w, d = x.shape
    a, b = p.divisor(h), p.divisor(w)
    rolled = x.roll((-1, 1), (1, 2))
    parts = rolled.view(n, h // a, a, w // b, b, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, a * b, d)
    parts = F.scaled_dot_product_attention(parts, parts, parts @ p.leaf(d, d))
    return parts.view(n, h // a, w // b, a, b, d).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, d).roll((1, -1), (1, 2))


def _turning(p: Program, x: Tensor) -> Tensor:
    """Pairs of entries turn by angles of their positions, as complex numbers or by halves."""
    x = sequences(torch.cat([x, x], -1))
    angle = torch.outer(torch.arange(x.shape[1]).double(), p.leaf(x.shape[2] // 2))
    if p.chance():
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.view_as_real(turned).flatten(-2)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def _losses(p: Program, x: Tensor) -> Tensor:
    """Losses of each entry, or of each row."""
    x, kind = sequences(x), p.r.randrange(11)
    other = p.leaf(*x.shape)
    classes = p.entries(x.shape[1], x.shape[0], x.shape[2])
    if kind < 5:
        make = [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.soft_margin_loss][kind]
        return make(x, other, reduction="none")
    if kind == 5:
        return F.binary_cross_entropy_with_logits(x, other.detach().sigmoid(), p.leaf(1).detach(), reduction="none")
    if kind == 6:
        return F.kl_div(x.log_softmax(-1), other.softmax(-1), reduction="none")
    if kind == 7:
        return F.nll_loss(x.log_softmax(1), classes, reduction="none")
    if kind == 8:
        lengths = torch.full((len(x),), x.shape[1])
        inputs = torch.cat([x, x * 0.5], -1).transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(
            inputs, p.entries(2 * x.shape[2] - 1, len(x), 1) + 1, lengths, lengths * 0 + 1, reduction="none"
        )
    if kind == 9:
        return F.triplet_margin_loss(x, other, x.flip(0), reduction="none")
    return F.gaussian_nll_loss(x, other, x.square() + 0.2, reduction="none")


# --- code beside autograd's own ---------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """Works in numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3 / 5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * ctx.saved_tensors[0].numpy() ** 2 * 0.6)


class Centred(torch.autograd.Function):
    """Mixes rows; one of its results may have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x - x.mean(0), x.mean(0)

    @staticmethod
    def backward(ctx: Any, rest: Tensor | None, mean: Tensor | None) -> Tensor | None:
        assert rest is not None
        out = rest - rest.mean(0)
        return out if mean is None else out + mean / len(out)


class Doubled(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@rowprop.rowwise(saved=(0, None), grads=(0, None))
class Linear(torch.autograd.Function):
    """Row by row, over the last of any number of dimensions."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


@rowprop.rowwise(saved=0, grads=0, outputs=(0, 0))
class Waves(torch.autograd.Function):
    """Row by row, with two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, sine: Tensor, cosine: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return sine * x.cos() - cosine * x.sin()


class Again(torch.autograd.Function):
    """Keeps a function of a tensor, and runs a backward of its own within the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.function(x)
        return torch.autograd.grad(out, x, grad, allow_unused=True)[0], None


def _backward_in_a_hook(p: Program, x: Tensor) -> Tensor:
    """A hook that picks and runs a backward of its own."""
    weight, rows = p.leaf(x.shape[-1]).detach(), p.rows(x)

    def hook(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            own = weight.clone().requires_grad_()
            loss = p.take((x.detach() * own).sin(), rows).square().sum()
        loss.backward()
        assert own.grad is not None
        return grad * own.grad.norm()

    x.register_hook(hook)
    return x


def _hook(p: Program) -> Callable[[Tensor], Tensor | None]:
    """A hook that reads a gradient, scales it, or makes another one of it."""
    name, kind = p.name, p.r.randrange(5)
    return [
        lambda g: p.note(name, g),
        lambda g: g * 0.5,
        lambda g: g.clamp(-0.1, 0.2),
        lambda g: g / (1 + g.norm()),
        lambda g: -g,
    ][kind]


def _hooked(p: Program, x: Tensor) -> Tensor:
    x.register_hook(_hook(p))
    return x if p.chance() else x.sin()


def _hooked_leaf(p: Program, x: Tensor) -> Tensor:
    weight, name = p.leaf(x.shape[-1]).requires_grad_(), p.name
    kind = p.r.randrange(4)
    out = x * weight
    if kind < 2:
        weight.register_hook(_hook(p))
    elif kind == 2:
        weight.register_post_accumulate_grad_hook(lambda w: p.note(name, w.grad))
    else:
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: p.note(name, grads[0]))
        p.once(lambda: node)
    return out


def _hooked_node(p: Program, x: Tensor) -> Tensor:
    name, out = p.name, p.r.choice([torch.tanh, torch.exp, lambda x: x * 2, torch.clone])(x * 0.5)
    if p.chance():
        out.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    else:
        out.grad_fn.register_hook(lambda grads, _: p.note(name, grads[0]))
    return out


def _hooked_module(p: Program, x: Tensor) -> Tensor:
    layer, name, kind = p.module(nn.Linear, x.shape[-1], 2), p.name, p.r.randrange(4)
    if kind == 0:
        layer.register_full_backward_hook(lambda m, given, arrived: p.note(name, arrived[0]))
    elif kind == 1:
        layer.register_full_backward_hook(lambda m, given, arrived: (None if given[0] is None else given[0] * 2,))
    elif kind == 2:
        layer.register_full_backward_pre_hook(lambda m, arrived: (arrived[0] * 0.5,))
    else:
        layer.register_forward_hook(lambda m, given, out: p.take(out, torch.arange(len(out)).flip(0)).tanh())
    return layer(x)


def _hooked_together(p: Program, x: Tensor) -> Tensor:
    name, others = p.name, [x, *[o for o in p.made if o.requires_grad][-2:]]
    mode = p.r.choice(["all", "any"])

    def together(grads: Any) -> None:
        for grad in grads if mode == "all" else [grads]:
            p.note(name, grad)

    register_multi_grad_hook(others, together, mode=mode)
    return x


def _retained(p: Program, x: Tensor) -> Tensor:
    x.retain_grad()
    p.retained.append(x)
    return x


def _cut(p: Program, x: Tensor) -> Tensor:
    """The graph ends here. The gradient is handed over at the end."""
    below = x.detach().requires_grad_()
    p.leaves.append(below)
    if x.requires_grad:
        p.cut.append((x, below))
    return below


def staging() -> AbstractContextManager[Any]:
    """Saved tensors lie elsewhere, as on a disk; each comes back into the same buffer, as a new tensor."""
    stage: dict[Any, Any] = {}

    def pack(x: Tensor) -> Any:
        return x if x.is_leaf and x.requires_grad else x.detach().clone()

    def unpack(kept: Tensor) -> Tensor:
        if kept.requires_grad:
            return kept
        buffer = stage.setdefault(kept.shape, torch.empty(kept.shape, dtype=kept.dtype).numpy())
        buffer[...] = kept.numpy()
        return torch.from_numpy(buffer)

    return saved_tensors_hooks(pack, unpack)


def _staged(p: Program, x: Tensor) -> Tensor:
    with staging():
        for _ in range(p.r.randint(2, 4)):
            x = STAGED[p.r.choice(list(STAGED))](p, x)
    return x


def _saved(p: Program, x: Tensor, hooks: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    with hooks():
        return p.within()(x)


def copying() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.clone())


def narrowing() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(
        lambda x: x.detach().float() if x.is_floating_point() else x,
        lambda x: x.double() if x.is_floating_point() else x,
    )


def _in_pieces(p: Program, x: Tensor) -> Tensor:
    """Layers on each piece of a tensor, and the pieces together again."""
    d = p.r.randrange(x.ndim - 1)
    one, two = p.module(nn.Linear, x.shape[-1], 3), p.module(nn.Linear, 3, 2)
    pieces = one(x).chunk(p.r.choice([2, 4]), d)
    return torch.cat([two(piece) for piece in pieces], d)


def _row_by_row(p: Program, x: Tensor) -> Tensor:
    """A loop over rows, or over whatever lies in the first dimension."""
    layer = p.module(nn.Linear, x.shape[-1], 2)
    if p.chance():
        return torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    return torch.stack([layer(row).tanh() for row in x])


def _split(p: Program, x: Tensor) -> Tensor:
    d = p.dim(x)
    first = p.r.randint(0, x.shape[d])
    a, b = x.split([first, x.shape[d] - first], d)
    return torch.cat([b * 2, a], d) if p.chance() else a if a.numel() else b


def _selective(p: Program, x: Tensor) -> Tensor:
    """A checkpoint that saves the products and runs the rest again."""
    keep = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default
    policies = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    contexts = partial(create_selective_checkpoint_contexts, lambda _, op, *args, **kwargs: policies[op not in keep])
    return checkpoint(p.within(), x, use_reentrant=False, context_fn=contexts)


def _picked_and_written(p: Program, x: Tensor) -> Tensor:
    """Writes after a pick: to what was picked, to what it was picked from."""
    h = x * 1
    out = p.take(h, p.rows(h))
    for written in p.r.choice([[out], [h], [out, h]]):
        WRITES[p.r.choice(sorted(WRITES))](p, VIEWS[p.r.choice(sorted(VIEWS))](p, written))
    p.made.append(h)
    return out


def _moved_in_place(p: Program, x: Tensor) -> Tensor:
    h = x * 1
    p.r.choice([h.transpose_, lambda a, b: h.unsqueeze_(a), lambda a, b: h.swapaxes_(a, b).squeeze_(b)])(
        p.dim(h), p.dim(h)
    )
    return h.tanh_() if p.chance() else h


KINDS: dict[str, dict[str, Step]] = {
    "rows by themselves": {
        "linear": lambda p, x: F.linear(x, p.leaf(p.r.choice([2, 3, x.shape[-1]]), x.shape[-1])),
        "linear with a bias": lambda p, x: F.linear(x, p.leaf(3, x.shape[-1]), p.leaf(3)).tanh(),
        "scaled": lambda p, x: x * p.leaf(x.shape[-1]) + p.leaf(1),
        "gelu": lambda p, x: F.gelu(x),
        "tanh": lambda p, x: x.tanh(),
        "square": lambda p, x: x.square() * 0.3,
        "an activation": lambda p, x: p.r.choice(ACTIVATIONS)(x),
        "prelu": lambda p, x: F.prelu(x, p.leaf(1)),
        "gated": lambda p, x: F.glu(torch.cat([x, x.flip(-1)], -1)),
        "normalized": lambda p, x: F.normalize(x + 0.1, dim=-1),
        "where": lambda p, x: torch.where(p.mask(*x.shape), x, p.leaf(x.shape[-1])),
        "where it is large": lambda p, x: torch.where(x > 0.2, x.square(), x.sin()),
        "masked fill": lambda p, x: x.masked_fill(p.mask(*x.shape[:-1], 1), 0),
        "clamped": lambda p, x: x.clamp(-0.4, 0.8),
        "clamped by tensors": lambda p, x: x.clamp(p.leaf(x.shape[-1]) - 1, p.leaf(1)),
        "of some rows": lambda p, x: x * p.mask(*x.shape[:1], *[1] * (x.ndim - 1)),
        "mapped": lambda p, x: torch.vmap(lambda row: row.tanh() * row.mean())(x),
    },
    "two of them": {
        "sum of two": lambda p, x: x + p.other(x),
        "product of two": lambda p, x: x * p.other(x).sigmoid(),
        "largest of two": lambda p, x: torch.maximum(x, p.other(x)),
        "between two": lambda p, x: torch.lerp(x, p.other(x), p.leaf(1)),
        "product and sum of two": lambda p, x: torch.addcmul(x, p.other(x), p.leaf(x.shape[-1]), value=0.5),
        "quotient of two": lambda p, x: x / (1 + p.other(x).square()),
        "angle of two": lambda p, x: torch.atan2(x, p.other(x) + 0.1),
        "distance of two": lambda p, x: F.pairwise_distance(x, p.other(x) + p.leaf(x.shape[-1])),
        "likeness of two": lambda p, x: F.cosine_similarity(x, p.other(x) + p.leaf(x.shape[-1]), dim=p.dim(x)),
        "broadcast": lambda p, x: x + p.r.choice(p.made),
        "product, broadcast": lambda p, x: x * p.r.choice(p.made).tanh(),
        "of its detached self": lambda p, x: x * x.detach().sigmoid() + p.other(x).detach(),
        "joined": lambda p, x: torch.cat([x, p.other(x)], p.dim(x)),
        "joined to itself turned": lambda p, x: torch.cat([x, x.flip(0)], p.dim(x)),
        "stacked": lambda p, x: torch.stack([x, p.other(x)], p.dim(x)),
    },
    "along a dimension": {
        "sum": lambda p, x: x.sum(p.dim(x), keepdim=p.chance()),
        "mean taken off": lambda p, x: x - x.mean(p.dim(x), keepdim=True),
        "spread": lambda p, x: x / (x.std(p.dim(x), keepdim=True) + 0.5),
        "norm": lambda p, x: x.norm(dim=p.dim(x), keepdim=p.chance()),
        "softmax": lambda p, x: x.softmax(p.dim(x)),
        "log softmax": lambda p, x: x.log_softmax(p.dim(x)),
        "running sum": lambda p, x: x.cumsum(p.dim(x)),
        "running product": lambda p, x: x.cumprod(p.dim(x)),
        "product": lambda p, x: x.prod(p.dim(x), keepdim=p.chance()),
        "running logsumexp": lambda p, x: x.logcumsumexp(p.dim(x)),
        "running largest": lambda p, x: x.cummax(p.dim(x)).values,
        "sorted": lambda p, x: x.sort(p.dim(x), descending=p.chance()).values,
        "topk": lambda p, x: x.topk(p.r.randint(1, x.shape[d := p.dim(x)]), d).values,
        "median": lambda p, x: x.median(p.dim(x)).values,
        "largest": lambda p, x: x.amax(p.dim(x), keepdim=True) - x,
        "smallest, and where": lambda p, x: x.min(p.dim(x)).values,
        "logsumexp": lambda p, x: x.logsumexp(p.dim(x)),
        "spectrum": lambda p, x: torch.fft.rfft(x, dim=p.dim(x)).real,
        "triangle": lambda p, x: x.tril(p.r.randint(-1, 1)),
    },
    "products": {
        "product over any dimension": lambda p, x: p.leaf(2, x.shape[d := p.dim(x)]) @ x.movedim(d, -2),
        "product with weights of a batch": lambda p, x: torch.bmm(
            s := sequences(x), p.leaf(s.shape[0], s.shape[2], 2)
        ),
        "bilinear": lambda p, x: F.bilinear(x, p.other(x), p.leaf(2, x.shape[-1], x.shape[-1])),
        "of all pairs": lambda p, x: torch.einsum("ntd,msd->nmts", x, p.other(x)),
        "of rows": lambda p, x: torch.einsum("ntd,nte->nde", x, p.other(x)),
        "of itself": lambda p, x: (s := sequences(x)).mT @ s,
        "distances": lambda p, x: torch.cdist(x, p.other(x) + p.leaf(x.shape[-1])),
        "equations": lambda p, x: torch.linalg.solve(torch.eye(x.shape[-1]).double() * 3 + p.leaf(1), x.mT),
        "with normalized weights": lambda p, x: p.module(
            lambda *sizes: torch.nn.utils.parametrizations.weight_norm(nn.Linear(*sizes)), x.shape[-1], 2
        )(x),
        "with weights made of it": lambda p, x: (s := sequences(x)) @ (s.mean((0, 1))[:, None] * p.leaf(2)),
        "contracted": lambda p, x: torch.tensordot(x, p.leaf(*x.shape[-2:], 2), 2),
        "with a bias, in one": lambda p, x: torch.addmm(p.leaf(2), x.flatten(0, -2), p.leaf(x.shape[-1], 2)),
    },
    "moves": {
        "turned": lambda p, x: x.transpose(p.dim(x), p.dim(x)),
        "permuted": lambda p, x: x.permute(p.r.sample(range(x.ndim), x.ndim)),
        "in another order in memory": lambda p, x: x.transpose(0, d := p.dim(x)).contiguous().transpose(0, d),
        "flattened": lambda p, x: x.flatten(first := p.dim(x), p.r.randrange(first, x.ndim)),
        "taken apart": lambda p, x: x.unflatten(p.dim(x), (p.r.choice([1, 2, 3]), -1)),
        "as another": lambda p, x: x.reshape(p.r.choice([o.shape for o in p.made if o.numel() == x.numel()])),
        "rolled": lambda p, x: x.roll((p.r.randint(-2, 2), 1), (p.dim(x), 0)),
        "reversed": lambda p, x: x.flip(p.dim(x)),
        "sliced": lambda p, x: x.narrow(d := p.dim(x), begin := p.r.randrange(x.shape[d]), x.shape[d] - begin),
        "every other": lambda p, x: x.transpose(0, d := p.dim(x))[::2].transpose(0, d),
        "one of all": lambda p, x: x.unbind(d := p.dim(x))[p.r.randrange(x.shape[d])],
        "in reversed order": lambda p, x: torch.stack(x.unbind(d := p.dim(x))[::-1], d),
        "split": _split,
        "in pieces": _in_pieces,
        "row by row": _row_by_row,
        "a chunk": lambda p, x: x.chunk(2, p.dim(x))[-1],
        "padded": lambda p, x: F.pad(x, (0, 0, p.r.randint(-1, 1), p.r.randint(0, 1))),
        "reflected": lambda p, x: F.pad(x, (1, 1), mode=p.r.choice(["reflect", "replicate", "circular"])),
        "repeated": lambda p, x: x.repeat_interleave(2, p.dim(x)),
        "tiled": lambda p, x: x.repeat([2 if d == p.r.randrange(x.ndim) else 1 for d in range(x.ndim)]),
        "expanded": lambda p, x: x.unsqueeze(d := p.dim(x)).expand(*x.shape[:d], 2, *x.shape[d:]),
        "expanded from one": lambda p, x: x.narrow(d := p.dim(x), 0, 1).expand_as(x) + x.narrow(d, -1, 1),
        "windows": lambda p, x: x.unfold(p.dim(x), 2, 1).mean(-1),
        "strided": lambda p, x: x.contiguous().as_strided((x.shape[0], x.numel() // len(x)), (x.numel() // len(x), 1)),
        "with a new dimension": lambda p, x: x[(*[slice(None)] * p.r.randint(0, x.ndim), None, ...)],
        "indexed by all sorts": lambda p, x: x[
            p.r.choice([slice(None), slice(1, None), slice(None, None, 2), None]), ..., p.entries(x.shape[-1], 2)
        ],
        "to the experts": _experts,
        "without padding": _unpadded,
        "diagonal": lambda p, x: x.diagonal(0, *p.r.sample(range(x.ndim), 2)),
        "chosen": lambda p, x: x.index_select(d := p.dim(x), p.entries(x.shape[d], p.r.randint(1, x.shape[d] + 1))),
        "chosen in two dimensions": lambda p, x: x[p.entries(x.shape[0], 3), p.entries(x.shape[1], 3)],
        "chosen in the second": lambda p, x: x[:, p.entries(x.shape[1], 2)],
        "chosen by a mask": lambda p, x: x[p.mask(*x.shape[: p.r.randint(1, x.ndim)])],
        "masked": lambda p, x: x.masked_select(p.mask(*x.shape)),
        "gathered": lambda p, x: x.gather(d := p.dim(x), p.entries(x.shape[d], *x.shape)),
        "taken along": lambda p, x: x.take_along_dim(x.argsort(d := p.dim(x)), d),
        "scattered": lambda p, x: torch.zeros_like(x).scatter_add(d := p.dim(x), p.entries(x.shape[d], *x.shape), x),
        "scattered over others": lambda p, x: p.other(x).scatter(
            d := p.dim(x), p.r.choice([x.argsort(d), x.argsort(d).narrow(d, 0, 1)]), x
        ),
        "index put": lambda p, x: p.leaf(*x.shape).index_put(
            (p.entries(x.shape[0], len(x)),), x, accumulate=True
        ),
        "added to rows": lambda p, x: p.leaf(*x.shape).index_add(d := p.dim(x), p.entries(x.shape[d], x.shape[d]), x),
        "masked scatter": lambda p, x: p.leaf(*x.shape).masked_scatter(p.mask(*x.shape), x),
    },
    "writes": {
        "written to": _written,
        "written to through a view": _written,
        "written to again": _written,
        "step by step": _step_by_step,
        "moved in place": _moved_in_place,
        "picked and written to": _picked_and_written,
        "in the place of rows": lambda p, x: x.clone().index_copy_(
            0, torch.tensor(p.r.sample(range(len(x)), len(x))), p.other(x)
        ),
    },
    "recurrent": {
        "recurrent": _recurrent,
        "recurrent again": _recurrent,
        "cells": _cells,
    },
    "convolutions": {
        "convolution": lambda p, x: _convolved(p, x, 1),
        "convolution of images": lambda p, x: _convolved(p, x, 2),
        "transposed convolution": lambda p, x: _convolved(p, x, 1, turned=True),
        "transposed convolution of images": lambda p, x: _convolved(p, x, 2, turned=True),
        "sampled": lambda p, x: F.grid_sample(i := images(x), p.leaf(len(i), 2, 2, 2).tanh(), align_corners=False),
        "shuffled": lambda p, x: F.pixel_shuffle(torch.cat([images(x)] * 4, 1), 2),
        "patches": lambda p, x: F.unfold(images(x), p.r.choice([1, 2])),
    },
    "pooling": {
        "max pool": lambda p, x: F.max_pool1d(sequences(x), 2, 1),
        "average pool": lambda p, x: F.avg_pool1d(sequences(x), 2, 1, padding=p.r.choice([0, 1])),
        "max pool of images": lambda p, x: F.max_pool2d(images(x), (1, 2), 1),
        "average pool of images": lambda p, x: F.avg_pool2d(images(x), p.r.choice([1, 2]), 1),
        "adaptive average": lambda p, x: F.adaptive_avg_pool1d(sequences(x), p.r.choice([1, 2])),
        "adaptive average of images": lambda p, x: F.adaptive_avg_pool2d(images(x), p.r.choice([1, 2])),
        "adaptive max": lambda p, x: F.adaptive_max_pool1d(sequences(x), p.r.choice([1, 2])),
        "adaptive max of images": lambda p, x: F.adaptive_max_pool2d(images(x), (1, 2)),
        "enlarged": lambda p, x: F.interpolate(sequences(x), scale_factor=2, mode=p.r.choice(["nearest", "linear"])),
        "enlarged images": lambda p, x: F.interpolate(images(x), size=3, mode=p.r.choice(["nearest", "bilinear"])),
    },
    "norms": {
        "layer norm": lambda p, x: F.layer_norm(x, x.shape[-1:], p.leaf(x.shape[-1])),
        **{
            name: partial(_normed, kind=kind)
            for name, kind in {
                "layer norm of more": nn.LayerNorm,
                "rms norm": nn.RMSNorm,
                "group norm": nn.GroupNorm,
                "instance norm": nn.InstanceNorm1d,
                "batch norm": nn.BatchNorm1d,
                "batch norm of images": nn.BatchNorm2d,
            }.items()
        },
    },
    "attention": {
        "attention": lambda p, x: (x @ x.mT).softmax(-1) @ x,
        "attention by hand": lambda p, x: _attention(p, x, fused=False),
        "fused attention": lambda p, x: _attention(p, x, fused=True),
        "multi-head attention": _multihead,
        "transformer layer": _encoder,
        "attention in windows": _in_windows,
        "turned positions": _turning,
    },
    "embeddings": {
        "embedding": lambda p, x: x + F.embedding(p.entries(5, *x.shape[:-1]), p.leaf(5, x.shape[-1])),
        "embedding with padding": lambda p, x: x
        * F.embedding(p.entries(4, *x.shape[:-1]), p.leaf(4, x.shape[-1]), padding_idx=0),
        "embedding of positions": lambda p, x: (s := sequences(x)) + p.leaf(s.shape[1], s.shape[2]),
        "bag of embeddings": lambda p, x: F.embedding_bag(
            p.entries(5, len(x), 3), p.leaf(5, x.shape[-1]), mode=p.r.choice(["sum", "mean", "max"])
        )
        + x.flatten(1).sum(1, keepdim=True),
        "similar to embeddings": lambda p, x: x @ p.leaf(4, x.shape[-1]).T,
    },
    "losses": {"losses": _losses, "other losses": _losses},
    "custom functions": {
        "cube": lambda p, x: Cube.apply(x),
        "centred": lambda p, x: Centred.apply(x)[0],
        "centred, and the mean": lambda p, x: (lambda both: both[0] * both[1].sin())(Centred.apply(x)),
        "doubled in place": lambda p, x: Doubled.apply(x * 1),
        "declared linear": lambda p, x: Linear.apply(x, p.leaf(x.shape[-1], 2)),
        "declared waves": lambda p, x: (lambda both: both[0] + both[1].square())(Waves.apply(x)),
        "one declared wave": lambda p, x: Waves.apply(x)[p.r.randrange(2)],
    },
    "picks": {
        "picked": lambda p, x: p.take(x, p.rows(x)),
        "picked of the second": lambda p, x: p.take(x.transpose(0, 1), p.rows(x.transpose(0, 1))),
        "picked and put back": lambda p, x: (
            lambda rows: x.index_add(0, rows, p.take(x, rows).tanh())
        )(p.entries(len(x), 2)),
        "picked twice": lambda p, x: torch.cat([p.take(x, p.entries(len(x), 2)), p.take(x, p.entries(len(x), 1))]),
    },
    # What follows is not done within other steps.
    "checkpoints": {
        "checkpoint": lambda p, x: checkpoint(p.within(), x, use_reentrant=False),
        "checkpoint of more": lambda p, x: checkpoint(
            lambda x, one, two: two(one(x)), x, p.within(), p.within(), use_reentrant=False
        ),
        "selective checkpoint": _selective,
        "backward of its own": lambda p, x: Again.apply(x, p.within()),
        "reentrant checkpoint": lambda p, x: checkpoint(p.within(), x, use_reentrant=True),
    },
    "hooks": {
        "hook": _hooked,
        "hook on a leaf": _hooked_leaf,
        "hook on a node": _hooked_node,
        "hook on a module": _hooked_module,
        "hook on several": _hooked_together,
        "retained gradient": _retained,
        "backward in a hook": _backward_in_a_hook,
    },
    "saved tensors": {
        "copied": partial(_saved, hooks=copying),
        "narrowed": partial(_saved, hooks=narrowing),
        "on the host": partial(_saved, hooks=save_on_cpu),
        "in one buffer": _staged,
    },
    "many picks": {
        "a pick in each step": partial(_cells, pick=True),
        "a loss on the way": lambda p, x: (p.lose(x), x)[1],
        "two losses on the way": lambda p, x: (p.lose(x), p.lose(x.sin()), x)[2],
    },
    "cuts": {
        "cut": _cut,
        "detached": lambda p, x: x.detach() + p.r.choice(p.made).sum(),
    },
    "random numbers": {
        "dropout": lambda p, x: F.dropout(x, 0.3),
        "dropout of channels": lambda p, x: F.dropout1d(sequences(x), 0.4),
        "random slopes": lambda p, x: F.rrelu(x, training=True),
    },
}  # fmt: skip
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    *(F.relu, F.silu, F.elu, F.softplus, F.mish, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.softsign),
    *(torch.sigmoid, torch.sin, torch.abs, torch.erf, F.tanhshrink, F.softshrink, F.celu, F.selu, F.relu6),
]
STEPS = {name: step for steps in KINDS.values() for name, step in steps.items()}
KIND_OF = {name: kind for kind, steps in KINDS.items() for name in steps}
OUTER = ("checkpoints", "hooks", "saved tensors", "many picks", "cuts", "random numbers")
INNER = {name: step for kind, steps in KINDS.items() if kind not in OUTER for name, step in steps.items()}
STAGED: dict[str, Step] = {name: STEPS[name] for name in ("linear", "tanh", "gelu", "softmax", "running sum")}
"""Steps that save no two activations of one shape: one buffer holds them."""
PROCESS_WIDE = "counted", "with anomalies"
"""Endings under modes that torch has for all threads."""
ENDINGS = [
    *["backward"] * 3,
    *("grad", "grad in the middle", "twice", "one by one", "plain first", "of some", "together", "cleared between"),
    *("batched", *PROCESS_WIDE),
]


def build(seed: int, take: Take, left_out: set[str] | None = None) -> Program:
    """Run the forward of a program.

    Args:
        seed: Its number.
        take: ``rowprop.pick`` or plain indexing.
        left_out: See :class:`Program`; None for a run that finds them.

    Returns:
        The program, ready for its backward.
    """
    p = Program(seed, take, set() if left_out is None else left_out)
    p.r = Random(seed)
    p.generator.manual_seed(seed)
    n, t, d = (p.r.choice(sizes) for sizes in ([2, 3, 4, 5, 6], [1, 2, 3, 4, 6], [1, 2, 3, 4]))
    p.made = [p.leaf(n, t, d) for _ in range(p.r.randint(1, 2))]
    p.made[0].requires_grad_()
    steps = [p.r.choice(list(KINDS[p.r.choice(list(KINDS))])) for _ in range(p.r.randint(3, 9))]
    picks, p.ending = p.r.randint(1, 3), p.r.choice(ENDINGS)
    for number, name in enumerate([*steps, *["losses of rows"] * picks]):
        kept = len(p.losses), len(p.leaves), len(p.cut)
        try:
            p.run(f"{number}: {name}", STEPS.get(name, Program.lose))
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, AttributeError):
            if left_out is not None:
                raise
            p.left_out.add(f"{number}: {name}")
            del p.losses[kept[0] :], p.leaves[kept[1] :], p.cut[kept[2] :]
    if "reentrant checkpoint" in steps and p.ending in ("grad", "grad in the middle", "of some", "batched"):
        p.ending = "backward"  # torch refuses the others
    return p


def backward(p: Program) -> list[Tensor | None]:
    """Run the backward of a program; returns its losses, the gradients of its leaves and what its hooks noted."""
    losses = [loss for loss in p.losses if loss.requires_grad]
    leaves = [leaf for leaf in p.leaves if leaf.requires_grad]
    if not losses:
        return []
    total, found, ending = torch.stack(losses).sum(), list[Tensor | None](), p.ending
    if ending == "grad":
        found += torch.autograd.grad(total, leaves, allow_unused=True)
    elif ending == "grad in the middle":
        middle = [x for x in p.made if x.requires_grad][:: 1 + p.seed % 2]
        grads = torch.autograd.grad(total, middle, allow_unused=True, retain_graph=True)
        total.backward(retain_graph=True)
        for x, grad in zip(middle, grads, strict=True):
            if grad is not None and x.grad_fn is not None:  # a gradient that also flows on may come sliced
                found.append(grad.clone())
                x.backward(grad, retain_graph=True)
    elif ending == "of some":
        total.backward(inputs=leaves[::2])
    elif ending == "one by one":
        for loss in losses:
            loss.backward(retain_graph=True)
    elif ending == "batched":
        each = torch.eye(len(losses)).double()
        found += torch.autograd.grad(torch.stack(losses), leaves, each, is_grads_batched=True, allow_unused=True)
    elif ending == "counted":
        with FlopCounterMode(display=False):
            total.backward(retain_graph=bool(p.cut))
    elif ending == "with anomalies":
        with torch.autograd.set_detect_anomaly(True):
            total.backward(retain_graph=bool(p.cut))
    elif ending == "together":
        torch.autograd.backward(losses, [torch.full_like(loss, 0.5) for loss in losses])
    else:
        if ending == "plain first":
            sum(x.sum() for x in p.made if x.requires_grad).backward(retain_graph=True)
        elif ending in ("twice", "cleared between"):
            total.backward(retain_graph=True)
        if ending == "cleared between":
            found += [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        total.backward(retain_graph=bool(p.cut))
    if ending not in ("grad", "of some", "grad in the middle", "together", "batched"):
        for above, below in reversed(p.cut):
            if below.grad is not None:
                above.backward(below.grad, retain_graph=True)
    noted = [gradient for name in sorted(p.noted) for gradient in p.noted[name]]
    return [*p.losses, *found, *(leaf.grad for leaf in leaves), *(x.grad for x in p.retained), *noted]


def indexed(x: Tensor, rows: Any) -> Tensor:
    return x[rows]


def picked(x: Tensor, rows: Any) -> Tensor:
    """Pick rows, one time of three by a selection."""
    if rows.dtype == torch.bool and rows.shape == x.shape[:1] and rows.sum() % 3 == 1:
        chosen = rows.nonzero().squeeze(1)
        rows = rowprop.Selection(chosen, torch.ones(len(chosen)), len(rows))
    return rowprop.pick(x, rows, batchnorm="exact")


def plain(seed: int, without: set[str] | frozenset[str] = frozenset()) -> tuple[Program, list[Tensor | None]] | None:
    """A program under plain indexing: the steps that it can do, and its results; None if it is no program."""
    try:
        p = build(seed, indexed)
        if p.left_out or without:  # what a failed step has left behind is no part of the program
            p = build(seed, indexed, p.left_out | set(without))
        results = backward(p)
        fit = bool(results) and all(x is None or bool(torch.isfinite(x).all()) for x in results)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError, AttributeError):
        return None  # as an in-place op on what another op has saved
    return (p, results) if fit else None


@dataclass
class Outcome:
    """What came of a program: its fault if there is one, its steps, and what :func:`rowprop.watch` told."""

    fault: str | None = None
    wrong: bool = False
    steps: list[str] = field(default_factory=list)
    sliced: bool = False
    densified: bool = False


def different(expected: list[Tensor | None], found: list[Tensor | None], tolerance: float = TOLERANCE) -> str | None:
    """How results differ; None if they do not."""
    if len(expected) != len(found):
        return f"{len(found)} results came, not {len(expected)}"
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            if one is not other:
                return f"result {place} of {len(found)} is {'None' if other is None else 'not None'}"
            continue
        if type(other) not in (Tensor, nn.Parameter):
            return f"result {place} of {len(found)} is a {type(other).__name__}"
        size = 1 + float(one.detach().abs().max()) if one.numel() else 1
        off = float((one - other).detach().abs().max()) if one.shape == other.shape and one.numel() else 0
        if one.shape != other.shape or not off < tolerance * size:
            return f"result {place} of {len(found)} is another one, by {off / size:.0e}"
    return None


def check(seed: int, without: set[str] | frozenset[str] = frozenset()) -> Outcome:
    """Compare a program under picks with the same under plain indexing."""
    reference = plain(seed, without)
    if reference is None:
        return Outcome()
    first, expected = reference
    outcome = Outcome(steps=[*first.steps, *first.inner])
    with rowprop.watch() as report:
        try:
            tolerance = NARROWED if any(step.endswith("narrowed") for step in outcome.steps) else TOLERANCE
            fault = different(expected, backward(build(seed, picked, first.left_out)), tolerance)
            outcome.wrong = fault is not None
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
    outcome.fault = fault
    outcome.sliced, outcome.densified = bool(report.sliced), bool(report.densified)
    return outcome


def compare(seed: int) -> str | None:
    """What is wrong with a program under picks, and the steps that it takes; None if nothing is."""
    found = check(seed)
    if found.fault is None:
        return None
    without = set[str]()
    for name in reversed(found.steps):
        if ": " in name and (fewer := check(seed, {*without, name})).fault is not None:
            without.add(name)
            found = fewer
    return f"program {seed}: {found.fault}\n  {' -> '.join(found.steps)}"


def some(first: int, last: int) -> tuple[list[str], Counter[str], Counter[str]]:
    """Run programs; returns the faults, how many programs there were of each sort, and how often a step was done."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faults, sorts, steps = list[str](), Counter[str](), Counter[str]()
    for seed in range(first, last):
        found = check(seed)
        sorts["run"] += bool(found.steps)
        sorts["sliced"] += found.sliced
        sorts["not densified"] += found.sliced and not found.densified
        steps.update({name.partition(": ")[2] or name for name in found.steps})
        if found.fault is not None:
            sorts["wrong" if found.wrong else "errors"] += 1
            faults.append(compare(seed) or f"program {seed}: a fault that is gone when it runs again")
    return faults, sorts, steps


def main(first: int, last: int, jobs: int = 1) -> int:
    """Run programs, print each fault and a summary; the number of faults."""
    begun, every, sorts, steps = time.perf_counter(), 0, Counter[str](), Counter[str]()
    firsts = range(first, last, 100)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for faults, some_sorts, some_steps in pool.map(some, firsts, [min(f + 100, last) for f in firsts]):
            every += len(faults)
            sorts += some_sorts
            steps += some_steps
            for fault in faults:
                print(fault, flush=True)
    for kind, names in KINDS.items():
        print(f"{kind}: " + ", ".join(f"{name} {steps[name]}" for name in names))
    print(
        f"torch {torch.__version__}: {last - first} programs, {sorts['run']} run, {sorts['wrong']} wrong, "
        f"{sorts['errors']} errors; {sorts['sliced']} sliced something, {sorts['not densified']} of them densified "
        f"nothing; {time.perf_counter() - begun:.0f} s"
    )
    return every


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", type=int, nargs="*", default=[1000], help="how many, or the first and the end")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    sys.exit(main(*given.numbers, given.jobs) if len(given.numbers) == 2 else main(0, given.numbers[0], given.jobs))
