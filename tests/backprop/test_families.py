"""The families of torchvision, timm and transformers: the gradients of plain indexing for a share of the FLOPs.

All of them keep rows. The decoders keep tokens as well, with exact attention and with cut attention. The packages live
in a venv of their own: `nox -s families`. Without them only the page is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import decoders
import rowprop
from decoders import DECODERS, MASKS, PACKED, SOME, Decoder, keep_of
from families import ENTRIES, PAGE, SINGLE, TIMM, TOKENS, TORCHVISION, TRANSFORMERS, frozen_entry
from rowprop.backprop.skip import MOST
from rowprop.cost.flops import count_flops
from rowprop.host import waits
from transformers_all import ERROR, LIMIT, trial
from zoo import KEEP, ROWS, TOLERANCE, Backward, Entry, assert_same, masked, skipping, sliced

THOROUGH = "ROWPROP_THOROUGH" in os.environ
installed = all(find_spec(package) for package in ("torchvision", "timm", "transformers"))
needs_packages = pytest.mark.skipif(not installed, reason="torchvision, timm, transformers: see nox -s families")


@needs_packages
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.kind}-{e.name}")
# Red when: the gather of an expanded tensor loses its stride of 0 (Llama), BatchNorm's kernel gets one row in two
# memory formats (XCiT), an op is removed from or added to `densifies`.
def test_pick_is_plain_indexing_at_a_share_of_the_cost(entry: Entry):
    fixed = frozen_entry(entry)
    full, part = masked(fixed, torch.float32), sliced(fixed, torch.float32)
    assert_same(full, part)
    assert full.flops.total_flops > 0
    assert set(full.flops.uncounted) <= set(entry.uncounted)
    assert set(part.report.densified) == set(entry.densifies), part.report
    assert part.flops.total_flops <= full.flops.total_flops * (1.01 if entry.densifies else KEEP * entry.share + 0.02)

    if SINGLE.get(entry.name) != "only":
        tolerance = TOLERANCE[torch.float32 if entry.name in SINGLE else torch.float64]
        cases = [(fixed, torch.float64, ROWS), (fixed, torch.float64, (5,))]
        if any(isinstance(m, _BatchNorm) for m in entry.make(torch.float64)[0].modules()):
            cases.append((entry, torch.float64, ROWS))
        for case in cases:
            assert_same(masked(*case), sliced(*case), tolerance)


@needs_packages
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.kind}-{e.name}")
# Red when: an output is not hooked, or a gradient that the model makes of it is not sliced as a pick's is.
def test_zeros_of_the_output_cost_as_picked_rows(entry: Entry):
    fixed = frozen_entry(entry)
    for rows in (ROWS, ()):
        full, part = masked(fixed, torch.float32, rows), skipping(fixed, torch.float32, rows)
        if not rows:
            assert not any(grad is not None and grad.any() for grad in part.grads.values())
            continue
        assert_same(full, part)
        if not waits(torch.device("cpu")):  # a device does not count the tokens of each row (Mamba)
            picked = sliced(fixed, torch.float32, rows)
            assert part.flops.total_flops <= 1.05 * picked.flops.total_flops


@needs_packages
@pytest.mark.filterwarnings("ignore")  # those of models that are built from their default configuration
@pytest.mark.parametrize("type_", ["qwen3_moe", "olmoe", "jamba", "qwen3_next", "recurrent_gemma", "phimoe"])
# A sample of `nox -s families -- --all`. Red when: the weights of each token's experts are not spread to all experts; a
# write to a tensor with swapped dimensions is undone at full size; a custom function of the models has no rule.
def test_default_configurations_cost_their_rows(type_: str):
    found = trial("CausalLM", type_)
    assert "failed" not in found and found["error"] <= ERROR and found["share"] <= LIMIT, found


def test_the_families_are_many_and_nine_in_ten_are_sliced():
    for family in (TORCHVISION + TIMM, TRANSFORMERS):
        names = [(entry.kind, entry.name) for entry in family]
        assert len(set(names)) == len(names) >= 20
        assert sum(bool(entry.densifies) or entry.share > 1 for entry in family) <= 0.1 * len(family)


def test_the_page_has_a_line_for_each():
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.read_text().splitlines()]
    found = [row[0] for row in rows if len(row) == 4 and row[0] not in ("model", "---")]
    assert len(found) == len(ENTRIES), "run nox -s families -- --page"
    for entry, cell in zip(ENTRIES, found, strict=True):
        assert cell.startswith(entry.name) and all(f"`{op}`" in cell for op in entry.densifies), cell
    found = [row[0] for row in rows if len(row) == 7][2:]
    assert found == [decoder.id for decoder in DECODERS], "run nox -s families -- --page"


PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole rows": lambda drawn: (drawn[:, :1] < 0.4).expand_as(drawn),
    "tokens": lambda drawn: drawn < 0.2,
    "one": lambda drawn: drawn == drawn.min(),
    "none": lambda drawn: drawn < 0,
    "all": lambda drawn: drawn < 1,
}


@needs_packages
@pytest.mark.parametrize("entry", TOKENS, ids=lambda e: e.name)
# Red when: an output of a dict is not hooked; tokens of encoders, of queries or of a decoder with an encoder cost more
# than when they are picked.
def test_zeros_of_tokens_cost_as_picked_tokens(entry: Entry):
    def run(
        pattern: Callable[[Tensor], Tensor], choose: Callable[[Tensor, Tensor], Tensor], skips: bool = False
    ) -> Backward:
        model, batch = frozen_entry(entry).make(torch.float32)
        if skips:
            rowprop.skip_zeros(cast(Any, model).model)
        torch.manual_seed(1)  # dropout draws the same masks every time
        losses = model(*batch[:-1]).square().mean(2)
        kept = pattern(torch.rand(losses.shape, generator=torch.Generator().manual_seed(0)))
        with rowprop.watch() as report, count_flops() as flops:
            (choose(losses, kept).sum() / max(1, int(kept.sum()))).backward()
        return Backward({name: p.grad for name, p in model.named_parameters()}, flops, report)

    for name, pattern in PATTERNS.items():
        found = run(pattern, lambda losses, kept: losses * kept, skips=True)
        check_same(run(pattern, lambda losses, kept: losses[kept]), found, TOLERANCE[torch.float32])
        picked = run(pattern, rowprop.pick)
        assert name == "all" or found.flops.total_flops <= 1.01 * picked.flops.total_flops, name


# --- tokens as rows ---------------------------------------------------------------------------------------------------

SLICED = [decoder for decoder in DECODERS if decoder.interface]


def tolerance_of(decoder: Decoder, dtype: torch.dtype) -> float:
    return TOLERANCE[torch.float32 if decoder.single else dtype]


def check_same(expected: Backward, actual: Backward, tolerance: float) -> None:
    if any(grad is not None and grad.any() for grad in expected.grads.values()):
        assert_same(expected, actual, tolerance)
    else:  # nothing was kept
        for name, grad in expected.grads.items():
            found = actual.grads[name]
            assert (found is None) == (grad is None) and (found is None or torch.equal(found, grad))


@needs_packages
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.id)
@pytest.mark.parametrize("mask", MASKS)
# Red when: causality is left out for the kept queries, or their lines of a window's mask are those of other queries;
# sequences that keep no token take part below the last attention.
def test_tokens_cost_what_their_gradient_reaches(decoder: Decoder, mask: str):
    kept = MASKS[mask]
    for dtype in decoder.dtypes:
        found = decoders.exact(decoder, dtype, kept)
        check_same(decoders.plain(decoder, dtype, kept), found, tolerance_of(decoder, dtype))
        if decoder.experts == "eager" and mask == "none":
            continue  # an expert without a kept token runs for another one, whose sequence is reached then
        if decoder.experts == "grouped_mm" and mask == "uneven" and waits(torch.device("cpu")):
            continue  # a device does not count the rows of each expert, so sequences that keep no token go on as zeros
        assert not found.flops.uncounted
        assert found.flops.total_flops <= 1.03 * decoders.reachable_flops(decoder, kept)


@needs_packages
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.id)
@pytest.mark.parametrize("mask", MASKS)
# Red when: the head of the model is not found, or the gradient of its logits is not sliced.
def test_zeros_of_the_head_cost_as_picked_tokens(decoder: Decoder, mask: str):
    kept = MASKS[mask]
    for dtype in decoder.dtypes:
        found, picked = decoders.skipping(decoder, dtype, kept), decoders.exact(decoder, dtype, kept)
        check_same(decoders.plain(decoder, dtype, kept), found, tolerance_of(decoder, dtype))
        if keep_of(kept) <= MOST:
            assert found.flops.total_flops <= 1.01 * picked.flops.total_flops


@needs_packages
@pytest.mark.parametrize("decoder", SLICED, ids=lambda d: d.id)
@pytest.mark.parametrize("mask", MASKS)
# Red when: all keys and values of the kept tokens' sequences take a gradient.
def test_tokens_cost_their_share_where_attention_is_cut(decoder: Decoder, mask: str):
    kept = MASKS[mask]
    for dtype in decoder.dtypes:
        found = decoders.cut(decoder, dtype, kept)
        check_same(decoders.detached(decoder, dtype, kept), found, tolerance_of(decoder, dtype))
        assert found.flops.total_flops <= (keep_of(kept) + 0.02) * decoders.full(decoder)
        if mask in SOME:  # the exact gradient is another one
            with pytest.raises(AssertionError):
                check_same(decoders.plain(decoder, dtype, kept), found, 1e-3)


@needs_packages
@pytest.mark.parametrize(
    ("decoder", "way"), [(d, way) for d in SLICED for way in d.packed], ids=lambda value: getattr(value, "id", value)
)
# Red when: lines of the mask are those of other queries; all keys and values take a gradient (then it costs too much).
def test_cut_attention_is_exact_for_whole_segments(decoder: Decoder, way: str):
    kept, inputs = PACKED[way]
    found = decoders.cut(decoder, torch.float32, kept, **inputs)
    check_same(decoders.plain(decoder, torch.float32, kept, **inputs), found, TOLERANCE[torch.float32])
    assert found.flops.total_flops <= 1.05 * keep_of(kept) * decoders.full(decoder, **inputs)


@contextmanager
def compiled(model: nn.Module) -> Iterator[None]:
    """Compiled as it stands, kernels run op by op."""
    torch._dynamo.reset()
    model.compile(backend="rowprop", options={"kernels": "eager"})
    try:
        yield
    finally:
        model._compiled_call_impl = None


@needs_packages
@pytest.mark.filterwarnings("ignore")  # those of torch and transformers while they compile
@pytest.mark.parametrize("decoder", DECODERS[:: 1 if THOROUGH else 4], ids=lambda d: d.id)
def test_a_compiled_decoder_costs_its_share_of_rows(decoder: Decoder):
    # Whole rows, against plain indexing without a compiler. Experts mix rows and tokens in a way that a compiled region
    # has no layout for. Red when: a size in a decoder's view is no longer followed as a symbol.
    rows = torch.tensor([0, 3, 4])
    expected = decoders.backward(decoder, torch.float32, lambda losses: losses.mean(1)[rows])
    found = decoders.backward(decoder, torch.float32, lambda losses: rowprop.pick(losses.mean(1), rows), compiled)
    assert_same(expected, found, TOLERANCE[torch.float32])
    share = found.flops.total_flops / decoders.full(decoder)  # the region's attention is counted without its causality
    assert share <= (0.95 if decoder.experts else 0.55)
    assert bool(found.report.densified) == bool(decoder.experts)


def test_the_decoders_are_many():
    assert len({decoder.type_ for decoder in SLICED}) >= 12
    assert len({decoder.id for decoder in DECODERS}) == len(DECODERS)
    assert {decoder.attention for decoder in DECODERS} == {"sdpa", "eager"}
