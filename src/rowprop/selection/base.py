"""A selection, the context that selectors and scorers may look at, and the contract of a selector."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from rowprop.checks import (
    check_callable,
    check_choice,
    check_function,
    check_generator,
    check_kind,
    check_tensor,
    check_whole,
    check_within,
    checked_device,
    is_number,
    is_vector,
    shown,
    takes,
    wrong,
)
from rowprop.errors import InvalidInput
from rowprop.scoring import described

Field = Literal["progress", "ids", "classes", "history", "positions"]

_FIELDS: dict[str, str] = {  # the kind of each, and how a call gets it
    "progress": "the fraction of the training that is done; give SelectiveBackprop total_steps or each call its "
    "progress, or a selector Context(progress=0.5)",
    "ids": "int64 of shape (N,); pass ids=..., WithIds(dataset) yields them",
    "classes": "int64 of shape (N,); pass classes=..., the targets of a classifier",
    "history": "the memory of rows by id; give SelectiveBackprop history=LossHistory()",
    "positions": "int64 of shape (N,); they come with the ids in a step with unit='token'",
}


@dataclass(frozen=True, eq=False)
class Context:
    """What a selector or a scorer may use besides its first argument; a step makes one for each call.

    Args:
        progress: Fraction of the training that is done, in [0, 1].
        ids: Which row of the data each row is, shape ``(N,)``, int64.
        classes: The class of each row, shape ``(N,)``, int64.
        generator: Source of randomness, on the device of the scores. None: torch's own.
        history: A :class:`rowprop.history.LossHistory`, the memory of rows by id.
        positions: Where rows are tokens, the place of each in its row, shape ``(N,)``, int64; ``ids`` and ``classes``
            are then those of the tokens' rows.

    Example:
        >>> from rowprop.schedule import Ramp
        >>> from rowprop.selection import Context
        >>> TopK(Ramp(1.0, 0.5))(torch.tensor([0.1, 2.0, 0.5, 0.4]), Context(progress=1.0)).rows.tolist()
        [1, 2]
    """

    progress: float | None = None
    ids: Tensor | None = None
    classes: Tensor | None = None
    generator: torch.Generator | None = None
    history: Any = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        if self.progress is not None:
            check_within("Context", "progress", self.progress, "[0, 1]", "; half of the training is progress=0.5")
        for name, values in self.columns.items():
            if not is_vector(values):
                raise InvalidInput(f"{name} came as {described(values)} but int64 of shape (N,) was needed.")
        check_generator("Context", self.generator)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The known fields with one number per row, by name."""
        columns = {"ids": self.ids, "classes": self.classes, "positions": self.positions}
        return {name: values for name, values in columns.items() if values is not None}

    def need(self, field: Field, who: str) -> Any:
        """Return a field that ``who`` cannot do without, or raise :class:`rowprop.InvalidInput`."""
        if not isinstance(field, str) or field not in _FIELDS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong("Context.need", "field", field, f"one of {', '.join(_FIELDS)} was needed.")
        value = getattr(self, field)
        if value is None:
            raise InvalidInput(f"a call without {field} was made but {who} needs {field}, {_FIELDS[field]}.")
        return value

    def at(self, rows: Tensor) -> Context:
        """Return the context of some of the rows, shape ``(K,)``, int64."""
        if not is_vector(rows):
            raise InvalidInput(f"Context.at got {described(rows)} but row indices were needed, shape (K,), int64.")
        try:
            columns = {name: values[rows.to(values.device)] for name, values in self.columns.items()}
        except IndexError as error:
            raise InvalidInput(f"Context.at got a row that the batch has not ({error}).") from error
        return replace(self, **cast("Any", columns)) if columns else self


NOTHING = Context()  # of a selector that is called with scores alone


def check_context(owner: str, context: object) -> None:
    """Refuse a value that is no context."""
    check_kind(owner, "context", context, Context, "a rowprop.selection.Context was needed.")


