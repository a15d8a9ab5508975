"""The networks of the backward-forward study, and their closed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from closed_forms import Layer, convolution, linear

SIDE = 224
CLASSES = 10


def linear_net() -> nn.Module:
    """Nearly all weights in the first layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE * 3, 4096), nn.ReLU(), nn.Linear(4096, 128), nn.ReLU(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip


def one_net() -> nn.Module:
    """Nearly all weights behind the first layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(1, 4096), nn.ReLU(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


def conv_net() -> nn.Module:
    """Two convolutions. The pools, which the original does not define, are those of its deeper sister."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(32, 64, 7, stride=2, padding=3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


class DeeperConvNet(nn.Module):
    """One convolution applied ``depth`` times, with the same weights each time, as in the original.

    Args:
        depth: How often. Default 100.
        shared: False: a convolution of its own each time.
    """

    def __init__(self, depth: int = 100, *, shared: bool = True) -> None:
        super().__init__()
        self.depth = depth
        self.first = nn.Sequential(
            nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.ReLU(), nn.MaxPool2d(3, stride=2)
        )
        count = min(depth, 1) if shared else depth
        self.middle = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(count))
        self.last = nn.Sequential(nn.Conv2d(32, 64, 7, stride=2, padding=3, bias=False), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.first(x)
        for place in range(self.depth):
            x = F.relu(self.middle[place % len(self.middle)](x))
        return self.head(self.last(x))


# Sides: 224 -> 112 (stride 2, kernel 7, padding 3) -> 55 (pool of 3, stride 2) -> 28.
FIRST = convolution(3, 32, (7, 7), 112 * 112, bias=False)
LAST = convolution(32, 64, (7, 7), 28 * 28, bias=False)
HEAD = linear(64, CLASSES)


def deeper_layers(depth: int = 100) -> list[Layer]:
    """The closed form of :class:`DeeperConvNet` with shared weights."""
    middle = [convolution(32, 32, (3, 3), 55 * 55, bias=False, uses=depth)] if depth else []
    return [FIRST, *middle, LAST, HEAD]


NETWORKS = {
    "LinearNet": (linear_net, (3, SIDE, SIDE), [linear(SIDE * SIDE * 3, 4096), linear(4096, 128), linear(128, 10)]),
    "OneNet": (one_net, (1,), [linear(1, 4096), linear(4096, 128), linear(128, 10)]),
    "ConvNet": (conv_net, (3, SIDE, SIDE), [FIRST, LAST, HEAD]),
    "DeeperConvNet": (DeeperConvNet, (3, SIDE, SIDE), deeper_layers()),
}
"""How to make it, the shape of a row, its layers in closed form."""


def batch(rows: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows and classes on the device meta, where nothing is computed and so nothing is too large to count."""
    return torch.empty(rows, *shape, device="meta"), torch.empty(rows, dtype=torch.int64, device="meta")


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy by row."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# --- the ResNet family, as torchvision has it -------------------------------------------------------------------------

RESNETS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3, or one between two of 1 x 1."""

    def __init__(self, kind: str, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width if kind == "basic" else 4 * width
        layers = (
            [*_conv(inputs, width, 3, stride), nn.ReLU(), *_conv(width, width, 3)]
            if kind == "basic"
            else [
                *_conv(inputs, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU(),
                *_conv(width, outputs, 1),
            ]
        )  # fmt: skip
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """What it adds, and what it adds it to."""
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet(depth: int, first: int = 64, stages: int = 4) -> nn.Module:
    """For 1000 classes; ``first`` channels in the first stage."""
    kind, counts = RESNETS[depth]
    layers = [*_conv(3, first, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = first
    for stage, count in enumerate(counts[:stages]):
        width = first * 2**stage
        for place in range(count):
            layers.append(ResidualBlock(kind, channels, width, 2 if stage > 0 and place == 0 else 1))
            channels = width if kind == "basic" else 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Experts(nn.Module):
    """Each row goes through one of several matrices; a router says through which."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(width, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.stem(x))
        gate, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = (chosen == place).nonzero().squeeze(1)
            out = out.index_copy(0, rows, expert(x[rows]) * gate[rows, None])
        return self.head(F.relu(out))
