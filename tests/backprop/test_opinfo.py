"""pick() through every differentiable op that torch tests itself with; each dimension of the output serves as the rows.

The samples do not know of batches, so most mix rows somewhere or have them in odd places. The gradient has to equal
that of plain indexing all the same.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import rowprop

pytest.importorskip("expecttest", reason="torch's own samples need it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = {torch.float64: 6, torch.complex128: 3}
OPS = [
    (op, dtype)
    for op in op_db
    for dtype in SAMPLES
    if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and not op.name.startswith("sparse")
]


def differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def floats(value: Any) -> list[Tensor]:
    """The floating and complex tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return [value] if differentiable(value) else []
    return [t for v in value for t in floats(v)] if isinstance(value, (list, tuple)) else []


def forward(op: Any, sample: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Fresh leaves in the place of the sample's tensors, and the differentiable outputs.

    Complex tensors are lazy conjugates: a flag that no kernel may overlook.
    """
    leaves: list[Tensor] = []

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor) and differentiable(value):
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1].conj() if value.is_complex() else leaves[-1] * 1.0
        if isinstance(value, (list, tuple)):
            parts = [fresh(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    torch.manual_seed(0)
    out = op(fresh(sample.input), *map(fresh, sample.args), **{k: fresh(v) for k, v in sample.kwargs.items()})
    return leaves, [t for t in floats(out) if t.requires_grad]


def gradients(op: Any, sample: Any, place: int, dim: int, take: Any) -> tuple[Tensor | None, ...]:
    leaves, outs = forward(op, sample)
    rows = outs[place].movedim(dim, 0).flatten(1) if outs[place].ndim > 1 else outs[place][:, None]
    losses = (rows * torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)).sum(1)
    losses = losses.real + 2 * losses.imag if losses.is_complex() else losses
    return torch.autograd.grad(take(losses).square().sum(), leaves, allow_unused=True)


@pytest.mark.filterwarnings("ignore")  # torch's own, about its samples
@pytest.mark.parametrize(
    ("op", "dtype"), [pytest.param(op, dtype, id=f"{op.formatted_name}-{str(dtype)[6:]}") for op, dtype in OPS]
)
# Red when: any rule takes rows from a tensor without rows (try a rule without its `g.dim != 0`, or a scatter that
# copies); the memory below a lazy conjugate is gathered as if it were the conjugate.
def test_gradients_equal_plain_indexing(op: Any, dtype: torch.dtype):
    for number, sample in enumerate(op.sample_inputs("cpu", dtype)):
        if number == SAMPLES[dtype]:
            break
        try:
            _, outs = forward(op, sample)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue  # a sample that is no plain call of tensors
        for place, out in enumerate(outs):
            for dim in (d for d in range(out.ndim) if out.shape[d] > 1 and out.numel() > 0):
                for rows in (torch.tensor([out.shape[dim] - 1]), torch.zeros(out.shape[dim] - 1, dtype=torch.int64)):
                    try:
                        expected = gradients(op, sample, place, dim, lambda losses, rows=rows: losses[rows])
                    except (RuntimeError, NotImplementedError):
                        continue  # the op has no backward for this sample, with or without pick
                    actual = gradients(
                        op, sample, place, dim, lambda losses, rows=rows: rowprop.pick(losses, rows, batchnorm="exact")
                    )
                    for a, e in zip(actual, expected, strict=True):
                        assert (a is None) == (e is None)
                        if a is not None and e is not None and not e.is_sparse:
                            assert type(a) is Tensor
                            finite = (
                                e.isfinite()
                            )  # dense zeros times infinity are NaN; rows that are left out contribute nothing
                            torch.testing.assert_close(a[finite], e[finite], rtol=1e-8, atol=1e-9)
