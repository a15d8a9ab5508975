"""Equinox: full, hardest and random rows on digits; prints an accuracy for each."""

from __future__ import annotations

import equinox as eqx
import jax
import optax

import rowprop_jax
from digits import METHODS, train


def main() -> dict[str, float]:
    """Train by each method from the same parameters."""
    model = eqx.nn.MLP(64, 10, width_size=128, depth=1, key=jax.random.key(1))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(3e-3)

    def losses_fn(params, batch):
        x, y = batch
        logits = jax.vmap(eqx.combine(params, static))(x)  # a network of one row, for all rows
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    found = {}
    for name, (select, keep) in METHODS.items():
        step = rowprop_jax.value_and_grad(losses_fn, select, keep=keep)

        @eqx.filter_jit
        def update(state, batch, key, step=step):
            params, moments = state
            _, grads = step(params, batch, key=key)
            updates, moments = optimizer.update(grads, moments, params)
            return eqx.apply_updates(params, updates), moments

        def accuracy(state, test):
            return (jax.vmap(eqx.combine(state[0], static))(test[0]).argmax(1) == test[1]).mean()

        found[name] = train((params, optimizer.init(params)), update, accuracy)
        print(f"{name}: {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
