"""Rows are taken from every part of a batch, and every part keeps its kind."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from rowprop.batch import map_tensors, num_rows, take, tensors
from rowprop.errors import InvalidInput

X = torch.arange(12.0).view(4, 3)
Y = torch.tensor([10, 11, 12, 13])
ROWS = torch.tensor([1, 3])

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", self.x * 2)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor | None = None


class Encoding(UserDict):
    """A mapping with baggage and attribute access, as tokenizers return."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is a mapping of its own non-None fields, as Hugging Face's models return."""

    logits: torch.Tensor | None = None
    hidden: tuple | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        function, _, *rest = super().__reduce__()
        return (function, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest)


def assert_same(taken, expected):
    torch.testing.assert_close(taken, expected, rtol=0, atol=0)


def test_a_tensor():
    assert num_rows(X) == 4
    assert_same(take(X, ROWS), X[[1, 3]])


def test_rows_may_repeat_and_come_in_any_order():
    # Red when: take sorts or uses a mask.
    assert take(Y, torch.tensor([3, 0, 0])).tolist() == [13, 10, 10]


@pytest.mark.parametrize("make", [tuple, list, lambda items: Pair(*items)], ids=["tuple", "list", "namedtuple"])
def test_sequences_keep_their_type(make):
    # Red when: _rebuilt returns a plain list, or calls a named tuple with one argument.
    batch = make([X, Y])
    taken = take(batch, ROWS)
    assert type(taken) is type(batch) and num_rows(taken) == 2
    assert_same(taken[0], X[[1, 3]])
    assert taken[1].tolist() == [11, 13]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding, MappingProxyType], ids=lambda kind: kind.__name__)
def test_mappings_keep_their_type_and_the_original_is_left_alone(kind):
    # Red when: _refilled writes into the original instead of a copy.
    batch = kind({"x": X, "y": Y, "epoch": 3, "scale": torch.tensor(2.0), "none": None, "text": "four"})
    taken = take(batch, ROWS)
    assert type(taken) is kind and list(taken) == list(batch) and num_rows(batch) == 4
    assert_same(taken["x"], X[[1, 3]])
    assert taken["y"].tolist() == [11, 13]
    assert (taken["epoch"], taken["none"], taken["text"]) == (3, None, "four")
    assert taken["scale"] is batch["scale"] and batch["x"] is X


def test_what_a_mapping_carries_beside_its_items_survives():
    # Red when: _refilled calls the type with a dict (a defaultdict then has no factory, an encoding loses its baggage).
    taken = take(defaultdict(list, x=X), ROWS)
    assert taken.default_factory is list and taken["x"].shape == (2, 3)
    assert take(Encoding({"x": X}, encodings="kept"), ROWS).encodings == "kept"


def test_dataclasses_frozen_slotted_and_with_derived_fields():
    # Red when: _take rebuilds through __init__ (it rejects the derived field) or setattr (frozen).
    frozen = take(Frozen(X, "n"), ROWS)
    assert type(frozen) is Frozen and frozen.name == "n"
    assert_same((frozen.x, frozen.doubled), (X[[1, 3]], 2 * X[[1, 3]]))
    slotted = Slotted(X)
    taken = take(slotted, ROWS)
    assert_same(taken.x, X[[1, 3]])
    assert taken.y is None and slotted.x is X


def test_model_outputs_agree_between_keys_and_attributes():
    # Red when: dataclasses are handled before mappings (the items keep N rows).
    output = Output(logits=X, hidden=(X + 1, X + 2))
    taken = take(output, ROWS)
    assert type(taken) is Output and list(taken) == ["logits", "hidden"] and taken.loss is None
    assert taken.logits is taken["logits"]
    assert_same(taken["logits"], X[[1, 3]])
    assert_same(taken.hidden, ((X + 1)[[1, 3]], (X + 2)[[1, 3]]))
    assert output.logits is X and output["logits"] is X


