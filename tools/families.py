"""The families of torchvision, timm and transformers that people train, made tiny, with random weights.

Entries are those of the zoo. The packages are imported when a model is built, so that the table can be read without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import Batch, C, Entry, Losses, N, Net, T, V, classify, frozen, image, language, vectors

TORCHVISION: list[Entry] = []
TIMM: list[Entry] = []
TRANSFORMERS: list[Entry] = []
TOKENS: list[Entry] = []
"""Those of transformers whose output is (N, T, C), but for decoders, which have a table of their own."""


PAGE = Path(__file__).parent.parent / "docs" / "model-families.md"
SINGLE = {"Gemma 2, eager": "partly", "Gemma 3, sdpa": "partly", "Mixtral, sdpa, grouped_mm experts": "only"}
"""Models that compute in float32 whatever the dtype; ``"only"``: there is no kernel for float64."""


def frozen_entry(entry: Entry) -> Entry:
    """The entry on running statistics, with which BatchNorm does not mix rows."""
    return replace(entry, build=lambda: frozen(entry.build()))


def alive(model: nn.Module) -> nn.Module:
    """Draw parameters that start near zero (heads, biases, layer scales): they would stop the gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() < 1e-3:
                parameter.normal_(std=0.1)
    return model


# --- torchvision -----------------------------------------------------------------------------------------------------


def load(name: str) -> Any:
    """A module that imports torchvision: PyPI's is built for CUDA, and beside a torch for CPUs it lacks two ops."""
    try:
        return import_module(name)
    except RuntimeError:
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module(name)


def torchvision_models() -> Any:
    return load("torchvision.models")


def vision(
    name: str, build: Callable[[Any], nn.Module], size: int = 32, losses: Losses = classify, dims: int = 2
) -> None:
    """Enter a model that a function builds from the package ``torchvision.models``."""
    batch = image(size, dims=dims)
    TORCHVISION.append(Entry("torchvision", name, lambda: alive(build(torchvision_models())), batch, losses))


def regnet(models: Any) -> nn.Module:
    blocks = models.regnet.BlockParams.from_init_params(4, 8, 8.0, 2.0, 8, se_ratio=0.25)
    return models.RegNet(blocks, num_classes=C, stem_width=8)


def efficientnet(models: Any) -> nn.Module:
    block = models.efficientnet.MBConvConfig
    blocks = [block(1, 3, 1, 8, 8, 1), block(6, 3, 2, 8, 16, 2), block(6, 5, 2, 16, 24, 2)]
    return models.EfficientNet(blocks, dropout=0.2, num_classes=C)


def efficientnet_v2(models: Any) -> nn.Module:
    fused, block = models.efficientnet.FusedMBConvConfig, models.efficientnet.MBConvConfig
    blocks = [fused(1, 3, 1, 8, 8, 1), fused(4, 3, 2, 8, 16, 2), block(4, 3, 2, 16, 24, 2)]
    return models.EfficientNet(blocks, dropout=0.2, num_classes=C, last_channel=32)


def convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(8, 16, 2), block(16, 24, 2), block(24, None, 1)], 0.2, 0.1, num_classes=C)


def swin_v2(models: Any) -> nn.Module:
    module = models.swin_transformer
    kinds = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return models.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=C, **kinds)


def vgg(models: Any) -> nn.Module:
    features = models.vgg.make_layers([4, "M", 8, "M", 16, "M"], batch_norm=True)
    model = models.VGG(features, num_classes=C)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(2), nn.Sequential(nn.Linear(64, 16), nn.Linear(16, C))
    return model


def with_auxiliary_heads(model: nn.Module, batch: Batch) -> Tensor:
    """GoogLeNet's and Inception's loss: heads on the way count for less."""
    x, target = batch
    out = model(x)
    heads = [F.cross_entropy(logits, target, reduction="none") for logits in out if logits is not None]
    return heads[0] + 0.3 * sum(heads[1:])


def video_resnet(models: Any) -> nn.Module:
    r3d = models.video.resnet
    return r3d.VideoResNet(r3d.BasicBlock, [r3d.Conv3DSimple] * 4, [1] * 4, r3d.BasicStem, num_classes=C)


