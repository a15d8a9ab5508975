"""The step: its policies, its accumulation and its memory, each against a plain loop."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import rowprop
from accelerator import Waits
from rowprop import recipes
from rowprop.cost.count import count_step
from rowprop.cost.profile import profile
from rowprop.distributed import Global, Local
from rowprop.engines import Masked, Recompute, Sliced
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, PruningSampler, StaleScorer, holdout_losses
from rowprop.schedule import Ramp, Schedule
from rowprop.scoring import Scored
from rowprop.selection import (
    AboveMean,
    Everything,
    ImportanceSampling,
    LossMass,
    MultipleOf,
    Nonzero,
    PerClass,
    RandomRows,
    RankSampling,
    Selection,
    Threshold,
    TopK,
)
from rowprop.step.selective import SelectiveBackprop
from sentences import says

ENGINES = ["masked", "recompute", "sliced"]


class Shift(nn.Module):
    """The loss of a row is the number in the batch, so selections can be written down by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, values):
        return values + self.weight * values.nan_to_num(0, 0, 0)


def given_losses(model, batch):
    return model(batch)


def shift_step(selector, **options) -> SelectiveBackprop:
    return SelectiveBackprop(Shift(), given_losses, selector, **options)


def regression(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


def squared(model, batch):
    return (model(batch["x"]).squeeze(1) - batch["y"]).square()


def a_batch(seed: int, size: int = 10) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, generator=generator)}


def assert_gradients_equal(model, reference, rtol=1e-5, atol=1e-7):
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=rtol, atol=atol)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_column_of_losses_is_one_loss_per_row(engine):
    # Red when: (N, 1) is refused, in the losses or in the scores beside them.
    batch, records, models = a_batch(0), [], [regression() for _ in range(4)]
    for model, column, scored in zip(models, (True, False) * 2, (True, True, False, False), strict=True):

        def losses_fn(model, batch, column=column, scored=scored):
            losses, scores = squared(model, batch), batch["x"][:, 0]
            losses, scores = (losses[:, None], scores[:, None]) if column else (losses, scores)
            return Scored(losses, scores) if scored else losses

        loss, record = SelectiveBackprop(model, losses_fn, TopK(0.3), engine=engine)(batch)
        loss.backward()
        records.append(record.selection.rows.tolist())
    assert records[0] == records[1] != records[2] == records[3]
    assert_gradients_equal(*models[:2])
    assert_gradients_equal(*models[2:])


def test_a_losses_function_with_another_output_is_refused_with_the_remedy():
    # Red when: (N, C) is averaged, (N, 1, 1) is taken, a bare pair is taken for losses and scores, or the sentence
    # lacks the way out.
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    model = nn.Linear(4, 3)
    cases = {
        lambda m, b: m(b[0]): "shape (6, 3) and dtype torch.float32 but one number per row was needed, shape (6,) or "
        "(6, 1); reduce each row by `.mean(1)` or `.sum(1)`.",
        lambda m, b: m(b[0])[:, :1, None]: "reduce each row by `.flatten(1).mean(1)` or `.flatten(1).sum(1)`.",
        lambda m, b: m(b[0]).view(6, 1, 3): "reduce each row by `.flatten(1).mean(1)` or `.flatten(1).sum(1)`.",
        lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none"), m(b[0])): "losses_fn returned a tuple but one "
        "number per row was needed, shape (6,) or (6, 1); return the losses alone, or rowprop.Scored(losses, scores).",
        lambda m, b: Scored(F.cross_entropy(m(b[0]), b[1], reduction="none"), m(b[0])): "losses_fn returned scores of "
        "shape (6, 3)",
        lambda m, b: Scored(F.cross_entropy(m(b[0]), b[1], reduction="none"), torch.rand(5)): "losses_fn returned "
        "scores of shape (5,)",
    }
    for losses_fn, sentence in cases.items():
        for engine in ENGINES:
            with pytest.raises(InvalidInput) as caught:
                SelectiveBackprop(model, losses_fn, TopK(0.5), engine=engine)((x, y))
            assert sentence in str(caught.value)
    with pytest.raises(InvalidInput, match=r"scorer returned a tensor of shape \(6, 3\) .* by `.mean\(1\)`"):
        SelectiveBackprop(model, lambda m, b: m(b[0]).mean(1), TopK(0.5), scorer=lambda m, b: m(b[0]), engine="sliced")(
            (x, y)
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda losses_fn, batch, model: recipes.ohem(model, losses_fn, engine="sliced")(batch),
        lambda losses_fn, batch, model: rowprop.verify(model, batch, losses_fn),
        lambda losses_fn, batch, model: rowprop.plan(model, batch, losses_fn),
        lambda losses_fn, batch, model: profile(model, batch, losses_fn),
        lambda losses_fn, batch, model: count_step(model, batch, losses_fn),
        lambda losses_fn, batch, model: holdout_losses(model, losses_fn, [(torch.arange(8), batch)]),
        lambda losses_fn, batch, model: SelectiveBackprop(
            model, lambda m, b: m(b).mean(1), TopK(0.5), scorer=StaleScorer(losses_fn), history=LossHistory(),
            engine="recompute",
        )(batch, ids=torch.arange(8)),
    ],
    ids=["ohem", "verify", "plan", "profile", "count_step", "holdout_losses", "StaleScorer"],
)  # fmt: skip
def test_every_door_that_takes_a_losses_function_refuses_what_is_not_one_loss_per_row(call):
    # Red when: one of them averages by itself, or takes a bare pair.
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(8, 4)
    with pytest.raises(InvalidInput, match=r"losses_fn returned a tensor of shape \(\d, 3\).* by `.mean\(1\)` or"):
        call(lambda model, batch: model(batch), batch, model)
    with pytest.raises(InvalidInput, match=r"losses_fn returned a tuple .* or rowprop.Scored\(losses, scores\)\.$"):
        call(lambda model, batch: (model(batch).mean(1), model(batch)), batch, model)


def test_arguments_in_another_order_are_refused_at_construction():
    # Red when: the order is not looked at: the pairs below can all be called with as many arguments as are needed.
    def losses_fn(model, batch):
        return model(batch, batch)

    model, selector = nn.Bilinear(2, 2, 1), TopK(0.5)
    for given in itertools.permutations((model, losses_fn, selector)):
        if given == (model, losses_fn, selector):
            SelectiveBackprop(*given)
            continue
        with pytest.raises(InvalidInput, match=r"another order; write SelectiveBackprop\(model, losses_fn, selector\)"):
            SelectiveBackprop(*given)
    for second, third in ((selector, lambda m, b: m(b, b)), (lambda s, context: selector(s), losses_fn)):
        with pytest.raises(InvalidInput, match="another order"):
            SelectiveBackprop(model, second, third)


