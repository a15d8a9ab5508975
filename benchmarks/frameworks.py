"""Composer's SelectiveBackprop and tsai's BatchLossFilter beside ours, in the trainers that they were made for.

Each trains the small ResNet of ``rowprop compare`` on Fashion-MNIST, in one process and thread, seed after seed in an
order that turns. Within a framework all ways have the same model, weights, batches, optimizer and schedule:

- Composer's ``Trainer``: as it is; its own ``SelectiveBackprop`` and our algorithm, with the published settings
  (between half and 0.9 of the training, every other batch) and throughout, at ``keep=0.5``;
- fastai's ``Learner``: as it is; tsai's ``BatchLossFilter`` and ours of the same name, for 0.9 of the loss.

Seconds are those that the processor worked for this process, so others on the machine disturb
them little; validation is outside of them. FLOPs are counted over an epoch of ten batches.

It needs the packages of ``nox -s fastai``: run it with ``.nox/fastai/bin/python``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench_step import RESULTS, device_stem, save, setting
from rowprop.cost import count_flops
from rowprop.files import write_whole
from rowprop_lab.data import Dataset, load_data
from rowprop_lab.models import ResNet
from thin_finetune import told

BATCH, RATE, KEEP, MASS = 256, 0.05, 0.5, 0.9
COMPOSER = {"published": {}, "throughout": {"start": 0.0, "end": 1.0, "keep": KEEP, "interrupt": 0}}
COLUMNS = (
    "way", "epoch, s", "of untouched", "of the original", "FLOPs, of untouched", "of the original", "accuracy, %",
    "against untouched", "rows backpropagated, %",
)  # fmt: skip

Run = dict[str, Any]


def load(name: str) -> Any:
    """A module that imports torchvision, whose build on PyPI lacks its ops on the CPU."""
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(name)


class Counted(nn.Module):
    """Counts the rows of forwards that have a graph: those that the untouched and the originals backpropagate."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network, self.rows = ResNet(10, 1), 0

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's logits."""
        if torch.is_grad_enabled():
            self.rows += images.shape[0]
        return self.network(images)


def composer(model: Counted, data: Dataset, seed: int, epochs: int, algorithm: Any) -> float:
    """Train with Composer's Trainer; returns its seconds."""
    sampled = DataLoader(TensorDataset(data.train_x, data.train_y), BATCH, shuffle=True, drop_last=True)
    trainer = load("composer").Trainer(
        model=load("composer.models").ComposerClassifier(model, num_classes=10), train_dataloader=sampled,
        max_duration=f"{epochs * len(sampled)}ba", algorithms=[] if algorithm is None else [algorithm], device="cpu",
        optimizers=torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4), seed=seed,
        schedulers=load("composer.optim").CosineAnnealingScheduler(), progress_bar=False,
    )  # fmt: skip
    begun = time.process_time()
    trainer.fit()
    took = time.process_time() - begun
    trainer.close()
    return took


def fastai(model: Counted, data: Dataset, seed: int, epochs: int, callback: Any) -> float:
    """Train with fastai's Learner; returns its seconds."""
    basics, schedule = load("fastai.basics"), load("fastai.callback.schedule")
    basics.set_seed(seed)
    rows = TensorDataset(data.train_x, data.train_y)
    loader = basics.DataLoader(rows, bs=BATCH, shuffle=True, drop_last=True)
    sgd = partial(basics.OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4))
    cosine = schedule.ParamScheduler({"lr": schedule.SchedCos(RATE, 0.0)})
    learn = basics.Learner(
        basics.DataLoaders(loader, loader), model, basics.CrossEntropyLossFlat(), sgd, lr=RATE,
        cbs=[cosine] if callback is None else [cosine, callback],
    )  # fmt: skip
    learn._do_epoch_validate = lambda *_: None
    with learn.no_bar(), learn.no_logging():
        begun = time.process_time()
        learn.fit(epochs)
        return time.process_time() - begun


def ways() -> dict[str, tuple[Callable[..., float], Callable[[], Any]]]:
    """Each way's trainer, and what to give it."""
    theirs, ours = load("composer.algorithms"), load("rowprop.integrations.composer")
    tsai, fast = load("tsai.callback.experimental"), load("rowprop.integrations.fastai")
    found: dict[str, tuple[Callable[..., float], Callable[[], Any]]] = {"Composer": (composer, lambda: None)}
    for name, settings in COMPOSER.items():
        way = f"SelectiveBackprop {name}"
        found[f"Composer, Composer's {way}"] = composer, partial(theirs.SelectiveBackprop, **settings)
        found[f"Composer, ours {way}"] = composer, partial(ours.SelectiveBackpropAlgorithm, **settings)
    found["fastai"] = fastai, lambda: None
    found["fastai, tsai's BatchLossFilter"] = fastai, partial(tsai.BatchLossFilter, MASS)
    found["fastai, ours BatchLossFilter"] = fastai, partial(fast.BatchLossFilter, MASS)
    return found


