"""The BatchNorm study's ways are what they say: each against formulas written out on all N rows."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import batchnorm
import rowprop
from batchnorm import WAYS
from rowprop.backprop.rules.registry import RULES
from rowprop_lab.data import Dataset
from rowprop_lab.train import losses_of

N, SELECTOR = 12, rowprop.TopK(0.4)
DIMS = (0, 2, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * 4, 3)).double()
    for norm in batchnorm.norms(model):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias)
    return model


def a_batch() -> batchnorm.Batch:
    torch.manual_seed(1)
    return torch.randn(N, 1, 6, 6, dtype=torch.float64), torch.randint(3, (N,))


def chosen(model: nn.Module, batch: batchnorm.Batch) -> Tensor:
    return SELECTOR(losses_of(model, batch)).rows


def noise(rows: int, train: int | None = None) -> Dataset:
    """Images without sense, to train and test on; after the first ``train``, to test on alone."""
    torch.manual_seed(0)
    both = torch.randn(rows, 1, 8, 8), torch.randint(2, (rows,))
    tested = both if train is None else (each[train:] for each in both)
    return Dataset("noise", *(each[:train] for each in both), *tested, ("a", "b"), torch.arange(rows)[:train])


def per_channel(v: Tensor) -> Tensor:
    return v[None, :, None, None]


class Written(nn.Module):
    """BatchNorm with its backward written out: full batch's statistics, and one of the ways over the kept rows."""

    def __init__(self, norm: nn.Module, way: str, rows: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.way, self.rows = way, rows

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.detach().mean(DIMS), x.detach().var(DIMS, correction=0)
        xhat = (x - per_channel(mean)) * per_channel((var + self.eps).rsqrt())
        if xhat.requires_grad:
            seen = xhat.detach()
            xhat.register_hook(lambda g: self.without_its_components(g, seen))
        return xhat * per_channel(self.weight) + per_channel(self.bias)

    def without_its_components(self, g: Tensor, xhat: Tensor) -> Tensor:
        """The gradient of x-hat that, divided by the deviation, is that of the input."""
        g_kept, x_kept = g[self.rows], xhat[self.rows]
        if self.way == "plain kernel":
            g_kept = g_kept - per_channel(g_kept.mean(DIMS)) - x_kept * per_channel((g_kept * x_kept).mean(DIMS))
        elif self.way == "projected":
            x_kept = x_kept - per_channel(x_kept.mean(DIMS))
            g_kept = g_kept - per_channel(g_kept.mean(DIMS))
            g_kept = g_kept - x_kept * per_channel((g_kept * x_kept).sum(DIMS) / x_kept.square().sum(DIMS))
        return torch.zeros_like(g).index_copy(0, self.rows, g_kept)


def expected(way: str, model: nn.Module, batch: batchnorm.Batch, rows: Tensor) -> dict[str, Tensor]:
    twin = copy.deepcopy(model)
    if way == "exact":
        losses_of(twin, batch)[rows].mean().backward()
    elif way == "recompute":
        losses_of(twin, (batch[0][rows], batch[1][rows])).mean().backward()
    else:
        written = nn.Sequential(*[Written(m, way, rows) if isinstance(m, nn.BatchNorm2d) else m for m in twin])
        losses_of(written, batch)[rows].mean().backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", WAYS)
# Red when: a way's formula is another's, or it takes its statistics from other rows (tried: one rule for the other).
def test_each_way_gives_the_gradient_that_is_written_out(way: str):
    model, batch = net(), a_batch()
    # The projection is told the kept rows' deviation with eps in it, which the formula has not.
    tolerance = 1e-4 if way == "projected" else 1e-9
    found = batchnorm.gradient(WAYS[way], model, SELECTOR, batch, seed=0)
    truth = expected(way, model, batch, chosen(model, batch))
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, truth[name], rtol=tolerance, atol=tolerance)


