"""Take rows of a batch of any structure.

A batch may be a tensor, or tuples, lists, named tuples, mappings (also Hugging Face's encodings and model outputs),
dataclasses and TensorDicts of tensors, nested. Tensors and arrays with dimensions hold rows, and their first dimension
must be N; so do lists and tuples of length N without any tensor inside (texts, ids). The rest is shared by all rows.

A list or tuple of N *records* has N rows: mappings with the same keys, or dataclasses of one type, with tensors of any
shape in them. Next to records, a list or tuple of N tensors has one tensor per row, as a detector's images. If another
tensor contradicts N, the records are treated as columns, like any other container.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from rowprop.errors import InvalidInput


def num_rows(batch: object) -> int:
    """Count the rows of a batch: N, the number of its records, or the first dimension that all its tensors share.

    Raises InvalidInput if no tensor has a dimension, or if two disagree.
    """
    return next(iter(possible_sizes(batch)))


def possible_sizes(batch: object) -> dict[int, bool]:
    """Each possible N of a batch, and whether it counts records; two entries if records may also be columns."""
    found: dict[int, bool] = {}
    records = next((len(cast("Sequence[Any]", entry)) for entry in _walk(batch) if _are_records(entry)), None)
    if records is not None and all(size == records for _, size in _sizes(batch, "batch", records)):
        found[records] = True
    try:
        found.setdefault(_shared_size(batch), False)
    except InvalidInput:
        if not found:
            raise
    return found


def _shared_size(batch: object) -> int:
    """The first dimension that all tensors share."""
    found: tuple[str, int] | None = None
    for path, size in _sizes(batch, "batch"):
        if found is None:
            found = path, size
        elif size != found[1]:
            needed = f"{found[0]} has {found[1]}, and all tensors of a batch need the same first dimension"
            remedy = f"expand {path} to one entry per row, or keep it out of the batch, known to losses_fn."
            raise InvalidInput(f"{path} has {size} rows but {needed}; {remedy}")
    if found is None:
        needed = "one was needed to count them; give a tensor, or a tuple, dict or dataclass of tensors."
        raise InvalidInput(f"The batch is a {type(batch).__name__} without a tensor of rows but {needed}")
    return found[1]


def take(batch: Any, rows: Tensor, size: int | None = None) -> Any:
    """Take some rows of a batch, in the given order; the batch is not changed.

    Costs one gather per tensor. ``rows`` are copied to the host only for lists, arrays and tensors on the CPU.

    The batch is a tensor or nested containers of tensors, as in the module's text; ``rows`` are indices, ``(K,)``,
    int64, on any device. The same kind of batch comes back, with K rows; entries that hold no rows are shared. Other
    rows are refused (out of range on an accelerator by torch's own assertion), and tensors that disagree about N.
    ``size`` is N where the losses tell it, for records that may also be columns; default: :func:`num_rows`.

    Example:
        >>> take({"x": torch.arange(8).view(4, 2), "names": ["a", "b", "c", "d"], "scale": 2.0}, torch.tensor([1, 3]))
        {'x': tensor([[2, 3],
                [6, 7]]), 'names': ['b', 'd'], 'scale': 2.0}
    """
    if not isinstance(rows, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        needed = "a tensor of row indices was needed, shape (K,), int64."
        raise InvalidInput(f"take got rows that are a {type(rows).__name__} but {needed}")
    if rows.dim() != 1 or rows.dtype != torch.int64 or (rows.is_meta and not all(t.is_meta for t in tensors(batch))):
        given = (
            f"rows of shape {tuple(rows.shape)} and dtype {rows.dtype} but row indices were needed, shape (K,), int64"
        )
        raise InvalidInput(f"take got {given}; turn a mask into indices with `mask.nonzero().squeeze(1)`.")
    sizes = possible_sizes(batch)
    size = next(iter(sizes)) if size is None else size
    if type(size) is not int or size not in sizes:
        raise InvalidInput(f"take got size={size} but a batch of {' or '.join(map(str, sizes))} rows.")
    if size == 0 and rows.numel() > 0:
        raise InvalidInput(f"take got {rows.numel()} rows to take but the batch has none.")
    try:
        return _take(batch, rows, size, sizes[size])
    except IndexError as error:
        raise InvalidInput(f"take got rows that are not all among the {size} of the batch, 0 to {size - 1}.") from error


def tensors(batch: object) -> Iterator[Tensor]:
    """Walk through every tensor of a batch, in order. A container that holds itself is walked through once."""
    return (entry for entry in _walk(batch) if isinstance(entry, Tensor))


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Build the same kind of batch with ``function`` applied to every tensor; what stays the same is shared."""
    if not callable(function):
        raise InvalidInput(f"map_tensors got a {type(function).__name__} but a function of a tensor was needed.")
    if isinstance(batch, Tensor):
        return function(batch)
    entries = _entries(batch)
    if entries is None:
        return batch
    mapped = [map_tensors(function, value) for _, value in entries]
    same = all(new is old for new, (_, old) in zip(mapped, entries, strict=True))
    return batch if same else _refilled(batch, mapped)


def _is_array(entry: object) -> bool:
    """Whether this is a tensor or an array, numpy's for one, without importing any of them."""
    return isinstance(entry, Tensor) or (hasattr(entry, "__array__") and hasattr(entry, "shape"))


def _is_sequence(entry: object) -> bool:
    return isinstance(entry, (tuple, list))


def _entries(entry: object) -> list[tuple[str, object]] | None:
    """The entries of a container, each with the path to it; None for a value that is no container."""
    if isinstance(entry, Mapping) or _is_tensordict(entry):
        return [(f"[{key!r}]", value) for key, value in cast("Mapping[object, object]", entry).items()]
    if _is_sequence(entry):
        return [(f"[{place}]", value) for place, value in enumerate(cast("list[object]", entry))]
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        return [(f".{name}", getattr(entry, name)) for name in _set_fields(entry)]
    return None


def _set_fields(entry: Any) -> list[str]:
    """The names of a dataclass's fields that have a value; one that is no argument may have none yet."""
    return [field.name for field in dataclasses.fields(entry) if hasattr(entry, field.name)]


def _is_tensordict(entry: object) -> bool:
    """Whether this is a TensorDict or a tensorclass, without importing tensordict."""
    return isinstance(getattr(entry, "batch_size", None), torch.Size) and hasattr(entry, "clear_device_")


def _walk(batch: object) -> Iterator[object]:
    """Every container of a batch, before its entries, and everything else in it."""
    ahead, held = [batch], dict[int, object]()
    while ahead:
        entry = ahead.pop()
        entries = None if isinstance(entry, Tensor) else _entries(entry)
        if entries is None:
            yield entry
        elif id(entry) not in held:
            held[id(entry)] = entry
            yield entry
            ahead += [value for _, value in reversed(entries)]


def _are_records(entry: object) -> bool:
    """Whether the entries are mappings with the same keys, or dataclasses of one type, with a tensor in them."""
    if not _is_sequence(entry) or hasattr(entry, "_fields"):
        return False
    kinds: set[Any] = {
        frozenset(cast("Any", e)) if isinstance(e, Mapping) else type(e) if dataclasses.is_dataclass(e) else None
        for e in cast("Any", entry)
    }
    return len(kinds) == 1 and None not in kinds and any(map(_is_array, _walk(entry)))


def _is_column(entry: Any, n: int | None) -> bool:
    """Whether a list or tuple has an entry for each of ``n`` records: a record, or a tensor of any shape."""
    if n is None or not _is_sequence(entry) or len(entry) != n:
        return False
    return _are_records(entry) or all(isinstance(e, Tensor) for e in entry)


def _sizes(entry: object, path: str, records: int | None = None) -> Iterator[tuple[str, int]]:
    """The first dimension of every tensor and array in ``entry``, with its path; that many records are no columns."""
    if isinstance(entry, PackedSequence):
        remedy = "keep the padded tensor and the lengths in the batch and call pack_padded_sequence inside losses_fn."
        raise InvalidInput(f"{path} is a PackedSequence, but its rows lie interleaved and cannot be taken; {remedy}")
    if isinstance(entry, Tensor) and (entry.is_nested or entry.layout not in (torch.strided, torch.sparse_coo)):
        kind, remedy = ("nested", "pad it") if entry.is_nested else (entry.layout, "call to_dense()")
        raise InvalidInput(f"{path} is {kind}, and its rows cannot be taken; {remedy}.")
    if _is_column(entry, records):
        yield path, cast("int", records)
    elif _is_array(entry):
        shape = cast("Tensor", entry).shape
        if len(shape) > 0:
            yield path, int(shape[0])
    else:
        for step, value in _entries(entry) or ():
            yield from _sizes(value, path + step, records)


def _take(entry: Any, rows: Tensor, n: int, records: bool) -> Any:
    if isinstance(entry, Tensor):
        rows = _checked(rows, n, entry.device) if entry.is_sparse else rows.to(entry.device)
        return entry if entry.dim() == 0 else entry.index_select(0, rows)
    if _is_array(entry):
        return entry if len(entry.shape) == 0 else entry[_on_host(rows, n)]
    if _is_sequence(entry) and (_is_column(entry, n if records else None) or not any(_sizes(entry, ""))):
        # A column of texts or ids if it is as long as the batch, else something all rows share.
        return _rebuilt(entry, [entry[row] for row in _on_host(rows, n)]) if len(entry) == n else entry
    if _is_tensordict(entry) and len(entry.batch_size) > 0:
        device = next((tensor.device for tensor in tensors(entry)), rows.device)
        return entry[_checked(rows, n, device)]
    entries = _entries(entry)
    return entry if entries is None else _refilled(entry, [_take(value, rows, n, records) for _, value in entries])


def _refilled(original: Any, values: list[object]) -> Any:
    """A container of the original's kind, with other values in the order of :func:`_entries`."""
    if _is_tensordict(original):
        result = original.clone(False).clear_device_()
        for key, value in zip(original.keys(), values, strict=True):
            result.set(key, value)
        return result
    if isinstance(original, Mapping):
        return _refilled_mapping(cast("Mapping[object, object]", original), values)
    if _is_sequence(original):
        return _rebuilt(original, values)
    # Past __init__: the original was valid, and fields may be frozen or not arguments at all.
    result = copy.copy(original)
    for name, value in zip(_set_fields(original), values, strict=True):
        object.__setattr__(result, name, value)
    return result


def _checked(rows: Tensor, n: int, device: torch.device) -> Tensor:
    """The rows on a device, for what would count a row below 0 from the end: that is refused as elsewhere."""
    return torch.arange(n, device=device).index_select(0, rows.to(device))


def _on_host(rows: Tensor, n: int) -> list[int]:
    found: list[int] = cast("Any", rows).tolist()
    if not all(0 <= row < n for row in found):  # Python would count a row below 0 from the end
        raise IndexError
    return found


def _rebuilt(original: Any, items: list[object]) -> Any:
    """A tuple, list or named tuple of the original's type, past a constructor of its own."""
    kind = cast("Any", type(original))
    if isinstance(original, list):
        result: Any = copy.copy(cast("Any", original))
        result[:] = items
        return result
    if hasattr(kind, "_make"):
        return kind._make(items)
    if kind.__new__ is tuple.__new__ or hasattr(kind, "n_sequence_fields"):  # torch.return_types take an iterable
        return kind(items)
    result = cast("Any", tuple.__new__)(kind, items)
    if hasattr(result, "__dict__"):
        vars(result).update(vars(original))
    return result


def _refilled_mapping(original: Mapping[object, object], values: list[object]) -> Mapping[object, object]:
    """A mapping of the original's type with the same keys; a copy keeps its default factory, metadata or attributes."""
    filled = zip(original, values, strict=True)
    if not isinstance(original, MutableMapping):
        try:
            return cast("Any", type(original))(dict(filled))
        except TypeError as error:
            flaw = "a mapping that can neither be written to nor made from a dict"
            needed = "one of both is needed to take its rows; give a dict."
            raise InvalidInput(f"A batch holds a {type(original).__name__}, {flaw}, but {needed}") from error
    result = copy.copy(original)
    for key, value in filled:
        result[key] = value
    return result
