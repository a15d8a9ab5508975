"""Native dispatch: an extension in C++ that replays what the Python rules did, see ``native.cpp``.

It changes the time that the host takes for an op, and no bit of a result. ``rowprop native`` compiles it, once for a
version of rowprop, torch and Python; from then on it is used. ``ROWPROP_NATIVE=0`` turns it off.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

extension: Any = None
"""The extension, while it is in use."""

_SOURCE = Path(__file__).parent / "native.cpp"


def folder() -> Path:
    """Where the extension for this source, torch and Python lies: beside those that torch compiles."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    about = _SOURCE.read_bytes() + torch.__version__.encode()
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return root / f"rowprop_native_{python}_{hashlib.sha256(about).hexdigest()[:12]}"


def build() -> ModuleType:
    """Compile the extension, which takes about a minute, or load it where it is compiled already.

    A process that finds another one compiling waits for it.

    Raises:
        RuntimeError, OSError, ImportError, SubprocessError: There is no compiler or no ninja, it failed, or the folder
            cannot be written to.
    """
    from torch.utils import cpp_extension

    load = cast(Any, cpp_extension).load
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    built = load("rowprop_native", [str(_SOURCE)], extra_cflags=["-O2"], build_directory=str(where))
    (where / "complete").touch()
    return built


@cache
def find() -> tuple[ModuleType | None, str]:
    """The extension, if it has been compiled and may be used; and what dispatches, with the reason, in a few words."""
    if os.environ.get("ROWPROP_NATIVE") == "0":
        return None, "Python, by ROWPROP_NATIVE=0"
    try:
        where = folder()
        if not (where / "complete").exists():
            return None, "Python, as `rowprop native` has not compiled the native one"
        spec = importlib.util.spec_from_file_location("rowprop_native", where / "rowprop_native.so")
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    except (OSError, RuntimeError, ImportError) as error:
        return None, f"Python, as the native one cannot be loaded: {error}"
    return found, "native"
