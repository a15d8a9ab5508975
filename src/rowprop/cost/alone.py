"""Whether ``recompute`` has the gradient of plain indexing: some rows run by themselves, beside the whole batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowprop.batch import take
from rowprop.distributed import averages_gradients
from rowprop.engines import second_forward_differs, uses_batch_statistics
from rowprop.scoring import LossesFn, losses_of, score_without_graph
from rowprop.state import devices_of, rng_states
from rowprop.step.selective import rows_of


def run_alone(model: nn.Module, batch: Any, losses_fn: LossesFn, losses: Tensor) -> tuple[str | None, str | None]:
    """Run the last quarter of the rows by themselves, without a graph and without a trace.

    The last rows, because the first rows would draw the same dropout masks as in their batch. BatchNorm and random
    numbers are looked for as such, because they hardly change the losses of a model that has not learned anything yet.

    Args:
        model: The model, also behind DDP.
        batch: The whole batch.
        losses_fn: ``(model, batch)`` to losses.
        losses: Of the whole batch, shape ``(N,)``, from the random state that this is called in.

    Returns:
        Two clauses: why the rows cannot be run, and why a second forward has another gradient than plain indexing. Each
        is None where that is not so.
    """
    why = _hindrance(model, batch)
    if why is not None:
        return why, None
    count = max(1, losses.numel() // 4)
    # Behind DDP, whose forward would have the ranks exchange buffers.
    model = cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model
    devices = devices_of(list(model.modules()), batch)
    drew = False

    def watched(model: nn.Module, batch: Any) -> Tensor:
        nonlocal drew
        before = rng_states(devices)
        losses = losses_of(losses_fn, model, batch)
        drew = not all(map(torch.equal, before, rng_states(devices)))
        return losses

    try:
        rows = take(batch, torch.arange(losses.numel() - count, losses.numel()))
        own = score_without_graph(watched, model, rows)
    except Exception as error:  # the user's model may fail on fewer rows in any way
        return f"{count} rows by themselves failed with {type(error).__name__}: {error}".splitlines()[0], None
    why = second_forward_differs(drew=drew, batch_statistics=uses_batch_statistics(model))
    if why is None and _mixed(own, losses[-count:]):
        why = "rows by themselves have other losses than in their batch, so they see each other"
    return None, None if why is None else f"{why}, so its gradient is another one"


def _hindrance(model: nn.Module, batch: Any) -> str | None:
    """Why some of the rows cannot be run by themselves; None where they can."""
    if rows_of(batch) is None:
        return "rows cannot be taken of a batch of unknown make"
    if averages_gradients(model) and not isinstance(model, DistributedDataParallel):
        return "a forward besides the step's would meet the collectives of FSDP"
    if any(_is_compiled(module) for module in model.modules()):
        return "the compiled model would be compiled once more for K rows"
    return None


def _mixed(own: Tensor, among: Tensor) -> bool:
    """Whether rows have other losses by themselves than among the others."""
    coarse = among.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(among.device.type)
    among = among.detach().float()
    finite = among.isfinite()  # a loss that is not finite cannot be compared
    apart = torch.where(finite, among - own.float(), 0.0).abs().max()
    scale = torch.where(finite, among, 0.0).abs().max()
    return not bool(apart <= (2e-2 if coarse else 1e-3) * scale)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
