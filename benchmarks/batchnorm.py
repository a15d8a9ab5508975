"""Training BatchNorm under a selection: what each way of treating it does to gradients, statistics and accuracy.

BatchNorm's exact backward mixes rows: even where only K of N rows have a gradient, all N receive one from it. Each way
below, but ``exact``, pays for K rows instead. All are trained on Fashion-MNIST with the small ResNet of `rowprop
compare`, from the same start and with the same order of rows for each seed, under a one-cycle rate that decays to zero.

* Gradients: at points of the run trained with exact gradients, the cosine of each way's gradient with the exact one
  on the same batches and rows, and the norm of their difference over the exact one's. "Mean gradient" averages the
  gradients of the batches first: what is left there is bias, not noise.
* Stale: how far the running statistics are from those that the weights at that moment give on the training rows.
  Away: how far they are from those of the run trained with exact gradients. Both are the root mean square error of
  x-hat, in standard deviations, that one pair of statistics makes in the place of the other, over all channels.
* Accuracy: on the test rows, with the running statistics, at the short point and after the decayed schedule.
  Refreshed: with statistics taken anew from training rows, so that only the weights differ.

``exact, other order`` is the exact gradient with the training rows in another order: what differs from ``exact`` by
that much is noise.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import rowprop
from bench_step import RESULTS, setting
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.registry import RULES
from rowprop.engines import Engine, Recompute, Sliced
from rowprop.errors import InvalidInput
from rowprop.files import write_whole
from rowprop_lab.data import Dataset, load_data
from rowprop_lab.folder import to_json
from rowprop_lab.models import build_model
from rowprop_lab.train import judge, learning_rate, losses_of

BATCHNORM = torch.ops.aten.native_batch_norm_backward.default
Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]  # mean and variance of every channel


# --- the ways --------------------------------------------------------------------------------------------------------


def plain_kernel(
    op: Any,
    g: Any,
    input: Any,
    weight: Any,
    _m: Any,
    _v: Any,
    mean: Any,
    invstd: Any,
    train: bool,
    eps: float,
    mask: Any,
) -> Any:
    """The ordinary kernel on the kept rows, told the mean and deviation of the full batch."""
    assert type(g) is RowSlice and g.dim == 0 and train
    dx, dw, db = op(g.values, g.take(input), weight, None, None, mean, invstd, True, eps, mask)
    return (g.like(dx) if mask[0] else None), dw, db


def frozen_statistics(
    op: Any,
    g: Any,
    input: Any,
    weight: Any,
    _m: Any,
    _v: Any,
    mean: Any,
    invstd: Any,
    train: bool,
    eps: float,
    mask: Any,
) -> Any:
    """The kernel of evaluation mode: the full batch's mean and deviation are constants to the gradient."""
    assert type(g) is RowSlice and g.dim == 0 and train
    var = invstd.pow(-2) - eps
    dx, dw, db = op(g.values, g.take(input), weight, mean, var, None, None, False, eps, mask)
    return (g.like(dx) if mask[0] else None), dw, db


@dataclass(frozen=True)
class Way:
    """One way to treat training BatchNorm; ``rule`` stands in for the package's own while a backward runs."""

    about: str
    engine: Engine = Sliced(batchnorm="rows")  # noqa: RUF009
    rule: Callable[..., Any] | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the rule in its place; a block in which it never ran measured something else, and says so."""
        if self.rule is None:
            yield
            return
        own, rule, calls = RULES[BATCHNORM].run, self.rule, 0

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return rule(*args)

        RULES[BATCHNORM].run = counted
        try:
            yield
        finally:
            RULES[BATCHNORM].run = own
        assert calls, "no BatchNorm met the rule"

    def backward(
        self, model: nn.Module, selector: rowprop.selection.Selector, batch: Batch, draw: torch.Generator
    ) -> Tensor:
        """Add the gradient of the kept rows' mean loss to the parameters; returns which rows they were."""
        selective = rowprop.SelectiveBackprop(model, losses_of, selector, engine=self.engine, generator=draw)
        loss, record = selective(batch)
        with self.applied():
            loss.backward()
        return record.selection.rows


