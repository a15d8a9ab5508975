"""Backwards on a second device: the CPU's gradients, nothing on the wrong device, and no wait that no report mentions.

They run in the second pass of the suite, `pytest --as-accelerator`, in which :mod:`second_device` is set up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowprop
import second_device
import test_cuda_rules
import test_rules
import zoo
from cuda_kernels import installed
from rowprop.backprop.watch import Report
from second_device import Moving, There, watching

pytestmark = pytest.mark.skipif(not second_device.is_set_up(), reason="needs --as-accelerator, and a torch that can")

Take = Callable[[Tensor], Tensor]
Forward = AbstractContextManager[Any]
"""Inside, the forward runs: nothing on the CPU, and on the second device a :class:`Moving`."""
Gradients = Callable[[Forward, Take], list[Tensor | None]]

REPEATED = [0, 2, 2, 5]
CELLS = [f"_thnn_fused_{kind}" for kind in ("lstm_cell", "lstm_cell_backward_impl", "gru_cell", "gru_cell_backward")]
OTHERWISE: dict[str, set[str]] = {
    "in_place_rows": {"slice"},  # the CPU undoes the write by as_strided, a device written in Python by the view itself
}


def packets(report: Report) -> set[str]:
    return {name.partition(".")[0] for name in report.densified}


def there(gradients: Gradients, take: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> tuple[Any, ...]:
    """The gradients on the second device, how often the host waited in the backward, and the faults."""
    moving = Moving()
    with watching() as seen:

        def leave(losses: Tensor) -> Tensor:
            assert type(losses) is There
            moving.stop()
            seen.reads.clear()
            seen.faults.clear()
            return take(losses, There(rows))

        return gradients(moving, leave), seen.reads.total(), [*seen.faults]


def check(name: str, gradients: Gradients, index: list[int], tolerance: float) -> None:
    """The gradients of the dense truth on the CPU, and nothing that the CPU's own backward does not need."""

    def pick(losses: Tensor, rows: Tensor) -> Tensor:
        return rowprop.pick(losses, rows, batchnorm="exact")

    rows = torch.tensor(index)
    expected = gradients(nullcontext(), lambda losses: losses[rows])
    with rowprop.watch() as here:
        gradients(nullcontext(), lambda losses: pick(losses, rows))
    _, needed, _ = there(gradients, lambda losses, rows: losses[rows], rows)
    with rowprop.watch() as report:
        actual, waits, faults = there(gradients, pick, rows)
    assert not faults, faults
    assert packets(report) <= packets(here) | OTHERWISE.get(name, set()), report
    assert waits - needed <= sum(report.waited.values()), report
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", test_rules.CASES)
# Red when: a rule makes a tensor without `device=`, reads a count without look(), or asks device.type for its answer.
def test_a_rule_gives_the_gradients_of_the_cpu(name: str):
    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        with forward:
            return test_rules.run(name, take, channels_last=False)

    with installed(*CELLS):
        for rows in ([1, 4], REPEATED):
            check(name, gradients, rows, 1e-9)


@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=lambda e: e.name)
def test_a_model_of_the_zoo_has_the_gradients_of_the_cpu(entry: zoo.Entry):
    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        def losses(model: nn.Module, batch: zoo.Batch) -> Tensor:
            with forward:
                return entry.losses(model, batch)

        return list(zoo.backward(replace(entry, losses=losses), torch.float64, take).grads.values())

    with installed(*CELLS):
        check(entry.name, gradients, list(zoo.ROWS), 1e-9)


@pytest.mark.parametrize("name", test_cuda_rules.CASES)
def test_a_kernel_of_cuda_gives_the_same_gradients(name: str):
    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        with forward:
            return test_cuda_rules.gradients(test_cuda_rules.CASES[name], take)[0]

    with installed():
        check(name, gradients, REPEATED, 1e-5)
