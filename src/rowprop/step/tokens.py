"""Tokens as the rows of a step: losses of any shape, flattened to the entries that count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.checks import check_numbers
from rowprop.engines.base import Unit
from rowprop.engines.clock import mark
from rowprop.errors import InvalidInput
from rowprop.host import readable
from rowprop.scoring.losses import described, per_token
from rowprop.selection.base import Context, Selection, unread


class Tokens:
    """The tokens of one call: they become a batch of rows, and what was selected among these becomes tokens again.

    A mask on a device is on its way to the host from the begin of the call, so that the host waits for the step before,
    and not for this step's forward.

    Args:
        counted: Which tokens count, bool, of the shape of the losses. Default None: all.

    Raises:
        InvalidInput: ``counted`` is no such mask, or its numbers cannot be read.
    """

    def __init__(self, counted: Tensor | None) -> None:
        self._counted = counted
        self._shape: torch.Size | None = None  # of the losses
        self._on_host: Tensor | None = None  # the places of the tokens that count, among all; None where all count
        self._places: Tensor | None = None  # the same on the device of the losses
        if counted is None:
            return
        check_numbers("a call", "counted", counted, "a bool mask of the shape of the losses was needed.")
        if counted.dtype != torch.bool or not readable(counted):
            raise InvalidInput(
                f"counted came as {described(counted)} but a bool mask of the shape of the losses was needed, whose "
                "values can be read; `labels[:, 1:] != -100` is one."
            )
        self._counted = counted.to("cpu", non_blocking=True)
        self._arrived = mark(counted.device)

    def flat(self, name: str, returned: object, *, noun: str = "a tensor") -> Tensor:
        """The numbers that the function ``name`` returned, one per token, flattened."""
        values = per_token(name, returned, noun=noun)
        if self._shape is None and self._counted is not None and self._counted.shape != values.shape:
            raise InvalidInput(
                f"counted came with the shape {tuple(self._counted.shape)} but {name} returned {described(values)}, "
                "and a flag for each of them was needed; shift and cut the mask as the labels are."
            )
        if self._shape not in (None, values.shape):
            raise InvalidInput(
                f"{name} returned {described(values, noun)} but one number per token was needed, of the shape "
                f"{tuple(self._shape or ())} that the other numbers of this call have."
            )
        self._shape = values.shape
        return values.flatten()

    def counting(self, device: torch.device) -> Tensor | None:
        """The places of the tokens that count, shape ``(N,)``, among the flattened ones; None where all count."""
        if self._counted is not None:
            if not isinstance(self._arrived, float):
                self._arrived.synchronize()
            places = self._counted.flatten().nonzero().squeeze(1)
            if places.numel() < self._counted.numel():
                self._on_host, self._places = places, places.to(device, non_blocking=True)
        return self._places

    def context(self, context: Context) -> Context:
        """The context of the tokens that count, from the context of the batch's rows."""
        if not context.columns:
            return context
        shape = self._shape or torch.Size()
        for name, values in context.columns.items():
            if values.shape != shape[:1]:
                raise InvalidInput(
                    f"{name} came as {described(values)} beside losses of shape {tuple(shape)} but int64 of shape "
                    f"({shape[0]},), one for the tokens of each row, was needed."
                )
        size = shape[1:].numel()
        columns = {name: values.repeat_interleave(size) for name, values in context.columns.items()}
        if context.ids is not None:
            columns["positions"] = torch.arange(size, device=context.ids.device).repeat(shape[0])
        if self._on_host is not None:
            columns = {
                name: values[self._on_host.to(values.device, non_blocking=True)] for name, values in columns.items()
            }
        return replace(context, **cast("Any", columns))

    def placed(self, selection: Selection) -> Selection:
        """A selection among the tokens that count as one among all tokens, flattened.

        Where it is ``unbiased`` it stays so for the mean over the tokens that count.
        """
        if self._places is None:
            return selection
        total = (self._shape or torch.Size()).numel()
        even, unbiased = selection.even, selection.unbiased
        return unread(self._places[selection.rows], selection.weights, total, even=even, unbiased=unbiased)


def tokens_of(counted: Tensor | None, unit: Unit) -> Tokens | None:
    """The tokens of a call; None where rows are whole."""
    if unit == "token":
        return Tokens(counted)
    if counted is not None:
        raise InvalidInput("a call got counted but the step selects among rows; unit='token' was needed.")
    return None
