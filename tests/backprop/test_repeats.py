"""Rows that repeat, and rows that nobody knows to be unique, as integer indices on a device: by brute force."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rowprop
from cuda_kernels import installed
from picks import Applied, as_indexed
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.cost.flops import count_flops

N = 6
INDICES = [[2], [0, 1, 2], [4, 4, 4], [5, 0, 5, 0], [3, 1, 1, 0, 3, 3], [0, 0, 2, 2, 5], [1, 5, 0, 5, 2, 1, 0]]
LAYOUTS = [
    ((N, 3), Layout(0, N)),
    ((2, N), Layout(1, N)),
    ((2, N, 3), Layout(1, N)),
    ((2 * N, 3), Layout(0, N, outer=2)),
    ((2, N * 3), Layout(1, N, inner=3)),
    ((2, 2 * N * 3, 2), Layout(1, N, outer=2, inner=3)),
]


def test_first_is_the_place_of_the_first_entry_with_the_same_row():
    # Red when: the sort is not stable, places follow the order of the rows, or a run begins at its last entry.
    random.seed(0)
    many = [[random.randrange(kept) for _ in range(kept)] for kept in range(1, 60)]  # runs of every length
    for index in (*INDICES, *many):
        rows = RowSet(torch.tensor(index), N, unique=False, batchnorm="rows")
        assert rows.first.tolist() == [index.index(row) for row in index]


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
# Red when: anything counts or reads entries of the indices (a fake tensor has none).
def test_nothing_is_read_where_rows_may_repeat(shape: tuple[int, ...], layout: Layout):
    with FakeTensorMode():
        rows = RowSet(torch.empty(4, dtype=torch.int64), N, unique=False, batchnorm="rows")
        g = RowSlice(torch.empty(layout.kept_shape(shape, 4)), rows, layout, shape)
        assert rows.first.shape == (4,) and g.merged().dense().shape == shape
        (out,) = Densify("", g, (layout.dim,)).after((torch.empty(shape),))
        assert out.values.shape == g.values.shape


def attention(kernel: str, *options: Any) -> nn.Module:
    """A layer below attention with dropout in the kernel, whose mask depends on a row's place among all N."""
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")

    def losses(layer: nn.Module, x: Tensor) -> Tensor:
        qkv = layer(x).unflatten(-1, (3, 1, 8)).movedim(2, 0).transpose(2, 3)
        return attend(*qkv, *options, dropout_p=0.3)[0].square().flatten(1).sum(1)

    return Applied(losses, nn.Linear(4, 3 * 8))


def recurrent() -> nn.Module:
    """A layer below an LSTM, which runs at full size where its forward would have to run again for most rows."""
    layers = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)
    return Applied(lambda below, lstm, x: lstm(below(x).tanh())[0].square().sum((1, 2)), *layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "flash": (lambda: attention("flash"), "_scaled_dot_product_flash_attention_backward"),
    "efficient": (lambda: attention("efficient", None, True), "_scaled_dot_product_efficient_attention_backward"),
    "lstm": (recurrent, "mkldnn_rnn_layer_backward"),
}
MOST = [[0, 1, 2, 4, 5], [5, 3, 0, 2, 4], [3, 1, 1, 0, 3], [2, 2, 2, 2, 2], [-1, 5, 0, -6, 3]]


@pytest.mark.parametrize("rows", MOST, ids=str)
@pytest.mark.parametrize("name", MODELS)
# Red when: a row that repeats counts twice after the op at full size, or the mask of repeats leaves out the parts
# around the rows, or the gradient upstream is then dense.
@pytest.mark.usefixtures("as_accelerator")
def test_upstream_of_an_op_at_full_size_unknown_rows_stay_sliced(name: str, rows: list[int]):
    make, op = MODELS[name]
    dtype = torch.float32 if name == "lstm" else torch.float64  # the fused layer has single precision only
    model, x, index = make().to(dtype), torch.randn(N, 5, 4, dtype=dtype), torch.tensor(rows)
    with installed():
        report = as_indexed(
            lambda take: torch.autograd.grad(take(model(x), index).sum(), list(model.parameters())),
            rtol=1e-4,
            atol=1e-5,
        )
    assert set(report.densified) == {op} and report.waited == {}
    assert "mm" in report.sliced, str(report)  # the weight of the layer below


