"""Thinned weight gradients: (row, token) pairs leave each product that contracts over the rows.

A linear layer's weight gradient is the sum of dz_i x_i over all pairs i of a row and a token. Of the pairs, M are drawn
with probabilities q in proportion to |dz_i| |x_i|, and divided by q. The variance that this adds to the gradient of the
weight is known in closed form, the sum of (1 - q) / q |dz_i|^2 |x_i|^2. So is the M that adds as much as is allowed.

All products together may add a share of the variance that the choice of the batch has. The looks of the rows' control
tell this variance, and so how it compares with the sum of |dz_i|^2 |x_i|^2 over all products. Where the tokens of a row
pull alike, it is the larger one by far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.checks import check_entries
from rowprop.host import readable
from rowprop.thinning.control import OWNER, Seen, check_amounts, check_counts, checked_shares, count_of, moved, one_in
from rowprop.thinning.draw import added_variance, draw, inclusion, needed

TAU = 0.025
"""The variance that the draws may add, as a share of the variance between batches. VCAS's default."""
A_DRAW = {"cpu": 80_000_000}
"""Norms and draw of one product take about as long as these FLOPs: 0.8 ms on a core of a CPU, whose caches are full of
the products around it. In a loop of draws alone they take a fifth of that."""
A_DRAW_ELSEWHERE = 25_000_000_000
"""The same where some thirty kernels are started for it; an estimate, not measured."""
GATHERED = 0.08
"""To gather the drawn pairs takes about this share of the product's time at all pairs."""
RENEWED_AFTER = 16
"""Backwards after which the shares are renewed; sooner in the beginning, when as many have passed as before."""
MEASURED_EVERY = 4
"""After the first renewals the pairs needed are measured in one of so many backwards."""


_PLAIN = ("passes", "squares", "spread", "looks")


@dataclass
class Product(Seen):
    """The numbers of one product in one backward: of pairs as :class:`Seen` of rows, and two more.

    Attributes:
        flops: The FLOPs for all pairs.
        needed: Pairs that would have added no more variance than allowed.
    """

    flops: float = 0.0
    needed: float = 0.0

    def read(self, numbers: Iterator[float]) -> None:
        """Take what was measured from the numbers of a device."""
        self.needed, self.added, self.before, self.total = (next(numbers) for _ in range(4))


Found = Mapping[str, list[tuple[Product, "Tensor | None"]]]
"""For each product what was seen in one backward, and the numbers on the device where they were measured."""


@dataclass
class _Share:
    """The share of its pairs that a product is summed over, the sums since it was set, and whether it pays."""

    keep: float = 1.0
    needed: float = 0.0
    passes: int = 0
    drawn: bool = False


