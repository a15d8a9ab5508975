"""Where thinning turns itself off: the counted work, the cheapest draws by brute force, and what a handle does then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop.errors import InvalidInput
from rowprop.thinning import worth
from rowprop.thinning.control import RENEWED_AFTER, Control
from rowprop.thinning.worth import COSTS, Costs, Work, Worth, cheapest, work_below
from thinning_models import Checkpointed, Residual, gradient, layers, of_blocks, resumed
from zoo import seq

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 16
NOTHING = Costs(0, 0, 0, 0)
WORK = 3 * 2 * 2 * (2 * ROWS * 4 * 4)  # of three residual blocks: two layers each, of which each has two products


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Small models are as large ones: Python costs nothing, or what is said."""
    return lambda **given: monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, **given))


def residuals(count: int = 3) -> nn.Module:
    return nn.Sequential(*(Residual(4) for _ in range(count)))


def few(large: int = 2, rows: int = ROWS) -> Tensor:
    """Factors of losses of which a few rows hold nearly all."""
    return torch.full((rows,), 1e-3).index_fill(0, torch.arange(large), 1.0)


def works_of(model: nn.Module, x: Tensor) -> list[Work]:
    """The work below each child."""
    works, last = list[Work](), -1
    for block in model.children():
        x = block(x)
        work, last = work_below(x, last)
        works.append(work)
    return works


