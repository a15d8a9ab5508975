"""How many rows each block keeps: a fixed share, or as few as a bound on the added variance allows.

The variance that a thinning adds to a gradient is known in closed form from the rows' norms, and so is the number of
rows that would have added no more than the bound. The next backwards keep this number, so nobody waits for it. The
closed form stands for the gradient of the activations. How the gradient of the parameters compares is measured now and
then, in a look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp, inf, isfinite, log
from typing import Any, cast

from rowprop.checks import check_entries, check_whole, is_number, shown
from rowprop.errors import InvalidInput

RENEWED_AFTER = 16
"""Backwards after which the shares are renewed; sooner in the beginning, when as many have passed as before."""
MEASURED_EVERY = 4
"""After the first renewals the norms are measured at every so many backwards: this takes longer than the draw."""
LOOKS = (10, 20, 40, 80, 120)
"""The first backwards with a look."""
LOOK_EVERY = 160
"""Later ones. A look takes about as long as a step, so all looks take less than 2 % of a training's time."""
PROBED = 0.75
"""A look keeps at most this share of the rows: where nearly all are kept it would see little variance, or none."""
REMEMBERED = 6
"""Looks that the correction is a mean of, about."""
GAINS = 0.2, 3.0
"""The gain stays between these."""
WIDEST = 16.0
"""The correction stays between this and its reciprocal."""


_PLAIN = ("begun", "passes", "correction", "gain", "looks", "blind")


@dataclass
class Seen:
    """The numbers of one block in one backward: rows that arrived and stayed, and, from the device, four sums.

    Attributes:
        arrived: A, the rows of the gradient that arrived.
        kept: K, the rows that went on.
        rows: The rows with which the backward came to the first block of the same forward, of those to which rows
            of this kind came.
        needed: Rows that would have added no more variance than allowed.
        added: The variance that was added: the sum of (1 - p) / p * norm^2.
        before: The variance that the blocks above had added, an estimate.
        total: An estimate of the sum of norm^2 over the rows of the exact gradient.
    """

    arrived: int
    kept: int
    rows: int = 0
    needed: float = 0.0
    added: float = 0.0
    before: float = 0.0
    total: float = 0.0


@dataclass
class _Share:
    """The share of rows that a block keeps, and the sums since it was set.

    Batches of a larger gradient count for more, as in the variances that are compared. The unit of all sums is the
    square of the gradient, so an overflow is left out.
    """

    keep: float = 1.0
    needed: float = 0.0
    squares: float = 0.0  # of the gradient handed on: the total and the variance that it carries
    total: float = 0.0


