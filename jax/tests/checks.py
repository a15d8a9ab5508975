"""The truth: ``jax.grad`` of plain indexing, all N rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rowprop_jax


def weights_of(rows):
    return np.linspace(0.5, 1.5, len(rows))  # no two alike, so that rows cannot change places unseen


def sliced(losses_fn, params, batch, rows, *args):
    losses, pullback = rowprop_jax.vjp(losses_fn, params, batch, *args)
    return pullback(jnp.asarray(rows), jnp.asarray(weights_of(rows), losses.dtype))


def plain(losses_fn, params, batch, rows, *args):
    def loss(params):
        losses = losses_fn(params, batch, *args)
        return (losses[jnp.asarray(rows)] * jnp.asarray(weights_of(rows), losses.dtype)).sum()

    return jax.grad(loss)(params)


def error(found, wanted):
    """The largest difference over the largest element of the leaf; of next to nothing, over 1/100 of the largest."""
    pairs = [
        (np.asarray(a, float), np.asarray(b, float))
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    ]
    floor = max(np.abs(b).max(initial=0) for _, b in pairs) / 100
    assert floor > 0, "the plain gradient is zero, so it shows nothing"
    return max(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), floor) for a, b in pairs)


def check(losses_fn, params, batch, rows, *args, tolerance=1e-5):
    both = jax.jit(lambda *a: (sliced(losses_fn, a[0], a[1], rows, *a[2:]), plain(losses_fn, a[0], a[1], rows, *a[2:])))
    off = error(*both(params, batch, *args))
    assert off <= tolerance, off
