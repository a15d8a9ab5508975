"""Checks of arguments that parts of all kinds share, each a sentence where it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from torch import Generator, Tensor

from rowprop.errors import InvalidInput


def is_number(value: object) -> bool:
    """Whether it is a real, finite number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_number(owner: str, name: str, value: object, wanted: str, fits: Callable[[float], bool]) -> None:
    """Refuse what is no number, or none that ``fits``."""
    if not is_number(value) or not fits(cast("float", value)):
        raise InvalidInput(f"{owner} got {name}={value!r} but a fraction in {wanted} was needed.")


def check_whole(owner: str, name: str, value: object, least: int, needed: str | None = None) -> None:
    """Refuse what is no whole number, or less than ``least``; ``needed`` is the sentence's second half."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        needed = f"a whole number, {least} or more, was needed." if needed is None else needed
        raise InvalidInput(f"{owner} got {name}={value!r} but {needed}")


def check_tensor(owner: str, name: str, value: object, needed: str = "a tensor was needed.") -> None:
    """Refuse what is no tensor; ``needed`` is the sentence's second half."""
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{owner} got {name}={_shown(value)}, a {type(value).__name__}, but {needed}")


def check_generator(owner: str, value: object) -> None:
    """Refuse what is neither a torch.Generator nor None."""
    if value is not None and not isinstance(value, Generator):
        raise InvalidInput(
            f"{owner} got generator={_shown(value)}, a {type(value).__name__}, but a torch.Generator was needed; "
            "torch.Generator().manual_seed(0) makes one."
        )


def _shown(value: object) -> str:
    """A value as a sentence can hold it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
