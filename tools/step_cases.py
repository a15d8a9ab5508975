"""Steps whose losses are written down by hand, and small models beside which a plain loop runs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rowprop.step import SelectiveBackprop

ENGINES = ["masked", "recompute", "sliced"]


class Shift(nn.Module):
    """The loss of a row is the number in the batch, with a gradient of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.weight * values.nan_to_num(0, 0, 0)


def given_losses(model: Any, batch: Tensor) -> Tensor:
    return model(batch)


def shift_step(selector: Any, **options: Any) -> SelectiveBackprop:
    return SelectiveBackprop(Shift(), given_losses, selector, **options)


def backpropagated(taken: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """The loss and the record of a step, after the backward."""
    taken[0].backward()
    return taken


def regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def normed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 1))


def a_batch(seed: int, size: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, generator=generator)}


def squared(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).squeeze(1) - batch["y"]).square()


def assert_gradients_equal(model: nn.Module, reference: nn.Module, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Whether two models have the same gradients, and have none at the same places."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert type(ours.grad) is Tensor
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=atol)


def assert_resumes(made: Callable[[], SelectiveBackprop], call: Callable[[SelectiveBackprop, int], Any]) -> None:
    """Stop in the middle of an accumulation, load into new parts that have gone astray, and go on: bit for bit."""

    def begun() -> tuple[SelectiveBackprop, torch.optim.Optimizer]:
        step = made()
        return step, torch.optim.Adam(step.model.parameters(), 0.05)

    def run(step: SelectiveBackprop, optimizer: torch.optim.Optimizer, numbers: range) -> list[Any]:
        trace = []
        for number in numbers:
            loss, record = call(step, number)
            loss.backward()
            if record.ready:
                optimizer.step()
                optimizer.zero_grad()
            trace.append((record.step, record.selection.rows.tolist(), record.contributed, record.ready, loss.item()))
        return trace

    whole, optimizer = begun()
    expected = run(whole, optimizer, range(10))

    step, optimizer = begun()
    trace = run(step, optimizer, range(5))
    assert step.accumulate_to is None or step.state_dict()["contributed"] > 0
    grads = [parameter.grad for parameter in step.model.parameters()]
    parts = step.model.state_dict(), optimizer.state_dict(), step.state_dict(), torch.get_rng_state(), grads
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)

    torch.rand(99)
    step, optimizer = begun()
    run(step, optimizer, range(20, 22))
    weights, moments, state, rng, grads = torch.load(file, weights_only=True)
    step.model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    step.load_state_dict(state)
    torch.set_rng_state(rng)
    for parameter, grad in zip(step.model.parameters(), grads, strict=True):
        parameter.grad = grad
    assert trace + run(step, optimizer, range(5, 10)) == expected
    for (name, ours), theirs in zip(step.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
