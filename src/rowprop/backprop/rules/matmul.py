"""Matrix products. A contraction over the batch ends in a plain tensor: the weight gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rowprop.backprop.rules.pointwise import local
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.sliced import Densify, RowSlice


def product(op: Any, a: Any, b: Any, a_dims: str, b_dims: str, out_dims: str) -> Any:
    """A product whose dimensions have names: ``bij, bjk -> bik``. If both factors have the rows, both are sliced."""
    first = type(a) is RowSlice
    g, names, other, other_names = (a, a_dims, b, b_dims) if first else (b, b_dims, a, a_dims)
    name = names[g.dim]
    place = other_names.find(name)
    if type(other) is RowSlice:
        if other.dim != place or other.layout.at(g.dim) != g.layout:
            return Densify("both factors are sliced, and not alike")
        g, other = g.merged(), other.merged().values
    elif place >= 0:
        other = g.take(other, place)
    out = op(g.values, other) if first else op(other, g.values)
    place = out_dims.find(name)
    return out if place < 0 else g.like(out, g.layout.at(place))


@rule("mm")
def mm(op: Any, a: Any, b: Any) -> Any:
    """Matrix times matrix."""
    return product(op, a, b, "ij", "jk", "ik")


@rule("bmm")
def bmm(op: Any, a: Any, b: Any) -> Any:
    """Batches of matrices."""
    return product(op, a, b, "bij", "bjk", "bik")


@rule("mv")
def mv(op: Any, a: Any, b: Any) -> Any:
    """Matrix times vector."""
    return product(op, a, b, "ij", "j", "i")


@rule("dot")
def dot(op: Any, a: Any, b: Any) -> Any:
    """Vector times vector."""
    return product(op, a, b, "i", "i", "")


@rule(maybe=("_grouped_mm",))
def grouped_mm(op: Any, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """One matrix per group of rows, as experts have; each group, in its order, is reduced to its kept rows."""
    g, other = (a, b) if type(a) is RowSlice else (b, a)
    if type(g) is not RowSlice or type(other) is RowSlice or offs is None or bias is not None:
        return Densify("the product has no groups, or both factors are gradients")
    contracted = other.ndim == 2 and g.dim == (1 if g is a else 0)
    if g.ndim != 2 or not g.layout.plain or not (contracted or (other.ndim == 3 and g.dim == (0 if g is a else 1))):
        return Densify("the groups are not groups of rows")
    index, order = g.rows.index.sort()
    ends = torch.searchsorted(index, offs.long()).to(offs.dtype)
    values = _reordered(g.values, g.dim, order)
    if contracted:
        other = _reordered(g.take(other, 1 - g.dim), 1 - g.dim, order)
    out = op(*((values, other) if g is a else (other, values)), ends, out_dtype=out_dtype)
    return out if contracted else g.like(_reordered(out, g.dim, order.argsort()))


def _reordered(tensor: Tensor, dim: int, order: Tensor) -> Tensor:
    """The rows in another order, each still in one piece of memory."""
    return tensor.movedim(dim, 0).index_select(0, order).movedim(0, dim)


@rule("addmm")
def addmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A matrix product plus an addend: the addend is plain if the rows are contracted, else a gradient."""
    return _on_top(mm, op, bias, a, b, beta, alpha)


