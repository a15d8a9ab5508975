"""The floor of ``benchmarks/bench_overhead.py`` does the plain step's work."""

from __future__ import annotations

import torch

import bench_overhead
from bench_step import full


def test_the_floor_has_the_gradient_of_the_plain_step():
    # Red where an op is left out or run twice, and where a weight gets a wrapped gradient.
    model, batch = bench_overhead.mlp(8)
    rows = torch.arange(256)
    exact = torch.autograd.grad(full(model, batch, rows), [*model.parameters()])
    called = torch.autograd.grad(bench_overhead.floor(model, batch, rows), [*model.parameters()])
    assert all(type(grad) is torch.Tensor for grad in called)
    torch.testing.assert_close(called, exact, rtol=0, atol=0)
