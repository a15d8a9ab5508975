"""The proof: two traces of one program, of N rows and of K, are walked side by side with the rules of primitives."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.source_info_util import summarize

Shape = tuple[int, ...]
WHOLE = -1  # as Value.number: each element is its row's number


class Mixes(Exception):
    """A rule cannot show that rows stay apart; the message says where and why, ``{}`` being the operation."""


@dataclass(frozen=True)
class Value:
    """A value of the backward of N rows beside its twin of K: what holds if the other rows' cotangents are zero.

    The axis whose size tells N from K holds rows, of which the twin has the kept ones; without one both are the same.
    """

    outer: int | None = None  # that axis has the size outer * num_rows * inner; None: rows are alike, any split holds
    zero: bool = False  # the rows that are not kept are zero; a value without rows is zero altogether
    number: int | None = None  # elements are their row's number, which counts from 0 in both: all (WHOLE), or a column
    summed: str | None = None  # an operation that summed over rows on the way here
    why: str | None = None  # what spoils the facts, in words


def joined(values: Iterable[Value]) -> int | None:
    """The one split of an axis that all values share; those without rows fit every split."""
    found = {value.outer for value in values if value.outer is not None}
    if len(found) > 1:
        raise Mixes("{} combines a row with another row")
    return max(found, default=None)


def either(a: Value, b: Value) -> Value:
    """What holds of both: of a loop's carry before and after a step, of a branch and another."""
    why = a.why or b.why or (None if a.number == b.number else "a loop or a branch computes with the number of a row")
    return Value(joined([a, b]), a.zero and b.zero, a.number, a.summed or b.summed, why)


def axis_of_rows(shape: Shape, twin: Shape, sizes: tuple[int, int]) -> int | None:
    """The axis that holds the rows, as the shapes with N and with K rows tell."""
    changed = [axis for axis, (n, k) in enumerate(zip(shape, twin, strict=True)) if n != k]
    if len(changed) > 1 or any(shape[a] % sizes[0] or shape[a] * sizes[1] != twin[a] * sizes[0] for a in changed):
        raise Mixes(f"{{}} has the shape {shape} with {sizes[0]} rows and {twin} with {sizes[1]}, not a part per row")
    return changed[0] if changed else None


Facts = list[Value]
Rule = Callable[["Op"], "Value | Facts"]
RULES: dict[str, Rule] = {}  # of primitives; what is not here is refused where a row reaches it
SIZES = {"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes"}  # the parameters that may differ with N


