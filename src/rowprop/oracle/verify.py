"""Any engine against ``masked``, the oracle, on the user's own model and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.pick import Attention, BatchNorm
from rowprop.backprop.watch import watch
from rowprop.checks import check_choice, check_tick, check_trainable, is_number
from rowprop.cost.flops import count_flops
from rowprop.cost.measure import Tick
from rowprop.cost.where import DensifiedAt, Locator
from rowprop.engines import Engine, Masked, Recompute, Sliced, Unit
from rowprop.errors import InvalidInput
from rowprop.oracle.bench import Bench, Ran, Steps, keeping
from rowprop.oracle.judge import Yardstick, cosine, judge, usual_tolerance, zero_gradients
from rowprop.oracle.results import Verification
from rowprop.scoring import LossesFn, Scored


def verify(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    *,
    engine: str = "sliced",
    keep: float = 0.25,
    rows: Tensor | None = None,
    batchnorm: BatchNorm = None,
    attention: Attention = "exact",
    unit: Unit = "row",
    seed: int = 0,
    tolerance: float | None = None,
    tick: Tick | None = None,
) -> Verification:
    """Check an engine's gradients against the oracle's on your own model and batch.

    Runs whole training steps of :class:`rowprop.SelectiveBackprop` without an optimizer. Each step starts from the
    random state, buffers and modes as they are found. The oracle is the engine ``masked``: plain indexing,
    ``losses[rows]``. Some differences are documented: training BatchNorm that is projected over the kept rows, keys and
    values of tokens that are not kept under ``attention="cut"``, dropout and training BatchNorm under ``recompute``.
    Where such an engine differs, verify compares again without the documented difference, so that it cannot hide a
    wrong rule.

    A parameter that is zero, as a new head or half of an adapter may be, stops the gradient, and zeros are equal to
    zeros whatever the rules do. Where a gradient is zero, verify looks at the model with all parameters that are zero
    drawn anew (normal, 0.1 wide), and names them in ``drawn``. What is zero then too is in ``zero_gradients``.

    Args:
        model: An ``nn.Module``, compiled by ``torch.compile`` or not. It is checked in the modes it is in.
        batch: The whole batch, N rows, as ``losses_fn`` takes it.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, 1)``; of tokens, of any shape.
        engine: ``"sliced"`` (default) or ``"recompute"``.
        keep: Fraction of rows kept, in (0, 1); ``K = max(1, ceil(keep * N))``, at least 2 where BatchNorm computes
            batch statistics. Default 0.25.
        rows: Which rows to keep, distinct indices of shape ``(K,)``. Default None: ``keep`` of them at random.
        batchnorm: ``"rows"``, ``"exact"`` or None (default); see :func:`rowprop.pick`.
        attention: ``"exact"`` (default) or ``"cut"``; see :func:`rowprop.pick`. Cut attention is compared with plain
            indexing whose keys and values are detached at the tokens that are not kept: where the model calls
            ``scaled_dot_product_attention``, and the loss of token ``t`` comes from position ``t``. Elsewhere the other
            rules are compared alone, under ``"exact"``, and the verdict says so.
        unit: ``"row"`` (default) or ``"token"``: ``losses_fn`` returns losses of shape ``(N, T)``, or of any other, and
            ``keep``, ``rows``, N and K are those of all these tokens.
        seed: Seed of the random rows. Default 0.
        tolerance: Largest relative error that counts as agreeing, unless the oracle's own rounding is more than a tenth
            of it. Default None: 1e-10 in float64, 1e-5 in float32, 1e-2 in float16 and where CUDA may use TF32, 5e-2 in
            bfloat16, by the coarsest dtype in the backward.
        tick: Called before each step with a line on the step and the fraction of all work done. Default None: nobody
            is told.

    Returns:
        A :class:`~rowprop.Verification`; ``print(result.verdict)`` and ``result.agrees`` are the short of it.

    Raises:
        InvalidInput: An argument is out of its range; all rows are kept, which leaves nothing to check; no parameter
            gets a gradient; the plain gradient is not reproducible, or the backward itself changes parameters. Errors
            of ``losses_fn`` are passed on.

    Cost:
        Four training steps, a fifth where something densified, one more where parameters are drawn anew, and one to
        five more where the engine differs. The parameters and buffers are copied once, their gradients three times.
        Afterwards the model's parameters, buffers, gradients and modes, the gradients of the batch and the random state
        are as before. verify knows no other state that a forward may change.

    Note:
        A rule is exercised only where a sliced gradient reaches it. Upstream of a densified op both gradients are dense
        and agree by themselves.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(8, 4), torch.randn(8, 1)
        >>> result = rowprop.verify(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square())
        >>> result.status, result.flops_ratio, result.densified
        ('exact', 0.25, [])
    """
    check_trainable("verify", model, batch, losses_fn)
    check_tick("verify", tick)
    check_choice("verify", "unit", unit, ("row", "token"))
    checked = _checked(engine, batchnorm, attention, seed, tolerance)
    shapes: list[torch.Size] = []
    bench = Bench(model, batch, _telling(losses_fn, shapes), keeping(keep, rows, seed), Steps(tick), unit)
    oracle = bench.run(Masked())
    blocking = _zero_parameters(model) if zero_gradients(oracle) else {}
    with _drawn(list(blocking.values())):
        if blocking:
            oracle = bench.run(Masked())
        limit = usual_tolerance(oracle.dtype, bench.devices) if tolerance is None else tolerance
        # A factor that is no power of two: the same gradient with other roundings.
        again = bench.run(Masked(), backward=_counting, scale=1 / 3)
        yardstick = Yardstick.measured(oracle, again, limit)
        found = bench.run(checked)
        with watch() as report:
            counted = bench.run(checked, backward=_counting)
        densified = _located(bench, checked) if report.densified else []
        kept = _kept_tokens(oracle, shapes[0]) if attention == "cut" and unit == "token" else None
        judgement = judge(bench, yardstick, checked, oracle, found, kept)
        result = Verification(
            engine=checked.name,
            batchnorm=batchnorm,
            attention=attention,
            unit=unit,
            cut=report.cut,
            status=judgement.status,
            verdict="",
            num_rows=oracle.record.num_rows,
            num_kept=oracle.record.num_kept,
            tolerance=limit,
            dtype=str(oracle.dtype).removeprefix("torch."),
            comparisons=judgement.comparisons,
            zero_gradients=zero_gradients(oracle),
            drawn=list(blocking),
            cosine=cosine(oracle, found),
            densified=densified,
            backward_flops=counted.seen.total_flops,
            full_backward_flops=again.seen.total_flops,
            uncounted=dict(Counter[str](again.seen.uncounted) | Counter[str](counted.seen.uncounted)),
            buffers=oracle.other_buffers(found),
            rng_differs=oracle.other_rng(found),
        )
        return replace(result, verdict=_verdict(result, judgement.why) + _told_zeros(result))


def _kept_tokens(oracle: Ran, shape: torch.Size) -> Tensor:
    """Which of the losses are kept, bool, in the shape of the losses."""
    selected = oracle.record.selection
    kept = selected.rows.new_zeros(selected.num_rows, dtype=torch.bool).index_fill(0, selected.rows, True)
    return kept.view(shape)


def _zero_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are zero in every entry, and plain tensors, so that they can be drawn."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if type(p) is nn.Parameter}
    return {name: p for name, p in parameters.items() if p.layout == torch.strided and p.numel() and not bool(p.any())}


@contextmanager
def _drawn(parameters: Sequence[Tensor]) -> Generator[None]:
    """Draw these anew, the same every time and apart from torch's random state, and put them back at the end."""
    before = [p.clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        yield
    finally:
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)


