"""What every docstring example may use without importing it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import rowprop

# Its class is made from Lightning's: without Lightning the module cannot be imported.
collect_ignore = [] if find_spec("lightning") else ["src/rowprop/integrations/lightning.py"]


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace.update(torch=torch, rowprop=rowprop, **{name: getattr(rowprop, name) for name in rowprop.__all__})
