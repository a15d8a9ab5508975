"""Fourier transforms over dimensions that hold no rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def transform(op: Any, g: RowSlice, dims: Sequence[int], *rest: Any) -> Any:
    """Each row is transformed by itself."""
    if g.dim in dims:  # the kernels take no negative ones
        return Densify("the transform runs over the batch")
    return g.like(op(g.values, dims, *rest))
