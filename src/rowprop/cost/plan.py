"""What each way to train on K rows costs: lines through measurements, and the advice that follows. No clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from typing import Any

from rowprop.selection.selectors import count_kept

SAME, BY_POLICY, ANOTHER, EXPECTED = "same", "by policy", "another", "in expectation"
"""How a way's gradient relates to that of plain indexing, see :class:`Way`."""
LEFT_OUT = "left out"
"""In the place of a gradient: the engine could not be measured."""
THINNED = "thinned"
IN_EXPECTATION = "it selects nothing, and its gradient is that of all rows in expectation"
NOTHING_SAVED = (
    "fewer rows save nothing, so look at `rowprop verify`, which lists the ops that run on all rows at any keep"
)
SHORT_S = 0.005
"""A plain step shorter than this is mostly calls of ops, each of which costs tens of microseconds at any size."""
Key = tuple[str, float]
"""A way at a keep: its engine, and the keep."""


@dataclass(frozen=True)
class Measurement:
    """A step that kept ``kept`` rows: its seconds without the optimizer's update, and its peak of memory."""

    kept: int
    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of a step of one way as straight lines in K: a part at any K, and a part for each kept row."""

    engine: str
    fixed_s: float
    per_row_s: float
    fixed_bytes: float = 0.0
    per_row_bytes: float = 0.0

    @classmethod
    def fit(cls, engine: str, points: Sequence[Measurement]) -> Cost:
        """Lay the lines through measured points, with the least relative error; see :func:`line`."""
        seconds = line([(point.kept, point.seconds) for point in points])
        return cls(engine, *seconds, *line([(point.kept, point.peak_bytes) for point in points]))

    def seconds(self, kept: float) -> float:
        """Seconds of a step that keeps ``kept`` rows."""
        return self.fixed_s + self.per_row_s * kept

    def peak_bytes(self, kept: float) -> int:
        """Peak of a step that keeps ``kept`` rows."""
        return round(self.fixed_bytes + self.per_row_bytes * kept)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A and b of ``y = a + b x``, neither negative, with the least squared *relative* error; constant at one point."""
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
class PlainStep:
    """The plain step over all rows.

    ``seconds`` leaves out the optimizer's update, which takes ``update_s`` whatever the way; ``backward_s`` is a part
    of ``seconds``.
    """

    seconds: float
    backward_s: float
    update_s: float = 0.0
    peak_bytes: int = 0
    phases_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def whole_s(self) -> float:
        """The update included."""
        return self.seconds + self.update_s

    def limit(self, kept_share: float) -> float:
        """The speed-up of a step that saves the whole backward of the other rows: (F + B + U) / (F + kB + U)."""
        return self.whole_s / (self.whole_s - (1 - kept_share) * self.backward_s)


@dataclass(frozen=True)
class Way:
    """A way to train on some rows of a batch, at one keep.

    Attributes:
        engine: ``"masked"`` (plain indexing: selection without any saving), ``"recompute"`` or ``"sliced"``; or
            ``"thinned"``, the step of all rows after ``rowprop.thin(model, keep=keep)``.
        keep: The fraction asked for.
        kept: K: ``max(1, ceil(keep * N))``.
        step_s: Seconds of a whole step with the optimizer's update, by which the choice is made: the mean of
            ``predicted_s`` and ``measured_s``, whose errors are independent; without a measurement ``predicted_s``.
        predicted_s: The seconds on the lines, which were laid through steps at other keeps.
        measured_s: The seconds measured at this keep; None where nobody measured.
        speedup: The plain step's seconds over ``step_s``.
        limit: The speed-up where one forward runs on all rows, the backward costs K rows, and nothing else costs:
            (F + B + U) / (F + kB + U) with k = K/N. ``recompute`` can pass it: its first forward makes no graph.
        peak_bytes: The most that the step holds at once beyond the memory held before it.
        gradient: ``"same"`` as that of plain indexing; ``"by policy"``, where training BatchNorm may be projected over
            the kept rows; or, in ways that are never chosen, ``"another"``, or for ``"thinned"`` ``"in expectation"``
            that of all rows.
    """

    engine: str
    keep: float
    kept: int
    step_s: float
    predicted_s: float
    measured_s: float | None
    speedup: float
    limit: float
    peak_bytes: int
    gradient: str

    @property
    def eligible(self) -> bool:
        """Whether it may be chosen."""
        return self.gradient in (SAME, BY_POLICY)


