"""Ray Train on two workers: the ordinary step, whose averaged gradient is that of the rows that both keep.

Each worker of a local cluster keeps the rows of its batch whose loss is above the batch's mean, so the counts differ.
At the end the parameters are compared with a loop in one process over the same kept rows, by plain indexing:

    pip install 'ray[train]'
    python examples/ray_train.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import rowprop

BATCH, WORKERS, EPOCHS, RATE = 64, 2, 2, 0.3


def data_and_model() -> tuple[TensorDataset, nn.Module]:
    """The same on each worker."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 20), torch.randint(4, (512,)))
    return data, nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))


def losses_fn(model: Any, batch: Any) -> Tensor:
    """One loss per row, shape (N,)."""
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    import ray.train
    from ray.train.torch import prepare_data_loader, prepare_model

    data, network = data_and_model()
    model, loader = prepare_model(network), prepare_data_loader(DataLoader(data, batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ranks = rowprop.distributed.Local()
    selective = rowprop.SelectiveBackprop(model, losses_fn, config["selector"], ranks=ranks)
    for _ in range(EPOCHS):
        for batch in loader:
            loss, record = selective(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": network.state_dict(), "selective": selective.state_dict()}, Path(folder, "state.pt"))
            first = ray.train.get_context().get_world_rank() == 0
            checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
            ray.train.report(record.to_dict() | {"kept_by_rank": record.kept_by_rank}, checkpoint=checkpoint)


def in_one_process() -> nn.Module:
    """The same training without Ray and without rowprop: every second row is the other worker's."""
    data, model = data_and_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(EPOCHS * len(data) // BATCH // WORKERS):
        start = number * BATCH * WORKERS % len(data)
        kept: list[Tensor] = []
        for worker in range(WORKERS):
            losses = losses_fn(model, data[start + worker : start + BATCH * WORKERS : WORKERS])
            kept.append(losses[losses > losses.mean()])
        torch.cat(kept).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on two workers and in one process, and compare the parameters."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", help="for checkpoints (default: Ray's own)")
    args = parser.parse_args(arguments)
    result = TorchTrainer(
        train,
        train_loop_config={"selector": rowprop.selection.AboveMean()},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=args.folder),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        found = torch.load(Path(folder, "state.pt"), weights_only=True)["model"]
    apart = max(float((found[name] - held).abs().max()) for name, held in in_one_process().state_dict().items())
    numbers = result.metrics
    print(
        f"the workers kept {numbers['kept_by_rank']} of {BATCH} rows each, loss of all rows {numbers['loss_all']:.3f}"
    )
    print(f"largest difference from one process: {apart:.1e}")


if __name__ == "__main__":
    main()