def check_fits(context: Context, num_rows: int) -> None:
    """Refuse ids or classes of another number of rows."""
    for name, values in context.columns.items():
        if values.numel() != num_rows:
            needed = f"int64 of shape ({num_rows},), one for each row of the batch, was needed."
            raise InvalidInput(f"{name} came as {described(values)} but {needed}")


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The kept rows of a batch, and how much each row counts.

    The selected loss is ``(losses[rows] * weights).sum()``. It is checked where it is made; on CUDA and in a compiled
    function by a device-side assertion, without a sync.

    Args:
        rows: Kept rows, shape ``(K,)``, int64, ascending and without repeats, ``0 <= K <= N``.
        weights: One factor per kept row, shape ``(K,)``, a floating dtype, finite, on the device of ``rows``.
        num_rows: N, the number of rows the selection was made from.
        even: Whether each weight is ``1/K``. Default False.
        unbiased: Whether the weighted sum of any numbers of the rows is, on average over the draws, their mean over
            all N. Default False; taken on trust.
    """

    rows: Tensor
    weights: Tensor
    num_rows: int
    even: bool = False
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_whole("Selection", "num_rows", self.num_rows, 0)
        for name in ("even", "unbiased"):
            check_choice("Selection", name, getattr(self, name), (False, True))
        check_tensor("Selection", "rows", self.rows)
        check_tensor("Selection", "weights", self.weights)
        if self.rows.dim() != 1 or self.rows.dtype != torch.int64 or self.rows.layout != torch.strided:
            needed = "row indices were needed, shape (K,), int64; of a mask, `mask.nonzero().squeeze(1)`."
            raise InvalidInput(f"Selection got {described(self.rows, 'rows')} but {needed}")
        if self.rows.numel() > self.num_rows:
            needed = "each row was needed once at most; add up the weights of rows that repeat."
            raise InvalidInput(f"Selection got {self.rows.numel()} rows of num_rows={self.num_rows} but {needed}")
        plain = self.weights.is_floating_point() and self.weights.layout == torch.strided
        if self.weights.shape != self.rows.shape or not plain:
            needed = f"a floating number per row was needed, shape ({self.rows.numel()},)"
            came = described(self.weights, "weights")
            raise InvalidInput(f"Selection got {came} but {needed}; Selection.mean(rows, num_rows) gives each row 1/K.")
        if self.weights.device != self.rows.device:
            devices = f"weights on {self.weights.device} but its rows are on {self.rows.device}"
            raise InvalidInput(f"Selection got {devices}; move one of them.")
        _check_numbers(self)

    def __repr__(self) -> str:
        return f"Selection({self.num_kept} of {self.num_rows} rows, on {self.rows.device})"

    @classmethod
    def mean(cls, rows: Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> Selection:
        """Keep ``rows`` (ascending, possibly none), each with weight ``1/K``; ``rows`` are checked as ever."""
        check_tensor("Selection", "rows", rows)
        return cls(rows, _even(rows, dtype), num_rows, even=True)

    @classmethod
    def everything(
        cls, num_rows: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Selection:
        """Keep all N rows, each with weight ``1/N``."""
        check_whole("Selection.everything", "num_rows", num_rows, 0)
        if num_rows >= 2**60:  # the size in bytes overflows in torch
            raise wrong("Selection.everything", "num_rows", num_rows, "a whole number below 2**60 was needed.")
        rows = torch.arange(num_rows, device=checked_device("Selection.everything", device))
        return cls(rows, _even(rows, dtype), num_rows, even=True, unbiased=True)

    @property
    def num_kept(self) -> int:
        """K, known without a sync."""
        return self.rows.numel()

    @property
    def is_everything(self) -> bool:
        """Whether no row was dropped (rows are unique, so K = N is enough)."""
        return self.num_kept == self.num_rows


def unread(rows: Tensor, weights: Tensor, num_rows: int, *, even: bool = False, unbiased: bool = False) -> Selection:
    """Make a selection that is valid by construction, without checking its numbers."""
    selection = object.__new__(Selection)
    values = {"rows": rows, "weights": weights, "num_rows": num_rows, "even": even, "unbiased": unbiased}
    for name, value in values.items():
        object.__setattr__(selection, name, value)
    return selection


def mean_unread(rows: Tensor, num_rows: int, dtype: torch.dtype, *, unbiased: bool = False) -> Selection:
    """As :func:`unread`, with weight ``1/K`` for each row."""
    return unread(rows, _even(rows, dtype), num_rows, even=True, unbiased=unbiased)


def _even(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(cast("object", dtype), torch.dtype) or not dtype.is_floating_point:
        raise wrong("Selection", "dtype", dtype, "a floating dtype was needed.")
    return torch.full((rows.numel(),), 1.0 / max(1, rows.numel()), dtype=dtype, device=rows.device)


def _check_numbers(selection: Selection) -> None:
    rows, weights, num_rows = selection.rows, selection.weights, selection.num_rows
    if rows.numel() == 0 or rows.is_meta:
        return
    ascending = (rows[1:] > rows[:-1]).all()
    right = ascending & (rows[0] >= 0) & (rows[-1] < num_rows) & weights.isfinite().all()
    if selection.even:  # 1/K, except for rounding
        right = right & ((weights * weights.numel() - 1).abs() <= 2 * torch.finfo(weights.dtype).eps).all()
    if rows.device.type == "cuda" or torch.compiler.is_compiling():
        message = "rowprop.Selection needs ascending rows in range, none of them twice, and finite weights, 1/K if even"
        cast("Any", torch)._assert_async(right, message)
    elif not bool(right):
        raise InvalidInput(f"Selection got {_flaw(rows, weights, num_rows)}")


def _flaw(rows: Tensor, weights: Tensor, num_rows: int) -> str:
    """The first invalid number, and how to fix it."""
    listed = cast("list[int]", cast("Any", rows).tolist())
    for before, row in itertools.pairwise([-1, *listed]):
        if not before < row < num_rows:
            needed = f"rows 0 to {num_rows - 1} were needed, ascending and each once"
            return f"row {row} after {before} but {needed}; sort rows with their weights, and add up those of repeats."
    for row, weight in zip(listed, cast("list[float]", weights.tolist()), strict=True):
        if not is_number(weight):
            return f"the weight {weight} for row {row} but finite weights were needed; look at the scores."
    return f"even=True with weights that are not all 1/{rows.numel()}; Selection.mean(rows, num_rows) makes them so."


@runtime_checkable
class Selector(Protocol):
    """Decides which rows are kept, from one score per row and the context of the call; any such function is one.

    A selector with state is :class:`Stateful`; one that knows its fraction beforehand may be :class:`KnownKeep`.
    """

    def __call__(self, scores: Tensor, context: Context, /) -> Selection:
        """Return the selection for ``scores`` of shape ``(N,)``, larger = more wanted."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A part that keeps state from one step to the next."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next call depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue where ``state`` was taken."""
        ...


@runtime_checkable
class KnownKeep(Protocol):
    """A selector that knows before scoring which fraction of the rows it keeps."""

    def keep_at(self, context: Context, /) -> float | None:
        """Return the fraction, in (0, 1], None where the scores decide; a batch that is kept whole is not scored."""
        ...


def keep_of(selector: object, context: Context) -> float | None:
    """The fraction that a selector will keep, if it is known before scoring."""
    return selector.keep_at(context) if isinstance(selector, KnownKeep) else None


@dataclass(frozen=True)
class OfScores:
    """The selector that a function of scores alone becomes."""

    function: Callable[[Tensor], Selection]

    def __call__(self, scores: Tensor, context: Context = NOTHING) -> Selection:
        """Select by the function."""
        return self.function(scores)


def selector(function: Callable[[Tensor], Selection]) -> Selector:
    """Make a selector of a function of the scores alone, shape ``(N,)``; also a decorator.

    Example:
        >>> from rowprop.selection import Context
        >>> hardest = selector(lambda scores: Selection.mean(scores.argmax()[None], scores.numel()))
        >>> hardest(torch.tensor([0.1, 2.0, 0.5]), Context()).rows.tolist()
        [1]
    """
    check_function("selector", "function", function, 1, "a function of the scores was needed.")
    if isinstance(function, Stateful):
        needed = "a function that remembers nothing was needed; give this one a second argument, the context."
        raise wrong("selector", "function", function, needed)
    return OfScores(function)


def check_selector(owner: str, value: object) -> None:
    """Refuse a value that is not called with scores and a context."""
    check_callable(owner, "selector", value, "a selector was needed; give an instance, e.g. TopK(keep=0.5).")
    if not takes(value, 2):
        needed = "a function of scores and a context was needed; rowprop.selector(f) makes one of a function of scores."
        raise InvalidInput(f"{owner} got selector={shown(value)}, which takes other arguments, but {needed}")


def asked(selector: Selector, scores: Tensor, context: Context) -> Selection:
    """Have a selector select, and see that its selection is of these scores."""
    chosen = cast("object", selector(scores, context))
    if not isinstance(chosen, Selection) or chosen.num_rows != scores.numel():
        size = f" made from {chosen.num_rows} rows" if isinstance(chosen, Selection) else ""
        needed = f"a Selection made from {scores.numel()} rows, one for each score, was needed"
        raise InvalidInput(f"The selector returned a {type(chosen).__name__}{size} but {needed}.")
    if chosen.rows.device != scores.device:
        raise InvalidInput(f"The selector returned a Selection on {chosen.rows.device} for scores on {scores.device}.")
    return chosen
