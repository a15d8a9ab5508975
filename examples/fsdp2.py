"""Processes under FSDP2 keep rows of their own choice, possibly none, and train as one process with the whole batch.

Each of two processes has half of each batch of scikit-learn's digits, and keeps its rows with a loss above ``HARD``.
``rowprop.distributed.mean`` makes the averaged gradient that of the mean over all kept rows of all processes, also in
steps in which a process keeps nothing. Each process trains a second copy by plain indexing on the whole batch. Printed
are the kept rows, the steps in which a process kept nothing, and how far the two copies are apart:

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rowprop

HARD = 2.0


def make_model() -> nn.Sequential:
    """The same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def main() -> None:
    """Train both copies, and compare."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)
    alone, model = make_model(), make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    plain, optimizer = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (alone, model))
    kept = empty = torch.zeros(world, dtype=torch.int64)
    for batch in torch.randperm(len(x)).split(32)[:-1]:
        mine = batch[rank::world]
        losses = F.cross_entropy(model(x[mine]), y[mine], reduction="none")
        rows = (losses.detach() > HARD).nonzero().squeeze(1)
        rowprop.distributed.mean(rowprop.pick(losses, rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = F.cross_entropy(alone(x[batch]), y[batch], reduction="none")
        hard = losses[losses.detach() > HARD]
        (hard.sum() / max(1, len(hard))).backward()
        plain.step()
        plain.zero_grad()
        counts = torch.stack([(losses[each::world] > HARD).sum() for each in range(world)])
        kept, empty = kept + counts, empty + (counts == 0)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    off = max(float((a - b.full_tensor()).detach().abs().max()) for a, b in pairs)
    if rank == 0:
        print(f"kept {kept.tolist()} rows by process; kept nothing in {empty.tolist()} steps by process")
        print(f"parameters differ by {off:.0e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
