"""Finished runs, plain values each, and their summary: means over seeds, ratios to `full`, a verdict, chosen rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from rich.console import Console

from rowprop.app.page import render
from rowprop.app.terminal import new_table
from rowprop.backprop.pick import Unit
from rowprop_lab.data import Dataset
from rowprop_lab.settings import CUT, PLAIN, PRUNED, THINNED, Method, Settings

PHASES: tuple[str, ...] = ("data", "score", "forward", "select", "backward", "optimizer")
SHARE_POINTS = 100
GALLERY_ROWS = 40
ENOUGH_SEEDS = 3  # with fewer seeds no difference is judged
COUNT_EVERY = 7  # steps from one whose FLOPs are counted to the next; odd, to meet both halves of a rhythm of 2
LEVEL = 0.05  # of p, corrected for the number of methods, below which a difference counts
CONTROLS = ("random", PRUNED + "random")
SAME_ROWS = 0.1  # a method that backpropagates up to this share more rows than random has the same keep
PER_ROW = ("tested", "chosen", "offered", "predicted", "final_losses")  # of a run, kept in its own file

Json = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is learnt, and the figure that says how well."""

    unit: Unit  # what has a loss of its own
    figure: str  # a field of a run and of a point
    scale: float  # the figure is shown so many times as large, with ``digits`` decimals and ``sign``
    sign: str
    digits: int
    rises: bool  # with better models
    best: str  # what the best method is called

    def shown(self, value: float) -> str:
        """The figure as people read it."""
        return f"{self.scale * value:.{self.digits}f}{self.sign}"

    def over_seeds(self, method: Mapping[str, Any]) -> str:
        """The figure of a method of ``results.json``, without its sign: mean ± spread."""
        return with_spread(method[self.figure], self.scale, self.digits)

    @property
    def title(self) -> str:
        """The figure and its sign, as the name of a column or of an axis."""
        return f"{self.figure}, %" if self.sign else self.figure


def with_spread(value: Mapping[str, Any], scale: float, digits: int) -> str:
    """Text "mean ± spread", or the mean alone for one seed, which has no spread."""
    mean = f"{scale * value['mean']:.{digits}f}"
    return mean if value["spread"] is None else f"{mean} ± {scale * value['spread']:.{digits}f}"


TASKS: dict[Unit, Task] = {
    "row": Task("row", "accuracy", 100.0, " %", 2, rises=True, best="most accurate"),
    "token": Task("token", "perplexity", 1.0, "", 1, rises=False, best="best"),
}


def task_of(results: Mapping[str, Any]) -> Task:
    """The task of the content of ``results.json``; earlier versions named no unit: they had rows alone."""
    return TASKS[results["data"].get("unit", "row")]


@dataclass(frozen=True)
class Point:
    """The state of a run at the end of an epoch."""

    epoch: float  # passes over the training rows; a fraction if a budget of seconds ended inside an epoch
    train_s: float  # training time so far, evaluation left out
    accuracy: float  # fraction of test rows, or of their tokens, that are predicted rightly
    loss: float  # mean training loss over all rows of the epoch's batches, kept or not
    kept: float  # fraction of all rows of the epoch, also those without a forward, that were backpropagated
    perplexity: float | None = None  # the exponential of the test tokens' mean loss; None if rows have classes


@dataclass(frozen=True)
class LossShare:
    """How much of the training loss the hardest rows hold: ``share[i]`` belongs to the hardest ``i`` percent."""

    epoch: float
    share: list[float]


