"""The table: how each primitive treats the rows of its operands, as facts of its results, or Mixes.

The walk has looked before that both traces have the same parameters, and looks afterwards that shapes and facts agree.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

from rowprop_jax.walk import WHOLE, Facts, Mixes, Op, Rows, Shape, Value, either, rows_of, rule


def _apart(op: Op, axes: Iterable[int], zero: bool = False) -> Value:
    """The facts after an operation along ``axes``: each row by itself if none of them is the rows'."""
    if op.along(axes):
        raise Mixes("{} works along the axis of the rows")
    return Value(op.lies, zero)


def _cut(op: Op, part: Iterable[Any], whole: Any = None) -> list[int]:
    """The axes of which ``part`` does not hold ``whole``, which is their size where it is None."""
    return [at for at, (size, held) in enumerate(zip(op.shapes[0], part, strict=True)) if held != (whole or size)]


# Element by element: where is the result zero? At a row that is not kept 0 * inf counts as 0.
rule("mul and")(lambda op: Value(op.rows, any(op.zeros)))
rule("add add_any sub max min or xor complex")(lambda op: Value(op.rows, all(op.zeros)))
rule("""neg sign abs floor ceil round real imag conj sqrt cbrt tanh sin tan asin atan sinh asinh atanh expm1 log1p erf
square reduce_precision name div rem stop_gradient sharding_constraint pvary""")(lambda op: Value(op.rows, op.zeros[0]))
rule("integer_pow")(lambda op: Value(op.rows, op.zeros[0] and op.params["y"] > 0))
rule("""exp exp2 log cos acos cosh acosh logistic pow rsqrt eq ne ge le gt not is_finite erfc erf_inv lgamma digamma
clamp nextafter shift_left shift_right_logical shift_right_arithmetic population_count clz atan2 bitcast_convert_type
random_wrap random_unwrap random_seed threefry2x32""")(lambda op: Value(op.rows))
rule("convert_element_type copy")(lambda op: op.ins[0])
rule("optimization_barrier", careful=True)(lambda op: op.ins)
# Along some axes.
rule("reduce_sum")(
    lambda op: op.summed(*op.ins) if op.along(op.params["axes"]) else _apart(op, op.params["axes"], op.zeros[0])
)
rule("reduce_max reduce_min")(lambda op: _apart(op, op.params["axes"], op.zeros[0]))
rule("reduce_prod reduce_and reduce_or reduce_xor argmax argmin")(lambda op: _apart(op, op.params["axes"]))
rule("cumsum cumprod cummax cummin split unstack")(lambda op: _apart(op, [op.params["axis"]], op.zeros[0]))
rule("cumlogsumexp top_k")(lambda op: _apart(op, [op.params["axis"]]))
rule("sort")(lambda op: _apart(op, [op.params["dimension"]]))
rule("squeeze rev")(lambda op: _apart(op, op.params["dimensions"], op.zeros[0]))
rule("cholesky lu eigh svd householder_product")(lambda op: _apart(op, range(len(op.shapes[0]))[-2:]))
rule("triangular_solve")(lambda op: _apart(op, range(len(op.shapes[0]))[-2:], op.zeros[1]))
rule("fft")(lambda op: _apart(op, range(len(op.shapes[0]))[-len(op.params["fft_lengths"]) :], op.zeros[0]))
rule("slice dynamic_slice")(lambda op: _apart(op, _cut(op, op.outs[0][0]), op.zeros[0]))
rule("dynamic_update_slice")(lambda op: _apart(op, _cut(op, op.shapes[1]), all(op.zeros[:2])))
rule("tile")(lambda op: _apart(op, _cut(op, op.params["reps"], 1), op.zeros[0]))
rule("pad")(lambda op: _apart(op, _cut(op, op.params["padding_config"], (0, 0, 0)), all(op.zeros)))


@rule("reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add")
def _windows(op: Op) -> Value:
    plain = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}
    given = [(op.params[key], one) for key, one in plain.items() if op.params.get(key) is not None]
    return _apart(op, {axis for sizes, one in given for axis in _cut(op, sizes, one)}, op.zeros[0])


