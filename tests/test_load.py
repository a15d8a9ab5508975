"""What a user of ``pick`` alone loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOADED = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
import rowprop

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
rowprop.pick(model(torch.randn(6, 4)).square().flatten(), torch.tensor([1, 4])).mean().backward()
assert all(p.grad is not None for p in model.parameters())
q = torch.randn(4, 2, 8, 4, requires_grad=True)
for rows in (torch.tensor([1, 3]), torch.rand(4, 8) < 0.4):
    losses = F.scaled_dot_product_attention(q, q.cos(), q.sin()).square().sum((1, 3))
    rowprop.pick(losses if rows.ndim == 2 else losses.sum(1), rows).sum().backward()
print("\\n".join(f"{m.__name__} {m.__file__}" for n, m in sys.modules.items() if n.split(".")[0] == "rowprop"))
print("others", *({"typer", "rich"} & sys.modules.keys()))
"""
APART = (
    "selection scoring step thinning cost engines schedule distributed history recipes oracle integrations app".split()
)


def test_pick_loads_the_core_alone():
    # Red when: a module of backprop imports one of the rooms after it, or the core grows.
    found = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    *modules, others = found.splitlines()
    assert others == "others"
    files = dict(line.split(maxsplit=1) for line in modules)
    assert not {name for name in files if name.count(".") and name.split(".")[1] in APART}
    assert sum(len(Path(file).read_text().splitlines()) for file in files.values()) <= 7500
