"""pick() against plain indexing, in any company: hooks, custom functions, autograd.grad, several picks."""

from __future__ import annotations

import copy
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rowprop
from rowprop.backprop.layout import Layout
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.sliced import RowSet, RowSlice
from rowprop.errors import InvalidInput, UnsupportedOperation
from rowprop.selection.base import Selection

N = 8
ROWS = torch.tensor([1, 4, 6])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Losses (N,) of a two-layer net."""
    return ((x @ w).tanh() @ v).square().sum(1)


def gradients(make_loss, leaves):
    for leaf in leaves:
        leaf.grad = None
    make_loss().backward()
    return [leaf.grad for leaf in leaves]


def assert_same_gradients(losses, leaves, rows=ROWS, **options):
    """pick and indexing leave the same plain gradients; returns the report."""
    expected = gradients(lambda: losses()[rows].mean(), leaves)
    with rowprop.watch() as report:
        actual = gradients(lambda: rowprop.pick(losses(), rows, **options).mean(), leaves)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            assert type(a) is Tensor
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-13)
    return report


@pytest.fixture
def net():
    return torch.randn(N, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)


# --- what rows may be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([3]),
        torch.tensor([5, 0, 2]),
        torch.tensor([2, 2, 7, 2]),
        torch.tensor([-1, 0, -8]),
        torch.tensor([1, 3], dtype=torch.int32),
        torch.arange(N),
        torch.tensor([4, 6, 5, 7, 0, 3, 1, 2]),
        torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 1]),
        torch.arange(N) % 3 == 0,
        torch.ones(N, dtype=torch.bool),
    ],
    ids=str,
)
def test_values_and_gradients_equal_plain_indexing(net, rows):
    x, w, v = net
    assert torch.equal(rowprop.pick(chain(x, w, v), rows), chain(x, w, v)[rows])
    # Red when: N rows or more are sliced, which costs a gather and saves nothing.
    report = assert_same_gradients(lambda: chain(x, w, v), [w, v], rows)
    kept = int(rows.sum()) if rows.dtype == torch.bool else len(rows)
    assert bool(report.sliced) == (kept < N) and not report.densified


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([5, 0, 2], lambda index: index),
        ([-1, 0, -8], lambda index: index),
        ([2, 2], lambda index: index),
        ([0, 2, 5], lambda index: Selection(index, torch.ones(3), N)),
    ],
    ids=["unsorted", "negative", "repeats", "a selection"],
)
def test_the_next_steps_rows_may_be_written_before_the_backward(net, rows, given):
    # Red when: the backward reads the caller's indices, which plain indexing would refuse to do by now.
    x, w, v = net
    index = torch.tensor(rows)
    expected = gradients(lambda: chain(x, w, v)[torch.tensor(rows)].sum(), [w, v])
    kept = rowprop.pick(chain(x, w, v), given(index)).sum()
    index.fill_(3)
    torch.testing.assert_close(gradients(lambda: kept, [w, v]), expected)


def test_no_row_gives_the_zero_gradients_of_plain_indexing(net):
    x, w, v = net
    none = torch.tensor([], dtype=torch.int64)
    expected = gradients(lambda: chain(x, w, v)[none].sum(), [w, v])
    actual = gradients(lambda: rowprop.pick(chain(x, w, v), none).sum(), [w, v])
    assert all(torch.equal(a, e) and not e.any() for a, e in zip(actual, expected, strict=True))


def test_no_row_costs_one_row_and_is_not_poisoned_by_another(net):
    # Red when: the row that stands in for an empty pick is always the first row, or an infinite row.
    x, w, v = net
    x[0], x[1] = torch.inf, torch.nan
    none = torch.tensor([], dtype=torch.int64)
    with rowprop.watch() as report:
        grads = gradients(lambda: rowprop.pick(x @ w @ v, none).sum(), [w, v])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)
    assert report.sliced
    assert not report.densified


def test_a_selection_is_picked_without_its_weights(net):
    x, w, v = net
    selection = Selection(ROWS, torch.tensor([0.5, 0.3, 0.2]), N)
    assert torch.equal(rowprop.pick(chain(x, w, v), selection), chain(x, w, v)[ROWS])


def test_keeping_everything_returns_a_copy_and_slices_nothing(net):
    x, w, v = net
    losses = chain(x, w, v)
    with rowprop.watch() as report:
        kept = rowprop.pick(losses, Selection.everything(N))
        kept.sum().backward()
    assert torch.equal(kept, losses) and kept.data_ptr() != losses.data_ptr()
    assert not report.sliced


@pytest.mark.parametrize("where", ["losses", "logits", "features"])
def test_anywhere_in_the_graph(net, where):
    x, w, v = net

    def loss(take):
        hidden = (x @ w).tanh()
        hidden = take(hidden) if where == "features" else hidden
        logits = hidden @ v
        logits = take(logits) if where == "logits" else logits
        losses = logits.square().sum(1)
        return (take(losses) if where == "losses" else losses).mean()

    expected = gradients(lambda: loss(lambda t: t[ROWS]), [w, v])
    with rowprop.watch() as report:
        actual = gradients(lambda: loss(lambda t: rowprop.pick(t, ROWS)), [w, v])
    torch.testing.assert_close(actual, expected)
    assert report.sliced and not report.densified


# --- several picks, dense terms beside them ---------------------------------------------------------------------------


def test_picks_of_different_rows_meet_as_their_union(net):
    x, w, v = net
    others = torch.tensor([4, 7])

    def loss(take):
        hidden = (x @ w).tanh()
        return take(hidden.square().sum(1), ROWS).mean() + take((hidden @ v).sum(1).exp(), others).sum()

    expected = gradients(lambda: loss(lambda t, r: t[r]), [w, v])
    with rowprop.watch() as report:
        actual = gradients(lambda: loss(rowprop.pick), [w, v])
    torch.testing.assert_close(actual, expected)
    assert not report.densified


@pytest.mark.parametrize("first", ["rows", "exact"])
def test_picks_of_unlike_batchnorm_are_exact_where_they_meet(first):
    # Red when: the union of an exact pick and another one is not exact.
    x, w, v = weight(N, 5), weight(5, 4), weight(4, 3)
    others = torch.tensor([4, 7])
    second = {"rows": "exact", "exact": "rows"}[first]

    def loss(a, b):
        hidden = torch.nn.functional.batch_norm(x @ w, None, None, training=True)
        return a(hidden.square().sum(1)).mean() + b((hidden @ v).exp().sum(1)).sum()

    expected = gradients(lambda: loss(lambda t: t[ROWS], lambda t: t[others]), [x, w, v])
    with rowprop.watch() as report:
        actual = gradients(
            lambda: loss(
                lambda t: rowprop.pick(t, ROWS, batchnorm=first), lambda t: rowprop.pick(t, others, batchnorm=second)
            ),
            [x, w, v],
        )
    torch.testing.assert_close(actual, expected)
    assert set(report.densified) == {"native_batch_norm_backward"}


def test_a_pick_of_rows_and_a_pick_of_their_tokens_meet_as_rows():
    # Red when: operands are not brought to the coarser rows before they are united: the sum would densify.
    w, x, tokens = weight(3, 4), torch.randn(N, 5, 3, dtype=torch.float64), torch.tensor([2, 7, 21])

    def loss(take):
        hidden = (x.flatten(0, 1) @ w).square()
        return take(hidden.view(N, 5, 4).sum((1, 2)), ROWS).sum() + take(hidden.sum(1), tokens).sum()

    expected = gradients(lambda: loss(lambda t, r: t[r]), [w])
    with rowprop.watch() as report:
        actual = gradients(lambda: loss(rowprop.pick), [w])
    torch.testing.assert_close(actual, expected)
    assert not report.densified


def test_a_pick_of_tokens_is_exact_at_a_batchnorm_over_sequences():
    # Red when: `batchnorm="exact"` is lost as rows of tokens become rows of sequences.
    x, w = weight(N, 3, 5), weight(3, 4)
    tokens = torch.tensor([3, 4, 17])

    def losses():
        hidden = torch.nn.functional.batch_norm(x, None, None, training=True)
        return (hidden.transpose(1, 2).reshape(N * 5, 3) @ w).exp().sum(1)

    report = assert_same_gradients(losses, [x, w], tokens, batchnorm="exact")
    assert set(report.densified) == {"native_batch_norm_backward"}


def test_a_pick_of_a_pick(net):
    x, w, v = net
    expected = gradients(lambda: chain(x, w, v)[ROWS][torch.tensor([2, 0])].sum(), [w, v])
    actual = gradients(lambda: rowprop.pick(rowprop.pick(chain(x, w, v), ROWS), torch.tensor([2, 0])).sum(), [w, v])
    torch.testing.assert_close(actual, expected)


def test_a_dense_term_beside_a_pick(net):
    x, w, v = net

    def loss(take):
        losses = chain(x, w, v)
        return take(losses).mean() + 0.1 * losses.mean() + w.square().sum()

    expected = gradients(lambda: loss(lambda t: t[ROWS]), [w, v])
    torch.testing.assert_close(gradients(lambda: loss(lambda t: rowprop.pick(t, ROWS)), [w, v]), expected)


def test_gradients_accumulate_into_an_existing_grad(net):
    x, w, v = net
    w.grad, v.grad = torch.ones_like(w), torch.ones_like(v)
    chain(x, w, v)[ROWS].mean().backward()
    expected = [w.grad, v.grad]
    w.grad, v.grad = torch.ones_like(w), torch.ones_like(v)
    rowprop.pick(chain(x, w, v), ROWS).mean().backward()
    torch.testing.assert_close([w.grad, v.grad], expected)


def test_retain_graph_gives_the_same_gradient_again(net):
    x, w, v = net
    loss = rowprop.pick(chain(x, w, v), ROWS).mean()
    loss.backward(retain_graph=True)
    once = w.grad.clone()
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * once)


# --- leaves and returned gradients ------------------------------------------------------------------------------------


def test_leaves_with_a_gradient_per_row_get_plain_ones():
    scale, x, w = weight(N, 1), weight(N, 5), weight(5, 4)
    transposed = weight(5, N)

    def losses():
        return ((x * scale + transposed.t()) @ w).square().sum(1)

    assert_same_gradients(losses, [scale, x, w, transposed])
    picked = weight(N)
    assert_same_gradients(lambda: picked, [picked])


def test_a_per_row_leaf_accumulates_and_keeps_its_memory_layout():
    x = torch.randn(5, N, dtype=torch.float64).t().requires_grad_()
    x.grad = None
    rowprop.pick(x.exp().sum(1), ROWS).sum().backward()
    rowprop.pick(x.exp().sum(1), ROWS).sum().backward()
    expected = torch.zeros_like(x)
    expected[ROWS] = 2 * x.detach()[ROWS].exp()
    assert type(x.grad) is Tensor and x.grad.stride() == x.stride()
    torch.testing.assert_close(x.grad, expected)


def test_autograd_grad_returns_plain_tensors(net):
    _, w, v = net
    x = weight(N, 5)
    hidden = (x @ w).tanh()
    losses = (hidden @ v).square().sum(1)
    for inputs in ([x], [hidden], [w, x], [losses], [v, hidden]):
        expected = torch.autograd.grad(losses[ROWS].mean(), inputs, retain_graph=True)
        actual = torch.autograd.grad(rowprop.pick(losses, ROWS).mean(), inputs, retain_graph=True)
        for a, e in zip(actual, expected, strict=True):
            assert type(a) is Tensor
            torch.testing.assert_close(a, e)


def test_a_returned_gradient_leaves_others_of_the_same_sliced():
    # Red when: the caller's dense gradient takes the place of the sliced one that a node beside it gets as well.
    x, w, leaf = torch.randn(N, 3), torch.randn(3, 3).requires_grad_(), torch.randn(N, 3).requires_grad_()

    def gradients(take):
        return torch.autograd.grad(take((leaf + x @ w).exp().sum(1)).sum(), [leaf, w])

    with rowprop.watch() as report:
        actual = gradients(lambda losses: rowprop.pick(losses, ROWS))
    torch.testing.assert_close(actual, gradients(lambda losses: losses[ROWS]))
    assert report.sliced["mm"] == 1 and not report.densified


def test_a_returned_gradient_that_also_flows_on_acts_as_a_plain_one(net):
    x, w, v = net
    hidden = (x @ w).tanh()
    losses = (hidden @ v).square().sum(1)
    expected = torch.autograd.grad(losses[ROWS].mean(), [hidden, w], retain_graph=True)
    actual = torch.autograd.grad(rowprop.pick(losses, ROWS).mean(), [hidden, w])
    torch.testing.assert_close(actual[0] + 0, expected[0])
    assert np.allclose(actual[0].numpy(), expected[0].numpy())
    torch.testing.assert_close(actual[1], expected[1])


def test_retain_grad_keeps_a_plain_tensor(net):
    x, w, v = net
    hidden = (x @ w).tanh()
    hidden.retain_grad()
    rowprop.pick((hidden @ v).sum(1), ROWS).sum().backward()
    expected = torch.zeros(N, 4, dtype=torch.float64)
    expected[ROWS] = v.detach().sum(1)
    assert type(hidden.grad) is Tensor
    torch.testing.assert_close(hidden.grad, expected)


# --- hooks ------------------------------------------------------------------------------------------------------------

HOOKS = {
    "times a number": lambda g: g * 2,
    "times a tensor": lambda g: g * torch.linspace(0, 1, 4, dtype=g.dtype),
    "in place mul": lambda g: g.mul_(0.5),
    "in place mul without return": lambda g: (g.mul_(0.5), None)[1],
    "in place div": lambda g: (g.div_(3), None)[1],
    "augmented": lambda g: (g.__imul__(3), None)[1],
    "add a constant": lambda g: g + 1,
    "in place add": lambda g: (g.add_(1), None)[1],
    "zero": lambda g: (g.zero_(), None)[1],
    "copy": lambda g: (g.copy_(torch.ones_like(g)), None)[1],
    "setitem row": lambda g: (g.__setitem__(2, 5.0), None)[1],
    "setitem mask": lambda g: (g.__setitem__(g == 0, 1.0), None)[1],
    "view then write": lambda g: (g.view(-1).__setitem__(3, 7.0), None)[1],
    "out=": lambda g: (torch.add(g, 1, out=g), None)[1],
    "foreach": lambda g: (torch._foreach_mul_([g], 2.0), None)[1],
    "foreach add": lambda g: (torch._foreach_add_([g], 1.0), None)[1],
    "cos": lambda g: g.cos(),
    "exp": torch.exp,
    "clamp": lambda g: g.clamp(min=0.1),
    "where": lambda g: torch.where(g > 0, g, torch.ones_like(g)),
    "compare": lambda g: (g >= 0).to(g.dtype),
    "numpy": lambda g: torch.from_numpy(g.numpy() + 1),
    "numpy in place": lambda g: (np.add(g.numpy(), 1, out=g.numpy()), None)[1],
    "asarray": lambda g: torch.from_numpy(np.asarray(g) * 2),
    "tolist": lambda g: torch.tensor(g.tolist(), dtype=g.dtype) + 1,
    "deepcopy": lambda g: copy.deepcopy(g) + 1,
    "clone": lambda g: g.clone().fill_(2.0),
    "detach": lambda g: (g.detach().mul_(3), None)[1],
    "data": lambda g: (g.data.mul_(3), None)[1],
    "norm clip": lambda g: g / max(1.0, g.norm().item()),
    "equal": lambda g: g * 2 if torch.equal(g, g) else g,
    "iterate": lambda g: torch.stack([row * 2 for row in g]),
    "bool": lambda g: g if bool((g != 0).any()) else g + 1,
    "repr": lambda g: (repr(g), str(g), f"{g}", g)[3],
    "meta": lambda g: g * (g.shape[0] + g.dim() + len(g) + g.numel()),
    "power": lambda g: g**2,
    "divide by it": lambda g: 1 / (g + 2),
    "rdiv": lambda g: (2 / g).nan_to_num(posinf=1.0),
    "matmul": lambda g: g @ torch.ones(4, 4, dtype=g.dtype),
    "batched": lambda g: torch.vmap(lambda r: r * 2)(g),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
@pytest.mark.parametrize("place", ["hidden", "leaf", "module"])
def test_hooks_see_and_change_what_they_would_under_indexing(net, hook, place):
    x, w, v = net
    per_row = weight(N, 4)

    class Hidden(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.tanh()

    module = Hidden()
    if place == "module":
        module.register_full_backward_hook(lambda m, inputs, outputs: tuple(_or(hook(g), g) for g in inputs))
    if place == "leaf":
        per_row.register_hook(hook)

    def losses():
        hidden = module(x @ w * 1.5 + per_row)
        if place == "hidden":
            hidden.register_hook(hook)
        return (hidden @ v).square().sum(1)

    assert_same_gradients(losses, [w, v, per_row])


def _or(a, b):
    return b if a is None else a


def test_a_hook_on_a_per_row_leaf_sees_a_plain_tensor():
    x, seen = weight(N, 3), []
    x.register_hook(lambda g: seen.append(type(g)))
    rowprop.pick(x.exp().sum(1), ROWS).sum().backward()
    assert seen == [Tensor]


def test_scaling_hooks_stay_sliced(net):
    x, w, v = net
    hidden = (x @ w).tanh()
    hidden.register_hook(lambda g: g * 0.5)
    with rowprop.watch() as report:
        rowprop.pick((hidden @ v).sum(1), ROWS).sum().backward()
    assert not report.densified


@pytest.mark.parametrize(
    "write", [lambda v: v.mul_(2), lambda v: v.add_(1), lambda v: v.zero_(), lambda v: v.abs_().neg_()]
)
@pytest.mark.parametrize(
    "view",
    [
        lambda g: g.transpose(0, 1)[1:3],
        lambda g: g.unsqueeze(1),
        lambda g: g.unbind(1)[2],
        lambda g: g.split([1, 3], 1)[1].select(1, 2),
        lambda g: g.diagonal(0, 1, 2),
        lambda g: g[2:5],
    ],
)
# Red when: a write to a view changes the values of the view only.
def test_a_formula_that_writes_to_a_view_writes_to_what_is_viewed(view, write):
    rows = RowSet(ROWS, N, unique=True, batchnorm="rows")
    values = torch.randn(3, 4, 2)
    dense = torch.zeros(N, 4, 2).index_add(0, ROWS, values)
    with torch._C.DisableTorchFunctionSubclass():  # as autograd's own code calls it
        g = RowGrad(RowSlice(values, rows, Layout(0, N), (N, 4, 2)))
        write(view(g))
    write(view(dense))
    assert torch.equal(g.plain(), dense)


def test_a_write_that_makes_the_viewed_gradient_dense_is_reported():
    # Red when: the write to some rows goes on at full size, and the report says that nothing densified.
    rows = RowSet(ROWS, N, unique=True, batchnorm="rows")
    with torch._C.DisableTorchFunctionSubclass(), rowprop.watch() as report:
        g = RowGrad(RowSlice(torch.randn(3, 4), rows, Layout(0, N), (N, 4)))
        g[2:7].mul_(2)
    assert g.full is not None and set(report.densified) == {"mul_.Tensor"}


def test_a_hook_that_writes_in_place_leaves_the_callers_gradient_alone(net):
    x, w, v = net
    given = torch.ones(3, 1, dtype=torch.float64)
    losses = chain(x, w, v)
    as_column = losses.view(N, 1)
    as_column.register_hook(lambda g: (g.mul_(2), None)[1])
    rowprop.pick(as_column.view(N), ROWS).backward(given.view(3), retain_graph=True)
    twice = w.grad.clone()
    w.grad = None
    rowprop.pick(as_column.view(N), ROWS).sum().backward()  # a gradient expanded from one number
    assert torch.equal(given, torch.ones_like(given))
    torch.testing.assert_close(w.grad, twice)
    torch.testing.assert_close(w.grad, 2 * torch.autograd.grad(chain(x, w, v)[ROWS].sum(), w)[0])


# --- custom functions -------------------------------------------------------------------------------------------------


class Custom(torch.autograd.Function):
    how = staticmethod(lambda g: g)

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        assert type(grad) is Tensor
        return Custom.how(grad)


CUSTOM = {
    "numpy": lambda g: torch.from_numpy(np.cos(g.numpy())),
    "in place": lambda g: g.mul_(2).add_(1),
    "out": lambda g: torch.mul(g, 3, out=torch.empty_like(g)),
    "pointer": lambda g: g * (2 if g.data_ptr() else 0),
}


@pytest.mark.parametrize("how", CUSTOM.values(), ids=CUSTOM.keys())
def test_custom_functions_receive_a_dense_gradient(net, how):
    x, w, v = net
    Custom.how = staticmethod(how)
    report = assert_same_gradients(lambda: (Custom.apply(x @ w) @ v).square().sum(1), [w, v])
    assert "custom function" in report.densified


def test_a_custom_function_right_before_the_pick(net):
    x, w, v = net
    Custom.how = staticmethod(lambda g: g * 2)
    assert_same_gradients(lambda: Custom.apply(chain(x, w, v)), [w, v])


# --- checkpointing, saved tensors, modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(net, reentrant):
    x, w, v = net
    x = x.requires_grad_()

    def losses():
        hidden = torch.utils.checkpoint.checkpoint(lambda a: (a @ w).tanh(), x, use_reentrant=reentrant)
        return (hidden @ v).square().sum(1)

    assert_same_gradients(losses, [w, v, x])


def test_saved_tensor_hooks(net):
    x, w, v = net

    def losses():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            return chain(x, w, v)

    assert_same_gradients(losses, [w, v])


def test_autocast_bfloat16():
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    x, y = torch.randn(N, 6), torch.randint(0, 3, (N,))

    def losses():
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y, reduction="none")

    leaves = list(model.parameters())
    expected = gradients(lambda: losses()[ROWS].mean(), leaves)
    with rowprop.watch() as report:
        actual = gradients(lambda: rowprop.pick(losses(), ROWS).mean(), leaves)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=1e-3)
    assert not report.densified


def test_double_backward_is_refused(net):
    x, w, v = net
    loss = rowprop.pick(chain(x, w, v), ROWS).mean()
    with pytest.raises(UnsupportedOperation, match=r"create_graph=True.*use plain indexing, losses\[rows\]"):
        torch.autograd.grad(loss, [w], create_graph=True)


def test_without_a_graph_it_is_indexing(net):
    x, w, v = net
    with torch.no_grad():
        assert rowprop.pick(chain(x, w, v), ROWS).grad_fn is None
    assert not rowprop.pick(torch.arange(8.0), ROWS).requires_grad


def test_unused_parameters_stay_without_a_gradient(net):
    x, w, v = net
    unused = weight(3)
    assert_same_gradients(lambda: chain(x, w, v), [w, v, unused])


def test_rows_left_out_cannot_poison_the_gradient():
    x = weight(N)
    infinite = torch.ones(N, dtype=torch.float64)
    infinite[0] = torch.inf
    rowprop.pick(x * infinite, ROWS).sum().backward()
    assert torch.isfinite(x.grad).all()


# --- nothing stays behind ---------------------------------------------------------------------------------------------


def test_nothing_outlives_the_backward(net):
    x, w, v = net
    kept = []

    def step():
        rows = ROWS.clone()
        hidden = (x @ w).tanh()
        kept.extend([weakref.ref(hidden), weakref.ref(rows)])
        loss = rowprop.pick((hidden @ v).sum(1), rows).sum() + rowprop.pick(hidden.sum(1), rows + 1).sum()
        loss.backward()

    def unfinished():
        inputs = x.clone()
        kept.append(weakref.ref(inputs))
        loss = rowprop.pick(chain(inputs, w, v), ROWS).sum()
        loss.backward()
        return loss

    loss = unfinished()  # and is still alive
    step()
    gc.collect()
    assert loss.grad_fn is not None
    assert all(ref() is None for ref in kept)
    assert not any(type(o) in (RowGrad, RowSlice) for o in gc.get_objects())


def test_hooks_of_one_backward_are_gone_in_the_next(net):
    x, w, v = net
    per_row = weight(N, 4)
    per_row.register_hook(lambda g: None)
    Custom.how = staticmethod(lambda g: g)
    losses = (Custom.apply(x @ w + per_row) @ v).sum(1)
    for _ in range(3):
        with rowprop.watch() as report:
            rowprop.pick(losses, ROWS).sum().backward(retain_graph=True)
        assert report.densified["custom function"].count == 1
        gc.collect()
        assert not any(o.__qualname__.startswith("_densify_output.") for o in functions())


def functions():
    return [o for o in gc.get_objects() if type(o) is types.FunctionType]


def test_watch_sees_only_what_runs_inside(net):
    x, w, v = net
    with rowprop.watch() as outer:
        with rowprop.watch() as inner:
            pass
        rowprop.pick(chain(x, w, v), ROWS).mean().backward()
    assert outer.sliced["mm"] == 3 and not inner.sliced
    assert str(outer).startswith("sliced: ") and "densified: nothing" in str(outer)


def test_watch_names_the_op_that_mixes_rows(net):
    x, w, v = net
    with rowprop.watch() as report:
        rowprop.pick(((x @ w).softmax(0) @ v).sum(1), ROWS).mean().backward()
    entry = report.densified["_softmax_backward_data"]
    assert (entry.count, entry.reason) == (1, "the softmax runs over the batch dimension")
    assert "densified: _softmax_backward_data x1: the softmax runs over the batch dimension" in str(report)


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, N]))


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:3], x[3:]])


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda t: rowprop.pick(t.sum(), ROWS), r"input is a tensor of shape \(\) but .* one entry per row was needed"),
        (lambda t: rowprop.pick([1.0], ROWS), "input is of type list but"),
        (lambda t: rowprop.pick(t.detach().to_sparse(), ROWS), "input has the layout torch.sparse_coo but a dense"),
        (lambda t: rowprop.pick(jagged(t), ROWS), "input has the layout torch.jagged and is nested but a dense"),
        (lambda t: rowprop.pick(nested(t), ROWS), "input has the layout torch.strided and is nested but a dense"),
        (lambda t: rowprop.pick(t, [0.5, 1]), "dtype torch.float32 but integer indices"),
        (
            lambda t: rowprop.pick(t, [[0, 1]]),
            r"rows is a tensor of shape \(1, 2\), .* but integer indices of shape \(K,\)",
        ),
        (lambda t: rowprop.pick(t, ["a"]), "rows is of type list and holds other things than whole numbers below 2"),
        (lambda t: rowprop.pick(t, [2**70]), "rows is of type list and holds other things than whole numbers below 2"),
        (lambda t: rowprop.pick(t, np.array(["a"])), "rows is of type ndarray and holds other things than whole"),
        (lambda t: rowprop.pick(t, np.arange(2.0)), "dtype torch.float64 but integer indices"),
        (lambda t: rowprop.pick(t, [0, N]), f"rows holds the index {N} but input has {N} rows"),
        (lambda t: rowprop.pick(t, range(-N - 1, 0)), f"rows holds the index -{N + 1} but input has {N} rows"),
        (lambda t: rowprop.pick(t, [True]), r"the mask has the shape \(1,\) but input has the shape \(8,"),
        (
            lambda t: rowprop.pick(t, (0, 1)),
            r"rows is a tuple \(tuple\), which .*; pass `list\(rows\)`, or `rows\[0\]`",
        ),
        (
            lambda t: rowprop.pick(t, torch.where(t > 0)),
            r"rows is a tuple \(tuple\), which .*`rows\[0\]` of torch.where",
        ),
        (lambda t: rowprop.pick(t, t.topk(2)), r"rows is a tuple \(topk\), which .*; pass its `\.indices`\.$"),
        (lambda t: rowprop.pick(t, t.sort()), r"rows is a tuple \(sort\), which .*; pass its `\.indices`\.$"),
        (lambda t: rowprop.pick(t, t.kthvalue(2)), r"rows is a tuple \(kthvalue\), which .*; pass its `\.indices`\.$"),
        (lambda t: rowprop.pick(t, 3), r"rows is of type int but integer indices of shape \(K,\)"),
        (lambda t: rowprop.pick(t, Selection), r"rows is of type type but integer indices of shape \(K,\)"),
        (lambda t: rowprop.pick(t, ROWS.float()), "dtype torch.float32 but integer indices"),
        (lambda t: rowprop.pick(t, ROWS * 1j), "dtype torch.complex64 but integer indices"),
        (lambda t: rowprop.pick(t, torch.ones(N, dtype=torch.bool).to_sparse()), "layout torch.sparse_coo and dtype"),
        (
            lambda t: rowprop.pick(t, torch.ones(N, 1, dtype=torch.bool)),
            r"the mask has the shape \(8, 1\) but input has the",
        ),
        (lambda t: rowprop.pick(t, torch.tensor(2)), r"rows is a tensor of shape \(\)"),
        (lambda t: rowprop.pick(t, ROWS.to(torch.uint8)), "dtype torch.uint8, which torch's own indexing takes for a"),
        (lambda t: rowprop.pick(t, ROWS.to("meta")), "rows is on meta but input is on cpu; move one of them"),
        (lambda t: rowprop.pick(t.to("meta"), Selection.everything(N)), "rows is on cpu but input is on meta"),
        (lambda t: rowprop.pick(t.to("meta"), torch.ones(N, dtype=torch.bool, device="meta")), "mask on the device"),
        (lambda t: rowprop.pick(t, ROWS[None]), r"rows is a tensor of shape \(1, 3\)"),
        (lambda t: rowprop.pick(t, torch.tensor([0, 8])), "rows holds the index 8 but input has 8 rows"),
        (lambda t: rowprop.pick(t, torch.tensor([-9, 1])), "rows holds the index -9 but input has 8 rows"),
        (
            lambda t: rowprop.pick(t, torch.ones(5, dtype=torch.bool)),
            r"the mask has the shape \(5,\) but input has the shape \(8,",
        ),
        (lambda t: rowprop.pick(t, Selection.everything(5)), "made from 5 rows but input has 8"),
        (lambda t: rowprop.pick(t, Selection.everything(N, "meta")), "rows is on meta but input is on cpu"),
        (lambda t: rowprop.pick(t, Selection.mean(ROWS.flip(0), N)), "ascending and each once"),
        (lambda t: rowprop.pick(t[:0], torch.tensor([0])), "rows holds the index 0 but input has 0 rows"),
        (
            lambda t: rowprop.pick(t, ROWS, batchnorm=np.array(["rows"])),
            "batchnorm is array.* but 'rows', 'exact' or None was needed",
        ),
        (lambda t: rowprop.pick(t, ROWS, batchnorm="row"), "batchnorm is 'row' but 'rows', 'exact' or None was needed"),
    ],
)
@pytest.mark.usefixtures("as_host")  # a device's values are not looked at: torch refuses them
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_input_is_refused_in_one_sentence(call, sentence):
    with pytest.raises(InvalidInput, match=sentence) as error:
        call(weight(N))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("rows", [(0, 1), ROWS.float(), torch.ones(5, dtype=torch.bool), Selection.everything(5)])
def test_bad_rows_are_refused_under_a_transform_too(rows):
    # Red when: under torch.func the rows are not checked before plain indexing.
    with pytest.raises(InvalidInput, match=r"was needed|but input has"):
        torch.func.grad(lambda x: rowprop.pick(x**2, rows).sum())(torch.ones(N))


LISTED = {
    "a list": ([1, 2, 5], [1, 2, 5]),
    "a list with negative ones and repeats": ([-1, 2, 2], [7, 2, 2]),
    "a list of bools": ([row in (0, 6) for row in range(N)], [0, 6]),
    "an empty list": ([], []),
    "a range": (range(1, N, 3), [1, 4, 7]),
    "an empty range": (range(0), []),
    "an array": (np.array([6, 0, 3], dtype=np.int32), [6, 0, 3]),
    "an array from its end": (np.arange(N)[::-3], [7, 4, 1]),
    "a read-only array": (np.broadcast_to(np.array(2), (3,)), [2, 2, 2]),
    "an array of bools": (np.arange(N) % 3 == 1, [1, 4, 7]),
}


@pytest.mark.parametrize(("rows", "same"), LISTED.values(), ids=LISTED)
def test_lists_ranges_and_arrays_are_rows(rows, same):
    # Red when: one of them is refused, an array is not copied first, or an empty list becomes a tensor of floats.
    x, found = torch.randn(N, 3), []
    for take in (
        lambda losses: rowprop.pick(losses, rows),
        lambda losses: losses[torch.tensor(same, dtype=torch.long)],
    ):
        w = torch.ones(3, requires_grad=True)
        taken = take((x @ w).square())
        found.append((taken.detach(), *torch.autograd.grad(taken.sum(), w)))
    torch.testing.assert_close(found[0], found[1])


def test_a_nested_list_of_bools_is_a_mask_of_tokens():
    # Red when: lists have one dimension.
    x, mask = torch.randn(2, 3), [[True, False, True], [False, False, True]]
    assert torch.equal(rowprop.pick(x, mask), x[torch.tensor(mask)])


@pytest.mark.parametrize("rows", [[4, 1, 2], [1, 1, 5], [0, 1, 2, 3, 4, 5]], ids=str)
def test_the_result_has_the_strides_of_plain_indexing(rows):
    # Dropout draws in the order of the memory, and a flatten is a view or a copy by the strides. Red with index_select.
    inputs = [torch.randn(4, 3, 6).permute(2, 1, 0), torch.randn(6, 3, 4, 5).to(memory_format=torch.channels_last)]
    inputs += [torch.randn(6, 8)[:, ::2], torch.randn(6, 1).expand(6, 4), torch.randn(6, 4, 3)]
    for x in inputs:
        found = [take(x.detach().requires_grad_(), torch.tensor(rows)) for take in (rowprop.pick, lambda x, r: x[r])]
        assert found[0].stride() == found[1].stride() and torch.equal(*found)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_mask_leaves_the_strides_of_plain_indexing(share):
    # Red with the clone of all rows where the input is not contiguous, and with a flattened copy in the mask's place.
    for mask in (torch.rand(6) < share, torch.rand(6, 2) < share):
        x = torch.randn(2, 3, 4, 6).permute(3, 0, 2, 1).requires_grad_()
        picked, indexed = rowprop.pick(x, mask), x[mask]
        assert picked.stride() == indexed.stride() and torch.equal(picked, indexed)
        for result in (picked, indexed):
            (result.flatten(0) * torch.arange(result.numel())).sum().backward()
        assert torch.equal(x.grad[mask] % 2, torch.zeros_like(x.grad[mask]))  # twice the same whole numbers


def test_under_fake_tensors_shapes_go_through():
    # Red where an index of a fake tensor is read, and where its mask is counted.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        model, x = nn.Linear(4, 3), torch.randn(N, 4)
        rowprop.pick(model(x).square().sum(1), mode.from_tensor(torch.tensor([1, 2]))).mean().backward()
        assert model.weight.grad.shape == (3, 4)
        with pytest.raises(InvalidInput, match="or a fake one, whose entries cannot be counted"):
            rowprop.pick(model(x).square().sum(1), mode.from_tensor(torch.ones(N, dtype=torch.bool)))


@pytest.mark.parametrize("opaque", [False, True])
# Red when: `where` takes no zeros that a formula makes from the gradient (torch 2.14 and newer); it does not see that
# the other branch is full of zeros (older ones).
def test_volume_rendering_stays_sliced(opaque: bool):
    w, points = weight(3, 4), torch.randn(N, 5, 3, dtype=torch.float64)

    def losses() -> Tensor:
        color, density = (points @ w).sigmoid().split([3, 1], -1)
        alpha = density.squeeze(-1)
        alpha = torch.where(alpha > 0.5, 1.0, alpha) if opaque else alpha  # nothing behind it is seen
        light = nn.functional.pad(1 - alpha[:, :-1], (1, 0), value=1).cumprod(1)
        return ((alpha * light)[..., None] * color).sum((1, 2)).square()

    assert not assert_same_gradients(losses, [w]).densified
