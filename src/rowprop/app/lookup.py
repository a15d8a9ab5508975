"""Find what ``module:callable`` names, or refuse it in one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rowprop.errors import InvalidInput, foreign


def load_object(spec: str, what: str) -> Any:
    """The callable that ``module:name`` or ``path/to/file.py:name`` names; the working directory is importable.

    Raises:
        InvalidInput: The text, ``what`` in the sentence, has another form; the module does not import, or ends the
            process meanwhile; or it has no such callable.
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
