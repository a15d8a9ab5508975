"""Each recipe follows the method published under its name; that it goes on where it was killed is in test_laws.py."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import laws
from killed import seeded
from rowprop import SelectiveBackprop, recipes
from rowprop.errors import InvalidInput
from rowprop.history import PruningSampler, WithIds
from rowprop.scoring import Scored, gradient_norm
from rowprop.selection import Context, RandomRows, RankSampling

NEVER = 10**6  # rows of a step that never comes


def scaled(model: Any, batch: Tensor) -> Tensor:
    """The batch itself as losses, with a graph."""
    return batch * model.weight


def one() -> nn.Module:
    return nn.ParameterDict({"weight": torch.ones(())})


def kept(step: SelectiveBackprop, losses: Tensor, **call: Any) -> list[int]:
    return step(losses, **call)[1].selection.rows.tolist()


def test_ohem_keeps_the_largest_losses_and_takes_their_mean():
    # Red when: the smallest are kept, K is rounded down (22 rows of 90), or the weights are 1/N.
    step = recipes.ohem(one(), scaled, engine="masked")
    for seed in range(20):
        losses = torch.rand(90, generator=seeded(seed))
        loss, record = step(losses)
        assert record.selection.rows.tolist() == sorted(sorted(range(90), key=lambda row: -float(losses[row]))[:23])
        assert loss.item() == pytest.approx(float(np.mean(sorted(losses.tolist())[-23:])), rel=1e-6)


@pytest.mark.parametrize(("start", "end", "interrupt"), [(0.5, 0.9, 2), (0.2, 0.55, 3), (0, 1, 0)])
def test_composer_selects_when_the_original_does(start, end, interrupt):
    # Red when: `<=` for `<`, batches counted over epochs (seven in each here), or a first batch that is whole.
    options = {"total_steps": 28, "start": start, "end": end, "interrupt": interrupt, "engine": "masked"}
    step = recipes.composer(one(), scaled, generator=seeded(), **options)
    for call, (_, index) in enumerate(itertools.product(range(4), range(7))):
        selects = start <= call / 28 < end and (interrupt == 0 or (index + 1) % interrupt != 0)
        assert len(kept(step, torch.rand(10), batch_index=index)) == (5 if selects else 10), call


def test_composer_keeps_rows_with_the_published_chances():
    # Red when: the exponent is 1 / keep, or the order of the ranks is turned around.
    options = {"start": 0, "end": 1, "interrupt": 0, "total_steps": 10_000, "engine": "masked"}
    step = recipes.composer(one(), scaled, generator=seeded(), **options)
    draws, counts = 4000, np.zeros(64)
    order = torch.randperm(64, generator=seeded(1))
    for _ in range(draws):
        counts[kept(step, order.float())] += 1
    by_rank = (counts / draws)[torch.argsort(order).numpy()]
    assert by_rank.sum() == pytest.approx(32)
    for rank, chance in ((63, 0.80), (57, 0.76), (32, 0.56), (0, 0.01)):  # hardest, 90th percentile, median, easiest
        error = 3 * math.sqrt(chance * (1 - chance) / draws) + 0.005  # the published figures have two places
        assert abs(by_rank[rank] - chance) < error, rank


def test_composer_scores_small_images_and_trains_the_large_ones():
    # Red when: scale_factor is left out of the scores, or the kept rows are trained at the small size.
    model, batch, _ = laws.subject(laws.Images)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    small = F.interpolate(batch[0], scale_factor=0.5, mode="bilinear", align_corners=False)
    losses = [laws.losses_fn(model, (images, batch[1])).detach() for images in (small, batch[0])]
    seen.clear()
    by_size = [RankSampling(0.5)(scores, Context(generator=seeded(4))).rows.tolist() for scores in losses]
    assert by_size[0] != by_size[1]
    step = recipes.composer(model, laws.losses_fn, scale_factor=0.5, generator=seeded(4))
    _, record = step(batch, 0, progress=0.5)
    assert record.selection.rows.tolist() == by_size[0] and record.engine == "recompute"
    assert seen == [(12, 3, 4, 4), (6, 3, 8, 8)]
    assert record.loss_kept.item() == pytest.approx(losses[1][by_size[0]].mean().item(), rel=1e-5)


def original_count(losses: np.ndarray, min_loss_perc: float, min_sample_perc: float, eight: bool) -> int:
    """Count of rows that the original's rule keeps; on whole numbers, whose tenths are exact."""
    order = np.argsort(losses)[::-1]
    sample_max = math.ceil(round(len(losses) * min_sample_perc, 9))
    loss_max = int(np.argmax(losses[order].cumsum() * 10 >= round(min_loss_perc * 10) * losses.sum())) + 1
    count = max(sample_max, loss_max)
    return min(len(losses), math.ceil(count / 8) * 8) if eight else count


