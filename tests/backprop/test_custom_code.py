"""Code that is not autograd's own, upstream of a pick: function rules, checkpoints, hooks, parametrizations."""

from __future__ import annotations

import gc
import re
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_pick import ROWS, N, assert_same_gradients, gradients, weight
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop.backprop import foreign
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.rules import registry
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.sliced import Densify, RowSlice
from rowprop.cost.flops import count_flops
from rowprop.errors import InvalidInput
from rowprop.selection.base import Selection


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


BOXED = pytest.mark.skipif(
    not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="torch < 2.13 knows no boxed_grads_call"
)


@pytest.mark.parametrize("boxed", [False, pytest.param(True, marks=BOXED)])
def test_a_function_with_a_rule_runs_on_the_kept_rows(net, boxed):
    x, w, v = net
    function, scale = scaled(boxed), weight(N, 4)
    function_rule(function)(scaled_rule)

    def losses():
        return (function.apply(x @ w, scale.tanh()) @ v).square().sum(1)

    report = assert_same_gradients(losses, [w, v, scale])
    assert report.sliced[function.__name__] == 1 and not report.densified
    assert len(function.given) == 1  # the call by plain indexing; the pick ran the rule instead


def test_a_rule_may_run_the_functions_own_backward_or_densify(net):
    x, w, v = net
    function = scaled()
    answers = []

    @function_rule(function)
    def rule(node, backward, g):
        assert type(g) is RowSlice
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


def test_a_rule_by_name_for_a_class_that_nobody_imports(net, monkeypatch):
    # Red when: the name is looked up without its module.
    monkeypatch.setattr(registry, "_NAMED", {})
    x, w, v = net
    function_rule("some.library.Scaled")(scaled_rule)
    known, other = scaled(), scaled()
    for function, module in ((known, "some.library"), (other, "another.library")):
        function.__module__, function.__qualname__ = module, "Scaled"
        report = assert_same_gradients(lambda: (function.apply(x @ w, (x @ w).exp()) @ v).square().sum(1), [w, v])
        assert ("custom function" in report.densified) == (function is other)


@pytest.mark.parametrize("which", [scaled(), "some.library.Scaled"], ids=["class", "name"])
def test_a_function_has_one_rule(which, monkeypatch):
    monkeypatch.setattr(registry, "_NAMED", {})
    function_rule(which)(scaled_rule)
    with pytest.raises(ValueError, match="has a rule already"):
        function_rule(which)(scaled_rule)


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


# Red when: only the engine's callback removes the override from the node, or the first of two picks removes it.
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
    assert not any(type(o) in (RowGrad, RowSlice) for o in gc.get_objects())
    plain = sum((node @ v).sum(1)[ROWS + i].sum() for i in range(picks))
    expected = torch.autograd.grad(plain, [w, scale], retain_graph=True)
    assert len(function.given) == 1  # a plain backward over the same graph runs the class's own
    w.grad = scale.grad = None
    loss.backward()
    torch.testing.assert_close((w.grad, scale.grad), expected)


class Remembers(torch.autograd.Function):
    """Keeps its input as ``ctx.variable``, a name that the nodes of leaves have, too; its backward runs numpy."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x.detach()
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.numpy() * ctx.variable.exp().numpy())


def test_a_function_with_an_attribute_of_leaves_gets_a_dense_gradient(net):
    # Red when: a node with an attribute ``variable`` counts as a leaf.
    x, w, v = net
    report = assert_same_gradients(lambda: (Remembers.apply(x @ w) @ v).square().sum(1), [w, v])
    assert set(report.densified) == {"custom function"}


@pytest.mark.parametrize("fails", [False, True])
def test_the_hook_on_a_split_goes_with_the_backward(net, fails, monkeypatch):
    # Red when: only the engine's callback removes the hook, or nothing does.
    x, w, v = net
    calls = []
    monkeypatch.setattr(foreign, "note_unused", lambda grads: calls.append(len(grads)))

    def fail(g):
        raise ZeroDivisionError

    hidden = (x @ w).tanh()
    losses = (hidden.chunk(2, 1)[1] @ v[:2]).sum(1)
    handle = hidden.register_hook(fail) if fails else None
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        rowprop.pick(losses, ROWS).sum().backward(retain_graph=True)
    if handle is not None:
        handle.remove()
    losses[ROWS].sum().backward()
    assert calls == [2]


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


class Strict(torch.autograd.Function):
    """Takes contiguous tensors only, as Triton's kernels do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        assert grad.shape[0] == N or (x.is_contiguous() and grad.is_contiguous())
        return 2 * x * grad


