"""One table of everything that a law holds for: each public selector, schedule, scorer and recipe has an entry here.

``test_laws.py`` finds them by looking into the public modules and fails where an entry is missing, so adding one is
adding its name and its cases below. A case says how to make the thing, and which traits it has that the laws cannot
see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from killed import BATCH, EPOCHS, MakeStep, seeded
from killed import ROWS as OF_A_TRAINING
from rowprop import recipes
from rowprop.history import ReducibleLoss, StaleScorer
from rowprop.schedule import Joined, Progress, Ramp, Schedule
from rowprop.scoring import Downscaled, entropy, gradient_norm, margin
from rowprop.selection import (
    AboveMean,
    Context,
    Everything,
    ImportanceSampling,
    LossMass,
    MaxVariance,
    MultipleOf,
    Nonzero,
    OverAll,
    PercentileSampling,
    PerClass,
    RandomRows,
    RankSampling,
    Selector,
    Threshold,
    TopBottom,
    TopK,
)


@dataclass(frozen=True)
class SelectorCase:
    """A selector, and its traits that the laws cannot see."""

    make: Callable[[], Selector]  # a new one; some remember
    # It draws lots: "by rank", so that permuting the rows permutes the selection; "by row", for the rows as they stand.
    draws: str | None = None
    waits: bool = False  # the host waits for the device, because K depends on the scores or ids are looked up
    own_weights: bool = False  # the selections do not say that their weights are 1/K
    unbiased: bool = False  # the selections say that they are unbiased
    whole: Callable[[], Selector] | None = None  # the same kind, which keeps every row of ten distinct positive scores
    of: Callable[[Any], Selector] | None = None  # the same kind from its fraction, a number or a schedule


def reducible(selector: Selector) -> ReducibleLoss:
    """With an irreducible loss for each of the ids of :func:`context_of`."""
    return ReducibleLoss(selector, torch.linspace(0, 0.9, 100))


def around(kind: Callable[[Selector], Selector], **traits: bool) -> SelectorCase:
    return SelectorCase(
        partial(kind, TopK(0.3)), whole=partial(kind, TopK(1.0)), of=lambda keep: kind(TopK(keep)), **traits
    )


WEIGHED = {"draws": "by row", "waits": True, "own_weights": True}

SELECTORS: dict[str, list[SelectorCase]] = {
    "AboveMean": [SelectorCase(AboveMean, waits=True)],
    "Everything": [SelectorCase(Everything, unbiased=True, whole=Everything)],
    "PercentileSampling": [
        SelectorCase(make, draws="by row", waits=True, whole=whole)
        for make, whole in (
            (PercentileSampling, partial(PercentileSampling, 0.0, recent=5)),
            (partial(PercentileSampling, 1.0, recent=100, floor=0.2), partial(PercentileSampling, floor=1.0)),
        )
    ],
    "ImportanceSampling": [
        SelectorCase(partial(ImportanceSampling, 0.3, gate, 0.7), unbiased=True, whole=whole, of=of, **WEIGHED)
        for gate, whole, of in (
            (None, None, ImportanceSampling),
            (1.0, partial(ImportanceSampling, 1.0, 9.0), partial(ImportanceSampling, gate=1.0)),
            (9.0, None, None),
        )
    ],
    "LossMass": [
        SelectorCase(partial(LossMass, 0.7), waits=True, whole=partial(LossMass, 1.0), of=LossMass),
        SelectorCase(partial(LossMass, 0.5, min_keep=0.4), waits=True, whole=partial(LossMass, 0.1, min_keep=1.0)),
    ],
    "MaxVariance": [
        SelectorCase(partial(MaxVariance, 0.3), waits=True, whole=partial(MaxVariance, 1.0), of=MaxVariance)
    ],
    "MultipleOf": [
        around(partial(MultipleOf, multiple_of=4)),
        SelectorCase(partial(MultipleOf, RankSampling(0.1)), "by rank", whole=partial(MultipleOf, TopK(0.1), 10)),
        SelectorCase(lambda: MultipleOf(PercentileSampling(), 8), draws="by row", waits=True),
        SelectorCase(partial(MultipleOf, LossMass(0.5, min_keep=0.4), 4), waits=True),
        SelectorCase(partial(MultipleOf, PerClass(TopK(0.1)), 8), waits=True),
    ],
    "Nonzero": [SelectorCase(Nonzero, waits=True, own_weights=True, unbiased=True, whole=Nonzero)],
    "PerClass": [
        around(PerClass, waits=True, own_weights=True),
        SelectorCase(partial(PerClass, RandomRows(0.5)), unbiased=True, **WEIGHED),
        SelectorCase(lambda: PerClass(PercentileSampling(1.0)), **WEIGHED),
    ],
    "OverAll": [
        around(OverAll, own_weights=True),
        SelectorCase(partial(OverAll, RandomRows(0.5)), draws="by row", own_weights=True),
        SelectorCase(lambda: OverAll(PercentileSampling()), **WEIGHED),
    ],
    "RandomRows": [
        SelectorCase(partial(RandomRows, 0.3), "by row", unbiased=True, whole=partial(RandomRows, 1.0), of=RandomRows)
    ],
    "RankSampling": [
        SelectorCase(partial(RankSampling, 0.3), "by rank", whole=partial(RankSampling, 1.0), of=RankSampling)
    ],
    "ReducibleLoss": [
        around(reducible, waits=True),
        SelectorCase(partial(reducible, RandomRows(0.5)), draws="by row", waits=True, unbiased=True),
        SelectorCase(lambda: reducible(PerClass(PercentileSampling())), **WEIGHED),
    ],
    "Threshold": [SelectorCase(partial(Threshold, 0.5), waits=True, whole=partial(Threshold, 0.0))],
    "TopBottom": [
        SelectorCase(
            partial(TopBottom, 0.3, 0.2), whole=partial(TopBottom, 0.5, 0.5), of=partial(TopBottom, bottom=0.1)
        ),
        SelectorCase(partial(TopBottom, 0.0, 0.4), of=lambda keep: TopBottom(top=0.1, bottom=keep)),
    ],
    "TopK": [SelectorCase(partial(TopK, 0.3), whole=partial(TopK, 1), of=TopK)],
}

NO_SELECTORS = {  # public names of rowprop.selection that select nothing
    "Around": "what selectors around another share",
    "Checked": "what the library's selectors share",
    "Context": "what selectors may look at",
    "Keeping": "what selectors that know K share",
    "KnownKeep": "a protocol",
    "OfScores": "what selector makes",
    "Selection": "what selectors return",
    "Selector": "a protocol",
    "Stateful": "a protocol",
    "selector": "makes selectors",
}


def context_of(
    scores: Tensor, generator: torch.Generator | None = None, progress: float | None = None, order: Tensor | None = None
) -> Context:
    """A context with all that a selector may need: three classes of different sizes, ids that are not the places."""
    places = torch.arange(scores.numel(), device=scores.device) if order is None else order
    return Context(progress, places * 7 % 97, places.remainder(6).clamp(max=2), generator)


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule, as a function of progress: its first and its last value, and the bounds in between."""

    make: Callable[[], Callable[[float], float]]
    first: float
    last: float
    least: float
    most: float


