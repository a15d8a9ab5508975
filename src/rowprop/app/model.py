"""The MODEL of the command line: a model, a batch and the losses of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowprop.app.lookup import importable, load_object, require
from rowprop.batch import map_tensors
from rowprop.checks import checked_device, takes
from rowprop.errors import InvalidInput, foreign
from rowprop.scoring import LossesFn, logits_of, score_without_graph


class Subject(NamedTuple):
    """A model with a batch of N rows and their losses, :func:`output_as_losses` where there are none."""

    model: nn.Module
    batch: Any
    losses_fn: LossesFn


def load_model(
    spec: str,
    *,
    input_shape: str | None = None,
    seed: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    needs_loss: bool = True,
    tokens: bool = False,
) -> Subject:
    """Build the model that ``spec`` names, with its batch and its losses.

    Args:
        spec: As for :func:`make_model`.
        input_shape: Shape of a random batch where ``spec`` brings none, e.g. ``"64x3x32x32"``: standard normal inputs,
            and a target per row that fits the model's output.
        seed: Of torch's random state, before the model is built and again before the batch is made. Default 0.
        device: Of model and batch. Default None: they stay where they were made.
        dtype: Of the model and of the batch's floating tensors, e.g. ``"float64"``. Default None: their own.
        needs_loss: False takes the output for losses where the batch has no target. Default True: it is refused.
        tokens: Whether default losses are :func:`default_token_losses`. Default False: :func:`default_losses`.

    Raises:
        InvalidInput: The spec names nothing, its callable fails or returns something else, or an option does not fit.
        MissingExtra: torchvision is not installed.
    """
    kind = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise InvalidInput(f"dtype {dtype!r} is unknown; use float32, float64, bfloat16 or float16.")
    if device is not None:
        checked_device("load_model", device)
    sizes = () if input_shape is None else input_shape.split("x")
    shape = [int(size) if size.isdecimal() else 0 for size in sizes]
    if 0 in shape:
        needed = "64x3x32x32: sizes of 1 or more, the rows first."
        raise InvalidInput(f"input shape {input_shape!r} is not of the form {needed}")
    torch.manual_seed(seed)
    model, batch, losses_fn = make_model(spec)
    model = model.to(device=device, dtype=kind)
    torch.manual_seed(seed)
    if batch is None:
        batch = _random_batch(spec, model, shape, torch.zeros((), device=device, dtype=kind))
    elif input_shape is not None:
        raise InvalidInput(f"model {spec!r} brings its own batch, so an input shape does not apply; leave it out.")
    else:
        batch = map_tensors(lambda t: t.to(device, kind if t.is_floating_point() else None), batch)
    if losses_fn is None and not needs_loss and _is_input_alone(model, batch):
        return Subject(model, batch, output_as_losses)
    return Subject(model, batch, losses_fn or (default_token_losses if tokens else default_losses))


def default_losses(model: nn.Module, batch: Any) -> Tensor:
    """The mean of each row's :func:`default_token_losses`, shape ``(N,)``."""
    return _mean_of_places(default_token_losses(model, batch))


def default_token_losses(model: nn.Module, batch: Any) -> Tensor:
    """The losses of a batch ``(*inputs, target)``, shape ``(N,)`` or ``(N, ...)``.

    A target of whole numbers is taken as classes: cross entropy of an output ``(N, C)`` or ``(N, C, ...)``, found by
    :func:`rowprop.scoring.logits_of`. A floating target of the output's shape gives the squared difference. What fits
    neither is refused.
    """
    remedy = "return (model, batch, losses_fn) to bring your own losses."
    if not isinstance(batch, (tuple, list)) or len(cast("list[Any]", batch)) < 2:
        kind = type(cast(object, batch)).__name__
        raise InvalidInput(f"The batch is a {kind} but a tuple (*inputs, target) was needed; {remedy}")
    *inputs, target = cast("list[Tensor]", batch)
    output = logits_of(model(*inputs))
    if target.is_floating_point() and target.shape == output.shape:
        return F.mse_loss(output, target, reduction="none")
    if not target.is_floating_point() and output.ndim >= 2 and target.shape == output.shape[:1] + output.shape[2:]:
        return F.cross_entropy(output, target.long(), reduction="none")
    raise InvalidInput(
        f"The model's output has shape {tuple(output.shape)} and the target shape {tuple(target.shape)} and dtype "
        f"{target.dtype}, but classes (N, ...) for an output (N, C, ...), or a floating target of the output's shape "
        f"was needed; {remedy}"
    )