@pytest.mark.parametrize(
    ("min_loss_perc", "min_sample_perc", "eight"), [(0.9, 0.0, False), (0.9, 0.0, True), (0.5, 0.3, False)]
)
def test_batch_loss_filter_keeps_the_originals_rows(min_loss_perc, min_sample_perc, eight):
    # Red when: the row that crosses the share is left out (as in tsai), K is rounded to 8 downwards, or `>` for `>=`.
    options = {"min_loss_perc": min_loss_perc, "min_sample_perc": min_sample_perc, "mixed_precision_batch": eight}
    step = recipes.batch_loss_filter(one(), scaled, epochs=2, engine="masked", **options)
    random = np.random.default_rng(0)
    crossed = 0
    for number in range(1000):
        num_rows = int(random.integers(1, 41))
        losses = np.rint(random.exponential(20, num_rows)).astype(np.int64)
        if number % 4 == 1:
            losses = losses // 8  # ties, and many zeros
        if number % 4 == 2:
            losses[random.integers(num_rows)] = 100_000  # holds the share alone
        if number % 4 == 3:
            losses[:] = 1 + number % 5  # nothing but ties: nine rows of ten hold 0.9
        if losses.sum() == 0:  # the original divides 0 by 0 and keeps one row; LossMass keeps all
            assert len(kept(step, torch.zeros(num_rows), progress=0.7)) == num_rows
            continue
        count = original_count(losses, min_loss_perc, min_sample_perc, eight)
        crossed += 1 < count < num_rows
        # numpy does not say which of equal rows comes first; here it is the lower one.
        expected = sorted(sorted(range(num_rows), key=lambda row: (-losses[row], row))[:count])
        assert kept(step, torch.from_numpy(losses / 64).float(), progress=0.7) == expected, losses
    assert crossed > 500


def test_batch_loss_filter_trains_the_first_epoch_whole():
    # Red when: the schedule begins at 0, or ends before the last batch.
    step = recipes.batch_loss_filter(one(), scaled, epochs=3, total_steps=15, engine="masked")
    counts = [len(kept(step, torch.tensor([9.0, 0.5, 0.1, 0.0]))) for _ in range(15)]
    assert counts == [4] * 5 + [1] * 10


def test_biggest_losers_draws_by_the_share_of_recent_losses_below():
    # Red when: the batch is appended after the draw, `<=` for `<`, or the first epoch fills the history.
    options = {"batch_rows": NEVER, "epochs": 2, "total_steps": 12, "beta": 2.0, "recent": 20, "engine": "masked"}
    step = recipes.biggest_losers(one(), scaled, generator=seeded(2), **options)
    lots, recent = seeded(2), deque[float](maxlen=20)
    for call in range(12):
        losses = torch.randint(9, (8,), generator=seeded(call)).float()
        rows = list(range(8))
        if call >= 6:
            recent.extend(losses.tolist())
            chances = [(sum(x < loss for x in recent) / len(recent)) ** 2 for loss in losses.tolist()]
            rows = [row for row, lot in enumerate(torch.rand(8, generator=lots).tolist()) if lot < chances[row]]
        assert kept(step, losses) == rows


