"""Code that is not autograd's own, upstream of a pick: function rules, checkpoints, hooks, parametrizations."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

import rowprop
from picks import ROWS, N, as_indexed, assert_same_gradients, net, saving, weight
from rowprop.backprop.autograd import foreign
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules import registry
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.watch import Report
from rowprop.cost.flops import count_flops
from rowprop.errors import InvalidInput
from rowprop.selection.base import Selection
from token_models import IDS, LABELS, LOSSES, Attention, Decoder, Step, assert_as_dense, attend, gradients_of


def scaled(**options: Any) -> Any:
    """A fresh function ``x * s`` with a row of ``s`` per row."""
    return saving(torch.mul, lambda x, s, g: (g * s, g * x), **options)


def scaled_rule(node, backward, g):
    x, s = node.saved_tensors
    return g.like(g.values * g.take(s)), g.like(g.values * g.take(x))


def through(call: Callable[[Tensor, Tensor], Tensor]) -> Report:
    """A call on hidden values and a scale leaves the gradients of indexing; the report of the backward."""
    x, w, v = net()
    return assert_same_gradients(lambda: (call(x @ w, (x @ w).exp()) @ v).square().sum(1), [w, v])


BOXED = pytest.mark.skipif(
    not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="torch < 2.13 knows no boxed_grads_call"
)


@pytest.mark.parametrize("boxed", [False, pytest.param(True, marks=BOXED)])
def test_a_function_with_a_rule_runs_on_the_kept_rows(boxed: bool):
    function = scaled(boxed=boxed)
    function_rule(function)(scaled_rule)
    report = through(function.apply)
    assert report.sliced[function.__name__] == 1 and not report.densified
    assert len(function.given) == 1  # the call by plain indexing; the pick ran the rule instead


def test_a_rule_may_run_the_functions_own_backward_or_densify():
    function, answers = scaled(), []

    @function_rule(function)
    def rule(node, backward, g):
        assert type(g) is RowSlice
        if not answers:
            return Densify("the rule says so")
        return tuple(g.like(g.take(d)) for d in backward(g.dense()))

    assert through(function.apply).densified[function.__name__].reason == "the rule says so"
    answers.append(True)
    assert not through(function.apply).densified


def test_a_rule_for_classes_made_on_the_fly():
    family = type("Family", (torch.autograd.Function,), {})
    asked = []
    function_rule(lambda cls: asked.append(cls) or (issubclass(cls, family) and cls is not family))(scaled_rule)
    for function in (scaled(base=family), scaled(base=family)):
        assert not through(function.apply).densified and not through(function.apply).densified
        assert asked.count(function) == 1


def test_a_rule_by_name_for_a_class_that_nobody_imports(monkeypatch: pytest.MonkeyPatch):
    # Red when: the name is looked up without its module.
    monkeypatch.setattr(registry, "_NAMED", {})
    function_rule("some.library.Scaled")(scaled_rule)
    for module in ("some.library", "another.library"):
        function = scaled()
        function.__module__, function.__qualname__ = module, "Scaled"
        assert ("custom function" in through(function.apply).densified) == (module == "another.library")


@pytest.mark.parametrize("which", [scaled(), "some.library.Scaled"], ids=["class", "name"])
def test_a_function_has_one_rule(which: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_NAMED", {})
    function_rule(which)(scaled_rule)
    with pytest.raises(ValueError, match="has a rule already"):
        function_rule(which)(scaled_rule)


@contextmanager
def failing(hidden: Tensor, fails: bool) -> Iterator[None]:
    """The backward inside fails at this tensor, if it is to fail."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    handle = hidden.register_hook(fail) if fails else nullcontext()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), handle:
        yield


