"""Stage 3: the gradient of the selected rows."""

from rowprop.backprop import compiled, rules
from rowprop.backprop.autograd import checkpoint

__all__ = ["checkpoint", "compiled", "rules"]  # importing them fills the table that pick() looks ops up in
