"""Choosing among ways of known cost: arithmetic only, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from rowprop.cost.lines import SHORT_S, TOO_SMALL, Cost, Measurement, beside, by_policy, milliseconds
from rowprop.cost.shapes import advice_on, kept_in_multiples, multiple_for
from rowprop.errors import InvalidInput

FLAT = 0.8
"""Losses are called flat where 90 % of their sum needs a larger fraction of the rows than this.

Equal losses need 0.9 of the rows; losses spread evenly between nothing and the largest 0.68, exponentially 0.59.
"""
MASS = 0.9
SAME, BY_POLICY, ANOTHER, EXPECTED = "same", "by policy", "another", "in expectation"
"""How a way's gradient relates to that of plain indexing, see :class:`Way`."""
ELIGIBLE = SAME, BY_POLICY
"""The gradients of the ways that may be chosen."""
NOTHING_SAVED = (
    "fewer rows save nothing, so look at `rowprop verify`, which lists the ops that run on all rows at any keep"
)
THINNED = "thinned"
Key = tuple[str, str | None, float]
"""A way at a keep: its engine, its scorer, the keep."""


@dataclass(frozen=True)
class Way:
    """A way to train on some rows of a batch, at one keep.

    Attributes:
        engine: ``"masked"`` (plain indexing: selection without any saving), ``"recompute"`` or ``"sliced"``; or
            ``"thinned"``, the step of all rows after ``rowprop.thin(model, keep=keep)``, which selects none.
        scorer: ``"full"`` or ``"half"`` (half-size images) where a forward of its own scores the rows, else None.
        keep: The fraction asked for.
        kept: K: ``max(1, ceil(keep * N))``, rounded up to the plan's ``multiple_of``.
        step_s: Seconds of a whole step with the optimizer's update; the choice is made by this figure. It is the mean
            of ``predicted_s`` and ``measured_s``, whose errors are independent; without a measurement it is
            ``predicted_s``.
        predicted_s: The seconds on the lines, which were laid through steps at other keeps.
        measured_s: The seconds measured at this keep; None where nobody measured.
        speedup: The plain step's seconds over ``step_s``; below 1 is slower than training on all rows.
        peak_bytes: The most that the step holds at once beyond the memory held before it; None where nobody measured.
        gradient: ``"same"`` as that of plain indexing; ``"by policy"``, where training BatchNorm may be
            projected over the kept rows; ``"another"``; or ``"in expectation"`` that of all rows, for ``"thinned"``.
            Ways with one of these two are never chosen: they train on something else than the rows that were selected.
    """

    engine: str
    scorer: str | None
    keep: float
    kept: int
    step_s: float
    predicted_s: float
    measured_s: float | None
    speedup: float
    peak_bytes: int | None
    gradient: str

    @property
    def name(self) -> str:
        """The engine; and the scorer, where it is not the full forward."""
        return self.engine if self.scorer in (None, "full") else f"{self.engine} scored at {self.scorer} size"

    @property
    def eligible(self) -> bool:
        """Whether it may be chosen."""
        return self.gradient in ELIGIBLE


@dataclass(frozen=True)
class Plan:
    """The cost of each way, and which way to take.

    Attributes:
        num_rows: N.
        full_s: Seconds of the plain step over all rows, the update included.
        full_bytes: Peak of the plain step; None where nobody measured.
        phases_s: Seconds of the plain step by phase; empty where only totals are known.
        ways: Every way at every keep.
        choice: The way to take at the first keep.
        choices: The way to take at each keep.
        pays: Whether the choice saves time, and the losses are not too flat for selecting by them.
        break_even_keep: The keep below which the best way beats the plain step; 1 where it does at any, 0 at none.
        loss_rows: Smallest fraction of the rows that holds 90 % of the loss after a short run; None where nobody
            looked.
        reason: The reason for the choice, in one sentence.
        rounds: How often each step was measured; None where nobody measured.
        spread: The width of the middle half of the rounds as a share of their median, in the median of all steps; None
            for fewer than two rounds.
        error: By how much the predictions miss the measurements at the same keeps, as a share, in the median; None
            where there are no such measurements.
        worst_error: The largest of these errors.
        certainty: ``rounds``, ``spread``, ``error`` and ``worst_error`` in a sentence.
        multiple_of: K is a multiple of it in every way: 8 where the device tunes kernels for each K, else 1.
        advice: The selector to take where K should be a multiple of 8, and why; else, and where nothing pays, empty.
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
    rounds: int | None
    spread: float | None
    error: float | None
    worst_error: float | None
    certainty: str
    multiple_of: int
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds."""
        return asdict(self)


