"""Rows are taken from every part of a batch, and every part keeps its kind."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from rowprop.batch import map_tensors, num_rows, possible_sizes, take, tensors
from sentences import refused

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
    cache: torch.Tensor = dataclasses.field(init=False)


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


class Entries(tuple):
    """A tuple whose constructor takes its entries one by one."""

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))

    def __init__(self, x, y):
        self.note = "kept"


class Named(list):
    def __init__(self, note, items):
        super().__init__(items)
        self.note = note


class ReadOnly(Mapping):
    def __init__(self, x, y):
        self.held = {"x": x, "y": y}

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class StandIn(Mapping):
    """What a TensorDict does, as far as it is asked: all entries share the dimensions of ``batch_size``."""

    def __init__(self, held, batch_size=(), device=None):
        self.held, self.batch_size, self.device = {}, torch.Size(batch_size), device
        for key, value in held.items():
            self.set(key, value)

    def set(self, key, value):
        assert value.shape[: len(self.batch_size)] == self.batch_size, "batch dimension mismatch"
        self.held[key] = value if self.device is None else value.to(self.device)

    def clone(self, recurse=True):
        return StandIn(self.held, self.batch_size, self.device)

    def clear_device_(self):
        self.device = None
        return self

    def __getitem__(self, at):
        if isinstance(at, str):
            return self.held[at]
        return StandIn({key: value[at] for key, value in self.held.items()}, (len(at), *self.batch_size[1:]))

    def __iter__(self):
        raise TypeError("iteration over a 0-d tensordict")

    def keys(self):
        return self.held.keys()

    def items(self):
        return self.held.items()

    def __len__(self):
        return len(self.held)


def assert_same(taken, expected):
    torch.testing.assert_close(taken, expected, rtol=0, atol=0)


def test_rows_of_a_tensor_may_repeat_and_come_in_any_order():
    # Red when: take sorts, uses a mask, or cuts the graph.
    x = X.clone().requires_grad_()
    taken = take((x,), ROWS)[0]
    taken.sum().backward()
    assert_same((taken.detach(), x.grad.sum(1)), (X[[1, 3]], torch.tensor([0.0, 3, 0, 3])))
    assert num_rows(X) == 4 and take(Y, torch.tensor([3, 0, 0])).tolist() == [13, 10, 10]


SEQUENCES = {  # from two entries
    "tuple": lambda *entries: entries,
    "list": lambda *entries: [*entries],
    "namedtuple": Pair,
    "a tuple with a constructor of its own": Entries,
    "a list with a constructor of its own": lambda *entries: Named("kept", entries),
    "of torch.return_types": lambda *entries: torch.return_types.max(entries),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_keep_their_type_and_attributes(name):
    # Red when: _rebuilt returns a plain list, calls a named tuple with one argument, or any type with its entries.
    batch = SEQUENCES[name](X, Y)
    taken = take(batch, ROWS)
    assert type(taken) is type(batch) and num_rows(taken) == 2
    assert getattr(taken, "note", None) == getattr(batch, "note", None)
    assert_same(taken[0], X[[1, 3]])
    assert taken[1].tolist() == [11, 13]


MAPPINGS = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "MappingProxyType": MappingProxyType,
    "Encoding": partial(Encoding, encodings="kept"),
    "defaultdict": partial(defaultdict, list),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_mappings_keep_their_type_and_the_original_is_left_alone(name):
    # Red when: _refilled writes into the original instead of a copy, or calls the type with a dict (a defaultdict then
    # has no factory, an encoding loses its baggage).
    batch = MAPPINGS[name]({"x": X, "y": Y, "epoch": 3, "scale": torch.tensor(2.0), "none": None, "text": "four"})
    taken = take(batch, ROWS)
    assert type(taken) is type(batch) and list(taken) == list(batch) and num_rows(batch) == 4
    for beside in ("default_factory", "encodings"):
        assert getattr(taken, beside, None) == getattr(batch, beside, None)
    assert_same(taken["x"], X[[1, 3]])
    assert taken["y"].tolist() == [11, 13]
    assert (taken["epoch"], taken["none"], taken["text"]) == (3, None, "four")
    assert taken["scale"] is batch["scale"] and batch["x"] is X


def test_dataclasses_frozen_slotted_and_with_derived_fields():
    # Red when: _take rebuilds through __init__ (it rejects the derived field) or setattr (frozen), or _entries asks for
    # the value of each field, which one that is no argument has not yet.
    frozen = take(Frozen(X, "n"), ROWS)
    assert type(frozen) is Frozen and frozen.name == "n"
    assert_same((frozen.x, frozen.doubled), (X[[1, 3]], 2 * X[[1, 3]]))
    slotted = Slotted(X)
    taken = take(slotted, ROWS)
    assert_same(taken.x, X[[1, 3]])
    assert taken.y is None and slotted.x is X and not hasattr(taken, "cache")


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


def tensordict(*args, **options):
    return pytest.importorskip("tensordict").TensorDict(*args, **options)


@pytest.mark.parametrize("size", [(4,), ()])
@pytest.mark.parametrize("kind", [StandIn, tensordict])
def test_tensordicts_keep_the_batch_size_of_their_content(kind, size):
    # Red when: a TensorDict is copied and written to as other mappings are; its device holds on to what is moved; a row
    # below 0 counts from the end.
    batch = kind({"x": X, "y": Y}, batch_size=size, device="cpu")
    taken, moved = take(batch, ROWS), map_tensors(lambda tensor: tensor.to("meta"), batch)
    assert (type(taken), type(moved), num_rows(taken)) == (type(batch), type(batch), 2)
    assert (tuple(taken.batch_size), tuple(moved.batch_size)) == ((2,) if size else (), size)
    assert_same((taken["x"], taken["y"]), (X[[1, 3]], Y[[1, 3]]))
    assert {tensor.device.type for tensor in tensors(moved)} == {"meta"} and batch["x"].device.type == "cpu"
    assert map_tensors(lambda tensor: tensor, batch) is batch
    with refused(NO_ROWS):
        take(batch, torch.tensor([0, -1]))


def record(boxes):
    return {"image": torch.randn(3, 5, 5), "boxes": torch.randn(boxes, 4), "size": torch.tensor(5), "name": "n"}


@pytest.mark.parametrize("boxes", [(1, 2, 0, 4), (3, 3, 3, 3), (4, 4, 4, 4), (3, 3, 3)])
@pytest.mark.parametrize("kind", ["list", "of dataclasses", "detector", "beside a tensor"])
def test_a_list_of_records_has_a_row_for_each_whatever_is_in_them(kind, boxes):
    # Red when: the tensors in the records are counted, or three images of three channels are sliced along these.
    size, records, rows = len(boxes), [record(count) for count in boxes], torch.tensor([2, 0])
    slotted = [Slotted(entry["image"], entry["boxes"]) for entry in records]
    images = tuple(entry["image"] for entry in records)
    batch, columns = {
        "list": (records, lambda batch: [batch]),
        "of dataclasses": (slotted, lambda batch: [batch]),
        "detector": ((images, tuple(records)), list),  # as torchvision's reference collates them
        "beside a tensor": ({"weight": X[: len(boxes)], "records": records}, lambda batch: [batch["records"]]),
    }[kind]
    taken = take(batch, rows)
    assert (num_rows(batch), num_rows(taken)) == (size, 2) and type(taken) is type(batch)
    for new, old in zip(columns(taken), columns(batch), strict=True):
        assert [id(entry) for entry in new] == [id(old[2]), id(old[0])]
    if kind == "beside a tensor":
        assert_same(taken["weight"], X[[2, 0]])


PAIR = [{"ids": torch.arange(20).view(5, 4)}, {"ids": torch.arange(30).view(5, 6)}]


def test_records_that_other_tensors_contradict_are_columns():
    # Red when: a list of mappings is one of records in any case. Pairs of texts come like this, as two mappings.
    taken = take((PAIR, torch.arange(5)), ROWS)
    assert num_rows((PAIR, torch.arange(5))) == 5 and taken[1].tolist() == [1, 3]
    assert [entry["ids"].shape for entry in taken[0]] == [(2, 4), (2, 6)]
    # Alone they are both, and the losses tell.
    assert list(possible_sizes(PAIR)) == [2, 5] and num_rows(PAIR) == 2
    assert [entry["ids"].shape for entry in take(PAIR, ROWS, 5)] == [(2, 4), (2, 6)]
    assert take(PAIR, torch.tensor([1]), 2)[0] is PAIR[1]


def test_columns_of_python_items_and_arrays_follow_the_rows():
    # Red when: lists without tensors pass through (ids no longer belong to their rows), or only tensors are indexed.
    batch = {"x": X, "array": np.array([5, 6, 7, 8]), "scale": np.float32(2), "ids": ["a", "b", "c", "d"]}
    batch |= {"nested": [[1], [2, 2], [], [4]], "classes": ["cat", "dog"], "t": (0, 1, 2, 3)}
    taken = take(batch, ROWS)
    assert taken["ids"] == ["b", "d"] and taken["nested"] == [[2, 2], [4]] and taken["t"] == (1, 3)
    assert taken["array"].tolist() == [6, 8] and taken["scale"] == 2 and taken["classes"] == ["cat", "dog"]


def test_nesting_is_followed_to_the_bottom():
    batch = ({"image": X, "meta": {"id": Y}}, [Y, (Y, {"deep": Slotted(X, Y)})])
    taken = take(batch, ROWS)
    assert taken[0]["meta"]["id"].tolist() == taken[1][1][1]["deep"].y.tolist() == [11, 13]
    assert [part.shape[0] for part in tensors(taken)] == [2] * 6


@given(st.integers(1, 9), st.data())
def test_taking_is_the_same_as_indexing_each_tensor(size, data):
    # Red when: index_select runs on another dimension.
    rows = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), max_size=6)), dtype=torch.int64)
    batch = {"square": torch.randn(size, size), "flag": torch.arange(size) % 2 == 0, "long": torch.randn(size, 2, 0)}
    taken = take(batch, rows)
    for name, tensor in batch.items():
        assert torch.equal(taken[name], torch.stack([tensor[row] for row in rows]) if len(rows) else tensor[:0])


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
    with refused(f"{entry} has {size} rows but {other} has 4, ... expand {entry} to one entry per row, or keep it out"):
        take(batch, ROWS)


NO_ROWS, LISTED = "take got rows that are not all among the 4 of the batch, 0 to 3", ["a", "b", "c", "d"]
JAGGED = torch.nested.nested_tensor([X[:2], X[:1], X, X], layout=torch.jagged)
PACKED = pack_sequence([torch.arange(3), torch.arange(2)])
REFUSED = [
    *[
        (lambda batch=batch: num_rows(batch), f"The batch is a {type(batch).__name__} without a tensor of ... give a")
        for batch in ("text", {"n": 3}, (torch.tensor(1.0),), ["a", "b"], None)
    ],
    (
        lambda: take({"a": X.to_sparse_csr()}, ROWS),
        "batch['a'] is torch.sparse_csr, and its rows cannot be ... call to",
    ),
    (lambda: take([X, JAGGED], ROWS), "batch[1] is nested, and its rows cannot be taken; pad it"),
    (lambda: take(PAIR, ROWS, 4), "take got size=4 but a batch of 2 or 5 rows"),
    (lambda: take({"words": PACKED}, ROWS), "batch['words'] is a PackedSequence ... pack_padded_sequence inside losse"),
    # Python's indexing counts rows below 0 from the end, or an IndexError goes out.
    *[
        (lambda batch=batch, rows=rows: take(batch, torch.tensor(rows)), NO_ROWS)
        for batch in (X, np.arange(4), (LISTED, np.arange(4)), X.to_sparse(), [{"x": Y}] * 4)
        for rows in ([0, 4], [-1])
    ],
    (lambda: take(X, [0, 1]), "take got rows that are a list but a tensor of row indices was needed"),
    *[
        (lambda rows=rows: take(X, rows), f"{tuple(rows.shape)} and dtype {rows.dtype} ... `mask.nonzero().squeeze(")
        for rows in (torch.tensor([True, False, True, False]), torch.tensor(1), torch.tensor([1.0]))
    ],
    (lambda: map_tensors("cuda", X), "map_tensors got a str but a function of a tensor was needed"),
    (lambda: take(ReadOnly(X, Y), ROWS), "A batch holds a ReadOnly, a mapping that can neither be written to nor"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_batches_and_rows_that_cannot_be_taken_are_refused(call, sentence):
    with refused(sentence):
        call()


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
