"""The report of a backward: the ops that ran on the kept rows, and the ops that densified."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rowprop import native
from rowprop.backprop.backward import outer
from rowprop.native import reads


@dataclass
class Densified:
    """One op that ran at full size: the calls, and the last reason given; behind a semicolon what you can do."""

    count: int
    reason: str


@dataclass
class Report:
    """The report of a backward: how each op met a sliced gradient.

    Attributes:
        sliced: For each op that ran at K rows, the number of calls.
        densified: For each op at which a gradient went back to all N rows, or met one of all rows, the number of calls
            and the reason: the backward upstream ran at full size. Where rows were summed and the sum was used in the
            forward (scores of all pairs), the first of autograd's nodes below that got all rows.
        cut: For each attention op under ``attention="cut"``, the number of calls in which keys and values of tokens
            that were not kept took no gradient: an approximation, see :func:`rowprop.pick`.
        functions: For each custom function that ran at full size, the line that declares it, ready to paste, if trials
            found that its backward treats rows alike; else the reason. See :func:`rowprop.watch`.
        waited: For each number that only the device knew, how often the host waited for it. Empty on the CPU.
        dispatch: What ran the ops, ``"native"`` or ``"Python"``, see ``rowprop native``; set when the block ends.
        python: Where native dispatch is in use: for each op that Python ran, and the reason, the number of calls.
    """

    sliced: dict[str, int] = field(default_factory=dict[str, int])
    densified: dict[str, Densified] = field(default_factory=dict[str, Densified])
    cut: dict[str, int] = field(default_factory=dict[str, int])
    functions: dict[str, str] = field(default_factory=dict[str, str])
    waited: dict[str, int] = field(default_factory=dict[str, int])
    dispatch: str = ""
    python: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def note_densified(self, name: str, reason: str) -> None:
        """Count an op at which a gradient went back to all rows."""
        entry = self.densified.setdefault(name, Densified(0, reason))
        entry.count += 1
        entry.reason = reason

    def __repr__(self) -> str:
        dispatch = f"; dispatch: {self.dispatch}" if self.dispatch else ""
        lines = [f"sliced: {sum(self.sliced.values())} calls of {len(self.sliced)} ops{dispatch}"]
        if not self.densified:
            lines.append("densified: nothing")
        for name, entry in sorted(self.densified.items(), key=lambda item: -item[1].count):
            lines.append(f"densified: {name} x{entry.count}: {entry.reason}")
        lines += [f"{name}: {found}" for name, found in self.functions.items()]
        lines += [f"cut: {name} x{count}: keys and values of tokens not kept" for name, count in self.cut.items()]
        lines += [f"waited for {what} x{count}" for what, count in self.waited.items()]
        for why in dict.fromkeys(why for _, why in self.python):
            ops = [f"{name} x{count}" for (name, reason), count in self.python.items() if reason == why]
            lines.append(f"in Python: {', '.join(ops)}: {why}")
        return "\n".join(lines)


_reports: list[Report] = []  # autograd may run on other threads than watch(), so this is not thread-local


@contextmanager
def watch() -> Generator[Report]:
    """Record which ops of the backwards inside the block ran on the kept rows only, and which ran at full size.

    Yields:
        A :class:`Report`, filled while the block runs. ``print(report)`` prints a line for each op that densified or
        whose gradient was cut, and one for each custom function that ran at full size. If such a function treats rows
        alike, its line declares it. Trials on random gradients found this; they are no proof.

    Cost:
        A dictionary update per op; nothing when no block is open. The first time that a custom function without a
        declaration meets a sliced gradient, its backward runs about seven times more at full size, and eight times
        on some rows, with copies of its saved tensors; the host waits for the device. Random states are put back, and
        so are lists and dicts that the backward changes. A backward that writes to other tensors, draws random
        numbers, reads values of a tensor or communicates is stopped before it does so.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> losses = (torch.eye(4, 3) @ w) ** 2
        >>> with rowprop.watch() as report:
        ...     rowprop.pick(losses, torch.tensor([0, 2])).sum().backward()
        >>> report.densified
        {}
    """
    report = Report()
    with recording(report):
        yield report


@contextmanager
def recording(report: Report) -> Generator[None]:
    """Have the backwards inside the block report to ``report``."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports[:] = [r for r in _reports if r is not report]
        report.dispatch = "Python" if native.extension is None else "native"


def note(table: Literal["sliced", "cut", "waited", "python"], name: str | tuple[str, str]) -> None:
    """Count ``name``, or an op with a reason, in one of the tables of every open report."""
    if table in ("cut", "waited"):
        reads("it has something to report")
    for report in _reports:
        counts: dict[Any, int] = getattr(report, table)
        counts[name] = counts.get(name, 0) + 1


def note_densified(name: str, reason: str) -> None:
    """Tell every open report that a gradient went back to all rows."""
    reads("it has something to report")
    outer().densified = True
    for report in _reports:
        report.note_densified(name, reason)


def note_function(name: str, find: Callable[[], str]) -> None:
    """Have each open report say what is to be said of a custom function, which is found once."""
    asking = [report for report in _reports if name not in report.functions]
    found = find() if asking else ""
    for report in asking:
        report.functions[name] = found


def watched() -> bool:
    """Whether a report is open."""
    return bool(_reports)
