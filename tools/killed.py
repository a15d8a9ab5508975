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
from rowprop.history import LossHistory, PruningSampler, WithIds
from rowprop.scoring import Scored

ROWS, BATCH, EPOCHS = 48, 8, 3
MakeStep = Callable[..., SelectiveBackprop]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Scored:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return Scored(losses, losses.detach() ** 4)  # so uneven that the gate of kath18 opens


class Training:
    """A training of three epochs; its trace has of each batch the ids, what was chosen, the loss and the progress."""

    def __init__(self, make: MakeStep, workers: int = 0) -> None:
        torch.manual_seed(0)
        x = torch.randn(ROWS, 1, 5)
        data = WithIds(TensorDataset(x, x[:, 0, :3].argmax(1)))
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        # The first layer lets rows of another length through, which some recipes score.
        self.model = nn.Sequential(nn.AdaptiveAvgPool1d(5), nn.Flatten(), *layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.step = make(self.model, losses_fn)
        # For a step without a sampler, one that prunes nothing: it knows how to go on in the middle of an epoch.
        plain = PruningSampler(LossHistory(ROWS), num_rows=ROWS, epochs=EPOCHS, prune=0)
        self.order = self.step.sampler or plain
        self.loader = DataLoader(data, BATCH, sampler=self.order, num_workers=workers, generator=seeded())
        self.trace: list[Any] = []
        self.trained = 0  # rows of the running epoch

    def train(self, stop: int | None = None) -> None:
        while self.order.next_epoch < EPOCHS:
            for ids, batch in self.loader:
                done = self.order.trained(ids[:1]) - 1
                progress = self.order.progress(done) if self.step.sampler is None else None
                loss, record = self.step(batch, done // BATCH, ids=ids, progress=progress)
                loss.backward()
                if record.ready:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.trained = self.order.trained(ids)
                chosen = record.selection.rows.tolist(), record.selection.weights.tolist()
                clock = None if self.step.sampler is None else self.step.progress
                self.trace.append((ids.tolist(), *chosen, loss.item(), clock))
                if len(self.trace) == stop:
                    return

    def state(self) -> dict[str, Any]:
        # A kill between two optimizer steps would lose the gradients that wait for the next, so they are saved.
        waiting = [torch.zeros(0) if p.grad is None else p.grad for p in self.model.parameters()]
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "step")}
        return {**parts, "order": self.order.state_dict(self.trained), "waiting": waiting}

    def load(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "step", "order"):
            if name != "order" or self.step.sampler is None:  # which the step's state has
                getattr(self, name).load_state_dict(state[name])
        for parameter, gradient in zip(self.model.parameters(), state["waiting"], strict=True):
            parameter.grad = gradient if gradient.numel() else None


def killed_and_resumed(
    make: Callable[[], Training], stop: int, file: Path, without: str = ""
) -> tuple[Training, Training]:
    """A training that is killed after so many batches, and one that goes on from its file to the end.

    In the place of the part ``without`` of the saved step the second has a fresh one.
    """
    killed, resumed = make(), make()
    killed.train(stop)
    torch.save(killed.state(), file)
    state = torch.load(file, weights_only=True)
    if without:
        state["step"][without] = resumed.step.state_dict()[without]
    resumed.load(state)
    resumed.train()
    return killed, resumed


def assert_nothing_was_lost(whole: Training, killed: Training, resumed: Training) -> None:
    """Bit for bit."""
    assert killed.trace + resumed.trace == whole.trace
    torch.testing.assert_close(resumed.state(), whole.state(), rtol=0, atol=0, equal_nan=True)
