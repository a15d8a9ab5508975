"""`rowprop compare` trains what it says it trains, charges what it must, and keeps what is finished."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compare_cases
import rowprop
from compare_cases import ended, figures, settings
from rowprop.errors import InvalidInput
from rowprop_lab import run as run_module
from rowprop_lab import train as train_module
from rowprop_lab.data import load_data
from rowprop_lab.results import PHASES, Run
from rowprop_lab.run import Outcome, compare
from rowprop_lab.settings import METHODS, Settings, parse_methods
from rowprop_lab.train import hardest_share, learning_rate, train


def train_one(label: str, seed: int = 0, **changes: object) -> Run:
    chosen = settings(methods=label, **changes)
    data = load_data(chosen.data, None, chosen.train_rows)
    return ended(train(chosen, data, chosen.parsed_methods[0], seed, lambda *_: None))


def compare_quietly(out: Path, *, resume: bool = False, **changes: object) -> Outcome:
    """Without its page, whose drawing takes longer than all else."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_module, "render_report", lambda *_: "")
        return compare(settings(**changes), out, resume=resume)


def loop_by_hand(seed: int, select, *, epochs: int = 3, make=compare_cases.net, thinning=None):
    """An ordinary loop, written without rowprop: 96 rows, N = 20; returns the model and the counts chosen.

    ``thinning`` is called with the model before the first step, and the function that it returns after each backward.
    """
    data = load_data("compare_cases:tiny")
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


def every_row(losses: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(losses))


def assert_equal(trained: nn.Module, expected: nn.Module) -> None:
    for (name, got), wanted in zip(trained.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(got, wanted), name


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Every step: who took it, on which rows, at which progress, with which first weights, and at which rate.

    ``before_s`` and ``after_s`` are the training time until it began and until it was done, by the stepper's own
    account, ``passed_s`` what passed by the clock meanwhile.
    """
    steps: list[SimpleNamespace] = []
    take_step = train_module.Stepper.step

    def spy(self, rows, progress, batch_index, told=None):
        weights = next(self.model.parameters()).detach().clone()
        entry = SimpleNamespace(stepper=self, rows=rows.tolist(), progress=progress, weights=weights)
        steps.append(entry)
        entry.before_s, begun_s = sum(self.phases_s.values()), time.perf_counter()
        entry.loss, entry.record = take_step(self, rows, progress, batch_index, told)
        entry.passed_s = time.perf_counter() - begun_s
        entry.after_s, entry.rate = sum(self.phases_s.values()), self.optimizer.param_groups[0]["lr"]
        return entry.loss, entry.record

    monkeypatch.setattr(train_module.Stepper, "step", spy)
    return steps


def of_the_run(steps: list[SimpleNamespace]) -> list[SimpleNamespace]:
    """The steps of the model that is compared, without warm-up and models that only score."""
    return [step for step in steps if step.stepper is steps[-1].stepper]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each look at the clock takes a second; what a test adds to the entry has passed, too."""
    late, looks = [0.0], itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) + late[0])
    return late


def test_full_is_an_ordinary_loop_bit_for_bit():
    # Red with one more warm-up step on the model itself, another order, or a rate that is a step late.
    train_one("full", seed=3)
    assert_equal(compare_cases.built[-1], loop_by_hand(3, every_row)[0])


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
    assert_equal(trained, loop_by_hand(3, every_row, thinning=thinning, **by_hand)[0])
    plain = loop_by_hand(3, every_row, **by_hand)[0].state_dict()
    assert not any(torch.equal(got, plain[name]) for name, got in trained.state_dict().items())
    assert (run.engine, run.rows_seen, run.rows_backpropagated) == ("plain", 8 * 80, sum(kept))
    assert [point.kept for point in run.curve] == [sum(kept[4 * e : 4 * e + 4]) / 80 for e in range(8)]
    assert min(kept) < 18 and run.chosen == []


