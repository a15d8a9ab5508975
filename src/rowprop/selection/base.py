"""A selection, the context that selectors and scorers may look at, and the contract of a selector."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from rowprop.checks import (
    check_flag,
    check_floating,
    check_generator,
    check_tensor,
    check_whole,
    checked_device,
    is_number,
    shown,
    signature_of,
    takes,
)
from rowprop.errors import InvalidInput
from rowprop.scoring.losses import described

Field = Literal["progress", "ids", "classes", "history", "positions"]

# The kind of each field, and how a call gets it.
_FIELDS: dict[str, tuple[str, str]] = {
    "progress": (
        "the fraction of the training that is done",
        "give SelectiveBackprop total_steps or each call its progress; called directly, a selector takes "
        "Context(progress=0.5)",
    ),
    "ids": ("int64 of shape (N,)", "pass ids=..., WithIds(dataset) yields them"),
    "classes": ("int64 of shape (N,)", "pass classes=..., they are the targets of a classifier"),
    "history": ("the memory of rows by id", "give SelectiveBackprop history=LossHistory()"),
    "positions": ("int64 of shape (N,)", "they come with the ids in a step with unit='token'"),
}


@dataclass(frozen=True, eq=False)
class Context:
    """All that a selector or a scorer may look at beside its first argument.

    :class:`rowprop.SelectiveBackprop` makes it for each call. A part that cannot do without a field asks for it with
    :meth:`need`; where a selector is called directly, ``selector(scores, Context(generator=generator))`` gives it one.

    Args:
        progress: Fraction of the training that is done, in [0, 1]. Default None: unknown.
        ids: Which row of the data each row is, shape ``(N,)``, int64. Default None: unknown.
        classes: The class of each row, shape ``(N,)``, int64. Default None: unknown.
        generator: Source of randomness, on the device of the scores. Default None: torch's own.
        history: A :class:`rowprop.history.LossHistory`, the memory of rows by id. Default None: there is none.
        positions: The place of each token in its row, shape ``(N,)``, int64, where rows are tokens; ``ids`` and
            ``classes`` are then those of the tokens' rows. Default None: rows are whole, or nobody gave ids.

    Raises:
        InvalidInput: A field is not of this kind.

    Example:
        >>> from rowprop.schedule import Ramp
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
        if self.progress is not None and (not is_number(self.progress) or not 0 <= self.progress <= 1):
            raise InvalidInput(
                f"progress is {shown(self.progress)} but a fraction of the training in [0, 1] was needed."
            )
        if self.ids is not None:
            _check_ids("ids", self.ids)
        if self.classes is not None:
            _check_ids("classes", self.classes)
        if self.positions is not None:
            _check_ids("positions", self.positions)
        check_generator("Context", self.generator)

    def need(self, field: Field, who: str) -> Any:
        """Return a field that ``who`` cannot do without.

        Raises:
            InvalidInput: The call had none, or a context has no such field.
        """
        if not isinstance(field, str) or field not in _FIELDS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"Context.need got field={shown(field)} but one of {', '.join(_FIELDS)} was needed.")
        value = getattr(self, field)
        if value is None:
            kind, advice = _FIELDS[field]
            raise InvalidInput(f"a call without {field} was made but {who} needs {field}, {kind}; {advice}.")
        return value

    def at(self, rows: Tensor) -> Context:
        """Return the context of some of the rows, shape ``(K,)``, int64.

        Raises:
            InvalidInput: ``rows`` is something else, or (on the CPU) ids or classes have no such row.
        """
        if not _is_whole(rows):
            raise InvalidInput(f"Context.at got {described(rows)} but row indices were needed, shape (K,), int64.")
        if not self.columns:
            return self
        try:
            columns = {name: values[rows.to(values.device)] for name, values in self.columns.items()}
        except IndexError as error:
            raise InvalidInput(f"Context.at got a row that the batch has not ({error}); index its own rows.") from error
        return replace(self, **cast("Any", columns))

    @property
    def columns(self) -> dict[str, Tensor]:
        """The fields that have a number for each row, by name; those that are known."""
        columns = {"ids": self.ids, "classes": self.classes, "positions": self.positions}
        return {name: values for name, values in columns.items() if values is not None}


