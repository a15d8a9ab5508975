"""Is the plan right? Its predictions and its choices beside measurements, and ``engine="auto"`` beside fixed engines.

**Plan.** For each model, ``rowprop.plan`` predicts every way at every keep from lines through other keeps. In turn with
the steps that the lines go through, it measures the ways at the keeps themselves: |predicted - measured| / measured is
the error of the prediction. Then a later run, which the plan has not seen, measures every way and the plain step again.
The regret of a keep is the later time of the plan's choice over the later time of the best way; a way whose gradient is
another one than plain indexing's is never chosen and does not count. Predicted seconds differ from later seconds also
by the machine's drift, the later time of the plain step over its time in the plan; speed-ups are free of the drift.

**Auto.** For each model and keep, training loops that differ in the engine only (auto, sliced, recompute, masked) take
turns step by step, each with a copy of the model and an optimizer of its own, so that other work on the machine
disturbs all of them alike. Their order is drawn anew for each step: the step before changes the time of a step by some
percent, and in a fixed order the same loop would always come after masked. The figure is auto's total time, its
measuring included, over the total time of the best fixed engine. On models with BatchNorm auto may take any gradient;
by itself it leaves ``recompute`` out there.

The exit code is 1 where a figure does not meet its bar.
"""

from __future__ import annotations

import argparse
import copy
import random
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
from rowprop.engines import Auto
from rowprop.engines.clock import drained_s
from rowprop.scoring import Downscaled

KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9)
AUTO_KEEPS = (0.1, 0.5, 0.95)
ENGINES = ("sliced", "recompute", "masked")
CPU = Sizes((256, 512), (64, 32, 8), (32, 64, 128, 3), (16, 64, 128, 3))  # steps of 10 to 50 ms on one core
GPU = Sizes((8192, 4096), (256, 64, 64), (128, 196, 384, 8), (32, 512, 768, 8))
STEP = ("score", "forward", "select", "backward")
MEDIAN_REGRET, WORST_REGRET, MEDIAN_ERROR, AUTO = 1.05, 1.15, 0.10, 1.05
CLEARLY = 1.02  # how much slower than masked the second engine is where auto should have ended on masked


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
    half = Downscaled(row_losses)
    ways = {
        (way.engine, way.scorer, way.keep): Variant(way.engine, way.keep, half if way.scorer == "half" else None)
        for way in plan.ways
    }
    full = Variant()
    timings = measure_step(model, batch, row_losses, [full, *ways.values()], rounds=rounds)
    measured = {key: timings[way].spread(*STEP).median for key, way in ways.items()}
    full_s = timings[full].spread(*STEP).median
    judged: list[Judged] = []
    for keep, choice in zip(KEEPS, plan.choices, strict=True):
        here = [way for way in plan.ways if way.keep == keep]
        able = [way for way in here if way.eligible]
        best = min(able, key=lambda way: measured[way.engine, way.scorer, way.keep])
        best_s = measured[best.engine, best.scorer, keep]
        errors = [off(way.predicted_s, way.measured_s) for way in here if way.measured_s is not None]
        later = [measured[way.engine, way.scorer, keep] for way in here]
        later_errors = [off(way.predicted_s, seconds) for way, seconds in zip(here, later, strict=True)]
        speedups = [
            off(plan.full_s / way.predicted_s, full_s / seconds) for way, seconds in zip(here, later, strict=True)
        ]
        regret = measured[choice.engine, choice.scorer, keep] / best_s
        pays = choice.engine != "masked"
        figures = regret, errors, later_errors, speedups, full_s / plan.full_s
        judged.append(Judged(name, keep, choice.name, best.name, *figures, pays, plan.break_even_keep))
    return judged


def off(predicted: float, measured: float) -> float:
    """The error of a prediction as a share of the measurement."""
    return abs(predicted / measured - 1)


@dataclass(frozen=True)
class Raced:
    """Training loops that took turns."""

    workload: str
    keep: float
    steps: int
    seconds: dict[str, float]
    over_best: float
    best: str
    ended_on: str
    decisions: list[str]


