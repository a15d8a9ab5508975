"""The cost of a step as straight lines in the number of kept rows, and the words for it: arithmetic, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SHORT_S = 0.005
"""A plain step shorter than this is mostly calls of ops, each of which costs tens of microseconds at any size."""

TOO_SMALL = (
    "the model is too small for selecting to pay here, which is expected of a toy model: a step this short is mostly "
    "the fixed cost of calling ops, and fewer rows do not lower it"
)


@dataclass(frozen=True)
class Measurement:
    """One measurement of a way.

    Attributes:
        kept: K, the rows that were backpropagated.
        seconds: The step's, without the optimizer's update.
        peak_bytes: The most that the step held at once beyond the memory held before it; None where nobody measured.
    """

    kept: int
    seconds: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of a step of one way as straight lines in K: a fixed part and a part per kept row.

    Attributes:
        engine: ``"masked"``, ``"recompute"`` or ``"sliced"``.
        scorer: ``"full"`` or ``"half"`` where a forward apart from the training forward scores the rows, else None.
        fixed_s: Seconds at any K, such as the forward over all rows takes.
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
    def fit(cls, engine: str, scorer: str | None, points: Iterable[Measurement]) -> Cost:
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


def milliseconds(seconds: float) -> str:
    """A duration for people to read: ``12.3 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def beside(seconds: Mapping[str, float], left_out: Mapping[str, str]) -> list[str]:
    """Clauses on the ways that were not taken: the slower ones, the fastest of them first; then the ones left out."""
    slower = [f"{name} takes {milliseconds(s)}" for name, s in sorted(seconds.items(), key=lambda item: item[1])]
    return [*slower, *(f"{name} left out: {why}" for name, why in left_out.items())]


def by_policy(engine: str, policies: Mapping[str, str]) -> list[str]:
    """The clause on an engine with the gradient of a policy; none on any other engine."""
    return [f"{engine} has the gradient of {policies[engine]}"] if engine in policies else []
