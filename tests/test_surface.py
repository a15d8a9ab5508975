"""The names that `import rowprop` offers, and the process, which it leaves as it was."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.mark.parametrize("name", rowprop.__all__)
def test_names_carry_their_home(name: str):
    assert getattr(rowprop, name).__module__ == "rowprop"
    assert getattr(rowprop, name).__doc__


def test_every_public_name_is_on_its_page():
    # Red when: a public class or function has no docstring, or a name or a first line changes without nox -s names.
    offered = {f"{space.__name__}.{name}": held for space in namespaces() for name, held in names_of(space).items()}
    assert [name for name, held in offered.items() if not first_line(held)] == []
    assert [name for lines in integrations().values() for name, line in lines.items() if not line] == []
    assert page() == PAGE.read_text(), "run nox -s names"


NAMESPACES = """
import sys, rowprop
assert "torch" not in sys.modules
from rowprop import *
late = [name for name in ("history", "recipes") if f"rowprop.{name}" in sys.modules]
assert not late, late
offered = [name for name in dir(rowprop) if not name.startswith("__") and name not in rowprop.__all__]
print(*offered)
for name in offered:
    assert getattr(rowprop, name) is sys.modules[f"rowprop.{name}"], name
for name in ("count", "profile", "timing"):
    assert name in dir(rowprop.cost)
    assert getattr(rowprop.cost, name) is sys.modules[f"rowprop.cost.{name}"], name
assert not hasattr(rowprop, "recipe")
"""


def test_namespaces_are_there_after_import_and_loaded_when_they_are_asked_for():
    # Red without __getattr__, without __dir__, and with `import torch` or `from rowprop import recipes` in __init__.
    answer = subprocess.run([sys.executable, "-c", NAMESPACES], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    expected = "batch cost distributed engines errors history oracle recipes schedule scoring selection step thinning"
    assert answer.stdout.split() == expected.split()
    seen_by_type_checkers = re.findall(
        r"^    from rowprop import (\w+) as \1$", Path(rowprop.__file__).read_text(), re.M
    )
    assert seen_by_type_checkers == expected.split()


def test_every_error_is_offered():
    # Red when an error of rowprop.errors is missing in its __all__, or one at the top is another.
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised | {"TooSmall"} == set(errors.__all__)
    assert all(getattr(rowprop, name) is getattr(errors, name) for name in raised & set(rowprop.__all__))
    assert pickle.loads(pickle.dumps(rowprop.InvalidInput("no"))).args == ("no",)


def test_import_brings_torch_and_itself_and_changes_nothing():
    # Red with `import typer` or `warnings.simplefilter("ignore")` in any module that __init__ imports.
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    found = json.loads(answer.stdout)
    foreign = [name for name in found["added"] if name not in {"rowprop", "torch", *sys.stdlib_module_names}]
    assert foreign == []
    assert found["changed"] == []


def test_version_is_the_changelogs_newest():
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert rowprop.__version__ == newest[1]
