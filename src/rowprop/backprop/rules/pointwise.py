"""Elementwise ops: row-local if they map a zero gradient to zero."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.backward import node_name
from rowprop.backprop.rows.refusals import NeedsAllRows, check_readable
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rows.zeros import Zeros, filled
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.watch import note_densified
from rowprop.host import waits


def local(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Elementwise: it runs on the kept rows of operands that have rows; operands that broadcast stay whole."""
    g = args[0] if type(args[0]) is RowSlice else next(a for a in args if type(a) is RowSlice)
    minor = g.layout.minor
    place = g.dim - g.ndim  # counted from the last dimension, where broadcasting aligns
    size = g.shape[place]
    if size == 1 and not minor and any(isinstance(a, Tensor) and a.ndim >= -place and a.shape[place] > 1 for a in args):
        return Densify("a batch of one row is broadcast")
    kept: list[Any] = []
    for a in args:
        if type(a) is RowSlice:
            if a is not g and not g.aligned(a):
                return Densify("operands hold their rows in different dimensions")
            kept.append(a.values)
        elif not isinstance(a, Tensor):
            kept.append(a)
        elif minor:
            kept.append(_at_positions(g, a))
        elif a.ndim >= -place and a.shape[place] == size:
            kept.append(g.take(a, a.ndim + place))
        else:
            kept.append(a)
    return _like(g, op(*kept, **kwargs), place)


def _at_positions(g: RowSlice, tensor: Tensor) -> Tensor:
    """The kept positions of an operand that has all, some or none of the dimensions that they lie in."""
    if tensor.shape == g.shape:
        return g.take(tensor)
    places = {part.dim - g.ndim for part in g.layout.parts}
    has = [p for p in places if tensor.ndim >= -p and tensor.shape[p] != 1]
    if any(tensor.shape[p] != g.shape[p] for p in has):
        raise NeedsAllRows("a batch of one row is broadcast")
    if not has:
        return tensor
    whole = tensor[(None,) * max(0, -min(places) - tensor.ndim)]
    n = whole.ndim
    whole = whole.expand([g.shape[d - n] if d - n in places else size for d, size in enumerate(whole.shape)])
    return g.take(whole, n + g.dim - g.ndim)


def _like(g: RowSlice, out: Any, place: int) -> Any:
    if isinstance(out, Tensor):
        return g.like(out, g.layout.at(out.ndim + place))
    return tuple(_like(g, o, place) for o in out)


# Linear in the gradient, whatever the other operands are.
rule(
    "neg", "mul.Scalar", "div.Scalar", "threshold_backward", "gelu_backward", "silu_backward", "mish_backward",
    "sigmoid_backward", "tanh_backward", "logit_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward",
    "hardsigmoid_backward", "hardswish_backward", "hardshrink_backward", "softshrink_backward", "softplus_backward",
    "log_sigmoid_backward", "rrelu_with_noise_backward", "native_dropout_backward", "_prelu_kernel_backward",
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "soft_margin_loss_backward",
    "binary_cross_entropy_backward", "_conj_physical", positions=True,
)(local)  # fmt: skip


@rule("_to_copy", positions=True)
def to_copy(op: Any, g: RowSlice, **kwargs: Any) -> Any:
    """A cast keeps the rows; a move to another device densifies."""
    if kwargs.get("device") not in (None, g.values.device):
        return Densify("the gradient moves to another device")
    return g.like(op(g.values, dtype=kwargs.get("dtype")))


@rule("mul.Tensor", fills_zeros=True, positions=True)
def mul(op: Any, a: Any, b: Any) -> Any:
    """Linear in each operand. A product of two gradients is not, so rows that repeat are added up first."""
    a = filled(a)
    if type(a) is Zeros or type(b) is Zeros:
        zeros, other = (a, b) if type(a) is Zeros else (b, a)
        fits = not isinstance(other, Tensor) or other.ndim == 0 or other.shape == zeros.shape
        return zeros if fits else Densify("the operand is a new tensor of zeros")
    if type(a) is RowSlice and type(b) is RowSlice:
        a, b = a.merged(), b.merged()
    return local(op, a, b)


@rule("div.Tensor", "xlogy.Tensor", "special_xlog1py", positions=True)
def div(op: Any, a: Any, b: Any) -> Any:
    """A gradient divided by, or times the logarithm of, a plain operand: zero stays zero."""
    if type(a) is not RowSlice or type(b) is RowSlice:
        return Densify("division by the gradient does not map zero to zero")
    return local(op, a, b)


# These ops map zero to zero but are not linear: rows that repeat are added up first.
@rule("abs", "sgn", "sign", "sqrt", "sin", "sinh", "tan", "tanh", "asin", "asinh", "atan", "expm1", "log1p", "relu",
      "erf", "floor", "ceil", "round", "trunc", "nan_to_num", "isnan", positions=True)  # fmt: skip
def nonlinear(op: Any, g: RowSlice, *args: Any, **kwargs: Any) -> Any:
    """Elementwise, with f(0) = 0."""
    return local(op, g.merged(), *args, **kwargs)


