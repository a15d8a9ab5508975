"""The step: its policies, its accumulation and its memory, each against a plain loop."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rowprop
import step_cases
from accelerator import Waits
from rowprop import ImportanceSampling, RandomRows, Selection, SelectiveBackprop, TopK, recipes
from rowprop.cost.count import count_step
from rowprop.cost.profile import profile
from rowprop.distributed import Global, Local
from rowprop.engines import engine_of
from rowprop.history import LossHistory, PruningSampler, StaleScorer, holdout_losses
from rowprop.schedule import Ramp, Schedule
from rowprop.scoring import Scored
from rowprop.selection import Everything, LossMass, MultipleOf, Nonzero, PerClass, RankSampling, Threshold
from sentences import refused
from step_cases import Shift, a_batch, backpropagated, given_losses, regression, shift_step, squared

BAD = torch.tensor([1.0, math.nan, 5.0, 3.0, math.inf, 2.0, -math.inf, 4.0])  # finite: rows 0, 2, 3, 5, 7


def counted_losses(rows: list[int]):
    """The batch as losses; ``rows`` holds of how many."""
    return lambda model, batch: rows.append(len(batch)) or model(batch)


def test_a_column_of_losses_is_one_loss_per_row(engine):
    # Red when: (N, 1) is refused, in the losses or in the scores beside them.
    def trained(column: bool, scored: bool):
        def losses_fn(model, batch):
            losses, scores = squared(model, batch), batch["x"][:, 0]
            if column:
                losses, scores = losses[:, None], scores[:, None]
            return Scored(losses, scores) if scored else losses

        model = regression()
        _, record = backpropagated(SelectiveBackprop(model, losses_fn, TopK(0.3), engine=engine)(a_batch(0)))
        return model, record.selection.rows.tolist()

    for scored in (True, False):
        (model, rows), (reference, expected) = trained(True, scored), trained(False, scored)
        assert rows == expected
        step_cases.assert_gradients_equal(model, reference)


RETURNED = {  # instead of losses (6,), from them and logits (6, 3): what the refusal says of it
    "logits": (lambda logits, losses: logits, "(6, 3) and ... shape (6,) or (6, 1); ... `.mean(1)` or `.sum(1)`."),
    "(N, 1, 1)": (lambda logits, losses: logits[:, :1, None], "`.flatten(1).mean(1)` or `.flatten(1).sum(1)`."),
    "(N, 1, 3)": (lambda logits, losses: logits[:, None], "`.flatten(1).mean(1)` or `.flatten(1).sum(1)`."),
    "a pair": (lambda logits, losses: (losses, logits), "a tuple ... the losses alone, or rowprop.Scored(losses, s"),
    "logits beside": (lambda logits, losses: Scored(losses, logits), "scores of shape (6, 3)"),
    "other scores": (lambda logits, losses: Scored(losses, losses[:5]), "scores of shape (5,)"),
    "a mean": (lambda logits, losses: losses.mean(), "a tensor of shape () ... pass reduction='none' to the loss."),
    "tokens": (lambda logits, losses: logits.flatten(), "a tensor of shape (18,) ... `loss.view(N, -1).mean(1)`."),
    "an output": (lambda logits, losses: {"loss": 1}, "a dict ... take the loss out of your model's output, inside l"),
    "classes": (lambda logits, losses: torch.arange(6), "dtype torch.int64 ... a floating tensor with at least one"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_not_one_loss_per_row_is_refused_with_the_remedy(name, engine):
    # Red when: (N, C) is averaged, (N, 1, 1) is taken, a bare pair is taken for losses and scores, or the sentence
    # lacks the way out.
    returned, sentence = RETURNED[name]

    def losses_fn(model, x):
        logits = model(x)
        return returned(logits, logits.logsumexp(1))

    with refused(f"losses_fn returned ... {sentence}"):
        SelectiveBackprop(nn.Linear(4, 3), losses_fn, TopK(0.5), engine=engine)(torch.randn(6, 4))


def mean_loss(model, batch):
    return model(batch).mean(1)


DOORS = {  # what takes a losses function beside the step
    "ohem": lambda losses_fn, batch, model: recipes.ohem(model, losses_fn, engine="sliced")(batch),
    "verify": lambda losses_fn, batch, model: rowprop.verify(model, batch, losses_fn),
    "plan": lambda losses_fn, batch, model: rowprop.plan(model, batch, losses_fn),
    "profile": lambda losses_fn, batch, model: profile(model, batch, losses_fn),
    "count_step": lambda losses_fn, batch, model: count_step(model, batch, losses_fn),
    "holdout_losses": lambda losses_fn, batch, model: holdout_losses(model, losses_fn, [(torch.arange(8), batch)]),
    "StaleScorer": lambda losses_fn, batch, model: SelectiveBackprop(
        model, mean_loss, TopK(0.5), scorer=StaleScorer(losses_fn), history=LossHistory(), engine="recompute"
    )(batch, ids=torch.arange(8)),
}


@pytest.mark.parametrize("name", DOORS)
def test_every_door_that_takes_a_losses_function_refuses_what_is_not_one_loss_per_row(name):
    # Red when: one of them averages by itself, or takes a bare pair; the scores of a scorer are averaged.
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(8, 4)
    with refused("losses_fn returned a tensor of shape ( ... , 3) ... by `.mean(1)` or"):
        DOORS[name](lambda model, batch: model(batch), batch, model)
    with refused("losses_fn returned a tuple ... or rowprop.Scored(losses, scores)."):
        DOORS[name](lambda model, batch: (model(batch).mean(1), model(batch)), batch, model)
    with refused("scorer returned a tensor of shape (8, 3) ... by `.mean(1)`"):
        SelectiveBackprop(model, mean_loss, TopK(0.5), scorer=given_losses)(batch)


def test_arguments_in_another_order_are_refused_at_construction():
    # Red when: the order is not looked at: the pairs below can all be called with as many arguments as are needed.
    losses_fn = lambda model, batch: model(batch, batch)  # noqa: E731
    model, selector = nn.Bilinear(2, 2, 1), TopK(0.5)
    orders = [*itertools.permutations((model, losses_fn, selector))][1:]
    orders += [(model, selector, lambda m, b: m(b, b)), (model, lambda s, context: selector(s), losses_fn)]
    for given in orders:
        with refused("another order; write SelectiveBackprop(model, losses_fn, selector)"):
            SelectiveBackprop(*given)
    SelectiveBackprop(model, losses_fn, selector)


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_an_even_selection_gives_the_mean_of_plain_indexing_bit_for_bit(keep: float):
    # Red where the loss is the sum of losses times 1/K: it differs from the mean in the last bit for most K.
    model = regression()
    selective = SelectiveBackprop(model, squared, TopK(keep), engine="sliced")
    for rows in range(2, 30):
        batch = a_batch(rows, rows)
        loss, record = selective(batch)
        assert torch.equal(loss, squared(model, batch)[record.selection.rows].mean())


def test_a_batch_of_unknown_make_is_fine_for_one_forward_and_refused_by_recompute():
    # Red when: an engine with one forward insists on knowing N beforehand, or ids of other rows reach the selection.
    class Graph:
        x = torch.randn(6, 4)

    losses_fn = lambda model, graph: model(graph.x).square().squeeze(1)  # noqa: E731
    step = SelectiveBackprop(regression(), losses_fn, TopK(0.5))
    assert step(Graph())[1].num_rows == step(Graph(), ids=torch.arange(6))[1].num_rows == 6
    own = SelectiveBackprop(regression(), losses_fn, rowprop.selector(lambda scores: TopK(0.5)(scores)))
    with refused("ids came as a tensor of shape (7,) and dtype torch.int64 but int64 of shape (6,)"):
        own(Graph(), ids=torch.arange(7))
    with refused("The batch is a Graph without a tensor of rows"):
        SelectiveBackprop(regression(), losses_fn, TopK(0.5), engine="recompute")(Graph())


def test_a_list_of_records_is_a_batch_whatever_is_in_the_records(engine):
    # Red when: channels are counted as rows, which a batch of three of them allows, or sliced.
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(0)).double()
    step = SelectiveBackprop(model, of_images, TopK(0.5), engine=engine)
    for boxes in ((1, 2, 3), (3, 3, 3), (3, 3, 3, 3)):
        batch = [{"image": torch.randn(3, 6, 6).double(), "boxes": torch.rand(count, 4)} for count in boxes]
        _, record = backpropagated(step(batch, ids=torch.arange(len(boxes))))
        losses = of_images(model, batch)
        losses = losses[losses.topk(record.num_kept).indices].mean()
        expected = torch.autograd.grad(losses, list(model.parameters()))
        assert record.num_rows == len(boxes)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))
        model.zero_grad()


def of_images(model, batch):
    return torch.stack([model(record["image"][None]).square().sum() for record in batch])


def test_a_list_of_mappings_has_as_many_rows_as_it_has_losses(engine):
    # Red when: two mappings of columns are taken for two rows, which they could be.
    model, columns = regression(), [{"x": torch.randn(6, 4)}, {"x": torch.randn(6, 4)}]
    pairs = lambda model, batch: sum(model(part["x"]) for part in batch).square().squeeze(1)  # noqa: E731
    _, record = SelectiveBackprop(model, pairs, TopK(0.5), engine=engine)(columns)
    assert (record.num_rows, record.num_kept) == (6, 3)


def test_losses_without_a_graph_are_refused_at_the_call(engine):
    # Red when: torch's error of the later backward() is the first; or a call that asks for no gradient is refused.
    step = SelectiveBackprop(regression(), lambda m, b: squared(m, b).detach(), TopK(0.5), engine=engine)
    with refused("The losses have no graph; let losses_fn use trainable parameters, and neither detach() nor"):
        step(a_batch(0))
    with torch.no_grad():
        assert step(a_batch(0))[1].step == 0


def test_a_scorer_ranks_and_the_losses_are_trained(engine):
    # Red when: the losses are ranked although there is a scorer, the scorer's graph is kept, or a third argument with
    # another name is given the context.
    scorer = lambda model, batch, scale=1.0: batch["wanted"] * scale  # noqa: E731
    model, reference = regression(), regression()
    batch = a_batch(0) | {"wanted": torch.tensor([0.0, 9, 1, 8, 2, 7, 3, 6, 4, 5], requires_grad=True)}
    _, record = backpropagated(SelectiveBackprop(model, squared, TopK(0.3), engine=engine, scorer=scorer)(batch))
    losses = squared(reference, batch)
    losses[[1, 3, 5]].mean().backward()
    assert record.selection.rows.tolist() == [1, 3, 5] and batch["wanted"].grad is None
    step_cases.assert_gradients_equal(model, reference)
    if engine == "recompute":
        assert math.isnan(record.loss_all)  # nobody ran all rows through the loss
    else:
        torch.testing.assert_close(record.loss_all, losses.detach().mean())


def test_scores_beside_the_losses_rank_and_the_losses_are_trained(engine):
    # Red when: the losses rank, the scores get a gradient, or a second forward scores once more.
    rows: list[int] = []
    counted = counted_losses(rows)
    step = SelectiveBackprop(
        Shift(), lambda model, batch: Scored(*counted(model, batch).unbind(1)), TopK(0.5), engine=engine
    )
    loss, record = backpropagated(step(torch.tensor([[1.0, 40.0], [2.0, 30.0], [3.0, 20.0], [4.0, 10.0]])))
    assert record.selection.rows.tolist() == [0, 1] and record.loss_all.item() == 2.5
    assert (loss.item(), step.model.weight.grad.item()) == (1.5, 1.5)
    assert rows == ([4, 2] if engine == "recompute" else [4])


def test_weights_of_a_selector_reach_the_loss_also_of_all_rows(engine):
    # Red when: the step takes a plain mean of the kept losses, or all rows pass as they are, without their weights.
    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
    for rows in (torch.tensor([0, 2, 5]), torch.arange(8)):
        weights = rows / 4 + 0.25
        step = shift_step(lambda scores, context: Selection(rows, weights, 8), engine=engine)
        loss, record = backpropagated(step(values))
        assert loss.item() == step.model.weight.grad.item() == (values[rows] * weights).sum().item()
        assert record.loss_kept == values[rows].mean()


@pytest.mark.parametrize("selector", [TopK(0.5), LossMass(0.5)], ids=repr)
def test_the_schedule_says_which_batches_are_whole(engine, selector):
    # Red when: progress counts from 1, interrupt's batch index is ignored, or a selector that may remember is asked
    # about a whole batch.
    asked = []

    def whole(step, *index):
        record = step(torch.arange(1.0, 9.0), *index)[1]
        return record.reason if record.num_kept == 8 else ""

    asking = lambda scores, context: asked.append(1) or selector(scores, context)  # noqa: E731
    step = shift_step(asking, engine=engine, schedule=Schedule(0.25, 0.75, 3), total_steps=8)
    found = [whole(step) for _ in range(10)]
    assert len(asked) == 2
    assert [number for number in range(10) if found[number]] == [0, 1, 2, 5, 6, 7, 8, 9]  # 2 and 5 are interrupts
    assert found[0] == "the whole batch: the schedule is not active in batch 0 at progress 0.000"
    step = shift_step(selector, engine=engine, schedule=Schedule(0, 1, 2), total_steps=8)
    assert [bool(whole(step, index)) for index in (1, 0, 0, 3)] == [True, False, False, True]


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
        with refused(f"a call without progress was made but {who} needs progress ... total_steps"):
            shift_step(selector, **options)(values)

    step = shift_step(TopK(0.5), total_steps=2)
    clock = [(step.progress, step(torch.rand(4)))[0] for _ in range(4)]
    assert clock == [0, 0.5, 1, 1] and shift_step(TopK(0.5)).progress is None


def test_under_a_sampler_progress_is_that_of_its_epochs():
    # Red when: a schedule under a sampler asks for total_steps, which nobody knows, or goes by the steps.
    sampler = PruningSampler(LossHistory(8), num_rows=8, epochs=4, prune=0.5, full_after=1.0)
    step = shift_step(TopK(0.5), history=sampler, schedule=Schedule(0.5, 1, 0), engine="masked")
    assert (step.sampler, step.history) == (sampler, sampler.history)
    whole, clock = [], []
    for _ in range(4):
        for part in torch.tensor(list(sampler)).chunk(2):
            record = step(part + 1.0, ids=part)[1]
            whole.append(record.num_kept == record.num_rows)
            clock.append(step.progress)
    assert whole == [True] * 4 + [False] * 4
    assert clock[1::2] == [0.25, 0.5, 0.75, 1] and clock[0] == 0.125


@pytest.mark.parametrize(
    "selector", [Everything(), TopK(1.0), RandomRows(Ramp(1.0, 0.5)), MultipleOf(TopK(1.0), 2)], ids=repr
)
def test_a_batch_that_the_selector_keeps_whole_is_not_scored(engine, selector):
    # Red when: recompute runs a scoring forward whose scores nobody reads, or a scorer is called for them.
    # (Which batches a selector keeps whole is a law of test_laws.py.)
    def scorer(model, batch):
        raise AssertionError("nobody reads these scores")

    rows: list[int] = []
    step = SelectiveBackprop(Shift(), counted_losses(rows), selector, scorer=scorer, engine=engine)
    for _ in range(6):
        loss, record = backpropagated(step(torch.tensor([4.0, 2.0, 3.0, 5.0]), progress=0.0))
        assert (loss.item(), record.loss_all.item(), record.num_kept) == (3.5, 3.5, 4)
    assert rows == [4] * 6 and record.reason == "the whole batch: the selector keeps every row"
    loss, record = shift_step(selector, engine=engine, nonfinite="drop")(BAD, progress=0.0)
    assert record.selection.rows.tolist() == [0, 2, 3, 5, 7] and loss.item() == 3


def test_scores_on_another_device_come_to_the_losses():
    # Red when: rows and weights are made on the device of a scorer's scores. (Without a GPU no more can be run.)
    def selector(scores, context):
        raise NotImplementedError(str(scores.device))

    with FakeTensorMode(), torch.no_grad(), pytest.raises(NotImplementedError, match="cuda"):
        losses = torch.empty(10, device="cuda")
        options = {"scorer": lambda model, batch: losses.cpu(), "engine": "masked", "nonfinite": "keep"}
        SelectiveBackprop(nn.Identity(), lambda model, batch: losses, selector, **options)(torch.empty(10))


def test_parts_that_take_a_context_are_given_that_of_the_call(engine):
    # Red when: a field is left out, the scorer gets another context than the selector, or scores have a graph.
    seen, history, generator = [], LossHistory(9), torch.Generator()
    call = {"ids": torch.tensor([3, 0, 7, 1]), "classes": torch.tensor([0, 0, 1, 1]), "progress": 0.25}

    def scorer(model, batch, context):
        seen.append(context)
        return batch

    def selector(scores, context):
        seen.append(context)
        assert not scores.requires_grad
        return TopK(0.5)(scores)

    shift_step(selector, scorer=scorer, history=history, generator=generator, engine=engine)(torch.rand(4), **call)
    shift_step(selector, history=history, generator=generator, engine=engine)(torch.rand(4), **call)
    assert len(seen) == 3
    for context in seen:
        assert (context.history, context.generator, context.progress) == (history, generator, 0.25)
        assert context.ids is call["ids"] and context.classes is call["classes"]


class Notebook(LossHistory):
    """A history that writes down its updates."""

    factors, updates = torch.tensor([1.0, 2.0, 1.0, 4.0, 1.0, 1.0, 1.0, 3.0]), ()

    def update(self, ids, losses, rows):
        self.updates += ((ids.tolist(), [None if x != x else x for x in losses.tolist()], rows.tolist()),)

    def weights_of(self, ids):
        return self.factors[ids].double()


@pytest.mark.parametrize("scored", [False, True])
def test_a_history_gets_the_losses_and_its_factors_multiply_the_weights(engine, scored):
    # Red when: factors are taken by place in the batch instead of by id, scores are given for unknown losses, or the
    # weights lose their dtype or still say that they are 1/K.
    history, scorer = Notebook(), (lambda model, batch: batch * 10) if scored else None
    step = shift_step(TopK(0.5), scorer=scorer, history=history, engine=engine)
    loss, record = step(torch.tensor([5.0, 1.0, 7.0, 2.0]), ids=torch.tensor([3, 0, 7, 1]))
    chosen = record.selection
    assert chosen.rows.tolist() == [0, 2] and chosen.weights.tolist() == [2.0, 1.5]
    assert chosen.weights.dtype == torch.float32 and not chosen.even and not chosen.unbiased
    assert loss.item() == 5 * 2 + 7 * 1.5
    known = [5.0, None, 7.0, None] if scored and engine == "recompute" else [5.0, 1.0, 7.0, 2.0]
    assert history.updates == (([3, 0, 7, 1], known, [0, 2]),)


def by_class(scores, context):
    return Selection.mean((context.need("classes", "by_class") == 1).nonzero().squeeze(1), scores.numel())


@pytest.mark.parametrize(
    ("selector", "options", "beside", "sentence"),
    [
        (TopK(0.5), {"history": Notebook()}, {}, "without ids was made but the history needs ids ... pass ids=..."),
        (TopK(0.5), {}, {"ids": torch.arange(3)}, "ids came as a tensor of shape (3,) ... int64 of shape (4,)"),
        (TopK(0.5), {}, {"ids": [0, 1, 2, 3]}, "ids came as a list but int64 of shape (N,) was needed."),
        (TopK(0.5), {}, {"progress": 1.5}, "progress=1.5 but a fraction in [0, 1] was needed; half of the training"),
        (TopK(0.5), {}, {"batch_index": "a"}, "a call got batch_index='a' but a whole number, 0 or more, was needed."),
        (TopK(0.5), {}, {"batch_index": -1}, "a call got batch_index=-1 but a whole number, 0 or more, was needed."),
        *[
            (TopK(0.5), {}, {"batch_index": second}, "a call got a second batch as batch_index; ... `selective((")
            for second in (torch.arange(10), {"y": torch.arange(10)})
        ],
        (lambda s, c: torch.tensor([0, 1]), {}, {}, "The selector returned a Tensor but a Selection made from 4 rows"),
        (by_class, {}, {}, "a call without classes was made but by_class needs classes"),
        (PerClass(TopK(0.5)), {}, {}, "a call without classes was made but PerClass needs classes"),
    ],
)
def test_what_comes_beside_the_batch_is_checked_at_the_call(selector, options, beside, sentence):
    # Red when: the step asks a list for its dtype, compares a text with 0, takes a second batch for its number, whose
    # refusal prints it, takes any value for a selection, or counts the refused call.
    step = shift_step(selector, engine="sliced", **options)
    with refused(sentence):
        step(torch.rand(4), **beside)
    assert step.state_dict()["step"] == 0


@pytest.mark.parametrize("ranks", [None, Local(), Global()], ids=["alone", "local", "global"])
def test_dropped_rows_leave_the_context_too(ranks):
    # Red when: a selector is given the classes of all rows, or none where ranks select.
    values, classes = torch.tensor([1.0, math.nan, 3.0, 2.0, 4.0]), torch.tensor([0, 1, 1, 0, 1])
    record = shift_step(by_class, nonfinite="drop", ranks=ranks)(values, classes=classes)[1]
    assert record.selection.rows.tolist() == [2, 4]


def test_a_selection_of_nothing_has_a_loss_of_zero_and_a_gradient_of_zero(engine):
    # Red when: a row that goes along counts, or the loss loses its graph.
    model = step_cases.normed()
    step = SelectiveBackprop(model, squared, Threshold(1e9), engine=engine, accumulate_to=4)
    loss, record = backpropagated(step(a_batch(0)))
    assert loss.item() == 0 and record.num_kept == 0 and math.isnan(record.loss_kept) and record.imbalance == 0
    assert (record.ready, record.contributed) == (False, 0)
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


@pytest.mark.usefixtures("as_host")
def test_error_names_how_many_and_which_and_the_call_does_not_count(engine):
    # Red when: the counter moves before the check, or a NaN is ranked silently.
    step = shift_step(TopK(0.5), engine=engine)
    with refused("3 of 8 rows ... (rows 1, 4, 6); ... choose nonfinite='drop' or 'keep'."):
        step(BAD)
    with refused("rows 0, 1, 2, 3, 4, ...)"):
        step(torch.full((8,), math.nan))
    assert step(torch.rand(8))[1].step == 0


@pytest.mark.usefixtures("as_host")  # on a device nobody looks at the ids
def test_ids_that_the_history_refuses_leave_the_selectors_memory_as_it_was():
    # Red when: the selector chooses, and remembers, before the history has looked the ids up.
    selector = rowprop.selection.PercentileSampling()
    step = SelectiveBackprop(nn.Linear(3, 1), lambda model, x: model(x).squeeze(1), selector, history=LossHistory(4))
    before = repr(step.state_dict())
    with pytest.raises(rowprop.InvalidInput, match="LossHistory got id 5 but has num_rows=4"):
        step(torch.rand(2, 3), ids=torch.tensor([1, 5]))
    assert repr(step.state_dict()) == before


UNSEEN = {"engine": "recompute", "scorer": lambda model, batch: torch.arange(8.0)}  # takes rows 4 to 7 of BAD


@pytest.mark.usefixtures("as_accelerator")
@pytest.mark.parametrize("selector", [TopK(0.5), RandomRows(0.5)], ids=repr)
def test_on_a_device_the_backward_refuses_and_the_call_waits_for_nothing(engine, selector):
    # Red when: the call looks, or the backward does not; recompute looks at the scores alone, or names places among the
    # kept rows.
    for options, sentence in (({"engine": engine}, "3 of 8 rows ... (rows 1, 4, 6)"), (UNSEEN, "2 ... (rows 4, 6)")):
        with Waits() as waits:
            loss = shift_step(TopK(0.5) if options is UNSEEN else selector, **options)(BAD)[0]
        assert waits.count == 0
        with refused(sentence):
            loss.backward()


@pytest.mark.usefixtures("as_accelerator")
def test_a_selector_that_looks_at_the_losses_itself_refuses_in_the_words_of_the_step(engine):
    # Red when: a selector's own refusal of a NaN comes through.
    with refused("3 of 8 rows have ... (rows 1, 4, 6)"):
        shift_step(LossMass(0.5), engine=engine)(BAD)


@pytest.mark.usefixtures("as_host")
def test_nonfinite_losses_that_scoring_did_not_see_are_refused():
    # Red when: recompute checks the scores and not the losses of the second forward, or "keep" refuses them, too.
    with refused("2 of 8 rows ... (rows 4, 6); look at the data ... or choose nonfinite='drop' or 'keep'."):
        shift_step(TopK(0.5), **UNSEEN)(BAD)
    with refused("2 of 8 rows ... (rows 4, 6); scoring did not see it; score by the losses"):
        shift_step(TopK(0.5), nonfinite="drop", **UNSEEN)(BAD)
    assert not shift_step(TopK(0.5), nonfinite="keep", **UNSEEN)(BAD)[0].isfinite()


@pytest.mark.usefixtures("as_accelerator")
def test_a_refusal_of_the_backward_comes_before_the_optimizer_and_leaves_the_next_step_alone():
    # Red when: the flags of one call are looked at in the backward of another, or with a graph that is not asked for.
    model, batch = regression(), a_batch(0, 8)
    step = SelectiveBackprop(model, squared, TopK(0.5), engine="sliced")
    bad = {**batch, "y": torch.full((8,), math.nan)}
    first, second = step(bad)[0], step(batch)[0]
    second.backward()
    before = [p.detach().clone() for p in model.parameters()]
    with refused("8 of 8 rows"):
        first.backward()
    assert all(map(torch.equal, before, model.parameters()))
    with torch.no_grad(), refused("8 of 8 rows"):
        step(bad)
    with refused("8 of 8 rows"):
        SelectiveBackprop(model, squared, TopK(0.5), engine="sliced", ranks=Local())(bad)


@pytest.mark.parametrize("engine", ["recompute", "sliced"])
def test_a_dropped_row_does_not_reach_the_gradient(engine):
    # Red when: the dropped row's infinite intermediates are multiplied by zero (as `masked` does: 0 * inf = NaN).
    weight = nn.Parameter(torch.tensor(2.0))
    losses_fn = lambda model, batch: model(batch).exp()  # noqa: E731
    step = SelectiveBackprop(weight.mul, losses_fn, TopK(0.5), engine=engine, nonfinite="drop")
    _, record = backpropagated(step(torch.tensor([1.0, 500.0, 2.0, 3.0])))
    assert record.selection.rows.tolist() == [2, 3]
    assert weight.grad.item() == pytest.approx((2 * math.exp(4) + 3 * math.exp(6)) / 2)


@pytest.mark.parametrize("engine", ["masked", "sliced"])
def test_a_row_without_a_finite_loss_is_dropped_whatever_its_scorer_says(engine):
    # Red when: scores are not struck out where the losses of the forward are NaN or infinite, or the mean has the loss
    # of a row whose score is neither.
    losses = torch.tensor([1.0, math.inf, 2.0, 3.0, math.nan, 100.0])
    scores = torch.tensor([1.0, 9.0, 5.0, 7.0, 8.0, math.nan])
    step = shift_step(TopK(0.5), engine=engine, scorer=lambda model, batch: scores, nonfinite="drop")
    loss, record = step(losses)
    assert record.selection.rows.tolist() == [2, 3] and loss.item() == 2.5 and record.loss_all.item() == 2


class Spied:
    """An engine that writes down which rows it runs."""

    def __init__(self, name: str):
        self.engine = engine_of("Spied", name)
        self.name, self.one_forward, self.ran = name, self.engine.one_forward, []

    def kept_losses(self, selection, losses, forward):
        self.ran.append(selection.rows.tolist())
        return self.engine.kept_losses(selection, losses, forward)


def test_a_batchnorm_in_training_asks_for_two_rows(engine):
    # Red when: the floor ignores the mode, recompute gives BatchNorm a single row (torch refuses), or the second row
    # takes half of the weight.
    model, spied = step_cases.normed(), Spied(engine)
    step = SelectiveBackprop(model, squared, TopK(0.01), engine=spied)
    _, record = backpropagated(step(a_batch(0)))
    ranked = squared(step_cases.normed(), a_batch(0)).argsort(descending=True).tolist()
    assert spied.ran == [sorted(ranked[:2])]
    assert record.selection.rows.tolist() == ranked[:1] and record.selection.weights.tolist() == [1]
    assert (record.num_kept, record.contributed, record.kept_by_rank) == (1, 1, (1,))
    model.eval()
    step(a_batch(0))
    stateless = step_cases.normed(track_running_stats=False).eval()  # batch statistics even in evaluation mode
    SelectiveBackprop(stateless, squared, TopK(0.01), engine=spied)(a_batch(0))
    assert [len(rows) for rows in spied.ran] == [2, 1, 2]


@pytest.mark.parametrize("target", [1, 3, 7, 8, 20])
def test_the_accumulated_gradient_is_the_mean_over_exactly_b_rows(engine, target):
    # Red when: weights are not rescaled by K/B, surplus rows are not cut, or the counter is not reset.
    model = regression()
    step = SelectiveBackprop(model, squared, TopK(0.3), engine=engine, accumulate_to=target)
    used, steps = [], 0
    for seed in range(30):
        _, record = backpropagated(step(a_batch(seed)))
        used += [(seed, row) for row in record.selection.rows.tolist()]
        assert record.contributed == len(used) <= target and record.ready == (len(used) == target)
        hardest = squared(model, a_batch(seed)).argsort(descending=True)[:3].sort().values
        assert record.selection.rows.tolist() == hardest[: record.num_kept].tolist()  # surplus: the later rows
        if record.ready:
            reference = copy.deepcopy(model)
            reference.zero_grad()
            torch.stack([squared(reference, a_batch(seed))[row] for seed, row in used]).mean().backward()
            step_cases.assert_gradients_equal(model, reference)
            used, steps = [], steps + 1
            model.zero_grad()
            with torch.no_grad():
                next(model.parameters()).mul_(0.99)
    assert steps == 30 // math.ceil(target / 3)


def even_by_chance(scores, context):
    return Selection(torch.tensor([1, 3]), torch.tensor([0.5, 0.5]), 4)


@pytest.mark.parametrize("ranks", [None, Local(), Global()], ids=["alone", "local", "global"])
@pytest.mark.parametrize("selector", [ImportanceSampling(0.5), Nonzero(), PerClass(TopK(0.5)), even_by_chance])
def test_weights_that_stand_for_all_rows_are_not_accumulated_to_a_count_of_rows(selector, ranks):
    # Red when: such weights are scaled by K/B, as if they summed to 1 over the kept rows, or those that are 1/K by
    # chance pass: the run would end at the first that are not.
    step = shift_step(selector, accumulate_to=4, ranks=ranks)
    with refused(f"accumulate_to=4 and a selection with weights of its own from {selector!r} ... 1/K"):
        step(torch.tensor([1.0, 2.0, 0.0, 3.0]), classes=torch.tensor([0, 0, 0, 1]))
    assert step.state_dict()["step"] == 0


@pytest.mark.parametrize("selector", [RandomRows(0.5), Everything(), MultipleOf(PerClass(TopK(0.5)), 2)], ids=repr)
def test_unbiased_rows_of_equal_weight_are_accumulated(selector):
    # Red when: every unbiased selection is refused, or a whole batch is not cut to the quota.
    step = shift_step(selector, accumulate_to=6)
    records = [step(torch.ones(4), classes=torch.zeros(4, dtype=torch.int64))[1] for _ in range(3)]
    assert all(w == pytest.approx(1 / 6) for record in records for w in record.selection.weights.tolist())
    contributed = [2, 4, 6] if isinstance(selector, RandomRows | MultipleOf) else [4, 6, 4]
    assert [record.contributed for record in records] == contributed


def test_a_last_row_does_not_go_through_batchnorm_alone(engine):
    # Red when: the rows given to the engine are cut to the quota below the floor (torch refuses one row per channel).
    model, spied = step_cases.normed(), Spied(engine)
    step = SelectiveBackprop(model, squared, TopK(0.3), engine=spied, accumulate_to=4)
    step(a_batch(0))[0].backward()
    model.zero_grad()
    loss, record = backpropagated(step(a_batch(1)))
    assert record.ready and record.num_kept == 1 and record.selection.weights.tolist() == [0.25]
    assert [len(rows) for rows in spied.ran] == [3, 2]
    assert loss.item() == pytest.approx(record.loss_kept.item() / 4)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_half_precision_losses_are_averaged_in_float32():
    # Red when: loss_all or loss_kept is a bfloat16 mean.
    losses = torch.tensor([2.0] + [1.0] * 999, dtype=torch.bfloat16)
    record = shift_step(TopK(1.0))(losses)[1]
    assert record.loss_all.item() == record.loss_kept.item() == pytest.approx(1.001, abs=1e-6)


def test_resuming_is_bit_for_bit_the_same_as_not_stopping(engine):
    # Red when: step, contributed or the generator is left out of state_dict.
    def made():
        torch.manual_seed(0)
        layers = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        options = {"schedule": Schedule(0.1, 1.0, 3), "total_steps": 10, "accumulate_to": 9}
        options |= {"generator": torch.Generator().manual_seed(3), "engine": engine}
        return SelectiveBackprop(nn.Sequential(*layers), squared, RankSampling(0.4), **options)

    step_cases.assert_resumes(made, lambda step, number: step(a_batch(number)))


class Remembering:
    """A selector, or a scorer, with a memory that one number can break."""

    def __init__(self, chooses=None):
        self.calls, self.chooses = 0, chooses or TopK(0.5)

    def __call__(self, first, second):
        self.calls += 1
        return self.chooses(first, second)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = -1  # half loaded
        self.calls = state_dict["calls"] + 0


ABSENT = "absent"


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
        ({"selector": {}}, "a state that a part cannot load (KeyError: 'calls'), so nothing was loaded"),
        ({"selector": None}, "a state that a part cannot load"),
        ({"history": {}}, "LossHistory.load_state_dict got a state without loss"),
        ({"sampler": {}}, "PruningSampler.load_state_dict got a state without num_rows"),
        # With 6 of 6 rows there, the next batch would have none to contribute. Red when `>=` becomes `>`.
        ({"contributed": 6}, "load_state_dict got 6 rows that have contributed but accumulate_to is 6"),
        ({"more": 1}, "load_state_dict got the entries ... 'more' ... were needed; build SelectiveBackprop with"),
        ({"generator": ABSENT}, "['contributed', 'history', 'sampler', ... but ['contributed', 'generator', 'history"),
    ],
    ids=str,
)
def test_a_broken_state_is_refused_and_nothing_is_loaded(breaks, sentence):
    # Red when: parts are loaded one after the other and not taken back, step and contributed are not looked at, only
    # the entries that are there are, or _stateful looks at the selector or the scorer only.
    def made(calls):
        sampler = PruningSampler(LossHistory(8), num_rows=8, epochs=2)
        generator = torch.Generator().manual_seed(calls)
        options = {"scorer": Remembering(given_losses), "history": sampler, "generator": generator}
        step = shift_step(Remembering(), accumulate_to=6, **options)
        for _ in range(calls):
            step(torch.rand(8), ids=torch.tensor(list(sampler)))
        return step

    saved, step = made(1).state_dict(), made(2)
    before = str(step.state_dict())
    broken = {name: value for name, value in (saved | breaks).items() if value is not ABSENT}
    with refused(sentence):
        step.load_state_dict(broken)
    assert str(step.state_dict()) == before
    step.load_state_dict(saved | {"contributed": 5})
    assert str(step.state_dict()) == str(saved | {"contributed": 5})


@pytest.mark.parametrize(
    ("engine", "scorer", "score_s"),
    [("sliced", False, 0.0), ("masked", True, 3.0), ("recompute", False, 5.0), ("recompute", True, 3.0)],
)
def test_seconds_go_to_the_phase_that_spent_them(monkeypatch, engine, scorer, score_s):
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
    assert step(torch.rand(8))[1].seconds == {"score": score_s, "forward": 5.0, "select": 2.0}
    assert shift_step(TopK(0.5), engine=engine)(torch.rand(8))[1].seconds is None


def test_a_record_is_one_line_and_a_flat_dictionary_of_plain_values(engine):
    # Red when: the dataclass prints its tensors, a value of the dictionary is a tensor, a tensor of the record holds
    # the graph, or seconds stay nested; the loss of no row is printed as nan, or the loss of all rows twice.
    step = shift_step(TopK(0.5), engine=engine, timing=True)
    for _ in range(4):
        record = step(torch.tensor([1.0, 2.0, 3.0, 0.0]))[1]
    assert str(record) == f"Record(step 3: kept 2 of 4 rows, loss 1.5 (kept 2.5), {engine})"
    assert repr(record) == str(record)
    assert not any(tensor.requires_grad for tensor in (record.loss_all, record.loss_kept, record.selection.weights))
    flat = record.to_dict()
    assert all(type(value) in (int, float, str, bool) for value in flat.values())
    seconds = {name: flat.pop(name) for name in ("score_s", "forward_s", "select_s")}
    assert seconds == {f"{name}_s": value for name, value in record.seconds.items()}
    assert flat == {
        **{"step": 3, "loss_all": 1.5, "loss_kept": 2.5, "num_kept": 2, "num_rows": 4, "num_kept_all_ranks": 2},
        **{"imbalance": 1.0, "engine": engine, "reason": f"{engine} was asked for", "ready": True, "contributed": 2},
    }
    assert json.loads(json.dumps(flat)) == flat
    for selector, said in ((Threshold(9.0), "none"), (TopK(1.0), "all")):
        assert str(shift_step(selector, engine=engine)(torch.ones(4))[1]).endswith(f"loss 1 ({said} kept), {engine})")


def test_the_repr_of_a_record_leaves_out_losses_that_cannot_be_read():
    # Red when: repr reads a fake tensor, or one while a CUDA graph is captured: a test's report would fail.
    with FakeTensorMode():
        record = shift_step(TopK(0.3), engine="sliced", nonfinite="keep")(torch.empty(10))[1]
        assert repr(record) == str(record) == "Record(step 0: kept 3 of 10 rows, sliced)"


WRONG = [  # arguments, and what is said of them; bad values of every kind are given in the hostile trial
    ({"nonfinite": "ignore"}, "nonfinite='ignore' but one of error, drop, keep was needed; the default is error."),
    ({"min_rows": 1.5}, "min_rows=1.5 but a whole number, 1 or more, was needed; None is the default."),
    ({"total_steps": 10**30}, f"total_steps={10**30} but a whole number below 2**63 was needed."),
    ({"selector": 0.5}, "selector=0.5, a float, but a selector was needed; give an instance, e.g. TopK(keep=0.5)."),
    ({"selector": lambda scores: TopK(0.5)(scores)}, "selector=<function ... rowprop.selector(f) makes one of a funct"),
    ({"losses_fn": len}, "losses_fn=<built-in function len>, which takes other arguments, but a function was"),
    ({"scorer": StaleScorer}, "scorer=<class 'rowprop.history.StaleScorer'>, a type, but a function of the model"),
    ({"history": LossHistory}, "history=<class 'rowprop.history.LossHistory'>, a type, but a LossHistory()"),
    ({"ranks": 2}, "ranks=2, a int, but rowprop.distributed.Local()"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_wrong_arguments_are_refused_at_construction(options, sentence):
    with refused(f"SelectiveBackprop got {sentence}"):
        SelectiveBackprop(**({"model": Shift(), "losses_fn": given_losses, "selector": TopK(0.5)} | options))


@pytest.mark.parametrize("name", ["selector", "engine", "history", "sampler", "accumulate_to", "timing"])
def test_arguments_stay_as_they_were_given(name: str):
    # Red when: an attribute can be set, unchecked, in the middle of a training.
    with pytest.raises(AttributeError, match=f"{name} stays as it was given; make another SelectiveBackprop"):
        setattr(shift_step(TopK(0.5)), name, None)