def test_a_declared_function_gets_contiguous_tensors_of_any_input(net):
    # Red when: the kept rows keep the strides of a saved tensor, or of a gradient, whose rows lie innermost.
    x, w, v = net
    function = declared(Strict, saved=0, grads=0)
    report = assert_same_gradients(lambda: (v.mT @ function.apply((w.mT @ x.mT).mT).mT).exp().sum(0), [w, v])
    assert report.sliced["Strict"] == 1 and not report.densified


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
        def forward(ctx, x, s):  # (T, N, ...) saved as (T * N, ...): the entries of a row are not neighbours
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


@pytest.mark.parametrize("returned", [3, "a", np.ones(2)])
def test_a_backward_that_returns_no_tensor_gets_torchs_own_sentence(net, returned):
    # Red when: a result that is no tensor is treated as a tensor.
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return returned

    x, w, v = net
    function = declared(Wrong, saved=(), grads=0)
    sentences = []
    for take in (lambda losses: losses[ROWS], lambda losses: rowprop.pick(losses, ROWS)):
        with pytest.raises((RuntimeError, TypeError)) as error:
            take((function.apply(x @ w) @ v).sum(1)).sum().backward()
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]


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
    yield "half of a chunk", lambda h, w: F.silu(h.chunk(2, 1)[0]) @ w[:2], set()
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
    if name == "a smaller output that is not used" and reentrant:
        mixing = {"add.Tensor"}  # its gradient of zeros holds all rows
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
    # The region's product again at N rows; then its two gradients, and the gradient of w, at K rows.
    assert flops.total_flops == N * one + len(ROWS) * 3 * one


# --- what models wear -------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def dressed(dress):
    def make(x):
        model = mlp()
        dress(model)
        return model(x).square().sum(1), list(model.parameters())

    return make


def tied_layers(x):
    layer = mlp()[0]
    return layer(layer(x).tanh()).square().sum(1), list(layer.parameters())


def tied_embedding(x):
    table = (torch.arange(42.0, dtype=torch.float64).reshape(7, 6) * 0.1).requires_grad_()
    words = torch.arange(N * 5).reshape(N, 5) % 7
    logits = nn.functional.embedding(words, table).sin() @ table.T
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(1, 1).flatten(), reduction="none")
    return loss.view(N, 5).mean(1), [table]


def under(context):
    def make(x):
        model = mlp()
        with context():
            return model(x).square().sum(1), list(model.parameters())

    return make


def functional(x):
    model = mlp()
    params = {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, params, (x,)).square().sum(1), list(params.values())


def vmapped(x):
    w = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6).requires_grad_()
    return torch.vmap(lambda row: (row @ w).tanh().square().sum())(x), [w]


def a_gradient_per_row(x):
    w = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6).requires_grad_()
    norms = torch.vmap(torch.func.grad(lambda row: (row @ w).tanh().sum()))(x)
    return norms.square().sum(1), [w]


def module_hooks(model):
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[1].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,))
    model[2].register_full_backward_hook(lambda m, grads, _: (grads[0] / 7,))


def node_hooks(x):
    model = mlp()
    hidden = model[:2](x)
    hidden.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    hidden.grad_fn.register_hook(lambda grads, _: (grads[0] * 5,))
    return model[2](hidden).square().sum(1), list(model.parameters())


def on_cpu():
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.device, t.to("cpu", copy=True)), lambda p: p[1].to(p[0])
    )


DRESS = {
    "weight_norm": dressed(lambda m: parametrizations.weight_norm(m[0])),
    "spectral_norm": dressed(lambda m: parametrizations.spectral_norm(m[0])),
    "orthogonal": dressed(lambda m: parametrizations.orthogonal(m[0])),
    "the old weight_norm": dressed(lambda m: old_weight_norm(m[0])),
    "the old spectral_norm": dressed(lambda m: nn.utils.spectral_norm(m[0])),
    "tied layers": tied_layers,
    "a tied embedding": tied_embedding,
    "save_on_cpu": under(torch.autograd.graph.save_on_cpu),
    "offload by hooks": under(on_cpu),
    "saved tensors' hooks disabled": under(lambda: torch.autograd.graph.disable_saved_tensors_hooks("no")),
    "module hooks": dressed(module_hooks),
    "node hooks": node_hooks,
    "functional_call": functional,
    "vmap upstream": vmapped,
    "func.grad upstream": a_gradient_per_row,
}


@pytest.mark.parametrize("make", DRESS.values(), ids=DRESS.keys())
def test_what_models_wear_stays_sliced(make):
    x = torch.randn(N, 6, dtype=torch.float64)
    losses, leaves = make(x)
    expected = gradients(lambda: losses[ROWS].mean(), leaves)
    losses, leaves = make(x)
    with rowprop.watch() as report:
        actual = gradients(lambda: rowprop.pick(losses, ROWS).mean(), leaves)
    assert all(type(a) is Tensor and e.any() for a, e in zip(actual, expected, strict=True))
    torch.testing.assert_close(actual, expected)
    assert report.sliced and not report.densified


