"""The plan: its arithmetic against brute force and formulas, and a model that measuring leaves as it was."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import rowprop
from rowprop.app.cli import app
from rowprop.cost.flops import count_flops
from rowprop.cost.measure import Spread, Timing, measure
from rowprop.cost.plan import Measurement, PlainStep, _measured, make_plan, measurement, plan, second_forward
from rowprop.engines import policies_on
from rowprop.errors import InvalidInput
from rowprop.native import building
from token_models import IDS, LABELS, LOSSES, Decoder
from untouched import untouched

KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9)
pytestmark = pytest.mark.usefixtures("one_thread")


def about(ratio: float, by: float = 0.01) -> Measurement:
    """A way whose quartiles lie so far from its ratio."""
    return Measurement(Spread(ratio - by, ratio, ratio + by), 7)


def test_the_choice_is_the_fastest_way_that_may_be_chosen_and_is_conclusively_faster():
    # Brute force over many random figures. Red with max for min; where the thinned step, a way of another gradient, or
    # one whose quartiles lie around 1 is chosen; and where plain indexing has another cost than the plain step.
    rng, seen = random.Random(0), set[str]()
    for _ in range(300):
        another = rng.choice([{}, {"recompute": ("another", "it is another one")}])
        measured = {
            (way, keep): about(rng.uniform(0.3, 1.5), rng.random() / 4)
            for way in ("sliced", "recompute", "thinned") for keep in KEEPS
        }  # fmt: skip
        plan = make_plan(PlainStep(0.8, 0.6, 5), measured, num_rows=100, keeps=KEEPS, gradients=another)
        for keep, choice in zip(KEEPS, plan.choices, strict=True):
            ratios = {way: point.ratio for (way, at), point in measured.items() if at == keep}
            faster = {
                way: ratio.median for way, ratio in ratios.items()
                if way not in (*another, "thinned") and (ratio.q3 <= 1 or ratio.q1 >= 1)
            }  # fmt: skip
            expected = min({"masked": 1.0} | faster, key=({"masked": 1.0} | faster).__getitem__)
            assert choice.engine == expected and choice.step_s == pytest.approx(0.8 * choice.ratio)
            assert choice.peak_bytes == (5 if expected == "masked" else 7)
            seen.add(expected)
        assert all(way.ratio == 1 for way in plan.ways if way.engine == "masked")
        assert plan.pays is (plan.choices[0].engine != "masked") and plan.choice is plan.choices[0]
        assert plan.pays != plan.reason.startswith("training on all rows is fastest")
        paying = [f"{keep:g}" for keep, way in zip(KEEPS, plan.choices, strict=True) if way.engine != "masked"]
        assert not paying or f"of the keeps measured, selecting pays at {', '.join(paying)}." in plan.reason
    assert seen == {"masked", "sliced", "recompute"}


def test_the_limit_is_that_of_a_backward_of_k_rows():
    # (F + kB + U) / (F + B + U) with F = 1, B = 2, U = 0.5. Red where k is the keep asked for and not K / N.
    measured = {("sliced", 0.25): about(2.1 / 3.5), ("sliced", 1.0): about(1.0)}
    plan = make_plan(PlainStep(3.5, 2 / 3.5), measured, num_rows=10, keeps=[0.25, 1.0])
    assert [way.limit for way in plan.ways] == pytest.approx([(1 + 0.3 * 2 + 0.5) / 3.5] * 2 + [1, 1])
    assert "sliced takes 0.60 of the plain step at keep 0.25 (K = 3 of 10), the limit is 0.60: 2.10 s" in plan.reason


def test_the_reason_says_where_selecting_does_not_pay():
    # Red when: a model is called too small whose step is long, or where a way is inconclusive.
    said = "training on all rows is fastest at keep 0.9 (K = 90 of 100): it takes 3.00 s, and the limit is 0.93 of it; "
    measured = {("sliced", 0.9): about(1.2), ("recompute", 0.9): about(1.1), ("sliced", 0.25): about(0.7)}
    plan = make_plan(PlainStep(3, 2 / 3), measured, num_rows=100, keeps=[0.9, 0.25])
    assert [way.engine for way in plan.choices] == ["masked", "sliced"] and not plan.pays
    assert plan.reason == (
        f"{said}recompute takes 3.30 s; sliced takes 3.60 s; of the keeps measured, selecting pays at 0.25."
    )
    never = make_plan(PlainStep(3, 2 / 3), {("sliced", 0.9): about(1.2)}, num_rows=100, keeps=[0.9])
    assert never.reason == (
        f"{said}sliced takes 3.60 s; fewer rows save nothing, so look at `rowprop verify`, which lists the ops that "
        "run on all rows at any keep."
    )
    tiny = make_plan(PlainStep(3e-4, 2 / 3), {("sliced", 0.25): about(1.3)}, num_rows=8, keeps=[0.25])
    assert tiny.reason.endswith(
        "; the model is too small for selecting to pay here, which is expected of a toy model: a step this short is "
        "mostly the fixed cost of calling ops, and fewer rows do not lower it."
    )
    unclear = make_plan(PlainStep(3, 2 / 3), {("sliced", 0.9): about(0.95, 0.1)}, num_rows=100, keeps=[0.9])
    assert unclear.reason == (
        f"{said}sliced takes 2.85 s, inconclusive (0.85 to 1.05 of the plain step); whether selecting pays is "
        "inconclusive: measure again without other work, or with more rounds."
    )


def test_a_faster_way_of_another_gradient_is_named_and_not_chosen():
    # Red when the way of another gradient is chosen or hidden.
    measured = {("sliced", 0.25): about(2.5 / 3), ("recompute", 0.25): about(0.125 / 3)}
    why = "the second forward draws other dropout masks, so its gradient is another one"
    policies = {"recompute": ("another", why), "sliced": ("by policy", "batchnorm='rows': it is a projection")}
    plan = make_plan(PlainStep(3, 2 / 3), measured, num_rows=100, keeps=[0.25], gradients=policies)
    found = {way.engine: way.gradient for way in plan.ways}
    assert found == {"masked": "same", "sliced": "by policy", "recompute": "another"}
    assert plan.reason == (
        "sliced takes 0.83 of the plain step at keep 0.25 (K = 25 of 100), the limit is 0.50: 2.50 s instead of 3.00 "
        "s; recompute takes 125 ms and is not chosen: the second forward draws other dropout masks, so its gradient is "
        "another one; sliced has the gradient of batchnorm='rows': it is a projection; of the keeps measured, "
        "selecting pays at 0.25."
    )


def test_the_plan_says_how_far_its_figures_can_be_trusted():
    # Red when a keep that was not measured, or a way that varies too much, goes unnamed.
    measured = {("sliced", 0.5): about(0.7), ("recompute", 0.5): about(1.01, 0.02)}
    plan = make_plan(PlainStep(3, 2 / 3), measured, num_rows=100, keeps=[0.5, 0.25, 0.1], rounds=4)
    assert plan.certainty == (
        "Rounds measured of each step: 4. Inconclusive, the rounds vary more than the steps differ: recompute at keep "
        "0.5. There was no time for keep 0.25, 0.1: raise seconds."
    )
    assert {way.keep for way in plan.ways} == {0.5} and {"certainty", "rounds", "skipped"} <= plan.to_dict().keys()


def test_a_slow_round_changes_no_ratio():
    # Another process slows three rounds by factors of 1, 3 and 2. Red with the medians of the seconds in place of those
    # of the ratios, and without the update.
    def timing(*seconds: float) -> Timing:
        return Timing(tuple({"backward": s / 2, "update": s / 2} for s in seconds), 0)

    assert measurement(timing(2.0, 6.0, 4.0), timing(4.0, 12.0, 8.0)).ratio == Spread(0.5, 0.5, 0.5)
    found = measurement(timing(2.0, 60.0, 4.0), timing(4.0, 12.0, 8.0)).ratio
    assert (found.q1, found.median) == (0.5, 0.5)


def conv() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def losses_of(model: nn.Module, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


BATCH = (torch.randn(16, 3, 8, 8), torch.randint(3, (16,)))


def test_a_plan_lists_every_way_at_every_keep_and_leaves_nothing_behind():
    # Red when: buffers, gradients, modes or the random state are not put back.
    model = conv()
    losses_of(model, BATCH).sum().backward()
    batch = torch.randn(16, 3, 12, 12), BATCH[1]
    losses_of(model, batch)  # gives BatchNorm statistics of its own
    with untouched(model):  # on a busy machine a minute is too short to measure each way at each keep
        result = plan(model, batch, losses_of, keep=(0.25, 0.5), seconds=1e6, rounds=2, optimizer="adamw")
    found = [(way.engine, way.keep) for way in result.ways]
    assert found == [(way, keep) for keep in (0.25, 0.5) for way in ("masked", "sliced", "recompute")]
    assert result.num_rows == 16
    for way in result.ways:
        assert way.step_s > 0 and way.peak_bytes > 0
        assert way.ratio == pytest.approx(way.step_s / result.full_s)
    assert json.loads(json.dumps(result.to_dict()))["choice"]["keep"] == 0.25


class Clocked:
    """A clock in place of the machine's, and steps of one's own cost: seconds by the number of rows that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.backwards = 0.0, list[int]()
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)

    def layer(self, forward_s: Callable[[int], float], backward_s: Callable[[int], float]) -> Callable:
        """The identity, which takes this long."""

        @rowprop.rowwise(saved=(), grads=(0,))
        class Costly(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                self.now_s += forward_s(len(x))
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                self.now_s += backward_s(len(grad))
                self.backwards.append(len(grad))
                return grad

        return Costly.apply


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(monkeypatch)


def test_each_way_costs_what_its_steps_take(clocked: Clocked):
    # A forward takes 3 per row with a graph and 1 without, a backward 5 per row it runs on.
    with_graph, without = (clocked.layer(lambda k, each=each: each * k, lambda k: 5 * k) for each in (3, 1))

    def losses(model, batch):
        return (with_graph if torch.is_grad_enabled() else without)(model(batch)).square().squeeze(1)

    result = plan(nn.Linear(3, 1), torch.randn(32, 3), losses, keep=KEEPS, rounds=3, optimizer=None, seconds=1e6)
    assert result.full_s == pytest.approx(32 * 8)
    assert result.phases_s == pytest.approx({"forward": 96, "backward": 160, "score": 32})
    for way in result.ways:
        k = math.ceil(way.keep * 32)
        expected = {"masked": 256, "sliced": 96 + 5 * k, "recompute": 32 + 8 * k}[way.engine]
        assert way.step_s == pytest.approx(expected)
        assert way.limit == pytest.approx((96 + 5 * k) / 256)  # red with the forward in place of the backward
    # sliced and recompute cost the same at K = 64 / 3
    assert [way.engine for way in result.choices] == ["recompute", "recompute", "recompute", "sliced", "sliced"]


@pytest.mark.parametrize("attention", ["exact", "cut"])
def test_a_plan_of_tokens_costs_the_flops_of_picks_of_tokens(attention: str, monkeypatch: pytest.MonkeyPatch):
    # The clock shows the FLOPs done. Forward, plain backward and the backward of a pick of the largest losses are
    # counted by themselves. Red when: K is of rows, unit or attention does not reach the step, or a pick of rows, a
    # second forward or a thinned step is measured beside it.
    model, batch = Decoder(packed=True).float(), IDS
    losses_fn = lambda model, batch: LOSSES["flat"](model(batch), LABELS)  # noqa: E731
    kept = math.ceil(0.25 * LABELS.numel())
    with count_flops() as forward:
        losses = losses_fn(model, batch)
    with count_flops() as backward:
        losses.mean().backward(retain_graph=True)
    with count_flops() as sliced:
        hardest = losses.detach().flatten().topk(kept).indices
        rowprop.pick(losses.flatten(), hardest, attention=attention).mean().backward()
    whole = forward.total_flops + backward.total_flops

    with count_flops() as done:
        monkeypatch.setattr("time.perf_counter", lambda: done.total_flops / 1e9)
        options = {"unit": "token", "attention": attention, "optimizer": None, "rounds": 3, "seconds": 1e6}
        result = plan(model, batch, losses_fn, keep=0.25, **options)
    assert [way.engine for way in result.ways] == ["masked", "sliced"]
    way = result.ways[1]
    assert (result.unit, result.num_rows, way.kept) == ("token", LABELS.numel(), kept)
    assert result.full_s == pytest.approx(whole / 1e9)
    assert way.step_s == pytest.approx((forward.total_flops + sliced.total_flops) / 1e9)
    assert way.limit == pytest.approx((forward.total_flops + backward.total_flops * kept / LABELS.numel()) / whole)
    assert way.limit < way.ratio < 1 and result.choice is way
    assert way.gradient == ("by policy" if attention == "cut" else "same")
    assert f"sliced takes {way.ratio:.2f} of the plain step at keep 0.25 (K = {kept} of 96 tokens)" in result.reason
    assert "recompute left out: its second forward takes whole rows, not tokens" in result.reason
    assert ("attention='cut': keys and values of tokens that are not kept" in result.reason) == (attention == "cut")


@pytest.mark.usefixtures("any_count")
def test_a_thinned_step_is_measured_beside_the_ways_to_select(clocked: Clocked):
    # Forward 1 and backward 2 for each row and block, the backward below the top block at the drawn rows.
    # Red where nothing is thinned, where the handle is ended before the backward, and where hooks stay on the model.
    costly, n = clocked.layer(lambda k: k, lambda k: 2 * k), 32

    class Block(nn.Linear):
        def forward(self, x):
            return costly(super().forward(x))

    losses = lambda model, batch: costly(model(batch)).square().sum(1)  # noqa: E731
    model, batch = nn.Sequential(Block(3, 3), Block(3, 3)), torch.randn(n, 3)
    with untouched(model):
        result = plan(model, batch, losses, keep=KEEPS, optimizer=None, seconds=1e9)
    found = [way for way in result.ways if way.engine == "thinned"]
    for keep, way in zip(KEEPS, found, strict=True):
        expected = 3 * n + 2 * n + 2 * 2 * math.ceil(keep * n)
        assert way.step_s == pytest.approx(expected)
        assert way.gradient == "in expectation" and way not in result.choices
    assert " and is not chosen: it selects nothing, and its gradient is that of all rows in exp" in result.reason
    alone = plan(model.eval(), batch, losses, keep=0.5, optimizer=None, seconds=1e9)
    assert "thinned" not in {way.engine for way in alone.ways}


@pytest.mark.parametrize(
    ("plain_s", "at_most_s", "rounds", "steps", "measured"),
    [
        (0.02, 60, 7, 11, KEEPS),  # everything: the plain step, and 2 ways at 5 keeps
        (1.8, 62, 3, 9, (0.1, 0.25, 0.5, 0.75)),
        (4.0, 62, 3, 5, (0.1, 0.25)),
        (20.0, 150, 1, 3, (0.1,)),  # the first keep, once, and once for the memory
    ],
)
def test_the_time_is_spent_on_what_matters_most(plain_s, at_most_s, rounds, steps, measured, clocked: Clocked):
    # Forward and scoring take 1/3 of the plain step, the backward 2/3. Red when: the keeps asked for always run, one
    # round is not enough, or the warm-up is never left out.
    n = 32
    costly = clocked.layer(lambda k: plain_s / 3 * k / n, lambda k: plain_s * 2 / 3 * k / n)
    losses = lambda model, batch: costly(model(batch)).square().squeeze(1)  # noqa: E731
    told: list[tuple[str, float]] = []
    options = {"keep": KEEPS, "optimizer": None, "tick": lambda *line: told.append(line)}
    result = plan(nn.Linear(3, 1), torch.randn(n, 3), losses, **options)
    assert clocked.now_s <= at_most_s
    assert result.rounds == rounds
    # Two plain steps tell how long a step is, and one finds zeros. Each kind runs to warm up, for its memory, and in
    # each round.
    warmup = 2 if plain_s < 1 else 0
    assert len(clocked.backwards) == 3 + steps * (warmup + 1 + rounds)
    assert {way.keep for way in result.ways} == set(measured)
    assert result.skipped == tuple(keep for keep in KEEPS if keep not in measured)
    for way in result.ways:
        k = math.ceil(way.keep * n) / n
        expected = {"masked": 1, "sliced": (1 + 2 * k) / 3, "recompute": 1 / 3 + k}[way.engine]
        assert way.step_s == pytest.approx(plain_s * expected)
    assert {way.engine for way in result.choices} == {"sliced"}

    assert told[0] == ("about 60 s at most", 0.0)
    assert told[1][0].startswith(f"{steps} kinds of step, about ")
    seconds = float(told[1][0].split("about ")[1].split(" s")[0])
    assert seconds == pytest.approx(min(60 - told[1][1] * 60, clocked.now_s), rel=0.1, abs=1.5)
    shares = [done for _, done in told]
    assert shares == sorted(shares) and shares[-1] <= 1


def test_on_an_accelerator_every_k_warms_up_however_long_a_step_takes(monkeypatch):
    # cuDNN tunes in the first step of each K, and takes memory for it. Red when a long step leaves the warm-up out.
    warmups: list[int] = []

    def measured(routines, *, warmup, **_):
        warmups.append(warmup)
        return {name: Timing(({"step": 1.0},), 0) for name in routines}

    monkeypatch.setattr("rowprop.cost.plan.measure", measured)
    key = ("sliced", 0.5)
    for device in ("cpu", "cuda:0"):
        options = {"rounds": 1, "seconds": 1e-9, "begun_s": 0.0, "tell": print}
        _measured(print, {key: print}, [[key]], [torch.device(device)], **options)
    assert warmups == [0, 0, 0, 1]  # for each device: the plain step by itself, then the rounds


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_it_says_that_a_device_waits_for_the_calls_of_sliced(scale, monkeypatch):
    # Red when another way's wait is told, or that at another keep, or only that of a way that is, or is not, chosen.
    def measured(routines, **options):
        timings = measure(routines, **options)
        for key in waiting & timings.keys():
            rounds = tuple({phase: scale * s for phase, s in each.items()} for each in timings[key].rounds)
            timings[key] = replace(timings[key], rounds=rounds, host_s=9e9)
        return timings

    monkeypatch.setattr("rowprop.cost.plan.measure", measured)
    for key, told in ((("sliced", 0.25), True), (("sliced", 0.5), False), (("recompute", 0.25), False)):
        waiting = {key}
        result = plan(conv(), BATCH, losses_of, keep=[0.25, 0.5], rounds=1)
        assert {(way.engine, way.keep) for way in result.ways if way.waits} == {key}
        assert ("sliced takes as long as its calls from Python" in result.reason) == told


X = torch.randn(16, 3)
WHOLE = [  # batches that no rows are taken of
    (SimpleNamespace(x=X), lambda m, batch: m(batch.x).square(), "a batch of unknown make"),
    (X, lambda m, x: m(x.reshape(16, 3)).square(), "4 rows by themselves failed with RuntimeError"),
    (X, lambda m, _: m(X).square(), "4 rows by themselves failed with RuntimeError"),
]


@pytest.mark.parametrize(("batch", "losses_fn", "why"), WHOLE, ids=["unknown make", "fixed size", "its own rows"])
def test_a_model_that_cannot_run_on_fewer_rows_is_planned_without_a_second_forward(batch, losses_fn, why):
    # Red when recompute is measured all the same and so raises, or the reason does not say why it is missing.
    result = plan(nn.Linear(3, 1), batch, losses_fn, keep=0.5, rounds=1)
    assert {way.engine for way in result.ways} == {"masked", "sliced"}
    assert "recompute left out: " in result.reason and why in result.reason
    assert "score" not in result.phases_s


def two_layers(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 1))


