"""Fine-tuning with a thinned backward: one line before a plain loop.

A small network has learned by how many quarter turns scikit-learn's digits are turned. Then it learns which digits
they are, twice from the same weights and on the same batches: in full, and after ``rowprop.thin(model)``. The loop is
the same function. Most of the rows are soon told well, so few of them hold most of the gradient, and the blocks keep
fewer rows. Printed are the share of the rows that each block keeps, and what forward and backward of a step cost, in
counted FLOPs:

    python examples/thin.py
    python examples/thin.py --tau 0.1
    python examples/thin.py --keep 0.25
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rowprop
from rowprop_lab.data import load_data

ROWS, WIDTH = 128, 512


class Block(nn.Module):
    """A layer beside which its input goes on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        return x + F.gelu(self.layer(self.norm(x)))


def make_model(width: int = WIDTH, depth: int = 4) -> nn.Sequential:
    """Images (N, 1, 8, 8) -> how many quarters each is turned, (N, 4)."""
    blocks = (Block(width) for _ in range(depth))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *blocks, nn.Linear(width, 4))


def train(
    model: nn.Module, x: Tensor, y: Tensor, plan: list[Tensor], handle: rowprop.thinning.Thinning | None
) -> list[int]:
    """A plain loop. FLOPs of forward and backward in every 20th step, which no training needs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    spent: list[int] = []
    for number, rows in enumerate(plan):
        with nullcontext() if number % 20 else rowprop.cost.count_flops() as flops:
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if flops is not None:
            spent.append(flops.total_flops)
        if flops is not None and handle is not None and number % 40 == 20:
            shares = " ".join(f"{share:.2f}" for share in handle.record.keep.values())
            print(f"step {number}: kept {shares}; {flops.total_flops / 1e6:.0f} MFLOP")
    return spent


def batches(rows: int, epochs: int, seed: int) -> list[Tensor]:
    """The rows of every step."""
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(rows, generator=generator) for _ in range(epochs))
    return [batch for order in orders for batch in order.split(ROWS) if len(batch) == ROWS]


def pretrained(images: Tensor, epochs: int) -> nn.Sequential:
    """A model that tells by how many quarters an image is turned."""
    torch.manual_seed(0)
    model = make_model()
    turned = torch.cat([images.rot90(quarters, (2, 3)) for quarters in range(4)])
    quarters = torch.arange(4).repeat_interleave(len(images))
    train(model, turned, quarters, batches(len(turned), epochs, seed=0), None)
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of the rows whose class the model tells."""
    model.eval()
    with torch.no_grad():
        found = (model(x).argmax(1) == y).double().mean().item()
    model.train()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune twice from the same weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tau", type=float, default=0.025, help="added variance (default %(default)s)")
    parser.add_argument("--keep", type=float, help="a fixed share of the rows, instead of --tau")
    parser.add_argument("--epochs", type=int, default=12, help="of fine-tuning (default %(default)s)")
    parser.add_argument("--before", type=int, default=2, help="epochs of quarter turns (default %(default)s)")
    args = parser.parse_args(arguments)
    data = load_data("digits")
    start = pretrained(data.train_x, args.before)
    start[-1] = nn.Linear(WIDTH, 10)  # another head for another task

    plan = batches(len(data.train_y), args.epochs, seed=1)
    costs: list[float] = []
    for name in ("full", "thinned"):
        model = copy.deepcopy(start)
        handle = rowprop.thin(model, tau=args.tau, keep=args.keep) if name == "thinned" else None
        spent = train(model, data.train_x, data.train_y, plan, handle)
        costs.append(sum(spent) / len(spent) / 1e6)
        found = accuracy(model, data.test_x, data.test_y)
        print(f"{name}: {costs[-1]:.0f} MFLOP a step, accuracy {100 * found:.1f} %")
    print(f"thinned took {costs[1] / costs[0]:.2f} of the FLOPs")


if __name__ == "__main__":
    main()
