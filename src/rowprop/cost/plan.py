"""Which way of selecting pays, from measured numbers: arithmetic only, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rowprop.errors import InvalidInput
from rowprop.selection.common import count_kept

FLAT = 0.8
"""Rows that hold 90 % of the loss, as a fraction of all, from which on the losses are called flat.

Equal losses need 0.9 of the rows; losses spread evenly between nothing and the largest 0.68, exponentially 0.59.
"""
MASS = 0.9


@dataclass(frozen=True)
class Point:
    """One measurement of a way.

    Attributes:
        kept: K, rows that were backpropagated.
        seconds: Of the step without the optimizer's update.
        peak_bytes: Most that the step held at once beyond what lay there before it; None where nobody measured.
    """

    kept: int
    seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Cost:
    """What a step of one way costs, as straight lines in K: a fixed part and a part per kept row.

    Attributes:
        engine: ``"masked"``, ``"recompute"`` or ``"sliced"``.
        scorer: What scores the rows apart from the training forward; None where nothing does.
        fixed_s: Seconds whatever K is, such as the forward over all rows.
        per_row_s: Seconds for each kept row.
        fixed_bytes: Like ``fixed_s``, for the peak; None where nobody measured.
        per_row_bytes: Like ``per_row_s``, for the peak.
    """

    engine: str
    scorer: str | None
    fixed_s: float
    per_row_s: float
    fixed_bytes: float | None = None
    per_row_bytes: float = 0.0

    @classmethod
    def fit(cls, engine: str, scorer: str | None, points: Iterable[Point]) -> Cost:
        """Lay the lines through measured points, with the least relative error; see :func:`line`."""
        points = list(points)
        fixed_s, per_row_s = line([(point.kept, point.seconds) for point in points])
        weighed = [(point.kept, point.peak_bytes) for point in points if point.peak_bytes is not None]
        fixed_bytes, per_row_bytes = line(weighed) if weighed else (None, 0.0)
        return cls(engine, scorer, fixed_s, per_row_s, fixed_bytes, per_row_bytes)

    def seconds(self, kept: float) -> float:
        """Seconds of a step that keeps ``kept`` rows."""
        return self.fixed_s + self.per_row_s * kept

    def peak_bytes(self, kept: float) -> int | None:
        """Peak of a step that keeps ``kept`` rows; None where nobody measured."""
        return None if self.fixed_bytes is None else round(self.fixed_bytes + self.per_row_bytes * kept)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit ``y = a + b x`` with the least squared *relative* error and neither a nor b negative.

    Args:
        points: Pairs of x and y, at least one, x >= 0 and y >= 0. A single one gives a constant.

    Returns:
        a and b.
    """
    weights = [1 / max(y, 1e-12) ** 2 for _, y in points]

    def mean(values: Iterable[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    x_mean, y_mean = mean(x for x, _ in points), mean(y for _, y in points)
    spread = mean((x - x_mean) ** 2 for x, _ in points)
    slope = mean((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread > 0 else 0.0
    if slope <= 0:
        return y_mean, 0.0
    if y_mean - slope * x_mean < 0:
        return 0.0, mean(x * y for x, y in points) / mean(x * x for x, _ in points)
    return y_mean - slope * x_mean, slope


@dataclass(frozen=True)
class Way:
    """A way to train on some rows of a batch, at one keep.

    Attributes:
        engine: ``"masked"`` (plain indexing: selection without any saving), ``"recompute"`` or ``"sliced"``.
        scorer: ``"full"`` or ``"half"`` (half-size images) where rows are scored by a forward of their own, else None.
        keep: K / N.
        predicted_s: Seconds of a whole step, the optimizer's update included.
        speedup: How many times as fast as the plain step over all rows; below 1 is slower.
        peak_bytes: Most that the step holds at once beyond what lay there before it; None where nobody measured.
        measured_s: The same step measured, where it was.
    """

    engine: str
    scorer: str | None
    keep: float
    predicted_s: float
    speedup: float
    peak_bytes: int | None
    measured_s: float | None = None

    @property
    def name(self) -> str:
        """The engine, with what scores for it where that is not the full forward."""
        return self.engine if self.scorer in (None, "full") else f"{self.engine} scored at {self.scorer} size"


@dataclass(frozen=True)
class Plan:
    """What each way costs, and which to take.

    Attributes:
        num_rows: N.
        full_s: Seconds of the plain step over all rows, the update included.
        full_bytes: Peak of the plain step; None where nobody measured.
        phases_s: What it was made of, by name; empty where only totals are known.
        ways: Every way at every keep.
        choice: The way to take at the first keep.
        choices: The way to take at each keep.
        pays: Whether the choice saves time, and the losses are not too flat for selecting by them.
        break_even_keep: The keep below which the best way beats the plain step; 1 where it does at any, 0 at none.
        loss_rows: Smallest fraction of the rows that holds 90 % of the loss after a short run; None where nobody
            looked.
        reason: Why, in one sentence.
    """

    num_rows: int
    full_s: float
    full_bytes: int | None
    phases_s: dict[str, float]
    ways: list[Way]
    choice: Way
    choices: list[Way]
    pays: bool
    break_even_keep: float
    loss_rows: float | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds."""
        return asdict(self)


def make_plan(
    costs: Sequence[Cost],
    *,
    num_rows: int,
    full_s: float,
    keeps: Sequence[float],
    update_s: float = 0.0,
    full_bytes: int | None = None,
    memory_limit_bytes: int | None = None,
    loss_rows: float | None = None,
    phases_s: dict[str, float] | None = None,
    measured: Mapping[tuple[str, str | None, float], Point] | None = None,
) -> Plan:
    """Choose among ways of known cost.

    At each keep the fastest way that fits into the memory is chosen; of ways equally fast the first in ``costs``. Where
    none fits, the one that needs least.

    Args:
        costs: The ways. ``"masked"``, plain indexing, should be among them: it is what remains where nothing pays.
        num_rows: N.
        full_s: Seconds of the plain step over all rows, without the update.
        keeps: Fractions kept, at least one, in (0, 1].
        update_s: Seconds of the optimizer's update, the same for all. Default 0.
        full_bytes: Peak of the plain step. Default None: not measured.
        memory_limit_bytes: Ways with a larger peak are not chosen. Default None: no limit.
        loss_rows: See :class:`Plan`. Default None.
        phases_s: See :class:`Plan`. Default None: empty.
        measured: Ways that were run at one of the keeps, by engine, scorer and keep: their seconds stand beside the
            predicted ones, and their peaks are taken instead of the lines'. Default None: none.

    Returns:
        The plan.

    Raises:
        InvalidInput: There is no way, no keep, a keep outside (0, 1], or no time that the plain step takes.
    """
    if not costs or not keeps or not all(0 < keep <= 1 for keep in keeps) or num_rows < 1 or not full_s > 0:
        raise InvalidInput(
            f"make_plan got {len(costs)} costs, keeps {list(keeps)}, num_rows={num_rows!r} and full_s={full_s!r}, but "
            "at least one cost, keeps in (0, 1], at least one row and a positive time were needed."
        )
    whole_s = full_s + update_s
    ways: list[Way] = []
    for keep in keeps:
        kept = count_kept(keep, num_rows)
        for cost in costs:
            point = (measured or {}).get((cost.engine, cost.scorer, keep))
            predicted_s = cost.seconds(kept) + update_s
            peak = cost.peak_bytes(kept) if point is None else point.peak_bytes
            measured_s = None if point is None else point.seconds + update_s
            ways.append(Way(cost.engine, cost.scorer, keep, predicted_s, whole_s / predicted_s, peak, measured_s))
    choices = [_fastest([way for way in ways if way.keep == keep], memory_limit_bytes) for keep in keeps]
    choice = choices[0]
    break_even = max((_break_even(cost, full_s, num_rows) for cost in costs if cost.engine != "masked"), default=0.0)
    flat = loss_rows is not None and loss_rows > FLAT
    pays = choice.engine != "masked" and choice.predicted_s < whole_s and not flat
    reason = _reason(
        [way for way in ways if way.keep == choice.keep], choice, whole_s, break_even, memory_limit_bytes, loss_rows
    )
    return Plan(
        num_rows, whole_s, full_bytes, phases_s or {}, ways, choice, choices, pays, break_even, loss_rows, reason
    )


def loss_rows_needed(losses: Iterable[float], mass: float = MASS) -> float:
    """Count how many of the hardest rows it takes to hold ``mass`` of the loss, as a fraction of all.

    Args:
        losses: One per row, at least one, none negative.
        mass: Share of their sum, in (0, 1]; default 0.9.

    Returns:
        In (0, 1]; ``mass`` where all losses are equal, and 1 where all are zero.

    Raises:
        InvalidInput: There are no losses, or one is negative or not finite.
    """
    ordered = sorted(losses, reverse=True)
    if not ordered or not all(0 <= loss < float("inf") for loss in ordered):
        raise InvalidInput(
            f"loss_rows_needed got {len(ordered)} losses but at least one, finite, 0 or more was needed."
        )
    wanted, held = mass * sum(ordered) * (1 - 1e-9), 0.0
    for count, loss in enumerate(ordered, 1):
        held += loss
        if held >= wanted > 0:
            return count / len(ordered)
    return 1.0


def milliseconds(seconds: float) -> str:
    """As people read it: ``12.3 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _fits(way: Way, limit: int | None) -> bool:
    return limit is None or (way.peak_bytes is not None and way.peak_bytes <= limit)


def _fastest(ways: Sequence[Way], limit: int | None) -> Way:
    fitting = [way for way in ways if _fits(way, limit)]
    if fitting:
        return min(fitting, key=lambda way: way.predicted_s)
    return min(ways, key=lambda way: float("inf") if way.peak_bytes is None else way.peak_bytes)


def _break_even(cost: Cost, full_s: float, num_rows: int) -> float:
    """The keep at which a way takes as long as the plain step."""
    if cost.fixed_s >= full_s:
        return 0.0
    if cost.seconds(num_rows) <= full_s:
        return 1.0
    return (full_s - cost.fixed_s) / (cost.per_row_s * num_rows)


def _reason(
    ways: Sequence[Way], choice: Way, whole_s: float, break_even: float, limit: int | None, loss_rows: float | None
) -> str:
    """One sentence; ``ways`` are those at the choice's keep."""
    selecting = [way for way in ways if way.engine != "masked"]
    at = f"keep {choice.keep:g}"
    plain = f"the plain step's {milliseconds(whole_s)}"
    if not _fits(choice, limit):
        said = (
            f"no way fits into {limit:,} bytes at {at}; {choice.name} needs least, "
            f"{'an unknown number' if choice.peak_bytes is None else f'{choice.peak_bytes:,}'}"
        )
    elif selecting and (choice.engine == "masked" or choice.predicted_s >= whole_s):
        best = min(selecting, key=lambda way: way.predicted_s)
        over = "" if _fits(best, limit) else f" and does not fit into {limit:,} bytes"
        said = (
            f"selection does not pay at {at}: {best.name} takes {milliseconds(best.predicted_s)}{over} against {plain} "
            f"(break-even at keep {break_even:.2f}), so train on all rows or keep fewer"
        )
    else:
        others = [way for way in selecting if way is not choice]
        said = f"{choice.name} at {at} takes {milliseconds(choice.predicted_s)}, {choice.speedup:.2f} times as fast as "
        said += f"{plain}; "
        if others:
            second = min(others, key=lambda way: way.predicted_s)
            over = "" if _fits(second, limit) else f" but does not fit into {limit:,} bytes"
            said += f"{second.name} takes {milliseconds(second.predicted_s)}{over}; "
        said += f"it pays below keep {break_even:.2f}" if break_even < 1 else "it pays at any keep"
    if loss_rows is not None and loss_rows > FLAT:
        said += (
            f"; but {100 * MASS:.0f} % of the loss lies in {100 * loss_rows:.0f} % of the rows, so flat that there are "
            "no hard rows to choose and selecting by loss cannot pay"
        )
    return said + "."