NOTHING = Context()
"""The context of a selector that is called directly with scores alone."""


def check_context(owner: str, context: object) -> None:
    """Refuse a value that is no context."""
    if not isinstance(context, Context):
        raise InvalidInput(
            f"{owner} got context={shown(context)}, a {type(context).__name__}, but a rowprop.selection.Context was "
            "needed; Context(generator=generator) makes one."
        )


def check_fits(context: Context, num_rows: int) -> None:
    """Refuse ids or classes of another number of rows."""
    for name, values in (("ids", context.ids), ("classes", context.classes), ("positions", context.positions)):
        if values is not None and values.numel() != num_rows:
            raise InvalidInput(
                f"{name} came as {described(values)} but int64 of shape ({num_rows},), one for each row of the batch, "
                "was needed."
            )


def _is_whole(values: object) -> bool:
    return isinstance(values, Tensor) and values.dim() == 1 and values.dtype == torch.int64 and not values.is_meta


def _check_ids(name: str, values: object) -> None:
    if not _is_whole(values):
        raise InvalidInput(
            f"{name} came as {described(values)} but int64 of shape (N,), one for each row of the batch, was needed."
        )


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The kept rows of a batch, and how much each row counts.

    The selected loss is ``(losses[rows] * weights).sum()``; a plain mean over the kept rows has weights ``1/K``.

    The constructor checks it, once, and all code behind it trusts it. Shapes, dtypes and devices are checked
    everywhere. The numbers (rows ascend, none repeats, all are in range, weights are finite) are read on the CPU. On
    CUDA, and in a compiled function, the device checks them and the host does not wait: a wrong selection ends there in
    a device-side assertion that names the reason. On other accelerators the host reads them, and waits. The selectors
    of this package make selections that are right by construction; nobody reads their numbers.

    Args:
        rows: Kept rows, shape ``(K,)``, int64, ascending and without repeats, ``0 <= K <= N``. None are kept where a
            draw or a threshold found none, or where the selection is one rank's part of a larger one.
        weights: One factor per kept row, shape ``(K,)``, a floating dtype, finite, on the device of ``rows``.
        num_rows: N, the number of rows the selection was made from.
        even: Whether each weight is ``1/K``, so that the weighted sum is the mean over the kept rows. Default False.
        unbiased: Whether the expected weighted sum of any numbers of the rows is their mean over all N, the
            expectation being over the draw. Default False.

    Raises:
        InvalidInput: One of these is not so (``unbiased`` is taken on trust). To mend rows in any order, sort them with
            their weights; to mend repeated rows, add up their weights.
    """

    rows: Tensor
    weights: Tensor
    num_rows: int
    even: bool = False
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_whole("Selection", "num_rows", self.num_rows, 0)
        check_flag("Selection", "even", self.even)
        check_flag("Selection", "unbiased", self.unbiased)
        _check_rows(self.rows, self.num_rows)
        check_tensor("Selection", "weights", self.weights)
        if self.weights.shape != self.rows.shape or not self.weights.is_floating_point():
            raise InvalidInput(
                f"Selection got weights of shape {tuple(self.weights.shape)} and dtype {self.weights.dtype} for "
                f"{self.rows.numel()} rows but a floating number per row was needed, shape ({self.rows.numel()},); "
                "Selection.mean(rows, num_rows) gives each row 1/K."
            )
        if self.weights.device != self.rows.device:
            raise InvalidInput(
                f"Selection got weights on {self.weights.device} but its rows are on {self.rows.device}; move one of "
                "them."
            )
        _check_numbers(self)

    def __repr__(self) -> str:
        return f"Selection({self.num_kept} of {self.num_rows} rows, on {self.rows.device})"

    @classmethod
    def mean(cls, rows: Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> Selection:
        """Keep ``rows`` (ascending, possibly none), each with weight ``1/K``; ``rows`` are checked as ever."""
        check_whole("Selection", "num_rows", num_rows, 0)
        check_floating("Selection.mean", dtype)
        _check_rows(rows, num_rows)
        return cls(rows, _even(rows, dtype), num_rows, even=True)

    @classmethod
    def everything(
        cls, num_rows: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Selection:
        """Keep all N rows, each with weight ``1/N``."""
        check_whole("Selection.everything", "num_rows", num_rows, 0)
        check_floating("Selection.everything", dtype)
        rows = torch.arange(num_rows, device=checked_device("Selection.everything", device))
        return mean_unread(rows, num_rows, dtype, unbiased=True)

    @property
    def num_kept(self) -> int:
        """K, known without asking the device."""
        return self.rows.numel()

    @property
    def is_everything(self) -> bool:
        """Whether no row was dropped (rows are unique and ascending, so K = N says it all)."""
        return self.num_kept == self.num_rows


def unread(rows: Tensor, weights: Tensor, num_rows: int, *, even: bool = False, unbiased: bool = False) -> Selection:
    """Make a selection that is right by construction, so that nobody has to read its numbers.

    For rows that were sorted, counted or found by this package. Rows of unknown origin go through :class:`Selection`.
    """
    selection = object.__new__(Selection)
    object.__setattr__(selection, "rows", rows)
    object.__setattr__(selection, "weights", weights)
    object.__setattr__(selection, "num_rows", num_rows)
    object.__setattr__(selection, "even", even)
    object.__setattr__(selection, "unbiased", unbiased)
    return selection


def mean_unread(rows: Tensor, num_rows: int, dtype: torch.dtype, *, unbiased: bool = False) -> Selection:
    """As :func:`unread`, with weight ``1/K`` for each row."""
    return unread(rows, _even(rows, dtype), num_rows, even=True, unbiased=unbiased)


def _even(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((rows.numel(),), 1.0 / max(1, rows.numel()), dtype=dtype, device=rows.device)


def _check_rows(rows: object, num_rows: int) -> None:
    check_tensor("Selection", "rows", rows)
    rows = cast("Tensor", rows)
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise InvalidInput(
            f"Selection got rows of shape {tuple(rows.shape)} and dtype {rows.dtype} but row indices were needed, "
            "shape (K,), int64; turn a mask into indices with `mask.nonzero().squeeze(1)`."
        )
    if rows.numel() > num_rows:
        raise InvalidInput(
            f"Selection got {rows.numel()} rows of num_rows={num_rows} but each row was needed once at most; add up "
            "the weights of rows that repeat."
        )


def _check_numbers(selection: Selection) -> None:
    """Refuse numbers that are not as promised; on CUDA and in a compiled function without reading them here."""
    rows, weights, num_rows = selection.rows, selection.weights, selection.num_rows
    if rows.numel() == 0 or rows.is_meta:
        return
    ascending = (rows[1:] > rows[:-1]).all()
    right = ascending & (rows[0] >= 0) & (rows[-1] < num_rows) & weights.isfinite().all()
    if selection.even:
        right = right & _is_even(weights)
    if rows.device.type == "cuda" or torch.compiler.is_compiling():
        message = "rowprop.Selection needs ascending rows in range, none of them twice, and finite weights, 1/K if even"
        cast("Any", torch)._assert_async(right, message)
    elif not bool(right):
        raise InvalidInput(f"Selection got {_flaw(rows, weights, num_rows)}")


def _is_even(weights: Tensor) -> Tensor:
    """Whether each weight is ``1/K``, but for the rounding of its dtype: a bool on the device."""
    return ((weights * weights.numel() - 1).abs() <= 2 * torch.finfo(weights.dtype).eps).all()


def _flaw(rows: Tensor, weights: Tensor, num_rows: int) -> str:
    """Name the first number that is not as promised, and the way to mend it."""
    listed = cast("list[int]", cast("Any", rows).tolist())
    outside = next((row for row in listed if not 0 <= row < num_rows), None)
    if outside is not None:
        return f"row {outside} but rows 0 to {num_rows - 1} were needed, indices into the {num_rows} scores."
    for before, row in itertools.pairwise(listed):
        if row == before:
            return f"row {row} twice but each row was needed once; add up the weights of rows that repeat."
        if row < before:
            return (
                f"row {row} after row {before} but ascending rows were needed; sort them and give their weights the "
                "same order."
            )
    finite = weights.isfinite()
    if bool(finite.all()):
        return (
            f"even=True with weights that are not all 1/{rows.numel()}; leave even out, or use Selection.mean(rows, "
            "num_rows)."
        )
    place = int(finite.int().argmin())
    return (
        f"the weight {float(weights[place])} for row {listed[place]} but finite weights were needed; look at the "
        "scores that it was made of."
    )


@runtime_checkable
class Selector(Protocol):
    """Decides which rows are kept, from one score per row.

    A function of the scores alone is a selector too. The signature decides, once, where the selector is given: the
    context is passed where the second positional argument has no default, or is called ``context``.

    A selector that remembers something has ``state_dict()`` and ``load_state_dict(state)``, and is then
    :class:`Stateful`. One that knows its fraction before any score may have ``keep_at(context)``, and is then
    :class:`KnownKeep`.
    """

    def __call__(self, scores: Tensor, context: Context = NOTHING, /) -> Selection:
        """Return the selection for ``scores`` of shape ``(N,)``, larger = more wanted."""
        ...


AnySelector: TypeAlias = Selector | Callable[[Tensor], Selection] | Callable[[Tensor, Context], Selection]
"""A selector, or a function that stands for one."""


@runtime_checkable
class Stateful(Protocol):
    """A part that remembers something from one step to the next."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next call depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue where ``state`` was taken."""
        ...


