"""Checks every class of five of transformers' auto mappings: ``nox -s families -- --all``, about 25 minutes.

Each model is built by its constructor from the default configuration of its type. Only sizes are smaller. Attention and
experts are computed as they are for users who set nothing. Two of 8 rows are kept. A model runs in a process of its
own, so that one that fails, or takes too long, does not end the others.
"""

from __future__ import annotations

import inspect
import multiprocessing
import resource
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowprop
from families import torchvision_models
from rowprop.cost.flops import count_flops
from zoo import ROWS, Backward, N, errors, frozen

HEADS = {
    "CausalLM": "CAUSAL_LM",
    "MaskedLM": "MASKED_LM",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
}
"""By the end of an auto class's name, the name that transformers gives its mapping."""
T, V, WIDTH, HEAD_COUNT = 24, 300, 64, 4
SECONDS, BYTES = 120, 12 << 30

_NAMES = [
    (V, "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input t2u_vocab_size"),
    (
        WIDTH,
        """hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width
        attention_hidden_size input_embedding_size output_embedding_size d_latents mamba_d_ssm""",
    ),
    (
        4,
        """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads
        index_n_heads speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
        swa_num_attention_heads""",
    ),
    (
        16,
        """head_dim d_kv d_head v_head_dim qk_nope_head_dim dim_head kv_channels attention_head_size index_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim chunk_size mamba_chunk_size
        mamba_d_state state_size ssm_state_size max_source_positions""",
    ),
    (
        8,
        """qk_rope_head_dim rotary_dim sliding_window attention_window num_experts num_local_experts n_routed_experts
        moe_num_experts sliding_window_size hidden_size_per_layer_input""",
    ),
    (
        128,
        """intermediate_size ffn_hidden_size n_inner d_ff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim dff dim_ff
        speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim feed_forward_size""",
    ),
    (
        2,
        """num_experts_per_tok moe_k moe_topk linear_num_key_heads num_kv_heads n_group topk_group
        swa_num_key_value_heads num_self_attends_per_block""",
    ),
    (
        4,
        """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_blocks speech_encoder_layers t2u_encoder_layers t2u_decoder_layers""",
    ),
    (
        32,
        """moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank image_size
        shared_intermediate_size expert_ffn_hidden_size""",
    ),
]
SIZES = {name: size for size, names in _NAMES for name in names.split()}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "CausalLM:reformer": {"is_decoder": True},
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blenderbot": {"encoder_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": {"image_size": 64, "window_size": 2},
    "dory": {"sliding_window": 32, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": V},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gemma3n.text_config": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"qk_head_dim": 24, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "mobilevitv2": {"image_size": 64},
    "mobilebert": {"embedding_size": 32},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "perceiver": {"max_position_embeddings": T, "num_latents": 16},
    "qwen4_exp.text_config": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [4, 6],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 1,  # it draws seeds of its own in each forward, for its hashes and its dropout
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "resnet": {"depths": [1, 1, 1, 1]},  # deeper, its logits grow until the gradient is zero
    "swin": {"image_size": 64, "window_size": 2},
    "textnet": {"image_size": [64, 64]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "mode": "train", "chunk_size": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 32,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""What some types, their parts or one of their classes need beside SIZES: sizes that depend on one another, and what
has to be set before training."""
_WINDOWS = "`as_strided` makes overlapping windows: autograd adds up rows that are merged with heads"
_SHIFT = "`as_strided` shifts relative positions in memory that has the heads before the rows"
_STREAMS = "`slice_backward` cuts through the predicted streams, which are merged with time"
_ALTUP = "stacked streams are changed in place: autograd reads them by `as_strided`, with the streams before the rows"
_CUSTOM = "a custom function, `{}`, which rowprop cannot see into"
DENSE: dict[str, tuple[float, str]] = {
    "funnel": (0.98, _SHIFT),
    "gemma3n": (1.0, _ALTUP),
    "gemma3n_text": (1.0, _ALTUP),
    "jetmoe": (
        0.89,
        "classification only: one token of each sequence is kept, and the attention's batch is not its first dimension",
    ),
    "led": (0.48, _WINDOWS),
    "longcat_flash": (
        0.84,
        "keys are copied into two parts of an empty tensor: the gradient of the first copy is dense, and not reported",
    ),
    "longformer": (0.83, _WINDOWS),
    "prophetnet": (0.97, _STREAMS),
    "reformer": (1.0, _CUSTOM.format("_ReversibleFunction") + ": it runs the layers again"),
    "swinv2": (0.27, "the layers that make the position biases see no rows: they run once for any number"),
    "switch_transformers": (
        0.34,
        "an expert without kept tokens keeps one, and the layers below run its whole sequence; 0.25 with 2 experts",
    ),
    "yoso": (0.86, _CUSTOM.format("YosoCumulation")),
}
"""The types that cost more than LIMIT: at most this share of the FLOPs, with the reason."""
FOUND = {
    "CausalLM": (196, 188, 188, 183),
    "MaskedLM": (51, 51, 51, 47),
    "Seq2SeqLM": (38, 36, 36, 33),
    "SequenceClassification": (127, 126, 126, 121),
    "ImageClassification": (42, 37, 37, 36),
}
"""For the page, by class: the types, those built, those exact, those at most LIMIT of the FLOPs."""
LIMIT, ERROR = 0.26, 3e-5


def shrunken(kind: type[Any], type_: str = "") -> Any:
    """The default configuration of a class with smaller sizes, also in its parts."""
    names = inspect.signature(kind.__init__).parameters
    default = vars(kind())
    given: dict[str, Any] = {}
    for name in names:
        value = default.get(name, default.get(kind.attribute_map.get(name, "")))
        part = kind.sub_configs.get(name)
        if part is not None and value is not None:
            given[name] = shrunken(type(value), f"{type_}.{name}")
        elif type(value) is int and name in SIZES:
            given[name] = min(value, SIZES[name])
        elif name.endswith(("token_id", "token_index")) and type(value) is int and value >= V:
            given[name] = V - 1
    for name, value in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        if name in names:
            given[name] = value
    heads = default.get("num_key_value_heads")
    if type(heads) is int and "num_attention_heads" in names:
        given["num_key_value_heads"] = 2 if heads < default["num_attention_heads"] else HEAD_COUNT
    return kind(**{**given, **OWN.get(type_, {})})


def built(head: str, type_: str) -> nn.Module:
    torchvision_models()  # transformers imports it
    import transformers

    OWN[type_] = OWN.get(type_, {}) | OWN.get(f"{head}:{type_}", {})
    config = shrunken(transformers.CONFIG_MAPPING[type_], type_)
    config.architectures = config.architectures or []  # DeiT has two classes, and transformers reads the list
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # attention hardly matters in models that start as small as they do
            fan = parameter[0].numel() if parameter.ndim in (2, 4) else 250
            parameter.add_(torch.randn_like(parameter), alpha=0.8 / max(1, fan) ** 0.5)
    return frozen(model)


def inputs_of(model: Any) -> dict[str, Tensor]:
    """A batch by the names of the arguments of the model's forward."""
    names = inspect.signature(model.forward).parameters
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, min(200, getattr(model.config, "vocab_size", V)), (N, T), generator=made)
    main = model.main_input_name
    if main == "pixel_values" and "input_ids" not in names:
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", 32)
        high, wide = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.randn(N, 3, high, wide, generator=made)}
    if model.config.is_encoder_decoder and type(model).__name__.endswith("ForSequenceClassification"):
        ids[:, -1] = model.config.eos_token_id  # the head reads there
    inputs = {"input_ids": ids}
    if "attention_mask" in names:
        inputs["attention_mask"] = (torch.arange(T) < torch.randint(T - 4, T + 1, (N, 1), generator=made)).long()
    if "decoder_input_ids" in names and model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
    return inputs