@pytest.mark.usefixtures("always_drawn")
def test_random_can_keep_as_many_rows_as_a_thinned_method_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: it keeps the share of the settings, or of another seed; or it runs before the other method in a seed in
    # which its turn comes first.
    keeps = {}

    def spied(chosen, data, method, seed, tick, rows):
        keeps[method.label, seed] = chosen.keep
        return (yield from train(chosen, data, method, seed, tick, rows))

    monkeypatch.setattr(run_module, "train", spied)
    beside, label = "thinned", "random@thinned"
    common = {"model": "compare_cases:stacked", "epochs": 8}
    compare_quietly(tmp_path, methods=f"full,{beside}", seeds=1, **common)
    outcome = compare_quietly(tmp_path, methods=f"{beside},{label},full", seeds=2, resume=True, **common)
    runs = {(run["label"], run["seed"]): run for run in outcome.results["runs"]}
    shares = [runs[beside, seed]["rows_backpropagated"] / 640 for seed in range(2)]
    assert max(shares) < 0.95 and shares[0] != shares[1]
    for seed, share in enumerate(shares):
        assert (keeps["full", seed], keeps[label, seed]) == (0.5, share)
        assert runs[label, seed]["rows_backpropagated"] == 32 * math.ceil(20 * share)
    assert (method := parse_methods(f"{label},{beside}")[0]).name == "random" and method.engine == "sliced"


def test_plain_steps_on_fewer_rows_cost_what_the_method_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # By made-up times: full 10 s and ohem 7 s, 1 s of each for the update, so 6/9 of the 32 rows. Red when: the update
    # counts as if it followed the rows, the times are another seed's, or the plain run comes before the two.
    given = {}

    def timed(chosen, data, method, seed, tick, rows):
        given[method.label, seed] = rows
        run = yield from train(chosen, data, method, seed, tick, rows)
        run.train_s = {"full": 10.0, "ohem": 7.0 + seed}.get(method.label, run.train_s)
        run.phases_s |= {"optimizer": 1.0}
        return run

    monkeypatch.setattr(run_module, "train", timed)
    methods = "plain@ohem,full,ohem"
    outcome = compare_quietly(tmp_path, methods=methods, seeds=2, epochs=2, batch_rows=32)
    assert [given["plain@ohem", seed] for seed in range(2)] == [round(32 * 6 / 9), round(32 * 7 / 9)]
    assert {given[label, seed] for label in ("full", "ohem") for seed in range(2)} == {None}
    ten = Run("full", "plain", 0, train_s=10.0, phases_s={"optimizer": 1.0})
    for method_s, rows in ((7.0, 21), (1.2, 2), (30.0, 32)):  # some, at least 2, at most all
        assert run_module.rows_at_cost(Run("ohem", "sliced", 0, train_s=method_s), ten, 32) == rows
    runs = {(run["label"], run["seed"]): run for run in outcome.results["runs"]}
    plain, full = runs["plain@ohem", 0], runs["full", 0]
    assert (plain["engine"], plain["steps"]) == ("plain", full["steps"])
    assert plain["rows_seen"] == plain["rows_backpropagated"] == full["rows_seen"] * 21 // 32
    with pytest.raises(InvalidInput, match=r"plain@ohem has no meaning under seconds, where full has each method's"):
        Settings(methods=methods, seconds=1.0)


@pytest.mark.parametrize(
    ("chosen", "control"), [({}, ",plain@ohem"), ({"data": "wordnet", "model": "gpt"}, ",plain@random@cut")]
)
def test_the_control_is_among_the_methods_where_nobody_names_any(chosen: dict[str, str], control: str):
    # Red when: a comparison by time, whose control is full, names by itself what it refuses.
    assert Settings(**chosen).methods == Settings(**chosen, seconds=1.0).methods + control


def test_methods_share_start_and_order(steps: list[SimpleNamespace]):
    seen: dict[str, list[SimpleNamespace]] = {}
    for label in METHODS["row"]:
        train_one(label, seed=1, model="compare_cases:stacked")  # net has no blocks to thin after
        seen[label] = of_the_run(steps)
    for label, taken in seen.items():
        assert torch.equal(taken[0].weights, seen["full"][0].weights), label
        if not label.startswith("infobatch"):  # which draws an order of its own
            assert [step.rows for step in taken] == [step.rows for step in seen["full"]], label


