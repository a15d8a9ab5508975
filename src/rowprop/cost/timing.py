"""Measure whole training steps: the seconds of scoring, forward, backward and update, and the peak memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowprop.backprop.pick import BatchNorm, Unit
from rowprop.checks import check_choice, check_graph
from rowprop.cost.measure import Done, Routine, Tick, Timing, ignored, measure
from rowprop.engines import ENGINES, Sliced
from rowprop.errors import InvalidInput
from rowprop.scoring import LossesFn, losses_of
from rowprop.selection.base import Context, Selection
from rowprop.selection.selectors import TopK
from rowprop.state import devices_of, leaves_of, step_undone
from rowprop.step.selective import SelectiveBackprop
from rowprop.step.small import unwarned
from rowprop.thinning.blocks import blocks_of
from rowprop.thinning.handle import thin

__all__ = ["Variant", "measure_step"]

THINNED = "thinned"
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Variant:
    """A variant of a training step, to be measured.

    Attributes:
        engine: ``"full"`` (default) is the plain step on all rows; ``"sliced"``, ``"recompute"`` and ``"masked"`` train
            on the rows that :class:`rowprop.TopK` keeps; ``"thinned"`` is the plain step after :func:`rowprop.thin`.
        keep: Fraction of rows kept, in (0, 1]; under ``"thinned"`` after every block. Default 1, as for ``"full"``.
    """

    engine: str = "full"
    keep: float = 1.0

    def __post_init__(self) -> None:
        check_choice("Variant", "engine", self.engine, ("full", THINNED, *ENGINES))
        TopK(self.keep)  # raises where the fraction is out of range
        if self.engine == "full" and self.keep != 1:
            raise InvalidInput(f"Variant got keep={self.keep!r} but the full step keeps all rows; name an engine.")


def measure_step(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    variants: Sequence[Variant] = (Variant(),),
    *,
    optimizer: MakeOptimizer | None = None,
    rounds: int = 20,
    warmup: int = 3,
    limit_s: float | None = None,
    batchnorm: BatchNorm = None,
    tick: Tick | None = None,
) -> dict[Variant, Timing]:
    """Measure whole training steps, several variants side by side; see :func:`rowprop.cost.measure.measure`.

    The phases in the :class:`~rowprop.cost.measure.Timing` of each variant are ``"score"``, the forward without a graph
    of ``recompute``, with buffers and random state put back; ``"forward"``, which makes the graph, under ``recompute``
    of the kept rows, else of all; ``"select"``, from scores to rows, not in the full step; ``"backward"``; and, with
    ``optimizer``, ``"update"``: its step, and dropping the gradients. The full and the thinned step are plain loops,
    every other one a call of :class:`rowprop.SelectiveBackprop`.

    Args:
        model: The model, measured in the modes it is in.
        batch: The whole batch, N rows.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``.
        variants: The steps to measure. Default: the plain step.
        optimizer: Makes one from the parameters that require gradients; its rates become 0. Default None: no update.
        rounds: How many steps of each variant are measured. Default 20.
        warmup: How many steps of each variant run before. Default 3.
        limit_s: After 5 rounds begin none that would end later than so many seconds from now. Default None: no limit.
        batchnorm: How ``sliced`` treats training BatchNorm, see :func:`rowprop.pick`. Default None.
        tick: Called before each step.

    Raises:
        InvalidInput: A variant or a count is out of its range, or there is no graph. Errors of ``losses_fn`` pass.

    Cost:
        ``warmup + 1 + rounds`` steps of each variant; a copy of parameters and buffers. Parameters, buffers, gradients,
        modes and the random state are put back; other state that a forward changes stays changed.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> batch = torch.randn(16, 4), torch.randn(16, 1)
        >>> losses_fn = lambda model, batch: (model(batch[0]) - batch[1]).square()
        >>> variants = [Variant(), Variant("recompute", keep=0.5)]
        >>> found = measure_step(model, batch, losses_fn, variants, optimizer=torch.optim.AdamW, rounds=5)
        >>> [timing.phases for timing in found.values()]
        [('forward', 'backward', 'update'), ('score', 'select', 'forward', 'backward', 'update')]
    """
    made = routines_of(model, batch, losses_fn, variants, optimizer=optimizer, sliced=Sliced(batchnorm))
    with made as (routines, devices):
        return measure(routines, devices=devices, rounds=rounds, warmup=warmup, limit_s=limit_s, tick=tick)


@contextmanager
def routines_of(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    variants: Sequence[Variant],
    *,
    optimizer: MakeOptimizer | None,
    sliced: Sliced,
    unit: Unit = "row",
) -> Generator[tuple[dict[Variant, Routine], set[torch.device]]]:
    """Make the steps that :func:`measure_step` measures, with one optimizer for all; undo them after the block."""
    made = None if optimizer is None else optimizer([p for p in model.parameters() if p.requires_grad])
    for group in [] if made is None else made.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    leaves = leaves_of(model, batch)

    def routine_of(variant: Variant) -> Routine:
        selective = _selective(model, losses_fn, variant, sliced, unit) if variant.engine in ENGINES else None
        blocks = list(blocks_of(model, None)) if variant.engine == THINNED else []
        generator = torch.Generator().manual_seed(0)

        def routine(done: Done) -> None:
            with ExitStack() as stack:
                if variant.engine == THINNED:
                    stack.callback(thin(model, keep=variant.keep, blocks=blocks, generator=generator).remove)
                loss = selective(batch, done) if selective else losses_of(losses_fn, model, batch, unit=unit).mean()
                check_graph(loss)
                done("forward")
                cast(Any, loss).backward()
                done("backward")
                del loss
                if made is not None:
                    made.step()
                    made.zero_grad(set_to_none=True)
                    done("update")
            for leaf in leaves:
                leaf.grad = None

        return routine

    with step_undone(model, batch), torch.enable_grad(), unwarned():
        yield {variant: routine_of(variant) for variant in variants}, devices_of(list(model.modules()), batch)


def _selective(
    model: nn.Module, losses_fn: LossesFn, variant: Variant, sliced: Sliced, unit: Unit
) -> Callable[..., Tensor]:
    """Make a step of SelectiveBackprop that says where scoring, the forward and selecting end."""
    selector, done = TopK(variant.keep), ignored
    scored = "score" if variant.engine == "recompute" else "forward"

    def select(scores: Tensor, context: Context) -> Selection:
        done(scored)
        selection = selector(scores, context)
        done("select")
        return selection

    engine = sliced if variant.engine == "sliced" else variant.engine
    # Not "error", which syncs in each step once the device has computed the losses.
    step = SelectiveBackprop(model, losses_fn, select, engine=engine, unit=unit, nonfinite="keep")

    def loss_of(batch: Any, running: Done) -> Tensor:
        nonlocal done
        done = running
        return step(batch)[0]

    return loss_of