def test_hooks_after_accumulation_see_plain_gradients():
    x, seen = torch.randn(N, 6, dtype=torch.float64), []

    def step(take):
        model, seen[:] = mlp(), []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append((type(p.grad), p.grad.clone())))
        take(model(x).square().sum(1)).mean().backward()
        return list(seen)

    expected, actual = step(lambda t: t[ROWS]), step(lambda t: rowprop.pick(t, ROWS))
    assert [kind for kind, _ in actual] == [Tensor] * 4
    torch.testing.assert_close([g for _, g in actual], [g for _, g in expected])


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks_see_what_they_would_under_indexing(mode):
    x = torch.randn(N, 6, dtype=torch.float64)

    def step(take):
        model, seen = mlp(), []
        hidden = model[0](x)
        out = model[2](hidden.tanh())
        torch.autograd.graph.register_multi_grad_hook(
            [hidden, out], lambda g: seen.extend(i + 0 for i in (g if mode == "all" else [g])), mode=mode
        )
        take(out.square().sum(1)).mean().backward()
        return seen

    expected = step(lambda t: t[ROWS])
    assert len(expected) == (2 if mode == "all" else 1)
    torch.testing.assert_close(step(lambda t: rowprop.pick(t, ROWS)), expected)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_sees_plain_gradients(foreach):
    x = torch.randn(N, 6, dtype=torch.float64)

    def step(take):
        model = mlp()
        take(model(x).square().sum(1)).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        return [norm, *(p.grad for p in model.parameters())]

    torch.testing.assert_close(step(lambda t: rowprop.pick(t, ROWS)), step(lambda t: t[ROWS]))


# --- torch.func and forward mode: plain indexing ----------------------------------------------------------------------

W = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
X = torch.linspace(-2, 3, 6 * N, dtype=torch.float64).view(N, 6).sin()


def dual(take):
    with forward_ad.dual_level():
        out = take((X @ forward_ad.make_dual(W.clone().requires_grad_(), W.cos())).tanh().sum(1))
        return forward_ad.unpack_dual(out).tangent


def tangent_of_a_gradient(take):  # the dual number meets the gradient only
    w = W.clone().requires_grad_()
    with forward_ad.dual_level():
        scale = forward_ad.make_dual(torch.ones(3, dtype=torch.float64), torch.arange(3.0, dtype=torch.float64))
        (grad,) = torch.autograd.grad((take((X @ w).tanh().sum(1)) * scale).sum(), w)
        return forward_ad.unpack_dual(grad).tangent


def a_batch_of_gradients(take):
    w = W.clone().requires_grad_()
    eye = torch.eye(3, dtype=torch.float64)
    return torch.autograd.grad(take((X @ w).tanh().sum(1)), w, eye, is_grads_batched=True)[0]


def loss_of(take):
    return lambda w: take((X @ w).tanh().sum(1)).square().sum()


TRANSFORMS = {
    "grad": lambda take: torch.func.grad(loss_of(take))(W),
    "vjp": lambda take: torch.func.vjp(loss_of(take), W)[1](torch.ones((), dtype=torch.float64))[0],
    "jvp": lambda take: torch.func.jvp(loss_of(take), (W,), (W.cos(),))[1],
    "jacrev": lambda take: torch.func.jacrev(loss_of(take))(W),
    "jacfwd": lambda take: torch.func.jacfwd(loss_of(take))(W),
    "hessian": lambda take: torch.func.hessian(loss_of(take))(W),
    "vmap": lambda take: torch.vmap(take)(X.T.clone().requires_grad_()),
    "forward mode": dual,
    "forward over reverse": tangent_of_a_gradient,
    "is_grads_batched": a_batch_of_gradients,
}


# Red when: pick() or its backward does not ask whether a transform is at work.
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode loads with it
def test_under_a_transform_pick_is_plain_indexing(transform):
    expected = transform(lambda t: t[ROWS])
    with rowprop.watch() as report:
        actual = transform(lambda t: rowprop.pick(t, ROWS))
    assert expected.any()
    torch.testing.assert_close(actual, expected)
    assert "it is plain indexing" in report.densified["pick"].reason or "dense" in report.densified["pick"].reason
    selection = Selection(ROWS, torch.ones(3), N)
    torch.testing.assert_close(transform(lambda t: rowprop.pick(t, selection)), expected)


def test_vmap_over_the_rows_themselves():
    torch.testing.assert_close(torch.vmap(lambda r: rowprop.pick(X, r))(ROWS[:, None]), X[ROWS[:, None]])
