"""A backward that runs at full size is never reported as sliced: FLOPs are counted beside each report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from rowprop.cost.flops import count_flops

N, K = 32, 8
ALL = torch.arange(N)
CASES: dict[str, tuple[str | None, Callable[[nn.Module, Tensor], Tensor]]] = {
    "plain": (None, lambda m, x: m(x).square().sum(1)),
    "chunks": (None, lambda m, x: torch.cat([m(part).square().sum(1) for part in x.chunk(4)])),
    "a part without kept rows": (None, lambda m, x: torch.cat([m(part).square().sum(1) for part in x.split([9, 23])])),
    "over a constant mean": (None, lambda m, x: (t := m(x).square().sum(1)) / t.mean().detach()),
    "over their mean": ("add.Tensor", lambda m, x: (t := m(x).square().sum(1)) / t.mean()),
    "standardised": ("add.Tensor", lambda m, x: ((t := m(x).square().sum(1)) - t.mean()) / t.std()),
    "distances to each other": ("add.Tensor", lambda m, x: torch.cdist(z := m(x), z.flip(0)).sum(1)),
    "a row at a time": ("a part of the batch", lambda m, x: torch.cat([m(x[i : i + 1]).sum(1) for i in range(N)])),
    "only their mean goes on": ("AddmmBackward0", lambda m, x: (x[:, :4] * m(x).sum(0)).square().sum(1)),
    "scores of all pairs": ("AddmmBackward0", lambda m, x: F.cross_entropy(x[:, :4] @ m(x).T, ALL, reduction="none")),
    "rows in a list": ("select.int", lambda m, x: torch.stack([row.square().sum() for row in m(x)])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_runs_at_full_size_is_in_the_report(name: str):
    # Red, case by case, where a dense gradient is added to a sliced one without a note; where a part of the batch with
    # fewer rows than are kept goes on dense without one; with K rows of zeros for a part that has no kept row; and
    # where nobody looks for sums over rows that the forward used.
    op, losses = CASES[name]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x, rows = torch.randn(N, 6, dtype=torch.float64), torch.arange(1, N, 4)
    if name == "a part without kept rows":
        rows = torch.arange(K)
    found = []
    for take in (lambda t: t[rows], lambda t: rowprop.pick(t, rows)):
        model.zero_grad()
        loss = take(losses(model, x)).mean()
        with rowprop.watch() as report, count_flops() as flops:
            loss.backward()
        found.append((flops.total_flops, [p.grad for p in model.parameters()]))
    (plain, wanted), (ours, grads) = found
    torch.testing.assert_close(grads, wanted)
    if op is None:
        assert not report.densified and ours <= (K / N + (0.04 if "without" in name else 0.01)) * plain
    else:
        assert op in report.densified and ours > 2 * K / N * plain


def test_what_is_added_to_the_grad_of_a_leaf_is_no_full_backward():
    # Red where each sum in place of a sliced and a dense gradient is noted.
    x = torch.randn(N, 6, requires_grad=True)
    for _ in range(2):
        with rowprop.watch() as report:
            rowprop.pick(x.square().sum(1), torch.tensor([1, 5])).sum().backward()
        assert not report.densified
