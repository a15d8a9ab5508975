"""Online hard example mining over pixels: a forward for all of them, the head's backward for the hardest quarter.

Zeros and ones of scikit-learn's digits are pasted on canvases, and a small network says for each pixel to which of
the two it belongs, or that it is background. Most pixels are background and learnt at once. Only the quarter of all
pixels with the largest loss is backpropagated, as in the bootstrapped loss of Wu et al. Two ways to the same gradient
are counted side by side:

* plain: ``losses.flatten()[rows].mean().backward()``, whose backward runs for all pixels;
* pick: ``rowprop.pick(losses, selection).mean().backward()``.

The head looks at each pixel alone, so its backward runs for the kept pixels. Below it, a 3x3 convolution mixes pixels:
there the gradient goes on at full size (``rowprop.watch()`` names the op). So the head is sliced; the backbone is not.

    python examples/segmentation_ohem.py

References:
    Wu, Shen, van den Hengel, "Bridging Category-level and Instance-level Semantic Image Segmentation", 2016,
    arXiv:1605.06885. Shrivastava, Gupta, Girshick, "Training Region-based Object Detectors with Online Hard Example
    Mining", CVPR 2016, arXiv:1604.03540.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from rowprop.cost.flops import count_flops
from rowprop_lab.data import load_data

SIDE, DIGIT, BACKGROUND, KEEP = 48, 16, 2, 0.25


class Segmenter(nn.Module):
    """Four convolutions over the canvas, and a head of two layers for each pixel: (N, 1, H, W) -> (N, 3, H, W)."""

    def __init__(self, channels: int = 24, width: int = 256) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=2, dilation=2), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=4, dilation=4), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=4, dilation=4), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Conv2d(channels, width, 1), nn.ReLU(), nn.Conv2d(width, BACKGROUND + 1, 1))

    def forward(self, canvases: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        return self.head(self.backbone(canvases))


def make_batch(digits: Tensor, labels: Tensor, images: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Canvases (N, 1, H, W) with three digits each, and the class of each pixel (N, H, W)."""
    canvases = 0.3 * torch.randn(images, 1, SIDE, SIDE, generator=generator)
    classes = torch.full((images, SIDE, SIDE), BACKGROUND)
    for image in range(images):
        for digit in torch.randint(len(digits), (3,), generator=generator).tolist():
            x, y = torch.randint(SIDE - DIGIT, (2,), generator=generator).tolist()
            drawn = F.interpolate(digits[digit][None], size=DIGIT)[0, 0]
            ink = drawn > 0
            place = (image, slice(y, y + DIGIT), slice(x, x + DIGIT))
            canvases[:, 0][place] += drawn.clamp_min(0)
            classes[place] = torch.where(ink, labels[digit], classes[place])
    return canvases, classes


def pixel_losses(model: Segmenter, canvases: Tensor, classes: Tensor) -> Tensor:
    """Cross entropy of each pixel, (N, H, W)."""
    return F.cross_entropy(model(canvases), classes, reduction="none")


def plain(losses: Tensor) -> Tensor:
    """Index the losses."""
    rows = rowprop.TopK(KEEP)(losses.detach().flatten()).rows
    return losses.flatten()[rows].mean()


def pick(losses: Tensor) -> Tensor:
    """Pick the losses: a selection made of flattened scores is one of all pixels."""
    return rowprop.pick(losses, rowprop.TopK(KEEP)(losses.detach().flatten())).mean()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {"plain": plain, "pick": pick}


def count_ways(model: Segmenter, canvases: Tensor, classes: Tensor) -> None:
    """Count the FLOPs of both backwards, of the head and of the backbone, and check that the gradients are the same."""
    parts = {"head": model.head, "backbone": model.backbone}
    features = model.backbone(canvases).detach().requires_grad_()
    found: dict[str, tuple[dict[str, int], list[Tensor]]] = {}
    for name, way in WAYS.items():
        flops: dict[str, int] = {}
        loss = way(F.cross_entropy(model.head(features), classes, reduction="none"))
        with count_flops() as counted:
            torch.autograd.grad(loss, [*model.head.parameters(), features])
        flops["head"] = counted.total_flops
        loss = way(pixel_losses(model, canvases, classes))
        with count_flops() as counted:
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        flops["backbone"] = counted.total_flops - flops["head"]
        found[name] = flops, list(gradients)
    full, wanted = found["plain"]
    print("way    gradients differ by  " + "  ".join(f"{part}'s backward, MFLOP  ratio" for part in parts))
    for name, (flops, gradients) in found.items():
        each = [(a - b).abs().max() / a.abs().max().clamp_min(1e-30) for a, b in zip(wanted, gradients, strict=True)]
        off = float(torch.stack(each).max())  # NaN if one is, which Python's max might not see
        if not off <= 1e-5:
            raise SystemExit(f"The gradients of {name} differ by {off:.1e} of their largest entry.")
        told = "  ".join(f"{flops[part] / 1e6:{len(part) + 18}.1f}  {flops[part] / full[part]:5.2f}" for part in parts)
        print(f"{name:5}  {off:19.0e}  {told}")


def main(argv: list[str] | None = None) -> None:
    """Train on the hardest pixels; then count both ways on the trained network."""
    parser = argparse.ArgumentParser(description="OHEM over pixels, with the head's backward at the kept pixels.")
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    parser.add_argument("--images", type=int, default=8, help="canvases per step (default 8)")
    options = parser.parse_args(argv)
    data = load_data("digits")
    zeros_and_ones = data.train_y < BACKGROUND
    digits, labels = data.train_x[zeros_and_ones], data.train_y[zeros_and_ones]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(options.steps):
        pick(pixel_losses(model, *make_batch(digits, labels, options.images, generator))).backward()
        optimizer.step()
        optimizer.zero_grad()
    zeros_and_ones = data.test_y < BACKGROUND
    digits, labels = data.test_x[zeros_and_ones], data.test_y[zeros_and_ones]
    canvases, classes = make_batch(digits, labels, options.images, generator)
    with torch.no_grad():
        right = model(canvases).argmax(1) == classes
    on_digits = classes != BACKGROUND
    print(
        f"after {options.steps} steps the class of {right.float().mean():.0%} of the pixels is right, of "
        f"{right[on_digits].float().mean():.0%} of those on a digit"
    )
    count_ways(model, canvases, classes)
    with rowprop.watch() as report:
        pick(pixel_losses(model, canvases, classes)).backward()
    print(report)


if __name__ == "__main__":
    main()
