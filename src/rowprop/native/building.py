"""The compilation of native dispatch: ahead by ``rowprop native``, or in the background from the first use on.

Torch's cache has a folder for each version of the source, torch and Python. It holds the library; ``lock``, which the
kernel frees when the compiling process ends, however it ends; and ``failed``, why a compilation in the background
failed. The library is compiled in a temporary folder and moved when it is complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from rowprop import native

_SOURCE = Path(__file__).parent / "native.cpp"
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from rowprop.native import building; building.in_background()"
WHEEL = "rowprop_native"
"""The package of the wheel. Its library's name holds what it was compiled for."""
_started = list[bool]()  # not empty: this process started a compilation, and starts no other if that is killed
_next_look_s = [0.0]  # when arrive() looks for the library again, by time.monotonic()


def library() -> Path:
    """Where the library for this source, torch and Python is: in the wheel ``rowprop-native``, or in torch's cache."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or user / "torch_extensions")
    about = _SOURCE.read_bytes() + f"{torch.__version__}{EXTENSION_SUFFIXES[0]}".encode()
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = f"rowprop_native_{python}_{hashlib.sha256(about).hexdigest()[:12]}"
    wheel = importlib.util.find_spec(WHEEL)
    shipped = [Path(place, f"{name}.so") for place in wheel.submodule_search_locations or ()] if wheel else []
    return next((path for path in shipped if path.exists()), root / name / "rowprop_native.so")


def find() -> tuple[ModuleType | None, str]:
    """The extension, if it has been compiled and may be used; and what dispatches, with the reason, in a few words."""
    if native.off():
        return None, "Python, by ROWPROP_NATIVE=0"
    try:
        goal = library()
        if not goal.exists():
            return None, f"Python, {_outlook(goal)}"
        return _load(goal), "native, from the wheel rowprop-native" if goal.parent.name == WHEEL else "native"
    except (OSError, RuntimeError, ImportError) as error:
        return None, f"Python, as the native one cannot be loaded: {error}"


@cache
def _load(goal: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rowprop_native", goal)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def arrive() -> ModuleType | None:
    """The extension, the first time that it is there; None before and after.

    The first call has it compiled in the background if need be. While it is being compiled, one look a second.
    """
    if time.monotonic() < _next_look_s[0]:
        return None
    _next_look_s[0] = math.inf
    compiling = _start()
    found = find()[0]
    if found is None and compiling:
        _next_look_s[0] = time.monotonic() + 1
    return found


def build() -> None:
    """Compile the library, which takes about a minute, unless it is there; wait for another process that does.

    Raises:
        RuntimeError, OSError, ImportError, SubprocessError: There is no compiler or no ninja, it failed, or the folder
            cannot be written to.
    """
    goal = library()
    if goal.exists():
        return
    goal.parent.mkdir(parents=True, exist_ok=True)
    with _lock(goal, wait=True):
        _compile(goal)


def in_background() -> None:
    """What the process in the background does; it inherited the lock."""
    os.nice(10)
    goal = library()
    try:
        _compile(goal)
    except Exception as error:  # torch's loader fails in many ways
        goal.with_name("failed").write_text(reason(error))


def reason(error: Exception) -> str:
    """The line of a failed compilation that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error: " in line), [type(error).__name__, *lines][-1])


def _start() -> bool:
    """Have a process compile the library in the background, if none has failed; returns whether one is at it."""
    try:
        goal = library()
        if goal.exists() or _missing():
            return False
        goal.parent.mkdir(parents=True, exist_ok=True)
        with _lock(goal) as held:
            if held is None:
                return True
            _tell_failure(goal)
            if goal.exists() or _failure(goal) or _started:
                return False
            _started.append(True)
            # The shell ends at once and leaves no child to wait for; Ctrl-C does not reach the new session.
            command = ["sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", sys.executable, "-c", _CHILD, *sys.path]
            subprocess.run(command, pass_fds=[held], start_new_session=True, check=True)
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError):  # as in a read-only home
        return False
    _say("compiling native dispatch in the background, once: about a minute of one core. Until then Python dispatches.")
    return True


def _outlook(goal: Path) -> str:
    """Why there is no library, in a few words."""
    if lacks := _failure(goal) or _missing():
        return f"as the native one could not be compiled: {lacks}"
    nearest = next(place for place in goal.parents if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return f"as the native one cannot be written to {nearest}"
    if nearest == goal.parent:
        with _lock(goal) as held:
            if held is None:
                return "while the native one is being compiled"
    return "as the native one is not compiled: a first backward has it done in the background, `rowprop native` at once"


def _missing() -> str:
    """What a compilation in the background would miss, in a few words; empty for nothing."""
    compiler = (os.environ.get("CXX", "c++").split() or ["CXX="])[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    if shutil.which("ninja", path=_path()) is None:
        return 'there is no ninja (pip install "rowprop[native]")'
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
        return "there is no Python.h"
    # A program that was frozen into one file would start itself.
    return "" if sys.executable and not getattr(sys, "frozen", False) else "there is no Python to run"


def _failure(goal: Path) -> str:
    failed = goal.with_name("failed")
    return f"{failed.read_text()}; `rowprop native` tries again" if failed.exists() else ""


def _tell_failure(goal: Path) -> None:
    """One warning, by the first process that sees it."""
    if why := _failure(goal):
        with suppress(FileExistsError):
            goal.with_name("told").touch(exist_ok=False)
            _say(f"native dispatch could not be compiled, so Python dispatches: {why}.")


def _say(line: str) -> None:
    # By logging: where warnings are errors, a warning would end the backward.
    logging.getLogger("rowprop").warning("rowprop: %s ROWPROP_NATIVE=0 turns native dispatch off.", line)


@contextmanager
def _lock(goal: Path, *, wait: bool = False) -> Generator[int | None]:
    """Hold the lock; yields its descriptor, or None where another process holds it."""
    import fcntl  # not on Windows

    with goal.with_name("lock").open("a") as file:
        held: int | None = file.fileno()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = None
        except OSError:  # a file system without locks: only build() compiles there, perhaps twice at once
            if not wait:
                raise
        yield held


def _path() -> str:
    """Where programs are looked for: also beside this Python, as in an environment that was not activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _compile(goal: Path) -> None:
    if goal.exists():
        return
    from torch.utils import cpp_extension

    for left in goal.parent.glob("draft-*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    os.environ["PATH"] = _path()
    # A new folder each time: a killed process leaves torch's lock in it, for which later ones would wait forever.
    with tempfile.TemporaryDirectory(prefix="draft-", dir=goal.parent, ignore_cleanup_errors=True) as draft:
        load = cast(Any, cpp_extension).load
        load("rowprop_native", [str(_SOURCE)], extra_cflags=["-O2"], build_directory=draft, is_python_module=False)
        Path(draft, goal.name).replace(goal)
    for name in ("failed", "told"):
        goal.with_name(name).unlink(missing_ok=True)
