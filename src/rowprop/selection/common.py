"""Shared by the selectors: counting, ordering, checking, and keeps that follow the training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast

import torch
from torch import Tensor

from rowprop.checks import check_numbers, check_tensor, is_number, takes, wrong
from rowprop.errors import InvalidInput
from rowprop.scoring import described
from rowprop.selection.base import NOTHING, Context, Selection, check_context, check_fits, mean_unread

Keep: TypeAlias = "float | Callable[[float], float]"
"""A fraction, or a schedule: a callable from progress to a fraction, e.g. :class:`rowprop.schedule.Ramp`."""

SLACK = 1e-9  # of floats: 0.07 * 100 is 7.000000000000001, and nine rows of ten hold a hair less than 0.9 of their sum


class NotFinite(InvalidInput):
    """A selector got a score that is NaN or infinite and needs finite ones."""


def count_kept(keep: float, num_rows: int) -> int:
    """K for a fraction: ``max(1, ceil(keep * N))``, forgiving the rounding of the product."""
    return max(1, math.ceil(keep * num_rows - SLACK))


def hardest_first(scores: Tensor) -> Tensor:
    """The rows ``(N,)``, int64, by score, largest first; ties go to the lower row and NaN comes last."""
    # Ascending order of the negated scores: only this direction puts NaN last and keeps ties in row order.
    return torch.sort(scores.neg(), stable=True).indices


def weights_dtype(scores: Tensor) -> torch.dtype:
    """At least float32, as 1/K in bfloat16 is off by up to 0.4 %."""
    return torch.promote_types(scores.dtype, torch.float32)


def mean_of(rows: Tensor, scores: Tensor, *, unbiased: bool = False) -> Selection:
    """Selection of ``rows``, in whatever order they come, each with weight ``1/K``."""
    return mean_unread(rows.sort().values, scores.numel(), weights_dtype(scores), unbiased=unbiased)


def every_row(scores: Tensor) -> Selection:
    """Selection of all rows, each with weight ``1/N``."""
    rows = torch.arange(scores.numel(), device=scores.device)
    return mean_unread(rows, scores.numel(), weights_dtype(scores), unbiased=True)


def on_host(name: str, scores: Tensor) -> Tensor:
    """Scores in float64 on the host, all finite."""
    values = scores.cpu().double()
    finite = values.isfinite()
    if not finite.all():
        some = f"{int((~finite).sum())} of {values.numel()} scores NaN or infinite but needs finite ones"
        raise NotFinite(f"{name} got {some}; leave such rows out first, as nonfinite='drop' does.")
    return values


def check_fraction(name: str, field: str, value: object, *, zero_too: bool = False, schedule: bool = False) -> None:
    """Refuse a value that is no fraction; a schedule, where one may be, is asked later."""
    if schedule and callable(value) and not isinstance(value, type) and takes(value, 1):
        return
    if not is_number(value) or not 0 <= cast("float", value) <= 1 or (value == 0 and not zero_too):
        bracket = "[" if zero_too else "("
        raise wrong(name, field, value, f"a fraction in {bracket}0, 1] was needed; write a quarter as {field}=0.25.")


def fraction_at(name: str, field: str, value: Keep, context: Context, *, zero_too: bool = False) -> float:
    """A fraction, or the answer of the schedule in its place at the context's progress."""
    if not callable(value):
        return value
    answer = value(context.need("progress", f"the schedule {field} of {name}"))
    check_fraction(name, field, answer, zero_too=zero_too)
    return answer


class Checked:
    """A selector that looks at its arguments before it chooses."""

    _draws: ClassVar[bool] = False  # by the context's generator

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select among ``scores`` ``(N,)``, larger = more wanted; schedules are asked at the context's progress."""
        name = type(self).__name__
        check_context(name, context)
        check_tensor(name, "scores", scores, "one floating number per row was needed, a tensor of shape (N,).")
        if scores.dim() != 1 or scores.numel() == 0 or not scores.is_floating_point():
            needed = "one floating number per row was needed, shape (N,); reduce as in `loss.flatten(1).mean(1)`."
            raise InvalidInput(f"{name} got {described(scores, 'scores')} but {needed}")
        check_fits(context, scores.numel())
        generator = context.generator if self._draws else None
        if generator is not None and generator.device.type != scores.device.type:
            devices = f"a generator on {generator.device} but the scores are on {scores.device}"
            raise InvalidInput(f"{name} got {devices}; make it with torch.Generator({scores.device.type!r}).")
        check_numbers(name, "scores", scores)
        return self._choose(scores.detach(), context)

    def _choose(self, scores: Tensor, context: Context) -> Selection:
        raise NotImplementedError


@dataclass(frozen=True)
class Keeping(Checked):
    """A selector of ``K = max(1, ceil(keep * N))`` rows."""

    keep: Keep

    def __post_init__(self) -> None:
        check_fraction(type(self).__name__, "keep", self.keep, schedule=True)

    def keep_at(self, context: Context) -> float:
        """Return the ``keep`` of this moment of the training."""
        return fraction_at(type(self).__name__, "keep", self.keep, context)
