"""Convolutions, pooling, padding and resampling: they act on one image per row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call, rowlocal


@rule("convolution_backward", positions=True)
def convolution_backward(op: Any, g: Any, input: Any, weight: Any, *rest: Any) -> Any:
    """The input gradient has K rows, parameter gradients contract over them; a 1x1 kernel takes single pixels, too."""
    if type(g) is not RowSlice or type(input) is RowSlice or type(weight) is RowSlice:
        return Densify("the convolution's input or weight is sliced, not its output's gradient")
    pixels = g.layout.minor and not g.layout.holds(1) and {*weight.shape[2:], *rest[1]} == {1}  # stride
    pixels = pixels and not any((*rest[2], *rest[5]))  # padding, output padding: each position is by itself
    if g.layout.minor and not pixels:
        g = whole_rows(g, 0)
    if g.dim != 0 and not pixels:
        return Densify("the batch lies in the channels or in space")
    input = g.take(input)
    if g.rows.hook is not None and rest[-1][1]:
        g.rows.hook.measure_convolution(g.rows, g.layout, g.values, input, weight, rest)
    grad_input, grad_weight, grad_bias = op(g.values, input, weight, *rest)
    return (None if grad_input is None else g.like(grad_input)), grad_weight, grad_bias


@rowlocal(
    "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
)  # fmt: skip
def window_backward(call: Call, ndim: int) -> Iterable[int]:
    """Windows of the input, and the indices that a max pool saved."""
    space = next(int(c) for c in call.op.__name__ if c.isdigit())  # "2d"
    return range(ndim - space, ndim)


@rowlocal(
    "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d_backward", "_upsample_nearest_exact3d_backward",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    maybe=("_upsample_lanczos2d_aa_backward",),
)  # fmt: skip
def upsample_backward(call: Call, ndim: int) -> Iterable[int]:
    """Each image is resampled by itself; ``input_size`` is the full (N, C, ...) shape."""
    return range(2, ndim)


@rowlocal("tril", "triu", why="the triangle cuts through the batch")
def triangle(call: Call, ndim: int) -> Iterable[int]:
    """A triangle of the last two dimensions."""
    return -1, -2


@rowlocal("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", why="the shuffle runs through the batch")
def shuffle(call: Call, ndim: int) -> Iterable[int]:
    """Moves elements between the last three dimensions."""
    return -1, -2, -3


@rowlocal("im2col", "col2im", why="the images have no batch dimension in front")
def unfold_images(call: Call, ndim: int) -> Iterable[int]:
    """Patches of images with a batch dimension in front."""
    return range(ndim == (4 if call.op.__name__.startswith("im2col") else 3), ndim)


@rowlocal(
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_grid_sampler_backward",
    why="the batch lies in the channels or in space",
)  # fmt: skip
def grid_sampler_backward(call: Call, ndim: int) -> Iterable[int]:
    """Each image has its own grid."""
    return range(1, ndim)
