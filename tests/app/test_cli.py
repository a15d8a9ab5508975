"""The command line: exit codes, one sentence per error, JSON on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rowprop
from commands import refused, run
from rowprop.__main__ import main as entry_point
from rowprop.app.cli import TESTED, app
from rowprop.app.lookup import require_lab
from rowprop.backprop.rules.registry import RULES
from rowprop.errors import is_ours
from rowprop.native import building

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TOOLS}{os.pathsep}{ROOT / 'src'}"}


def verify(model: str, *arguments: str):
    return run("verify", f"model_cases:{model}", *arguments)


def test_verify_prints_tables_and_a_verdict():
    # Red when: the table leaves out the zero gradients, or the parameters that were drawn anew.
    result = verify("Sorting", "--input-shape", "8x4")
    assert result.exit_code == 0, result.stderr
    for text in ("8 rows", "first.weight", "block.1", "scatter.src", "uncounted: nothing", "Random state: the same"):
        assert text in result.stdout
    assert "sliced is exact: all 4 parameters within" in result.stdout
    shown = verify("with_zero_head", "--input-shape", "8x4").stdout
    assert "Of 4 gradients, zero are 0" in shown
    assert "Zero parameters that were drawn anew: 2: 2.weight, 2.bias" in shown


def test_verify_exits_with_1_and_names_the_parameters_when_an_engine_disagrees(monkeypatch: pytest.MonkeyPatch):
    op = torch.ops.aten.threshold_backward.default
    right = RULES[op].run

    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        return out.like(2 * out.values)

    monkeypatch.setattr(RULES[op], "run", wrong)
    shown = verify("complete")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert {line.split()[0] for line in lines if "beyond" in line} == {"0.weight", "0.bias"}
    assert "sliced disagrees with the oracle in 2 of 4 parameters" in shown.stdout

    printed = verify("complete", "--json")
    found = json.loads(printed.stdout)
    assert (printed.exit_code, found["status"], found["agrees"]) == (1, "disagrees", False)
    assert found["comparisons"][0]["errors"][0]["error"] == pytest.approx(1)


def test_verify_takes_its_options():
    arguments = ["--input-shape", "8x2x8x8", "--keep", "0.5", "--dtype", "float64", "--json"]
    found = json.loads(verify("with_batchnorm", *arguments, "--batchnorm", "exact").stdout)
    assert (found["model"], found["engine"], found["batchnorm"]) == ("model_cases:with_batchnorm", "sliced", "exact")
    assert (found["num_rows"], found["num_kept"], found["dtype"], found["status"]) == (8, 4, "float64", "exact")
    found = json.loads(verify("with_batchnorm", *arguments, "--engine", "recompute").stdout)
    assert (found["engine"], found["status"], found["flops_ratio"]) == ("recompute", "by design", 0.5)


def test_verify_knows_tokens():
    # Red when: an option does not reach verify(), or the table calls tokens rows.
    given = ["tokens", "--unit", "token", "--dtype", "float64"]
    found = json.loads(verify(*given, "--attention", "cut", "--keep", "0.5", "--json").stdout)
    assert (found["unit"], found["attention"], found["num_rows"], found["num_kept"]) == ("token", "cut", 40, 20)
    assert found["status"] == "by design" and sum(found["cut"].values()) == 1
    assert found["comparisons"][1]["conditions"] == "keys and values of other tokens detached"
    exact = verify(*given).stdout
    assert "against masked, 10 of 40 tokens, float64" in exact and "sliced is exact" in exact and "cut" not in exact
    cut = verify(*given, "--attention", "cut").stdout.replace("\n", " ")
    assert "Attention was cut at: _scaled_dot_product_flash_attention_for_cpu_backward (1)" in cut


def test_plan_knows_tokens():
    # Red when: an option does not reach plan(), or the output calls tokens rows.
    given = ["model_cases:tokens", "--unit", "token", "--attention", "cut", "--keep", "0.5", "--rounds", "1"]
    said = " ".join(run("plan", *given).stdout.split())
    assert "model_cases:tokens: N = 40 tokens; plain step" in said and "at keep 0.5 (K = 20 of 40 tokens)" in said
    assert "recompute left out" in said and "sliced" in said and "by policy" in said


def flops(model: str, *arguments: str) -> dict[str, Any]:
    return json.loads(run("flops", f"model_cases:{model}", *arguments, "--json").stdout)


def test_flops_prints_one_object():
    found = flops("mlp", "--input-shape", "8x4", "--optimizer", "adam")
    first, second = 2 * 8 * 4 * 8, 2 * 8 * 8 * 3
    assert (found["forward_flops"], found["backward_input_flops"]) == (first + second, second)
    assert found["backward_weight_flops"] == first + second
    assert found["update_flops"] == 14 * (4 * 8 + 8 + 8 * 3 + 3)
    assert (found["uncounted"], found["model"], found["keep"]) == ({}, "model_cases:mlp", None)
    modules = [(part["module"], part["kind"], part["forward_flops"]) for part in found["modules"]]
    assert modules == [("0", "Linear", first), ("2", "Linear", second)]
    assert found["modules"][0]["by_op"] == {"forward": {"addmm": first}, "backward_weight": {"mm": first}}
    assert 2 * flops("mlp", "--input-shape", "8x4", "--keep", "0.5")["backward_flops"] == found["backward_flops"]


def test_flops_prints_tables():
    result = run("flops", "model_cases:with_batchnorm", "--input-shape", "8x2x8x8", "--keep", "0.25")
    assert result.exit_code == 0, result.stderr
    for text in ("8 rows, backward of 2", "0 (Conv2d)", "convolution_backward", "Uncounted: nothing"):
        assert text in result.stdout
    assert "Update (sgd): 854 FLOPs for 427 parameters" in result.stdout


def test_flops_takes_inputs_alone_and_says_that_no_loss_is_counted():
    # Red: `_is_input_alone` False. A product of (8, 4) and (4, 3) is 192 FLOPs, forward and for the weights.
    whole, found = flops("mlp_with_batch"), flops("input_alone")
    names = ("forward_flops", "backward_input_flops", "backward_weight_flops", "num_rows")
    assert [found[name] for name in names] == [whole[name] for name in names]
    assert (found["has_loss"], whole["has_loss"]) == (False, True)
    said = "no loss is counted: the backward starts at the model's output"
    assert said in run("flops", "model_cases:input_alone").stderr
    for case in ("two_inputs_alone", "inputs_by_name"):
        found = flops(case)
        assert (found["forward_flops"], found["backward_flops"], found["has_loss"]) == (2 * 192, 2 * 192, False)


COMMANDS = {"verify": [], "flops": [], "profile": ["--rounds", "1"], "plan": ["--rounds", "1", "--keep", "0.5"]}
FROZEN = "without a parameter that requires a gradient"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("verify model_cases:complete --unit word", "unit='word' but one of row, token was needed"),
        ("verify model_cases:complete --attention none", "attention='none' but one of exact, cut was needed"),
        ("verify model_cases:complete --keep 1", "keep=1.0 but a fraction in (0, 1) was needed"),
        ("verify model_cases:complete --engine masked", "engine='masked' but one of sliced, recompute was needed"),
        ("verify model_cases:complete --batchnorm none", "batchnorm='none' but one of None, rows, exact was needed"),
        ("verify model_cases:tokens", "reduce each row by `.mean(1)` or `.sum(1)`"),
        ("verify model_cases:input_alone", "a tuple (*inputs, target) was needed"),
        ("flops model_cases:complete --optimizer lion", "optimizer='lion' but one of sgd"),
        ("flops model_cases:complete --keep 1.5", "count_step got keep=1.5 but a fraction in"),
        # Without the checks: "measure got 1 runs, rounds=0 and warmup=3", and torch's overflow.
        ("plan model_cases:complete --rounds 0", "plan got rounds=0 but a whole number, 1 or more, was needed."),
        ("profile model_cases:complete --rounds 0", "profile got rounds=0 but a whole number, 1 or more, was needed."),
        # meta is fine where nothing is computed.
        ("verify model_cases:mlp --input-shape 8x4 --device meta", "verify got a model on the device meta, which"),
        ("profile model_cases:mlp --input-shape 8x4 --device meta", "profile got a model on the device meta, which"),
        ("plan model_cases:mlp --input-shape 8x4 --device meta", "plan got a model on the device meta, which holds no"),
        ("verify model_cases:frozen", FROZEN),
        ("flops model_cases:frozen", "let losses_fn use trainable parameters"),
        ("profile model_cases:frozen", FROZEN),
        ("plan model_cases:frozen", FROZEN),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(line: str, sentence: str):
    refused(run(*line.split()), sentence)


@pytest.fixture
def _lab_not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "lab"])
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "rowprop_lab"]:
            del sys.modules[name]
        yield


@pytest.mark.usefixtures("_lab_not_imported")
def test_the_comparison_is_found_in_a_checkout_that_is_not_installed():
    # Red unless its folder joins the path.
    assert require_lab("rowprop compare", digits=False).Settings().seeds == 3


@pytest.mark.usefixtures("_lab_not_imported")
def test_an_installed_package_says_where_the_comparison_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red without the check of the folder: ModuleNotFoundError.
    monkeypatch.setattr("rowprop.app.lookup.LAB", tmp_path / "lab" / "rowprop_lab")
    refused(run("compare", "--out", tmp_path / "out"), "rowprop compare is not in the installed package")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("class_out_of_range", "IndexError: Target 3 is out of bounds"),
        ("shapes_do_not_fit", "(8x5 and 4x8) (in Linear(in_features=4, out_features=8, bias=True))"),
        ("losses_fail", "failed: KeyError: 'x' ({file}:{line}). --debug shows the whole traceback."),
        ("backward_fails", "failed: ValueError: no gradient here ({file}:{line})"),
        ("losses_leave", "ended the process: SystemExit: 0 ({file}:{line})"),
        ("raises_an_odd_error", "failed when called without arguments: GeneratorExit: neither an Exception nor"),
        ("losses_of_the_model_alone", "but a function was needed that takes the model and the batch and returns the"),
    ],
)
def test_the_users_own_failing_code_is_exit_2_and_keeps_its_place(command: str, case: str, sentence: str):
    # Red: without Door.invoke: tracebacks and exit code 1, which is verify's "disagrees", and 0 for SystemExit.
    file = TOOLS / "model_cases.py"
    raising = {"losses_fail": '{}["x"]', "backward_fails": "no gradient here", "losses_leave": "sys.exit(0)"}
    lines = enumerate(file.read_text().splitlines(), 1)
    line = next((number for number, text in lines if raising.get(case, "no such text") in text), 0)
    result = run(command, f"model_cases:{case}", *COMMANDS[command])
    refused(result, sentence.format(file=os.path.relpath(file), line=line))


def test_debug_shows_the_whole_traceback_wherever_it_stands():
    # Red: Door.parse_args without its move ("No such option" after the command).
    for line in ("--debug verify model_cases:losses_fail", "verify model_cases:losses_fail --debug"):
        result = run(*line.split())
        assert result.exit_code == 2
        assert result.stderr.startswith("Traceback") and 'losses(model, {}["x"])' in result.stderr
        assert result.stderr.splitlines()[-1].startswith("rowprop: ")
    assert "RuntimeError: no weights here\nand a second line" in run("flops", "model_cases:fails", "--debug").stderr


def test_an_error_of_rowprop_itself_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    # Red: `is_ours` False (exit code 2, and the user's code is blamed).
    monkeypatch.setattr(sys.modules["rowprop.oracle.verify"], "usual_tolerance", None)
    result = verify("complete")
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
    result = run(command, "model_cases:losses_stopped", *COMMANDS[command])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Stopped.\n")


@pytest.mark.parametrize("command", ["verify", "profile", "flops"])
def test_a_modules_name_is_text(command: str):
    # Red: markup=True in terminal.show: "[red]x[/]" is shown as "x", and "[/foo]" raises rich's MarkupError.
    result = run(command, "model_cases:odd", *COMMANDS[command])
    assert result.exit_code == 0, result.stderr
    kind = "" if command == "verify" else " (Linear)"
    assert f"parts.[/foo]{kind}" in result.stdout and f"parts.[red]x[/]{kind}" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_under_json_stdout_is_one_object_whatever_the_users_code_prints(command: str, capfd):
    # Red: `prints_on_stderr` yielding alone; without its dup2 the last line is on stdout.
    loud = [command, "model_cases:loud", *COMMANDS[command]]
    assert json.loads(run(*loud, "--json").stdout)["model"] == "model_cases:loud"
    found = run(*loud)
    assert "the factory prints" in found.stderr and "losses print" in found.stderr and "print" not in found.stdout
    out, err = capfd.readouterr()
    assert out == "" and "the losses write into the file itself" in err


@pytest.mark.parametrize("seed", ["-1", "9" * 23])
def test_a_seed_that_torch_cannot_take_is_refused(seed: str):
    # Red without typer's bounds: torch's overflow, told as a failure of the model.
    result = verify("complete", "--seed", seed)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--seed': " in result.stderr


def test_the_version_and_those_that_are_tested(monkeypatch: pytest.MonkeyPatch):
    # Red: with a range that a newer torch is refused by, or with another number in any of the four places.
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    result = run("--version")
    printed = (
        f"rowprop {rowprop.__version__}, torch 2.99.0+cpu (tested: 2.11 to 2.15), dispatch: {building.find()[1]}\n"
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")
    oldest, newest = TESTED
    tried = re.findall(r'"(\d+\.\d+)\.\d+"\)', (ROOT / "noxfile.py").read_text())
    assert (tried[0], tried[-1]) == (oldest, newest)
    assert f'"torch>={oldest}",' in (ROOT / "pyproject.toml").read_text()
    assert f"torch {oldest} to {newest}" in (ROOT / "README.md").read_text()


def test_the_help_needs_no_torch_and_ctrl_c_while_it_is_imported_is_one_line(tmp_path: Path):
    # Red: `import torch` in cli.py or in the package's __init__: the help fails, and Ctrl-C shows a traceback.
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")  # Ctrl-C comes while torch is imported
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    options: dict[str, Any] = {"env": environment, "text": True, "capture_output": True}
    shown = subprocess.run([sys.executable, "-m", "rowprop", "--help"], check=False, **options)
    assert (shown.returncode, shown.stderr) == (0, "") and "compare" in shown.stdout
    for command in (["verify", "model:make"], ["flops", "model:make"], ["compare"], ["--version"]):
        stopped = subprocess.run([sys.executable, "-m", "rowprop", *command], check=False, **options)
        assert (stopped.returncode, stopped.stderr.splitlines()) == (130, ["Stopped."])


def test_the_help_has_the_whole_summary_of_each_command():
    # Red: without short_help: "..." after some fifty letters.
    shown = " ".join(run("--help").stdout.split())
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
    said = f"rowprop: the command line needs {package}, which is not installed; run: pip install typer rich."
    assert str(ended.value.code) == said


def test_a_full_disk_behind_stdout_is_one_sentence(tmp_path: Path):
    # Red: `_mute` removed: Python's own attempt at its end changes the exit code to 120, and complains.
    most = 2**20

    def no_room() -> None:  # as on a full disk, but "File too large"
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    command = [sys.executable, "-m", "rowprop", "flops", "model_cases:complete", "--json"]
    with (tmp_path / "out").open("w") as file:
        file.seek(most)
        options: dict[str, Any] = {"env": ENVIRONMENT | {"PYTHONUNBUFFERED": ""}, "text": True, "preexec_fn": no_room}
        found = subprocess.run(command, check=False, stdout=file, stderr=subprocess.PIPE, **options)
    said = "rowprop: cannot write to standard output (File too large)."
    assert (found.returncode, found.stderr.splitlines()[-1]) == (2, said)


def test_without_a_stderr_the_result_is_shown():
    # Red: progress written without a look whether there is a stderr: AttributeError, and exit code 3.
    line = '"$0" -m rowprop flops model_cases:complete --json 2>&-'
    found = subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, env=ENVIRONMENT, check=False)
    assert found.returncode == 0 and json.loads(found.stdout)


def test_a_stdout_that_is_closed_is_one_sentence_and_one_that_nobody_reads_none(monkeypatch, capfd):
    # Red: `sys.stdout is None` not looked at: AttributeError; BrokenPipeError as any other OSError (exit code 2, and a
    # sentence after every `| head -1`).
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        closed = "rowprop: standard output is closed, so the result is not shown.\n"
        for stdout, code, said in ((None, 2, closed), (unread, 141, "")):
            monkeypatch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as ended:
                app(["flops", "model_cases:complete"])
            assert (ended.value.code, capfd.readouterr().err) == (code, said)
