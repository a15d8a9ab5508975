"""What a training step takes on this machine: forward, backward, scoring and update, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rowprop.batch import tensors
from rowprop.engines.base import BatchNormPolicy
from rowprop.engines.clock import Done, Run, Tick, Timing, measure
from rowprop.errors import InvalidInput
from rowprop.scoring.forward import Scorer
from rowprop.scoring.losses import LossesFn, losses_of
from rowprop.selection.base import Selection
from rowprop.selection.fixed import TopK
from rowprop.state import devices_of, step_undone
from rowprop.step.selective import SelectiveBackprop

ENGINES = ("full", "sliced", "recompute", "masked")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Way:
    """One way to make a training step.

    Attributes:
        engine: ``"full"`` (default), the plain step on all rows; or ``"sliced"``, ``"recompute"``, ``"masked"``, with
            the rows that :class:`rowprop.TopK` keeps.
        keep: Fraction of rows kept, in (0, 1]. Default 1.
        scorer: What scores the rows. Default None: the losses do.
    """

    engine: str = "full"
    keep: float = 1.0
    scorer: Scorer | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInput(f"engine={self.engine!r} was given but one of {', '.join(ENGINES)} was needed.")
        if self.engine == "full" and (self.keep != 1 or self.scorer is not None):
            raise InvalidInput(
                f"Way got engine='full' with keep={self.keep!r} and scorer={self.scorer!r}, but the full step keeps "
                "all rows without scoring; leave both out, or name an engine."
            )
        TopK(self.keep)  # says what is wrong with it


def measure_step(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    ways: Sequence[Way] = (Way(),),
    *,
    optimizer: MakeOptimizer | None = None,
    rounds: int = 20,
    warmup: int = 3,
    limit_s: float | None = None,
    batchnorm: BatchNormPolicy = "rows",
    tick: Tick | None = None,
) -> dict[Way, Timing]:
    """Measure whole training steps, several ways side by side; see :func:`rowprop.engines.clock.measure`.

    The phases of a step are

    * ``"score"``: the forward without a graph, and keeping buffers and random state over it; only where a way has it;
    * ``"forward"``: the forward that makes the graph, of the kept rows under ``recompute``, else of all;
    * ``"select"``: from scores to rows; not in a full step;
    * ``"backward"``;
    * ``"update"``: the optimizer's step, and dropping the gradients; only with ``optimizer``.

    Everything but a full step is a call of :class:`rowprop.SelectiveBackprop`, with all that it does.

    Args:
        model: The model, measured in the modes it is in.
        batch: The whole batch, N rows.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, ...)``.
        ways: What to measure. Default: the plain step.
        optimizer: Makes the optimizer from the parameters that require gradients. Its rates are set to 0, so that no
            step changes what the next one costs. Default None: no update.
        rounds: How many steps of each way are measured. Default 20.
        warmup: How many steps of each way run before. Default 3.
        limit_s: Begin no round that would end later than so many seconds from now, once 5 are measured. Default None:
            begin all of them.
        batchnorm: How ``sliced`` treats training BatchNorm, see :func:`rowprop.pick`. Default ``"rows"``.
        tick: Called before each step.

    Returns:
        A :class:`~rowprop.engines.clock.Timing` for each way: seconds per phase and round, and a step's peak memory.

    Raises:
        InvalidInput: A way or a count is out of its range, or the losses have no graph. What ``losses_fn`` raises is
            passed on.

    Cost:
        ``warmup + 1 + rounds`` steps of each way; a copy of parameters and buffers. Afterwards parameters, buffers,
        gradients, modes and the random state are what they were; other state that a forward changes is not known here.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> batch = torch.randn(16, 4), torch.randn(16, 1)
        >>> losses_fn = lambda model, batch: (model(batch[0]) - batch[1]).square()
        >>> ways = [Way(), Way("recompute", keep=0.5)]
        >>> found = measure_step(model, batch, losses_fn, ways, optimizer=torch.optim.AdamW, rounds=5)
        >>> [timing.phases for timing in found.values()]
        [('forward', 'backward', 'update'), ('score', 'select', 'forward', 'backward', 'update')]
    """
    with runs_of(model, batch, losses_fn, ways, optimizer=optimizer, batchnorm=batchnorm) as (runs, devices):
        return measure(runs, devices=devices, rounds=rounds, warmup=warmup, limit_s=limit_s, tick=tick)


@contextmanager
def runs_of(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    ways: Sequence[Way],
    *,
    optimizer: MakeOptimizer | None,
    batchnorm: BatchNormPolicy,
) -> Generator[tuple[dict[Way, Run], set[torch.device]]]:
    """Make the steps that :func:`measure_step` measures, with one optimizer for all, and undo them after the block.

    Yields:
        A run for each way, and where the work is done.
    """
    made = None if optimizer is None else optimizer([p for p in model.parameters() if p.requires_grad])
    for group in [] if made is None else made.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    leaves = [*model.parameters(), *(t for t in tensors(batch) if t.is_leaf and t.requires_grad)]

    def run_of(way: Way) -> Run:
        loss_of = _full(model, losses_fn) if way.engine == "full" else _selective(model, losses_fn, way, batchnorm)

        def run(done: Done) -> None:
            loss = loss_of(batch, done)
            if not loss.requires_grad:
                raise InvalidInput(
                    "The losses have no graph but a backward is to be measured; let losses_fn return them without "
                    "detach() or no_grad(), and at least one parameter require a gradient."
                )
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

        return run

    with step_undone(model, batch), torch.enable_grad():
        yield {way: run_of(way) for way in ways}, devices_of(list(model.modules()), batch)


LossOf = Callable[[Any, Done], Tensor]


def _full(model: nn.Module, losses_fn: LossesFn) -> LossOf:
    return lambda batch, done: losses_of(losses_fn, model, batch).mean()


def _selective(model: nn.Module, losses_fn: LossesFn, way: Way, batchnorm: BatchNormPolicy) -> LossOf:
    """A call of SelectiveBackprop that says when scoring, the forward and selecting end."""
    top, done = TopK(way.keep), _nothing
    second_forward = way.engine == "recompute"

    def losses(model: Any, batch: Any) -> Any:
        if way.scorer is not None and not second_forward:
            done("score")
        return losses_fn(model, batch)

    def select(scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        done("score" if second_forward else "forward")
        selection = top(scores)
        done("select")
        return selection

    step = SelectiveBackprop(model, losses, select, scorer=way.scorer, engine=way.engine, batchnorm=batchnorm)

    def loss_of(batch: Any, tell: Done) -> Tensor:
        nonlocal done
        done = tell
        return step(batch)[0]

    return loss_of


def _nothing(phase: str) -> None:
    """No clock is running."""
