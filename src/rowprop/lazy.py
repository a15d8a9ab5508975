"""A package whose names and modules are imported when they are first asked for, and its backend of torch.compile."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast


def on_first_use(
    package: str, names: Mapping[str, str], modules: Sequence[str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__all__``, ``__getattr__`` and ``__dir__``, which import a name or a module at its first use.

    ``names`` maps each module of the package to its names, separated by spaces. The package becomes their
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


class Metadata:
    """Lets importlib.metadata find a package that is on the path but not installed, with its entry points.

    An object for ``sys.meta_path`` that finds no modules. An installed package takes precedence.
    """

    def __init__(self, package: str, entry_points: str) -> None:
        self.package = package
        self.files = {"METADATA": f"Name: {package}\n", "entry_points.txt": entry_points}

    def find_spec(self, *_: Any) -> None:
        """No module is found here."""

    def find_distributions(self, context: Any) -> list[Any]:
        """The package, if it is asked for."""
        from importlib.metadata import Distribution  # only here: this import is slow

        def read_text(_: Any, filename: str) -> str | None:
            return self.files.get(filename)

        found = type("Found", (Distribution,), {"read_text": read_text, "locate_file": None})
        return [found()] if context.name in (None, self.package) else []


def offer_backend(package: str, home: str) -> None:
    """Register ``home``, ``"module:name"``, as ``torch.compile(backend=package)``, also if nothing is installed.

    Torch looks for entry points when a backend is first asked for by its name, so it is not imported here.
    """
    group = "torch_dynamo_backends"
    sys.meta_path.append(cast(Any, Metadata(package, f"[{group}]\n{package} = {home}\n")))
    if (registry := sys.modules.get("torch._dynamo.backends.registry")) is not None:  # it may have looked already
        from importlib.metadata import EntryPoint

        registry._BACKENDS.setdefault(package, EntryPoint(package, home, group))
