"""The methods that can be compared: an ordinary loop, the published recipes, pruning with one on top, own ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from rowprop import recipes
from rowprop.app.lookup import load_object
from rowprop.errors import InvalidInput, foreign
from rowprop.scoring.losses import LossesFn
from rowprop.selection import OverAll
from rowprop.step.selective import SelectiveBackprop

PRUNED = "infobatch+"  # rows left out before the forward, and of those that come, before the backward
METHODS = (
    "full", "random", "ohem", "composer", "batch-loss-filter", "biggest-losers", "kath18", "infobatch", "rho-loss",
    "infobatch+random", "infobatch+ohem", "infobatch+batch-loss-filter", "infobatch+kath18",
)  # fmt: skip
DEFAULT_METHODS = METHODS[:5]
ENGINES = ("auto", "sliced", "recompute", "masked")
# Their choices say which rows are hard. infobatch alone leaves rows out before any batch, rho-loss avoids wrong labels,
# and kath18 draws all rows alike until its gate opens.
LOSS_LED = ("ohem", "composer", "batch-loss-filter", "biggest-losers")
# Stands for an unknown number of epochs: the first is less than a millionth of the training, and none is the last.
ENDLESS = 1_000_001


@dataclass(frozen=True)
class Budget:
    """What the recipes must know of the training.

    Attributes:
        keep: Fraction of rows to keep, on average for ``biggest-losers``; ``infobatch`` has a rule of its own.
        mass: Share of the batch's loss that ``batch-loss-filter`` keeps.
        epochs: Passes over the training rows; None where seconds are the budget.
        num_rows: M, training rows.
        batch_rows: N, rows per step.

    """

    keep: float
    mass: float
    epochs: int | None
    num_rows: int
    batch_rows: int


@dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Attributes:
        name: One of METHODS, or ``module:callable``.
        engine: One of ENGINES, or ``plain`` for ``full``, which trains with an ordinary loop.
        label: As the user wrote it: ``ohem`` or ``ohem@recompute``; names the method in every table and file.
        own: The user's recipe, where the name is ``module:callable``: takes a model, a ``losses_fn``, ``keep`` and
            further keywords of :class:`rowprop.SelectiveBackprop`, and returns one.

    """

    name: str
    engine: str
    label: str
    own: Callable[..., object] | None = None

    @property
    def chooser(self) -> str:
        """What chooses among the rows of a batch, by name."""
        return self.name.removeprefix(PRUNED)

    @property
    def loss_led(self) -> bool:
        """Whether its choices say which rows are hard."""
        return self.chooser in LOSS_LED

    @property
    def whole_first_epoch(self) -> bool:
        """Whether it trains all rows in the first epoch."""
        return self.chooser in ("batch-loss-filter", "biggest-losers")

    @property
    def needs_irreducible(self) -> bool:
        """Whether the method asks for each row's loss under a model that was not trained on it."""
        return self.name == "rho-loss"

    @property
    def scores_gradients(self) -> bool:
        """Whether rows are chosen by the norm of their gradient instead of by their loss."""
        return self.chooser == "kath18"

    def recipe(
        self,
        model: nn.Module,
        losses_fn: LossesFn,
        budget: Budget,
        *,
        seed: int,
        irreducible: Tensor | None,
        **options: Any,
    ) -> SelectiveBackprop | None:
        """Return the method's step; None for ``full``.

        Args:
            model: What is trained.
            losses_fn: Losses per row; with their gradients' norms where the method ``scores_gradients``.
            budget: How long the training is, and how much is kept.
            seed: Of the order in which a method that prunes draws its epochs.
            irreducible: Loss of each training row under a model that was not trained on it, where the method needs it.
            **options: Further keywords of :class:`rowprop.SelectiveBackprop`.

        """
        keep, epochs = budget.keep, budget.epochs or ENDLESS
        if self.own is not None:
            with foreign(
                f"method {self.label!r} failed when called with (model, losses_fn, keep, {', '.join(options)})"
            ):
                step = self.own(model, losses_fn, keep=keep, **options)
            if not isinstance(step, SelectiveBackprop):
                raise InvalidInput(
                    f"method {self.label!r} returned a {type(step).__name__}, but a rowprop.SelectiveBackprop was "
                    "needed: return SelectiveBackprop(model, losses_fn, selector, **options)."
                )
            return step
        match self.chooser:
            case _ if self.name.startswith(PRUNED):
                alone = replace(self, name=self.chooser)
                above = alone.recipe(model, losses_fn, budget, seed=seed, irreducible=irreducible, **options)
                assert above is not None
                # Two biases towards hard rows would make the steps too long: measured in benchmarks/results.
                biased = not getattr(above.selector, "unbiased", False)
                return recipes.infobatch(
                    model,
                    losses_fn,
                    num_rows=budget.num_rows,
                    epochs=epochs,
                    seed=seed,
                    selector=OverAll(above.selector) if biased else above.selector,
                    schedule=above.schedule,
                    **options,
                )
            case "random":
                return recipes.random(model, losses_fn, keep=keep, **options)
            case "ohem":
                return recipes.ohem(model, losses_fn, keep=keep, **options)
            case "composer":
                return recipes.composer(model, losses_fn, keep=keep, **options)
            case "batch-loss-filter":
                return recipes.batch_loss_filter(model, losses_fn, epochs=epochs, min_loss_perc=budget.mass, **options)
            case "biggest-losers":
                return recipes.biggest_losers(
                    model, losses_fn, batch_rows=budget.batch_rows, epochs=epochs, beta=1 / keep - 1, **options
                )
            case "kath18":
                return recipes.kath18(model, losses_fn, keep=keep, **options)
            case "rho-loss":
                assert irreducible is not None
                return recipes.rho_loss(model, losses_fn, irreducible, keep=keep, **options)
            case "infobatch":
                return recipes.infobatch(
                    model, losses_fn, num_rows=budget.num_rows, epochs=epochs, seed=seed, **options
                )
            case _:
                return None


def parse_methods(text: str, engine: str = "auto") -> tuple[Method, ...]:
    """Read ``full,ohem,ohem@recompute,module:callable``; ``engine`` is for the methods that name none.

    Raises:
        InvalidInput: A method or an engine is unknown, a callable cannot be loaded, or a method stands there twice.

    """
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise InvalidInput(f"no method was given; choose some of {', '.join(METHODS)}.")
    if len(set(labels)) < len(labels):
        raise InvalidInput(f"a method stands twice in {text!r}; name each once.")
    return tuple(_parse_method(label, engine) for label in labels)


def _parse_method(label: str, default_engine: str) -> Method:
    home, colon, last = label.rpartition(":")  # a path may hold an @
    last, at, engine = last.partition("@")
    name = home + colon + last
    engine = engine if at else default_engine
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is unknown; the engines are {', '.join(ENGINES)}.")
    if colon:
        return Method(name, engine, label, load_object(name, "method"))
    if name not in METHODS:
        raise InvalidInput(f"method {name!r} is unknown; the methods are {', '.join(METHODS)} and module:callable.")
    if name == "full":
        if at:
            raise InvalidInput(f"method {label!r} names an engine, but full is an ordinary loop; write full.")
        engine = "plain"
    return Method(name, engine, label)
