"""engine="auto": what it chooses under a clock that the test moves, and that it changes no result."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rowprop
from rowprop.batch import take
from rowprop.engines import Auto, Masked, Recompute, Sliced
from rowprop.engines import auto as auto_module
from rowprop.engines.auto import Look, Race
from rowprop.history import LossHistory
from rowprop.step.selective import SelectiveBackprop

N = 32
ENGINES = ("sliced", "recompute", "masked")


@dataclass
class Price:
    """Seconds: of a forward per row with a graph and without, of a backward per row, and of slicing at all."""

    forward: float = 3.0
    scoring: float = 3.0
    backward: float = 6.0
    slicing: float = 0.0

    def step(self, engine: str, kept: int, n: int = N) -> float:
        """The closed formula."""
        return {
            "masked": (self.forward + self.backward) * n,
            "sliced": self.forward * n + self.backward * kept + (self.slicing if kept < n else 0),
            "recompute": self.scoring * n + (self.forward + self.backward) * kept,
        }[engine]

    def all(self, kept: int, engines=ENGINES) -> dict[str, float]:
        """Of each engine."""
        return {engine: self.step(engine, kept) for engine in engines}


def anyhow(*engines) -> Auto:
    """These engines, also where their gradient is another one."""
    return Auto(engines=engines, any_gradient=True)


class World:
    """A clock, a price, a model that costs it, and a training loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.price = Price()
        self.rows_with_graph: list[int] = []
        self.disturbed = {engine: iter(()) for engine in ENGINES}  # seconds more of its next backwards
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        world = self

        @rowprop.rowwise(saved=(), grads=(0, None))
        class Costly(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, graph):
                world.now += len(x) * (world.price.forward if graph else world.price.scoring)
                if graph:
                    world.rows_with_graph.append(len(x))
                ctx.n = len(x)
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                world.now += len(grad) * world.price.backward + (world.price.slicing if len(grad) < ctx.n else 0)
                engine = "recompute" if ctx.n < N else "sliced" if len(grad) < N else "masked"
                world.now += next(world.disturbed[engine], 0.0)
                return grad, None

        self.function = Costly
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, model, batch):
        return self.function.apply(model(batch[0]), torch.is_grad_enabled()).squeeze(1).sub(batch[1]).square()

    def batch(self, seed: int, n: int = N):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator)

    def step(self, selector, **options) -> SelectiveBackprop:
        return SelectiveBackprop(self.model, self.losses, selector, **options)

    def run(self, step: SelectiveBackprop, steps: int, n: int = N) -> list[rowprop.Record]:
        records = []
        for _ in range(steps):
            loss, record = step(self.batch(len(self.rows_with_graph), n))
            loss.backward()
            records.append(record)
        return records

    def measure(self, step: SelectiveBackprop) -> list[rowprop.Record]:
        """Run until it has chosen."""
        return chosen(lambda: self.run(step, 1)[0])


def chosen(run: Callable[[], rowprop.Record]) -> list[rowprop.Record]:
    """Records of steps up to the first choice."""
    records = [run()]
    while records[-1].decision is None:
        records.append(run())
        assert len(records) < 40
    return records


def one_step(step: SelectiveBackprop) -> rowprop.Record:
    """Train a batch of noise."""
    loss, record = step((torch.randn(16, 4), torch.randn(16)))
    loss.backward()
    return record


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.125, 0.25, 0.5625, 0.75, 0.9375])
@pytest.mark.parametrize("price", [Price(), Price(scoring=1), Price(slicing=30), Price(3, 1, 6, 60)], ids=repr)
def test_it_takes_what_the_closed_formula_says_is_fastest(world, price, keep):
    # Red when: the scoring is left out of the cost of recompute, or a close engine is not measured on.
    world.price = price
    step = world.step(rowprop.TopK(keep))
    records = world.measure(step) + world.run(step, 3)
    kept = round(keep * N)
    seconds = price.all(kept)
    close = {engine for engine in ENGINES if seconds[engine] <= auto_module.CLOSE * min(seconds.values())}
    first = next(number for number, record in enumerate(records) if record.decision)
    decided = records[first].decision
    assert decided.predicted_s == pytest.approx(seconds)
    assert decided.engine == min(seconds, key=seconds.get)
    assert (decided.step, decided.kept, decided.num_rows) == (first, kept, N)
    assert {record.engine for record in records[first:]} == {decided.engine}
    assert {record.reason for record in records[first:]} == {decided.reason}
    assert [record.decision for record in records if record.decision] == [decided]

    trials = [record.engine for record in records[:first]]
    assert trials[:5] == ["sliced", *["sliced", "masked"], *["masked", "sliced"]]
    assert records[3].reason == "auto is measuring, round 2 of at most 8"
    counts = {engine: trials[1:].count(engine) for engine in ENGINES}
    if len(close) > 1:  # recompute joins after two rounds
        assert {e: counts[e] for e in close} == {e: 6 if e == "recompute" else 8 for e in close}
    assert all(2 <= counts[engine] <= 4 for engine in ENGINES if engine not in close or len(close) == 1)


