"""Code that is not autograd's own, upstream of a pick: function rules, checkpoints, hooks, parametrizations."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import rowprop
from rowprop.backprop.foreign import function_rule
from rowprop.backprop.rowgrad import Densify, RowGrad, Sliced
from test_pick import ROWS, N, assert_same_gradients, gradients, weight


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def net():
    return torch.randn(N, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)


# --- function rules ---------------------------------------------------------------------------------------------------


def scaled(boxed: bool = False, base: type = torch.autograd.Function) -> type:
    """A fresh function ``x * s`` with a row of ``s`` per row, and what its backward was given."""

    class Scaled(base):
        boxed_grads_call = boxed
        given: list[Tensor] = []  # noqa: RUF012

        @staticmethod
        def forward(ctx, x, s):
            ctx.save_for_backward(x, s)
            return x * s

        @staticmethod
        def backward(ctx, *grads):
            (g,) = grads[0] if boxed else grads
            assert type(g) is Tensor
            Scaled.given.append(g)
            x, s = ctx.saved_tensors
            return g * s, g * x

    return Scaled


def scaled_rule(node, backward, g):
    x, s = node.saved_tensors
    return g.like(g.values * g.take(s)), g.like(g.values * g.take(x))


@pytest.mark.parametrize("boxed", [False, True])
def test_a_function_with_a_rule_runs_on_the_kept_rows(net, boxed):
    x, w, v = net
    function, scale = scaled(boxed), weight(N, 4)
    function_rule(function)(scaled_rule)

    def losses():
        return (function.apply(x @ w, scale.tanh()) @ v).square().sum(1)

    report = assert_same_gradients(losses, [w, v, scale])
    assert report.sliced[function.__qualname__] == 1 and not report.densified
    assert len(function.given) == 1  # plain indexing's; the pick ran the rule instead
    node = losses().grad_fn
    assert "apply" not in vars(function.apply(x @ w, scale).grad_fn) and node is not None


def test_a_rule_may_run_the_functions_own_backward_or_densify(net):
    x, w, v = net
    function = scaled()
    answers = []

    @function_rule(function)
    def rule(node, backward, g):
        assert type(g) is Sliced
        if not answers:
            return Densify("the rule says so")
        dense = backward(g.dense())
        return tuple(g.like(g.take(d)) for d in dense)

    def losses():
        return (function.apply(x @ w, (x @ w).exp()) @ v).square().sum(1)

    report = assert_same_gradients(losses, [w, v])
    assert report.densified[function.__qualname__].reason == "the rule says so"
    answers.append(True)
    assert not assert_same_gradients(losses, [w, v]).densified


def test_a_rule_for_classes_made_on_the_fly(net):
    x, w, v = net

    class Family(torch.autograd.Function):
        pass

    asked = []

    @function_rule(lambda cls: asked.append(cls) or (issubclass(cls, Family) and cls is not Family))
    def rule(node, backward, g):
        return scaled_rule(node, backward, g)

    for function in (scaled(base=Family), scaled(base=Family)):
        for _ in range(2):
            report = assert_same_gradients(lambda: (function.apply(x @ w, (x @ w).exp()) @ v).square().sum(1), [w, v])
            assert not report.densified
        assert asked.count(function) == 1


def test_a_function_has_one_rule():
    function = scaled()
    function_rule(function)(scaled_rule)
    with pytest.raises(ValueError, match="has a rule already"):
        function_rule(function)(scaled_rule)


def test_picks_of_different_rows_reach_a_rule_as_their_union(net):
    x, w, v = net
    function = scaled()
    function_rule(function)(scaled_rule)

    def loss(take):
        hidden = function.apply(x @ w, (x @ w).exp())
        return take((hidden @ v).sum(1), ROWS).mean() + take(hidden.square().sum(1), torch.tensor([4, 7])).sum()

    expected = gradients(lambda: loss(lambda t, r: t[r]), [w, v])
    with rowprop.watch() as report:
        actual = gradients(lambda: loss(rowprop.pick), [w, v])
    torch.testing.assert_close(actual, expected)
    assert not report.densified


# Red when: what was put on the node is removed by a callback of the engine only.
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_on_the_node_when_the_backward_is_over(net, fails):
    x, w, v = net
    function = scaled()
    function_rule(function)(scaled_rule)
    scale = weight(N, 4)

    def fail(g):
        raise ZeroDivisionError

    hidden = (x @ w).tanh()
    node = function.apply(hidden, scale)
    loss = rowprop.pick((node @ v).sum(1), ROWS).sum()
    handle = hidden.register_hook(fail) if fails else None
    if fails:
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        handle.remove()
    else:
        loss.backward(retain_graph=True)
    assert "apply" not in vars(node.grad_fn)
    gc.collect()
    assert not any(type(o) in (RowGrad, Sliced) for o in gc.get_objects())
    expected = torch.autograd.grad((node @ v).sum(1)[ROWS].sum(), [w, scale], retain_graph=True)
    assert len(function.given) == 1  # a plain backward over the same graph runs the class's own
    w.grad = scale.grad = None
    loss.backward()
    torch.testing.assert_close((w.grad, scale.grad), expected)
