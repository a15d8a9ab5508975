"""The loss history of a training, by row id, and the parts that use it."""

from __future__ import annotations

from rowprop.history.lookup import ReducibleLoss, StaleScorer, holdout_losses
from rowprop.history.losses import LossHistory, WithIds
from rowprop.history.pruning import PruningSampler

__all__ = ["LossHistory", "PruningSampler", "ReducibleLoss", "StaleScorer", "WithIds", "holdout_losses"]

for _name in __all__:
    globals()[_name].__module__ = __name__  # tracebacks and reprs show the public path
