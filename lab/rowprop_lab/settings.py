"""The settings of a comparison, checked once. Methods: an ordinary loop, recipes, pruning with one on top, own ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rowprop import recipes
from rowprop.app.lookup import load_object
from rowprop.backprop.pick import Unit
from rowprop.checks import checked_device
from rowprop.engines import ENGINES
from rowprop.errors import InvalidInput, foreign
from rowprop.scoring import LossesFn
from rowprop.selection import OverAll
from rowprop.step.selective import SelectiveBackprop

PRUNED = "infobatch+"  # rows are left out before the forward, and of the others some before the backward
CUT = "cut"  # the engine sliced with attention="cut"
THINNED = "thinned"
PLAIN = "plain"  # plain@METHOD: plain steps on fewer rows, at the cost of that method
DEFAULT_EPOCHS = {"digits": 12, "wordnet": 6}  # by data, elsewhere 8; for a model that predicts tokens 4
DEFAULT_BATCH_ROWS = {"gpt": 16}  # by model, elsewhere 64; three seeds of gpt's default methods take minutes
DEFAULT_LR = {"resnet": 0.1, "textnet": 0.5, "vit": 0.002, "gpt": 0.003}  # by model, elsewhere 0.05
ADAMW = ("vit", "gpt")  # elsewhere SGD with momentum
_USUAL: Any = None  # gives way to the default of data or model


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
DEFAULT_CONTROL: dict[Unit, str] = {"row": f",{PLAIN}@ohem", "token": f",{PLAIN}@random@cut"}


@dataclass(frozen=True)
class Method:
    """One column of a comparison."""

    name: str  # one of METHODS, or module:callable
    engine: str  # one of ENGINES, for tokens also CUT; "plain" for an ordinary loop
    label: str  # the method as the user wrote it, its name in every table and file
    kind: Kind
    beside: str = ""  # the method whose share of rows, or for PLAIN whose cost, it has in each seed; empty: its own

    @property
    def is_own(self) -> bool:
        """Whether it is a callable of the user's."""
        return ":" in self.name

    def made(
        self, model: nn.Module, losses_fn: LossesFn, budget: Mapping[str, Any], **options: Any
    ) -> SelectiveBackprop | None:
        """The method's step, for the training whose ``budget`` holds what recipes take; None for an ordinary loop."""
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

    A method or an engine that is unknown, a callable that cannot be loaded, and a method twice are refused.
    """
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise InvalidInput(f"no method was given; choose some of {', '.join(METHODS[unit])}.")
    if len(set(labels)) < len(labels):
        raise InvalidInput(f"a method stands twice in {text!r}; name each once.")
    methods = tuple(_parse_method(label, unit) for label in labels)
    for method in methods:
        if method.beside and method.beside not in labels:
            keeps = "costs as much as" if method.name == PLAIN else "keeps as many rows as"
            told = f"method {method.label!r} {keeps} {method.beside} of the same seed"
            raise InvalidInput(f"{told}, but {method.beside} is not among the methods; name it too.")
        if method.name == PLAIN and "full" not in labels:
            raise InvalidInput(f"method {method.label!r} has its cost from the time of full; name full too.")
    return methods


def _parse_method(label: str, unit: Unit) -> Method:
    if label.startswith(f"{PLAIN}@"):
        return Method(PLAIN, PLAIN, label, FULL, label.removeprefix(f"{PLAIN}@"))
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
        known = ", ".join((*METHODS[unit], f"{PLAIN}@METHOD"))
        raise InvalidInput(f"method {name!r} is unknown{among}; the methods are {known} and module:callable.")
    if kind.recipe is None:
        if at:
            raise InvalidInput(f"method {label!r} names an engine, but {name} is an ordinary loop; write {name}.")
        engine = PLAIN
    return Method(name, engine, label, kind, beside)


@dataclass(frozen=True)
class Settings:
    """The options of `rowprop compare`, with its defaults."""

    data: str = "digits"
    data_dir: str | None = None
    train_rows: int | None = None
    model: str = _USUAL  # one of MODELS, or module:callable
    methods: str = _USUAL
    keep: float = 0.5  # fraction of rows, under gpt of tokens, kept by the methods that keep a fraction, in (0, 1]
    epochs: int | None = None  # passes over the training rows; by default _USUAL, unless seconds are given
    seconds: float | None = None  # training time of each method instead of epochs; evaluation is not counted
    batch_rows: int = _USUAL  # N, rows per step; a remainder at the end of an epoch is left out
    lr: float = _USUAL  # the peak
    seeds: int = 3  # how many: 0, 1, ... Each fixes the model's start and the data's order, which infobatch draws anew
    device: str = "auto"  # an accelerator, if there is one
    threads: int | None = None  # that torch computes with; None to leave that as it is

    def __post_init__(self) -> None:
        self._settle(model="textnet" if self.data == "wordnet" else "convnet")
        lr, batch_rows = DEFAULT_LR.get(self.model, 0.05), DEFAULT_BATCH_ROWS.get(self.model, 64)
        control = DEFAULT_CONTROL[self.unit] if self.seconds is None else ""  # under seconds full is the control
        self._settle(methods=DEFAULT_METHODS[self.unit] + control, batch_rows=batch_rows, lr=lr)
        if self.seconds is None:
            self._settle(epochs=4 if self.unit == "token" else DEFAULT_EPOCHS.get(self.data, 8))
        if not 0 < self.keep <= 1:
            raise InvalidInput(f"keep is {self.keep}, but a fraction in (0, 1] was needed.")
        if self.epochs is not None and self.seconds is not None:
            raise InvalidInput("epochs and seconds are both given, but a comparison has one budget; give one of them.")
        for name, count in {"epochs": self.epochs, "seeds": self.seeds, "threads": self.threads}.items():
            if count is not None and count < 1:
                raise InvalidInput(f"{name} is {count}, but at least 1 was needed.")
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > cores:  # far more of them end the process
            raise InvalidInput(f"threads is {self.threads}, but this machine has {cores} cores; give 1 to {cores}.")
        if self.batch_rows < 2:
            raise InvalidInput(f"the batch size is {self.batch_rows}, but at least 2 rows were needed to choose from.")
        for name, amount in {"seconds": self.seconds, "lr": self.lr}.items():
            if amount is not None and not 0 < amount < float("inf"):
                raise InvalidInput(f"{name} is {amount}, but a positive number was needed.")
        for method in self.parsed_methods:
            if self.seconds is not None and method.name == PLAIN:
                raise InvalidInput(f"{method.label} has no meaning under seconds, where full has each method's cost.")
            if self.epochs == 1 and method.kind.whole_first_epoch:
                needs = f"{method.label} trains the first epoch whole and needs at least 2"
                raise InvalidInput(f"epochs is 1, but {needs}; raise --epochs, or name other methods.")

    def _settle(self, **usual: Any) -> None:
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @cached_property  # a file that is named is run once
    def parsed_methods(self) -> tuple[Method, ...]:
        """The methods in the order written."""
        return parse_methods(self.methods, self.unit)

    @property
    def unit(self) -> Unit:
        """What is kept or not: tokens by ``gpt``, rows by other models."""
        return "token" if self.model == "gpt" else "row"

    @property
    def optimizer(self) -> str:
        """The optimizer's name on the page."""
        return "AdamW" if self.model in ADAMW else "SGD with momentum"

    def torch_device(self) -> torch.device:
        """The device to train on; one that cannot be used here is refused."""
        if self.device == "auto":
            return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        device = checked_device("compare", self.device)
        if device.type == "meta":
            raise InvalidInput("compare got device='meta', which holds no numbers; cpu or an accelerator was needed.")
        return device

    def binding(self) -> dict[str, Any]:
        """The settings that all runs of a comparison must share; more methods or seeds may join later."""
        return {key: value for key, value in asdict(self).items() if key not in ("methods", "seeds", "device")}
