"""A backward of K rows from a forward of N: rows of what the forward saved go into JAX's own backward for K rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from rowprop_jax import rules as _rules  # noqa: F401  # pyright: ignore  # they enter themselves
from rowprop_jax.facts import WHOLE, InvalidInput, Mixes, Rows, UnsupportedOperation, Value, rows_of
from rowprop_jax.walk import walk

Tree = Any
"""A pytree of arrays."""


def vjp(losses_fn: Callable[..., Any], params: Tree, batch: Tree, *args: Any, has_aux: bool = False) -> Any:
    """The losses of all rows, and a function that returns the gradient of some rows at the cost of these.

    As :func:`jax.vjp`, with rows in the place of a whole cotangent. The forward runs once, for all rows. Call it inside
    :func:`jax.jit`: all tracing is done once per K, and other rows compile nothing anew.

    Args:
        losses_fn: ``(params, batch, *args)`` to losses ``(N,)``, or to outputs ``(N, ...)``; ``(losses, aux)`` if
            ``has_aux``. Its Python may not depend on values, as under :func:`jax.jit`.
        params: A pytree of floating arrays, which is differentiated.
        batch: A pytree of arrays ``(N, ...)``.
        *args: What has no rows, as a dropout key; not differentiated.
        has_aux: Whether ``losses_fn`` returns a pair. Default False.

    Returns:
        ``(losses, pullback)``, and ``aux`` of all rows behind them if ``has_aux``. ``pullback(rows, weights)`` takes
        integers ``(K,)`` in [-N, N) and weights ``(K,)``, or cotangents ``(K, ...)``, and returns the gradient of
        ``sum(weights * losses[rows])``, a pytree like ``params``. Rows may repeat, but not where the backward of a
        ``jax.custom_vjp`` is no linear function of its cotangent.

    Raises:
        InvalidInput: ``batch``, the losses, rows or weights have other shapes.
        UnsupportedOperation: From ``pullback`` with K < N: rows mix in the backward, or a primitive has no rule. The
            sentence names it and your line.

    Cost:
        The forward of N rows, a copy of K rows of what it saves, and the backward of K (of 2 where K is 1); the memory
        of the forward of N. With K >= N the plain backward.

    Example:
        >>> losses, pullback = vjp(lambda w, x: jnp.square(x @ w), jnp.ones(3), jnp.arange(12.0).reshape(4, 3))
        >>> pullback(jnp.array([1]), jnp.array([1.0])).tolist()
        [72.0, 96.0, 120.0]
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or shapes[0] == ():
        raise InvalidInput(
            f"batch holds arrays {shapes} but N rows in each were needed; pass what has no rows behind it."
        )
    num_rows = shapes[0][0]
    forward = _trace(losses_fn, params, batch, args, has_aux)
    if jnp.shape(forward.losses)[:1] != (num_rows,):
        raise InvalidInput(
            f"losses_fn returned the shape {jnp.shape(forward.losses)} but one loss for each of the batch's {num_rows} "
            f"rows was needed, shape ({num_rows},); take no mean over rows."
        )
    results = jaxpr_as_fun(forward.program)(*jax.tree.leaves((params, batch, args)))
    losses, residuals, aux = jax.tree.unflatten(jax.tree.structure(tuple(forward[1:])), results)

    def pullback(rows: Any, weights: Any) -> Tree:
        rows, weights = jnp.asarray(rows), jnp.asarray(weights, losses.dtype)
        wanted = rows.shape[:1] + losses.shape[1:]
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer) or weights.shape != wanted:
            raise InvalidInput(
                f"pullback got rows {rows.dtype}{list(rows.shape)} and weights {list(weights.shape)} but integers (K,) "
                f"and weights of the shape {wanted} were needed."
            )
        rows = jnp.where(rows < 0, rows + num_rows, rows)
        if len(rows) == 0 or max(len(rows), 2) >= num_rows:
            return residuals(jnp.zeros_like(losses).at[rows].add(weights))[0]
        if len(rows) == 1:  # JAX writes other programs for axes of size 1
            rows, weights = jnp.repeat(rows, 2), jnp.concatenate([weights, jnp.zeros_like(weights)])
        small = jax.eval_shape(lambda batch: jax.tree.map(lambda leaf: leaf[: len(rows)], batch), batch)
        try:
            twin = _trace(losses_fn, params, small, args, has_aux)
        except (TypeError, ValueError) as error:
            raise UnsupportedOperation(
                f"losses_fn takes {num_rows} rows and not {len(rows)} ({str(error).splitlines()[0]}); an array with a "
                f"row for each loss belongs into batch."
            ) from error
        backward, facts = _prove(forward, twin, len(jax.tree.leaves(params)), len(shapes), (num_rows, len(rows)))
        kept = [_take(*pair, rows, num_rows) for pair in zip(jax.tree.leaves(residuals), facts, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), jaxpr_as_fun(backward)(*kept, weights))

    return (losses, pullback, aux) if has_aux else (losses, pullback)


class _Forward(NamedTuple):
    """A forward as a program of arrays, and the shapes of what it returns."""

    program: Any
    losses: Any
    residuals: Any  # JAX's VJP: a pytree whose leaves are what the forward saves
    aux: Any


