"""`rowprop compare` trains what it says it trains, charges what it must, and keeps what is finished."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch.nn import functional as F

import compare_cases
import rowprop
from rowprop.app import page
from rowprop.app.compare import data as data_module
from rowprop.app.compare import report
from rowprop.app.compare import run as run_module
from rowprop.app.compare import train as train_module
from rowprop.app.compare.data import Dataset, load_data, read_idx
from rowprop.app.compare.models import build_model, check_model
from rowprop.app.compare.report import gallery, line_styles, picture, render_report
from rowprop.app.compare.results import PHASES, Run, most_chosen, show_comparison, verdict
from rowprop.app.compare.run import Outcome, compare
from rowprop.app.compare.settings import METHODS, Settings, parse_methods
from rowprop.app.compare.train import hardest_share, learning_rate, train
from rowprop.errors import InvalidInput, MissingExtra

TINY = {"data": "compare_cases:tiny", "model": "compare_cases:net", "batch_rows": 20, "epochs": 3}


pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**changes: object) -> Settings:
    return Settings(**{**TINY, **changes})  # type: ignore[arg-type]


def train_one(label: str, seed: int = 0, **changes: object) -> Run:
    chosen = settings(methods=label, **changes)
    data = load_data(chosen.data, None, chosen.train_rows)
    return train(chosen, data, chosen.parsed_methods[0], seed, lambda *_: None)


def compare_quietly(out: Path, *, resume: bool = False, fresh: bool = False, **changes: object) -> Outcome:
    return compare(settings(**changes), out, resume=resume, fresh=fresh)


def loop_by_hand(seed: int, select, *, epochs: int = 3, make=compare_cases.net, thinning=None):
    """An ordinary loop, written without rowprop: 96 rows, N = 20; returns the model and the counts chosen.

    ``thinning`` is called with the model before the first step, and the function that it returns after each backward.
    """
    data = load_data(TINY["data"])
    torch.manual_seed(seed)
    model = make()
    torch.manual_seed(seed)  # dropout starts where training starts
    told = (lambda: None) if thinning is None else thinning(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order_generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(96, dtype=torch.int64)
    for epoch in range(epochs):
        order = torch.randperm(96, generator=order_generator)
        for index in range(4):
            rows = order[20 * index : 20 * (index + 1)]
            progress = (4 * epoch + index) / (4 * epochs)
            rate = 0.005 + 0.045 * progress / 0.15
            if progress >= 0.15:
                rate = 0.05 * (1 + math.cos(math.pi * (progress - 0.15) / 0.85)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            losses = F.cross_entropy(model(data.train_x[rows]), data.train_y[rows], reduction="none")
            kept = select(losses.detach())
            counts[rows[kept]] += 1
            losses[kept].mean().backward() if len(kept) < 20 else losses.mean().backward()
            told()
            optimizer.step()
    return model, counts


def test_full_is_an_ordinary_loop_bit_for_bit():
    # Red with one more warm-up step on the model itself, another order, or a rate that is a step late.
    train_one("full", seed=3)
    trained = compare_cases.built[-1]
    expected, _ = loop_by_hand(3, lambda losses: torch.arange(len(losses)))
    for (name, got), wanted in zip(trained.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("engine", ["masked", "sliced", "recompute"])
def test_ohem_chooses_and_trains_as_by_hand_on_every_engine(engine: str):
    # Only masked trains the very same weights: recompute's second forward draws another dropout, and sliced projects
    # the gradient of training BatchNorm.
    run = train_one(f"ohem@{engine}", keep=0.5)
    trained = compare_cases.built[-1]
    expected, counts = loop_by_hand(0, lambda losses: losses.topk(10).indices.sort().values)
    assert sum(run.chosen) == int(counts.sum()) == run.rows_backpropagated == 12 * 10
    assert sum(run.offered) == run.rows_seen == 12 * 20
    assert run.engine == engine
    if engine == "masked":
        assert run.chosen == counts.tolist()
        for got, wanted in zip(trained.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("always_drawn")
def test_thinned_is_an_ordinary_loop_with_one_line_more():
    # Red when: the step is not thinned, or with another generator; the warm-up moves the draws or the shares; all rows
    # count as backpropagated, or the share of one block.
    kept: list[int] = []

    def thinning(model):
        handle = rowprop.thin(model, generator=torch.Generator().manual_seed(2**31 + 3))

        def told():
            shares = [share for block in handle.blocks if (share := handle.record.keep.get(block)) is not None]
            kept.append(round(20 * sum(shares) / len(shares)))

        return told

    run = train_one("thinned", seed=3, model="compare_cases:stacked", epochs=8)
    trained = compare_cases.built[-1]
    by_hand = {"epochs": 8, "make": compare_cases.stacked}
    expected, _ = loop_by_hand(3, lambda losses: torch.arange(len(losses)), thinning=thinning, **by_hand)
    plain, _ = loop_by_hand(3, lambda losses: torch.arange(len(losses)), **by_hand)
    for (name, got), wanted in zip(trained.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name
        assert not torch.equal(got, plain.state_dict()[name]), name
    assert (run.engine, run.rows_seen, run.rows_backpropagated) == ("plain", 8 * 80, sum(kept))
    assert [point.kept for point in run.curve] == [sum(kept[4 * e : 4 * e + 4]) / 80 for e in range(8)]
    assert min(kept) < 18 and run.chosen == []


@pytest.mark.usefixtures("always_drawn")
def test_random_can_keep_as_many_rows_as_a_thinned_method_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: it keeps the share of the settings, or of another seed; or it runs before the other method in a seed in
    # which its turn comes first.
    keeps = {}

    def spied(chosen, data, method, seed, tick):
        keeps[method.label, seed] = chosen.keep
        return train(chosen, data, method, seed, tick)

    monkeypatch.setattr(run_module, "train", spied)
    beside, label = "thinned", "random@thinned"
    common = {"model": "compare_cases:stacked", "epochs": 22}
    compare_quietly(tmp_path, methods=f"full,{beside}", seeds=1, **common)
    outcome = compare_quietly(tmp_path, methods=f"{beside},{label},full", seeds=2, resume=True, **common)
    runs = {(run["label"], run["seed"]): run for run in outcome.results["runs"]}
    shares = [runs[beside, seed]["rows_backpropagated"] / 1760 for seed in range(2)]
    assert max(shares) < 0.95 and shares[0] != shares[1]
    for seed, share in enumerate(shares):
        assert (keeps["full", seed], keeps[label, seed]) == (0.5, share)
        assert runs[label, seed]["rows_backpropagated"] == 88 * math.ceil(20 * share)
    assert (method := parse_methods(f"{label},{beside}")[0]).name == "random" and method.engine == "sliced"


def test_a_model_without_blocks_is_refused_for_thinned_before_anything_is_written(tmp_path: Path):
    # Red when: the method finds out in its first run.
    with pytest.raises(InvalidInput) as caught:
        compare_quietly(tmp_path, methods="full,thinned")
    assert "without blocks that repeat (children of one class in a ModuleList or a Sequential)" in str(caught.value)
    assert not list(tmp_path.iterdir())


def spied_steps(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Record every step: who took it, on which rows, at which progress, with which first weights, and at which rate.

    ``before_s`` and ``after_s`` are the training time until it began and until it was done.
    """
    steps: list[SimpleNamespace] = []
    take_step = train_module.Stepper.step

    def spy(self, rows, progress, batch_index, told=None):
        weights = next(self.model.parameters()).detach().clone()
        entry = SimpleNamespace(stepper=self, rows=rows.tolist(), progress=progress, weights=weights)
        steps.append(entry)
        entry.before_s = sum(self.phases_s.values())
        entry.loss, entry.record = take_step(self, rows, progress, batch_index, told)
        entry.after_s, entry.rate = sum(self.phases_s.values()), self.optimizer.param_groups[0]["lr"]
        return entry.loss, entry.record

    monkeypatch.setattr(train_module.Stepper, "step", spy)
    return steps


def of_the_run(steps: list[SimpleNamespace]) -> list[SimpleNamespace]:
    """The steps of the model that is compared, without warm-up and models that only score."""
    return [step for step in steps if step.stepper is steps[-1].stepper]


