"""What the loop of docs/accelerate.md does that other frameworks do not; test_trainers.py has what it shares with them.

The package lives in a venv of its own: `nox -s integrations`. Models are tiny.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import nn

import plain_loop
import rowprop
from plain_loop import BATCH, EPOCHS, ROWS
from trainers import Accelerate

pytestmark = plain_loop.only_with("accelerate", "integrations")


def test_the_trackers_take_the_numbers(tmp_path: Path):
    # Through accelerate's own TensorBoard tracker. Red when: the record holds a value that trackers do not take.
    from accelerate.tracking import TensorBoardTracker

    tracker, writer, framework = object.__new__(TensorBoardTracker), MagicMock(), Accelerate()
    tracker.writer = writer
    ours = framework.ours(rowprop.TopK(keep=0.5), engine="sliced")
    ours.trackers = [tracker]
    _, logged = framework.fit(tmp_path, ours, epochs=1)
    written = {call.args: call.kwargs["global_step"] for call in writer.add_scalar.call_args_list}
    for numbers in logged:
        for name in ("loss_all", "loss_kept", "num_kept", "num_rows"):
            assert written[name, numbers[name]] >= numbers["step"]


def test_two_processes_that_draw_by_torchs_generator_resume_bit_for_bit(tmp_path: Path):
    # It is another on each rank, and accelerate saves both. Red when: the step is not registered, so that it begins
    # anew.
    def train(rank: int) -> nn.Module:
        framework, trained = Accelerate(), list[nn.Module]()
        for part in ({}, {"epochs": 1, "save": tmp_path / "state"}, {"resume": tmp_path / "state"}):
            ours = framework.ours(rowprop.RandomRows(keep=0.5), engine="sliced")
            seed = lambda _: torch.manual_seed(rank)  # noqa: E731
            trained.append(framework.fit(tmp_path, ours, before=seed, **part)[0])
        assert ours.record.step == EPOCHS * ROWS // BATCH // 2 - 1
        plain_loop.check_equal(trained[0], trained[2])
        return trained[2]

    plain_loop.on_two_ranks(train, tmp_path)


def test_the_page_runs_in_two_processes(tmp_path: Path):
    # Red when: a line of the page no longer works, or prints something else.
    block, script = plain_loop.script_of("accelerate.md"), tmp_path / "train.py"
    assert re.findall(r"# (\d)$", block, re.MULTILINE) == list("12345")
    script.write_text(block)
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "(16, 16) 64"
