"""A gradient's memory, where the device has streams."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from rowprop.backprop.rows.rows import RowSet
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rows.zeros import Zeros
from rowprop.host import record, wait_for


def bring(rows: RowSet, content: RowSlice | Zeros | Tensor, last: Any) -> Any:
    """Make a gradient's memory, used ``last`` on that stream, safe to use on the present one; returns the latter."""
    assert rows.streams is not None
    now = rows.stream()
    if now == last and (type(content) is not Zeros or not rows.streams):
        return now
    if last not in rows.streams:
        rows.streams.append(last)
    if now not in rows.streams:
        rows.streams.append(now)
        places = (held[1] for held in (rows.whole, rows.part_of) if held is not None)
        hooked = () if rows.hook is None else rows.hook.tensors()
        for about in (rows.index, rows.absent, *places, *hooked):
            if about is not None:
                record(about)
    if type(content) is not RowSlice:  # another user may have made it after autograd let this stream go on
        for stream in rows.streams:
            if stream != now:
                wait_for(stream, rows.index.device)
    content = content.content() if type(content) is Zeros else content
    if type(content) is not Zeros:
        record(content.values if type(content) is RowSlice else cast(Tensor, content))
    return now