@dataclass(frozen=True)
class Plan:
    """The cost of each way beside the limit, and what the clock would choose. It changes nothing.

    Attributes:
        num_rows: N.
        full_s: Seconds of the plain step over all rows, the update included.
        full_bytes: Peak of the plain step.
        phases_s: Seconds of the plain step by phase; empty where only totals are known.
        ways: Every way at every keep.
        choices: At each keep the way that the clock chooses, see :func:`make_plan`.
        break_even_keep: The keep below which the best way beats the plain step; 1 where it does at any, 0 at none.
        notes: By engine, why its gradient is not that of plain indexing, or why it was not measured.
        rounds: How often each step was measured; None where nobody measured.
        spread: The middle half of the rounds over their median, in the median of all steps; None for one round.
    """

    num_rows: int
    full_s: float
    full_bytes: int
    phases_s: dict[str, float]
    ways: list[Way]
    choices: list[Way]
    break_even_keep: float
    notes: dict[str, str]
    rounds: int | None
    spread: float | None

    @property
    def choice(self) -> Way:
        """The way that the clock chooses at the first keep."""
        return self.choices[0]

    @property
    def pays(self) -> bool:
        """Whether the choice saves time."""
        return self.choice.engine != "masked"

    @property
    def errors(self) -> list[float]:
        """By how much each prediction misses the measurement at the same keep, as a share of it."""
        return [abs(way.predicted_s / way.measured_s - 1) for way in self.ways if way.measured_s is not None]

    @property
    def error(self) -> float | None:
        """The median of the errors; None where no keep asked for was measured."""
        return median(self.errors) if self.errors else None

    @property
    def worst_error(self) -> float | None:
        """The largest of the errors."""
        return max(self.errors, default=None)

    @property
    def reason(self) -> str:
        """The choice at the first keep, the other ways there, and where selecting pays, in one sentence."""
        return "; ".join(_clauses(self)) + "."

    @property
    def certainty(self) -> str:
        """``rounds``, ``spread``, ``error`` and ``worst_error`` in a sentence."""
        if self.rounds is None:
            return "Nobody measured, so nothing is known of the error."
        spread = "" if self.spread is None else f" (the middle half lies within {100 * self.spread:.1f} %)"
        said = f"Rounds measured of each step: {self.rounds}{spread}. "
        if self.error is None:
            return f"{said}No keep asked for was measured, so the error of the predictions is unknown."
        keeps = ", ".join(f"{keep:g}" for keep in dict.fromkeys(w.keep for w in self.ways if w.measured_s is not None))
        errors = f"by {100 * self.error:.1f} %, at most {100 * max(self.errors):.1f} %"
        return f"{said}The predictions miss the measurements, at keep {keeps}, {errors}."

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds."""
        names = ("pays", "error", "worst_error", "reason", "certainty")
        return asdict(self) | {"choice": asdict(self.choice)} | {name: getattr(self, name) for name in names}


def make_plan(
    costs: Sequence[Cost],
    plain: PlainStep,
    *,
    num_rows: int,
    keeps: Sequence[float],
    gradients: Mapping[str, tuple[str, str]] | None = None,
    measured: Mapping[Key, Measurement] | None = None,
    rounds: int | None = None,
    spread: float | None = None,
) -> Plan:
    """Choose by known cost.

    At each keep the fastest way is chosen that has the gradient of plain indexing or of the policy asked for; of ways
    equally fast the first in ``costs``, but before all of them ``"masked"``, which costs the plain step and is added
    here.

    Args:
        costs: The other ways.
        plain: The plain step.
        num_rows: N.
        keeps: Fractions kept, at least one.
        gradients: By engine the gradient, as in :class:`Way` or :data:`LEFT_OUT`, and why. Default None: all the same.
        measured: Steps at the keeps asked for, which the lines have not seen. Their peaks replace the lines' peaks,
            their seconds count half. Default None: no steps.
        rounds: See :class:`Plan`.
        spread: See :class:`Plan`.
    """
    gradients, measured = gradients or {}, measured or {}
    costs = [Cost("masked", plain.seconds, 0.0, plain.peak_bytes), *costs]
    ways: list[Way] = []
    for keep, cost in product(keeps, costs):
        kept, point = count_kept(keep, num_rows), measured.get((cost.engine, keep))
        predicted_s = cost.seconds(kept) + plain.update_s
        measured_s = None if point is None else point.seconds + plain.update_s
        step_s = predicted_s if measured_s is None else (predicted_s + measured_s) / 2
        way = Way(
            engine=cost.engine, keep=keep, kept=kept, step_s=step_s, predicted_s=predicted_s, measured_s=measured_s,
            speedup=plain.whole_s / step_s, limit=plain.limit(kept / num_rows),
            peak_bytes=cost.peak_bytes(kept) if point is None else point.peak_bytes,
            gradient=gradients.get(cost.engine, (EXPECTED if cost.engine == THINNED else SAME, ""))[0],
        )  # fmt: skip
        ways.append(way)
    able = [way for way in ways if way.eligible]
    choices = [min((way for way in able if way.keep == keep), key=lambda way: way.step_s) for keep in keeps]
    engines = {way.engine for way in able}
    lines = max(_break_even(cost, plain.seconds, num_rows) for cost in costs if cost.engine in engines)
    # The break-even of the lines, moved until it agrees with every keep up to the first that does not pay.
    stop = min((way.keep for way in choices if way.engine == "masked"), default=1.0)
    paying = [way.keep for way in choices if way.engine != "masked" and way.keep < stop]
    return Plan(
        num_rows=num_rows, full_s=plain.whole_s, full_bytes=plain.peak_bytes, phases_s=plain.phases_s, ways=ways,
        choices=choices, break_even_keep=max([min(lines, stop), *paying]),
        notes={engine: why for engine, (_, why) in gradients.items()}, rounds=rounds, spread=spread,
    )  # fmt: skip


def _break_even(cost: Cost, full_s: float, num_rows: int) -> float:
    """The keep at which a way takes as long as the plain step."""
    if cost.fixed_s >= full_s:
        return 0.0
    if cost.seconds(num_rows) <= full_s:
        return 1.0
    return (full_s - cost.fixed_s) / (cost.per_row_s * num_rows)


def milliseconds(seconds: float) -> str:
    """A duration for people to read: ``12.3 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _clauses(plan: Plan) -> Iterator[str]:
    """The clauses of a plan's reason."""
    choice, plain = plan.choice, milliseconds(plan.full_s)
    at = f"keep {choice.keep:g} (K = {choice.kept} of {plan.num_rows})"
    if choice.engine == "masked":
        yield f"training on all rows is fastest at {at}: the plain step takes {plain} (limit {choice.limit:.2f})"
    else:
        yield (
            f"{choice.engine} takes {milliseconds(choice.step_s)} a step at {at}, {choice.speedup:.2f} times as fast "
            f"as the plain step's {plain} (limit {choice.limit:.2f})"
        )
    here = [way for way in plan.ways if way.keep == choice.keep and way.engine != "masked" and way is not choice]
    for way in sorted(here, key=lambda way: (not way.eligible, way.step_s)):
        remark = "" if way.eligible else f" and is not chosen: {plan.notes.get(way.engine, IN_EXPECTATION)}"
        yield f"{way.engine} takes {milliseconds(way.step_s)}{remark}"
    engines = {way.engine for way in plan.ways}
    yield from (f"{engine} left out: {why}" for engine, why in plan.notes.items() if engine not in engines)
    if choice.gradient == BY_POLICY:
        yield f"{choice.engine} has the gradient of {plan.notes[choice.engine]}"
    yield _where_it_pays(plan)


def _where_it_pays(plan: Plan) -> str:
    paying = sorted(way.keep for way in plan.choices if way.engine != "masked")
    if plan.break_even_keep == 0 and not paying:
        if plan.full_s >= SHORT_S:
            return NOTHING_SAVED
        return (
            "the model is too small for selecting to pay here, which is expected of a toy model: a step this short is "
            "mostly the fixed cost of calling ops, and fewer rows do not lower it"
        )
    if any(keep > plan.break_even_keep for keep in paying):  # no line: the measurements go up and down
        return f"selecting pays at keep {', '.join(f'{keep:g}' for keep in paying)} of the keeps asked for"
    if round(plan.break_even_keep, 2) >= 1:
        return "selecting pays at any keep"
    return f"selecting pays up to keep {plan.break_even_keep:.2f}"
