"""Rules that are declared by the names of their op's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.backprop.rows import RowSet
from rowprop.backprop.rules.registry import RULES
from rowprop.backprop.sliced import Densify, RowSlice

aten = torch.ops.aten
N, K = 4, 2
ROWS = RowSet(torch.tensor([0, 2]), N, unique=True, batchnorm=None)


def sliced(dim: int) -> RowSlice:
    """A gradient of shape (N, N), with its rows in this dimension."""
    values = torch.randn([K if d == dim else N for d in range(2)])
    return RowSlice(values, ROWS, Layout(dim, N), (N, N))


def plain(*columns: int) -> list[Tensor]:
    return [torch.randn(N, c * N) for c in columns]


SOFTMAX, CELL = aten._softmax_backward_data.default, aten._thnn_fused_lstm_cell_backward_impl.default
LAYER = aten.mkldnn_rnn_layer_backward.default
SETTINGS = False, 2, N, 1, True, True, False, [2, 1], False
MIXED: dict[str, tuple[Any, list[Any], str]] = {
    "another operand": (SOFTMAX, [sliced(0), sliced(0), 1, torch.float32], "other than the gradient"),
    "the second gradient": (CELL, [sliced(0), sliced(1), *plain(1, 1, 4), True], "not alike"),
    "the first gradient": (CELL, [sliced(1), sliced(0), *plain(1, 1, 4), True], "not alike"),
    "one gradient of two": (CELL, [sliced(0), *plain(1, 1, 1, 4), True], "not alike"),
    "packed": (LAYER, [*plain(*[1] * 10), sliced(0), None, None, *SETTINGS, *plain(1)], "packed"),
}


@pytest.mark.parametrize("what", MIXED)
# Red when: the rule takes the rows of a sliced operand, as of a plain tensor; only the first gradient is asked where
# its rows lie; the numbers of rows at each step of packed sequences are those of all rows.
def test_operands_that_are_not_sliced_alike_densify(what: str):
    op, args, reason = MIXED[what]
    outcome = RULES[op].run(op, *args)
    assert type(outcome) is Densify and reason in outcome.reason


def test_an_undefined_gradient_stays_undefined():
    # Red when: its values are asked for.
    g = sliced(0)
    values = g.values  # what the kernel's plan is remembered by keeps no gradient alive

    class Kernel:
        """No kernel of the CPU's own."""

        _schema = CELL._schema

        def __call__(self, of_hy: Tensor, of_cy: None, cx: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
            assert of_cy is None and of_hy is values and len(cx) == K
            return of_hy, cx, of_hy.sum(0)

    gates, cells, bias = RULES[CELL].run(Kernel(), g, None, *plain(1, 1, 1), True)
    assert type(gates) is type(cells) is RowSlice and type(bias) is Tensor