@dataclass
class Run:
    """The values of one finished run. Where tokens are predicted, the rows below are the tokens that count.

    ``phases_s``: ``score`` holds separate scoring forwards, and the training of models that only score; a forward of
    ``sliced``, which scores as well, stands under ``forward``. ``tested`` is of each test row. The last four are of
    each training row, and empty for tokens and for a method that is not ``loss_led``.
    """

    label: str  # the method as written
    engine: str  # the one that really ran, plain for an ordinary loop
    seed: int  # of model, order and selection
    accuracy: float = 0.0
    perplexity: float | None = None
    train_s: float = 0.0  # the sum of phases_s
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0  # of the optimizer
    rows_seen: int = 0  # that went through a forward for training, without those of models that only score
    rows_backpropagated: int = 0  # whose gradient was asked for; where they are thinned, on average over the blocks
    flops: float | None = None  # of all steps, by the mean of those that were counted; None if none was
    uncounted: list[str] = field(default_factory=list[str])  # ops in them that no formula counts
    tested: list[float] = field(default_factory=list[float])  # 1 if it is predicted rightly, else 0; tokens: minus loss
    curve: list[Point] = field(default_factory=list[Point])  # one per epoch
    loss_shares: list[LossShare] = field(default_factory=list[LossShare])  # after the first epoch, half-way, at the end
    chosen: list[int] = field(default_factory=list[int])  # how often a selecting step chose the row
    offered: list[int] = field(default_factory=list[int])  # how often one could have
    predicted: list[int] = field(default_factory=list[int])
    final_losses: list[float] = field(default_factory=list[float])

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Run:
        """Rebuild a run from its JSON."""
        curve = [Point(**point) for point in content["curve"]]
        shares = [LossShare(**share) for share in content["loss_shares"]]
        given: Json = {**content, "curve": curve, "loss_shares": shares}
        return cls(**given)


def _over_seeds(values: Sequence[float]) -> Json:
    """Mean, sample standard deviation (None for one seed) and the values."""
    return {"mean": fmean(values), "spread": stdev(values) if len(values) > 1 else None, "per_seed": list(values)}


def summarise(settings: Settings, where: Json, data: Dataset, runs: Sequence[Run], *, finished: bool) -> Json:
    """The content of ``results.json``: conditions, one entry per method, every run's curve, the hardest rows."""
    by_method = {method: [run for run in runs if run.label == method.label] for method in settings.parsed_methods}
    full = {run.seed: run for run in runs if run.label == "full"}
    methods = [_summarise_method(method, mine, full) for method, mine in by_method.items() if mine]
    tested = {run.label: {each.seed: each.tested for each in runs if each.label == run.label} for run in runs}
    for method in methods:
        others = (label for label in tested if label != method["label"])
        method["against"] = {other: paired(tested[method["label"]], tested[other]) for other in others}
    return {
        "finished": finished,
        "verdict": verdict(methods, seconds=settings.seconds, task=TASKS[data.unit]),
        "environment": where,
        "data": {
            "name": data.name, "unit": data.unit, "train_rows": len(data.train_y), "test_rows": len(data.test_y),
            "row_shape": list(data.train_x.shape[1:]), "class_names": list(data.class_names),
        },
        "settings": {
            "model": settings.model, "batch_rows": min(settings.batch_rows, len(data.train_y)),
            "keep": settings.keep, "epochs": settings.epochs, "seconds": settings.seconds,
            "optimizer": settings.optimizer, "peak_lr": settings.lr, "seeds": settings.seeds,
        },
        "methods": methods,
        "runs": [{key: value for key, value in asdict(run).items() if key not in PER_ROW} for run in runs],
        "most_chosen": most_chosen(runs, data),
    }  # fmt: skip


