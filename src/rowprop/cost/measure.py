"""Measuring what each way of selecting costs on a user's own model, for :func:`rowprop.plan`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from rowprop.backprop.engines import BatchNormPolicy
from rowprop.cost.plan import Cost, Plan, Point, loss_rows_needed, make_plan
from rowprop.cost.timing import MakeOptimizer, Way, measure_step
from rowprop.errors import InvalidInput
from rowprop.scoring.cheap import Downscaled
from rowprop.scoring.forward import score_without_graph, step_undone
from rowprop.selection.common import count_kept
from rowprop.step import LossesFn, losses_of

ANCHORS = (1 / 16, 3 / 8, 15 / 16)
"""Where the costs are measured that the lines go through; a row beside it where that keep is asked for."""

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "momentum": partial(torch.optim.SGD, lr=0.0, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def plan(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    *,
    keep: float | Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9),
    optimizer: str | None = "sgd",
    batchnorm: BatchNormPolicy = "rows",
    memory_limit_bytes: int | None = None,
    rounds: int = 7,
    look_steps: int = 0,
) -> Plan:
    """Measure what each way of selecting costs on your own model and batch, and say which to take.

    Whole steps of :class:`rowprop.SelectiveBackprop` run interleaved with plain ones, at three numbers of kept rows;
    straight lines through the medians predict the others. The ways are ``sliced``; ``recompute`` scored by the full
    forward; ``recompute`` scored on half-size images, where the batch has images and the model takes them; and
    ``masked``, which is plain indexing and saves nothing. At each keep asked for every way is then run too, so that
    each prediction stands beside a measurement that it did not see.

    Args:
        model: An ``nn.Module``, measured in the modes it is in.
        batch: The whole batch, N rows, at least 2, as it will be trained on: costs depend on its sizes.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, ...)``.
        keep: Fraction of rows kept, in (0, 1), or several; the plan's ``choice`` is for the first. Default 0.1, 0.25,
            0.5, 0.75 and 0.9.
        optimizer: Whose update is part of each step: ``"sgd"`` (default), ``"momentum"``, ``"adam"``, ``"adamw"``, or
            None for no update.
        batchnorm: How ``sliced`` treats training BatchNorm, see :func:`rowprop.pick`. Default ``"rows"``.
        memory_limit_bytes: Most that a step may hold at once beyond what lay there before it. Default None: no limit.
        rounds: How often each step is measured, 1 or more; default 7.
        look_steps: Train this many steps of SGD on the batch, look at how flat its losses have become, and undo it.
            Means something on real data only. Default 0: do not look.

    Returns:
        A :class:`~rowprop.Plan`; ``print(result.reason)`` is the short of it.

    Raises:
        InvalidInput: An argument is out of its range; the losses do not fit (as in :class:`rowprop.SelectiveBackprop`).

    Cost:
        About ``(rounds + 4) * (11 + 4 * len(keep))`` training steps; see :func:`rowprop.cost.timing.measure_step`.
        Afterwards parameters, gradients, buffers and random state are what they were.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(16, 4), torch.randn(16, 1)
        >>> result = rowprop.plan(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square(), keep=0.25)
        >>> result.num_rows, sorted(way.engine for way in result.ways)
        (16, ['masked', 'recompute', 'sliced'])
    """
    keeps = _checked(model, keep, optimizer, memory_limit_bytes, look_steps)
    with step_undone(model, batch), torch.no_grad():
        n = losses_of(losses_fn, model, batch).numel()
    if n < 2:
        raise InvalidInput(f"plan got a batch of {n} row but at least 2 were needed, to choose among.")
    anchors = [k / n for k in _anchors(n, {count_kept(k, n) for k in keeps})]
    keys: dict[Key, Way] = {}
    for engine, scorer in _ways(model, batch, losses_fn, n):
        # Plain indexing costs the same at every K, so one number of rows is enough.
        for k in (*(anchors if engine != "masked" else anchors[-1:]), *keeps):
            scoring = Downscaled(losses_fn) if scorer == "half" else None
            keys[engine, scorer, k] = Way(engine, k, scoring)
    full = Way()
    timings = measure_step(
        model,
        batch,
        losses_fn,
        [full, *keys.values()],
        optimizer=None if optimizer is None else OPTIMIZERS[optimizer],
        rounds=rounds,
        batchnorm=batchnorm,
    )
    step = ("score", "forward", "select", "backward")  # all but the update, which is the same for all
    found = {
        key: Point(count_kept(key[2], n), timings[way].spread(*step).median, timings[way].peak_bytes)
        for key, way in keys.items()
    }
    plain = timings[full]
    phases_s = {phase: plain.spread(phase).median for phase in plain.phases}
    phases_s["score"] = timings[keys["recompute", "full", anchors[-1]]].spread("score").median
    update_s = phases_s.get("update", 0.0)
    points: dict[tuple[str, str | None], list[Point]] = {}
    for (engine, scorer, k), point in found.items():
        if k in anchors:
            points.setdefault((engine, scorer), []).append(point)
    costs = [Cost.fit(*way, measured) for way, measured in points.items()]
    return make_plan(
        costs,
        num_rows=n,
        full_s=plain.spread(*step).median,
        keeps=keeps,
        update_s=update_s,
        full_bytes=plain.peak_bytes,
        memory_limit_bytes=memory_limit_bytes,
        loss_rows=_loss_rows(model, batch, losses_fn, look_steps) if look_steps else None,
        phases_s=phases_s,
        measured={key: point for key, point in found.items() if key[2] in keeps},
    )


Key = tuple[str, str | None, float]
"""Engine, scorer, keep."""


def _checked(
    model: object, keep: float | Sequence[float], optimizer: str | None, limit: int | None, look_steps: int
) -> list[float]:
    """The keeps, where the arguments are in range."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"plan got a model of type {type(model).__name__} but a torch.nn.Module was needed.")
    keeps = [float(k) for k in keep] if isinstance(keep, Iterable) else [float(keep)]
    if not keeps or not all(0 < k < 1 for k in keeps):
        raise InvalidInput(f"plan got keep={keep!r} but fractions in (0, 1) were needed; a quarter is keep=0.25.")
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise InvalidInput(f"plan got optimizer={optimizer!r} but None or one of {', '.join(OPTIMIZERS)} was needed.")
    for name, value, least in (("look_steps", look_steps, 0), ("memory_limit_bytes", limit, 1)):
        if value is not None and value < least:
            raise InvalidInput(f"plan got {name}={value!r} but a whole number, {least} or more, was needed.")
    return list(dict.fromkeys(keeps))


