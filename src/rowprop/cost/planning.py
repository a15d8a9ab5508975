"""Measuring the cost of each way of selecting on a user's own model, for :func:`rowprop.plan`."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.pick import BatchNorm
from rowprop.checks import check_choice, check_number, check_tick, check_trainable, check_whole, is_number, shown
from rowprop.cost.alone import run_alone
from rowprop.cost.lines import Cost, Measurement
from rowprop.cost.measure import Routine, Spread, Tick, Timing, accelerators, measure, unheard
from rowprop.cost.plan import THINNED, Gradients, Key, Measured, PlainStep, Plan, loss_rows_needed, make_plan
from rowprop.cost.shapes import kept_in_multiples, multiple_for, tuned_per_shape
from rowprop.cost.timing import MakeOptimizer, Variant, routines_of
from rowprop.engines import Sliced, policies_on
from rowprop.errors import InvalidInput
from rowprop.scoring import Downscaled, LossesFn, losses_of, score_without_graph
from rowprop.state import devices_of, step_undone
from rowprop.thinning.blocks import repeated_blocks

ANCHORS = (1 / 16, 3 / 8, 15 / 16)
"""The keeps that the lines are laid through; a row more or less where the user asked for the same number of rows."""
ENOUGH = 3
"""Rounds that are worth more than another keep: a further keep is measured only if so many rounds of all still fit."""
WARMUP = 2
"""Rounds to warm up before the rounds that count, if there is time for all of them."""

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
    memory_limit_bytes: int | None = None,
    rounds: int = 7,
    seconds: float = 60.0,
    look_steps: int = 0,
    tick: Tick | None = None,
) -> Plan:
    """Measure the cost of each way of selecting on your own model and batch, and say which way to take.

    Whole steps of :class:`rowprop.SelectiveBackprop` run interleaved with plain ones, at a few numbers of kept rows;
    straight lines through the medians predict the others. The ways are ``sliced``; ``recompute`` scored by the full
    forward; ``recompute`` scored on half-size images, where the batch has images and the model takes them; and
    ``masked``, which is plain indexing and saves nothing. A model in training mode that has blocks for
    :func:`rowprop.thin` also runs ``thinned``: the step of all rows with this ``keep`` after every block. Then every
    way also runs at the keeps asked for, as far as there is time, so that predictions stand beside measurements that
    the lines have not seen.

    A way whose gradient is another one than plain indexing's (``recompute`` with BatchNorm or dropout in training,
    ``thinned``) is measured and listed, and never chosen.

    Args:
        model: An ``nn.Module``, measured in the modes it is in.
        batch: The whole batch, N rows, at least 2, as it will be trained on: costs depend on its sizes.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``. The plan is one for rows.
        keep: Fraction of rows kept, in (0, 1), or several; the plan's ``choice`` is for the first. Default 0.1, 0.25,
            0.5, 0.75 and 0.9.
        optimizer: Its update is part of each step: ``"sgd"`` (default), ``"momentum"``, ``"adam"``, ``"adamw"``, or
            None for no update.
        batchnorm: How ``sliced`` treats training BatchNorm, see :func:`rowprop.pick`. Default None.
        memory_limit_bytes: The most that a step may hold at once beyond the memory held before it. Default None: no
            limit.
        rounds: How often each step is measured at most, 1 or more. Default 7.
        seconds: The time that measuring may take, above 0. It decides which steps are measured, and how often: always
            the plain step and each way at two numbers of kept rows, at least once; then the first keep asked for, a
            third number of rows for the lines, and the other keeps, each where three rounds of all still fit. So a step
            of many seconds takes longer than this. Default 60.
        look_steps: Train this many steps of SGD on the batch, look at how flat its losses have become, and undo it.
            The look needs real data to mean something, and its time comes on top of ``seconds``. Default 0: no look.
        tick: Called with a line on the work at hand and the fraction of all work done. Default None.

    Returns:
        A :class:`~rowprop.Plan`; ``print(result.reason)`` is the short of it.

    Raises:
        InvalidInput: An argument is out of its range; the losses do not fit (as in :class:`rowprop.SelectiveBackprop`).
            Errors that ``losses_fn`` raises pass through.

    Cost:
        About ``seconds``, and less where steps are fast: ``(rounds + 3) * (8 + 2 * len(keep))`` of them, half as many
        again with half-size scoring. For a plain step longer than a tenth of ``seconds``, about 15 plain steps.
        Afterwards parameters, gradients, buffers and random state are as before.

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
    if memory_limit_bytes is not None:
        check_whole("plan", "memory_limit_bytes", memory_limit_bytes, 1)
    check_whole("plan", "look_steps", look_steps, 0)
    budget = _Budget(rounds, seconds, tick)
    found = _look(model, batch, losses_fn, batchnorm)
    n = found.num_rows
    multiple_of = multiple_for(n, found.tuned)
    kept = {keep: kept_in_multiples(keep, n, multiple_of) for keep in keeps}
    anchors = [k / n for k in _anchors(n, {*kept.values()}, multiple_of)]
    kept |= {anchor: round(anchor * n) for anchor in anchors}
    full = Variant()
    variants = {
        (engine, scorer, k): Variant(engine, k, Downscaled(losses_fn) if scorer == "half" else None, multiple_of)
        for engine, scorer in found.ways
        # Plain indexing costs the same at every K, so one keep is enough.
        for k in ((*anchors, *keeps) if engine != "masked" else anchors[-1:])
    }
    made = routines_of(
        model, batch, losses_fn, [full, *variants.values()],
        optimizer=None if optimizer is None else OPTIMIZERS[optimizer], batchnorm=batchnorm,
    )  # fmt: skip
    with made as (routines, devices):
        steps = {key: routines[variant] for key, variant in variants.items()}
        plain, timings = budget.spend(routines[full], steps, _groups(steps, anchors, keeps), devices)
    loss_rows = None
    if look_steps:
        budget.tell(f"training {look_steps} steps to look at the losses", 1.0)
        loss_rows = _loss_rows(model, batch, losses_fn, look_steps)
    costs, step, measured = _read(plain, timings, kept, anchors, keeps)
    return make_plan(
        costs, step, num_rows=n, keeps=keeps, memory_limit_bytes=memory_limit_bytes, loss_rows=loss_rows,
        gradients=found.gradients, measured=measured, tuned=found.tuned,
    )  # fmt: skip


