"""How much each row matters: one number per row, larger = more wanted; the losses, or one of these.

Shapes: N rows, C classes, ``...`` positions (tokens, pixels) that share the classes' layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.batch import map_tensors, tensors
from rowprop.checks import check_callable, check_choice, check_losses_fn, check_numbers, check_whole, check_within
from rowprop.errors import InvalidInput
from rowprop.host import waits
from rowprop.state import buffers_kept, evaluating, rng_kept

__all__ = ["Downscaled", "entropy", "gradient_norm", "logits_of", "margin", "per_row_mean", "score_without_graph"]


@dataclass(frozen=True, eq=False)
class Scored:
    """Losses and the scores beside them, from one forward: a bare pair could be losses and logits as well.

    Attributes:
        losses: Unreduced losses, shape ``(N,)`` or ``(N, 1)``, with their graph; of tokens, of any shape.
        scores: One for each loss, larger = more wanted, e.g. :func:`rowprop.scoring.margin`; they need no graph.
    """

    losses: Tensor
    scores: Tensor


LossesFn = Callable[[Any, Any], Tensor | Scored]  # (model, batch) to unreduced losses
Scorer = Callable[..., Tensor]  # (model, batch), or (model, batch, context), to scores


def per_row(name: str, returned: object, size: int | None, *, counted: bool = False, noun: str = "a tensor") -> Tensor:
    """The losses that the function ``name`` returned for ``size`` rows, ``(N,)`` or ``(N, 1)``, as ``(N,)``.

    They may be on the device meta where they are ``counted``; ``noun`` is for the error.
    """
    needed = f"one number per row was needed, shape ({size or 'N'},) or ({size or 'N'}, 1)"
    values = _losses(name, returned, needed, noun, counted=counted)
    if size is not None and values.shape[0] != size:
        advice = "bring a loss per token back to its rows, e.g. `loss.view(N, -1).mean(1)`."
    elif values.dim() > 2 or values.numel() != values.shape[0]:
        flat = ".flatten(1)" if values.dim() > 2 else ""
        advice = f"reduce each row by `{flat}.mean(1)` or `{flat}.sum(1)`."
    else:
        return values if values.dim() == 1 else values.squeeze(1)
    raise InvalidInput(f"{name} returned {described(values, noun)} but {needed}; {advice}")


def per_token(name: str, returned: object, *, noun: str = "a tensor") -> Tensor:
    """The losses that the function ``name`` returned, one per token, ``(N, T)`` or of any other shape."""
    return _losses(name, returned, "one number per token was needed, shape (N, T)", noun)


def losses_of(
    losses_fn: LossesFn, model: Any, batch: Any, *, unit: Literal["row", "token"] = "row", counted: bool = False
) -> Tensor:
    """The losses of a batch's rows, ``(N,)``, or tokens, with their graph; on the device meta where ``counted``."""
    returned = losses_fn(model, batch)
    if unit == "token":
        return per_token("losses_fn", returned)
    return per_row("losses_fn", returned, None, counted=counted)


def described(value: object, noun: str = "a tensor") -> str:
    """How a message calls a value that came."""
    if isinstance(value, Tensor):
        kind = f"{noun} of shape {tuple(value.shape)} and dtype {value.dtype}" + " on the device meta" * value.is_meta
        return kind if value.layout == torch.strided else f"{kind} that is sparse"
    return f"a {type(value).__name__}"


def _losses(name: str, returned: object, needed: str, noun: str, *, counted: bool = False) -> Tensor:
    """The losses in what a function returned; refuses what cannot be losses, be it of rows or of tokens."""
    values = cast("object", returned.losses) if isinstance(returned, Scored) else returned
    if isinstance(values, tuple):
        advice = "return the losses alone, or rowprop.Scored(losses, scores)."
    elif not isinstance(values, Tensor):
        advice = f"take the loss out of your model's output, inside {name}."
    elif values.dim() == 0:
        advice = "pass reduction='none' to the loss."
    elif values.is_meta and not counted:
        advice = "move model and batch to a device that holds numbers."
    elif values.layout != torch.strided:
        advice = "call to_dense()."
    elif values.numel() == 0 or not values.is_floating_point():
        advice = "it must be a floating tensor with at least one entry."
    else:
        return values
    raise InvalidInput(f"{name} returned {described(cast('object', values), noun)} but {needed}; {advice}")


