"""Optax: full, hardest and random rows on digits. ``python examples/optax_digits.py`` prints an accuracy for each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import rowprop_jax
from digits import METHODS, train


def logits_of(params, x):
    """A network of one hidden layer."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def losses_fn(params, batch):
    """One loss per row: no mean."""
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y)


def main() -> dict[str, float]:
    """Train by each method from the same parameters."""
    k1, k2 = jax.random.split(jax.random.key(1))
    params = {
        "w1": jax.random.normal(k1, (64, 128)) / 8, "b1": jnp.zeros(128),
        "w2": jax.random.normal(k2, (128, 10)) / 11, "b2": jnp.zeros(10),
    }  # fmt: skip
    optimizer = optax.adam(3e-3)
    found = {}
    for name, (select, keep) in METHODS.items():
        step = rowprop_jax.value_and_grad(losses_fn, select, keep=keep)

        @jax.jit
        def update(state, batch, key, step=step):
            params, moments = state
            _, grads = step(params, batch, key=key)  # the record is left: losses of all rows, which rows were kept
            updates, moments = optimizer.update(grads, moments, params)
            return optax.apply_updates(params, updates), moments

        def accuracy(state, test):
            return (logits_of(state[0], test[0]).argmax(1) == test[1]).mean()

        found[name] = train((params, optimizer.init(params)), update, accuracy)
        print(f"{name}: {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
