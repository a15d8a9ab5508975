"""Write a file atomically, or raise a one-sentence error that says why it cannot be written."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from rowprop.errors import InvalidInput


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its folders.

    The content goes to a draft, ``.XXXXXXXX.draft``, which is renamed once it is on the disk; a killed process may
    leave it behind. The target of a link is replaced. A device or pipe, such as ``/dev/stdout``, is written directly.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # fails if it is a folder
            return
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{uuid4().hex[:8]}.draft")  # a unique name: others may write the same file
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        with suppress(OSError):  # Windows opens no folder, and some file systems sync none
            descriptor = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # the new name
            finally:
                os.close(descriptor)
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in a name, a link that leads to itself
        raise InvalidInput(f"cannot write to {path} ({reason(error)}); choose another folder.") from error


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work for it begins; nothing is left behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists() or path.is_file():
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"cannot write to {path} ({reason(error)}); choose another file.") from error


def reason(error: BaseException) -> str:
    """Why an access to a file failed, without the file's name."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
