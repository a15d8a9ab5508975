"""The command line: exit codes, one sentence per error, JSON on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rowprop
from rowprop.__main__ import main as entry_point
from rowprop.app.cli import TESTED, app
from rowprop.app.compare import run as run_module
from rowprop.app.compare.folder import LOCK
from rowprop.backprop.rules.registry import RULES
from rowprop.errors import is_ours

TOOLS = Path(__file__).parents[2] / "tools"
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
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "report.html", "settings.json", "runs", LOCK
    }  # fmt: skip
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
        (["--methods", "ohem@fast"], "engine 'fast' is unknown"),
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
        patched.setattr(run_module, "render_report", interrupted)
        result = compare(*TINY, "--out", tmp_path)
    assert result.exit_code == 130
    said = (
        f"Stopped with 2 of 2 runs finished; they are kept in {tmp_path}. Run the same command with --resume to go on."
    )
    assert result.stderr.splitlines()[-1] == said
    resumed = compare(*TINY, "--out", tmp_path, "--resume")
    assert (resumed.exit_code, "; 2 kept from before." in resumed.stderr) == (0, True)
    assert (tmp_path / "report.html").is_file()


def test_ctrl_c_keeps_what_is_finished_and_resume_goes_on(tmp_path: Path):
    # A real process and a real signal, sent once it has told that its first run is finished.
    # Where the tests run in the background, a shell had them ignore it, and a process inherits that.
    heed = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import rowprop.app.cli as c; c.app()"
    )
    command = [sys.executable, "-c", heed, "compare", *TINY[:-2], "--out", str(tmp_path)]
    command[command.index("--seeds") + 1] = "10000"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent / "src")]),
    }
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, "--methods", "full"], **pipes, env=environment) as process:
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
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == kept

    resumed = compare(*TINY, "--out", tmp_path, "--resume", "--seeds", str(kept), "--methods", "full")
    assert resumed.exit_code == 0
    assert f"; {kept} kept from before." in resumed.stderr


# --- rowprop verify ---------------------------------------------------------------------------------------------------


def verify(*arguments: str):
    return CliRunner().invoke(app, ["verify", *arguments])


def test_verify_prints_tables_and_a_verdict():
    result = verify("model_cases:Sorting", "--input-shape", "8x4")
    assert result.exit_code == 0, result.stderr
    for text in ("8 rows", "first.weight", "block.1", "scatter.src", "uncounted: nothing", "Random state: the same"):
        assert text in result.stdout
    assert "sliced is exact: all 4 parameters within" in result.stdout


def test_verify_tells_of_zeros():
    # Red when: the table leaves out the zero gradients, or the parameters that were drawn anew.
    shown = verify("model_cases:with_zero_head", "--input-shape", "8x4").stdout
    assert "Of 4 gradients, zero are 0" in shown
    assert "Zero parameters that were drawn anew: 2: 2.weight, 2.bias" in shown


def test_verify_exits_with_1_and_names_the_parameters_when_an_engine_disagrees(monkeypatch: pytest.MonkeyPatch):
    op = torch.ops.aten.threshold_backward.default
    right = RULES[op].run

    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        return out.like(2 * out.values)

    monkeypatch.setattr(RULES[op], "run", wrong)
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


def test_verify_knows_tokens():
    # Red when: an option does not reach verify(), or the table calls tokens rows.
    given = ["model_cases:tokens", "--unit", "token", "--dtype", "float64"]
    found = json.loads(verify(*given, "--attention", "cut", "--keep", "0.5", "--json").stdout)
    assert (found["unit"], found["attention"], found["num_rows"], found["num_kept"]) == ("token", "cut", 40, 20)
    assert found["status"] == "by design" and sum(found["cut"].values()) == 1
    assert found["comparisons"][1]["conditions"] == "keys and values of other tokens detached"
    exact = verify(*given).stdout
    assert "against masked, 10 of 40 tokens, float64" in exact and "sliced is exact" in exact and "cut" not in exact
    assert "Attention was cut at: _scaled_dot_product_flash_attention_for_cpu_backward (1)" in verify(
        *given, "--attention", "cut"
    ).stdout.replace("\n", " ")
    assert "reduce each row by `.mean(1)` or `.sum(1)`" in verify("model_cases:tokens").stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model_cases:complete", "--unit", "word"], "unit='word' but one of row, token was needed"),
        (["model_cases:complete", "--attention", "none"], "attention='none' but one of exact, cut was needed"),
        (["resnet"], "model 'resnet' is neither module:callable nor torchvision/NAME"),
        (["model_cases:mlp"], "comes without a batch"),
        (["model_cases:mlp", "--input-shape", "8xfour"], "input shape '8xfour' is not of the form 64x3x32x32"),
        (["model_cases:complete", "--keep", "1"], "keep=1.0 but a fraction in (0, 1) was needed"),
        (["model_cases:complete", "--engine", "masked"], "engine='masked' but one of sliced, recompute was needed"),
        (["model_cases:complete", "--batchnorm", "none"], "batchnorm='none' but one of None, rows, exact was needed"),
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
    result = flops("model_cases:with_batchnorm", "--input-shape", "8x2x8x8", "--keep", "0.25")
    assert result.exit_code == 0, result.stderr
    for text in ("8 rows, backward of 2", "0 (Conv2d)", "convolution_backward", "Uncounted: nothing"):
        assert text in result.stdout
    assert "Update (sgd): 854 FLOPs for 427 parameters" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--optimizer", "lion"], "optimizer='lion' but one of sgd"),
        (["--keep", "1.5"], "count_step got keep=1.5 but a fraction in"),
    ],
)
def test_flops_refuses_bad_input_with_one_sentence(arguments: list[str], sentence: str):
    result = flops("model_cases:complete", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rowprop: ") and sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_flops_takes_inputs_alone_and_says_that_no_loss_is_counted():
    # Red: `_is_input_alone` False. A product of (8, 4) and (4, 3) is 192 FLOPs, forward and for the weights.
    whole = json.loads(flops("model_cases:mlp_with_batch", "--json").stdout)
    result = flops("model_cases:input_alone", "--json")
    found = json.loads(result.stdout)
    names = ("forward_flops", "backward_input_flops", "backward_weight_flops", "num_rows")
    assert [found[name] for name in names] == [whole[name] for name in names]
    assert (found["has_loss"], whole["has_loss"]) == (False, True)
    assert "no loss is counted: the backward starts at the model's output" in result.stderr
    for case in ("two_inputs_alone", "inputs_by_name"):
        found = json.loads(flops(f"model_cases:{case}", "--json").stdout)
        assert (found["forward_flops"], found["backward_flops"], found["has_loss"]) == (2 * 192, 2 * 192, False)
    refused = verify("model_cases:input_alone")
    assert refused.exit_code == 2 and "a tuple (*inputs, target) was needed" in refused.stderr


# --- all commands alike -----------------------------------------------------------------------------------------------

COMMANDS = {"verify": [], "flops": [], "profile": ["--rounds", "1"], "plan": ["--rounds", "1", "--keep", "0.5"]}


def run(command: str, *arguments: str | Path):
    return CliRunner().invoke(app, [command, *map(str, arguments), *COMMANDS[command]])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("class_out_of_range", "IndexError: Target 3 is out of bounds"),
        (
            "shapes_do_not_fit",
            "(8x5 and 4x8) (in Linear(in_features=4, out_features=8, bias=True))",
        ),
        ("losses_fail", "failed: KeyError: 'x' ({file}:{line}). --debug shows the whole traceback."),
        ("backward_fails", "failed: ValueError: no gradient here ({file}:{line})"),
        ("losses_leave", "ended the process: SystemExit: 0 ({file}:{line})"),
        ("raises_an_odd_error", "failed when called without arguments: GeneratorExit: neither an Exception nor"),
        ("losses_of_the_model_alone", "but a function was needed that takes the model and the batch and returns the"),
    ],
)
def test_the_users_own_failing_code_is_exit_2_and_keeps_its_place(command: str, case: str, sentence: str):
    # Red: without Door.invoke: tracebacks and exit code 1, which is verify's "disagrees", and 0 for SystemExit.
    lines = (TOOLS / "model_cases.py").read_text().splitlines()
    raising = {"losses_fail": '{}["x"]', "backward_fails": "no gradient here", "losses_leave": "sys.exit(0)"}
    line = next((number for number, text in enumerate(lines, 1) if raising.get(case, "no such text") in text), 0)
    result = run(command, f"model_cases:{case}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rowprop: ") and len(result.stderr.splitlines()) == 1
    file = os.path.relpath(TOOLS / "model_cases.py")
    assert sentence.format(file=file, line=line) in result.stderr


def test_debug_shows_the_whole_traceback_wherever_it_stands():
    # Red: Door.parse_args without its move ("No such option" after the command).
    for arguments in (
        ["--debug", "verify", "model_cases:losses_fail"],
        ["verify", "model_cases:losses_fail", "--debug"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("Traceback") and 'losses(model, {}["x"])' in result.stderr
        assert result.stderr.splitlines()[-1].startswith("rowprop: ")
    cause = CliRunner().invoke(app, ["flops", "model_cases:fails", "--debug"]).stderr
    assert "RuntimeError: no weights here\nand a second line" in cause


def test_an_error_of_rowprop_itself_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    # Red: `is_ours` False (exit code 2, and the user's code is blamed).
    monkeypatch.setattr(sys.modules["rowprop.oracle.verify"], "usual_tolerance", None)
    result = verify("model_cases:complete")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("rowprop: a bug in rowprop, at verify.py:")
    assert "TypeError: 'NoneType' object is not callable. Please report it with the output of --debug." in result.stderr


def test_what_the_machine_lacks_is_no_bug():
    # Red: `_MACHINE` empty.
    def raised(message: str) -> BaseException:
        with pytest.raises(RuntimeError) as caught:  # in a line of rowprop's own
            exec(compile(f"raise RuntimeError({message!r})", sys.modules["rowprop.oracle.verify"].__file__, "exec"))
        return caught.value

    assert is_ours(raised("something else"))
    assert not is_ours(raised("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_ours(raised("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_one_line_and_130(command: str):
    # Red: `except KeyboardInterrupt` removed: 130, without a word.
    result = run(command, "model_cases:losses_stopped")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Stopped.\n")


@pytest.mark.parametrize("command", ["verify", "profile", "plan"])
def test_the_device_meta_is_refused_where_something_is_computed(command: str):
    result = run(command, "model_cases:mlp", "--input-shape", "8x4", "--device", "meta")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"rowprop: {command} got a model on the device meta, which holds no numbers" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_frozen_model_is_refused(command: str):
    result = run(command, "model_cases:frozen")
    assert (result.exit_code, result.stdout) == (2, "")
    said = "at least one parameter require" if command == "flops" else "without a parameter that requires a gradient"
    assert said in result.stderr


@pytest.mark.parametrize("command", ["verify", "profile", "flops"])
def test_a_modules_name_is_text(command: str):
    # Red: markup=True in terminal.show: "[red]x[/]" is shown as "x", and "[/foo]" raises rich's MarkupError.
    result = run(command, "model_cases:odd")
    assert result.exit_code == 0, result.stderr
    assert "parts.[/foo]" in result.stdout and "parts.[red]x[/]" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_under_json_stdout_is_one_object_whatever_the_users_code_prints(
    command: str, capfd: pytest.CaptureFixture[str]
):
    # Red: `prints_on_stderr` yielding alone; without its dup2 the last line is on stdout.
    assert json.loads(run(command, "model_cases:loud", "--json").stdout)["model"] == "model_cases:loud"
    found = run(command, "model_cases:loud")
    assert "the factory prints" in found.stderr and "losses print" in found.stderr and "print" not in found.stdout
    out, err = capfd.readouterr()
    assert out == "" and "the losses write into the file itself" in err


@pytest.mark.parametrize(
    ("command", "option", "value", "sentence"),
    [
        ("plan", "--rounds", "0", "plan got rounds=0 but a whole number, 1 or more, was needed."),
        ("profile", "--rounds", "0", "profile got rounds=0 but a whole number, 1 or more, was needed."),
    ],
)
def test_a_number_out_of_range_is_one_sentence(command: str, option: str, value: str, sentence: str):
    # Red: without the checks: "measure got 1 runs, rounds=0 and warmup=3", and torch's overflow.
    result = CliRunner().invoke(app, [command, "model_cases:complete", option, value])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"rowprop: {sentence}\n")


@pytest.mark.parametrize("seed", ["-1", "9" * 23])
def test_a_seed_that_torch_cannot_take_is_refused(seed: str):
    # Red without typer's bounds: torch's overflow, told as a failure of the model.
    result = CliRunner().invoke(app, ["verify", "model_cases:complete", "--seed", seed])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--seed': " in result.stderr


def test_the_version(monkeypatch: pytest.MonkeyPatch):
    # Red: with a range that a newer torch is compared with and refused by.
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    result = CliRunner().invoke(app, ["--version"])
    printed = f"rowprop {rowprop.__version__}, torch 2.99.0+cpu (tested: 2.11 to 2.15)\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")


def test_the_tested_versions_are_the_ones_that_are_tried_and_asked_for():
    # Red: with another number in any of the four places.
    oldest, newest = TESTED
    root = Path(__file__).parents[2]
    tried = re.findall(r'"(\d+\.\d+)\.\d+"\)', (root / "noxfile.py").read_text())
    assert (tried[0], tried[-1]) == (oldest, newest)
    assert f'"torch>={oldest}",' in (root / "pyproject.toml").read_text()
    assert f"torch {oldest} to {newest}" in (root / "README.md").read_text()


def test_the_help_needs_no_torch_and_ctrl_c_while_it_is_imported_is_one_line(tmp_path: Path):
    # Red: `import torch` in cli.py or in the package's __init__: the help fails, and Ctrl-C shows a traceback.
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")  # Ctrl-C comes while torch is imported
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(TOOLS.parent / "src")])}
    options: dict[str, Any] = {"env": environment, "text": True, "capture_output": True}
    shown = subprocess.run([sys.executable, "-m", "rowprop", "--help"], check=False, **options)
    assert (shown.returncode, shown.stderr) == (0, "") and "compare" in shown.stdout
    for command in (["verify", "model:make"], ["flops", "model:make"], ["compare"], ["--version"]):
        stopped = subprocess.run([sys.executable, "-m", "rowprop", *command], check=False, **options)
        assert stopped.returncode == 130
        assert stopped.stderr.splitlines() == ["Stopped."]


def test_the_help_has_the_whole_summary_of_each_command():
    # Red: without short_help: "..." after some fifty letters.
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    for command in app.registered_commands:
        assert f"{command.callback.__name__} {command.callback.__doc__.splitlines()[0]}" in shown


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_the_command_says_which_line_brings_them(package: str, monkeypatch: pytest.MonkeyPatch):
    # Red: the import of typer outside of `try`: a traceback.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("typer", "rich")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("rowprop.app.cli", "rowprop.app.terminal"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        entry_point()
    assert str(ended.value.code) == (
        f"rowprop: the command line needs {package}, which is not installed; run: pip install typer rich."
    )


@pytest.mark.parametrize(
    ("module", "package"),
    [("matplotlib.figure", "matplotlib"), ("jinja2", "jinja2"), ("sklearn.datasets", "scikit-learn")],
)
def test_compare_asks_for_its_packages_before_it_does_anything(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # Red: after the import of torch, or after the data are loaded.
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "rowprop.app.compare.run", None)
    result = compare("--out", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"rowprop: rowprop compare needs {package}, which is not installed; run: pip install matplotlib jinja2 pillow "
        "scikit-learn.\n"
    )


def test_a_full_disk_behind_stdout_is_one_sentence(tmp_path: Path):
    # Red: `_mute` removed: Python's own attempt at its end changes the exit code to 120, and complains.
    most = 2**20

    def no_room() -> None:  # as on a full disk, but "File too large"
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    paths = os.pathsep.join([str(TOOLS), str(TOOLS.parent / "src")])
    command = [sys.executable, "-m", "rowprop", "flops", "model_cases:complete", "--json"]
    with (tmp_path / "out").open("w") as file:
        file.seek(most)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
        options: dict[str, Any] = {"env": environment, "text": True, "preexec_fn": no_room}
        found = subprocess.run(command, check=False, stdout=file, stderr=subprocess.PIPE, **options)
    said = "rowprop: cannot write to standard output (File too large)."
    assert (found.returncode, found.stderr.splitlines()[-1]) == (2, said)


def test_a_closed_stdout_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    # Red: `sys.stdout is None` not looked at: AttributeError.
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        app(["flops", "model_cases:complete"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "rowprop: standard output is closed, so the result is not shown.\n"


def test_a_stdout_that_nobody_reads_ends_it_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    # Red: BrokenPipeError as any other OSError (exit code 2, and a sentence after every `| head -1`).
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(SystemExit) as ended:
            app(["flops", "model_cases:complete"])
    assert (ended.value.code, capfd.readouterr().err) == (141, "")


def test_a_page_of_someone_else_is_not_overwritten_and_an_own_one_is(tmp_path: Path):
    # Red: open_folder without its look into report.html: exit code 0, and the other page is gone.
    (tmp_path / "report.html").write_text("<title>Quarterly</title>")
    refused = flops("model_cases:complete", "--out", str(tmp_path))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "report.html is no page of rowprop's and would be overwritten; choose another folder." in refused.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["<title>Quarterly</title>"]
    for _ in range(2):
        assert flops("model_cases:complete", "--out", str(tmp_path / "own")).exit_code == 0
