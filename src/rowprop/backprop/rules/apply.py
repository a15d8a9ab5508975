"""Running a rule. A rule needs operands that hold the same rows, so operands of different picks are united first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from rowprop.backprop.layout import Layout, Part
from rowprop.backprop.rules.registry import Op, Rule
from rowprop.backprop.sliced import Densify, NeedsAllRows, RowSet, RowSlice, Zeros, look, scatter_add, whole_rows


def apply_rule(rule: Rule, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rule on operands that all hold the same rows; a :class:`Densify` says why it cannot run."""
    first: RowSlice | None = None
    zeros = positions = False
    for value in leaves(args, kwargs):
        if type(value) is Zeros:
            if not rule.fills_zeros:
                return Densify("the operand is a new tensor of zeros")
            zeros = True
        elif type(value) is RowSlice:
            if value.layout.minor:
                positions = True
            if first is None:
                first = value
            elif value.rows is not first.rows:
                united = _unite(args, kwargs)
                if united is None:
                    return Densify("gradients sliced over different batches meet")
                return apply_rule(rule, op, *united)
    if first is None and not zeros:
        return Densify("the gradient is dense already")
    try:
        if positions and not rule.positions:
            return apply_rule(rule, op, list(map_leaves(args, whole_rows)), map_leaves(kwargs, whole_rows))
        return rule.run(op, *args, **kwargs)
    except NeedsAllRows as reason:
        return Densify(str(reason))


def leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """All operands; a list or tuple of operands counts as its members."""
    for value in args:
        if type(value) is list or type(value) is tuple:
            yield from cast("Sequence[Any]", value)
        else:
            yield value
    if kwargs:
        yield from kwargs.values()


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


# --- gradients of different picks meet --------------------------------------------------------------------------------

_unions: dict[tuple[frozenset[RowSet], Any], RowSet] = {}  # each for the stream that its index was made on


def _unite(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Put operands that hold different rows on the union of their rows; None if they have no rows in common units."""
    coarse = min((v for v in leaves(args, kwargs) if type(v) is RowSlice), key=lambda v: v.rows.num_rows)
    args, kwargs = map_leaves(args, lambda v: _coarsen(v, coarse)), map_leaves(kwargs, lambda v: _coarsen(v, coarse))
    sets = frozenset(v.rows for v in leaves(args, kwargs) if type(v) is RowSlice)
    if any(s.num_rows != coarse.rows.num_rows for s in sets):
        return None
    key = sets, coarse.rows.stream
    union = _unions.get(key)
    if union is None:
        look(coarse.rows.index, "the rows that gradients of several picks have together")
        index = cast(Any, torch).unique(torch.cat([s.index for s in sets]))
        exact = any(s.batchnorm == "exact" for s in sets)
        cut = all(s.attention == "cut" for s in sets)
        union = RowSet(
            index,
            coarse.rows.num_rows,
            unique=True,
            batchnorm="exact" if exact else "rows",
            attention="cut" if cut else "exact",
        )
        origins = {s.origin or s for s in sets}
        union.origin = origins.pop() if len(origins) == 1 else None
        _unions[key] = union

    def embed(value: Any) -> Any:
        if type(value) is not RowSlice or value.rows is union:
            return value
        out = value.values.new_zeros(value.layout.kept_shape(value.shape, union.kept))
        within = value.layout.among(union.kept)
        place = torch.searchsorted(union.index, value.rows.index)
        return RowSlice(scatter_add(out, value.values, place, within), union, value.layout, value.shape)

    return list(map_leaves(args, embed)), map_leaves(kwargs, embed)


def _coarsen(value: Any, like: RowSlice) -> Any:
    """A gradient sliced over single tokens, sliced as ``like`` instead, whose rows have several tokens each."""
    if type(value) is not RowSlice or value.rows.num_rows == like.layout.num_rows:
        return value
    wanted = Part(like.dim, like.layout.num_rows, like.layout.outer, like.layout.inner)
    if value.layout.plain and value.dim == like.dim and value.layout.size == like.layout.size:
        dim, inner = like.dim, like.layout.inner
        behind = Part(dim, inner, like.layout.outer * wanted.size)
        if like.layout.outer == 1:
            split = Layout(dim, value.rows.num_rows, 1, inner, (behind,))
        else:
            split = Layout(dim, value.rows.num_rows, 1, wanted.size * inner, (wanted, behind))
        value = RowSlice(value.values, value.rows, split, value.shape)
    parts = value.layout.parts
    return value.coarsened(parts.index(wanted)) if value.layout.minor and wanted in parts else value


def forget_unions() -> None:
    """Let go of the unions that a finished backward made."""
    _unions.clear()
