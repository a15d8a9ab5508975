"""Pooling, padding and resampling: they act on the last dimensions only."""

from __future__ import annotations

from collections.abc import Iterable

from rowprop.backprop.rules.rowlocal import Call, rowlocal


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


@rowlocal("rot90", why="the turn mixes the batch with another dimension")
def rotate(call: Call, ndim: int) -> Iterable[int]:
    """Quarter turns in a plane of two dimensions that hold no rows."""
    return call.dims


@rowlocal("glu_backward", why="the halves are halves of the batch", positions=True)
def glu_backward(call: Call, ndim: int) -> Iterable[int]:
    """Gated halves of a dimension that holds no rows."""
    return (call.dim,)


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
    keep=2, why="the batch lies in the channels or in space",
)  # fmt: skip
def grid_sampler_backward(call: Call, ndim: int) -> Iterable[int]:
    """Each image has its own grid."""
    return range(1, ndim)