@runtime_checkable
class KnownKeep(Protocol):
    """A selector that knows before any score which fraction of the rows it keeps."""

    def keep_at(self, context: Context, /) -> float | None:
        """Return the fraction, in (0, 1]; None where the scores decide. A batch that is kept whole is not scored."""
        ...


def keep_of(selector: object, context: Context) -> float | None:
    """The fraction that a selector will keep, where it is known before any score."""
    return selector.keep_at(context) if isinstance(selector, KnownKeep) else None


def takes_context(owner: str, selector: object) -> bool:
    """Whether a selector is called with the context beside the scores, by its signature.

    Raises:
        InvalidInput: It is a class, cannot be called, or asks for more than scores and a context.
    """
    if isinstance(selector, type) or not callable(selector):
        raise InvalidInput(
            f"{owner} got selector={selector!r}, a {type(selector).__name__}, but a selector was needed; give an "
            "instance, e.g. TopK(keep=0.5)."
        )
    wants = wants_context(selector, 1)
    if not takes(selector, 1 + wants):
        name = selector.__name__ if inspect.isroutine(selector) else type(selector).__name__
        raise InvalidInput(
            f"{owner} got the selector {name}{signature_of(selector)} but a function of scores, with or without a "
            "context, was needed; bind its other arguments with functools.partial."
        )
    return wants


