"""A package whose names and modules are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def on_first_use(
    package: str, names: Mapping[str, str], modules: Sequence[str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__all__``, ``__getattr__`` and ``__dir__``, which import a name or a module at its first use.

    ``names``, separated by spaces, are by the module of the package that holds them. The package becomes their
    ``__module__``, so that tracebacks and reprs show the names that users import.
    """
    homes = {name: f"{package}.{module}" for module, listed in names.items() for name in listed.split()}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        found.__module__ = package
        setattr(sys.modules[package], name, found)  # from now on it is found without a call
        return found

    def __dir__() -> list[str]:
        return sorted({*homes, *modules, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return sorted(homes), __getattr__, __dir__
