"""What every docstring example may use without importing it."""

from __future__ import annotations

import pytest
import torch

import rowprop


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace.update(torch=torch, rowprop=rowprop, **{name: getattr(rowprop, name) for name in rowprop.__all__})
