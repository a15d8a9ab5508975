"""Backpropagate only the rows of a batch that matter: the gradient of the chosen rows, at the cost of K rows, not N."""

import typing as _typing

from rowprop.lazy import on_first_use as _on_first_use

__version__ = "0.1.0"

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
    from rowprop.backprop.pick import pick as pick
    from rowprop.backprop.rowwise import rowwise as rowwise
    from rowprop.backprop.watch import watch as watch
    from rowprop.cost.plan import Plan as Plan
    from rowprop.cost.planning import plan as plan
    from rowprop.errors import InvalidInput as InvalidInput
    from rowprop.errors import MissingExtra as MissingExtra
    from rowprop.errors import RankFailed as RankFailed
    from rowprop.errors import RowpropError as RowpropError
    from rowprop.errors import TooSmall as TooSmall
    from rowprop.errors import UnsupportedOperation as UnsupportedOperation
    from rowprop.oracle.results import Verification as Verification
    from rowprop.oracle.verify import verify as verify
    from rowprop.schedule import Schedule as Schedule
    from rowprop.scoring import Scored as Scored
    from rowprop.selection import AboveMean as AboveMean
    from rowprop.selection import Context as Context
    from rowprop.selection import Everything as Everything
    from rowprop.selection import ImportanceSampling as ImportanceSampling
    from rowprop.selection import LossMass as LossMass
    from rowprop.selection import MaxVariance as MaxVariance
    from rowprop.selection import MultipleOf as MultipleOf
    from rowprop.selection import Nonzero as Nonzero
    from rowprop.selection import OverAll as OverAll
    from rowprop.selection import PercentileSampling as PercentileSampling
    from rowprop.selection import PerClass as PerClass
    from rowprop.selection import RandomRows as RandomRows
    from rowprop.selection import RankSampling as RankSampling
    from rowprop.selection import Selection as Selection
    from rowprop.selection import Selector as Selector
    from rowprop.selection import Threshold as Threshold
    from rowprop.selection import TopBottom as TopBottom
    from rowprop.selection import TopK as TopK
    from rowprop.selection import selector as selector
    from rowprop.step.record import Record as Record
    from rowprop.step.selective import SelectiveBackprop as SelectiveBackprop
    from rowprop.thinning.handle import Thinning as Thinning
    from rowprop.thinning.handle import ThinRecord as ThinRecord
    from rowprop.thinning.handle import thin as thin
else:  # not for type checkers: to them a module with __getattr__ has every attribute
    __all__, __getattr__, __dir__ = _on_first_use(
        __name__,
        {
            "backprop.pick": "pick",
            "backprop.rowwise": "rowwise",
            "backprop.watch": "watch",
            "cost.planning": "plan",
            "cost.plan": "Plan",
            "errors": "InvalidInput MissingExtra RankFailed RowpropError TooSmall UnsupportedOperation",
            "oracle.results": "Verification",
            "oracle.verify": "verify",
            "schedule": "Schedule",
            "scoring": "Scored",
            "selection": "AboveMean Context Everything ImportanceSampling LossMass MaxVariance MultipleOf Nonzero "
            "OverAll PerClass PercentileSampling RandomRows RankSampling Selection Selector Threshold TopBottom "
            "TopK selector",
            "step.record": "Record",
            "step.selective": "SelectiveBackprop",
            "thinning.handle": "ThinRecord Thinning thin",
        },
        ["batch", "cost", "distributed", "engines", "history", "recipes", "schedule", "scoring", "selection"],
    )
    for _name in ("InvalidInput", "MissingExtra", "RankFailed", "RowpropError", "TooSmall", "UnsupportedOperation"):
        __getattr__(_name)  # a traceback or a filter names it rowprop.X, whether or not anyone asked for it
