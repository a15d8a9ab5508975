"""Thinning a gradient: some of its rows go on, each divided by the probability that it does.

The gradient that goes on equals the one that arrived in expectation, whatever the probabilities are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.backward import running
from rowprop.backprop.foreign import is_own, prepare
from rowprop.backprop.layout import Layout
from rowprop.backprop.pick import transformed
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.sliced import (
    DrawPairs,
    RowSet,
    RowSlice,
    Zeros,
    along_rows,
    current_stream,
    gather_plain,
    has_streams,
    rows_apart,
)

Choose = Callable[[Tensor, RowSet], tuple[Tensor, Tensor] | None]
"""A function of the rows' norms (A,) and of the rows. It returns the places of the rows to keep (K,), in order, and the
factors to multiply them by (K,); None keeps all."""

Arrive = Callable[[Tensor, Layout], "RowSlice | None"]
"""A function of a gradient that arrives and of where its rows are. It returns the gradient to go on with in its place;
None for itself."""


def thin_gradient_of(
    tensor: Tensor,
    layout: Layout,
    choose: Choose | None,
    pairs: DrawPairs | None = None,
    arrive: Arrive | None = None,
) -> Tensor:
    """Have the gradient of a tensor thinned whenever one arrives.

    Args:
        tensor: Requires a gradient.
        layout: Where its rows are, for a gradient that is not sliced yet.
        choose: Chooses the rows to keep; None for all.
        pairs: Draws the pairs that weight gradients are summed over, where rows were chosen.
        arrive: Called first.

    Returns:
        The tensor to go on with: itself, or an alias of it.
    """
    if tensor.grad_fn is None or not is_own(tensor.grad_fn):
        tensor = torch.ops.aten.alias(tensor)

    def hook(grad: Tensor) -> Tensor | None:
        if torch.is_grad_enabled() or transformed(grad):  # create_graph=True: the exact gradient can be differentiated
            return None
        # The tensor's own node: held by the hook, it would hold itself, and its graph until a garbage collection.
        node = cast(Any, torch)._C._current_autograd_node()
        given = None if arrive is None else arrive(grad, layout)
        if given is not None:
            prepare(node, given.rows, slices=False)
            grad = RowGrad(given)
        sliced = grad.sliced if type(grad) is RowGrad and grad.full is None else None
        thinned = None
        if choose is not None and type(sliced) is not Zeros:
            thinned = thin(rows_in(grad, layout), choose, pairs)
        if thinned is None:
            return None if given is None else grad
        if sliced is None:
            prepare(node, thinned.rows, slices=False)
        return RowGrad(thinned)

    # The hook stays with the value that the tensor has now. The gradient of a later write in place to an alias does not
    # come here, so it stays exact.
    tensor.register_hook(hook)
    return tensor


def _all_rows(num_rows: int, device: torch.device) -> RowSet:
    """The set of all rows: one in each backward, so that gradients which meet know their rows' common places."""
    every = running().every
    key = num_rows, device, current_stream(device) if has_streams(device) else None
    if key not in every:
        every[key] = RowSet(torch.arange(num_rows, device=device), num_rows, unique=True, batchnorm="rows")
    return every[key]


def rows_in(grad: Tensor, layout: Layout) -> RowSlice:
    """The rows of a gradient, none of them twice; all rows if it is not sliced."""
    if type(grad) is RowGrad:
        if grad.full is None and type(grad.sliced) is RowSlice:
            return grad.sliced.merged()
        grad = grad.plain()
    return RowSlice(grad, _all_rows(layout.num_rows, grad.device), layout, grad.shape)


def thin(g: RowSlice, choose: Choose, pairs: DrawPairs | None = None) -> RowSlice | None:
    """Some rows of a gradient whose rows do not repeat; None if all are kept."""
    within = g.layout.among(g.rows.kept)
    chosen = choose(_norms(g.values, within), g.rows)
    if chosen is None:
        return None
    places, weights = chosen
    rows = g.rows.thinned(places, weights)
    rows.pairs = pairs
    values = gather_plain(g.values, places, within)
    wide = torch.promote_types(values.dtype, torch.float32)  # a factor may be too large for float16, the product is not
    values = values * along_rows(weights.to(wide), g.layout.among(rows.kept), values.ndim)
    return RowSlice(values.to(g.values.dtype), rows, g.layout, g.shape)


def _norms(values: Tensor, layout: Layout) -> Tensor:
    """The Euclidean norm of each row, (A,), at least float32."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    apart = rows_apart(values, layout)
    dims = [d for d in range(apart.ndim) if d != layout.dim + 1]
    return cast(Tensor, cast(Any, torch).linalg.vector_norm(apart, dim=dims, dtype=dtype))
