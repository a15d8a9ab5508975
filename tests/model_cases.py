"""Models that tests name as ``model_cases:callable``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def mlp_with_batch() -> tuple[nn.Module, Batch]:
    return mlp(), (torch.randn(8, 4), torch.randint(3, (8,)))


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def complete() -> tuple[nn.Module, Batch, object]:
    return *mlp_with_batch(), losses


def with_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


class Sorted(nn.Module):
    """Sorts the rows, which no rule can follow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=0).values


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.block = nn.Sequential(nn.ReLU(), Sorted(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


def with_map() -> nn.Module:
    return nn.Conv2d(2, 3, 3)


def fails() -> nn.Module:
    raise RuntimeError("no weights here\nand a second line")


def returns_text() -> str:
    return "a model"


def one_row() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))


NOT_CALLABLE = 3
