"""Compare gradients with the reference, and decide whether a difference is a documented one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode

from rowprop.backprop.autograd.rowgrad import RowGrad
from rowprop.engines import CUT, PROJECTED, Engine, Masked, Sliced, second_forward_differs, uses_batch_statistics
from rowprop.errors import InvalidInput
from rowprop.oracle.bench import Bench, Ran
from rowprop.oracle.results import Comparison, ParameterError, Status
from rowprop.state import evaluating

# Largest relative error that is rounding, by the coarsest dtype that the backward computes in.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TF32_TOLERANCE = TOLERANCES[torch.float16]  # TF32 has as many bits of mantissa
NEXT_TO_NOTHING = 1e-2  # of the largest gradient, or the tolerance: smaller ones that are rounding count as so large
ROUNDING = 10  # allowed error as a multiple of the reference's rounding error; at least the tolerance


def usual_tolerance(dtype: torch.dtype, devices: set[torch.device]) -> float:
    """Default tolerance."""
    if dtype == torch.float32 and any(d.type == "cuda" for d in devices) and torch.backends.cudnn.allow_tf32:
        return TF32_TOLERANCE
    return TOLERANCES.get(dtype, max(TOLERANCES.values()))


@dataclass(frozen=True)
class Yardstick:
    """The allowed error of a gradient: the tolerance, and for each parameter the reference's rounding."""

    tolerance: float
    rounding: dict[str, float]

    @classmethod
    def measured(cls, oracle: Ran, again: Ran, tolerance: float) -> Yardstick:
        """Measure the reference's rounding errors on two runs that round differently, if it is reproducible."""
        if oracle.changed:
            raise InvalidInput(
                f"The backward changed {oracle.changed[0]}, which is put back; remove the hook that does it, first."
            )
        grads = {name: grad for name, grad in oracle.grads.items() if grad is not None}
        if len(zero_gradients(oracle)) == len(grads):
            raise InvalidInput(
                "No parameter gets a gradient other than zero from the kept rows; does losses_fn run this model?"
            )
        for name, grad in grads.items():
            if not bool(_wide(grad).isfinite().all()):
                raise InvalidInput(f"The plain gradient of {name} is not finite; check the batch and the losses.")
        errors = cls(tolerance, {}).compare("", oracle, again).errors
        worst = max(errors, key=lambda entry: entry.error)
        if worst.error > math.sqrt(tolerance):
            raise InvalidInput(
                f"Two plain backwards from the same random state differ by {worst.error:.1e} in {worst.name} "
                f"(tolerance {tolerance:.1e}), so there is nothing to compare with; use deterministic kernels, and a "
                "losses_fn of the model, the batch and torch's random state alone."
            )
        return cls(tolerance, {entry.name: entry.error * entry.scale for entry in errors})

    def compare(self, conditions: str, oracle: Ran, found: Ran) -> Comparison:
        """Measure the error of each parameter that has a gradient in either."""
        sizes = {name: _largest(_wide(grad)) for name, grad in oracle.grads.items() if grad is not None}
        floor = max(NEXT_TO_NOTHING, self.tolerance) * max(sizes.values(), default=0.0)
        errors: list[ParameterError] = []
        for name, grad in oracle.grads.items():
            other = found.grads[name]
            if grad is None and other is None:
                continue
            size, rounding = sizes.get(name, 0.0), self.rounding.get(name, 0.0)
            sharp = name in self.rounding and 0 < size * self.tolerance >= rounding
            scale = size if sharp else max(size, floor)
            error, problem = _error(grad, other, scale)
            allowed = max(self.tolerance, ROUNDING * rounding / scale if scale else 0.0)
            errors.append(ParameterError(name, error, scale, allowed, problem))
        return Comparison(conditions, sorted(errors, key=lambda entry: (entry.agrees, -entry.error)))


def zero_gradients(oracle: Ran) -> list[str]:
    """Names of the parameters whose gradient is zero in every entry."""
    return [name for name, grad in oracle.grads.items() if grad is not None and not bool(_wide(grad).any())]


def _error(grad: Tensor | None, other: Tensor | None, scale: float) -> tuple[float, str | None]:
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


def cosine(oracle: Ran, found: Ran) -> float:
    """Between the two gradients, all parameters together; NaN where one is zero."""

    def dot(first: Ran, second: Ran) -> float:
        total = 0.0
        for name, grad in first.grads.items():
            other = second.grads[name]
            if grad is not None and other is not None:
                a, b = (_wide(g).to(torch.promote_types(g.dtype, torch.float64)) for g in (grad, other))
                total += float((a * b.conj()).sum().real)
        return total

    size = math.sqrt(dot(oracle, oracle) * dot(found, found))
    return dot(oracle, found) / size if size else math.nan


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


Judgement = tuple[Status, str, list[Comparison]]  # of an engine, the reason, and the comparisons on which it rests


