"""The training step: score, select, backpropagate, record."""

from __future__ import annotations

from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop

__all__ = ["Record", "SelectiveBackprop"]
