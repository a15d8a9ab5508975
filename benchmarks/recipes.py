"""Every recipe beside full, random and plain training at its own cost, on images and on text.

Two runs of ``rowprop compare``, with three seeds and one thread each: Fashion-MNIST with the small ResNet, and
WordNet's glosses with the small text network, for as many epochs each. The learning rate has decayed to zero at their
end. All methods that keep a fraction keep the same. All that a method does for its choices is on the clock: scoring,
selecting, and for ``rho-loss`` the training of the models that it compares with. ``plain@METHOD`` is plain training on
as many rows of each batch as cost what that method cost, by the measured times.

Runs that are finished stay in ``--runs``, so it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from bench_step import RESULTS, device_stem, save
from rowprop.files import write_whole
from rowprop_lab.results import with_spread
from rowprop_lab.run import compare
from rowprop_lab.settings import Settings

SETS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"model": "resnet", "train_rows": 12_000, "batch_rows": 256},
    "wordnet": {"train_rows": 40_000, "batch_rows": 128},
}
EPOCHS = {"fashion-mnist": 8, "wordnet": 5}
KEEP = 0.25  # the keep of README's table of steps
RECIPES = {
    "fashion-mnist": "random ohem composer batch-loss-filter biggest-losers kath18 infobatch "
    "infobatch+batch-loss-filter rho-loss",
    "wordnet": "random ohem composer batch-loss-filter kath18",  # the others lost points there, or took longer
}
COLUMNS = ("method", "accuracy, %", "plain at its cost, %", "rows a step", "training, s", "x full", "rows seen",
    "backpropagated")  # fmt: skip


def table(results: dict[str, Any]) -> list[str]:
    """One comparison in markdown."""
    methods = {method["label"]: method for method in results["methods"]}
    where, settings, data = results["environment"], results["settings"], results["data"]
    lines = [
        f"## {data['name']}, {settings['epochs']} epochs each", "",
        f"{data['train_rows']:,} training rows, {data['test_rows']:,} to test, {settings['model']}, N = "
        f"{settings['batch_rows']}, keep {settings['keep']:g}, loss share 0.9, peak rate "
        f"{settings['peak_lr']:g}, {settings['seeds']} seeds; {where['device_name']}, {where['threads']} thread, torch "
        f"{where['torch']}, {where['dtype']}. {results['verdict']}", "",
        "| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1),
    ]  # fmt: skip
    for label, method in methods.items():
        plain = methods.get(f"plain@{label}")
        if label.startswith("plain@"):
            continue
        rows_a_step = plain and settings["batch_rows"] * plain["rows_seen"] / methods["full"]["rows_seen"]
        cells = [
            label,
            with_spread(method["accuracy"], 100, 2),
            with_spread(plain["accuracy"], 100, 2) if plain else "",
            f"{rows_a_step:.0f}" if plain else "",
            with_spread(method["train_s"], 1, 1),
            with_spread(method["ratio_to_full"], 1, 2),
            share(method, "rows_seen", methods["full"]),
            share(method, "rows_backpropagated", methods["full"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def share(method: dict[str, Any], what: str, full: dict[str, Any]) -> str:
    """Rows as a share of those that ``full`` sees."""
    return f"{100 * method[what] / full['rows_seen']:.0f} %"


def main() -> None:
    """Compare, and write one table, and for each comparison its results and its page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"), help="working folder (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each method (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    lines = ["# The recipes side by side", "", f"`{' '.join(['nox -s recipes --', *sys.argv[1:]])}`", ""]
    lines += [*(__doc__ or "").strip().splitlines()[:-2], ""]
    lines += [
        "`x full` is the mean over the seeds of the ratio to the same seed's `full`; ± is one standard deviation;"
    ]
    lines += ["rows are shares of those that `full` sees.", ""]
    everything: dict[str, Any] = {}
    for name, fixed in SETS.items():
        recipes = RECIPES[name].split()
        methods = ",".join(["full", *recipes, *(f"plain@{each}" for each in recipes)])
        settings = Settings(
            data=name, methods=methods, seeds=args.seeds, threads=1, keep=KEEP, epochs=EPOCHS[name], **fixed
        )
        outcome = compare(settings, args.runs / name, resume=True)
        if outcome.results is None or outcome.interrupted:
            sys.exit("Stopped; the finished runs are kept, the same command goes on with them.")
        everything[name] = outcome.results
        lines += table(outcome.results)
    text = "\n".join(lines)
    print(text)
    path = save(args.out, f"recipes-{device_stem(torch.device('cpu'), 1)}", everything, text)
    for name in everything:
        write_whole(path.with_name(f"{path.name}-{name}.html"), (args.runs / name / "report.html").read_bytes())


if __name__ == "__main__":
    main()