def test_a_batch_in_two_arguments_is_refused_with_the_remedy():
    # Red when: the second is taken for the number of the batch, whose refusal prints it.
    step = SelectiveBackprop(regression(), lambda model, batch: model(batch[0]).squeeze(1), TopK(0.5))
    for second in (torch.arange(10), {"y": torch.arange(10)}):
        with pytest.raises(InvalidInput, match=r"^a call got a second batch as batch_index; .*`selective\(\("):
            step(torch.randn(10, 4), second)
    assert step((torch.randn(10, 4), None), 3)[1].step == 0


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_an_even_selection_gives_the_mean_of_plain_indexing_bit_for_bit(keep: float):
    # Red where the loss is the sum of losses times 1/K: it differs from the mean in the last bit for most K.
    model, generator = torch.nn.Linear(4, 1), torch.Generator().manual_seed(0)
    selective = SelectiveBackprop(model, lambda model, x: model(x).squeeze(1).square(), TopK(keep), engine="sliced")
    for rows in range(2, 30):
        x = torch.randn(rows, 4, generator=generator)
        loss, record = selective(x)
        assert torch.equal(loss, model(x).squeeze(1).square()[record.selection.rows].mean())


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (
            torch.tensor(1.0),
            "a tensor of shape () ... shape (4,) or (4, 1); pass reduction='none' to the loss.",
        ),
        (
            torch.rand(12),
            "a tensor of shape (12,) ... shape (4,) or (4, 1); ... `loss.view(N, -1).mean(1)`.",
        ),
        (
            {"loss": 1},
            "a dict but one number per row ... take the loss out of your model's output, inside losses_fn.",
        ),
        (
            torch.arange(4),
            "a tensor of shape (4,) and dtype torch.int64 ... it must be a floating tensor with at least one entry.",
        ),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_that_are_not_one_per_row_are_refused_at_the_first_call(engine, returned, sentence):
    step = SelectiveBackprop(regression(), lambda model, batch: returned, TopK(0.5), engine=engine)
    with pytest.raises(InvalidInput) as caught:
        step(a_batch(0, 4))
    assert says(caught.value, f"losses_fn returned {sentence}"), str(caught.value)


def test_a_batch_of_unknown_make_is_fine_for_one_forward_and_refused_by_recompute():
    # Red when: an engine with one forward insists on knowing N beforehand.
    class Graph:
        x = torch.randn(6, 4)

    def losses_fn(model, graph):
        return model(graph.x).square().squeeze(1)

    assert SelectiveBackprop(regression(), losses_fn, TopK(0.5))(Graph())[1].num_rows == 6
    with pytest.raises(InvalidInput, match="The batch is a Graph without a tensor of rows"):
        SelectiveBackprop(regression(), losses_fn, TopK(0.5), engine="recompute")(Graph())


# --- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scorer_ranks_and_the_losses_are_trained(engine):
    # Red when: the losses are ranked although there is a scorer, or the scorer's graph is kept.
    model = regression()
    reference = copy.deepcopy(model)
    batch = a_batch(0) | {"wanted": torch.tensor([0.0, 9, 1, 8, 2, 7, 3, 6, 4, 5])}
    step = SelectiveBackprop(model, squared, TopK(0.3), engine=engine, scorer=lambda model, batch: batch["wanted"])
    loss, record = step(batch)
    loss.backward()
    losses = squared(reference, batch)
    losses[[1, 3, 5]].mean().backward()
    assert record.selection.rows.tolist() == [1, 3, 5]
    assert_gradients_equal(model, reference)
    if engine == "recompute":
        assert math.isnan(record.loss_all)  # nobody ran all rows through the loss
    else:
        torch.testing.assert_close(record.loss_all, losses.detach().mean())


def test_weights_of_a_selector_reach_the_loss():
    # Red when: the step takes a plain mean of the kept losses.
    def importance(scores, context):
        return Selection(torch.tensor([0, 2]), torch.tensor([0.75, 0.5]), scores.numel())

    loss, record = shift_step(importance)(torch.tensor([1.0, 2.0, 4.0]))
    assert loss.item() == 0.75 * 1 + 0.5 * 4 and record.loss_kept == 2.5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("selector", [TopK(0.5), LossMass(0.5)], ids=repr)
def test_the_schedule_says_which_batches_are_whole(engine, selector):
    # Red when: progress counts from 1, or interrupt's batch index is ignored.
    step = shift_step(selector, engine=engine, schedule=Schedule(0.25, 0.75, 3), total_steps=8)
    kept = [step(torch.arange(1.0, 9.0))[1] for _ in range(10)]
    whole = [record.num_kept == 8 for record in kept]
    assert whole == [True, True, True, False, False, True, True, True, True, True]  # 2 and 5 are interrupts
    assert kept[0].reason == "the whole batch: the schedule is not active in batch 0 at progress 0.000"
    step = shift_step(selector, engine=engine, schedule=Schedule(0, 1, 2), total_steps=8)
    assert [step(torch.arange(1.0, 9.0), index)[1].num_kept == 8 for index in (1, 0, 0, 3)] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_all_rows_in_another_order_or_twice_are_refused_and_a_right_order_is_the_plain_loss(engine):
    # Red when: a Selection is not checked: K = N rows in any order, or one of them for all, pass as all rows as they
    # are, and loss and gradient belong to other weights.
    weights = torch.arange(1.0, 9.0)

    def step(rows):
        return shift_step(lambda scores, context: Selection(torch.tensor(rows), weights, 8), engine=engine)

    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
    for rows in ([7, 6, 5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 6]):
        with pytest.raises(InvalidInput, match="Selection got row "):
            step(rows)(values)
    sound = step(list(range(8)))
    loss, _ = sound(values)
    loss.backward()
    assert loss.item() == sound.model.weight.grad.item() == (values * weights).sum().item()


def test_a_function_of_scores_alone_is_a_selector_and_a_class_is_none():
    # Red when: the step passes a context to a function that takes none, or a class passes as callable.
    def hardest(scores, context):
        return Selection.mean(scores.argmax().unsqueeze(0), scores.numel())

    for ranks in (None, Local(), Global()):
        assert shift_step(hardest, ranks=ranks)(torch.tensor([1.0, 3.0, 2.0]))[0].item() == 3
    with pytest.raises(InvalidInput) as caught:
        shift_step(TopK)
    assert str(caught.value) == (
        "SelectiveBackprop got selector=<class 'rowprop.TopK'>, a type, but a selector was needed; give an instance, "
        "e.g. TopK(keep=0.5)."
    )


def test_a_selector_that_breaks_its_promise_is_refused():
    # Red when: the step takes any value for a selection. A refused call does not count as a step.
    step = shift_step(lambda scores, context: torch.tensor([0, 1]))
    with pytest.raises(InvalidInput) as caught:
        step(torch.rand(4))
    assert says(caught.value, "The selector returned a Tensor but a Selection made from 4 rows")
    assert step.state_dict()["step"] == 0


def test_progress_comes_from_the_call_or_from_the_steps_and_is_asked_for_where_something_follows_it():
    # Red when: a progress given is not handed on to the selector, or the schedule goes by the steps all the same.
    values = torch.arange(1.0, 9.0)
    step = shift_step(TopK(Ramp(1.0, 0.5)), schedule=Schedule(0.25, 1, 0), total_steps=8)
    assert [step(values)[1].num_kept for _ in range(6)] == [8, 8, 7, 7, 6, 6]  # ceil(8 * (1 - step / 16)) from step 2
    assert step(values, progress=0.9)[1].num_kept == 5 and step(values, progress=0.1)[1].num_kept == 8
    for selector, options, who in (
        (TopK(0.5), {"schedule": Schedule()}, "the schedule"),
        (TopK(Ramp(1, 0.5)), {}, "the schedule keep of TopK"),
    ):
        with pytest.raises(InvalidInput) as caught:
            shift_step(selector, **options)(values)
        assert says(caught.value, f"a call without progress was made but {who} needs progress ... total_steps")
    with pytest.raises(InvalidInput, match=r"progress=1.5 but a fraction of the training in \[0, 1\] was needed"):
        step(values, progress=1.5)


