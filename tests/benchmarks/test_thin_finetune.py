"""The parts of benchmarks/thin_finetune.py that decide what is compared; a training needs the weights."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thin_finetune
from thin_finetune import PHASES, POOL, Epoch, Method, Rows, accuracy, batches, compiled, follow, saved, table


def steps(tokens: int, timed: int, counted: int, each_s: float = 0.0, flops: tuple[int, int] | None = None) -> Any:
    """Steps whose phases took so many seconds each, and whose forward and backward counted so much."""
    counts = {} if flops is None else {"flops": {"forward": flops[0], "backward": flops[1]}}
    seconds = dict.fromkeys(PHASES, each_s)
    return thin_finetune.Steps(tokens=tokens, timed=timed, counted=counted, cpu_s=seconds, **counts)


def test_batches_hold_the_rows_of_each_pool_by_length():
    # Red without the argsort (a batch has short and long rows), with places in the pool taken for rows, and with the
    # batches of a pool in the order of their lengths.
    size, lengths = 4, torch.randint(3, 33, (200,), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:150]
    found = batches(order, lengths, size, torch.Generator().manual_seed(2))
    wanted = []
    for begin in range(0, 148, size * POOL):
        pool = sorted(lengths[row].item() for row in order[begin : min(148, begin + size * POOL)])
        wanted += [pool[place : place + size] for place in range(0, len(pool), size)]
    assert sorted(sorted(lengths[batch].tolist()) for batch in found) == sorted(wanted)
    assert sorted(torch.cat(found).tolist()) == sorted(order[:148].tolist())
    longest = [int(lengths[batch].max()) for batch in batches(order[:60], lengths, size, torch.Generator())]
    assert longest != sorted(longest)


def test_the_controls_cost_what_thinned_has_cost():
    # Red when `behind` is left out (the first step, before any count, costs everything), and where `plain` follows the
    # backward alone.
    spent = {name: {"forward": 0.0, "backward": 0.0} for name in ("full", "thinned", "random", "plain")}
    flops = lambda own: lambda *phases: sum(own[phase] for phase in phases)  # noqa: E731
    methods, last = {name: SimpleNamespace(keep=1.0, flops=flops(own)) for name, own in spent.items()}, {}
    for share in torch.linspace(1, 0.3, 40).tolist():
        random, plain = methods["random"].keep, methods["plain"].keep
        shares = {"full": (1, 1), "thinned": (1, share), "random": (1, random), "plain": (plain, plain)}
        for name, (forward, backward) in shares.items():
            spent[name]["forward"] += 1e6 * forward
            spent[name]["backward"] += 2e6 * backward
        follow(methods, last)
    assert spent["random"]["backward"] == pytest.approx(spent["thinned"]["backward"], rel=0.01)
    assert sum(spent["plain"].values()) == pytest.approx(sum(spent["thinned"].values()), rel=0.01)


def test_counted_steps_extra_passes_and_compiling_are_in_time_and_flops_once():
    # Red with `self.timed` or `self.counted` as the tokens of all steps, with 0 seconds where no step was timed, with
    # `plain` alone in a sum of an epoch, with all of the time of the extra steps as that of their passes, and where the
    # tokens of a step that compiled take the seconds of other steps as well.
    plain = steps(12, 9, 3, 0.9, (30, 60))
    assert (plain.total_s("backward"), plain.total_s()) == pytest.approx((1.2, 3.6))
    assert plain.total_flops() == 360
    assert math.isnan(steps(3, 0, 3, flops=(30, 60)).total_s())
    assert thin_finetune.Steps().total_s() == 0
    epoch = Epoch(plain=steps(12, 6, 6, 1, (6, 12)), extra=steps(4, 4, 4, 2, (50, 8)))
    assert (epoch.total_s(), epoch.passes_s()) == (6 + 6, 6 - 4 * 6 / 12)
    assert (epoch.total_flops(), epoch.total_flops("backward")) == (36 + 58, 24 + 8)
    epoch = Epoch(plain=steps(12, 6, 4, 1), extra=steps(5, 1, 1, 2), compiling_s=40.0)
    assert epoch.compiled_s() == pytest.approx(3 * 10 / 6 + 6 * 2 + 40)


def test_the_saved_share_is_told_where_flops_are_saved():
    # Red when a hundredth of the FLOPs is enough, as in a training under the paper's control: -15 was printed.
    assert saved([0.6, 0.8], [0.5, 0.7]) == "0.750"
    assert saved([1.1, 1.2], [0.948, 1.032]) == ""


def epoch_of(cpu_s: float, flops: int, compiling_s: float = 0.0) -> Epoch:
    """An epoch of plain steps: a third of its tokens is on the clock, a third is counted, a third compiled."""
    plain = steps(12, 4, 4, cpu_s / 9, (flops // 9, 2 * flops // 9))
    return Epoch(steps=3, rows=8, plain=plain, accuracy=0.5, compiling_s=compiling_s)


def test_the_tables_hold_the_ratios_to_full():
    # Red when time or FLOPs are those of another method, and when the seconds of the compiler are left out.
    thinned, full = [epoch_of(5.4, 3600, 4.5), epoch_of(7.2, 5400, 4.5)], epoch_of(9.0, 9000, 3.0)
    seeds = {seed: {"full": [full], "thinned": [epoch]} for seed, epoch in enumerate(thinned)}
    told = table(seeds, 1)
    assert "| `full` | 2 | 50.00 ± 0.00 | 0.00 ± 0.00 | 1.000 ± 0.000 | 1.000 ± 0.000 |  |" in told
    assert "| `thinned` | 2 | 50.00 ± 0.00 | 0.00 ± 0.00 | 0.700 ± 0.141 | 0.500 ± 0.141 | 0.600 |" in told
    # 2/3 of 5.4 s and of 7.2 s, and 4.5 s; over 2/3 of 9 s, and 3 s
    assert "| `thinned` | 4.5 ± 0.0 | 0.967 ± 0.094 | 0.067 |" in told


class Small(nn.Module):
    """Tokens to logits by a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(50, 16), *(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 45))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.layers(tokens).mean(1)


