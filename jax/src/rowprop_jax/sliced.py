"""A backward of K rows from a forward of N: rows of what the forward saved go into JAX's own backward for K rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rowprop_jax import rules as _rules  # noqa: F401  # pyright: ignore  # they enter themselves
from rowprop_jax.walk import WHOLE, Mixes, Rows, Value, rows_of, walk

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

    ``pullback(rows, weights)`` takes integers ``(K,)`` in [-N, N) and weights ``(K,)``, or cotangents ``(K, ...)``. It
    returns the gradient of ``sum(weights * losses[rows])`` at the cost of the backward of K rows (of 2 where K is 1),
    and raises UnsupportedOperation where rows mix in the backward and K < N. Rows may repeat, but not where the
    backward of a ``jax.custom_vjp`` is no linear function of its cotangent.

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
    try:
        forward = _Forward(losses_fn, params, batch, args, has_aux, lean=num_rows > 2)
        if forward.lean:
            forward.prove(2)
    except (TypeError, ValueError, RuntimeError):  # rows mix in what is cheap, or JAX cannot save less
        forward = _Forward(losses_fn, params, batch, args, has_aux, lean=False)
    results = jaxpr_as_fun(forward.program)(*jax.tree.leaves((params, batch, args)))
    losses, residuals, aux = jax.tree.unflatten(jax.tree.structure(forward.shapes), results)

    def pullback(rows: Any, weights: Any) -> Tree:
        rows, weights = jnp.asarray(rows), jnp.asarray(weights, losses.dtype)
        wanted = rows.shape[:1] + losses.shape[1:]
        if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer) or weights.shape != wanted:
            said = f"rows {rows.dtype}{list(rows.shape)} and weights {list(weights.shape)} but integers (K,)"
            raise InvalidInput(f"pullback got {said} and weights of the shape {wanted} were needed.")
        rows = jnp.where(rows < 0, rows + num_rows, rows)
        if len(rows) == 0 or max(len(rows), 2) >= num_rows:
            return residuals(jnp.zeros_like(losses).at[rows].add(weights))[0]
        if len(rows) == 1:  # JAX writes other programs for axes of size 1
            rows, weights = jnp.repeat(rows, 2), jnp.concatenate([weights, jnp.zeros_like(weights)])
        backward, facts = forward.prove(len(rows))
        kept = [_take(*pair, rows, num_rows) for pair in zip(jax.tree.leaves(residuals), facts, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), jaxpr_as_fun(backward)(*kept, weights))

    return (losses, pullback, aux) if has_aux else (losses, pullback)


def _cheap(name: str, params: dict[str, Any]) -> bool:
    """Whether a primitive is cheap, or a function with a derivative of its own, as relu, of which each is."""
    inner = params.get("call_jaxpr", params.get("jaxpr")) if name in ("custom_jvp_call", "jit") else None
    return name in CHEAP or bool(inner and all(_cheap(eqn.primitive.name, eqn.params) for eqn in inner.jaxpr.eqns))


def _unrounded(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program without jax.checkpoint's roundings of what it saves to float32: each would be a pass of its own."""
    rounding, eqns = {"exponent_bits": 8, "mantissa_bits": 23}, list[Any]()
    for eqn in program.jaxpr.eqns:
        none = eqn.params == rounding and eqn.invars[0].aval.dtype == "float32"
        eqns.append(eqn.replace(primitive=jax.lax.copy_p, params={}) if none else eqn)  # which compiles to nothing
    return program.replace(jaxpr=program.jaxpr.replace(eqns=eqns))


