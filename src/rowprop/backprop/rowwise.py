"""rowwise(): how a custom autograd function says that it treats every row alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rowprop.backprop.rules.functions import on_kept_rows
from rowprop.backprop.rules.registry import FUNCTION_RULES, function_rule
from rowprop.backprop.sliced import RowSlice
from rowprop.errors import InvalidInput

Dims = int | None | Sequence[int | None]
F = TypeVar("F", bound=type[torch.autograd.Function])


def rowwise(*, saved: Dims, grads: Dims, outputs: Dims = 0) -> Callable[[F], F]:
    """Declare that a custom ``torch.autograd.Function`` treats every row by itself, so its backward may run on K rows.

    Any other custom backward gets the gradient of all N rows. A function is row by row if entry ``i`` of its outputs
    along a dimension depends only on entry ``i`` of its inputs, and on tensors that all rows share, such as weights.
    Its ``backward`` is called as ever, but with the gradients and ``ctx.saved_tensors`` of the K kept rows: plain
    contiguous tensors, fit for Triton or numpy. Gradients per row that it returns are taken as those of the kept rows;
    sums over rows, such as a weight's gradient, are taken as they are.

    Args:
        saved: For each of ``ctx.saved_tensors`` the dimension that the rows lie in; None for a tensor without rows. One
            number stands for all. If the rows of the outputs lie in dimension 0, a saved tensor may have several
            consecutive entries per row: ``(N, T, D)`` saved as ``(N * T, D)``.
        grads: The same for each gradient that ``backward`` returns, one per argument of ``forward``; None also for an
            argument that is no tensor.
        outputs: The same for each output of ``forward``. Default: 0.

    Returns:
        A decorator that returns the class itself. A subclass has to declare for itself.

    Raises:
        InvalidInput: The decorated object is no autograd function with a backward, or is declared already; a dimension
            is not an integer of 0 or more.

    Note:
        A wrong declaration gives wrong gradients. The backward runs at full size, and :func:`rowprop.watch` says why,
        if sizes differ from the declared ones, if rows travel in another dimension, if only some of the gradients are
        sliced, or if a tensor is kept as an attribute of ``ctx`` (use ``save_for_backward``). Other attributes of
        ``ctx`` pass unchanged: a number of rows among them is N, so read sizes off the tensors.

    Cost:
        A copy of the K rows of each saved tensor that is read.

    Example:
        >>> @rowprop.rowwise(saved=(0, None), grads=(0, None))
        ... class Linear(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, weight):
        ...         ctx.save_for_backward(x, weight)
        ...         return x @ weight
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, weight = ctx.saved_tensors
        ...         return grad @ weight.T, x.T @ grad
        >>> weight = torch.ones(2, 1, requires_grad=True)
        >>> losses = Linear.apply(torch.arange(6.0).reshape(3, 2), weight).sum(1)
        >>> with rowprop.watch() as report:
        ...     rowprop.pick(losses, torch.tensor([0, 2])).sum().backward()
        >>> weight.grad.tolist(), report.sliced["Linear"], report.densified
        ([[4.0], [6.0]], 1, {})
    """
    given = {"saved": saved, "grads": grads, "outputs": outputs}
    where = {name: _checked(name, dims) for name, dims in given.items()}

    def rule(node: Any, backward: Any, *gradients: RowSlice | Tensor | None) -> Any:
        return on_kept_rows(node, gradients, **where)

    def declare(function: F) -> F:
        if not _has_backward(function):
            raise InvalidInput(
                f"rowwise decorates {function!r} but a subclass of torch.autograd.Function with a backward was needed."
            )
        if function in FUNCTION_RULES:
            raise InvalidInput(f"{function.__qualname__} is declared row by row twice; keep one declaration.")
        function_rule(function)(rule)
        return function

    return declare


def _has_backward(function: Any) -> bool:
    base: Any = torch.autograd.Function
    if not (isinstance(function, type) and issubclass(function, base)):
        return False
    own = cast(Any, function)
    return own.backward is not base.backward or own.vjp is not base.vjp


def _checked(name: str, dims: Any) -> int | tuple[int | None, ...] | None:
    several = isinstance(dims, (list, tuple))
    every = tuple(cast("Sequence[Any]", dims)) if several else (dims,)
    if not all(d is None or (isinstance(d, int) and not isinstance(d, bool) and d >= 0) for d in every):
        raise InvalidInput(
            f"{name} is {dims!r} but a dimension of 0 or more was needed, None where a tensor has no rows, or a tuple "
            "of those, one for each tensor."
        )
    return every if several else every[0]
