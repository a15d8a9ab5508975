"""A training that is killed after some batch and taken up by another process, beside one that nobody killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rowprop import SelectiveBackprop
from rowprop.history import WithIds

ROWS, BATCH, EPOCHS = 48, 8, 3
MakeStep = Callable[..., SelectiveBackprop]
PARTS = ("model", "optimizer", "step")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Training:
    """A training of three epochs; its trace has of each batch the ids, what was chosen, the loss and the progress."""

    def __init__(self, make: MakeStep, workers: int = 0) -> None:
        torch.manual_seed(0)
        x = torch.randn(ROWS, 5)
        data = WithIds(TensorDataset(x, x[:, :3].argmax(1)))
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.step = make(self.model, losses_fn)
        self.loader = DataLoader(data, BATCH, sampler=self.step.sampler, num_workers=workers, generator=seeded())
        self.trace: list[Any] = []

    def train(self, stop: int | None = None) -> None:
        while self.step.sampler.next_epoch < EPOCHS:
            for ids, batch in self.loader:
                loss, record = self.step(batch, ids=ids)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                chosen = record.selection.rows.tolist(), record.selection.weights.tolist()
                self.trace.append((ids.tolist(), *chosen, loss.item(), self.step.progress))
                if len(self.trace) == stop:
                    return

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in PARTS}


def killed_and_resumed(make: Callable[[], Training], stop: int, file: Path) -> tuple[Training, Training]:
    """A training that is killed after so many batches, and one that goes on from its file to the end."""
    killed, resumed = make(), make()
    killed.train(stop)
    torch.save(killed.state(), file)
    for name, state in torch.load(file, weights_only=True).items():
        getattr(resumed, name).load_state_dict(state)
    resumed.train()
    return killed, resumed


def assert_nothing_was_lost(whole: Training, killed: Training, resumed: Training) -> None:
    """Bit for bit."""
    assert killed.trace + resumed.trace == whole.trace
    torch.testing.assert_close(resumed.state(), whole.state(), rtol=0, atol=0, equal_nan=True)
