"""Torch's own samples of its differentiable ops, and the gradients of one of their outputs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, about its samples
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import set_rng_seed

SAMPLES = {torch.float64: 4, torch.complex128: 2}
OPS = [
    (op, dtype)
    for op in op_db
    for dtype in SAMPLES
    if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and not op.name.startswith("sparse")
]
REFUSALS = RuntimeError, TypeError, ValueError, NotImplementedError  # a sample is no plain call, or has no backward


def floats(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def forward(op: Any, sample: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Fresh leaves in the place of the sample's tensors, and the differentiable outputs.

    Complex tensors are lazy conjugates: a flag that no kernel may overlook.
    """
    leaves: list[Tensor] = []

    def fresh(value: Tensor) -> Tensor:
        if not floats(value):
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1].conj() if value.is_complex() else leaves[-1] * 1.0

    torch.default_generator.manual_seed(0)
    args, kwargs = tree_map_only(Tensor, fresh, ((sample.input, *sample.args), sample.kwargs))
    return leaves, [t for t in tree_leaves(op(*args, **kwargs)) if floats(t) and t.requires_grad]


def samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[Any, list[Tensor], list[Tensor]]]:
    """An op's first small samples that are plain calls of tensors, each with its leaves and outputs."""
    set_rng_seed(0)
    # `op.sample_inputs` asks the stack for a unittest, twice in each call: nine tenths of the time of a sample.
    found = op.sample_inputs_func(op, "cpu", dtype, requires_grad=False)
    small = (s for s in found if sum(t.numel() for t in tree_leaves([s.input, s.args]) if floats(t)) < 50_000)
    for sample in itertools.islice(small, SAMPLES[dtype]):
        try:
            yield sample, *forward(op, sample)
        except REFUSALS:
            continue


def gradients(leaves: list[Tensor], out: Tensor, dim: int, take: Callable[[Tensor], Tensor]) -> Any:
    """The leaves' gradients when a dimension of the output holds the rows, of which some losses are taken."""
    rows = out.movedim(dim, 0).flatten(1) if out.ndim > 1 else out[:, None]
    losses = (rows * torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype)).sum(1)
    losses = losses.real + 2 * losses.imag if losses.is_complex() else losses
    return torch.autograd.grad(take(losses).square().sum(), leaves, allow_unused=True, retain_graph=True)
