"""Gradients of the tables' cases, with the forward inside a block: a device's mode can move the operands there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rule_cases
import token_models
import zoo

Take = Callable[[Tensor], Tensor]
Forward = AbstractContextManager[Any]
Gradients = Callable[[Forward, Take], list[Tensor | None]]


def of_rule(name: str) -> Gradients:
    """A case of the rules' table."""

    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        with forward:
            return rule_cases.run(name, take, channels_last=False)

    return gradients


def of_model(entry: zoo.Entry) -> Gradients:
    """A model of the zoo, in double precision. It is built outside of the block."""

    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        return list(zoo.backward(replace(entry, losses=partial(losses, forward)), torch.float64, take).grads.values())

    def losses(forward: Forward, model: nn.Module, batch: zoo.Batch) -> Tensor:
        with forward:
            return entry.losses(model, batch)

    return gradients


def between_tokens(name: str) -> Gradients:
    """What models do between tokens."""
    torch.manual_seed(5)
    x, w = torch.randn(40, 4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64).requires_grad_()

    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        w.grad = None
        with forward:
            take((token_models.BETWEEN[name](x @ w).tanh() @ w).square().sum(-1).flatten()).sum().backward()
        return [w.grad]

    return gradients


ROWS_BETWEEN = [1, 77, 150, 77]
"""Of the 160 tokens."""
