"""Measure routines side by side: in rounds, phase by phase, with the spread and the peak memory."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch
from torch.profiler import ProfilerActivity

from rowprop.errors import InvalidInput
from rowprop.host import HOST, between_s, drained_s, mark

Done = Callable[[str], None]  # called with a phase's name at its end; a phase begins where the one before it ended
Routine = Callable[[Done], object]  # the code that is measured: a call runs it once and says where each phase ends
Tick = Callable[[str, float], None]  # called with a line on the work at hand and the fraction of all work, in [0, 1]
Name = TypeVar("Name")
QUIET, MUTE = "KINETO_LOG_LEVEL", "99"  # silences the profiler: a level above that of each of its messages


def ignored(*_: object) -> None:
    """The Tick of callers who give none, and the Done of runs without a clock."""


class Clock:
    """Seconds of each phase of one run, from when it is made, once all queued work has run.

    A phase is charged with all the work that it queued, also where the device runs it after the call has returned. The
    marks are one accelerator's own events, for which nothing waits; else the wall clock, once all queues are empty.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._accelerators = accelerators(devices)
        self._device = self._accelerators[0] if len(self._accelerators) == 1 else torch.device("cpu")
        self._marks: list[tuple[str, Any]] = []
        self.host_s = 0.0  # until the last phase's calls returned; 0 by the wall clock, which syncs
        self._wait()
        self._begun_s = time.perf_counter()
        self.done("")

    def done(self, phase: str) -> None:
        """Mark the end of ``phase``."""
        if self._device.type == "cpu":
            self._wait()
        else:
            self.host_s = time.perf_counter() - self._begun_s
        self._marks.append((phase, mark(self._device)))

    def phases_s(self) -> dict[str, float]:
        """Wait for the device; add up the seconds of each phase, in the order in which the phases first ended."""
        self._wait()
        spans: dict[str, float] = {}
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            spans[phase] = spans.get(phase, 0.0) + between_s(begin, end)
        return spans

    def _wait(self) -> None:
        for device in self._accelerators:
            drained_s(device)


def accelerators(devices: Iterable[torch.device]) -> list[torch.device]:
    """The devices that are no CPU, each once."""
    return sorted({device for device in devices if device.type not in HOST}, key=str)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements, in seconds unless said otherwise."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Timing:
    """Repeated runs of one routine: by round its seconds by phase, and its peak of memory.

    ``peak_bytes`` is the most that one run held at once beyond the memory held before it: the accelerators', else the
    CPU's, by torch's allocator, past which oneDNN takes more. ``host_s`` is the median of the seconds until the calls
    had returned, on one accelerator, else 0.
    """

    rounds: tuple[dict[str, float], ...]
    peak_bytes: int
    host_s: float = 0.0

    def __repr__(self) -> str:
        phases = ", ".join(f"{phase} {1000 * self.spread(phase).median:.3g} ms" for phase in self.phases)
        return f"Timing({phases}; {len(self.rounds)} rounds, {self.peak_bytes / 1e6:.3g} MB)"

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases, in the order in which they ended."""
        return tuple(self.rounds[0])

    def each_s(self, *phases: str) -> list[float]:
        """Seconds of these phases (default: of all) together, for each round."""
        return [sum(s for phase, s in spans.items() if not phases or phase in phases) for spans in self.rounds]

    def spread(self, *phases: str) -> Spread:
        """Median and quartiles of :meth:`each_s`."""
        return Spread.of(self.each_s(*phases))

    @property
    def waits(self) -> bool:
        """Whether the device idled because the host's calls took as long as the work."""
        return self.host_s > 0.95 * self.spread().median

    def to_dict(self) -> dict[str, Any]:
        """The figures in a form that JSON holds."""
        figures = {phase: self.spread(phase) for phase in self.phases} | {"total": self.spread()}
        spreads = {f"{name}_s": asdict(spread) for name, spread in figures.items()}
        return {"rounds": len(self.rounds), **spreads, "peak_bytes": self.peak_bytes}