def test_biggest_losers_steps_on_exactly_a_batch_of_rows():
    # Red when: the batch that completes the step is not cut, rows count 1/K, or the rest is carried over.
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    squares = lambda m, x: m(x).squeeze(1).square()  # noqa: E731
    step = recipes.biggest_losers(model, squares, batch_rows=16, epochs=2, generator=seeded(5), engine="sliced")
    rows: list[Tensor] = []
    steps = 0
    for number in range(80):
        batch = torch.randn(16, 3, generator=seeded(number))
        loss, record = step(batch, progress=0.6)
        loss.backward()
        rows.append(batch[record.selection.rows])
        assert torch.equal(record.selection.weights, torch.full_like(record.selection.weights, 1 / 16))
        if record.ready:
            expected = torch.autograd.grad(squares(model, torch.cat(rows)).mean(), model.weight)[0]
            assert sum(map(len, rows)) == 16
            torch.testing.assert_close(model.weight.grad, expected)
            model.zero_grad()
            rows.clear()
            steps += 1
    assert 15 <= steps <= 25  # a quarter of 80


@pytest.mark.parametrize("staleness", [2, 3])
def test_biggest_losers_runs_only_stale_rows_forward(staleness):
    # Red when: scores are always fresh, losses of trained rows are forgotten, or rows grow stale a visit too late.
    forwarded: list[list[int]] = []

    def losses_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        forwarded.append(batch[1].tolist())
        return batch[0] * model.weight

    options = {"batch_rows": NEVER, "epochs": 8, "staleness": staleness, "total_steps": 32}
    step = recipes.biggest_losers(one(), losses_fn, generator=seeded(6), **options)
    assert step.engine.name == "recompute"
    losses, since = torch.rand(24, generator=seeded(7)), dict.fromkeys(range(24), 0)
    scored = 0
    for call in range(32):
        ids = torch.arange(24).view(4, 6)[call % 4]
        forwarded.clear()
        _, record = step((losses[ids], ids), ids=ids)
        chosen = ids[record.selection.rows].tolist()
        if call < 4:
            assert forwarded == [ids.tolist()]
            continue
        visits = {row: since[row] + 1 for row in ids.tolist()}
        stale = [row for row, count in visits.items() if count >= staleness]
        if len(stale) == 1:  # BatchNorm could not do with one
            stale = sorted([*stale, ids[(stale[0] - int(ids[0]) + 1) % 6].item()])
        scored += len(stale)
        went_along = [] if chosen else [row for row in forwarded[-1] if forwarded[-1:] != [stale]]
        assert forwarded == ([stale] if stale else []) + [chosen or went_along]
        since |= visits | dict.fromkeys(chosen, 0) | dict.fromkeys(stale, 0)
    assert 0 < scored < 28 * 6 / staleness * 1.3


def test_kath18_draws_evenly_until_the_gate_of_two_is_passed():
    # Red when: the gate is B / (3b) + 1 of another keep, or it is open from the start.
    step = recipes.kath18(one(), scaled, engine="masked", generator=seeded(8))
    assert step.selector.gate == pytest.approx(2)
    assert recipes.kath18(one(), scaled, keep=0.5).selector.gate == pytest.approx(5 / 3)
    assert recipes.kath18(one(), scaled, gated=False).selector.gate is None
    losses = torch.tensor([9.0] + [0.001] * 11)
    p = losses.double().numpy() / losses.double().sum().item()
    tau, even, by_score = 0.0, 0, 0
    for _ in range(12):
        _, record = step(losses)
        if tau <= 2:  # four different rows, each a quarter
            even += 1
            assert record.selection.weights.tolist() == [0.25] * 4
        else:  # the one row that has all of the loss, drawn four times
            by_score += 1
            assert record.selection.rows.tolist()[0] == 0
            assert record.selection.weights[0].item() == pytest.approx(1 / (12 * p[0]), rel=0.3)
        tau = 0.9 * tau + 0.1 / math.sqrt(1 - ((p - 1 / 12) ** 2).sum() / (p**2).sum())
    assert even > 2 and by_score > 2


