"""The methods that can be compared: each a selector and, for some, a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from rowprop.errors import InvalidInput
from rowprop.schedule import Schedule
from rowprop.selection.base import Selector
from rowprop.selection.samplers import RandomRows, RankSampler
from rowprop.selection.selectors import LossMass, TopK

METHODS = ("full", "random", "top-k", "composer", "loss-mass")
ENGINES = ("auto", "sliced", "recompute", "masked")
LOSS_LED = ("top-k", "composer", "loss-mass")  # their choices say something about the rows


@dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Attributes:
        name: One of METHODS.
        engine: One of ENGINES, or ``plain`` for ``full``, which trains with an ordinary loop.
        label: As the user wrote it: ``top-k`` or ``top-k@recompute``; names the method in every table and file.

    """

    name: str
    engine: str
    label: str

    def selector(self, keep: float, mass: float) -> Selector | None:
        """Return the method's selector; None for ``full``."""
        match self.name:
            case "random":
                return RandomRows(keep)
            case "top-k":
                return TopK(keep)
            case "composer":
                return RankSampler(keep)
            case "loss-mass":
                return LossMass(mass)
            case _:
                return None

    def schedule(self) -> Schedule | None:
        """Return when the method selects; None where it always does."""
        return Schedule(start=0.5, end=0.9, interrupt=2) if self.name == "composer" else None


def parse_methods(text: str, engine: str = "auto") -> tuple[Method, ...]:
    """Read ``full,top-k,top-k@recompute``; ``engine`` is for the methods that name none.

    Raises:
        InvalidInput: A method or an engine is unknown, or a method stands there twice.

    """
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise InvalidInput(f"no method was given; choose some of {', '.join(METHODS)}.")
    if len(set(labels)) < len(labels):
        raise InvalidInput(f"a method stands twice in {text!r}; name each once.")
    return tuple(_parse_method(label, engine) for label in labels)


def _parse_method(label: str, default_engine: str) -> Method:
    name, at, engine = label.partition("@")
    engine = engine if at else default_engine
    if name not in METHODS:
        raise InvalidInput(f"method {name!r} is unknown; the methods are {', '.join(METHODS)}.")
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is unknown; the engines are {', '.join(ENGINES)}.")
    if name == "full":
        if at:
            raise InvalidInput(f"method {label!r} names an engine, but full is an ordinary loop; write full.")
        engine = "plain"
    return Method(name, engine, label)