def measure(
    routines: Mapping[Name, Routine],
    *,
    devices: Iterable[torch.device] = (),
    rounds: int = 20,
    warmup: int = 3,
    limit_s: float | None = None,
    least: int = 5,
    tick: Tick | None = None,
    clock: Callable[[Iterable[torch.device]], Clock] = Clock,
) -> dict[Name, Timing]:
    """Measure several routines side by side; the timings come in their order.

    In each round every routine runs once, in an order that turns from round to round, so that other work on the machine
    disturbs all of them alike. ``warmup`` rounds (0 or more) run before those that are measured, to choose kernels and
    take memory. Beyond ``least`` rounds none begins that would end later than ``limit_s`` seconds from now (None: no
    limit). ``devices`` are those of the work; ``tick`` is called before each run; ``clock`` makes a run's clock.

    Cost:
        ``warmup + 1 + rounds`` runs of each routine; one measures the memory, on the CPU under torch's profiler.

    Example:
        >>> x = torch.ones(64, 64)
        >>> found = measure({"one": lambda done: (x @ x, done("product"))}, rounds=5)
        >>> found["one"].phases, len(found["one"].rounds), found["one"].peak_bytes
        (('product',), 5, 16384)
    """
    if not routines or rounds < 1 or warmup < 0:
        raise InvalidInput(
            f"measure got {len(routines)} routines, {rounds=}, {warmup=} but 1, 1, 0 or more were needed."
        )
    devices, names = list(devices), list(routines)
    taken: dict[Name, list[dict[str, float]]] = {name: [] for name in names}
    hosts_s: dict[Name, list[float]] = {name: [] for name in names}
    begun_s, runs = time.perf_counter(), itertools.count()

    def tell(line: str) -> None:
        passed = (time.perf_counter() - begun_s) / limit_s if limit_s else 0.0
        (tick or ignored)(line, min(1.0, max(passed, next(runs) / (len(names) * (warmup + 1 + rounds)))))

    def one_round(number: int, line: str) -> None:
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            tell(line)
            running = clock(devices)
            routines[name](running.done)
            taken[name].append(running.phases_s())
            hosts_s[name].append(running.host_s)

    for number in range(warmup):
        one_round(number, "warming up")
    peaks: dict[Name, int] = {}
    for name in names:
        tell("measuring memory")
        peaks[name] = peak_bytes(routines[name], devices)
    longest_s = 0.0
    for number in range(rounds):
        round_begun_s = time.perf_counter()
        if limit_s is not None and number >= least and round_begun_s + longest_s - begun_s > limit_s:
            break
        one_round(warmup + number, f"round {number + 1} of at most {rounds}")
        longest_s = max(longest_s, time.perf_counter() - round_begun_s)
    middles_s = {name: statistics.median(hosts_s[name][warmup:]) for name in names}
    return {name: Timing(tuple(taken[name][warmup:]), peaks[name], middles_s[name]) for name in names}


def peak_bytes(routine: Routine, devices: Iterable[torch.device] = ()) -> int:
    """The most memory that one run holds at once beyond the memory held now; see :class:`Timing`."""
    allocators = [(torch.get_device_module(device), device) for device in accelerators(devices)]
    if allocators:
        before = sum(module.memory_allocated(device) for module, device in allocators)
        for module, device in allocators:
            module.reset_peak_memory_stats(device)
        routine(ignored)
        return sum(module.max_memory_allocated(device) for module, device in allocators) - before
    with profiled([ProfilerActivity.CPU], memory=True) as profiler:
        routine(ignored)
    events = cast(Any, profiler.profiler).kineto_results.events()
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@contextmanager
def profiled(activities: Iterable[ProfilerActivity], *, memory: bool = False) -> Generator[torch.profiler.profile]:
    """Run torch's profiler in the block, without its messages on stderr; ``memory`` has it record allocations too.

    It reads its log level from the environment at its first start in a process; one that the user has set stays.
    """
    users = QUIET in os.environ
    os.environ.setdefault(QUIET, MUTE)
    try:
        profiler = torch.profiler.profile(activities=activities, profile_memory=memory, acc_events=True)
        profiler.start()
    finally:
        if not users:
            del os.environ[QUIET]
    try:
        yield profiler
    finally:
        profiler.stop()