def test_progress_is_that_of_the_steps_or_of_the_samplers_epochs():
    # Red when: a schedule under a sampler asks for total_steps, which nobody knows, or goes by the steps.
    step = shift_step(TopK(0.5), total_steps=2)
    clock = [(step.progress, step(torch.rand(4)))[0] for _ in range(4)]
    assert clock == [0, 0.5, 1, 1] and shift_step(TopK(0.5)).progress is None

    history = LossHistory(8)
    sampler = PruningSampler(history, num_rows=8, epochs=4, prune=0.5, full_after=1.0)
    step = shift_step(TopK(0.5), history=sampler, schedule=Schedule(0.5, 1, 0), engine="masked")
    assert (step.sampler, step.history) == (sampler, history)
    whole, clock = [], []
    for _ in range(4):
        ids = torch.tensor(list(sampler))
        for part in ids.chunk(2):
            record = step(part + 1.0, ids=part)[1]
            whole.append(record.num_kept == record.num_rows)
            clock.append(step.progress)
    assert whole == [True] * 4 + [False] * 4
    assert clock[1::2] == [0.25, 0.5, 0.75, 1] and clock[0] == 0.125


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "selector", [Everything(), TopK(1.0), RandomRows(Ramp(1.0, 0.5)), MultipleOf(TopK(1.0), 2)], ids=repr
)
def test_a_batch_that_the_selector_keeps_whole_is_not_scored(engine, selector):
    # Red when: recompute runs a scoring forward whose scores nobody reads, or a scorer is called for them.
    calls = []

    def losses_fn(model, batch):
        calls.append(len(batch))
        return model(batch)

    def scorer(model, batch):
        raise AssertionError("nobody reads these scores")

    step = SelectiveBackprop(Shift(), losses_fn, selector, scorer=scorer, engine=engine)
    for _ in range(6):
        loss, record = step(torch.tensor([4.0, 2.0, 3.0, 5.0]), progress=0.0)
        loss.backward()
        assert (loss.item(), record.loss_all.item(), record.num_kept) == (3.5, 3.5, 4)
    assert calls == [4] * 6 and record.reason == "the whole batch: the selector keeps every row"
    record = shift_step(selector, engine=engine, nonfinite="drop")(BAD, progress=0.0)[1]
    assert record.selection.rows.tolist() == [0, 2, 3, 5, 7]


def test_a_batch_of_which_the_scores_decide_is_scored_although_every_row_is_kept():
    # Red when: LossMass(1.0) or a schedule that has left 1 counts as known to keep every row.
    calls = []

    def losses_fn(model, batch):
        calls.append(len(batch))
        return model(batch)

    for selector in (LossMass(1.0), MultipleOf(LossMass(1.0), 2)):
        step = SelectiveBackprop(Shift(), losses_fn, selector, engine="recompute")
        loss, record = step(torch.tensor([4.0, 2.0, 3.0, 5.0]))
        assert record.reason == "recompute was asked for" and (loss.item(), record.num_kept) == (3.5, 4)
        assert calls == [4, 4]
        calls.clear()
    step = SelectiveBackprop(Shift(), losses_fn, TopK(Ramp(1.0, 0.5)), engine="recompute", total_steps=2)
    assert [step(torch.rand(4))[1].num_kept for _ in range(3)] == [4, 3, 2] and calls == [4, 4, 3, 4, 2]


def test_scores_on_another_device_come_to_the_losses():
    # Red when: rows and weights are made on the device of a scorer's scores. (Without a GPU no more can be run.)
    def selector(scores, context):
        raise NotImplementedError(str(scores.device))

    with FakeTensorMode(), torch.no_grad(), pytest.raises(NotImplementedError, match="cuda"):
        losses = torch.empty(10, device="cuda")
        step = SelectiveBackprop(
            nn.Identity(),
            lambda model, batch: losses,
            selector,
            scorer=lambda model, batch: losses.cpu(),
            engine="masked",
            nonfinite="keep",
        )
        step(torch.empty(10))


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_beside_the_losses_rank_and_the_losses_are_trained(engine):
    # Red when: the losses rank, or the scores get a gradient.
    values = torch.tensor([[1.0, 40.0], [2.0, 30.0], [3.0, 20.0], [4.0, 10.0]])
    calls = []

    def losses_fn(model, batch):
        calls.append(len(batch))
        both = model(batch)
        return Scored(both[:, 0], both[:, 1])

    step = SelectiveBackprop(Shift(), losses_fn, TopK(0.5), engine=engine)
    loss, record = step(values)
    loss.backward()
    assert record.selection.rows.tolist() == [0, 1]
    assert (loss.item(), step.model.weight.grad.item()) == (1.5, 1.5) and record.loss_all.item() == 2.5
    assert calls == ([4, 2] if engine == "recompute" else [4])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_selector_around_a_selector_needs_no_forward_of_its_own(engine):
    # Red when: it is handed losses with a graph, or a context without the ids of the call.
    calls = []

    def losses_fn(model, batch):
        calls.append(len(batch))
        return model(batch)

    def turned(scores, context):
        assert not scores.requires_grad
        return TopK(0.25)(-scores if context.ids is None else -scores * context.ids, context)

    step = SelectiveBackprop(Shift(), losses_fn, turned, engine=engine)
    values = torch.tensor([4.0, 2.0, 3.0, 5.0])
    assert step(values)[1].selection.rows.tolist() == [1]
    assert calls == ([4, 1] if engine == "recompute" else [4])
    assert step(values, ids=torch.tensor([0, 3, 1, 1]))[1].selection.rows.tolist() == [0]


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_that_take_a_context_are_given_that_of_the_call(engine):
    # Red when: a field is left out, the scorer gets another context than the selector, or one that takes none gets it.
    seen, history, generator = [], LossHistory(9), torch.Generator()
    call = {"ids": torch.tensor([3, 0, 7, 1]), "classes": torch.tensor([0, 0, 1, 1]), "progress": 0.25}

    def scorer(model, batch, context):
        seen.append(context)
        return batch

    def selector(scores, context):
        seen.append(context)
        return TopK(0.5)(scores)

    step = shift_step(selector, scorer=scorer, history=history, generator=generator, engine=engine)
    step(torch.rand(4), **call)
    assert len(seen) == 2
    for context in seen:
        assert (context.history, context.generator, context.progress) == (history, generator, 0.25)
        assert context.ids is call["ids"] and context.classes is call["classes"]


class Notebook(LossHistory):
    """A history that writes down its updates."""

    def __init__(self, factors):
        super().__init__()
        self.factors, self.updates = torch.tensor(factors), []

    def update(self, ids, losses, rows):
        self.updates.append((ids.tolist(), [None if x != x else x for x in losses.tolist()], rows.tolist()))

    def weights_of(self, ids):
        return self.factors[ids]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scored", [False, True])