# Red when: only the engine's callback removes the override from the node.
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("quick_collections")
def test_nothing_stays_on_the_node_when_the_backward_is_over(fails: bool):
    x, w, v = net()
    function, scale = scaled(), weight(N, 4)
    function_rule(function)(scaled_rule)
    hidden = (x @ w).tanh()
    node = function.apply(hidden, scale)
    losses = (node @ v).sum(1)
    loss = rowprop.pick(losses, ROWS).sum() + rowprop.pick(losses, ROWS + 1).sum()
    with failing(hidden, fails):
        loss.backward(retain_graph=True)
    assert "apply" not in vars(node.grad_fn)
    gc.collect()
    assert not any(type(o) in (RowGrad, RowSlice) for o in gc.get_objects())
    plain = losses[ROWS].sum() + losses[ROWS + 1].sum()
    expected = torch.autograd.grad(plain, [w, scale], retain_graph=True)
    assert len(function.given) == 1  # a plain backward over the same graph runs the class's own
    w.grad = scale.grad = None
    loss.backward()
    torch.testing.assert_close((w.grad, scale.grad), expected)


def test_a_backward_inside_another_leaves_the_outer_ones_rule_in_place():
    # Red when: the first of two backwards that ends takes the override from the node.
    x, w, v = net()
    function = scaled()
    function_rule(function)(scaled_rule)
    losses = (function.apply(x @ w, (x @ w).exp()) @ v).sum(1)
    inner = rowprop.pick(losses, ROWS + 1).sum()
    outer, found = (losses * 1.0).square(), []

    def again(grad: Tensor) -> None:
        handle.remove()  # the inner one comes here, too
        found.extend(torch.autograd.grad(inner, w, retain_graph=True))

    handle = losses.register_hook(again)
    rowprop.pick(outer, ROWS).sum().backward(retain_graph=True)
    assert not function.given
    expected = [torch.autograd.grad(t.sum(), w, retain_graph=True)[0] for t in (losses[ROWS + 1], outer[ROWS])]
    torch.testing.assert_close([found[0], w.grad], expected)


class OnCtx(torch.autograd.Function):
    """Keeps its input as ``ctx.variable``, a name that the nodes of leaves have, too; its backward runs numpy."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.variable, ctx.s = x.detach(), s.detach()
        return x * s

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.numpy() * ctx.s.numpy()), torch.from_numpy(g.numpy() * ctx.variable.numpy())


def test_a_function_with_an_attribute_of_leaves_gets_a_dense_gradient():
    # Red when: a node with an attribute ``variable`` counts as a leaf.
    assert set(through(OnCtx.apply).densified) == {"custom function"}


@pytest.mark.parametrize("fails", [False, True])
def test_the_hook_on_a_split_goes_with_the_backward(fails: bool, monkeypatch: pytest.MonkeyPatch):
    # Red when: only the engine's callback removes the hook, or nothing does.
    x, w, v = net()
    calls = []
    monkeypatch.setattr(foreign, "note_unused", lambda grads: calls.append(len(grads)))
    hidden = (x @ w).tanh()
    losses = (hidden.chunk(2, 1)[1] @ v[:2]).sum(1)
    with failing(hidden, fails):
        rowprop.pick(losses, ROWS).sum().backward(retain_graph=True)
    losses[ROWS].sum().backward()
    assert calls == [2]


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
        return torch.from_numpy(g @ w.detach().numpy().T), torch.from_numpy(x.T @ g), gs, gb, None


def declared(function: type, **dims: Any) -> Any:
    return rowprop.rowwise(**dims)(type(function.__name__, (function,), {}))


PLAIN = {"saved": 0, "grads": 0}
AFFINE = {"saved": (0, None, 0, 0), "grads": (0, None, 0, 0, None)}


@pytest.mark.parametrize(
    "rows", [ROWS, torch.tensor([5]), torch.tensor([2, 2, 7, 2]), torch.arange(N) % 3 == 0], ids=str
)
@pytest.mark.parametrize("used", ["both outputs", "the first", "the second"])
def test_a_declared_function_gets_the_kept_rows(rows: Tensor, used: str):
    x, w, v = net()
    scale, shift, function = weight(N, 4), weight(N, 4), declared(Affine, **AFFINE)

    def losses() -> Tensor:
        y, total = function.apply(x * 2, w, scale * 1, shift * 1, 1)
        first, second = (y @ v).sum(1), total.exp()
        return {"both outputs": first + second, "the first": first, "the second": second}[used]

    Affine.given.clear()
    report = assert_same_gradients(losses, [w, v, scale, shift], rows)
    assert Affine.given == [(N, 4), (len(torch.arange(N)[rows]), 4)]
    assert report.sliced["Affine"] == 1 and not report.densified


def strict(x: Tensor, g: Tensor) -> Tensor:
    """A backward that takes contiguous tensors only, as Triton's kernels do."""
    assert g.shape[0] == N or (x.is_contiguous() and g.is_contiguous())
    return 2 * x * g


