"""The numbers of a step that every integration logs, under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.checks import check_callable
from rowprop.step.record import Record

ClassesFn = Callable[[Any], Tensor]
"""A function of the batch that returns the class of each row, (N,), int64."""


def check_classes_fn(owner: str, classes_fn: object) -> None:
    """Refuse a value that cannot be called."""
    if classes_fn is not None:
        check_callable(owner, "classes_fn", classes_fn, "a function of the batch was needed; None is the default.")


def numbers_of(record: Record, classes: Tensor | None = None) -> dict[str, Tensor | float]:
    """The numbers that a framework's logger takes in each step.

    Args:
        record: Of the step.
        classes: The class of each row, (N,), int64, where its kept share is asked for: the host waits for it.

    Returns:
        ``loss_all`` and ``loss_kept`` (0-d tensors, which the host has not read), ``kept`` (the share of the rows that
        contribute), where ``engine="auto"`` has measured ``saved``, and for each class of the batch ``kept/CLASS``.
    """
    numbers: dict[str, Tensor | float] = {"loss_all": record.loss_all, "loss_kept": record.loss_kept}
    numbers["kept"] = record.num_kept / max(1, record.num_rows)
    if record.saved is not None:
        numbers["saved"] = record.saved
    if classes is not None and classes.numel():
        whole = torch.bincount(classes.cpu())
        kept = torch.bincount(classes[record.selection.rows.to(classes.device)].cpu(), minlength=whole.numel())
        shares = cast("list[float]", (kept / whole).tolist())
        numbers |= {f"kept/{number}": share for number, share in enumerate(shares) if whole[number]}
    return numbers
