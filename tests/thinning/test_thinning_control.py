"""The control of thinning on its own: shares that follow from numbers made by hand, and when it measures what."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from rowprop.errors import InvalidInput
from rowprop.thinning.control import SHARES, Control, Seen, carried, count_of, moved
from rowprop.thinning.draw import added_variance, inclusion, variances

NORMS = torch.arange(1, 101, dtype=torch.float64)
TOTAL = float(NORMS.square().sum())


def seen(norms: Tensor, *, scale: float = 1.0, before: float = 0.0, added: float = 0.0) -> list[Seen]:
    """What a block sees in one backward; variances are shares of the sum of squares."""
    rows, total = norms.numel(), float(norms.square().sum()) * scale
    would = (variances(norms, SHARES) * scale).tolist()
    return [Seen(rows, rows, rows, added=added * total, before=before * total, total=total, would=would)]


def spent(share: float, norms: Tensor = NORMS) -> float:
    """The variance that a draw of a share adds, over the sum of squares, from its probabilities."""
    return float(added_variance(norms, inclusion(norms, round(share * norms.numel())))) / float(norms.square().sum())


def named(control: Control) -> Control:
    """A control that knows two blocks, the bottom one first, as forwards make them known."""
    control.share("bottom")
    control.share("top")
    return control


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
def test_a_block_keeps_the_fewest_rows_within_the_bound(tau: float):
    # One row fewer adds more than the bound. Red with the next larger share in the place of one in between, and with
    # ``bisect_left`` on a reversed list: 1 and .01.
    control = Control(None, tau)
    control.update({"0": seen(NORMS)})
    share = control.share("0")
    assert spent(share + 0.01) <= tau
    assert spent(share - 0.02) > tau
    assert count_of(control.share("0"), 100, 1) in (round(100 * share), round(100 * share) + 1)
    assert control.planned == pytest.approx(tau, rel=0.01)


def test_blocks_below_keep_what_the_top_has_left():
    # The bound is spent at the top, so the bottom may add nothing. Red without ``change``: it would spend it again.
    control = named(Control(None, 0.1))
    control.update({"top": seen(NORMS), "bottom": seen(NORMS)})
    assert spent(control.share("top")) == pytest.approx(0.1, rel=0.1)
    assert control.share("bottom") == 1
    # Half of the bound arrives there: the bottom may spend the other half.
    control = named(Control(None, 0.1))
    control.update({"top": seen(NORMS, added=0.1), "bottom": seen(NORMS, before=0.05)})
    assert spent(control.share("bottom")) == pytest.approx(0.05, rel=0.1)


def test_what_the_blocks_carry_is_the_bound_on_average(monkeypatch: pytest.MonkeyPatch):
    # The bottom carries twice what the top does, so the top may spend two thirds of the bound. Red where every block
    # gets the bound for itself, and where the mean is over the top alone.
    monkeypatch.setattr("rowprop.thinning.control.BIASES", (1.0, 1.0))
    tau, control = 0.12, named(Control(None, 0.12))
    for _ in range(64):
        top = spent(control.share("top")) if control.share("top") < 1 else 0.0
        control.update({"top": seen(NORMS, added=top), "bottom": seen(NORMS, before=2 * top)})
    assert 1.5 * spent(control.share("top")) == pytest.approx(tau, rel=0.1)
    assert control.share("bottom") == 1


def test_a_smaller_correction_allows_more_at_once():
    # Red where the sums hold numbers of the bound that was in force.
    control = Control(None, 0.02)
    for _ in range(8):
        control.update({"0": seen(NORMS)})
    before = control.share("0")
    control.learn(0.25, 1.0, 1.0)
    for _ in range(8):
        control.update({"0": seen(NORMS)})
    assert spent(before) == pytest.approx(0.02, rel=0.2)
    assert spent(control.share("0")) == pytest.approx(0.08, rel=0.2)


def test_what_came_out_below_the_plan_moves_the_next_one():
    # Half of the plan comes out each time, so the control plans twice as much. Red where the bias is not asked for, and
    # where it divides by its square root.
    control = Control(None, 0.02)
    for _ in range(64):
        control.update({"0": seen(NORMS, added=control.planned / 2)})
    assert control.bias == pytest.approx(0.5, rel=1e-3)
    assert control.planned == pytest.approx(0.02 * 2, rel=1e-3)
    for _ in range(200):  # nothing comes out: the bias has an end
        control.update({"0": seen(NORMS, added=1e-9)})
    assert control.bias == 0.25
    for _ in range(200):
        control.update({"0": seen(NORMS, added=9.0)})
    assert control.bias == 4


def test_what_the_blocks_above_have_added_came_out_as_well():
    # Red where the bias is of the block's own draw alone.
    control = Control(None, 0.02)
    for _ in range(64):
        control.update({"0": seen(NORMS, before=control.planned / 2, added=control.planned / 2)})
    assert control.bias == pytest.approx(1, rel=1e-3)


def test_a_block_that_is_seen_late_has_no_past():
    # Red where a part of a past that was not seen counts: variances of 0, and a share of .01.
    control, late = Control(None, 0.1), Control(None, 0.1)
    for number in range(40):
        control.update({} if number < 32 else {"0": seen(NORMS)})
    late.update({"0": seen(NORMS)})
    assert control.share("0") == pytest.approx(late.share("0"), rel=1e-6)


def test_it_tells_when_shares_are_renewed():
    # Red where it tells it of the next backward.
    control = Control(None, 0.1)
    for _ in range(40):
        assert control.update({"0": seen(NORMS)}) is not any(control.shares["0"].now)


def test_no_measurement_moves_a_factor_without_bound():
    # Red without the bounds: 64 and 1 / 64.
    assert moved(1.0, 1e9, 1) == pytest.approx(64)
    assert moved(2.0, 1e-9, 3) == pytest.approx(2 * (1 / 128) ** (3.5**-0.4))


def test_larger_batches_count_for_more_and_larger_times_do_not():
    # Within the 8 backwards of a renewal the sums are of squares; from one renewal to the next they are shares. Red
    # where each backward counts alike, and where the times are summed.
    flat, steep = torch.ones(100).double(), NORMS
    control = Control(None, 0.1)
    for _ in range(2):
        control.update({"0": seen(flat, scale=1e6)})
    for number in range(2):
        control.update({"0": seen(flat if number else steep, scale=1.0)})
    # The last two hold 100 and TOTAL: their own mean, weighed so, for all of what is remembered.
    expected = (variances(flat, SHARES) + variances(steep, SHARES)) / (100 + TOTAL)
    torch.testing.assert_close(
        torch.tensor(control.shares["0"].past[3:], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12
    )
    # Later the past counts: 8 of the .15 * 96 backwards that are remembered are new.
    for number in range(92):
        control.update({"0": seen(steep if number < 84 else flat, scale=1.0)})
    part = 8 / (0.15 * 96)
    mixed = part * variances(flat, SHARES) / 100 + (1 - part) * variances(steep, SHARES) / TOTAL
    found = torch.tensor(control.shares["0"].past[3:], dtype=torch.float64)
    torch.testing.assert_close(found, mixed, rtol=0.02, atol=1e-3)


def test_shares_are_renewed_after_1_2_4_8_and_every_8():
    # Red with 7 or 9 for RENEWED_AFTER, and with ``>`` for ``>=``.
    control, renewed = Control(None, 0.1), list[int]()
    for number in range(1, 41):
        control.update({"0": seen(NORMS)})
        if not any(control.shares["0"].now):
            renewed.append(number)
    assert renewed == [1, 2, 4, 8, 16, 24, 32, 40]


def test_norms_and_weight_gradients_are_measured_in_these_backwards():
    # Red with 61 for 60 backwards, without the rarest, without one of the first ones, and where keep= measures weights.
    control = Control(None, 0.1)
    measured = [number for number in range(1, 800) if control.measures_norms(number)]
    counts = [sum(begin <= n < begin + 60 for n in measured) for begin in range(0, 600, 60)]
    assert counts[:2] == [59, 60]
    assert counts[2:] == pytest.approx([60 / 2, 60 / 3, *[60 / 4] * 6], abs=2)
    assert [n for n in range(1, 20) if control.measures_norms(n, often=False)] == [2, 5, 10, 13, 18]
    weights, rare = (
        [n for n in range(1, 1609) if Control(None, 0.1).measures_weights(n, drawn)] for drawn in (True, False)
    )
    assert weights[:4] == rare[:4] == [2, 4, 8, 16]
    assert len(weights[4:]) == pytest.approx(80, abs=2) and len(rare[4:]) == pytest.approx(20, abs=1)
    assert not any(Control(0.5, 0.1).measures_weights(n) for n in range(1, 100))


def test_work_is_counted_before_one_backward_of_eight():
    # Red where each forward is counted, which takes time, or the first ones alone, and where keep= counts, too.
    counted = [number for number in range(1, 809) if Control(None, 0.1).counts(number)]
    assert counted[:8] == list(range(1, 9))
    assert len(counted[8:]) == pytest.approx(100, abs=2)
    assert not any(Control(0.5, 0.1).counts(number) for number in range(1, 100))


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8])
def test_a_loop_of_several_backwards_has_each_of_them_measured(period: int):
    # A loop over several losses, a backward for each in turns. Red with each fourth number, and with each 20th.
    control = Control(None, 0.1)
    every = range(400, 400 + 600 * period)
    measured = Counter(number % period for number in every if control.measures_norms(number))
    weights = Counter(number % period for number in every if control.measures_weights(number))
    assert [round(measured[turn] / 600, 1) for turn in range(period)] == pytest.approx([0.25] * period, abs=0.06)
    assert min(weights[turn] for turn in range(period)) >= 600 / 20 / 2


def test_places_stand_in_the_order_in_which_a_gradient_came():
    # From the input on. Red where a new block stands last, and where one that no gradient came to moves.
    control = Control(None, 0.1)
    for came, order in [
        (["c", "a"], ["a", "c"]),
        (["c", "b", "a"], ["a", "b", "c"]),  # one that was frozen, or left out
        (["c", "a"], ["a", "b", "c"]),
        (["d", "b"], ["a", "b", "c", "d"]),
        (["a", "b", "c", "d"], ["d", "c", "b", "a"]),
    ]:
        control.update({place: [] for place in came})
        assert list(control.shares) == order


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["added", "before", "total", "would"])
def test_an_overflow_is_left_out(where: str, bad: float):
    # Red where take does not ask: a NaN would stay for good.
    control, one = Control(None, 0.1), seen(NORMS)
    setattr(one[0], where, [bad] * len(SHARES) if where == "would" else bad)
    control.update({"0": one})
    assert control.share("0") == 1
    control.update({"0": seen(NORMS)})
    assert spent(control.share("0")) == pytest.approx(0.1, rel=0.1)


def test_backwards_that_were_not_measured_change_no_share():
    control = Control(None, 0.1)
    control.update({"0": seen(NORMS)})
    share = control.share("0")
    for _ in range(20):
        control.update({"0": [Seen(100, 100, 100)]})
    assert control.share("0") == share and control.passes == 21


def test_the_ratio_that_norms_predict():
    # The mean over the blocks; within a block the sums. Red where the rows above are left out.
    one = {"a": [Seen(4, 2, 4, added=1, before=2, total=10)], "b": [Seen(4, 2, 4, added=1, total=1)] * 2}
    assert carried(one) == pytest.approx((0.3 + 1) / 2)
    assert carried({"a": [Seen(4, 4, 4)]}) == carried({}) == 0


def test_a_state_holds_all():
    # Red where one of the numbers is missing: the controls part, or a check does not know it.
    control = named(Control(None, 0.1))
    for number in range(13):
        control.begun += 1
        control.update({"top": seen(NORMS, added=0.03), "bottom": seen(NORMS.sqrt(), before=0.05)})
        if number % 5 == 4:
            control.learn(0.03, 1.0, 0.1)
    other = Control(None, 0.1).restored(copy.deepcopy(control.state_dict()))
    for _ in range(20):
        for each in (control, other):
            each.begun += 1
            each.update({"top": seen(NORMS, added=0.02), "bottom": seen(NORMS, before=0.02)})
    assert other == control
    share = control.state_dict()["shares"]["top"]
    changes: list[tuple[str, Any]] = [
        ("added", -1), ("predicted", "1"), ("bias", -1.0), ("planned", -0.1), ("begun", -1), ("measured", 0.5),
        ("shares.0", share | {"now": [0.0]}), ("shares.0", share | {"past": [-1.0, *share["past"][1:]]}),
        ("shares.0", share | {"keep": 0}), ("shares.0", {"keep": 1.0}),
    ]  # fmt: skip
    for name, value in changes:
        entry, place = (*name.split("."), "")[:2]
        with pytest.raises(InvalidInput, match=f"control.{entry}.*="):
            other.restored({**control.state_dict(), entry: {place: value} if place else value})


def test_a_fixed_share_is_of_the_backwards_rows():
    control = Control(0.3, 0.1)
    for _ in range(5):
        control.update({"0": seen(NORMS)})
    assert (
        control.share("0") == 0.3
        and count_of(control.share("0"), 10, 1) == 3
        and count_of(control.share("0"), 10, 8) == 8
    )
    assert count_of(control.share("0"), 1, 1) == 1
