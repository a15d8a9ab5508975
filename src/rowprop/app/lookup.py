"""Find objects, modules and optional packages by name, or refuse in one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rowprop.errors import InvalidInput, MissingExtra, foreign, one_line


def load_object(spec: str, what: str) -> Any:
    """Return the callable that ``module:name`` names; the working directory counts as importable.

    Args:
        spec: ``module:name`` or ``path/to/file.py:name``; dots are allowed in a module and in a name.
        what: The noun for the object in an error ("model", "data").

    Raises:
        InvalidInput: The text is not ``module:name``; the module does not import, or ends the process meanwhile; or it
            has no such callable.

    """
    home, colon, path = spec.rpartition(":")
    if not (colon and home and path):
        raise InvalidInput(f"{what} {spec!r} is not of the form module:callable.")
    with foreign(f"{what} {spec!r} could not be loaded"), importable(Path.cwd()):
        found: Any = _load_file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
        for name in path.split("."):
            found = getattr(found, name)
    if not callable(found):
        raise InvalidInput(f"{what} {spec!r} is of type {type(found).__name__}, but a callable was needed.")
    return found


@contextmanager
def importable(folder: Path) -> Generator[None]:
    """Let modules of ``folder`` be imported inside the block."""
    entry = str(folder)
    added = entry not in sys.path
    if added:
        sys.path.insert(0, entry)
    try:
        yield
    finally:
        if added and entry in sys.path:
            sys.path.remove(entry)


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module; its neighbours are importable meanwhile."""
    name = f"_rowprop_{path.stem}"  # an installed module may have the file's own name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up
    with importable(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def require(module: str, package: str, purpose: str) -> Any:
    """Import an optional module, or name the pip line that installs it.

    Raises:
        MissingExtra: The module is not installed, or is installed and does not import.

    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise _broken(package, purpose, error) from error
        raise MissingExtra(f"{purpose} needs {package}, which is not installed; run: {_pip(package)}.") from error
    except Exception as error:  # a build for another version may raise any error
        raise _broken(package, purpose, error) from error


def _broken(package: str, purpose: str, error: Exception) -> MissingExtra:
    return MissingExtra(
        f"{purpose} needs {package}, which is installed but does not import: {one_line(error)}. "
        f"To install a release that fits, run: {_pip(package)}."
    )


def _pip(package: str) -> str:
    """The line that installs a package and keeps the installed torch.

    Each torchvision needs one torch: 0.21 needs 2.6, 0.22 needs 2.7, and so on; timm needs a torchvision.
    """
    if package not in ("torchvision", "timm"):
        return "pip install 'rowprop[compare]'"
    found = re.match(r"2\.(\d+)", torch.__version__)
    torchvision = "torchvision" if found is None else f"'torchvision==0.{int(found[1]) + 15}.*'"
    return f"pip install {torchvision}" if package == "torchvision" else f"pip install {torchvision} timm"
