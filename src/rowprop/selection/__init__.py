"""Stage 2: which rows are kept, and what each counts."""

from __future__ import annotations

from rowprop.selection.base import Selection, Selector
from rowprop.selection.selectors import AboveMean, LossMass, RandomRows, RankSampler, TopK

__all__ = ["AboveMean", "LossMass", "RandomRows", "RankSampler", "Selection", "Selector", "TopK"]