def wants_context(part: object, arguments: int) -> bool:
    """Whether a callable takes a context after so many positional arguments: one without a default, or of that name."""
    signature = signature_of(part)
    if signature is None:
        return False
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name == "context" for p in positional[arguments : arguments + 1])


def asked(selector: object, with_context: bool, scores: Tensor, context: Context) -> Selection:
    """Have a selector select, and see that its selection is of these scores.

    Args:
        selector: Any selector.
        with_context: The answer of :func:`takes_context` for it.
        scores: One number per row, shape ``(N,)``.
        context: The context of these rows.

    Raises:
        InvalidInput: It returned no selection, or one of other rows or on another device.
    """
    choose = cast("Any", selector)
    chosen = choose(scores, context) if with_context else choose(scores)
    if not isinstance(chosen, Selection) or chosen.num_rows != scores.numel():
        size = f" made from {chosen.num_rows} rows" if isinstance(chosen, Selection) else ""
        raise InvalidInput(
            f"The selector returned a {type(chosen).__name__}{size} but a Selection made from {scores.numel()} rows, "
            "one for each score, was needed; Selection.mean(rows, scores.numel()) makes one."
        )
    if chosen.rows.device != scores.device:
        raise InvalidInput(
            f"The selector returned a Selection on {chosen.rows.device} but the scores are on {scores.device}, where "
            "it was needed; move its rows and weights there."
        )
    return chosen
