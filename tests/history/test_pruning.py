"""The pruning sampler draws by InfoBatch's rule, fairly, and goes on in the middle of an epoch."""

from __future__ import annotations

import math
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import rowprop
from killed import EPOCHS, ROWS, Training, assert_nothing_was_lost, killed_and_resumed, seeded
from rowprop.errors import InvalidInput
from rowprop.history import LossHistory, PruningSampler, StaleScorer, WithIds
from rowprop.selection import RandomRows, TopK

TWO_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")


def remembering(losses: Tensor, size: int | None = None) -> LossHistory:
    history = LossHistory(size)
    history.update(torch.arange(len(losses)), losses)
    return history


@pytest.mark.parametrize("prune", [0, 0.1, 0.3, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("size", [None, 50])
def test_easy_rows_are_thinned_and_the_rest_of_them_stand_for_all(prune, size):
    # Red when: `<=` for `<` (a row at the mean is then easy), the mean is over all rows, the factor is 1 / (1 - prune),
    # rows without a loss are easy, or the count is rounded down.
    losses = torch.tensor([1.0, 2.0, 2.0, 3.0, 0.0, 4.0, 2.0, 1.0, 3.0, 2.0] * 5)  # their mean is one of them
    losses[[3, 7]], losses[1] = math.nan, math.inf
    values = losses.tolist()
    mean = sum(Fraction(x) for x in values if math.isfinite(x)) / int(losses.isfinite().sum())
    assert mean == 2
    easy = {row for row, x in enumerate(values) if math.isfinite(x) and Fraction(x) < mean}
    count = max(1, math.ceil((1 - Fraction(str(prune))) * len(easy)))

    history = remembering(losses, size)
    for seed in range(5):
        sampler = PruningSampler(history, num_rows=50, epochs=10, prune=prune, seed=seed)
        rows = list(sampler)
        weights = history.weights_of(torch.arange(50))
        assert len(sampler) == len(rows) == len(set(rows)) == 50 - sampler.num_pruned
        assert set(range(50)) - set(rows) <= easy
        assert len(easy & set(rows)) == count
        for row in range(50):
            expected = 0 if row not in rows else len(easy) / count if row in easy else 1
            assert weights[row].item() == pytest.approx(expected, rel=1e-6), row
        assert weights.double().sum().item() == pytest.approx(50, rel=1e-6)


def test_rows_of_one_loss_and_rows_never_seen_all_come():
    # Red when: rounding puts equal losses below their mean (a mean in float32), or no loss at all is pruned.
    for losses in (torch.full((1000,), 0.1), torch.full((9,), math.nan)):
        sampler = PruningSampler(remembering(losses), num_rows=len(losses), epochs=4)
        assert sorted(sampler) == list(range(len(losses))) and sampler.num_pruned == 0


@pytest.mark.parametrize(
    ("epochs", "full_after", "pruned"),
    # Original: pruned while epoch + 1 <= epochs * delta. With 0.7 * 10 and 0.29 * 100 floats are beside the number.
    [
        *[(10, 0.875, 8), (200, 0.875, 175), (8, 0.875, 7), (10, 0.7, 7)],
        *[(100, 0.29, 29), (1, 0.875, 0), (3, 1, 3), (3, 0, 0)],
    ],
)
def test_the_last_epochs_are_full_and_count_plainly(epochs, full_after, pruned):
    # Red when: the comparison is with the unrounded product (10 * 0.875: one epoch more), or the factors stay on.
    history = remembering(torch.rand(20, generator=seeded(3)))
    sampler = PruningSampler(history, num_rows=20, epochs=epochs, full_after=full_after)
    lengths, weights = [], []
    for _ in range(epochs):
        lengths.append(len(list(sampler)))
        weights.append(history.weights_of(torch.arange(20)))
    assert [length < 20 for length in lengths] == [True] * pruned + [False] * (epochs - pruned)
    assert all(bool((weight == 1).all()) == (length == 20) for weight, length in zip(weights, lengths, strict=True))


def test_epochs_and_seeds_differ_and_nothing_else_is_seeded_or_used_up():
    # Red when: the generator is seeded by the seed alone, or torch's own is drawn from.
    history = remembering(torch.rand(40, generator=seeded(3)))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (PruningSampler(history, num_rows=40, epochs=9, seed=seed) for seed in (1, 1, 2))
    orders = [list(first), list(first), list(other)]
    assert torch.equal(torch.get_rng_state(), state)
    assert orders[0] == list(again) and len({tuple(order) for order in orders}) == 3
    straight = PruningSampler(history, num_rows=40, epochs=9, seed=1, shuffle=False)
    assert sorted(orders[0]) == list(straight)


DRAWS = 1_000


def standard_errors(draws: Tensor, truth: Tensor) -> float:
    """Largest distance of the mean of ``draws`` (D, P) from ``truth`` (P,), in standard errors."""
    error = draws.std(0) / math.sqrt(len(draws))
    return float(((draws.mean(0) - truth).abs() / error.clamp(min=1e-12)).max())


def test_over_many_draws_pruning_and_picking_multiply_and_stay_without_bias():
    # Red when: the factor is left at 1 (the biased twins below), the same rows are drawn in every epoch, or the step
    # does not multiply the history's factors into the selection's weights.
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    data = torch.randn(40, 4).double(), torch.randn(40).double()

    def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).squeeze(1) - batch[1]).square()

    losses = losses_fn(model, data)
    grads = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for loss in losses]
    rows_grads = torch.stack([torch.cat([g.flatten() for g in of_row]) for of_row in grads])
    truth, losses = rows_grads.mean(0), losses.detach()
    pruned, picked, unweighted = (list[Tensor]() for _ in range(3))
    for seed in range(DRAWS):
        history = remembering(losses)
        ids = torch.tensor(list(PruningSampler(history, num_rows=40, epochs=1, full_after=1, prune=0.6, seed=seed)))
        pruned.append(history.weights_of(torch.arange(40)).double())
        options = {"history": history, "engine": "masked", "generator": seeded(seed)}
        selective = rowprop.SelectiveBackprop(model, losses_fn, RandomRows(0.5), **options)
        selection = selective(tuple(of[ids] for of in data), ids=ids)[1].selection
        assert selection.num_kept == math.ceil(len(ids) / 2) and selection.num_rows == len(ids)
        factors = history.weights_of(ids)[selection.rows]
        torch.testing.assert_close(selection.weights, (factors / selection.num_kept).double())
        chosen = rows_grads[ids[selection.rows]]
        picked.append(selection.weights @ chosen * len(ids) / 40)
        unweighted.append(chosen.mean(0))
        assert history.count_of(ids).sum() == selection.num_kept + len(ids)
    weights = torch.stack(pruned)
    kept = (weights > 0).double()
    assert standard_errors(weights @ rows_grads / 40, truth) < 4
    assert standard_errors(kept @ rows_grads / kept.sum(1, keepdim=True), truth) > 8
    assert standard_errors(torch.stack(picked), truth) < 4
    assert standard_errors(torch.stack(unweighted), truth) > 8
    easy = losses < losses.mean()
    expected = math.ceil(0.4 * int(easy.sum())) / int(easy.sum())
    error = math.sqrt(expected * (1 - expected) / DRAWS)
    assert (kept[:, easy].mean(0) - expected).abs().max() < 4 * error  # every easy row has the same chance
    assert (kept[:, ~easy] == 1).all()


