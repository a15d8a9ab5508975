"""Where thinning turns itself off: the counted work, the cheapest draws by brute force, and what a handle does then."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rowprop
from rowprop.errors import InvalidInput
from rowprop.thinning import backward as backward_module
from rowprop.thinning import control as control_module
from rowprop.thinning import worth
from rowprop.thinning.control import Control
from rowprop.thinning.worth import COSTS, Costs, Work, cheapest, work_below
from thinning_models import Residual

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 16
NOTHING = Costs(0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are as large ones: Python costs nothing."""
    monkeypatch.setitem(COSTS, "cpu", NOTHING)


def transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Linear(3, 8), *layers)


def cnn() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, groups=g), nn.Tanh()) for a, b, g in ((2, 4, 1), (4, 4, 2), (4, 6, 1))]
    return nn.Sequential(*blocks)


class Attention(nn.Module):
    """Products of activations with activations."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))), (6,)),
    "tokens": (lambda: nn.Sequential(*(Residual(6) for _ in range(3))), (5, 6)),
    "attention": (lambda: nn.Sequential(nn.Linear(6, 6), Attention(), Attention()), (5, 6)),
    "cnn": (cnn, (2, 9, 9)),
    "transformer": (transformer, (5, 3)),
}


def residuals() -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model, and losses of which a few rows hold nearly all."""
    model = nn.Sequential(*(Residual(4) for _ in range(3)))
    x, scale = torch.randn(ROWS, 4), torch.full((ROWS,), 1e-3)
    scale[:2] = 1
    return model, lambda: (model(x).square().mean(1) * scale).sum()


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# --- the count --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", MODELS)
def test_the_work_is_the_counted_flops_of_the_backward(name: str):
    # Red where a product counts for one factor alone, and where the bound `last` is not kept: blocks count twice.
    make, shape = MODELS[name]
    model = make()
    x, last, works = torch.randn(ROWS, *shape), -1, list[Work]()
    for block in model.children():
        x = block(x)
        work, last = work_below(x, last)
        works.append(work)
    with rowprop.cost.count_flops() as flops:
        x.sum().backward()
    assert not flops.uncounted
    assert sum(work.exact for work in works) == flops.total_flops
    assert all(work.exact for work in works)


def test_a_checkpoint_is_work_of_unknown_size():
    # Red where a Function of Python counts as an op without products.
    layer = nn.Linear(4, 4)
    inside: Any = checkpoint(layer, torch.randn(ROWS, 4, requires_grad=True), use_reentrant=True)
    assert work_below(inside, -1)[0].exact >= worth.UNKNOWN


# --- the cheapest draws -----------------------------------------------------------------------------------------------


def counted(works: dict[str, Work]) -> worth.Worth:
    """A decider that has counted one forward."""
    return worth.Worth(counted=works, forwards=1)


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
    generator = torch.Generator().manual_seed(0)
    sizes = set[int]()
    for _ in range(60):
        numbers = torch.rand(5, 5, generator=generator).tolist()
        works = [Work(exact, fixed / 3, 1.2 * exact, draw / 2) for exact, fixed, draw, _, _ in numbers]
        shares = [row[3] for row in numbers]
        every = [drawn for size in range(6) for drawn in combinations(range(5), size)]
        least = min(cost_of(works, shares, drawn, part) for drawn in every)
        found = cheapest(works, shares, part)
        sizes.add(len(found))
        assert cost_of(works, shares, found, part) == pytest.approx(least)
    assert len(sizes) >= 3, "the cases are all alike"


def test_cheap_blocks_are_worth_a_draw_together():
    # Red where a place is judged by its own block alone: each saves less than its draw costs.
    works = [Work(exact=1.0, by_row=1.0, draw=3.0) for _ in range(20)]
    assert cheapest(works, [0.5] * 20) == (0,)
    assert cheapest(works[:5], [0.5] * 5) == ()


def test_shares_are_of_the_rows_that_arrive():
    # Red where the shares are not multiplied: the second block seems to save nothing.
    decided = counted({name: Work(exact=100.0, by_row=100.0, draw=1.0) for name in "01"})
    decided.decide({"0": 0.5, "1": 0.5}, 1.0)
    assert decided.left == []


