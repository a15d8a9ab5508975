"""Stage 1: how much does each row matter."""

from __future__ import annotations

from rowprop.scoring.cheap import Downscaled, LowPrecision, MicroBatched, Proxy, Truncated
from rowprop.scoring.forward import score_without_graph
from rowprop.scoring.logits import entropy, gradient_norm, margin
from rowprop.scoring.losses import logits_of, per_row_mean

__all__ = [
    "Downscaled",
    "LowPrecision",
    "MicroBatched",
    "Proxy",
    "Truncated",
    "entropy",
    "gradient_norm",
    "logits_of",
    "margin",
    "per_row_mean",
    "score_without_graph",
]