def per_row_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average an unreduced loss over all but the rows, leaving out the places that do not count: tokens, pixels.

    The result is ``(N,)``, at least float32, with the graph of ``values``; 0 for a row of which nothing counts.

    Args:
        values: Shape ``(N, ...)``, floating, e.g. a cross entropy ``(N, T)`` with ``reduction="none"``.
        mask: Not zero where ``values`` count, which elsewhere may be NaN; each dimension of the same size or 1, e.g.
            ``targets != -100``. Default None: everywhere.

    Example:
        >>> tokens = torch.tensor([[1.0, 3.0, 5.0], [2.0, 0.0, 0.0]])
        >>> per_row_mean(tokens, torch.tensor([[1, 1, 0], [1, 0, 0]]))
        tensor([2., 2.])
    """
    check_numbers("per_row_mean", "values", values)
    if values.dim() == 0 or not values.is_floating_point():
        needed = "a floating loss of shape (N, ...) was needed; pass reduction='none' to it."
        raise InvalidInput(f"per_row_mean got {described(values, 'values')} but {needed}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    within = tuple(range(1, values.dim()))
    if mask is None:
        return values.mean(within, dtype=dtype) if within else values.to(dtype)
    check_numbers("per_row_mean", "mask", mask)
    sizes = zip(mask.shape, values.shape, strict=False)
    if mask.dim() != values.dim() or any(given not in (1, size) for given, size in sizes):
        shapes = f"a mask of shape {tuple(mask.shape)} for values of shape {tuple(values.shape)}"
        raise InvalidInput(f"per_row_mean got {shapes} but each size, or 1, was needed; e.g. `mask[:, None]`.")
    counts = (mask != 0).expand_as(values)
    kept = torch.where(counts, values, 0.0)
    if not within:
        return kept.to(dtype)
    return kept.sum(within, dtype=dtype) / counts.sum(within).clamp(min=1)


def logits_of(outputs: Any) -> Tensor:
    """Find the logits in the output of a model.

    The output is a tensor; an object with ``logits`` or a mapping with ``"logits"``; or a container, nested, of which
    the first tensor with dimensions counts.

    Example:
        >>> logits_of({"loss": torch.tensor(0.5), "logits": torch.zeros(4, 10)}).shape
        torch.Size([4, 10])
    """
    named = getattr(outputs, "logits", None)
    if named is None and isinstance(outputs, Mapping):
        named = cast("Mapping[object, object]", outputs).get("logits")
    if named is not None:
        return logits_of(named)
    for tensor in tensors(cast("object", outputs)):
        if tensor.dim() > 0:
            return tensor
    kind = type(cast("object", outputs)).__name__
    raise InvalidInput(f"logits_of got a {kind} in which no logits were found; take them out of it yourself.")


@torch.no_grad()
def gradient_norm(
    logits: Tensor, targets: Tensor, features: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """Norm of the gradient of each row's cross entropy with respect to its logits.

    That is ``||softmax(logits) - onehot(target)||``, in [0, sqrt(2)], also called EL2N; of several positions the mean
    over the ones that count, 0 where none does. Up to a factor that all rows share, it bounds the norm of the row's
    gradient with respect to all parameters. It is ``(N,)``, at least float32, without a graph. Sources: Katharopoulos
    and Fleuret, ICML 2018, arXiv:1803.00942; Paul, Ganguli and Dziugaite, NeurIPS 2021, arXiv:2107.07075.

    Args:
        logits: Shape ``(N, C)`` or ``(N, C, ...)``, as :func:`torch.nn.functional.cross_entropy` takes them: tokens,
            ``(N, T, C)``, come as ``logits.transpose(1, 2)``.
        targets: Classes, shape ``(N,)`` or ``(N, ...)``, whole numbers; or a share of each class, of the shape of
            ``logits``, floating (mixup, label smoothing).
        features: Input of a last linear layer, shape ``(N, D)`` or ``(N, D, ...)``: the norm is then that of the
            gradient of this layer's weight and bias. Default None.
        ignore_index: Target of the positions that do not count; default -100.

    Example:
        >>> gradient_norm(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]))
        tensor([0.7071, 0.1686])
    """
    logits = _checked("gradient_norm", logits)
    check_numbers("gradient_norm", "targets", targets)
    if targets.is_floating_point():
        if targets.shape != logits.shape:
            raise _misfit("gradient_norm", logits, targets, tuple(logits.shape), "targets")
        shares, counted = targets.to(logits.dtype), None
        error = logits.softmax(1).mul_(shares.sum(1, keepdim=True)).sub_(shares)
    else:
        index, counted = _classes("gradient_norm", logits, targets, ignore_index)
        error = logits.softmax(1).scatter_add_(1, index, logits.new_full((), -1.0).expand(index.shape))
    norms = cast("Tensor", torch.linalg.vector_norm(error, dim=1))
    if features is not None:
        check_numbers("gradient_norm", "features", features)
        if features.shape[:1] + features.shape[2:] != norms.shape:
            raise _misfit("gradient_norm", logits, features, (logits.shape[0], "D", *logits.shape[2:]), "features")
        norms = norms * (features.to(norms.dtype).square().sum(1) + 1).sqrt()
    return per_row_mean(norms, counted)


@torch.no_grad()
def margin(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """How far the best wrong class is ahead of the right one, in logits: above 0 the row is classified wrongly.

    Args:
        logits: Shape ``(N, C)`` or ``(N, C, ...)``, at least two classes; see :func:`gradient_norm`.
        targets: Classes, shape ``(N,)`` or ``(N, ...)``, whole numbers.
        ignore_index: Target of the positions that do not count; default -100.

    Example:
        >>> margin(torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]]), torch.tensor([0, 1]))
        tensor([-2.,  2.])
    """
    logits = _checked("margin", logits)
    if logits.shape[1] < 2:
        needed = "at least two classes were needed; for one logit per row use the loss as the score."
        raise InvalidInput(f"margin got logits of shape {tuple(logits.shape)} but {needed}")
    index, counted = _classes("margin", logits, targets, ignore_index)
    right = logits.gather(1, index)
    best_wrong = logits.scatter(1, index, -torch.inf).amax(1, keepdim=True)
    return per_row_mean((best_wrong - right).squeeze(1), counted)


@torch.no_grad()
def entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The entropy of the predicted classes, in nats, in [0, ``log(C)``]; targets are not used.

    Args:
        logits: Shape ``(N, C)`` or ``(N, C, ...)``; see :func:`gradient_norm`.
        mask: Which positions count, not zero, shape ``(N, ...)``. Default None: all.

    Example:
        >>> entropy(torch.tensor([[0.0, 0.0], [9.0, 0.0]]))
        tensor([0.6931, 0.0012])
    """
    shares = _checked("entropy", logits).softmax(1)
    return per_row_mean(-torch.xlogy(shares, shares).sum(1), mask)


