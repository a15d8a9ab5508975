"""Errors are tested by the value they name and the remedy they give, not by every word between."""

from __future__ import annotations

import re


def says(error: BaseException, sentence: str) -> bool:
    """Whether an error's sentence holds these words in this order; " ... " stands for any others."""
    parts = [re.escape(part) for part in sentence.split(" ... ")]
    return re.search(".*".join(parts), str(error), re.DOTALL) is not None