def _anchors(n: int, asked: Container[int]) -> list[int]:
    """Numbers of rows that the lines go through: where a row beside it is free, none that is ``asked`` for."""
    found: list[int] = []
    for anchor in ANCHORS:
        k = min(n - 1, max(1, round(anchor * n)))
        beside = (near for near in (k, k + 1, k - 1) if 0 < near < n and near not in asked and near not in found)
        found.append(next(beside, k))
    return sorted(set(found))


def _ways(model: nn.Module, batch: Any, losses_fn: LossesFn, n: int) -> list[tuple[str, str | None]]:
    """Engines and scorers that fit the batch and the model."""
    ways: list[tuple[str, str | None]] = [("masked", None), ("sliced", None), ("recompute", "full")]
    try:
        scores = score_without_graph(Downscaled(losses_fn), model, batch)
    except Exception:  # nothing to make smaller, or the model wants its own size, in whatever words
        return ways
    if scores.dim() > 0 and scores.shape[0] == n and bool(scores.isfinite().all()):
        ways.append(("recompute", "half"))
    return ways


def _loss_rows(model: nn.Module, batch: Any, losses_fn: LossesFn, steps: int) -> float:
    """The fraction of rows that hold 90 % of the loss after a short run, which is undone."""
    with step_undone(model, batch), torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            cast(Any, losses_of(losses_fn, model, batch).mean()).backward()
            optimizer.step()
        losses = score_without_graph(partial(losses_of, losses_fn), model, batch)
        return loss_rows_needed(cast("list[float]", losses.tolist()))
