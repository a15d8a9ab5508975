"""The clock against a simulated device, measuring against a scripted clock, and each variant against its calls."""

from __future__ import annotations

import subprocess
import sys
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from model_cases import losses
from queued_device import WORKS_ON, Accelerator
from rowprop.cost.measure import Clock, Spread, Timing, measure, peak_bytes
from rowprop.cost.timing import Variant, measure_step
from rowprop.errors import InvalidInput
from rowprop.host import timed
from untouched import untouched

N = 16


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """A queue that is still busy with work from before, on whose clock the host looks."""
    device = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", device.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: device.host_s)
    device.launch(5.0)
    return device


@pytest.mark.parametrize("alone", [True, False])
def test_queued_work_is_charged_to_the_phase_that_queued_it(alone: bool, device: Accelerator):
    # The forward's call returns after 2 ms and the forward runs for 60. The wall clock charges 2 ms to it and the rest
    # to the next phase that waits. Red when the clock does not begin on an idle device, reads the wall clock, or marks
    # the stream of another device.
    clock = Clock([torch.device("cpu"), WORKS_ON, *[torch.device("cuda", 0)] * (not alone)])
    returned_s = -device.host_s
    device.launch(0.040)
    device.launch(0.020)
    returned_s += device.host_s
    clock.done("forward")
    for phase, work_s in (("backward", 0.120), ("forward", 0.010)):
        device.launch(work_s)
        clock.done(phase)
    phases_s = clock.phases_s()
    assert returned_s == pytest.approx(0.002)
    assert phases_s == pytest.approx({"forward": 0.071 + 0.001 * (not alone), "backward": 0.120 + 0.001 * (not alone)})
    assert list(phases_s) == ["forward", "backward"]


@pytest.mark.parametrize(("launch_s", "work_s"), [(0.001, 0.040), (0.040, 0.001), (0.040, 0.0)])
def test_a_device_that_waits_for_its_calls_is_told(launch_s: float, work_s: float, device: Accelerator):
    # Red when the host's seconds hold its wait for the device at the end, or the work before the clock began.
    for where in (WORKS_ON, torch.device("cpu")):
        clock = Clock([where])
        for phase in ("forward", "backward"):
            device.launch(work_s, launch_s)
            clock.done(phase)
        timing = Timing((clock.phases_s(),), 0, clock.host_s)
        assert clock.host_s == pytest.approx(2 * launch_s * (where == WORKS_ON))
        assert timing.waits == (where == WORKS_ON and launch_s > work_s)


def test_a_timed_block_takes_the_work_that_it_queued_and_none_from_before(device: Accelerator):
    # Red when the queue is not empty at the block's start, or still full at its end.
    seconds = {"forward": 1.0}
    for phase in ("forward", "backward"):
        with timed(seconds, phase):
            device.launch(0.040)
            device.launch(0.020)
    assert seconds == pytest.approx({"forward": 1.061, "backward": 0.061})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_is_charged_where_the_work_runs():
    x = torch.randn(4096, 4096, device="cuda")

    def run(done):
        for _ in range(20):
            x @ x
        done("much")
        x @ x
        done("little")

    timing = measure({"run": run}, devices=[x.device], rounds=5)["run"]
    assert 10 < timing.spread("much").median / timing.spread("little").median < 40
    assert timing.peak_bytes >= x.nbytes


def test_rounds_are_interleaved_and_their_order_turns():
    order: list[str] = []
    runs = {name: lambda done, name=name: (order.append(name), done("all")) for name in "abc"}
    found = measure(runs, rounds=3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"  # the second round measures the memory
    assert [len(timing.rounds) for timing in found.values()] == [3, 3, 3]


def test_the_seconds_of_the_clock_are_summed_up_without_the_warm_up():
    told = [{"f": 100.0, "b": 900.0}, *({"f": float(i), "b": 3.0 * i} for i in (5, 1, 4, 2, 9))]
    clock = Mock()  # makes a clock that tells these seconds, one run after the other
    clock.return_value.phases_s.side_effect, clock.return_value.host_s = told, 1.0
    timing = measure({"step": lambda done: None}, rounds=5, warmup=1, clock=clock)["step"]
    assert (timing.phases, timing.host_s) == (("f", "b"), 1.0)
    assert (timing.each_s("f"), timing.each_s()) == ([5, 1, 4, 2, 9], [20, 4, 16, 8, 36])
    q1, median, q3 = np.quantile([20, 4, 16, 8, 36], [0.25, 0.5, 0.75])
    assert timing.spread() == Spread(q1, median, q3)
    each = {"f_s": (2.0, 4.0, 5.0), "b_s": (6.0, 12.0, 15.0), "total_s": (q1, median, q3)}
    spreads = {name: dict(zip(("q1", "median", "q3"), found, strict=True)) for name, found in each.items()}
    assert timing.to_dict() == {"rounds": 5, **spreads, "peak_bytes": timing.peak_bytes}
    assert Timing(({"f": 2.0},), 0).spread() == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("limit_s", "least", "rounds"),
    [(None, 5, 7), (0.0, 5, 5), (0.0, 2, 2), (59.0, 2, 2), (60.0, 2, 3), (69.0, 2, 3), (1e9, 2, 7)],
)
def test_no_round_begins_that_would_end_beyond_the_limit(limit_s, least: int, rounds: int, monkeypatch):
    # Two routines of 4 and 6 s take 20 s to warm up and 10 s for the memory, then 10 s a round. Red when: the limit is
    # checked only after a round, or fewer rounds run than the least.
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run(cost: float, done) -> None:
        now[0] += cost
        done("all")

    told: list[tuple[str, float]] = []
    runs = {cost: lambda done, cost=cost: run(cost, done) for cost in (4.0, 6.0)}
    options = {} if least == 5 else {"least": least}  # five are the default
    found = measure(runs, rounds=7, warmup=2, limit_s=limit_s, tick=lambda *line: told.append(line), **options)
    assert [timing.spread().median for timing in found.values()] == [4.0, 6.0]
    assert {len(timing.rounds) for timing in found.values()} == {rounds}
    assert now[0] == 30 + 10 * rounds
    shares = [done for _, done in told]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] <= 1
    assert told[0][0] == "warming up" and told[-1][0] == f"round {rounds} of at most 7"


