"""What each way to train on K rows costs, measured on a user's model, and the advice that follows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rowprop.backprop.pick import Attention, BatchNorm, Unit
from rowprop.batch import take
from rowprop.checks import check_choice, check_number, check_tick, check_trainable, check_whole, check_within
from rowprop.cost.measure import Routine, Spread, Tick, Timing, accelerators, ignored, measure
from rowprop.cost.timing import THINNED, MakeOptimizer, Variant, routines_of
from rowprop.cost.zeros import ZeroPlace, find_zeros
from rowprop.distributed import averages_gradients
from rowprop.engines import Sliced, policies_on, second_forward_differs, uses_batch_statistics
from rowprop.errors import InvalidInput
from rowprop.native.building import find
from rowprop.scoring import LossesFn, losses_of, score_without_graph
from rowprop.selection.selectors import count_kept
from rowprop.state import backward_undone, devices_of, rng_states
from rowprop.step.selective import rows_of
from rowprop.thinning.blocks import repeated_blocks

SAME, BY_POLICY, ANOTHER, EXPECTED = "same", "by policy", "another", "in expectation"  # gradients, see Way
LEFT_OUT = "left out"  # instead of a gradient: the engine could not be measured
WHOLE_ROWS = LEFT_OUT, "its second forward takes whole rows, not tokens"
IN_EXPECTATION = "it selects nothing, and its gradient is that of all rows in expectation"
SHORT_S = 0.005  # a shorter plain step is mostly calls of ops, each of which costs tens of microseconds at any size
Key = tuple[str, float]  # a way at a keep: its engine, and the keep
ENOUGH = 3  # rounds; a keep after the first is measured only if this many rounds of all still fit
WARMUP = 2  # rounds before those that count, if there is time for all of them
Gradients = Mapping[str, tuple[str, str]]
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
    attention: Attention = "exact",
    unit: Unit = "row",
    rounds: int = 7,
    seconds: float = 60.0,
    tick: Tick | None = None,
) -> Plan:
    """Measure the cost of each way of selecting on your own model and batch, beside the limit; it changes nothing.

    Whole steps of :class:`rowprop.SelectiveBackprop` run interleaved with plain ones, at each keep asked for. The ways
    are ``sliced``; ``recompute``; ``masked``, plain indexing, which costs the plain step; and ``thinned``, for a model
    in training mode that has blocks for :func:`rowprop.thin`: the step of all rows with this ``keep`` after every
    block. A way of another gradient than plain indexing's (``recompute`` with BatchNorm or dropout in training,
    ``thinned``) is listed, and never chosen. Where the rounds vary more than a way differs from the plain step, it is
    called inconclusive, and not chosen. No engine follows the :class:`~rowprop.cost.Plan` by itself; ``print(result)``
    is the short of it.

    Args:
        model: An ``nn.Module``, measured in the modes it is in.
        batch: The whole batch, N rows, at least 2, as it will be trained on: costs depend on its sizes.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``; of tokens, of any shape.
        keep: Fraction kept, in (0, 1), or several; ``choice`` is for the first. Default 0.1, 0.25, 0.5, 0.75, 0.9.
        optimizer: It updates in each step: ``"sgd"`` (default), ``"momentum"``, ``"adam"``, ``"adamw"``; None: none.
        batchnorm: How ``sliced`` treats training BatchNorm, see :func:`rowprop.pick`. Default None.
        attention: How ``sliced`` treats attention between tokens: ``"exact"`` (default) or ``"cut"``, likewise.
        unit: ``"row"`` (default) or ``"token"``: a loss per token, and N, K and ``keep`` are of tokens. The one way
            beside ``masked`` is then ``sliced``.
        rounds: How often each step is measured at most, 1 or more. Default 7.
        seconds: The time that measuring may take, above 0; default 60. The plain step and each way at the first keep
            are measured at least once; each further keep only where three rounds of all still fit.
        tick: Called with a line on the work at hand and the fraction of all work done. Default None.

    Raises:
        InvalidInput: An argument is out of its range, or the losses do not fit. Errors of ``losses_fn`` pass.

    Cost:
        About ``seconds``; less where steps are fast: ``(rounds + 3) * (1 + 3 * len(keep))`` of them; about 9 plain
        steps where one is longer than a tenth of it. Parameters, gradients, buffers and random state are put back.

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
    check_choice("plan", "unit", unit, ("row", "token"))
    sliced = Sliced(batchnorm, attention)  # raises where there is no such policy
    check_whole("plan", "rounds", rounds, 1)
    needed = "a number above 0 was needed; 60 is the default."
    check_number("plan", "seconds", seconds, needed, lambda value: value > 0)
    check_tick("plan", tick)
    tell, begun_s = tick or ignored, time.perf_counter()
    tell(f"about {seconds:.0f} s at most", 0.0)
    losses = score_without_graph(partial(losses_of, losses_fn, unit=unit), model, batch)
    n = losses.numel()
    if n < 2:
        raise InvalidInput(f"plan got a batch of {n} {unit} but at least 2 were needed, to choose from.")
    ways = ["sliced", THINNED] if unit == "row" and model.training and repeated_blocks(model) else ["sliced"]
    gradients = {engine: (BY_POLICY, policy) for engine, policy in policies_on(model, batchnorm, attention).items()}
    second = WHOLE_ROWS if unit == "token" else second_forward(model, batch, losses_fn, losses)
    if second is not None:
        gradients["recompute"] = second
    if second is None or second[0] != LEFT_OUT:
        ways.append("recompute")
    variants = {(engine, keep): Variant(engine, keep) for keep in keeps for engine in ways}
    made = routines_of(
        model, batch, losses_fn, [Variant(), *variants.values()],
        optimizer=None if optimizer is None else OPTIMIZERS[optimizer], sliced=sliced, unit=unit,
    )  # fmt: skip
    with made as (routines, devices):
        steps = {key: routines[variant] for key, variant in variants.items()}
        groups = [[key for key in steps if key[1] == keep] for keep in keeps]
        plain, timings = _measured(
            routines[Variant()], steps, groups, devices, rounds=rounds, seconds=seconds, begun_s=begun_s, tell=tell
        )
    with backward_undone(model, batch), torch.enable_grad(), find_zeros(model) as zeros:
        cast(Any, losses_of(losses_fn, model, batch, unit=unit).mean()).backward()
    found = make_plan(
        plain_step(plain), {key: measurement(timing, plain) for key, timing in timings.items()},
        num_rows=n, keeps=keeps, gradients=gradients, rounds=len(plain.rounds),
    )  # fmt: skip
    scoring = timings.get(("recompute", keeps[0]))
    phases_s = found.phases_s | ({} if scoring is None else {"score": scoring.spread("score").median})
    return replace(found, phases_s=phases_s, unit=unit, zeros=next(iter(zeros.places), None), dispatch=find()[1])