def test_a_history_gets_the_losses_and_its_factors_multiply_the_weights(engine, scored):
    # Red when: factors are taken by place in the batch instead of by id, or scores are given for unknown losses.
    history = Notebook([1.0, 2.0, 1.0, 4.0, 1.0, 1.0, 1.0, 3.0])
    scorer = (lambda model, batch: batch * 10) if scored else None
    step = shift_step(TopK(0.5), scorer=scorer, history=history, engine=engine)
    loss, record = step(torch.tensor([5.0, 1.0, 7.0, 2.0]), ids=torch.tensor([3, 0, 7, 1]))
    assert record.selection.rows.tolist() == [0, 2] and record.selection.weights.tolist() == [2.0, 1.5]
    assert loss.item() == 5 * 2 + 7 * 1.5
    known = [5.0, None, 7.0, None] if scored and engine == "recompute" else [5.0, 1.0, 7.0, 2.0]
    assert history.updates == [([3, 0, 7, 1], known, [0, 2])]


def test_what_a_part_asks_for_beside_the_batch_is_checked_at_the_call():
    step = shift_step(TopK(0.5), history=Notebook([1.0] * 4))
    with pytest.raises(InvalidInput) as caught:
        step(torch.rand(4))
    assert says(caught.value, "a call without ids was made but the history needs ids ... pass ids=...")
    with pytest.raises(InvalidInput) as caught:
        step(torch.rand(4), ids=torch.arange(3))
    assert says(caught.value, "ids came as a tensor of shape (3,) ... int64 of shape (4,)")

    def by_class(scores, context):
        wanted = context.need("classes", "by_class") == 1
        return Selection.mean(wanted.nonzero().squeeze(1), scores.numel())

    with pytest.raises(InvalidInput, match="a call without classes was made but by_class needs classes"):
        shift_step(by_class)(torch.rand(4))
    with pytest.raises(InvalidInput, match="a call without classes was made but PerClass needs classes"):
        shift_step(PerClass(TopK(0.5)))(torch.rand(4))
    values, classes = torch.tensor([1.0, math.nan, 3.0, 2.0, 4.0]), torch.tensor([0, 1, 1, 0, 1])
    for ranks in (None, Local(), Global()):
        record = shift_step(by_class, nonfinite="drop", ranks=ranks)(values, classes=classes)[1]
        assert record.selection.rows.tolist() == [2, 4]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_selection_of_nothing_has_a_loss_of_zero_and_a_gradient_of_zero(engine):
    # Red when: a row that goes along counts, or the loss loses its graph.
    model = normed()

    def nothing(scores, context):
        return Selection.mean(torch.empty(0, dtype=torch.int64), scores.numel())

    step = SelectiveBackprop(model, squared, nothing, engine=engine, accumulate_to=4)
    loss, record = step(a_batch(0))
    loss.backward()
    assert loss.item() == 0 and record.num_kept == 0 and math.isnan(record.loss_kept) and record.imbalance == 0
    assert (record.ready, record.contributed) == (False, 0)
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


def test_weights_of_a_selection_of_one_row_stay_as_they_are():
    # Red when: the second row, which BatchNorm needs, takes half of the weight.
    def one(scores, context):
        return Selection(torch.tensor([2]), torch.tensor([0.7]), scores.numel(), unbiased=True)

    for engine in ENGINES:
        record = SelectiveBackprop(normed(), squared, one, engine=engine)(a_batch(0))[1]
        assert record.selection.rows.tolist() == [2] and record.selection.weights.tolist() == pytest.approx([0.7])


# --- non-finite losses -----------------------------------------------------------------------------------------------

BAD = torch.tensor([1.0, math.nan, 5.0, 3.0, math.inf, 2.0, -math.inf, 4.0])  # finite: rows 0, 2, 3, 5, 7


@pytest.mark.usefixtures("as_host")
@pytest.mark.parametrize("engine", ENGINES)
def test_error_names_how_many_and_which_and_the_call_does_not_count(engine):
    # Red when: the counter moves before the check, or a NaN is ranked silently.
    step = shift_step(TopK(0.5), engine=engine)
    with pytest.raises(InvalidInput) as caught:
        step(BAD)
    assert says(caught.value, "3 of 8 rows ... (rows 1, 4, 6); ... choose nonfinite='drop' or 'keep'.")
    assert step(torch.rand(8))[1].step == 0
    with pytest.raises(InvalidInput, match=r"rows 0, 1, 2, 3, 4, \.\.\.\)"):
        step(torch.full((8,), math.nan))


@pytest.mark.usefixtures("as_accelerator")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("selector", [TopK(0.5), RandomRows(0.5), LossMass(0.5)], ids=repr)
def test_on_a_device_the_backward_refuses_and_the_call_waits_for_nothing(engine, selector):
    # Red when: the call looks, the backward does not, or a selector's own refusal of a NaN comes through.
    step, refused = shift_step(selector, engine=engine), r"^3 of 8 rows have .* \(rows 1, 4, 6\)"
    if isinstance(selector, LossMass):  # it looks at the losses itself
        with pytest.raises(InvalidInput, match=refused):
            step(BAD)
        return
    with Waits() as counted:
        loss = step(BAD)[0]
    assert counted.count == 0
    with pytest.raises(InvalidInput, match=refused):
        loss.backward()


@pytest.mark.usefixtures("as_accelerator")
def test_on_a_device_the_backward_refuses_losses_that_scoring_did_not_see():
    # Red when: recompute looks at the scores alone, or names places among the kept rows.
    step = shift_step(TopK(0.5), engine="recompute", scorer=lambda model, batch: torch.arange(8.0))
    with Waits() as counted:
        loss = step(BAD)[0]
    assert counted.count == 0
    with pytest.raises(InvalidInput, match=r"^2 of 8 rows have .* \(rows 4, 6\)"):
        loss.backward()


@pytest.mark.usefixtures("as_accelerator")
def test_a_refusal_of_the_backward_comes_before_the_optimizer_and_leaves_the_next_step_alone():
    # Red when: the flags of one call are looked at in the backward of another, or with a graph that is not asked for.
    model = regression()
    step = SelectiveBackprop(model, squared, TopK(0.5), engine="sliced")
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8)}
    bad = {**batch, "y": torch.full((8,), math.nan)}
    first, second = step(bad)[0], step(batch)[0]
    second.backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InvalidInput, match=r"^8 of 8 rows"):
        first.backward()
    assert all(map(torch.equal, before, model.parameters()))
    with torch.no_grad(), pytest.raises(InvalidInput, match=r"^8 of 8 rows"):
        step(bad)
    with pytest.raises(InvalidInput, match=r"^8 of 8 rows"):
        SelectiveBackprop(model, squared, TopK(0.5), engine="sliced", ranks=Local())(bad)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("selector", "rows"),
    [(TopK(0.4), [2, 7]), (TopK(1.0), [0, 2, 3, 5, 7]), (AboveMean(), [2, 7]), (LossMass(0.75), [2, 3, 7])],
    ids=repr,
)
def test_drop_selects_among_the_finite_rows(engine, selector, rows):
    # Red when: positions among the finite rows are taken for rows, or loss_all includes the others.
    loss, record = shift_step(selector, engine=engine, nonfinite="drop")(BAD)
    assert record.selection.rows.tolist() == rows and record.num_rows == 8
    assert loss.item() == pytest.approx(BAD[rows].mean().item())
    assert record.loss_all.item() == 3


@pytest.mark.parametrize("selector", [RankSampling(1.0), RandomRows(0.6)], ids=repr)
def test_drop_never_lets_a_draw_hit_a_nonfinite_row(selector):
    step = shift_step(selector, nonfinite="drop")
    for _ in range(30):
        assert set(step(BAD)[1].selection.rows.tolist()) <= {0, 2, 3, 5, 7}


