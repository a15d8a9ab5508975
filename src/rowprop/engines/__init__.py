"""The engines: ways to obtain the gradient of the selected rows."""

from __future__ import annotations

from rowprop.engines.base import Engine, Masked, Recompute, Sliced

__all__ = ["Engine", "Masked", "Recompute", "Sliced"]