def video_mvit(models: Any) -> nn.Module:
    block, three, one = models.video.mvit.MSBlockConfig, [3, 3, 3], [1, 1, 1]
    blocks = [block(1, 8, 16, three, three, [1, 2, 2], one), block(2, 16, 16, three, three, one, one)]
    kinds = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    first = {"patch_embed_kernel": (3, 3, 3), "patch_embed_stride": (2, 2, 2), "patch_embed_padding": (1, 1, 1)}
    return models.video.MViT((8, 8), 8, blocks, num_classes=C, **kinds, **first)


def each_pixel(model: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    logits = model(x)["out"]
    where = target[:, None, None].expand(-1, *logits.shape[2:])
    return F.cross_entropy(logits, where, reduction="none").mean((1, 2))


def deeplab(models: Any) -> nn.Module:
    backbone = models.mobilenet_v3_small(width_mult=0.25).features[:4]
    body = models._utils.IntermediateLayerGetter(backbone, {"3": "out"})
    width = backbone(torch.zeros(1, 3, 32, 32)).shape[1]
    return models.segmentation.DeepLabV3(body, models.segmentation.deeplabv3.DeepLabHead(width, C, (2, 4)))


def lraspp(models: Any) -> nn.Module:
    backbone = models.mobilenet_v3_small(width_mult=0.25).features[:5]
    body = models._utils.IntermediateLayerGetter(backbone, {"1": "low", "4": "high"})
    with torch.no_grad():
        out = body.eval()(torch.zeros(1, 3, 32, 32))
    return models.segmentation.LRASPP(body.train(), out["low"].shape[1], out["high"].shape[1], C, 16)


one_each = {"num_classes": C, "layers": [1, 1, 1, 1]}
inverted = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]
vision("ResNet", lambda models: models.ResNet(models.resnet.BasicBlock, **one_each))
vision("ResNeXt", lambda models: models.ResNet(models.resnet.Bottleneck, groups=4, width_per_group=4, **one_each))
vision("RegNet", regnet)
vision("MobileNetV2", lambda models: models.MobileNetV2(C, 0.25, inverted))
vision("MobileNetV3", lambda models: models.mobilenet_v3_small(width_mult=0.25, num_classes=C))
vision("MNASNet", lambda models: models.MNASNet(0.25, C))
vision("EfficientNet", efficientnet)
vision("EfficientNetV2", efficientnet_v2)
vision("ConvNeXt", convnext)
vision("Swin", lambda models: models.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [2, 2], num_classes=C))
vision("Swin V2", swin_v2, 64)
vision("ViT", lambda models: models.VisionTransformer(16, 4, 2, 2, 16, 32, dropout=0.1, num_classes=C), 16)
vision("MaxViT", lambda models: models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.2, num_classes=C))
vision("DenseNet", lambda models: models.DenseNet(4, (2, 2, 2, 2), 8, drop_rate=0.1, num_classes=C))
saving = {"num_classes": C, "memory_efficient": True}
vision("DenseNet, checkpointed", lambda models: models.DenseNet(4, (2, 2, 2, 2), 8, **saving))
vision("ShuffleNetV2", lambda models: models.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 48], num_classes=C))
vision("SqueezeNet", lambda models: models.SqueezeNet("1_1", num_classes=C), 64)
vision("VGG with BatchNorm", vgg)
plain = {"num_classes": C, "init_weights": False}
vision("GoogLeNet", lambda models: models.GoogLeNet(**plain), 64, with_auxiliary_heads)
vision("Inception v3", lambda models: models.Inception3(**plain, aux_logits=False), 75)
vision("R3D", video_resnet, 8, dims=3)
vision("MViT v2", video_mvit, 8, dims=3)
shifted = [2, 2, 2], 8, [2, 2], [2, 2], [2, 2, 2]
vision("Swin 3D", lambda models: models.video.SwinTransformer3d(*shifted, num_classes=C), 8, dims=3)
vision("DeepLabV3", deeplab, losses=each_pixel)
vision("LR-ASPP", lraspp, losses=each_pixel)

# --- timm ------------------------------------------------------------------------------------------------------------


