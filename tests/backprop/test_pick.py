"""pick() against plain indexing, in any company: hooks, custom functions, autograd.grad, several picks."""

from __future__ import annotations

import gc
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import picks
import rowprop
from picks import ROWS, N, Take, as_indexed, assert_same_gradients, chain, gradients, net, passing, weight
from rowprop.backprop.autograd import foreign
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.selection.base import Selection

AS_TENSORS = [[3], [5, 0, 2], [2, 2, 7, 2], [-1, 0, -8], [4, 6, 5, 7, 0, 3, 1, 2], [*range(N)], [*range(N), 0, 1]]
KINDS: dict[str, tuple[Any, Any]] = {  # rows, and what plain indexing takes in their place
    **{str(rows): (torch.tensor(rows), rows) for rows in AS_TENSORS},
    "int32": (torch.tensor([1, 3], dtype=torch.int32), [1, 3]),
    "a mask": (torch.arange(N) % 3 == 0, [0, 3, 6]),
    "a mask of all": (torch.arange(N) >= 0, [*range(N)]),
    "a selection, without its weights": (Selection(ROWS, torch.tensor([0.5, 0.3, 0.2]), N), ROWS),
    "a list": ([1, 2, 5], [1, 2, 5]),
    "a list with negative ones and repeats": ([-1, 2, 2], [7, 2, 2]),
    "a list of bools": ([row in (0, 6) for row in range(N)], [0, 6]),
    "an empty list": ([], torch.tensor([], dtype=torch.long)),
    "a range": (range(1, N, 3), [1, 4, 7]),
    "an empty range": (range(0), torch.tensor([], dtype=torch.long)),
    "an array": (np.array([6, 0, 3], dtype=np.int32), [6, 0, 3]),
    "an array from its end": (np.arange(N)[::-3], [7, 4, 1]),
    "a read-only array": (np.broadcast_to(np.array(2), (3,)), [2, 2, 2]),
    "an array of bools": (np.arange(N) % 3 == 1, [1, 4, 7]),
}


@pytest.mark.parametrize(("rows", "same"), KINDS.values(), ids=KINDS)
# Red when: a kind is refused, an array is not copied first, an empty list becomes a tensor of floats; N rows or more
# are sliced, which costs a gather and saves nothing; a parameter that is not used gets a gradient.
def test_values_and_gradients_equal_plain_indexing(rows: Any, same: Any):
    x, w, v = net()
    unused, expected = weight(3), chain(x, w, v)[same]
    assert torch.equal(rowprop.pick(chain(x, w, v), rows), expected)
    weights = torch.linspace(0.5, 2, len(expected))

    def of(losses: Tensor) -> list[Tensor | None]:
        return gradients(lambda: (losses * weights).sum(), [w, v, unused])

    with rowprop.watch() as report:
        found = of(rowprop.pick(chain(x, w, v), rows))
    torch.testing.assert_close(found, of(expected), rtol=1e-10, atol=1e-13)
    assert bool(report.sliced) == (len(expected) < N) and not report.densified


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([5, 0, 2], lambda index: index),
        ([-1, 0, -8], lambda index: index),
        ([2, 2], lambda index: index),
        ([row == 3 for row in range(N)], lambda mask: mask),
        ([0, 2, 5], lambda index: Selection(index, torch.ones(3), N)),
    ],
    ids=["unsorted", "negative", "repeats", "a mask", "a selection"],
)
def test_the_next_steps_rows_may_be_written_before_the_backward(rows: list[Any], given: Callable[[Tensor], Any]):
    # Red when: the backward reads the caller's indices, which plain indexing would refuse to do by now.
    x, w, v = net()
    index = torch.tensor(rows)
    expected = gradients(lambda: chain(x, w, v)[torch.tensor(rows)].sum(), [w, v])
    kept = rowprop.pick(chain(x, w, v), given(index)).sum()
    index.fill_(3)
    torch.testing.assert_close(gradients(lambda: kept, [w, v]), expected)


