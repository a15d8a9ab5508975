"""Online hard example mining for a detection head: one forward for all regions, a backward for the hardest.

Digits of scikit-learn are pasted on canvases. A backbone reads each canvas once, features are cropped for 64 regions of
each canvas, and a head predicts class and box. Only the 16 regions of each image with the largest loss are
backpropagated. Shrivastava et al. kept two copies of the head for this: a read-only copy for all regions, and one for
the chosen regions. Later implementations run one head twice. ``pick`` needs one forward. Three ways to the same
gradient are timed side by side:

* plain: ``losses[rows].mean().backward()``, whose backward runs for all regions;
* twice: cropping and head without a graph for all regions, then again for the chosen regions;
* pick: ``rowprop.pick(losses, rows).mean().backward()``.

The head's rows are regions; the backbone's rows are images. Rows mix where the gradients of the regions flow into their
images. There the gradient goes on at full size (``rowprop.watch()`` names the op). So the head is sliced; the cropping
and the backbone are not. The paper also thins overlapping regions by NMS before it chooses; this example leaves that
out.

    python examples/detection_ohem.py

References:
    Shrivastava, Gupta, Girshick, "Training Region-based Object Detectors with Online Hard Example Mining", CVPR 2016,
    arXiv:1604.03540. MMDetection's second forward was reported to cost 8 % of an iteration, against regions drawn at
    random: 0.591 s to 0.637 s for Faster R-CNN, open-mmlab/mmdetection, pull request 163.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from rowprop_lab.data import load_data

SIDE, DIGIT, REGIONS, HARDEST, BACKGROUND = 64, 16, 64, 16, 10
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # canvases (B, 1, 64, 64), boxes (B, R, 4), classes (B, R), targets


class Detector(nn.Module):
    """A backbone, a cropping of 7x7 features to a box, and a head of two layers."""

    def __init__(self, channels: int = 32, width: int = 512) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(49 * channels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, BACKGROUND + 1 + 4),
        )  # fmt: skip

    def crop(self, features: Tensor, boxes: Tensor) -> Tensor:
        """Features (B, C, H, W) at 7x7 points of each box (B, R, 4), as (B * R, C, 7, 7)."""
        places = (torch.arange(7, device=boxes.device) + 0.5) / 7
        low, size = boxes[..., :2], boxes[..., 2:] - boxes[..., :2]
        points = low[..., None, :] + places[:, None] * size[..., None, :]  # (B, R, 7, 2): x and y of the grid's lines
        x, y = points.unbind(-1)
        grid = torch.stack(torch.broadcast_tensors(x[:, :, None, :], y[:, :, :, None]), -1)  # (B, R, 7, 7, 2)
        crops = F.grid_sample(features, 2 * grid.flatten(1, 2) / SIDE - 1, align_corners=False)
        return crops.unflatten(2, (-1, 7)).transpose(1, 2).flatten(0, 1)

    def losses(self, crops: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, and for regions of no background the distance of the box: one number per region, (N,)."""
        logits, shifts = self.head(crops).split([BACKGROUND + 1, 4], dim=1)
        distance = F.smooth_l1_loss(shifts, targets.flatten(0, 1), reduction="none").sum(1)
        classes = classes.flatten()
        return F.cross_entropy(logits, classes, reduction="none") + distance * (classes != BACKGROUND)


