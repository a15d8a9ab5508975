"""The notebook, run anew. ``.venv-docs/bin/python tools/notebook.py`` writes the outputs into it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "first_ten_minutes.ipynb"


def executed() -> Any:
    """The notebook with the outputs of a fresh kernel; raises the error of a cell."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["ROWPROP_NATIVE"] = "0"  # the report says what dispatches
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False)
    ran = client.execute()
    ran.metadata.pop("language_info", None)  # the version of Python is none of a reader's business
    return ran


if __name__ == "__main__":
    import nbformat

    nbformat.write(executed(), NOTEBOOK)