@dataclass(frozen=True)
class PlainStep:
    """The plain step over all rows.

    Attributes:
        seconds: The step's, without the optimizer's update.
        update_s: Seconds of the update, which is the same for every way. Default 0.
        peak_bytes: Peak of the step. Default None: not measured.
        phases_s: Seconds by phase. Default: empty.
    """

    seconds: float
    update_s: float = 0.0
    peak_bytes: int | None = None
    phases_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def whole_s(self) -> float:
        """The update included."""
        return self.seconds + self.update_s


@dataclass(frozen=True)
class Gradients:
    """Engines that do not give the gradient of plain indexing, each with the reason; all empty by default.

    Attributes:
        another: Engines with another gradient, and why it is another one.
        policies: Engines with the gradient of a policy, and the policy's name.
        left_out: Engines that could not be measured, and why.
    """

    another: Mapping[str, str] = field(default_factory=dict[str, str])
    policies: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def of(self, engine: str) -> str:
        """As in :attr:`Way.gradient`."""
        if engine == THINNED:
            return EXPECTED
        return ANOTHER if engine in self.another else BY_POLICY if engine in self.policies else SAME


@dataclass(frozen=True)
class Measured:
    """The measurements at the keeps asked for, which the lines have not seen.

    Attributes:
        steps: By way and keep; empty by default. Their peaks replace the lines' peaks, their seconds count half.
        rounds: See :class:`Plan`. Default None.
        spread: See :class:`Plan`. Default None.
    """

    steps: Mapping[Key, Measurement] = field(default_factory=dict[Key, Measurement])
    rounds: int | None = None
    spread: float | None = None


def make_plan(
    costs: Sequence[Cost],
    plain: PlainStep,
    *,
    num_rows: int,
    keeps: Sequence[float],
    memory_limit_bytes: int | None = None,
    loss_rows: float | None = None,
    gradients: Gradients | None = None,
    measured: Measured | None = None,
    tuned: Sequence[str] = (),
) -> Plan:
    """Choose among ways of known cost.

    At each keep the fastest way is chosen among the ways that fit into the memory, have the gradient of plain indexing
    or of the policy asked for, and beat the plain step; of ways equally fast the first in ``costs``. If no way beats
    the plain step, plain indexing is chosen; if no way fits, the way with the smallest peak.

    ``"masked"`` runs the plain step and indexes its losses, so it cannot be faster. Where the clock says otherwise, the
    difference is noise, and both get their mean.

    Args:
        costs: The ways. ``"masked"``, plain indexing, should be among them: it is chosen where nothing pays.
        plain: The plain step.
        num_rows: N.
        keeps: Fractions kept, at least one, in (0, 1].
        memory_limit_bytes: Ways with a larger peak are not chosen. Default None: no limit.
        loss_rows: See :class:`Plan`. Default None.
        gradients: Engines without the gradient of plain indexing. Default None: all have it.
        measured: Measurements at the keeps. Default None: none.
        tuned: Kernels that the device tunes for each K, as :func:`~rowprop.cost.shapes.tuned_per_shape` tells them.
            Default: none.

    Returns:
        The plan.

    Raises:
        InvalidInput: There is no way, no keep, a keep outside (0, 1], or no time that the plain step takes.
    """
    if not costs or not keeps or not all(0 < keep <= 1 for keep in keeps) or num_rows < 1 or not plain.seconds > 0:
        raise InvalidInput(
            f"make_plan got {len(costs)} costs, keeps {list(keeps)}, num_rows={num_rows!r} and a plain step of "
            f"{plain.seconds!r} s, but at least one cost, keeps in (0, 1], at least one row and a positive time were "
            "needed."
        )
    gradients, measured = gradients or Gradients(), measured or Measured()
    plain, costs = _pooled(plain, costs)
    whole_s, multiple_of = plain.whole_s, multiple_for(num_rows, tuned)
    kept = {keep: kept_in_multiples(keep, num_rows, multiple_of) for keep in keeps}
    ways = [_way(cost, keep, kept[keep], plain, gradients, measured) for keep in keeps for cost in costs]
    choices = [_chosen([way for way in ways if way.keep == keep], whole_s, memory_limit_bytes) for keep in keeps]
    choice = choices[0]
    able = [cost for cost in costs if gradients.of(cost.engine) in ELIGIBLE]
    break_even = max((_break_even(cost, plain.seconds, num_rows) for cost in able), default=0.0)
    break_even = _agreeing(break_even, [way for way in ways if way.engine != "masked"], whole_s)
    flat = None if loss_rows is None or loss_rows <= FLAT else loss_rows
    told = _Told(ways, choice, num_rows, whole_s, break_even, memory_limit_bytes)
    clauses = [told.decision(), *told.set_aside(gradients)]
    if flat is not None:
        clauses.append(
            f"but {100 * MASS:.0f} % of the loss lies in {100 * flat:.0f} % of the rows, so flat that there are "
            "no hard rows to choose and selecting by loss cannot pay"
        )
    errors = [abs(way.predicted_s / way.measured_s - 1) for way in ways if way.measured_s is not None]
    return Plan(
        num_rows=num_rows,
        full_s=whole_s,
        full_bytes=plain.peak_bytes,
        phases_s=plain.phases_s,
        ways=ways,
        choice=choice,
        choices=choices,
        pays=choice.engine != "masked" and choice.step_s < whole_s and flat is None,
        break_even_keep=break_even,
        loss_rows=loss_rows,
        reason="; ".join(clauses) + ".",
        rounds=measured.rounds,
        spread=measured.spread,
        error=median(errors) if errors else None,
        worst_error=max(errors, default=None),
        certainty=_certainty(ways, measured, errors),
        multiple_of=multiple_of,
        advice=advice_on(choice.keep, multiple_of, tuned) if any(c.engine != "masked" for c in choices) else "",
    )


