"""Scores for less than a forward: smaller inputs, coarser numbers, another model, pieces.

Each wraps a losses function and is given as the ``scorer`` of :class:`rowprop.SelectiveBackprop`, with the engine
``recompute``, where scoring is a forward of its own. The step runs it without a graph and puts back the model's modes
and buffers and the random state (:func:`rowprop.scoring.score_without_graph`), in the mode that
:class:`rowprop.engines.Recompute` names. They nest: ``MicroBatched(LowPrecision(losses_fn), 64)``. Where the wrapped
function returns a :class:`rowprop.Scored`, its scores count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.batch import map_tensors, num_rows, take, tensors
from rowprop.checks import check_losses_fn, check_tensor, check_whole, is_number, shown
from rowprop.errors import InvalidInput
from rowprop.scoring.forward import score_without_graph
from rowprop.scoring.losses import LossesFn, only_scores
from rowprop.state import devices_of

_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


@dataclass(frozen=True)
class Downscaled:
    """Score rows by their losses on smaller signals, images or volumes.

    At half the size a convolutional network's forward costs about a half on signals, a quarter on images and an eighth
    on volumes. The model must take any size.

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``.
        scale: Factor of each side, in (0, 1); default 0.5. Sides are rounded down, to no less than one.

    Returns:
        When called with the model and the batch: the scores of ``function`` for the batch with its floating tensors
        scaled linearly, ``(N, C, L)``, ``(N, C, H, W)`` or ``(N, C, D, H, W)``. If it holds such tensors of different
        numbers of dimensions, the tensors with most dimensions are scaled: images, not the boxes beside them. All else
        is passed on.

    Raises:
        InvalidInput: ``scale`` is outside (0, 1); or, when called, the batch has no such tensor.

    Bias:
        The scores rank rows by another input than the one trained on; the gradient of the rows that are kept is theirs.

    Example:
        >>> losses_fn = lambda model, batch: model(batch).flatten(1).mean(1)
        >>> Downscaled(losses_fn)(lambda images: images.new_ones(images.shape), torch.zeros(2, 3, 8, 8))
        tensor([1., 1.])

    References:
        mosaicml/composer, ``composer/algorithms/selective_backprop``, ``scale_factor`` (1 by default; its guide
        recommends 0.5 where inputs can be made smaller).
    """

    function: LossesFn
    scale: float = 0.5

    def __post_init__(self) -> None:
        check_losses_fn("Downscaled", self.function, "function")
        if not is_number(self.scale) or not 0 < self.scale < 1:
            raise InvalidInput(
                f"Downscaled got scale={shown(self.scale)} but a factor in (0, 1) was needed; 0.5 halves each side."
            )

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of the scaled batch."""
        dims = max((entry.dim() for entry in tensors(batch) if _is_spatial(entry)), default=None)
        if dims is None:
            raise InvalidInput(
                "Downscaled got a batch without a floating tensor of shape (N, C, L), (N, C, H, W) or (N, C, D, H, W) "
                "but one was needed to make smaller; leave the scorer out, or see Truncated for tokens."
            )

        def scaled(entry: Tensor) -> Tensor:
            if not _is_spatial(entry) or entry.dim() != dims:
                return entry
            size = [max(1, int(self.scale * side)) for side in entry.shape[2:]]
            return F.interpolate(entry, size, mode=_MODES[dims], align_corners=False)

        return only_scores("function", self.function(model, map_tensors(scaled, batch)))


@dataclass(frozen=True)
class Truncated:
    """Score rows by the losses of their first tokens.

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``.
        length: How many tokens to keep, 1 or more.

    Returns:
        When called with the model and the batch: the scores of ``function`` for the batch with every tensor of shape
        ``(N, T)`` cut to ``(N, length)``: tokens, masks and labels alike. T is the largest second size of the whole
        numbers or bools of two dimensions, so entries of another width (classes of rows, shorter sequences) are passed
        on, as is a batch that is short enough.

    Raises:
        InvalidInput: ``length`` is not a whole number of at least 1; or, when called, the batch has no tokens.

    Bias:
        The scores rank rows by how they begin. A row whose labels are all cut off scores 0 under
        :func:`rowprop.scoring.per_row_mean`, and rows padded on the left keep their padding, so neither kind of data is
        for this scorer.

    Example:
        >>> losses_fn = lambda model, batch: batch["tokens"].float()
        >>> Truncated(losses_fn, 2)(None, {"tokens": torch.tensor([[1, 2, 3], [4, 5, 0]])})
        tensor([[1., 2.],
                [4., 5.]])
    """

    function: LossesFn
    length: int

    def __post_init__(self) -> None:
        check_losses_fn("Truncated", self.function, "function")
        check_whole("Truncated", "length", self.length, 1, "a whole number of tokens, 1 or more, was needed.")

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of the shortened batch."""
        whole = (t for t in tensors(batch) if t.dim() == 2 and not t.is_floating_point())
        width = max((entry.shape[1] for entry in whole), default=None)
        if width is None:
            raise InvalidInput(
                "Truncated got a batch without a tensor of tokens but one of whole numbers, shape (N, T), was needed; "
                "see Downscaled for images and signals."
            )

        def cut(entry: Tensor) -> Tensor:
            return entry[:, : self.length] if entry.dim() == 2 and entry.shape[1] == width else entry

        return only_scores("function", self.function(model, map_tensors(cut, batch)))


@dataclass(frozen=True)
class LowPrecision:
    """Score rows by a forward in lower precision, with torch's autocast.

    Pays on hardware that is fast at it, and where the training itself does not run in it already.

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``.
        dtype: The dtype of matrix products and convolutions, default ``torch.bfloat16``.

    Returns:
        When called with the model and the batch: the scores of ``function`` under autocast.

    Raises:
        InvalidInput: ``dtype`` is neither ``torch.bfloat16`` nor ``torch.float16``.

    Cost:
        The forward, and a copy of the weights in ``dtype``.

    Bias:
        The scores are rounded, so rows of nearly equal losses may change places; the gradient of the rows that are kept
        has full precision.

    Example:
        >>> model, rows = torch.nn.Linear(4, 1), torch.ones(2, 4)
        >>> LowPrecision(lambda model, batch: model(batch).squeeze(1))(model, rows).dtype
        torch.bfloat16
    """

    function: LossesFn
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_losses_fn("LowPrecision", self.function, "function")
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in (torch.bfloat16, torch.float16):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(
                f"LowPrecision got dtype={self.dtype!r} but torch.bfloat16 or torch.float16 was needed, the dtypes "
                "that autocast knows."
            )

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of a forward under autocast."""
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        kinds = {device.type for device in devices_of(modules, batch)} - {"cpu"}
        if "meta" in kinds:
            raise InvalidInput(
                "LowPrecision got a model or a batch on the device meta, which holds no numbers to compute with; move "
                "them to cpu or to an accelerator."
            )
        with torch.autocast(min(kinds, default="cpu"), self.dtype):
            return only_scores("function", self.function(model, batch))


