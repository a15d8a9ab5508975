"""The gradient of some rows is that of plain indexing, on every kind of network, whatever sizes coincide."""

import jax
import pytest

from checks import check
from networks import NETWORKS, resnet
from rowprop_jax import UnsupportedOperation

ROWS = {"two": [5, 1], "one": [3], "all": range(8), "repeated": [2, 6, 2]}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_gradient_is_that_of_plain_indexing(name, rows):
    # 8 rows: as many as the LSTM and the GPT have tokens, and as the CNN and the ResNet have channels.
    # Red with `mode="clip")` of rows + 1, and with the weights' order turned round.
    check(*NETWORKS[name](8), list(ROWS[rows]))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_that_of_plain_indexing_in_float64(name):
    # 16 rows: the width of the transformers, the LSTM and the experts.
    with jax.enable_x64(True):
        check(*NETWORKS[name](16, float), [0, 15, 7, 4], tolerance=1e-10)


@pytest.mark.parametrize("name", ["mlp", "gpt", "lstm"])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_small_batches(name, num_rows):
    check(*NETWORKS[name](num_rows), [num_rows - 1])


def test_square_weights_and_as_many_rows():
    # Red with the axis of the rows taken from the first size that equals N: the weights would be sliced.
    check(*NETWORKS["mlp"](16, width=16, inputs=16), [1, 2, 9])


def test_batchnorm_in_training_is_refused_and_its_line_named():
    losses_fn, params, batch = resnet(8, training=True)
    with pytest.raises(
        UnsupportedOperation, match=r"`reduce_sum` at \S*networks.py:\d+.* sums over rows, and its result"
    ):
        check(losses_fn, params, batch, [1, 2])
    check(losses_fn, params, batch, range(8))  # all rows are the plain backward, whatever it mixes
