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

RENEWED_AFTER = 8  # backwards after which the shares are renewed; in the beginning when as many have passed as before
# Up to twice so many backwards the norms are measured in each, then for so many in half of them, for so many in a
# third, and at the rarest in a fourth. This takes as long as a draw. The shares follow from ever more backwards, of
# which about ten are measured.
NORMS = 60, 4
# The golden ratio's part behind the point: with its multiples, backwards are chosen evenly and in no fixed rhythm. A
# loop may run several backwards in each step, over several losses, and all of these must come to be measured.
SPREAD = 0.6180339887
# The first backwards whose weight gradients are measured. A training changes most in its beginning. None is before the
# first decision, so the gradients of a model in which no draw pays are the exact ones, bit for bit.
FIRST = 2, 4, 8, 16
EVERY, RARER = 20, 4  # afterwards one backward in so many; while no rows are drawn, one in so many times as many
PRICES = 1e-4, 1e4  # between these times the allowed variance lies the price of a share, see _planned_apart
AROUND = 0.2, 3.0  # the gradient at a block carries at least and at most this much of what the mean of all may carry
REMEMBERED = 0.15, 64  # the shares follow from about this share of the backwards so far, and from no more than so many
BIASES = 0.25, 4.0  # the bias stays between these
# Shares of the rows that arrive for which a block computes the variance that a draw would add.
SHARES = (
    1, 0.98, 0.96, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5,
    0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01,
)  # fmt: skip
OWNER = "Thinning.load_state_dict"
EACH = "*"  # in the form of a saved state: the form of all entries, whatever their names
WIDEST = 64.0  # a factor that measurements tell stays between this and its reciprocal


@dataclass
class Seen:
    """One block in one backward."""

    arrived: int  # A, the rows of the gradient that arrived
    kept: int  # K, the rows that went on
    rows: int = 0  # with which the backward came to the first block of the same forward
    numbers: Tensor | None = None  # the sums below, on the device; None if they are not measured in this backward
    total: float = 0.0  # an estimate of the sum of norm^2 over the rows of the exact gradient
    before: float = 0.0  # the variance that the blocks above had added, an estimate
    added: float = 0.0  # the variance that was added: the sum of (1 - p) / p * norm^2
    would: list[float] = field(default_factory=list[float])  # the variance that each of ``SHARES`` would have added

    def read(self, numbers: Iterator[float]) -> None:
        """Take the sums, once they are on the host."""
        self.total, self.before, self.added, *self.would = islice(numbers, 3 + len(SHARES))


@dataclass
class _Share:
    """The share of the rows that a block keeps, of those that arrive at it, and the sums that it follows from.

    Batches of a larger gradient count for more, as in the variances that are compared; but a time of larger gradients,
    as the beginning of a training, does not.
    """

    keep: float = 1.0
    # Since it was set, the sums of ``total``, ``before``, ``added`` and ``would``, and the same of the time before,
    # over the sum of ``total`` then. The unit is the square of the gradient, so an overflow is left out.
    now: list[float] = field(default_factory=lambda: [0.0] * (3 + len(SHARES)))
    past: list[float] = field(default_factory=lambda: [0.0] * (3 + len(SHARES)))

    def fade(self, part: float) -> None:
        """Let what was seen be a part of the past."""
        if self.now[0]:
            weight = part if self.past[0] else 1.0
            self.past = [a + weight * (b / self.now[0] - a) for a, b in zip(self.past, self.now, strict=True)]
            self.now = [0.0] * len(self.now)


