"""A look: both variances of a batch's gradient in the parameters, that between batches and that of the thinning.

The gradient of a sum over rows is the sum of two halves'. Between batches, the variance of the whole is that of the
difference of the halves, so one split of the rows gives an estimate. One draw of the thinning gives the other: the
square of its distance from the whole. Three backwards inside the backward give all gradients: one of each half, and a
thinned one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from rowprop.backprop.layout import Layout
from rowprop.backprop.rowgrad import RowGrad
from rowprop.backprop.sliced import RowSlice
from rowprop.backprop.thinned import rows_in, some


class Look:
    """The backwards of one look.

    Attributes:
        draws: Whether the blocks thin in the backward that runs now.
        seen: What the blocks saw in the thinned one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.draws = False
        self.seen: Any = None
        self._parameters = parameters
        self._given: RowSlice | None = None

    def take(self, grad: Tensor, layout: Layout, edge: GradientEdge, offset: float) -> Tensor:
        """Estimate the variances of the gradient of all parameters below a place.

        Args:
            grad: The gradient that has come to the place.
            layout: Where its rows are.
            edge: The place in the graph.
            offset: A number drawn from the uniform distribution over [0, 1): it splits the rows.

        Returns:
            The thinning's variance and the variance between batches, (2,), float64.
        """
        rows = rows_in(grad, layout)
        empty = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        one, other = (self._backward(edge, empty, some(rows, places)) for places in _halves(rows, offset))
        between = _distance(one, other)
        whole = [a if b is None else b if a is None else a + b for a, b in zip(one, other, strict=True)]
        del one, other
        self.draws = True
        thinned = self._backward(edge, empty, rows) if type(grad) is RowGrad else self._backward(edge, grad, None)
        return torch.stack([_distance(thinned, whole), between])

    def gives(self) -> RowSlice | None:
        """The gradient for the first place that a backward of the look comes to; None for the one that is there."""
        given, self._given = self._given, None
        return given

    def _backward(self, edge: GradientEdge, grad: Tensor, given: RowSlice | None) -> list[Tensor | None]:
        self._given = given
        autograd = cast("Callable[..., Sequence[Tensor | None]]", torch.autograd.grad)
        return list(autograd((edge,), self._parameters, grad_outputs=(grad,), retain_graph=True, allow_unused=True))


def why_none(model: nn.Module) -> str | None:
    """Why there can be no look at this model, a sentence; None if there can."""
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("DTensor", "FlatParameter"):
            return "no looks under FSDP, whose hooks would take their gradients for the step's"
        if cast(Any, parameter)._backward_hooks:
            return f"no looks, which would call the backward hook of {name}"
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if cast(Any, module)._backward_hooks or cast(Any, module)._backward_pre_hooks:
            return f"no looks, which would call the backward hook of {name or 'the model'}"
    return None


def _halves(rows: RowSlice, offset: float) -> tuple[Tensor, Tensor]:
    """Places of a random half of the rows, and of the others, both in order."""
    count = rows.rows.kept
    numbers = torch.arange(count, dtype=torch.float32, device=rows.values.device)
    mixed = ((numbers + (1 + offset)) * (100 * (1 + offset))).sin().argsort()
    return mixed[: count // 2].sort().values, mixed[count // 2 :].sort().values


def _distance(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> Tensor:
    """The sum of squares of the differences, 0-d, float64. A sparse gradient is left out."""
    norms = [
        cast(Any, torch).linalg.vector_norm(a - b, dtype=torch.promote_types(a.dtype, torch.float32))
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None and a.layout == b.layout == torch.strided
    ]
    return torch.stack(norms).double().square().sum()