@rule(
    "_fake_quantize_learnable_per_tensor_affine_backward", "_fake_quantize_learnable_per_channel_affine_backward",
    positions=True,
)  # fmt: skip
def fake_quantize_backward(op: Any, g: Any, input: Any, scale: Any, zero: Any, *rest: Any) -> Any:
    """The gradients of the scale and the zero point, of all elements or of a channel each, are sums over the rows."""
    channels = "channel" in op.__name__
    if type(g) is not RowSlice or type(input) is RowSlice or (channels and g.layout.holds(rest[0] % g.ndim)):
        return Densify("the batch lies in the channels")
    to_input, *sums = op(g.values, g.take(input), scale, zero, *rest)
    return g.like(to_input), *sums


@rule("pow.Tensor_Scalar", positions=True)
def power(op: Any, g: RowSlice, exponent: float) -> Any:
    """A power of the gradient: 0 ** p = 0 for positive p only."""
    if not exponent > 0:
        return Densify("the power does not map zero to zero")
    return nonlinear(op, g, exponent)


@rule("clamp", positions=True)
def clamp(op: Any, g: RowSlice, low: float | None = None, high: float | None = None) -> Any:
    """Row-local if zero is within the bounds."""
    if (low is not None and low > 0) or (high is not None and high < 0):
        return Densify("the bounds exclude zero")
    return nonlinear(op, g, low, high)


@rule("masked_fill.Scalar", "masked_fill.Tensor", positions=True)
def masked_fill(op: Any, g: Any, mask: Any, value: Any) -> Any:
    """Row-local if the value filled in is zero."""
    if type(g) is not RowSlice or not is_zero(value):
        return Densify("a value that may not be zero is filled in")
    return local(op, g, mask, value)


@rule("where.self", fills_zeros=True, positions=True)
def where(op: Any, condition: Any, a: Any, b: Any) -> Any:
    """Row-local if the branch that is not a gradient is zero."""
    zero_elsewhere = all(type(x) in (RowSlice, Zeros) or is_zero(x) or _unfilled(x) for x in (a, b))
    if type(condition) in (RowSlice, Zeros) or RowSlice not in (type(a), type(b)) or not zero_elsewhere:
        return Densify("the other branch may not be zero")
    # Since torch 2.14 the formula of cumprod makes its zeros from the gradient.
    a, b = (torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape) if type(x) is Zeros else x for x in (a, b))
    return local(op, condition, a, b)


def _unfilled(value: Any) -> bool:
    """Whether a full-size tensor is the zeros that the formula of ``cumprod`` fills in, part by part."""
    if not isinstance(value, Tensor) or not node_name().startswith("CumprodBackward"):
        return False
    check_readable(value, "whether a part of a running product's gradient is still zero")
    return not value.any()


_FILLS_ZEROS = re.compile(r"(Where|Clamp|ClampMin|ClampMax|MaskedFill|Nextafter|Pow|Sinc)Backward\d+")
"""Nodes whose formulas hand ``where`` a 0-d tensor beside the gradient (derivatives.yaml): it is zero in each."""


def is_zero(value: Any) -> bool:
    """Whether a number or a 0-d tensor is zero: read off where it can be, else known from the formula that made it."""
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float)) and value == 0
    if value.ndim > 0:
        return False
    if not waits(value):
        return value.item() == 0
    return _FILLS_ZEROS.fullmatch(node_name()) is not None


