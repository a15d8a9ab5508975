"""Ignite: a process function for an engine, built on a step that backpropagates the rows that a selector keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rowprop.checks import check_callable, check_whole, shown
from rowprop.errors import InvalidInput
from rowprop.integrations.shared import ClassesFn, check_classes_fn, module_of, numbers_of
from rowprop.step.selective import SelectiveBackprop

_moved: Any = module_of("ignite", "utils", "Ignite").convert_tensor


def update(
    selective: SelectiveBackprop,
    optimizer: torch.optim.Optimizer,
    *,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    classes_fn: ClassesFn | None = None,
    gradient_accumulation_steps: int = 1,
    scaler: torch.amp.GradScaler | None = None,
) -> Callable[[Any, Any], dict[str, Tensor | float]]:
    """Make the process function of a training engine: ``trainer = Engine(update(selective, optimizer))``.

    It stands where ``ignite.engine.supervised_training_step`` stands. In each iteration it computes the losses of all
    rows, backpropagates those that are kept, and steps. ``engine.state.output`` is then a dict: ``loss_all`` and
    ``loss_kept``, the losses of all rows and of the kept ones, and the kept share as ``kept``. ``engine.state.record``
    is the whole :class:`rowprop.Record`.

    Args:
        selective: The step, whose state ``Checkpoint`` saves as any other object's. On several devices give it
            ``ranks``. Progress, which schedules follow, is the engine's, unless the step was given ``total_steps``.
            With a ``history`` batches are those of a :class:`rowprop.history.WithIds`, a pair of ids and rows.
        optimizer: Steps on the model's parameters.
        device: Where a batch's tensors are moved. Default None: they stay.
        non_blocking: Whether the host does not wait for that. Default False.
        classes_fn: Returns the class of each row of a batch, shape ``(N,)``, int64: for selectors that need it, and
            then the output has the kept share of each class of the batch, as ``kept/CLASS``. Default None.
        gradient_accumulation_steps: Iterations per step of the optimizer, 1 or more; each counts alike. Default 1, for
            each iteration, or as the step's ``accumulate_to`` says.
        scaler: Scales the loss, for float16. Autocast is the losses function's. Default None.

    Returns:
        A function of the engine and the batch.

    Raises:
        MissingExtra: On import, where Ignite is not installed.
        InvalidInput: An argument is of another kind; in an iteration, the step accumulates by ``accumulate_to`` as
            well.

    Exactness:
        The gradient is that of :class:`rowprop.SelectiveBackprop`.
    """
    if not isinstance(selective, SelectiveBackprop):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(
            f"update got selective={shown(selective)}, a {type(selective).__name__}, but a "
            "rowprop.SelectiveBackprop was needed; rowprop.SelectiveBackprop(model, losses_fn, selector) makes one."
        )
    check_callable("update", "optimizer.step", getattr(optimizer, "step", None), "an optimizer was needed.")
    check_classes_fn("update", classes_fn)
    check_whole("update", "gradient_accumulation_steps", gradient_accumulation_steps, 1)
    steps, stepped = gradient_accumulation_steps, True

    def process(engine: Any, batch: Any) -> dict[str, Tensor | float]:
        nonlocal stepped
        if stepped:
            optimizer.zero_grad()
        if isinstance(selective.model, nn.Module):
            selective.model.train()
        batch, ids = _moved(batch, device=device, non_blocking=non_blocking), None
        if selective.history is not None:
            ids, batch = batch
        classes = None if classes_fn is None else classes_fn(batch)
        index = (engine.state.iteration - 1) % (engine.state.epoch_length or engine.state.iteration)
        loss, record = selective(batch, index, ids=ids, classes=classes, progress=_progress(selective, engine.state))
        loss = loss / steps if steps > 1 else loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if not record.ready and steps > 1:
            raise InvalidInput(
                f"update got gradient_accumulation_steps={steps} and a step with accumulate_to, but one of the two "
                "decides when the optimizer steps; leave one out."
            )
        stepped = record.ready and engine.state.iteration % steps == 0
        if stepped:
            _step(optimizer, scaler)
        engine.state.record = record
        return numbers_of(record, classes)

    return process


def _step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _progress(selective: SelectiveBackprop, state: Any) -> float | None:
    """The part of the run that is done, in [0, 1]; None where the step knows better, or the engine does not."""
    if selective.total_steps is not None or selective.sampler is not None:
        return None
    if state.max_epochs and state.epoch_length:
        return min(1.0, (state.iteration - 1) / (state.max_epochs * state.epoch_length))
    return min(1.0, (state.iteration - 1) / state.max_iters) if state.max_iters else None
