"""The output folder, in which finished runs are kept one by one, so that a comparison can be stopped and resumed.

``settings.json`` marks it as a comparison's. A folder without it, but with another file by a name of OWN, is someone
else's and stays as it is. Earlier runs are set aside in ``earlier-1``, ..., a comparison's folder each, never removed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from rowprop.errors import InvalidInput
from rowprop.files import reason, write_whole
from rowprop_lab.results import Json, Run

FORMAT = "rowprop compare 1"
SETTINGS, RUNS, RESULTS, REPORT = OWN = ("settings.json", "runs", "results.json", "report.html")
LOCK = ".rowprop-compare.lock"
ELSEWHERE = "choose another folder with --out"


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity, which it does not have, are refused."""
    return json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False)


def _digest(content: Any) -> str:
    return hashlib.sha256(to_json(content).encode()).hexdigest()


class Folder:
    """Runs and results of one comparison under one path; ``binding``: settings, data, versions, device, of all runs."""

    def __init__(self, path: Path, binding: Json) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self._binding = binding

    @contextmanager
    def opened(self, *, resume: bool, fresh: bool) -> Generator[dict[tuple[str, int], Run]]:
        """Have the folder to oneself inside the block, ready for runs; all checks come before the first write.

        With ``resume`` the runs that are there are yielded, by label and seed; ``fresh`` moves them to ``set_aside``. A
        folder is refused that cannot be written to, is not a comparison's, is being written by another process, holds
        runs and neither ``resume`` nor ``fresh`` was given, or runs that do not fit or are damaged.
        """
        self._admit(resume=resume, fresh=fresh)  # before the lock: a folder of someone else gets none
        lock = FileLock(self.path / LOCK, blocking=False)  # the system frees it when the process ends
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):  # for a folder that is read-only no lock says why
                pass
            held = cast(Any, lock.acquire())
        except Timeout as error:
            writing = f"another process is writing a comparison into {self.path}"
            raise InvalidInput(f"{writing}; wait until it is done, or {ELSEWHERE}.") from error
        except (OSError, ValueError, RecursionError) as error:  # a path of a thousand folders
            raise self._unwritable(error) from error
        with held:
            kept = self._admit(resume=resume, fresh=fresh)  # once more: another process may just have left
            try:
                if fresh:
                    self.set_aside = self._set_aside()
                # First of all: files without settings beside them count as someone else's.
                self.write(SETTINGS, to_json({"format": FORMAT, "settings": self._binding}, indent=2))
                (self.path / RUNS).mkdir(exist_ok=True)
            except OSError as error:
                raise self._unwritable(error) from error
            yield kept

    def save(self, run: Run) -> None:
        """Keep a finished run, with the settings that it was made under and a digest of both."""
        content = {"settings": self._binding, "run": asdict(run)}
        write_whole(self._run_path(run.label, run.seed), to_json(content | {"sha256": _digest(content)}).encode())

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, whole or not at all."""
        write_whole(self.path / name, text.encode())

    def _run_path(self, label: str, seed: int) -> Path:
        """A run's file; a label that is no file name gets one of its own."""
        name = re.sub(r"[^\w.@+-]", "_", label)[-80:]
        if name != label:
            name += f"-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
        return self.path / RUNS / f"{name}-seed{seed}.json"

    def _admit(self, *, resume: bool, fresh: bool) -> dict[tuple[str, int], Run]:
        """Refuse a folder that must not be touched; return the runs that ``opened`` yields."""
        there = [name for name in OWN if os.path.lexists(self.path / name)]
        if not there:
            return {}
        settings = self._settings(there)
        files = sorted((self.path / RUNS).glob("*.json"))
        if resume:
            if differing := _differing(settings, self._binding):
                remedy = f"resume with the same settings, or {ELSEWHERE}."
                raise InvalidInput(f"the runs in {self.path} were made with other settings ({differing}); {remedy}")
            return {(run.label, run.seed): run for run in map(self._read_run, files)}
        if not fresh and (files or RESULTS in there or REPORT in there):
            holds = f"a comparison with {len(files)} finished run{'' if len(files) == 1 else 's'}"
            remedy = f"add --resume to go on with it, --fresh to set it aside and start over, or {ELSEWHERE}."
            raise InvalidInput(f"{self.path} holds {holds}; {remedy}")
        return {}

    def _settings(self, there: list[str]) -> Json:
        path = self.path / SETTINGS
        if SETTINGS not in there:
            holds = f"{self.path} holds {' and '.join(there)}, but no {SETTINGS} says that rowprop compare made"
            them = "it" if len(there) == 1 else "them"
            raise InvalidInput(f"{holds} {them}; nothing was touched, {ELSEWHERE}.")
        try:
            content = _read_json(path)
            if content.get("format") != FORMAT or not isinstance(content.get("settings"), dict):
                raise ValueError(f'"format": "{FORMAT}" and "settings" were needed')
        except (OSError, ValueError) as error:
            said = f"{path} was not written by rowprop compare ({reason(error)})"
            raise InvalidInput(f"{said}; nothing was touched, {ELSEWHERE}.") from error
        return content["settings"]

    def _read_run(self, path: Path) -> Run:
        try:
            content = _read_json(path)
            if content.pop("sha256", None) != _digest(content):
                raise ValueError("it is not as rowprop compare wrote it")
            if differing := _differing(content["settings"], self._binding):
                raise ValueError(f"it was made with other settings: {differing}")
            run = Run.from_json(content["run"])
            wanted = self._run_path(run.label, run.seed).name
            if wanted != path.name:
                raise ValueError(f"it holds {run.label} with seed {run.seed}, whose file is {wanted}")
        except (OSError, ValueError) as error:
            remedy = "move the file away, and --resume trains that run again."
            raise InvalidInput(f"the run in {path} cannot be used ({reason(error)}); {remedy}") from error
        return run

    def _set_aside(self) -> Path | None:
        """Move runs and results into a folder of their own; return it, or None if there is nothing to move."""
        moving = [name for name in (RUNS, RESULTS, REPORT) if os.path.lexists(self.path / name)]
        runs = self.path / RUNS
        if runs.is_dir() and not any(runs.iterdir()):
            moving.remove(RUNS)
        if not moving:
            return None
        numbered = (self.path / f"earlier-{number}" for number in itertools.count(1))
        aside = next(path for path in numbered if not os.path.lexists(path))
        aside.mkdir()
        # The settings are copied first and replaced last: a crash in between leaves two comparisons' folders.
        write_whole(aside / SETTINGS, (self.path / SETTINGS).read_bytes())
        for name in moving:
            (self.path / name).rename(aside / name)
        return aside

    def _unwritable(self, error: Exception) -> InvalidInput:
        return InvalidInput(f"cannot write to the output folder {self.path} ({reason(error)}); {ELSEWHERE}.")


def _read_json(path: Path) -> Json:
    """The object in a file; OSError or ValueError if it cannot be read or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("an object was needed")
    return cast("Json", content)


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences between two bindings in words; empty if there are none."""
    return "; ".join(
        f"{key} was {then.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted({*then, *now})
        if key not in then or key not in now or then[key] != now[key]
    )
