"""The rows of one gradient: which they are among all rows, and what becomes of them in its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from math import prod
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from rowprop import native
from rowprop.backprop.backward import outer
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import check_readable
from rowprop.host import present_stream, readable, waits
from rowprop.native import reads, recording


class Hook:
    """Asked about the rows of gradients that it changes on their way back; see ``thinning``.

    It speaks of positions: the entries of a row set's index, be they rows or tokens.
    """

    def moved(self, places: Tensor | None) -> Hook | None:
        """The hook of positions that were made of these; ``places`` (K,) tells of which one each, None: of others."""
        return None

    def united(self, union: RowSet, places: Mapping[RowSet, Tensor]) -> Hook | None:
        """The hook of a union of several sets, whose positions are at these places of it."""
        return None

    def stands_for(self, rows: RowSet) -> tuple[RowSet, Tensor | None]:
        """See :meth:`RowSet.stands_for`."""
        return rows, None

    def tensors(self) -> Sequence[Tensor]:
        """The tensors that it holds, for the streams that they are used on."""
        return ()

    def measure_product(self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor) -> None:
        """Called with the factors (P, a) and (P, b) of a weight gradient; ``layout`` is that of the rows in P."""

    def measure_convolution(
        self, rows: RowSet, layout: Layout, dz: Tensor, x: Tensor, weight: Tensor, rest: Sequence[Any]
    ) -> None:
        """Told of a convolution's gradient and input; ``rest`` are the further arguments of its backward."""

    def batch_norm(self, call: Any, g: Any) -> Any:
        """The results of a BatchNorm's backward in training mode for a gradient; None: as for any rows."""
        return None

    def key(self) -> Any:
        """What a compiled region's backward on these rows is compiled for."""
        return None

    def traced(self, rows: RowSet, results: list[Tensor]) -> Hook | None:
        """The hook of these rows while a region is traced. What it appends becomes a result of the region."""
        return None

    def take(self, rows: RowSet, result: Tensor) -> None:
        """Take one of these further results, whenever the region has run."""


P = ParamSpec("P")


T = TypeVar("T")


def _once(make: Callable[Concatenate[RowSet, P], T]) -> Callable[Concatenate[RowSet, P], T]:
    """A method of :class:`RowSet` that computes its result once, see :meth:`RowSet.once`."""

    @wraps(make)
    def result(self: RowSet, *about: P.args, **_: P.kwargs) -> T:
        return self.once(make.__get__(self), *about)

    return result


class Lender(NamedTuple):
    """What a copy of some rows was taken from, see Lent."""

    rows: RowSet
    memory: Layout  # where the rows lie in the flat memory
    selected: bool  # the copy is one row, without a dimension for it