def zeroed() -> nn.Module:
    """A last layer of zeros: nothing of what is before it shows in the losses."""
    model = two_layers(nn.BatchNorm1d(8))
    nn.init.zeros_(model[-1].weight)
    return model


def squared(model, batch):
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def dropping(model, batch):
    return squared(lambda x: model(F.dropout(x, 0.1)), batch)


def contrastive(model, batch):
    return squared(lambda x: model(x) - model(x).mean(0), batch)  # rows that see each other


def planned(model: nn.Module, losses):
    torch.manual_seed(0)
    batch = torch.randn(16, 4), torch.randn(16)
    return plan(model, batch, losses, keep=0.25, rounds=1, seconds=1e-3)


STATISTICS, MASKS = "takes batch statistics from the kept rows only", "draws other dropout masks"


@pytest.mark.parametrize(
    ("model", "losses", "why"),
    [
        (two_layers(nn.BatchNorm1d(8)), squared, f"the second forward {STATISTICS}"),
        (zeroed(), squared, f"the second forward {STATISTICS}"),
        (two_layers(nn.Dropout(0.1)), squared, f"the second forward {MASKS}"),
        (two_layers(nn.Tanh()), dropping, f"the second forward {MASKS}"),
        (two_layers(nn.BatchNorm1d(8), nn.Dropout(0.5)), squared, f"the second forward {MASKS} and {STATISTICS}"),
        (two_layers(), contrastive, "rows by themselves have other losses than in their batch, so they see each other"),
    ],
    ids=["batchnorm", "batchnorm that does not show", "dropout", "dropout outside the model", "both", "mixing"],
)
def test_recompute_is_not_chosen_where_its_gradient_is_another_one(model, losses, why):
    # Red when: BatchNorm or random numbers are looked for in the losses alone.
    result = planned(model, losses)
    assert {way.engine for way in result.ways if way.gradient == "another"} == {"recompute"}
    assert result.choice.engine != "recompute"
    assert f"is not chosen: {why}, so its gradient is another one" in result.reason