WAYS = {
    "exact": Way("the gradient of the kept losses through the full batch's statistics", Sliced(batchnorm="exact")),
    "projected": Way("full batch's statistics; components along 1 and x-hat removed over the kept rows"),
    "plain kernel": Way("full batch's statistics; the ordinary kernel on the kept rows", rule=plain_kernel),
    "frozen": Way("full batch's statistics, constants to the gradient", rule=frozen_statistics),
    "recompute": Way("a second forward: statistics of the kept rows", Recompute()),
}
REORDERED = "exact, other order"


# --- gradients -------------------------------------------------------------------------------------------------------


def gradient(way: Way, model: nn.Module, selector: rowprop.selection.Selector, batch: Batch, seed: int) -> Gradients:
    """The parameters' gradients, on a copy of the model."""
    twin = copy.deepcopy(model)
    way.backward(twin, selector, batch, torch.Generator().manual_seed(seed))
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def flat(gradients: Gradients) -> Tensor:
    """All of them as one vector, float64."""
    return torch.cat([g.flatten() for g in gradients.values()]).double()


def cosine(a: Tensor, b: Tensor) -> float:
    """Of two gradients."""
    return float(torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def off(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over the norm of ``b``."""
    return float((a - b).norm() / b.norm())


def compare_gradients(
    model: nn.Module, selector: rowprop.selection.Selector, batches: Sequence[Batch]
) -> dict[str, Any]:
    """For each way but ``exact`` how its gradients compare, over these batches."""
    exact = [gradient(WAYS["exact"], model, selector, batch, seed) for seed, batch in enumerate(batches)]
    truth = [flat(g) for g in exact]
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        if name == "exact":
            continue
        those = [gradient(way, model, selector, batch, seed) for seed, batch in enumerate(batches)]
        vectors = [flat(g) for g in those]
        mean, mean_truth = torch.stack(vectors).mean(0), torch.stack(truth).mean(0)
        found[name] = {
            "cosine": statistics.fmean(map(cosine, vectors, truth)),
            "error": statistics.fmean(map(off, vectors, truth)),
            "cosine_of_mean": cosine(mean, mean_truth),
            "error_of_mean": off(mean, mean_truth),
            "layers": {
                layer: statistics.fmean(cosine(a[layer], b[layer]) for a, b in zip(those, exact, strict=True))
                for layer, parameter in model.named_parameters()
                if parameter.dim() > 1
            },
        }
    return found


# --- statistics ------------------------------------------------------------------------------------------------------


def norms(model: nn.Module) -> list[_BatchNorm]:
    """Its BatchNorms."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def running(model: nn.Module) -> Pair:
    """The running statistics of every channel."""
    layers = norms(model)
    mean, var = ([getattr(n, f"running_{part}") for n in layers] for part in ("mean", "var"))
    return torch.cat(mean).clone(), torch.cat(var).clone()


def refreshed(model: nn.Module, images: Tensor, batch_rows: int) -> nn.Module:
    """A copy whose running statistics are what they would be, had the weights been these all along."""
    twin = copy.deepcopy(model).train()
    for norm in norms(twin):
        norm.reset_running_stats()
        norm.momentum = None  # torch's name for a plain average
    with torch.no_grad():
        for part in images.split(batch_rows):
            twin(part)
    return twin


def distance(used: Pair, true: Pair, eps: float = 1e-5) -> float:
    """Root mean square error of x-hat from ``used`` in the place of ``true``, in standard deviations."""
    (mean, var), (true_mean, true_var) = used, true
    std, true_std = (var + eps).sqrt(), (true_var + eps).sqrt()
    squares = (true_std / std - 1).square() + ((true_mean - mean) / std).square()
    return float(squares.mean().sqrt())


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How much is trained; `short` is in steps, `points` in fractions of the training."""

    train_rows: int = 8_000
    test_rows: int = 10_000
    epochs: int = 4
    batch_rows: int = 128
    peak_lr: float = 0.1
    short: int = 100
    points: tuple[float, ...] = (0, 0.25, 0.5, 1)
    batches: int = 8  # for each comparison of gradients
    selections: tuple[str, ...] = ("top-k 0.5", "top-k 0.25", "random 0.5", "random 0.25")

    @property
    def steps(self) -> int:
        """Of a whole run."""
        return self.train_rows // self.batch_rows * self.epochs


QUICK = Size(train_rows=1_000, test_rows=1_000, epochs=2, short=7, points=(0, 1), batches=2, selections=("top-k 0.25",))


def selector_named(text: str) -> rowprop.selection.Selector:
    """``top-k 0.5`` or ``random 0.5``."""
    name, _, keep = text.partition(" ")
    return {"top-k": rowprop.TopK, "random": rowprop.RandomRows}[name](float(keep))


@dataclass
class State:
    """A run at the short point, or at its end."""

    accuracy: float
    accuracy_refreshed: float
    stale: float
    weight_norm: float
    statistics: Pair


def look(model: nn.Module, data: Dataset, size: Size) -> State:
    """Take the state, without a trace."""
    kept = running(model)
    fresh = refreshed(model, data.train_x[: 20 * size.batch_rows], size.batch_rows)
    weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() == 4])
    return State(
        accuracy(model, data), accuracy(fresh, data), distance(kept, running(fresh)), float(weights.norm()), kept
    )


def accuracy(model: nn.Module, data: Dataset) -> float:
    """On the test rows, with the running statistics."""
    _, predicted = judge(model, data.test_x, data.test_y)
    return float((predicted == data.test_y).double().mean())


def train(
    way: Way | None,
    selection: str,
    data: Dataset,
    size: Size,
    seed: int,
    order_seed: int | None = None,
    at_point: Callable[[float, nn.Module], None] | None = None,
) -> dict[str, State]:
    """Train once and return its states, ``short`` and ``end``; without a way, with all rows of each batch.

    A run whose loss stops being finite has only the states before.
    """
    torch.manual_seed(seed)
    model = build_model("resnet", len(data.class_names), data.train_x.shape[1]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=size.peak_lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    selector = selector_named(selection)
    draw = torch.Generator().manual_seed(2**31 + seed)
    order = torch.Generator().manual_seed(seed if order_seed is None else order_seed)
    points = {round(part * size.steps): part for part in size.points}
    states: dict[str, State] = {}
    step = 0
    for _ in range(size.epochs):
        shuffled = torch.randperm(len(data.train_y), generator=order)
        for rows in shuffled.split(size.batch_rows)[: len(shuffled) // size.batch_rows]:
            if at_point is not None and step in points:
                at_point(points[step], model)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step / size.steps, size.peak_lr)
            batch = data.train_x[rows], data.train_y[rows]
            if way is None:
                losses_of(model, batch).mean().backward()
            else:
                try:
                    way.backward(model, selector, batch, draw)
                except InvalidInput:  # how a loss that is not finite is refused
                    return states
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == size.short:
                states["short"] = look(model, data, size)
    if at_point is not None and step in points:
        at_point(points[step], model)
    states["end"] = look(model, data, size)
    return states


def study(data: Dataset, size: Size, seed: int) -> dict[str, Any]:
    """Every run of one seed, and the gradients compared along its exact ones."""
    runs: list[dict[str, Any]] = []
    gradients: list[dict[str, Any]] = []

    def add(selection: str, way: str, states: dict[str, State], exact: dict[str, State] | None) -> None:
        for at in ("short", "end"):
            entry: dict[str, Any] = {"seed": seed, "selection": selection, "way": way, "at": at}
            entry["diverged"] = at not in states or not math.isfinite(states[at].stale)
            if not entry["diverged"]:
                entry |= asdict(states[at])
                own = entry.pop("statistics")
                if exact is not None:
                    entry["away"] = distance(own, exact[at].statistics)
            runs.append(entry)
        ended = f"{100 * states['end'].accuracy:.2f} %" if "end" in states else "diverged"
        print(f"seed {seed}, {selection}, {way}: {ended}", flush=True)

    def compared(selection: str) -> Callable[[float, nn.Module], None]:
        picked = torch.randperm(len(data.train_y), generator=torch.Generator().manual_seed(10_000 + seed))
        batches = [
            (data.train_x[rows], data.train_y[rows])
            for rows in picked.split(size.batch_rows)[: size.batches]
        ]  # fmt: skip

        def at_point(part: float, model: nn.Module) -> None:
            found = compare_gradients(model, selector_named(selection), batches)
            gradients.extend(
                {"seed": seed, "selection": selection, "way": w, "at": part, **f} for w, f in found.items()
            )

        return at_point

    add("all rows", "plain training", train(None, size.selections[0], data, size, seed), None)
    for selection in size.selections:
        exact = train(WAYS["exact"], selection, data, size, seed, at_point=compared(selection))
        add(selection, "exact", exact, None)
        again = train(WAYS["exact"], selection, data, size, seed, order_seed=20_000 + seed)
        add(selection, REORDERED, again, exact)
        for name, way in WAYS.items():
            if name != "exact":
                add(selection, name, train(way, selection, data, size, seed), exact)
    return {"runs": runs, "gradients": gradients}


# --- figures ---------------------------------------------------------------------------------------------------------


Entries = list[dict[str, Any]]


def those(entries: Entries, **wanted: Any) -> Entries:
    """The entries that have these values."""
    return [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]


def pairs(entries: Entries) -> list[tuple[str, str]]:
    """Selections with their ways, in the order they ran."""
    return list(dict.fromkeys((entry["selection"], entry["way"]) for entry in entries))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """As markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and, of several, standard deviation; empty of none."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def mean_of(entries: Entries, key: str) -> str:
    """Mean of gradients' figures; empty of none."""
    return f"{statistics.fmean(entry[key] for entry in entries):.3f}" if entries else ""


def named(way: str, runs: Entries) -> str:
    """The way, and how many of its runs were lost."""
    lost = len(those(runs, diverged=True))
    return f"{way} (diverged: {lost} of {len(runs)})" if lost else way


def away(runs: Entries) -> str:
    """From the run with exact gradients."""
    return spread([run["away"] for run in runs if "away" in run], 3)


def accuracies(runs: Entries, exact: Entries, key: str = "accuracy") -> list[str]:
    """Mean, and the mean of the differences to ``exact`` seed by seed with its standard error, in points."""
    mean = spread([100 * run[key] for run in runs], 2)
    if runs == exact:
        return [mean, ""]
    differences = [100 * (a[key] - b[key]) for a in runs for b in exact if a["seed"] == b["seed"]]
    if len(differences) < 2:
        return [mean, "".join(f"{d:+.2f}" for d in differences)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return [mean, f"{statistics.fmean(differences):+.2f} ± {error:.2f}"]


def summary_table(runs: Entries, gradients: Entries) -> list[str]:
    """The figures that decide: a row for each selection and way; gradients averaged over the points."""
    head = (
        "selection",
        "way",
        "cosine",
        "error",
        "away, short",
        "away, end",
        "stale, end",
        "accuracy, %",
        "minus exact",
    )
    rows: list[list[str]] = []
    for selection, way in pairs(runs):
        compared = those(gradients, selection=selection, way=way)
        short, every = (those(runs, selection=selection, way=way, at=at) for at in ("short", "end"))
        end = those(every, diverged=False)
        exact = those(runs, selection=selection, way="exact", at="end")
        cells = [selection, named(way, every), mean_of(compared, "cosine"), mean_of(compared, "error")]
        cells += [away(short), away(end), spread([run["stale"] for run in end], 3), *accuracies(end, exact)]
        rows.append(cells)
    return table(head, rows)


def training_table(runs: Entries, at: str) -> list[str]:
    """A row for each selection and way, at the short point or at the end."""
    head = ("selection", "way", "stale", "away", "accuracy, %", "minus exact", "refreshed, %", "minus exact")
    rows: list[list[str]] = []
    for selection, way in pairs(runs):
        every = those(runs, selection=selection, way=way, at=at)
        here, exact = those(every, diverged=False), those(runs, selection=selection, way="exact", at=at)
        cells = [selection, named(way, every), spread([run["stale"] for run in here], 3), away(here)]
        rows.append([*cells, *accuracies(here, exact), *accuracies(here, exact, "accuracy_refreshed")])
    return table(head, rows)


def gradient_table(gradients: Entries, key: str) -> list[str]:
    """A row for each selection and way, a column for each point; means over seeds."""
    points = list(dict.fromkeys(entry["at"] for entry in gradients))
    rows = [
        [selection, way, *(mean_of(those(gradients, selection=selection, way=way, at=at), key) for at in points)]
        for selection, way in pairs(gradients)
    ]
    return table(("selection", "way", *(f"at {at:g}" for at in points)), rows)


def layer_table(gradients: Entries) -> list[str]:
    """A row for each weight, from the first layer on; means over seeds and points after the start."""
    lines: list[str] = []
    later = [entry for entry in gradients if entry["at"] > 0]
    for selection in dict.fromkeys(entry["selection"] for entry in later):
        of_way = {
            way: those(later, selection=selection, way=way) for chosen, way in pairs(later) if chosen == selection
        }
        layers = next(iter(of_way.values()))[0]["layers"]
        rows = [
            [f"`{layer.removesuffix('.weight')}`"]
            + [f"{statistics.fmean(entry['layers'][layer] for entry in entries):.3f}" for entries in of_way.values()]
            for layer in layers
        ]
        lines += ["", *table((selection, *of_way), rows)]
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The figures to read."""
    about = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
    lines = ["# Training BatchNorm under a selection", "", f"`{result['command']}`: {about}", ""]
    lines += (__doc__ or "").partition("\n\n")[2].strip().splitlines()
    lines += ["", "| way | |", "|---|---|", *(f"| {name} | {way.about} |" for name, way in WAYS.items())]
    runs, gradients = result["runs"], result["gradients"]
    seeds = len({run["seed"] for run in runs})
    lines += ["", f"Seeds: {seeds}. Means, ± standard deviation; differences are paired by seed, ± standard error."]
    lines += ["", "## Summary", "", *summary_table(runs, gradients)]
    lines += ["", "## After the decayed schedule", "", *training_table(runs, "end")]
    lines += ["", f"## After {result['size']['short']} steps", "", *training_table(runs, "short")]
    for key, title in (
        ("cosine", "Cosine with the exact gradient"),
        ("error", "Norm of the difference over the exact gradient's"),
        ("cosine_of_mean", "Cosine of the mean gradient with the exact mean gradient"),
        ("error_of_mean", "Norm of the mean gradients' difference over the exact one's"),
    ):
        lines += ["", f"## {title}", "", "At fractions of the training.", "", *gradient_table(gradients, key)]
    lines += ["", "## Cosine with the exact gradient, weight by weight", ""]
    lines += ["From the input to the head; means over the points after the start.", *layer_table(gradients)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, print, and write JSON and markdown after each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--train-rows", type=int, default=Size.train_rows, help="training rows (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=Size.epochs, help="passes over them (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one seed of a small size: shows that it runs")
    parser.add_argument("--out", type=Path, help="folder for the results (default benchmarks/results; none if quick)")
    args = parser.parse_args()
    size = QUICK if args.quick else Size(train_rows=args.train_rows, epochs=args.epochs)
    torch.set_num_threads(1)  # sums in one order: the same figures every time
    out = args.out or (None if args.quick else RESULTS)
    data = load_data("fashion-mnist", train_rows=size.train_rows)
    data = replace(data, test_x=data.test_x[: size.test_rows], test_y=data.test_y[: size.test_rows])
    result: dict[str, Any] = {
        "command": " ".join(["nox -s batchnorm --", *sys.argv[1:]]),
        "setting": setting(torch.device("cpu"), 1, dtype="float32"),
        "size": asdict(size), "runs": [], "gradients": [],
    }  # fmt: skip
    result["setting"] |= {
        "data": f"fashion-mnist with {size.train_rows} training rows", "epochs": size.epochs, "N": size.batch_rows,
        "peak rate": size.peak_lr,
    }  # fmt: skip
    stem = f"{datetime.now(timezone.utc):%Y-%m-%d}-batchnorm"
    for seed in range(1 if args.quick else args.seeds):
        begin = time.perf_counter()
        for key, entries in study(data, size, seed).items():
            result[key] += entries
        print(f"seed {seed} took {time.perf_counter() - begin:.0f} s", flush=True)
        if out is not None:
            write_whole(out / f"{stem}.json", (to_json(rounded(result), indent=1) + "\n").encode())
            write_whole(out / f"{stem}.md", markdown(result).encode())
    print(markdown(result))
    if out is not None:
        print(f"Written: {out / stem}.json and .md")


def rounded(content: Any) -> Any:
    """Floats at six decimals: none of the figures knows more."""
    return json.loads(json.dumps(content), parse_float=lambda text: round(float(text), 6))


if __name__ == "__main__":
    main()
