"""The names that `import rowprop` offers, and the process, which it leaves as it was."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import rowprop
from names import PAGE, first_line, integrations, names_of, namespaces, page
from rowprop import errors

ROOT = Path(__file__).parent.parent

PROBE = """
import json, os, signal, sys, warnings
import torch, torch.utils.flop_counter  # what torch itself imports and sets is torch's: triton, where there is one
def state():
    return {
        "filters": repr(warnings.filters),
        "environ": dict(os.environ),
        "signals": [repr(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "threads": torch.get_num_threads(),
        "rng": torch.get_rng_state().tolist(),
    }
modules, before = set(sys.modules), state()
from rowprop import *
added = sorted({name.partition(".")[0] for name in set(sys.modules) - modules})
after = state()
print(json.dumps({"added": added, "changed": [key for key in before if before[key] != after[key]]}))
"""


def test_all_is_sorted_and_is_what_type_checkers_see():
    # Red when: a name stands in one of the two lists alone, or names another object in the other.
    seen = re.findall(r"^    from rowprop\.(\S+) import (\w+) as \2$", Path(rowprop.__file__).read_text(), re.M)
    assert list(rowprop.__all__) == sorted(name for _, name in seen) == sorted(rowprop.__all__)
    for module, name in seen:
        assert getattr(rowprop, name) is vars(sys.modules[f"rowprop.{module}"])[name]
    public = {n for n, v in vars(rowprop).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert set(rowprop.__all__) == public


def test_names_carry_their_home_and_their_text():
    elsewhere = [name for name in rowprop.__all__ if getattr(rowprop, name).__module__ != "rowprop"]
    silent = [name for name in rowprop.__all__ if not getattr(rowprop, name).__doc__]
    assert (elsewhere, silent) == ([], [])


def test_every_public_name_is_on_its_page():
    # Red when: a public class or function has no docstring, or a name or a first line changes without nox -s names.
    offered = {f"{space.__name__}.{name}": held for space in namespaces() for name, held in names_of(space).items()}
    assert [name for name, held in offered.items() if not first_line(held)] == []
    assert [name for lines in integrations().values() for name, line in lines.items() if not line] == []
    assert page() == PAGE.read_text(), "run nox -s names"


LATE = """
import sys, rowprop
assert "torch" not in sys.modules
import torch
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
rowprop.pick(model(torch.randn(6, 4)).square().flatten(), torch.tensor([1, 4])).mean().backward()
assert all(p.grad is not None for p in model.parameters())
q = torch.randn(4, 2, 8, 4, requires_grad=True)
for rows in (torch.tensor([1, 3]), torch.rand(4, 8) < 0.4):
    losses = F.scaled_dot_product_attention(q, q.cos(), q.sin()).square().sum((1, 3))
    rowprop.pick(losses if rows.ndim == 2 else losses.sum(1), rows).sum().backward()
loaded = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "rowprop"}
others = sorted({"typer", "rich"} & sys.modules.keys())

from rowprop import *
late = [name for name in ("history", "recipes") if f"rowprop.{name}" in sys.modules]
offered = [name for name in dir(rowprop) if not name.startswith("__") and name not in rowprop.__all__]
for name in offered:
    assert getattr(rowprop, name) is sys.modules[f"rowprop.{name}"], name
for name in ("count", "profile", "timing"):
    assert name in dir(rowprop.cost)
    assert getattr(rowprop.cost, name) is sys.modules[f"rowprop.cost.{name}"], name
assert not hasattr(rowprop, "recipe")
import json
print(json.dumps({"loaded": loaded, "others": others, "late": late, "offered": offered}))
"""
BACKEND = """
import importlib.metadata as metadata, json, sys
finder, find = metadata.MetadataPathFinder, metadata.MetadataPathFinder.find_distributions
others = lambda *context: (d for d in find(*context) if d.metadata["Name"] != "rowprop")
finder.find_distributions = staticmethod(others)  # as where the package lies on PYTHONPATH alone
import rowprop
assert "torch" not in sys.modules and "importlib.metadata" in sys.modules
points = {p.name: p for p in metadata.entry_points(group="torch_dynamo_backends")}
import torch
from rowprop.backprop.compiled import backend
assert points["rowprop"].load() is backend
from torch._dynamo.backends import registry  # and where torch has looked for backends before
assert registry.lookup_backend("rowprop") is backend
late = [sys.meta_path.pop(), registry._BACKENDS.pop("rowprop"), registry._COMPILER_FNS.pop("rowprop")]
import importlib
importlib.reload(rowprop)
assert registry.lookup_backend("rowprop") is backend
try:
    version = metadata.version("no_such_package")
except metadata.PackageNotFoundError:
    version = None
print(json.dumps(version))
"""


def test_torch_finds_the_backend_of_a_package_that_is_not_installed():
    # Red when: __init__ offers no backend, or only where torch has not yet looked for one.
    assert in_a_new_process(BACKEND) is None


SPACES = "batch cost distributed engines errors history oracle recipes schedule scoring selection step thinning".split()
APART = {"thinning", "selection", "scoring", "schedule", "distributed", "engines", "history", "step", "recipes", "cost"}
APART |= {"oracle", "integrations", "app"}


def in_a_new_process(script: str) -> dict[str, Any]:
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_pick_loads_the_core_alone_and_what_else_there_is_comes_when_it_is_asked_for():
    # Red when: a module of backprop imports one of the rooms after it, or the core grows; without __getattr__ or
    # __dir__; with `import torch` or `from rowprop import recipes` in __init__.
    found = in_a_new_process(LATE)
    assert found["others"] == found["late"] == []
    assert not {name for name in found["loaded"] if name.count(".") and name.split(".")[1] in APART}
    assert sum(len(Path(file).read_text().splitlines()) for file in found["loaded"].values()) <= 7920
    assert found["offered"] == SPACES
    text = Path(rowprop.__file__).read_text()
    assert re.findall(r"^    from rowprop import (\w+) as \1$", text, re.M) == SPACES  # seen by type checkers


def test_every_error_is_offered():
    # Red when an error of rowprop.errors is missing in its __all__, or one at the top is another.
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised | {"TooSmall"} == set(errors.__all__)
    assert all(getattr(rowprop, name) is getattr(errors, name) for name in raised & set(rowprop.__all__))
    assert pickle.loads(pickle.dumps(rowprop.InvalidInput("no"))).args == ("no",)


def test_import_brings_torch_and_itself_and_changes_nothing():
    # Red with `import typer` or `warnings.simplefilter("ignore")` in any module that __init__ imports.
    found = in_a_new_process(PROBE)
    foreign = [name for name in found["added"] if name not in {"rowprop", "torch", *sys.stdlib_module_names}]
    assert foreign == []
    assert found["changed"] == []


def test_version_is_the_changelogs_newest():
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert rowprop.__version__ == newest[1]
    assert f"\nversion: {newest[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_a_call_returns_shows_as_the_text_that_it_prints():
    # Red when: one of them has a text of its own for print() and a dump of its fields for a notebook's last line.
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    batch = torch.randn(16, 4)
    losses_fn = lambda model, batch: model(batch).squeeze(1).square()  # noqa: E731
    with rowprop.find_zeros(model) as zeros:
        losses_fn(model, batch)[:4].sum().backward()
    skipping = rowprop.skip_zeros(model)
    with rowprop.watch() as report:
        losses_fn(model, batch)[:4].sum().backward()
    skipped = skipping.record
    skipping.remove()
    selective = rowprop.SelectiveBackprop(model, losses_fn, rowprop.TopK(0.25))
    planned = rowprop.plan(model, batch, losses_fn, keep=0.5, rounds=1)
    verified = rowprop.verify(model, batch, losses_fn)
    counted = rowprop.cost.count.count_step(model, batch, losses_fn)
    profiled = rowprop.cost.profile.profile(model, batch, losses_fn, rounds=1)
    timed = rowprop.cost.timing.measure_step(model, batch, losses_fn, rounds=2, warmup=0)
    shown = {
        "Record(step 0: kept 4 of 16 rows": selective(batch)[1],
        "densified: nothing": report,
        "75% of the rows at 2 have no gradient; skip_zeros there saves 75%": zeros.places[0],
        f"{zeros.places[0]} of the backward's FLOPs.": zeros,
        "skipped 12 of 16 rows: their gradient is zero": skipped,
        f"{planned.reason}\n{planned.certainty}": planned,
        verified.verdict: verified,
        f"backward over forward {counted.ratio:.3f}": counted,
        f"The backward takes {profiled.measured_ratio:.2f} times the forward": profiled,
        "ms; 2 rounds": next(iter(timed.values())),
    }
    assert [said for said, each in shown.items() if repr(each) != str(each) or said not in str(each)] == []