def test_methods_share_start_and_order(monkeypatch: pytest.MonkeyPatch):
    steps = spied_steps(monkeypatch)
    seen: dict[str, list[SimpleNamespace]] = {}
    for label in METHODS["row"]:
        train_one(label, seed=1, model="compare_cases:stacked")  # net has no blocks to thin after
        seen[label] = of_the_run(steps)
    for label, taken in seen.items():
        assert torch.equal(taken[0].weights, seen["full"][0].weights), label
        if not label.startswith("infobatch"):  # which draws an order of its own
            assert [step.rows for step in taken] == [step.rows for step in seen["full"]], label


def test_each_seed_draws_rows_of_its_own(monkeypatch: pytest.MonkeyPatch):
    # Red where the selection's generator is not told the seed: the spread over seeds would leave the draw out.
    steps = spied_steps(monkeypatch)
    drawn = []
    for seed in (0, 1, 0):
        train_one("random", seed=seed)
        drawn.append([step.record.selection.rows.tolist() for step in of_the_run(steps)])  # places in the batch
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))
    orders = []
    for seed in (0, 1):  # infobatch draws its order, too
        train_one("infobatch", seed=seed)
        orders.append([step.rows for step in of_the_run(steps)][:4])  # later ones follow the losses, too
    assert orders[0] != orders[1]


def test_only_full_accumulations_are_stepped(monkeypatch: pytest.MonkeyPatch):
    # Red with optimizer.step() after every batch, or with gradients that are cleared in between.
    steps = spied_steps(monkeypatch)
    run = train_one("biggest-losers", keep=0.25, epochs=5)
    taken = of_the_run(steps)
    assert taken[0].stepper._selective.selector.beta == 3  # the mean of u ** 3 over [0, 1] is a quarter
    assert [step.record.num_kept for step in taken[:4]] == [20] * 4  # the first epoch is whole
    assert 0 < run.rows_backpropagated < 20 * 20
    assert run.steps == run.rows_backpropagated // 20
    for before, after in itertools.pairwise(taken):
        assert torch.equal(before.weights, after.weights) is not before.record.ready


def test_batch_loss_filter_trains_its_first_epoch_whole_under_either_budget(monkeypatch: pytest.MonkeyPatch):
    # Under seconds: red where the step is told how much time has gone.
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    for budget in ({"epochs": 4}, {"epochs": None, "seconds": 300}):
        for label in ("batch-loss-filter", "infobatch+batch-loss-filter", "biggest-losers"):
            kept = [point.kept for point in train_one(label, **budget).curve]
            assert kept[0] == 1
            assert max(kept[1:]) < 1


@pytest.mark.parametrize("label", [label for label in METHODS["row"] if label.startswith("infobatch+")])
def test_a_biased_choice_on_top_of_pruning_counts_over_all_rows_of_the_batch(label: str):
    # Red when: a method's entry in the table is wrong about its weights. The selection says whether it is biased.
    budget = {"keep": 0.5, "epochs": 4, "num_rows": 20, "batch_rows": 10, "seed": 0}
    step = parse_methods(label)[0].made(torch.nn.Linear(3, 1), lambda model, batch: batch, budget, engine="masked")
    assert step is not None
    scores = torch.rand(10, generator=torch.Generator().manual_seed(0)) + 0.1
    selection = step.selector(scores)
    assert selection.unbiased == (label in ("infobatch+random", "infobatch+kath18"))
    if not selection.unbiased:
        assert 0 < selection.num_kept < 10
        assert selection.weights.tolist() == pytest.approx([0.1] * selection.num_kept)


def test_kath18_draws_by_the_gradient_of_the_logits(monkeypatch: pytest.MonkeyPatch):
    # Red with the losses as scores.
    steps = spied_steps(monkeypatch)
    assert train_one("kath18").chosen == []  # before its gate opens all rows are drawn alike
    selective = of_the_run(steps)[-1].stepper._selective
    images, classes = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    model = selective.model.eval()
    scored = selective.losses_fn(model, (images, classes))
    losses, scores = scored.losses, scored.scores
    logits = model(images).detach().requires_grad_()
    F.cross_entropy(logits, classes, reduction="sum").backward()
    torch.testing.assert_close(scores, logits.grad.norm(dim=1))
    torch.testing.assert_close(losses, F.cross_entropy(model(images), classes, reduction="none"))


def test_infobatch_leaves_easy_rows_out_before_the_forward_and_picking_saves_on_top(monkeypatch: pytest.MonkeyPatch):
    # Red with the order of the other methods, or with a history that the steps do not fill.
    steps = spied_steps(monkeypatch)
    run = train_one("infobatch", epochs=8)
    taken = of_the_run(steps)
    for epoch, point in enumerate(run.curve):
        mine = [step for step in taken if epoch <= 8 * step.progress + 1e-9 < epoch + 1]
        rows = [row for step in mine for row in step.rows]
        assert len(rows) == len(set(rows)) == round(80 * point.kept)
        factors = torch.cat([step.record.selection.weights for step in mine]) * 20
        assert (len(rows) < 80) == (1 <= epoch <= 6)  # nothing is known at first, and the last eighth is full
        assert bool((factors > 1.5).any()) == (1 <= epoch <= 6)
        assert sum(factors.tolist()) == pytest.approx(80, abs=16)  # 96 rows, of which a remainder is left out
    assert run.rows_seen == run.rows_backpropagated == sum(len(step.rows) for step in taken)
    steps.clear()
    both = train_one("infobatch+batch-loss-filter", epochs=8)
    assert both.rows_backpropagated < both.rows_seen < 8 * 80
    # What is kept counts as in the mean over all of the batch, twice where a row stands for one that was left out too.
    picked = [step.record.selection for step in of_the_run(steps) if not step.record.selection.is_everything]
    counts = {round(20 * weight, 5) for selection in picked for weight in selection.weights.tolist()}
    assert 1 in counts
    assert all(1 <= count <= 2.5 for count in counts)


def test_infobatch_is_full_in_the_last_part_of_a_budget_of_seconds(monkeypatch: pytest.MonkeyPatch):
    # Red with a sampler that waits for a last epoch it cannot know.
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    steps = spied_steps(monkeypatch)
    train_one("infobatch", epochs=None, seconds=900)
    pruned = [bool((step.record.selection.weights * 20 > 1.5).any()) for step in of_the_run(steps)]
    late = [step.progress > 0.875 for step in of_the_run(steps)]
    assert any(pruned)
    assert not any(was and at for was, at in zip(pruned, late, strict=True))


@pytest.mark.parametrize("budget", [{"epochs": 8}, {"epochs": None, "seconds": 1600}], ids=["epochs", "seconds"])
def test_rho_loss_is_judged_by_models_that_have_not_seen_the_row_and_pays_for_them(
    budget: dict[str, float | None], monkeypatch: pytest.MonkeyPatch
):
    # Red with each model judging its own half, or with a clock that starts after them.
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    steps = spied_steps(monkeypatch)
    run = train_one("rho-loss", keep=0.3, **budget)
    taken = of_the_run(steps)
    irreducible = taken[0].stepper._selective.selector.irreducible
    helpers = list(dict.fromkeys(step.stepper for step in steps if step.record is None))
    learnt = [{row for step in steps if step.stepper is helper for row in step.rows} for helper in helpers]
    assert len(helpers) == 2
    assert not learnt[0] & learnt[1]
    data = load_data(TINY["data"])
    for other, rows in zip(reversed(helpers), map(list, learnt), strict=True):
        assert 40 <= len(rows) <= 48
        losses, _ = train_module.judge(other.model, data.train_x, data.train_y)
        torch.testing.assert_close(irreducible[rows], losses[rows])
    if budget["epochs"]:  # a quarter of them, on half of the rows
        assert [sum(step.stepper is helper for step in steps) for helper in helpers] == [2 * 2, 2 * 2]
    spent = sum(sum(helper.phases_s.values()) for helper in helpers)
    assert spent < run.phases_s["score"] < spent + 10  # and the judging
    assert sum(run.phases_s.values()) == run.train_s
    if budget["epochs"] is None:
        assert 400 <= spent <= 440
        assert 1600 <= run.train_s <= 1620
        assert taken[1].progress < 0.1  # its rate rises and falls in the time that is left
    assert {step.record.num_kept for step in taken} == {6}


def test_composer_selects_between_half_and_nine_tenths_in_every_other_batch():
    run = train_one("composer", keep=0.5, epochs=10)  # 4 steps each; selection in epochs 5 to 8, batches 0 and 2
    assert [point.kept for point in run.curve] == [1.0] * 5 + [0.75] * 4 + [1.0]
    assert run.rows_backpropagated == 40 * 20 - 8 * 10


