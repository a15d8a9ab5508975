"""`rowprop compare --data wordnet --model gpt`: tokens are kept as is said, and judged by their perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare_cases import ended
from rowprop_lab import data as data_module
from rowprop_lab import models
from rowprop_lab import train as train_module
from rowprop_lab.data import Dataset, load_data
from rowprop_lab.models import GPT
from rowprop_lab.results import Run
from rowprop_lab.settings import Method, Settings
from rowprop_lab.train import learning_rate, train

BATCH, EPOCHS = 8, 2


@pytest.fixture(scope="module")
def data(glosses: str) -> Dataset:
    return load_data("wordnet", Path(glosses), unit="token")


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """AdamW divides a gradient by its size: a rounding error of float32 becomes a step, one of float64 does not."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train_one(data: Dataset, label: str) -> tuple[Run, GPT]:
    """Train one method; return the run and its model."""
    chosen = Settings(data="wordnet", model="gpt", methods=label, batch_rows=BATCH, epochs=EPOCHS)
    built: list[GPT] = []
    build = train_module.build_model
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_module, "build_model", lambda *given: built.append(build(*given)) or built[-1])
        run = ended(train(chosen, data, chosen.parsed_methods[0], 0, lambda *_: None))
    return run, built[0]  # holdout models are built after it


def counts(data: Dataset, y: Tensor) -> Tensor:
    """Which tokens count, from the words alone: those up to the last end of a gloss."""
    end = len(data.class_names) - 1
    last = [max(place for place, word in enumerate(row) if word == end) for row in y.tolist()]
    return torch.arange(y.shape[1]) <= torch.tensor(last)[:, None]


def all_of_them(losses: Tensor, counted: Tensor, rows: Tensor) -> Tensor:
    return counted


@cache  # the same truth for several engines
def loop_by_hand(data: Dataset, choose, *, cut: bool = False) -> tuple[GPT, int, int]:
    """An ordinary loop, written without rowprop; returns the model, and how many tokens were seen and kept."""
    torch.manual_seed(0)
    model = GPT(len(data.class_names), len(data.class_names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    generator, seen, kept = torch.Generator().manual_seed(0), 0, 0
    batches = len(data.train_y) // BATCH
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data.train_y), generator=generator)
        for index in range(batches):
            rows = order[BATCH * index : BATCH * (index + 1)]
            x, y = data.train_x[rows], data.train_y[rows]
            losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
            counted = counts(data, y)
            mask = choose(losses.detach(), counted, rows)
            if cut:
                losses = F.cross_entropy(cut_forward(model, x, mask).transpose(1, 2), y, reduction="none")
            seen, kept = seen + int(counted.sum()), kept + int(mask.sum())
            for group in optimizer.param_groups:
                group["lr"] = learning_rate((batches * epoch + index) / (batches * EPOCHS), 0.003)
            optimizer.zero_grad()
            losses[mask].mean().backward()
            optimizer.step()
    return model, seen, kept


def cut_forward(model: GPT, x: Tensor, kept: Tensor) -> Tensor:
    """The model's logits, with keys and values detached where a token is not kept: the meaning of cut."""
    attend, mask = F.scaled_dot_product_attention, kept[:, None, :, None]

    def attend_cut(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        key, value = (torch.where(mask, part, part.detach()) for part in (key, value))
        return attend(query, key, value, is_causal=is_causal)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models.F, "scaled_dot_product_attention", attend_cut)
        return model(x)


def hardest_half(losses: Tensor, counted: Tensor, rows: Tensor) -> Tensor:
    """The mask of the half of the tokens that count with the largest losses."""
    hardest = losses.masked_fill(~counted, -torch.inf).flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros_like(counted)
    mask.view(-1)[hardest[: math.ceil(0.5 * int(counted.sum()))]] = True
    return mask


def perplexity_by_hand(model: GPT, data: Dataset) -> tuple[float, float]:
    """Perplexity and accuracy on the test rows, one row after the other, in float64."""
    lost, right = [], []
    model.eval()
    with torch.no_grad():
        for x, y, counted in zip(data.test_x, data.test_y, counts(data, data.test_y), strict=True):
            chances = model(x[None])[0].double().log_softmax(1)
            lost += [-float(chances[place, word]) for place, word in enumerate(y.tolist()) if counted[place]]
            right += [int(chances[place].argmax()) == word for place, word in enumerate(y.tolist()) if counted[place]]
    return math.exp(sum(lost) / len(lost)), sum(right) / len(right)


def assert_same(model: nn.Module, expected: nn.Module, *, differs: bool = False) -> None:
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    off = max(float((a - b).abs().max()) for a, b in pairs)
    assert (off > 1e-3) if differs else (off < 1e-6), off


def test_glosses_stand_whole_and_side_by_side():
    # Red when: a gloss may begin in one row and end in the next; a row with room is passed over; a row begins with its
    # first word; a long gloss loses its end.
    numbers = {word: place for place, word in enumerate("abcdefg", start=2)}
    texts = ["a b", "a b c d e f g", "c", "unheard a", "d e"]
    assert data_module.packed(texts, numbers, end=9, num_tokens=6).tolist() == [
        [9, 2, 3, 9, 4, 9, 0],  # a b, c; then 1 token has no room for a gloss and its end
        [9, 2, 3, 4, 5, 6, 9],  # the long one, cut
        [9, 1, 2, 9, 5, 6, 9],  # unheard a, d e, which fill it
    ]