def test_every_tensor_of_every_kind_of_batch_is_moved_and_the_original_is_left_alone():
    # Red when: map_tensors leaves dataclasses, encodings or model outputs behind, as torch's own tree_map does.
    batch = {"frozen": Frozen(X, "n"), "encoding": Encoding({"x": X}, "kept"), "output": Output(logits=X), "all": (Y,)}
    moved = map_tensors(lambda tensor: tensor.to("meta"), batch)
    assert [str(tensor.device) for tensor in tensors(moved)] == ["meta"] * 5
    assert {str(tensor.device) for tensor in tensors(batch)} == {"cpu"}
    assert (moved["frozen"].name, moved["encoding"].encodings) == ("n", "kept")
    assert moved["output"].logits is moved["output"]["logits"]


def test_columns_of_python_items_follow_the_rows():
    # Red when: lists without tensors pass through (ids no longer belong to their rows).
    batch = {
        "x": X,
        "ids": ["a", "b", "c", "d"],
        "nested": [[1], [2, 2], [], [4]],
        "classes": ["cat", "dog"],
        "t": (0, 1, 2, 3),
    }
    taken = take(batch, ROWS)
    assert taken["ids"] == ["b", "d"] and taken["nested"] == [[2, 2], [4]] and taken["t"] == (1, 3)
    assert taken["classes"] == ["cat", "dog"]


def test_arrays_follow_the_rows():
    # Red when: only tensors are indexed.
    taken = take((X, np.array([5, 6, 7, 8]), np.float32(2)), ROWS)
    assert taken[1].tolist() == [6, 8] and taken[2] == 2


def test_nesting_is_followed_to_the_bottom():
    batch = ({"image": X, "meta": {"id": Y}}, [Y, (Y, {"deep": Slotted(X, Y)})])
    taken = take(batch, ROWS)
    assert taken[0]["meta"]["id"].tolist() == [11, 13]
    assert taken[1][1][1]["deep"].y.tolist() == [11, 13]
    assert [part.shape[0] for part in tensors(taken)] == [2] * 6


@given(st.integers(1, 9), st.data())
def test_taking_is_the_same_as_indexing_each_tensor(size, data):
    # Red when: index_select runs on another dimension.
    rows = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), max_size=6)), dtype=torch.int64)
    batch = {"square": torch.randn(size, size), "flag": torch.arange(size) % 2 == 0, "long": torch.randn(size, 2, 0)}
    taken = take(batch, rows)
    for name, tensor in batch.items():
        assert torch.equal(taken[name], torch.stack([tensor[row] for row in rows]) if len(rows) else tensor[:0])


def test_gradients_flow_through():
    x = X.clone().requires_grad_()
    take((x,), ROWS)[0].sum().backward()
    assert x.grad.sum(1).tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize(
    ("batch", "entry", "size", "other"),
    [
        ((X, Y[:3]), "batch[1]", 3, "batch[0]"),
        ({"x": X, "meta": {"mask": Y[:1]}}, "batch['meta']['mask']", 1, "batch['x']"),
        (Slotted(X, Y[:2]), "batch.y", 2, "batch.x"),
        ([X, [Y, np.zeros((5, 2))]], "batch[1][1]", 5, "batch[0]"),
    ],
)
def test_entries_that_disagree_are_named(batch, entry, size, other):
    # Red when: entries of another size pass through silently, as Composer lets them.
    with pytest.raises(InvalidInput) as caught:
        take(batch, ROWS)
    assert str(caught.value) == (
        f"{entry} has {size} rows but {other} has 4, and all tensors of a batch need the same first dimension; "
        f"expand {entry} to one entry per row, or keep it out of the batch, known to losses_fn."
    )


@pytest.mark.parametrize("batch", ["text", {"n": 3}, (torch.tensor(1.0),), ["a", "b"], None])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(InvalidInput) as caught:
        num_rows(batch)
    assert str(caught.value) == (
        f"The batch is a {type(batch).__name__} without a tensor of rows but one was needed to count them; "
        "give a tensor, or a tuple, dict or dataclass of tensors."
    )


