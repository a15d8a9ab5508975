"""A backward that runs at full size is never reported as sliced: FLOPs are counted beside each report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rowprop
from picks import ROWS, Take, as_indexed, chain, gradients, net, saving
from rowprop.backprop.watch import Densified
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
@pytest.mark.usefixtures("as_host")  # a device does not count the kept rows of a part of the batch
def test_what_runs_at_full_size_is_in_the_report(name: str):
    # Red, case by case, where a dense gradient is added to a sliced one without a note; where a part of the batch with
    # fewer rows than are kept goes on dense without one; with K rows of zeros for a part that has no kept row; and
    # where nobody looks for sums over rows that the forward used.
    op, losses = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(N, 6, dtype=torch.float64)
    rows = torch.arange(K) if name == "a part without kept rows" else torch.arange(1, N, 4)
    flops: list[int] = []

    def step(take: Take) -> list[Tensor | None]:
        return gradients(lambda: take(losses(model, x), rows).mean(), list(model.parameters()), flops)

    report = as_indexed(step, rtol=1e-7, atol=1e-7)
    plain, ours = flops
    if op is None:
        assert not report.densified and ours <= (K / N + (0.04 if "without" in name else 0.01)) * plain
    else:
        assert op in report.densified and ours > 2 * K / N * plain


Doubled, Declared = (saving(lambda x: 2 * x, lambda grad: 2 * grad, save=lambda x: ()) for _ in range(2))
rowprop.rowwise(saved=(), grads=(0,))(Declared)


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    x.register_hook(hook)
    return x


TABLE, PLACES = torch.ones(5, 4, requires_grad=True), ALL % 5
Layer = Callable[[Tensor], Tensor]
REMEDIES: dict[str, tuple[Layer, Layer]] = {  # a layer (N, 4) that densifies, and after the remedy
    "detach() a mere scale": (lambda y: y / y.square().mean(), lambda y: y / y.detach().square().mean()),
    "compute on the batch as a whole": (lambda y: torch.stack([2 * row for row in y]), lambda y: 2 * y),
    "let a hook only scale it": (lambda y: hooked(y, lambda g: g.clamp(-1, 1)), lambda y: hooked(y, lambda g: g / 2)),
    "declare it by rowprop.rowwise": (Doubled.apply, Declared.apply),
    "batchnorm='rows' projects": 2 * (lambda y: F.batch_norm(y, None, None, training=True),),
    "leave it off": (
        lambda y: y * F.embedding(PLACES, TABLE, scale_grad_by_freq=True),
        lambda y: y * F.embedding(PLACES, TABLE),
    ),
}


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.usefixtures("as_host")
def test_a_remedy_that_the_report_names_keeps_the_gradient_sliced(remedy: str):
    # Red when: a reason has lost its remedy, or the remedy is none.
    def densified(layer: Layer, policy: Literal["rows", "exact"]) -> dict[str, Densified]:
        with rowprop.watch() as report:
            losses = layer(nn.Linear(6, 4)(torch.randn(N, 6))).square().sum(1)
            rowprop.pick(losses, ROWS, batchnorm=policy).mean().backward()
        return report.densified

    before, after = REMEDIES[remedy]
    assert any(remedy in entry.reason.partition("; ")[2] for entry in densified(before, "exact").values())
    assert densified(after, "rows") == {}


@pytest.mark.parametrize("residual", [True, False])
def test_below_exact_attention_over_tokens_the_report_names_attention(residual: bool):
    # Red when: a mean of the losses is blamed, which the model does not have.
    q, kv, head = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 2)
    mask = torch.rand(4, 6) < 0.3

    def densified(attention: Literal["exact", "cut"]) -> dict[str, Densified]:
        x = nn.Linear(8, 8)(torch.randn(4, 6, 8))
        keys, values = kv(x).unsqueeze(1).chunk(2, -1)
        out = F.scaled_dot_product_attention(q(x).unsqueeze(1), keys, values).squeeze(1)
        with rowprop.watch() as report:
            rowprop.pick(head(x + out if residual else out).square().sum(2), mask, attention=attention).sum().backward()
        return report.densified

    assert all("attention='" in entry.reason for entry in densified("exact").values()) and densified("exact")
    assert densified("cut") == {}


def test_what_is_added_to_the_grad_of_a_leaf_is_no_full_backward():
    # Red where each sum in place of a sliced and a dense gradient is noted.
    x = torch.randn(N, 6, requires_grad=True)
    for _ in range(2):
        with rowprop.watch() as report:
            rowprop.pick(x.square().sum(1), ROWS).sum().backward()
        assert not report.densified


def test_watch_sees_only_what_runs_inside():
    with rowprop.watch() as outer:
        with rowprop.watch() as inner:
            pass
        rowprop.pick(chain(*net()), ROWS).mean().backward()
    assert outer.sliced["mm"] == 3 and not inner.sliced
    assert str(outer).startswith("sliced: ") and "densified: nothing" in str(outer)


def test_a_mode_that_runs_ops_by_itself_is_named():
    # Red when: a hook is blamed, which the user does not have.
    class Tracker(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    x, w, v = net()
    with Tracker():
        report = as_indexed(lambda take: gradients(lambda: take(chain(x, w, v), ROWS).mean(), [w, v]))
    assert {entry.reason.partition(",")[0] for entry in report.densified.values()} == {"a TorchDispatchMode"}


def test_a_flop_counter_around_half_of_a_split_backward_is_told_what_counts_there():
    # Red when: the reason names no counter, or ours densifies, too.
    def densified(counter: Any) -> list[str]:
        x, w, v = net()
        hidden = x @ w
        half = torch.autograd.grad(rowprop.pick((hidden.tanh() @ v).sum(1), ROWS).sum(), [w, hidden], retain_graph=True)
        with rowprop.watch() as report, counter:
            torch.autograd.grad(hidden, w, half[1])
        return [entry.reason for entry in report.densified.values()]

    assert "count FLOPs by rowprop.cost.flops.count_flops" in densified(FlopCounterMode(display=False))[0]
    assert densified(count_flops()) == []


def test_watch_names_the_op_that_mixes_rows_and_counts_its_calls():
    x, w, v = net()
    with rowprop.watch() as report:
        for _ in range(2):
            rowprop.pick(((x @ w).softmax(0) @ v).sum(1), ROWS).mean().backward()
    entry = report.densified["_softmax_backward_data"]
    assert (entry.count, entry.reason) == (2, "the softmax runs over the batch dimension")
    assert "densified: _softmax_backward_data x2: the softmax runs over the batch dimension" in str(report)
