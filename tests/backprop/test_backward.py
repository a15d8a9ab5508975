"""What a backward remembers is its own: within other backwards, and over one graph with many picks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import rowprop
from picks import ROWS, Take, as_indexed, gradients, indexed, passing
from rowprop.backprop import backward
from rowprop.backprop.autograd import foreign
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows import gather as gathering
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules import views

N = 16


def staged(refill: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Hooks that hand all saved tensors of one shape back in the same memory, as when activations lie on a disk."""
    stages: dict[Any, Tensor] = {}

    def unpack(held: Tensor) -> Tensor:
        return refill(stages.setdefault(held.shape, torch.empty_like(held)), held)

    return saved_tensors_hooks(lambda t: t.clone(), unpack)


def of_numpy(stage: Tensor, held: Tensor) -> Tensor:
    np.copyto(stage.numpy(), held.numpy())
    return torch.from_numpy(stage.numpy())


def of_data(stage: Tensor, held: Tensor) -> Tensor:
    stage.data.copy_(held)  # the tensor's version does not tell
    return stage


def layered(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3)).double()
    for layer in layers:
        x = layer(x).tanh()
    return x.square().sum(1), list(layers.parameters())


def indexed_by_a_list(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """An index is saved as a list of tensors."""
    leaf, (first, second) = nn.Parameter(x), torch.randint(5, (2, N, 2))
    every = torch.arange(N)[:, None]
    return (leaf * 2)[every, first].sum(1) + (leaf * 3)[every, second].sum(1), [leaf]


def test_a_leaf_that_rows_are_picked_of_is_handed_a_plain_gradient():
    # Red where the pick's own node hands its leaf the sliced one: a hook on the leaf's node would see it.
    leaf, seen = torch.ones(N, requires_grad=True), []
    losses = rowprop.pick(leaf, [0, 2])
    losses.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.extend(map(type, grads)))
    losses.sum().backward()
    assert seen == [Tensor]
    assert leaf.grad.tolist() == [1.0, 0.0, 1.0] + [0.0] * (N - 3)


def test_no_more_than_the_last_two_gathers_hold_memory():
    # Red where what was gathered earlier is held until the backward's end, with the activations it was taken from.
    rows, layout = RowSet(torch.tensor([0, 2]), N, unique=True, batchnorm=None), Layout(0, N)
    held = []
    for _ in range(4):
        tensor = torch.randn(N, 3)
        gathering.gather(tensor, rows, layout)
        held.append(weakref.ref(tensor))
        del tensor
    assert [source() is not None for source in held] == [False, False, True, True]


def test_a_copy_of_some_rows_takes_back_a_gradient_of_its_own_rows_alone():
    # Red where other rows, or the same rows in another dimension, are taken for those of the copy; where native
    # dispatch, whose key does not hold the memory that was copied from, gets these rows.
    memory = RowSet(torch.tensor([1, 4]), 6, unique=True, batchnorm=None)
    base = RowSlice(torch.randn(2, 4), memory, Layout(0, 6), (6, 4))
    before = base.values.clone()
    lent: Any = views.as_strided(torch.ops.aten.as_strided.default, base, (4, 4), (4, 1), 4)  # rows 1, 2, 3 and 4
    copy: Any = lent.copy
    assert copy.rows.index.tolist() == [0, 3] and copy.rows.native is None
    others = RowSet(torch.tensor([1, 2]), 4, unique=True, batchnorm=None)
    assert not lent.write_back(RowSlice(copy.values, others, copy.layout, copy.shape), base)
    assert not lent.write_back(RowSlice(copy.values.T, copy.rows, Layout(1, 4), copy.shape), base)
    assert torch.equal(base.values, before)
    assert lent.write_back(copy.like(2 * copy.values), base)
    assert torch.equal(base.values, 2 * before)


@pytest.mark.parametrize("refill", [of_numpy, of_data])
@pytest.mark.parametrize("made", [layered, indexed_by_a_list])
def test_an_unpack_hook_may_fill_one_buffer_again(made: Any, refill: Any):
    # Red without the question for hooks, and where only single tensors are asked for them.
    def step(take: Take) -> Any:
        torch.manual_seed(0)
        x = torch.randn(N, 5, dtype=torch.float64)
        with staged(refill):
            losses, leaves = made(x)
        return torch.autograd.grad(take(losses, ROWS).mean(), leaves)

    as_indexed(step)


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("hooks", [False, True])
def test_neighbours_that_save_one_activation_gather_it_once(hooks, monkeypatch):
    # Red with `return True` in unpacks, and with its loop left out.
    gathered = Counter()
    plain = gathering.gather_plain

    def counting(tensor: Tensor, *args: Any) -> Tensor:
        gathered[tensor.untyped_storage()._cdata] += 1
        return plain(tensor, *args)

    monkeypatch.setattr(gathering, "gather_plain", counting)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    with saved_tensors_hooks(lambda t: t, lambda t: t) if hooks else nullcontext():
        losses = model(torch.randn(N, 5)).square().sum(1)
    rowprop.pick(losses, torch.tensor([0, 3])).sum().backward()
    assert max(gathered.values()) == (2 if hooks else 1)


