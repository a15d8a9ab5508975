"""Custom functions that nobody declared: trials find where their rows lie, and declare none that mixes rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rowprop
from picks import ROWS, N, as_indexed, gradients, weight

COUNTED = {"calls": 0}
WEIGHT, SCALES = torch.randn(4, 4, dtype=torch.float64), torch.rand(N, 4, dtype=torch.float64) + 0.5
SQUARE = torch.randn(N, N, dtype=torch.float64)
LEAF = SQUARE.clone().requires_grad_()


def function(backward: Any, save: Any = lambda x: (x,), **on_ctx: Any) -> Any:
    """A function of x that multiplies it by 2; its backward gets ctx, what is saved, and the gradient.

    The gradient need not be that of the forward: what runs on fewer rows is the backward alone.
    """

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(*save(x))
            vars(ctx).update(on_ctx)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return backward(ctx, *ctx.saved_tensors, g)

    return Own


def numpy(backward: Any) -> Any:
    """A backward in numpy, whose ops no mode of torch sees."""
    return lambda ctx, *tensors: torch.from_numpy(np.array(backward(ctx, *(t.detach().numpy() for t in tensors))))


def step(own: Any, width: int = 4, dim: int = 0) -> Callable[[Any], list[Any]]:
    """A step through the function, between two layers, whose losses' rows lie in ``dim``."""
    torch.manual_seed(0)
    x, w, v = torch.randn(N, 5, dtype=torch.float64), weight(5, width), weight(width, 3)

    def losses() -> Tensor:
        hidden = (x @ w).tanh()
        return ((own.apply(hidden.mT).mT if dim else own.apply(hidden)) @ v).square().sum(1)

    return lambda take: gradients(lambda: take(losses(), ROWS).sum(), [w, v])


def said(own: Any, **options: Any) -> str:
    """What the report says of the function, whose gradients are those of plain indexing."""
    report = as_indexed(step(own, **options))
    ((name, found),) = report.functions.items()
    assert name.endswith(".Own") and f"{name}: {found}" in repr(report)
    return found


def pasted(line: str, own: Any) -> Any:
    """A new class with the function's code, declared by the line of the report."""
    twin = type("Own", (own,), {})
    assert eval(line, {"rowprop": rowprop, "Own": twin}) is twin
    return twin


def softmax(ctx: Any, y: Any, g: Any) -> Any:
    return y * (g - (g * y).sum(-1)[..., None])


def again(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin() * x, x, g)[0]


