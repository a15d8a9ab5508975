"""The command line: exit codes, one sentence per error, JSON on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rowprop.backprop.rowgrad import RULES
from rowprop.cli import app
from rowprop.compare import run as run_module

TESTS = Path(__file__).parent
TINY = [
    "--data", "compare_cases:tiny", "--model", "compare_cases:net", "--batch", "20", "--epochs", "2", "--seeds", "1",
    "--methods", "full,ohem",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def compare(*arguments: str | Path):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_a_comparison_prints_its_tables_and_writes_its_files(tmp_path: Path):
    result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.html", "settings.json", "runs"}
    for text in ("Methods side by side", "Where the time went", "ohem", "sliced", "x full", "of seen"):
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
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 2
    assert "(No space left on device); choose another folder" in result.stderr


def test_ctrl_c_before_training_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "load_data", interrupted)
    result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == f"Stopped before training began; nothing in {tmp_path} was removed."


def test_ctrl_c_while_the_results_are_written_tells_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where it says that training had not begun.
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_module, "render", interrupted)
        result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 130
    said = (
        f"Stopped with 2 of 2 runs finished; they are kept in {tmp_path}. Run the same command with --resume to go on."
    )
    assert result.stderr.splitlines()[-1] == said
    resumed = compare(*TINY, "--out", tmp_path, "--resume")
    assert (resumed.exit_code, resumed.stderr.count("kept from before")) == (0, 2)
    assert (tmp_path / "report.html").is_file()


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(tmp_path: Path):
    # A real process and a real signal, sent once it has told that its first run is finished.
    # Where the tests run in the background, a shell had them ignore it, and a process inherits that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import rowprop.cli as c; c.app()"
    command = [sys.executable, "-c", heed, "compare", *TINY[:-2], "--out", str(tmp_path)]
    command[command.index("--seeds") + 1] = "10000"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    }
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, "--methods", "full"], **pipes, env=environment) as process:
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


# --- rowprop verify ---------------------------------------------------------------------------------------------------


def verify(*arguments: str):
    return CliRunner().invoke(app, ["verify", *arguments])


def test_verify_prints_tables_and_a_verdict():
    result = verify("model_cases:Sorting", "--input-shape", "8x4")
    assert result.exit_code == 0, result.stderr
    for text in ("8 rows", "first.weight", "block.1", "scatter.src", "uncounted: nothing", "Random state: the same"):
        assert text in result.stdout
    assert "sliced is exact: all 4 parameters within" in result.stdout


def test_verify_exits_with_1_and_names_the_parameters_when_an_engine_disagrees(monkeypatch: pytest.MonkeyPatch):
    op = torch.ops.aten.threshold_backward.default
    right = RULES[op]

    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        return out.like(2 * out.values)

    monkeypatch.setitem(RULES, op, wrong)
    shown = verify("model_cases:complete")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert {line.split()[0] for line in lines if "beyond" in line} == {"0.weight", "0.bias"}
    assert "sliced disagrees with the oracle in 2 of 4 parameters" in shown.stdout

    printed = verify("model_cases:complete", "--json")
    found = json.loads(printed.stdout)
    assert (printed.exit_code, found["status"], found["agrees"]) == (1, "disagrees", False)
    assert found["comparisons"][0]["errors"][0]["error"] == pytest.approx(1)


def test_verify_takes_its_options():
    arguments = ["--input-shape", "8x2x8x8", "--keep", "0.5", "--dtype", "float64", "--json"]
    found = json.loads(verify("model_cases:with_batchnorm", *arguments, "--batchnorm", "exact").stdout)
    assert (found["model"], found["engine"], found["batchnorm"]) == ("model_cases:with_batchnorm", "sliced", "exact")
    assert (found["num_rows"], found["num_kept"], found["dtype"], found["status"]) == (8, 4, "float64", "exact")
    found = json.loads(verify("model_cases:with_batchnorm", *arguments, "--engine", "recompute").stdout)
    assert (found["engine"], found["status"], found["flops_ratio"]) == ("recompute", "by design", 0.5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["resnet"], "model 'resnet' is none of module:callable, torchvision/NAME and timm/NAME"),
        (["model_cases:mlp"], "comes without a batch"),
        (["model_cases:mlp", "--input-shape", "8xfour"], "input shape '8xfour' is not of the form 64x3x32x32"),
        (["model_cases:complete", "--keep", "1"], "keep=1.0 but a fraction in (0, 1) was needed"),
        (["model_cases:complete", "--engine", "masked"], "the oracle itself"),
        (["model_cases:complete", "--batchnorm", "none"], "'rows' or 'exact' was needed"),
    ],
)
def test_verify_refuses_bad_input_with_one_sentence(arguments: list[str], sentence: str):
    result = verify(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rowprop: ") and sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- rowprop flops ----------------------------------------------------------------------------------------------------


def flops(*arguments: str):
    return CliRunner().invoke(app, ["flops", *arguments])


def test_flops_prints_one_object():
    found = json.loads(flops("model_cases:mlp", "--input-shape", "8x4", "--optimizer", "adam", "--json").stdout)
    first, second = 2 * 8 * 4 * 8, 2 * 8 * 8 * 3
    assert (found["forward_flops"], found["backward_input_flops"]) == (first + second, second)
    assert found["backward_weight_flops"] == first + second
    assert found["update_flops"] == 14 * (4 * 8 + 8 + 8 * 3 + 3)
    assert (found["uncounted"], found["model"], found["keep"]) == ({}, "model_cases:mlp", None)
    assert [(m["module"], m["kind"], m["forward_flops"]) for m in found["modules"]] == [
        ("0", "Linear", first),
        ("2", "Linear", second),
    ]
    assert found["modules"][0]["by_op"] == {"forward": {"addmm": first}, "backward_weight": {"mm": first}}
    sliced = json.loads(flops("model_cases:mlp", "--input-shape", "8x4", "--keep", "0.5", "--json").stdout)
    assert 2 * sliced["backward_flops"] == found["backward_flops"]


def test_flops_prints_tables():
    result = flops("model_cases:with_batchnorm", "--input-shape", "8x2x8x8", "--keep", "0.25", "--elementwise")
    assert result.exit_code == 0, result.stderr
    for text in ("8 rows, backward of 2", "1 (BatchNorm2d)", "convolution_backward", "Uncounted: nothing"):
        assert text in result.stdout
    assert "Update (sgd): 854 FLOPs for 427 parameters" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--optimizer", "lion"], "optimizer 'lion' is unknown"), (["--keep", "1.5"], "keep is 1.5, but a fraction in")],
)
def test_flops_refuses_bad_input_with_one_sentence(arguments: list[str], sentence: str):
    result = flops("model_cases:complete", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rowprop: ") and sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
