"""fastai: one line in the learner has each training step backpropagate the quarter with the largest losses.

A learner fits scikit-learn's digits by one cycle, with the callback. Its table shows the losses of all rows and of the
kept ones, and the kept share. A second learner fits the same weights on the same batches without the callback: its loss
function indexes the losses of the same quarter, which costs a backward of all rows. Printed are also what the fits
cost, in counted FLOPs with those of validation, and how far the parameters are apart at the end:

    pip install 'rowprop[fastai]'
    python examples/fastai_fit.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, accuracy, set_seed
from fastai.callback import schedule  # noqa: F401, for fit_one_cycle
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rowprop
from rowprop.integrations.fastai import SelectiveBackpropCallback


def fit(loss_func: Any, cbs: Any = None) -> tuple[nn.Module, int]:
    """Fit from the same weights on the same batches; return the model and the FLOPs."""
    set_seed(0)
    images, classes = load_digits(return_X_y=True)
    rows = list(zip(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes), strict=True))
    train = DataLoader(rows[:1536], bs=128, shuffle=True, num_workers=0)
    dls = DataLoaders(train, DataLoader(rows[1536:], bs=261, num_workers=0))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    learn = Learner(dls, model, loss_func, metrics=accuracy, cbs=cbs)
    with learn.no_bar(), rowprop.cost.count_flops() as flops:
        learn.fit_one_cycle(5, lr_max=1e-3)
    print(learn.recorder.metric_names)
    return model, flops.total_flops


def indexed(predicted: Tensor, y: Tensor) -> Tensor:
    """The mean loss of the quarter with the largest losses, by plain indexing."""
    losses = F.cross_entropy(predicted, y, reduction="none")
    return losses[losses.detach().topk(len(losses) // 4).indices].mean()


def main() -> None:
    """Fit twice, and compare."""
    print("with the callback")
    callback = SelectiveBackpropCallback(rowprop.TopK(keep=0.25), engine="sliced")  # the line is cbs=callback
    picked, flops = fit(CrossEntropyLossFlat(), callback)
    print("with a loss function that indexes: its losses are those of the kept rows")
    plain, plain_flops = fit(indexed)
    print(f"the callback took {flops / plain_flops:.2f} of the FLOPs")
    pairs = zip(picked.parameters(), plain.parameters(), strict=True)
    print(f"parameters differ by {max(float((a - b).detach().abs().max()) for a, b in pairs):.0e} at most")


if __name__ == "__main__":
    main()