@pytest.mark.parametrize("last", [1.0, torch.nan, torch.inf])
def test_recompute_stays_where_it_is_exact_and_where_a_row_has_no_finite_loss(last: float):
    # Red when: rounding, or a loss that is not finite among the rows that run by themselves, is taken for a difference.
    model, (x, y) = two_layers(nn.Tanh()), (torch.randn(16, 4), torch.randn(16))
    y[-1] = last
    assert second_forward(model, (x, y), squared, squared(model, (x, y)).detach()) is None


def test_a_compiled_model_is_planned_without_a_second_forward():
    # Red when: the model is compiled once more, for K rows.
    model = two_layers(nn.Tanh())
    model.compile(backend="eager")
    assert "recompute left out: the compiled model would be compiled once more" in planned(model, squared).reason


@pytest.mark.parametrize("batchnorm", ["rows", "exact"])
def test_plan_and_verify_name_the_policy_of_sliced_alike(batchnorm: str):
    # Red when: one of the two does not name the gradient of sliced on training BatchNorm, or has other words for it.
    words = "BatchNorm's gradient is projected over the kept rows"
    model, batch = two_layers(nn.BatchNorm1d(8)), (torch.randn(32, 4), torch.randn(32))
    result = plan(model, batch, squared, keep=0.25, batchnorm=batchnorm, rounds=1, seconds=1e-3)
    by_policy = batchnorm == "rows"
    assert {way.gradient for way in result.ways if way.engine == "sliced"} == {"by policy" if by_policy else "same"}
    verdict = rowprop.verify(model, batch, squared, keep=0.25, batchnorm=batchnorm).verdict
    assert (words in verdict) == by_policy
    gradients = {engine: ("by policy", policy) for engine, policy in policies_on(model, batchnorm).items()}
    options = {"num_rows": 100, "keeps": [0.1], "gradients": gradients}
    said = make_plan(PlainStep(10.0, 0.9), {("sliced", 0.1): about(0.2)}, **options).reason
    assert (f"sliced has the gradient of batchnorm='rows': {words}" in said) == by_policy


