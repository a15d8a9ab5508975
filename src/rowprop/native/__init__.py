"""Native dispatch: an extension in C++ that replays what the Python rules did, see ``native.cpp``.

It changes the time that the host takes for an op, and no bit of a result. It is compiled once for a version of rowprop,
torch and Python, see ``building.py``. ``ROWPROP_NATIVE=0`` turns it off.
"""

from __future__ import annotations

import os
from typing import Any

extension: Any = None
"""The extension, while it is in use."""


def off() -> bool:
    """Whether it is turned off."""
    return os.environ.get("ROWPROP_NATIVE") == "0"
