"""The profile against planted causes and closed formulas, and its sentences against made-up numbers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from typer.testing import CliRunner

from profile_cases import HEALTHY, PLANTED, example
from rowprop.app.cli import app
from rowprop.app.model import default_losses
from rowprop.cost.findings import Calls, Finding, Node, Observed, Op, diagnose
from rowprop.cost.measure import Timing
from rowprop.cost.profile import ENGINE, MARK, MODULE, Trace, profile
from rowprop.cost.where import Modules
from rowprop.errors import InvalidInput
from untouched import untouched

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def planted(name: str) -> list[Finding]:
    return profile(*PLANTED[name][0](), rounds=2).findings


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(name: str):
    _, kind, where = PLANTED[name]
    assert (planted(name)[0].kind, planted(name)[0].where) == (kind, where)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_step(name: str):
    assert profile(*HEALTHY[name](), rounds=5).findings == []


def test_the_calls_that_grow_from_forward_to_backward_are_counted():
    # In float64 neither oneDNN nor cuDNN runs the convolution: torch loops over 32 rows x 16 channels.
    growth = next(found for found in planted("a convolution's backward by hand") if found.kind == "call_growth")
    assert growth.where == "slow_conv_dilated2d in the backward of 2"
    assert growth.evidence.endswith(
        "slow_conv_dilated2d is called 512 times in 1 GroupedBackwardConv2dBackward, and 0 times in the whole forward."
    )


def test_the_examples_two_ways_have_the_same_gradient():
    grads: list[torch.Tensor] = []
    for name in ("slow", "right"):
        model, batch, losses_fn = example(name, dtype="float64")
        losses_fn(model, batch).mean().backward()
        grads.append(model.get_parameter("2.weight").grad)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)
    # The masked half and the unused channels get no gradient.
    assert grads[0].count_nonzero() == model[2].mask[:, :16].count_nonzero()


N, INPUTS, HIDDEN, OUTPUTS = 16, 8, 12, 4


def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    hidden = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), hidden, nn.Linear(HIDDEN, OUTPUTS))
    return model, (torch.randn(N, INPUTS), torch.randn(N, OUTPUTS))


def test_flops_bytes_and_calls_are_the_closed_formulas_by_module_and_op():
    found = profile(*small(), default_losses, rounds=1)
    modules = {row.name: row for row in found.modules}
    # 2 FLOPs per weight and row; as many for the weight's gradient and for the input's, which the first layer lacks.
    expected = {"0": (INPUTS * HIDDEN, 1), "1.0": (HIDDEN * HIDDEN, 2), "2": (HIDDEN * OUTPUTS, 2)}
    for path, (weights, gradients) in expected.items():
        row = modules[path]
        assert (row.forward_flops, row.backward_flops) == (2 * N * weights, gradients * 2 * N * weights)
    assert found.forward_flops == sum(2 * N * weights for weights, _ in expected.values())
    assert found.counted_ratio == found.backward_flops / found.forward_flops
    ops = {row.name: row for row in found.ops}
    assert (ops["addmm"].forward_calls, ops["addmm"].backward_calls, ops["mm"].backward_calls) == (3, 0, 5)
    # tanh reads one tensor and writes one; its backward reads the gradient and the result and writes one; float32.
    assert modules["1.1"].bytes == (2 + 3) * 4 * N * HIDDEN
    assert modules["1.1"].backward_calls == 1
    assert {"losses_fn", "parameters"} < modules.keys()
    assert sum(row.share for row in found.ops) + found.outside_share == pytest.approx(1)
    assert sum(row.share for row in found.modules) + found.outside_share == pytest.approx(1)
    assert found.uncounted == {}


def test_nothing_is_left_behind():
    with pytest.raises(InvalidInput, match=r"a function, but a torch.nn.Module was needed"):
        profile(default_losses, (torch.ones(2),), default_losses)
    model, batch = small()
    model.insert(1, nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Dropout()))
    model[0].bias.grad = torch.ones(HIDDEN)
    with untouched(model):
        profile(model, batch, default_losses, rounds=1)


def test_a_checkpoints_second_forward_is_part_of_the_backward_and_of_its_modules():
    model, batch = small()

    def losses_fn(model, batch):
        out = torch.utils.checkpoint.checkpoint(model[1], model[0](batch[0]), use_reentrant=False)
        return (model[2](out) - batch[1]).square().mean(1)

    found = profile(model, batch, losses_fn, rounds=1)
    row = next(row for row in found.modules if row.name == "1.0")
    assert (row.forward_flops, row.backward_flops) == (2 * N * HIDDEN**2, 3 * 2 * N * HIDDEN**2)


def test_a_compiled_model_is_counted():
    model, batch = small()
    expected = profile(model, batch, default_losses, rounds=1)
    found = profile(torch.compile(model, backend="eager"), batch, default_losses, rounds=1)
    assert (found.forward_flops, found.backward_flops) == (expected.forward_flops, expected.backward_flops)
    assert found.findings == []


class Recording:
    """Events like the profiler's, made by hand: name, microseconds of its own, the events that it called."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.roots: list[SimpleNamespace] = []

    def event(self, name: str, own_us: float, *children: tuple, number: int = -1, parent: object = None):
        start = self.now_us
        made = SimpleNamespace(name=name, sequence_nr=number, cpu_parent=parent, cpu_children=[])
        made.device_type, made.device_time_total = DeviceType.CPU, 0
        self.now_us += own_us
        made.cpu_children += [self.event(*child[:2], *child[2:], parent=made) for child in children]
        made.time_range = SimpleNamespace(start=start, end=self.now_us)
        made.cpu_time_total = self.now_us - start
        if parent is None:
            self.roots.append(made)
        return made


