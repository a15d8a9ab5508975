"""Losses that are not elementwise: one label or more a row."""

from __future__ import annotations

from typing import Any

from rowprop.backprop.rowgrad import Sliced
from rowprop.backprop.rules.registry import densify, rule


@rule("nll_loss_backward", "nll_loss2d_backward", "multi_margin_loss_backward", "multilabel_margin_loss_backward")
def per_row_loss(op: Any, g: Any, input: Any, target: Any, *rest: Any) -> Any:
    """Unreduced losses (N, ...) of scores (N, C, ...): the class dimension comes back behind the first."""
    if type(g) is not Sliced or type(input) is Sliced:
        return densify("the loss's input is sliced, not the losses' gradient")
    if g.dim != 0:
        return densify("the batch is not the losses' first dimension")
    if op.__name__.startswith("multilabel"):
        rest = (*rest[:-1], g.take(rest[-1]))  # is_target, one flag per class and row
    return g.like(op(g.values, g.take(input), g.take(target), *rest))