def image_model(family: str, name: str, size: int = 32, share: float = 1.0, **config: Any) -> None:
    """Enter a model by timm's name for it, or by its class where the name fixes the size."""

    def build() -> nn.Module:
        torchvision_models()  # timm imports torchvision
        import timm

        module, _, class_ = name.rpartition(".")
        if module:
            return alive(getattr(import_module(f"timm.models.{module}"), class_)(num_classes=C, **config))
        return alive(timm.create_model(name, num_classes=C, **config))

    TIMM.append(Entry("timm", family, build, image(size), classify, share=share))


tiny = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
image_model("ViT", "vit_tiny_patch16_224", 16, drop_path_rate=0.2, **tiny)
image_model("DeiT, distilled", "deit_tiny_distilled_patch16_224", 16, **tiny)
image_model("BEiT", "beit_base_patch16_224", 16, **tiny)
image_model("EVA-02", "eva02_tiny_patch14_224", 16, **tiny)
image_model("CaiT", "cait_xxs24_224", 16, **tiny)
image_model("XCiT", "xcit_nano_12_p8_224", 32, **{**tiny, "img_size": 32, "patch_size": 8})
image_model("MLP-Mixer", "mlp_mixer.MlpMixer", 16, img_size=16, patch_size=4, embed_dim=16, num_blocks=2)
image_model("PVT v2", "pvt_v2_b0", 32, depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 24), num_heads=(1, 2, 2, 4))
image_model("Twins", "twins_svt_small", 32, img_size=32, depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32))
image_model(
    "Swin V2", "swinv2_tiny_window8_256", 64, img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
)
image_model("DaViT", "davit_tiny", 32, depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 24), num_heads=(1, 2, 2, 3))
image_model("FocalNet", "focalnet.FocalNet", 32, depths=(1, 1), embed_dim=8, focal_levels=(2, 2), focal_windows=(3, 3))
image_model("PoolFormer", "poolformer_s12", 32)
image_model("CoAtNet", "coatnet_pico_rw_224", 64, img_size=64)
image_model("MobileViT", "mobilevit_xxs", 64)
image_model("EdgeNeXt", "edgenext_xx_small", 32, depths=(1, 1, 1, 1), dims=(8, 16, 16, 24))
image_model("LeViT", "levit_128s", 64, img_size=64)
image_model("FastViT", "fastvit_t8", 32, layers=(1, 1, 1, 1))
image_model("ConvNeXt V2", "test_convnext2", 32)
image_model("ConvMixer", "convmixer.ConvMixer", 32, dim=16, depth=2)
image_model("ResNet-D", "resnet26d", 32, layers=(1, 1, 1, 1))
image_model("SE-ResNet", "seresnet50", 32, layers=(1, 1, 1, 1))
image_model("Res2Net", "res2net50_26w_4s", 32, layers=(1, 1, 1, 1))
image_model("ResNeSt", "resnest14d", 32, layers=(1, 1, 1, 1))
image_model("SK-ResNet", "skresnet18", 32, layers=(1, 1, 1, 1))
image_model("NFNet", "test_nfnet", 32)
image_model("RegNetY", "regnety_002", 32)
image_model("EfficientNet", "test_efficientnet", 32)
image_model("GhostNet", "ghostnet_050", 32)
image_model("HRNet", "hrnet_w18_small", 32)
image_model("VoVNet", "ese_vovnet19b_slim_dw", 32)
image_model("RepVGG", "repvgg_a0", 32)
image_model("DPN", "dpn48b", 32)
image_model("DLA", "dla46x_c", 32)
sequencer = {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "hidden_sizes": (4, 8, 8, 8)}
image_model("Sequencer", "sequencer2d_s", 32, share=1.3, **sequencer)

# --- transformers ----------------------------------------------------------------------------------------------------


def configured(type_: str, head: str, attention: str, experts: str | None = None, **config: Any) -> Any:
    """A model type of transformers, under one of its ``AutoModel`` heads."""
    if find_spec("torchvision"):
        torchvision_models()  # transformers imports it
    import transformers

    made = transformers.AutoConfig.for_model(type_, **config)
    made._experts_implementation = experts
    return getattr(transformers, head).from_config(made, attn_implementation=attention)


