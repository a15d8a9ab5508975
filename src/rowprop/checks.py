"""Checks of arguments: each raises one sentence that says what came and what was needed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from rowprop.batch import tensors
from rowprop.errors import InvalidInput


def is_number(value: object) -> bool:
    """Whether it is a real, finite number; a bool is none."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and abs(cast("float", value)) <= sys.float_info.max


def shown(value: object) -> str:
    """A value as a sentence can hold it; of a tensor with dimensions the shape."""
    try:
        text = " ".join(repr(value).split())
        if isinstance(value, Tensor) and value.dim() > 0:
            text = f"<tensor of shape {tuple(value.shape)}, {value.dtype}>"
    except Exception:  # a user's object may fail in any way, and so do whole numbers of some thousand digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def signature_of(value: Any) -> inspect.Signature | None:
    """The signature by which it is called, a module's being that of its forward; None where it has none."""
    try:
        return inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # some callables written in C
        return None


def takes(value: object, arguments: int) -> bool:
    """Whether it can be called with that many arguments, as far as its signature says."""
    signature = signature_of(value)
    try:
        return signature is None or bool(signature.bind(*[None] * arguments))
    except TypeError:
        return False


def wrong(owner: str, name: str, value: object, needed: str, *, kind: bool = False) -> InvalidInput:
    """The error of a value that does not fit; ``needed`` ends its sentence, ``kind`` adds the value's type."""
    a_kind = f", a {type(value).__name__}," if kind else ""
    return InvalidInput(f"{owner} got {name}={shown(value)}{a_kind} but {needed}")


def check_kind(owner: str, name: str, value: object, kind: Any, needed: str) -> None:
    """Refuse a value that is no instance of ``kind``, as ``isinstance`` takes it."""
    if not isinstance(value, kind):
        raise wrong(owner, name, value, needed, kind=True)


def check_number(
    owner: str, name: str, value: object, needed: str, fits: Callable[[float], bool] = lambda _: True
) -> None:
    """Refuse a value that is no finite number, or none that ``fits``."""
    if not is_number(value) or not fits(cast("float", value)):
        raise wrong(owner, name, value, needed)


def check_within(owner: str, name: str, value: object, ends: str, remedy: str = "") -> None:
    """Refuse a value that is no number between 0 and 1; ``ends``, such as ``"(0, 1]"``, says which of these fit."""
    needed = f"a fraction in {ends} was needed{remedy}."
    fitting = [0] * (ends[0] == "[") + [1] * (ends[-1] == "]")
    check_number(owner, name, value, needed, lambda number: 0 < number < 1 or number in fitting)


def check_whole(owner: str, name: str, value: object, least: int, needed: str | None = None) -> None:
    """Refuse a value that is no whole number, less than ``least``, or too large for int64."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(owner, name, value, needed or f"a whole number, {least} or more, was needed.")
    if value >= 2**63:
        raise wrong(owner, name, value, "a whole number below 2**63 was needed.")


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is none of the choices; the first is the default."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(map(str, choices))
        raise wrong(owner, name, value, f"one of {listed} was needed; the default is {choices[0]}.")


def check_tensor(owner: str, name: str, value: object, needed: str = "a tensor was needed.") -> None:
    """Refuse a value that is no tensor."""
    check_kind(owner, name, value, Tensor, needed)


def check_numbers(owner: str, name: str, value: object, needed: str = "a tensor was needed.") -> None:
    """Refuse a value that is no tensor, a tensor on meta or a sparse one."""
    check_tensor(owner, name, value, needed)
    if cast("Tensor", value).is_meta:
        raise InvalidInput(f"{owner} got {name} on the device meta, which holds no numbers; move it to another device.")
    if cast("Tensor", value).layout != torch.strided:
        raise InvalidInput(f"{owner} got {name} that are sparse but a dense tensor was needed; call to_dense().")


def is_vector(value: object, dtype: torch.dtype = torch.int64) -> bool:
    """Whether it is a dense tensor of one dimension and this dtype that holds numbers."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != dtype:
        return False
    return value.layout == torch.strided and not value.is_meta


def check_vector(owner: str, name: str, value: object, dtype: torch.dtype, size: int | None = None) -> None:
    """Refuse a value that is no tensor of one dimension, this dtype and, where it is given, this size."""
    if not is_vector(value, dtype) or size not in (None, cast("Tensor", value).numel()):
        kind = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        needed = f"a tensor of shape ({'M' if size is None else size},) and dtype {dtype} was needed"
        raise InvalidInput(f"{owner} got {name} of the kind {kind} but {needed}; save and load the state whole.")


def check_generator(owner: str, value: object) -> None:
    """Refuse a value that is neither a torch.Generator nor None."""
    check_kind(owner, "generator", value, (Generator, NoneType), "a torch.Generator or None was needed.")


def checked_device(owner: str, value: torch.device | str) -> torch.device:
    """The device of that name, where a tensor can be made on it here."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except Exception as error:  # torch raises a different kind for each reason
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise InvalidInput(f"{owner} got device={shown(value)}, which cannot be used here: {reason}.") from error
    return device


def check_entries(owner: str, state: object, needed: Iterable[str]) -> None:
    """Refuse a saved state that is no mapping, or lacks an entry."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise InvalidInput(f"{owner} got {shown(state)}, a {kind}, but the mapping of state_dict() was needed.")
    if missing := ", ".join(name for name in needed if name not in state):
        raise InvalidInput(f"{owner} got a state without {missing} but all that state_dict() returned was needed.")


def check_callable(owner: str, name: str, value: object, needed: str) -> None:
    """Refuse a value that cannot be called, and a class."""
    if not callable(value) or isinstance(value, type):
        raise wrong(owner, name, value, needed, kind=True)


def check_function(owner: str, name: str, value: object, arguments: int, needed: str) -> None:
    """Refuse a value that cannot be called with that many arguments."""
    check_callable(owner, name, value, needed)
    if not takes(value, arguments):
        raise InvalidInput(f"{owner} got {name}={shown(value)}, which takes other arguments, but {needed}")


def check_tick(owner: str, value: object) -> None:
    """Refuse a value other than None that cannot be called with the progress."""
    if value is not None:
        check_function(owner, "tick", value, 2, "a function of a line and a fraction was needed.")


def check_losses_fn(owner: str, value: object, name: str = "losses_fn") -> None:
    """Refuse a value that cannot be a losses function."""
    needed = "a function was needed that takes the model and the batch and returns the losses of the rows."
    check_function(owner, name, value, 2, needed)


def check_graph(losses: Tensor) -> None:
    """Refuse losses whose backward cannot run."""
    if not losses.requires_grad:
        raise InvalidInput(
            "The losses have no graph; let losses_fn use trainable parameters, and neither detach() nor no_grad()."
        )


def check_trainable(owner: str, model: nn.Module, batch: object, losses_fn: object) -> None:
    """Refuse parts that make no training step: no module, nothing to train, or no numbers to compute with."""
    check_kind(owner, "model", model, nn.Module, "a torch.nn.Module was needed.")
    check_losses_fn(owner, losses_fn)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        needed = "call requires_grad_(True) on the part to be trained."
        raise InvalidInput(f"{owner} got a model without a parameter that requires a gradient; {needed}")
    for name, held in (("model", [*model.parameters(), *model.buffers()]), ("batch", tensors(batch))):
        if any(tensor.is_meta for tensor in held):
            raise InvalidInput(f"{owner} got a {name} on the device meta, which holds no numbers to compute with.")
