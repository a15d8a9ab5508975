"""One finished run of a comparison: plain values, so that it is its own JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowprop.engines import Unit


@dataclass(frozen=True)
class Task:
    """What has a loss of its own, and the figure that says how well it is learnt: a field of a run and of a point.

    The figure is shown ``scale`` times as large, with ``digits`` decimals and ``sign``; if it ``rises``, larger is
    better. ``best`` is what the best method is called.
    """

    unit: Unit
    figure: str
    scale: float
    sign: str
    digits: int
    rises: bool
    best: str

    def shown(self, value: float) -> str:
        """The figure as people read it."""
        return f"{self.scale * value:.{self.digits}f}{self.sign}"

    def over_seeds(self, method: Mapping[str, Any]) -> str:
        """The figure of a method of ``results.json``, without its sign: mean ± spread."""
        return with_spread(method[self.figure], self.scale, self.digits)

    @property
    def title(self) -> str:
        """The figure and its sign, as the name of a column or of an axis."""
        return f"{self.figure}, %" if self.sign else self.figure


def with_spread(value: Mapping[str, Any], scale: float, digits: int) -> str:
    """Text "mean ± spread", or the mean alone for one seed, which has no spread."""
    mean = f"{scale * value['mean']:.{digits}f}"
    return mean if value["spread"] is None else f"{mean} ± {scale * value['spread']:.{digits}f}"


TASKS: dict[Unit, Task] = {
    "row": Task("row", "accuracy", 100.0, " %", 2, rises=True, best="most accurate"),
    "token": Task("token", "perplexity", 1.0, "", 1, rises=False, best="best"),
}


def task_of(results: Mapping[str, Any]) -> Task:
    """The task of the content of ``results.json``; earlier versions named no unit: they had rows alone."""
    return TASKS[results["data"].get("unit", "row")]


PHASES: tuple[str, ...] = ("data", "score", "forward", "select", "backward", "optimizer")
SHARE_POINTS = 100


@dataclass(frozen=True)
class Point:
    """The state of a run at the end of an epoch."""

    epoch: float  # passes over the training rows; a fraction if a budget of seconds ended inside an epoch
    train_s: float  # training time so far, evaluation left out
    accuracy: float  # fraction of test rows, or of their tokens, that are predicted rightly
    loss: float  # mean training loss over all rows of the epoch's batches, kept or not
    kept: float  # fraction of all rows of the epoch, also those without a forward, that were backpropagated
    perplexity: float | None = None  # the exponential of the test tokens' mean loss; None if rows have classes


@dataclass(frozen=True)
class LossShare:
    """How much of the training loss the hardest rows hold: ``share[i]`` belongs to the hardest ``i`` percent."""

    epoch: float
    share: list[float]


@dataclass
class Run:
    """The values of one finished run. Where tokens are predicted, the rows below are the tokens that count.

    ``phases_s``: ``score`` holds separate scoring forwards, and the training of models that only score; a forward of
    ``sliced``, which scores as well, stands under ``forward``. The last four are of each training row, and empty for
    tokens and for a method that is not ``loss_led``.
    """

    label: str  # the method as written
    engine: str  # the one that really ran, plain for an ordinary loop
    seed: int  # of model, order and selection
    accuracy: float = 0.0
    perplexity: float | None = None
    train_s: float = 0.0  # the sum of phases_s
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    steps: int = 0  # of the optimizer
    rows_seen: int = 0  # that went through a forward for training, without those of models that only score
    rows_backpropagated: int = 0  # whose gradient was asked for; where they are thinned, on average over the blocks
    curve: list[Point] = field(default_factory=list[Point])  # one per epoch
    loss_shares: list[LossShare] = field(default_factory=list[LossShare])  # after the first epoch, half-way, at the end
    chosen: list[int] = field(default_factory=list[int])  # how often a selecting step chose the row
    offered: list[int] = field(default_factory=list[int])  # how often one could have
    predicted: list[int] = field(default_factory=list[int])
    final_losses: list[float] = field(default_factory=list[float])

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Run:
        """Rebuild a run from its JSON."""
        curve = [Point(**point) for point in content["curve"]]
        shares = [LossShare(**share) for share in content["loss_shares"]]
        given: dict[str, Any] = {**content, "curve": curve, "loss_shares": shares}
        return cls(**given)