def test_packed_sequences_are_refused():
    with pytest.raises(InvalidInput) as caught:
        take({"words": pack_sequence([torch.arange(3), torch.arange(2)])}, ROWS)
    assert str(caught.value) == (
        "batch['words'] is a PackedSequence, but its rows lie interleaved and cannot be taken; keep the padded tensor "
        "and the lengths in the batch and call pack_padded_sequence inside losses_fn."
    )


@pytest.mark.parametrize(
    "batch", [X, np.arange(4), (["a", "b", "c", "d"], np.arange(4))], ids=["tensor", "array", "list"]
)
@pytest.mark.parametrize("rows", [[0, 4], [-1]], ids=str)
def test_rows_that_the_batch_has_not_are_refused(batch, rows):
    # Red when: Python's indexing counts rows below 0 from the end, or an IndexError goes out.
    with pytest.raises(InvalidInput, match="take got rows that are not all among the 4 of the batch, 0 to 3"):
        take(batch, torch.tensor(rows))


def test_rows_and_functions_of_another_kind_are_refused():
    # Red when: a list is asked for its dtype.
    with pytest.raises(InvalidInput, match="take got rows that are a list but a tensor of row indices was needed"):
        take(X, [0, 1])
    with pytest.raises(InvalidInput, match="map_tensors got a str but a function of a tensor was needed"):
        map_tensors("cuda", X)


@pytest.mark.parametrize("rows", [torch.tensor([True, False, True, False]), torch.tensor(1), torch.tensor([1.0])])
def test_rows_that_are_no_indices_are_refused(rows):
    with pytest.raises(InvalidInput) as caught:
        take(X, rows)
    assert str(caught.value) == (
        f"take got rows of shape {tuple(rows.shape)} and dtype {rows.dtype} but row indices were needed, shape (K,), "
        "int64; turn a mask into indices with `mask.nonzero().squeeze(1)`."
    )


class Entries(tuple):
    """A tuple whose constructor takes its entries one by one."""

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))

    def __init__(self, x, y):
        self.note = "kept"


class Named(list):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name


class ReadOnly(Mapping):
    def __init__(self, x, y):
        self.held = {"x": x, "y": y}

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_sequences_with_a_constructor_of_their_own_keep_their_type_and_attributes():
    # Red when: _rebuilt calls the type with the entries.
    pair, named = take(Entries(X, Y), ROWS), take(Named("n", [X, Y]), ROWS)
    assert type(pair) is Entries and pair.note == "kept" and type(named) is Named and named.name == "n"
    for taken in (pair, named):
        assert_same(taken[0], X[[1, 3]])
        assert taken[1].tolist() == [11, 13]
    largest = X.max(1)  # of torch.return_types
    taken = take(largest, ROWS)
    assert type(taken) is type(largest)
    assert_same(taken.values, largest.values[[1, 3]])


def test_a_mapping_that_cannot_be_filled_is_refused():
    with pytest.raises(InvalidInput, match="A batch holds a ReadOnly, a mapping that can neither be written to nor"):
        take(ReadOnly(X, Y), ROWS)


def test_a_field_without_a_value_stays_without():
    # Red when: _entries asks for the value of each field.
    @dataclasses.dataclass
    class Later:
        x: torch.Tensor
        cache: torch.Tensor = dataclasses.field(init=False)

    taken = take(Later(X), ROWS)
    assert_same(taken.x, X[[1, 3]])
    assert not hasattr(taken, "cache")


def test_a_container_that_holds_itself_is_walked_through_once():
    # Red when: tensors follows each container again.
    batch: list[object] = [X, {"y": Y}]
    batch += [batch, X]
    assert [id(t) for t in tensors(batch)] == [id(X), id(Y), id(X)]


def test_a_batch_in_which_nothing_changes_is_the_same_object():
    # Red when: map_tensors always builds a new container.
    batch = {"x": X, "more": [Y, (X, 3)]}
    assert map_tensors(lambda t: t, batch) is batch
    moved = map_tensors(lambda t: t + 1 if t is Y else t, batch)
    assert moved is not batch and moved["x"] is X and moved["more"][1] is batch["more"][1]
