"""The step on tokens: against plain indexing of the tokens that count, in a loop that a user would write."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelerator import Waits
from killed import seeded
from rowprop import ImportanceSampling, RandomRows, Selection, SelectiveBackprop, TopK, pick, recipes, watch
from rowprop.cost.flops import count_flops
from rowprop.distributed import Global, Local
from rowprop.engines import Sliced
from rowprop.history import LossHistory
from rowprop.schedule import Ramp, Schedule
from rowprop.scoring import Scored, entropy
from rowprop.selection import Context, Everything, LossMass, MultipleOf, OverAll, PerClass, Threshold
from sentences import refused
from step_cases import Shift, assert_resumes, given_losses
from token_models import IDS, LABELS, MASKS, Decoder, N, T, cut_attention, largest_difference

BATCH = {"ids": IDS, "labels": LABELS}
ANSWERS = torch.rand(N, T, generator=seeded(5)) < 0.6  # the tokens that count
NONE = torch.zeros(N, T, dtype=torch.bool)


@pytest.fixture(params=["sliced", "masked"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none")


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def dense_loss(losses: Tensor, counted: Tensor, selector: Any) -> tuple[Tensor, Tensor, Selection]:
    """The loss of a plain loop, the flat places that it keeps, and the selection among the tokens that count."""
    chosen = selector(losses.detach()[counted], Context(generator=seeded(3)))
    places = torch.arange(counted.numel()).view(counted.shape)[counted]
    return (losses[counted][chosen.rows] * chosen.weights).sum(), places[chosen.rows], chosen


def token_step(selector: Any, model: Any = None, losses_fn: Any = token_losses, **options: Any) -> SelectiveBackprop:
    options = {"engine": "sliced", "generator": seeded(3), "unit": "token"} | options
    return SelectiveBackprop(Decoder(False) if model is None else model, losses_fn, selector, **options)


def given_step(selector: Any, **options: Any) -> SelectiveBackprop:
    return token_step(selector, Shift(), given_losses, **options)


SELECTORS = [
    *[TopK(0.6), LossMass(0.3), Threshold(4.0), RandomRows(0.25), ImportanceSampling(0.5), Everything()],
    *[OverAll(TopK(0.2)), MultipleOf(TopK(0.1), 8)],
]
ONE = NONE.index_put((torch.tensor(2), torch.tensor(7)), torch.tensor(True))
COUNTED = {"answers": ANSWERS, "uneven": MASKS["uneven"], "all": ~NONE, "one": ONE}


@pytest.mark.parametrize("mask", COUNTED)
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_selection_and_gradient_are_those_of_a_plain_loop(engine: str, mask: str, selector: Any):
    # Red when: the selector sees tokens that do not count, K is of all tokens, places among the tokens that count are
    # taken for places among all, or the weights of a draw, or that they are 1/K or it is unbiased, get lost.
    counted, step = COUNTED[mask], token_step(selector, engine=engine)
    loss, record = step(BATCH, counted=counted)
    ours = gradients(step.model, loss)
    losses = token_losses(step.model, BATCH)
    expected, places, plain = dense_loss(losses, counted, selector)
    assert torch.equal(record.selection.rows, places) and record.selection.num_rows == N * T
    assert (record.selection.even, record.selection.unbiased) == (plain.even, plain.unbiased)
    assert (record.num_kept, record.num_rows) == (len(places), int(counted.sum()))
    whole = record.reason.startswith("the whole batch: the selector keeps every token")
    assert whole == isinstance(selector, Everything)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(record.loss_all, losses.detach()[counted].mean(), rtol=1e-12, atol=0)
    assert largest_difference(ours, gradients(step.model, expected)) < 1e-12


def test_the_attention_of_the_engine_is_that_of_the_step():
    # Red when: the step makes a Sliced of its own.
    step = token_step(TopK(0.25), engine=Sliced(attention="cut"))
    loss, record = step(BATCH)
    ours = gradients(step.model, loss)
    kept = torch.zeros(N * T, dtype=torch.bool).index_fill(0, record.selection.rows, True).view(N, T)
    losses = F.cross_entropy(step.model(IDS, attention=cut_attention(kept)).transpose(1, 2), LABELS, reduction="none")
    assert largest_difference(ours, gradients(step.model, losses[kept].mean())) < 1e-12


def test_the_backward_of_a_step_costs_what_a_pick_of_its_tokens_costs():
    # Red when: the step densifies on its way to the losses, picks from all tokens that count, or picks tokens beside.
    model = Decoder(False)

    def flops(loss: Tensor) -> int:
        with count_flops() as counted, watch() as report:
            loss.backward()
        assert not report.densified
        return sum(counted.by_op.values())

    loss, record = token_step(TopK(0.25), model, engine=Sliced(attention="cut"))(BATCH, counted=ANSWERS)
    picked = pick(token_losses(model, BATCH), record.selection, attention="cut")
    ours, theirs, full = flops(loss), flops(picked.mean()), flops(token_losses(model, BATCH).mean())
    assert ours == theirs <= (record.num_kept / (N * T) + 0.02) * full
    prompt_free, _ = token_step(TopK(1.0), model, engine=Sliced(attention="cut"))(BATCH, counted=ANSWERS)
    answers = pick(token_losses(model, BATCH), ANSWERS, attention="cut")
    assert flops(prompt_free) == flops(answers.mean()) < 0.65 * full  # all tokens that count, and no other


@pytest.mark.parametrize("rubbish", [1e4, -1e4, math.nan, math.inf])
def test_tokens_that_do_not_count_have_no_influence(engine: str, rubbish: float):
    # Red when: K, loss_all, the selector or the check for finite losses sees them.
    spoilt = lambda model, batch: torch.where(ANSWERS, token_losses(model, batch), rubbish)  # noqa: E731
    found = []
    for losses_fn in (token_losses, spoilt):
        step = token_step(LossMass(0.5), losses_fn=losses_fn, engine=engine)
        loss, record = step(BATCH, counted=ANSWERS)
        found.append((loss, record.loss_all, record.selection.rows, *gradients(step.model, loss)))
    assert all(map(torch.equal, *found))


EMPTY = [{}, {"nonfinite": "drop"}, {"nonfinite": "keep"}, {"min_rows": 4}, {"ranks": Local()}, {"ranks": Global()}]


@pytest.mark.parametrize("options", EMPTY, ids=str)
def test_a_batch_of_which_no_token_counts_has_a_loss_and_a_gradient_of_zero(engine: str, options: dict[str, Any]):
    # Red when: the selector is asked about no scores, or the loss is the NaN of a mean of nothing.
    step = token_step(TopK(0.5), engine=engine, **options)
    loss, record = step(BATCH, counted=NONE)
    assert loss.item() == 0 and (record.num_kept, record.num_rows) == (0, 0) and record.loss_all.isnan()
    assert all(not grad.any() for grad in gradients(step.model, loss))
    assert str(record).endswith(f"kept 0 of 0 tokens, loss nan (none kept), {record.engine})")
    assert step(BATCH)[1].num_kept == 48


def test_the_accumulated_gradient_is_the_mean_over_exactly_b_tokens(engine: str):
    # Red when: tokens that do not count fill the step, or a batch without tokens ends it.
    step = token_step(TopK(0.25), engine=engine, accumulate_to=40)
    ours, kept = list[Tensor](), list[Tensor]()
    for counted in (ANSWERS, NONE, MASKS["a quarter"], ~NONE):
        losses = token_losses(step.model, BATCH)
        if counted.any():
            kept.append(losses.flatten()[dense_loss(losses, counted, TopK(0.25))[1]])
        loss, record = step(BATCH, counted=counted)
        ours.append(loss)
        assert record.ready == (len(ours) == 4)
    assert record.contributed == 40 and sum(map(len, kept)) > 40
    actual = gradients(step.model, torch.stack(ours).sum())
    assert largest_difference(actual, gradients(step.model, torch.cat(kept)[:40].mean())) < 1e-12


BAD = torch.tensor([[1.0, math.nan, 3.0, 9.0], [math.inf, 2.0, -math.inf, 4.0]])
THREE_EACH = torch.tensor([[True, True, True, False], [True, True, False, True]])  # 1 nan 3, inf 2 4


@pytest.mark.usefixtures("as_host")
def test_tokens_that_are_not_finite_are_refused_dropped_or_kept():
    # Red when: places among all tokens are named, a token that does not count is looked at, or the dropped count in N.
    with refused("2 of 6 tokens ... (tokens 1, 3 of those that count) ... choose nonfinite='drop'"):
        given_step(TopK(0.5))(BAD, counted=THREE_EACH)
    loss, record = given_step(TopK(0.5), nonfinite="drop")(BAD, counted=THREE_EACH)
    assert record.selection.rows.tolist() == [2, 7] and loss.item() == 3.5 and record.loss_all.item() == 2.5
    loss, record = given_step(TopK(0.5), nonfinite="keep")(BAD, counted=THREE_EACH)
    assert record.selection.rows.tolist() == [1, 4, 7] and not loss.isfinite()
    with refused("All 2 tokens have a NaN or infinite loss or score"):
        given_step(TopK(0.5), nonfinite="drop")(BAD, counted=~BAD.isfinite() & THREE_EACH)


@pytest.mark.usefixtures("as_accelerator")
def test_on_a_device_nobody_waits_but_for_the_mask():
    # Red when: the tokens that count are looked for again, where the device is.
    step = given_step(TopK(0.5))
    with Waits() as waited:
        step(torch.rand(4, 6))
        assert waited.count == 0
        step(torch.rand(4, 6), counted=torch.rand(4, 6) < 0.9)
    assert waited.seen == ["nonzero in Tokens.counting"]  # on the host, where the mask is
    with refused("2 of 6 tokens ... (tokens 1, 3 of those that count)"):
        given_step(TopK(0.5))(BAD, counted=THREE_EACH)[0].backward()


def test_fewer_tokens_than_the_floor_are_joined_by_others_that_count():
    # Red when: the floor takes tokens that do not count, or their losses reach the loss.
    seen: list[Selection] = []

    class Spied(Sliced):
        def kept_losses(self, selection: Selection, losses: Any, forward: Callable[..., Tensor]) -> Tensor:
            seen.append(selection)
            return super().kept_losses(selection, losses, forward)

    losses = torch.tensor([[5.0, 9.0, 1.0], [8.0, 2.0, 3.0]])
    counted = torch.tensor([[True, False, True], [False, True, True]])
    loss, record = given_step(TopK(0.1), engine=Spied(), min_rows=3)(losses, counted=counted)
    assert seen[0].rows.tolist() == [0, 4, 5] and record.selection.rows.tolist() == [0] and loss.item() == 5


def test_parts_see_the_rows_and_the_positions_of_the_tokens_that_count():
    # Red when: ids or classes are those of other tokens, or positions count the tokens that do not count.
    seen: list[Context] = []

    def selector(scores: Tensor, context: Context) -> Selection:
        seen.append(context)
        return TopK(0.5)(scores, context)

    ids, classes = torch.tensor([7, 3]), torch.tensor([0, 1])
    given_step(selector)(BAD.nan_to_num(0, 0, 0), counted=THREE_EACH, ids=ids, classes=classes)
    assert seen[0].ids.tolist() == [7, 7, 7, 3, 3, 3] and seen[0].positions.tolist() == [0, 1, 2, 0, 1, 3]
    assert seen[0].classes.tolist() == [0, 0, 0, 1, 1, 1] and seen[0].at(torch.tensor([4])).positions.tolist() == [1]
    record = given_step(PerClass(TopK(0.3)))(BAD.nan_to_num(0, 0, 0), counted=THREE_EACH, classes=classes)[1]
    assert record.selection.rows.tolist() == [2, 7]


def test_a_schedule_says_which_batches_train_all_tokens_that_count_and_how_many():
    # Red when: the whole batch is all tokens, keep is of all tokens, or the schedule is not asked.
    step = token_step(TopK(Ramp(1.0, 0.5)), schedule=Schedule(0.5, 1.0, 0), total_steps=4)
    kept = [step(BATCH, counted=ANSWERS)[1].num_kept for _ in range(4)]
    count = int(ANSWERS.sum())
    assert kept == [count, count, *(math.ceil((1 - 0.5 * p) * count - 1e-9) for p in (0.5, 0.75))]


def test_scores_beside_the_losses_and_scores_of_a_scorer_are_of_tokens():
    # Red when: scores are averaged per row, the losses are taken instead, or the scores are those of other tokens.
    scores = torch.randperm(N * T, generator=seeded(7)).double().view(N, T)
    beside = token_step(TopK(0.5), losses_fn=lambda model, batch: Scored(token_losses(model, batch), scores))
    scorer = token_step(TopK(0.5), scorer=lambda model, batch: scores)
    expected = highest(scores, 0.5)
    for step in (beside, scorer):
        loss, record = step(BATCH, counted=ANSWERS)
        assert torch.equal(record.selection.rows, expected)
        mean = token_losses(step.model, BATCH).flatten()[expected].mean()
        torch.testing.assert_close(loss, mean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (2, 12)])
def test_losses_of_any_shape_are_of_tokens(shape: tuple[int, ...]):
    # Red when: the first dimension is the only one that is flattened, e.g. of pixels, or of sequences without padding.
    losses = torch.rand(shape, generator=seeded(1))
    counted = losses < 0.8
    record = given_step(TopK(0.5))(losses, counted=counted)[1]
    hardest = torch.where(counted, losses, -1).flatten().topk(math.ceil(int(counted.sum()) / 2)).indices
    assert record.selection.rows.tolist() == hardest.sort().values.tolist()


def losses_and_entropies(model: nn.Module, batch: dict[str, Tensor]) -> Scored:
    logits = model(batch["ids"])
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return Scored(losses, entropy(logits.flatten(0, 1)).view(losses.shape))


def other_model() -> nn.Module:
    other = Decoder(False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(4)), alpha=0.05)
    return nn.Sequential(other, nn.Dropout(0.5))  # which evaluation mode turns off


def highest(scores: Tensor, keep: float) -> Tensor:
    """The flat places of the highest scores among the tokens that count, found one by one."""
    places = [int(place) for place in ANSWERS.flatten().nonzero()]
    count = math.ceil(keep * len(places) - 1e-9)
    return torch.tensor(sorted(sorted(places, key=lambda place: -float(scores.flatten()[place]))[:count]))


@pytest.mark.parametrize("remembered", [False, True])
def test_rho1_keeps_the_tokens_that_exceed_the_reference_most(engine: str, remembered: bool):
    # Red when: the sign is turned around, the reference is in training mode, leaves a gradient or draws, remembered
    # losses are read by place in the batch, or the weights are not 1/K.
    reference, model = other_model(), Decoder(False)
    known = token_losses(reference.eval(), BATCH).detach()
    reference.train()
    ids = torch.tensor([8, 2, 5, 0, 9, 3])
    if remembered:
        table = torch.full((10, T + 3), math.nan, dtype=torch.float64)
        table[ids, :T] = torch.where(ANSWERS, known, math.nan)
    step = recipes.rho1(model, token_losses, reference=table if remembered else reference, engine=engine)
    before = torch.get_rng_state()
    loss, record = step(BATCH, counted=ANSWERS, ids=ids if remembered else None)
    assert torch.equal(torch.get_rng_state(), before) and all(p.grad is None for p in reference.parameters())
    losses = token_losses(model, BATCH)
    expected = highest(losses.detach() - known, 0.6)
    assert torch.equal(record.selection.rows, expected) and not torch.equal(expected, highest(losses.detach(), 0.6))
    ours = gradients(model, loss)
    assert largest_difference(ours, gradients(model, losses.flatten()[expected].mean())) < 1e-8


def test_high_entropy_tokens_count_as_in_the_mean_over_all(engine: str):
    # Red when: losses are the scores, entropies are averaged per row, or the weights are 1/K.
    model = Decoder(False)
    step = recipes.high_entropy_tokens(model, losses_and_entropies, engine=engine)
    loss, record = step(BATCH, counted=ANSWERS)
    logits = model(IDS)
    losses = token_losses(model, BATCH)
    expected = highest(torch.distributions.Categorical(logits=logits.detach()).entropy(), 0.2)
    assert torch.equal(record.selection.rows, expected)
    kept = torch.zeros(N * T).index_fill(0, expected, 1.0).view(N, T)
    published = (losses * kept * ANSWERS).sum() / ANSWERS.sum()  # a mask on the losses, and the mean over all tokens
    assert largest_difference(gradients(model, loss), gradients(model, published)) < 1e-8


OF_ROWS: dict[str, Callable[..., SelectiveBackprop]] = {
    "batch_loss_filter": partial(recipes.batch_loss_filter, epochs=2),
    "biggest_losers": partial(recipes.biggest_losers, batch_rows=20, epochs=2),
    "composer": recipes.composer,
    "kath18": partial(recipes.kath18, gated=False),
    "ohem": recipes.ohem,
    "random": recipes.random,
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_recipes_for_rows_choose_among_tokens_where_they_are_asked_to(name: str):
    # Red when: a recipe keeps its unit to itself, or weighs tokens as their rows.
    options: dict[str, Any] = {"engine": "sliced", "unit": "token", "generator": seeded(1)}
    step = OF_ROWS[name](Decoder(False), token_losses, **options)
    for _ in range(2):
        loss, record = step(BATCH, 0, counted=ANSWERS, progress=0.6)
        selection = record.selection
        assert record.unit == "token" and 0 < selection.num_kept < record.num_rows == int(ANSWERS.sum())
        assert ANSWERS.flatten()[selection.rows].all()
        losses = token_losses(step.model, BATCH).flatten()
        expected = gradients(step.model, (losses[selection.rows] * selection.weights).sum())
        assert largest_difference(gradients(step.model, loss), expected) < 1e-12
    with refused("unit='token' with a history, but tokens have no ids"):
        recipes.infobatch(step.model, token_losses, num_rows=6, epochs=2, unit="token")


@pytest.mark.parametrize("recipe", ["random", "rho1", "high_entropy_tokens"])
def test_resuming_is_bit_for_bit_the_same_as_not_stopping(engine: str, recipe: str):
    # Red when: step, contributed or the generator is left out of state_dict.
    def made() -> SelectiveBackprop:
        model, options = Decoder(False), {"engine": engine, "generator": seeded(3), "keep": 0.3}
        if recipe == "random":
            return recipes.random(model, token_losses, unit="token", accumulate_to=50, **options)
        if recipe == "rho1":
            return recipes.rho1(model, token_losses, reference=other_model(), accumulate_to=50, **options)
        return recipes.high_entropy_tokens(model, losses_and_entropies, **options)

    assert_resumes(made, lambda step, number: step(BATCH, counted=torch.rand(N, T, generator=seeded(number)) < 0.7))


SIX = torch.rand(2, 3)


def halved(losses: Any = SIX, counted: Any = None, ids: Any = None, **options: Any) -> object:
    return given_step(TopK(0.5), **options)(losses, counted=counted, ids=ids)


def flat(ids: Tensor) -> object:
    """A selector that does not look at the context."""
    return token_step(lambda s, c: TopK(0.5)(s), Shift(), lambda m, b: m(b).flatten())(SIX, ids=ids)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (partial(halved, engine="recompute"), "SelectiveBackprop got engine=Recompute(scoring='train') ... take 'sliced'."),
    (partial(halved, history=LossHistory()), "unit='token' with a history ... leave the history out."),
    (partial(halved, counted=SIX > 0, unit="row"), "a call got counted but the step selects among rows; unit='token'"),
    (partial(halved, counted=SIX), "counted came as a tensor of shape (2, 3) ... a bool mask ... `labels[:, 1:] != -"),
    (partial(halved, counted=[True]), "counted=[True], a list, but a bool mask of the shape of the losses was needed"),
    (partial(halved, counted=torch.ones(2, 4) > 0), "shape (2, 3) ... shape (2, 4), as counted ... cut all alike."),
    (partial(halved, SIX.mean()), "losses_fn returned a tensor of shape () ... pass reduction='none' to the loss."),
    (partial(halved, scorer=lambda model, batch: batch.sum(1)), "one number per token was needed, shape (2,)"),
    (partial(flat, ids=torch.arange(2)), "ids came as a tensor of shape (2,) ... int64 of shape (6,)"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_a_wrong_call_is_refused_in_a_sentence(call: Callable[[], object], sentence: str):
    with refused(sentence):
        call()
