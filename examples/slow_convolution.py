"""A backward that is slower than it should be, the profile that finds it, and the right way beside it.

A layer convolves with a masked part of its weight. Its author wrote this convolution as an ``autograd.Function``. The
backward takes the formulas that ``torch.nn.grad.conv2d_weight`` had for years: the weight's gradient is a convolution
of N * C_in groups, one for each row and input channel.

    rowprop profile examples/slow_convolution.py:slow
    rowprop profile examples/slow_convolution.py:slow --dtype float64   # no fast kernel: a loop over the groups
    rowprop profile examples/slow_convolution.py:right
    python examples/slow_convolution.py     # both, side by side

The function is not needed. Masking and slicing are differentiable, so a plain ``conv2d`` on the masked slice gives the
true parameter its gradient, through torch's own fused backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.cost.measure import Done, measure
from rowprop.cost.profile import profile

Batch = tuple[Tensor, Tensor]


class GroupedBackwardConv2d(torch.autograd.Function):
    """A convolution without padding, its backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        """(N, C_in, H, W), (C_out, C_in, k, k) -> (N, C_out, H', W')."""
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return F.conv2d(x, weight, stride=stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The formulas of ``torch.nn.grad``: right, and slow."""
        x, weight = ctx.saved_tensors
        (n, c_in, *size), (c_out, _, *kernel) = x.shape, weight.shape
        left_over = [(s - k) % ctx.stride for s, k in zip(size, kernel, strict=True)]
        grad_x = F.conv_transpose2d(grad, weight, stride=ctx.stride, output_padding=left_over)
        spread = grad.repeat(1, c_in, 1, 1).reshape(n * c_in * c_out, 1, *grad.shape[2:])
        products = F.conv2d(x.reshape(1, n * c_in, *size), spread, dilation=ctx.stride, groups=n * c_in)
        grad_weight = products.view(n, c_in, c_out, *products.shape[2:]).sum(0).transpose(0, 1)
        return grad_x, grad_weight[..., : kernel[0], : kernel[1]], None


class PartialConv2d(nn.Module):
    """Convolves with the first input channels of a masked weight."""

    def __init__(self, channels: int, outputs: int, *, by_hand: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(outputs, 2 * channels, 3, 3))
        self.register_buffer("mask", (torch.rand(self.weight.shape) > 0.5).float())
        self.channels, self.by_hand = channels, by_hand

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, outputs, H', W')."""
        weight = (self.mask * self.weight)[:, : self.channels]
        return GroupedBackwardConv2d.apply(x, weight, 2) if self.by_hand else F.conv2d(x, weight, stride=2)


def _net(by_hand: bool) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), PartialConv2d(16, 32, by_hand=by_hand), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(32, 3, 24, 24), torch.randint(10, (32,)))


def slow() -> tuple[nn.Module, Batch]:
    """The convolution written by hand."""
    return _net(by_hand=True)


def right() -> tuple[nn.Module, Batch]:
    """The same layer as a plain convolution on the masked slice."""
    return _net(by_hand=False)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, shape (N,)."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    """Compare gradients and times, side by side, and show what the profile says."""
    made = {"slow": slow(), "right": right()}
    grads: dict[str, Tensor] = {}
    for name, (model, batch) in made.items():
        losses(model, batch).mean().backward()
        grads[name] = model.get_parameter("2.weight").grad
        model.zero_grad()

    def step(name: str, done: Done) -> None:
        model, batch = made[name]
        loss = losses(model, batch).mean()
        done("forward")
        loss.backward()
        done("backward")
        model.zero_grad()

    backward_s: dict[str, float] = {}
    for name, timing in measure({name: partial(step, name) for name in made}, rounds=50).items():
        # The fastest of the rounds: other work of the machine only adds time.
        forward_s, backward_s[name] = (min(timing.each_s(phase)) for phase in ("forward", "backward"))
        ratio = backward_s[name] / forward_s
        print(f"{name}: forward {1000 * forward_s:.2f} ms, backward {1000 * backward_s[name]:.2f} ms, {ratio:.1f} x")
        for finding in profile(*made[name], losses).findings:
            print(f"  {finding.kind}: {finding.where}\n    {finding.evidence}\n    {finding.remedy}")
    off = (grads["slow"] - grads["right"]).abs().max() / grads["right"].abs().max()
    print(f"The gradient of the true weight is the same (largest difference {off:.0e} of its largest entry);")
    print(f"the backward by hand takes {backward_s['slow'] / backward_s['right']:.1f} times as long.")


if __name__ == "__main__":
    main()
