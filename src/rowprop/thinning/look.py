"""A look: both variances of a batch's gradient in the parameters, that between batches and that of the thinning.

The gradient of a batch is the sum over random parts of its rows. How the parts differ gives its variance between
batches. A draw of the thinning gives the other one: the square of its distance from the whole. So a look goes backward
from a gradient that arrives once for each part, at the part's rows, and once with the thinning.
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

PARTS = 4
"""Parts of the rows: more of them estimate better, and run fewer rows at a time."""


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
            offset: A number drawn from the uniform distribution over [0, 1): it makes the parts.

        Returns:
            The thinning's variance and the variance between batches, (2,), float64.
        """
        rows = rows_in(grad, layout)
        empty = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        parts = _parts(rows, offset)
        whole: list[Tensor | None] = [None] * len(self._parameters)
        squares: list[Tensor] = []
        for places in parts:
            part = self._backward(edge, empty, some(rows, places))
            squares.append(sum_of_squares(part))
            whole = [b if a is None else a if b is None else a + b for a, b in zip(whole, part, strict=True)]
            del part
        g = len(parts)
        between = (torch.stack(squares).sum() - sum_of_squares(whole) / g) * g / (g - 1)
        self.draws = True
        thinned = self._backward(edge, empty, rows) if type(grad) is RowGrad else self._backward(edge, grad, None)
        return torch.stack(
            [
                sum_of_squares(a if b is None or a is None else a - b for a, b in zip(thinned, whole, strict=True)),
                between,
            ]
        )

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


def _parts(rows: RowSlice, offset: float) -> list[Tensor]:
    """Places of the rows in a few random parts of about the same size, in order in each."""
    count = rows.rows.kept
    numbers = torch.arange(count, dtype=torch.float32, device=rows.values.device)
    mixed = (
        (((numbers + 1000 * offset) * 12.9898).sin() * 43758.5453).remainder(1).argsort()
    )  # no random state is touched
    return [part.sort().values for part in mixed.tensor_split(min(PARTS, count))]


def sum_of_squares(gradients: Iterable[Tensor | None]) -> Tensor:
    """The sum of the gradients' squares, 0-d, float64. Sparse ones are left out."""
    norms = [
        cast(Any, torch).linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g is not None and g.layout == torch.strided
    ]
    return torch.stack(norms).double().square().sum()