def test_close_calls_are_decided_by_the_median_and_a_slow_first_time_does_not_count(world):
    # Red when: the fastest or the mean of noisy steps decides, or an engine is out after one slow step.
    world.price = Price(scoring=2.8)
    world.disturbed["sliced"] = iter([900.0, 0, 0, 40, 40, 0, 0, 0, 900])
    world.disturbed["recompute"] = iter([900.0, -20, 0, 0, 0, 30])
    world.disturbed["masked"] = iter([900.0])
    decided = world.measure(world.step(rowprop.TopK(0.25)))[-1].decision
    assert decided.predicted_s == pytest.approx(world.price.all(8))
    assert all(next(extra, None) is None for extra in world.disturbed.values())


def test_it_turns_itself_off_past_break_even_and_says_so(world):
    world.price = Price(slicing=60)
    record = world.measure(world.step(rowprop.TopK(0.9375)))[-1]
    assert record.engine == "masked"
    assert record.reason == (
        "auto turned itself off, because training on all rows is fastest here: masked takes 288.00 s a step at K = 30 "
        "of 32; sliced takes 336.00 s; recompute takes 366.00 s"
    )


def test_it_follows_k(world):
    # sliced and recompute cost the same where 3 * 32 + 6 k = 32 + 9 k, at K = 21.3. The first look sees 20 steps; 13 of
    # them keep 28 rows. Red when: it sees the steps of the measurement, too.
    world.price = Price(scoring=1)
    keep = [0.25]
    step = world.step(lambda scores: rowprop.TopK(keep[0])(scores))
    assert world.measure(step)[-1].engine == "recompute"
    world.run(step, 6)
    keep[0] = 0.875
    records = world.run(step, auto_module.INTERVAL - 6)
    assert records[-1].engine == "sliced"
    (decided,) = [record.decision for record in records if record.decision]
    assert decided.predicted_s == pytest.approx(world.price.all(28))
    keep[0] = 0.25
    assert world.run(step, 2 * auto_module.INTERVAL)[-1].engine == "recompute"


def test_it_does_not_switch_for_little(world):
    # At K = 22 of 32, sliced is faster than recompute by 1 %.
    world.price = Price(scoring=1)
    keep = [0.25]
    step = world.step(lambda scores: rowprop.TopK(keep[0])(scores))
    assert world.measure(step)[-1].engine == "recompute"
    keep[0] = 22 / 32
    assert world.price.step("sliced", 22) < world.price.step("recompute", 22)
    assert {record.engine for record in world.run(step, 3 * auto_module.INTERVAL)} == {"recompute"}


def test_it_measures_again_where_the_costs_have_moved_and_not_too_often(world, monkeypatch):
    monkeypatch.setattr(auto_module, "PAUSE", 40)
    step = world.step(rowprop.TopK(0.25))
    assert (world.measure(step) + world.run(step, 39))[-1].engine == "sliced"
    world.price = Price(scoring=0.5, forward=6)  # a forward with a graph has become dear
    records = world.run(step, 60)
    decisions = [record.decision for record in records if record.decision]
    assert [d.reason.partition(":")[0] for d in decisions] == ["auto measures again", "auto chose recompute"]
    assert records[-1].engine == "recompute"
    assert decisions[1].predicted_s == pytest.approx(world.price.all(8))
    after = next(number for number, record in enumerate(records) if record.decision) + 1
    assert records[after].reason == "auto is measuring, round 1 of at most 8"  # the step before it has warmed up
    world.price = Price(scoring=9, forward=3)
    records = world.run(step, 200)
    (again,) = [record.step for record in records if record.decision and "again" in record.decision.reason]
    assert again - decisions[0].step >= 2 * auto_module.PAUSE  # the pause doubles
    assert records[-1].engine == "sliced"


