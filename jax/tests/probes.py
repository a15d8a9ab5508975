"""Small programs, one for each way in which rows stay apart or mix: ``name -> (losses_fn, refusal)``.

``losses_fn(w, (x, y))``, with w (4, 4), x (N, 4) and y (N,) classes out of 4. ``refusal`` is what the error names, a
primitive or a few words; None where the gradient has to be that of plain indexing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

solved = jax.scipy.linalg.solve_triangular


def hidden(w, x):
    return jnp.tanh(x @ w)


def with_backward(backward):
    """The identity with a backward of its own."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, x), lambda x, grad: (backward(x, grad),))
    return identity


@jax.custom_jvp
def softplus(x):
    return jnp.log1p(jnp.exp(x))


softplus.defjvp(lambda primals, tangents: (softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


def spread_by_scan(w, x):
    """Mixes in the second step of the scan: what the first wrote for all rows."""

    def step(carry, _):
        h, mean = carry
        return (h + mean, h.sum(0) / 10), None

    return jax.lax.scan(step, (hidden(w, x), jnp.zeros(4)), None, 3)[0][0].sum(1)


def while_backward(x, grad):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, grad))[1]


def while_some_row(x, grad):
    return jax.lax.while_loop(lambda c: jnp.abs(c).max() > 1e-3, lambda c: c / 2, grad)


def gathered(array, index, mapped, window, collapsed=()):
    """Windows of an array, at starts along the axes ``mapped``; the index has a batch if an axis is collapsed."""
    first = len(collapsed)
    offsets = tuple(range(first, first + array.ndim - first))
    numbers = jax.lax.GatherDimensionNumbers(offsets, collapsed, mapped)
    return jax.lax.gather(array, index, numbers, window)


def own_row_and_next(h, y):
    index = jnp.concatenate([jnp.arange(len(y))[:, None], y[:, None]], 1)
    return gathered(h, index, (0, 1), (2, 1), (1,)).sum(1)


def half_of_merged_rows(h):
    """Of (N, 4), seen as two halves of N rows end to end, one half."""
    merged = h.reshape(-1, 2, 2).swapaxes(0, 1).reshape(-1, 2)
    return gathered(jnp.sin(merged), jnp.array([1]), (1,), (len(h), 1)).sum(1)


def padded_windows(g):
    """The largest of windows, of which the last lie in the padding alone: -1, and not 0, where the gradient is."""
    return jnp.tanh(jax.lax.reduce_window(g, -jnp.inf, jax.lax.max, (1, 2), (1, 1), ((0, 0), (0, 3))))[:, 2:]


def with_vjp_of_w(w, b):
    """One branch of the backward has a gradient for rows whose cotangent is zero; the weights choose it."""
    pair = jax.custom_vjp(lambda w, h: h)

    def backward(w, g):
        return jnp.zeros_like(w), jax.lax.cond(w[0, 0] > 0, lambda g: g + 1, lambda g: g, g)

    pair.defvjp(lambda w, h: (h, w), backward)
    return pair(w, hidden(w, b[0])).sum(1)


def experts(w, x):
    """Each row goes into a slot of its expert, of which there are few: the rows before decide whether there is room."""
    one_hot = jax.nn.one_hot(jnp.argmax(x, 1), 4)
    slots = jax.nn.one_hot((jnp.cumsum(one_hot, 0) * one_hot).sum(1).astype(int) - 1, 3) * 1.0
    dispatch = jnp.einsum("ne,ns->nes", one_hot, slots)
    return jnp.einsum("nes,esc->nc", dispatch, hidden(w, jnp.einsum("nes,nc->esc", dispatch, hidden(w, x)))).sum(1)