def test_tokens_are_followed_by_those_that_they_predict(data: Dataset):
    assert (data.unit, data.train_x.dtype, data.train_x.shape[1]) == ("token", torch.int64, 64)
    assert torch.equal(data.train_x[:, 1:], data.train_y[:, :-1])
    assert data.num_inputs == len(data.class_names) == int(max(data.train_y.max(), data.test_y.max())) + 1
    assert torch.equal(data.counted(data.test_y), counts(data, data.test_y))
    assert not bool(data.counted(data.train_y).all())  # some tokens are padding, or the tests below prove nothing


@pytest.mark.skipif(not data_module.DEBIAN_WORDNET.is_dir(), reason="needs Debian's wordnet-base")
def test_the_glosses_of_wordnet_fill_their_rows():
    # Red when: a gloss is tried in the last row alone (87 % count).
    found = load_data("wordnet", unit="token")
    assert (len(found.train_y), len(found.test_y), len(found.class_names)) == (800, 250, 4000)
    assert found.counted(found.train_y).float().mean() > 0.97
    assert (found.train_y == data_module.UNKNOWN).float().mean() < 0.2


def test_full_is_an_ordinary_loop_and_its_perplexity_is_that_of_the_test_tokens(data: Dataset):
    # Red when: padding counts, in the loss or in the perplexity; the mean is over rows; the rate is a step late.
    run, model = train_one(data, "full")
    expected, seen, _ = loop_by_hand(data, all_of_them)
    assert_same(model, expected)
    assert run.rows_seen == run.rows_backpropagated == seen
    assert (run.perplexity, run.accuracy) == pytest.approx(perplexity_by_hand(model, data), rel=1e-5)
    assert [point.kept for point in run.curve] == [1.0, 1.0]
    assert run.curve[-1].perplexity == run.perplexity < 0.8 * len(data.class_names)


@pytest.mark.parametrize("engine", ["sliced", "masked", "cut"])
def test_ohem_keeps_the_hardest_tokens_and_trains_as_by_hand(engine: str, data: Dataset):
    # Red when: padding is among the tokens to choose from; cut is sliced, or detaches at the kept tokens.
    run, model = train_one(data, f"ohem@{engine}")
    expected, seen, kept = loop_by_hand(data, hardest_half, cut=engine == "cut")
    assert_same(model, expected)
    assert (run.engine, run.rows_seen, run.rows_backpropagated) == (engine, seen, kept)
    assert not run.chosen  # tokens have no gallery
    assert [point.kept for point in run.curve] == pytest.approx([0.5, 0.5], abs=0.01)
    if engine == "cut":  # a negative control: cut is not exact
        assert_same(model, loop_by_hand(data, hardest_half)[0], differs=True)


def test_rho1_keeps_the_tokens_that_models_of_other_glosses_find_easier(data: Dataset, monkeypatch: pytest.MonkeyPatch):
    # Red when: each model judges its own half; its losses stand in other rows; they are trained for all epochs.
    given, trained = [], []
    made, steps = Method.made, train_module.Stepper.steps
    monkeypatch.setattr(train_module.Stepper, "steps", lambda *all: trained.append(all) or steps(*all))
    monkeypatch.setattr(Method, "made", lambda *all, **more: given.append(all[3]["irreducible"]) or made(*all, **more))
    run, model = train_one(data, "rho1")
    reference = given[-1]
    assert reference.shape == data.train_y.shape
    (first, first_rows, _, epochs, *_), (second, second_rows, *_), (_, all_rows, *_) = trained
    assert epochs == 1  # half of the epochs, on half of the rows
    assert sorted([*first_rows.tolist(), *second_rows.tolist()]) == all_rows.tolist()
    for judge, rows in ((first, second_rows), (second, first_rows)):
        logits = judge.model(data.train_x[rows]).detach()
        losses = F.cross_entropy(logits.transpose(1, 2), data.train_y[rows], reduction="none")
        torch.testing.assert_close(reference[rows], losses, rtol=1e-4, atol=1e-4)

    def most_excess(losses: Tensor, counted: Tensor, rows: Tensor) -> Tensor:
        return hardest_half(losses - reference[rows], counted, rows)

    expected, _, kept = loop_by_hand(data, most_excess)
    assert_same(model, expected)
    assert run.rows_backpropagated == kept and not run.chosen
    spent = first.train_s + second.train_s
    assert spent <= run.phases_s["score"] <= run.train_s


def test_random_tokens_are_half_of_those_that_count(data: Dataset):
    # Red when: half of all positions are drawn, padding included.
    run, _ = train_one(data, "random")
    counted = counts(data, data.train_y)
    least = EPOCHS * (int(counted.sum()) - BATCH * 64) // 2  # the remainder of an epoch is left out
    assert least <= run.rows_backpropagated <= EPOCHS * int(counted.sum()) // 2 + 10
    assert run.rows_seen == pytest.approx(2 * run.rows_backpropagated, abs=10)


def test_a_method_of_ones_own_chooses_among_tokens(data: Dataset):
    own, named = (train_one(data, label)[0] for label in ("compare_cases:own_top@cut", "ohem@cut"))
    assert (own.perplexity, own.rows_backpropagated) == (named.perplexity, named.rows_backpropagated)
