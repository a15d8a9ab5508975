"""`rowprop compare` as a command: its tables and files, Ctrl-C, the packages it asks for, and bad options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import refused, run
from compare_cases import TINY, compare
from rowprop_lab.folder import LOCK

ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "tools", ROOT / "src", ROOT / "lab" / "tests")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PATHS))}


def test_a_comparison_prints_its_tables_and_writes_its_files(compared: tuple[Path, Any]):
    out, result = compared
    assert {path.name for path in out.iterdir()} == {"results.json", "report.html", "settings.json", "runs", LOCK}
    for text in ("Methods side by side", "Where the time went", "ohem", "sliced", "x full", "of seen"):
        assert text in result.stdout
    assert str(out / "report.html") in result.stderr
    again = compare(out, "--resume", "--json")  # all that stdout holds is the object
    assert json.loads(again.stdout) == json.loads((out / "results.json").read_text())


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(tmp_path: Path):
    # A real process and a real signal, sent once it has told that its first run is finished.
    # Where the tests run in the background, a shell had them ignore it, and a process inherits that.
    heed = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import rowprop.app.cli as c; c.app()"
    )
    command = [sys.executable, "-c", heed, "compare", *TINY, "--methods", "full", "--seeds", "10000", "--out", tmp_path]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        before = next(line for line in process.stderr if line.startswith("full seed 0: "))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in before + rest
    kept = len(list((tmp_path / "runs").iterdir()))
    assert kept >= 1
    assert f"Stopped with {kept} of 10000 runs finished" in rest
    assert "Run the same command with --resume to go on." in rest
    results = json.loads((tmp_path / "results.json").read_text())
    assert (len(results["runs"]), results["finished"]) == (kept, False)
    assert "The same command with --resume goes on." in (tmp_path / "report.html").read_text()

    resumed = compare(tmp_path, "--resume", "--seeds", str(kept), "--methods", "full")
    assert resumed.exit_code == 0
    assert f"; {kept} kept from before." in resumed.stderr


@pytest.mark.parametrize(
    ("module", "package"),
    [("matplotlib.figure", "matplotlib"), ("sklearn.datasets", "scikit-learn"), ("scipy.special", "scipy")],
)
def test_compare_asks_for_its_packages_before_it_does_anything(module: str, package: str, monkeypatch, tmp_path: Path):
    # Red: after the import of torch, or after the data are loaded.
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "rowprop_lab.run", None)
    said = f"rowprop: rowprop compare needs {package}, which is not installed; run: pip install matplotlib jinja2 "
    refused(run("compare", "--out", tmp_path), f"{said}pillow scipy scikit-learn.")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--keep 2", "keep is 2.0, but a fraction in (0, 1] was needed"),
        ("--epochs 2 --seconds 5", "epochs and seconds are both given"),
        ("--data fashion-mnist --data-dir nowhere", "nowhere/train-images-idx3-ubyte.gz does not exist"),
        ("--methods ohem@fast", "engine 'fast' is unknown"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_2(line: str, sentence: str, tmp_path: Path):
    refused(run("compare", *line.split(), "--out", tmp_path), sentence)