def test_no_row_costs_one_row_and_is_not_poisoned_by_another():
    # Red when: the row that stands in for an empty pick is always the first row, or an infinite row.
    x, w, v = net()
    x[0], x[1] = torch.inf, torch.nan
    with rowprop.watch() as report:
        grads = gradients(lambda: rowprop.pick(x @ w @ v, torch.tensor([], dtype=torch.int64)).sum(), [w, v])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)
    assert report.sliced and not report.densified


@pytest.mark.parametrize("rows", [Selection.everything(N), torch.ones(N, 3, dtype=torch.bool)], ids=["all", "a mask"])
def test_keeping_everything_costs_a_copy(rows: Any):
    # Red when: all rows are gathered, to be scattered again in the backward; or the input itself is handed out.
    x = weight(N, 3)
    kept = rowprop.pick(x, rows)
    assert kept.grad_fn.name() == "CloneBackward0" and kept.data_ptr() != x.data_ptr()
    assert torch.equal(kept.flatten(), x.flatten())


@pytest.mark.parametrize("rows", [ROWS, torch.ones(N, 3, dtype=torch.bool).tril()], ids=["rows", "a mask"])
def test_without_a_graph_it_is_indexing(rows: Tensor):
    # Red when: a graph is made for an input that has none, or while gradients are off.
    x = torch.randn(N, 3)
    assert torch.equal(rowprop.pick(x, rows), x[rows]) and not rowprop.pick(x, rows).requires_grad
    with torch.no_grad():
        assert not rowprop.pick(x.requires_grad_(), rows).requires_grad


STRIDED = [torch.randn(4, 3, 6).permute(2, 1, 0), torch.randn(6, 3, 4, 5).to(memory_format=torch.channels_last)]
STRIDED += [torch.randn(6, 8)[:, ::2], torch.randn(6, 1).expand(6, 4), torch.randn(6, 4, 3)]
STRIDED += [torch.randn(2, 3, 4, 6).permute(3, 0, 2, 1)]
SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    **{str(rows): lambda x, rows=rows: torch.tensor(rows) for rows in ([4, 1, 2], [1, 1, 5], [*range(6)])},
    **{f"some of {n}": lambda x, n=n: torch.rand(x.shape[:n]) < 0.4 for n in (1, 2)},
    **{f"all of {n}": lambda x, n=n: torch.rand(x.shape[:n]) < 1 for n in (1, 2)},
}


@pytest.mark.parametrize("rows", SHAPED.values(), ids=SHAPED)
@pytest.mark.parametrize("x", STRIDED, ids=lambda x: str(x.stride()))
def test_the_result_has_the_strides_of_plain_indexing(x: Tensor, rows: Callable[[Tensor], Tensor]):
    # Dropout draws in the order of the memory, and a flatten is a view or a copy by the strides. Red with index_select,
    # with the clone of all rows where the input is not contiguous, and with a flattened copy in a mask's place.
    x, at, found = x.detach().requires_grad_(), rows(x), []
    for taken in (rowprop.pick(x, at), x[at]):
        weighed = (taken.flatten(0) * torch.arange(taken.numel())).sum()
        found.append((taken.stride(), taken.detach(), *torch.autograd.grad(weighed, x)))
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1:], found[1][1:]))


def wide(x: Tensor, w: Tensor) -> Tensor:
    """Hidden values (N, 5, 4) of as many tokens as the rows have entries."""
    return (x.flatten().unsqueeze(1) * w[:1]).view(N, 5, 4).exp()


def beside_a_dense_part(take: Take, a: Tensor, b: Tensor, c: Tensor, *_: Tensor) -> Tensor:
    return take((a * c).sum(1), ROWS).sum() + b.exp().sum()


