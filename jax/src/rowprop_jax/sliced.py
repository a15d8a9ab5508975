"""A backward of K rows from a forward of N: rows of what the forward saved go into JAX's own backward for K rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rowprop_jax import rules as _rules  # noqa: F401  # pyright: ignore  # they enter themselves
from rowprop_jax.walk import WHOLE, Mixes, Value, axis_of_rows, walk

Tree = Any  # a pytree of arrays
# What a lean forward computes again for the kept rows: it costs less than to save its results for all.
CHEAP = """add add_any sub mul div rem neg sign abs max min square sqrt rsqrt cbrt integer_pow pow exp exp2 expm1 log
log1p tanh logistic sin cos tan erf erfc clamp select_n eq ne lt le gt ge and or xor not is_finite stop_gradient name
convert_element_type copy broadcast_in_dim reduce_sum reduce_max reduce_window_sum reduce_window_max gather""".split()


class InvalidInput(ValueError):
    """An argument has the wrong shape, dtype or range."""


class UnsupportedOperation(RuntimeError):
    """Rows mix in the backward, or nothing shows that they do not."""


def vjp(losses_fn: Callable[..., Any], params: Tree, batch: Tree, *args: Any, has_aux: bool = False) -> Any:
    """The losses of all rows, and a function that returns the gradient of some rows at the cost of these.

    As :func:`jax.vjp`, it returns ``(losses, pullback)``, and ``aux`` behind them if ``has_aux``.
    ``losses_fn(params, batch, *args)`` returns losses ``(N,)`` or outputs ``(N, ...)``, in a pair with aux if
    ``has_aux``. ``params`` is differentiated, ``batch`` a pytree of arrays ``(N, ...)``, and ``args`` has no rows.

    ``pullback(rows, weights)`` takes integers ``(K,)`` and weights ``(K,)``, or cotangents ``(K, ...)``. It returns the
    gradient of ``sum(weights * losses[rows])`` at the cost of the backward of K rows (of 2 where K is 1), and raises
    UnsupportedOperation where rows mix in the backward and K < N. Rows outside [-N, N) add nothing, as in ``jax.grad``.
    Rows may repeat, but not where the backward of a ``jax.custom_vjp`` is no linear function of its cotangent.

    Call both inside :func:`jax.jit`: tracing is done once per K, and other rows compile nothing anew.

    Example:
        >>> losses, pullback = vjp(lambda w, x: jnp.square(x @ w), jnp.ones(3), jnp.arange(12.0).reshape(4, 3))
        >>> pullback(jnp.array([1]), jnp.array([1.0])).tolist()
        [72.0, 96.0, 120.0]
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or shapes[0] == ():
        raise InvalidInput(f"batch holds arrays {shapes} but N rows in each were needed; pass others behind it.")
    num_rows = shapes[0][0]

    def function(params: Tree, batch: Tree) -> Any:
        found = losses_fn(params, batch, *jax.tree.map(lambda leaf: leaf, args))  # objects that this trace may change
        return found if has_aux else (found, None)

    try:
        forward = _Forward(function, params, batch, lean=num_rows > 2)
        if forward.lean:
            forward.prove(2)
    except (TypeError, ValueError, RuntimeError):  # rows mix in what is cheap, or JAX cannot save less
        forward = _Forward(function, params, batch, lean=False)
    results = jaxpr_as_fun(forward.program)(*jax.tree.leaves((params, batch)))
    losses, residuals, aux = jax.tree.unflatten(jax.tree.structure(forward.shapes), results)

    def pullback(rows: Any, weights: Any) -> Tree:
        rows, weights = jnp.asarray(rows), jnp.asarray(weights, losses.dtype)
        wanted = rows.shape[:1] + losses.shape[1:]
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer) or weights.shape != wanted:
            said = f"rows {rows.dtype}{list(rows.shape)} and weights {list(weights.shape)} but integers (K,)"
            raise InvalidInput(f"pullback got {said} and weights of the shape {wanted} were needed.")
        rows = jnp.where(rows < 0, rows.astype(int) + num_rows, rows)  # int8 could not hold the sum
        inside = (rows >= 0) & (rows < num_rows)
        weights = jnp.where(jnp.expand_dims(inside, tuple(range(1, weights.ndim))), weights, 0)
        if len(rows) == 0 or max(len(rows), 2) >= num_rows:
            return residuals(jnp.zeros_like(losses).at[rows].add(weights))[0]
        rows = jnp.where(inside, rows, rows[inside.argmax()])  # a row that is kept: 0 * NaN of another one is NaN
        if len(rows) == 1:  # JAX writes other programs for axes of size 1
            rows, weights = jnp.repeat(rows, 2), jnp.concatenate([weights, jnp.zeros_like(weights)])
        twin, facts = forward.prove(len(rows))
        saved = zip(jax.tree.leaves(residuals), jax.tree.leaves(twin.shapes[1]), facts, strict=True)
        kept = [_take(*each, rows, num_rows) for each in saved]
        return jax.tree.unflatten(jax.tree.structure(params), jaxpr_as_fun(twin.backward)(*kept, weights))

    return (losses, pullback, aux) if has_aux else (losses, pullback)


