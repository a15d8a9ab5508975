"""transformers' decoders over flash-attn's own Python: transformers unpads, packs and calls the kernels by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import decoders
import flash_kernels
import rowprop
from decoders import MASKS, PACKED, Decoder, Inputs, N, T, V, alternating, grouped, keep_of, wide
from rowprop.cost.flops import count_flops
from zoo import TOLERANCE, Backward, assert_same

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not flash_kernels.install(), reason="flash-attn's source is not on the path")

ATTENTION = "flash_attention_2"
LLAMA = Decoder("Llama", "llama", grouped, ATTENTION)
DECODERS = [
    LLAMA,
    Decoder("Qwen3", "qwen3", wide, ATTENTION),
    Decoder("Gemma 2", "gemma2", {**wide, **alternating, "attn_logit_softcapping": 0.7}, ATTENTION, single="partly"),
    Decoder("Gemma 3", "gemma3_text", {**wide, **alternating}, ATTENTION, single="partly"),
]
DENSE, PACKING, INDEXED = "FlashAttnFunc", "FlashAttnVarlenFunc", "IndexPutFirstAxis"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers take flash-attn as it does where there is a GPU."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)


def _cases() -> dict[str, tuple[str, Tensor, Inputs]]:
    rows = torch.zeros(N, T - 1, dtype=torch.bool).index_fill_(0, torch.tensor([1, 4]), True)
    held = torch.arange(T) < torch.tensor([32, 20, 9, 31, 1, 16])[:, None]
    left = held.flip(1)
    segments, positions = PACKED["positions in one row"]
    begins = torch.cat([(positions["position_ids"][0] == 0).nonzero()[:, 0], torch.tensor([N * T])]).to(torch.int32)
    longest = int(begins.diff().max())
    packing = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": longest, "max_length_k": longest}
    return {
        "rows": (DENSE, rows, {}),
        "tokens of some rows": (DENSE, MASKS["uneven"], {}),
        "padded on the right": (PACKING, MASKS["uneven"] & held[:, 1:], {"attention_mask": held.long()}),
        "padded on the left": (PACKING, MASKS["uneven"] & left[:, :-1], {"attention_mask": left.long()}),
        "packed, by positions": (PACKING, segments, positions),
        "packed, by lengths": (PACKING, segments, {**positions, **packing}),  # pyright: ignore[reportAssignmentType]
    }


CASES = _cases()
"""By what transformers is given: the function that it calls, the kept tokens, the inputs."""


def check(decoder: Decoder, expected: Backward, found: Backward, case: str, bound: float, cut: bool = False) -> None:
    function = CASES[case][0]
    assert_same(expected, found, TOLERANCE[torch.float32 if decoder.single else torch.float64])
    assert not found.report.densified and not found.flops.uncounted
    assert found.report.sliced[function] == decoders.LAYERS
    assert found.report.cut == ({function: decoders.LAYERS} if cut else {})
    assert (INDEXED in found.report.sliced) == ("padded" in case)
    assert found.flops.total_flops <= bound * expected.flops.total_flops


def live_share(case: str) -> float:
    """The share of the tokens in sequences that keep one."""
    _, kept, inputs = CASES[case]
    kept = F.pad(kept, (0, 1))
    if "packed" in case:
        at = (inputs["position_ids"] == 0).cumsum(1) - 1
        return float((torch.zeros(at.max() + 1).index_add_(0, at[0], kept[0].float()) > 0)[at].float().mean())
    held = inputs.get("attention_mask", torch.ones(N, T))
    return float((kept.any(1, keepdim=True) * held).sum() / held.numel())


@pytest.mark.parametrize(
    ("decoder", "case"), [(d, case) for d in DECODERS for case in CASES if d is LLAMA or "positions" in case],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
# Red when: lengths that are tensors (so transformers packs by positions) are not known; a padded row's tokens are taken
# for those of another; keys of tokens that are not kept take a gradient under cut.
def test_tokens_of_a_decoder_cost_their_share(decoder: Decoder, case: str):
    _, kept, inputs = CASES[case]
    expected, live = decoders.plain(decoder, torch.float64, kept, **inputs), live_share(case)
    for way in (decoders.exact, decoders.skipping):
        check(decoder, expected, way(decoder, torch.float64, kept, **inputs), case, 1.1 * live + 0.05)
    found = decoders.cut(decoder, torch.float64, kept, **inputs)
    with decoders._detaching(kept):
        detached = decoders.plain(decoder, torch.float64, kept, **inputs)
    check(decoder, detached, found, case, keep_of(kept) + 0.02, cut=True)


@pytest.mark.parametrize("case", ["padded on the left", "packed, by positions"])
def test_drawn_tokens_of_a_decoder_have_the_exact_gradient_on_average(case: str):
    # Red when: a token's gradient takes the place of another's below a packed kernel.
    _, kept, inputs = CASES[case]
    model = LLAMA.make(torch.float64)
    ids = torch.randint(3, V, (N, T), generator=torch.Generator().manual_seed(1)).view(kept.shape[0], -1)

    def step() -> tuple[Tensor, int]:
        model.zero_grad()
        losses = F.cross_entropy(model(ids, use_cache=False, **inputs).logits.mT, ids, reduction="none")
        with count_flops() as flops:
            losses[:, :-1][kept].mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), flops.total_flops  # pyright: ignore[reportOptionalMemberAccess]

    exact, full = step()
    everything = rowprop.thin(model, keep=1.0, unit="token")
    found, flops = step()
    everything.remove()
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
    assert flops <= (live_share(case) + 0.12) * full  # the head runs whole: tokens leave below the last block
    handle = rowprop.thin(model, keep=0.3, unit="token", generator=torch.Generator().manual_seed(1))
    draws = [step() for _ in range(12)]
    handle.remove()
    along = torch.stack([exact @ grad / (exact @ exact) for grad, _ in draws])
    assert along.std() > 0.01 and abs(along.mean() - 1) < 5 * along.std() / len(draws) ** 0.5
    assert max(cost for _, cost in draws) < flops


def test_a_grpo_update_in_one_packed_row_costs_its_live_answers():
    # 16 answers behind prompts, in one row without padding; those of 10, 63 % of the tokens, have an advantage of 0.
    # Red when: packed functions run at full size.
    model = LLAMA.make(torch.float64)
    lengths = torch.tensor([14, 9, 12, 15, 10, 11, 13, 8, 12, 14, 9, 13, 11, 12, 14, 15])
    live = torch.tensor([3, 5, 8, 10, 12, 14])
    answer = torch.arange(16).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    advantages = torch.zeros(16, dtype=torch.float64).index_copy_(0, live, torch.randn(6, dtype=torch.float64))
    assert 0.62 < float((advantages[answer] == 0).double().mean()) < 0.64
    counts = (positions[1:] >= 4)[None]  # a prompt of four tokens; it also leaves out the first token of the next one
    ids = torch.randint(3, V, (1, len(answer)), generator=torch.Generator().manual_seed(1))

    def step() -> tuple[list[Tensor | None], int]:
        model.zero_grad()
        logits = model(ids, position_ids=positions[None], use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        gain = torch.min(ratio * advantages[answer][None, 1:], ratio.clamp(0.8, 1.2) * advantages[answer][None, 1:])
        with count_flops() as flops:
            (-(gain * counts).sum() / counts.sum()).backward()
        return [p.grad for p in model.parameters()], flops.total_flops

    expected, full = step()
    handle = rowprop.skip_zeros(model)
    found, flops = step()
    handle.remove()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert flops <= 0.42 * full