def test_an_error_of_the_losses_function_passes_through():
    def losses(model, batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        plan(conv(), BATCH, losses)


def test_recompute_holds_the_graph_of_the_kept_rows_only():
    n, width = 512, 32
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(width, width), nn.Tanh())])
    batch = torch.randn(n, width), torch.randn(n, width)
    result = plan(model, batch, lambda m, b: (m(b[0]) - b[1]).square().mean(1), keep=0.25, rounds=1)
    # In activations of a row: 12 in the graph, the difference, and up to 5 more for a while.
    peaks = {way.engine: way.peak_bytes / (width * 4) for way in result.ways}
    assert n * 13 <= peaks["masked"] <= n * 18
    assert n / 4 * 13 <= peaks["recompute"] <= n / 4 * 20


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": len}, "a torch.nn.Module was needed"),
        ({"keep": 1.0}, "a fraction in \\(0, 1\\) was needed"),
        ({"keep": ()}, "no keep, but at least one fraction in \\(0, 1\\) was needed"),
        ({"model": conv().requires_grad_(False)}, "without a parameter that requires a gradient"),
        ({"model": conv().to("meta")}, "a model on the device meta, which holds no numbers"),
        ({"batch": (BATCH[0].to("meta"), BATCH[1])}, "a batch on the device meta, which holds no numbers"),
        ({"seconds": 0}, "plan got seconds=0 but a number above 0 was needed"),
        ({"batch": (BATCH[0][:1], BATCH[1][:1])}, "a batch of 1 row but at least 2 were needed"),
        ({"losses_fn": lambda m, b: losses_of(m, b).detach()}, "The losses have no graph"),
    ],
)
def test_bad_input_is_one_sentence(given, sentence):
    arguments = {"model": conv().eval(), "batch": BATCH, "losses_fn": losses_of} | given
    with pytest.raises(InvalidInput, match=sentence):
        plan(arguments.pop("model"), arguments.pop("batch"), arguments.pop("losses_fn"), **arguments)


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_prints_a_table_and_the_reason_or_one_json_object():
    result = run("model_cases:with_batchnorm", "--input-shape", "8x2x8x8", "--keep", "0.5,0.25", "--rounds", "3")
    assert result.exit_code == 0, result.stderr
    for text in ("N = 8", "a step", "of plain", "quartiles", "recompute", "sliced", "keep 0.5"):
        assert text in result.stdout
    result = run("model_cases:complete", "--json", "--keep", "0.5", "--rounds", "3")
    found = json.loads(result.stdout)
    assert {"ways", "choices", "choice", "reason", "model"} <= found.keys()
    assert {"engine", "limit", "keep", "step_s", "ratio", "low", "high", "peak_bytes"} <= found["ways"][0].keys()
    assert found["choice"] in found["ways"] and found["certainty"].startswith("Rounds measured of each step: 3; ")
    assert found["dispatch"] == building.find()[1] and f"; dispatch: {found['dispatch']}." in found["certainty"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model_cases:complete", "--keep", "half"], "--keep is 'half' but fractions were needed"),
        (["model_cases:complete", "--keep", "1"], "a fraction in (0, 1) was needed"),
        (["model_cases:mlp"], "comes without a batch"),
    ],
)
def test_the_command_refuses_bad_input_with_one_sentence(arguments, sentence):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rowprop: ") and sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
