"""The table of rules: how ops and custom autograd functions act on row-sliced gradients."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

Op = Callable[..., Any]


@dataclass(slots=True)
class Rule:
    """How an op, or a custom autograd function, acts on a row-sliced gradient."""

    run: Callable[..., Any]
    family: str  # the module that declared the rule: a heading of the support matrix
    positions: bool = False  # whether the rule also takes rows that are positions in several dimensions
    fills_zeros: bool = False  # whether the rule also takes zeros as the tensor written to
    apart: bool = False  # whether the rule takes operands that hold different rows


RULES: dict[Op, Rule] = {}  # the rule of each aten op
FUNCTION_RULES: weakref.WeakKeyDictionary[Any, Rule] = weakref.WeakKeyDictionary()
"""Of classes of autograd.Function, and of ops of torch.library, each of which has such a class of torch's making."""
_NAMED: dict[str, Rule] = {}
_KINDS: list[tuple[Callable[[type], bool], Rule]] = []


def rule(
    *keys: str, maybe: tuple[str, ...] = (), fills_zeros: bool = False, positions: bool = False, apart: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how aten ops act on a sliced gradient.

    A rule is called as ``rule(op, *args, **kwargs)``. A row-sliced argument is a ``RowSlice``, all of the same rows;
    the others are as autograd passed them. The rule returns the op's result, with a ``RowSlice`` for each result that
    keeps its rows, or a ``Densify`` with a reason.

    Args:
        *keys: Ops as ``"mm"`` (its default overload) or ``"sum.dim_IntList"``; an op of higher order by its name.
        maybe: Further keys that some supported torch versions lack.
        positions: See :class:`Rule`, as for the other two.
        fills_zeros: Else the op runs at full size there.
        apart: For other rules, operands that hold different rows are put on one set.

    Raises:
        ValueError: A key is malformed, names no op, or has a rule already.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        for key in (*keys, *maybe):
            op = resolve(key)
            if op is None:
                if key in maybe:
                    continue
                raise ValueError(f"{key!r} is no aten op; a key is like 'mm' or 'sum.dim_IntList'.")
            if op in RULES:
                raise ValueError(f"{key!r} has a rule already, in {RULES[op].family}; an op has one rule.")
            RULES[op] = Rule(function, _family(function), positions, fills_zeros, apart)
        return function

    return declare


def function_rule(
    which: type | str | Callable[[type], bool], *, positions: bool = False, apart: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare how the backward of a Python ``torch.autograd.Function`` acts on row-sliced gradients.

    A rule is called as ``rule(node, backward, *grads)``, and only where a gradient is sliced. ``node`` is the ``ctx``
    of the function's backward, which ``backward(*plain_grads)`` runs. ``grads`` are the gradients of the forward's
    outputs, None where undefined; rows and results are as for :func:`rule`. ``which`` is the function's class (a
    subclass has a rule of its own); the class's full name, module and all, if its library shall not be imported for the
    rule; or, for classes made on the fly, a test that is given a class. A second rule for a class is a ValueError.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        declared = Rule(function, _family(function), positions, apart=apart)
        if not isinstance(which, (str, type)):
            _KINDS.append((which, declared))
            return function
        table: Any = _NAMED if isinstance(which, str) else FUNCTION_RULES
        if which in table:
            raise ValueError(f"{getattr(which, '__qualname__', which)} has a rule already; a function has one rule.")
        table[which] = declared
        return function

    return declare


FUNCTION_MODULES = [f"{__package__}.{name}" for name in ("libraries", "kernels", "linear_attention")]
"""The modules that declare rules of other packages' functions."""


def rule_of_function(function: type) -> Rule | None:
    """The rule of a custom ``autograd.Function`` class, if it has one."""
    found = FUNCTION_RULES.get(function)
    if found is None:
        for name in FUNCTION_MODULES:  # only here: most models have no custom function
            import_module(name)
        found = _NAMED.get(full_name(function))
        op = op_of(function)
        found = found or (None if op is None else FUNCTION_RULES.get(op))
        found = found or next((rule for is_for, rule in _KINDS if is_for(function)), None)
        if found is not None:
            FUNCTION_RULES[function] = found
    return found


def full_name(function: type) -> str:
    """The name of a class, module and all."""
    return f"{function.__module__}.{function.__qualname__}"


def op_of(function: Any) -> Any:
    """The op of torch.library whose backward runs in this class, which torch made for it; None for another class."""
    if function.__module__ != "torch._library.autograd":
        return None
    held = inspect.getclosurevars(function.forward).nonlocals
    while "orig_forward" in held:  # of an op that takes or returns lists of tensors
        held = inspect.getclosurevars(held["orig_forward"]).nonlocals
    return held.get("op")


def op_name(op: Op) -> str:
    """An aten op's name as reports and the support matrix print it: ``mm``, ``sum.dim_IntList``."""
    return str(op).removeprefix("aten.").removesuffix(".default")


def _family(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]


def resolve(key: Any) -> Op | None:
    """The op of a key, if this version of torch has it."""
    if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", key):
        raise ValueError(f"{key!r} is no key for a rule; a key is like 'mm' or 'sum.dim_IntList'.")
    name, _, overload = key.partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    return getattr(torch.ops.higher_order, name, None) if found is None and not overload else found
