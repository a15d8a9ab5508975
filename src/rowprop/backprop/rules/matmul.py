"""Matrix products. A contraction over the batch ends in a plain tensor: the weight gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rowprop.backprop.rowgrad import Sliced
from rowprop.backprop.rules.registry import densify, rule


def product(op: Any, a: Any, b: Any, a_dims: str, b_dims: str, out_dims: str) -> Any:
    """A product whose dimensions are named: ``bij, bjk -> bik``; a dimension that both share is sliced in both."""
    g, names, other, other_names = (a, a_dims, b, b_dims) if type(a) is Sliced else (b, b_dims, a, a_dims)
    name = names[g.dim]
    place = other_names.find(name)
    if type(other) is Sliced:
        if other.rows is not g.rows or other.dim != place or other.layout.at(g.dim) != g.layout or not g.rows.unique:
            return densify("both factors are sliced, and not alike")
        other = other.values
    elif place >= 0:
        other = g.take(other, place)
    out = op(g.values, other) if g is a else op(other, g.values)
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


@rule("addmm")
def addmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A matrix product on top of something: of a plain tensor where the rows are contracted, else of a gradient."""
    return _on_top(mm, op, bias, a, b, beta, alpha)


@rule("baddbmm")
def baddbmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """See :func:`addmm`."""
    return _on_top(bmm, op, bias, a, b, beta, alpha)


def _on_top(rule_: Any, op: Any, bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    if type(a) is not Sliced and type(b) is not Sliced:
        return densify("only the addend is sliced")

    def run(x: Tensor, y: Tensor) -> Tensor:
        addend = bias.values if type(bias) is Sliced else bias
        return op(addend, x, y, beta=beta, alpha=alpha)

    def no_addend(x: Tensor, y: Tensor) -> Tensor:
        return op(x.new_zeros(()), x, y, beta=0, alpha=alpha)

    g, place = (a, a.dim) if type(a) is Sliced else (b, b.dim)
    contracted = place == a.ndim - 1 if g is a else place == b.ndim - 2
    if contracted:
        return densify("a sliced addend to a full-size product") if type(bias) is Sliced else rule_(run, a, b)
    if beta == 0:
        return rule_(no_addend, a, b)
    if type(bias) is Sliced and bias.layout == g.layout and bias.ndim == a.ndim:
        return rule_(run, a, b)
    return densify("a dense addend to a sliced product")
