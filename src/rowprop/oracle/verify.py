"""Any engine against the ``masked`` oracle, on the user's own model and batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode

from rowprop.backprop.rowgrad import watch
from rowprop.checks import check_tick, check_trainable, is_number
from rowprop.cost.flops import count_flops
from rowprop.cost.where import DensifiedAt, Locator, graph
from rowprop.engines.base import PROJECTED, BatchNormPolicy, engine_named, second_forward_differs
from rowprop.engines.clock import Tick
from rowprop.errors import InvalidInput
from rowprop.scoring.losses import LossesFn
from rowprop.selection.base import Selection
from rowprop.selection.common import count_kept
from rowprop.state import devices_of, evaluating, rng_states, step_undone
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error that is rounding, by the coarsest dtype that the backward computes in."""
TF32_TOLERANCE = TOLERANCES[torch.float16]  # as many bits of mantissa
NEXT_TO_NOTHING = 1e-2
"""Gradients below this share of the model's largest are measured against that instead of against themselves."""
USUAL = 5
"""Steps of most verifications; where an engine differs by design, up to 8 are run."""
ROUNDING = 10
"""How many times the oracle's own rounding a parameter may be off, where that is more than the tolerance."""


@dataclass(frozen=True)
class ParameterError:
    """How far a parameter's gradient is from the oracle's.

    Attributes:
        name: As in ``model.named_parameters()``.
        error: Largest absolute difference over ``scale``; infinity where the two cannot be compared.
        scale: The largest absolute entry of the oracle's gradient of this parameter, or 1e-2 of the largest of all
            parameters where that is more: a gradient that is zero but for rounding (the bias of attention's keys) has
            no size of its own.
        allowed: Up to which error it agrees: the tolerance, or ten times the oracle's own rounding where that is more
            (what cancels to zero, as the gradient of a bias before BatchNorm does, leaves more of it).
        problem: Why the two cannot be compared (one is missing or not finite), else None.
    """

    name: str
    error: float
    scale: float
    allowed: float
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the error is not beyond what is allowed."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """One engine's gradients beside the oracle's, under the same conditions.

    Attributes:
        conditions: What both ran under, e.g. ``"as it is"``.
        errors: One entry per parameter that has a gradient in either: those that disagree first, then by error.
    """

    conditions: str
    errors: list[ParameterError]

    @property
    def agrees(self) -> bool:
        """Whether every parameter does."""
        return self.worst.agrees

    @property
    def worst(self) -> ParameterError:
        """The parameter that is furthest off."""
        return self.errors[0]


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found.

    Attributes:
        engine: The engine that was checked.
        batchnorm: How it treats training BatchNorm.
        status: ``"exact"``: every gradient, buffer and random state is the oracle's. ``"by design"``: it differs, and
            all that can be told apart from a documented difference agrees. ``"disagrees"``: neither.
        verdict: One line that says which, and why.
        num_rows: N.
        num_kept: K.
        tolerance: Largest relative error that counts as agreeing.
        dtype: The coarsest dtype that the backward computes in.
        comparisons: The first under the conditions asked for; the others, made where that one differs, without what
            may differ by design.
        cosine: Between the engine's gradient and the oracle's, all parameters together, as asked for.
        densified: Where the sliced gradient went back to all rows, largest ``time_share`` first.
        backward_flops: FLOPs that the engine's backward ran; a second forward is not part of it.
        full_backward_flops: FLOPs that the oracle's backward ran.
        uncounted: Ops of either backward for which no formula is known, with the number of calls (the engine's, where
            both have them); they are in neither number of FLOPs.
        buffers: Buffers that the engine left with other values than the oracle, by name.
        rng_differs: Whether the engine left another random state than the oracle.
    """

    engine: str
    batchnorm: str
    status: Literal["exact", "by design", "disagrees"]
    verdict: str
    num_rows: int
    num_kept: int
    tolerance: float
    dtype: str
    comparisons: list[Comparison]
    cosine: float
    densified: list[DensifiedAt]
    backward_flops: int
    full_backward_flops: int
    uncounted: dict[str, int]
    buffers: list[str]
    rng_differs: bool

    @property
    def agrees(self) -> bool:
        """Whether the engine does what its documentation says: all but ``"disagrees"``."""
        return self.status != "disagrees"

    @property
    def errors(self) -> list[ParameterError]:
        """One entry per parameter under the conditions asked for, worst first; see :class:`Comparison`."""
        return self.comparisons[0].errors

    @property
    def flops_ratio(self) -> float:
        """Backward FLOPs that really ran over those of the full backward; NaN where none were counted."""
        return self.backward_flops / self.full_backward_flops if self.full_backward_flops else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds; infinity and NaN become None."""
        entries = asdict(self) | {"agrees": self.agrees, "flops_ratio": self.flops_ratio}
        return _for_json(entries)


def verify(
    model: nn.Module,
    batch: Any,
    losses_fn: LossesFn,
    *,
    engine: str = "sliced",
    keep: float = 0.25,
    rows: Tensor | None = None,
    batchnorm: BatchNormPolicy = "rows",
    seed: int = 0,
    tolerance: float | None = None,
    tick: Tick | None = None,
) -> Verification:
    """Check an engine's gradients against the oracle's on your own model and batch.

    Runs whole training steps of :class:`rowprop.SelectiveBackprop`, without an optimizer, each from the random state,
    buffers and modes as they are found, and compares with the engine ``masked``: plain indexing, ``losses[rows]``.
    Where the result differs, and the engine is documented to differ (training BatchNorm under ``batchnorm="rows"``;
    dropout and training BatchNorm under ``recompute``), it compares again without that difference, so that a wrong rule
    is not taken for it.

    Args:
        model: An ``nn.Module``; what ``torch.compile`` returned is one. It is checked in the modes it is in.
        batch: The whole batch, N rows, as ``losses_fn`` takes it.
        losses_fn: ``(model, batch)`` to unreduced losses, shape ``(N,)`` or ``(N, ...)``.
        engine: ``"sliced"`` (default) or ``"recompute"``.
        keep: Fraction of rows kept, in (0, 1); ``K = max(1, ceil(keep * N))``, at least 2 where BatchNorm computes
            batch statistics. Default 0.25.
        rows: Which rows to keep, distinct indices of shape ``(K,)``. Default None: ``keep`` of them at random.
        batchnorm: ``"rows"`` (default) or ``"exact"``; see :func:`rowprop.pick`.
        seed: Of the random rows. Default 0.
        tolerance: Largest relative error that counts as agreeing, unless the oracle's own rounding is more than a tenth
            of it. Default None: 1e-10 in float64, 1e-5 in float32, 1e-2 in float16 and where CUDA may use TF32, 5e-2 in
            bfloat16, by the coarsest dtype in the backward.
        tick: Called before each step with what it is for, and how much is done. Default None: nobody is told.

    Returns:
        A :class:`~rowprop.Verification`; ``print(result.verdict)`` and ``result.agrees`` are the short of it.

    Raises:
        InvalidInput: An argument is out of its range; all rows are kept, which leaves nothing to check; no parameter
            gets a gradient; the plain gradient is not reproducible, or the backward itself changes parameters. What
            ``losses_fn`` raises is passed on.

    Cost:
        Four training steps, a fifth where something densified, and some more where the engine differs. The parameters
        and buffers are copied once, their gradients three times. Afterwards the model's parameters, buffers, gradients
        and modes, the gradients of the batch and the random state are what they were; other state that a forward may
        change is not known here.

    Note:
        A rule is exercised only where a sliced gradient reaches it: what lies upstream of a densified op ran dense in
        both, which agrees by itself.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> batch = torch.randn(8, 4), torch.randn(8, 1)
        >>> result = rowprop.verify(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square())
        >>> result.status, result.flops_ratio, result.densified
        ('exact', 0.25, [])
    """
    check_trainable("verify", model, batch, losses_fn)
    check_tick("verify", tick)
    name = _checked(engine, batchnorm, seed, tolerance)
    bench = _Bench(model, batch, losses_fn, _Fixed(keep, rows, seed), _Steps(tick))
    oracle = bench.run("masked")
    limit = _tolerance(oracle.dtype, bench.devices) if tolerance is None else tolerance
    # The same gradient with other roundings: scaled by what is no power of two, and back.
    rescaled = bench.run("masked", around=lambda _: count_flops(), scale=1 / 3)
    _check_oracle(oracle)
    against = _Against(limit, _rounding(oracle, rescaled, limit))
    full = rescaled.seen

    found = bench.run(name, batchnorm)
    with watch() as report:
        flops = bench.run(name, batchnorm, around=lambda _: count_flops()).seen
    densified: list[DensifiedAt] = []
    if report.densified:
        locator = Locator(model)
        bench.run(name, batchnorm, forward=locator.modules.tracked(), around=locator.backward)
        densified = locator.places()

    comparisons = [against.compare("as it is", oracle, found)]
    buffers, rng_differs = _different(oracle, found), not _equal(oracle.rng, found.rng)
    left_other_state = bool(buffers) or rng_differs
    if comparisons[0].agrees and not left_other_state:
        status, text = "exact", ""
    elif name == "sliced" and (left_other_state or batchnorm == "exact"):
        status, text = "disagrees", ""
    elif name == "sliced":
        status, text = _judge_sliced(bench, against, oracle, comparisons)
    else:
        status, text = _judge_recompute(bench, against, oracle, comparisons, buffers)
    result = Verification(
        engine=name,
        batchnorm=batchnorm,
        status=status,
        verdict="",
        num_rows=oracle.record.num_rows,
        num_kept=oracle.record.num_kept,
        tolerance=limit,
        dtype=str(oracle.dtype).removeprefix("torch."),
        comparisons=comparisons,
        cosine=_cosine(oracle.grads, found.grads),
        densified=densified,
        backward_flops=flops.total_flops,
        full_backward_flops=full.total_flops,
        uncounted={
            op: max(f.uncounted.get(op, 0) for f in (flops, full)) for op in {**full.uncounted, **flops.uncounted}
        },
        buffers=buffers,
        rng_differs=rng_differs,
    )
    return replace(result, verdict=_verdict(result, text))


def _checked(engine: object, batchnorm: object, seed: object, tolerance: object) -> str:
    """The engine's name, where the arguments are in range."""
    for argument, value in (("engine", engine), ("batchnorm", batchnorm)):
        if not isinstance(value, str):
            raise InvalidInput(f"verify got {argument}={value!r} but the name of one was needed, a text.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise InvalidInput(f"verify got seed={seed!r} but a whole number of at most 64 bits was needed.")
    name = engine_named(cast(str, engine), batchnorm=cast(str, batchnorm))[0].name
    if name == "masked":
        raise InvalidInput("verify got engine='masked', the oracle itself; use sliced or recompute.")
    if tolerance is not None and not (is_number(tolerance) and cast(float, tolerance) > 0):
        raise InvalidInput(f"verify got tolerance={tolerance!r} but a positive number was needed; None is the default.")
    return name


class _Fixed:
    """A selector that keeps the same rows whatever the scores."""

    def __init__(self, keep: float, rows: Tensor | None, seed: int) -> None:
        if rows is None and not (is_number(keep) and 0 < keep < 1):
            raise InvalidInput(
                f"verify got keep={keep!r} but a fraction in (0, 1) was needed; where all rows are kept, every engine "
                "is plain training and there is nothing to check."
            )
        if rows is not None and not isinstance(cast(object, rows), Tensor):
            raise InvalidInput(f"verify got rows of type {type(rows).__name__} but a tensor of indices was needed.")
        if rows is not None and (rows.ndim != 1 or rows.dtype != torch.int64 or rows.numel() == 0):
            raise InvalidInput(
                f"verify got rows of shape {tuple(rows.shape)} and dtype {rows.dtype} but at least one row index was "
                "needed, shape (K,), int64."
            )
        self.keep, self.rows, self.seed = keep, rows, seed

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        total = scores.numel()
        if self.rows is None:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(self.seed))
            rows = order[: count_kept(self.keep, total)].sort().values
        else:
            rows = cast("Tensor", cast(Any, torch).unique(self.rows.cpu()))
            if rows.numel() < self.rows.numel() or int(rows[0]) < 0 or int(rows[-1]) >= total:
                raise InvalidInput(f"verify got rows that repeat or are outside 0 to {total - 1}, the batch's rows.")
        return Selection.mean(rows.to(scores.device), total, torch.promote_types(scores.dtype, torch.float32))


