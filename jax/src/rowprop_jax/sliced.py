"""A backward of K rows from a forward of N: the residuals' rows go into the backward that JAX makes for K rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from rowprop_jax import rules as _the_table  # noqa: F401
from rowprop_jax.errors import InvalidInput, UnsupportedOperation
from rowprop_jax.facts import WHOLE, Mixes, Rows, Value, rows_of
from rowprop_jax.walk import walk

Tree = Any
"""Any pytree of arrays."""


def vjp(
    losses_fn: Callable[..., Any], params: Tree, batch: Tree, *args: Any, has_aux: bool = False
) -> tuple[Any, ...]:
    """Losses of all N rows, and a function for the gradient of some rows, which costs what these rows cost.

    As :func:`jax.vjp`, with rows in place of a whole cotangent. The gradient is that of ``losses[rows]``, weighted: the
    forward runs once, for all rows, and its own dropout masks, statistics and choices count. Call it inside
    :func:`jax.jit`, where all tracing is done once for a number of rows K.

    Args:
        losses_fn: ``(params, batch, *args)`` to losses ``(N,)``, or any array ``(N, ...)``, as :func:`jax.jit` takes it.
        params: A pytree of floating arrays, to be differentiated.
        batch: A pytree of arrays ``(N, ...)``. What has no row for each loss, as a dropout key, belongs into ``args``.
        *args: Passed on to ``losses_fn`` as they are, and not differentiated.
        has_aux: Whether ``losses_fn`` returns ``(losses, aux)``. ``aux`` is that of the forward of all rows.

    Returns:
        ``(losses, pullback)``, and ``aux`` behind them if ``has_aux``. ``pullback(rows, weights)`` takes integers
        ``(K,)`` in [0, N) and as many weights ``(K,)``, or cotangents ``(K, ...)``, and returns the gradient of
        ``sum(weights * losses[rows])``, a pytree like ``params``.

    Raises:
        InvalidInput: No batch, no losses ``(N, ...)``, or rows and weights of other shapes.
        UnsupportedOperation: From ``pullback``: rows mix in the backward, or a primitive on their way has no rule. The
            sentence names it and the line of your program. Nothing is returned instead.

    Cost:
        The forward of all rows, a copy of K rows of what it saves, and the backward of K; 2 rows where K is 1. Memory
        of all rows' residuals. With K >= N the plain backward of all rows.

    Example:
        >>> losses, pullback = vjp(lambda w, x: jnp.square(x @ w), jnp.ones(3), jnp.arange(12.0).reshape(4, 3))
        >>> pullback(jnp.array([1]), jnp.array([1.0])).tolist()
        [72.0, 96.0, 120.0]
    """
    num_rows = _num_rows(batch)
    forward = _trace(losses_fn, params, batch, args, has_aux)
    if jnp.shape(forward.losses)[:1] != (num_rows,):
        raise InvalidInput(
            f"losses_fn returned the shape {jnp.shape(forward.losses)} but one loss for each of the batch's {num_rows} "
            f"rows was needed, shape ({num_rows},); take no mean over the rows."
        )
    results = jaxpr_as_fun(forward.program)(*jax.tree.leaves((params, batch, args)))
    losses, residuals, aux = jax.tree.unflatten(jax.tree.structure(tuple(forward[1:])), results)

    def pullback(rows: Any, weights: Any) -> Tree:
        rows, weights = jnp.asarray(rows), jnp.asarray(weights, losses.dtype)
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer) or weights.shape != rows.shape + losses.shape[1:]:
            raise InvalidInput(
                f"pullback got rows {rows.dtype}{list(rows.shape)} and weights {list(weights.shape)} but integers (K,) "
                f"and weights (K, *{losses.shape[1:]}) were needed."
            )
        if len(rows) == 0:
            return jax.tree.map(jnp.zeros_like, params)
        if max(len(rows), 2) >= num_rows:
            return residuals(jnp.zeros_like(losses).at[rows].add(weights))[0]
        if len(rows) == 1:  # JAX writes other programs for arrays of size 1, which broadcast
            rows, weights = jnp.repeat(rows, 2), jnp.concatenate([weights, jnp.zeros_like(weights)])
        small = jax.eval_shape(lambda batch: jax.tree.map(lambda leaf: leaf[: len(rows)], batch), batch)
        twin = _trace(losses_fn, params, small, args, has_aux)
        counts = len(jax.tree.leaves(params)), len(jax.tree.leaves(batch))
        backward, facts = _prove(forward, twin, (num_rows, len(rows)), *counts)
        kept = [_take(leaf, value, rows, num_rows) for leaf, value in zip(jax.tree.leaves(residuals), facts, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), jaxpr_as_fun(backward)(*kept, weights))

    return (losses, pullback, aux) if has_aux else (losses, pullback)


class _Forward(NamedTuple):
    """A forward as a program of arrays, and the shapes of what it returns."""

    program: Any
    losses: Any
    residuals: Any  # JAX's VJP, a pytree whose leaves are what the forward saves
    aux: Any


def _num_rows(batch: Tree) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or shapes[0] == ():
        raise InvalidInput(
            f"batch holds arrays of the shapes {shapes} but N rows in each were needed; what has no rows belongs into "
            f"further arguments of losses_fn."
        )
    return shapes[0][0]


def _trace(losses_fn: Callable[..., Any], params: Tree, batch: Tree, args: Any, has_aux: bool) -> _Forward:
    def forward(params: Tree, batch: Tree, args: Any) -> Any:
        found = jax.vjp(lambda params: losses_fn(params, batch, *args), params, has_aux=has_aux)
        return found if has_aux else (*found, None)

    program, shapes = jax.make_jaxpr(forward, return_shape=True)(params, batch, args)
    return _Forward(program, *shapes)


def _prove(forward: _Forward, twin: _Forward, sizes: tuple[int, int], params: int, batch: int) -> tuple[Any, list[Value]]:
    """The backward of K rows, and where the rows of each residual lie, once its gradient is shown to be the right one.

    Only the backward has to keep rows apart, whatever the residuals hold: it is linear, so a row that is not kept adds
    nothing to a sum over rows, and the rest is the same program on K rows. The forward just tells which axis of a
    residual to slice, and any axis that the proof accepts is a right one.
    """
    programs = [jax.make_jaxpr(lambda vjp, losses: vjp(losses)[0])(f.residuals, f.losses) for f in (forward, twin)]
    inputs = forward.program.jaxpr.invars
    ins = [Value(Rows(0)) if params <= at < params + batch else Value() for at in range(len(inputs))]
    leaves, leaves_k = jax.tree.leaves(forward.residuals), jax.tree.leaves(twin.residuals)
    told, facts = [Value()] * len(leaves), list[Value]()
    try:
        with suppress(Mixes):  # the forward may mix rows
            told = walk(forward.program, twin.program, ins, sizes)[1:]
        if [leaf.dtype for leaf in leaves] != [leaf.dtype for leaf in leaves_k]:
            raise Mixes(f"losses_fn is another program with {sizes[0]} rows than with {sizes[1]}")
        for leaf, leaf_k, value in zip(leaves, leaves_k, told, strict=False):
            try:
                rows = rows_of(leaf.shape, leaf_k.shape, sizes)
            except Mixes as mixes:
                raise Mixes(value.why or str(mixes).format("what the forward saves")) from None
            found = rows and value.rows and rows.axis == value.rows.axis and value.rows.outer
            facts.append(Value(value.rows if found else rows, number=None if value.why else value.number))
        grads = walk(*programs, [*facts, Value(Rows(0), zero=True)], sizes)
        why = next(filter(None, (value.why for value in grads)), None)
    except Mixes as mixes:
        why = str(mixes)
    if why:
        raise UnsupportedOperation(
            f"Rows mix in the backward, or nothing shows that they do not: {why}. Use jax.grad on losses[rows]; a second "
            f"forward on batch[rows] costs less, and has another gradient."
        )
    return programs[1], facts


def _take(leaf: Any, value: Value, rows: Any, num_rows: int) -> Any:
    """K rows of a residual, or all of it where it has none."""
    if value.rows is None:
        return leaf
    axis, outer, shape = value.rows.axis, value.rows.outer or 1, leaf.shape
    apart = leaf.reshape(*shape[:axis], outer, num_rows, -1, *shape[axis + 1 :]) if shape[axis] != num_rows else leaf
    place = axis + (shape[axis] != num_rows)
    kept = apart.at[(slice(None),) * place + (rows,)].get(mode="clip").reshape(*shape[:axis], -1, *shape[axis + 1 :])
    if value.number is None:
        return kept
    own = jax.lax.broadcasted_iota(kept.dtype, kept.shape, axis)
    return own if value.number == WHOLE else kept.at[..., value.number].set(own[..., value.number])


def skip_zeros(pullback: Callable[[Any, Any], Tree], cotangent: Any, *, capacity: int) -> tuple[Tree, Any]:
    """The gradient of a whole cotangent, at the cost of its rows that are not zero.

    Exact where at most ``capacity`` rows are not zero, as with masked rows, answers without advantage and satisfied
    hinges. JAX wants to know K beforehand, so it is given, and what did not fit is counted.

    Args:
        pullback: That of :func:`vjp`.
        cotangent: ``(N, ...)``, of the shape of the losses or outputs that :func:`vjp` returned.
        capacity: How many rows the backward takes, at most N: those of the largest absolute cotangents.

    Returns:
        ``(gradient, overflow)``: the number of rows, int32, that are not zero and were left out.

    Example:
        >>> losses, pullback = vjp(lambda w, x: jnp.square(x @ w), jnp.ones(2), jnp.ones((4, 2)))
        >>> gradient, overflow = skip_zeros(pullback, jnp.array([0.0, 1.0, 0.0, 0.0]), capacity=2)
        >>> gradient.tolist(), int(overflow)
        ([4.0, 4.0], 0)
    """
    size = jnp.abs(cotangent).reshape(len(cotangent), -1).max(1)
    rows = jax.lax.top_k(size, min(capacity, len(size)))[1]
    return pullback(rows, cotangent[rows]), jnp.maximum(jnp.count_nonzero(size) - capacity, 0)
