"""Code that is not autograd's own, upstream of a pick: function rules, checkpoints, hooks, parametrizations."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop.backprop.foreign import function_rule
from rowprop.backprop.rowgrad import Densify, RowGrad, Sliced
from rowprop.cost.flops import count_flops
from rowprop.errors import InvalidInput
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
    assert report.sliced[function.__name__] == 1 and not report.densified
    assert len(function.given) == 1  # plain indexing's; the pick ran the rule instead


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
    assert report.densified[function.__name__].reason == "the rule says so"
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


# Red when: what was put on the node is removed by a callback of the engine only, or at the first pick of two.
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("picks", [1, 2])
def test_nothing_stays_on_the_node_when_the_backward_is_over(net, fails, picks):
    x, w, v = net
    function = scaled()
    function_rule(function)(scaled_rule)
    scale = weight(N, 4)

    def fail(g):
        raise ZeroDivisionError

    hidden = (x @ w).tanh()
    node = function.apply(hidden, scale)
    loss = sum(rowprop.pick((node @ v).sum(1), ROWS + i).sum() for i in range(picks))
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
    plain = sum((node @ v).sum(1)[ROWS + i].sum() for i in range(picks))
    expected = torch.autograd.grad(plain, [w, scale], retain_graph=True)
    assert len(function.given) == 1  # a plain backward over the same graph runs the class's own
    w.grad = scale.grad = None
    loss.backward()
    torch.testing.assert_close((w.grad, scale.grad), expected)


# --- rowwise ----------------------------------------------------------------------------------------------------------


class Affine(torch.autograd.Function):
    """(y, row sums of y) with y = tanh(x @ w) * s + b, rows first; numpy and in-place writes inside."""

    given: list[tuple[int, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x, w, s, b, power):
        t = (x @ w).tanh()
        ctx.save_for_backward(x, w, s, t)
        ctx.power = power
        y = t * s + b
        return y, (y**power).sum(-1)

    @staticmethod
    def backward(ctx, gy, gsum):
        x, w, s, t = ctx.saved_tensors
        arrays = [gy, gsum, x, s, t]
        assert all(type(a) is Tensor and a.is_contiguous() for a in arrays)
        Affine.given.append(tuple(gy.shape))
        gy, gsum, x, s, t = (a.detach().numpy() for a in arrays)
        assert ctx.power == 1 and ctx.needs_input_grad[0] is not None
        g = gy + gsum[..., None]
        gs, gb = torch.from_numpy(g * t), torch.from_numpy(g.copy())
        np.multiply(g, s, out=g)
        np.multiply(g, 1 - t * t, out=g)
        flat_x, flat_g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        return torch.from_numpy(g @ w.detach().numpy().T), torch.from_numpy(flat_x.T @ flat_g), gs, gb, None


def declared(function: type, **dims) -> type:
    return rowprop.rowwise(**dims)(type(function.__name__, (function,), {}))


AFFINE = {"saved": (0, None, 0, 0), "grads": (0, None, 0, 0, None)}
ROWS_OF = {
    "some": ROWS,
    "one": torch.tensor([5]),
    "repeats": torch.tensor([2, 2, 7, 2]),
    "a mask": torch.arange(N) % 3 == 0,
}


@pytest.mark.parametrize("rows", ROWS_OF.values(), ids=ROWS_OF.keys())
@pytest.mark.parametrize("used", ["both outputs", "the first", "the second"])
def test_a_declared_function_gets_the_kept_rows(net, rows, used):
    x, w, v = net
    scale, shift = weight(N, 4), weight(N, 4)
    function = declared(Affine, **AFFINE)

    def losses():
        y, total = function.apply(x * 2, w, scale * 1, shift * 1, 1)
        first, second = (y @ v).sum(1), total.exp()
        return {"both outputs": first + second, "the first": first, "the second": second}[used]

    Affine.given.clear()
    report = assert_same_gradients(losses, [w, v, scale, shift], rows)
    kept = int(rows.sum()) if rows.dtype == torch.bool else len(rows)
    assert Affine.given == [(N, 4), (kept, 4)]
    assert report.sliced["Affine"] == 1 and not report.densified


@pytest.mark.parametrize("flat", ["before and behind", "inside"])
def test_a_declared_function_with_several_entries_per_row(flat):
    x, w, v = torch.randn(N, 3, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)
    seen = []

    class Tokens(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            flat_x = x.reshape(-1, 5)
            ctx.save_for_backward(flat_x, w)
            return (flat_x @ w).view(*x.shape[:-1], 4)

        @staticmethod
        def backward(ctx, g):
            flat_x, w = ctx.saved_tensors
            flat_g = g.reshape(-1, 4)
            seen.append(flat_g.shape[0])
            return (flat_g @ w.T).view(*g.shape[:-1], 5), flat_x.T @ flat_g

    function = declared(Tokens, saved=(0, None), grads=(0, None))

    def losses():
        h = (x * w[:, 0]).exp()
        h = function.apply(h.view(-1, 5), w).view(N, 3, 4) if flat == "before and behind" else function.apply(h, w)
        return (h @ v).square().sum((1, 2))

    report = assert_same_gradients(losses, [w, v])
    assert seen == [3 * N, 3 * len(ROWS)] and not report.densified


def test_rows_in_another_dimension():
    x, w, v = torch.randn(3, N, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)
    function = declared(scaled(), saved=1, grads=1, outputs=1)

    def losses():
        return (function.apply(x @ w, (x @ w).exp()) @ v).square().sum((0, 2))

    assert not assert_same_gradients(losses, [w, v]).densified


def misfits():
    def time_first(f, h, s):
        return f.apply(h.t().contiguous(), s.t().contiguous()).t()

    def shared(f, h, s):
        return f.apply(h, s[0])

    def mixed(f, h, s):
        return f.apply(h, s)

    class OnCtx(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            ctx.kept = x.detach(), s.detach()
            ctx.s = s.detach()
            ctx.x = x.detach()
            return x * s

        @staticmethod
        def backward(ctx, g):
            return g * ctx.s, g * ctx.x

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            ctx.save_for_backward(x, s)
            return x * s, x.sum(0)

        @staticmethod
        def backward(ctx, g, h):
            x, s = ctx.saved_tensors
            return g * s + h, g * x

    def two(f, h, s):
        y, total = f.apply(h, s)
        return y + total

    class Flattened(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):  # (T, N, ...) kept as (T * N, ...): a row's entries are not together
            ctx.save_for_backward(x.flatten(0, 1), s.flatten(0, 1))
            return x * s

        @staticmethod
        def backward(ctx, g):
            x, s = (t.view(2, -1, 4) for t in ctx.saved_tensors)
            return g * s, g * x

    def twice_over(f, h, s):
        return f.apply(torch.stack([h, h * 2]), torch.stack([s, s])).sum(0)

    plain = {"saved": 0, "grads": 0}
    flat = {"saved": 0, "grads": 1, "outputs": 1}
    yield "flattened across rows", Flattened, flat, twice_over, r"dimension 0 of shape \(16, 4\) does not hold the rows"
    yield "the rows' dimension", scaled(), plain, time_first, "the rows lie in dimension 1 of an output that is decl"
    yield "a weight", scaled(), plain, shared, r"dimension 0 of shape \(4,\) does not hold the rows"
    yield (
        "too many saved",
        scaled(),
        {"saved": (0, 0, 0), "grads": 0},
        mixed,
        "declares 3 saved tensors but there are 2",
    )
    yield "too few gradients", scaled(), {"saved": 0, "grads": (0,)}, mixed, "declares 1 gradients but there are 2"
    yield "a dimension too far", scaled(), {"saved": 2, "grads": 0}, mixed, "dimension 2 of shape"
    yield "on ctx", OnCtx, plain, mixed, "kept as an attribute of ctx; use save_for_backward"
    yield "an output for all", Two, {**plain, "outputs": (0, None)}, two, "another output is not sliced"


MISFITS = list(misfits())


@pytest.mark.parametrize(("function", "dims", "call", "reason"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_where_the_declaration_does_not_fit_it_runs_at_full_size(net, function, dims, call, reason):
    x, w, v = net
    function = declared(function, **dims)

    def losses():
        return (call(function, x @ w, (x @ w).exp()) @ v).square().sum(1)

    report = assert_same_gradients(losses, [w, v])
    assert re.search(reason, report.densified[function.__name__].reason)


@pytest.mark.parametrize(
    ("decorate", "sentence"),
    [
        (lambda: rowprop.rowwise(saved=0, grads=0)(len), "decorates <built-in function len> but a subclass of torch"),
        (lambda: rowprop.rowwise(saved=0, grads=0)(torch.autograd.Function), "with a backward was needed"),
        (lambda: rowprop.rowwise(saved=-1, grads=0), "saved is -1 but a dimension of 0 or more was needed"),
        (lambda: rowprop.rowwise(saved=0, grads=(0, "1")), r"grads is \(0, '1'\) but"),
        (lambda: rowprop.rowwise(saved=0, grads=0, outputs=True), "outputs is True but"),
        (lambda: twice(), "is declared row by row twice"),
    ],
)
def test_a_bad_declaration_is_refused_in_one_sentence(decorate, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        decorate()


def twice():
    rowprop.rowwise(**AFFINE)(declared(Affine, **AFFINE))


def test_a_subclass_declares_for_itself(net):
    x, w, v = net
    function = declared(scaled(), saved=0, grads=0)
    heir = type("Heir", (function,), {})
    report = assert_same_gradients(lambda: (heir.apply(x @ w, (x @ w).exp()) @ v).square().sum(1), [w, v])
    assert "custom function" in report.densified


# --- checkpoints ------------------------------------------------------------------------------------------------------


def regions(v: Tensor):
    """Name -> a region of (hidden, weight), and the ops that densify in it."""
    yield "plain", lambda h, w: (h @ w).tanh(), set()
    yield "merged", lambda h, w: (h.view(-1) * 2).view(N, 4).exp() @ w, set()
    yield "several outputs", lambda h, w: ((h @ w).tanh(), h.exp(), 3), set()
    yield "an output that is not used", lambda h, w: ((h @ w).tanh(), h @ v), set()
    yield "a smaller output that is not used", lambda h, w: ((h @ w).tanh(), (h @ v).sum()), set()
    yield "mixed rows", lambda h, w: (h @ w).softmax(0), {"_softmax_backward_data"}
    yield "random numbers", lambda h, w: nn.functional.dropout(h, 0.5) @ w, set()
    yield "a region inside", lambda h, w: checkpoint(lambda a: (a @ w).sin(), h.exp(), use_reentrant=True), set()
    yield "a custom function", lambda h, w: SCALED.apply(h @ w, (h @ w).exp()), set()
    yield "its input itself", lambda h, w: h, set()
    yield "its input twice", lambda h, w: (h, h * 2), set()


SCALED = declared(scaled(), saved=0, grads=0)
REGIONS = [name for name, *_ in regions(torch.ones(1))]


# Red when: a caught gradient is given to the next argument; zeros of unused outputs are left out.
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner region's first forward
def test_a_checkpointed_region_is_sliced(name, reentrant):
    x, w, u, v = torch.randn(N, 5, dtype=torch.float64), weight(5, 4), weight(4, 4), weight(4, 3)
    region, mixing = next((r, m) for n, r, m in regions(v) if n == name)

    def losses():
        torch.manual_seed(1)
        out = checkpoint(lambda n, h, s, text: region(h, s), 7, x @ w, u, "text", use_reentrant=reentrant)
        hidden = out if isinstance(out, Tensor) else out[0] + (out[1] if "not used" not in name else 0)
        return hidden.square().sum(1)

    report = assert_same_gradients(losses, [w, u, v])
    assert set(report.densified) == mixing and (mixing or report.sliced["mm"] >= 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_costs_a_full_forward_and_a_sliced_backward(reentrant):
    x, w, u = torch.randn(N, 6), torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)

    def losses():
        return checkpoint(lambda h: (h @ u).tanh().square(), x @ w, use_reentrant=reentrant).sum(1)

    loss = rowprop.pick(losses(), ROWS).sum()
    with count_flops() as flops:
        loss.backward()
    one = 2 * 6 * 6  # FLOPs of a row in a product with a weight
    # Again N rows of the region's product; then its two gradients and the one towards w, at K rows.
    assert flops.total_flops == N * one + len(ROWS) * 3 * one