@dataclass(frozen=True, eq=False)
class Proxy:
    """Score rows by the losses of another model, for example a smaller one trained before.

    The proxy always runs in evaluation mode, whatever the mode of the scoring, because nobody trains it there;
    its modes and buffers are left as found.

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``.
        model: The proxy, which takes the place of the trained model in ``function``.

    Returns:
        When called with the trained model and the batch: the scores of ``function`` for the proxy, without a graph.

    Cost:
        One forward of the proxy instead of one of the model.

    Bias:
        The scores rank rows by the losses of another model. They do not follow the training unless the proxy does.

    Example:
        >>> proxy = torch.nn.Linear(4, 1)
        >>> scorer = Proxy(lambda model, batch: model(batch).squeeze(1), proxy)
        >>> scorer(None, torch.ones(2, 4)).requires_grad
        False

    References:
        Coleman et al., "Selection via Proxy: Efficient Data Selection for Deep Learning", ICLR 2020, arXiv:1906.11829.
    """

    function: LossesFn
    model: nn.Module

    def __post_init__(self) -> None:
        check_losses_fn("Proxy", self.function, "function")
        given = cast("object", self.model)
        if not isinstance(given, nn.Module):
            raise InvalidInput(
                f"Proxy got a model of type {type(given).__name__} but a torch.nn.Module was needed, the one to score "
                "with."
            )

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of the proxy; ``model`` is not used."""
        return only_scores("function", score_without_graph(cast("Any", self.function), self.model, batch, mode="eval"))


@dataclass(frozen=True)
class MicroBatched:
    """Score the batch in pieces, where a forward over all of it does not fit into memory.

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``.
        rows: Most rows in a piece, 1 or more.

    Returns:
        When called with the model and the batch: the scores of all pieces, in the order of the rows.

    Raises:
        InvalidInput: ``rows`` is not a whole number of at least 1; or, when called, ``function`` does not return one
            entry per row of a piece.

    Cost:
        The same forward in more and smaller kernels; memory of one piece.

    Bias:
        None where rows do not see each other: the scores equal the scores of the whole batch but for rounding.
        BatchNorm in train mode sees each piece as a batch, which ``Recompute(scoring="eval")`` avoids, and dropout
        draws other masks than for the whole batch.

    Notes:
        Under DDP and FSDP each forward meets the forwards of the other ranks, so all must run as many pieces: the same
        N everywhere, or a number of ``rows`` per rank that cuts it into as many.

    Example:
        >>> MicroBatched(lambda model, batch: batch * 2, rows=2)(None, torch.tensor([1.0, 2.0, 3.0]))
        tensor([2., 4., 6.])
    """

    function: LossesFn
    rows: int

    def __post_init__(self) -> None:
        check_losses_fn("MicroBatched", self.function, "function")
        check_whole("MicroBatched", "rows", self.rows, 1, "a whole number of rows, 1 or more, was needed.")

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of all pieces."""
        n = num_rows(batch)
        if n == 0:
            raise InvalidInput("MicroBatched got a batch of 0 rows but at least one was needed.")
        device = next(iter(tensors(batch)), torch.empty(0)).device  # an array of numpy's has rows too
        pieces: list[Tensor] = []
        for begin in range(0, n, self.rows):
            piece = torch.arange(begin, min(n, begin + self.rows), device=device)
            scores = only_scores("function", self.function(model, take(batch, piece)))
            check_tensor("MicroBatched", "scores", scores)
            if scores.shape[:1] != piece.shape:
                raise InvalidInput(
                    f"MicroBatched got a tensor of shape {tuple(scores.shape)} for a piece of {piece.numel()} rows but "
                    f"one entry per row was needed, shape ({piece.numel()}, ...); pass reduction='none' to the loss."
                )
            pieces.append(scores)
        return torch.cat(pieces)


def _is_spatial(entry: Tensor) -> bool:
    return entry.dim() in _MODES and entry.is_floating_point()
