"""scripts/gpu on the CPU: every part runs, its figures follow from its steps, and nothing is lost where a part ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import gpu
import rowprop
from bench_step import Bench
from queued_device import WORKS_ON, Accelerator
from rowprop.cost.flops import count_flops

SCRIPT = Path(gpu.__file__)
KEPT = {0.1: 2, 0.25: 4, 0.5: 8, 1.0: 16}  # of 16 rows
ENGINES = ["sliced", "recompute"]
TEN = {"mlp", "resnet18", "resnet50", "vit", "bert", "gpt2", "llama", "lstm", "unet", "moe"}
FIVE = {"resnet50", "vit", "gpt2", "llama", "llama8b"}
STEPS = ("eager", "compiled", "graphs")
pytestmark = pytest.mark.skipif("ROWPROP_GPU_DRY" not in os.environ, reason="nox -s gpu-dry runs it, in two minutes")


FEWER_PROCESSES = """
import json, gpu

def watched(order, own=gpu.Order.watched):
    if order.part == "tests":
        return own(order)
    order.run()
    return {"status": "done", "seconds": 0.0, "found": json.loads(order.into.read_text())}

gpu.Order.watched = watched
raise SystemExit(gpu.main())
"""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results of a dry run, as JSON and as a page; its parts share a process, but for the tests, which run too."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(SCRIPT.parent)]}{FEWER_PROCESSES}"]
    command += ["--dry", "--out", str(out)]
    there = {**os.environ, "ROWPROP_GPU_TESTS_ON": "cpu"}
    done = subprocess.run(command, env=there, capture_output=True, text=True, check=False, timeout=1000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (figures,), (page,) = out.glob("*-gpu-dry.json"), out.glob("*-gpu-dry.md")
    return json.loads(figures.read_text()), page.read_text()


def workloads(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [w for part in STEPS for w in result["parts"][part]["found"].values()]


def test_every_part_runs_and_finds_all_of_its_findings(dry: tuple[dict[str, Any], str]):
    # Red with a model, a measurement or a workload that fails or is left out, in any part; and when test_gpu.py has a
    # mistake that shows on any device.
    parts = dry[0]["parts"]
    assert [(name, part["status"]) for name, part in parts.items()] == [
        (name, "done") for name in ("tests", "verify", "tokens", *STEPS)
    ]
    tests = parts["tests"]["found"]
    assert {"test_gpu.py", "test_timing.py"} <= tests.keys()
    for counts in tests.values():
        assert counts["failures"] == {} and 0 < counts["tests"] == counts["passed"] + counts["skipped"]
    assert tests["test_gpu.py"]["passed"] > 0
    verdicts = {name: found["status"] for name, found in parts["verify"]["found"].items()}
    assert verdicts == dict.fromkeys(TEN, "exact")  # so few rows that BatchNorm takes the exact gradient
    assert parts["tokens"]["found"].keys() == {"gpt", "llama"}
    assert all(parts[part]["found"].keys() == FIVE for part in STEPS)
    for w in workloads(dry[0]):
        assert [(v["keep"], v["engine"]) for v in w["variants"]] == [(keep, e) for keep in KEPT for e in ENGINES]


def test_the_figures_of_a_step_follow_from_its_rounds(dry: tuple[dict[str, Any], str]):
    # Red when: a ratio is taken with the plain step of another keep, the update counts, quartiles are of something
    # else, or K is another number than asked for.
    for w in workloads(dry[0]):
        kinds = ("forward_s", "backward_s", "host_s")
        steps = {(s["keep"], s["engine"]): [np.array(s[kind]) for kind in kinds] for s in w["steps"]}
        for v in w["variants"]:
            (forward, backward, host), plain = steps[v["keep"], v["engine"]], steps[v["keep"], "full"]
            assert v["kept"] == KEPT[v["keep"]]
            gradient, full = forward + backward, plain[0] + plain[1]
            limit = (plain[0] + KEPT[v["keep"]] / 16 * plain[1]) / full
            for name, values in {"ratio": gradient / full, "gradient_s": gradient, "host_s": host}.items():
                quartiles = np.quantile(values, [0.25, 0.5, 0.75])
                assert [v[name][q] for q in ("q1", "median", "q3")] == pytest.approx(quartiles)
            assert v["limit"] == pytest.approx(np.median(limit))
            assert v["peak_bytes"] > 0


def test_the_sliced_backward_counts_the_kept_rows_share(dry: tuple[dict[str, Any], str]):
    # Red when: the rows are those of another keep, or an op of these models runs on all rows.
    for w in dry[0]["parts"]["eager"]["found"].values():
        counted = {f["keep"]: f["backward_flops"] / f["full_backward_flops"] for f in w["flops"]}
        share = {keep: kept / 16 for keep, kept in KEPT.items()}
        if w["title"] == "ViT-B/16":  # kept rows have a gradient at their class token alone, down to the last attention
            assert all(counted[keep] < share[keep] or keep == 1 for keep in KEPT), counted
        else:
            assert counted == pytest.approx(share), w["title"]
        assert not any(f["densified"] for f in w["flops"])
        assert [f["kept"] for f in w["flops"]] == list(KEPT.values())


def test_a_backward_from_a_quarter_of_the_tokens_counts_their_share(dry: tuple[dict[str, Any], str]):
    # Red when: attention is not cut, or the mask keeps another number of tokens.
    for w in dry[0]["parts"]["tokens"]["found"].values():
        counted = w["backward_flops"]
        assert counted["cut"] <= 0.27 * counted["full"] and 0.27 * counted["full"] < counted["exact"] < counted["full"]
        assert [(v["keep"], v["attention"]) for v in w["variants"]] == [(k, a) for k in KEPT for a in ("exact", "cut")]
        assert f"{counted['cut'] / counted['full']:.3f} cut" in dry[1]


def test_the_readmes_table_holds_the_same_figures(dry: tuple[dict[str, Any], str]):
    # Red with a column of another keep, and with a figure of another engine.
    result, page = dry
    table = page.partition("## For the README")[2]
    for w, engine in product(workloads(result), ("sliced", "recompute")):
        of = {v["keep"]: v for v in w["variants"] if v["engine"] == engine}
        limits = {keep: f" ({v['limit']:.2f})" if engine == "sliced" else "" for keep, v in of.items()}
        cells = [f"{of[keep]['ratio']['median']:.2f}{limits[keep]}" for keep in KEPT]
        assert f"`{engine}` | {' | '.join(cells)} |" in table
    assert "its times mean nothing" in page


def test_the_host_is_done_before_the_device(monkeypatch: pytest.MonkeyPatch):
    # Forward and backward are launched in 3 ms and run for 180; the update is launched and runs after them. Red when
    # host time ends after the update, begins before the queue is empty, or is taken from the device's events.
    device = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.accelerator, "synchronize", device.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: device.host_s)
    device.launch(5.0)  # work from before

    def forward(*_: object) -> SimpleNamespace:
        device.launch(0.060)
        return SimpleNamespace(backward=lambda: (device.launch(0.100), device.launch(0.020)))

    update = SimpleNamespace(step=lambda: device.launch(0.010), zero_grad=lambda set_to_none: None)
    bench: Any = Bench(nn.Identity(), (), cast(Any, update), nullcontext)
    step = bench.step(forward, SimpleNamespace(device=WORKS_ON))
    assert step.host_s == pytest.approx(0.003)
    assert (step.forward_s, step.backward_s, step.update_s) == pytest.approx((0.061, 0.120, 0.010))


PUBLISHED = {  # parameters, as torchvision and Hugging Face count them
    "resnet50": 25_557_032,
    "vit": 86_567_656,
    "gpt2": 124_439_808,
    "llama": 1_235_814_400 - 128_256 * 2048 + 2 * 32_000 * 2048,  # of 32,000 tokens, and the head is not tied
    "llama8b": (8_030_261_248 - 2 * 128_256 * 4096 - 4096) // 8 + 2 * 32_000 * 4096 + 4096,  # 4 of 32 layers
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_models_that_fill_a_device_are_those_that_people_train_and_stay_sliced(name: str):
    # On the device meta, where rules act as on a GPU. Red with another width or depth, with a head that is not tied,
    # and where an op of these models runs on all rows.
    with torch.device("meta"):
        model, batch, losses_fn = getattr(gpu.FULL, name)()
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    model, batch = model.bfloat16(), tuple(t.bfloat16() if t.is_floating_point() else t for t in batch)
    n = len(batch[1])
    counts: list[int] = []
    for rows in (slice(None), torch.arange(n // 4, device="meta")):
        losses = losses_fn(model, batch)
        with rowprop.watch() as report, count_flops() as seen:
            (losses if isinstance(rows, slice) else rowprop.pick(losses, rows)).mean().backward()
        counts.append(seen.total_flops)
    # Of a ViT's rows only the class token has a gradient, down to the last attention.
    assert counts[1] * 4 < counts[0] if name == "vit" else counts[1] * 4 == counts[0]
    assert not report.densified, str(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_what_it_needs():
    # Red when the parts start all the same.
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "scripts/gpu needs a CUDA device that torch sees; scripts/gpu --dry runs it on the CPU.\n"


def test_a_dry_run_takes_a_python_with_torch_as_it_is(tmp_path: Path):
    # Red when only a device makes a Python serve: the script turns to .venv, which here cannot be made.
    asked, python = tmp_path / "asked", tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho "$1" >>{asked}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for place in ("scripts/gpu", "benchmarks", "src"):
        (tmp_path / "copy" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / place).symlink_to(SCRIPT.parents[1] / place)
    command = ["bash", str(tmp_path / "copy/scripts/gpu"), "--dry", "--parts", "none"]
    search = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(command, env={**os.environ, "PATH": search}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--parts has none" in done.stderr, done.stderr
    assert asked.read_text().split() == ["-c", "benchmarks/gpu.py"]


def test_a_part_that_runs_out_of_time_leaves_what_it_found(tmp_path: Path):
    # Red when the process is not ended, or what it wrote before is not read.
    (into := tmp_path / "eager.json").write_text('{"vit": {"title": "ViT-B/16"}}')
    ran = gpu.Order("eager", into, 0.05, dry=True).watched()
    assert ran["status"] == "stopped at its limit of 0 s" and ran["found"] == {"vit": {"title": "ViT-B/16"}}
    assert not gpu.is_good(ran)


def test_a_finding_that_fails_is_told_and_the_next_one_made(capsys: pytest.CaptureFixture[str]):
    # Red when the error passes through, and when such a part counts as good.
    found: dict[str, Any] = {}

    def broken() -> Any:
        raise RuntimeError("no kernel\nand more")

    gpu.attempt(found.__setitem__, "first", broken)
    gpu.attempt(found.__setitem__, "second", lambda: {"status": "exact"})
    assert found == {"first": {"failed": "RuntimeError: no kernel"}, "second": {"status": "exact"}}
    part = {"status": "done", "found": found}
    assert not gpu.is_good(part) and gpu.is_good({"status": "done", "found": {"second": found["second"]}})
    assert "and more" in capsys.readouterr().err


def test_a_model_that_finds_no_memory_beside_others_compiles_when_it_is_alone(monkeypatch: pytest.MonkeyPatch):
    # Red when: the error ends the part, or the second try comes while others hold memory.
    done: list[str] = []

    def first_steps(benches: Any, allowed_s: float) -> Any:
        done.append("compiles")
        if len(done) == 1:
            raise torch.OutOfMemoryError
        return benches, {}, 1.0

    monkeypatch.setattr(gpu, "first_steps", first_steps)
    monkeypatch.setattr(gpu, "measured", lambda *_: {})
    setup = gpu.Setup(torch.device("cpu"), True, "gpt2", lambda: done.append("alone"))
    found: dict[str, Any] = {}
    gpu.run_compiled(setup, found.__setitem__, time.perf_counter())
    assert done == ["compiles", "alone", "compiles"] and found["gpt2"]["first_steps_s"] == 1.0


def test_nothing_compiles_while_a_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: a process does not hold the lock while it compiles, or measures without being alone.
    done: list[str] = []
    compiling, wants = Event(), Event()

    def part(setup: gpu.Setup, note: Any, until_s: float) -> None:
        if setup.model == "slow":
            compiling.set()
            wants.wait(60)
            time.sleep(0.2)  # the other waits for its turn by now
        else:
            compiling.wait(60)
            wants.set()
        done.append(f"{setup.model} is compiled")
        setup.alone()
        done.append(f"{setup.model} is measured")

    monkeypatch.setitem(gpu.RUNS, "compiled", part)
    orders = [gpu.Order("compiled", tmp_path / f"{model}.json", 60.0, True, model) for model in ("slow", "quick")]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(gpu.Order.run, orders))
    assert set(done[:2]) == {"quick is compiled", "slow is compiled"}