def _checked(name: str, logits: Tensor) -> Tensor:
    """Logits in at least float32."""
    check_numbers(name, "logits", logits, "a tensor was needed; of a model's output, logits_of takes it.")
    if logits.dim() < 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        needed = "floating ones of shape (N, C) or (N, C, ...) were needed; of a model's output, logits_of takes them."
        raise InvalidInput(f"{name} got {described(logits, 'logits')} but {needed}")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _classes(name: str, logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Indices (N, 1, ...) of the target classes, any class where ignored, and where they count, (N, ...)."""
    shape = logits.shape[:1] + logits.shape[2:]
    check_numbers(name, "targets", targets)
    check_whole(name, "ignore_index", ignore_index, -(2**63), "a whole number was needed.")
    if targets.shape != shape or targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise _misfit(name, logits, targets, tuple(shape), "targets")
    counted = targets != ignore_index
    classes = torch.where(counted, targets, 0).long()
    if not waits(classes):  # elsewhere torch asserts this on the device, without a sync
        outside = (classes < 0) | (classes >= logits.shape[1])
        if bool(outside.any()):
            needed = f"classes 0 to {logits.shape[1] - 1} were needed, or ignore_index={ignore_index}."
            raise InvalidInput(f"{name} got the class {int(classes[outside][0])} but {needed}")
    return classes.unsqueeze(1), counted


def _misfit(name: str, logits: Tensor, other: Tensor, shape: tuple[object, ...], what: str) -> InvalidInput:
    wanted = str(shape).replace("'", "")  # an unknown size is shown as a letter
    needed = f"for logits of shape {tuple(logits.shape)} but shape {wanted} was needed"
    remedy = "the classes are the logits' dimension 1, so tokens come as `logits.transpose(1, 2)`."
    return InvalidInput(f"{name} got {described(other, what)} {needed}; {remedy}")


def score_without_graph(
    function: Callable[[Any, Any], Tensor], model: Any, batch: Any, *, mode: Literal["train", "eval"] = "train"
) -> Tensor:
    """Run ``function(model, batch)`` without a graph, and restore the model and the random state.

    Modes, buffers and the random state of the CPU and of the accelerators involved are put back: the next forward draws
    the dropout masks that it would have drawn anyway, and running statistics move once per step. Only an ``nn.Module``
    is put back. ``mode="train"`` (default) leaves the model's modes as they are; ``"eval"`` is without dropout's noise.
    """
    check_callable("score_without_graph", "function", function, "a function of the model and the batch was needed.")
    check_choice("score_without_graph", "mode", mode, ("train", "eval"))
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    evaluated = modules if mode == "eval" else []
    with rng_kept(modules, batch), buffers_kept(modules), evaluating(evaluated), torch.no_grad():
        try:
            return function(model, batch)
        except TypeError:
            check_losses_fn("score_without_graph", function, "function")  # only now: reading a signature takes a while
            raise


_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _is_signal(entry: Tensor) -> bool:
    return entry.dim() in _MODES and entry.is_floating_point() and entry.layout == torch.strided


@dataclass(frozen=True)
class Downscaled:
    """Score rows by their losses on smaller signals, images or volumes.

    A ``scorer`` for the engine ``recompute``: at half the size a convolutional network's forward costs about a half on
    signals, a quarter on images and an eighth on volumes. The model must take any size. Only the choice of rows is by
    the smaller input. Source: mosaicml/composer, ``scale_factor`` (1 by default; its guide recommends 0.5).

    Args:
        function: ``(model, batch)`` to losses, as ``losses_fn``. Its floating tensors ``(N, C, L)``, ``(N, C, H, W)``
            or ``(N, C, D, H, W)`` are scaled linearly; of several kinds, those with most dimensions.
        scale: Factor of each side, in (0, 1); default 0.5. Sides are rounded down, to no less than one.

    Example:
        >>> losses_fn = lambda model, batch: model(batch).flatten(1).mean(1)
        >>> Downscaled(losses_fn)(lambda images: images.new_ones(images.shape), torch.zeros(2, 3, 8, 8))
        tensor([1., 1.])
    """

    function: LossesFn
    scale: float = 0.5

    def __post_init__(self) -> None:
        check_losses_fn("Downscaled", self.function, "function")
        check_within("Downscaled", "scale", self.scale, "(0, 1)")

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Return the scores of the scaled batch."""
        found = [entry.dim() for entry in tensors(batch) if _is_signal(entry) and entry.numel() > 0]
        if not found:
            needed = "a floating tensor of shape (N, C, L), (N, C, H, W) or (N, C, D, H, W)"
            raise InvalidInput(f"Downscaled got a batch without {needed}, to make smaller; leave the scorer out.")

        def scaled(entry: Tensor) -> Tensor:
            if entry.dim() != max(found) or not _is_signal(entry):
                return entry
            size = [max(1, int(self.scale * side)) for side in entry.shape[2:]]
            return F.interpolate(entry, size, mode=_MODES[entry.dim()], align_corners=False)

        returned = self.function(model, map_tensors(scaled, batch))
        return returned.scores if isinstance(returned, Scored) else returned
