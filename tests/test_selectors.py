"""The selectors keep the rows that their definitions say, checked against brute force and Composer's own draw."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rowprop.errors import InvalidInput
from rowprop.selection import AboveMean, LossMass, RandomRows, RankSampler, Selection, TopK

FIXED = [TopK(0.3), RankSampler(0.3), RandomRows(0.3)]
DATA_DEPENDENT = [AboveMean(), LossMass(0.7), LossMass(0.5, min_keep=0.4, multiple_of=4)]
ALL = FIXED + DATA_DEPENDENT


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(selection: Selection) -> list[int]:
    return selection.rows.tolist()


def hardest(losses: list[int], count: int) -> list[int]:
    """The first rows of a plain Python sort by (largest loss, lowest row), in batch order."""
    return sorted(sorted(range(len(losses)), key=lambda row: (-losses[row], row))[:count])


# --- laws of every selector ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ALL, ids=repr)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
def test_rows_are_in_range_ascending_unique_and_weigh_one_over_k(selector, num_rows):
    # Red when: `.sort()` is dropped from selectors._mean (rows come hardest first).
    for seed in range(20):
        selection = selector(torch.rand(num_rows, generator=seeded(seed)), generator=seeded(seed))
        rows = rows_of(selection)
        assert rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] < num_rows
        assert selection.rows.dtype == torch.int64 and selection.num_rows == num_rows
        assert selection.weights.tolist() == torch.full((len(rows),), 1 / len(rows)).tolist()


@pytest.mark.parametrize("selector", ALL, ids=repr)
def test_same_generator_same_rows(selector):
    # Red when: _race draws from torch's global generator (`generator=None`).
    scores = torch.rand(64, generator=seeded())
    first = rows_of(selector(scores, generator=seeded(3)))
    torch.rand(5)
    assert rows_of(selector(scores, generator=seeded(3))) == first


@pytest.mark.parametrize("selector", [RankSampler(0.3), RandomRows(0.3)], ids=repr)
def test_random_selectors_differ_between_seeds_and_default_to_the_global_generator(selector):
    # Red when: the generator is re-seeded inside, or None is not passed on as torch's own.
    scores = torch.rand(64, generator=seeded())
    assert rows_of(selector(scores, generator=seeded(3))) != rows_of(selector(scores, generator=seeded(4)))
    torch.manual_seed(11)
    first = rows_of(selector(scores))
    assert rows_of(selector(scores)) != first
    torch.manual_seed(11)
    assert rows_of(selector(scores)) == first


@pytest.mark.parametrize("selector", [TopK(0.3), RankSampler(0.3), *DATA_DEPENDENT], ids=repr)
def test_permuting_the_rows_permutes_the_selection(selector):
    # Red when: RankSampler gives odds to rows instead of ranks, or _mean forgets to map places back to rows.
    scores = torch.rand(64, generator=seeded())
    order = torch.randperm(64, generator=seeded(1))
    plain = set(rows_of(selector(scores, generator=seeded(2))))
    permuted = selector(scores[order], generator=seeded(2))
    assert {int(order[row]) for row in rows_of(permuted)} == plain


@pytest.mark.parametrize("selector", [TopK(1), RankSampler(1.0), RandomRows(1.0), LossMass(1.0), LossMass(0.1, 1.0)])
def test_keeping_everything_gives_every_row_one_over_n(selector):
    # Red when: LossMass ignores min_keep, or a fixed count rounds down.
    selection = selector(torch.rand(10, generator=seeded()) + 0.1)
    assert rows_of(selection) == list(range(10)) and selection.is_everything
    assert selection.weights.tolist() == torch.full((10,), 0.1).tolist()


@pytest.mark.parametrize("selector", ALL, ids=repr)
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_weights_are_never_coarser_than_float32(selector, dtype, expected):
    # Red when: _mean builds weights in the scores' dtype, or always in float32.
    selection = selector(torch.rand(48, generator=seeded()).to(dtype), generator=seeded())
    assert selection.weights.dtype == expected
    assert selection.weights.double().sum().item() == pytest.approx(1, abs=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("selector", ALL, ids=repr)
def test_scores_with_a_graph_are_only_read(selector):
    # Red when: a selector writes into its scores (hardest_first by `scores.neg_()`).
    scores = torch.rand(12, requires_grad=True)
    before = scores.detach().clone()
    selection = selector(scores)
    assert not selection.weights.requires_grad and torch.equal(scores.detach(), before)


@pytest.mark.parametrize("keep", [0.01, 0.07, 0.1, 0.25, 0.29, 0.5, 0.57, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("kind", [TopK, RankSampler, RandomRows])
def test_fixed_count_is_the_ceiling_of_the_decimal_product(kind, keep):
    # Red when: the count is ceil(keep * N) without slack (0.07 * 100 = 7.000000000000001 keeps 8), or rounds down.
    for num_rows in (1, 2, 3, 10, 64, 100, 127, 200):
        expected = max(1, math.ceil(Fraction(str(keep)) * num_rows))
        assert kind(keep)(torch.arange(float(num_rows))).num_kept == expected


@pytest.mark.parametrize("selector", FIXED, ids=repr)
def test_fixed_count_selectors_never_wait_for_the_device(selector):
    # Red when: a selector calls .item(), nonzero() or bool() on scores: a fake tensor has no data to answer with.
    with FakeTensorMode():
        assert selector(torch.empty(64)).num_kept == 20


@pytest.mark.parametrize("selector", DATA_DEPENDENT, ids=repr)
def test_the_check_for_waiting_can_fail(selector):
    # The meta-test of the one above: these selectors must read the scores.
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        selector(torch.empty(64))


# --- TopK ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 100))
def test_top_k_is_a_sort_with_ties_to_the_lower_row(losses, percent):
    # Red when: the sort is not stable, or ascending.
    keep = percent / 100
    count = max(1, math.ceil(Fraction(percent, 100) * len(losses)))
    assert rows_of(TopK(keep)(torch.tensor(losses, dtype=torch.float32))) == hardest(losses, count)


def test_nan_ranks_last_even_behind_minus_infinity():
    # Red when: hardest_first sorts descending (torch then puts NaN first).
    scores = torch.tensor([math.nan, 1.0, -math.inf, math.nan, 5.0])
    assert rows_of(TopK(0.6)(scores)) == [1, 2, 4]
    assert rows_of(TopK(0.8)(scores)) == [0, 1, 2, 4]


# --- AboveMean -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_above_mean_is_strictly_above_and_never_empty(losses):
    # Red when: `>` becomes `>=`, or the all-equal case is not caught.
    mean = Fraction(sum(losses), len(losses))
    expected = [row for row, loss in enumerate(losses) if loss > mean] or list(range(len(losses)))
    assert rows_of(AboveMean()(torch.tensor(losses, dtype=torch.float64))) == expected


def test_above_mean_of_equal_fractions_keeps_all():
    # Red when: the mean is taken in float32, where 0.1 summed ten times lies on one side of ten times 0.1.
    for value in (0.1, 0.3, 1e-8, 1e30):
        assert AboveMean()(torch.full((10,), value)).is_everything


# --- LossMass --------------------------------------------------------------------------------------------------------


def smallest_hard_count(losses: list[int], mass: Fraction) -> int:
    """The definition, in exact arithmetic: how many of the largest losses hold at least ``mass`` of the sum."""
    total = sum(losses)
    if total == 0:
        return len(losses)
    ranked = sorted(losses, reverse=True)
    return next(count for count in range(1, len(ranked) + 1) if sum(ranked[:count]) >= mass * total)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 20))
def test_no_smaller_set_holds_the_mass(losses, twentieths):
    # Red when: the crossing row is left out (tsai's rule), the cumsum ascends, or all-zero losses keep one row.
    mass = Fraction(twentieths, 20)
    rows = rows_of(LossMass(float(mass))(torch.tensor(losses, dtype=torch.float32)))
    total = sum(losses)
    if total == 0:
        assert rows == list(range(len(losses)))
        return
    assert sum(losses[row] for row in rows) >= mass * total
    for subset in itertools.combinations(losses, len(rows) - 1):
        assert sum(subset) < mass * total
    assert rows == hardest(losses, len(rows))


def test_loss_mass_equals_its_definition_on_a_thousand_batches():
    # Red when: any of the above, min_keep is ignored, or a multiple is rounded down.
    random = np.random.default_rng(0)
    for trial in range(1000):
        num_rows = int(random.integers(1, 130))
        losses = random.integers(0, [4, 1000, 10**6][trial % 3], num_rows)
        if trial % 5 == 0:
            losses[random.integers(num_rows)] = 10**7  # one dominating row
        if trial % 7 == 0:
            losses[random.random(num_rows) < 0.7] = 0
        if trial % 11 == 0:
            losses[:] = 3
        tenths, multiple = int(random.integers(1, 11)), int(random.choice([1, 1, 8, 32]))
        minimum = int(random.integers(0, 11)) if trial % 2 else 0
        count = smallest_hard_count(losses.tolist(), Fraction(tenths, 10))
        count = max(count, math.ceil(Fraction(minimum, 10) * num_rows))
        count = min(num_rows, math.ceil(count / multiple) * multiple)
        selector = LossMass(tenths / 10, min_keep=minimum / 10, multiple_of=multiple)
        selection = selector(torch.from_numpy(losses).float())
        assert rows_of(selection) == hardest(losses.tolist(), count), (trial, selector)


def test_equal_rows_hold_their_share_whatever_their_float():
    # Red when: `_SLACK` is dropped from LossMass (the sum of float64 thirds falls a hair short of its share).
    for value in (0.1, 0.3, 0.7, 1 / 3, 1e-3, 2.7):
        for num_rows in (10, 50, 1000):
            losses = torch.full((num_rows,), value, dtype=torch.float64)
            for tenths in range(1, 11):
                assert LossMass(tenths / 10)(losses).num_kept == tenths * num_rows // 10


def test_a_share_is_measured_in_float64_whatever_the_losses_are():
    # Red when: the cumsum runs in the dtype of the losses (bfloat16 stops growing at 256 ones).
    assert LossMass(0.9)(torch.ones(1000, dtype=torch.bfloat16)).num_kept == 900


@pytest.mark.parametrize(
    ("count_of_ten", "multiple", "expected"), [(1, 8, 8), (8, 8, 8), (9, 8, 10), (3, 4, 4), (3, 1, 3), (1, 50, 10)]
)
def test_multiples_are_rounded_up_and_capped(count_of_ten, multiple, expected):
    # Red when: it rounds down.
    assert LossMass(count_of_ten / 10, multiple_of=multiple)(torch.ones(10)).num_kept == expected


# --- RankSampler and RandomRows --------------------------------------------------------------------------------------

DRAWS = 20_000


def inclusion(selector: RankSampler, scores: Tensor) -> np.ndarray:
    """How often each row, from the easiest to the hardest, was kept."""
    generator, counts = seeded(1), torch.zeros(scores.numel())
    for _ in range(DRAWS):
        counts[selector(scores, generator=generator).rows] += 1
    return (counts[torch.argsort(scores)] / DRAWS).numpy()


def composer_inclusion(keep: float, num_rows: int) -> np.ndarray:
    """The same, by Composer's `select_using_loss`, from numpy's legacy generator as there."""
    random, counts = np.random.RandomState(2), np.zeros(num_rows)
    odds = np.arange(0.5, num_rows, 1) / num_rows
    odds = odds ** (1.0 / keep - 1.0)
    for _ in range(DRAWS):
        counts[random.choice(num_rows, int(keep * num_rows), replace=False, p=odds / odds.sum())] += 1
    return counts / DRAWS


@pytest.mark.parametrize(("keep", "published"), [(0.5, (0.80, 0.76, 0.56, 0.01)), (0.25, (0.75, 0.66, 0.18, 0.00))])
def test_rank_sampler_keeps_rows_as_often_as_composer_does(keep, published):
    # Red when: the exponent is 1/keep, ranks run backwards, percentiles are i/N, or rows are drawn with replacement.
    scores = torch.rand(64, generator=seeded())
    ours, theirs = inclusion(RankSampler(keep), scores), composer_inclusion(keep, 64)
    both = (ours + theirs) / 2
    error = np.sqrt(2 * both * (1 - both) / DRAWS) + 1e-12
    named = [63, 57, 32, 0]  # hardest, 90th percentile, median, easiest
    assert np.all(np.abs(ours - theirs)[named] <= 3 * error[named] + 1e-3 * (both[named] < 1e-3))
    drawn = both > 0.01  # over all rows the squared deviations average 1 when both draw by the same law
    assert np.mean(((ours - theirs)[drawn] / error[drawn]) ** 2) < 1.6
    assert ours[named] == pytest.approx(published, abs=0.012)


def test_a_single_draw_follows_the_closed_formula():
    # Red when: the exponent or the percentiles are off. With K = 1 a rank is drawn by its odds, ((i + 0.5) / 4) ** 3.
    odds = torch.tensor([0.5, 1.5, 2.5, 3.5]) ** 3
    generator, scores, counts = seeded(1), torch.tensor([0.2, 0.1, 0.4, 0.3]), torch.zeros(4)
    for _ in range(4000):
        counts[RankSampler(0.25)(scores, generator=generator).rows] += 1
    expected = (4000 * odds / odds.sum())[[1, 0, 3, 2]]
    assert ((counts - expected) ** 2 / expected).sum() < 11.3  # chi square with 3 degrees of freedom, 99 %


def test_random_rows_is_unbiased():
    # Red when: RandomRows looks at the scores, or some row is never drawn.
    values = torch.randn(16, generator=seeded()).double()
    generator = seeded(5)
    means = torch.stack(
        [
            (values[selection.rows] * selection.weights).sum()
            for selection in (RandomRows(0.25)(values, generator=generator) for _ in range(4000))
        ]
    )
    standard_error = means.std() / math.sqrt(len(means))
    assert abs(means.mean() - values.mean()) < 3 * standard_error


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TopK, RankSampler, RandomRows])
@pytest.mark.parametrize("keep", [0, 0.0, -0.1, 1.0001, math.nan, True, "0.5", None])
def test_a_keep_outside_its_range_is_refused_at_construction(kind, keep):
    # Red when: a selector loses its __post_init__.
    with pytest.raises(InvalidInput) as caught:
        kind(keep)
    assert str(caught.value) == (
        f"{kind.__name__} got keep={keep!r} but a fraction in (0, 1] was needed; write a quarter as keep=0.25."
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mass": 0}, "LossMass got mass=0 but a fraction in (0, 1] was needed; write a quarter as mass=0.25."),
        (
            {"min_keep": 1.5},
            "LossMass got min_keep=1.5 but a fraction in [0, 1] was needed; write a quarter as min_keep=0.25.",
        ),
        (
            {"multiple_of": 0},
            "LossMass got multiple_of=0 but a whole number of rows was needed; 1 rounds nothing.",
        ),
        (
            {"multiple_of": 8.0},
            "LossMass got multiple_of=8.0 but a whole number of rows was needed; 1 rounds nothing.",
        ),
    ],
)
def test_loss_mass_refuses_arguments_out_of_range(arguments, sentence):
    with pytest.raises(InvalidInput) as caught:
        LossMass(**arguments)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("selector", ALL, ids=repr)
@pytest.mark.parametrize("scores", [torch.rand(32, 128), torch.rand(()), torch.rand(0), torch.arange(4)])
def test_scores_of_the_wrong_shape_or_dtype_are_refused(selector, scores):
    # Red when: _checked is not called.
    with pytest.raises(InvalidInput) as caught:
        selector(scores)
    assert str(caught.value) == (
        f"{type(selector).__name__} got scores of shape {tuple(scores.shape)} and dtype {scores.dtype} but one "
        "floating number per row was needed, shape (N,); reduce over all but the rows, as in `loss.flatten(1).mean(1)`."
    )


@pytest.mark.parametrize("kind", [AboveMean, LossMass])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mean_or_share_of_nonfinite_scores_is_refused(kind, bad):
    with pytest.raises(InvalidInput) as caught:
        kind()(torch.tensor([1.0, bad, 2.0, bad]))
    assert str(caught.value) == (
        f"{kind.__name__} got 2 of 4 scores NaN or infinite but needs finite ones; "
        "leave such rows out first (SelectiveBackprop does under nonfinite='drop')."
    )


def test_negative_losses_have_no_mass():
    with pytest.raises(InvalidInput) as caught:
        LossMass()(torch.tensor([1.0, -0.5, 2.0]))
    assert str(caught.value) == (
        "LossMass got a loss of -0.5 but needs losses of at least 0, because a share of a sum with negative parts "
        "means nothing; use TopK or AboveMean for such losses."
    )


@pytest.mark.parametrize("selector", [RankSampler(0.5), RandomRows(0.5)], ids=repr)
def test_a_generator_on_another_device_is_refused(selector):
    with pytest.raises(InvalidInput) as caught:
        selector(torch.empty(4, device="meta"), generator=seeded())
    assert str(caught.value) == (
        f"{type(selector).__name__} got a generator on cpu but the scores are on meta; "
        "make it with torch.Generator('meta')."
    )
