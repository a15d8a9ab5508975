"""Which way of selecting pays, from measured numbers: arithmetic only, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from rowprop.engines.lines import SHORT_S, TOO_SMALL, Cost, Measurement, beside, by_policy, milliseconds
from rowprop.errors import InvalidInput
from rowprop.selection.common import count_kept

FLAT = 0.8
"""Rows that hold 90 % of the loss, as a fraction of all, from which on the losses are called flat.

Equal losses need 0.9 of the rows; losses spread evenly between nothing and the largest 0.68, exponentially 0.59.
"""
MASS = 0.9
SAME, BY_POLICY, ANOTHER = "same", "by policy", "another"
"""How a way's gradient relates to plain indexing's, see :class:`Way`."""


@dataclass(frozen=True)
class Way:
    """A way to train on some rows of a batch, at one keep.

    Attributes:
        engine: ``"masked"`` (plain indexing: selection without any saving), ``"recompute"`` or ``"sliced"``.
        scorer: ``"full"`` or ``"half"`` (half-size images) where rows are scored by a forward of their own, else None.
        keep: K / N.
        step_s: Seconds of a whole step, the optimizer's update included: the figure that decides. The mean of the two
            that follow, which know nothing of each other's noise; the first alone where nothing was measured.
        predicted_s: The same from the lines, which were laid through steps at other keeps.
        measured_s: The same measured at this keep; None where it was not.
        speedup: How many times as fast as the plain step over all rows, by ``step_s``; below 1 is slower.
        peak_bytes: Most that the step holds at once beyond what lay there before it; None where nobody measured.
        gradient: ``"same"`` as plain indexing's; ``"by policy"``, where training BatchNorm is treated by
            ``batchnorm="rows"``; or ``"another"``. A way with another gradient is never chosen.
    """

    engine: str
    scorer: str | None
    keep: float
    step_s: float
    predicted_s: float
    measured_s: float | None
    speedup: float
    peak_bytes: int | None
    gradient: str

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
        rounds: How often each step was measured; None where nobody measured.
        spread: How far apart the middle half of the rounds lie, as a share of their median (the median of all steps);
            None for fewer than two rounds.
        error: By how much the predictions miss what was measured at the same keeps, as a share, in the median; None
            where nothing was measured beside the lines.
        worst_error: The largest of these errors.
        certainty: The last four in a sentence.
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
    measured: Mapping[tuple[str, str | None, float], Measurement] | None = None,
    another: Mapping[str, str] | None = None,
    policies: Mapping[str, str] | None = None,
    left_out: Mapping[str, str] | None = None,
    rounds: int | None = None,
    spread: float | None = None,
) -> Plan:
    """Choose among ways of known cost.

    At each keep the fastest way is chosen among those that fit into the memory, have the gradient of plain indexing (or
    that of the policy asked for), and beat the plain step; of ways equally fast the first in ``costs``. Where none
    beats it, plain indexing is chosen; where nothing fits, the way that needs least.

    ``"masked"`` runs the plain step and indexes its losses, so it cannot be faster: where the clock says otherwise, the
    difference is the clock's, and both are given the mean of both.

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
        measured: Ways that were run at one of the keeps, by engine, scorer and keep: their peaks are taken
            instead of the lines', and of their seconds the mean with the lines'. Default None: none.
        another: Engines whose gradient is another one than plain indexing's, and why. Default None: none.
        policies: Engines whose gradient is that of a policy, and its name. Default None: none.
        left_out: Engines that could not be measured, and why. Default None: none.
        rounds: See :class:`Plan`. Default None.
        spread: See :class:`Plan`. Default None.

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
    another, policies, measured = another or {}, policies or {}, measured or {}
    full_s, costs = _pooled(full_s, costs)
    whole_s = full_s + update_s
    ways: list[Way] = []
    for keep in keeps:
        kept = count_kept(keep, num_rows)
        for cost in costs:
            point = measured.get((cost.engine, cost.scorer, keep))
            predicted_s = cost.seconds(kept) + update_s
            measured_s = None if point is None else point.seconds + update_s
            step_s = predicted_s if measured_s is None else (predicted_s + measured_s) / 2
            peak = cost.peak_bytes(kept) if point is None else point.peak_bytes
            gradient = ANOTHER if cost.engine in another else BY_POLICY if cost.engine in policies else SAME
            ways.append(
                Way(
                    cost.engine, cost.scorer, keep, step_s, predicted_s, measured_s, whole_s / step_s, peak, gradient
                )
            )  # fmt: skip
    choices = [_chosen([way for way in ways if way.keep == keep], whole_s, memory_limit_bytes) for keep in keeps]
    choice = choices[0]
    able = [cost for cost in costs if cost.engine not in another]
    break_even = max((_break_even(cost, full_s, num_rows) for cost in able), default=0.0)
    break_even = _agreeing(break_even, [way for way in ways if way.engine != "masked"], whole_s)
    flat = None if loss_rows is None or loss_rows <= FLAT else loss_rows
    pays = choice.engine != "masked" and choice.step_s < whole_s and flat is None
    told = _Told(ways, choice, num_rows, whole_s, break_even, memory_limit_bytes, spread)
    clauses = [told.decision(), *told.set_aside(another, policies, left_out or {})]
    if flat is not None:
        clauses.append(
            f"but {100 * MASS:.0f} % of the loss lies in {100 * flat:.0f} % of the rows, so flat that there are "
            "no hard rows to choose and selecting by loss cannot pay"
        )
    errors = [abs(way.predicted_s / way.measured_s - 1) for way in ways if way.measured_s is not None]
    error, worst = (median(errors), max(errors)) if errors else (None, None)
    return Plan(
        num_rows, whole_s, full_bytes, phases_s or {}, ways, choice, choices, pays, break_even, loss_rows,
        "; ".join(clauses) + ".", rounds, spread, error, worst, _certainty(ways, rounds, spread, error, worst),
    )  # fmt: skip


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


