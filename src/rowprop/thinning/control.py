"""How many rows each block keeps: a fixed share, or as few as a target for the added variance allows.

The variance that a draw would add to a gradient follows from the rows' norms, and the shares of the next backwards from
it, so nobody waits. How the gradient of the parameters compares is measured now and then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import ceil, isfinite
from typing import Any, Literal

from torch import Tensor

from rowprop.checks import check_whole, is_number, shown
from rowprop.errors import InvalidInput

RENEWED_AFTER = 8  # backwards between two updates of the shares; early on, the interval doubles up to this
# Norms are measured in each of the first 120 backwards, then in every second for 60, in every third for 60, and from
# then on in every fourth. A measurement costs as much as a draw. The shares depend on ever more backwards, of which
# about ten are measured.
NORMS = 60, 4
# The fractional part of the golden ratio: its multiples choose backwards evenly but not periodically. A loop may run
# several backwards in each step, for several losses, and each of these must be measured at times.
SPREAD = 0.6180339887
# The first backwards whose weight gradients are measured: training changes most at the start. All come after the first
# decision, so a model in which no draw pays gets bitwise exact gradients.
FIRST = 2, 4, 8, 16
EVERY, RARER = 20, 4  # then every 20th backward; every 80th while no rows are drawn
PRICES = 1e-4, 1e4  # bounds of a share's price, as multiples of the allowed variance, see _planned_apart
AROUND = 0.2, 3.0  # bounds of the variance at a block, as multiples of the allowed mean
REMEMBERED = 0.15, 64  # the shares depend on about this share of all backwards so far, and at most this many
BIASES = 0.25, 4.0  # bounds of the bias
# Shares of the rows that arrive for which a block computes the variance that a draw would add.
SHARES = (
    1, 0.98, 0.96, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5,
    0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01,
)  # fmt: skip
OWNER = "Thinning.load_state_dict"
EACH = "*"  # in the form of a saved state: matches entries of any name
WIDEST = 64.0  # a measured factor is clamped between this and its reciprocal


@dataclass
class Seen:
    """One block in one backward."""

    arrived: int  # A, the rows of the gradient that arrived
    kept: int  # K, the rows that were passed on
    rows: int = 0  # number of rows at the first block of the same forward
    numbers: Tensor | None = None  # the sums below, on the device; None if they are not measured in this backward
    total: float = 0.0  # an estimate of the sum of norm^2 over the rows of the exact gradient
    before: float = 0.0  # an estimate of the variance that the blocks above added
    added: float = 0.0  # the variance that was added: the sum of (1 - p) / p * norm^2
    would: list[float] = field(default_factory=list[float])  # the variance that each of ``SHARES`` would have added

    def read(self, numbers: Iterator[float]) -> None:
        """Store the sums from the host."""
        self.total, self.before, self.added, *self.would = islice(numbers, 3 + len(SHARES))


@dataclass
class _Share:
    """The share of the arriving rows that a block keeps, and the sums that determine it.

    Batches with larger gradients count more, as in the variances that are compared; a phase with larger gradients, such
    as the start of training, does not.
    """

    keep: float = 1.0
    # ``now``: sums of ``total``, ``before``, ``added`` and ``would`` since the last update. ``past``: the earlier sums,
    # divided by their ``total``. The unit is the squared gradient; overflows are skipped.
    now: list[float] = field(default_factory=lambda: [0.0] * (3 + len(SHARES)))
    past: list[float] = field(default_factory=lambda: [0.0] * (3 + len(SHARES)))

    def fade(self, part: float) -> None:
        """Merge ``now`` into ``past`` with this weight."""
        if self.now[0]:
            weight = part if self.past[0] else 1.0
            self.past = [a + weight * (b / self.now[0] - a) for a, b in zip(self.past, self.now, strict=True)]
            self.now = [0.0] * len(self.now)


@dataclass
class Control:
    """Sets the shares of the blocks.

    The allowed variance is the same at every block, relative to the sum of norm^2 there: ``tau / correction``. It
    includes the variance added by the blocks above, so a lower block thins further only if fewer rows hold its
    gradient. Nearly all draws are therefore at the top, where a dropped row saves work in all blocks below.
    """

    keep: float | None  # the share of every block; None: controlled by ``tau``
    tau: float  # the target: added variance of the gradient over its variance between batches
    unit: Literal["row", "token"] = "row"  # what is drawn
    begun: int = 0  # backwards that were begun
    passes: int = 0  # backwards whose numbers were read
    renewed: int = 0  # ``passes`` at the last update of the shares
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])  # of the blocks, from the input on
    planned: float = 0.0  # planned variance with these shares, the mean over the blocks
    bias: float = 1.0  # actual over planned variance; below 1 while ever fewer rows hold the gradient
    measured: int = 0  # number of weight gradient measurements in the correction
    # Moving averages of the variance that draws added to the weight gradients, as measured and as predicted from the
    # norms. Batches with larger gradients count more in both.
    added: float = 0.0
    predicted: float = 0.0

    def measures_norms(self, number: int, often: bool = True) -> bool:
        """Whether the norms are measured in the backward with this number."""
        each, rarest = NORMS
        return one_in(min(max(1, number // each), rarest) if often else rarest, number)

    def measures_weights(self, number: int, drawn: bool = True) -> bool:
        """Whether the weight gradients are measured in this backward; more rarely if no rows are ``drawn``."""
        every = EVERY * (1 if drawn else RARER)
        steered = self.keep is None and self.unit == "row"  # a token's part of the weight gradient is unknown
        return steered and (number in FIRST or (number > FIRST[-1] and one_in(every, number)))

    def counts(self, number: int) -> bool:
        """Whether the work of the forwards before this backward is counted."""
        return self.keep is None and (number <= RENEWED_AFTER or one_in(RENEWED_AFTER, number))

    def share(self, place: str) -> float:
        """The share of rows that a block keeps, in (0, 1]: of all rows with ``keep``, else of the arriving ones."""
        return self.keep if self.keep is not None else self.shares.setdefault(place, _Share()).keep

    @property
    def correction(self) -> float:
        """The measured variance ratio in the parameters over the ratio predicted from the norms."""
        return min(WIDEST, max(1 / WIDEST, self.added / self.predicted)) if self.predicted else 1.0

    def allowed(self) -> float:
        """The allowed variance of the gradient at a block, as a share of the sum of norm^2 there."""
        return self.tau / self.correction

    def update(self, seen: Mapping[str, list[Seen]]) -> bool:
        """Add one backward's measurements, in the order of its blocks; returns whether the shares were updated."""
        self._sort(seen)
        self.passes += 1
        for place, found in seen.items():
            share = self.shares[place]
            for s in found:
                numbers = [s.total, s.before, s.added, *s.would]
                if s.would and s.total > 0 and all(map(isfinite, numbers)):
                    share.now = [a + b for a, b in zip(share.now, numbers, strict=True)]
        renews = self.keep is None and self.passes >= min(2 * self.renewed, self.renewed + RENEWED_AFTER)
        if renews:
            self._renew()
        return renews

    def _sort(self, places: Mapping[str, object]) -> None:
        """Order the shares from the input on, given the blocks in the order of a backward."""
        behind = defaultdict[str, list[str]](list)  # a block not among these keeps its predecessor
        last = ""
        for place in self.shares:
            if place in places:
                last = place
            else:
                behind[last].append(place)
        order = [*behind[""], *(one for place in reversed(list(places)) for one in (place, *behind[place]))]
        self.shares = {place: self.shares.get(place, _Share()) for place in order}

    def _renew(self) -> None:
        """Set the shares so that the mean variance over the blocks is the allowed one."""
        share, most = REMEMBERED
        part = min(1.0, (self.passes - self.renewed) / min(share * self.passes, most))
        seen = [each.now for each in self.shares.values() if each.now[0]]
        came = sum((now[1] + now[2]) / now[0] for now in seen) / (len(seen) or 1)
        if came > 0 and self.planned > 0:
            bias = self.bias + part * (came / self.planned - self.bias)
            self.bias = min(BIASES[1], max(bias, BIASES[0]))
        for each in self.shares.values():
            each.fade(part)
        found = [each for each in reversed(self.shares.values()) if each.past[0]]  # from the output on
        past = [each.past[1:] for each in found]
        aimed = self.allowed() / self.bias
        plans, (low, high) = (_planned, AROUND) if self.unit == "row" else (_planned_apart, PRICES)
        low, high = aimed * low, aimed * high
        for _ in range(12 if self.unit == "row" else 30):
            middle = (low * high) ** 0.5
            enough = sum(carries for _, carries in plans(past, middle)) < aimed * len(found)
            low, high = (middle, high) if enough else (low, middle)
        plan = plans(past, low)
        for each, (keep, _) in zip(found, plan, strict=True):
            each.keep = keep
        self.planned = sum(carries for _, carries in plan) / (len(plan) or 1)
        self.renewed = self.passes

    def learn(self, added: float, between: float, predicted: float) -> None:
        """Add measured variances of the weight gradients, by draws and between batches, and their predicted ratio."""
        expected = predicted * between
        if isfinite(added) and isfinite(expected) and added > 0 and expected > 0:  # no overflow, and a draw
            self.measured += 1
            part = gain(self.measured)
            self.added += part * (added - self.added)
            self.predicted += part * (expected - self.predicted)

    def reason(self) -> str:
        """Why the shares are what they are, in a sentence."""
        if self.keep is not None:
            return f"keep={self.keep:g} at every block"
        few = f"as few {self.unit}s as add {100 * self.tau:g} % to the gradient's variance between batches"
        return f"tau={self.tau:g}: {few}"

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next shares depend on, in plain numbers."""
        return {name: held for name, held in asdict(self).items() if name not in ("keep", "tau", "unit")}

    def restored(self, state: Any) -> Control:
        """The control with a saved state."""
        form = Control(None, 0.0).state_dict() | {"shares": {EACH: asdict(_Share())}}
        check_form("control", state, form)
        shares = {place: _Share(**share) for place, share in state["shares"].items()}
        return replace(self, **state | {"shares": shares})


def _planned(seen: Sequence[Sequence[float]], most: float) -> list[tuple[float, float]]:
    """For each block, from the output on: its share, and the variance below it, at most ``most``."""
    plan: list[tuple[float, float]] = []
    change = 0.0  # of the arriving variance, due to the new share of the block above
    for before, added, *would in seen:  # as shares of the sum of norm^2
        arrives = max(0.0, before + change)
        keep, adds = _smallest(would, most - arrives)
        change = arrives + adds - before - added
        plan.append((keep, arrives + adds))
    return plan


def _planned_apart(seen: Sequence[Sequence[float]], price: float) -> list[tuple[float, float]]:
    """The same for tokens: attention mixes them again, so each block draws separately from all tokens.

    Each block keeps the share that minimises ``price * share + below * added``; ``below`` is the fraction of blocks
    that the added variance affects: this one and those below it. A higher price keeps fewer tokens.
    """
    plan: list[tuple[float, float]] = []
    carries = 0.0
    for number, (_, _, *would) in enumerate(seen):
        below = 1 - number / len(seen)
        costs = [price * share + below * adds for share, adds in zip(SHARES, would, strict=True)]
        best = costs.index(min(costs))
        carries += would[best]
        plan.append((SHARES[best], carries))
    return plan


def _smallest(would: Sequence[float], variance: float) -> tuple[float, float]:
    """The smallest share, interpolated in ``SHARES``, that adds at most ``variance``, and the variance that it adds."""
    after = bisect_right(would, variance)  # index in SHARES, which decrease
    if after == 0:
        return 1.0, would[0]
    if after == len(SHARES):
        return SHARES[-1], would[-1]
    part = (variance - would[after - 1]) / (would[after] - would[after - 1])
    return SHARES[after - 1] + part * (SHARES[after] - SHARES[after - 1]), variance


def carry(seen: Mapping[str, list[Seen]]) -> None:
    """Estimate the variance that draws above each block added, if the gradient does not show it.

    Below an attention the weights of the drawn tokens are lost. The relative added variance is assumed to be that of
    the block above.
    """
    carries = 0.0
    for found in seen.values():
        for one in found:
            if not one.before:
                one.before = one.total * carries / (1 + carries)
                one.total -= one.before
        total = sum(one.total for one in found)
        carries = sum(one.before + one.added for one in found) / total if total else carries


def carried(seen: Mapping[str, list[Seen]]) -> float:
    """The variance ratio predicted from a backward's norms: the mean over its blocks."""
    found = [(sum(s.added + s.before for s in each), sum(s.total for s in each)) for each in seen.values()]
    return sum(added / total if total else 0.0 for added, total in found) / (len(found) or 1)


