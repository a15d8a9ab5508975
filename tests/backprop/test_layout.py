"""Layout arithmetic against brute force: label every element with its row, move the elements, compare the labels."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given

from rowprop.backprop.rows import layout as lay
from rowprop.backprop.rows.gather import gather, of_lines
from rowprop.backprop.rows.layout import Layout, Part
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice

sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], Layout]:
    """A shape and where its rows lie: one to three parts of their index, in any order, between other factors.

    Neighbours may be merged into one dimension.
    """
    factors = [(place, draw(sizes)) for place in range(draw(st.integers(1, 3)))]
    for size in draw(st.lists(sizes, max_size=3)):
        factors.insert(draw(st.integers(0, len(factors))), (-1, size))
    factors = draw(st.permutations(factors))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, len(factors))))), len(factors)]
    dims = [factors[a:b] for a, b in pairwise(cuts) if a < b]
    found: dict[int, Part] = {}
    for dim, held in enumerate(dims):
        for at, (place, size) in enumerate(held):
            if place >= 0:
                outer, inner = (prod(n for _, n in some) for some in (held[:at], held[at + 1 :]))
                found[place] = Part(dim, size, outer, inner)
    parts = [found[place] for place in sorted(found)]
    parts = [part for part in parts if part.size > 1] or parts[:1]
    return [prod(size for _, size in held) for held in dims], lay.layout_of(parts)


def labels(shape: list[int], layout: Layout) -> np.ndarray:
    """For every element of ``shape``, the row it belongs to."""
    out = np.zeros([1] * len(shape), dtype=int)
    for part in layout.parts:
        along = np.arange(shape[part.dim]) // part.inner % part.size
        out = out * part.size + along.reshape([-1 if d == part.dim else 1 for d in range(len(shape))])
    return np.broadcast_to(out, shape)


@st.composite
def regrouped(draw: st.DrawFn, numel: int) -> list[int]:
    """Any shape of ``numel`` elements: its prime factors dealt into dimensions in order, ones strewn in."""
    factors, rest = [], numel
    for p in (2, 3):
        while rest % p == 0:
            factors.append(p)
            rest //= p
    factors = draw(st.permutations(factors))
    shape: list[int] = []
    for factor in factors:
        if shape and draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape.append(factor)
        if draw(st.integers(0, 4)) == 0:
            shape.append(1)
    return shape or [1]


@pytest.mark.parametrize("new_shape", [(2, 3, 4), (2, 12), (24,), (6, 2, 2)])
def test_view_counts_what_lies_in_front_of_the_rows(new_shape: tuple[int, ...]):
    # Red when: `before` forgets layout.outer.
    layout = Layout(0, 3, outer=2)
    result = lay.view((6, 4), layout, new_shape)
    assert result is not None
    np.testing.assert_array_equal(labels((6, 4), layout).reshape(new_shape), labels(new_shape, result))


@given(st.data())
# Red when: the dimension's size is tested against num_rows alone.
def test_view_follows_every_element(data: st.DataObject):
    shape, layout = data.draw(layouts())
    new_shape = data.draw(regrouped(prod(shape)))
    moved = labels(shape, layout).reshape(new_shape)
    result = lay.view(shape, layout, new_shape)
    if result is not None:
        assert result.size == new_shape[result.dim]
        np.testing.assert_array_equal(moved, labels(new_shape, result))
        back = lay.view(new_shape, result, shape)
        assert back is not None or layout.num_rows == 1
        assert back is None or np.array_equal(labels(shape, layout), labels(shape, back))


@given(st.data())
# Red when: view gives up although one dimension holds the rows.
def test_view_gives_up_only_where_no_layout_fits(data: st.DataObject):
    shape, layout = data.draw(layouts())
    new_shape = data.draw(regrouped(prod(shape)))
    assume(layout.num_rows > 1)  # a single row fits everywhere
    if lay.view(shape, layout, new_shape) is not None:
        return
    moved = labels(shape, layout).reshape(new_shape)
    for dim, size in enumerate(new_shape):
        for outer in range(1, size + 1):
            if size % (outer * layout.num_rows) == 0:
                candidate = Layout(dim, layout.num_rows, outer, size // (outer * layout.num_rows))
                assert not np.array_equal(moved, labels(new_shape, candidate))


@given(st.data())
def test_dimensions_that_are_permuted_swapped_inserted_and_removed_move_the_labels(data: st.DataObject):
    shape, layout = data.draw(layouts())
    before, ndim = labels(shape, layout), len(shape)
    dims, (a, b) = data.draw(st.permutations(range(ndim))), data.draw(st.tuples(*[st.integers(0, ndim - 1)] * 2))
    new = data.draw(st.integers(0, ndim))
    inserted = lay.insert(layout, new)
    for after, found in (
        (before.transpose(dims), lay.permute(layout, dims)),
        (before.transpose(dims), lay.permute(layout, [d - ndim for d in dims])),
        (before.swapaxes(a, b), lay.transpose(layout, a, b)),
        (np.expand_dims(before, new), inserted),
    ):
        np.testing.assert_array_equal(after, labels(list(after.shape), found))
    assert lay.remove(inserted, [new]) == layout


@given(st.data())
# Red when: the kept rows lie elsewhere than in the first part's place, or a part is scattered by another's index;
# or `among` forgets that another part in the same dimension holds one entry.
def test_rows_are_gathered_and_scattered_where_the_labels_say(data: st.DataObject):
    shape, layout = data.draw(layouts())
    rows = data.draw(st.lists(st.integers(0, layout.num_rows - 1), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))  # of the dimensions in memory
    x = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    held = RowSet(torch.tensor(rows), layout.num_rows, unique=False, batchnorm="rows")
    values = gather(x, held, layout)
    kept = layout.kept_shape(shape, len(rows))
    assert list(values.shape) == kept
    assert prod(kept) == sum(int((labels(shape, layout) == row).sum()) for row in rows)  # repeats count again
    times = np.bincount(rows, minlength=layout.num_rows)[labels(shape, layout)]
    g, dense = RowSlice(values, held, layout, shape), x * torch.from_numpy(times.copy())
    torch.testing.assert_close(g.dense(), dense)
    torch.testing.assert_close(g.merged().dense(), dense)
    new_shape = data.draw(regrouped(prod(shape)))
    moved = lay.view(shape, layout, new_shape)
    if moved is not None:
        expected = gather(x.reshape(new_shape), held, moved)
        assert torch.equal(values.reshape(moved.kept_shape(new_shape, len(rows))), expected)


@given(sizes, sizes, sizes)
def test_each_line_of_a_dimension_gets_what_belongs_to_its_row(outer: int, rows: int, inner: int):
    # Red when outer and inner change places.
    lines = np.tile(np.repeat(np.arange(rows), inner), outer)
    assert of_lines(torch.arange(rows), Layout(0, rows, outer, inner)).tolist() == lines.tolist()


def test_rows_of_two_parts_in_one_dimension_beside_an_empty_one():
    # Red when: a factor of size 0 counts as one of size 1.
    rows = RowSet(torch.tensor([1, 2, 9]), 10, unique=True, batchnorm="rows")
    layout = lay.layout_of([Part(0, 5, 2, 1), Part(0, 2, 1, 5)])
    assert gather(torch.zeros(10, 0), rows, layout).shape == (3, 0)


def test_rows_of_a_part_that_is_expanded_beside_one_that_is_merged():
    # Red when: one entry of the expanded dimension is taken for all, although the other part of the rows varies.
    full = torch.randn(1, 6, 5).expand(4, 6, 5)
    rows = RowSet(torch.tensor([1, 5, 10]), 12, unique=True, batchnorm="rows")
    layout = Layout(0, 12, minor=(Part(1, 3, outer=2),))
    kept = gather(full, rows, layout)
    assert torch.equal(kept, gather(full.contiguous(), rows, layout)) and kept.shape == (3, 2, 5)
    assert torch.equal(kept[1], full[1].unflatten(0, (2, 3))[:, 2])


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_infer_shape_fills_in_the_missing_size(shape: list[int], data: st.DataObject):
    at = data.draw(st.integers(0, len(shape) - 1))
    assert lay.infer_shape(prod(shape), [-1 if d == at else s for d, s in enumerate(shape)]) == shape
    assert lay.infer_shape(prod(shape), shape) == shape
    assert lay.infer_shape(0, [0, -1]) == [0, 0] and lay.view([4, 0], Layout(0, 4), [0, 4]) is None
