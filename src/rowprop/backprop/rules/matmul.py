"""Matrix products. A contraction over the batch ends in a plain tensor: the weight gradient.

Tokens of sequences lie in two dimensions, (batch, time, width), as in attention written as products: each sequence is
then a product by itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows.layout import Layout, transpose
from rowprop.backprop.rows.sequences import Sequences, in_front, put_back, sequences_of
from rowprop.backprop.rows.slice import Densify, RowSlice, sliced_again, whole_rows
from rowprop.backprop.rules.apply import apply_rule
from rowprop.backprop.rules.pointwise import local
from rowprop.backprop.rules.registry import RULES, op_name, rule
from rowprop.backprop.rules.rowlocal import Call
from rowprop.backprop.watch import note, note_densified
from rowprop.native import reads

_DIMS = {(2, 2): ("ij", "jk", "ik"), (3, 3): ("bij", "bjk", "bik"), (2, 1): ("ij", "j", "i"), (1, 1): ("i", "i", "")}
"""Names of the dimensions of two factors and of their product, by the numbers of the factors' dimensions."""

_PLACES = {
    (*ndims, first, dim): (other.find(name), out.find(name))
    for ndims, (a, b, out) in _DIMS.items()
    for first, own, other in ((True, a, b), (False, b, a))
    for dim, name in enumerate(own)
}
"""Where a dimension of the first or second factor lies in the other one, and in the product; -1: nowhere."""


@rule("mv", "dot")
@rule("mm", "bmm", positions=True)
def product(op: Any, a: Any, b: Any) -> Any:
    """A product of matrices, batches of them or vectors; if both factors have the rows, both are sliced."""
    first = type(a) is RowSlice
    g, other = (a, b) if first else (b, a)
    layout: Layout = g.layout
    if layout.minor and any(part.dim != g.dim for part in layout.minor):
        return _of_tokens(op, a, b)
    place, free = _PLACES[a.ndim, b.ndim, first, g.dim]
    if type(other) is RowSlice:
        if other.dim != place or other.layout.at(g.dim) != layout:
            return Densify("both factors are sliced, and not alike")
        g, other = g.merged(), other.merged().values
    elif place >= 0:
        other = g.take(other, place)
    values = g.values
    if free >= 0:
        return g.like(op(values, other) if first else op(other, values), layout.at(free))
    if g.rows.hook is not None and op is torch.ops.aten.mm.default:
        g.rows.hook.measure_product(g.rows, layout.at(0), values.movedim(g.dim, 0), other.movedim(place, 0))
    out = op(values, other) if first else op(other, values)
    keys = _place_of_keys(first) if g.rows.attention == "cut" and out.ndim == 3 else None
    if keys is None or not layout.plain:
        return out
    time = 3 - keys if first else keys
    if out.shape[time] != g.rows.num_rows:
        return out
    note("cut", op_name(op))  # of a batch of one, as packed sequences are, these are the keys of kept queries
    return sliced_again(out, g.rows, Layout(time, g.rows.num_rows))


# --- tokens of sequences ----------------------------------------------------------------------------------------------


def _of_tokens(op: Any, a: Any, b: Any, turned: bool = False) -> Any:
    """A product of tokens that lie in the batch and in one more dimension; other places of them take whole rows."""
    g, other = cast(Any, (a, b) if type(a) is RowSlice else (b, a))
    found = (sequences_of(g, dim) for dim in (1, 2) if g.ndim == 3)
    kept = next((k for k in found if k is not None), None)
    if kept is None or type(other) is RowSlice:
        return apply_rule(RULES[op], op, [whole_rows(a), whole_rows(b)], {})
    if kept.time.dim == 2:  # a product is the transpose of its factors' transposes
        out = _of_tokens(op, _transposed(b), _transposed(a), True)
        return out if type(out) is Densify else _transposed(out)
    keys = _place_of_keys(turned) if g.rows.attention == "cut" else None
    if g is a:
        return _free(op, kept, other)
    out = _contracted(op, kept, other)
    if keys is not None and out.shape[keys] == kept.time.size:
        note("cut", op_name(op))
        return kept.of_kept(out, keys)
    if g.rows.attention == "cut":
        known = "not cut: keys are known by a softmax over as many scores as there are queries"
        note_densified(op_name(op), f"{known}; scaled_dot_product_attention is cut")
    return out


def _transposed(x: Any) -> Any:
    return x.like(x.values.mT, transpose(x.layout, 1, 2)) if type(x) is RowSlice else x.mT


def _free(op: Any, kept: Sequences, other: Tensor) -> RowSlice:
    """``out[b, t, k] = g[b, t, d] @ other[b, d, k]``: kept tokens times the matrix of their sequence."""
    values, matrices = in_front(kept.g.values, kept.within), in_front(other, kept.batch)  # (K, b, t, d), (N, b, d, k)
    out = values.new_empty(*values.shape[:-1], other.shape[2])
    for group in kept.groups(2 * matrices[0].numel()):
        tokens = group.of(values)
        found = op(_joined(tokens), group.part(matrices).flatten(0, 1))
        found = found.view(*tokens.transpose(1, 2).shape[:-1], -1).transpose(1, 2)
        out.index_copy_(0, group.entries.flatten(), found.flatten(0, 1))  # a token that is repeated is written again
    return kept.g.like(put_back(out, kept.within))


def _contracted(op: Any, kept: Sequences, other: Tensor) -> Tensor | RowSlice:
    """``out[b, p, q] = other[b, p, t] @ g[b, t, q]``: for each sequence a sum over its kept tokens."""
    values = in_front(kept.g.values, kept.within)  # (K, b, t, q)
    matrices = in_front(in_front(other.mT, kept.time), replace(kept.batch, dim=1))  # (N, T, b, t, p)
    groups = kept.groups(2 * other.shape[1] * values[0].numel())
    sums: list[Tensor] = []
    for group in groups:
        factor = _joined(matrices[group.sequences[:, None], group.times]).mT
        sums.append(op(factor, _joined(group.once(group.of(values)))).unflatten(0, (len(group.sequences), -1)))
    return kept.joined(groups, sums)