def _keeps(keep: object) -> list[float]:
    """The fractions asked for, each once."""
    several = isinstance(keep, Iterable) and not isinstance(keep, (str, Tensor))
    keeps = list(cast("Iterable[float]", keep)) if several else [cast("float", keep)]
    if not keeps:
        raise InvalidInput("plan got no keep, but at least one fraction in (0, 1) was needed; a quarter is keep=0.25.")
    for fraction in keeps:
        check_number("plan", "keep", fraction, "(0, 1)", lambda number: 0 < number < 1)
    return list(dict.fromkeys(map(float, keeps)))


@dataclass(frozen=True)
class _Looked:
    """N, kernels tuned for each K, the ways that batch and model allow, and their gradients."""

    num_rows: int
    tuned: list[str]
    ways: list[tuple[str, str | None]]
    gradients: Gradients


def _look(model: nn.Module, batch: Any, losses_fn: LossesFn, batchnorm: BatchNorm) -> _Looked:
    """Run a forward of all rows and a forward of some; only on an accelerator the first has a graph, to look at it."""
    fast = accelerators(devices_of(list(model.modules()), batch))
    with step_undone(model, batch), torch.set_grad_enabled(bool(fast)):
        losses = losses_of(losses_fn, model, batch)
    tuned, losses = tuned_per_shape(losses), losses.detach()
    n = losses.numel()
    if n < 2:
        raise InvalidInput(f"plan got a batch of {n} row but at least 2 were needed, to choose among.")
    ways: list[tuple[str, str | None]] = [("masked", None), ("sliced", None)]
    if model.training and repeated_blocks(model):
        ways.append((THINNED, None))
    policies = policies_on(model, batchnorm)
    left_out, another = run_alone(model, batch, losses_fn, losses)
    if left_out is not None:
        return _Looked(n, tuned, ways, Gradients(policies=policies, left_out={"recompute": left_out}))
    ways += [("recompute", "full"), *_half(model, batch, losses_fn, n)]
    return _Looked(n, tuned, ways, Gradients({} if another is None else {"recompute": another}, policies))


def _half(model: nn.Module, batch: Any, losses_fn: LossesFn, n: int) -> list[tuple[str, str | None]]:
    """The way that scores on half-size images, if batch and model allow it."""
    try:
        scores = score_without_graph(Downscaled(losses_fn), model, batch)
    except Exception:  # there is nothing to make smaller, or the model fails on another size in its own words
        return []
    fits = scores.dim() > 0 and scores.shape[0] == n and bool(scores.isfinite().all())
    return [("recompute", "half")] if fits else []


class _Budget:
    """The rounds and the seconds that measuring may take; the seconds run from when the budget is made."""

    def __init__(self, rounds: int, seconds: float, tick: Tick | None) -> None:
        check_whole("plan", "rounds", rounds, 1)
        if not is_number(seconds) or seconds <= 0:
            raise InvalidInput(f"plan got seconds={shown(seconds)} but a number above 0 was needed; 60 is the default.")
        check_tick("plan", tick)
        self.rounds, self.seconds = rounds, seconds
        self.tell = tick or unheard
        self.begun_s = time.perf_counter()
        self.tell(f"about {seconds:.0f} s at most", 0.0)

    def spend(
        self,
        plain: Routine,
        steps: Mapping[Key, Routine],
        groups: Sequence[Sequence[Key]],
        devices: Iterable[torch.device],
    ) -> tuple[Timing, dict[Key, Timing]]:
        """Measure the plain step, and beside it as many groups of the steps as there is time for."""
        # The first run also makes the optimizer's state, once; the second run tells how long a step is.
        plain_s = measure({None: plain}, devices=devices, rounds=1, warmup=0)[None].spread().median
        passed_s = time.perf_counter() - self.begun_s
        left_s = self.seconds - passed_s
        chosen, warmup = _affordable(groups, left_s / plain_s, self.rounds)
        if accelerators(devices):
            warmup = max(warmup, 1)  # each K has kernels of its own, whose tuning takes time and memory
        steps_s = plain_s * (warmup + 1 + self.rounds) * (1 + sum(map(_on_paper, chosen)))
        said = f"{1 + len(chosen)} kinds of step, about {min(max(left_s, 0.0), steps_s):.0f} s"
        before = min(1.0, passed_s / self.seconds)
        routines: dict[Key | None, Routine] = {None: plain, **{key: steps[key] for key in chosen}}
        timings = measure(
            routines,
            devices=devices,
            rounds=self.rounds,
            warmup=warmup,
            limit_s=left_s,
            least=1,
            tick=lambda line, done: self.tell(f"{said}: {line}", before + (1 - before) * done),
        )
        return timings[None], {key: timings[key] for key in chosen}


