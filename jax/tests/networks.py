"""The networks of the tests and benchmarks in plain JAX: ``name -> (losses_fn, params, batch)`` for a batch size."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np


class Draw:
    """Random arrays, the same every time, of the default floating dtype or another."""

    def __init__(self, dtype=None):
        self.rng, self.dtype = np.random.default_rng(0), dtype

    def weight(self, *shape):
        fan_in = int(np.prod(shape[:-1])) if len(shape) > 1 else 100
        return jnp.asarray(self.rng.normal(size=shape) * fan_in**-0.5, self.dtype or float)

    def data(self, *shape):
        return jnp.asarray(self.rng.normal(size=shape), self.dtype or float)

    def classes(self, count, *shape):
        return jnp.asarray(self.rng.integers(count, size=shape))


def cross_entropy(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def mlp(n, dtype=None, width=32, inputs=16, depth=2):
    draw = Draw(dtype)
    sizes = [inputs, *[width] * depth, 10]
    params = [(draw.weight(a, b), draw.weight(b)) for a, b in pairwise(sizes)]

    def losses_fn(params, batch):
        x, y = batch
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        return cross_entropy(x @ params[-1][0] + params[-1][1], y)

    return losses_fn, params, (draw.data(n, inputs), draw.classes(10, n))


def conv(x, w, stride=1, groups=1):
    shape = (*w.shape[:2], w.shape[2] * groups, w.shape[3]) if groups == 1 else w.shape
    numbers = jax.lax.conv_dimension_numbers(x.shape, shape, ("NHWC", "HWIO", "NHWC"))
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def cnn(n, dtype=None, width=8, side=8):
    """Convolutions, one of them depthwise, and pools of maxima and of means."""
    draw = Draw(dtype)
    params = [draw.weight(3, 3, 3, width), draw.weight(3, 3, 1, width), draw.weight(width, 10)]

    def losses_fn(params, batch):
        x, y = batch
        x = pool(jax.nn.relu(conv(x, params[0])))
        x = jax.nn.gelu(conv(x, params[1], groups=params[1].shape[-1]))
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return cross_entropy(x.mean((1, 2)) @ params[2], y)

    return losses_fn, params, (draw.data(n, side, side, 3), draw.classes(10, n))


def resnet(n, dtype=None, width=8, side=8, blocks=2, training=False):
    """Residual blocks with BatchNorm: frozen, by running statistics, or in training, by the batch's."""
    draw = Draw(dtype)
    shapes = (3, 3, width, width), (width,), (width,)
    params = {"stem": draw.weight(3, 3, 3, width)}
    params["blocks"] = [[draw.weight(*shape) for shape in shapes] for _ in range(blocks)]
    params["head"] = draw.weight(width, 10)
    running = draw.data(width) / 10, 1 + draw.data(width) ** 2

    def losses_fn(params, batch):
        x, y = batch
        x = conv(x, params["stem"])
        for w, scale, shift in params["blocks"]:
            out = conv(x, w)
            mean, var = (out.mean((0, 1, 2)), out.var((0, 1, 2))) if training else running
            x = jax.nn.relu(x + (out - mean) * jax.lax.rsqrt(var + 1e-5) * (1 + scale) + shift)
        return cross_entropy(x.mean((1, 2)) @ params["head"], y)

    return losses_fn, params, (draw.data(n, side, side, 3), draw.classes(10, n))


def block_params(draw, width):
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return {name: draw.weight(*shape) for name, shape in shapes.items()}


def transformer_block(p, x, heads, mask=None):
    n, t, c = x.shape
    q, k, v = jnp.split(layer_norm(x) @ p["qkv"], 3, -1)
    q, k, v = (a.reshape(n, t, heads, c // heads).transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / (c // heads) ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    x = x + (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(n, t, c) @ p["out"]
    return x + jax.nn.gelu(layer_norm(x) @ p["up"]) @ p["down"]


def vit(n, dtype=None, width=16, side=8, patch=4, depth=1, heads=2):
    draw = Draw(dtype)
    tokens = (side // patch) ** 2
    params = {"patch": draw.weight(patch, patch, 3, width), "place": draw.weight(tokens + 1, width)}
    params |= {"class": draw.weight(1, width), "blocks": [block_params(draw, width) for _ in range(depth)]}
    params["head"] = draw.weight(width, 10)

    def losses_fn(params, batch):
        x, y = batch
        x = jax.lax.conv_general_dilated(
            x, params["patch"], (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).reshape(len(x), -1, width)
        x = jnp.concatenate([jnp.broadcast_to(params["class"], (len(x), 1, width)), x], 1) + params["place"]
        for p in params["blocks"]:
            x = transformer_block(p, x, heads)
        return cross_entropy(layer_norm(x[:, 0]) @ params["head"], y)

    return losses_fn, params, (draw.data(n, side, side, 3), draw.classes(10, n))


def gpt(n, dtype=None, width=16, length=8, vocabulary=20, depth=1, heads=2):
    """The loss of a row is the mean over its tokens; the head runs on tokens without a batch axis."""
    draw = Draw(dtype)
    params = {"embed": draw.weight(vocabulary, width), "place": draw.weight(length, width)}
    params["blocks"] = [block_params(draw, width) for _ in range(depth)]

    def losses_fn(params, batch):
        x = params["embed"][batch[:, :-1]] + params["place"]
        for p in params["blocks"]:
            x = transformer_block(p, x, heads, jnp.tril(jnp.ones((length, length), bool)))
        logits = layer_norm(x).reshape(-1, width) @ params["embed"].T
        return cross_entropy(logits, batch[:, 1:].reshape(-1)).reshape(len(batch), length).mean(1)

    return losses_fn, params, draw.classes(vocabulary, n, length + 1)


def lstm(n, dtype=None, width=16, inputs=8, length=8):
    """A scan over time, whose outputs go through the head with time and rows in one axis, time first."""
    draw = Draw(dtype)
    params = [draw.weight(inputs, 4 * width), draw.weight(width, 4 * width), draw.weight(width, 10)]

    def losses_fn(params, batch):
        x, y = batch

        def cell(state, xt):
            h, c = state
            i, f, g, o = jnp.split(xt @ params[0] + h @ params[1], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((len(x), width), x.dtype)
        _, outputs = jax.lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))
        logits = outputs.reshape(-1, width) @ params[2]
        return cross_entropy(logits, y.T.reshape(-1)).reshape(length, -1).mean(0)

    return losses_fn, params, (draw.data(n, length, inputs), draw.classes(10, n, length))


def moe(n, dtype=None, width=16, experts=4, inputs=8):
    """Each row goes through its two best of four experts."""
    draw = Draw(dtype)
    params = [draw.weight(inputs, experts), draw.weight(experts, inputs, width), draw.weight(experts, width, 10)]

    def losses_fn(params, batch):
        x, y = batch
        gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ params[0]), 2)
        hidden = jax.nn.silu(jnp.einsum("ni,neih->neh", x, params[1][chosen]))
        logits = jnp.einsum("neh,nehc->nec", hidden, params[2][chosen])
        return cross_entropy((gates[..., None] * logits).sum(1), y)

    return losses_fn, params, (draw.data(n, inputs), draw.classes(10, n))


NETWORKS = {network.__name__: network for network in (mlp, cnn, resnet, vit, gpt, lstm, moe)}