def test_a_batch_of_another_size_is_no_measurement(world):
    # Red when: the last, smaller batch of an epoch enters the medians.
    world.price = Price(scoring=1)
    step = world.step(rowprop.TopK(0.5))
    for steps, n in ((3, N), (1, 8), (3, N)):
        world.run(step, steps, n)
    assert world.measure(step)[-1].decision.predicted_s == pytest.approx(world.price.all(16))
    for n in (N, 8, N):
        world.run(step, 19, n)
    assert step.state_dict()["auto"]["watched"]["moved"] is False


def test_batches_that_all_have_become_another_size_are_measured_again(world, monkeypatch):
    # Red when: the costs do not count as moved although no step has the measured size, so nobody measures again.
    monkeypatch.setattr(auto_module, "PAUSE", 40)
    step = world.step(rowprop.TopK(0.5))
    world.measure(step)
    records = world.run(step, 100, 16)
    decisions = [record.decision for record in records if record.decision]
    assert [d.reason.partition(":")[0] for d in decisions][:2] == ["auto measures again", "auto chose sliced"]
    assert decisions[1].num_rows == 16
    assert decisions[1].predicted_s == pytest.approx({e: world.price.step(e, 8, 16) for e in decisions[1].predicted_s})


def test_one_step_of_another_k_switches_nothing(world):
    # Two of three steps keep 8 of 32 rows, where recompute is best; the third keeps 28, where sliced is best. Red when:
    # the K of the last step decides, and not the middle one.
    world.price = Price(scoring=1)
    keeps = itertools.cycle([0.25, 0.25, 0.875])
    step = world.step(lambda scores: rowprop.TopK(next(keeps))(scores))
    assert world.measure(step)[-1].engine == "recompute"
    records = world.run(step, 10 * auto_module.INTERVAL)
    assert {record.engine for record in records} == {"recompute"}


def test_batches_that_alternate_in_size_do_not_hide_an_engine(world):
    # Red when: an engine that ran on the other size counts as slow, or an engine always meets the same size.
    world.price = Price(slicing=60)
    step = world.step(rowprop.TopK(0.9375))
    sizes = iter([N, 24] * 20)
    decided = chosen(lambda: world.run(step, 1, next(sizes))[0])[-1].decision
    assert decided.engine == "masked" and decided.predicted_s.keys() >= {"masked", "sliced"}
    assert decided.predicted_s["masked"] == pytest.approx(world.price.step("masked", 0, decided.num_rows))


def test_an_engine_whose_first_steps_had_no_backward_is_not_a_slow_one(world):
    # Red when: an engine leaves the measurement although none of its steps was seen.
    world.price = Price(slicing=60)
    step = world.step(rowprop.TopK(0.9375))
    without = iter([1, 1, 1])

    def run():
        loss, record = step(world.batch(0))
        if record.engine != "masked" or next(without, None) is None:
            loss.backward()
        return record

    assert chosen(run)[-1].engine == "masked"


def test_it_chooses_among_the_engines_that_it_is_given(world):
    records = world.measure(world.step(rowprop.TopK(0.25), engine=anyhow("masked", "sliced")))
    assert [record.engine for record in records] == ["masked", "masked", "sliced", "sliced", "masked", "sliced"]
    assert "recompute" not in records[-1].decision.predicted_s
    # Without masked, the line of sliced goes through K = 0, where the backward is free.
    records = world.measure(world.step(rowprop.TopK(0.25), engine=anyhow("sliced", "recompute")))
    turns = ["sliced", "recompute", "recompute", "sliced"]  # who comes first changes
    assert [record.engine for record in records] == ["sliced"] * 3 + turns * 3 + ["sliced"]
    assert records[-1].decision.predicted_s == pytest.approx(world.price.all(8, ("sliced", "recompute")))


