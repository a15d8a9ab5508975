"""One finished run of a comparison: plain values, and their JSON, which is checked when it is read."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rowprop.checks import shown
from rowprop.engines import Unit
from rowprop.errors import InvalidInput


@dataclass(frozen=True)
class Task:
    """The task that models learn, and the figure that tells how well: the words and formats of tables and pages.

    Attributes:
        unit: What has a loss of its own: each row, or each token.
        figure: The field of a run and of a point.
        scale: Factor between the field and the number that is shown.
        sign: Follows the number.
        digits: How many the number has behind the point.
        rises: Whether a larger figure is better.
        best: How the best method is called.

    """

    unit: Unit
    figure: str
    scale: float
    sign: str
    digits: int
    rises: bool
    best: str

    def shown(self, value: float) -> str:
        """Return the figure as people read it."""
        return f"{self.scale * value:.{self.digits}f}{self.sign}"

    @property
    def title(self) -> str:
        """The figure and its sign, as the name of a column or of an axis."""
        return f"{self.figure}, %" if self.sign else self.figure


TASKS: dict[Unit, Task] = {
    "row": Task("row", "accuracy", 100.0, " %", 2, rises=True, best="most accurate"),
    "token": Task("token", "perplexity", 1.0, "", 1, rises=False, best="best"),
}

PHASES: tuple[str, ...] = ("data", "score", "forward", "select", "backward", "optimizer")
SHARE_POINTS = 100


@dataclass(frozen=True)
class Point:
    """The state of a run at the end of an epoch.

    Attributes:
        epoch: Passes over the training rows so far; a fraction if a budget of seconds ended inside an epoch.
        train_s: Training time so far, evaluation left out.
        accuracy: Fraction of test rows classified rightly, or of their tokens predicted rightly.
        loss: Mean training loss over all rows of the epoch's batches, kept or not.
        kept: Fraction of the epoch's rows that were backpropagated; rows left out before their forward count as rows
            of the epoch.
        perplexity: The exponential of the mean loss of the test tokens; None if rows have classes.

    """

    epoch: float
    train_s: float
    accuracy: float
    loss: float
    kept: float
    perplexity: float | None = None


@dataclass(frozen=True)
class LossShare:
    """How much of the training loss the hardest rows hold: ``share[i]`` belongs to the hardest ``i`` percent."""

    epoch: float
    share: list[float]


@dataclass
class Run:
    """The values of one finished run; plain ones only, so that it is its own JSON.

    Where tokens are predicted, the rows below are tokens (those that count), and the four lists have an entry for each
    word of the vocabulary instead of each training row.

    Attributes:
        label: The method as written.
        engine: The engine that really ran, ``plain`` for an ordinary loop.
        seed: The seed of model, order and selection.
        accuracy: Final test accuracy.
        perplexity: Final test perplexity; None if rows have classes.
        train_s: Training time; the sum of ``phases_s``.
        phases_s: Seconds by phase. ``score`` holds separate scoring forwards, and the training of models that only
            score. Under ``sliced`` the training forward scores as well; its time stands under ``forward``.
        steps: Optimizer steps.
        rows_seen: Rows that went through a forward for training; rows of models that only score are not counted.
        rows_backpropagated: Rows whose gradient was asked for; where they are thinned, on average over the blocks.
        curve: One point per epoch.
        loss_shares: The loss's distribution after the first epoch, half-way, and at the end.
        chosen: Per training row, how often a selecting step chose it; empty if the method's kind is not ``loss_led``.
        offered: Per training row, how often a selecting step could have chosen it; empty likewise.
        predicted: Per training row, the final prediction; empty likewise.
        final_losses: Per training row, the final loss; empty likewise.

    """

    label: str
    engine: str
    seed: int
    accuracy: float = 0.0
    perplexity: float | None = None
    train_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0
    rows_seen: int = 0
    rows_backpropagated: int = 0
    curve: list[Point] = field(default_factory=list[Point])
    loss_shares: list[LossShare] = field(default_factory=list[LossShare])
    chosen: list[int] = field(default_factory=list[int])
    offered: list[int] = field(default_factory=list[int])
    predicted: list[int] = field(default_factory=list[int])
    final_losses: list[float] = field(default_factory=list[float])

    @classmethod
    def from_json(cls, content: object, *, num_rows: int, num_classes: int, unit: Unit = "row") -> Run:
        """Rebuild a run from its JSON, checking each field.

        Args:
            content: The value that ``json.loads`` returned.
            num_rows: How many training rows its data have.
            num_classes: How many classes they have, or how many words.
            unit: Whether rows or tokens were trained.

        Raises:
            InvalidInput: A field is missing, unknown, or holds a value that no run can have.

        """
        per_row = (0, num_rows if unit == "row" else num_classes)
        perplexity = _nothing if unit == "row" else _number(1)
        point = POINT | {"perplexity": perplexity}
        row_counts = _list_of(_whole(0), per_row)
        entry = _checked(
            content,
            "run",
            {
                "label": _text,
                "engine": _text,
                "seed": _whole(0),
                "accuracy": _number(0, 1),
                "perplexity": perplexity,
                "train_s": _number(0, open_low=True),
                "phases_s": lambda value, name: _checked(value, name, dict.fromkeys(PHASES, _number(0))),
                "steps": _whole(0),
                "rows_seen": _whole(1),
                "rows_backpropagated": _whole(0),
                "curve": _list_of(lambda value, name: Point(**_checked(value, name, point))),
                "loss_shares": _list_of(lambda value, name: LossShare(**_checked(value, name, LOSS_SHARE))),
                "chosen": row_counts,
                "offered": row_counts,
                "predicted": _list_of(_whole(0, num_classes - 1), per_row),
                "final_losses": _list_of(_number(0), per_row),
            },
        )
        run = cls(**entry)
        for name in ("curve", "loss_shares"):
            if not entry[name]:
                raise InvalidInput(f"{name} is empty, but at least one entry was needed.")
        if len({len(entry[name]) for name in ("chosen", "offered", "predicted", "final_losses")}) > 1:
            raise InvalidInput("chosen, offered, predicted and final_losses differ in length.")
        if any(chosen > offered for chosen, offered in zip(run.chosen, run.offered, strict=True)):
            raise InvalidInput("chosen is more than offered in a row.")
        if not math.isclose(run.train_s, sum(run.phases_s.values()), rel_tol=1e-6):
            raise InvalidInput(f"train_s is {run.train_s}, but phases_s add up to {sum(run.phases_s.values())}.")
        for figure in ("accuracy", "perplexity"):
            final, last = getattr(run, figure), getattr(run.curve[-1], figure)
            if final != last:
                raise InvalidInput(f"{figure} is {final}, but the last point of curve has {last}.")
        return run


Check = Callable[[object, str], Any]
"""Takes a value of a run's JSON and its name; returns the value, or refuses it."""


