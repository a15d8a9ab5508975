"""A plain loop in which one line changes: ``rowprop.pick(losses, rows)`` where it said ``losses[rows]``.

A small network learns scikit-learn's digits on the quarter of each batch with the largest losses. It learns twice, from
the same weights and on the same batches: once by plain indexing, once by ``pick``. Printed are the losses of all rows
and of the kept ones, what the training cost in counted FLOPs, and how far the parameters are apart at the end:

    python examples/plain_loop.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rowprop


def train(kept: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, int]:
    """Train for three epochs; return the model and the FLOPs of the training."""
    images, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes))
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=128, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with rowprop.cost.count_flops() as flops:
        for epoch in range(3):
            for x, y in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                rows = losses.detach().topk(len(losses) // 4).indices
                loss = kept(losses, rows).mean()  # the line: rowprop.pick(losses, rows) for losses[rows]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"  epoch {epoch}: kept {len(rows)} of {len(x)} rows, ", end="")
            print(f"loss {losses.mean():.3f} of all rows, {loss:.3f} of the kept ones")
    return model, flops.total_flops


def main() -> None:
    """Train twice, and compare."""
    print("losses[rows]")
    plain, plain_flops = train(lambda losses, rows: losses[rows])
    print("rowprop.pick(losses, rows)")
    picked, picked_flops = train(rowprop.pick)
    print(f"pick took {picked_flops / plain_flops:.2f} of the FLOPs")
    pairs = zip(plain.parameters(), picked.parameters(), strict=True)
    print(f"parameters differ by {max(float((a - b).detach().abs().max()) for a, b in pairs):.0e} at most")


if __name__ == "__main__":
    main()
