"""Native dispatch beside Python's: the same bits, whatever a call has in common with an earlier one.

``pytest --native`` compiles it and runs these tests; the other tests of the backward run by it as well then.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import native_audit
import rowprop
import zoo
from rowprop import native
from rowprop.backprop.autograd import foreign, rowgrad
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.rows.layout import Layout, Part
from rowprop.backprop.rows.rows import Hook, RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.registry import RULES
from rowprop.backprop.watch import Report
from rowprop.native import building

dispatched = pytest.mark.skipif("not config.getoption('--native')")
TIMES = 4  # a call runs in Python, is recorded, and is replayed twice


@pytest.fixture(autouse=True)
def _forgetting() -> Iterator[None]:
    if native.extension is not None:
        native.extension.forget()
        native.extension.counts()
    yield


def by_python(f: Callable[[], Any]) -> Any:
    """The result of ``f`` where Python dispatches."""
    with rowgrad.by_python():
        return f()


def gradient(values: Tensor, rows: RowSet, layout: Layout, *shape: int) -> RowGrad:
    return RowGrad(RowSlice(values, rows, layout, shape))


def rows_of(*index: int, num_rows: int = 8, **policies: Any) -> RowSet:
    return RowSet(torch.tensor(index), num_rows, **({"unique": True, "batchnorm": None} | policies))


@contextmanager
def below_autograd() -> Iterator[None]:
    """As autograd calls the ops of its formulas."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def dense(g: RowGrad) -> Tensor:
    """The gradient at full size; it stays sliced."""
    return g.copied()


def replays() -> int:
    return native.extension.counts()[0]


