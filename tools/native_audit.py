"""Native dispatch beside Python's, op by op and program by program: the same bits, or a line that says where not.

Native dispatch calls a case of the audit again and again: the case runs in Python, is recorded, and is replayed with
other values and other rows; it is recorded with more rows, and replayed with a number of rows in between. Each outcome,
with its operands afterwards, is compared with that of Python's dispatch on the same operands. Random programs run with
other rows in each step. ``python tools/native_audit.py 10 200`` compiles native dispatch, and tries ten cases of each
op and 200 random programs.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import audit
import programs
from picks import Take
from rowprop import native
from rowprop.backprop.autograd.rowgrad import RowGrad, by_python, go_native
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.native import building

CALLS = (0, 0), (1, 0), (2, 0), (0, 2), (1, 1), (2, 1)  # of the operands of each: the seed, and how many rows more
STEPS = 5  # of each random program


def operands(case: audit.Case, seed: int, more: int) -> list[Any]:
    """The operands of a case; another seed has other values and other rows, ``more`` of them if there are as many."""

    def shifted(kind: str, layout: Layout) -> RowSet:
        rows = plain(kind, layout)
        if seed + more and kind not in ("tokens", "fallen"):
            index = (rows.index + seed) % layout.num_rows
            others = [row for row in range(layout.num_rows) if row not in index.tolist()]
            index = torch.cat([index, torch.tensor(others[:more], dtype=torch.int64)])
            rows = RowSet(index, rows.num_rows, unique=rows.unique, batchnorm=rows.batchnorm)
        return rows

    plain = audit.row_set
    with mock.patch.object(audit, "row_set", shifted):
        _, found = case.operands()
    for value in found:
        if type(value) is RowGrad and type(value.sliced) is RowSlice and value.sliced.rows.absent is None:
            value.sliced.values.mul_(1 + seed)
        elif type(value) is Tensor and value.is_floating_point():
            value.mul_(1 + seed / 8)
    return found


def outcome(case: audit.Case, seed: int, more: int) -> list[Any]:
    """The results, or the exception, and the operands afterwards; of a gradient its values and where they lie."""
    given = operands(case, seed, more)
    try:
        with torch.no_grad():
            out = case._call(given)  # pyright: ignore[reportPrivateUsage]
    except Exception as error:
        return [type(error), str(error)]
    found: list[Any] = []
    for value in tree_flatten([out, given])[0]:
        if type(value) is RowGrad:
            g = value.sliced if value.full is None else None
            found += [g.layout, g.values.stride()] if type(g) is RowSlice else [None]
            found.append(value.copied())
        else:
            found.append(value.clone() if isinstance(value, Tensor) else value)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits."""
    if not isinstance(one, Tensor):
        return type(one) is type(other) and one == other
    if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (torch.empty(x.shape, dtype=x.dtype).copy_(x).flatten().view(torch.uint8) for x in (one, other))
    return torch.equal(*flat)


def all_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same values."""
    return len(some) == len(others) and all(map(same, some, others))


def ops(per_op: int, record: Callable[[audit.Recorder], None] = audit.record_cases) -> tuple[Counter[str], list[str]]:
    """Cases of each op: how many were replayed, and a line for each that differs."""
    recorder, replayed, wrong = audit.Recorder(), Counter[str](), list[str]()
    record(recorder)
    for case in audit.sampled(recorder.calls.values(), per_op):
        if case.senseless or case.call.name.rstrip("_") in audit.UNDEFINED:
            continue
        with by_python():
            wanted = [outcome(case, *call) for call in CALLS]
        native.extension.forget()
        native.extension.counts()
        for call, expected in zip(CALLS, wanted, strict=True):
            if not all_same(outcome(case, *call), expected):
                wrong.append(f"call {call} differs: {case}")
                break
        replayed[case.call.name] += native.extension.counts()[0] > 0
    return +replayed, wrong


def with_rows_of(step: int) -> Take:
    """``pick`` of other rows in each step than a program asks for, and of another number of them from step 2 on."""

    def take(x: Tensor, rows: Tensor) -> Tensor:
        if rows.dtype == torch.bool:
            rows = rows.roll(step, 0) | (rows if step > 1 else False)
        else:
            rows = ((rows + step) % len(x))[: len(rows) - max(0, step - 1) % len(rows)]
        return programs.picked(x, rows)

    return take


def random_programs(numbers: Iterable[int]) -> list[str]:
    """Random programs, some steps of each, with the recordings of all before them; a line for each that differs."""
    wrong: list[str] = []
    for number in numbers:
        reference = programs.plain(number)
        if reference is None:
            continue

        def results(step: int, number: int = number, left_out: set[str] = reference[0].left_out) -> list[Any]:
            try:
                found = programs.backward(programs.build(number, with_rows_of(step), left_out))
            except Exception as error:
                return [type(error), str(error)]
            return [x if x is None else x.detach() for x in found]

        with by_python():
            wanted = [*map(results, range(STEPS))]
        if not all(all_same(results(step), wanted[step]) for step in range(STEPS)):
            wrong.append(f"program {number} differs: {' -> '.join(reference[0].steps)}")
    return wrong


def main(per_op: int, count: int) -> int:
    """Print what differs, and how much was tried."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random.seed(0)
    building.build()
    go_native()
    replayed, wrong = ops(per_op)
    print(f"{replayed.total()} replayed cases of {len(replayed)} ops")
    wrong += random_programs(range(count))
    print(f"{count} programs; {len(wrong)} differ", *wrong, sep="\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