def judge(
    bench: Bench, yardstick: Yardstick, engine: Engine, oracle: Ran, found: Ran, *, cut: bool = False
) -> Judgement:
    """Say whether the engine's step ``found`` equals the reference; if not, run further steps to say why."""
    first = yardstick.compare("as it is", oracle, found)
    same_state = not oracle.other_buffers(found) and not oracle.other_rng(found)
    if first.agrees and same_state:
        return "exact", "", [first]
    if not isinstance(engine, Sliced):
        return _judge_second_forward(bench, yardstick, engine, oracle, found, first)
    if same_state and cut:
        return _judge_cut(bench, yardstick, engine, oracle, found, first)
    if same_state and engine.batchnorm != "exact":
        return _judge_rows(bench, yardstick, engine, oracle, found, first)
    return "disagrees", "", [first]


def _judge_cut(
    bench: Bench, yardstick: Yardstick, engine: Sliced, oracle: Ran, found: Ran, first: Comparison
) -> Judgement:
    """Say whether ``attention="cut"`` is the only difference: the reference reruns with keys and values detached.

    It cannot do so to attention that a model writes as matrix products: then the other rules are compared alone.
    """
    selected = oracle.record.selection
    kept = selected.rows.new_zeros(selected.num_rows, dtype=torch.bool).index_fill(0, selected.rows, True)
    dense = Detached(kept.view(oracle.shape))
    detached = bench.run(Masked(), forward=dense, backward=lambda _: dense)  # checkpoints run forwards there again
    second = yardstick.compare("keys and values of other tokens detached", detached, found)
    if second.agrees:
        return "by design", CUT, [first, second]
    if engine.batchnorm != "exact" and uses_batch_statistics(bench.model):
        ran = bench.run(replace(engine, batchnorm="exact"))
        projected = yardstick.compare("the same with batchnorm='exact'", detached, ran)
        if projected.agrees:
            return "by design", f"{CUT}, and {PROJECTED}", [first, projected]
    exact = replace(engine, attention="exact")
    status, _, comparisons = judge(bench, yardstick, exact, oracle, bench.run(exact))
    if dense.calls or status == "disagrees":
        return "disagrees", "", [first, second, *comparisons]
    others = [replace(c, conditions=f"attention='exact', {c.conditions}") for c in comparisons]
    why = f"{CUT}, which was not compared, as the losses are not of sequences in scaled_dot_product_attention"
    return "by design", why, [first, *others]


def _judge_rows(
    bench: Bench, yardstick: Yardstick, engine: Sliced, oracle: Ran, found: Ran, first: Comparison
) -> Judgement:
    """Say whether ``batchnorm="rows"`` is the only difference, by two comparisons without it and one by its formula.

    With BatchNorm's statistics held constant everything upstream stays sliced, and every other rule is exercised; under
    ``batchnorm="exact"`` the gradient is the model's own. The formula, on dense gradients, tells whether it is right.
    """
    formula: list[Comparison] = []
    constant = bench.run(Masked(), backward=lambda _: ConstantStatistics())
    if constant.seen.calls:
        pair = constant, bench.run(Sliced("rows"), backward=lambda _: ConstantStatistics())
        kept = bench.run(engine, backward=lambda _: Projected()).seen.kept
        if len(kept) == constant.seen.calls:  # a compiled region projects with other ops
            dense = bench.run(Masked(), backward=lambda _: Projected(kept))
            coarser = Yardstick(math.sqrt(yardstick.tolerance), {})  # projecting few rows leaves mostly rounding
            formula = [coarser.compare("BatchNorm projected by its formula", dense, found)]
    else:  # the model has no training BatchNorm, or compiled regions hide every one of them from a dispatch mode
        norms: list[Any] = [m for m in bench.modules if isinstance(m, _BatchNorm) and m.training]
        if not norms:
            return "disagrees", "", [first]
        with evaluating(norms):
            pair = bench.run(Masked()), bench.run(Sliced("rows"))
    held = yardstick.compare("BatchNorm's statistics held constant", *pair)
    exact = yardstick.compare("batchnorm='exact'", oracle, bench.run(Sliced("exact")))
    agrees = all(comparison.agrees for comparison in (held, exact, *formula))
    return "by design" if agrees else "disagrees", PROJECTED if agrees else "", [first, held, exact, *formula]


def _judge_second_forward(
    bench: Bench, yardstick: Yardstick, engine: Engine, oracle: Ran, found: Ran, first: Comparison
) -> Judgement:
    """Say whether dropout and batch statistics, which evaluation mode switches off, are the only difference."""
    with evaluating(bench.modules):
        plain, evaluated = bench.run(Masked()), bench.run(engine)
    if plain.drew:
        why = "the second forward draws other random numbers, in evaluation mode too, so nothing more can be compared"
        return "by design", why, [first]
    both = [first, yardstick.compare("evaluation mode", plain, evaluated)]
    if not both[1].agrees or plain.other_buffers(evaluated):
        return "disagrees", "each row's loss should depend on that row alone, and does not", both
    statistics = bool(oracle.other_buffers(found)) or not oracle.drew
    return "by design", second_forward_differs(drew=oracle.drew, batch_statistics=statistics) or "", both


