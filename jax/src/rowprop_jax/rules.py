"""The table: how each primitive treats the rows of its operands, as facts of its results, or Mixes.

The walk has looked before that both traces have the same parameters, and looks afterwards that shapes and facts agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

from rowprop_jax.walk import WHOLE, Facts, Mixes, Op, Rows, Value, either, joined, rows_of, rule


def _apart(op: Op, axes: Iterable[int], zero: bool = False) -> Value:
    """The facts after an operation along ``axes``: each row by itself if none of them is the rows'."""
    if op.along(axes):
        raise Mixes("{} works along the axis of the rows")
    return Value(op.rows, zero)


def _without(op: Op, axes: Sequence[int], zero: bool = False) -> Value:
    """The facts after an operation that takes ``axes`` away."""
    return _apart(op, axes, zero).moved(lambda at: at - sum(axis < at for axis in axes))


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
rule("squeeze")(lambda op: _without(op, op.params["dimensions"], op.zeros[0]))
rule("reduce_sum")(
    lambda op: op.summed(*op.ins) if op.along(op.params["axes"]) else _without(op, op.params["axes"], op.zeros[0])
)
rule("reduce_max reduce_min")(lambda op: _without(op, op.params["axes"], op.zeros[0]))
rule("reduce_prod reduce_and reduce_or reduce_xor argmax argmin")(lambda op: _without(op, op.params["axes"]))
rule("unstack")(lambda op: _without(op, [op.params["axis"]], op.zeros[0]))
rule("cumsum cumprod cummax cummin split")(lambda op: _apart(op, [op.params["axis"]], op.zeros[0]))
rule("cumlogsumexp top_k")(lambda op: _apart(op, [op.params["axis"]]))
rule("sort")(lambda op: _apart(op, [op.params["dimension"]]))
rule("rev")(lambda op: _apart(op, op.params["dimensions"], op.zeros[0]))
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
rule("stack")(lambda op: Value(op.rows, all(op.zeros)).moved(lambda at: at + (op.params["axis"] <= at)))


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
    contracted, batched = op.params["dimension_numbers"]
    places, sums, before = list[Rows](), list[Rows](), len(batched[0])
    for value, shape, sum_axes, batch_axes in zip(op.ins, op.shapes, contracted, batched, strict=True):
        free = [axis for axis in range(len(shape)) if axis not in (*sum_axes, *batch_axes)]
        order, lies = [*batch_axes, *[-1] * (before - len(batch_axes)), *free], places
        before += len(free)
        if value.rows and value.rows.axis in sum_axes:
            order, lies = list(sum_axes), sums
        if value.rows:
            lies.append(Rows(order.index(value.rows.axis), value.rows.outer))
    if sums and (places or len(sums) != 2):
        raise Mixes("{} multiplies a row by another row")
    return op.summed(*op.ins) if joined(sums) else Value(joined(places), any(op.zeros))


@rule("conv_general_dilated")
def _convolution(op: Op) -> Value:
    (image, kernel), numbers = op.ins, op.params["dimension_numbers"]
    if image.rows and kernel.rows:  # the gradient of a kernel: rows stand where channels do, and are summed over
        channels = (numbers.lhs_spec[1], numbers.rhs_spec[1]) == (image.rows.axis, kernel.rows.axis)
        joined([Rows(0, image.rows.outer), Rows(0, kernel.rows.outer)])
        if channels and op.params["feature_group_count"] == 1:
            return op.summed(image, kernel)
    elif image.rows is None and kernel.rows is None:
        return Value(zero=any(op.zeros))
    elif image.rows and image.rows.axis == numbers.lhs_spec[0] and op.params["batch_group_count"] == 1:
        return Value(Rows(numbers.out_spec[0], image.rows.outer), any(op.zeros))
    raise Mixes("{} multiplies a row by another row")


def _read(op: Op, dims: Any, taken: Any, batched: Any, index_batched: Any, mapped: Any, ndim: int) -> Rows | None:
    """Where the rows lie in what a gather reads or a scatter writes: as in the index, or else as in the array.

    The index of row i points into row i by a pair of batched axes, or by a column of row numbers.
    """
    (array, index), (shape, index_shape) = op.ins[:2], op.shapes[:2]
    places = [axis for axis in range(ndim) if axis not in dims]  # of the index's axes
    windows = [axis for axis in range(len(shape)) if axis not in taken and axis not in batched]
    if array.number is not None:
        raise Mixes("{} computes with the number of a row")
    if index.rows and index.rows.axis < len(places):
        own, found = array.rows is None and index.number is None, Rows(places[index.rows.axis], index.rows.outer)
        if array.rows:
            joined([Rows(0, array.rows.outer), Rows(0, index.rows.outer)])
            plain = shape[array.rows.axis] == index_shape[index.rows.axis] == op.sizes[0]
            own = plain and index.number == 0 and mapped[0] == array.rows.axis
            if array.rows.axis in batched:
                own = index.number is None and index_batched[list(batched).index(array.rows.axis)] == index.rows.axis
        if own:
            return found
    elif array.rows and index.rows is None and array.rows.axis in windows and array.rows.axis not in mapped:
        return Rows(dims[windows.index(array.rows.axis)], array.rows.outer)
    elif array.rows is None and index.rows is None:
        return None
    raise Mixes("{} reads from another row, or writes into it")


@rule("gather", careful=True)
def _gather(op: Op) -> Value:
    by = op.params["dimension_numbers"]
    axes = by.offset_dims, by.collapsed_slice_dims, by.operand_batching_dims, by.start_indices_batching_dims
    return Value(_read(op, *axes, by.start_index_map, len(op.outs[0][0])), op.zeros[0], why=op.spoiled)


@rule("scatter-add scatter scatter-mul scatter-min scatter-max", careful=True)
def _scatter(op: Op) -> Value:
    (array, _, updates), by = op.ins, op.params["dimension_numbers"]
    axes = by.update_window_dims, by.inserted_window_dims, by.operand_batching_dims, by.scatter_indices_batching_dims
    rows = _read(op, *axes, by.scatter_dims_to_operand_dims, len(op.shapes[2]))
    if updates.number is not None or (rows is None) != (updates.rows is None):
        raise Mixes("{} writes into another row")
    both = joined([rows, updates.rows])
    if both and array.rows is None:
        if op.eqn.primitive.name != "scatter-add":
            raise Mixes("{} writes several rows into one place")
        return replace(op.summed(updates), why=op.spoiled)  # the gradient of an embedding
    into = both and array.rows and joined([array.rows, Rows(array.rows.axis, both.outer)])
    return Value(into, array.zero and updates.zero, why=op.spoiled)


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
