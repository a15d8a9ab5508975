"""What the host may read of a tensor, and whether it waits for a device then.

An accelerator works on after a call has returned, so the host runs ahead of it. A read of a tensor's values makes the
host wait until the device has caught up, and the device then waits for its next call. So a part that could go on
without the values does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

READ_AT_ONCE = {"cpu"}
"""Kinds of devices whose values are there when a call returns. Tests empty it: each part then acts as on a GPU."""


def waits(where: Tensor | torch.device) -> bool:
    """Whether the host waits for the device when it reads values of this tensor, or of tensors on this device."""
    return (where.device if isinstance(where, Tensor) else where).type not in READ_AT_ONCE


def readable(tensor: Tensor) -> bool:
    """Whether there are values to read: not on ``meta``, in a fake tensor, or on a stream of a CUDA graph's capture."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
