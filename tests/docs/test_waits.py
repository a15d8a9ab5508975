"""How often the host waits for a device: each part of a step, counted on an emulated one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

import rowprop
from accelerator import Waits
from waits import BEGIN, END, LATE, PAGE, tables

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch makes no device from Python alone",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """All counts; taken in a process of its own, because it keeps the emulated accelerator for good."""
    run = [sys.executable, str(Path(__file__).parents[2] / "tools" / "waits.py"), "--json"]
    answer = subprocess.run(run, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(answer.stdout)


def test_each_kind_of_wait_is_seen_once_and_nothing_else(found):
    # The meta-test of all others. Red when: an op is missing in accelerator.READING, or a copy is not counted.
    for way, seen in found["kinds"].items():
        assert len(seen) == (not way.startswith("none: ")), (way, seen)


def test_tensors_of_two_devices_do_not_mix(found):
    # Red when: the emulated device computes with tensors of the host; a rule that forgets a device would not be seen.
    assert found["kinds"]["mixed"] == ["add got tensors on the device and on the host"]


def test_the_counter_of_ops_sees_them_on_the_cpu():
    x = torch.arange(4.0)
    with Waits() as waits:
        bool(x.any()), x.nonzero(), x[x > 1], x[torch.tensor([1])], x.sort()
    assert [what.split()[0] for what in waits.seen] == ["_local_scalar_dense", "nonzero", "index"]


def test_the_counter_leaves_a_sliced_gradient_to_its_rules():
    # Red when: the counter runs the op itself, which densifies: reads of the rules would not be counted.
    w = torch.ones(3, requires_grad=True)
    with Waits(), rowprop.watch() as report:
        rowprop.pick((torch.eye(6, 3) @ w).square(), torch.tensor([1, 4])).sum().backward()
    assert not report.densified


def test_the_tables_of_the_page_are_what_was_counted(found):
    # Red when: any part waits once more or once less. `nox -s waits` writes them anew.
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == tables(found)


def test_a_step_with_a_fixed_count_waits_for_nothing(found):
    # Red when: the policy for non-finite rows, pick, a rule of the model's ops or one of these selectors reads.
    none = {name for name, _, _, seen in found["selectors"] if not seen}
    assert {"TopK", "RandomRows", "RankSampling", "TopBottom", "Everything"} <= none
    assert found["engines"]["sliced"][2] == found["engines"]["masked"][2] == found["engines"]["recompute"][2] == []
    assert set(found["engines"]["sliced"][0]) == {LATE}  # a late look, behind a queued backward
    assert found["parts"]["`pick`, indices"] == []


@pytest.mark.parametrize("way", ["thinned", "steered"])
# Gradients of two thinnings meet. Red when: their union or BatchNorm's rule counts rows, the draw reads, or the norms
# of a backward or the variances of a measurement are read at once.
def test_a_thinned_step_waits_for_nothing(found, way):
    waits, keep, measured = found[way]
    assert all(set(step) <= {"event in ThinnedBackward.read"} for step in waits)  # of two backwards ago: is there
    if way == "thinned":
        assert keep == dict.fromkeys(("layers.0", "layers.1", "layers.2"), 0.25)
    else:
        assert measured > 0 and any(share < 1 for share in keep.values())


def test_a_selector_waits_where_its_entry_says_so(found):
    # Red when: a selector begins to read its scores, or no longer does and laws.SELECTORS still says it.
    for name, made, waits, seen in found["selectors"]:
        assert bool(seen) == waits, (name, made, seen)


def test_the_models_of_the_zoo_on_a_device(found):
    # They have the gradient of plain indexing on the CPU. Red when: a rule makes a tensor on the host (torch.arange
    # without a device) and mixes it with tensors of the device, or a read chooses the wrong way where none is possible.
    assert len(found["zoo"]) > 50
    for name, model in found["zoo"].items():
        assert model["error"] < 1e-10, (name, model)
    # Each expert gets some of the rows, and only the device knows which. The running product of a scan asks where its
    # gradient is zero. Red when: a rule reads a count or a flag.
    waiting = {name for name, model in found["zoo"].items() if model["waits"]}
    assert waiting == {"experts_index_add", "experts_index_put", "experts_tokens", "idle_experts", "scan"}
    # Views of views of tokens are written through: which of them are left is not known without a look. Red when: a rule
    # asks for the type of a device, or for values that it could do without. The last two densify on the
    # emulated device alone: where a CPU only answers that it waits, as under ``--as-accelerator``, nothing does.
    more = {name: model["more"] for name, model in found["zoo"].items() if model["more"]}
    assert more == {"vit_written_to": ["copy_"], "solver": ["add.Tensor", "copy_"], "rows_written_in_place": ["copy_"]}
