"""Import optional packages, or name the line that installs them; torch is imported only to name its releases."""

from __future__ import annotations

import importlib
from typing import Any

from rowprop.errors import MissingExtra, one_line

PAGE = {"matplotlib.figure": "matplotlib", "jinja2": "jinja2"}
"""Modules that a page needs, and the packages that have them."""
COMPARE = PAGE | {"PIL.Image": "pillow"}
"""Modules that a comparison needs, and the packages that have them."""


def require(module: str, package: str, purpose: str, line: str | None = None) -> Any:
    """Import an optional module, or name the ``line`` of pip that installs it, by default that of the package alone.

    Raises:
        MissingExtra: The module is not installed, or is installed and does not import.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a build for another version may raise any error
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            run = line or f"pip install {_release(package)}"
            raise MissingExtra(f"{purpose} needs {package}, which is not installed; run: {run}.") from error
        raise MissingExtra(
            f"{purpose} needs {package}, which is installed but does not import: {one_line(error)}. "
            f"To install a release that fits, run: pip install -U {_release(package)}."
        ) from error


def require_all(modules: dict[str, str], purpose: str) -> None:
    """Refuse work that would lack one of these modules at its end; as :func:`require`."""
    for module, package in modules.items():
        require(module, package, purpose, f"pip install {' '.join(modules.values())}")


def _release(package: str) -> str:
    """The package as pip takes it; torchvision's releases each need one torch: 0.26 needs 2.11, 0.27 needs 2.12, ..."""
    if package != "torchvision":
        return package
    import torch

    return f"'torchvision==0.{int(torch.__version__.split('.')[1]) + 15}.*'"