def attention(x: Tensor) -> Tensor:
    """Products of activations with activations."""
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: of_blocks(*(nn.Linear(6, 6) for _ in range(3))), (6,)),
    "tokens": (residuals, (5, 4)),
    "attention": (lambda: seq(nn.Linear(6, 6), attention, attention), (5, 6)),
    "cnn": (lambda: of_blocks(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 6, 3)), (2, 9, 9)),
    "transformer": (lambda: nn.Sequential(nn.Linear(3, 8), *layers(3, 8)), (5, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_work_is_the_counted_flops_of_the_backward(name: str, costs: Callable[..., None]):
    # Red where a product counts for one factor alone, and where the bound `last` is not kept: blocks count twice.
    costs()
    model, x = MODELS[name][0](), torch.randn(ROWS, *MODELS[name][1])
    works, loss = works_of(model, x), model(x).sum()
    with rowprop.cost.count_flops() as flops:
        loss.backward()
    assert not flops.uncounted
    assert sum(work.exact for work in works) == flops.total_flops
    assert all(work.exact for work in works)


def test_the_work_that_stays_at_all_tokens_is_that_of_keys_and_values(costs: Callable[..., None]):
    # Of a layer the projection that makes queries, keys and values in one. Red where that of the output, or the MLP,
    # counts as well.
    costs()
    x = torch.randn(ROWS, 5, 8, requires_grad=True)
    for work in works_of(nn.Sequential(*layers(2, 8)), x):
        assert work.mixed == 2 * 2 * ROWS * 5 * 8 * 24 < work.exact


def test_queries_with_a_projection_of_their_own_cost_the_drawn_tokens(costs: Callable[..., None]):
    # Red where what made the queries counts as what made keys and values.
    costs()
    make = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(ROWS, 5, 8, requires_grad=True)
    q, k, v = (one(x).unflatten(2, (2, 4)).transpose(1, 2) for one in make)
    out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    assert work_below(out, -1)[0].mixed == 2 * (2 * 2 * ROWS * 5 * 8 * 8)  # two projections, two products each


def test_a_checkpoint_is_work_of_unknown_size():
    # Red where a Function of Python counts as an op without products.
    inside: Any = checkpoint(nn.Linear(4, 4), torch.randn(ROWS, 4, requires_grad=True), use_reentrant=True)
    assert work_below(inside, -1)[0].exact >= worth.UNKNOWN


def test_the_work_is_a_mean_over_the_forwards_that_forgets():
    # Red where the work of the last forward stands for all: one of 2 rows, or one that skips a block, decides.
    block, decided = nn.Linear(4, 4), Worth()

    def counted(forward: int, rows: int) -> tuple[float, float]:
        decided.count("a", below := block(torch.randn(rows, 4)), forward)
        if forward % 2:
            decided.count("b", block(below), forward)
        decided.decide({"a": 1.0, "b": 1.0}, 1.0)
        return decided.works["a"].by_row, decided.works["b"].by_row

    whole = work_below(block(torch.randn(30, 4)), -1)[0].by_row
    found = [counted(forward, 30) for forward in range(1, 41)]
    assert found[-1] == (pytest.approx(whole), pytest.approx(whole / 2, rel=0.2))
    assert counted(41, 2)[0] > 0.6 * whole
    assert [counted(forward, 60) for forward in range(42, 82)][-1][0] == pytest.approx(2 * whole, rel=0.01)


def test_a_part_that_runs_in_a_backward_is_counted_whole():
    # There nodes are numbered anew on a device. Red where they are compared with those of the forward: no work.
    block = nn.Linear(4, 4)
    inside, before = block(torch.randn(ROWS, 4)), block(torch.randn(ROWS, 4))
    decided = Worth()
    decided.count("a", before, 1)
    decided.count("b", inside, 1, 7)
    assert decided.counted["b"] == work_below(inside, -1)[0] == decided.counted["a"]


def counted(works: dict[str, Work]) -> Worth:
    """A decider that has counted one forward."""
    return Worth(counted=works, forwards=1)


def cost_of(works: list[Work], shares: list[float], drawn: tuple[int, ...], part: float) -> float:
    """The backward's cost, block by block."""
    total, share, sliced = 0.0, 1.0, part < 1
    for number, work in enumerate(works):
        if number in drawn and shares[number] < share:
            total += work.draw
            share, sliced = shares[number], True
        total += work.fixed + part * share * work.by_row if sliced else work.exact
    return total


@pytest.mark.parametrize("part", [1.0, 0.3])
def test_the_draws_are_the_cheapest_of_all_sets(part: float):
    # Red where a place is judged by its own block alone (greedily), and where `fixed` is left out.
    generator, sizes = torch.Generator().manual_seed(0), set[int]()
    every = [drawn for size in range(6) for drawn in combinations(range(5), size)]
    for _ in range(60):
        numbers = torch.rand(5, 4, generator=generator).tolist()
        works = [Work(exact, fixed / 3, 1.2 * exact, draw / 2) for exact, fixed, draw, _ in numbers]
        shares = [row[3] for row in numbers]
        least = min(cost_of(works, shares, drawn, part) for drawn in every)
        found = cheapest(works, shares, part)
        sizes.add(len(found))
        assert cost_of(works, shares, found, part) == pytest.approx(least)
    assert len(sizes) >= 3, "the cases are all alike"


def test_shares_are_of_the_rows_that_arrive_and_of_all_tokens():
    # Red where the shares of rows are not multiplied: the second block seems to save nothing; and where a block takes
    # over the share of the tokens of the one above, which draws none.
    decided = counted({name: Work(exact=100.0, by_row=100.0, draw=1.0) for name in "01"})
    decided.decide({"0": 0.5, "1": 0.5}, 1.0)
    assert decided.left == []
    decided = Worth("token", counted={name: Work(100.0, 0.0, 100.0, 10.0, 40.0) for name in "01"}, forwards=1)
    decided.decide({"0": 0.5, "1": 0.9}, 1.0)  # 10 + 40 + .5 * 60 and 10 + 40 + .9 * 60
    assert (decided.left, decided.share("0", {"0": 0.5, "1": 0.9}.__getitem__)) == (["1"], 0.5)


def test_pauses_grow_until_trials_cost_little():
    # Red where the first pause is the longest: a fine-tuning of few steps is over before its shares fall. A trial of
    # the forwards up to a renewal takes as long as some draws, and comes to take a twentieth of the time.
    decided, pauses = counted({"0": Work(exact=1000.0, by_row=1000.0, draw=300.0)}), list[int]()
    for share in (1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 1.0):
        decided.decide({"0": share}, 1.0)
        pauses.append(decided.pause)
    first, second, third, longest, still, drawn, again = pauses
    assert (second, third, drawn, again, still) == (2 * first, 4 * first, 0, first, longest)
    assert worth.WAKES * 300 / ((longest + RENEWED_AFTER) * 1000) == pytest.approx(worth.TRIALS)
    hopeless, pauses = counted({"0": Work(exact=100.0, by_row=100.0, draw=300.0)}), []
    for _ in range(2):
        hopeless.decide({"0": 1e-9}, 1.0)
        pauses.append(hopeless.asleep)
    assert pauses == [first, worth.MOST]  # the first batch may be an odd one


def test_a_state_with_work_of_no_forward_is_refused():
    # Red without the check: the next decision divides by 0.
    state = counted({"0": Work(exact=1.0)}).state_dict()
    with pytest.raises(InvalidInput, match="forwards=0"):
        Worth().restored({**state, "forwards": 0.0})


def test_a_small_model_turns_itself_off_and_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    # Red where `sleeping` is always false (hooks on the tensors), and where `asleep` is never counted down.
    monkeypatch.setattr(worth, "MOST", 20)
    model, x, outputs = residuals(), torch.randn(ROWS, 4), list[Tensor]()

    def loss() -> Tensor:
        return (model(x).square().mean(1) * few()).sum()

    exact = gradient(model, loss())
    handle = rowprop.thin(model)
    model[1].register_forward_hook(lambda _, __, output: outputs.append(output))
    for number in range(1, 61):
        torch.testing.assert_close(gradient(model, loss()), exact, rtol=0, atol=0)
        assert handle.record.passes == sum(bool(output._backward_hooks) for output in outputs)
        if number in (1, 15, 60):  # trials: the first one, after a short pause, and after the longest
            assert handle.record.passes == {1: 1, 15: 2, 60: 8}[number]
    assert handle.record.reason.startswith("off for 20 forwards, since draws would cost more than they save")
    assert handle.record.keep == {"2": 1.0, "1": 1.0, "0": 1.0} and handle.record.ratio == 0


def test_a_trial_that_finds_fewer_rows_needed_turns_it_on(costs: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    # Red where a decision stands for ever, and where the record of a backward that ended in a pause tells its draws. At
    # even losses nearly all rows are needed, and no draw pays.
    costs(op=50.0, draw=200.0)
    monkeypatch.setattr(worth, "MOST", 20)
    model, x = residuals(), torch.randn(ROWS, 4).sign()
    handle = rowprop.thin(model)
    for steps, scale, drawn in ((20, torch.ones(ROWS), False), (100, few(), True), (150, torch.ones(ROWS), False)):
        for _ in range(steps):
            (model(x).square().mean(1) * scale).sum().backward()
            if handle._worth.pause:
                assert set(handle.record.keep.values()) == {1.0}
                assert handle.record.reason.startswith(f"off for {handle._worth.pause} forwards")
        assert (min(handle.record.keep.values()) < 0.5) is drawn, handle.record
        assert (handle._worth.pause > 0) is not drawn


def test_no_draw_where_a_block_saves_less_than_its_draw(costs: Callable[..., None]):
    # Red where `_choose` does not ask `draws()`: each block draws. And where `share()` forgets the blocks above.
    costs(draw=WORK / 4)
    model, x, scale = residuals(), torch.randn(ROWS, 4), torch.logspace(0, -3, ROWS)
    handle = rowprop.thin(model, tau=0.1)

    def kept() -> list[float]:
        gradient(model, (model(x).square().mean(1) * scale).sum())
        return list(handle.record.keep.values())

    shares = [kept() for _ in range(9)][-1]
    assert "no draw after 1, 0, where it would cost more than it saves" in handle.record.reason
    assert shares == [shares[0]] * 3 and shares[0] < 0.5
    for place, share in {"2": 0.75, "1": 0.5, "0": 0.25}.items():
        handle._control.shares[place].keep = share
    assert kept() == [0.75, 0.75, 0.75]
    handle._worth.left = ["1"]  # the block below it stands in for it, so that the shares multiply
    handle._control.shares["2"].keep = 1.0
    assert kept() == [1.0, 1.0, 0.125]


def test_rows_that_a_pick_left_out_save_nothing(costs: Callable[..., None]):
    # Red where `part` is always 1.
    costs(draw=WORK / 4)
    model, x, off = residuals(), torch.randn(ROWS, 4), list[bool]()
    for rows in (ROWS, 2):
        handle = rowprop.thin(model)
        for _ in range(8):
            rowprop.pick(model(x).square().mean(1) * few(1), torch.arange(rows)).sum().backward()
        off.append(len(handle._worth.left) == 3)
        handle.remove()
    assert off == [False, True]


@pytest.mark.parametrize("small", ["each 16th", "forwards", "first"])
def test_a_small_batch_does_not_turn_it_off(small: str, costs: Callable[..., None]):
    # Each 16th backward renews the shares. Red where the work of the last forward stands for all, or that of the first
    # one decides twice: off for 1,024.
    costs(op=100.0, draw=1000.0)
    model, drawn = residuals(4), 0
    handle = rowprop.thin(model, tau=0.1)
    for number in range(1, 50):
        rows = 2 if small == ("first" if number == 1 else "each 16th" if number % 16 == 0 else "") else 64
        loss = (model(torch.randn(rows, 4)).square().mean(1) * few(4, 64)[-rows:]).sum()
        if small == "forwards":
            model(torch.randn(2, 4))
        gradient(model, loss)
        drawn += min(handle.record.keep.values()) < 0.5
    assert drawn > 30


@pytest.mark.parametrize(("reentrant", "size"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_checkpoints_leave_order_and_work_as_they_are(reentrant: bool, size: int, costs: Callable[..., None]):
    # Red where a place stands in the order in which it became known, from the top down with reentrant ones, and where
    # a block that runs again counts twice.
    costs()
    found: list[dict[str, float]] = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        layers = Checkpointed(*residuals(4), reentrant=kind, size=size)
        model = nn.Sequential(nn.Linear(4, 4), layers, nn.Linear(4, 4))
        handle = rowprop.thin(model, tau=0.2, blocks=[f"1.layers.{number}" for number in range(4)])
        for _ in range(9):
            gradient(model, (model(torch.randn(ROWS, 4)).square().mean(1) * torch.logspace(0, -3, ROWS)).sum())
        found.append({place: work.exact for place, work in handle._worth.works.items()})
        assert list(handle._control.shares) == list(handle._worth.works) == list(handle.blocks)
        assert min(handle.record.keep.values()) < 1
        del found[-1]["1.layers.0"]  # below it, a reentrant checkpoint hides the first layer
    assert found[1] == found[0]


def repeated(reentrant: bool | None = None) -> nn.Module:
    return Checkpointed(Residual(4), times=5, reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_block_that_runs_several_times_has_the_work_of_all(reentrant: bool | None, costs: Callable[..., None]):
    # Red where a reentrant checkpoint's second block is taken for a block that runs again: a fifth of the work.
    costs()
    handle = rowprop.thin(model := repeated(reentrant), blocks=["layers.0"])
    gradient(model, model(torch.randn(ROWS, 4, requires_grad=True)).square().sum())
    alone = work_below(Residual(4)(torch.randn(ROWS, 4, requires_grad=True)), -1)[0].exact
    assert handle._worth.works["layers.0"].exact == pytest.approx(5 * alone)


def test_a_checkpoint_around_the_model_with_other_rows_is_another_forward():
    # Red where a reentrant one, after a plain forward, keeps this one's number of rows: no dimension would fit.
    model = residuals()
    handle = rowprop.thin(model, keep=0.5)
    gradient(model, model(torch.randn(6, 4)).square().sum())
    gradient(model, checkpoint(model, torch.randn(8, 4, requires_grad=True), use_reentrant=True).square().sum())
    assert handle.record.keep == {"2": 0.5, "1": 0.5, "0": 0.5}
    assert handle._forward.num_rows == 8


def test_a_block_that_does_nothing_turns_off():
    # Red where a trial's time is divided by the work of such blocks, 0.
    model = nn.Sequential(nn.Flatten(), nn.Flatten(), nn.Linear(4, 2))
    handle = rowprop.thin(model, blocks=["0", "1"])
    x = torch.randn(ROWS, 4, requires_grad=True).view(ROWS, 4)  # below a leaf there is no backward
    gradient(model, model(x).square().sum())
    assert handle.record.reason.startswith(f"off for {worth.MOST} forwards")


@pytest.mark.parametrize("backwards", [2, 4])
def test_a_backward_whose_forward_was_before_the_pause_decides_nothing(backwards: int):
    # Red where it counts as a trial: the second pause would follow in the first step.
    handle = rowprop.thin(model := residuals())
    value = (model(torch.randn(ROWS, 4)).square().mean(1) * few()).sum()
    for _ in range(backwards):
        value.backward(retain_graph=True)
    assert (handle._worth.pause, handle.record.passes) == (8, 1)


def frozen() -> nn.Module:
    model = residuals(6)
    model[:4].requires_grad_(False)
    return model


def through_blocks(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = block(x)
    return x


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (frozen, lambda model, x: model(x)),
        (repeated, lambda model, x: model(x)),
        (frozen, through_blocks),
        (frozen, lambda model, x: checkpoint(model, x, use_reentrant=False)),
    ],
    ids=["frozen", "repeated", "outside", "checkpoint"],
)
def test_a_pause_is_as_long_as_it_is_told(make: Callable[[], nn.Module], call: Callable[..., Tensor]):
    # Red where calls of blocks are counted down: those of frozen blocks, and all calls of a block that repeats.
    model = make()
    handle = rowprop.thin(model, blocks=["layers.0"] if make is repeated else None)
    passes: list[int] = []
    for _ in range(20):
        gradient(model, call(model, torch.randn(ROWS, 4)).square().sum())
        passes.append(handle.record.passes)
    assert passes == [1] * 9 + [2] * 11, "a pause of 8 forwards, and a trial of one"
    assert handle._worth.asleep == handle._worth.pause - 10


@pytest.mark.usefixtures("as_accelerator")
def test_a_trial_decides_by_numbers_of_its_own(costs: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    # On a device, where the last backwards before a pause are read late. Red where they are read in the trial.
    costs(op=50.0, draw=200.0)
    decided: list[tuple[int, int]] = []
    handle = rowprop.thin(model := residuals())
    control, own = handle._control, Worth.decide
    monkeypatch.setattr(Worth, "decide", lambda *a: decided.append((control.begun, control.passes)) or own(*a))
    for _ in range(40):
        gradient(model, model(torch.randn(ROWS, 4).sign()).square().sum())
    assert decided[0] == (3, 1)
    for (begun, passes), (later, more) in pairwise(decided):
        assert later - begun == more - passes + 2, "two of the trial are not read yet"


@pytest.mark.parametrize(
    ("tau", "off", "told"),
    [(0.5, 0, {(True, True)}), (1e-9, 0, {(False, False)}), (1e-9, 8, {(True, None)})],
    ids=["drawn", "no draws", "trial"],
)
def test_it_measures_by_whether_rows_are_drawn(
    tau: float, off: int, told: Any, costs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    # Norms and weights are measured rarely while no rows are drawn, and norms in each backward of a trial. Red where
    # the handle does not say it, where weights are not measured while nothing is drawn (perhaps draws never seem to
    # pay), and where a trial measures as rarely, so that the same pause would follow, and a longer one.
    costs(draw=WORK / 40)
    weights, norms = list[Any](), list[Any]()
    handle = rowprop.thin(model := residuals(), tau=tau)
    x = torch.randn(ROWS, 4)
    for _ in range(4):
        gradient(model, (model(x).square().mean(1) * few()).sum())
    monkeypatch.setattr(Control, "measures_weights", lambda _, number, drawn: weights.append(drawn))
    monkeypatch.setattr(Control, "measures_norms", lambda _, number, often: norms.append(often) or True)
    if off:
        handle._worth.left, handle._worth.pause = list(handle.blocks), off
    gradient(model, (model(x).square().mean(1) * few()).sum())
    assert set(zip(norms, weights or [None], strict=True)) == told


def test_a_fixed_share_is_never_turned_off():
    # Red where `renews()` does not ask for `keep`.
    handle = rowprop.thin(model := residuals(), keep=0.25)
    for _ in range(20):
        gradient(model, model(torch.randn(ROWS, 4)).square().sum())
    assert handle.record.passes == 20 and set(handle.record.keep.values()) == {0.25}


@pytest.mark.parametrize("steps", [7, 25, 34])
def test_resuming_goes_on_bit_for_bit(steps: int, costs: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    # Red where the state lacks `asleep`, `left`, `works` or `counted`: the trials and the draws come at other times.
    monkeypatch.setattr(worth, "MOST", 20)
    costs(draw=WORK / 2)
    model, x, scale = residuals(), torch.randn(100, ROWS, 4), torch.linspace(0.1, 1, ROWS)

    def backward(number: int) -> None:
        power = 1 + (number % 5 if number >= steps else 0)
        (model(x[number]).square().mean(1) * scale**power).sum().backward()

    resumed(model, backward, tau=0.5, at=steps, more=100 - steps)
