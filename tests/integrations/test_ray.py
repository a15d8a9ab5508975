"""Ray Train on a local cluster of two workers: the parameters of a loop in one process over the same kept rows.

The package lives in a venv of its own: `nox -s integrations`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from plain_loop import script_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def test_the_page_shows_the_function_of_the_example():
    # Red when: one of the two is changed alone.
    assert script_of("ray.md") in EXAMPLE.read_text()


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: nox -s integrations")
def test_two_workers_train_as_one_process_on_the_rows_that_both_keep(tmp_path: Path):
    # The example in a process of its own, as it starts a cluster. Red when: the step is given no `ranks`, so that the
    # workers count alike and not their rows.
    quiet = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), "--folder", str(tmp_path)],
        env=os.environ | quiet, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kept = re.search(r"kept \((\d+), (\d+)\) of 64 rows each", done.stdout)
    assert kept
    assert kept[1] != kept[2]
    apart = re.search(r"largest difference from one process: (\S+)", done.stdout)
    assert apart
    assert float(apart[1]) < 1e-6
