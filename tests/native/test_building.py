"""How native dispatch is compiled: once, in the background, and never in the way of a training.

The compiler, or the process that runs it, is a fake; ``nox -s test-native`` compiles.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import rowprop
from commands import run
from rowprop import native
from rowprop.backprop.autograd import foreign
from rowprop.native import building

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no compilation in the background on Windows")

# In place of a compilation: it adds a line to a file, and waits for another file before it writes the library.
CHILD = """import os, pathlib, sys, time
where = pathlib.Path({where!r})
with (where / "pids").open("a") as pids:
    print(os.getpid(), file=pids)
for _ in range(3000):
    time.sleep(0.01)
    if (where / "go").exists():
        break
else:
    sys.exit()
pathlib.Path({goal!r}).touch()
"""
PROCESS = """import sys, types
sys.modules["torch"] = types.SimpleNamespace(__version__={torch!r})
from rowprop.native import building
building._CHILD = {child!r}
building._missing = lambda: ""
print(building._start())
"""


class Place:
    """A cache of its own, and a process without an extension in use."""

    def __init__(self, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROWPROP_NATIVE", "1")
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(where / "cache"))
        monkeypatch.setattr(building, "_missing", lambda: "")
        self.where, self.goal, self.patch = where, building.library(), monkeypatch
        self.child = CHILD.format(where=str(where), goal=str(self.goal))
        monkeypatch.setattr(building, "_CHILD", self.child)
        self.new_process()

    def new_process(self) -> None:
        """Forget what a process remembers."""
        self.patch.setattr(building, "_started", [])
        self.patch.setattr(building, "_next_look_s", [0.0])

    def pids(self) -> list[int]:
        """The processes that compile, or did, once there is one."""
        pids = self.where / "pids"
        until(lambda: pids.exists() and pids.read_text() != "")
        return [int(line) for line in pids.read_text().split()]

    def finish(self) -> None:
        """Let the one that compiles write the library, and wait for it."""
        (self.where / "go").touch()
        until(self.goal.exists)

    def loader(self, load: Callable[..., object]) -> None:
        """Take this for torch's loader."""
        self.patch.setattr(cpp_extension, "load", load)
        self.patch.setattr(os, "nice", lambda _: None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield Place(tmp_path, monkeypatch)
    (tmp_path / "go").touch()  # nothing waits after a test that failed


def until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the library has said since the last time."""
    lines = [record.getMessage() for record in caplog.records if record.name == "rowprop"]
    caplog.clear()
    return lines


def compiled(*_: Any, build_directory: str, **__: Any) -> None:
    Path(build_directory, "rowprop_native.so").touch()


def failed(*_: Any, **__: Any) -> None:
    raise RuntimeError("Error building extension 'x': [1/2] c++ -c native.cpp\nFAILED\nnative.cpp:1: error: odd\nninja")


def test_of_eight_processes_one_compiles_and_one_says_so(place: Place):
    # Red without the lock, where the process that compiles does not inherit it, and in the session of the training.
    script = PROCESS.format(torch=torch.__version__, child=place.child)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begun = [subprocess.Popen([sys.executable, "-c", script], **pipes) for _ in range(8)]
    told = [process.communicate() for process in begun]  # none of them waits for the compilation
    assert [out for out, _ in told] == ["True\n"] * 8
    (compiling,) = place.pids()
    assert os.getsid(compiling) != os.getsid(0)  # Ctrl-C does not reach it
    assert [err.count("\n") for _, err in told if err] == [1]
    assert not place.goal.exists() and building.find()[1] == "Python, while the native one is being compiled"
    place.finish()


def test_a_process_takes_the_extension_once_it_is_compiled(place: Place, caplog: pytest.LogCaptureFixture):
    # Red where it looks at every backward, where it looks no more after the first, and where it says more than a line.
    now_s, loaded, extension = [1.0], list[Path](), SimpleNamespace()
    place.patch.setattr(building, "time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time))
    place.patch.setattr(building, "_load", lambda goal: loaded.append(goal) or extension)
    assert [building.arrive() for _ in range(3)] == [None] * 3
    assert [line.partition(":")[2] for line in said(caplog)] == [
        " compiling native dispatch in the background, once: about a minute of one core. Until then Python dispatches. "
        "ROWPROP_NATIVE=0 turns native dispatch off."
    ]
    place.finish()
    assert building.arrive() is None  # within the same second
    now_s[0] += 2
    assert [building.arrive() for _ in range(3)] == [extension, None, None]
    assert loaded == [place.goal] and said(caplog) == []


def test_a_killed_compilation_is_begun_again_by_a_later_process(place: Place, caplog: pytest.LogCaptureFixture):
    # Red where the process begins another one each time, and where a lock of the killed one stays.
    assert building._start() and building._start()
    os.kill(place.pids()[0], signal.SIGKILL)
    until(lambda: building._start() is False)
    place.new_process()
    (place.goal.parent / "draft-1").mkdir()  # what it left behind
    assert building._start()
    until(lambda: len(place.pids()) == 2)
    place.finish()
    assert not building._start()
    assert len(said(caplog)) == 2


def test_a_failure_is_one_warning_and_is_not_tried_again(place: Place, caplog: pytest.LogCaptureFixture):
    # Red where a failure is not remembered, is told by each process or is an error, and without unlink() in _compile.
    place.goal.parent.mkdir(parents=True)
    place.loader(failed)
    building.in_background()
    assert [building.arrive() for _ in range(3)] == [None] * 3
    (line,) = said(caplog)
    assert "could not be compiled, so Python dispatches: native.cpp:1: error: odd; `rowprop native` tries again" in line
    place.new_process()
    assert building.arrive() is None and said(caplog) == [] and not (place.where / "pids").exists()
    assert building.find()[1].startswith("Python, as the native one could not be compiled: native.cpp:1: error: odd")
    place.loader(compiled)
    building.build()
    assert sorted(path.name for path in place.goal.parent.iterdir()) == ["lock", "rowprop_native.so"]
    assert not building._start() and building.find()[1].startswith("Python, as the native one cannot be loaded: ")


def test_what_is_half_compiled_never_counts(place: Place):
    # Red where the library is compiled in its place, or where what was killed long ago stays.
    def killed(*_: Any, build_directory: str, **__: Any) -> None:
        compiled(build_directory=build_directory)
        assert not place.goal.exists()
        raise KeyboardInterrupt

    place.loader(killed)
    with pytest.raises(KeyboardInterrupt):
        building.build()
    assert not place.goal.exists()
    (old := place.goal.parent / "draft-1").mkdir()
    (old / "lock").touch()  # torch's, of a killed process
    os.utime(old, (0, 0))
    place.loader(compiled)
    building.build()
    assert place.goal.exists() and not old.exists()


def test_a_waiting_build_finds_what_another_process_has_compiled(place: Place):
    # Red where it does not wait: it then compiles beside the other.
    assert building._start()
    threading.Timer(0.3, (place.where / "go").touch).start()
    place.loader(failed)
    building.build()
    assert place.goal.exists()


MISSING = {
    "a compiler": ("CXX", "/nowhere/c++", "there is no C++ compiler (/nowhere/c++)"),
    "ninja": ("PATH", "", 'there is no ninja (pip install "rowprop[native]")'),
}


@pytest.mark.parametrize("what", MISSING)
def test_where_something_is_missing_nothing_is_said_and_python_dispatches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
):
    # Red where it is tried all the same, and where a word is said.
    (tool := tmp_path / "c++").touch(0o755)
    name, value, why = MISSING[what]
    missing = building._missing
    place = Place(tmp_path, monkeypatch)
    monkeypatch.setattr(building, "_missing", missing)
    monkeypatch.setenv("CXX", str(tool))
    monkeypatch.setattr(building.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv(name, value)
    assert building.arrive() is None and said(caplog) == [] and not place.goal.parent.exists()
    assert building.find() == (None, f"Python, as the native one could not be compiled: {why}")


def test_ninja_is_also_found_beside_a_python_that_was_not_activated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # Red where only PATH is searched, and without a look for Python's headers, which its package may lack.
    for name in ("c++", "ninja"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(building.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert building._missing() == "there is no Python.h"
    (tmp_path / "Python.h").touch()
    assert building._missing() == ""


def test_a_home_that_cannot_be_written_to(place: Place, caplog: pytest.LogCaptureFixture):
    # Red where the error reaches the backward.
    (place.where / "cache").touch()  # a file in place of the folder
    assert building.arrive() is None and said(caplog) == []
    assert building.find()[1] == f"Python, as the native one cannot be written to {place.where / 'cache'}"


def backward(*rows: list[int]) -> None:
    losses = torch.ones(4, requires_grad=True).square().unsqueeze(1).square().flatten()
    sum(rowprop.pick(losses, some).sum() for some in rows).backward()


def test_the_extension_is_asked_for_at_the_beginning_of_a_backward(monkeypatch: pytest.MonkeyPatch):
    # Red where it is asked for at each pick: what is sliced by then would be of two kinds.
    asked = list[int]()
    monkeypatch.setattr(foreign, "go_native", lambda: asked.append(1))
    backward([0, 2], [1, 3])
    backward([0])
    assert len(asked) == 2


def test_turned_off_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    # Red without the variable, or where it is read at import.
    monkeypatch.setenv("ROWPROP_NATIVE", "0")
    monkeypatch.setattr(building, "arrive", lambda: pytest.fail("it was looked for"))
    backward([0])
    assert "dispatch: Python, by ROWPROP_NATIVE=0" in run("--version").stdout


def test_a_report_says_what_dispatches():
    # Red where a report says that of the beginning of its block.
    with rowprop.watch() as report:
        backward([0])
        assert report.dispatch == ""
    assert report.dispatch == ("Python" if native.extension is None else "native")
    assert str(report).splitlines()[0].endswith(f" ops; dispatch: {report.dispatch}")


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_a_failed_build_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    result = run("native")
    assert result.exit_code == 2
    assert "could not be compiled: " in result.stderr.splitlines()[-1]
    assert not building.library().exists()


def test_the_wheel_is_used_where_it_fits_this_torch_and_python(place: Place):
    # Red with a library's name that lacks torch's version: the wheel of another torch is loaded.
    package = place.where / "rowprop_native"
    package.mkdir()
    (package / "__init__.py").touch()
    place.patch.syspath_prepend(place.where)
    shipped = package / f"{place.goal.parent.name}.so"
    shipped.touch()
    assert building.library() == shipped
    assert not building._start()  # pyright: ignore[reportPrivateUsage]
    place.patch.setattr(torch, "__version__", "2.99.0")
    assert building.library().parent.parent == place.goal.parent.parent
