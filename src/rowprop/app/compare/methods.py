"""The methods that can be compared: an ordinary loop, the published recipes, pruning with one on top, own ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor, nn

from rowprop import recipes
from rowprop.app.lookup import load_object
from rowprop.engines import ENGINES, Unit
from rowprop.errors import InvalidInput, foreign
from rowprop.scoring import LossesFn
from rowprop.selection import OverAll
from rowprop.step.selective import SelectiveBackprop

# Stands for an unknown number of epochs: the first is less than a millionth of the training, and none is the last.
ENDLESS = 1_000_001
VCAS_EVERY = 50, 100
"""Of a training's steps, ``vcas`` has the part between two controls that is the least one of the paper. Where it is not
known how many they are, it has so many, as in the authors' code."""


@dataclass(frozen=True)
class Budget:
    """The training that a method is made for.

    Attributes:
        keep: Fraction of rows to keep, on average for ``biggest-losers``; ``infobatch`` has a rule of its own.
        mass: Share of the batch's loss that ``batch-loss-filter`` keeps.
        epochs: Passes over the training rows; ``ENDLESS`` under a budget of seconds.
        num_rows: M, training rows.
        batch_rows: N, rows per step.
        seed: Of the order in which a method that prunes draws its epochs.
        irreducible: Loss of each training row, or of each of its tokens, under a model that was not trained on it,
            shape ``(M,)`` or ``(M, T)``; None for methods that do not need it.

    """

    keep: float
    mass: float
    epochs: int
    num_rows: int
    batch_rows: int
    seed: int
    irreducible: Tensor | None = None


def _kept(budget: Budget) -> dict[str, Any]:
    return {"keep": budget.keep}


def _kept_tokens(budget: Budget) -> dict[str, Any]:
    return {"keep": budget.keep, "unit": "token"}


def _filtered(budget: Budget) -> dict[str, Any]:
    return {"epochs": budget.epochs, "min_loss_perc": budget.mass}


def _accumulated(budget: Budget) -> dict[str, Any]:
    return {"epochs": budget.epochs, "batch_rows": budget.batch_rows, "beta": 1 / budget.keep - 1}


def _pruned(budget: Budget) -> dict[str, Any]:
    return {"epochs": budget.epochs, "num_rows": budget.num_rows, "seed": budget.seed}


def _judged(budget: Budget) -> dict[str, Any]:
    return {"keep": budget.keep, "irreducible": budget.irreducible}


def _referred(budget: Budget) -> dict[str, Any]:
    return {"keep": budget.keep, "reference": budget.irreducible}