@dataclass
class Control:
    """Sets the shares of the blocks.

    At every block the gradient may carry the same variance, as a share of the sum of norm^2 there: ``tau``, over the
    correction. The variance that the blocks above have added counts, so a block below thins further only where its
    gradient lies in fewer rows. This spends the whole bound at the top, where rows that leave save in all blocks below.

    Attributes:
        keep: The share of every block; None where the variance is bounded.
        tau: The bound: added variance of the gradient over its variance between batches.
        begun: Backwards that were begun.
        passes: Backwards whose numbers were taken in.
        shares: For each block the share that it keeps.
        correction: The true ratio of the two variances in the parameters over the ratio predicted from the norms.
        gain: What the allowed variance is multiplied by, so that it is the one that comes out: batches differ, and
            rows that a block above has left out are missing below.
        looks: Looks that the correction follows from.
        blind: Why there are no looks, a sentence; None if there are.
    """

    keep: float | None
    tau: float
    begun: int = 0
    passes: int = 0
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])
    correction: float = 1.0
    gain: float = 1.0
    looks: int = 0
    blind: str | None = None
    _renewed: int = 0

    def expect(self, place: str) -> None:
        """Take note of a block to which a gradient may come."""
        self.shares.setdefault(place, _Share())

    def begin(self) -> None:
        """Take note of a backward."""
        self.begun += 1

    def measures(self) -> bool:
        """Whether the norms are measured in the backward that was begun last."""
        return self.begun <= 2 * RENEWED_AFTER or self.begun % MEASURED_EVERY == 0

    def looks_now(self) -> bool:
        """Whether there is a look in the backward that was begun last."""
        due = self.begun in LOOKS or self.begun % LOOK_EVERY == 0
        return due and self.keep is None and self.blind is None

    def share(self, place: str) -> float:
        """The share of a backward's rows that a block keeps, in (0, 1]."""
        return self.keep if self.keep is not None else self.shares.setdefault(place, _Share()).keep

    def count(self, place: str, rows: int, step: int, most: float = 1.0) -> int:
        """K, of the ``rows`` with which the backward came to the first block, in steps of ``step``; at least 1."""
        return count_of(min(self.share(place), most), rows, step)

    def allowed(self) -> float:
        """The variance that the gradient of any block may carry, as a share of the sum of norm^2 there."""
        return self.tau / self.correction

    def aimed(self) -> float:
        """The variance that the rows needed are computed for, so that ``allowed()`` comes out."""
        return self.allowed() * self.gain

    def update(self, seen: Mapping[str, list[Seen]], measured: bool) -> None:
        """Take in the numbers of one backward."""
        self.passes += 1
        for place, found in seen.items() if measured else ():
            share = self.shares.setdefault(place, _Share())
            for s in found:
                if isfinite(s.needed) and 0 < s.total < inf and isfinite(s.added + s.before):
                    share.needed += s.needed / s.rows * s.total
                    share.total += s.total
                    share.squares += s.total + s.before + s.added
        if self.keep is None and self.passes >= min(2 * self._renewed, self._renewed + RENEWED_AFTER):
            self._renew()

    def _renew(self) -> None:
        found = [share for share in self.shares.values() if share.total]
        carries = sum(share.squares / share.total - 1 for share in found) / (len(found) or 1)
        if carries > 0:
            off = self.allowed() / carries
            self.gain = min(GAINS[1], max(self.gain * min(2.0, max(off, 0.5)) ** 0.5, GAINS[0]))
        for share in found:
            share.keep = min(1.0, max(share.needed / share.total, 1e-9))
            share.needed = share.squares = share.total = 0.0
        self._renewed = self.passes

    def learn(self, true: float, predicted: float) -> None:
        """Take in what a look saw: the true ratio of the two variances, and the predicted one."""
        if not (isfinite(true) and isfinite(predicted) and true > 0 and predicted > 0):
            return  # an overflow, or no row left
        self.looks += 1
        here = max(-log(WIDEST), min(log(WIDEST), log(true / predicted)))
        before = log(self.correction)
        weight = 1 / min(self.looks + 0.5, REMEMBERED)  # the prediction itself counts as half a look
        self.correction = exp(before + (here - before) * weight)

    def reason(self) -> str:
        """Why the shares are what they are, in a sentence."""
        if self.keep is not None:
            return f"keep={self.keep:g} at every block"
        looks = self.blind or f"corrected by {self.correction:.2g} after {self.looks} looks"
        return f"tau={self.tau:g}: a gradient may carry {self.allowed():.2g} of its rows' sum of squares; {looks}"

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        shares = {place: [s.keep, s.needed, s.squares, s.total] for place, s in self.shares.items()}
        return {**plain, "renewed": self._renewed, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that ``state_dict()`` returned."""
        check_entries(OWNER, state, [*_PLAIN, "renewed", "shares"])
        check_counts(state, "begun", "passes", "renewed", "looks")
        for name in ("correction", "gain"):
            if not is_number(state[name]) or state[name] <= 0:
                raise InvalidInput(f"{OWNER} got {name}={shown(state[name])} but a positive number was needed.")
        if not isinstance(state["blind"], (str, type(None))):
            raise InvalidInput(f"{OWNER} got blind={shown(state['blind'])} but a sentence or None was needed.")
        shares = checked_shares(state, 4)
        for name in _PLAIN:
            setattr(self, name, state[name])
        self._renewed = state["renewed"]
        self.shares = {place: _Share(*numbers) for place, numbers in shares.items()}


def count_of(share: float, rows: int, step: int) -> int:
    """How many rows, or pairs, a share of them is, in steps of ``step``; at least 1."""
    return step * max(1, ceil(share * rows / step - 1e-9))


OWNER = "Thinning.load_state_dict"


def check_counts(state: Mapping[str, Any], *names: str) -> None:
    """Refuse a saved state in which one of these is no count."""
    for name in names:
        check_whole(OWNER, name, state[name], 0)


def checked_shares(state: Mapping[str, Any], width: int) -> dict[str, list[float]]:
    """The shares of a saved state: for each place so many numbers, of which none is negative."""
    shares: object = state["shares"]
    if isinstance(shares, Mapping):
        places = cast("Mapping[object, object]", shares)
        if all(isinstance(place, str) and _are_numbers(held, width) for place, held in places.items()):
            return {place: list(map(float, held)) for place, held in cast("dict[str, list[float]]", shares).items()}
    raise InvalidInput(
        f"{OWNER} got shares={shown(state['shares'])} but {width} numbers of 0 or more for each block were needed; "
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
