"""What the tests of the lab share: comparisons that are trained once; who writes copies the folder."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compare_cases
from rowprop_lab.run import compare
from rowprop_lab.settings import Settings

_shared = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "conftest.py"))
browser, seeded, pinned_matplotlib = (_shared[name] for name in ("browser", "seeded", "pinned_matplotlib"))
always_drawn, any_count, as_host = (_shared[name] for name in ("always_drawn", "any_count", "as_host"))
_told_of_batchnorm, _silent_commands = _shared["_told_of_batchnorm"], _shared["_silent_commands"]
on_one_thread = _shared["on_one_thread"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with on_one_thread():
        yield


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a small comparison, and what its command printed."""
    out = tmp_path_factory.mktemp("compared") / "out"
    with on_one_thread():
        result = compare_cases.compare(out)
    assert result.exit_code == 0, result.stderr
    return out, result


def trained(factory: pytest.TempPathFactory, **given: Any) -> tuple[Path, Any, Any]:
    """The folder of a comparison, its outcome, and its settings."""
    out, settings = factory.mktemp("trained") / "out", Settings(**given)
    with on_one_thread():
        return out, compare(settings, out), settings


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Methods and engines of each kind, with two seeds, on data whose class names are an attack."""
    methods = "full,ohem,ohem@recompute,infobatch+batch-loss-filter"
    small = {"batch_rows": 20, "epochs": 3, "seeds": 2, "keep": 0.25}
    return trained(tmp_path_factory, data="compare_cases:hostile", model="compare_cases:net", methods=methods, **small)


@pytest.fixture(scope="session")
def glosses(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with small files of WordNet's form."""
    folder = tmp_path_factory.mktemp("wordnet")
    compare_cases.write_glosses(folder)
    return str(folder)


@pytest.fixture(scope="session")
def texts(glosses: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Texts, an attack in every tenth."""
    small = {"batch_rows": 20, "epochs": 10, "seeds": 1, "methods": "full,ohem"}
    return trained(tmp_path_factory, data="wordnet", data_dir=glosses, **small)


@pytest.fixture(scope="session")
def tokens(glosses: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    small = {"batch_rows": 8, "epochs": 2, "seeds": 2, "methods": "full,random,ohem,ohem@cut"}
    return trained(tmp_path_factory, data="wordnet", data_dir=glosses, model="gpt", **small)
