"""Import what a user names, or an optional package, or refuse it in one sentence; torch only names its releases."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rowprop.errors import LAB, InvalidInput, MissingExtra, foreign, one_line

PAGE = {"matplotlib.figure": "matplotlib", "jinja2": "jinja2"}  # modules that a page needs, and their packages
COMPARE = PAGE | {"PIL.Image": "pillow", "scipy.special": "scipy"}  # what `rowprop compare` needs


def require(module: str, package: str, purpose: str, line: str | None = None) -> Any:
    """Import an optional module, or raise MissingExtra with pip's ``line`` for it, by default the package alone."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a build for another version may raise any error
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            run = line or f"pip install {_release(package)}"
            raise MissingExtra(f"{purpose} needs {package}, which is not installed; run: {run}.") from error
        does_not = f"is installed but does not import: {one_line(error)}"
        remedy = f"To install a release that fits, run: pip install -U {_release(package)}."
        raise MissingExtra(f"{purpose} needs {package}, which {does_not}. {remedy}") from error


def require_all(modules: dict[str, str], purpose: str) -> None:
    """Refuse work that would lack one of these modules at its end; as :func:`require`."""
    for module, package in modules.items():
        require(module, package, purpose, f"pip install {' '.join(modules.values())}")


def require_lab(command: str, *, digits: bool) -> Any:
    """Import `rowprop compare` from ``lab/``, beside ``src/`` in a checkout; elsewhere say where to find it."""
    if not LAB.is_dir():
        home = "is not in the installed package: it is in the folder lab/ of rowprop's repository"
        raise InvalidInput(f"{command} {home}; clone it and run scripts/demo there, or pip install -e '.[compare]'.")
    require_all(COMPARE | ({"sklearn.datasets": "scikit-learn"} if digits else {}), command)
    if str(LAB.parent) not in sys.path:  # it is there where the install is editable
        sys.path.append(str(LAB.parent))
    return importlib.import_module(f"{LAB.name}.command")


def _release(package: str) -> str:
    """The package as pip takes it; torchvision's releases each need one torch: 0.26 needs 2.11, 0.27 needs 2.12, ..."""
    if package != "torchvision":
        return package
    import torch

    return f"'torchvision==0.{int(torch.__version__.split('.')[1]) + 15}.*'"


def load_object(spec: str, what: str) -> Any:
    """The callable that ``module:name`` or ``path/to/file.py:name`` names; the working directory is importable.

    Refused are another form of the text, ``what`` in the sentence, and a module that does not import or has none such.
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
