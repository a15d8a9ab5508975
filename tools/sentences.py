"""Errors are tested by the value they name and the remedy they give, not by every word between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rowprop.errors import InvalidInput


def says(error: BaseException, sentence: str) -> bool:
    """Whether an error's sentence holds these words in this order; " ... " stands for any others."""
    parts = [re.escape(part) for part in sentence.split(" ... ")]
    return re.search(".*".join(parts), str(error), re.DOTALL) is not None


@contextmanager
def refused(sentence: str) -> Iterator[None]:
    """What runs inside has to be refused with these words."""
    with pytest.raises(InvalidInput) as caught:
        yield
    assert says(caught.value, sentence), str(caught.value)
