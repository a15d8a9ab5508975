"""Stage 2: which rows are kept, and how much each row counts."""

from __future__ import annotations

from rowprop.selection.base import Context, KnownKeep, Selection, Selector, Stateful, selector
from rowprop.selection.selectors import (
    AboveMean,
    Everything,
    ImportanceSampling,
    LossMass,
    MaxVariance,
    Nonzero,
    PercentileSampling,
    RandomRows,
    RankSampling,
    Threshold,
    TopBottom,
    TopK,
)
from rowprop.selection.wrapped import MultipleOf, OverAll, PerClass

__all__ = [
    "AboveMean",
    "Context",
    "Everything",
    "ImportanceSampling",
    "KnownKeep",
    "LossMass",
    "MaxVariance",
    "MultipleOf",
    "Nonzero",
    "OverAll",
    "PerClass",
    "PercentileSampling",
    "RandomRows",
    "RankSampling",
    "Selection",
    "Selector",
    "Stateful",
    "Threshold",
    "TopBottom",
    "TopK",
    "selector",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # tracebacks and reprs show the public path
