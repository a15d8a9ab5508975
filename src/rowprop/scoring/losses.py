"""From the outputs of models and loss functions to one loss per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rowprop.batch import tensors
from rowprop.checks import check_numbers
from rowprop.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class Scored:
    """Losses and the scores beside them, from one forward, for a ``losses_fn`` whose scores are not its losses.

    A bare pair is refused, since it could be losses and logits as well.

    Attributes:
        losses: Unreduced losses, shape ``(N,)`` or ``(N, 1)``, with their graph; of tokens, of any shape.
        scores: One for each loss, in the same shape, larger = more wanted; they need no graph.

    Example:
        >>> def losses_fn(model, batch):
        ...     logits = model(batch[0])
        ...     losses = torch.nn.functional.cross_entropy(logits, batch[1], reduction="none")
        ...     return Scored(losses, rowprop.scoring.margin(logits, batch[1]))
        >>> model, batch = torch.nn.Linear(3, 4), (torch.randn(8, 3), torch.arange(8) % 4)
        >>> loss, record = SelectiveBackprop(model, losses_fn, TopK(keep=0.25))(batch)
        >>> record.num_kept
        2
    """

    losses: Tensor
    scores: Tensor


LossesFn = Callable[[Any, Any], Tensor | Scored]
"""``(model, batch)`` to unreduced losses, or to these with scores from the same forward."""


def per_row_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Average an unreduced loss over all but the rows, leaving out the places that do not count.

    For losses per token with padding, per pixel with ignored ones, per label or per target. Every row then counts the
    same however many of its places count; a plain mean over all tokens of a batch lets long rows count more.

    Args:
        values: Shape ``(N, ...)``, floating; for example a cross entropy with ``reduction="none"``, ``(N, T)`` of
            tokens or ``(N, H, W)`` of pixels, or a binary one ``(N, C)`` of labels.
        mask: Where ``values`` count, not zero: bool or numbers, as many dimensions as ``values``, each of its size or
            1. For example ``targets != -100``, or an attention mask. Default None: everywhere.

    Returns:
        Shape ``(N,)``, at least float32, with the graph of ``values``. A row of which nothing counts is 0, and so is
        its gradient.

    Raises:
        InvalidInput: ``values`` has no dimension of rows or is not floating, or ``mask`` does not fit it.

    Cost:
        One pass over ``values``; no copy to the host.

    Notes:
        A value that is left out does not matter, a NaN neither. Shifting tokens against their targets, as language
        models need it, comes before: ``logits[:, :-1]`` against ``targets[:, 1:]``.

    Example:
        >>> tokens = torch.tensor([[1.0, 3.0, 5.0], [2.0, 0.0, 0.0]])
        >>> per_row_mean(tokens, torch.tensor([[1, 1, 0], [1, 0, 0]]))
        tensor([2., 2.])
    """
    check_numbers("per_row_mean", "values", values)
    if values.dim() == 0 or not values.is_floating_point():
        raise InvalidInput(
            f"per_row_mean got values of shape {tuple(values.shape)} and dtype {values.dtype} but an unreduced "
            "floating loss was needed, shape (N, ...); pass reduction='none' to the loss."
        )
    dtype = torch.promote_types(values.dtype, torch.float32)
    within = tuple(range(1, values.dim()))
    if mask is None:
        return values.mean(within, dtype=dtype) if within else values.to(dtype)
    check_numbers("per_row_mean", "mask", mask)
    sizes = zip(mask.shape, values.shape, strict=False)
    if mask.dim() != values.dim() or any(given not in (1, size) for given, size in sizes):
        raise InvalidInput(
            f"per_row_mean got a mask of shape {tuple(mask.shape)} for values of shape {tuple(values.shape)} but as "
            "many dimensions were needed, each of the same size or 1; insert the missing one, e.g. `mask[:, None]`."
        )
    counts = (mask != 0).expand_as(values)
    kept = torch.where(counts, values, 0.0)
    if not within:
        return kept.to(dtype)
    return kept.sum(within, dtype=dtype) / counts.sum(within).clamp(min=1)