def raced(world: World, race: Race) -> Race:
    """Train with a race until it has chosen."""
    for number in itertools.count():
        assert number < 40
        batch = world.batch(number)
        engine = race.before(number, Look(world.model, batch, N, world.losses), torch.device("cpu"))
        losses = None
        if engine.one_forward:
            losses = world.losses(world.model, batch)
            race.compare(losses)
        else:
            with torch.no_grad():
                world.losses(world.model, batch)
            race.scored()
        selection = rowprop.TopK(0.25)(torch.arange(float(N)))
        forward = lambda rows, batch=batch: world.losses(world.model, take(batch, rows))  # noqa: E731
        loss = engine.kept_losses(selection, losses, forward).mean()
        race.after(loss, 8, N)
        if race.decision is not None:
            return race
        loss.backward()


class Indexed(Masked):
    """An engine of a user's own: one forward, and the backward of all rows."""

    name = "indexed"

    def kept_losses(self, selection, losses, forward):
        return losses.index_select(0, selection.rows)


class Again(Recompute):
    """An engine of a user's own: a second forward."""

    name = "again"


def test_engines_of_the_users_own_race_like_the_others(world):
    # Red when: the race knows a second forward, or a plain step, by the name of the engine.
    race = raced(world, Race(Auto(engines=(Indexed(), "sliced", Again(), "masked"))))
    seconds = world.price.all(8)
    line = race.state_dict()["learned"]["costs"]["again"]
    assert line["fixed_s"] + line["per_row_s"] * N == pytest.approx(world.price.step("recompute", N))
    assert race.decision.predicted_s == pytest.approx(
        {"indexed": seconds["masked"], "sliced": seconds["sliced"], "again": seconds["recompute"]}
        | {"masked": seconds["masked"]}
    )
    world.model.append(nn.Dropout(0.1))
    race = raced(world, Race(Auto(engines=(Again(), "sliced"))))
    assert race.decision.predicted_s.keys() == {"sliced"}
    assert f"again left out: the second forward {DROPOUT}, so its gradient is another one" in race.reason


def test_a_second_forward_that_is_barred_never_runs(world):
    # Red when: the race forgets what the step knows beforehand, or heeds it where any gradient will do.
    race = raced(world, Race(Auto(), barred="a history would miss losses"))
    assert race.decision.predicted_s.keys() == {"sliced", "masked"}
    assert race.reason.endswith("; recompute left out: a history would miss losses")
    race = raced(world, Race(Auto(any_gradient=True), barred="a history would miss losses"))
    assert race.decision.predicted_s.keys() == set(ENGINES)


def test_a_state_can_be_loaded_twice(world):
    # Red when: two races share the lists of the state that they loaded.
    step = world.step(rowprop.TopK(0.25))
    world.run(step, 2)
    state = step.state_dict()
    before = copy.deepcopy(state)
    for _ in range(2):
        other = world.step(rowprop.TopK(0.25))
        other.load_state_dict(state)
        world.run(other, 5)
    assert state == before


def test_a_scorer_of_the_users_is_charged_to_every_engine_and_not_called_twice(world):
    calls = []

    def scorer(model, batch):
        calls.append(1)
        world.now += 50
        return batch[1]

    step = world.step(rowprop.TopK(0.25), scorer=scorer)
    records = world.measure(step)
    assert len(calls) == len(records)
    price = Price()
    assert records[-1].decision.predicted_s == pytest.approx(
        {"sliced": 50 + price.step("sliced", 8), "masked": 50 + price.step("masked", 8), "recompute": 50 + 9 * 8}
    )
    line = step.state_dict()["auto"]["learned"]["costs"]["recompute"]
    assert line["fixed_s"] + line["per_row_s"] * N == pytest.approx(50 + 9 * N)


def test_steps_outside_the_schedule_are_not_counted(world):
    inside = len(world.measure(world.step(rowprop.TopK(0.25))))
    schedule = rowprop.Schedule(0.0, 1.0, interrupt=2)
    records = world.run(world.step(rowprop.TopK(0.25), schedule=schedule, total_steps=100), 2 * inside - 1)
    assert [record.decision is None for record in records] == [True] * (2 * inside - 2) + [False]


