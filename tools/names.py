"""Writes docs/names.md: every public name, with the first line of its docstring."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import rowprop

PAGE = Path(__file__).parent.parent / "docs" / "names.md"
INTEGRATIONS = Path(rowprop.__file__).parent / "integrations"

HEAD = """# Every public name

Written by `nox -s names` from the docstrings; a test keeps it true. `help(rowprop.TopK)` shows a docstring in full:
arguments, shapes, errors, cost, sources.
"""


def namespaces(module: ModuleType = rowprop) -> Iterator[ModuleType]:
    """The package, and the modules that are there at their first use."""
    yield module
    if hasattr(module, "__getattr__"):
        held = [getattr(module, name) for name in dir(module) if not name.startswith("_")]
        for inner in held:
            if isinstance(inner, ModuleType):
                yield from namespaces(inner)


def names_of(module: ModuleType) -> dict[str, Any]:
    """The public names of a namespace: its ``__all__``, or every name that is made in it."""
    made_here = [name for name, held in vars(module).items() if getattr(held, "__module__", "") == module.__name__]
    offered = getattr(module, "__all__", [name for name in made_here if not name.startswith("_")])
    return {name: getattr(module, name) for name in sorted(offered)}


def homes_of(module: ModuleType, name: str, held: Any) -> set[str]:
    """The full names under which a reference may have a public name: where it is found, and where it was written."""
    return {f"{module.__name__}.{name}", f"{getattr(held, '__module__', '')}.{name}"}


def integrations() -> dict[str, dict[str, str]]:
    """By module, its public names with the first lines of their docstrings; read, since their packages may be missing.

    The first name of each is the module's own.
    """
    found: dict[str, dict[str, str]] = {}
    for file in sorted(INTEGRATIONS.glob("*.py")):
        if file.stem not in ("__init__", "shared"):
            tree = ast.parse(file.read_text())
            made = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
            public = {node.name: node for node in made if not node.name.startswith("_")}
            module = f"rowprop.integrations.{file.stem}"
            nodes = {module: tree} | dict(sorted(public.items()))
            found[module] = {name: as_markdown(ast.get_docstring(node) or "") for name, node in nodes.items()}
    return found


def first_line(held: Any) -> str:
    """The first line of a docstring, as Markdown; empty where a thing has none of its own."""
    documented = isinstance(held, (type, ModuleType)) or inspect.isroutine(held)
    line = as_markdown((documented and held.__doc__) or "")
    made_up = isinstance(held, type) and line.startswith(f"{held.__name__}(")  # what a dataclass says of itself
    return "" if made_up else line


def as_markdown(text: str) -> str:
    """The first line of a docstring's text."""
    line = text.strip().partition("\n")[0]
    return re.sub(r":\w+:`~?", "`", line).replace("``", "`").replace("|", "\\|")


def page() -> str:
    """The page, a table per namespace."""
    tables = {
        module.__name__: {module.__name__: first_line(module)}
        | {name: first_line(held) for name, held in names_of(module).items()}
        for module in namespaces()
    }
    parts = [HEAD]
    for module, (head, *names) in ((module, lines.items()) for module, lines in (tables | integrations()).items()):
        lines = [f"## {module}", "", head[1], "", "| name | what it is |", "|---|---|"]
        parts.append("\n".join([*lines, *(f"| `{name}` | {line} |" for name, line in names)]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
