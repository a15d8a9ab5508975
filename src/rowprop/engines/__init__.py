"""The engines: ways to obtain the gradient of the selected rows, and the choice among them."""

from __future__ import annotations

from rowprop.engines.base import Auto, Engine, Masked, Recompute, Sliced

__all__ = ["Auto", "Engine", "Masked", "Recompute", "Sliced"]
