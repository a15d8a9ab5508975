"""Which rows are kept: exactly K, each with a probability in proportion to its gradient's norm; nothing is read."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-30  # the least probability: rounding may draw a row of nearly none, and float32 has to hold its factor 1 / p
FLOOR = 0.3  # below a BatchNorm in training mode a row counts as if its norm was at least this share of the mean norm


def inclusion(norms: Tensor, count: int) -> Tensor:
    """The probabilities, (A,), with which rows of these norms, (A,), are kept, ``count`` < A of them.

    Among all that add up to ``count``, these, min(1, c * norm), add the least variance to the gradient. A norm that is
    not finite counts as the largest, so an overflow is kept for all to see.
    """
    sizes = _finite(norms)
    ordered = sizes.sort().values
    # If the m largest rows are kept for sure, (count - m) of the others are kept in proportion to their norms.
    others = torch.arange(count - norms.numel() + 1, count + 1, dtype=sizes.dtype, device=norms.device)
    scale = others / ordered.cumsum(0)
    last = _last(ordered * scale <= 1)
    return (sizes * scale.take(last)).clamp(LEAST, 1)


def floored(norms: Tensor) -> Tensor:
    """Norms for the draws above a BatchNorm in training mode, of which none is far below their mean.

    Its backward takes the same two means from each row's gradient, however small that is, and 1 / p times as much from
    a drawn one's. Where p follows the norm alone, such a row is hardly ever drawn, and then it outweighs the batch.
    """
    mean = norms.nan_to_num(0, 0, 0).mean()  # a row that overflows stays the largest
    return torch.maximum(norms, FLOOR * mean)


def systematic(p: Tensor, count: int, offset: float) -> Tensor:
    """Draw exactly ``count`` places, each with its probability, of a sum of ``count``; (count,) int64, in order.

    Systematic sampling (Madow, 1949): the places lie side by side on a line, as long as their probabilities, and points
    at a distance of 1, the first at ``offset``, drawn from [0, 1), each hit one.
    """
    ends = p.cumsum(0)
    ends = ends * (count / ends[-1])
    numbers = torch.arange(count, device=p.device)
    places = torch.searchsorted(ends, numbers.to(p.dtype) + offset, right=True)
    # Rounding could let two points hit one place, or a point go past the end: such a point hits a place beside it.
    places = (places - numbers).cummax(0).values + numbers
    return torch.minimum(places, numbers + (p.numel() - count))


def draw(p: Tensor, count: int, offset: float) -> tuple[Tensor, Tensor]:
    """The places of :func:`systematic`, and the factors 1 / p that keep the expectation, both of shape ``(count,)``."""
    places = systematic(p, count, offset)
    return places, p[places].reciprocal()


def added_variance(norms: Tensor, p: Tensor) -> Tensor:
    """The variance that keeping rows with probabilities ``p`` adds to the gradient: the sum of (1 - p) / p * norm^2."""
    return (_finite(norms).square() * (1 - p) / p).sum()


def variances(norms: Tensor, shares: tuple[float, ...]) -> Tensor:
    """The variances that keeping each of several shares of the rows would add, (len(shares),)."""
    sizes = _finite(norms).sort(descending=True).values
    rest, squares = (each.flip(0).cumsum(0).flip(0) for each in (sizes, sizes.square()))
    numbers = torch.arange(norms.numel(), dtype=sizes.dtype, device=norms.device)
    counts = torch.tensor(shares, dtype=sizes.dtype).to(norms.device, non_blocking=True) * norms.numel()
    # With the m largest rows kept for sure, c = (count - m) / rest. The next row need not be kept for sure if
    # c * size <= 1, and the more rows are kept, the more of them for sure.
    sure = torch.searchsorted(numbers + rest / sizes, counts).clamp(max=norms.numel() - 1)
    rest = rest[sure]
    return (rest.square() / (counts - sure) - squares[sure]).clamp(min=0)


def _finite(norms: Tensor) -> Tensor:
    """Positive numbers of which no sum of squares overflows, in float64 where the device has it; 0 is the least."""
    wide = norms.device.type != "mps"
    least, most = (1e-100, 1e100) if wide else (1e-25, 1e15)
    return norms.to(torch.float64 if wide else torch.float32).nan_to_num(most, most).clamp(least, most)


def _last(true: Tensor) -> Tensor:
    """The place of the last entry of the leading ones that are true, 0-d; 0 if the first is not."""
    return (true.sum() - 1).clamp(min=0)
