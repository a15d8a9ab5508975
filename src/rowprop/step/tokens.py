"""Tokens as the rows of a step: losses of any shape, flattened to the entries that count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.pick import Unit
from rowprop.checks import check_numbers
from rowprop.errors import InvalidInput
from rowprop.host import mark, reach, readable
from rowprop.scoring import described, per_token
from rowprop.selection import Context, Selection
from rowprop.selection.base import check_fits, unread


class Tokens:
    """The tokens of one call: flattens them to a batch of rows, and maps a selection of rows back to tokens."""

    def __init__(self, counted: Tensor | None) -> None:
        self._counted = counted
        self._shape: torch.Size | None = None  # of the losses
        self._on_host: Tensor | None = None  # indices of the tokens that count, among all; None without a mask
        self._places: Tensor | None = None  # the same on the device of the losses
        if counted is None:
            return
        needed = "a bool mask of the shape of the losses was needed, e.g. `labels[:, 1:] != -100`."
        check_numbers("a call", "counted", counted, needed)
        if counted.dtype != torch.bool or not readable(counted):
            raise InvalidInput(f"counted came as {described(counted)} but {needed}")
        self._shape = counted.shape
        self._counted = counted.to("cpu", non_blocking=True)  # now: reading it later will not sync
        self._arrived = mark(counted.device)

    def flat(self, name: str, returned: object, *, noun: str = "a tensor") -> Tensor:
        """The numbers that the function ``name`` returned, one per token, flattened."""
        values = per_token(name, returned, noun=noun)
        if self._shape not in (None, values.shape):
            needed = f"one number per token was needed, shape {tuple(self._shape or ())}, as counted or the losses have"
            raise InvalidInput(f"{name} returned {described(values, noun)} but {needed}; shift and cut all alike.")
        self._shape = values.shape
        return values.flatten()

    def counting(self, device: torch.device) -> Tensor | None:
        """The indices of the tokens that count among all, flattened, shape ``(N,)``; None without a mask."""
        if self._counted is not None:
            reach(self._arrived)
            places = self._counted.flatten().nonzero().squeeze(1)
            self._on_host, self._places = places, places.to(device, non_blocking=True)
        return self._places

    def context(self, context: Context) -> Context:
        """The context of the tokens that count, from the context of the batch's rows."""
        if not context.columns:
            return context
        shape = self._shape or torch.Size([0])
        check_fits(context, shape[0])
        size = shape[1:].numel()
        columns = {name: values.repeat_interleave(size) for name, values in context.columns.items()}
        if context.ids is not None:
            columns["positions"] = torch.arange(size, device=context.ids.device).repeat(shape[0])
        if (places := self._on_host) is not None:
            columns = {name: of[places.to(of.device, non_blocking=True)] for name, of in columns.items()}
        return replace(context, **cast("Any", columns))

    def placed(self, selection: Selection) -> Selection:
        """Convert a selection among the tokens that count into one among all tokens, flattened."""
        if self._places is None:
            return selection
        rows, total = self._places[selection.rows], (self._shape or torch.Size()).numel()
        return unread(rows, selection.weights, total, even=selection.even, unbiased=selection.unbiased)


def tokens_of(counted: Tensor | None, unit: Unit) -> Tokens | None:
    """The tokens of a call; None where rows are whole."""
    if unit == "token":
        return Tokens(counted)
    if counted is not None:
        raise InvalidInput("a call got counted but the step selects among rows; unit='token' was needed.")
    return None
