"""Every model of the zoo: the gradients of plain indexing, for the kept rows' share of the FLOPs."""

from __future__ import annotations

import pytest
import torch

from zoo import ENTRIES, KEEP, Entry, masked, sliced

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

# Turned red, once each: a rule that takes the wrong rows, a rule deleted, an op struck from or added to `densifies`.


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_sliced_is_masked_at_a_share_of_the_cost(entry: Entry, dtype: torch.dtype):
    expected, actual = masked(entry, dtype), sliced(entry, dtype)

    scale = max(float(g.abs().max()) for g in expected.grads.values() if g is not None)
    assert scale > 0
    for name, grad in expected.grads.items():
        found = actual.grads[name]
        assert (found is None) == (grad is None), name
        if grad is None or found is None:
            continue
        assert type(found) is torch.Tensor, name
        # relative to the parameter's own gradient, unless that is next to nothing (a key's bias has none but rounding)
        own = max(float(grad.abs().max()), 1e-2 * scale)
        assert float((found - grad).abs().max()) <= TOLERANCE[dtype] * own, name

    assert expected.flops.total_flops > 0
    assert set(expected.flops.uncounted) == set(entry.uncounted)
    assert actual.flops.total_flops <= expected.flops.total_flops * (
        1.01 if entry.densifies else KEEP * entry.share + 0.01
    )
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
