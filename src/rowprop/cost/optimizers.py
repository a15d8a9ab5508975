"""FLOPs of an optimizer's update, from its formula."""

from __future__ import annotations

from rowprop.checks import check_choice

UPDATE_FLOPS = {"sgd": 2, "momentum": 4, "adam": 14, "adamw": 15}
"""Per parameter and step; the arithmetic is in ``docs/flops.md``. A number that all parameters share (1 - beta, its
power, the learning rate times the decay) is computed once and costs nothing."""


def update_flops(optimizer: str, parameters: int) -> int:
    """FLOPs of one update of ``parameters`` numbers.

    Args:
        optimizer: ``"sgd"`` (without momentum), ``"momentum"``, ``"adam"`` or ``"adamw"``.
        parameters: How many numbers have a gradient.

    Raises:
        InvalidInput: There is no such optimizer.

    Example:
        >>> update_flops("sgd", 10)
        20
    """
    check_choice("update_flops", "optimizer", optimizer, tuple(UPDATE_FLOPS))
    return UPDATE_FLOPS[optimizer] * parameters
