"""Lightning: one line in the trainer has each training step backpropagate the quarter with the largest losses.

The module learns scikit-learn's digits, and logs the losses of all rows and of the kept ones. A plain loop with plain
indexing trains the same weights on the same batches. Printed are Lightning's numbers beside the loop's, what each
training cost in counted FLOPs, and how far the parameters are apart at the end:

    pip install 'rowprop[lightning]' scikit-learn
    python examples/lightning_fit.py
"""

from __future__ import annotations

import copy

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rowprop
from rowprop.integrations.lightning import SelectiveBackpropCallback


class Digits(lightning.LightningModule):
    """A module as everyone writes it; ``losses`` is the one method that the callback needs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of each row, (N,)."""
        return F.cross_entropy(self.network(batch[0]), batch[1], reduction="none")

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The mean loss."""
        return self.losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train in Lightning and by hand, and compare."""
    images, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes))
    loader = DataLoader(data, batch_size=128, drop_last=True)
    torch.manual_seed(0)
    module = Digits()
    plain = copy.deepcopy(module)

    callback = SelectiveBackpropCallback(rowprop.TopK(keep=0.25), engine="sliced")  # the line
    trainer = lightning.Trainer(
        max_epochs=3, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with rowprop.cost.count_flops() as flops:
        trainer.fit(module, loader)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print("Lightning: ", ", ".join(f"{name} {found[name]:.4f}" for name in ("loss_all", "loss_kept", "kept")))

    optimizer = plain.configure_optimizers()
    with rowprop.cost.count_flops() as plain_flops:
        for batch in [*loader] * 3:
            losses = plain.losses(batch)
            kept = losses[losses.detach().topk(32).indices]
            kept.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"plain loop: loss_all {losses.mean():.4f}, loss_kept {kept.mean():.4f}, kept {len(kept) / len(losses):.4f}")
    print(f"the callback took {flops.total_flops / plain_flops.total_flops:.2f} of the FLOPs")
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    print(f"parameters differ by {max(float((a - b).detach().abs().max()) for a, b in pairs):.0e} at most")


if __name__ == "__main__":
    main()