def loss_rows_needed(losses: Iterable[float], mass: float = MASS) -> float:
    """Find the smallest fraction of the rows, the hardest ones, that holds ``mass`` of the loss.

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


def _pooled(plain: PlainStep, costs: Sequence[Cost]) -> tuple[PlainStep, list[Cost]]:
    """The plain step and the costs; a ``masked`` that was faster and the plain step both get their mean."""
    faster = [cost.fixed_s for cost in costs if cost.engine == "masked" and cost.fixed_s < plain.seconds]
    if not faster:
        return plain, list(costs)
    pooled_s = (plain.seconds + faster[0]) / 2
    costs = [replace(cost, fixed_s=pooled_s) if cost.engine == "masked" else cost for cost in costs]
    return replace(plain, seconds=pooled_s), costs


def _way(cost: Cost, keep: float, kept: int, plain: PlainStep, gradients: Gradients, measured: Measured) -> Way:
    """A way at one keep, from its line and from the measurement there."""
    point = measured.steps.get((cost.engine, cost.scorer, keep))
    predicted_s = cost.seconds(kept) + plain.update_s
    measured_s = None if point is None else point.seconds + plain.update_s
    step_s = predicted_s if measured_s is None else (predicted_s + measured_s) / 2
    return Way(
        engine=cost.engine,
        scorer=cost.scorer,
        keep=keep,
        kept=kept,
        step_s=step_s,
        predicted_s=predicted_s,
        measured_s=measured_s,
        speedup=plain.whole_s / step_s,
        peak_bytes=cost.peak_bytes(kept) if point is None else point.peak_bytes,
        gradient=gradients.of(cost.engine),
    )


def _fits(way: Way, limit: int | None) -> bool:
    return limit is None or (way.peak_bytes is not None and way.peak_bytes <= limit)


def _chosen(ways: Sequence[Way], whole_s: float, limit: int | None) -> Way:
    """The way to take among the ways at one keep."""
    ways = [way for way in ways if way.eligible] or ways
    fitting = [way for way in ways if _fits(way, limit)]
    if not fitting:
        return min(ways, key=lambda way: float("inf") if way.peak_bytes is None else way.peak_bytes)
    faster = [way for way in fitting if way.engine != "masked" and way.step_s < whole_s]
    plain = [way for way in fitting if way.engine == "masked"]
    return min(faster or plain or fitting, key=lambda way: way.step_s)


def _break_even(cost: Cost, full_s: float, num_rows: int) -> float:
    """The keep at which a way takes as long as the plain step."""
    if cost.fixed_s >= full_s:
        return 0.0
    if cost.seconds(num_rows) <= full_s:
        return 1.0
    return (full_s - cost.fixed_s) / (cost.per_row_s * num_rows)


def _paying(ways: Sequence[Way], whole_s: float) -> dict[float, bool]:
    """By keep: whether a way beats the plain step and has a gradient that may be chosen."""
    paying: dict[float, bool] = {}
    for way in ways:
        paying[way.keep] = paying.get(way.keep, False) or (way.eligible and way.step_s < whole_s)
    return paying


def _agreeing(break_even: float, selecting: Sequence[Way], whole_s: float) -> float:
    """The break-even of the lines, moved until it agrees with every keep up to the first that does not pay."""
    paying = _paying(selecting, whole_s)
    stop = min((keep for keep, pays in paying.items() if not pays), default=1.0)
    return max([min(break_even, stop), *(keep for keep, pays in paying.items() if pays and keep < stop)])


@dataclass(frozen=True)
class _Told:
    """The clauses of a plan's reason."""

    ways: Sequence[Way]
    choice: Way
    num_rows: int
    whole_s: float
    break_even: float
    limit: int | None

    def decision(self) -> str:
        """The choice at the first keep, beside the other ways there."""
        choice, plain = self.choice, milliseconds(self.whole_s)
        at = f"keep {choice.keep:g} (K = {choice.kept} of {self.num_rows})"
        others = "; ".join(beside(self._others(), {}))
        if not _fits(choice, self.limit):
            least = "an unknown number" if choice.peak_bytes is None else f"{choice.peak_bytes:,}"
            return f"no way fits into {self.limit:,} bytes at {at}; {choice.name} needs least, {least}"
        if choice.engine == "masked":
            return self._all_rows(at, plain, others)
        than = "times as fast as" if choice.step_s < self.whole_s else "times the speed of"
        over = "" if choice.step_s < self.whole_s else f", which does not fit into {self.limit:,} bytes"
        said = (
            f"{choice.name} takes {milliseconds(choice.step_s)} a step at {at}, {choice.speedup:.2f} {than} the plain "
            f"step's {plain}{over}" + (f"; {others}" if others else "")
        )
        return f"{said}; {self._where_it_pays('it')}"

    def _all_rows(self, at: str, plain: str, others: str) -> str:
        """The clause where no selecting way is chosen."""
        over = any(
            way.keep == self.choice.keep and self._selects(way) and way.step_s < self.whole_s for way in self.ways
        )
        said = f"training on all rows is {'the fastest way that fits' if over else 'fastest'} "
        if self.break_even:
            said += f"at {at}: the plain step takes {plain}" + (f"; {others}" if others else "")
            return f"{said}; {self._where_it_pays('selecting')}"
        said += f"here: the plain step takes {plain}" + (f", and at {at} {others}" if others else "")
        return f"{said}; {TOO_SMALL if self.whole_s < SHORT_S else NOTHING_SAVED}"

    @staticmethod
    def _selects(way: Way) -> bool:
        return way.engine != "masked" and way.eligible

    def _others(self) -> dict[str, float]:
        """Seconds of the other ways that may be chosen at this keep, by name."""
        found: dict[str, float] = {}
        for way in self.ways:
            if way.keep == self.choice.keep and self._selects(way) and way is not self.choice:
                over = "" if _fits(way, self.limit) else f", which does not fit into {self.limit:,} bytes,"
                found[way.name + over] = way.step_s
        return found

    def _where_it_pays(self, subject: str) -> str:
        paying = _paying([way for way in self.ways if way.engine != "masked"], self.whole_s)
        pays = sorted(keep for keep, does in paying.items() if does)
        if any(keep > self.break_even for keep in pays):  # no line: the measurements go up and down
            return f"{subject} pays at keep {', '.join(f'{keep:g}' for keep in pays)} of the keeps asked for"
        if round(self.break_even, 2) >= 1:
            return f"{subject} pays at any keep"
        return f"{subject} pays {'up to' if self.break_even in pays else 'below'} keep {self.break_even:.2f}"

    def set_aside(self, gradients: Gradients) -> list[str]:
        """The engines without the gradient of plain indexing, each with the reason."""
        clauses = by_policy(self.choice.engine, gradients.policies)
        if self.choice.scorer == "half":
            clauses.append("it ranks the rows by half-size images, so that it keeps other rows than their losses would")
        for engine, why in gradients.another.items():
            ways = [way for way in self.ways if way.engine == engine and way.keep == self.choice.keep]
            for way in sorted(ways, key=lambda way: way.step_s)[:1]:
                clauses.append(f"{way.name}, {milliseconds(way.step_s)}, is not chosen: {why}")
        for way in self.ways:
            if way.engine == THINNED and way.keep == self.choice.keep:
                clauses.append(
                    f"thinned to {way.keep:g} of the rows after every block, the step of all rows takes "
                    f"{milliseconds(way.step_s)}, with their gradient in expectation"
                )
        return [*clauses, *beside({}, gradients.left_out)]


def _certainty(ways: Sequence[Way], measured: Measured, errors: Sequence[float]) -> str:
    """How far the figures can be trusted, in a sentence."""
    rounds, spread = measured.rounds, measured.spread
    if rounds is None:
        return "Nobody measured, so nothing is known of the error."
    said = f"Each step was measured {rounds} times" if rounds > 1 else "Each step was measured once"
    said += ", so their spread is unknown" if spread is None else f"; the middle half lies within {_percent(spread)}"
    if not errors:
        return f"{said}. No keep asked for was measured, so the error of the predictions is unknown."
    selecting = [way for way in ways if way.engine != "masked"]
    keeps = list(dict.fromkeys(way.keep for way in selecting if way.measured_s is not None))
    where = "" if len(keeps) == len({way.keep for way in selecting}) else (
        f" at keep {', '.join(f'{keep:g}' for keep in keeps)}, and the other keeps were not measured"
    )  # fmt: skip
    missed = f"by {_percent(median(errors))}, at most {_percent(max(errors))}{where}"
    return f"{said}. The predictions miss the measurements {missed}."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