def _controlled(budget: Budget) -> dict[str, Any]:
    steps = budget.epochs * max(1, budget.num_rows // budget.batch_rows)
    return {"every": VCAS_EVERY[1] if budget.epochs == ENDLESS else ceil(steps / VCAS_EVERY[0])}


@dataclass(frozen=True)
class Kind:
    """How rows are chosen.

    Attributes:
        recipe: Takes a model, a ``losses_fn``, the keywords below and further ones of
            :class:`rowprop.SelectiveBackprop`, and returns one. None for the ordinary loop.
        keywords: Returns the keywords that the recipe takes from a budget. Default: ``keep``.
        loss_led: Whether the choices say which rows are hard. They do not under ``infobatch``, which leaves rows out
            before any batch, ``rho-loss`` and ``rho1``, which avoid what nobody can learn, and ``kath18``, which draws
            all rows alike until its gate opens.
        unbiased: Whether the weights undo the choice.
        whole_first_epoch: Whether the first epoch trains all rows.
        needs_irreducible: Whether the budget must hold the irreducible losses.
        scores_gradients: Whether rows are chosen by the norm of their gradient, beside the losses, instead of by loss.
        thins: Whether the backwards of an ordinary loop are made cheaper: by :func:`rowprop.thin`, or by the recipe.

    """

    recipe: Callable[..., object] | None
    keywords: Callable[[Budget], dict[str, Any]] = _kept
    loss_led: bool = False
    unbiased: bool = False
    whole_first_epoch: bool = False
    needs_irreducible: bool = False
    scores_gradients: bool = False
    thins: bool = False


KINDS = {
    "full": Kind(None),
    "random": Kind(recipes.random, unbiased=True),
    "ohem": Kind(recipes.ohem, loss_led=True),
    "composer": Kind(recipes.composer, loss_led=True),
    "batch-loss-filter": Kind(recipes.batch_loss_filter, _filtered, loss_led=True, whole_first_epoch=True),
    "biggest-losers": Kind(recipes.biggest_losers, _accumulated, loss_led=True, whole_first_epoch=True),
    "kath18": Kind(recipes.kath18, unbiased=True, scores_gradients=True),
    "infobatch": Kind(recipes.infobatch, _pruned),
    "rho-loss": Kind(recipes.rho_loss, _judged, needs_irreducible=True),
    "thinned": Kind(None, unbiased=True, thins=True),
    "vcas": Kind(recipes.vcas, _controlled, unbiased=True, thins=True),
}
PRUNED = "infobatch+"  # rows are left out before the forward, and of the others some before the backward
TOKEN_KINDS = {
    "full": KINDS["full"],
    "random": Kind(recipes.random, _kept_tokens, unbiased=True),
    "ohem": Kind(recipes.ohem, _kept_tokens, loss_led=True),
    "rho1": Kind(recipes.rho1, _referred, needs_irreducible=True),
    "thinned": KINDS["thinned"],
    "vcas": KINDS["vcas"],
}
METHODS = (*KINDS, *(PRUNED + name for name in ("random", "ohem", "batch-loss-filter", "kath18")))
THINNED = tuple(name for name, kind in KINDS.items() if kind.thins)  # random can keep as many rows as one of them
CUT = "cut"  # sliced with attention="cut"
DEFAULT_METHODS: dict[Unit, tuple[str, ...]] = {
    "row": METHODS[:5],
    "token": ("full", *(name + engine for name in ("random", "ohem", "rho1") for engine in ("", f"@{CUT}"))),
}


@dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Attributes:
        name: One of METHODS, or ``module:callable``.
        engine: one of ENGINES, for tokens also CUT, or ``"plain"`` for ``full``, ``thinned`` and ``vcas``,
            which train with an ordinary loop.
        label: The method as the user wrote it, ``ohem`` or ``ohem@recompute``: its name in every table and file.
        kind: How it chooses among the rows of a batch.
        beside: The method whose share of backpropagated rows it keeps in each seed; empty for the share of the
            settings.

    """

    name: str
    engine: str
    label: str
    kind: Kind
    beside: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it is a callable of the user's."""
        return ":" in self.name

    def made(self, model: nn.Module, losses_fn: LossesFn, budget: Budget, **options: Any) -> SelectiveBackprop | None:
        """Return the method's step; None for an ordinary loop.

        Args:
            model: The model to train.
            losses_fn: Losses per row; with their gradients' norms for a kind that ``scores_gradients``.
            budget: How long the training is, and how much is kept.
            **options: Further keywords of :class:`rowprop.SelectiveBackprop`.

        Raises:
            InvalidInput: A callable of the user's fails or returns something else.

        """
        if self.kind.recipe is None or self.kind.thins:
            return None
        given = self.kind.keywords(budget) | options
        if self.is_own:
            with foreign(f"method {self.label!r} failed when called with (model, losses_fn, {', '.join(given)})"):
                step = self.kind.recipe(model, losses_fn, **given)
        else:
            step = self.kind.recipe(model, losses_fn, **given)
        if not isinstance(step, SelectiveBackprop):
            raise InvalidInput(
                f"method {self.label!r} returned a {type(step).__name__}, but a rowprop.SelectiveBackprop was "
                "needed: return SelectiveBackprop(model, losses_fn, selector, **options)."
            )
        if not self.name.startswith(PRUNED):
            return step
        # Two biases towards hard rows would make the steps too long: measured in benchmarks/results.
        selector = step.selector if self.kind.unbiased else OverAll(step.selector)
        above = {"selector": selector, "schedule": step.schedule}
        return recipes.infobatch(model, losses_fn, **_pruned(budget), **above, **options)


def parse_methods(text: str, engine: str = "sliced", unit: Unit = "row") -> tuple[Method, ...]:
    """Read ``full,ohem,ohem@recompute,module:callable``; ``engine`` is for the methods that name none.

    Methods and engines choose among rows or among tokens, as ``unit`` says.

    Raises:
        InvalidInput: A method or an engine is unknown, a callable cannot be loaded, or a method stands there twice.

    """
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise InvalidInput(f"no method was given; choose some of {', '.join(_names(unit))}.")
    if len(set(labels)) < len(labels):
        raise InvalidInput(f"a method stands twice in {text!r}; name each once.")
    methods = tuple(_parse_method(label, engine, unit) for label in labels)
    for method in methods:
        if method.beside and method.beside not in labels:
            raise InvalidInput(
                f"method {method.label!r} keeps as many rows as {method.beside} of the same seed, but {method.beside} "
                "is not among the methods; name it too."
            )
    return methods


def _names(unit: Unit) -> tuple[str, ...]:
    return METHODS if unit == "row" else tuple(TOKEN_KINDS)


def _parse_method(label: str, default_engine: str, unit: Unit) -> Method:
    home, colon, last = label.rpartition(":")  # a path may hold an @
    last, at, engine = last.partition("@")
    name = home + colon + last
    beside = engine if name == "random" and engine in THINNED else ""
    engine = engine if at and not beside else default_engine
    engines = tuple(ENGINES) if unit == "row" else ("sliced", CUT, "masked")
    among = "" if unit == "row" else " for tokens"
    if engine not in engines:
        raise InvalidInput(f"engine {engine!r} is unknown{among}; the engines are {', '.join(engines)}.")
    if colon:
        keywords = _kept if unit == "row" else _kept_tokens
        return Method(name, engine, label, Kind(load_object(name, "method"), keywords))
    if name not in (names := _names(unit)):
        raise InvalidInput(
            f"method {name!r} is unknown{among}; the methods are {', '.join(names)} and module:callable."
        )
    kind = (KINDS if unit == "row" else TOKEN_KINDS)[name.removeprefix(PRUNED)]
    if kind.recipe is None or kind.thins:
        if at:
            raise InvalidInput(f"method {label!r} names an engine, but {name} is an ordinary loop; write {name}.")
        engine = "plain"
    return Method(name, engine, label, kind, beside)
