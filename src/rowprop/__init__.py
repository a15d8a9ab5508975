"""Backpropagate only the rows of a batch that matter: the same gradients, a backward that costs K rows instead of N."""

from rowprop.backprop.pick import pick
from rowprop.backprop.rowgrad import watch
from rowprop.backprop.rowwise import rowwise
from rowprop.cost.measure import plan
from rowprop.schedule import Schedule
from rowprop.selection.base import Selection, Selector
from rowprop.selection.samplers import RandomRows, RankSampler
from rowprop.selection.selectors import AboveMean, LossMass, TopK
from rowprop.step import Record, SelectiveBackprop
from rowprop.verify import verify

__version__ = "0.1.0"

__all__ = [
    "AboveMean",
    "LossMass",
    "RandomRows",
    "RankSampler",
    "Record",
    "Schedule",
    "Selection",
    "SelectiveBackprop",
    "Selector",
    "TopK",
    "pick",
    "plan",
    "rowwise",
    "verify",
    "watch",
]

for _name in __all__:
    globals()[_name].__module__ = "rowprop"  # so that tracebacks and reprs name what users import
