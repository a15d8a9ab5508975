"""Backpropagate only the rows of a batch that matter: the gradient of the chosen rows, at the cost of K rows, not N."""

import typing as _typing

from rowprop.lazy import offer_backend as _offer_backend
from rowprop.lazy import on_first_use as _on_first_use

__version__ = "0.2.0"

if _typing.TYPE_CHECKING:
    from rowprop import batch as batch
    from rowprop import cost as cost
    from rowprop import distributed as distributed
    from rowprop import engines as engines
    from rowprop import errors as errors
    from rowprop import history as history
    from rowprop import oracle as oracle
    from rowprop import recipes as recipes
    from rowprop import schedule as schedule
    from rowprop import scoring as scoring
    from rowprop import selection as selection
    from rowprop import step as step
    from rowprop import thinning as thinning
    from rowprop.backprop.pick import pick as pick
    from rowprop.backprop.rules.rowwise import rowwise as rowwise
    from rowprop.backprop.skip import skip_zeros as skip_zeros
    from rowprop.backprop.watch import watch as watch
    from rowprop.cost.plan import plan as plan
    from rowprop.cost.zeros import find_zeros as find_zeros
    from rowprop.errors import InvalidInput as InvalidInput
    from rowprop.errors import RowpropError as RowpropError
    from rowprop.errors import TooSmall as TooSmall
    from rowprop.errors import UnsupportedOperation as UnsupportedOperation
    from rowprop.oracle.verify import verify as verify
    from rowprop.scoring import Scored as Scored
    from rowprop.selection import ImportanceSampling as ImportanceSampling
    from rowprop.selection import RandomRows as RandomRows
    from rowprop.selection import Selection as Selection
    from rowprop.selection import TopK as TopK
    from rowprop.selection import selector as selector
    from rowprop.step.selective import SelectiveBackprop as SelectiveBackprop
    from rowprop.thinning.handle import thin as thin
else:  # not for type checkers: to them a module with __getattr__ has every attribute
    __all__, __getattr__, __dir__ = _on_first_use(
        __name__,
        {
            "backprop.pick": "pick",
            "backprop.rules.rowwise": "rowwise",
            "backprop.watch": "watch",
            "backprop.skip": "skip_zeros",
            "cost.plan": "plan",
            "cost.zeros": "find_zeros",
            "errors": "InvalidInput RowpropError TooSmall UnsupportedOperation",
            "oracle.verify": "verify",
            "scoring": "Scored",
            "selection": "ImportanceSampling RandomRows Selection TopK selector",
            "step.selective": "SelectiveBackprop",
            "thinning.handle": "thin",
        },
        """batch cost distributed engines errors history oracle recipes schedule scoring selection step
        thinning""".split(),
    )
    for _name in ("InvalidInput", "RowpropError", "TooSmall", "UnsupportedOperation"):
        __getattr__(_name)  # a traceback or a filter names it rowprop.X, whether or not anyone asked for it

_offer_backend(__name__, "rowprop.backprop.compiled:backend")