@dataclass(frozen=True)
class Step:
    """What a clock looks at in the record of a step: 8 rows, of which 2 are kept."""

    num_rows: int = 8
    kept_by_rank: tuple[int, ...] = (2,)


def _counted(counts: Any) -> Callable[[float], float]:
    """Progress itself, counted up to a fraction of 40 steps."""
    total = {"steps": 40, "rows_seen": 320, "rows_backpropagated": 80}[counts]

    def reached(progress: float) -> float:
        clock = Progress(total, counts)
        for _ in range(round(40 * progress)):
            clock.count(Step())
        return clock.fraction

    return reached


def _active(schedule: Schedule) -> Callable[[float], float]:
    return lambda progress: float(schedule.active(progress, batch_index=0))


SCHEDULES: dict[str, list[ScheduleCase]] = {
    "Joined": [
        ScheduleCase(lambda: Joined([(0.0, 1.0), (0.3, Ramp(1.0, 0.2)), (0.8, 0.5)]), 1.0, 0.5, 0.2, 1.0),
        ScheduleCase(lambda: Joined([(0, Ramp(0.1, 0.4, curve="cosine")), (0.5, Ramp(0.4, 1.0))]), 0.1, 1.0, 0.1, 1.0),
    ],
    "Progress": [
        ScheduleCase(partial(_counted, counts), 0.0, 1.0, 0.0, 1.0)
        for counts in ("steps", "rows_seen", "rows_backpropagated")
    ],
    "Ramp": [
        ScheduleCase(partial(Ramp, 1.0, 0.25), 1.0, 0.25, 0.25, 1.0),
        ScheduleCase(partial(Ramp, 0.1, 1.0, 0.2, 0.7, "cosine"), 0.1, 1.0, 0.1, 1.0),
    ],
    "Schedule": [
        ScheduleCase(lambda: _active(Schedule(0.5, 0.9)), 0.0, 0.0, 0.0, 1.0),
        ScheduleCase(lambda: _active(Schedule(0.0, 1.0, 0)), 1.0, 0.0, 0.0, 1.0),
    ],
}

