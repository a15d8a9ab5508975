"""Measure what each way to train on K rows costs on a user's own model, for :func:`rowprop.plan`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowprop.backprop.pick import BatchNorm
from rowprop.batch import take
from rowprop.checks import check_choice, check_number, check_tick, check_trainable, check_whole, is_number, shown
from rowprop.cost.findings import grouped
from rowprop.cost.measure import Routine, Spread, Tick, Timing, accelerators, ignored, measure
from rowprop.cost.plan import ANOTHER, BY_POLICY, LEFT_OUT, THINNED, Cost, Key, Measurement, PlainStep, Plan, make_plan
from rowprop.cost.timing import MakeOptimizer, Variant, routines_of
from rowprop.distributed import averages_gradients
from rowprop.engines import Sliced, policies_on, second_forward_differs, uses_batch_statistics
from rowprop.errors import InvalidInput
from rowprop.scoring import LossesFn, losses_of, score_without_graph
from rowprop.selection.selectors import count_kept
from rowprop.state import devices_of, rng_states
from rowprop.step.selective import rows_of
from rowprop.thinning.blocks import repeated_blocks

ANCHORS = (1 / 16, 3 / 8, 15 / 16)
"""The keeps that the lines are laid through; a row more or less where the user asked for the same number of rows."""
ENOUGH = 3  # rounds; a further keep is measured only if so many rounds of all still fit
WARMUP = 2  # rounds before those that count, if there is time for all of them
Gradients = Mapping[str, tuple[str, str]]
"""By engine how its gradient differs, and why, as :func:`make_plan` takes them."""
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
    batchnorm: BatchNorm = None,
    rounds: int = 7,
    seconds: float = 60.0,
    tick: Tick | None = None,
) -> Plan:
    """Measure the cost of each way of selecting on your own model and batch, beside the limit; it changes nothing.

    Whole steps of :class:`rowprop.SelectiveBackprop` run interleaved with plain ones, at a few numbers of kept rows;
    straight lines through the medians predict the others. The ways are ``sliced``; ``recompute``; and ``masked``, plain
    indexing, which costs the plain step. A model in training mode that has blocks for :func:`rowprop.thin` also runs
    ``thinned``: the step of all rows with this ``keep`` after every block. Each way then runs at the keeps asked for,
    which the lines have not seen, as far as there is time. A way of another gradient than plain indexing's
    (``recompute`` with BatchNorm or dropout in training, ``thinned``) is listed, and never chosen.

    Args:
        model: An ``nn.Module``, measured in the modes it is in.
        batch: The whole batch, N rows, at least 2, as it will be trained on: costs depend on its sizes.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``. The plan is one for rows.
        keep: Fraction of rows kept, in (0, 1), or several; the plan's ``choice`` is for the first. Default 0.1, 0.25,
            0.5, 0.75 and 0.9.
        optimizer: Its update is part of each step: ``"sgd"`` (default), ``"momentum"``, ``"adam"``, ``"adamw"``, or
            None for no update.
        batchnorm: How ``sliced`` treats training BatchNorm, see :func:`rowprop.pick`. Default None.
        rounds: How often each step is measured at most, 1 or more. Default 7.
        seconds: The time that measuring may take, above 0. The plain step and each way at two numbers of kept rows are
            measured at least once, however long that takes; then the first keep asked for, a third number of rows for
            the lines, and the other keeps, each where three rounds of all still fit. Default 60.
        tick: Called with a line on the work at hand and the fraction of all work done. Default None.

    Returns:
        A :class:`~rowprop.cost.Plan`; ``print(result.reason)`` is the short of it. No engine follows it by itself.

    Raises:
        InvalidInput: An argument is out of its range; the losses do not fit (as in :class:`rowprop.SelectiveBackprop`).
            Errors that ``losses_fn`` raises pass through.

    Cost:
        About ``seconds``, and less where steps are fast: ``(rounds + 3) * (7 + 2 * len(keep))`` of them. About 13 plain
        steps where one is longer than a tenth of ``seconds``. Parameters, gradients, buffers and random state are put
        back.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(16, 4), torch.randn(16, 1)
        >>> result = rowprop.plan(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square(), keep=0.25)
        >>> result.num_rows, sorted(way.engine for way in result.ways)
        (16, ['masked', 'recompute', 'sliced', 'thinned'])
    """
    check_trainable("plan", model, batch, losses_fn)
    keeps = _keeps(keep)
    check_choice("plan", "optimizer", optimizer, (*OPTIMIZERS, None))
    Sliced(batchnorm=batchnorm)  # raises where there is no such policy
    check_whole("plan", "rounds", rounds, 1)
    if not is_number(seconds) or seconds <= 0:
        raise InvalidInput(f"plan got seconds={shown(seconds)} but a number above 0 was needed; 60 is the default.")
    check_tick("plan", tick)
    tell, begun_s = tick or ignored, time.perf_counter()
    tell(f"about {seconds:.0f} s at most", 0.0)
    losses = score_without_graph(partial(losses_of, losses_fn), model, batch)
    n = losses.numel()
    if n < 2:
        raise InvalidInput(f"plan got a batch of {n} row but at least 2 were needed, to choose from.")
    ways = ["sliced", THINNED] if model.training and repeated_blocks(model) else ["sliced"]
    gradients = {engine: (BY_POLICY, policy) for engine, policy in policies_on(model, batchnorm).items()}
    second = second_forward(model, batch, losses_fn, losses)
    if second is not None:
        gradients["recompute"] = second
    if second is None or second[0] != LEFT_OUT:
        ways.append("recompute")
    anchors = [k / n for k in _anchors(n, {count_kept(keep, n) for keep in keeps})]
    full = Variant()
    variants = {(engine, k): Variant(engine, k) for engine in ways for k in (*anchors, *keeps)}
    made = routines_of(
        model, batch, losses_fn, [full, *variants.values()],
        optimizer=None if optimizer is None else OPTIMIZERS[optimizer], batchnorm=batchnorm,
    )  # fmt: skip
    with made as (routines, devices):
        steps = {key: routines[variant] for key, variant in variants.items()}
        # The most important first; a group is measured together or not at all.
        order = [[anchors[0], anchors[-1]], keeps[:1], anchors[1:-1], *([k] for k in keeps[1:])]
        groups = [[key for key in steps if key[1] in group] for group in order if group]
        plain, timings = _measured(
            routines[full], steps, groups, devices, rounds=rounds, seconds=seconds, begun_s=begun_s, tell=tell
        )
    return _fitted(plain, timings, n, anchors, keeps, gradients)


def _keeps(keep: object) -> list[float]:
    """The fractions asked for, each once."""
    several = isinstance(keep, Iterable) and not isinstance(keep, (str, Tensor))
    keeps = list(cast("Iterable[float]", keep)) if several else [cast("float", keep)]
    if not keeps:
        raise InvalidInput("plan got no keep, but at least one fraction in (0, 1) was needed; a quarter is keep=0.25.")
    for fraction in keeps:
        check_number("plan", "keep", fraction, "(0, 1)", lambda number: 0 < number < 1)
    return list(dict.fromkeys(map(float, keeps)))


def second_forward(model: nn.Module, batch: Any, losses_fn: LossesFn, losses: Tensor) -> tuple[str, str] | None:
    """How the gradient of ``recompute`` differs, as :func:`make_plan` takes it; None where it is the same.

    The last quarter of the rows runs by itself: the first rows would draw the same dropout masks as in their batch.
    BatchNorm and random numbers are found as such, because they hardly change the losses of a model that has learned
    nothing yet. ``losses`` are those of the whole batch, from the random state that this is called in.
    """
    if rows_of(batch) is None:
        return LEFT_OUT, "rows cannot be taken of a batch of unknown make"
    if averages_gradients(model) and not isinstance(model, DistributedDataParallel):
        return LEFT_OUT, "a forward besides the step's would meet the collectives of FSDP"
    modules = cast("Iterable[Any]", model.modules())
    if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules):
        return LEFT_OUT, "the compiled model would be compiled once more for K rows"
    if isinstance(model, DistributedDataParallel):  # its forward would have the ranks exchange buffers
        model = cast(nn.Module, model.module)
    count = max(1, losses.numel() // 4)
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
        why = f"{count} rows by themselves failed with {type(error).__name__}: {error}"
        return LEFT_OUT, why.splitlines()[0]
    why = second_forward_differs(drew=drew, batch_statistics=uses_batch_statistics(model))
    if why is None and _differ(own, losses[-count:]):
        why = "rows by themselves have other losses than in their batch, so they see each other"
    return None if why is None else (ANOTHER, f"{why}, so its gradient is another one")


def _differ(own: Tensor, in_batch: Tensor) -> bool:
    """Whether rows have other losses by themselves than in their batch."""
    coarse = in_batch.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(in_batch.device.type)
    in_batch = in_batch.float()
    finite = in_batch.isfinite()  # a loss that is not finite cannot be compared
    apart, scale = (torch.where(finite, each, 0.0).abs().max() for each in (in_batch - own.float(), in_batch))
    return not bool(apart <= (2e-2 if coarse else 1e-3) * scale)


def _measured(
    plain: Routine,
    steps: Mapping[Key, Routine],
    groups: Sequence[Sequence[Key]],
    devices: Iterable[torch.device],
    *,
    rounds: int,
    seconds: float,
    begun_s: float,
    tell: Tick,
) -> tuple[Timing, dict[Key, Timing]]:
    """Measure the plain step, and beside it as many groups of the steps as fit into ``seconds`` since ``begun_s``."""
    # The first run also makes the optimizer's state, once; the second run tells how long a step is.
    plain_s = measure({None: plain}, devices=devices, rounds=1, warmup=0)[None].spread().median
    passed_s = time.perf_counter() - begun_s
    left_s = seconds - passed_s
    chosen, warmup = _affordable(groups, left_s / plain_s, rounds)
    if accelerators(devices):
        warmup = max(warmup, 1)  # each K has kernels of its own, whose tuning takes time and memory
    steps_s = plain_s * (warmup + 1 + rounds) * (1 + sum(map(_on_paper, chosen)))
    said = f"{1 + len(chosen)} kinds of step, about {min(max(left_s, 0.0), steps_s):.0f} s"
    before = min(1.0, passed_s / seconds)
    timings = measure(
        {None: plain, **{key: steps[key] for key in chosen}}, devices=devices, rounds=rounds, warmup=warmup,
        limit_s=left_s, least=1, tick=lambda line, done: tell(f"{said}: {line}", before + (1 - before) * done),
    )  # fmt: skip
    return timings.pop(None), cast("dict[Key, Timing]", timings)


def _on_paper(key: Key) -> float:
    """The rough cost of a step in plain steps: the engines' formulas, for a backward that costs two forwards."""
    engine, keep = key
    return 1 / 3 + keep if engine == "recompute" else (1 + 2 * keep) / 3