class Detached:
    """A context in which attention detaches keys and values at the tokens that are not kept, within one sequence.

    It stands in the place of ``torch.nn.functional.scaled_dot_product_attention``, which nn.MultiheadAttention calls as
    well. ``kept`` has the shape of the losses: ``(N, T)``, ``(N, H, W)`` or flattened. The loss of token ``t`` comes
    from position ``t``; behind those with a loss sequences may have more positions, one where losses are flattened.
    """

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept
        self.calls = 0

    def __enter__(self) -> Detached:
        self._replaced = F.scaled_dot_product_attention  # the user's own, where it is patched
        F.scaled_dot_product_attention = self.attend
        return self

    def __exit__(self, *exception: object) -> None:
        F.scaled_dot_product_attention = self._replaced

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As ``scaled_dot_product_attention``, with keys and values detached."""
        kept = self._of(key.shape[0], query.shape[-2])
        if key.ndim > 2 and key.shape[-2] == query.shape[-2] and kept is not None:
            self.calls += 1
            here = kept.view(-1, *[1] * (key.ndim - 3), key.shape[-2], 1)
            key, value = (torch.where(here, tensor, tensor.detach()) for tensor in (key, value))
        return self._replaced(query, key, value, *args, **kwargs)

    def _of(self, rows: int, length: int) -> Tensor | None:
        """Which positions of these sequences are kept, ``(rows, length)``; None if the losses are of others."""
        if self.kept.ndim > 1:
            kept = self.kept.flatten(1)
        elif self.kept.numel() in (rows * length, rows * (length - 1)):
            kept = self.kept.view(rows, -1)
        else:
            return None
        more = length - kept.shape[1]
        return F.pad(kept, (0, more)) if more >= 0 and kept.shape[0] == rows else None


class ConstantStatistics(TorchDispatchMode):
    """Runs the backward of BatchNorm as if the statistics of its batch were constants: each row for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found: list[Any] = [None if place is None else args[place] for place in _TRAINING_BATCHNORM.get(func, ())]
        # A sliced gradient guards itself from Python code. Without torch functions it goes straight to its rules.
        with cast(Any, torch)._C.DisableTorchFunctionSubclass():
            # The first dimension of instance norm's input is 1: its statistics are those of one row.
            if not found or found[6] is False or found[1].shape[0] == 1:
                return func(*args, **(kwargs or {}))
            self.calls += 1
            return self.run(partial(func, *args, **(kwargs or {})), *found)

    def run(self, backward: Callable[[], Any], g: Any, x: Any, weight: Any, *rest: Any) -> Any:
        """In the place of ``backward``."""
        mean, invstd, eps, _, mask = rest
        constant = mean, invstd.pow(-2) - eps, mean, invstd, False, eps, mask or [True] * 3
        return _aten.native_batch_norm_backward.default(g, x, weight, *constant)


class Projected(ConstantStatistics):
    """Runs it by the formula of ``batchnorm="rows"`` at the places ``kept``, which it notes itself if it got none.

    They are, for each backward of a BatchNorm in their order, the positions of the batch whose gradient a sliced
    backward projected; None where that was exact.
    """

    def __init__(self, kept: Sequence[Tensor | None] | None = None) -> None:
        super().__init__()
        self.notes, self.kept = kept is None, list(kept or [])

    def run(self, backward: Callable[[], Any], g: Any, x: Any, weight: Any, *rest: Any) -> Any:
        """In the place of ``backward``."""
        if self.notes:
            out = backward()
            rows = out[0].sliced if type(out[0]) is RowGrad else None
            self.kept.append(None if rows is None else rows.like(torch.ones_like(rows.values)).dense()[:, :1] > 0)
            return out
        kept = self.kept[self.calls - 1]
        if kept is None:
            return backward()

        def mean(tensor: Tensor) -> Tensor:
            return torch.where(kept, tensor, 0.0).sum([0, *range(2, x.ndim)], keepdim=True) / kept.sum()

        a, b = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (g, x))
        a, b = a - mean(a), b - mean(b)
        projected = torch.where(kept, a - b * mean(a * b) / (mean(b.square()) + rest[2]), 0.0).to(g.dtype)
        return super().run(backward, projected, x, weight, *rest)[0], *super().run(backward, g, x, weight, *rest)[1:]


_aten = torch.ops.aten
# Each op's places of gradient, input, weight, mean, inverse deviation, epsilon, training flag and output mask.
_PLACES = (0, 1, 2, 5, 6, 8, 7, 9)
_TRAINING_BATCHNORM: dict[Any, tuple[int | None, ...]] = {
    _aten.native_batch_norm_backward.default: _PLACES,
    _aten.batch_norm_backward.default: _PLACES,
    _aten.cudnn_batch_norm_backward.default: (1, 0, 2, 5, 6, 7, None, None),
}