def test_the_ways_differ_on_this_net():
    # So that the test above can tell them apart.
    model, batch = net(), a_batch()
    first = [expected(way, model, batch, chosen(model, batch))["0.weight"] for way in WAYS]
    for i, a in enumerate(first):
        assert all(batchnorm.off(a, b) > 0.01 for b in first[:i])


def test_a_rule_is_put_back_and_must_have_run():
    # Red when: the package's rule stays replaced, or a model whose BatchNorm never met the rule passes for measured.
    own = RULES[batchnorm.BATCHNORM].run
    batchnorm.gradient(WAYS["frozen"], net(), SELECTOR, a_batch(), seed=0)
    assert RULES[batchnorm.BATCHNORM].run is own
    without = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    with pytest.raises(AssertionError, match="no BatchNorm met the rule"):
        batchnorm.gradient(WAYS["frozen"], without, SELECTOR, a_batch(), seed=0)
    assert RULES[batchnorm.BATCHNORM].run is own


def test_comparing_gradients_leaves_the_model_as_it_was():
    # Red when: the copy is left out; running statistics would move with each comparison.
    model = net()
    before = copy.deepcopy(model.state_dict())
    batchnorm.compare_gradients(model, SELECTOR, [a_batch()])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_distance_is_the_error_of_xhat():
    # Red when: the deviations are swapped, or the mean's shift is not counted in deviations.
    x = torch.randn(200_000, 2, dtype=torch.float64) * torch.tensor([2.0, 0.5]) + torch.tensor([1.0, -3.0])
    true, used = (x.mean(0), x.var(0)), (torch.tensor([0.5, -3.1]), torch.tensor([2.0, 1.0]))
    error = (x - used[0]) / used[1].sqrt() - (x - true[0]) / true[1].sqrt()
    assert batchnorm.distance(used, true) == pytest.approx(float(error.square().mean().sqrt()), rel=1e-4)
    assert batchnorm.distance(true, true) == 0


def test_refreshed_statistics_are_those_of_the_weights():
    # Red when: the average is not reset, or weighs late batches more.
    model, (images, _) = net(), a_batch()
    fresh = batchnorm.refreshed(model, images, batch_rows=4)
    seen = torch.stack([model[0](part).mean(DIMS) for part in images.split(4)]).mean(0)
    torch.testing.assert_close(batchnorm.norms(fresh)[0].running_mean, seen)
    assert torch.equal(batchnorm.norms(model)[0].running_mean, torch.zeros(4, dtype=torch.float64))


def test_a_study_repeats_and_names_every_way():
    # Red when: a run depends on what ran before it, or a table leaves a way out.
    data = noise(40, train=24)
    size = batchnorm.Size(train_rows=24, epochs=1, batch_rows=8, short=2, batches=1, selections=("random 0.5",))
    first = batchnorm.study(data, size, seed=0)
    assert {run["way"] for run in first["runs"]} == {"plain training", batchnorm.REORDERED, *WAYS}
    assert first == batchnorm.study(data, size, seed=0)
    away = {(run["way"], run["at"]): run.get("away") for run in first["runs"]}
    assert away["exact", "end"] is None
    assert all(away[way, "end"] > 0 for way in (*WAYS, batchnorm.REORDERED) if way != "exact")

    result = {"command": "c", "setting": {}, "size": {"short": 2}, **first}
    page = batchnorm.markdown(result)
    assert all(f"| random 0.5 | {way} |" in page for way in (*WAYS, batchnorm.REORDERED))
    lost = next(run for run in first["runs"] if run["way"] == "frozen" and run["at"] == "end")
    lost["diverged"] = True
    assert "| random 0.5 | frozen (diverged: 1 of 1) |  |" in batchnorm.markdown(result)


def test_a_run_that_diverges_is_told_apart():
    # Red when: a loss that is not finite ends the whole study.
    size = batchnorm.Size(train_rows=24, epochs=4, batch_rows=8, short=1, peak_lr=math.inf, selections=("top-k 0.5",))
    assert "end" not in batchnorm.train(WAYS["projected"], "top-k 0.5", noise(24), size, seed=0)
