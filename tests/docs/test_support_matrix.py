"""docs/support-matrix.md is true of the code."""

from __future__ import annotations

from collections import Counter

import pytest

from rowprop.backprop.rules.registry import RULES, op_name
from support_matrix import PAGE, TORCH, device_part, rules_part
from zoo import ENTRIES

pytestmark = pytest.mark.skipif(f"with torch {TORCH} " not in PAGE.read_text(), reason="written with another torch")


def test_rules_are_up_to_date():
    # Red when a rule is added and nox -s support-matrix was not run.
    assert rules_part() in PAGE.read_text(), "run nox -s support-matrix"


def test_the_waits_are_up_to_date():
    # Red when: a rule begins to wait, no longer waits, or waits for another number.
    assert device_part() in PAGE.read_text(), "run nox -s support-matrix"


def table_of(heading: str) -> list[list[str]]:
    part = PAGE.read_text().partition(heading)[2].partition("\n## ")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in part.splitlines() if row.startswith("| ")][1:]


def test_every_model_has_its_line():
    rows = table_of("## Models")
    found = [(kind, name, densifies) for kind, name, _, densifies, _ in rows]
    expected = [
        (entry.kind, entry.name.replace("_", " "), ", ".join(f"`{op}`" for op in entry.densifies)) for entry in ENTRIES
    ]
    assert found == expected, "run nox -s support-matrix"


def test_what_is_missing_is_up_to_date():
    # Red when a rule is added for one of these ops, or a model stops or starts to densify there.
    rows = table_of("## Missing")
    found = {op: int(models) for op, _, _, models, _, _ in rows if int(models)}
    assert found == Counter(f"`{op}`" for entry in ENTRIES for op in entry.densifies), "run nox -s support-matrix"
    ruled = {f"`{op_name(op)}`" for op in RULES}
    assert not {op for op, why, *_ in rows if why == "no rule for this op"} & ruled, "run nox -s support-matrix"