def _costs(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether a primitive is not cheap, nor a function with a derivative of its own, as relu, of which each is."""
    inner = params.get("call_jaxpr", params.get("jaxpr")) if primitive.name in ("custom_jvp_call", "jit") else None
    within = any(_costs(eqn.primitive, **eqn.params) for eqn in inner.jaxpr.eqns) if inner else True
    return within and primitive.name not in CHEAP


def _rewritten(program: ClosedJaxpr, change: Callable[[Any], Any]) -> ClosedJaxpr:
    """The program with other equations."""
    return program.replace(jaxpr=program.jaxpr.replace(eqns=[change(eqn) for eqn in program.jaxpr.eqns]))


def _unrounded(eqn: Any) -> Any:
    """Nothing for jax.checkpoint's rounding to float32 of what it saves, which would be a pass of its own."""
    none = eqn.params == {"exponent_bits": 8, "mantissa_bits": 23} and eqn.invars[0].aval.dtype == "float32"
    return eqn.replace(primitive=jax.lax.copy_p, params={}) if none else eqn


def _lean_scan(eqn: Any) -> Any:
    """A scan with each step under jax.checkpoint, so that a step backwards computes again what it needs.

    The scan before it would compute that for all steps, and save it.
    """
    params = dict(eqn.params)
    if eqn.primitive.name in ("jit", "scan"):
        params["jaxpr"] = _rewritten(params["jaxpr"], _lean_scan)
    if eqn.primitive.name == "scan":
        step = jax.checkpoint(jaxpr_as_fun(params["jaxpr"]), prevent_cse=False)
        params["jaxpr"] = jax.make_jaxpr(step)(*params["jaxpr"].in_avals)
    return eqn.replace(params=params)


class _Forward:
    """A forward as a program of arrays, and the shapes of what it returns: losses, JAX's VJP with what it saves, aux.

    A lean one saves no cheap results: the backward computes them again, for the kept rows alone.
    """

    def __init__(self, function: Any, params: Tree, batch: Tree, lean: bool) -> None:
        def lean_fn(*inputs: Any) -> Any:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
            if program.effects or "remat2[" in str(program):
                raise UnsupportedOperation("Prints print once, and the caller's jax.checkpoint says what is saved.")
            results = jaxpr_as_fun(_rewritten(program, _lean_scan))(*jax.tree.leaves(inputs))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        def forward(params: Tree, batch: Tree) -> Any:
            inner = jax.checkpoint(lean_fn, prevent_cse=False, policy=_costs) if lean else function
            return jax.vjp(lambda params: inner(params, batch), params, has_aux=True)

        self.function, self.params, self.batch, self.lean = function, params, batch, lean
        program, self.shapes = jax.make_jaxpr(forward, return_shape=True)(params, batch)
        self.program = _rewritten(program, _unrounded)
        shape, num_rows = jnp.shape(self.shapes[0]), len(jax.tree.leaves(batch)[0])
        if shape[:1] != (num_rows,):
            said = f"but one loss for each of the batch's {num_rows} rows was needed; take no mean over rows"
            raise InvalidInput(f"losses_fn returned the shape {shape} {said}.")
        self.backward = jax.make_jaxpr(lambda vjp, losses: vjp(losses)[0])(self.shapes[1], self.shapes[0])

    def prove(self, num_kept: int) -> tuple["_Forward", list[Value]]:
        """The forward of K rows, and where each saved array holds rows, once its backward has the right gradient.

        Only the backward has to keep rows apart, whatever was saved: it is linear, so a row that is not kept adds
        nothing to a sum over rows, and the rest is the same program on K rows. The forward just tells how the axis of
        the rows in a saved array is split, and any split that the proof accepts is a right one.
        """
        batch = jax.tree.leaves(self.batch)
        sizes = len(batch[0]), num_kept
        small = jax.eval_shape(lambda batch: jax.tree.map(lambda leaf: leaf[:num_kept], batch), self.batch)
        try:
            twin = _Forward(self.function, self.params, small, self.lean)
        except (TypeError, ValueError) as error:
            said = f"losses_fn takes {sizes[0]} rows and not {num_kept} ({str(error).splitlines()[0]})"
            raise UnsupportedOperation(f"{said}; an array with a row for each loss belongs into batch.") from error
        saved, saved_k = jax.tree.leaves(self.shapes[1]), jax.tree.leaves(twin.shapes[1])
        inputs = [*[Value()] * len(jax.tree.leaves(self.params)), *[Value(1)] * len(batch)]
        told = walk(self.program, twin.program, inputs, sizes)[1 : len(saved) + 1]
        facts = list[Value]()
        try:
            if [(leaf.dtype, leaf.ndim) for leaf in saved] != [(leaf.dtype, leaf.ndim) for leaf in saved_k]:
                raise Mixes("the forward saves other arrays")
            for n, k, value in zip(saved, saved_k, told, strict=True):
                outer = None if axis_of_rows(n.shape, k.shape, sizes) is None else value.outer or 1
                facts.append(Value(outer, number=None if value.why else value.number))
            told = walk(self.backward, twin.backward, [*facts, Value(1, zero=True)], sizes)
        except Mixes as mixes:
            told = [*told, Value(why=str(mixes).format("an array that the forward saves"))]
        if why := next((value.why for value in told if value.why), None):
            said = f"Rows mix in the backward, or nothing shows that they do not: {why}. Use jax.grad on losses[rows];"
            raise UnsupportedOperation(f"{said} a second forward on batch[rows] costs less, and has another gradient.")
        return twin, facts


def _take(leaf: Any, small: Any, value: Value, rows: Any, num_rows: int) -> Any:
    """K rows of a saved array, to the shape of ``small``, or all of it where it has none."""
    if value.outer is None:
        return leaf
    axis = next(at for at, (n, k) in enumerate(zip(leaf.shape, small.shape, strict=True)) if n != k)
    inner = leaf.shape[axis] // (value.outer * num_rows)
    apart = leaf.reshape(*leaf.shape[:axis], value.outer, num_rows, inner, *leaf.shape[axis + 1 :])
    kept = jnp.take(apart, rows, axis + 1, mode="clip").reshape(small.shape)
    if value.number is None:
        return kept
    own = jax.lax.broadcasted_iota(kept.dtype, kept.shape, axis)
    return own if value.number == WHOLE else kept.at[..., value.number].set(own[..., value.number])


def skip_zeros(pullback: Callable[[Any, Any], Tree], cotangent: Any, *, capacity: int) -> tuple[Tree, Any]:
    """The gradient of a whole cotangent at the cost of ``capacity`` rows: exact if no more of its rows are not zero.

    ``pullback`` and the shape of ``cotangent`` are those of :func:`vjp`. Returns ``(gradient, overflow)``: how many
    rows, int32, are not zero and were left out, as the largest cotangents go first.

    Example:
        >>> losses, pullback = vjp(lambda w, x: jnp.square(x @ w), jnp.ones(2), jnp.ones((4, 2)))
        >>> gradient, overflow = skip_zeros(pullback, jnp.array([0.0, 1.0, 0.0, 0.0]), capacity=2)
        >>> gradient.tolist(), int(overflow)
        ([4.0, 4.0], 0)
    """
    size = jnp.abs(cotangent).reshape(len(cotangent), -1).max(1)
    rows = jax.lax.top_k(size, min(capacity, len(size)))[1]
    return pullback(rows, cotangent[rows]), jnp.maximum(jnp.count_nonzero(size) - capacity, 0)
