"""Stage 1: how much does each row matter."""

from __future__ import annotations

from rowprop.scoring.cheap import Downscaled, LowPrecision, MicroBatched, Proxy, Truncated
from rowprop.scoring.forward import ScoringMode, score_without_graph
from rowprop.scoring.logits import entropy, gradient_norm, margin
from rowprop.scoring.losses import logits_of, per_row_mean
from rowprop.scoring.reducible import ReducibleLoss, holdout_losses

__all__ = [
    "Downscaled",
    "LowPrecision",
    "MicroBatched",
    "Proxy",
    "ReducibleLoss",
    "ScoringMode",
    "Truncated",
    "entropy",
    "gradient_norm",
    "holdout_losses",
    "logits_of",
    "margin",
    "per_row_mean",
    "score_without_graph",
]
