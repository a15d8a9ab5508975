"""Running a rule. A rule needs operands that hold the same rows, so operands of different picks are united first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.backward import running
from rowprop.backprop.rows.gather import rows_apart, scatter_add
from rowprop.backprop.rows.layout import Layout, Part
from rowprop.backprop.rows.refusals import NeedsAllRows, check_readable
from rowprop.backprop.rows.rows import RowSet, mildest
from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rows.zeros import Zeros, filled
from rowprop.backprop.rules.registry import Op, Rule
from rowprop.host import waits


def apply_rule(rule: Rule, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rule on operands that all hold the same rows; a :class:`Densify` says why it cannot run."""
    lazy = args[:1] if rule.fills_zeros else []
    args, kwargs = [*lazy, *map_leaves(args[len(lazy) :], filled)], map_leaves(kwargs, filled)
    first: RowSlice | None = None
    zeros = mixes = False
    for value in leaves(args, kwargs):
        if type(value) is RowSlice:
            if first is None:
                first = value
            elif value.rows is not first.rows and not rule.apart:
                united = unite(args, kwargs)
                if united is None:
                    return Densify("gradients sliced over different batches meet")
                return apply_rule(rule, op, *united)
            if not rule.positions and value.layout.minor:
                mixes = True
        elif type(value) is Zeros:
            if not rule.fills_zeros:
                return Densify("the operand is a new tensor of zeros")
            zeros = True
    if first is None and not zeros:
        return Densify("the gradient is dense already")
    try:
        if mixes:
            return apply_rule(rule, op, *map_leaves((args, kwargs), whole_rows))
        return rule.run(op, *args, **kwargs)
    except NeedsAllRows as reason:
        return Densify(str(reason))


def leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    """All operands; a list or tuple of operands counts as its members."""
    if not kwargs and _NESTED.isdisjoint(map(type, args)):  # as for most ops
        return args
    found: list[Any] = []
    for value in args:
        if type(value) in _NESTED:
            found += value
        else:
            found.append(value)
    return [*found, *kwargs.values()]


_NESTED = frozenset({list, tuple})


def map_leaves(value: Any, f: Callable[[Any], Any]) -> Any:
    """Apply ``f`` to every leaf of nested tuples, lists and dicts. A list or tuple in which nothing changes is kept."""
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        mapped = [map_leaves(v, f) for v in items]
        if all(a is b for a, b in zip(mapped, items, strict=True)):
            return items
        return tuple(mapped) if isinstance(value, tuple) else mapped
    if isinstance(value, dict):
        return {k: map_leaves(v, f) for k, v in cast("dict[Any, Any]", value).items()}
    return f(value)


_Union = tuple[RowSet, dict[RowSet, Tensor]]  # the rows of several sets, and each set's places among them


