"""Stage 3: the gradient of the selected rows."""

from rowprop.backprop import rules

__all__ = ["rules"]  # importing them fills the table that pick() looks ops up in
