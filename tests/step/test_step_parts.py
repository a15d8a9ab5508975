"""The parts that a step is wired from, each by itself and against brute force."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rowprop.distributed import Share, alone
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, PruningSampler
from rowprop.integrations.shared import losses_of_rows
from rowprop.scoring import Scored
from rowprop.selection import Context, LossMass, Selection, Threshold, TopK
from rowprop.step import SelectiveBackprop
from rowprop.step.selective import (
    Scores,
    check_trained,
    mean_loss,
    mean_over_ranks,
    select_finite,
    widened,
    within_quota,
)
from sentences import says

VALUES = (1.0, 2.0, math.nan, math.inf, -math.inf)
PATTERNS = [torch.tensor(values) for values in itertools.product(VALUES, repeat=4)]
IDS = torch.tensor([40, 10, 30, 20])


def step_of(selector=None, model=None, **options) -> SelectiveBackprop:
    return SelectiveBackprop(model or squares, squares, selector or TopK(0.5), **options)


def given(**options):
    """A step with these settings."""
    return step_of(**options)


@pytest.mark.parametrize("name", ["selector", "engine", "history", "sampler", "accumulate_to", "timing"])
def test_arguments_stay_as_they_were_given(name: str):
    # Red when: an attribute can be set, unchecked, in the middle of a training.
    step = step_of()
    with pytest.raises(AttributeError, match=f"{name} stays as it was given; make another SelectiveBackprop"):
        setattr(step, name, None)


def squares(model, batch=None):
    return model(batch).squeeze(1).square()


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


# --- rows that are not finite -----------------------------------------------------------------------------------------


def test_error_refuses_each_pattern_with_a_nonfinite_row_and_passes_on_the_others():
    # Red when: an infinity or a -infinity passes, or the rows in the sentence are the finite ones.
    for scores in PATTERNS:
        bad = [row for row in range(4) if row not in finite_rows(scores)]
        asked = Asked(TopK(0.5))
        if not bad:
            chosen = select_finite(given(nonfinite="error"), asked, scores, Context(ids=IDS))
            assert chosen.rows.tolist() == hardest(scores.tolist(), 2) and asked.ids == [IDS.tolist()]
            continue
        with pytest.raises(InvalidInput) as caught:
            select_finite(given(nonfinite="error"), asked, scores, Context(ids=IDS))
        assert says(caught.value, f"{len(bad)} of 4 rows ... (rows {str(bad)[1:-1]}); ... nonfinite='drop' or 'keep'.")
        assert asked.scores == []


@pytest.mark.parametrize(
    ("selector", "count"), [(TopK(0.5), lambda n: math.ceil(n / 2)), (TopK(1.0), int)], ids=["half", "all"]
)
def test_drop_selects_among_the_finite_rows_of_each_pattern(selector, count):
    # Red when: places among the finite rows are taken for rows, weights are 1/N, or the context is that of all rows.
    for scores in PATTERNS:
        rows, asked = finite_rows(scores), Asked(selector)
        if not rows:
            with pytest.raises(InvalidInput, match="All 4 rows have a NaN or infinite loss or score"):
                select_finite(given(nonfinite="drop"), asked, scores, Context(ids=IDS))
            continue
        chosen = select_finite(given(nonfinite="drop"), asked, scores, Context(ids=IDS))
        expected = [rows[place] for place in hardest([scores[row].item() for row in rows], count(len(rows)))]
        assert chosen.rows.tolist() == expected and chosen.num_rows == 4 and chosen.even
        assert chosen.weights.tolist() == pytest.approx([1 / len(expected)] * len(expected))
        assert asked.ids == [IDS[rows].tolist()]


def test_keep_with_a_selector_that_ranks_puts_the_nonfinite_rows_of_each_pattern_first():
    # Red when: NaN or -infinity ranks last, or the finite rows lose their order.
    for scores in PATTERNS:
        asked = Asked(TopK(0.5))
        chosen = select_finite(given(nonfinite="keep"), asked, scores, Context(ids=IDS))
        ranked = [score if math.isfinite(score) else math.inf for score in scores.tolist()]
        assert chosen.rows.tolist() == hardest(ranked, 2) and asked.scores == [ranked] and asked.ids == [IDS.tolist()]


def test_keep_with_a_selector_that_needs_finite_scores_adds_the_nonfinite_rows_of_each_pattern():
    # Red when: the rows that are not finite are left out, replace the chosen ones, or the weights are those of a part.
    for scores in PATTERNS:
        rows, asked = finite_rows(scores), Asked(LossMass(0.6))
        chosen = select_finite(given(nonfinite="keep"), asked, scores, Context(ids=IDS))
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

    with pytest.raises(InvalidInput, match="not today"):
        select_finite(given(nonfinite="keep"), refusing, torch.tensor([1.0, math.nan]), Context())


def test_keep_with_a_fixed_count_reads_nothing_from_the_device():
    # Red when: the policy asks which rows are finite before the selector has refused them. A fake tensor has no data.
    with FakeTensorMode():
        scores = torch.empty(10)
        chosen = select_finite(given(nonfinite="keep"), TopK(0.3), scores, Context())
        assert chosen.num_kept == 3
        check_trained(given(nonfinite="keep"), scores[:3], chosen)
        mean_loss(given(nonfinite="keep"), scores, scores.isfinite())
        mean_loss(given(nonfinite="drop"), scores, scores.isfinite())
        for kind, selector in (("error", TopK(0.3)), ("drop", TopK(0.3)), ("keep", LossMass(0.5))):
            with pytest.raises(DataDependentOutputException):
                select_finite(given(nonfinite=kind), selector, scores, Context())


@pytest.mark.parametrize("kind", ["error", "drop", "keep"])
def test_the_mean_is_that_of_the_rows_to_choose_among(kind):
    # Red when: the mean under "drop" is over all rows, or has a row whose loss is finite and whose score is not.
    settings = given(nonfinite=kind)
    for losses in PATTERNS:
        finite = losses.isfinite() & torch.tensor([True, True, False, True])
        counted = losses[finite] if kind == "drop" else losses
        mean = mean_loss(settings, losses.bfloat16(), finite)
        torch.testing.assert_close(mean, counted.sum() / len(counted), equal_nan=True)
        assert mean.dtype == torch.float32
        assert math.isnan(mean_loss(settings, None, finite))


def test_a_rank_without_a_row_to_choose_among_is_named_where_rows_are_dropped():
    # Red when: the check runs under another policy, where each row counts, names the first rank whichever it is, or
    # refuses a rank whose batch has no token that counts.
    facts = torch.tensor([[3.0, 2.0, 3.0], [0.0, math.nan, 0.0], [1.0, 6.0, 4.0], [0.0, math.nan, 4.0]])
    with pytest.raises(InvalidInput, match="All rows of rank 3 have a NaN or infinite loss or score"):
        mean_over_ranks(given(nonfinite="drop"), facts)
    assert mean_over_ranks(given(nonfinite="drop"), facts[:3]).item() == 3  # 3 rows of 2 and one of 6
    assert mean_over_ranks(given(nonfinite="error"), facts).item() == 3


def test_losses_that_scoring_did_not_see_are_looked_at_by_row():
    # Red when: places among the kept rows are named instead of rows, or "keep" refuses non-finite losses.
    selection = Selection.mean(torch.tensor([1, 4, 6]), 8)
    kept = torch.tensor([2.0, math.nan, math.inf], requires_grad=True)
    for kind, advice in (("error", "look at the data"), ("drop", "scoring did not see it")):
        with pytest.raises(InvalidInput, match=rf"^2 of 8 rows have .* \(rows 4, 6\); {advice}"):
            check_trained(given(nonfinite=kind), kept, selection)
        check_trained(given(nonfinite=kind), kept[:1], Selection.mean(torch.tensor([1]), 8))
    check_trained(given(nonfinite="keep"), kept, selection)


# --- the least number of rows -----------------------------------------------------------------------------------------


def test_the_rows_that_go_along_are_the_hardest_finite_others():
    # Red when: a tie goes to the higher row, a non-finite row goes along beside others, or the floor is above N.
    for scores, least in itertools.product(PATTERNS[::6], range(1, 6)):
        for count in range(4):
            for rows in itertools.combinations(range(4), count):
                selection = Selection.mean(torch.tensor(rows, dtype=torch.int64), 4)
                run, places = widened(given(min_rows=least), selection, scores)
                if count >= min(least, 4):
                    assert run is selection and places is None
                    continue
                others = [row for row in finite_rows(scores) if row not in rows]
                others.sort(key=lambda row: (-scores[row].item(), row))
                added = others[: min(least, 4) - count]
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
    two, one = (Selection.mean(torch.arange(count), 4) for count in (2, 1))
    assert widened(given(model=Unsearched()), two, torch.ones(4)) == (two, None)
    assert widened(given(model=Unsearched(), min_rows=1), one, torch.ones(4)) == (one, None)
    with pytest.raises(AssertionError, match="searched"):
        widened(given(model=Unsearched()), one, torch.ones(4))
    normed = nn.BatchNorm1d(3)
    assert widened(given(model=normed), one, torch.ones(4))[0].rows.tolist() == [0, 1]
    assert widened(given(model=normed.eval()), one, torch.ones(4)) == (one, None)


@pytest.mark.parametrize("engine", ["masked", "recompute", "sliced"])
@pytest.mark.parametrize("selector", [TopK(0.1), TopK(0.4), Threshold(1e9)], ids=repr)
@pytest.mark.parametrize("least", [3, 7, 99])
def test_rows_that_go_along_leave_the_gradient_of_the_selection(engine, selector, least):
    # Red when: the losses of the rows that go along are not left out of the returned loss, or scale its weights.
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double(), torch.randn(10, 4).double()
    plain = copy.deepcopy(model)
    loss, record = SelectiveBackprop(model, squares, selector, engine=engine, min_rows=least)(batch)
    loss.backward()
    expected = (squares(plain, batch)[record.selection.rows] * record.selection.weights).sum()
    expected.backward()
    assert record.selection.rows.tolist() == selector(squares(plain, batch)).rows.tolist()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# --- rows gathered over several batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("target", [1, 5, 8])
def test_ranks_contribute_exactly_b_rows_in_their_order(world, target):
    # Red when: surplus rows are carried over, cut from the first ranks, or the weights are scaled by the rows left.
    generator = torch.Generator().manual_seed(world * 10 + target)
    settings, pending, given_rows, steps = given(accumulate_to=target), 0, [], 0
    for batch in range(60):
        counts = tuple(torch.randint(4, (world,), generator=generator).tolist())
        whole = sum(counts)
        offered = [(batch, rank, row) for rank in range(world) for row in range(counts[rank])]
        taken = offered[: target - len(given_rows)]
        given_rows += taken
        for rank in range(world):
            # Averaged over the ranks, these weights make each kept row count 1 / sum(K).
            weights = torch.full((counts[rank],), world / max(1, whole))
            selection = Selection(torch.arange(counts[rank]) * 2, weights, 8)
            cut, within = within_quota(settings, Share(selection, counts, True, rank), pending)
            expected = [2 * row for _, of, row in taken if of == rank]
            assert cut.rows.tolist() == expected and cut.num_rows == 8
            assert cut.weights.tolist() == pytest.approx([world / target] * len(expected))
            assert within == tuple(sum(of == other for _, of, _ in taken) for other in range(world))
        pending += len(taken)
        assert pending == len(given_rows)
        if pending == target:
            pending, given_rows, steps = 0, [], steps + 1
    assert steps > 5


def test_without_a_target_each_selection_is_a_step_of_its_own():
    # Red when: a selection with weights of its own is refused where nothing has to be gathered, or is copied.
    selection = Selection(torch.tensor([1, 3]), torch.tensor([0.2, 2.0]), 4)
    assert within_quota(given(), alone(selection), 0) == (selection, (2,))


def test_weights_of_a_selections_own_are_refused_with_the_selector_that_made_them():
    # Red when: weights that are 1/K by chance pass: the run would end at the first that are not.
    selection = Selection(torch.tensor([1, 3]), torch.tensor([0.5, 0.5]), 4)
    with pytest.raises(InvalidInput) as caught:
        within_quota(given(accumulate_to=4), alone(selection), 0)
    assert says(caught.value, "accumulate_to=4 and a selection with weights of its own from TopK(keep=0.5) ... 1/K")


# --- the memory of the step -------------------------------------------------------------------------------------------


class Notebook(LossHistory):
    """A history that writes down its updates."""

    def __init__(self):
        super().__init__()
        self.updates = []

    def update(self, ids, losses, rows):
        self.updates.append((ids.tolist(), [None if x != x else x for x in losses.tolist()], rows.tolist()))

    def weights_of(self, ids):
        return ids / 10


SCORES = torch.tensor([5.0, 6.0, 7.0, 8.0])
CHOSEN = Selection(torch.tensor([0, 2]), torch.tensor([0.5, 0.25]), 4)


def chooses(scores, context):
    return CHOSEN


def test_a_history_multiplies_the_weights_by_its_factors_and_gets_the_losses_that_are_known():
    # Red when: factors go by place instead of by id, scores are given for losses, or weights lose their dtype.
    history, factor = Notebook(), torch.ones((), requires_grad=True)
    for engine in ("sliced", "recompute"):
        scorer = (lambda model, batch: -batch) if engine == "recompute" else None
        losses_fn = lambda model, batch: batch * factor  # noqa: E731
        step = SelectiveBackprop(squares, losses_fn, chooses, history=history, engine=engine, scorer=scorer)
        weighed = step(SCORES, ids=IDS)[1].selection
        assert weighed.rows.tolist() == [0, 2] and weighed.weights.tolist() == [2.0, 0.75]
        assert weighed.weights.dtype == torch.float32 and not weighed.even and not weighed.unbiased
    assert history.updates == [
        (IDS.tolist(), [5.0, 6.0, 7.0, 8.0], [0, 2]),
        (IDS.tolist(), [5.0, None, 7.0, None], [0, 2]),
    ]
    assert (step.history, step.sampler, step.progress) == (history, None, None)


def test_rows_are_counted_as_trained_in_the_epoch_of_the_sampler_they_belong_to():
    # Red when: the mark goes on into the next epoch, a batch that is given twice counts twice, an earlier batch sets
    # the mark back, or the mark is lost with a saved state.
    def made():
        return step_of(chooses, history=PruningSampler(LossHistory(8), num_rows=8, epochs=2))

    def note(step, ids):
        step._remember(CHOSEN, Scores(SCORES, SCORES, None, Context(ids=ids)), SCORES[:2])
        return step._rows_trained(), step.progress

    step = made()
    assert (step.history, step._rows_trained(), step.progress) == (step.sampler.history, 0, 0)
    order = torch.tensor(list(step.sampler))
    for _ in range(2):
        assert note(step, order[:4]) == (4, 0.25)
    for ids in (order[4:], order[:4]):
        assert note(step, ids) == (8, 0.5)
    assert step.history.count_of(order).tolist() == [3, 0, 3, 0, 1, 0, 1, 0]
    order = torch.tensor(list(step.sampler))
    assert note(step, order[:4]) == (4, 0.5 + 4 / len(order) / 2)

    half, resumed = made(), made()
    order = torch.tensor(list(half.sampler))
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