def test_phases_add_up_to_the_training_time_and_leave_evaluation_out(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count()
    late = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) + late[0])
    judge = train_module.judge

    def slow_judge(*arguments):
        late[0] += 1e6
        return judge(*arguments)

    monkeypatch.setattr(train_module, "judge", slow_judge)
    full, sliced, again = (train_one(label) for label in ("full", "ohem@sliced", "ohem@recompute"))
    for run in (full, sliced, again):
        assert set(run.phases_s) == set(PHASES)
        assert min(run.phases_s.values()) >= 0
        assert sum(run.phases_s.values()) == run.train_s == run.curve[-1].train_s
        assert 0 < run.train_s < 1e6
    judged = train_one("rho-loss")
    assert 2e6 < judged.phases_s["score"] < judged.train_s < 3e6  # its two models judge, which is no evaluation
    assert full.phases_s["score"] == full.phases_s["select"] == sliced.phases_s["score"] == 0
    assert again.phases_s["score"] > 0  # a second forward is never free


def test_under_seconds_every_method_gets_the_same_time_and_a_rate_decayed_at_its_end(monkeypatch: pytest.MonkeyPatch):
    rates: dict[str, list[float]] = {}
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    rate_at = train_module.learning_rate

    def spy(progress, peak):
        rates.setdefault(label, []).append(rate_at(progress, peak))
        return rates[label][-1]

    monkeypatch.setattr(train_module, "learning_rate", spy)
    for label in ("full", "batch-loss-filter", "composer", "infobatch", "rho-loss"):
        run = train_one(label, epochs=None, seconds=400)
        assert 400 <= run.train_s < 420
        assert run.curve[-1].epoch == run.steps / 4 or label == "infobatch"  # its epochs have fewer steps
        assert max(rates[label]) > 0.0499
        assert rates[label][-1] < 0.0005


@pytest.mark.parametrize("seconds", [400, 11])
def test_under_seconds_the_rate_follows_the_time_from_the_first_step(seconds: int, monkeypatch: pytest.MonkeyPatch):
    # Red where it follows what a method is told of its whole first epoch, which is that no time has gone.
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    steps = spied_steps(monkeypatch)
    for label in ("full", "composer", "batch-loss-filter", "infobatch+batch-loss-filter"):
        run = train_one(label, epochs=None, seconds=seconds)
        assert (run.curve[-1].epoch < 1) == (seconds == 11)
        taken = of_the_run(steps)
        spent_s = [0.0, *(step.after_s for step in taken[:-1])]
        assert [step.rate for step in taken] == [learning_rate(time_s / seconds, 0.05) for time_s in spent_s]


def test_a_budget_that_ends_in_the_whole_first_epoch_is_said_to_select_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Red where it is judged as if it had selected.
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    results = compare_quietly(tmp_path, methods="full,batch-loss-filter", seeds=2, epochs=None, seconds=11).results
    assert results["verdict"] == "batch-loss-filter never selected: every row was kept."
    assert [method["selected"] for method in results["methods"]] == [False, False]
    assert "chose rows by their loss" in (tmp_path / "report.html").read_text()  # no method did


def test_learning_rate_rises_to_the_peak_and_falls_to_zero():
    assert learning_rate(0, 2.0) == pytest.approx(0.2)
    assert learning_rate(0.15, 2.0) == pytest.approx(2.0)
    assert learning_rate(0.575, 2.0) == pytest.approx(1.0)
    assert learning_rate(1, 2.0) == pytest.approx(0)


def test_hardest_share_is_the_sorted_cumulative_share():
    losses = torch.rand(250, generator=torch.Generator().manual_seed(1))
    ordered = sorted(losses.double().tolist(), reverse=True)
    for percent, share in enumerate(hardest_share(losses)):
        assert share == pytest.approx(sum(ordered[: round(2.5 * percent)]) / sum(ordered), abs=1e-5)
    assert hardest_share(torch.zeros(4))[-1] == 0  # no loss, no share, no division by zero


def test_a_run_is_its_own_json():
    run = train_one("batch-loss-filter")
    content = json.loads(json.dumps(run, default=vars, allow_nan=False))
    assert Run.from_json(content) == run


def test_diverging_training_is_one_sentence():
    with pytest.raises(InvalidInput, match=r"training loss of full with seed 0 is not finite.*--lr"):
        train_one("full", lr=1e30)


def test_a_diverging_holdout_model_is_one_sentence():
    # Red where its losses go to the step, which knows of no rate.
    chosen = settings(methods="rho-loss", lr=1e30)
    with pytest.raises(
        InvalidInput, match=r"loss under a model that only scores with seed 0 is not finite after 2 steps.*--lr"
    ):
        train_module.irreducible_losses(chosen, load_data(chosen.data), 0)


# The grid: what is kept, resumed, refused.


def without_times(results: dict) -> list:
    return [
        [run["label"], run["seed"], run["accuracy"], run["rows_backpropagated"], run["loss_shares"]]
        + [[point["accuracy"], point["loss"], point["kept"]] for point in run["curve"]]
        for run in results["runs"]
    ] + [results["most_chosen"]]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    calls = itertools.count(1)

    def train_or_stop(*arguments):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return train(*arguments)

    monkeypatch.setattr(run_module, "train", train_or_stop)


def test_resuming_ends_where_an_uninterrupted_comparison_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    grid = {"methods": "full,biggest-losers,infobatch+batch-loss-filter", "seeds": 2}
    whole = compare_quietly(tmp_path / "whole", **grid)
    with monkeypatch.context() as patched:
        interrupt_at(patched, 4)
        stopped = compare_quietly(tmp_path / "part", **grid)
    assert (stopped.interrupted, stopped.finished_runs, stopped.planned_runs) == (True, 3, 6)
    part = json.loads((tmp_path / "part" / "results.json").read_text())
    assert part["finished"] is False
    assert len(part["runs"]) == 3
    assert "--resume" in (tmp_path / "part" / "report.html").read_text()

    with pytest.raises(InvalidInput, match=r"holds a comparison with 3 finished runs; add --resume"):
        compare_quietly(tmp_path / "part", **grid)
    with pytest.raises(InvalidInput, match=r"other settings \(keep was 0.5 and is now 0.4\)"):
        compare_quietly(tmp_path / "part", resume=True, keep=0.4, **grid)
    resumed = compare_quietly(tmp_path / "part", resume=True, **grid)
    assert not resumed.interrupted
    assert without_times(json.loads((tmp_path / "part" / "results.json").read_text())) == without_times(whole.results)
    # What was finished before the stop was not trained again: its times are the very same.
    times = {(run["label"], run["seed"]): run["train_s"] for run in part["runs"]}
    again = {(run["label"], run["seed"]): run["train_s"] for run in resumed.results["runs"]}
    assert times.items() <= again.items()


def test_resume_takes_more_seeds_and_methods_but_no_other_data(tmp_path: Path):
    compare_quietly(tmp_path, methods="full", seeds=1)
    grown = compare_quietly(tmp_path, resume=True, methods="full,ohem", seeds=2)
    assert len(grown.results["runs"]) == 4
    (tmp_path / "runs" / "full-seed0.json").write_text("{")
    with pytest.raises(
        InvalidInput, match=r"full-seed0.json cannot be used \(.*\); move the file away, and --resume trains"
    ):
        compare_quietly(tmp_path, resume=True, methods="full,ohem", seeds=2)
    with pytest.raises(InvalidInput, match="data_sha256 was"):
        compare_quietly(tmp_path, resume=True, methods="full", seeds=1, data="compare_cases:mislabelled")


def test_stopping_before_the_first_run_is_finished_leaves_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupt_at(monkeypatch, 1)
    assert compare_quietly(tmp_path) == Outcome(None, 0, 15)
    assert not (tmp_path / "results.json").exists()


