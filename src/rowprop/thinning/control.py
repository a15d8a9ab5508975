"""How many rows each block keeps: a fixed share, or as few as a bound on the added variance allows.

The variance that a thinning adds to a gradient is known in closed form from the rows' norms, and so is the number of
rows that would have added no more than the bound. The next backwards keep this number, so nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, cast

from rowprop.checks import check_entries, check_whole, is_number, shown
from rowprop.errors import InvalidInput

RENEWED_AFTER = 16
"""Backwards after which the shares are renewed; sooner in the beginning, when as many have passed as before."""


@dataclass
class Seen:
    """The numbers of one block in one backward: rows that arrived and stayed, and, from the device, three sums.

    Attributes:
        arrived: A, the rows of the gradient that arrived.
        kept: K, the rows that went on.
        needed: Rows that would have added no more variance than allowed.
        added: The variance that was added: the sum of (1 - p) / p * norm^2.
        total: An estimate of the sum of norm^2 over the rows of the exact gradient.
    """

    arrived: int
    kept: int
    needed: float = 0.0
    added: float = 0.0
    total: float = 0.0


@dataclass
class _Share:
    """The share of rows that a block keeps, the sums since it was set, and whether a gradient ever arrived."""

    keep: float = 1.0
    needed: float = 0.0
    passes: int = 0
    used: bool = False


@dataclass
class Control:
    """Sets the shares of the blocks.

    Attributes:
        keep: The share of every block; None where the variance is bounded.
        tau: The bound: added variance of all blocks over the variance between batches.
        passes: Backwards so far.
        shares: For each block the share that it keeps.
    """

    keep: float | None
    tau: float
    passes: int = 0
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])

    def expect(self, place: str) -> None:
        """Take note of a block to which a gradient may come."""
        self.shares.setdefault(place, _Share())

    def share(self, place: str) -> float:
        """The share of a backward's rows that a block keeps, in (0, 1]."""
        return self.keep if self.keep is not None else self.shares[place].keep

    def count(self, place: str, rows: int, step: int) -> int:
        """K, of the ``rows`` with which the backward came to the first block, in steps of ``step``; at least 1."""
        return step * max(1, ceil(self.share(place) * rows / step - 1e-9))

    def allowed(self) -> float:
        """The variance that a block may add, as a share of the sum of norm^2 there."""
        used = sum(share.used for share in self.shares.values())
        return self.tau / (used or len(self.shares))

    def update(self, rows: int, seen: Mapping[str, list[Seen]]) -> None:
        """Take in the numbers of one backward that came to the first block with ``rows`` rows."""
        self.passes += 1
        for place, found in seen.items():
            share = self.shares.setdefault(place, _Share())
            share.needed += sum(s.needed for s in found) / (len(found) * rows)
            share.passes += 1
            share.used = True
        if self.keep is None and self.passes >= min(2 * self._renewed, self._renewed + RENEWED_AFTER):
            for share in self.shares.values():
                if share.passes:
                    share.keep = min(1.0, max(share.needed / share.passes, 1e-9))
                    share.needed, share.passes = 0.0, 0
            self._renewed = self.passes

    _renewed: int = 0

    def reason(self) -> str:
        """Why the shares are what they are, in a sentence."""
        if self.keep is not None:
            return f"keep={self.keep:g} at every block"
        return f"tau={self.tau:g}: a block may add {self.allowed():.2g} of the gradient's variance"

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        shares = {place: [s.keep, s.needed, s.passes, s.used] for place, s in self.shares.items()}
        return {"passes": self.passes, "renewed": self._renewed, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that ``state_dict()`` returned."""
        check_entries(OWNER, state, ["passes", "renewed", "shares"])
        check_counts(state, "passes", "renewed")
        shares = checked_shares(state, 4)
        self.passes, self._renewed = state["passes"], state["renewed"]
        self.shares = {
            place: _Share(keep, needed, int(passes), bool(used))
            for place, (keep, needed, passes, used) in shares.items()
        }


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