def _affordable(groups: Sequence[Sequence[Key]], plain_steps: float, rounds: int) -> tuple[list[Key], int]:
    """The steps that can be measured in the time of so many plain ones, and the rounds to warm up."""
    chosen, *more = groups
    chosen, cost = list(chosen), 1 + sum(map(_on_paper, chosen))
    for group in more:
        cost += sum(map(_on_paper, group))
        if (1 + min(ENOUGH, rounds)) * cost > plain_steps:
            return chosen, 0
        chosen += group
    return chosen, WARMUP if (WARMUP + 1 + rounds) * cost <= plain_steps else 0


def _anchors(n: int, asked: Collection[int]) -> list[int]:
    """Numbers of rows that the lines go through; one that is ``asked`` for moves by a row, if it can."""
    found: list[int] = []
    for anchor in ANCHORS:
        k = min(n - 1, max(1, round(anchor * n)))
        beside = (near for near in (k, k + 1, k - 1) if 0 < near < n and near not in asked and near not in found)
        found.append(next(beside, k))
    return sorted(set(found))


def _fitted(
    plain: Timing, timings: Mapping[Key, Timing], n: int, anchors: list[float], keeps: list[float], gradients: Gradients
) -> Plan:
    """Lay the lines through the anchors, and set the measurements at the keeps beside them."""
    step = ("score", "forward", "select", "backward")  # without the update, which is the same for all
    full_s, *spreads = _levelled([timing.each_s(*step) for timing in (plain, *timings.values())])
    points = {
        (engine, k): Measurement(round(k * n) if k in anchors else count_kept(k, n), s.median, timing.peak_bytes)
        for ((engine, k), timing), s in zip(timings.items(), spreads, strict=True)
    }
    lines = grouped((key for key in points if key[1] in anchors), lambda key: key[0])
    phases_s = {phase: plain.spread(phase).median for phase in plain.phases}
    backward_s = full_s.median * phases_s["backward"] / (phases_s["forward"] + phases_s["backward"])
    if scoring := timings.get(("recompute", anchors[-1])):
        phases_s["score"] = scoring.spread("score").median
    rounds = len(plain.rounds)
    return make_plan(
        [Cost.fit(engine, [points[key] for key in keys]) for engine, keys in lines.items()],
        PlainStep(full_s.median, backward_s, phases_s.get("update", 0.0), plain.peak_bytes, phases_s),
        num_rows=n, keeps=keeps, gradients=gradients,
        measured={key: point for key, point in points.items() if key[1] in keeps},
        rounds=rounds,
        spread=median((s.q3 - s.q1) / s.median for s in (full_s, *spreads)) if rounds > 1 else None,
    )  # fmt: skip


def _levelled(steps: Sequence[Sequence[float]]) -> list[Spread]:
    """The seconds of each step in each round, corrected as if all rounds had been equally fast.

    Other work that lasts a whole round slows down all of its steps about equally: by the median, over the steps, of a
    step's seconds over that step's median seconds.
    """
    middles = [median(seconds) for seconds in steps]
    slowness = [median(s / m for s, m in zip(of_round, middles, strict=True)) for of_round in zip(*steps, strict=True)]
    return [Spread.of([s / slow for s, slow in zip(seconds, slowness, strict=True)]) for seconds in steps]
