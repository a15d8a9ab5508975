"""Processes under DDP select together, and train as one process with the whole batch does.

Each of two processes has half of each batch of scikit-learn's digits. ``ranks=Global()`` keeps the quarter of the whole
batch with the largest losses, wherever these rows lie. Each process trains a second copy by plain indexing on the whole
batch, without DDP. Printed are the kept rows of each process, the losses, and how far the two copies are apart:

    torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rowprop
from rowprop.distributed import Global


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each row, (N,)."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_model() -> nn.Module:
    """The same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def main() -> None:
    """Train both copies, and compare."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)
    alone, model = make_model(), DistributedDataParallel(make_model())
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, model))
    selective = rowprop.SelectiveBackprop(model, losses_fn, rowprop.TopK(keep=0.25), engine="sliced", ranks=Global())
    for batch in torch.randperm(len(x)).split(128)[:-1] * 3:
        mine = batch[rank::world]
        loss, record = selective((x[mine], y[mine]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = losses_fn(alone, (x[batch], y[batch]))
        losses[losses.detach().topk(len(losses) // 4).indices].mean().backward()
        plain.step()
        plain.zero_grad()
    off = max(float((a - b).detach().abs().max()) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
    if rank == 0:
        print(f"kept {record.kept_by_rank} of {len(batch)} rows in the last step")
        print(f"loss {record.loss_all:.4f} of all rows; in one process {losses.mean():.4f}")
        print(f"parameters differ by {off:.0e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