def of_two_parts(take: Take, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    return take(a.exp().sum(1), torch.tensor([1, 4, 4])).sum() + take(b.exp().sum(1), torch.tensor([0, 4])).sum()


def from_first_tokens(h: Tensor) -> Tensor:
    """Something of the first token of each sequence (N, T, 4) is added to it."""
    tokens, first = h.flatten(0, 1), torch.arange(len(h)) * h.shape[1]
    return h + torch.zeros_like(tokens).index_add(0, first, tokens[first].exp()).view_as(h)


def places_and_tokens(take: Take, tokens: Tensor, turned: bool) -> Tensor:
    """Of tokens (N * T, 4); the rows of the pick with fewer lie in two dimensions."""
    of_places, places = tokens.view(N, 5, 4).square().mean(0), torch.zeros(5, 4, dtype=torch.bool)
    places[0, 0] = places[1, 1] = True
    total = take(of_places.T, places.T).sum() if turned else take(of_places, places).sum()
    return total + take(tokens.sin().sum(1), torch.tensor([3, 7])).sum()


def rendered(x: Tensor, w: Tensor, opaque: bool) -> Tensor:
    """Losses of volume rendering: light falls through points, perhaps until nothing behind them is seen."""
    points = x[:, None] * torch.linspace(-1, 1, 5, dtype=x.dtype)[:, None]
    color, density = (points @ w).sigmoid().split([3, 1], -1)
    alpha = density.squeeze(-1)
    alpha = torch.where(alpha > 0.5, 1.0, alpha) if opaque else alpha
    light = F.pad(1 - alpha[:, :-1], (1, 0), value=1).cumprod(1)
    return ((alpha * light)[..., None] * color).sum((1, 2)).square()


OTHERS = torch.tensor([4, 7])
OF_THREE = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]]) > 0
# Red when: the union of two picks is another one's rows; rows and tokens are not brought to the coarser ones first, and
# densify at the sum; the rows of places, in two dimensions, are taken for those of one. A plain gradient beside a
# sliced one counts as the zeros of an output that is not used; an output that no pick reaches counts as dense, or the
# note of one pick's rows is lost at the union. Tokens that come back go to the rows of the dimension of which fewest
# are kept, whatever it is. `where` takes no zeros that a formula makes from the gradient (torch 2.14 and newer), or
# does not see that the other branch is full of zeros (older ones). The rows of a pick's own rows keep their numbers, or
# repeat once only.
PLACES: dict[str, Callable[[Take, Tensor, Tensor, Tensor], Tensor]] = {
    "logits": lambda take, x, w, v: take((x @ w).tanh() @ v, ROWS).square().sum(),
    "features": lambda take, x, w, v: (take((x @ w).tanh(), ROWS) @ v).square().mean(),
    "other rows": lambda take, x, w, v: (
        take((h := (x @ w).tanh()).square().sum(1), ROWS).mean() + take((h @ v).sum(1).exp(), OTHERS).sum()
    ),
    "rows and tokens": lambda take, x, w, v: (
        take((h := wide(x, w)).sum((1, 2)), ROWS).sum()
        + take(h.view(-1, 4).square().sum(1), torch.tensor([2, 7, 21])).sum()
        + v.sum()
    ),
    "a pick of a pick": lambda take, x, w, v: take(take(chain(x, w, v), ROWS), torch.tensor([2, 0])).sum(),
    "some features of some": lambda take, x, w, v: (
        take(take((x @ w).tanh(), torch.tensor([6, 1, 1, 3, 0])) @ v, torch.tensor([1, 4, 1])).square().sum()
    ),
    "tokens of some rows": lambda take, x, w, v: (
        take(take(wide(x, w), torch.tensor([6, 1, 3])).square().sum(2), OF_THREE).exp().sum()
    ),
    "a dense term": lambda take, x, w, v: take(h := chain(x, w, v), ROWS).mean() + 0.1 * h.mean() + w.square().sum(),
    "a dense part": lambda take, x, w, v: beside_a_dense_part(take, *(x @ w).repeat(1, 3).chunk(3, 1)),
    "a dense part, and an unused one": lambda take, x, w, v: beside_a_dense_part(
        take, *(x @ w).repeat(1, 4).chunk(4, 1)
    ),
    "parts of two picks, and an unused one": lambda take, x, w, v: of_two_parts(
        take, *(x @ w).repeat(1, 3).chunk(3, 1)
    ),
    "first tokens": lambda take, x, w, v: (
        take(from_first_tokens(wide(x, w)).square().sum((1, 2)), torch.tensor([0, 1, 3, 5])).square().sum()
    ),
    "places and tokens": lambda take, x, w, v: places_and_tokens(take, wide(x, w).flatten(0, 1), turned=False),
    "places turned, and tokens": lambda take, x, w, v: places_and_tokens(take, wide(x, w).flatten(0, 1), turned=True),
    "volumes": lambda take, x, w, v: take(rendered(x, w, opaque=False), ROWS).mean(),
    "volumes, opaque": lambda take, x, w, v: take(rendered(x, w, opaque=True), ROWS).mean(),
}
APART = {"add.Tensor": "gradients sliced over different batches meet"}
JOINED = {"cat": "a dense gradient is joined to a sliced one"}
MET: dict[str, dict[str, str]] = {  # where a gradient becomes dense: the op, and what the report says
    "a dense term": {"add.Tensor": "a gradient of all rows is added"},
    "a dense part": JOINED,
    "a dense part, and an unused one": JOINED,
    "places and tokens": APART,
    "places turned, and tokens": APART,
}


