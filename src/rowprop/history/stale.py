"""Scores from remembered losses: a forward runs only for the rows whose stored loss is too old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rowprop.batch import take
from rowprop.checks import check_losses_fn, check_whole
from rowprop.distributed import averages_gradients
from rowprop.errors import InvalidInput
from rowprop.history.losses import LossHistory
from rowprop.scoring import per_row
from rowprop.selection.base import Context, check_context
from rowprop.state import device_of


class StaleScorer:
    """Score rows by their stored losses, and run a forward only for rows whose stored loss is too old.

    A row's loss is computed when it has none, and from then on at every ``staleness``-th visit; the losses of the rows
    that the step trains count as fresh. The history is the step's: ``SelectiveBackprop(model, losses_fn, selector,
    history=LossHistory(), scorer=StaleScorer(losses_fn), engine="recompute")``. Losses are up to ``staleness - 1``
    visits old, and BatchNorm in training normalises over the scored rows alone. Sources: Jiang et al., 2019,
    arXiv:1910.00762 (``StaleSB``); angelajiang/SelectiveBackprop, ``lib/fp_selectors.py``.

    Args:
        losses_fn: ``(model, batch)`` to losses, shape ``(n,)`` or ``(n, 1)``, of the rows that need a forward.
        staleness: Visits after which a row is scored anew, 1 (always) or more. Default 3, as the published command
            line.

    Cost:
        A forward without a graph of about ``N / staleness`` rows, which the host reads; with ``recompute`` and the kept
        fraction k ``F / staleness + k (F + B)``. One row alone is joined by another, because BatchNorm in training
        needs two; under DDP and FSDP, whose ranks must run as many forwards, at least two rows have one.
    """

    def __init__(self, losses_fn: Callable[[Any, Any], Tensor], staleness: int = 3) -> None:
        check_losses_fn("StaleScorer", losses_fn)
        check_whole("StaleScorer", "staleness", staleness, 1)
        self.losses_fn = losses_fn
        self.staleness = staleness

    def __call__(self, model: Any, batch: Any, context: Context) -> Tensor:
        """Return the losses, stored or fresh, ``(N,)``, float32; needs ids and a LossHistory in the context."""
        check_context("StaleScorer", context)
        ids, history = context.need("ids", "StaleScorer"), context.need("history", "StaleScorer")
        if not isinstance(history, LossHistory):
            needed = "a LossHistory was needed, which remembers losses; give SelectiveBackprop one."
            raise InvalidInput(f"StaleScorer got a {type(history).__name__} as history but {needed}")
        scores = history.losses_of(ids)
        stale = scores.isnan() | (history.age_of(ids) + 1 >= self.staleness)
        rows = stale.nonzero().squeeze(1)
        if rows.numel() == 0 and averages_gradients(model):  # the forward of another rank would wait for this one's
            rows = rows.new_zeros(1)
        if rows.numel() == 1 and scores.numel() > 1:
            rows = torch.cat([rows, (rows + 1) % scores.numel()]).sort().values
        on = device_of(model, batch) or scores.device
        scores, rows = scores.to(on), rows.to(on)
        if rows.numel() > 0:
            part = batch if rows.numel() == scores.numel() else take(batch, rows)
            fresh = per_row("losses_fn", self.losses_fn(model, part), rows.numel())
            fresh = fresh.detach().to(on, torch.float32)
            history.store(ids[rows.to(ids.device)], fresh)
            scores = scores.index_copy(0, rows, fresh)
        return scores