def _summarise_method(method: Method, mine: Sequence[Run], full: Mapping[int, Run]) -> Json:
    ratios = [run.train_s / full[run.seed].train_s for run in mine if run.seed in full]
    counts = [(run.flops, other.flops) for run in mine if (other := full.get(run.seed))]
    flops = [run.flops for run in mine if run.flops]
    flop_ratios = [own / others for own, others in counts if own and others]
    perplexities = [run.perplexity for run in mine if run.perplexity is not None]
    return {
        "label": method.label, "name": method.name, "engine": mine[0].engine, "seeds": [run.seed for run in mine],
        "accuracy": _over_seeds([run.accuracy for run in mine]),
        "perplexity": _over_seeds(perplexities) if perplexities else None,
        "train_s": _over_seeds([run.train_s for run in mine]),
        "ratio_to_full": _over_seeds(ratios) if ratios else None,
        "flops": _over_seeds(flops) if flops else None,
        "flops_to_full": _over_seeds(flop_ratios) if flop_ratios else None,
        "uncounted": sorted({op for run in mine for op in run.uncounted}),
        "rows_seen": fmean(run.rows_seen for run in mine),
        "rows_backpropagated": fmean(run.rows_backpropagated for run in mine),
        "selected": any(point.kept < 1 for run in mine for point in run.curve),
        "phases_s": {phase: fmean(run.phases_s[phase] for run in mine) for phase in PHASES},
    }  # fmt: skip


def paired(mine: Mapping[int, Sequence[float]], others: Mapping[int, Sequence[float]]) -> Json:
    """A paired t test of one method beside another, by the values of each test row (larger is better) by seed.

    The variance of the mean difference is the sum of two: over the rows, each with its mean over the seeds, and over
    the seeds, each with its mean over the rows. Each counts by its own degrees of freedom, and p is the mean of the two
    p, weighed by these variances. Noise of a single row in a single seed is in both, so p is rather too large.

    Returns:
        The mean difference ``gain``; ``p``, two-sided and not corrected, None where fewer than two seeds have both;
        ``rows``: how many test rows. With one value for each seed the test is over the seeds alone.
    """
    from scipy.special import stdtr

    seeds = sorted({*mine} & {*others})
    if len(seeds) < 2:
        return {"gain": None, "p": None, "rows": 0}
    apart = np.array([mine[seed] for seed in seeds]) - np.array([others[seed] for seed in seeds])
    gain, rows = float(apart.mean()), apart.shape[1]
    over_rows = apart.mean(0).var(ddof=1) / rows if rows > 1 else 0.0
    over_seeds = apart.mean(1).var(ddof=1) / len(seeds)
    both = over_rows + over_seeds
    if both == 0:
        return {"gain": gain, "p": float(gain == 0), "rows": rows}
    t = -abs(gain) / math.sqrt(both)
    tails = over_rows * stdtr(max(1, rows - 1), t) + over_seeds * stdtr(len(seeds) - 1, t)
    return {"gain": gain, "p": float(2 * tails / both), "rows": rows}


def verdict(methods: Sequence[Json], *, seconds: float | None, task: Task = TASKS["row"]) -> str:
    """Judge the methods against ``random`` and ``full``, as far as the seeds allow, by the figure of ``task``.

    A difference counts if :func:`paired` has a p below LEVEL over the number of methods that choose. The best method is
    always named, and what is missing. Times that vary over the seeds more than they differ from full's are not
    compared. Fewer than three seeds get no judgement, only their means. ``methods`` are those of ``results.json``;
    ``seconds`` is the budget, None if it was epochs.
    """
    full = next((method for method in methods if method["name"] == "full"), None)
    others = [method for method in methods if method["name"] != "full"]
    found: Json = {"task": task, "seconds": seconds, "enough": ENOUGH_SEEDS, "full": full, "others": others}
    if full is not None and others:
        plain = {method["label"].removeprefix(f"{PLAIN}@"): method for method in others if method["name"] == PLAIN}
        others = [method for method in others if method["name"] != PLAIN]
        selecting = [method for method in others if method["selected"]]
        judge = _Judge(task, full, len(selecting))
        seeds = min(len(method["seeds"]) for method in (full, *selecting, *plain.values()))
        judged = selecting if seeds >= ENOUGH_SEEDS else []
        found |= {
            "selecting": selecting, "seeds": seeds, "judge": judge, "level": LEVEL, "judged": judged,
            "untimed": [method["label"] for method in others if seconds is None and not _is_timed(method)],
            "means": judge.means([*selecting, *plain.values()]),
            "plain": judge.against_plain(judged, plain), "random": judge.against_random(judged, others),
            "against_full": judge.against_full(judged) if judged and seconds is None else None,
            "in_time": judge.in_time(judged) if judged and seconds is not None else None,
            "idle": [method["label"] for method in others if not method["selected"]],
            "has_plain": bool(plain) or seconds is not None,
            "has_control": any(method["name"] in CONTROLS for method in others),
        }  # fmt: skip
    return " ".join(render("verdict.txt.j2", Path(__file__).parent, **found).split())