def _checked(content: object, name: str, fields: Mapping[str, Check]) -> dict[str, Any]:
    """Return an object whose fields are exactly these, each checked."""
    if not isinstance(content, dict):
        raise _wrong(name, content, "an object")
    entry = cast("dict[str, object]", content)
    if entry.keys() != fields.keys():
        missing, unknown = sorted(fields.keys() - entry.keys()), sorted(entry.keys() - fields.keys())
        raise InvalidInput(
            f"{name} lacks {missing[0]!r}." if missing else f"{name} has an unknown field {unknown[0]!r}."
        )
    inside = "" if name == "run" else f"{name}."
    return {field: check(entry[field], inside + field) for field, check in fields.items()}


def _wrong(name: str, value: object, needed: str) -> InvalidInput:
    return InvalidInput(f"{name} is {shown(value)}, but {needed} was needed.")


def _nothing(value: object, name: str) -> None:
    if value is not None:
        raise _wrong(name, value, "null")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a text")
    return value


def _whole(least: int, most: int | None = None) -> Check:
    def check(value: object, name: str) -> int:
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            raise _wrong(
                name, value, f"a whole number, at least {least}" + ("" if most is None else f", at most {most}")
            )
        return value

    return check


def _number(least: float, most: float = sys.float_info.max, *, open_low: bool = False) -> Check:
    def check(value: object, name: str) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not fits or (open_low and value == least):
            bounds = f"{'above' if open_low else 'at least'} {least:g}" + (f", at most {most:g}" if most <= 1 else "")
            raise _wrong(name, value, f"a number, {bounds},")
        return cast("float", value)

    return check


def _list_of(check_entry: Check, lengths: Sequence[int] | None = None) -> Check:
    def check(value: object, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        entries = cast("list[object]", value)
        if lengths is not None and len(entries) not in lengths:
            raise _wrong(f"the length of {name}", len(entries), " or ".join(map(str, lengths)))
        return [check_entry(entry, f"{name}[{place}]") for place, entry in enumerate(entries)]

    return check


POINT: dict[str, Check] = {
    "epoch": _number(0, open_low=True), "train_s": _number(0), "accuracy": _number(0, 1),
    "loss": _number(-sys.float_info.max), "kept": _number(0, 1),
}  # fmt: skip
LOSS_SHARE: dict[str, Check] = {
    "epoch": _number(0, open_low=True), "share": _list_of(_number(0, 1), (SHARE_POINTS + 1,)),
}  # fmt: skip
