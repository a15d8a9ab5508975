"""Run by ``scripts/release`` where a wheel or an sdist is installed: it works, and it holds what it has to.

The arguments are the modules of an extra, which have to be importable; without any, the environment has no extra.
"""

import importlib
import re
import sys
from importlib.metadata import metadata
from pathlib import Path

import torch

import rowprop

home = Path(rowprop.__file__).parent
assert Path(sys.prefix) in home.parents, f"rowprop came from {home}"
assert all((home / file).is_file() for file in ("py.typed", "app/page.css"))
model = torch.nn.Linear(4, 3)
rows, x = torch.tensor([1, 5]), torch.randn(8, 4)
model(x).square().mean(1)[rows].mean().backward()
wanted, model.weight.grad = model.weight.grad, None
with rowprop.watch() as report:
    rowprop.pick(model(x).square().mean(1), rows).mean().backward()
torch.testing.assert_close(model.weight.grad, wanted)
assert not report.densified
page = str(metadata("rowprop").json["description"])
assert page.startswith("# rowprop") and not re.search(r"!\[|\]\((?!https?:)", page), (
    "a package index has no files of ours"
)
modules = sys.argv[1:]
if "rowprop.integrations.fastai" in modules:  # fastai imports torchvision, whose build on PyPI lacks its ops on the CPU
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
for name in modules:
    importlib.import_module(name)
if not modules:
    try:
        importlib.import_module("rowprop.integrations.lightning")
    except rowprop.errors.MissingExtra as error:
        assert "pip install lightning" in str(error)
    else:
        raise AssertionError("an empty environment has lightning")
