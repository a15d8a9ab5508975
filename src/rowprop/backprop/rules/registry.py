"""The one place where a rule is declared, with the checks that keep the table honest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from rowprop.backprop.rowgrad import FILLS_ZEROS, RULES, Densify, Op, RowSlice, Rule

HOME: dict[Op, str] = {}
"""The family (module name) each rule was declared in, for the support matrix."""


def rule(*keys: str, maybe: tuple[str, ...] = (), fills_zeros: bool = False) -> Callable[[Rule], Rule]:
    """Declare how aten ops act on a sliced gradient.

    A rule is called as ``rule(op, *args, **kwargs)`` with every row-sliced argument as
    :class:`~rowprop.backprop.rowgrad.RowSlice`, all of the same rows, and everything else as autograd passed it. It
    returns what the op returns, with ``RowSlice`` for results that keep their rows, or :class:`Densify` with a reason.

    Args:
        *keys: Ops as ``"mm"`` (its default overload) or ``"sum.dim_IntList"``.
        maybe: Further keys that some supported torch versions lack.
        fills_zeros: Whether the rule also takes a tensor of zeros to write into.

    Raises:
        ValueError: A key is malformed, names no op, or has a rule already.
    """

    def declare(function: Rule) -> Rule:
        for key in (*keys, *maybe):
            op = _resolve(key)
            if op is None:
                if key in maybe:
                    continue
                raise ValueError(f"{key!r} is no aten op; a key is like 'mm' or 'sum.dim_IntList'.")
            if op in RULES:
                raise ValueError(f"{key!r} has a rule already, in {HOME[op]}; an op has one rule.")
            RULES[op] = function
            HOME[op] = function.__module__.rpartition(".")[2]
            if fills_zeros:
                FILLS_ZEROS.add(op)
        return function

    return declare


def _resolve(key: Any) -> Op | None:
    if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", key):
        raise ValueError(f"{key!r} is no key for a rule; a key is like 'mm' or 'sum.dim_IntList'.")
    name, _, overload = key.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), overload or "default", None)


def densify(reason: str, like: RowSlice | None = None, dims: tuple[int | None, ...] = ()) -> Densify:
    """A rule's answer where the op has to run at full size, because of ``reason``.

    Args:
        reason: Why, to finish the sentence "densified: ...".
        like: A sliced operand, where rows do not mix and only the kernel needs all of them: the results go on sliced.
        dims: For each result of the op the dimension in which its rows lie; None for one that is plain.
    """
    return Densify(reason, like, dims)