def pretrained(
    family: str,
    type_: str,
    head: str,
    batch: Callable[[], Batch],
    *names: str,
    attention: str = "sdpa",
    experts: str | None = None,
    losses: Losses = classify,
    densifies: tuple[str, ...] = (),
    output: str = "logits",
    **config: Any,
) -> None:
    """Enter a model type of transformers under one of its ``AutoModel`` heads, called by the names of its inputs.

    One that returns logits of a row, or of each word, is of the table of rows; one of each word of the table of tokens,
    as is one that returns anything else.
    """

    def forward(net: Any, *inputs: Tensor) -> Tensor:
        return net.model(**dict(zip(names, inputs, strict=True)))[output]

    def build() -> nn.Module:
        return Net(forward, model=alive(configured(type_, head, attention, experts, **config).train()))

    name = f"{family}, {attention}" + (f", {experts} experts" if experts else "")
    entry = Entry("transformers", name, build, batch, losses, densifies)
    if output == "logits":
        TRANSFORMERS.append(entry)
    if output != "logits" or head in ("AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"):
        TOKENS.append(entry)


def padded(steps: int = T) -> Batch:
    """Padded tokens, and a mask of the tokens that are not padding."""
    tokens, target = language(steps)()
    return tokens, (torch.arange(steps) < torch.randint(2, steps + 1, (N, 1))).long(), target


def pairs() -> Batch:
    tokens, target = language()()
    return tokens, target, target.roll(-1, 1)


words = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16}
layers = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
grouped = {**words, **layers, "num_key_value_heads": 1}
experts = {**grouped, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}

masked_words = "AutoModelForMaskedLM", padded, "input_ids", "attention_mask"
pretrained("BERT", "bert", *masked_words, **words, **layers)
pretrained("BERT", "bert", *masked_words, **words, **layers, attention="eager")
pretrained("RoBERTa", "roberta", *masked_words, **words, **layers)
pretrained("DistilBERT", "distilbert", *masked_words, **words, dim=16, hidden_dim=24, n_layers=2, n_heads=2)
pretrained("ALBERT", "albert", *masked_words, **words, **layers, embedding_size=8)
pretrained("ELECTRA", "electra", *masked_words, **words, **layers, embedding_size=8)
pretrained("MPNet", "mpnet", *masked_words, **words, **layers, attention="eager")
pretrained(
    "DeBERTa-v2", "deberta-v2", "AutoModelForMaskedLM", lambda: padded(16), "input_ids", "attention_mask",
    **words, **layers, attention="eager", relative_attention=True,
    pos_att_type=["p2c", "c2p"], position_buckets=2, norm_rel_ebd="layer_norm", share_att_key=True,
)  # fmt: skip
pretrained("ModernBERT", "modernbert", *masked_words, **words, **layers)

causal_words = "AutoModelForCausalLM", padded, "input_ids", "attention_mask"
pretrained("GPT-2", "gpt2", *causal_words, **words, n_positions=16, n_embd=16, n_layer=2, n_head=2)
pretrained("GPT-2", "gpt2", *causal_words, **words, n_positions=16, n_embd=16, n_layer=2, n_head=2, attention="eager")
pretrained("GPT-NeoX", "gpt_neox", *causal_words, **words, **layers)
pretrained("OPT", "opt", *causal_words, **words, **layers, ffn_dim=24, word_embed_proj_dim=16)
pretrained("BLOOM", "bloom", *causal_words, **words, hidden_size=16, n_layer=2, n_head=2, attention="eager")
pretrained("Falcon", "falcon", *causal_words, **words, **layers)
pretrained("Llama", "llama", *causal_words, **grouped)
pretrained("Llama", "llama", *causal_words, **grouped, attention="eager")
pretrained("Mistral", "mistral", *causal_words, **grouped, sliding_window=3)
pretrained("Qwen2", "qwen2", *causal_words, **grouped)
pretrained("Qwen3", "qwen3", *causal_words, **grouped, head_dim=8)
pretrained("Gemma 2", "gemma2", *causal_words, **grouped, head_dim=8, attention="eager")
pretrained("Gemma 3", "gemma3_text", *causal_words, **grouped, head_dim=8)
pretrained("Phi", "phi", *causal_words, **words, **layers)
pretrained("Phi-3", "phi3", *causal_words, **grouped)
pretrained("OLMo 2", "olmo2", *causal_words, **grouped)
for kind in ("eager", "batched_mm", "grouped_mm"):
    pretrained("Mixtral", "mixtral", *causal_words, **grouped, num_local_experts=4, experts=kind)
