"""The methods that can be compared: an ordinary loop, the published recipes, pruning with one on top, own ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rowprop import recipes
from rowprop.app.lookup import load_object
from rowprop.engines import ENGINES, Unit
from rowprop.errors import InvalidInput, foreign
from rowprop.scoring import LossesFn
from rowprop.selection import OverAll
from rowprop.step.selective import SelectiveBackprop

ENDLESS = 1_000_001
"""Stands for an unknown number of epochs: the first is less than a millionth of the training, and none is the last."""
PRUNED = "infobatch+"  # rows are left out before the forward, and of the others some before the backward
CUT = "cut"  # the engine sliced with attention="cut"
THINNED = "thinned"


@dataclass(frozen=True)
class Budget:
    """The training that a method is made for: what recipes take as keywords.

    Attributes:
        unit: ``"row"`` or ``"token"``.
        keep: Fraction of rows to keep, on average for ``biggest-losers``.
        epochs: Passes over the training rows; ``ENDLESS`` under a budget of seconds.
        num_rows: M, training rows.
        batch_rows: N, rows per step.
        seed: Of the order in which a method that prunes draws its epochs.
        irreducible: Loss of each training row, or of each of its tokens, under a model that was not trained on it,
            shape ``(M,)`` or ``(M, T)``; None for methods that do not need it.
    """

    unit: Unit
    keep: float
    epochs: int
    num_rows: int
    batch_rows: int
    seed: int
    irreducible: Tensor | None = None

    @property
    def beta(self) -> float:
        """The power at which ``biggest-losers`` keeps ``keep`` on average."""
        return 1 / self.keep - 1

    @property
    def reference(self) -> Tensor | None:
        """The irreducible losses, as ``rho1`` calls them."""
        return self.irreducible

    def keywords(self, names: str) -> dict[str, Any]:
        """Return these values by name."""
        return {name: getattr(self, name) for name in names.split()}


@dataclass(frozen=True)
class Kind:
    """How rows are chosen.

    Attributes:
        recipe: Takes a model, a ``losses_fn``, the keywords below and further ones of
            :class:`rowprop.SelectiveBackprop`, and returns one. None for the ordinary loop.
        takes: Names of the keywords that it takes from a budget.
        loss_led: Whether the rows with large losses are chosen. ``infobatch`` leaves rows out before any batch,
            ``rho-loss`` and ``rho1`` avoid what nobody can learn, ``kath18`` draws all rows alike until its gate opens.
        unbiased: Whether the weights undo the choice.
        whole_first_epoch: Whether the first epoch trains all rows.
        scores_gradients: Whether rows are chosen by the norm of their gradient instead of by loss.
        thins: Whether the ordinary loop trains a model after :func:`rowprop.thin`.
    """

    recipe: Callable[..., object] | None = None
    takes: str = "keep"
    loss_led: bool = False
    unbiased: bool = False
    whole_first_epoch: bool = False
    scores_gradients: bool = False
    thins: bool = False

    @property
    def needs_irreducible(self) -> bool:
        """Whether the budget must hold the irreducible losses."""
        return "irreducible" in self.takes or "reference" in self.takes


FULL, THINS = Kind(), Kind(unbiased=True, thins=True)
PRUNES = "epochs num_rows seed"
SINGLE = {
    "full": FULL,
    "random": Kind(recipes.random, unbiased=True),
    "ohem": Kind(recipes.ohem, loss_led=True),
    "composer": Kind(recipes.composer, loss_led=True),
    "batch-loss-filter": Kind(recipes.batch_loss_filter, "epochs", loss_led=True, whole_first_epoch=True),
    "biggest-losers": Kind(recipes.biggest_losers, "epochs batch_rows beta", loss_led=True, whole_first_epoch=True),
    "kath18": Kind(recipes.kath18, unbiased=True, scores_gradients=True),
    "infobatch": Kind(recipes.infobatch, PRUNES),
    "rho-loss": Kind(recipes.rho_loss, "keep irreducible"),
    THINNED: THINS,
}
METHODS: dict[Unit, dict[str, Kind]] = {
    "row": SINGLE | {PRUNED + name: SINGLE[name] for name in ("random", "batch-loss-filter", "kath18")},
    "token": {
        "full": FULL,
        "random": Kind(recipes.random, "keep unit", unbiased=True),
        "ohem": Kind(recipes.ohem, "keep unit", loss_led=True),
        "rho1": Kind(recipes.rho1, "keep reference"),
        THINNED: THINS,
    },
}
DEFAULT_METHODS: dict[Unit, str] = {
    "row": "full,random,ohem,composer,batch-loss-filter",
    "token": "full,random,random@cut,ohem,ohem@cut,rho1,rho1@cut",
}


@dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Attributes:
        name: One of METHODS, or ``module:callable``.
        engine: One of ENGINES, for tokens also CUT; ``"plain"`` for ``full`` and ``thinned``, an ordinary loop.
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
        if self.kind.recipe is None:
            return None
        given = budget.keywords(self.kind.takes) | options
        if not self.is_own:
            step = self.kind.recipe(model, losses_fn, **given)
        else:
            with foreign(f"method {self.label!r} failed when called with (model, losses_fn, {', '.join(given)})"):
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
        pruning = budget.keywords(PRUNES) | {"selector": selector, "schedule": step.schedule}
        return recipes.infobatch(model, losses_fn, **pruning, **options)


def parse_methods(text: str, unit: Unit = "row") -> tuple[Method, ...]:
    """Read ``full,ohem,ohem@recompute,module:callable``, methods that choose among rows or among tokens.

    Raises:
        InvalidInput: A method or an engine is unknown, a callable cannot be loaded, or a method stands there twice.
    """
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise InvalidInput(f"no method was given; choose some of {', '.join(METHODS[unit])}.")
    if len(set(labels)) < len(labels):
        raise InvalidInput(f"a method stands twice in {text!r}; name each once.")
    methods = tuple(_parse_method(label, unit) for label in labels)
    for method in methods:
        if method.beside and method.beside not in labels:
            raise InvalidInput(
                f"method {method.label!r} keeps as many rows as {method.beside} of the same seed, but {method.beside} "
                "is not among the methods; name it too."
            )
    return methods


def _parse_method(label: str, unit: Unit) -> Method:
    home, colon, last = label.rpartition(":")  # a path may hold an @
    last, at, engine = last.partition("@")
    name = home + colon + last
    beside = engine if (name, engine) == ("random", THINNED) else ""
    engine = engine if at and not beside else "sliced"
    engines = tuple(ENGINES) if unit == "row" else ("sliced", CUT, "masked")
    among = "" if unit == "row" else " for tokens"
    if engine not in engines:
        raise InvalidInput(f"engine {engine!r} is unknown{among}; the engines are {', '.join(engines)}.")
    if colon:
        takes = "keep" if unit == "row" else "keep unit"
        return Method(name, engine, label, Kind(load_object(name, "method"), takes))
    kind = METHODS[unit].get(name)
    if kind is None:
        raise InvalidInput(
            f"method {name!r} is unknown{among}; the methods are {', '.join(METHODS[unit])} and module:callable."
        )
    if kind.recipe is None:
        if at:
            raise InvalidInput(f"method {label!r} names an engine, but {name} is an ordinary loop; write {name}.")
        engine = "plain"
    return Method(name, engine, label, kind, beside)
