"""The library's errors and its warning. Messages say what came, what was needed and what to do."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["InvalidInput", "MissingExtra", "RankFailed", "RowpropError", "TooSmall", "UnsupportedOperation"]


class RowpropError(Exception):
    """Base of every error that rowprop raises on purpose."""


class InvalidInput(RowpropError, ValueError):
    """An argument has the wrong shape, dtype or range."""


class UnsupportedOperation(RowpropError, RuntimeError):
    """The requested operation has no exact result here."""


class RankFailed(RowpropError, RuntimeError):
    """Another rank of the group failed; the error on that rank says why."""


class MissingExtra(RowpropError, ImportError):
    """An optional dependency is not installed; the message has the pip command."""


class TooSmall(UserWarning):
    """The model is too small to gain by slicing, by its counted work or because the device idles."""


@contextmanager
def foreign(failing: str) -> Generator[None]:
    """Turn an error of user code in the block into one sentence, which begins with ``failing``."""
    try:
        yield
    except (RowpropError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        remedy = 'put the lines that only a script should run under `if __name__ == "__main__":`.'
        raise InvalidInput(f"{failing}: its code ends the process ({one_line(error)}); {remedy}") from error
    except BaseException as error:
        raise InvalidInput(f"{failing}: {one_line(error)}.") from error


def one_line(error: BaseException) -> str:
    """An error of user code in one line: its type, its message, and the line that raised it."""
    message = next(iter(str(error).splitlines()), "")
    line, place = f"{type(error).__name__}: {message}".rstrip(": ."), place_of(error)
    return line if place is None else f"{line} ({place})"


def place_of(error: BaseException) -> str | None:
    """The innermost ``file:line`` in the user's code, else in an installed package, else the module that ran."""
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    for kind in ("own", "installed"):
        for frame, line in frames:
            if _kind(frame.f_code.co_filename) == kind:
                path, here = Path(frame.f_code.co_filename), Path.cwd()
                return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
    modules = (frame.f_locals.get("self") for frame, _ in frames)
    module = next((module for module in modules if hasattr(module, "extra_repr")), None)
    return None if module is None else f"in {type(module).__name__}({module.extra_repr()})"


def is_ours(error: BaseException) -> bool:
    """Whether the error is a bug in rowprop: not a RowpropError, and the innermost frame is rowprop's."""
    if isinstance(error, (RowpropError, MemoryError)) or any(text in str(error) for text in _MACHINE):
        return False
    innermost = next(reversed(list(traceback.walk_tb(error.__traceback__))), None)
    return innermost is not None and _kind(innermost[0].f_code.co_filename) == "rowprop"


_MACHINE = ("out of memory", "can't allocate memory", "CUDA error", "No space left on device")  # out of resources
_TOOLS = ("torch", "typer", "click", "rich")
LAB = Path(__file__).parents[2] / "lab" / "rowprop_lab"  # only a checkout has it


def _kind(file: str) -> str:
    """Whose a source file is: ``"rowprop"``, a ``"tool"``, ``"installed"`` or the user's ``"own"``."""
    path = Path(file)
    if path.is_relative_to(Path(__file__).parent) or path.is_relative_to(LAB):
        return "rowprop"
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    package = next((path.relative_to(home).parts[0] for home in installed if path.is_relative_to(home)), None)
    if package is not None:
        return "tool" if package in _TOOLS else "installed"
    return "tool" if file.startswith("<") or path.is_relative_to(sysconfig.get_path("stdlib")) else "own"
