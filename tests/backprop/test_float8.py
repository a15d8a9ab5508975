"""torchao's float8 layers, whose rounding torch emulates on the CPU: the rule by name against plain indexing.

The package lives in a venv of its own: `nox -s families`.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import rowprop
from picks import N, gradients

pytestmark = pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao: see nox -s families")

T = 3


def layers(recipe: str) -> nn.Module:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    torch.manual_seed(0)
    return convert_to_float8_training(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), config=config)


@pytest.mark.parametrize("rows", [torch.tensor([6, 1, 6]), torch.tensor([3])], ids=str)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
# Red when: the rows with the largest entries are left out, or hold one number for all columns; if repeated rows are
# not added before they are rounded.
def test_float8_layers_run_on_the_kept_rows(recipe, flat, rows):
    model = layers(recipe)
    x = torch.randn(N, T, 16) * torch.logspace(0, 2, N)[:, None, None]  # the largest entries lie in rows not kept
    x = x * torch.logspace(-6, 0, 16)  # and columns differ so much that one scale for all rounds some to zero

    def losses():
        out = model(x.view(N * T, 16) if flat else x)
        return out.view(N, -1).square().sum(1)

    def weighted(picked):  # entries of a row that repeats are added up, so let them differ
        return (picked * torch.arange(1.0, len(rows) + 1)).sum()

    leaves = list(model.parameters())
    expected = gradients(lambda: weighted(losses()[rows]), leaves)
    with rowprop.watch() as report:
        actual = gradients(lambda: weighted(rowprop.pick(losses(), rows)), leaves)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5 * float(e.abs().max()))
    assert report.sliced["matmul_with_hp_or_float8_args"] == 2 and not report.densified
