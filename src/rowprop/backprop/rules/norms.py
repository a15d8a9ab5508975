"""Normalisation. Layer, group, instance and RMS norm are row-local; BatchNorm in training mode is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from rowprop.backprop.rows.slice import Densify, RowSlice, whole_rows
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call, rowlocal

NATIVE: Any = torch.ops.aten.native_batch_norm_backward.default
"""BatchNorm's ordinary backward, which needs nothing that only another forward kernel saves."""


@rowlocal(
    "native_layer_norm_backward", "_fused_rms_norm_backward",
    why="the norm runs over the batch dimension", positions=True,
)  # fmt: skip
def layer_norm_backward(call: Call, ndim: int) -> Iterable[int]:
    """Layer norm and RMS norm: local unless they run over the batch dimension."""
    return range(ndim - len(call.normalized_shape), ndim)


@rule("native_group_norm_backward")
def group_norm_backward(
    op: Any, g: Any, input: Any, mean: Any, rstd: Any, weight: Any, n: int, c: int, hw: int, group: int, mask: Any
) -> Any:
    """Groups of channels within one row."""
    if type(g) is not RowSlice or g.dim != 0:
        return Densify("the batch is not the first dimension")
    # The kernel reads both in the input's memory format, to which autograd's formula has converted the gradient.
    values, x = in_one_format(g, input)
    dx, *others = op(values, x, g.take(mean), g.take(rstd), weight, x.shape[0], c, hw, group, mask)
    return None if dx is None else g.like(dx), *others