def unite(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Put operands that hold different rows on the union of their rows; None if they have no rows in common units."""
    coarse = min((v for v in leaves(args, kwargs) if type(v) is RowSlice), key=lambda v: v.rows.num_rows)
    args, kwargs = map_leaves((args, kwargs), lambda v: _coarsen(v, coarse))
    sets = list(dict.fromkeys(v.rows for v in leaves(args, kwargs) if type(v) is RowSlice))
    if any(s.num_rows != coarse.rows.num_rows for s in sets):
        return None
    if len(sets) == 1:
        return args, kwargs
    unions, key = running().unions, (frozenset(sets), coarse.rows.stream())  # for the stream that the index is made on
    if key not in unions:
        wholes = {s.whole and s.whole[0] for s in sets}
        known = len(wholes) == 1 and None not in wholes and sum(s.kept for s in sets) < coarse.rows.num_rows
        unions[key] = _within_common(sets) or (_end_to_end(sets) if known else _without_repeats(sets))
    union, places = cast(_Union, unions[key])

    def embed(value: Any) -> Any:
        if type(value) is not RowSlice or value.rows is union:
            return value
        out = value.values.new_zeros(value.layout.kept_shape(value.shape, union.kept))
        within = value.layout.compact(union.kept)
        return RowSlice(scatter_add(out, value.values, places[value.rows], within), union, value.layout, value.shape)

    return map_leaves((args, kwargs), embed)


def _within_common(sets: Sequence[RowSet]) -> _Union | None:
    """Sets that are known to be some of the same rows: one of the sets, or on a device those rows if they are few."""
    larger: RowSet | None = sets[0]
    while larger is not None:
        places = {s: s.places_in(larger) for s in sets}
        if all(found is not None for found in places.values()):
            if larger in places or (waits(larger.index) and sum(s.kept for s in sets) >= larger.kept):
                return larger, cast("dict[RowSet, Tensor]", places)
            if not waits(larger.index):
                return None
            union, at = _end_to_end(sets)
            union.part_of = larger, torch.cat([cast(Tensor, places[s]) for s in sets])
            return union, at
        larger = larger.part_of and larger.part_of[0]
    return None


def _with_traits(union: RowSet, places: dict[RowSet, Tensor]) -> _Union:
    """A union with the policies that approximate least, and with what the hook of one of the sets makes."""
    union.batchnorm, union.attention = mildest(places)
    hook = next((s.hook for s in places if s.hook is not None), None)
    union.hook = None if hook is None else hook.united(union, places)
    makers = [s.makers for s in places]
    union.makers = frozenset[Any]().union(*makers) if all(makers) else frozenset()
    return union, places


def _absent(sets: Sequence[RowSet]) -> Tensor | None:
    """Which rows of all sets fell out, one set after the other; None if none did."""
    if all(s.absent is None for s in sets):
        return None
    return torch.cat([torch.zeros_like(s.index, dtype=torch.bool) if s.absent is None else s.absent for s in sets])


def _without_repeats(sets: Sequence[RowSet]) -> _Union:
    """Each row once: a look at the indices tells how many there are."""
    check_readable(sets[0].index, "the rows that gradients of several picks have together")
    every = torch.cat([s.index for s in sets])
    absent = _absent(sets)
    if absent is not None:  # their zeros may be added to any row: nobody has to count them
        every = torch.where(absent, every.masked_fill(absent, 0).max(), every)
    index = cast(Any, torch).unique(every)
    union = RowSet(index, sets[0].num_rows, unique=True, batchnorm=None)
    origins = {s.origin or s for s in sets}
    union.origin = origins.pop() if len(origins) == 1 else None
    places = {s: torch.searchsorted(index, s.index).clamp(max=index.numel() - 1) for s in sets}
    return _with_traits(union, places)


def _end_to_end(sets: Sequence[RowSet], *, unique: bool = False) -> _Union:
    """The rows of one set after those of the other: nobody has to look for repeats."""
    index = torch.cat([s.index for s in sets])
    union = sets[0].derived(index, sets[0].num_rows, unique=unique, absent=_absent(sets))
    wholes = [s.whole for s in sets if s.whole is not None]
    if len(wholes) == len(sets) and all(rows is wholes[0][0] for rows, _ in wholes):
        union.whole = wholes[0][0], torch.cat([places for _, places in wholes])
    numbers: Any = torch.arange(union.kept, device=union.index.device)
    split: tuple[Tensor, ...] = numbers.split([s.kept for s in sets])
    places = dict(zip(sets, split, strict=True))
    return _with_traits(union, places)


def end_to_end(pieces: Sequence[RowSlice]) -> RowSlice | Tensor:
    """The sum of gradients without a common row, held in the same place; plain if no fewer rows than there are."""
    sets, first = [piece.rows for piece in pieces], pieces[0]
    if sum(s.kept for s in sets) >= first.rows.num_rows:
        out = first.dense()
        for piece in pieces[1:]:
            piece.add_into(out)
        return out
    unions, key = running().unions, (tuple(sets), first.rows.stream())
    if key not in unions:
        unions[key] = _end_to_end(sets, unique=all(s.unique for s in sets))
    split = [rows_apart(piece.values, piece.layout.compact(piece.rows.kept)) for piece in pieces]
    values = torch.cat(split, first.dim + 1).flatten(first.dim, first.dim + 2)
    return RowSlice(values, unions[key][0], first.layout, first.shape)


def _coarsen(value: Any, like: RowSlice) -> Any:
    """A gradient sliced over single tokens, sliced as ``like`` instead, whose rows have several tokens each."""
    if type(value) is not RowSlice or like.layout.minor or value.rows.num_rows == like.layout.num_rows:
        return value
    wanted = Part(like.dim, like.layout.num_rows, like.layout.outer, like.layout.inner)
    if value.layout.parts[0] == Part(like.dim, like.layout.size):
        dim, inner = like.dim, like.layout.inner
        minor = Part(dim, inner, like.layout.outer * wanted.size), *value.layout.minor
        if like.layout.outer == 1:
            split = Layout(dim, value.rows.num_rows, 1, inner, minor)
        else:
            split = Layout(dim, value.rows.num_rows, 1, wanted.size * inner, (wanted, *minor))
        value = RowSlice(value.values, value.rows, split, value.shape)
    parts = value.layout.parts
    return value.coarsened(parts.index(wanted)) if value.layout.minor and wanted in parts else value
