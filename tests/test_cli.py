"""The command line: exit codes, one sentence per error, JSON on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rowprop.cli import app
from rowprop.compare import run as run_module

TESTS = Path(__file__).parent
TINY = [
    "--data", "compare_cases:tiny", "--model", "compare_cases:net", "--batch", "20", "--epochs", "2", "--seeds", "1",
    "--methods", "full,top-k",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models gain nothing from threads, and wait for them where the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compare(*arguments: str | Path):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_a_comparison_prints_its_tables_and_writes_its_files(tmp_path: Path):
    result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.html", "settings.json", "runs"}
    for text in ("Methods side by side", "Where the time went", "top-k", "sliced", "x full"):
        assert text in result.stdout
    assert str(tmp_path / "report.html") in result.stderr


def test_json_is_all_that_stdout_holds(tmp_path: Path):
    result = compare(*TINY, "--out", tmp_path, "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "imagenet"], "data 'imagenet' is unknown"),
        (["--model", "compare_cases:one_class_short"], "but logits of shape (2, 3) were needed"),
        (["--keep", "2"], "keep is 2.0, but a fraction in (0, 1] was needed"),
        (["--seconds", "5"], "epochs and seconds are both given"),
        (["--data", "fashion-mnist", "--data-dir", "nowhere"], "nowhere/train-images-idx3-ubyte.gz does not exist"),
        (["--engine", "fast"], "engine 'fast' is unknown"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: list[str], sentence: str, tmp_path: Path):
    result = compare(*TINY, *arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("rowprop: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_output_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = compare(*TINY, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert f"cannot write to the output folder {tmp_path / 'file' / 'out'} (Not a directory)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_corrupt_data_file_is_one_sentence(tmp_path: Path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b garbage")
    result = compare("--data", "fashion-mnist", "--data-dir", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "train-images-idx3-ubyte.gz is corrupt (" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_full_disk_while_saving_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 2
    assert "(No space left on device); choose another folder" in result.stderr


def test_ctrl_c_before_training_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "load_data", interrupted)
    result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Stopped before training began."


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(tmp_path: Path):
    # A real process and a real signal, sent once it has told that its first run is finished.
    command = [sys.executable, "-m", "rowprop.cli", "compare", *TINY[:-2], "--out", str(tmp_path)]
    command[command.index("--seeds") + 1] = "10000"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    }
    with subprocess.Popen(
        [*command, "--methods", "full"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        before = next(line for line in process.stderr if "full seed 0" in line)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in before + rest
    kept = len(list((tmp_path / "runs").iterdir()))
    assert kept >= 1
    assert f"Stopped with {kept} of 10000 runs finished" in rest
    assert "Run the same command with --resume to go on." in rest
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == kept

    resumed = compare(*TINY, "--out", tmp_path, "--resume", "--seeds", str(kept), "--methods", "full")
    assert resumed.exit_code == 0
    assert resumed.stderr.count("kept from before") == kept
