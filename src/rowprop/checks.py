"""Checks of arguments that parts of all kinds share, each a sentence where it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

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