def in_one_format(g: RowSlice, input: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient's values and the input's kept rows, both in the input's memory format."""
    x = g.take(input)
    memory_format = suggest_memory_format(x)
    return g.values.contiguous(memory_format=memory_format), x.contiguous(memory_format=memory_format)


@rule("native_batch_norm_backward", positions=True)
def batch_norm_backward(op: Any, g: Any, *args: Any) -> Any:
    """Statistics of the batch mix its rows; running statistics and statistics per row do not."""
    if type(g) is not RowSlice:
        return Densify("the input is sliced, not the output's gradient")
    call = Call(op, (g, *args), {})
    pixels = g.layout.minor and not call.train and not g.layout.holds(1)
    if g.layout.minor and not pixels:
        g = whole_rows(g)
    if g.dim > 1 and not pixels:
        return Densify("the batch lies in space")
    if g.dim == 0 and call.train:
        reason = _needs_all_rows(g)
        if reason is not None:
            return Densify(reason)
        found = None if g.rows.hook is None else g.rows.hook.batch_norm(call, g)
        return _project(call, g) if found is None else found
    # If one row comes in two formats, the CPU kernel takes the strides of one tensor for the strides of the other.
    values, x = in_one_format(g, call.input)
    kept: dict[str, Any] = {}
    if g.dim == 1:  # instance norm: the batch is merged into the channels, each with statistics of its own
        for name in ("weight", "running_mean", "running_var", "save_mean", "save_invstd"):
            v = getattr(call, name)
            kept[name] = v if v is None or v.numel() == 0 else g.take(v, 0)
    dx, *others = call.run(values, input=x, **kept)
    if kept:
        others = [None if v is None else g.like(v, g.layout.at(0)) for v in others]
    return None if dx is None else g.like(dx), *others


def _needs_all_rows(g: RowSlice) -> str | None:
    """Why the rows' policy takes the exact gradient at this BatchNorm, which needs all rows; None if it projects."""
    if g.rows.batchnorm == "exact":
        return f"batchnorm='exact': {_MIX}"
    if g.rows.batchnorm == "rows":
        return None
    # Positions of one row resemble each other, so many positions do not make up for few rows.
    kept = g.rows.stands_for()[0].kept
    few = kept < FEWEST_ROWS or kept * g.layout.outer * g.layout.inner * prod(g.shape[2:]) < FEWEST_VALUES
    _warn_once(few)
    return f"batchnorm=None is 'exact' for {_FEW}: {_MIX}" if few else None


_MIX = "the batch's statistics mix its rows; batchnorm='rows' projects, an approximation"
FEWEST_ROWS, FEWEST_VALUES = 16, 32
"""``batchnorm=None`` projects from so many kept rows and so many of their values per channel on, see ``_MEASURED``."""

_FEW = f"fewer than {FEWEST_ROWS} kept rows or {FEWEST_VALUES} values per channel"
_MANY = f"at least {FEWEST_ROWS} kept rows and {FEWEST_VALUES} values per channel"
_MEASURED = (
    f"Measured, 'rows' is up to 29 % off with {_MANY} (43 % if these are the rows with the largest losses), up to 93 % "
    "with fewer; 'exact' costs 94 to 100 % of the full backward."
)
"""For small networks of one and of two dimensions, see ``docs/batchnorm.md``."""

_warned: list[bool] = []  # whether the first choice, the only one with a warning, was "exact"


def _warn_once(few: bool) -> None:
    if _warned:
        return
    _warned.append(few)
    took = f"{_FEW}, and takes 'exact'" if few else f"{_MANY}, and takes 'rows'"
    warnings.warn(
        f"batchnorm=None meets a BatchNorm in training mode that gets {took}. {_MEASURED} Pass batchnorm='rows' or "
        "batchnorm='exact' to choose, without this warning.",
        stacklevel=2,
    )


@rule("batch_norm_backward")
def any_batch_norm_backward(op: Any, g: Any, *args: Any) -> Any:
    """The backward of any forward kernel: the ordinary kernel runs instead, and needs none of the reserve."""
    return batch_norm_backward(NATIVE, g, *args[:-1])


@rule("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(op: Any, input: Any, g: Any, *args: Any) -> Any:
    """Training mode only: cuDNN's reserve is of all rows, so the ordinary kernel runs instead."""
    *given, eps, _ = args
    return batch_norm_backward(NATIVE, g, input, *given, True, eps, [True, True, True])


def _project(call: Call, g: RowSlice) -> tuple[Any, Any, Any]:
    """BatchNorm's gradient, with its components along 1 and x-hat removed over the kept rows.

    The ordinary kernel does so if it receives the statistics of the kept rows instead of the batch's. The scale of its
    result is then corrected per channel: the forward's x-hat is ``(x - mean) * invstd`` of the full batch.
    """
    weight, (mean, invstd), mask = call.weight, saved(call), call.output_mask
    values, x = in_one_format(g, call.input)
    x = x if g.rows.stored is None else g.rows.stored(x)
    kept_mean, kept_var = statistics(call.op, x, mean)
    kept_std = (kept_var + call.eps).sqrt()
    scale = invstd * kept_std
    scaled = scale if weight is None else weight * scale
    kept_invstd = kept_std.reciprocal()
    about = None, None, kept_mean, kept_invstd, True, call.eps, [mask[0], True, True]
    dx, dw, db = call.op(values, x, scaled, *about)
    if mask[1]:  # the sum of g * x-hat, with x-hat of the full batch
        dw = torch.addcmul(dw * scale, db, (kept_mean - mean) * invstd)
    dw, db = (t if weight is None else t.to(weight.dtype) for t in (dw, db))
    return (g.like(dx) if mask[0] else None), (dw if mask[1] else None), (db if mask[2] else None)


def saved(call: Call) -> list[Tensor]:
    """The batch's mean and inverse deviation, at least float32: in float16, which the CPU may save, sums overflow."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in (call.save_mean, call.save_invstd)]


def statistics(op: Any, x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel, in the statistics' dtype.

    BatchNorm's backward kernel with x in the place of the gradient gives the sums of x and of x * (x - centre) in one
    pass, twenty times faster than ``var_mean``. The second sum does not cancel if the centre is near the mean. The
    weight is ones, not None: CUDA's kernels give the sums its dtype and device.
    """
    count = x.numel() // x.shape[1]
    one = torch.ones_like(centre)
    _, product, total = op(x, x, one, None, None, centre, one, True, 0.0, [False, True, True])
    mean = total / count
    return mean, torch.addcmul(product / count, mean, mean - centre, value=-1).clamp_min(0)


@rowlocal(
    "_softmax_backward_data", "_log_softmax_backward_data",
    why="the softmax runs over the batch dimension", positions=True,
)  # fmt: skip
def softmax_backward(call: Call, ndim: int) -> Iterable[int]:
    """Softmax: local unless it runs over the batch dimension."""
    return (call.dim,)
