"""The squared norm of each kept row's part of a weight gradient, at a small share of the weight gradient's cost.

A row's part is the product of its lines (tokens) of both factors, or the weight gradient of its image. The squared
norm is exact if a row has few lines or a factor is narrow. Otherwise the width of one factor is first reduced by a
fixed matrix of random signs, which preserves the squared norm in expectation over the signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.rows import RowSet

# Sketch size for the width of a product's factor. The relative standard deviation of one squared norm is at most
# (2 / SIGNS) ** 0.5.
SIGNS = 16
CHANNELS = 8  # sketch size for the channels of one group of a convolution


def of_product(dz: Tensor, x: Tensor, rows: RowSet) -> Tensor:
    """``|dz[k].T @ x[k]|^2`` for each row k, (K,), of the factors (K, T, a) and (K, T, b).

    Exact where a or b is at most ``SIGNS``, and for ``T <= SIGNS`` outside of graphs that are traced for any T.
    """
    narrow, wide = sorted((dz.to(wide_type(dz)), x.to(wide_type(x))), key=lambda factor: int(factor.shape[2]))
    lines = dz.shape[1]
    if lines == 1:
        return (_norms(narrow) * _norms(wide)).square()
    if narrow.shape[2] > SIGNS:
        if type(lines) is int and lines <= SIGNS:  # when traced, a comparison would fix the graph to one result
            # The sum over all pairs of lines of the one factor's inner product times the other's.
            return (narrow @ narrow.mT * (wide @ wide.mT)).sum((1, 2)).clamp(min=0)
        wide = wide @ _signs(rows, wide, int(wide.shape[2]), SIGNS)
    return _norms(narrow.mT @ wide).square()


def of_convolution(dz: Tensor, x: Tensor, shape: Sequence[int], rest: Sequence[Any], rows: RowSet) -> Tensor:
    """The square of each image's weight gradient, (K,), of the images (K, out, *out_space) and (K, in, *space).

    Exact where the weight's second dimension, ``shape[1]``, is at most ``CHANNELS``.
    """
    *about, groups, _ = rest[-7:]
    transposed, channels = about[3], int(shape[1])
    dz, x = dz.to(wide_type(dz)), x.to(wide_type(x))
    if channels > CHANNELS:
        folded = dz if transposed else x  # its channels are the weight's second dimension
        apart: Tensor = cast(Any, folded).unflatten(1, (groups, channels)).flatten(3)
        apart = (_signs(rows, folded, channels, CHANNELS).mT @ apart).flatten(1, 2)
        folded = apart.view(*apart.shape[:2], *folded.shape[2:])
        dz, x = (folded, x) if transposed else (dz, folded)
    of_images: Any = _of_images if type(dz) is Tensor else _of_images_traced
    return of_images(dz, x, [shape[0], min(channels, CHANNELS), *shape[2:]], *about, groups)


def _of_images(
    dz: Tensor, x: Tensor, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Treat each image as a group of channels of one large image, so that its weight gradient is separate."""
    count = dz.shape[0]
    one_image = (image.reshape(1, -1, *image.shape[2:]) for image in (dz, x))
    weight = dz.new_empty((count * shape[0], *shape[1:]))
    about = stride, padding, dilation, transposed, output_padding, count * groups, [False, True, False]
    of_rows: Tensor = torch.ops.aten.convolution_backward.default(*one_image, weight, None, *about)[1]
    return _norms(cast(Any, of_rows).unflatten(0, (count, shape[0]))).square()


# A separate op in a traced graph: Inductor would compile the graph for one number of groups, hence of rows.
_library: Any = cast(Any, torch.library)
_of_images_traced: Any = _library.custom_op("rowprop::squares_of_images", _of_images, mutates_args=())


@_of_images_traced.register_fake
def _of_fake_images(dz: Tensor, *_: Any) -> Tensor:
    return dz.new_empty((dz.shape[0],))


def wide_type(values: Tensor) -> torch.dtype:
    """At least float32: squares, and factors of rare rows, overflow in float16."""
    return torch.promote_types(values.dtype, torch.float32)


def norms_over(values: Tensor, dims: list[int]) -> Tensor:
    """The Euclidean norms over dimensions, at least float32."""
    return cast(Any, torch).linalg.vector_norm(values, dim=dims, dtype=wide_type(values))


def _norms(values: Tensor) -> Tensor:
    """The norm of each row, (K,), of values (K, ...)."""
    return norms_over(values, list(range(1, values.ndim)))


def _signs(rows: RowSet, like: Tensor, width: int, count: int) -> Tensor:
    """A matrix S (width, count) of which ``S @ S.T`` is the identity in expectation."""
    return rows.once(_random_signs, width, count, like.dtype, like.device)


def _random_signs(width: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    mixed = torch.arange(1, width * count + 1, device=device) * 0x9E3779B1 & 0xFFFFFFFF
    for _ in range(2):
        mixed = (mixed >> 15 ^ mixed) * 0x2C1B3C6D & 0xFFFFFFFF
    return ((mixed >> 16 & 1) * 2 - 1).to(dtype).view(width, count) * count**-0.5