def test_results_tell_the_conditions_and_add_up(tmp_path: Path):
    outcome = compare_quietly(tmp_path, methods="full,ohem,ohem@masked,batch-loss-filter", seeds=2, keep=0.25)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == json.loads(json.dumps(outcome.results))
    assert results["environment"]["torch"] == torch.__version__
    assert results["environment"]["threads"] == torch.get_num_threads()
    assert results["settings"]["batch_rows"] == 20
    by_label = {method["label"]: method for method in results["methods"]}
    assert [method["engine"] for method in results["methods"]] == ["plain", "sliced", "masked", "sliced"]
    assert by_label["ohem"]["rows_backpropagated"] == 3 * 4 * 5
    for label, method in by_label.items():
        runs = [run for run in results["runs"] if run["label"] == label]
        full = [run for run in results["runs"] if run["label"] == "full"]
        ratios = [run["train_s"] / base["train_s"] for run, base in zip(runs, full, strict=True)]
        assert method["ratio_to_full"]["per_seed"] == pytest.approx(ratios)
        mean = sum(run["accuracy"] for run in runs) / 2
        assert method["accuracy"]["mean"] == pytest.approx(mean)
        deviation = abs(runs[0]["accuracy"] - runs[1]["accuracy"]) / math.sqrt(2)
        assert method["accuracy"]["spread"] == pytest.approx(deviation)
        assert sum(method["phases_s"].values()) == pytest.approx(method["train_s"]["mean"])


def test_the_wrong_label_comes_first_in_the_gallery(tmp_path: Path):
    outcome = compare_quietly(tmp_path, data="compare_cases:mislabelled", methods="ohem", seeds=2, epochs=4, keep=0.5)
    first = outcome.results["most_chosen"][0]
    right = int(compare_cases.tiny()[1][compare_cases.WRONG_LABEL])
    assert (first["row"], first["predicted"]) == (compare_cases.WRONG_LABEL, right)
    assert first["class"] != first["predicted"]
    assert gallery(outcome.results, load_data("compare_cases:mislabelled"))[0]["doubtful"]
    assert first["chosen"] <= first["offered"] <= 2 * 4


def test_gallery_names_rows_as_the_data_came():
    data = load_data(TINY["data"], train_rows=30)
    whole = load_data(TINY["data"])
    raw = compare_cases.tiny()[0]
    low, high = data.train_x[0].min(), data.train_x[0].max()
    wanted = raw[data.train_ids[0]]
    spread = (wanted - wanted.min()) / (wanted.max() - wanted.min())
    torch.testing.assert_close((data.train_x[0] - low) / (high - low), spread, rtol=1e-5, atol=1e-6)
    assert len(whole.train_y) == 96
    assert most_chosen([], data) == []


def test_rows_that_no_step_offered_are_not_in_the_gallery():
    # Red where all rows are ranked: those never offered come last, and fill it up.
    data, nothing = load_data(TINY["data"]), [0] * 96
    offered = [0, 3, 0, 2, *nothing[4:]]
    run = Run("ohem", "sliced", 0, chosen=[0, 1, 0, 2, *nothing[4:]], offered=offered, predicted=nothing)
    run.final_losses = [9.0] * 96
    assert [(entry["position"], entry["chosen"], entry["offered"]) for entry in most_chosen([run], data)] == [
        (3, 2, 2),
        (1, 1, 3),
    ]
    assert most_chosen([Run("ohem", "sliced", 0, chosen=nothing, offered=nothing)], data) == []


def test_the_page_tells_whose_order_of_rows_differs(tmp_path: Path):
    # Red where one sentence is for all methods.
    common, own = "same start and same data order per seed", "same start and, but for infobatch, same data order per s"
    for methods, said, unsaid in (("full,ohem", common, own), ("full,infobatch", own, common)):
        compare_quietly(tmp_path / methods, methods=methods, seeds=1)
        text = (tmp_path / methods / "report.html").read_text()
        assert said in text and unsaid not in text


def told(name: str, mean: float, spread: float | None = 0.01, *, ratio: float = 1.0, rows: int = 500, seeds: int = 3):
    """A method as results.json has it; 1,000 rows are seen."""
    return {
        "name": name.partition("@")[0], "label": name, "engine": "sliced", "seeds": [*range(seeds)],
        "selected": name != "full",
        "accuracy": {"mean": mean, "spread": spread}, "ratio_to_full": {"mean": ratio, "spread": 0.02},
        "rows_backpropagated": 1000 if name == "full" else rows,
    }  # fmt: skip


NO_CONTROL = "Without random there is no control: how rows chosen blindly would have done is not known."


@pytest.mark.parametrize(
    ("other", "ratio", "seconds", "said"),
    [
        # The spread of both sides: the root of .01 ** 2 + .01 ** 2 is .0141.
        ((0.895, 0.01), 0.7, None, "Against full, ohem took 30 ± 2 % less training time at an accuracy within the spr"),
        ((0.895, 0.01), 1.2, None, "ohem took 20 ± 2 % more training time at an accuracy within the spread: 89.50 ± 1"),
        ((0.895, 0.01), 0.99, None, "took as much training time within the spread (0.99 ± 0.02 of it) at an accuracy"),
        ((0.905, 0.001), 0.7, None, "at an accuracy within the spread: 90.50 ± 0.10 against 90.00 ± 1.00 %."),
        ((0.912, 0.01), 0.7, None, "at an accuracy within the spread"),  # beyond full's own spread, not beyond both
        ((0.912, 0.001), 0.7, None, "at a higher accuracy: 91.20 ± 0.10 against 90.00 ± 1.00 %."),
        ((0.92, 0.01), 1.2, None, "20 ± 2 % more training time at a higher accuracy"),
        ((0.888, 0.01), 0.5, None, "at an accuracy within the spread"),
        (
            (0.888, 0.001),
            0.5,
            None,
            "every method lost more than the spread; ohem the least, with 50 ± 2 % less traini",
        ),
        ((0.40, 0.01), 0.5, None, "lost more than the spread; ohem the least, with 50 ± 2 % less training time: 40.00"),
        ((0.92, 0.01), 1.0, 30.0, "ohem: 92.00 ± 1.00 against 90.00 ± 1.00 %, +2.00 points, more than the spread."),
        ((0.88, 0.01), 1.0, 30.0, "ohem: 88.00 ± 1.00 against 90.00 ± 1.00 %, -2.00 points, more than the spread."),
        ((0.895, 0.01), 1.0, 30.0, "-0.50 points, no more than the spread."),
        ((0.912, 0.01), 1.0, 30.0, "+1.20 points, no more than the spread."),
    ],
)
def test_the_verdict_weighs_a_difference_with_the_spread_of_both_sides(other, ratio, seconds, said: str):
    # Red when: a loss counts as no difference (abs dropped), a spread is dropped, or only full's counts.
    methods = [told("full", 0.90), told("ohem", *other, ratio=ratio)]
    assert said in verdict(methods, seconds=seconds)
    assert "nothing to compare" in verdict(methods[1:], seconds=seconds)
    # What it lacks comes after it: a control, and methods that did nothing else than full, however fast.
    assert verdict(methods, seconds=seconds).endswith(NO_CONTROL)
    idle = told("composer", 0.99, ratio=0.1) | {"selected": False}
    with_idle = verdict([*methods, told("random", 0.1, ratio=9.0), idle], seconds=seconds)
    assert said in with_idle
    assert with_idle.endswith("composer never selected: every row was kept.")


BEYOND = " by more than the spread over the seeds: "
BEATEN = " at the same keep" + BEYOND


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([("ohem", 0.93, 500)], "ohem beats random" + BEATEN + "93.00 ± 1.00 against 90.00 ± 1.00 %."),
        ([("ohem", 0.91, 500)], "No method beats random" + BEYOND + "the best, ohem, has 91.00 ± 1.00 against 90.00"),
        ([("ohem", 0.60, 500)], "Every method is below random" + BEYOND + "the best, ohem, has 60.00 ± 1.00 against"),
        ([("ohem", 0.92, 500), ("kath18", 0.93, 500)], "kath18 beats random" + BEATEN + "93.00 ± 1.00 against 90.00 ± "
         "1.00 %. So does ohem."),
        ([("ohem", 0.92, 540), ("composer", 0.95, 900)], "ohem beats random" + BEATEN + "92.00 ± 1.00 against 90.00 ± "
         "1.00 %. With more rows backpropagated, so does composer."),
        ([("composer", 0.95, 900)], "composer beats random with 80 % more rows backpropagated by more than the spread"),
        ([("infobatch+kath18", 0.86, 300), ("infobatch+random", 0.80, 300)], "infobatch+kath18 beats infobatch+random"),
        ([("infobatch+kath18", 0.93, 500)], "infobatch+kath18 beats random"),
        ([("random@thinned", 0.50, 700), ("thinned", 0.80, 700)], "thinned beats random@thinned at the same keep"),
    ],
)  # fmt: skip
def test_the_verdict_begins_with_what_random_reaches(others, said: str):
    # Red when: full comes first, more rows pass as the same keep, or pruning is judged by random rows without it.
    methods = [told("full", 0.95), told("random", 0.90), *(told(name, mean, rows=rows) for name, mean, rows in others)]
    for seconds in (None, 30.0):
        assert verdict(methods, seconds=seconds).startswith(said)
        assert NO_CONTROL not in verdict(methods, seconds=seconds)


