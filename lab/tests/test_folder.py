"""The folder of `rowprop compare`: what others made stays, what is finished is kept, one writer at a time."""

from __future__ import annotations

import errno
import itertools
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

from commands import refused
from compare_cases import compare, figures
from rowprop.errors import InvalidInput
from rowprop_lab import run as run_module
from rowprop_lab.folder import LOCK, Folder
from rowprop_lab.train import train

FLAGS = ([], ["--resume"], ["--fresh"])
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the content of files, None for folders; the lock stays out of it."""
    found = (path for path in folder.rglob("*") if path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def kept_before(result: Any) -> int:
    """How many runs a resumed comparison says that it kept."""
    assert result.exit_code == 0, result.stderr
    return int(re.findall(r"; (\d+) kept from before\.", result.stderr)[0])


def stays(out: Path, *arguments: str, said: str | tuple[str, ...]) -> None:
    """A comparison into this folder is refused in these words, and changes nothing in it."""
    before = tree(out)
    refused(compare(out, *arguments), *([said] if isinstance(said, str) else said))
    assert tree(out) == before


@pytest.fixture
def whole(compared: tuple[Path, Any]) -> Path:
    """A finished comparison, which stays as it is."""
    return compared[0]


@pytest.fixture(autouse=True)
def plain_page(compared: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("name", ["runs/events.out.tfevents", "runs", "settings.json", "results.json", "report.html"])
def test_a_folder_of_someone_else_stays_as_it_is(name: str, flags: list[str], tmp_path: Path):
    # Red where runs/ is emptied, or a file is written before all is checked.
    if name == "runs":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"theme": "dark"}')
    said = "was not written by rowprop compare" if name == "settings.json" else "no settings.json says that rowprop"
    stays(tmp_path, *flags, said=(said, "nothing was touched", "choose another folder with --out"))


def test_the_working_directory_is_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs", "events.out").write_text("a week of training")
    for out in (".", ""):
        refused(compare(out), "holds runs, but no settings.json says")
    assert tree(tmp_path) == {"runs": None, "runs/events.out": b"a week of training"}


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    for flags in ([], ["--fresh"]):
        assert compare(tmp_path, "--methods", "full", "--seeds", "1", *flags).exit_code == 0
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
    stays(stopped, *flags, said=("settings.json", "rowprop compare", "nothing was touched"))


@pytest.mark.parametrize("changes", [[], ["--lr", "0.01"]], ids=["same", "other"])
@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_runs_need_a_word_before_anything_happens_to_them(state: str, changes: list[str], request):
    # Red where a finished comparison may be overwritten.
    out, count = request.getfixturevalue(state), {"finished": 4, "stopped": 3}[state]
    said = f"holds a comparison with {count} finished runs; add --resume"
    stays(out, *changes, said=(said, "--fresh to set it"))
    stays(out, *changes, "--resume", "--fresh", said="--resume and --fresh are both given")


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_fresh_sets_aside_and_what_is_aside_can_be_resumed(state: str, whole: Path, request: pytest.FixtureRequest):
    # Red where the runs are removed, or go without the settings that they were made under.
    out = request.getfixturevalue(state)
    before = tree(out)
    first = compare(out, "--fresh", "--lr", "0.01", "--methods", "full")
    assert first.exit_code == 0
    assert "The earlier comparison is kept in" in first.stderr
    assert tree(out / "earlier-1") == before
    middle = {name: content for name, content in tree(out).items() if not name.startswith("earlier")}
    assert compare(out, "--fresh", "--methods", "full").exit_code == 0
    assert tree(out / "earlier-1") == before
    assert tree(out / "earlier-2") == middle
    assert [run[:2] for run in figures(out)[0]] == [["full", 0], ["full", 1]]
    assert kept_before(compare(out / "earlier-1", "--resume")) == {"finished": 4, "stopped": 3}[state]
    assert figures(out / "earlier-1") == figures(whole)


def test_a_second_comparison_that_was_killed_is_not_taken_for_the_finished_first(finished: Path, monkeypatch):
    # Red where results.json of the first stays, and tells that the runs of the second need not be asked about; where a
    # run file does not name its settings.
    def killed(*_: object) -> None:
        raise MemoryError  # ends the process as far as the folder can tell

    calls = iter([train, train, killed])  # the two methods of a seed take turns
    monkeypatch.setattr(run_module, "train", lambda *given: next(calls)(*given))
    compare(finished, "--fresh", "--lr", "0.01")
    assert not (finished / "results.json").exists()
    stays(finished, said="holds a comparison with 2 finished runs; add --resume")
    others = f"the runs in {finished} were made with other settings (lr was 0.01 and is now 0.05)"
    stays(finished, "--resume", said=others)
    shutil.copy(finished / "runs" / "full-seed0.json", first := finished / "earlier-1" / "runs")
    said = f"{first}/full-seed0.json cannot be used (it was made with other settings: lr was 0.01"
    stays(finished / "earlier-1", "--resume", said=said)


@pytest.mark.parametrize("edit", ["run", "settings", "sha256", "name"])
def test_a_run_file_that_was_edited_or_renamed_is_refused(edit: str, stopped: Path):
    # Red when: the digest leaves out a part of the file, or a file without one is taken; the file's name is not looked
    # at: one run would count twice, and another would be missing.
    file = stopped / "runs" / "ohem-seed0.json"
    content, why = json.loads(file.read_text()), "it is not as rowprop compare wrote it"
    if edit == "name":
        content = json.loads(file.with_name("full-seed1.json").read_text())
        why = "it holds full with seed 1, whose file is full-seed1.json"
    elif edit == "sha256":
        del content["sha256"]
    else:
        content[edit]["seed" if edit == "run" else "lr"] = 1
    file.write_text(json.dumps(content, ensure_ascii=False))
    stays(stopped, "--resume", said=f"the run in {file} cannot be used ({why})")
    file.rename(stopped / "away.json")
    assert compare(stopped, "--resume").exit_code == 0


def test_a_run_file_cut_or_changed_at_any_place_or_that_holds_no_run_is_refused(stopped: Path):
    # Red when: a changed digit is taken for a result.
    file = stopped / "runs" / "ohem-seed0.json"
    whole = file.read_bytes()
    folder = Folder(stopped, json.loads((stopped / "settings.json").read_text())["settings"])
    assert folder._read_run(file).label == "ohem"
    contents = [b"", b"{", b"[]", b"5", b"{}", b"\xff", b'{"settings": [], "run": {}}']
    for place in range(0, len(whole), 97):
        contents += [whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]]
    for content in contents:
        with suppress(ValueError):
            if json.loads(content) == json.loads(whole):  # a digit behind a float's precision
                continue
        file.write_bytes(content)
        with pytest.raises(InvalidInput, match=r"the run in .*ohem-seed0.json cannot be used \("):
            folder._read_run(file)


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red without a lock: the second empties the folder, and both say that they are done.
    small = ("--methods", "full", "--seeds", "1")
    who = f"another process is writing a comparison into {tmp_path}; wait until it is done, or choose another folder"

    def train_while_another_starts(*given: Any):
        monkeypatch.setattr(run_module, "train", train)
        for flags, said in ((["--fresh"], who), (["--resume", "--lr", "0.01"], "now 0.01"), (["--resume"], who)):
            stays(tmp_path, *small, *flags, said=said)
        return train(*given)

    monkeypatch.setattr(run_module, "train", train_while_another_starts)
    assert compare(tmp_path, *small).exit_code == 0


@pytest.mark.parametrize("text", ['{"pid": 1, "host": "far away"}', ""])
def test_a_lock_that_nobody_holds_is_taken(text: str, stopped: Path):
    # Red where the file alone decides: after kill -9 the folder would stay locked.
    (stopped / LOCK).write_text(text)
    assert compare(stopped, "--resume").exit_code == 0


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--device meta", "compare got device='meta', which holds no numbers"),
        ("--data compare_cases:leaving", "failed when called: its code ends the process (SystemExit: 0"),
        ("--model compare_cases:leaving", "failed when called"),
        ("--model compare_cases:one_class_short", "but logits of shape (2, 3) were needed"),
        ("--train-rows 97", "compare_cases:tiny has 96 training rows; choose 2 to 96"),
    ],
)
def test_what_cannot_be_trained_leaves_the_folder_alone(arguments: str, said: str, flags: list[str], stopped: Path):
    stays(stopped, *arguments.split(), *flags, said=said)


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
    assert compare("out", "--data", "compare_cases:moving", "--methods", "full", "--seeds", "1").exit_code == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


KEPT = "of 4 runs finished; they are kept in out. Run the same command with --resume"


@pytest.mark.parametrize(
    ("part", "nth", "arguments", "said", "kept"),
    [
        ("load_data", 1, "--resume", "Stopped before training began; nothing in out was removed.", 3),
        ("train", 1, "--fresh", "Stopped before a run was finished.", 0),
        ("train", 2, "--resume --methods full,random", f"Stopped with 3 {KEPT} to go on.", 3),
        ("train", 3, "--fresh", f"Stopped with 2 {KEPT} instead of --fresh to go on.", 2),
        ("render_report", 1, "--resume", f"Stopped with 4 {KEPT} to go on.", 4),
    ],
)
def test_ctrl_c_counts_the_runs_of_this_comparison_only(
    part: str, nth: int, arguments: str, said: str, kept: int, stopped: Path, whole: Path, monkeypatch
):
    # In the nth call of a part. Red where files are counted: runs of other methods and someone's own JSON are none of
    # this comparison's; where one that comes while the results are written says that training had not begun.
    monkeypatch.chdir(stopped.parent)
    (stopped / "runs" / "mine.txt").write_text("")
    calls, own = itertools.count(1), getattr(run_module, part)

    def interrupted(*given: Any):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return own(*given)

    with monkeypatch.context() as patched:
        patched.setattr(run_module, part, interrupted)
        result = compare(stopped.name, *arguments.split())
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, said)
    assert (stopped / "results.json").exists() == said.startswith("Stopped with")
    assert kept_before(compare(stopped.name, "--resume")) == kept
    assert (stopped / "report.html").is_file()
    assert figures(stopped) == figures(whole)


def test_a_comparison_that_is_killed_again_and_again_ends_as_one_that_nobody_killed():
    # Red with a run file written in place, or runs removed under --fresh.
    command = [sys.executable, "-W", "error", str(HERE / "kill_compare.py"), "20"]
    paths = os.pathsep.join(map(str, (ROOT / "tools", ROOT / "src", ROOT / "lab")))  # and its own folder
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 kills, " in done.stdout.splitlines()[-1]


def written(out: Path) -> set[str]:
    return {name for name in tree(out) if name.startswith("runs/") and name.endswith(".json")}


@pytest.mark.parametrize("nth", range(7))  # settings, four runs, results, page
def test_a_disk_that_is_full_at_any_write_loses_nothing(nth: int, tmp_path: Path, whole: Path, monkeypatch):
    calls, sync = iter(range(1000)), os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_mode & 0o100000 and next(calls) >= nth:  # a file's, not a folder's
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        kept_runs = ["--resume goes on with them"] if nth else []
        refused(compare(tmp_path), "(No space left on device)", "choose another folder", *kept_runs, before=True)
    kept = tree(tmp_path)
    assert len(written(tmp_path)) == min(4, max(0, nth - 1))
    assert not [name for name in kept if name.endswith(".draft")]
    assert kept_before(compare(tmp_path, "--resume")) == len(written(tmp_path) & kept.keys())
    now = tree(tmp_path)
    assert all(now[name] == content for name, content in kept.items() if "runs/" in name)
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
    said = "(No space left on device)", "Or mend the cause", "--resume goes on with them"
    refused(compare(out), *said, before=True)
    kept = written(out)
    assert kept
    mounted("remount,ro")
    for flags in FLAGS[1:]:
        stays(out, *flags, said=f"cannot write to the output folder {out} (Read-only file system)")
    mounted("remount,rw,size=64m")
    assert kept_before(compare(out, "--resume")) == len(kept)
    assert figures(out) == figures(whole)
