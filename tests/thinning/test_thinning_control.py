"""The control of thinning on its own: shares that follow from numbers made by hand, and when it measures what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rowprop.errors import InvalidInput
from rowprop.thinning.control import RENEWED_AFTER, SHARES, WIDEST, Control, Seen, carried, count_of
from rowprop.thinning.draw import variances
from thinning_models import capped, spread

STEEP, FLAT = torch.arange(1, 101, dtype=torch.float64), torch.ones(100, dtype=torch.float64)
NAN, INF = float("nan"), float("inf")


def seen(norms: Tensor = STEEP, *, scale: float = 1.0, before: float = 0.0, added: float = 0.0) -> list[Seen]:
    """What a block sees in one backward; variances are shares of the sum of squares."""
    rows, total = norms.numel(), float(norms.square().sum()) * scale
    would = (variances(norms, SHARES) * scale).tolist()
    return [Seen(rows, rows, rows, added=added * total, before=before * total, total=total, would=would)]


def spent(share: float) -> float:
    """The variance that a draw of a share of 100 steep rows adds, over the sum of squares, from its probabilities."""
    return spread(STEEP, capped(STEEP, round(share * 100))) / float(STEEP.square().sum()) if share < 1 else 0.0


def steered(tau: float, *backwards: dict[str, list[Seen]], names: str = "0") -> Control:
    """A control that knows some blocks, the bottom one first, after some backwards."""
    control = Control(None, tau)
    for name in names.split():
        control.share(name)
    for each in backwards:
        control.update(each)
    return control


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
def test_a_block_keeps_the_fewest_rows_within_the_bound(tau: float):
    # One row fewer adds more than the bound. Red with the next larger share in the place of one in between, and with
    # ``bisect_left`` on a reversed list: 1 and .01.
    control = steered(tau, {"0": seen()})
    share = control.share("0")
    assert spent(share + 0.01) <= tau < spent(share - 0.02)
    assert count_of(share, 100, 1) in (round(100 * share), round(100 * share) + 1)
    assert control.planned == pytest.approx(tau, rel=0.01)


@pytest.mark.parametrize(
    ("top", "middle", "bottom", "left"), [(0, 0, 0, (0, 0)), (0.1, 0.05, 0.05, (0.05, 0)), (0.1, 0.05, 0, (0.05, 0.05))]
)
def test_blocks_below_keep_what_those_above_have_left(
    top: float, middle: float, bottom: float, left: tuple[float, ...]
):
    # The bound is spent at the top, so the others may add nothing; or half of it arrives at one of them. Red without
    # ``change``, by which they would spend it again, and where a part of it is left out.
    came = {"top": seen(added=top), "middle": seen(before=middle), "bottom": seen(before=bottom)}
    control = steered(0.1, came, names="bottom middle top")
    assert spent(control.share("top")) == pytest.approx(0.1, rel=0.1)
    assert (spent(control.share("middle")), spent(control.share("bottom"))) == pytest.approx(left, rel=0.1)


def test_what_the_blocks_carry_is_the_bound_on_average(monkeypatch: pytest.MonkeyPatch):
    # The bottom carries twice what the top does, so the top may spend two thirds of the bound. Red where every block
    # gets the bound for itself, and where the mean is over the top alone.
    monkeypatch.setattr("rowprop.thinning.control.BIASES", (1.0, 1.0))
    control = steered(0.12, names="bottom top")
    for _ in range(64):
        top = spent(control.share("top"))
        control.update({"top": seen(added=top), "bottom": seen(before=2 * top)})
    assert 1.5 * spent(control.share("top")) == pytest.approx(0.12, rel=0.1)
    assert control.share("bottom") == 1


def test_a_smaller_correction_allows_more_at_once():
    # Red where the sums hold numbers of the bound that was in force.
    control = steered(0.02, *[{"0": seen()}] * 8)
    assert spent(control.share("0")) == pytest.approx(0.02, rel=0.2)
    control.learn(0.25, 1.0, 1.0)
    for _ in range(8):
        control.update({"0": seen()})
    assert spent(control.share("0")) == pytest.approx(0.08, rel=0.2)


@pytest.mark.parametrize(("before", "added", "bias"), [(0, 0.5, 0.5), (0.5, 0.5, 1), (0, 1e-9, 0.25), (0, 1e9, 4)])
def test_what_came_out_beside_the_plan_moves_the_next_one(before: float, added: float, bias: float):
    # Half of the plan comes out each time, so the control plans twice as much; what the blocks above have added came
    # out as well; and the bias has an end. Red where it is not asked for, where its square root divides, and where it
    # is of the block's own draw alone.
    control = steered(0.02)
    for _ in range(200):
        control.update({"0": seen(before=before * control.planned, added=added * control.planned)})
    assert control.bias == pytest.approx(bias, rel=1e-3)
    assert control.planned == pytest.approx(0.02 / bias, rel=1e-3)


def test_a_block_that_is_seen_late_has_no_past():
    # Red where a part of a past that was not seen counts: variances of 0, and a share of .01.
    control = steered(0.1, *[{}] * 32, *[{"0": seen()}] * 8)
    assert control.share("0") == pytest.approx(steered(0.1, {"0": seen()}).share("0"), rel=1e-6)


def test_larger_batches_count_for_more_and_larger_times_do_not():
    # Between two renewals the sums are of squares; from one renewal to the next they are shares. Red where each
    # backward counts alike, and where the times are summed.
    control = steered(0.1, *[{"0": seen(FLAT, scale=1e6)}] * 2, {"0": seen(STEEP)}, {"0": seen(FLAT)})
    squares = 100 + float(STEEP.square().sum())
    mixed = (variances(FLAT, SHARES) + variances(STEEP, SHARES)) / squares  # of all that is remembered
    assert control.shares["0"].past[3:] == pytest.approx(mixed.tolist(), rel=1e-9, abs=1e-12)
    for _ in range(60):
        control.update({"0": seen(STEEP)})
    assert control.share("0") == pytest.approx(steered(0.1, {"0": seen()}).share("0"), rel=0.05)


def test_shares_are_renewed_often_at_first_and_then_in_even_steps():
    # Red where it tells it of the next backward, and with ``>`` for ``>=``.
    control, renewed = steered(0.1), list[int]()
    for number in range(1, 41):
        renews = control.update({"0": seen()})
        assert renews is not any(control.shares["0"].now)
        renewed += [number] * renews
    assert renewed[:3] == [1, 2, 4]
    assert {later - one for one, later in pairwise(renewed[3:])} == {RENEWED_AFTER}


MEASUREMENTS: dict[str, tuple[Callable[[Control, int], bool], float, list[int]]] = {
    "norms": (Control.measures_norms, 1 / 4, list(range(1, 60))),
    "norms, without draws": (lambda control, number: control.measures_norms(number, often=False), 1 / 4, []),
    "weights": (Control.measures_weights, 1 / 20, [2, 4, 8, 16]),
    "weights, without draws": (lambda control, number: control.measures_weights(number, False), 1 / 80, [2, 4, 8, 16]),
    "work": (Control.counts, 1 / 8, list(range(1, 9))),
}


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_each_backward_of_a_loop_is_measured_now_and_then(name: str, period: int):
    # A loop over several losses, a backward for each in turns. Red with each fourth number, with each 20th, where only
    # the first ones are measured or all, and where keep= measures anything but norms.
    measures, rate, first = MEASUREMENTS[name]
    assert not first or [number for number in range(1, first[-1] + 1) if measures(Control(None, 0.1), number)] == first
    later = [number % period for number in range(400, 400 + 2400 * period) if measures(Control(None, 0.1), number)]
    found = [later.count(turn) / 2400 for turn in range(period)]
    assert sum(found) / period == pytest.approx(rate, rel=0.05) and min(found) > rate / 2
    assert "norms" in name or not any(measures(Control(0.5, 0.1), number) for number in range(1, 100))


def test_places_stand_in_the_order_in_which_a_gradient_came():
    # From the input on. Red where a new block stands last, and where one that no gradient came to moves.
    control = Control(None, 0.1)
    for came, order in (("ca", "ac"), ("cba", "abc"), ("ca", "abc"), ("db", "abcd"), ("abcd", "dcba")):
        control.update({place: [] for place in came})
        assert "".join(control.shares) == order


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("where", ["added", "before", "total", "would"])
def test_an_overflow_is_left_out(where: str, bad: float):
    # Red where take does not ask: a NaN would stay for good. And a backward that was not measured changes no share.
    (one,) = seen()
    setattr(one, where, [bad] * len(SHARES) if where == "would" else bad)
    control = steered(0.1, {"0": [one]})
    assert control.share("0") == 1
    control.update({"0": seen()})
    share = control.share("0")
    assert spent(share) == pytest.approx(0.1, rel=0.1)
    for _ in range(20):
        control.update({"0": [Seen(100, 100, 100)]})
    assert control.share("0") == share and control.passes == 22


def test_the_ratio_that_norms_predict():
    # The mean over the blocks; within a block the sums. Red where the rows above are left out.
    one = {"a": [Seen(4, 2, 4, added=1, before=2, total=10)], "b": [Seen(4, 2, 4, added=1, total=1)] * 2}
    assert carried(one) == pytest.approx((0.3 + 1) / 2)
    assert carried({"a": [Seen(4, 4, 4)]}) == carried({}) == 0


def test_the_correction_is_a_quotient_of_means_that_forget():
    # Red with a mean of the quotients, with a mean over all measurements, where a number that is no number, or a
    # measurement without a draw, is learnt from, and where one measurement moves it without bound.
    control = Control(None, 0.1)
    for _ in range(40):
        control.learn(1.0, 1.0, 1.0)
        control.learn(30.0, 10.0, 1.0)
    assert control.correction == pytest.approx(31 / 11, rel=0.05)
    for _ in range(80):
        control.learn(0.5, 1.0, 1.0)
    assert control.correction == pytest.approx(0.5, rel=0.05)
    before = copy.copy(control)
    for bad in [(NAN, 1.0, 0.1), (1.0, NAN, 0.1), (INF, 1.0, 0.1), (1.0, INF, 0.1), (0.0, 1.0, 0.1), (1.0, 1.0, 0.0)]:
        control.learn(*bad)
    assert control == before
    control.learn(1e30, 1.0, 0.1)
    assert control.correction == WIDEST and control.allowed() == 0.1 / WIDEST
    assert Control(None, 0.1, added=1e-30, predicted=1.0).correction == 1 / WIDEST


def test_a_state_holds_all():
    # Red where one of the numbers is missing: the controls part.
    control = steered(0.1, names="bottom top")
    for number in range(13):
        control.begun += 1
        control.update({"top": seen(added=0.03), "bottom": seen(STEEP.sqrt(), before=0.05)})
        if number % 5 == 4:
            control.learn(0.03, 1.0, 0.1)
    other = Control(None, 0.1).restored(copy.deepcopy(control.state_dict()))
    unlike = {name for name, value in vars(control).items() if value == vars(Control(None, 0.1))[name]}
    assert other == control and unlike == {"keep", "tau", "unit"}
    for _ in range(20):
        for each in (control, other):
            each.begun += 1
            each.update({"top": seen(added=0.02), "bottom": seen(before=0.02)})
    assert other == control


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("added", -1), ("predicted", "1"), ("bias", -1.0), ("bias", 0), ("planned", -0.1), ("begun", -1),
        ("measured", 0.5), ("keep", 0), ("now", [0.0]), ("past", [-1.0] * (3 + len(SHARES))),
    ],
)  # fmt: skip
def test_a_state_with_another_number_is_refused_and_named(entry: str, value: object):
    # Red where a check of ``check_form`` is left out. All other states: tools/hostile_cases.py.
    state = steered(0.1, {"0": seen()}).state_dict()
    (state if entry in state else state["shares"]["0"])[entry] = value
    with pytest.raises(InvalidInput, match=rf"control\.(shares\.0\.)?{entry}.*="):
        Control(None, 0.1).restored(state)


def test_a_fixed_share_is_of_the_backwards_rows():
    control = Control(0.3, 0.1)
    for _ in range(5):
        control.update({"0": seen()})
    assert control.share("0") == 0.3
    assert (count_of(0.3, 10, 1), count_of(0.3, 10, 8), count_of(0.3, 1, 1)) == (3, 8, 1)