def test_a_declared_function_gets_contiguous_tensors_of_any_input():
    # Red when: the kept rows keep the strides of a saved tensor, or of a gradient, whose rows lie innermost.
    x, w, v = net()
    function = declared(saving(torch.square, strict), **PLAIN)
    report = assert_same_gradients(lambda: (v.mT @ function.apply((w.mT @ x.mT).mT).mT).exp().sum(0), [w, v])
    assert report.sliced["Saving"] == 1 and not report.densified


@pytest.mark.parametrize("flat", ["before and behind", "inside"])
def test_a_declared_function_with_several_entries_per_row(flat: str):
    x, w, v = torch.randn(N, 3, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)
    seen = []

    def backward(flat_x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        flat_g = g.reshape(-1, 4)
        seen.append(len(flat_g))
        return (flat_g @ w.T).view(*g.shape[:-1], 5), flat_x.T @ flat_g

    function = saving(torch.matmul, backward, save=lambda x, w: (x.reshape(-1, 5), w))
    function = declared(function, saved=(0, None), grads=(0, None))

    def losses() -> Tensor:
        h = (x * w[:, 0]).exp()
        h = function.apply(h.view(-1, 5), w).view(N, 3, 4) if flat == "before and behind" else function.apply(h, w)
        return (h @ v).square().sum((1, 2))

    report = assert_same_gradients(losses, [w, v])
    assert seen == [3 * N, 3 * len(ROWS)] and not report.densified


@pytest.mark.parametrize("rows", [ROWS, torch.tensor([2, 2, 7, 2])], ids=str)
# Red when: a row that is read twice has its two gradients clipped one by one.
def test_a_declared_function_may_clip_the_gradient_of_each_row(rows: Tensor):
    x, w, v = net()
    function, again = declared(saving(torch.clone, lambda _, g: g.clamp(-0.1, 0.1)), **PLAIN), torch.arange(N) // 2
    report = assert_same_gradients(lambda: (function.apply(x @ w)[again] @ v).square().sum(1), [w, v], rows)
    assert report.sliced["Saving"] == 1 and not report.densified


# Red when: it writes to rows that a flip above has moved and not copied, of a gradient that others get as well.
def test_a_declared_function_may_write_to_its_gradient():
    x, w, v = net()
    function = declared(saving(lambda x: 2 * x, lambda _, g: g.mul_(2)), **PLAIN)

    def losses() -> Tensor:
        hidden = x @ w
        aside = hidden.exp()
        return ((function.apply(hidden).flip(0) + aside) @ v).square().sum(1)

    report = assert_same_gradients(losses, [w, v])
    assert report.sliced["Saving"] == 1 and not report.densified


class Unused(torch.autograd.Function):
    """The second output is never used."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x * s

    @staticmethod
    def backward(ctx, g, unused):
        return g * ctx.saved_tensors[0].cos(), unused


def test_a_declared_function_may_take_none_for_an_output_without_a_gradient():
    # Red when: zeros come in its place, and a parameter that was not used gets them as its gradient.
    x, w, v = net()
    scale, function = weight(N, 4), declared(Unused, **PLAIN)
    report = assert_same_gradients(lambda: (function.apply(x @ w, scale * 1)[0] @ v).square().sum(1), [w, v, scale])
    assert report.sliced["Unused"] == 1 and scale.grad is None


def test_rows_in_another_dimension():
    x, w, v = torch.randn(3, N, 5, dtype=torch.float64), weight(5, 4), weight(4, 3)
    function = declared(scaled(), saved=1, grads=1, outputs=1)
    report = assert_same_gradients(lambda: (function.apply(x @ w, (x @ w).exp()) @ v).square().sum((0, 2)), [w, v])
    assert not report.densified


def on_both(f: Any, h: Tensor, s: Tensor) -> Tensor:
    return f.apply(h, s)


# A declaration, a call of the function, and the reason why the function runs at full size.
TWO = saving(lambda x, s: (x * s, x.sum(0)), lambda x, s, g, h: (g * s + h, g * x))
FLATTENED = saving(  # (T, N, ...) saved as (T * N, ...): the entries of a row are not neighbours
    torch.mul,
    lambda x, s, g: (g * s.view(g.shape), g * x.view(g.shape)),
    save=lambda x, s: (x.flatten(0, 1), s.flatten(0, 1)),
)
MISFITS: dict[str, tuple[type, dict[str, Any], Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "flattened across rows": (
        FLATTENED,
        {"saved": 0, "grads": 1, "outputs": 1},
        lambda f, h, s: f.apply(torch.stack([h, h * 2]), torch.stack([s, s])).sum(0),
        r"dimension 0 of shape \(16, 4\) does not hold the rows",
    ),
    "the rows' dimension": (
        *(scaled(), PLAIN, lambda f, h, s: f.apply(h.t().contiguous(), s.t().contiguous()).t()),
        "the rows lie in dimension 1 of an output that is decl",
    ),
    "a weight": (
        *(scaled(), PLAIN, lambda f, h, s: f.apply(h, s[0])),
        r"dimension 0 of shape \(4,\) does not hold the rows",
    ),
    "too many saved": (
        *(scaled(), {"saved": (0, 0, 0), "grads": 0}, on_both),
        "declares 3 saved tensors but there are 2",
    ),
    "too few gradients": (scaled(), {"saved": 0, "grads": (0,)}, on_both, "declares 1 gradients but there are 2"),
    "a dimension too far": (scaled(), {"saved": 2, "grads": 0}, on_both, "dimension 2 of shape"),
    "on ctx": (OnCtx, PLAIN, on_both, "kept as an attribute of ctx; use save_for_backward"),
    "an output for all": (
        *(TWO, {**PLAIN, "outputs": (0, None)}, lambda f, h, s: sum(f.apply(h, s))),
        "another output is not sliced",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_where_the_declaration_does_not_fit_it_runs_at_full_size(name: str):
    function, dims, call, reason = MISFITS[name]
    function = declared(function, **dims)
    assert re.search(reason, through(lambda h, s: call(function, h, s)).densified[function.__name__].reason)


@pytest.mark.parametrize(
    ("decorated", "dims", "sentence"),
    [
        (len, PLAIN, "rowwise got <built-in function len> but a torch.autograd.Function"),
        (torch.ops.aten.mul.Tensor, PLAIN, "rowwise got .* but .*, or an op of torch.library, was needed"),
        (torch.autograd.Function, PLAIN, "with a backward, or an op of torch.library, was needed"),
        (Affine, {"saved": -1, "grads": 0}, "saved is -1 but a dimension from 0 on, None"),
        (Affine, {"saved": 0, "grads": (0, "1")}, r"grads is \(0, '1'\) but"),
        (Affine, {**PLAIN, "outputs": True}, "outputs is True but"),
        (declared(Affine, **AFFINE), AFFINE, "is declared row by row twice"),
    ],
)
def test_a_bad_declaration_is_refused_in_one_sentence(decorated: Any, dims: dict[str, Any], sentence: str):
    with pytest.raises(InvalidInput, match=sentence):
        rowprop.rowwise(**dims)(decorated)


@pytest.mark.parametrize("given", [(Affine,), (len,)])
def test_a_bare_declaration_is_refused_in_one_sentence(given: Any):
    # Red when: Python's own TypeError about arguments goes out.
    with pytest.raises(
        InvalidInput, match=r"rowwise needs saved and grads by name, .* write rowwise\(saved=0, grads=0\)"
    ):
        rowprop.rowwise(*given)


LIBRARY = torch.library.Library("rowprop_tests", "DEF")


def two_tensors(xs: list[Tensor], w: Tensor) -> list[Tensor]:
    return [xs[0] * xs[1], xs[0] @ w]


def of_two_tensors(ctx: Any, grads: list[Tensor]) -> Any:
    first, second, w = ctx.saved_tensors
    return [grads[0] * second + grads[1] @ w.T, grads[0] * first], first.T @ grads[1]


def keep_two(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[0], inputs[1])


def custom(name: str) -> Any:
    """A definition in Python: the square of its argument, by numpy."""

    def square(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() ** 2)

    op = torch.library.custom_op(f"rowprop_tests::{name}", square, mutates_args=())
    keep = lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])  # noqa: E731
    op.register_autograd(
        lambda ctx, g: torch.from_numpy(2 * ctx.saved_tensors[0].numpy() * g.numpy()), setup_context=keep
    )
    return op


def defined(name: str) -> Any:
    """A schema with an implementation, as those of C++, and a backward that is registered by the name."""
    LIBRARY.define(f"{name}(Tensor[] xs, Tensor w) -> Tensor[]")
    LIBRARY.impl(name, two_tensors, "CPU")
    torch.library.register_autograd(f"rowprop_tests::{name}", of_two_tensors, setup_context=keep_two, lib=LIBRARY)
    return getattr(torch.ops.rowprop_tests, name)


LISTS = {"saved": (0, 0, None), "grads": (0, 0, None), "outputs": 0}
OPS: dict[str, tuple[Callable[[str], Any], dict[str, Any], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "custom_op": (custom, PLAIN, lambda op, h, v: op(h) @ v),
    "custom_op by an overload": (
        lambda name: custom(name)._opoverload,
        {**PLAIN, "grads": (0,)},
        lambda op, h, v: op(h) @ v,
    ),
    "packet": (defined, LISTS, lambda op, h, v: op([h, h.tanh()], v)[0][:, :3] + op([h, h.cos()], v)[1]),
    "overload": (lambda name: defined(name).default, LISTS, lambda op, h, v: op([h, h], v)[1]),
}


@pytest.mark.parametrize("kind", OPS)
def test_an_op_of_torch_library_gets_the_kept_rows_once_it_is_declared(kind: str):
    # Red when: the class that torch made of the op is taken for an unknown one; ops that take lists have their op in a
    # function within a function; or the gradients that are declared lack that of torch's own argument.
    make, dims, call = OPS[kind]
    op = make(f"op{list(OPS).index(kind)}")
    twin = make(f"op{list(OPS).index(kind)}_undeclared")  # another op with a name that begins alike
    reasons = [entry.reason for entry in through_op(call, op).densified.values()]
    assert (
        reasons and "an op of torch.library, has a dense gradient; if it treats rows alike, declare it by" in reasons[0]
    )
    assert rowprop.rowwise(**dims)(op) is op
    assert not through_op(call, op).densified and through_op(call, twin).densified
    with pytest.raises(InvalidInput, match="is declared row by row twice"):
        rowprop.rowwise(**dims)(op)


def through_op(call: Callable[[Any, Tensor, Tensor], Tensor], op: Any) -> Report:
    x, w, v = net()
    return assert_same_gradients(lambda: call(op, x @ w, v).square().sum(1), [w, v])


def test_per_sample_gradients_of_torchs_own_are_those_of_plain_indexing():
    # Red when: the hooks of a parameter are read through its own __torch_function__.
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    x, labels = torch.randn(N, 5).double(), torch.arange(N) % 3

    def of_each_row(take: Callable[[Tensor, Tensor], Tensor]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        logits = call_for_per_sample_grads(model, loss_reduction="sum")(x)
        take(F.cross_entropy(logits, labels, reduction="none"), ROWS).sum().backward()
        return [parameter.grad_sample for parameter in model.parameters()]

    as_indexed(of_each_row)


@pytest.mark.parametrize("returned", [3, "a", np.ones(2)])
def test_a_backward_that_returns_no_tensor_gets_torchs_own_sentence(returned: Any):
    # Red when: a result that is no tensor is treated as a tensor.
    x, w, v = net()
    function, sentences = declared(saving(lambda x: x * 2, lambda x, g: returned), **PLAIN), []
    for take in (lambda losses: losses[ROWS], lambda losses: rowprop.pick(losses, ROWS)):
        with pytest.raises((RuntimeError, TypeError)) as error:
            take((function.apply(x @ w) @ v).sum(1)).sum().backward()
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]


def test_a_subclass_declares_for_itself():
    heir = type("Heir", (declared(scaled(), **PLAIN),), {})
    assert "custom function" in through(heir.apply).densified


SCALED = declared(scaled(), **PLAIN)
REGIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {  # of hidden values (N, 4) and a weight (4, 4)
    "plain": lambda h, w: (h @ w).tanh(),
    "merged": lambda h, w: (h.view(-1) * 2).view(N, 4).exp() @ w,
    "several outputs": lambda h, w: ((h @ w).tanh(), h.exp(), 3),
    "an output that is not used": lambda h, w: ((h @ w).tanh(), h @ w.exp()),
    "a smaller output that is not used": lambda h, w: ((h @ w).tanh(), (h @ w.exp()).sum()),
    "half of a chunk": lambda h, w: F.silu(h.chunk(2, 1)[0]) @ w[:2],
    "mixed rows": lambda h, w: (h @ w).softmax(0),
    "random numbers": lambda h, w: F.dropout(h, 0.5) @ w,
    "a region inside": lambda h, w: checkpoint(lambda a: (a @ w).sin(), h.exp(), use_reentrant=True),
    "a custom function": lambda h, w: SCALED.apply(h @ w, (h @ w).exp()),
    "its input itself": lambda h, w: h,
    "its input twice": lambda h, w: (h, h * 2),
}


# Red when: a caught gradient is given to the next argument; zeros of unused outputs are left out.
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner region's first forward
def test_a_checkpointed_region_is_sliced(name: str, reentrant: bool):
    x, w, u = torch.randn(N, 5, dtype=torch.float64), weight(5, 4), weight(4, 4)

    def losses() -> Tensor:
        torch.manual_seed(1)
        out = checkpoint(lambda n, h, s, text: REGIONS[name](h, s), 7, x @ w, u, "text", use_reentrant=reentrant)
        hidden = out if isinstance(out, Tensor) else out[0] + (out[1] if "not used" not in name else 0)
        return hidden.square().sum(1)

    report = assert_same_gradients(losses, [w, u])
    mixing = {"_softmax_backward_data"} if name == "mixed rows" else set()
    if name == "a smaller output that is not used" and reentrant:
        mixing = {"add.Tensor"}  # its gradient of zeros holds all rows
    assert set(report.densified) == mixing and (mixing or report.sliced["mm"] >= 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_costs_a_full_forward_and_a_sliced_backward(reentrant: bool):
    x, w, u = torch.randn(N, 6), torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    losses = checkpoint(lambda h: (h @ u).tanh().square(), x @ w, use_reentrant=reentrant).sum(1)
    loss = rowprop.pick(losses, ROWS).sum()
    with count_flops() as flops:
        loss.backward()
    one = 2 * 6 * 6  # FLOPs of a row in a product with a weight
    # The region's product again at N rows; then its two gradients, and the gradient of w, at K rows.
    assert flops.total_flops == N * one + len(ROWS) * 3 * one


Dress = Callable[[Decoder], object]


def dressed(dress: Dress = lambda model: None, context: Callable[[], Any] = nullcontext) -> Step:
    """A step of a decoder that ``dress`` changed, its forward in a context."""

    def step(take: Callable[[Tensor], Tensor], attention: Attention) -> list[Tensor]:
        model = Decoder(packed=True)
        torch.manual_seed(5)
        dress(model)
        with context():
            losses = LOSSES["flat"](model(IDS, attention=attention), LABELS)
        take(losses).mean().backward()
        return gradients_of(model)

    return step


def around(call: Attention) -> Dress:
    """This is called in each block's place."""
    return lambda model: setattr(model, "through", call)


def by_layer(**options: Any) -> Dress:
    return around(lambda *given: checkpoint(*given, **options))


def adapted(model: Decoder) -> None:
    """Frozen layers beside small ones (LoRA)."""
    model.requires_grad_(False)
    for layer in (layer for block in model.blocks for layer in (block.qkv[0], block.mlp[2])):
        small = nn.Linear(layer.in_features, 3, bias=False), nn.Linear(3, layer.out_features, bias=False)
        layer.small = nn.Sequential(*small).double()
        layer.register_forward_hook(lambda m, args, out: out + 2 * m.small(args[0]))


def adapted_and_checkpointed(reentrant: bool) -> Dress:
    def dress(model: Decoder) -> None:
        adapted(model)
        by_layer(use_reentrant=reentrant)(model)
        model.tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())  # as trainers do

    return dress


