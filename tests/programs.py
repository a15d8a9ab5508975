"""Random programs under picks, and the same programs under plain indexing.

The audit tries each rule by itself. A program is some random ops in a row: products, moves of rows and tokens, ops that
mix them, writes in place through views, checkpoints. It picks rows or tokens at up to four places, and gradients of
other rows in other layouts meet on their way back. Values and the gradients of all leaves are those of plain indexing.

``python tests/programs.py 1000`` runs programs 0 to 999; ``python tests/programs.py 7 8`` runs number 7.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rowprop

Take = Callable[[Tensor, Any], Tensor]
LARGEST = 2500
"""Entries of a tensor. An op whose result has more is left out."""


@dataclass
class Program:
    """One run of a program.

    Attributes:
        seed: Its number; everything but ``take`` follows from it.
        take: Picks rows, or indexes them.
        left_out: Names of steps that fail under plain indexing, and so in no other run.
        made: The tensors so far.
        leaves: The inputs and the parameters.
        steps: Names of the steps.
    """

    seed: int
    take: Take
    left_out: set[str] = field(default_factory=set)
    made: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    r: Random = field(default_factory=Random)

    def leaf(self, *shape: int) -> Tensor:
        """Another leaf, in some order of its dimensions in memory; one of seven needs no gradient."""
        order = self.r.sample(range(len(shape)), len(shape)) if self.r.random() < 0.3 else list(range(len(shape)))
        values = torch.randn([shape[d] for d in order], dtype=torch.float64)
        values = values.permute([order.index(d) for d in range(len(shape))])
        self.leaves.append(values.requires_grad_(self.r.random() < 6 / 7))
        return self.leaves[-1]

    def other(self, like: Tensor) -> Tensor:
        """A tensor of the same shape, perhaps the same one."""
        return self.r.choice([x for x in self.made if x.shape == like.shape])

    def dim(self, x: Tensor) -> int:
        return self.r.randrange(x.ndim)

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

    def run(self, name: str, step: Callable[[Program, Tensor], Tensor]) -> None:
        """One step on one of the last tensors."""
        self.r = Random(f"{self.seed}/{name}")
        if name in self.left_out:
            return
        torch.manual_seed(self.r.randrange(2**31))
        x = self.made[-1 - min(len(self.made) - 1, int(self.r.expovariate(1)))]
        out = step(self, x)
        if not 0 < out.numel() <= LARGEST or not torch.isfinite(out).all() or out.detach().abs().max() > 1e3:
            raise ValueError("not a result to go on with")
        self.made.append(out)
        self.steps.append(name)


def _written(p: Program, x: Tensor) -> Tensor:
    h = p.r.choice([lambda: x * 1, lambda: torch.zeros_like(x), lambda: x.transpose(0, -1).clone().transpose(0, -1)])()
    for _ in range(p.r.randint(1, 2)):
        view = VIEWS[p.r.choice(sorted(VIEWS))](p, h)
        WRITES[p.r.choice(sorted(WRITES))](p, view)
    return h


VIEWS: dict[str, Callable[[Program, Tensor], Tensor]] = {
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
    "add": lambda p, v: v.add_(v.detach().flip(0)),
    "rows": lambda p, v: v.__setitem__(p.entries(v.shape[0], 2), 0),
    "a mask": lambda p, v: v.__setitem__(p.mask(*v.shape[: p.r.randint(1, v.ndim)]), 0.5),
    "from another": lambda p, v: v.copy_(p.r.choice(p.made).expand_as(v)),
    "fill": lambda p, v: v.index_fill_(0, p.entries(v.shape[0], 1), 0),
    "masked fill": lambda p, v: v.masked_fill_(p.mask(v.shape[0], *[1] * (v.ndim - 1)), 0),
    "more of a row": lambda p, v: v.index_add_(0, p.entries(v.shape[0], v.shape[0]), v.detach() + p.made[0].sum()),
    "next to each other": lambda p, v: v[1:].copy_(v[:-1].clone()),
}
STEPS: dict[str, Callable[[Program, Tensor], Tensor]] = {
    # --- each row by itself
    "linear": lambda p, x: F.linear(x, p.leaf(p.r.choice([2, 3, x.shape[-1]]), x.shape[-1])),
    "linear with a bias": lambda p, x: F.linear(x, p.leaf(3, x.shape[-1]), p.leaf(3)).tanh(),
    "scaled": lambda p, x: x * p.leaf(x.shape[-1]) + p.leaf(1),
    "gelu": lambda p, x: F.gelu(x),
    "tanh": lambda p, x: x.tanh(),
    "square": lambda p, x: x.square() * 0.3,
    "dropout": lambda p, x: F.dropout(x, 0.3),
    "layer norm": lambda p, x: F.layer_norm(x, x.shape[-1:], p.leaf(x.shape[-1])),
    "normalized": lambda p, x: F.normalize(x + 0.1, dim=-1),
    "where": lambda p, x: torch.where(p.mask(*x.shape), x, p.leaf(x.shape[-1])),
    "masked fill": lambda p, x: x.masked_fill(p.mask(*x.shape[:-1], 1), 0),
    # --- two of them
    "sum of two": lambda p, x: x + p.other(x),
    "product of two": lambda p, x: x * p.other(x).sigmoid(),
    "largest of two": lambda p, x: torch.maximum(x, p.other(x)),
    "broadcast": lambda p, x: x + p.r.choice(p.made),
    "joined": lambda p, x: torch.cat([x, p.other(x)], p.dim(x)),
    "joined to itself turned": lambda p, x: torch.cat([x, x.flip(0)], p.dim(x)),
    "stacked": lambda p, x: torch.stack([x, p.other(x)], p.dim(x)),
    # --- along any dimension
    "sum": lambda p, x: x.sum(p.dim(x), keepdim=p.r.random() < 0.5),
    "mean taken off": lambda p, x: x - x.mean(p.dim(x), keepdim=True),
    "softmax": lambda p, x: x.softmax(p.dim(x)),
    "running sum": lambda p, x: x.cumsum(p.dim(x)),
    "sorted": lambda p, x: x.sort(p.dim(x)).values,
    "largest": lambda p, x: x.amax(p.dim(x), keepdim=True) - x,
    "logsumexp": lambda p, x: x.logsumexp(p.dim(x)),
    # --- products
    "product over any dimension": lambda p, x: p.leaf(2, x.shape[d := p.dim(x)]) @ x.movedim(d, -2),
    "attention": lambda p, x: (x @ x.mT).softmax(-1) @ x,
    "fused attention": lambda p, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0],
    "of all pairs": lambda p, x: torch.einsum("ntd,msd->nmts", x, p.other(x)),
    "of rows": lambda p, x: torch.einsum("ntd,nte->nde", x, p.other(x)),
    # --- moves
    "turned": lambda p, x: x.transpose(p.dim(x), p.dim(x)),
    "permuted": lambda p, x: x.permute(p.r.sample(range(x.ndim), x.ndim)),
    "flattened": lambda p, x: x.flatten(first := p.dim(x), p.r.randrange(first, x.ndim)),
    "taken apart": lambda p, x: x.unflatten(p.dim(x), (p.r.choice([1, 2, 3]), -1)),
    "as another": lambda p, x: x.reshape(p.r.choice([o.shape for o in p.made if o.numel() == x.numel()])),
    "rolled": lambda p, x: x.roll((p.r.randint(-2, 2), 1), (p.dim(x), 0)),
    "reversed": lambda p, x: x.flip(p.dim(x)),
    "sliced": lambda p, x: x.narrow(d := p.dim(x), begin := p.r.randrange(x.shape[d]), x.shape[d] - begin),
    "every other": lambda p, x: x.transpose(0, d := p.dim(x))[::2].transpose(0, d),
    "one of all": lambda p, x: x.unbind(d := p.dim(x))[p.r.randrange(x.shape[d])],
    "in reversed order": lambda p, x: torch.stack(x.unbind(d := p.dim(x))[::-1], d),
    "a chunk": lambda p, x: x.chunk(2, p.dim(x))[-1],
    "padded": lambda p, x: F.pad(x, (0, 0, p.r.randint(-1, 1), p.r.randint(0, 1))),
    "repeated": lambda p, x: x.repeat_interleave(2, p.dim(x)),
    "expanded": lambda p, x: x.unsqueeze(d := p.dim(x)).expand(*x.shape[:d], 2, *x.shape[d:]),
    "windows": lambda p, x: x.unfold(p.dim(x), 2, 1).mean(-1),
    "chosen": lambda p, x: x.index_select(d := p.dim(x), p.entries(x.shape[d], p.r.randint(1, x.shape[d] + 1))),
    "chosen in two dimensions": lambda p, x: x[p.entries(x.shape[0], 3), p.entries(x.shape[1], 3)],
    "chosen by a mask": lambda p, x: x[p.mask(*x.shape[: p.r.randint(1, x.ndim)])],
    "gathered": lambda p, x: x.gather(d := p.dim(x), p.entries(x.shape[d], *x.shape)),
    "scattered": lambda p, x: torch.zeros_like(x).scatter_add(d := p.dim(x), p.entries(x.shape[d], *x.shape), x),
    # --- and more
    "written to": _written,
    "written to through a view": _written,
    "written to again": _written,
    "checkpoint": lambda p, x: checkpoint(lambda x: x.tanh() * x.sum(-1, keepdim=True), x, use_reentrant=False),
    "reentrant checkpoint": lambda p, x: checkpoint(lambda x: x.tanh() + x.mean(-1)[..., None], x, use_reentrant=True),
    "picked": lambda p, x: p.take(x, p.rows(x)),
}  # fmt: skip


def run(seed: int, take: Take, left_out: set[str] | None = None) -> tuple[Program, list[Tensor | None]]:
    """Run a program.

    Args:
        seed: Its number.
        take: ``rowprop.pick`` or plain indexing.
        left_out: See :class:`Program`; None for a run that finds them.

    Returns:
        The program, and its losses and the gradients of its leaves.
    """
    p = Program(seed, take, set() if left_out is None else left_out)
    p.r = Random(seed)
    torch.manual_seed(seed)
    n, t, d = (p.r.choice(sizes) for sizes in ([2, 3, 4, 5, 6], [1, 2, 3, 4, 6], [1, 2, 3, 4]))
    p.made = [p.leaf(n, t, d) for _ in range(p.r.randint(1, 2))]
    p.made[0].requires_grad_()
    steps = [p.r.choice(list(STEPS)) for _ in range(p.r.randint(3, 9))]
    picks, ending = p.r.randint(1, 3), p.r.choice(["backward", "backward", "grad", "twice"])
    losses: list[Tensor] = []

    def lost(p: Program, x: Tensor) -> Tensor:
        taken = p.take(x, p.rows(x))
        losses.append((taken * torch.randn(taken.shape, dtype=taken.dtype)).sum() + taken.square().sum() / 5)
        return losses[-1]

    todo = [*((name, STEPS[name]) for name in steps), *[("losses of rows", lost)] * picks]
    for number, (name, step) in enumerate(todo):
        kept = len(losses), len(p.leaves)
        try:
            p.run(f"{number}: {name}", step)
        except (RuntimeError, IndexError, ValueError):
            if left_out is not None:
                raise
            p.left_out.add(f"{number}: {name}")
            del losses[kept[0] :], p.leaves[kept[1] :]
    total = sum(loss for loss in losses if loss.requires_grad)
    leaves = [leaf for leaf in p.leaves if leaf.requires_grad]
    if not isinstance(total, Tensor):
        return p, []
    if ending == "grad":
        return p, [*losses, *torch.autograd.grad(total, leaves, allow_unused=True)]
    if ending == "twice":
        total.backward(retain_graph=True)
    total.backward()
    return p, [*losses, *(leaf.grad for leaf in leaves)]


def compare(seed: int) -> str | None:
    """What is wrong with a program under picks; None if nothing is."""
    try:
        plain, expected = run(seed, lambda x, rows: x[rows])
    except RuntimeError:  # as an in-place op on what another op has saved: no program
        return None
    steps = " -> ".join(plain.steps)
    try:
        _, found = run(seed, rowprop.pick, plain.left_out)
    except Exception as error:
        return f"program {seed}: {type(error).__name__}: {error}\n  {steps}"
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            same = one is other
        else:
            size = 1 + float(one.detach().abs().max())
            same = one.shape == other.shape and float((one - other).detach().abs().max()) < 1e-9 * size
        if not same:
            return f"program {seed}: result {place} of {len(found)} is another one\n  {steps}"
    return None


def main(first: int, last: int) -> int:
    """Run programs, print each fault and a summary; the number of faults."""
    torch.set_num_threads(1)
    begun, sliced, faults = time.process_time(), set[str](), 0
    for seed in range(first, last):
        with rowprop.watch() as report:
            fault = compare(seed)
        sliced |= set(report.sliced)
        faults += fault is not None
        if fault is not None:
            print(fault, flush=True)
    print(f"{last - first} programs, {len(sliced)} ops sliced, {faults} faults, {time.process_time() - begun:.0f} s")
    return faults


if __name__ == "__main__":
    numbers = list(map(int, sys.argv[1:])) or [1000]
    sys.exit(main(*numbers) if len(numbers) == 2 else main(0, numbers[0]))
