"""What a selection is, and what a selector promises."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from rowprop.checks import check_floating, check_tensor, check_whole, checked_device
from rowprop.errors import InvalidInput


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The rows of a batch that are kept, and what each counts.

    The selected loss is ``(losses[rows] * weights).sum()``; a plain mean over the kept rows has weights ``1/K``.

    The constructor checks it, once, and all code behind it trusts it. Shapes, dtypes and devices are checked
    everywhere. The numbers (rows ascend, none repeats, all are in range, weights are finite) are read on the CPU. On
    CUDA, and in a compiled function, the device checks them and the host does not wait: a wrong selection ends there in
    a device-side assertion that names the reason. On other accelerators the host reads them, and waits. The selectors
    of this package make selections that are right by construction; nobody reads those.

    Args:
        rows: Kept rows, shape ``(K,)``, int64, ascending and without repeats, ``0 <= K <= N``. None are kept where a
            draw or a threshold found none, or where the selection is one rank's part of a larger one.
        weights: One factor per kept row, shape ``(K,)``, a floating dtype, finite, on the device of ``rows``.
        num_rows: N, the number of rows the selection was made from.

    Raises:
        InvalidInput: One of these is not so. To mend rows in any order, sort them with their weights; to mend repeated
            rows, add up their weights.
    """

    rows: Tensor
    weights: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        check_whole("Selection", "num_rows", self.num_rows, 0)
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
        _check_numbers(self.rows, self.weights, self.num_rows)

    def __repr__(self) -> str:
        return f"Selection({self.num_kept} of {self.num_rows} rows, on {self.rows.device})"

    @classmethod
    def mean(cls, rows: Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> Selection:
        """Keep ``rows`` (ascending, possibly none), each with weight ``1/K``; ``rows`` are checked as ever."""
        check_whole("Selection", "num_rows", num_rows, 0)
        check_floating("Selection.mean", dtype)
        _check_rows(rows, num_rows)
        return cls(rows, _even(rows, dtype), num_rows)

    @classmethod
    def everything(
        cls, num_rows: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Selection:
        """Keep all N rows, each with weight ``1/N``."""
        check_whole("Selection.everything", "num_rows", num_rows, 0)
        check_floating("Selection.everything", dtype)
        rows = torch.arange(num_rows, device=checked_device("Selection.everything", device))
        return mean_unread(rows, num_rows, dtype)

    @property
    def num_kept(self) -> int:
        """K, known without asking the device."""
        return self.rows.numel()

    @property
    def is_everything(self) -> bool:
        """Whether no row was dropped (rows are unique and ascending, so K = N says it all)."""
        return self.num_kept == self.num_rows


def unread(rows: Tensor, weights: Tensor, num_rows: int) -> Selection:
    """Make a selection that is right by construction, so that nobody has to read its numbers.

    For rows that were sorted, counted or found by this package. Rows of unknown origin go through :class:`Selection`.
    """
    selection = object.__new__(Selection)
    object.__setattr__(selection, "rows", rows)
    object.__setattr__(selection, "weights", weights)
    object.__setattr__(selection, "num_rows", num_rows)
    return selection


def mean_unread(rows: Tensor, num_rows: int, dtype: torch.dtype) -> Selection:
    """As :func:`unread`, with weight ``1/K`` for each row."""
    return unread(rows, _even(rows, dtype), num_rows)


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


def _check_numbers(rows: Tensor, weights: Tensor, num_rows: int) -> None:
    """Refuse numbers that are not as promised; on CUDA and in a compiled function without reading them here."""
    if rows.numel() == 0 or rows.is_meta:
        return
    ascending = (rows[1:] > rows[:-1]).all()
    right = ascending & (rows[0] >= 0) & (rows[-1] < num_rows) & weights.isfinite().all()
    if rows.device.type == "cuda" or torch.compiler.is_compiling():
        message = "rowprop.Selection needs ascending rows in range, none of them twice, and finite weights"
        cast("Any", torch)._assert_async(right, message)
    elif not bool(right):
        raise InvalidInput(f"Selection got {_flaw(rows, weights, num_rows)}")


def _flaw(rows: Tensor, weights: Tensor, num_rows: int) -> str:
    """The first number that is not as promised, and what to do."""
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
    place = int(weights.isfinite().int().argmin())
    return (
        f"the weight {float(weights[place])} for row {listed[place]} but finite weights were needed; look at the "
        "scores that it was made of."
    )


@runtime_checkable
class Selector(Protocol):
    """Decides which rows are kept, from one score per row.

    A function of the scores alone is a selector too: ``generator`` is passed to those that take it, which is decided by
    the signature, once, where the selector is given. :class:`rowprop.SelectiveBackprop` asks for these too, where it
    has them:

    * ``needs_finite = True``, a class attribute: no score may be NaN or infinite;
    * ``unbiased = True``: the weights make the expected weighted sum of any numbers of the rows their mean over all N;
    * ``own_weights``: whether the weights are others than ``1/K``, as those of a mean over all N are. Where it is not
      said: whether it is ``unbiased``;
    * ``needs_classes = True``: it is called with ``classes=`` too, shape ``(N,)``;
    * ``at(progress)``: the selector as it is at that fraction of the training;
    * ``state_dict()`` and ``load_state_dict(state)``: what it remembers.
    """

    def __call__(self, scores: Tensor, *, generator: torch.Generator | None = None) -> Selection:
        """Return the selection for ``scores`` of shape ``(N,)``, larger = more wanted."""
        ...


def keywords_of(owner: str, selector: object) -> frozenset[str]:
    """Find out which of ``generator`` and ``classes`` a selector is to be called with, by its signature.

    Raises:
        InvalidInput: It is a class, cannot be called, or asks for more than scores, a generator and, where it says
            ``needs_classes``, classes.
    """
    if isinstance(selector, type) or not callable(selector):
        raise InvalidInput(
            f"{owner} got selector={selector!r}, a {type(selector).__name__}, but a selector was needed; give an "
            "instance, e.g. TopK(keep=0.5)."
        )
    needed = frozenset({"classes"} if says(selector, "needs_classes") else set[str]())
    try:
        signature = inspect.signature(selector.forward if isinstance(selector, nn.Module) else selector)
    except (TypeError, ValueError):  # written in C, some callables have none
        return needed
    for keywords in (needed | {"generator"}, needed):
        try:
            signature.bind(None, **dict.fromkeys(keywords))
        except TypeError:
            continue
        return keywords
    raise InvalidInput(
        f"{owner} got the selector {getattr(selector, '__name__', type(selector).__name__)}{signature} but a function "
        "of scores, with or without generator=, was needed; bind its other arguments with functools.partial."
    )


def asked(
    selector: object,
    keywords: frozenset[str],
    scores: Tensor,
    generator: torch.Generator | None = None,
    classes: Tensor | None = None,
) -> Selection:
    """Have a selector select, and see that its selection is of these scores.

    Args:
        selector: Any selector.
        keywords: What :func:`keywords_of` found for it.
        scores: One number per row, shape ``(N,)``.
        generator: Source of its randomness.
        classes: The class of each row, shape ``(N,)``.

    Raises:
        InvalidInput: It returned no selection, or one of other rows or on another device.
    """
    beside = {"generator": generator, "classes": classes}
    chosen = cast("Any", selector)(scores, **{name: beside[name] for name in keywords})
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


def says(part: object, what: str) -> bool:
    """Whether a selector or a scorer says so of itself, by a class attribute of that name."""
    return bool(getattr(part, what, False))


def has_own_weights(selector: object) -> bool:
    """Whether its weights are others than ``1/K``."""
    return bool(getattr(selector, "own_weights", says(selector, "unbiased")))
