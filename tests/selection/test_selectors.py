"""The selectors keep the rows that their definitions say, checked against brute force, formulas and Composer's draw.

What all of them obey is in ``test_laws.py``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laws
from killed import seeded
from rowprop import ImportanceSampling, RandomRows, Selection, TopK, selector
from rowprop.distributed import Global, Local
from rowprop.schedule import Ramp
from rowprop.selection import AboveMean, Context, LossMass, MaxVariance, MultipleOf, Nonzero, OverAll, PerClass
from rowprop.selection.selectors import PercentileSampling, RankSampling, Threshold, TopBottom
from sentences import refused


def drawing(seed: int = 0) -> Context:
    return Context(generator=seeded(seed))


def rows_of(selection: Selection) -> list[int]:
    return selection.rows.tolist()


def hardest_order(losses: list[int]) -> list[int]:
    """A plain Python sort by (largest loss, lowest row)."""
    return sorted(range(len(losses)), key=lambda row: (-losses[row], row))


def hardest(losses: list[int], count: int) -> list[int]:
    """The first rows of that sort, in batch order."""
    return sorted(hardest_order(losses)[:count])


@pytest.mark.parametrize("keep", [0.01, 0.07, 0.1, 0.25, 0.29, 0.5, 0.57, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("kind", [TopK, RankSampling, RandomRows])
def test_fixed_count_is_the_ceiling_of_the_decimal_product(kind, keep):
    # Red when: the count is ceil(keep * N) without slack (0.07 * 100 = 7.000000000000001 keeps 8), or rounds down.
    for num_rows in (1, 2, 3, 10, 64, 100, 127, 200):
        expected = max(1, math.ceil(Fraction(str(keep)) * num_rows))
        assert kind(keep)(torch.arange(float(num_rows))).num_kept == expected


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 100))
def test_top_k_is_a_sort_with_ties_to_the_lower_row(losses, percent):
    # Red when: the sort is not stable, or ascending.
    count = max(1, math.ceil(Fraction(percent, 100) * len(losses)))
    assert rows_of(TopK(percent / 100)(torch.tensor(losses).float())) == hardest(losses, count)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_above_mean_is_strictly_above_and_never_empty(losses):
    # Red when: `>` becomes `>=`, or the all-equal case is not caught.
    mean = Fraction(sum(losses), len(losses))
    expected = [row for row, loss in enumerate(losses) if loss > mean] or list(range(len(losses)))
    assert rows_of(AboveMean()(torch.tensor(losses).double())) == expected


@settings(max_examples=150)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 20))
def test_no_smaller_set_holds_the_mass(losses, twentieths):
    # Red when: the crossing row is left out (tsai's rule), the cumsum ascends, or all-zero losses keep one row. Larger
    # batches, a least share and multiples: test_batch_loss_filter_keeps_the_originals_rows in test_recipes.py.
    mass, total = Fraction(twentieths, 20), sum(losses)
    rows = rows_of(LossMass(float(mass))(torch.tensor(losses).float()))
    if total == 0:
        assert rows == list(range(len(losses)))
        return
    assert rows == hardest(losses, len(rows)) and sum(losses[row] for row in rows) >= mass * total
    assert all(sum(subset) < mass * total for subset in itertools.combinations(losses, len(rows) - 1))


def test_equal_rows_hold_their_share_whatever_their_float():
    # Red when: `SLACK` is dropped from LossMass (the sum of float64 thirds falls a hair short of its share), or the
    # cumsum runs in the dtype of the losses (bfloat16 stops growing at 256 ones).
    for value, num_rows in itertools.product((0.1, 0.3, 0.7, 1 / 3, 1e-3, 2.7), (10, 50, 1000)):
        losses = torch.full((num_rows,), value, dtype=torch.float64)
        for tenths in range(1, 11):
            assert LossMass(tenths / 10)(losses).num_kept == tenths * num_rows // 10
    assert LossMass(0.9)(torch.ones(1000, dtype=torch.bfloat16)).num_kept == 900


DRAWS = 20_000


def deviation(found: np.ndarray, expected: np.ndarray, draws: int) -> np.ndarray:
    """How many standard errors of ``draws`` draws lie between them."""
    return np.abs(found - expected) / np.sqrt(expected * (1 - expected) / draws + 1e-12)


@pytest.mark.parametrize(("keep", "published"), [(0.5, (0.80, 0.76, 0.56, 0.01)), (0.25, (0.75, 0.66, 0.18, 0.00))])
def test_rank_sampler_keeps_rows_as_often_as_composer_does(keep, published):
    # Against torch's draws one by one. Red when: the exponent is 1/keep, ranks run backwards, percentiles are i/N, or
    # rows are drawn with replacement.
    draws, many = 5000, 100_000  # percentiles of i/N make the average below 2.8 at a keep of a half
    scores, generator, counts = torch.rand(64, generator=seeded()), seeded(1), torch.zeros(64)
    selector = RankSampling(keep)
    for _ in range(draws):
        counts[selector(scores, Context(generator=generator)).rows] += 1
    ours = (counts[torch.argsort(scores)] / draws).numpy()
    odds = (np.arange(0.5, 64, 1) / 64) ** (1.0 / keep - 1.0)  # from the easiest to the hardest row
    drawn = torch.multinomial(torch.from_numpy(odds).expand(many, 64), int(keep * 64), generator=seeded(2))
    exact = (drawn.flatten().bincount(minlength=64) / many).numpy()
    named = [63, 57, 32, 0]  # hardest, 90th percentile, median, easiest
    assert exact[named] == pytest.approx(published, abs=0.012)
    assert np.all(deviation(ours, exact, draws)[named] <= 3)
    often = exact > 0.01  # over all rows the squared deviations average 1 where both draw by the same law
    assert np.mean(deviation(ours, exact, draws)[often] ** 2) < 1.6
    if keep == 0.5:  # Composer's own draw has that law, too: numpy's legacy generator, called as Composer does
        random, counts = np.random.RandomState(2), np.zeros(64)
        for _ in range(4000):
            counts[random.choice(64, 32, replace=False, p=odds / odds.sum())] += 1
        often = exact > 0.05
        assert np.mean(deviation(counts / 4000, exact, 4000)[often] ** 2) < 1.6


def test_percentile_sampling_is_the_rule_of_biggest_losers_call_by_call():
    # Red when: the batch is appended after its probabilities, `<` becomes `<=`, the exponent is another, the deque
    # grows beyond `recent` or drops its newest, rows share a lot, or the floor is added instead of taken.
    for beta, remembered, floor in ((3.0, 20, 0.0), (1.0, 7, 0.3), (0.5, 1024, 0.0)):
        selector, generator, lots = PercentileSampling(beta, remembered, floor), seeded(1), seeded(1)
        recent: deque[float] = deque(maxlen=remembered)
        for call in range(30):
            scores = torch.randint(8, (10,), generator=seeded(call)).float()
            recent.extend(scores.tolist())
            chances = [max(floor, (sum(h < s for h in recent) / len(recent)) ** beta) for s in scores.tolist()]
            drawn = torch.rand(10, generator=lots).tolist()
            expected = [row for row in range(10) if drawn[row] < chances[row]]
            assert rows_of(selector(scores, Context(generator=generator))) == expected


@pytest.mark.parametrize("beta", [1.0, 2.0, 3.0])
def test_percentile_sampling_keeps_one_in_beta_plus_one(beta):
    # Red when: fewer scores are remembered than asked for, so that the shares are taken of too few.
    selector, generator = PercentileSampling(beta), seeded(1)
    kept = sum(selector(torch.rand(64, generator=generator), Context(generator=generator)).num_kept for _ in range(313))
    expected = 1 / (beta + 1)
    assert deviation(np.array(kept / (313 * 64)), np.array(expected), 313 * 64) <= 3


def test_a_nan_is_the_smallest_of_the_remembered_scores():
    # Red when: NaN is sorted in with the scores, where it misleads the search and counts as the hardest row.
    scores = torch.tensor([math.nan, 1.0, 2.0, math.nan, 3.0, 4.0])
    found = PercentileSampling(1.0)(scores.repeat(4000), drawing()).rows.remainder(6)
    share = torch.bincount(found, minlength=6) / 4000
    assert share[[0, 3]].tolist() == [0, 0]
    assert share.tolist() == pytest.approx([0, 2 / 6, 3 / 6, 0, 4 / 6, 5 / 6], abs=0.03)


def test_a_row_with_an_infinite_score_is_kept_and_its_score_is_not_remembered():
    # Red when: the infinite score enters the memory (a finite one would later exceed less), or the row draws a lot.
    selector, scores = PercentileSampling(1.0, recent=8), torch.tensor([1.0, math.inf, 2.0, -math.inf])
    for seed in range(20):
        assert 1 in rows_of(selector(scores, drawing(seed)))
    assert selector.state_dict()["recent"].tolist() == [2.0, -math.inf, *[1.0, 2.0, -math.inf] * 2]
    only = PercentileSampling()(torch.tensor([math.inf, math.inf]))  # nothing is remembered, nothing to divide by
    assert rows_of(only) == [0, 1] and only.weights.tolist() == [0.5, 0.5]


def test_importance_sampler_draws_in_proportion_and_with_replacement():
    # Red when: the chances are taken of ranks or squares, or rows are drawn without replacement.
    values = torch.tensor([0.0, 1.0, 2.0, 5.0, 12.0])
    scores = values.repeat(DRAWS // 5)
    selection = ImportanceSampling(1.0)(scores, drawing())
    chances = scores / scores.double().sum()
    times = selection.weights.double() * DRAWS * DRAWS * chances[selection.rows]  # undoes count / (M N p)
    torch.testing.assert_close(times, times.round(), rtol=0, atol=1e-4)
    assert times.round().sum() == DRAWS and times.max() >= 2 and selection.num_kept < DRAWS
    found = torch.bincount(selection.rows.remainder(5), times, minlength=5).numpy() / DRAWS
    assert np.all(deviation(found, values.numpy() / 20, DRAWS) <= 3)


def test_a_row_without_a_score_is_never_drawn_and_all_without_are_drawn_evenly():
    # Red when: zeros get a share of the chances, or all of them are drawn with replacement, some twice.
    lonely = torch.zeros(50)
    lonely[[0, 17, 49]] = torch.tensor([1e-30, 2e-30, 1e-30])
    drawn = {row for seed in range(50) for row in rows_of(ImportanceSampling(0.2)(lonely, drawing(seed)))}
    assert drawn == {0, 17, 49}
    for seed in range(20):
        even = ImportanceSampling(0.2)(torch.zeros(50), drawing(seed))
        assert even.num_kept == 10 and even.weights.tolist() == pytest.approx([0.1] * 10)


def test_the_gate_opens_where_the_variance_reduction_exceeds_it():
    # Red when: a batch is judged by its own tau, tau starts at 1, the smoothing is upside down, `>` becomes `<`, or tau
    # is kept by progress, so that the gate never opens under a schedule.
    def reduction(scores: Tensor) -> float:
        p = scores.double().numpy() / scores.double().numpy().sum()
        u = 1 / len(p)
        return 1 / math.sqrt(1 - np.square(p - u).sum() / np.square(p).sum())

    selector, generator, tau = ImportanceSampling(lambda progress: 0.5, gate=1.2, smoothing=0.75), seeded(), 0.0
    opened = ""
    for call in range(40):
        scores = torch.rand(64, generator=seeded(call)) ** (6 if 10 <= call < 20 else 1) + 1e-3
        even = ImportanceSampling(0.5, gate=1e9)(scores, drawing(call))
        assert even.num_kept == 32 and even.weights.tolist() == [1 / 32] * 32
        selection = selector(scores, Context(call / 40, generator=generator))
        by_score = selection.weights.unique().numel() > 1
        assert by_score == (tau > 1.2), call
        opened += "o" if by_score else "c"
        tau = 0.75 * tau + 0.25 * reduction(scores)
        assert selector.tau == pytest.approx(tau, rel=1e-9)
    assert re.fullmatch("c{11}o+c+", opened)


def test_a_reduction_that_only_equals_the_gate_does_not_open_it():
    # Red when: `> gate` becomes `>=`. Equal scores of four rows make tau exactly 1, in binary fractions.
    sampler, one_row = ImportanceSampling(0.5, gate=1.0, smoothing=0.0), torch.tensor([0.0, 0.0, 0.0, 8.0])
    sampler(torch.ones(4), drawing())
    assert sampler.tau == 1.0
    evenly = sampler(one_row, drawing())
    assert evenly.weights.tolist() == [0.5, 0.5]  # M rows without replacement; by score it would be row 3 alone
    assert sampler.tau == 2.0 and rows_of(sampler(one_row, drawing())) == [3]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=150)
def test_no_set_of_rows_has_a_larger_variance(rewards, ninths):
    # Against all sets of K rows, in fractions. Red when: the set with one high score is left out, or the mean that is
    # taken off is that of all rows.
    count = max(1, math.ceil(Fraction(ninths, 9) * len(rewards)))

    def variance(rows: tuple[int, ...]) -> Fraction:
        mean = Fraction(sum(rewards[row] for row in rows), count)
        return sum(((rewards[row] - mean) ** 2 for row in rows), Fraction(0))

    rows = rows_of(MaxVariance(ninths / 9)(torch.tensor(rewards).double()))
    assert len(rows) == count
    assert variance(tuple(rows)) == max(variance(some) for some in itertools.combinations(range(len(rewards)), count))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(0, 10), st.integers(0, 10))
def test_top_bottom_is_both_ends_of_a_sort(losses, top, bottom):
    # Red when: a tie lets a row be taken at both ends, the counts are of other roundings, or the bottom is hardest.
    top = top or int(bottom == 0)
    ranked = hardest_order(losses)
    high, low = (math.ceil(Fraction(tenths, 10) * len(losses)) for tenths in (top, bottom))
    expected = set(ranked[:high]) | set(ranked[len(ranked) - low :])
    assert rows_of(TopBottom(top / 10, bottom / 10)(torch.tensor(losses).float())) == sorted(expected)


NAN, INF = math.nan, math.inf
EXAMPLES = [
    # NaN ranks last, even behind -infinity. Red when hardest_first sorts descending (torch then puts NaN first).
    (TopK(0.6), [NAN, 1.0, -INF, NAN, 5.0], [1, 2, 4]),
    (TopK(0.8), [NAN, 1.0, -INF, NAN, 5.0], [0, 1, 2, 4]),
    # It is the last to be taken at either end. Red when the bottom is the end of an order that puts NaN last.
    (TopBottom(1 / 6, 2 / 6), [NAN, 1.0, 5.0, NAN, -2.0, 3.0], [1, 2, 4]),
    (TopBottom(3 / 6, 2 / 6), [NAN, 1.0, 5.0, NAN, -2.0, 3.0], [0, 1, 2, 4, 5]),
    # Red when the mean is taken in float32, where 0.1 summed ten times lies on one side of ten times 0.1.
    *[(AboveMean(), [value] * 10, list(range(10))) for value in (0.1, 0.3, 1e-8, 1e30)],
    # Red when squares are taken of the rewards as they are, in which such a difference is lost.
    (MaxVariance(0.5), 1e7 + 1e-3 * torch.tensor([3, 7, 0, 5, 1, 6, 2, 4]).double(), [1, 2, 4, 5]),
    # Red when `>=` becomes `>`, or the dtypes differ: the float32 is a hair below 0.7 as a float64.
    (Threshold(0.7), [0.1, 0.7, 0.2, NAN, INF, -INF], [1, 4]),
    (Threshold(0.7), torch.tensor([0.7, 0.8]).double(), [1]),
    # Red when an empty selection divides by its count or is filled up to a multiple.
    (Threshold(9), [0.1, 0.7, 0.2], []),
    (MultipleOf(Threshold(9), 8), [0.1, 0.7, 0.2], []),
    (Nonzero(), [0.0, NAN], [1]),
    (Nonzero(), [0.0, 0.0], []),
]


@pytest.mark.parametrize(("selector", "scores", "rows"), EXAMPLES)
def test_the_rows_of_an_example(selector, scores, rows):
    selection = selector(torch.as_tensor(scores))
    assert rows_of(selection) == rows and selection.num_rows == len(scores)
    assert selection.weights.numel() == len(rows) and selection.weights.isfinite().all()


def test_nonzero_gives_the_gradient_of_the_mean_of_all():
    # Red when: the weights are 1/K, negative losses are left out, or -0.0 counts as a loss.
    inputs = torch.randn(64, 5, generator=seeded())
    advantages = torch.tensor([0.0, 1.0, -2.0, -0.0]).repeat(16)
    weight = torch.randn(5, generator=seeded(1)).requires_grad_()
    losses = advantages * (inputs @ weight).exp()
    selection = Nonzero()(losses)
    assert rows_of(selection) == [row for row in range(64) if row % 4 in (1, 2)]
    exact = (losses[selection.rows] * selection.weights).sum()
    torch.testing.assert_close(exact, losses.mean())
    ours, plain = (torch.autograd.grad(loss, weight, retain_graph=True) for loss in (exact, losses.mean()))
    torch.testing.assert_close(ours, plain)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 10), st.integers(1, 9))
def test_a_multiple_is_filled_with_the_hardest_others(losses, tenths, multiple):
    # Red when: the count is rounded down, not capped at N, or filled with the easiest.
    scores, selector = torch.tensor(losses).float(), TopBottom(0.0, tenths / 10)
    inside = rows_of(selector(scores))
    others = [row for row in hardest_order(losses) if row not in inside]
    missing = min(math.ceil(len(inside) / multiple) * multiple, len(losses)) - len(inside)
    selection = MultipleOf(selector, multiple)(scores)
    assert rows_of(selection) == sorted(inside + others[:missing])
    assert selection.weights.tolist() == pytest.approx([1 / selection.num_kept] * selection.num_kept)


def test_per_class_is_the_selector_on_each_class_with_the_weight_of_the_class():
    # Red when: places in a class are taken for rows, weights stay 1/K of the class, or are not sorted with their rows.
    random = np.random.default_rng(0)
    for _ in range(50):
        num_rows = int(random.integers(1, 50))
        losses, classes = random.integers(0, 20, num_rows), random.integers(-1, 4, num_rows)
        expected: dict[int, float] = {}
        for label in set(classes.tolist()):
            members = [row for row in range(num_rows) if classes[row] == label]
            count = math.ceil(len(members) * 0.3)
            kept = sorted(members, key=lambda row: (-losses[row], row))[:count]
            expected |= dict.fromkeys(kept, len(members) / num_rows / count)
        selection = PerClass(TopK(0.3))(torch.from_numpy(losses).float(), Context(classes=torch.from_numpy(classes)))
        assert dict(zip(rows_of(selection), selection.weights.tolist(), strict=True)) == pytest.approx(expected)
        assert rows_of(selection) == sorted(expected)


def test_classes_are_unbiased_together_if_each_is():
    # Red when: the last class, or any, speaks for all.
    def of_single_rows(scores, context):
        return Selection(torch.zeros(1).long(), torch.ones(1), scores.numel(), unbiased=scores.numel() == 1)

    for classes, unbiased in (([0, 1, 2], True), ([0, 1, 1], False), ([1, 1, 2], False)):
        assert PerClass(of_single_rows)(torch.rand(3), Context(classes=torch.tensor(classes))).unbiased == unbiased


def test_over_all_rows_the_step_is_the_plain_one_less_what_is_left_out():
    # Red when: the weights stay 1/K, or N is that of the kept rows.
    model, x = nn.Linear(3, 1, bias=False), torch.randn(10, 3, generator=seeded())
    losses = model(x).squeeze(1).square()
    selection = OverAll(LossMass(0.8))(losses)
    assert 1 < selection.num_kept < 10
    left_out = [row for row in range(10) if row not in rows_of(selection)]
    parts = (losses[selection.rows] * selection.weights).sum(), losses.mean(), losses[left_out].sum() / 10
    ours, plain, rest = (torch.autograd.grad(loss, model.weight, retain_graph=True)[0] for loss in parts)
    torch.testing.assert_close(ours, plain - rest)


def test_a_context_needs_nothing_and_gives_what_it_has():
    # Red when: a field that is falsy (progress 0) counts as missing.
    context = Context(0.0, torch.arange(3), torch.zeros(3, dtype=torch.int64), seeded(), "a history")
    assert context.need("progress", "a test") == 0.0 and context.need("history", "a test") == "a history"
    assert context.need("ids", "a test") is context.ids and context.need("classes", "a test") is context.classes
    nothing = Context()
    assert (nothing.progress, nothing.ids, nothing.classes, nothing.generator, nothing.history) == (None,) * 5


def test_the_context_of_some_rows_has_their_ids_and_classes_and_all_else():
    # Red when: ids or classes keep the order of the batch, or a field is not handed on.
    generator, rows = seeded(), torch.tensor([4, 1])
    part = Context(0.5, torch.arange(10, 15), torch.arange(5) % 2, generator, "a history").at(rows)
    assert (part.ids.tolist(), part.classes.tolist()) == ([14, 11], [0, 1])
    assert (part.progress, part.generator, part.history) == (0.5, generator, "a history")
    assert Context(0.5, ids=torch.arange(5)).at(rows).classes is None
    bare = Context(0.5, generator=generator)
    assert bare.at(rows) is bare  # nothing to take rows of


COLUMNS = {  # what is no column of a context, and how it is called
    "a list": [0, 1],
    "a tensor of shape (4,) and dtype torch.float32": torch.rand(4),
    "a tensor of shape (2, 2) and dtype torch.int64": torch.zeros(2, 2, dtype=torch.int64),
    "a tensor of shape (4,) and dtype torch.int64 on the device meta": torch.arange(4, device="meta"),
}
CONTEXTS = [
    (lambda: Context().need("progress", "a test"), "without progress ... a test needs progress ... total_steps"),
    (lambda: Context().need("ids", "a test"), "a test needs ids ... pass ids=..., WithIds(dataset) yields them"),
    (lambda: Context().need("classes", "a test"), "without classes ... a test needs classes ... pass classes=..."),
    (lambda: Context().need("history", "a test"), "without history ... needs history ... history=LossHistory()"),
    (lambda: Context().need("labels", "a test"), "field='labels' but one of progress, ids, classes, history, pos"),
    (lambda: Context(ids=torch.arange(5)).at([0]), "Context.at got a list but row indices"),
    (lambda: Context(ids=torch.arange(5)).at(torch.ones(5) > 0), "dtype torch.bool but row indices"),
    (lambda: Context(ids=torch.arange(5)).at(torch.tensor([5])), "Context.at got a row that the batch has not"),
    (lambda: Context(generator=5), "Context got generator=5, a int, but a torch.Generator or None was needed."),
    *[(lambda x=x: Context(x), f"progress={x!r} but a fraction in [0, 1]") for x in (-0.1, 1.1, NAN)],
    *[(lambda of=of: Context(ids=of), f"ids came as {came} but int64 of shape (N,)") for came, of in COLUMNS.items()],
    (lambda: Context(classes=[0, 1]), "classes came as a list but int64 of shape (N,)"),
]


def chosen(*rows: int, weights: Tensor | None = None, num_rows: int = 8) -> Selection:
    weights = torch.ones(len(rows)) if weights is None else weights
    return Selection(torch.tensor(rows, dtype=torch.int64), weights, num_rows)


ONE, OF_A_MASK = torch.ones(1), "but row indices ... `mask.nonzero().squeeze(1)`"
SELECTIONS = [
    (lambda: chosen(7, 6, 5, 4, 3, 2, 1, 0), "row 6 after 7 ... ascending and each once; sort rows with their weights"),
    (lambda: chosen(0, 1, 1, 3), "row 1 after 1 ... add up those of repeats"),
    (lambda: chosen(0, 0, 1, num_rows=2), "3 rows of num_rows=2 but each row was needed once ... add up the weights"),
    (lambda: chosen(2, 8), "row 8 after 2 but rows 0 to 7 were needed"),
    (lambda: chosen(-1), "row -1 after -1 but rows 0 to 7 were needed"),
    (lambda: chosen(2, 5, weights=torch.tensor([1, NAN])), "the weight nan for row 5 but finite weights were"),
    (lambda: chosen(2, 5, weights=torch.tensor([INF, 1])), "the weight inf for row 2 ... look at the scores."),
    (lambda: Selection(ONE, ONE, 8), f"rows of shape (1,) and dtype torch.float32 {OF_A_MASK}"),
    (lambda: Selection.mean(torch.ones(8) > 0, 8), f"rows of shape (8,) and dtype torch.bool {OF_A_MASK}"),
    (lambda: Selection.mean(torch.arange(2), 3, torch.int64), "dtype=torch.int64 but a floating dtype was needed"),
    (lambda: chosen(0, 1, weights=torch.ones(3)), "weights of shape (3,) ... needed, shape (2,); Selection.mean(rows"),
    (lambda: chosen(0, 1, weights=torch.arange(2)), "weights of shape (2,) and dtype torch.int64 ... shape (2,)"),
    (lambda: chosen(0, weights=ONE.to("meta")), "weights on meta but its rows are on cpu; move one of them."),
]


@pytest.mark.parametrize(("make", "sentence"), SELECTIONS)
def test_a_selection_is_checked_where_it_is_made(make, sentence):
    # Red when: one of the checks in Selection.__post_init__ is left out; is_everything trusts the count of any rows.
    with refused(f"Selection got {sentence}"):
        make()


def test_sound_selections_pass():
    # Red when: a check is too strict about no rows, all rows, the last row or a negative weight, or the tensors are
    # printed.
    for rows in ([], [0], [7], [0, 7], list(range(8))):
        selection = chosen(*rows, weights=torch.full((len(rows),), -2.0))
        assert (selection.num_kept, selection.is_everything) == (len(rows), len(rows) == 8)
    assert Selection.everything(0).is_everything
    assert repr(Selection.mean(torch.tensor([1, 5]), 1000)) == "Selection(2 of 1000 rows, on cpu)"


def test_even_is_believed_only_of_weights_that_are():
    # Red when: _check_numbers does not look at even, or is so strict that 1/K in half precision is refused; or mean or
    # everything leaves a fact out, so that a quota or OverAll refuses it.
    rows = torch.tensor([1, 4, 6])
    for weights in ([0.5, 0.25, 0.25], [1.0, 1.0, 1.0], [1 / 3, 1 / 3, 0.334]):
        assert not Selection(rows, torch.tensor(weights), 8).even
        with refused("even=True with weights that are not all 1/3; Selection.mean(rows, num_rows)"):
            Selection(rows, torch.tensor(weights), 8, even=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for count in (1, 3, 7, 41, 49, 100, 1000):
            assert Selection(torch.arange(count), torch.full((count,), 1 / count, dtype=dtype), 1000, even=True).even
    assert Selection(torch.empty(0, dtype=torch.int64), torch.empty(0), 8, even=True).even  # a sum of nothing
    for name in ("even", "unbiased"):
        with refused(f"Selection got {name}=1"):
            Selection(rows, torch.full((3,), 1 / 3), 8, **{name: 1})
    mean, everything = Selection.mean(rows, 8), Selection.everything(8)
    assert (mean.even, mean.unbiased, everything.even, everything.unbiased) == (True, False, True, True)


def test_in_a_compiled_function_the_device_asserts_and_nobody_waits():
    # Red when: the numbers are read there too (which breaks the graph), or nobody looks at them. CUDA goes this way.
    compiled = torch.compile(lambda rows: Selection.mean(rows, 8).weights, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([1, 5])).tolist() == [0.5, 0.5]
    with pytest.raises(RuntimeError, match="Selection needs ascending rows in range, none of them twice"):
        compiled(torch.tensor([5, 1]))


def scores_alone(scores):
    return TopK(0.5)(scores)


def with_context(scores, given):
    assert isinstance(given, Context)
    return TopK(0.5)(scores, given)


class Module(nn.Module):
    """A selector that may have parameters, and whose other method selects, too."""

    def forward(self, scores, context):
        return with_context(scores, context)


FUNCTIONS = [
    *[with_context, TopK(0.5), Module(), Module().forward, lambda s, c: with_context(s, c)],
    *[lambda *given: with_context(*given), partial(lambda keep, scores, context: with_context(scores, context), 0.5)],
    *[selector(scores_alone), selector(partial(scores_alone))],
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_function_of_scores_and_a_context_is_a_selector(function):
    # Red when: a module is asked for the signature of nn.Module.__call__, or a part calls it with the scores alone.
    scores = torch.tensor([3.0, 1.0, 4.0, 2.0])
    assert rows_of(MultipleOf(function, 2)(scores)) == [0, 2]
    assert rows_of(PerClass(function)(scores, Context(classes=torch.tensor([0, 0, 1, 1])))) == [0, 2]
    assert rows_of(Global().select(function, scores)) == rows_of(Local().select(function, scores)) == [0, 2]


AROUND = {  # what takes a selector beside the step
    "MultipleOf": MultipleOf,
    "OverAll": OverAll,
    "PerClass": PerClass,
    "Global": lambda selector: Global().select(selector, torch.ones(4)),
    "Local": lambda selector: Local().select(selector, torch.ones(4)),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_no_selector_is_refused_where_it_is_given(name):
    # Red when: a class passes as callable, or nobody asks for the signature: a TypeError at the first step.
    for value in (TopK, 5, None):
        with refused(f"{name} got selector={value!r}, a {type(value).__name__}, ... an instance, e.g. TopK(keep=0.5)."):
            AROUND[name](value)
    for function in (scores_alone, lambda scores, losses, more: None):
        with refused(f"{name} got selector=<function ... rowprop.selector(f) makes one of a function of s"):
            AROUND[name](function)


class Counting:
    """A function of scores that remembers."""

    state_dict = load_state_dict = dict

    def __call__(self, scores):
        return TopK(0.5)(scores)


RETURNED = {"a Tensor": torch.arange(2), "a NoneType": None, "a Selection made from 3 rows": Selection.everything(3)}


@pytest.mark.parametrize(("described", "returned"), RETURNED.items())
def test_what_a_selector_returns_is_a_selection_of_its_scores(described, returned):
    # Red when: a wrapper does not look at the selection that the selector inside returned.
    inside = lambda scores, context: returned  # noqa: E731
    for select in (MultipleOf(inside), partial(Local().select, inside), partial(Global().select, inside)):
        with refused(f"The selector returned {described} but a Selection made from 4 rows"):
            select(torch.rand(4))
    with refused("The selector returned a Selection on meta for scores on cpu"):
        OverAll(lambda scores, context: Selection.everything(4, "meta"))(torch.rand(4))


FRACTION = "a fraction in [0, 1] was needed; write a quarter as"
WRONG = [  # a selector, its arguments, of which the last is refused, and what was needed; all others: the hostile trial
    *[
        (kind, {"keep": keep}, "a fraction in (0, 1] was needed; write a quarter as keep=0.25.")
        for kind in (TopK, RankSampling, RandomRows, ImportanceSampling, MaxVariance)
        for keep in (0, 0.0, -0.1, 1.0001, NAN, True, "0.5", None, Ramp)
    ],
    (LossMass, {"min_keep": 1.5}, f"{FRACTION} min_keep=0.25."),
    (Threshold, {"at_least": NAN}, "a finite number ... use TopK."),
    (PercentileSampling, {"beta": -1}, "a number of at least 0 was needed; 1 keeps half ... 3 a quarter."),
    (ImportanceSampling, {"keep": 0.5, "gate": "1.2"}, "a number or None was needed."),
    (ImportanceSampling, {"keep": 0.5, "smoothing": 1.0}, "a fraction in [0, 1) was needed"),
    (MultipleOf, {"selector": TopK(0.5), "multiple_of": 8.0}, "a whole number, 1 or more, was needed."),
]


@pytest.mark.parametrize(("kind", "arguments", "needed"), WRONG)
def test_an_argument_outside_its_range_is_refused_at_construction(kind, arguments, needed):
    # Red when: a selector loses its __post_init__.
    *_, (name, value) = arguments.items()
    with refused(f"{kind.__name__} got {name}={value!r} but {needed}"):
        kind(**arguments)


@pytest.mark.parametrize("selector", [AboveMean(), LossMass(), ImportanceSampling(0.5), MaxVariance(0.5)], ids=repr)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_mean_or_share_of_nonfinite_scores_is_refused(selector, bad):
    # Red when: lots, which are always finite, are counted with the scores, or the check is left out.
    with refused(f"{type(selector).__name__} got 2 of 4 scores NaN or infinite ... nonfinite='drop'"):
        selector(torch.tensor([1.0, bad, 2.0, bad]))


OF_FOUR = "came as a tensor of shape (3,) and dtype torch.int64 but int64 of shape (4,), one for each row"
OTHER_DEVICE = "got a generator on cpu but the scores are on meta; ... torch.Generator('meta')"
FOUR, NEGATIVE, HALF = torch.rand(4), torch.tensor([1.0, -0.5, 2.0]), TopK(0.5)
REFUSED = [
    (lambda: TopK(10**400), f"TopK got keep={str(10**400)[:57]}... but a fraction in (0, 1] was needed"),
    (lambda: TopBottom(0, 0.0), "TopBottom got top=0 and bottom=0, which keep no row; give one of them rows to keep."),
    (lambda: LossMass()(NEGATIVE), "LossMass got a loss of -0.5 but needs losses of at least 0 ... TopK or AboveMean"),
    (lambda: ImportanceSampling(0.5)(NEGATIVE), "ImportanceSampling got a score of -0.5 ... use RankSampling"),
    (lambda: HALF([1.0, 2.0]), "TopK got scores=[1.0, 2.0], a list, but one floating number per row was needed"),
    (lambda: HALF(FOUR.to("meta")), "TopK got scores on the device meta, which holds no numbers; move it"),
    (lambda: HALF(FOUR.to_sparse()), "TopK got scores that are sparse but a dense tensor was needed; call to_dense()."),
    (lambda: TopK(Ramp(1, 0.5))(FOUR), "keep of TopK needs progress ... total_steps ... Context(progress=0.5)."),
    *[
        (lambda kind=kind: kind(0.5)(FOUR.to("meta"), drawing()), f"{kind.__name__} {OTHER_DEVICE}")
        for kind in (RankSampling, RandomRows)
    ],
    (
        lambda: MultipleOf(PerClass(RandomRows(0.5)))(FOUR, Context(classes=torch.arange(4))),
        "MultipleOf got an unbiased selection from PerClass(selector=RandomRows(keep=0.5)) ... round the batch",
    ),
    (lambda: OverAll(Nonzero())(FOUR), "OverAll got a selection with weights of its own from Nonzero() ... as it is."),
    (lambda: PerClass(HALF)(FOUR), "PerClass needs classes, int64 of shape (N,); pass classes=..."),
    *[
        (lambda select=select, field=field: select(FOUR, Context(**{field: torch.arange(3)})), f"{field} {OF_FOUR}")
        for select in (PerClass(HALF), MultipleOf(PerClass(HALF)), partial(Local().select, HALF))
        for field in ("ids", "classes")
    ],
    # A memory would be wrapped, and no longer saved with the step.
    (lambda: selector(Counting()), "selector got function= ... give this one a second argument, the context"),
    (lambda: selector(with_context), "which takes other arguments"),
]


@pytest.mark.parametrize(("make", "sentence"), [*CONTEXTS, *REFUSED])
def test_what_cannot_work_is_refused_in_a_sentence(make, sentence):
    # Red when: the check is dropped; most of these would fail later in words of torch's, some never. Of contexts: need
    # hands out None or ends in an AttributeError, or at indexes as it comes: a mask of fewer rows, or an IndexError.
    with refused(sentence):
        make()


def test_the_page_on_selectors_lists_all_of_them():
    # Red when: a selector is added without a line in the table.
    page = (Path(__file__).parents[2] / "docs" / "selectors.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) == sorted(laws.SELECTORS)


NO_STATES = [
    (PercentileSampling, {}, "PercentileSampling.load_state_dict got a state without recent but all that"),
    (PercentileSampling, {"recent": [1.0]}, "got recent=[1.0], a list, but a tensor was needed"),
    (PercentileSampling, {"recent": ONE * NAN}, "recent scores of shape (1,) ... scores without NaN"),
    (PercentileSampling, {"recent": torch.arange(3)}, "dtype torch.int64 but floating scores without NaN"),
    (PercentileSampling, {"recent": torch.zeros(2, 2)}, "shape (2, 2) and dtype torch.float32 but floating"),
    (PercentileSampling, {"recent": torch.zeros(1025)}, "at most recent=1024"),
    (PercentileSampling, {"recent": torch.zeros(3, device="meta")}, "got recent on the device meta"),
    (partial(ImportanceSampling, 0.5), {"tau": "a"}, "got tau='a' but a number of at least 0 was needed"),
    (partial(ImportanceSampling, 0.5), {"tau": NAN}, "got tau=nan but a number of at least 0 was needed"),
    (partial(ImportanceSampling, 0.5), 5, "got 5, a int, but the mapping of state_dict"),
    (lambda: MultipleOf(PercentileSampling()), {"tau": 1.0}, "a state without recent but all that"),
    (lambda: OverAll(TopK(0.5)), {"tau": 1.0}, "got the entries ['tau'] but TopK(keep=0.5) remembers nothing"),
]


@pytest.mark.parametrize(("make", "state", "sentence"), NO_STATES)
def test_a_state_that_no_selector_can_have_made_is_refused_and_nothing_is_loaded(make, state, sentence):
    # Red when: a state is stored without a look: the next draw follows it, or fails.
    selector = make()
    selector(torch.arange(1.0, 9.0), drawing())
    before = str(selector.state_dict())
    with refused(sentence):
        selector.load_state_dict(state)
    assert str(selector.state_dict()) == before