# --- the result -------------------------------------------------------------------------------------------------------


def noisy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def squared(model, batch):
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def trained(model: nn.Module, steps: int, **options) -> tuple[list, torch.Tensor, list]:
    """Train; returns everything that is left, and the records."""
    torch.manual_seed(1)
    step = SelectiveBackprop(model, squared, rowprop.RankSampling(0.25), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    records = []
    for _ in range(steps):
        loss, record = step((torch.randn(16, 4), torch.randn(16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        records.append(record)
    return list(model.state_dict().values()), torch.get_rng_state(), records


@pytest.mark.parametrize(
    ("model", "engine", "tried"),
    [
        (noisy, Auto(engines=(Sliced("exact"), "recompute", "masked")), {"masked", "sliced"}),
        (noisy, anyhow(Sliced("exact"), "masked"), {"masked", "sliced"}),
        (plain_model, "auto", {"masked", "sliced", "recompute"}),
    ],
    ids=["noisy", "named", "plain"],
)
def test_nothing_of_it_shows_in_the_result(model, engine, tried):
    # Dropout, BatchNorm and a random selector: the same rows, random numbers, statistics and weights as plain indexing.
    # Red when: a probe draws, moves a statistic or leaves a gradient.
    ours, our_rng, records = trained(model(), 40, engine=engine)
    theirs, rng, expected = trained(model(), 40, engine="masked")
    assert {record.engine for record in records} == tried
    assert torch.equal(our_rng, rng)
    for ours_, theirs_ in zip(records, expected, strict=True):
        assert torch.equal(ours_.selection.rows, theirs_.selection.rows)
        torch.testing.assert_close(ours_.loss_all, theirs_.loss_all, rtol=1e-4, atol=1e-6)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def contrastive(model, batch):
    out = model(batch[0])
    return (out - out.mean(0)).square().squeeze(1)  # rows that see each other


def dropping(model, batch):
    return squared(lambda x: model(nn.functional.dropout(x, 0.1)), batch)


def fresh_conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 1),
    )  # fmt: skip


def zeroed() -> nn.Module:
    """A last layer of zeros: nothing of what is before it shows in the losses."""
    model = fresh_conv()
    nn.init.zeros_(model[-1].weight)
    return model


BATCHNORM, DROPOUT = "takes batch statistics from the kept rows only", "draws other dropout masks"


@pytest.mark.parametrize(
    ("model", "losses", "why"),
    [
        (lambda: noisy()[0:2].append(nn.Linear(8, 1)), squared, f"the second forward {BATCHNORM}"),
        (zeroed, squared, f"the second forward {BATCHNORM}"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)), squared, DROPOUT),
        (plain_model, dropping, DROPOUT),
        (noisy, squared, f"the second forward {DROPOUT} and {BATCHNORM}"),
        (plain_model, contrastive, "rows by themselves have other losses than in their batch, so they see each other"),
    ],
    ids=["batchnorm", "batchnorm that does not show", "dropout", "dropout outside the model", "both", "mixing"],
)
def test_recompute_is_left_out_where_its_gradient_is_another_one(model, losses, why):
    # Red when: BatchNorm or random numbers are looked for in the losses alone; and plan must say the same as auto.
    def decision(engine):
        torch.manual_seed(0)
        step = SelectiveBackprop(model(), losses, rowprop.TopK(0.25), engine=engine)
        return chosen(lambda: one_step(step))[-1].decision

    decided = decision("auto")
    assert decided.predicted_s.keys() == {"sliced", "masked"}
    assert f"{why}, so its gradient is another one" in decided.reason and "recompute left out: " in decided.reason
    assert "recompute" in decision(anyhow("sliced", "recompute")).predicted_s  # any gradient will do

    batch = torch.randn(16, 4), torch.randn(16)
    plan = rowprop.plan(model(), batch, losses, keep=0.25, rounds=1)
    assert {way.engine for way in plan.ways if way.gradient == "another"} == {"recompute"}
    assert plan.choice.engine != "recompute"
    assert f"is not chosen: {decided.reason.partition('recompute left out: ')[2].partition('; ')[0]}" in plan.reason


