"""Backpropagate only the rows of a batch that matter: the gradient of the chosen rows, at the cost of K rows, not N."""

import typing as _typing

from rowprop.backprop.pick import pick
from rowprop.backprop.rowgrad import watch
from rowprop.backprop.rowwise import rowwise
from rowprop.cost.measure import plan
from rowprop.cost.plan import Plan
from rowprop.errors import InvalidInput, MissingExtra, RankFailed, RowpropError, UnsupportedOperation
from rowprop.lazy import on_first_use as _on_first_use
from rowprop.oracle.verify import Verification, verify
from rowprop.schedule import Schedule
from rowprop.selection.base import Selection, Selector
from rowprop.selection.drawn import RandomRows, RankSampling
from rowprop.selection.fixed import AboveMean, LossMass, TopK
from rowprop.step.record import Record
from rowprop.step.selective import SelectiveBackprop

__version__ = "0.1.0"

__all__ = [
    "AboveMean",
    "InvalidInput",
    "LossMass",
    "MissingExtra",
    "Plan",
    "RandomRows",
    "RankFailed",
    "RankSampling",
    "Record",
    "RowpropError",
    "Schedule",
    "Selection",
    "SelectiveBackprop",
    "Selector",
    "TopK",
    "UnsupportedOperation",
    "Verification",
    "pick",
    "plan",
    "rowwise",
    "verify",
    "watch",
]

for _name in __all__:
    globals()[_name].__module__ = "rowprop"  # so that tracebacks and reprs name what users import

if _typing.TYPE_CHECKING:
    from rowprop import batch as batch
    from rowprop import cost as cost
    from rowprop import distributed as distributed
    from rowprop import engines as engines
    from rowprop import history as history
    from rowprop import recipes as recipes
    from rowprop import schedule as schedule
    from rowprop import scoring as scoring
    from rowprop import selection as selection
else:  # not for type checkers: to them a module with __getattr__ has every attribute
    __getattr__, __dir__ = _on_first_use(
        __name__,
        __all__,
        ["batch", "cost", "distributed", "engines", "history", "recipes", "schedule", "scoring", "selection"],
    )