class RowSet:
    """The rows that one pick kept: ``index`` (K,) int64 into N rows, K at least 1. Compared by identity."""

    def __init__(
        self, index: Tensor, num_rows: int, *, unique: bool, batchnorm: str | None, attention: str = "exact"
    ) -> None:
        self.index = index
        self.num_rows = num_rows
        self.kept = index.numel()
        self.unique = unique  # False: rows may repeat, see merged()
        self.moved = False  # whether they may have repeated before distinct() looked at them
        self._derived: dict[tuple[Any, ...], Any] = {}  # see once()
        self.batchnorm = batchnorm  # "rows", "exact", or None: each BatchNorm decides by how many rows it gets
        self.origin: RowSet | None = None  # the rows that these were derived from, see derived()
        self.absent: Tensor | None = None  # (K,) bool: rows that fell out, at a place of no meaning; their values are 0
        self.whole: tuple[RowSet, Tensor] | None = None  # larger rows, and for each of these rows its place among them
        self.part_of: tuple[RowSet, Tensor] | None = None  # the rows that these are some of, and their places there
        self.lender: Lender | None = None  # of copies
        self._hook: Hook | None = None
        self.makers: frozenset[Any] = frozenset()  # whose measurement made them: see rowprop.cost.zeros
        self.attention = attention
        self.marked = False  # see copying
        self._native: Any = None  # see native
        self.recent: dict[Any, tuple[Tensor, Any, Tensor]] = {}  # the last two gathers, by the places of their sources
        self.recompute: Callable[[Tensor, Layout], Tensor] | None = None  # replaces gather() while a graph is traced
        self.stored: Callable[[Tensor], Tensor] | None = None  # has a traced graph write a tensor to memory
        self.stream = present_stream(index.device)  # tells the stream that work is put on now
        # Where the device has streams: those that gradients of these rows were used on, once there are several.
        self.streams: list[Any] | None = None if self.stream() is None else []

    def derived(
        self, index: Tensor, num_rows: int, *, unique: bool, absent: Tensor | None = None, places: Tensor | None = None
    ) -> RowSet:
        """Rows of another tensor that hold what became of these: row k is, or lies in, row ``places[k]`` of these."""
        rows = RowSet(index, num_rows, unique=unique, batchnorm=self.batchnorm, attention=self.attention)
        rows.origin = self.origin or self
        rows.moved = self.moved
        rows.absent = absent
        rows.hook = None if self.hook is None else self.hook.moved(places)
        rows.makers = self.makers
        return rows

    def some(self, places: Tensor) -> RowSet:
        """Some of these rows, (K,); the places are in order and do not repeat."""
        absent = None if self.absent is None else self.absent[places]
        rows = self.derived(self.index[places], self.num_rows, unique=self.unique, absent=absent, places=places)
        rows.origin = self.origin
        rows.part_of = self, places
        if self.whole is not None:
            rows.whole = self.whole[0], self.whole[1][places]
        return rows

    def stands_for(self) -> tuple[RowSet, Tensor | None]:
        """The rows whose gradient these have in expectation, and for how many of those each stands; None: not known."""
        return (self, None) if self.hook is None else self.hook.stands_for(self)

    def places_in(self, other: RowSet) -> Tensor | None:
        """Where these rows are among others, (K,); None if they are not known to be some of them."""
        if self is other:
            return torch.arange(self.kept, device=self.index.device)
        if self.part_of is None:
            return None
        rows, places = self.part_of
        before = rows.places_in(other)
        return None if before is None else before[places]

    @property
    def copying(self) -> bool:
        """Whether autograd undoes an in-place op on a view, with copies of its own; of all derived rows together."""
        return (self.origin or self).marked

    @property
    def hook(self) -> Hook | None:
        """Asked about these rows."""
        if self._hook is not None:
            reads("a hook of the rows")
        return self._hook

    @hook.setter
    def hook(self, hook: Hook | None) -> None:
        self._hook = hook
        if self._native is not None:
            self._native.hook(hook is not None)

    def mark(self, on: bool) -> None:
        """Set :attr:`copying`."""
        self.marked = on
        if native.extension is not None and self._known is not None:
            self._known.mark(on)

    @property
    def native(self) -> Any:
        """What the extension holds of these rows; None for rows whose gradients stay in Python."""
        in_python = self.absent is not None or self.lender is not None or self.recompute is not None
        return None if in_python else self._known

    @property
    def _known(self) -> Any:
        if self._native is None and type(self.index) is Tensor:
            if self.index.device.type != ("cpu" if self.streams is None else "cuda"):
                return None
            policies = (None, "rows", "exact").index(self.batchnorm), self.attention == "cut"
            others = [0 if rows is None else rows.num_rows for rows in (self.origin, self.whole and self.whole[0])]
            traits = [self.num_rows, self.unique, *policies, *others]
            origin = None if self.origin is None else self.origin._known
            self._native = native.extension.Rows(self.index, traits, origin)
            self._native.hook(self._hook is not None)
        return self._native

    @property
    @_once
    def first(self) -> Tensor:
        """For each entry of ``index`` the place of the first entry with the same row, (K,)."""
        places = torch.arange(self.kept, device=self.index.device)
        if self.unique:
            return places
        ordered, order = self.index.sort(stable=True)
        begins = torch.where(ordered == ordered.roll(1), 0, places)  # of a row's run; row 0 of K begins one
        return torch.empty_like(order).scatter_(0, order, order[begins.cummax(0).values])

    def once(self, make: Callable[..., Any], *about: Any) -> Any:
        """Compute something that follows from the index, once for each stream of a backward."""
        key = (make.__name__, *about, self.stream())
        try:
            found = self._derived.get(key, ...)
        except TypeError:  # a size that is a symbol has no hash
            key = tuple(map(str, key))
            found = self._derived.get(key, ...)
        if found is ...:
            outer().ends.append(self._derived.clear)  # rows and those derived from them hold each other
            with nullcontext() if recording() is None else _disable_current_modes():
                found = self._derived[key] = make(*about)
        at_work = recording()
        if at_work is not None:
            at_work.follows(self, make.__name__, about, found)
        return found

    @_once
    def indices(self, sizes: tuple[int, ...]) -> list[Tensor]:
        """Where the kept rows are in each part of their index, which has these sizes, (K,) each."""
        found: list[Tensor] = []
        index = self.index
        for size in reversed(sizes[1:]):
            found.append(index % size)
            index = index // size
        return [index, *reversed(found)]

    @_once
    def some_parts(self, sizes: tuple[int, ...], places: tuple[int, ...]) -> RowSet:
        """The rows that some parts of the index name, (K,) again: rows that differ in other parts only repeat."""
        indices = self.indices(sizes)
        index = joined([indices[place] for place in places], [sizes[place] for place in places])
        return self.derived(index, prod(sizes[place] for place in places), unique=False)

    @_once
    def together(self, sizes: tuple[int, ...], places: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], RowSet]:
        """The kept rows by what some parts of the index name, as tokens by their sequences: this has to be counted.

        Returns the kept rows in the order of their sequences, (K,); how many rows each sequence keeps; and the
        sequences that keep any, in order.
        """
        larger = self.some_parts(sizes, places)
        check_readable(larger.index, "how many kept tokens lie in each sequence")
        # One copy to the host: bincount and nonzero would wait as well.
        ones = torch.ones_like(larger.index)
        counts = larger.index.new_zeros(larger.num_rows).index_add_(0, larger.index, ones).cpu()
        some = counts.nonzero().squeeze(1).to(larger.index.device, non_blocking=True)
        rows = self.derived(some, larger.num_rows, unique=True)
        if places != (0,):  # as places in time, at which any sequence may keep a token: which are kept is not known
            rows.attention = "exact"
        return larger.index.argsort(stable=True), tuple(cast("list[int]", counts.tolist())), rows

    @_once
    def renumbered(self, sizes: tuple[int, ...], place: int, size: int, by: Affine) -> tuple[RowSet, Tensor | None]:
        """The rows when the entries of one part get other numbers below ``size``.

        Also what becomes of the values: None if all rows stay; the places of those that stay, int64; or, where only the
        device knows these, which rows fall out, bool (K,). Those are ``absent`` rows now: their values have to be zero.
        """
        indices = list(self.indices(sizes))
        moved = indices[place] * by.factor + by.offset
        new = [*sizes[:place], size, *sizes[place + 1 :]]
        stays_whole = place > 0 and self.whole is not None and self.whole[0].num_rows == sizes[0]
        if by.wraps or by.keeps_all(sizes[place], size):
            indices[place] = moved % size if by.wraps else moved
            rows = self.derived(joined(indices, new), prod(new), unique=self.unique, absent=self.absent)
            rows.whole = self.whole if stays_whole else None
            return rows, None
        gone = (moved < 0) | (moved >= size * by.divisor)
        if by.divisor > 1:
            gone |= moved % by.divisor != 0
        if self.absent is not None:
            gone |= self.absent
        indices[place] = moved.div(by.divisor, rounding_mode="floor").clamp(0, size - 1)
        index = joined(indices, new)
        if type(gone) is not Tensor or waits(gone):  # within a traced region, nothing can be counted
            return self.derived(index, prod(new), unique=False, absent=gone), gone
        stay = gone.logical_not().nonzero().squeeze(1)
        if stay.numel() == 0:  # one row of zeros goes on, so that every parameter gets its gradient
            return self.derived(index[:1], prod(new), unique=True, absent=gone[:1]), stay.new_zeros(1)
        rows = self.derived(index[stay], prod(new), unique=self.unique)
        if self.whole is not None and stays_whole:
            rows.whole = self.whole[0], self.whole[1][stay]
        return rows, stay

    @_once
    def spread(self, size: int) -> RowSet:
        """``size`` rows in the place of each, (K * size,), as a sequence is its tokens."""
        entries = torch.arange(self.kept * size, device=self.index.device)
        places = entries // size
        index = self.index[places] * size + entries % size
        absent = None if self.absent is None else self.absent[places]
        rows = self.derived(index, self.num_rows * size, unique=self.unique, absent=absent, places=places)
        rows.whole = self, places
        return rows

    @_once
    def distinct(self) -> tuple[RowSet, Tensor | None]:
        """Each of these rows once, and where each of these is among them, (K,); None where none repeats.

        Where only the device knows how many rows differ, and for rows that fell out: these rows themselves.
        """
        if self.unique or self.absent is not None or waits(self.index) or not readable(self.index):
            return self, None
        self.moved = True
        index, places = cast(Any, torch).unique(self.index, return_inverse=True)
        if index.numel() == self.kept:
            self.unique = True
            return self, None
        rows = self.derived(index, self.num_rows, unique=True)
        if self.whole is not None:  # any of the places: all of them name the same larger row
            rows.whole = self.whole[0], torch.empty_like(index).scatter_(0, places, self.whole[1])
        return rows, places

    @_once
    def all_of(self, count: int) -> RowSet:
        """All of ``count`` rows, for a gradient that is dense there."""
        return self.derived(torch.arange(count, device=self.index.device), count, unique=True)

    def lies_in_whole(self, layout: Layout) -> bool:
        """Whether it is known, with no value read, which larger rows the first part of the index names."""
        return self.whole is not None and bool(layout.minor) and layout.parts[0].size == self.whole[0].num_rows

    @property
    @_once
    def again(self) -> Tensor:
        """Which entries of ``index`` name a row that an earlier entry names, or no row, (K,), if rows may repeat."""
        places = torch.arange(self.kept, device=self.index.device)
        if self.absent is None:
            return self.first != places
        numbers = torch.where(self.absent, self.num_rows + places, self.index)  # a row that fell out repeats no other
        ordered, order = numbers.sort(stable=True)
        repeats = (ordered == ordered.roll(1)) & (places > 0)
        return torch.empty_like(repeats).scatter_(0, order, repeats) | self.absent


def mildest(sets: Collection[RowSet]) -> tuple[str | None, str]:
    """Of several sets' policies, for BatchNorm and for attention, those that approximate least."""
    of_batchnorm, of_attention = ({getattr(s, policy) for s in sets} for policy in ("batchnorm", "attention"))
    batchnorm = "exact" if "exact" in of_batchnorm else None if None in of_batchnorm else "rows"
    return batchnorm, "cut" if of_attention == {"cut"} else "exact"


class Affine(NamedTuple):
    """Entry ``i`` becomes entry ``(i * factor + offset) / divisor``, or falls out if that is no entry."""

    factor: int = 1
    offset: int = 0
    divisor: int = 1
    wraps: bool = False  # whether entries that leave at one end come in at the other

    def keeps_all(self, size: int, new: int) -> bool:
        """Whether none of ``size`` entries falls out when there are ``new`` ones."""
        return self.divisor == 1 and all(0 <= end * self.factor + self.offset < new for end in (0, size - 1))


def joined(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """An index into each of several dimensions, from the slowest to the fastest, as one index."""
    index = indices[0]
    for i, size in zip(indices[1:], sizes[1:], strict=True):
        index = index * size + i
    return index
