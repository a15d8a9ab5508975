"""The public declaration of custom functions that treat rows alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.functions import on_kept_rows
from rowprop.backprop.rules.registry import FUNCTION_RULES, Rule
from rowprop.checks import shown
from rowprop.errors import InvalidInput

F = TypeVar("F")
_LEFT_OUT: Any = ...  # so that what is left out is refused in our sentence
Declared = int | None | Sequence[int | None]


def rowwise(
    *bare: NoReturn, saved: Declared = _LEFT_OUT, grads: Declared = _LEFT_OUT, outputs: Declared = _LEFT_OUT
) -> Callable[[F], F]:
    """Declare that a custom ``torch.autograd.Function`` treats every row by itself, so its backward may run on K rows.

    An op of ``torch.library`` (``custom_op``, ``triton_op``) whose backward is registered in Python is declared the
    same way: ``rowwise(saved=0, grads=0)(op)``.

    With no dimensions given, ``rowwise()(Function)``, they are inferred: in the first backward of each shape, trials
    compare the function's backward on some rows with the dense one, on random gradients and on those of this backward.
    Where they differ, the backward of this shape runs at full size, and a warning says which gradient differs. Trials
    are no proof, and refuse some functions that treat rows alike; see the line in the report of :func:`rowprop.watch`.

    Any other custom backward gets the gradient of all N rows. A function is row by row if entry ``i`` of its outputs
    along a dimension depends only on entry ``i`` of its inputs, and on tensors that all rows share, such as weights.
    Its ``backward`` is called as ever, but with the gradients and ``ctx.saved_tensors`` of the K kept rows: plain
    contiguous tensors, fit for Triton or numpy. A row that is picked twice has its whole gradient in one place and zero
    in the other. Gradients per row that it returns are taken as those of the kept rows; sums over rows, such as a
    weight's gradient, are taken as they are.

    Args:
        bare: Nothing: the dimensions are given by name, or inferred if none is given.
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
        A copy of the K rows of each gradient, and of each saved tensor that is read. Where dimensions are inferred, the
        first backward of each shape runs the function's backward about seven times at full size, and the host waits for
        the device.

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
    infers = all(dims is _LEFT_OUT for dims in given.values())
    if bare or (not infers and (saved is _LEFT_OUT or grads is _LEFT_OUT)):
        needed = "rowwise needs saved and grads by name, the dimensions that the rows lie in, or nothing to infer them"
        raise InvalidInput(f"{needed}; write rowwise(saved=0, grads=0)({shown(bare[0]) if bare else '...'}).")
    given["outputs"] = 0 if outputs is _LEFT_OUT else outputs
    where = {} if infers else {name: _checked(name, dims) for name, dims in given.items()}

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
        if op is not None and isinstance(dims.get("grads"), tuple):
            dims["grads"] = (*dims["grads"], ...)  # for arguments of torch's own
        known: dict[Any, dict[str, Any] | str] = {}

        def rule(node: Any, backward: Any, *gradients: RowSlice | Tensor | None) -> Any:
            # The backward may clip or normalise, so it gets rows that repeat as one. It may write to them, so they are
            # its own: below a flip, which moves rows and copies none, others hold the same values.
            given = [g.like(g.merged().values.clone()) if type(g) is RowSlice else g for g in gradients]
            found = dims or _inferred(node, given, known)
            return Densify(found) if isinstance(found, str) else on_kept_rows(node, given, **found)

        FUNCTION_RULES[key] = Rule(rule, "functions")
        return function

    return declare


def _inferred(node: Any, gradients: Sequence[Any], known: dict[Any, dict[str, Any] | str]) -> dict[str, Any] | str:
    """Where the rows lie, by trials in the first backward of each shape; else the reason, with a warning."""
    from rowprop.backprop.rules.inference import Unknown, infer  # only here: few backwards need it

    hooked = any(held.unpack_hook is not None for held in node._raw_saved_tensors)
    saved = [] if hooked else [None if t is None else (t.shape, t.dtype) for t in node.saved_tensors]
    given = [(g.shape, g.layout) if type(g) is RowSlice else None for g in gradients]
    metas = [(tuple(meta.shape), meta.dtype, meta.device) for meta in node._input_metadata]
    key: Any = (hooked, *saved, *given, *metas, node.needs_input_grad)
    if key not in known:
        try:
            known[key] = infer(node, gradients)
        except Unknown as why:
            known[key] = str(why)
            warnings.warn(
                f"{node._forward_cls.__name__}, declared by rowwise(), runs at full size: {why}", stacklevel=2
            )
    return known[key]


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
