"""The commands: CI runs the same ones everywhere, and pages name those that are there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def sessions() -> set[str]:
    """The names of noxfile.py's sessions, versions of torch apart."""
    found = set[str]()
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if "nox.session" in ast.unparse(decorator):
                    named = re.search(r"name='([\w-]+)'", ast.unparse(decorator))
                    found.add(named[1] if named else node.name)
    return found


def test_the_workflow_runs_what_the_script_runs():
    # Red with a command in one of the two alone.
    script = (ROOT / ".ci/run").read_text().partition("export CI=true\n")[2]
    together = re.findall(r"^together (.*)$", script, re.MULTILINE)
    commands = re.findall(r"^((?:scripts|nox) ?.*)$", script, re.MULTILINE)
    commands += [command for line in together for command in re.findall(r"'([^']*)'", line)]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert sorted(re.findall(r"^          - (.*)$", workflow, re.MULTILINE)) == sorted(commands)


def test_pages_and_tests_name_commands_that_are_there():
    # Red when a session of noxfile.py or a file of scripts/ gets another name.
    for name in TRACKED:
        if name.endswith((".md", ".py", ".yml")) and not name.startswith(("CHANGELOG", "benchmarks/results")):
            text = (ROOT / name).read_text()
            assert set(re.findall(r"nox -s '?([a-z][\w-]*)", text)) <= sessions(), name
            scripts = re.findall(r"(?<![\w/.])scripts/([a-z][\w-]*)(?![\w.])", text)
            assert all((ROOT / "scripts" / script).exists() for script in scripts), name