def only(*trained: str) -> Dress:
    """All parameters are frozen but those with one of these words in their name."""

    def dress(model: Decoder) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in trained))

    return dress


def each_block(change: Callable[[Any], object]) -> Dress:
    def dress(model: Decoder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the old weight norm
            for block in model.blocks:
                change(block)

    return dress


def each_layer(change: Callable[[nn.Module], object]) -> Dress:
    """Something done to the first layer of each block's MLP."""
    return each_block(lambda block: change(block.mlp[0]))


def module_hooks(block: Any) -> None:
    block.mlp[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    block.mlp[0].register_forward_hook(lambda m, args, out: out * 2)
    block.mlp[1].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,))
    block.qkv[0].register_full_backward_hook(lambda m, grads, _: (grads[0] / 7,))


def node_hooks(block: nn.Module, h: Tensor, attention: Attention) -> Tensor:
    out = block(h, attention)
    out.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    out.grad_fn.register_hook(lambda grads, _: (grads[0] * 5, *grads[1:]))
    return out


def in_place(model: Decoder) -> None:
    """Activations, a residual stream, and some of its features are written to."""

    def written(block: nn.Module, h: Tensor, attention: Attention) -> Tensor:
        out = block(h, attention)
        out += h
        out[..., :3] *= 2
        return out

    for block in model.blocks:
        block.mlp[1] = nn.ReLU(inplace=True)
        block.out.register_forward_hook(lambda m, args, out: out.mul_(2).add_(1))
    model.through = written


