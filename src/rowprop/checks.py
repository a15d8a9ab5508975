"""Checks of arguments that parts of all kinds share, each a sentence where it fails."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from rowprop.batch import tensors
from rowprop.errors import InvalidInput


def is_number(value: object) -> bool:
    """Whether it is a real, finite number; a bool is none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def check_number(owner: str, name: str, value: object, wanted: str, fits: Callable[[float], bool]) -> None:
    """Refuse a value that is no number, or none that ``fits``."""
    if not is_number(value) or not fits(cast("float", value)):
        raise InvalidInput(f"{owner} got {name}={shown(value)} but a fraction in {wanted} was needed.")


def check_whole(owner: str, name: str, value: object, least: int, needed: str | None = None) -> None:
    """Refuse a value that is no whole number, or less than ``least``; ``needed`` is the sentence's second half."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        needed = f"a whole number, {least} or more, was needed." if needed is None else needed
        if isinstance(value, int) and value >= 2**63:
            needed = "a whole number below 2**63 was needed."
        raise InvalidInput(f"{owner} got {name}={shown(value)} but {needed}")


def check_numbers(owner: str, name: str, value: object, needed: str = "a tensor was needed.") -> None:
    """Refuse a value that is no tensor, a tensor on meta or a sparse one; ``needed`` is the sentence's second half."""
    check_tensor(owner, name, value, needed)
    if cast("Tensor", value).is_meta:
        raise InvalidInput(
            f"{owner} got {name} on the device meta, which holds no numbers; cpu or an accelerator was needed."
        )
    if cast("Tensor", value).layout != torch.strided:
        raise InvalidInput(f"{owner} got {name} that are sparse but a dense tensor was needed; call to_dense().")


def check_tensor(owner: str, name: str, value: object, needed: str = "a tensor was needed.") -> None:
    """Refuse a value that is no tensor; ``needed`` is the sentence's second half."""
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{owner} got {name}={shown(value)}, a {type(value).__name__}, but {needed}")


def check_flag(owner: str, name: str, value: object) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{owner} got {name}={shown(value)} but True or False was needed.")


def check_entries(owner: str, state: object, needed: Iterable[str]) -> None:
    """Refuse a saved state that is no mapping, or lacks an entry."""
    if not isinstance(state, Mapping):
        raise InvalidInput(
            f"{owner} got {shown(state)}, a {type(state).__name__}, but the mapping of state_dict() was needed."
        )
    missing = [name for name in needed if name not in state]
    if missing:
        raise InvalidInput(
            f"{owner} got a state without {', '.join(missing)} but all that state_dict() returned was needed; save and "
            "load it whole."
        )


def check_vector(owner: str, name: str, value: object, dtype: torch.dtype, size: int | None = None) -> None:
    """Refuse a value that is no tensor of one dimension, this dtype and, where it is given, this size."""
    fits = isinstance(value, Tensor) and value.dim() == 1 and value.dtype == dtype and not value.is_meta
    if not fits or (size is not None and cast("Tensor", value).numel() != size):
        kind = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InvalidInput(
            f"{owner} got {name} of the kind {kind} but a tensor of shape ({'M' if size is None else size},) and dtype "
            f"{dtype} was needed; save and load the state whole."
        )


def signature_of(value: Any) -> inspect.Signature | None:
    """The signature by which it is called, a module's being that of its forward; None where nothing tells it."""
    try:
        return inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # written in C, some callables have none
        return None


def takes(value: object, arguments: int) -> bool:
    """Whether it can be called with that many arguments, as far as its signature tells."""
    signature = signature_of(value)
    try:
        if signature is not None:
            signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def check_callable(owner: str, name: str, value: object, needed: str) -> None:
    """Refuse a value that cannot be called, and a class, which makes something; ``needed`` ends the sentence."""
    if not callable(value) or isinstance(value, type):
        raise InvalidInput(f"{owner} got {name}={shown(value)}, a {type(value).__name__}, but {needed}")


def check_function(owner: str, name: str, value: object, arguments: int, needed: str) -> None:
    """Refuse a value that cannot be called with that many arguments; ``needed`` ends the sentence."""
    check_callable(owner, name, value, needed)
    if not takes(value, arguments):
        raise InvalidInput(f"{owner} got {name}={shown(value)}, which takes other arguments, but {needed}")


def check_tick(owner: str, value: object) -> None:
    """Refuse a value that cannot be told of progress; None is nobody."""
    if value is not None:
        check_function(owner, "tick", value, 2, "a function of a line and a fraction was needed.")


def check_losses_fn(owner: str, value: object, name: str = "losses_fn") -> None:
    """Refuse a value that cannot be a losses function."""
    needed = "a function was needed that takes the model and the batch and returns the losses of the rows."
    check_function(owner, name, value, 2, needed)


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is none of the choices; the first is the default."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise InvalidInput(
            f"{owner} got {name}={shown(value)} but one of {', '.join(map(str, choices))} was needed; the default is "
            f"{choices[0]}."
        )


def check_progress(owner: str, value: object) -> None:
    """Refuse a value that is no number; how far below 0 or above 1 is for the schedule to say."""
    if not is_number(value):
        raise InvalidInput(f"{owner} got progress={shown(value)} but a fraction of the training in [0, 1] was needed.")


def check_floating(owner: str, value: object) -> None:
    """Refuse a value that is no floating dtype."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InvalidInput(f"{owner} got dtype={shown(value)} but a floating dtype was needed, e.g. torch.float32.")


def checked_device(owner: str, value: torch.device | str) -> torch.device:
    """The device of that name, or a sentence where no tensor can be made on it here."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises a different kind for each way in which a device is not there
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise InvalidInput(f"{owner} got device={shown(value)}, which cannot be used here: {reason}.") from error
    return device


def check_generator(owner: str, value: object) -> None:
    """Refuse a value that is neither a torch.Generator nor None."""
    if value is not None and not isinstance(value, Generator):
        raise InvalidInput(
            f"{owner} got generator={shown(value)}, a {type(value).__name__}, but a torch.Generator was needed; "
            "torch.Generator().manual_seed(0) makes one."
        )


def shown(value: object) -> str:
    """A value as a sentence can hold it."""
    try:
        text = repr(value)
    except Exception:  # a user's object may fail in any way, and so do whole numbers of some thousand digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_trainable(owner: str, model: object, batch: object, losses_fn: object) -> None:
    """Refuse parts that make no training step: no module, nothing to train, or no numbers to compute with."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"{owner} got a model of type {type(model).__name__} but a torch.nn.Module was needed.")
    check_losses_fn(owner, losses_fn)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput(
            f"{owner} got a model without a parameter that requires a gradient, so there is no backward to run; call "
            "requires_grad_(True) on the part to be trained."
        )
    for name, held in (("model", [*model.parameters(), *model.buffers()]), ("batch", tensors(batch))):
        if any(tensor.device.type == "meta" for tensor in held):
            raise InvalidInput(
                f"{owner} got a {name} on the device meta, which holds no numbers to compute with; move it to cpu or "
                "to an accelerator."
            )