def test_random_beside_a_thinned_method_is_no_control_of_the_others():
    # Red when: the first random is the control, whatever its keep.
    methods = [told("full", 0.95), told("random@thinned", 0.50), told("random", 0.90), told("ohem", 0.80)]
    assert verdict(methods, seconds=None).startswith("Every method is below random by")


@pytest.mark.parametrize("seconds", [None, 30.0])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_no_better_accuracy_is_passed_over_in_silence(seeds: int, seconds: float | None):
    # Red when: the fastest method alone is named. A random that is faster than full hid an ohem of 85 %.
    spread = None if seeds == 1 else 0.05
    full, random = told("full", 0.2111, spread, seeds=seeds), told("random", 0.2874, spread, ratio=0.85, seeds=seeds)
    said = verdict([full, random, told("ohem", 0.85, spread, ratio=1.1, seeds=seeds)], seconds=seconds)
    if seeds < 3:
        many = "1 seed is" if seeds == 1 else "2 seeds are"
        means = "Means so far, the highest first: ohem 85.00 %, random 28.74 %, full 21.11 %."
        assert said == f"{many} too few to judge a difference; use at least 3. {means}"
    elif seconds is None:
        assert said.startswith("ohem beats random")
        assert "Against full, random took 15 ± 2 % less training time at a higher accuracy: 28.74" in said
        assert said.endswith("by more than the spread is ohem: 85.00 ± 5.00 %, with 10 ± 2 % more training time.")
    else:
        assert "ohem: 85.00 ± 5.00 against 21.11 ± 5.00 %, +63.89 points, more than" in said
    better_full = verdict([told("full", 0.99, seeds=3), told("ohem", 0.98, ratio=0.5)], seconds=None)
    assert "98.00 ± 1.00 against 99.00 ± 1.00 %" in better_full


def test_seeds_that_are_missing_so_far_count_as_too_few():
    methods = [told("full", 0.9), told("random", 0.8), told("ohem", 0.95, seeds=2)]
    assert verdict(methods, seconds=None).startswith("2 seeds are too few to judge a difference")


# What goes wrong, in one sentence each.


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keep": 0.0}, "keep is 0.0, but a fraction in (0, 1] was needed"),
        ({"seconds": 3.0}, "epochs and seconds are both given"),
        ({"epochs": 0}, "epochs is 0, but at least 1"),
        ({"seeds": 0}, "seeds is 0"),
        ({"batch_rows": 1}, "batch size is 1"),
        ({"threads": 100_000}, "threads is 100000, but this machine has"),
        ({"lr": -1.0}, "lr is -1.0, but a positive number"),
        ({"methods": "full,best"}, "method 'best' is unknown; the methods are full, random"),
        ({"methods": "ohem@fast"}, "engine 'fast' is unknown; the engines are sliced, recompute"),
        ({"methods": "full@sliced"}, "full is an ordinary loop"),
        ({"methods": "thinned@sliced"}, "thinned is an ordinary loop"),
        ({"methods": "full,random@thinned"}, "as many rows as thinned of the same seed, but thinned is not among"),
        ({"methods": "thinned,ohem@thinned"}, "engine 'thinned' is unknown"),
        ({"methods": "full,full"}, "stands twice"),
        ({"methods": " , "}, "no method was given"),
        ({"methods": "full,biggest-losers", "epochs": 1}, "biggest-losers trains the first epoch whole and needs at l"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], sentence: str):
    with pytest.raises(InvalidInput) as caught:
        settings(**changes)
    assert sentence in str(caught.value)


# The terminal.


def test_each_finished_run_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # Red when: kept runs count as trained, or a run is told under another seed.
    compare_quietly(tmp_path, methods="full", seeds=1)
    capsys.readouterr()
    results = compare_quietly(tmp_path, methods="full,ohem", seeds=2, resume=True).results
    runs = {(run["label"], run["seed"]): run for run in results["runs"]}
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "4 runs: 2 methods, seeds 0 to 1; 1 kept from before."
    assert lines == [
        f"{label} seed {seed}: {100 * runs[label, seed]['accuracy']:.2f} %, {runs[label, seed]['train_s']:.1f} s; "
        f"{place} of 4 runs"
        for place, (label, seed) in enumerate([("ohem", 0), ("ohem", 1), ("full", 1)], 2)
    ]


def test_progress_reaches_from_nothing_to_all_of_this_sessions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: runs kept from before count as done in this session, so that the time left is wrong.
    compare_quietly(tmp_path, methods="full", seeds=1)
    ticks: list[tuple[str, float]] = []
    monkeypatch.setattr(run_module, "ticking", lambda: contextlib.nullcontext(lambda *tick: ticks.append(tick)))
    compare_quietly(tmp_path, methods="full,ohem", seeds=1, resume=True)
    assert [round(fraction, 2) for _, fraction in ticks] == [0, 0, 0.33, 0.67, 1]  # the data, the start, three epochs
    assert ticks[1][0] == "ohem seed 0" and re.fullmatch(r"ohem seed 0: \d+\.\d\d %", ticks[-1][0])


def test_tables_print_labels_as_they_are(tmp_path: Path):
    # Red where rich reads a label as markup.
    results = compare_quietly(tmp_path, methods="full,ohem", seeds=1).results
    results["methods"][1]["label"] = "[red]x[/]"
    said = io.StringIO()
    show_comparison(Console(file=said, width=120), results)
    assert said.getvalue().count("[red]x[/]") == 2


# Methods of one's own.


@pytest.mark.parametrize("own", ["compare_cases:own_top", "compare_cases:own_function", "rowprop.recipes:ohem"])
@pytest.mark.parametrize("engine", ["", "@masked"])
def test_a_method_of_ones_own_trains_as_the_same_method_by_name(own: str, engine: str):
    # Red where keep, the engine or the generator does not reach it.
    mine, named = (train_one(label + engine, seed=1, keep=0.3) for label in (own, "ohem"))
    assert (mine.label, mine.engine) == (own + engine, named.engine)
    assert (mine.steps, mine.rows_seen, mine.rows_backpropagated) == (12, 240, 72)
    assert [(point.accuracy, point.loss, point.kept) for point in mine.curve] == [
        (point.accuracy, point.loss, point.kept) for point in named.curve
    ]
    assert mine.loss_shares == named.loss_shares


def test_a_method_of_ones_own_may_choose_by_class(monkeypatch: pytest.MonkeyPatch):
    steps = spied_steps(monkeypatch)
    train_one("compare_cases:own_per_class", keep=0.5)
    classes = load_data(TINY["data"]).train_y
    for step in of_the_run(steps):
        mine = classes[step.rows]
        wanted = [-(-int((mine == nth).sum()) // 2) for nth in range(3)]  # half of each class, rounded up
        assert mine[step.record.selection.rows].bincount(minlength=3).tolist() == wanted


def test_methods_of_ones_own_have_files_and_colours_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where a file's name is the label with its signs replaced: the three would share one.
    monkeypatch.chdir(tmp_path)
    source = "from rowprop import recipes\n\n\ndef top(model, losses_fn, **options):\n"
    source += "    return recipes.ohem(model, losses_fn, **options)\n"
    labels = ["a/b@c.py:top", "a_b@c.py:top", "a_b@c.py:top@masked"]
    (tmp_path / "a").mkdir()
    for label in labels[:2]:
        Path(label.removesuffix(":top")).write_text(source)
    out = tmp_path / "out"
    outcome = compare_quietly(out, methods=",".join(["full", *labels]), seeds=2)
    assert [method["label"] for method in outcome.results["methods"]] == ["full", *labels]
    files = [path.name for path in (out / "runs").iterdir()]
    assert len(files) == len({name.lower() for name in files}) == 8
    assert all(re.fullmatch(r"[\w.@+-]+-seed[01]\.json", name) for name in files)
    styles = line_styles(outcome.results)
    assert styles[labels[1]]["color"] == styles[labels[2]]["color"] != styles[labels[0]]["color"]
    assert not {styles[label]["color"] for label in labels} & {*report.PALETTE[: len(report.NAMES)]}
    resumed = compare_quietly(out, methods=",".join(["full", *labels]), seeds=2, resume=True)
    assert resumed.results["runs"] == outcome.results["runs"]  # nothing was trained again: the times are the same


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("no_such_module:top", "method 'no_such_module:top' could not be loaded: ModuleNotFoundError"),
        ("compare_cases:nothing", "method 'compare_cases:nothing' could not be loaded: AttributeError"),
        ("compare_cases:HOSTILE", "is of type str, but a callable was needed"),
        ("compare_cases:own_top@fast", "engine 'fast' is unknown"),
        (
            "compare_cases:own_number",
            "returned a int, but a rowprop.SelectiveBackprop was needed: return SelectiveBack",
        ),
        (
            "compare_cases:failing",
            "failed when called with (model, losses_fn, keep, engine, generator, timing): TypeErr",
        ),
        (
            "compare_cases:own_broken",
            "failed in its first step: AttributeError: 'Tensor' object has no attribute 'no_s",
        ),
        ("rowprop.recipes:infobatch", "failed when called with (model, losses_fn, keep, engine, generator, timing): "),
    ],
)
def test_a_method_that_cannot_be_used_is_one_sentence(method: str, sentence: str, tmp_path: Path):
    with pytest.raises(InvalidInput) as caught:
        compare_quietly(tmp_path, methods=f"full,{method}")
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())  # refused before anything was written


