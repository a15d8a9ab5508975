"""Functions of entmax, TabNet, Brevitas and snnTorch that a rule knows by name: exact, and on the kept rows.

The packages live in a venv of their own: `nox -s integrations`.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages


def sparse(path: str, name: str):
    """A function over the last dimension of logits (N, C), between two layers."""
    function = getattr(import_module(path), name)

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first, second = model
        return F.cross_entropy(second(function.apply(first(x) * 1, -1)), y, reduction="none")

    return losses


def entmax_loss(name: str):
    """A loss per row of logits (N, C)."""
    loss = getattr(import_module("entmax"), name)(reduction="none")
    return lambda model, x, y: loss(model[0](x), y)


def rounded(call: str, *arguments: float):
    """Values that are rounded or clamped with the gradient of the identity."""
    function = getattr(import_module("brevitas.ops.autograd_ste_ops"), f"{call}_ste_impl")

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = function(model[0](x), *arguments)
        return F.cross_entropy(model[1](hidden.flatten(1)), y, reduction="none")

    return losses


def spikes(name: str, *arguments: float):
    """Spikes of float32, whose gradient is that of a smooth function."""
    function = getattr(import_module("snntorch.surrogate"), name)

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        fired = function()(model[0](x)) if name.islower() else function.apply(model[0](x), *arguments)
        return F.cross_entropy(model[1](fired.to(x)), y, reduction="none")

    return losses


CASES = {
    "TabNet's sparsemax": ("pytorch_tabnet", sparse, "pytorch_tabnet.sparsemax", "SparsemaxFunction"),
    "TabNet's entmax": ("pytorch_tabnet", sparse, "pytorch_tabnet.sparsemax", "Entmax15Function"),
    "entmax's sparsemax": ("entmax", sparse, "entmax.activations", "SparsemaxFunction"),
    "entmax 1.5": ("entmax", sparse, "entmax.activations", "Entmax15Function"),
    "sparsemax loss": ("entmax", entmax_loss, "SparsemaxLoss"),
    "entmax 1.5 loss": ("entmax", entmax_loss, "Entmax15Loss"),
    "bisected sparsemax loss": ("entmax", entmax_loss, "SparsemaxBisectLoss"),
    "bisected entmax loss": ("entmax", entmax_loss, "EntmaxBisectLoss"),
    "round": ("brevitas", rounded, "round"),
    "round to zero": ("brevitas", rounded, "round_to_zero"),
    "ceil": ("brevitas", rounded, "ceil"),
    "floor": ("brevitas", rounded, "floor"),
    "binary sign": ("brevitas", rounded, "binary_sign"),
    "ternary sign": ("brevitas", rounded, "ternary_sign"),
    "clamp": ("brevitas", rounded, "scalar_clamp", -0.5, 0.5),
    "clamp from below": ("brevitas", rounded, "scalar_clamp_min", 0.0),
} | {
    name: ("snntorch", spikes, name)
    for name in "straight_through_estimator triangular fast_sigmoid atan heaviside sigmoid spike_rate_escape".split()
}
CASES["sparse fast sigmoid"] = ("snntorch", spikes, "SparseFastSigmoid", 25, 1)


@pytest.mark.parametrize("rows", [[1, 4, 5], [2]])
@pytest.mark.parametrize("name", CASES)
# Red where _own returns twice the gradient; where _sparsemax takes the saved tensors as without rows.
# Red for spikes where _over_last leaves the saved tensors whole.
def test_the_gradient_is_exact_and_nothing_densifies(name: str, rows: list[int]):
    package, make, *arguments = CASES[name]
    pytest.importorskip(package)
    losses_of = make(*arguments)
    model, x, y = (
        nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7)).double(),
        torch.randn(12, 5).double(),
        torch.arange(12),
    )
    parameters = [p for layer in (model[:1] if make is entmax_loss else model) for p in layer.parameters()]
    expected = torch.autograd.grad(losses_of(model, x, y % 7)[rows].mean(), parameters)
    with rowprop.watch() as report:
        picked = rowprop.pick(losses_of(model, x, y % 7), torch.tensor(rows)).mean()
        grads = torch.autograd.grad(picked, parameters)
    torch.testing.assert_close(grads, expected)
    assert not report.densified, report
