"""Custom autograd functions and ops that treat rows alike: their own backward runs on the kept rows.

A function is declared by the dimensions that the rows lie in, by :func:`rowprop.rowwise` or by a rule. Where a
declaration does not fit the tensors that are there, the backward runs at full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.gather import gather
from rowprop.backprop.rows.layout import Layout
from rowprop.backprop.rows.refusals import NeedsAllRows
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.registry import function_rule

Dims = int | None | tuple[int | EllipsisType | None, ...]
"""For each of several tensors the dimension that the rows lie in, None for a tensor without rows; or one for all.
``...`` at the end stands for any number of None: versions of a library differ in their numbers of arguments."""


class NodeWith:
    """A node as the ``ctx`` of its function's backward, with some attributes replaced."""

    def __init__(self, node: Any, **replaced: Any) -> None:
        self._node = node
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def own_backward(node: Any, *grads: Any, **replaced: Any) -> tuple[Any, ...]:
    """The gradients that a node's own backward returns; it sees the attributes ``replaced`` of its ``ctx`` changed."""
    returned: Any = cast(Any, type(node)).apply(NodeWith(node, **replaced), *grads)
    return cast("tuple[Any, ...]", returned if isinstance(returned, tuple) else (returned,))


def on_kept_rows(
    node: Any,
    gradients: Sequence[Any],
    *,
    saved: Dims,
    grads: Dims,
    outputs: Dims = 0,
    every: Sequence[Tensor | None] | None = None,
    **replaced: Any,
) -> tuple[Any, ...]:
    """Run a function's own backward on the kept rows of its gradients and of its saved tensors.

    ``saved``, ``grads`` and ``outputs`` tell where the rows lie, as for :func:`rowprop.rowwise`. ``every`` stands for
    the saved tensors. Raises :class:`NeedsAllRows` where they do not fit the tensors, or where ``node``, the backward's
    ``ctx``, keeps a tensor elsewhere. The backward sees the attributes ``replaced`` of its ``ctx`` changed.
    """
    if any(isinstance(value, Tensor) for value in cast("dict[str, Any]", vars(node)).values()):
        raise NeedsAllRows("a tensor is kept as an attribute of ctx; use save_for_backward")
    dims = _each(outputs, len(gradients), "outputs")
    g = _one_of(gradients, dims)
    rows, layout = g.rows, g.layout
    every = cast("Sequence[Tensor | None]", node.saved_tensors) if every is None else every
    kept = [
        t if d is None or t is None else gather(t, rows, place_of(layout, t.shape, d, layout.size)).contiguous()
        for t, d in zip(every, _each(saved, len(every), "saved tensors"), strict=True)
    ]
    results = own_backward(node, *kept_values(node, gradients, dims, g), saved_tensors=tuple(kept), **replaced)
    size = layout.compact(rows.kept).size
    return tuple(
        r if d is None or not isinstance(r, Tensor) else g.like(r, place_of(layout, r.shape, d, size))
        for r, d in zip(results, _each(grads, len(results), "gradients"), strict=True)
    )


def _each(dims: Dims, count: int, what: str) -> tuple[int | None, ...]:
    if not isinstance(dims, tuple):
        return (dims,) * count
    if dims and dims[-1] is ...:
        dims = dims[:-1] + (None,) * (count - len(dims) + 1)
    dims = cast("tuple[int | None, ...]", dims)
    if len(dims) != count:
        raise NeedsAllRows(f"the rule declares {len(dims)} {what} but there are {count}")
    return dims


def _one_of(gradients: Sequence[RowSlice | Tensor | None], dims: Sequence[int | None]) -> RowSlice:
    """The gradient whose layout stands for the layouts of all, which have to agree."""
    found: list[RowSlice] = []
    for g, dim in zip(gradients, dims, strict=True):
        if type(g) is RowSlice:
            if g.dim != dim:
                raise NeedsAllRows(f"the rows lie in dimension {g.dim} of an output that is declared with {dim}")
            found.append(g)
        elif g is not None:
            raise NeedsAllRows("the gradient of another output is not sliced")
    if len({g.layout.at(0) for g in found}) > 1:
        raise NeedsAllRows("the outputs hold different numbers of entries per row")
    return max(found, key=lambda g: g.dim)


def place_of(layout: Layout, shape: Sequence[int], dim: int, size: int) -> Layout:
    """The layout of the rows in dimension ``dim`` of another tensor; ``size`` is the size of an output's dimension."""
    each, rest = divmod(shape[dim] if dim < len(shape) else 0, size)
    if each == 0 or rest or (each > 1 and layout.dim > 0):
        raise NeedsAllRows(f"dimension {dim} of shape {tuple(shape)} does not hold the rows")
    return replace(layout, dim=dim, inner=layout.inner * each)


def kept_values(node: Any, gradients: Sequence[Any], dims: Sequence[int | None], like: RowSlice) -> list[Tensor | None]:
    """The gradients of the kept rows; for an output without a gradient zeros or None, as in autograd."""
    values: list[Tensor | None] = []
    for g, dim, meta, none in zip(gradients, dims, node._input_metadata, left_out(node), strict=True):
        if g is not None:
            values.append(g.values.contiguous())
        elif none:
            values.append(None)
        else:
            shape = tuple(meta.shape)
            if dim is not None and shape:  # a number has no rows
                shape = like.kept_shape(shape, place_of(like.layout, shape, dim, like.layout.size))
            values.append(torch.zeros(shape, dtype=meta.dtype, device=meta.device))
    return values


def left_out(node: Any) -> Sequence[bool]:
    """For each output whether the backward now running gives None, not zeros, for its undefined gradient."""
    return getattr(node.apply, "left_out", (False,) * len(node._input_metadata))


@function_rule("torch.nn.modules._functions.SyncBatchNorm")
def _sync_batch_norm(node: Any, backward: Any, *grads: Any) -> Densify:
    return Densify("BatchNorm takes its statistics over the rows of all processes; eval() freezes them")