def test_drop_outside_the_schedule_trains_the_finite_rows():
    loss, record = shift_step(TopK(0.5), nonfinite="drop", schedule=Schedule(0.5, 1), total_steps=9)(BAD)
    assert record.selection.rows.tolist() == [0, 2, 3, 5, 7] and loss.item() == 3


@pytest.mark.parametrize("engine", ["recompute", "sliced"])
def test_a_dropped_row_does_not_reach_the_gradient(engine):
    # Red when: the dropped row's infinite intermediates are multiplied by zero (as `masked` does: 0 * inf = NaN).
    weight = nn.Parameter(torch.tensor(2.0))
    step = SelectiveBackprop(
        weight.mul, lambda model, batch: model(batch).exp(), TopK(0.5), engine=engine, nonfinite="drop"
    )
    loss, record = step(torch.tensor([1.0, 500.0, 2.0, 3.0]))
    loss.backward()
    assert record.selection.rows.tolist() == [2, 3]
    assert weight.grad.item() == pytest.approx((2 * math.exp(4) + 3 * math.exp(6)) / 2)


@pytest.mark.parametrize("engine", ["recompute", "sliced"])
def test_dropped_rows_do_not_go_along_either(engine):
    # Red when: `widened` takes the hardest others without asking whether they are finite: zero times NaN is NaN.
    model, batch = regression(), a_batch(0, 6)
    batch["x"][2] = math.nan
    step = SelectiveBackprop(model, squared, Threshold(1e9), engine=engine, min_rows=6, nonfinite="drop")
    loss, record = step(batch)
    loss.backward()
    assert record.num_kept == 0 and loss.item() == 0
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in model.parameters())


@pytest.mark.parametrize("engine", ["masked", "sliced"])
def test_a_row_without_a_finite_loss_is_dropped_whatever_its_scorer_says(engine):
    # Red when: scores are not struck out where the losses of the forward are NaN or infinite.
    losses, scores = torch.tensor([1.0, math.inf, 2.0, 3.0, math.nan]), torch.tensor([1.0, 9.0, 5.0, 7.0, 8.0])
    step = shift_step(TopK(0.5), engine=engine, scorer=lambda model, batch: scores, nonfinite="drop")
    loss, record = step(losses)
    assert record.selection.rows.tolist() == [2, 3] and loss.item() == 2.5 and record.loss_all.item() == 2


def test_drop_needs_one_finite_row():
    with pytest.raises(InvalidInput) as caught:
        shift_step(TopK(0.5), nonfinite="drop")(torch.full((3,), math.nan))
    assert says(caught.value, "All 3 rows have a NaN or infinite loss or score; look at the data")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("selector", "rows"),
    [
        (TopK(0.5), [1, 2, 4, 6]),  # a fixed count: three places go to the non-finite rows
        (AboveMean(), [1, 2, 4, 6, 7]),  # chosen among the finite ones, and the others added
        (LossMass(0.75), [1, 2, 3, 4, 6, 7]),
    ],
    ids=repr,
)
def test_keep_ranks_nonfinite_rows_first(engine, selector, rows):
    # Red when: NaN keeps torch's own rank, -inf ranks last, or AboveMean sees an infinity.
    loss, record = shift_step(selector, engine=engine, nonfinite="keep")(BAD)
    assert record.selection.rows.tolist() == rows
    assert not loss.isfinite()


def test_keep_of_nothing_but_nonfinite_rows_is_everything():
    record = shift_step(AboveMean(), nonfinite="keep")(torch.full((3,), math.nan))[1]
    assert record.selection.is_everything


@pytest.mark.usefixtures("as_host")
@pytest.mark.parametrize("engine", ENGINES)
def test_keep_with_a_fixed_count_never_waits_for_the_device(engine):
    # Red when: the step asks the device anything (a fake tensor has no data to answer with); "error" does.
    with FakeTensorMode():
        weight, batch = nn.Parameter(torch.empty(3, 1)), torch.empty(10, 3)

        def step(nonfinite):
            losses_fn = lambda model, batch: model(batch).squeeze(1)  # noqa: E731
            return SelectiveBackprop(weight.__rmatmul__, losses_fn, TopK(0.3), engine=engine, nonfinite=nonfinite)

        loss, record = step("keep")(batch)
        loss.backward()
        assert record.num_kept == 3
        with pytest.raises(DataDependentOutputException):
            step("error")(batch)


@pytest.mark.usefixtures("as_host")
def test_nonfinite_losses_that_scoring_did_not_see_are_refused():
    # Red when: recompute checks the scores and not the losses of the second forward.
    step = shift_step(TopK(0.5), engine="recompute", scorer=lambda model, batch: torch.arange(8.0), nonfinite="drop")
    with pytest.raises(InvalidInput) as caught:
        step(BAD)
    assert says(caught.value, "2 of 8 rows ... (rows 4, 6); scoring did not see it; score by the losses")
    step = shift_step(TopK(0.5), engine="recompute", scorer=lambda model, batch: torch.arange(8.0))
    with pytest.raises(InvalidInput, match=r"rows 4, 6\); .* or choose nonfinite='drop' or 'keep'\."):
        step(BAD)


@pytest.mark.usefixtures("as_host")
@pytest.mark.parametrize(("engine", "waits"), [("masked", 1), ("recompute", 2), ("sliced", 1)])
@pytest.mark.parametrize("nonfinite", ["error", "drop"])
def test_a_sound_batch_is_waited_for_once_with_a_fixed_count(engine, waits, nonfinite):
    # Red when: the mean over the finite rows indexes them by a mask.
    step = shift_step(TopK(0.5), engine=engine, nonfinite=nonfinite)
    with Waits() as counted:
        loss, record = step(torch.arange(8.0))
    assert counted.count == waits and (record.loss_all.item(), loss.item()) == (3.5, 5.5)


# --- the floor -------------------------------------------------------------------------------------------------------


def normed(**options) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 1))


class Spied:
    """An engine that writes down which rows it runs."""

    def __init__(self, name: str):
        self.engine = {"masked": Masked(), "recompute": Recompute(), "sliced": Sliced()}[name]
        self.name, self.one_forward, self.ran = name, self.engine.one_forward, []

    def kept_losses(self, selection, losses, forward):
        self.ran.append(selection.rows.tolist())
        return self.engine.kept_losses(selection, losses, forward)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batchnorm_in_training_asks_for_two_rows(engine):
    # Red when: the floor ignores the mode, or recompute gives BatchNorm a single row (torch refuses).
    model, spied = normed(), Spied(engine)
    step = SelectiveBackprop(model, squared, TopK(0.01), engine=spied)
    loss, record = step(a_batch(0))
    loss.backward()
    ranked = squared(normed(), a_batch(0)).argsort(descending=True).tolist()
    assert spied.ran == [sorted(ranked[:2])]
    assert record.selection.rows.tolist() == ranked[:1] and record.selection.weights.tolist() == [1]
    assert (record.num_kept, record.contributed, record.kept_by_rank) == (1, 1, (1,))
    model.eval()
    step(a_batch(0))
    stateless = normed(track_running_stats=False).eval()  # batch statistics even in evaluation mode
    SelectiveBackprop(stateless, squared, TopK(0.01), engine=spied)(a_batch(0))
    assert [len(rows) for rows in spied.ran] == [2, 1, 2]


