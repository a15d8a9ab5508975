"""The FLOPs of a training step of linear and convolution layers, in closed form. 1 multiply-add = 2 FLOPs.

The counts of :func:`rowprop.cost.count.count_step` are checked against these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rowprop.cost.count import UPDATE_FLOPS


@dataclass(frozen=True)
class Layer:
    """A layer whose weights meet each row.

    Attributes:
        forward_flops: FLOPs of one row. The gradient of the weights costs as many, and the gradient of the input too.
        parameters: The number of weights and biases.
        uses: How often the network applies the layer to a row, one after the other. Default 1.
    """

    forward_flops: int
    parameters: int
    uses: int = 1


def linear(inputs: int, outputs: int, *, bias: bool = True, places: int = 1, uses: int = 1) -> Layer:
    """A matrix of ``outputs x inputs`` that meets a row once, or meets each of the row's ``places`` (tokens).

    Forward: ``2 * places * inputs * outputs``; the bias is free.
    """
    return Layer(2 * places * inputs * outputs, inputs * outputs + bias * outputs, uses)


def convolution(
    in_channels: int,
    out_channels: int,
    kernel: Sequence[int],
    places: int,
    *,
    groups: int = 1,
    bias: bool = True,
    uses: int = 1,
) -> Layer:
    """A convolution: each weight meets each of the output's ``places`` (of the input's, if it is transposed).

    Forward: ``2 * places * out_channels * in_channels / groups * prod(kernel)``; padding counts as if it were input.
    """
    weights = in_channels * out_channels // groups * prod(kernel)
    return Layer(2 * places * weights, weights + bias * out_channels, uses)


@dataclass(frozen=True)
class ClosedForm:
    """A step's FLOPs; see :class:`rowprop.cost.count.StepFlops`."""

    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    update_flops: int

    @property
    def ratio(self) -> float:
        """Backward over forward."""
        return (self.backward_input_flops + self.backward_weight_flops) / self.forward_flops

    @property
    def ratio_with_update(self) -> float:
        """Backward and update over forward."""
        backward = self.backward_input_flops + self.backward_weight_flops
        return (backward + self.update_flops) / self.forward_flops


def closed_form(layers: Sequence[Layer], rows: int, *, optimizer: str = "sgd") -> ClosedForm:
    """A chain of layers; the first one reads the batch and so has no input gradient.

    ``forward = weights' gradient = rows * sum(uses * f)``, ``inputs' gradient = forward - rows * f_first``, and the
    update does not depend on the rows.

    Args:
        layers: At least one, in order.
        rows: N.
        optimizer: See :data:`rowprop.cost.count.UPDATE_FLOPS`. Default ``"sgd"``.

    Example:
        >>> step = closed_form([linear(4, 8), linear(8, 1)], rows=6)
        >>> step.ratio, step.update_flops
        (1.2, 98)
    """
    forward = rows * sum(layer.uses * layer.forward_flops for layer in layers)
    return ClosedForm(
        forward_flops=forward,
        backward_input_flops=forward - rows * layers[0].forward_flops,
        backward_weight_flops=forward,
        update_flops=UPDATE_FLOPS[optimizer] * sum(layer.parameters for layer in layers),
    )
