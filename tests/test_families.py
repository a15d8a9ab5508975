"""The families of torchvision, timm and transformers: the gradients of plain indexing for a share of the FLOPs.

The packages live in a venv of their own: `scripts/families`. Without them only the page is checked.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from families import ENTRIES, PAGE, SINGLE, TIMM, TORCHVISION, TRANSFORMERS, frozen_entry
from zoo import KEEP, ROWS, Entry, errors, masked, sliced

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
installed = all(find_spec(package) for package in ("torchvision", "timm", "transformers"))
needs_packages = pytest.mark.skipif(not installed, reason="torchvision, timm, transformers: see scripts/families")


def check_gradients(entry: Entry, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    tolerance = TOLERANCE[torch.float32 if entry.name in SINGLE else dtype]
    for name, error in errors(masked(entry, dtype, rows), sliced(entry, dtype, rows)).items():
        assert error <= tolerance, name


@needs_packages
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.kind}-{e.name}")
# Red when: the gather of an expanded tensor loses its stride of 0 (Llama), BatchNorm's kernel gets one row in two
# memory formats (XCiT), an op is removed from or added to `densifies`.
def test_pick_is_plain_indexing_at_a_share_of_the_cost(entry: Entry):
    fixed = frozen_entry(entry)
    full, part = masked(fixed, torch.float32), sliced(fixed, torch.float32)
    for name, error in errors(full, part).items():
        assert error <= TOLERANCE[torch.float32], name
    assert full.flops.total_flops > 0
    assert set(full.flops.uncounted) <= set(entry.uncounted)
    assert set(part.report.densified) == set(entry.densifies), part.report
    assert part.flops.total_flops <= full.flops.total_flops * (1.01 if entry.densifies else KEEP * entry.share + 0.02)

    if SINGLE.get(entry.name) != "only":
        for rows in (ROWS, (5,)):
            check_gradients(fixed, torch.float64, rows)
        model, _ = entry.make(torch.float64)
        if any(isinstance(m, _BatchNorm) for m in model.modules()):
            check_gradients(entry, torch.float64, ROWS)


def test_the_families_are_many_and_nine_in_ten_are_sliced():
    for family in (TORCHVISION + TIMM, TRANSFORMERS):
        names = [(entry.kind, entry.name) for entry in family]
        assert len(set(names)) == len(names) >= 20
        assert sum(bool(entry.densifies) or entry.share > 1 for entry in family) <= 0.1 * len(family)


def test_the_page_has_a_line_for_each():
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.read_text().splitlines()]
    found = [(row[0], row[1], row[5]) for row in rows if len(row) == 7][2:]
    expected = [(e.kind, e.name, ", ".join(f"`{op}`" for op in e.densifies)) for e in ENTRIES]
    assert found == expected, "run scripts/families --page"