def trained(way: str, data: Dataset, seed: int, epochs: int) -> Run:
    """One training of one way."""
    train, make = ways()[way]
    model, given = Counted(seed), make()
    module, kept = sys.modules[type(given).__module__], 0
    own: Any = getattr(module, "Step", None)  # the step of ours

    class Noting(own or object):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal kept
            loss, record = super().__call__(*args, **kwargs)
            kept += record.num_kept
            return loss, record

    with mock.patch.object(module, "Step", Noting) if own else nullcontext():
        took = train(model, data, seed, epochs, given)
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(data.test_x.split(1000), data.test_y.split(1000), strict=True)
        )
    seen = epochs * (len(data.train_y) // BATCH) * BATCH
    share = (kept or model.rows) / seen
    return {"way": way, "seed": seed, "epoch_s": took / epochs, "accuracy": right / len(data.test_y), "share": share}


def counted(way: str, data: Dataset) -> int:
    """FLOPs of one way's training over an epoch of ten batches."""
    train, make = ways()[way]
    rows = slice(0, 10 * BATCH)
    few = replace(data, train_x=data.train_x[rows], train_y=data.train_y[rows])
    with count_flops() as flops:
        train(Counted(0), few, 0, 1, make())
    return flops.total_flops


def table(runs: list[Run], flops: dict[str, int]) -> list[str]:
    """The ways in markdown: means over the seeds, and ratios to the same seed's run of the other."""
    by = {(run["way"], run["seed"]): run for run in runs}
    seeds = sorted({seed for _, seed in by})
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for way in dict.fromkeys(run["way"] for run in sorted(runs, key=lambda run: run["seed"])):
        untouched = way.partition(",")[0]
        original = way.replace(" ours", " Composer's" if untouched == "Composer" else " tsai's")

        def over(of: Callable[[Run, Run], float], beside: str, digits: int, way: str = way) -> str:
            return told((of(by[way, seed], by[beside, seed]) for seed in seeds), digits)

        cells = [
            way,
            over(lambda run, _: run["epoch_s"], way, 1),
            over(lambda run, full: run["epoch_s"] / full["epoch_s"], untouched, 2),
            over(lambda run, full: run["epoch_s"] / full["epoch_s"], original, 2) if original != way else "",
            f"{flops[way] / flops[untouched]:.2f}",
            f"{flops[way] / flops[original]:.2f}" if original != way else "",
            over(lambda run, _: 100 * run["accuracy"], way, 2),
            over(lambda run, full: 100 * (run["accuracy"] - full["accuracy"]), untouched, 2),
            over(lambda run, _: 100 * run["share"], way, 0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Train all ways with each seed, and write one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=6_000, help="training rows (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each way (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/frameworks.json"), help="finished runs (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = load_data("fashion-mnist", None, args.rows)
    runs: list[Run] = json.loads(args.runs.read_text()) if args.runs.exists() else []
    done = {(run["way"], run["seed"]) for run in runs}
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    order = list(ways())
    for seed in range(args.seeds):
        for place in range(len(order)):
            way = order[(place + 3 * seed) % len(order)]
            if (way, seed) not in done:
                runs.append(trained(way, data, seed, args.epochs))
                print(runs[-1], flush=True)
                write_whole(args.runs, json.dumps(runs).encode())
    flops = {way: counted(way, data) for way in order}
    versions = {name: importlib.metadata.version(name) for name in ("mosaicml", "fastai", "tsai")}
    where = setting(torch.device("cpu"), 1, **versions)
    runs.sort(key=lambda run: (run["seed"], order.index(run["way"])))
    command = " ".join(["python benchmarks/frameworks.py", *sys.argv[1:]])
    lines = [
        "# Side by side in Composer and in fastai", "",
        f"`{command}`: {', '.join(f'{name} {value}' for name, value in where.items())}", "",
        *(__doc__ or "").splitlines()[2:-2], "",
        f"{args.rows:,} training rows, {len(data.test_y):,} to test, {args.epochs} epochs, N = {BATCH}, SGD with "
        f"momentum 0.9, rate {RATE} falling to 0 by a cosine, {args.seeds} seeds; ± is one standard deviation. "
        "Ratios and differences are to the same seed's run.", "", *table(runs, flops), "",
    ]  # fmt: skip
    text = "\n".join(lines)
    print(text)
    save(
        args.out,
        f"frameworks-{device_stem(torch.device('cpu'), 1)}",
        {"where": where, "runs": runs, "flops": flops},
        text,
    )


if __name__ == "__main__":
    main()
