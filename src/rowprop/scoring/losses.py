"""From the outputs of models and loss functions to one loss per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from rowprop.batch import tensors
from rowprop.checks import check_numbers
from rowprop.errors import InvalidInput

LossesFn = Callable[[Any, Any], "Tensor | tuple[Tensor, Tensor]"]
"""``(model, batch)`` to unreduced losses, or to a pair of losses and scores from the same forward."""


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


def only_losses(returned: object) -> Any:
    """The losses in the output of a losses function, which is losses alone or a pair of losses and scores."""
    return returned[0] if _is_pair(returned) else returned


def only_scores(returned: object) -> Any:
    """The scores in the output of a losses function: the second of a pair, else the losses."""
    return returned[1] if _is_pair(returned) else returned


def _is_pair(returned: object) -> TypeGuard[tuple[object, object]]:
    return isinstance(returned, tuple) and len(cast("tuple[object, ...]", returned)) == 2


def per_row(name: str, values: object, expected: int | None, *, counted: bool = False) -> Tensor:
    """One number per row, from ``(N,)`` or ``(N, ...)``, or a sentence about the output of ``name``."""
    given = described(values)
    if not isinstance(values, Tensor):
        advice = f"take the loss out of your model's output, inside {name}."
    elif values.dim() == 0:
        advice = "pass reduction='none' to the loss."
    elif expected is not None and values.shape[0] != expected:
        advice = "a loss per token must be brought back to its rows, e.g. `loss.view(N, -1)`."
    elif values.is_meta and not counted:
        advice = "move model and batch to a device that holds numbers."
    elif values.numel() == 0 or not values.is_floating_point():
        advice = "it must be a floating tensor with at least one row."
    else:
        return values if values.dim() == 1 else values.flatten(1).mean(1)
    size = "N" if expected is None else expected
    raise InvalidInput(
        f"{name} returned {given} but one number per row was needed, shape ({size},) or ({size}, ...); {advice}"
    )


def per_token(name: str, values: object) -> Tensor:
    """One number per token, ``(N, T)`` or of any other shape, or a sentence about the output of ``name``."""
    if not isinstance(values, Tensor):
        advice = f"take the loss out of your model's output, inside {name}."
    elif values.dim() == 0:
        advice = "pass reduction='none' to the loss."
    elif values.is_meta:
        advice = "move model and batch to a device that holds numbers."
    elif values.numel() == 0 or not values.is_floating_point():
        advice = "it must be a floating tensor with at least one token."
    else:
        return values
    raise InvalidInput(
        f"{name} returned {described(values)} but one number per token was needed, shape (N, T); {advice}"
    )


def described(value: object) -> str:
    """How a message calls a value that came."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}" + " on the device meta" * value.is_meta
    return f"a {type(value).__name__}"


def losses_of(losses_fn: LossesFn, model: Any, batch: Any, *, counted: bool = False) -> Tensor:
    """The losses of a batch's rows, shape ``(N,)``, with their graph; on the device meta where they are ``counted``."""
    return per_row("losses_fn", only_losses(losses_fn(model, batch)), None, counted=counted)
