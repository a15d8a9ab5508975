"""What is known of one value of a backward, how facts join, and the errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

Shape = tuple[int, ...]
WHOLE = -1
"""The :attr:`Value.number` of a value whose elements all are their row's number."""


class InvalidInput(ValueError):
    """An argument has the wrong shape, dtype or range."""


class UnsupportedOperation(RuntimeError):
    """Rows mix in the backward, or nothing shows that they do not: refused, as any gradient would be another one."""


class Mixes(Exception):
    """A rule cannot show that rows stay apart; the message says where and why, ``{}`` being the operation."""

    back = False  # a sum over rows goes back into rows: this tells more than what was found on its way


@dataclass(frozen=True)
class Rows:
    """Where rows lie in a shape: ``shape[axis] == outer * num_rows * inner``, as a reshape that merges axes does.

    ``outer`` is None where all rows are alike, as those of a broadcast scalar: then any split of the axis holds.
    """

    axis: int
    outer: int | None = 1


@dataclass(frozen=True)
class Value:
    """One value of the backward of all N rows, beside its twin in the backward of the K kept rows.

    The facts are true when the cotangents of the other rows are zero:

    * ``rows``: where the rows lie, of which the twin has the kept ones; None: both backwards hold the same array.
    * ``zero``: the rows that are not kept are zero; a value without rows is zero altogether.
    * ``number``: elements are their row's number instead, and each backward counts its own rows from 0: all elements
      (:data:`WHOLE`), or those of one column of the last axis.
    * ``summed``: an operation that summed over rows on the way to this value.
    * ``why``: what spoils the facts, in words; None where they are proven.
    """

    rows: Rows | None = None
    zero: bool = False
    number: int | None = None
    summed: str | None = None
    why: str | None = None

    def moved(self, axis: int) -> Value:
        """The same facts with the rows, if any, at another axis."""
        number = self.number if self.number == WHOLE else None
        return replace(self, rows=Rows(axis, self.rows.outer), number=number) if self.rows else self


def joined(layouts: Iterable[Rows | None]) -> Rows | None:
    """The one layout that all operands share; those without rows are broadcast, and fit every layout."""
    found: Rows | None = None
    for rows in layouts:
        if rows and found and (rows.axis != found.axis or len({rows.outer, found.outer, None}) > 2):
            raise Mixes("{} combines a row with another row")
        if rows and (found is None or found.outer is None):
            found = rows
    return found


def either(a: Value, b: Value) -> Value:
    """What holds of both: of a loop's carry before and after a step, of a branch and another."""
    why = a.why or b.why or (None if a.number == b.number else "a loop or a branch computes with the number of a row")
    return Value(joined([a.rows, b.rows]), a.zero and b.zero, a.number, a.summed or b.summed, why)


def rows_of(shape: Shape, twin: Shape, sizes: tuple[int, int]) -> Rows | None:
    """Where the rows lie, as the shapes with N and with K rows tell; in a merged axis they count as outermost."""
    changed = [axis for axis, (n, k) in enumerate(zip(shape, twin, strict=True)) if n != k]
    if len(changed) > 1 or any(shape[a] % sizes[0] or shape[a] * sizes[1] != twin[a] * sizes[0] for a in changed):
        raise Mixes(f"{{}} has the shape {shape} with {sizes[0]} rows and {twin} with {sizes[1]}, not a part per row")
    return Rows(changed[0]) if changed else None


def reshaped(rows: Rows, before: Shape, after: Shape, axis: int, num_rows: int) -> Rows:
    """Where the rows lie after a reshape that leaves them at ``axis``: elements keep their order, row-major."""
    if rows.outer is None:
        return Rows(axis, None)
    outside, outside_after = prod(before[: rows.axis]) * rows.outer, prod(after[:axis])
    outer = outside // outside_after
    if outside % outside_after or after[axis] % (outer * num_rows):
        raise Mixes("{} splits the axis of the rows")
    return Rows(axis, outer)