def losses_of(out: Any) -> Tensor:
    """A loss for each row: the mean over its places of the cross entropy with drawn classes."""
    logits: Tensor = out["logits"]
    assert logits.shape[0] == N, f"logits of shape {tuple(logits.shape)} for {N} rows"
    drawn = torch.randint(logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(2))
    losses = F.cross_entropy(logits.flatten(0, -2), drawn.flatten(), reduction="none")
    return losses.view(N, -1).mean(1)


def backward(model: nn.Module, picks: bool) -> Backward:
    import transformers

    transformers.set_seed(1)  # dropout draws the same masks every time
    model.zero_grad()
    dtype = next(p.dtype for p in model.parameters())
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs_of(model).items()}
    losses, rows = losses_of(model(**inputs)), torch.tensor(ROWS)
    with rowprop.watch() as report, count_flops() as flops:
        (rowprop.pick(losses, rows) if picks else losses[rows]).mean().backward()
    return Backward({name: p.grad for name, p in model.named_parameters()}, flops, report)


def said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def trial(head: str, type_: str) -> dict[str, Any]:
    """What a model's backward costs and how exact it is, or why it did not run."""
    told: dict[str, Any] = {"head": head, "type": type_}
    for dtype in (torch.float64, torch.float32):  # there are no grouped products of float64
        try:
            model = built(head, type_).to(dtype)
            backward(model, False)  # BigBird chooses its attention in its first forward
            full = backward(model, False)
        except Exception as error:
            reason = said(error)
            continue
        if not all(grad is None or grad.isfinite().all() for grad in full.grads.values()):
            reason = (
                "plain indexing gives a gradient that is not finite"  # ProphetNet masks with float64's least number
            )
            continue
        part = backward(model, True)
        return told | {
            "dtype": str(dtype).removeprefix("torch."),
            "error": max(errors(full, part).values()),
            "share": part.flops.total_flops / full.flops.total_flops,
            "densified": {name: entry.reason for name, entry in part.report.densified.items()},
        }
    return told | {"failed": reason}


