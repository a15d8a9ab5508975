"""300 random programs: the gradient is that of plain indexing, or the program is refused because it mixes rows."""

import jax
import pytest

from checks import error, plain, sliced
from programs import program
from rowprop_jax import UnsupportedOperation

GROUPS, SIZE = 15, 20  # a group is compiled at once, which is faster


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_random_program_is_exact_or_refused_where_it_mixes_rows(group):
    # Red with `sum_over_rows` that needs no zeros, and with a rule of reshape that always has rows outermost.
    with jax.enable_x64(True):
        check_all([program(group * SIZE + seed) for seed in range(SIZE)])


def check_all(programs):
    refused = set()

    def gradients(inputs):
        pairs = {}
        for at, (losses_fn, *_) in enumerate(programs):
            try:
                pairs[at] = sliced(losses_fn, *inputs[at], [4, 0]), plain(losses_fn, *inputs[at], [4, 0])
            except UnsupportedOperation as error:
                refused.add(at)
                assert programs[at][3], f"program {at} of the group mixes no rows: {error}"
        return pairs

    pairs = jax.jit(gradients)([inputs for _, *inputs, _ in programs])
    assert {at: off for at, pair in pairs.items() if (off := error(*pair)) > 1e-10} == {}
    assert len(refused) >= sum(mixes for *_, mixes in programs) // 2
