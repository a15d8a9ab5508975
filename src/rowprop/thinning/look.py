"""A look: both variances of a batch's gradient in the parameters, that between batches and that of the thinning.

The gradient of a batch is the sum over two random halves of its rows. How the halves differ gives its variance between
batches. A draw of the thinning gives the other one: the square of its distance from the whole. So a look goes backward
from a gradient that arrives three times: once for each half, and once with the thinning. It takes few rows and one
draw, because batches differ by more than that: many small looks tell more than few large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from rowprop.backprop.foreign import custom_below
from rowprop.backprop.layout import Layout
from rowprop.backprop.sliced import RowSlice
from rowprop.backprop.thinned import rows_in, some
from rowprop.state import buffers_kept, rng_kept

LOOKED_AT = 0.125
"""The share of the rows that a look runs with."""
FEWEST = 32
"""Rows that a look runs with where there are so many: with fewer, one of a large gradient decides."""


class Look:
    """The backwards of one look.

    Attributes:
        running: All looks that run. A handle on the same modules leaves the backwards of another one's look alone.
        draws: Whether the blocks thin in the backward that runs now.
        seen: What the blocks saw in the thinned ones.
    """

    running: ClassVar[list[Look]] = []

    def __init__(self, model: nn.Module) -> None:
        self.draws = False
        self.seen: list[Any] = []
        self._modules = list(model.modules())
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._given: RowSlice | None = None

    def take(self, grad: Tensor, layout: Layout, edge: GradientEdge, offset: float) -> Tensor:
        """Estimate the variances of the gradient of all parameters below a place.

        Args:
            grad: The gradient that has come to the place.
            layout: Where its rows are.
            edge: The place in the graph.
            offset: A number drawn from the uniform distribution over [0, 1): it makes the parts.

        Returns:
            The thinning's variance and the variance between batches, (2,), float64, of the sum over all rows.
        """
        self.running.append(self)
        try:
            with rng_kept(self._modules, []), buffers_kept(self._modules):  # a checkpoint runs its part again
                return self._take(grad, layout, edge, offset)
        finally:
            self.running.remove(self)

    def _take(self, grad: Tensor, layout: Layout, edge: GradientEdge, offset: float) -> Tensor:
        rows = rows_in(grad, layout)
        empty = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
        chosen = _chosen(rows, offset)
        halves = [some(rows, places.sort().values) for places in chosen.chunk(2)]
        one, other = (self._backward(edge, empty, half) for half in halves)
        # |one - other|^2 / 2 estimates the variance of a half, and the sum of both has twice that.
        between = sum_of_squares(_both(torch.sub, one, other))
        whole = _both(torch.add, one, other)
        del one, other
        self.draws = True
        drawn = self._backward(edge, empty, some(rows, chosen.sort().values))
        found = torch.stack([sum_of_squares(_both(torch.sub, drawn, whole)), between])
        return found * (rows.rows.kept / len(chosen))  # of all rows there is as much more as there are more of them

    @classmethod
    def elsewhere(cls, model: nn.Module, own: Look | None) -> bool:
        """Whether a look that is not one's own runs through a model."""
        others = [look for look in cls.running if look is not own]
        return any(module in look._modules for look in others for module in model.modules())

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
    return mixed.remainder(1).argsort()[: looked_at(count)]


def looked_at(count: int) -> int:
    """How many of so many rows a look takes: an even number."""
    return max(ceil(LOOKED_AT * count), min(FEWEST, count)) // 2 * 2


def share_looked_at(count: int | None) -> float:
    """The share of so many rows that a look takes; all of them where their number is not known."""
    return looked_at(count) / count if count else 1.0


def _both(
    op: Callable[[Tensor, Tensor], Tensor], first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The sums or differences of two gradients, in which None stands for zeros; the sign of a difference may turn."""
    return [b if a is None else a if b is None else op(a, b) for a, b in zip(first, second, strict=True)]


def sum_of_squares(gradients: Iterable[Tensor | None]) -> Tensor:
    """The sum of the gradients' squares, 0-d, float64. Sparse ones are left out."""
    norms = [
        cast(Any, torch).linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g is not None and g.layout == torch.strided
    ]
    return torch.stack(norms).double().square().sum()