def test_an_absent_device_is_refused():
    with pytest.raises(InvalidInput, match=r"compare got device='warp', which cannot be used here: .*"):
        settings(device="warp").torch_device()
    with pytest.raises(InvalidInput, match="compare got device='meta', which holds no numbers"):
        settings(device="meta").torch_device()


def test_methods_that_name_no_engine_are_sliced():
    engines = [method.engine for method in parse_methods("full, ohem,random@masked")]
    assert engines == ["plain", "sliced", "masked"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("imagenet", "data 'imagenet' is unknown; it can be digits"),
        ("no_such_module:data", "data 'no_such_module:data' could not be loaded: ModuleNotFoundError"),
        ("compare_cases:nothing", "has no attribute 'nothing'"),
        ("compare_cases:HOSTILE", "is of type str, but a callable was needed"),
        ("compare_cases:", "is not of the form module:callable"),
        ("compare_cases:failing", "failed when called: OSError: the disk is on fire"),
        ("compare_cases:not_data", "returned a str, but a tuple was needed"),
        ("compare_cases:too_few_classes", "have shape (96, 1, 8, 8) and their classes (95,)"),
        ("compare_cases:unnamed_class", "run from 0 to 2, but 2 classes are named"),
        ("compare_cases:infinite", "hold values that are not finite"),
        (
            "compare_cases:three_parts",
            "returned 3 parts, but 4 or 5 were needed: (train_x, train_y, test_x, test_y) and",
        ),
        ("compare_cases:halves", "training classes of compare_cases:halves hold 0.5, but whole numbers were needed"),
        ("compare_cases:half_test", "test classes of compare_cases:half_test hold 0.5"),
        ("compare_cases:nan_class", "hold nan, but whole numbers"),
        ("compare_cases:huge_class", "hold 1e+30, but whole numbers"),
        ("compare_cases:complex_classes", "training classes of compare_cases:complex_classes are torch.complex64"),
        ("compare_cases:complex_rows", "training rows of compare_cases:complex_rows are torch.complex64"),
        ("compare_cases:sparse_rows", "torch.sparse_coo, but a dense tensor of real numbers was needed"),
        ("compare_cases:one_number", "and their classes ()"),
        ("compare_cases:empty", "have shape (0, 1, 8, 8) and their classes (0,)"),
        ("compare_cases:texts", "returned parts that are no tensors or no class names: "),
        ("compare_cases:no_names", "returned parts that are no tensors or no class names: TypeError"),
        ("compare_cases:other_sides", "has shape (1, 8, 8) and a test row (1, 8, 7); one model must take both"),
    ],
)
def test_unusable_data_is_one_sentence(name: str, sentence: str):
    with pytest.raises(InvalidInput) as caught:
        load_data(name)
    assert sentence in str(caught.value)


def test_classes_may_be_whole_floats_or_bools():
    # Red where they are refused, or where a tensor with a gradient cannot be read.
    raw = compare_cases.tiny()
    floats, bools = load_data("compare_cases:float_classes"), load_data("compare_cases:bool_classes")
    for found, wanted in ((floats, raw[1]), (bools, (raw[1] > 0).long())):
        assert found.train_y.dtype == torch.int64
        assert torch.equal(found.train_y, wanted)
        assert found.fingerprint()
    assert (floats.class_names, bools.class_names) == (("0", "1", "2"), ("0", "1"))
    assert torch.equal(floats.train_x, load_data(TINY["data"]).train_x)


def test_too_many_training_rows_are_refused():
    with pytest.raises(InvalidInput, match="has 96 training rows; choose 2 to 96"):
        load_data(TINY["data"], train_rows=97)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "model '' is unknown"),
        ("vgg", "model 'vgg' is unknown; the models are convnet, resnet, vit, textnet, gpt and module:callable"),
        ("compare_cases:one_class_short", "returned shape (2, 2) for a batch of shape (2, 1, 8, 8), but logits of"),
        ("compare_cases:wants_colour", "failed on a batch of shape (2, 1, 8, 8): RuntimeError"),
        ("compare_cases:not_a_model", "returned (int), but a torch.nn.Module, (model, batch) or"),
        ("compare_cases:TwoOutputs", "returned a tuple for a batch of shape (2, 1, 8, 8), but logits of"),
        ("compare_cases:returning", "failed when called without arguments: TypeError"),
        ("compare_cases:net_with_losses", "brings its own losses, but all methods are compared by cross entropy"),
    ],
)  # fmt: skip
def test_an_unusable_model_is_one_sentence(name: str, sentence: str, tmp_path: Path):
    with pytest.raises(InvalidInput) as caught:
        compare_quietly(tmp_path, model=name)
    assert sentence in str(caught.value)
    assert not list(tmp_path.iterdir())  # refused before anything was written


@pytest.mark.parametrize("name", ["convnet", "resnet", "vit"])
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 28)])
def test_the_models_fit_small_images(name: str, channels: int, side: int):
    check_model(build_model(name, 7, channels), name, torch.zeros(2, channels, side, side), 7)


def test_textnet_sees_words_and_no_padding_and_stays_sliced():
    # Red with a mean over all T places instead of over the words.
    torch.manual_seed(0)
    model = build_model("textnet", 7, 50)
    tokens = torch.zeros(12, 10, dtype=torch.int64)
    for row in range(12):
        tokens[row, : row % 9] = torch.randint(1, 50, (row % 9,))
    longer = torch.cat([tokens, torch.zeros(12, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(tokens), model(longer))
    assert model(tokens)[0].isfinite().all()  # no word at all
    losses = F.cross_entropy(model(tokens), torch.arange(12) % 7, reduction="none")
    with rowprop.watch() as report:
        rowprop.pick(losses, torch.tensor([1, 5, 6])).mean().backward()
    assert report.sliced
    assert not report.densified


@pytest.mark.parametrize("module", ["matplotlib.figure", "jinja2", "PIL.Image"])
def test_a_missing_extra_is_said_before_training(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match="which is not installed; run: pip install matplotlib jinja2 pillow"):
        compare_quietly(tmp_path)


def test_digits_without_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match="The digits data needs scikit-learn"):
        load_data("digits")


# Data on disk and from elsewhere.


def idx(shape: tuple[int, ...], content: bytes, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(shape))) + b"".join(side.to_bytes(4, "big") for side in shape) + content


def write_fashion(folder: Path) -> dict[str, bytes]:
    """Write four small files of Fashion-MNIST's form; return their decompressed content by name."""
    generator = torch.Generator().manual_seed(2)
    contents: dict[str, bytes] = {}
    for part, rows in (("train", 30), ("t10k", 20)):
        pixels = torch.randint(256, (rows * 28 * 28,), generator=generator, dtype=torch.uint8)
        contents[f"{part}-images-idx3-ubyte"] = idx((rows, 28, 28), pixels.numpy().tobytes())
        contents[f"{part}-labels-idx1-ubyte"] = idx((rows,), bytes(row % 10 for row in range(rows)))
    folder.mkdir(exist_ok=True)
    for stem, content in contents.items():
        (folder / f"{stem}.gz").write_bytes(gzip.compress(content))
    return contents


