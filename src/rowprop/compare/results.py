"""From finished runs to what is told about them: means over seeds, ratios to `full`, the rows chosen most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import torch

from rowprop.compare.data import Dataset
from rowprop.compare.methods import Method
from rowprop.compare.settings import Settings
from rowprop.compare.train import PHASES, LossShare, Point, Run

GALLERY_ROWS = 40


def _over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for one seed) and the values themselves."""
    return {"mean": fmean(values), "spread": stdev(values) if len(values) > 1 else None, "per_seed": list(values)}


def summarise(
    settings: Settings, where: dict[str, Any], data: Dataset, runs: Sequence[Run], *, finished: bool
) -> dict[str, Any]:
    """Return the content of ``results.json``: conditions, one entry per method, every run's curve, the hardest rows."""
    methods = [
        summary
        for method in settings.parsed_methods
        if (summary := _summarise_method(method, [run for run in runs if run.label == method.label], runs)) is not None
    ]
    return {
        "finished": finished,
        "verdict": verdict(methods, seconds=settings.seconds),
        "environment": where,
        "data": {
            "name": data.name,
            "train_rows": len(data.train_y),
            "test_rows": len(data.test_y),
            "row_shape": list(data.train_x.shape[1:]),
            "class_names": list(data.class_names),
        },
        "settings": {
            "model": settings.model_name,
            "batch_rows": min(settings.batch_rows, len(data.train_y)),
            "keep": settings.keep,
            "mass": settings.mass,
            "epochs": settings.num_epochs,
            "seconds": settings.seconds,
            "peak_lr": settings.peak_lr,
            "seeds": settings.seeds,
            "engine": settings.engine,
        },
        "methods": methods,
        "runs": [_run_summary(run) for run in runs],
        "most_chosen": most_chosen(runs, data),
    }


def _run_summary(run: Run) -> dict[str, Any]:
    per_row = ("chosen", "offered", "predicted", "final_losses")  # kept in the run's own file
    content = {key: value for key, value in vars(run).items() if key not in per_row}
    points: list[Point] = run.curve
    shares: list[LossShare] = run.loss_shares
    return content | {"curve": [vars(point) for point in points], "loss_shares": [vars(share) for share in shares]}


def _summarise_method(method: Method, mine: Sequence[Run], runs: Sequence[Run]) -> dict[str, Any] | None:
    if not mine:
        return None
    full_s = {run.seed: run.train_s for run in runs if run.label == "full"}
    ratios = [run.train_s / full_s[run.seed] for run in mine if run.seed in full_s]
    return {
        "label": method.label,
        "name": method.name,
        "engine": mine[0].engine,
        "seeds": [run.seed for run in mine],
        "accuracy": _over_seeds([run.accuracy for run in mine]),
        "train_s": _over_seeds([run.train_s for run in mine]),
        "ratio_to_full": _over_seeds(ratios) if ratios else None,
        "rows_seen": fmean(run.rows_seen for run in mine),
        "rows_backpropagated": fmean(run.rows_backpropagated for run in mine),
        "selected": any(point.kept < 1 for run in mine for point in run.curve),
        "phases_s": {phase: fmean(run.phases_s[phase] for run in mine) for phase in PHASES},
    }


def verdict(methods: Sequence[dict[str, Any]], *, seconds: float | None) -> str:
    """Say in one sentence what the comparison shows, and no more than the seeds carry; then what it lacks."""
    full = next((method for method in methods if method["name"] == "full"), None)
    others = [method for method in methods if method["name"] != "full"]
    if full is None or not others:
        return "There is nothing to compare with: a comparison needs full and one more method."
    selecting = [method for method in others if method["selected"]]
    said = [_judged(full, selecting, seconds)] if selecting else []
    idle = [method["label"] for method in others if not method["selected"]]
    if idle:
        said.append(f"{', '.join(idle)} never selected: every row was kept.")
    if selecting and not any(method["name"] in ("random", "infobatch+random") for method in others):
        said.append("Without random there is no control: how rows chosen blindly would have done is not known.")
    return " ".join(said)


def _judged(full: dict[str, Any], others: Sequence[dict[str, Any]], seconds: float | None) -> str:
    """One sentence on the methods that selected."""
    spread = full["accuracy"]["spread"]
    if spread is None or any(method["accuracy"]["spread"] is None for method in others):
        return "One seed has no spread, so no difference in accuracy can be judged; use at least three seeds."
    floor = full["accuracy"]["mean"] - spread
    within = [method for method in others if method["accuracy"]["mean"] >= floor and method["ratio_to_full"]]
    if seconds is not None:
        best = max(others, key=lambda method: method["accuracy"]["mean"])
        gain = 100 * (best["accuracy"]["mean"] - full["accuracy"]["mean"])
        judged = "more than" if abs(gain) > 100 * spread else "no more than"
        return (
            f"With {seconds:g} s of training each, the best other method is {best['label']}: {gain:+.2f} points "
            f"against full, {judged} full's spread over the seeds ({100 * spread:.2f})."
        )
    if not within:
        return f"No method stayed within full's spread over the seeds ({100 * spread:.2f} points)."
    best = min(within, key=lambda method: method["ratio_to_full"]["mean"])
    saved = 100 * (1 - best["ratio_to_full"]["mean"])
    time = f"{saved:.0f} % less training time" if saved >= 0 else f"{-saved:.0f} % more training time"
    above = best["accuracy"]["mean"] > full["accuracy"]["mean"] + spread
    return (
        f"{best['label']} took {time} than full at an accuracy {'above' if above else 'within'} full's spread over the "
        "seeds: "
        f"{100 * best['accuracy']['mean']:.2f} against {100 * full['accuracy']['mean']:.2f} ± {100 * spread:.2f} %."
    )


def most_chosen(runs: Sequence[Run], data: Dataset) -> list[dict[str, Any]]:
    """Return the training rows that loss-led methods chose most often, all runs together, the hardest first.

    Rows that no step could have chosen are left out. Rows chosen equally often are ordered by their final loss. ``row``
    is the row's place in the data as it came.
    """
    counted = [run for run in runs if run.chosen]
    if not counted:
        return []
    chosen = torch.tensor([run.chosen for run in counted]).sum(0)
    offered = torch.tensor([run.offered for run in counted]).sum(0)
    losses = torch.tensor([run.final_losses for run in counted]).mean(0)
    share = chosen / offered.clamp_min(1)
    could_be = [row for row in range(len(share)) if offered[row] > 0]
    order = sorted(could_be, key=lambda row: (-float(share[row]), -float(losses[row])))
    gallery: list[dict[str, Any]] = []
    for row in order[:GALLERY_ROWS]:
        prediction, agreeing = Counter(run.predicted[row] for run in counted).most_common(1)[0]
        gallery.append(
            {
                "row": int(data.train_ids[row]),
                "position": row,
                "class": int(data.train_y[row]),
                "predicted": prediction,
                "runs_agreeing": agreeing,
                "runs": len(counted),
                "chosen": int(chosen[row]),
                "offered": int(offered[row]),
                "loss": round(float(losses[row]), 4),
            }
        )
    return gallery