def in_two_pieces(x: Tensor) -> Tensor:
    """Each head's keys (N, heads, T, width), written into a new tensor."""
    half = x.shape[-1] // 2
    out = x.new_empty(x.shape)
    out[..., :half].copy_(x[..., :half])
    out[..., half:].copy_(x[..., half:].tanh())
    return out


def offloaded() -> Any:
    return saved_tensors_hooks(lambda t: (t.device, t.to("cpu", copy=True)), lambda p: p[1].to(p[0]))


def functional(take: Callable[[Tensor], Tensor], attention: Attention) -> list[Tensor]:
    model = Decoder(packed=True)
    params = {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}
    logits = torch.func.functional_call(model, params, (IDS, attention))
    return list(torch.autograd.grad(take(LOSSES["flat"](logits, LABELS)).mean(), list(params.values())))


aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
COMPANY: dict[str, Step] = {
    "checkpoints": dressed(by_layer(use_reentrant=False)),
    "reentrant checkpoints": dressed(by_layer(use_reentrant=True)),
    "selective checkpoints": dressed(by_layer(use_reentrant=False, context_fn=partial(selective, PRODUCTS))),
    "offloaded": dressed(context=offloaded),
    "offloaded checkpoints": dressed(by_layer(use_reentrant=False), save_on_cpu),
    "saved tensors' hooks disabled": dressed(context=lambda: disable_saved_tensors_hooks("no")),
    "adapters": dressed(adapted),
    "adapters and checkpoints": dressed(adapted_and_checkpointed(reentrant=False)),
    "adapters and reentrant checkpoints": dressed(adapted_and_checkpointed(reentrant=True)),
    "frozen below": dressed(only("blocks.1", "head", "norm")),
    "biases alone": dressed(only("bias")),
    "the head alone": dressed(only("head")),
    "embeddings alone": dressed(only("tokens", "places")),
    "tied embeddings": dressed(lambda model: setattr(model.head, "weight", model.tokens.weight)),
    "tied blocks": dressed(lambda model: model.blocks.__setitem__(1, model.blocks[0])),
    "padding": dressed(lambda model: setattr(model.tokens, "padding_idx", 7)),
    "weight norm": dressed(each_layer(parametrizations.weight_norm)),
    "spectral norm": dressed(each_layer(parametrizations.spectral_norm)),
    "orthogonal": dressed(each_layer(parametrizations.orthogonal)),
    "the old weight norm": dressed(each_layer(nn.utils.weight_norm)),
    "the old spectral norm": dressed(each_layer(nn.utils.spectral_norm)),
    "module hooks": dressed(each_block(module_hooks)),
    "node hooks": dressed(around(node_hooks)),
    "in place": dressed(in_place),
    "keys in place": dressed(
        around(lambda block, h, attention: block(h, lambda q, k, v: attention(q, in_two_pieces(k), v)))
    ),
    "channels first": dressed(
        around(lambda block, h, attention: block(h.mT.contiguous().mT, attention).mT.tanh().mul(2).mT)
    ),
    "time first": dressed(
        around(lambda block, h, attention: block(h.transpose(0, 1).contiguous().transpose(0, 1), attention))
    ),
    "dropout": dressed(each_block(lambda block: block.mlp.append(nn.Dropout(0.3)))),
    "functional_call": functional,
}


