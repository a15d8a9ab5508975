"""The methods that can be compared: an ordinary loop, the published recipes, pruning with one on top, own ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from rowprop import recipes
from rowprop.app.lookup import load_object
from rowprop.engines import ENGINES, Unit
from rowprop.errors import InvalidInput, foreign
from rowprop.scoring import LossesFn
from rowprop.selection import OverAll
from rowprop.step.selective import SelectiveBackprop

PRUNED = "infobatch+"  # rows are left out before the forward, and of the others some before the backward
CUT = "cut"  # the engine sliced with attention="cut"
THINNED = "thinned"


@dataclass(frozen=True)
class Kind:
    """How rows are chosen."""

    recipe: Callable[..., object] | None = None  # makes a SelectiveBackprop; None for the ordinary loop
    takes: str = "keep"  # names of the keywords that it takes from a budget
    loss_led: bool = False  # large losses are chosen; rho-loss and rho1 avoid noise, kath18 and infobatch begin blindly
    unbiased: bool = False  # the weights undo the choice
    whole_first_epoch: bool = False
    scores_gradients: bool = False  # rows are chosen by the norm of their gradient instead of by loss
    thins: bool = False  # the ordinary loop trains a model after rowprop.thin

    @property
    def needs_irreducible(self) -> bool:
        """Whether the budget must hold the irreducible losses, which ``rho1`` calls reference."""
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
    """One column of a comparison."""

    name: str  # one of METHODS, or module:callable
    engine: str  # one of ENGINES, for tokens also CUT; "plain" for an ordinary loop
    label: str  # the method as the user wrote it, its name in every table and file
    kind: Kind
    beside: str = ""  # the method whose share of backpropagated rows it keeps in each seed; empty for the settings'

    @property
    def is_own(self) -> bool:
        """Whether it is a callable of the user's."""
        return ":" in self.name

    def made(
        self, model: nn.Module, losses_fn: LossesFn, budget: Mapping[str, Any], **options: Any
    ) -> SelectiveBackprop | None:
        """The method's step, for the training whose ``budget`` holds what recipes take; None for an ordinary loop.

        Raises:
            InvalidInput: A callable of the user's fails or returns something else.
        """
        if self.kind.recipe is None:
            return None
        given = {name: budget[name] for name in self.kind.takes.split()} | options
        failing = f"method {self.label!r} failed when called with (model, losses_fn, {', '.join(given)})"
        with foreign(failing) if self.is_own else nullcontext():
            step = self.kind.recipe(model, losses_fn, **given)
        if not isinstance(step, SelectiveBackprop):
            remedy = "return SelectiveBackprop(model, losses_fn, selector, **options)."
            returned = f"method {self.label!r} returned a {type(step).__name__}"
            raise InvalidInput(f"{returned}, but a rowprop.SelectiveBackprop was needed: {remedy}")
        if not self.name.startswith(PRUNED):
            return step
        # Two biases towards hard rows would make the steps too long: measured in benchmarks/results.
        selector = step.selector if self.kind.unbiased else OverAll(step.selector)
        pruning = {name: budget[name] for name in PRUNES.split()} | {"selector": selector, "schedule": step.schedule}
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
            keeps = f"method {method.label!r} keeps as many rows as {method.beside} of the same seed"
            raise InvalidInput(f"{keeps}, but {method.beside} is not among the methods; name it too.")
    return methods


def _parse_method(label: str, unit: Unit) -> Method:
    home, colon, last = label.rpartition(":")  # a path may hold an @
    last, at, engine = last.partition("@")
    name = home + colon + last
    beside = engine if (name, engine) == ("random", THINNED) else ""
    engine = engine if at and not beside else "sliced"
    engines, among = (ENGINES, "") if unit == "row" else (("sliced", CUT, "masked"), " for tokens")
    if engine not in engines:
        raise InvalidInput(f"engine {engine!r} is unknown{among}; the engines are {', '.join(engines)}.")
    if colon:
        return Method(name, engine, label, Kind(load_object(name, "method"), METHODS[unit]["random"].takes))
    kind = METHODS[unit].get(name)
    if kind is None:
        known = ", ".join(METHODS[unit])
        raise InvalidInput(f"method {name!r} is unknown{among}; the methods are {known} and module:callable.")
    if kind.recipe is None:
        if at:
            raise InvalidInput(f"method {label!r} names an engine, but {name} is an ordinary loop; write {name}.")
        engine = "plain"
    return Method(name, engine, label, kind, beside)