def _pooled(full_s: float, costs: Sequence[Cost]) -> tuple[float, list[Cost]]:
    """The plain step's seconds and the costs, where ``masked`` is no faster than the plain step."""
    faster = [cost.fixed_s for cost in costs if cost.engine == "masked" and cost.fixed_s < full_s]
    if not faster:
        return full_s, list(costs)
    pooled_s = (full_s + faster[0]) / 2
    return pooled_s, [replace(cost, fixed_s=pooled_s) if cost.engine == "masked" else cost for cost in costs]


def _fits(way: Way, limit: int | None) -> bool:
    return limit is None or (way.peak_bytes is not None and way.peak_bytes <= limit)


def _chosen(ways: Sequence[Way], whole_s: float, limit: int | None) -> Way:
    """The way to take among those at one keep."""
    ways = [way for way in ways if way.gradient != ANOTHER] or ways
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
    """By keep: whether any of the ways has a gradient that may be chosen, and beats the plain step."""
    paying: dict[float, bool] = {}
    for way in ways:
        paying[way.keep] = paying.get(way.keep, False) or (way.gradient != ANOTHER and way.step_s < whole_s)
    return paying


def _agreeing(break_even: float, selecting: Sequence[Way], whole_s: float) -> float:
    """The break-even of the lines, moved to where it agrees with every keep up to the first that does not pay."""
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
    spread: float | None

    def decision(self) -> str:
        """The choice at the first keep, beside the other ways there."""
        choice, plain = self.choice, milliseconds(self.whole_s)
        at = f"keep {choice.keep:g} (K = {count_kept(choice.keep, self.num_rows)} of {self.num_rows})"
        others = "; ".join(beside(self._others(), {}))
        if not _fits(choice, self.limit):
            least = "an unknown number" if choice.peak_bytes is None else f"{choice.peak_bytes:,}"
            return f"no way fits into {self.limit:,} bytes at {at}; {choice.name} needs least, {least}"
        if choice.engine == "masked":
            over = any(
                way.keep == choice.keep and self._selects(way) and way.step_s < self.whole_s for way in self.ways
            )
            said = f"training on all rows is {'the fastest way that fits' if over else 'fastest'} "
            said += f"{f'at {at}' if self.break_even else 'here'}: the plain step takes {plain}"
            said += f", and at {at} {others}" if others and not self.break_even else f"; {others}" if others else ""
            if self.break_even == 0:
                return f"{said}; {TOO_SMALL if self.whole_s < SHORT_S else NOTHING_SAVED}"
            return f"{said}; {self._where_it_pays('selecting')}"
        than = "times as fast as" if choice.step_s < self.whole_s else "times the speed of"
        said = (
            f"{choice.name} takes {milliseconds(choice.step_s)} a step at {at}, {choice.speedup:.2f} {than} the plain "
        )
        over = "" if choice.step_s < self.whole_s else f", which does not fit into {self.limit:,} bytes"
        said += f"step's {plain}{over}" + (f"; {others}" if others else "")
        return f"{said}; {self._where_it_pays('it')}"

    @staticmethod
    def _selects(way: Way) -> bool:
        return way.engine != "masked" and way.gradient != ANOTHER

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
            return f"{subject} pays at keep {', '.join(f'{keep:g}' for keep in pays)} of those asked for"
        if round(self.break_even, 2) >= 1:
            return f"{subject} pays at any keep"
        return f"{subject} pays {'up to' if self.break_even in pays else 'below'} keep {self.break_even:.2f}"

    def set_aside(
        self, another: Mapping[str, str], policies: Mapping[str, str], left_out: Mapping[str, str]
    ) -> list[str]:
        """Which gradients are not plain indexing's, and why."""
        clauses = by_policy(self.choice.engine, policies)
        if self.choice.scorer == "half":
            clauses.append("it ranks the rows by half-size images, so that it keeps other rows than their losses would")
        for engine, why in another.items():
            ways = [way for way in self.ways if way.engine == engine and way.keep == self.choice.keep]
            for way in sorted(ways, key=lambda way: way.step_s)[:1]:
                clauses.append(f"{way.name}, {milliseconds(way.step_s)}, is not chosen: {why}")
        return [*clauses, *beside({}, left_out)]


NOTHING_SAVED = (
    "fewer rows save nothing, so look at `rowprop verify`, which lists the ops that run on all rows whatever is kept"
)


def _certainty(
    ways: Sequence[Way], rounds: int | None, spread: float | None, error: float | None, worst: float | None
) -> str:
    """How far the figures can be trusted, in a sentence."""
    if rounds is None:
        return "Nobody measured, so nothing is known of the error."
    said = f"Each step was measured {rounds} times" if rounds > 1 else "Each step was measured once"
    said += ", so their spread is unknown" if spread is None else f"; the middle half lies within {_percent(spread)}"
    selecting = [way for way in ways if way.engine != "masked"]
    beside_lines = list(dict.fromkeys(way.keep for way in selecting if way.measured_s is not None))
    if error is None or worst is None:
        return f"{said}. No keep asked for was measured, so the error of the predictions is unknown."
    where = "" if len(beside_lines) == len({way.keep for way in selecting}) else (
        f" at keep {', '.join(f'{keep:g}' for keep in beside_lines)}, and the other keeps were not measured"
    )  # fmt: skip
    return f"{said}. The predictions miss the measurements by {_percent(error)}, at most {_percent(worst)}{where}."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