# --- one step, and nothing left of it ---------------------------------------------------------------------------------

Grads = dict[str, Tensor | None]


@dataclass(frozen=True)
class _Ran:
    """What one step left, before it was undone."""

    grads: Grads
    buffers: dict[str, Tensor]
    rng: list[Tensor]
    drew: bool
    """Whether it drew random numbers."""
    changed: list[str]
    """Parameters that have other values than before: something stepped inside the backward."""
    dtype: torch.dtype
    """The coarsest one that the graph computes in."""
    record: Record
    seen: Any
    """What the context around the backward yielded."""


class _Steps:
    """Tells how many of the steps are run."""

    def __init__(self, tick: Tick | None) -> None:
        self.tick = tick
        self.begun_s = time.perf_counter()
        self.run = 0

    def tell(self, engine: str) -> None:
        """Tell that a step begins."""
        if self.tick is not None:
            # The first step takes longest; how many are needed is known at the end only.
            expected = f", about {USUAL * (time.perf_counter() - self.begun_s):.0f} s in all" if self.run == 1 else ""
            fraction = min(self.run / USUAL, 1 - 0.5 / USUAL)
            self.tick(f"step {self.run + 1}, engine {engine}{expected}", fraction)
        self.run += 1


@dataclass(frozen=True)
class _Bench:
    model: nn.Module
    batch: Any
    losses_fn: LossesFn
    selector: _Fixed
    steps: _Steps

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.model.modules())

    @property
    def devices(self) -> set[torch.device]:
        return devices_of(self.modules, self.batch)

    def run(
        self,
        engine: str,
        batchnorm: BatchNormPolicy = "rows",
        *,
        forward: AbstractContextManager[Any] | None = None,
        around: Callable[[Tensor], AbstractContextManager[Any]] | None = None,
        scale: float = 1,
    ) -> _Ran:
        """Run a step with ``forward`` around its forward and ``around(loss)`` around its backward, and undo it.

        The loss is multiplied by ``scale``, and the gradients are divided by it again.
        """
        self.steps.tell(engine)
        step = SelectiveBackprop(self.model, self.losses_fn, self.selector, engine=engine, batchnorm=batchnorm)
        parameters = dict(self.model.named_parameters())
        with step_undone(self.model, self.batch) as values, torch.enable_grad():
            before = rng_states(self.devices)
            with forward or nullcontext():
                loss, record = step(self.batch)
            if record.selection.is_everything:
                raise InvalidInput(
                    f"verify would keep all {record.num_rows} rows of the batch, where every engine is plain training "
                    "and there is nothing to check; give a larger batch or a smaller keep."
                )
            if not loss.requires_grad:
                raise InvalidInput(
                    "The losses have no graph but a backward is what verify checks; let losses_fn return them without "
                    "detach() or no_grad(), and at least one parameter require a gradient."
                )
            dtype = _coarsest_dtype(loss)
            with around(loss) if around else nullcontext() as seen:
                cast(Any, loss * scale if scale != 1 else loss).backward()
            ran = _Ran(
                grads={
                    name: p.grad if scale == 1 or p.grad is None else p.grad / scale
                    for name, p in parameters.items()
                    if p.requires_grad
                },
                buffers={name: buffer.clone() for name, buffer in self.model.named_buffers()},
                rng=rng_states(self.devices),
                drew=not _equal(before, rng_states(self.devices)),
                changed=[name for name, p in parameters.items() if not torch.equal(p, values[p])],
                dtype=dtype,
                record=record,
                seen=seen,
            )
        # Autocast remembers low-precision copies of the weights, with the graph just run.
        torch.clear_autocast_cache()
        return ran