@rule("add.Tensor", "sub.Tensor", fills_zeros=True, positions=True)
def add(op: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """Two gradients of the same rows add at K rows."""
    if type(a) is RowSlice and type(b) is RowSlice:
        if not a.aligned(b):
            return Densify("operands hold their rows in different dimensions")
        return (a if a.ndim >= b.ndim else b).like(op(a.values, b.values, alpha=alpha))
    if type(a) is Zeros and type(b) is RowSlice and a.shape == b.shape and alpha == 1 and op.__name__.startswith("add"):
        return b
    if type(b) is Zeros and type(a) is RowSlice and a.shape == b.shape:
        return a
    if type(a) is Zeros and type(b) is Zeros and a.shape == b.shape:
        return a
    if type(a) is Zeros or type(b) is Zeros:
        return Densify("the operand is a new tensor of zeros")
    g, other = cast("tuple[RowSlice, Any]", (a, b) if type(a) is RowSlice else (b, a))
    if not isinstance(other, Tensor) or other.shape != g.shape or other.dtype != g.values.dtype:
        return Densify("adding something that is not a gradient does not map zero to zero")
    origin = g.rows.origin
    if origin is None or (g.rows.unique and not g.rows.moved) or g.rows.num_rows >= origin.num_rows:
        added = "is added to it: a mean that losses are divided by, or pairs of"
        if not g.layout.minor:
            return Densify(f"a gradient of all rows {added} rows; detach() a mere scale")
        others = "exact attention, whose keys and values are of all tokens"
        remedy = "attention='cut' leaves out those of tokens that are not kept, detach() a mere scale"
        return Densify(f"a gradient of all tokens {added} tokens, or {others}; {remedy}")
    # Positions of a parameter, such as a prefix: few, and none of them a row of the batch.
    return op(g.dense(), other, alpha=alpha) if g is a else op(other, g.dense(), alpha=alpha)


@rule("add_.Tensor", positions=True)
def add_in_place(op: Any, out: Tensor, g: Any, *, alpha: Any = 1) -> Any:
    """A leaf adds a gradient to the ``.grad`` that it has already; autograd adds one to a dense one, to go on with."""
    if out.shape != g.shape or out.dtype != g.values.dtype:
        return Densify("shapes or dtypes differ")
    if not node_name().endswith("AccumulateGrad"):
        note_densified("add_.Tensor", "it is added to a gradient of all rows")
    return g.add_into(out, alpha)


@rule("copy_", fills_zeros=True, positions=True)
def copy_in_place(op: Any, out: Any, g: Any, non_blocking: bool = False) -> Any:
    """A leaf copies a gradient into a ``.grad`` of another memory layout."""
    if type(g) is not RowSlice or not isinstance(out, Tensor) or out.shape != g.shape or out.dtype != g.values.dtype:
        return Densify("shapes or dtypes differ")
    if out.is_conj() or out.is_neg():
        return Densify("a lazy conjugate or negative is written to")
    return g.add_into(out.zero_())


@rule("copy", fills_zeros=True, positions=True)
def copy(op: Any, out: Any, g: Any, non_blocking: bool = False) -> Any:
    """A gradient overwrites the whole of a tensor: of zeros, of another gradient, in a graph of anything."""
    if type(out) is RowSlice and type(g) is Zeros and out.shape == g.shape:
        return out.like(torch.zeros_like(out.values))
    if type(g) is not RowSlice or out.shape != g.shape:
        return Densify("not the whole of a gradient is overwritten by another")
    if type(out) is RowSlice and out.layout != g.layout:
        return Densify("operands hold their rows in different dimensions")
    if g.values.dtype != cast(Any, out.values if type(out) is RowSlice else out).dtype:
        return Densify("dtypes differ")
    if type(out) is RowSlice:  # views of it may be written to: its order in memory stays
        return g.like(torch.empty_like(out.values).copy_(g.values))
    return g.like(g.values.clone(memory_format=torch.contiguous_format))


@rule("zero", "zeros_like", "new_zeros", fills_zeros=True, positions=True)
def zeros(op: Any, g: Any, size: Sequence[int] | None = None, **kwargs: Any) -> Any:
    """Zeros have no rows yet; they take the layout of the gradient written into them."""
    source = g.values if type(g) is RowSlice else g
    if kwargs.get("device") not in (None, source.device):
        return Densify("the zeros live on another device")
    layout, rows = g.layout if size is None or tuple(size) == g.shape else None, g.rows
    if layout is None and rows.lender is not None and tuple(size or ()) == (rows.lender.memory.size,):
        rows, layout, _ = rows.lender  # the memory that some rows were copied from, to put them back
    return Zeros(g.shape if size is None else size, kwargs.get("dtype") or source.dtype, source.device, rows, layout)


@rule("new_empty_strided", positions=True)
def new_empty_strided(op: Any, g: RowSlice, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Any:
    """Plain for a leaf's ``.grad``; zeros to copy a gradient into while an in-place op on a view is undone."""
    if not g.rows.copying:
        return fresh(op, g, size, stride, **kwargs)
    if is_contiguous(size, stride):
        return zeros(op, g, size, **kwargs)
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    if tuple(size) != g.shape or not is_contiguous([size[d] for d in order], [stride[d] for d in order]):
        return Densify("an in-place op on a view of a tensor with gaps in memory; write out of place")
    out = g.like(g.zeros(g.kept_shape(g.shape), order))
    out.order = order
    return out


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides put the elements in order and without gaps."""
    step = 1
    for length, distance in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and distance != step:
            return False
        step *= length
    return True


@rule("new_empty", "empty_like", "ones_like", "new_ones", "new_full", "full_like", positions=True)
def fresh(op: Any, g: RowSlice, *args: Any, **kwargs: Any) -> Any:
    """A new full-size plain tensor, without values of the gradient."""
    return op(g.values.new_empty(()).expand(g.shape) if "like" in op.__name__ else g.values, *args, **kwargs)


@rule("detach", positions=True)
def leaf(op: Any, g: RowSlice) -> Tensor:
    """A leaf keeps its first gradient, so it receives a plain tensor."""
    return g.dense()


@rule("clone", positions=True)
def clone(op: Any, g: RowSlice, *, memory_format: torch.memory_format | None = None) -> Any:
    """A copy for a formula to work on stays sliced; a copy that ``retain_grad`` or a leaf keeps is a plain tensor."""
    if g.rows.copying:
        return g.like(g.values.clone(memory_format=torch.contiguous_format))
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        out = g.like(g.values.contiguous(memory_format=memory_format))
        out.order = [0, *range(2, g.ndim), 1]  # a kernel may need all rows so in memory
        return out
    return g.dense()
