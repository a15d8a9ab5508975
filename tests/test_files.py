"""A file is there whole or as it was before, and nothing that is no file is ever replaced."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rowprop.errors import InvalidInput
from rowprop.files import write_whole


@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.parametrize("kind", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_failed_write_leaves_the_old_file_and_no_draft(
    at: str, kind: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Red where the file itself is opened, or the draft stays.
    def failing(*_: object) -> None:
        raise kind

    path = tmp_path / "kept.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os if at == "fsync" else Path, at, failing)
    expected = InvalidInput if isinstance(kind, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    if expected is InvalidInput:
        assert str(caught.value) == f"cannot write to {path} (No space left on device); choose another folder."


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red where the draft's name follows from the file's: the first writer then loses its draft to the second.
    path, sync = tmp_path / "both", os.fsync

    def second_writer(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_whole(path, b"second")
        assert path.read_bytes() == b"second"

    monkeypatch.setattr(os, "fsync", second_writer)
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Red without fsync, or with fsync after the renaming: a crash of the machine then leaves an empty file.
    happened: list[str] = []
    for home, name in ((os, "fsync"), (Path, "replace")):
        call = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *given, call=call, name=name: (happened.append(name), call(*given))[1])
    write_whole(tmp_path / "file", b"content")
    assert happened == ["fsync", "replace", "fsync"]  # the last one is the folder's


def test_a_folder_and_a_name_that_no_file_can_have_are_refused(tmp_path: Path):
    for name in ("a\0b", "x" * 300):
        with pytest.raises(InvalidInput, match="cannot write to"):
            write_whole(tmp_path / name, b"x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidInput, match=r"cannot write to .*folder \(Is a directory\)"):
        (tmp_path / "folder").mkdir()
        write_whole(tmp_path / "folder", b"x")
    assert (tmp_path / "folder").is_dir()
    with pytest.raises(InvalidInput, match=r"\(Not a directory\)|\(File exists\)"):
        write_whole(Path(__file__) / "below", b"x")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path: Path):
    # Red where a draft takes its name: root would turn /dev/null into a file.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"content")
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write_whole(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