ROWS = 12


class Images(nn.Module):
    """A small convolutional classifier of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).tanh().mean((2, 3)))


class Tokens(nn.Module):
    """A small classifier of token sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Embedding(11, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens).tanh().mean(1))


def subject(kind: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """A model, a batch of ROWS rows, and the rows' ids."""
    torch.manual_seed(3)
    inputs = torch.randn(ROWS, 3, 8, 8) if kind is Images else torch.randint(11, (ROWS, 6))
    return kind(), (inputs, torch.randint(5, (ROWS,))), torch.randperm(ROWS) + 3


def losses_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@dataclass(frozen=True)
class ScorerCase:
    """A scorer that is made new for each use; some ask for ids and a history in the context."""

    make: Callable[[], Callable[..., Tensor]]
    kind: type[nn.Module] = Images


SCORERS: dict[str, list[ScorerCase]] = {
    "Downscaled": [ScorerCase(lambda: Downscaled(losses_fn))],
    "StaleScorer": [ScorerCase(lambda: StaleScorer(losses_fn))],
    "entropy": [ScorerCase(lambda: lambda model, batch: entropy(model(batch[0])))],
    "gradient_norm": [ScorerCase(lambda: lambda model, batch: gradient_norm(model(batch[0]), batch[1]))],
    "margin": [
        ScorerCase(lambda: lambda model, batch: margin(model(batch[0]), batch[1]), kind) for kind in (Images, Tokens)
    ],
}
NO_SCORERS = {  # public names of rowprop.scoring that are none
    "logits_of": "finds what scores are made of",
    "per_row_mean": "makes losses",
    "score_without_graph": "runs a scorer",
}

NO_RECIPES_OF_ROWS = {
    "high_entropy_tokens": "of tokens; test_step_tokens.py has its tests",
    "rho1": "of tokens; test_step_tokens.py has its tests",
}


def _recipe(make: MakeStep, *arguments: Any, **options: Any) -> MakeStep:
    """Makes a step of a model and a losses function, and draws the same numbers each time."""
    options = {"engine": "sliced"} | options
    return lambda model, losses_fn: make(model, losses_fn, *arguments, generator=seeded(1), **options)


LOSERS = {"epochs": EPOCHS, "batch_rows": BATCH, "beta": 1.0}
PRUNING = {"num_rows": OF_A_TRAINING, "epochs": EPOCHS, "full_after": 1.0, "seed": 2}
RECIPES: dict[str, list[MakeStep]] = {  # for the trainings of killed.py
    "batch_loss_filter": [_recipe(recipes.batch_loss_filter, epochs=EPOCHS, min_loss_perc=0.7)],
    "biggest_losers": [
        _recipe(recipes.biggest_losers, staleness=staleness, engine=engine, **LOSERS)
        for staleness, engine in ((1, "sliced"), (2, "recompute"), (3, "recompute"))
    ],
    "composer": [
        _recipe(recipes.composer, start=0.1),
        _recipe(recipes.composer, start=0.1, scale_factor=0.5, engine="recompute"),
    ],
    "infobatch": [
        _recipe(recipes.infobatch, **PRUNING),
        _recipe(recipes.infobatch, selector=RandomRows(0.5), **PRUNING),
    ],
    "kath18": [
        _recipe(recipes.kath18, keep=0.75),
        *[_recipe(recipes.kath18, keep=0.5, gated=gated) for gated in (True, False)],
    ],
    "ohem": [_recipe(recipes.ohem)],
    "random": [_recipe(recipes.random)],
    "rho_loss": [_recipe(recipes.rho_loss, torch.linspace(0, 2, OF_A_TRAINING), keep=0.5)],
}
