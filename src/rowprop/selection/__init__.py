"""Stage 2: which rows are kept, and what each counts."""

from __future__ import annotations

from rowprop.selection.base import Selection, Selector
from rowprop.selection.samplers import BernoulliSampler, HistorySampler, ImportanceSampler, RandomRows, RankSampler
from rowprop.selection.selectors import AboveMean, Everything, LossMass, Nonzero, Threshold, TopBottom, TopK
from rowprop.selection.wrappers import DropOutliers, MultipleOf, OverAll, PerClass

__all__ = [
    "AboveMean",
    "BernoulliSampler",
    "DropOutliers",
    "Everything",
    "HistorySampler",
    "ImportanceSampler",
    "LossMass",
    "MultipleOf",
    "Nonzero",
    "OverAll",
    "PerClass",
    "RandomRows",
    "RankSampler",
    "Selection",
    "Selector",
    "Threshold",
    "TopBottom",
    "TopK",
]