def test_a_graph_with_a_pick_at_each_step_is_walked_once(monkeypatch):
    # Red where each pick walks through all that lies upstream: 40 picks then visit some 20 times as many nodes.
    visited: list[Any] = []
    upstream = foreign.upstream

    def counting(*args: Any) -> list[Any]:
        visited.extend(found := upstream(*args))
        return found

    cell, head = nn.GRUCell(3, 4).double(), nn.Linear(4, 1).double()
    xs, rows = torch.randn(40, N, 3, dtype=torch.float64), [torch.randperm(N)[:4] for _ in range(40)]

    def loss(take: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        h, total = torch.zeros(N, 4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for x, kept in zip(xs, rows, strict=True):
            h = cell(x, h)
            total = total + take(head(h).square().mean(1), kept).mean()
        return total

    leaves = [*cell.parameters(), *head.parameters()]
    wanted = torch.autograd.grad(loss(indexed), leaves)
    monkeypatch.setattr(foreign, "upstream", counting)
    total = loss(rowprop.pick)
    every = len(upstream(total.grad_fn))
    torch.testing.assert_close(gradients(lambda: total, leaves), list(wanted))
    assert len(visited) == len(set(visited)) <= every


@pytest.mark.parametrize("inputs", ["all", "hidden", "losses"])
def test_gradients_that_are_asked_for_beside_many_picks(inputs: str):
    # Red where a pick that is prepared later takes the backward for one of all leaves ("losses").
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)).double()
    x = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)

    def asked(take: Callable[[Tensor, Tensor], Tensor]) -> Any:
        h, total, hidden, squares = x, torch.zeros((), dtype=torch.float64), [], []
        for layer in layers:
            h = layer(h).tanh()
            hidden.append(h)
            squares.append(h.square())
            total = total + take(squares[-1].sum(1), ROWS).sum()
        every = {"all": [hidden[1], x, *layers.parameters()], "hidden": [hidden[1]], "losses": [hidden[3], squares[1]]}
        found = torch.autograd.grad(total, every[inputs])
        assert all(type(g) is Tensor for g in found) or inputs == "all"
        return [g + 0 for g in found]

    as_indexed(asked)


def test_a_leaf_with_a_hook_below_two_picks():
    # Red where the pick that is prepared second forgets the leaves that the first one found.
    x, seen = torch.randn(N, 3, dtype=torch.float64, requires_grad=True), []
    x.register_hook(lambda grad: seen.append(type(grad)))
    early = rowprop.pick(x.square().sum(1), torch.tensor([1, 5]))
    late = rowprop.pick(passing(lambda grad: None)(x).sum(1), torch.tensor([2]))
    (early.sum() + late.sum()).backward()
    assert seen == [Tensor] and torch.equal(x.grad.nonzero()[:, 0].unique(), torch.tensor([1, 5]))


def test_a_backward_within_a_backward_and_one_that_fails_leave_nothing():
    # Red without the end of the inner one, and where a failed backward is kept.
    inner, outer = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    both = nn.ModuleList([inner, outer])
    x, rows = torch.randn(N, 3, dtype=torch.float64, requires_grad=True), torch.tensor([2, 7, 7])

    def losses() -> Tensor:
        region = checkpoint(lambda t: torch.cat([outer(c) for c in inner(t).chunk(2)]), x, use_reentrant=True)
        return region.square().sum(1)

    as_indexed(lambda take: gradients(lambda: take(losses(), rows).sum(), [x, *both.parameters()]))
    assert not backward._running

    def fail(grad: Tensor) -> None:
        raise ValueError("stop")

    inner.weight.register_hook(fail)  # without a checkpoint: torch itself keeps gradients of a region that fails
    with pytest.raises(ValueError, match="stop"):
        rowprop.pick(inner(x).square().sum(1), rows).sum().backward()
    assert not backward._running


@pytest.mark.usefixtures("quick_collections")
def test_a_reentrant_region_leaves_no_gradient_behind():
    # Red with `get` in the place of `pop` where the caught gradients are handed on.
    layer, x = nn.Linear(3, 3), torch.randn(N, 3, requires_grad=True)

    for _ in range(3):
        region = checkpoint(lambda t: torch.cat([layer(part) for part in t.chunk(2)]), x, use_reentrant=True)
        rowprop.pick(region.square().sum(1), torch.tensor([2, 7, 7])).sum().backward()
    gc.collect()
    assert not any(type(found) is RowGrad for found in gc.get_objects())
