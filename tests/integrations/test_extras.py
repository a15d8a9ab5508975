"""An integration without its package, or with one that is too old, says so with the line that installs it."""

from __future__ import annotations

import importlib
import re
import sys
import types
from typing import Any

import pytest

from rowprop.errors import MissingExtra
from rowprop.integrations.trl import pick_answers, select_answers

LINES = {package: f"run: pip install {package}." for package in ("fastai", "lightning", "transformers")}
LINES["composer"] = "run: pip install --no-deps mosaicml, and install the packages that docs/composer.md names."


@pytest.mark.parametrize("package", LINES)
def test_without_its_package_an_integration_tells_the_pip_line(package: str, monkeypatch: pytest.MonkeyPatch):
    # Red when: the package is imported, or a class made of its classes, without a look whether it is there.
    module = f"rowprop.integrations.{package}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=re.escape(LINES[package])):
        importlib.import_module(module)


@pytest.mark.parametrize("line", [pick_answers, select_answers])
def test_without_trl_its_lines_tell_the_pip_line(line: Any, monkeypatch: pytest.MonkeyPatch):
    # Red when: the import stands at the top of the module, or its error is not caught.
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtra, match=r"run: pip install trl\."):
        line(object())


@pytest.mark.parametrize(
    ("line", "old", "least"), [(pick_answers, "1.7.0", "1.15"), (select_answers, "1.15.3", "1.16")]
)
def test_an_older_trl_is_named(line: Any, old: str, least: str, monkeypatch: pytest.MonkeyPatch):
    # Red when: the trainer of an older TRL is changed, whose methods have other names, or whose forward has no head to
    # hand anything to.
    module = types.ModuleType("trl")
    module.__version__ = old  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "trl", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(MissingExtra, match=rf"trl {least} or newer but trl {old} is installed".replace(".", r"\.")):
        line(object())