def _run(head: str, type_: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    try:
        pipe.send(trial(head, type_))
    except BaseException as error:
        pipe.send({"head": head, "type": type_, "failed": f"rowprop: {type(error).__name__}: {error}"[:500]})


def isolated(head: str, type_: str) -> dict[str, Any]:
    """:func:`trial` in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(head, type_, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else {"head": head, "type": type_, "failed": f"{SECONDS} s passed"}
    except EOFError:
        return {"head": head, "type": type_, "failed": "the process ended"}
    finally:
        process.kill()
        process.join()


def types_of(head: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, f"MODEL_FOR_{HEADS[head]}_MAPPING_NAMES"))


def trials(only: list[str]) -> Iterator[dict[str, Any]]:
    for head in HEADS:
        for type_ in types_of(head):
            if not only or head in only or type_ in only or f"{head}:{type_}" in only:
                yield isolated(head, type_)


def listed(told: dict[str, Any]) -> bool:
    """Whether the model costs more than LIMIT, and at most as much as DENSE says."""
    return LIMIT < told["share"] <= DENSE.get(told["type"], (0.0, ""))[0]


def line(told: dict[str, Any]) -> str:
    """A model's line of the table."""
    if "failed" in told:
        return f"| {told['head']} | {told['type']} | | | | not run: {told['failed']} |"
    reason = DENSE[told["type"]][1] if listed(told) else ""
    reason = reason or "; ".join(f"`{name}`: {why}" for name, why in told["densified"].items())
    return (
        f"| {told['head']} | {told['type']} | {told['dtype']} | {told['error']:.0e} | {told['share']:.3f} | {reason} |"
    )


def main(only: list[str]) -> int:
    """Print the table and a summary. Returns 1 if a gradient is wrong, or too dear without a reason in DENSE."""
    print(f"torch {torch.__version__}, transformers {version('transformers')}, {len(ROWS)} of {N} rows\n")
    print("| class | type | dtype | error | FLOPs | reason |\n|---|---|---|---|---|---|")
    every: list[dict[str, Any]] = []
    for told in trials(only):
        every.append(told)
        print(line(told), flush=True)
    wrong: list[str] = []
    for head in HEADS:
        ran = [told for told in every if told["head"] == head and "failed" not in told]
        dear = [told for told in ran if told["share"] > LIMIT]
        off = [told["type"] for told in ran if not told["error"] <= ERROR]
        wrong += off + [told["type"] for told in dear if not listed(told)]
        wrong += [t["type"] for t in every if t["head"] == head and t.get("failed", "").startswith("rowprop")]
        tried, exact, within = sum(told["head"] == head for told in every), len(ran) - len(off), len(ran) - len(dear)
        print(f"\n| {head} | {tried} | {len(ran)} | {exact} | {within} |")
    print(f"\nwrong, or dear without a reason: {' '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    torchvision_models()
    import_module("transformers.modeling_utils")  # once, not in each process
    sys.exit(main(sys.argv[1:]))
