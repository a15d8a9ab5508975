"""From finished runs to their summary: means over seeds, ratios to `full`, a verdict, the rows chosen most often."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low, stdev
from typing import Any

import torch

from rowprop.app.compare.data import Dataset
from rowprop.app.compare.methods import CUT, PRUNED, THINNED, Method
from rowprop.app.compare.runs import PHASES, TASKS, LossShare, Point, Run, Task
from rowprop.app.compare.settings import ADAMW, Settings
from rowprop.app.compare.show import with_spread

GALLERY_ROWS = 40
RARE = 5000
"""Words that make a smaller part of the tokens than one of so many are not in the gallery."""
ENOUGH_SEEDS = 3
"""With fewer seeds no difference is judged."""
CONTROLS = ("random", PRUNED + "random")
SAME_ROWS = 0.1
"""A method that backpropagates up to this share more rows than random has the same keep."""
SLOW = 1.5
"""A run is slow if it takes more than so many times the median of its method's seeds."""
SLOW_NAMED = 3
"""The note on slow runs names no more."""


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
    task = TASKS[data.unit]
    return {
        "finished": finished,
        **judged(methods, seconds=settings.seconds, task=task),
        "environment": where,
        "data": {
            "name": data.name,
            "unit": data.unit,
            "train_rows": len(data.train_y),
            "test_rows": len(data.test_y),
            "row_shape": list(data.train_x.shape[1:]),
            "class_names": list(data.class_names),
        },
        "settings": {
            "model": settings.model_name,
            "batch_rows": min(settings.rows_per_step, len(data.train_y)),
            "keep": settings.keep,
            "mass": settings.mass,
            "epochs": settings.num_epochs,
            "seconds": settings.seconds,
            "optimizer": "AdamW" if settings.model_name in ADAMW else "SGD with momentum",
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
    perplexities = [run.perplexity for run in mine if run.perplexity is not None]
    return {
        "label": method.label,
        "name": method.name,
        "engine": mine[0].engine,
        "seeds": [run.seed for run in mine],
        "accuracy": _over_seeds([run.accuracy for run in mine]),
        "perplexity": _over_seeds(perplexities) if perplexities else None,
        "train_s": _over_seeds([run.train_s for run in mine]),
        "ratio_to_full": _over_seeds(ratios) if ratios else None,
        "rows_seen": fmean(run.rows_seen for run in mine),
        "rows_backpropagated": fmean(run.rows_backpropagated for run in mine),
        "selected": any(point.kept < 1 for run in mine for point in run.curve),
        "phases_s": {phase: fmean(run.phases_s[phase] for run in mine) for phase in PHASES},
    }


def judged(methods: Sequence[dict[str, Any]], *, seconds: float | None, task: Task = TASKS["row"]) -> dict[str, Any]:
    """Return the verdict, and the runs whose time misleads, as entries of ``results.json``."""
    slow = slow_runs(methods)
    return {"verdict": verdict(methods, seconds=seconds, task=task), "slow_runs": slow, "slow_note": slow_note(slow)}


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(methods: Sequence[dict[str, Any]], *, seconds: float | None, task: Task = TASKS["row"]) -> str:
    """Judge the methods against ``random`` and against ``full``, as far as the seeds allow, and name the missing parts.

    A difference of accuracy, or of perplexity, counts if it is larger than the spread of both sides together (the root
    of the sum of their squares). The best method is always named. Fewer than three seeds get no judgement, only their
    means.

    Args:
        methods: The entries ``methods`` of ``results.json``.
        seconds: The budget, training time of each method; None if the budget was epochs.
        task: Says which figure is judged.
    """
    full = next((method for method in methods if method["name"] == "full"), None)
    others = [method for method in methods if method["name"] != "full"]
    if full is None or not others:
        return "There is nothing to compare with: a comparison needs full and one more method."
    selecting = [method for method in others if method["selected"]]
    pairs = [(method, _control(method, others)) for method in selecting if method["name"] not in CONTROLS]
    controlled = [(method, control) for method, control in pairs if control is not None]
    said: list[str] = []
    judge = _Judge(task)
    seeds = min(len(method["seeds"]) for method in (full, *selecting))
    if selecting and seeds < ENOUGH_SEEDS:
        said.append(judge.without_judgement(full, selecting, seeds))
    elif selecting:
        if controlled:
            said.append(judge.against_random(controlled))
        said += judge.against_full(full, selecting) if seconds is None else judge.in_time(seconds, full, selecting)
    if idle := [method["label"] for method in others if not method["selected"]]:
        said.append(f"{_listed(idle)} never selected: every {task.unit} was kept.")
    if selecting and not any(method["name"] in CONTROLS for method in others):
        said.append(
            f"Without random there is no control: how {task.unit}s chosen blindly would have done is not known."
        )
    return " ".join(said)


def _control(method: dict[str, Any], methods: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the method that chooses blindly under the same conditions."""
    pruned = next((other for other in methods if other["name"] == PRUNED + "random"), None)
    if beside := next((other for other in methods if other["label"] == f"random@{method['label']}"), None):
        return beside
    plain = [other for other in methods if other["name"] == "random"]
    plain.sort(key=lambda other: other["label"].removeprefix("random@") in THINNED)  # the last: their keep is not ours
    if pruned is not None and method["name"].startswith(PRUNED):
        return pruned
    # Another engine has the same gradient, but for CUT.
    alike = [other for other in plain if (other["engine"] == CUT) == (method["engine"] == CUT)]
    return next(iter(alike or plain), None)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _time(method: dict[str, Any]) -> str:
    """Training time beside that of full with the same seeds."""
    saved, spread = 1 - method["ratio_to_full"]["mean"], method["ratio_to_full"]["spread"] or 0.0
    if abs(saved) <= spread:
        return f"as much training time within the spread ({1 - saved:.2f} ± {spread:.2f} of it)"
    around = f" ± {100 * spread:.0f}" if spread else ""
    return f"{100 * abs(saved):.0f}{around} % {'less' if saved > 0 else 'more'} training time"


@dataclass(frozen=True)
class _Judge:
    """Sentences about methods, in the words of a task. A gain is positive where the first method is the better one."""

    task: Task

    def without_judgement(self, full: dict[str, Any], others: Sequence[dict[str, Any]], seeds: int) -> str:
        """Tell the means of the best method, of random and of full, without a judgement."""
        named = {method["label"]: method for method in (full, *others) if method["name"] in ("full", "random")}
        best = max((full, *others), key=self._worth)
        means = sorted((named | {best["label"]: best}).values(), key=self._worth, reverse=True)
        told = ", ".join(f"{method['label']} {self.task.shown(self._mean(method))}" for method in means)
        many = "1 seed is" if seeds == 1 else f"{seeds} seeds are"
        first = "highest" if self.task.rises else "lowest"
        return (
            f"{many} too few to judge a difference; use at least {ENOUGH_SEEDS}. Means so far, the {first} first: "
            f"{told}."
        )

    def against_random(self, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> str:
        """Compare the methods with blind choice; methods that backpropagate no more rows than it come first."""

        def more_rows(method: dict[str, Any], control: dict[str, Any]) -> float:
            return method["rows_backpropagated"] / max(1, control["rows_backpropagated"]) - 1

        above = sorted((pair for pair in pairs if self._is_better(*pair)), key=lambda pair: -self._gain(*pair)[0])
        fair = [pair for pair in above if more_rows(*pair) <= SAME_ROWS]
        costly = [pair for pair in above if pair not in fair]
        method, control = (fair or costly or [max(pairs, key=lambda pair: self._gain(*pair)[0])])[0]
        numbers = self._beside(method, control)
        if not above:
            worse = "below" if self.task.rises else "above"
            how = f"Every method is {worse}" if self._is_better(control, method) else "No method beats"
            return (
                f"{how} {control['label']} by more than the spread over the seeds: the best, {method['label']}, has "
                f"{numbers}."
            )
        more = f"with {100 * more_rows(method, control):.0f} % more {self.task.unit}s backpropagated"
        keep = "at the same keep" if fair else more
        said = f"{method['label']} beats {control['label']} {keep} by more than the spread over the seeds: {numbers}."
        if fellows := [other["label"] for other, _ in fair[1:]]:
            said += f" So {'does' if len(fellows) == 1 else 'do'} {_listed(fellows)}."
        if others := [other["label"] for other, _ in (costly if fair else costly[1:])]:
            so = f"so {'does' if len(others) == 1 else 'do'} {_listed(others)}"
            said += f" With more {self.task.unit}s backpropagated, {so}."
        return said

    def against_full(self, full: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
        """Tell the saving of the fastest method that is no worse; then the best method, if it is another."""
        timed = [method for method in others if method["ratio_to_full"]]
        if not timed:
            return []
        best = max((full, *others), key=self._worth)
        as_good = [method for method in timed if not self._is_better(full, method)]
        if as_good:
            named = min(as_good, key=lambda method: method["ratio_to_full"]["mean"])
            article = "an" if self.task.figure[0] in "aeiou" else "a"
            how = f"{article} {self.task.figure} within the spread"
            if self._is_better(named, full):
                how = f"a {'higher' if self.task.rises else 'lower'} {self.task.figure}"
            said = f"Against full, {named['label']} took {_time(named)} at {how}: "
        else:
            named = max(timed, key=self._worth)
            said = (
                f"Against full, every method lost more than the spread; {named['label']} the least, with "
                f"{_time(named)}: "
            )
        told = [f"{said}{self._beside(named, full)}."]
        if best not in (full, named):
            time = f", with {_time(best)}" if best["ratio_to_full"] else ""
            by = " by more than the spread" if self._is_better(best, named) else ""
            told.append(f"The {self.task.best}{by} is {best['label']}: {self._told(best)}{self.task.sign}{time}.")
        return told

    def in_time(self, seconds: float, full: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
        """Tell the best method of those that trained for the same time."""
        best = max(others, key=self._worth)
        difference = self._mean(best) - self._mean(full)
        beyond = "more" if self._gain(best, full)[1] else "no more"
        by = f"{100 * difference:+.2f} points" if self.task.sign else f"{difference:+.{self.task.digits}f}"
        return [
            f"With {seconds:g} s of training each, the {self.task.best} method beside full is {best['label']}: "
            f"{self._beside(best, full)}, {by}, {beyond} than the spread."
        ]

    def _mean(self, method: dict[str, Any]) -> float:
        return method[self.task.figure]["mean"]

    def _worth(self, method: dict[str, Any]) -> float:
        return self._mean(method) if self.task.rises else -self._mean(method)

    def _gain(self, method: dict[str, Any], other: dict[str, Any]) -> tuple[float, bool]:
        """Return the gain, and whether it is larger than the spread of both."""
        gain = self._worth(method) - self._worth(other)
        return gain, abs(gain) > math.hypot(*(each[self.task.figure]["spread"] for each in (method, other)))

    def _is_better(self, method: dict[str, Any], other: dict[str, Any]) -> bool:
        gain, beyond = self._gain(method, other)
        return beyond and gain > 0

    def _told(self, method: dict[str, Any]) -> str:
        return with_spread(method[self.task.figure], self.task.scale, self.task.digits)

    def _beside(self, method: dict[str, Any], other: dict[str, Any]) -> str:
        return f"{self._told(method)} against {self._told(other)}{self.task.sign}"


# --- slow runs --------------------------------------------------------------------------------------------------------


def slow_runs(methods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs that took more than ``SLOW`` times the median of their method's seeds, the worst first.

    Of two seeds, or four, the lower one in the middle counts as the median: two seeds of 3 and 9 s hold a slow run.
    """
    found = [
        {
            "label": method["label"],
            "seed": seed,
            "train_s": time_s,
            "median_s": median_low(method["train_s"]["per_seed"]),
        }
        for method in methods
        for seed, time_s in zip(method["seeds"], method["train_s"]["per_seed"], strict=True)
    ]
    slow = [run for run in found if run["train_s"] > SLOW * run["median_s"]]
    return sorted(slow, key=lambda run: run["train_s"] / run["median_s"], reverse=True)


def slow_note(slow: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence that names the slow runs; None if there are none."""
    if not slow:
        return None
    runs = [
        f"{run['label']} with seed {run['seed']} ({run['train_s']:.1f} s, {run['train_s'] / run['median_s']:.1f} times "
        f"the median of its seeds, {run['median_s']:.1f} s)"
        for run in slow[:SLOW_NAMED]
    ]
    if more := len(slow) - SLOW_NAMED:
        runs += [f"{more} more"] if more > 0 else []
    return f"Slower than {SLOW:g} times the median of their seeds: {_listed(runs)}. Mean times with such a run mislead."


# --- the gallery ------------------------------------------------------------------------------------------------------


def most_chosen(runs: Sequence[Run], data: Dataset) -> list[dict[str, Any]]:
    """Return the training rows that loss-led methods chose most often, all runs together, the hardest first.

    Rows that no step could have chosen are left out. Rows chosen equally often are ordered by their final loss. ``row``
    is the row's place in the data as it came. Where tokens are predicted, the entries are words of the vocabulary
    instead, and words that are rare in the data are left out: their shares would be chance.
    """
    counted = [run for run in runs if run.chosen]
    if not counted:
        return []
    chosen = torch.tensor([run.chosen for run in counted]).sum(0)
    offered = torch.tensor([run.offered for run in counted]).sum(0)
    losses = torch.tensor([run.final_losses for run in counted]).mean(0)
    share = chosen / offered.clamp_min(1)
    least = 1 if data.unit == "row" else max(1, int(offered.sum()) // RARE)
    could_be = [row for row in range(len(share)) if offered[row] >= least]
    order = sorted(could_be, key=lambda row: (-float(share[row]), -float(losses[row])))
    gallery: list[dict[str, Any]] = []
    for row in order[:GALLERY_ROWS]:
        prediction, agreeing = Counter(run.predicted[row] for run in counted).most_common(1)[0]
        gallery.append(
            {
                "row": int(data.train_ids[row]) if data.unit == "row" else row,
                "position": row,
                "class": int(data.train_y[row]) if data.unit == "row" else row,
                "predicted": prediction,
                "runs_agreeing": agreeing,
                "runs": len(counted),
                "chosen": int(chosen[row]),
                "offered": int(offered[row]),
                "loss": round(float(losses[row]), 4),
            }
        )
    return gallery