@pytest.mark.parametrize("batchnorm", ["rows", "exact"])
def test_auto_plan_and_verify_name_the_policy_of_sliced_alike(world, batchnorm):
    # Red when: one of the three does not name the gradient of sliced on training BatchNorm, or has other words for it.
    world.price = Price(forward=1e-3, scoring=1, backward=6e-3)
    world.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    words = "BatchNorm's gradient is projected over the kept rows"
    chosen_ = world.measure(world.step(rowprop.TopK(0.25), engine=Auto(engines=(Sliced(batchnorm), "masked"))))[-1]
    assert chosen_.engine == "sliced"
    planned = rowprop.plan(world.model, world.batch(0), world.losses, keep=0.25, batchnorm=batchnorm, rounds=1)
    assert {way.gradient for way in planned.ways if way.engine == "sliced"} == {
        "by policy" if batchnorm == "rows" else "same"
    }
    verdict = rowprop.verify(world.model, world.batch(0), world.losses, keep=0.25, batchnorm=batchnorm).verdict
    said = [chosen_.reason, planned.reason, verdict]
    assert [words in sentence for sentence in said] == [batchnorm == "rows"] * 3
    policy = f"sliced has the gradient of batchnorm='rows': {words}"
    assert [policy in sentence for sentence in said[:2]] == [batchnorm == "rows"] * 2


@pytest.mark.parametrize(("apart", "exact"), [(2e-3, False), (5e-4, True)])
def test_losses_that_differ_by_more_than_a_thousandth_are_others(apart, exact):
    # Rows by themselves have losses larger by this share. Red with a tolerance of 1e-2, or of 1e-4.
    def losses(model, batch):
        return squared(model, batch) * (1 if len(batch[0]) == 16 else 1 + apart)

    torch.manual_seed(0)
    step = SelectiveBackprop(plain_model(), losses, rowprop.TopK(0.25))
    decided = chosen(lambda: one_step(step))[-1].decision
    assert ("recompute" in decided.predicted_s) is exact


def test_a_model_that_is_too_small_is_told_so(world):
    # Plain steps of 2.88 ms: 32 rows at 90 us. Past break-even the keep is too large, not the model too small.
    # Red when: the sentence is left out, or is said of every model with which auto turns itself off.
    world.price = Price(3e-5, 9e-5, 6e-5, slicing=2e-3)
    small = world.measure(world.step(rowprop.TopK(0.25)))[-1].reason
    assert small.endswith(
        "the model is too small for selecting to pay here, which is expected of a toy model: a step this short is "
        "mostly the fixed cost of calling ops, and fewer rows do not lower it"
    )
    assert small.startswith(
        "auto turned itself off, because training on all rows is fastest here: masked takes 2.88 ms"
    )
    assert "too small" not in world.measure(world.step(rowprop.TopK(0.9375)))[-1].reason
    world.price = Price(scoring=9, slicing=200)
    large = world.measure(world.step(rowprop.TopK(0.25)))[-1]
    assert large.engine == "masked" and "too small" not in large.reason


def test_recompute_stays_where_it_is_exact():
    # Red when: rounding is taken for a difference.
    step = SelectiveBackprop(plain_model(), squared, rowprop.TopK(0.25))
    decided = chosen(lambda: one_step(step))[-1].decision
    assert decided.predicted_s.keys() == set(ENGINES)


def test_a_row_without_a_finite_loss_is_no_reason_to_leave_recompute_out():
    step = SelectiveBackprop(plain_model(), squared, rowprop.TopK(0.25), nonfinite="drop")

    def run():
        x = torch.randn(16, 4)
        x[-1] = torch.nan  # among the rows that run by themselves
        loss, record = step((x, torch.randn(16)))
        loss.backward()
        return record

    torch.manual_seed(0)
    assert chosen(run)[-1].decision.predicted_s.keys() == set(ENGINES)


