"""Backpropagate only the rows of a batch that matter."""

from rowprop.backprop.pick import pick
from rowprop.backprop.rowgrad import watch

__version__ = "0.1.0"

__all__ = ["pick", "watch"]

for _name in __all__:
    globals()[_name].__module__ = "rowprop"
del _name