@TWO_WORKERS
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_yields_what_the_sampler_draws(workers, drop_last):
    # Red when: each epoch yields the rows of the first, len() belongs to another epoch, or one begins before a row is
    # asked for: without batches and with workers torch makes two iterators.
    losses = torch.rand(30, generator=seeded(2))
    samplers = [PruningSampler(remembering(losses), num_rows=30, epochs=4, seed=3) for _ in range(4)]
    data = WithIds(TensorDataset(losses))
    loader = DataLoader(data, 4, sampler=samplers[0], num_workers=workers, drop_last=drop_last)
    grouped = DataLoader(data, batch_sampler=BatchSampler(samplers[1], 4, drop_last), num_workers=workers)
    single = DataLoader(data, None, sampler=samplers[3], num_workers=workers)
    for epoch in range(4):
        expected = list(iter(samplers[2]))
        assert [row for row, _ in single] == expected
        whole = len(expected) // 4 * 4 if drop_last else len(expected)
        for each, sampler in ((loader, samplers[0]), (grouped, samplers[1])):
            found = [(ids, rows) for ids, (rows,) in each]
            assert torch.cat([ids for ids, _ in found]).tolist() == expected[:whole]
            assert torch.equal(torch.cat([rows for _, rows in found]), losses[expected[:whole]])
            assert len(sampler) == len(expected) and len(each) == len(found)
            assert (sampler.epoch, sampler.next_epoch) == (epoch, epoch + 1)


