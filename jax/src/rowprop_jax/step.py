"""The step: choose rows by the losses of all, and take their gradient; and the check of it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rowprop_jax.sliced import InvalidInput, Tree, UnsupportedOperation, vjp


class Record(NamedTuple):
    """What a step did."""

    losses: Any  # of all rows, (N,)
    rows: Any  # the kept ones, (K,)
    weights: Any  # (K,)
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
    losses_fn: Callable[..., Any], select: Callable[..., Any], *, keep: float, has_aux: bool = False
) -> Callable[..., tuple[Record, Tree]]:
    """A function that runs a batch forward once, chooses rows by their losses, and pays the backward of these alone.

    It is ``step(params, batch, *args, key=None)`` to ``(record, gradient)``: a :class:`Record`, and the gradient of
    ``sum(weights * losses[rows])``, by :func:`vjp`. ``select(losses, key, num_kept)`` returns ``(rows, weights)``, both
    ``(num_kept,)``, as :func:`top_k` and :func:`uniform`; K = max(1, ceil(keep * N)), with ``keep`` in (0, 1].

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
            raise InvalidInput(f"losses_fn returned the shape {losses.shape} but one loss per row was needed.")
        num_kept = max(1, math.ceil(keep * len(losses) - 1e-9))
        rows, weights = select(jax.lax.stop_gradient(losses), key, num_kept)
        return Record(losses, rows, weights, *aux), pullback(rows, weights)

    return step


class Verification(NamedTuple):
    """Whether the sliced gradient is that of plain indexing."""

    status: str  # "exact", "differs" or "refused"
    error: float  # the largest, over the largest element of a leaf's gradient, or over 1/100 of the largest of all
    tolerance: float  # by the coarsest dtype of the parameters
    why: str

    @property
    def agrees(self) -> bool:
        """Whether the gradients are equal, to rounding."""
        return self.status == "exact"


def verify(losses_fn: Callable[..., Any], params: Tree, batch: Tree, rows: Any, *args: Any) -> Verification:
    """Check the gradient of ``losses[rows].mean()`` against that of :func:`jax.grad`, on your own model and batch.

    Arguments are those of :func:`vjp`. Draw the parameters at random: at zeros any two gradients agree.
    """
    rows = jnp.asarray(rows)
    weights = jnp.full(len(rows), 1 / len(rows))
    wanted = jax.jit(jax.grad(lambda params: losses_fn(params, batch, *args)[rows].mean()))(params)
    tolerance = max(float(jnp.finfo(leaf.dtype).eps) ** 0.7 for leaf in jax.tree.leaves(wanted))
    try:
        found = jax.jit(lambda params: vjp(losses_fn, params, batch, *args)[1](rows, weights))(params)
    except UnsupportedOperation as refused:
        return Verification("refused", math.nan, tolerance, str(refused))
    off = jax.tree.map(lambda a, b: jnp.abs(a - b).max(initial=0).astype(float), found, wanted)
    sizes = [jnp.abs(leaf).max(initial=0).astype(float) for leaf in jax.tree.leaves(wanted)]
    floor = max(sizes) / 100 or 1.0
    over = [a / jnp.maximum(size, floor) for a, size in zip(jax.tree.leaves(off), sizes, strict=True)]
    error = float(jnp.stack(over).max())  # not the maximum of Python, for which NaN may be less than 0
    status = "exact" if error <= tolerance else "differs"
    return Verification(status, error, tolerance, f"the largest error is {error:.1e}, and {tolerance:.0e} is allowed")
