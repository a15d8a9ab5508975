"""Every recipe beside full and random, on images and on text, at equal epochs and at equal training time.

Four runs of ``rowprop compare``, with three seeds and one thread each: Fashion-MNIST with the small ResNet, WordNet's
glosses with the small text network, first for as many epochs each, then for as many seconds each, fewer than ``full``
takes for these epochs. Under either budget the learning rate has decayed to zero at its end. ``random`` keeps the same
fraction as the methods that keep a fraction. All that a method does for its choices is on the clock: scoring,
selecting, and for ``rho-loss`` the training of the models that it compares with.

Runs that are finished stay in ``--runs``, so it goes on where it was stopped. ``--again`` trains nothing: it judges
and draws the newest results once more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench_step import RESULTS, device_stem, save
from rowprop.app.compare.data import load_data
from rowprop.app.compare.report import render_report
from rowprop.app.compare.results import verdict, with_spread
from rowprop.app.compare.run import compare
from rowprop.app.compare.settings import METHODS, Settings
from rowprop.files import write_whole

SETS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"model": "resnet", "train_rows": 12_000, "batch_rows": 256},
    "wordnet": {"train_rows": 40_000, "batch_rows": 128},
}
BUDGETS: dict[str, dict[str, dict[str, Any]]] = {
    "fashion-mnist": {"epochs": {"epochs": 8}, "seconds": {"seconds": 40.0}},
    "wordnet": {"epochs": {"epochs": 5}, "seconds": {"seconds": 30.0}},
}
COLUMNS = ("method", "accuracy, %", "against random", "training, s", "x full", "rows seen", "backpropagated")


def table(results: dict[str, Any]) -> list[str]:
    """One comparison in markdown."""
    methods = results["methods"]
    full, chance = (next(m for m in methods if m["name"] == name) for name in ("full", "random"))
    where, settings, data = results["environment"], results["settings"], results["data"]
    budget = f"{settings['epochs']} epochs" if settings["epochs"] else f"{settings['seconds']:g} s of training"
    lines = [
        f"## {data['name']}, {budget} each", "",
        f"{data['train_rows']:,} training rows, {data['test_rows']:,} to test, {settings['model']}, N = "
        f"{settings['batch_rows']}, keep {settings['keep']:g}, loss share 0.9, peak rate "
        f"{settings['peak_lr']:g}, {settings['seeds']} seeds; {where['device_name']}, {where['threads']} thread, torch "
        f"{where['torch']}, {where['dtype']}. {results['verdict']}", "",
        "| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1),
    ]  # fmt: skip
    for method in methods:
        gain = 100 * (method["accuracy"]["mean"] - chance["accuracy"]["mean"])
        cells = [
            method["label"],
            with_spread(method["accuracy"], 100, 2),
            f"{gain:+.2f}",
            with_spread(method["train_s"], 1, 1),
            with_spread(method["ratio_to_full"], 1, 2),
            f"{method['rows_seen']:,.0f}",
            f"{method['rows_backpropagated']:,.0f} ({100 * method['rows_backpropagated'] / full['rows_seen']:.0f} %)",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def again(folder: Path) -> None:
    """Write verdicts, tables and pages of the newest results anew; what stands above the tables stays as it is."""
    path = sorted(folder.glob("*-recipes-*.json"))[-1]
    everything: dict[str, Any] = json.loads(path.read_text())
    lines: list[str] = []
    for name, results in everything.items():
        results["verdict"] = verdict(results["methods"], seconds=results["settings"]["seconds"])
        lines += table(results)
        data = load_data(results["data"]["name"], None, results["data"]["train_rows"])
        write_whole(path.with_name(f"{path.stem}-{name}.html"), render_report(results, data).encode())
    above = path.with_suffix(".md").read_text().partition("\n## ")[0]
    write_whole(path, (json.dumps(everything, indent=1) + "\n").encode())
    write_whole(path.with_suffix(".md"), "\n".join([above, *lines]).encode())
    print(f"Written: {path.with_suffix('')}.json, .md and {len(everything)} pages")


def main() -> None:
    """Compare, and write one table, and for each comparison its results and its page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"), help="working folder (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each method (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    parser.add_argument("--again", action="store_true", help="train nothing, judge and draw the newest results anew")
    args = parser.parse_args()
    if args.again:
        return again(args.out)
    methods = ",".join(METHODS["row"])
    lines = ["# The recipes side by side", "", f"`{' '.join(['nox -s recipes --', *sys.argv[1:]])}`", ""]
    lines += [*(__doc__ or "").strip().splitlines()[:-3], ""]
    lines += [
        "`x full` is the mean over the seeds of the ratio to the same seed's `full`; ± is one standard deviation;"
    ]
    lines += ["backpropagated rows are also given as a share of those that `full` backpropagates.", ""]
    everything: dict[str, Any] = {}
    for name, fixed in SETS.items():
        for budget, given in BUDGETS[name].items():
            settings = Settings(data=name, methods=methods, seeds=args.seeds, threads=1, **fixed, **given)
            folder = args.runs / f"{name}-{budget}"
            outcome = compare(settings, folder, resume=True)
            if outcome.results is None or outcome.interrupted:
                sys.exit("Stopped; the finished runs are kept, the same command goes on with them.")
            everything[f"{name}-{budget}"] = outcome.results
            lines += table(outcome.results)
    text = "\n".join(lines)
    print(text)
    path = save(args.out, f"recipes-{device_stem(torch.device('cpu'), 1)}", everything, text)
    for name in everything:
        write_whole(path.with_name(f"{path.name}-{name}.html"), (args.runs / name / "report.html").read_bytes())


if __name__ == "__main__":
    main()