@dataclass
class Pairs:
    """Sets, for each product of the backward, how many pairs it is summed over, and draws them.

    Attributes:
        tau: The target: variance added in all products over the variance between batches.
        passes: Backwards so far.
        shares: For each product the share of its pairs.
        squares: The sum of |dz|^2 |x|^2 over all products, when it was measured last.
        spread: The variance between batches over this sum; 1 before the first look.
        looks: Looks that it follows from.
    """

    tau: float = TAU
    passes: int = 0
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])
    squares: float = 0.0
    spread: float = 1.0
    looks: int = 0
    _renewed: int = 0

    def draw(
        self,
        place: str,
        factors: tuple[Tensor, Tensor],
        weights: Tensor | None,
        step: int,
        uniform: Callable[[], float],
    ) -> tuple[tuple[Tensor, Tensor] | None, Product, Tensor | None] | None:
        """Draw the pairs of one product.

        Args:
            place: Its name.
            factors: The gradient (P, a) and the other factor (P, b).
            weights: The factors that thinning multiplied the pairs by already, (P,); None for 1.
            step: M is a multiple of it.
            uniform: Draws a number from [0, 1).

        Returns:
            None if the product is left alone. Else the places of the pairs (M,) and the factors to multiply them by, or
            None for all pairs; the numbers of pairs; and, where they are measured in this backward, on the device: the
            pairs needed, the variance added, 0, and the sum of |dz|^2 |x|^2 over the pairs of the exact gradient, (4,).
        """
        arrived, flops = factors[0].shape[0], 2 * factors[0].numel() * factors[1].shape[1]
        costs = A_DRAW.get(factors[0].device.type, A_DRAW_ELSEWHERE)
        if flops < 4 * costs or not readable(factors[0]):
            return None
        share = self.shares.setdefault(place, _Share())
        seen = Product(arrived, arrived, flops=flops)
        kept = min(arrived, count_of(share.keep, arrived, step))
        drawn = share.drawn = (1 - GATHERED - share.keep) * flops > costs and kept < arrived
        measured = self.passes < 2 * RENEWED_AFTER or one_in(MEASURED_EVERY, self.passes)
        if not drawn and not measured:
            return None, seen, None
        norms = norms_of(factors[0]) * norms_of(factors[1])
        chosen = q = None
        if drawn:
            seen.kept = kept
            q = inclusion(norms, kept)
            chosen = draw(q, kept, uniform())
        return chosen, seen, self._numbers(norms, weights, q) if measured else None

    def _numbers(self, norms: Tensor, weights: Tensor | None, q: Tensor | None) -> Tensor:
        squares = norms.square()
        total = (squares if weights is None else squares / weights.to(squares)).sum()
        added = torch.zeros_like(total) if q is None else added_variance(norms, q)
        return torch.stack([needed(norms, self.tau * self.spread * total), added, torch.zeros_like(total), total])

    def update(self, seen: Found) -> None:
        """Take in the numbers of one backward, where they were measured."""
        self.passes += 1
        measured = [(place, one) for place, found in seen.items() for one, on_device in found if on_device is not None]
        if measured and all(isfinite(one.total) and isfinite(one.needed) for _, one in measured):  # no overflow
            self.squares = sum(one.total for _, one in measured)
            for place, one in measured:
                share = self.shares.setdefault(place, _Share())
                share.needed += one.needed / one.arrived
                share.passes += 1
        if self.passes >= min(2 * self._renewed, self._renewed + RENEWED_AFTER):
            for share in self.shares.values():
                if share.passes:
                    share.keep = min(1.0, max(share.needed / share.passes, 1e-9))
                    share.needed, share.passes = 0.0, 0
            self._renewed = self.passes

    def learn(self, between: float) -> None:
        """Take in the variance between batches that a look saw."""
        if isfinite(between) and isfinite(self.squares) and between > 0 < self.squares:
            self.looks += 1
            self.spread = moved(self.spread, between / self.squares, self.looks)

    def reason(self) -> str:
        """How many products are summed over fewer pairs, in a sentence."""
        drawn = sum(share.drawn for share in self.shares.values())
        if not self.shares:
            return "weight gradients over all pairs: the products are too small"
        return f"weight gradients over drawn pairs in {drawn} of {len(self.shares)} products"

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        shares = {place: [s.keep, s.needed, s.passes] for place, s in self.shares.items()}
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {**plain, "renewed": self._renewed, "shares": shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state that ``state_dict()`` returned."""
        check_entries(OWNER, state, [*_PLAIN, "renewed", "shares"])
        check_counts(state, "passes", "renewed", "looks")
        check_amounts(state, "squares")
        check_amounts(state, "spread", positive=True)
        shares = checked_shares(state, 3)
        for name in _PLAIN:
            setattr(self, name, state[name])
        self._renewed = state["renewed"]
        self.shares = {place: _Share(keep, needed, int(passes)) for place, (keep, needed, passes) in shares.items()}


def share_of(found: Found) -> float:
    """The share of the products' FLOPs that was left; 1 if there were none."""
    every = [one for each in found.values() for one, _ in each]
    full = sum(one.flops for one in every)
    return sum(one.flops * one.kept / one.arrived for one in every) / full if full else 1.0


def norms_of(lines: Tensor) -> Tensor:
    """The Euclidean norm of each line, (P,), in float64 where the device has it."""
    dtype = torch.promote_types(lines.dtype, torch.float32)
    norms = cast(Tensor, cast(Any, torch).linalg.vector_norm(lines, dim=1, dtype=dtype))
    return norms if norms.device.type == "mps" else norms.double()
