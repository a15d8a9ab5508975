"""Megatron's functions between ranks, on the CPU, in two processes: ``python megatron_ranks.py FILE``."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rowprop
from picks import N, Take, indexed

ROWS = torch.tensor([1, 5])
REGIONS = """_CopyToModelParallelRegion _ReduceFromModelParallelRegion _ScatterToModelParallelRegion
_GatherFromModelParallelRegion _ScatterToSequenceParallelRegion _GatherFromSequenceParallelRegion
_ReduceScatterToSequenceParallelRegion _AllGatherFromTensorParallelRegion _ReduceScatterToTensorParallelRegion"""


def run(file: str, rank: int) -> None:
    """A step through all of them, under ``pick`` and by indexing: rows of sequences (T, N, width).

    Then the rows lie in the dimension whose parts are gathered or scattered: these functions run at full size.
    """
    regions: Any = import_module("megatron.core.tensor_parallel.mappings")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.cuda.current_device = lambda: "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)
    x, below = torch.randn(4, N, 12), torch.randn(12, 12).requires_grad_()
    own = torch.randn(2, 12, 6)[rank].requires_grad_()

    def through(name: str, h: Tensor) -> Tensor:
        return getattr(regions, f"_{name}Region").apply(h, dist.group.WORLD).tanh()

    def step(take: Take) -> list[Tensor]:
        h = through("CopyToModelParallel", x @ below) @ own
        h = through("AllGatherFromTensorParallel", through("GatherFromModelParallel", h)[..., :12])
        h = through("ReduceScatterToTensorParallel", through("ScatterToModelParallel", h).repeat(1, 1, 2))
        h = through("GatherFromSequenceParallel", through("ScatterToSequenceParallel", h))
        h = through("GatherFromSequenceParallel", through("ReduceScatterToSequenceParallel", h))
        losses = through("ReduceFromModelParallel", h).square().sum((0, 2))
        return list(torch.autograd.grad(take(losses, ROWS).sum(), [below, own]))

    expected = step(indexed)
    with rowprop.watch() as report:
        found = step(rowprop.pick)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert set(REGIONS.split()) <= report.sliced.keys() and not report.densified, report
    for kind, others in ("Sequence", (1, 2)), ("Model", (0, 1)):

        def along(take: Take, kind: str = kind, others: tuple[int, int] = others) -> list[Tensor]:
            h = through(f"GatherFrom{kind}Parallel", through(f"ScatterTo{kind}Parallel", x @ below))
            return list(torch.autograd.grad(take(h.square().sum(others), ROWS[:1]).sum(), [below]))

        with rowprop.watch() as report:
            found = along(rowprop.pick)
        torch.testing.assert_close(found, along(indexed), rtol=1e-6, atol=1e-6)
        assert f"_GatherFrom{kind}ParallelRegion" in report.densified, report
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.compile = lambda function: function  # pyright: ignore[reportAttributeAccessIssue]
    import_module("megatron.core.tensor_parallel.mappings")  # once, as it takes seconds
    other = os.fork()
    run(sys.argv[1], int(other == 0))
    sys.exit(other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
