"""The table of benchmarks/frameworks.py."""

from __future__ import annotations

from frameworks import COLUMNS, Run, table


def run(way: str, seed: int, epoch_s: float, accuracy: float, share: float) -> Run:
    return {"way": way, "seed": seed, "epoch_s": epoch_s, "accuracy": accuracy, "share": share}


def test_the_table_compares_each_run_with_the_others_of_its_seed():
    # Red with the mean of the untouched over the seeds, and with the other framework's original.
    runs = [
        run("Composer", 0, 4.0, 0.80, 1.0), run("Composer", 1, 8.0, 0.90, 1.0),
        run("Composer, Composer's SelectiveBackprop throughout", 0, 2.0, 0.7, 0.5),
        run("Composer, Composer's SelectiveBackprop throughout", 1, 8.0, 0.7, 0.5),
        run("Composer, ours SelectiveBackprop throughout", 1, 4.0, 0.85, 0.5),
        run("Composer, ours SelectiveBackprop throughout", 0, 3.0, 0.79, 0.4),
        run("fastai", 0, 5.0, 0.8, 1.0), run("fastai", 1, 5.0, 0.8, 1.0),
        run("fastai, tsai's BatchLossFilter", 0, 5.0, 0.8, 0.5),
        run("fastai, tsai's BatchLossFilter", 1, 5.0, 0.8, 0.5),
        run("fastai, ours BatchLossFilter", 0, 2.5, 0.8, 0.5), run("fastai, ours BatchLossFilter", 1, 2.5, 0.8, 0.5),
    ]  # fmt: skip
    flops = dict.fromkeys((run["way"] for run in runs), 100)
    flops |= {
        "Composer, Composer's SelectiveBackprop throughout": 80,
        "Composer, ours SelectiveBackprop throughout": 70,
    }
    _, _, untouched, original, ours, _, _, fast = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs, flops)
    )
    assert len(ours) == len(COLUMNS)
    assert ours[1:4] == ["3.5 ± 0.7", "0.62 ± 0.18", "1.00 ± 0.71"]
    assert ours[4:6] == ["0.70", "0.88"]
    assert ours[6:] == ["82.00 ± 4.24", "-3.00 ± 2.83", "45 ± 7"]
    assert untouched[2:4] == ["1.00 ± 0.00", ""]
    assert original[3] == ""
    assert fast[3] == "0.50 ± 0.00"
