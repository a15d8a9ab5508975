"""Steps with something slow planted in them, and healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bench_step
from rowprop.app.model import default_losses, load_model
from zoo import Net, seq

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "slow_convolution.py")
Step = tuple[nn.Module, tuple[Tensor, ...], Callable[[Any, Any], Tensor]]


def there_and_back(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x.double().float()
    return x


def format_changes(x: Tensor) -> Tensor:
    for _ in range(20):
        x = x.contiguous(memory_format=torch.channels_last).contiguous()
    return x


class RowByRow(torch.autograd.Function):
    """A linear layer whose backward loops over the rows in place of a matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for row, grad_row in zip(x, grad, strict=True):
            total += torch.outer(row, grad_row)
        return grad @ weight.T, total


def by_hand(inputs: int, outputs: int) -> nn.Module:
    weight = nn.Parameter(0.1 * torch.randn(inputs, outputs))
    return Net(lambda net, x: RowByRow.apply(x, net.weight), weight=weight)


def dense(*middle: Any, rows: int = 256, width: int = 512) -> Step:
    model = seq(nn.Linear(16, width), *middle, nn.Linear(width, 4))
    return model, (torch.randn(rows, 16), torch.randint(4, (rows,))), default_losses


def images(*middle: Any, dtype: torch.dtype = torch.float32) -> Step:
    model = seq(nn.Conv2d(3, 16, 3, padding=1), *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return model.to(dtype), (torch.randn(16, 3, 16, 16, dtype=dtype), torch.randint(10, (16,))), default_losses


def example(name: str, **options: str) -> Step:
    subject = load_model(f"{EXAMPLE}:{name}", **options)
    return subject.model, subject.batch, subject.losses_fn


def by_hand_on_small_images() -> Step:
    model, (images, classes), losses_fn = example("slow", dtype="float64")
    return model, (images[..., :12, :12], classes), losses_fn


def sorting() -> Step:
    return dense(lambda x: x.sort(1).values)


def masked() -> Step:
    """Three rows in four are multiplied by zero."""
    model, batch = bench_step.mlp(128, 512)
    return model, batch, lambda model, batch: bench_step.row_losses(model, batch) * (torch.arange(128) % 4 == 0)


PLANTED: dict[str, tuple[Callable[[], Step], str, str]] = {
    "a convolution's backward by hand": (
        by_hand_on_small_images, "custom_function", "GroupedBackwardConv2d in 2",
    ),
    "a loop over rows in a backward": (
        lambda: dense(by_hand(64, 64), width=64), "custom_function", "RowByRow in 1",
    ),
    "a dilated convolution without a fast kernel": (
        lambda: images(nn.Conv2d(16, 16, 3, dilation=2), dtype=torch.float64), "slow_kernel",
        "slow_conv_dilated2d in 1",
    ),
    "a grouped convolution without a fast kernel": (
        lambda: images(nn.Conv2d(16, 16, 3, groups=16), dtype=torch.float64), "grouped_convolution",
        "convolution_backward in 1",
    ),
    "sorting": (sorting, "slow_op", "sort in 1"),
    "changing dtypes": (lambda: dense(there_and_back), "casts", "_to_copy in 1"),
    "rows that count nothing": (masked, "zeros", "the gradient of 6"),
    "changing the memory format": (lambda: images(format_changes), "copies", "clone in 1"),
}  # fmt: skip
"""Each planted cause: the step with it, and the kind and place of the finding that names it."""

HEALTHY: dict[str, Callable[[], Step]] = {
    "mlp": lambda: (*bench_step.mlp(128, 256), bench_step.row_losses),
    "resnet": lambda: (*bench_step.resnet(16, 16, 8), bench_step.row_losses),
    "vit": lambda: (*bench_step.vit(8, 16, 64, 2), bench_step.row_losses),
    "gpt": lambda: (*bench_step.gpt(8, 32, 64, 2), bench_step.row_losses),
    "depthwise": lambda: images(nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 16, 1)),
    "lstm": lambda: (
        nn.LSTM(16, 32, batch_first=True),
        (torch.randn(16, 12, 16), torch.randn(16, 12, 32)),
        lambda model, batch: F.mse_loss(model(batch[0])[0], batch[1], reduction="none").mean((1, 2)),
    ),
    "the right convolution": lambda: example("right"),
}
