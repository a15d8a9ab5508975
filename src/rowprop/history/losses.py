"""The last loss of each row of a data set, by row id: its place, which :class:`WithIds` yields beside it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from rowprop.checks import (
    check_entries,
    check_numbers,
    check_vector,
    check_whole,
    checked_device,
    is_number,
    is_vector,
    shown,
)
from rowprop.distributed import check_group, process_group
from rowprop.errors import InvalidInput
from rowprop.host import waits
from rowprop.scoring import described

Row = TypeVar("Row")

# The columns, one entry per row: name, dtype, and the value for an unseen row.
_COLUMNS: dict[str, tuple[torch.dtype, float]] = {
    "loss": (torch.float32, torch.nan),
    "weight": (torch.float32, 1),
    "age": (torch.int64, 0),
    "count": (torch.int64, 0),
    "shared": (torch.int64, 0),  # the part of count that all ranks know
    "stamp": (torch.int64, -1),  # number of the update that stored the loss
}


class WithIds(Dataset[tuple[int, Row]], Generic[Row]):
    """A data set whose rows come with their number: ``[i]`` is ``(i, dataset[i])``.

    A ``DataLoader`` then yields ``(ids, batch)``, ids of shape ``(N,)``, int64. Where they must stay the same under
    another split, wrap the data set inside: ``Subset(WithIds(data), places)``. Any data set with places and a length
    will do; a mapping and a stream are refused.

    Example:
        >>> data = WithIds(["a", "b", "c"])
        >>> data[-1], len(data)
        ((2, 'c'), 3)
        >>> next(iter(torch.utils.data.DataLoader(data, batch_size=2)))
        [tensor([0, 1]), ('a', 'b')]
    """

    def __init__(self, dataset: Dataset[Row] | Sequence[Row]) -> None:
        try:
            len(cast("Any", dataset))  # a stream has no length; a 0-d tensor has one and raises
            places = hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)
        except TypeError:
            places = False
        if not places:
            needed = "a data set with places and a length was needed; yield (id, row) from a stream yourself."
            raise InvalidInput(f"WithIds got a {type(dataset).__name__} but {needed}")
        self.dataset = cast("Any", dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Row]:
        place = range(len(self))[operator.index(index)]  # -1 is the last row
        return place, self.dataset[place]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Row]]:
        """Fetch a batch at once, where ``dataset`` can."""
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [self[index] for index in indices]
        places = [range(len(self))[operator.index(index)] for index in indices]
        return list(zip(places, fetch(places), strict=True))


class LossHistory:
    """The last loss of each row, its age in visits, how often it was chosen, and its factor, by row id.

    A visit is an :meth:`update`: :class:`rowprop.SelectiveBackprop` calls it once per step, a loop of one's own calls
    ``history.update(ids, losses)`` after the forward. Source: InfoBatch, Qin et al., ICLR 2024, arXiv:2303.04947.

    Args:
        num_rows: M; ids are then ``0 ... M - 1``. Default None: any int64 numbers, which a table on the host finds.
        device: Device of the tensors; default ``"cpu"``. On the device of the losses an update needs no sync.

    Every method refuses ``ids`` that are not int64 of shape ``(N,)``, or not below ``num_rows`` (with ids and history
    on an accelerator, an assertion of torch there says so). A row takes 40 bytes, with ``num_rows=None`` about 100
    more, in a dictionary. An update is two sorts of N numbers and a dozen gathers and scatters.

    Example:
        >>> from rowprop.history import LossHistory
        >>> history = LossHistory(4)
        >>> history.update(torch.tensor([2, 0]), torch.tensor([0.5, torch.nan]), rows=torch.tensor([0]))
        >>> ids = torch.arange(4)
        >>> history.losses_of(ids), history.age_of(ids), history.count_of(ids)
        (tensor([   nan,    nan, 0.5000,    nan]), tensor([1, 0, 0, 0]), tensor([0, 0, 1, 0]))
    """

    def __init__(self, num_rows: int | None = None, *, device: torch.device | str = "cpu") -> None:
        if num_rows is not None:
            check_whole("LossHistory", "num_rows", num_rows, 1)
        self.num_rows = num_rows
        self.device = checked_device("LossHistory", device)
        if self.device.type == "meta":
            raise InvalidInput("LossHistory got the device meta, which remembers no numbers; cpu is the default.")
        self._updates = 0
        self._places: dict[int, int] | None = {} if num_rows is None else None
        # With a table, slot 0 is a placeholder for unseen ids.
        self._columns = self._empty(1 if num_rows is None else num_rows)

    def losses_of(self, ids: Tensor) -> Tensor:
        """The last loss of each row of ``ids`` ``(N,)``: shape ``(N,)``, float32; NaN where none was stored."""
        return self._read("loss", ids)

    def age_of(self, ids: Tensor) -> Tensor:
        """Visits since its loss was stored, or all where none was: ``(N,)``, int64; -1 from :meth:`store` to update."""
        return self._read("age", ids)

    def count_of(self, ids: Tensor) -> Tensor:
        """How often each row was chosen: shape ``(N,)``, int64."""
        return self._read("count", ids)

    def weights_of(self, ids: Tensor) -> Tensor:
        """The factor of each row's loss in this epoch: shape ``(N,)``, float32; 1 where none was set."""
        return self._read("weight", ids)

    def update(self, ids: Tensor, losses: Tensor, rows: Tensor | None = None) -> None:
        """Record a visit of a batch's rows. With ``num_rows``, syncs only for device rows with a history on the host.

        Args:
            ids: Their ids, shape ``(N,)``, int64. Of a row that comes twice the last known loss counts.
            losses: Their losses, shape ``(N,)``, floating; where one is NaN, the old one stays and is a visit older.
            rows: The places in the batch that were chosen, shape ``(K,)``, int64; looked at on the CPU. Default: all.
        """
        _check_number_per_id("LossHistory.update", "losses", ids, losses)
        if rows is not None:
            check_numbers("LossHistory.update", "rows", rows)
            if rows.dim() != 1 or rows.dtype != torch.int64:
                needed = (
                    "places were needed, shape (K,), int64; turn a mask into indices with `mask.nonzero().squeeze(1)`."
                )
                raise InvalidInput(f"LossHistory.update got {described(rows, 'rows')} but {needed}")
            if not waits(rows) and (wrong := first_outside(rows, ids.numel())) is not None:
                places = f"places in the batch were needed, 0 to {ids.numel() - 1}"
                remedy = "ids name rows, and rows say which were chosen."
                raise InvalidInput(f"LossHistory.update got row {wrong} but {places}; {remedy}")
        places = self._found(ids, add=True)
        chosen = places if rows is None else places[rows.to(self.device)]
        self._columns["count"].index_add_(0, chosen, torch.ones_like(chosen))
        self._write(places, losses, age=0, older=1)
        self._updates += 1

    def store(self, ids: Tensor, losses: Tensor) -> None:
        """Store a scorer's losses before the visit's :meth:`update`; errors as there. A NaN changes nothing."""
        _check_number_per_id("LossHistory.store", "losses", ids, losses)
        self._write(self._found(ids, add=True), losses, age=-1, older=0)

    def set_weights(self, ids: Tensor, weights: Tensor) -> None:
        """Set the factors ``(N,)`` of the rows ``ids`` ``(N,)``, int64, without repeats, until they are set anew.

        They are floating, finite, none negative (else they are refused, and none has changed); the host reads them.
        """
        _check_number_per_id("LossHistory.set_weights", "weights", ids, weights)
        weights = weights.detach().to(torch.float32)
        _check_factors("LossHistory.set_weights", weights)
        places = self._found(ids, add=True)  # which may make new columns
        self._columns["weight"].index_copy_(0, places, weights.to(self.device))

    def synchronise(self, group: Any = None) -> None:
        """Merge the entries of all ranks. Every rank must call it, with a history of the same size.

        Of a row's entries the latest update wins (all ranks take equally many steps), then the one with most visits
        since, then that of the lowest rank. Counts add up. Each rank keeps its weights. ``group`` is as for
        :class:`rowprop.distributed.Global`; default None: all ranks. It costs six all-reduces, five of them of a number
        per row; with ``num_rows=None`` a gather of all ids before.
        """
        check_group("LossHistory.synchronise", group)
        process = process_group(group)
        if process is None:
            return
        places: Any = slice(None)
        if self._places is not None:
            everyones: list[list[int]] = [[] for _ in range(dist.get_world_size(process))]
            dist.all_gather_object(everyones, list(self._places), group=process)
            union = sorted({known for ids in everyones for known in ids})
            places = self._found(torch.tensor(union, dtype=torch.int64), add=True)
        mine = {name: values[places] for name, values in self._columns.items()}
        merged, self._updates = _merged(mine, self._updates, self.device, process)
        for name, values in merged.items():
            self._columns[name][places] = values

    def state_dict(self) -> dict[str, Any]:
        """The complete history, in new tensors."""
        used = self.num_rows if self._places is None else len(self._places) + 1
        state: dict[str, Any] = {name: values[:used].clone() for name, values in self._columns.items()}
        if self._places is not None:
            state["ids"] = torch.tensor(list(self._places), dtype=torch.int64)
        return state | {"num_rows": self.num_rows, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, bit for bit, on the device of this history.

        A state of another number of rows, or none, is refused, and nothing is loaded.
        """
        owner, hashed = "LossHistory.load_state_dict", self.num_rows is None
        check_entries(owner, state, (*_COLUMNS, "updates", "num_rows", *["ids"] * hashed))
        check_made_for(owner, state, self.num_rows)
        check_whole(owner, "updates", state["updates"], 0)
        places, rows = None, self.num_rows
        if hashed:
            check_vector(owner, "ids", state["ids"], torch.int64)
            ids = cast("list[int]", state["ids"].tolist())
            places, rows = {known: place for place, known in enumerate(ids, start=1)}, len(ids) + 1
            if len(places) < len(ids):
                raise InvalidInput(f"{owner} got an id twice but each row has one entry; save and load a state whole.")
        for name, (dtype, _) in _COLUMNS.items():
            check_vector(owner, name, state[name], dtype, rows)
        _check_factors(owner, state["weight"])
        self._columns = {name: state[name].to(self.device, copy=True) for name in _COLUMNS}
        self._updates, self._places = state["updates"], places

    def _empty(self, rows: int) -> dict[str, Tensor]:
        reason, on = f"LossHistory got num_rows={rows}; leave num_rows out where ids are far between.", self.device
        return {name: filled((rows,), value, reason, dtype=of, device=on) for name, (of, value) in _COLUMNS.items()}

    def _read(self, name: str, ids: Tensor) -> Tensor:
        return self._columns[name].index_select(0, self._found(ids, add=False))

    def _found(self, ids: Tensor, *, add: bool) -> Tensor:
        """The rows' indices in the columns, shape ``(N,)``, on their device."""
        check_ids("LossHistory", ids)
        known = self._places
        if known is None:
            # A copy to an accelerator may be asynchronous; numbers that the host reads must have arrived.
            places = ids.to(self.device, non_blocking=waits(self.device))
            if not (waits(ids) and waits(places)):
                _check_range(places if waits(ids) else ids, cast("int", self.num_rows))
            return places
        numbers = cast("list[int]", cast("Any", ids).tolist())
        if add:
            for number in numbers:
                known.setdefault(number, len(known) + 1)
            room = self._columns["loss"].numel()
            if len(known) >= room:  # at least double the size, so that growing is cheap
                added = self._empty(max(len(known) + 1, 2 * room) - room)
                self._columns = {name: torch.cat([values, added[name]]) for name, values in self._columns.items()}
        return torch.tensor([known.get(number, 0) for number in numbers], dtype=torch.int64, device=self.device)

    def _write(self, places: Tensor, losses: Tensor, *, age: int, older: int) -> None:
        """Store the known losses with this age; entries without a known loss become ``older`` visits older."""
        places, losses = _last_known(places, losses.detach().to(self.device, torch.float32))
        known = ~losses.isnan()
        for name, new, aged in (("loss", losses, 0), ("age", age, older), ("stamp", self._updates, 0)):
            column = self._columns[name]
            column.index_copy_(0, places, torch.where(known, new, column.index_select(0, places) + aged))


def _merged(
    mine: dict[str, Tensor], updates: int, device: torch.device, process: dist.ProcessGroup
) -> tuple[dict[str, Tensor], int]:
    """The entries that :meth:`LossHistory.synchronise` leaves on every rank, and the largest number of updates."""
    over_gpus = dist.get_backend(process) == "nccl" and device.type == "cpu"
    on = torch.device("cuda") if over_gpus else device

    def all_of(values: Tensor, op: Any) -> Tensor:
        values = values.to(on, copy=True)
        dist.all_reduce(values, op=op, group=process)
        return values.to(device)

    rank, top, total = dist.get_rank(process), dist.ReduceOp.MAX, dist.ReduceOp.SUM
    stamp = all_of(mine["stamp"], top)
    newest = mine["stamp"] == stamp
    age = all_of(torch.where(newest, mine["age"], -2), top)
    newest &= mine["age"] == age
    first = all_of(torch.where(newest, -rank, -dist.get_world_size(process)), top)
    count = mine["shared"] + all_of(mine["count"] - mine["shared"], total)
    merged = {"stamp": stamp, "age": age, "count": count, "shared": count}
    # Summing one value with zeros is exact.
    merged["loss"] = all_of(torch.where(first == -rank, mine["loss"], 0), total)
    return merged, int(all_of(torch.tensor(updates), top))


def _last_known(places: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """The indices, ascending, with repeats, each with its last loss that is not NaN, so write order is irrelevant."""
    order = torch.sort((~losses.isnan()).to(torch.uint8), stable=True).indices
    order = order[torch.sort(places[order], stable=True).indices]
    places = places[order]
    last = torch.searchsorted(places, places, right=True) - 1
    return places, losses[order][last]


def check_ids(owner: str, ids: object) -> None:
    """Refuse a value that is not a vector of row ids."""
    if not is_vector(ids):
        needed = "the rows' ids were needed, shape (N,), int64; batches of rowprop.history.WithIds begin with them."
        raise InvalidInput(f"{owner} got {described(ids, 'ids')} but {needed}")


def check_made_for(owner: str, state: Mapping[str, Any], num_rows: int | None) -> None:
    """Refuse a state of another number of rows."""
    given = state["num_rows"]
    if not (given is None or is_number(given)) or given != num_rows:
        has = f"has num_rows={num_rows}; build it as it was when the state was saved."
        raise InvalidInput(f"{owner} got a state with num_rows={shown(given)} but {has}")


def filled(shape: tuple[int, ...], value: float, reason: str, **made: Any) -> Tensor:
    """A new tensor of one value; ``reason`` ends the error message if memory is too small."""
    try:
        return torch.full(shape, value, **made)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise InvalidInput(f"there is no room for a table of {shape[0]} rows: {reason}") from error


def first_outside(places: Tensor, size: int) -> int | None:
    """The first that is not in [0, size); None where all are."""
    outside = (places < 0) | (places >= size)
    return int(places[outside][0]) if bool(outside.any()) else None


def _check_range(ids: Tensor, num_rows: int) -> None:
    if (wrong := first_outside(ids, num_rows)) is not None:
        remedy = "give the number of rows of the data set, or num_rows=None for ids of any kind."
        raise InvalidInput(f"LossHistory got id {wrong} but has num_rows={num_rows}, ids 0 to {num_rows - 1}; {remedy}")


def _check_factors(owner: str, weights: Tensor) -> None:
    right = weights.isfinite() & (weights >= 0)
    if not bool(right.all()):
        needed = "finite factors of at least 0 were needed: each multiplies the loss of its row, and 0 leaves it out."
        raise InvalidInput(f"{owner} got the weight {float(weights[~right][0])} but {needed}")


def _check_number_per_id(owner: str, name: str, ids: Tensor, values: Tensor) -> None:
    check_ids("LossHistory", ids)
    check_numbers(owner, name, values)
    if values.shape != ids.shape or not values.is_floating_point():
        needed = "a floating number per id was needed; reduce over all but the rows first."
        raise InvalidInput(f"{owner} got {described(values, name)} for {ids.numel()} ids but {needed}")