def gain(times: int) -> float:
    """The weight of the newest of ``times`` numbers in a moving average; it falls with ``times``."""
    return (times + 0.5) ** -0.4 if times > 1 else 1.0


def one_in(every: int, number: int) -> bool:
    """Whether ``number`` is among the one in ``every`` that are chosen; see ``SPREAD``."""
    return number * SPREAD % 1 < 1 / every


def count_of(share: float, rows: int, step: int) -> int:
    """The number of rows in a share of ``rows``, rounded up to a multiple of ``step``; at least ``step``."""
    return step * max(1, ceil(share * rows / step - 1e-9))


# --- saved states -----------------------------------------------------------------------------------------------------


def check_form(name: str, value: Any, form: Any) -> None:
    """Refuse a part of a saved state that has a different form.

    A form is a mapping or a list of forms; True for a flag; an integer for a count; a number for numbers of 0 or more;
    and a positive number for positive ones.
    """
    kind, same = type(form).__name__, type(value) is type(form)
    if kind == "dict":
        if not same or not (EACH in form or set(value) == set(form)):
            raise _refused(name, value, f"a mapping with {', '.join(form)}")
        for key, held in value.items():
            check_form(f"{name}.{key}", held, form.get(EACH, form.get(key)))
    elif kind == "list":
        if not same or len(value) != len(form):
            raise _refused(name, value, f"a list of {len(form)} numbers")
        for one, like in zip(value, form, strict=True):
            check_form(name, one, like)
    elif kind == "bool":
        if not same:
            raise _refused(name, value, "True or False")
    elif kind == "int":
        check_whole(OWNER, name, value, 0)
    elif not is_number(value) or value < 0 or (form and not value):
        raise _refused(name, value, "a positive number" if form else "a number of 0 or more")


def _refused(name: str, value: object, needed: str) -> InvalidInput:
    return InvalidInput(f"{OWNER} got {name}={shown(value)} but {needed} was needed; save and load the state whole.")