@rule("select_n", careful=True)
def _select(op: Op) -> Value:
    which, *cases = op.ins
    if which.zero and (which.rows is None or which.rows.outer is None) and not which.why:
        return cases[0]  # the choice is 0 at every row
    return Value(op.rows, all(op.zeros[1:]), why=op.spoiled or op.counts)


@rule("lt", careful=True)
def _less(op: Op) -> Value:
    a, b = op.ins
    if a.number == WHOLE and a.rows and b.zero and b.rows is None:
        return Value(Rows(a.rows.axis, None), zero=True, why=op.spoiled)  # a row's number is not below 0
    return Value(op.rows, why=op.spoiled or op.counts)


@rule("broadcast_in_dim")
def _broadcast(op: Op) -> Value:
    value, rows = op.ins[0], rows_of(*op.outs[0], op.sizes)
    if value.rows:
        return value.moved(lambda at: int(op.params["broadcast_dimensions"][at]))
    return replace(value, rows=rows and Rows(rows.axis, None))


@rule("reshape")
def _reshape(op: Op) -> Value:
    value, shape, rows = op.ins[0], op.outs[0][0], rows_of(*op.outs[0], op.sizes)
    if value.rows is None or rows is None:
        return value
    if op.params["dimensions"] is not None:
        raise Mixes("{} reads in another order")
    axis, outer = rows.axis, value.rows.outer
    if outer is not None:  # elements keep their order, row-major
        outer, rest = divmod(prod(op.shapes[0][: value.rows.axis]) * outer, prod(shape[:axis]))
        if rest or shape[axis] % (outer * op.sizes[0]):
            raise Mixes("{} splits the axis of the rows")
    number = WHOLE if value.number == WHOLE and shape[axis] == op.sizes[0] else None
    return replace(value, rows=Rows(axis, outer), number=number)


rule("transpose")(lambda op: op.ins[0].moved(list(op.params["permutation"]).index))
rule("stack")(lambda op: Value(op.lies, all(op.zeros)))


@rule("concatenate")
def _concatenate(op: Op) -> Value:
    axis, first = op.params["dimension"], op.ins[0].number == WHOLE and op.shapes[0][-1] == 1
    value = _apart(op, [axis], all(op.zeros))
    if first and axis == len(op.shapes[0]) - 1 and all(other.number is None for other in op.ins[1:]):
        return replace(value, number=0)  # the indices (a row's number, ...) of `array[arange(N), ...]`
    return value


@rule("iota")
def _iota(op: Op) -> Value:
    rows = rows_of(*op.outs[0], op.sizes)
    if rows is None or rows.axis != op.params["dimension"]:
        return Value(rows and Rows(rows.axis, None))
    if op.outs[0][0][rows.axis] != op.sizes[0]:
        raise Mixes("{} counts along an axis that holds more than the rows")
    return Value(rows, number=WHOLE)


@rule("dot_general")
def _dot_general(op: Op) -> Value:
    contracted, _ = op.params["dimension_numbers"]
    if any(value.rows and value.rows.axis in axes for value, axes in zip(op.ins, contracted, strict=True)):
        return op.summed(*op.ins)
    return Value(op.lies, any(op.zeros))


@rule("conv_general_dilated")
def _convolution(op: Op) -> Value:
    numbers, axes = op.params["dimension_numbers"], [value.rows and value.rows.axis for value in op.ins]
    if axes == [numbers.lhs_spec[1], numbers.rhs_spec[1]] and op.params["feature_group_count"] == 1:
        return op.summed(*op.ins)  # the gradient of a kernel: rows stand where channels do, and are summed over
    if axes == [None, None] or (axes == [numbers.lhs_spec[0], None] and op.params["batch_group_count"] == 1):
        return Value(op.lies, any(op.zeros))
    raise Mixes("{} multiplies a row by another row")


