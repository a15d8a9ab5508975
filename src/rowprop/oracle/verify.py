"""Compare an engine with the reference, ``masked``, on the user's model and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowprop.backprop.pick import Attention, BatchNorm, Unit
from rowprop.backprop.watch import watch
from rowprop.checks import check_choice, check_number, check_tick, check_trainable, check_within, shown
from rowprop.cost.flops import count_flops
from rowprop.cost.measure import Tick
from rowprop.cost.where import Locator
from rowprop.engines import Masked, Recompute, Sliced
from rowprop.errors import InvalidInput
from rowprop.oracle.bench import Bench
from rowprop.oracle.judge import Yardstick, cosine, judge, usual_tolerance, zero_gradients
from rowprop.oracle.results import Verification
from rowprop.scoring import LossesFn
from rowprop.selection.base import Context, Selection, Selector
from rowprop.selection.selectors import count_kept, mean_of


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
    """Check an engine's gradients against the reference on your own model and batch.

    Runs whole training steps of :class:`rowprop.SelectiveBackprop` without an optimizer, each from the random state,
    buffers and modes as they are found. The reference is the engine ``masked``: plain indexing, ``losses[rows]``. Some
    differences are documented: training BatchNorm that is projected over the kept rows, keys and values of tokens that
    are not kept under ``attention="cut"``, dropout and training BatchNorm under ``recompute``. Where such an engine
    differs, verify compares again without the documented difference, so that it cannot hide a wrong rule.

    A parameter that is zero, as a new head may be, stops the gradient, and zeros are equal whatever the rules do. So
    where a gradient is zero, verify draws all parameters that are zero anew (normal, 0.1 wide), and names them in
    ``drawn``; gradients that are zero then too are in ``zero_gradients``.

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
            indexing whose keys and values are detached at the tokens that are not kept, where the model calls
            ``scaled_dot_product_attention`` and the loss of token ``t`` comes from position ``t``. Elsewhere the other
            rules are compared alone, under ``"exact"``, and the verdict says so.
        unit: ``"row"`` (default) or ``"token"``: losses of any shape, whose tokens count as rows in ``keep``, ``rows``,
            N and K.
        seed: Seed of the random rows. Default 0.
        tolerance: Largest relative error that counts as agreeing, unless the reference's rounding is more than a tenth
            of it. Default None, by the coarsest dtype in the backward: 1e-10 in float64, 1e-5 in float32, 1e-2 in
            float16 and where CUDA may use TF32, 5e-2 in bfloat16.
        tick: Called before each step with a line on the step and the fraction of all work done. Default None.

    Returns:
        A :class:`~rowprop.oracle.Verification`; ``print(result)`` and ``result.agrees`` are the summary.

    Raises:
        InvalidInput: An argument is out of its range; all rows are kept, which leaves nothing to check; no parameter
            gets a gradient; the plain gradient is not reproducible, or the backward itself changes parameters. Errors
            of ``losses_fn`` are passed on.

    Cost:
        Four training steps, a fifth where something densified, one more where parameters are drawn anew, and one to
        eight more where the engine differs; one copy of parameters and buffers, three of gradients. Parameters,
        buffers, gradients, the batch's too, modes and the random state are put back; what else a forward changes is
        not.

    Note:
        The verdict names each custom function that ran at full size and, if trials found that it treats rows alike, the
        line that declares it; :func:`rowprop.watch` says what this costs. After pasting the line, verify once more.

        Upstream of a densified op both gradients are dense and agree by themselves: no rule is exercised there.

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
    check_choice("verify", "engine", engine, ("sliced", "recompute"))
    check_choice("verify", "batchnorm", batchnorm, (None, "rows", "exact"))
    check_choice("verify", "attention", attention, ("exact", "cut"))
    if tolerance is not None:
        needed = "a positive number was needed; None is the default."
        check_number("verify", "tolerance", tolerance, needed, lambda value: value > 0)
    checked = Sliced(batchnorm, attention) if engine == "sliced" else Recompute()
    bench = Bench(model, batch, losses_fn, _selector(keep, rows, seed), unit, tick)
    oracle = bench.run(Masked())
    blocking: dict[str, Tensor] = {}
    if zero_gradients(oracle):  # all zero parameters that are plain tensors, so that they can be drawn
        plain = {name: p.detach() for name, p in model.named_parameters() if type(p) is nn.Parameter}
        dense = {name: p for name, p in plain.items() if p.layout == torch.strided and p.numel()}
        blocking = {name: p for name, p in dense.items() if not bool(p.any())}
    with _drawn(list(blocking.values())):
        if blocking:
            oracle = bench.run(Masked())
        limit = usual_tolerance(oracle.dtype, bench.devices) if tolerance is None else tolerance
        # The same gradient with different rounding: the factor is no power of two.
        again = bench.run(Masked(), backward=lambda _: count_flops(), scale=1 / 3)
        yardstick = Yardstick.measured(oracle, again, limit)
        found = bench.run(checked)
        with watch() as report:
            counted = bench.run(checked, backward=lambda _: count_flops())
        locator = Locator(model)
        locator.functions = report.functions  # found already
        if report.densified:
            bench.run(checked, forward=locator.modules.tracked(), backward=locator.backward)
        cut = attention == "cut" and unit == "token"
        status, why, comparisons = judge(bench, yardstick, checked, oracle, found, cut=cut)
        record = oracle.record
        return Verification(
            engine=engine, batchnorm=batchnorm, attention=attention, unit=unit, cut=report.cut, status=status, why=why,
            num_rows=record.num_rows, num_kept=record.num_kept, tolerance=limit,
            dtype=str(oracle.dtype).removeprefix("torch."), comparisons=comparisons,
            zero_gradients=zero_gradients(oracle), drawn=list(blocking), cosine=cosine(oracle, found),
            densified=locator.places(), functions=report.functions,
            backward_flops=counted.seen.total_flops,
            full_backward_flops=again.seen.total_flops,
            uncounted=dict(Counter[str](again.seen.uncounted) | Counter[str](counted.seen.uncounted)),
            buffers=oracle.other_buffers(found), rng_differs=oracle.other_rng(found),
        )  # fmt: skip


def _selector(keep: float, rows: Tensor | None, seed: int) -> Selector:
    """A selector that keeps the same rows in every step: ``rows``, or ``keep`` of all at random."""
    if not isinstance(cast(object, seed), int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise InvalidInput(f"verify got seed={seed!r} but a whole number of at most 64 bits was needed.")
    if rows is None:
        check_within("verify", "keep", keep, "(0, 1)")
    elif not isinstance(cast(object, rows), Tensor) or rows.ndim != 1 or rows.dtype != torch.int64 or not len(rows):
        raise InvalidInput(f"verify got rows={shown(rows)} but row indices were needed: a tensor (K,), int64, K >= 1.")

    def select(scores: Tensor, context: Context) -> Selection:
        total = scores.numel()
        if rows is None:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
            kept = order[: count_kept(keep, total)]
        else:
            kept = cast("Tensor", cast(Any, torch).unique(rows.cpu()))
            if kept.numel() < rows.numel() or int(kept[0]) < 0 or int(kept[-1]) >= total:
                raise InvalidInput(f"verify got rows that repeat or are outside 0 to {total - 1}, the batch's rows.")
        return mean_of(kept.to(scores.device), scores)

    return select


@contextmanager
def _drawn(parameters: Sequence[Tensor]) -> Generator[None]:
    """Redraw these, the same every time and independent of torch's random state; restore them at the end."""
    before = [p.clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        yield
    finally:
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
