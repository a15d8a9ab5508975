"""Everything that one GPU is needed for, in under 20 minutes: tests, ``verify``, whole training steps.

The parts run one after the other, each in a process of its own; the compiled models compile in processes side by side,
and are then measured one by one. The results so far are written after each part, so a part that fails or runs out of
time loses nothing but its own rest.

``tests``: the tests marked ``gpu``. ``verify``: ten models in bfloat16 against plain indexing. ``tokens``: training
steps of decoders that keep some of their tokens, attention exact and cut, beside their limits
(``benchmarks/bench_tokens.py``). ``eager``, ``compiled`` and ``graphs``: training steps that fill the device, the plain
step beside the engines, under bfloat16 autocast with AdamW, in interleaved rounds; the models as they are, compiled,
and compiled with ``mode="reduce-overhead"``.

A ratio is an engine's time of forward and backward over the plain step's in the same round; the limit is
(F + kB)/(F + B) of the same rounds. Device time is from CUDA events. Host time runs until the calls of forward and
backward returned: where it is as long as the device time, the host is what the step waits for. The peak is the most
memory that a step held beyond the memory held before it. Compiled, ``sliced`` is the model compiled with
``backend="rowprop"``, and every other engine is the same model compiled by Inductor in the same mode.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_tokens
import gpu_page
import rowprop
from bench_step import (
    ENGINES,
    KEEPS,
    RESULTS,
    Bench,
    Steps,
    compiled,
    device_stem,
    draw,
    measure,
    num_kept,
    row_losses,
    save,
    setting,
    sliced,
    summarize,
)
from gpu_models import CHECKED, FULL, TINY, TITLES, Made
from rowprop.app.model import load_model
from rowprop.cost.flops import count_flops
from rowprop.cost.measure import peak_bytes
from rowprop.files import write_whole

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).with_name("gpu_models.py")
LIMITS_S = {"tests": 180, "verify": 60, "tokens": 60, "eager": 160, "compiled": 300, "graphs": 300}
"""The parts in their order, and the seconds of each; a part may also use the seconds that parts before it left."""

Note = Callable[[str, Any], None]
"""Called with the name of a finding and its figures, which are written at once."""


@dataclass(frozen=True)
class Setup:
    """The device, whether this is a dry run at tiny sizes, and what a process is told that runs beside others."""

    device: torch.device
    dry: bool
    model: str = ""
    alone: Callable[[], None] = lambda: None  # waits until no other process compiles or measures

    @property
    def rounds(self) -> int:
        """How often each step is measured."""
        return 2 if self.dry else 12

    def autocast(self) -> AbstractContextManager[Any]:
        """Half precision where PyTorch finds it safe."""
        return torch.autocast(self.device.type, torch.bfloat16)


def bench_of(setup: Setup, make: Callable[[], Made]) -> Bench:
    """A model with its batch, made on the device and ready to step under autocast."""
    torch.manual_seed(0)
    with setup.device:
        model, batch, _ = make()
    # a rate so small that no step changes what the next one costs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    return Bench(model, batch, optimizer, setup.autocast)


# --- the parts --------------------------------------------------------------------------------------------------------


def attempt(note: Note, name: str, finding: Callable[[], Any]) -> None:
    """Note a finding, or why there is none."""
    try:
        found = finding()
    except Exception as error:  # the parts after it must run
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
    note(name, found)
    free_memory()


def run_tests(setup: Setup, note: Note, until_s: float) -> None:
    """The tests marked gpu, in this process."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    recorder = Recorder(note)
    several = ["-n", "8"] if importlib.util.find_spec("xdist") and not setup.dry else []
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *several]
    code = pytest.main([*options, *map(str, marked)], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        note("pytest", {"failed": f"it ended with {code!r}"})


class Recorder:
    """Notes the tests of each file as they end: how many passed or were skipped, and which failed, and why."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.files: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test's call, or the setup or teardown that kept it from passing."""
        if report.passed and report.when != "call":
            return
        file, _, test = report.nodeid.rpartition("/")[2].partition("::")
        counts = self.files.setdefault(file, {"tests": 0, "passed": 0, "skipped": 0, "failures": {}})
        counts["tests"] += 1
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            counts["failures"][test] = next((line for line in lines if line.startswith("E ")), lines[-1])[:300]
        else:
            counts["passed" if report.passed else "skipped"] += 1
        self.note(file, counts)


def run_verify(setup: Setup, note: Note, until_s: float) -> None:
    """``rowprop verify`` on ten models in bfloat16."""
    sizes = "TINY" if setup.dry else "CHECKED"
    for name in vars(CHECKED):
        attempt(note, name, lambda name=name: verified(f"{MODELS}:{sizes}.{name}", setup.device))


def verified(spec: str, device: torch.device) -> dict[str, Any]:
    """The verdict on one model."""
    begun_s = time.perf_counter()
    subject = load_model(spec, device=str(device), dtype="bfloat16")
    result = rowprop.verify(subject.model, subject.batch, subject.losses_fn)
    return {
        "status": result.status, "verdict": result.verdict, "num_rows": result.num_rows, "num_kept": result.num_kept,
        "flops_ratio": result.flops_ratio, "densified": [f"{place.module}: {place.op}" for place in result.densified],
        "seconds": time.perf_counter() - begun_s,
    }  # fmt: skip


def run_tokens(setup: Setup, note: Note, until_s: float) -> None:
    """Training steps that keep some of their tokens."""
    for name, full_size in bench_tokens.GPU.items():
        tiny = replace(full_size, sequences=4, steps=8, width=256, depth=2, vocabulary=64, hidden=64)
        attempt(note, name, lambda: of_tokens(setup, name, tiny if setup.dry else full_size))  # noqa: B023


def of_tokens(setup: Setup, name: str, size: bench_tokens.Size) -> dict[str, Any]:
    """Every figure of one decoder, and the FLOPs of a backward from a quarter of its tokens."""

    def make() -> Any:
        batch = tuple(torch.randint(size.vocabulary, (size.sequences, size.steps)) for _ in range(2))
        return bench_tokens.MODELS[name](size), batch, bench_tokens.token_losses

    bench = bench_of(setup, make)
    kept = bench_tokens.draw(size, 0.25, setup.device)
    counted: dict[str, int] = {}
    for variant, loss_of in bench_tokens.VARIANTS.items():
        with bench.autocast():
            loss = loss_of(bench.model, bench.batch, kept)
        with count_flops() as seen:
            loss.backward()
        bench.optimizer.zero_grad(set_to_none=True)
        counted[variant] = seen.total_flops
    steps = bench_tokens.measure(bench, size, 2 if setup.dry else 10)
    return {**bench_tokens.summarize(name, size, steps), "backward_flops": counted}


def run_eager(setup: Setup, note: Note, until_s: float) -> None:
    """Training steps at sizes that fill the device, in equal shares of the time that is left."""
    names = list(vars(FULL))
    for place, name in enumerate(names):
        now_s = time.perf_counter()
        share_s = max(0.0, until_s - now_s) / (len(names) - place)
        attempt(note, name, lambda: of_eager(setup, name, share_s))  # noqa: B023


def of_eager(setup: Setup, name: str, share_s: float) -> dict[str, Any]:
    """Every figure of one workload."""
    bench = bench_named(setup, name)
    return {**measured(setup, name, dict.fromkeys(BY_NEED, bench), share_s), "flops": flops(bench)}


def run_compiled(setup: Setup, note: Note, until_s: float, mode: str = "default") -> None:
    """The same steps of one compiled model: half of the time is for compiling, the rest for measuring all models."""
    half_s = max(0.0, until_s - time.perf_counter()) / 2

    def found() -> dict[str, Any]:
        bench = bench_named(setup, setup.model)
        benches, first = compiled_benches(bench, setup.dry, mode), None
        try:
            first = first_steps(benches, half_s)
        except torch.OutOfMemoryError:  # beside the others; its traceback holds tensors until the block ends
            bench.optimizer.zero_grad(set_to_none=True)
        free_memory()
        setup.alone()
        taken, left_out, first_s = first or first_steps(benches, half_s)
        steps = measured(setup, setup.model, taken, half_s / len(vars(FULL)))
        return {**steps, "first_steps_s": first_s, "left_out": left_out}

    attempt(note, setup.model, found)


def bench_named(setup: Setup, name: str) -> Bench:
    """A model of ``FULL``, in a dry run of ``TINY``."""
    return bench_of(setup, getattr(TINY if setup.dry else FULL, name))


def measured(setup: Setup, name: str, benches: dict[str, Bench], share_s: float) -> dict[str, Any]:
    """The figures of one workload's steps."""
    until_s, batch = time.perf_counter() + share_s, benches["full"].batch
    n = batch[0].shape[0]
    peaks = {(keep, engine): peak(benches[engine], engine, draw(n, keep, setup.device))
             for keep in KEEPS for engine in benches}  # fmt: skip
    steps = measure(benches, setup.rounds, warmup=0 if setup.dry else 2, until_s=until_s)
    found = summarize(name, n, steps)
    found["title"], found["sizes"], found["left_out"] = TITLES[name], [list(t.shape) for t in batch], {}
    for variant in found["variants"]:
        variant["peak_bytes"] = peaks[variant["keep"], variant["engine"]]
    found["plain"] = [{"keep": keep, "peak_bytes": peaks[keep, "full"]} for keep in KEEPS]
    found["steps"] = every_step(steps)
    return found


BY_NEED = ("full", "sliced", "recompute")
"""The engines, in the order in which their figures are wanted."""


def compiled_benches(bench: Bench, dry: bool, mode: str) -> dict[str, Bench]:
    """The same model, compiled by Inductor and by rowprop; a dry run stops before Inductor, which would compile C++."""
    from rowprop.backprop.compiled import backend  # reads what torch keeps to itself

    torch._dynamo.reset()
    if dry:
        return compiled(bench, BY_NEED, partial(backend, options={"kernels": "eager"}), "aot_eager")
    return compiled(bench, BY_NEED, backend, mode=mode)


def first_steps(benches: dict[str, Bench], allowed_s: float) -> tuple[dict[str, Bench], dict[str, str], float]:
    """Run the first steps of every engine, in which models compile; how long they took.

    ``recompute`` compiles two more graphs, and is left out where its turn comes too late.
    """
    begun_s = time.perf_counter()
    taken: dict[str, Bench] = {}
    left_out: dict[str, str] = {}
    first = next(iter(benches.values())).batch[0]
    for engine, bench in benches.items():
        if engine == "recompute" and time.perf_counter() > begun_s + allowed_s / 2:
            left_out[engine] = "no time was left to compile it"
            continue
        for keep in KEEPS:
            bench.step(ENGINES[engine], draw(first.shape[0], keep, first.device))
            free_memory()
        taken[engine] = bench
    return taken, left_out, time.perf_counter() - begun_s


def free_memory() -> None:
    """Leave to other processes what this one holds no tensor in."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak(bench: Bench, engine: str, rows: torch.Tensor) -> int:
    """The most memory that a step holds beyond the memory held before it."""
    return peak_bytes(lambda done: bench.step(ENGINES[engine], rows), [rows.device])


def every_step(steps: Steps) -> list[dict[str, Any]]:
    """The seconds of every step, from which all figures are computed."""
    return [
        {
            "keep": keep, "engine": engine, "forward_s": [s.forward_s for s in taken],
            "backward_s": [s.backward_s for s in taken], "host_s": [s.host_s for s in taken],
        }
        for (keep, engine), taken in steps.items()
    ]  # fmt: skip


def flops(bench: Bench) -> list[dict[str, Any]]:
    """What the backward of K rows counts, beside that of all rows, and the ops at which it ran on all rows."""

    def counted(loss: torch.Tensor) -> tuple[int, list[str]]:
        with rowprop.watch() as report, count_flops() as seen:
            loss.backward()
        bench.optimizer.zero_grad(set_to_none=True)
        return seen.total_flops, sorted(report.densified)

    n, device = bench.batch[0].shape[0], bench.batch[0].device
    with bench.autocast():
        full, _ = counted(row_losses(bench.model, bench.batch).mean())
    found: list[dict[str, Any]] = []
    for keep in KEEPS:
        with bench.autocast():
            loss = sliced(bench.model, bench.batch, draw(n, keep, device))
        backward, densified = counted(loss)
        found.append({"keep": keep, "kept": num_kept(n, keep), "backward_flops": backward, "full_backward_flops": full,
                      "densified": densified})  # fmt: skip
    return found


RUNS: dict[str, Callable[[Setup, Note, float], None]] = {
    "tests": run_tests, "verify": run_verify, "tokens": run_tokens, "eager": run_eager,
    "compiled": run_compiled, "graphs": partial(run_compiled, mode="reduce-overhead"),
}  # fmt: skip


# --- one process per part ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What a part's process is told: the part, where its findings go, its seconds, and whether the run is dry."""

    part: str
    into: Path
    limit_s: float
    dry: bool
    model: str = ""  # that a process of a part with compiled models is for

    def arguments(self) -> list[str]:
        """For the command line of :meth:`run`."""
        told = {"part": self.part, "into": self.into, "limit": self.limit_s, "model": self.model}
        return [*(word for name, value in told.items() for word in (f"--{name}", str(value))), *["--dry"] * self.dry]

    def run(self) -> None:
        """In the part's own process: find, and write each finding at once."""
        found: dict[str, Any] = {}

        def note(name: str, figures: Any) -> None:
            found[name] = figures
            write_whole(self.into, json.dumps(found).encode())
            if self.part != "tests":  # pytest tells of each
                print(f"{self.part}: {name}: {told(figures)}", flush=True)

        with self.into.with_name("turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_SH)  # so no other process is alone until this one is done, or asks to be
            setup = Setup(device_of(self.dry), self.dry, self.model, partial(fcntl.flock, turn, fcntl.LOCK_EX))
            RUNS[self.part](setup, note, time.perf_counter() + 0.9 * self.limit_s)

    def watched(self) -> dict[str, Any]:
        """In the first process: start the part's process, end it at its limit, and read its findings."""
        begun_s = time.perf_counter()
        status = "done"
        with process([sys.executable, __file__, *self.arguments()]) as child:
            try:
                if child.wait(self.limit_s) != 0:
                    status = f"ended with code {child.returncode}"
            except subprocess.TimeoutExpired:
                status = f"stopped at its limit of {self.limit_s:.0f} s"
        found = json.loads(self.into.read_text()) if self.into.exists() else {}
        return {"status": status, "seconds": time.perf_counter() - begun_s, "found": found}


def side_by_side(orders: list[Order]) -> dict[str, Any]:
    """Watch several processes of one part; in a dry run one after the other. What they found, in one."""
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(1 if orders[0].dry else len(orders)) as threads:
        ran = list(threads.map(Order.watched, orders))
    ended = [part["status"] for part in ran if part["status"] != "done"]
    found = {name: figures for part in ran for name, figures in part["found"].items()}
    return {"status": [*ended, "done"][0], "seconds": time.perf_counter() - begun_s, "found": found}


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and the processes that it started, such as compilers, with it."""
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def told(figures: Any) -> str:
    """A finding in a line."""
    if "failed" in figures:
        return f"failed: {figures['failed']}"
    return figures.get("verdict", "measured")


def device_of(dry: bool) -> torch.device:
    """The GPU; in a dry run the CPU, whatever else there is."""
    return torch.device("cpu") if dry else torch.device("cuda", 0)


def is_good(part: dict[str, Any]) -> bool:
    """Whether a part ran to its end, without a failure and with every model as documented."""
    entries = part["found"].values()
    return part["status"] == "done" and not any(
        "failed" in entry or entry.get("failures") or entry.get("status") == "disagrees" for entry in entries
    )


def main() -> int:
    """Run all parts, and write what they found after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="run every part on the CPU at tiny sizes: under a minute")
    parser.add_argument("--parts", default=",".join(RUNS), help="comma-separated (default all)")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default benchmarks/results; if --dry, a new one)"
    )
    for hidden, kind in (("part", str), ("into", Path), ("limit", float), ("model", str)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - RUNS.keys():
        parser.error(f"--parts has {', '.join(sorted(unknown))}, but the parts are {', '.join(RUNS)}")
    if not args.dry and not torch.cuda.is_available():
        print("scripts/gpu needs a CUDA device that torch sees; scripts/gpu --dry runs it on the CPU.", file=sys.stderr)
        return 1
    if args.part:
        Order(args.part, args.into, args.limit, args.dry, args.model).run()
        return 0
    device = device_of(args.dry)
    stem = "gpu-dry" if args.dry else f"gpu-{device_stem(device, 0).removeprefix('nvidia-')}"
    result: dict[str, Any] = {
        "command": " ".join(["scripts/gpu", *sys.argv[1:]]),
        "setting": setting(
            device, torch.get_num_threads(), dtype="bfloat16 autocast", cuda=str(torch.version.cuda),
            cudnn=str(torch.backends.cudnn.version()),
        ),
        "dry": args.dry,
        "seconds": 0.0,
        "parts": {},
    }  # fmt: skip
    out = args.out or (Path(tempfile.mkdtemp(prefix="rowprop-gpu-")) if args.dry else RESULTS)
    begun_s, allowed_s = time.perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            allowed_s += LIMITS_S[part] * (10 if args.dry else 1)  # a machine that runs tests may be busy
            passed_s = time.perf_counter() - begun_s
            models = list(vars(FULL)) if part in ("compiled", "graphs") else [""]
            orders = [
                Order(part, Path(folder) / f"{part}{model}.json", allowed_s - passed_s, args.dry, model)
                for model in models
            ]
            result["parts"][part] = side_by_side(orders)
            result["seconds"] = time.perf_counter() - begun_s
            save(out, stem, result, gpu_page.markdown(result, __doc__ or ""))
    print(gpu_page.summary(result))
    return 0 if all(map(is_good, result["parts"].values())) else 1


if __name__ == "__main__":
    sys.exit(main())