def test_pauses_grow_until_trials_cost_little():
    # Red where the first pause is the longest: a fine-tuning of few steps is over before its shares fall.
    decided = counted({"0": Work(exact=1000.0, by_row=1000.0, draw=300.0)})
    pauses = list[int]()
    for share in (1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 1.0):
        decided.decide({"0": share}, 1.0)
        pauses.append(decided.pause)
    longest = 10 * 300 // 50 - 8  # a trial takes as long as 10 draws: 5 % of these forwards and of its own 8
    assert pauses == [8, 16, 32, longest, longest, 0, 8]
    hopeless = counted({"0": Work(exact=100.0, by_row=100.0, draw=300.0)})
    hopeless.decide({"0": 1e-9}, 1.0)
    assert hopeless.pause == hopeless.asleep == 8  # the first batch may be an odd one
    hopeless.decide({"0": 1e-9}, 1.0)
    assert hopeless.pause == hopeless.asleep == 1024


# --- the handle -------------------------------------------------------------------------------------------------------


def test_a_small_model_turns_itself_off_and_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    # Red where `sleeping` is always false (hooks on the tensors), and where `asleep` is never counted down.
    monkeypatch.setattr(worth, "MOST", 20)
    model, loss = residuals()
    exact = gradient(model, loss())
    handle = rowprop.thin(model)
    outputs = list[Tensor]()
    model[1].register_forward_hook(lambda _, __, output: outputs.append(output))
    passes = list[int]()
    for _ in range(60):
        torch.testing.assert_close(gradient(model, loss()), exact, rtol=0, atol=0)
        passes.append(handle.record.passes)
    watched = [number for number, output in enumerate(outputs) if output._backward_hooks]
    assert watched == [0, 9, 30, 31, 52, 53, 54, 55]  # pauses of 8, 20 and 20 forwards; trials of 1, 2 and 4
    assert passes == [bisect_right(watched, number) for number in range(60)]
    assert handle.record.reason.startswith("off for 20 forwards, since draws would cost more than they save")
    assert handle.record.keep == {"2": 1.0, "1": 1.0, "0": 1.0}
    assert handle.record.ratio == 0


def test_a_trial_that_finds_fewer_rows_needed_turns_it_on(monkeypatch: pytest.MonkeyPatch):
    # Red where a decision stands for ever. At even losses nearly all rows are needed, and no draw pays.
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, op=50.0, draw=200.0))
    model, _ = residuals()
    x, scale = torch.randn(ROWS, 4), torch.ones(ROWS)
    x = x.sign()
    handle = rowprop.thin(model)

    def train(steps: int) -> None:
        for _ in range(steps):
            (model(x).square().mean(1) * scale).sum().backward()

    train(20)
    assert set(handle.record.keep.values()) == {1.0}
    assert handle.record.reason.startswith("off for 12 forwards")
    scale[2:] = 1e-3
    train(200)
    assert min(handle.record.keep.values()) < 0.5, handle.record


@pytest.mark.usefixtures("large")
def test_no_draw_where_a_block_saves_less_than_its_draw(monkeypatch: pytest.MonkeyPatch):
    # Red where `_choose` does not ask `draws()`: each block draws. And where `share()` forgets the blocks above.
    model, _ = residuals()
    x, scale = torch.randn(ROWS, 4), torch.logspace(0, -3, ROWS)
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, draw=sum(w.exact for w in _works(model, x)) / 4))
    handle = rowprop.thin(model, tau=0.1)

    def step() -> list[float]:
        gradient(model, (model(x).square().mean(1) * scale).sum())
        return list(handle.record.keep.values())

    for _ in range(9):
        shares = step()
    assert "no draw after 1, 0, where it would cost more than it saves" in handle.record.reason
    assert shares == [shares[0]] * 3
    assert shares[0] < 0.5
    for place, share in {"2": 0.75, "1": 0.5, "0": 0.25}.items():
        handle._control.shares[place].keep = share
    assert step() == [0.75, 0.75, 0.75]
    handle._worth.left = ["1"]  # the block below it stands in for it, so that the shares multiply
    handle._control.shares["2"].keep, handle._control.shares["1"].keep = 1.0, 0.5
    assert step() == [1.0, 1.0, 0.125]


@pytest.mark.usefixtures("large")
def test_rows_that_a_pick_left_out_save_nothing(monkeypatch: pytest.MonkeyPatch):
    # Red where `part` is always 1.
    model, _ = residuals()
    x, scale = torch.randn(ROWS, 4), torch.full((ROWS,), 1e-3)
    scale[0] = 1
    work = sum(w.exact for w in _works(model, x))
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, draw=work / 4))
    off = list[bool]()
    for rows in (ROWS, 2):
        handle = rowprop.thin(model)
        for _ in range(8):
            losses = model(x).square().mean(1) * scale
            rowprop.pick(losses, torch.arange(rows)).sum().backward()
        off.append(len(handle._worth.left) == 3)
        handle.remove()
    assert off == [False, True]


