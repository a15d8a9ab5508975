"""BatchNorm's gradient for rows that were drawn, in expectation that of all rows that they were drawn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.backprop.rules.norms import in_one_format, statistics
from rowprop.backprop.rules.rowlocal import Call
from rowprop.backprop.sliced import RowSlice, gather_plain, rows_apart


def of_drawn_rows(call: Call, g: RowSlice) -> tuple[Any, Any, Any]:
    """In expectation, the gradient for all rows that a gradient's rows were drawn from.

    Those are the batch's rows, or the rows of a pick: then components are removed as the rule for a pick does.
    """
    input, weight, mean, invstd, mask = call.input, call.weight, call.save_mean, call.save_invstd, call.output_mask
    base, weights = g.rows.stands_for()
    assert weights is not None
    if base.unique and not g.rows.unique:  # rows that repeat in the base too were drawn one by one
        g, weights = g.merged(), torch.zeros_like(weights).index_add_(0, g.rows.first, weights)
    values, x = in_one_format(g, input)
    centre, unit, entries = mean, invstd, input.numel() // input.shape[1]
    picked = base.kept != base.num_rows
    if picked:
        of_base = gather_plain(input, base.index, g.layout)
        centre, variance = statistics(call.op, of_base, mean)
        unit, entries = variance.add_(call.eps).rsqrt_(), of_base.numel() // input.shape[1]
    total, product = _sums(call.op, values, x, centre, unit)
    dw, db = product.sum(0), total.sum(0)
    if picked:  # the sum of g * x-hat, with x-hat of the full batch
        dw = torch.addcmul(dw / unit, db, centre - mean) * invstd
    dtype = dw.dtype if weight is None else weight.dtype
    parameters = (dw.to(dtype) if mask[1] else None), (db.to(dtype) if mask[2] else None)
    if not mask[0]:
        return None, *parameters
    scale = invstd if weight is None else weight * invstd
    within = g.layout.compact(g.rows.kept)
    v = weights.to(mean.dtype)
    shift, slope = (_lost(sums, v, within).mul_(-scale / entries) for sums in (total, product))
    slope *= unit
    shift -= slope * centre
    along = [-1, x.shape[1], *[1] * (x.ndim - 2)]
    dx = (values * scale.view(1, *along[1:])).addcmul_(x, slope.view(along)).add_(shift.view(along))
    return g.like(dx.to(values.dtype)), *parameters


def _sums(op: Any, values: Tensor, x: Tensor, centre: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of g and of g * x-hat for each entry of the first dimension, and each channel: (entries, channels)."""
    size, channels, space = x.shape[0], x.shape[1], list(range(2, x.ndim))
    if space and x.is_contiguous():  # the kernel gives both sums: each entry's channels are channels
        apart = [t.reshape(1, size * channels, -1) for t in (values, x)]
        one, *given = (v.repeat(size) for v in (torch.ones_like(unit), centre, unit))
        _, product, total = op(*apart, one, None, None, *given, True, 0.0, [False, True, True])
        return total.view(size, channels), product.view(size, channels)
    product = values * (x - centre.view(-1, *[1] * len(space)))
    if space:
        return values.sum(space, dtype=unit.dtype), product.sum(space) * unit
    return values.to(unit.dtype), product * unit


def _lost(sums: Tensor, weights: Tensor, layout: Layout) -> Tensor:
    """A multiple of what a row loses of a component, for each entry of the first dimension and channel.

    With s_j the sum over row j of the gradient that arrives, which has the factor v_j already, row i loses s_i, and v_i
    times the sum of the other s_j: it stands for v_i rows. Exactly K rows are drawn, so two of them come together more
    rarely than rows that are drawn one by one. With u = 1 - 1 / v, s_j therefore counts 1 + u_i * u_j / (sum of the
    other u) times for row i: exact for equal probabilities, and a row with v = 1 counts once for all.

    The sums are (entries, channels), the weights v (K,); the layout tells where the K rows are among the entries.
    """
    rows = rows_apart(sums, layout)
    own = rows.sum((0, 2))
    v = weights.unsqueeze(1)
    u = 1 - 1 / v.clamp_min(1)
    others = u.sum() - u
    alone = others < 1e-6
    share = (u / others.masked_fill(alone, 1)).masked_fill(alone, 0)
    lost = own + v * (own.sum(0) - own + share * ((u * own).sum(0) - u * own))
    return lost.unsqueeze(1).expand(rows.shape).reshape(sums.shape)
