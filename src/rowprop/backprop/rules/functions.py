"""Custom autograd functions and ops that treat rows alike: their own backward runs on the kept rows.

A function is declared by the dimensions that the rows lie in, by :func:`rowwise` or by a rule. Where a declaration does
not fit the tensors that are there, the backward runs at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.backprop.rules.registry import FUNCTION_RULES, Rule, function_rule
from rowprop.backprop.sliced import Densify, NeedsAllRows, RowSlice, gather
from rowprop.checks import shown
from rowprop.errors import InvalidInput

F = TypeVar("F")
_LEFT_OUT: Any = ...  # so that what is left out is refused in our sentence
Declared = int | None | Sequence[int | None]
Dims = int | None | tuple[int | EllipsisType | None, ...]
"""For each of several tensors the dimension that the rows lie in, None for a tensor without rows; or one for all.
``...`` at the end stands for any number of None: versions of a library differ in their numbers of arguments."""


class NodeWith:
    """A node as the ``ctx`` of its function's backward, with some attributes replaced."""

    def __init__(self, node: Any, **replaced: Any) -> None:
        self._node = node
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def on_kept_rows(
    node: Any, gradients: Sequence[Any], *, saved: Dims, grads: Dims, outputs: Dims = 0, **replaced: Any
) -> tuple[Any, ...]:
    """Run a function's own backward on the kept rows of its gradients and of its saved tensors.

    ``saved``, ``grads`` and ``outputs`` tell where the rows lie, as for :func:`rowwise`. Raises :class:`NeedsAllRows`
    where they do not fit the tensors, or where ``node``, the backward's ``ctx``, keeps a tensor elsewhere. The backward
    sees the attributes ``replaced`` of its ``ctx`` changed.
    """
    if any(isinstance(value, Tensor) for value in cast("dict[str, Any]", vars(node)).values()):
        raise NeedsAllRows("a tensor is kept as an attribute of ctx; use save_for_backward")
    dims = _each(outputs, len(gradients), "outputs")
    g = _one_of(gradients, dims)
    rows, layout, every = g.rows, g.layout, node.saved_tensors
    kept = [
        t if d is None or t is None else gather(t, rows, _place(layout, t.shape, d, layout.size)).contiguous()
        for t, d in zip(every, _each(saved, len(every), "saved tensors"), strict=True)
    ]
    place = NodeWith(node, saved_tensors=tuple(kept), **replaced)
    returned: Any = cast(Any, type(node)).apply(place, *_values(node, gradients, dims, g))
    results = cast("tuple[Any, ...]", returned if isinstance(returned, tuple) else (returned,))
    size = layout.compact(rows.kept).size
    return tuple(
        r if d is None or not isinstance(r, Tensor) else g.like(r, _place(layout, r.shape, d, size))
        for r, d in zip(results, _each(grads, len(results), "gradients"), strict=True)
    )


def _each(dims: Dims, count: int, what: str) -> tuple[int | None, ...]:
    if not isinstance(dims, tuple):
        return (dims,) * count
    if dims and dims[-1] is ...:
        dims = dims[:-1] + (None,) * (count - len(dims) + 1)
    dims = cast("tuple[int | None, ...]", dims)
    if len(dims) != count:
        raise NeedsAllRows(f"the rule declares {len(dims)} {what} but there are {count}")
    return dims


def _one_of(gradients: Sequence[RowSlice | Tensor | None], dims: Sequence[int | None]) -> RowSlice:
    """The gradient whose layout stands for the layouts of all, which have to agree."""
    found: list[RowSlice] = []
    for g, dim in zip(gradients, dims, strict=True):
        if type(g) is RowSlice:
            if g.dim != dim:
                raise NeedsAllRows(f"the rows lie in dimension {g.dim} of an output that is declared with {dim}")
            found.append(g)
        elif g is not None:
            raise NeedsAllRows("the gradient of another output is not sliced")
    if len({g.layout.at(0) for g in found}) > 1:
        raise NeedsAllRows("the outputs hold different numbers of entries per row")
    return max(found, key=lambda g: g.dim)


def _place(layout: Layout, shape: Sequence[int], dim: int, size: int) -> Layout:
    """The layout of the rows in dimension ``dim`` of another tensor; ``size`` is the size of an output's dimension."""
    each, rest = divmod(shape[dim] if dim < len(shape) else 0, size)
    if each == 0 or rest or (each > 1 and layout.dim > 0):
        raise NeedsAllRows(f"dimension {dim} of shape {tuple(shape)} does not hold the rows")
    return replace(layout, dim=dim, inner=layout.inner * each)


def _values(node: Any, gradients: Sequence[Any], dims: Sequence[int | None], like: RowSlice) -> list[Tensor | None]:
    """The gradients of the kept rows; for an output without a gradient zeros or None, as in autograd."""
    values: list[Tensor | None] = []
    for g, dim, meta, left_out in zip(gradients, dims, node._input_metadata, node.apply.left_out, strict=True):
        if left_out:
            values.append(None)
        elif g is None:
            shape = tuple(meta.shape)
            if dim is not None and shape:  # a number has no rows
                shape = like.kept_shape(shape, _place(like.layout, shape, dim, like.layout.size))
            values.append(torch.zeros(shape, dtype=meta.dtype, device=meta.device))
        else:
            values.append(g.values.contiguous())
    return values


