"""Scores against autograd one row at a time, plain Python, and forwards written out by hand."""

from __future__ import annotations

import copy
import math
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from killed import seeded
from rowprop.history import ReducibleLoss, holdout_losses
from rowprop.scoring import Downscaled, entropy, gradient_norm, logits_of, margin, per_row_mean, score_without_graph
from rowprop.selection import Context, PercentileSampling, PerClass, TopK
from sentences import refused


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def classes(count: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(count, shape, generator=seeded(seed))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 4)).double()


def class_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


BATCH = randn(16, 5), classes(4, 16)


PLACES = {  # values, and a mask of what counts in them
    "tokens, padding": (randn(4, 6), torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [0] * 5 + [1], [0] * 6])),
    "pixels, ignored ones": (randn(4, 3, 5), classes(2, 4, 3, 5).bool()),
    "several targets, one mask for all of them": (randn(4, 2, 3, 5), classes(2, 4, 1, 3, 5)),
    "whole rows": (randn(4, 6), (classes(3, 4, 1) > 0)),
    "single": (randn(4), torch.tensor([True, False, True, True])),
    "not zero is all that is asked of a number": (randn(4, 3), torch.tensor([[1, -1, 0]] * 4)),
    "labels": (randn(4, 3), None),
    "maps": (randn(4, 2, 2), None),
    "plain": (randn(4), None),
}


@pytest.mark.parametrize(("values", "mask"), PLACES.values(), ids=PLACES)
def test_a_rows_loss_is_the_mean_of_what_counts_in_it(values, mask):
    # Red when: the mean is over all places (`.mean(within)`), a row without any divides by zero, or `mask > 0` counts.
    counts = torch.ones_like(values) if mask is None else mask.expand_as(values)
    expected = []
    for row in range(len(values)):
        pairs = zip(values[row].flatten().tolist(), counts[row].flatten().tolist(), strict=True)
        counted = [value for value, counts_here in pairs if counts_here]
        expected.append(sum(counted) / len(counted) if counted else 0.0)
    torch.testing.assert_close(per_row_mean(values, mask), torch.tensor(expected, dtype=torch.float64))


def test_what_does_not_count_has_neither_value_nor_gradient():
    # Red when: the mask is multiplied instead (NaN * 0 is NaN).
    values = torch.tensor([[1.0, torch.nan], [torch.inf, torch.nan]], requires_grad=True)
    losses = per_row_mean(values, torch.tensor([[1, 0], [0, 0]]))
    losses.sum().backward()
    assert losses.tolist() == [1.0, 0.0]
    assert values.grad is not None and values.grad.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_means_of_bfloat16_are_float32():
    # Red when: the sum keeps the dtype: 1 + 1/256 is not a bfloat16.
    values = torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16)
    for mask in (None, torch.ones(1, 2)):
        assert per_row_mean(values, mask).tolist() == [1.00390625]


def test_the_backward_of_a_masked_mean_stays_sliced():
    # Red when: per_row_mean indexes with the mask (`values[mask]`), which mixes the rows.
    model, tokens = nn.Embedding(11, 9).double(), classes(11, 8, 6)
    targets = torch.where(classes(3, 8, 6) > 0, classes(9, 8, 6, seed=2), -100)
    rows = torch.tensor([1, 4])
    grads = []
    for take in (lambda losses: losses[rows], lambda losses: rowprop.pick(losses, rows)):
        model.zero_grad()
        values = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
        with rowprop.watch() as report:
            take(per_row_mean(values, targets != -100)).mean().backward()
        grads.append(model.weight.grad.clone())
    assert not report.densified
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-15)


class Outputs(dict):
    """A mapping with attributes, as Hugging Face's model outputs are."""

    @property
    def logits(self):
        return self["logits"]


