"""The step: choose rows by the losses of all, and take their gradient; and the check of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rowprop_jax.facts import InvalidInput, UnsupportedOperation
from rowprop_jax.sliced import Tree, vjp

Select = Callable[[Any, Any, int], tuple[Any, Any]]
"""``(losses, key, num_kept)`` to ``(rows, weights)``, both ``(num_kept,)``."""
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


class Record(NamedTuple):
    """What a step did: ``losses`` of all rows ``(N,)``, the kept ``rows`` and ``weights`` ``(K,)``, ``aux``."""

    losses: Any
    rows: Any
    weights: Any
    aux: Any = None


def top_k(losses: Any, key: Any, num_kept: int) -> tuple[Any, Any]:
    """The rows with the largest losses (OHEM), each with the weight 1/K: biased, on purpose. ``key`` is unused."""
    return jax.lax.top_k(losses, num_kept)[1], jnp.full(num_kept, 1 / num_kept, losses.dtype)


def uniform(losses: Any, key: Any, num_kept: int) -> tuple[Any, Any]:
    """Rows at random without repeats, each with the weight 1/K: unbiased, and the control of every other selection."""
    if key is None:
        raise InvalidInput("uniform got no key but one was needed; call the step with key=jax.random.key(...).")
    rows = jax.random.choice(key, len(losses), (num_kept,), replace=False)
    return rows, jnp.full(num_kept, 1 / num_kept, losses.dtype)


def value_and_grad(
    losses_fn: Callable[..., Any], select: Select, *, keep: float, has_aux: bool = False
) -> Callable[..., tuple[Record, Tree]]:
    """A function that runs a batch forward once, chooses rows by their losses, and pays the backward of these alone.

    As :func:`jax.value_and_grad`, with losses of all rows for the value. Call it inside :func:`jax.jit`: K is fixed by
    the batch size, so other rows compile nothing anew.

    Args:
        losses_fn: ``(params, batch, *args)`` to losses ``(N,)``; ``(losses, aux)`` if ``has_aux``. See :func:`vjp`.
        select: ``(losses, key, num_kept)`` to ``(rows, weights)``, both ``(num_kept,)``, as :func:`top_k` and
            :func:`uniform`. The losses are without gradient.
        keep: Fraction of rows kept, in (0, 1]; K = max(1, ceil(keep * N)).
        has_aux: Whether ``losses_fn`` returns a pair. Default False.

    Returns:
        ``step(params, batch, *args, key=None)`` to ``(record, gradient)``: a :class:`Record`, and the gradient of
        ``sum(weights * losses[rows])``. ``key`` goes to ``select``.

    Raises:
        InvalidInput: ``keep`` is outside (0, 1]; from the step, losses that are not ``(N,)``.
        UnsupportedOperation: From the step, where rows mix in the backward; see :func:`vjp`.

    Example:
        >>> step = value_and_grad(lambda w, x: jnp.square(x @ w), top_k, keep=0.25)
        >>> record, gradient = jax.jit(step)(jnp.ones(3), jnp.arange(12.0).reshape(4, 3))
        >>> record.rows.tolist(), gradient.tolist()
        ([3], [540.0, 600.0, 660.0])
    """
    if not 0 < keep <= 1:
        raise InvalidInput(f"value_and_grad got keep={keep!r} but a fraction in (0, 1] was needed.")

    def step(params: Tree, batch: Tree, *args: Any, key: Any = None) -> tuple[Record, Tree]:
        losses, pullback, *aux = vjp(losses_fn, params, batch, *args, has_aux=has_aux)
        if losses.ndim != 1:
            raise InvalidInput(
                f"losses_fn returned the shape {losses.shape} but one loss per row was needed, shape (N,)."
            )
        num_kept = max(1, math.ceil(keep * len(losses) - 1e-9))
        rows, weights = select(jax.lax.stop_gradient(losses), key, num_kept)
        return Record(losses, rows, weights, *aux), pullback(rows, weights)

    return step


class Verification(NamedTuple):
    """Whether the sliced gradient is that of plain indexing: ``"exact"``, ``"differs"`` or ``"refused"``, and why.

    ``error`` is the largest difference over the largest element of a leaf's gradient; of leaves whose gradient is next
    to nothing, over 1/100 of the largest of all.
    """

    status: str
    error: float
    tolerance: float
    why: str

    @property
    def agrees(self) -> bool:
        """Whether the gradients are equal, to rounding."""
        return self.status == "exact"


def verify(losses_fn: Callable[..., Any], params: Tree, batch: Tree, rows: Any, *args: Any) -> Verification:
    """Check the gradient of ``losses[rows].mean()`` against that of :func:`jax.grad`, on your own model and batch.

    Args:
        losses_fn: See :func:`vjp`; without aux.
        params: The parameters, drawn at random: at zeros any two gradients agree.
        batch: The whole batch, N rows.
        rows: Rows to keep, integers ``(K,)``.
        *args: Further arguments of ``losses_fn``, a dropout key for one.

    Returns:
        A :class:`Verification`. The tolerance is 1e-10 in float64, 1e-5 in float32, 1e-2 in float16, 5e-2 in bfloat16,
        by the coarsest dtype of the parameters and the losses.
    """
    rows = jnp.asarray(rows)

    def sliced(params: Tree) -> Tree:
        losses, pullback = vjp(losses_fn, params, batch, *args)
        return pullback(rows, jnp.full(len(rows), 1 / len(rows), losses.dtype))

    wanted = jax.jit(jax.grad(lambda params: losses_fn(params, batch, *args)[rows].mean()))(params)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(wanted)} & TOLERANCES.keys()
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    try:
        found = jax.jit(sliced)(params)
    except UnsupportedOperation as refused:
        return Verification("refused", math.nan, tolerance, str(refused))
    pairs = [(a.astype(float), b.astype(float)) for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)]
    floor = max(float(jnp.abs(b).max(initial=0)) for _, b in pairs) / 100 or 1.0
    error = max(
        float((jnp.abs(a - b) / jnp.maximum(jnp.abs(b).max(initial=0), floor)).max(initial=0)) for a, b in pairs
    )
    status = "exact" if error <= tolerance else "differs"
    return Verification(status, error, tolerance, f"the largest error is {error:.1e}, and {tolerance:.0e} is allowed")