def _groups(keys: Iterable[Key], anchors: Sequence[float], keeps: Sequence[float]) -> list[list[Key]]:
    """Steps in groups, the most important group first; a group is measured together or not at all."""
    first, *others = keeps
    order = [[anchors[0], anchors[-1]], [first], anchors[1:-1], *([k] for k in others)]
    groups = [[key for key in keys if key[2] in group] for group in order]
    return [group for group in groups if group]


def _on_paper(key: Key) -> float:
    """The rough cost of a step in plain steps: the engines' formulas, for a backward that costs two forwards."""
    engine, scorer, keep = key
    if engine == "masked":
        return 1.0
    return (1 + 2 * keep) / 3 if engine in ("sliced", THINNED) else (1 / 12 if scorer == "half" else 1 / 3) + keep


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


def _read(
    plain: Timing,
    timings: Mapping[Key, Timing],
    kept: Mapping[float, int],
    anchors: Sequence[float],
    keeps: Sequence[float],
) -> tuple[list[Cost], PlainStep, Measured]:
    """Lay the lines through the anchors, and set the measurements at the keeps beside them."""
    step = ("score", "forward", "select", "backward")  # without the update, which is the same for all
    full_s, *spreads = _levelled([timing.each_s(*step) for timing in (plain, *timings.values())])
    points = {
        key: Measurement(kept[key[2]], spread.median, timing.peak_bytes)
        for (key, timing), spread in zip(timings.items(), spreads, strict=True)
    }
    phases_s = {phase: plain.spread(phase).median for phase in plain.phases}
    if scoring := timings.get(("recompute", "full", anchors[-1])):
        phases_s["score"] = scoring.spread("score").median
    lines: dict[tuple[str, str | None], list[Measurement]] = {}
    for (engine, scorer, keep), point in points.items():
        if keep in anchors:
            lines.setdefault((engine, scorer), []).append(point)
    rounds = len(plain.rounds)
    return (
        [Cost.fit(*way, measured) for way, measured in lines.items()],
        PlainStep(full_s.median, phases_s.get("update", 0.0), plain.peak_bytes, phases_s),
        Measured(
            {key: point for key, point in points.items() if key[2] in keeps and key[0] != "masked"},
            rounds,
            median((s.q3 - s.q1) / s.median for s in (full_s, *spreads)) if rounds > 1 else None,
        ),
    )


def _levelled(steps: Sequence[Sequence[float]]) -> list[Spread]:
    """The seconds of each step in each round, corrected as if all rounds had been equally fast.

    Other work that lasts a whole round slows down all steps of that round about equally. So the slowness of a round is
    the median, over its steps, of each step's seconds over that step's median seconds.
    """
    middles = [median(seconds) for seconds in steps]
    slowness = [median(s / m for s, m in zip(of_round, middles, strict=True)) for of_round in zip(*steps, strict=True)]
    return [Spread.of([s / slow for s, slow in zip(seconds, slowness, strict=True)]) for seconds in steps]


def _anchors(n: int, asked: Container[int], step: int = 1) -> list[int]:
    """Numbers of rows that the lines go through, multiples of ``step``; one that is ``asked`` for moves, if it can."""
    found: list[int] = []
    for anchor in ANCHORS:
        k = min((n - 1) // step * step, max(step, round(anchor * n / step) * step))
        nearby = (k, k + step, k - step)
        beside = (near for near in nearby if 0 < near < n and near not in asked and near not in found)
        found.append(next(beside, k))
    return sorted(set(found))


def _loss_rows(model: nn.Module, batch: Any, losses_fn: LossesFn, steps: int) -> float:
    """Train a few steps, find the fraction of rows that hold 90 % of the loss, and undo the steps."""
    with step_undone(model, batch), torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            cast(Any, losses_of(losses_fn, model, batch).mean()).backward()
            optimizer.step()
        losses = score_without_graph(partial(losses_of, losses_fn), model, batch)
        return loss_rows_needed(cast("list[float]", losses.tolist()))
