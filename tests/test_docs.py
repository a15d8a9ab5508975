"""The Python code on the pages runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
# What these pages print is checked beside the module's own tests, or needs more than one process or a compiler.
ELSEWHERE = {"compile", "custom-code", "distributed", "history", "recipes"}
PAGES = {page.stem: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", sorted(name for name, blocks in PAGES.items() if blocks and name not in ELSEWHERE))
def test_the_code_of_a_page_runs(page):
    exec("\n".join(PAGES[page]), {"__name__": page})