@pytest.mark.parametrize("way", ["rows", "exact", "cut"])
@pytest.mark.parametrize("name", COMPANY)
# Red when: the rule of reentrant checkpoints, or of the copies that undo an op in place, takes whole sequences: the
# attention below is then no longer cut. All are red when a token's index is not the remainder of the flat one.
def test_what_models_wear_stays_sliced(name: str, way: str):
    if way == "rows":
        index = torch.tensor([1, 4])
        report = as_indexed(lambda take: COMPANY[name](lambda losses: take(losses.mean(1), index), attend), atol=1e-11)
        assert report.sliced and not report.densified, report
    else:
        report = assert_as_dense(way, COMPANY[name], tolerance=1e-11)
        assert way == "exact" or (not report.densified and bool(report.cut) == (name != "the head alone")), report


W = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
X = torch.linspace(-2, 3, 6 * N, dtype=torch.float64).view(N, 6).sin()


@pytest.mark.parametrize(
    "upstream", [lambda row, w: (row @ w).tanh(), torch.func.grad(lambda row, w: (row @ w).tanh().sum())]
)
def test_vmap_upstream_stays_sliced(upstream: Callable[[Tensor, Tensor], Tensor]):
    w = W.clone().requires_grad_()
    report = assert_same_gradients(lambda: torch.vmap(upstream, (0, None))(X, w).square().sum(1), [w])
    assert report.sliced and not report.densified


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


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
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
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode loads with it
def test_under_a_transform_pick_is_plain_indexing(transform: Callable[[Callable[[Tensor], Tensor]], Tensor]):
    expected = transform(lambda t: t[ROWS])
    assert expected.any()
    for rows in (ROWS, Selection(ROWS, torch.ones(3), N)):
        with rowprop.watch() as report:
            torch.testing.assert_close(transform(lambda t, rows=rows: rowprop.pick(t, rows)), expected)
        assert re.search("it is plain indexing|dense", report.densified["pick"].reason)


def test_vmap_over_the_rows_themselves():
    torch.testing.assert_close(torch.vmap(lambda r: rowprop.pick(X, r))(ROWS[:, None]), X[ROWS[:, None]])
