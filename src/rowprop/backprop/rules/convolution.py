"""Convolutions of any rank, grouped, dilated or transposed: one op, and one image per row.

A convolution with a kernel of one position, as the head of a segmentation model, also takes single pixels.
"""

from __future__ import annotations

from typing import Any

from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice, whole_rows


@rule("convolution_backward", positions=True)
def convolution_backward(op: Any, g: Any, input: Any, weight: Any, *rest: Any) -> Any:
    """The input gradient has K rows; weight and bias gradients contract over the rows."""
    if type(g) is not RowSlice or type(input) is RowSlice or type(weight) is RowSlice:
        return Densify("the convolution's input or weight is sliced, not its output's gradient")
    pixels = g.layout.minor and not g.layout.holds(1) and {*weight.shape[2:], *rest[1]} == {1}  # stride
    pixels = pixels and not any((*rest[2], *rest[5]))  # padding, output padding: each position is by itself
    if g.layout.minor and not pixels:
        g = whole_rows(g, 0)
    if g.dim != 0 and not pixels:
        return Densify("the batch lies in the channels or in space")
    input = g.take(input)
    if g.rows.hook is not None and rest[-1][1]:
        g.rows.hook.measure_convolution(g.rows, g.layout, g.values, input, weight, rest)
    grad_input, grad_weight, grad_bias = op(g.values, input, weight, *rest)
    return (None if grad_input is None else g.like(grad_input)), grad_weight, grad_bias