shared = {**experts, "shared_expert_intermediate_size": 8}
pretrained("Qwen2-MoE", "qwen2_moe", *causal_words, **shared, experts="eager")
pretrained("Qwen3-MoE", "qwen3_moe", *causal_words, **experts, head_dim=8, experts="eager")
pretrained(
    "DeepSeek-V3", "deepseek_v3", *causal_words, **words, **layers, num_key_value_heads=2, moe_intermediate_size=8,
    n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
    kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, experts="eager",
)  # fmt: skip
pretrained("Mamba", "mamba", "AutoModelForCausalLM", language(), "input_ids", **words, **layers, state_size=4,
           attention="eager")  # fmt: skip

both = "AutoModelForSeq2SeqLM", pairs, "input_ids", "decoder_input_ids"
pretrained("T5", "t5", *both, **words, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
pretrained(
    "BART", "bart", *both, **words, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=0,
)  # fmt: skip

images = "AutoModelForImageClassification", image(16), "pixel_values"
patches = {**layers, "image_size": 16, "patch_size": 4, "num_labels": C}
pretrained("ViT", "vit", *images, **patches)
pretrained("DINOv2", "dinov2", *images, **patches)
pretrained("BEiT", "beit", *images, **patches, use_relative_position_bias=True)
pretrained("Swin", "swin", *images, image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
           window_size=2, num_labels=C)  # fmt: skip
features = "AutoModel", image(16), "pixel_values"
for family, type_ in (("ViT", "vit"), ("DINOv2", "dinov2"), ("BEiT", "beit")):
    pretrained(family, type_, *features, **patches, output="last_hidden_state")
queries = "AutoModelForObjectDetection", image(32), "pixel_values"
pretrained("YOLOS", "yolos", *queries, **{**patches, "image_size": [32, 32]}, num_detection_tokens=5,
           output="pred_boxes")  # fmt: skip
backbone = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
            "out_features": ["stage2"]}  # fmt: skip
pretrained(
    "DETR", "detr", *queries, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
    backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=5, num_labels=C, dropout=0.0,
    auxiliary_loss=False, output="pred_boxes", attention="eager",
)  # fmt: skip
pretrained("ConvNeXt", "convnext", *images, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=C,
           attention="eager")  # fmt: skip
pretrained("SegFormer", "segformer", *images, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
           hidden_sizes=[8, 16], num_attention_heads=[1, 2], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2],
           num_labels=C, attention="eager")  # fmt: skip


pretrained(
    "wav2vec 2.0", "wav2vec2", "AutoModelForAudioClassification", vectors(200), "input_values", **layers,
    conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, mask_time_prob=0.0, num_labels=C, vocab_size=V,
)  # fmt: skip
pretrained(
    "Whisper, encoder", "whisper", "AutoModelForAudioClassification", vectors(8, 12), "input_features", d_model=16,
    encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=8, max_source_positions=6,
    num_labels=C, vocab_size=V, pad_token_id=0,
)  # fmt: skip


def matching(model: nn.Module, batch: Batch) -> Tensor:
    """How far each image is from its own text. CLIP's contrastive loss compares all rows and so mixes them."""
    tokens, pixels, _ = batch
    out = model.model(input_ids=tokens, pixel_values=pixels)
    return 1 - (out.text_embeds * out.image_embeds).sum(-1)


def captions() -> Batch:
    pixels, target = image(16)()
    return torch.randint(3, V, (N, 6)), pixels, target


text_part = {**words, **layers, "projection_dim": 8}
image_part = {**layers, "image_size": 16, "patch_size": 4, "projection_dim": 8}
pretrained(
    "CLIP", "clip", "AutoModel", captions, losses=matching, text_config=text_part, vision_config=image_part,
    projection_dim=8,
)  # fmt: skip

ENTRIES = TORCHVISION + TIMM + TRANSFORMERS