def _telling(losses_fn: LossesFn, shapes: list[torch.Size]) -> LossesFn:
    """The same function, which also notes the shape of its losses."""

    def told(model: Any, batch: Any) -> Any:
        result = cast("object", losses_fn(model, batch))
        losses = result.losses if isinstance(result, Scored) else result
        if isinstance(losses, Tensor):  # the step refuses all else
            shapes.append(losses.shape)
        return result

    return told


def _checked(engine: str, batchnorm: BatchNorm, attention: Attention, seed: object, tolerance: object) -> Engine:
    """The engine, where the arguments are in range."""
    check_choice("verify", "engine", engine, ("sliced", "recompute"))
    check_choice("verify", "batchnorm", batchnorm, (None, "rows", "exact"))
    check_choice("verify", "attention", attention, ("exact", "cut"))
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise InvalidInput(f"verify got seed={seed!r} but a whole number of at most 64 bits was needed.")
    if tolerance is not None and not (is_number(tolerance) and cast(float, tolerance) > 0):
        raise InvalidInput(f"verify got tolerance={tolerance!r} but a positive number was needed; None is the default.")
    return Sliced(batchnorm, attention) if engine == "sliced" else Recompute()


def _counting(loss: Tensor) -> Any:
    return count_flops()


def _located(bench: Bench, engine: Engine) -> list[DensifiedAt]:
    """Where the gradient goes back to all rows."""
    locator = Locator(bench.model)
    bench.run(engine, forward=locator.modules.tracked(), backward=locator.backward)
    return locator.places()


