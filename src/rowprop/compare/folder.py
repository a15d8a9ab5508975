"""The output folder: finished runs are kept in it one by one, so that a comparison can be stopped and resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rowprop.errors import InvalidInput
from rowprop.files import write_whole

if TYPE_CHECKING:
    from rowprop.compare.train import Run


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Return strict JSON: NaN and infinity are refused, not written as words that JSON does not have."""
    return json.dumps(content, indent=indent, allow_nan=False, ensure_ascii=False)


class Folder:
    """Runs and results under one path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, binding: dict[str, Any], *, resume: bool, fresh: bool) -> None:
        """Make the folder ready for runs under these settings.

        Args:
            binding: What all runs in the folder must share: settings, data, versions, device.
            resume: Keep the runs that are there; refused where they were made under another binding.
            fresh: Throw away an unfinished comparison that is there.

        Raises:
            InvalidInput: The folder cannot be written to, belongs to other settings (with ``resume``), or holds an
                unfinished comparison (without ``resume`` or ``fresh``).

        """
        settings = self.path / "settings.json"
        runs = self.path / "runs"
        try:
            kept = len(list(runs.glob("*.json")))
            found: Any = json.loads(settings.read_text("utf-8")) if settings.is_file() else None
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"the settings in {settings} cannot be read ({error}); add --fresh to start over."
            ) from error
        if resume and found is not None:
            differing = [
                f"{key} was {found.get(key)!r} and is now {binding.get(key)!r}"
                for key in sorted({*found, *binding})
                if found.get(key) != binding.get(key)
            ]
            if differing:
                raise InvalidInput(
                    f"the runs in {self.path} were made with other settings ({'; '.join(differing)}); resume with "
                    "the same settings, or choose another folder with --out."
                )
            return
        finished = (self.path / "results.json").is_file() and self._is_finished()
        if kept and not (finished or fresh or resume):
            raise InvalidInput(
                f"{self.path} holds an unfinished comparison with {kept} finished runs; add --resume to go on with it, "
                "--fresh to start over, or choose another folder with --out."
            )
        try:
            if runs.is_dir():
                shutil.rmtree(runs)
            runs.mkdir(parents=True)
        except OSError as error:
            raise InvalidInput(
                f"cannot write to the output folder {self.path} ({error.strerror}); choose another with --out."
            ) from error
        self.write("settings.json", to_json(binding, indent=2))

    def _is_finished(self) -> bool:
        try:
            return bool(json.loads((self.path / "results.json").read_text("utf-8"))["finished"])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def load(self, label: str, seed: int) -> Run | None:
        """Return a finished run, or None where there is none yet.

        Raises:
            InvalidInput: The run's file is damaged.

        """
        from rowprop.compare.train import Run

        path = self._run_path(label, seed)
        if not path.is_file():
            return None
        try:
            return Run.from_json(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"the run in {path} is damaged ({error!r}); delete it and resume.") from error

    def save(self, run: Run) -> None:
        """Keep a finished run."""
        write_whole(self._run_path(run.label, run.seed), to_json(asdict(run)).encode())

    def write(self, name: str, text: str) -> Path:
        """Write a file of the folder, whole or not at all, and return its path."""
        path = self.path / name
        write_whole(path, text.encode())
        return path

    def _run_path(self, label: str, seed: int) -> Path:
        return self.path / "runs" / f"{label}-seed{seed}.json"
