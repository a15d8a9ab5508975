"""How many rows each block keeps: a fixed share, or as few as a target for the added variance allows.

The variance that a thinning adds to a gradient is known in closed form from the rows' norms, and so is the number of
rows that would have added no more than the target. The next backwards keep this number, so nobody waits for it. The
closed form stands for the gradient of the activations. How the gradient of the parameters compares is measured now and
then, in a look.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, isfinite, log
from typing import Any, cast

from rowprop.checks import check_entries, check_whole, is_number, shown
from rowprop.errors import InvalidInput

RENEWED_AFTER = 8
"""Backwards after which the shares are renewed; sooner in the beginning, when as many have passed as before."""
MEASURED = 60, 4
"""Up to twice so many backwards the norms are measured in each, then for so many in half of them, for so many in a
third, and at the rarest in a fourth. This takes as long as a draw. The shares follow from ever more backwards, of which
about ten are measured."""
SPREAD = 0.6180339887
"""The golden ratio's part behind the point: with its multiples, backwards are chosen evenly and in no fixed rhythm. A
loop may run several backwards in each step, over several losses, and all of these must come to be measured."""
LOOKS = 2, 4, 8, 16
"""The first backwards with a look. A training changes most in its beginning. There is none before the first decision,
so the gradients of a model in which no draw pays are the exact ones, bit for bit."""
LOOK_EVERY, RARER = 20, 4
"""Afterwards one backward in so many has a look; while no rows are drawn, one in so many times as many."""
PROBED = 0.75
"""While no rows are drawn, a look asks for a draw of this share of the rows, or of a smaller one that is due."""
AROUND = 0.2, 3.0
"""The gradient at a block carries at least and at most this much of what the mean of all may carry."""
REMEMBERED = 0.15, 64
"""The shares follow from about this share of the backwards so far, and from no more than so many."""
BIASES = 0.25, 4.0
"""The bias stays between these."""
SHARES = (
    1, 0.98, 0.96, 0.93, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5,
    0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01,
)  # fmt: skip
"""Shares of the rows that arrive for which a block computes the variance that a draw would add."""
WIDEST = 64.0
"""A factor that looks tell stays between this and its reciprocal."""


_PLAIN = ("begun", "passes", "planned", "bias", "looks", "added", "predicted")


@dataclass
class Seen:
    """The numbers of one block in one backward: rows that arrived and stayed, and, from the device, some sums.

    Attributes:
        arrived: A, the rows of the gradient that arrived.
        kept: K, the rows that went on.
        rows: The rows with which the backward came to the first block of the same forward, of those to which rows
            of this kind came.
        added: The variance that was added: the sum of (1 - p) / p * norm^2.
        before: The variance that the blocks above had added, an estimate.
        total: An estimate of the sum of norm^2 over the rows of the exact gradient.
        would: The variance that each of ``SHARES`` would have added.
    """

    arrived: int
    kept: int
    rows: int = 0
    added: float = 0.0
    before: float = 0.0
    total: float = 0.0
    would: list[float] = field(default_factory=list[float])

    def read(self, numbers: Iterator[float]) -> None:
        """Take what was measured from the numbers of a device."""
        self.added, self.before, self.total = (next(numbers) for _ in range(3))
        self.would = [next(numbers) for _ in SHARES]


@dataclass
class _Share:
    """The share of the rows that a block keeps, of those that arrive at it, and the sums that it follows from.

    Batches of a larger gradient count for more, as in the variances that are compared; but a time of larger gradients,
    as the beginning of a training, does not.

    Attributes:
        keep: The share.
        now: Since it was set, the sums of squares, of ``before``, of ``added`` and of ``would``. Their unit is the
            square of the gradient, so an overflow is left out.
        past: The same of the time before, over the sum of squares then.
    """

    keep: float = 1.0
    now: list[float] = field(default_factory=lambda: [0.0] * (3 + len(SHARES)))
    past: list[float] = field(default_factory=lambda: [0.0] * (3 + len(SHARES)))

    def take(self, s: Seen) -> None:
        """Add what a backward saw."""
        numbers = [s.total, s.before, s.added, *s.would]
        if all(map(isfinite, numbers)) and s.total > 0:
            self.now = [a + b for a, b in zip(self.now, numbers, strict=True)]

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

    Attributes:
        keep: The share of every block; None where the variance is steered.
        tau: The target: added variance of the gradient over its variance between batches.
        begun: Backwards that were begun.
        passes: Backwards whose numbers were taken in.
        shares: For each block the share that it keeps of the rows that arrive at it.
        planned: What the gradient was to carry with these shares, the mean over the blocks.
        bias: What it carried over what was planned: less, where ever fewer rows hold the gradient.
        looks: Looks that the correction follows from.
        added: The variance that draws added to the gradient of the weights, a mean over the looks that forgets.
        predicted: The same as the norms predict it. Batches of a larger gradient count for more in both.
    """

    keep: float | None
    tau: float
    begun: int = 0
    passes: int = 0
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])
    planned: float = 0.0
    bias: float = 1.0
    looks: int = 0
    added: float = 0.0
    predicted: float = 0.0
    _renewed: int = 0

    def begin(self, by: int = 1) -> None:
        """Take note of a backward; with -1, that it came to no block."""
        self.begun += by

    def measures(self, number: int, often: bool = True) -> bool:
        """Whether the norms are measured in the backward with this number."""
        each, rarest = MEASURED
        return one_in(min(max(1, number // each), rarest) if often else rarest, number)

    def counts(self, number: int) -> bool:
        """Whether the work of the forwards before the backward with this number is counted."""
        return self.keep is None and (number <= RENEWED_AFTER or one_in(RENEWED_AFTER, number))

    def looks_at(self, number: int, drawn: bool = True) -> bool:
        """Whether the backward with this number is a look; it matters whether rows are ``drawn``."""
        every = LOOK_EVERY * (1 if drawn else RARER)
        return self.keep is None and (number in LOOKS or (number > LOOKS[-1] and one_in(every, number)))

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

    def update(self, seen: Mapping[str, list[Seen]], measured: bool) -> None:
        """Take in the numbers of one backward."""
        self.passes += 1
        for place, found in seen.items() if measured else ():
            for s in found:
                self.shares.setdefault(place, _Share()).take(s)
        if self.keep is None and self.passes >= self._next():
            self._renew()

    def sort(self, places: Mapping[str, object]) -> None:
        """Put the shares in the order from the input on, given the places in the order in which a gradient came."""
        here = list(reversed(list(places)))
        if [place for place in self.shares if place in places] == here:
            return
        behind: dict[str, list[str]] = {"": []}  # each of the others stays behind the place that it stood behind
        last = ""
        for place in self.shares:
            if place in places:
                last = place
            else:
                behind.setdefault(last, []).append(place)
        order = [*behind[""], *(one for place in here for one in (place, *behind.get(place, [])))]
        self.shares = {place: self.shares.get(place, _Share()) for place in order}

    def renews(self) -> bool:
        """Whether the shares are renewed when the numbers of the next backward are taken in."""
        return self.keep is None and self.passes + 1 >= self._next()

    def _next(self) -> int:
        return min(2 * self._renewed, self._renewed + RENEWED_AFTER)

    def _renew(self) -> None:
        """Set the shares so that the mean over the blocks of what the gradient carries is the allowed variance."""
        share, most = REMEMBERED
        part = min(1.0, (self.passes - self._renewed) / min(share * self.passes, most))
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
        low, high = (aimed * least for least in AROUND)
        for _ in range(12):
            middle = (low * high) ** 0.5
            enough = sum(carries for _, carries in _planned(past, middle)) < aimed * len(found)
            low, high = (middle, high) if enough else (low, middle)
        plan = _planned(past, low)
        for each, (keep, _) in zip(found, plan, strict=True):
            each.keep = keep
        self.planned = sum(carries for _, carries in plan) / (len(plan) or 1)
        self._renewed = self.passes

    def learn(self, added: float, between: float, predicted: float) -> None:
        """Take in what a look saw.

        Args:
            added: The variance that the draws added to the gradient of the weights.
            between: The variance of this gradient between batches.
            predicted: The ratio of both that the norms predict.
        """
        expected = predicted * between
        if isfinite(added) and isfinite(expected) and added > 0 and expected > 0:  # no overflow, and a draw
            self.looks += 1
            part = gain(self.looks)
            self.added += part * (added - self.added)
            self.predicted += part * (expected - self.predicted)

    def reason(self) -> str:
        """Why the shares are what they are, in a sentence."""
        if self.keep is not None:
            return f"keep={self.keep:g} at every block"
        looks = f"corrected by {self.correction:.2g} after {self.looks} looks"
        return f"tau={self.tau:g}: a gradient may carry {self.allowed():.2g} of its rows' sum of squares; {looks}"

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        shares = {place: [s.keep, *s.now, *s.past] for place, s in self.shares.items()}
        return {**plain, "renewed": self._renewed, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that ``state_dict()`` returned."""
        check_entries(OWNER, state, [*_PLAIN, "renewed", "shares"])
        check_counts(state, "begun", "passes", "renewed", "looks")
        check_amounts(state, "bias", positive=True)
        check_amounts(state, "planned", "added", "predicted")
        shares = checked_shares(state, 7 + 2 * len(SHARES))
        for name in _PLAIN:
            setattr(self, name, state[name])
        self._renewed = state["renewed"]
        self.shares = {
            place: _Share(numbers[0], numbers[1 : 4 + len(SHARES)], numbers[4 + len(SHARES) :])
            for place, numbers in shares.items()
        }


def _planned(seen: Sequence[Sequence[float]], most: float) -> list[tuple[float, float]]:
    """For each block, from the output on, a share, and what the gradient below it would carry.

    Args:
        seen: For each block ``before``, ``added`` and ``would``, as shares of the sum of norm^2.
        most: What the gradient may carry, as such a share.
    """
    plan: list[tuple[float, float]] = []
    change = 0.0  # in what arrives, by the new share of the block above
    for before, added, *would in seen:
        arrives = max(0.0, before + change)
        keep, adds = _smallest(would, most - arrives)
        change = arrives + adds - before - added
        plan.append((keep, arrives + adds))
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


def moved(factor: float, seen: float, looks: int) -> float:
    """A factor after so many looks, of which the last one saw ``seen``: a mean in the log, that forgets."""
    here, before = max(-log(WIDEST), min(log(WIDEST), log(seen))), log(factor)
    return exp(before + (here - before) * gain(looks))


def gain(looks: int) -> float:
    """The share of the last one of so many looks in a mean that forgets, and the slower the more there were."""
    return (looks + 0.5) ** -0.4 if looks > 1 else 1.0


def one_in(every: int, number: int) -> bool:
    """Whether a number is the chosen one of so many; see ``SPREAD``."""
    return number * SPREAD % 1 < 1 / every


def count_of(share: float, rows: int, step: int) -> int:
    """How many rows, or pairs, a share of them is, in steps of ``step``; at least 1."""
    return step * max(1, ceil(share * rows / step - 1e-9))


OWNER = "Thinning.load_state_dict"


def check_counts(state: Mapping[str, Any], *names: str) -> None:
    """Refuse a saved state in which one of these is no count."""
    for name in names:
        check_whole(OWNER, name, state[name], 0)


def check_amounts(state: Mapping[str, Any], *names: str, positive: bool = False) -> None:
    """Refuse a saved state in which one of these is no number, or negative; if they are to be ``positive``, or 0."""
    for name in names:
        if not is_number(state[name]) or state[name] < 0 or (positive and not state[name]):
            needed = "a positive number" if positive else "a number of 0 or more"
            raise InvalidInput(f"{OWNER} got {name}={shown(state[name])} but {needed} was needed.")


def checked_shares(state: Mapping[str, Any], width: int, name: str = "shares") -> dict[str, list[float]]:
    """The shares of a saved state: for each place so many numbers, of which none is negative."""
    shares: object = state[name]
    if isinstance(shares, Mapping):
        places = cast("Mapping[object, object]", shares)
        if all(isinstance(place, str) and _are_numbers(held, width) for place, held in places.items()):
            return {place: list(map(float, held)) for place, held in cast("dict[str, list[float]]", shares).items()}
    raise InvalidInput(
        f"{OWNER} got {name}={shown(state[name])} but {width} numbers of 0 or more for each block were needed; "
        "save and load the state whole."
    )


def _are_numbers(held: object, count: int) -> bool:
    if not isinstance(held, (list, tuple)) or len(cast("list[object]", held)) != count:
        return False
    return all(
        isinstance(one, bool) or (is_number(one) and cast(float, one) >= 0) for one in cast("list[object]", held)
    )


def carried(seen: Mapping[str, list[Seen]]) -> float:
    """The ratio of the two variances that a backward's norms predict: the mean over the blocks of what each carries."""
    found = [(sum(s.added + s.before for s in each), sum(s.total for s in each)) for each in seen.values()]
    return sum(added / total if total else 0.0 for added, total in found) / (len(found) or 1)
