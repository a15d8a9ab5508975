"""The table of benchmarks/thin_scratch.py."""

from __future__ import annotations

from typing import Any

from thin_scratch import COLUMNS, table


def run(label: str, seed: int, accuracy: float, backward: float, select: float, kept: int) -> dict[str, Any]:
    """A run of 1,000 rows as results.json has it; beside backward and select it took 2 s."""
    phases = {"forward": 2.0, "backward": backward, "select": select}
    curve = [{"kept": 1.0}, {"kept": kept / 500 - 1}]
    return {
        "label": label, "seed": seed, "accuracy": accuracy, "phases_s": phases, "train_s": sum(phases.values()),
        "rows_seen": 1000, "rows_backpropagated": kept, "curve": curve,
    }  # fmt: skip


def test_the_table_compares_each_run_with_full_of_its_seed():
    # Red with the mean of full over the seeds, with the share of the first epoch, and with another phase.
    runs = [
        run("full", 0, 0.80, 4.0, 0.0, 1000), run("full", 1, 0.90, 8.0, 0.0, 1000),
        run("thinned", 1, 0.85, 4.0, 2.0, 700), run("thinned", 0, 0.79, 3.0, 0.6, 600),
    ]  # fmt: skip
    _, _, full, thinned, _ = table({"runs": runs, "methods": [{"label": "full"}, {"label": "thinned"}]})
    cells = [cell.strip() for cell in thinned.split("|")[1:-1]]
    assert len(cells) == len(COLUMNS)
    assert cells[:3] == ["`thinned`", "82.00 ± 4.24", "-3.00 ± 2.83"]
    assert cells[3:6] == ["0.87 ± 0.09", "0.62 ± 0.18", "0.15 ± 0.07"]
    assert cells[6] == "65 ± 7, 30 ± 14"
    assert full.split("|")[3].strip() == "0.00 ± 0.00"
