"""Is the plan right? Its predictions and its choices beside measurements.

For each model, ``rowprop.plan`` predicts every way at every keep from lines through other keeps. In turn with
the steps that the lines go through, it measures the ways at the keeps themselves: |predicted - measured| / measured is
the error of the prediction. Then a later run, which the plan has not seen, measures every way and the plain step again.
The regret of a keep is the later time of the plan's choice over the later time of the best way; a way whose gradient is
another one than plain indexing's is never chosen and does not count. Predicted seconds differ from later seconds also
by the machine's drift, the later time of the plain step over its time in the plan; speed-ups are free of the drift.

The exit code is 1 where a figure does not meet its bar.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rowprop
from bench_step import RESULTS, WORKLOADS, Batch, Sizes, device_stem, row_losses, save, setting
from rowprop.cost.timing import Variant, measure_step

KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9)
CPU = Sizes((256, 512), (64, 32, 8), (32, 64, 128, 3), (16, 64, 128, 3))  # steps of 10 to 50 ms on one core
GPU = Sizes((8192, 4096), (256, 64, 64), (128, 196, 384, 8), (32, 512, 768, 8))
STEP = ("score", "forward", "select", "backward")
MEDIAN_REGRET, WORST_REGRET, MEDIAN_ERROR = 1.05, 1.15, 0.10


@dataclass(frozen=True)
class Judged:
    """A plan's choice at one keep, beside the measurements."""

    workload: str
    keep: float
    choice: str
    best: str
    regret: float
    errors: list[float]
    later_errors: list[float]
    speedup_errors: list[float]
    drift: float
    pays: bool
    break_even_keep: float


def judge(name: str, model: nn.Module, batch: Batch, rounds: int) -> list[Judged]:
    """Plan, then measure every way."""
    plan = rowprop.plan(model, batch, row_losses, keep=KEEPS, optimizer=None, batchnorm="rows", rounds=rounds)
    ways = {(way.engine, way.keep): Variant(way.engine, way.keep) for way in plan.ways}
    full = Variant()
    variants = [full, *ways.values()]
    timings = measure_step(model, batch, row_losses, variants, rounds=rounds, batchnorm="rows")
    measured = {key: timings[way].spread(*STEP).median for key, way in ways.items()}
    full_s = timings[full].spread(*STEP).median
    judged: list[Judged] = []
    for keep, choice in zip(KEEPS, plan.choices, strict=True):
        here = [way for way in plan.ways if way.keep == keep]
        able = [way for way in here if way.eligible]
        best = min(able, key=lambda way: measured[way.engine, way.keep])
        best_s = measured[best.engine, keep]
        errors = [off(way.predicted_s, way.measured_s) for way in here if way.measured_s is not None]
        later = [measured[way.engine, keep] for way in here]
        later_errors = [off(way.predicted_s, seconds) for way, seconds in zip(here, later, strict=True)]
        speedups = [
            off(plan.full_s / way.predicted_s, full_s / seconds) for way, seconds in zip(here, later, strict=True)
        ]
        regret = measured[choice.engine, keep] / best_s
        pays = choice.engine != "masked"
        figures = regret, errors, later_errors, speedups, full_s / plan.full_s
        judged.append(Judged(name, keep, choice.engine, best.engine, *figures, pays, plan.break_even_keep))
    return judged


def off(predicted: float, measured: float) -> float:
    """The error of a prediction as a share of the measurement."""
    return abs(predicted / measured - 1)


def markdown(result: dict[str, Any], judged: list[Judged]) -> str:
    """The figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# The plan beside measurements", "", f"`{result['command']}`: {about}", ""]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    for title, figures in result["summary"].items():
        lines += ["", f"**{title}**: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items())]
    lines += ["", *(f"* {'met' if bar['met'] else 'NOT MET'}: {bar['bar']}" for bar in result["bars"])]
    heads = "model", "keep", "chosen", "best measured", "regret", "error", "error of the speed-up later"
    lines += ["", f"| {' | '.join(heads)} | drift | break-even |", "|---" * (len(heads) + 2) + "|"]
    for j in judged:
        error, speedup = (f"{100 * statistics.median(errors):.1f} %" for errors in (j.errors, j.speedup_errors))
        lines.append(
            f"| {j.workload} | {j.keep} | {j.choice} | {j.best} | {j.regret:.3f} | {error} | {speedup} "
            f"| {j.drift:.2f} | {j.break_even_keep:.2f} |"
        )
    return "\n".join(lines) + "\n"


def summary(judged: list[Judged]) -> dict[str, dict[str, float]]:
    """The figures that decide."""
    found = {
        "regret of the choice": [j.regret for j in judged],
        "error of the predicted step time": [error for j in judged for error in j.errors],
        "error of the predicted speed-up, in a later run": [error for j in judged for error in j.speedup_errors],
        "error of the predicted step time, in a later run": [error for j in judged for error in j.later_errors],
        "drift of the plain step, either way": [max(j.drift, 1 / j.drift) - 1 for j in judged],
    }
    return {
        title: {"median": statistics.median(values), "worst": max(values)} for title, values in found.items() if values
    }


def bars(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Whether each figure of the summary meets its bar."""
    regret = found["regret of the choice"]
    error = found["error of the predicted step time"]["median"]
    speedup = found["error of the predicted speed-up, in a later run"]["median"]
    met = {
        f"median regret {regret['median']:.3f}, at most {MEDIAN_REGRET}": regret["median"] <= MEDIAN_REGRET,
        f"worst regret {regret['worst']:.3f}, at most {WORST_REGRET}": regret["worst"] <= WORST_REGRET,
        f"median error of the step time {error:.3f}, at most {MEDIAN_ERROR}": error <= MEDIAN_ERROR,
        f"median error of the speed-up in a later run {speedup:.3f}, at most {MEDIAN_ERROR}": speedup <= MEDIAN_ERROR,
    }
    return [{"bar": bar, "met": is_met} for bar, is_met in met.items()]


def main() -> None:
    """Measure, print, write JSON and markdown, and exit with 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way (default 15)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated (default all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    sizes = GPU if device.type == "cuda" else CPU
    judged: list[Judged] = []
    for name in args.workloads.split(","):
        model, batch = WORKLOADS[name](*getattr(sizes, name))
        model.to(device)
        batch = tuple(t.to(device) for t in batch)
        judged += judge(name, model, batch, args.rounds)
    found = summary(judged)
    result: dict[str, Any] = {
        "command": " ".join(["nox -s bench-plan --", *sys.argv[1:]]),
        "setting": setting(device, args.threads, dtype="float32")
        | {"sizes": " ".join(f"{name} {getattr(sizes, name)}" for name in args.workloads.split(","))},
        "summary": found, "bars": bars(found), "plans": [asdict(j) for j in judged],
    }  # fmt: skip
    text = markdown(result, judged)
    print(text)
    save(args.out, f"plan-{device_stem(device, args.threads)}", result, text)
    sys.exit(0 if all(bar["met"] for bar in result["bars"]) else 1)


if __name__ == "__main__":
    main()
