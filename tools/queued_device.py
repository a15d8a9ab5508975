"""A simulated accelerator, whose clock the tests read: the second CUDA device, with a queue of work."""

from __future__ import annotations

from types import SimpleNamespace

import torch

WORKS_ON = torch.device("cuda", 1)


class Accelerator:
    """A device with a queue: a launch takes the host little time, and work runs when the work before it is done."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0

    def launch(self, work_s: float, launch_s: float = 0.001) -> None:
        self.host_s += launch_s
        self.device_s = max(self.device_s, self.host_s) + work_s

    def synchronize(self, device: torch.device) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at_s=None)

        def record(stream: torch.device) -> None:
            assert stream == WORKS_ON
            event.at_s = max(self.host_s, self.device_s)

        event.record = record
        event.query = lambda: event.at_s <= self.host_s
        event.elapsed_time = lambda other: 1000 * (other.at_s - event.at_s)
        return event

    def current_stream(self, device: torch.device) -> torch.device:
        return device
