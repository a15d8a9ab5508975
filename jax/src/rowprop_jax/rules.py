"""The table: how each primitive treats the rows of its operands. What is not here is refused where a row reaches it.

A rule returns facts (:class:`~rowprop_jax.facts.Value`) of the results, or raises Mixes. The walk has looked before
that both traces have the same parameters, and looks afterwards that the rows lie where the shapes of both say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from rowprop_jax.facts import WHOLE, Mixes, Rows, Value, either, joined, reshaped, rows_of
from rowprop_jax.walk import Facts, Op, rule

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


# Shapes.


@rule("broadcast_in_dim")
def _broadcast(op: Op) -> Value:
    value, rows = op.ins[0], rows_of(*op.outs[0], op.sizes)
    if value.rows:
        return value.moved(int(op.params["broadcast_dimensions"][value.rows.axis]))
    return replace(value, rows=rows and Rows(rows.axis, None))


@rule("reshape")
def _reshape(op: Op) -> Value:
    value, shape, rows = op.ins[0], op.outs[0][0], rows_of(*op.outs[0], op.sizes)
    if value.rows is None or rows is None:
        return value
    if op.params["dimensions"] is not None:
        raise Mixes("{} reads in another order")
    number = WHOLE if value.number == WHOLE and shape[rows.axis] == op.sizes[0] else None
    return replace(value, rows=reshaped(value.rows, op.shapes[0], shape, rows.axis, op.sizes[0]), number=number)


@rule("transpose")
def _transpose(op: Op) -> Value:
    value = op.ins[0]
    return value.moved(list(op.params["permutation"]).index(value.rows.axis)) if value.rows else value


@rule("stack")
def _stack(op: Op) -> Value:
    value = Value(op.rows, all(op.zeros))
    return value.moved(value.rows.axis + (op.params["axis"] <= value.rows.axis)) if value.rows else value


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


# Along some axes: for each row by itself if none of them is the rows'.


def _apart(op: Op, axes: Iterable[int], zero: bool = False) -> Value:
    """The facts after an operation along ``axes`` that leaves every axis where it is."""
    rows = op.rows
    if rows and rows.axis in axes:
        raise Mixes("{} works along the axis of the rows")
    return Value(rows, zero)


def _without(op: Op, axes: Sequence[int], zero: bool = False) -> Value:
    """The facts after an operation that takes ``axes`` away."""
    value = _apart(op, axes, zero)
    return value.moved(value.rows.axis - sum(axis < value.rows.axis for axis in axes)) if value.rows else value


def _last(op: Op, count: int) -> range:
    return range(len(op.shapes[0]) - count, len(op.shapes[0]))


def _cut(whole: Sequence[Any], part: Sequence[Any]) -> list[int]:
    """The axes that differ."""
    return [axis for axis, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]


@rule("reduce_sum")
def _reduce_sum(op: Op) -> Value:
    value, axes = op.ins[0], op.params["axes"]
    return op.summed(value) if value.rows and value.rows.axis in axes else _without(op, axes, value.zero)


rule("squeeze")(lambda op: _without(op, op.params["dimensions"], op.zeros[0]))
rule("reduce_max reduce_min")(lambda op: _without(op, op.params["axes"], op.zeros[0]))
rule("reduce_prod reduce_and reduce_or reduce_xor argmax argmin")(lambda op: _without(op, op.params["axes"]))
rule("unstack")(lambda op: _without(op, [op.params["axis"]], op.zeros[0]))
rule("cumsum cumprod cummax cummin split")(lambda op: _apart(op, [op.params["axis"]], op.zeros[0]))
rule("cumlogsumexp top_k")(lambda op: _apart(op, [op.params["axis"]]))
rule("sort")(lambda op: _apart(op, [op.params["dimension"]]))
rule("rev")(lambda op: _apart(op, op.params["dimensions"], op.zeros[0]))
rule("cholesky lu eigh svd householder_product")(lambda op: _apart(op, _last(op, 2)))
rule("triangular_solve")(lambda op: _apart(op, _last(op, 2), op.zeros[1]))
rule("fft")(lambda op: _apart(op, _last(op, len(op.params["fft_lengths"])), op.zeros[0]))
rule("tile")(lambda op: _apart(op, _cut(op.params["reps"], [1] * len(op.shapes[0])), op.zeros[0]))
rule("pad")(lambda op: _apart(op, _cut(op.params["padding_config"], [(0, 0, 0)] * len(op.shapes[0])), all(op.zeros)))


@rule("slice")
def _slice(op: Op) -> Value:
    ones = [1] * len(op.shapes[0])
    given = zip(op.outs[0][0], op.params["start_indices"], op.params["strides"] or ones, strict=True)
    return _apart(op, _cut([(size, 0, 1) for size in op.shapes[0]], list(given)), op.zeros[0])


@rule("dynamic_slice dynamic_update_slice")
def _dynamic(op: Op) -> Value:
    arrays = 2 if op.eqn.primitive.name == "dynamic_update_slice" else 1
    if any(value.rows for value in op.ins[arrays:]):
        raise Mixes("{} starts at another place in each row")
    part = op.shapes[1] if arrays == 2 else op.outs[0][0]
    return _apart(op, _cut(op.shapes[0], part), all(op.zeros[:arrays]))


@rule("reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add")
def _windows(op: Op) -> Value:
    plain = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}
    given = [(op.params[key], one) for key, one in plain.items() if op.params.get(key) is not None]
    return _apart(op, {axis for sizes, one in given for axis in _cut(sizes, [one] * len(sizes))}, op.zeros[0])


# Products.


@rule("dot_general")
def _dot_general(op: Op) -> Value:
    contracted, batched = op.params["dimension_numbers"]
    places, sums, before = list[Rows](), list[Rows](), len(batched[0])
    for value, shape, sum_axes, batch_axes in zip(op.ins, op.shapes, contracted, batched, strict=True):
        free = [axis for axis in range(len(shape)) if axis not in (*sum_axes, *batch_axes)]
        if value.rows and value.rows.axis in sum_axes:
            sums.append(Rows(list(sum_axes).index(value.rows.axis), value.rows.outer))
        elif value.rows:
            order = [*batch_axes, *[-1] * (before - len(batch_axes)), *free]
            places.append(Rows(order.index(value.rows.axis), value.rows.outer))
        before += len(free)
    if sums and (places or len(sums) != 2):
        raise Mixes("{} multiplies a row by another row")
    return op.summed(*op.ins) if joined(sums) else Value(joined(places), any(op.zeros))


@rule("conv_general_dilated")
def _convolution(op: Op) -> Value:
    (image, kernel), numbers = op.ins, op.params["dimension_numbers"]
    if image.rows and kernel.rows:  # the gradient of a kernel: rows stand where channels do, and are summed over
        channels = (numbers.lhs_spec[1], numbers.rhs_spec[1]) == (image.rows.axis, kernel.rows.axis)
        same = joined([Rows(0, image.rows.outer), Rows(0, kernel.rows.outer)])
        if same and channels and op.params["feature_group_count"] == 1:
            return op.summed(image, kernel)
    elif image.rows is None and kernel.rows is None:
        return Value(zero=any(op.zeros))
    elif image.rows and image.rows.axis == numbers.lhs_spec[0] and op.params["batch_group_count"] == 1:
        return Value(Rows(numbers.out_spec[0], image.rows.outer), any(op.zeros))
    raise Mixes("{} multiplies a row by another row")


# Places: indices of each row, into that row or into what all rows share.


def _own(op: Op, batched: Sequence[int], index_batched: Sequence[int], columns: Sequence[int]) -> bool:
    """Whether the index of row i points into row i of the array: by a pair of axes, or by a column of row numbers."""
    array, index = op.ins[0].rows, op.ins[1].rows
    if array is None or index is None or not joined([Rows(0, array.outer), Rows(0, index.outer)]):
        return False
    if array.axis in batched:
        return op.ins[1].number is None and index_batched[list(batched).index(array.axis)] == index.axis
    plain = {op.shapes[0][array.axis], op.shapes[1][index.axis]} == {op.sizes[0]}
    return plain and op.ins[1].number == 0 and columns[0] == array.axis


def _but(ndim: int, *gone: Sequence[int]) -> list[int]:
    """The axes that are left."""
    return [axis for axis in range(ndim) if all(axis not in axes for axes in gone)]


@rule("gather", careful=True)
def _gather(op: Op) -> Value:
    (array, index), numbers = op.ins, op.params["dimension_numbers"]
    places = _but(len(op.outs[0][0]), numbers.offset_dims)  # of the index's axes, in the result
    windows = _but(len(op.shapes[0]), numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    pairs = numbers.operand_batching_dims, numbers.start_indices_batching_dims, numbers.start_index_map
    fact = Value(zero=array.zero, why=op.spoiled)
    if index.rows and index.rows.axis < len(places) and array.number is None:
        if _own(op, *pairs) or (array.rows is None and index.number is None):
            return replace(fact, rows=Rows(places[index.rows.axis], index.rows.outer))
    elif array.rows and array.rows.axis in windows and array.rows.axis not in numbers.start_index_map:
        if index.rows is None and array.number is None:
            return replace(fact, rows=array.rows).moved(numbers.offset_dims[windows.index(array.rows.axis)])
    elif array.rows is None and index.rows is None:
        return fact
    raise Mixes("{} reads from another row")


@rule("scatter-add scatter scatter-mul scatter-min scatter-max", careful=True)
def _scatter(op: Op) -> Value:
    (array, index, updates), numbers = op.ins, op.params["dimension_numbers"]
    places = _but(len(op.shapes[2]), numbers.update_window_dims)  # of the index's axes, in the updates
    windows = _but(len(op.shapes[0]), numbers.inserted_window_dims, numbers.operand_batching_dims)
    pairs = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, numbers.scatter_dims_to_operand_dims
    fact = Value(zero=array.zero and updates.zero, why=op.spoiled)
    numbered = array.number is not None or updates.number is not None
    if index.rows and updates.rows and updates.rows.axis in places and not numbered:
        same = joined([Rows(0, index.rows.outer), Rows(0, updates.rows.outer)])
        if same and places.index(updates.rows.axis) == index.rows.axis:
            if _own(op, *pairs):
                return replace(fact, rows=array.rows)
            if array.rows is None and index.number is None and op.eqn.primitive.name == "scatter-add":
                return replace(op.summed(updates), why=op.spoiled)  # the gradient of an embedding
    elif index.rows is None and updates.rows and updates.rows.axis in numbers.update_window_dims and not numbered:
        place = windows[list(numbers.update_window_dims).index(updates.rows.axis)]
        if place not in numbers.scatter_dims_to_operand_dims:
            return replace(fact, rows=joined([array.rows, Rows(place, updates.rows.outer)]))
    elif not (array.rows or index.rows or updates.rows):
        return fact
    raise Mixes("{} writes into another row")


@rule("random_bits random_fold_in random_split random_clone")
def _random(op: Op) -> Value:
    if op.rows is None and any(n != k for n, k in op.outs):
        raise Mixes("{} draws the numbers of all rows from one key, and for some rows draws others")
    return Value(op.rows)


# Programs in programs.


@rule("jit call closed_call remat2 custom_jvp_call custom_vjp_call", careful=True)
def _call(op: Op) -> Facts:
    key = "jaxpr" if "jaxpr" in op.params else "call_jaxpr"
    return op.walk(op.params[key], op.twin.params[key], op.ins)


@rule("scan", careful=True)
def _scan(op: Op) -> Facts:
    first, last = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"]
    if any(value.rows and value.rows.axis == 0 for value in op.ins[last:]):
        raise Mixes("{} takes its steps along the rows; jax.vmap keeps them apart")
    steps = [value.moved(value.rows.axis - 1) if value.rows else value for value in op.ins[last:]]
    body = op.params["jaxpr"], op.twin.params["jaxpr"]
    carry, outs = _settled(op.ins[first:last], lambda carry: op.walk(*body, [*op.ins[:first], *carry, *steps]))
    return [*carry, *(value.moved(value.rows.axis + 1) if value.rows else value for value in outs[last - first :])]


@rule("while", careful=True)
def _while(op: Op) -> Facts:
    first, last = op.params["cond_nconsts"], op.params["cond_nconsts"] + op.params["body_nconsts"]
    body, test = ((op.params[key], op.twin.params[key]) for key in ("body_jaxpr", "cond_jaxpr"))
    carry, _ = _settled(op.ins[last:], lambda carry: op.walk(*body, [*op.ins[first:last], *carry]))
    (goes_on,) = op.walk(*test, [*op.ins[:first], *carry])
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
    branches = zip(op.params["branches"], op.twin.params["branches"], strict=True)
    return [reduce(either, found) for found in zip(*(op.walk(*branch, ins) for branch in branches), strict=True)]
