"""Reentrant activation checkpoints: the region is run again in full, and its backward is sliced.

The backward of ``torch.utils.checkpoint`` with ``use_reentrant=True`` runs the region once more, and then a backward of
its own inside it. The rule here lets the sliced gradients in at the region's outputs and catches them at its inputs.
All N rows are run again: the region may mix rows or draw random numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from rowprop.backprop.autograd.foreign import prepare, upstream
from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.backprop.backward import outermost, running
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.functions import NodeWith
from rowprop.backprop.rules.registry import function_rule


def enters_checkpoint(tensor: Tensor) -> bool:
    """Whether a reentrant checkpoint is among the nodes that made a tensor."""
    nodes = [] if tensor.grad_fn is None else upstream(tensor.grad_fn)
    return any(getattr(node, "_forward_cls", None) is CheckpointFunction for node in nodes)


class _Enter(torch.autograd.Function):
    """Turns an output of the region into a number; the number's backward hands the sliced gradient to the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sliced: RowSlice) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sliced, ctx.around = sliced, outermost()
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        running().around = ctx.around
        sliced: RowSlice = ctx.sliced
        return (sliced.dense() if prepare(ctx, sliced.rows) else RowGrad(sliced)), None


class _Catch(torch.autograd.Function):
    """Passes an input of the region on, and keeps the gradient that arrives at it, sliced or not."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, caught: dict[int, Tensor], place: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.caught, ctx.place = caught, place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.caught[ctx.place] = grad
        return None, None, None


@function_rule(CheckpointFunction, positions=True)
def _reentrant(node: Any, backward: Any, *grads: RowSlice | Tensor | None) -> Any:
    first = next(g for g in grads if type(g) is RowSlice)
    given = [_zeros(first, meta) if g is None else g for g, meta in zip(grads, node._input_metadata, strict=True)]
    caught: dict[int, Tensor] = {}
    catch, enter = cast(Any, _Catch).apply, cast(Any, _Enter).apply

    def region(*inputs: Any) -> tuple[Any, ...]:
        outputs = node.run_function(
            *(catch(x, caught, i) if isinstance(x, Tensor) and x.requires_grad else x for i, x in enumerate(inputs))
        )
        every = cast("tuple[Any, ...]", (outputs,) if isinstance(outputs, Tensor) else outputs)
        return tuple(
            enter(out, g) if type(g) is RowSlice and isinstance(out, Tensor) and out.requires_grad else out
            for out, g in zip(every, given, strict=True)
        )

    numbers = [g.values.new_ones(()) if type(g) is RowSlice else g for g in given]
    returned = cast(Any, type(node)).apply(NodeWith(node, run_function=region), *numbers)
    return tuple(caught.pop(place - 2, grad) for place, grad in enumerate(returned))  # nothing stays behind


def _zeros(like: RowSlice, meta: Any) -> RowSlice | Tensor:
    """The zero gradient of an output without one: as without a pick, parameters used for no other output get zeros."""
    shape = tuple(meta.shape)
    if like.fits(shape):
        values = torch.zeros(like.kept_shape(shape), dtype=meta.dtype, device=meta.device)
        return RowSlice(values, like.rows, like.layout, shape)
    return torch.zeros(shape, dtype=meta.dtype, device=meta.device)
