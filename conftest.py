"""What every docstring example may use without importing it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

import rowprop

os.environ.setdefault("ROWPROP_NATIVE", "0")  # no test depends on what is compiled, or has it compiled

# Their classes are made from those of the package: without the package the module cannot be imported.
_NEEDED = {name: [name] for name in ("lightning", "fastai", "composer")} | {
    "transformers": ["transformers", "accelerate"]
}
collect_ignore = [f"src/rowprop/integrations/{name}.py" for name in _NEEDED if not all(map(find_spec, _NEEDED[name]))]


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace.update(torch=torch, rowprop=rowprop, **{name: getattr(rowprop, name) for name in rowprop.__all__})