def _verdict(result: Verification, why: str) -> str:
    off = next((c for c in result.comparisons[1:] if not c.agrees), result.comparisons[0])
    rounds = any(entry.agrees and entry.error > result.tolerance for c in result.comparisons for entry in c.errors)
    more = ", more where the oracle's own rounding is more" if rounds else ""
    allowed = f"(tolerance {result.tolerance:.0e}, {result.dtype}{more})"
    rows = f"{result.num_kept} of {result.num_rows} {result.unit}s"
    cost = f"{rows} for {result.flops_ratio:.3f} of the full backward's FLOPs"
    if result.densified:
        cost += f", densified first at {result.densified[0].module} ({result.densified[0].op})"
    if result.status == "exact":
        which = f"all {len(result.errors)} parameters"
        if result.zero_gradients:
            which = f"{len(result.errors) - len(result.zero_gradients)} of {len(result.errors)} parameters"
        return f"{result.engine} is exact: {which} within {off.worst.error:.1e} of the oracle {allowed}; {cost}."
    if result.status == "by design":
        first, others = result.errors[0], result.comparisons[1:]
        by = f"by up to {first.error:.1e} in {first.name}, cosine {result.cosine:.4f}"
        without = ""
        if others:
            under = " and ".join(comparison.conditions for comparison in others)
            rest = max(comparison.worst.error for comparison in others)
            without = f"without this difference ({under}) all parameters are within {rest:.1e} {allowed}; "
        return f"{result.engine} differs {by}, by design: {why}; {without}{cost}."
    parts: list[str] = []
    if not off.agrees:
        wrong = sum(not entry.agrees for entry in off.errors)
        under = "" if off is result.comparisons[0] else f", with {off.conditions}"
        by = off.worst.problem or f"off by {off.worst.error:.1e}"
        parts.append(f"in {wrong} of {len(off.errors)} parameters{under}: worst {off.worst.name}, {by} {allowed}")
    left = [f"buffer {name}" for name in result.buffers[:3]] + ["the random state"] * result.rng_differs
    if left:
        parts.append(f"in the state that it leaves: {', '.join(left)}")
    return f"{result.engine} disagrees with the oracle {'; '.join([*parts, why] if why else parts)}."


def _told_zeros(result: Verification) -> str:
    """The sentences on parameters that were zero, and on gradients that are."""
    told = ""
    zero, count = len(result.zero_gradients), len(result.errors)
    if result.drawn:
        told += f" Parameters that are zero stop the gradient: {len(result.drawn)} were drawn anew for this."
    if zero:
        told += (
            f" The gradients of {zero} of {count} parameters are zero on these rows, where most mistakes do not show"
        )
        told += ": verify another batch, or the model after some steps of training." if zero > count / 2 else "."
    return told
