"""Rules that are declared by the names of their op's arguments."""

from __future__ import annotations

import pytest
import torch

from rowprop.backprop.layout import Layout
from rowprop.backprop.rows import RowSet
from rowprop.backprop.rules.registry import RULES
from rowprop.backprop.rules.rowlocal import Call, rowlocal
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


@pytest.mark.parametrize("names", [{"grad": "no_gradient"}, {"grad": "self", "size": "no_size"}])
def test_a_name_that_the_op_lacks_is_refused(names: dict[str, str]):
    with pytest.raises(ValueError, match=r"'signbit' has no argument no_\w+"):
        rowlocal("signbit", **names)


def test_a_call_knows_its_arguments_by_name():
    # Red when: a default, or an argument given by keyword, is not found; a changed argument goes to another place.
    call = Call(aten.upsample_nearest1d_backward.default, (1, [2]), {"input_size": [1, 1, 4]})
    assert (call.grad_output, call.output_size, call.input_size, call.scales) == (1, [2], [1, 1, 4], None)
    assert call.first("no", "scales", "output_size") is None and call.first("no") is None
    assert call.has("scales") and not call.has("no")
    x = torch.arange(4.0)
    summed = Call(aten.sum.dim_IntList, (x, [0]), {"keepdim": False})
    assert summed.run(keepdim=True).shape == (1,)
    assert float(summed.run(x[:2], dtype=torch.float64)) == 1.0 and float(summed.run()) == 6.0