@dispatched
@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=lambda entry: entry.name)
def test_a_models_gradients_are_those_of_python_bit_for_bit(entry: Any):
    # Red if a gather is replayed from other rows, if results are handed on in another layout, and if a number that is a
    # multiple of the kept rows is replayed as it was.
    def gradients(rows: tuple[int, ...]) -> list[Tensor | None]:
        model, batch = entry.make(torch.float32)
        torch.manual_seed(1)
        losses = entry.losses(model, batch)
        rowprop.pick(losses, torch.tensor(rows), batchnorm="exact").sum().backward()
        return [p.grad for p in model.parameters()]

    some, others, most, more = (
        zoo.ROWS,
        tuple((row + 1) % zoo.N for row in zoo.ROWS),
        (6, 5, 3, 2, 1, 0, 7),
        (7, 0, 4, 2, 1),
    )
    wanted = {rows: by_python(lambda rows=rows: gradients(rows)) for rows in (some, others, most, more)}
    for rows in (some, some, others, most, more, some):
        for a, b in zip(gradients(rows), wanted[rows], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert replays() > 0


@dispatched
def test_replayed_ops_have_the_bits_of_python():
    # Red if a number among the arguments is left out of the key, or if the index of the rows is recorded as a constant.
    replayed, wrong = native_audit.ops(2)
    assert wrong == []
    assert len(replayed) > 120


@dispatched
def test_random_programs_have_the_bits_of_python():
    assert native_audit.random_programs(range(60)) == []


def product(g: RowGrad, other: Tensor) -> Tensor:
    with below_autograd():
        return torch.ops.aten.mm(g, other)


@dispatched
def test_a_recipe_is_used_for_other_values_and_other_rows():
    layout = Layout(0, 8)
    for index in ((0, 3), (0, 3), (7, 1), (5, 4)):
        values, other = torch.randn(2, 3), torch.randn(3, 5)
        out = product(gradient(values, rows_of(*index), layout, 8, 3), other)
        assert torch.equal(out.plain()[list(index)], values @ other)
    assert replays() == 2


def summed(kept: int) -> None:
    """The sum of each of ``kept`` rows of 20, and the gradient of a mean over their entries, beside what they are."""
    rows, values = rows_of(*range(kept), num_rows=20), torch.randn(kept, 3)
    with below_autograd():
        total = torch.ops.aten.sum.dim_IntList(gradient(values, rows, Layout(0, 20), 20, 3), [1])
        apart = torch.ops.aten.expand(torch.ops.aten.unsqueeze(total, 1), [20, 7])
    assert torch.equal(total.plain()[:kept], values.sum(1))
    assert torch.equal(apart.plain()[:kept], values.sum(1)[:, None].expand(kept, 7))


@dispatched
def test_a_recipe_is_used_for_numbers_of_kept_rows_between_those_that_it_was_recorded_at():
    # Red if the number is part of the key, and if a number that is a multiple of it is taken for a constant.
    for kept, found in ((4, 0), (4, 0), (9, 0), (5, 3), (8, 3), (10, 0), (2, 0), (4, 3), (6, 3), (1, 0)):
        summed(kept)
        assert replays() == found, kept


def with_rule(rule: Callable[[int], float], kept: int) -> float:
    """What a product is multiplied by, if its rule says it from the number of kept rows."""

    def run(op: Any, g: RowSlice, factor: float) -> RowSlice:
        return g.like(op(g.values, rule(g.rows.kept)))

    op = torch.ops.aten.mul.Scalar
    with patch.dict(RULES, {op: replace(RULES[op], run=run)}), below_autograd():
        g = gradient(torch.ones(kept, 6), rows_of(*range(kept), num_rows=20), Layout(0, 20), 20, 6)
        return float(op(g, 1.0).plain()[0, 0])


@dispatched
@pytest.mark.parametrize(
    "rule",
    [
        lambda kept: kept // 2,  # no multiple of the kept rows
        lambda kept: kept + 1,
        lambda kept: 2 if kept == 6 else 1,  # as many as there are columns
        lambda kept: 2 if kept >= 12 else 1,
        lambda kept: 2 if kept == 1 else 1,
        lambda kept: 3 * kept,
        lambda kept: 4 if kept <= 10 else kept,
    ],
)
def test_a_rule_may_depend_on_the_number_of_kept_rows(rule: Callable[[int], float]):
    # Red, each by itself: recordings that differ are taken for one; numbers that are other sizes, too; all numbers.
    for kept in (4, 4, 10, 10, 5, 6, 8, 16, 1, 3, 5, 12, 10, 10, 10):
        assert with_rule(rule, kept) == rule(kept), kept
    assert replays() > 0


def call(dtype: torch.dtype = torch.float32, kept: int = 2, size: int = 5, num_rows: int = 8) -> tuple[RowGrad, Tensor]:
    """A gradient of ``kept`` of so many rows of width 3, and a matrix."""
    rows = rows_of(*range(kept), num_rows=num_rows)
    g = gradient(torch.randn(kept, 3, dtype=dtype), rows, Layout(0, num_rows), num_rows, 3)
    return g, torch.randn(3, size, dtype=dtype)


CHANGED: dict[str, Callable[[], tuple[RowGrad, Tensor]]] = {
    "dtype": lambda: call(torch.float64),
    "strides of the values": lambda: (gradient(torch.randn(3, 2).T, rows_of(0, 3), Layout(0, 8), 8, 3), call()[1]),
    "strides of the matrix": lambda: (call()[0], torch.randn(5, 3).T),
    "dimension": lambda: (gradient(torch.randn(8, 2), rows_of(0, 2, num_rows=3), Layout(1, 3), 8, 3), call()[1]),
    "merged rows": lambda: (
        gradient(torch.randn(4, 3), rows_of(0, 3, num_rows=4), Layout(0, 4, 2), 8, 3),
        call()[1],
    ),
    "kept rows": lambda: call(kept=3),
    "sizes": lambda: call(size=4),
    "all rows": lambda: call(num_rows=9),
}


@dispatched
@pytest.mark.parametrize("changed", CHANGED)
def test_no_recipe_is_used_for_a_call_that_differs(changed: str):
    # Red, each by itself: the key without dtypes, strides, layouts, the number of kept rows, sizes.
    for make in (call, call, call, CHANGED[changed]):
        g, other = make()
        wanted = dense(g) @ other
        out = product(g, other)
        torch.testing.assert_close(out.plain() if type(out) is RowGrad else out, wanted)
    assert replays() == 1


@dispatched
def test_no_recipe_is_used_where_rows_are_merged_the_other_way():
    # Red if the key has no layout: all sizes are the same.
    rows, other = rows_of(0, 3, num_rows=4), torch.randn(8, 3)
    for layout in (*[Layout(0, 4, 2, 1)] * 3, Layout(0, 4, 1, 2)):
        g = gradient(torch.randn(4, 3), rows, layout, 8, 3)
        wanted = dense(g) * other
        with below_autograd():
            assert torch.equal(torch.ops.aten.mul.Tensor(g, other).plain(), wanted)
    assert replays() == 1


@dispatched
def test_no_recipe_is_used_where_an_operand_is_broadcast():
    # Red if the key has no sizes: the strides are the same.
    rows = rows_of(0, 3)
    for size in (8, 8, 8, 1):
        g, other = gradient(torch.randn(2, 3), rows, Layout(0, 8), 8, 3), torch.randn(size, 3)
        wanted = dense(g) * other
        with below_autograd():
            assert torch.equal(torch.ops.aten.mul.Tensor(g, other).plain(), wanted)


@dispatched
def test_no_recipe_is_used_where_an_operand_comes_twice():
    # Red if the key does not tell that two operands are one: the second is then taken for the first.
    layout, rows = Layout(0, 8), rows_of(0, 3)
    for same in (True, True, True, False):
        a = gradient(torch.randn(2, 3), rows, layout, 8, 3)
        b = a if same else gradient(torch.randn(2, 3), rows, layout, 8, 3)
        wanted = dense(a)[[0, 3]] * dense(b)[[0, 3]]
        with below_autograd():
            out = torch.ops.aten.mul(a, b)
        assert torch.equal(out.plain()[[0, 3]], wanted)


@dispatched
@pytest.mark.parametrize("policies", [{"unique": False}, {"batchnorm": "exact"}, {"attention": "cut"}])
def test_rows_of_other_policies_have_recipes_of_their_own(policies: Any):
    # Red if the key does not hold the rows' traits: repeated rows are not added up before a square then.
    layout = Layout(0, 8)
    index = (3, 3) if "unique" in policies else (0, 3)
    for given in ({}, {}, {}, policies):
        rows = rows_of(*index, **given) if given else rows_of(0, 3)
        g = gradient(torch.randn(2, 3), rows, layout, 8, 3)
        wanted = dense(g) ** 2
        with below_autograd():
            out = torch.ops.aten.mul(g, g)
        torch.testing.assert_close(out.plain(), wanted)


@dispatched
def test_a_hook_of_the_rows_is_asked_though_it_came_after_the_gradient():
    # Red if the extension is not told of the hook.
    asked = list[str]()

    class Asked(Hook):
        def measure_product(self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor) -> None:
            asked.append("")

    for hooked in (False, False, False, True):
        rows = rows_of(0, 3)
        g, x = gradient(torch.randn(2, 3), rows, Layout(0, 8), 8, 3), torch.randn(8, 5)
        if hooked:
            rows.hook = Asked()
        with below_autograd():
            torch.ops.aten.mm(torch.ops.aten.t(g), x)
    assert asked == [""]


@dispatched
def test_a_table_that_is_computed_stays_sliced_though_one_that_is_a_leaf_was_recorded():
    # Red if the key does not tell whether the gradient is that of a leaf.
    leaf, ids = torch.randn(9, 4, requires_grad=True), torch.tensor([4, 1, 2, 0, 3, 5, 7, 6])

    def backward(table: Tensor) -> dict[str, int]:
        losses = nn.functional.embedding(ids, table).square().sum(1)
        with rowprop.watch() as report:
            rowprop.pick(losses, [0, 3]).sum().backward()
        return report.sliced

    for _ in range(TIMES):
        backward(leaf)
    assert "tanh_backward" in backward(leaf.tanh())


@dispatched
def test_numbers_and_texts_among_the_arguments_are_part_of_the_key():
    layout, rows = Layout(0, 8), rows_of(0, 3)
    with below_autograd():
        for factor in (2.0, 2.0, 2.0, 3.0, 4):
            g = gradient(torch.ones(2, 3), rows, layout, 8, 3)
            assert float(torch.ops.aten.mul.Tensor(g, torch.tensor(factor)).plain().sum()) == 6 * factor
            assert float(torch.ops.aten.mul.Scalar(g, factor).plain().sum()) == 6 * factor
            assert float((g * factor).plain().sum()) == 6 * factor


@dispatched
def test_a_process_that_recorded_something_ends_well():
    # Red where a recipe lets go of a Python object after Python has ended, and where recording imports dynamo.
    code = """
import sys, torch, rowprop
layer, x = torch.nn.Linear(4, 4), torch.randn(6, 5, 4)
for _ in range(4):
    rowprop.pick(layer(x).square().sum(2), torch.eye(6, 5) > 0).sum().backward()
from rowprop import native
assert native.extension.counts()[0] > 0
assert "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "ROWPROP_NATIVE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@dispatched
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_subclasses_are_left_alone():
    # Red if the sizes of any tensor are read: a nested one refuses.
    layer = nn.Linear(3, 3)

    def nested() -> Tensor:
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)

    def two() -> Tensor:
        return TwoTensor(torch.ones(6, 3), torch.ones(6, 3))

    for make in (nested, two):
        found = torch.autograd.grad(layer(make()).sum(), layer.weight)[0]
        assert found.shape == (3, 3)
        assert type(found) is type(
            by_python(lambda make=make: torch.autograd.grad(layer(make()).sum(), layer.weight)[0])
        )


@dispatched
def test_the_report_tells_what_python_ran_and_why():
    # Red if a report is not told, and if it is told of what was replayed.
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])

    def backward() -> Report:
        with rowprop.watch() as report:
            rowprop.pick(net(torch.randn(8, 4)).square().sum(1), [0, 3]).sum().backward()
        return report

    first, _, _ = backward(), backward(), replays()
    third = backward()
    assert {why for _, why in first.python} == {"the first calls of a shape are recorded"}
    assert replays() == sum(third.sliced.values())
    assert third.python == {}
    assert "in Python" in str(first)
    assert "in Python" not in str(third)
    assert by_python(backward).python == {}


@dispatched
@pytest.mark.parametrize("unit", ["row", "token"])
def test_thinned_gradients_are_replayed_but_where_the_draws_are_asked(unit: Any):
    # Red if a rule that asks a hook is recorded: draws of an earlier step come again.
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    x = torch.randn(16, 6, 4)

    def gradients(seed: int) -> tuple[list[Tensor], Report]:
        net.zero_grad()
        handle = rowprop.thin(net, keep=0.5, unit=unit, generator=torch.Generator().manual_seed(seed))
        with rowprop.watch() as report:
            (net(x).square().mean((1, 2)) * torch.arange(16)).mean().backward()
        handle.remove()
        return [cast(Tensor, p.grad).clone() for p in net.parameters()], report

    for seed in range(4):
        wanted, found = by_python(lambda seed=seed: gradients(seed)), gradients(seed)
        assert all(map(torch.equal, wanted[0], found[0]))
    assert ("mm", "a hook of the rows") in found[1].python
    assert sum(found[1].python.values()) < sum(found[1].sliced.values()) / 2


@dispatched
def test_flop_counters_see_the_ops_and_python_runs_them():
    model, x = nn.Linear(4, 4), torch.randn(8, 4)

    def backward() -> int:
        losses = model(x).square().sum(1)
        with FlopCounterMode(display=False) as counter:
            rowprop.pick(losses, [0, 3]).sum().backward()
        return counter.get_total_flops()

    assert {backward() for _ in range(TIMES)} == {by_python(backward)}
    assert replays() == 0


@dispatched
def test_an_error_within_a_replay_is_that_of_the_op():
    def select(index: int) -> Tensor:
        g = gradient(torch.ones(2, 3), rows_of(0, 3), Layout(0, 8), 8, 3)
        with below_autograd():
            return torch.ops.aten.index_select(g, 1, torch.tensor([index]))

    with pytest.raises(RuntimeError) as wanted:
        by_python(lambda: select(7))
    for _ in range(TIMES):
        select(1)
    with pytest.raises(RuntimeError) as caught:
        select(7)
    assert replays() == 3
    assert str(caught.value) == str(wanted.value)


@dispatched
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning", "ignore:Error detected in:UserWarning")
def test_anomaly_mode_names_the_node_whose_replayed_gradient_is_nan():
    below, above = nn.Linear(4, 4), nn.Linear(4, 4)

    def found() -> str:
        losses = above((below(torch.ones(8, 4)) * 0).sqrt()).sum(1)  # an infinite slope times 0
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError) as caught:
            rowprop.pick(losses, [0, 3]).sum().backward()
        return str(caught.value)

    wanted = by_python(found)
    assert "MulBackward0" in wanted
    assert {found() for _ in range(TIMES)} == {wanted} and replays() > 0


@dispatched
def test_nothing_of_a_batch_is_held():
    # Red where a recipe keeps an operand, and where the gathers outlive the backward.
    model, held = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), list[Any]()
    for _ in range(TIMES):
        x = torch.randn(8, 4)
        hidden = model[1](model[0](x))
        rowprop.pick(model[2](hidden).square().sum(1), [0, 3]).sum().backward()
        held += [weakref.ref(x), weakref.ref(hidden)]
    del x, hidden
    gc.collect()
    assert all(one() is None for one in held)


@dispatched
def test_the_table_of_recipes_is_bounded():
    layout, rows = Layout(0, 8), rows_of(0, 3)
    with below_autograd():
        for factor in range(9000):
            torch.ops.aten.mul.Scalar(gradient(torch.ones(2, 3), rows, layout, 8, 3), factor)
    assert 0 < native.extension.counts()[2] <= 8192


@dispatched
def test_backwards_of_several_threads_do_not_meet():
    wanted: dict[int, Tensor] = {}
    errors: list[str] = []

    def backward(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(4, 4, generator=generator, requires_grad=True)
        x = torch.randn(8, 4, generator=generator)
        losses = ((x @ weight).tanh() @ weight).square().sum(1)
        return torch.autograd.grad(rowprop.pick(losses, [number, 3 + number]).sum(), weight)[0]

    def work(number: int) -> None:
        errors.extend(f"{number}" for _ in range(100) if not torch.equal(backward(number), wanted[number]))

    wanted.update({number: by_python(lambda number=number: backward(number)) for number in range(4)})
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class Doubled(torch.autograd.Function):
    """A custom function without a rule, which gets a dense gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert type(grad) is Tensor
        return 2 * grad


@dispatched
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("inputs", [None, "weights", "hidden"])
def test_nodes_that_python_has_to_look_at_are_found_by_the_extension(hooked: bool, inputs: str | None):
    # Two picks in one backward, whose graphs share a layer and a leaf. Red if limits or hooks are not asked for, and if
    # special nodes are left out.
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x, y = torch.randn(2, 32, 4).unbind()
    x.requires_grad_(), y.requires_grad_()
    seen = list[type]()
    if hooked:
        x.register_hook(lambda grad: seen.append(type(grad)))

    def gradients(pick: Callable[[Tensor, list[int]], Tensor]) -> list[Tensor]:
        hidden = layers[0](x).tanh()
        outputs = layers[1](hidden) + x + 3 * Doubled.apply(y), layers[2](hidden) - x
        first, second = (output.square().mean(1) for output in outputs)
        loss = pick(first, [1, 5]).sum() + pick(second, [2]).sum()
        weights = [layer.weight for layer in layers]
        if inputs is not None:
            return [*torch.autograd.grad(loss, weights if inputs == "weights" else [hidden, *weights[1:]])]
        leaves = [x, y, *weights]
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        return [cast(Tensor, leaf.grad) for leaf in leaves]

    for _ in range(TIMES):
        found = gradients(rowprop.pick)
        assert {*map(type, found), *seen} == {Tensor}
        torch.testing.assert_close(found, gradients(lambda losses, rows: losses[rows]))
    assert len(seen) == 2 * TIMES * (hooked and inputs is None)


@dispatched
def test_the_extension_hands_out_an_ordinary_node_once(monkeypatch: pytest.MonkeyPatch):
    # Red unless it learns which types of nodes need nothing: then Python walks over all nodes at each backward.
    walks, special = list[int](), foreign._special
    monkeypatch.setattr(foreign, "_special", lambda *args: (found := special(*args), walks.append(len(found)))[0])
    x, layer = torch.randn(8, 4), nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 3)
    for _ in range(2):
        rowprop.pick(layer(x).square().mean(1), [1, 5]).sum().backward()
    assert walks[-1] == 1  # the node of the pick