def test_infobatch_follows_the_published_rule_through_a_loader():
    # Red when: the rows above the mean are the ones left out, the factor is 1, or the last epochs are pruned too.
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randn(60)
    model = nn.Linear(4, 1)
    squares = lambda m, batch: (m(batch[0]).squeeze(1) - batch[1]).square()  # noqa: E731
    step = recipes.infobatch(model, squares, num_rows=60, epochs=10, engine="sliced")
    loader = DataLoader(WithIds(TensorDataset(x, y)), 7, sampler=step.sampler, generator=seeded())
    stored = np.full(60, 3.0)  # as the original begins: all equal, none below the mean
    sizes = []
    for epoch in range(10):
        easy = stored < stored.mean()
        seen: list[int] = []
        pruned_now = epoch + 1 <= 10 * 0.875 and easy.any()
        drawn = math.ceil(easy.sum() / 2)
        for ids, batch in loader:
            losses = squares(model, batch)
            factors = np.where(easy[ids.numpy()] & pruned_now, easy.sum() / max(drawn, 1), 1)
            expected = torch.autograd.grad((losses * torch.from_numpy(factors)).mean(), model.weight)[0]
            loss, record = step(batch, ids=ids)
            loss.backward()
            assert record.num_kept == len(ids)
            torch.testing.assert_close(model.weight.grad, expected.float())
            stored[ids.numpy()] = losses.detach().numpy()
            seen += ids.tolist()
            with torch.no_grad():
                model.weight -= 0.05 * model.weight.grad
            model.zero_grad()
        left_out = set(range(60)) - set(seen)
        assert len(seen) == len(set(seen)) and all(easy[row] for row in left_out)
        assert len(left_out) == (easy.sum() - drawn if pruned_now else 0)
        sizes.append(len(seen))
    assert sizes[0] == sizes[8] == sizes[9] == 60 and max(sizes[1:8]) < 50


def test_rho_loss_keeps_what_is_most_above_its_irreducible_loss():
    # Red when: the sign is turned around, or the irreducible losses are read by place in the batch.
    irreducible = torch.rand(640, generator=seeded(9)) * 3
    step = recipes.rho_loss(one(), scaled, irreducible, engine="masked")
    for seed in range(10):
        losses, ids = torch.rand(320, generator=seeded(seed)), torch.randperm(640, generator=seeded(seed))[:320]
        reducible = [float(loss) - float(irreducible[i]) for loss, i in zip(losses, ids, strict=True)]
        expected = sorted(sorted(range(320), key=lambda row: -reducible[row])[:32])
        assert kept(step, losses, ids=ids) == expected


BIASED: dict[str, tuple[bool, Callable[..., SelectiveBackprop]]] = {  # whether it is said to be; how it is made
    "batch_loss_filter": (True, lambda *a, **o: recipes.batch_loss_filter(*a, epochs=2, **o)),
    "biggest_losers": (True, lambda *a, **o: recipes.biggest_losers(*a, epochs=2, batch_rows=NEVER, **o)),
    "composer": (True, recipes.composer),
    "infobatch": (False, lambda *a, **o: recipes.infobatch(*a, num_rows=24, epochs=9, selector=RandomRows(0.5), **o)),
    "kath18": (False, lambda *a, **o: recipes.kath18(*a, gated=False, **o)),
    "ohem": (True, recipes.ohem),
    "random": (False, recipes.random),
    "rho_loss": (True, lambda *a, **o: recipes.rho_loss(*a, torch.zeros(24), **o)),
}


