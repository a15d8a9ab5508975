"""Reading the clock beside an accelerator, which works on after the calls have returned.

``drained_s`` and ``timed`` wait for the device; ``mark`` and ``between_s`` let it run.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

HOST = ("cpu", "meta")
"""The kinds of devices on which a call returns when its work is done."""


def drained_s(device: torch.device | None = None) -> float:
    """Wait until the queue of a device is empty; then return the seconds of the clock.

    Args:
        device: The device. Default None: this machine's accelerator, if there is one.
    """
    if torch.accelerator.is_available() if device is None else device.type not in HOST:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Generator[None]:
    """Add the block's seconds to ``seconds[phase]``; the queue is empty before and after."""
    begun_s = drained_s()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + drained_s() - begun_s


def mark(device: torch.device) -> Any:
    """Note the time: on an accelerator as an event in its queue, for which nobody waits."""
    if device.type in HOST:
        return time.perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(*([module.current_stream(device)] if hasattr(module, "current_stream") else []))
    return event


def between_s(begin: Any, end: Any) -> float:
    """Seconds between two marks that the device has reached."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
