"""The parts that a step is wired from, each by itself and against brute force."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from rowprop.errors import InvalidInput
from rowprop.integrations.shared import losses_of_rows
from rowprop.scoring import Scored
from rowprop.selection import AboveMean, Context, LossMass, OverAll, Selection, Threshold, TopK
from rowprop.step import SelectiveBackprop
from rowprop.step.selective import mean_over_ranks, select_finite, widened
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


def above_mean(scores: list[float]) -> list[int]:
    return [row for row, score in enumerate(scores) if score > sum(scores) / len(scores)] or list(range(len(scores)))


CHOICES = {  # the rows that a selector takes of finite scores, in plain Python
    TopK(0.5): lambda scores: hardest(scores, math.ceil(len(scores) / 2)),
    TopK(1.0): lambda scores: list(range(len(scores))),
    LossMass(0.6): lambda scores: fewest(scores, 0.6),
    AboveMean(): above_mean,
}


@pytest.mark.usefixtures("as_host")
@pytest.mark.parametrize("nonfinite", ["error", "drop", "keep"])
@pytest.mark.parametrize("selector", CHOICES, ids=repr)
def test_each_policy_chooses_by_its_word_in_each_pattern_of_losses(engine, selector, nonfinite):
    # Red when: an infinity passes "error", or the rows in its sentence are the finite ones; places among the finite
    # rows are taken for rows, weights are 1/N, loss_all has the dropped rows, or the context is that of all rows; NaN
    # or -infinity ranks last under "keep", or the finite rows lose their order; there a selector that needs finite
    # scores (AboveMean) sees an infinity, or the other rows are left out, or replace the chosen ones.
    for losses in PATTERNS if engine == "masked" else PATTERNS[::7]:
        finite, asked = finite_rows(losses), Asked(selector)
        other, step = sorted({*range(4)} - {*finite}), shift_step(asked, engine=engine, nonfinite=nonfinite)
        if (other and nonfinite == "error") or (not finite and nonfinite == "drop"):
            few = f"{len(other)} of 4 rows ... (rows {str(other)[1:-1]}); ... nonfinite='drop' or 'keep'."
            with refused(few if nonfinite == "error" else "All 4 rows have a NaN or infinite loss or score; look at"):
                step(losses, ids=IDS)
            assert asked.scores == []
            continue
        among = list(range(4)) if nonfinite == "keep" and isinstance(selector, TopK) else finite
        values = [losses[row].item() if row in finite else math.inf for row in among]
        rows = {among[place] for place in CHOICES[selector](values)} if among else set()
        rows = sorted(rows | {*other} if nonfinite == "keep" and among is finite else rows)
        loss, record = step(losses, ids=IDS)
        chosen = record.selection
        assert chosen.rows.tolist() == rows and chosen.num_rows == 4 and chosen.even
        assert chosen.weights.tolist() == pytest.approx([1 / len(rows)] * len(rows))
        torch.testing.assert_close(loss.detach(), losses[rows].mean(), equal_nan=True)
        counted = losses[finite] if nonfinite == "drop" else losses
        torch.testing.assert_close(record.loss_all, counted.mean(), equal_nan=True)
        whole = selector == TopK(1.0)  # which is not asked, as it keeps every row
        assert whole or (asked.ids, asked.scores) == (([IDS[among].tolist()], [values]) if among else ([], []))


def test_keep_passes_on_every_other_refusal_of_a_selector():
    # Red when: any error of the selector is taken for its need of finite scores, and it is asked once more.
    def refusing(scores, context):
        if not scores.isfinite().all():
            raise InvalidInput("not today")
        return TopK(0.5)(scores)

    with refused("not today"):
        select_finite(a_step(nonfinite="keep"), refusing, torch.tensor([1.0, math.nan]), Context())


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
