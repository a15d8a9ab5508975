"""The folder of `rowprop compare`: what others made stays, what is finished is kept, one writer at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rowprop.app.cli import app
from rowprop.app.compare import folder as folder_module
from rowprop.app.compare import run as run_module
from rowprop.app.compare.folder import LOCK
from rowprop.app.compare.train import train
from rowprop.errors import InvalidInput

TINY = (
    "--data", "compare_cases:tiny", "--model", "compare_cases:net", "--batch", "20", "--epochs", "2", "--seeds", "2",
    "--methods", "full,ohem",
)  # fmt: skip
FLAGS = ([], ["--resume"], ["--fresh"])

pytestmark = pytest.mark.usefixtures("one_thread")


def compare(out: Path | str, *arguments: str):
    return CliRunner().invoke(app, ["compare", *TINY, *arguments, "--out", str(out)])


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the content of files, None for folders; the lock stays out of it."""
    found = (path for path in folder.rglob("*") if path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def figures(out: Path) -> list[Any]:
    """What the results say about each run, times left out."""
    return [
        [run["label"], run["seed"], run["accuracy"], run["rows_backpropagated"], run["loss_shares"]]
        + [[point["accuracy"], point["loss"], point["kept"]] for point in run["curve"]]
        for run in json.loads((out / "results.json").read_text())["runs"]
    ]


def kept_before(result: Any) -> int:
    """How many runs a resumed comparison says that it kept."""
    return int(re.findall(r"; (\d+) kept from before\.", result.stderr)[0])


def refused(result: Any, *said: str) -> None:
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("rowprop: ")
    assert "Traceback" not in result.stderr
    for words in said:
        assert words in last


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison; tests work on copies of it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert compare(out).exit_code == 0
    return out


@pytest.fixture(autouse=True)
def plain_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all else; `whole` and the comparisons that are killed have real pages."""
    monkeypatch.setattr(run_module, "render_report", lambda results, data: f"<p>{results['verdict']}</p>")


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "out")


@pytest.fixture
def stopped(finished: Path) -> Path:
    """A comparison that was killed with 3 of 4 runs finished."""
    for name in ("runs/ohem-seed1.json", "results.json", "report.html"):
        (finished / name).unlink()
    return finished


# --- What compare did not make ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("name", ["runs/events.out.tfevents", "runs", "settings.json", "results.json", "report.html"])
def test_a_folder_of_someone_else_stays_as_it_is(name: str, flags: list[str], tmp_path: Path):
    # Red where runs/ is emptied, or a file is written before all is checked.
    if name == "runs":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"theme": "dark"}')
    before = tree(tmp_path)
    said = "was not written by rowprop compare" if name == "settings.json" else "no settings.json says that rowprop"
    refused(compare(tmp_path, *flags), said, "nothing was touched", "choose another folder with --out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("out", [".", ""])
def test_the_working_directory_is_no_exception(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out").write_text("a week of training")
    before = tree(tmp_path)
    refused(compare(out), "holds runs, but no settings.json says")
    assert tree(tmp_path) == before


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    assert compare(tmp_path).exit_code == 0
    assert compare(tmp_path, "--fresh").exit_code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "earlier-1" / "notes.txt").exists()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    "content",
    ["missing", "folder", b"null", b"[]", b"5", b"true", b"{", b"\xff", b"{}", b"[" * 100_000,
     b'{"format": "rowprop compare 2", "settings": {}}', b'{"format": "rowprop compare 1", "settings": []}'],
    ids=lambda content: str(content)[:40],
)  # fmt: skip
def test_runs_without_their_settings_are_not_touched(content: str | bytes, flags: list[str], stopped: Path):
    # Red where settings that cannot be read count as none, and runs without settings as nobody's.
    settings = stopped / "settings.json"
    settings.unlink()
    if content == "folder":
        settings.mkdir()
    elif isinstance(content, bytes):
        settings.write_bytes(content)
    before = tree(stopped)
    refused(compare(stopped, *flags), "settings.json", "rowprop compare", "nothing was touched")
    assert tree(stopped) == before


# --- What is finished is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [[], ["--lr", "0.01"]], ids=["same", "other"])
@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_runs_need_a_word_before_anything_happens_to_them(
    state: str, changes: list[str], request: pytest.FixtureRequest
):
    # Red where a finished comparison may be overwritten.
    out = request.getfixturevalue(state)
    count = {"finished": 4, "stopped": 3}[state]
    before = tree(out)
    refused(compare(out, *changes), f"holds a comparison with {count} finished runs; add --resume", "--fresh to set it")
    assert tree(out) == before


def test_resume_and_fresh_together_are_refused(stopped: Path):
    before = tree(stopped)
    refused(compare(stopped, "--resume", "--fresh"), "--resume and --fresh are both given")
    assert tree(stopped) == before


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_fresh_sets_aside_and_what_is_aside_can_be_resumed(state: str, whole: Path, request: pytest.FixtureRequest):
    # Red where the runs are removed, or go without the settings that they were made under.
    out = request.getfixturevalue(state)
    before = tree(out)
    first = compare(out, "--fresh", "--lr", "0.01")
    assert first.exit_code == 0
    assert "The earlier comparison is kept in" in first.stderr
    assert tree(out / "earlier-1") == before
    middle = {name: content for name, content in tree(out).items() if not name.startswith("earlier")}
    assert compare(out, "--fresh", "--methods", "full").exit_code == 0
    assert tree(out / "earlier-1") == before
    assert tree(out / "earlier-2") == middle
    assert [entry[:2] for entry in figures(out)] == [["full", 0], ["full", 1]]
    again = compare(out / "earlier-1", "--resume")
    assert (again.exit_code, kept_before(again)) == (0, 4 if state == "finished" else 3)
    assert figures(out / "earlier-1") == figures(whole)


def test_a_second_comparison_that_was_killed_is_not_taken_for_the_finished_first(
    finished: Path, monkeypatch: pytest.MonkeyPatch
):
    # Red where results.json of the first stays, and tells that the runs of the second need not be asked about.
    def killed(*_: object) -> None:
        raise MemoryError  # ends the process as far as the folder can tell

    calls = iter([train, killed])
    monkeypatch.setattr(run_module, "train", lambda *given: next(calls)(*given))
    compare(finished, "--fresh", "--lr", "0.01")
    assert not (finished / "results.json").exists()
    before = tree(finished)
    refused(compare(finished), "holds a comparison with 1 finished run; add --resume")
    refused(compare(finished, "--resume"), "lr was 0.01 and is now 0.05")
    assert tree(finished) == before


def test_a_run_of_other_settings_is_refused_by_its_file(stopped: Path, tmp_path: Path):
    # Red where a run file does not name its settings.
    other = tmp_path / "other"
    assert compare(other, "--lr", "0.01").exit_code == 0
    shutil.copy(other / "runs" / "ohem-seed1.json", stopped / "runs")
    before = tree(stopped)
    refused(
        compare(stopped, "--resume"), "ohem-seed1.json cannot be used (it was made with other settings: lr was 0.01"
    )
    assert tree(stopped) == before


@pytest.mark.parametrize("edit", ["run", "settings", "sha256"])
def test_a_run_file_that_was_edited_is_refused(edit: str, stopped: Path):
    # Red when: the digest leaves out a part of the file, or a file without one is taken.
    file = stopped / "runs" / "ohem-seed0.json"
    content = json.loads(file.read_text())
    if edit == "sha256":
        del content["sha256"]
    else:
        content[edit]["seed" if edit == "run" else "lr"] = 1
    file.write_text(json.dumps(content))
    before = tree(stopped)
    refused(compare(stopped, "--resume"), f"the run in {file} cannot be used (it is not as rowprop compare wrote it)")
    assert tree(stopped) == before
    file.rename(stopped / "away.json")
    assert compare(stopped, "--resume").exit_code == 0


def test_a_run_file_cut_or_changed_at_any_place_is_refused(stopped: Path):
    # Red when: a changed digit is taken for a result.
    file = stopped / "runs" / "ohem-seed0.json"
    whole = file.read_bytes()
    folder = folder_module.Folder(stopped, json.loads((stopped / "settings.json").read_text())["settings"])
    assert folder._read_run(file).label == "ohem"
    for place in range(0, len(whole), 97):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            with suppress(ValueError):
                if json.loads(content) == json.loads(whole):  # a digit behind a float's precision
                    continue
            file.write_bytes(content)
            with pytest.raises(InvalidInput, match=r"the run in .*ohem-seed0.json cannot be used \("):
                folder._read_run(file)


def test_a_run_file_under_another_name_is_refused(stopped: Path):
    # Red where the file is believed: one run would count twice, and another would be missing.
    file = stopped / "runs" / "full-seed1.json"
    shutil.copy(stopped / "runs" / "ohem-seed0.json", file)
    refused(compare(stopped, "--resume"), "it holds ohem with seed 0, whose file is ohem-seed0.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"{}", b"\xff", b'{"settings": [], "run": {}}'], ids=str)
def test_a_run_file_that_holds_no_run_is_one_sentence(content: bytes, stopped: Path):
    file = stopped / "runs" / "full-seed1.json"
    file.write_bytes(content)
    before = tree(stopped)
    refused(compare(stopped, "--resume"), f"the run in {file} cannot be used (")
    assert tree(stopped) == before


# --- One writer -------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red without a lock: the second empties the folder, and both say that they are done.
    seen: list[Any] = []

    def train_while_another_starts(*given: Any):
        before = tree(tmp_path)
        monkeypatch.setattr(run_module, "train", train)
        for flags in (["--fresh"], ["--resume", "--lr", "0.01"], ["--resume"]):
            result = compare(tmp_path, *flags)
            assert result.exit_code == 2
            seen.append(result.stderr)
        assert tree(tmp_path) == before
        return train(*given)

    monkeypatch.setattr(run_module, "train", train_while_another_starts)
    first = compare(tmp_path)
    assert first.exit_code == 0, first.stderr
    who = f"another process is writing a comparison into {tmp_path}; wait until it is done, or choose another folder"
    assert who in seen[0] and who in seen[2]
    assert "lr was 0.05 and is now 0.01" in seen[1]


@pytest.mark.parametrize("text", ['{"pid": 1, "host": "far away"}', ""])
def test_a_lock_that_nobody_holds_is_taken(text: str, stopped: Path):
    # Red where the file alone decides: after kill -9 the folder would stay locked.
    (stopped / LOCK).write_text(text)
    assert compare(stopped, "--resume").exit_code == 0


# --- Nothing is touched before all is checked -------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "meta"], "compare got device='meta', which holds no numbers"),
        (["--data", "compare_cases:leaving"], "failed when called: its code ends the process (SystemExit: 0"),
        (["--model", "compare_cases:leaving"], "failed when called"),
        (["--model", "compare_cases:one_class_short"], "but logits of shape (2, 3) were needed"),
        (["--train-rows", "5000"], "choose 2 to 96"),
    ],
)
def test_what_cannot_be_trained_leaves_the_folder_alone(
    arguments: list[str], said: str, flags: list[str], stopped: Path
):
    before = tree(stopped)
    refused(compare(stopped, *arguments, *flags), said)
    assert tree(stopped) == before


def test_a_data_file_that_ends_the_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where SystemExit passes: exit code 0, and nothing was compared.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text("import sys\n\ndef data(): ...\n\nsys.exit(0)\n")
    refused(compare(tmp_path / "out", "--data", "main.py:data"), "main.py:data", "SystemExit")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["x" * 300, "a/" * 2000, "file", "file/below", "/proc"], ids=lambda out: out[:10])
def test_a_folder_that_cannot_be_made_is_one_sentence(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red when: a folder in which nothing can be made is told as one that another process writes into.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    refused(compare(out), "cannot write to the output folder", "choose another folder with --out")
    assert (tmp_path / "file").read_text() == "mine"


def test_data_that_change_the_working_directory_do_not_move_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where --out is read after the user's code ran.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    assert compare("out", "--data", "compare_cases:moving").exit_code == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- Ctrl-C and disks -------------------------------------------------------------------------------------------------


def interrupt_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    calls = iter(range(1, 100))

    def train_or_stop(*given: Any):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return train(*given)

    monkeypatch.setattr(run_module, "train", train_or_stop)


def test_ctrl_c_counts_the_runs_of_this_comparison_only(stopped: Path, whole: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where files are counted: runs of other methods and someone's own JSON are none of this comparison's.
    monkeypatch.chdir(stopped.parent)
    (stopped / "runs" / "mine.txt").write_text("")
    with monkeypatch.context() as patched:
        interrupt_at(patched, 2)
        result = compare(stopped.name, "--resume", "--methods", "full,random")
    assert result.exit_code == 130
    said = f"Stopped with 3 of 4 runs finished; they are kept in {stopped.name}. Run the same command with --resume to"
    assert said in result.stderr.splitlines()[-1]
    with monkeypatch.context() as patched:
        interrupt_at(patched, 3)
        result = compare(stopped.name, "--fresh")
    said = "Stopped with 2 of 4 runs finished; they are kept in out. Run the same command with --resume instead of --fr"
    assert said in result.stderr
    with monkeypatch.context() as patched:
        interrupt_at(patched, 1)
        result = compare(stopped.name, "--fresh")
    assert result.stderr.splitlines()[-1] == "Stopped before a run was finished."
    assert compare(stopped.name, "--resume").exit_code == 0
    assert figures(stopped) == figures(whole)


def test_a_comparison_that_is_killed_again_and_again_ends_as_one_that_nobody_killed():
    # Red with a run file written in place, or runs removed under --fresh.
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "tools"), str(root / "src")])
    command = [sys.executable, "-W", "error", str(root / "tools" / "kill_compare.py"), "--kills", "20"]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 kills, " in done.stdout.splitlines()[-1]


def written(out: Path) -> set[str]:
    return {name for name in tree(out) if name.startswith("runs/") and name.endswith(".json")}


@pytest.mark.parametrize("nth", range(7))  # settings, four runs, results, page
def test_a_disk_that_is_full_at_any_write_loses_nothing(
    nth: int, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    calls, sync = iter(range(1000)), os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_mode & 0o100000 and next(calls) >= nth:  # a file's, not a folder's
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        refused(compare(tmp_path), "(No space left on device)", *(["--resume goes on with them"] if nth else []))
    kept = tree(tmp_path)
    assert len(written(tmp_path)) == min(4, max(0, nth - 1))
    assert not [name for name in kept if name.endswith(".draft")]
    resumed = compare(tmp_path, "--resume")
    assert (resumed.exit_code, kept_before(resumed)) == (0, len(written(tmp_path) & kept.keys()))
    assert {name: content for name, content in tree(tmp_path).items() if name in kept and "runs/" in name} == {
        name: content for name, content in kept.items() if "runs/" in name
    }
    assert figures(tmp_path) == figures(whole)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system in memory, mounted with these options, or mounted anew with others."""
    place = tmp_path / "mounted"
    place.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        return place

    yield mount
    subprocess.run(["umount", str(place)], check=False, capture_output=True)


def test_a_small_disk_and_a_read_only_one(mounted: Callable[[str], Path], whole: Path):
    out = mounted("size=16k") / "out"
    refused(compare(out), "(No space left on device)", "Or mend the cause", "--resume goes on with them")
    kept = tree(out)
    assert written(out)
    mounted("remount,ro")
    for flags in FLAGS[1:]:
        refused(compare(out, *flags), f"cannot write to the output folder {out} (Read-only file system)")
    assert tree(out) == kept
    mounted("remount,rw,size=64m")
    resumed = compare(out, "--resume")
    assert (resumed.exit_code, kept_before(resumed)) == (0, len(written(out) & kept.keys()))
    assert figures(out) == figures(whole)
