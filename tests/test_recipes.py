"""Each recipe follows the method published under its name; that it goes on where it was killed is in test_laws.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import laws
from killed import seeded
from rowprop import ImportanceSampling, RandomRows, SelectiveBackprop, TopK, recipes
from rowprop.errors import InvalidInput
from rowprop.history import PruningSampler, ReducibleLoss, StaleScorer
from rowprop.schedule import Schedule
from rowprop.scoring import Scored, gradient_norm
from rowprop.selection import Context, Everything, LossMass, PercentileSampling, RankSampling

NEVER = 10**6  # rows of a step that never comes


def scaled(model: Any, batch: Tensor) -> Tensor:
    """The batch itself as losses, with a graph."""
    return batch * model.weight


def one() -> nn.Module:
    return nn.ParameterDict({"weight": torch.ones(())})


def kept(step: SelectiveBackprop, losses: Tensor, **call: Any) -> list[int]:
    return step(losses, **call)[1].selection.rows.tolist()


LOSERS, IRREDUCIBLE = {"epochs": 2, "batch_rows": 8}, torch.rand(60)
WIRED = [  # what a recipe is given, and the parts that it is made of, as published
    ("batch_loss_filter", {"epochs": 3}, LossMass(0.9), Schedule(1 / 3, 1, 0)),
    ("biggest_losers", {"epochs": 4, "batch_rows": 9}, PercentileSampling(3.0, 1024), Schedule(1 / 4, 1, 0)),
    ("biggest_losers", LOSERS | {"beta": 2.0, "recent": 20}, PercentileSampling(2.0, 20), Schedule(1 / 2, 1, 0)),
    ("composer", {}, RankSampling(0.5), Schedule(0.5, 0.9, 2)),
    ("composer", {"start": 0.2, "end": 0.55, "interrupt": 3}, RankSampling(0.5), Schedule(0.2, 0.55, 3)),
    ("infobatch", {"num_rows": 60, "epochs": 10}, Everything(), None),
    ("kath18", {}, ImportanceSampling(1 / 3, gate=2.0), None),  # (B + 3b) / (3b) with B = 3b
    ("kath18", {"keep": 0.5}, ImportanceSampling(0.5, gate=5 / 3), None),
    ("kath18", {"gated": False}, ImportanceSampling(1 / 3), None),
    ("ohem", {}, TopK(0.25), None),
    ("random", {}, RandomRows(0.5), None),
    ("rho_loss", {"irreducible": IRREDUCIBLE}, ReducibleLoss(TopK(0.1), IRREDUCIBLE), None),
]


@pytest.mark.parametrize(("name", "settings", "selector", "schedule"), WIRED)
def test_a_recipe_is_made_of_the_parts_that_its_source_describes(name, settings, selector, schedule):
    # Each part is proved beside its source by itself. Red when: composer's window or the first epoch that is trained
    # whole is another, a share, an exponent, a count or a default is not handed on, or kath18's gate is that of another
    # keep.
    clock = {"total_steps": 28} if schedule else {}
    step = getattr(recipes, name)(one(), scaled, **settings, **clock)
    assert (repr(step.selector), step.schedule) == (repr(selector), schedule)
    assert (step.accumulate_to, step.total_steps) == (settings.get("batch_rows"), clock.get("total_steps"))


def test_stale_losses_and_pruned_rows_come_from_the_history():
    # Red when: scores are always fresh, or infobatch prunes another share, or for longer, than the original.
    step = recipes.biggest_losers(one(), scaled, staleness=2, **LOSERS)
    assert type(step.scorer) is StaleScorer and (step.scorer.staleness, step.engine.name) == (2, "recompute")
    assert step.scorer.losses_fn is scaled and step.history is not None
    published = {"prune": 0.5, "full_after": 0.875}
    other = {"prune": 0.3, "full_after": 0.5, "multiple_of": 4, "seed": 7}
    for given, made in (({}, published), (other, other)):
        step = recipes.infobatch(one(), scaled, num_rows=60, epochs=10, **given)
        assert step.history is step.sampler.history
        assert ({"num_rows": 60, "epochs": 10} | made).items() <= vars(step.sampler).items()


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
    ("min_loss_perc", "min_sample_perc", "eight"),
    [(0.9, 0.0, False), (0.9, 0.0, True), (0.5, 0.3, False), (0.1, 0.0, False), (0.3, 0.7, True), (1.0, 0.0, False)],
)
def test_batch_loss_filter_keeps_the_originals_rows(min_loss_perc, min_sample_perc, eight):
    # Red when: the row that crosses the share is left out (as in tsai), the cumsum ascends, K is rounded to 8
    # downwards, min_keep is ignored, or `>` for `>=`.
    options = {"min_loss_perc": min_loss_perc, "min_sample_perc": min_sample_perc, "mixed_precision_batch": eight}
    step = recipes.batch_loss_filter(one(), scaled, epochs=2, engine="masked", **options)
    random = np.random.default_rng(0)
    crossed = 0
    for number in range(1000):
        num_rows = int(random.integers(1, 130))
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
    assert crossed > 500 or min_loss_perc == 1


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


def test_every_recipe_has_its_parts_and_a_bias():
    # Red when: a recipe is added without an entry in WIRED or in BIASED.
    of_rows = set(recipes.__all__) - set(laws.NO_RECIPES_OF_ROWS)
    assert {name for name, *_ in WIRED} == set(BIASED) == of_rows


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("batch_loss_filter", {"epochs": 1}, "batch_loss_filter got epochs=1 but a whole"),
        ("biggest_losers", LOSERS | {"epochs": 2.0}, "epochs=2.0 but .* 2 or more, .*: the first epoch is trained"),
        ("biggest_losers", LOSERS | {"staleness": True}, "staleness=True but a whole number, 1 or"),
        ("composer", {"interrupt": 1}, "Schedule got interrupt=1, under which every batch"),
        ("composer", {"scale_factor": 2}, r"Downscaled got scale=2 but a fraction in \(0, 1\)"),
        ("rho1", {"reference": torch.zeros(3)}, "rho1 got reference=<tensor of .*Module was needed, or the losses of"),
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