@pytest.mark.parametrize("place", PLACES)
def test_anywhere_in_the_graph(place: str):
    x, w, v = net()
    report = as_indexed(lambda take: gradients(lambda: PLACES[place](take, x, w, v), [w, v]))
    dense = MET.get(place, {})
    assert report.densified.keys() == dense.keys() and bool(report.sliced) == (place != "a dense term")
    assert all(reason in report.densified[op].reason for op, reason in dense.items())


@pytest.mark.parametrize("policies", [("exact", "rows"), ("rows", "exact"), ("rows", "rows")], ids=str)
def test_a_pick_of_a_pick_approximates_as_little_as_one_of_them(policies: tuple[Any, Any]):
    # Red when: the gradient goes on with the policy of the last pick alone, or of the first.
    x, w, v = net()
    hidden, (first, last) = nn.BatchNorm1d(4, dtype=x.dtype)(x @ w), policies
    some = rowprop.pick(hidden @ v, torch.arange(6), batchnorm=first)
    with rowprop.watch() as report:
        rowprop.pick(some.square().sum(1), torch.arange(3), batchnorm=last).sum().backward()
    assert ("native_batch_norm_backward" in report.densified) == ("exact" in policies)


def test_a_backward_of_the_backward_is_refused():
    # Red when: the backward does not ask whether it is recorded.
    losses = chain(*net())
    loss = rowprop.pick(losses, ROWS).mean()
    with pytest.raises(UnsupportedOperation, match=r"create_graph=True.*use plain indexing, losses\[rows\]"):
        torch.autograd.grad(loss, losses, create_graph=True, retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_rows_left_out_cannot_poison_the_gradient():
    x, infinite = weight(N), torch.ones(N).index_fill(0, torch.tensor(0), torch.inf)
    rowprop.pick(x * infinite, ROWS).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_leaves_with_a_gradient_per_row_get_plain_ones():
    scale, x, w, transposed, picked = weight(N, 1), weight(N, 5), weight(5, 4), weight(5, N), weight(N)
    assert_same_gradients(lambda: ((x * scale + transposed.t()) @ w).square().sum(1), [scale, x, w, transposed])
    assert transposed.grad.stride() == transposed.stride()
    assert_same_gradients(lambda: picked, [picked])


def test_autograd_grad_returns_plain_tensors():
    _, w, v = net()
    x = weight(N, 5)
    hidden = (x @ w).tanh()
    losses = (hidden @ v).square().sum(1)
    for inputs in ([x], [hidden], [w, x], [losses], [v, hidden]):
        as_indexed(lambda take, to=inputs: torch.autograd.grad(take(losses, ROWS).mean(), to, retain_graph=True))
    # One that also flows on acts as a plain one.
    expected = torch.autograd.grad(losses[ROWS].mean(), [hidden, w], retain_graph=True)
    actual = torch.autograd.grad(rowprop.pick(losses, ROWS).mean(), [hidden, w])
    torch.testing.assert_close((actual[0] + 0, actual[1]), expected)
    assert np.allclose(actual[0].numpy(), expected[0].numpy())


def test_a_returned_gradient_leaves_others_of_the_same_sliced():
    # Red when: the caller's dense gradient takes the place of the sliced one that a node beside it gets as well.
    x, w, leaf = weight(N, 3).detach(), weight(3, 3), weight(N, 3)
    report = as_indexed(lambda take: torch.autograd.grad(take((leaf + x @ w).exp().sum(1), ROWS).sum(), [leaf, w]))
    assert report.sliced["mm"] == 1 and not report.densified


SOME_TOKENS = torch.rand(N, 5, generator=torch.Generator().manual_seed(2)) < 0.3


def in_heads(hidden: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """Tokens (N, T, 4) go through (N, 2, T, 4), where the hook sees the gradient."""
    heads = hidden.unflatten(2, (2, 2)).transpose(1, 2)
    heads = torch.cat([heads, heads * 2], -1)
    heads.register_hook(hook)
    return (heads * torch.arange(1.0, 3)[:, None, None]).sum(1)


HOOKED = [(place, rows) for rows in (ROWS, SOME_TOKENS) for place in ("hidden", "leaf", "module")]


@pytest.mark.parametrize("name", picks.HOOKS)
@pytest.mark.parametrize(("place", "rows"), [*HOOKED, ("heads", SOME_TOKENS)])
# Red when: a hook is handed the gradient's values, of K rows, or what it writes is lost; scaling densifies.
def test_hooks_see_and_change_what_they_would_under_indexing(rows: Tensor, name: str, place: str):
    if place == "heads" and (rows.ndim == 1 or name == "rdiv"):
        pytest.skip(
            "2 / 0 has the sign of the zero, and zeros of tokens that are not kept have none; rows have no heads"
        )
    shape, hook = (N, 5)[: rows.ndim], picks.HOOKS[name]
    x, w, v, of_each = torch.randn(*shape, 5, dtype=torch.float64), weight(5, 4), weight(4, 3), weight(*shape, 4)
    module = nn.Tanh()
    if place == "module":
        module.register_full_backward_hook(
            lambda m, inputs, outputs: tuple(g if (new := hook(g)) is None else new for g in inputs)
        )
    if place == "leaf":
        of_each.register_hook(hook)

    def losses() -> Tensor:
        hidden = module(x @ w * 1.5 + of_each)
        if place == "hidden":
            hidden.register_hook(hook)
        return ((in_heads(hidden, hook) if place == "heads" else hidden) @ v).square().sum(-1)

    report = assert_same_gradients(losses, [w, v, of_each], rows)
    assert place == "leaf" or bool(report.densified) == (name not in picks.SCALING)


WRITES = [lambda v: v.mul_(2), lambda v: v.add_(1), lambda v: v.zero_(), lambda v: v.abs_().neg_()]
VIEWS = [
    *(lambda g: g.transpose(0, 1)[1:3], lambda g: g.unsqueeze(1), lambda g: g.unbind(1)[2]),
    *(lambda g: g.split([1, 3], 1)[1].select(1, 2), lambda g: g.diagonal(0, 1, 2), lambda g: g[2:5], lambda g: g[2:7]),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
# Red when: a write to a view changes the values of the view only; or one to some rows goes on at full size, and the
# report says that nothing densified.
def test_a_formula_that_writes_to_a_view_writes_to_what_is_viewed(view: Any, write: Any):
    rows = RowSet(ROWS, N, unique=True, batchnorm="rows")
    values = torch.randn(3, 4, 2)
    dense = torch.zeros(N, 4, 2).index_add(0, ROWS, values)
    with torch._C.DisableTorchFunctionSubclass(), rowprop.watch() as report:  # as autograd's own code calls it
        g = RowGrad(RowSlice(values, rows, Layout(0, N), (N, 4, 2)))
        write(view(g))
    write(view(dense))
    assert bool(report.densified) == (g.full is not None) and torch.equal(g.plain(), dense)


def test_a_hook_that_writes_in_place_leaves_the_callers_gradient_alone():
    x, w, v = net()
    given = torch.ones(3, 1, dtype=torch.float64)
    losses = chain(x, w, v)
    as_column = losses.view(N, 1)
    as_column.register_hook(lambda g: (g.mul_(2), None)[1])
    (expected,) = torch.autograd.grad(losses[ROWS].sum() * 2, w, retain_graph=True)
    for gradient in (given.view(3), torch.ones((), dtype=torch.float64).expand(3)):  # the caller's, or one number
        (found,) = torch.autograd.grad(rowprop.pick(as_column.view(N), ROWS), w, gradient, retain_graph=True)
        torch.testing.assert_close(found, expected)
    assert torch.equal(given, torch.ones_like(given))


CUSTOM: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda g: torch.from_numpy(np.cos(g.numpy())),
    "in place": lambda g: g.mul_(2).add_(1),
    "out": lambda g: torch.mul(g, 3, out=torch.empty_like(g)),
    "pointer": lambda g: g * (2 if g.data_ptr() else 0),
}


@pytest.mark.parametrize("how", CUSTOM.values(), ids=CUSTOM)
def test_custom_functions_receive_a_dense_gradient(how: Callable[[Tensor], Tensor]):
    (x, w, v), custom = net(), passing(how)
    report = assert_same_gradients(lambda: (custom(x @ w) @ v).square().sum(1), [w, v])
    assert "custom function" in report.densified
    assert_same_gradients(lambda: custom(chain(x, w, v)), [w, v])  # right before the pick


def test_a_backward_in_inference_mode():
    # Red when: a tensor that is made in it, as twice a square's input, is asked how often it was written to.
    x, w, v = net()

    def step(take: Take) -> list[Any]:
        loss = take((F.layer_norm(x @ w, (4,)) @ v).square().sum(1), ROWS).mean()
        w.grad = v.grad = None
        with torch.inference_mode():
            loss.backward()
        return [w.grad, v.grad]

    assert not as_indexed(step).densified


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("quick_collections")
def test_nothing_outlives_the_backward(reentrant: bool):
    # Of a reentrant region, see test_backward.py, too.
    x, w, v = net()

    def step() -> tuple[Tensor, list[Any]]:
        rows, inputs = ROWS.clone(), x.clone().requires_grad_()
        joined = checkpoint(lambda t: torch.cat([part @ w for part in t.chunk(2)]), inputs, use_reentrant=reentrant)
        hidden = joined.tanh()
        loss = rowprop.pick((hidden @ v).sum(1), rows).sum() + rowprop.pick(hidden.sum(1), rows + 1).sum()
        loss.backward()
        return loss, [weakref.ref(rows), weakref.ref(hidden)]

    loss, held = step()  # the loss, and with it its graph, is still alive
    gc.collect()
    assert loss.grad_fn is not None and all(ref() is None for ref in held)
    assert not any(type(o) in (RowGrad, RowSlice) for o in gc.get_objects())


@pytest.mark.usefixtures("quick_collections")
def test_rows_go_without_a_garbage_collection():
    # Red when: rows and those derived from them, as from shifted losses, hold each other, and the last gathers.
    def sets() -> int:
        return sum(type(held) is RowSet for held in gc.get_objects())

    x, w, v = net()
    gc.collect()
    before = sets()
    gc.disable()
    try:
        losses = ((x @ w).tanh().view(2, 4, 4) @ v).sum(2)
        rowprop.pick(losses[:, :-1].reshape(6), ROWS[:2]).sum().backward()
        del losses
        assert sets() == before
    finally:
        gc.enable()


def test_a_plain_cross_entropy_has_no_hooks_of_a_parallel_one(monkeypatch: pytest.MonkeyPatch):
    # Red when: DTensors need only be imported; the type of node is remembered as one that needs nothing.
    from torch.distributed.tensor.parallel import loss_parallel

    hooked: list[int] = []
    hook = foreign._slice_parallel_loss
    monkeypatch.setattr(foreign, "_slice_parallel_loss", lambda node: hooked.append(len(made := hook(node))) or made)
    w = weight(5, 3)

    def backward() -> int:
        hooked.clear()
        losses = F.cross_entropy(torch.ones(N, 5).double() @ w, torch.arange(N) % 3, reduction="none")
        rowprop.pick(losses, ROWS).sum().backward()
        return sum(hooked)

    assert backward() == 0
    with loss_parallel():
        assert backward() > 0


@pytest.mark.usefixtures("quick_collections")
def test_hooks_of_one_backward_are_gone_in_the_next():
    x, w, v = net()
    per_row = weight(N, 4)
    per_row.register_hook(lambda g: None)
    losses = (passing(lambda g: g)(x @ w + per_row) @ v).sum(1)
    for _ in range(3):
        with rowprop.watch() as report:
            rowprop.pick(losses, ROWS).sum().backward(retain_graph=True)
        assert report.densified["custom function"].count == 1
        gc.collect()
        functions = [o.__qualname__ for o in gc.get_objects() if type(o) is types.FunctionType]
        assert functions and not any(name.startswith("_densify_output.") for name in functions)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, N]))


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:3], x[3:]])


