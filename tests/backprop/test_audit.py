"""A sample of the audit's cases finds no wrong rule; wrong rules that are planted are found."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from audit import Recorder, audit, more_on_a_device, record_cases, record_kernels, record_opinfo, record_zoo
from cuda_kernels import installed
from rowprop.backprop.rows.slice import RowSlice
from rowprop.backprop.rules.registry import RULES

aten = torch.ops.aten


@pytest.fixture(scope="module")
def recorder() -> Generator[Recorder]:
    recorder = Recorder()
    record_zoo(recorder)
    record_cases(recorder)
    record_opinfo(recorder, every=20)
    with installed():
        record_kernels(recorder)
        yield recorder


# Red when: any rule takes rows from a tensor without rows. See also the rules planted below.
def test_no_rule_claims_what_is_wrong(recorder: Recorder):
    findings = audit(recorder.calls.values(), per_op=15)
    assert not findings.wrong, str(findings)
    assert len(findings.stayed) > 180 and findings.stayed.total() > 1750


# Red when: a rule asks host.waits() and densifies for it, instead of a check_readable() or a way without the values.
def test_nothing_densifies_on_a_device_only():
    assert not more_on_a_device(every=20)


PLANTED = {  # a softmax along the batch, the square root of rows that repeat, a sum in place
    aten._softmax_backward_data.default: (
        lambda op, g, output, *rest: g.like(op(g.values, g.take(output), *rest)),
        "result 0 is off by",
    ),
    aten.sqrt.default: (lambda op, g: g.like(op(g.values)), "rows: repeated"),
    aten.add.Tensor: (
        lambda op, a, b, *, alpha=1: b.add_into(a) if type(a) is not RowSlice or type(b) is RowSlice else a.add_into(b),
        "afterwards",
    ),
}


@pytest.mark.parametrize("op", PLANTED, ids=str)
def test_a_wrong_rule_is_named(recorder: Recorder, op: Any, monkeypatch: pytest.MonkeyPatch):
    calls = [call for call in recorder.calls.values() if call.op is op]
    assert calls and not audit(calls, per_op=30).wrong
    rule, how = PLANTED[op]
    monkeypatch.setattr(RULES[op], "run", rule)
    wrong = audit(calls, per_op=200).wrong
    assert any(how in line for line in wrong)
    assert all(call.name in line for call in calls for line in wrong)
