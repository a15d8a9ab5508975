"""The proof: two traces of one program, of N rows and of K, are walked side by side with the rules of primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.source_info_util import summarize

from rowprop_jax.facts import Mixes, Rows, Shape, Value, joined, rows_of

Facts = list[Value]
Rule = Callable[["Op"], "Value | Facts"]
RULES: dict[str, Rule] = {}
"""Primitive -> rule. What is not here is refused where a row reaches it."""
CAREFUL = set[str]()
"""Primitives whose rules answer by themselves for operands that hold a row's number or whose facts are spoiled."""
SIZES = {"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes"}
"""Parameters that may differ with the batch size; every other one has to be the same."""


def rule(names: str, *, careful: bool = False) -> Callable[[Rule], Rule]:
    """Enter a rule for these primitives, separated by blanks; ``careful`` ones are in :data:`CAREFUL`."""

    def enter(function: Rule) -> Rule:
        if doubled := RULES.keys() & names.split():
            raise ValueError(f"{doubled} have a rule already.")
        RULES.update(dict.fromkeys(names.split(), function))
        CAREFUL.update(names.split() if careful else ())
        return function

    return enter


class Op:
    """One equation of the backward of N rows, beside its twin of K."""

    def __init__(self, eqn: Any, twin: Any, ins: Facts, sizes: tuple[int, int], caller: str) -> None:
        self.eqn, self.twin, self.ins, self.sizes = eqn, twin, ins, sizes
        self.params: dict[str, Any] = eqn.params
        self.shapes: list[Shape] = [var.aval.shape for var in eqn.invars]  # of operands, with N rows
        shapes = [[var.aval.shape for var in side.outvars] for side in (eqn, twin)]
        self.outs: list[tuple[Shape, Shape]] = list(zip(*shapes, strict=True))  # of results, with N rows and with K
        self.zeros = [value.zero for value in ins]
        self.spoiled = next((value.why for value in ins if value.why), None)
        # The line of the user's program; the caller's where a library's function has none of its own.
        self.place = summarize(eqn.source_info).removeprefix(f"{Path.cwd()}/") or caller
        self.name = f"`{eqn.primitive.name}` at {self.place}"
        counts = any(value.number is not None for value in ins)
        self.counts = f"{self.name} computes with the number of a row" if counts else None

    @property
    def rows(self) -> Rows | None:
        """The layout that all operands share."""
        return joined(value.rows for value in self.ins)

    def summed(self, *values: Value) -> Value:
        """The sum over rows of a product of these: the same in both backwards if the terms of other rows are zero."""
        if any(value.zero for value in values):
            return Value(summed=self.name)
        mixes = Mixes("{} sums over all rows, of which those that are not kept are not zero")
        for first in filter(None, (value.summed for value in values)):
            mixes = Mixes(f"{first} sums over rows, and its result goes back into all of them, as far as {{}}")
            mixes.back = True
        raise mixes

    def walk(self, program: Any, twin: Any, ins: Facts) -> Facts:
        """Facts of the results of a program that a parameter holds, and its twin's."""
        return walk(program, twin, ins, self.sizes, self.place)


def walk(program: Any, twin: Any, ins: Sequence[Value], sizes: tuple[int, int], caller: str = "its end") -> Facts:
    """Facts of the results of ``program``, a jaxpr of N rows, from those of its arguments; ``twin`` has K rows.

    ``sizes`` is ``(N, K)``, ``caller`` the line that calls the program. Raises Mixes where the two are not the same
    program but for sizes.
    """
    jaxpr, other = (traced.jaxpr if isinstance(traced, ClosedJaxpr) else traced for traced in (program, twin))
    facts = dict(zip(jaxpr.invars, ins, strict=True))
    twins = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*other.invars, *other.constvars], strict=True))
    for var, n, k in zip(jaxpr.constvars, getattr(program, "consts", ()), getattr(twin, "consts", ()), strict=True):
        facts[var] = Value(why=None if _same(n, k) else "an array made in losses_fn depends on the batch size")

    def read(n: Any, k: Any, user: str) -> Value:
        if isinstance(n, Literal) and isinstance(k, Literal):
            why = None if _same(n.val, k.val) else f"a number in {user} depends on the batch size"
            return Value(zero=bool(np.all(n.val == 0)), why=why)
        if isinstance(n, Literal) or twins[n] is not k:
            raise Mixes(f"losses_fn has other operands in {user} with {sizes[0]} rows than with {sizes[1]}")
        return facts[n]

    for n, k in zip_longest(jaxpr.eqns, other.eqns):
        name = Op(n or k, n or k, [], sizes, caller).name
        if not n or not k or n.primitive is not k.primitive or _arity(n) != _arity(k):
            raise Mixes(f"losses_fn is another program with {sizes[0]} rows than with {sizes[1]}, from {name} on")
        op = Op(n, k, [read(*pair, name) for pair in zip(n.invars, k.invars, strict=True)], sizes, caller)
        facts.update(zip(n.outvars, _results(op), strict=True))
        twins.update(zip(n.outvars, k.outvars, strict=True))
    return [read(n, k, caller) for n, k in zip(jaxpr.outvars, other.outvars, strict=True)]


def _arity(eqn: Any) -> tuple[int, int]:
    return len(eqn.invars), len(eqn.outvars)


def _results(op: Op) -> Facts:
    """What the rule says of the results, checked against their shapes of N and of K rows."""
    spoiled, careful = op.spoiled, op.eqn.primitive.name in CAREFUL
    try:
        found = _by_rule(op)
    except Mixes as mixes:
        found, careful = [Value()] * len(op.outs), False
        spoiled = str(mixes).format(op.name) if mixes.back or not spoiled else spoiled
    summed, results = next(filter(None, (value.summed for value in op.ins)), None), list[Value]()
    for value, shapes in zip(found, op.outs, strict=True):
        why, rows = value.why if careful else spoiled or (op.counts if value.number is None else None), None
        try:
            rows = rows_of(*shapes, op.sizes)
            if (rows and rows.axis) != (value.rows and value.rows.axis):
                raise Mixes("{} combines a row with another row")
            rows = value.rows
        except Mixes as mixes:
            why = why or str(mixes).format(op.name)
        results.append(replace(value, rows=rows, why=why, summed=value.summed or summed))
    return results


def _by_rule(op: Op) -> Facts:
    known = RULES.get(op.eqn.primitive.name)
    for key, value in op.params.items():
        if not _alike(value, op.twin.params[key], op.sizes if key in SIZES else None, known is not None):
            raise Mixes(f"{{}} has another `{key}` with {op.sizes[0]} rows than with {op.sizes[1]}")
    if known is None and (any(value.rows for value in op.ins) or any(n != k for n, k in op.outs)):
        raise Mixes("{} has no rule that says whether it mixes rows")
    found = known(op) if known else Value()
    return found if isinstance(found, list) else [found] * len(op.outs)


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
