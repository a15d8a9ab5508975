"""What a step costs: counted, not guessed."""

from rowprop.cost.flops import count_flops

__all__ = ["count_flops"]
