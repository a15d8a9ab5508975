"""Layout arithmetic against brute force: label every element with its row, move the elements, compare the labels."""

from __future__ import annotations

from math import prod

import hypothesis.strategies as st
import numpy as np
from hypothesis import assume, given

from rowprop.backprop import layout as lay
from rowprop.backprop.layout import Layout

sizes = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], Layout]:
    """A shape and where its rows lie, from one to four rows, merged with dimensions on either side or not."""
    front, behind = draw(st.lists(sizes, max_size=2)), draw(st.lists(sizes, max_size=2))
    layout = Layout(len(front), draw(sizes), draw(sizes), draw(sizes))
    return [*front, layout.size, *behind], layout


def labels(shape: list[int], layout: Layout) -> np.ndarray:
    """For every element of ``shape``, the row it belongs to."""
    along = np.arange(layout.size) // layout.inner % layout.num_rows
    return np.broadcast_to(along.reshape([-1 if d == layout.dim else 1 for d in range(len(shape))]), shape)


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


@given(st.data())
# Red when: `before` forgets layout.outer, or the dimension's size is tested against num_rows alone.
def test_view_follows_every_element(data: st.DataObject):
    shape, layout = data.draw(layouts())
    new_shape = data.draw(regrouped(prod(shape)))
    moved = labels(shape, layout).reshape(new_shape)
    result = lay.view(shape, layout, new_shape)
    if result is not None:
        assert result.size == new_shape[result.dim]
        np.testing.assert_array_equal(moved, labels(new_shape, result))


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
def test_a_view_and_back_is_where_it_began(data: st.DataObject):
    shape, layout = data.draw(layouts())
    assume(layout.num_rows > 1)
    new_shape = data.draw(regrouped(prod(shape)))
    there = lay.view(shape, layout, new_shape)
    if there is not None:
        back = lay.view(new_shape, there, shape)
        assert back is not None
        np.testing.assert_array_equal(labels(shape, layout), labels(shape, back))


@given(st.data())
def test_permute_and_transpose_move_the_labels(data: st.DataObject):
    shape, layout = data.draw(layouts())
    dims = data.draw(st.permutations(range(len(shape))))
    moved = labels(shape, layout).transpose(dims)
    np.testing.assert_array_equal(moved, labels(list(moved.shape), lay.permute(layout, dims)))
    negative = [d - len(dims) for d in dims]
    assert lay.permute(layout, negative) == lay.permute(layout, dims)
    a, b = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, len(shape) - 1))
    swapped = labels(shape, layout).swapaxes(a, b)
    np.testing.assert_array_equal(swapped, labels(list(swapped.shape), lay.transpose(layout, a, b)))


@given(st.data())
def test_insert_and_remove_move_the_labels(data: st.DataObject):
    shape, layout = data.draw(layouts())
    dim = data.draw(st.integers(0, len(shape)))
    grown = np.expand_dims(labels(shape, layout), dim)
    inserted = lay.insert(layout, dim)
    np.testing.assert_array_equal(grown, labels(list(grown.shape), inserted))
    assert lay.remove(inserted, [dim]) == layout


@given(st.data())
def test_kept_shape_is_the_shape_of_the_kept_elements(data: st.DataObject):
    shape, layout = data.draw(layouts())
    rows = data.draw(st.lists(st.integers(0, layout.num_rows - 1), min_size=1, max_size=5))
    along = np.arange(layout.size) // layout.inner % layout.num_rows
    kept = sum(int((along == row).sum()) for row in rows)  # repeats count again
    expected = list(shape)
    expected[layout.dim] = kept
    assert layout.kept_shape(shape, len(rows)) == expected


@given(st.data())
# Red when: a factor's outer and inner are swapped, a factor is left out (of two entries, say), or one is empty.
def test_factors_are_what_a_view_splits_the_rows_into(data: st.DataObject):
    front, behind = data.draw(st.lists(sizes, max_size=2)), data.draw(st.lists(sizes, max_size=2))
    split = data.draw(st.lists(sizes, min_size=1, max_size=3))
    shape, new_shape = [*front, prod(split), *behind], [*front, *split, *behind]
    found = lay.factors(shape, Layout(len(front), prod(split)), new_shape)
    along: list[list[int]] = []
    for factor in found:
        assert factor.dim == len(front) and factor.size == shape[factor.dim]
        along.append((np.arange(factor.size) // factor.inner % factor.num_rows).tolist())
    # By brute force: for each new dimension with more than one entry, the index there of each old entry.
    every = [place for place, size in zip(np.indices(split), split, strict=True) if size > 1]
    assert along == [place.flatten().tolist() for place in every]


@given(st.data())
# Red when: rows that are merged with another dimension are split as if each entry of the merged one were a row.
def test_rows_merged_with_something_else_have_no_factors(data: st.DataObject):
    shape, layout = data.draw(layouts())
    assume(not layout.plain)
    new_shape = data.draw(regrouped(prod(shape)))
    assert lay.factors(shape, layout, new_shape) == lay.factors(shape, layout, shape) == []


@given(st.data())
# Red when: a view that moves entries between the rows' dimension and another counts as a split of the rows.
def test_any_factor_follows_every_element(data: st.DataObject):
    shape, layout = data.draw(layouts())
    layout = Layout(layout.dim, layout.size)
    new_shape = data.draw(regrouped(prod(shape)))
    for factor in lay.factors(shape, layout, new_shape):
        followed = lay.view(shape, factor, new_shape)
        assert followed is not None
        np.testing.assert_array_equal(labels(shape, factor).reshape(new_shape), labels(new_shape, followed))


def test_shapes_with_an_empty_dimension_have_no_layout():
    assert lay.view([4, 0], Layout(0, 4), [0, 4]) is None
    assert lay.infer_shape(0, [0, -1]) == [0, 0]


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_infer_shape_fills_in_the_missing_size(shape: list[int], data: st.DataObject):
    at = data.draw(st.integers(0, len(shape) - 1))
    asked = [-1 if d == at else s for d, s in enumerate(shape)]
    assert lay.infer_shape(prod(shape), asked) == shape
    assert lay.infer_shape(prod(shape), shape) == shape


def test_the_cases_models_make():
    batch = Layout(0, 8)
    assert lay.view([8, 5, 6], batch, [40, 6]) == Layout(0, 8, 1, 5)  # (N, T, C) -> (N*T, C)
    time_first = lay.transpose(batch, 0, 1)
    assert lay.view([5, 8, 6], time_first, [40, 6]) == Layout(0, 8, 5, 1)  # (T, N, C) -> (T*N, C)
    heads = lay.view([5, 8, 6], time_first, [5, 16, 3])  # nn.MultiheadAttention
    assert heads == Layout(1, 8, 1, 2)
    assert lay.view([8, 6], batch, [2, 4, 6]) is None  # the batch itself is split
