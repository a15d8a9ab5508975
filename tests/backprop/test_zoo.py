"""Every model of the zoo: the gradients of plain indexing, for the kept rows' share of the FLOPs."""

from __future__ import annotations

import pytest
import torch

from zoo import ENTRIES, KEEP, TOLERANCE, Entry, assert_same, masked, sliced

# Turned red, once each: a rule that takes the wrong rows, a rule deleted, an op struck from or added to `densifies`.


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_sliced_is_masked_at_a_share_of_the_cost(entry: Entry, dtype: torch.dtype):
    expected, actual = masked(entry, dtype), sliced(entry, dtype)
    assert_same(expected, actual, TOLERANCE[dtype])
    assert expected.flops.total_flops > 0
    assert set(expected.flops.uncounted) == set(entry.uncounted)
    most = 1.01 if entry.densifies else KEEP * entry.share + 0.01
    assert actual.flops.total_flops <= expected.flops.total_flops * most
    densified = set(actual.report.densified)
    if dtype == torch.float32:
        assert densified == set(entry.densifies), actual.report
    else:  # fused kernels may be replaced by ordinary ops
        assert densified <= set(entry.densifies), actual.report


def test_the_zoo_holds_the_kinds_it_should():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names) >= 34
    kinds = {"MLP", "CNN", "ViT", "encoder", "causal", "recurrent", "embedding", "MoE", "set", "metric"}
    assert {entry.kind for entry in ENTRIES} == kinds
