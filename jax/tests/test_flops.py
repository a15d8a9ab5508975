"""The compiled step costs the forward of all rows and the backward of the kept ones."""

import jax
import jax.numpy as jnp
import pytest

from flops import count_flops
from networks import NETWORKS, conv
from rowprop_jax import top_k, value_and_grad

SIZES = {
    "mlp": {"width": 64, "inputs": 32},
    "cnn": {"width": 16, "side": 8},
    "resnet": {"width": 16, "side": 8},
    "vit": {"width": 32},
    "gpt": {"width": 32},
    "lstm": {"width": 32},
    "moe": {"width": 32, "inputs": 16},
}


@pytest.fixture(autouse=True)
def _optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def compiled(function, *inputs):
    return count_flops(jax.jit(function).lower(*inputs).compile())


def test_the_count_of_products_convolutions_and_loops():
    # Against formulas. Red with a loop's body counted once, and with a multiply-add of 1.
    a, b = jnp.ones((32, 48)), jnp.ones((48, 64))
    assert compiled(jnp.matmul, a, b) == 2 * 32 * 48 * 64
    image, kernel = jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    assert compiled(conv, image, kernel) == 2 * 4 * 8 * 8 * 5 * 27
    square = jnp.ones((32, 32))

    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 7)[0]

    assert compiled(loop, square, square) == 7 * 2 * 32**3


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_costs_the_forward_and_the_kept_share_of_the_backward(name):
    # Red with `residuals(jnp.zeros_like(losses).at[rows].add(weights))[0]` for the sliced backward.
    losses_fn, params, batch = NETWORKS[name](32, **SIZES[name])
    forward = compiled(losses_fn, params, batch)
    backward = compiled(jax.grad(lambda p, b: losses_fn(p, b).mean()), params, batch) - forward
    step = compiled(value_and_grad(losses_fn, top_k, keep=0.25), params, batch)
    assert backward > 0 and step <= 1.02 * (forward + backward / 4)
