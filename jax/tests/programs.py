"""Random programs: elementwise, products, gathers, sums, reshapes, transposes, scans, conditions.

``program(seed)`` returns ``(losses_fn, params, batch, mixes)``; ``mixes``: some part lets a row read another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

N, T, C = 6, 3, 4


def parts(rng, w, batch):
    """Steps of ``(N, T, C)`` to the same shape; each may use a weight ``w`` (C, C) and the batch ``(x, y)``."""
    axis, function = int(rng.integers(1, 3)), [jnp.tanh, jnp.sin, jax.nn.softplus, jax.nn.silu][rng.integers(4)]
    order = jnp.asarray(rng.permutation(C))

    def gathered(h):
        index = (batch()[1][:, None, None] + jnp.arange(T)[:, None] + jnp.zeros((1, 1, 2), int)) % C
        return h.at[..., :2].add(jnp.take_along_axis(h, index, 2))

    def numbered(h):
        own = h[jnp.arange(len(h)), batch()[1] % T]
        return h + own[:, None]

    def scanned(h):
        def step(carry, x):
            return jnp.tanh(carry @ w() + x), carry * x

        return jax.lax.scan(step, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1].swapaxes(0, 1) + h

    def chosen(h):
        return jax.lax.cond(w()[0, 0] > 0, lambda h: h @ w(), lambda h: jnp.sin(h), h)

    apart = {
        "elementwise": lambda h: function(h) + h,
        "product": lambda h: jax.nn.relu(h @ w()),
        "residual": lambda h: h + jnp.einsum("ntc,cd->ndt", h, w()).swapaxes(1, 2),
        "attention": lambda h: jax.nn.softmax(h @ h.swapaxes(1, 2)) @ h,
        "embedding": lambda h: h + jnp.sin(w())[batch()[1] % C][:, None],
        "gathered": gathered,
        "numbered": numbered,
        # Not h.max(): compiled, JAX's own gradient may not find the maximum again that it compares with.
        "reduced": lambda h: (
            h - h.mean(axis, keepdims=True) + jnp.take_along_axis(h, h.argmax(axis, keepdims=True), axis)
        ),
        "reshaped": lambda h: jnp.tanh(h.reshape(-1, C) @ w()).reshape(-1, T, C),
        "reshaped, rows inside": lambda h: (
            jnp.tanh(h.swapaxes(0, 1).reshape(-1, C) @ w()).reshape(T, -1, C).swapaxes(0, 1)
        ),
        "transposed": lambda h: (w() @ h.transpose(2, 1, 0).reshape(C, -1)).reshape(C, T, -1).transpose(2, 1, 0),
        "scanned": scanned,
        "chosen": chosen,
        "permuted values": lambda h: h[..., order],
        "cumulative": lambda h: jnp.cumsum(h, axis) / 3,
        "remat": lambda h: jax.checkpoint(lambda h: jnp.tanh(h @ w()))(h),
        "vmap": lambda h: jax.vmap(lambda a, y: a * a[:, y % C, None])(h, batch()[1]),
    }
    mixing = {
        "batch statistics": lambda h: h - h.mean(0),
        "batch norm": lambda h: h * jax.lax.rsqrt(h.var((0, 1)) + 1),
        "next row": lambda h: h + jnp.roll(h, 1, 0),
        "reversed": lambda h: h * h[::-1],
        "cumulative over rows": lambda h: jnp.cumsum(h, 0),
        "sorted rows": lambda h: jnp.sort(h, 0),
        "row of another": lambda h: h + h[batch()[1]],
        "pairs": lambda h: jnp.einsum("ntc,mtc,mtd->ntd", h, h, h) / 10,
        "first row": lambda h: h + h[:1],
    }
    return apart, mixing


def program(seed):
    rng = np.random.default_rng(seed)
    params = [jnp.asarray(rng.normal(size=(C, C)) / 2, float) for _ in range(2)]
    batch = jnp.asarray(rng.normal(size=(N, T, C)), float), jnp.asarray(rng.integers(N, size=N))
    now: dict = {}  # the parameters and the batch that are being traced
    apart, mixing = parts(rng, lambda: now["w"], lambda: now["batch"])
    steps = [apart[name] for name in rng.choice(list(apart), rng.integers(2, 6))]
    if mixes := bool(rng.random() < 0.25):
        steps.insert(rng.integers(len(steps) + 1), mixing[rng.choice(list(mixing))])
    if rng.random() < 0.3:
        steps.append(lambda h: h.swapaxes(1, 2).swapaxes(1, 2))

    def losses_fn(params, batch):
        now.update(batch=batch)
        h = batch[0] @ params[0]
        for at, step in enumerate(steps):
            now.update(w=params[at % 2])
            h = step(h)
        return jnp.sin(h).sum((1, 2))

    return losses_fn, params, batch, mixes