def test_recompute_is_left_out_where_a_history_would_miss_losses():
    # Red when: a history gets no losses of the rows that were not kept.
    history = LossHistory(16)
    step = SelectiveBackprop(
        plain_model(), squared, rowprop.TopK(0.25), history=history, scorer=lambda model, batch: batch[1]
    )

    def run():
        loss, record = step((torch.randn(16, 4), torch.randn(16)), ids=torch.arange(16))
        loss.backward()
        assert record.loss_all.isfinite()
        return record

    torch.manual_seed(0)
    assert chosen(run)[-1].decision.predicted_s.keys() == {"sliced", "masked"}


def test_a_model_that_fails_on_fewer_rows_is_trained_all_the_same():
    def losses(model, batch):
        return model(batch[0].reshape(16, 4)).squeeze(1).square()

    step = SelectiveBackprop(plain_model(), losses, rowprop.TopK(0.25))
    record = chosen(lambda: one_step(step))[-1]
    assert "recompute left out: 4 rows by themselves failed with RuntimeError" in record.decision.reason


def test_without_a_backward_it_stays_sliced():
    step = SelectiveBackprop(plain_model(), squared, rowprop.TopK(0.25))
    records = [step((torch.randn(16, 4), torch.randn(16)))[1] for _ in range(3 * auto_module.INTERVAL)]
    assert records[-1].engine == "sliced"
    assert records[-1].reason == "auto took sliced: no backward was seen"
    with torch.no_grad():
        assert step((torch.randn(16, 4), torch.randn(16)))[1].engine == "sliced"


def test_a_backward_in_two_parts_is_watched_once(world):
    step = world.step(rowprop.TopK(0.25))
    world.run(step, 1)  # to warm up
    loss, _ = step(world.batch(0))
    loss.backward(retain_graph=True)
    world.now += 1e6
    loss.backward()
    step(world.batch(1))
    (seen,) = step.state_dict()["auto"]["watched"]["seen"]
    assert seen["seconds"] == pytest.approx(Price().step("sliced", 8))


# --- its state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [2, 5, 30, 45])
def test_it_goes_on_where_it_was_saved(world, monkeypatch, stop):
    # Red when: the state lacks a number that a decision rests on.
    keep = [0.25]

    def selector(scores):
        return rowprop.TopK(keep[0])(scores)

    def trace(saved: bool) -> list:
        keep[0] = 0.25
        world.price = Price(scoring=1)
        step = world.step(selector)
        records = world.run(step, stop)
        if saved:
            file = io.BytesIO()
            torch.save(step.state_dict(), file)
            file.seek(0)
            step = world.step(selector)
            step.load_state_dict(torch.load(file, weights_only=True))
        records += world.run(step, 50 - stop)
        keep[0] = 0.875
        records += world.run(step, 60)
        return [(record.step, record.engine, record.reason) for record in records]

    assert trace(saved=True) == trace(saved=False)


@pytest.mark.parametrize("stop", [0, 1, 4, 7, 30])
@pytest.mark.parametrize("engine", [anyhow("masked", "recompute"), anyhow("sliced", "masked"), "masked"])
def test_a_state_of_another_choice_loads(world, engine, stop):
    # Red when: a race loads the state of another race, and runs an engine that it does not have.
    step = world.step(rowprop.TopK(0.5))
    world.run(step, stop)
    other = world.step(rowprop.TopK(0.5), engine=engine)
    other.load_state_dict(step.state_dict())
    assert {record.engine for record in world.run(other, 30)} <= (
        {engine} if isinstance(engine, str) else set(engine.engines)
    )
    step.load_state_dict(other.state_dict())
    world.run(step, 1)


def test_copies_do_not_share_what_was_measured(world):
    step = world.step(rowprop.TopK(0.25))
    world.measure(step)
    twin = copy.deepcopy(step)
    before = step.state_dict()["auto"]
    world.run(twin, 30)
    assert step.state_dict()["auto"] == before


def test_watching_never_waits_for_the_device():
    # Red when: the step asks the device anything between two measurements (a fake tensor has nothing to answer).
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(3, 1))
        step = SelectiveBackprop(
            weight.__rmatmul__, lambda model, batch: model(batch).squeeze(1), rowprop.TopK(0.3), nonfinite="keep"
        )
        for _ in range(30):
            loss, record = step(torch.empty(10, 3))
            loss.backward()
    assert "recompute left out: the model is a " in record.reason and record.num_kept == 3
