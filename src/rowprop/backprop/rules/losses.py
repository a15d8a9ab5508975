"""Losses that are not elementwise: each row has one label or more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.backprop.rows import layout as lay
from rowprop.backprop.rows.gather import gather, gather_plain
from rowprop.backprop.rows.refusals import check_readable
from rowprop.backprop.rows.slice import Densify, RowSlice
from rowprop.backprop.rules.registry import rule
from rowprop.backprop.rules.rowlocal import Call, rowlocal


@rowlocal(
    "multi_margin_loss_backward", "multilabel_margin_loss_backward", why="the batch is not the losses' first dimension"
)
def margin_loss_backward(call: Call, ndim: int) -> Iterable[int]:
    """Unreduced losses (N,) of scores (N, C)."""
    return range(1, ndim)


@rule("nll_loss_backward", "nll_loss2d_backward", positions=True)
def nll_loss_backward(op: Any, g: Any, input: Any, target: Any, *rest: Any) -> Any:
    """Unreduced losses (N, ...) of scores (N, C, ...); the gradient has the class dimension again."""
    if type(g) is not RowSlice or type(input) is RowSlice:
        return Densify("the loss's input is sliced, not the losses' gradient")
    rows = lay.insert(g.layout, 1)
    return RowSlice(op(g.values, gather(input, g.rows, rows), g.take(target), *rest), g.rows, rows, input.shape)


@rule("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    op: Any, g: Any, log_probs: Any, targets: Any, steps: Any, labels: Any, losses: Any, log_alpha: Any, *rest: Any
) -> Any:
    """Scores (time, N, classes) and labels (N, length) or end to end, each with one valid length per row."""
    if type(g) is not RowSlice or type(log_probs) is RowSlice:
        return Densify("the loss's input is sliced, not the losses' gradient")
    index = g.rows.index
    if targets.ndim == 1 or any(not isinstance(n, Tensor) or n.device != index.device for n in (steps, labels)):
        check_readable(index, "the lengths of the kept rows, which are on the host")

    def kept(lengths: Tensor | Sequence[int]) -> Any:
        if isinstance(lengths, Tensor):
            return gather_plain(lengths, index.to(lengths.device), g.layout)
        return cast("list[int]", gather_plain(torch.tensor(lengths), index.cpu(), g.layout).tolist())

    if targets.ndim == 1:  # the labels of all rows lie one after the other
        rows = gather_plain(torch.arange(g.shape[0]), index.cpu(), g.layout)
        lengths = torch.as_tensor(labels).cpu()
        starts, counts = (lengths.cumsum(0) - lengths)[rows], lengths[rows]
        shift = starts - (counts.cumsum(0) - counts)
        places = shift.repeat_interleave(counts) + torch.arange(int(counts.sum()))
        lines = targets[places.to(targets.device)]
    else:
        lines = g.take(targets)
    saved = g.take(log_probs, 1), lines, kept(steps), kept(labels), g.take(losses), g.take(log_alpha)
    return g.like(op(g.values, *saved, *rest), g.layout.at(1))
