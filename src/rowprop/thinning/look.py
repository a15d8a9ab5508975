"""A look: both variances of a batch's gradient in the parameters, that between batches and that of the thinning.

The gradient of a batch is the sum over random parts of its rows. How the parts differ gives its variance between
batches. A draw of the thinning gives the other one: the square of its distance from the whole. So a look goes backward
from a gradient that arrives once for each part, at the part's rows, and some times with the thinning. Few rows do: what
a look can tell is limited by the number of parts and draws rather than by the rows in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from rowprop.backprop.foreign import custom_below
from rowprop.backprop.layout import Layout
from rowprop.backprop.sliced import RowSlice
from rowprop.backprop.thinned import rows_in, some

PARTS = 4
"""Parts of the rows: more of them estimate better, and run fewer rows at a time."""
DRAWS = 2
"""Draws of the thinning."""
LOOKED_AT = 0.25
"""The share of the rows that a look runs with."""
FEWEST = 16
"""Rows that a look runs with where there are so many."""


class Look:
    """The backwards of one look.

    Attributes:
        draws: Whether the blocks thin in the backward that runs now.
        share: The share of the rows that are looked at.
        seen: What the blocks saw in the thinned ones.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.draws = False
        self.share = 1.0
        self.seen: list[Any] = []
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
            The thinning's variance and the variance between batches, (2,), float64, of the rows that were looked at.
        """
        rows = rows_in(grad, layout)
        empty = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        chosen = _chosen(rows, offset)
        self.share = len(chosen) / rows.rows.kept
        whole: list[Tensor | None] = [None] * len(self._parameters)
        squares: list[Tensor] = []
        for places in chosen.tensor_split(min(PARTS, len(chosen))):
            part = self._backward(edge, empty, some(rows, places.sort().values))
            squares.append(sum_of_squares(part))
            whole = [b if a is None else a if b is None else a + b for a, b in zip(whole, part, strict=True)]
            del part
        g = len(squares)
        between = (torch.stack(squares).sum() - sum_of_squares(whole) / g) * g / (g - 1)
        self.draws = True
        all_parts = some(rows, chosen.sort().values)
        added = [_distance(self._backward(edge, empty, all_parts), whole) for _ in range(DRAWS)]
        return torch.stack([torch.stack(added).mean(), between])

    def gives(self) -> RowSlice | None:
        """The gradient for the first place that a backward of the look comes to; None for the one that is there."""
        given, self._given = self._given, None
        return given

    def found(self) -> dict[str, list[Any]]:
        """What the blocks saw in all draws."""
        places = {place: None for seen in self.seen for place in seen.seen}
        return {place: [one for seen in self.seen for one in seen.seen.get(place, [])] for place in places}

    def _backward(self, edge: GradientEdge, grad: Tensor, given: RowSlice | None) -> list[Tensor | None]:
        self._given = given
        autograd = cast("Callable[..., Sequence[Tensor | None]]", torch.autograd.grad)
        return list(autograd((edge,), self._parameters, grad_outputs=(grad,), retain_graph=True, allow_unused=True))


def why_none(model: nn.Module, node: Any) -> str | None:
    """Why there can be no look from a node of this model's graph, a sentence; None if there can.

    A custom function may free or overwrite in its backward what a second one needs. Those with a rule do not.
    """
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("DTensor", "FlatParameter"):
            return "no looks under FSDP, whose hooks would take their gradients for the step's"
        if cast(Any, parameter)._backward_hooks:
            return f"no looks, which would call the backward hook of {name}"
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if cast(Any, module)._backward_hooks or cast(Any, module)._backward_pre_hooks:
            return f"no looks, which would call the backward hook of {name or 'the model'}"
    every = cast(Any, torch.nn.modules.module)
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        return "no looks, which would call the backward hooks of all modules"
    custom = custom_below(node)
    if custom is not None:
        return f"no looks, which would run {custom}, a custom function, several times"
    return None


def _chosen(rows: RowSlice, offset: float) -> Tensor:
    """Places of some rows, in a random order."""
    count = rows.rows.kept
    numbers = torch.arange(count, dtype=torch.float32, device=rows.values.device)
    mixed = ((numbers + 1000 * offset) * 12.9898).sin() * 43758.5453  # no random state is touched
    return mixed.remainder(1).argsort()[: max(ceil(LOOKED_AT * count), min(FEWEST, count))]


def _distance(one: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> Tensor:
    """The sum of the differences' squares, 0-d."""
    return sum_of_squares(a if b is None or a is None else a - b for a, b in zip(one, other, strict=True))


def sum_of_squares(gradients: Iterable[Tensor | None]) -> Tensor:
    """The sum of the gradients' squares, 0-d, float64. Sparse ones are left out."""
    norms = [
        cast(Any, torch).linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g is not None and g.layout == torch.strided
    ]
    return torch.stack(norms).double().square().sum()