def _keeps(keep: object) -> list[float]:
    several = isinstance(keep, Iterable) and not isinstance(keep, (str, Tensor))
    keeps = list(cast("Iterable[float]", keep)) if several else [cast("float", keep)]
    if not keeps:
        raise InvalidInput("plan got no keep, but at least one fraction in (0, 1) was needed; a quarter is keep=0.25.")
    for fraction in keeps:
        check_within("plan", "keep", fraction, "(0, 1)")
    return list(dict.fromkeys(map(float, keeps)))


def second_forward(model: nn.Module, batch: Any, losses_fn: LossesFn, losses: Tensor) -> tuple[str, str] | None:
    """How the gradient of ``recompute`` differs, as :func:`make_plan` takes it; None where it is the same.

    The last quarter of the rows runs by itself: the first rows would draw the same dropout masks as in their batch,
    whose ``losses`` are from the random state that this is called in. BatchNorm and random numbers are found as such,
    because they hardly change the losses of a model that has learned nothing yet.
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
        rows = take(batch, torch.arange(losses.numel() - count, losses.numel()), losses.numel())
        apart = _differ(score_without_graph(watched, model, rows), losses[-count:])
    except Exception as error:  # the user's model may fail on fewer rows in any way, or return losses of others
        why = f"{count} rows by themselves failed with {type(error).__name__}: {error}"
        return LEFT_OUT, why.splitlines()[0]
    why = second_forward_differs(drew=drew, batch_statistics=uses_batch_statistics(model))
    if why is None and apart:
        why = "rows by themselves have other losses than in their batch, so they see each other"
    return None if why is None else (ANOTHER, f"{why}, so its gradient is another one")


def _differ(own: Tensor, in_batch: Tensor) -> bool:
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
        warmup = max(warmup, 1)  # each K has separate kernels, whose tuning takes time and memory
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
    """The steps that can be measured in the time of this many plain ones, and the warmup rounds."""
    chosen, *more = groups
    chosen, cost = list(chosen), 1 + sum(map(_on_paper, chosen))
    for group in more:
        cost += sum(map(_on_paper, group))
        if (1 + min(ENOUGH, rounds)) * cost > plain_steps:
            return chosen, 0
        chosen += group
    return chosen, WARMUP if (WARMUP + 1 + rounds) * cost <= plain_steps else 0


def measurement(timing: Timing, plain: Timing) -> Measurement:
    """A way's steps beside the plain steps of the same rounds, so that what slows a whole round cancels out."""
    each = [way / full for way, full in zip(timing.each_s(), plain.each_s(), strict=True)]
    return Measurement(Spread.of(each), timing.peak_bytes, timing.waits)