def _coarsest_dtype(loss: Tensor) -> torch.dtype:
    seen = {entry.dtype.to_real() for node in graph(loss.grad_fn) for entry in node._input_metadata}
    return max((dtype for dtype in seen if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


# --- gradients beside the oracle's ------------------------------------------------------------------------------------


def _tolerance(dtype: torch.dtype, devices: set[torch.device]) -> float:
    if dtype == torch.float32 and any(d.type == "cuda" for d in devices) and torch.backends.cudnn.allow_tf32:
        return TF32_TOLERANCE
    return TOLERANCES.get(dtype, max(TOLERANCES.values()))


def _check_oracle(oracle: _Ran) -> None:
    """Refuse what nothing can be compared with."""
    if oracle.changed:
        raise InvalidInput(
            f"The backward itself changed {oracle.changed[0]} (an optimizer that steps inside a hook?) and "
            "verify needs one that only computes gradients; remove such hooks first. The old values were put back."
        )
    grads = {name: grad for name, grad in oracle.grads.items() if grad is not None}
    if not any(bool(_wide(grad).any()) for grad in grads.values()):
        raise InvalidInput(
            "No parameter gets a gradient other than zero from the kept rows, so there is nothing to compare; check "
            "that losses_fn runs this model and that its parameters require gradients."
        )
    for name, grad in grads.items():
        if not bool(_wide(grad).isfinite().all()):
            raise InvalidInput(
                f"The plain gradient of {name} is not finite, so nothing can be compared with it; look at the batch "
                "and at the scale of the losses."
            )


def _rounding(oracle: _Ran, rescaled: _Ran, limit: float) -> dict[str, float]:
    """The oracle's relative rounding error in each parameter, measured by running it twice."""
    errors = _Against(limit, {}).compare("", oracle, rescaled).errors
    worst = max(errors, key=lambda entry: entry.error)
    if worst.error > math.sqrt(limit):
        raise InvalidInput(
            f"Two plain backwards from the same random state differ by {worst.error:.1e} in {worst.name}, far more "
            f"than the tolerance {limit:.1e}, so there is nothing to compare with; make losses_fn depend on the model, "
            "the batch and torch's random state alone, use deterministic kernels, or give a larger tolerance."
        )
    return {entry.name: entry.error for entry in errors}


def _wide(tensor: Tensor) -> Tensor:
    """As a dense tensor in at least float32."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class _Against:
    """How gradients are compared: with which tolerance, and how much rounding the oracle has."""

    limit: float
    rounding: dict[str, float]

    def compare(self, conditions: str, oracle: _Ran, found: _Ran) -> Comparison:
        """Measure each parameter's error."""
        sizes = {name: _largest(_wide(grad)) for name, grad in oracle.grads.items() if grad is not None}
        floor = NEXT_TO_NOTHING * max(sizes.values(), default=0.0)
        errors: list[ParameterError] = []
        for name, grad in oracle.grads.items():
            other = found.grads[name]
            if grad is None and other is None:
                continue
            scale = max(sizes.get(name, 0.0), floor)
            error, problem = _error(grad, other, scale)
            allowed = max(self.limit, ROUNDING * self.rounding.get(name, 0.0))
            errors.append(ParameterError(name, error, scale, allowed, problem))
        return Comparison(conditions, sorted(errors, key=lambda entry: (entry.agrees, -entry.error)))


def _error(grad: Tensor | None, other: Tensor | None, scale: float) -> tuple[float, str | None]:
    """The relative error, or infinity and the problem."""
    if grad is None:
        return math.inf, "a gradient, where the oracle has none"
    if other is None:
        return math.inf, "no gradient, where the oracle has one"
    if type(other) is not type(grad) or other.shape != grad.shape:
        return math.inf, f"a {type(other).__name__} of shape {tuple(other.shape)}, not {tuple(grad.shape)}"
    if not bool(_wide(other).isfinite().all()):
        return math.inf, "not finite"
    off = _largest(_wide(other) - _wide(grad))
    return (off / scale if scale else math.inf if off else 0.0), None


def _cosine(expected: Grads, found: Grads) -> float:
    dot = a = b = 0.0
    for name, grad in expected.items():
        x = torch.zeros(()) if grad is None else _wide(grad).double().flatten()
        other = found[name]
        y = torch.zeros(()) if other is None else _wide(other).double().flatten()
        dot += 0.0 if grad is None or other is None else float((x * y.conj()).real.sum())
        a += float(x.abs().square().sum())
        b += float(y.abs().square().sum())
    return dot / math.sqrt(a * b) if a and b else math.nan


def _equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _different(first: _Ran, second: _Ran) -> list[str]:
    """Names of the buffers whose values differ; NaN equals NaN."""
    pairs = ((name, a, second.buffers[name]) for name, a in first.buffers.items())
    return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]


# --- what a difference means ------------------------------------------------------------------------------------------

Judgement = tuple[Literal["exact", "by design", "disagrees"], str]


def _judge_sliced(bench: _Bench, against: _Against, oracle: _Ran, comparisons: list[Comparison]) -> Judgement:
    """Whether BatchNorm's approximation is all that differs.

    Two comparisons without it: with the statistics held constant, which keeps everything upstream sliced, so that every
    other rule is exercised; and with ``batchnorm="exact"``, the model's own gradient.
    """
    constant = bench.run("masked", around=lambda _: _ConstantStatistics())
    if constant.seen.calls:
        constants = constant, bench.run("sliced", around=lambda _: _ConstantStatistics())
    else:  # none was met, or all are inside what is compiled, where no op is seen
        norms: list[Any] = [m for m in bench.modules if isinstance(m, _BatchNorm) and m.training]
        if not norms:
            return "disagrees", ""
        with evaluating(norms):
            constants = bench.run("masked"), bench.run("sliced")
    pairs = {
        "BatchNorm's statistics held constant": constants,
        "batchnorm='exact'": (oracle, bench.run("sliced", "exact")),
    }
    comparisons += [against.compare(conditions, a, b) for conditions, (a, b) in pairs.items()]
    if not all(comparison.agrees for comparison in comparisons[1:]):
        return "disagrees", ""
    return "by design", PROJECTED


def _judge_recompute(
    bench: _Bench, against: _Against, oracle: _Ran, comparisons: list[Comparison], buffers: list[str]
) -> Judgement:
    """Whether dropout and batch statistics, which evaluation mode switches off, are all that differs."""
    with evaluating(bench.modules):
        plain, found = bench.run("masked"), bench.run("recompute")
    if plain.drew:
        why = "the second forward draws other random numbers, in evaluation mode too, so that nothing more can be told"
        return "by design", why
    comparisons.append(against.compare("evaluation mode", plain, found))
    if not comparisons[1].agrees or _different(plain, found):
        return "disagrees", "each row's loss should depend on that row alone, and does not"
    why = second_forward_differs(drew=oracle.drew, batch_statistics=bool(buffers) or not oracle.drew)
    return "by design", cast(str, why)


class _ConstantStatistics(TorchDispatchMode):
    """The backward of BatchNorm as if the statistics of its batch were constants: local in the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found: list[Any] = [None if place is None else args[place] for place in _TRAINING_BATCHNORM.get(func, ())]
        # A sliced gradient goes on to its rules, and not to what guards it from other Python code.
        with cast(Any, torch)._C.DisableTorchFunctionSubclass():
            # 1 is instance norm's first dimension: its statistics are a row's own.
            if not found or found[6] is False or found[1].shape[0] == 1:
                return func(*args, **(kwargs or {}))
            self.calls += 1
            g, x, weight, mean, invstd, eps, _, mask = found
            constant = mean, invstd.pow(-2) - eps, None, None, False, eps, mask or [True] * 3
            return _aten.native_batch_norm_backward.default(g, x, weight, *constant)


_aten = torch.ops.aten
_TRAINING_BATCHNORM: dict[Any, tuple[int | None, ...]] = {
    _aten.native_batch_norm_backward.default: (0, 1, 2, 5, 6, 8, 7, 9),
    _aten.batch_norm_backward.default: (0, 1, 2, 5, 6, 8, 7, 9),
    _aten.cudnn_batch_norm_backward.default: (1, 0, 2, 5, 6, 7, None, None),
    _aten.miopen_batch_norm_backward.default: (1, 0, 2, 5, 6, 7, None, None),
}
"""Where each has gradient, input, weight, mean, inverse deviation, epsilon, training flag and output mask."""


def _verdict(result: Verification, why: str) -> str:
    off = next((c for c in result.comparisons[1:] if not c.agrees), result.comparisons[0])
    worst = off.worst
    rounds = any(entry.agrees and entry.error > result.tolerance for c in result.comparisons for entry in c.errors)
    more = ", more where the oracle's own rounding is more" if rounds else ""
    allowed = f"(tolerance {result.tolerance:.0e}, {result.dtype}{more})"
    cost = f"{result.num_kept} of {result.num_rows} rows for {result.flops_ratio:.3f} of the full backward's FLOPs"
    if result.densified:
        cost += f", densified first at {result.densified[0].module} ({result.densified[0].op})"
    if result.status == "exact":
        within = f"all {len(result.errors)} parameters within {worst.error:.1e} of the oracle {allowed}"
        return f"{result.engine} is exact: {within}; {cost}."
    if result.status == "by design":
        first = result.errors[0]
        by = f"by up to {first.error:.1e} in {first.name}, cosine {result.cosine:.4f}"
        without = ""
        if result.comparisons[1:]:
            under = " and ".join(c.conditions for c in result.comparisons[1:])
            rest = max(c.worst.error for c in result.comparisons[1:])
            without = f"without that ({under}) all parameters are within {rest:.1e} {allowed}; "
        return f"{result.engine} differs {by}, by design: {why}; {without}{cost}."
    parts: list[str] = []
    if not off.agrees:
        wrong = sum(not entry.agrees for entry in off.errors)
        under = "" if off is result.comparisons[0] else f", with {off.conditions}"
        by = worst.problem or f"off by {worst.error:.1e}"
        parts.append(f"in {wrong} of {len(off.errors)} parameters{under}: worst {worst.name}, {by} {allowed}")
    left = [f"buffer {name}" for name in result.buffers[:3]] + ["the random state"] * result.rng_differs
    if left:
        parts.append(f"in what it leaves behind: {', '.join(left)}")
    return f"{result.engine} disagrees with the oracle {'; '.join([*parts, why] if why else parts)}."


# --- where the gradient went back to all rows -------------------------------------------------------------------------


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_for_json(entry) for entry in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