def test_progress_is_known_before_and_between_the_epochs_too():
    # Red when: the first epoch counts as done before it begins, or an ended epoch as not begun.
    sampler, after = (PruningSampler(remembering(torch.rand(30)), num_rows=30, epochs=4) for _ in range(2))
    assert sampler.progress(0) == 0
    list(sampler)
    half = len(sampler) // 2
    found = [sampler.progress(rows) for rows in (0, half, len(sampler))]
    assert found == pytest.approx([0, half / len(sampler) / 4, 0.25])
    after.load_state_dict(sampler.state_dict())
    assert after.progress(len(sampler)) == 0.25
    for _ in range(5):
        list(sampler)
    assert sampler.progress(3) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_epoch_of_whole_batches_has_nothing_left_to_resume(replicas):
    # Red when: the rows of the dropped last batch are taken for the rest of the epoch.
    losses = torch.rand(31, generator=seeded(2))
    for rank in range(replicas):
        options = dict(num_rows=31, epochs=4, num_replicas=replicas, rank=rank)
        plain, whole, after = (PruningSampler(remembering(losses), multiple_of=k, **options) for k in (1, 4, 4))
        loader = DataLoader(WithIds(TensorDataset(losses)), 4, sampler=whole, drop_last=True)
        for epoch in range(4):
            trained = [row for ids, _ in loader for row in ids.tolist()]
            assert len(trained) % 4 == 0 and trained == list(plain)[: len(trained)]
            assert len(whole) == len(trained) > len(plain) - 4
            after.load_state_dict(whole.state_dict(len(trained)))
            assert after.next_epoch == epoch + 1 and whole.progress(len(trained)) == (epoch + 1) / 4
            after.load_state_dict(whole.state_dict(4))
            assert after.next_epoch == epoch and list(after) == trained[4:]


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_ranks_share_one_draw_evenly(replicas):
    # Red when: ranks draw with generators of their own, or are given blocks of different lengths.
    losses = torch.rand(31, generator=seeded(2))
    alone = list(PruningSampler(remembering(losses), num_rows=31, epochs=4))
    shares = [
        list(PruningSampler(remembering(losses), num_rows=31, epochs=4, num_replicas=replicas, rank=rank))
        for rank in range(replicas)
    ]
    assert {len(share) for share in shares} == {math.ceil(len(alone) / replicas)}
    together = [row for rows in zip(*shares, strict=True) for row in rows]
    assert together == alone + alone[: len(together) - len(alone)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("trained", [0, 3, 8])
def test_an_epoch_goes_on_where_training_was(replicas, trained):
    # Red when: fetched rows count instead of trained ones, the rest is drawn anew, another row fills up after the
    # resume, or the state of a rank is good for that rank alone.
    def sampler(rank: int) -> PruningSampler:
        history = remembering(torch.rand(25, generator=seeded(2)))
        return PruningSampler(history, num_rows=25, epochs=5, num_replicas=replicas, rank=rank)

    before = [sampler(rank) for rank in range(replicas)]
    for each in before:
        list(each)
    wholes = [list(each) for each in before]  # fetched to the end
    state = before[0].state_dict(trained)
    for rank in range(replicas):
        after = sampler(rank)
        after.history.load_state_dict(before[rank].history.state_dict())
        after.load_state_dict(state)
        after.history.update(torch.arange(25), torch.rand(25, generator=seeded(8)))  # training went on
        before[rank].history.update(torch.arange(25), torch.rand(25, generator=seeded(8)))
        assert (after.epoch, after.next_epoch, len(after)) == (1, 1, len(wholes[rank]) - trained)
        again = after.state_dict(trained)  # at once: the same state
        assert list(after) == wholes[rank][trained:]
        assert again["trained"] == trained and torch.equal(again["order"], state["order"])
        with pytest.raises(InvalidInput, match=f"between {trained} and ") if trained else nullcontext():
            after.state_dict(max(0, trained - 1))  # they were trained before the resume
        further = after.state_dict(trained + 1)
        assert torch.equal(further["order"], state["order"][replicas:])
        assert after.state_dict()["order"] is None
        factors = [each.history.weights_of(torch.arange(25)) for each in (after, before[rank])]
        assert torch.equal(*factors)
        assert list(after) == list(before[rank]) and after.epoch == 2  # and the next epoch is the same again


def test_between_epochs_a_state_begins_the_next():
    # Red when: a finished epoch is resumed as an empty one.
    history = remembering(torch.rand(25, generator=seeded(2)))
    first, second = (PruningSampler(history, num_rows=25, epochs=5) for _ in range(2))
    fresh = first.state_dict(0)
    orders = [list(first), list(first)]
    for state in (first.state_dict(), first.state_dict(len(orders[1]))):
        second.load_state_dict(state)
        assert (second.epoch, second.next_epoch) == (1, 2)
        assert second.state_dict(len(orders[1])) == state == second.state_dict()
    assert list(second) == list(first)
    second.load_state_dict(fresh)
    assert second.next_epoch == 0 and [list(second), list(second)] == orders


def pruned(model: nn.Module, losses_fn: Any) -> rowprop.SelectiveBackprop:
    """Prunes, scores by old losses, picks."""
    sampler = PruningSampler(LossHistory(ROWS), num_rows=ROWS, epochs=EPOCHS, seed=1)
    options = {"scorer": StaleScorer(losses_fn, 2), "history": sampler, "engine": "recompute"}
    return rowprop.SelectiveBackprop(model, losses_fn, TopK(0.5), **options)


@TWO_WORKERS
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_training_ends_as_if_it_had_not_been(workers: int, tmp_path: Path):
    # Red when: the sampler's state counts the fetched rows, weights or ages are not saved, the step counts from 0, or
    # progress takes the rest of a resumed epoch for a whole one.
    make = partial(Training, pruned, workers)
    whole = make()
    whole.train()
    for stop in (3, 6, 9):  # in the first epoch, about its end, in the second
        assert_nothing_was_lost(whole, *killed_and_resumed(make, stop, tmp_path / "state.pt"))
    clock = [step[-1] for step in whole.trace]
    assert clock == sorted(set(clock)) and clock[-1] == 1 and {1 / 3, 2 / 3} <= set(clock)
    assert {weight > 0.4 for step in whole.trace for weight in step[2]} == {False, True}  # some stand in


@settings(max_examples=30)
@given(
    num_rows=st.integers(20, 40),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    ranks=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 2)]),
    ahead=st.booleans(),
    times=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    stop=st.integers(1, 60),
)
def test_rows_that_are_not_yet_passed_come_once_and_in_order_after_a_resume(
    num_rows, size, drop_last, ranks, ahead, times, stop
):
    # As of SAM and LBFGS, which call the step several times for a batch. Red when: the rows of each call are added up,
    # those of each batch are added up once, the mark is that of the last call, the fetched rows count, or the places
    # are those of all ranks.
    losses = torch.rand(num_rows, generator=seeded(num_rows))

    def made():
        shares = {"num_replicas": ranks[0], "rank": ranks[1], "multiple_of": size if drop_last else 1}
        sampler = PruningSampler(LossHistory(num_rows), num_rows=num_rows, epochs=3, **shares)
        options = {"history": sampler, "engine": "masked"}
        step = rowprop.SelectiveBackprop(nn.Identity(), lambda _, batch: batch, TopK(0.5), **options)
        loader = DataLoader(WithIds(TensorDataset(losses)), size, sampler=sampler, drop_last=drop_last)
        return step, loader

    def train(step, loader, stop):
        """The batches as they came: their epoch, their ids, and how often each was trained."""
        seen = []
        while step.sampler.next_epoch < 3:
            earlier = []
            for ids, (values,) in list(loader) if ahead else loader:
                epoch = step.sampler.epoch
                count = times[(epoch + int(ids[0])) % len(times)]
                for _ in range(count):
                    step(values.requires_grad_(), ids=ids)
                earlier += [(values, ids)] * (count > 0)
                if count == 3:  # and one of before once more
                    step(earlier[0][0].requires_grad_(), ids=earlier[0][1])
                seen.append((epoch, ids.tolist(), count))
                if len(seen) == stop:
                    return seen
        return seen

    whole = train(*made(), None)
    killed = made()
    seen = train(*killed, stop)
    assert seen == whole[: len(seen)]
    passed = len(seen)
    while passed and seen[passed - 1][::2] == (seen[-1][0], 0):  # those that no later batch of the epoch has passed
        passed -= 1
    resumed = made()
    resumed[0].load_state_dict(killed[0].state_dict())
    assert resumed[0].progress == killed[0].progress
    assert train(*resumed, None) == whole[passed:]
    assert killed[0].sampler.epoch == seen[-1][0]