def test_peak_memory_is_the_highest_moment_beyond_what_was_held():
    held = torch.zeros(1000)  # held before, so not counted

    def run(done):
        a, b = torch.empty(1000), torch.empty(2000)
        del a
        c = torch.empty(500)
        held.add_(1)
        return b, c

    assert peak_bytes(run) == 4 * 3000


class Allocator:
    """A device's memory: a run raises it, and the highest moment since the last reset is kept."""

    def __init__(self, held: int) -> None:
        self.held, self.most = held, 10 * held

    def memory_allocated(self, device: torch.device) -> int:
        assert device == WORKS_ON
        return self.held

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = self.held

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.most

    def allocate(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)


def test_peak_memory_of_an_accelerator_is_its_allocators(monkeypatch: pytest.MonkeyPatch):
    # Red when the peak is not reset, memory that was held before counts, or the memory held in the end is taken.
    memory = Allocator(700)
    monkeypatch.setattr(torch, "get_device_module", lambda _: memory)
    run = lambda done: [memory.allocate(size) for size in (300, -200, 400, -500)]  # noqa: E731
    assert peak_bytes(run, [torch.device("cpu"), WORKS_ON]) == 500


def subject() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)]
    return nn.Sequential(*layers), (torch.randn(N, 4), torch.randint(3, (N,)))


def test_each_variant_runs_the_calls_of_its_engine():
    model, batch = subject()
    calls: list[tuple[int, bool]] = []

    def losses_fn(model, batch):
        calls.append((len(batch[0]), torch.is_grad_enabled()))
        return losses(model, batch)

    cases = {
        Variant(): ([(N, True)], "forward backward update"),
        Variant("sliced", 0.25): ([(N, True)], "forward select backward update"),
        Variant("masked", 0.25): ([(N, True)], "forward select backward update"),
        Variant("thinned", 0.25): ([(N, True)], "forward backward update"),
        Variant("recompute", 0.25): ([(N, False), (4, True)], "score select forward backward update"),
    }
    for way, (expected, phases) in cases.items():
        calls.clear()
        found = measure_step(model, batch, losses_fn, [way], optimizer=torch.optim.AdamW, rounds=1, warmup=0)
        assert calls == 2 * expected  # one run for the time, one for the memory
        assert " ".join(found[way].phases) == phases
        assert all(seconds > 0 for seconds in found[way].rounds[0].values())


def test_a_step_does_not_wait_to_look_at_its_losses():
    # Red when NaN are looked for: the host would wait for the device in each step, and `waits` be true of all.
    nan = lambda model, batch: losses(model, batch) * torch.nan  # noqa: E731
    measure_step(*subject(), nan, [Variant("sliced", 0.5), Variant("recompute", 0.5)], rounds=1, warmup=0)


def test_nothing_is_left_behind():
    model, batch = subject()
    model[4].weight.grad = torch.ones(3, 8)
    batch[0].requires_grad_()
    optimizers: list[torch.optim.Optimizer] = []

    def optimizer(parameters):
        optimizers.append(torch.optim.SGD(parameters, lr=1e6, momentum=0.9, weight_decay=0.5))
        return optimizers[-1]

    values: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: values.append(module.weight.detach().clone()))
    with untouched(model, batch[0]):
        ways = [Variant(), Variant("recompute", 0.5)]
        measure_step(model, batch, losses, ways, optimizer=optimizer, rounds=2, warmup=1)
    assert all(torch.equal(value, values[0]) for value in values)  # a step of rate 1e6 would ruin them
    assert len(optimizers) == 1 and optimizers[0].state  # the optimizer did step


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: measure({}), "but 1, 1, 0 or more were needed"),
        (lambda: measure({"a": print}, rounds=0), "but 1, 1, 0 or more were needed"),
        (lambda: measure({"a": print}, warmup=-1), "but 1, 1, 0 or more were needed"),
        (lambda: Variant("fast"), "one of full, thinned, sliced, recompute, masked was needed"),
        (lambda: Variant("full", 0.5), "the full step keeps all rows"),
        (lambda: Variant("sliced", 0.0), "keep"),
        (lambda: measure_step(*subject(), lambda m, b: losses(m, b).detach(), rounds=1), "The losses have no graph"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, sentence: str):
    with pytest.raises(InvalidInput, match=sentence):
        call()


def test_a_process_of_its_own_hears_nothing_of_the_profiler_and_keeps_its_environment():
    # Red when the profiler starts without `profiled`: it writes two lines to stderr, from C++, for each measurement.
    code = (
        "import os, torch; before = dict(os.environ); from rowprop.cost.measure import peak_bytes\n"
        "print(peak_bytes(lambda done: torch.ones(250)), dict(os.environ) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1000 True\n", "")
