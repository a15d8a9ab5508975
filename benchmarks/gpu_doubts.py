"""Five doubts that only a device settles, each as a measurement.

``new_shapes``: what the first backward of each new K costs through cuDNN's attention, and through convolutions that
cuDNN tunes. ``gathering``: rows taken by ``index_select`` and by indexing, and added by ``index_add_`` and by
``index_copy_``. ``host_time``: how long the host takes to launch a step beside the device's time for it.
``pipeline``: steps after one another, between which nobody waits for the device, and what it costs that ``skip_zeros``
waits for its count. ``captured``: a step as a CUDA graph, at fixed K with integer indices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench_step
import rowprop
from bench_step import Bench, num_kept, spread
from gpu_models import Made
from rowprop.cost.measure import Done, measure
from rowprop.host import drained_s

Figures = dict[str, Any]


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

    def made(self, make: Callable[[], Made]) -> Made:
        """The model, batch and losses, made on the device."""
        torch.manual_seed(0)
        with self.device:
            return make()


def bench_of(setup: Setup, make: Callable[[], Made]) -> Bench:
    """A model with its batch, ready to step under autocast."""
    model, batch, _ = setup.made(make)
    # a rate so small that no step changes what the next one costs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    return Bench(model, batch, optimizer, setup.autocast)


# --- new shapes ------------------------------------------------------------------------------------------------------

KEPT = (5, 6, 7, 8)
CALLS = 4


def new_shapes(setup: Setup) -> Figures:
    """Seconds of a backward on K rows, ``CALLS`` of them for each K and then once more, by the kernel."""
    found: Figures = {}
    for name, make in {"cuDNN attention": _attention, "convolutions, cudnn.benchmark": _convolutions}.items():
        losses_of, context = make(setup)
        sweeps: list[list[dict[str, Any]]] = []
        try:
            with context:
                flags = {"enabled": torch.backends.cudnn.enabled, "benchmark": torch.backends.cudnn.benchmark}
                _first_calls(losses_of, setup.device, [3], 1)  # loads the libraries
                sweeps += [_first_calls(losses_of, setup.device, KEPT, CALLS) for _ in range(2)]
        except RuntimeError as error:  # a device without cuDNN attention
            found[name] = {"failed": str(error).partition("\n")[0]}
            continue
        found[name] = {"cudnn": flags, "sweeps": sweeps}
    return found


def _first_calls(
    losses_of: Callable[[], Tensor], device: torch.device, kept: tuple[int, ...] | list[int], calls: int
) -> list[dict[str, Any]]:
    """For each K the seconds of the first backwards."""
    found: list[dict[str, Any]] = []
    for k in kept:
        rows = torch.arange(k, device=device)
        seconds: list[float] = []
        for _ in range(calls):
            loss = rowprop.pick(losses_of(), rows, batchnorm="rows").mean()
            begun_s = drained_s(device)
            loss.backward()
            seconds.append(drained_s(device) - begun_s)
        found.append({"kept": k, "seconds": seconds})
    return found


Kernel = tuple[Callable[[], Tensor], AbstractContextManager[Any]]


def _attention(setup: Setup) -> Kernel:
    shape = (16, 2, 8, 16) if setup.dry else (64, 12, 512, 64)
    dtype = torch.bfloat16
    qkv = [torch.randn(shape, device=setup.device, dtype=dtype, requires_grad=True) for _ in range(3)]
    only = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if setup.device.type == "cuda" else nullcontext()
    return lambda: F.scaled_dot_product_attention(*qkv).float().square().flatten(1).sum(1), only


def _convolutions(setup: Setup) -> Kernel:
    n, width, side = (16, 8, 8) if setup.dry else (64, 128, 56)
    layers = [nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(3)]
    place: dict[str, Any] = {"device": setup.device, "dtype": torch.bfloat16}
    model = nn.Sequential(*layers).to(**place, memory_format=torch.channels_last)
    x = torch.randn(n, width, side, side, **place).to(memory_format=torch.channels_last)
    return lambda: model(x).float().square().flatten(1).sum(1), torch.backends.cudnn.flags(enabled=True, benchmark=True)


# --- rows taken and rows added ---------------------------------------------------------------------------------------

TAKEN = (8, 16, 32)


def gathering(setup: Setup) -> Figures:
    """Seconds of one call, median and quartiles, by K."""
    n, size, repeats = (64, 32, 2) if setup.dry else (256, 197 * 768, 50)
    x = torch.randn(n, size, device=setup.device, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    found: Figures = {"shape": list(x.shape), "dtype": "bfloat16", "by_kept": []}
    for k in TAKEN:
        rows = torch.randperm(n, device=setup.device)[:k].sort().values
        values = x[rows]
        calls: dict[str, Callable[[], object]] = {
            "index_select": lambda rows=rows: x.index_select(0, rows),
            "indexing": lambda rows=rows: x[rows],
            "index_add_": lambda rows=rows, values=values: out.index_add_(0, rows, values),
            "index_copy_": lambda rows=rows, values=values: out.index_copy_(0, rows, values),
        }

        def repeated(call: Callable[[], object]) -> Callable[[Done], None]:
            def routine(done: Done) -> None:
                for _ in range(repeats):
                    call()
                done("calls")

            return routine

        taken = measure({name: repeated(call) for name, call in calls.items()}, devices=[setup.device],
                        rounds=setup.rounds)  # fmt: skip
        each = {name: spread([s / repeats for s in timing.each_s()]) for name, timing in taken.items()}
        found["by_kept"].append({"kept": k, "seconds": each})
    return found


# --- host time beside device time ------------------------------------------------------------------------------------


def host_time(setup: Setup, make: Callable[[], Made], keep: float = 0.25) -> Figures:
    """Seconds until the calls of forward and backward returned, and until the device was done; plain and sliced."""
    bench = bench_of(setup, make)
    steps = bench_step.measure({"full": bench, "sliced": bench}, setup.rounds, warmup=3, keeps=(keep,))
    n = bench.batch[0].shape[0]
    return {"num_rows": n, "kept": num_kept(n, keep)} | {
        engine: {"host_s": spread([s.host_s for s in taken]), "device_s": spread([s.gradient_s for s in taken])}
        for (_, engine), taken in steps.items()
    }


# --- steps without a wait between them -------------------------------------------------------------------------------


def pipeline(setup: Setup, make: Callable[[], Made], keep: float = 0.25) -> Figures:
    """Seconds of a whole step, median and quartiles, by the way in which rows leave the backward."""
    bench, steps = bench_of(setup, make), 2 if setup.dry else 8
    n = bench.batch[0].shape[0]
    rows = bench_step.draw(n, keep, setup.device)

    def zeros(capacity: float | None) -> bench_step.Loss:
        def loss_of(model: nn.Module, batch: bench_step.Batch, rows: Tensor) -> Tensor:
            return rowprop.skip_zeros(bench_step.row_losses(model, batch), capacity=capacity)[rows].mean()

        return loss_of

    ways = {name: bench_step.ENGINES[name] for name in ("full", "masked", "sliced")}
    ways |= {"skip_zeros": zeros(None), f"skip_zeros, capacity {keep}": zeros(keep)}

    def repeated(loss_of: bench_step.Loss) -> Callable[[Done], None]:
        def routine(done: Done) -> None:
            for _ in range(steps):
                with bench.autocast():
                    loss = loss_of(bench.model, bench.batch, rows)
                loss.backward()
                bench.optimizer.step()
                bench.optimizer.zero_grad(set_to_none=True)
            done("steps")

        return routine

    taken = measure({name: repeated(way) for name, way in ways.items()}, devices=[setup.device],
                    rounds=2 if setup.dry else 8, warmup=1)  # fmt: skip
    each = {name: spread([s / steps for s in timing.each_s()]) for name, timing in taken.items()}
    return {"num_rows": n, "kept": num_kept(n, keep), "seconds": each}


# --- graph capture ---------------------------------------------------------------------------------------------------


def captured(setup: Setup, make: Callable[[], Made], keep: float = 0.25) -> Figures:
    """Seconds of forward and backward, called op by op and replayed from a graph; plain and sliced, K fixed."""
    model, batch, _ = setup.made(make)
    n = batch[0].shape[0]
    kept = num_kept(n, keep)
    rows = torch.arange(0, n, n // kept, device=setup.device)[:kept]
    found: Figures = {"num_rows": n, "kept": kept}
    for engine in ("full", "sliced"):
        step = _step(setup, model, batch, bench_step.ENGINES[engine], rows)
        try:
            replay = _captured(step, setup.device)
        except Exception as error:  # a wait in the step ends the capture
            found[engine] = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
            continue
        found[engine] = _eager_and_replayed(setup, model, step, replay)
    return found


def _step(setup: Setup, model: nn.Module, batch: Any, loss_of: bench_step.Loss, rows: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(setup.device.type, torch.bfloat16, cache_enabled=False):  # no casts outlive the capture
            loss = loss_of(model, batch, rows)
        loss.backward()

    return step


def _captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Replays the step; on a device without graphs, the step itself."""
    if device.type != "cuda":
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _eager_and_replayed(
    setup: Setup, model: nn.Module, step: Callable[[], None], replay: Callable[[], None]
) -> Figures:
    """The seconds of both, and the largest difference of their gradients over the largest entry."""
    replay()
    replayed = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    kept = [p.grad for p in model.parameters()]  # the graph writes to these
    seconds: dict[str, list[float]] = {"eager": [], "replayed": []}
    for number in range(3 + setup.rounds):
        for name, run in {"eager": step, "replayed": replay}.items():
            begun_s = drained_s(setup.device)
            run()
            ended_s = drained_s(setup.device)
            if number >= 3:
                seconds[name].append(ended_s - begun_s)
    step()
    off = 0.0
    for p, grad in zip(model.parameters(), replayed, strict=True):
        assert (p.grad is None) == (grad is None)
        if p.grad is not None and grad is not None:
            off = max(off, float((p.grad - grad).abs().max() / grad.abs().max().clamp(min=1e-20)))
    del kept
    return {f"{name}_s": spread(values) for name, values in seconds.items()} | {"gradients_differ_by": off}
