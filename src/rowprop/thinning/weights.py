"""Thinned weight gradients: (row, token) pairs leave each product that contracts over the rows.

Of the sum of dz_i x_i over all pairs i, M pairs are drawn with probabilities q in proportion to |dz_i| |x_i|, and
divided by q. The variance that this adds, the sum of (1 - q) / q |dz_i|^2 |x_i|^2, may be a share of the variance
between batches, which the measured weight gradients tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from rowprop.host import readable
from rowprop.thinning.control import EACH, check_form, count_of, moved, one_in
from rowprop.thinning.draw import draw, inclusion, needed
from rowprop.thinning.squares import norms_over

# Norms and draw of one product take about as long as these FLOPs: 0.8 ms on a core of a CPU, whose caches are full of
# the products around it. In a loop of draws alone they take a fifth of that.
A_DRAW = {"cpu": 80_000_000}
A_DRAW_ELSEWHERE = 25_000_000_000  # where some thirty kernels are started for it; an estimate, not measured
GATHERED = 0.08  # to gather the drawn pairs takes about this share of the product's time at all pairs
RENEWED_AFTER = 16  # backwards after which the shares are renewed; in the beginning when as many have passed as before
MEASURED_EVERY = 4  # after the first renewals the pairs needed are measured in one of so many backwards


@dataclass
class Product:
    """One product in one backward."""

    arrived: int  # P, the pairs of the rows that came
    kept: int  # M, the pairs that the sum is over
    flops: float  # for all pairs
    numbers: Tensor | None = None  # the numbers below, on the device; None if they are not measured in this backward
    needed: float = 0.0  # pairs that would have added no more variance than allowed
    total: float = 0.0  # the sum of |dz|^2 |x|^2 over the pairs of the exact gradient

    def read(self, numbers: Iterator[float]) -> None:
        """Take the numbers, once they are on the host."""
        self.needed, self.total = next(numbers), next(numbers)


@dataclass
class _Share:
    """The share of its pairs that a product is summed over, the sums since it was set, and whether it pays."""

    keep: float = 1.0
    needed: float = 0.0
    passes: int = 0
    drawn: bool = False


@dataclass
class Pairs:
    """Sets, for each product of the backward, how many pairs it is summed over, and draws them."""

    tau: float  # the target: variance added in all products over the variance between batches
    passes: int = 0  # backwards so far
    renewed: int = 0  # ``passes`` when the shares were set last
    shares: dict[str, _Share] = field(default_factory=dict[str, _Share])
    squares: float = 0.0  # the sum of |dz|^2 |x|^2 over all products, when it was measured last
    spread: float = 1.0  # the variance between batches over this sum; 1 before the first measurement
    measured: int = 0  # measurements that it follows from

    def draw(
        self, name: str, dz: Tensor, x: Tensor, weights: Tensor | None, step: int, uniform: Callable[[], float]
    ) -> tuple[tuple[Tensor, Tensor] | None, Product | None]:
        """Draw the pairs of a product of (P, a) and (P, b), already multiplied by weights (P,); M a multiple of a step.

        Returns the places of the pairs (M,) and the factors to multiply them by, or None for all pairs; and what is
        known of the product, None if it is left alone.
        """
        seen = Product(dz.shape[0], dz.shape[0], flops=2 * dz.numel() * x.shape[1])
        costs = A_DRAW.get(dz.device.type, A_DRAW_ELSEWHERE)
        if seen.flops < 4 * costs or not readable(dz):
            return None, None
        share = self.shares.setdefault(name, _Share())
        kept = min(seen.arrived, count_of(share.keep, seen.arrived, step))
        share.drawn = (1 - GATHERED - share.keep) * seen.flops > costs and kept < seen.arrived
        measured = self.passes < 2 * RENEWED_AFTER or one_in(MEASURED_EVERY, self.passes)
        if not share.drawn and not measured:
            return None, seen
        norms = norms_of(dz) * norms_of(x)
        if measured:
            squares = norms.square()
            total = (squares if weights is None else squares / weights.to(squares)).sum()
            seen.numbers = torch.stack([needed(norms, self.tau * self.spread * total), total])
        if share.drawn:
            seen.kept = kept
        return draw(inclusion(norms, kept), kept, uniform()) if share.drawn else None, seen

    def update(self, seen: Mapping[str, list[Product]]) -> None:
        """Take in the numbers of one backward, where they were measured."""
        self.passes += 1
        measured = [(name, one) for name, found in seen.items() for one in found if one.numbers is not None]
        if measured and all(isfinite(one.total) and isfinite(one.needed) for _, one in measured):  # no overflow
            self.squares = sum(one.total for _, one in measured)
            for name, one in measured:
                share = self.shares.setdefault(name, _Share())
                share.needed += one.needed / one.arrived
                share.passes += 1
        if self.passes >= min(2 * self.renewed, self.renewed + RENEWED_AFTER):
            for share in self.shares.values():
                if share.passes:
                    share.keep = min(1.0, max(share.needed / share.passes, 1e-9))
                    share.needed, share.passes = 0.0, 0
            self.renewed = self.passes

    def learn(self, between: float) -> None:
        """Take in the variance between batches that a measurement of the weight gradients saw."""
        if isfinite(between) and isfinite(self.squares) and between > 0 < self.squares:
            self.measured += 1
            self.spread = moved(self.spread, between / self.squares, self.measured)

    def reason(self) -> str:
        """How many products are summed over fewer pairs, in a sentence."""
        if not self.shares:
            return "weight gradients over all pairs: the products are too small"
        drawn = sum(share.drawn for share in self.shares.values())
        return f"weight gradients over drawn pairs in {drawn} of {len(self.shares)} products"

    def state_dict(self) -> dict[str, Any]:
        """All that the next shares follow from, in plain numbers."""
        return {name: held for name, held in asdict(self).items() if name != "tau"}

    def restored(self, state: Any) -> Pairs:
        """The pairs with a saved state."""
        check_form("pairs", state, Pairs(0.0).state_dict() | {"shares": {EACH: asdict(_Share())}})
        return replace(self, **state | {"shares": {name: _Share(**share) for name, share in state["shares"].items()}})


def share_of(found: Mapping[str, list[Product]]) -> float:
    """The share of the products' FLOPs that was left; 1 if there were none."""
    every = [one for each in found.values() for one in each]
    full = sum(one.flops for one in every)
    return sum(one.flops * one.kept / one.arrived for one in every) / full if full else 1.0


def norms_of(lines: Tensor) -> Tensor:
    """The Euclidean norm of each line, (P,), in float64 where the device has it."""
    norms = norms_over(lines, [1])
    return norms if norms.device.type == "mps" else norms.double()
