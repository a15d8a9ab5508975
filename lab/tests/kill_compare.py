"""Kill a small comparison with SIGKILL at random moments and resume it, until it was killed often enough.

    python lab/tests/kill_compare.py 20

Each attempt is a forked process that kills itself at a random one of the calls that it makes, every other time at a
random one of those that touch files. A finished comparison, and some that are not, are started over with ``--fresh``,
so that setting aside is interrupted too. After each kill all runs that were ever kept must still be there, byte for
byte, and at each end the results must be those of a comparison that nobody killed. The
moments are the same every time.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from compare_cases import figures, settings
from rowprop_lab import run as run_module

SETTINGS = settings(methods="full,ohem", seeds=2, epochs=2)
CHANGING = ("open", "write", "fsync", "replace", "rename", "mkdir", "unlink", "flock", "ftruncate", "close")


def touches_files(function: Any) -> bool:
    """Whether a builtin opens, writes, renames, locks or removes something on a disk."""
    if function.__module__ in ("posix", "fcntl"):
        return function.__name__ in CHANGING
    return isinstance(function.__self__, io.BufferedWriter)


def attempt(out: Path, *, moment: int | None, files_only: bool, **flags: bool) -> tuple[int, str]:
    """Compare in a process of its own, which kills itself at this call; None for never.

    Calls that draw the page, most of all, do not count: nothing is on its way to a disk meanwhile.

    Returns its wait status, and the call at which it died, or how many calls it made: of all kinds, and to files.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reader) as pipe:
            return status, pipe.read()
    code, counts, draw = 1, {False: 0, True: 0}, run_module.render_report

    def watch(frame: Any, event: str, function: Any) -> None:
        to_files = event.startswith("c_") and touches_files(function)
        counts[False] += 1
        counts[True] += to_files
        if counts[files_only] == moment and (to_files or not files_only):
            name = frame.f_code.co_name if event in ("call", "return") else function.__name__
            os.write(writer, f"{'after' if event.endswith('return') else 'before'} {name}".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def unwatched(*given: Any) -> str:
        sys.setprofile(None)
        page = draw(*given)
        sys.setprofile(watch)
        return page

    try:
        run_module.render_report = unwatched
        sys.setprofile(watch)
        run_module.compare(SETTINGS, out, **flags)
        sys.setprofile(None)
        os.write(writer, f"{counts[False]} {counts[True]}".encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def main() -> None:
    """Kill and resume; exit with an error at the first thing that is lost or differs."""
    wanted, moments = int(sys.argv[1]), random.Random(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        out, whole = Path(scratch, "killed"), Path(scratch, "whole")
        run_module.compare(SETTINGS, Path(scratch, "first"))  # loads all modules, before the forks
        status, counted = attempt(whole, moment=None, files_only=False)
        assert status == 0, counted
        calls = [*map(int, counted.split())]
        print(f"A comparison that nobody kills makes {calls[False]:,} calls beside its page, {calls[True]} to files.")
        kills = ends = 0
        kept: set[bytes] = set()
        flags = {"fresh": True}
        while kills < wanted or os.WIFSIGNALED(status):
            files_only = kills % 2 == 1
            # Early ones fall into what a resumed comparison still has to do, late ones into its end or beyond.
            moment = moments.randrange(1, calls[files_only] // moments.choice((1, 4))) if kills < wanted else None
            status, said = attempt(out, moment=moment, files_only=files_only, **flags)
            now = {path.read_bytes() for path in out.rglob("runs/*.json")}  # here or set aside
            assert kept <= now, f"{len(kept - now)} kept runs are gone"
            kept = now
            if os.WIFSIGNALED(status):
                assert os.WTERMSIG(status) == signal.SIGKILL
                kills += 1
                print(f"Kill {kills} {said}, {'set aside and started over' if 'fresh' in flags else 'resumed'}: "
                      f"{len(list(out.glob('runs/*.json')))} of 4 runs there, {len(kept)} kept in all.")  # fmt: skip
                flags = {moments.choice(("resume", "resume", "resume", "fresh")): True}
            else:
                assert status == 0, "an attempt was refused"
                assert figures(out) == figures(whole), "the results differ from those of a comparison nobody killed"
                ends += 1
                flags = {"fresh": True}
    print(f"{kills} kills, {ends} comparisons ended, each with the results of one that nobody killed.")


if __name__ == "__main__":
    main()