def test_rows_that_go_along_have_the_highest_scores_and_count_nothing():
    # Red when: a selected row goes along with itself, the lowest others do, or one of them gets a weight.
    def last_row(scores, context):
        return Selection.mean(torch.tensor([scores.numel() - 1]), scores.numel())

    losses, spied = torch.tensor([2.0, 6.0, 4.0, 5.0, 3.0, 1.0]), Spied("recompute")
    loss, record = shift_step(last_row, min_rows=4, engine=spied)(losses)
    assert spied.ran == [[1, 2, 3, 5]] and record.selection.rows.tolist() == [5] and loss.item() == 1
    assert shift_step(last_row, min_rows=99, engine=spied)(losses)[0].item() == 1
    assert shift_step(TopK(0.9), min_rows=2, engine=spied)(losses)[1].num_kept == 6
    assert (
        SelectiveBackprop(normed(), squared, last_row, min_rows=1, engine=Spied("sliced"))(a_batch(0))[1].num_kept == 1
    )
    assert [len(rows) for rows in spied.ran] == [4, 6, 6]

    def weighted(scores, context):
        return Selection(torch.arange(5), torch.arange(5.0), 6)

    loss, record = shift_step(weighted, min_rows=99)(losses)
    assert record.selection.weights.tolist() == [0, 1, 2, 3, 4] and loss.item() == 6 + 8 + 15 + 12


def test_rows_that_go_along_are_finite_ones():
    # Red when: a row with an infinite loss goes along: zero times infinity is NaN.
    for least, ran in ((4, [2, 3, 5, 7]), (8, [0, 2, 3, 5, 7])):
        spied = Spied("recompute")
        loss, record = shift_step(TopK(0.1), nonfinite="drop", min_rows=least, engine=spied)(BAD)
        assert spied.ran == [ran] and record.selection.rows.tolist() == [2] and loss.item() == 5


# --- accumulate_to ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", [1, 3, 7, 8, 20])
def test_the_accumulated_gradient_is_the_mean_over_exactly_b_rows(engine, target):
    # Red when: weights are not rescaled by K/B, surplus rows are not cut, or the counter is not reset.
    model = regression()
    step = SelectiveBackprop(model, squared, TopK(0.3), engine=engine, accumulate_to=target)
    used, steps = [], 0
    for seed in range(30):
        loss, record = step(a_batch(seed))
        loss.backward()
        used += [(seed, row) for row in record.selection.rows.tolist()]
        assert record.contributed == len(used) <= target and record.ready == (len(used) == target)
        hardest = squared(model, a_batch(seed)).argsort(descending=True)[:3].sort().values
        assert record.selection.rows.tolist() == hardest[: record.num_kept].tolist()  # surplus: the later rows
        if record.ready:
            reference = copy.deepcopy(model)
            reference.zero_grad()
            torch.stack([squared(reference, a_batch(seed))[row] for seed, row in used]).mean().backward()
            assert_gradients_equal(model, reference)
            used, steps = [], steps + 1
            model.zero_grad()
            with torch.no_grad():
                next(model.parameters()).mul_(0.99)
    assert steps == 30 // math.ceil(target / 3)


def test_accumulation_of_varying_counts_and_whole_batches():
    # Red when: a whole batch outside the schedule is not cut to the quota.
    step = shift_step(TopK(0.5), accumulate_to=6, schedule=Schedule(0.5, 1, 0), total_steps=4)
    seen = [step(torch.arange(1.0, 5.0))[1] for _ in range(4)]
    assert [record.num_kept for record in seen] == [4, 2, 2, 2]
    assert [record.contributed for record in seen] == [4, 6, 2, 4]
    assert [record.ready for record in seen] == [False, True, False, False]
    assert seen[1].selection.rows.tolist() == [0, 1]
    assert seen[0].selection.weights.tolist() == pytest.approx([1 / 6] * 4)


@pytest.mark.parametrize("ranks", [None, Local(), Global()], ids=["alone", "local", "global"])
@pytest.mark.parametrize(
    "selector",
    [
        ImportanceSampling(0.5),
        Nonzero(),
        PerClass(TopK(0.5)),
    ],
    ids=repr,
)
def test_weights_that_stand_for_all_rows_are_not_accumulated_to_a_count_of_rows(selector, ranks):
    # Red when: such weights are scaled by K/B, as if they summed to 1 over the kept rows.
    step = shift_step(selector, accumulate_to=4, ranks=ranks)
    with pytest.raises(InvalidInput) as caught:
        step(torch.tensor([1.0, 2.0, 0.0, 3.0]), classes=torch.tensor([0, 0, 0, 1]))
    assert says(caught.value, f"accumulate_to=4 and a selection with weights of its own from {selector!r} ... 1/K")
    assert step.state_dict()["step"] == 0