Detected = make_dataclass("Detected", ["loss", "scores"])  # with a name of its own for its logits
ONE, OTHER = torch.tensor(1.0), torch.zeros(2, 9)
OUTPUTS = {
    "tensor": lambda logits: logits,
    "object": lambda logits: SimpleNamespace(loss=ONE, logits=logits),
    "outputs": lambda logits: Outputs(hidden=OTHER, logits=logits),
    "mapping": lambda logits: {"hidden": OTHER, "logits": logits},
    "segmentation": lambda logits: {"out": logits, "aux": OTHER},
    "tuple": lambda logits: (ONE, logits, OTHER),
    "nested": lambda logits: [None, (logits, OTHER)],
    "loss and logits": lambda logits: {"loss": ONE, "logits": logits},
    "no logits": lambda logits: {"loss": ONE, "logits": None, "scores": logits},
    "dataclass": lambda logits: Detected(loss=ONE, scores=logits),
    "logits by head": lambda logits: {"logits": {"a": logits, "b": OTHER}},
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_logits_are_found(name):
    # Red when: the first tensor wins over "logits", a 0-d loss counts, or dataclasses are not looked into.
    logits = torch.ones(2, 3, requires_grad=True)
    assert logits_of(OUTPUTS[name](logits)) is logits


def one_by_one(loss, *leaves: Tensor) -> list[float]:
    """Norms, over all leaves together, of the gradients of the scalars ``loss(row)`` of six rows."""
    grads = [torch.autograd.grad(loss(row), leaves) for row in range(6)]
    return [torch.cat([grad.flatten() for grad in each]).norm().item() for each in grads]


def test_gradient_norm_is_autograds_row_by_row():
    # Red when: the one is not subtracted, or subtracted from the whole row.
    logits, targets = (3 * randn(6, 4)).requires_grad_(), classes(4, 6)
    shares = randn(6, 4, seed=3).exp()  # cross_entropy does not ask for a sum of 1
    for given in (targets, shares):
        expected = one_by_one(lambda row, given=given: F.cross_entropy(logits, given, reduction="none")[row], logits)
        found = gradient_norm(logits, given)
        assert found.tolist() == pytest.approx(expected, rel=1e-12) and not found.requires_grad


def test_gradient_norm_with_features_is_that_of_the_last_layer():
    # Red when: the bias is forgotten (no + 1).
    features, last, targets = randn(6, 5), nn.Linear(5, 4).double(), classes(4, 6)
    logits = last(features)
    expected = one_by_one(lambda row: F.cross_entropy(last(features)[row], targets[row]), *(last.weight, last.bias))
    assert gradient_norm(logits, targets, features).tolist() == pytest.approx(expected, rel=1e-12)


def test_gradient_norm_of_several_positions_is_their_mean_and_bounds_the_rows():
    # Red when: ignored positions are averaged in, or the norm is taken over the positions together.
    features, last = randn(6, 5, 7), nn.Linear(5, 4).double()
    targets = torch.where(classes(3, 6, 7, seed=2) > 0, classes(4, 6, 7), -100)
    targets[3] = -100
    logits = last(features.transpose(1, 2)).transpose(1, 2)
    for given in (None, features):
        found = gradient_norm(logits, targets, given)
        for row in range(6):
            counted = (targets[row] != -100).nonzero().squeeze(1)
            beside = None if given is None else given[row].T[counted]
            each = gradient_norm(logits[row].T[counted], targets[row][counted], beside)
            torch.testing.assert_close(found[row], each.mean() if len(counted) else found.new_zeros(()))

    def mean(row: int) -> Tensor:
        total = F.cross_entropy(last(features[row].T), targets[row], reduction="sum")
        return total / (targets[row] != -100).sum().clamp(min=1)

    exact = one_by_one(mean, last.weight, last.bias)
    assert (gradient_norm(logits, targets, features) >= torch.tensor(exact) - 1e-12).all()


def test_margin_and_entropy_are_their_definitions():
    # Red when: the right class stays among the others, or the sign is turned.
    logits, targets = 3 * randn(6, 4), classes(4, 6)
    targets = torch.where(torch.arange(6) < 3, logits.argmax(1), targets)
    for row, (values, target) in enumerate(zip(logits.tolist(), targets.tolist(), strict=True)):
        wrong = max(value for place, value in enumerate(values) if place != target)
        assert margin(logits, targets)[row].item() == pytest.approx(wrong - values[target])
        total = sum(map(math.exp, values))
        shares = [math.exp(value) / total for value in values]
        assert entropy(logits)[row].item() == pytest.approx(-sum(share * math.log(share) for share in shares))
    assert ((margin(logits, targets) > 0) == (logits.argmax(1) != targets)).all()
    assert 0 < (margin(logits, targets) > 0).sum() < 6


def test_margin_and_entropy_leave_ignored_positions_out():
    # Red when: the mask is not handed on.
    logits, targets = randn(3, 4, 5), classes(4, 3, 5)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1] * 5, [0] * 5]).bool()
    ignored = torch.where(mask, targets, 255)
    for found, alone in (
        (margin(logits, ignored, ignore_index=255), lambda row: margin(logits[row].T, targets[row])),
        (entropy(logits, mask), lambda row: entropy(logits[row].T)),
    ):
        expected = [alone(row)[mask[row]].mean() if mask[row].any() else torch.tensor(0.0) for row in range(3)]
        torch.testing.assert_close(found, torch.stack([value.double() for value in expected]))