def _look(op: Op, moved: Shape) -> None:
    """Refuse a gather that reads from another row, and a scatter that writes into it; ``moved`` is what goes over.

    The index of row i points into row i by a pair of batched axes, or by a column of row numbers.
    """
    (array, index), (shape, index_shape) = op.ins[:2], op.shapes[:2]
    window_axes, collapsed, mapped, batched, index_batched = op.params["dimension_numbers"]
    if array.rows is None:
        own = index.number is None and (index.rows is None or index.rows.axis < len(index_shape) - 1)
    elif index.rows is None:  # the same places of each row, in windows over all rows
        windows, axis = [at for at in range(len(shape)) if at not in (*collapsed, *batched)], array.rows.axis
        own = axis in windows and axis not in mapped and moved[window_axes[windows.index(axis)]] == shape[axis]
    elif array.rows.axis in batched:
        own = index.number is None and index_batched[batched.index(array.rows.axis)] == index.rows.axis
    else:
        plain = shape[array.rows.axis] == index_shape[index.rows.axis] == op.sizes[0]
        own = plain and index.number == 0 and mapped[0] == array.rows.axis and array.rows.axis in collapsed
    if not own or array.number is not None:
        raise Mixes("{} reads from another row, or writes into it")


@rule("gather", careful=True)
def _gather(op: Op) -> Value:
    _look(op, op.outs[0][0])
    return Value(op.lies, op.zeros[0], why=op.spoiled)


@rule("scatter-add scatter scatter-mul scatter-min scatter-max", careful=True)
def _scatter(op: Op) -> Value:
    array, index, updates = op.ins
    _look(op, op.shapes[2])
    if updates.number is not None or (updates.rows is None) != (array.rows is None and index.rows is None):
        raise Mixes("{} writes into another row")
    if updates.rows and array.rows is None:
        if op.eqn.primitive.name != "scatter-add":
            raise Mixes("{} writes several rows into one place")
        total = op.summed(updates)  # the gradient of an embedding
        return replace(total, why=total.why or op.spoiled)
    return Value(op.lies, array.zero and updates.zero, why=op.spoiled)


@rule("random_bits random_fold_in random_split random_clone")
def _random(op: Op) -> Value:
    if op.rows is None and any(n != k for n, k in op.outs):
        raise Mixes("{} draws the numbers of all rows from one key, and for some rows draws others")
    return Value(op.rows)


rule("jit remat2", careful=True)(lambda op: op.walk("jaxpr", op.ins))
rule("call closed_call custom_jvp_call custom_vjp_call", careful=True)(lambda op: op.walk("call_jaxpr", op.ins))


@rule("scan", careful=True)
def _scan(op: Op) -> Facts:
    first, last = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"]
    if any(value.rows and value.rows.axis == 0 for value in op.ins[last:]):
        raise Mixes("{} takes its steps along the rows; jax.vmap keeps them apart")
    steps = [value.moved(lambda at: at - 1) for value in op.ins[last:]]
    carry, outs = _settled(op.ins[first:last], lambda carry: op.walk("jaxpr", [*op.ins[:first], *carry, *steps]))
    return [*carry, *(value.moved(lambda at: at + 1) for value in outs[last - first :])]


@rule("while", careful=True)
def _while(op: Op) -> Facts:
    first, last = op.params["cond_nconsts"], op.params["cond_nconsts"] + op.params["body_nconsts"]
    carry, _ = _settled(op.ins[last:], lambda carry: op.walk("body_jaxpr", [*op.ins[first:last], *carry]))
    (goes_on,) = op.walk("cond_jaxpr", [*op.ins[:first], *carry])
    if goes_on.rows or goes_on.why:
        raise Mixes("{} goes on for as long as some row wants")
    return carry


def _settled(carry: Facts, step: Callable[[Facts], Facts]) -> tuple[Facts, Facts]:
    """What holds of a loop's carry before and after every step, and of the results of a step."""
    while True:
        outs = step(carry)
        after = [either(a, b) for a, b in zip(carry, outs, strict=False)]
        if after == carry:
            return carry, outs
        carry = after


@rule("cond", careful=True)
def _cond(op: Op) -> Facts:
    which, *ins = op.ins
    if which.rows or which.why:
        raise Mixes("{} takes the branch that some row wants")
    branches = [op.walk("branches", ins, branch) for branch in range(len(op.params["branches"]))]
    return [reduce(either, found) for found in zip(*branches, strict=True)]
