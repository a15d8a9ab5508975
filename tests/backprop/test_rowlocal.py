"""Rules that are declared by the names of their op's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rowprop.backprop.layout import Layout
from rowprop.backprop.rows import RowSet
from rowprop.backprop.rules.registry import RULES
from rowprop.backprop.rules.rowlocal import Call, _plan
from rowprop.backprop.sliced import Densify, RowSlice

aten = torch.ops.aten
N, K = 4, 2
ROWS = RowSet(torch.tensor([0, 2]), N, unique=True, batchnorm=None)


def sliced(dim: int) -> RowSlice:
    """A gradient of shape (N, N), with its rows in this dimension."""
    values = torch.randn([K if d == dim else N for d in range(2)])
    return RowSlice(values, ROWS, Layout(dim, N), (N, N))


def test_an_operand_with_rows_that_is_itself_sliced_densifies():
    # Red when: the rule takes its rows, as of a plain tensor.
    op = aten._softmax_backward_data.default
    outcome = RULES[op].run(op, sliced(0), sliced(0), 1, torch.float32)
    assert type(outcome) is Densify and "other than the gradient" in outcome.reason


def test_gradients_that_are_sliced_in_different_dimensions_densify():
    # Red when: only the first gradient is asked where its rows lie.
    op = aten._thnn_fused_lstm_cell_backward_impl.default
    plain = torch.randn(N, N), torch.randn(N, N), torch.randn(N, 4 * N), True
    for first, second in ((0, 1), (1, 0)):
        outcome = RULES[op].run(op, sliced(first), sliced(second), *plain)
        assert type(outcome) is Densify and "not alike" in outcome.reason
    assert type(RULES[op].run(op, sliced(0), torch.randn(N, N), *plain)) is Densify


def test_the_schema_tells_which_arguments_have_rows():
    # Red when: a weight is reduced to the kept rows; a saved tensor or a full shape is not; a gradient counts as one.
    plans = {
        "native_layer_norm_backward": ([0], [1, 3, 4], []),
        "_thnn_fused_lstm_cell_backward_impl": ([0, 1], [2, 3, 4], []),
        "cudnn_grid_sampler_backward": ([2], [0, 1], []),
        "max_pool2d_with_indices_backward": ([0], [1, 7], []),
        "multi_margin_loss_backward": ([0], [1, 2], []),
        "upsample_nearest2d_backward": ([0], [], [2]),
        "unfold_backward": ([0], [], [1]),
        "cumsum": ([0], [], []),
    }
    assert {name: _plan(getattr(aten, name).default) for name in plans} == plans


def test_a_call_knows_its_arguments_by_name():
    # Red when: a default, or an argument given by keyword, is not found; a changed argument goes to another place.
    call = Call(aten.upsample_nearest1d_backward.default, (1, [2]), {"input_size": [1, 1, 4]})
    assert (call.grad_output, call.output_size, call.input_size, call.scales) == (1, [2], [1, 1, 4], None)
    assert call.first("no", "scales", "output_size") is None and call.first("no") is None
    assert "scales" in call.places and "no" not in call.places
    assert Call(aten.softplus.default, (torch.ones(2),), {}).beta == 1
    x = torch.arange(4.0)
    summed = Call(aten.sum.dim_IntList, (x, [0]), {"keepdim": False})
    assert summed.run(keepdim=True).shape == (1,)
    assert float(summed.run(x[:2], dtype=torch.float64)) == 1.0 and float(summed.run()) == 6.0


def test_an_undefined_gradient_stays_undefined():
    # Red when: its values are asked for.
    op, g = aten._thnn_fused_lstm_cell_backward_impl.default, sliced(0)
    values = g.values  # what the kernel's plan is remembered by keeps no gradient alive

    class Kernel:
        """No kernel of the CPU's own."""

        _schema = op._schema

        def __call__(self, of_hy: Tensor, of_cy: None, cx: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
            assert of_cy is None and of_hy is values and len(cx) == K
            return of_hy, cx, of_hy.sum(0)

    gates, cells, bias = RULES[op].run(Kernel(), g, None, *[torch.randn(N, N)] * 3, True)
    assert type(gates) is type(cells) is RowSlice and type(bias) is Tensor


def test_packed_sequences_of_a_fused_layer_densify():
    # Red when: the numbers of rows at each step are those of all rows.
    op, x, settings = aten.mkldnn_rnn_layer_backward.default, torch.randn(N, N), (False, 2, N, 1, True, True, False)
    outcome = RULES[op].run(op, *[x] * 10, sliced(0), None, None, *settings, [2, 1], False, x)
    assert type(outcome) is Densify and "packed" in outcome.reason


@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (-1, 0)])
def test_a_diagonal_moves_the_rows(dims: tuple[int, int]):
    # Red when: the two dimensions are inserted in the order in which they are named.
    g = RowSlice(torch.randn(3, K, 5), ROWS, Layout(1, N), (3, N, 5))
    for op, *args in ((aten.diag_embed.default, 0, *dims), (aten.diagonal_backward.default, DIAGONAL[dims], 0, *dims)):
        torch.testing.assert_close(RULES[op].run(op, g, *args).dense(), op(g.dense(), *args))


DIAGONAL = {(1, 2): [3, 5, 5, N], (2, 1): [3, 5, 5, N], (-1, 0): [5, 3, N, 5]}


def test_an_addend_that_counts_nothing_is_not_read():
    # Red when: an addend of all rows is added to the product of the kept ones.
    g, addend, other = sliced(0), torch.randn(N, 3), torch.randn(N, 3)
    op = aten.addmm.default
    found = RULES[op].run(op, addend, g, other, beta=0)
    torch.testing.assert_close(found.dense(), g.dense() @ other)
