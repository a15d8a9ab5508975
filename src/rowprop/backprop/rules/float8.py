"""torchao's float8 layers, known by name: products of tensors that are rounded by a scale.

The backward takes the scales from the largest entries, and the input's may lie in a row that is not kept. So the kept
rows get further rows with the largest entries of all rows; the gradient is zero there, and they add nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rules.functions import NodeWith
from rowprop.backprop.rules.registry import function_rule
from rowprop.backprop.sliced import Densify, RowSlice

_MULTIPLE = 16
"""The kernels' products need as many rows, or a multiple."""


@function_rule("torchao.float8.float8_linear.matmul_with_hp_or_float8_args")
def float8_linear(node: Any, backward: Any, gradient: RowSlice) -> Any:
    """The product of an input and a weight; the scales, and so the rounding, are those of all rows."""
    full, weight = node.saved_tensors
    if type(full) is not Tensor or full.shape[:-1] != gradient.shape[:-1] or gradient.dim == gradient.ndim - 1:
        return Densify("the input was rounded before, or has another shape than the output")
    g = gradient.merged()  # rounding is not linear: repeated rows are added first
    kept = g.take(full)
    grads, inputs = g.values.flatten(0, -2), kept.flatten(0, -2)
    largest = full.detach().abs().flatten(0, -2).amax(0)
    more = _MULTIPLE - len(inputs) % _MULTIPLE
    saved = torch.cat([inputs, largest.expand(more, -1)]), weight
    padded = torch.cat([grads, grads.new_zeros(more, grads.shape[1])])
    to_input, *others = cast(Any, type(node)).apply(NodeWith(node, saved_tensors=saved), padded)
    return g.like(to_input[: len(inputs)].view(kept.shape)), *others
