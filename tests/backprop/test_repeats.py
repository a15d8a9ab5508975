"""Rows that repeat, and rows that nobody knows to be unique, as integer indices on a device: by brute force."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_kernels import installed
from picks import as_indexed
from rowprop.backprop.layout import Layout
from rowprop.backprop.sliced import Densify, RowSet, RowSlice

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


def unknown(index: list[int]) -> RowSet:
    return RowSet(torch.tensor(index), N, unique=False, batchnorm="rows")


def a_gradient(index: list[int], shape: tuple[int, ...], layout: Layout) -> RowSlice:
    torch.manual_seed(0)
    return RowSlice(torch.randn(layout.kept_shape(shape, len(index))), unknown(index), layout, shape)


def parts(values: Tensor, layout: Layout, rows: int) -> list[Tensor]:
    """What the values hold for each of the rows, copied: the rows' own dimension goes to the front."""
    apart = values.unflatten(layout.dim, (layout.outer, rows, layout.inner))
    return list(apart.movedim(layout.dim + 1, 0).clone())


def by_hand(g: RowSlice) -> list[Tensor]:
    """For each of the N rows the sum of all that the gradient holds for it."""
    held = parts(g.values, g.layout, g.rows.kept)
    zero = torch.zeros_like(held[0])
    return [sum((v for row, v in zip(g.rows.index.tolist(), held, strict=True) if row == n), zero) for n in range(N)]


def test_first_is_the_place_of_the_first_entry_with_the_same_row():
    # Red when: the sort is not stable, places follow the order of the rows, or a run begins at its last entry.
    random.seed(0)
    many = [[random.randrange(kept) for _ in range(kept)] for kept in range(1, 60)]  # runs of every length
    for index in (*INDICES, *many):
        assert unknown(index).first.tolist() == [index.index(row) for row in index]


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
# Red when: the sum stands in each place of the row, or the places are taken without the parts around the rows.
def test_merged_has_each_sum_in_the_first_place(index: list[int], shape: tuple[int, ...], layout: Layout):
    g = a_gradient(index, shape, layout)
    sums, merged = by_hand(g), g.merged()
    assert (merged.layout, merged.shape) == (g.layout, g.shape)
    for place, (row, values) in enumerate(zip(index, parts(merged.values, layout, len(index)), strict=True)):
        torch.testing.assert_close(values, sums[row] if index.index(row) == place else torch.zeros_like(values))
    squared = merged.like(merged.values.square()).dense()  # an op that is not linear
    torch.testing.assert_close(squared, g.dense().square())
    g.rows.unique = True  # rows that are known to be unique are not added up once more
    assert g.merged() is g


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
# Red when: anything counts or reads entries of the indices (a fake tensor has none).
def test_nothing_is_read_where_rows_may_repeat(shape: tuple[int, ...], layout: Layout):
    with FakeTensorMode():
        rows = RowSet(torch.empty(4, dtype=torch.int64), N, unique=False, batchnorm="rows")
        g = RowSlice(torch.empty(layout.kept_shape(shape, 4)), rows, layout, shape)
        assert rows.first.shape == (4,) and g.merged().dense().shape == shape
        (out,) = Densify("", g, (layout.dim,)).after((torch.empty(shape),))
        assert out.values.shape == g.values.shape


class Attention(nn.Module):
    """A layer below attention with dropout in the kernel, whose mask depends on a row's place among all N."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        self.options = (None, True) if kernel == "efficient" else ()
        self.qkv = nn.Linear(4, 3 * 8)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 1, 8)).movedim(2, 0).transpose(2, 3)
        return self.kernel(*qkv, *self.options, dropout_p=0.3)[0].square().flatten(1).sum(1)


class Recurrent(nn.Module):
    """A layer below an LSTM, which runs at full size where its forward would have to run again for most rows."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.below(x).tanh())[0].square().sum((1, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "flash": (lambda: Attention("flash"), "_scaled_dot_product_flash_attention_backward"),
    "efficient": (lambda: Attention("efficient"), "_scaled_dot_product_efficient_attention_backward"),
    "lstm": (Recurrent, "mkldnn_rnn_layer_backward"),
}
MOST = [[0, 1, 2, 4, 5], [5, 3, 0, 2, 4], [3, 1, 1, 0, 3], [2, 2, 2, 2, 2], [-1, 5, 0, -6, 3]]


@pytest.mark.parametrize("rows", MOST, ids=str)
@pytest.mark.parametrize("name", MODELS)
# Red when: a row that repeats counts twice after the op at full size, or the mask of repeats leaves out the parts
# around the rows, or the gradient upstream is then dense.
@pytest.mark.usefixtures("as_accelerator")
def test_upstream_of_an_op_at_full_size_unknown_rows_stay_sliced(name: str, rows: list[int]):
    torch.manual_seed(0)
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