@pytest.mark.parametrize("selector", [RandomRows(0.5), Everything(), MultipleOf(PerClass(TopK(0.5)), 2)], ids=repr)
def test_unbiased_rows_of_equal_weight_are_accumulated(selector):
    # Red when: every unbiased selection is refused.
    step = shift_step(selector, accumulate_to=6)
    records = [step(torch.ones(4), classes=torch.zeros(4, dtype=torch.int64))[1] for _ in range(3)]
    assert all(w == pytest.approx(1 / 6) for record in records for w in record.selection.weights.tolist())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_last_row_does_not_go_through_batchnorm_alone(engine):
    # Red when: the rows given to the engine are cut to the quota below the floor (torch refuses one row per channel).
    sizes = []

    def spying(model, batch):
        sizes.append(len(batch["y"]))
        return squared(model, batch)

    model = normed()
    step = SelectiveBackprop(model, spying, TopK(0.3), engine=engine, accumulate_to=4)
    step(a_batch(0))[0].backward()
    model.zero_grad()
    loss, record = step(a_batch(1))
    loss.backward()
    assert record.ready and record.num_kept == 1 and record.selection.weights.tolist() == [0.25]
    assert sizes == ([10, 3, 10, 2] if engine == "recompute" else [10, 10])
    assert loss.item() == pytest.approx(record.loss_kept.item() / 4)
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- mixed precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_and_gradscaler_train_like_the_plain_loop(engine):
    # Red when: the loss stays in bfloat16, weights are rounded to it, or the scaled loss is detached from the scaler.
    def trained(selective: bool) -> list[torch.Tensor]:
        model = regression()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        step = SelectiveBackprop(model, squared, TopK(0.4), engine=engine)
        for seed in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                if selective:
                    loss, _ = step(a_batch(seed))
                    assert loss.dtype == torch.float32
                else:
                    losses = squared(model, a_batch(seed))
                    loss = losses[losses.detach().argsort(descending=True)[:4]].float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [parameter.detach() for parameter in model.parameters()]

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradscaler_skips_a_kept_overflow(engine):
    # Red when: "keep" leaves the overflowing row out (the scaler would never learn to scale down).
    model = regression()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batch = a_batch(0)
    batch["x"][3] = math.inf
    loss, record = SelectiveBackprop(model, squared, TopK(0.2), engine=engine, nonfinite="keep")(batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert 3 in record.selection.rows and scaler.get_scale() == 2.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_half_precision_losses_are_averaged_in_float32():
    # Red when: loss_all or loss_kept is a bfloat16 mean.
    record = shift_step(TopK(1.0))(torch.full((1000,), 1.0, dtype=torch.bfloat16).index_fill(0, torch.tensor([0]), 2))[
        1
    ]
    assert record.loss_all.item() == record.loss_kept.item() == pytest.approx(1.001, abs=1e-6)


# --- memory ----------------------------------------------------------------------------------------------------------


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


class Training:
    """A loop whose every part has a memory."""

    def __init__(self, engine: str):
        torch.manual_seed(0)
        self.model = noisy()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.05)
        self.step = SelectiveBackprop(
            self.model,
            squared,
            RankSampling(0.4),
            engine=engine,
            schedule=Schedule(0.1, 1.0, 3),
            total_steps=10,
            accumulate_to=9,
            generator=torch.Generator().manual_seed(3),
        )

    def run(self, seeds) -> list[tuple]:
        trace = []
        for seed in seeds:
            loss, record = self.step(a_batch(seed))
            loss.backward()
            if record.ready:
                self.optimizer.step()
                self.optimizer.zero_grad()
            trace.append((record.step, record.selection.rows.tolist(), record.contributed, record.ready, loss.item()))
        return trace

    def save(self) -> io.BytesIO:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        file = io.BytesIO()
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.step.state_dict(), torch.get_rng_state())
        torch.save((*parts, gradients), file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        model, optimizer, step, rng, gradients = torch.load(file, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.step.load_state_dict(step)
        torch.set_rng_state(rng)
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("engine", ENGINES)
def test_resuming_is_bit_for_bit_the_same_as_not_stopping(engine):
    # Red when: step, contributed or the generator is left out of state_dict.
    whole = Training(engine)
    expected = whole.run(range(10))

    first = Training(engine)
    trace = first.run(range(5))
    assert first.step.state_dict()["contributed"] > 0  # stopped in the middle of an accumulation
    file = first.save()
    torch.rand(99)
    second = Training(engine)
    second.run([77, 78])  # loading must undo these two steps
    second.load(file)
    trace += second.run(range(5, 10))

    assert trace == expected
    for (name, ours), theirs in zip(second.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_selectors_and_scorers_with_a_memory_are_saved_too():
    # Red when: _stateful looks at one of them only.
    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, scores, context):
            self.calls += 1
            return TopK(0.5)(scores)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state_dict):
            self.calls = state_dict["calls"]

    class Scorer(Counting):
        def __call__(self, model, batch):
            self.calls += 1
            return batch

    step = shift_step(Counting(), scorer=Scorer())
    for _ in range(3):
        step(torch.rand(4))
    fresh = shift_step(Counting(), scorer=Scorer())
    fresh.load_state_dict(step.state_dict())
    assert (fresh.selector.calls, fresh.scorer.calls) == (3, 3)


class Remembering:
    """A selector with a memory that one number can break."""

    def __init__(self):
        self.calls = 0

    def __call__(self, scores, context):
        self.calls += 1
        return TopK(0.5)(scores)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = -1  # half loaded
        self.calls = state_dict["calls"] + 0


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        *[
            ({name: bad}, f"{name}={bad!r} but a whole number, 0 or more, was needed")
            for name in ("step", "contributed")
            for bad in ("a", -1, 0.5, True)
        ],
        ({"generator": 5}, "a state that a part cannot load"),
        ({"generator": torch.zeros(3)}, "a state that a part cannot load"),
        ({"selector": {}}, r"a state that a part cannot load \(KeyError: 'calls'\), so nothing was loaded"),
        ({"selector": None}, "a state that a part cannot load"),
        ({"history": {}}, "LossHistory.load_state_dict got a state without loss"),
        ({"sampler": {}}, "PruningSampler.load_state_dict got a state without num_rows"),
    ],
    ids=str,
)
def test_a_broken_state_is_refused_and_nothing_is_loaded(breaks, sentence):
    # Red when: parts are loaded one after the other and not taken back, or step and contributed are not looked at.
    def made(calls):
        sampler = PruningSampler(LossHistory(8), num_rows=8, epochs=2)
        generator = torch.Generator().manual_seed(calls)
        step = shift_step(Remembering(), history=sampler, accumulate_to=99, generator=generator)
        for _ in range(calls):
            step(torch.rand(8), ids=torch.tensor(list(sampler)))
        return step

    saved, step = made(1).state_dict(), made(2)
    before = str(step.state_dict())
    with pytest.raises(InvalidInput, match=sentence):
        step.load_state_dict(saved | breaks)
    assert str(step.state_dict()) == before
    step.load_state_dict(saved)
    assert str(step.state_dict()) == str(saved)


def test_a_state_with_as_many_rows_as_a_step_takes_is_refused():
    # Red when: `>= accumulate_to` becomes `>`: with 6 of 6 rows there, the next batch would have none to contribute.
    step = shift_step(TopK(0.5), accumulate_to=6)
    state = step.state_dict()
    with pytest.raises(InvalidInput, match="got 6 rows that have contributed but accumulate_to is 6"):
        step.load_state_dict(state | {"contributed": 6})
    step.load_state_dict(state | {"contributed": 5})
    assert step(torch.arange(8.0))[1].contributed == 6


def test_a_state_of_another_step_is_refused():
    state = shift_step(TopK(0.5), generator=torch.Generator()).state_dict()
    with pytest.raises(InvalidInput) as caught:
        shift_step(TopK(0.5)).load_state_dict(state)
    assert says(caught.value, "entries ['contributed', 'generator', 'step'] but ['contributed', 'step'] were needed")
    with pytest.raises(InvalidInput) as caught:
        shift_step(TopK(0.5), accumulate_to=4).load_state_dict({"step": 3, "contributed": 5})
    assert says(caught.value, "load_state_dict got 5 rows that have contributed but accumulate_to is 4")


# --- the record ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "scorer", "expected"),
    [
        ("sliced", False, {"score": 0.0, "forward": 5.0, "select": 2.0}),
        ("masked", True, {"score": 3.0, "forward": 5.0, "select": 2.0}),
        ("recompute", False, {"score": 5.0, "forward": 5.0, "select": 2.0}),
        ("recompute", True, {"score": 3.0, "forward": 5.0, "select": 2.0}),
    ],
)
def test_seconds_go_to_the_phase_that_spent_them(monkeypatch, engine, scorer, expected):
    # Red when: a phase is timed under another's name. The clock moves only where the test moves it.
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def spending(seconds, result):
        now[0] += seconds
        return result

    step = SelectiveBackprop(
        Shift(),
        lambda model, batch: spending(5, model(batch)),
        lambda scores, context: spending(2, TopK(0.5)(scores)),
        scorer=(lambda model, batch: spending(3, batch)) if scorer else None,
        engine=engine,
        timing=True,
    )
    assert step(torch.rand(8))[1].seconds == expected
    assert shift_step(TopK(0.5), engine=engine)(torch.rand(8))[1].seconds is None


def test_a_record_says_what_happened():
    step = shift_step(TopK(0.5), engine="masked")
    step(torch.arange(4.0))
    loss, record = step(torch.arange(4.0))
    assert (record.step, record.num_kept, record.num_rows, record.ready, record.contributed) == (1, 2, 4, True, 2)
    assert (record.engine, record.reason) == ("masked", "masked was asked for")
    assert (record.loss_all.item(), record.loss_kept.item(), loss.item()) == (1.5, 2.5, 2.5)
    assert not record.loss_all.requires_grad and not record.loss_kept.requires_grad
    assert not record.selection.weights.requires_grad


