"""Every engine's gradient is the one plain indexing gives, and scoring leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from laws import reducible
from model_cases import losses as losses_fn
from rowprop.backprop.pick import pick
from rowprop.backprop.watch import watch
from rowprop.engines import ENGINES, Masked, Recompute, Sliced, engine_of
from rowprop.schedule import Schedule
from rowprop.scoring import score_without_graph
from rowprop.selection import AboveMean, Context, LossMass, RandomRows, RankSampling, TopK
from rowprop.step.selective import SelectiveBackprop
from sentences import refused
from step_cases import assert_gradients_equal, backpropagated

N = 12


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


def convnet() -> nn.Module:
    layers = nn.Conv2d(1, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers)


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def frozen_batchnorm() -> nn.Module:
    model = batchnorm()
    model[1].running_mean.normal_()
    model[1].eval()
    return model


class Unused(nn.Linear):
    """A model with a parameter that no loss reaches."""

    def __init__(self):
        super().__init__(6, 3)
        self.unused = nn.Linear(6, 3)


def noisy() -> nn.Module:
    return batchnorm().insert(3, nn.Dropout(0.5))


def a_batch(seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 6, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (N,), generator=generator)


def built(make, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = make().to(dtype)
    model(a_batch(dtype=dtype)[0])
    return model


class Mine:
    """An engine of the user's own."""

    name = "mine"
    one_forward = True

    def kept_losses(self, selection, losses, forward):
        return losses.index_select(0, selection.rows)


SELECTORS = [
    TopK(0.3),
    RankSampling(0.5),
    LossMass(0.6),
    AboveMean(),
    RandomRows(0.25),
    TopK(1.0),
    reducible(TopK(0.3)),
]
MODELS = [(make, engine) for make in (mlp, convnet, frozen_batchnorm, Unused) for engine in ENGINES]


