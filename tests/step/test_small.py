"""The warning of a model too small to gain by slicing: beside what the benchmarks measured, and where it is silent."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bench_overhead
import rowprop
import thin_worth
from bench_step import Batch, row_losses
from rowprop.engines import Masked, Recompute
from rowprop.step.selective import SelectiveBackprop
from rowprop_lab.run import compare
from rowprop_lab.settings import Settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OVERHEAD = json.loads((RESULTS / "2026-11-26-overhead-cpu-1-threads.json").read_text())
WORTH = json.loads((RESULTS / "2026-11-22-thin-worth-cpu-1-threads.json").read_text())


def warned(step: Callable[[], Any]) -> list[str]:
    """The warnings of a call, each of which must be the one of this page."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    assert {each.category for each in caught} <= {rowprop.TooSmall}
    assert {each.filename for each in caught} <= {__file__}  # it points at the user's line
    return [str(each.message) for each in caught]


def stepped(model: nn.Module, batch: Batch, keep: float = 0.25, losses: Any = row_losses, **options: Any) -> list[str]:
    """The warnings of the first step."""
    selective = SelectiveBackprop(model, losses, rowprop.TopK(keep), **options)
    return warned(lambda: selective(batch))


def mlp(width: int = 8) -> tuple[nn.Module, Batch]:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    return model, (torch.randn(64, width), torch.randint(8, (64,)))


@pytest.mark.parametrize(
    ("workload", "width", "ratio"),
    [(w["workload"], row["width"], row["ratio"]["median"]) for w in OVERHEAD["workloads"] for row in w["widths"]],
)
def test_it_warns_where_the_benchmark_of_the_overhead_measured_no_gain(workload: str, width: int, ratio: float):
    # The sliced step at keep 0.25 over the plain step. Red when an op is taken to cost 3e6 or 2e7 FLOPs for 8e6.
    assert bool(stepped(*bench_overhead.WORKLOADS[workload][0](width))) == (ratio > 1), ratio


@pytest.mark.parametrize("name", thin_worth.MODELS)
def test_it_warns_where_the_benchmark_of_thinning_measured_no_gain(name: str):
    # Blocks thinned to a quarter: MLPs, ViTs, a GPT and ResNets, whose convolutions use a weight at many positions. Red
    # when an op is taken to cost 3e6 FLOPs for 8e6.
    (found,) = [found for found in WORTH["found"] if (found["model"], found["share"]) == (name, 0.25)]
    ratio = found["thinned_ms"] / found["full_ms"]
    assert bool(stepped(*thin_worth.MODELS[name]())) == (ratio > 1), ratio


def test_it_is_said_once_and_names_the_way_on():
    # Red when the step looks again, or forgets that it has looked when it is copied.
    model, batch = mlp()
    selective = SelectiveBackprop(model, row_losses, rowprop.TopK(0.25))
    (sentence,) = warned(lambda: selective(batch))
    assert sentence.startswith(
        "SelectiveBackprop got a model too small to gain by slicing on a CPU: its backward of all"
    )
    assert "64 rows is as much work as 0." in sentence and "rowprop.plan measures both" in sentence
    assert warned(lambda: selective(batch)) == warned(lambda: copy.deepcopy(selective)(batch)) == []


def test_it_waits_for_a_step_that_selects():
    # Red when a step of the whole batch, or one without a graph, settles it.
    model, batch = mlp()
    late = {"schedule": rowprop.schedule.Schedule(0.5, 1.0), "total_steps": 4}
    selective = SelectiveBackprop(model, row_losses, rowprop.TopK(0.25), **late)
    assert [len(warned(lambda: selective(batch))) for _ in range(4)] == [0, 0, 1, 0]
    selective = SelectiveBackprop(model, row_losses, rowprop.TopK(0.25))
    with torch.no_grad():
        assert warned(lambda: selective(batch)) == []
    assert len(warned(lambda: selective(batch))) == 1


def test_a_large_keep_is_no_small_model():
    # Nearly every row kept gains little on any model; that is no matter of its size. Red without the limit FEW.
    assert stepped(*bench_overhead.mlp(256), keep=0.95) == []
    assert len(stepped(*mlp(), keep=0.95)) == 1


def through_a_function(model: nn.Module, batch: Batch) -> torch.Tensor:
    return row_losses(lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True), batch)


