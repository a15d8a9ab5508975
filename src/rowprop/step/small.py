"""A word to who trains a model that is too small to gain by slicing: the graph's sizes tell it, and no clock."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rowprop.engines import Engine, Sliced
from rowprop.errors import TooSmall
from rowprop.step.record import Record
from rowprop.thinning.worth import COSTS, work_below

FEW = 0.25  # who keeps more rows than this share is judged as at this share: a small model is told, not a large keep


def warn_if_too_small(engine: Engine, losses: Tensor | None, record: Record) -> bool:
    """Warn where the backward of all rows is less work than one of K rows with its Python at each op.

    The work is counted as for thinning (``thinning.worth``), at the speed of one core, in float32. On more cores the
    products are faster and the Python is not, so a model that is too small for one core is too small there as well.
    Where that says nothing, nothing is said: on an accelerator, in other dtypes, and where a node cannot be looked into
    (custom functions, compiled regions, recurrent kernels) or is slower than its FLOPs (grouped convolutions).
    ``losses`` are of all rows, with their graph. Returns whether it is settled; not if every row is trained, or none.
    """
    if not isinstance(engine, Sliced):
        return True
    if losses is None or losses.grad_fn is None or not 0 < record.num_kept < record.num_rows:
        return False
    kind = losses.device.type
    if kind not in COSTS or losses.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return True
    work, _ = work_below(losses, -1)
    least = work.fixed + min(FEW, record.num_kept / record.num_rows) * work.by_row
    if least >= work.exact and not _grouped(losses.grad_fn):
        size = f"{record.num_rows} {record.unit}s is as much work as {work.exact / 1e6:,.1f} MFLOP"
        fixed = f"the fixed cost of slicing is as much as {work.fixed / 1e6:,.0f}"
        remedy = "rowprop.plan measures both, and the filter of this warning is rowprop.TooSmall."
        small = "SelectiveBackprop got a model too small to gain by slicing on a CPU: its backward of all"
        warnings.warn(f"{small} {size}, and {fixed}; {remedy}", TooSmall, stacklevel=3)
    return True


def _grouped(root: Any) -> bool:
    """Whether a graph has a convolution in groups, whose kernels reach a fraction of the speed of others."""
    ahead, seen = [root], set[Any]([None])
    while ahead:
        node = ahead.pop()
        if node not in seen:
            if node.name().startswith("Convolution") and node._saved_groups > 1:
                return True
            seen.add(node)
            ahead += [edge for edge, _ in node.next_functions]
    return False


@contextmanager
def unwarned() -> Generator[None]:
    """Steps without that warning, and without the one on BatchNorm: for what measures or compares them anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TooSmall)
        warnings.filterwarnings("ignore", "batchnorm=None meets")
        yield