def test_fashion_mnist_is_read_from_a_folder(tmp_path: Path):
    contents = write_fashion(tmp_path)
    data = load_data("fashion-mnist", tmp_path)
    raw = torch.tensor(list(contents["train-images-idx3-ubyte"][16:]), dtype=torch.float32).reshape(30, 1, 28, 28)
    torch.testing.assert_close(data.train_x, (raw - raw.mean()) / raw.std())
    assert data.train_y.tolist() == [row % 10 for row in range(30)]
    assert data.test_x.shape == (20, 1, 28, 28)
    assert data.class_names[9] == "Ankle boot"


GOOD = idx((2, 1, 2), b"\x01\x02\x03\x04")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"not gzip", "is corrupt (Not a gzipped file"),
        (gzip.compress(GOOD, mtime=0)[:-10], "is corrupt (Compressed file ended"),
        (gzip.compress(GOOD, mtime=0)[:12] + b"\xff\xff\xff" + gzip.compress(GOOD, mtime=0)[15:], "is corrupt ("),
        (gzip.compress(GOOD[:-1], mtime=0), "promises 4 bytes for shape (2, 1, 2), 3 are there"),
        (gzip.compress(GOOD + b"!", mtime=0), "promises 4 bytes for shape (2, 1, 2), 5 are there"),
        (gzip.compress(GOOD[:9], mtime=0), "promises"),
        (gzip.compress(idx((2, 1, 2), b"1234", kind=13), mtime=0), "not an IDX file of bytes"),
        (gzip.compress(b"", mtime=0), "not an IDX file of bytes"),
        (b"", "is corrupt ("),
        (gzip.compress(idx((0, 28, 28), b""), mtime=0), "promises 0 bytes"),
        (None, "does not exist; fashion-mnist is four files named train-images-idx3-ubyte.gz"),
    ],
)
def test_a_corrupt_file_is_one_sentence_that_names_it(tmp_path: Path, content: bytes | None, sentence: str):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        read_idx(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_good_file_is_read(tmp_path: Path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(GOOD))
    assert read_idx(tmp_path / "x.gz").tolist() == [[[1, 2]], [[3, 4]]]


def test_download_checks_the_digest_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = tmp_path / "served"
    contents = write_fashion(served)
    monkeypatch.setattr(data_module, "DEBIAN_FASHION_MNIST", tmp_path / "absent")
    monkeypatch.setattr(data_module, "FASHION_MNIST_URL", f"{served.as_uri()}/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InvalidInput, match=r"is not fashion-mnist: its sha256 is [0-9a-f]{64}, not c59f468a"):
        load_data("fashion-mnist")
    assert not (tmp_path / "cache").exists()  # nothing that failed the check is kept

    digests = {stem: hashlib.sha256(content).hexdigest() for stem, content in contents.items()}
    monkeypatch.setattr(data_module, "FASHION_MNIST_SHA256", digests)
    first = load_data("fashion-mnist").fingerprint()
    for path in served.iterdir():
        path.unlink()
    assert load_data("fashion-mnist").fingerprint() == first  # from the cache, for the source is gone
    (tmp_path / "cache" / "rowprop" / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InvalidInput, match=r"could not be downloaded .* package dataset-fashion-mnist, .* --data-dir"):
        load_data("fashion-mnist")


@pytest.mark.skipif(not data_module.DEBIAN_FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_the_digests_are_those_of_the_published_files():
    for stem, expected in data_module.FASHION_MNIST_SHA256.items():
        content = gzip.decompress((data_module.DEBIAN_FASHION_MNIST / f"{stem}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == expected


def test_wordnet_is_read_from_a_folder(tmp_path: Path):
    # Red where the vocabulary also counts the test rows, or rows lose their texts in the shuffle or under train_rows.
    written = compare_cases.write_glosses(tmp_path)
    data = load_data("wordnet", tmp_path)
    assert (len(data.train_y), len(data.test_y), len(written)) == (135, 15, 150)
    ids = data.train_ids.tolist()
    assert len(set(ids)) == 135
    assert [(text, data.class_names[number]) for text, number in zip(data.train_texts, data.train_y, strict=True)] == [
        (written[row][0], {5: "noun.animal", 18: "noun.person", 29: "verb.body"}[written[row][1]]) for row in ids
    ]
    words = [
        "".join(letter.lower() if letter.isalnum() or letter == "_" else " " for letter in gloss).split()
        for gloss, _ in written
    ]
    counts: dict[str, int] = {}
    for word in (word for row in ids for word in words[row]):
        counts[word] = counts.get(word, 0) + 1
    frequent = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
    assert data.num_words == data.num_inputs == len(frequent) + 2
    for row, tokens in zip(ids, data.train_x.tolist(), strict=True):
        known = [frequent.index(word) + 2 for word in words[row]][:24]
        assert tokens == known + [0] * (24 - len(known))
    others = set(range(150)) - set(ids)
    assert {tuple(row) for row in data.test_x.tolist()} == {
        tuple(([frequent.index(word) + 2 if word in counts else 1 for word in words[row]] + [0] * 24)[:24])
        for row in others
    }
    part = load_data("wordnet", tmp_path, train_rows=20)
    assert [part.train_texts[row] for row in range(20)] == [written[row][0] for row in part.train_ids.tolist()]
    assert torch.equal(part.test_x, data.test_x)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist; wordnet is four files named data.noun, data.verb, data.adj, data.adv in one folder: "),
        (b"00000000 04 n 01 thing 0 000\n", "is corrupt (line 1 is no synset with a gloss)"),
        (b"  1 licence\n00000000 45 n 01 thing 0 000 | it\n", "is corrupt (line 2 is no synset"),
        (b"00000000 04 n 01 thing 0 000 | \xff\n", "is corrupt ('utf-8' codec"),
    ],
)
def test_a_corrupt_wordnet_file_is_one_sentence_that_names_it(tmp_path: Path, content: bytes | None, sentence: str):
    compare_cases.write_glosses(tmp_path)
    path = tmp_path / "data.adj"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        load_data("wordnet", tmp_path)
    assert f"the data file {path} {sentence}" in str(caught.value)
    assert content is not None or "apt-get install wordnet-base" in str(caught.value)


@pytest.mark.skipif(not data_module.DEBIAN_WORDNET.is_dir(), reason="needs Debian's wordnet-base")
def test_wordnet_is_what_it_is_said_to_be():
    glosses, classes = data_module.read_glosses(data_module.DEBIAN_WORDNET)
    assert len(glosses) == len(classes) == 117_659
    assert len(set(classes)) == len(data_module.WORDNET_CLASSES) == 45
    # Counted by lexnames(5WN)'s description: a hamster's gloss is noun.animal, breathe's verb.body.
    found = dict(zip(glosses, classes, strict=True))
    hamster = next(gloss for gloss in glosses if gloss.startswith("short-tailed Old World burrowing rodent"))
    assert data_module.WORDNET_CLASSES[found[hamster]] == "noun.animal"
    breathe = next(gloss for gloss in glosses if gloss.startswith("draw air into, and expel out of, the lungs"))
    assert data_module.WORDNET_CLASSES[found[breathe]] == "verb.body"


def test_a_text_set_is_compared_with_its_own_model_and_shown_as_text(tmp_path: Path):
    compare_cases.write_glosses(tmp_path / "data")
    changes = {"data": "wordnet", "data_dir": str(tmp_path / "data"), "model": None, "lr": 0.5, "epochs": 10}
    outcome = compare_quietly(tmp_path / "out", methods="full,ohem", seeds=1, **changes)
    assert outcome.results["settings"]["model"] == "textnet"
    assert outcome.results["methods"][0]["accuracy"]["mean"] == 1.0  # a word tells the class
    data = load_data("wordnet", tmp_path / "data")
    for entry in gallery(outcome.results, data):
        assert f'own{entry["row"]}"' in entry["text"]
        assert entry["picture"] is None


def test_the_model_follows_the_data():
    assert (settings(model=None).model, settings(model=None, data="wordnet").model) == ("convnet", "textnet")
    assert settings(data="wordnet", model="resnet").model == "resnet"


def test_digits_are_split_without_overlap():
    data = load_data("digits")
    assert (len(data.train_y), len(data.test_y), data.train_x.shape[1:]) == (1347, 450, (1, 8, 8))
    assert len(set(data.train_ids.tolist())) == 1347
    assert float(data.train_x.mean()) == pytest.approx(0, abs=1e-5)


# The page's figures; that they are drawn is tested in a browser.


def test_every_method_has_a_colour_of_its_own():
    assert {*METHODS["row"], *METHODS["token"]} == {*report.NAMES}
    assert len(set(report.PALETTE)) == len(report.PALETTE) > len(report.NAMES)
    # Methods of one's own take colours that ours do not have, the same name the same one.
    labels = {"ohem": "ohem", "mine:a": "mine:a", "mine:a@masked": "mine:a", "mine:b": "mine:b"}
    styles = line_styles({"methods": [{"label": label, "name": name} for label, name in labels.items()]})
    colours = {label: style["color"] for label, style in styles.items()}
    assert colours["ohem"] == "#3b82d6" and colours["mine:a"] == colours["mine:a@masked"]
    ours = report.PALETTE[: len(report.NAMES)]
    assert len({*colours.values()}) == 3 and not {colours["mine:a"], colours["mine:b"]} & {*ours}


def ends_of(figure) -> dict[str, list[float]]:
    """Where the lines of a figure end, by their names."""
    return {line.get_label().removeprefix(page.FIRST): line.get_xydata()[-1].tolist() for line in figure.axes[0].lines}


def test_lines_end_where_the_table_says(tmp_path: Path):
    results = compare_quietly(tmp_path, methods="full,ohem,ohem@recompute", seeds=2).results
    styles = line_styles(results)
    assert styles["ohem"]["color"] == styles["ohem@recompute"]["color"]
    assert styles["ohem"]["dash"] != styles["ohem@recompute"]["dash"]
    by_time, by_epoch = (ends_of(report.curves(results, styles, key, "")) for key in ("train_s", "epoch"))
    bars = report.phase_bars(results).axes[0].containers
    for place, method in enumerate(results["methods"]):
        label, time_s, accuracy = method["label"], method["train_s"]["mean"], 100 * method["accuracy"]["mean"]
        assert by_time[label] == pytest.approx([time_s, accuracy])
        assert by_epoch[label] == pytest.approx([3, accuracy])
        assert sum(bar[place].get_width() for bar in bars) == pytest.approx(time_s)


def a_run(label: str, seed: int, points: list[tuple[float, float, float]]) -> dict:
    """A run as results.json has it, with points of epoch, time and accuracy."""
    curve = [{"epoch": e, "train_s": s, "accuracy": a, "loss": 1.0, "kept": 1.0} for e, s, a in points]
    return {"label": label, "seed": seed, "curve": curve, "accuracy": points[-1][2], "train_s": points[-1][1]}


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_line_is_the_mean_over_the_seeds_in_both_directions(slow_first: bool):
    # Red when: the x axis is the clock of one seed, 3.6 s where the table says 6.1 s.
    runs = [
        a_run("full", 0, [(1, 1.8, 0.5), (2, 3.6, 0.7)]),
        a_run("full", 1, [(1, 3.0, 0.7), (2, 8.6, 0.9)]),
    ]
    results = {"runs": runs[::-1] if slow_first else runs, "data": {}}
    figure = report.curves(results, {"full": {"color": "#000000", "dash": ""}}, "train_s", "")
    whisker, line = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[2.4, pytest.approx(60)], [pytest.approx(6.1), pytest.approx(80)]]
    assert whisker.get_xydata().tolist() == [[3.6, pytest.approx(80)], [8.6, pytest.approx(80)]]
    band = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (band.ymin, band.ymax) == (pytest.approx(50), pytest.approx(90))
    assert figure.axes[0].get_ylim()[0] == pytest.approx(49)  # from the worst half-way on


def test_seeds_with_other_points_are_read_at_the_same_part_of_their_training():
    # Under a budget of seconds the slower seed sees fewer epochs. Straight curves give the mean of their ends.
    runs = [
        a_run("full", 0, [(e, 3.0 * e, 0.1 * e) for e in (1, 2, 3)] + [(3.5, 10.5, 0.35)]),
        a_run("full", 1, [(e, 6.0 * e, 0.2 * e) for e in (1, 1.75)]),
    ]
    assert report.over_seeds({"runs": runs}, "full", "train_s") == [
        [pytest.approx(6.0), 6.0], [pytest.approx(10.5), pytest.approx(10.5)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("share", "heading", "needed"),
    [
        (lambda x: x, "Here all rows are about equally hard", 90),
        (lambda x: 1 - (1 - x) ** 1.3, "Here all rows are about equally hard", 83),  # the hardest 10 % hold 13 %
        (lambda x: 1 - (1 - x) ** 2, "How the loss is spread over the rows", 69),  # evenly from nothing to the largest
        (lambda x: 1 - (1 - x) ** 5, "Why few rows are enough", 37),
        (lambda x: min(1.0, 10 * x), "Why few rows are enough", 9),
        (lambda x: 0.0, "Here no loss is left", None),
    ],
)
def test_the_heading_follows_the_losses(share, heading: str, needed: int | None):
    # Red when: the heading is fixed; the share that holds 90 % of nothing is looked for.
    curve = [share(percent / 100) for percent in range(101)]
    results, data = of_the_study("fashion-mnist-epochs", torch.rand(10, 1, 8, 8))
    for run in results["runs"]:
        run["loss_shares"] = [{"epoch": 1.0, "share": curve}, {"epoch": 2.0, "share": curve}]
    text = " ".join(render_report(results, data).split())
    assert f"<h2>{heading}</h2>" in text
    said = f"the hardest 10 % of the training rows hold {100 * curve[10]:.0f} % of the loss, the hardest half "
    said += f"{100 * curve[50]:.0f} %; 90 % of it lie in {needed} % of the rows."
    assert ("After epoch 2, " + ("the loss of every training row is zero." if needed is None else said)) in text


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STUDY = RESULTS / "2026-11-21-recipes-cpu-1-threads.json"
PAGE_BYTES = 400_000


def of_the_study(name: str, rows: torch.Tensor, texts: tuple[str, ...] = ()) -> tuple[dict, Dataset]:
    """Its results, with a gallery of other data."""
    results = json.loads(STUDY.read_text())[name]
    shown = [entry | {"position": place % len(rows)} for place, entry in enumerate(results["most_chosen"])]
    classes, names = torch.zeros(len(rows), dtype=torch.int64), tuple(results["data"]["class_names"])
    data = Dataset("other", rows, classes, rows, classes, names, torch.arange(len(rows)), texts)
    return results | {"most_chosen": shown}, data


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 200, 300)])
def test_a_report_of_all_methods_with_its_gallery_is_small(shape: tuple[int, ...]):
    # Red when: a library travels along, or pictures of noise, which no format makes small, are shown as they come.
    rows = torch.rand(10, *shape, generator=torch.Generator().manual_seed(0))
    text = render_report(*of_the_study("fashion-mnist-epochs", rows))
    assert len(text.encode()) <= PAGE_BYTES
    assert text.count("<svg") == 4 and text.count('src="data:image/') == 40 and "<script" not in text


