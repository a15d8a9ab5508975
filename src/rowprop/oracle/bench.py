"""Whole training steps, each from the same state and undone afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.checks import is_number
from rowprop.cost.measure import Tick
from rowprop.cost.where import graph
from rowprop.engines import Engine, Unit
from rowprop.errors import InvalidInput
from rowprop.scoring import LossesFn
from rowprop.selection.base import Context, Selection, Selector
from rowprop.selection.common import count_kept, mean_of
from rowprop.state import devices_of, rng_states, step_undone
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop
from rowprop.step.small import unwarned

USUAL = 5
"""Steps of most verifications; more run where an engine differs."""


def keeping(keep: float, rows: Tensor | None, seed: int) -> Selector:
    """A selector that keeps the same rows in every step, whatever the scores: ``rows``, or ``keep`` of all at random.

    Raises:
        InvalidInput: ``keep`` or ``rows`` is out of its range.
    """
    if rows is None and not (is_number(keep) and 0 < keep < 1):
        raise InvalidInput(
            f"verify got keep={keep!r} but a fraction in (0, 1) was needed; where all rows are kept, every engine is "
            "plain training and there is nothing to check."
        )
    if rows is not None and not isinstance(cast(object, rows), Tensor):
        raise InvalidInput(f"verify got rows of type {type(rows).__name__} but a tensor of indices was needed.")
    if rows is not None and (rows.ndim != 1 or rows.dtype != torch.int64 or rows.numel() == 0):
        raise InvalidInput(
            f"verify got rows of shape {tuple(rows.shape)} and dtype {rows.dtype} but at least one row index was "
            "needed, shape (K,), int64."
        )

    def select(scores: Tensor, context: Context) -> Selection:
        total = scores.numel()
        if rows is None:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
            kept = order[: count_kept(keep, total)]
        else:
            kept = cast("Tensor", cast(Any, torch).unique(rows.cpu()))
            if kept.numel() < rows.numel() or int(kept[0]) < 0 or int(kept[-1]) >= total:
                raise InvalidInput(f"verify got rows that repeat or are outside 0 to {total - 1}, the batch's rows.")
        return mean_of(kept.to(scores.device), scores)

    return select


@dataclass(frozen=True)
class Ran:
    """The gradients of one step, and the state in which it left the model, before the step was undone.

    Attributes:
        grads: Each trainable parameter's gradient, by name.
        buffers: A copy of each buffer, by name.
        rng: The random state of every device.
        drew: Whether the step drew random numbers.
        changed: Names of the parameters that the backward itself gave other values.
        dtype: The coarsest dtype that the graph computes in.
        record: The record of the step.
        seen: The value that the context around the backward yielded.
    """

    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng: list[Tensor]
    drew: bool
    changed: list[str]
    dtype: torch.dtype
    record: Record
    seen: Any

    def other_buffers(self, other: Ran) -> list[str]:
        """Names of the buffers whose values differ in ``other``; NaN equals NaN."""
        pairs = ((name, a, other.buffers[name]) for name, a in self.buffers.items())
        return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]

    def other_rng(self, other: Ran) -> bool:
        """Whether ``other`` left another random state."""
        return not _equal(self.rng, other.rng)


class Steps:
    """Counts the steps, and tells ``tick`` of each one."""

    def __init__(self, tick: Tick | None) -> None:
        self.tick = tick
        self.begun_s = time.perf_counter()
        self.run = 0

    def tell(self, engine: str) -> None:
        """Tell that a step begins."""
        if self.tick is not None:
            # The first step takes longest. Only the end shows how many steps are needed.
            expected = f", about {USUAL * (time.perf_counter() - self.begun_s):.0f} s in all" if self.run == 1 else ""
            fraction = min(self.run / USUAL, 1 - 0.5 / USUAL)
            self.tick(f"step {self.run + 1}, engine {engine}{expected}", fraction)
        self.run += 1


@dataclass(frozen=True)
class Bench:
    """Runs steps of one model on one batch, with the same rows kept."""

    model: nn.Module
    batch: Any
    losses_fn: LossesFn
    selector: Selector
    steps: Steps
    unit: Unit = "row"

    @property
    def modules(self) -> list[nn.Module]:
        """The model and every module in it."""
        return list(self.model.modules())

    @property
    def devices(self) -> set[torch.device]:
        """Where the work runs."""
        return devices_of(self.modules, self.batch)

    @unwarned()
    def run(
        self,
        engine: Engine,
        *,
        forward: AbstractContextManager[Any] | None = None,
        backward: Callable[[Tensor], AbstractContextManager[Any]] | None = None,
        scale: float = 1,
    ) -> Ran:
        """Run a step and undo it.

        Args:
            engine: The engine of the step.
            forward: A context around the forward.
            backward: Makes a context around the backward from the loss.
            scale: The loss is multiplied by it, and the gradients are divided by it.

        Raises:
            InvalidInput: All rows are kept, or the losses have no graph.
        """
        self.steps.tell(engine.name)
        step = SelectiveBackprop(self.model, self.losses_fn, self.selector, engine=engine, unit=self.unit)
        parameters = dict(self.model.named_parameters())
        with step_undone(self.model, self.batch) as values, torch.enable_grad():
            before = rng_states(self.devices)
            with forward or nullcontext():
                loss, record = step(self.batch)
            _check_step(loss, record)
            dtype = _coarsest_dtype(loss)
            with backward(loss) if backward else nullcontext() as seen:
                cast(Any, loss * scale if scale != 1 else loss).backward()
            rng = rng_states(self.devices)
            ran = Ran(
                grads={
                    name: p.grad if scale == 1 or p.grad is None else p.grad / scale
                    for name, p in parameters.items()
                    if p.requires_grad
                },
                buffers={name: buffer.clone() for name, buffer in self.model.named_buffers()},
                rng=rng,
                drew=not _equal(before, rng),
                changed=[name for name, p in parameters.items() if not torch.equal(p, values[p])],
                dtype=dtype,
                record=record,
                seen=seen,
            )
        # Autocast remembers low-precision copies of the weights together with the graph of this step.
        torch.clear_autocast_cache()
        return ran


def _check_step(loss: Tensor, record: Record) -> None:
    if record.selection.is_everything:
        raise InvalidInput(
            f"verify would keep all {record.num_rows} rows of the batch, where every engine is plain training and "
            "there is nothing to check; give a larger batch or a smaller keep."
        )
    if not loss.requires_grad:
        raise InvalidInput(
            "The losses have no graph but verify checks a backward; let losses_fn return them without detach() or "
            "no_grad(), and at least one parameter require a gradient."
        )


def _coarsest_dtype(loss: Tensor) -> torch.dtype:
    seen = {entry.dtype.to_real() for node in graph(loss.grad_fn) for entry in node._input_metadata}
    return max((dtype for dtype in seen if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
