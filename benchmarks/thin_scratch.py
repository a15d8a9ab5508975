"""Thinning from random weights: Fashion-MNIST, the small ResNet and the small ViT of ``rowprop compare``.

Two runs of ``rowprop compare`` with one thread and equal epochs: ``full``, ``thinned`` (``rowprop.thin`` at its
defaults) and ``random@thinned`` (rows drawn at random, in each seed as many as ``thinned`` has backpropagated on
average); ``--methods`` takes ``vcas``, too. Looks, controls and draws are on the clock. Seconds are those
that the processor worked for this process, so that others on the machine disturb them little.

Runs that are finished stay in ``--runs``, so it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_step import RESULTS, device_stem, save
from rowprop.app.compare import train
from rowprop.app.compare.data import load_data
from rowprop.app.compare.run import compare
from rowprop.app.compare.settings import Settings
from thin_finetune import told

METHODS = "full,thinned,random@thinned"
TEST_ROWS = 2_000  # each epoch tests them, beside the clock
MODELS: dict[str, dict[str, Any]] = {
    "resnet": {"train_rows": 6_000, "batch_rows": 128, "epochs": 5},
    "vit": {"train_rows": 2_500, "batch_rows": 128, "epochs": 5},
}
COLUMNS = (
    "method", "accuracy, %", "against full", "time, of full's", "backward, of full's", "steering, of full's time",
    "rows backpropagated: all, last epoch, %",
)  # fmt: skip

Run = dict[str, Any]


def data() -> tuple[Tensor, Tensor, Tensor, Tensor, list[str]]:
    """Fashion-MNIST with fewer test rows, as ``rowprop compare`` takes data."""
    all_rows = load_data("fashion-mnist", None, None)
    test = slice(0, TEST_ROWS)
    return all_rows.train_x, all_rows.train_y, all_rows.test_x[test], all_rows.test_y[test], all_rows.class_names


def table(results: dict[str, Any]) -> list[str]:
    """One comparison in markdown: means over the seeds, and ratios to the same seed's ``full``."""
    runs = {(run["label"], run["seed"]): run for run in results["runs"]}
    seeds = sorted({seed for _, seed in runs})
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]

    def over(label: str, of: Callable[[Run, Run], float], digits: int) -> str:
        return told((of(runs[label, seed], runs["full", seed]) for seed in seeds), digits)

    for label in results["methods"]:
        name = label["label"]
        cells = [
            f"`{name}`",
            over(name, lambda run, _: 100 * run["accuracy"], 2),
            over(name, lambda run, full: 100 * (run["accuracy"] - full["accuracy"]), 2),
            over(name, lambda run, full: run["train_s"] / full["train_s"], 2),
            over(name, lambda run, full: run["phases_s"]["backward"] / full["phases_s"]["backward"], 2),
            over(name, lambda run, full: run["phases_s"]["select"] / full["train_s"], 2),
            over(name, lambda run, _: 100 * run["rows_backpropagated"] / run["rows_seen"], 0)
            + ", "
            + over(name, lambda run, _: 100 * run["curve"][-1]["kept"], 0),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    """Compare on both models, and write one table for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/thin-scratch"), help="finished runs (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each method (default 3)")
    parser.add_argument("--methods", default=METHODS, help="comma-separated (default %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    train.drained_s = time.process_time
    command = " ".join(["python benchmarks/thin_scratch.py", *sys.argv[1:]])
    lines = ["# Thinning from random weights", "", f"`{command}`", "", *(__doc__ or "").strip().splitlines()[2:-2], ""]
    everything: dict[str, Any] = {}
    for model in args.models.split(","):
        settings = Settings(
            data="thin_scratch:data", model=model, methods=args.methods, seeds=args.seeds, threads=1, device="cpu",
            **MODELS[model],
        )  # fmt: skip
        outcome = compare(settings, args.runs / model, resume=True)
        results = outcome.results
        if results is None or outcome.interrupted:
            sys.exit("Stopped; the finished runs are kept, the same command goes on with them.")
        everything[model] = results
        where, used = results["environment"], results["settings"]
        lines += [
            f"## {model}", "",
            f"{results['data']['train_rows']:,} training rows, {TEST_ROWS:,} to test, {used['epochs']} epochs, "
            f"N = {used['batch_rows']}, {used['optimizer']}, peak rate {used['peak_lr']:g}, {used['seeds']} seeds, ± "
            "one standard deviation; "
            f"{where['device_name']}, {where['threads']} thread, torch {where['torch']}, {where['dtype']}.", "",
            *table(results),
        ]  # fmt: skip
    lines += [
        "Steering is what is charged as `select`: the controls of `vcas`. Looks of `thinned` are in its backward."
    ]
    text = "\n".join([*lines, ""])
    print(text)
    save(args.out, f"thin-scratch-{device_stem(torch.device('cpu'), 1)}", everything, text)


if __name__ == "__main__":
    main()