@dataclass
class Control:
    """Sets the shares of the blocks.

    At every block the gradient may carry the same variance, as a share of the sum of norm^2 there: ``tau``, over the
    correction. The variance that the blocks above have added counts, so a block below thins further only where its
    gradient lies in fewer rows. So nearly all draws are at the top, where rows that leave save in all blocks below.
    """

    keep: float | None  # the share of every block; None where the variance is steered
    tau: float  # the target: added variance of the gradient over its variance between batches
    unit: Literal["row", "token"] = "row"  # what is drawn
    begun: int = 0  # backwards that were begun
    passes: int = 0  # backwards whose numbers were taken in
    renewed: int = 0  # ``passes`` when the shares were set last
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])  # of the blocks, from the input on
    planned: float = 0.0  # what the gradient was to carry with these shares, the mean over the blocks
    bias: float = 1.0  # what it carried over what was planned: less, where ever fewer rows hold the gradient
    measured: int = 0  # measurements of weight gradients that the correction follows from
    # The variance that draws added to the gradient of the weights, a mean over these that forgets, and the same as the
    # norms predict it. Batches of a larger gradient count for more in both.
    added: float = 0.0
    predicted: float = 0.0

    def measures_norms(self, number: int, often: bool = True) -> bool:
        """Whether the norms are measured in the backward with this number."""
        each, rarest = NORMS
        return one_in(min(max(1, number // each), rarest) if often else rarest, number)

    def measures_weights(self, number: int, drawn: bool = True) -> bool:
        """Whether the weight gradients are measured in this backward; it matters whether rows are ``drawn``."""
        every = EVERY * (1 if drawn else RARER)
        steered = self.keep is None and self.unit == "row"  # a token's part in a row's weight gradient is not known
        return steered and (number in FIRST or (number > FIRST[-1] and one_in(every, number)))

    def counts(self, number: int) -> bool:
        """Whether the work of the forwards before this backward is counted."""
        return self.keep is None and (number <= RENEWED_AFTER or one_in(RENEWED_AFTER, number))

    def share(self, place: str) -> float:
        """The share of the rows that a block keeps, in (0, 1]: with ``keep`` of a backward's, else of the arriving."""
        return self.keep if self.keep is not None else self.shares.setdefault(place, _Share()).keep

    @property
    def correction(self) -> float:
        """The true ratio of the two variances in the parameters over the ratio predicted from the norms."""
        return min(WIDEST, max(1 / WIDEST, self.added / self.predicted)) if self.predicted else 1.0

    def allowed(self) -> float:
        """The variance that the gradient of any block may carry, as a share of the sum of norm^2 there."""
        return self.tau / self.correction

    def update(self, seen: Mapping[str, list[Seen]]) -> bool:
        """Take in what the blocks saw in one backward, in the order in which it came; whether the shares are new."""
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
        """Put the shares in the order from the input on, given the places in the order in which a gradient came."""
        behind = defaultdict[str, list[str]](list)  # each of the others stays behind the place that it stood behind
        last = ""
        for place in self.shares:
            if place in places:
                last = place
            else:
                behind[last].append(place)
        order = [*behind[""], *(one for place in reversed(list(places)) for one in (place, *behind[place]))]
        self.shares = {place: self.shares.get(place, _Share()) for place in order}

    def _renew(self) -> None:
        """Set the shares so that the mean over the blocks of what the gradient carries is the allowed variance."""
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
        """Take in the variances of the weight gradients, by draws and between batches, and their predicted ratio."""
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
        """All that the next shares follow from, in plain numbers."""
        return {name: held for name, held in asdict(self).items() if name not in ("keep", "tau", "unit")}

    def restored(self, state: Any) -> Control:
        """The control with a saved state."""
        form = Control(None, 0.0).state_dict() | {"shares": {EACH: asdict(_Share())}}
        check_form("control", state, form)
        shares = {place: _Share(**share) for place, share in state["shares"].items()}
        return replace(self, **state | {"shares": shares})


def _planned(seen: Sequence[Sequence[float]], most: float) -> list[tuple[float, float]]:
    """For each block, from the output on, a share, and what the gradient below it would carry, at most ``most``."""
    plan: list[tuple[float, float]] = []
    change = 0.0  # in what arrives, by the new share of the block above
    for before, added, *would in seen:  # as shares of the sum of norm^2
        arrives = max(0.0, before + change)
        keep, adds = _smallest(would, most - arrives)
        change = arrives + adds - before - added
        plan.append((keep, arrives + adds))
    return plan


def _planned_apart(seen: Sequence[Sequence[float]], price: float) -> list[tuple[float, float]]:
    """The same where attention mixes the tokens again, so that each block draws for itself from all of them.

    Each block keeps the share for which ``price * share + below * added`` is least: what a draw adds is carried by the
    part ``below`` of the blocks, its own and those under it. A higher price keeps fewer tokens.
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
    """The smallest share that adds no more than a variance, between those of ``SHARES``, and what it adds."""
    after = bisect_right(would, variance)  # in SHARES, that fall
    if after == 0:
        return 1.0, would[0]
    if after == len(SHARES):
        return SHARES[-1], would[-1]
    part = (variance - would[after - 1]) / (would[after] - would[after - 1])
    return SHARES[after - 1] + part * (SHARES[after] - SHARES[after - 1]), variance


def carry(seen: Mapping[str, list[Seen]]) -> None:
    """Estimate what the draws above each block added to its gradient, where the gradient does not show it.

    Below an attention the weights of the drawn tokens are lost. The added variance, as a share, is taken to be the one
    that the block above handed on.
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
    """The ratio of the two variances that a backward's norms predict: the mean over the blocks of what each carries."""
    found = [(sum(s.added + s.before for s in each), sum(s.total for s in each)) for each in seen.values()]
    return sum(added / total if total else 0.0 for added, total in found) / (len(found) or 1)


def gain(times: int) -> float:
    """The share of the last one of so many numbers in a mean that forgets, and the slower the more there were."""
    return (times + 0.5) ** -0.4 if times > 1 else 1.0


def one_in(every: int, number: int) -> bool:
    """Whether a number is the chosen one of so many; see ``SPREAD``."""
    return number * SPREAD % 1 < 1 / every


def count_of(share: float, rows: int, step: int) -> int:
    """How many rows a share of them is, in steps of ``step``; at least 1."""
    return step * max(1, ceil(share * rows / step - 1e-9))


# --- saved states -----------------------------------------------------------------------------------------------------


def check_form(name: str, value: Any, form: Any) -> None:
    """Refuse a part of a saved state that has another form.

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
