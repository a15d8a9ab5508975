"""Metric learning with a triplet loss: a backward for the triplets that still teach, and nothing lost.

Where a triplet's negative is further than its positive by more than the margin, its loss is exactly zero, and so is its
gradient. As training goes on, most triplets are like this. Dropping them from the backward changes nothing, and
``pick`` makes it pay. Two networks are trained side by side on the same triplets, one plainly and one on the nonzero
rows:

    python examples/triplet.py                 # Fashion-MNIST
    python examples/triplet.py --data digits   # scikit-learn's 8x8 digits

The row is the triplet: its three images lie together in the batch, (N, 3, C, H, W), and go through the network as 3N
images. Seen as (N, 3, D) again, the embeddings' rows are triplets, and the slicing reaches the first layer. Three
separate calls of the network work as well. A batch (3, N, ...) of all anchors, then all positives, then all negatives,
cut by ``embeddings[:N]``, does not work: no dimension of it holds the rows alone.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from rowprop.cost.measure import Clock
from rowprop_lab.data import Dataset, load_data

MARGIN = 0.2


def make_model(channels: int = 32) -> nn.Module:
    """An embedding network without BatchNorm, which would mix the rows: (M, 1, H, W) -> (M, 64)."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * channels, 64),
    )  # fmt: skip


def draw(data: Dataset, count: int, generator: torch.Generator) -> Tensor:
    """Draw triplets (anchor, another of its class, one of another class), shape (count, 3, C, H, W)."""
    anchors = torch.randint(len(data.train_y), (count,), generator=generator)
    same = data.train_y[anchors, None] == data.train_y
    positives = torch.multinomial(same.float(), 1, generator=generator).squeeze(1)
    negatives = torch.multinomial((~same).float(), 1, generator=generator).squeeze(1)
    return data.train_x[torch.stack([anchors, positives, negatives], dim=1)]


def triplet_losses(model: nn.Module, triplets: Tensor) -> Tensor:
    """Hinge on the distances, one number per triplet: (N, 3, C, H, W) -> (N,)."""
    embeddings = F.normalize(model(triplets.flatten(0, 1)), dim=1).unflatten(0, (-1, 3))
    anchor, positive, negative = embeddings.unbind(1)
    return F.triplet_margin_loss(anchor, positive, negative, margin=MARGIN, reduction="none")


def reduced(losses: Tensor, *, picked: bool) -> Tensor:
    """The mean over all N triplets, backpropagated through all triplets or through the nonzero ones."""
    if not picked:
        return losses.mean()
    rows = losses.detach().nonzero().squeeze(1)
    return rowprop.pick(losses, rows).sum() / len(losses)  # a mean over N, not over the K rows that are left


def gradients(model: nn.Module, triplets: Tensor, *, picked: bool) -> list[Tensor]:
    """One gradient per parameter."""
    return list(torch.autograd.grad(reduced(triplet_losses(model, triplets), picked=picked), list(model.parameters())))


def largest_difference(model: nn.Module, triplets: Tensor) -> float:
    """The difference of the two gradients of a network, relative to the largest entry of each parameter's."""
    pairs = zip(*(gradients(model, triplets, picked=picked) for picked in (False, True)), strict=True)
    off = [(full - picked).abs().max() / full.abs().max().clamp_min(1e-30) for full, picked in pairs]
    return float(torch.stack(off).max())  # NaN if one is, which Python's max might not see


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, triplets: Tensor, picked: bool) -> dict[str, float]:
    """One step; milliseconds of its phases, and the share of triplets that are not zero."""
    clock = Clock()
    losses = triplet_losses(model, triplets)
    loss = reduced(losses, picked=picked)
    clock.done("forward")
    loss.backward()
    clock.done("backward")
    optimizer.step()
    optimizer.zero_grad()
    clock.done("update")
    spans_ms = {phase: 1000 * span_s for phase, span_s in clock.phases_s().items()}
    return spans_ms | {"step": sum(spans_ms.values()), "share": float((losses != 0).float().mean())}


@torch.no_grad()
def nearest_neighbour_accuracy(model: nn.Module, data: Dataset) -> float:
    """Share of test images whose nearest training image, of 2,000, is of their class."""
    known, asked = (F.normalize(model(x[:2000]), dim=1) for x in (data.train_x, data.test_x))
    return float((data.train_y[:2000][(asked @ known.T).argmax(1)] == data.test_y[:2000]).float().mean())


def main(argv: list[str] | None = None) -> None:
    """Train both ways in turns and print the cost, by quarters of the training."""
    parser = argparse.ArgumentParser(description="A triplet loss, backpropagated for its nonzero rows only.")
    parser.add_argument("--data", default="fashion-mnist", help="fashion-mnist (default) or digits")
    parser.add_argument("--steps", type=int, default=160, help="training steps (default 160)")
    parser.add_argument("--batch", type=int, default=96, help="triplets per step (default 96)")
    options = parser.parse_args(argv)
    data = load_data(options.data, train_rows=6000 if options.data == "fashion-mnist" else None)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    models = {"full": make_model(), "picked": make_model()}
    models["picked"].load_state_dict(models["full"].state_dict())
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for name, model in models.items()}

    print("    steps  nonzero  gradients differ by  backward, ms: full  picked  ratio  whole step: ratio")
    quarter = max(1, options.steps // 4)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for step in range(options.steps):
        triplets = draw(data, options.batch, generator)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / options.steps)
        for name in list(models) if step % 2 else reversed(models):  # in turns: a disturbance meets both
            seen[name].append(train_step(models[name], optimizers[name], triplets, name == "picked"))
        if (step + 1) % quarter == 0:
            off = largest_difference(models["picked"], triplets)
            if not off <= 1e-5:
                raise SystemExit(f"The gradients differ by {off:.1e} of their largest entry.")
            median = {
                name: {key: statistics.median(s[key] for s in steps[-quarter:]) for key in steps[0]}
                for name, steps in seen.items()
            }
            full, picked = median["full"], median["picked"]
            print(
                f"{step + 2 - quarter:4}-{step + 1:<4} {picked['share']:7.0%}  {off:19.0e}  "
                f"{full['backward']:18.1f}  {picked['backward']:6.1f}  {picked['backward'] / full['backward']:5.2f}  "
                f"{picked['step'] / full['step']:17.2f}"
            )
    with rowprop.watch() as report:
        reduced(triplet_losses(models["picked"], triplets), picked=True).backward()
    print(report)
    total_s = {name: sum(s["step"] for s in steps) / 1000 for name, steps in seen.items()}
    print(f"all steps: full {total_s['full']:.1f} s, picked {total_s['picked']:.1f} s, ", end="")
    print(f"ratio {total_s['picked'] / total_s['full']:.2f}")
    for name, model in models.items():
        print(f"{name}: nearest neighbour right for {nearest_neighbour_accuracy(model, data):.1%} of the test images")


if __name__ == "__main__":
    main()