def test_a_trace_has_the_least_of_each_place_and_all_calls_of_one_step():
    recording = Recording()
    for relu_us, conv_us in ((10, 900), (700, 50), (20, 60)):  # each step is disturbed elsewhere
        conv = ("aten::conv2d", 1, ("aten::convolution", 5, ("aten::_slow_conv2d_forward", conv_us)))
        recording.event(MARK + "forward", 2, (MODULE + "a.b", 3, conv, ("aten::relu", relu_us)))
        engine = recording.event(MARK + "backward", 4, (ENGINE + "XBackward", 1, ("aten::mm", 7), ("aten::mm", 8)))
        engine.cpu_children[0].sequence_nr = 5
    modules = Modules(nn.Linear(1, 1))
    modules._spans = [(0, 10, "a"), (4, 6, "a.b")]
    trace = Trace(modules, {}, accelerator=False)
    for name in ("convolution", "relu", "mm"):  # the ops that are counted; conv2d is made of them
        trace.op("forward", "elsewhere", "", name)
    trace.read(recording.roots)
    relu, conv = trace.ops["forward", "a.b", "", "relu"], trace.ops["forward", "a.b", "", "convolution"]
    assert (relu.ran.calls, relu.ran.time_s) == (1, pytest.approx(10e-6))
    assert (conv.ran.calls, conv.ran.time_s) == (1, pytest.approx(55e-6))
    mm = trace.ops["backward", "a.b", "XBackward", "mm"]
    assert (mm.ran.calls, mm.ran.time_s) == (2, pytest.approx(15e-6))
    assert trace.nodes["XBackward", "a.b"].ran == Calls(1, pytest.approx(16e-6))
    assert trace.total_s["forward"] == pytest.approx((2 + 3 + 1 + 5 + 50 + 10) * 1e-6)
    assert conv.inside["_slow_conv2d_forward"] == Calls(1, pytest.approx(50e-6))
    assert relu.host_s == pytest.approx(10e-6) and mm.host_s == pytest.approx(15e-6)


BASE = Observed(
    forward_s=0.010, backward_s=0.020, profiled_forward_s=0.010, profiled_backward_s=0.020,
    flops_per_s=1e11, bytes_per_s=1e10,
    ops=[
        Op("forward", "fc", "", "addmm", Calls(1, 0.010), flops=10**9, bytes=10**6),
        Op("backward", "fc", "AddmmBackward0", "mm", Calls(2, 0.020), flops=2 * 10**9, bytes=2 * 10**6),
    ],
)  # fmt: skip
"""A step of 30 ms at the machine's speed."""