def test_scores_of_logits_hold_in_low_precision_and_at_the_ends():
    # Red when: the softmax stays in bfloat16 (norms of rows all but learnt are off by half), or log(0) * 0 is NaN.
    logits = torch.tensor([[10.0, 0.0, -torch.inf], [0.0, 0.0, -torch.inf]], dtype=torch.bfloat16)
    targets = torch.tensor([0, 0])
    wrong = 1 / (1 + math.exp(10))
    assert gradient_norm(logits, targets).tolist() == pytest.approx([math.sqrt(2) * wrong, math.sqrt(0.5)], rel=2e-3)
    assert margin(logits, targets).tolist() == [-10, 0]
    assert entropy(logits).tolist() == pytest.approx([wrong * 10 + wrong, math.log(2)], rel=2e-3)


LOGITS, CLASSES, NINE = torch.ones(2, 3), torch.tensor([0, 1]), torch.ones(3, 3)
REFUSED = [
    (lambda: per_row_mean(ONE), "shape () and dtype torch.float32 but a floating loss ... reduction"),
    (lambda: per_row_mean(torch.arange(3)), "dtype torch.int64 but a floating loss of shape"),
    (lambda: per_row_mean(LOGITS, torch.ones(2)), "a mask of shape (2,) for values of shape (2, 3)"),
    (lambda: per_row_mean(LOGITS, NINE), "a mask of shape (3, 3) for values of shape (2, 3)"),
    *[
        (lambda outputs=outputs: logits_of(outputs), f"a {type(outputs).__name__} in which no logits were found")
        for outputs in ({}, "text", (ONE,), None)
    ],
    (lambda: gradient_norm(torch.ones(2, 5, 3), torch.ones(2, 5).long()), "shape (2, 3) was needed; ... transpose"),
    (lambda: gradient_norm(LOGITS, torch.ones(2)), "targets of shape (2,) ... shape (2, 3) was"),
    (lambda: gradient_norm(LOGITS, CLASSES, NINE), "shape (2, D) was"),
    (lambda: gradient_norm(torch.ones(2), CLASSES), "floating ones of shape ... were needed"),
    (lambda: gradient_norm(LOGITS, torch.tensor([0, 3])), "got the class 3 but classes 0 to 2 were needed"),
    (lambda: margin(LOGITS, LOGITS), "for logits of shape (2, 3) but shape (2,) was"),
    (lambda: margin(torch.ones(2, 1), CLASSES), "at least two classes were needed"),
    (lambda: margin(LOGITS, torch.tensor([0, -1])), "the class -1 but classes 0 to 2 were needed, or ignore"),
    (lambda: entropy({"logits": 1}), "entropy got logits={'logits': 1}, a dict, but a tensor was needed; of a model's"),
    (lambda: entropy(LOGITS.long()), "dtype torch.int64 but floating ones of shape"),
    *[(lambda scale=scale: Downscaled(class_losses, scale), "a fraction in (0, 1)") for scale in (0.0, 1.0, -1.0)],
    (lambda: Downscaled("loss"), "Downscaled got function='loss', a str, but a function was needed that takes the"),
    (lambda: Downscaled(class_losses)(mlp(), BATCH), "without a floating tensor of shape"),
    *[
        (lambda image=image: Downscaled(class_losses)(mlp(), (image,)), "without a floating tensor of shape")
        for image in (torch.zeros(4, 3, 0, 8), torch.zeros(4, 3, 8, 8).to_sparse())
    ],
    (
        lambda: rowprop.SelectiveBackprop(mlp(), lambda *_: torch.ones(16).to_sparse(), TopK(0.5))(BATCH),
        "losses_fn returned a tensor of shape (16,) and dtype torch.float32 that is sparse but ... call to_dense()",
    ),
    (lambda: score_without_graph("loss", mlp(), BATCH), "got function='loss', a str, but a function of the model and"),
    (lambda: ReducibleLoss(OTHER, TopK(0.5)), "ReducibleLoss got selector=<tensor of ... , a Tensor, but a selector"),
    (lambda: holdout_losses(mlp(), class_losses, []), "a loader without batches"),
    (lambda: holdout_losses(mlp(), class_losses, [(torch.arange(3), BATCH)]), "got 3 ids for the losses of 16 rows"),
    (lambda: holdout_losses(mlp(), class_losses, [([0] * 16, BATCH)]), "got a list but the rows' ids were needed"),
    (lambda: holdout_losses(mlp(), class_losses, [(torch.arange(-1, 15), BATCH)]), "or one below 0, but each row's"),
    (lambda: holdout_losses(mlp(), class_losses, [BATCH[0]]), "got a Tensor from the loader but pairs of ids and a b"),
    (lambda: holdout_losses(mlp(), class_losses, 5), "holdout_losses got a int but a loader of ids and batches was"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
@pytest.mark.usefixtures("as_host")  # a device's values are not looked at: torch refuses them
def test_what_does_not_fit_is_refused_in_a_sentence(call, words):
    with refused(words):
        call()


def test_holdout_losses_are_by_id_and_leave_the_model_as_found():
    # Red when: the model runs as it is, in train mode, or a shuffling loader's draws are kept.
    model, rows, targets = mlp(), randn(10, 5), classes(4, 10)
    class_losses(model, (rows, targets))  # statistics of its own
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    data = [(row, (rows[row], targets[row])) for row in range(10) if row != 6]
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    found = holdout_losses(model, class_losses, loader)
    expected = class_losses(copy.deepcopy(model).eval(), (rows, targets)).detach()
    assert found[6].isnan()
    kept = torch.tensor([row for row in range(10) if row != 6])
    torch.testing.assert_close(found[kept], expected[kept])
    assert torch.equal(torch.get_rng_state(), rng) and all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_reducible_losses_are_looked_up_by_id_and_unknown_ones_refused():
    # Red when: rows are looked up by their place in the batch, or a negative id counts from the end.
    seen = []
    inside = lambda scores, context: seen.append(scores.tolist()) or TopK(0.5)(scores)  # noqa: E731
    selector = ReducibleLoss(inside, torch.tensor([0.5, torch.nan, 2.0]))
    assert selector(torch.tensor([3.0, 3.0]), Context(ids=torch.tensor([2, 0]))).rows.tolist() == [1]
    assert seen == [[1.0, 2.5]]
    for ids, first in (([2, 1], 1), ([3, 0], 3), ([-1, 0], -1)):
        with refused(f"no irreducible loss of 1 of 2 rows (the first has id {first})"):
            selector(torch.ones(2), Context(ids=torch.tensor(ids)))
    with refused("a call without ids was made but ReducibleLoss needs ids, int64 of shape"):
        selector(torch.ones(2))
    assert len(seen) == 1


def test_holdout_losses_of_tokens_are_by_id_and_place():
    # Red when: a shorter batch is stretched over the table, or an id that came before keeps losses behind its end.
    losses_fn = lambda model, batch: batch.square()  # noqa: E731
    sixth, fourth, nan = torch.arange(6.0).view(2, 3), torch.arange(4.0).view(2, 2), math.nan
    loader = [(torch.tensor([3, 0]), sixth), (torch.tensor([3, 1]), fourth)]
    found = holdout_losses(nn.Identity(), losses_fn, loader, unit="token")
    expected = torch.tensor([[9.0, 16, 25], [4, 9, nan], [nan, nan, nan], [0, 1, nan]])
    torch.testing.assert_close(found, expected, equal_nan=True)
    with refused("shape (2,) and dtype torch.float32 but the losses of each row's tokens"):
        holdout_losses(nn.Identity(), lambda model, batch: batch.sum(1), loader, unit="token")
    with refused("holdout_losses got unit='tokens' but one of row, token was needed"):
        holdout_losses(nn.Identity(), losses_fn, loader, unit="tokens")


def test_reducible_losses_of_tokens_are_looked_up_by_id_and_place():
    # Red when: the place of a token in its row is left out, or is counted in the batch.
    selector = ReducibleLoss(TopK(0.3), torch.tensor([[0.0, 1.0], [2.0, math.nan], [5.0, 4.0]]))
    ids, positions = torch.tensor([2, 2, 0, 0]), torch.tensor([0, 1, 0, 1])
    context = Context(ids=ids, positions=positions)
    assert selector(torch.tensor([5.5, 4.0, 0.0, 1.9]), context).rows.tolist() == [0, 3]
    for id, position in ((1, 1), (0, 2), (3, 0), (2, -1)):
        context = Context(ids=torch.tensor([0, id]), positions=torch.tensor([0, position]))
        with refused(f"no irreducible loss of 1 of 2 tokens (the first has id {id}, position {position})"):
            selector(torch.ones(2), context)
    with refused("without positions was made but ReducibleLoss with losses of tokens needs"):
        selector(torch.ones(2), Context(ids=torch.tensor([0, 1])))


def test_reducible_losses_reach_a_selector_inside_with_its_context_and_its_memory():
    # Red when: the selector inside is asked without the context, or its state is not handed on.
    losses, irreducible = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([5.0, 0.0, 0.0, 2.0])
    context = Context(ids=torch.arange(4), classes=torch.tensor([0, 1, 0, 1]))
    assert ReducibleLoss(PerClass(TopK(0.5)), irreducible)(losses, context).rows.tolist() == [1, 2]
    remembering, other = (ReducibleLoss(PercentileSampling(), irreducible) for _ in range(2))
    remembering(losses, context)
    other.load_state_dict(remembering.state_dict())
    assert other.state_dict()["recent"].tolist() == [0.0, 4.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("shape", "size", "mode"),
    [
        ((6, 3, 7), (3,), "linear"),
        ((6, 3, 9), (4,), "linear"),
        ((6, 3, 9, 8), (4, 4), "bilinear"),
        ((6, 2, 5, 4, 1), (2, 2, 1), "trilinear"),
    ],
)
def test_scores_of_a_scaled_batch_are_the_losses_of_the_inputs_made_smaller(shape, size, mode):
    # Red when: the targets are scaled too, the sides rounded up or to the nearest, or containers unknown to torch are
    # passed on whole.
    dims = len(size)
    model = nn.Sequential([nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](shape[1], 4, 1), nn.Flatten(2)).double()
    batch = {"boxes": randn(6, 2, 4) if dims > 1 else classes(9, 6, 2, 4), "x": randn(*shape), "y": classes(4, 6)}

    def losses(model, batch):
        assert batch["boxes"].shape == (6, 2, 4)
        return F.cross_entropy(model(batch["x"]).mean(2), batch["y"], reduction="none")

    small = batch | {"x": F.interpolate(batch["x"], size, mode=mode, align_corners=False)}
    torch.testing.assert_close(Downscaled(losses)(model, batch), losses(model, small))
    held = make_dataclass("Held", batch)(**batch)
    torch.testing.assert_close(
        Downscaled(lambda model, batch: losses(model, vars(batch)))(model, held), losses(model, small)
    )
    assert vars(held) == batch