def _lean_scans(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program with each step of a scan under jax.checkpoint, so that a step backwards computes again what it needs.

    A scan before it would compute that for all steps, and save it.
    """
    eqns = list[Any]()
    for eqn in program.jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name in ("jit", "scan"):
            params["jaxpr"] = _lean_scans(params["jaxpr"])
        if eqn.primitive.name == "scan":
            step = jax.checkpoint(jaxpr_as_fun(params["jaxpr"]), prevent_cse=False)
            params["jaxpr"] = jax.make_jaxpr(step)(*params["jaxpr"].in_avals)
        eqns.append(eqn.replace(params=params))
    return program.replace(jaxpr=program.jaxpr.replace(eqns=eqns))


class _Forward:
    """A forward as a program of arrays, and the shapes of what it returns: losses, JAX's VJP with what it saves, aux.

    A lean one saves no cheap results: the backward computes them again, for the kept rows alone.
    """

    def __init__(self, losses_fn: Any, params: Tree, batch: Tree, args: Any, has_aux: bool, lean: bool) -> None:
        def lean_fn(*inputs: Any) -> Any:
            program, shapes = jax.make_jaxpr(losses_fn, return_shape=True)(*inputs)
            if program.effects or "remat2[" in str(program):
                raise UnsupportedOperation("Prints print once, and the caller's jax.checkpoint says what is saved.")
            results = jaxpr_as_fun(_lean_scans(program))(*jax.tree.leaves(inputs))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        def costs(op: Any, *_: Any, **params: Any) -> bool:
            return not _cheap(op.name, params)

        def forward(params: Tree, *others: Any) -> Any:
            function = jax.checkpoint(lean_fn, prevent_cse=False, policy=costs) if lean else losses_fn
            found = jax.vjp(lambda params: function(params, *others), params, has_aux=has_aux)
            return found if has_aux else (*found, None)

        self.twin = lambda small: _Forward(losses_fn, params, small, args, has_aux, lean)
        self.batch, self.lean, self.num_params = batch, lean, len(jax.tree.leaves(params))
        program, self.shapes = jax.make_jaxpr(forward, return_shape=True)(params, batch, *args)
        self.program = _unrounded(program)
        shape, num_rows = jnp.shape(self.shapes[0]), len(jax.tree.leaves(batch)[0])
        if shape[:1] != (num_rows,):
            said = f"but one loss for each of the batch's {num_rows} rows was needed; take no mean over rows"
            raise InvalidInput(f"losses_fn returned the shape {shape} {said}.")
        self.backward = jax.make_jaxpr(lambda vjp, losses: vjp(losses)[0])(self.shapes[1], self.shapes[0])

    def prove(self, num_kept: int) -> tuple[Any, list[Value]]:
        """The backward of K rows, and where the rows of each saved array lie, once its gradient is the right one.

        Only the backward has to keep rows apart, whatever was saved: it is linear, so a row that is not kept adds
        nothing to a sum over rows, and the rest is the same program on K rows. The forward just tells which axis of a
        saved array to slice, and any axis that the proof accepts is a right one.
        """
        batch = jax.tree.leaves(self.batch)
        sizes = num_rows, _ = len(batch[0]), num_kept
        small = jax.eval_shape(lambda batch: jax.tree.map(lambda leaf: leaf[:num_kept], batch), self.batch)
        try:
            twin = self.twin(small)
        except (TypeError, ValueError) as error:
            said = f"losses_fn takes {num_rows} rows and not {num_kept} ({str(error).splitlines()[0]})"
            raise UnsupportedOperation(f"{said}; an array with a row for each loss belongs into batch.") from error
        saved, saved_k = jax.tree.leaves(self.shapes[1]), jax.tree.leaves(twin.shapes[1])
        ins = [*[Value()] * self.num_params, *[Value(Rows(0))] * len(batch)]
        ins += [Value()] * (len(self.program.jaxpr.invars) - len(ins))
        told, facts = walk(self.program, twin.program, ins, sizes)[1 : len(saved) + 1], list[Value]()
        try:
            if [(leaf.dtype, leaf.ndim) for leaf in saved] != [(leaf.dtype, leaf.ndim) for leaf in saved_k]:
                raise Mixes("the forward saves other arrays")
            for leaf, leaf_k, value in zip(saved, saved_k, told, strict=True):
                rows = rows_of(leaf.shape, leaf_k.shape, sizes)
                found = rows and value.rows and rows.axis == value.rows.axis and value.rows.outer
                facts.append(Value(value.rows if found else rows, number=None if value.why else value.number))
            told = walk(self.backward, twin.backward, [*facts, Value(Rows(0), zero=True)], sizes)
            why = None
        except Mixes as mixes:
            why = str(mixes).format("an array that the forward saves")
        why = next((value.why for value in told if value.why), why)
        if why:
            said = f"Rows mix in the backward, or nothing shows that they do not: {why}. Use jax.grad on losses[rows];"
            raise UnsupportedOperation(f"{said} a second forward on batch[rows] costs less, and has another gradient.")
        return twin.backward, facts


def _take(leaf: Any, value: Value, rows: Any, num_rows: int) -> Any:
    """K rows of a saved array, or all of it where it has none."""
    if value.rows is None:
        return leaf
    axis, outer, shape = value.rows.axis, value.rows.outer or 1, leaf.shape
    inner = shape[axis] // (outer * num_rows)
    apart = leaf.reshape(*shape[:axis], outer, num_rows, inner, *shape[axis + 1 :])
    kept = jnp.take(apart, rows, axis + 1, mode="clip")
    kept = kept.reshape(*shape[:axis], outer * len(rows) * inner, *shape[axis + 1 :])
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
