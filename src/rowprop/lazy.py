"""Modules that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def on_first_use(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, by which its modules are imported when they are first asked for.

    Args:
        package: The package's ``__name__``.
        names: What the package itself offers, its ``__all__``.
        modules: Modules of the package.

    """

    def __getattr__(name: str) -> ModuleType:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*names, *modules, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return __getattr__, __dir__
