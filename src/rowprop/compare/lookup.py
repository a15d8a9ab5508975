"""Objects and optional packages found by name, with one clear sentence where they are not."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rowprop.errors import InvalidInput, MissingExtra


def load_object(spec: str, what: str) -> Any:
    """Return the object that ``module:name`` names; the working directory counts as importable.

    Args:
        spec: ``module:name``; dots are allowed on both sides.
        what: What is being looked for, as it should read in an error ("model", "data").

    Raises:
        InvalidInput: The text is not ``module:name``, the module does not import, or it has no such name.

    """
    module_name, colon, path = spec.partition(":")
    if not (colon and module_name and path):
        raise InvalidInput(f"{what} {spec!r} is not of the form module:callable.")
    working_dir = os.getcwd()  # noqa: PTH109  (sys.path holds strings)
    added = working_dir not in sys.path
    if added:
        sys.path.insert(0, working_dir)
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise InvalidInput(f"{what} {spec!r} could not be loaded: {type(error).__name__}: {error}.") from error
    finally:
        if added and working_dir in sys.path:
            sys.path.remove(working_dir)
    if not callable(found):
        raise InvalidInput(f"{what} {spec!r} is of type {type(found).__name__}, but a callable was needed.")
    return found


def require(module: str, package: str, purpose: str) -> Any:
    """Import an optional module, or say which pip line brings it.

    Raises:
        MissingExtra: The module is not installed.

    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs {package}, which is not installed; run: pip install 'rowprop[compare]'."
        ) from error
