"""docs/support-matrix.md says what the code does."""

from __future__ import annotations

import pytest

from support_matrix import PAGE, TORCH, rules_part
from zoo import ENTRIES

pytestmark = pytest.mark.skipif(f"with torch {TORCH} " not in PAGE.read_text(), reason="written with another torch")


def test_rules_are_up_to_date():
    # Red when a rule is added and scripts/support-matrix was not run.
    assert rules_part() in PAGE.read_text(), "run scripts/support-matrix"


def test_every_model_has_its_line():
    table = PAGE.read_text().partition("## Models")[2]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if row.startswith("| ")][1:]
    found = [(kind, name, densifies) for kind, name, _, densifies, _ in rows]
    expected = [
        (entry.kind, entry.name.replace("_", " "), ", ".join(f"`{op}`" for op in entry.densifies)) for entry in ENTRIES
    ]
    assert found == expected, "run scripts/support-matrix"