def test_each_seed_draws_rows_of_its_own(steps: list[SimpleNamespace]):
    # Red where the selection's generator is not told the seed: the spread over seeds would leave the draw out.
    def of_seed(label: str, seed: int) -> list[SimpleNamespace]:
        train_one(label, seed=seed)
        return of_the_run(steps)

    drawn = [[step.record.selection.rows.tolist() for step in of_seed("random", seed)] for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))
    # infobatch draws its order, too; later steps follow the losses.
    orders = [[step.rows for step in of_seed("infobatch", seed)[:4]] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_only_full_accumulations_are_stepped(steps: list[SimpleNamespace]):
    # Red with optimizer.step() after every batch, or with gradients that are cleared in between.
    run = train_one("biggest-losers", keep=0.25, epochs=5)
    taken = of_the_run(steps)
    assert taken[0].stepper._selective.selector.beta == 3  # the mean of u ** 3 over [0, 1] is a quarter
    assert [step.record.num_kept for step in taken[:4]] == [20] * 4  # the first epoch is whole
    assert 0 < run.rows_backpropagated < 20 * 20
    assert run.steps == run.rows_backpropagated // 20
    for before, after in itertools.pairwise(taken):
        assert torch.equal(before.weights, after.weights) is not before.record.ready


@pytest.mark.usefixtures("clock")
def test_batch_loss_filter_trains_its_first_epoch_whole_under_either_budget():
    # Under seconds: red where the step is told how much time has gone.
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


def test_kath18_draws_by_the_gradient_of_the_logits(steps: list[SimpleNamespace]):
    # Red with the losses as scores.
    assert train_one("kath18").chosen == []  # before its gate opens all rows are drawn alike
    selective = of_the_run(steps)[-1].stepper._selective
    images, classes = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    model = selective.model.eval()
    scored = selective.losses_fn(model, (images, classes))
    logits = model(images).detach().requires_grad_()
    F.cross_entropy(logits, classes, reduction="sum").backward()
    torch.testing.assert_close(scored.scores, logits.grad.norm(dim=1))
    torch.testing.assert_close(scored.losses, F.cross_entropy(model(images), classes, reduction="none"))


def test_infobatch_leaves_easy_rows_out_before_the_forward_and_picking_saves_on_top(steps: list[SimpleNamespace]):
    # Red with the order of the other methods, or with a history that the steps do not fill.
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


@pytest.mark.usefixtures("clock")
def test_infobatch_is_full_in_the_last_part_of_a_budget_of_seconds(steps: list[SimpleNamespace]):
    # Red with a sampler that waits for a last epoch it cannot know.
    train_one("infobatch", epochs=None, seconds=900)
    taken = of_the_run(steps)
    pruned = [step for step in taken if bool((step.record.selection.weights * 20 > 1.5).any())]
    assert pruned and max(step.progress for step in pruned) <= 0.875


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("budget", [{"epochs": 8}, {"epochs": None, "seconds": 1600}], ids=["epochs", "seconds"])
def test_rho_loss_is_judged_by_models_that_have_not_seen_the_row_and_pays_for_them(
    budget: dict[str, float | None], steps: list[SimpleNamespace]
):
    # Red with each model judging its own half, or with a clock that starts after them.
    run = train_one("rho-loss", keep=0.3, **budget)
    taken = of_the_run(steps)
    irreducible = taken[0].stepper._selective.selector.irreducible
    helpers = list(dict.fromkeys(step.stepper for step in steps if step.record is None))
    learnt = [{row for step in steps if step.stepper is helper for row in step.rows} for helper in helpers]
    assert len(helpers) == 2
    assert not learnt[0] & learnt[1]
    data = load_data("compare_cases:tiny")
    for other, rows in zip(reversed(helpers), map(list, learnt), strict=True):
        assert 40 <= len(rows) <= 48
        losses, _ = train_module.judge(other.model, data.train_x, data.train_y)
        torch.testing.assert_close(irreducible[rows], losses[rows])
    if budget["epochs"]:  # a quarter of them, on half of the rows
        assert [sum(step.stepper is helper for step in steps) for helper in helpers] == [2 * 2, 2 * 2]
    spent = sum(sum(helper.phases_s.values()) for helper in helpers)
    assert spent < run.phases_s["score"] < spent + 10  # and the judging
    if budget["epochs"] is None:
        assert 400 <= spent <= 440
        assert 1600 <= run.train_s <= 1620
        assert taken[1].progress < 0.1  # its rate rises and falls in the time that is left
    assert {step.record.num_kept for step in taken} == {6}


def test_composer_selects_between_half_and_nine_tenths_in_every_other_batch():
    run = train_one("composer", keep=0.5, epochs=10)  # 4 steps each; selection in epochs 5 to 8, batches 0 and 2
    assert [point.kept for point in run.curve] == [1.0] * 5 + [0.75] * 4 + [1.0]
    assert run.rows_backpropagated == 40 * 20 - 8 * 10


def flops_of_net(kept: int) -> int:
    """Of a step of `net` on 20 rows by arithmetic, ``kept`` of them backpropagated; the images have no gradient."""
    convolution, linear = 2 * 36 * 4 * 9, 2 * 144 * 3  # 36 places, 4 channels of 9 weights
    return 20 * (convolution + linear) + kept * (convolution + 2 * linear)


def test_flops_are_those_of_the_steps():
    # Red where scoring, the forward or the rows that were not kept are counted otherwise, or steps are left out.
    full, masked = train_one("full"), train_one("ohem@masked", keep=0.5)
    assert full.flops == masked.flops == 12 * flops_of_net(20)
    assert full.uncounted == []
    again = train_one("ohem@recompute", keep=0.5)  # a forward of all rows, then forward and backward of 10
    assert again.flops == 12 * (flops_of_net(0) + flops_of_net(10) - flops_of_net(0) // 2)
    composer = train_one("composer", epochs=10)  # 8 of 40 steps keep 10 rows; BatchNorm is exact below 16
    assert 40 * flops_of_net(10) < composer.flops <= 40 * flops_of_net(20)
    assert train_one("rho-loss", epochs=8, keep=1.0).flops > 32 * flops_of_net(20)  # and two models that only score
    few = train_one("full", epochs=1, train_rows=40)  # two steps, of which none is counted
    assert (few.steps, few.flops) == (2, None)


def test_a_counted_step_takes_the_time_of_the_step_before(monkeypatch: pytest.MonkeyPatch):
    # Red where counting, which is slow, is on the clock.
    now, pace, counted, count = [0], [1], [], train_module.count_flops

    @contextlib.contextmanager
    def slow():
        pace[0] = 1000
        with count() as flops:
            yield flops
        pace[0] = 1
        counted.append(flops)

    def look() -> int:
        now[0] += pace[0]
        return now[0]

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(train_module, "count_flops", slow)
    run = train_one("full")
    assert len(counted) == 2 and now[0] > 2 * 4000
    assert run.train_s == 12 * 4  # data, forward, backward and optimizer each take a look
    assert {phase for phase in PHASES if run.phases_s[phase]} == {"data", "forward", "backward", "optimizer"}


def test_tested_rows_give_the_figure(tokens: tuple[Path, Outcome, Settings], grid: tuple[Path, Outcome, Settings]):
    # Red when: rows of tokens count alike whatever their length, or another model is tested.
    for out, of in ((grid[0], lambda run: run["accuracy"]), (tokens[0], lambda run: -math.log(run["perplexity"]))):
        for path in (out / "runs").iterdir():
            run = json.loads(path.read_text())["run"]
            assert sum(run["tested"]) / len(run["tested"]) == pytest.approx(of(run), abs=1e-5)


def test_phases_add_up_to_the_training_time_and_leave_evaluation_out(clock: list[float], steps, monkeypatch):
    # Red when: a phase counts what another one does, or evaluation is charged.
    judge = train_module.judge

    def slow_judge(*arguments):
        clock[0] += 1e6
        return judge(*arguments)

    monkeypatch.setattr(train_module, "judge", slow_judge)
    full, sliced, again = (train_one(label) for label in ("full", "ohem@sliced", "ohem@recompute"))
    for run in (full, sliced, again):
        assert set(run.phases_s) == set(PHASES)
        assert min(run.phases_s.values()) >= 0
        assert sum(run.phases_s.values()) == run.train_s == run.curve[-1].train_s
        assert 0 < run.train_s < 1e6
    for step in steps:  # the two looks at the clock around it are not its own
        assert step.after_s - step.before_s == step.passed_s - 2
    judged = train_one("rho-loss")
    assert 2e6 < judged.phases_s["score"] < judged.train_s < 3e6  # its two models judge, which is no evaluation
    assert full.phases_s["score"] == full.phases_s["select"] == sliced.phases_s["score"] == 0
    assert again.phases_s["score"] > 0  # a second forward is never free


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("seconds", [400, 11])
def test_under_seconds_each_method_gets_the_same_time_and_its_rate_follows_it_to_the_end(seconds: int, steps):
    # Red where the rate follows what a method is told of its whole first epoch, which is that no time has gone.
    for label in ("full", "composer", "batch-loss-filter", "infobatch", "infobatch+batch-loss-filter", "rho-loss"):
        run = train_one(label, epochs=None, seconds=seconds)
        taken = of_the_run(steps)
        assert seconds <= run.train_s < seconds + 20
        assert (run.curve[-1].epoch < 1) == (seconds == 11)
        if "infobatch" not in label:  # whose epochs have fewer steps
            assert run.curve[-1].epoch == run.steps / 4
        begun_s = taken[0].before_s if label == "rho-loss" else 0.0  # what the models took that only score
        left_s = max(seconds - begun_s, 1e-9)
        spent_s = [0.0, *(step.after_s - begun_s for step in taken[:-1])]
        assert [step.rate for step in taken] == [learning_rate(time_s / left_s, 0.05) for time_s in spent_s]
        assert seconds == 11 or taken[-1].rate < 0.0005 < 0.0499 < max(step.rate for step in taken)


@pytest.mark.usefixtures("clock")
def test_a_budget_that_ends_in_the_whole_first_epoch_is_said_to_select_nothing(tmp_path: Path):
    # Red where it is judged as if it had selected.
    chosen = settings(methods="full,batch-loss-filter", seeds=2, epochs=None, seconds=11)
    results = compare(chosen, tmp_path).results
    assert results["verdict"] == "batch-loss-filter never selected: every row was kept."
    assert [method["selected"] for method in results["methods"]] == [False, False]
    assert "chose rows by their loss" in (tmp_path / "report.html").read_text()  # no method did


def test_hardest_share_is_the_sorted_cumulative_share():
    losses = torch.rand(250, generator=torch.Generator().manual_seed(1))
    ordered = sorted(losses.double().tolist(), reverse=True)
    for percent, share in enumerate(hardest_share(losses)):
        assert share == pytest.approx(sum(ordered[: round(2.5 * percent)]) / sum(ordered), abs=1e-5)
    assert hardest_share(torch.zeros(4))[-1] == 0  # no loss, no share, no division by zero


def test_diverging_training_is_one_sentence():
    # Red where a holdout model's losses go to the step, which knows of no rate.
    with pytest.raises(InvalidInput, match=r"training loss of full with seed 0 is not finite.*--lr"):
        train_one("full", lr=1e30)
    said = r"loss under a model that only scores with seed 0 is not finite after 2 steps.*--lr"
    with pytest.raises(InvalidInput, match=said):
        train_module.irreducible_losses(settings(methods="rho-loss", lr=1e30), load_data("compare_cases:tiny"), 0)


@pytest.mark.parametrize("name", ["grid", "tokens"])
def test_resuming_ends_where_an_uninterrupted_comparison_ends(name: str, request, tmp_path, monkeypatch):
    # Red when: a run is trained otherwise because others are there, or one that is there is trained again.
    out, whole, given = request.getfixturevalue(name)
    part = shutil.copytree(out, tmp_path / "part")
    monkeypatch.setattr(run_module, "render_report", lambda *_: "")
    for missing in whole.results["runs"][1::3]:
        (part / "runs" / f"{missing['label']}-seed{missing['seed']}.json").unlink()
    resumed = compare(given, part, resume=True)
    assert not resumed.interrupted
    assert figures(part) == figures(out)
    kept = [run for place, run in enumerate(whole.results["runs"]) if place % 3 != 1]
    assert kept == [run for place, run in enumerate(resumed.results["runs"]) if place % 3 != 1]  # also their times


def test_a_comparison_may_grow_and_tells_each_finished_run(tmp_path: Path, capsys, monkeypatch):
    # Red when: runs kept from before count as trained or as done in this session, so that the time left is wrong; a run
    # is told under another seed; seeds or methods are among the settings that may not change, or data are not.
    ticks: list[tuple[str, float]] = []
    compare_quietly(tmp_path, methods="full", seeds=1)
    capsys.readouterr()
    monkeypatch.setattr(run_module, "ticking", lambda: contextlib.nullcontext(lambda *tick: ticks.append(tick)))
    results = compare_quietly(tmp_path, methods="full,ohem", seeds=2, resume=True).results
    runs = {(run["label"], run["seed"]): run for run in results["runs"]}
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "4 runs: 2 methods, seeds 0 to 1; 1 kept from before."
    assert lines == [
        f"{label} seed {seed}: {100 * runs[label, seed]['accuracy']:.2f} %, {runs[label, seed]['train_s']:.1f} s; "
        f"{place} of 4 runs"
        for place, (label, seed) in enumerate([("ohem", 0), ("ohem", 1), ("full", 1)], 2)
    ]
    # The data, then the start and three epochs of each of the three runs; two of them take turns. Red where one trains
    # to its end before the other begins.
    names = [tick.partition(":")[0] for tick, _ in ticks[1:]]
    both = ["ohem seed 1", "full seed 1"]
    assert names == ["ohem seed 0"] * 4 + [name for name in both for _ in range(2)] + both * 2
    starts = {0, 4, 6}  # the other ticks each follow an epoch, one of nine
    done = [sum(place not in starts for place in range(end + 1)) / 9 for end in range(len(names))]
    assert [fraction for _, fraction in ticks] == pytest.approx([0.0, *done])
    assert ticks[1][0] == "ohem seed 0" and re.fullmatch(r"full seed 1: \d+\.\d\d %", ticks[-1][0])
    with pytest.raises(InvalidInput, match="data_sha256 was"):
        compare_quietly(tmp_path, resume=True, methods="full", seeds=1, data="compare_cases:mislabelled")


def test_results_tell_the_conditions_and_add_up(grid: tuple[Path, Outcome, Settings]):
    results = json.loads((grid[0] / "results.json").read_text())
    assert results == json.loads(json.dumps(grid[1].results))
    assert results["environment"].items() >= {"torch": torch.__version__, "threads": 1}.items()
    assert results["settings"]["batch_rows"] == 20
    by_label = {method["label"]: method for method in results["methods"]}
    assert [method["engine"] for method in results["methods"]] == ["plain", "sliced", "recompute", "sliced"]
    assert by_label["ohem"]["rows_backpropagated"] == 3 * 4 * 5
    for label, method in by_label.items():
        runs = [run for run in results["runs"] if run["label"] == label]
        full = [run for run in results["runs"] if run["label"] == "full"]
        ratios = [run["train_s"] / base["train_s"] for run, base in zip(runs, full, strict=True)]
        assert method["ratio_to_full"]["per_seed"] == pytest.approx(ratios)
        for figure in ("accuracy", "train_s"):
            one, other = (run[figure] for run in runs)
            told = {"mean": (one + other) / 2, "spread": pytest.approx(abs(one - other) / math.sqrt(2))}
            assert method[figure] == told | {"per_seed": [one, other]}
        assert sum(method["phases_s"].values()) == pytest.approx(method["train_s"]["mean"])


@pytest.mark.parametrize("own", ["compare_cases:own_top", "compare_cases:own_function", "rowprop.recipes:ohem"])
@pytest.mark.parametrize("engine", ["", "@masked"])
def test_a_method_of_ones_own_trains_as_the_same_method_by_name(own: str, engine: str):
    # Red where keep, the engine or the generator does not reach it.
    mine, named = (train_one(label + engine, seed=1, keep=0.3) for label in (own, "ohem"))
    assert (mine.label, mine.engine) == (own + engine, named.engine)
    assert (mine.steps, mine.rows_seen, mine.rows_backpropagated) == (12, 240, 72)
    points = [[(point.accuracy, point.loss, point.kept) for point in run.curve] for run in (mine, named)]
    assert points[0] == points[1]
    assert mine.loss_shares == named.loss_shares


def test_a_method_of_ones_own_may_choose_by_class(steps: list[SimpleNamespace]):
    train_one("compare_cases:own_per_class", keep=0.5)
    classes = load_data("compare_cases:tiny").train_y
    for step in of_the_run(steps):
        mine = classes[step.rows]
        wanted = [-(-int((mine == nth).sum()) // 2) for nth in range(3)]  # half of each class, rounded up
        assert mine[step.record.selection.rows].bincount(minlength=3).tolist() == wanted


def test_methods_of_ones_own_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where a file's name is the label with its signs replaced: the three would share one.
    monkeypatch.chdir(tmp_path)
    source = "from rowprop.recipes import ohem as top\n"
    labels = ["a/b@c.py:top", "a_b@c.py:top", "a_b@c.py:top@masked"]
    (tmp_path / "a").mkdir()
    for label in labels[:2]:
        Path(label.removesuffix(":top")).write_text(source)
    out, given = tmp_path / "out", {"methods": ",".join(["full", *labels]), "seeds": 2}
    outcome = compare_quietly(out, **given)
    assert [method["label"] for method in outcome.results["methods"]] == ["full", *labels]
    files = [path.name for path in (out / "runs").iterdir()]
    assert len(files) == len({name.lower() for name in files}) == 8
    assert all(re.fullmatch(r"[\w.@+-]+-seed[01]\.json", name) for name in files)
    resumed = compare_quietly(out, resume=True, **given)
    assert resumed.results["runs"] == outcome.results["runs"]  # nothing was trained again: the times are the same