@dataclass(frozen=True)
class _Judge:
    """Judgements by the figure of a task; a gain is positive where the first method is the better one."""

    task: Task
    full: Json
    count: int  # of the methods that are judged

    def worth(self, method: Json) -> float:
        """The figure of a method, so that more is better."""
        mean: float = method[self.task.figure]["mean"]
        return mean if self.task.rises else -mean

    def gain(self, method: Json, other: Json) -> float:
        return self.worth(method) - self.worth(other)

    def p(self, method: Json, other: Json) -> float:
        """Of their difference, corrected for the number of methods."""
        return min(1.0, self.count * method["against"][other["label"]]["p"])

    def is_better(self, method: Json, other: Json) -> bool:
        return method is not other and method["against"][other["label"]]["gain"] > 0 and self.p(method, other) < LEVEL

    def means(self, others: Sequence[Json]) -> list[Json]:
        """Full, random and the best method, the best first."""
        best = max((self.full, *others), key=self.worth)
        named = {method["label"]: method for method in (self.full, *others) if method["name"] in ("full", "random")}
        return sorted((named | {best["label"]: best}).values(), key=self.worth, reverse=True)

    def against_plain(self, selecting: Sequence[Json], plain: Mapping[str, Json]) -> list[Json]:
        """Each method beside plain steps at its cost."""
        pairs = [(method, plain[method["label"]]) for method in selecting if method["label"] in plain]
        return [
            {
                "method": method, "control": control, "better": self.gain(method, control) > 0,
                "differs": self.is_better(method, control) or self.is_better(control, method),
            }
            for method, control in pairs
        ]  # fmt: skip

    def against_random(self, selecting: Sequence[Json], methods: Sequence[Json]) -> Json | None:
        """Compare the methods with blind choice; methods that backpropagate no more rows than it come first."""
        candidates = [(method, control_of(method, methods)) for method in selecting if method["name"] not in CONTROLS]
        pairs = [(method, control) for method, control in candidates if control is not None]
        if not pairs:
            return None
        above = sorted((pair for pair in pairs if self.is_better(*pair)), key=lambda pair: -self.gain(*pair))
        fair = [pair for pair in above if _more_rows(*pair) <= SAME_ROWS]
        costly = [pair for pair in above if pair not in fair]
        method, control = (fair or costly or [max(pairs, key=lambda pair: self.gain(*pair))])[0]
        return {
            "method": method, "control": control, "beaten": bool(above), "worse": self.is_better(control, method),
            "more_rows": None if fair else _more_rows(method, control),
            "fellows": [other["label"] for other, _ in fair[1:]],
            "costly": [other["label"] for other, _ in (costly if fair else costly[1:])],
        }  # fmt: skip

    def against_full(self, selecting: Sequence[Json]) -> Json | None:
        """Name the fastest method that is no worse than full, and the best one if it is another."""
        timed = [method for method in selecting if method["ratio_to_full"]]
        if not timed:
            return None
        as_good = [method for method in timed if not self.is_better(self.full, method)]
        if as_good:
            named = min(as_good, key=lambda method: method["ratio_to_full"]["mean"])
        else:
            named = max(timed, key=self.worth)
        best = max((self.full, *selecting), key=self.worth)
        return {
            "method": named, "lost": not as_good, "better": self.is_better(named, self.full),
            "best": None if best in (self.full, named) else best, "best_differs": self.is_better(best, named),
        }  # fmt: skip

    def in_time(self, selecting: Sequence[Json]) -> Json:
        """Name the best method of those that trained for the same time."""
        best = max(selecting, key=self.worth)
        difference = best[self.task.figure]["mean"] - self.full[self.task.figure]["mean"]
        differs = self.is_better(best, self.full) or self.is_better(self.full, best)
        return {"method": best, "difference": difference, "differs": differs}


