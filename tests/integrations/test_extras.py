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


def import_transformers(_: Any) -> None:
    importlib.import_module("rowprop.integrations.transformers")


OLD = [  # who asks, for which package, in which version, and what it needs at least
    (pick_answers, "trl", "1.7.0", "1.15"),
    (select_answers, "trl", "1.15.3", "1.16"),
    (import_transformers, "transformers", "5.2.0", "5.23"),
]


@pytest.mark.parametrize(("asks", "package", "old", "least"), OLD)
def test_an_older_package_is_named(asks: Any, package: str, old: str, least: str, monkeypatch: pytest.MonkeyPatch):
    # Red when: the trainer of an older TRL is changed, whose methods have other names, or whose forward has no head to
    # hand anything to; or a Trainer that divides the loss by the accumulation steps again.
    module: Any = types.ModuleType(package)
    module.__version__, module.Trainer = old, type("Trainer", (), {})
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.delitem(sys.modules, "rowprop.integrations.transformers", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    needed = f"{package} {least} or newer but {package} {old}"
    with pytest.raises(MissingExtra, match=re.escape(needed)):
        asks(object())