def rule(names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for these primitives, separated by blanks."""

    def enter(function: Rule) -> Rule:
        assert not RULES.keys() & names.split()
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return enter


class Op:
    """One equation of the backward of N rows, beside its twin of K."""

    def __init__(self, eqn: Any, twin: Any, ins: Facts, sizes: tuple[int, int], place: str, name: str) -> None:
        self.eqn, self.twin, self.ins, self.sizes, self.place, self.name = eqn, twin, ins, sizes, place, name
        self.params: dict[str, Any] = eqn.params
        # Of operands and of results, with N rows and with K.
        self.shapes, self.outs = (
            [(n.aval.shape, k.aval.shape) for n, k in zip(*pair, strict=True)]
            for pair in ((eqn.invars, twin.invars), (eqn.outvars, twin.outvars))
        )
        self.zeros = [value.zero for value in ins]
        self.spoiled = next((value.why for value in ins if value.why), None)

    @property
    def axes(self) -> list[int | None]:
        """The axis of each operand's rows."""
        return [axis_of_rows(*shapes, self.sizes) for shapes in self.shapes]

    def apart(self, zero: bool = False, along: Iterable[int] = (), sums: bool = False) -> Value:
        """The facts of an operation that takes each row by itself, or ``sums`` over rows where its result has none.

        It does not ``along`` the axis of the rows, whether that counts from the front or, below 0, from behind.
        """
        held = [(shape, axis) for (shape, _), axis in zip(self.shapes, self.axes, strict=True) if axis is not None]
        made = axis_of_rows(*self.outs[0], self.sizes)
        if sums and held and made is None:
            return self.summed(*self.ins)
        if any({axis, axis - len(shape)} & {*along} for shape, axis in held):
            raise Mixes("{} works along the axis of the rows")
        if made is not None and not held:
            raise Mixes("{} gives each row a part of what has no rows, as random numbers of one key")
        if {shape[axis] for shape, axis in held} != (set() if made is None else {self.outs[0][0][made]}):
            raise Mixes("{} combines a row with another row")
        return Value(joined(self.ins), zero)

    def summed(self, *values: Value) -> Value:
        """The sum over rows of a product of these: the same in both backwards if other rows add zeros."""
        joined(self.ins)
        if any(value.zero for value in values):
            return Value(summed=self.name)
        for first in (value.summed for value in values if value.summed):  # tells more than what spoiled it on its way
            why = f"{first} sums over rows, and its result goes back into all of them, as far as {self.name}"
            return Value(why=why)
        raise Mixes("{} sums over all rows, of which those that are not kept are not zero")

    def walk(self, key: str, ins: Facts, branch: int | None = None) -> Facts:
        """Facts of the results of a program that a parameter holds, and its twin's."""
        n, k = (eqn.params[key] if branch is None else eqn.params[key][branch] for eqn in (self.eqn, self.twin))
        return walk(n, k, ins, self.sizes, self.place)


def walk(program: Any, twin: Any, ins: Sequence[Value], sizes: tuple[int, int], caller: str = "its end") -> Facts:
    """Facts of the results of a program of N rows, from those of its arguments; ``twin`` is the same of K rows."""
    jaxpr, other = (traced.jaxpr if isinstance(traced, ClosedJaxpr) else traced for traced in (program, twin))
    facts = dict(zip(jaxpr.invars, ins, strict=True))
    twins = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*other.invars, *other.constvars], strict=True))
    for var, n, k in zip(jaxpr.constvars, getattr(program, "consts", ()), getattr(twin, "consts", ()), strict=True):
        facts[var] = Value(why=None if _same(n, k) else "an array made in losses_fn depends on the batch size")

    def read(n: Any, k: Any, user: str) -> Value:
        if isinstance(n, Literal) and isinstance(k, Literal):
            why = None if _same(n.val, k.val) else f"a number in {user} depends on the batch size"
            return Value(zero=not np.any(n.val), why=why)
        if isinstance(n, Literal) or twins[n] is not k:
            return Value(why=f"losses_fn has other operands in {user} with {sizes[0]} rows than with {sizes[1]}")
        return facts[n]

    for n, k in zip_longest(jaxpr.eqns, other.eqns):
        # The line of the user's program; the caller's where a library's function has none of its own.
        place = summarize((n or k).source_info).removeprefix(f"{Path.cwd()}/") or caller
        name = f"`{(n or k).primitive.name}` at {place}"
        if len({eqn and (eqn.primitive.name, len(eqn.invars), len(eqn.outvars)) for eqn in (n, k)}) > 1:
            why = f"losses_fn is another program with {sizes[0]} rows than with {sizes[1]}, from {name} on"
            return [Value(why=why)] * len(jaxpr.outvars)
        op = Op(n, k, [read(*pair, name) for pair in zip(n.invars, k.invars, strict=True)], sizes, place, name)
        facts.update(zip(n.outvars, _results(op), strict=True))
        twins.update(zip(n.outvars, k.outvars, strict=True))
    return [read(n, k, caller) for n, k in zip(jaxpr.outvars, other.outvars, strict=True)]


def _results(op: Op) -> Facts:
    """What the rule says of the results, checked against their shapes of N and of K rows."""
    known = RULES.get(op.eqn.primitive.name)
    try:
        for key, value in op.params.items():
            if not _alike(value, op.twin.params[key], op.sizes if key in SIZES else None, known is not None):
                raise Mixes(f"{{}} has another `{key}` with {op.sizes[0]} rows than with {op.sizes[1]}")
        if known is None and any(n != k for n, k in [*op.shapes, *op.outs]):
            raise Mixes("{} has no rule that says whether it mixes rows")
        found = known(op) if known else Value()
        if isinstance(found, Value):  # a list speaks for each result by itself
            counts = found.number is None and any(value.number is not None for value in op.ins)
            why = found.why or op.spoiled or (f"{op.name} computes with the number of a row" if counts else None)
            found = [replace(found, why=why)] * len(op.outs)
        for value, shapes in zip(found, op.outs, strict=True):
            _ = value.why or axis_of_rows(*shapes, op.sizes)
    except Mixes as mixes:
        why = op.spoiled or str(mixes).format(op.name)
        found = [Value(None if n == k else 1, why=why) for n, k in op.outs]  # where rows may lie, as the shapes tell
    summed = next((value.summed for value in op.ins if value.summed), None)
    return [replace(value, summed=value.summed or summed) for value in found]


def _same(a: Any, b: Any) -> bool:
    """Whether two constants are equal; one that is being traced is equal to itself alone."""
    try:
        return a is b or (np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes())
    except Exception:  # a traced array has no value, and a typed key is no array of NumPy's
        return False


def _alike(a: Any, b: Any, sizes: tuple[int, int] | None, known: bool) -> bool:
    """Whether two parameters are equal, but for sizes that count rows; a rule compares the programs that it walks."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_alike(x, y, sizes, known) for x, y in zip(a, b, strict=True))
    if isinstance(a, (Jaxpr, ClosedJaxpr)):
        return known or str(a) == str(b)
    if isinstance(a, (int, np.integer)) and sizes:
        return bool(a == b or a * sizes[1] == b * sizes[0])
    # How a function is differentiated is of no account in a backward that is already made.
    return callable(a) or hasattr(a, "call_wrapped") or (_same(a, b) if isinstance(a, np.ndarray) else bool(a == b))