@dispatched
def test_an_op_that_reads_a_value_is_not_replayed():
    # Red with `reads` left out of check_readable, or without the tags of ops.
    x, w = torch.randn(8, 5), torch.randn(5, 5, requires_grad=True)

    def backward(filled: float) -> Tensor:  # the gradient of `where` depends on whether what it fills in is zero
        losses = torch.cumprod((x @ w).tanh() + filled, 1).sum(1)
        return torch.autograd.grad(rowprop.pick(losses, [0, 3]).sum(), w)[0]

    for filled in (0.5, 0.5, 0.5, 0.0, 2.0):
        assert torch.equal(backward(filled), by_python(lambda filled=filled: backward(filled)))


SWITCH = """
import shutil, sys, torch, rowprop
from rowprop import native
from rowprop.native import building

model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)), torch.randn(8, 4)

def gradients(losses):
    return torch.autograd.grad(rowprop.pick(losses, [0, 3]).sum(), model.parameters(), retain_graph=True)

losses = model(x).square().sum(1)
goal = building.library()
goal.parent.mkdir(parents=True)
with building._lock(goal):  # as while another process compiles
    wanted = gradients(losses)
    shutil.copy(sys.argv[1], goal)
assert native.extension is None
building._next_look_s[0] = 0.0
for _ in range(4):
    for each in losses, model(x).square().sum(1):  # also of a graph that is older than the extension
        assert all(map(torch.equal, gradients(each), wanted))
assert native.extension.counts()[0] > 0
assert "torch._dynamo" not in sys.modules
"""


@dispatched
def test_a_process_changes_over_while_it_trains(tmp_path: Path):
    # Red where a process looks for the extension at its first backward alone.
    where = {"ROWPROP_NATIVE": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", SWITCH, str(building.library())]
    done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_layout_survives_its_way_as_numbers():
    for layout in (
        Layout(1, 8, 2, 3),
        Layout(0, 12, 1, 1, (Part(1, 3),)),
        Layout(0, 24, 1, 2, (Part(2, 3), Part(0, 2, 4))),
    ):
        assert Layout.of_numbers(layout.numbers()) == layout
