"""The host and an accelerator that runs asynchronously: which values can be read, and timing.

Reading values syncs with the device, which then idles until the next call. Code avoids it where possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

HOST = ("cpu", "meta")  # the kinds of devices on which a call returns when its work is done
READ_AT_ONCE = {"cpu"}  # devices whose values can be read without a sync; tests empty it to act as on a GPU


def waits(where: Tensor | torch.device) -> bool:
    """Whether reading values of this tensor, or of tensors on this device, syncs with the device."""
    return (where.device if isinstance(where, Tensor) else where).type not in READ_AT_ONCE


def readable(tensor: Tensor) -> bool:
    """Whether there are values to read: not on ``meta``, in a fake tensor, or on a stream of a CUDA graph's capture."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def drained_s(device: torch.device | None = None) -> float:
    """Wait until the queue of a device (None: this machine's accelerator) is empty; then return the clock's seconds."""
    if torch.accelerator.is_available() if device is None else device.type not in HOST:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def timed(seconds: dict[str, float] | None, phase: str) -> Generator[None]:
    """Add the block's seconds to ``seconds[phase]``, the queue being empty before and after; None takes no time."""
    begun_s = 0.0 if seconds is None else drained_s()
    yield
    if seconds is not None:
        seconds[phase] = seconds.get(phase, 0.0) + drained_s() - begun_s


def mark(device: torch.device) -> Any:
    """Record the time; on an accelerator as an event in its queue, without a sync."""
    if device.type in HOST:
        return time.perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(*([module.current_stream(device)] if hasattr(module, "current_stream") else []))
    return event


def reach(noted: Any) -> None:
    """Wait until the device has reached a mark, so that earlier copies to the host are complete."""
    if not isinstance(noted, float):
        noted.synchronize()


def between_s(begin: Any, end: Any) -> float:
    """Seconds between two marks that the device has reached."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


def has_streams(device: torch.device) -> bool:
    """Whether the device works off its ops in streams."""
    if device.type in ("cpu", "meta") or not torch.accelerator.is_available():
        return False
    return cast(torch.device, torch.accelerator.current_accelerator()).type == device.type


def present_stream(device: torch.device) -> Callable[[], Any]:
    """A call that returns the stream that work on this device is put on now; None if the device has no streams.

    Some ops ask three times, so it is the cheapest call that there is.
    """
    if not has_streams(device):
        return lambda: None
    if device.type == "cuda":
        return partial(torch._C._cuda_getCurrentStream, device.index)  # pyright: ignore
    return partial(torch.accelerator.current_stream, device)


def record(tensor: Tensor) -> None:
    """Keep the tensor's memory, once it is free, until the present stream has done the work that it has now."""
    tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def wait_for(stream: Any, device: torch.device) -> None:
    """Let the present stream, not the host, wait for the work that another stream has now."""
    other = cast(Any, torch).Stream(*stream) if isinstance(stream, tuple) else stream
    torch.accelerator.current_stream(device).wait_stream(other)
