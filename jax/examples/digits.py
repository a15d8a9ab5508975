"""Digits of scikit-learn as arrays, and a training loop that the examples of Flax, Equinox and Optax share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from sklearn.datasets import load_digits

import rowprop_jax

METHODS = {  # how rows are chosen, and the fraction kept
    "full": (rowprop_jax.top_k, 1.0),
    "OHEM": (rowprop_jax.top_k, 0.25),
    "random": (rowprop_jax.uniform, 0.25),
}


def digits():
    """Images (1797, 64) in [0, 1] and classes (1797,), the last 360 to test on."""
    x, y = load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)
    return (x[:-360], y[:-360]), (x[-360:], y[-360:])


def train(state, update, accuracy, *, epochs=10, batch_size=128):
    """Print and return the accuracy on the test images after some epochs of ``state = update(state, batch, key)``."""
    (x, y), test = digits()
    key = jax.random.key(0)
    for _ in range(epochs):
        key, shuffle = jax.random.split(key)
        for rows in jax.random.permutation(shuffle, len(x))[: len(x) // batch_size * batch_size].reshape(
            -1, batch_size
        ):
            key, choice = jax.random.split(key)
            state = update(state, (x[rows], y[rows]), choice)
    return float(accuracy(state, test))
