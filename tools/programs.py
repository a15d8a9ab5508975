"""Random programs under picks, and the same programs under plain indexing.

The audit tries each rule by itself. A program is some random steps in a row: products, moves of rows and tokens, ops
that mix them, recurrent, convolution, norm and attention layers, writes in place through views, checkpoints, hooks,
custom functions. It picks rows or tokens at many places, and gradients of other rows in other layouts meet on their way
back. Values, the gradients of all leaves, and what hooks see are those of plain indexing.

``python tools/programs.py 1000`` runs programs 0 to 999; ``python tools/programs.py 7 8`` runs number 7.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import rowprop
from picks import Take, indexed, saving

REFUSED = RuntimeError, IndexError, ValueError, TypeError, AssertionError, AttributeError
"""What a step raises that cannot be done: it is left out."""
LARGEST = 2500
"""Entries of a tensor. An op whose result has more is left out."""
TOLERANCE = 1e-9
"""Of the largest entry, or of 1."""
NARROWED = 1e-6
"""The same where saved tensors were rounded to float32: torch has two formulas for the gradient of a running product,
which then differ."""


@dataclass
class Program:
    """One run of a program."""

    seed: int  # its number; everything but ``take`` follows from it
    take: Take  # picks rows, or indexes them
    left_out: set[str] = field(default_factory=set)  # names of steps that fail under plain indexing, and so in no run
    made: list[Tensor] = field(default_factory=list)  # the tensors so far
    leaves: list[Tensor] = field(default_factory=list)  # the inputs and the parameters
    losses: list[Tensor] = field(default_factory=list)  # one number for each place where rows were picked for a loss
    retained: list[Tensor] = field(default_factory=list)
    cut: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # see :func:`cut`
    noted: dict[str, list[Tensor]] = field(default_factory=dict)  # what hooks saw of gradients, by step
    steps: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)  # steps within steps
    ending: str = ""
    given: list[Any] = field(default_factory=list)  # what the present step has made, see :meth:`once`
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
        order = self.r.sample(range(len(shape)), len(shape)) if self.chance(0.3) else list(range(len(shape)))
        needs, tied = self.chance(6 / 7), self.r.random()

        def make() -> Tensor:
            same = [x for x in self.leaves if x.shape == shape]
            if same and tied < 0.2:
                return same[int(tied * 5 * len(same))]
            values = self.randn(*[shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
            self.leaves.append(values.requires_grad_(needs))
            return values

        return self.once(make)

    def module(self, make: Callable[..., nn.Module], *args: Any, **options: Any) -> Any:

        def double() -> nn.Module:
            layer = make(*args, **options).double()
            for parameter in layer.parameters():
                parameter.data = self.randn(*parameter.shape) * 0.4
                self.leaves.append(parameter)
            return layer

        return self.once(double)

    def chance(self, share: float = 0.5) -> bool:
        return self.r.random() < share

    def one(self, *choices: Any) -> Any:
        return self.r.choice(choices)

    def like(self, x: Tensor) -> Tensor:
        """A tensor of the same shape, perhaps the same one."""
        return self.one(*[other for other in self.made if other.shape == x.shape])

    def any(self) -> Tensor:
        return self.one(*self.made)

    def dim(self, x: Tensor) -> int:
        return self.r.randrange(max(1, x.ndim))

    def divisor(self, size: int) -> int:
        return self.one(*[d for d in range(1, size + 1) if size % d == 0])

    def below(self, size: int, *shape: int) -> Tensor:
        return torch.tensor([self.r.randrange(size) for _ in range(prod(shape))]).view(shape)

    def mask(self, *shape: int) -> Tensor:
        share = self.one(0.2, 0.5, 0.8)
        return torch.tensor([self.chance(share) for _ in range(prod(shape))]).view(shape)

    def shuffled(self, x: Tensor, d: int = 0) -> Tensor:
        """The places along a dimension, in any order."""
        return torch.tensor(self.r.sample(range(x.shape[d]), x.shape[d]))

    def rows(self, x: Tensor) -> Tensor:
        """Rows to pick: indices, indices that repeat, a mask of rows, of tokens, or of more."""
        n, kind = len(x), self.r.randrange(6)
        if kind < 2:
            return self.shuffled(x)[: self.r.randint(1, n)]
        if kind == 2:
            return self.below(n, self.r.randint(1, n + 1))
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
            classes = self.below(x.shape[-1], *x.shape[:-1])
            if self.chance():
                classes[self.mask(*classes.shape)] = -100
            x = F.cross_entropy(x.movedim(-1, 1), classes, reduction="none", label_smoothing=self.one(0, 0.1))
        taken = self.take(x, self.rows(x))
        how = self.r.randrange(5)
        if how == 0 and taken.numel():
            loss = taken.mean()
        elif how == 1 and taken.numel():
            loss = taken.flatten().logsumexp(0)
        else:
            loss = (taken * self.randn(*taken.shape)).sum() + taken.square().sum() / 5
        self.losses.append(loss)
        return x

    def note(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.noted.setdefault(name, []).append(gradient.clone())

    def run(self, name: str, step: Step) -> None:
        """One step on one of the last tensors."""
        self.name, self.r, self.given, self.at = name, Random(f"{self.seed}/{name}"), [], 0
        if name in self.left_out:
            return
        torch.manual_seed(number := self.r.randrange(2**31))
        self.generator.manual_seed(number)
        out = step(self, self.made[-1 - min(len(self.made) - 1, int(self.r.expovariate(1)))])
        if not 0 < out.numel() <= LARGEST or not torch.isfinite(out).all() or out.detach().abs().max() > 1e3:
            raise ValueError("no result to go on with")
        self.made.append(out)
        self.steps.append(name)

    def within(self) -> Callable[[Tensor], Tensor]:
        """A function of a tensor that does a random step, and does the same when it is called again."""
        name, seed = self.one(*INNER), self.r.random()
        given, made = self.once(list[Any]), list(self.made)
        self.inner.append(name)
        return lambda x: INNER[name](replace(self, r=Random(seed), given=given, at=0, made=made), x)


Step = Callable[[Program, Tensor], Tensor]


def sequences(x: Tensor) -> Tensor:
    """Any tensor as (N, T, D)."""
    return x.view_as(x)[(..., *[None] * (3 - x.ndim))] if x.ndim < 3 else x.flatten(1, -2)


def images(x: Tensor) -> Tensor:
    """Any tensor as (N, C, H, W)."""
    return x if x.ndim == 4 else sequences(x)[:, None]


def steps_of(text: str) -> dict[str, Step]:
    """Steps, each named by its expression; they stand on lines or between semicolons.

    ``p`` is the program and ``x`` a tensor, ``d`` one of its dimensions, ``w`` the size of the last, ``s`` and ``i``
    are ``x`` as sequences and as images.
    """
    found: dict[str, Step] = {}
    for expression in filter(None, map(str.strip, re.split("[\n;]", text))):
        do = eval(f"lambda p, x, d, w, s, i: {expression}", globals())
        found[expression] = lambda p, x, do=do: do(p, x, p.dim(x), [1, *x.shape][-1], sequences(x), images(x))
    return found


# --- writes in place --------------------------------------------------------------------------------------------------

VIEWS = steps_of("""x; x.transpose(d, p.dim(x)); x.flatten(0, 1); x.select(d, 0); x[..., : max(1, w - 1)]; x[:, ::2]
x.chunk(2, d)[0]; x.unsqueeze(d); x[p.r.randrange(len(x))]; x[1:3]; x[1::2, ..., 0]; x.transpose(0, d)[-1]""")
WRITES = steps_of("""
x.mul_(2); x.zero_(); x.tanh_(); x.relu_(); x.clamp_(-0.5, 0.7); x.add_(x.detach().flip(0)); x.cumsum_(d)
x.add_(p.any().expand_as(x), alpha=0.5); x.mul_(p.any().expand_as(x)); x.copy_(p.any().expand_as(x))
x.div_(1 + p.any().detach().abs().mean()); x.lerp_(p.any().expand_as(x), 0.3)
x.__setitem__(p.below(len(x), 2), 0); x.__setitem__(p.mask(*x.shape[: p.r.randint(1, x.ndim)]), 0.5)
x.index_fill_(0, p.below(len(x), 1), 0); x.masked_fill_(p.mask(len(x), *[1] * (x.ndim - 1)), 0)
x.index_add_(0, p.below(len(x), len(x)), x.detach() + p.made[0].sum()); x[1:].copy_(x[:-1].clone())
x.scatter_(d, x.argsort(d).narrow(d, 0, 1), p.any().expand_as(x)); x.__setitem__(slice(None), x.flip(d).clone())
x.index_put_((p.below(len(x), 2),), p.any().sum(), accumulate=True)
x.masked_scatter_(p.mask(*x.shape), p.any().expand_as(x).clone())
x[:1].copy_(p.take(p.made[0].expand(2, *p.made[0].shape), p.below(2, 1)).mean())
""")


def write(p: Program, x: Tensor) -> None:
    view, change = (p.one(*steps.values()) for steps in (VIEWS, WRITES))
    change(p, view(p, x))


def written(p: Program, x: Tensor) -> Tensor:
    h = p.one(lambda: x * 1, lambda: torch.zeros_like(x), lambda: x.transpose(0, -1).clone().transpose(0, -1))()
    for _ in range(p.r.randint(1, 2)):
        write(p, h)
    return h


COMPLEX_VIEWS = steps_of("""x.real; x.imag if x.is_complex() else x; x.conj(); x.transpose(0, -1); x[1:]; x[..., 0]""")


def spectrum(p: Program, x: Tensor) -> Tensor:
    """A write to a view of a view of complex numbers."""
    view = h = torch.fft.fft(x)
    for _ in range(2):
        view = p.one(*COMPLEX_VIEWS.values())(p, view)
    p.one(view.mul_, view.fill_)(0.5)
    return h.real + 2 * h.imag


def picked_and_written(p: Program, x: Tensor) -> Tensor:
    """Writes after a pick: to what was picked, to what it was picked from."""
    h = x * 1
    out = p.take(h, p.rows(h))
    for each in p.one([out], [h], [out, h]):
        write(p, each)
    p.made.append(h)
    return out


def step_by_step(p: Program, x: Tensor, d: int) -> Tensor:
    """A buffer, filled along one of its dimensions."""
    out = torch.zeros_like(x.movedim(d, 0)) if p.chance() else torch.zeros_like(x).movedim(d, 0)
    state = x.select(d, 0).tanh()
    for t in range(x.shape[d]):
        out[t] = state = (state + x.select(d, t)).sin()
    return out.movedim(0, d) if p.chance() else out


# --- layers -----------------------------------------------------------------------------------------------------------


def recurrent(p: Program, s: Tensor) -> Tensor:
    kind, first, both = p.one(nn.RNN, nn.GRU, nn.LSTM), p.chance(), p.chance(0.3)
    layers, size = p.one(1, 1, 2), p.one(1, 2, 3)
    less = {"proj_size": size - 1} if kind is nn.LSTM and size > 1 and p.chance(0.2) else {}
    options = {"bias": p.chance(0.8), "batch_first": first, "bidirectional": both, **less}
    layer, state = p.module(kind, s.shape[-1], size, layers, **options), None
    if p.chance(0.3) and not less:
        begun = tuple(p.leaf(layers * (1 + both), len(s), size) for _ in range(2))
        state = begun if kind is nn.LSTM else begun[0]
    given: Any = s if first else s.transpose(0, 1)
    if packed := p.chance(0.2):
        given = pack_padded_sequence(given, p.below(s.shape[1], len(s)) + 1, first, enforce_sorted=False)
    out, last = layer(given, state)
    if packed:
        out = pad_packed_sequence(out, first)[0]
    if p.chance(0.3):
        return (p.one(*last) if kind is nn.LSTM else last).transpose(0, 1)
    return out if first or p.chance(0.3) else out.transpose(0, 1)


def cells(p: Program, s: Tensor, *, pick: bool = False) -> Tensor:
    """A loop over time, perhaps with a pick in each step."""
    rare, state, out = p.chance(0.3), None, []
    cell = p.module(p.one(nn.RNNCell, nn.GRUCell, nn.LSTMCell), s.shape[-1], p.one(1, 2, 3))
    for now in s.unbind(1):
        state = cell(now, state)
        out.append(state[0] if isinstance(state, tuple) else state)
        if pick and not (rare and p.chance()):
            p.lose(out[-1])
    return torch.stack(out, p.one(0, 1))


def convolved(p: Program, x: Tensor, kind: type[nn.Module]) -> Tensor:
    groups, size = p.divisor(x.shape[1]) if p.chance(0.3) else 1, p.one(1, 2, 3)
    options = {"padding": p.one(0, 1) if size > 1 else 0, "dilation": p.one(1, 1, 1, 1, 2), "bias": p.chance()}
    channels = groups * p.one(1, 2)
    return p.module(kind, x.shape[1], channels, size, stride=p.one(1, 1, 2), groups=groups, **options)(x)


def queries(p: Program, s: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Queries, keys and values, (N, T, D) each, of one tensor or of two; and a number of heads."""
    other = s if p.chance(0.7) else p.one(*[o for o in map(sequences, p.made) if o.shape[::2] == s.shape[::2]])
    q, k, v = s, other, other
    if p.chance():
        q, k, v = (F.linear(z, p.leaf(s.shape[-1], s.shape[-1])) for z in (q, k, v))
    return q, k, v, p.divisor(s.shape[-1])


