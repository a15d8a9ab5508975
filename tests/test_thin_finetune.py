"""The parts of benchmarks/thin_finetune.py that decide what is compared; a training needs the weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thin_finetune import PHASES, POOL, Epoch, batches, follow


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


def test_random_keeps_what_thinned_has_cost():
    # Red when `behind` is left out: the first step, before any count, costs everything.
    shares = torch.linspace(1, 0.3, 40).tolist()
    spent = {"full": 0, "thinned": 0, "random": 0}
    methods = {name: SimpleNamespace(keep=None, backward_flops=lambda name=name: spent[name]) for name in spent}
    last = {"full": 0, "thinned": 0}
    for share in shares:
        keep = 1.0 if methods["random"].keep is None else methods["random"].keep
        for name, cost in {"full": 1, "thinned": share, "random": keep}.items():
            spent[name] += round(1_000_000 * cost)
        follow(methods, last)
    assert spent["random"] == pytest.approx(spent["thinned"], rel=0.01)


def test_counted_steps_are_beside_the_clock():
    # Red with `self.timed` or `self.counted` as the tokens of all steps.
    epoch = Epoch(
        tokens=12, timed=9, counted=3, cpu_s=dict.fromkeys(PHASES, 0.9), flops={"forward": 30, "backward": 60}
    )
    assert epoch.total_s("backward") == pytest.approx(1.2)
    assert epoch.total_s() == pytest.approx(3.6)
    assert epoch.total_flops() == 360
