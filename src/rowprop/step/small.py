"""A warning for models that are too small to gain by slicing.

On a CPU this is decided from the sizes in the graph, without timing. On an accelerator it is timed: does the device
finish a backward as soon as the host has queued it?
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.engines import Engine, Sliced
from rowprop.errors import TooSmall
from rowprop.host import drained_s, has_streams, readable
from rowprop.selection import Selection
from rowprop.thinning.worth import COSTS, work_below

FEW = 0.25  # caps keep in the check, so that it warns about small models, not about a large keep
WATCHED, JUDGED = 10, 5  # backwards on an accelerator; only the last count: the first ones load kernels
_unasked = ContextVar("_unasked", default=False)
_FILTER = "and the filter of this warning is rowprop.TooSmall."


def warn_if_too_small(
    engine: Engine, losses: Tensor | None, selection: Selection, unit: str, loss: Tensor, at_once: list[bool]
) -> bool:
    """Warn if the backward of all rows is less work than that of K rows with Python overhead at each op.

    On a CPU the work is counted as for thinning (``thinning.worth``), at the speed of one core, in float32. More cores
    speed up products but not Python, so a model too small for one core is also too small for more. There is no warning
    for other dtypes, opaque nodes (custom functions, compiled regions, recurrent kernels), or grouped convolutions,
    which are slower than their FLOPs suggest. For accelerators see :func:`_watch`. ``losses`` are the losses of all
    rows, with their graph; ``loss`` is the step's. Returns whether the check is done; it is not if all or no rows are
    trained.
    """
    if not isinstance(engine, Sliced) or _unasked.get():
        return True
    if losses is None or losses.grad_fn is None or not 0 < selection.num_kept < selection.num_rows:
        return False
    if has_streams(losses.device):
        if len(at_once) < WATCHED:
            _watch(loss, at_once)
            return False
        if all(at_once[-JUDGED:]):
            waits = f"runs on a device that waits for Python: {JUDGED} backwards were done as soon as all was queued"
            remedy = "compile the model with backend='rowprop' and mode='reduce-overhead', or take engine='recompute'"
            _warn(f"{waits}; {remedy}; rowprop.plan measures each, {_FILTER}")
        return True
    kind = losses.device.type
    if kind not in COSTS or losses.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return True
    work, _ = work_below(losses, -1)
    least = work.fixed + min(FEW, selection.num_kept / selection.num_rows) * work.by_row
    if least >= work.exact and not _grouped(losses.grad_fn):
        size = f"{selection.num_rows} {unit}s is as much work as {work.exact / 1e6:,.1f} MFLOP"
        fixed = f"the fixed cost of slicing is as much as {work.fixed / 1e6:,.0f}"
        small = "got a model too small to gain by slicing on a CPU: its backward of all"
        _warn(f"{small} {size}, and {fixed}; rowprop.plan measures both, {_FILTER}")
    return True


def _warn(found: str) -> None:
    warnings.warn(f"SelectiveBackprop {found}", TooSmall, stacklevel=4)


def _watch(loss: Tensor, at_once: list[bool]) -> None:
    """Record whether the device finishes this loss's backward as soon as the host has queued it.

    This syncs with the device at the end of the backward. "As soon as" means: in less than a twentieth of the time that
    the host took to queue the backward. The timing decides only whether the warning is printed.
    """
    device = loss.device

    def begun(_: Tensor) -> None:
        begun_s = time.perf_counter()

        def queued() -> None:
            queued_s = time.perf_counter()
            at_once.append(drained_s(device) - queued_s < 0.05 * (queued_s - begun_s))

        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(queued)

    if readable(loss):
        loss.register_hook(begun)


def _grouped(root: Any) -> bool:
    """Whether a graph has a grouped convolution, whose kernels are several times slower."""
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
    """Disable this check and BatchNorm's warning, for code that measures or compares steps."""
    before = _unasked.set(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "batchnorm=None meets")
            yield
    finally:
        _unasked.reset(before)
