"""Whole training steps, each from the same state and undone afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.pick import Unit
from rowprop.checks import check_graph
from rowprop.cost.measure import Tick, ignored
from rowprop.cost.where import graph
from rowprop.engines import Engine
from rowprop.errors import InvalidInput
from rowprop.scoring import LossesFn, Scored
from rowprop.selection.base import Selector
from rowprop.state import devices_of, rng_states, step_undone
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop
from rowprop.step.small import unwarned

USUAL = 5  # steps of most verifications; more run where an engine differs


@dataclass(frozen=True)
class Ran:
    """The gradients of one step, and the state in which it left the model, before the step was undone."""

    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng: list[Tensor]
    drew: bool
    changed: list[str]  # parameters that the backward itself changed
    dtype: torch.dtype  # the coarsest that the graph computes in
    record: Record
    shape: torch.Size  # of all losses
    seen: Any  # what the context around the backward yielded

    def other_buffers(self, other: Ran) -> list[str]:
        """Names of the buffers whose values differ in ``other``; NaN equals NaN."""
        pairs = ((name, a, other.buffers[name]) for name, a in self.buffers.items())
        return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]

    def other_rng(self, other: Ran) -> bool:
        """Whether ``other`` left another random state."""
        return not all(map(torch.equal, self.rng, other.rng))


class Bench:
    """Runs steps of one model on one batch, with the same rows kept; ``tick`` is called before each."""

    def __init__(
        self, model: nn.Module, batch: Any, losses_fn: LossesFn, selector: Selector, unit: Unit, tick: Tick | None
    ) -> None:
        self.model = model
        self.modules = list(model.modules())
        self.batch = batch
        self.devices = devices_of(self.modules, batch)
        self._losses_fn, self._selector = losses_fn, selector
        self._unit: Unit = unit
        self._tick = tick or ignored
        self._begun_s = time.perf_counter()
        self._steps = 0

    @unwarned()
    def run(
        self,
        engine: Engine,
        *,
        forward: AbstractContextManager[Any] | None = None,
        backward: Callable[[Tensor], AbstractContextManager[Any]] | None = None,
        scale: float = 1,
    ) -> Ran:
        """Run a step and undo it; ``forward`` is a context around the forward, ``backward`` makes one from the loss.

        The loss is multiplied by ``scale``, and the gradients are divided by it.
        """
        # The first step takes longest, and only the end shows how many steps are needed.
        expected_s = USUAL * (time.perf_counter() - self._begun_s)
        expected = f", about {expected_s:.0f} s in all" if self._steps == 1 else ""
        done = min(self._steps / USUAL, 1 - 0.5 / USUAL)
        self._steps += 1
        self._tick(f"step {self._steps}, engine {engine.name}{expected}", done)
        shapes: list[torch.Size] = []

        def losses_fn(model: Any, batch: Any) -> Any:
            result = cast("object", self._losses_fn(model, batch))
            losses = result.losses if isinstance(result, Scored) else result
            shapes.extend([losses.shape] if isinstance(losses, Tensor) else [])  # the step refuses all else
            return result

        step = SelectiveBackprop(self.model, losses_fn, self._selector, engine=engine, unit=self._unit)
        parameters = dict(self.model.named_parameters())
        with step_undone(self.model, self.batch) as values, torch.enable_grad():
            before = rng_states(self.devices)
            with forward or nullcontext():
                loss, record = step(self.batch)
            if record.selection.is_everything:
                why = "where every engine is plain training and there is nothing to check"
                remedy = "give a larger batch or a smaller keep."
                raise InvalidInput(f"verify would keep all {record.num_rows} rows of the batch, {why}; {remedy}")
            check_graph(loss)
            dtypes = {entry.dtype.to_real() for node in graph(loss.grad_fn) for entry in node._input_metadata}
            dtype = max((kind for kind in dtypes if kind.is_floating_point), key=lambda kind: torch.finfo(kind).eps)
            with backward(loss) if backward else nullcontext() as seen:
                cast(Any, loss * scale if scale != 1 else loss).backward()
            rng = rng_states(self.devices)
            ran = Ran(
                grads={name: p.grad for name, p in parameters.items() if p.requires_grad},
                buffers={name: buffer.clone() for name, buffer in self.model.named_buffers()},
                rng=rng, drew=not all(map(torch.equal, before, rng)),
                changed=[name for name, p in parameters.items() if not torch.equal(p, values[p])],
                dtype=dtype, record=record, shape=shapes[0], seen=seen,
            )  # fmt: skip
            if scale != 1:
                ran.grads.update({name: grad / scale for name, grad in ran.grads.items() if grad is not None})
        # Autocast remembers low-precision copies of the weights together with the graph of this step.
        torch.clear_autocast_cache()
        return ran