def plain_step(timing: Timing) -> PlainStep:
    """The medians of the plain step."""
    phases_s = {phase: timing.spread(phase).median for phase in timing.phases}
    return PlainStep(timing.spread().median, phases_s["backward"] / sum(phases_s.values()), timing.peak_bytes, phases_s)


@dataclass(frozen=True)
class Measurement:
    """A way's step over the plain one of the same round, its peak of memory, and whether the device waited."""

    ratio: Spread
    peak_bytes: int = 0
    waits: bool = False


@dataclass(frozen=True)
class PlainStep:
    """The plain step over all rows: its seconds, the backward's share of them, its peak, its seconds by phase."""

    seconds: float
    backward_share: float
    peak_bytes: int = 0
    phases_s: dict[str, float] = field(default_factory=dict[str, float])

    def limit(self, kept_share: float) -> float:
        """The ratio of a step that saves the backward of the other rows: (F + kB + U) / (F + B + U)."""
        return 1 - (1 - kept_share) * self.backward_share


@dataclass(frozen=True)
class Way:
    """A way to train on some rows of a batch, at one keep.

    Attributes:
        engine: ``"masked"`` (plain indexing, which saves nothing), ``"recompute"``, ``"sliced"`` or ``"thinned"``.
        keep: The fraction asked for.
        kept: K: ``max(1, ceil(keep * N))``.
        ratio: The step over the plain step, the update included: the median over the rounds.
        low, high: The quartiles of the ratio over the rounds.
        step_s: ``ratio`` times the seconds of the plain step.
        limit: The ratio where one forward runs on all rows, the backward costs K rows, and nothing else costs:
            (F + kB + U) / (F + B + U) with k = K/N. ``recompute`` can pass it: its first forward makes no graph.
        peak_bytes: The most that the step holds at once beyond the memory held before it.
        gradient: ``"same"`` as that of plain indexing; ``"by policy"``, where training BatchNorm may be projected over
            the kept rows; or, never chosen, ``"another"``, or for ``"thinned"`` ``"in expectation"`` that of all rows.
        waits: Whether the measured step took as long as its calls from Python: an accelerator waited for them, or they
            for it, where the losses or the optimizer read its values.
    """

    engine: str
    keep: float
    kept: int
    ratio: float
    low: float
    high: float
    step_s: float
    limit: float
    peak_bytes: int
    gradient: str
    waits: bool = False

    @property
    def eligible(self) -> bool:
        """Whether it may be chosen by its gradient."""
        return self.gradient in (SAME, BY_POLICY)

    @property
    def inconclusive(self) -> bool:
        """Whether the rounds vary more than the way differs from the plain step: the quartiles lie around 1."""
        return self.low < 1 < self.high


