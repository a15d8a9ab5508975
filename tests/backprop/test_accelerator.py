"""Backwards on the emulated device: the CPU's gradients, no operand on the host, and no wait that no report mentions.

They run in the second pass of the suite, `pytest --as-accelerator`, which makes the device known before any backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cuda_cases
import device_cases
import rowprop
import rule_cases
import token_models
import zoo
from accelerator import Accelerator, Moving, OnDevice
from cuda_kernels import installed
from device_cases import Forward, Gradients, Take
from rowprop.backprop.autograd import rowgrad
from rowprop.backprop.rows.slice import Densify
from rowprop.backprop.rules.apply import apply_rule
from rowprop.backprop.watch import Report

pytestmark = pytest.mark.skipif(not Accelerator.ready, reason="needs --as-accelerator, and a torch that can")

REPEATED = [0, 2, 2, 5]
CELLS = [f"_thnn_fused_{kind}" for kind in ("lstm_cell", "lstm_cell_backward_impl", "gru_cell", "gru_cell_backward")]
# The CPU undoes the write by as_strided, a device written in Python by the view itself.
OTHERWISE = {name: {"slice"} for name in ("in_place_as_complex", "in_place_spectrum_some_rows")}
OTHERWISE |= {name: {"slice", "select"} for name in rule_cases.CASES if name.startswith("in_place_row")}
OTHERWISE["in_place_buffer_shifted"] = {"slice"}
OTHERWISE |= {f"in_place_{some}_added_up": {"slice", "cumsum", "copy_"} for some in ("rows", "two_rows")}
OTHERWISE["in_place_rows_diagonal"] = {"diagonal"}
OTHERWISE["rows_written_in_place"] = OTHERWISE["in_place_imaginary_number"] = {"select"}
OTHERWISE["mask_entries"] = {"add"}  # the gradient that a write made dense, see packets(), meets another
NOT_EMULATED = {
    "ctc_joined",  # its index.cpu() stays on this device
    # A conjugate's memory is not that of the number.
    *["in_place_spectrum_adjoint", "in_place_spectrum_conj_imag", "in_place_conjugate_row"],
    "step_sgn",  # it does not run there, with plain indexing either
    *["flow", "solver"],  # what they write in place has no graph there
    # A checkpoint's second forward, within the backward, is not on the device.
    *["in_place_buffer_checkpointed_1d", "in_place_buffer_checkpointed_2d", "in_place_rows_checkpointed"],
    "source_separation",  # the strides of its stft are lost
}


def packets(report: Report) -> set[str]:
    # The emulated device's tensors tell of no memory that they share, so no write is known to show in what is viewed.
    hidden = "the gradient is written to through a view"
    return {name.partition(".")[0] for name, met in report.densified.items() if not met.reason.startswith(hidden)}


class Noting(Accelerator):
    """Notes the faults of a backward: an error that leaves a backward on such a device ends the process."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def refuse(self, why: str) -> None:
        self.faults.append(why)

    def guarded(self, rule: Any, op: Any, *operands: Any) -> Any:
        """Run a rule; where it raises, the op densifies."""
        try:
            return apply_rule(rule, op, *operands)
        except Exception as error:
            self.faults.append(f"the rule of {op}: {type(error).__name__}: {error}".partition("\n")[0])
            return Densify("its rule raised")


def there(gradients: Gradients, take: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> tuple[Any, ...]:
    """The gradients on the emulated device, the waits of the backward, and its faults."""
    moving, begun = Moving(), 0
    with Noting() as device, torch.autograd.set_multithreading_enabled(False):

        def leave(losses: Tensor) -> Tensor:
            nonlocal begun
            assert isinstance(losses, OnDevice)
            moving.stop()
            device.faults.clear()
            begun = device.count
            return take(losses, OnDevice(rows))

        with mock.patch.object(rowgrad, "apply_rule", device.guarded):
            return gradients(moving, leave), device.seen[begun:], device.faults


PARTS = {"add", "a part of the batch"}
"""What follows from such a write: a dense gradient that others are added to. And on a device nobody counts the kept
rows of a part of the batch: one that may have no more than are kept runs whole."""


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
    parts = PARTS if name.startswith(("in_place_", "pad", "setitem")) else set()
    assert packets(report) <= packets(here) | OTHERWISE.get(name, set()) | parts, report
    assert len(waits) - len(needed) <= sum(report.waited.values()), (waits, report)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(rule_cases.CASES.keys() - NOT_EMULATED))
# Red when: a rule makes a tensor without `device=`, reads a count unchecked, or asks device.type.
def test_a_rule_gives_the_gradients_of_the_cpu(name: str):
    with installed(*CELLS):
        for rows in ([1, 4], REPEATED):
            check(name, device_cases.of_rule(name), rows, 1e-9)


@pytest.mark.parametrize("name", token_models.BETWEEN)
# Red when: what follows from the tokens' places is made on the host, or copied there and back one by one.
def test_what_models_do_between_tokens_has_the_gradients_of_the_cpu(name: str):
    check(name, device_cases.between_tokens(name), device_cases.ROWS_BETWEEN, 1e-9)


@pytest.mark.parametrize("way", ["exact", "cut"])
@pytest.mark.parametrize("mask", ["a quarter", "uneven"])
def test_a_decoders_tokens_have_the_gradients_of_the_cpu(mask: str, way: str):
    # Red when: kept tokens are counted on the host, or their places are made there.
    model, kept = token_models.Decoder(packed=True), token_models.MASKS[mask]

    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        model.zero_grad()
        with forward:
            losses = token_models.LOSSES["shifted by a pad"](model(token_models.IDS), token_models.LABELS)
            take(losses).mean().backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(nullcontext(), lambda losses: rowprop.pick(losses, kept, attention=way))
    with installed(), rowprop.watch() as report:
        actual, waits, faults = there(gradients, lambda x, mask: rowprop.pick(x, mask, attention=way), kept)
    assert not faults, faults
    assert len(waits) <= 1 + sum(report.waited.values()), (waits, report)  # pick counts the mask
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("entry", [e for e in zoo.ENTRIES if e.name not in NOT_EMULATED], ids=lambda e: e.name)
def test_a_model_of_the_zoo_has_the_gradients_of_the_cpu(entry: zoo.Entry):
    with installed(*CELLS):
        check(entry.name, device_cases.of_model(entry), list(zoo.ROWS), 1e-9)


@pytest.mark.parametrize("name", cuda_cases.CASES)
def test_a_kernel_of_cuda_gives_the_same_gradients(name: str):
    def gradients(forward: Forward, take: Take) -> list[Tensor | None]:
        with forward:
            return cuda_cases.gradients(cuda_cases.CASES[name], take)[0]

    with installed():
        check(name, gradients, REPEATED, 1e-5)