def test_the_work_is_the_mean_over_the_forwards():
    # Red where the work of the last forward stands for all: one of 2 rows, or one that skips a block, decides.
    block = nn.Linear(4, 4)
    decided = worth.Worth()
    for forward, rows in enumerate((30, 30, 2, 30)):
        x = block(torch.randn(rows, 4))
        decided.count("a", x, forward)
        if forward != 1:
            decided.count("b", block(x), forward)
    decided.decide({"a": 1.0, "b": 1.0}, 1.0)
    whole = work_below(block(torch.randn(30, 4)), -1)[0].by_row
    weights = [0.75**age for age in (3, 2, 1, 0)]
    first, second = (
        sum(w * n for w, n in zip(weights, rows, strict=True)) for rows in ((30, 30, 2, 30), (30, 0, 2, 30))
    )
    assert decided.works["a"].by_row / whole == pytest.approx(first / 30 / sum(weights), rel=0.02)
    assert decided.works["b"].by_row / decided.works["a"].by_row == pytest.approx(second / first, rel=0.3)
    for forward in range(4, 44):  # and it forgets
        decided.count("a", block(torch.randn(60, 4)), forward)
        decided.decide({"a": 1.0, "b": 1.0}, 1.0)
    assert decided.works["a"].by_row / whole == pytest.approx(2, rel=0.02)
    assert decided.works["b"].by_row < 1e-4 * whole


def test_a_part_that_runs_in_a_backward_is_counted_whole():
    # There nodes are numbered anew on a device. Red where they are compared with those of the forward: no work.
    block = nn.Linear(4, 4)
    inside, before = block(torch.randn(ROWS, 4)), block(torch.randn(ROWS, 4))
    decided = worth.Worth()
    decided.count("a", before, 1)
    decided.count("b", inside, 1, 7)
    assert decided.counted["b"] == work_below(inside, -1)[0] == decided.counted["a"]


def test_a_state_with_work_of_no_forward_is_refused():
    # Red without the check: the next decision divides by 0.
    decided = counted({"0": Work(exact=1.0)})
    with pytest.raises(InvalidInput, match="forwards=0"):
        worth.Worth().restored({**decided.state_dict(), "forwards": 0.0})


class Segments(nn.Module):
    """Four blocks, in checkpoints of some of them."""

    def __init__(self, reentrant: bool | None, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(Residual(4) for _ in range(4))
        self.reentrant, self.size = reentrant, size

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for begin in range(0, 4, self.size):
            part = nn.Sequential(*self.layers[begin : begin + self.size])
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("reentrant", "size"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_checkpoints_leave_order_and_work_as_they_are(reentrant: bool, size: int):
    # Red where a place stands in the order in which it became known, from the top down with reentrant ones, and where
    # a block that runs again counts twice.
    found: list[dict[str, float]] = []
    for kind in (None, reentrant):
        model = Segments(kind, size)
        handle = rowprop.thin(model, tau=0.2, blocks=[f"layers.{number}" for number in range(4)])
        for _ in range(20):
            gradient(model, (model(torch.randn(ROWS, 4)).square().mean(1) * torch.logspace(0, -3, ROWS)).sum())
        found.append({place: work.exact for place, work in handle._worth.works.items()})
        assert list(handle._control.shares) == list(handle._worth.works) == list(handle.blocks)
        assert min(handle.record.keep.values()) < 1
    plain, again = found
    del plain["layers.0"], again["layers.0"]  # below it, a reentrant checkpoint hides the first layer
    assert again == plain


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("small", ["each 16th", "forwards", "first"])
def test_a_small_batch_does_not_turn_it_off(small: str, monkeypatch: pytest.MonkeyPatch):
    # Each 16th backward renews the shares. Red where the work of the last forward stands for all, or that of the first
    # one decides twice: off for 1,024.
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, op=100.0, draw=1000.0))
    model = nn.Sequential(*(Residual(4) for _ in range(4)))
    scale = torch.full((64,), 1e-3)
    scale[:4] = 1
    handle = rowprop.thin(model, tau=0.1)
    drawn = 0
    for number in range(1, 97):
        rows = 2 if small == ("first" if number == 1 else "each 16th" if number % 16 == 0 else "") else 64
        loss = (model(torch.randn(rows, 4)).square().mean(1) * scale[-rows:]).sum()
        if small == "forwards":
            model(torch.randn(2, 4))
        gradient(model, loss)
        drawn += min(handle.record.keep.values()) < 0.5
    assert drawn > 60