ROWWISE: dict[str, tuple[Any, dict[str, int], str]] = {  # the function, options of step(), its declaration
    "a scale of each entry": (function(lambda ctx, x, g: g * x), {}, "saved=0, grads=0"),
    "a softmax by numpy": (function(numpy(softmax), lambda x: (x.softmax(-1),)), {}, "saved=0, grads=0"),
    "a graph of its own": (function(again), {}, "saved=0, grads=0"),
    "a weight": (function(lambda ctx, w, x, g: (g @ w) * x, lambda x: (WEIGHT, x)), {}, "saved=(None, 0), grads=0"),
    "as many columns as rows": (
        *(function(lambda ctx, x, w, g: (g @ w) * x, lambda x: (x, LEAF)), {"width": N}),
        "saved=(0, None), grads=0",
    ),
    "statistics that the forward saved": (
        *(function(lambda ctx, s, g: g / s, lambda x: (x.std(0),)), {}),
        "saved=None, grads=0",
    ),
    "rows in the last dimension": (
        *(function(lambda ctx, x, g: g * x), {"dim": 1}),
        "saved=1, grads=1, outputs=1",
    ),
    "nothing saved, written in place": (function(lambda ctx, g: g.mul_(3), lambda x: ()), {}, "saved=(), grads=0"),
    "a number on ctx": (function(lambda ctx, x, g: g * x / ctx.n, n=N), {}, "saved=0, grads=0"),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_a_function_that_treats_rows_alike_gets_its_line(name: str):
    # Red with: no dimension but the first tried; a tensor of N columns taken by rows without trials.
    own, options, dims = ROWWISE[name]
    line = said(own, **options)
    assert line == f"rowprop.rowwise({dims})(Own)"
    for twin in (pasted(line, own), rowprop.rowwise()(type("Own", (own,), {}))):
        report = as_indexed(step(twin, **options))
        assert report.sliced["Own"] == 1 and not report.densified and not report.functions


def where(mixed: Any) -> Any:
    """A backward by rows that does another thing where something holds of a tensor of all rows, which nobody reads."""
    return lambda ctx, x, g: torch.where(mixed(x, g), g * x - (g * x).mean(0), g * x)


EXTRA = torch.arange(N, dtype=torch.float64)
OTHERS, KEPT = (
    "the gradient of argument 0 on some rows is not that",
    "rows without a gradient get one in that of argument 0",
)
MIXING: dict[str, tuple[Any, str]] = {  # the function, and why it cannot be declared
    "a mean over the batch": (function(lambda ctx, x, g: g * x - (g * x).mean(0)), KEPT),
    "a mean of what it divides by": (function(lambda ctx, x, g: g / x.square().mean(0)), OTHERS),
    "a mean of what is saved": (function(lambda ctx, x, g: g * x.mean(), lambda x: (x.sum(1),)), OTHERS),
    "a roll by one row": (function(lambda ctx, g: g.roll(1, 0), lambda x: ()), KEPT),
    "the row before, saved": (function(lambda ctx, x, g: g * x.roll(1, 0)), OTHERS),
    "a sum of the rows before": (function(lambda ctx, x, g: (g * x).cumsum(0)), KEPT),
    "neighbours": (
        function(lambda ctx, a, g: a @ g, lambda x: (SQUARE,)),
        "on 2 of 8 rows its backward fails: Runtime",
    ),
    "neighbours, trained": (
        function(lambda ctx, a, g: a @ g, lambda x: (LEAF,)),
        "on 2 of 8 rows its backward fails: RuntimeError",
    ),
    "neighbours in a list": (function(lambda ctx, g: ctx.a[0] @ g, lambda x: (), a=[SQUARE]), "attribute of ctx"),
    "neighbours in an array": (function(numpy(lambda ctx, g: ctx.a @ g), lambda x: (), a=SQUARE.numpy()), "fails"),
    "a mean over the rows that it gets": (function(lambda ctx, x, g: g * x / len(g)), OTHERS),
    "gradients clipped together": (
        *(function(numpy(lambda ctx, x, g: g * x / max(1.0, np.linalg.norm(g) / 10))), OTHERS),
    ),
    "a sum over rows that divides": (function(lambda ctx, x, g: g * x / (1 + (g * x).sum())), OTHERS),
    "a value that is read": (function(lambda ctx, x, g: g * x if x.max() < 9 else g * x.mean(0)), "reads values"),
    "rare large values": (function(where(lambda x, g: x.max() > 50)), KEPT),
    "rare large gradients": (function(where(lambda x, g: g.abs().max() > 20)), KEPT),
    "rare small values": (function(where(lambda x, g: (x == 0).all(1).any())), KEPT),
    "equal rows": (function(where(lambda x, g: (x[:, None] == x).all(-1).sum() > N)), KEPT),
    "the largest row, by numpy": (function(numpy(lambda ctx, x, g: g * x * (x < x.max(0)))), OTHERS),
    "sorted rows": (function(lambda ctx, x, g: g * x.sort(0).values), OTHERS),
    "rows by number": (function(lambda ctx, g: g * EXTRA[: len(g), None], lambda x: ()), OTHERS),
    "a constant beside": (function(lambda ctx, x, g: g + 0.1 * x), KEPT),
    "hidden behind zeros": (function(lambda ctx, w, g: (g - g.mean(0)) @ w, lambda x: (WEIGHT * 0,)), KEPT),
    "whole numbers": (function(lambda ctx, s, g: g * s.sum(), lambda x: (torch.arange(N),)), OTHERS),
    "equal whole numbers": (
        *(function(lambda ctx, s, g: g * s.max(), lambda x: (torch.ones(N).long(),)), "is the same in all rows"),
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_function_that_mixes_rows_gets_none(name: str):
    # Red with one kind of trial left out: other rows alike ("rare large values", "a mean of what is saved"), no row
    # zero ("rare small values"), no gradient beside ("gradients clipped together"), no rows copied ("equal rows").
    own, reason = MIXING[name]
    line = said(own)
    assert reason in line and not line.startswith("rowprop.")
    twin = rowprop.rowwise()(type("Own", (own,), {}))
    with pytest.warns(UserWarning, match="Own, declared by rowwise.., runs at full size: "):
        assert reason in as_indexed(step(twin)).densified["Own"].reason


def counts(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    COUNTED["calls"] += 1
    return g * x


def draws_by_numpy(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    return g * x * float(np.random.rand()) * random.random()


def writes_to_ctx(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
    ctx.calls = 1
    return g * x


UNTRIED: dict[str, tuple[Any, str]] = {  # the function, and why it is not tried, or not further
    "counts": (function(counts), "changes a list or a dict outside of it"),
    "writes to ctx": (function(writes_to_ctx), "sets attributes, or variables outside of it"),
    "writes to a weight": (function(lambda ctx, x, g: g * x * WEIGHT.mul_(1)[0]), "writes to a tensor that it did not"),
    "writes to what is saved": (function(numpy(lambda ctx, x, g: np.multiply(x, 0.5, out=x) * g)), "writes to a saved"),
    "draws": (function(lambda ctx, x, g: g * x * torch.rand(()).sign()), "draws random numbers"),
    "a gradient of zeros": (function(lambda ctx, g: g * 0, lambda x: ()), "gradient of argument 0 is zero"),
}


@pytest.mark.parametrize("name", UNTRIED)
def test_a_function_that_should_not_run_once_more_is_not_tried(name: str):
    own, reason = UNTRIED[name]
    COUNTED["calls"] = 0
    assert reason in said(own)
    assert COUNTED["calls"] == 2 * (name == "counts")  # of the two steps


def test_trials_leave_no_trace():
    # Red when: the random state of numpy or of Python is not put back.
    def draw() -> tuple[float, float]:
        return float(np.random.rand()), random.random()

    def seeded(between: Callable[[], Any]) -> tuple[float, float]:
        np.random.seed(0)
        random.seed(0)
        between()
        return draw()

    loss = rowprop.pick(function(draws_by_numpy).apply(weight(N, 4)).square().sum(1), ROWS).sum()
    expected = seeded(draw)  # the backward itself draws once
    with rowprop.watch() as report:
        assert seeded(loss.backward) == expected
    assert not next(iter(report.functions.values())).startswith("rowprop.")


def test_a_function_is_tried_once_for_a_report_and_a_declared_one_once_for_a_shape():
    calls = []
    own = function(lambda ctx, x, g: g * x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rowprop.backprop.rules.inference.infer",
            lambda *args: calls.append(1) or {"saved": (0,), "grads": (0,), "outputs": (0,)},
        )
        with rowprop.watch():
            step(own)(rowprop.pick), step(own)(rowprop.pick)
        assert len(calls) == 1
        twin = rowprop.rowwise()(type("Own", (own,), {}))
        step(twin)(rowprop.pick), step(twin)(rowprop.pick), step(twin, width=5)(rowprop.pick)
        assert len(calls) == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint_it_is_tried_where_no_hook_keeps_its_tensors(reentrant: bool):
    # Red when: the saved tensors of a checkpoint are read twice, which raises.
    own = function(lambda ctx, x, g: g * x)
    inside = type("Inside", (), {"apply": staticmethod(lambda x: checkpoint(own.apply, x, use_reentrant=reentrant))})
    line = said(inside)
    assert line.startswith("rowprop." if reentrant else "not tried: hooks keep its saved tensors")


def test_an_op_of_torch_library_gets_a_line_that_declares_it():
    op = torch.library.custom_op(
        "rowprop_tests::unknown", lambda x, n: x**n, mutates_args=(), schema="(Tensor x, int n) -> Tensor"
    )
    op.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[0] ** 2 * 3, None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    own = type("Op", (), {"apply": staticmethod(lambda x: torch.ops.rowprop_tests.unknown(x, 3))})
    (line,) = as_indexed(step(own)).functions.values()
    assert line == "rowprop.rowwise(saved=0, grads=0)(torch.ops.rowprop_tests.unknown)"
    eval(line)
    assert not as_indexed(step(own)).densified


def test_verify_prints_the_line():
    own = function(lambda ctx, g: g * 2, lambda x: ())
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    batch = torch.randn(N, 4)
    result = rowprop.verify(model, batch, lambda model, batch: own.apply(model(batch)).square().sum(1))
    line = "Own ran at full size: rowprop.rowwise(saved=(), grads=0)(Own)."
    assert result.agrees and result.verdict.endswith(line) and list(result.to_dict()["functions"])
    pasted(next(iter(result.functions.values())), own)