def logits_of(outputs: Any) -> Tensor:
    """Find the logits in the output of a model.

    Args:
        outputs: A tensor; an object with ``logits`` or a mapping with ``"logits"``, as Hugging Face's model outputs are
            both; or a tuple, list, mapping or dataclass, nested, of which the first tensor with dimensions counts: the
            ``out`` of torchvision's segmentation models, the second entry of ``(loss, logits)`` where the loss is a
            number.

    Returns:
        That tensor itself, with its graph.

    Raises:
        InvalidInput: There is none.

    Example:
        >>> logits_of({"loss": torch.tensor(0.5), "logits": torch.zeros(4, 10)}).shape
        torch.Size([4, 10])
    """
    found = _first(outputs)
    if found is None:
        raise InvalidInput(
            f"logits_of got a {type(outputs).__name__} in which no logits were found, but a tensor, an object with "
            ".logits, or a container of tensors was needed; take the logits out of it yourself."
        )
    return found


def _first(outputs: Any) -> Tensor | None:
    named = getattr(outputs, "logits", None)
    if named is None and isinstance(outputs, Mapping):
        named = cast("Mapping[object, object]", outputs).get("logits")
    if named is not None:
        return _first(named)
    return next((found for found in tensors(cast("object", outputs)) if found.dim() > 0), None)


def only_scores(name: str, returned: object) -> Any:
    """The scores in what the losses function ``name`` returned: its losses where it returned nothing beside them."""
    if isinstance(returned, Scored):
        return returned.scores
    if isinstance(returned, tuple):
        raise InvalidInput(f"{name} returned a tuple but losses were needed; {_NO_PAIR}")
    return returned


_NO_PAIR = "return the losses alone, or rowprop.Scored(losses, scores)."


def per_row(
    name: str, returned: object, expected: int | None, *, counted: bool = False, noun: str = "a tensor"
) -> Tensor:
    """The losses that the function ``name`` returned, one per row: the door that all of them pass.

    Args:
        name: Of the function.
        returned: Losses ``(N,)`` or ``(N, 1)``, or a :class:`Scored`.
        expected: N; None where nobody knows it.
        counted: Whether they are counted alone, so that they may be on the device meta.
        noun: What they are; the scores of a :class:`Scored` pass here as well.

    Returns:
        Shape ``(N,)``.

    Raises:
        InvalidInput: They are anything else; the sentence has the remedy.
    """
    values = _losses(returned)
    advice = _unfit(name, values, counted=counted)
    if advice is None:
        values = cast("Tensor", values)
        if expected is not None and values.shape[0] != expected:
            advice = "a loss per token must be brought back to its rows, e.g. `loss.view(N, -1).mean(1)`."
        elif values.numel() == values.shape[0] and values.dim() <= 2:
            return values if values.dim() == 1 else values.squeeze(1)
        else:
            flat = ".flatten(1)" if values.dim() > 2 else ""
            advice = f"reduce each row by `{flat}.mean(1)` or `{flat}.sum(1)`."
    size = "N" if expected is None else expected
    raise InvalidInput(
        f"{name} returned {described(values, noun)} but one number per row was needed, shape ({size},) or "
        f"({size}, 1); {advice}"
    )


def per_token(name: str, returned: object, *, noun: str = "a tensor") -> Tensor:
    """The losses that the function ``name`` returned, one per token, ``(N, T)`` or of any other shape.

    Raises:
        InvalidInput: They are anything else; the sentence has the remedy.
    """
    values = _losses(returned)
    if (advice := _unfit(name, values)) is None:
        return cast("Tensor", values)
    raise InvalidInput(
        f"{name} returned {described(values, noun)} but one number per token was needed, shape (N, T); {advice}"
    )


def _losses(returned: object) -> object:
    return returned.losses if isinstance(returned, Scored) else returned


def _unfit(name: str, values: object, *, counted: bool = False) -> str | None:
    """The remedy where a value is no losses at all, be it of rows or of tokens; else None."""
    if isinstance(values, tuple):
        return _NO_PAIR
    if not isinstance(values, Tensor):
        return f"take the loss out of your model's output, inside {name}."
    if values.dim() == 0:
        return "pass reduction='none' to the loss."
    if values.is_meta and not counted:
        return "move model and batch to a device that holds numbers."
    if values.numel() == 0 or not values.is_floating_point():
        return "it must be a floating tensor with at least one entry."
    return None


def described(value: object, noun: str = "a tensor") -> str:
    """How a message calls a value that came."""
    if isinstance(value, Tensor):
        return f"{noun} of shape {tuple(value.shape)} and dtype {value.dtype}" + " on the device meta" * value.is_meta
    return f"a {type(value).__name__}"


def losses_of(losses_fn: LossesFn, model: Any, batch: Any, *, counted: bool = False) -> Tensor:
    """The losses of a batch's rows, shape ``(N,)``, with their graph; on the device meta where they are ``counted``."""
    return per_row("losses_fn", losses_fn(model, batch), None, counted=counted)