def attention(p: Program, s: Tensor, *, fused: bool) -> Tensor:
    *parts, heads = queries(p, s)
    q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in parts)
    n, times, keys = len(q), q.shape[2], k.shape[2]
    mask = p.one(  # which keys a query may see: all, the earlier ones, those that are no padding, some
        None,
        torch.ones(times, keys, dtype=torch.bool).tril(),
        torch.arange(keys) <= p.below(keys, n, 1, 1, 1),
        p.mask(n, 1, times, keys) | (torch.arange(keys) == 0),
    )
    if mask is not None and p.chance(0.3):
        mask = torch.where(mask, 0.0, -1e4).double() + p.leaf(1, 1, times, keys)
    if fused:
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and p.chance())
    else:
        scores = torch.einsum("nhtd,nhsd->nhts", q, k) if p.chance() else q @ k.mT / 2
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1) @ v
    return out.transpose(1, 2).flatten(2)


def later(times: int, keys: int) -> Tensor:
    return torch.ones(times, keys, dtype=torch.bool).triu(1)


def multihead(p: Program, s: Tensor) -> Tensor:
    q, k, v, heads = queries(p, s)
    first, weights, causal = p.chance(), p.chance(0.3), later(q.shape[1], k.shape[1]) if p.chance() else None
    padding = p.mask(*k.shape[:2]) & (torch.arange(k.shape[1]) > 0) if p.chance(0.4) else None
    layer = p.module(nn.MultiheadAttention, q.shape[-1], heads, batch_first=first, bias=p.chance())
    q, k, v = (z if first else z.transpose(0, 1) for z in (q, k, v))
    out, seen = layer(q, k, v, key_padding_mask=padding, attn_mask=causal, need_weights=weights)
    return seen if weights and p.chance() else out if first or p.chance(0.3) else out.transpose(0, 1)