def make_batch(digits: Tensor, labels: Tensor, images: int, generator: torch.Generator) -> Batch:
    """Canvases with four digits each, and regions: half of them around a digit, half anywhere."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    chosen = torch.randint(len(digits), (images, 4), generator=generator)
    corners = torch.tensor([(x, y) for y in (0, 32) for x in (0, 32)]) + torch.randint(
        32 - DIGIT, (images, 4, 2), generator=generator
    )
    canvases = 0.3 * torch.randn(images, 1, SIDE, SIDE, generator=generator)
    for image in range(images):
        for digit, (x, y) in zip(chosen[image].tolist(), corners[image].tolist(), strict=True):
            canvases[image, :, y : y + DIGIT, x : x + DIGIT] += F.interpolate(digits[digit][None], size=DIGIT)[0]
    truth = torch.cat([corners, corners + DIGIT], -1).float()  # (B, 4, 4)
    near = truth.repeat(1, REGIONS // 8, 1) + uniform(-5, 5, images, REGIONS // 2, 4)
    low = uniform(0, SIDE - 24, images, REGIONS // 2, 2)
    boxes = torch.cat([near, torch.cat([low, low + uniform(10, 24, images, REGIONS // 2, 2)], -1)], 1)
    overlaps = overlap(boxes[:, :, None], truth[:, None])  # (B, R, 4)
    best, which = overlaps.max(-1)
    classes = torch.where(best >= 0.5, labels[chosen].gather(1, which), BACKGROUND)
    targets = (truth.gather(1, which[..., None].expand(-1, -1, 4)) - boxes) / DIGIT
    return canvases, boxes, classes, targets


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes (..., 4)."""
    inside = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp_min(0).prod(-1)
    return inside / ((a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inside)


def hardest(losses: Tensor) -> Tensor:
    """The regions with the largest loss of each image, (B * R,) -> (B * HARDEST,), ascending."""
    per_image = losses.detach().view(-1, REGIONS).topk(HARDEST, dim=1).indices
    return (per_image + REGIONS * torch.arange(len(per_image))[:, None]).flatten().sort().values


def plain(model: Detector, features: Tensor, batch: Batch) -> Tensor:
    """Index the losses."""
    losses = model.losses(model.crop(features, batch[1]), *batch[2:])
    return losses[hardest(losses)].mean()


def twice(model: Detector, features: Tensor, batch: Batch) -> Tensor:
    """Crop and head for all regions without a graph, then for the chosen regions with one."""
    with torch.no_grad():
        rows = hardest(model.losses(model.crop(features, batch[1]), *batch[2:])).view(len(features), -1)
    places = rows - REGIONS * torch.arange(len(features))[:, None]
    boxes, targets = (part.gather(1, places[..., None].expand(-1, -1, 4)) for part in (batch[1], batch[3]))
    return model.losses(model.crop(features, boxes), batch[2].gather(1, places), targets).mean()


def pick(model: Detector, features: Tensor, batch: Batch) -> Tensor:
    """One forward, and a backward of the head for the chosen regions."""
    losses = model.losses(model.crop(features, batch[1]), *batch[2:])
    return rowprop.pick(losses, hardest(losses)).mean()


Way = Callable[[Detector, Tensor, Batch], Tensor]
WAYS: dict[str, Way] = {"plain": plain, "twice": twice, "pick": pick}


def time_ways(model: Detector, batch: Batch, rounds: int) -> None:
    """Time the ways in turns, with and without the backbone, and check that their gradients are the same."""
    parameters, head = list(model.parameters()), list(model.head.parameters())
    times_s: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    grads: dict[str, tuple[Tensor, ...]] = {}
    for _ in range(rounds + 1):
        for name, way in WAYS.items():
            begin_s = time.perf_counter()
            grads[name] = torch.autograd.grad(way(model, model.backbone(batch[0]), batch), parameters)
            step_s = time.perf_counter() - begin_s
            features = model.backbone(batch[0]).detach().requires_grad_()
            begin_s = time.perf_counter()
            torch.autograd.grad(way(model, features, batch), [*head, features])
            times_s[name].append((step_s, time.perf_counter() - begin_s))
    print("way    gradients differ by  cropping and head, ms  ratio  with the backbone, ms  ratio")
    base_s: list[float] = []
    for name, spans in times_s.items():
        step_s, head_s = (statistics.median(column) for column in zip(*spans[1:], strict=True))  # the first warms up
        base_s = base_s or [step_s, head_s]
        pairs = zip(grads["plain"], grads[name], strict=True)
        each = [(a - b).abs().max() / a.abs().max().clamp_min(1e-30) for a, b in pairs]
        off = float(torch.stack(each).max())  # NaN if one is, which Python's max might not see
        if not off <= 1e-5:
            raise SystemExit(f"The gradients of {name} differ by {off:.1e} of their largest entry.")
        print(f"{name:5}  {off:19.0e}  {1000 * head_s:21.1f}  {head_s / base_s[1]:5.2f}", end="  ")
        print(f"{1000 * step_s:21.1f}  {step_s / base_s[0]:5.2f}")


def main(argv: list[str] | None = None) -> None:
    """Train on the hardest regions; then time the three ways on the trained detector."""
    parser = argparse.ArgumentParser(description="OHEM with one forward of the head.")
    parser.add_argument("--steps", type=int, default=150, help="training steps (default 150)")
    parser.add_argument("--images", type=int, default=8, help="canvases per step, 64 regions each (default 8)")
    parser.add_argument("--rounds", type=int, default=20, help="of the timing (default 20)")
    options = parser.parse_args(argv)
    data = load_data("digits")
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(options.steps):
        batch = make_batch(data.train_x, data.train_y, options.images, generator)
        pick(model, model.backbone(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = make_batch(data.test_x, data.test_y, options.images, generator)
    with torch.no_grad():
        answers = model.head(model.crop(model.backbone(batch[0]), batch[1]))[:, : BACKGROUND + 1].argmax(1)
    right = (answers == batch[2].flatten()).float().mean()
    print(f"after {options.steps} steps the class of {right:.0%} of the regions is right")
    time_ways(model, batch, options.rounds)
    with rowprop.watch() as report:
        pick(model, model.backbone(batch[0]), batch).backward()
    print(report)


if __name__ == "__main__":
    main()
