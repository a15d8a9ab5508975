"""Fourier transforms over dimensions that hold no rows."""

from __future__ import annotations

from collections.abc import Iterable

from rowprop.backprop.rules.rowlocal import Call, rowlocal


@rowlocal("_fft_c2c", "_fft_r2c", "_fft_c2r", why="the transform runs over the batch")
def transform(call: Call, ndim: int) -> Iterable[int]:
    """Each row is transformed by itself."""
    return call.dim
