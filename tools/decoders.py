"""The decoders of transformers, tiny, with random weights and a loss for each token.

Two things are written down here without the library: how much of the backward the kept tokens' gradient can reach, from
the sizes of the modules, and the meaning of ``attention="cut"``, as dense code around each attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from families import configured
from rowprop.cost.flops import count_flops
from zoo import Backward

N, T, V, WIDTH, HEADS, HEAD, INNER, LAYERS = 6, 32, 200, 64, 4, 16, 128, 3
WINDOW = 7


@dataclass(frozen=True)
class Decoder:
    name: str
    type_: str
    config: dict[str, Any]
    attention: str = "sdpa"
    mixing: tuple[str, ...] = ("k_proj", "v_proj")
    """The linear layers that make keys and values, of their own or together with the queries."""
    experts: str | None = None
    """How transformers runs experts."""
    windows: tuple[int, ...] = ()
    """The layers in which a token sees only the last few ones."""
    products: bool = False
    """Whether torch takes its fused attention apart into matrix products."""
    packed: tuple[str, ...] = ("a mask", "an additive mask", "positions", "positions in one row")
    """In which ways it can be told of packed segments; eager attention adds its mask, whatever the dtype."""
    single: str = ""
    """``"partly"``: parts compute in float32 whatever the dtype; ``"only"``: there is no kernel for float64."""
    interface: bool = True
    """Whether transformers calls its attention where the oracle of ``attention="cut"`` can stand around it."""

    @property
    def fused(self) -> bool:
        """Whether one kernel is its attention."""
        return self.attention == "sdpa" and not self.products

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,) if self.single == "only" else (torch.float32, torch.float64)

    @property
    def id(self) -> str:
        return ", ".join([self.name, self.attention, *([f"{self.experts} experts"] if self.experts else [])])

    def make(self, dtype: torch.dtype) -> nn.Module:
        """The same model every time, without gradients."""
        model = _made(self.type_, self.attention, dtype, tuple(self.config.items()))
        model.config._experts_implementation = self.experts
        model.zero_grad()
        return model


@cache
def _made(type_: str, attention: str, dtype: torch.dtype, config: tuple[tuple[str, Any], ...]) -> nn.Module:
    torch.manual_seed(0)
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in config}
    model = configured(type_, "AutoModelForCausalLM", attention, **options).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():  # attention hardly matters in models that start as small as they do
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if parameter.ndim > 1 else 0.05)
    return model


words = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
layers = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER}
sizes = {**words, **layers, "max_position_embeddings": T}
grouped = {**sizes, "num_key_value_heads": 2}
wide = {**grouped, "head_dim": HEAD}
masks, added = ("a mask", "an additive mask"), ("an additive mask", "positions", "positions in one row")
gpt = {**words, "n_positions": T, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER,
       "attn_pdrop": 0.0}  # fmt: skip
bloom = {**words, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "hidden_dropout": 0.0,
         "attention_dropout": 0.0}  # fmt: skip
routed = {**grouped, "num_experts_per_tok": 2}
latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": HEAD,
          "num_key_value_heads": HEADS}  # fmt: skip
falcon = {**sizes, "ffn_hidden_size": INNER}
shared = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
deepseek = {**routed, **latent, **shared, "moe_intermediate_size": INNER}
both, every, other = ("kv_a_proj_with_mqa", "kv_b_proj"), (0, 1, 2), (0, 2)
alternating = {"sliding_window": WINDOW,
               "layer_types": ("sliding_attention", "full_attention", "sliding_attention")}  # fmt: skip

DECODERS = [
    Decoder("GPT-2", "gpt2", gpt, mixing=("c_attn",)),
    Decoder("GPT-2", "gpt2", gpt, "eager", mixing=("c_attn",), packed=added),
    Decoder("GPT-J", "gptj", {**gpt, "rotary_dim": 8}, "eager", packed=added, single="partly"),
    Decoder("GPT-NeoX", "gpt_neox", sizes, mixing=("query_key_value",)),
    Decoder("OPT", "opt", {**sizes, "ffn_dim": INNER, "word_embed_proj_dim": WIDTH}, packed=masks),
    Decoder("BLOOM", "bloom", bloom, "eager", mixing=("query_key_value",), packed=(), interface=False),
    Decoder("Falcon", "falcon", falcon, mixing=("query_key_value",), products=True, packed=masks),
    Decoder("Llama", "llama", grouped),
    Decoder("Llama", "llama", grouped, "eager", packed=added),
    Decoder("Mistral", "mistral", {**grouped, "sliding_window": WINDOW}, windows=every),
    Decoder("Qwen2", "qwen2", grouped),
    Decoder("Qwen3", "qwen3", wide),
    Decoder("Gemma", "gemma", {**wide, "num_key_value_heads": 1}, single="partly"),
    Decoder("Gemma 2", "gemma2", {**wide, **alternating}, "eager", packed=added, single="partly"),
    Decoder("Gemma 3", "gemma3_text", {**wide, **alternating}, windows=other, single="partly"),
    Decoder("Phi", "phi", sizes),
    Decoder("Phi-3", "phi3", grouped, mixing=("qkv_proj",)),
    Decoder("StableLM", "stablelm", grouped),
    Decoder("Granite", "granite", grouped),
    Decoder("Cohere", "cohere", grouped, single="partly"),
    Decoder("OLMo 2", "olmo2", grouped),
    Decoder("SmolLM3", "smollm3", grouped),
    Decoder("StarCoder2", "starcoder2", {**grouped, "sliding_window": WINDOW}, windows=every),
    Decoder("GLM-4", "glm4", wide),
    Decoder("Mixtral", "mixtral", {**routed, "num_local_experts": 4}, experts="eager"),
    Decoder("Mixtral", "mixtral", {**routed, "num_local_experts": 4}, experts="grouped_mm", single="only"),
    Decoder("Qwen3-MoE", "qwen3_moe", {**routed, "num_experts": 4, "moe_intermediate_size": INNER}, experts="eager"),
    Decoder("DeepSeek-V3", "deepseek_v3", deepseek, mixing=both, experts="eager", single="partly"),  # its router
]


def _masks() -> dict[str, Tensor]:
    drawn = torch.rand(N, T - 1, generator=torch.Generator().manual_seed(2))
    counts = torch.tensor([0, 1, 3, T - 1, 9, 0])[:, None]
    return {
        "random": drawn < 0.25,
        "uneven": drawn.argsort(1).argsort(1) < counts,
        "prompts": torch.arange(T - 1) >= torch.tensor([25, 20, 28, 16, 30, 22])[:, None],
        "none": drawn < 0,
        "all": drawn < 1,
    }


MASKS = _masks()
"""Which tokens are kept of those that are predicted, shape (N, T - 1)."""
SOME = ("random", "uneven", "prompts")


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """The shift that everyone writes: the losses (N, T - 1) of the tokens that follow."""
    losses = F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1), reduction="none")
    return losses.view(len(ids), -1)


def backward(
    decoder: Decoder,
    dtype: torch.dtype,
    choose: Callable[[Tensor], Tensor],
    around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
    **inputs: Tensor,
) -> Backward:
    """Backpropagate the mean of the chosen losses, or zero where none is chosen."""
    model = decoder.make(dtype)
    ids = torch.randint(3, V, (N, T), generator=torch.Generator().manual_seed(1))
    ids = ids.view(inputs.get("position_ids", ids).shape)
    torch.manual_seed(1)  # dropout draws the same masks every time
    with around(model):
        chosen = choose(token_losses(model(input_ids=ids, use_cache=False, **inputs).logits, ids))
        with rowprop.watch() as report, count_flops() as flops:
            (chosen.sum() / max(1, chosen.numel())).backward()
    return Backward({name: p.grad for name, p in model.named_parameters()}, flops, report)


def keep_of(kept: Tensor) -> float:
    return float(kept.sum()) / kept.numel()


def full(decoder: Decoder, **inputs: Tensor) -> int:
    return backward(decoder, torch.float32, torch.flatten, **inputs).flops.total_flops


def plain(decoder: Decoder, dtype: torch.dtype, kept: Tensor, **inputs: Tensor) -> Backward:
    """The oracle: plain indexing."""
    return backward(decoder, dtype, lambda losses: losses[kept], **inputs)


def exact(decoder: Decoder, dtype: torch.dtype, kept: Tensor, attention: str = "exact", **inputs: Tensor) -> Backward:
    return backward(decoder, dtype, lambda losses: rowprop.pick(losses, kept, attention=attention), **inputs)


cut = partial(exact, attention="cut")


def skipping(decoder: Decoder, dtype: torch.dtype, kept: Tensor, **inputs: Tensor) -> Backward:
    """Plain indexing, with zeros skipped at the head."""
    return backward(decoder, dtype, lambda losses: losses[kept], _skipping_zeros, **inputs)


def _skipping_zeros(model: nn.Module) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.callback(rowprop.skip_zeros(model).remove)
    return stack


def detached(decoder: Decoder, dtype: torch.dtype, kept: Tensor) -> Backward:
    """The oracle of ``attention="cut"``."""
    with _detaching(kept):
        return plain(decoder, dtype, kept)


@contextmanager
def _detaching(kept: Tensor) -> Iterator[None]:
    """Keys and values of tokens that are not kept take no gradient, in every attention that transformers calls."""
    from transformers.modeling_utils import AttentionInterface

    here = F.pad(kept, (0, 1))[:, None, :, None]

    def around(attend: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*args: Any, **options: Any) -> Any:
            first = next(place for place, value in enumerate(args) if isinstance(value, Tensor))
            query, *keys_and_values = args[first : first + 3]
            parted = [torch.where(here, x, x.detach()) for x in keys_and_values]
            return attend(*args[:first], query, *parted, *args[first + 3 :], **options)

        return attention

    interface = AttentionInterface.get_interface
    with (
        mock.patch.object(F, "scaled_dot_product_attention", around(F.scaled_dot_product_attention)),
        mock.patch.object(AttentionInterface, "get_interface", lambda *args: around(interface(*args))),
    ):
        yield


def reachable_flops(decoder: Decoder, kept: Tensor) -> int:
    """FLOPs of the part of the backward that the kept tokens' gradient can reach.

    A linear layer takes 4 FLOPs for each weight and token; each token has two experts. The head and most of the last
    layer are reached at the kept tokens. Through the last layer's keys and values, all layers below are reached at all
    tokens of the sequences that keep one. Each pair of a query and a key takes four products in attention, and a fused
    kernel computes its score again; a causal kernel skips the pairs that do not meet. Where nothing is kept, one
    token's zeros are propagated.
    """
    kept = F.pad(kept, (0, 1))
    if not kept.any():
        kept = torch.arange(N * T).view(N, T) == 0
    within = kept.any(1, keepdim=True).expand(N, T)
    tokens = {True: int(kept.sum()), False: int(within.sum())}
    flops = 0
    for name, module in decoder.make(torch.float32).named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        last = layer is None or (int(layer[1]) == LAYERS - 1 and name.rpartition(".")[2] not in decoder.mixing)
        weights = [] if isinstance(module, nn.Embedding) else list(module.parameters(recurse=False))
        flops += 4 * tokens[last] * sum(w.numel() for w in weights if w.ndim == 2)
        flops += 4 * tokens[last] * sum(2 * w[0].numel() for w in weights if w.ndim == 3)
    for layer in range(LAYERS):
        queries = kept if layer == LAYERS - 1 else within
        keys = torch.arange(1, T + 1) if decoder.fused and layer not in decoder.windows else torch.tensor(T)
        flops += 2 * (5 if decoder.fused else 4) * HEADS * HEAD * int((queries * keys).sum())
    return flops


Inputs = dict[str, Tensor]


def _packed() -> dict[str, tuple[Tensor, Inputs]]:
    places = torch.arange(T)
    begins = (places % 5 == 0) | ((places == 14) & (torch.arange(N)[:, None] > 2))  # rows differ in their segments
    segments = begins.cumsum(1)
    chosen = torch.rand(N, T, generator=torch.Generator().manual_seed(0)) < 0.3
    chosen[1] = False
    kept = chosen.gather(1, segments) & ~begins.roll(-1, 1)  # a segment's last token predicts none of its own
    positions = places - torch.where(begins, places, 0).cummax(1).values
    within = ((segments[:, :, None] == segments[:, None, :]) & (places <= places[:, None]))[:, None]
    additive = torch.zeros(within.shape).masked_fill(~within, torch.finfo(torch.float32).min)
    return {
        "a mask": (kept[:, :-1], {"attention_mask": within, "position_ids": positions}),
        "an additive mask": (kept[:, :-1], {"attention_mask": additive, "position_ids": positions}),
        "positions": (kept[:, :-1], {"position_ids": positions}),
        "positions in one row": (kept.view(1, -1)[:, :-1], {"position_ids": positions.view(1, -1)}),
    }


PACKED = _packed()
"""By the way in which transformers is told of packed segments: the kept tokens, those of whole segments; the inputs."""