def output_as_losses(model: nn.Module, batch: Any) -> Tensor:
    """The mean of each row's output; the model is called with a mapping's entries by name, a tuple's in order."""
    if isinstance(batch, Mapping):
        output = model(**cast("Mapping[str, Any]", batch))
    else:
        output = model(*cast("list[Any]", batch)) if isinstance(batch, (tuple, list)) else model(batch)
    return _mean_of_places(logits_of(output))


def _mean_of_places(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _is_input_alone(model: nn.Module, batch: object) -> bool:
    """Whether a batch has no target; a tuple has none if the model needs its last entry."""
    entries = len(cast("list[object]", batch)) if isinstance(batch, (tuple, list)) else 1
    return entries == 1 or (not takes(model.forward, entries - 1) and takes(model.forward, entries))


def make_model(spec: str) -> tuple[nn.Module, Any, LossesFn | None]:
    """Build what ``spec`` names: a model, its batch and losses, or None for these.

    It is ``torchvision/NAME``, or ``module:callable`` or ``path/to/file.py:callable`` (the working directory is
    importable), called without arguments, returning a model, ``(model, batch)`` or ``(model, batch, losses_fn)``. Else
    it is refused.
    """
    library, _, name = spec.partition("/")
    if library == "torchvision" and ":" not in spec:
        models = require("torchvision.models", "torchvision", f"model {spec!r}")
        with foreign(f"model {spec!r} could not be built"):
            return models.get_model(name, weights=None), None, None
    if ":" not in spec:
        raise InvalidInput(f"model {spec!r} is neither module:callable nor torchvision/NAME.")
    factory = cast("Callable[[], Any]", load_object(spec, "model"))
    with foreign(f"model {spec!r} failed when called without arguments"), importable(Path.cwd()):
        made = factory()
    parts: list[Any] = list(cast("tuple[Any, ...]", made)) if isinstance(made, tuple) else [made]
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module) or (len(parts) == 3 and not callable(parts[2])):
        kinds = ", ".join(type(part).__name__ for part in parts)
        needed = "a torch.nn.Module, (model, batch) or (model, batch, losses_fn) was needed."
        raise InvalidInput(f"model {spec!r} returned ({kinds}), but {needed}")
    parts += [None] * (3 - len(parts))
    return parts[0], parts[1], parts[2]


def _random_batch(spec: str, model: nn.Module, shape: list[int], like: Tensor) -> tuple[Tensor, Tensor]:
    if not shape:
        remedy = "return (model, batch) or give the shape of a random one, e.g. --input-shape 64x3x32x32."
        raise InvalidInput(f"model {spec!r} comes without a batch; {remedy}")
    with foreign(f"a random batch of shape {tuple(shape)} could not be made"):
        inputs = like.new_empty(shape).normal_()
    with foreign(f"model {spec!r} failed on a random batch of shape {tuple(shape)}"):
        output = logits_of(score_without_graph(lambda model, batch: model(batch), model, inputs))
    if output.ndim == 0 or output.shape[0] != shape[0]:
        returned = f"shape {tuple(output.shape)} for {shape[0]} rows"
        raise InvalidInput(f"model {spec!r} returned {returned}, but one entry per row was needed.")
    if output.ndim == 2 and output.shape[1] > 1:
        return inputs, torch.randint(output.shape[1], (shape[0],), device=output.device)
    return inputs, torch.randn_like(output)