PROBES = {
    # Rows stay apart.
    "elementwise": (lambda w, b: jnp.where(b[0] > 0, jnp.sin(hidden(w, b[0])), 2.0).sum(1), None),
    "numbered": (lambda w, b: jax.nn.log_softmax(b[0] @ w)[jnp.arange(len(b[0])), b[1]], None),
    "numbered, remat": (jax.checkpoint(lambda w, b: jax.nn.log_softmax(b[0] @ w)[jnp.arange(len(b[0])), b[1]]), None),
    "numbered twice": (
        lambda w, b: (hidden(w, b[0])[:, None] * w)[jnp.arange(len(b[1]))[:, None], jnp.arange(2), b[1][:, None]].sum(
            1
        ),
        None,
    ),
    "along axis": (lambda w, b: jnp.take_along_axis(b[0] @ w, b[1][:, None], 1)[:, 0] ** 2, None),
    "vmap": (lambda w, b: jax.vmap(lambda x, y: -jax.nn.log_softmax(hidden(w, x))[y])(*b), None),
    "embedding": (lambda w, b: (hidden(w, w)[b[1]] * b[0]).sum(1), None),
    "window": (lambda w, b: hidden(w, b[0])[:, jnp.array([0, 2, 2])].sum(1), None),
    "written window": (
        lambda w, b: jnp.zeros_like(b[0]).at[:, jnp.array([0, 2])].add(hidden(w, b[0])[:, :2] ** 2).sum(1),
        None,
    ),
    "slices": (lambda w, b: jax.lax.dynamic_slice_in_dim(hidden(w, b[0])[:, ::-1], 1, 2, 1).sum(1), None),
    "updated slice": (
        lambda w, b: jax.lax.dynamic_update_slice(b[0] * w[0], hidden(w, b[0])[:, :2], (0, 1)).sum(1),
        None,
    ),
    "padded": (lambda w, b: jnp.pad(hidden(w, b[0]), ((0, 0), (1, 2))).cumsum(1).sum(1), None),
    "sorted values": (lambda w, b: (jnp.sort(hidden(w, b[0]), axis=1) * jnp.arange(4.0)).sum(1), None),
    "largest values": (lambda w, b: jax.lax.top_k(hidden(w, b[0]), 2)[0].sum(1), None),
    "maximum": (lambda w, b: hidden(w, b[0]).max(1) + hidden(w, b[0]).prod(1) + jax.nn.logsumexp(b[0] @ w, 1), None),
    "batch last": (lambda w, b: jnp.einsum("ij,jn->in", w, hidden(w, b[0]).T).sum(0), None),
    "merged": (lambda w, b: (jnp.tanh(b[0].reshape(-1, 2)) @ w[:2]).reshape(-1, 8).sum(1), None),
    "merged, rows inside": (
        lambda w, b: (jnp.tanh(b[0].T.reshape(-1, 1) * w[:1]) @ w).reshape(4, -1, 4).sum((0, 2)),
        None,
    ),
    "stacked": (lambda w, b: jnp.stack([hidden(w, b[0]), b[0] * w[0]], 1).transpose(2, 0, 1).prod((0, 2)), None),
    "repeated": (lambda w, b: jnp.tile(hidden(w, b[0]), (1, 3)).reshape(-1, 3, 4).sum((1, 2)), None),
    "checkpoint": (lambda w, b: jax.checkpoint(lambda h: softplus(h @ w))(hidden(w, b[0])).sum(1), None),
    "custom_jvp": (lambda w, b: softplus(hidden(w, b[0])).sum(1), None),
    "custom_vjp": (lambda w, b: with_backward(lambda x, g: g * jnp.cos(x) * 2)(hidden(w, b[0])).sum(1), None),
    "scan": (lambda w, b: jax.lax.scan(lambda h, _: (hidden(w, h), h.sum(1)), b[0], None, 3)[1].sum(0), None),
    "cond": (lambda w, b: jax.lax.cond(w[0, 0] > 0, lambda h: h**2, jnp.sin, hidden(w, b[0])).sum(1), None),
    "while": (lambda w, b: with_backward(while_backward)(hidden(w, b[0])).sum(1), None),
    "triangular": (
        lambda w, b: jax.vmap(lambda x: solved(w * x + 4 * jnp.eye(4), x)[0])(hidden(w, b[0])),
        None,
    ),
    "fft": (lambda w, b: jnp.abs(jnp.fft.fft(hidden(w, b[0]), axis=1)).sum(1), None),
    "statistics of the data": (lambda w, b: hidden(w, (b[0] - b[0].mean(0)) / b[0].std(0)).sum(1), None),
    "stopped statistics": (
        lambda w, b: (hidden(w, b[0]) - jax.lax.stop_gradient(hidden(w, b[0]).mean(0))).prod(1),
        None,
    ),
    "stopped softmax of the batch": (
        lambda w, b: (b[0] @ w).sum(1) ** 2 * jax.lax.stop_gradient(jax.nn.softmax((b[0] @ w).sum(1))),
        None,
    ),
    "divided by N": (lambda w, b: (hidden(w, b[0]) / len(b[0])).sum(1), None),
    "key of each row": (
        lambda w, b: jax.checkpoint(
            lambda h: jax.vmap(lambda h, y: h * jax.random.normal(jax.random.key(y), (4,)))(h, b[1])
        )(hidden(w, b[0])).sum(1),
        None,
    ),
    "clipped gradient": (lambda w, b: with_backward(lambda x, g: g / jnp.linalg.norm(g))(hidden(w, b[0])).sum(1), None),
    "solved": (lambda w, b: jax.vmap(lambda x: jnp.linalg.solve(w * x + 4 * jnp.eye(4), x)[0])(hidden(w, b[0])), None),
    "solved by one matrix": (lambda w, b: jax.vmap(lambda x: jnp.linalg.solve(w + 4 * jnp.eye(4), x)[0])(b[0]), None),
    # Rows mix.
    "batch mean": (lambda w, b: (hidden(w, b[0]) - hidden(w, b[0]).mean(0)).prod(1), "reduce_sum.*goes back"),
    "mean in a function": (
        lambda w, b: jax.jit(lambda h: h - h.mean(0))(hidden(w, b[0])).prod(1),
        "reduce_sum.*goes back",
    ),
    "written elsewhere": (lambda w, b: jnp.zeros_like(b[0]).at[b[1]].add(hidden(w, b[0])).sum(1), "gather"),
    "steps as many as rows": (
        lambda w, b: jax.lax.scan(lambda h, _: (h * 0.5, None), hidden(w, b[0]), None, len(b[0]))[0].sum(1),
        "another `length`",
    ),
    "cumsum": (lambda w, b: jnp.cumsum(hidden(w, b[0]), 0).sum(1), "cumsum"),
    "sort": (lambda w, b: jnp.sort(hidden(w, b[0]).sum(1)), "scatter-add"),
    "reversed": (lambda w, b: hidden(w, b[0])[::-1].sum(1) * b[0][:, 0], "rev"),
    "rolled": (lambda w, b: jnp.roll(hidden(w, b[0]), 1, 0).sum(1), "split"),
    "permuted": (lambda w, b: hidden(w, b[0])[b[1]].sum(1), "scatter-add"),
    "permuted in each": (lambda w, b: hidden(w, b[0])[b[1], jnp.arange(len(b[1])) % 4], "scatter-add"),
    "one's own row and the next": (lambda w, b: own_row_and_next(hidden(w, b[0]), b[1]), "another row"),
    "half of merged rows": (lambda w, b: half_of_merged_rows(hidden(w, b[0])), "another row"),
    "read across rows": (
        lambda w, b: hidden(w, b[0]).T.reshape(-1, 4)[jnp.arange(len(b[1])), b[1]],
        "splits the axis",
    ),
    "pairs": (lambda w, b: jax.nn.log_softmax(hidden(w, b[0]) @ b[0].T)[:, 0], "dot_general"),
    "largest of the batch": (lambda w, b: (hidden(w, b[0]) - hidden(w, b[0]).max(0)).sum(1) ** 2, "sums over"),
    "neighbour": (
        lambda w, b: (
            (hidden(w, b[0]).reshape(-1, 2, 4).sum(1, keepdims=True) * jnp.ones((1, 2, 4))).reshape(-1, 4).sum(1)
        ),
        "reshape|shape",
    ),
    "scan over rows": (
        lambda w, b: jax.lax.scan(lambda h, x: (hidden(w, h + x),) * 2, jnp.zeros(4), b[0])[1].sum(1),
        "scan|while",
    ),
    "scan that spreads": (lambda w, b: spread_by_scan(w, b[0]), "scan|reduce_sum|broadcast|mul"),
    "gradient of one's own": (lambda w, b: with_backward(lambda x, g: g + 1)(hidden(w, b[0])).sum(1), "sums over all"),
    "gradient of one's own, by a function": (
        lambda w, b: with_backward(lambda x, g: jnp.exp(g))(hidden(w, b[0])).sum(1),
        "sums over all",
    ),
    "gradient of one's own, in order": (
        lambda w, b: with_backward(lambda x, g: jnp.sort(g, 0))(hidden(w, b[0])).sum(1),
        "along the axis",
    ),
    "gradient of one's own, to a power": (
        lambda w, b: with_backward(lambda x, g: jnp.tanh(jax.lax.integer_pow(g, -2)))(hidden(w, b[0])).sum(1),
        "sums over all",
    ),
    "gradient for one branch": (
        lambda w, b: with_backward(lambda x, g: jax.lax.cond(x[0, 0] > 0, lambda g: g, lambda g: g + 1, g))(
            hidden(w, b[0])
        ).sum(1),
        "slice|cond|sums",
    ),
    "some branch": (lambda w, b: with_vjp_of_w(w, b), "sums over all"),
    "while some row wants": (lambda w, b: with_backward(while_some_row)(hidden(w, b[0])).sum(1), "while|sums over"),
    "dropout recomputed": (
        lambda w, b: jax.checkpoint(lambda h: h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape))(
            hidden(w, b[0])
        ).sum(1),
        "one key",
    ),
    "number of rows recomputed": (
        jax.checkpoint(lambda w, b: jnp.tanh((b[0] @ w) / len(b[0])).sum(1)),
        "a number in `div`.* depends on the batch size",
    ),
    "number of the row recomputed": (
        jax.checkpoint(lambda w, b: jnp.tanh((b[0] @ w) * jnp.arange(len(b[0]))[:, None]).sum(1)),
        "number of a row",
    ),
    "embedding by the number of the row recomputed": (
        jax.checkpoint(lambda w, b: (hidden(w, w)[(b[1] + jnp.arange(len(b[1]))) % 4] * b[0]).sum(1)),
        "number of a row",
    ),
    "other operands": (
        lambda w, b: with_backward(lambda x, g: g * (jnp.sin(x), jnp.cos(x))[len(x) > 5])(hidden(w, b[0])).sum(1),
        "other operands",
    ),
    "slice of as many as rows": (
        lambda w, b: (b[0] * jax.lax.dynamic_slice(jnp.tile(w, (2, 1)), (0, 0), b[0].shape)).sum(1),
        "dynamic_update_slice",
    ),
    "merged alike": (
        jax.checkpoint(
            lambda w, b: jnp.tanh((b[0] @ w).reshape(-1) * jnp.arange(4.0).repeat(len(b[0]))).reshape(-1, 4).sum(1)
        ),
        "another row",
    ),
    "filled": (
        lambda w, b: with_backward(lambda x, g: g + g.at[:, jnp.array([0, 1, 2, 4])].get(mode="fill", fill_value=1.0))(
            hidden(w, b[0])
        ).sum(1),
        "sums over all",
    ),
    "padding": (
        lambda w, b: with_backward(lambda x, g: g + padded_windows(g))(hidden(w, b[0])).sum(1),
        "sums over all",
    ),
    "number of the row in another dtype": (
        jax.checkpoint(lambda w, b: jnp.sin(hidden(w, b[0]))[jnp.arange(len(b[1]), dtype=jnp.bfloat16).astype(int), 0]),
        "counts along",
    ),
    "number of the row through another dtype": (
        jax.checkpoint(
            lambda w, b: jnp.sin(hidden(w, b[0]))[jnp.arange(len(b[1])).astype(jnp.bfloat16).astype(int), 0]
        ),
        "number of a row",
    ),
    "slots of experts": (lambda w, b: experts(w, b[0]), "sums over|goes back"),
    "another program": (
        lambda w, b: hidden(w, b[0]).sum(1) if len(b[0]) > 5 else jnp.sin(b[0] @ w).sum(1),
        "another program",
    ),
    "unknown": (
        lambda w, b: with_backward(lambda x, g: jax.lax.reduce(g, 0.0, lambda a, b: a * b, (1,))[:, None] * x)(
            hidden(w, b[0])
        ).sum(1),
        "has no rule",
    ),
}