ITEMS, WIDTH, READERS = 40, 6, 200
ITEM = torch.multinomial(
    1 / torch.arange(1.0, ITEMS + 1) ** 1.5, READERS, True, generator=torch.Generator().manual_seed(0)
)
GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda h: h[ITEM],
    "index_select": lambda h: h.index_select(0, ITEM),
    "embedding": lambda h: nn.functional.embedding(ITEM, h),
    "gather": lambda h: h.gather(0, ITEM[:, None].repeat(1, WIDTH)),
    "take_along_dim": lambda h: torch.take_along_dim(h, ITEM[:, None], 0),
    "entries": lambda h: h[ITEM[:, None], torch.arange(WIDTH)],
    "of time first": lambda h: h.view(1, ITEMS, WIDTH)[:, ITEM].squeeze(0),
}


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("count", [10, 39, 100])
# Red when: repeats are merged only where they are more than the items, or not in one of the rules; the number of rows
# is compared before they are merged; the embedding of a computed table goes on dense.
def test_items_that_many_rows_read_cost_as_often_as_they_differ(name: str, count: int, as_host: None):
    rows = torch.randperm(READERS, generator=torch.Generator().manual_seed(1))[:count]
    items, users = torch.randn(ITEMS, 5).double(), torch.randn(READERS, WIDTH).double()
    below, layer = nn.Linear(5, 5).double(), nn.Linear(5, WIDTH).double()
    flops: list[int] = []

    def step(take: Any) -> list[Tensor | None]:
        losses = (GATHERS[name](layer(below(items).tanh())) * users).square().sum(1)
        with count_flops() as counted:
            out = torch.autograd.grad(take(losses, rows).mean(), [*below.parameters(), *layer.parameters()])
        flops.append(counted.total_flops)
        return list(out)

    report = as_indexed(step)
    share = len(ITEM[rows].unique()) / ITEMS
    assert not report.densified and flops[1] <= 1.1 * share * flops[0]


def test_nodes_that_several_edges_read_cost_once(as_host: None):
    # Red when: repeats are not merged where they are fewer than the nodes.
    nodes, graphs, edges = 80, 8, 320
    graph = torch.arange(nodes) // (nodes // graphs)
    source = torch.arange(nodes).repeat_interleave(edges // nodes)
    target = torch.arange(edges) % (nodes // graphs) + nodes // graphs * graph[source]
    layer, x = nn.Linear(4, 4).double(), torch.randn(nodes, 4).double()
    flops: dict[int, int] = {}
    for live in (1, 3, graphs):
        summed = torch.zeros(nodes, 4).double().index_add(0, target, layer(x).index_select(0, source))
        losses = torch.zeros(graphs, 4).double().index_add(0, graph, summed).square().sum(1)
        expected = torch.autograd.grad(losses[:live].sum(), layer.weight, retain_graph=True)
        with count_flops() as counted:
            actual = torch.autograd.grad(rowprop.pick(losses, torch.arange(live)).sum(), layer.weight)
        torch.testing.assert_close(actual, expected)
        flops[live] = counted.total_flops
    assert flops[1] * graphs == flops[graphs] and flops[3] * graphs == 3 * flops[graphs]


# Red when: a device is asked how many rows differ, or the dense gradient of the table is not reported there.
def test_a_device_is_not_asked_how_many_rows_differ(as_accelerator: None):
    table = nn.Parameter(torch.randn(ITEMS, WIDTH))
    for name in ("index", "embedding"):
        losses = GATHERS[name](table.tanh()).square().sum(1)
        for count in (10, 100):
            with rowprop.watch() as report:
                rowprop.pick(losses, torch.arange(count)).sum().backward(retain_graph=True)
            assert not report.waited
            assert list(report.densified) == ["embedding_dense_backward"] * (name == "embedding" and count > ITEMS)
