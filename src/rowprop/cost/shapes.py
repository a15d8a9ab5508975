"""Where a device tunes kernels anew for each shape, so that a K that changes costs extra each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rowprop.cost.where import graph
from rowprop.selection.common import count_kept

BUCKET = 8
"""K goes in multiples of this where kernels are tuned for each K: it has an eighth of the values then."""
SMALLEST = 8 * BUCKET
"""In batches of fewer rows K is not rounded: a step of 8 rows would be coarse, and there are few K to tune for."""


def tuned_per_shape(losses: Any) -> list[str]:
    """Find the kernels of a step that its device tunes, plans or compiles anew for each number of rows.

    Args:
        losses: Of the step, shape ``(N,)``, with their graph.

    Returns:
        A clause for each kind of kernel; empty on a CPU, and where the losses have no graph. A compiled region shows
        none of its kernels, so on CUDA it counts, although rowprop's own backend compiles one backward for all K.
    """
    if losses.grad_fn is None:
        return []
    if losses.device.type == "mps":
        return ["MPS compiles a graph of each op for each K"]
    if losses.device.type != "cuda":
        return []
    nodes = {node.name() for node in graph(losses.grad_fn)}
    found: list[str] = []
    if any("CudnnAttention" in node for node in nodes):
        found.append("cuDNN attention plans anew for each K")
    if torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark and any("Convolution" in node for node in nodes):
        found.append("cuDNN tunes convolutions anew for each K (torch.backends.cudnn.benchmark)")
    if any("CompiledFunction" in node for node in nodes):
        found.append("kernels in compiled regions may be tuned anew for each K")
    return found


def multiple_for(num_rows: int, tuned: Sequence[str]) -> int:
    """The number whose multiples K should be, given the findings of :func:`tuned_per_shape`; 1 is any K."""
    return BUCKET if tuned and num_rows >= SMALLEST else 1


def kept_in_multiples(keep: float, num_rows: int, multiple_of: int) -> int:
    """K of ``MultipleOf(TopK(keep), multiple_of)``."""
    return min(num_rows, -(-count_kept(keep, num_rows) // multiple_of) * multiple_of)


def selector_for(keep: float, multiple_of: int) -> str:
    """The selector that a way was measured with, as code."""
    return f"TopK({keep:g})" if multiple_of == 1 else f"MultipleOf(TopK({keep:g}), {multiple_of})"


def advice_on(keep: float, multiple_of: int, tuned: Iterable[str]) -> str:
    """The advice to round K, in sentences; empty where K may be any number."""
    if multiple_of == 1:
        return ""
    return (
        f"Selector: {selector_for(keep, multiple_of)}, as measured, because {' and '.join(tuned)}. Rounding pays for a "
        "K that changes from step to step: under LossMass, Threshold, AboveMean and PercentileSampling, by class, "
        "under a schedule of keep, and in a smaller last batch. A fixed keep has one K in batches of one size, so "
        f"{selector_for(keep, 1)} alone is as good there. MultipleOf refuses Nonzero and ImportanceSampling, "
        "whose K changes too, because they are unbiased."
    )