@rule("baddbmm")
def baddbmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Batches of matrix products plus an addend."""
    return _on_top(bmm, op, bias, a, b, beta, alpha)


def _on_top(rule_: Any, op: Any, bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    if type(a) is not RowSlice and type(b) is not RowSlice:
        return Densify("only the addend is sliced")

    def run(x: Tensor, y: Tensor) -> Tensor:
        addend = bias.values if type(bias) is RowSlice else bias
        return op(addend, x, y, beta=beta, alpha=alpha)

    def no_addend(x: Tensor, y: Tensor) -> Tensor:
        return op(x.new_zeros(()), x, y, beta=0, alpha=alpha)

    g, place = (a, a.dim) if type(a) is RowSlice else (b, b.dim)
    contracted = place == a.ndim - 1 if g is a else place == b.ndim - 2
    if contracted:
        return Densify("a sliced addend to a full-size product") if type(bias) is RowSlice else rule_(run, a, b)
    if beta == 0:
        return rule_(no_addend, a, b)
    if type(bias) is RowSlice and bias.layout == g.layout and bias.ndim == a.ndim:
        return rule_(run, a, b)
    return Densify("a dense addend to a sliced product")


@rule("linear_backward")
def linear_backward(op: Any, input: Any, g: Any, weight: Any, mask: Any) -> Any:
    """A linear layer in one piece, as on MPS: the gradients of weight and bias contract over the rows."""
    if type(g) is not RowSlice or type(input) is RowSlice or type(weight) is RowSlice or g.dim == g.ndim - 1:
        return Densify("the batch lies in the layer's width")
    dx, dw, db = op(g.take(input), g.values, weight, mask)
    return (g.like(dx) if mask[0] else dx), dw, db


@rule("linalg_cross")
def cross(op: Any, a: Any, b: Any, *, dim: int = -1) -> Any:
    """The cross product of vectors along a dimension that holds no rows."""
    if type(a) is RowSlice and type(b) is RowSlice:
        a, b = a.merged(), b.merged()
    g = a if type(a) is RowSlice else b
    if dim % g.ndim == g.dim:
        return Densify("the batch lies in the vectors")
    return local(partial(op, dim=dim), a, b)


@rule("_trilinear")
def trilinear(op: Any, *args: Any) -> Any:
    """Three factors, each without the dimensions in its ``expand``; some dimensions are summed over."""
    factors, expands, summed = list(args[:3]), args[3:6], args[6]
    at = [i for i, factor in enumerate(factors) if type(factor) is RowSlice]
    if len(at) != 1:
        return Densify("more than one factor is sliced")
    g: RowSlice = factors[at[0]]
    dims = [[d for d in range(g.ndim + len(expands[at[0]])) if d not in expand] for expand in expands]
    name = dims[at[0]][g.dim]
    for i, factor in enumerate(factors):
        place = dims[i].index(name) if name in dims[i] else None
        if type(factor) is RowSlice:
            factors[i] = g.values
        elif place is not None and factor.shape[place] != g.shape[g.dim]:
            return Densify("a factor is broadcast over the rows")
        elif place is not None:
            factors[i] = g.take(factor, place)
    out = op(*factors, *args[3:])
    return out if name in summed else g.like(out, g.layout.at(name - sum(d < name for d in set(summed))))


@rule("linalg_solve_triangular", "linalg_lu_solve")
def solve(op: Any, a: Any, *rest: Any, **options: Any) -> Any:
    """Systems of equations with a batch in front; the gradient is the right-hand side."""
    *pivots, b = rest
    if type(b) is not RowSlice or type(a) is RowSlice or b.dim >= b.ndim - 2:
        return Densify("the batch lies in the equations")

    def run(a: Tensor, b: Tensor, *columns: Tensor) -> Tensor:
        return op(a, *(c.squeeze(-1) for c in columns), b, **options)

    return local(run, a, b, *(p.unsqueeze(-1) for p in pivots))


@rule("_cdist_backward")
def cdist_backward(op: Any, g: Any, x1: Any, x2: Any, p: float, distances: Any) -> Any:
    """Distances from points (..., P, width) to points (..., R, width): the gradient of the first points."""
    if type(g) is not RowSlice or not x1.shape[:-2] == x2.shape[:-2] == tuple(g.shape[:-2]):
        return Densify("the points are sliced or broadcast")
    place, values = g.ndim - g.dim, g.values.contiguous()
    if place == 1:
        return op(values, x1, g.take(x2, g.dim - 1), p, g.take(distances))
    return g.like(op(values, g.take(x1), x2 if place == 2 else g.take(x2), p, g.take(distances)))