@dataclass(frozen=True)
class Plan:
    """The cost of each way beside the limit, and what the clock would choose. It changes nothing.

    Attributes:
        num_rows: N, of rows or of tokens.
        full_s: Seconds of the plain step over all rows, the update included.
        full_bytes: Its peak.
        phases_s: Its seconds by phase; empty where only totals are known.
        ways: Every way at every keep.
        choices: At each keep the way that the clock chooses.
        notes: By engine, why its gradient is not that of plain indexing, or why it was not measured.
        rounds: How often each step was measured.
        skipped: The keeps asked for that there was no time to measure.
        zeros: Where :func:`rowprop.skip_zeros` would save most of the plain step; None where it would save nothing.
        unit: What is kept, ``"row"`` or ``"token"``.
        dispatch: What ran the ops of sliced gradients, in a few words, as ``rowprop --version`` has them.
    """

    num_rows: int
    full_s: float
    full_bytes: int
    phases_s: dict[str, float]
    ways: list[Way]
    choices: list[Way]
    notes: dict[str, str]
    rounds: int
    skipped: tuple[float, ...] = ()
    zeros: ZeroPlace | None = None
    unit: Unit = "row"
    dispatch: str = ""

    def __repr__(self) -> str:
        return f"{self.reason}\n{self.certainty}"

    @property
    def choice(self) -> Way:
        """The way that the clock chooses at the first keep."""
        return self.choices[0]

    @property
    def pays(self) -> bool:
        """Whether the choice saves time."""
        return self.choice.engine != "masked"

    @property
    def reason(self) -> str:
        """The choice at the first keep, the other ways there, and at which keeps selecting pays, in one sentence."""
        return "; ".join(_clauses(self)) + "."

    @property
    def certainty(self) -> str:
        """``rounds``, ``dispatch``, ``skipped``, and what is inconclusive, in sentences."""
        said = f"Rounds measured of each step: {self.rounds}{f'; dispatch: {self.dispatch}' if self.dispatch else ''}."
        if unclear := [f"{way.engine} at keep {way.keep:g}" for way in self.ways if way.inconclusive]:
            said += f" Inconclusive, the rounds vary more than the steps differ: {', '.join(unclear)}."
        if self.skipped:
            said += f" There was no time for keep {', '.join(f'{keep:g}' for keep in self.skipped)}: raise seconds."
        return said

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds."""
        names = ("pays", "reason", "certainty")
        return asdict(self) | {"choice": asdict(self.choice)} | {name: getattr(self, name) for name in names}


def make_plan(
    plain: PlainStep,
    measured: Mapping[Key, Measurement],
    *,
    num_rows: int,
    keeps: Sequence[float],
    gradients: Gradients | None = None,
    rounds: int = 1,
) -> Plan:
    """Choose at each measured keep the fastest way that beats the plain step and has the gradient asked for.

    ``"masked"`` costs the plain step, is added here, and is the choice where no way is conclusively faster.
    ``gradients`` has by engine the gradient, as in :class:`Way` or :data:`LEFT_OUT`, and why (None: all the same).
    """
    gradients = gradients or {}
    ways: list[Way] = []
    choices: list[Way] = []
    for keep in keeps:
        found = {engine: point for (engine, at), point in measured.items() if at == keep}
        if not found:
            continue
        kept = count_kept(keep, num_rows)
        here = [
            Way(
                engine=engine, keep=keep, kept=kept, ratio=point.ratio.median, low=point.ratio.q1, high=point.ratio.q3,
                step_s=point.ratio.median * plain.seconds, limit=plain.limit(kept / num_rows),
                peak_bytes=point.peak_bytes, waits=point.waits,
                gradient=gradients.get(engine, (EXPECTED if engine == THINNED else SAME, ""))[0],
            )
            for engine, point in ({"masked": Measurement(Spread(1.0, 1.0, 1.0), plain.peak_bytes)} | found).items()
        ]  # fmt: skip
        ways += here
        able = [way for way in here if way.engine == "masked" or (way.eligible and not way.inconclusive)]
        choices.append(min(able, key=lambda way: way.ratio))
    return Plan(
        num_rows=num_rows, full_s=plain.seconds, full_bytes=plain.peak_bytes, phases_s=plain.phases_s, ways=ways,
        choices=choices, notes={engine: why for engine, (_, why) in gradients.items()}, rounds=rounds,
        skipped=tuple(keep for keep in keeps if keep not in {way.keep for way in ways}),
    )  # fmt: skip


def milliseconds(seconds: float) -> str:
    """A duration for people to read: ``12.3 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _clauses(plan: Plan) -> Iterator[str]:
    choice, every, plain = plan.choice, f"all {plan.unit}s", milliseconds(plan.full_s)
    at = f"keep {choice.keep:g} (K = {choice.kept} of {plan.num_rows}{' tokens' * (plan.unit == 'token')})"
    if choice.engine == "masked":
        yield f"training on {every} is fastest at {at}: it takes {plain}, and the limit is {choice.limit:.2f} of it"
    else:
        yield (
            f"{choice.engine} takes {choice.ratio:.2f} of the plain step at {at}, the limit is {choice.limit:.2f}: "
            f"{milliseconds(choice.step_s)} instead of {plain}"
        )
    here = [way for way in plan.ways if way.keep == choice.keep and way.engine != "masked" and way is not choice]
    for way in sorted(here, key=lambda way: (not way.eligible, way.step_s)):
        remark = "" if way.eligible else f" and is not chosen: {plan.notes.get(way.engine, IN_EXPECTATION)}"
        unclear = f", inconclusive ({way.low:.2f} to {way.high:.2f} of the plain step)" if way.inconclusive else ""
        yield f"{way.engine} takes {milliseconds(way.step_s)}{unclear}{remark}"
    if any(way.waits for way in (choice, *here) if way.engine == "sliced"):
        yield "sliced takes as long as its calls from Python: compile the model, unless it reads the device itself"
    engines = {way.engine for way in plan.ways}
    yield from (f"{engine} left out: {why}" for engine, why in plan.notes.items() if engine not in engines)
    if choice.gradient == BY_POLICY:
        yield f"{choice.engine} has the gradient of {plan.notes[choice.engine]}"
    yield _where_it_pays(plan)
    if plan.zeros is not None:
        yield f"{plan.zeros} of the plain backward, exactly"


def _where_it_pays(plan: Plan) -> str:
    paying = [f"{way.keep:g}" for way in plan.choices if way.engine != "masked"]
    if paying:
        return f"of the keeps measured, selecting pays at {', '.join(paying)}"
    if any(way.inconclusive for way in plan.ways if way.eligible):
        return "whether selecting pays is inconclusive: measure again without other work, or with more rounds"
    if plan.full_s >= SHORT_S:
        listed = f"the ops that run on all {plan.unit}s at any keep"
        return f"fewer {plan.unit}s save nothing, so look at `rowprop verify`, which lists {listed}"
    return (
        "the model is too small for selecting to pay here, which is expected of a toy model: a step this short is "
        f"mostly the fixed cost of calling ops, and fewer {plan.unit}s do not lower it"
    )