def with_op(op: Op, **changes: object) -> Observed:
    return replace(BASE, ops=[*BASE.ops, op], **changes)


def found_in(seen: Observed) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in diagnose(seen)]


@pytest.mark.parametrize(
    ("times", "counted", "found"),
    [(2.49, 1, False), (2.51, 1, True), (2.51, 0.5, True), (4.9, 2, False), (5.1, 2, True)],
)
def test_the_ratio_is_held_against_the_counted_one(times: float, counted: float, found: bool):
    ops = [BASE.ops[0], replace(BASE.ops[1], flops=int(counted * 10**9))]
    slow = times * 0.010
    findings = diagnose(replace(BASE, ops=ops, backward_s=slow, profiled_backward_s=slow))
    assert [finding.kind for finding in findings] == ["backward_forward_ratio"] * found
    if found:
        told = f"{times:.1f} times the forward ({slow * 1000:.3g} ms against 10 ms) for {counted:.1f} times its FLOPs"
        assert told in findings[0].evidence


# Seconds of the forward and of the backward of each step, and the ratio; for 2 times the FLOPs.
ROUNDS = {
    "a quiet moment in one forward": ([(0.010, 0.014)] * 4 + [(0.0015, 0.013)], 1.4),
    "a disturbed backward in a few steps": ([(0.010, 0.014)] * 3 + [(0.010, 0.090)] * 2, 1.4),
    "a slow backward in a busy machine": ([(0.010, 0.060), (0.030, 0.180), (0.090, 0.100)], 6.0),
    "of two steps the healthy one": ([(0.010, 0.090), (0.010, 0.014)], 1.4),
}


@pytest.mark.parametrize(("rounds", "ratio"), ROUNDS.values(), ids=ROUNDS)
def test_the_finding_on_the_ratio_has_the_median_ratio_of_the_steps(rounds, ratio: float, monkeypatch):
    # Red with the least of the forwards and of the backwards: "8.7 times the forward" beside a ratio of 1.40.
    timing = Timing(tuple({"forward": forward_s, "backward": backward_s} for forward_s, backward_s in rounds), 0)
    seen: list[Observed] = []
    monkeypatch.setattr("rowprop.cost.profile.measure_step", lambda *_, **__: defaultdict(lambda: timing))
    monkeypatch.setattr("rowprop.cost.profile.diagnose", lambda found: seen.append(found) or [])
    found = profile(*small(), default_losses)
    assert found.measured_ratio == pytest.approx(ratio)
    made = replace(BASE, forward_s=seen[0].forward_s, backward_s=seen[0].backward_s, profiled_backward_s=0.1)
    told = [finding.evidence for finding in diagnose(made)]
    assert len(told) == (ratio > 5) and all(f"takes {ratio:.1f} times the forward" in evidence for evidence in told)


@pytest.mark.parametrize(
    ("time_s", "calls", "found"),
    [
        (0.011, 1, True),  # 27 % of the step, 110 times what 1 MB takes
        (0.007, 1, False),  # 19 % of it
        (0.011, 200, False),  # 55 microseconds each: any call costs as much
    ],
)
def test_an_op_is_slow_by_arithmetic_and_memory(time_s: float, calls: int, found: bool):
    op = Op("forward", "sorts", "", "sort", Calls(calls, time_s), bytes=10**6)
    findings = diagnose(with_op(op, profiled_forward_s=0.010 + time_s))
    assert [(finding.kind, finding.where) for finding in findings] == [("slow_op", "sort in sorts")] * found
    if found:
        assert "110 times the time that this machine's arithmetic and memory need" in findings[0].evidence
        assert findings[0].share == pytest.approx(11 / 41)
    # Red when bytes or FLOPs are left out of the bound: with more work the same time is no finding.
    assert diagnose(with_op(replace(op, bytes=10**7), profiled_forward_s=0.010 + time_s)) == []
    assert diagnose(with_op(replace(op, flops=10**8), profiled_forward_s=0.010 + time_s)) == []