def begun(name: str, keep: float | None = None) -> tuple[Method, Rows]:
    """A method before its first step, and eight rows."""
    torch.manual_seed(0)
    args = Namespace(amp="off", compile=False, lr=0.05, tau=0.5, keep=keep, rows=8, batch=8, epochs=1)
    method = Method(name, Small(), args, 0)
    method.epochs.append(Epoch())
    return method, Rows(torch.randint(50, (8, 5)), torch.full((8,), 5), torch.randint(45, (8,)))


@pytest.mark.parametrize(("name", "forward"), [("random", 8), ("plain", 3)])
def test_the_controls_train_on_the_drawn_rows(name, forward):
    # Red where `plain` runs its forward on all rows or `random` its own on the drawn ones, and where either
    # backpropagates another row.
    method, data = begun(name, keep=0.4)
    method.optimizer = torch.optim.SGD(method.model.parameters(), 1.0)
    start = copy.deepcopy(method.model)
    drawn = torch.randperm(8, generator=torch.Generator().manual_seed(0))[:3]
    method.step(data, torch.arange(8), 1.0, count=False)
    method.losses(start, data.batch(drawn)).mean().backward()
    for now, before in zip(method.model.parameters(), start.parameters(), strict=True):
        assert torch.allclose(before - now, before.grad, atol=1e-6)
    (epoch,) = method.epochs
    assert epoch.rows == forward
    assert epoch.plain.tokens == 5 * forward


@pytest.mark.usefixtures("always_drawn")
def test_steps_that_measure_weights_are_counted_and_timed_in_turns():
    # Red with `begun + 1` left out (each is expected one step late), with the owed count forgotten in a
    # step that measures (no plain step is counted), and where these are all counted or all timed.
    method, data = begun("thinned")
    for number in range(22):
        expected, before = method.has_passes(), method.handle._control.measured
        method.step(data, torch.arange(8), 0.05, count=number == 9)
        assert expected == (method.handle._control.measured > before) == (number in (1, 3, 7, 15))
    (epoch,) = method.epochs
    assert (epoch.extra.tokens, epoch.extra.timed, epoch.extra.counted) == (160, 80, 80)
    assert (epoch.plain.tokens, epoch.plain.timed, epoch.plain.counted) == (720, 680, 40)
    assert len(epoch.records) == 1


def test_a_step_that_compiles_is_beside_the_clock_and_a_test_compiles_nothing():
    # Red where a step that compiled is on the clock, and where the test of a method compiles its model.
    method, data = begun("full")
    method.model = torch.compile(method.model, backend="eager")
    for _ in range(3):
        method.step(data, torch.arange(8), 0.05, count=False)
    (epoch,) = method.epochs
    assert (epoch.plain.tokens, epoch.plain.timed, epoch.plain.counted) == (120, 80, 0)
    assert epoch.compiling_s > 0
    before = compiled()
    accuracy(method.model, data)
    assert compiled() == before