def transformer(p: Program, s: Tensor) -> Tensor:
    first, kind = p.chance(), p.one(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    options = {"batch_first": first, "norm_first": p.chance(), "dropout": 0.0}
    layer = p.module(kind, s.shape[-1], p.divisor(s.shape[-1]), 3, **options)
    given, mask = s if first else s.transpose(0, 1), later(s.shape[1], s.shape[1]) if p.chance() else None
    out = layer(given, mask) if kind is nn.TransformerEncoderLayer else layer(given, given.tanh(), mask)
    return out if first else out.transpose(0, 1)


def experts(p: Program, s: Tensor) -> Tensor:
    """Each token goes to the expert with the largest score, and comes back."""
    tokens, kind = s.flatten(0, 1), p.r.randrange(3)
    best, which = (tokens @ p.leaf(tokens.shape[1], 2)).softmax(-1).max(-1)
    out = torch.zeros_like(tokens)
    for number in range(2):
        rows = (which == number).nonzero().squeeze(1)
        results = p.module(nn.Linear, tokens.shape[1], tokens.shape[1])(tokens[rows]).tanh() * best[rows, None]
        if kind == 0:
            out = out.index_add(0, rows, results)
        elif kind == 1:
            out[rows] = results
        else:
            out = out + torch.zeros_like(tokens).index_put((rows,), results)
    return out.view(s.shape)


def unpadded(p: Program, s: Tensor) -> Tensor:
    """Tokens that are no padding go through a layer, one after another."""
    mask = torch.arange(s.shape[1]) <= p.below(s.shape[1], len(s), 1)
    packed = p.module(nn.Linear, s.shape[-1], s.shape[-1])(s[mask] if p.chance() else s.flatten(0, 1)[mask.flatten()])
    if p.chance():
        packed = packed - packed.cumsum(0) / 9
    out = torch.zeros_like(s)
    if p.chance():
        return out.masked_scatter(mask[..., None].expand_as(s), packed)
    out[mask] = packed
    return out


def in_windows(p: Program, i: Tensor) -> Tensor:
    """Attention within windows of an image, as if rolled."""
    x = i.permute(0, 2, 3, 1)
    n, h, w, d = x.shape
    a, b = p.divisor(h), p.divisor(w)
    parts = x.roll((-1, 1), (1, 2)).view(n, h // a, a, w // b, b, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, a * b, d)
    parts = F.scaled_dot_product_attention(parts, parts, parts @ p.leaf(d, d))
    return parts.view(n, h // a, w // b, a, b, d).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, d).roll((1, -1), (1, 2))


def turning(p: Program, s: Tensor) -> Tensor:
    """Pairs of entries turn by angles of their positions, as complex numbers or by halves."""
    x = torch.cat([s, s], -1)
    angle = torch.outer(torch.arange(x.shape[1]).double(), p.leaf(x.shape[2] // 2))
    if p.chance():
        by = torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * by).flatten(-2)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def ctc(p: Program, s: Tensor) -> Tensor:
    lengths = torch.full((len(s),), s.shape[1])
    scores, labels = torch.cat([s, s * 0.5], -1).transpose(0, 1).log_softmax(-1), p.below(2 * s.shape[2] - 1, len(s), 1)
    return F.ctc_loss(scores, labels + 1, lengths, lengths * 0 + 1, reduction="none")


def in_pieces(p: Program, x: Tensor) -> Tensor:
    """Layers on each piece of a tensor, and the pieces together again."""
    d = p.r.randrange(x.ndim - 1)
    one, two = p.module(nn.Linear, x.shape[-1], 3), p.module(nn.Linear, 3, 2)
    return torch.cat([two(piece) for piece in one(x).chunk(p.one(2, 4), d)], d)


def row_by_row(p: Program, x: Tensor) -> Tensor:
    """A loop over rows, or over whatever lies in the first dimension."""
    layer = p.module(nn.Linear, x.shape[-1], 2)
    if p.chance():
        return torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    return torch.stack([layer(row).tanh() for row in x])


def split(p: Program, x: Tensor, d: int) -> Tensor:
    first = p.r.randint(0, x.shape[d])
    a, b = x.split([first, x.shape[d] - first], d)
    return torch.cat([b * 2, a], d) if p.chance() else a if a.numel() else b


def moved_in_place(p: Program, x: Tensor, d: int) -> Tensor:
    h = x * 1
    p.one(h.transpose_, lambda a, b: h.unsqueeze_(a), lambda a, b: h.swapaxes_(a, b).squeeze_(b))(d, p.dim(x))
    return h.tanh_() if p.chance() else h


# --- code beside autograd's own ---------------------------------------------------------------------------------------


# Works in numpy.
Cube = saving(
    lambda x: torch.from_numpy(x.detach().numpy() ** 3 / 5),
    lambda x, grad: torch.from_numpy(grad.numpy() * x.numpy() ** 2 * 0.6),
    plain=False,
)


class Centred(torch.autograd.Function):
    """Mixes rows; one of its results may have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x - x.mean(0), x.mean(0)

    @staticmethod
    def backward(ctx: Any, rest: Tensor, mean: Tensor | None) -> Tensor:
        return rest - rest.mean(0) + (0 if mean is None else mean / len(rest))


class Doubled(torch.autograd.Function):
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


# Row by row, with two results.
Waves = rowprop.rowwise(saved=0, grads=0, outputs=(0, 0))(
    saving(lambda x: (x.sin(), x.cos()), lambda x, sine, cosine: sine * x.cos() - cosine * x.sin(), plain=False)
)


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


def after(x: Tensor, *done: object) -> Tensor:
    """The tensor, once the rest is done."""
    return x


def hook(p: Program) -> Callable[[Tensor], Tensor | None]:
    name = p.name
    return p.one(
        lambda g: p.note(name, g),
        lambda g: g * 0.5,
        lambda g: g.clamp(-0.1, 0.2),
        lambda g: g / (1 + g.norm()),
        lambda g: -g,
    )


def backward_in_a_hook(p: Program, x: Tensor) -> Tensor:
    """A hook that picks and runs a backward of its own."""
    weight, rows = p.leaf(x.shape[-1]).detach(), p.rows(x)

    def run(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            own = weight.clone().requires_grad_()
            loss = p.take((x.detach() * own).sin(), rows).square().sum()
        loss.backward()
        return grad * own.grad.norm()

    return after(x, x.register_hook(run))


def hooked_leaf(p: Program, x: Tensor) -> Tensor:
    """A hook on a leaf: before or after its gradient is added, or on the node that adds it."""
    weight, name, kind = p.leaf(x.shape[-1]).requires_grad_(), p.name, p.r.randrange(4)
    out = x * weight
    if kind < 2:
        weight.register_hook(hook(p))
    elif kind == 2:
        weight.register_post_accumulate_grad_hook(lambda w: p.note(name, w.grad))
    else:
        node = p.once(lambda: weight.view_as(weight).grad_fn.next_functions[0][0])
        node.register_prehook(lambda grads: p.note(name, grads[0]))
    return out


def hooked_node(p: Program, x: Tensor) -> Tensor:
    name, out = p.name, p.one(torch.tanh, torch.exp, lambda x: x * 2, torch.clone)(x * 0.5)
    if p.chance():
        return after(out, out.grad_fn.register_prehook(lambda grads: (grads[0] * 2,)))
    return after(out, out.grad_fn.register_hook(lambda grads, _: p.note(name, grads[0])))


def hooked_module(p: Program, x: Tensor) -> Tensor:
    layer, name = p.module(nn.Linear, x.shape[-1], 2), p.name
    register, run = p.one(
        ("full_backward_hook", lambda m, given, arrived: p.note(name, arrived[0])),
        ("full_backward_hook", lambda m, given, arrived: (None if given[0] is None else given[0] * 2,)),
        ("full_backward_pre_hook", lambda m, arrived: (arrived[0] * 0.5,)),
        ("forward_hook", lambda m, given, out: p.take(out, torch.arange(len(out)).flip(0)).tanh()),
    )
    getattr(layer, f"register_{register}")(run)
    return layer(x)


def hooked_together(p: Program, x: Tensor) -> Tensor:
    name, others, mode = p.name, [x, *[o for o in p.made if o.requires_grad][-2:]], p.one("all", "any")
    notes = {"all": lambda grads: [p.note(name, grad) for grad in grads], "any": lambda grad: p.note(name, grad)}
    return after(x, register_multi_grad_hook(others, notes[mode], mode=mode))


def cut(p: Program, x: Tensor) -> Tensor:
    """The graph ends here, and a leaf stands for the tensor. Its gradient is handed over at the end."""
    below = x.detach().requires_grad_()
    p.leaves.append(below)
    if x.requires_grad:
        p.cut.append((x, below))
    return below


def copying() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda x: x.detach().clone(), torch.clone)


def narrowing() -> AbstractContextManager[Any]:
    def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: x.detach().to(dtype) if x.is_floating_point() else x

    return saved_tensors_hooks(to(torch.float32), to(torch.float64))


def staging() -> AbstractContextManager[Any]:
    """Saved tensors lie elsewhere, as on a disk; each comes back into the same buffer, as a new tensor."""
    stage: dict[Any, Any] = {}

    def unpack(kept: Tensor) -> Tensor:
        if kept.requires_grad:
            return kept
        buffer = stage.setdefault(kept.shape, torch.empty(kept.shape, dtype=kept.dtype).numpy())
        buffer[...] = kept.numpy()
        return torch.from_numpy(buffer)

    return saved_tensors_hooks(lambda x: x if x.is_leaf and x.requires_grad else x.detach().clone(), unpack)


def staged(p: Program, x: Tensor) -> Tensor:
    """Steps that save no two activations of one shape: one buffer holds them."""
    steps = steps_of(
        "F.linear(x, p.leaf(w, w)); F.linear(x, p.leaf(3, w)); x.tanh(); F.gelu(x); x.softmax(d); x.cumsum(d)"
    )
    with staging():
        for _ in range(p.r.randint(2, 4)):
            x = p.one(*steps.values())(p, x)
    return x


def saved(p: Program, x: Tensor, hooks: AbstractContextManager[Any]) -> Tensor:
    with hooks:
        return p.within()(x)


def checkpointed(p: Program, x: Tensor, steps: int = 1, *, reentrant: bool = False, **options: Any) -> Any:
    def run(x: Tensor, *functions: Callable[[Tensor], Tensor]) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    return checkpoint(run, x, *[p.within() for _ in range(steps)], use_reentrant=reentrant, **options)


def selective() -> Any:
    """A checkpoint that saves the products and runs the rest again."""
    keep = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default
    policies = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(lambda _, op, *args, **kwargs: policies[op not in keep])


# --- all steps --------------------------------------------------------------------------------------------------------

ACTIVATIONS = """relu silu elu softplus mish hardswish hardtanh leaky_relu logsigmoid softsign sigmoid tanhshrink
softshrink celu selu relu6""".split()
BAGS = "sum mean max".split()
LOSSES = "mse_loss smooth_l1_loss huber_loss l1_loss soft_margin_loss".split()
KINDS = {
    kind: steps_of(text)
    for kind, text in {
        "rows by themselves": """
            F.linear(x, p.leaf(p.one(2, 3, w), w)); F.linear(x, p.leaf(3, w), p.leaf(3)).tanh()
            F.gelu(x); x.tanh(); x.square() * 0.3; getattr(F, p.one(*ACTIVATIONS))(x); F.prelu(x, p.leaf(1))
            p.one(torch.sin, torch.abs, torch.erf)(x); x * p.leaf(w) + p.leaf(1); x.clamp(p.leaf(w) - 1, p.leaf(1))
            F.glu(torch.cat([x, x.flip(-1)], -1)); F.normalize(x + 0.1, dim=-1); x.clamp(-0.4, 0.8)
            torch.where(p.mask(*x.shape), x, p.leaf(w)); torch.where(x > 0.2, x.square(), x.sin())
            x.masked_fill(p.mask(*x.shape[:-1], 1), 0); x * p.mask(len(x), *[1] * (x.ndim - 1))
            torch.vmap(lambda row: row.tanh() * row.mean())(x)""",
        "two of them": """
            x + p.like(x); x * p.like(x).sigmoid(); torch.maximum(x, p.like(x)); torch.lerp(x, p.like(x), p.leaf(1))
            torch.addcmul(x, p.like(x), p.leaf(w), value=0.5); x / (1 + p.like(x).square())
            torch.atan2(x, p.like(x) + 0.1); F.pairwise_distance(x, p.like(x) + p.leaf(w))
            F.cosine_similarity(x, p.like(x) + p.leaf(w), dim=d); x + p.any(); x * p.any().tanh()
            x * x.detach().sigmoid() + p.like(x).detach(); torch.cat([x, p.like(x)], d)
            torch.cat([x, x.flip(0)], d); torch.stack([x, p.like(x)], d)""",
        "along a dimension": """
            x.sum(d, keepdim=p.chance()); x - x.mean(d, keepdim=True); x / (x.std(d, keepdim=True) + 0.5)
            x.norm(dim=d, keepdim=p.chance()); x.softmax(d); x.log_softmax(d); x.cumsum(d); x.cumprod(d)
            x.prod(d, keepdim=p.chance()); x.logcumsumexp(d); x.cummax(d).values; x.logsumexp(d)
            x.sort(d, descending=p.chance()).values; x.topk(p.r.randint(1, x.shape[d]), d).values
            x.median(d).values; x.amax(d, keepdim=True) - x; x.min(d).values; torch.fft.rfft(x, dim=d).real
            x.tril(p.r.randint(-1, 1))""",
        "products": """
            p.leaf(2, x.shape[d]) @ x.movedim(d, -2); torch.bmm(s, p.leaf(len(s), s.shape[2], 2))
            F.bilinear(x, p.like(x), p.leaf(2, w, w)); torch.einsum("ntd,msd->nmts", x, p.like(x))
            torch.einsum("ntd,nte->nde", x, p.like(x)); s.mT @ s; torch.cdist(x, p.like(x) + p.leaf(w))
            torch.linalg.solve(torch.eye(w).double() * 3 + p.leaf(1), x.mT)
            p.module(lambda *sizes: nn.utils.parametrizations.weight_norm(nn.Linear(*sizes)), w, 2)(x)
            s @ (s.mean((0, 1))[:, None] * p.leaf(2)); torch.tensordot(x, p.leaf(*x.shape[-2:], 2), 2)
            torch.addmm(p.leaf(2), x.flatten(0, -2), p.leaf(w, 2))""",
        "moves": """
            x.transpose(d, p.dim(x)); x.permute(p.r.sample(range(x.ndim), x.ndim)); x.flip(d)
            x.transpose(0, d).contiguous().transpose(0, d); x.flatten(d, p.r.randrange(d, x.ndim))
            x.unflatten(d, (p.one(1, 2, 3), -1)); x.reshape(p.one(*[o.shape for o in p.made if o.numel() == x.numel()]))
            x.roll((p.r.randint(-2, 2), 1), (d, 0)); x.narrow(d, k := p.r.randrange(x.shape[d]), x.shape[d] - k)
            x.transpose(0, d)[::2].transpose(0, d); p.one(*x.unbind(d)); torch.stack(x.unbind(d)[::-1], d)
            sum(x.unbind(d)); sum(p.r.sample(x.unbind(d), 2)) if x.shape[d] > 1 else x
            split(p, x, d); in_pieces(p, x); row_by_row(p, x); x.chunk(2, d)[-1]
            F.pad(x, (0, 0, p.r.randint(-1, 1), p.r.randint(0, 1)))
            F.pad(x, (1, 1), mode=p.one("reflect", "replicate", "circular")); x.repeat_interleave(2, d)
            x.repeat([1 + (e == d) for e in range(x.ndim)]); x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:])
            x.narrow(d, 0, 1).expand_as(x) + x.narrow(d, -1, 1); x.unfold(d, 2, 1).mean(-1)
            x.contiguous().as_strided((len(x), x.numel() // len(x)), (x.numel() // len(x), 1))
            x[(*[slice(None)] * p.r.randint(0, x.ndim), None, ...)]
            x[p.one(slice(None), slice(1, None), slice(None, None, 2), None), ..., p.below(w, 2)]
            experts(p, s); unpadded(p, s); x.diagonal(0, *p.r.sample(range(x.ndim), 2))""",
        "choices": """
            x.index_select(d, p.below(x.shape[d], p.r.randint(1, x.shape[d] + 1)))
            x[p.below(len(x), 3), p.below(x.shape[1], 3)]; x[:, p.below(x.shape[1], 2)]
            x[p.mask(*x.shape[: p.r.randint(1, x.ndim)])]; x.masked_select(p.mask(*x.shape))
            x.gather(d, p.below(x.shape[d], *x.shape)); x.take_along_dim(x.argsort(d), d)
            torch.zeros_like(x).scatter_add(d, p.below(x.shape[d], *x.shape), x)
            p.like(x).scatter(d, p.one(x.argsort(d), x.argsort(d).narrow(d, 0, 1)), x)
            p.leaf(*x.shape).index_put((p.below(len(x), len(x)),), x, accumulate=True)
            p.leaf(*x.shape).index_add(d, p.below(x.shape[d], x.shape[d]), x)
            p.leaf(*x.shape).masked_scatter(p.mask(*x.shape), x)""",
        "writes": """
            written(p, x); step_by_step(p, x, d); moved_in_place(p, x, d); picked_and_written(p, x); spectrum(p, x)
            x.clone().index_copy_(d, p.shuffled(x, d), p.like(x))""",
        "recurrent": "recurrent(p, s); cells(p, s)",
        "convolutions": """
            convolved(p, p.one(s, s.mT), nn.Conv1d); convolved(p, i, nn.Conv2d)
            convolved(p, p.one(s, s.mT), nn.ConvTranspose1d); convolved(p, i, nn.ConvTranspose2d)
            F.grid_sample(i, p.leaf(len(i), 2, 2, 2).tanh(), align_corners=False)
            F.pixel_shuffle(torch.cat([i] * 4, 1), 2); F.unfold(i, p.one(1, 2))""",
        "pooling": """
            F.max_pool1d(s, 2, 1); F.avg_pool1d(s, 2, 1, padding=p.one(0, 1)); F.max_pool2d(i, (1, 2), 1)
            F.avg_pool2d(i, p.one(1, 2), 1); F.adaptive_max_pool1d(s, p.one(1, 2)); F.adaptive_max_pool2d(i, (1, 2))
            F.adaptive_avg_pool1d(s, p.one(1, 2)); F.adaptive_avg_pool2d(i, p.one(1, 2))
            F.interpolate(s, scale_factor=2, mode=p.one("nearest", "linear"))
            F.interpolate(i, size=3, mode=p.one("nearest", "bilinear"))""",
        "norms": """
            F.layer_norm(x, x.shape[-1:], p.leaf(w)); p.module(nn.RMSNorm, w, elementwise_affine=p.chance())(x)
            p.module(nn.LayerNorm, x.shape[p.r.randrange(1, x.ndim) :], elementwise_affine=p.chance(0.7))(x)
            p.module(nn.GroupNorm, p.divisor(x.shape[1]), x.shape[1], affine=p.chance(0.7))(x)
            p.module(nn.InstanceNorm1d, s.shape[1], affine=p.chance(0.7))(s)
            p.module(nn.BatchNorm1d, x.shape[1], affine=p.chance(0.7)).train(p.chance(0.6))(x if x.ndim == 2 else s)
            p.module(nn.BatchNorm2d, i.shape[1], affine=p.chance(0.7)).train(p.chance(0.6))(i)""",
        "attention": """
            (x @ x.mT).softmax(-1) @ x; attention(p, s, fused=False); attention(p, s, fused=True); multihead(p, s)
            transformer(p, s); in_windows(p, i); turning(p, s)""",
        "embeddings": """
            x + F.embedding(p.below(5, *x.shape[:-1]), p.leaf(5, w)); s + p.leaf(*s.shape[1:]); x @ p.leaf(4, w).T
            x * F.embedding(p.below(4, *x.shape[:-1]), p.leaf(4, w), padding_idx=0)
            x.flatten(1).sum(1, True) + F.embedding_bag(p.below(5, len(x), 3), p.leaf(5, w), mode=p.one(*BAGS))""",
        "losses": """
            getattr(F, p.one(*LOSSES))(x, p.leaf(*x.shape), reduction="none"); ctc(p, s)
            F.binary_cross_entropy_with_logits(x, p.like(x).detach().sigmoid(), p.leaf(w).detach(), reduction="none")
            F.kl_div(x.log_softmax(-1), p.leaf(*x.shape).softmax(-1), reduction="none")
            F.nll_loss(s.log_softmax(1), p.below(s.shape[1], len(s), s.shape[2]), reduction="none")
            F.triplet_margin_loss(x, p.leaf(*x.shape), x.flip(0), reduction="none")
            F.gaussian_nll_loss(x, p.leaf(*x.shape), x.square() + 0.2, reduction="none")""",
        "custom functions": """
            Cube.apply(x); Centred.apply(x)[0]; torch.mul(*Centred.apply(x)); Doubled.apply(x * 1)
            Linear.apply(x, p.leaf(w, 2)); torch.mul(*Waves.apply(x)); p.one(*Waves.apply(x))""",
        "picks": """
            p.take(x, p.rows(x)); p.take(x.transpose(0, 1), p.rows(x.transpose(0, 1)))
            x.index_add(0, rows := p.below(len(x), 2), p.take(x, rows).tanh())
            torch.cat([p.take(x, p.below(len(x), 2)), p.take(x, p.below(len(x), 1))])""",
        # What follows is not done within other steps.
        "checkpoints": """
            checkpointed(p, x); checkpointed(p, x, 2); checkpointed(p, x, reentrant=True)
            checkpointed(p, x, context_fn=selective); Again.apply(x, p.within())""",
        "hooks": """
            after(p.one(x, x.sin()), x.register_hook(hook(p))); hooked_leaf(p, x); hooked_node(p, x)
            hooked_module(p, x); hooked_together(p, x); after(x, x.retain_grad(), p.retained.append(x))
            backward_in_a_hook(p, x)""",
        "saved tensors": """
            saved(p, x, copying()); saved(p, x, narrowing()); saved(p, x, torch.autograd.graph.save_on_cpu())
            staged(p, x)""",
        "many picks": "cells(p, s, pick=True); after(x, p.lose(x)); after(x, p.lose(x), p.lose(x.sin()))",
        "cuts": "cut(p, x); x.detach() + p.any().sum()",
        "random numbers": "F.dropout(x, 0.3); F.dropout1d(s, 0.4); F.rrelu(x, training=True)",
    }.items()
}
STEPS = {name: step for steps in KINDS.values() for name, step in steps.items()}
OUTER = ("checkpoints", "hooks", "saved tensors", "many picks", "cuts", "random numbers")
INNER = {name: step for kind, steps in KINDS.items() if kind not in OUTER for name, step in steps.items()}

PROCESS_WIDE = {
    "counted": partial(FlopCounterMode, display=False),
    "with anomalies": partial(torch.autograd.set_detect_anomaly, True),
}
"""Endings under modes that torch has for all threads."""
ONCE = ("grad", "grad in the middle", "of some", "together", "batched")
"""Endings that leave no graph, or no gradient, for what was cut off."""
ENDINGS = [*["backward"] * 3, *ONCE, "twice", "one by one", "plain first", "cleared between", *PROCESS_WIDE]


def build(seed: int, take: Take, left_out: set[str] | None = None) -> Program:
    """A program after its forward; ``left_out`` as in :class:`Program`, or None for a run that finds them."""
    p = Program(seed, take, set() if left_out is None else left_out, r=Random(seed))
    p.generator.manual_seed(seed)
    sizes = p.one(2, 3, 4, 5, 6), p.one(1, 2, 3, 4, 6), p.one(1, 2, 3, 4)
    p.made = [p.leaf(*sizes) for _ in range(p.r.randint(1, 2))]
    p.made[0].requires_grad_()
    steps = [p.one(*KINDS[p.one(*KINDS)]) for _ in range(p.r.randint(3, 9))]
    picks, p.ending = p.r.randint(1, 3), p.one(*ENDINGS)
    for number, name in enumerate([*steps, *["losses of rows"] * picks]):
        kept = len(p.losses), len(p.leaves), len(p.cut)
        try:
            p.run(f"{number}: {name}", STEPS.get(name, Program.lose))
        except REFUSED:
            if left_out is not None:
                raise
            p.left_out.add(f"{number}: {name}")
            del p.losses[kept[0] :], p.leaves[kept[1] :], p.cut[kept[2] :]
    if any("reentrant=True" in name for name in steps) and p.ending in ONCE[:3] + ONCE[4:]:
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
        with PROCESS_WIDE.get(ending, nullcontext)():
            total.backward(retain_graph=bool(p.cut))
    if ending not in ONCE:
        for above, below in reversed(p.cut):
            if below.grad is not None:
                above.backward(below.grad, retain_graph=True)
    noted = [gradient for name in sorted(p.noted) for gradient in p.noted[name]]
    return [*p.losses, *found, *(leaf.grad for leaf in leaves), *(x.grad for x in p.retained), *noted]


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
    except REFUSED:
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
    reference = plain(seed, without)
    if reference is None:
        return Outcome()
    first, expected = reference
    outcome = Outcome(steps=[*first.steps, *first.inner])
    with rowprop.watch() as report:
        try:
            tolerance = NARROWED if any("narrowing" in step for step in outcome.steps) else TOLERANCE
            outcome.fault = different(expected, backward(build(seed, picked, first.left_out)), tolerance)
            outcome.wrong = outcome.fault is not None
        except Exception as error:
            outcome.fault = f"{type(error).__name__}: {error}"
    outcome.sliced, outcome.densified = bool(report.sliced), bool(report.densified)
    return outcome


def compare(seed: int) -> str | None:
    """What is wrong with a program under picks, and the steps that it takes; None if nothing is."""
    found = check(seed)
    if found.fault is None:
        return None
    without = set[str]()
    for name in reversed(found.steps):
        if re.match(r"\d+: ", name) and (fewer := check(seed, {*without, name})).fault is not None:
            without.add(name)
            found = fewer
    return f"program {seed}: {found.fault}\n  {' -> '.join(found.steps)}"


def main(first: int, last: int) -> int:
    """Run programs; prints the faults, how many programs there were of each sort, and how often a step was done."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun, sorts, steps = time.perf_counter(), Counter[str](), Counter[str]()
    for seed in range(first, last):
        found = check(seed)
        sorts["run"] += bool(found.steps)
        sorts["sliced"] += found.sliced
        sorts["not densified"] += found.sliced and not found.densified
        steps.update({re.sub(r"^\d+: ", "", name) for name in found.steps})
        if found.fault is not None:
            sorts["wrong" if found.wrong else "errors"] += 1
            print(compare(seed) or f"program {seed}: a fault that is gone when it runs again", flush=True)
    for kind, names in KINDS.items():
        print(f"{kind}:", *(f"  {steps[name]:5} {name}" for name in names), sep="\n")
    print(
        f"torch {torch.__version__}: {last - first} programs, {sorts['run']} run, {sorts['wrong']} wrong, "
        f"{sorts['errors']} errors; {sorts['sliced']} sliced something, {sorts['not densified']} of them densified "
        f"nothing; {time.perf_counter() - begun:.0f} s"
    )
    return sorts["wrong"] + sorts["errors"]


if __name__ == "__main__":
    sys.exit(main(*[0, *map(int, sys.argv[1:] or ["1000"])][-2:]) > 0)