@pytest.mark.parametrize("name", BIASED)
def test_the_unbiased_ones_have_the_full_gradient_as_their_mean_and_the_others_not(name: str):
    # Red when: kath18's or infobatch's weights are 1/K, or an unbiased selector stands in for a biased one.
    biased, make = BIASED[name]
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(24, 4), torch.randint(3, (24,))
    ids = torch.arange(24)

    def losses_fn(m: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = m(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return Scored(losses, gradient_norm(logits, batch[1]) if name == "kath18" else losses.detach())

    step = make(model, losses_fn, engine="masked", generator=seeded(1))
    grads = [
        torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for loss in losses_fn(model, (x, y)).losses
    ]
    rows = torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])
    draws = []
    for number in range(820):
        present = ids
        if step.sampler is not None and number > 0:  # the losses are known: each time the second epoch, another draw
            present = torch.tensor(sorted(PruningSampler(step.history, num_rows=24, epochs=9, seed=number)))
        _, record = step((x[present], y[present]), 0, ids=present, progress=0.6)
        selection = record.selection
        weights = selection.weights * len(present) / 24  # the mean over a part of the epoch, as a part of its sum
        weights = weights / weights.sum() if name == "biggest_losers" and len(weights) else weights
        draws.append(weights @ rows[present[selection.rows]])
    means = torch.stack(draws[20:])
    error = means.std(0) / math.sqrt(len(means))
    distance = float(((means.mean(0) - rows.mean(0)).abs() / error.clamp(min=1e-9)).max())
    assert (distance > 8) if biased else (distance < 4), distance


def test_every_recipe_has_a_bias():
    # Red when: a recipe is added without an entry in BIASED.
    assert set(BIASED) == set(recipes.__all__) - set(laws.NO_RECIPES_OF_ROWS)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("batch_loss_filter", {"epochs": 1}, "batch_loss_filter got epochs=1 but a whole"),
        (
            "biggest_losers",
            {"batch_rows": 8, "epochs": 2.0},
            "epochs=2.0 but .* 2 or more, .*: the first epoch is trained",
        ),
        (
            "biggest_losers",
            {"batch_rows": 8, "epochs": 2, "staleness": True},
            "staleness=True but a whole number, 1 or",
        ),
        ("composer", {"interrupt": 1}, "Schedule got interrupt=1, under which every batch"),
        ("composer", {"scale_factor": 2}, r"Downscaled got scale=2 but a fraction in \(0, 1\)"),
        ("infobatch", {"num_rows": 9, "epochs": 0}, "PruningSampler got epochs=0 but a whole"),
        ("kath18", {"keep": 0}, r"kath18 got keep=0 but a fraction in \(0, 1\] was needed"),
        ("ohem", {"keep": 2}, "TopK got keep=2 but a fraction"),
        (
            "rho1",
            {"reference": torch.zeros(3)},
            r"rho1 got reference=<tensor of shape.*Module was needed, or the losses of all",
        ),
        ("rho1", {"losses_fn": None, "reference": one()}, "rho1 got losses_fn=None, a NoneType, but a function"),
        ("rho_loss", {"irreducible": [0.1]}, r"ReducibleLoss got irreducible=\[0.1\], a list, but floating"),
        ("rho_loss", {"irreducible": torch.zeros(1, 1, 1)}, "ReducibleLoss got irreducible losses of shape"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(name: str, settings: dict[str, Any], sentence: str):
    with pytest.raises(InvalidInput, match=sentence):
        getattr(recipes, name)(one(), **({"losses_fn": scaled} | settings))


def test_calls_without_what_a_recipe_needs_are_refused():
    with pytest.raises(InvalidInput, match=r"shape \(2, 3\) .* losses and entropies were needed; return rowp"):
        kept(recipes.high_entropy_tokens(one(), scaled), torch.ones(2, 3))
    with pytest.raises(InvalidInput, match="without ids"):
        kept(recipes.rho_loss(one(), scaled, torch.zeros(3)), torch.ones(3))


def test_every_recipe_has_a_section_on_the_page():
    page = Path(__file__).parent.parent / "docs" / "recipes.md"
    for name in recipes.__all__:
        assert f"\n## {name}\n" in page.read_text(), name