def _joined(tokens: Tensor) -> Tensor:
    """Tokens (n, T, b, t, d) of n sequences, as matrices (n b, T t, d)."""
    return tokens.transpose(1, 2).flatten(2, 3).flatten(0, 1)


_LEAVES_PLACES = re.compile(
    "(View|UnsafeView|ReshapeAlias|Expand|Transpose|Permute|T|Unsqueeze|Squeeze|Clone|Alias|Slice|Cat|ToCopy|"
    r"NativeDropout|Mul|Div|Add|Sub|Neg|Tanh|MaskedFill|Where|Maximum|Minimum|Clamp|ClampMin|ClampMax)Backward\d+"
)
"""Nodes between a product of attention and its softmax."""
_SCORES = "rowprop: its result goes into a softmax whose result is a factor of a product"


def _place_of_keys(turned: bool) -> int | None:
    """The dimension of keys in a contraction over the queries, for a product of attention; None where none is known.

    The graph tells. One factor of attention's last product is a softmax of other products' results, and a mark is left
    at these: their turn comes later in the backward.
    """
    reads("the node that runs")
    node = cast(Any, torch)._C._current_autograd_node()
    if node is None or not _is_product(node):
        return None
    weights = [_mark_scores(factor) for factor, _ in node.next_functions[-2:]][turned]
    scores = _SCORES in node.metadata
    return None if weights == scores else 1 if weights else 2


def _mark_scores(factor: Any) -> bool:
    """Whether a factor is a softmax of the results of products; these are marked."""
    ahead, seen, found = [(factor, False)], set[Any](), False
    while ahead:
        node, behind = ahead.pop()
        if node is None or (node, behind) in seen:
            continue
        seen.add((node, behind))
        if not behind and node.name() in ("SoftmaxBackward0", "SafeSoftmaxBackward0"):
            last = len(node._input_metadata[0].shape) - 1
            ahead += [(up, True) for up, _ in node.next_functions if node._saved_dim in (last, -1, 2**64 - 1)]
        elif behind and _is_product(node):
            node.metadata[_SCORES] = found = True
        elif _LEAVES_PLACES.fullmatch(node.name()):
            ahead += [(up, behind) for up, _ in node.next_functions]
    return found


def _is_product(node: Any) -> bool:
    return node.name() in ("BmmBackward0", "BaddbmmBackward0")


@rule("_grouped_mm")
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


@rule("addmm", "baddbmm")
def addmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Matrix products plus an addend: the addend is plain if the rows are contracted, else a gradient."""
    if type(a) is not RowSlice and type(b) is not RowSlice:
        return Densify("only the addend is sliced")

    def run(x: Tensor, y: Tensor) -> Tensor:
        addend = bias.values if type(bias) is RowSlice else bias
        return op(x.new_zeros(()) if beta == 0 else addend, x, y, beta=beta, alpha=alpha)

    g, place = (a, a.dim) if type(a) is RowSlice else (b, b.dim)
    contracted = place == a.ndim - 1 if g is a else place == b.ndim - 2
    if contracted:
        return Densify("a sliced addend to a full-size product") if type(bias) is RowSlice else product(run, a, b)
    alike = type(bias) is RowSlice and bias.layout == g.layout and bias.ndim == a.ndim
    return product(run, a, b) if alike or beta == 0 else Densify("a dense addend to a sliced product")


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


@rule("linalg_solve_triangular", "linalg_lu_solve", "cholesky_solve", "triangular_solve", "_linalg_solve_ex")
def solve(op: Any, *args: Any, **options: Any) -> Any:
    """Systems of equations with a batch in front; the gradient is the right-hand side."""
    call = Call(op, args, options)
    names = "self", "A", "LU", "input2", "pivots", "B"
    operands = {name: getattr(call, name) for name in names if name in call.places}
    right = "B" if "B" in operands else "self"
    g: Any = operands[right]
    factors = [x for name, x in operands.items() if name != right]
    if type(g) is not RowSlice or any(type(x) is RowSlice or x.ndim > g.ndim for x in factors) or g.dim >= g.ndim - 2:
        return Densify("the batch lies in the equations")

    def run(*kept: Tensor) -> Any:
        changed = dict(zip(operands, kept, strict=True))
        if "pivots" in changed:
            changed["pivots"] = changed["pivots"].squeeze(-1)
        out = call.run(**changed)
        if isinstance(out, Tensor):
            return out
        others.extend(out[1:])
        return out[0]

    others: list[Tensor] = []  # factors of the kept rows, of which formulas read only whether they were found
    out = local(run, *(x.unsqueeze(-1) if name == "pivots" else x for name, x in operands.items()))
    return (out, *others) if others else out


@rule("_cdist_backward")
def cdist_backward(op: Any, g: Any, x1: Any, x2: Any, p: float, distances: Any) -> Any:
    """Distances from points (..., P, width) to points (..., R, width): the gradient of the first points."""
    if type(g) is not RowSlice or not x1.shape[:-2] == x2.shape[:-2] == tuple(g.shape[:-2]):
        return Densify("the points are sliced or broadcast")
    place, values = g.ndim - g.dim, g.values.contiguous()
    if place == 1:
        return op(values, x1, g.take(x2, g.dim - 1), p, g.take(distances))
    return g.like(op(values, g.take(x1), x2 if place == 2 else g.take(x2), p, g.take(distances)))