ALL = torch.ones(N, dtype=torch.bool)
TOKENS = torch.ones(N, 7, dtype=torch.bool)
META, SPARSE = torch.ones(N, device="meta"), torch.ones(N).to_sparse()
INDICES = r"but indices \(K,\), a bool mask"
NO_NUMBERS = "does not hold whole numbers below 2"
BAD_INPUT: list[tuple[dict[str, Any], str]] = [
    ({"input": torch.tensor(1.0)}, r"input is a tensor of shape \(\) but one entry per row was needed"),
    ({"input": [1.0]}, "input is of type list but"),
    ({"input": SPARSE}, "input is torch.sparse_coo; pad it, or call to_dense"),
    ({"input": jagged}, "input is nested; pad it"),
    ({"input": nested}, "input is nested; pad it"),
    ({"batchnorm": np.array(["rows"])}, "batchnorm=array.* but one of None, rows, exact was needed"),
    ({"batchnorm": "row"}, "batchnorm='row' but one of None, rows, exact was needed"),
    ({"attention": "none"}, r"attention='none' but one of exact, cut was needed; the default is exact\.$"),
    ({"input": torch.ones(0), "rows": torch.tensor([0])}, "rows holds the index 0 but input has 0 rows"),
    ({"input": META, "rows": Selection.everything(N)}, "rows is on cpu but input is on meta"),
    ({"input": META, "rows": ALL.to("meta")}, r"mask without values \(meta, fake\); pass indices"),
]
BAD_ROWS: list[tuple[Any, str]] = [
    ([0.5, 1], f"dtype torch.float32 {INDICES}"),
    ([[0, 1]], rf"rows is a tensor of shape \(1, 2\), .* {INDICES}"),
    (["a"], f"rows, a list, {NO_NUMBERS}"),
    ([2**70], f"rows, a list, {NO_NUMBERS}"),
    (np.array(["a"]), f"rows, a ndarray, {NO_NUMBERS}"),
    (np.arange(2.0), f"dtype torch.float64 {INDICES}"),
    ([0, N], f"rows holds the index {N} but input has {N} rows"),
    (range(-N - 1, 0), f"rows holds the index -{N + 1} but input has {N} rows"),
    ([True], r"the mask is \(1,\) but input's first dimensions are \(8,"),
    (ALL[:, None], r"the mask is \(8, 1\) but input's first"),
    (torch.where(ALL), r"rows is a tuple \(tuple\) but .*; pass `list\(rows\)`, or `rows\[0\]` of torch.where"),
    (torch.ones(N).topk(2), r"rows is a tuple \(topk\) but .*; pass its `\.indices`\.$"),
    (ROWS.sort(), r"rows is a tuple \(sort\) but .*; pass its `\.indices`\.$"),
    (ROWS.kthvalue(2), r"rows is a tuple \(kthvalue\) but .*; pass its `\.indices`\.$"),
    (3, f"rows is of type int {INDICES}"),
    (Selection, f"rows is of type type {INDICES}"),
    (ROWS * 1j, "dtype torch.complex64 but indices"),
    (ALL.to_sparse(), "layout torch.sparse_coo and dtype"),
    (torch.tensor(2), r"rows is a tensor of shape \(\)"),
    (ROWS[None], r"rows is a tensor of shape \(1, 3\)"),
    (ROWS.to(torch.uint8), r"dtype uint8; pass rows.long\(\) for indices, or"),
    (ROWS.to("meta"), "rows is on meta but input is on cpu; move one of them"),
    (Selection.everything(5), "the selection is of 5 rows but input has 8"),
    (Selection.everything(N, "meta"), "rows is on meta but input is on cpu"),
]
BAD_TOKENS: list[tuple[Any, str]] = [  # of (8, 7); a mask of as many entries is not one of the input's shape
    *(
        (ALL[:1].expand(shape), f"the mask is {re.escape(str(shape))} but input's first dimensions")
        for shape in ((8, 8), (7, 8), (8, 7, 1), (1, 7), (56,))
    ),
    *(
        (TOKENS.to(dtype), rf"rows is a tensor of shape \(8, 7\), layout torch.strided and dtype {dtype} but")
        for dtype in (torch.float32, torch.uint8, torch.int64)
    ),
    (TOKENS.to("meta"), "rows is on meta but input is on cpu; move one of them"),
    (TOKENS.to_sparse(), r"rows is a tensor of shape \(8, 7\), layout torch.sparse_coo"),
    (torch.tensor([56]), "rows holds the index 56 but input has 8 rows"),
]
REFUSED = [*BAD_INPUT, *(({"rows": rows}, sentence) for rows, sentence in BAD_ROWS)]
REFUSED += [({"rows": rows, "input": torch.ones(N, 7)}, sentence) for rows, sentence in BAD_TOKENS]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
@pytest.mark.usefixtures("as_host")  # a device's values are not looked at: torch refuses them
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_input_is_refused_in_one_sentence(given: dict[str, Any], sentence: str):
    made = given["input"](weight(N)) if callable(given.get("input")) else given.get("input", weight(N))
    with pytest.raises(InvalidInput, match=sentence) as error:
        rowprop.pick(**{"rows": ROWS, **given, "input": made})
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [(0, 1), ROWS.float(), ALL[:5], Selection.everything(5)])
def test_bad_rows_are_refused_under_a_transform_too(rows: Any):
    # Red when: under torch.func the rows are not checked before plain indexing.
    with pytest.raises(InvalidInput, match=r"was needed|but input has|but input's first"):
        torch.func.grad(lambda x: rowprop.pick(x**2, rows).sum())(torch.ones(N))


def test_under_fake_tensors_shapes_go_through():
    # Red where an index of a fake tensor is read, and where its mask is counted.
    with FakeTensorMode() as mode:
        model, x = nn.Linear(4, 3), torch.randn(N, 4)
        rowprop.pick(model(x).square().sum(1), mode.from_tensor(torch.tensor([1, 2]))).mean().backward()
        assert model.weight.grad.shape == (3, 4)
        with pytest.raises(InvalidInput, match="a mask without values"):
            rowprop.pick(model(x).square().sum(1), mode.from_tensor(ALL))
