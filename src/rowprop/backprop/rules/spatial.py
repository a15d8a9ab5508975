"""Pooling, padding and resampling: they act on the last dimensions only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice, whole_rows


def _rank(op: Any) -> int:
    """The number of spatial dimensions: it is part of the op's name."""
    return next(int(c) for c in op.__name__ if c.isdigit())


@rule(
    "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "replication_pad1d_backward", "replication_pad2d_backward",
    "replication_pad3d_backward",
)  # fmt: skip
def window_backward(op: Any, g: Any, input: Any, *rest: Any) -> Any:
    """Windows of the input, and the indices that a max pool saved."""
    if type(g) is not RowSlice or type(input) is RowSlice or g.dim >= g.ndim - _rank(op):
        return Densify("the batch lies in space")
    return g.like(op(g.values, g.take(input), *[g.take(a) if isinstance(a, Tensor) else a for a in rest]))


@rule(
    "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d_backward", "_upsample_nearest_exact3d_backward",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    maybe=("_upsample_lanczos2d_aa_backward",),
)  # fmt: skip
def upsample_backward(op: Any, g: RowSlice, output_size: Sequence[int], input_size: Sequence[int], *rest: Any) -> Any:
    """Each image is resampled by itself; ``input_size`` is the full (N, C, ...) shape."""
    if g.dim > 1:
        return Densify("the batch lies in space")
    return g.like(op(g.values, output_size, g.kept_shape(input_size), *rest))


@rule("rot90")
def rotate(op: Any, g: RowSlice, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Quarter turns in a plane of two dimensions that hold no rows."""
    if any(d % g.ndim == g.dim for d in dims):
        return Densify("the turn mixes the batch with another dimension")
    return g.like(op(g.values, k, dims))


@rule("glu_backward", positions=True)
def glu_backward(op: Any, g: Any, input: Any, dim: int) -> Any:
    """Gated halves of a dimension that holds no rows."""
    if type(g) is RowSlice and g.layout.holds(dim % g.ndim):
        g = whole_rows(g)
    if type(g) is not RowSlice or type(input) is RowSlice or dim % g.ndim == g.dim:
        return Densify("the halves are halves of the batch")
    return g.like(op(g.values, g.take(input), dim))