def test_rows_that_are_not_of_the_epoch_count_nothing():
    # Red when: an id below 0 is a place from the end, one beyond the data is looked up, or a row that comes twice has
    # its last place.
    history = remembering(torch.rand(25, generator=seeded(2)))
    sampler = PruningSampler(history, num_rows=25, epochs=5, num_replicas=3)
    assert sampler.trained(torch.arange(25)) == 0  # no epoch runs
    list(sampler)
    own = list(sampler)
    left_out = (history.weights_of(torch.arange(25)) == 0).nonzero().squeeze(1)
    assert left_out.numel() > 0
    for ids in ([-1, -25, 25, 2**62], [], left_out.tolist()):
        assert sampler.trained(torch.tensor(ids, dtype=torch.int64)) == 0
    assert [sampler.trained(torch.tensor([99, row, own[0]])) for row in own] == list(range(1, len(own) + 1))

    alone = PruningSampler(history, num_rows=25, epochs=5)
    alone.load_state_dict(sampler.state_dict(0))
    order = list(alone)
    assert len(order) > len(set(order)) and alone.trained(torch.tensor(order[:1])) == 1
    sampler.load_state_dict(sampler.state_dict(2))
    assert [sampler.trained(torch.tensor(own[:end])) for end in range(1, 5)] == [2, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"epochs": 10**400}, "PruningSampler got epochs=1000.* but a whole number below 2..63 was needed"),
        ({"multiple_of": 100, "num_rows": 8, "epochs": 1}, "as short as 8 rows per rank, of which no multiple of 100"),
        ({"multiple_of": 6, "epochs": 8}, "multiple_of=6 but an epoch may be as short as 5 rows per rank, of which no"),
        ({"num_replicas": 2, "rank": 2}, "got rank=2 but num_replicas=2; ranks are numbered from 0"),
        ({"history": LossHistory(3)}, "got num_rows=9 but a history of num_rows=3; give both the number"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        PruningSampler(**({"history": LossHistory(), "num_rows": 9, "epochs": 2} | change))


BAD_STATES = [  # what is changed in a state, and a part of the sentence
    ({"num_rows": 8}, "a state with num_rows=8 but has num_rows=9"),
    *[({name: bad}, f"{name}={bad!r} but a whole") for name in ("begun", "trained") for bad in (-1, "a", 1.5, True)],
    ({"order": [1]}, "got order of the kind a list but a tensor of"),
    ({"order": torch.ones(2)}, "torch.float32 but a tensor of shape"),
    *[({"order": torch.tensor(rows).long()}, "an order that") for rows in ([], [9], [0, -1])],
]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda s: s.state_dict(10), "got trained=10 but between 0 and 9 rows of epoch 0 can have been trained on"),
        (lambda s: s.state_dict(-1), "got trained=-1 but a whole number, 0 or more"),
        (lambda s: s.progress("a"), "PruningSampler.progress got trained='a' but a whole number, 0 or more"),
        (lambda s: s.trained(torch.ones(3, 1).long()), r"trained got ids of shape \(3, 1\) and dtype torch.int64"),
        (lambda s: s.load_state_dict(None), "got None, a NoneType, but the mapping of state_dict"),
        (lambda s: s.load_state_dict({"num_rows": 9}), "got a state without begun, trained, order but all that"),
        *[(lambda s, bad=bad: s.load_state_dict(s.state_dict() | bad), said) for bad, said in BAD_STATES],
    ],
)
def test_states_that_cannot_be_are_refused_and_nothing_is_loaded(call, sentence):
    # Red when: a check is left out, or `begun` is set before `order` is looked at.
    sampler = PruningSampler(LossHistory(), num_rows=9, epochs=2)
    next(iter(sampler))
    before = str(sampler.state_dict(4))
    with pytest.raises(InvalidInput, match=sentence):
        call(sampler)
    assert str(sampler.state_dict(4)) == before


@pytest.mark.parametrize(("num_rows", "prune", "replicas"), [(9, 0.5, 1), (9, 0.5, 2), (40, 0.9, 3), (2, 0.7, 1)])
def test_the_shortest_epoch_holds_the_largest_multiple_that_is_taken(num_rows, prune, replicas):
    # Red when: the bound on `multiple_of` is the one of a full epoch: an epoch of easy rows but one would be empty.
    options = {"num_rows": num_rows, "epochs": 8, "prune": prune, "num_replicas": replicas}

    def made(multiple):
        history = LossHistory()
        history.update(torch.arange(num_rows), torch.eye(1, num_rows)[0])
        return PruningSampler(history, multiple_of=multiple, **options)

    shortest = math.ceil((1 + math.ceil((1 - prune) * (num_rows - 1) - 1e-9)) / replicas)
    for multiple in range(1, num_rows + 1):
        with nullcontext() if multiple <= shortest else pytest.raises(InvalidInput, match=f"give {shortest} or less"):
            made(multiple)
    assert len(made(shortest)) == shortest
