"""Native dispatch: an extension in C++ that replays what the Python rules did, see ``native.cpp``.

It changes the time that the host takes for an op, and no bit of a result. It is compiled once for a version of rowprop,
torch and Python, see ``building.py``. ``ROWPROP_NATIVE=0`` turns it off.
"""

from __future__ import annotations

import os
import threading
from typing import Any

extension: Any = None
"""The extension, while it is in use."""


def off() -> bool:
    """Whether it is turned off."""
    return os.environ.get("ROWPROP_NATIVE") == "0"


thread = threading.local()
"""Its attribute ``recorder`` is the recorder at work, if there is one."""


def recording() -> Any:
    """The recorder that is at work on this thread; None for none."""
    return getattr(thread, "recorder", None)


def reads(what: str) -> None:
    """Tell the recorder, if one is at work, that a rule depends on what is not in the key of its call."""
    found = recording()
    if found is not None:
        found.why = found.why or what