def test_a_report_of_long_texts_is_small():
    text = render_report(*of_the_study("wordnet-epochs", torch.zeros(2, 24), ("long " * 5000,) * 2))
    assert len(text.encode()) <= PAGE_BYTES and text.count("<q>") == 40


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.html")), ids=lambda path: path.stem[-24:])
def test_the_pages_beside_the_study_are_small_and_say_its_verdict(path: Path):
    # Red when: the verdict's rule changes and nox -s recipes --again was not run.
    text = path.read_text()
    assert len(text.encode()) <= PAGE_BYTES and "<script" not in text
    results = json.loads(STUDY.read_text())[path.stem.removeprefix(STUDY.stem + "-")]
    assert results["verdict"] == verdict(results["methods"], seconds=results["settings"]["seconds"])
    assert f'<p class="verdict">{results["verdict"]}</p>' in text
    assert results["verdict"] in STUDY.with_suffix(".md").read_text()


def test_a_picture_is_a_png_of_the_row():
    import base64

    row = torch.tensor([[[0.0, 0.5], [1.0, 0.25]]])
    head, _, body = str(picture(row, 0.0, 1.0)).partition(",")
    assert head == "data:image/png;base64"
    pixels = Image.open(io.BytesIO(base64.b64decode(body)))
    assert [pixels.getpixel((x, y)) for y in (0, 1) for x in (0, 1)] == [0, 128, 255, 64]
    assert picture(torch.zeros(12), 0, 1) is None
