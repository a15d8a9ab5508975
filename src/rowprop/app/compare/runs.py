"""One finished run of a comparison: plain values, so that it is its own JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowprop.engines import Unit


@dataclass(frozen=True)
class Task:
    """What has a loss of its own, and the figure that says how well it is learnt: a field of a run and of a point.

    The figure is shown ``scale`` times as large, with ``digits`` behind the point and ``sign`` behind it. If it
    ``rises``, larger is better. ``best`` is what the best method is called.
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

    def over_seeds(self, method: Mapping[str, Any]) -> str:
        """Return the figure of a method of ``results.json``, without its sign: mean ± spread."""
        return with_spread(method[self.figure], self.scale, self.digits)

    @property
    def title(self) -> str:
        """The figure and its sign, as the name of a column or of an axis."""
        return f"{self.figure}, %" if self.sign else self.figure


def with_spread(value: Mapping[str, Any], scale: float, digits: int) -> str:
    """Return "mean ± spread", or the mean alone for one seed, which has no spread."""
    mean = f"{scale * value['mean']:.{digits}f}"
    return mean if value["spread"] is None else f"{mean} ± {scale * value['spread']:.{digits}f}"


TASKS: dict[Unit, Task] = {
    "row": Task("row", "accuracy", 100.0, " %", 2, rises=True, best="most accurate"),
    "token": Task("token", "perplexity", 1.0, "", 1, rises=False, best="best"),
}


def task_of(results: Mapping[str, Any]) -> Task:
    """Return the task of the content of ``results.json``; earlier versions named no unit: they had rows alone."""
    return TASKS[results["data"].get("unit", "row")]


PHASES: tuple[str, ...] = ("data", "score", "forward", "select", "backward", "optimizer")
SHARE_POINTS = 100


@dataclass(frozen=True)
class Point:
    """The state of a run at the end of an epoch.

    Attributes:
        epoch: Passes over the training rows so far; a fraction if a budget of seconds ended inside an epoch.
        train_s: Training time so far, evaluation left out.
        accuracy: Fraction of test rows, or of their tokens, that are predicted rightly.
        loss: Mean training loss over all rows of the epoch's batches, kept or not.
        kept: Fraction of the epoch's rows that were backpropagated; of all, also those without a forward.
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
    """The values of one finished run. Where tokens are predicted, the rows below are the tokens that count.

    Attributes:
        label: The method as written.
        engine: The engine that really ran, ``plain`` for an ordinary loop.
        seed: The seed of model, order and selection.
        accuracy, perplexity: As those of the last point.
        train_s: Training time; the sum of ``phases_s``.
        phases_s: Seconds by phase. ``score`` holds separate scoring forwards, and the training of models that only
            score. Under ``sliced`` the training forward scores as well; its time stands under ``forward``.
        steps: Optimizer steps.
        rows_seen: Rows that went through a forward for training; rows of models that only score are not counted.
        rows_backpropagated: Rows whose gradient was asked for; where they are thinned, on average over the blocks.
        curve: One point per epoch.
        loss_shares: The loss's distribution after the first epoch, half-way, and at the end.
        chosen, offered: How often a selecting step chose each training row, or could have. These two and the next two
            are empty for tokens, and if the method's kind is not ``loss_led``.
        predicted, final_losses: The final prediction and loss of each training row.
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
    def from_json(cls, content: Mapping[str, Any]) -> Run:
        """Rebuild a run from its JSON."""
        lists: dict[str, Any] = {
            "curve": [Point(**point) for point in content["curve"]],
            "loss_shares": [LossShare(**share) for share in content["loss_shares"]],
        }
        return cls(**{**content, **lists})