@pytest.mark.parametrize(("make", "engine"), [*MODELS, (mlp, Mine()), (batchnorm, Sliced(batchnorm="exact"))])
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_gradient_is_that_of_plain_indexing(make, engine, selector):
    # Red when: an engine takes other rows (rows + 1), loses the weights, or leaves a zero where no gradient belongs; or
    # Sliced forgets batchnorm: training BatchNorm is exact under "exact" only.
    model, batch = built(make), a_batch(1)
    reference = copy.deepcopy(model)
    step = SelectiveBackprop(model, losses_fn, selector, engine=engine, generator=torch.Generator().manual_seed(7))
    ids = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    loss, record = backpropagated(step(batch, ids=ids))

    losses = losses_fn(reference, batch)
    rows = selector(losses.detach(), Context(ids=ids, generator=torch.Generator().manual_seed(7))).rows
    expected = losses[rows].mean()
    expected.backward()

    assert record.selection.rows.tolist() == rows.tolist() and record.engine == getattr(engine, "name", engine)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(record.loss_all, losses.detach().mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(record.loss_kept, expected.detach(), rtol=1e-12, atol=0)
    assert_gradients_equal(model, reference, rtol=1e-10, atol=1e-13)


def test_a_full_batch_leaves_the_gradient_of_a_plain_step_bit_for_bit(engine):
    # Red when: an engine picks although everything is kept, weights are 1/N in another precision than mean's, or
    # recompute scores a batch that is trained whole. How often it runs the model otherwise: test_timing.py.
    model, batch, seen = built(mlp, torch.float32), a_batch(1, torch.float32), []
    plain = copy.deepcopy(model)
    spying = lambda model, batch: seen.append(len(batch[0])) or losses_fn(model, batch)  # noqa: E731
    step = SelectiveBackprop(model, spying, TopK(0.3), engine=engine, schedule=Schedule(0.5, 0.9), total_steps=10)
    _, record = backpropagated(step(batch))
    assert seen == [N]
    losses_fn(plain, batch).mean().backward()
    assert record.num_kept == N and "schedule" in record.reason
    assert_gradients_equal(model, plain, rtol=0, atol=0)


def test_the_batchnorm_of_sliced_is_that_of_pick():
    # Red when: Sliced forgets it. At six rows "rows" has another gradient than the choice at each layer, the exact one.
    # Or when: Sliced indexes plainly: equal gradients, at the price of a full backward.
    model, batch, engine = built(batchnorm), a_batch(1), Sliced(batchnorm="rows")
    reference, exact = copy.deepcopy(model), copy.deepcopy(model)
    loss, record = SelectiveBackprop(model, losses_fn, TopK(0.5), engine=engine)(batch)
    picked = pick(losses_fn(reference, batch), record.selection, batchnorm="rows").mean()
    with watch() as report:
        loss.backward()
    assert report.sliced and not report.densified
    for each in (picked, losses_fn(exact, batch)[record.selection.rows].mean()):
        each.backward()
    assert_gradients_equal(model, reference, rtol=0, atol=0)
    assert not torch.allclose(model[0].weight.grad, exact[0].weight.grad)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_scoring_leaves_modes_buffers_and_rng_as_found(mode):
    # Red when: one of buffers_kept, rng_kept and evaluating is not entered, model.train() restores the modes, or a
    # restoration is not in a `finally`.
    model = built(noisy)
    model.append(nn.BatchNorm1d(3).double().eval())  # one frozen module inside a training model
    model.register_buffer("rebound", torch.zeros(2))
    model[0].register_forward_hook(lambda *_: setattr(model, "rebound", model.rebound + 1))
    modes, buffers = [module.training for module in model.modules()], dict(model.named_buffers())
    values, state = {name: buffer.clone() for name, buffer in buffers.items()}, torch.get_rng_state()

    def failing(model, batch):
        losses_fn(model, batch)
        raise KeyError("labels")

    def assert_as_found():
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == modes
        for name, buffer in model.named_buffers():
            assert buffer is buffers[name] and torch.equal(buffer, values[name]), name

    scores = score_without_graph(losses_fn, model, a_batch(), mode=mode)
    assert_as_found()
    with pytest.raises(KeyError):
        score_without_graph(failing, model, a_batch(), mode=mode)
    assert_as_found()
    assert not scores.requires_grad
    if mode == "eval":
        model.eval()
    torch.testing.assert_close(scores, losses_fn(model, a_batch()).detach(), rtol=0, atol=0)


def test_scoring_does_not_disturb_an_earlier_graph():
    # Red when: buffers are put back by `buffer.copy_` (their version counter then stops the earlier backward).
    model = built(frozen_batchnorm)
    loss = losses_fn(model, a_batch()).mean()
    score_without_graph(losses_fn, model, a_batch(1))
    loss.backward()


def test_after_a_step_buffers_rng_and_gradients_are_those_of_one_plain_step(engine):
    # On the batch, or on the rows that go forward again. Red when: scoring, or a scorer that runs beside the forward,
    # moves the running statistics or consumes random numbers.
    model, batch = built(noisy), a_batch(3)
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    step = SelectiveBackprop(model, losses_fn, TopK(0.5), engine=engine, scorer=losses_fn)
    rows = backpropagated(step(batch))[1].selection.rows
    state = torch.get_rng_state()
    torch.manual_seed(5)
    recomputed = engine == "recompute"
    losses = losses_fn(plain, [part[rows] for part in batch]) if recomputed else losses_fn(plain, batch)[rows]
    losses.mean().backward()
    assert_gradients_equal(model, plain, rtol=1e-10, atol=1e-13)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert model[1].num_batches_tracked == 2  # one to build the model, one step


def test_recompute_selects_what_sliced_selects_in_train_mode_and_not_in_eval_mode():
    # Red when: the mode of scoring is not passed on, or scoring draws other dropout masks than the training forward.
    def selected(engine) -> list[int]:
        torch.manual_seed(9)
        step = SelectiveBackprop(built(noisy), losses_fn, TopK(0.3), engine=engine)
        return step(a_batch(4))[1].selection.rows.tolist()

    assert selected("recompute") == selected("sliced") == selected("masked")
    model = built(noisy).eval()
    expected = TopK(0.3)(losses_fn(model, a_batch(4)).detach()).rows.tolist()
    assert selected(Recompute(scoring="eval")) == expected != selected("sliced")


def test_autocast_and_gradscaler_gradients_reach_every_weight(engine):
    # Red when: Sliced picks from detached losses, or the loss stays in bfloat16; and, on a torch whose autocast
    # remembers weights cast without a graph (pytorch#112583, mended in 2025), when scoring does not clear that cache:
    # recompute then loses weight gradients.
    model, batch = built(mlp, torch.float32), a_batch(1, torch.float32)
    reference, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", torch.bfloat16):
        loss, record = SelectiveBackprop(model, losses_fn, TopK(0.3), engine=engine)(batch)
        expected = losses_fn(reference, batch)[record.selection.rows].float().mean()
    for each in (loss, expected):
        scaler.scale(each).backward()
    assert loss.dtype == torch.float32
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        atol = 0.02 * theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=atol)


def test_names_and_objects_find_their_engines():
    # Red when: a name finds another engine's class, or settings of an object are lost.
    assert [engine_of("x", name) for name in ("sliced", "recompute", "masked")] == [Sliced(), Recompute(), Masked()]
    for value in (Sliced("exact"), Recompute("eval"), Mine()):
        assert engine_of("x", value) is value


NO_ENGINES = [
    (lambda: Sliced(batchnorm="approximate"), "batchnorm='approximate' but one of None, rows, exact"),
    (lambda: Sliced(attention="rows"), "attention='rows' but one of exact, cut"),
    (lambda: Recompute(scoring="test"), "scoring='test' but one of train, eval"),
    (lambda: engine_of("x", "fast"), "engine='fast' but one of sliced, recompute, masked ... Sliced('exact')"),
    *[
        (lambda value=value: engine_of("SelectiveBackprop", value), "SelectiveBackprop got engine=")
        for value in (None, 3, [], ("sliced", "masked"), {"sliced"}, Sliced, torch.zeros(2))
    ],
]


@pytest.mark.parametrize(("make", "sentence"), NO_ENGINES)
def test_what_is_no_engine_is_refused(make, sentence):
    with refused(sentence):
        make()