def _is_timed(method: Json) -> bool:
    """Whether its time differs from full's by more than the ratio of both varies over the seeds."""
    ratio = method["ratio_to_full"]
    return not ratio or ratio["spread"] is None or abs(1 - ratio["mean"]) > ratio["spread"]


def _more_rows(method: Json, control: Json) -> float:
    return method["rows_backpropagated"] / max(1, control["rows_backpropagated"]) - 1


def control_of(method: Json, methods: Sequence[Json]) -> Json | None:
    """The method that chooses blindly under the same conditions."""
    beside = f"random@{method['label']}"
    blind = [other for other in methods if other["name"] == "random"]
    if method["name"].startswith(PRUNED):
        blind = [other for other in methods if other["name"] == PRUNED + "random"] or blind

    def suits(other: Json) -> tuple[bool, bool, bool]:
        # Another engine has the same gradient, but for CUT. The keep of a random beside another method is not ours.
        same_gradient = (other["engine"] == CUT) == (method["engine"] == CUT)
        return other["label"] == beside, same_gradient, not other["label"].endswith(f"@{THINNED}")

    return max(blind, key=suits, default=None)


def most_chosen(runs: Sequence[Run], data: Dataset) -> list[Json]:
    """The training rows that loss-led methods could and did choose most often, then by their final loss."""
    counted = [run for run in runs if run.chosen]
    if not counted:
        return []
    chosen = torch.tensor([run.chosen for run in counted]).sum(0)
    offered = torch.tensor([run.offered for run in counted]).sum(0)
    losses = torch.tensor([run.final_losses for run in counted]).mean(0)
    share = chosen / offered.clamp_min(1)
    could_be = [row for row in range(len(share)) if offered[row]]
    order = sorted(could_be, key=lambda row: (-float(share[row]), -float(losses[row])))
    gallery: list[Json] = []
    for row in order[:GALLERY_ROWS]:
        prediction, agreeing = Counter(run.predicted[row] for run in counted).most_common(1)[0]
        gallery.append({
            "row": int(data.train_ids[row]), "position": row, "class": int(data.train_y[row]),
            "predicted": prediction, "runs_agreeing": agreeing, "runs": len(counted),
            "chosen": int(chosen[row]), "offered": int(offered[row]), "loss": round(float(losses[row]), 4),
        })  # fmt: skip
    return gallery


def show_comparison(console: Console, results: Json) -> None:
    """Print the methods' table, where the time went, and the verdict."""
    methods: list[Json] = results["methods"]
    task = task_of(results)
    columns = (
        "method",
        "engine",
        task.title,
        "training, s",
        "x full",
        "FLOPs, x full",
        f"{task.unit}s seen",
        "kept of seen",
    )
    rows = [
        (
            method["label"], method["engine"], task.over_seeds(method), with_spread(method["train_s"], 1, 1),
            with_spread(method["ratio_to_full"], 1, 2) if method["ratio_to_full"] else "-",
            f"{method['flops_to_full']['mean']:.2f}" if method["flops_to_full"] else "-",
            f"{method['rows_seen']:,.0f}", f"{100 * method['rows_backpropagated'] / method['rows_seen']:.0f} %",
        )
        for method in methods
    ]  # fmt: skip
    console.print(new_table("Methods side by side", columns, rows, words=2))
    times = [(method["label"], *(f"{method['phases_s'][phase]:.2f}" for phase in PHASES)) for method in methods]
    console.print(new_table("Where the time went, seconds per run", ("method", *PHASES), times))
    console.print(results["verdict"], markup=False, highlight=False)
