"""Why an op has to run on all rows."""

from __future__ import annotations

from torch import Tensor

from rowprop.backprop.watch import note
from rowprop.host import readable, waits
from rowprop.native import reads


class NeedsAllRows(Exception):
    """Raised within a rule if the op has to run at full size; the message is the reason, as in :class:`Densify`."""


def check_readable(tensor: Tensor, what: str) -> None:
    """Ask before a rule reads ``what`` off a tensor, which it cannot on meta or while a CUDA graph is captured.

    A wait is cheaper than a full-size backward, and is reported.
    """
    reads("a value")
    if waits(tensor):
        if not readable(tensor):
            raise NeedsAllRows(f"only a look at the device tells {what}")
        note("waited", what)


NO_RULE = "no rule for this op; write one, see docs/writing-a-rule.md"


AT_ONCE = "compute on the batch as a whole"