CLIP = Op("forward", "clip", "", "_local_scalar_dense", Calls(3, 0.0), host_s=0.009, bytes=12)
CUSTOM, LOOPING = Node("FBackward", "m", Calls(1, 0.008), "F", forward_s=0.001), Node("FBackward", "m", Calls(1, 0.008))
LOOPED = Op("backward", "m", "FBackward", "sum", Calls(1, 0.006), flops=None, inside={"mul": Calls(40, 0.006)})
CAST = Op("forward", "m", "", "_to_copy", Calls(10, 0.012), bytes=10**7, casts={"float32 to float64": 10})
KERNELS = {"thnn_conv2d": Calls(3, 0.008), "_slow_conv2d_forward": Calls(3, 0.007)}
UNFOLDED = Op("forward", "m", "", "convolution", Calls(1, 0.010), flops=None, inside=KERNELS)
CAUSES = {  # by kind and place: the step, the cause's time in ms of 30, and a part of the evidence
    ("host_sync", "_local_scalar_dense in clip"): (
        with_op(CLIP, accelerator=True), 9, "the host waits for the accelerator in 3 calls, 9 ms of 30 ms",
    ),
    ("custom_function", "F in m"): (
        replace(BASE, nodes=[CUSTOM]), 8, "the backward takes 8 times its forward (8 ms against 1 ms)",
    ),
    ("call_growth", "mul in the backward of m"): (
        with_op(LOOPED, nodes=[LOOPING]), 6, "called 40 times in 1 FBackward, and 0 times in the whole forward",
    ),
    ("casts", "_to_copy in m"): (with_op(CAST), 12, "changing dtypes (float32 to float64 10), most of it in m"),
    ("copies", "_to_copy in m"): (with_op(replace(CAST, casts={})), 12, "10 copies of tensors, most of the time in m"),
    # Of slow kernels inside one another the outermost counts.
    ("slow_kernel", "thnn_conv2d in m"): (
        with_op(UNFOLDED), 8,
        "3 calls of a convolution that neither oneDNN nor cuDNN runs (it unfolds its input, row by row).",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause[0])
def test_a_cause_is_found_alone_with_its_share_and_its_evidence(cause: tuple[str, str]):
    # Red when: changed dtypes count as casts and as copies; both of two kernels, or the op around them, count.
    seen, milliseconds, evidence = CAUSES[cause]
    (finding,) = diagnose(seen)
    assert (finding.kind, finding.where) == cause and finding.share == pytest.approx(milliseconds / 30)
    assert (
        finding.evidence.startswith(f"{100 * milliseconds / 30:.0f} % of the step: ") and evidence in finding.evidence
    )


MULTIPLIES = Op("forward", "m", "", "mul", Calls(6, 0.0001), bytes=10**6)
NOTHING_SAID = {
    "a step at the machine's speed": BASE,
    "a ratio that only one measurement shows": replace(BASE, backward_s=0.1),
    "a ratio that only the other measurement shows": replace(BASE, profiled_backward_s=0.1),
    "an op without a formula": with_op(Op("forward", "m", "", "mystery", Calls(1, 0.011), flops=None, bytes=10)),
    "waiting where there is no accelerator": with_op(CLIP),
    "a short wait": with_op(replace(CLIP, host_s=0.001), accelerator=True),
    "a custom function of three times its forward": replace(BASE, nodes=[replace(CUSTOM, forward_s=0.003)]),
    "a function of torch": replace(BASE, nodes=[replace(CUSTOM, function="")]),
    "a checkpoint, which runs its forward again": replace(BASE, ops=[*BASE.ops, LOOPED, MULTIPLIES], nodes=[LOOPING]),
    "20 calls in each of two nodes": with_op(LOOPED, nodes=[replace(LOOPING, ran=Calls(2, 0.008))]),
}


@pytest.mark.parametrize("healthy", NOTHING_SAID)
def test_nothing_is_said_of(healthy: str):
    assert diagnose(NOTHING_SAID[healthy]) == []


def test_causes_come_first_then_the_ratio():
    op = Op("backward", "sorts", "SortBackward0", "sort", Calls(1, 0.03), bytes=10**6)
    seen = with_op(op, backward_s=0.06, profiled_backward_s=0.06)
    assert found_in(seen) == [("slow_op", "sort in sorts"), ("backward_forward_ratio", "the backward")]


def run(*arguments: str | Path):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def test_the_command_prints_tables_and_findings_and_writes_its_files(tmp_path: Path):
    trace = tmp_path / "trace.json.gz"
    result = run("profile_cases:sorting", "--rounds", "5", "--trace", trace)
    assert result.exit_code == 0, result.stderr
    lines = {line.strip() for line in result.stdout.splitlines()}
    assert {"By op", "By module, without the modules inside it"} <= lines
    assert "1. slow_op: sort in 1" in result.stdout
    assert str(trace) in result.stderr
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {MARK + "forward", MARK + "backward", MODULE + "1", "aten::sort"} <= names


def test_a_process_of_its_own_says_nothing_but_the_json():
    # The profiler's own messages come from below Python, where the runner above does not see them.
    places = os.pathsep.join(str(ROOT / place) for place in ("tools", "src", "benchmarks"))
    command = [sys.executable, "-m", "rowprop.app.cli", "profile", "profile_cases:sorting", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": places})
    assert all(line.startswith("rowprop: ") for line in done.stderr.splitlines())  # progress, where the work took long
    found = json.loads(done.stdout)
    assert found["model"] == "profile_cases:sorting" and found["ops"][0]["name"] == "sort"
    assert {"modules", "measured_ratio", "counted_ratio", "uncounted"} <= found.keys()
    assert {"kind", "where", "evidence", "remedy", "share", "figures"} == found["findings"][0].keys()
    assert found["timing"]["rounds"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model_cases:mlp"], "comes without a batch"),
        (["model_cases:complete", "--trace", "file/trace.json"], "cannot write to file/trace.json (Not a directory)"),
        (["model_cases:complete", "--trace", "nowhere/trace.json"], "cannot write to nowhere/trace.json (No such file"),
        (["model_cases:complete", "--trace", "empty"], "cannot write to empty (Is a directory)"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red: `check_writable` left out for --trace: torch puts its file in the place of an empty folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rowprop.cost.profile.measure_step", None)  # nothing is measured before
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    result = run(*arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rowprop: ") and sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_disk_that_is_full_at_the_end_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch):
    # Red: torch's own export to the path: exit code 0, "is written", a file of 0 bytes and a stray .tmp.
    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "kept").write_text("as it was")
    monkeypatch.setattr("rowprop.files.os.fsync", no_room)
    result = run("model_cases:complete", "--rounds", "1", "--trace", tmp_path / "kept")
    assert result.exit_code == 2
    assert "rowprop: cannot write to" in result.stderr and "(No space left on device)" in result.stderr
    assert "is written" not in result.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "as it was")]


def test_a_profiler_that_wrote_nothing_is_one_sentence(tmp_path: Path, monkeypatch):
    # Red: `_exported` returns the file's content unchecked.
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(path).write_text("{"))
    result = run("model_cases:complete", "--rounds", "1", "--trace", tmp_path / "trace.json")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "the trace could not be written into the temporary folder" in result.stderr


def test_a_tick_is_told_of_the_progress():
    # Red: the fraction of the plain steps is not scaled by their share of the work (the fraction falls afterwards).
    ticks: list[tuple[str, float]] = []
    model, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.randint(3, (8,)))
    profile(model, batch, default_losses, rounds=2, tick=lambda line, fraction: ticks.append((line, fraction)))
    fractions = [fraction for _, fraction in ticks]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < 1
    assert sum(line.startswith("plain steps: ") for line, _ in ticks) >= 2
    assert any("8 steps under the profiler, about" in line for line, _ in ticks)
