"""The page's code runs, and its gradients are those of plain indexing."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from checks import error

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def test_the_page_runs():
    # Red with a name misspelt in a block, or with a backward of all rows in a block.
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    held = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), held)
    live = jax.grad(lambda params: held["policy_loss"](held["losses_fn"](params, held["batch"])))(held["params"])
    assert int(held["overflow"]) == 0 and int((held["advantages"] > 0).sum()) == 160
    assert error(held["grads"], live) < 1e-5
    rows = jax.lax.top_k(held["losses_fn"](held["params"], held["batch"]), 100)[1]
    indexed = jax.grad(lambda params: held["losses_fn"](params, held["batch"])[rows].mean())(held["params"])
    _, grads = held["step"](held["params"], held["batch"])
    assert error(grads, indexed) < 1e-5
    assert error(held["two_forwards"](held["params"], held["batch"]), indexed) < 1e-5


def test_the_zeros_of_losses_are_those_of_the_page():
    # The column of JAX. Red with another version whose zeros are others, as is the page then.
    corners = [
        (lambda x: jnp.maximum(x, 0), 0.0, 0.5), (lambda x: jnp.clip(x, 0, 1), 0.0, 0.5),
        (lambda x: jnp.clip(x, 0, 1), 1.0, 0.5), (jnp.abs, 0.0, 1), (jax.nn.relu, 0.0, 0),
        (lambda x: optax.hinge_loss(x, jnp.array(1)), 1.0, -0.5), (lambda x: x * 1e-40, 1.0, 0),
    ]  # fmt: skip
    assert [float(jax.grad(loss)(at)) for loss, at, _ in corners] == [gradient for *_, gradient in corners]
