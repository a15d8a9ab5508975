"""The engines: ways to obtain the losses of the kept rows with a graph whose backward gives their gradient.

With F = forward, B = backward and k = the kept fraction, a step costs

* ``masked``: F + B. Plain indexing; torch scatters zeros back to all rows. The reference: slow and simple.
* ``recompute``: F + k(F + B). The batch is scored without a graph, then the kept rows run forward again, with
  other dropout masks and BatchNorm statistics of the kept rows.
* ``sliced``: F + kB. One forward; :func:`rowprop.pick` carries the gradient of the kept rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from rowprop.backprop.pick import Attention, BatchNorm, pick
from rowprop.backprop.rules.norms import FEWEST_ROWS
from rowprop.checks import check_choice, wrong
from rowprop.selection.base import Selection

__all__ = ["Engine", "Masked", "Recompute", "Sliced"]


@runtime_checkable
class Engine(Protocol):
    """A way to obtain the losses of the kept rows, with a graph. An object of your own with these members is one."""

    name: ClassVar[str]
    one_forward: ClassVar[bool]
    """Whether the engine works on the graph of a forward over the whole batch; if not, scoring needs no graph."""

    def kept_losses(self, selection: Selection, losses: Tensor | None, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the losses of the kept rows, shape ``(K,)``, with a graph.

        Args:
            selection: The kept rows; its weights are not applied.
            losses: Losses of all rows with their graph, shape ``(N,)``; None or not read without ``one_forward``.
            forward: Runs the model on the given rows of the batch and returns their losses, shape ``(K,)``.
        """
        ...


@dataclass(frozen=True)
class Masked:
    """Plain indexing: the reference for the other engines."""

    name: ClassVar[str] = "masked"
    one_forward: ClassVar[bool] = True

    def kept_losses(self, selection: Selection, losses: Tensor | None, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Index ``losses``."""
        assert losses is not None
        return losses[selection.rows]


@dataclass(frozen=True)
class Recompute:
    """A second forward, on the kept rows.

    Args:
        scoring: The mode of the forward that scores: ``"train"`` (default), the mode in which the model is, so that
            ``recompute`` selects the rows that ``sliced`` would; ``"eval"``, evaluation mode.
    """

    scoring: Literal["train", "eval"] = "train"
    name: ClassVar[str] = "recompute"
    one_forward: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("Recompute", "scoring", self.scoring, ("train", "eval"))

    def kept_losses(self, selection: Selection, losses: Tensor | None, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the model again on the kept rows."""
        return forward(selection.rows)


@dataclass(frozen=True)
class Sliced:
    """:func:`rowprop.pick`: one forward, a backward for the kept rows.

    Args:
        batchnorm: How it treats training BatchNorm: ``"rows"``, ``"exact"``, or None (default), which chooses between
            them at each layer, see :func:`rowprop.pick`.
        attention: How it treats attention where rows are tokens: ``"exact"`` (default) or ``"cut"``.
    """

    batchnorm: BatchNorm = None
    attention: Attention = "exact"
    name: ClassVar[str] = "sliced"
    one_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("Sliced", "batchnorm", self.batchnorm, (None, "rows", "exact"))
        check_choice("Sliced", "attention", self.attention, ("exact", "cut"))

    def kept_losses(self, selection: Selection, losses: Tensor | None, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Pick from ``losses``."""
        assert losses is not None
        return pick(losses, selection, batchnorm=self.batchnorm, attention=self.attention)


ENGINES = {engine.name: engine for engine in (Sliced, Recompute, Masked)}


def engine_of(owner: str, value: object) -> Engine:
    """The engine for a name or an object that ``owner`` was given."""
    if isinstance(value, str) and value in ENGINES:
        return ENGINES[value]()
    if not isinstance(value, Engine) or isinstance(value, type):
        needed = f"one of {', '.join(ENGINES)} was needed, or an object such as rowprop.engines.Sliced('exact')."
        raise wrong(owner, "engine", value, needed)
    return value


# --- where an engine's gradient is not that of plain indexing, in the words of every report ---------------------------

PROJECTED = "BatchNorm's gradient is projected over the kept rows"
POLICIES: dict[BatchNorm, str] = {
    "rows": f"batchnorm='rows': {PROJECTED}",
    None: f"batchnorm=None: {PROJECTED} where these are {FEWEST_ROWS} or more",
}
CUT = "keys and values of tokens that are not kept take no gradient"


def uses_batch_statistics(model: object) -> bool:
    """Whether there is a BatchNorm that takes its statistics from the batch."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def policies_on(model: object, batchnorm: BatchNorm, attention: Attention = "exact") -> dict[str, str]:
    """The engines whose gradient on this model differs from plain indexing by policy, each with the reason."""
    policies = [POLICIES[batchnorm]] if batchnorm in POLICIES and uses_batch_statistics(model) else []
    policies += [f"attention='cut': {CUT}"] * (attention == "cut")
    return {"sliced": "; ".join(policies)} if policies else {}


def second_forward_differs(*, drew: bool, batch_statistics: bool) -> str | None:
    """Why ``recompute`` has a different gradient than plain indexing, as a clause; None if it has the same."""
    parts = ["draws other dropout masks"] if drew else []
    parts += ["takes batch statistics from the kept rows only"] if batch_statistics else []
    return f"the second forward {' and '.join(parts)}" if parts else None
