"""Files are there whole or as they were before; a place that cannot be written to is one sentence."""

from __future__ import annotations

from pathlib import Path

from rowprop.errors import InvalidInput


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it, so that it is there whole or as it was before.

    Raises:
        InvalidInput: The place cannot be written to.

    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write to {path} ({error.strerror}); choose another folder.") from error
