"""The parts that a step is wired from, each by itself and against brute force."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from rowprop.distributed import Share
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, PruningSampler
from rowprop.integrations.shared import losses_of_rows
from rowprop.scoring import Scored
from rowprop.selection import Context, LossMass, OverAll, Selection, Threshold, TopK
from rowprop.step import SelectiveBackprop
from rowprop.step.selective import Scores, mean_loss, mean_over_ranks, select_finite, widened, within_quota
from sentences import refused
from step_cases import ENGINES, a_batch, assert_gradients_equal, backpropagated, regression, shift_step, squared

VALUES = (1.0, 2.0, math.nan, math.inf, -math.inf)
PATTERNS = [torch.tensor(values) for values in itertools.product(VALUES, repeat=4)]
IDS = torch.tensor([40, 10, 30, 20])


def a_step(**options) -> SelectiveBackprop:
    return shift_step(TopK(0.5), **options)


class Asked:
    """A selector that writes down the scores and the ids of each call."""

    def __init__(self, selector):
        self.selector, self.scores, self.ids = selector, [], []

    def __call__(self, scores: Tensor, context: Context) -> Selection:
        chosen = self.selector(scores, context)  # calls that it refuses are not written down
        self.scores.append(scores.tolist())
        self.ids.append(context.ids.tolist())
        return chosen


def finite_rows(scores: Tensor) -> list[int]:
    return [row for row, score in enumerate(scores.tolist()) if math.isfinite(score)]


def hardest(scores: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:count])


def fewest(scores: list[float], share: float) -> list[int]:
    """Brute force for ``LossMass``: the fewest rows, hardest first, that hold a share of the sum."""
    count = next(count for count in range(1, len(scores) + 1) if sum(sorted(scores)[-count:]) >= share * sum(scores))
    return hardest(scores, count)


def test_error_refuses_each_pattern_with_a_nonfinite_row_and_passes_on_the_others():
    # Red when: an infinity or a -infinity passes, or the rows in the sentence are the finite ones.
    step = a_step(nonfinite="error")
    for scores in PATTERNS:
        bad, asked = [row for row in range(4) if row not in finite_rows(scores)], Asked(TopK(0.5))
        if not bad:
            chosen = select_finite(step, asked, scores, Context(ids=IDS))
            assert chosen.rows.tolist() == hardest(scores.tolist(), 2) and asked.ids == [IDS.tolist()]
            continue
        with refused(f"{len(bad)} of 4 rows ... (rows {str(bad)[1:-1]}); ... nonfinite='drop' or 'keep'."):
            select_finite(step, asked, scores, Context(ids=IDS))
        assert asked.scores == []


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_drop_selects_among_the_finite_rows_of_each_pattern(keep):
    # Red when: places among the finite rows are taken for rows, weights are 1/N, or the context is that of all rows.
    step = a_step(nonfinite="drop")
    for scores in PATTERNS:
        rows, asked = finite_rows(scores), Asked(TopK(keep))
        if not rows:
            with refused("All 4 rows have a NaN or infinite loss or score; look at the data"):
                select_finite(step, asked, scores, Context(ids=IDS))
            continue
        chosen = select_finite(step, asked, scores, Context(ids=IDS))
        places = hardest([scores[row].item() for row in rows], math.ceil(keep * len(rows)))
        expected = [rows[place] for place in places]
        assert chosen.rows.tolist() == expected and chosen.num_rows == 4 and chosen.even
        assert chosen.weights.tolist() == pytest.approx([1 / len(expected)] * len(expected))
        assert asked.ids == [IDS[rows].tolist()]


def test_keep_with_a_selector_that_ranks_puts_the_nonfinite_rows_of_each_pattern_first():
    # Red when: NaN or -infinity ranks last, or the finite rows lose their order.
    step = a_step(nonfinite="keep")
    for scores in PATTERNS:
        asked = Asked(TopK(0.5))
        chosen = select_finite(step, asked, scores, Context(ids=IDS))
        ranked = [score if math.isfinite(score) else math.inf for score in scores.tolist()]
        assert chosen.rows.tolist() == hardest(ranked, 2) and asked.scores == [ranked] and asked.ids == [IDS.tolist()]


def test_keep_with_a_selector_that_needs_finite_scores_adds_the_nonfinite_rows_of_each_pattern():
    # Red when: the rows that are not finite are left out, replace the chosen ones, or the weights are those of a part.
    step = a_step(nonfinite="keep")
    for scores in PATTERNS:
        rows, asked = finite_rows(scores), Asked(LossMass(0.6))
        chosen = select_finite(step, asked, scores, Context(ids=IDS))
        among = [rows[place] for place in fewest([scores[row].item() for row in rows], 0.6)] if rows else []
        expected = sorted({*among, *(set(range(4)) - set(rows))})
        assert chosen.rows.tolist() == expected and chosen.even
        assert chosen.weights.tolist() == pytest.approx([1 / len(expected)] * len(expected))
        assert asked.ids == ([IDS[rows].tolist()] if rows else [])


def test_keep_passes_on_every_other_refusal_of_a_selector():
    # Red when: any error of the selector is taken for its need of finite scores, and it is asked once more.
    def refusing(scores, context):
        if not scores.isfinite().all():
            raise InvalidInput("not today")
        return TopK(0.5)(scores)

    with refused("not today"):
        select_finite(a_step(nonfinite="keep"), refusing, torch.tensor([1.0, math.nan]), Context())


@pytest.mark.parametrize("kind", ["error", "drop", "keep"])
def test_the_mean_is_that_of_the_rows_to_choose_among(kind):
    # Red when: the mean under "drop" is over all rows, or has a row whose loss is finite and whose score is not.
    step = a_step(nonfinite=kind)
    for losses in PATTERNS:
        finite = losses.isfinite() & torch.tensor([True, True, False, True])
        counted = losses[finite] if kind == "drop" else losses
        mean = mean_loss(step, losses.bfloat16(), finite)
        torch.testing.assert_close(mean, counted.sum() / len(counted), equal_nan=True)
        assert mean.dtype == torch.float32
        assert math.isnan(mean_loss(step, None, finite))


def test_a_rank_without_a_row_to_choose_among_is_named_where_rows_are_dropped():
    # Red when: the check runs under another policy, where each row counts, names the first rank whichever it is, or
    # refuses a rank whose batch has no token that counts.
    facts = torch.tensor([[3.0, 2.0, 3.0], [0.0, math.nan, 0.0], [1.0, 6.0, 4.0], [0.0, math.nan, 4.0]])
    with refused("All rows of rank 3 have a NaN or infinite loss or score"):
        mean_over_ranks(a_step(nonfinite="drop"), facts)
    assert mean_over_ranks(a_step(nonfinite="drop"), facts[:3]).item() == 3  # 3 rows of 2 and one of 6
    assert mean_over_ranks(a_step(nonfinite="error"), facts).item() == 3


def test_the_rows_that_go_along_are_the_hardest_finite_others():
    # Red when: a tie goes to the higher row, a non-finite row goes along beside others, or the floor is above N.
    steps = {least: a_step(min_rows=least) for least in range(1, 6)}
    subsets = [rows for count in range(4) for rows in itertools.combinations(range(4), count)]
    for scores, least, rows in itertools.product(PATTERNS[::6], steps, subsets):
        selection = Selection.mean(torch.tensor(rows, dtype=torch.int64), 4)
        run, places = widened(steps[least], selection, scores)
        if len(rows) >= min(least, 4):
            assert run is selection and places is None
            continue
        others = [row for row in finite_rows(scores) if row not in rows]
        others.sort(key=lambda row: (-scores[row].item(), row))
        added = others[: min(least, 4) - len(rows)]
        if not rows and not added:
            assert run.num_kept == 1  # a rank that keeps nothing runs a forward all the same
        else:
            assert run.rows.tolist() == sorted([*rows, *added])
        assert run.rows[places].tolist() == list(rows)


class Unsearched(nn.Module):
    def modules(self):
        raise AssertionError("searched")


def test_a_model_is_searched_for_batchnorm_only_where_one_row_or_none_is_kept():
    # Red when: every step goes through all modules of the model, or a given number is not the last word.
    def run(model, count, **options):
        selection = Selection.mean(torch.arange(count), 4)
        step = SelectiveBackprop(model, squared, TopK(0.5), **options)
        return widened(step, selection, torch.ones(4))[0].num_kept

    assert run(Unsearched(), 2) == 2 and run(Unsearched(), 1, min_rows=1) == 1
    with pytest.raises(AssertionError, match="searched"):
        run(Unsearched(), 1)
    assert run(nn.BatchNorm1d(3), 1) == 2 and run(nn.BatchNorm1d(3).eval(), 1) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("selector", [TopK(0.1), TopK(0.4), OverAll(TopK(0.4)), Threshold(1e9)], ids=repr)
@pytest.mark.parametrize("least", [3, 7, 99])
def test_rows_that_go_along_leave_the_gradient_of_the_selection(engine, selector, least):
    # Red when: the losses of the rows that go along are not left out of the returned loss, or scale its weights.
    model, batch = regression(), a_batch(0)
    plain = copy.deepcopy(model)
    loss, record = backpropagated(SelectiveBackprop(model, squared, selector, engine=engine, min_rows=least)(batch))
    losses = squared(plain, batch)
    chosen = selector(losses)
    expected = (losses[chosen.rows] * chosen.weights).sum()
    expected.backward()
    assert torch.equal(record.selection.rows, chosen.rows)
    assert torch.equal(record.selection.weights, chosen.weights)
    torch.testing.assert_close(loss, expected)
    assert_gradients_equal(model, plain)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("target", [1, 5, 8])
def test_ranks_contribute_exactly_b_rows_in_their_order(world, target):
    # Red when: surplus rows are carried over, cut from the first ranks, or the weights are scaled by the rows left.
    generator = torch.Generator().manual_seed(world * 10 + target)
    step, pending, given_rows, steps = a_step(accumulate_to=target), 0, [], 0
    for batch in range(60):
        counts = tuple(torch.randint(4, (world,), generator=generator).tolist())
        offered = [(batch, rank, row) for rank in range(world) for row in range(counts[rank])]
        taken = offered[: target - len(given_rows)]
        given_rows += taken
        for rank in range(world):
            # Averaged over the ranks, these weights make each kept row count 1 / sum(K).
            weights = torch.full((counts[rank],), world / max(1, sum(counts)))
            selection = Selection(torch.arange(counts[rank]) * 2, weights, 8)
            cut, within = within_quota(step, Share(selection, counts, True, rank), pending)
            expected = [2 * row for _, of, row in taken if of == rank]
            assert cut.rows.tolist() == expected and cut.num_rows == 8
            assert cut.weights.tolist() == pytest.approx([world / target] * len(expected))
            assert within == tuple(sum(of == other for _, of, _ in taken) for other in range(world))
        pending += len(taken)
        assert pending == len(given_rows)
        if pending == target:
            pending, given_rows, steps = 0, [], steps + 1
    assert steps > 5


def test_rows_are_counted_as_trained_in_the_epoch_of_the_sampler_they_belong_to():
    # Red when: the mark goes on into the next epoch, a batch that is given twice counts twice, an earlier batch sets
    # the mark back, or the mark is lost with a saved state.
    scores, chosen = torch.tensor([5.0, 6.0, 7.0, 8.0]), Selection.mean(torch.tensor([0, 2]), 4)

    def made():
        step = a_step(history=PruningSampler(LossHistory(8), num_rows=8, epochs=2))
        return step, torch.tensor(list(step.sampler))

    def note(step, ids):
        step._remember(chosen, Scores(scores, scores, None, Context(ids=ids)), scores[:2])
        return step._rows_trained(), step.progress

    step, order = made()
    assert (step._rows_trained(), step.progress) == (0, 0)
    for _ in range(2):
        assert note(step, order[:4]) == (4, 0.25)
    for ids in (order[4:], order[:4]):
        assert note(step, ids) == (8, 0.5)
    assert step.history.count_of(order).tolist() == [3, 0, 3, 0, 1, 0, 1, 0]
    order = torch.tensor(list(step.sampler))
    assert note(step, order[:4]) == (4, 0.5 + 4 / len(order) / 2)

    (half, order), (resumed, _) = made(), made()
    note(half, order[:4])
    resumed.load_state_dict(half.state_dict())
    assert (resumed._rows_trained(), resumed.progress) == (4, 0.25) and list(resumed.sampler) == order[4:].tolist()
    assert note(resumed, order[:4]) == (4, 0.25) and note(resumed, order[4:]) == (8, 0.5)


def test_adapters_give_each_row_the_mean_of_its_places():
    # Red when: losses of pixels reach the step of an adapter, scores keep their places, or tokens lose theirs.
    pixels = torch.rand(3, 2, 5)
    for given in (pixels, Scored(pixels, -pixels)):
        of_rows = losses_of_rows(lambda model, batch, given=given: given, {})(None, None)
        found, scores = (of_rows.losses, of_rows.scores) if isinstance(given, Scored) else (of_rows, -of_rows)
        torch.testing.assert_close(found, torch.stack([row.mean() for row in pixels]))
        torch.testing.assert_close(scores, -found)
    assert losses_of_rows(lambda model, batch: pixels, {"unit": "token"})(None, None) is pixels
    assert losses_of_rows(lambda model, batch: "text", {"unit": "row"})(None, None) == "text"  # for the step to refuse
