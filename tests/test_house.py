"""The house is in order: rooms import downwards only, nobody probes a user's object, and nothing grows too large."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rowprop

SRC = Path(__file__).parent.parent / "src"
LAB = SRC.parent / "lab"

ROOMS = """
errors host batch checks files lazy state native backprop scoring selection schedule distributed engines thinning
history step recipes cost oracle rowprop integrations app lab
""".split()
"""A module imports modules of its own room and of rooms that stand before it. ``rowprop`` is the front door, the
package's ``__init__``. ARCHITECTURE.md draws them."""

PROBED = ["selection", "scoring", "step", "distributed", "recipes", "history", "engines", "lab.settings"]
"""Where parts that a user wrote come in: selectors, scorers, engines, histories."""

PROBES = {  # where an expression looks for an attribute: whose object it looks at, and why no class answers instead
    "distributed: getattr(getattr(model, '_join_config', None), 'enable', False)": "torch's wrappers; Join is private",
    "distributed: getattr(model, '_join_config', None)": "the same expression's inner half",
    "history.losses: getattr(self.dataset, '__getitems__', None)": "a data set; torch's loader asks in the same way",
    "history.losses: hasattr(dataset, '__getitem__')": "a data set; a stream has a length, too, but no places",
    "scoring: getattr(outputs, 'logits', None)": "what a model returned, of a class of any library",
}


def name_of(path: Path) -> str:
    """The module's dotted name."""
    parts = path.relative_to(LAB if path.is_relative_to(LAB) else SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module lies in; the command line's ``__main__`` belongs to it."""
    if module.startswith("rowprop_lab"):
        return "lab"
    top = module.split(".")[1] if "." in module else module
    return "app" if top == "__main__" else top


FILES = sorted([*SRC.rglob("*.py"), *LAB.glob("rowprop_lab/*.py")])
MODULES = {name_of(path): ast.parse(path.read_text()) for path in FILES}


def imports_of(tree: ast.AST) -> set[str]:
    """The package's modules that a module imports, anywhere in its text."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in MODULES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"line {node.lineno} imports by dots; write the module's whole name")
    return found


IMPORTS = {module: imports_of(tree) - {module} for module, tree in MODULES.items()}


def test_every_module_lies_in_a_room():
    # Red with a file src/rowprop/extra.py, and with a room in the list that is no more. Integrations may be absent.
    assert {room_of(module) for module in MODULES} | {"integrations"} == set(ROOMS)


def test_the_drawing_lists_the_rooms_in_their_order():
    # Red with two lines of the page's table the other way round.
    page = (SRC.parent / "ARCHITECTURE.md").read_text().partition("## The subpackages")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == ROOMS


def test_a_module_imports_only_rooms_before_its_own():
    # So no two rooms import each other either. Red with `from rowprop.cost import flops` in selection/base.py, also
    # inside a function or under TYPE_CHECKING.
    upwards = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in sorted(others)
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert upwards == []


def test_the_parts_of_backprop_import_only_parts_before_them():
    # Red with an import of rowprop.backprop.autograd in a module of rules/.
    parts = "backward watch rows rules autograd compiled pick skip".split()

    def part_of(module: str) -> int:
        return parts.index(module.split(".")[2])

    inside = {module for module in MODULES if module.startswith("rowprop.backprop.")}
    upwards = [
        f"{module} imports {other}"
        for module in inside
        for other in IMPORTS[module] & inside
        if part_of(other) > part_of(module)
    ]
    assert upwards == []


def test_no_two_modules_import_each_other_in_a_circle():
    # Red with `from rowprop.selection.selectors import TopK` inside a function of selection/base.py.
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def probes(tree: ast.AST) -> Iterator[str]:
    """Expressions that ask whether an object has an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            defaulted = node.func.id == "getattr" and len(node.args) + len(node.keywords) > 2
            if defaulted or node.func.id == "hasattr":
                yield ast.unparse(node)


def test_nobody_looks_for_attributes_on_what_a_user_wrote():
    # Red with `getattr(selector, "unbiased", False)` in step/selective.py, and with an exception that is no more.
    found = {
        f"{module.removeprefix('rowprop.')}: {probe}"
        for module, tree in MODULES.items()
        if any(f"{module}.".replace("rowprop_lab.", "rowprop.lab.").startswith(f"rowprop.{place}.") for place in PROBED)
        for probe in probes(tree)
    }
    assert sorted(found ^ set(PROBES)) == []


def test_the_step_takes_15_arguments_at_most():
    # Red with a sixteenth.
    kinds = [argument.kind for argument in inspect.signature(rowprop.SelectiveBackprop).parameters.values()]
    assert len(kinds) <= 15 and not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} & {*kinds}


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """How long it is; a function without its docstring."""
    has_text = not isinstance(node, ast.ClassDef) and ast.get_docstring(node) is not None
    text = node.body[0].end_lineno - node.body[0].lineno + 1 if has_text else 0
    return node.end_lineno - node.lineno + 1 - text


def test_no_function_and_no_class_is_too_long():
    # Red with 50 lines for 60.
    kinds = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 300}
    long = [
        f"{module}: {node.name}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if type(node) in kinds and lines_of(node) > kinds[type(node)]
    ]
    assert long == []