def depthwise() -> tuple[nn.Module, Batch]:
    """Its kernels reach a fraction of the speed that the count takes."""
    convolutions = [nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(32, 8)), (torch.randn(8, 3, 8, 8), torch.randint(8, (8,)))


def in_double() -> tuple[nn.Module, Batch]:
    model, (inputs, target) = mlp()
    return model.double(), (inputs.double(), target)


SILENT: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], dict[str, Any]]] = {
    "the oracle": (mlp, {"engine": Masked()}),
    "a second forward": (mlp, {"engine": Recompute()}),
    "a convolution in groups": (depthwise, {}),
    "a custom function": (mlp, {"losses": through_a_function}),
    "float64": (in_double, {}),
}


@pytest.mark.parametrize("name", SILENT)
def test_it_is_silent_where_the_count_says_nothing_certain(name: str):
    # Red when the engine, the dtype, a convolution's groups or a node of unknown work is not asked for.
    made, options = SILENT[name]
    assert stepped(*made(), **options) == []


def test_it_is_silent_under_autocast_and_on_a_device_whose_costs_nobody_measured(monkeypatch: pytest.MonkeyPatch):
    # The step is called in autocast, as training loops do. Red when autocast or the kind of device is not asked for.
    with torch.autocast("cpu", torch.bfloat16):
        assert stepped(*mlp()) == []
    monkeypatch.setattr("rowprop.step.small.COSTS", {})
    assert stepped(*mlp()) == []


@pytest.mark.parametrize(("last_s", "warnings_of"), [(0.04, [0] * 10 + [1, 0]), (0.06, [0] * 12)])
def test_a_device_that_is_done_once_all_is_queued_waits_for_python(
    monkeypatch: pytest.MonkeyPatch, last_s: float, warnings_of: list[int]
):
    # The host queues each backward in a second, and the device is done so much later; in the first five, whose kernels
    # are loaded, and in the last one as told. Red when it judges other backwards, or one of them alone, or goes on.
    later_s = iter([9.0] * 5 + [0.0] * 4 + [last_s])
    clock = SimpleNamespace(s=0.0)

    def perf_counter() -> float:
        clock.s += 1.0
        return clock.s

    monkeypatch.setattr("rowprop.step.small.has_streams", lambda device: True)
    monkeypatch.setattr("rowprop.step.small.time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr("rowprop.step.small.drained_s", lambda device: clock.s + next(later_s))
    model, batch = mlp()
    selective = SelectiveBackprop(model, row_losses, rowprop.TopK(0.25))
    assert [len(warned(lambda: selective(batch)[0].backward())) for _ in range(12)] == warnings_of


def test_nobody_waits_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    # Red without the look whether the loss is readable: a wait ends the capture.
    monkeypatch.setattr("rowprop.step.small.has_streams", lambda device: True)
    monkeypatch.setattr("rowprop.step.small.readable", lambda loss: False)
    monkeypatch.setattr("rowprop.step.small.drained_s", lambda device: pytest.fail("it waited"))
    model, batch = mlp()
    SelectiveBackprop(model, row_losses, rowprop.TopK(0.25))(batch)[0].backward()


def test_it_can_be_filtered_and_changes_no_result(monkeypatch: pytest.MonkeyPatch):
    # Red when the look draws, or runs anything of the model.
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, batch = mlp()
        model.insert(1, nn.Dropout(0.5))
        selective = SelectiveBackprop(model, row_losses, rowprop.RandomRows(0.25))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", rowprop.TooSmall)
            for _ in range(3):
                selective(batch)[0].backward()
        assert caught == []
        return [*[p.grad for p in model.parameters()], torch.get_rng_state()]

    looked = trained()
    monkeypatch.setattr("rowprop.step.selective.warn_if_too_small", lambda *_: True)
    assert all(map(torch.equal, looked, trained()))


def test_what_measures_the_step_anyway_says_nothing(tmp_path: Path):
    # Red without `unwarned` at one of the four.
    model, batch = mlp()
    settings = Settings(data="compare_cases:tiny", model="compare_cases:stacked", methods="ohem", epochs=1, seeds=1)

    def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
        return row_losses(model, batch)

    assert warned(lambda: rowprop.plan(model, batch, losses, keep=0.25, rounds=1)) == []
    assert warned(lambda: rowprop.verify(model, batch, losses, keep=0.25)) == []
    assert warned(lambda: rowprop.cost.profile.profile(model, batch, losses)) == []
    assert warned(lambda: compare(settings, tmp_path / "out")) == []
