"""The result of a verification: plain numbers, and the one line that says what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from rowprop.cost.where import DensifiedAt

Status = Literal["exact", "by design", "disagrees"]


@dataclass(frozen=True)
class ParameterError:
    """The error of one parameter's gradient against the reference.

    One of rounding errors alone (the bias of attention's keys) has no own size, so its ``scale`` has a floor. Rounding
    is large where a gradient's terms cancel (a bias before BatchNorm), so more of it is ``allowed``.
    """

    name: str  # as in ``model.named_parameters()``
    error: float  # largest absolute difference over ``scale``; infinity where the two cannot be compared
    scale: float  # the reference's largest absolute entry; if only rounding, at least 1e-2, or the tolerance, of all
    allowed: float  # the tolerance, at least ten times the reference's rounding error
    problem: str | None = None  # why the two cannot be compared (one is missing or not finite), else None

    @property
    def agrees(self) -> bool:
        """Whether the error is at most ``allowed``."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """One engine's gradients compared with the reference under the same conditions."""

    conditions: str  # e.g. "as it is"
    errors: list[ParameterError]  # with a gradient in either; those that disagree first, then the largest error

    @property
    def agrees(self) -> bool:
        """Whether every parameter agrees."""
        return self.worst.agrees

    @property
    def worst(self) -> ParameterError:
        """The parameter with the largest error."""
        return self.errors[0]


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Attributes:
        engine: The engine that was checked.
        batchnorm: How the engine treats training BatchNorm; None is a choice between ``"rows"`` and ``"exact"``.
        attention: How the engine treats attention between tokens.
        unit: What a row is, ``"row"`` or ``"token"``.
        cut: The ops at which attention was cut, with the number of calls; see :func:`rowprop.watch`.
        status: ``"exact"``: every gradient, buffer and random state is the oracle's. ``"by design"``: it differs, and
            every comparison without the documented difference agrees. ``"disagrees"``: neither.
        why: The documented difference, or a hint at the cause; empty where nothing is to be said.
        num_rows: N.
        num_kept: K.
        tolerance: Largest relative error that counts as agreeing.
        dtype: The coarsest dtype that the backward computes in.
        comparisons: First under the conditions asked for; where it disagrees, also without what differs by design.
        zero_gradients: Names of the parameters whose gradient is zero in the oracle: most mistakes leave it zero.
        drawn: Names of the parameters that were zero and were drawn anew for the comparison, see :func:`verify`.
        cosine: Between the engine's gradient and the oracle's under the conditions asked for, all parameters together.
        densified: Where the sliced gradient went back to all rows, largest ``time_share`` first.
        functions: For each custom function that ran at full size, its declaration or why there is none; see
            :class:`~rowprop.backprop.watch.Report`.
        backward_flops: FLOPs that the engine's backward ran, without those of a second forward.
        full_backward_flops: FLOPs that the oracle's backward ran.
        uncounted: Ops of either backward that have no formula, and so no FLOPs, and the larger number of calls.
        buffers: Names of the buffers to which the engine gave other values than the oracle.
        rng_differs: Whether the engine left another random state than the oracle.
    """

    engine: str
    batchnorm: str | None
    attention: str
    unit: str
    cut: dict[str, int]
    status: Status
    why: str
    num_rows: int
    num_kept: int
    tolerance: float
    dtype: str
    comparisons: list[Comparison]
    zero_gradients: list[str]
    drawn: list[str]
    cosine: float
    densified: list[DensifiedAt]
    functions: dict[str, str]
    backward_flops: int
    full_backward_flops: int
    uncounted: dict[str, int]
    buffers: list[str]
    rng_differs: bool

    def __repr__(self) -> str:
        return self.verdict

    @property
    def agrees(self) -> bool:
        """Whether the engine does as documented: every status but ``"disagrees"``."""
        return self.status != "disagrees"

    @property
    def errors(self) -> list[ParameterError]:
        """One entry per parameter under the conditions asked for, worst first; see :class:`Comparison`."""
        return self.comparisons[0].errors

    @property
    def flops_ratio(self) -> float:
        """FLOPs of the engine's backward over those of the full backward; NaN where none were counted."""
        return self.backward_flops / self.full_backward_flops if self.full_backward_flops else math.nan

    @property
    def limit(self) -> float:
        """The ratio where every op of the backward runs on the kept rows only: K / N."""
        return self.num_kept / self.num_rows

    @property
    def verdict(self) -> str:
        """One line that says which status holds, and why."""
        count, zero = len(self.errors), len(self.zero_gradients)
        rounds = any(entry.agrees and entry.error > self.tolerance for c in self.comparisons for entry in c.errors)
        more = ", more where the oracle's own rounding is more" if rounds else ""
        allowed = f"(tolerance {self.tolerance:.0e}, {self.dtype}{more})"
        if self.status == "exact":
            which = f"{count - zero} of {count} parameters" if zero else f"all {count} parameters"
            said = f" is exact: {which} within {self.errors[0].error:.1e} of the oracle {allowed}; {self._cost}."
        elif self.status == "by design":
            first, without = self.errors[0], ""
            if others := self.comparisons[1:]:
                rest = max(comparison.worst.error for comparison in others)
                under = " and ".join(comparison.conditions for comparison in others)
                without = f"without this difference ({under}) all parameters are within {rest:.1e} {allowed}; "
            by = f"a cosine of {self.cosine:.4f} to the oracle's, up to {first.error:.1e} off in {first.name}"
            said = f" has another gradient, by design, with {by}: {self.why}; {without}{self._cost}."
        else:
            said = f" disagrees with the oracle {'; '.join(self._wrong(allowed))}."
        if self.drawn:
            said += f" Parameters that are zero stop the gradient: {len(self.drawn)} were drawn anew for this."
        if zero:
            said += f" The gradients of {zero} of {count} parameters are zero on these rows, where most mistakes do not"
            said += " show: verify another batch, or the model after some training." if zero > count / 2 else " show."
        for name, found in self.functions.items():
            said += f" {name} ran at full size: {found}."
        return self.engine + said

    @property
    def _cost(self) -> str:
        densified = [f", densified first at {place.module} ({place.op})" for place in self.densified[:1]]
        ratio = f"{self.flops_ratio:.3f} of the full backward's FLOPs (limit {self.limit:.3f})"
        return f"{self.num_kept} of {self.num_rows} {self.unit}s for {ratio}{''.join(densified)}"

    def _wrong(self, allowed: str) -> Iterator[str]:
        off = next((c for c in self.comparisons[1:] if not c.agrees), self.comparisons[0])
        if not off.agrees:
            wrong = sum(not entry.agrees for entry in off.errors)
            under = "" if off is self.comparisons[0] else f", with {off.conditions}"
            by = off.worst.problem or f"off by {off.worst.error:.1e}"
            yield f"in {wrong} of {len(off.errors)} parameters{under}: worst {off.worst.name}, {by} {allowed}"
        left = [f"buffer {name}" for name in self.buffers[:3]] + ["the random state"] * self.rng_differs
        if left:
            yield f"in the state that it leaves: {', '.join(left)}"
        if self.why:
            yield self.why

    def to_dict(self) -> dict[str, Any]:
        """As numbers, texts, lists and dicts that JSON holds; infinity and NaN become None."""
        names = ("verdict", "agrees", "flops_ratio", "limit")
        return _for_json(asdict(self) | {name: getattr(self, name) for name in names})


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_for_json(entry) for entry in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
