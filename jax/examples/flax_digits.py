"""Flax (nnx): full, hardest and random rows on digits; prints an accuracy for each."""

from __future__ import annotations

import jax
import optax
from flax import nnx

import rowprop_jax
from digits import METHODS, train


class Network(nnx.Module):
    """A network of one hidden layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.head = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of ten classes."""
        return self.head(nnx.relu(self.hidden(x)))


def main() -> dict[str, float]:
    """Train by each method from the same parameters."""
    graph, params = nnx.split(Network(nnx.Rngs(1)), nnx.Param)
    optimizer = optax.adam(3e-3)

    def losses_fn(params, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y)

    found = {}
    for name, (select, keep) in METHODS.items():
        step = rowprop_jax.value_and_grad(losses_fn, select, keep=keep)

        @jax.jit
        def update(state, batch, key, step=step):
            params, moments = state
            _, grads = step(params, batch, key=key)
            updates, moments = optimizer.update(grads, moments, params)
            return optax.apply_updates(params, updates), moments

        def accuracy(state, test):
            return (nnx.merge(graph, state[0])(test[0]).argmax(1) == test[1]).mean()

        found[name] = train((params, optimizer.init(params)), update, accuracy)
        print(f"{name}: {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
