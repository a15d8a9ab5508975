"""The table of ``benchmarks/thin_tokens.py --train`` on figures that one can check by hand."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("scipy", reason="scipy is not installed")
import thin_tokens


def run_of(loss: float, backward_s: float, flops: float, steps: int = 10) -> dict[str, float]:
    return {"steps": steps, "loss": loss, "ratio": 0.1, "backward_s": backward_s, "other_s": 1.0, "flops": flops}


def test_differences_are_paired_and_the_limit_counts_the_backward_by_its_flops():
    # Red where a method's own forward counts in its limit, where losses of two seeds are compared, and with a normal
    # interval: 12.71 standard errors hold 95 % of the means of two seeds, not 1.96.
    runs = []
    for exact, over in ((2.0, 0.01), (3.0, 0.03)):
        others = dict.fromkeys(("full", "rows", "cut", "random", "fewer"), run_of(exact, 3.0, 8.0))
        runs.append({**others, "exact": run_of(exact, 3.0, 8.0), "tokens": run_of(exact + over, 2.0, 4.0)})
    (line,) = (line for line in thin_tokens.table(runs) if line.startswith("| `tokens` "))
    # (1 + 3 * 4 / 8) / (1 + 3); the standard error of .01 and .03 is .01.
    assert line == "| `tokens` | 10 | 2.520 | +0.0200 ± 0.1271 | 0.50 | 0.75 (0.62) |"


def test_a_loss_of_some_rows_is_the_mean_of_their_answers():
    # Red where the sum is divided by the answers of all rows.
    ids, table = torch.randint(thin_tokens.BYTES, (2, 3, thin_tokens.TOKENS)), torch.randn(thin_tokens.BYTES, 128)
    found = thin_tokens.loss_of(lambda inputs: table[inputs], tuple(ids), rows=torch.tensor([0, 2]))  # pyright: ignore
    chosen = (ids[:, row, -thin_tokens.ANSWER :] for row in (0, 2))
    by_row = [torch.nn.functional.cross_entropy(table[inputs], targets) for inputs, targets in chosen]
    torch.testing.assert_close(found, sum(by_row) / 2)