def frozen() -> nn.Module:
    model = nn.Sequential(*(Residual(4) for _ in range(6)))
    model[:4].requires_grad_(False)
    return model


class Repeated(nn.Module):
    """One block, several times, in checkpoints if ``reentrant`` is given."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(4)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            block = self.layers[0]
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_block_that_runs_several_times_has_the_work_of_all(reentrant: bool | None):
    # Red where a reentrant checkpoint's second block is taken for a block that runs again: a fifth of the work.
    handle = rowprop.thin(model := Repeated(reentrant), blocks=["layers.0"])
    gradient(model, model(torch.randn(ROWS, 4, requires_grad=True)).square().sum())
    alone = work_below(Residual(4)(torch.randn(ROWS, 4, requires_grad=True)), -1)[0].exact
    assert handle._worth.works["layers.0"].exact == pytest.approx(5 * alone)


def test_a_checkpoint_around_the_model_with_other_rows_is_another_forward():
    # Red where a reentrant one, after a plain forward, keeps this one's number of rows: no dimension would fit.
    model = nn.Sequential(*(Residual(4) for _ in range(3)))
    handle = rowprop.thin(model, keep=0.5)
    gradient(model, model(torch.randn(6, 4)).square().sum())
    gradient(model, checkpoint(model, torch.randn(8, 4, requires_grad=True), use_reentrant=True).square().sum())
    assert handle.record.keep == {"2": 0.5, "1": 0.5, "0": 0.5}
    assert handle._forward.num_rows == 8


def test_a_block_that_does_nothing_turns_off():
    # Red where a trial's time is divided by the work of such blocks, 0.
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 4)

    model = nn.Sequential(Nothing(), Nothing(), nn.Linear(4, 2))
    handle = rowprop.thin(model, blocks=["0", "1"])
    gradient(model, model(torch.randn(ROWS, 4, requires_grad=True)).square().sum())
    assert handle._worth.pause == worth.MOST


@pytest.mark.parametrize("backwards", [2, 4])
def test_a_backward_whose_forward_was_before_the_pause_decides_nothing(backwards: int):
    # Red where it counts as a trial: the second pause would follow in the first step.
    model, loss = residuals()
    handle = rowprop.thin(model)
    value = loss()
    for _ in range(backwards):
        value.backward(retain_graph=True)
    assert (handle._worth.pause, handle.record.passes) == (8, 1)


def through_blocks(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.children():
        x = block(x)
    return x


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (frozen, lambda model, x: model(x)),
        (Repeated, lambda model, x: model(x)),
        (frozen, through_blocks),
        (frozen, lambda model, x: checkpoint(model, x, use_reentrant=False)),
    ],
    ids=["frozen", "repeated", "outside", "checkpoint"],
)
def test_a_pause_is_as_long_as_it_is_told(make: Callable[[], nn.Module], call: Callable[..., Tensor]):
    # Red where calls of blocks are counted down: those of frozen blocks, and all calls of a block that repeats.
    model = make()
    handle = rowprop.thin(model, blocks=["layers.0"] if make is Repeated else None)
    passes: list[int] = []
    for _ in range(20):
        gradient(model, call(model, torch.randn(ROWS, 4)).square().sum())
        passes.append(handle.record.passes)
    assert passes == [1] * 9 + [2] * 11, "a pause of 8 forwards, and a trial of one"
    assert handle._worth.asleep == handle._worth.pause - 10


@pytest.mark.usefixtures("as_accelerator")
def test_a_trial_decides_by_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch):
    # On a device, where the last backwards before a pause are read late. Red where they are read in the trial.
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, op=50.0, draw=200.0))
    decided: list[tuple[int, int]] = []
    model, _ = residuals()
    handle = rowprop.thin(model)
    real = worth.Worth.decide
    monkeypatch.setattr(
        worth.Worth, "decide", lambda *a: decided.append((handle._control.begun, handle._control.passes)) or real(*a)
    )
    for _ in range(40):
        gradient(model, model(torch.randn(ROWS, 4).sign()).square().sum())
    assert decided[0] == (3, 1)
    for (begun, passes), (later, more) in pairwise(decided):
        assert later - begun == more - passes + 2, "two of the trial are not read yet"


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("drawn", "off", "measurements"), [(True, False, 6), (False, False, 3), (False, True, 0)])
def test_where_no_rows_are_drawn_measurements_are_rare(
    drawn: bool, off: bool, measurements: int, monkeypatch: pytest.MonkeyPatch
):
    # Red where a measurement is left out while nothing is drawn (perhaps draws never seem to pay), where it comes as
    # often as else, and where thinning is off.
    monkeypatch.setattr(control_module, "FIRST", (1, 2))
    monkeypatch.setattr(control_module, "EVERY", 6)  # of the 27 backwards, then the 5th, ...
    model, loss = residuals()
    works = sum(w.exact for w in _works(model, torch.randn(ROWS, 4)))
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, draw=works / 40))
    handle = rowprop.thin(model, tau=0.5 if drawn else 1e-9)
    if off:
        monkeypatch.setattr(handle._worth, "decide", lambda *_: None)
        handle._worth.left, handle._worth.pause = list(handle.blocks), 8
    for _ in range(27):
        gradient(model, loss())
    assert handle._worth.idle is not drawn or off
    assert handle._control.measured == measurements


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("tau", "measured"), [(0.5, list(range(1, 13))), (1e-9, [1, 2, 5, 10])])
def test_norms_are_measured_rarely_while_no_rows_are_drawn(
    tau: float, measured: list[int], monkeypatch: pytest.MonkeyPatch
):
    # Red where the handle does not say whether rows are drawn.
    found: list[int] = []
    real = backward_module._sums
    model, loss = residuals()
    works = sum(w.exact for w in _works(model, torch.randn(ROWS, 4)))
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, draw=works / 40))
    handle = rowprop.thin(model, tau=tau)
    monkeypatch.setattr(backward_module, "_sums", lambda *a: found.append(handle._control.begun) or real(*a))
    monkeypatch.setattr(Control, "measures_weights", lambda *_: False)
    for _ in range(12):
        gradient(model, loss())
    assert sorted(set(found)) == measured


def test_each_backward_of_a_trial_is_measured(monkeypatch: pytest.MonkeyPatch):
    # Red where a trial measures as rarely as a backward without draws: the same pause would follow, and a longer one.
    found: list[int] = []
    real = backward_module._sums
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, op=50.0, draw=200.0))
    model, _ = residuals()
    x = torch.randn(ROWS, 4).sign()
    handle = rowprop.thin(model)
    monkeypatch.setattr(backward_module, "_sums", lambda *a: found.append(handle._control.begun) or real(*a))
    for _ in range(40):
        gradient(model, model(x).square().sum())
    assert sorted(set(found)) == list(range(1, handle._control.begun + 1))
    assert 5 < handle._control.begun < 40


def _works(model: nn.Module, x: Tensor) -> Iterator[Work]:
    last = -1
    for block in model.children():
        x = block(x)
        work, last = work_below(x, last)
        yield work


def test_a_fixed_share_is_never_turned_off():
    # Red where `renews()` does not ask for `keep`.
    model, loss = residuals()
    handle = rowprop.thin(model, keep=0.25)
    for _ in range(20):
        gradient(model, loss())
    assert handle.record.passes == 20
    assert set(handle.record.keep.values()) == {0.25}


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("steps", [7, 25, 34])
def test_resuming_goes_on_bit_for_bit(steps: int, monkeypatch: pytest.MonkeyPatch):
    # Red where the state lacks `asleep`, `left`, `works` or `counted`: the trials and the draws come at other times.
    monkeypatch.setattr(worth, "MOST", 20)
    works = sum(w.exact for w in _works(residuals()[0], torch.randn(ROWS, 4)))
    monkeypatch.setitem(COSTS, "cpu", replace(NOTHING, draw=works / 2))
    model, _ = residuals()
    x = torch.randn(100, ROWS, 4)
    scale = torch.linspace(0.1, 1, ROWS)

    def train(model: nn.Module, begin: int, end: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for batch in x[begin:end]:
            optimizer.zero_grad()
            (model(batch).square().mean(1) * scale ** (1 + begin % 5)).sum().backward()
            optimizer.step()

    handle = rowprop.thin(model, tau=0.5)
    train(model, 0, steps)
    other, state = copy.deepcopy(model), copy.deepcopy(handle.state_dict())
    resumed = rowprop.thin(other, tau=0.5)
    resumed.load_state_dict(state)
    assert (resumed._worth.counted, resumed._worth.forwards) == (handle._worth.counted, handle._worth.forwards)
    for step in range(steps, 100):
        for trained in (model, other):
            train(trained, step, step + 1)
        if resumed.record.keep:
            assert resumed.record == handle.record
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