def _trace(losses_fn: Callable[..., Any], params: Tree, batch: Tree, args: Any, has_aux: bool) -> _Forward:
    def forward(params: Tree, batch: Tree, args: Any) -> Any:
        found = jax.vjp(lambda params: losses_fn(params, batch, *args), params, has_aux=has_aux)
        return found if has_aux else (*found, None)

    program, shapes = jax.make_jaxpr(forward, return_shape=True)(params, batch, args)
    return _Forward(program, *shapes)


def _prove(
    forward: _Forward, twin: _Forward, num_params: int, num_batch: int, sizes: tuple[int, int]
) -> tuple[Any, list[Value]]:
    """The backward of K rows, and where the rows of each residual lie, once its gradient is shown to be the right one.

    Only the backward has to keep rows apart, whatever the residuals hold: it is linear, so a row that is not kept adds
    nothing to a sum over rows, and the rest is the same program on K rows. The forward just tells which axis of a
    residual to slice, and any axis that the proof accepts is a right one.
    """
    programs = [
        jax.make_jaxpr(lambda vjp, losses: vjp(losses)[0])(each.residuals, each.losses) for each in (forward, twin)
    ]
    batch = range(num_params, num_params + num_batch)
    ins = [Value(Rows(0)) if at in batch else Value() for at in range(len(forward.program.jaxpr.invars))]
    leaves, leaves_k = jax.tree.leaves(forward.residuals), jax.tree.leaves(twin.residuals)
    facts = list[Value]()
    try:
        told = walk(forward.program, twin.program, ins, sizes)[1 : len(leaves) + 1]
    except Mixes as mixes:  # two programs, whose backwards may be one all the same
        told = [Value(why=str(mixes))] * len(leaves)
    try:
        if [(leaf.dtype, leaf.ndim) for leaf in leaves] != [(leaf.dtype, leaf.ndim) for leaf in leaves_k]:
            raise Mixes(next(filter(None, (value.why for value in told)), "the forward saves other arrays"))
        for leaf, leaf_k, value in zip(leaves, leaves_k, told, strict=True):
            try:
                rows = rows_of(leaf.shape, leaf_k.shape, sizes)
            except Mixes as mixes:
                raise Mixes(value.why or str(mixes).format("an array that the forward saves")) from None
            found = rows and value.rows and rows.axis == value.rows.axis and value.rows.outer
            facts.append(Value(value.rows if found else rows, number=None if value.why else value.number))
        grads = walk(programs[0], programs[1], [*facts, Value(Rows(0), zero=True)], sizes)
        why = next(filter(None, (value.why for value in grads)), None)
    except Mixes as mixes:
        why = str(mixes)
    if why:
        raise UnsupportedOperation(
            f"Rows mix in the backward, or nothing shows that they do not: {why}. Use jax.grad on losses[rows]; a "
            f"second forward on batch[rows] costs less, and has another gradient."
        )
    return programs[1], facts


def _take(leaf: Any, value: Value, rows: Any, num_rows: int) -> Any:
    """K rows of a residual, or all of it where it has none."""
    if value.rows is None:
        return leaf
    axis, outer, shape = value.rows.axis, value.rows.outer or 1, leaf.shape
    inner = shape[axis] // (outer * num_rows)
    apart = leaf.reshape(*shape[:axis], outer, num_rows, inner, *shape[axis + 1 :])
    kept = jnp.take(apart, rows, axis + 1, mode="clip")
    kept = kept.reshape(*shape[:axis], outer * len(rows) * inner, *shape[axis + 1 :])
    if value.number is None:
        return kept
    own = jax.lax.broadcasted_iota(kept.dtype, kept.shape, axis)
    return own if value.number == WHOLE else kept.at[..., value.number].set(own[..., value.number])


def skip_zeros(pullback: Callable[[Any, Any], Tree], cotangent: Any, *, capacity: int) -> tuple[Tree, Any]:
    """The gradient of a whole cotangent at the cost of ``capacity`` rows: exact if no more of its rows are not zero.

    For masked rows, answers without advantage, satisfied hinges. JAX fixes shapes beforehand, so K is given, and what
    did not fit is counted.

    Args:
        pullback: That of :func:`vjp`.
        cotangent: ``(N, ...)``, as the losses or outputs that :func:`vjp` returned.
        capacity: How many rows the backward takes, those of the largest absolute cotangents; at most N count.

    Returns:
        ``(gradient, overflow)``: how many rows, int32, are not zero and were left out.

    Example:
        >>> losses, pullback = vjp(lambda w, x: jnp.square(x @ w), jnp.ones(2), jnp.ones((4, 2)))
        >>> gradient, overflow = skip_zeros(pullback, jnp.array([0.0, 1.0, 0.0, 0.0]), capacity=2)
        >>> gradient.tolist(), int(overflow)
        ([4.0, 4.0], 0)
    """
    size = jnp.abs(cotangent).reshape(len(cotangent), -1).max(1)
    rows = jax.lax.top_k(size, min(capacity, len(size)))[1]
    return pullback(rows, cotangent[rows]), jnp.maximum(jnp.count_nonzero(size) - capacity, 0)
