"""pick() through every differentiable op that torch tests itself with; each dimension of the output serves as the rows.

The samples do not know of batches, so most mix rows somewhere or have them in odd places. The gradient has to equal
that of plain indexing all the same.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import rowprop

pytest.importorskip("expecttest", reason="torch's own samples need it")
from op_samples import OPS, gradients, samples

MOST = None if "ROWPROP_THOROUGH" in os.environ else 2  # samples of an op; `nox -s audit` takes them all


@pytest.mark.filterwarnings("ignore")  # torch's own, about its samples
@pytest.mark.parametrize(
    ("op", "dtype"), [pytest.param(op, dtype, id=f"{op.formatted_name}-{str(dtype)[6:]}") for op, dtype in OPS]
)
# Red when: any rule takes rows from a tensor without rows (try a rule without its `g.dim != 0`, or a scatter that
# copies); the memory below a lazy conjugate is gathered as if it were the conjugate.
def test_gradients_equal_plain_indexing(op: Any, dtype: torch.dtype):
    for _, leaves, outs in itertools.islice(samples(op, dtype), MOST):
        for out in outs:
            for dim in (d for d in range(out.ndim) if out.shape[d] > 1 and out.numel() > 0):
                for rows in (torch.tensor([out.shape[dim] - 1]), torch.zeros(out.shape[dim] - 1, dtype=torch.int64)):
                    try:
                        expected = gradients(leaves, out, dim, lambda losses, rows=rows: losses[rows])
                    except (RuntimeError, NotImplementedError):
                        continue  # the op has no backward for this sample, with or without pick
                    actual = gradients(
                        leaves, out, dim, lambda losses, rows=rows: rowprop.pick(losses, rows, batchnorm="exact")
                    )
                    for a, e in zip(actual, expected, strict=True):
                        assert (a is None) == (e is None)
                        if a is not None and e is not None and not e.is_sparse:
                            assert type(a) is Tensor
                            finite = (
                                e.isfinite()
                            )  # dense zeros times infinity are NaN; rows left out contribute nothing
                            torch.testing.assert_close(a[finite], e[finite], rtol=1e-8, atol=1e-9)


def test_the_samples_of_an_op_are_the_same_whatever_was_drawn_before():
    # Red without `set_rng_seed`.
    op = next(op for op, _ in OPS if op.name == "addmm")
    first, second = (next(samples(op, torch.float64))[1] for _ in range(2))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