def rowwise(
    *bare: NoReturn, saved: Declared = _LEFT_OUT, grads: Declared = _LEFT_OUT, outputs: Declared = 0
) -> Callable[[F], F]:
    """Declare that a custom ``torch.autograd.Function`` treats every row by itself, so its backward may run on K rows.

    An op of ``torch.library`` (``custom_op``, ``triton_op``) whose backward is registered in Python is declared the
    same way: ``rowwise(saved=0, grads=0)(op)``.

    Any other custom backward gets the gradient of all N rows. A function is row by row if entry ``i`` of its outputs
    along a dimension depends only on entry ``i`` of its inputs, and on tensors that all rows share, such as weights.
    Its ``backward`` is called as ever, but with the gradients and ``ctx.saved_tensors`` of the K kept rows: plain
    contiguous tensors, fit for Triton or numpy. A row that is picked twice has its whole gradient in one place and zero
    in the other. Gradients per row that it returns are taken as those of the kept rows; sums over rows, such as a
    weight's gradient, are taken as they are.

    Args:
        bare: Nothing: the dimensions are given by name.
        saved: For each of ``ctx.saved_tensors`` the dimension that the rows lie in; None for a tensor without rows. One
            number stands for all. If the rows of the outputs lie in dimension 0, a saved tensor may have several
            consecutive entries per row: ``(N, T, D)`` saved as ``(N * T, D)``.
        grads: The same for each gradient that ``backward`` returns, one per argument of ``forward``; None also for an
            argument that is no tensor.
        outputs: The same for each output of ``forward``. Default: 0.

    Returns:
        A decorator that returns the class or the op itself. A subclass has to declare for itself.

    Raises:
        InvalidInput: The decorated object is no autograd function with a backward and no op of ``torch.library``, or
            is declared already; a dimension is left out, or is not an integer of 0 or more.

    Note:
        A wrong declaration gives wrong gradients. The backward runs at full size, and :func:`rowprop.watch` says why,
        if sizes differ from the declared ones, if rows travel in another dimension, if only some of the gradients are
        sliced, or if a tensor is kept as an attribute of ``ctx`` (use ``save_for_backward``). Other attributes of
        ``ctx`` pass unchanged: a number of rows among them is N, so read sizes off the tensors.

    Cost:
        A copy of the K rows of each gradient, and of each saved tensor that is read.

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
    if bare or saved is _LEFT_OUT or grads is _LEFT_OUT:
        needed = "rowwise needs saved and grads by name, the dimensions that the rows lie in"
        raise InvalidInput(f"{needed}; write rowwise(saved=0, grads=0)({shown(bare[0]) if bare else '...'}).")
    given = {"saved": saved, "grads": grads, "outputs": outputs}
    where = {name: _checked(name, dims) for name, dims in given.items()}

    def declare(function: F) -> F:
        base, own, op = cast("list[Any]", [torch.autograd.Function, function, _op_in(function)])
        is_function = isinstance(own, type) and issubclass(own, base)
        if op is None and (not is_function or (own.backward is base.backward and own.vjp is base.vjp)):
            needed = "a torch.autograd.Function with a backward, or an op of torch.library, was needed."
            raise InvalidInput(f"rowwise got {function!r} but {needed}")
        key = own if op is None else op
        if key in FUNCTION_RULES:
            raise InvalidInput(f"{key.__name__} is declared row by row twice; keep one declaration.")
        dims: dict[str, Any] = dict(where)
        if op is not None and isinstance(dims["grads"], tuple):
            dims["grads"] = (*dims["grads"], ...)  # for arguments of torch's own

        def rule(node: Any, backward: Any, *gradients: RowSlice | Tensor | None) -> Any:
            # The backward may clip or normalise, so it gets rows that repeat as one. It may write to them, so they are
            # its own: below a flip, which moves rows and copies none, others hold the same values.
            given = [g.like(g.merged().values.clone()) if type(g) is RowSlice else g for g in gradients]
            return on_kept_rows(node, given, **dims)

        FUNCTION_RULES[key] = Rule(rule, "functions")
        return function

    return declare


def _op_in(function: Any) -> Any:
    """The op of torch.library that a definition, a name in torch.ops or the op itself stands for; None for others."""
    ops, library = cast("Any", torch)._ops, cast("Any", torch.library)
    if isinstance(function, library.CustomOpDef):
        function = function._opoverload
    elif isinstance(function, ops.OpOverloadPacket):
        overloads = function.overloads()
        function = getattr(function, overloads[0]) if len(overloads) == 1 else None
    return function if isinstance(function, ops.OpOverload) and function.namespace not in ("aten", "prims") else None


def _checked(name: str, dims: Any) -> int | tuple[int | None, ...] | None:
    several = isinstance(dims, (list, tuple))
    every = tuple(cast("Sequence[Any]", dims)) if several else (dims,)
    if not all(d is None or (isinstance(d, int) and not isinstance(d, bool) and d >= 0) for d in every):
        raise InvalidInput(f"{name} is {dims!r} but a dimension from 0 on, None for no rows, or a tuple was needed.")
    return every if several else every[0]


@function_rule("torch.nn.modules._functions.SyncBatchNorm")
def _sync_batch_norm(node: Any, backward: Any, *grads: Any) -> Densify:
    return Densify("BatchNorm takes its statistics over the rows of all processes; eval() freezes them")
