"""The table: how each primitive treats the rows of its operands, as facts of its results, or Mixes.

The walk has looked before that both traces have the same parameters. What a rule says as one Value is spoiled where an
operand is, or holds the number of a row that the result does not; a list speaks for each result by itself.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

from rowprop_jax.walk import WHOLE, Facts, Mixes, Op, Value, axis_of_rows, either, joined, rule

WIDE = "int32", "int64", "uint32", "uint64"  # the dtypes that hold the number of each row


def _cut(op: Op, part: Iterable[Any], whole: Any = None) -> list[int]:
    """The axes of which ``part`` does not hold ``whole``, which is their size where it is None."""
    return [at for at, (size, held) in enumerate(zip(op.shapes[0][0], part, strict=True)) if held != (whole or size)]


# Where is the result zero? At a row that is not kept 0 * inf counts as 0.
rule("mul and")(lambda op: op.apart(any(op.zeros)))
rule("add add_any sub max min or xor complex")(lambda op: op.apart(all(op.zeros)))
rule("""neg sign abs floor ceil round real imag conj sqrt cbrt tanh sin tan asin atan sinh asinh atanh expm1 log1p erf
square reduce_precision name div rem stop_gradient sharding_constraint pvary
slice dynamic_slice tile""")(lambda op: op.apart(op.zeros[0]))
rule("integer_pow")(lambda op: op.apart(op.zeros[0] and op.params["y"] > 0))
rule("""exp exp2 log cos acos cosh acosh logistic pow rsqrt eq ne ge le gt not is_finite erfc erf_inv lgamma digamma
clamp nextafter shift_left shift_right_logical shift_right_arithmetic population_count clz atan2 bitcast_convert_type
random_wrap random_unwrap random_seed random_bits random_fold_in random_split random_clone threefry2x32
argmax argmin reduce_prod reduce_and reduce_or reduce_xor reduce_max reduce_min""")(Op.apart)
rule("cumsum cumprod cummax cummin split unstack")(lambda op: op.apart(op.zeros[0], [op.params["axis"]]))
rule("cumlogsumexp top_k")(lambda op: op.apart(along=[op.params["axis"]]))
rule("sort")(lambda op: op.apart(along=[op.params["dimension"]]))
rule("squeeze rev")(lambda op: op.apart(op.zeros[0], op.params["dimensions"]))
rule("cholesky lu eigh svd householder_product")(lambda op: op.apart(along=(-1, -2)))
rule("triangular_solve")(lambda op: op.apart(op.zeros[1], [-2 if op.params["left_side"] else -1]))
rule("fft")(lambda op: op.apart(op.zeros[0], range(-len(op.params["fft_lengths"]), 0)))
rule("dynamic_update_slice")(lambda op: op.apart(all(op.zeros[:2]), _cut(op, op.shapes[1][0])))
rule("pad")(lambda op: op.apart(all(op.zeros), _cut(op, op.params["padding_config"], (0, 0, 0))))
rule("stack")(lambda op: Value(joined(op.ins), all(op.zeros)))
rule("reduce_sum")(lambda op: op.apart(op.zeros[0], sums=True))
rule("dot_general")(lambda op: op.apart(any(op.zeros), sums=True))
rule("convert_element_type")(
    lambda op: replace(op.ins[0], number=op.ins[0].number if op.params["new_dtype"].name in WIDE else None)
)
rule("broadcast_in_dim transpose")(lambda op: replace(op.ins[0], number=WHOLE if op.ins[0].number == WHOLE else None))
rule("copy optimization_barrier")(lambda op: op.ins)


@rule("reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add")
def _windows(op: Op) -> Value:
    wide = [*_cut(op, op.params["window_dimensions"], 1), *_cut(op, op.params["padding"], (0, 0))]
    return op.apart(op.zeros[0] and not op.eqn.primitive.name.endswith(("max", "min")), wide)  # padding is not 0 there


@rule("select_n")
def _select(op: Op) -> Value | Facts:
    which, *cases = op.ins
    if which.zero and which.outer is None and not which.why:
        return cases[:1]  # the choice is 0 at every row
    return op.apart(all(op.zeros[1:]))


@rule("lt")
def _less(op: Op) -> Value | Facts:
    a, b = op.ins
    if a.number == WHOLE and b.zero and b.outer is None and not op.spoiled:
        return [Value(zero=True)]  # a row's number is not below 0
    return op.apart()


@rule("reshape")
def _reshape(op: Op) -> Value:
    value, shape, before, after = op.ins[0], op.outs[0][0], op.axes[0], axis_of_rows(*op.outs[0], op.sizes)
    if before is None or after is None:
        return value
    first, then = prod(op.shapes[0][0][:before]), prod(shape[:after])
    number = WHOLE if value.number == WHOLE and shape[after] == op.sizes[0] else None
    if value.outer is None and (first, op.shapes[0][0][before]) == (then, shape[after]):
        return replace(value, number=number)
    outer, rest = divmod(first * (value.outer or 1), then)  # elements keep their order, row-major
    if rest or shape[after] % (outer * op.sizes[0]) or op.params["dimensions"] is not None:
        raise Mixes("{} splits the axis of the rows")
    return replace(value, outer=outer, number=number)


@rule("concatenate")
def _concatenate(op: Op) -> Value:
    axis, first = op.params["dimension"], op.ins[0].number == WHOLE and op.shapes[0][0][-1] == 1
    value = op.apart(all(op.zeros), [axis])
    if first and axis == len(op.shapes[0][0]) - 1 and all(other.number is None for other in op.ins[1:]):
        return replace(value, number=0)  # the indices (a row's number, ...) of `array[arange(N), ...]`
    return value


@rule("iota")
def _iota(op: Op) -> Value:
    axis = op.params["dimension"]
    if axis_of_rows(*op.outs[0], op.sizes) != axis:
        return Value()
    if op.outs[0][0][axis] != op.sizes[0] or op.params["dtype"].name not in WIDE:
        raise Mixes("{} counts along the axis of the rows")
    return Value(1, number=WHOLE)


@rule("conv_general_dilated")
def _convolution(op: Op) -> Value:
    numbers, axes = op.params["dimension_numbers"], op.axes
    # In the gradient of a kernel rows stand where channels do, and are summed over.
    sums = axes == [numbers.lhs_spec[1], numbers.rhs_spec[1]] and op.params["feature_group_count"] == 1
    if sums or axes == [None, None] or (axes == [numbers.lhs_spec[0], None] and op.params["batch_group_count"] == 1):
        return op.apart(any(op.zeros), sums=sums)
    raise Mixes("{} multiplies a row by another row")


@rule("gather scatter-add scatter scatter-mul scatter-min scatter-max")
def _look(op: Op) -> Facts:
    """Each row reads from itself, or writes into it.

    The index of row i points into row i by a pair of batched axes, or by a column of row numbers.
    """
    (axis, index_axis, *written), number = op.axes, op.ins[1].number
    (shape, _), (index_shape, _), *updates = op.shapes
    moved, _ = updates[0] if updates else op.outs[0]
    window_axes, collapsed, mapped, batched, index_batched = op.params["dimension_numbers"]
    if axis is None:
        own = number is None and index_axis != len(index_shape) - 1
    elif index_axis is None:  # the same places of each row, in windows over all rows
        windows = [at for at in range(len(shape)) if at not in (*collapsed, *batched)]
        own = axis in windows and axis not in mapped and moved[window_axes[windows.index(axis)]] == shape[axis]
    elif axis in batched:
        own = number is None and index_batched[batched.index(axis)] == index_axis
    else:
        own = shape[axis] == op.sizes[0] and number == 0 and mapped[0] == axis and axis in collapsed
    others, none = [op.ins[0], *op.ins[2:]], {axis, index_axis} == {None}
    if not own or any(value.number is not None for value in others) or any((at is None) != none for at in written):
        raise Mixes("{} reads from another row, or writes into it")
    if axis is None and written != [None] and op.eqn.primitive.name == "scatter-add":
        found = op.summed(op.ins[2])  # the gradient of an embedding
    else:
        found = op.apart(all(value.zero for value in others) and not op.params.get("fill_value"))
    return [replace(found, why=found.why or op.spoiled)]


rule("jit remat2")(lambda op: op.walk("jaxpr", op.ins))
rule("call closed_call custom_jvp_call custom_vjp_call")(lambda op: op.walk("call_jaxpr", op.ins))


@rule("custom_linear_solve")
def _linear_solve(op: Op) -> Facts:
    lengths = op.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts = op.ins[first : first + lengths.solve]
    return op.walk("jaxprs", [*consts, *op.ins[sum(lengths) :]], 2)  # by its `solve`; the others are for derivatives


@rule("scan")
def _scan(op: Op) -> Facts:
    first, last = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"]
    if any(n[0] != k[0] for n, k in op.shapes[last:]):
        raise Mixes("{} takes its steps along the rows; jax.vmap keeps them apart")
    return _loop(op, "jaxpr", op.ins[:first], op.ins[first:last], op.ins[last:])


@rule("while")
def _while(op: Op) -> Facts:
    first, last = op.params["cond_nconsts"], op.params["cond_nconsts"] + op.params["body_nconsts"]
    carry = _loop(op, "body_jaxpr", op.ins[first:last], op.ins[last:], [])
    (goes_on,) = op.walk("cond_jaxpr", [*op.ins[:first], *carry])
    if goes_on.why:
        raise Mixes("{} goes on for as long as some row wants")
    return carry


def _loop(op: Op, key: str, consts: Facts, carry: Facts, steps: Facts) -> Facts:
    """What holds of a loop's carry before and after every step, and of what each step gives out."""
    while True:
        outs = op.walk(key, [*consts, *carry, *steps])
        after = [either(a, b) for a, b in zip(carry, outs, strict=False)]
        if after == carry:
            return [*carry, *outs[len(carry) :]]
        carry = after


@rule("cond")
def _cond(op: Op) -> Facts:
    if op.ins[0].why:
        raise Mixes("{} takes the branch that some row wants")
    branches = [op.walk("branches", op.ins[1:], branch) for branch in range(len(op.params["branches"]))]
    return [reduce(either, found) for found in zip(*branches, strict=True)]
