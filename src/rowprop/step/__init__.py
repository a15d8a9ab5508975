"""The training step: score, select, backpropagate, record."""

from __future__ import annotations

from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop

__all__ = ["Record", "SelectiveBackprop"]

for _name in __all__:
    globals()[_name].__module__ = __name__  # tracebacks and reprs show the public path
