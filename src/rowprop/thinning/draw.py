"""Draw exactly K rows, with probabilities in proportion to their gradients' norms, without a sync."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-30  # smallest probability: rounding may draw such a row, and 1 / p must fit in float32
FLOOR = 0.3  # smallest norm, as a share of the mean norm, for draws above a BatchNorm in training mode


def inclusion(norms: Tensor, count: int) -> Tensor:
    """The probabilities, (A,), of keeping rows with these norms, (A,); their sum is ``count`` < A.

    They are min(1, c * norm), which adds the least variance to the gradient for this sum. A norm that is not finite
    counts as the largest, so that an overflow stays visible.
    """
    sizes = _finite(norms)
    ordered = sizes.sort().values
    # If the m largest rows have probability 1, (count - m) of the others are kept in proportion to their norms.
    others = torch.arange(count - norms.numel() + 1, count + 1, dtype=sizes.dtype, device=norms.device)
    scale = others / ordered.cumsum(0)
    last = _last(ordered * scale <= 1)
    return (sizes * scale.take(last)).clamp(LEAST, 1)


def floored(norms: Tensor) -> Tensor:
    """Norms with a lower bound relative to their mean, for draws above a BatchNorm in training mode.

    Its backward subtracts the same two means from every row's gradient, and 1 / p times as much from a drawn row's. If
    p were proportional to the norm, a row with a small norm would rarely be drawn, and then outweigh the batch.
    """
    mean = norms.nan_to_num(0, 0, 0).mean()  # a row that overflows stays the largest
    return torch.maximum(norms, FLOOR * mean)


def systematic(p: Tensor, count: int, offset: float) -> Tensor:
    """Draw exactly ``count`` indices with probabilities ``p``, whose sum is ``count``; (count,) int64, ascending.

    Systematic sampling (Madow, 1949): rows are adjacent intervals on a line, with their probabilities as lengths. The
    points ``offset``, ``offset + 1``, ... each select one row; ``offset`` is drawn from [0, 1).
    """
    ends = p.cumsum(0)
    ends = ends * (count / ends[-1])
    numbers = torch.arange(count, device=p.device)
    places = torch.searchsorted(ends, numbers.to(p.dtype) + offset, right=True)
    # Rounding may put two points into one interval, or one past the end: such a point selects a neighbour.
    places = (places - numbers).cummax(0).values + numbers
    return torch.minimum(places, numbers + (p.numel() - count))


def draw(p: Tensor, count: int, offset: float) -> tuple[Tensor, Tensor]:
    """The indices of :func:`systematic`, and the factors 1 / p for an unbiased sum, both ``(count,)``."""
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
    # If the m largest rows have probability 1, c = (count - m) / rest; the next row has a smaller one if c * size <= 1.
    # m grows with the number of kept rows.
    sure = torch.searchsorted(numbers + rest / sizes, counts).clamp(max=norms.numel() - 1)
    rest = rest[sure]
    return (rest.square() / (counts - sure) - squares[sure]).clamp(min=0)


def _finite(norms: Tensor) -> Tensor:
    """Norms clamped to a positive range whose squares do not overflow, in float64 if the device has it."""
    wide = norms.device.type != "mps"
    least, most = (1e-100, 1e100) if wide else (1e-25, 1e15)
    return norms.to(torch.float64 if wide else torch.float32).nan_to_num(most, most).clamp(least, most)


def _last(true: Tensor) -> Tensor:
    """The index of the last of the leading true entries, 0-d; 0 if the first is false."""
    return (true.sum() - 1).clamp(min=0)