def race(name: str, model: nn.Module, batch: Batch, keep: float, steps: int) -> Raced:
    """Auto against every fixed engine."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    loops: dict[str, tuple[rowprop.SelectiveBackprop, torch.optim.Optimizer]] = {}
    for engine in ("auto", *ENGINES):
        own = copy.deepcopy(model)
        given = Auto(any_gradient=True) if engine == "auto" and normed else engine
        step = rowprop.SelectiveBackprop(own, row_losses, rowprop.TopK(keep), engine=given)
        # The rate is so small that no step changes the cost of the next one.
        loops[engine] = step, torch.optim.SGD(own.parameters(), lr=1e-7)
    device = batch[0].device
    seconds = dict.fromkeys(loops, 0.0)
    decisions: list[str] = []
    ended_on = ""
    names, orders = list(loops), random.Random(0)
    for number in range(-2, steps):  # two steps of each fixed engine warm up; auto warms itself up, on the clock
        for engine in orders.sample(names, len(names)):
            if number < 0 and engine == "auto":
                continue
            step, optimizer = loops[engine]
            begin_s = drained_s(device)
            loss, record = step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= 0:
                seconds[engine] += drained_s(device) - begin_s
            if engine == "auto":
                ended_on = record.engine
                if record.decision is not None:
                    decisions.append(f"step {record.step}: {record.decision.reason}")
    best = min(ENGINES, key=seconds.__getitem__)
    return Raced(name, keep, steps, seconds, seconds["auto"] / seconds[best], best, ended_on, decisions)


def markdown(result: dict[str, Any], judged: list[Judged], raced: list[Raced]) -> str:
    """The figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# The plan and auto beside measurements", "", f"`{result['command']}`: {about}", ""]
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
    lines += ["", "| model | keep | best fixed engine | auto over best | auto ended on |", "|---|---|---|---|---|"]
    lines += [f"| {r.workload} | {r.keep} | {r.best} | {r.over_best:.3f} | {r.ended_on} |" for r in raced]
    lines += ["", "What auto decided:", ""]
    lines += [f"* {r.workload}, keep {r.keep}, {decision}" for r in raced for decision in r.decisions]
    return "\n".join(lines) + "\n"


def summary(judged: list[Judged], raced: list[Raced]) -> dict[str, dict[str, float]]:
    """The figures that decide."""
    found = {
        "regret of the choice": [j.regret for j in judged],
        "error of the predicted step time": [error for j in judged for error in j.errors],
        "error of the predicted speed-up, in a later run": [error for j in judged for error in j.speedup_errors],
        "error of the predicted step time, in a later run": [error for j in judged for error in j.later_errors],
        "drift of the plain step, either way": [max(j.drift, 1 / j.drift) - 1 for j in judged],
        "auto over the best fixed engine": [r.over_best for r in raced],
    }
    return {
        title: {"median": statistics.median(values), "worst": max(values)} for title, values in found.items() if values
    }


def bars(found: dict[str, dict[str, float]], raced: list[Raced]) -> list[dict[str, Any]]:
    """Whether each figure of the summary meets its bar, and auto turned itself off where that was clearly best."""
    regret = found["regret of the choice"]
    error = found["error of the predicted step time"]["median"]
    speedup = found["error of the predicted speed-up, in a later run"]["median"]
    met = {
        f"median regret {regret['median']:.3f}, at most {MEDIAN_REGRET}": regret["median"] <= MEDIAN_REGRET,
        f"worst regret {regret['worst']:.3f}, at most {WORST_REGRET}": regret["worst"] <= WORST_REGRET,
        f"median error of the step time {error:.3f}, at most {MEDIAN_ERROR}": error <= MEDIAN_ERROR,
        f"median error of the speed-up in a later run {speedup:.3f}, at most {MEDIAN_ERROR}": speedup <= MEDIAN_ERROR,
    }
    for r in raced:
        name = f"{r.workload} at keep {r.keep}"
        met[f"{name}: auto {r.over_best:.3f} of the best, at most {AUTO}"] = r.over_best <= AUTO
        fastest, second = sorted(r.seconds[engine] for engine in ENGINES)[:2]
        if r.keep == AUTO_KEEPS[-1] and r.best == "masked" and second > CLEARLY * fastest:
            met[f"{name}: masked is clearly best, and auto ended on {r.ended_on}"] = r.ended_on == "masked"
    return [{"bar": bar, "met": is_met} for bar, is_met in met.items()]


def main() -> None:
    """Measure, print, write JSON and markdown, and exit with 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each way (default 15)")
    parser.add_argument("--steps", type=int, default=300, help="of each training loop; 0 for none (default 300)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated (default all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    sizes = GPU if device.type == "cuda" else CPU
    judged: list[Judged] = []
    raced: list[Raced] = []
    for name in args.workloads.split(","):
        model, batch = WORKLOADS[name](*getattr(sizes, name))
        model.to(device)
        batch = tuple(t.to(device) for t in batch)
        judged += judge(name, model, batch, args.rounds)
        for keep in AUTO_KEEPS if args.steps else ():
            raced.append(race(name, model, batch, keep, args.steps))
            print(f"{name} keep {keep}: auto over best {raced[-1].over_best:.3f}, {raced[-1].best}", file=sys.stderr)
    found = summary(judged, raced)
    result: dict[str, Any] = {
        "command": " ".join(["scripts/bench-plan", *sys.argv[1:]]),
        "setting": setting(device, args.threads, dtype="float32")
        | {"sizes": " ".join(f"{name} {getattr(sizes, name)}" for name in args.workloads.split(","))},
        "summary": found, "bars": bars(found, raced), "plans": [asdict(j) for j in judged],
        "races": [asdict(r) for r in raced],
    }  # fmt: skip
    text = markdown(result, judged, raced)
    print(text)
    save(args.out, f"plan-{device_stem(device, args.threads)}", result, text)
    sys.exit(0 if all(bar["met"] for bar in result["bars"]) else 1)


if __name__ == "__main__":
    main()