@pytest.mark.parametrize("engine", ENGINES)
def test_a_record_is_one_line_and_a_flat_dictionary_of_plain_values(engine):
    # Red when: the dataclass prints its tensors, a value of the dictionary is a tensor, or seconds stay nested.
    step = shift_step(TopK(0.5), engine=engine, timing=True)
    for _ in range(4):
        record = step(torch.tensor([1.0, 2.0, 3.0, 0.0]))[1]
    assert str(record) == f"Record(step 3: kept 2 of 4 rows, loss 1.5 (kept 2.5), {engine})"
    assert repr(record) == str(record)
    flat = record.to_dict()
    assert all(type(value) in (int, float, str, bool) for value in flat.values())
    seconds = {name: flat.pop(name) for name in ("score_s", "forward_s", "select_s")}
    assert seconds == {f"{name}_s": value for name, value in record.seconds.items()}
    assert flat == {
        "step": 3,
        "loss_all": 1.5,
        "loss_kept": 2.5,
        "num_kept": 2,
        "num_rows": 4,
        "num_kept_all_ranks": 2,
        "imbalance": 1.0,
        "engine": engine,
        "reason": f"{engine} was asked for",
        "ready": True,
        "contributed": 2,
    }
    assert json.loads(json.dumps(flat)) == flat


def test_a_record_of_no_row_or_all_rows_says_so():
    # Red when: the loss of no row is printed as nan, or the loss of all rows twice.
    assert str(shift_step(Threshold(9.0), engine="sliced")(torch.ones(4))[1]).endswith("loss 1 (none kept), sliced)")
    assert str(shift_step(TopK(1.0), engine="sliced")(torch.ones(4))[1]).endswith("loss 1 (all kept), sliced)")


def test_the_repr_of_a_record_leaves_out_losses_that_cannot_be_read():
    # Red when: repr reads a fake tensor, or one while a CUDA graph is captured: a test's report would fail.
    with FakeTensorMode():
        losses_fn = lambda model, batch: model(batch).squeeze(1)  # noqa: E731
        step = SelectiveBackprop(
            nn.Parameter(torch.empty(3, 1)).__rmatmul__, losses_fn, TopK(0.3), engine="sliced", nonfinite="keep"
        )
        record = step(torch.empty(10, 3))[1]
        assert repr(record) == str(record) == "Record(step 0: kept 3 of 10 rows, sliced)"


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"engine": "fast"},
            "SelectiveBackprop got engine='fast' but one of sliced, recompute, masked ... Sliced('exact').",
        ),
        (
            {"nonfinite": "ignore"},
            "SelectiveBackprop got nonfinite='ignore' but one of error, drop, keep was needed; the default is error.",
        ),
        *[
            (
                {name: value},
                f"SelectiveBackprop got {name}={value!r} but a whole number, 1 or more, was needed; "
                "None is the default.",
            )
            for name, value in [("accumulate_to", 0), ("total_steps", -1), ("min_rows", 1.5), ("accumulate_to", True)]
        ],
        (
            {"selector": 0.5},
            "SelectiveBackprop got selector=0.5, a float, but a selector was needed; give an instance, e.g. "
            "TopK(keep=0.5).",
        ),
        *[
            (
                {"engine": engine},
                f"SelectiveBackprop got engine={engine!r} but one of sliced, recompute, masked was needed",
            )
            for engine in (None, 5, [], ("sliced", "masked"), {"sliced"}, Sliced)
        ],
        (
            {"scorer": StaleScorer},
            "SelectiveBackprop got scorer=<class 'rowprop.history.StaleScorer'>, a type, but a function of the model",
        ),
        (
            {"losses_fn": len},
            "SelectiveBackprop got losses_fn=<built-in function len>, which takes other arguments, but a function was",
        ),
        (
            {"selector": lambda scores: TopK(0.5)(scores)},
            "SelectiveBackprop got selector=<function ... rowprop.selector(f) makes one of a function of scores.",
        ),
        (
            {"total_steps": 10**30},
            f"SelectiveBackprop got total_steps={10**30} but a whole number below 2**63 was needed.",
        ),
        (
            {"scorer": "loss"},
            "SelectiveBackprop got scorer='loss', a str, but a function of the model and the batch",
        ),
        *[
            ({"history": history}, f"SelectiveBackprop got history={history!r}, a {kind}, but a LossHistory()")
            for history, kind in ((True, "bool"), (LossHistory, "type"), ("random", "str"))
        ],
        *[
            ({"ranks": ranks}, f"SelectiveBackprop got ranks={ranks!r}, a {kind}, but rowprop.distributed.Local()")
            for ranks, kind in (("local", "str"), (2, "int"), (Local, "ABCMeta"))
        ],
        (
            {"schedule": 0.5},
            "SelectiveBackprop got schedule=0.5, a float, but an instance of Schedule was needed.",
        ),
        (
            {"scorer": len},
            "SelectiveBackprop got scorer=<built-in function len>, which takes other arguments, but a function of the ",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_construction(options, sentence):
    with pytest.raises(InvalidInput) as caught:
        SelectiveBackprop(**({"model": Shift(), "losses_fn": given_losses, "selector": TopK(0.5)} | options))
    assert says(caught.value, sentence), str(caught.value)


@pytest.mark.parametrize(
    ("beside", "sentence"),
    [
        (
            {"ids": [0, 1, 2, 3]},
            "ids came as a list but int64 of shape (N,) was needed.",
        ),
        (
            {"ids": torch.arange(4, device="meta")},
            "ids came as a tensor of shape (4,) and dtype torch.int64 on the device meta but int64 of shape (N,)",
        ),
        ({"ids": 3}, "ids came as a int but int64 of shape (N,) was needed."),
        (
            {"classes": [0, 1, 0, 1]},
            "classes came as a list but int64 of shape (N,) was needed.",
        ),
        ({"progress": "a"}, "progress='a' but a fraction of the training in [0, 1] was needed."),
        ({"progress": math.nan}, "progress=nan but a fraction of the training in [0, 1] was needed."),
        ({"progress": True}, "progress=True but a fraction of the training in [0, 1] was needed."),
        ({"batch_index": "a"}, "a call got batch_index='a' but a whole number, 0 or more, was needed."),
        ({"batch_index": -1}, "a call got batch_index=-1 but a whole number, 0 or more, was needed."),
    ],
)
def test_what_comes_beside_the_batch_is_refused_in_a_sentence(beside, sentence):
    # Red when: the step asks a list for its dtype, or compares a text with 0.
    step = shift_step(TopK(0.5), engine="sliced")
    with pytest.raises(InvalidInput) as caught:
        step(torch.rand(4), **beside)
    assert says(caught.value, sentence), str(caught.value)
    assert step.state_dict()["step"] == 0


def test_an_unreduced_loss_of_a_real_model_trains():
    # The whole loop once, as in the README: the kept loss of a separable problem falls on every engine.
    for engine in ENGINES:
        model = regression()
        step = SelectiveBackprop(
            model,
            lambda model, batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="none"),
            LossMass(0.8),
            engine=engine,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        history = []
        for _ in range(60):
            optimizer.zero_grad()
            loss, record = step((x, x.sum(1).tanh()))
            loss.backward()
            optimizer.step()
            history.append(record.loss_all.item())
        assert history[-1] < 0.2 * history[0]
